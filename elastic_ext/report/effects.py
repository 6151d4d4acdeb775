"""What config versions have done to speed: the windows under each, compared with those under the one before: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.profile.ledger import Slice
from elastic_ext.profile.phases import IN_STEPS, LEAST_SECONDS
from elastic_ext.records.metrics import JobEvent, StepWindow

from .speeds import Speeds

__all__ = ["Period", "Spread", "in_step_seconds", "periods_of", "spread_of"]

_LABELS = frozenset(phase.label for phase in IN_STEPS)
_LEAST_WINDOWS = 3
_MOST_WINDOWS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A number in the middle of several, and those at a quarter and three quarters."""

    low: float
    middle: float
    high: float
    count: int

    def is_apart(self, other: Spread) -> bool:
        """Whether the middle halves of both lie beside each other."""
        return self.low > other.high or self.high < other.low

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {"low": self.low, "median": self.middle, "high": self.high, "windows": self.count}


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """The time for which one config was in force."""

    version: int
    revision: int
    begin: float
    end: float
    num_steps: int
    text: str
    """What came into force; empty where nobody has told."""
    samples_per_second: Spread | None
    """In steps, of all ranks together."""
    step_seconds: Spread | None
    tokens_per_second: Spread | None = None
    """Over the time of training, as the next."""
    mfu: Spread | None = None

    @property
    def name(self) -> str:
        return f"{self.version}.{self.revision}" if self.revision else str(self.version)

    def compared_with(self, before: Period | None) -> str:
        """The effect on speed, in words."""
        if before is None:
            return "the first"
        is_by_samples = self.samples_per_second is not None and before.samples_per_second is not None
        mine = self.samples_per_second if is_by_samples else self.step_seconds
        its = before.samples_per_second if is_by_samples else before.step_seconds
        if mine is None or its is None or min(mine.count, its.count) < _LEAST_WINDOWS or its.middle <= 0:
            return "too short to tell"
        ratio = mine.middle / its.middle if is_by_samples else its.middle / max(mine.middle, 1e-12)
        words = f"{abs(ratio - 1):.1%} {'faster' if ratio >= 1 else 'slower'}"
        return words if mine.is_apart(its) else f"no clear change ({words}, within the spread)"

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "version": self.version,
            "revision": self.revision,
            "begin": self.begin,
            "end": self.end,
            "steps": self.num_steps,
            "text": self.text,
            "samples_per_second": self.samples_per_second and self.samples_per_second.to_dict(),
            "step_seconds": self.step_seconds and self.step_seconds.to_dict(),
            "tokens_per_second": self.tokens_per_second and self.tokens_per_second.to_dict(),
            "mfu": self.mfu and self.mfu.to_dict(),
        }


def periods_of(slices: Iterable[Slice], events: Sequence[JobEvent], speeds: Speeds) -> list[Period]:
    """Which config was in force when, by one rank's time and all ranks' events."""
    groups: list[list[Slice]] = []
    for each in slices:
        if each.piece is None or each.piece.window.num_steps == 0:
            continue
        if not groups or _config_of(groups[-1][-1]) != _config_of(each):
            groups.append([])
        groups[-1].append(each)
    applied = [each for each in events if each.kind == "config-applied"]
    return [_period(group, applied, speeds) for group in groups]


def in_step_seconds(window: StepWindow) -> float:
    """How long a window's steps took, without what comes between them."""
    found = sum(spent for label, spent in window.seconds.items() if label in _LABELS)
    return found if found >= LEAST_SECONDS else 0.0


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Of those that are known; None of nothing."""
    ordered = sorted(each for each in values if each is not None)
    if not ordered:
        return None
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return Spread(low=low, middle=middle, high=high, count=len(ordered))


def _config_of(each: Slice) -> tuple[int, int]:
    assert each.piece is not None
    return each.piece.window.config_version, each.piece.window.config_revision


def _period(group: Sequence[Slice], applied: Sequence[JobEvent], speeds: Speeds) -> Period:
    version, revision = _config_of(group[0])
    begin, end = group[0].begin, group[-1].end
    windows = [each.piece.window for each in group[-_MOST_WINDOWS:] if each.piece is not None]
    steady = [each for each in windows if in_step_seconds(each) > 0]
    told = [each for each in applied if _is_of(each.details, version, revision) and each.time <= end]
    return Period(
        version=version,
        revision=revision,
        begin=begin,
        end=end,
        num_steps=sum(each.piece.window.num_steps for each in group if each.piece is not None),
        text=max(told, key=lambda each: each.time).text if told else "",
        samples_per_second=spread_of([each.num_samples / in_step_seconds(each) for each in steady if each.num_samples]),
        step_seconds=spread_of([in_step_seconds(each) / each.num_steps for each in steady]),
        tokens_per_second=spread_of(map(speeds.tokens_per_second, steady)),
        mfu=spread_of(map(speeds.mfu, steady)),
    )


def _is_of(details: Mapping[str, object], version: int, revision: int) -> bool:
    return details.get("version") == version and details.get("revision", 0) == revision
