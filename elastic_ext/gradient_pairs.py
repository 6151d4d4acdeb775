"""GradientPairs: the gradients of two steps in a row, looked at as optimizers are about to use them, and compared.

No second copy of them is kept: of each tensor it looks at some thousand elements, the same in both steps and spread
evenly over it, each of which counts for those around it. What follows from the numbers is in noise_scale.py, which
steps are looked at in learning.py. No parameter is held from one step to the next, since it may become another object.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .sharing import Sharing
from .step_state import StepState

__all__ = ["GradientPairs"]

_MOST_ELEMENTS = 4096  # of a tensor
_MOST_KEPT = 16  # weights of so many looks


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is looked at of one tensor on this rank."""

    position: int
    """Of its parameter, among those of all optimizers."""
    num_elements: int
    weight: float
    """Of each: what it stands for, on as many ranks as have it."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece, and which elements it is."""

    piece: _Piece
    elements: slice


_Seen = tuple[tuple[_Piece, ...], torch.Tensor]  # elements of some tensors on one device, one after another


@dataclass(slots=True)
class _Look:
    """What was seen in one step."""

    places: dict[int, int]
    """By the id of a parameter that was not looked at so far, its position."""
    seen: list[_Seen] = field(default_factory=list)


class GradientPairs:
    """One rank's looks."""

    def __init__(
        self,
        state: StepState,
        optimizers: Sequence[Optimizer],
        sharing: Callable[[], Sharing],
        *,
        num_ranks: int,
    ) -> None:
        """``num_ranks`` add up what they see, each its part of it."""
        self._state = state
        self._optimizers = optimizers
        self._sharing = sharing
        self._num_ranks = num_ranks
        self._number = -1  # of the step that was looked at last
        self._now: _Look | None = None
        self._first: _Look | None = None
        self._cuts: dict[tuple[int, int, int], _Cut] = {}  # by position, number of elements, and of ranks that share it
        self._weights: dict[tuple[tuple[_Piece, ...], torch.dtype, torch.device], torch.Tensor] = {}

    @torch.no_grad()
    def look(self, parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> None:
        """See the gradients of parameters, those that were not seen in this step; they are ``scale`` times too large.

        No collective, and nothing that waits for a device.
        """
        look, num_shards = self._look_of(self._state.number), self._sharing().num_shards
        pieces: dict[torch.device, list[_Piece]] = {}
        views: dict[torch.device, list[torch.Tensor]] = {}
        for part in parameters:
            position = look.places.pop(id(part), None)
            if position is None:
                continue
            held, shards = _local(part, num_shards)
            if is_lazy(held) or held.layout is not torch.strided or not held.dtype.is_floating_point:
                continue
            if held.numel() == 0:
                continue
            cut = self._cuts.get((position, held.numel(), shards)) or self._cut_of(position, held.numel(), shards)
            view = _some_of(held, cut.elements)
            if view.device not in pieces:
                pieces[view.device], views[view.device] = [], []
            pieces[view.device].append(cut.piece)
            views[view.device].append(view if part.grad is not None else torch.zeros_like(view))
        for device, found in views.items():
            elements = torch.cat(found)  # a copy: optimizers may change gradients
            if elements.dtype is not torch.float64:
                elements = elements.float()
            if scale is not None:
                elements /= scale.to(device)
            look.seen.append((tuple(pieces[device]), elements))

    def keep(self) -> None:
        """The step that was looked at is the first of two."""
        self._first, self._now = self._now, None

    def compare(self) -> tuple[float, float] | None:
        """Of the two: the square of their difference, and their product, this rank's part of both; nothing is left.

        Zeros where nothing of the gradients lies on this rank, None where they are no pair. Waits for the device.
        """
        first, second = self._first, self._now
        self.forget()
        if first is None or second is None:
            return None
        if not _is_pair(first.seen, second.seen):
            return None
        sums = [torch.zeros(2)]
        for (pieces, one), (_, other) in zip(first.seen, second.seen, strict=True):
            weights, apart = self._weights_of(pieces, one), one - other
            sums.append(torch.stack([torch.dot(apart * weights, apart), torch.dot(one * weights, other)]))
        apart_squares, products = zip(*(each.tolist() for each in sums), strict=True)
        return sum(apart_squares), sum(products)  # and not fsum, which raises where there are infinities

    def forget(self) -> None:
        """What was seen so far is no part of a pair."""
        self._first = self._now = None
        self._number = -1

    def _look_of(self, number: int) -> _Look:
        """That of the step with this number; a step that is taken again has another."""
        if self._now is None or number != self._number:
            trained = (part for each in self._optimizers for group in each.param_groups for part in group["params"])
            self._now = _Look({id(part): position for position, part in enumerate(trained)})
            self._number = number
        return self._now

    def _cut_of(self, position: int, num_elements: int, num_shards: int) -> _Cut:
        """Which elements are looked at of so many, one rank's of ``num_shards``: from the first on each n-th.

        No row or column of the tensor is passed over, since n has no divisor in common with any of its sizes.
        """
        stride = -(-num_elements // _MOST_ELEMENTS)
        while math.gcd(stride, num_elements) > 1:
            stride += 1
        start = random.Random(position).randrange(stride) if stride < num_elements else 0
        num_seen = len(range(start, num_elements, stride))
        piece = _Piece(position, num_seen, num_elements / num_seen * num_shards / self._num_ranks)
        cut = self._cuts[position, num_elements, num_shards] = _Cut(piece, slice(start, None, stride))
        return cut

    def _weights_of(self, pieces: tuple[_Piece, ...], elements: torch.Tensor) -> torch.Tensor:
        """Element by element."""
        key = pieces, elements.dtype, elements.device
        if key not in self._weights:
            if len(self._weights) >= _MOST_KEPT:
                self._weights.clear()
            each = torch.tensor([piece.weight for piece in pieces], dtype=elements.dtype)
            counts = torch.tensor([piece.num_elements for piece in pieces])
            self._weights[key] = torch.repeat_interleave(each, counts).to(elements.device)
        return self._weights[key]


def _is_pair(first: Sequence[_Seen], second: Sequence[_Seen]) -> bool:
    """Whether the same was seen in both; a model may be moved, or made of another type, between two steps."""

    def kinds(seen: Sequence[_Seen]) -> list[tuple[tuple[_Piece, ...], torch.dtype, torch.device]]:
        return [(pieces, elements.dtype, elements.device) for pieces, elements in seen]

    return kinds(first) == kinds(second)


def _some_of(held: torch.Tensor, elements: slice) -> torch.Tensor:
    """Of all elements, in the order of their indices; without a copy of those that are left out."""
    if held.is_contiguous():
        return held.view(-1)[elements]
    return held.take(torch.arange(elements.start, held.numel(), elements.step, device=held.device))


def _local(part: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, int]:
    """What of a gradient lies on this rank, and over how many ranks one copy is shared out, by itself or as given.

    Of the parameter itself where it has none. A distributed one that is not summed up yet is not there at all.
    """
    held = part if part.grad is None else part.grad
    if not isinstance(held, DTensor):
        return held, num_shards
    placements = held.placements
    if any(placement.is_partial() for placement in placements):
        return held.to_local().new_empty(0), 1
    sizes = zip(placements, held.device_mesh.shape, strict=True)
    # Shards of a tensor that is cut by two dimensions of the mesh do not all call themselves so.
    return held.to_local(), math.prod(size for placement, size in sizes if not placement.is_replicate())
