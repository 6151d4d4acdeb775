"""Averaging: the mean of gradients over ranks, made at once after backward passes, and not while they run.

What can fail on one rank alone is done before: ``reserve`` takes the memory. After ``average`` gradients are those that
DDP would have made of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

__all__ = ["Averaging"]

_BUCKET_BYTES = 25 << 20  # as DDP has it

_Kind = tuple[torch.dtype, torch.device]


class Averaging:
    """Of the gradients of these parameters, over a group's ranks, which all give the same ones in the same order."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group
        self._memory: dict[_Kind, torch.Tensor] = {}
        self._spare: dict[torch.Tensor, torch.Tensor] = {}  # gradients for those that have none so far

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it is of these."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    @property
    def held(self) -> str:
        """Which parameters have a gradient here, as a text: 1 where one has."""
        return "".join("01"[each.grad is not None] for each in self._parameters)

    def reserve(self) -> None:
        """Take the memory that it needs."""
        self._spare = {}
        kinds: dict[_Kind, list[int]] = {}
        for each in self._parameters:
            kinds.setdefault(_kind(each), []).append(each.numel())
        for kind, sizes in kinds.items():
            num_elements = max(max(sizes), min(sum(sizes), _most_elements(kind)))
            if kind not in self._memory or self._memory[kind].numel() < num_elements:
                self._memory[kind] = torch.empty(num_elements, dtype=kind[0], device=kind[1])
        self._spare = {each: torch.zeros_like(each) for each in self._parameters if each.grad is None}

    def average(self, held: Sequence[str]) -> None:
        """Have each gradient be the mean over the ranks, none counting as zero; ``held`` is what each rank has."""
        having = [part for part, *flags in zip(self._parameters, *held, strict=True) if "1" in flags]
        factor = 1.0 / dist.get_world_size(self._group)
        with torch.no_grad():
            for kind, bucket in _buckets(having):
                sizes = [part.numel() for part in bucket]
                flat = self._memory[kind][: sum(sizes)]
                pieces = [piece.view(part.shape) for piece, part in zip(torch.split(flat, sizes), bucket, strict=True)]
                for part, piece in zip(bucket, pieces, strict=True):
                    if part.grad is None:
                        part.grad = self._spare[part]
                    torch.mul(part.grad, factor, out=piece)
                dist.all_reduce(flat, group=self._group)
                for part, piece in zip(bucket, pieces, strict=True):
                    assert part.grad is not None
                    part.grad.copy_(piece)
        self._spare = {}


def _kind(part: torch.Tensor) -> _Kind:
    return part.dtype, part.device


def _most_elements(kind: _Kind) -> int:
    return max(1, _BUCKET_BYTES // kind[0].itemsize)


def _buckets(parts: Sequence[torch.Tensor]) -> Iterator[tuple[_Kind, list[torch.Tensor]]]:
    """Parts of one kind each, as many as fit, or one that is larger; in the same order on all ranks."""
    open_ones: dict[_Kind, list[torch.Tensor]] = {}
    for part in parts:
        kind = _kind(part)
        bucket = open_ones.setdefault(kind, [])
        if bucket and sum(each.numel() for each in bucket) + part.numel() > _most_elements(kind):
            yield kind, bucket
            bucket = open_ones[kind] = []
        bucket.append(part)
    yield from open_ones.items()
