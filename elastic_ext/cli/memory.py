"""`elastic-ext tuning memory`: what a job's model takes of a device's memory, and what it would take at other sizes and
plans.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from elastic_ext.agent.folder import NODES
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import KEYS, TuningSection
from elastic_ext.errors import ConfigError, in_words
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.master.facts import MOST_FACTS, checked_facts
from elastic_ext.records.files import read_at_most
from elastic_ext.records.json import MAX_BYTES, read_value
from elastic_ext.records.metrics import FILE, JobFacts, MemoryFacts
from elastic_ext.records.text import age_in_words, counted, expanded, on_one_line, size_in_words
from elastic_ext.strategies import STRATEGIES, StrategyName
from elastic_ext.tuner.memory import HEADROOM, JobMemory, usable_bytes
from elastic_ext.tuner.space import Point, Shape, point_of, shape_of

from .ckpt import Terminal, path_of
from .jobs import add_places, config_file_in, one_job

__all__ = [
    "Asked",
    "Limit",
    "Plan",
    "PredictionRow",
    "add_memory",
    "limit_of",
    "memory_record",
    "memory_words",
    "plans_asked",
    "predicted",
    "present_plan",
    "run_memory",
]


# --- what a rank's device would hold at its peak, for micro-batches, plans and shares of blocks computed again -------
# All numbers are the tuner's: ``tuner.memory`` predicts them; this part chooses what to predict, and says what fits.

_STRATEGY, _DEGREE = "parallelism.strategy", "parallelism.shard_degree"
_HYBRID: StrategyName = "hybrid_shard"
"""The strategy that is predicted where a shard degree is asked for without a strategy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The micro-batches and plans to predict; what is left out is all that the job can have, or what it has now."""

    micro_batches: tuple[int, ...] = ()
    strategy: StrategyName | None = None
    shard_degree: int | None = None
    unit: int | Literal["whole"] | None = None
    ratios: tuple[float, ...] = ()


class Plan(NamedTuple):
    """A way to spread the model over its ranks: a column of the memory command's table."""

    strategy: str
    shard_degree: int
    """Ranks that one copy of the model is sharded over; 1 where each rank has a whole copy."""
    unit: int
    """Blocks whose parameters are gathered at once; 0 where the model is not sharded."""

    def __str__(self) -> str:
        return f"{self.strategy}/{self.shard_degree}" if STRATEGIES[self.strategy].has_degree else self.strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionRow:
    """One line of the memory command's table: the prediction for one micro-batch."""

    micro_batch: int
    plan: Plan
    activation_checkpoint: float
    peak_bytes: int | None
    """The predicted peak of memory; None where nothing is known of it."""
    passes_bytes: int | None
    """The most that forward and backward passes take beside state; None where nothing is known of it."""
    fits: bool | None
    """Whether the peak is within the limit; None where no limit is known."""
    is_refuted: bool
    """Whether steps like these have run out of memory, whatever is predicted."""
    is_present: bool
    """Whether the job trains like this now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The limit of what a rank may take of its device's memory."""

    capacity_bytes: int | None
    """The memory that there is for a process; None where that is not known."""
    allowed_bytes: int | None
    """The memory that a person allows a process; None where nobody says."""
    headroom: float
    """The share of the lesser of both that stays free."""

    @property
    def usable_bytes(self) -> int | None:
        """The memory that a rank may use; None where no limit is known."""
        usable = usable_bytes(self.capacity_bytes, self.allowed_bytes, self.headroom)
        return None if usable is None else int(usable)


def limit_of(facts: JobFacts, tuning: TuningSection) -> Limit:
    """The memory limit of a job, by its facts and the tuning section of its config."""
    return Limit(
        capacity_bytes=None if facts.memory is None else facts.memory.capacity_bytes,
        allowed_bytes=tuning.memory_bytes,
        headroom=HEADROOM if tuning.headroom is None else tuning.headroom,
    )


def present_plan(facts: JobFacts) -> Plan:
    """The plan by which a job's model is spread over its ranks now."""
    return _plan(shape_of(point_of(facts.values), facts))


