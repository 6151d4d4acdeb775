"""What memory the passes of a real micro-step take, measured once for each new size."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from elastic_ext.profile.phases import Phase
from elastic_ext.profile.step_costs import events_of, is_profiling, quiet_profile

from .peaks import Peaks, PeakTally, Stage

__all__ = ["BlockWatch", "LiveBytes", "MemorySample", "Readiness", "sample_on"]

_logger = logging.getLogger(__name__)


# --- what the passes of a real micro-step take, looked at once for each new size -------------------------------------
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
    """Measures the memory of one micro-step: ``begin``, ``see`` each phase, ``end``; all on the training thread."""

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
    """Whether memory samples can be taken on a device; where not, the profiler is looked at again after a while."""

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
        self._num_given = 0  # bytes that had come before the first forward pass: inputs that were copied there

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
        """Count the memory that has come and gone since the last call."""
        assert self.base_bytes is not None
        most = torch.cuda.max_memory_allocated(self._device) - self.base_bytes
        held = torch.cuda.memory_allocated(self._device) - self.base_bytes
        self._tally.peak(most - self._held)
        self._tally.change(held - self._held)
        self._held = held
        torch.cuda.reset_peak_memory_stats(self._device)


# --- what tensors hold while a step runs, told from the operations that make them and from their end -----------------
# A dispatch mode stands between autograd and the operations, as the census does; on tensors without memory it costs no
# memory. What an operation takes while it runs and does not show to torch is not seen; of some it is known how much.

_MOST_DEPTH = 4  # of containers among an operation's arguments
_PAGES_OF_RNN = 7 * 4096  # parts of a workspace that begin on a page
_WORKSPACE_OF_RNN = 3  # the place of a layer's workspace among its results


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``tally`` of each tensor's memory as it comes and goes: ``with`` it around a micro-step."""

    supports_higher_order_operators = True

    def __init__(self, tally: PeakTally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_flops = 0
        self._tally = tally
        self._seen: dict[int, weakref.ref[Any]] = {}  # by the id of a storage that was made here, while it is there

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code runs as it is."""
        return True

    def keep_gradient(self, gradient: torch.Tensor) -> None:
        """Count a tensor that was made here as a parameter's gradient from now on."""
        storage = gradient.untyped_storage()
        if id(storage) in self._seen:
            self._tally.keep_gradient(storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in _tensors_in((args, kwargs or {}), _MOST_DEPTH)}
        for place, each in enumerate(_tensors_in(result, _MOST_DEPTH)):
            storage = each.untyped_storage()
            if id(storage) not in given and id(storage) not in self._seen:
                self._add(storage, storage.nbytes() or _kept_unseen(func, args, place))
        passing = _taken_unseen(func, args)
        if passing:
            self._tally.peak(passing)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            with suppress(RuntimeError, TypeError, ValueError, AttributeError):  # a kind of tensor that tells no size
                self.num_flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        number, block = id(storage), self._tally.block

        def forget(_: object) -> None:
            del self._seen[number]
            self._tally.change(-num_bytes, block=block)

        self._seen[number] = weakref.ref(storage, forget)
        self._tally.change(num_bytes, block=block)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not (value.is_sparse or value.is_nested):  # which have no memory of their own, but parts that have
            yield value
    elif isinstance(value, (tuple, list)) and depth > 0:
        for part in value:
            yield from _tensors_in(part, depth - 1)
    elif isinstance(value, Mapping) and depth > 0:
        for part in value.values():
            yield from _tensors_in(part, depth - 1)


def _kept_unseen(func: Any, args: Any, place: int) -> int:
    """Bytes that a result takes in truth and not as a tensor without memory: what recurrent layers keep.

    A recurrent layer of oneDNN keeps its gates and states for the backward pass. How it lays them out it does not tell;
    these are what its layers were seen to take, and a hundredth more.
    """
    if func is not _MKLDNN_RNN or place != _WORKSPACE_OF_RNN:
        return 0
    given, hidden = args[0], args[5].shape[-1]
    num_steps, num_samples, width = given.shape
    numbers = (num_steps + 1) * num_samples * (9.1 * hidden + 6.5 * max(width, hidden))
    return int(numbers * given.element_size()) + _PAGES_OF_RNN


def _taken_unseen(func: Any, args: Any) -> int:
    """Bytes that an operation takes while it runs beside its results: weights in another layout, gates' gradients.

    A recurrent layer does so with its weights and with their gradients; the numbers are what its layers were seen to
    take.
    """
    if func in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
        weight = args[1] if func is _CONVOLUTION else args[2]
        return int(weight.numel() * weight.element_size())
    if func in (_MKLDNN_RNN, _MKLDNN_RNN_BACKWARD):
        num_steps, num_samples, _ = args[0].shape
        states = (num_steps + 1) * num_samples * args[5].shape[-1]
        weights = sum(each.numel() for each in args[1:5])
        numbers = 1.07 * weights + states if func is _MKLDNN_RNN else 1.75 * weights + 4.2 * states
        return int(numbers * args[0].element_size())
    return 0


_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_MKLDNN_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


# --- what each of a model's blocks keeps from its forward pass for the backward pass ---------------------------------
# Hooks tell the tally of memory which block computes. The tensors that a block makes count for it: activations that
# autograd has saved, and its output, where anybody still holds that. What is left of them as the forward pass ends is
# what the block keeps.


class BlockWatch:
    """Measures what each block keeps for its backward pass: ``with`` it around one forward pass.

    A block may be called several times, within another one, and may raise.
    """

    def __init__(self, blocks: Sequence[nn.Module], tally: PeakTally) -> None:
        self._blocks = tuple(blocks)
        self._tally = tally
        self._seen: set[int] = set()
        self._around: list[int | None] = []  # blocks whose calls have not ended, the outermost first
        self._handles: list[RemovableHandle] = []
        self.kept_bytes: tuple[int, ...] = ()
        """Bytes that each block keeps once the forward pass has ended; empty where one was not seen to compute.

        Such a block is left out of this pass, or compiled, where nobody sees who makes what.
        """

    def __enter__(self) -> BlockWatch:
        for number, block in enumerate(self._blocks):
            enter, leave = self._hooks_of(number)
            self._handles.append(block.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._around.clear()
        self._tally.block = None
        if len(self._seen) == len(self._blocks):
            held = self._tally.held_of_blocks
            self.kept_bytes = tuple(held.get(number, 0) for number in range(len(self._blocks)))

    def _hooks_of(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, arguments: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._seen.add(number)
            self._around.append(self._tally.block)
            self._tally.block = number

        def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
            if not torch.compiler.is_compiling() and self._around and self._tally.block == number:
                self._tally.block = self._around.pop()

        return enter, leave
