"""Every key that a config may hold, as one row: section, type, rule and meaning, and what a tuner has to know of it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast

from elastic_ext.errors import ConfigError, Refusal
from elastic_ext.records.json import MAX_DEPTH, can_be_written, shown
from elastic_ext.strategies import STRATEGIES, strategies_in_words

__all__ = [
    "DLROVERS_VERSIONED",
    "KEYS",
    "SECTIONS",
    "SECTION_TYPES",
    "TORCH",
    "TUNABLE",
    "USER_NAME",
    "USER_RULE",
    "WRITABLE",
    "BlocksOrWhole",
    "Boolean",
    "Bounds",
    "CheckpointSection",
    "CommunicationSection",
    "Cost",
    "DataloaderSection",
    "Integer",
    "Key",
    "KnobBounds",
    "KnobBoundsRule",
    "Number",
    "OneOf",
    "OptimizerSection",
    "OrTorch",
    "ParallelismSection",
    "Rule",
    "Scalar",
    "Schema",
    "Section",
    "Text",
    "TunerKnob",
    "TuningSection",
    "UserValue",
    "UserValueRule",
    "Value",
    "fields_of",
    "key_table",
    "keys_of",
    "nearest",
    "null_refusal",
    "row",
    "section_of",
    "unknown_key_refusal",
    "unquoted",
]


# --- what a single config value may be: each rule checks one value and says in words what it allows ------------------

TORCH = "torch"
"""The word for a setting that is left to torch."""
WRITABLE = "text without unpaired surrogates, for which UTF-8 has no bytes"
"""What the refusal of text says is allowed, where the text given cannot be encoded as UTF-8."""
LARGEST_INTEGER = 2**53 - 1  # what every JSON reader keeps exactly
_MOST_LISTS = MAX_DEPTH - 2  # a user's value lies inside two objects
_MOST_KNOBS_SHOWN = 5
_INITIALS_SIMILARITY = 0.95  # what a name counts for that is the initials of a key, such as "lr" of learning_rate

UserValue: TypeAlias = "bool | int | float | str | tuple[UserValue, ...] | None"
KnobBounds: TypeAlias = tuple[UserValue, ...]
Value: TypeAlias = "UserValue | dict[str, KnobBounds]"
Schema: TypeAlias = "dict[str, Any]"


class Rule(Protocol):
    """Which values a key may have. ``check`` gives the value as it is kept, or raises ValueError.

    The text of that ValueError says what is allowed: it becomes the ``allowed`` of the Refusal.

    ``schema`` says the same as JSON Schema, as far as that has words for it.
    """

    @property
    def allowed(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    def check(self, value: object) -> Value: ...


@dataclass(frozen=True, slots=True)
class Integer:
    """The rule of a key whose value is a whole number, written without a fraction; true and false are not numbers."""

    at_least: int
    at_most: int = LARGEST_INTEGER

    @property
    def allowed(self) -> str:
        upper = "" if self.at_most == LARGEST_INTEGER else f" and <= {self.at_most}"
        return f"an integer >= {self.at_least}{upper}"

    @property
    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.at_least, "maximum": self.at_most}

    def check(self, value: object) -> int:
        if type(value) is int and value > self.at_most:
            raise ValueError(f"an integer >= {self.at_least} and <= {self.at_most}")
        if type(value) is not int or value < self.at_least:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """The rule of a key whose value is a finite number, kept as a float."""

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

    @property
    def schema(self) -> Schema:
        bounds = {"exclusiveMinimum": self.above, "minimum": self.at_least, "maximum": self.at_most}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}

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
    """The rule of a key whose value is true or false."""

    allowed: str = "true or false"

    @property
    def schema(self) -> Schema:
        return {"type": "boolean"}

    def check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """The rule of a key whose value is text of a bounded length."""

    at_most: int = 2000

    @property
    def allowed(self) -> str:
        return f"text of at most {self.at_most} characters"

    @property
    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.at_most}

    def check(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > self.at_most:
            raise ValueError(self.allowed)
        if not can_be_written(value):
            raise ValueError(WRITABLE)
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """The rule of a key whose value is one of a few words; ``listed`` is them in a message, where that says more."""

    words: tuple[str, ...]
    listed: str = ""

    @property
    def allowed(self) -> str:
        return "one of " + (self.listed or ", ".join(f'"{word}"' for word in self.words))

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.words)}

    def check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class BlocksOrWhole:
    """The rule of a key whose value is how many blocks make one unit, or "whole" for the whole model."""

    allowed: str = 'an integer >= 1 (blocks), or "whole"'

    @property
    def schema(self) -> Schema:
        return {"anyOf": [Integer(1).schema, {"const": "whole"}]}

    def check(self, value: object) -> int | str:
        if value == "whole":
            return "whole"
        try:
            return Integer(1).check(value)
        except ValueError:
            raise ValueError(self.allowed) from None


@dataclass(frozen=True, slots=True)
class OrTorch:
    """The rule ``number``, or the word "torch", which leaves the setting to torch's default."""

    number: Rule

    @property
    def allowed(self) -> str:
        return f'{self.number.allowed}, or "{TORCH}"'

    @property
    def schema(self) -> Schema:
        return {"anyOf": [self.number.schema, {"const": TORCH}]}

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

    @property
    def schema(self) -> Schema:
        return {"type": ["null", "boolean", "number", "string", "array"]}

    def check(self, value: object) -> UserValue:
        return self._kept(value, _MOST_LISTS)

    def _kept(self, value: object, num_levels: int) -> UserValue:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not can_be_written(value):
                raise ValueError(WRITABLE)
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
    """What a tuner may choose for one key: two numbers are a range [min, max], any other list holds the choices."""

    value_rule: Rule

    @property
    def allowed(self) -> str:
        return f"[min, max] (two numbers are always that) or a list of choices, each {self.value_rule.allowed}"

    @property
    def schema(self) -> Schema:
        return {"type": "array", "minItems": 1, "items": self.value_rule.schema}

    def check(self, value: object) -> KnobBounds:
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(self.allowed)
        try:
            kept = cast("KnobBounds", tuple(self.value_rule.check(item) for item in value))  # no tunable key has a dict
        except ValueError:
            raise ValueError(self.allowed) from None
        if len(kept) == 2 and _is_number(kept[0]) and _is_number(kept[1]) and kept[0] > kept[1]:  # type: ignore[operator]
            raise ValueError(f"{self.allowed}, the smaller number first")
        return kept


