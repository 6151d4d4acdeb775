"""JSON read strictly, and frozen records as JSON and back."""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from elastic_ext.errors import ConfigError, Refusal

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "JsonRecord",
    "JsonValue",
    "can_be_written",
    "object_of",
    "read_object",
    "read_value",
    "record_of",
    "records_of",
    "shown",
]


# --- JSON read strictly: what a config file may hold at all, before anyone asks what it says -------------------------
# Refuses, with the reason: files that are too large, invalid UTF-8, duplicate keys, NaN and infinities, numbers too
# long to be meant, text that could not be written back, nesting that is too deep, and anything but one object.

MAX_BYTES = 1 << 20
MAX_DEPTH = 8
_MAX_DIGITS = 19  # enough for any 64-bit integer

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def read_object(data: bytes) -> dict[str, JsonValue]:
    """The one JSON object in ``data``; ConfigError says what is wrong and what to do about it."""
    if len(data) > MAX_BYTES:
        _refuse(f"the config holds {len(data)} bytes", f"at most {MAX_BYTES} (1 MiB)")
    try:
        text = data.decode("utf-8-sig")  # editors on Windows put a byte order mark before UTF-8
    except UnicodeDecodeError as error:
        _refuse(f"the config is not UTF-8: {error.reason} at byte {error.start}", "UTF-8 text", "save it as UTF-8")
    if not text.strip():
        _refuse("the config is empty", "one JSON object", 'the smallest valid one is {"version": 1}')
    try:
        value = read_value(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        _refuse(f"the config is not JSON: {error.msg} at {where}", "one JSON object", "correct it there")
    if not isinstance(value, dict):
        _refuse(f"the config is {shown(value)}", "one JSON object", 'the smallest valid one is {"version": 1}')
    return value


def read_value(text: str) -> JsonValue:
    """The one JSON value in ``text``; JSONDecodeError if it is not JSON, ConfigError if a config cannot hold it."""
    try:
        value: JsonValue = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_short_integer,
            parse_float=_finite_number,
        )
    except RecursionError:
        _refuse("the config nests too deeply", f"at most {MAX_DEPTH} levels")
    _refuse_depth_and_surrogates(value)
    return value


def shown(value: object, limit: int = 80) -> str:
    """``value`` as JSON would write it, cut to ``limit`` characters and safe to print on one line."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "a value that nests too deeply"
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def can_be_written(text: str) -> bool:
    """Whether ``text`` holds whole characters only; half a surrogate pair has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(given: str, allowed: str, advice: str = "") -> NoReturn:
    raise ConfigError([Refusal(key="", given=given, allowed=allowed, advice=advice)])


def _object_without_duplicates(pairs: Sequence[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        _refuse(f"the key {shown(twice)} appears twice in one object", "each key once", "keep one of the two")
    return result


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"the config holds {name}", "finite numbers")


def _short_integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        _refuse(f"the config holds a number of {len(digits)} digits", f"at most {_MAX_DIGITS} digits")
    return int(digits)


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse(f"the config holds {digits[:40]}, which is infinite", "finite numbers")
    return number


def _refuse_depth_and_surrogates(value: JsonValue) -> None:
    level: list[JsonValue] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            _refuse(f"the config nests {depth} levels deep or more", f"at most {MAX_DEPTH} levels")
        inner: list[JsonValue] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
                texts = [*item, *(v for v in item.values() if isinstance(v, str))]
            elif isinstance(item, list):
                inner.extend(item)
                texts = [v for v in item if isinstance(v, str)]
            else:
                texts = [item] if isinstance(item, str) else []
            for text in texts:
                if not can_be_written(text):
                    _refuse(f"the config holds half a character in {ascii(text)[:60]}", "whole Unicode characters")
        level = [item for item in inner if isinstance(item, (dict, list))]


# --- frozen records as JSON and back, each value checked against the type that its field has -------------------------

_Record = TypeVar("_Record")
_Json = TypeVar("_Json", bound="JsonRecord")


class JsonRecord:
    """The base class of frozen dataclasses that are written to files, or sent to other processes, as JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        """The record as one line of JSON, without a line break."""
        return json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[_Json], text: str) -> _Json:
        """The record in ``text``, which ``to_json`` gave; values in its mappings stay as JSON has them.

        ValueError for any other text.
        """
        record = record_of(cls, object_of(text))
        record.check_read()
        return record

    def check_read(self) -> None:
        """ValueError where values, though of the right types, cannot have been written; called after reading."""


def object_of(text: str | bytes, *, once_each: bool = False) -> dict[str, Any]:
    """The one JSON object that ``text`` is; ValueError for anything else.

    With ``once_each`` also where an object in it has a key twice; else the last of them counts.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object_without_duplicates if once_each else None)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def records_of(kind: type[_Record], rows: object) -> tuple[_Record, ...]:
    """A record of ``kind`` for each of ``rows``; ValueError where that is no list of such objects."""
    found: tuple[_Record, ...] = _tuple_of(kind, rows, "rows", "")
    return found


def record_of(kind: type[_Record], found: Mapping[str, Any], *, place: str = "") -> _Record:
    """A record of ``kind`` from a JSON object; unknown fields, of newer versions, are left out.

    ValueError names the field that is wrong.

    A field may be missing where its dataclass has a default for it. ``place`` stands before the names of its fields
    in errors: where the record is in another one.
    """
    values, types_of = {}, _types_of(kind)  # type: ignore[arg-type]
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in found:
            kind_of_value, value = types_of[field.name], found[field.name]
            if not _fits(value, kind_of_value):  # seldom
                value = _value(kind_of_value, value, place + field.name, str(field.type))
            values[field.name] = value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{place}{field.name} is missing")
    return kind(**values)


@functools.cache
def _types_of(kind: Hashable) -> Mapping[str, Any]:
    """The types of a record's fields by name; cached, since working them out takes long."""
    return get_type_hints(kind)


def _value(kind: Any, value: object, name: str, allowed: str) -> Any:
    """A record's value for a JSON value of another type: records for objects, and tuples for lists."""
    if get_origin(kind) in (Union, types.UnionType) and isinstance(value, (dict, list)):
        for each in get_args(kind):
            if is_dataclass(each) if isinstance(value, dict) else get_origin(each) is tuple:
                kind = each
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is no object")
        return record_of(kind, value, place=f"{name}.")  # type: ignore[arg-type]
    if get_origin(kind) is tuple:  # of any number of one kind
        return _tuple_of(get_args(kind)[0], value, name, allowed)
    raise ValueError(f"{name} is {shown(value)}; allowed: {allowed}")


def _tuple_of(kind: Any, value: object, name: str, allowed: str) -> Any:
    """A tuple of values of one kind, from a JSON list."""
    if not isinstance(value, list) or (is_dataclass(kind) and not all(isinstance(each, dict) for each in value)):
        raise ValueError(f"{name} is no list{' of objects' * is_dataclass(kind)}")
    return tuple(
        [
            each if _fits(each, kind) else _value(kind, each, f"{name}[{number}]", allowed)
            for number, each in enumerate(value)
        ]
    )


def _fits(value: object, kind: Any) -> bool:
    """Whether ``value`` is of a kind that a record's field may have, and that JSON has too."""
    if kind is float:
        return _is_number(value)
    if type(value) is kind:
        return True
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    return origin is Mapping and isinstance(value, Mapping)


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite number, and no boolean."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
