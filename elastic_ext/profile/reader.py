"""What the ranks of this node have written of their time, read from the end of their files, in bounded time.

A line that is broken, or of a version that is not known, is passed over. Which of what was read counts is decided in
pure functions.

A *seat* is the number by which a worker's files are named: its rank, as long as members do not change. What a worker's
rank is now, its windows tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from elastic_ext.records.files import open_regular, read_at_most
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepTrace, StepWindow

from .breakdown import RankView, merged, replicas_of
from .phases import Phase

__all__ = [
    "NodeProfiles",
    "WindowsByRank",
    "present_windows",
    "profile_file",
    "profiled_seats",
    "read_calibration",
    "read_census",
    "read_profiles",
    "read_trace",
    "rounds_of",
    "tail_of",
    "tails_of",
    "view_of",
]

_PROFILE = re.compile(r"profile-(\d{1,9})\.jsonl")
_LINE_BYTES = 1536  # of a line with all phases, about
_MOST_BYTES = 1 << 18  # of the end of a file
_MOST_RECORD_BYTES = 1 << 16
_LEAST_STEPS = 3  # of a round
_MOST = 1e18  # of anything that is counted or timed

WindowsByRank = Mapping[int, Sequence[StepWindow]]
"""Profile windows by rank, the oldest first."""
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProfiles:
    """The profiles that the ranks of a node have written, by rank: windows, censuses, traces; and its calibration."""

    windows: WindowsByRank = field(default_factory=dict)
    censuses: Mapping[int, StepCensus] = field(default_factory=dict)
    """What a step asks of its machine, by rank."""
    calibration: NodeCalibration | None = None
    traces: Mapping[int, StepTrace] = field(default_factory=dict)
    """A traced step, by rank."""


# ---- files ----


def profiled_seats(folder: Path) -> list[int]:
    """The seats whose profiles lie in a run directory; OSError where it cannot be read."""
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _PROFILE.fullmatch(name)))


def profile_file(folder: Path, seat: int) -> Path:
    """The file with a worker's profile in a run directory."""
    return folder / f"profile-{seat}.jsonl"


def tail_of(path: Path, num_windows: int) -> tuple[StepWindow, ...]:
    """The last windows of one profile file, at most so many; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            lines = _last_lines(file, num_windows)
    except OSError:
        return ()
    found = (_window_in(line) for line in lines)
    return tuple(each for each in found if each is not None)


def _last_lines(file: IO[bytes], number: int) -> list[bytes]:
    """The last whole lines of a file, at most so many, and no more than ``_MOST_BYTES`` hold."""
    end, size = file.seek(0, os.SEEK_END), number * _LINE_BYTES
    while True:
        size = min(size, end, _MOST_BYTES)
        file.seek(end - size)
        lines = file.read(size).split(b"\n")[:-1]  # what has no end yet is still being written
        if size < end:
            lines = lines[1:]  # of the first one the beginning is missing
        if len(lines) >= number or size in (end, _MOST_BYTES):
            return lines[-number:]
        size *= 2  # lines are longer than most, as with many logged numbers


def tails_of(folder: Path, seats: Iterable[int], num_windows: int) -> dict[int, tuple[StepWindow, ...]]:
    """The last windows of the workers in these seats, by the rank that each has now, which its last window tells.

    Windows from before a worker had that rank are left out.
    """
    return {rank: windows for rank, (_, windows) in _tails_by_rank(folder, seats, num_windows).items()}


def _tails_by_rank(
    folder: Path, seats: Iterable[int], num_windows: int
) -> dict[int, tuple[int, tuple[StepWindow, ...]]]:
    """By rank, the seat of the worker that has the rank now, and its last windows, chosen as ``tails_of`` does.

    A file without windows counts for the rank of the same number. Of two files of one rank that with the newer windows
    counts: the other's worker has gone.
    """
    found: dict[int, tuple[int, tuple[StepWindow, ...]]] = {}
    for seat in seats:
        windows = tail_of(profile_file(folder, seat), num_windows)
        rank = windows[-1].rank if windows else seat
        told = found.get(rank, (seat, ()))[1]
        if not told or (windows and windows[-1].end > told[-1].end):
            found[rank] = seat, _last_of(rank, windows)
    return found


def _last_of(rank: int, windows: tuple[StepWindow, ...]) -> tuple[StepWindow, ...]:
    """The last of these windows that are one rank's without another's between them."""
    others = [number for number, window in enumerate(windows) if window.rank != rank]
    return windows[others[-1] + 1 :] if others else windows


def read_profiles(folder: Path, seats: Sequence[int], *, num_windows: int) -> NodeProfiles:
    """What the workers in these seats have written of their time, by the rank that each has now."""
    tails = _tails_by_rank(folder, seats, num_windows)
    censuses = {rank: read_census(folder, seat) for rank, (seat, _) in tails.items()}
    traces = {rank: read_trace(folder, seat) for rank, (seat, _) in tails.items()}
    return NodeProfiles(
        windows={rank: windows for rank, (_, windows) in tails.items()},
        censuses={rank: each for rank, each in censuses.items() if each is not None},
        calibration=read_calibration(folder) if seats else None,
        traces={rank: each for rank, each in traces.items() if each is not None},
    )


def read_census(folder: Path, seat: int) -> StepCensus | None:
    """What a step of the worker in this seat asks of its machine, if that was counted."""
    return _read(folder / f"census-{seat}.json", StepCensus.from_json)


def read_trace(folder: Path, seat: int) -> StepTrace | None:
    """What torch's profiler saw of a step of the worker in this seat, if one was traced."""
    return _read(folder / f"trace-{seat}.json", StepTrace.from_json)


