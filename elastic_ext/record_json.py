"""JsonRecord: frozen records as JSON and back, each value checked against the type that its field has."""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .strict_json import shown

__all__ = ["JsonRecord", "object_of", "record_of"]

_Record = TypeVar("_Record")
_Json = TypeVar("_Json", bound="JsonRecord")


class JsonRecord:
    """What a frozen dataclass inherits that stands in a file or goes to another process as JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[_Json], text: str) -> _Json:
        """The record that ``to_json`` gave, what is in its mappings as JSON has it; ValueError for anything else."""
        record = record_of(cls, object_of(text))
        record.check_read()
        return record

    def check_read(self) -> None:
        """ValueError where its values, which have the types of their fields, are still none that were written."""


def object_of(text: str) -> dict[str, Any]:
    """The one JSON object that ``text`` is; ValueError for anything else."""
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def record_of(kind: type[_Record], found: Mapping[str, Any]) -> _Record:
    """A record of ``kind``; what a newer version has added to it is left out. ValueError names the field that is amiss.

    A field may be missing where its dataclass has a default for it.
    """
    values, types_of = {}, _types_of(kind)  # type: ignore[arg-type]
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in found:
            values[field.name] = _value(types_of[field.name], found[field.name], field)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**values)


@functools.cache
def _types_of(kind: Hashable) -> Mapping[str, Any]:
    """Its fields' types, which take long to make out."""
    return get_type_hints(kind)


def _value(kind: Any, value: object, field: Field[Any]) -> Any:
    """What a record has for what JSON has: records within it for objects, and tuples for lists."""
    if _fits(value, kind):  # nearly all
        return value
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{field.name} is no object")
        return record_of(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:  # of any number of one kind
        (each_kind, *_) = get_args(kind)
        if not isinstance(value, list) or (
            is_dataclass(each_kind) and not all(isinstance(each, dict) for each in value)
        ):
            raise ValueError(f"{field.name} is no list{' of objects' * is_dataclass(each_kind)}")
        return tuple([_value(each_kind, each, field) for each in value])
    if get_origin(kind) in (Union, types.UnionType) and isinstance(value, dict):
        for each in filter(is_dataclass, get_args(kind)):
            return record_of(each, value)  # type: ignore[arg-type]
    raise ValueError(f"{field.name} is {shown(value)}; allowed: {field.type}")


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
    """Whether it is one that sums and differences can be made of."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
