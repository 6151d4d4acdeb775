"""ConfigFollower: owns a watcher, an agreement and appliers, for a loop without ElasticTrainer and within the trainer.

    follower = follow_config(startup={"optimizer.learning_rate": 1e-3})
    with follower:
        for batch in batches:
            loss = train(batch, dropout=follower.knob("dropout", 0.1))
            if follower.boundary().stop:
                break

Every rank makes the same calls. ``with`` starts following, and at its end makes sure that all ranks took equally many
steps; an exception that leaves it is told to the other ranks.

The script's own knobs and the events and metrics that a rank writes are here too. A *seat* is the number in the names
of a rank's files (records/run_dir.py).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, overload

import psutil
import torch

from elastic_ext.errors import ConfigError, ElasticError, RanksError, Refusal
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.heartbeat import Activity, Heartbeat, begin_heartbeat
from elastic_ext.ranks.notices import Trouble
from elastic_ext.ranks.processes import process_of
from elastic_ext.ranks.world import World
from elastic_ext.records.json import shown
from elastic_ext.records.measures import Measures
from elastic_ext.records.member import MemberRecord
from elastic_ext.records.metrics import (
    JobEvent,
    JobFacts,
    ModelProfile,
    NodeCalibration,
    RankMetrics,
    StepCensus,
    StepTrace,
    StepWindow,
)
from elastic_ext.records.run_dir import DEFAULT_TIMEOUT_SECONDS, RunDirectory, StartSettings
from elastic_ext.version import why_torch_is_untested

from .agreement import Agreement, AgreementInterval, Boundary
from .apply import Applied, Applier, FunctionApplier, NoSource, Proposal
from .control_word import GatheredWords, Purpose
from .elastic_config import ElasticConfig
from .history import UNSET
from .keys import KEYS, Value, section_of
from .watcher import ConfigWatcher

__all__ = ["ConfigFollower", "Reports", "UserKnobs", "follow_config"]

_logger = logging.getLogger(__name__)


# --- values that a script reads by name while it runs, of the types that it expects ----------------------------------


class UserKnobs:
    """The names that a script has read with ``knob``: dotted keys, or of the section ``user``, which this applies."""

    section = "user"

    def __init__(self) -> None:
        self._defaults: dict[str, object] = {}

    def read(self, config: ElasticConfig, name: str, default: object) -> object:
        """The value of a name in force, ``default`` where it has none.

        ConfigError if the value of a name of the user's own is of another type than ``default``.
        """
        path = name if name in KEYS else f"user.{name}"
        self._defaults[path] = default
        value = config.get(path)
        if value is None:
            return default
        reason = _wrong_type(path, value, default)
        if reason is not None:
            raise ConfigError([reason])
        return float(value) if isinstance(default, float) and isinstance(value, int) else value

    def default(self, path: str) -> Value:
        """The default with which the script reads a dotted key; None where it reads none, or one of no simple type."""
        return self.defaults().get(path)

    def defaults(self) -> dict[str, Value]:
        """The defaults of simple types with which the script has read dotted keys so far."""
        return {path: value for path, value in self._defaults.items() if isinstance(value, (bool, int, float, str))}

    def was_read(self, path: str) -> bool:
        """Whether the script has asked for this dotted key."""
        return path in self._defaults

    def unread(self, applied: Applied, sections: Set[str]) -> list[str]:
        """The dotted keys that a config sets, that nothing applies and that the script has not read."""
        applying = sections - {self.section} | {"checkpoint", "tuning"}  # these two act without an applier
        given = [path for path, (_, value) in applied.changes.items() if value is not None]
        return [path for path in given if section_of(path) not in applying and not self.was_read(path)]

    def check(self, new: ElasticConfig) -> str | None:
        """The knobs whose values would be of another type than the script expects."""
        values = new.values()
        reasons = [_wrong_type(path, values.get(path), default) for path, default in self._defaults.items()]
        return "; ".join(str(reason) for reason in reasons if reason is not None) or None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Nothing to do: ``read`` looks at the config in force."""


