"""How a config comes into force: the round in which all ranks take the next version, and the appliers that check it and
put it into effect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from elastic_ext.errors import ApplyError, ConfigError, RanksDisagreeError, RanksFailedError
from elastic_ext.ranks.heartbeat import Activity, Heartbeat
from elastic_ext.records.json import shown

from .control_word import RankReport, RoundDecision, RoundPlace, choose
from .elastic_config import ElasticConfig
from .keys import SECTIONS, Value, section_of, unquoted

if TYPE_CHECKING:
    from elastic_ext.ranks.group import Ranks

__all__ = [
    "Applied",
    "Applier",
    "Appliers",
    "AskAgainLater",
    "ConfigRounds",
    "ConfigSource",
    "Declined",
    "FunctionApplier",
    "NoSource",
    "Proposal",
]

_logger = logging.getLogger(__name__)


# --- what puts sections of a config into effect, asked and called on every rank alike --------------------------------
# Whose config comes next is decided by ConfigRounds, below; here all ranks check it, and all apply it or none.

_MOST_TRACEBACK = 20_000
_NOT_YET = "it cannot be checked before another step has run"


class Declined(Exception):
    """Raised by an applier's ``apply`` on all ranks, before it has changed anything: the old config stays in force.

    Only the first applier that a change concerns may raise it; from a later one it is an error that ends the run.
    """


class AskAgainLater(Exception):
    """Raised by an applier's ``check`` that has to see a step run first: ranks ask again after it, or refuse."""


