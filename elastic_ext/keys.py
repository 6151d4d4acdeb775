"""The table of keys: every key that a config may hold, what it may be, what it means. The documents print it.

How keys form a value is in config.py; what a single value may be is in rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import Refusal
from .records.json import shown
from .rules import BlocksOrWhole, Boolean, Choice, Integer, Knobs, Number, OrTorch, Rule, Text, UserValueRule, nearest

__all__ = [
    "KEYS",
    "REPLACES",
    "SECTIONS",
    "TUNABLE",
    "USER_NAME",
    "USER_RULE",
    "Key",
    "key_table",
    "null_value",
    "section_of",
    "unknown_key",
]


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
    Key("parallelism.strategy", Choice(_STRATEGIES), "how parameters, gradients and optimizer state are sharded"),
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
        Key("tuning.mode", Choice(("off", "advise", "auto")), "what the tuner may do"),
        Key("tuning.knobs", Knobs({key.path: key.rule for key in _TUNABLE}), "what the tuner may choose from"),
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
