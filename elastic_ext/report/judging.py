"""What held a training up, for each config that was in force: verdicts on the windows of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from elastic_ext.profile.breakdown import RankView
from elastic_ext.profile.verdict import verdict
from elastic_ext.records.metrics import StepWindow

from .record import Remark

__all__ = ["Judging"]

_MOST_PERIODS = 24
_MOST_WINDOWS = 64  # of a rank under one config, the last
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


def _config_of(window: StepWindow) -> _Config:
    return window.restart, window.world_size, window.config_version, window.config_revision
