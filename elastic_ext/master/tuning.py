"""A job's tuner as its master runs it: what is passed to it, which of its decisions become configs, and their words."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, get_args

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.json import shown
from elastic_ext.records.metrics import JobFacts
from elastic_ext.records.text import on_one_line, size_in_words
from elastic_ext.tuner.batch_efficiency import GLOBAL_BATCH_KEY, may_tune_global_batch
from elastic_ext.tuner.decisions import PAUSED, Decision, are_paused
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import KEYS

from .configs import Author, AuthoredVersion, StaleVersion
from .facts import checked_facts
from .nodes import RequestRefused
from .observations import MeasurementRounds
from .wire import master_pb2

__all__ = [
    "Action",
    "Ask",
    "Mode",
    "QuestionKind",
    "Run",
    "Tuner",
    "TunerFactory",
    "TunerQueue",
    "TunerStanding",
    "Tuning",
    "at_once",
    "changes_in_words",
    "check_decision",
    "event_text",
    "is_to_come",
    "mode_in",
    "rates_in_words",
    "rates_of",
]

_logger = logging.getLogger(__name__)


# --- what a tuner has decided, in words for people: in events, and in `elastic-ext tuning log` -----------------------

Mode = Literal["off", "advise", "auto"]
"""What a tuner may do: nothing, decide and only say so, or decide and change the config."""
_MOST_VALUE = 60


def event_text(decision: Decision) -> str:
    """A decision of the tuner on one line: its number, kind, outcome, changes, reason and rates."""
    parts = [f"decision {decision.number} ({decision.kind})"]
    if decision.outcome:
        parts[0] += f" is {decision.outcome}"
    if decision.changes:
        parts.append(changes_in_words(decision.changes))
    parts.append(decision.reason)
    if rates := rates_in_words(decision):
        parts.append(rates)
    return on_one_line(": ".join(each for each in parts if each))


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """The changes of a decision in words, as KEY=VALUE."""
    return ", ".join(
        f"{path} as at start-up" if value is None else f"{path}={_value(value)}" for path, value in changes.items()
    )


def rates_in_words(decision: Decision) -> str:
    """The rates before a decision, predicted and measured, in words; empty where none is known."""
    return ", ".join(rates_of(decision.before, decision.predicted, decision.measured, decision.predicted_bytes))


def rates_of(
    before: float | None, predicted: float | None, measured: float | None, predicted_bytes: int | None
) -> Iterator[str]:
    """Each known rate (samples per second), and the predicted peak of memory, in words."""
    rates = {"before": before, "predicted": predicted, "measured": measured}
    for word, rate in rates.items():
        if rate is not None:
            yield f"{rate:.4g} samples/s {word}"
    if predicted_bytes is not None:
        yield f"a peak of {size_in_words(predicted_bytes)} predicted"


def _value(value: Any) -> str:
    return shown(value, _MOST_VALUE) if not isinstance(value, float) else json.dumps(value)


# --- one question after another, never two at once -------------------------------------------------------------------
# A *question* is one call of the tuner (TunerQueue); questions are asked in the order in which they come,
# and never two at once.
#
# An answer may take a part of a second, in which a master has others to serve. So each question is handed to ``Run``,
# which may use another thread, and the next one waits until the answer is there. Questions and answers come and go on
# the master's thread; only the tuner is used elsewhere. It does no I/O and reads no clock.


class TunerStanding(Protocol):
    """The state of a tuner, as the status shows it."""

    @property
    def stand(self) -> str: ...
    @property
    def sentence(self) -> str: ...
    @property
    def best_rate(self) -> float | None: ...


class Tuner(Protocol):
    """A tuner: it is told of the job and decides.

    Methods give decisions that are new, or have changed under the same number.
    """

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]: ...
    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]: ...
    def see(self, now: float, seen: StepReport) -> list[Decision]: ...
    def tick(self, now: float) -> list[Decision]: ...
    def pause(self, now: float, why: str) -> list[Decision]: ...
    def resume(self, now: float) -> list[Decision]: ...
    def undo(self, now: float) -> list[Decision]: ...
    def written(self, now: float, number: int, version: int) -> None: ...
    def refused(self, now: float, number: int, why: str) -> list[Decision]: ...
    @property
    def standing(self) -> TunerStanding: ...


TunerFactory = Callable[[Mode, Sequence[Decision]], Tuner]
"""Makes a tuner, from the mode that counts where the config names none, and the decisions made before."""
Ask = Callable[[Tuner], Sequence[Decision]]
"""A question: calls a method of the tuner, and gives the decisions that are new or have changed."""
QuestionKind = Literal["facts", "seen", "tick", "other"]
"""The kind of a question: of too many that wait, the oldest of their kind are left out, but for "other"."""
Run = Callable[[Callable[[], Callable[[], None]]], None]
"""Runs a piece of work, on whichever thread, and then calls its result on the thread that ``Run`` was called on."""

MOST_WAITING: Mapping[QuestionKind, int] = {"facts": 16, "seen": 16, "tick": 1}
"""How many questions of a kind may wait; the oldest of more are left out."""


@dataclass(frozen=True, slots=True)
class _Question:
    """One call of the tuner that waits for its turn."""

    now: float
    kind: QuestionKind
    ask: Ask
    tuner_number: int
    """The number of the tuner that is asked: a job may have several, one after another."""
    make: Callable[[Sequence[Decision]], Tuner] | None = None
    """Makes the tuner before it is asked; None where it is made already."""


def at_once(work: Callable[[], Callable[[], None]]) -> None:
    """A ``Run`` that does the work at once, on the caller's thread."""
    work()()