@dataclass(frozen=True, slots=True)
class KnobBoundsRule:
    """The rule of the key ``tuning.knobs``: a JSON object with ``Bounds`` per tunable key; ``rules`` are the keys'."""

    rules: Mapping[str, Rule]
    allowed: str = "an object: per key [min, max] or a list of choices"

    @property
    def schema(self) -> Schema:
        knobs = {
            name: {"description": Bounds(rule).allowed, **Bounds(rule).schema} for name, rule in self.rules.items()
        }
        return {"type": "object", "properties": knobs, "additionalProperties": False}

    def check(self, value: object) -> dict[str, KnobBounds]:
        if not isinstance(value, Mapping):
            raise ValueError(self.allowed)
        kept: dict[str, KnobBounds] = {}
        faults: list[str] = []
        for name, bounds in value.items():
            if len(faults) == _MOST_KNOBS_SHOWN:
                break
            if name not in self.rules:
                told = f'{shown(name)} is not one, the nearest is "{nearest(name, self.rules)}"'
                faults.append(f"the tunable keys that `elastic-ext config schema` lists; {told}")
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

    def similarity(candidate: str) -> float:
        last = candidate.rpartition(".")[2]
        initials = "".join(word[:1] for word in last.split("_"))
        if len(initials) > 1 and given_last.lower() == initials:
            return _INITIALS_SIMILARITY
        whole = difflib.SequenceMatcher(None, given, candidate).ratio()
        return max(whole, difflib.SequenceMatcher(None, given_last, last).ratio())

    return max(known, key=similarity)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- the table of keys: a row for each, in which all of the library reads what it has to know of the key --------------
