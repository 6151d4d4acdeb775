"""A RankRecord from a rank's lives: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic_ext.profile.ledger import Life, Slice, ledger_of_slices
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.summary import training_seconds
from elastic_ext.records.metrics import StepWindow

from .bins import Bins
from .effects import in_step_seconds, spread_of
from .record import RankRecord, RankSums
from .speeds import Speeds

__all__ = ["MOST_BINS", "busy_seconds", "rank_record"]

MOST_BINS = 512
_BUSY = frozenset(
    phase.label for phase in (Phase.DATA, Phase.TRANSFER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
)


def busy_seconds(window: StepWindow) -> float | None:
    """What a step would have taken if the rank had waited for no other; None where none was looked at."""
    found = sum(spent for label, spent in window.typical.items() if label in _BUSY)
    return found if found > 0 else None


def rank_record(
    rank: int,
    lives: Sequence[Life],
    slices: Sequence[Slice],
    speeds: Speeds,
    not_finite: tuple[int, int] | None = None,
) -> RankRecord:
    """What is shown of a rank, whose time ``slices`` are, and whose last process told of steps ``not_finite``."""
    windows = [each.piece.window for each in slices if each.piece is not None]
    bins = Bins(len(RankSums._fields), MOST_BINS)
    steps: list[float] = []
    busy: list[float] = []
    for each in slices:
        if each.piece is None:
            continue
        sums = _sums(each.piece.window, each.end - each.begin, speeds)
        bins.add(each.begin, each.end, sums)
        if sums.num_steps and sums.step_seconds > 0:
            steps.append(sums.step_seconds / sums.num_steps)
        if sums.num_looked_at > 0:
            busy.append(sums.busy_seconds / sums.num_looked_at)
    return RankRecord(
        rank=rank,
        begin=slices[0].begin,
        end=slices[-1].end,
        ledger=ledger_of_slices(slices),
        num_processes=max(sum(each.is_whole for each in lives), 1),
        num_steps=sum(each.num_steps for each in windows),
        step_seconds=spread_of(steps),
        busy_seconds=spread_of(busy),
        mfu=spread_of(map(speeds.mfu, windows)),
        most_host_bytes=_most(each.memory_bytes for each in windows),
        most_accelerator_bytes=_most(each.accelerator_peak_bytes or each.accelerator_bytes for each in windows),
        not_finite=not_finite,
        bins=bins,
    )


def _sums(window: StepWindow, length: float, speeds: Speeds) -> RankSums:
    busy = busy_seconds(window)
    weight = float(window.num_steps) if busy is not None else 0.0
    return RankSums(
        num_steps=window.num_steps,
        num_samples=window.num_samples,
        step_seconds=in_step_seconds(window),
        num_looked_at=weight,
        busy_seconds=weight * (busy or 0.0),
        num_tokens=speeds.num_tokens(window),
        training_seconds=training_seconds(window),
        ideal_seconds=speeds.ideal_seconds(window),
        known_seconds=length,
        host_byte_seconds=length * (window.memory_bytes or 0),
        accelerator_byte_seconds=length * (window.accelerator_bytes or 0),
        peak_byte_seconds=length * (window.accelerator_peak_bytes or 0),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)
