"""ElasticConfig: the one value that says what training should be doing.

Here is what can be done with the value: parse it, lay it over start-up values, revise it, compare two. The table of
keys (which is part of this module's names), the sections and the rules of single values are in keys.py; what a file
may be at all is in records/json.py.

Words: a *version* is a whole config that somebody put in place; a *revision* is a change made to it inside the job
(version 7, revision 2). A *key* is a dotted name (``dataloader.batch_size``); the part before the dot names its
*section*. An *absent* key of a file means the key's value in the config that was resumed from a checkpoint, else its
start-up value. Without either it is absent from the config in force too: the table says what that means ("absent:
0.06"), and otherwise the script's own setting stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.json import can_be_written, read_object, shown

from .keys import (
    DLROVERS_VERSIONED,
    KEYS,
    SECTION_TYPES,
    SECTIONS,
    USER_NAME,
    USER_RULE,
    WRITABLE,
    CheckpointSection,
    CommunicationSection,
    DataloaderSection,
    Integer,
    OptimizerSection,
    ParallelismSection,
    Section,
    TuningSection,
    UserValue,
    Value,
    fields_of,
    key_table,
    null_refusal,
    section_of,
    unknown_key_refusal,
    unquoted,
)

__all__ = ["KEYS", "SECTIONS", "ElasticConfig", "key_table", "section_of"]

_MOST_REFUSALS = 50
_SECTION_NAMES: Mapping[str, type[Section]] = {kind.section: kind for kind in SECTION_TYPES}


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """What training should be doing: one versioned value, checked when it is made.

    Version 0 is what a script starts with where no file has said anything yet. ``user`` maps names of the user's
    own to JSON scalars and tuples of such; treat it as read-only.
    """

    version: int
    revision: int = 0
    reason: str = ""
    apply_at_step: int | None = None
    global_batch_size: int | None = None
    dataloader: DataloaderSection = field(default_factory=DataloaderSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    communication: CommunicationSection = field(default_factory=CommunicationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    tuning: TuningSection = field(default_factory=TuningSection)
    user: Mapping[str, UserValue] = field(default_factory=dict)
    _digest: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refusals = list(self._keep_fields())
        if refusals:
            raise ConfigError(refusals)

    def _keep_fields(self) -> Iterator[Refusal]:
        """Why fields outside of sections are refused; names and values of ``user`` are replaced as ``Section`` does."""
        for name, rule in (("version", Integer(0)), ("revision", Integer(0))):
            try:
                rule.check(getattr(self, name))
            except ValueError as error:
                yield Refusal(key=name, given=shown(getattr(self, name)), allowed=str(error))
        for name in ("reason", "apply_at_step", "global_batch_size"):
            value = getattr(self, name)
            try:
                if value is not None:
                    KEYS[name].rule.check(value)
            except ValueError as error:
                yield Refusal(key=name, given=shown(value), allowed=str(error))
        kept: dict[str, UserValue] = {}
        yield from _check_user(self.user, kept)
        object.__setattr__(self, "user", kept)

    @classmethod
    def parse(cls, data: bytes) -> ElasticConfig:
        """The config that a file's bytes hold; ConfigError names every key that was refused, and why."""
        return cls.from_dict(read_object(data), lowest_version=1)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, revision: int = 0, lowest_version: int = 0) -> ElasticConfig:
        """The config that ``to_dict`` gave; ConfigError names every key that was refused, and why."""
        refusals: list[Refusal] = []
        arguments: dict[str, Any] = {}
        for name, value in raw.items():
            if name in _SECTION_NAMES or name == "user":
                if not isinstance(value, dict):
                    refusals.append(Refusal(key=name, given=shown(value), allowed="an object"))
                elif name == "user":
                    arguments["user"] = value
                else:
                    _take_section(_SECTION_NAMES[name], value, arguments, refusals)
            elif name not in KEYS or "." in name:
                refusals.append(unknown_key_refusal(name, searched=len(refusals) < _MOST_REFUSALS))
            elif value is None and name != "version":  # which is checked below
                refusals.append(null_refusal(name))
            else:
                arguments[name] = value
        try:
            Integer(lowest_version).check(arguments.get("version"))
        except ValueError as error:
            given = shown(arguments.pop("version")) if "version" in arguments else "absent"
            advice = 'put "version": 1 at the top level, and a higher one at each change'
            refusals.append(Refusal(key="version", given=given, allowed=str(error), advice=advice))
        # Where the version was refused, 1 stands in for it: the other fields are checked too.
        return cls._build({"version": 1, **arguments, "revision": revision}, refusals)

    @classmethod
    def from_values(cls, values: Mapping[str, object], *, version: int = 0, reason: str = "") -> ElasticConfig:
        """The config that holds these dotted keys, such as ``{"optimizer.learning_rate": 1e-3, "user.mixup": 0.2}``."""
        arguments: dict[str, Any] = {"version": version, "reason": reason}
        sections: dict[str, dict[str, object]] = {}
        refusals: list[Refusal] = []
        for path, value in values.items():
            name, dot, rest = path.partition(".")
            if name == "user" and dot:
                sections.setdefault("user", {})[rest] = value
            elif path in ("version", "reason", "apply_at_step"):
                allowed = "all keys but version, reason and apply_at_step, which belong to a version as a whole"
                refusals.append(Refusal(key=path, given=shown(value), allowed=allowed, advice=f"leave {path} out"))
            elif path not in KEYS:
                refusals.append(unknown_key_refusal(path, searched=len(refusals) < _MOST_REFUSALS))
            elif value is None:
                refusals.append(null_refusal(path))
            elif dot:
                sections.setdefault(name, {})[rest] = value
            else:
                arguments[path] = value
        for name, section in sections.items():
            if name == "user":
                arguments["user"] = section
            else:
                _take_section(_SECTION_NAMES[name], section, arguments, refusals)
        return cls._build(arguments, refusals)

    @classmethod
    def _build(cls, arguments: Mapping[str, Any], refusals: Sequence[Refusal]) -> ElasticConfig:
        """The config of these fields; ConfigError with these ``refusals`` and those of the fields, if there are any."""
        try:
            config = cls(**arguments)
        except ConfigError as error:
            raise ConfigError(_at_most([*refusals, *error.refusals])) from None
        if refusals:
            raise ConfigError(_at_most(refusals))
        return config

    def values(self) -> dict[str, Value]:
        """Every key that is present, dotted, without version, revision, reason and apply_at_step."""
        result: dict[str, Value] = {}
        if self.global_batch_size is not None:
            result["global_batch_size"] = self.global_batch_size
        for kind in SECTION_TYPES:
            section: Section = getattr(self, kind.section)
            result.update({f"{kind.section}.{name}": v for name, v in fields_of(section) if v is not None})
        result.update({f"user.{name}": value for name, value in self.user.items()})
        return result

    def get(self, path: str) -> Value:
        """The value of a dotted key, None where it is absent or no key at all."""
        name, _, rest = path.partition(".")
        if name == "user":
            return self.user.get(rest)
        if path not in KEYS:
            return None
        holder: object = getattr(self, name) if rest else self
        value: Value = getattr(holder, rest or name)
        return value

    def over(self, base: ElasticConfig) -> ElasticConfig:
        """This config with its absent keys taken from ``base``, such as the start-up values.

        Not taken are ``checkpoint.now``, and what a key of this config ``replaces``.
        """
        mine = self.values()
        gone = {other for path in mine if path in KEYS for other in KEYS[path].replaces}
        kept = {path: value for path, value in base.values().items() if path not in gone and path != "checkpoint.now"}
        merged = ElasticConfig.from_values({**kept, **mine}, version=self.version, reason=self.reason)
        return replace(merged, revision=self.revision, apply_at_step=self.apply_at_step)

    def revise(self, changes: Mapping[str, object], reason: str) -> ElasticConfig:
        """The next revision of this version: these dotted keys ``over`` it, for this reason and at no given step."""
        changed = ElasticConfig.from_values(changes, version=self.version, reason=reason)
        return replace(changed.over(self), revision=self.revision + 1)

    def superseded_by(self, revised: ElasticConfig) -> ElasticConfig:
        """The values of this version that ``revised``, a revision of it, still has; with its reason and revision.

        ``apply_at_step`` is left out: a version that was revised has been in force.
        """
        superseded = self.differences(revised)
        kept = {path: value for path, value in self.values().items() if path not in superseded}
        left = ElasticConfig.from_values(kept, version=self.version, reason=revised.reason)
        return replace(left, revision=revised.revision)

    def differences(self, newer: ElasticConfig) -> dict[str, tuple[Value, Value]]:
        """Each key whose value is another one in ``newer``: what it was (None: absent) and what it is."""
        before, after = self.values(), newer.values()
        paths = [*before, *(path for path in after if path not in before)]
        pairs = {path: (before.get(path), after.get(path)) for path in paths}
        return {path: (old, new) for path, (old, new) in pairs.items() if _canonical(old) != _canonical(new)}

    def to_dict(self) -> dict[str, Any]:
        """The config as a file holds it: nested, absent keys left out, without the revision."""
        result: dict[str, Any] = {"version": self.version}
        if self.reason:
            result["reason"] = self.reason
        if self.apply_at_step is not None:
            result["apply_at_step"] = self.apply_at_step
        for path, value in self.values().items():
            name, dot, rest = path.partition(".")
            if dot:
                result.setdefault(name, {})[rest] = value
            else:
                result[name] = value
        return result

    def to_json(self) -> str:
        """The file's text: JSON, indented, ending in a newline."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @property
    def label(self) -> str:
        """ "version 7", or "version 7, revision 2"."""
        return f"version {self.version}" + (f", revision {self.revision}" if self.revision else "")

    @property
    def digest(self) -> str:
        """A hash of the config's values and of its version, revision, reason and ``apply_at_step``.

        It does not depend on how a file is written.
        """
        if not self._digest:
            canonical = _canonical([self.to_dict(), self.revision])
            object.__setattr__(self, "_digest", hashlib.sha256(canonical.encode()).hexdigest())
        return self._digest


def _canonical(value: object) -> str:
    """One text for each JSON value; 1, 1.0 and true, which are equal in Python, have unlike texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _at_most(refusals: Sequence[Refusal]) -> Sequence[Refusal]:
    """The refusals, or the first of them and how many more there are."""
    num_more = len(refusals) - _MOST_REFUSALS
    if num_more <= 0:
        return refusals
    more = Refusal(
        key="",
        given=f"{num_more} more values are wrong and not listed",
        allowed="no wrong value",
        advice="correct the listed ones first",
    )
    return [*refusals[:_MOST_REFUSALS], more]


