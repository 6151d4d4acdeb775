"""Size trials: which other global batch size is tried in a job, and how its trial goes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .batch_efficiency import GLOBAL_BATCH_KEY, BatchSizeChoice, BatchSizeProposal, facts_at
from .costs import Budget
from .decisions import Book, Decision, Kind
from .explain import number_in_words, rate_in_words, size_change_in_words
from .measurements import PROBE_STEPS, PointMeasurement, StepReport, Trial, changed_facts
from .space import KEYS, point_of

if TYPE_CHECKING:
    from .course import Course
    from .search import Search

__all__ = ["GlobalBatchTrial", "GlobalBatchTrials", "SizeTrialStage"]


# --- another global batch size as it is tried: put in force, measured, kept or taken back ----------------------------
# A *size trial* begins at the best point of one size and ends in a search at another, or where it began.

SizeTrialStage = Literal["asked", "measuring", "kept", "back", "over"]
"""Where a size trial is: "asked", it is to be put in force; "measuring", its steps are measured;
"kept", it stays; "back", the size before is to be put in force again; "over", it was refused or never written."""

_TIMES_AS_MANY = 2
"""How many times as many steps are measured of another size as of another point, since more depends on it."""
_PATIENCE = 50
"""Reports after which a size is given up whose facts, or whose steps, have not come."""


class GlobalBatchTrial:
    """One size trial, or the change that takes a size back that was kept or was left in force."""

    def __init__(self, book: Book, choice: BatchSizeChoice, tuning: TuningSection) -> None:
        self._book = book
        self._choice = choice
        self._tuning = tuning
        self.stage: SizeTrialStage = "asked"
        self.search: Search | None = None
        """The search at the size that is tried."""
        self._proposal: BatchSizeProposal | None = None
        self._made: Decision | None = None  # the newest decision of this size trial
        self._version = self._newest = -1  # of the config that is tried, and of the newest that was written
        self._revision = 0  # of the config that is tried: the job itself may change what is no knob
        self._trial: Trial | None = None
        self._facts: JobFacts | None = None
        self._num_waited = self._num_scattered = 0

    @property
    def size(self) -> int:
        """The global batch size that the newest decision of this size trial sets."""
        assert self._made is not None
        return int(self._made.changes[GLOBAL_BATCH_KEY])

    @property
    def probe_steps(self) -> int:
        """How many steps of the tried size are measured before it is kept or taken back."""
        return _TIMES_AS_MANY * (self._tuning.probe_steps or PROBE_STEPS)

    @property
    def is_written(self) -> bool:
        """Whether a config was written for this size trial."""
        return self._newest >= 0

    def is_back(self, facts: JobFacts) -> bool:
        """Whether ``facts`` belong to the config that was written to put the previous size in force again."""
        is_back_written = self._made is not None and self._newest > self._made.base
        return self.stage == "back" and is_back_written and facts.config_version >= self._newest

    # ---- how it begins ----

    def begin(self, now: float, proposal: BatchSizeProposal, facts: JobFacts, course: Course) -> list[Decision]:
        """Decide to try the size of ``proposal``, from the point at which ``course`` has come to rest."""
        best = course.search.best_measured
        assert best is not None
        self._proposal = proposal
        self._choice.begin(proposal, best)
        self.search = course.search.begun_again(facts_at(facts, proposal.size))
        self._made = self._add_proposal("probe", now, proposal, facts, self.search)
        return [self._made]

    def advise(self, now: float, proposal: BatchSizeProposal, facts: JobFacts, course: Course) -> list[Decision]:
        """Advise the size that would be tried if configs might be written."""
        search = course.search.begun_again(facts_at(facts, proposal.size))
        return [self._add_proposal("advise", now, proposal, facts, search)]

    def begin_back(self, now: float, facts: JobFacts, changes: Mapping[str, Any], why: str) -> list[Decision]:
        """Decide to put a size in force again that steps had before, with the values of ``changes``."""
        values = {**facts.values, GLOBAL_BATCH_KEY: facts.global_batch}
        return self._write_back(now, facts.config_version, changes, {key: values.get(key) for key in changes}, why)

    def undo(self, now: float, back: Mapping[str, Any], values: Mapping[str, Any], why: str) -> list[Decision]:
        """Decide to undo this size trial, and to set ``back`` as well, whose values win.

        ``values`` are those that the job had before the trial, by key; the decision's ``instead`` takes from them what
        the trial itself has not set.
        """
        made = self._made
        assert made is not None
        changes = {**(made.changes if self.stage == "back" else made.instead), **back}
        newest = {**values, **(made.changes if self._newest > made.base else made.instead)}
        return self._write_back(now, self._newest, changes, {key: newest.get(key) for key in changes}, why)

    def _write_back(
        self,
        now: float,
        base: int,
        changes: Mapping[str, Any],
        instead: Mapping[str, Any],
        why: str,
        rate: float | None = None,
    ) -> list[Decision]:
        """Decide on an undo; ``rate`` is the one that steps had under the values that are put in force."""
        self.stage, self._trial = "back", None
        self._made = self._book.add(
            time=now, kind="undo", reason=why, base=base, changes=changes, instead=instead, predicted=rate
        )
        return [self._made]

    def _add_proposal(
        self, kind: Kind, now: float, proposal: BatchSizeProposal, facts: JobFacts, search: Search
    ) -> Decision:
        """Add a decision that tries the proposed size, or advises it; ``search`` is the one at that size."""
        changes, instead = _changes(proposal, facts)
        return self._book.add(
            time=now,
            kind=kind,
            reason=proposal.reason,
            base=facts.config_version,
            changes=changes,
            instead=instead,
            before=proposal.size_now / proposal.now_seconds,
            predicted=proposal.size / proposal.seconds,
            predicted_bytes=search.bytes_at(proposal.point),
        )

    # ---- what happens ----

    def written(self, number: int, version: int) -> None:
        """Note that the config of decision ``number`` was written as ``version``."""
        if self._made is not None and self._made.number == number:
            self._newest = version
            self._version = version if self.stage == "asked" else self._version

    def take_facts(self, facts: JobFacts) -> bool:
        """Begin to measure if ``facts`` are those of the size that is tried; returns whether they are."""
        if self.stage not in ("asked", "measuring") or facts.global_batch != self.size or self.search is None:
            return False
        point = point_of(facts.values)
        if self._proposal is not None and point == self._proposal.point:
            self._revision = facts.config_revision
        if self.stage == "asked":
            self.stage = "measuring"
            self._trial = self._new_trial(facts)
        self._facts = facts
        self.search.take_facts(facts)
        return True

    def see(self, now: float, report: StepReport) -> list[Decision]:
        """Take a report of steps that can be trusted."""
        if self.stage == "back":
            return []
        is_tried = report.version == self._version
        if is_tried and report.revision > self._revision and self._is_described(report):
            return self._job_changed_config(now, report)
        if not is_tried or report.revision > self._revision or self._trial is None:
            self._num_waited += 1
            is_over = self._num_waited == _PATIENCE and self.is_written
            missing = "not described itself with" if is_tried else "reported no steps of"
            return self.leave(now, f"the job has {missing} that size") if is_over else []
        self._trial.add(report)
        return self._look(now, self._trial)

    def refused(self, number: int, why: str) -> list[Decision]:
        """Note that the config of decision ``number`` is not put in force; its size is not tried again."""
        if self._made is None or self._made.number != number:
            return []
        self._choice.refuse(self.size)
        self.stage = "over"
        return _some(self._book.close(number, "refused", reason=f"the config was refused: {why}"))

    def leave(self, now: float, why: str) -> list[Decision]:
        """Give up the size that is being tried, and go back to the one before where it was written."""
        if self.stage not in ("asked", "measuring") or self._made is None:
            return []
        closed = _some(self._book.close(self._made.number, "undone"))
        if not self.is_written:
            self.stage = "over"
            return closed
        return [*closed, *self._take_back(now, why)]

    # ---- steps are measured ----

    def _is_described(self, report: StepReport) -> bool:
        """Whether facts have come of the revision of these steps, or of a later one."""
        return self._facts is not None and self._facts.config_revision >= report.revision

    def _look(self, now: float, trial: Trial) -> list[Decision]:
        proposal, made = self._proposal, self._made
        assert proposal is not None and made is not None and self.search is not None and self._facts is not None
        if not trial.is_done(proposal.even_seconds):
            return []
        if trial.why_no_result:
            return self._measure_anew(now, trial.why_no_result)
        measured = trial.measured(proposal.even_seconds)
        self.search.tell(measured)
        verdict = self._choice.judge(proposal, measured, self._facts, self._tuning)
        rate = proposal.size / measured.seconds
        outcome: Literal["kept", "undone"] = "kept" if verdict.is_kept else "undone"
        closed = _some(self._book.close(made.number, outcome, rate, reason=verdict.reason))
        if verdict.is_kept:
            self.stage = "kept"
            return closed
        return [*closed, *self._take_back(now, f"{_rates(made, measured, proposal)}; {verdict.reason}")]

    def _measure_anew(self, now: float, why: str) -> list[Decision]:
        """Measure again where steps tell nothing; give up the size where they do so again."""
        assert self._facts is not None
        self._num_scattered += 1
        self._trial = self._new_trial(self._facts)
        return [] if self._num_scattered == 1 else self.leave(now, f"what was tried cannot be measured: {why}")

    def _job_changed_config(self, now: float, report: StepReport) -> list[Decision]:
        """Give up the size where the job itself has changed the config, as when memory runs out."""
        assert self._made is not None
        self._choice.refuse(self.size)
        why = f"the job itself put revision {report.revision} of version {report.version} in force instead"
        closed = _some(self._book.close(self._made.number, "refused", reason=why))
        return [*closed, *self._take_back(now, why)]

    def _take_back(self, now: float, why: str) -> list[Decision]:
        assert self._made is not None
        made, size_before = self._made, int(self._made.instead[GLOBAL_BATCH_KEY])
        why = f"{size_change_in_words(size_before, self.size)}: {why}"
        return self._write_back(now, self._newest, made.instead, made.changes, why, made.before)

    def _new_trial(self, facts: JobFacts) -> Trial:
        return Trial(point_of(facts.values), version=self._version, revision=0, probe_steps=self.probe_steps)


def _changes(proposal: BatchSizeProposal, facts: JobFacts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values to set for a proposed size, by key, and those that take them back.

    The micro-batch is set even where it stays the same: left out of the config, it might grow with a rank's share.
    Where the job itself has changed the config, each key is set that can be: the next version is made from the newest
    one, which lacks the job's changes.
    """
    here = point_of(facts.values)
    there = {KEYS[name]: value for name, value in proposal.point._asdict().items()}
    before = {KEYS[name]: value for name, value in here._asdict().items()}
    keys = [key for key in there if there[key] != before[key]]
    chosen = list(facts.choices) if facts.config_revision > 0 else [KEYS["batch_size"]]
    keys += [key for key in chosen if key in facts.choices and key in there and key not in keys]
    changes = {GLOBAL_BATCH_KEY: proposal.size, **{key: there[key] for key in keys}}
    return changes, {GLOBAL_BATCH_KEY: proposal.size_now, **{key: before[key] for key in keys}}


