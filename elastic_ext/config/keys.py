"""Every key that a config may hold: its rule, its section and its meaning. The documentation prints this table."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.json import MAX_DEPTH, can_be_written, shown

__all__ = [
    "KEYS",
    "REPLACES",
    "SECTIONS",
    "SECTION_TYPES",
    "TORCH",
    "TUNABLE",
    "USER_NAME",
    "USER_RULE",
    "BlocksOrWhole",
    "Boolean",
    "Bounds",
    "CheckpointSection",
    "CommunicationSection",
    "DataloaderSection",
    "Integer",
    "Key",
    "KnobBounds",
    "KnobRules",
    "Number",
    "OneOf",
    "OptimizerSection",
    "OrTorch",
    "ParallelismSection",
    "Rule",
    "Section",
    "Text",
    "TuningSection",
    "UserValue",
    "UserValueRule",
    "Value",
    "fields_of",
    "key_table",
    "nearest",
    "null_value",
    "section_of",
    "unknown_key",
]


# --- what a single config value may be: each rule checks one value and says in words what it allows ------------------

TORCH = "torch"
"""The word for a setting that is left to torch."""
LARGEST_INTEGER = 2**53 - 1  # what every JSON reader keeps exactly
_MOST_LISTS = MAX_DEPTH - 2  # a user's value lies inside two objects
_MOST_KNOBS_SHOWN = 5
_SURE = 0.95  # as like as that are names with the same initials

UserValue: TypeAlias = "bool | int | float | str | tuple[UserValue, ...] | None"
KnobBounds: TypeAlias = tuple[UserValue, ...]
Value: TypeAlias = "UserValue | dict[str, KnobBounds]"


class Rule(Protocol):
    """One value's rule. ``check`` gives the value as it is kept; ValueError means that it is not allowed."""

    @property
    def allowed(self) -> str: ...

    def check(self, value: object) -> Value: ...


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number, written without a fraction; true and false are not numbers."""

    at_least: int
    at_most: int = LARGEST_INTEGER

    @property
    def allowed(self) -> str:
        upper = "" if self.at_most == LARGEST_INTEGER else f" and <= {self.at_most}"
        return f"an integer >= {self.at_least}{upper}"

    def check(self, value: object) -> int:
        if type(value) is int and value > self.at_most:
            raise ValueError(f"an integer >= {self.at_least} and <= {self.at_most}")
        if type(value) is not int or value < self.at_least:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, kept as a float."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def allowed(self) -> str:
        bounds = [
            f"> {self.above:g}" if self.above is not None else "",
            f">= {self.at_least:g}" if self.at_least is not None else "",
            f"<= {self.at_most:.12g}" if self.at_most is not None else "",
        ]
        return "a number " + " and ".join(bound for bound in bounds if bound)

    def check(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(self.allowed)
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(self.allowed) from None
        inside = (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
        )
        if not inside:
            raise ValueError(self.allowed)
        return number


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false."""

    allowed: str = "true or false"

    def check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a bounded length."""

    at_most: int = 2000

    @property
    def allowed(self) -> str:
        return f"text of at most {self.at_most} characters"

    def check(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > self.at_most or not can_be_written(value):
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """The rule of a key whose value is one of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{word}"' for word in self.words)

    def check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class BlocksOrWhole:
    """How many blocks make one unit, or the whole model."""

    allowed: str = 'an integer >= 1 (blocks), or "whole"'

    def check(self, value: object) -> int | str:
        if value == "whole":
            return "whole"
        try:
            return Integer(1).check(value)
        except ValueError:
            raise ValueError(self.allowed) from None


@dataclass(frozen=True, slots=True)
class OrTorch:
    """What another rule allows, or the word that leaves it to torch, as where a script says nothing."""

    number: Rule

    @property
    def allowed(self) -> str:
        return f'{self.number.allowed}, or "{TORCH}"'

    def check(self, value: object) -> Value:
        if value == TORCH:
            return TORCH
        try:
            return self.number.check(value)
        except ValueError:
            raise ValueError(self.allowed) from None


