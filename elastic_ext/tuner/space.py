"""The knobs of a job, what each may be, and what a point of them makes of a step. Pure."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

from elastic_ext.config.keys import KEYS as ALL_KEYS
from elastic_ext.config.keys import TORCH, Cost, KnobBounds, TunerKnob, TuningSection
from elastic_ext.records.metrics import JobFacts
from elastic_ext.strategies import STRATEGIES, Sharding

__all__ = [
    "KEYS",
    "KNOBS",
    "MOST_POINTS",
    "Point",
    "Shape",
    "Space",
    "Value",
    "knobs_of_cost",
    "micro_batches_of",
    "point_of",
    "shape_of",
    "space_of",
    "values_of",
]


# --- what a tuner chooses from: the knobs of one job, what each may be, and the points that these make ---------------
# A point says what every knob is. A knob that the job cannot change, or that a person has left no choice in, has one
# choice, so that all points agree on it. Knobs that make no difference beside others have one choice there: workers'
# batches ahead without workers, units of a model that is not sharded. A rank's *share* (``facts.share``) is the samples
# of a step on the rank that has most.

Value: TypeAlias = int | float | str | bool | None
"""The value of a knob. None: the config leaves the key out, and torch or the library chooses; TORCH (config/keys.py):
the config says that torch chooses."""
Choices: TypeAlias = Mapping[str, Sequence[Value]]
"""The values that each knob may have, by field of a point."""
MOST_POINTS = 20_000
"""Points that a search space has at most; choices are left out where there would be more."""

KEYS: Mapping[str, str] = {path.rpartition(".")[2]: path for path, key in ALL_KEYS.items() if key.knob is not None}
"""The config key of each field of a point."""
KNOBS: Mapping[str, TunerKnob] = {
    path.rpartition(".")[2]: key.knob for path, key in ALL_KEYS.items() if key.knob is not None
}
"""The knob of each field of a point, from the table of config keys."""

if TYPE_CHECKING:
    from typing_extensions import Self

    class Point(tuple[Value, ...]):
        """One way to train: the value of each knob, in the order of the table of keys; None where a config has none."""

        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, *values: Value, **named: Value) -> Self: ...
        def __getattr__(self, name: str) -> Value: ...
        def _replace(self, **named: Value) -> Self: ...
        def _asdict(self) -> dict[str, Value]: ...

else:
    Point = namedtuple("Point", KEYS, defaults=[None] * len(KEYS))


def knobs_of_cost(*costs: Cost) -> Callable[[Point], tuple[Value, ...]]:
    """A function that gives the values of those knobs of a point that cost one of ``costs`` to change."""
    return itemgetter(*(at for at, knob in enumerate(KNOBS.values()) if knob.cost in costs))


_SHARDED_ONLY = ("unit", "prefetch")
_UNSHARDED_ONLY = ("bucket_cap_mb",)
_BUCKET_MB = 25.0  # DDP's default
_PREFETCH_FACTOR = 2  # DataLoader's default
_GATHERED_AHEAD = 1  # fully_shard's own prefetching: the next unit
_LEAST_BLOCKS = 3
"""In a model of fewer blocks there is next to nothing to prefetch, and ``prefetch`` has one choice."""
_BY_ITSELF: Mapping[str, Value] = {
    "prefetch_factor": _PREFETCH_FACTOR,
    "unit": 1,
    "prefetch": _GATHERED_AHEAD,
    "bucket_cap_mb": _BUCKET_MB,
}
"""The value that torch or the library uses for a knob that a config leaves out, by field of a point."""
_RELATIVE_NUM_CHOICES: Mapping[str, float] = {
    "batch_size": 4,
    "strategy": 4,
    "num_workers": 3,
    "shard_degree": 3,
    "activation_checkpoint": 2,
    "prefetch": 0.2,
}
"""How many choices a knob keeps when a search space with too many points is thinned, relative to a knob that is not
listed here: batch_size four times as many, prefetch a fifth."""


@dataclass(frozen=True, slots=True)
class Space:
    """The points that a job may train at, each once, the present one among them; equal facts give an equal order."""

    present: Point
    points: tuple[Point, ...]
    choices: Mapping[str, tuple[Value, ...]]
    """The values that each field of a point may have, numbers in ascending order; points of a strategy without shard
    degree have None for that."""

    @property
    def is_open(self) -> bool:
        """Whether there is more than one point to choose from."""
        return len(self.points) > 1


def space_of(facts: JobFacts, tuning: TuningSection) -> Space:
    """The search space of a job, within what ``tuning`` allows."""
    present = point_of(facts.values)
    bounds = dict(tuning.knobs or {})
    choices = {name: _choices(name, getattr(present, name), facts, bounds.get(key)) for name, key in KEYS.items()}
    while _num_points(choices, present) > MOST_POINTS:
        _thin(choices, present)
    points = list(dict.fromkeys(_points(choices, present)))
    if present not in points:
        points.insert(0, present)
    return Space(present=present, points=tuple(points), choices=choices)


def micro_batches_of(facts: JobFacts, tuning: TuningSection) -> tuple[Value, ...]:
    """The micro-batch sizes that a job may have, the present size among them."""
    name = "batch_size"
    return _choices(name, point_of(facts.values).batch_size, facts, dict(tuning.knobs or {}).get(KEYS[name]))


def point_of(values: Mapping[str, Any]) -> Point:
    """The point that ``values``, by config key, amount to."""
    return Point(*(values.get(key) for key in KEYS.values()))


def values_of(point: Point, before: Point) -> dict[str, Value]:
    """The values to set, by config key, to come from ``before`` to ``point``; None for a key that is to be left out."""
    return {KEYS[name]: new for name, new, old in zip(Point._fields, point, before, strict=True) if new != old}


# ---- what a knob may be ----


def _choices(name: str, present: Value, facts: JobFacts, bounds: KnobBounds | None) -> tuple[Value, ...]:
    """The values that one knob may have, the present one among them.

    That is the present value alone where the job cannot change the knob; else what the job lists, or the usual values
    where it lists none; and what ``_within`` makes of either by ``bounds``.
    """
    key = KEYS[name]
    if key not in facts.choices:
        return (present,)
    possible = tuple(facts.choices[key] or _usual(name, present, facts))
    if present in (None, TORCH) and not facts.choices[key]:  # the number that is the default would change nothing
        possible = tuple(each for each in possible if each != _BY_ITSELF.get(name, present))
    if bounds is not None:
        possible = _within(bounds, possible, is_listed=bool(facts.choices[key]))
    found = list(dict.fromkeys(_in_order((*possible, present))))
    return tuple(found)


def _usual(name: str, present: Value, facts: JobFacts) -> Iterable[Value]:
    """The values at which a knob is worth trying, where the job itself lists none."""
    choices = KNOBS[name].choices
    match name:
        case "batch_size":
            # a rank's share, cut into 1, 2, 3, 4, 6, ... micro-batches
            return sorted({-(-facts.share // parts) for parts in _round_numbers(facts.share)})
        case "num_workers":
            return (0, *_round_numbers(max(2 * facts.num_processors, 8)))
        case "shard_degree":
            return [each for each in range(2, facts.world_size) if facts.world_size % each == 0]
        case "unit":
            return [each for each in choices if _is_number(each) and each <= max(facts.num_blocks, 1)]
        case "pin_memory" if facts.device == "cpu":
            return (present,)
        case "prefetch" if facts.num_blocks < _LEAST_BLOCKS:
            return (present,)
        case "activation_checkpoint" if facts.num_blocks < 1:
            return (present,)
    return choices or (present,)


def _round_numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... as far as these are below ``most``, and ``most`` itself."""
    powers = itertools.takewhile(lambda each: each <= most, (2**exponent for exponent in itertools.count()))
    found = {each for power in powers for each in (power, 3 * power // 2) if each <= most}
    return sorted({*found, most})


def _within(bounds: KnobBounds, possible: Sequence[Value], *, is_listed: bool) -> tuple[Value, ...]:
    """The values of a knob that a person's bounds allow: two numbers are a range, anything else is a list of values.

    A list takes the place of ``possible``: ranks refuse what they cannot do, and say why. Of ``possible``, a range
    leaves what lies inside; its ends are choices as well, unless ``possible`` is what the job itself lists.
    """
    if not _is_range(bounds):
        return tuple(each for each in bounds if not isinstance(each, tuple))  # UserValue allows tuples, no knob does
    low, high = (each for each in bounds if _is_number(each))
    inside = [each for each in possible if _is_number(each) and low <= each <= high]
    return tuple(inside) if is_listed else (low, *inside, high)


def _is_range(bounds: KnobBounds) -> bool:
    return len(bounds) == 2 and all(_is_number(each) for each in bounds)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _in_order(values: Iterable[Value]) -> list[Value]:
    """The values in order: first those that are no numbers, as they came, then numbers in ascending order."""
    found = list(values)
    numbers = sorted((each for each in found if _is_number(each)), key=float)
    return [each for each in found if not _is_number(each)] + numbers


# ---- points ----


def _points(choices: Choices, present: Point) -> Iterator[Point]:
    for regime in _regimes(choices, present):
        yield from (Point(*values) for values in itertools.product(*regime.values()))


def _num_points(choices: Choices, present: Point) -> int:
    """The number of points that the choices make, at most: points that occur twice are counted twice."""
    return sum(math.prod(map(len, regime.values())) for regime in _regimes(choices, present))


def _regimes(choices: Choices, present: Point) -> Iterator[dict[str, Sequence[Value]]]:
    """The choices by strategy, with workers and without: knobs that make no difference there keep the present value."""
    for strategy, has_workers in itertools.product(choices["strategy"], (False, True)):
        workers = [each for each in choices["num_workers"] if bool(each) is has_workers]
        if not workers:
            continue
        idle = _UNSHARDED_ONLY if _sharding(strategy).is_sharded else _SHARDED_ONLY
        regime = {**choices, **{name: (getattr(present, name),) for name in idle}}
        regime.update(strategy=(strategy,), num_workers=workers)
        if not has_workers:
            regime["prefetch_factor"] = (present.prefetch_factor,)
        if not _sharding(strategy).has_degree:
            regime["shard_degree"] = (present.shard_degree if strategy == present.strategy else None,)
        elif not _sharding(present.strategy).has_degree:  # that is where None is from; this strategy has a degree
            regime["shard_degree"] = [each for each in choices["shard_degree"] if each is not None]
        yield regime


def _thin(choices: dict[str, tuple[Value, ...]], present: Point) -> None:
    """Halve the choices of the knob that has most of them, relative to what ``_RELATIVE_NUM_CHOICES`` grants that knob.

    The knob's first, last and present values stay; where it has no others, the present value alone stays.
    """
    several = [each for each in choices if len(choices[each]) > 1]
    name = max(several, key=lambda each: len(choices[each]) / _RELATIVE_NUM_CHOICES.get(each, 1))
    values = choices[name]
    now, last = getattr(present, name), len(values) - 1
    kept = [each for at, each in enumerate(values) if at % 2 == 0 or at == last or each == now]
    choices[name] = tuple(kept) if len(kept) < len(values) else (now,)


# --- a point as numbers: what it makes of a step, and of where the model lies ----------------------------------------
# What a point leaves to torch or to the library is here what these do by themselves.

_UNSAID = "no_shard"
"""The strategy of a point that says none."""
_KNOBS_OF_A_SHAPE = frozenset(
    {
        "batch_size",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "strategy",
        "shard_degree",
        "unit",
        "activation_checkpoint",
        "prefetch",
        "bucket_cap_mb",
    }
)
"""Knobs that a field of ``Shape`` stands for."""
_OTHERS = tuple(at for at, name in enumerate(KEYS) if name not in _KNOBS_OF_A_SHAPE)  # places of the others in a point


class Shape(NamedTuple):
    """How a step runs at one point, on the rank that has most samples: micro-steps, workers, sharding, prefetching."""

    micro_batch: int
    num_micro_steps: int
    num_workers: int
    prefetch_factor: int
    """Batches that each worker loads ahead; 0 without workers."""
    is_pinned: bool
    strategy: str
    shard_degree: int
    """Ranks that one copy of the model is sharded over; 1 where each rank has a whole copy."""
    unit: int
    """Blocks whose parameters are gathered at once; 0 where the model is not sharded."""
    activation_checkpoint: float
    """Share of blocks whose activations are computed again in the backward pass."""
    units_ahead: int
    """Units that are prefetched: gathered before they are needed; 0 where the model is not sharded."""
    bucket_bytes: int
    """Size of DDP's gradient buckets; 0 where the model is sharded."""
    others: tuple[Value, ...]
    """Values of all knobs that no other field has; their effect on a step is learnt from measured steps alone."""

    @property
    def is_sharded(self) -> bool:
        """Whether the strategy gathers parameters before they are used, even where there is one rank alone."""
        return self.unit > 0


def shape_of(point: Point, facts: JobFacts) -> Shape:
    """What ``point`` makes of a step in this job."""
    micro_batch = min(max(_count(point.batch_size, facts.share), 1), facts.share)
    unit = _unit(point.unit, facts.num_blocks)
    num_workers = _count(point.num_workers, 0)
    is_sharded = _sharding(point.strategy).is_sharded
    return Shape(
        micro_batch=micro_batch,
        num_micro_steps=math.ceil(facts.share / micro_batch),
        num_workers=num_workers,
        prefetch_factor=_count(point.prefetch_factor, _PREFETCH_FACTOR) if num_workers else 0,
        is_pinned=bool(point.pin_memory),
        strategy=str(point.strategy or _UNSAID),
        shard_degree=_degree(point, facts),
        unit=unit if is_sharded else 0,
        activation_checkpoint=_number(point.activation_checkpoint, 0.0),
        units_ahead=_ahead(point.prefetch, unit, facts.num_blocks) if is_sharded else 0,
        bucket_bytes=0 if is_sharded else int(_number(point.bucket_cap_mb, _BUCKET_MB) * 2**20),
        others=tuple([point[at] for at in _OTHERS]),
    )


def _sharding(strategy: Value) -> Sharding:
    """What a strategy does with the state of a model."""
    return STRATEGIES[str(strategy or _UNSAID)]


def _degree(point: Point, facts: JobFacts) -> int:
    if not _sharding(point.strategy).is_sharded:
        return 1
    if _sharding(point.strategy).has_degree:
        return _count(point.shard_degree, min(facts.num_local, facts.world_size))
    return facts.world_size


def _unit(unit: Value, num_blocks: int) -> int:
    whole = max(num_blocks, 1)
    return min(_count(unit, whole if unit == "whole" else 1), whole)


def _ahead(prefetch: Value, unit: int, num_blocks: int) -> int:
    """Units to prefetch, no more than the model has units."""
    return min(_count(prefetch, _GATHERED_AHEAD), max(math.ceil(num_blocks / max(unit, 1)), _GATHERED_AHEAD))


def _count(value: Value, otherwise: int) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def _number(value: Value, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise
