"""Which sample of an epoch comes at which position, and how far the loops over an epoch have come. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .batch_plan import BatchPlan

__all__ = [
    "BatchOrder",
    "Chunk",
    "Cursor",
    "Drawn",
    "EpochPosition",
    "EvenOrder",
    "Order",
    "Ranges",
    "RemainingOrder",
    "SequentialOrder",
    "Shuffled",
    "chunks",
    "num_chunks",
    "position_and_completed",
    "told_length",
]


# --- how far the loops over an order of samples have come, as one value, and where the next loop begins --------------

Ranges = tuple[tuple[int, int], ...]
"""Ranges of positions, each from the first to before the second number; sorted, without overlaps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPosition:
    """Which samples of an epoch are consumed, and which epoch the next loop goes through; immutable."""

    epoch: int = 0
    position: int = 0
    """All samples before this position are consumed."""
    completed: Ranges = ()
    """Ranges after ``position`` that are consumed too, where batches are handed out in the order they are made in."""
    starts_next_epoch: bool = False
    """Whether the next loop is over the next epoch: without a trainer once a loop over this one has begun; with one,
    once a step of this epoch was committed, or where none is left.
    """
    is_over: bool = False
    """Whether no more samples of the epoch come, by a loaded state or since ``leave_epoch`` gave the rest up."""
    next_epoch: int | None = None
    """The epoch of the next loop, where it was set while a loop was under way; else None."""

    def at(self, epoch: int) -> EpochPosition:
        """The position at which a next loop over ``epoch`` begins.

        It is this one in this epoch, unless ``starts_next_epoch``; else the epoch's beginning.
        """
        goes_on = epoch == self.epoch and not self.starts_next_epoch
        return (
            EpochPosition(epoch=epoch, position=self.position, completed=self.completed)
            if goes_on
            else EpochPosition(epoch=epoch)
        )

    def to_come(self) -> EpochPosition:
        """The position at which the next loop begins."""
        if self.next_epoch is not None:
            return self.at(self.next_epoch)
        return EpochPosition(epoch=self.epoch + 1) if self.starts_next_epoch else self


def position_and_completed(remaining: Ranges, num_samples: int) -> tuple[int, Ranges]:
    """``position`` and ``completed`` of the EpochPosition at which only the samples at ``remaining`` still come."""
    if not remaining:
        return num_samples, ()
    stops = [stop for _, stop in remaining]
    starts = [*[start for start, _ in remaining[1:]], num_samples]
    return remaining[0][0], tuple(each for each in zip(stops, starts, strict=True) if each[0] < each[1])


# --- which sample of an epoch comes at which position ----------------------------------------------------------------
# It depends on a seed and the epoch's number alone. Pure.
#
# A *position* counts the samples of an epoch from 0, over all ranks; an *index* is what the dataset calls a sample.

_MOST_SORTED = 1 << 16  # up to so many samples are shuffled by sorting, which makes every order equally likely
_NUM_ROUNDS = 6  # with so many, orders are as random as tests/data/test_order.py asks
_BLOCK = 16_384  # positions that are computed together: each by itself would take a hundred times as long
_SORTED, _ROUNDS = 1, 2  # the numbers of the algorithms: what one of them gives never changes
_MOST_SAMPLES = 1 << 48
_MOST_UNCOUNTED = 1 << 24  # a sampler may give so many samples, or as many as its length, whichever is more
_MOST_IN_BATCHES = 1 << 20  # the same for a batch sampler, whose samples take several times as much memory
_MOST_TIMES = 4  # ... or this many times the dataset, or as many batches as its length: whichever is most

_Words = npt.NDArray[np.uint64]


class Order(Protocol):
    """The order of an epoch's samples: which index is at which position."""

    @property
    def num_samples(self) -> int: ...

    def indices(self, start: int, stop: int) -> list[Any]:
        """The indices at positions from ``start`` to before ``stop``."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values that tell this order from others: equal where the orders are."""