def predicted(facts: JobFacts, asked: Asked, limit: Limit) -> list[PredictionRow]:
    """The rows of predictions, by share of blocks computed again, then micro-batch, then plan.

    ValueError where what is asked for can be no plan of this job.
    """
    present = point_of(facts.values)
    now = shape_of(present, facts)
    points = plans_asked(facts, asked)
    ratios = asked.ratios or (now.activation_checkpoint,)
    if any(ratios) and not facts.num_blocks:
        raise ValueError(
            f"the share of blocks to compute again is {max(ratios):g}, and the model has no repeated blocks that were "
            "found or named; leave it out, or name them with units= in the script"
        )
    rows = []
    for ratio in dict.fromkeys(ratios):
        for micro_batch in dict.fromkeys(asked.micro_batches or _sizes(facts.share, now.micro_batch)):
            of_size = _with_share(facts, micro_batch)
            memory = JobMemory(of_size)
            rows += [
                _row(memory, of_size, point._replace(batch_size=micro_batch, activation_checkpoint=ratio), now, limit)
                for point in points
            ]
    return rows


def plans_asked(facts: JobFacts, asked: Asked) -> list[Point]:
    """A point for each plan to predict; ValueError where what is asked for can be no plan on the job's ranks."""
    present = point_of(facts.values)
    named = _named(asked)
    if named is not None:
        points = _points_of(named, facts, present, asked)
    else:
        choices = [str(each) for each in facts.choices.get(_STRATEGY, ()) if each is not None]
        strategies = dict.fromkeys([*choices, shape_of(present, facts).strategy])
        points = [point for each in strategies for point in _points_of(each, facts, present, asked)]
    if asked.unit is not None and not any(shape_of(point, facts).is_sharded for point in points):
        raise ValueError(
            f"unit is {asked.unit} with the strategy {points[0].strategy}, where nothing is gathered; choose another "
            "strategy or leave it out"
        )
    return list({_plan(shape_of(point, facts)): point for point in points}.values())


def _points_of(strategy: str, facts: JobFacts, present: Point, asked: Asked) -> list[Point]:
    """The points of one strategy, one for each degree; ValueError where the strategy is asked for and has none."""
    unit = present.unit if asked.unit is None else asked.unit
    own = _own_degree(strategy, facts, present)
    points, whys_not = [], []
    for degree in _degrees(strategy, facts, own, asked):
        try:
            plan = ParallelPlan(strategy, shard_degree=degree)  # type: ignore[arg-type]
            plan.degrees(facts.world_size, facts.num_local)
        except ValueError as error:
            if own is None or degree != own:
                whys_not.append(error)
                continue
        kept = degree if STRATEGIES[strategy].has_degree else None
        points.append(present._replace(strategy=strategy, shard_degree=kept, unit=unit))
    if whys_not and not points and strategy == _named(asked):
        raise whys_not[0]
    return points


def _named(asked: Asked) -> StrategyName | None:
    """The strategy that is asked for, by name or by its shard degree; None where any is."""
    return asked.strategy or (_HYBRID if asked.shard_degree is not None else None)


def _own_degree(strategy: str, facts: JobFacts, present: Point) -> int | None:
    """The shard degree of the model now, if ``strategy`` is the present one and has a degree; else None."""
    is_present = STRATEGIES[strategy].has_degree and strategy == present.strategy
    return shape_of(present, facts).shard_degree if is_present else None


def _degrees(strategy: str, facts: JobFacts, own: int | None, asked: Asked) -> Sequence[int | None]:
    if asked.shard_degree is not None or not STRATEGIES[strategy].has_degree:
        return [asked.shard_degree]
    known = {each for each in (*facts.choices.get(_DEGREE, ()), own) if type(each) is int}
    return sorted(known) or [None]


def _sizes(share: int, present: int) -> list[int]:
    """The micro-batches to predict by default: 1, 2, 4, ... up to a rank's share, the share, and the present one."""
    powers = [1 << exponent for exponent in range(share.bit_length())]
    return sorted({*powers, present, share})