def _wrong_type(path: str, value: object, default: object) -> Refusal | None:
    """Why ``value`` is refused, being of another type than ``default``; any will do where there is no default."""
    if value is None or default is None or path in KEYS:
        return None
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "true or false"),
        (int, "an integer"),
        ((float, int), "a number"),
        (str, "text"),
        ((tuple, list), "a list"),
    )
    for kind, words in kinds:
        if isinstance(default, kind):
            fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
            advice = f"the script starts with {shown(default)}"
            return None if fits else Refusal(key=path, given=shown(value), allowed=words, advice=advice)
    return None


# --- what one rank writes to the run directory of itself: events, and metrics every few seconds ----------------------

_LEAST_METRICS_SECONDS, _MOST_METRICS_SECONDS = 1.0, 10.0  # in between as old as the run is: a young one tells sooner


class Reports:
    """Writes one rank's events and metrics to the run directory; with the library switched off it writes nothing."""

    def __init__(self, settings: StartSettings, ranks: Ranks) -> None:
        self.measure: Callable[[], Measures] = Measures
        """Gives the speed and memory that the next metrics tell."""
        self.on_window: Callable[[StepWindow], None] | None = None
        """Called with each profile window that has been written."""
        self._settings = settings
        self._ranks = ranks
        self._directory = RunDirectory(settings.run_dir, seat=ranks.seat) if settings.enabled else None
        self.census: StepCensus | None = None
        """The census of a step that was written last: its operations and bytes."""
        self.calibration: NodeCalibration | None = None
        """The calibration of the node that was written last: what the machine does at best."""
        self.due_at = 0.0
        """When the next metrics are to be written, on the clock of ``time.perf_counter``."""
        self._began_at = time.perf_counter()

    def begin(self) -> None:
        """Make the run directory; rank 0 warns of another run that writes there."""
        if self._directory is None:
            return
        self._directory.prepare()
        last = self._directory.last_metrics() if self._ranks.rank == 0 else None
        if last is not None and last.host == self._ranks.host and last.pid != os.getpid() and _still_runs(last):
            _logger.warning(
                "process %d runs, and writes into the run directory %s too, as another run of job %s: both follow one "
                "config file, and overwrite each other's metrics; end one of them, or give one a name of its own by "
                "ELASTIC_EXT_JOB or a directory of its own by ELASTIC_EXT_RUN_DIR",
                last.pid,
                self._settings.run_dir,
                last.job,
            )

    def write_applied(
        self, applied: Applied, unread: Sequence[str] = (), *, unset: Mapping[str, Value] = MappingProxyType({})
    ) -> None:
        """Write the event that a config came into force; it sets the keys ``unread``, which nothing has asked for.

        ``unset`` are the values in force of its keys where no file sets them, as far as they are known.
        """
        details = {
            "version": applied.new.version,
            "revision": applied.new.revision,
            "replaces": applied.old.version,
            "changes": applied.values_used,
            "effects": {path: words for path, words in applied.effects.items() if path in applied.changes},
            "unread": list(unread),
            UNSET: {path: value for path in applied.changes if (value := unset.get(path)) is not None},
        }
        self.write_event("config-applied", step=applied.step, text=str(applied), details=details)

    def write_event(self, kind: str, *, step: int, text: str, details: Mapping[str, object]) -> None:
        """Write an event of the kind ``kind``, which happened before ``step``."""
        if self._directory is None:
            return
        event = JobEvent(
            time=time.time(),
            generation=self._settings.restart,
            rank=self._ranks.rank,
            step=step,
            kind=kind,
            text=text,
            details=dict(details),
        )
        self._directory.add_event(event)

    def write_model(self, profile: ModelProfile) -> None:
        """Write what model is trained."""
        if self._directory is not None:
            self._directory.write_model(profile)

    def write_census(self, census: StepCensus) -> None:
        """Write what a step asks of its machine: operations and bytes."""
        self.census = census
        if self._directory is not None:
            self._directory.write_census(census)

    def write_trace(self, trace: StepTrace) -> None:
        """Write what torch's profiler saw of a step."""
        if self._directory is not None:
            self._directory.write_trace(trace)

    def write_calibration(self, calibration: NodeCalibration) -> None:
        """Write what this machine does at best."""
        self.calibration = calibration
        if self._directory is not None:
            self._directory.write_calibration(calibration)

    def write_member(self, record: MemberRecord) -> None:
        """Write what this worker is as a member of its job."""
        if self._directory is not None:
            self._directory.write_member(record)

    def write_facts(self, facts: JobFacts) -> None:
        """Write which settings can be changed in this job."""
        if self._directory is not None:
            self._directory.write_facts(facts)

    def profiled_until(self) -> float:
        """The end of the last window of this rank that was written, in seconds since 1970; 0 where there is none."""
        return 0.0 if self._directory is None else self._directory.profiled_until()

    def add_window(self, window: StepWindow) -> None:
        """Write a profile window: where this rank's time went."""
        if self._directory is not None:
            self._directory.add_window(window)
        if self.on_window is not None:
            self.on_window(window)

    def take_world(self, world: World) -> None:
        """Have the next metrics, which name this rank and the number of ranks, written at the next step."""
        self.hasten()

    def hasten(self) -> None:
        """Have the next metrics written at the next step, as there is news for them. Any thread may call it."""
        self.due_at = 0.0

    def write(
        self,
        *,
        step: int,
        config: ElasticConfig,
        agree_every_steps: int,
        from_checkpoint: Mapping[str, str],
        not_from_checkpoint: Mapping[str, str],
    ) -> None:
        """Write the metrics of this moment; ``from_checkpoint`` and its like as RankMetrics has them."""
        now = time.perf_counter()
        self.due_at = now + min(max(now - self._began_at, _LEAST_METRICS_SECONDS), _MOST_METRICS_SECONDS)
        if self._directory is None:
            return
        ranks = self._ranks
        name = ranks.names[ranks.rank]
        metrics = RankMetrics(
            time=time.time(),
            job=self._settings.job,
            generation=self._settings.restart,
            rank=ranks.rank,
            world_size=ranks.world_size,
            host=name.host,
            pid=name.pid,
            step=step,
            config_version=config.version,
            config_revision=config.revision,
            agree_every_steps=agree_every_steps,
            from_checkpoint=from_checkpoint,
            not_from_checkpoint=not_from_checkpoint,
            measures=self.measure(),
        )
        self._directory.write_metrics(metrics)


