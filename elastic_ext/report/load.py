"""A RunRecord read from the files of a run: where the files lie, their lines, the facts of each rank, and verdicts."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from elastic_ext.profile.breakdown import RankView, merged
from elastic_ext.profile.ledger import (
    ENTRIES,
    ProcessProfile,
    Slice,
    TrainingHistory,
    in_order,
    ledger_of_job,
    processes_of,
    processes_within,
    slices_of,
    trainings_of,
)
from elastic_ext.profile.reader import read_calibration, read_census, read_trace, view_of
from elastic_ext.profile.verdict import verdict
from elastic_ext.records.files import open_regular, read_at_most
from elastic_ext.records.json import object_of
from elastic_ext.records.logged import MOST_NAMES, fitting
from elastic_ext.records.metrics import SIZES, JobEvent, RankMetrics, StepWindow

from .events import (
    Speeds,
    happenings_of,
    history_of,
    in_step_seconds,
    last_word,
    launches_of,
    num_failures_of,
    periods_of,
    spread_of,
    within,
    worlds_of,
)
from .record import MOST_BINS, ON_PAGE, Bins, RankRecord, Remark, RunRecord, rank_record

__all__ = [
    "Broken",
    "Judging",
    "RunPlaces",
    "events_in",
    "find_places",
    "gather",
    "rank_view_of",
    "shown_metrics_of",
    "speeds_of",
    "windows_in",
]


# --- the lines of a run directory's files ----------------------------------------------------------------------------
# Lines are read one at a time and as records; a line that is no record is counted and left out.
#
# Windows are read here by hand: a long run of many ranks has millions of them, and each would take 1.7 times as long
# (50 us instead of 30) as StepWindow.from_json reads it, before its bounds are looked at.

_MOST_LINE_BYTES = 1 << 16
_LEAST_TIME, _MOST_TIME = 1e8, 1e11
"""Seconds since 1970, from 1973 on for some thousand years, outside of which the time of a record counts as broken."""
_MOST_COUNT = 1 << 53
_MOST_LENGTH = 1e10
_NUM_QUANTILES = 64
_COUNTS = tuple(each.name for each in fields(StepWindow) if each.type == "int" and each.default is MISSING)
_LATER_COUNTS = tuple(each.name for each in fields(StepWindow) if each.type == "int" and each.default == 0)
_PARTS = ("processor_seconds", "typical")


class Broken:
    """The lines of a run's files that are no records, counted, and the files that cannot be read."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.files: list[str] = []


