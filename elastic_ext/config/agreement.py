"""How all ranks agree on one config at the same step boundary: the agreement itself, the exchange of pulses and control
words, and how often it takes place.

A *pulse* is one integer per rank, a hash of what should be the same on all ranks; a *control word* is what a rank has
to say, in full, and is sent only where the pulses call for it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from elastic_ext.errors import ElasticError, RanksDisagreeError, RanksError
from elastic_ext.records.json import JsonRecord

from .apply import Applied, Applier, Appliers, ConfigRounds, ConfigSource, Proposal
from .control_word import ControlWord, GatheredWords, IntervalEstimator, Lag, Purpose, RoundPlace, start_differences
from .elastic_config import ElasticConfig
from .keys import Value

if TYPE_CHECKING:
    from elastic_ext.ranks.group import PendingSum, Ranks
from elastic_ext.ranks.world import World

__all__ = ["Agreement", "AgreementInterval", "Boundary", "Exchange", "JoinedAgreement", "RankInterval"]

_logger = logging.getLogger(__name__)


# --- how ranks compare what should be the same on all: pulses first, control words where those call for them ---------
# What the control words ask for beyond that, and what is done about it, is not known here: see Agreement, below.


class Exchange:
    """This rank's exchange of pulses with all ranks, and of control words where the pulses call for them.

    All ranks make the same calls in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.word: ControlWord | None = None
        """The control word whose pulse is under way; None where no pulse is."""
        self._pulse: PendingSum | None = None

    def compare_start(self, values: Mapping[str, object]) -> None:
        """Raise on all ranks unless all start with these values."""
        gathered = self._ranks.gather(json.dumps(values).encode(), "comparing start-up values")
        answers = [json.loads(data) for data in gathered]
        differences = start_differences(answers)
        if differences:
            raise RanksDisagreeError(f"ranks start with different values; give all ranks the same: {differences}")

    def start(self, word: ControlWord) -> None:
        """Begin to sum the pulse of ``word`` over all ranks; ``read`` finishes the sum."""
        self.word = word
        self._pulse = self._ranks.start_sum([word.pulse], "agreeing at a step boundary")

    def read(self) -> GatheredWords | None:
        """Finish the pulse under way: every rank's control word, or None where the pulses show no need of them.

        Raises on all ranks where they differ in what should be the same.
        """
        word, pulse = self.word, self._pulse
        assert word is not None
        assert pulse is not None
        self.drop()
        return self._read_unless_alike(word, pulse.result(), "agreeing at a step boundary")

    def compare(self, word: ControlWord, doing: str) -> GatheredWords | None:
        """Sum the pulse of ``word`` over all ranks and wait for it: ``start`` and ``read`` in one call.

        Gives and raises what ``read`` does. ``doing`` says in words, for an error, what this rank waits for.
        """
        return self._read_unless_alike(word, self._ranks.sum([word.pulse], doing), doing)

    def drop(self) -> None:
        """Give up the pulse under way without reading it."""
        self.word = self._pulse = None

    def _read_unless_alike(self, word: ControlWord, sums: list[int], doing: str) -> GatheredWords | None:
        """Every rank's control word; None where all pulses are alike and no rank has news. Raises where ranks differ.

        A rank looks at its own news too: where all ranks have some, their pulses may be alike.
        """
        if sums == [word.pulse * self._ranks.world_size] and not word.has_news:
            return None
        words = self._ranks.gather(word.to_bytes(), doing)
        gathered = GatheredWords(words=tuple(ControlWord.from_bytes(data) for data in words))
        if gathered.differing:
            found = f"ranks differ in {', '.join(gathered.differing)}: {gathered.account}"
            raise RanksDisagreeError(f"{found}; make the same calls on every rank")
        return gathered


# --- the interval between agreements that one rank would have, from what it sees of steps and agreements --------------
# What follows from the numbers is decided in control_word.py; which interval all ranks take, by their control words.