class SequentialOrder:
    """The order in which samples lie in the dataset."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = _checked(num_samples)

    def indices(self, start: int, stop: int) -> list[int]:
        return list(range(start, min(stop, self.num_samples)))

    def state_dict(self) -> dict[str, Any]:
        return {"order": "in turn", "num_samples": self.num_samples}


class Shuffled:
    """A random order that ``seed`` and ``epoch`` choose: up to ``_MOST_SORTED`` samples kept, above computed by blocks.

    With up to ``_MOST_SORTED`` samples (65,536) the indices are sorted by random numbers, and kept as an array. With
    more only the last block of positions is kept: a position goes through rounds of additions, multiplications and
    shifts, with keys drawn from seed and epoch. Each of these can be undone, so that a round is a bijection of all
    numbers with as many bits as the largest index; the rounds are repeated until the result is an index (cycle
    walking).
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        self.num_samples = _checked(num_samples)
        self._seed, self._epoch = seed, epoch
        self._algorithm = _SORTED if num_samples <= _MOST_SORTED else _ROUNDS
        self._sorted: npt.NDArray[np.int64] | None = None
        self._num_bits = max(num_samples - 1, 1).bit_length()
        self._kept: tuple[int, list[int]] = -1, []  # the last block, and which it is
        self._keys = _keys(seed, epoch, 2 * _NUM_ROUNDS + 1)

    def indices(self, start: int, stop: int) -> list[int]:
        stop = min(stop, self.num_samples)
        if stop <= start:
            return []
        if self._algorithm == _SORTED:
            if self._sorted is None:
                self._sorted = _in_random_order(self.num_samples, self._keys[0])
            return list(self._sorted[start:stop].tolist())
        block, at = divmod(start, _BLOCK)
        found = self._block(block)[at : at + stop - start]
        while len(found) < stop - start:
            block += 1
            found += self._block(block)[: stop - start - len(found)]
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": "shuffled",
            "algorithm": self._algorithm,
            "num_samples": self.num_samples,
            "seed": self._seed,
            "epoch": self._epoch,
        }

    def _block(self, block: int) -> list[int]:
        if self._kept[0] != block:
            stop = min((block + 1) * _BLOCK, self.num_samples)  # walks that begin outside may never come in
            found = self._permuted(np.arange(block * _BLOCK, stop, dtype=np.uint64))
            while (outside := found >= self.num_samples).any():
                found[outside] = self._permuted(found[outside])
            self._kept = block, found.tolist()
        return self._kept[1]

    def _permuted(self, positions: _Words) -> _Words:
        """Positions permuted among all numbers with as many bits; overflow is cut off, as it is meant to be."""
        all_bits = np.uint64((1 << self._num_bits) - 1)
        half = np.uint64((self._num_bits + 1) // 2)
        *keys, last = self._keys
        numbers = positions + last
        for added, factor in zip(keys[::2], keys[1::2], strict=True):
            numbers &= all_bits
            numbers ^= numbers >> half
            numbers += added
            numbers *= factor | np.uint64(1)  # an odd one, or numbers would fall together
        numbers &= all_bits
        permuted: _Words = numbers
        return permuted


class Drawn:
    """The order that a sampler gave, kept in memory as it came."""

    def __init__(self, indices: Iterable[Any]) -> None:
        told = told_length(indices)
        most = max(told or 0, _MOST_UNCOUNTED)
        drawn = [_own(index) for index in islice(indices, most + 1)]
        if len(drawn) > most:
            length = "no length" if told is None else f"a length of {told}"
            raise ValueError(
                f"the sampler has {length}, and gave {most} samples without coming to an end; have the sampler stop at "
                "the end of an epoch, or have its __len__ say how many samples an epoch has"
            )
        self._keep(drawn)

    @classmethod
    def of_batches(cls, batches: Iterable[Any], num_samples: int | None) -> Drawn:
        """The batches that a batch sampler gave, of a dataset with ``num_samples`` samples, if that is known."""
        drawn = cls(())
        drawn._keep([_own(batch) for batch in _bounded(batches, num_samples or 0)])
        return drawn

    def _keep(self, drawn: list[Any]) -> None:
        is_plain = all(type(index) is int and -(1 << 63) <= index < 1 << 63 for index in drawn)
        self._indices: Any = np.array(drawn, dtype=np.int64) if is_plain else drawn
        self.num_samples = len(drawn)

    def indices(self, start: int, stop: int) -> list[Any]:
        part = self._indices[start:stop]
        return list(part.tolist()) if isinstance(part, np.ndarray) else list(part)

    def state_dict(self) -> dict[str, Any]:
        told = self._indices.tobytes() if isinstance(self._indices, np.ndarray) else repr(self._indices).encode()
        digest = hashlib.blake2b(told, digest_size=16).hexdigest()
        return {"order": "drawn", "num_samples": self.num_samples, "digest": digest}


class BatchOrder:
    """An order of whole batches: each position has a list of indices, and ``num_samples`` counts batches."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.num_samples = order.num_samples

    def indices(self, start: int, stop: int) -> list[Any]:
        """The indices of the one batch at ``start``."""
        assert stop == start + 1
        return list(self._order.indices(start, stop)[0])

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()


class EvenOrder:
    """An order cut short, or padded with its first samples again, so that all ranks have equally many samples."""

    def __init__(self, order: Order, num_samples: int) -> None:
        self._order = order
        self.num_samples = num_samples

    def indices(self, start: int, stop: int) -> list[Any]:
        found: list[Any] = []
        while start < stop:
            first = start % self._order.num_samples
            last = min(first + stop - start, self._order.num_samples)
            found += self._order.indices(first, last)
            start += last - first
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()


class RemainingOrder:
    """An order without the samples that were consumed before their turn; its positions count the others alone."""

    def __init__(self, order: Order, completed: Ranges) -> None:
        self._order = order
        self._completed = completed
        self.num_samples = order.num_samples - sum(stop - start for start, stop in completed)

    def indices(self, start: int, stop: int) -> list[Any]:
        return [index for part in self.places(start, stop) for index in self._order.indices(*part)]

    def places(self, start: int, stop: int) -> Ranges:
        """Which positions of the whole order are those from ``start`` to before ``stop`` in this one."""
        found = []
        num_before = 0  # positions that are left out before this one
        for first, last in self._completed:
            gap = first - num_before
            if stop <= gap:
                break
            if start < gap:
                found.append((start + num_before, first))
                start = gap
            num_before += last - first
        return (*found, (start + num_before, stop + num_before)) if start < stop else tuple(found)

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()


def _bounded(batches: Iterable[Any], num_samples: int) -> Iterator[Any]:
    """The batches of a batch sampler; ValueError where they come to no end."""
    told = told_length(batches)
    most, num_given = max(_MOST_IN_BATCHES, _MOST_TIMES * num_samples), 0
    for number, batch in enumerate(batches, 1):
        num_given += told_length(batch) or 1
        if num_given > most and number > (told or 0):
            length = "no length" if told is None else f"a length of {told}"
            raise ValueError(
                f"the batch_sampler has {length}, and gave {number} batches of more than {most} samples in all without "
                "coming to an end; have the batch_sampler stop at the end of an epoch, or have its __len__ say how "
                "many batches an epoch has"
            )
        yield batch


def told_length(thing: Any) -> int | None:
    """The length that ``thing`` declares by ``__len__``; None where it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):  # it may have the method, and no length
        return None


