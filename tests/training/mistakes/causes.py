"""Causes: what a row of the table of mistakes holds, and the rooms that rows stand in.

A mistake is a loop that trains something else than its author believes. A row gives the loop and what it has to get:
the sentence, how it comes, and when. test_mistakes.py runs all rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tests.training.mistakes.training import Training

__all__ = ["Cause", "Found", "HowItComes", "Loop", "Room"]

Loop = Callable[[Training], None]
HowItComes = Literal["StepError", "ValueError", "ElasticError", "RanksDisagreeError", "TornStepError", "warning"]
Found = Literal["at once", "first steps", "sampled", "at the end"]
"""At once: where it is made. Sampled: in the first steps and in ever fewer after them. At the end: of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One mistake."""

    name: str
    """A sentence."""
    loop: Loop
    """Makes the mistake."""
    says: str | re.Pattern[str]
    """What the sentence begins with, to the letter; or a pattern for all of it, where numbers are filled in."""
    comes_as: HowItComes
    found: Found
    num_ranks: tuple[int, ...] = (1,)
    """With how many ranks the loop is run."""
    is_mended: bool = True
    """A loop without the mistake goes on afterwards, over all that no step has trained on."""
    num_committed: int | None = 0
    """Steps that stand when an error comes; None where ranks differ in that."""

    def is_said_by(self, text: str) -> bool:
        """Whether a message is this cause's."""
        if isinstance(self.says, str):
            return text.startswith(self.says)
        return self.says.fullmatch(text) is not None


class Room:
    """Causes that belong together, in the order in which they were written down."""

    def __init__(self) -> None:
        self._causes: list[Cause] = []

    def __iter__(self) -> Iterator[Cause]:
        return iter(self._causes)

    def cause(
        self,
        name: str,
        *,
        says: str | re.Pattern[str],
        comes_as: HowItComes,
        found: Found,
        num_ranks: tuple[int, ...] = (1,),
        is_mended: bool | None = None,
        num_committed: int | None = 0,
    ) -> Callable[[Loop], Loop]:
        """A decorator of the loop that makes the mistake; after a ValueError nothing goes on unless it is said."""

        def note(loop: Loop) -> Loop:
            self._causes.append(
                Cause(
                    name=name,
                    loop=loop,
                    says=says,
                    comes_as=comes_as,
                    found=found,
                    num_ranks=num_ranks,
                    is_mended=comes_as in ("StepError", "warning") if is_mended is None else is_mended,
                    num_committed=num_committed,
                )
            )
            return loop

        return note