def _take_section(
    kind: type[Section], raw: Mapping[str, object], arguments: dict[str, Any], refusals: list[Refusal]
) -> None:
    """Build one section into ``arguments``, or add what is wrong with it to ``refusals``."""
    known: dict[str, Any] = {}
    for name, value in raw.items():
        path = f"{kind.section}.{name}"
        if path in KEYS:
            if value is None:
                refusals.append(null_refusal(path))
            else:
                known[name] = value
        elif name == "version" and kind.section in DLROVERS_VERSIONED:
            refusals += _check_section_version(path, value)
        else:
            refusals.append(unknown_key_refusal(path, searched=len(refusals) < _MOST_REFUSALS))
    try:
        arguments[kind.section] = kind(**known)
    except ConfigError as error:
        refusals += error.refusals


def _check_section_version(path: str, value: object) -> list[Refusal]:
    rule = Integer(0)
    try:
        rule.check(value)
    except ValueError as error:
        return [Refusal(key=path, given=shown(value), allowed=str(error), advice="or leave it out")]
    return []


def _check_user(given: object, kept: dict[str, UserValue]) -> Iterator[Refusal]:
    """Why names and values of the section ``user`` are refused; those that are allowed are added to ``kept``."""
    if not isinstance(given, Mapping):
        yield Refusal(key="user", given=shown(given), allowed="an object")
        return
    for name, value in given.items():
        if not isinstance(name, str) or not 0 < len(name) <= USER_NAME.at_most:
            yield Refusal(key="user", given=f"a name of {len(str(name))} characters", allowed="1 to 200 characters")
            continue
        if not can_be_written(name):
            yield Refusal(key="user", given=f"the name {shown(name)}", allowed=WRITABLE)
            continue
        try:
            kept[name] = USER_RULE.check(value)
        except ValueError as error:
            yield Refusal(key=f"user.{unquoted(name)}", given=shown(value), allowed=str(error))
