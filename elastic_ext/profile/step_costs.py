"""What a step costs: its operations and bytes, the best that the device does, and one step as torch's
profiler sees it.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepTrace
from elastic_ext.torch_private.module_hooks import is_compiled, num_graphs_compiled

from .phases import Span, length, outside

__all__ = [
    "Census",
    "Trace",
    "calibrate",
    "can_trace",
    "events_of",
    "is_profiling",
    "quiet_profile",
    "trace_of",
    "why_no_census",
]

_logger = logging.getLogger(__name__)


# --- what one step asks of its machine: operations, the bytes that they move, the arithmetic in them -----------------
# A dispatch mode stands between autograd and the operations for one step, sees each go by, and changes none. That makes
# the step about twice as long, once.

_COMMUNICATION_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_MOST_DEPTH = 4  # of containers among an operation's arguments


class Census(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations, bytes and flops of a step: ``with`` it around the step.

    ``is_optimizing`` says whether an operation is the optimizer's.
    """

    # While this mode is on, torch refuses operators that take functions without the first of these, and to compile
    # without ``ignore_compile_internals``.
    supports_higher_order_operators = True

    def __init__(self, is_optimizing: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_optimizing = is_optimizing
        self._ops, self._bytes = [0, 0], [0, 0]  # of passes and the loop, of the optimizer
        self._flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code runs as it is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor then calls the operation on this rank's shards, which is counted
        result = func(*args, **(kwargs or {}))
        with suppress(RuntimeError, TypeError, ValueError, AttributeError):  # a kind of tensor that tells no size
            self._count(func, args, kwargs or {}, result)
        return result

    def record(self, *, rank: int, num_samples: int, num_micro_steps: int, device: str) -> StepCensus:
        """The counts of a micro-step and of the optimizer's step; all micro-steps took ``num_samples`` together."""
        passes, optimizer = 0, 1
        return StepCensus(
            time=time.time(),
            rank=rank,
            num_samples=num_samples // num_micro_steps,
            num_ops=self._ops[passes] // num_micro_steps + self._ops[optimizer],
            num_bytes=self._bytes[passes] // num_micro_steps + self._bytes[optimizer],
            num_flops=self._flops // num_micro_steps,
            optimizer_ops=self._ops[optimizer],
            optimizer_bytes=self._bytes[optimizer],
            device=device,
        )

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace in _COMMUNICATION_NAMESPACES:
            return
        place = int(self._is_optimizing())
        self._ops[place] += 1
        if not func.is_view:
            self._bytes[place] += _num_bytes((args, list(kwargs.values()), result), _MOST_DEPTH)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._flops += int(formula(*args, **kwargs, out_val=result))


def why_no_census(model: nn.Module) -> str | None:
    """Why no census can be taken of a step of this model; None where one can."""
    if isinstance(model, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if any(map(is_compiled, model.modules())):
        return "it is compiled, and its operations are not seen one by one"
    if num_graphs_compiled() > 0:
        return "something is compiled in this process, and its operations are not seen one by one"
    return None


def _num_bytes(values: Iterable[Any], depth: int) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)) and depth > 0:
            total += _num_bytes(value, depth - 1)
    return total


# --- what a device of this machine does at best, which takes less than a tenth of a second to measure ----------------

_SIDE, _SIDE_ON_GPU = 512, 4096
_NUM_FLOATS, _NUM_FLOATS_ON_GPU = 1 << 22, 1 << 26
_NUM_SMALL = 200
_TRIES = 5


def calibrate(device: torch.device, *, host: str) -> NodeCalibration:
    """What the device does at best, measured now: the best of some tries, as disturbances make them slower."""
    is_cpu = device.type == "cpu"
    side, num_floats = (_SIDE, _NUM_FLOATS) if is_cpu else (_SIDE_ON_GPU, _NUM_FLOATS_ON_GPU)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    with torch.no_grad():
        square = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(square)
        row = torch.ones(num_floats, device=device)
        copied, small = torch.empty_like(row), torch.ones(4, device=device)

        def have_small_ones() -> None:
            for _ in range(_NUM_SMALL):
                torch.add(small, 1)

        multiply = _least_seconds(lambda: torch.mm(square, square, out=product), device)
        copy = _least_seconds(lambda: torch.add(row, 1, out=copied), device)
        small_ones = _least_seconds(have_small_ones, device)
    return NodeCalibration(
        time=time.time(),
        host=host,
        device=_name(device),
        num_threads=torch.get_num_threads(),
        torch=torch.__version__,
        flops_per_second=2.0 * side**3 / multiply,
        bytes_per_second=2.0 * row.numel() * row.element_size() / copy,
        seconds_per_op=small_ones / _NUM_SMALL,
    )


