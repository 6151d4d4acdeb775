"""What is known of a rank besides its profile: by its metrics, its census, and its node's calibration."""

from __future__ import annotations

from pathlib import Path

from elastic_ext.profile.breakdown import RankView
from elastic_ext.profile.reader import read_calibration, read_census, read_trace, view_of
from elastic_ext.records.files import read_at_most
from elastic_ext.records.metrics import RankMetrics, StepWindow

from .speeds import Speeds

__all__ = ["known_of", "not_finite_of", "speeds_of"]

_MOST_JSON_BYTES = 1 << 16


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


def not_finite_of(folder: Path, rank: int) -> tuple[int, int] | None:
    """Steps that were not finite since the rank's last process began, and those left out; None where nobody says."""
    metrics = _metrics_of(folder, rank)
    if metrics is None or metrics.measures.num_not_finite is None:
        return None
    number = max(metrics.measures.num_not_finite, 0)
    return number, min(max(metrics.measures.num_skipped or 0, 0), number)


def _metrics_of(folder: Path, rank: int) -> RankMetrics | None:
    try:
        return RankMetrics.from_json(read_at_most(folder / f"metrics-{rank}.json", _MOST_JSON_BYTES).decode())
    except (OSError, ValueError):
        return None
