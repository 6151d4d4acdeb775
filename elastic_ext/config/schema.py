"""The JSON Schema of a config file, made from the table of keys, by which an editor completes and checks the file.

It refuses nothing that ``ElasticConfig.parse`` takes. It lets through some of what ``parse`` refuses: what JSON Schema
cannot say, such as 2.0 for an integer or the larger bound of a range before the smaller one, and what it could say only
at length, such as keys that exclude each other by their values.
"""

from __future__ import annotations

from .keys import DLROVERS_VERSIONED, KEYS, SECTION_TYPES, USER_NAME, USER_RULE, Integer, Key, Schema, keys_of

__all__ = ["json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """The schema of a whole config file, as JSON values."""
    sections = {kind.section: (kind.__doc__, keys_of(kind)) for kind in SECTION_TYPES}
    properties = {path: _described(key) for path, key in KEYS.items() if "." not in path}
    for section, (words, keys) in sections.items():
        rows = {path.partition(".")[2]: _described(key) for path, key in keys.items()}
        if section in DLROVERS_VERSIONED:
            rows["version"] = {"description": "DLRover's; it is not used", **Integer(0).schema}
        properties[section] = {
            "description": words,
            "type": "object",
            "properties": rows,
            "additionalProperties": False,
        }
    properties["checkpoint"]["not"] = {"required": ["steps", "epochs"]}
    properties["user"] = {
        "description": "names of your own, which trainer.knob() reads",
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": USER_NAME.at_most},
        "additionalProperties": USER_RULE.schema,
    }
    return {
        "$schema": _DIALECT,
        "title": "config.json of an elastic_ext job",
        "type": "object",
        "properties": properties,
        "required": ["version"],
        "additionalProperties": False,
    }


def _described(key: Key) -> Schema:
    """One key's schema, with the words that an editor shows for it."""
    return {"description": f"{key.meaning} ({key.rule.allowed})", **key.rule.schema}