def windows_in(path: Path, rank: int, broken: Broken, advance: Callable[[int], None]) -> Iterator[StepWindow]:
    """The step windows of ``rank`` in a profile; ``advance`` is told how many bytes were read.

    A profile is of one worker, which may have had several ranks, one after another.
    """
    for line in _lines(path, broken, advance):
        try:
            window = _window_of(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            broken.num_lines += 1
            continue
        if window.rank == rank:
            yield window


def events_in(path: Path, broken: Broken) -> Iterator[JobEvent]:
    """The job events in a file, without broken ones, which ``broken`` counts."""
    for line in _lines(path, broken, lambda num_bytes: None):
        try:
            event = JobEvent.from_json(line.decode())
            if not _LEAST_TIME < event.time < _MOST_TIME:
                raise ValueError("no time")
            yield event
        except ValueError:
            broken.num_lines += 1


def _lines(path: Path, broken: Broken, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The whole lines of a file; a line without an end is still being written, or its writer died over it."""
    try:
        with open_regular(path) as file:
            is_within = False  # a line that is too long
            while line := file.readline(_MOST_LINE_BYTES):
                advance(len(line))
                is_whole = line.endswith(b"\n")
                if is_whole and not is_within and len(line) > 1:
                    yield line
                elif not is_within and len(line) > 1:
                    broken.num_lines += 1
                is_within = not is_whole
    except OSError as error:
        broken.files.append(f"{path}: {error.strerror or error}")


def _window_of(line: bytes) -> StepWindow:
    """The step window in a line; ValueError, KeyError or TypeError if the line has none."""
    found: dict[str, Any] = json.loads(line)
    counts: dict[str, Any] = {name: _count(found[name]) for name in _COUNTS}
    begin, end = _number(found["begin"]), _number(found["end"])
    if not _LEAST_TIME < begin <= end < _MOST_TIME:
        raise ValueError("of no time")
    values: dict[str, Any] = {name: _count(found[name]) for name in _LATER_COUNTS if name in found}
    values |= {name: _lengths(found.get(name, {})) for name in _PARTS}
    values |= {name: None if found.get(name) is None else _count(found[name]) for name in SIZES}
    quantiles = tuple(map(_length, found.get("step_seconds", ())[:_NUM_QUANTILES]))
    seconds = _lengths(found["seconds"])
    logged = fitting(found["logged"]) if found.get("logged") else {}
    weights = fitting(found["logged_weights"]) if logged and found.get("logged_weights") else {}
    return StepWindow(
        begin=begin,
        end=end,
        seconds=seconds,
        step_seconds=quantiles,
        logged=logged,
        logged_weights={name: each for name, each in weights.items() if 0 < each < _MOST_COUNT},
        **counts,
        **values,
    )


def _count(value: object) -> int:
    if type(value) is int and 0 <= value < _MOST_COUNT:
        return value
    raise ValueError("no count")


def _number(value: object) -> float:
    if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise ValueError("no number")


def _length(value: object) -> float:
    found = _number(value)
    if not 0 <= found < _MOST_LENGTH:
        raise ValueError("no length of time")
    return found


def _lengths(value: dict[str, Any]) -> dict[str, float]:
    for each in value.values():
        if type(each) not in (int, float) or not 0 <= each < _MOST_LENGTH:  # NaN is neither
            raise ValueError("no length of time")
    return value


# --- where the files of a run lie: one run directory, or those of several nodes below one folder ---------------------

_PROFILE = re.compile(r"profile-(\d{1,7})\.jsonl")
_RANK = re.compile(rb'^.{0,200}?"rank": ?(\d{1,7})\b', re.MULTILINE)
_PIECE_BYTES = 1 << 20
_EVENTS = re.compile(r"events-\d{1,7}\.jsonl")
_JOURNAL = "events-agent.jsonl"
_MOST_FOLDERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlaces:
    """Where the files of a run lie: profiles by rank, events of ranks, and journals of agents."""

    path: Path
    folders: tuple[Path, ...]
    """The run directories, one for each node."""
    profiles: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    """The profiles that have windows of each rank; several where one worker after another had that rank."""
    events: tuple[Path, ...] = ()
    """The files of events that ranks have written."""
    journals: tuple[Path, ...] = ()
    """The files of events that the agents have written, one for each node with an agent."""

    @property
    def num_bytes(self) -> int:
        """The size of all profiles together."""
        return sum(map(_size_of, {each for paths in self.profiles.values() for each in paths}))


def find_places(path: Path) -> RunPlaces:
    """The files of the run at ``path``; ValueError where there is no run, or none with a profile."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the run directory of a job")
    folders = [each for each in _candidates(path) if _has_files(each)]
    if not folders:
        raise ValueError(
            f"{path} holds nothing of a job; give the job's run directory, or the folder that holds the "
            "run directories of its nodes"
        )
    profiles: dict[int, list[Path]] = {}
    events: list[Path] = []
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if _PROFILE.fullmatch(file.name):
                for rank in _ranks_in(file) or {_seat_of(file)}:
                    profiles.setdefault(rank, []).append(file)
            elif _EVENTS.fullmatch(file.name):
                events.append(file)
    journals = [folder / _JOURNAL for folder in folders if (folder / _JOURNAL).exists()]
    if not profiles:
        raise ValueError(
            f"{path} has no profile (profile-<rank>.jsonl): training has not begun, or the profile is switched off"
        )
    return RunPlaces(
        path=path,
        folders=tuple(folders),
        profiles=dict(sorted(profiles.items())),
        events=tuple(events),
        journals=tuple(journals),
    )


def _seat_of(profile: Path) -> int:
    """The number in a profile's name."""
    return int(profile.stem.rpartition("-")[2])


def _ranks_in(profile: Path) -> set[int]:
    """The ranks that a profile's lines name; none where it has no line or cannot be read."""
    found: set[int] = set()
    rest = b""
    try:
        with open_regular(profile) as file:
            while piece := file.read(_PIECE_BYTES):
                lines, _, rest = (rest + piece).rpartition(b"\n")
                found.update(map(int, _RANK.findall(lines)))
                rest = rest[:_MOST_LINE_BYTES]
    except OSError:
        return set()
    return found


def _size_of(path: Path) -> int:
    """The size of a file; 0 where it cannot be told, since who reads the file then names it as left out."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _candidates(path: Path) -> list[Path]:
    """Folders that may be run directories: ``path`` itself, those of its nodes, or those that lie in it."""
    nodes = path / "nodes"
    below = _folders_in(nodes) if nodes.is_dir() else []
    found = [path, *below]
    return found if any(_has_files(each) for each in found) else _folders_in(path)


def _folders_in(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir())[:_MOST_FOLDERS]


def _has_files(folder: Path) -> bool:
    names = (each.name for each in folder.iterdir())
    return any(_PROFILE.fullmatch(name) or _EVENTS.fullmatch(name) or name == _JOURNAL for name in names)


# --- what is known of a rank besides its profile: by its metrics, its census, and its node's calibration -------------

_MOST_METRICS_BYTES = 1 << 16


def rank_view_of(profile: Path, windows: list[StepWindow]) -> RankView | None:
    """The windows of a rank with what else the worker with that ``profile`` has told; None without its metrics."""
    metrics, folder, seat = _metrics_beside(profile), profile.parent, _seat_of(profile)
    if metrics is None:
        return None
    return view_of(
        windows,
        host=metrics.host,
        measures=metrics.measures,
        census=read_census(folder, seat),
        calibration=read_calibration(folder),
        trace=read_trace(folder, seat),
    )


def speeds_of(profile: Path) -> Speeds | None:
    """What computes the tokens per second and MFU of a worker with that ``profile``; None without its metrics.

    A calibration counts only if it is of the worker's own machine.
    """
    metrics = _metrics_beside(profile)
    if metrics is None:
        return None
    best = read_calibration(profile.parent)
    return Speeds(
        num_replicas=metrics.measures.num_replicas,
        census=read_census(profile.parent, _seat_of(profile)),
        best=best if best is not None and best.host == metrics.host else None,
    )


def shown_metrics_of(profile: Path, rank: int) -> dict[str, float]:
    """The metrics that a report shows of a rank, by name, as the worker with that ``profile`` wrote them last.

    Those that it did not write are not there, and none is where it has another rank by now.
    """
    metrics = _metrics_beside(profile)
    measured = {} if metrics is None or metrics.rank != rank else metrics.measures.told()
    found: dict[str, float] = {}
    for name, parts in ON_PAGE.items():
        if measured.get(name) is not None:
            found[name] = max(measured[name], 0)
            found |= {part: min(max(measured[part] or 0, 0), found[name]) for part in parts}
    return found


def _metrics_beside(profile: Path) -> RankMetrics | None:
    """The metrics of the worker that has this ``profile``; None where they cannot be read."""
    file = profile.with_name(f"metrics-{_seat_of(profile)}.json")
    try:
        return RankMetrics.from_json(read_at_most(file, _MOST_METRICS_BYTES).decode())
    except (OSError, ValueError):
        return None


# --- what held a training up, for each config that was in force: verdicts on the windows of all ranks ----------------

_MOST_PERIODS = 24
_MOST_WINDOWS = 64  # of a rank under one config, the last
_Config = tuple[int, int, int, int, int]
View = Callable[[int, list[StepWindow]], RankView]


class Judging:
    """Finds what held a training up under each config, from the windows of all ranks, given one rank after another."""

    def __init__(self) -> None:
        self._windows: dict[_Config, dict[int, deque[StepWindow]]] = {}

    def take(self, rank: int, windows: Iterable[StepWindow]) -> None:
        """Take the windows of a rank, the oldest first; of each config, the last ones are kept."""
        own: dict[_Config, deque[StepWindow]] = {}
        for window in windows:
            if window.num_steps > 0:
                own.setdefault(_config_of(window), deque(maxlen=_MOST_WINDOWS)).append(window)
        for config in sorted(own, key=lambda each: own[each][-1].end)[-_MOST_PERIODS:]:
            self._windows.setdefault(config, {})[rank] = own[config]

    def remarks(self, view: View) -> list[Remark]:
        """What held training up under each config, the oldest first; ``view`` adds what else is known of a rank."""
        found = []
        for by_rank in self._windows.values():
            views = [view(rank, list(windows)) for rank, windows in by_rank.items()]
            judged = verdict(views, is_partial=True)
            if judged.kind != "unknown":
                begin, end = min(each.window.begin for each in views), max(each.window.end for each in views)
                found.append(Remark(begin=begin, end=end, kind=judged.kind, text=judged.text_over_steps))
        return sorted(found)[-_MOST_PERIODS:]


def _config_of(window: StepWindow) -> _Config:
    return window.restart, window.members, window.world_size, window.config_version, window.config_revision


# --- a RunRecord from the files of a run: one rank after another, so that the windows of few are held ----------------

_MOST_EVENTS = 20_000
_MOST_EVENTS_OF_RANK = 500
_MOST_JOB_BYTES = 1 << 20


def gather(places: RunPlaces, training: int | None, advance: Callable[[int], None]) -> RunRecord:
    """The record of a training in the files of a run, by its number from 1 on, or of the last one for None.

    ValueError where there is no such training. ``advance`` is told how many bytes of profiles were read.
    """
    gathering = _Gathering(places, advance)
    gathering.choose(training)
    for rank in places.profiles:
        gathering.take(rank)
    return gathering.record()


@dataclass(slots=True)
class _Chosen:
    """The training that a report is about: which one it is, and what is known of it before ranks are read."""

    number: int
    num_trainings: int
    begin: float
    end: float
    last_process_begin: float
    last_word: float
    history: TrainingHistory
    events: list[JobEvent]
    journals: list[list[JobEvent]]


@dataclass(slots=True)
class _Gathering:
    """The reading of a run's files into one record: ``choose``, then ``take`` for each rank, then ``record``."""

    places: RunPlaces
    advance: Callable[[int], None]
    broken: Broken = field(default_factory=Broken)
    spent: Bins = field(default_factory=lambda: Bins(len(ENTRIES), MOST_BINS))
    """Seconds of all ranks by ledger entry, in intervals of time."""
    ranks: list[RankRecord] = field(default_factory=list)
    logged: dict[str, Bins] = field(default_factory=dict)
    """The weighted sum and the weights of each number that the script has logged, in intervals of time."""
    judging: Judging = field(default_factory=Judging)
    witness: list[Slice] = field(default_factory=list)
    """The slices of the first rank's time, by which the job's steps and samples are counted."""
    witness_speeds: Speeds = field(default_factory=Speeds)
    num_restarts: int = 0
    num_failures: int = 0
    chosen: _Chosen | None = None
    _processes_of_first: list[ProcessProfile] | None = None
    _paths_read: set[Path] = field(default_factory=set)
    _num_shifted: int = 0

    def choose(self, training: int | None) -> None:
        """Find the trainings in the run by its first rank, and choose one, the last for None."""
        first = next(iter(self.places.profiles))
        processes = self._processes(first)
        journals = [self._journal(path) for path in self.places.journals]
        launches = sorted(moment for journal in journals for moment in launches_of(journal))
        begins = trainings_of(processes, launches or None)
        if not begins:
            raise ValueError(f"{self.places.path} has no line of a profile that can be read ({self._broken_words()})")
        number = len(begins) if training is None else training
        if not 1 <= number <= len(begins):
            raise ValueError(f"training {number} is not in {self.places.path}; it has 1 to {len(begins)}")
        begin = begins[number - 1] if number > 1 else float("-inf")
        end = begins[number] if number < len(begins) else float("inf")
        own = processes_within(processes, begin, end)
        events = [event for path in self.places.events for event in self._events(path)]
        self.chosen = _Chosen(
            number=number,
            num_trainings=len(begins),
            begin=begin,
            end=end,
            last_process_begin=own[-1].begin if own else 0.0,
            last_word=last_word(journals, begin, end),
            history=history_of(events, journals, begin, end),
            events=events,
            journals=journals,
        )
        self._processes_of_first = processes

    def take(self, rank: int) -> None:
        """Read the profile of a rank, and add up what it has of the chosen training."""
        assert self.chosen is not None
        processes = self._processes_of_first if self._processes_of_first is not None else self._processes(rank)
        is_first, self._processes_of_first = self._processes_of_first is not None, None
        processes = processes_within(processes, self.chosen.begin, self.chosen.end)
        if not processes:
            return
        is_in_last = processes[-1].end >= self.chosen.last_process_begin
        slices = slices_of(processes, self.chosen.history, until=self.chosen.last_word if is_in_last else 0.0)
        speeds = self._speeds(rank)
        self.ranks.append(rank_record(rank, processes, slices, speeds, self._metrics(rank)))
        self.judging.take(rank, [each.piece.window for each in slices if each.piece is not None])
        self._num_shifted += sum(each.shift_seconds > 0 for each in processes)
        for each in slices:
            self.spent.add(each.begin, each.end, [each.seconds.get(entry, 0.0) for entry in ENTRIES])
            if each.piece is not None:
                self._add_logged(each, each.piece.window)
        if is_first:
            self.witness, self.witness_speeds = slices, speeds
            self.num_restarts = sum(each.is_whole for each in processes[1:])
            found = num_failures_of(self.chosen.journals, self.chosen.begin, self.chosen.end)
            self.num_failures = found or max(each.restart for each in processes)

    def _add_logged(self, piece: Slice, window: StepWindow) -> None:
        """Add up the logged numbers of a window, each with its weight."""
        for name, (value, weight) in window.weighed_logged().items():
            if name in self.logged or len(self.logged) < MOST_NAMES:
                bins = self.logged.setdefault(name, Bins(2, MOST_BINS))
                bins.add(piece.begin, piece.end, (value * weight, weight))

    def record(self) -> RunRecord:
        """The record of the chosen training, once all ranks are read."""
        chosen = self.chosen
        assert chosen is not None
        begin, end = min(each.begin for each in self.ranks), max(each.end for each in self.ranks)
        pieces = [(each.piece, each.piece.window, each.kept) for each in self.witness if each.piece is not None]
        steady = [each for _, each, _ in pieces if each.num_steps and in_step_seconds(each) > 0]
        told = [*chosen.events, *(event for journal in chosen.journals for event in journal)]
        return RunRecord(
            path=str(self.places.path),
            job=self._job(),
            number=chosen.number,
            num_trainings=chosen.num_trainings,
            begin=begin,
            end=end,
            ledger=ledger_of_job([each.ledger for each in self.ranks], [(each.begin, each.end) for each in self.ranks]),
            ranks=tuple(self.ranks),
            first_step=min((each.first_step for each, _, _ in pieces), default=0),
            last_step=pieces[-1][1].step if pieces else 0,
            num_steps_again=round(sum(each.num_steps * (1 - kept) for _, each, kept in pieces)),
            num_samples=round(sum(each.num_samples * kept for _, each, kept in pieces)),
            samples_per_second=spread_of([each.num_samples / in_step_seconds(each) for each in steady]),
            tokens_per_second=spread_of(map(self.witness_speeds.tokens_per_second, steady)),
            step_seconds=spread_of([in_step_seconds(each) / each.num_steps for each in steady]),
            num_restarts=self.num_restarts,
            num_failures=self.num_failures,
            spent=self.spent,
            periods=tuple(
                periods_of(self.witness, within(chosen.events, chosen.begin, chosen.end), self.witness_speeds)
            ),
            worlds=tuple(worlds_of(self.witness, within(told, chosen.begin, chosen.end))),
            happenings=tuple(happenings_of(within(told, chosen.begin, chosen.end))),
            notes=tuple(self._notes()),
            remarks=tuple(self.judging.remarks(self._view)),
            logged=self.logged,
        )

    def _view(self, rank: int, windows: list[StepWindow]) -> RankView:
        for path in self._latest_first(rank):
            if (found := rank_view_of(path, windows)) is not None:
                return found
        return RankView(host="?", window=merged(windows))

    def _speeds(self, rank: int) -> Speeds:
        for path in self._latest_first(rank):
            if (found := speeds_of(path)) is not None:
                return found
        return Speeds()

    def _metrics(self, rank: int) -> Mapping[str, float]:
        """The metrics that a rank's last process has written; empty for a training before the last."""
        assert self.chosen is not None
        if self.chosen.number < self.chosen.num_trainings:
            return {}
        found = (shown_metrics_of(path, rank) for path in self._latest_first(rank))
        return next(filter(None, found), {})

    def _latest_first(self, rank: int) -> list[Path]:
        """The profiles that have windows of a rank, that of the worker that has it now before the others."""

        def has_it_now(path: Path) -> bool:
            metrics = _metrics_beside(path)
            return metrics is not None and metrics.rank == rank

        return sorted(self.places.profiles[rank], key=has_it_now)[::-1]

    def _processes(self, rank: int) -> list[ProcessProfile]:
        found: list[ProcessProfile] = []
        for path in self.places.profiles[rank]:
            is_first = path not in self._paths_read  # a profile of several ranks is read for each
            self._paths_read.add(path)
            broken, advance = (self.broken, self.advance) if is_first else (Broken(), lambda num_bytes: None)
            found += processes_of(windows_in(path, rank, broken, advance))
        return in_order(found)

    def _events(self, path: Path) -> Sequence[JobEvent]:
        is_first = path == self.places.events[0]
        return deque(events_in(path, self.broken), maxlen=_MOST_EVENTS if is_first else _MOST_EVENTS_OF_RANK)

    def _journal(self, path: Path) -> list[JobEvent]:
        return list(deque(events_in(path, self.broken), maxlen=_MOST_EVENTS))

    def _job(self) -> str:
        """The name of the job, from the files of its agents or ranks; empty where none has it."""
        for folder in self.places.folders:
            for file in (folder / "agent.json", *sorted(folder.glob("metrics-*.json"))[:1]):
                try:
                    job = object_of(read_at_most(file, _MOST_JOB_BYTES).decode()).get("job")
                except (OSError, ValueError):
                    continue
                if isinstance(job, str) and job:
                    return job
        return ""

    def _broken_words(self) -> str:
        return f"broken lines: {self.broken.num_lines}" + "".join(f"; {each}" for each in self.broken.files[:3])

    def _notes(self) -> list[str]:
        notes = [f"a file could not be read, and is left out: {each}" for each in self.broken.files]
        if self.broken.num_lines:
            lines = f"{self.broken.num_lines} lines of the run's files"
            notes.append(f"{lines} are broken, or of another version of elastic_ext, and are left out")
        if self._num_shifted:
            notes.append(
                f"a machine's clock was put back before {self._num_shifted} starts of processes: these processes are "
                "shown later than their records say"
            )
        return notes