def _still_runs(metrics: RankMetrics) -> bool:
    """Whether the process that wrote ``metrics`` on this machine runs; another one that has got its pid is not it."""
    try:
        return process_of(metrics.pid) is not None and psutil.Process(metrics.pid).create_time() <= metrics.time
    except (OSError, psutil.Error):
        return False


# --- owns a watcher, an agreement and appliers: what a loop, or a trainer, follows the config by ---------------------

_Default = TypeVar("_Default")
_DOUBTFUL_SECONDS = 30.0  # how long to wait for ranks that may be waiting elsewhere for this one
_OFF = "ELASTIC_EXT=off: nothing changes while training runs"
_SCRIPTS = "the script's"  # value of a key that the script has not told of
_MOST_TOLD = 5
_MOST_FROM_CHECKPOINT = 20  # keys


def _remark_on_file(
    changes: Mapping[str, tuple[Value, Value]], own: Mapping[str, Value], file: str, *, resumed: bool, is_saved: bool
) -> str:
    """A warning of a config file that was there at the start, with the command that takes back what it changes.

    ``changes`` has, by dotted key, the value that would be in force without the file, and the file's. ``own`` has the
    script's own value, None where it is not known. ``resumed`` is whether the values without the file may be those of a
    checkpoint; ``is_saved`` whether values in force come into checkpoints, which the next start goes on from: there a
    key that was only taken out of the file still has the file's value.
    """
    told, edits, is_removed, unknown = [], [], False, []
    for path, (without, new) in changes.items():
        mine = own.get(path)
        before = shown(mine) if mine is not None else _SCRIPTS if without is None or resumed else shown(without)
        if without is not None and without != mine and resumed:
            before += f" (the checkpoint's: {shown(without)})"
        if mine is None and without is None and section_of(path) == "tuning":
            before = ""  # the launcher's
        told.append(f"{path}{before and ' '}{before} -> {shown(new)}")
        if is_saved and mine is not None:
            edits.append(f"{path}={json.dumps(mine)}")
        elif new is not None and (without is None or not resumed):
            edits.append(f"{path}=")
            is_removed = True
        elif new is not None:
            unknown.append(path)
    when = ", now" if is_saved and is_removed else ", now or at the next start"
    command = " ".join(["elastic-ext config set --file", shlex.quote(file), *map(shlex.quote, edits)])
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    words = (
        f"the config file {file} was there at the start, and wins over the script"
        f"{' and the checkpoint' if resumed else ''}: {', '.join(told[:_MOST_TOLD])}{more}"
    )
    if unknown:
        words += f"; without it the checkpoint's values are in force, so give {', '.join(unknown)} the wanted value"
    return f"{words}; to have the script's own values{when}: {command}" if edits else words


