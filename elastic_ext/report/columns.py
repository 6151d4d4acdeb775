"""The columns in which drawings over time show a training: the job's bins and the ranks', all of one width. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic_ext.profile.ledger import ENTRIES, Entry

from .record import RankRecord, RankSums, RunRecord

__all__ = ["Column", "Columns", "columns_of", "middle"]

_MOST = 240
_MOST_CELLS = 20_000
_LEAST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """An interval of time."""

    begin: float
    end: float
    shares: dict[Entry, float]
    """Of the time of all ranks; they add up to 1."""
    sums: dict[int, RankSums]
    """By rank, of those that wrote something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Intervals of equal width, one after another; those in which nothing was known are left out."""

    width: float
    columns: tuple[Column, ...]

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)


def columns_of(record: RunRecord, *, cells: bool) -> Columns:
    """Of a training; with ``cells`` so few that each rank can have one in each. The record's bins are widened."""
    num_columns = max(min(_MOST, _MOST_CELLS // max(len(record.ranks), 1)), _LEAST) if cells else _MOST
    width = max((record.end - record.begin) / num_columns, 1e-9)
    record.spent.widen(width)
    for rank in record.ranks:
        record.spent.widen(rank.bins.width)
    for rank in record.ranks:
        rank.bins.widen(record.spent.width)
    return Columns(width=record.spent.width, columns=tuple(_columns(record, record.ranks)))


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    if not values:
        return None
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _columns(record: RunRecord, ranks: Sequence[RankRecord]) -> Iterator[Column]:
    of_ranks: dict[float, dict[int, RankSums]] = {}
    for rank in ranks:
        for begin, row in rank.bins.items():
            of_ranks.setdefault(begin, {})[rank.rank] = RankSums(*row)
    for begin, row in record.spent.items():
        total = sum(row)
        if total > 0:
            yield Column(
                begin=max(begin, record.begin),
                end=min(begin + record.spent.width, record.end),
                shares={entry: value / total for entry, value in zip(ENTRIES, row, strict=True) if value > 0},
                sums=of_ranks.get(begin, {}),
            )
