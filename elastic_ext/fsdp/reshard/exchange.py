"""The exchange of moves between holders: buckets of tensors, each exchanged in one collective into fresh memory.

Which rank has which holder's memory a table says. A rank may have that of several, such as a copy of a peer's part
beside its own; and holders of no rank have nothing to send or to receive.

What goes where is decided in buckets.py; here elements are copied. Called on the training thread, by all ranks alike.

What a rank sends are letters, one to each other rank, in the order of the ranks. A letter has the pieces of all moves
to that rank, those of larger elements first, so that each lies where its type may; and behind them a tail of 1 to 16
bytes, whose last one says whether the sender is well. So ranks learn of a failure without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_ext.fsdp.moves import Move

from .buckets import Bucket

__all__ = ["BucketExchange", "Memories"]

_GRAIN = 16  # bytes; no type that torch has is larger


@dataclass(slots=True)
class _Letter:
    """What one rank sends to another one in the exchange of a bucket."""

    pieces: list[tuple[Move, torch.Tensor]]
    """The moves to that rank, each with the tensor that it reads, or that it fills."""
    num_data_bytes: int = 0
    """Bytes of all pieces, also on a rank that has failed and has no memory for them."""

    @property
    def num_bytes(self) -> int:
        return self.num_data_bytes // _GRAIN * _GRAIN + _GRAIN

    def written_in(self, memory: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor, torch.Tensor]]:
        """Each move with its tensor, and with the part of the letter's memory that has its elements."""
        at = 0
        for move, tensor in sorted(self.pieces, key=lambda piece: -piece[1].element_size()):
            end = at + move.num_elements * tensor.element_size()
            yield move, tensor, memory[at:end].view(tensor.dtype).view(move.sizes)
            at = end


@dataclass(frozen=True, slots=True, eq=False)
class Memories:
    """The memory of one holder for the tensors of a bucket: one tensor for each, before and after."""

    old: Sequence[torch.Tensor]
    new: Sequence[torch.Tensor]


class BucketExchange:
    """Exchanges the buckets of one change between ranks, through memory that is taken once."""

    def __init__(
        self, rank_of: Sequence[int | None], most_bytes: int, *, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """``rank_of`` has each holder's rank in the group, None being the default one; ``most_bytes`` is what this
        rank's holders exchange in a bucket at most.

        ``device`` is where the group's collectives take place.
        """
        self._group = group
        self._rank_of = rank_of
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        tails = 2 * self._num_ranks * _GRAIN  # which ranks exchange that have nothing else to
        self._memory = torch.empty(most_bytes + tails, dtype=torch.uint8, device=device)

    def carry(self, bucket: Bucket, memories: Mapping[int, Memories] | None) -> bool:
        """Fill the new memories of this rank's holders from the old ones of all; gives whether no rank has failed.

        Where an item's part stays the same with a holder, its two memories are one tensor, which is not touched. A rank
        that has failed, such as for lack of memory, gives None. If no bytes go between ranks, nothing is exchanged, and
        the answer is about this rank alone.
        """
        sent: list[_Letter] = [_Letter([]) for _ in range(self._num_ranks)]
        received: list[_Letter] = [_Letter([]) for _ in sent]
        has_letters = False
        for at, item in enumerate(bucket.items):
            for move in item.moves:
                source, target = self._rank_of[move.source], self._rank_of[move.target]
                assert source is not None and target is not None, "a holder of no rank has nothing"
                has_letters |= source != target
                if self._rank not in (source, target):
                    continue
                if source == target:
                    if memories is not None:
                        old, new = memories[move.source].old[at], memories[move.target].new[at]
                        _within(new, move).copy_(_within(old, move, is_source=True))
                    continue
                sends = source == self._rank
                letter = sent[target] if sends else received[source]
                letter.num_data_bytes += move.num_elements * item.item_bytes
                if memories is not None:
                    tensor = memories[move.source].old[at] if sends else memories[move.target].new[at]
                    letter.pieces.append((move, tensor))
        if not has_letters:
            return memories is not None
        return self._exchange(sent, received, is_well=memories is not None)

    def _exchange(self, sent: Sequence[_Letter], received: Sequence[_Letter], *, is_well: bool) -> bool:
        given, taken = ([letter.num_bytes for letter in letters] for letters in (sent, received))
        given[self._rank] = taken[self._rank] = 0
        outgoing, incoming = _cut(self._memory, [sum(given), sum(taken)])
        for letter, memory in self._to_others(sent, outgoing, given):
            for move, tensor, piece in letter.written_in(memory):
                piece.copy_(_within(tensor, move, is_source=True))
            memory[-1] = int(is_well)
        dist.all_to_all_single(incoming, outgoing, taken, given, group=self._group)
        letters = list(self._to_others(received, incoming, taken))
        ends = torch.stack([memory[-1] for _, memory in letters])
        if not (is_well and bool(ends.all())):
            return False
        for letter, memory in letters:
            for move, tensor, piece in letter.written_in(memory):
                _within(tensor, move).copy_(piece)
        return True

    def _to_others(
        self, letters: Sequence[_Letter], memory: torch.Tensor, sizes: Sequence[int]
    ) -> Iterator[tuple[_Letter, torch.Tensor]]:
        for rank, (letter, part) in enumerate(zip(letters, _cut(memory, sizes), strict=True)):
            if rank != self._rank:
                yield letter, part


def _cut(memory: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    at = 0
    for size in sizes:
        yield memory[at : at + size]
        at += size


def _within(tensor: torch.Tensor, move: Move, *, is_source: bool = False) -> torch.Tensor:
    """The elements of a tensor that a move reads, or fills."""
    strides, offset = (
        (move.source_strides, move.source_offset) if is_source else (move.target_strides, move.target_offset)
    )
    return tensor.as_strided(move.sizes, strides, tensor.storage_offset() + offset)
