"""Lineage: the runs that a checkpoint comes from, and whether another checkpoint lies on the same line. Pure.

run       one life of a job's processes, from start to end; it has an id of its own
chain     the runs that lead to a state of training: each but the first went on from a checkpoint of the one before it
abandoned what a run saved after the point from which a later run went on, where that point was not its last
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Chain", "Lineage", "check_chain", "check_id", "place_in"]

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """One run of a chain, and where it left the run before it."""

    id: str
    from_step: int = 0
    """The global step of the checkpoint from which it went on."""
    from_generation: str | None = None
    """That checkpoint's generation; None for a run that began from nothing."""

    def __post_init__(self) -> None:
        check_id("a run's id", self.id)
        if type(self.from_step) is not int or self.from_step < 0:
            raise ValueError(f"from_step of run {self.id} is {self.from_step!r}; allowed: an integer >= 0")
        if self.from_generation is not None:
            check_id(f"from_generation of run {self.id}", self.from_generation)


Chain: TypeAlias = tuple[Lineage, ...]


def check_id(what: str, given: object) -> None:
    """ValueError unless ``given`` may be an id: what is short, and can be a part of any file's name."""
    if not isinstance(given, str) or _ID.fullmatch(given) is None:
        raise ValueError(f"{what} is {str(given)[:80]!r}; allowed: 1 to 64 of the characters 0-9 A-Z a-z _ -")


def check_chain(chain: Sequence[Lineage]) -> None:
    """ValueError unless ``chain`` holds a run, each once, and each went on from where the one before had come."""
    if not chain:
        raise ValueError("a lineage holds no run; allowed: at least the one that saves")
    if len({one.id for one in chain}) < len(chain):
        raise ValueError(f"a lineage holds a run twice: {', '.join(one.id for one in chain)}; allowed: each run once")
    for parent, child in itertools.pairwise(chain):
        if child.from_step < parent.from_step:
            raise ValueError(
                f"run {child.id} goes on from step {child.from_step} of run {parent.id}, which began at step "
                f"{parent.from_step}; allowed: a step not before that"
            )


def place_in(chain: Sequence[Lineage], *, run_id: str, global_step: int) -> int | None:
    """Which run of ``chain`` saved what run ``run_id`` did at ``global_step``, None where that is not on its way."""
    for place, one in enumerate(chain):
        if one.id == run_id:
            is_last = place + 1 == len(chain)
            return place if is_last or global_step <= chain[place + 1].from_step else None
    return None