class Applier(Protocol):
    """What puts one section of a config into effect on this rank."""

    @property
    def section(self) -> str:
        """The section of the config that this applier puts into effect, one of config.keys.SECTIONS."""

    def check(self, new: ElasticConfig) -> str | None:
        """Why ``new`` cannot be applied on this rank; None where it can. Changes nothing.

        Called on every rank for each new config, whichever sections it changes.
        """

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Put the section of ``new`` into effect. Called on every rank, when the section differs from ``old``.

        An exception here ends the run on all ranks, except Declined from the first applier that a change concerns.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionApplier:
    """An applier made of two functions; without ``checking`` it refuses nothing."""

    section: str
    checking: Callable[[ElasticConfig], str | None] | None
    applying: Callable[[ElasticConfig, ElasticConfig], None]

    def check(self, new: ElasticConfig) -> str | None:
        return None if self.checking is None else self.checking(new)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        self.applying(old, new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A config that came into force, with the one that it replaced."""

    old: ElasticConfig
    new: ElasticConfig
    step: int
    """The first step that runs under the new config."""
    effects: Mapping[str, str] = field(default_factory=dict)
    """By dotted key, what its new value leads to on this rank, in words for the log, where the value alone does not
    tell."""
    own_values: Mapping[str, Value] = field(default_factory=dict)
    """The script's own values of keys that may be absent from both configs, by dotted key."""

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """Each dotted key that the new config changes: its value before and after."""
        return self.old.differences(self.new)

    @property
    def values_used(self) -> dict[str, tuple[Value, Value]]:
        """The ``changes``, with the script's own value, where it is known, of a key that a config leaves to it."""
        own = self.own_values
        return {
            path: (own.get(path) if old is None else old, own.get(path) if new is None else new)
            for path, (old, new) in self.changes.items()
        }

    def __str__(self) -> str:
        effects = {path: f" ({words})" for path, words in self.effects.items()}
        changes = ", ".join(
            f"{path} {_value(old)} -> {_value(new)}{effects.get(path, '')}"
            for path, (old, new) in self.values_used.items()
        )
        reason = f" ({unquoted(self.new.reason, 200)})" if self.new.reason else ""
        since = f"step {self.step}" if self.step else "the start"  # a checkpoint that is loaded next may set the step
        return f"{self.new.label} in force from {since}: {changes or 'nothing differs'}{reason}"


class Appliers:
    """One rank's appliers; ``check`` and ``apply`` are called by all ranks together.

    An applier whose attribute ``only_checks`` is true may refuse a config, and its ``apply`` is not called.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._appliers: list[Applier] = []
        self.heartbeat = Heartbeat()
        """The heartbeat in which this rank notes that it checks or applies a config."""
        self.effects: Callable[[], Mapping[str, str]] = dict
        """Gives, after a config was applied, the ``effects`` of Applied."""
        self.own_values: Mapping[str, Value] = {}
        """The script's own values of keys that its start-up config leaves out, as far as they are known."""
        self.defaults: Callable[[], Mapping[str, Value]] = dict
        """Gives the values that the script has so far read keys with where no config sets them."""

    def add(self, applier: Applier) -> None:
        """Have ``applier`` check and apply its section from the next change on."""
        if applier.section not in SECTIONS:
            raise ValueError(f"section is {applier.section!r}; allowed: one of {', '.join(SECTIONS)}")
        self._appliers.append(applier)

    @property
    def sections(self) -> frozenset[str]:
        """The sections that an applier of this rank puts into effect."""
        return frozenset(each.section for each in self._applying)

    @property
    def _applying(self) -> list[Applier]:
        return [each for each in self._appliers if not getattr(each, "only_checks", False)]

    def check(self, new: ElasticConfig, *, may_wait: bool = True) -> dict[int, list[str]]:
        """Every rank's reasons against the config ``new``, by rank; an applier that raises is an error on all ranks.

        All raise AskAgainLater where one does and none has a reason; without ``may_wait`` that is a reason itself.
        """
        with self.heartbeat.during(Activity.CHANGING):
            return self._check(new, may_wait=may_wait)

    def _check(self, new: ElasticConfig, *, may_wait: bool) -> dict[int, list[str]]:
        reasons: list[str] = []
        failure: Exception | None = None
        is_later = False
        try:
            for applier in self._appliers:
                try:
                    reason = applier.check(new)
                except AskAgainLater:
                    is_later |= may_wait
                    reason = None if may_wait else _NOT_YET
                if reason is not None:
                    reasons.append(f"{applier.section}: {reason}")
        except Exception as error:  # whatever an applier raises, every rank must hear of it
            failure = error
        doing = f"checking config {new.label}"
        return self._reasons_of_all(reasons, failure, doing, RanksFailedError, is_later=is_later)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> dict[int, list[str]]:
        """Apply the sections that differ, in the order of config.SECTIONS; gives every rank's reasons if declined.

        If one rank fails, all raise ApplyError.
        """
        with self.heartbeat.during(Activity.CHANGING):
            return self._apply(old, new)

    def apply_here(self, old: ElasticConfig, new: ElasticConfig, *, leaves_out: Collection[str]) -> None:
        """Apply the sections that differ, but for those to leave out, on a rank that joins others that have done so."""
        changed = {section_of(path) for path in old.differences(new)} - {*leaves_out}
        for applier in [each for section in SECTIONS for each in self._appliers if section == each.section in changed]:
            applier.apply(old, new)

    def _apply(self, old: ElasticConfig, new: ElasticConfig) -> dict[int, list[str]]:
        changed = {section_of(path) for path in old.differences(new)}
        concerned = [each for section in SECTIONS for each in self._applying if section == each.section in changed]
        reasons: list[str] = []
        num_applied, failure = 0, None
        try:
            for applier in concerned:
                applier.apply(old, new)
                num_applied += 1
        except Exception as error:  # whatever an applier raises, every rank must hear of it
            if isinstance(error, Declined) and num_applied == 0:
                reasons.append(f"{applier.section}: {error}")
            else:
                failure = error
        return self._reasons_of_all(reasons, failure, f"applying config {new.label}", ApplyError)

    def _reasons_of_all(
        self,
        reasons: list[str],
        failure: Exception | None,
        doing: str,
        kind: type[RanksFailedError],
        *,
        is_later: bool = False,
    ) -> dict[int, list[str]]:
        """Every rank's reasons, by rank; raises on all ranks where one failed, or has to be asked later."""
        trace = "" if failure is None else "".join(traceback.format_exception(failure))[-_MOST_TRACEBACK:]
        answer = json.dumps({"reasons": reasons, "traceback": trace, "is_later": is_later}).encode()
        answers = [json.loads(data) for data in self._ranks.gather(answer, doing)]
        failed = {rank: answer["traceback"] for rank, answer in enumerate(answers) if answer["traceback"]}
        if failed:  # the message has the traceback
            raise kind(doing, self._ranks.world_size, failed) from failure and failure.with_traceback(None)
        found = {rank: answer["reasons"] for rank, answer in enumerate(answers) if answer["reasons"]}
        if not found and any(answer["is_later"] for answer in answers):
            raise AskAgainLater
        return found


# --- which config is in force, which are waiting, and the exchange in which all ranks take the next one --------------
# When a round is held is decided by the control word (agreement.py); here is what happens in one.
#
# Words: the *base* is what absent keys mean: the start-up config, with a resumed one over it. A *file* is a config that
# the source holds. It is *settled* when no further round needs to hear of it: it is in force, scheduled or refused. A
# set of files holds their keys, (version, digest).


class ConfigSource(Protocol):
    """Where a rank finds newer configs, such as a ConfigWatcher."""

    @property
    def newest(self) -> ElasticConfig | None:
        """The newest valid config that was found, always the same object until there is another; None before one."""

    @property
    def refusal(self) -> str | None:
        """Why the source has no newer config, where a file was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoSource:
    """A config source that never has a config."""

    newest: None = None
    refusal: None = None


@dataclass(slots=True)
class Proposal:
    """A change made inside the job, on its way to a revision."""

    changes: Mapping[str, object]
    reason: str
    outcome: Literal["pending", "in force", "refused"] = "pending"
    """Whether the change is undecided, in force or refused; look again after later boundaries."""
    refusal: str = ""
    """Why the change was refused; empty where it was not."""


class ConfigRounds:
    """The config in force on this rank, and the rounds in which all ranks take the next one together.

    All ranks hold the same rounds in the same order. A rank that ``warns`` does so of a stale file.
    """

    def __init__(
        self, ranks: Ranks, source: ConfigSource, appliers: Appliers, base: ElasticConfig, *, warns: bool
    ) -> None:
        self.config = self._own = base  # the script's own start-up config
        self.scheduled: ElasticConfig | None = None
        """The config that all ranks agreed on and that comes into force at its ``apply_at_step``; None without one.

        A file found at the start that an applier can check only after a step has run (AskAgainLater) is scheduled too:
        for the next boundary, or for its ``apply_at_step`` if that is later. It is checked there.
        """
        self._ranks = ranks
        self._source = source
        self._appliers = appliers
        self.base = base
        """The start-up config, with a resumed one over it: what absent keys of a file mean."""
        self.startup = base
        """The start-up config of the script alone."""
        self._saved: ElasticConfig | None = None  # the resumed config as the checkpoint has it
        self._saved_files: Collection[str] = ()  # the digests of files of its version that the job had seen
        self.warns = warns
        """Whether this rank is the one to warn of a stale file."""
        self._proposals: deque[Proposal] = deque()
        self._settled: set[tuple[int, str]] = set()
        self._announced: tuple[int, str] | None = None  # the newer file that the other ranks last heard of
        self._warned_stale: set[tuple[int, str]] = set()  # files whose version is too low, that were warned of
        self._warned_conflict = ""  # what the last round said of files that contradict each other
        self._looked_at: ElasticConfig | None = None  # the newest of the source when last looked for a stale file
        self._is_started = False
        self.on_refusal: Callable[[int, str, str], None] | None = None
        """Called on rank 0 with each version of the file that ranks refused together, its file's digest, and why.

        Also, with an empty digest, for a version that came too late for this run. Not for files that are invalid, stale
        or in conflict: those are only logged.
        """

    def resume(
        self, config: ElasticConfig, saved: ElasticConfig | None = None, saved_files: Collection[str] = ()
    ) -> None:
        """Take the config that was in force in a checkpoint: it wins over the script's start-up values.

        Appliers put it into effect in ``start``, or in ``start_again`` where the job has started. ``saved`` is that
        config before the caller put values of its own into it, and ``saved_files`` what ``files`` gave as it was saved:
        if it is a revision of the file's version, the file does not bring back values that the revision has superseded.
        """
        self.base = config.over(self.base)
        self._saved, self._saved_files = config if saved is None else saved, saved_files
        if not self._is_started:
            self.config = self.base

    def tell(self) -> dict[str, Any]:
        """The configs that are in force here, and what they lie over, as JSON for ranks that join."""
        scheduled = None if self.scheduled is None else self.scheduled.to_dict()
        return {
            "config": self.config.to_dict(),
            "revision": self.config.revision,
            "base": self.base.to_dict(),
            "base_revision": self.base.revision,
            "scheduled": scheduled,
            "settled": sorted(self._settled),
            "warned_conflict": self._warned_conflict,
        }

    def join(self, told: Mapping[str, Any], *, leaves_out: Collection[str]) -> ElasticConfig:
        """Take over the configs of the ranks that this one joins; gives the one in force.

        Appliers put it in force here, but for sections that this rank takes over otherwise.
        """
        config = ElasticConfig.from_dict(told["config"], revision=told["revision"])
        self.base = ElasticConfig.from_dict(told["base"], revision=told["base_revision"])
        self._appliers.apply_here(self.config, config, leaves_out=leaves_out)
        self.config, self._announced = config, None
        self.scheduled = None if told["scheduled"] is None else ElasticConfig.from_dict(told["scheduled"])
        self._settled = {(version, digest) for version, digest in told["settled"]}
        self._warned_conflict = told["warned_conflict"]
        self._proposals.clear()
        return config

    @property
    def files(self) -> list[str]:
        """The digests of the files that the job has seen with the version in force; empty where it has seen none."""
        return sorted(digest for version, digest in self._settled if version == self.config.version)

    @property
    def startup_values(self) -> dict[str, object]:
        """The start-up values that must be the same on all ranks, by dotted key."""
        return {**self.base.values(), "version": self.base.version, "revision": self.base.revision}

    def start(self, place: RoundPlace) -> Applied | None:
        """Put the file that is found at the start in force, whatever its version, if every rank finds it.

        It is scheduled instead if its ``apply_at_step`` is to come, or if an applier can check it only after a step.
        A config that was resumed before is put in force too, as ``start_again`` does.
        """
        self._is_started = True
        if self.base is not self._own:
            self.config = self._own  # from which appliers change to what was resumed
            return self.start_again(place)
        return self._hold_round_with(self._unsettled_file(), place, at_start=True)

    def start_again(self, place: RoundPlace) -> Applied | None:
        """Put the resumed config in force, at the start or after it, with the config file over it.

        The file is left out where there is none or it is refused. Both come into force in one change, since a change
        may take long. Gives what came into force, None where that was in force since the start.
        """
        before = self.config
        self._settled.clear()
        self.scheduled = None
        choice, content = self._choose(self._unsettled_file(), place)
        applied = None
        if choice.kind == "file":
            applied = self._consider_file(_file_in(content), place.step, at_start=True, otherwise=self.base)
        if applied is None:
            applied, reasons = self._put_in_force(self.base, place.step, may_wait=False)
            self._log_refusal(f"the resumed config {self.base.label}", _in_words(reasons))
        if choice.kind == "revision":
            with contextlib.suppress(AskAgainLater):  # the proposal comes again with the next agreement
                applied = self._consider_proposal(RankReport.from_bytes(content), place.step) or applied
        return None if self.config.digest == before.digest else applied

    def propose(self, changes: Mapping[str, object], reason: str) -> Proposal:
        """Ask for a revision of the config in force; ConfigError says at once what that does not allow."""
        self.config.revise(changes, reason)
        proposal = Proposal(changes=dict(changes), reason=reason)
        self._proposals.append(proposal)
        return proposal

    @property
    def proposing(self) -> bool:
        """Whether a change that this rank proposed is undecided."""
        return bool(self._proposals)

    def announce(self) -> tuple[int, bool]:
        """The version to send to the other ranks as what this rank could put in force, and whether it is news to them.

        From here on it counts as announced. Without anything new it is the newest version that was agreed on. What the
        source holds is read once: another thread may replace it at any time.
        """
        newer = self._newer_file()
        key = None if newer is None else _key(newer)
        is_fresh = key is not None and key != self._announced
        self._announced = key
        return (self.newest_agreed if newer is None else newer).version, is_fresh

    def tell_again(self) -> None:
        """Take a newer config of the source for news again, as ranks have gone apart that may have heard of it."""
        self._announced = None

    @property
    def has_file_to_announce(self) -> bool:
        """Whether the source holds a newer file that the next agreement has to announce."""
        newer = self._newer_file()
        return newer is not None and _key(newer) != self._announced

    def hold_round(self, place: RoundPlace) -> Applied | None:
        """Hold a round with all ranks and put in force what they agree on; raise unless all are at the same place."""
        return self._hold_round_with(self._newer_file(), place, at_start=False)

    def is_due(self, step: int) -> bool:
        """Whether the scheduled config comes into force at ``step``."""
        if self.scheduled is None:
            return False
        at_step = self.scheduled.apply_at_step
        return at_step is None or step >= at_step

    def apply_scheduled(self, step: int) -> Applied | None:
        """Put the scheduled config in force."""
        new, self.scheduled = self.scheduled, None
        assert new is not None
        try:
            applied, reasons = self._put_in_force(new, step)
        except AskAgainLater:
            self.scheduled = new  # and due at the next boundary
            return None
        self._tell_refusal(new, _in_words(reasons))
        return applied

    @property
    def has_new_file(self) -> bool:
        """Whether the source holds another file than when it was last looked at."""
        return self._source.newest is not self._looked_at

    def warn_of_stale_file(self) -> None:
        """Warn, once per content, of a file whose version is not above the newest that all ranks agreed on."""
        newest = self._source.newest
        if newest is self._looked_at:
            return
        self._looked_at = newest
        agreed = self.newest_agreed
        if newest is None or newest.version > agreed.version or _key(newest) in self._settled | self._warned_stale:
            return
        self._warned_stale.add(_key(newest))
        _logger.log(
            logging.WARNING if self.warns else logging.DEBUG,
            "the config file holds version %d and was refused, since version %d is %s; give it a version of %d or more",
            newest.version,
            agreed.version,
            "in force" if agreed is self.config else _when(agreed),
            agreed.version + 1,
        )

    def refuse_late_file(self, step: int) -> None:
        """Warn of a config file that is not applied in this run: ranks had not agreed on it, or it is an old one."""
        self.warn_of_stale_file()
        late = self._newer_file()
        if late is not None:
            self._settled.add(_key(late))
            words = f"training ended, at step {step}, before all ranks had agreed on it; the next run begins with it"
            self._tell_refusal(late, words, is_late=True)

    @property
    def newest_agreed(self) -> ElasticConfig:
        """The config that all ranks agreed on last: the scheduled one, else that in force."""
        return self.config if self.scheduled is None else self.scheduled

    def _unsettled_file(self) -> ElasticConfig | None:
        newest = self._source.newest
        return None if newest is None or _key(newest) in self._settled else newest

    def _newer_file(self) -> ElasticConfig | None:
        file = self._unsettled_file()
        return None if file is None or file.version <= self.newest_agreed.version else file

    def _hold_round_with(self, file: ElasticConfig | None, place: RoundPlace, *, at_start: bool) -> Applied | None:
        choice, content = self._choose(file, place)
        try:
            if choice.kind == "file":
                return self._consider_file(_file_in(content), place.step, at_start=at_start)
            if choice.kind == "revision":
                return self._consider_proposal(RankReport.from_bytes(content), place.step)
        except AskAgainLater:  # the file or the proposal comes again with the next agreement
            if choice.kind == "file":
                self._settled.discard(_key(_file_in(content)))
                self._announced = None
        return None

    def _choose(self, file: ElasticConfig | None, place: RoundPlace) -> tuple[RoundDecision, bytes]:
        """The file or the revision that all ranks take next from what each of them brings, and its content."""
        proposal = self._proposals[0] if self._proposals else None
        report = RankReport(
            place=place,
            version=None if file is None else file.version,
            digest="" if file is None else file.digest,
            changes=None if proposal is None else proposal.changes,
            reason="" if proposal is None else proposal.reason,
        )
        doing = "exchanging configs"
        reports = [RankReport.from_bytes(data) for data in self._ranks.gather(report.to_bytes(), doing)]
        if any(each.place != place for each in reports):
            places = "; ".join(f"rank {rank}: {each.place}" for rank, each in enumerate(reports))
            raise RanksDisagreeError(f"ranks are at different places: {places}; make the same calls on every rank")
        choice = choose(reports)
        self._announced = None if file is None else _key(file)
        if choice.conflict and choice.conflict != self._warned_conflict:
            self._log_refusal("a config file", choice.conflict)
        self._warned_conflict = choice.conflict
        if choice.kind == "nothing":
            return choice, b""
        content = report.to_bytes()
        if choice.kind == "file" and file is not None:
            content = json.dumps(file.to_dict()).encode()
        mine = content if self._ranks.rank == choice.source else b""
        return choice, self._ranks.broadcast(mine, choice.source, doing)

    def _consider_file(
        self, file: ElasticConfig, step: int, *, at_start: bool, otherwise: ElasticConfig | None = None
    ) -> Applied | None:
        """Put a file in force, schedule it, or refuse it with a warning; gives what came into force, if anything.

        ``otherwise`` is what the caller puts in force if the file is refused; None: the config in force stays.
        """
        self._settled.add(_key(file))
        if file.apply_at_step is not None and file.apply_at_step < step and not at_start:
            advice = "give a later step or leave it out"
            passed = f"apply_at_step {file.apply_at_step} has passed, this is step {step}; {advice}"
            self._tell_refusal(file, passed, otherwise)
            return None
        try:
            new = self._over_base(file, at_start=at_start)
        except ConfigError as error:
            self._tell_refusal(file, f"combined with the script's start-up values: {error}", otherwise)
            return None
        displaced = self.scheduled
        applied: Applied | None = None
        try:
            if new.apply_at_step is None or new.apply_at_step <= step:
                applied, reasons = self._put_in_force(new, step)
                self.scheduled = None if applied is not None else displaced
            else:
                reasons = self._appliers.check(new)
                self.scheduled = displaced if reasons else new
                if not reasons and self._ranks.rank == 0:
                    _logger.info("config %s is agreed and comes into force at step %d", new.label, new.apply_at_step)
        except AskAgainLater:
            if not at_start:
                raise
            self.scheduled = new  # by the next agreement its version or its step may count as too low
            return None
        if displaced is not None and self.scheduled is not displaced and self._ranks.rank == 0:
            _logger.info("config %s, %s, is replaced by %s", displaced.label, _when(displaced), new.label)
        self._tell_refusal(file, _in_words(reasons), otherwise)
        return applied

    def _over_base(self, file: ElasticConfig, *, at_start: bool) -> ElasticConfig:
        """A file with its absent keys taken from the base; at the start without what a resumed revision superseded."""
        saved, seen = self._saved, self._saved_files
        is_revised = saved is not None and saved.revision > 0 and saved.version == file.version
        if at_start and saved is not None and is_revised and (not seen or file.digest in seen):
            file = _superseded(file, saved)
        return file.over(self.base)

    def revise(
        self, changes: Mapping[str, object], reason: str, step: int, *, may_wait: bool = False
    ) -> tuple[Applied | None, str]:
        """Put a revision in force, the same on all ranks: gives what came into force, else why it was refused.

        With ``may_wait`` it raises AskAgainLater on all ranks where an applier does.
        """
        applied: Applied | None = None
        try:
            applied, reasons = self._put_in_force(self.config.revise(changes, reason), step, may_wait=may_wait)
            refusal = _in_words(reasons)
        except ConfigError as error:  # allowed when it was proposed, and not over the version in force now
            refusal = str(error)
        self._log_refusal(f"a revision of the config ({reason})", refusal)
        return applied, refusal

    def _consider_proposal(self, report: RankReport, step: int) -> Applied | None:
        assert report.changes is not None
        applied, refusal = self.revise(report.changes, report.reason, step, may_wait=True)
        self._answer_proposals(ElasticConfig.from_values(report.changes).values(), refusal)
        return applied

    def _answer_proposals(self, decided: Mapping[str, object], refusal: str) -> None:
        """Answer this rank's proposals, up to one that asks for neither what was ``decided`` nor what is in force.

        Ranks may have proposed the same, or one what another's change has brought about already.
        """
        while self._proposals:
            first = self._proposals[0]
            wanted = ElasticConfig.from_values(first.changes).values()
            if wanted == decided and refusal:
                first.outcome, first.refusal = "refused", refusal
            elif wanted == decided or all(self.config.get(path) == value for path, value in wanted.items()):
                first.outcome = "in force"
            else:
                return
            self._proposals.popleft()

    def _put_in_force(
        self, new: ElasticConfig, step: int, *, may_wait: bool = True
    ) -> tuple[Applied | None, dict[int, list[str]]]:
        """Check on every rank, then apply on every rank, or on none for the reasons given."""
        reasons = self._appliers.check(new, may_wait=may_wait) or self._appliers.apply(self.config, new)
        if reasons:
            return None, reasons
        appliers = self._appliers
        own_values = {**appliers.defaults(), **appliers.own_values}
        applied = Applied(old=self.config, new=new, step=step, effects=appliers.effects(), own_values=own_values)
        self.config = new
        lowest = min(new.version, self.newest_agreed.version)
        self._settled = {key for key in self._settled if key[0] >= lowest}
        if self._ranks.rank == 0 and new.digest != applied.old.digest:  # else it is in force already, and said
            _logger.info("config %s, on all %d ranks", applied, self._ranks.world_size)
        return applied, {}

    def _tell_refusal(
        self, config: ElasticConfig, why: str, otherwise: ElasticConfig | None = None, *, is_late: bool = False
    ) -> None:
        """Have rank 0 warn that a version was refused, and call ``on_refusal``; nothing where there is no reason.

        ``config`` is the file's, or that with the start-up values, as a scheduled one is.
        """
        self._log_refusal(f"config {config.label}", why, otherwise)
        if why and self._ranks.rank == 0 and self.on_refusal is not None:
            digests = [digest for version, digest in self._settled if version == config.version]
            digest = config.digest if config.digest in digests else "".join(digests[:1])
            self.on_refusal(config.version, "" if is_late else digest, why)

    def _log_refusal(self, what: str, why: str, otherwise: ElasticConfig | None = None) -> None:
        """Have rank 0 warn that something was refused, and why; nothing where there is no reason."""
        if why and self._ranks.rank == 0:
            kept = f"{self.config.label} stays in force" if otherwise is None else f"{otherwise.label} comes into force"
            _logger.warning("%s was refused, %s: %s", what, kept, why)


def _value(value: Value) -> str:
    return "not set" if value is None else shown(value)


def _file_in(content: bytes) -> ElasticConfig:
    return ElasticConfig.from_dict(json.loads(content))


def _superseded(file: ElasticConfig, revised: ElasticConfig) -> ElasticConfig:
    """The values of a version that ``revised``, a revision of it, still has; with its reason and revision.

    ``apply_at_step`` is left out: a version that was revised has been in force.
    """
    superseded = file.differences(revised)
    kept = {path: value for path, value in file.values().items() if path not in superseded}
    left = ElasticConfig.from_values(kept, version=file.version, reason=revised.reason)
    return replace(left, revision=revised.revision)


def _key(file: ElasticConfig) -> tuple[int, str]:
    return file.version, file.digest


def _when(scheduled: ElasticConfig) -> str:
    at_step = scheduled.apply_at_step
    return "waiting for a step to have run" if at_step is None else f"agreed for step {at_step}"


def _in_words(reasons: Mapping[int, list[str]]) -> str:
    """Ranks' reasons as text: each reason once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, texts in sorted(reasons.items()):
        ranks.setdefault(", ".join(texts), []).append(rank)
    return "; ".join(f"{_ranks_in_words(having)}: {text}" for text, having in ranks.items())


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
