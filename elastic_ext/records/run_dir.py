"""The run directory of a job on one node, and the settings that say where a process keeps its files."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .files import append_line, open_regular, read_at_most, write_whole
from .json import JsonRecord
from .member import MemberRecord, member_file
from .metrics import FILE as JOB_FILE
from .metrics import JobEvent, JobFacts, ModelProfile, NodeCalibration, RankMetrics, StepCensus, StepTrace, StepWindow
from .text import expanded, path_given

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "GivenSeat", "RunDirectory", "StartSettings", "given_run_id"]

_logger = logging.getLogger(__name__)


# --- what lives on a node for one job, where worker, agent and people meet -------------------------------------------
#     <run directory>/
#       config.json              what training should be doing; one writer: a person, or the agent where there is one
#       metrics-<seat>.json      what a worker is doing; one writer: that worker
#       model-<seat>.json        what a worker trains; one writer: that worker
#       member-<seat>.json       whether members can change while a worker trains; one writer: that worker (member.py)
#       job.json                 what can be changed in the job, for whoever tunes it; one writer: rank 0
#       census-<seat>.json       what a step asks of its machine; one writer: that worker
#       trace-<seat>.json        what torch's profiler saw of a step; one writer: that worker
#       calibration.json         what the machine does at best; one writer: the first rank on it
#       profile-<seat>.jsonl     where a worker's time went, a line for each second or more; one writer: that worker
#       member-<seat>.json       a worker as a member of its job; one writer: that worker (where an agent started it)
#       events-<seat>.jsonl      what happened to a worker, a line each; one writer: that worker
#
# A *seat* is a number that no living worker of a job shares. It is the rank in a job whose members never change; where
# they change a worker keeps its seat and gets another rank, and a later worker gets the seat of one that has gone. So
# no two processes write one file, and a reader takes the rank from a record, never from the name of its file. The files
# in an agent's folders in memory are named by seats too.
#
# Each record carries the restart generation, so that a reader can tell yesterday's files from today's. Training never
# depends on these files: a write that fails is one warning.

_MOST_WINDOW_BYTES = 1 << 13
_MOST_METRICS_BYTES = 64 << 10


class RunDirectory:
    """Writes one worker's files in its node's run directory; a write that fails is one warning."""

    def __init__(self, path: Path, *, seat: int) -> None:
        self.path = path
        self.metrics_file = path / f"metrics-{seat}.json"
        self.model_file = path / f"model-{seat}.json"
        self.events_file = path / f"events-{seat}.jsonl"
        self.profile_file = path / f"profile-{seat}.jsonl"
        self.trace_file = path / f"trace-{seat}.json"
        self.census_file = path / f"census-{seat}.json"
        self.job_file = path / JOB_FILE
        self.calibration_file = path / "calibration.json"
        self.member_file = member_file(path, seat)
        self._warned = False

    def prepare(self) -> None:
        """Make the directory, for its owner alone where it is new."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)

    def last_metrics(self) -> RankMetrics | None:
        """What this rank's metrics file holds, of whichever process; None where that cannot be read."""
        try:
            return RankMetrics.from_json(read_at_most(self.metrics_file, _MOST_METRICS_BYTES).decode())
        except (OSError, ValueError):
            return None

    def write_metrics(self, metrics: RankMetrics) -> None:
        """Replace this rank's metrics file."""
        self._replace(self.metrics_file, metrics)

    def write_model(self, profile: ModelProfile) -> None:
        """Replace the file about this rank's model."""
        self._replace(self.model_file, profile)

    def write_census(self, census: StepCensus) -> None:
        """Replace the file about what a step of this rank asks of its machine."""
        self._replace(self.census_file, census)

    def write_trace(self, trace: StepTrace) -> None:
        """Replace the file of what torch's profiler saw of a step of this rank."""
        self._replace(self.trace_file, trace)

    def write_calibration(self, calibration: NodeCalibration) -> None:
        """Replace the file about what this machine does at best."""
        self._replace(self.calibration_file, calibration)

    def write_facts(self, facts: JobFacts) -> None:
        """Replace the file about what can be changed in the job."""
        self._replace(self.job_file, facts)

    def write_member(self, record: MemberRecord) -> None:
        """Replace the file about this worker as a member of its job."""
        self._replace(self.member_file, record)

    def profiled_until(self) -> float:
        """The end of the last window in this rank's profile; 0 where there is none that can be read."""
        try:
            with open_regular(self.profile_file) as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _MOST_WINDOW_BYTES, 0))
                last = file.read(_MOST_WINDOW_BYTES).decode().rstrip().rpartition("\n")[2]
            return StepWindow.from_json(last).end
        except (OSError, ValueError):
            return 0.0

    def add_window(self, window: StepWindow) -> None:
        """Add one line to this rank's profile."""
        try:
            append_line(self.profile_file, window.to_json())
        except OSError as error:
            self._warn(error)

    def add_event(self, event: JobEvent) -> None:
        """Add one line to this rank's events."""
        try:
            append_line(self.events_file, event.to_json())
        except OSError as error:
            self._warn(error)

    def _replace(self, path: Path, record: JsonRecord) -> None:
        try:
            write_whole(path, f"{record.to_json()}\n".encode(), durable=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _logger.warning(
                "the run directory %s cannot be written (%s): training goes on without metrics and events; "
                "set ELASTIC_EXT_RUN_DIR to a folder that can be written",
                self.path,
                error,
            )


# --- where this process keeps its files and how long it waits; fixed for the life of the process ---------------------
# What training should be doing is ElasticConfig, which changes while it runs. Here an argument wins over the
# environment, which wins over the default. Only entry points hand ``os.environ`` in.

DEFAULT_TIMEOUT_SECONDS = 1800.0

_OFF = ("off", "0", "false", "no")
_ON = ("", "on", "1", "true", "yes")
_RANDOM = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSeat:
    """The seat that an agent gave a worker, and the place among the ranks that it started the worker for."""

    number: int
    rank: int
    world_size: int

    @classmethod
    def in_environment(cls, environ: Mapping[str, str]) -> GivenSeat | None:
        """The seat in ``ELASTIC_EXT_SEAT``; None without an agent. ValueError where it is no number."""
        if not environ.get("ELASTIC_EXT_SEAT"):
            return None
        return cls(
            number=_count(environ, "ELASTIC_EXT_SEAT"),
            rank=_count(environ, "RANK"),
            world_size=_count(environ, "WORLD_SIZE"),
        )

    def of(self, rank: int, world_size: int) -> int:
        """The seat of the process that has this place; its rank where the agent started another one for that.

        A worker may start processes that are ranks of a world of their own, and inherit what it was told.
        """
        return self.number if (rank, world_size) == (self.rank, self.world_size) else rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StartSettings:
    """The settings that one process was started with."""

    enabled: bool
    job: str
    run_dir: Path
    config_file: Path
    restart: int
    """How often the launcher has restarted this job's processes."""
    timeout_seconds: float
    """How long a rank waits for its peers before it gives up."""
    lag_warning_seconds: float
    """How long a rank may lack a config that others hold before it is named in a warning."""
    poll_seconds: float
    """How often the config file is looked at where the file system sends no events."""
    shutdown_seconds: float
    """How long a launcher waits, after it has told this process to end, before it ends it."""
    profiles: bool = True
    """Whether this process records where its time goes."""
    profile_seconds: float = 60.0
    """Seconds between two log lines that say where time went; 0 for no lines."""
    pulse_dir: Path | None = None
    """The agent's folder for the heartbeats of its workers; None where there is no agent."""
    seat: GivenSeat | None = None
    """The seat that an agent gave this process; None where there is no agent."""

    @staticmethod
    def is_enabled(environ: Mapping[str, str]) -> bool:
        """Whether ``ELASTIC_EXT`` leaves the library switched on; it must say the same on every rank."""
        return _switched("ELASTIC_EXT", environ)

    @staticmethod
    def jobs_folder(environ: Mapping[str, str]) -> Path:
        """The folder of run directories by default; ValueError if the home folder is not known."""
        return _absolute(_cache(environ) / "elastic_ext")

    @staticmethod
    def run_dir_of(environ: Mapping[str, str], job: str) -> Path:
        """The default run directory of a job of this name."""
        return StartSettings.jobs_folder(environ) / _as_name(job)

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str],
        *,
        script: str,
        job: str | None = None,
        run_dir: str | Path | None = None,
        config_file: str | Path | None = None,
        timeout_seconds: float | None = None,
        lag_warning_seconds: float | None = None,
        poll_seconds: float | None = None,
    ) -> StartSettings:
        """The settings of a process that runs ``script`` in ``environ``; ValueError names what cannot be used."""
        if job == "":
            raise ValueError("job is '', as where a variable is not set; allowed: a name, or None")
        for argument, path in (("run_dir", run_dir), ("config_file", config_file)):
            if path is not None:
                path_given(argument, path)
        launched = given_run_id(environ.get("TORCHELASTIC_RUN_ID"))
        name = job or environ.get("ELASTIC_EXT_JOB") or launched or _script_job(script)
        folder = Path(run_dir or environ.get("ELASTIC_EXT_RUN_DIR") or cls.run_dir_of(environ, name))
        pulse_dir = environ.get("ELASTIC_EXT_PULSE_DIR")
        file = Path(config_file or environ.get("ELASTIC_EXT_CONFIG_FILE") or folder / "config.json")
        return cls(
            enabled=cls.is_enabled(environ),
            job=name,
            run_dir=_absolute(folder),
            config_file=_absolute(file),
            restart=_count(environ, "TORCHELASTIC_RESTART_COUNT"),
            timeout_seconds=_seconds(environ, "ELASTIC_EXT_TIMEOUT_SECONDS", timeout_seconds, DEFAULT_TIMEOUT_SECONDS),
            lag_warning_seconds=_seconds(environ, "ELASTIC_EXT_LAG_WARNING_SECONDS", lag_warning_seconds, 30.0),
            poll_seconds=_seconds(environ, "ELASTIC_EXT_POLL_SECONDS", poll_seconds, 1.0),
            shutdown_seconds=_seconds(environ, "ELASTIC_EXT_SHUTDOWN_SECONDS", None, 30.0),
            profiles=_switched("ELASTIC_EXT_PROFILE", environ),
            profile_seconds=_seconds_or_never(environ, "ELASTIC_EXT_PROFILE_SECONDS", 60.0),
            pulse_dir=_absolute(Path(pulse_dir)) if pulse_dir else None,
            seat=GivenSeat.in_environment(environ),
        )


