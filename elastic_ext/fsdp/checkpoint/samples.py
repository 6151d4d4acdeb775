"""Samples: some elements of each of many tensors, to find out later whether the tensors were changed since.

No counter is told of what is written through numpy, dlpack, ``.data`` or a storage: such a change is seen in memory
alone, and to read all of that again would take as long as copying it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Samples"]

_NUM_PLACES, _NUM_TOGETHER = 16, 8  # of a tensor: runs of elements, and the elements of each
_NUM_ELEMENTS = _NUM_PLACES * _NUM_TOGETHER


@dataclass(frozen=True, slots=True)
class _Group:
    """Of tensors that can be looked at together."""

    places: list[int]
    views: list[torch.Tensor]  # of what is sampled, in the tensors' own memory
    seen: torch.Tensor


class Samples:
    """What is in ``tensors``, which share no memory with autograd, as work given to their devices so far leaves it.

    A tensor of up to 128 elements is looked at whole, of another one 128 elements: what changes one in twenty of its
    elements, wherever they lie, escapes once in seven hundred times.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        of_kinds: dict[tuple[torch.device, torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.numel():
                view = _sampled(tensor)
                places, views = of_kinds.setdefault((tensor.device, tensor.dtype, view.dim()), ([], []))
                places.append(place)
                views.append(view)
        self._groups = [_Group(places, views, torch.cat(views)) for places, views in of_kinds.values()]

    def changed(self) -> int | None:
        """The place among the tensors of one that is another now, None where none is known to be; waits for a GPU."""
        for group in self._groups:
            if not _are_alike(torch.cat(group.views), group.seen):
                earlier = torch.split(group.seen, [view.shape[0] for view in group.views])
                for place, view, seen in zip(group.places, group.views, earlier, strict=True):
                    if not _are_alike(view, seen):
                        return place
        return None


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its elements, in its memory; runs at odd distances, so that they lie in different columns."""
    size, stride = tensor.numel(), 1
    if not tensor.is_contiguous() and _extent(tensor) != size:  # it has gaps: along its longest dimension
        size, stride = max(zip(tensor.shape, tensor.stride(), strict=True))
    if size <= _NUM_ELEMENTS:
        return tensor.as_strided((size,), (stride,))
    distance = ((size - _NUM_TOGETHER) // (_NUM_PLACES - 1) - 1) | 1
    return tensor.as_strided((_NUM_PLACES, _NUM_TOGETHER), (distance * stride, stride))


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie between its first one and its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: a NaN is no change."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
