"""Samples: what the passes of a real micro-step take, looked at once for each new size.

On a CPU torch's profiler tells of all that its allocator gives and takes back, workspaces of operations among it, in
events of its own that are read in private: tried first, and done without where this torch gives others. The allocator
of an accelerator counts by itself, and its peak counters begin anew while a sample is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from .phases import Phase
from .tally import Peaks, Stage, Tally
from .tracing import events_of, is_profiling, quiet_profile

__all__ = ["Readiness", "Sample", "sample_on"]

_logger = logging.getLogger(__name__)

_MEMORY = "[memory]"  # the name of the profiler's events of the allocator
_STAGE, _GRADIENT = "elastic_ext stage: ", "elastic_ext gradient: "
_MOST_EVENTS = 500_000
_TRIED_BYTES = 1 << 20
_AGAIN_SECONDS = 60.0  # to look for others' profiles takes a tenth of a second


class Account(Protocol):
    """Whoever sees memory come and go."""

    base_bytes: int | None
    """What was there when it began; None where nobody counts that."""

    def begin(self) -> None: ...

    def enter(self, stage: Stage) -> None: ...

    def keep_gradient(self, num_bytes: int) -> None: ...

    def end(self, given_bytes: int) -> Peaks | None:
        """What was seen; None where that was too much. ``given_bytes`` is what the model is given."""


class Sample:
    """Of one micro-step: ``begin`` it, tell it of phases, ``end`` it; on the thread that trains."""

    def __init__(self, account: Account, parameters: Iterable[torch.Tensor]) -> None:
        self._account = account
        self._handles: list[RemovableHandle] = []
        self._parameters = [each for each in parameters if each.requires_grad]
        self._stage: Stage = "forward"
        self.had_gradients = False
        """Whether some were there before."""

    @property
    def base_bytes(self) -> int | None:
        """What its device's allocator had given before; None where nobody counts that."""
        return self._account.base_bytes

    def begin(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._let_go)
            for each in self._parameters:
                if each.grad is None:
                    keep = each.register_post_accumulate_grad_hook
                    self._handles.append(keep(self._keep_gradient))  # type: ignore[no-untyped-call]
                else:
                    self.had_gradients = True
            self._account.begin()
            undo.pop_all()

    def see(self, phase: int) -> None:
        """A phase of the step begins."""
        stage = _next_stage(self._stage, phase)
        if stage != self._stage or phase == Phase.FORWARD:
            self._stage = stage
            self._account.enter(stage)

    def end_forward(self) -> None:
        """The model has given what it gives: what follows is the loss."""
        self._stage = "loss"
        self._account.enter("loss")

    def end(self, given_bytes: int) -> Peaks | None:
        """What was seen, None where that was too much."""
        self._let_go()
        return self._account.end(given_bytes)

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
                self._account.keep_gradient(num_bytes)


def sample_on(device: torch.device, parameters: Iterable[torch.Tensor]) -> Sample:
    """A sample of a micro-step whose model lies there."""
    return Sample(_Allocator(device) if device.type == "cuda" else _Profiled(), parameters)


class Readiness:
    """Whether samples can be taken on a device: asked again only after a while where they cannot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_tried = False
        self._try_at = 0.0
        self.is_hopeless = False
        """Whether this torch does not tell of what comes and goes there."""

    @property
    def is_refused(self) -> bool:
        """Whether none can be taken for a while, or at all."""
        return self.is_hopeless or time.monotonic() < self._try_at

    def is_given(self) -> bool:
        """Whether one can be taken now, and nobody else may be asking for the profiler, which there is one of."""
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
    """Whether this torch's profiler tells of memory on a CPU: tried with a piece of it."""
    try:
        tried = _Profiled()
        tried.begin()
        kept = torch.empty(_TRIED_BYTES, dtype=torch.uint8)
        tried.enter("loss")
        del kept
        peaks = tried.end(0)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        _logger.debug("what steps take is not measured: %s", error)
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
    """By the profiler's events, on a CPU."""

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
    tally = Tally()
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
    """By the counters of CUDA's allocator, which counts as the program asks, and not as the device works."""

    def __init__(self, device: torch.device) -> None:
        self.base_bytes: int | None = None
        self._device = device
        self._tally = Tally()
        self._held = 0
        self._num_given = 0

    def begin(self) -> None:
        self.base_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def enter(self, stage: Stage) -> None:
        self._settle()
        if stage == "forward" and not self._num_given:
            self._num_given = self._held
        self._tally.enter(stage)

    def keep_gradient(self, num_bytes: int) -> None:
        self._settle()
        self._tally.keep_gradient(num_bytes)

    def end(self, given_bytes: int) -> Peaks | None:
        self._settle()
        peaks, missing = self._tally.peaks, max(given_bytes - self._num_given, 0)
        return Peaks(
            forward_bytes=peaks.forward_bytes + missing,
            loss_bytes=peaks.loss_bytes + missing,
            backward_bytes=peaks.backward_bytes + missing,
            with_gradients_bytes=peaks.with_gradients_bytes + missing,
            update_bytes=peaks.update_bytes,
        )

    def _settle(self) -> None:
        """Tell of what has come and gone since the last time."""
        assert self.base_bytes is not None
        most = torch.cuda.max_memory_allocated(self._device) - self.base_bytes
        held = torch.cuda.memory_allocated(self._device) - self.base_bytes
        self._tally.peak(most - self._held)
        self._tally.change(held - self._held)
        self._held = held
        torch.cuda.reset_peak_memory_stats(self._device)