def follow_config(
    config_file: str | Path | None = None,
    *,
    startup: Mapping[str, object] | None = None,
    start_step: int = 0,
    agree_every_steps: AgreementInterval = "auto",
    job: str | None = None,
    run_dir: str | Path | None = None,
    timeout_seconds: float | None = None,
    lag_warning_seconds: float | None = None,
    poll_seconds: float | None = None,
) -> ConfigFollower:
    """A follower of this job's config file; every rank calls this, after the process group was made.

    ``startup`` holds the script's own values for dotted keys: what a key means that the file lacks, and that a resumed
    checkpoint's config lacks too (``load_state_dict``). ``start_step`` is the number
    of steps already taken when a run is resumed. At each ``agree_every_steps``-th boundary an agreement is begun;
    "auto" thins them out until they cost little.

    The other arguments, where not given, come from the environment (``ELASTIC_EXT_*``), and else have defaults. ``job``
    names the job, and with it the default ``run_dir``, which has the config file and what ranks write of themselves.
    A rank waits ``timeout_seconds`` for the others; one that lacks a config that others hold is warned of after
    ``lag_warning_seconds``; without file system events the file is looked at every ``poll_seconds``.
    """
    enabled = True
    settings: StartSettings | None = None
    error: Exception | None = None
    try:
        enabled = StartSettings.is_enabled(os.environ)
        settings = StartSettings.resolve(
            os.environ,
            script=sys.argv[0] if sys.argv else "",
            job=job,
            run_dir=run_dir,
            config_file=config_file,
            timeout_seconds=timeout_seconds,
            lag_warning_seconds=lag_warning_seconds,
            poll_seconds=poll_seconds,
        )
        base = ElasticConfig.from_values(startup or {})
        every = _checked_every(agree_every_steps)
    except (ValueError, TypeError, AttributeError) as caught:  # wrong arguments, on this rank at least
        error = caught
    ranks = Ranks.alone()
    if enabled:
        ranks = Ranks.join(
            timeout_seconds=settings.timeout_seconds if settings is not None else DEFAULT_TIMEOUT_SECONDS,
            agents_folder=settings.pulse_dir if settings is not None else None,
            seat=settings.seat if settings is not None else None,
        )
    try:
        ranks.all_or_raise(error, "starting to follow a config", is_refusal=True)  # in words, without a traceback
    except RanksError:
        ranks.close()
        if error is not None:
            raise error from None  # the others raise what this one did wrong
        raise
    assert settings is not None
    return ConfigFollower(settings, ranks, base, start_step=start_step, agree_every_steps=every)


def _checked_every(every: AgreementInterval) -> AgreementInterval:
    if every != "auto" and (type(every) is not int or every < 1):
        raise ValueError(f'agree_every_steps is {every!r}; allowed: "auto" or an integer >= 1')
    return every


