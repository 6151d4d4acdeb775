"""Tracing: one step as torch's own profiler sees it: what of communication nothing was computed beside, and what took
longest.

Where passes wait for other ranks in many places, as those of a sharded model do, that is not to be told from hooks.
The profiler's raw events are read, which it gives in private and in a hundredth of the time that its tables take:
tried first with a small one, and done without where this torch gives others. There is one profiler in a process: where
somebody has one of their own, it is left alone.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from elastic_ext.records.metrics import StepTrace

from .spans import Span, length, outside

__all__ = ["Trace", "can_trace", "events_of", "is_profiling", "quiet_profile", "summed_up"]

_logger = logging.getLogger(__name__)

_MOST_EVENTS = 200_000
_NUM_TOP = 12
_HERE = "elastic_ext: a step that is traced"  # an event on the thread that trains
_OF_RANKS = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
_COMPUTES = ("aten::", "fsdp::")
_QUIET = "KINETO_LOG_LEVEL"  # torch 2.13's writes a line on stderr as it starts, and as it stops


class _Own(profile):
    """A profile of this room's; those that have ended may not have been collected yet."""


class Trace:
    """``begin`` and ``end`` it around a step, on the thread that trains."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: Any = None
        self._began = 0.0

    def begin(self) -> None:
        self._profile = quiet_profile()
        self._profile.start()
        with record_function(_HERE):
            self._began = time.perf_counter()

    def end(self) -> StepTrace | None:
        """What was seen; None where that was too much."""
        took = time.perf_counter() - self._began
        found, self._profile = self._profile, None
        found.stop()
        events = events_of(found)
        if events is None or len(events) > _MOST_EVENTS:
            return None
        return summed_up(events, rank=self._rank, step_seconds=took)


def can_trace() -> bool:
    """Whether this torch gives raw events, and nobody else may be asking for them."""
    if is_profiling():
        return False
    try:
        tried = quiet_profile()
        with tried, record_function(_HERE):
            torch.ones(2).add_(1)
        found = {each.name(): each for each in events_of(tried) or ()}
        added, here = found["aten::add_"], found[_HERE]
        if here.start_ns() <= added.start_ns() and added.start_thread_id() == here.start_thread_id():
            return True
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        _logger.debug("steps are not traced: %s", error)
    return False


def summed_up(events: Sequence[Any], *, rank: int, step_seconds: float) -> StepTrace:
    """A step's events; those of an accelerator, where it has some of both kinds, and else the training thread's."""
    threads = {event.start_thread_id() for event in events if event.name() == _HERE}
    computing: dict[bool, list[Span]] = {False: [], True: []}
    talking: dict[bool, list[Span]] = {False: [], True: []}
    top: Counter[str] = Counter()
    for event in events:
        name, is_device = event.name(), "CPU" not in str(event.device_type())
        span = event.start_ns(), event.start_ns() + event.duration_ns()
        if name.startswith(_OF_RANKS):
            talking[is_device].append(span)
        elif is_device or (name.startswith(_COMPUTES) and event.start_thread_id() in threads):
            computing[is_device].append(span)
            top[name] += event.duration_ns()
    is_device = bool(talking[True] and computing[True])
    return StepTrace(
        time=time.time(),
        rank=rank,
        step_seconds=step_seconds,
        communication_seconds=length(talking[is_device]) / 1e9,
        exposed_seconds=outside(talking[is_device], computing[is_device]) / 1e9,
        computing_seconds=length(computing[is_device]) / 1e9,
        top={name: nanoseconds / 1e9 for name, nanoseconds in top.most_common(_NUM_TOP)},
    )


def is_profiling() -> bool:
    """Whether there is any profile but those of this room: one that waits for its turn is not to be told otherwise."""
    is_on = getattr(torch.autograd, "_profiler_enabled", None)
    return (is_on is not None and is_on()) or any(
        issubclass(type(each), profile) and type(each) is not _Own for each in gc.get_objects()
    )


def quiet_profile(*, sees_memory: bool = False) -> Any:
    """A profile to start and to stop, of operations, and of what the allocator gives where that is wanted."""
    os.environ.setdefault(_QUIET, "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return _Own(activities=activities, profile_memory=sees_memory)


def events_of(found: Any) -> list[Any] | None:
    """The raw events of a profile that was stopped; None where this torch gives none."""
    results = getattr(getattr(found, "profiler", None), "kineto_results", None)
    return None if results is None else list(results.events())
