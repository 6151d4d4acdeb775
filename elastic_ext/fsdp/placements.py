"""Placements: which part of a tensor is left to a rank when the dimensions of a mesh cut it one after another. Pure.

Words: a *cut* is what one dimension of a mesh does to one dimension of a tensor. A *run* is a range of the indices of a
tensor's dimension; what a rank has of it is one run, or several where cuts are nested otherwise than the mesh is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .layout import Box

__all__ = ["Cut", "box_after"]

_Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of a tensor, cut into as many parts as a dimension of the mesh has ranks."""

    dim: int
    num_parts: int
    part: int
    """This rank's."""
    num_outer: int = 1
    """Into how many parts the dimension was cut before, each of which is cut by this: torch's ``split_factor``. It is
    more than one where mesh dimensions that come later have cut first, as fully_shard of tensor parallelism does."""


def box_after(shape: Sequence[int], cuts: Sequence[Cut]) -> Box | None:
    """What cuts leave of a tensor, in the order of the mesh's dimensions; None if that is not one block."""
    runs: list[_Runs] = []
    for dim, size in enumerate(shape):
        kept = [(0, size)] if size else []
        for cut in _in_order([cut for cut in cuts if cut.dim == dim]):
            kept = _part_of(kept, cut)
        runs.append(kept)
    if any(len(of_dim) > 1 for of_dim in runs):
        return None
    if not all(runs):
        return Box.empty(shape)
    return Box.block(shape, [of_dim[0][0] for of_dim in runs], [of_dim[0][1] for of_dim in runs])


def _in_order(cuts: Sequence[Cut]) -> list[Cut]:
    """Cuts of one dimension as they were made: one that came after all the later ones is put after them.

    Where sizes do not divide evenly, ``split_factor`` by itself says otherwise; this is what fully_shard does.
    """
    if len(cuts) < 2:
        return list(cuts)
    first, later = cuts[0], _in_order(cuts[1:])
    if first.num_outer == math.prod(cut.num_parts for cut in later) > 1:
        return [*later, replace(first, num_outer=1)]
    return [first, *later]


def _part_of(runs: _Runs, cut: Cut) -> _Runs:
    kept: _Runs = []
    for outer in range(cut.num_outer):
        within = _chunk(runs, cut.num_outer, outer)
        for low, high in _chunk(within, cut.num_parts, cut.part):
            if kept and kept[-1][1] == low:
                low = kept.pop()[0]
            kept.append((low, high))
    return kept


def _chunk(runs: _Runs, num_chunks: int, chunk: int) -> _Runs:
    """One of the parts that ``torch.chunk`` makes: all of them full until nothing is left."""
    size = sum(high - low for low, high in runs)
    full = -(-size // num_chunks)
    first, last = full * chunk, min(full * (chunk + 1), size)
    kept: _Runs = []
    before = 0  # how many indices the runs so far have
    for low, high in runs:
        start, end = max(first - before, 0), min(last - before, high - low)
        if start < end:
            kept.append((low + start, low + end))
        before += high - low
    return kept
