"""Agreement: one config in force on all ranks, changed by all of them at the same step boundary.

How a change travels: a rank that holds something new sends another pulse than the others; the pulses are summed while
the next step runs and read at the next boundary; a sum that is not as it should be has all ranks exchange their control
words (control_word.py); and when those say that there is something to decide, the ranks hold a round (rounds.py): one
rank's contents go to all, every applier on every rank checks them, and either all apply or none.

Words: a *boundary* lies between two steps; ``boundary()`` is called there on every rank. An *agreement* is one
pulse, begun at one boundary and read at the next; ``every`` boundaries lie between two agreements.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .appliers import Applied, Applier, Appliers
from .config import ElasticConfig
from .control_word import AgreedWord, ControlWord, Purpose
from .decide import Lag, Pace
from .errors import ElasticError, RanksError
from .roll_call import RollCall
from .rounds import ConfigSource, Proposal, Rounds

if TYPE_CHECKING:
    from .ranks import PendingSum, Ranks

__all__ = ["Agreement", "Boundary"]

_logger = logging.getLogger(__name__)

_NUM_MEASUREMENTS = 30
_RETELL = 1.25  # how much a wanted interval must change to be worth telling


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What all ranks know at one step boundary; the same on every rank."""

    step: int
    """How many steps lie behind."""
    config: ElasticConfig
    applied: Applied | None
    """The config that came into force here."""
    stop: bool
    """Some rank asked to stop; stays true from then on."""
    save: bool
    """Some rank, or a config, asked for a checkpoint; true at one boundary."""