class TunerOwner(Protocol):
    """The owner of a tuner's queue, which takes its decisions. Times are seconds since 1970."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """All decisions so far."""

    def take_decisions(self, now: float, decisions: Sequence[Decision]) -> None:
        """Take the tuner's new or changed decisions."""

    def take_failure(self, now: float, error: Exception) -> None:
        """Take the error with which the tuner has failed; it is asked no more."""


class TunerQueue:
    """The queue of questions to a job's tuner, asked one after another, where ``run`` runs them.

    Times are seconds since 1970.
    """

    def __init__(self, run: Run, owner: TunerOwner) -> None:
        self._run = run
        self._owner = owner
        self._waiting: deque[_Question | Callable[[], None]] = deque()
        self._is_busy = False
        self._tuner_number = 0
        self._tuner: Tuner | None = None  # used by the question that is being answered, and by nothing else
        self.has_begun = False
        """Whether there is a tuner to be asked; False again once it has ended or failed."""
        self.standing: TunerStanding | None = None
        """The tuner's state as of its newest answer; None before the first."""

    def begin(self, now: float, make: Callable[[Sequence[Decision]], Tuner], ask: Ask) -> None:
        """Make a tuner from the decisions known by then, and ask it ``ask`` first."""
        self._tuner_number += 1
        self.has_begun, self.standing = True, None
        self._add(_Question(now, "other", ask, self._tuner_number, make))

    def ask(self, now: float, ask: Ask, kind: QuestionKind = "other") -> None:
        """Ask the tuner something, once all earlier questions are answered."""
        assert self.has_begun, "nobody is there to be asked"
        self._leave_out(kind)
        self._add(_Question(now, kind, ask, self._tuner_number))

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all earlier questions are answered; at once where none waits."""
        self._add(then)

    def end(self) -> None:
        """End the tuner: it still answers earlier questions, and is asked nothing new."""
        self.has_begun, self.standing = False, None
        self._go_on()

    # ---- how ----

    def _leave_out(self, kind: QuestionKind) -> None:
        """Leave out the oldest waiting questions of a kind, to make room for one more."""
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
        """Run the next question, unless one is being answered."""
        while self._waiting and not self._is_busy:
            what = self._waiting.popleft()
            if not isinstance(what, _Question):
                what()
                continue
            self._is_busy = True
            known = () if what.make is None else tuple(self._owner.decisions)
            self._run(partial(self._answer, what, known))
        if not self.has_begun and not self._is_busy:
            self._tuner = None

    def _answer(self, question: _Question, known: Sequence[Decision]) -> Callable[[], None]:
        """Ask the tuner, on the thread of ``Run``; gives what to call with the answer on the master's thread."""
        try:
            if question.make is not None:
                self._tuner = question.make(known)
            assert self._tuner is not None, "a tuner that ends is kept until it has answered"
            decisions = list(question.ask(self._tuner))
            return partial(self._take_answer, question, decisions, self._tuner.standing)
        except Exception as error:  # a master serves its agents, whatever becomes of its tuner
            return partial(self._take_failure, question, error)

    def _take_answer(self, question: _Question, decisions: Sequence[Decision], standing: TunerStanding) -> None:
        self._is_busy = False
        if self._is_current(question):
            self.standing = standing
        self._owner.take_decisions(question.now, decisions)
        self._go_on()

    def _take_failure(self, question: _Question, error: Exception) -> None:
        """Log the failure of a tuner, and drop all questions that wait for it."""
        self._is_busy = False
        _logger.error("the tuner has failed", exc_info=error)
        number = question.tuner_number
        left = [each for each in self._waiting if not isinstance(each, _Question) or each.tuner_number != number]
        self._waiting = deque(left)
        if self._is_current(question):
            self.has_begun, self.standing = False, None
            self._owner.take_failure(question.now, error)
        self._go_on()

    def _is_current(self, question: _Question) -> bool:
        return self.has_begun and question.tuner_number == self._tuner_number


