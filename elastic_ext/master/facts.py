"""The check of JobFacts that come over the wire, which a broken or hostile process may have sent. Pure.

What each fact is stands in records/metrics.py. What a newer version of the library has added is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from elastic_ext.config.keys import KEYS
from elastic_ext.records.metrics import JobFacts, MemoryFacts
from elastic_ext.records.text import on_one_line

__all__ = ["MOST_FACTS", "checked_facts"]

MOST_FACTS = 256 << 10
"""The most characters of a job's facts as JSON."""
_MOST_RANKS = 1 << 24
_MOST_COUNT = 2**53
_MOST_CHOICES = 256
"""The most values to choose from for one key."""
_MOST_REASON = 300
_MOST_WHY = 1000
_MOST_PASSES = 4096
_MOST_BLOCKS = 1 << 14


def checked_facts(text: str) -> JobFacts:
    """The facts of a job in ``text``, JSON that an agent has sent; ValueError says which of them is impossible."""
    if len(text) > MOST_FACTS:
        raise ValueError(f"they have {len(text)} characters; allowed: {MOST_FACTS}")
    facts = JobFacts.from_json(text)
    _check_counts(facts)
    if facts.memory is not None:
        _check_memory(facts.memory)
    return replace(
        facts,
        device=on_one_line(facts.device[:40]),
        memory=None if facts.memory is None else _on_one_line(facts.memory),
        values={key: _checked(key, value) for key, value in facts.values.items() if key in KEYS},
        choices={key: _choices(key, given) for key, given in facts.choices.items() if key in KEYS},
        fixed={key: on_one_line(str(why)[:_MOST_REASON]) for key, why in facts.fixed.items() if key in KEYS},
    )


def _check_counts(facts: JobFacts) -> None:
    world_size = facts.world_size
    if world_size > _MOST_RANKS:
        raise ValueError(f"world_size is {world_size}; allowed: at most {_MOST_RANKS} ranks")
    if facts.num_local > world_size or facts.num_replicas > world_size:
        raise ValueError(
            f"num_local is {facts.num_local} and num_replicas {facts.num_replicas}; allowed: at most the world_size, "
            f"{world_size}"
        )
    most = facts.share * facts.num_replicas
    if not facts.share <= facts.global_batch <= most:
        raise ValueError(
            f"global_batch is {facts.global_batch}; allowed: from share, {facts.share}, to share times num_replicas, "
            f"{most}"
        )
    counts = (
        facts.restart,
        facts.members,
        facts.config_version,
        facts.config_revision,
        facts.num_blocks,
        facts.num_parameters,
    )
    if not all(0 <= each < _MOST_COUNT for each in counts) or not 0 <= facts.time < _MOST_COUNT:
        raise ValueError(
            "restart, members, config_version, config_revision, num_blocks, num_parameters or time is no amount; "
            f"allowed: 0 to {_MOST_COUNT - 1}"
        )
    if facts.learning is not None and not facts.learning.first_batch < _MOST_COUNT:
        raise ValueError(f"learning.first_batch is no amount; allowed: less than {_MOST_COUNT} samples")
    if facts.bound is not None and not 0 < facts.bound < _MOST_COUNT:
        raise ValueError(f"bound is {facts.bound}; allowed: 1 to {_MOST_COUNT - 1} samples")


def _check_memory(memory: MemoryFacts) -> None:
    """Check that sizes are amounts, and no more of them than any model needs; ValueError otherwise."""
    if len(memory.passes) > _MOST_PASSES:
        raise ValueError("memory.passes has too many rows")
    if len(memory.block_activation_bytes) > _MOST_BLOCKS:
        raise ValueError("memory.block_activation_bytes has too many numbers")
    if not all(row.micro_batch > 0 and row.activation_checkpoint <= 1 for row in memory.passes):
        raise ValueError("memory.passes has a row of no samples, or of more blocks than there are")
    told = asdict(memory)
    of_blocks = (("block_activation_bytes", each) for each in memory.block_activation_bytes)
    for name, value in (*told.items(), *of_blocks, *(each for row in told["passes"] for each in row.items())):
        if type(value) in (int, float) and not 0 <= value < 2**60:
            raise ValueError(f"memory.{name} is no amount")


def _on_one_line(memory: MemoryFacts) -> MemoryFacts:
    return replace(memory, why_measured=on_one_line(memory.why_measured[:_MOST_WHY]))


def _choices(key: str, given: Sequence[Any]) -> tuple[Any, ...]:
    if len(given) > _MOST_CHOICES:
        raise ValueError(f"choices of {key} has {len(given)} values; allowed: {_MOST_CHOICES}")
    return tuple(_checked(key, each) for each in given)


def _checked(key: str, value: Any) -> Any:
    """The value of a config key, checked by the table of keys; None, torch's or the library's own choice, stays."""
    if value is None:
        return None
    try:
        return KEYS[key].rule.check(value)
    except ValueError as error:
        raise ValueError(f"{key} is {str(value)[:40]!r}; allowed: {error}") from None
