"""The gRPC messages between agents, people and the master: master.proto, the stubs made from it, and conversions.

The stubs are made by `make stubs` with a compiler as old as the oldest supported protobuf: older protobufs do not load
the code of newer compilers, and newer ones load that of older compilers. Functions turn messages into plain values and
records, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from elastic_ext.records.logged import as_json, fitting
from elastic_ext.records.measures import METRICS, MetricUnit
from elastic_ext.records.metrics import StepWindow

from . import master_pb2

__all__ = [
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "as_dict",
    "filled",
    "logged_of",
    "metrics_of",
    "put_logged",
    "put_metrics",
    "window_message",
    "window_record",
]

PROTOCOL = 1
"""The version of the protocol that agents and masters of this library speak; the only one so far."""
OLDEST_PROTOCOL = 1
"""The oldest version of the protocol that an agent of this library speaks as well."""


# --- messages as plain values, as JSON has them, and records of records/metrics.py as messages and back --------------

_Filled = TypeVar("_Filled", bound=Message)
_MAP = "metrics"
"""The field of a message for metrics that have no field of their own."""
_METRICS_OF: Mapping[str, Sequence[tuple[str, MetricUnit, bool]]] = {
    message.name: [
        (name, metric.unit, name in message.fields_by_name)
        for name, metric in METRICS.items()
        if metric.is_told and metric.unit is not None and (of_ranks or metric.over_ranks == "middle")
    ]
    for message, of_ranks in ((master_pb2.Worker.DESCRIPTOR, True), (master_pb2.Progress.DESCRIPTOR, False))
}
"""The metrics that each message has, of those that masters hear of: name, unit, and whether the message has a field for
it. A Progress has those with one value for the whole job, which is a median over ranks."""
_LOGGED = "logged."
"""What the names of numbers that the script has logged begin with in the map ``metrics``."""


def as_dict(message: Message) -> dict[str, Any]:
    """Every field of ``message`` by its name; None for a number that is not known and for a message that is absent.

    Metrics that have no field stand beside those that have one, the script's numbers in ``logged``.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name == _MAP:
            known = metrics_of(message)
            for name in (*(name for name, _, _ in _METRICS_OF[message.DESCRIPTOR.name]), *value):
                if not name.startswith(_LOGGED):
                    found.setdefault(name, known.get(name))
            found["logged"] = as_json(logged_of(message))
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif _is_repeated(field):
            found[field.name] = [as_dict(each) if isinstance(each, Message) else each for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = as_dict(value) if isinstance(value, Message) else value
    return found


def filled(message: _Filled, record: object) -> _Filled:
    """``message`` with what ``record``, a dataclass, has under the names of its fields; None is left absent."""
    names = {each.name for each in fields(record)}  # type: ignore[arg-type]
    for field in message.DESCRIPTOR.fields:
        if field.name not in names:
            continue
        value = getattr(record, field.name)
        if isinstance(value, Mapping):
            getattr(message, field.name).update(value)
        elif isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        elif value is not None:
            setattr(message, field.name, value)
    return message


def metrics_of(message: Message) -> dict[str, float]:
    """The metrics of a Worker or a Progress, by name; those that only a newer version knows are among them."""
    found: dict[str, float] = {
        name: value for name, value in getattr(message, _MAP).items() if not name.startswith(_LOGGED)
    }
    for name, unit, has_field in _METRICS_OF[message.DESCRIPTOR.name]:
        if has_field:
            if message.HasField(name):
                found[name] = getattr(message, name)
        elif not 0 <= found.get(name, 0.0) <= unit.most:
            del found[name]
        elif name in found and unit.is_whole:
            found[name] = int(found[name])
    return found


def put_metrics(message: Message, values: Mapping[str, Any]) -> None:
    """Put the metrics ``values``, by name, into a Worker or a Progress; values out of bounds are left out.

    A metric without a field of its own goes into the map ``metrics``.
    """
    for name, unit, has_field in _METRICS_OF[message.DESCRIPTOR.name]:
        value = values.get(name)
        if value is None or not 0 <= value <= unit.most:
            continue
        if has_field:
            setattr(message, name, value)
        else:
            getattr(message, _MAP)[name] = value


def logged_of(message: Message) -> dict[str, float]:
    """The numbers that the script has logged, of a Worker or a Progress, by name; what cannot be one is left out.

    They are in the order of their names, since a map on the wire has none.
    """
    told = sorted(getattr(message, _MAP).items())
    return fitting({name.removeprefix(_LOGGED): value for name, value in told if name.startswith(_LOGGED)})


def put_logged(message: Message, values: Mapping[str, float]) -> None:
    """Put the numbers that the script has logged into the map ``metrics`` of a Worker or a Progress."""
    getattr(message, _MAP).update({f"{_LOGGED}{name}": value for name, value in fitting(values).items()})


def window_message(window: StepWindow) -> master_pb2.StepWindow:
    """The protobuf message of a profile window."""
    return filled(master_pb2.StepWindow(), window)


def window_record(message: master_pb2.StepWindow) -> StepWindow:
    """The record of the window in ``message``; its numbers are not checked."""
    found = {
        name: getattr(message, name) if kind is None else kind(getattr(message, name))
        for name, is_optional, kind in _OF_A_WINDOW
        if not is_optional or message.HasField(name)
    }
    return StepWindow(**found)


def _is_repeated(field: Any) -> bool:
    """Whether a field of a message is a list or a map; newer and older protobuf runtimes tell this differently."""
    found = getattr(field, "is_repeated", None)
    return bool(found() if callable(found) else found) if found is not None else field.label == field.LABEL_REPEATED


_OF_A_WINDOW: Sequence[tuple[Any, bool, Callable[[Any], Any] | None]] = [
    (field.name, field.has_presence, None if not _is_repeated(field) else dict if field.message_type else tuple)
    for field in master_pb2.StepWindow.DESCRIPTOR.fields
]
"""The fields of a window's message: name, whether it may be absent, and what a record has for a map or a list."""
