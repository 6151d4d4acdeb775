"""What held a training up, for each config that was in force: verdicts on the windows of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from elastic_ext.files import read_at_most
from elastic_ext.metrics import RankMetrics, StepWindow
from elastic_ext.profile.bottleneck import verdict
from elastic_ext.profile.reading import read_calibration, read_census, read_trace, view_of
from elastic_ext.profile.weighed import RankView

from .record import Remark
from .speeds import Speeds

__all__ = ["Judging", "known_of", "speeds_of"]

_MOST_PERIODS = 24
_MOST_WINDOWS = 64  # of a rank under one config, the last
_MOST_JSON_BYTES = 1 << 16
_Config = tuple[int, int, int, int]
View = Callable[[int, list[StepWindow]], RankView]


class Judging:
    """Takes the windows of one rank after another."""

    def __init__(self) -> None:
        self._windows: dict[_Config, dict[int, deque[StepWindow]]] = {}

    def take(self, rank: int, windows: Iterable[StepWindow]) -> None:
        """Those of a rank, the oldest first."""
        own: dict[_Config, deque[StepWindow]] = {}
        for window in windows:
            if window.num_steps > 0:
                own.setdefault(_config_of(window), deque(maxlen=_MOST_WINDOWS)).append(window)
        for config in sorted(own, key=lambda each: own[each][-1].end)[-_MOST_PERIODS:]:
            self._windows.setdefault(config, {})[rank] = own[config]

    def remarks(self, view: View) -> list[Remark]:
        """A sentence for each config, the oldest first; ``view`` gives what else is known of a rank."""
        found = []
        for by_rank in self._windows.values():
            views = [view(rank, list(windows)) for rank, windows in by_rank.items()]
            judged = verdict(views, is_partial=True)
            if judged.kind != "unknown":
                begin, end = min(each.window.begin for each in views), max(each.window.end for each in views)
                found.append(Remark(begin=begin, end=end, kind=judged.kind, text=judged.text))
        return sorted(found)[-_MOST_PERIODS:]


def known_of(folder: Path, rank: int, windows: list[StepWindow]) -> RankView | None:
    """A rank, with what else lies in its run directory; None where nobody says on which machine it was."""
    metrics = _metrics_of(folder, rank)
    if metrics is None:
        return None
    return view_of(
        windows,
        host=metrics.host,
        measures=metrics.measures,
        census=read_census(folder, rank),
        calibration=read_calibration(folder),
        trace=read_trace(folder, rank),
    )


def speeds_of(folder: Path, rank: int) -> Speeds | None:
    """What has to be known of a rank to tell of tokens and arithmetic; None where nobody says on which machine it was.

    Another machine's calibration says nothing of it.
    """
    metrics = _metrics_of(folder, rank)
    if metrics is None:
        return None
    best = read_calibration(folder)
    return Speeds(
        num_replicas=metrics.measures.num_replicas,
        census=read_census(folder, rank),
        best=best if best is not None and best.host == metrics.host else None,
    )


def _metrics_of(folder: Path, rank: int) -> RankMetrics | None:
    try:
        return RankMetrics.from_json(read_at_most(folder / f"metrics-{rank}.json", _MOST_JSON_BYTES).decode())
    except (OSError, ValueError):
        return None


def _config_of(window: StepWindow) -> _Config:
    return window.restart, window.world_size, window.config_version, window.config_revision
