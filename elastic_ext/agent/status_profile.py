"""ProfileStatus: where the time of a job's ranks on this node goes, by what they have written: pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.profile.breakdown import RankView
from elastic_ext.profile.reader import NodeProfiles, Windows, present_windows, rounds_of, view_of
from elastic_ext.profile.stragglers import Straggler, Stragglers, local_times
from elastic_ext.profile.summary import flops_share
from elastic_ext.profile.verdict import Verdict, verdict
from elastic_ext.records.metrics import RankMetrics

__all__ = ["ProfileStatus", "profile_of"]

_SECONDS = 60.0
_NUM_ROUNDS = 3
"""Nobody is named who was slow in fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus:
    """Of the last minute in which steps were taken, or of the last window, where that is longer."""

    verdict: Verdict
    stragglers: tuple[Straggler, ...]
    """Those of this node, the slowest first."""
    mfu: float | None
    """Which part of what its device can do at best the model did, in a rank in the middle; None where not known."""


def profile_of(profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]) -> ProfileStatus | None:
    """What the profiles of these ranks say; None if they say nothing."""
    windows = {rank: row for rank, row in profiles.windows.items() if rank in metrics}
    present = present_windows(windows, seconds=_SECONDS)
    if not present:
        return None
    world_size = max(row[-1].world_size for row in present.values())
    views = _views(present, profiles, metrics)
    return ProfileStatus(
        verdict=verdict(views, is_partial=world_size > len(metrics)),
        stragglers=_stragglers(windows, profiles, metrics),
        mfu=_mfu(views, metrics),
    )


def _views(rows: Windows, profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]) -> list[RankView]:
    return [
        view_of(
            row,
            host=metrics[rank].host,
            measures=metrics[rank].measures,
            census=profiles.censuses.get(rank),
            calibration=profiles.calibration,
            trace=profiles.traces.get(rank),
        )
        for rank, row in rows.items()
    ]


def _stragglers(windows: Windows, profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]) -> tuple[Straggler, ...]:
    """Those who were slow in each of the last rounds, however long these are."""
    rounds, found = Stragglers(), list[Straggler]()
    for each in rounds_of(present_windows(windows, seconds=math.inf), _NUM_ROUNDS):
        views = _views({rank: (window,) for rank, window in each.items()}, profiles, metrics)
        found = rounds.see(local_times(views))
    return tuple(found)


def _mfu(views: Sequence[RankView], metrics: Mapping[int, RankMetrics]) -> float | None:
    shares = [
        flops_share(view.window, view.census, view.calibration, num_replicas=metrics[view.rank].measures.num_replicas)
        for view in views
    ]
    known = [each for each in shares if each is not None]
    return statistics.median_low(known) if known else None
