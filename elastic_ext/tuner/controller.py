"""The tuner as a job's master uses it: the master tells of facts, configs and steps, the tuner decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .batch_efficiency import GLOBAL_BATCH_KEY, LEARNING_RATE_KEY, why_global_batch_fixed
from .batch_size_trials import GlobalBatchTrials
from .costs import Budget
from .course import Course
from .decisions import PAUSED, Book, Decision, Kind, Stand, TuningStanding
from .explain import listed, nothing_new_in_words, rate_in_words, way_in_words, why_edited
from .measurements import StepReport, changed_facts, why_untrusted
from .space import KEYS, Point, point_of, space_of, values_of

__all__ = ["Author", "Controller", "Mode", "reasons_not_tuned"]


# --- what people ask a tuner for that it leaves as it is in this job, and why, as sentences --------------------------

_RESUME = "`elastic-ext tuning resume` lets the tuner go on"
_CHANGING_WHAT_IS_LEARNED = (LEARNING_RATE_KEY, GLOBAL_BATCH_KEY)
_MOST_REASONS = 3


def reasons_not_tuned(facts: JobFacts, tuning: TuningSection) -> list[str]:
    """Why a learning rate or global batch size that a person names in tuning.knobs is not tuned here, and why nothing
    is, where that is so: a sentence for each."""
    found = [_why_what_is_learned_stays(facts, tuning)]
    if not space_of(facts, tuning).is_open:
        reasons = [f"{key}: {why}" for key, why in facts.fixed.items() if key in KEYS.values()]
        found.append("; ".join(["there is nothing to choose, since each key has one value", *reasons[:_MOST_REASONS]]))
    return [each for each in found if each]


def _why_what_is_learned_stays(facts: JobFacts, tuning: TuningSection) -> str:
    """Why keys that change what the network learns have no effect in ``tuning.knobs``; empty where none is such."""
    named = [key for key in _CHANGING_WHAT_IS_LEARNED if key in (tuning.knobs or {})]
    why_not = why_global_batch_fixed(facts, tuning) if GLOBAL_BATCH_KEY in named else ""
    if not named or (GLOBAL_BATCH_KEY in named and not why_not):
        return ""
    return f"{listed(named)} in tuning.knobs: not tuned, since {why_not or 'it changes what is learned'}"


# --- a tuner as those around it see it: it is told what happens, and says what is to be done -------------------------
# The same calls give the same decisions. It reads no clock and writes nothing: its caller writes a config for each
# decision that has changes and is no advice, and tells of it.
#
# The states of a Controller, as ``standing`` names them; where several hold, the first of them is named:
#
#   off       the mode is "off"
#   paused    a person has stopped it, or a config from a person or a node has
#   waiting   there is no search, or one must begin: facts of the newest config have not come yet
#   watching  a search goes on in mode "advise": it writes no config, and gives advice
#   probing   a search goes on in mode "auto": points are measured, or another global batch size
#             (GlobalBatchTrials), or the course waits until the budget covers the next probe
#   settled   the best point is in force, and nothing more is to be tried for now
#
#   any but off -> off      a config sets tuning.mode to "off"; what was tried is taken back
#   off -> waiting          a config sets another mode
#   any -> paused           ``pause``; ``undo``; or in mode "auto", a config from a person or a node that changes a key
#                           outside of _NO_EDIT, or changes nothing
#   paused -> waiting       ``resume``
#   a search -> waiting     a config from a person or a node: its values may be other ones
#   waiting -> a search     facts of the newest config have come; or ranks took steps under an older one for _PATIENCE
#                           reports, so that the newest is taken to be refused
#   a search -> another     the facts of the job have changed (told as "reopen"), the job has changed its config itself,
#                           or the global batch size that was tried is kept or taken back
#   probing <-> settled     by the stage of its course (Stage, in course.py); settled -> probing, too, where another
#                           global batch size is to be tried

Mode = Literal["off", "advise", "auto"]
Author = Literal["person", "generated", "node"]
"""Who wrote a version of the config: a person; "generated", the tuner; "node", the config file of a node."""

_SILENT_SECONDS = 60.0
_SILENT_TIMES = 30
"""A job is silent that tells of no steps for so many times the length of its last report, and for _SILENT_SECONDS."""
_CALM = 8
"""Trusted reports in a row after which people are told again why a report cannot be trusted."""
_PATIENCE = 5
"""Reports of steps under an older config after which a newer one is taken not to come into force."""
_MOST_DISTRUSTED = 20
"""Untrusted reports in a row after which what is being tried is taken back."""
_NO_EDIT = ("tuning", "checkpoint")
"""Sections of a config that a person or a node may change without pausing the tuner."""


class Controller:
    """The tuner of one job: it is told of facts, configs and steps, and each call gives the decisions that follow.

    Calls come from one thread at a time. The caller writes a config for each decision with changes, unless its kind is
    "advise", and tells of that by ``written`` or ``refused``.
    """

    def __init__(self, *, mode: Mode, decisions: Sequence[Decision] = ()) -> None:
        """``mode`` counts where the config says none; ``decisions`` are those from before a restart of the master."""
        self._usual_mode = mode
        self._book = Book(decisions)
        self._is_paused = self._book.is_paused
        self._config: ElasticConfig | None = None
        self._facts: JobFacts | None = None
        self._course: Course | None = None
        self._sizes = GlobalBatchTrials(self._book, decisions)
        self._budget = Budget()
        self._must_begin = True  # no search is valid; the next facts, or reports enough, begin one
        self._other_job = ""  # how the job differs from the one that was searched for last; empty where it does not
        self._heard: tuple[float, float] | None = None  # when a report came last, and its length in seconds
        self._num_distrusted = 0
        self._num_calm = _CALM
        self._num_waited = 0
        self._is_silent = False
        self._told: set[str] = set()  # reasons why something is not tuned, each told once

    # ---- what is told ----

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]:
        """Take the facts of the job that rank 0 has written, and begin a search anew where they have changed."""
        before, self._facts = self._facts, facts
        course, sizes = self._course, self._sizes
        is_requested = before is not None and sizes.accept_requested_size(before, facts, self._tuning, self._budget)
        if before is not None and not is_requested:
            if self._must_begin:  # by a config that may itself have changed which keys there are to choose
                before = replace(before, choices=facts.choices, fixed=facts.fixed)
            self._other_job = changed_facts(before, facts) or self._other_job
        if course is None or self._must_begin or course.has_job_changed_config or self._other_job:
            return self._begin(now)
        if is_requested and sizes.is_going_back:
            return self._begin(now, is_back=True)
        if sizes.is_back(facts):
            return self._begin(now, is_back=True)
        if not sizes.is_trying and facts.config_version > course.version:  # which had been taken to be refused
            return self._begin(now)
        if not sizes.take_facts(facts) and facts.global_batch == course.num_samples:
            course.take_facts(facts)
        return []

    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]:
        """Take a newer config that was put in place.

        In mode "auto", one that the tuner did not write pauses the tuner, unless it changes sections of _NO_EDIT alone.
        """
        before, mode_before = self._config, self._mode
        self._config = config
        if author == "generated":
            is_abandoned = self._book.is_of_abandoned_probe(config.version)
            return self._take_back(now, config.version, config) if is_abandoned else []
        self._sizes.allow_refused()
        self._num_waited = 0
        changed = [] if before is None else list(before.differences(config))
        edited = [key for key in changed if not key.startswith(_NO_EDIT)]
        is_edit = bool(edited) or not changed  # where nothing changes, a person wants just what is being tried
        is_stopped = mode_before == "auto" != self._mode
        left: list[Decision] = []
        if before is not None and changed and (is_edit or is_stopped):
            tried = self._book.open
            version = before.version if tried is None or tried.kind != "probe" else tried.newest_version
            left = [*self._abandon(), *self._take_back(now, version, config)]
        if "off" in (mode_before, self._mode) or before is None:
            return [*left, *self._begin(now)]
        self._must_begin = True  # once facts of this config have come
        if is_edit and not self._is_paused and self._mode == "auto":
            return [*(left or self._abandon()), *self._pause(now, why_edited(author, config.version, edited))]
        return [*left, *self._begin(now)]

    def see(self, now: float, report: StepReport) -> list[Decision]:
        """Take a report of steps over all ranks."""
        course, facts = self._course, self._facts
        if course is None or facts is None or self._must_begin or self._is_paused or self._mode == "off":
            self._heard, self._is_silent = (now, 0.0), False  # whether or not such a report can be trusted
            return self._wait(now, report)
        why = why_untrusted(report, facts)
        if why:
            return self._distrust(now, why)
        self._heard, self._is_silent = (now, report.num_steps * report.step_seconds), False
        self._num_distrusted = 0
        self._num_calm += 1
        if self._sizes.is_trying:
            return self._see_tried(now, report, facts)
        told = course.see(now, report, writes=self._writes)
        if any(each.kind == "reopen" for each in told):
            self._sizes.forget()
        is_known = (report.version, report.revision) == (facts.config_version, facts.config_revision)
        if course.has_job_changed_config and is_known:  # facts of it have come before steps under it
            return [*told, *self._begin(now)]
        return told or self._sizes.look(now, course, facts, self._tuning, writes=self._writes)

    def tick(self, now: float) -> list[Decision]:
        """Take the time, to find out that the job has fallen silent."""
        if self._heard is None or self._mode == "off" or self._is_paused:
            return []
        silent = now - self._heard[0]
        if self._is_silent or silent <= max(_SILENT_SECONDS, _SILENT_TIMES * self._heard[1]):
            return []
        self._is_silent = True
        why = f"the job has reported no steps for {silent:.0f} s"
        held = self._hold(now, why)
        return [*held, *(self._leave(now, f"what was tried cannot be measured: {why}") if self._writes else [])]

    def written(self, now: float, number: int, version: int) -> None:
        """Note that the config of decision ``number`` was written as ``version``."""
        self._book.written(number, version)
        self._sizes.written(number, version)
        if self._course is not None:
            self._course.written(number, version)

    def refused(self, now: float, number: int, why: str) -> list[Decision]:
        """Note that the config of decision ``number`` is not put in force, and why."""
        if self._course is None or self._must_begin:
            return _some(self._book.close(number, "refused", reason=f"the config was refused: {why}"))
        if self._sizes.is_trying:
            is_back = self._sizes.is_going_back
            told = self._sizes.refused(number, why)
            return [*told, *self._begin(now)] if told and is_back else told
        writes = self._writes and not self._is_paused
        return self._course.refused(now, number, why, writes=writes)

    # ---- what people ask ----

    def pause(self, now: float, why: str) -> list[Decision]:
        """Pause the tuner until ``resume``, and take back what is being tried."""
        if self._is_paused:
            return []
        left = self._leave(now, f"what was tried is taken back: {why}")
        return [*left, *self._pause(now, why)]

    def resume(self, now: float) -> list[Decision]:
        """Let a paused tuner go on, from the config that is in force by now."""
        if not self._is_paused:
            return []
        self._is_paused = False
        self._must_begin = True
        return [self._say(now, "resume", "a person lets the tuner go on"), *self._begin(now)]

    def undo(self, now: float) -> list[Decision]:
        """Take back the last change that was kept, with what is being tried, and pause the tuner until ``resume``.

        Where none was kept, what is being tried is taken back alone; where nothing is tried either, only that is said.
        """
        last, facts = self._book.last_kept, self._facts
        if last is None or facts is None:
            left = self._leave(now, why := "a person takes back what is being tried")
            paused = self._pause(now, f"{why}; {_RESUME}") if left else []
            return [*left, *paused] or [self._say(now, "hold", "there is no change to be taken back")]
        version, values = self._version_and_values(facts)
        here = point_of(values)
        abandoned = self._abandon() if self._must_begin else self._close_open()
        tried = self._book.not_kept(version).left_in(values)
        back = {**tried, **self._book.way_back(last)}
        target = here._replace(**{name: back[key] for name, key in KEYS.items() if key in back})
        present = values.get(GLOBAL_BATCH_KEY) or facts.global_batch
        size = back.get(GLOBAL_BATCH_KEY, present)
        why = f"{way_in_words(here, target, present, size)}: a person takes decision {last.number} back"
        closed = _some(self._book.close_taken_back(last.number))
        taken = self._sizes.undo(now, last, back, values, why)
        if taken is None:
            taken = self._go_back(now, facts, here, target, why, {} if size == present else back)
        return [*abandoned, *closed, *taken, *self._pause(now, f"{why}; {_RESUME}")]

    @property
    def standing(self) -> TuningStanding:
        """The state of the tuner, in a word and in a sentence, for people."""
        course = self._course
        best = course.best if course else None
        rate = course.rate(best.seconds) if course and best else None
        stand, sentence = self._stand()
        if rate is not None:
            sentence = f"{sentence}; of the best config so far it expects {rate_in_words(rate)}"
        return TuningStanding(stand=stand, sentence=sentence, best_rate=rate)

    # ---- parts ----

    @property
    def _tuning(self) -> TuningSection:
        return self._config.tuning if self._config is not None else TuningSection()

    @property
    def _version(self) -> int:
        """The newest version of the config that is known."""
        found = self._facts.config_version if self._facts is not None else 0
        return found if self._config is None else self._config.version

    @property
    def _mode(self) -> str:
        return self._tuning.mode or self._usual_mode

    @property
    def _writes(self) -> bool:
        return self._mode == "auto"

    def _stand(self) -> tuple[Stand, str]:
        if self._mode == "off":
            return "off", "tuning is off"
        if self._is_paused:
            return "paused", PAUSED
        if self._course is None or self._must_begin:
            return "waiting", "the tuner waits until the job has reported its settings"
        if not self._writes:
            return "watching", "the tuner looks on and advises"
        if self._sizes.is_going_back:
            return "probing", "the tuner puts the global batch size before in force again"
        if self._sizes.is_trying:
            return "probing", "the tuner tries another global batch size"
        if self._course.stage == "settled":
            waits = self._sizes.waits_for_noise(self._facts, self._tuning)
            more = "; the global batch may grow once it is known how noisy gradients are" if waits else ""
            return "settled", f"the tuner has settled, and watches the pace{more}"
        if self._course.stage == "waiting-for-budget":
            return "probing", "the job trains under the best config until its steps have saved time for the next trial"
        return "probing", "the tuner tries what may be faster"

    def _begin(self, now: float, *, is_back: bool = False) -> list[Decision]:
        """Begin a search where enough is known; ``is_back`` says that the global batch size is again what it was.

        Where facts have changed since the search before (``_other_job``), the budget begins anew, the step times of
        other sizes are forgotten, and people are told so.
        """
        facts, config, earlier = self._facts, self._config, self._course
        self._must_begin = True
        if facts is None or self._is_paused:
            return []
        if config is not None and facts.config_version < config.version and self._num_waited < _PATIENCE:
            return []  # facts of that version will come, unless it is not put in force
        if self._mode == "off":
            return self._take_back_unmeasured(now, facts)
        other, self._other_job = self._other_job, ""
        why = f"the search for faster settings begins again: {other}"
        told = [self._say(now, "reopen", why)] if other and earlier is not None else []
        told += self._tell_limits(now, facts)
        self._must_begin, self._num_waited = False, 0
        if other or earlier is None:
            self._budget = Budget()  # the baseline is measured anew
        self._budget.allow(self._tuning.probe_budget)
        if other:
            self._sizes.forget()
        self._sizes.drop()
        if is_back and earlier is not None and earlier.is_of(facts):
            self._course = earlier.gone_on_with(facts)
        else:
            self._course = self._new_course(facts, earlier)
        return told if is_back else [*told, *self._take_back_unmeasured(now, facts)]

    def _new_course(self, facts: JobFacts, earlier: Course | None) -> Course:
        """A course with a search of its own, which starts from what the search of ``earlier`` has learnt."""
        from .search import Search  # numpy, which a master starts without

        before = earlier.search if earlier is not None else None
        is_again = before is not None or self._book.has_search
        search = Search(facts, self._tuning, before=before, is_again=is_again)
        if earlier is not None and earlier.has_job_changed_config:
            search.refuse_as(earlier.search)
            search.allow(point_of(facts.values))  # what the job has changed is no knob, where that point was refused
        return Course(facts, self._tuning, self._book, search, self._budget)

    def _take_back_unmeasured(self, now: float, facts: JobFacts) -> list[Decision]:
        """Take back what was being tried, and not measured to its end, when a search ended or the master restarted."""
        open_ = self._book.open
        if open_ is None:
            return []
        closed = self._close_open()
        values = {**facts.values, GLOBAL_BATCH_KEY: facts.global_batch}
        tried = self._book.tried(open_)
        left = {**self._book.not_kept(open_.base).left_in(values), **tried.left_in(values)}
        here, target = point_of(facts.values), point_of({**facts.values, **left})
        if target == here and GLOBAL_BATCH_KEY not in left:
            return closed
        size = left.get(GLOBAL_BATCH_KEY, facts.global_batch)
        way = way_in_words(here, target, facts.global_batch, size)
        why = f"{way}: what was being tried was not measured to its end"
        # the newest config may still have a tried value that the job itself has changed since
        in_config = {} if self._config is None else tried.left_in(self._config.values())
        size_changes = {**in_config, **left} if GLOBAL_BATCH_KEY in left else {}
        return [*closed, *self._go_back(now, facts, here, target, why, size_changes)]

    def _go_back(
        self, now: float, facts: JobFacts, here: Point, target: Point, why: str, size_changes: Mapping[str, Any]
    ) -> list[Decision]:
        """Put ``target`` in force again, with a search or without one; ``size_changes`` are all values to set, by key,
        where the global batch size is among them, else empty."""
        base, _ = self._version_and_values(facts)
        if size_changes:
            return self._sizes.go_back(now, replace(facts, config_version=base), self._tuning, size_changes, why)
        if target == here:
            return []
        if self._course is not None and not self._must_begin:
            return self._course.go_back_to(now, target, why)
        changes, instead = values_of(target, here), values_of(here, target)
        return [self._book.add(time=now, kind="undo", reason=why, base=base, changes=changes, instead=instead)]

    def _version_and_values(self, facts: JobFacts) -> tuple[int, dict[str, Any]]:
        """The version of the config that is to be changed, and the values that the job has under it, by key."""
        course, config = self._course, self._config
        if course is not None and not self._must_begin:
            return course.version, dict(zip(KEYS.values(), course.in_force, strict=True))
        return self._version, {**facts.values, **({} if config is None else config.values())}

    def _wait(self, now: float, report: StepReport) -> list[Decision]:
        """Take steps before a search has begun, and begin it without the facts of a config that ranks have refused."""
        facts = self._facts
        if facts is None or self._is_paused or self._mode == "off":
            return []
        if (report.version, report.revision) != (facts.config_version, facts.config_revision):
            return []
        if self._config is not None and report.step < (self._config.apply_at_step or 0):
            return []
        self._num_waited += 1
        return self._begin(now) if self._num_waited >= _PATIENCE else []

    def _tell_limits(self, now: float, facts: JobFacts) -> list[Decision]:
        """Tell people what is not tuned in this job, and why, each reason once."""
        news = [why for why in reasons_not_tuned(facts, self._tuning) if why not in self._told]
        self._told.update(news)
        return [self._say(now, "hold", why) for why in news]

    def _abandon(self) -> list[Decision]:
        """Give up what is being tried, which is no longer in force."""
        self._sizes.drop()
        return self._close_open()

    def _close_open(self) -> list[Decision]:
        """Close the decision that is open, if any, without a measurement."""
        open_ = self._book.open
        if open_ is None:
            return []
        is_kept = open_.kind != "probe" and open_.version is not None
        return _some(self._book.close(open_.number, "kept" if is_kept else "undone"))

    def _take_back(self, now: float, version: int, config: ElasticConfig) -> list[Decision]:
        """Take out of ``config`` what is left of probes up to ``version`` that were not kept, if anything is."""
        made = self._book.take_back(now, version, config)
        self._must_begin = self._must_begin or made is not None
        return _some(made)

    def _pause(self, now: float, why: str) -> list[Decision]:
        """Pause the tuner, and say so where it was not paused."""
        if self._is_paused:
            return []
        self._is_paused = True
        return [self._say(now, "pause", why)]

    def _distrust(self, now: float, why: str) -> list[Decision]:
        """Take a report that cannot be trusted; what is being tried is taken back after many of them."""
        assert self._course is not None
        length = 0.0 if self._heard is None else self._heard[1]  # the report's own length may be what is wrong
        self._heard, self._is_silent = (now, length), False
        self._num_calm, was_calm = 0, self._num_calm >= _CALM
        self._num_distrusted += 1
        held = self._hold(now, why) if was_calm else []
        if self._num_distrusted == _MOST_DISTRUSTED and self._writes:
            held += self._leave(now, f"what was tried cannot be measured: {why}")
        return held

    def _see_tried(self, now: float, report: StepReport, facts: JobFacts) -> list[Decision]:
        """Take steps while another global batch size is tried; where it is kept, a new course begins at it."""
        self._budget.see(report)
        told, search = self._sizes.see(now, report)
        if search is not None:
            self._course = Course(facts, self._tuning, self._book, search, self._budget)
        return told

    def _leave(self, now: float, why: str) -> list[Decision]:
        """Take back what is being tried, if anything is."""
        open_, config = self._book.open, self._config
        if self._must_begin and config is not None:  # nobody knows yet what is in force
            is_tried = open_ is not None and open_.kind == "probe"
            return [*self._abandon(), *self._take_back(now, open_.newest_version, config)] if open_ and is_tried else []
        if self._sizes.is_trying:
            return self._sizes.leave(now, why)
        return self._course.leave(now, why) if self._course is not None else []

    def _hold(self, now: float, why: str) -> list[Decision]:
        return [self._say(now, "hold", nothing_new_in_words(why))]

    def _say(self, now: float, kind: Kind, reason: str) -> Decision:
        return self._book.add(time=now, kind=kind, reason=reason, base=self._version)


def _some(decision: Decision | None) -> list[Decision]:
    return [] if decision is None else [decision]
