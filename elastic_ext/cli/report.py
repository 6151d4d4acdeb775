"""elastic-ext report: one training's time on a page, or as JSON."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from elastic_ext.errors import in_words
from elastic_ext.records.files import open_regular, write_whole
from elastic_ext.records.text import expanded
from elastic_ext.report.load import find_places, gather
from elastic_ext.report.markup import percent, seconds_in_words
from elastic_ext.report.page import MARK, losses, page
from elastic_ext.report.record import RunRecord
from elastic_ext.version import VERSION

from .ckpt import Terminal, path_of
from .jobs import folder_of, one_job

__all__ = ["DONE", "FAILED", "REFUSED", "add_report", "run"]

DONE = 0
FAILED = 1
"""Exit status where the page could not be written."""
REFUSED = 2
"""Exit status where there is no such run, or where the file to replace is no report."""
_DEFAULT_OUT = Path("report.html")
_MARK_WITHIN = 256
_DESCRIPTION = """Show where the time of a training went, on one page that needs nothing else: a goodput ledger that
adds up to the wall time; phases, ranks, memory, configs and events over time. It reads the run directory, while the job
runs or after it has ended."""


def add_report(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext report``."""
    parser.description = _DESCRIPTION
    parser.add_argument(
        "run_dir",
        nargs="?",
        type=path_of,
        metavar="RUN",
        help="a run directory, or the folder that holds those of a job's nodes; default: ELASTIC_EXT_RUN_DIR, or the "
        "only job that runs",
    )
    parser.add_argument("--job", help="instead: the name of a job whose run directory is where it is by default")
    parser.add_argument("--out", type=path_of, metavar="FILE", help=f"the page; default: {_DEFAULT_OUT} in this folder")
    parser.add_argument("--force", action="store_true", help="replace a file that is no report")
    parser.add_argument("--training", type=int, metavar="N", help="which one, where several began; default: the last")
    parser.add_argument("--json", action="store_true", help="one JSON object; a page only where --out is given")


def run(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Make the report of a training, as a page or as JSON; gives the exit status."""
    try:
        folder = _folder(options.run_dir, options.job, environ)
        out = options.out or (None if options.json else _DEFAULT_OUT)
        if out is not None and not options.force:
            _refuse_foreign(out)
        places = find_places(folder)
        with terminal.bar("reading", places.num_bytes) as advance:
            record = gather(places, options.training, advance)
    except ValueError as error:
        terminal.complain(str(error))
        return REFUSED
    except OSError as error:
        terminal.complain(in_words(error))
        return REFUSED
    if out is not None:
        try:
            _write(out, record)
        except OSError as error:
            terminal.complain(f"{in_words(error)}; no page was written")
            return FAILED
    terminal.tell(record.to_dict(), _words(record, out))
    return DONE


def _folder(run_dir: Path | None, job: str | None, environ: Mapping[str, str]) -> Path:
    """The folder of the run that the arguments or the environment name, or else of the job that is found."""
    if run_dir is not None and job is not None:
        raise ValueError("both RUN and --job are given; allowed: one of them")
    if run_dir is not None:
        return expanded(run_dir)
    if job is not None:
        return folder_of(job, environ)
    if environ.get("ELASTIC_EXT_RUN_DIR"):
        return expanded(environ["ELASTIC_EXT_RUN_DIR"])
    try:
        return one_job(None, None, environ, ways="RUN, or --job NAME").folder
    except ValueError as error:
        raise ValueError(f"no run is named, and {error}") from None


def _refuse_foreign(out: Path) -> None:
    """Raise ValueError if ``out`` is a file that is no report, or lies in no folder."""
    try:
        with open_regular(out) as file:
            beginning = file.read(_MARK_WITHIN)
    except FileNotFoundError:
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder; give --out a file in one that is there") from None
        return
    if beginning and MARK.encode() not in beginning:
        raise ValueError(f"{out} is there, and is no report; give another --out, or --force to replace it")


def _write(out: Path, record: RunRecord) -> None:
    made = page(record, made_at=time.time(), version=VERSION)
    write_whole(out, made.encode("utf-8", "replace"), durable=False)


def _words(record: RunRecord, out: Path | None) -> str:
    ledger = record.ledger
    of_wall = f"{percent(ledger.goodput)} of {seconds_in_words(ledger.wall_seconds)} went into useful steps"
    lines = [f"{record.job or 'a job without a name'}: {of_wall}, to step {record.last_step}"]
    lines.append(f"  {losses(record)}")
    lines += [f"  {each.text}" for each in record.remarks[-1:]]  # under the config of the end
    lines += [f"  note: {each}" for each in record.notes]
    if out is not None:
        lines.append(f"the report is {out}")
    return "\n".join(lines)
