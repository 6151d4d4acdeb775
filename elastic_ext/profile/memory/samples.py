"""MemorySample: what memory the passes of a real micro-step take, measured once for each new size."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from elastic_ext.profile.phases import Phase
from elastic_ext.profile.step_costs import events_of, is_profiling, quiet_profile

from .peaks import Peaks, PeakTally, Stage

__all__ = ["MemorySample", "Readiness", "sample_on"]

_logger = logging.getLogger(__name__)


# --- what the passes of a real micro-step take, measured once for each new size ---------------------------------------
# On a CPU torch's profiler tells of all that its allocator gives and takes back, workspaces of operations among it, in
# events of its own that are read in private: tried first, and done without where this torch gives others. The allocator
# of an accelerator counts by itself, and its peak counters begin anew while a sample is taken.

_MEMORY = "[memory]"  # the name of the profiler's events of the allocator
_STAGE, _GRADIENT = "elastic_ext stage: ", "elastic_ext gradient: "
_MOST_EVENTS = 500_000
_TRIED_BYTES = 1 << 20
_AGAIN_SECONDS = 60.0  # to look for others' profiles takes a tenth of a second


class AllocationObserver(Protocol):
    """Observes the memory that comes and goes in a micro-step: by a profiler, or by an allocator."""

    base_bytes: int | None
    """Bytes that were allocated when the micro-step began; None where nobody counts them."""

    def begin(self) -> None: ...

    def enter(self, stage: Stage) -> None: ...

    def keep_gradient(self, num_bytes: int) -> None: ...

    def end(self, given_bytes: int) -> Peaks | None:
        """The peaks that were counted; None if there was too much to count. ``given_bytes`` is of the inputs."""


class MemorySample:
    """Measures the memory of one micro-step: ``begin``, ``see`` each phase, ``end``.

    ``see`` is called on the thread that begins the phase, as one that runs backward passes; the others on the training
    thread.
    """

    def __init__(self, observer: AllocationObserver, parameters: Iterable[torch.Tensor]) -> None:
        self._observer = observer
        self._handles: list[RemovableHandle] = []
        self._parameters = [each for each in parameters if each.requires_grad]
        self._stage: Stage = "forward"
        self.had_gradients = False
        """Whether some parameters had gradients before the micro-step."""

    @property
    def base_bytes(self) -> int | None:
        """Bytes that the device's allocator had given before the micro-step; None where nobody counts them."""
        return self._observer.base_bytes

    def begin(self) -> None:
        """Begin to measure, just before the micro-step; RuntimeError where somebody else uses torch's profiler."""
        gc.collect()  # what earlier steps have left would be given back in these passes, which would seem to take less
        with ExitStack() as undo:
            undo.callback(self._let_go)
            for each in self._parameters:
                if each.grad is None:
                    keep = each.register_post_accumulate_grad_hook
                    self._handles.append(keep(self._keep_gradient))  # type: ignore[no-untyped-call]
                else:
                    self.had_gradients = True
            self._observer.begin()
            undo.pop_all()

    def see(self, phase: int) -> None:
        """Take in that a phase of the step begins."""
        stage = _next_stage(self._stage, phase)
        if stage != self._stage or phase == Phase.FORWARD:
            self._stage = stage
            self._observer.enter(stage)

    def end_forward(self) -> None:
        """Take in that the model has given its outputs: what follows is the loss."""
        self._stage = "loss"
        self._observer.enter("loss")

    def end(self, given_bytes: int) -> Peaks | None:
        """The peaks of the micro-step; None where there was too much to count."""
        self._let_go()
        return self._observer.end(given_bytes)

    def _let_go(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _keep_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        with suppress(RuntimeError, TypeError):  # a kind of tensor that tells no size
            num_bytes = gradient.numel() * gradient.element_size()
            if gradient.untyped_storage().nbytes() == num_bytes:  # else it is a part of what was there before
                self._observer.keep_gradient(num_bytes)


def sample_on(device: torch.device, parameters: Iterable[torch.Tensor]) -> MemorySample:
    """A memory sample of a micro-step whose model lies on this device."""
    return MemorySample(_Allocator(device) if device.type == "cuda" else _Profiled(), parameters)


class Readiness:
    """Whether memory samples can be taken on a device; on a CPU they cannot while somebody else uses the profiler."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_tried = False
        self._try_at = 0.0
        self.is_hopeless = False
        """Whether no samples can ever be taken there: this torch does not tell of memory on the device."""

    @property
    def is_refused(self) -> bool:
        """Whether no sample can be taken for a while, or at all."""
        return self.is_hopeless or time.monotonic() < self._try_at

    def can_sample(self) -> bool:
        """Whether a sample can be taken now: on a CPU, nobody else uses the profiler, of which a process has one."""
        if self._device.type == "cuda":
            return True
        if self.is_refused:
            return False
        if is_profiling():
            self._try_at = time.monotonic() + _AGAIN_SECONDS
            return False
        if not self._has_tried:
            self._has_tried = True
            self.is_hopeless = self._device.type != "cpu" or not _tells()
        return not self.is_hopeless


def _tells() -> bool:
    """Whether this torch's profiler tells of memory on a CPU: it is tried with one tensor."""
    try:
        tried = _Profiled()
        tried.begin()
        kept = torch.empty(_TRIED_BYTES, dtype=torch.uint8)
        tried.enter("loss")
        del kept
        peaks = tried.end(0)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        _logger.debug("the memory of steps is not measured: %s", error)
        return False
    return peaks is not None and _TRIED_BYTES <= peaks.forward_bytes < 2 * _TRIED_BYTES


def _next_stage(stage: Stage, phase: int) -> Stage:
    if phase == Phase.FORWARD:
        return "forward"
    if phase == Phase.BACKWARD:
        return "backward"
    if phase == Phase.OPTIMIZER:
        return "update"
    if phase == Phase.OTHER and stage in ("backward", "update"):
        return "after"
    return stage


class _Profiled:
    """Counts memory by the profiler's events, on a CPU."""

    def __init__(self) -> None:
        self.base_bytes: int | None = None
        self._profile: Any = None

    def begin(self) -> None:
        self._profile = quiet_profile(sees_memory=True)
        self._profile.start()

    def enter(self, stage: Stage) -> None:
        with record_function(f"{_STAGE}{stage}"):
            pass

    def keep_gradient(self, num_bytes: int) -> None:
        with record_function(f"{_GRADIENT}{num_bytes}"):
            pass

    def end(self, given_bytes: int) -> Peaks | None:
        found, self._profile = self._profile, None
        found.stop()
        events = events_of(found)
        if events is None or len(events) > _MOST_EVENTS:
            return None
        return _tallied(events, given_bytes)


def _tallied(events: Iterable[Any], given_bytes: int) -> Peaks:
    tally = PeakTally()
    for event in sorted(events, key=lambda each: int(each.start_ns())):
        name: str = event.name()
        if name == _MEMORY:
            tally.change(int(event.nbytes()))
        elif name.startswith(_STAGE):
            stage: Any = name.removeprefix(_STAGE)
            if stage == "forward":
                tally.count_given(given_bytes)
            tally.enter(stage)
        elif name.startswith(_GRADIENT):
            tally.keep_gradient(int(name.removeprefix(_GRADIENT)))
    return tally.peaks


class _Allocator:
    """Counts memory by the counters of CUDA's allocator, as the program asks, and not as the device works."""

    def __init__(self, device: torch.device) -> None:
        self.base_bytes: int | None = None
        self._device = device
        self._tally = PeakTally()
        self._held = 0

    def begin(self) -> None:
        self.base_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def enter(self, stage: Stage) -> None:
        self._settle()
        self._tally.enter(stage)

    def keep_gradient(self, num_bytes: int) -> None:
        self._settle()
        self._tally.keep_gradient(num_bytes)

    def end(self, given_bytes: int) -> Peaks | None:
        self._settle()
        peaks, num_copied = self._tally.peaks, self._tally.held_before_passes or 0  # inputs that were copied there
        missing = max(given_bytes - num_copied, 0)
        return Peaks(
            forward_bytes=peaks.forward_bytes + missing,
            loss_bytes=peaks.loss_bytes + missing,
            backward_bytes=peaks.backward_bytes + missing,
            with_gradients_bytes=peaks.with_gradients_bytes + missing,
            update_bytes=peaks.update_bytes,
        )

    def _settle(self) -> None:
        """Count the memory that has come and gone since the last call."""
        assert self.base_bytes is not None
        most = torch.cuda.max_memory_allocated(self._device) - self.base_bytes
        held = torch.cuda.memory_allocated(self._device) - self.base_bytes
        self._tally.peak(most - self._held)
        self._tally.change(held - self._held)
        self._held = held
        torch.cuda.reset_peak_memory_stats(self._device)
