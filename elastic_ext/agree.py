"""Agreement: one config in force on all ranks, changed by all of them at the same step boundary.

How a change travels: a rank's control word says that it holds something new; the words are reduced while the next
step runs and read at the next boundary; when they say that there is something to decide, the ranks hold a round
(rounds.py): one rank's contents go to all, every applier on every rank checks them, and either all apply or none.

Words: a *boundary* lies between two steps; ``boundary()`` is called there on every rank. An *agreement* is one
control word, begun at one boundary and read at the next; ``every`` boundaries lie between two agreements.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .appliers import Applied, Applier, Appliers
from .config import ElasticConfig
from .control_word import AgreedWord, ControlWord, Purpose
from .decide import Lag, Pace
from .errors import ElasticError, RanksError
from .roll_call import RollCall
from .rounds import ConfigSource, Proposal, Rounds

if TYPE_CHECKING:
    from .ranks import PendingMax, Ranks

__all__ = ["Agreement", "Boundary"]

_logger = logging.getLogger(__name__)

_NUM_MEASUREMENTS = 30


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
        self._pace = Pace(cost_seconds=0.0)
        self._clock = clock
        self._passed_at: float | None = None
        self._word: PendingMax | None = None
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
                self._pace = Pace(cost_seconds=self._measure_cost())
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
            self._pace.note(now - self._passed_at)
        self._passed_at = now
        passed = self._roll_call.pass_boundary(step, backwards)
        self._rounds.warn_of_stale_file()
        applied, save = None, False
        if self._word is not None:
            with _Remembering(self):
                applied, save = self._read_word(step)
        scheduled = self._rounds.scheduled
        if scheduled is not None and scheduled.apply_at_step is not None and step >= scheduled.apply_at_step:
            with _Remembering(self):
                self._make_sure_of_the_same_boundary()
                applied = self._rounds.apply_scheduled(step) or applied
        if passed == 1 or passed - self._roll_call.awaited_boundary >= self.every:
            with _Remembering(self):
                self._start_word(now)
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
        if self._word is not None:
            self._word.result()
            self._word = None

    def remember(self, error: RanksError) -> None:
        """Raise ``error`` at every later call: after it, ranks may differ."""
        self._broken = error

    def _raise_if_unusable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._started:
            raise ElasticError("start() was not called; call it on every rank before the first step, or use `with`")

    def _read_word(self, step: int) -> tuple[Applied | None, bool]:
        """Read the word under way and do what it asks for; gives what was applied, and whether to save."""
        assert self._word is not None
        agreed = AgreedWord.from_integers(self._word.result())
        self._word = None
        if agreed.differing:
            raise self._roll_call.apart(agreed.differing)
        self._stopping |= agreed.stop
        self.every = agreed.interval
        self._lag.note(agreed.lowest_held, agreed.highest_held, self._clock())
        applied = None
        if agreed.proposing or (agreed.fresh and agreed.lowest_held > self.config.version):
            applied = self._rounds.hold(step)
        elif agreed.asking:
            self._name_laggards()
        return applied, agreed.save

    def _start_word(self, now: float) -> None:
        rounds = self._rounds
        self._roll_call.awaited_boundary = self._roll_call.num_boundaries
        if self._ranks.world_size == 1 and not (
            rounds.fresh or rounds.proposing or self._stop_wanted or self._save_wanted
        ):
            return  # nobody else is there to be told of nothing
        word = self._make_word(
            Purpose.ROUTINE,
            held_version=rounds.held_version,
            fresh=rounds.fresh,
            asking=self._ranks.rank == 0 and self._lag.is_due(now),
            wanted_interval=self.every if self._fixed else self._pace.interval(),
        )
        self._word = self._ranks.start_max(word.to_integers(), "agreeing")
        self._save_wanted = False

    def _make_sure_of_the_same_boundary(self) -> None:
        """Raise on all ranks unless all are here. A rank that is elsewhere pairs its routine word with this one."""
        word = self._make_word(Purpose.APPLY, held_version=0, fresh=False, asking=False, wanted_interval=1)
        agreed = AgreedWord.from_integers(self._ranks.max(word.to_integers(), "applying a scheduled config"))
        if agreed.differing:
            raise self._roll_call.apart(agreed.differing)

    def _make_word(
        self, purpose: Purpose, *, held_version: int, fresh: bool, asking: bool, wanted_interval: int
    ) -> ControlWord:
        counts = self._roll_call.counts
        return ControlWord(
            purpose=purpose,
            boundary=counts.boundary,
            step=counts.step,
            backwards=counts.backwards,
            in_force=int(self.config.digest[:15], 16),
            held_version=held_version,
            fresh=fresh,
            proposing=self._rounds.proposing,
            asking=asking,
            stop=self._stop_wanted,
            save=self._save_wanted,
            wanted_interval=wanted_interval,
        )

    def _name_laggards(self) -> None:
        """Have rank 0 warn of the ranks that lack a version which others hold."""
        mine = {"version": self._rounds.held_version, "refusal": self._source.refusal}
        gathered = self._ranks.gather(json.dumps(mine).encode(), "finding who lacks a config")
        answers = [json.loads(data) for data in gathered]
        newest = max(answer["version"] for answer in answers)
        self._lag.named = newest
        behind = [
            f"{peer} has version {answer['version']}" + (f" ({answer['refusal']})" if answer["refusal"] else "")
            for peer, answer in zip(self._ranks.names, answers, strict=True)
            if answer["version"] < newest
        ]
        if self._ranks.rank == 0 and behind:
            _logger.warning("version %d waits for %s; training goes on", newest, "; ".join(behind))

    def _measure_cost(self) -> float:
        """The seconds that one agreement takes, the largest over the ranks."""
        if self._ranks.world_size == 1:
            return 0.0
        word = self._make_word(Purpose.APPLY, held_version=0, fresh=False, asking=False, wanted_interval=1)
        nanoseconds = []
        for _ in range(_NUM_MEASUREMENTS):
            began = time.perf_counter_ns()
            self._ranks.max(word.to_integers(), "measuring an agreement")
            nanoseconds.append(time.perf_counter_ns() - began)
        (largest,) = self._ranks.max([sorted(nanoseconds)[_NUM_MEASUREMENTS // 2]], "measuring an agreement")
        return largest / 1e9


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
