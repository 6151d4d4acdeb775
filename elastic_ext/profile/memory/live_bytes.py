"""LiveBytes: what a step on fake tensors takes of memory, and computes, told by its operations; BlockWatch: which block
keeps how much of it. Real steps are measured in samples.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from .peaks import PeakTally

__all__ = ["BlockWatch", "LiveBytes"]


# --- what tensors hold while a step runs, told from the operations that make them and from their end -----------------
# A dispatch mode stands between autograd and the operations, as the census does; on tensors without memory it costs no
# memory. What an operation takes while it runs and does not show to torch is not seen; of some it is known how much.

_MOST_DEPTH = 4  # of containers among an operation's arguments
_PAGES_OF_RNN = 7 * 4096  # parts of a workspace that begin on a page
_WORKSPACE_OF_RNN = 3  # the place of a layer's workspace among its results


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``tally`` of tensors' memory as it comes and goes, and counts flops: ``with`` it around a micro-step."""

    supports_higher_order_operators = True

    def __init__(self, tally: PeakTally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_flops = 0
        """Floating point operations of matrix products, convolutions and attention so far."""
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