_NUM_MEASUREMENTS = 16
_PAUSE_SECONDS = 0.002  # around a pulse that is measured
_WORTH_SENDING = 1.5  # by what factor a wanted interval must change to be worth sending to the other ranks
_GROWTH = (
    2  # how much longer an interval may become at once: a burst of short steps must not silence a run of long ones
)

AgreementInterval = int | Literal["auto"]
"""At every how many boundaries an agreement is begun; "auto": ranks choose that by what steps and agreements take."""


class RankInterval:
    """The interval between agreements that this rank asks for, in boundaries, and the one it last sent.

    With ``every="auto"`` it follows from the times that are noted; a number given as ``every`` is kept.
    """

    def __init__(self, ranks: Ranks, every: AgreementInterval) -> None:
        self._ranks = ranks
        self._is_auto = every == "auto"
        first = 1 if every == "auto" else every
        self._wanted_interval = self._sent_interval = first
        self._estimator = IntervalEstimator(pulse_seconds=0.0)
        self._passed_at: float | None = None
        self._spent_seconds = 0.0  # on the agreement under way

    @property
    def is_needed(self) -> bool:
        """Whether noted times matter: this rank may choose the interval, and there are other ranks."""
        return self._is_auto and self._ranks.world_size > 1

    def measure(self) -> None:
        """Measure what a pulse takes, with all ranks, before the first step."""
        if self._is_auto:
            self._estimator = IntervalEstimator(pulse_seconds=_pulse_seconds(self._ranks))

    def note_step(self, now: float) -> None:
        """Take in that a boundary is passed at ``now``: a step ends there."""
        if self._passed_at is not None:
            self._estimator.note_step(now - self._passed_at)
        self._passed_at = now

    def note_idle(self, seconds: float) -> None:
        """Take in how long a boundary without an agreement kept the training thread."""
        self._estimator.note_idle(seconds)

    def note_pulse_read(self, seconds: float) -> None:
        """Take in how long reading a pulse kept the training thread, before the next pulse is begun."""
        self._spent_seconds += seconds

    def note_pulse_started(self, seconds: float) -> None:
        """Take in how long beginning a pulse kept the training thread.

        With the reading of the pulse before, noted since the last call, that is what one agreement takes.
        """
        self._estimator.note_agreement(self._spent_seconds + seconds)
        self._spent_seconds = 0.0

    def wanted_interval(self, every: int) -> tuple[int, bool]:
        """The interval that this rank wants where ``every`` is in force, and whether to send it to the other ranks."""
        self._wanted_interval = min(self._estimator.interval(), every * _GROWTH) if self._is_auto else every
        least, most = self._sent_interval / _WORTH_SENDING, self._sent_interval * _WORTH_SENDING
        return self._wanted_interval, not least <= self._wanted_interval <= most

    def begin_anew(self, every: int) -> None:
        """Ask for ``every`` as at the start, and count the time since the last boundary as no step's."""
        self._wanted_interval = self._sent_interval = every
        self._passed_at, self._spent_seconds = None, 0.0

    def mark_sent(self) -> None:
        """Note that all ranks have read the interval that this rank wanted last."""
        self._sent_interval = self._wanted_interval


