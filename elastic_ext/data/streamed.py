"""Streamed: the loops over an IterableDataset, of which each worker has a stream; where one stands is told for each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from elastic_ext.accumulate import BatchPlan

from .making import Making
from .stream import Stream, can_tell_state
from .streams import NO_STATE, Streams
from .turns import StreamsPosition

__all__ = ["Streamed"]


class Streamed:
    """The epochs of a dataset that gives its samples itself. Ranks and workers see to it that each gives its own."""

    remaining = seed = None
    draws_order = False
    num_ranks = 1
    auto_collation = False
    keeps_workers = True  # they share the samples out among them
    has_own_positions = True

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[Any], Any],
        fast_forward: bool,
        in_order: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._auto_collation = batch_size is not None
        self.collate_fn = _as_it_is
        self.epoch = 0
        self.running: Streams | None = None
        self._dataset = dataset
        self._batch_size = batch_size or 1
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._in_order = in_order
        self._is_pipe = isinstance(dataset, IterDataPipe)
        self._seed = seed
        self._generator = generator
        self._drawn_seed: int | None = None
        self._pipe_seed: int | None = None  # by which a data pipe shuffles in the loop under way, or in the one to come
        self._can_go_on = fast_forward or can_tell_state(dataset)
        self._given_plan: BatchPlan | None = None
        self._rank = 0
        self._position: StreamsPosition | None = None  # that the next loop begins at
        self._left: StreamsPosition | None = None  # in a copy: where the loop stood of which it has none
        self._wants_states = False  # somebody has asked where a loop stands, or gone on there
        self._is_begun = False
        self._is_over = False  # the epoch of a state that was loaded
        self._next_epoch: int | None = None  # named while a loop is under way
        self._num_loops = 0
        self._told_length: int | None = None  # samples that the dataset said it has, when the loader was asked

    @property
    def asked(self) -> Stream:
        """A new one: loops that go on side by side do not draw from the same."""
        return Stream(
            self._dataset,
            self._collate_fn,
            auto_collation=self._auto_collation,
            share_out=_SharesPipe.of_this_rank() if self._is_pipe else None,
        )

    @property
    def num_workers(self) -> int | None:
        return None if self._position is None else self._position.num_workers

    @property
    def is_at_end(self) -> bool:
        return self._is_over if self.running is None else self.running.position.is_over

    @property
    def why_no_position(self) -> str | None:
        """Why a loop cannot go on where this one is, None if it can."""
        running = self.running
        if self._can_go_on or running is None or running.position.is_over or not any(running.position.num_passed):
            return None
        return NO_STATE

    @property
    def goes_on(self) -> bool:
        return self._position is not None

    def __getstate__(self) -> dict[str, Any]:
        """All but the loop that is under way, which a copy has none of: it says where that one stands."""
        left = self._left if self.running is None else self.running.position
        return {**self.__dict__, "running": None, "_left": left}

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def draw_seed(self) -> None:
        draws = self._is_pipe and not self._goes_on_shuffled and self._seed is None
        if draws and _SharesPipe.of_this_rank().num_ranks == 1:
            self._drawn_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())

    def begin(self, making: Making) -> Streams:
        if self.running is not None and self._given_plan is not None:
            self.running.end()  # a trainer counts what one loop takes
        named, self.running = self._next_epoch, None
        if named is not None:
            self.set_epoch(named)
        elif self._is_begun:
            self.epoch += 1
        self._is_begun, self._is_over, self._next_epoch, self._left = True, False, None, None
        if self._is_pipe and not self._goes_on_shuffled:
            self._pipe_seed = self._seed_of_epoch() if self._drawn_seed is None else self._drawn_seed
        self.running = Streams(
            making,
            self._position or StreamsPosition.start(making.num_workers),
            loop=self._new_loop(),
            batch_size=self._batch_size,
            drop_last=self._drop_last,
            collate_fn=self._collate_fn,
            num_batches=self._num_batches,
            told_length=self._told_length,
            passes_samples=self._can_go_on,
            wants_states=self._wants_states,
            in_order=self._in_order,
            seed=self._pipe_seed or 0,
            plan=self._given_plan,
            rank=self._rank,
        )
        self._position = None
        return self.running

    def num_batches(self) -> int:
        self._told_length = len(self._dataset)
        return self._num_batches()

    def why_not_resize(self, batch_size: int) -> str | None:
        return None

    def resize(self, batch_size: int) -> None:
        self._batch_size = batch_size
        if self.running is not None:
            self.running.resize(batch_size)

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self._given_plan, self._rank = plan, rank
        if self.running is not None:
            self.running.plan(plan, rank)

    def leave_epoch(self) -> None:
        if self.running is not None and self.running.has_ended and any(self.running.position.num_passed):
            self.running, self._left, self._is_over = None, None, True

    def set_epoch(self, epoch: int) -> None:
        if self._is_under_way:
            self._next_epoch = epoch
            return
        if epoch != self.epoch or self.running is not None:
            self._position = None
        self.running = self._left = None
        self.epoch = epoch
        self._is_begun = False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def take_seed(self, seed: int) -> None:
        """It has none."""

    def order_to_come(self) -> None:
        """It has none."""

    def state_dict(self) -> dict[str, Any]:
        self._wants_states = True
        if self.running is not None:
            self.running.wants_states = True
        position = self._position
        if position is None:
            position = self._left if self.running is None else self.running.position
        state = {
            "epoch": self.epoch,
            "is_over": self._is_over if position is None else position.is_over,
            "streams": None if position is None else position.state_dict(),
        }
        return state | {"pipe_seed": self._pipe_seed} if self._is_pipe else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "streams" not in state:
            raise ValueError(
                f"the state is of a dataset whose samples are asked for by index ({sorted(state)}), and this one is an "
                "IterableDataset; give the loader the dataset with which the state was saved"
            )
        position = None if state["streams"] is None or state["is_over"] else StreamsPosition.of(state["streams"])
        if position is not None and any(position.num_passed) and not self._can_go_on:
            raise ValueError(f"the loop cannot go on where the state was saved: {NO_STATE}")
        self._wants_states = True
        self.epoch = int(state["epoch"])
        self.running = self._left = None
        self._is_begun = self._is_over = bool(state["is_over"])
        self._position, self._next_epoch = position, None
        self._pipe_seed = state.get("pipe_seed")

    def rewind(self, state: Mapping[str, Any]) -> None:
        running = self.running
        self.load_state_dict(state)
        if running is None or running.has_ended:
            return
        position = self._position or StreamsPosition.start(running.num_workers)
        if position.num_workers != running.num_workers:
            raise ValueError(
                f"the loop under way has {running.num_workers} workers, and where it is to go back to was saved with "
                f"{position.num_workers}; leave the loop first"
            )
        running.seed = self._pipe_seed or 0
        running.go_to(replace(position, is_over=False))
        self.running, self._position, self._is_begun = running, None, True

    @property
    def _goes_on_shuffled(self) -> bool:
        """The loop that comes goes on with one whose data pipe was shuffled by a seed that is known."""
        return self._position is not None and self._pipe_seed is not None

    @property
    def _is_under_way(self) -> bool:
        """Somebody loops."""
        return self.running is not None and not self.running.has_ended

    def _num_batches(self) -> int:
        size = self._given_plan.micro_batch if self._given_plan is not None else self._batch_size
        num_samples = len(self._dataset)
        return num_samples // size if self._drop_last else -(-num_samples // size)

    def _seed_of_epoch(self) -> int:
        """What a data pipe shuffles by where nothing was drawn: alike on all ranks, without asking."""
        seed = self._seed
        if seed is None:
            seed = 0 if self._generator is None else self._generator.initial_seed()
        digest = hashlib.blake2b(f"{seed} {self.epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _new_loop(self) -> int:
        self._num_loops += 1
        return self._num_loops


@dataclass(frozen=True)
class _SharesPipe:
    """Has a data pipe's own parts shuffle alike everywhere, and give each worker of each rank its share, as torch's."""

    rank: int
    num_ranks: int

    @classmethod
    def of_this_rank(cls) -> _SharesPipe:
        joined = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if joined else cls(0, 1)

    def __call__(self, pipe: Any, seed: int) -> None:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        apply_sharding(pipe, num_workers * self.num_ranks, worker * self.num_ranks + self.rank)
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))


def _as_it_is(answer: Any) -> Any:
    return answer