# The row of a key is where a section has its field, below: the section names it, its type is for a type checker, its
# rule and its words are for everybody, and its knob for a tuner that may choose it. How keys form a value is in
# elastic_config.py.
#
# To the tuner a *knob* is a key that it chooses by itself (TunerKnob); to a script, a value that it reads by name
# (``knob``, in follower.py).

Scalar: TypeAlias = "bool | int | float | str"
Cost: TypeAlias = Literal["nothing", "wrap", "workers", "move"]
"""What a change waits for: for nothing, until units or buckets are made anew, until workers have started, or until
state has moved between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunerKnob:
    """What a tuner has to know of a key that it chooses by itself."""

    words: str
    """The words in which people read a value of this knob, such as "{} workers"."""
    cost: Cost
    choices: tuple[Scalar, ...] = ()
    """Values worth trying where the job lists none of its own; empty where tuner/space.py works them out."""


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table of keys."""

    rule: Rule
    meaning: str
    knob: TunerKnob | None = None
    takes_bounds: bool = False
    """Whether ``tuning.knobs`` may bound this key though it is no knob: without bounds no tuner chooses it."""
    replaces: tuple[str, ...] = ()
    """The keys whose values are not kept where this key is given: those of the start-up config under a file, and those
    of the config in force under a revision."""

    @property
    def is_tunable(self) -> bool:
        """Whether ``tuning.knobs`` may have bounds for this key."""
        return self.takes_bounds or self.knob is not None


def row(
    rule: Rule,
    meaning: str,
    *,
    knob: TunerKnob | None = None,
    takes_bounds: bool = False,
    replaces: tuple[str, ...] = (),
) -> Any:
    """The dataclass field for a key of a section, with the key's row in the table; absent (None) by default."""
    return field(default=None, metadata={"key": Key(rule, meaning, knob, takes_bounds, replaces)})


USER_RULE = UserValueRule()
USER_NAME = Text(200)
_MEBIBYTES = Number(above=0.0, at_most=2.0**20)  # up to a tebibyte, as MOST_MIB in fsdp/plan.py
_UNSHARDED = tuple(name for name, strategy in STRATEGIES.items() if not strategy.is_sharded)


# --- the sections of a config ----------------------------------------------------------------------------------------
# Frozen values whose fields are the rows of the table, and are checked against them when a value is made.


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section's fields, each checked against its row of the table, and kept as its rule keeps it."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        refusals = [*self._keep_fields(), *self._refused_pairs()]
        if refusals:
            raise ConfigError(refusals)

    def _keep_fields(self) -> Iterator[Refusal]:
        """Replace each field by the form in which its rule keeps it; gives why fields are refused."""
        for name, value in fields_of(self):
            if value is None:
                continue
            path = f"{self.section}.{name}"
            try:
                object.__setattr__(self, name, KEYS[path].rule.check(value))
            except ValueError as error:
                yield Refusal(key=path, given=shown(value), allowed=str(error))

    def _refused_pairs(self) -> Iterator[Refusal]:
        return iter(())


def keys_of(kind: type[Section]) -> dict[str, Key]:
    """The rows of a section, by dotted key."""
    return {f"{kind.section}.{each.name}": each.metadata["key"] for each in fields(kind)}