def _with_share(facts: JobFacts, micro_batch: int) -> JobFacts:
    """The facts of the job, or of one like it whose share is large enough for ``micro_batch``."""
    if micro_batch <= facts.share:
        return facts
    return replace(facts, share=micro_batch, global_batch=micro_batch * facts.num_replicas)


def _row(memory: JobMemory, facts: JobFacts, point: Point, now: Shape, limit: Limit) -> PredictionRow:
    shape, peak, usable = shape_of(point, facts), memory.peak(point), limit.usable_bytes
    is_alike = _plan(shape) == _plan(now) and shape.activation_checkpoint == now.activation_checkpoint
    return PredictionRow(
        micro_batch=shape.micro_batch,
        plan=_plan(shape),
        activation_checkpoint=shape.activation_checkpoint,
        peak_bytes=None if peak is None else peak.num_bytes,
        passes_bytes=None if peak is None else peak.passes_bytes,
        fits=None if peak is None or usable is None else peak.num_bytes <= usable,
        is_refuted=is_alike and facts.bound is not None and shape.micro_batch >= facts.bound,
        is_present=is_alike and shape.micro_batch == now.micro_batch,
    )


def _plan(shape: Shape) -> Plan:
    return Plan(strategy=shape.strategy, shard_degree=shape.shard_degree, unit=shape.unit)


# --- what is known and predicted of a job's memory: as a record, and in words ----------------------------------------

_UNKNOWN = "memory is not predicted: nothing is known yet of what the model's steps take"
_GIVE_A_FACTORY = (
    "give ElasticTrainer memory_model=MemoryModel(model_factory=...), from which memory is worked out beside training"
)
_WITHOUT = "without a factory memory is predicted from measured steps, once some have been measured"
_WITHOUT_ON_CPU = "without a factory steps on a CPU are measured only if tuning.memory_bytes in the config is set"
_NEVER = "the memory of FSDP1 is never predicted, nor any with ELASTIC_EXT_PROFILE=off"
_NO_LIMIT = "none is known; tuning.memory_bytes in the config sets one"
_OF_MODEL = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "besides_bytes")
_NAMES = ("parameters", "gradients", "optimizer state", "buffers", "besides")
_NOW, _NO_FIT, _RAN_OUT, _UNTOLD = "*", "!", "!!", "?"


def memory_record(facts: JobFacts, limit: Limit, rows: Sequence[PredictionRow], notes: Sequence[str]) -> dict[str, Any]:
    """The memory of a job's model as a dictionary for JSON: what is known of it, the limit, and every prediction."""
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
    """Why nothing can be predicted of a job's memory, and what to do; empty where it can."""
    if facts.memory is not None and facts.memory.passes:
        return ""
    without = _WITHOUT_ON_CPU if facts.device == "cpu" else _WITHOUT
    return f"{_UNKNOWN}; {_GIVE_A_FACTORY}; {without}; {_NEVER}"


def memory_words(
    facts: JobFacts, limit: Limit, rows: Sequence[PredictionRow], notes: Sequence[str], *, now: float
) -> str:
    """The memory of a job's model in words, with a table for each share of blocks that are computed again."""
    lines = []
    if facts.memory is not None:
        lines += [*_source(facts.memory, now - facts.time), *_model(facts.memory), f"  {'limit':<16}{_limit(limit)}"]
    lines += [] if not why_unknown(facts) else why_unknown(facts).split("; ")
    lines += [f"note: {each}" for each in notes]
    if not why_unknown(facts):
        by_ratio: dict[float, list[PredictionRow]] = {}
        for row in rows:
            by_ratio.setdefault(row.activation_checkpoint, []).append(row)
        for ratio, found in by_ratio.items():
            again = f", {_share(ratio)} computed again" if ratio or len(by_ratio) > 1 else ""
            lines += ["", f"peak of a rank, by samples at once{again}", *_table(found)]
        lines += _legend(rows)
    return "\n".join(lines)


