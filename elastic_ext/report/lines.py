"""Lines of a run directory's files, read one at a time and as records; what is no record is counted and left out.

Windows are read here by hand: a long run of many ranks has millions of them, and reading them as other records are read
would take minutes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_ext.records.files import open_regular
from elastic_ext.records.metrics import JobEvent, StepWindow

__all__ = ["Broken", "events_in", "windows_in"]

_MOST_LINE_BYTES = 1 << 16
_LEAST_TIME, _MOST_TIME = 1e8, 1e11
"""Seconds since 1970 that a clock may have shown: from 1973 on, for some thousand years."""
_MOST_COUNT = 1 << 53
_MOST_LENGTH = 1e10
_NUM_QUANTILES = 64
_COUNTS = ("rank", "world_size", "restart", "step", "num_steps", "config_version", "config_revision")
_LATER_COUNTS = ("num_samples", "num_tokens", "num_bytes", "num_detailed")
_SIZES = ("memory_bytes", "accelerator_bytes", "accelerator_peak_bytes")
_PARTS = ("processor_seconds", "typical")


class Broken:
    """Lines that are no records, and files that cannot be read."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.files: list[str] = []


def windows_in(path: Path, rank: int, broken: Broken, advance: Callable[[int], None]) -> Iterator[StepWindow]:
    """The windows of ``rank`` in a file; ``advance`` is told how many bytes were read."""
    for line in _lines(path, broken, advance):
        try:
            yield _window_of(line, rank)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            broken.num_lines += 1


def events_in(path: Path, broken: Broken) -> Iterator[JobEvent]:
    """The events in a file."""
    for line in _lines(path, broken, lambda num_bytes: None):
        try:
            event = JobEvent.from_json(line.decode())
            if not _LEAST_TIME < event.time < _MOST_TIME:
                raise ValueError("no time")
            yield event
        except (ValueError, RecursionError):
            broken.num_lines += 1


def _lines(path: Path, broken: Broken, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The lines that have an end; one without is still being written, or its writer died over it."""
    try:
        with open_regular(path) as file:
            is_within = False  # a line that is too long
            while line := file.readline(_MOST_LINE_BYTES):
                advance(len(line))
                is_whole = line.endswith(b"\n")
                if is_whole and not is_within and len(line) > 1:
                    yield line
                elif not is_within and len(line) > 1:
                    broken.num_lines += 1
                is_within = not is_whole
    except OSError as error:
        broken.files.append(f"{path}: {error.strerror or error}")


def _window_of(line: bytes, rank: int) -> StepWindow:
    """The window in a line; ValueError, KeyError or TypeError if there is none of this rank."""
    found: dict[str, Any] = json.loads(line)
    counts: dict[str, Any] = {name: _count(found[name]) for name in _COUNTS}
    begin, end = _number(found["begin"]), _number(found["end"])
    if counts["rank"] != rank or not _LEAST_TIME < begin <= end < _MOST_TIME:
        raise ValueError("of another rank, or of no time")
    values: dict[str, Any] = {name: _count(found[name]) for name in _LATER_COUNTS if name in found}
    values |= {name: _lengths(found.get(name, {})) for name in _PARTS}
    values |= {name: None if found.get(name) is None else _count(found[name]) for name in _SIZES}
    quantiles = tuple(map(_length, found.get("step_seconds", ())[:_NUM_QUANTILES]))
    seconds = _lengths(found["seconds"])
    return StepWindow(begin=begin, end=end, seconds=seconds, step_seconds=quantiles, **counts, **values)


def _count(value: object) -> int:
    if type(value) is int and 0 <= value < _MOST_COUNT:
        return value
    raise ValueError("no count")


def _number(value: object) -> float:
    if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise ValueError("no number")


def _length(value: object) -> float:
    found = _number(value)
    if not 0 <= found < _MOST_LENGTH:
        raise ValueError("no length of time")
    return found


def _lengths(value: dict[str, Any]) -> dict[str, float]:
    for each in value.values():
        if type(each) not in (int, float) or not 0 <= each < _MOST_LENGTH:  # NaN is neither
            raise ValueError("no length of time")
    return value