def _pulse_seconds(ranks: Ranks) -> float:
    """The CPU seconds that one pulse takes in all of this process's threads, measured; the largest over the ranks.

    A pause lies between the pulses, as steps do in training: a pulse that wakes its threads takes more.
    """
    if ranks.world_size == 1:
        return 0.0
    doing = "measuring an agreement"
    pause = threading.Event()
    nanoseconds = []
    for _ in range(_NUM_MEASUREMENTS):
        pause.wait(_PAUSE_SECONDS)
        began = time.process_time_ns()
        pulse = ranks.start_sum([0], doing)
        pause.wait(_PAUSE_SECONDS)
        pulse.result()
        nanoseconds.append(time.process_time_ns() - began)
    mine = sorted(nanoseconds)[_NUM_MEASUREMENTS // 2]
    return max(int(data) for data in ranks.gather(str(mine).encode(), doing)) / 1e9


# --- one config in force on all ranks, changed by all of them at the same step boundary ------------------------------
# How a change travels: a rank that holds something new sends another pulse than the others; the pulses are summed while
# the next step runs and read at the next boundary; a sum that is not as it should be has all ranks exchange their
# control words (control_word.py); and when those say that there is something to decide, the ranks hold a round
# (apply.py): one rank's contents go to all, every applier on every rank checks them, and either all apply or none.
#
# After every such exchange the next message is a pulse again, whatever it is for. So ranks that have lost step with
# each other pair a pulse with a pulse, see that they differ, and raise on all sides.
#
# Words: a *boundary* lies between two steps; ``boundary()`` is called there on every rank. An *agreement* is one
# pulse, begun at one boundary and read at the next. One is begun at each ``every``-th boundary.

_IDLE_SAMPLING = 8  # one in so many boundaries without an agreement is timed

_DOING = {
    Purpose.END_EPOCH: "waiting for the other ranks at the end of an epoch",
    Purpose.FINISH: "waiting for the other ranks at the end of training",
    Purpose.REWIND: "waiting for the other ranks to go back to a checkpoint",
    Purpose.RETRY_SMALLER: "waiting for the other ranks to take a step again that ran out of memory",
    Purpose.MEMBERS: "waiting for the other ranks to decide on other members",
}
_RETRYING = "going on after a step that failed here, when ranks may have been exchanging its gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What all ranks know at one step boundary; the same on every rank."""

    step: int
    """How many steps have been taken before this boundary."""
    config: ElasticConfig
    applied: Applied | None
    """What came into force since the boundary before, at this one or in between; None where nothing did.

    In between is after an epoch, before a step is taken again, or as a checkpoint is loaded.
    """
    stop: bool
    """Whether the script has asked on some rank to end its loop (``request_stop``); stays true from then on."""
    save: bool
    """Whether some rank, or a config, asked for a checkpoint; true at one boundary."""
    leave: bool
    """Whether some rank's process was told to end, as by SIGTERM (``request_leave``); stays true from then on."""
    copy: bool
    """Whether some rank asked to copy training state in memory, to be saved after a SIGTERM; true at one boundary."""
    members: int = 0
    """The version of a membership plan that all ranks hold by now, at one boundary; 0 where there is nothing new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedAgreement(JsonRecord):
    """Where ranks are in their agreements, for a rank that joins them; the same on every rank."""

    boundaries: int
    backwards: int
    step: int
    stopping: bool
    """Whether the script has asked on some rank to end its loop."""
    leaving: bool
    """Whether some rank's process was told to end."""
    save: bool
    """Whether the next boundary is to tell that a checkpoint was asked for, as ranks have agreed since the last one."""
    copy: bool
    """Whether the next boundary is to tell that a copy of training state was asked for."""


class Agreement:
    """How this rank agrees with all others, at step boundaries, on the config, on saves and on an end.

    All ranks make the same calls in the same order. Of the ranks that read one file, one ``warns`` of a stale one.
    """

    def __init__(
        self,
        ranks: Ranks,
        source: ConfigSource,
        base: ElasticConfig,
        *,
        every: AgreementInterval = "auto",
        warns: bool = True,
        lag_warning_seconds: float = 30.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = 1 if every == "auto" else every
        """At every how many boundaries an agreement is begun now."""
        self._asked_every = every
        self._ranks = ranks
        self._source = source
        self.appliers = Appliers(ranks)
        self._rounds = ConfigRounds(ranks, source, self.appliers, base, warns=warns)
        self._lag_warning_seconds = lag_warning_seconds
        self._lag = Lag(patience_seconds=lag_warning_seconds)
        self._rank_interval = RankInterval(ranks, every)
        self._notes_times = self._rank_interval.is_needed
        self._note_step = self._rank_interval.note_step  # bound once: most boundaries do little else
        self._clock = clock
        self.step = 0
        """How many steps have been taken; set it before ``start`` where a run is resumed."""
        self._num_boundaries = self._num_backwards = 0
        self.count_schedules: Callable[[], int] = lambda: 0
        """Gives how often schedules have stepped on this rank, which ranks compare."""
        self.count_ahead: Callable[[], int] = lambda: 0
        """Gives how many batches this rank has taken ahead of their step, which ranks compare between two steps."""
        self.held_members: Callable[[], int] = lambda: 0
        """Gives the version of the newest membership plan that this rank holds."""
        self.compared_at_start: Mapping[str, object] = {}
        """Further values that ``start`` compares between ranks, by names for people."""
        self._quiet_until: float = 0  # the number of the first boundary that may have anything to do or to tell
        self._pulsed_boundary = 0
        self._exchange = Exchange(ranks)
        self._applied: Applied | None = None  # since the last boundary, as one change
        self._changes: dict[int, Applied] = {}  # the same by the number of boundaries that had been passed
        self.changes: tuple[Applied, ...] = ()
        """What ``applied`` of the last boundary is made of: one change for each config that a step runs under."""
        self._save = False  # a rank or a config has asked for it since the last boundary, as all ranks know
        self._stop_wanted = self._save_wanted = self._stopping = False
        self._leave_wanted = self._leaving = self._copy_wanted = self._copy = False
        self._told_members = self._known_members = self._members = 0  # by this rank, by all; news for the next boundary
        self.resumed_version: int | None = None
        """The version of the config that was loaded from a checkpoint; None where none was."""
        self.saves_config = False
        """Whether checkpoints are saved, which have the config in force, so that a later run is resumed under it."""
        self._started = False
        self._broken: RanksError | None = None
        ranks.progress = lambda: self._make_word(Purpose.ROUTINE).progress

    @property
    def config(self) -> ElasticConfig:
        """The config in force."""
        return self._rounds.config

    @property
    def base(self) -> ElasticConfig:
        """What is in force where no file says otherwise: the start-up config, with a resumed one over it."""
        return self._rounds.base

    @property
    def files(self) -> list[str]:
        """The digests of the files that the job has seen with the version in force; empty where it has seen none."""
        return self._rounds.files

    def own_value(self, path: str) -> Value:
        """The script's own value of a dotted key; None where that is not known."""
        value = self._rounds.startup.get(path)
        return self.appliers.own_values.get(path) if value is None else value

    def add(self, applier: Applier) -> None:
        """Have ``applier`` check and apply its section, on this rank, from the next change on."""
        self.appliers.add(applier)

    def tell_refusals(self, tell: Callable[[int, str, str], None]) -> None:
        """Have rank 0 call ``tell(version, digest, why)`` for each version of the config file that ranks refuse."""
        self._rounds.on_refusal = tell

    def resume(
        self, config: ElasticConfig, saved: ElasticConfig | None = None, saved_files: Collection[str] = ()
    ) -> None:
        """Load the config saved in a checkpoint: it overrides the start-up values, and the config file overrides it.

        Before the first boundary; after ``start`` all ranks call this together. ``saved`` is that config before the
        caller put values of its own into it, and ``saved_files`` the ``files`` that were saved with it.
        """
        if self._num_boundaries:
            raise ElasticError("a config can be resumed only before the first step; load the checkpoint before it")
        if self._started:
            self._raise_if_unusable()
        self._rounds.resume(config, saved, saved_files)
        self.resumed_version = config.version
        if self._started:
            self.rouse()
            with self._breaking():
                self._keep_applied(self._rounds.start_again(self._place))
            self._save = self._starts_with_save

    def take_world(self, world: World) -> None:
        """Agree with the ranks of ``world`` from here on, between two steps, as often as ranks do at the start.

        All ranks of ``world`` call this when no agreement is under way. Nothing here sets a newcomer's counts of
        boundaries, backward passes and steps: it must have taken over those of the other ranks before.
        """
        assert self._exchange.word is None, "an agreement of the ranks before is read first"
        self.every = 1 if self._asked_every == "auto" else self._asked_every
        self._rank_interval.begin_anew(self.every)
        self._notes_times = self._rank_interval.is_needed
        self._pulsed_boundary = self._num_boundaries
        self._lag = Lag(patience_seconds=self._lag_warning_seconds)
        self._broken = None
        self._rounds.warns |= world.is_first_here  # the rank that has warned so far may have left
        self.rouse()

    def know_members(self, version: int) -> None:
        """Take a membership plan as known to all ranks, and no newer one: that by which they train now.

        All ranks call this alike, before the first boundary or between two steps. A newer plan that some of them hold
        is told anew, as ranks that have joined have not heard of it.
        """
        self._told_members = self._known_members = version
        self._members = 0

    def tell_config(self) -> dict[str, Any]:
        """The configs of these ranks, as JSON for ranks that join."""
        return self._rounds.tell()

    def join_config(self, told: Mapping[str, Any], *, leaves_out: Collection[str]) -> ElasticConfig:
        """Take over the configs of ranks that this one joins, before it does; gives the one in force."""
        return self._rounds.join(told, leaves_out=leaves_out)

    def join(self, told: JoinedAgreement) -> None:
        """Go on from where ranks are that this one joins, between two steps; ``take_world`` comes next."""
        self._num_boundaries, self._num_backwards, self.step = told.boundaries, told.backwards, told.step
        self._stopping, self._leaving = told.stopping, told.leaving
        self._applied, self._save, self._copy = None, told.save, told.copy

    def forget_others(self) -> None:
        """Give up what is under way with other ranks, between two steps, as some of them are lost.

        ``join`` comes next where this rank has not heard what others have, and ``take_world`` after that. What it had
        to ask and to tell is asked and told again.
        """
        if (word := self._exchange.word) is not None:
            self._save_wanted |= word.save
            self._copy_wanted |= word.copy
        self._rounds.tell_again()
        self._exchange.drop()
        self._broken = None
        self.rouse()

    @property
    def place_to_join(self) -> JoinedAgreement:
        """Where this rank is, for ranks that join between two steps."""
        return JoinedAgreement(
            boundaries=self._num_boundaries,
            backwards=self._num_backwards,
            step=self.step,
            stopping=self._stopping,
            leaving=self._leaving,
            save=self._save,
            copy=self._copy,
        )

    def start(self) -> Applied | None:
        """Agree on the start-up config with all ranks; then put in force, or schedule, a config file that all found."""
        self._started = True
        with self._breaking():
            mine = self._rounds.startup_values | {
                "agree_every_steps": self._asked_every,
                "steps already taken": self.step,
            }
            self._exchange.compare_start({**mine, **self.compared_at_start})
            self._rank_interval.measure()
            applied = self._rounds.start(self._place)
        self._save = self._starts_with_save
        return applied

    def propose(self, changes: Mapping[str, object], reason: str) -> Proposal:
        """Ask for a revision of the config in force: dotted keys and their new values.

        May be called on one rank or on all. ConfigError says at once what the config in force does not allow.
        """
        proposal = self._rounds.propose(changes, reason)
        self.rouse()
        return proposal

    def request_stop(self) -> None:
        """Have ``Boundary.stop`` be true on all ranks, within two agreements. Any rank may call it."""
        self._stop_wanted = True
        self.rouse()

    def request_leave(self) -> None:
        """Have ``Boundary.leave`` be true on all ranks, within two agreements.

        Any rank may call it, from a signal's handler too.
        """
        self._leave_wanted = True
        self.rouse()

    def request_copy(self) -> None:
        """Have ``Boundary.copy`` be true on all ranks at one boundary, within two agreements. Any rank may call it.

        Until then it may be called again, and that is no second request.
        """
        word = self._exchange.word
        self._copy_wanted |= word is None or not word.copy
        self.rouse()

    def request_save(self) -> None:
        """Have ``Boundary.save`` be true on all ranks at one boundary, within two agreements. Any rank may call it."""
        self._save_wanted = True
        self.rouse()

    def boundary(self, *, step: int, backwards: int = 0) -> Boundary:
        """Pass a step boundary: learn what was agreed, apply what is due, say what is new here.

        ``step`` is the number of steps taken; ``backwards`` a count of backward passes, which ranks compare.
        """
        self.rouse()  # no boundary after this one passes quietly if an error ends it
        self._raise_if_unusable()
        now = self._clock()
        self._note_step(now)
        self._num_boundaries += 1
        self.step, self._num_backwards = step, backwards
        self._rounds.warn_of_stale_file()
        is_agreement = self._num_boundaries == 1 or self._num_boundaries - self._pulsed_boundary >= self.every
        if self._exchange.word is not None or is_agreement or self._rounds.is_due(step):
            with self._breaking():
                self._work_at_boundary(now, is_agreement=is_agreement)
        elif self._num_boundaries % _IDLE_SAMPLING == 0:
            self._rank_interval.note_idle(self._clock() - now)
        applied, save, copy, members = self._applied, self._save, self._copy, self._members
        self._applied, self._save, self._copy, self._members = None, False, False, 0
        self.changes, self._changes = tuple(self._changes.values()), {}
        self._become_quiet()
        return Boundary(
            step=step,
            config=self.config,
            applied=applied,
            stop=self._stopping,
            save=save,
            leave=self._leaving,
            copy=copy,
            members=members,
        )

    def pass_quietly(self, now: float, step: int, backwards: int) -> bool:
        """Pass a boundary at which there is nothing to do or to tell; gives False, and does nothing, at any other.

        Most boundaries are such: this takes as little as it can. ``now`` is the clock's time.
        """
        num_boundaries = self._num_boundaries + 1
        if num_boundaries >= self._quiet_until:
            return False
        self._num_boundaries, self.step, self._num_backwards = num_boundaries, step, backwards
        if self._notes_times:
            self._note_step(now)
            if num_boundaries % _IDLE_SAMPLING == 0:
                self._rank_interval.note_idle(self._clock() - now)
        return True

    def rouse(self) -> None:
        """Have the next boundary look for work, as where the source holds a new config. Any thread may call it."""
        self._quiet_until = 0

    def _become_quiet(self) -> None:
        """Set up to which boundary ``pass_quietly`` has nothing to do but count.

        It is set before the look for work: another thread may call ``rouse`` in between.
        """
        rounds, next_agreement = self._rounds, self._pulsed_boundary + self.every
        has_agreements = self._ranks.world_size > 1 or rounds.has_file_to_announce
        self._quiet_until = next_agreement if has_agreements else math.inf
        has_question = self._save_wanted or self._copy_wanted or rounds.proposing or self._has_to_tell_of_leaving
        has_question |= self._stop_wanted and not self._stopping
        has_question |= self.held_members() > self._told_members
        if has_question or self._exchange.word is not None or rounds.scheduled is not None or rounds.has_new_file:
            self.rouse()

    def meet(self, purpose: Purpose, exchanges: int = 0, lost: int = 0) -> None:
        """Return once all ranks have come here for the same ``purpose`` with equal counts; else raise on all.

        Called at the end of an epoch or of training, and before a step is taken again or training goes back. Finishes
        the agreement under way. What was applied here, and a save that was asked for, are left to the next boundary to
        tell. ``exchanges`` and ``lost`` are counts of a step that is taken again: see ControlWord.
        """
        self._raise_if_unusable()
        with self._breaking():
            self.rouse()
            if self._exchange.word is not None:
                self._read_pulse()
            self._make_sure_of_the_same_place(purpose, _DOING.get(purpose, _RETRYING), exchanges, lost)
        if purpose is Purpose.FINISH and (self._save or self._save_wanted):
            _logger.warning("a checkpoint that was asked for is not saved: training has ended, and no boundary follows")

    def decide_proposals(self, purpose: Purpose) -> None:
        """Decide now on what any rank has proposed, between two steps; a config that comes into force is told later.

        That is at the next boundary. All ranks call this together, after ``meet``. A proposal that cannot be decided on
        before a step has run, or that comes after one that was refused, is decided on at a later boundary.
        """
        self._raise_if_unusable()
        with self._breaking():
            self.rouse()
            while True:
                word = replace(self._make_word(purpose), proposing=self._rounds.proposing)
                gathered = self._exchange.compare(word, _DOING[purpose])
                if gathered is None or not gathered.proposing:
                    return
                applied = self._rounds.hold_round(self._place)
                if applied is None:
                    return
                self._keep_applied(applied)

    def compare_words(self, failure: str, payload: str, purpose: Purpose = Purpose.SHARE) -> GatheredWords | None:
        """Compare what ranks say in a step: every rank's control word, or None where all say the same and none failed.

        All ranks call this together. What comes of it, on all ranks alike:

        - None: no rank failed, and every rank gave the same ``payload`` as this one.
        - Control words with ``failures``: on those ranks the step failed, in the words that they gave as ``failure``.
        - Control words without: no rank failed, and ranks gave unlike ``payload``.
        - RanksDisagreeError: ranks are at different places.

        With Purpose.SHARE it is called within a step, and ``payload`` says which parameters have a gradient; with
        Purpose.NOISE at a boundary, and ``payload`` is what the rank has measured of gradient noise.
        """
        self._raise_if_unusable()
        word = replace(self._make_word(purpose), failed=failure, brings=payload)
        with self._breaking():
            return self._exchange.compare(word, str(purpose))

    def revise(self, changes: Mapping[str, object], reason: str) -> str:
        """Put a revision in force now; gives the reason if it was refused, else an empty text.

        All ranks call this with the same changes, where a step is taken again, after ``meet``.
        """
        self._raise_if_unusable()
        with self._breaking():
            applied, refusal = self._rounds.revise(changes, reason, self.step)
        self._keep_applied(applied)
        return refusal

    def refuse_late_file(self) -> None:
        """Warn of a config file that ranks have not agreed on in this run; called at its end."""
        self._rounds.refuse_late_file(self.step)

    def close(self) -> None:
        """Give up the agreement under way: as long as it is held, its connections stay open and peers wait."""
        self._exchange.drop()
        self.rouse()

    @property
    def _starts_with_save(self) -> bool:
        """Whether to save at the first boundary: the config in force asks for that by ``checkpoint.now``, and is not
        the resumed one, for which the run before has saved."""
        config, base = self.config, self.base
        is_resumed = config.version == base.version and config.revision <= base.revision
        return config.checkpoint.now is True and not is_resumed

    @property
    def leaving(self) -> bool:
        """Whether some rank's process was told to end; the same on every rank, after each boundary and ``meet``."""
        return self._leaving

    @property
    def is_leave_wanted(self) -> bool:
        """Whether this process was told to end, or all ranks know that some process was."""
        return self._leave_wanted or self._leaving

    @property
    def _has_to_tell_of_leaving(self) -> bool:
        return self._leave_wanted and not self._leaving

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """A context for what all ranks do together: later calls that exchange anything raise an error of it again."""
        try:
            yield
        except RanksError as error:
            self._broken = error
            self.rouse()
            raise

    def _raise_if_unusable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._started:
            raise ElasticError("start() was not called; call it on every rank before the first step, or use `with`")

    def _work_at_boundary(self, now: float, *, is_agreement: bool) -> None:
        """Do what a boundary takes beyond counting: read a pulse, apply a scheduled config, begin a pulse."""
        if self._exchange.word is not None:
            self._read_pulse()
            self._rank_interval.note_pulse_read(self._clock() - now)
        if self._rounds.is_due(self.step):
            self._make_sure_of_the_same_place(Purpose.APPLY, "applying a scheduled config")
            self._keep_applied(self._rounds.apply_scheduled(self.step))
        if is_agreement:
            began = self._clock()
            self._start_pulse(began)
            self._rank_interval.note_pulse_started(self._clock() - began)

    @property
    def _place(self) -> RoundPlace:
        return RoundPlace(boundary=self._num_boundaries, step=self.step)

    def _keep_applied(self, applied: Applied | None) -> None:
        """Keep a config that came into force until ``boundary`` gives it to the caller.

        If several come into force between two boundaries and at the second, they are one change to the caller.
        ``changes`` has two then, if a step ran in between: one came into force after a boundary, as in ``meet`` at the
        end of an epoch, and one at the next.
        """
        if applied is None:
            return
        self._save |= applied.new.checkpoint.now is True
        self._applied = applied if self._applied is None else replace(applied, old=self._applied.old)
        same_step = self._changes.get(self._num_boundaries)
        self._changes[self._num_boundaries] = applied if same_step is None else replace(applied, old=same_step.old)

    def _start_pulse(self, now: float) -> None:
        """Begin to sum this rank's pulse, with what it has to ask and to tell in its control word."""
        rounds = self._rounds
        held_version, is_fresh = rounds.announce()
        self._pulsed_boundary = self._num_boundaries
        wanted, is_pacing = self._rank_interval.wanted_interval(self.every)
        members = max(self.held_members(), self._told_members)
        word = replace(
            self._make_word(Purpose.ROUTINE),
            held_version=held_version,
            wanted_interval=wanted,
            members=members,
            fresh=is_fresh or members > self._told_members,
            proposing=rounds.proposing,
            asks_for_lag=self._ranks.rank == 0 and self._lag.is_due(now),
            stop=self._stop_wanted and not self._stopping,
            save=self._save_wanted,
            leave=self._has_to_tell_of_leaving,
            copy=self._copy_wanted,
            pacing=is_pacing,
            refusal=self._source.refusal or "",
        )
        if self._ranks.world_size == 1 and not word.has_news:
            return  # nobody else is there to be told of nothing
        if word.save:
            self._save_wanted = False
        if word.copy:
            self._copy_wanted = False
        self._told_members = members
        self._exchange.start(word)

    def _read_pulse(self) -> None:
        """Finish the pulse under way, and do with all ranks what their control words ask for."""
        gathered = self._exchange.read()
        if gathered is None:
            return
        self._stopping |= gathered.stop
        self._leaving |= gathered.leave
        self._save |= gathered.save
        self._copy |= gathered.copy
        if gathered.lowest_members > self._known_members:
            self._members = self._known_members = gathered.lowest_members
        self.every = gathered.interval
        self._rank_interval.mark_sent()
        self._lag.note(gathered.lowest_held, gathered.highest_held, self._clock())
        if gathered.proposing or (gathered.fresh and gathered.lowest_held > self._rounds.newest_agreed.version):
            self._keep_applied(self._rounds.hold_round(self._place))
        elif gathered.asks_for_lag:
            self._name_laggards(gathered)

    def _make_sure_of_the_same_place(self, purpose: Purpose, doing: str, exchanges: int = 0, lost: int = 0) -> None:
        """Raise on all ranks unless all are at the same boundary with equal counts."""
        word = replace(self._make_word(purpose), exchanges=exchanges, lost=lost, leave=self._has_to_tell_of_leaving)
        gathered = self._exchange.compare(word, doing)
        if gathered is not None:
            self._leaving |= gathered.leave

    def _make_word(self, purpose: Purpose) -> ControlWord:
        """This rank's control word without news: the counts that ranks compare, and the config in force."""
        return ControlWord(
            purpose=purpose,
            boundary=self._num_boundaries,
            step=self.step,
            backwards=self._num_backwards,
            schedules=self.count_schedules(),
            ahead=self.count_ahead() if purpose in (Purpose.ROUTINE, Purpose.APPLY) else 0,
            in_force=self.config.digest,
            held_version=self.config.version,
            wanted_interval=self.every,
            members=self._told_members,
        )

    def _name_laggards(self, gathered: GatheredWords) -> None:
        """Have rank 0 warn of the ranks that lack a version which others hold."""
        self._lag.mark_named()
        behind = gathered.laggards(self._ranks.names)
        if self._ranks.rank == 0 and behind:
            version = gathered.highest_held
            _logger.warning("config version %d waits for %s; training goes on", version, "; ".join(behind))