def _own(index: Any) -> Any:
    """A copy of an index that a sampler has yielded: the sampler may fill one list, or one array, again and again."""
    if type(index) is int:
        return index
    if isinstance(index, list | set | dict | deque):
        return copy(index)
    return deepcopy(index) if getattr(index, "ndim", 0) > 0 else index


def _checked(num_samples: int) -> int:
    if not 0 <= num_samples <= _MOST_SAMPLES:
        raise ValueError(f"the dataset has {num_samples} samples; allowed: 0 to {_MOST_SAMPLES}")
    return num_samples


def _keys(seed: int, epoch: int, num_keys: int) -> _Words:
    """Keys drawn from seed and epoch: numbers that look random, the same on every machine."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest()
    told = b"".join(
        hashlib.blake2b(digest, digest_size=8, person=b"%d" % number).digest() for number in range(num_keys)
    )
    return np.frombuffer(told, dtype="<u8").astype(np.uint64)


def _in_random_order(num_samples: int, key: np.uint64) -> npt.NDArray[np.int64]:
    """All numbers below ``num_samples`` in a random order.

    Each number is written into the lower bits of a random word; the words are sorted, and the lower bits read back.
    """
    numbers = np.arange(num_samples, dtype=np.uint64)
    number_bits = np.uint64((1 << max(num_samples - 1, 0).bit_length()) - 1)
    words: _Words = np.sort(_mixed(numbers, key) & ~number_bits | numbers)
    mixed: npt.NDArray[np.int64] = (words & number_bits).astype(np.int64)
    return mixed


def _mixed(words: _Words, key: np.uint64) -> _Words:
    """Each word as one that looks random, another one for each key; overflow is cut off, as it is meant to be."""
    mixed: _Words = (words ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = mixed ^ (mixed >> np.uint64(32))
    return mixed


# --- how far an epoch has come, as one number, and the micro-batches that come next ----------------------------------
# A position counts samples of the epoch in the order that all ranks share; steps take them in turn, micro-step by
# micro-step, and in each of them rank by rank. So what lies before a position is all that was taken, whatever the
# number of ranks was, and whatever it will be.


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch of one rank: the samples at positions from ``start`` to before ``stop``."""

    start: int
    stop: int
    micro_step_stop: int
    """The position at which the micro-step of this micro-batch ends, with the parts of all ranks."""
    ends_step: bool
    """Whether this is the last micro-batch of its step."""
    sizes: tuple[int, ...] = field(default=(), compare=False)
    """How many samples each rank has in this micro-step."""

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def chunks(
    plan: BatchPlan,
    rank: int,
    *,
    position: int,
    num_samples: int | None,
    carried: tuple[int, ...] | None = None,
) -> Iterator[Chunk]:
    """The micro-batches of ``rank`` from a step's beginning at ``position`` to the end of the epoch.

    ``num_samples`` is the epoch's; None where it never ends. Micro-steps in which ``rank`` has no samples give none.
    The first step begins with micro-batches of the sizes ``carried``, where these are given.
    """
    while True:
        step = plan.next_step(None if num_samples is None else num_samples - position, carried)
        carried = None
        if step is None:
            return
        last = step.num_micro_steps - 1
        for number, sizes in enumerate(zip(*step.micro_batches, strict=True)):
            start = position + sum(sizes[:rank])
            position += sum(sizes)
            if sizes[rank]:
                yield Chunk(start, start + sizes[rank], position, number == last, sizes)