@dataclass(frozen=True, slots=True)
class UserValueRule:
    """A JSON scalar or a list of such values; lists are kept as tuples, so that nobody changes them in place."""

    allowed: str = "a JSON scalar or a list of scalars or lists"

    def check(self, value: object) -> UserValue:
        return self._kept(value, _MOST_LISTS)

    def _kept(self, value: object, num_levels: int) -> UserValue:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not can_be_written(value):
                raise ValueError("text of whole Unicode characters")
            return value
        if isinstance(value, int):
            if abs(value) > LARGEST_INTEGER:
                raise ValueError(f"integers of at most {LARGEST_INTEGER} in size")
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError("finite numbers")
            return value
        if isinstance(value, (list, tuple)):
            if num_levels == 0:
                raise ValueError(f"lists in lists, at most {_MOST_LISTS} deep")
            return tuple([self._kept(item, num_levels - 1) for item in value])
        raise ValueError(self.allowed)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a tuner may choose for one knob: two numbers are a range [min, max], any other list holds the choices."""

    knob: Rule

    @property
    def allowed(self) -> str:
        return f"[min, max] or a list of choices, each {self.knob.allowed}"

    def check(self, value: object) -> KnobBounds:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(self.allowed)
        try:
            choices = tuple(self.knob.check(item) for item in value)
        except ValueError:
            raise ValueError(self.allowed) from None
        kept = tuple(choice for choice in choices if not isinstance(choice, dict))
        if len(kept) == 2 and _is_number(kept[0]) and _is_number(kept[1]) and kept[0] > kept[1]:  # type: ignore[operator]
            raise ValueError(f"{self.allowed}, the smaller number first")
        return kept


@dataclass(frozen=True, slots=True)
class KnobRules:
    """An object that gives bounds for some of the knobs in ``rules``."""

    rules: Mapping[str, Rule]
    allowed: str = "an object: per knob [min, max] or a list of choices"

    def check(self, value: object) -> dict[str, KnobBounds]:
        if not isinstance(value, Mapping):
            raise ValueError(self.allowed)
        kept: dict[str, KnobBounds] = {}
        faults: list[str] = []
        for name, bounds in value.items():
            if len(faults) == _MOST_KNOBS_SHOWN:
                break
            if name not in self.rules:
                faults.append(f'known knobs; {shown(name)} is none, the nearest is "{nearest(name, self.rules)}"')
                continue
            try:
                kept[name] = Bounds(self.rules[name]).check(bounds)
            except ValueError as error:
                faults.append(f'for "{name}" {error}')
        if faults:
            raise ValueError("; ".join(faults))
        return kept


def nearest(name: str, known: Iterable[str]) -> str:
    """The known dotted name most like ``name``: as a whole, by its last part, or by that part's initials."""
    given = str(name)[:100]
    given_last = given.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        last = candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in last.split("_"))
        if len(initials) > 1 and given_last.lower() == initials:
            return _SURE
        whole = difflib.SequenceMatcher(None, given, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, given_last, last).ratio())

    return max(known, key=likeness)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- the table of keys: every key that a config may hold, what it may be, what it means ------------------------------
# The documents print it.
#
# How keys form a value is in elastic_config.py; what a single value may be is said by the rules above.


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table of keys."""

    path: str
    rule: Rule
    meaning: str


_MEBIBYTES = Number(above=0.0, at_most=2.0**20)  # as plans have it: more cannot be counted in bytes
_STRATEGIES = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard")

_TUNABLE = (
    Key("global_batch_size", Integer(1), "samples per step over all ranks"),
    Key("dataloader.batch_size", Integer(1), "samples per micro-batch on one rank"),
    Key("dataloader.num_workers", Integer(0, 1024), "worker processes on one rank"),
    Key("dataloader.prefetch_factor", Integer(1), "batches loaded ahead per worker"),
    Key("dataloader.pin_memory", Boolean(), "copy batches into page-locked memory"),
    Key("optimizer.learning_rate", Number(above=0.0), "the first group's base rate; other groups keep their ratio"),
    Key("optimizer.weight_decay", Number(at_least=0.0), "the first group's base value; others keep their ratio"),
    Key("parallelism.strategy", OneOf(_STRATEGIES), "how parameters, gradients and optimizer state are sharded"),
    Key("parallelism.shard_degree", Integer(1), "ranks that share one copy of the sharded state"),
    Key("parallelism.unit", BlocksOrWhole(), "what is gathered at once"),
    Key("parallelism.activation_checkpoint", Number(at_least=0.0, at_most=1.0), "share of blocks recomputed"),
    Key("parallelism.prefetch", OrTorch(Integer(0)), "units gathered ahead"),
    Key("communication.bucket_cap_mb", OrTorch(_MEBIBYTES), "size of a gradient bucket in MiB"),
)
TUNABLE = tuple(key.path for key in _TUNABLE)
"""What a tuner may be given bounds for."""
KEYS: Mapping[str, Key] = {
    key.path: key
    for key in (
        Key("version", Integer(1), "which whole config this is; a newer one has a higher version"),
        Key("reason", Text(), "why, for whoever reads the log"),
        Key("apply_at_step", Integer(0), "the first step that runs under this version, a step to come"),
        *_TUNABLE,
        Key("checkpoint.steps", Integer(1), "save every so many steps; not together with epochs"),
        Key("checkpoint.epochs", Integer(1), "save every so many epochs; not together with steps"),
        Key("checkpoint.now", Boolean(), "save once, for the version that introduces it"),
        Key("tuning.mode", OneOf(("off", "advise", "auto")), "what the tuner may do"),
        Key("tuning.knobs", KnobRules({key.path: key.rule for key in _TUNABLE}), "what the tuner may choose from"),
        Key("tuning.headroom", Number(at_least=0.0, at_most=0.5), "share of memory to leave free"),
        Key("tuning.memory_bytes", Integer(1), "memory that a rank may take of its device, where not all there is"),
        Key("tuning.probe_steps", Integer(1), "steps measured per trial"),
        Key("tuning.probe_budget", Number(at_least=0.0, at_most=1.0), "share of training's time that trials may cost"),
        Key("tuning.goal", Number(above=0.0), "samples per second that are enough, where not as many as there can be"),
    )
}
USER_RULE = UserValueRule()
USER_NAME = Text(200)

# Giving the key on the left takes the start-up values of those on the right out of force.
REPLACES: Mapping[str, tuple[str, ...]] = {
    "checkpoint.steps": ("checkpoint.epochs",),
    "checkpoint.epochs": ("checkpoint.steps",),
    "parallelism.strategy": ("parallelism.shard_degree",),
}
# What ``section_of`` can answer, in the order in which a change is applied.
SECTIONS = (
    "communication",
    "parallelism",
    "global_batch_size",
    "dataloader",
    "optimizer",
    "checkpoint",
    "tuning",
    "user",
)


def section_of(path: str) -> str:
    """The section that a dotted key belongs to; a key without a dot is a section of its own."""
    return path.partition(".")[0]


def key_table() -> str:
    """The table of keys as Markdown, for the documents."""
    rows = ["| key | allowed | meaning |", "|---|---|---|"]
    for key in KEYS.values():
        rows.append(f"| `{key.path}` | {key.rule.allowed} | {key.meaning} |")
    rows.append(f"| `user.<name>` | {USER_RULE.allowed} | names of your own, read with `knob(name, default)` |")
    return "\n".join(rows) + "\n"


def null_value(path: str) -> Refusal:
    return Refusal(
        key=path, given="null", allowed=KEYS[path].rule.allowed, advice="leave the key out for its start-up value"
    )


def unknown_key(path: str, *, searched: bool = True) -> Refusal:
    """``searched`` looks for the nearest known key, which takes a while where a file holds thousands."""
    shown_path = shown(path)[1:-1]
    advice = f'the nearest is "{nearest(path, tuple(KEYS))}"; a name of your own goes under "user"' if searched else ""
    return Refusal(key=shown_path, given="not a known key", allowed="the keys of the table", advice=advice)


# --- the sections of a config ----------------------------------------------------------------------------------------
# The sections of a config: frozen values whose fields are checked against the table of keys when they are made.


class Section:
    """A section's fields, each checked against its row of the table."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        refusals = [*self._refused_fields(), *self._refused_pairs()]
        if refusals:
            raise ConfigError(refusals)

    def _refused_fields(self) -> Iterator[Refusal]:
        for name, value in fields_of(self):
            if value is None:
                continue
            path = f"{self.section}.{name}" if self.section else name
            try:
                object.__setattr__(self, name, KEYS[path].rule.check(value))
            except ValueError as error:
                yield Refusal(key=path, given=shown(value), allowed=str(error))

    def _refused_pairs(self) -> Iterator[Refusal]:
        return iter(())


