"""Frozen records read from JSON, each value checked against the type that its field has: the one place that does so."""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["object_of", "record_of", "with_record", "with_rows"]

_Record = TypeVar("_Record")


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
        if field.name not in found:
            if field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{field.name} is missing")
            continue
        value = found[field.name]
        if not _fits(value, types_of[field.name]):
            raise ValueError(f"{field.name} is {value!r}; allowed: {field.type}")
        values[field.name] = value
    return kind(**values)


def with_record(found: Mapping[str, Any], name: str, kind: type[Any]) -> dict[str, Any]:
    """``found`` with the object under ``name``, if there is one, as a record of ``kind``."""
    if name not in found:
        return dict(found)
    if not isinstance(found[name], dict):
        raise ValueError(f"{name} is no object")
    return {**found, name: record_of(kind, found[name])}


def with_rows(found: Mapping[str, Any], name: str, kind: type[Any]) -> dict[str, Any]:
    """``found`` with the list of objects under ``name`` as records of ``kind``."""
    rows = found.get(name)
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        raise ValueError(f"{name} is no list of objects")
    return {**found, name: tuple(record_of(kind, each) for each in rows)}


@functools.cache
def _types_of(kind: Hashable) -> Mapping[str, Any]:
    """Its fields' types, which take long to make out."""
    return get_type_hints(kind)


def _fits(value: object, kind: Any) -> bool:
    """Whether ``value`` is of a kind that a record's field may have."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    if origin is not None:  # tuple[...], whose rows are records by now, and Mapping[...]
        return isinstance(value, origin)
    if kind is float:
        return _is_number(value)
    if is_dataclass(kind):
        return isinstance(value, kind)  # type: ignore[arg-type]
    return type(value) is kind


def _is_number(value: object) -> bool:
    """Whether it is one that sums and differences can be made of."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
