"""What is known and predicted of a job's memory: as a record, and in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from elastic_ext.records.metrics import JobFacts, MemoryFacts
from elastic_ext.records.text import age_in_words, counted, size_in_words

from .memory_table import Limit, Plan, Row

__all__ = ["memory_record", "memory_words"]

_UNKNOWN = "memory is not predicted: nothing is known yet of what the model's steps take"
_GIVE_A_FACTORY = "give ElasticTrainer(..., model_factory=...), by which it is worked out beside training"
_WITHOUT = "without one it is what steps have taken, once some have been measured"
_WITHOUT_ON_CPU = "without one steps are measured where tuning.memory_bytes in the config says how much memory there is"
_NEVER = "of FSDP1 nothing is known, nor with ELASTIC_EXT_PROFILE=off"
_NO_LIMIT = "none is known; tuning.memory_bytes in the config sets one"
_OF_MODEL = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "besides_bytes")
_NAMES = ("parameters", "gradients", "optimizer state", "buffers", "besides")
_NOW, _NO_FIT, _RAN_OUT, _UNTOLD = "*", "!", "!!", "?"


def memory_record(facts: JobFacts, limit: Limit, rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """One object: what is known of the model, the limit, and every prediction."""
    memory = facts.memory
    names = ("source", "why_measured", *_OF_MODEL, "update_bytes", "flops_per_sample", "scale")
    return {
        "time": facts.time,
        "device": facts.device,
        "why_unknown": why_unknown(facts),
        **{name: None if memory is None else getattr(memory, name) for name in names},
        "block_activation_bytes": [] if memory is None else list(memory.block_activation_bytes),
        "capacity_bytes": limit.capacity_bytes,
        "allowed_bytes": limit.allowed_bytes,
        "headroom": limit.headroom,
        "usable_bytes": limit.usable_bytes,
        "share": facts.share,
        "bound": facts.bound,
        "notes": list(notes),
        "peaks": [_row_record(row) for row in rows],
    }


def why_unknown(facts: JobFacts) -> str:
    """Why nothing can be predicted, and what to do; empty where it can."""
    if facts.memory is not None and facts.memory.passes:
        return ""
    without = _WITHOUT_ON_CPU if facts.device == "cpu" else _WITHOUT
    return f"{_UNKNOWN}; {_GIVE_A_FACTORY}; {without}; {_NEVER}"


def memory_words(facts: JobFacts, limit: Limit, rows: Sequence[Row], notes: Sequence[str], *, now: float) -> str:
    """The same on some lines, with a table for each share of blocks that are computed again."""
    lines = []
    if facts.memory is not None:
        lines += [*_source(facts.memory, now - facts.time), *_model(facts.memory), f"  {'limit':<16}{_limit(limit)}"]
    lines += [] if not why_unknown(facts) else why_unknown(facts).split("; ")
    lines += [f"note: {each}" for each in notes]
    if not why_unknown(facts):
        by_ratio: dict[float, list[Row]] = {}
        for row in rows:
            by_ratio.setdefault(row.activation_checkpoint, []).append(row)
        for ratio, found in by_ratio.items():
            again = f", {_share(ratio)} computed again" if ratio or len(by_ratio) > 1 else ""
            lines += ["", f"peak of a rank, by samples at once{again}", *_table(found)]
        lines += _legend(rows)
    return "\n".join(lines)


def _row_record(row: Row) -> dict[str, Any]:
    return {
        "micro_batch": row.micro_batch,
        **row.plan._asdict(),
        "activation_checkpoint": row.activation_checkpoint,
        "peak_bytes": row.peak_bytes,
        "passes_bytes": row.passes_bytes,
        "fits": row.fits,
        "is_refuted": row.is_refuted,
        "is_present": row.is_present,
    }


def _source(memory: MemoryFacts, seconds: float) -> Iterator[str]:
    told = f"(told {age_in_words(seconds)} ago)"
    if memory.source == "measured":
        yield f"memory: measured, with straight lines through what steps have taken {told}"
        yield f"  since {memory.why_measured}" if memory.why_measured else "  it was not worked out"
        return
    corrected = "" if memory.scale == 1 else f", times {memory.scale:.3g} by what measured steps have taken"
    yield f"memory: worked out on tensors without memory{corrected} {told}"


def _model(memory: MemoryFacts) -> Iterator[str]:
    """The whole model's, on one rank."""
    for name, field in zip(_NAMES, _OF_MODEL, strict=True):
        yield f"  {name:<16}{size_in_words(getattr(memory, field))}"
    flops = "not known" if memory.flops_per_sample is None else f"{memory.flops_per_sample:.4g} for a sample"
    yield f"  {'FLOPs':<16}{flops}"
    yield f"  {'activations':<16}{_activations(memory.block_activation_bytes)}"