def _row_record(row: PredictionRow) -> dict[str, Any]:
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
        yield f"memory: measured, by straight lines fitted to what steps have taken {told}"
        yield f"  since {memory.why_measured}" if memory.why_measured else "  since it was not worked out"
        return
    corrected = "" if memory.scale == 1 else f", corrected by a factor of {memory.scale:.3g} from measured steps"
    yield f"memory: worked out on tensors without memory{corrected} {told}"
    if memory.why_measured:
        yield f"  some sizes by lines through others, since {memory.why_measured}"


def _model(memory: MemoryFacts) -> Iterator[str]:
    """Lines of the memory that the whole model would take on one rank, by kind."""
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


def _table(rows: Sequence[PredictionRow]) -> Iterator[str]:
    """The lines of a table of predictions, with a row for each micro-batch and a column for each plan."""
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
    """The heading of a plan's column: its name, with its unit if any plan gathers several blocks at once."""
    return f"{plan}, unit {plan.unit}" if any(each.unit > 1 for each in plans) and plan.unit else str(plan)


def _cell(row: PredictionRow) -> str:
    if row.peak_bytes is None:
        return _UNTOLD
    mark = _RAN_OUT if row.is_refuted else _NO_FIT if row.fits is False else ""
    return " ".join([size_in_words(row.peak_bytes) + (_NOW if row.is_present else ""), *([mark] if mark else [])])


def _legend(rows: Sequence[PredictionRow]) -> list[str]:
    known = {
        f"{_NOW} now": any(row.is_present for row in rows),
        f"{_NO_FIT} does not fit": any(row.fits is False and not row.is_refuted for row in rows),
        f"{_RAN_OUT} memory did not suffice when it was tried": any(row.is_refuted for row in rows),
    }
    told = [words for words, is_there in known.items() if is_there]
    return ["", ", ".join(told)] if told else []


# --- the command -----------------------------------------------------------------------------------------------------
# elastic-ext tuning memory: what a job's model takes of a device's memory, and what it would take otherwise.
#
# It reads what rank 0 has written, job.json, and the config beside it. It asks nobody, and needs neither torch nor
# grpc.

_DONE, _REFUSED = 0, 2
_MOST_NODES = 4096
_DESCRIPTION = """Show what is known of the memory that a job's model takes, and what a rank would hold at its peak: by
the samples that it takes at once, by strategy, and by the share of blocks whose activations are computed again. Exit
status: 0 done, 2 there is no such job, or the input was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownMemory:
    facts: JobFacts
    tuning: TuningSection
    notes: tuple[str, ...]


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext tuning memory``."""
    parser.description = _DESCRIPTION
    places = add_places(parser)
    places.add_argument("--file", type=path_of, metavar="FILE", help=f"the {FILE} that rank 0 has written")
    parser.add_argument(
        "--micro-batch",
        action="append",
        default=[],
        type=_value_of("dataloader.batch_size"),
        metavar="N",
        help="samples at once; may be given several times (default: 1, 2, 4, ... up to a rank's part of a step)",
    )
    parser.add_argument(
        "--strategy",
        type=_value_of("parallelism.strategy"),
        help="how the model is spread over ranks (default: all strategies that the job can change to)",
    )
    parser.add_argument(
        "--shard-degree",
        type=_value_of("parallelism.shard_degree"),
        metavar="RANKS",
        help="ranks that one copy of the model is sharded over, by hybrid_shard",
    )
    parser.add_argument(
        "--unit", type=_value_of("parallelism.unit"), help='blocks that are gathered at once, or "whole"'
    )
    parser.add_argument(
        "--activation-checkpoint",
        action="append",
        default=[],
        type=_value_of("parallelism.activation_checkpoint"),
        metavar="RATIO",
        help="the share of blocks computed again; may be given several times (default: the present one)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, with every block")


