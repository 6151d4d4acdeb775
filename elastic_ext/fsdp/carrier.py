"""The carrier of moves between ranks: a bucket of tensors, exchanged in one collective into fresh memory.

What goes where is decided in freight.py; here elements are copied. Called on the training thread, by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from .freight import Bucket
from .moves import Move

__all__ = ["carry"]


def carry(
    bucket: Bucket,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """Fill ``new`` from the ranks' ``old``, one tensor each per item; gives the bytes that this rank has sent.

    Where an item's part stays the same on this rank the two are one tensor, which is not touched. ``device`` is where
    the group's collectives take place.
    """
    rank = dist.get_rank(group)
    sent: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size(group))]
    received: list[list[tuple[torch.Tensor, Move]]] = [[] for _ in sent]
    for item, source, target in zip(bucket.items, old, new, strict=True):
        for move in item.moves:
            if move.source == rank and move.target == rank:
                _within(target, move).copy_(_within(source, move, is_source=True))
            elif move.source == rank:
                sent[move.target].append(_within(source, move, is_source=True))
            elif move.target == rank:
                received[move.source].append((target, move))
    if bucket.num_sent == 0:
        return 0
    given = [sum(part.numel() * part.element_size() for part in parts) for parts in sent]
    taken = [sum(move.num_elements * target.element_size() for target, move in parts) for parts in received]
    outgoing = torch.empty(sum(given), dtype=torch.uint8, device=device)
    incoming = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    at = 0
    for part in (part for parts in sent for part in parts):
        piece = part.contiguous().view(-1).view(torch.uint8)
        outgoing[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    dist.all_to_all_single(incoming, outgoing, taken, given, group=group)
    for (target, move), piece in zip(_flat(received), _cut(incoming, _flat(received)), strict=True):
        into = _within(target, move)
        if into.is_contiguous():
            into.view(-1).view(torch.uint8).copy_(piece)
        else:
            whole = torch.empty(move.sizes, dtype=target.dtype, device=device)
            whole.view(-1).view(torch.uint8).copy_(piece)
            into.copy_(whole)
    return int(sum(given))


def _within(tensor: torch.Tensor, move: Move, *, is_source: bool = False) -> torch.Tensor:
    """What a move takes from a tensor, or fills of it."""
    strides, offset = (
        (move.source_strides, move.source_offset) if is_source else (move.target_strides, move.target_offset)
    )
    return tensor.as_strided(move.sizes, strides, tensor.storage_offset() + offset)


def _flat(parts: Sequence[Sequence[tuple[torch.Tensor, Move]]]) -> list[tuple[torch.Tensor, Move]]:
    return [each for of_rank in parts for each in of_rank]


def _cut(incoming: torch.Tensor, parts: Sequence[tuple[torch.Tensor, Move]]) -> Iterator[torch.Tensor]:
    at = 0
    for target, move in parts:
        size = move.num_elements * target.element_size()
        yield incoming[at : at + size]
        at += size