def read_calibration(folder: Path) -> NodeCalibration | None:
    """What the machine does at best, if that was measured."""
    return _read(folder / "calibration.json", NodeCalibration.from_json)


def _read(path: Path, parse: Callable[[str], _Record]) -> _Record | None:
    try:
        return parse(read_at_most(path, _MOST_RECORD_BYTES).decode())
    except (OSError, ValueError):
        return None


def _window_in(line: bytes) -> StepWindow | None:
    try:
        window = StepWindow.from_json(line.decode())
    except ValueError:
        return None
    counts = (window.num_steps, window.num_samples, window.num_tokens, window.num_bytes, window.num_detailed)
    numbers = (window.begin, window.end, *counts, *window.seconds.values(), *window.typical.values())
    return window if all(0 <= each <= _MOST for each in numbers) else None


# ---- which of them count ----


def present_windows(windows: WindowsByRank, *, seconds: float, since: float = 0.0) -> dict[int, tuple[StepWindow, ...]]:
    """The latest windows of the present processes, by rank, all under one config.

    They are those that ended less than ``seconds`` before the newest window did, or a rank's last one where none has.
    Windows without steps are left out. ``since`` is when the processes were started, where that is known; what their
    files say of it counts besides. The config is the newest that all of them have told of; where there is none, that of
    the newest window, and ranks that have not told of it are left out.
    """
    began = max([since, *(each.end for row in windows.values() for each in row if _is_startup(each))])
    rows = {rank: [each for each in row if each.num_steps > 0 and each.end > began] for rank, row in windows.items()}
    newest = max((each for row in rows.values() for each in row), key=lambda each: each.end, default=None)
    if newest is None:
        return {}
    job = _job_of(newest)
    rows = {rank: [each for each in row if _job_of(each) == job] for rank, row in rows.items()}
    rows = {rank: row for rank, row in rows.items() if row}
    config = _common_config(rows, newest)
    found = {}
    for rank, row in rows.items():
        of_config = [each for each in row if _config_of(each) == config]
        last = [each for each in of_config if each.end > newest.end - seconds] or of_config[-1:]
        if last:
            found[rank] = tuple(last)
    return found


def rounds_of(windows: WindowsByRank, num_rounds: int) -> list[dict[int, StepWindow]]:
    """The last rounds of these ranks, the oldest first: a round has one window, of a few steps, of each rank.

    The windows of each rank are to be of one config, as ``present_windows`` gives them.
    """
    by_rank = {rank: _grouped(row)[-num_rounds:] for rank, row in windows.items()}
    num_common = min((len(each) for each in by_rank.values()), default=0)
    return [
        {rank: groups[len(groups) - num_common + number] for rank, groups in by_rank.items()}
        for number in range(num_common)
    ]


def view_of(
    windows: Sequence[StepWindow],
    *,
    host: str,
    measures: Measures,
    census: StepCensus | None = None,
    calibration: NodeCalibration | None = None,
    trace: StepTrace | None = None,
) -> RankView:
    """A rank's RankView, from its windows under one config and from its metrics."""
    window = merged(windows)
    told = measures.num_micro_steps
    num_micro_steps = told if told is not None and 0 < told <= _MOST else 1
    micro_batch = None
    if window.num_samples > 0 and window.num_steps > 0:
        num_replicas = replicas_of(window, measures.num_replicas)
        micro_batch = round(window.num_samples / window.num_steps / num_replicas / num_micro_steps) or None
    return RankView(
        host=host,
        window=window,
        census=census,
        calibration=calibration if calibration is not None and calibration.host == host else None,
        num_workers=measures.num_workers,
        num_processors=measures.num_processors,
        micro_batch=micro_batch,
        num_micro_steps=num_micro_steps,
        waits_in_passes=measures.waits_in_passes,
        trace=trace if measures.waits_in_passes else None,
    )


def _is_startup(window: StepWindow) -> bool:
    """Whether a window is the first one of its process, which ends where the first step begins."""
    return window.num_steps == 0 and Phase.STARTUP.label in window.seconds


def _job_of(window: StepWindow) -> tuple[int, int, int]:
    """What is the same in all windows of the processes that train together."""
    return window.restart, window.members, window.world_size


def _config_of(window: StepWindow) -> tuple[int, int]:
    return window.config_version, window.config_revision


def _common_config(rows: WindowsByRank, newest: StepWindow) -> tuple[int, int]:
    common = set.intersection(*({_config_of(each) for each in row} for row in rows.values()))
    return max(common, default=_config_of(newest))


def _grouped(row: Sequence[StepWindow]) -> list[StepWindow]:
    """Windows with neighbours merged where they have too few steps, beginning with the last."""
    found: list[StepWindow] = []
    group: list[StepWindow] = []
    for window in reversed(row):
        group.append(window)
        if sum(each.num_steps for each in group) >= _LEAST_STEPS:
            found.append(merged(group))
            group = []
    return found[::-1]