def run_memory(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show what a job's model takes of memory, and what it would take otherwise; gives the exit status."""
    asked = Asked(
        micro_batches=tuple(options.micro_batch),
        strategy=options.strategy,
        shard_degree=options.shard_degree,
        unit=options.unit,
        ratios=tuple(options.activation_checkpoint),
    )
    try:
        known = _known(_facts_file(options, environ))
        limit = limit_of(known.facts, known.tuning)
        rows = predicted(known.facts, asked, limit)
    except OSError as error:
        terminal.complain(in_words(error))
        return _REFUSED
    except ValueError as error:
        terminal.complain(f"refused: {on_one_line(str(error))}")
        return _REFUSED
    notes = [*known.notes, *_notes(known.facts, asked)]
    record = memory_record(known.facts, limit, rows, notes)
    terminal.tell(record, memory_words(known.facts, limit, rows, notes, now=time.time()))
    return _DONE


def _value_of(key: str) -> Callable[[str], Any]:
    """A function that reads a value of the config key ``key`` from the command line."""

    def read(text: str) -> Any:
        try:
            value: Any = read_value(text)
        except (ValueError, ConfigError):  # a word
            value = text
        try:
            return KEYS[key].rule.check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is given; allowed: {error}") from None

    return read


# ---- files ----


def _facts_file(options: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    """The file of facts that the arguments or the environment name; ValueError where there is none."""
    if options.file is not None:
        return expanded(options.file)
    if options.run_dir is not None:
        folders: Sequence[Path] = [options.run_dir]
    else:
        folders = one_job(None, options.job, environ, ways="RUN_DIR, --job NAME or --file FILE").run_directories
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run directory of a job")
    files = [file for folder in folders for file in _files_in(folder)]
    if not files:
        raise ValueError(
            f"{folders[0]} has no {FILE}, which rank 0 writes on its node after its first steps; give the run "
            f"directory of that node, or --file {FILE}"
        )
    return max(files, key=lambda file: file.stat().st_mtime)


def _files_in(folder: Path) -> Iterator[Path]:
    """The files of facts in a run directory, and in those of the job's nodes below it."""
    nodes = folder / NODES
    inside = sorted(nodes.iterdir())[:_MOST_NODES] if nodes.is_dir() else []
    yield from (each / FILE for each in (folder, *inside) if (each / FILE).is_file())


def _known(file: Path) -> _KnownMemory:
    data = read_at_most(file, MOST_FACTS)
    try:
        facts = checked_facts(data.decode())
    except ValueError as error:
        raise ValueError(f"{file} is damaged, or no {FILE}: {error}; its rank 0 writes it anew as it trains") from None
    tuning, note = _tuning_beside(file.parent)
    return _KnownMemory(facts=facts, tuning=tuning, notes=(note,) if note else ())


def _tuning_beside(folder: Path) -> tuple[TuningSection, str]:
    """The tuning section of the job's config, and why it is not known, if so."""
    file = config_file_in(folder)
    try:
        return ElasticConfig.parse(read_at_most(file, MAX_BYTES)).tuning, ""
    except FileNotFoundError:
        return TuningSection(), ""
    except (OSError, ConfigError) as error:
        why = on_one_line(in_words(error) if isinstance(error, OSError) else str(error))
        return (
            TuningSection(),
            f"{file} cannot be read, so that its tuning.memory_bytes and headroom are left out: {why}",
        )


# ---- what is to be said beside ----


def _notes(facts: JobFacts, asked: Asked) -> Iterator[str]:
    most = max(asked.micro_batches, default=0)
    if most > facts.share:
        yield (
            f"a rank has {facts.share} samples of a step, so that {most} at once take a global_batch_size of at least "
            f"{most * facts.num_replicas}"
        )
    if asked.strategy is None and asked.shard_degree is None:
        return
    strategy, allowed = plans_asked(facts, asked)[0].strategy, facts.choices.get("parallelism.strategy", ())
    if strategy not in allowed and strategy != facts.values.get("parallelism.strategy"):
        why = facts.fixed.get("parallelism.strategy", "no change to it would be accepted")
        yield f"the job cannot change to {strategy} while it trains: {why}"
