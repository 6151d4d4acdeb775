"""One search carried out in a job, a *course*: points are put in force, measured, kept or taken back. Pure.

Words: a *trial* is the measuring of one point; a *probe* is a decision that puts a point in force to measure it; a
*size trial* is the way of another global batch size, from its probe until it is kept or taken back
(batch_size_trials.py); a *search* learns from trials and proposes points. *Here* is the point in force, or the one that
was asked for; the *best* is the one that measured best so far.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from elastic_ext.config.keys import TuningSection
from elastic_ext.profile.stragglers import PaceChange
from elastic_ext.records.metrics import JobFacts

from .costs import Advice, Budget
from .decisions import Book, Decision, Kind
from .explain import (
    SET_ASIDE,
    change_in_words,
    nothing_new_in_words,
    rate_in_words,
    why_best_again,
    why_try,
)
from .measurements import PROBE_STEPS, PaceWatch, PointMeasurement, SlowdownCheck, StepReport, Trial, changed_facts
from .space import KEYS, Point, Value, point_of, values_of

if TYPE_CHECKING:
    from .search import PointProposal, Search

__all__ = ["Course", "Stage"]

Stage = Literal["probing", "waiting-for-budget", "settled"]
"""Where a course is: "probing", points are measured; "waiting-for-budget", at the best point until the budget covers
the next probe; "settled", at the best point, with nothing more to be tried.

    begin -> probing               the point in force is measured first
    probing -> probing             a point was measured or refused, and another is affordable; or, where nothing else is
                                   to be tried or can be paid for, the best one is put in force again, and measured
    probing -> waiting-for-budget  the best point is in force, and the next probe costs more than the budget has
    probing -> settled             the best point is in force: it reaches the goal, or nothing is expected to be faster;
                                   or no config may be written, and advice is given
    waiting-for-budget -> probing  the budget has what the probe costs
    waiting-for-budget, settled    the pace of the job has changed, and the search begins again ("reopen"); or newer
      -> probing                   facts of the job give the search something to try

