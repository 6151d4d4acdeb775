"""LiveBytes: what tensors hold while a step runs, told from the operations that make them and from their end.

It stands between autograd and the operations, as the census does; on tensors without memory it costs no memory. What
an operation takes while it runs, and keeps from torch, is not seen; of some it is known how much that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .tally import Tally

__all__ = ["LiveBytes"]

_MOST_DEPTH = 4  # of containers among an operation's arguments
_PAGES_OF_RNN = 7 * 4096  # parts of a workspace that begin on a page
_WORKSPACE_OF_RNN = 3  # the place of a layer's workspace among its results


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with`` it around a micro-step; ``tally`` is told."""

    supports_higher_order_operators = True

    def __init__(self, tally: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_flops = 0
        self._tally = tally
        self._seen: dict[int, weakref.ref[Any]] = {}  # by the id of a storage that was made here, while it is there

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs as it is."""
        return True

    def keep_gradient(self, gradient: torch.Tensor) -> None:
        """It was made here, and is a parameter's from here on."""
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
    """What a result takes that is empty on tensors without memory, and is not where they have some.

    A recurrent layer of oneDNN keeps its gates and states for the backward pass. How it lays them out it does not
    tell; these are what its layers were seen to take, and a hundredth more.
    """
    if func is not _MKLDNN_RNN or place != _WORKSPACE_OF_RNN:
        return 0
    given, hidden = args[0], args[5].shape[-1]
    num_steps, num_samples, width = given.shape
    numbers = (num_steps + 1) * num_samples * (9.1 * hidden + 6.5 * max(width, hidden))
    return int(numbers * given.element_size()) + _PAGES_OF_RNN


def _taken_unseen(func: Any, args: Any) -> int:
    """What an operation takes for itself while it runs: weights that it lays out otherwise first, and gates' gradients.

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
