"""Asking: what decides for a job is asked one thing after another, in the order in which things come, and never two at
once.

What it plans may take a part of a second, in which a master has others to answer. So that each question is handed to
whoever runs it, and the next one waits until its answer is there. Questions and answers come and go on one thread, the
master's; only what decides is used elsewhere. It does no I/O and reads no clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.measurements import Seen

from .configs import Author
from .tuning_words import Mode

__all__ = ["Ask", "Asking", "Kind", "Made", "Run", "Standing", "Strategy", "at_once"]

_logger = logging.getLogger(__name__)


class Standing(Protocol):
    """How a strategy stands."""

    @property
    def stand(self) -> str: ...
    @property
    def sentence(self) -> str: ...
    @property
    def best_rate(self) -> float | None: ...


class Strategy(Protocol):
    """What decides. It gives decisions that are new, or that have changed under the same number."""

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]: ...
    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]: ...
    def see(self, now: float, seen: Seen) -> list[Decision]: ...
    def tick(self, now: float) -> list[Decision]: ...
    def pause(self, now: float, why: str) -> list[Decision]: ...
    def resume(self, now: float) -> list[Decision]: ...
    def undo(self, now: float) -> list[Decision]: ...
    def written(self, now: float, number: int, version: int) -> None: ...
    def refused(self, now: float, number: int, why: str) -> list[Decision]: ...
    @property
    def standing(self) -> Standing: ...


Made = Callable[[Mode, Sequence[Decision]], Strategy]
Ask = Callable[[Strategy], Sequence[Decision]]
Kind = Literal["facts", "seen", "tick", "other"]
"""What is told: where much of it waits, the newest of its kind will do, but for what is other."""
Run = Callable[[Callable[[], Callable[[], None]]], None]
"""Has something done, wherever that is, and then calls what it gives, where ``Run`` was called from."""

MOST_WAITING: Mapping[Kind, int] = {"facts": 16, "seen": 16, "tick": 1}
"""The oldest of more is left out: of what has not answered for so long nothing is learned any more."""


@dataclass(frozen=True, slots=True)
class _Question:
    now: float
    kind: Kind
    ask: Ask
    life: int
    """Which strategy is asked: they are numbered."""
    make: Callable[[Sequence[Decision]], Strategy] | None = None
    """It is made first."""


def at_once(work: Callable[[], Callable[[], None]]) -> None:
    """Runs it right here."""
    work()()


class Asking:
    """One job's. Times are seconds since 1970."""

    def __init__(
        self,
        run: Run,
        *,
        known: Callable[[], Sequence[Decision]],
        take: Callable[[float, Sequence[Decision]], None],
        fail: Callable[[float, Exception], None],
    ) -> None:
        """``known`` is what was decided so far, ``take`` hears of what is decided, and ``fail`` that a strategy has
        failed, which has ended then."""
        self._run = run
        self._known = known
        self._take = take
        self._fail = fail
        self._waiting: deque[_Question | Callable[[], None]] = deque()
        self._is_busy = False
        self._life = 0
        self._strategy: Strategy | None = None  # for what runs alone, while something does
        self.has_begun = False
        self.standing: Standing | None = None
        """As it was with its newest answer."""

    def begin(self, now: float, make: Callable[[Sequence[Decision]], Strategy], ask: Ask) -> None:
        """Have a strategy, made of what is decided by then, and ask it something at once."""
        self._life += 1
        self.has_begun, self.standing = True, None
        self._add(_Question(now, "other", ask, self._life, make))

    def ask(self, now: float, ask: Ask, kind: Kind = "other") -> None:
        """Tell it something, once all is answered that was asked before."""
        assert self.has_begun, "nobody is there to be asked"
        self._leave_out(kind)
        self._add(_Question(now, kind, ask, self._life))

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all is answered that was asked before; at once where nothing is asked."""
        self._add(then)

    def end(self) -> None:
        """It is asked nothing any more; what it was asked before it still answers."""
        self.has_begun, self.standing = False, None
        self._go_on()

    # ---- how ----

    def _leave_out(self, kind: Kind) -> None:
        """Make room for one more of that kind."""
        most = MOST_WAITING.get(kind)
        if most is None:
            return
        alike = [each for each in self._waiting if isinstance(each, _Question) and each.kind == kind]
        for each in alike[: max(len(alike) + 1 - most, 0)]:
            self._waiting.remove(each)

    def _add(self, what: _Question | Callable[[], None]) -> None:
        self._waiting.append(what)
        self._go_on()

    def _go_on(self) -> None:
        """Hand out what is next, unless something is under way."""
        while self._waiting and not self._is_busy:
            what = self._waiting.popleft()
            if not isinstance(what, _Question):
                what()
                continue
            self._is_busy = True
            known = () if what.make is None else tuple(self._known())
            self._run(partial(self._answer, what, known))
        if not self.has_begun and not self._is_busy:
            self._strategy = None

    def _answer(self, question: _Question, known: Sequence[Decision]) -> Callable[[], None]:
        """Where it is run: what is to be done with the answer."""
        try:
            if question.make is not None:
                self._strategy = question.make(known)
            assert self._strategy is not None, "a strategy that ends is kept until it has answered"
            decisions = list(question.ask(self._strategy))
            return partial(self._take_answer, question, decisions, self._strategy.standing)
        except Exception as error:  # a master serves its agents, whatever becomes of its tuner
            return partial(self._take_failure, question, error)

    def _take_answer(self, question: _Question, decisions: Sequence[Decision], standing: Standing) -> None:
        self._is_busy = False
        if self._is_current(question):
            self.standing = standing
        self._take(question.now, decisions)
        self._go_on()

    def _take_failure(self, question: _Question, error: Exception) -> None:
        """It is not asked again, whatever waits for it."""
        self._is_busy = False
        _logger.error("the tuner has failed", exc_info=error)
        left = [each for each in self._waiting if not isinstance(each, _Question) or each.life != question.life]
        self._waiting = deque(left)
        if self._is_current(question):
            self.has_begun, self.standing = False, None
            self._fail(question.now, error)
        self._go_on()

    def _is_current(self, question: _Question) -> bool:
        return self.has_begun and question.life == self._life
