"""The control word: what one rank says at an agreement, as a few integers that a single MAX reduction combines.

Two kinds of field: what must be the same on all ranks (it travels as x and -x, so that the largest and the smallest
both arrive) and what any one rank can raise (a flag, or a wish for the largest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["AgreedWord", "ControlWord", "Purpose"]


class Purpose(IntEnum):
    """Why ranks exchange words; ranks with unlike purposes have lost step with each other."""

    ROUTINE = 1
    """Every so many boundaries; read one boundary later."""
    APPLY = 2
    """Right before a scheduled config is applied."""


_SAME = ("purpose", "boundary", "step", "backwards", "in_force")
_SPREAD = ("held_version",)
_ANY = ("fresh", "proposing", "asking", "stop", "save", "wanted_interval")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlWord:
    """One rank's word."""

    purpose: Purpose
    boundary: int
    """How many boundaries this rank has passed."""
    step: int
    backwards: int
    """How many backward passes the caller has counted."""
    in_force: int
    """A number that stands for the config in force."""
    held_version: int
    """The version this rank could put in force; the one in force where it has nothing new."""
    fresh: bool
    """It holds contents that no round has heard of yet."""
    proposing: bool
    asking: bool
    """It wants to know who lacks a config."""
    stop: bool
    save: bool
    wanted_interval: int
    """How many boundaries this rank would have between two agreements."""

    def to_integers(self) -> list[int]:
        both = [int(getattr(self, name)) for name in (*_SAME, *_SPREAD)]
        return [*both, *(-value for value in both), *(int(getattr(self, name)) for name in _ANY)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedWord:
    """All ranks' words combined; the same on every rank."""

    differing: tuple[str, ...]
    """The fields that should be the same on all ranks and are not."""
    step: int
    lowest_held: int
    highest_held: int
    fresh: bool
    proposing: bool
    asking: bool
    stop: bool
    save: bool
    interval: int

    @classmethod
    def from_integers(cls, reduced: Sequence[int]) -> AgreedWord:
        """Read the element-wise largest of every rank's ``to_integers``."""
        num_both = len(_SAME) + len(_SPREAD)
        highest = dict(zip((*_SAME, *_SPREAD), reduced[:num_both], strict=True))
        lowest = dict(zip((*_SAME, *_SPREAD), (-value for value in reduced[num_both : 2 * num_both]), strict=True))
        raised = dict(zip(_ANY, reduced[2 * num_both :], strict=True))
        return cls(
            differing=tuple(name for name in _SAME if highest[name] != lowest[name]),
            step=highest["step"],
            lowest_held=lowest["held_version"],
            highest_held=highest["held_version"],
            fresh=bool(raised["fresh"]),
            proposing=bool(raised["proposing"]),
            asking=bool(raised["asking"]),
            stop=bool(raised["stop"]),
            save=bool(raised["save"]),
            interval=raised["wanted_interval"],
        )