def _least_seconds(act: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return max(best, 1e-9)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --- one step as torch's own profiler sees it ------------------------------------------------------------------------
# Tracing tells how long communication takes beside which nothing is computed, and which operations take longest.
#
# Where passes wait for other ranks in many places, as those of a sharded model do, hooks cannot tell how long. The
# profiler's raw events are read by a private interface, in a hundredth of the time that its tables take. First a small
# profile is tried, and nothing is traced where this torch gives other events. There is one profiler in a process: where
# somebody else uses it, it is left alone.

_MOST_EVENTS = 200_000
_NUM_TOP = 12
_TRAINING_THREAD = "elastic_ext: a step that is traced"  # the name of an event that tells which thread trains
_COMMUNICATION_PREFIXES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
_COMPUTES = ("aten::", "fsdp::")
_QUIET = "KINETO_LOG_LEVEL"  # torch 2.13's writes a line on stderr as it starts, and as it stops


class _Own(profile):
    """A profiler that ``quiet_profile`` has made, which ``is_profiling`` thereby knows from those of others.

    It may be found among the objects of the process after its end, until it is garbage-collected.
    """


class Trace:
    """Traces a step with torch's profiler: ``begin`` and ``end`` around it, on the training thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: Any = None
        self._began = 0.0

    def begin(self) -> None:
        self._profile = quiet_profile()
        self._profile.start()
        with record_function(_TRAINING_THREAD):
            self._began = time.perf_counter()

    def end(self) -> StepTrace | None:
        """The trace of the step; None where it had too many events, or this torch gives none."""
        took = time.perf_counter() - self._began
        found, self._profile = self._profile, None
        found.stop()
        events = events_of(found)
        if events is None or len(events) > _MOST_EVENTS:
            return None
        return trace_of(events, rank=self._rank, step_seconds=took)


def can_trace() -> bool:
    """Whether steps can be traced: this torch gives raw events, and nobody else uses the profiler."""
    if is_profiling():
        return False
    try:
        tried = quiet_profile()
        with tried, record_function(_TRAINING_THREAD):
            torch.ones(2).add_(1)
        found = {each.name(): each for each in events_of(tried) or ()}
        added, here = found["aten::add_"], found[_TRAINING_THREAD]
        if here.start_ns() <= added.start_ns() and added.start_thread_id() == here.start_thread_id():
            return True
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        _logger.debug("steps are not traced: %s", error)
    return False


def trace_of(events: Sequence[Any], *, rank: int, step_seconds: float) -> StepTrace:
    """A step's trace, from the profiler's events.

    Where an accelerator has both communicated and computed, its events alone count; else those of the processor, with
    all that its threads communicate and what the training thread computes. ``top`` is of an accelerator wherever it has
    computed: the processor's operations only start what it computes.
    """
    threads = {event.start_thread_id() for event in events if event.name() == _TRAINING_THREAD}
    computing: dict[bool, list[Span]] = {False: [], True: []}
    talking: dict[bool, list[Span]] = {False: [], True: []}
    top: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for event in events:
        name, is_device = event.name(), "CPU" not in str(event.device_type())
        span = event.start_ns(), event.start_ns() + event.duration_ns()
        if name.startswith(_COMMUNICATION_PREFIXES):
            talking[is_device].append(span)
        elif is_device or (name.startswith(_COMPUTES) and event.start_thread_id() in threads):
            computing[is_device].append(span)
            top[is_device][name] += event.duration_ns()
    is_device = bool(talking[True] and computing[True])
    longest = top[True] or top[False]
    return StepTrace(
        time=time.time(),
        rank=rank,
        step_seconds=step_seconds,
        communication_seconds=length(talking[is_device]) / 1e9,
        exposed_seconds=outside(talking[is_device], computing[is_device]) / 1e9,
        computing_seconds=length(computing[is_device]) / 1e9,
        top={name: nanoseconds / 1e9 for name, nanoseconds in longest.most_common(_NUM_TOP)},
    )


def is_profiling() -> bool:
    """Whether torch's profiler is on, or somebody else has one that they may start; they are not to be disturbed.

    One that is of no use any more counts as long as it is not garbage-collected.
    """
    is_on = getattr(torch.autograd, "_profiler_enabled", None)
    return (is_on is not None and is_on()) or any(
        issubclass(type(each), profile) and type(each) is not _Own for each in gc.get_objects()
    )


def quiet_profile(*, sees_memory: bool = False) -> Any:
    """A profiler of operations, without lines on stderr, to start and to stop; on request of memory too."""
    os.environ.setdefault(_QUIET, "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return _Own(activities=activities, profile_memory=sees_memory)


def events_of(found: Any) -> list[Any] | None:
    """The raw events of a profile that was stopped; None where this torch gives none."""
    results = getattr(getattr(found, "profiler", None), "kineto_results", None)
    return None if results is None else list(results.events())