def fields_of(section: Section) -> list[tuple[str, Any]]:
    """The section's fields with their values; its slots are its fields, and quicker to list."""
    names: tuple[str, ...] = section.__slots__
    return [(name, getattr(section, name)) for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataloaderSection(Section):
    """How samples reach the step."""

    section: ClassVar[str] = "dataloader"
    batch_size: int | None = row(
        Integer(1), "samples per micro-batch on one rank", knob=TunerKnob(words="micro-batch {}", cost="nothing")
    )
    num_workers: int | None = row(
        Integer(0, 1024), "worker processes on one rank", knob=TunerKnob(words="{} workers", cost="workers")
    )
    prefetch_factor: int | None = row(
        Integer(1, 1024),
        "batches loaded ahead per worker",
        knob=TunerKnob(words="{} batches ahead per worker", cost="workers", choices=(2, 4, 8)),
    )
    pin_memory: bool | None = row(
        Boolean(),
        "copy batches into page-locked memory",
        knob=TunerKnob(words="pinned memory {}", cost="workers", choices=(False, True)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection(Section):
    """The optimizer's learning rate and weight decay."""

    section: ClassVar[str] = "optimizer"
    learning_rate: float | None = row(
        Number(above=0.0),
        "learning rate of the first parameter group, before the schedule; other groups keep their ratio",
        takes_bounds=True,
    )
    weight_decay: float | None = row(
        Number(at_least=0.0),
        "weight decay of the first parameter group; other groups keep their ratio",
        takes_bounds=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismSection(Section):
    """How training state is spread over ranks."""

    section: ClassVar[str] = "parallelism"
    strategy: str | None = row(
        OneOf(tuple(STRATEGIES), strategies_in_words()),
        "how parameters, gradients and optimizer state are sharded",
        knob=TunerKnob(words="strategy {}", cost="move"),
        replaces=("parallelism.shard_degree",),
    )
    shard_degree: int | None = row(
        Integer(1),
        "ranks that share one copy of the sharded state",
        knob=TunerKnob(words="shard degree {}", cost="move"),
    )
    unit: int | str | None = row(
        BlocksOrWhole(),
        "blocks (parts that the model repeats) per FSDP unit, whose parameters are all-gathered together",
        knob=TunerKnob(words="{} blocks per unit", cost="move", choices=(1, 2, 4)),
    )
    activation_checkpoint: float | None = row(
        Number(at_least=0.0, at_most=1.0),
        "share of blocks whose activations are recomputed",
        knob=TunerKnob(words="{} of activations computed again", cost="wrap", choices=(0.0, 0.25, 0.5, 0.75, 1.0)),
    )
    prefetch: int | str | None = row(
        OrTorch(Integer(0)),
        "units gathered ahead",
        knob=TunerKnob(words="{} units prefetched", cost="wrap", choices=(1, 2)),
    )

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.strategy in _UNSHARDED and type(self.shard_degree) is int and self.shard_degree > 1:
            yield Refusal(
                key="parallelism.shard_degree",
                given=str(self.shard_degree),
                allowed=f"1 or absent with the strategy {self.strategy}",
                advice="choose another strategy or leave shard_degree out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSection(Section):
    """How gradients travel between ranks."""

    section: ClassVar[str] = "communication"
    bucket_cap_mb: float | str | None = row(
        OrTorch(_MEBIBYTES),
        "size of a gradient bucket in MiB",
        knob=TunerKnob(words="{} MiB per DDP bucket", cost="wrap", choices=(1.0, 5.0, 25.0, 100.0)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(Section):
    """When state is saved."""

    section: ClassVar[str] = "checkpoint"
    steps: int | None = row(
        Integer(1), "save every so many steps; not together with epochs", replaces=("checkpoint.epochs",)
    )
    epochs: int | None = row(
        Integer(1), "save every so many epochs; not together with steps", replaces=("checkpoint.steps",)
    )
    now: bool | None = row(Boolean(), "save once for each version that holds it")

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.steps is not None and self.epochs is not None:
            yield Refusal(
                key="checkpoint",
                given=f"both steps {shown(self.steps)} and epochs {shown(self.epochs)}",
                allowed="one of steps and epochs",
                advice="leave one out",
            )


_OF_THE_WHOLE: Mapping[str, Key] = {
    "version": Key(Integer(1), "which whole config this is; a newer one has a higher version"),
    "reason": Key(Text(), "why, for whoever reads the log"),
    "apply_at_step": Key(Integer(0), "the first step that runs under this version, a step to come"),
    "global_batch_size": Key(Integer(1), "samples per step over all ranks", takes_bounds=True),
}
"""Keys outside of sections: they are fields of ElasticConfig."""
_TUNABLE: Mapping[str, Key] = {
    path: key
    for keys in (
        _OF_THE_WHOLE,
        *map(keys_of, (DataloaderSection, OptimizerSection, ParallelismSection, CommunicationSection)),
    )
    for path, key in keys.items()
    if key.is_tunable
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSection(Section):
    """What the tuner may do, and within which bounds."""

    section: ClassVar[str] = "tuning"
    mode: str | None = row(
        OneOf(("off", "advise", "auto")),
        "whether the tuner decides nothing, only says what it would change, or changes the config; absent: `--tuning`",
    )
    knobs: Mapping[str, KnobBounds] | None = row(
        KnobBoundsRule({path: key.rule for path, key in _TUNABLE.items()}), "what the tuner may choose from, by key"
    )
    headroom: float | None = row(Number(at_least=0.0, at_most=0.5), "share of memory to leave free; absent: 0.06")
    memory_bytes: int | None = row(Integer(1), "device memory that one rank may use; absent: all of it")
    probe_steps: int | None = row(Integer(1), "steps measured per trial; absent: 3")
    probe_budget: float | None = row(
        Number(at_least=0.0, at_most=1.0), "share of training's time that trials may cost; absent: 0.1"
    )
    goal: float | None = row(
        Number(above=0.0), "stop tuning at this many samples per second; absent: as many as possible"
    )


SECTION_TYPES: tuple[type[Section], ...] = (
    DataloaderSection,
    OptimizerSection,
    ParallelismSection,
    CommunicationSection,
    CheckpointSection,
    TuningSection,
)
KEYS: Mapping[str, Key] = {
    **_OF_THE_WHOLE,
    **{path: key for kind in SECTION_TYPES for path, key in keys_of(kind).items()},
}
"""The whole table of keys, by dotted key."""
DLROVERS_VERSIONED = ("dataloader", "optimizer")
"""The sections into which DLRover writes a version of their own; it is accepted, and not used."""
TUNABLE = tuple(_TUNABLE)
"""The keys that a tuner may be given bounds for."""
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
"""The sections that ``section_of`` gives, in the order in which a change is applied."""


# --- what is asked of the table ---------------------------------------------------------------------------------------


def section_of(path: str) -> str:
    """The section that a dotted key belongs to; a key without a dot is a section of its own."""
    return path.partition(".")[0]


def key_table() -> str:
    """The table of keys as Markdown, for the documents."""
    rows = ["| key | allowed | meaning |", "|---|---|---|"]
    rows += [f"| `{path}` | {key.rule.allowed} | {key.meaning} |" for path, key in KEYS.items()]
    rows.append(f"| `user.<name>` | {USER_RULE.allowed} | names of your own, read with `knob(name, default)` |")
    return "\n".join(rows) + "\n"


def null_refusal(path: str) -> Refusal:
    """Why a known key may not have the value null."""
    advice = "leave the key out"
    if path not in ("reason", "apply_at_step"):
        advice += " for its start-up value, or that of a checkpoint resumed from"
    return Refusal(key=path, given="null", allowed=KEYS[path].rule.allowed, advice=advice)


def unquoted(text: str, limit: int = 80) -> str:
    """``text`` as ``shown`` gives it, without the quotes around it."""
    return shown(text, limit)[1:-1]


def unknown_key_refusal(path: str, *, searched: bool = True) -> Refusal:
    """Why a key that is not in the table is refused.

    With ``searched`` it names the nearest known key, which takes a while where a file holds thousands of such keys.
    """
    shown_path = unquoted(path)
    advice = f'the nearest is "{nearest(path, tuple(KEYS))}"; a name of your own goes under "user"' if searched else ""
    allowed = "the keys that `elastic-ext config schema` lists"
    return Refusal(key=shown_path, given="not a known key", allowed=allowed, advice=advice)
