"""elastic-ext tuning memory: what a job's model takes of a device's memory, and what it would take otherwise.

It reads what rank 0 has written, job.json, and the config beside it. It asks nobody, and needs neither torch nor grpc.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.agent.contact import agent_in
from elastic_ext.agent.folder import NODES
from elastic_ext.agent.status_command import add_places, folders_of_one_job
from elastic_ext.ckpt.taking import path_of
from elastic_ext.ckpt.terminal import Terminal
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.keys import KEYS, TuningSection
from elastic_ext.errors import ConfigError, in_words
from elastic_ext.records.files import read_at_most
from elastic_ext.records.json import MAX_BYTES, read_value
from elastic_ext.records.metrics import FILE, JobFacts
from elastic_ext.records.text import on_one_line

from .facts_told import MOST_FACTS, facts_told
from .memory_table import Asked, limit_of, plans_asked, predicted
from .memory_words import memory_record, memory_words

__all__ = ["add_memory", "run_memory"]

_DONE, _REFUSED = 0, 2
_CONFIG = "config.json"
_MOST_NODES = 4096
_DESCRIPTION = """Show what is known of the memory that a job's model takes, and what a rank would hold at its peak: by
the samples that it takes at once, by strategy, and by the share of blocks whose activations are computed again. Exit
status: 0 done, 2 there is no such job, or the input was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    facts: JobFacts
    tuning: TuningSection
    notes: tuple[str, ...]


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of the command."""
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
        help="how the model lies (default: all ways that the job can change to)",
    )
    parser.add_argument(
        "--shard-degree",
        type=_value_of("parallelism.shard_degree"),
        metavar="RANKS",
        help="that share a copy of the model, by hybrid_shard",
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
    """Show it; gives the exit status."""
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
    """What reads a value of ``key`` from the command line."""

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
    """The one that is meant; ValueError where there is none."""
    if options.file is not None:
        found: Path = options.file.expanduser()
        return found
    folders = (
        [options.run_dir] if options.run_dir is not None else folders_of_one_job(None, options.job, environ)
    )  # of those, one has rank 0
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
    """In a run directory, and in those of a job's nodes."""
    nodes = folder / NODES
    inside = sorted(nodes.iterdir())[:_MOST_NODES] if nodes.is_dir() else []
    yield from (each / FILE for each in (folder, *inside) if (each / FILE).is_file())


def _known(file: Path) -> _Known:
    data = read_at_most(file, MOST_FACTS)
    try:
        facts = facts_told(data.decode())
    except ValueError as error:
        raise ValueError(f"{file} is damaged, or no {FILE}: {error}; its rank 0 writes it anew as it trains") from None
    tuning, note = _tuning_beside(file.parent)
    return _Known(facts=facts, tuning=tuning, notes=(note,) if note else ())


def _tuning_beside(folder: Path) -> tuple[TuningSection, str]:
    """What the job's config says of tuning, or why that is not known."""
    agent = agent_in(folder)
    file = folder / _CONFIG if agent is None else Path(agent.config_file)
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