class ConfigFollower:
    """The config of a training loop, followed step by step, the same on all ranks; an ElasticTrainer has one too."""

    def __init__(
        self,
        settings: StartSettings,
        ranks: Ranks,
        base: ElasticConfig,
        *,
        start_step: int = 0,
        agree_every_steps: AgreementInterval = "auto",
    ) -> None:
        self.settings = settings
        self.ranks = ranks
        """The ranks that follow the config together."""
        warns = settings.enabled and ranks.speaks_for(str(settings.config_file))
        self._watcher = (
            ConfigWatcher(settings.config_file, poll_seconds=settings.poll_seconds, warns=warns)
            if settings.enabled
            else None
        )
        self.reports = Reports(settings, ranks)
        """The events and metrics that this rank writes to the run directory."""
        self.heartbeat = begin_heartbeat(
            settings.pulse_dir if settings.enabled else None,  # named after heartbeats: no pulse of an agreement
            seat=ranks.seat,
            rank=ranks.rank,
            restart=settings.restart,
            run_dir=settings.run_dir,
        )
        """This rank's heartbeat, which its agent reads."""
        self.agreement = Agreement(
            ranks,
            self._watcher or NoSource(),
            base,
            every=agree_every_steps,
            warns=warns,
            lag_warning_seconds=settings.lag_warning_seconds,
        )
        """How all ranks agree at boundaries; for the parts of a trainer, which ask it for more than a loop does."""
        self.agreement.step = start_step
        self.agreement.appliers.heartbeat = self.heartbeat
        if self._watcher is not None:
            self._watcher.on_news = self.agreement.rouse
        self.agreement.tell_refusals(self._tell_refusal)
        self._knobs = UserKnobs()
        self.agreement.add(self._knobs)
        self.agreement.appliers.defaults = self._knobs.defaults
        self._found_at_start: Applied | None = None  # what came into force at the start; until a step ends
        self._has_told_of_file = False
        self._finished = False
        self._replaced: dict[str, Value] = {}  # of the resumed config, where the caller has put values of its own
        self._closed_by = ""  # what the user did, in words; empty until then

    def take_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Put ``heartbeat``, such as a profile's recorder, between training and the rank's present heartbeat.

        It hears all that training tells, and has to forward that to the present one.
        """
        self.heartbeat = self.agreement.appliers.heartbeat = heartbeat

    @property
    def warns(self) -> bool:
        """Whether this rank is the one to warn of files that other ranks of its machine read too."""
        return self._watcher is not None and self._watcher.warns

    def take_world(self, world: World) -> None:
        """Go on with the ranks of ``world``, between two steps: whatever here knows its ranks is told of them.

        Who has warned of a file may have left: the first rank of a machine does from here on, besides those that did.
        """
        if self._watcher is not None:
            self._watcher.warns |= world.is_first_here
        for each in (self.heartbeat, self.agreement, self.reports):
            each.take_world(world)

    def add(self, applier: Applier) -> None:
        """Have ``applier`` check and apply its section of every later config, on this rank."""
        self.agreement.add(applier)

    def on_change(
        self,
        section: str,
        apply: Callable[[ElasticConfig, ElasticConfig], None],
        check: Callable[[ElasticConfig], str | None] | None = None,
    ) -> None:
        """Call ``apply(old, new)`` whenever ``section`` changes; ``check(new)`` may give a reason to refuse it."""
        self.add(FunctionApplier(section=section, checking=check, applying=apply))

    def start(self) -> None:
        """Start following: a file found now comes into force or is scheduled, if all ranks find it and none refuses."""
        self.reports.begin()
        if self._watcher is not None:
            self._watcher.start()
        applied = self.agreement.start()
        if self.ranks.rank == 0:
            if (why_untested := why_torch_is_untested(torch.__version__)) is not None:
                _logger.warning("%s", why_untested)
            followed = "no config file (ELASTIC_EXT=off)"
            if self._watcher is not None:
                followed = f"the config file {self._watcher.path}"
            _logger.info(
                "job %s, on %d ranks, follows %s; config %s is in force: %s",
                self.settings.job,
                self.ranks.world_size,
                followed,
                self.config.label,
                shown(self.config.to_dict(), 2000),
            )
        self._record(() if applied is None else (applied,))
        self._found_at_start = applied
        self.heartbeat.note(Activity.OUTSIDE)

    def tell_of_file(self) -> int:
        """Have rank 0 warn, once, of what a file found at the start changes; gives the number of keys.

        Called once a checkpoint is loaded, if there is one, and at the first boundary. Nothing is told of a file that
        was in force before: where an agent has restarted the processes, and where the checkpoint has its version.
        """
        resumed_version = self.agreement.resumed_version
        is_known = self.settings.restart > 0 or resumed_version == self.config.version
        if self._has_told_of_file or self._found_at_start is None or is_known:
            return 0
        self._has_told_of_file = True
        pairs = self.agreement.base.differences(self.config).items()
        changes = {path: pair for path, pair in pairs if path != "checkpoint.now"}
        if changes and self.ranks.rank == 0:
            resumed = resumed_version is not None
            text = _remark_on_file(
                changes,
                {path: self._own_value(path) for path in changes},
                str(self.settings.config_file),
                resumed=resumed,
                is_saved=resumed or self.agreement.saves_config,
            )
            _logger.warning("%s", text)
        return len(changes)

    @property
    def config(self) -> ElasticConfig:
        """The config in force."""
        return self.agreement.config

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return self.agreement.step

    @overload
    def knob(self, name: str) -> Any: ...
    @overload
    def knob(self, name: str, default: _Default) -> _Default: ...
    def knob(self, name: str, default: Any = None) -> Any:
        """The value in force of a name of your own (``user`` in the file), or of a dotted key of the table.

        ``default`` is the start-up value. A name of your own must have a value of its type in the file.
        """
        return self._knobs.read(self.config, name, default)

    def boundary(self, *, step: int | None = None, backwards: int = 0) -> Boundary:
        """Pass the boundary after a step, on every rank: learn what was agreed, and take what changed.

        ``step`` is the number of steps that lie behind, one more than before if it is not given. ``backwards`` is
        a count of backward passes to compare between ranks.
        """
        self._raise_if_closed()
        self.tell_of_file()
        with self.heartbeat.during(Activity.BOUNDARY):
            passed = self.agreement.boundary(step=self.step + 1 if step is None else step, backwards=backwards)
        self.heartbeat.pass_step(self.step)
        if self._found_at_start is not None:
            self._warn_of_unread(self._found_at_start)
            self._found_at_start = None
        if passed.applied is not None:
            self._record(self.agreement.changes, self._warn_of_unread(passed.applied))
        elif time.perf_counter() > self.reports.due_at:
            self.write_metrics()
        return passed

    def pass_quietly(self, step: int, backwards: int) -> bool:
        """Pass a boundary at which there is nothing to do or to tell; gives False, and does nothing, at any other.

        Unlike ``boundary`` it does not tell the heartbeat of the step: only a caller whose steps tell it calls this.
        """
        now = time.perf_counter()
        return now < self.reports.due_at and self.agreement.pass_quietly(now, step, backwards)

    def end_epoch(self, *, doubt: str = "") -> None:
        """Return once every rank has come here with the same counts; else all raise, and name those that differ.

        ``doubt`` is what this rank did, in words such as "left a step in its middle", so that the others may be waiting
        elsewhere for it: then it does not wait long for them. Empty where it did nothing of the kind.
        """
        self.meet(Purpose.END_EPOCH, doubt=doubt)

    def meet(self, purpose: Purpose, *, doubt: str = "", exchanges: int = 0, lost: int = 0) -> None:
        """Return once every rank has come here for the same ``purpose`` with the same counts; else all raise.

        The config in force stays. ``doubt`` is what this rank did, in words, so that the others may be waiting
        elsewhere for it, such as for its gradients, where they cannot be reached: then this rank waits half a minute at
        most, which is enough where all have done the same.

        Before a step that was rolled back is taken again, ``exchanges`` is how many collectives of the model it had
        begun: with unlike numbers ranks would pair the messages of different collectives. ``lost`` is how many
        micro-batches it had taken that do not come again: with unlike numbers ranks would no longer end their steps
        together.
        """
        self._raise_if_closed()
        seconds = min(_DOUBTFUL_SECONDS if doubt else math.inf, self.settings.timeout_seconds)
        with self.heartbeat.during(Activity.BOUNDARY), self.ranks.waiting_at_most(seconds, doubt):
            self.agreement.meet(purpose, exchanges, lost)

    def decide_proposals(self, purpose: Purpose) -> None:
        """Put in force now, between two steps, what any rank has proposed; with all ranks, after ``meet``."""
        self._raise_if_closed()
        with self.heartbeat.during(Activity.BOUNDARY):
            self.agreement.decide_proposals(purpose)

    def hear_all(self, *, failed: str = "", brings: str = "") -> GatheredWords | None:
        """Compare over all ranks whether the step failed, and which parameters have gradients; before they are shared.

        Gives every rank's control word, or None where all say the same and none failed. All ranks call this together,
        in a guarded step. ``failed`` says how memory ran out on this rank, empty where it did not; the control words
        have ``failures`` where it is not empty on some rank. ``brings`` says which parameters have a gradient on this
        rank; without failures the control words are given where that is not the same on all.
        """
        self._raise_if_closed()
        with self.heartbeat.during(Activity.BOUNDARY):
            return self.agreement.compare_words(failed, brings)

    def bring_noise(self, text: str) -> list[str]:
        """Gather what every rank has measured of the noise of gradients, in rank order; ``text`` is this rank's.

        All ranks call this together at a boundary, before ``boundary``.
        """
        self._raise_if_closed()
        with self.heartbeat.during(Activity.BOUNDARY):
            gathered = self.agreement.compare_words("", text, Purpose.NOISE)
        return [text] * self.ranks.world_size if gathered is None else [word.brings for word in gathered.words]

    def revise(self, changes: Mapping[str, object], reason: str) -> str:
        """Put a revision in force now, on all ranks, which call this with the same changes.

        Gives the reason if it was refused, else an empty text.
        """
        self._raise_if_closed()
        return self.agreement.revise(changes, reason) if self.settings.enabled else _OFF

    def finish(self, *, doubt: str = "") -> None:
        """Wait until all ranks are here with equal counts, else raise on all: training ends. ``close`` comes after."""
        self.meet(Purpose.FINISH, doubt=doubt)
        self._finished = True
        self.write_metrics()

    def tell_peers(self, error: BaseException) -> None:
        """Leave word for the other ranks of the error that ends this one, unless they raise it too (RanksError).

        After a RuntimeError, which may come of a lost peer, what the others have told is logged here.
        """
        notices = self.ranks.notices
        if notices is not None and not isinstance(error, RanksError):
            notices.tell_of(error, progress=self.ranks.progress())

    def propose(self, changes: Mapping[str, object], reason: str) -> Proposal:
        """Ask for a change from inside the job, as a revision: dotted keys and values. On one rank or on all."""
        self._raise_if_closed()
        proposal = self.agreement.propose(changes, reason) if self.settings.enabled else Proposal(changes, reason)
        if not self.settings.enabled:
            proposal.outcome, proposal.refusal = "refused", _OFF
        return proposal

    def request_stop(self) -> None:
        """Have ``boundary().stop`` be true on all ranks, within two agreements. Any rank may call it."""
        self.agreement.request_stop()

    def request_save(self) -> None:
        """Have ``boundary().save`` be true on all ranks once, within two agreements. Any rank may call it."""
        self.agreement.request_save()

    def state_dict(self) -> dict[str, Any]:
        """The config in force, as plain values for a checkpoint; of a revision, with the files of its version."""
        files = {"files": self.agreement.files} if self.config.revision else {}
        return {"config": self.config.to_dict(), "revision": self.config.revision, "step": self.step, **files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the config saved in a checkpoint: it overrides the start-up values, and the config file overrides it.

        A revision of the file's version keeps the values that it has changed. Before the first boundary; after
        ``start`` all ranks call this together. A caller that changes the ``config`` of ``state`` leaves what it was
        under ``saved``.
        """
        self.agreement.step = state["step"]
        config, saved = (
            ElasticConfig.from_dict(each, revision=state["revision"])
            for each in (state["config"], state.get("saved", state["config"]))
        )
        self._replaced = {path: old for path, (old, _) in saved.differences(config).items() if old is not None}
        self.agreement.resume(config, saved, state.get("files", ()))
        self.reports.due_at = 0.0  # metrics tell what the checkpoint has brought

    def close(self, by: str = "follower.close() was called") -> None:
        """Stop following; what is in force stays readable. Closing twice is allowed.

        ``by`` is what the user did, in words, for the error of a call that comes too late.
        """
        if self._closed_by:
            return
        self._closed_by = by
        notices = self.ranks.notices
        if notices is not None and not self._finished:
            notices.post(
                Trouble(kind="failed", progress=self.ranks.progress(), text="it closed its follower or trainer early")
            )
        if self._watcher is not None:
            self._watcher.close()
            if self._finished:
                with suppress(ElasticError):  # of a watcher that has failed, and has logged that
                    self.agreement.refuse_late_file()
        self.agreement.close()
        self.ranks.close()
        self.heartbeat.end()

    def __enter__(self) -> ConfigFollower:
        try:
            self.start()
        except BaseException as error:
            self.tell_peers(error)
            self.close("the follower could not start")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                self.tell_peers(error)
        finally:
            self.close("`with follower:` has ended" if error is None else "an exception has left `with follower:`")

    def _raise_if_closed(self) -> None:
        if self._closed_by:
            raise ElasticError(
                f"{self._closed_by}, and with that the connection to the other ranks has ended; make this call "
                "earlier, or make a new follower or trainer on every rank"
            )

    def _record(self, changes: Sequence[Applied], unread: Sequence[str] = ()) -> None:
        """Write an event for each config that came into force, the last with what is ``unread``, and the metrics."""
        for applied in changes:
            unset = {**applied.own_values, **self.agreement.base.values()}
            self.reports.write_applied(applied, unread if applied is changes[-1] else (), unset=unset)
        self.write_metrics()

    def _tell_refusal(self, version: int, digest: str, why: str) -> None:
        """Write the event of a version that was refused."""
        details = {"version": version, "digest": digest, "why": why}
        self.reports.write_event(
            "config-refused", step=self.step, text=f"version {version} was refused: {why}", details=details
        )

    def write_metrics(self) -> None:
        """Write this rank's metrics now, between two steps; by themselves they are written every few seconds."""
        self.reports.write(
            step=self.step,
            config=self.config,
            agree_every_steps=self.agreement.every,
            from_checkpoint=self._from_checkpoint(),
            not_from_checkpoint=self._not_from_checkpoint(),
        )

    def _from_checkpoint(self) -> dict[str, str]:
        """The values in force that the resumed checkpoint has brought in place of the script's, in words, by key."""
        if self.agreement.resumed_version is None:
            return {}
        found: dict[str, str] = {}
        for path, value in self.agreement.base.values().items():
            own = self._own_value(path)
            if value != own and value == self.config.get(path) and len(found) < _MOST_FROM_CHECKPOINT:
                found[path] = f"{shown(value, 60)}{'' if own is None else f' (the script has {shown(own, 60)})'}"
        return found

    def _not_from_checkpoint(self) -> dict[str, str]:
        """The script's values in force in place of the resumed checkpoint's, such as its plan; in words, by key."""
        in_force = {path: self.config.get(path) for path in self._replaced}
        return {
            path: f"{shown(value, 60)} (the checkpoint has {shown(self._replaced[path], 60)})"
            for path, value in in_force.items()
            if value is not None and value != self._replaced[path] and value == self.agreement.base.get(path)
        }

    def _own_value(self, path: str) -> Value:
        """The script's own value of a dotted key, as it told or as it reads it; None where that is not known."""
        own = self.agreement.own_value(path)
        return self._knobs.default(path) if own is None else own

    def _warn_of_unread(self, applied: Applied) -> list[str]:
        """Warn of the keys that a version sets and nothing here has asked for, most often misspelt, and give them."""
        unread = self._knobs.unread(applied, self.agreement.appliers.sections)
        if unread and self.ranks.rank == 0:
            _logger.warning(
                "config %s sets %s, which nothing in this job has asked for so far; correct the name if it is misspelt",
                applied.new.label,
                ", ".join(unread),
            )
        return unread