def fields_of(section: Section) -> list[tuple[str, Any]]:
    """The section's fields with their values; its slots are its fields, and quicker to list."""
    names: tuple[str, ...] = section.__slots__
    return [(name, getattr(section, name)) for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataloaderSection(Section):
    """How samples reach the step."""

    section: ClassVar[str] = "dataloader"
    batch_size: int | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection(Section):
    """What the optimizer multiplies with."""

    section: ClassVar[str] = "optimizer"
    learning_rate: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismSection(Section):
    """How training state is spread over ranks."""

    section: ClassVar[str] = "parallelism"
    strategy: str | None = None
    shard_degree: int | None = None
    unit: int | str | None = None
    activation_checkpoint: float | None = None
    prefetch: int | str | None = None

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.strategy == "no_shard" and type(self.shard_degree) is int and self.shard_degree > 1:
            yield Refusal(
                key="parallelism.shard_degree",
                given=str(self.shard_degree),
                allowed="1 or absent with the strategy no_shard",
                advice="choose another strategy or leave shard_degree out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSection(Section):
    """How gradients travel."""

    section: ClassVar[str] = "communication"
    bucket_cap_mb: float | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(Section):
    """When state is saved."""

    section: ClassVar[str] = "checkpoint"
    steps: int | None = None
    epochs: int | None = None
    now: bool | None = None

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.steps is not None and self.epochs is not None:
            yield Refusal(
                key="checkpoint",
                given=f"both steps {shown(self.steps)} and epochs {shown(self.epochs)}",
                allowed="one of steps and epochs",
                advice="leave one out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSection(Section):
    """What the tuner may do, and within which bounds."""

    section: ClassVar[str] = "tuning"
    mode: str | None = None
    knobs: Mapping[str, KnobBounds] | None = None
    headroom: float | None = None
    memory_bytes: int | None = None
    probe_steps: int | None = None
    probe_budget: float | None = None
    goal: float | None = None


SECTION_TYPES: tuple[type[Section], ...] = (
    DataloaderSection,
    OptimizerSection,
    ParallelismSection,
    CommunicationSection,
    CheckpointSection,
    TuningSection,
)
