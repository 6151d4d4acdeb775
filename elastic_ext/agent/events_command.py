"""elastic-ext events: what has happened to a job, from the files of its run directories or from its master."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from elastic_ext.ckpt.terminal import Terminal
from elastic_ext.errors import in_words
from elastic_ext.master.named import add_ways
from elastic_ext.records.metrics import JobEvent

from .event_files import EventFiles
from .status_command import HEALTHY, REFUSED, add_places, folders_of_one_job

__all__ = ["add_arguments", "run"]

_MOST_SHOWN = 50
_MOST_BYTES = 16 << 20
_FOLLOW_BYTES = 1 << 20
_LOOK_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of which job, and how many."""
    add_ways(parser, add_places(parser))
    parser.add_argument("--follow", action="store_true", help="go on with those to come, until Ctrl-C")
    parser.add_argument(
        "--last",
        type=_count,
        default=_MOST_SHOWN,
        metavar="N",
        help=f"the newest N (default: {_MOST_SHOWN}); 0 for all",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per event")


def run(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show those of a run directory, or of several of one job; gives the exit status."""
    try:
        folders = folders_of_one_job(options.run_dir, options.job, environ)
    except OSError as error:
        terminal.complain(in_words(error))
        return REFUSED
    except ValueError as error:
        terminal.complain(str(error))
        return REFUSED
    found = {folder: EventFiles(folder, most_bytes=_MOST_BYTES) for folder in folders}
    _tell(found, terminal, most=options.last)
    while options.follow:
        threading.Event().wait(_LOOK_SECONDS)
        _tell(found, terminal, most=0)
    return HEALTHY


def _tell(files: Mapping[Path, EventFiles], terminal: Terminal, *, most: int) -> None:
    """What is new, by its time."""
    found = [(event, folder) for folder, each in files.items() for event in each.look().events]
    found.sort(key=lambda each: each[0].time)
    for event, folder in found[-most:] if most else found:
        terminal.tell({**_record(event), "run_dir": str(folder)}, _words(event))
    terminal.flush()


def _record(event: JobEvent) -> dict[str, object]:
    """With the names that the events of a master have."""
    record = asdict(event)
    return {**{name: value for name, value in record.items() if name != "generation"}, "restart": event.generation}


def _words(event: JobEvent) -> str:
    who = "agent" if event.rank < 0 else f"rank {event.rank}"
    step = f", step {event.step}" if event.step >= 0 else ""
    return f"{_moment(event.time)}  {who}{step}: {event.text}"


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: a number of events, or 0 for all")
    return int(text)