In "probing", a point is first asked for (its config is not written yet) and then measured. Where the job itself puts
another config in force, the course is at its end (``has_job_changed_config``), and the controller begins another.
"""

_PATIENCE = 50
"""Reports of steps under an older version, after which people are told that the newer one is not in force."""


class _ConfigPoint(NamedTuple):
    """A version of the config, its revision (how often the job itself has changed it), and the point it amounts to."""

    point: Point
    version: int
    revision: int


class Course:
    """One search carried out in one job; another course begins where the facts of the job change.

    Each call gives the decisions that follow from it, in order.
    """

    def __init__(self, facts: JobFacts, tuning: TuningSection, book: Book, search: Search, budget: Budget) -> None:
        self._facts = facts
        self._tuning = tuning
        self._book = book
        self._budget = budget
        self.search = search
        self.stage: Stage = "probing"
        # the config in force, or written to be; and the one before it, which stays in force where that is refused
        self._base = self._before = _ConfigPoint(point_of(facts.values), facts.config_version, facts.config_revision)
        self._asked: tuple[int, Point] | None = None  # decision and point whose config is not written yet
        self._trial: Trial | None = self._trial_of(self._base)
        self._watch = PaceWatch()
        self._last: PointMeasurement | None = None  # the newest since the pace changed last
        self._wanted = 0.0  # seconds that the budget must have saved for the next probe
        self._must_look = False  # whether newer facts may allow other points
        self.has_job_changed_config = False
        """Whether the job itself, as when memory ran out, put another config in force whose facts have not come yet."""
        self._num_elsewhere = 0  # reports in a row of steps under another config than the one that was written last
        self._num_scattered = 0  # trials in a row whose step times differed too much
        self._advice = Advice()
        self._slowdown_check = SlowdownCheck()
        self._at_new_pace: PointMeasurement | None = None  # the best point after a change of pace, as expected

    # ---- what others ask ----

    @property
    def here(self) -> Point:
        """The point in force, or the one that was asked for."""
        return self._asked[1] if self._asked else self._base.point

    @property
    def in_force(self) -> Point:
        """The point in force, or written to be put in force, whatever else was asked for since."""
        return self._base.point

    @property
    def version(self) -> int:
        """The version of the config that is in force, or was written to be put in force."""
        return self._base.version

    @property
    def best(self) -> PointMeasurement | None:
        """The point that measured best so far, with its expected step times; None where none was measured."""
        return self.search.best

    @property
    def num_samples(self) -> int:
        """Samples of a step over all ranks."""
        return self._facts.global_batch

    @property
    def is_at_rest(self) -> bool:
        """Whether the best point is in force and known by facts, nothing is left to try, and no goal is reached."""
        base, facts, best = self._base, self._facts, self.search.best
        is_known = (base.version, base.revision) == (facts.config_version, facts.config_revision)
        is_here = self.stage == "settled" and self._asked is None and self._trial is None
        return is_here and is_known and best is not None and best.point == base.point and not self._is_enough(best)

    def can_pay_for(self, seconds: float, probe_steps: int) -> bool:
        """Whether the budget can pay for a trial of ``probe_steps`` steps that take ``seconds`` each."""
        return self.search.cost(seconds, self._budget, probe_steps) <= self._budget.saved

    def is_of(self, facts: JobFacts) -> bool:
        """Whether what the search has found holds for the job as ``facts`` describe it."""
        return not changed_facts(self._facts, facts)

    def gone_on_with(self, facts: JobFacts) -> Course:
        """A new course that goes on with the same search, for when its global batch size is in force again."""
        self.search.take_facts(facts)
        return Course(facts, self._tuning, self._book, self.search, self._budget)

    def rate(self, seconds: float) -> float:
        """Samples per second of all ranks together, where a step takes ``seconds``."""
        return self._facts.global_batch / seconds

    def take_facts(self, facts: JobFacts) -> None:
        """Take newer facts of the same job."""
        self._facts = facts
        self._must_look = self.search.take_facts(facts) or self._must_look

    # ---- what happens ----

    def see(self, now: float, report: StepReport, *, writes: bool) -> list[Decision]:
        """Take a report of steps that can be trusted; ``writes`` says whether configs may be written."""
        self._budget.see(report)
        if (report.version, report.revision) != (self._base.version, self._base.revision) or self._asked:
            return self._see_elsewhere(now, report)
        self._num_elsewhere = 0
        if self._trial is not None:
            self._trial.add(report)
            return self._look(now, self._trial, writes=writes)
        change = self._watch.see(report)
        if change is not None:
            return self._reopen(now, change)
        is_saved = self.stage == "waiting-for-budget" and writes and self._budget.saved >= self._wanted
        if is_saved or self._must_look:
            return self.go_on(now, writes=writes)
        return []

    def written(self, number: int, version: int) -> None:
        """Note that the config of decision ``number`` was written as ``version``; its point is measured next."""
        if self._asked and self._asked[0] == number:
            self._num_elsewhere = 0
            self._before, self._base = self._base, _ConfigPoint(self._asked[1], version, 0)
            self._asked, self._trial = None, self._trial_of(self._base)

    def refused(self, now: float, number: int, why: str, *, writes: bool) -> list[Decision]:
        """Note that the config of decision ``number`` is refused: the config before it stays in force."""
        open_ = self._book.open
        if open_ is None or open_.number != number:
            return []
        self.search.refuse(self.here, why)
        if self._asked is None:
            self._base = self._before
        self._asked = self._trial = None
        closed = self._book.close(number, "refused", reason=f"the config was refused: {why}")
        return [*_some(closed), *(self.go_on(now, writes=writes) if writes else [])]

    def leave(self, now: float, why: str) -> list[Decision]:
        """Give up the point that is being measured, and go back to the best one."""
        open_, best = self._book.open, self.search.best
        if open_ is None or open_.kind != "probe":
            return []
        closed = self._book.close(open_.number, "undone")
        target = best.point if best is not None else self._before.point
        return [*_some(closed), *self.go_back_to(now, target, why)]

    def go_back_to(self, now: float, target: Point, why: str) -> list[Decision]:
        """Go back to ``target``, a point that was in force before; drop a config that was asked for and not written."""
        if self._asked is not None:
            self._asked, self._trial = None, self._trial_of(self._base)
        return [] if target == self.here else self._write(now, "undo", target, why)

    def go_on(self, now: float, *, writes: bool) -> list[Decision]:
        """Decide what is next by all that was measured: a probe, the best point, or without ``writes``, advice."""
        best, self._must_look = self.search.best, False
        if best is None:
            self._trial = self._trial_of(self._base)  # all that was measured is refused
            return []
        if not writes:
            self._rest()
            return self._advise(now, best)
        if self._is_enough(best):
            return self._settle(now, best, "as fast as tuning.goal asks for")
        proposal = self.search.propose(self.here, self._budget, self._probe_steps)
        if proposal is None:
            too_large = self.search.why_micro_batch_stays()
            reasons = ["nothing else is expected to be faster", *([too_large] if too_large else [])]
            return self._settle(now, best, "; ".join(reasons))
        if not proposal.is_affordable:
            return self._save_up(now, best, proposal)
        self.stage = "probing"
        return self._write(now, "probe", proposal.point, self._why(proposal, best), proposal.seconds)

    # ---- steps are measured ----

    def _look(self, now: float, trial: Trial, *, writes: bool) -> list[Decision]:
        best = self.search.best
        if not trial.is_done(best.seconds if best else None):
            return []
        if trial.why_no_result:
            return self._measure_anew(now, trial.why_no_result)
        self._num_scattered = 0
        measured = trial.measured(best.seconds if best else None)
        self._trial, self._last = None, measured
        expected, self._at_new_pace = self._at_new_pace, None
        if expected is not None and expected.point == measured.point:  # some slow steps may have looked like a change
            self._budget.change_pace(self._slowdown_check.step_time_ratio(measured, expected) or 1.0)
        told = self._doubted(now, measured) if writes else []
        if self._asked:
            return told
        self.search.tell(measured)
        if not self._budget.is_known:
            self._budget.take_baseline(measured.seconds)
        return [*told, *self._close(measured), *self.go_on(now, writes=writes)]

    def _doubted(self, now: float, measured: PointMeasurement) -> list[Decision]:
        """Compare step times with what was expected: begin a new search at another pace, or doubt the measurement."""
        before, best = self.search.measured_at(measured.point), self.search.best
        aside = self._slowdown_check.pop_set_aside()
        ratio = self._slowdown_check.step_time_ratio(measured, before)
        if ratio is not None:  # the same point at another pace
            self._budget.change_pace(ratio)
            self.search = self.search.begun_again()
            times = f"steps take {ratio:.2f} times as long as when the same config was measured before"
            return self._say(now, "reopen", f"the search for faster settings begins again: {times}")
        if aside is not None:
            self.search.tell(aside)
        elif best is not None and before is None and best.point != measured.point:
            expected, unsure = self.search.seconds_at(measured.point), self.search.unsure_at(measured.point)
            if self._slowdown_check.is_doubtful(measured, expected, unsure):
                told = self._close(measured, SET_ASIDE)
                change = change_in_words(best.point, self.here)
                why = why_best_again(change, best=self.rate(best.seconds), measured=self.rate(measured.seconds))
                return [*told, *self._write(now, "undo", best.point, why)]
        return []

    def _measure_anew(self, now: float, why: str) -> list[Decision]:
        """Measure again where steps tell nothing, and tell people once; give up the point where they do so again."""
        self._num_scattered += 1
        self._trial = self._trial_of(self._base)
        if self._num_scattered == 1:
            return self._say(now, "hold", nothing_new_in_words(why))
        return self.leave(now, f"what was tried cannot be measured: {why}")

    def _close(self, measured: PointMeasurement, reason: str = "") -> list[Decision]:
        open_ = self._book.open
        if open_ is None or open_.version != self._base.version:
            return []
        best = self.search.best
        is_kept = open_.kind != "probe" or (best is not None and best.point == measured.point)
        return _some(
            self._book.close(open_.number, "kept" if is_kept else "undone", self.rate(measured.seconds), reason)
        )

    def _see_elsewhere(self, now: float, report: StepReport) -> list[Decision]:
        """Take steps under another config than the one that is to be measured."""
        if report.version == self._base.version and report.revision > self._base.revision:
            return self._job_changed_config(report) if not self.has_job_changed_config else []
        if self._asked:  # whose config is yet to be written
            return []
        self._num_elsewhere += 1
        if self._num_elsewhere != _PATIENCE:
            return []
        written = f"version {self._base.version} was written {_PATIENCE} reports ago"
        why = f"steps are taken under version {report.version}, and {written}"
        return self._say(now, "hold", nothing_new_in_words(why))

    def _job_changed_config(self, report: StepReport) -> list[Decision]:
        """Note that the job itself has put another revision in force, as when memory runs out; the point is refused."""
        open_, self.has_job_changed_config = self._book.open, True
        self.search.refuse(self.in_force, "the job itself changed it")
        if open_ is None:
            return []
        why = f"the job itself put revision {report.revision} of version {report.version} in force instead"
        return _some(self._book.close(open_.number, "refused", reason=why))

    # ---- what is decided ----

    def _is_enough(self, best: PointMeasurement) -> bool:
        return self._tuning.goal is not None and self.rate(best.seconds) >= self._tuning.goal

    def _settle(self, now: float, best: PointMeasurement, why: str) -> list[Decision]:
        """End the search at the best point, and tell people once."""
        if best.point != self.here:
            return self._back(now, best, why)
        was_told = self.stage == "settled"
        self._rest()
        if was_told or (self._last is not None and self._is_told):
            return []
        return self._say(now, "settle", f"the config stays as it is: {rate_in_words(self.rate(best.seconds))}; {why}")

    @property
    def _is_told(self) -> bool:
        """Whether the newest decision is what put the present point in force, so that people know of it."""
        last = self._book.last
        return last is not None and last.kind in ("settle", "undo") and last.version == self._base.version

    def _save_up(self, now: float, best: PointMeasurement, proposal: PointProposal) -> list[Decision]:
        """Train at the best point until its steps have paid for the proposed probe."""
        self._wanted = proposal.cost
        if best.point != self.here:
            return self._back(now, best, "steps under the best config so far have to save time for the next trial")
        if self.stage != "waiting-for-budget":  # else its watch goes on
            self._rest("waiting-for-budget")
        return []

    def _rest(self, stage: Stage = "settled") -> None:
        """Stay at the point in force, and watch the pace of its steps."""
        self.stage = stage
        self._watch = PaceWatch()

    def _back(self, now: float, best: PointMeasurement, why: str) -> list[Decision]:
        """Put the best point in force again: an undo where the point in force was measured last, else a settle."""
        last = self._last
        rate = rate_in_words(self.rate(best.seconds))
        change = change_in_words(best.point, self.here)
        if last is not None and last.point == self.here:
            measured = rate_in_words(self.rate(last.seconds))
            return self._write(now, "undo", best.point, f"{change}: back to {rate}, from {measured} now; {why}")
        return self._write(now, "settle", best.point, f"{change}: {rate} measured with that; {why}")

    def _advise(self, now: float, best: PointMeasurement) -> list[Decision]:
        found = self.search.advise(self.here)
        if found is None or not self._advice.is_news(found.point, self.rate(found.seconds)):
            return []
        told = self._decide(now, "advise", found.point, self._why(found, best), found.seconds)
        return [told]

    def _reopen(self, now: float, change: PaceChange) -> list[Decision]:
        self._budget.change_pace(change.ratio)
        before = self.search.best_measured
        self._at_new_pace = None if before is None else replace(before, seconds=before.seconds * change.ratio)
        self.search = self.search.begun_again()
        self._trial, self.stage, self._last = self._trial_of(self._base), "probing", None
        self._slowdown_check = SlowdownCheck()
        return self._say(now, "reopen", f"the search for faster settings begins again: {self._watch.why(change)}")

    def _why(self, proposal: PointProposal, best: PointMeasurement) -> str:
        return why_try(proposal, best, self.here, self._facts.global_batch)

    def _write(self, now: float, kind: Kind, point: Point, reason: str, seconds: float | None = None) -> list[Decision]:
        """Decide on a change, for which a config is to be written."""
        made = self._decide(now, kind, point, reason, self.search.seconds_at(point) if seconds is None else seconds)
        self._asked, self._trial = (made.number, point), None
        return [made]

    def _decide(self, now: float, kind: Kind, point: Point, reason: str, seconds: float | None) -> Decision:
        best = self.search.best
        return self._book.add(
            time=now,
            kind=kind,
            reason=reason,
            base=self._base.version,
            changes=self._changes(point),
            instead=values_of(self._base.point, point),
            before=self.rate(best.seconds) if best else None,
            predicted=None if seconds is None else self.rate(seconds),
            predicted_bytes=self.search.bytes_at(point),
        )

    # ---- small parts ----

    def _changes(self, point: Point) -> dict[str, Value]:
        """The values to set for ``point``, by key.

        Those are the knobs that differ from the point in force. Where the job itself has changed the config, they are
        each knob that the job can change: the next version is made from the newest one, which lacks the job's changes.
        """
        found = values_of(point, self._base.point)
        if self._base.revision > 0:
            there = {KEYS[name]: value for name, value in zip(point._fields, point, strict=True)}
            found = {key: there[key] for key in there if key in found or key in self._facts.choices}
        return found

    def _trial_of(self, base: _ConfigPoint) -> Trial:
        return Trial(base.point, version=base.version, revision=base.revision, probe_steps=self._probe_steps)

    def _say(self, now: float, kind: Kind, reason: str) -> list[Decision]:
        """Add a decision for which no config is written."""
        best = self.search.best
        before = self.rate(best.seconds) if best else None
        return [self._book.add(time=now, kind=kind, reason=reason, base=self._base.version, before=before)]

    @property
    def _probe_steps(self) -> int:
        return self._tuning.probe_steps or PROBE_STEPS


def _some(decision: Decision | None) -> list[Decision]:
    return [] if decision is None else [decision]