class Agreement:
    """One rank's part in it. All ranks make the same calls in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        source: ConfigSource,
        base: ElasticConfig,
        *,
        every: int | Literal["auto"] = "auto",
        warns: bool = True,
        lag_warning_seconds: float = 30.0,
        timeout_seconds: float = 1800.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every != "auto" and (type(every) is not int or every < 1):
            raise ValueError(f'agree_every_steps is {every!r}; allowed: "auto" or an integer >= 1')
        self.every = 1 if every == "auto" else every
        self._fixed = every != "auto"
        self._ranks = ranks
        self._source = source
        self.appliers = Appliers(ranks)
        self._rounds = Rounds(ranks, source, self.appliers, base, warns=warns)
        self._roll_call = RollCall(ranks, timeout_seconds=timeout_seconds)
        self._lag = Lag(patience_seconds=lag_warning_seconds)
        self._pace = Pace(pulse_seconds=0.0)
        self._told_interval = self.every
        self._clock = clock
        self._passed_at: float | None = None
        self._spent_seconds = 0.0  # on the agreement under way
        self._word: ControlWord | None = None
        self._pulse: PendingSum | None = None
        self._stop_wanted = self._save_wanted = self._stopping = False
        self._resumed_version: int | None = None
        self._started = False
        self._broken: RanksError | None = None

    @property
    def config(self) -> ElasticConfig:
        """The config in force."""
        return self._rounds.config

    def add(self, applier: Applier) -> None:
        """Have ``applier`` check and apply its section, on this rank, from the next change on."""
        self.appliers.add(applier)

    def resume(self, config: ElasticConfig) -> None:
        """Take the config in force of a checkpoint, before ``start``: it wins over the script's start-up values."""
        if self._started:
            raise ElasticError("a config can be resumed only before start(); load the checkpoint first")
        self._rounds.resume(config)
        self._resumed_version = config.version

    def start(self, *, step: int) -> Applied | None:
        """Agree on the start-up config and put the file found now, if every rank finds one, over it."""
        self._started = True
        self._roll_call.begin(step)
        with _Remembering(self):
            if not self._fixed:
                self._pace = Pace(pulse_seconds=self._measure_pulse())
            applied = self._rounds.start(step)
        if applied is not None and applied.new.checkpoint.now and applied.new.version != self._resumed_version:
            self.request_save()
        return applied

    def propose(self, changes: Mapping[str, object], reason: str) -> Proposal:
        """Ask for a revision of the config in force: dotted keys and their new values.

        May be called on one rank or on all. ConfigError says at once what can never be allowed.
        """
        return self._rounds.propose(changes, reason)

    def request_stop(self) -> None:
        """Have ``stop`` be true on all ranks, within two agreements. Any rank may call it."""
        self._stop_wanted = True

    def request_save(self) -> None:
        """Have ``save`` be true on all ranks at one boundary, within two agreements. Any rank may call it."""
        self._save_wanted = True

    def boundary(self, *, step: int, backwards: int = 0) -> Boundary:
        """Pass a step boundary: learn what was agreed, apply what is due, say what is new here."""
        self._raise_if_unusable()
        now = self._clock()
        if self._passed_at is not None:
            self._pace.note_step(now - self._passed_at)
        self._passed_at = now
        passed = self._roll_call.pass_boundary(step, backwards)
        self._rounds.warn_of_stale_file()
        applied, save = None, False
        if self._pulse is not None:
            with _Remembering(self):
                applied, save = self._read_pulse(step)
            self._spent_seconds += self._clock() - now
        scheduled = self._rounds.scheduled
        if scheduled is not None and scheduled.apply_at_step is not None and step >= scheduled.apply_at_step:
            with _Remembering(self):
                self._make_sure_of_the_same_boundary()
                applied = self._rounds.apply_scheduled(step) or applied
        if passed == 1 or passed - self._roll_call.awaited_boundary >= self.every:
            began = self._clock()
            with _Remembering(self):
                self._start_pulse(began)
            self._pace.note_agreement(self._spent_seconds + self._clock() - began)
            self._spent_seconds = 0.0
        save |= applied is not None and applied.new.checkpoint.now is True
        return Boundary(step=step, config=self.config, applied=applied, stop=self._stopping, save=save)

    def end(self) -> None:
        """Make sure that every rank came to this end (of an epoch, or of training) with the same counts."""
        self._raise_if_unusable()
        with _Remembering(self):
            self._roll_call.end()

    def finish(self) -> None:
        """Come to the end of training: as ``end``, and wait for what is under way."""
        self.end()
        if self._pulse is not None:
            self._pulse.result()
            self._pulse = None

    def remember(self, error: RanksError) -> None:
        """Raise ``error`` at every later call: after it, ranks may differ."""
        self._broken = error

    def _raise_if_unusable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._started:
            raise ElasticError("start() was not called; call it on every rank before the first step, or use `with`")

    def _read_pulse(self, step: int) -> tuple[Applied | None, bool]:
        """Read the pulse under way; gives what was applied, and whether to save."""
        assert self._word is not None
        assert self._pulse is not None
        word, pulse = self._word, self._pulse
        self._word = self._pulse = None
        agreed = self._exchange_unless_alike(word, pulse.result())
        if agreed is None:
            return None, False
        self._stopping |= agreed.stop
        self.every = agreed.interval
        self._told_interval = word.wanted_interval
        self._lag.note(agreed.lowest_held, agreed.highest_held, self._clock())
        applied = None
        if agreed.proposing or (agreed.fresh and agreed.lowest_held > self.config.version):
            applied = self._rounds.hold(step)
        elif agreed.asking:
            self._name_laggards(agreed)
        return applied, agreed.save

    def _exchange_unless_alike(self, word: ControlWord, pulses: list[int]) -> AgreedWord | None:
        """Every rank's word, or None where all pulses say that there is no need. Raises if ranks have come apart."""
        alike = pulses == [word.pulse * self._ranks.world_size]
        if alike and not word.has_news:
            return None
        words = self._ranks.gather(word.to_bytes(), "agreeing")
        agreed = AgreedWord.of([ControlWord.from_bytes(data) for data in words])
        if agreed.differing:
            raise self._roll_call.apart(agreed)
        return agreed

    def _start_pulse(self, now: float) -> None:
        rounds = self._rounds
        self._roll_call.awaited_boundary = self._roll_call.num_boundaries
        wanted = self.every if self._fixed else self._pace.interval()
        word = self._make_word(
            Purpose.ROUTINE,
            held_version=rounds.held_version,
            wanted_interval=wanted,
            fresh=rounds.fresh,
            proposing=rounds.proposing,
            asking=self._ranks.rank == 0 and self._lag.is_due(now),
            stop=self._stop_wanted and not self._stopping,
            save=self._save_wanted,
            pacing=not self._told_interval / _RETELL <= wanted <= self._told_interval * _RETELL,
            refusal=self._source.refusal or "",
        )
        if self._ranks.world_size == 1 and not word.has_news:
            return  # nobody else is there to be told of nothing
        if word.has_news:
            self._save_wanted = False
            rounds.mark_told()
        self._word = word
        self._pulse = self._ranks.start_sum([word.pulse], "agreeing")

    def _make_sure_of_the_same_boundary(self) -> None:
        """Raise on all ranks unless all are here. A rank that is elsewhere pairs its routine pulse with this one."""
        word = self._make_word(Purpose.APPLY, held_version=self.config.version, wanted_interval=self.every)
        self._exchange_unless_alike(word, self._ranks.sum([word.pulse], "applying a scheduled config"))

    def _make_word(self, purpose: Purpose, **news: Any) -> ControlWord:
        counts = self._roll_call.counts
        return ControlWord(
            purpose=purpose,
            boundary=counts.boundary,
            step=counts.step,
            backwards=counts.backwards,
            in_force=self.config.digest,
            **news,
        )

    def _name_laggards(self, agreed: AgreedWord) -> None:
        """Have rank 0 warn of the ranks that lack a version which others hold."""
        self._lag.named = newest = agreed.highest_held
        behind = [
            f"{peer} has version {word.held_version}" + (f" ({word.refusal})" if word.refusal else "")
            for peer, word in zip(self._ranks.names, agreed.words, strict=True)
            if word.held_version < newest
        ]
        if self._ranks.rank == 0 and behind:
            _logger.warning("version %d waits for %s; training goes on", newest, "; ".join(behind))

    def _measure_pulse(self) -> float:
        """The CPU seconds that one pulse takes in all of this process's threads; the largest over the ranks."""
        if self._ranks.world_size == 1:
            return 0.0
        doing = "measuring an agreement"
        nanoseconds = []
        for _ in range(_NUM_MEASUREMENTS):
            began = time.process_time_ns()
            self._ranks.sum([0], doing)
            nanoseconds.append(time.process_time_ns() - began)
        mine = sorted(nanoseconds)[_NUM_MEASUREMENTS // 2]
        return max(int(data) for data in self._ranks.gather(str(mine).encode(), doing)) / 1e9


class _Remembering:
    """Keeps an error of the ranks, so that nobody goes on after it by accident."""

    __slots__ = ("_agreement",)

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RanksError):
            self._agreement.remember(error)