# --- a job's tuner as its master has it: told what the job tells, asked by people, heard in what it decides ----------
# What is decided, and why, is up to the tuner. Here is what surrounds it: what it is to hear of what comes over the
# wire, which of its decisions become versions of the config, what is kept of them, and that it never holds up the
# master: it is asked one thing after another (TunerQueue), and its answers are taken whenever they come. It does no
# I/O and reads no clock; its code is not loaded while it is off.
#
# A decision with changes becomes a config version in mode auto. An undo does so in any mode: where a config sets the
# mode off, or to advise, what was being tried is taken out of it. Until then it is
#
#   due      the tuner has decided it, and the master is to write it as the next version;
#   pending  the version is written, and ranks are not known to train under it yet.
#
#   due -> pending      the version is written
#   due -> refused      it cannot be written, or a version that was not written for a decision has come meanwhile
#   due -> dropped      the tuner has closed the decision, or the mode does not allow it any more
#   pending -> over     ranks report steps under the version or a later one, or a later one is written
#   pending -> refused  ranks refuse the version, or train under an earlier one for a while although all nodes hold it
#
# The tuner is told of "refused", and decides what is next.

Action = Literal["pause", "resume", "undo"]

MOST_DECISIONS = 1_000
"""How many decisions are kept."""
_PATIENCE_SECONDS = 30.0
_PROBE_BEAT_SECONDS = 0.5
_MOST_NODES = 32
"""The most nodes of a job whose nodes are asked for more frequent beats while the tuner probes."""
_LEAST_SECONDS = 20.0
"""How long ago all nodes must have been first seen to hold a version that no rank trains under, before it counts as
refused;"""
_LEAST_WINDOWS = 4
"""... and how many windows ranks must have reported since then, on average over the ranks that are looked at."""
_SILENT = "the tuner does not know yet what it may change in this job: rank 0 reports that after its first steps"
_OFF = "the tuner is off; `elastic-ext config set tuning.mode=advise`, or auto, has it begin"


Tell = Callable[[float, str, str], object]
"""Writes an event: its time (seconds since 1970), its kind, and its text."""


@dataclass(slots=True)
class _PendingVersion:
    """A config version that was written for a decision and is not yet known to be in force."""

    number: int
    """The number of the decision."""
    version: int
    held_at: float | None = None
    """When all nodes were first seen to hold the version; None until then."""
    num_windows: int = 0
    """How many profile windows ranks had reported by then."""