def _rates(made: Decision, measured: PointMeasurement, proposal: BatchSizeProposal) -> str:
    return f"back to {rate_in_words(made.before or 0.0)}, from {number_in_words(proposal.size / measured.seconds)} now"


def _some(decision: Decision | None) -> list[Decision]:
    return [] if decision is None else [decision]


# --- which other global batch size is tried, if any: what a controller asks of sizes, beside its courses -------------


class GlobalBatchTrials:
    """The size trials of one job, one at a time, and when one is due."""

    def __init__(self, book: Book, decisions: Sequence[Decision]) -> None:
        self._book = book
        self._choice = BatchSizeChoice(decisions)
        self._now: GlobalBatchTrial | None = None

    # ---- what is asked ----

    @property
    def is_trying(self) -> bool:
        """Whether another size is being tried, or the one before is being put in force again."""
        return self._now is not None

    @property
    def is_going_back(self) -> bool:
        """Whether the size before is being put in force again."""
        return self._now is not None and self._now.stage == "back"

    def is_back(self, facts: JobFacts) -> bool:
        """Whether ``facts`` belong to the config that put the previous size in force again."""
        return self._now is not None and self._now.is_back(facts)

    def waits_for_noise(self, facts: JobFacts | None, tuning: TuningSection) -> bool:
        """Whether the global batch size may be tuned once the noise scale is known, which it is not yet."""
        return facts is not None and self._choice.waits(facts, tuning)

    # ---- what is told ----

    def allow_refused(self) -> None:
        """Allow again the sizes that were refused, since the config was changed from outside."""
        self._choice.allow()

    def forget(self) -> None:
        """Forget how long steps of each size take, since the pace of the job has changed."""
        self._choice.forget()

    def drop(self) -> None:
        """Drop the size trial that is under way, without a decision, whatever is in force."""
        self._now = None

    def accept_requested_size(self, before: JobFacts, facts: JobFacts, tuning: TuningSection, budget: Budget) -> bool:
        """Take facts with another global batch size; returns whether the size trial under way requested it.

        It did where nothing else about the job has changed. The budget then learns the new pace.
        """
        if self._now is None or before.global_batch == facts.global_batch or facts.global_batch != self._now.size:
            return False
        alike = replace(before, global_batch=facts.global_batch, share=facts.share)
        if changed_facts(alike, facts):
            return False
        budget.change_pace(self._choice.progress_ratio(before, facts, tuning))
        return True

    def take_facts(self, facts: JobFacts) -> bool:
        """Begin to measure the size under trial if ``facts`` are of it; returns whether they are."""
        return self._now is not None and self._now.take_facts(facts)

    def written(self, number: int, version: int) -> None:
        """Note that the config of decision ``number`` was written as ``version``."""
        if self._now is not None:
            self._now.written(number, version)

    def see(self, now: float, report: StepReport) -> tuple[list[Decision], Search | None]:
        """Take a report of steps that can be trusted; gives decisions, and the search at a size that is kept."""
        assert self._now is not None
        trying = self._now
        told = trying.see(now, report)
        if trying.stage != "kept":
            return told, None
        self._now = None
        return told, trying.search

    def refused(self, number: int, why: str) -> list[Decision]:
        """Note that the config of decision ``number`` is not put in force, and why."""
        return self._ended(lambda trying: trying.refused(number, why))

    # ---- what is decided ----

    def look(
        self, now: float, course: Course, facts: JobFacts, tuning: TuningSection, *, writes: bool
    ) -> list[Decision]:
        """Look for a size at which training would learn faster, once ``course`` is at rest, and begin to try it."""
        if not course.is_at_rest or not self._choice.is_due(facts, tuning):
            return []
        proposal = self._choice.propose(facts, tuning, course.search)
        if proposal is None:
            return []
        trying = GlobalBatchTrial(self._book, self._choice, tuning)
        if not writes:
            return trying.advise(now, proposal, facts, course) if self._choice.is_news(proposal) else []
        seconds = proposal.most_seconds_for_equal_progress
        if not proposal.is_needed and not course.can_pay_for(seconds, trying.probe_steps):
            return []
        self._now = trying
        return trying.begin(now, proposal, facts, course)

    def leave(self, now: float, why: str) -> list[Decision]:
        """Give up the size that is being tried, if any."""
        return self._ended(lambda trying: trying.leave(now, why))

    def go_back(
        self, now: float, facts: JobFacts, tuning: TuningSection, changes: Mapping[str, Any], why: str
    ) -> list[Decision]:
        """Decide to put a size in force again that steps had before, with all values of ``changes``."""
        self._now = GlobalBatchTrial(self._book, self._choice, tuning)
        return self._now.begin_back(now, facts, changes, why)

    def undo(
        self, now: float, last: Decision, back: Mapping[str, Any], values: Mapping[str, Any], why: str
    ) -> list[Decision] | None:
        """Take ``last`` back at a person's request by setting ``back``, and with it the size that is being tried.

        ``values`` are those before the size trial, by key. None where no size is being tried: the caller then takes
        ``last`` back by itself.
        """
        self._choice.take_back(last)
        trying, self._now = self._now, None
        if trying is None or not trying.is_written:
            return None
        self._now = trying
        return trying.undo(now, back, values, why)

    def _ended(self, ask: Callable[[GlobalBatchTrial], list[Decision]]) -> list[Decision]:
        """The decisions that ``ask`` draws from the size trial under way, which is dropped if that ends it."""
        if self._now is None:
            return []
        told = ask(self._now)
        if self._now.stage == "over":
            self._now = None
        return told
