"""RunRecord: all that a report shows of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ext.profile.ledger import Ledger

from .bins import Bins
from .effects import Period, Spread
from .happenings import Happening

__all__ = ["RankRecord", "RankSums", "Remark", "RunRecord"]


class RankSums(NamedTuple):
    """What is summed up of a rank in each interval of its bins, in this order."""

    num_steps: float
    num_samples: float
    """Of all ranks together."""
    step_seconds: float
    """That these steps took,"""
    num_looked_at: float
    busy_seconds: float
    """... and, of those that were looked at closely, what they would have taken without waiting for other ranks."""
    num_tokens: float
    """Of all ranks together, as far as this one tells,"""
    training_seconds: float
    """... in so long, checkpoints and changes included;"""
    ideal_seconds: float
    """... in which its device, at its best, would have done the arithmetic; 0 where that is not known."""
    known_seconds: float
    host_byte_seconds: float
    accelerator_byte_seconds: float
    peak_byte_seconds: float


class Remark(NamedTuple):
    """A sentence about a part of a training, such as what has held it up."""

    begin: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank."""

    rank: int
    begin: float
    end: float
    ledger: Ledger
    num_processes: int
    num_steps: int
    step_seconds: Spread | None
    """Of its windows."""
    busy_seconds: Spread | None
    """A step without waiting for other ranks."""
    mfu: Spread | None
    """The part that the model did of what its device could have done at best; of its windows."""
    most_host_bytes: int | None
    most_accelerator_bytes: int | None
    not_finite: tuple[int, int] | None
    """Steps that were not finite since its last process began, and those of them that were left out."""
    bins: Bins
    """Of ``RankSums``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A training, as far as its files tell."""

    path: str
    job: str
    number: int
    """Which training in this run directory, from 1 on,"""
    num_trainings: int
    """... of how many."""
    begin: float
    end: float
    ledger: Ledger
    ranks: tuple[RankRecord, ...]
    first_step: int
    last_step: int
    num_steps_again: int
    """Steps that came to nothing and were taken again."""
    num_samples: int
    """Of steps that did not."""
    samples_per_second: Spread | None
    tokens_per_second: Spread | None
    """Of all ranks together, over the time of training; None where samples are no rows of tokens."""
    step_seconds: Spread | None
    num_restarts: int
    num_failures: int
    spent: Bins
    """Seconds of all ranks by ledger entry."""
    periods: tuple[Period, ...]
    happenings: tuple[Happening, ...]
    notes: tuple[str, ...]
    """What could not be read, or was made sense of."""
    remarks: Sequence[Remark] = ()

    @property
    def mfu(self) -> Spread | None:
        """That of the rank in the middle."""
        known = sorted((each.mfu for each in self.ranks if each.mfu is not None), key=lambda each: each.middle)
        return known[(len(known) - 1) // 2] if known else None

    @property
    def not_finite(self) -> tuple[int, int]:
        """Those of the rank that has seen the most."""
        return max((each.not_finite for each in self.ranks if each.not_finite is not None), default=(0, 0))

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "path": self.path,
            "job": self.job,
            "training": self.number,
            "trainings": self.num_trainings,
            "begin": self.begin,
            "end": self.end,
            "wall_seconds": self.ledger.wall_seconds,
            "goodput": self.ledger.goodput,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "steps_again": self.num_steps_again,
            "samples": self.num_samples,
            "samples_per_second": self.samples_per_second and self.samples_per_second.to_dict(),
            "tokens_per_second": self.tokens_per_second and self.tokens_per_second.to_dict(),
            "mfu": self.mfu and self.mfu.to_dict(),
            "step_seconds": self.step_seconds and self.step_seconds.to_dict(),
            "restarts": self.num_restarts,
            "failures": self.num_failures,
            "steps_not_finite": self.not_finite[0],
            "steps_skipped": self.not_finite[1],
            "ledger": self.ledger.to_dict(),
            "ranks": [_of_rank(each) for each in self.ranks],
            "config": [
                {**each.to_dict(), "effect": each.compared_with(before)}
                for before, each in zip((None, *self.periods), self.periods, strict=False)
            ],
            "events": [each.to_dict() for each in self.happenings],
            "verdicts": [each._asdict() for each in self.remarks],
            "notes": list(self.notes),
        }


def _of_rank(rank: RankRecord) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "begin": rank.begin,
        "end": rank.end,
        "processes": rank.num_processes,
        "steps": rank.num_steps,
        "step_seconds": rank.step_seconds and rank.step_seconds.to_dict(),
        "busy_seconds": rank.busy_seconds and rank.busy_seconds.to_dict(),
        "mfu": rank.mfu and rank.mfu.to_dict(),
        "most_host_bytes": rank.most_host_bytes,
        "most_accelerator_bytes": rank.most_accelerator_bytes,
        "steps_not_finite": None if rank.not_finite is None else rank.not_finite[0],
        "steps_skipped": None if rank.not_finite is None else rank.not_finite[1],
        "ledger": rank.ledger.to_dict(),
    }