def _activations(kept: Sequence[int]) -> str:
    if not kept:
        return "not known by block"
    least, most = size_in_words(min(kept)), size_in_words(max(kept))
    each = least if least == most else f"{least} to {most}"
    return f"{each} of a sample in {'each of ' if len(kept) > 1 else ''}{counted(len(kept), 'block')}"


def _limit(limit: Limit) -> str:
    if limit.usable_bytes is None:
        return _NO_LIMIT
    parts = []
    if limit.capacity_bytes is not None:
        parts.append(f"{size_in_words(limit.capacity_bytes)} of the device")
    if limit.allowed_bytes is not None:
        parts.append(f"tuning.memory_bytes of {size_in_words(limit.allowed_bytes)}")
    return f"{size_in_words(limit.usable_bytes)}: {', '.join(parts)}, less {limit.headroom:.0%} of headroom"


# ---- tables ----


def _share(ratio: float) -> str:
    return {0.0: "no block", 1.0: "all blocks"}.get(ratio, f"{100 * ratio:.4g}% of blocks")


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Micro-batches down, plans across."""
    plans = list(dict.fromkeys(row.plan for row in rows))
    by_place = {(row.micro_batch, row.plan): row for row in rows}
    sizes = list(dict.fromkeys(row.micro_batch for row in rows))
    heads = [_heading(plan, plans) for plan in plans]
    cells = [[_cell(by_place[size, plan]) for plan in plans] for size in sizes]
    widths = [max(map(len, (head, *column))) for head, column in zip(heads, zip(*cells, strict=True), strict=True)]
    first = max(len("samples"), *(len(str(size)) for size in sizes))
    for name, line in zip(("samples", *map(str, sizes)), (heads, *cells), strict=True):
        parts = [f"{part:<{width}}" for part, width in zip(line, widths, strict=True)]
        yield "  ".join([f"  {name:>{first}}", *parts]).rstrip()


def _heading(plan: Plan, plans: Sequence[Plan]) -> str:
    """Its name; with its unit, where another than one block is gathered at once."""
    return f"{plan}, unit {plan.unit}" if any(each.unit > 1 for each in plans) and plan.unit else str(plan)


def _cell(row: Row) -> str:
    if row.peak_bytes is None:
        return _UNTOLD
    mark = _RAN_OUT if row.is_refuted else _NO_FIT if row.fits is False else ""
    return " ".join([size_in_words(row.peak_bytes) + (_NOW if row.is_present else ""), *([mark] if mark else [])])


def _legend(rows: Sequence[Row]) -> list[str]:
    known = {
        f"{_NOW} now": any(row.is_present for row in rows),
        f"{_NO_FIT} does not fit": any(row.fits is False and not row.is_refuted for row in rows),
        f"{_RAN_OUT} memory did not suffice when it was tried": any(row.is_refuted for row in rows),
    }
    told = [words for words, is_there in known.items() if is_there]
    return ["", ", ".join(told)] if told else []
