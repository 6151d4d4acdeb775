"""What is kept of what nodes tell: numbers that can be so, words that are short, tables of a few rows. Pure.

Whoever speaks to a master may be broken, or mean harm: what does not fit is left out, and the rest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError

from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.text import on_one_line

from .wire import master_pb2

__all__ = [
    "MOST_SHARE",
    "MOST_WORDS",
    "amount",
    "fitting_table",
    "fitting_window",
    "fitting_worker",
    "window_in",
    "words",
]

MOST_SHARE = 1.001
MOST_WORDS = 240
_MOST_NAME = 32
_MOST_ROWS = 24
_MOST_QUANTILES = 16
_MOST_STATE = 32
_MOST_SECONDS = 1e9
_MOST_TIME = 1e11
_MOST_COUNT = 2**53
_MOST_BYTES = 2**60
_MOST_OF: Mapping[str, float] = {
    "step": _MOST_COUNT,
    "steps_per_second": 1e9,
    "samples_per_second": 1e12,
    "tokens_per_second": 1e15,
    "memory_bytes": _MOST_BYTES,
    "accelerator_bytes": _MOST_BYTES,
    "cpu_percent": 1e6,
    "gpu_percent": 100.0,
    "config_version": _MOST_COUNT,
    "config_revision": _MOST_COUNT,
    "activity_seconds": _MOST_SECONDS,
    "step_seconds": _MOST_SECONDS,
    "slow_step_seconds": _MOST_SECONDS,
    "num_not_finite": _MOST_COUNT,
    "num_skipped": _MOST_COUNT,
}


def amount(value: float, most: float) -> float | None:
    """``value`` where it is an amount at all, and no more than can be; None for NaN and the like."""
    return value if 0 <= value <= most else None


def words(text: str, most: int = MOST_WORDS) -> str:
    """``text`` on one line, no longer than that."""
    return on_one_line(text[:most])


def fitting_table(table: Mapping[str, float], most: float) -> dict[str, float]:
    """What fits of a table by names, such as phases."""
    found: dict[str, float] = {}
    for name, value in table.items():
        if len(found) < _MOST_ROWS and len(name) <= _MOST_NAME and name.isprintable() and 0 <= value <= most:
            found[name] = value
    return found


def fitting_worker(worker: master_pb2.Worker) -> master_pb2.Worker:
    """What fits of a report, without its windows."""
    found = master_pb2.Worker(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        state=words(worker.state, _MOST_STATE),
        activity=words(worker.activity),
        trouble=words(worker.trouble),
        shares=fitting_table(worker.shares, MOST_SHARE),
    )
    if worker.HasField("exit_code"):
        found.exit_code = worker.exit_code
    for name, most in _MOST_OF.items():
        if worker.HasField(name) and 0 <= getattr(worker, name) <= most:
            setattr(found, name, getattr(worker, name))
    return found


def window_in(data: bytes, rank: int) -> StepWindow | None:
    """The window of this rank that was written as ``data``, None where it is none: then no part of it counts."""
    try:
        return fitting_window(master_pb2.StepWindow.FromString(data), rank)
    except DecodeError:
        return None


def fitting_window(said: master_pb2.StepWindow, rank: int) -> StepWindow | None:
    """The window of this rank that was sent; None where anything in it cannot be."""
    tables = (said.seconds, said.processor_seconds, said.typical)
    numbers: Iterable[float] = (
        *(value for table in tables for value in table.values()),
        *said.step_seconds,
        *(said.waiting_seconds, said.computing_seconds),
        *(said.step, said.num_steps, said.num_samples, said.num_tokens, said.num_bytes, said.num_detailed),
    )
    fits = (
        said.rank == rank
        and 0 <= said.begin <= said.end <= _MOST_TIME
        and all(0 <= each <= 1e15 for each in numbers)
        and all(len(table) <= _MOST_ROWS and max(map(len, table), default=0) <= _MOST_NAME for table in tables)
        and len(said.step_seconds) <= _MOST_QUANTILES
    )
    if not fits:
        return None
    peak = said.accelerator_peak_bytes
    return StepWindow(
        begin=said.begin,
        end=said.end,
        rank=rank,
        world_size=said.world_size,
        restart=said.restart,
        step=said.step,
        num_steps=said.num_steps,
        config_version=said.config_version,
        config_revision=said.config_revision,
        seconds=dict(said.seconds),
        processor_seconds=dict(said.processor_seconds),
        typical=dict(said.typical),
        step_seconds=tuple(said.step_seconds),
        num_samples=said.num_samples,
        num_tokens=said.num_tokens,
        num_bytes=said.num_bytes,
        num_detailed=said.num_detailed,
        waiting_seconds=said.waiting_seconds if said.HasField("waiting_seconds") else None,
        computing_seconds=said.computing_seconds if said.HasField("computing_seconds") else None,
        is_settling=said.is_settling,
        accelerator_bytes=said.accelerator_bytes if said.HasField("accelerator_bytes") else None,
        accelerator_peak_bytes=peak if said.HasField("accelerator_peak_bytes") and peak <= _MOST_BYTES else None,
    )
