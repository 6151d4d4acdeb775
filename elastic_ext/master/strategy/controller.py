"""Controller: a tuner as those around it see it: it is told what happens, and says what is to be done. Pure.

The same calls give the same decisions. It reads no clock and writes nothing: who holds it writes a config for each
decision that has changes, and tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from elastic_ext.config import ElasticConfig
from elastic_ext.job_facts import JobFacts
from elastic_ext.sections import TuningSection

from .book import Book
from .budget import Budget
from .change import changed_facts
from .course import Course
from .decisions import Decision, Kind
from .growth import Growth
from .limits import limits_in_words
from .measuring import why_untrusted
from .resizing import Resizing
from .seen import Seen
from .sizes import SIZE_KEY
from .space import KEYS, Point, point_of, values_of
from .standing import Stand, Standing
from .telling import change_in_words, listed, rate_in_words, size_change_in_words

__all__ = ["Author", "Controller", "Mode"]

Mode = Literal["off", "advise", "auto"]
Author = Literal["person", "generated", "node"]

_SILENT_SECONDS = 60.0
_SILENT_TIMES = 30
"""As long as the last report was of."""
_CALM = 8
"""Reports in a row that can be trusted, after which a reason why not is told anew."""
_PATIENCE = 5
"""Reports under an older config, until it is clear that a newer one is not put in force."""
_MOST_DISTRUSTED = 20
"""Reports that tell nothing while something is tried: then it is taken back."""
_NO_EDIT = ("tuning", "checkpoint")
"""Sections that a person may change beside the tuner: they are not what it chooses."""


class Controller:
    """Of one job."""

    def __init__(self, *, mode: Mode, decisions: Sequence[Decision] = ()) -> None:
        """``mode`` counts where the config says nothing of it; ``decisions`` are those from before a restart."""
        self._usual_mode = mode
        self._book = Book(decisions)
        self._is_paused = self._book.is_paused
        self._config: ElasticConfig | None = None
        self._facts: JobFacts | None = None
        self._course: Course | None = None
        self._growth = Growth(decisions)
        self._resizing: Resizing | None = None
        self._budget = Budget()
        self._must_begin = True
        self._heard: tuple[float, float] | None = None  # when, and what a step took
        self._num_distrusted = 0
        self._num_calm = _CALM
        self._num_waited = 0
        self._is_silent = False
        self._told: set[str] = set()

    # ---- what is told ----

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]:
        """Rank 0 has written what is known of the job."""
        before, self._facts = self._facts, facts
        other = changed_facts(before, facts) if before is not None else ""
        course, resizing = self._course, self._resizing
        is_asked_for = before is not None and self._take_size(before, facts)
        if course is None or self._must_begin or course.is_changed_inside:
            return self._begin(now)
        if resizing is not None and is_asked_for and resizing.stage == "back":
            return self._begin(now, is_back=True)
        if other and not is_asked_for:
            return self._begin(now, f"the search begins again: {other}")
        is_taken = resizing is not None and resizing.take_facts(facts)
        if not is_taken and facts.global_batch == course.num_samples:
            course.take_facts(facts)
        return []

    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]:
        """A newer config is in place, whoever wrote it."""
        before, mode_before = self._config, self._mode
        self._config = config
        if author == "generated":
            return []
        self._growth.allow()
        changed = [] if before is None else list(before.differences(config))
        edited = [key for key in changed if not key.startswith(_NO_EDIT)]
        is_edit = bool(edited) or not changed  # a person may ask for just what is being tried
        if "off" in (mode_before, self._mode) or before is None:
            return self._begin(now)
        self._must_begin = True  # by what is in force then, of which facts will tell
        if is_edit and not self._is_paused and self._mode == "auto":
            return [*self._abandon(), *self._pause(now, _why_edited(author, config, edited))]
        return self._begin(now)

    def see(self, now: float, seen: Seen) -> list[Decision]:
        """Some steps of all ranks."""
        if self._mode == "off" or self._is_paused or self._facts is None:
            return []
        if self._must_begin or self._course is None:
            return self._wait(now, seen, self._facts)
        why = why_untrusted(seen, self._facts)
        if why:
            return self._distrust(now, why)
        self._heard, self._is_silent = (now, seen.num_steps * seen.step_seconds), False
        self._num_distrusted = 0
        self._num_calm += 1
        if self._resizing is not None:
            return self._see_resized(now, seen, self._resizing)
        told = self._course.see(now, seen, writes=self._writes)
        if any(each.kind == "reopen" for each in told):
            self._growth.forget()
        is_known = (seen.version, seen.revision) == (self._facts.config_version, self._facts.config_revision)
        if self._course.is_changed_inside and is_known:  # facts of it have come before steps under it
            told += self._begin(now)
        return told or self._look_at_sizes(now, self._course, self._facts)

    def tick(self, now: float) -> list[Decision]:
        """Time passes."""
        if self._heard is None or self._mode == "off" or self._is_paused:
            return []
        silent = now - self._heard[0]
        if self._is_silent or silent <= max(_SILENT_SECONDS, _SILENT_TIMES * self._heard[1]):
            return []
        self._is_silent = True
        return self._hold(now, f"nothing was heard of the job's steps for {silent:.0f} s")

    def written(self, now: float, number: int, version: int) -> None:
        """The config of a decision was written, as this version."""
        self._book.written(number, version)
        if self._resizing is not None:
            self._resizing.written(number, version)
        elif self._course is not None:
            self._course.written(number, version)

    def refused(self, now: float, number: int, why: str) -> list[Decision]:
        """The config of a decision is not put in force."""
        if self._course is None:
            return _some(self._book.close(number, "refused", reason=f"it was refused: {why}"))
        if self._resizing is not None:
            return self._refuse_size(now, self._resizing, number, why)
        writes = self._writes and not self._is_paused
        return self._course.refused(now, number, why, writes=writes)

    # ---- what people ask ----

    def pause(self, now: float, why: str) -> list[Decision]:
        """Nothing is decided until ``resume``; what is being tried is taken back."""
        if self._is_paused:
            return []
        left = self._leave(now, f"what was tried is taken back: {why}")
        return [*left, *self._pause(now, why)]

    def resume(self, now: float) -> list[Decision]:
        """It goes on, by what is in force by now."""
        if not self._is_paused:
            return []
        self._is_paused = False
        self._must_begin = True
        return [self._say(now, "resume", "a person lets the tuner go on"), *self._begin(now)]

    def undo(self, now: float) -> list[Decision]:
        """The last change that was kept is taken back, and nothing else is tried until ``resume``."""
        last, facts = self._book.last_kept, self._facts
        if last is None or facts is None:
            return [self._say(now, "hold", "there is no change to be taken back")]
        resizing = self._resizing
        abandoned = self._abandon()
        self._growth.refuse_taken_back(last)
        here = point_of(facts.values) if self._must_begin or self._course is None else self._course.here
        target = here._replace(**{name: last.instead[key] for name, key in KEYS.items() if key in last.instead})
        size = last.instead.get(SIZE_KEY, facts.global_batch)
        why = f"{_changes_in_words(facts, here, target, size)}: a person takes decision {last.number} back"
        closed = _some(self._book.close(last.number, "undone"))
        if resizing is not None and resizing.is_written:
            self._resizing = resizing
            taken = resizing.go_back(now, why, last.instead)
        else:
            taken = self._go_back(now, facts, here, target, why, {} if size == facts.global_batch else last.instead)
        paused = [] if self._is_paused else self._pause(now, f"{why}; say resume to go on")
        return [*abandoned, *closed, *taken, *paused]

    @property
    def standing(self) -> Standing:
        """Where it stands, for people."""
        course = self._course
        best = course.best if course else None
        rate = course.rate(best.seconds) if course and best else None
        stand, sentence = self._stand()
        if rate is not None:
            sentence = f"{sentence}; {rate_in_words(rate)} at best so far"
        return Standing(stand=stand, sentence=sentence, best_rate=rate)

    # ---- parts ----

    @property
    def _tuning(self) -> TuningSection:
        return self._config.tuning if self._config is not None else TuningSection()

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
            return "paused", "the tuner is paused"
        if self._course is None or self._must_begin:
            return "waiting", "the tuner waits for what is known of the job"
        if not self._writes:
            return "watching", "the tuner looks on and advises"
        if self._resizing is not None:
            return "probing", "the tuner tries steps of another size"
        if self._course.stage == "settled":
            return "settled", f"the tuner has settled, and watches the pace{self._waits_for_noise()}"
        if self._course.stage == "saving":
            return "probing", "the tuner trains at the best config until that has paid for what it tries next"
        return "probing", "the tuner tries what may be faster"

    def _begin(self, now: float, reason: str = "", *, is_back: bool = False) -> list[Decision]:
        """Begin a search, where enough is known to do so; ``is_back`` where steps have the size again that they had."""
        facts, config, earlier = self._facts, self._config, self._course
        self._must_begin = True
        if facts is None or self._is_paused:
            return []
        if config is not None and facts.config_version < config.version and self._num_waited < _PATIENCE:
            return []  # facts of that version will come, unless it is not put in force
        if self._mode == "off":
            return self._take_back_unmeasured(now, facts)
        told = [self._say(now, "reopen", reason)] if reason else []
        told += self._tell_limits(now, facts)
        self._must_begin, self._num_waited = False, 0
        if reason or earlier is None:
            self._budget = Budget(
                self._tuning.probe_budget
            )  # what the user's own config would do in this job is not known
        if reason:
            self._growth.forget()
        self._resizing = None
        is_found = is_back and earlier is not None and earlier.is_of(facts)
        self._course = earlier.begun_again(facts) if is_found and earlier else self._made(facts, earlier)
        return told if is_back else [*told, *self._take_back_unmeasured(now, facts)]

    def _made(self, facts: JobFacts, earlier: Course | None) -> Course:
        from .search import Search  # numpy, which a master starts without

        before = earlier.search if earlier is not None else None
        is_again = before is not None or self._book.last is not None
        search = Search(facts, self._tuning, before=before, is_again=is_again)
        if earlier is not None and earlier.is_changed_inside:
            search.refuse_as(earlier.search)
        return Course(facts, self._tuning, self._book, search, self._budget)

    def _take_back_unmeasured(self, now: float, facts: JobFacts) -> list[Decision]:
        """What was being tried as the search ended, or the master, is in force and was not measured."""
        open_ = self._book.open
        if open_ is None:
            return []
        closed = _some(self._book.close(open_.number, "undone" if open_.kind == "probe" else "kept"))
        values = {**facts.values, SIZE_KEY: facts.global_batch}
        left = {key: old for key, old in open_.instead.items() if values.get(key) == open_.changes.get(key)}
        here, target = point_of(facts.values), point_of({**facts.values, **left})
        if open_.kind != "probe" or (target == here and SIZE_KEY not in left) or self._mode == "advise":
            return closed
        size = left.get(SIZE_KEY, facts.global_batch)
        why = f"{_changes_in_words(facts, here, target, size)}: what was being tried was not measured to its end"
        return [*closed, *self._go_back(now, facts, here, target, why, open_.instead if SIZE_KEY in left else {})]

    def _go_back(
        self, now: float, facts: JobFacts, here: Point, target: Point, why: str, sized: Mapping[str, Any]
    ) -> list[Decision]:
        """Have a point in force again, be it with a search or without one; ``sized`` is all that is to be set where the
        size of steps is among that."""
        if sized:
            self._resizing = Resizing(self._book, self._growth, self._tuning)
            return self._resizing.begin_back(now, facts, sized, why)
        if target == here:
            return []
        if self._course is not None and not self._must_begin:
            return self._course.to(now, target, why)
        changes, instead = values_of(target, here), values_of(here, target)
        base = facts.config_version
        return [self._book.add(time=now, kind="undo", reason=why, base=base, changes=changes, instead=instead)]

    def _wait(self, now: float, seen: Seen, facts: JobFacts) -> list[Decision]:
        """Steps before a search has begun: facts may never come of a config that ranks have refused."""
        if (seen.version, seen.revision) != (facts.config_version, facts.config_revision):
            return []
        self._num_waited += 1
        return self._begin(now) if self._num_waited >= _PATIENCE else []

    def _tell_limits(self, now: float, facts: JobFacts) -> list[Decision]:
        """What is not tuned, each reason once."""
        return [each for why in limits_in_words(facts, self._tuning) for each in self._hold_once(now, why)]

    def _abandon(self) -> list[Decision]:
        """What is being tried is no longer in force."""
        open_, self._resizing = self._book.open, None
        return _some(self._book.close(open_.number, "undone")) if open_ else []

    def _pause(self, now: float, why: str) -> list[Decision]:
        self._is_paused = True
        return [self._say(now, "pause", why)]

    def _distrust(self, now: float, why: str) -> list[Decision]:
        """Reports that tell nothing; something that is being tried is taken back after many of them."""
        assert self._course is not None
        self._num_calm, was_calm = 0, self._num_calm >= _CALM
        self._num_distrusted += 1
        held = self._hold(now, why) if was_calm else []
        if self._num_distrusted == _MOST_DISTRUSTED and self._writes:
            held += self._leave(now, f"what was tried cannot be measured: {why}")
        return held

    # ---- steps of another size ----

    def _look_at_sizes(self, now: float, course: Course, facts: JobFacts) -> list[Decision]:
        """Whether a step of another size would teach more in the same time, where nothing else is to be tried."""
        if not course.is_at_rest or not self._growth.is_due(facts, self._tuning):
            return []
        wish = self._growth.propose(facts, self._tuning, course.search)
        if wish is None:
            return []
        resizing = Resizing(self._book, self._growth, self._tuning)
        if not self._writes:
            return resizing.advise(now, wish, facts, course) if self._growth.is_news(wish) else []
        if not course.can_pay_for(wish.most_seconds_alike):
            return []
        self._resizing = resizing
        return resizing.begin(now, wish, facts, course)

    def _take_size(self, before: JobFacts, facts: JobFacts) -> bool:
        """Whether steps have another size since it was asked for here, and nothing else is another job's."""
        alike = replace(before, global_batch=facts.global_batch, share=facts.share)
        resizing = self._resizing
        if resizing is None or before.global_batch == facts.global_batch or facts.global_batch != resizing.size:
            return False
        if changed_facts(alike, facts):
            return False
        self._budget.change_pace(self._growth.progress_ratio(before, facts, self._tuning))
        return True

    def _see_resized(self, now: float, seen: Seen, resizing: Resizing) -> list[Decision]:
        self._budget.see(seen)
        told = resizing.see(now, seen)
        if resizing.stage == "kept" and self._facts is not None and resizing.search is not None:
            self._resizing = None
            self._course = Course(self._facts, self._tuning, self._book, resizing.search, self._budget)
        return told

    def _refuse_size(self, now: float, resizing: Resizing, number: int, why: str) -> list[Decision]:
        is_back = resizing.stage == "back"
        told = resizing.refused(number, why)
        if resizing.stage == "over":
            self._resizing = None
        return [*told, *self._begin(now)] if told and is_back else told

    def _leave(self, now: float, why: str) -> list[Decision]:
        """What is being tried is not left in force."""
        if self._resizing is None:
            return self._course.leave(now, why) if self._course is not None else []
        told = self._resizing.leave(now, why)
        if self._resizing.stage == "over":
            self._resizing = None
        return told

    def _waits_for_noise(self) -> str:
        waits = self._facts is not None and self._growth.waits(self._facts, self._tuning)
        return "; steps may grow once it is known how noisy their gradients are" if waits else ""

    # ---- words ----

    def _hold_once(self, now: float, why: str) -> list[Decision]:
        if why in self._told:
            return []
        self._told.add(why)
        return self._hold(now, why)

    def _hold(self, now: float, why: str) -> list[Decision]:
        return [self._say(now, "hold", f"nothing is decided: {why}")]

    def _say(self, now: float, kind: Kind, reason: str) -> Decision:
        version = self._config.version if self._config is not None else 0
        if self._config is None and self._facts is not None:
            version = self._facts.config_version
        return self._book.add(time=now, kind=kind, reason=reason, base=version)


def _why_edited(author: Author, config: ElasticConfig, edited: Sequence[str]) -> str:
    who = "a person" if author == "person" else "a config of the node"
    if not edited:
        return f"{who} set version {config.version} as it was; say resume to let the tuner go on from there"
    keys = listed(edited[:3]) + (" and more" if len(edited) > 3 else "")
    return f"{who} set {keys} in version {config.version}; say resume to let the tuner go on from there"


def _changes_in_words(facts: JobFacts, here: Point, target: Point, size: int) -> str:
    words = [size_change_in_words(size, facts.global_batch)] if size != facts.global_batch else []
    return ", ".join([*words, *([change_in_words(target, here)] if target != here or not words else [])])


def _some(decision: Decision | None) -> list[Decision]:
    return [] if decision is None else [decision]
