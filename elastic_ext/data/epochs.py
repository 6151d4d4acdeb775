"""Epochs: the loops over a dataset, one after another, and where they go on; what a loader must know of either kind.

A dataset that is asked for samples by index is in indexed.py, one that gives its samples itself in streamed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_ext.accumulate import BatchPlan

from .making import Making

__all__ = ["Epochs", "Running"]


class Running(Protocol):
    """One loop: an iterator over its batches."""

    @property
    def has_ended(self) -> bool:
        """Whether nobody loops any more."""

    @property
    def num_handed(self) -> int:
        """How many batches were handed out that are not consumed."""

    @property
    def carried(self) -> tuple[int, ...] | None:
        """The sizes, by rank, of the first of them, where it was handed out before steps were cut otherwise."""

    def __len__(self) -> int:
        """How many batches it hands out in all, as far as that is known."""

    def __next__(self) -> Any: ...

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from what is consumed on."""

    def commit(self, num_batches: int | None = None) -> None:
        """The first so many batches that were handed out are consumed, or all."""

    def rollback(self) -> None:
        """What was handed out and is not consumed comes again."""

    def end(self) -> None:
        """The loop is over: nothing is asked for any more."""


class Epochs(Protocol):
    """The loops over one dataset. A loop goes on where a state was; else it is over the epoch after the last one."""

    auto_collation: bool
    """Several samples are asked for at once, as a list."""

    @property
    def asked(self) -> Any:
        """What those who make batches ask for samples, instead of the dataset itself."""

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of what it gives."""

    @property
    def keeps_workers(self) -> bool:
        """Whether the number of workers stays what it was while somebody loops."""

    @property
    def has_own_positions(self) -> bool:
        """Whether each rank has to go on from a state of its own."""

    @property
    def why_no_position(self) -> str | None:
        """Why a loop cannot go on where this one is, None if it can."""

    @property
    def running(self) -> Running | None:
        """The last loop."""

    @property
    def remaining(self) -> int | None:
        """Samples of the epoch, over all ranks, that no commit has passed; None where that is not known."""

    @property
    def is_at_end(self) -> bool:
        """Whether the loop that is under way, or the last one, has nothing left, as far as it has seen."""

    @property
    def num_workers(self) -> int | None:
        """With how many workers alone the loop that comes can go on; None: any."""

    @property
    def num_ranks(self) -> int:
        """Among how many the samples are shared out, as far as that is known."""

    @property
    def goes_on(self) -> bool:
        """Whether the loop that comes goes on with an epoch that was under way."""

    def collate_with(self, collate_fn: Callable[[Any], Any]) -> None:
        """Have the workers of the loops that come make batches so."""

    def draw_seed(self) -> None:
        """Draw what the loop that comes is shuffled by, where torch draws that before what workers are seeded from."""

    def begin(self, making: Making) -> Running:
        """The loop that comes."""

    def num_batches(self) -> int:
        """How many batches the loop that comes has on this rank."""

    def why_not_resize(self, batch_size: int) -> str | None:
        """Why batches cannot have so many samples where nobody plans them, None if they can."""

    def resize(self, batch_size: int) -> None:
        """Batches of so many samples, where nobody plans them."""

    def plan(self, plan: BatchPlan, rank: int) -> None:
        """Cut steps like this from the last commit on."""

    def leave_epoch(self) -> None:
        """Nobody goes on with the epoch of the last loop, if that is over."""

    def set_epoch(self, epoch: int) -> None:
        """The loop that comes is over this one; one that is under way, or was loaded, goes on where it stands."""

    @property
    def seed(self) -> int | None:
        """What the order is drawn from, where it is to be the same on all ranks."""

    @property
    def draws_order(self) -> bool:
        """Whether more than that may say the order."""

    def take_seed(self, seed: int) -> None:
        """Draw the orders that come from this one."""

    def order_to_come(self) -> Mapping[str, Any] | None:
        """What the order of the loop that comes is, or of the one under way, as plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the loop that comes."""

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the loop that is under way, or in the one that comes."""
