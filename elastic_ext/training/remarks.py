"""What is said once about a loop because it is mostly a mistake, and whether a schedule is made for the number of
steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_ext.ranks.world import World

__all__ = ["EpochLength", "LengthRemark", "Remarks", "lengths_of", "next_look", "remark_on_length"]

_logger = logging.getLogger(__name__)


# --- what is said once about a loop, since it may be meant and mostly is a mistake; and when it is looked for --------

_MOST_BETWEEN_LOOKS = 1024
"""Steps. A look takes a few hundred microseconds: of a training of many steps, less than one in each."""


def next_look(number: int) -> int:
    """The number of the first step after ``number`` in which the loop is checked.

    It is checked in the first eight steps, then in ever fewer: there are four looks in each doubling of the number,
    until _MOST_BETWEEN_LOOKS steps lie between two.
    """
    following = number + 1
    return following + -following % _between_looks(following)


def _between_looks(number: int) -> int:
    """How many steps lie between two looks around the step of that number."""
    return min(1 << max(number.bit_length() - 3, 0), _MOST_BETWEEN_LOOKS)


class Remarks:
    """Warnings about a training loop, each logged once: by the first rank, or by the rank that they are about."""

    def __init__(self) -> None:
        self.are_logged = True
        """Whether this rank is the one that logs the warnings."""
        self.on_said: Callable[[str], None] | None = None
        """Called with each warning that this rank logs."""
        self._said: set[str] = set()

    def take_world(self, world: World) -> None:
        """Log what is said from here on where this rank is the first of ``world``."""
        self.are_logged = world.rank == 0

    def mention(self, kind: str, text: str) -> None:
        """Log ``text``, which is right of many loops and no warning, unless one of its kind was logged before."""
        if kind not in self._said and self.are_logged:
            _logger.info("%s (this is logged once)", text)
        self._said.add(kind)

    def say(self, kind: str, text: str | None, *, on_any_rank: bool = False) -> None:
        """Log ``text``, if there is one, unless a warning of its kind was logged before."""
        if text is None or kind in self._said:
            return
        self._said.add(kind)
        if self.are_logged or on_any_rank:
            _logger.warning("%s (this warning is logged once)", text)
            if self.on_said is not None:
                self.on_said(text)


# --- how many steps a schedule is made for, and whether that number was counted in micro-batches ---------------------

_LENGTHS = ("T_max", "total_steps", "total_iters")
_FEWEST_BATCHES = 8  # of fewer almost every number is a multiple
_IN_PARTIAL = "num_training_steps"  # the name of it in transformers' schedules, which are partial functions


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochLength:
    """How long an epoch is, as a script can count it before ``prepare()``."""

    num_batches: int
    """Batches in an epoch, as ``len(dataloader)`` gives them."""
    batch_samples: int
    """Samples in such a batch, over all ranks where each has its own."""

    def num_steps(self, global_batch: int) -> int:
        return -(-self.num_batches * self.batch_samples // global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRemark:
    """A remark on a schedule whose length may have been counted in micro-batches, while it steps once per step."""

    text: str
    may_be_right: bool
    """Whether the length is one of whole epochs of steps as well, and only the end of training tells which it is."""
    num_steps: int
    """How many steps training has if the length counts micro-batches."""
    text_at_end: str
    """The warning where training has ended after so many steps."""


def remark_on_length(
    scheduler: Any, epoch: EpochLength, global_batch: int, max_steps: int | None = None
) -> LengthRemark | None:
    """A remark on a schedule that may be made for micro-batches, and steps once per step; None for none.

    ``max_steps`` is the number of steps that the loop takes, where it says so. How many epochs it takes it never says:
    a length of so many epochs of micro-batches may be one of more epochs of steps too.
    """
    num_batches, num_steps = epoch.num_batches, epoch.num_steps(global_batch)
    if num_batches < _FEWEST_BATCHES or 3 * num_steps > 2 * num_batches:
        return None
    for name, length in lengths_of(scheduler):
        if length <= 0 or length % num_batches or (max_steps is not None and length <= max_steps):
            continue
        num_epochs = length // num_batches
        epochs, each = (f"{num_epochs} epochs", "each") if num_epochs > 1 else ("one epoch", "it")
        right = f"right for {length // num_steps} epochs of {num_steps} steps each" if length % num_steps == 0 else ""
        text = (
            f"{type(scheduler).__name__} has {name} {length}, and steps once per step of the global batch of "
            f"{global_batch} samples: {right or 'no whole number of epochs'}; if training has {epochs}, {length} "
            f"counts the {num_batches} micro-batches of {each}, as len(dataloader) gives them, and the schedule would "
            f"not come to its end: give it the number of steps, {num_epochs * num_steps}"
        )
        at_end = (
            f"training has ended after {epochs} of {num_steps} steps, and {type(scheduler).__name__} has {name} "
            f"{length}, which counts the {num_batches} micro-batches of {each}, as len(dataloader) gives them: the "
            f"schedule has not come to its end; give it the number of steps, {num_epochs * num_steps}"
        )
        may_be_right = bool(right) and max_steps is None
        return LengthRemark(text=text, may_be_right=may_be_right, num_steps=num_epochs * num_steps, text_at_end=at_end)
    return None


def lengths_of(scheduler: Any) -> Iterator[tuple[str, int]]:
    """The numbers of steps that a schedule and its parts are made for, each with its name."""
    for name in _LENGTHS:
        length = getattr(scheduler, name, None)
        if type(length) is int:
            yield name, length
    milestones = getattr(scheduler, "milestones", None)
    if milestones:  # a Counter
        yield "its last milestone at", max(milestones)
    for function in getattr(scheduler, "lr_lambdas", ()):
        length = getattr(function, "keywords", {}).get(_IN_PARTIAL)
        if type(length) is int:
            yield _IN_PARTIAL, length
            break
    parts, begins = getattr(scheduler, "_schedulers", ()), getattr(scheduler, "_milestones", ())
    if parts and begins:
        for _, length in lengths_of(parts[-1]):
            yield "an end at", begins[-1] + length
        yield "its last milestone at", begins[-1]
    elif parts:
        for part in parts:
            for name, length in lengths_of(part):
                yield f"a {type(part).__name__} with {name}", length