class Tuning:
    """A job's tuning as its master runs it: news are passed to the tuner, and its decisions are kept.

    Times are seconds since 1970.
    """

    def __init__(
        self,
        mode: Mode,
        decisions: Sequence[Decision],
        *,
        tell: Tell,
        slow: Callable[[], str] = str,
        make: TunerFactory | None = None,
        run: Run = at_once,
    ) -> None:
        """``mode`` counts where the config names none; ``tell`` writes an event; ``slow`` names a straggler in words.

        ``make`` makes a tuner, by default the library's, and ``run`` runs its computations, such as on another thread.
        """
        self._usual_mode = mode
        self._mode: Mode = mode
        self._decisions = {each.number: each for each in decisions}
        self._tell = tell
        self._slow = slow
        self._make = make or _library_tuner
        self._queue = TunerQueue(run, self)
        self._facts: JobFacts | None = None
        self._config: tuple[ElasticConfig, Author] = ElasticConfig(version=0), "node"  # as before there is any
        self._rounds = MeasurementRounds(patience_seconds=_PATIENCE_SECONDS)
        self._due: list[int] = []
        self._pending: _PendingVersion | None = None
        self._unsaved: set[int] = set()
        self._refused_facts = ""
        self._failure = ""

    # ---- what it says ----

    @property
    def mode(self) -> Mode:
        """What the tuner may do: by the newest config, or else by the master's options."""
        return self._mode

    @property
    def decisions(self) -> Sequence[Decision]:
        """The tuner's decisions that are kept, oldest first."""
        return [self._decisions[number] for number in sorted(self._decisions)]

    @property
    def due(self) -> Decision | None:
        """The decision that is to be written as the next config version; None where there is none."""
        return self._decisions[self._due[0]] if self._due else None

    def beat_seconds(self, usual: float, num_nodes: int) -> float:
        """The seconds between two beats of a node: fewer than ``usual`` while the tuner probes, if nodes are few."""
        standing = self._queue.standing
        is_trying = standing is not None and standing.stand == "probing"
        return min(usual, _PROBE_BEAT_SECONDS) if is_trying and num_nodes <= _MOST_NODES else usual

    def standing(self) -> tuple[str, str, float | None]:
        """The tuner's state: a word, a sentence, and the best rate so far in samples per second (None if unknown)."""
        if self._failure:
            return "failed", self._failure, None
        if self._mode == "off":
            return "off", _OFF, None
        standing = self._queue.standing
        is_paused = are_paused(self.decisions) if standing is None else standing.stand == "paused"
        if is_paused and (standing is None or self._facts is None):
            return "paused", PAUSED, None
        if self._refused_facts and not is_paused:
            return "waiting", self._refused_facts, None
        if standing is None or self._facts is None:
            return "waiting", _SILENT, None
        return standing.stand, standing.sentence, standing.best_rate

    # ---- what it is told ----

    def take_facts(self, now: float, text: str) -> None:
        """Take the job's facts from rank 0, as JSON that has come over the wire; invalid facts are an event."""
        try:
            facts = checked_facts(text)
        except ValueError as error:
            words = f"the facts that rank 0 reports of the job are invalid: {error}"[:400]
            if words != self._refused_facts:
                self._refused_facts = words
                self._tell(now, "tuning-facts-refused", words)
            return
        self._facts, self._refused_facts = facts, ""
        self._rounds.expect(facts.restart, facts.world_size, facts.members)
        self._ask(now, lambda tuner: tuner.take_facts(now, facts), kind="facts")

    def take_workers(self, now: float, workers: Sequence[master_pb2.Worker]) -> None:
        """Take the workers of a node's beat, with their profile windows."""
        if not self._queue.has_begun or not any(each.windows for each in workers):
            return
        self._rounds.take(now, workers)
        self._look_at_pending(now)
        self._see(now)

    def take_config(self, now: float, config: ElasticConfig, author: Author, *, number: int | None = None) -> None:
        """Take a new config version of the job; ``number`` is the decision that it was written for, if any."""
        if number in self._due:
            self._due.remove(number)
        if number is None:  # what was to be written was made from an older one
            self._drop_due(now, f"version {config.version} of the config was written meanwhile")
        self._config = config, author
        self._pending = None
        before, mode = self._mode, mode_in(config, self._usual_mode)
        if mode != before:
            self._tell(now, "tuning", f"the tuner's mode is {mode} now, and was {before}")
            self._failure = ""
        if mode != "off":
            self._mode = mode
        if number is not None:
            self._pending = _PendingVersion(number, config.version)
            self._note_written(number, config.version)
            self._ask(now, lambda tuner: _tell_written(tuner, now, number, config.version))
        if self._queue.has_begun:
            self._ask(now, lambda tuner: tuner.take_config(now, config, author))
        self._mode = mode
        self._due = [number for number in self._due if self._may_write(self._decisions[number])]
        if mode == "off":
            self._queue.end()
            self._pending = None
        elif not self._queue.has_begun and self._facts is not None:
            facts = self._facts
            self._ask(now, lambda tuner: tuner.take_facts(now, facts))

    def refuse_version(self, now: float, version: int, why: str) -> None:
        """Note that ranks refuse a config version; the tuner hears of it if the version was written for it."""
        pending = self._pending
        if pending is not None and pending.version == version:
            self._pending = None
            self._ask(now, lambda tuner: tuner.refused(now, pending.number, why))

    def refuse_due(self, now: float, number: int, why: str) -> None:
        """Note that a decision that was ``due`` could not be written as a config version."""
        if number in self._due:
            self._due.remove(number)
        self._ask(now, lambda tuner: tuner.refused(now, number, why))

    def tick(self, now: float, *, is_held: bool) -> None:
        """Do what is due about once a second; ``is_held`` says whether all nodes hold the newest config version."""
        if not self._queue.has_begun:
            return
        if self._pending is not None and is_held and self._pending.held_at is None:
            self._pending.held_at, self._pending.num_windows = now, self._rounds.num_windows
        self._look_at_pending(now)
        self._see(now)
        self._ask(now, lambda tuner: tuner.tick(now), kind="tick")

    def control(self, now: float, action: str, reason: str) -> None:
        """Do what a person asks of the tuner: pause, resume or undo. RequestRefused where it is off or has failed."""
        if action not in get_args(Action):
            raise RequestRefused("invalid", f"action is {action[:60]!r}; allowed: {', '.join(get_args(Action))}")
        if self._mode == "off":
            raise RequestRefused("other", _OFF)
        if self._failure:
            raise RequestRefused("other", self._failure)
        self._tell(now, "tuning-asked", f"a person has the tuner {action}" + (f": {reason}" if reason else ""))
        self._ask(now, lambda tuner: [], begins=True)
        if action == "pause":
            self._ask(now, lambda tuner: tuner.pause(now, reason))
        elif action == "resume":
            self._ask(now, lambda tuner: tuner.resume(now))
        else:
            self._ask(now, lambda tuner: tuner.undo(now))

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the tuner has answered all that it was asked so far."""
        self._queue.after(then)

    # ---- for the store ----

    def take_unsaved(self) -> list[Decision]:
        """Decisions that are new or changed, for the store; each is given once for each change."""
        found = [self._decisions[number] for number in sorted(self._unsaved) if number in self._decisions]
        self._unsaved.clear()
        return found

    def give_back(self, decisions: Sequence[Decision]) -> None:
        """Take back decisions that could not be stored; ``take_unsaved`` gives them again."""
        self._unsaved.update(each.number for each in decisions)

    # ---- how ----

    def _ask(self, now: float, ask: Ask, *, kind: QuestionKind = "other", begins: bool = False) -> None:
        """Ask the tuner something, unless the tuner is off or the tuner has failed.

        The tuner is made once there are facts of the job, or with ``begins``, from the decisions made before.
        """
        if self._mode == "off" or self._failure:
            return
        queue = self._queue
        if not queue.has_begun and (begins or self._facts is not None):
            config, author = self._config
            queue.begin(now, partial(self._make, self._mode), lambda tuner: tuner.take_config(now, config, author))
        if queue.has_begun:  # it may have failed at once
            queue.ask(now, ask, kind)

    def take_failure(self, now: float, error: Exception) -> None:
        """Note that the tuner has failed with ``error``, and decides nothing any more."""
        self._due.clear()
        self._failure = f"the tuner has failed, and decides nothing any more: {type(error).__name__}: {error}"[:400]
        self._tell(now, "tuning-failed", self._failure)

    def _see(self, now: float) -> None:
        """Pass a round of measured steps to the tuner, if one is complete."""
        found = self._rounds.take_measurement(now)
        if found is not None:
            seen = replace(found, slow_rank=self._slow())
            self._ask(now, lambda tuner: tuner.see(now, seen), kind="seen")

    def take_decisions(self, now: float, decisions: Sequence[Decision]) -> None:
        """Keep what the tuner has decided."""
        for decision in decisions:
            number, before = decision.number, self._decisions.get(decision.number)
            if before is not None and decision.version is None:  # it may not have heard yet that it was written
                decision = replace(decision, version=before.version)
            self._decisions[number] = decision
            self._unsaved.add(number)
            if number in self._due:
                self._due.remove(number)
            if _is_to_be_written(decision) and self._may_write(decision):
                self._due.append(number)
            if before is None or before.outcome != decision.outcome:
                self._tell(now, "tuning", event_text(decision))
        for number in sorted(self._decisions)[:-MOST_DECISIONS]:
            del self._decisions[number]

    def _may_write(self, decision: Decision) -> bool:
        """Whether a decision may become a config version: in mode auto, or as an undo in any mode, off too."""
        return self._mode == "auto" or decision.kind == "undo"

    def _note_written(self, number: int, version: int) -> None:
        decision = self._decisions.get(number)
        if decision is not None:
            self._decisions[number] = replace(decision, version=version)
            self._unsaved.add(number)

    def _drop_due(self, now: float, why: str) -> None:
        numbers, self._due = self._due, []
        for number in numbers:
            self._ask(now, lambda tuner, number=number: tuner.refused(now, number, why))  # type: ignore[misc]

    def _look_at_pending(self, now: float) -> None:
        """Look whether ranks train under the version written last; if they do not for a while, it counts as refused."""
        pending = self._pending
        if pending is None:
            return
        if self._rounds.version >= pending.version:
            self._pending = None
        elif pending.held_at is not None and now - pending.held_at > _LEAST_SECONDS:
            num_windows = self._rounds.num_windows - pending.num_windows
            if num_windows >= _LEAST_WINDOWS * max(self._rounds.num_ranks, 1):
                seconds = now - pending.held_at
                why = (
                    f"all nodes have held version {pending.version} for {seconds:.0f} s, and ranks train under another"
                )
                self.refuse_version(now, pending.version, why)


def check_decision(decision: Decision, newest: AuthoredVersion | None, *, step: int) -> None:
    """Check that a decision may become the version after ``newest``, whichever tuner has made it.

    RequestRefused where it changes a key that is not the tuner's; StaleVersion where ``newest`` is still to come into
    force. A probe may change global_batch_size if tuning.knobs names it, and any undo may.
    """
    is_let_grow = newest is not None and may_tune_global_batch(newest.config.tuning)
    is_size_its_own = decision.kind == "undo" or (decision.kind == "probe" and is_let_grow)
    allowed = _KEYS | {GLOBAL_BATCH_KEY} if is_size_its_own else _KEYS
    foreign = [path for path in decision.changes if path not in allowed]
    if foreign:
        raise RequestRefused("other", f"{', '.join(foreign)[:_MOST_CHARACTERS]} is not for the tuner to change")
    if newest is not None and is_to_come(newest, step=step):
        config = newest.config
        raise StaleVersion(
            f"version {config.version} comes into force at step {config.apply_at_step}, and the tuner waits for that"
        )


def is_to_come(newest: AuthoredVersion | None, *, step: int) -> bool:
    """Whether the newest config version comes into force at a later step; decisions wait for that."""
    begins = None if newest is None else newest.config.apply_at_step
    return begins is not None and step < begins


def mode_in(config: ElasticConfig, given: Mode) -> Mode:
    """What the tuner may do under ``config``; ``given`` counts where the config does not say."""
    return _MODES.get(config.tuning.mode or given, given)


def _is_to_be_written(decision: Decision) -> bool:
    return bool(decision.changes) and not decision.outcome and decision.version is None and decision.kind != "advise"


def _tell_written(tuner: Tuner, now: float, number: int, version: int) -> Sequence[Decision]:
    tuner.written(now, number, version)
    return ()


def _library_tuner(mode: Mode, decisions: Sequence[Decision]) -> Tuner:
    from elastic_ext.tuner.controller import Controller  # which imports numpy

    made: Tuner = Controller(mode=mode, decisions=decisions)
    return made


_KEYS = frozenset(KEYS.values())
_MOST_CHARACTERS = 200
_MODES: Mapping[str, Mode] = {"off": "off", "advise": "advise", "auto": "auto"}