def num_chunks(plan: BatchPlan, rank: int, num_samples: int, carried: tuple[int, ...] | None = None) -> int:
    """How many micro-batches ``chunks`` gives from a step's beginning on, where ``num_samples`` samples are left."""
    if carried is not None and (first := plan.next_step(num_samples, carried)) is not None:
        rest = num_chunks(plan, rank, num_samples - first.global_batch)
        return sum(size > 0 for size in first.micro_batches[rank]) + rest
    num_full = num_samples // plan.global_batch
    if plan.is_even and not plan.drop_last:
        # A step is full as long as it leaves a sample for each rank; fewer join the last step, as in next_batch.
        num_full = max(-(-(num_samples - plan.global_batch - plan.num_ranks + 1) // plan.global_batch), 0)
    last = plan.next_step(num_samples - num_full * plan.global_batch)
    last_sizes = () if last is None else last.micro_batches[rank]
    return num_full * plan.full_step.num_micro_steps + sum(size > 0 for size in last_sizes)


class Cursor:
    """One rank's position in an epoch: what is handed out, and what of that is consumed."""

    def __init__(self, num_samples: int | None, *, position: int = 0) -> None:
        if position < 0 or (num_samples is not None and position > num_samples):
            raise ValueError(f"the position is {position}; allowed: 0 to {num_samples}, the samples of the epoch")
        self.num_samples = num_samples
        self.committed = position
        """The position before which all samples are consumed; after it only those are that an IndexedLoop handed out
        before their turn."""
        self.handed = position
        """The position before which all samples are handed out, by all ranks together."""

    @property
    def remaining(self) -> int | None:
        """Samples that are not consumed; None where the epoch never ends."""
        return None if self.num_samples is None else self.num_samples - self.committed

    def hand_out(self, chunk: Chunk) -> None:
        """Count a micro-batch as handed out; the other ranks hand out theirs of the same micro-step."""
        self.handed = chunk.micro_step_stop

    def hand_out_rest(self) -> None:
        """Count all that is left as handed out, by the other ranks."""
        assert self.num_samples is not None
        self.handed = self.num_samples

    def commit(self, position: int | None = None) -> bool:
        """Count what was handed out, up to ``position`` or all, as consumed; gives whether that was anything."""
        before = self.committed
        self.committed = self.handed if position is None else position
        return self.committed != before

    def rollback(self) -> bool:
        """Have all be handed out again that is not consumed; gives whether that was anything."""
        has_moved = self.committed != self.handed
        self.handed = self.committed
        return has_moved