def _switched(name: str, environ: Mapping[str, str]) -> bool:
    word = environ.get(name, "")
    if word.strip().lower() in _OFF:
        return False
    if word.strip().lower() in _ON:
        return True
    what = "the library" if name == "ELASTIC_EXT" else "the profiler"
    raise ValueError(f"{name} is {word!r}; allowed: on or off; unset it to switch {what} on")


def given_run_id(run_id: str | None) -> str:
    """A launcher's run id, which names a job; empty for "none" and a random UUID, as torchrun makes at each start."""
    return "" if run_id is None or run_id == "none" or _RANDOM.fullmatch(run_id) else run_id


def _script_job(script: str) -> str:
    """A job name for a script started by hand: the script's name, made unique by its path."""
    path = Path(script or "interactive").absolute()
    return f"{path.stem}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def _as_name(job: str) -> str:
    """``job`` as the name of one folder, whatever it holds; unlike jobs get unlike names."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80].lstrip(".")
    return safe if safe == job else f"{safe}-{hashlib.sha256(job.encode(errors='surrogateescape')).hexdigest()[:8]}"


def _cache(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME", "")
    return Path(given) if given.startswith("/") else Path("~/.cache")


def _absolute(path: Path) -> Path:
    return expanded(path).absolute()


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name) or "0"
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; allowed: an integer >= 0")
    return int(text)


def _seconds_or_never(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {text!r}; allowed: seconds, a number >= 0; 0 for never")
    return value


def _seconds(environ: Mapping[str, str], name: str, argument: float | None, default: float) -> float:
    given = environ.get(name) or str(default) if argument is None else argument
    source = name if argument is None else name.removeprefix("ELASTIC_EXT_").lower()
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (ValueError, TypeError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{source} is {given!r}; allowed: seconds, a number > 0")
    return value
