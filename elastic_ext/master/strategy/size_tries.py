"""SizeTries: which other size of steps is tried, if any: what a controller asks of sizes, beside its courses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .book import Book
from .budget import Budget
from .change import changed_facts
from .decisions import Decision
from .growth import Growth
from .resizing import Resizing
from .seen import Seen

if TYPE_CHECKING:
    from .course import Course
    from .search import Search

__all__ = ["SizeTries"]


class SizeTries:
    """Of one job."""

    def __init__(self, book: Book, decisions: Sequence[Decision]) -> None:
        self._book = book
        self._growth = Growth(decisions)
        self._now: Resizing | None = None

    # ---- what is asked ----

    @property
    def is_trying(self) -> bool:
        """Whether steps have another size for a while, or are to have the one before again."""
        return self._now is not None

    @property
    def is_going_back(self) -> bool:
        """Whether they are to have the one before again."""
        return self._now is not None and self._now.stage == "back"

    def is_back(self, facts: JobFacts) -> bool:
        """Whether steps have the one before again, be it that they never had another."""
        return self._now is not None and self._now.is_back(facts)

    def waits_for_noise(self, facts: JobFacts | None, tuning: TuningSection) -> bool:
        """Whether steps may grow, and it is not known yet how noisy they are."""
        return facts is not None and self._growth.waits(facts, tuning)

    # ---- what is told ----

    def take_config(self) -> None:
        """A person, or a node's file, has changed the config: what was refused may be possible now."""
        self._growth.allow()

    def forget(self) -> None:
        """Steps take something else from now on, whatever their size."""
        self._growth.forget()

    def drop(self) -> None:
        """Nothing is tried any more, whatever is in force."""
        self._now = None

    def take_size(self, before: JobFacts, facts: JobFacts, tuning: TuningSection, budget: Budget) -> bool:
        """Whether steps have another size because that was asked for here, and nothing else is another job's."""
        if self._now is None or before.global_batch == facts.global_batch or facts.global_batch != self._now.size:
            return False
        alike = replace(before, global_batch=facts.global_batch, share=facts.share)
        if changed_facts(alike, facts):
            return False
        budget.change_pace(self._growth.progress_ratio(before, facts, tuning))
        return True

    def take_facts(self, facts: JobFacts) -> bool:
        """Whether what is known of the job is of the size that is tried."""
        return self._now is not None and self._now.take_facts(facts)

    def written(self, number: int, version: int) -> None:
        """The config of a decision has this version."""
        if self._now is not None:
            self._now.written(number, version)

    def see(self, now: float, seen: Seen) -> tuple[list[Decision], Search | None]:
        """Steps that can be trusted; with the search that goes on where the size that was tried stays."""
        assert self._now is not None
        trying = self._now
        told = trying.see(now, seen)
        if trying.stage != "kept":
            return told, None
        self._now = None
        return told, trying.search

    def refused(self, number: int, why: str) -> list[Decision]:
        """The config of a decision is not put in force."""
        return self._ended(lambda trying: trying.refused(number, why))

    # ---- what is decided ----

    def look(
        self, now: float, course: Course, facts: JobFacts, tuning: TuningSection, *, writes: bool
    ) -> list[Decision]:
        """Whether a step of another size would teach more in the same time, where nothing else is to be tried."""
        if not course.is_at_rest or not self._growth.is_due(facts, tuning):
            return []
        wish = self._growth.propose(facts, tuning, course.search)
        if wish is None:
            return []
        trying = Resizing(self._book, self._growth, tuning)
        if not writes:
            return trying.advise(now, wish, facts, course) if self._growth.is_news(wish) else []
        if not wish.is_needed and not course.can_pay_for(wish.most_seconds_alike, trying.probe_steps):
            return []
        self._now = trying
        return trying.begin(now, wish, facts, course)

    def leave(self, now: float, why: str) -> list[Decision]:
        """What is tried is not left in force."""
        return self._ended(lambda trying: trying.leave(now, why))

    def go_back(
        self, now: float, facts: JobFacts, tuning: TuningSection, changes: Mapping[str, Any], why: str
    ) -> list[Decision]:
        """Have a size in force again that steps had before, with what else is to be set."""
        self._now = Resizing(self._book, self._growth, tuning)
        return self._now.begin_back(now, facts, changes, why)

    def undo(self, now: float, last: Decision, back: Mapping[str, Any], why: str) -> list[Decision] | None:
        """Take ``last`` back, which was kept, by setting ``back``, and with it what is tried, since a person asks.

        None where nothing is tried, so that it is up to others.
        """
        self._growth.take_back(last)
        trying, self._now = self._now, None
        if trying is None or not trying.is_written:
            return None
        self._now = trying
        return trying.go_back(now, why, back)

    def _ended(self, ask: Callable[[Resizing], list[Decision]]) -> list[Decision]:
        """What comes of a try that may be over by that."""
        if self._now is None:
            return []
        told = ask(self._now)
        if self._now.stage == "over":
            self._now = None
        return told
