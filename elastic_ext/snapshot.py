"""Snapshot: what a step changes besides parameters, kept so that a step that never happened leaves no trace.

Random states, buffers and registered tensors; gradients, samples and counters are the trainer's own affair.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Snapshot"]


class Snapshot:
    """Takes copies at a step's beginning and puts them back; buffers are copied into memory that is kept."""

    def __init__(self, model: nn.Module, registered: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._model = model
        self._registered = registered
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._restore_random: list[Callable[[], None]] = []

    def take(self) -> None:
        """Keep everything as it is now."""
        self._held = [(module, dict(module._buffers)) for module in self._model.modules()]
        live = list(self._tensors())
        kept = [copy for _, copy in self._copies]
        if list(map(_kind, kept)) != list(map(_kind, live)):
            kept = [torch.empty_like(tensor) for tensor in live]
        with torch.no_grad():
            for tensor, copy in zip(live, kept, strict=True):
                copy.copy_(tensor)
        self._copies = list(zip(live, kept, strict=True))
        self._restore_random = list(_random_states())

    def take_shared(self) -> None:
        """Keep the buffers as they are now too: those that the first rank has given to all, in a step's first pass."""
        with torch.no_grad():
            self._shared = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def put_shared(self) -> None:
        """As ``take_shared`` found them, for a step that is taken again and in which they are not given out again."""
        for buffer, shared in self._shared:
            _put(buffer, shared)

    def end_step(self) -> None:
        """What was shared in a step is shared anew in the next."""
        self._shared = []

    def let_go(self) -> None:
        """Keep nothing, until it is taken again."""
        self._copies, self._held, self._shared, self._restore_random = [], [], [], []

    def restore(self) -> None:
        """Put everything back as it was."""
        for module, buffers in self._held:  # some modules put others in their place
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, copy in self._copies:
            _put(tensor, copy)
        for restore in self._restore_random:
            restore()

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self._model.buffers()
        for tensors in self._registered.values():
            yield from tensors.values()


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors of which one can be copied into the other."""
    lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, tensor.device, lies


def _put(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Unseen by autograd: what was computed from the tensor may still have to be gone through backwards."""
    tensor.data.copy_(kept)


def _random_states() -> Iterable[Callable[[], None]]:
    """One function per random generator in use, which puts it back to where it is now."""
    python = random.getstate()
    yield lambda: random.setstate(python)
    host = torch.get_rng_state()
    yield lambda: torch.set_rng_state(host)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(devices)
    numpy: Any = sys.modules.get("numpy")  # a script that has not imported it has not drawn from it
    if numpy is not None:
        drawn = numpy.random.get_state()
        yield lambda: numpy.random.set_state(drawn)
