"""`elastic-ext status` and `elastic-ext events` where the files of this machine's run directories are read."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.status.files import read_run_directory
from elastic_ext.agent.status.status import NodeStatus, status_of
from elastic_ext.agent.status.text import line_of, words
from elastic_ext.errors import in_words
from elastic_ext.master.address import add_master_arguments
from elastic_ext.records.metrics import JobEvent

from .ckpt import Terminal
from .jobs import add_places, jobs_here, named_job, one_job

__all__ = [
    "HEALTHY",
    "INTERRUPTED",
    "REFUSED",
    "TROUBLE",
    "add_arguments_of_events",
    "add_arguments_of_status",
    "run_events",
    "run_status",
    "watch",
]


# --- the jobs of this machine, or one of them, in words or as JSON ---------------------------------------------------

HEALTHY = 0
TROUBLE = 1
REFUSED = 2
"""Exit status where there is no such job or run directory."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a program that SIGINT ends."""
_MOST_ENDED = 3
"""Run directories of jobs that do not run, of which a line is shown without --all."""
_WATCH_SECONDS = 2.0
_LEAST_WATCH_SECONDS, _MOST_WATCH_SECONDS = 0.1, 86400.0


def add_arguments_of_status(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext status``."""
    add_master_arguments(parser, add_places(parser))
    parser.add_argument("--json", action="store_true", help="one JSON object per run directory")
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"all jobs of this machine, not just the newest {_MOST_ENDED} that have ended",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        const=_WATCH_SECONDS,
        type=_seconds,
        metavar="SECONDS",
        help=f"show it again every so many seconds (default: {_WATCH_SECONDS:g}), until Ctrl-C",
    )


def run_status(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show the status of jobs from their run directories; gives the exit status."""
    try:
        named = named_job(options.run_dir, options.job, environ)
        jobs = jobs_here(environ) if named is None else [named]
        now, host = time.time(), socket.gethostname()
        of_jobs = [
            [status_of(read_run_directory(folder, now=now, host=host)) for folder in job.run_directories]
            for job in jobs
        ]
    except OSError as error:
        terminal.complain(in_words(error))
        return REFUSED
    except ValueError as error:
        terminal.complain(str(error))
        return REFUSED
    running = [[each for each in of_job if each.state == "running"] for of_job in of_jobs]
    running = [of_job for of_job in running if of_job]
    full = of_jobs[0] if len(of_jobs) == 1 else running[0] if len(running) == 1 else []
    others = [each for of_job in of_jobs for each in of_job if each not in full]
    others.sort(key=lambda each: (each.state != "running", each.heard_seconds))
    shown = others if options.all or terminal.as_json else _newest(others)
    for number, status in enumerate(full):
        terminal.tell(status.to_dict(), ("\n" if number else "") + words(status, terminal.width))
    if full and others:
        terminal.say("\nothers, which do not run:")
    for status in shown:
        terminal.tell(status.to_dict(), line_of(status, terminal.width))
    if others:
        left_out = len(others) - len(shown)
        more = (
            f"; {left_out} older {'one' if left_out == 1 else 'ones'} too: elastic-ext status --all" if left_out else ""
        )
        terminal.say(f"one of them in full: elastic-ext status RUN_DIR, or --job NAME{more}")
    counted = full or [each for of_job in running for each in of_job]
    return TROUBLE if any(each.troubles for each in counted) else HEALTHY


def watch(look: Callable[[Terminal], int], terminal: Terminal, seconds: float) -> int:
    """Show what ``look`` tells, and again every ``seconds``, until Ctrl-C; gives the exit status.

    On a terminal each takes the place of the one before, complaints with it, and the last one stays; elsewhere they
    follow one another, and complaints go to stderr. It ends where there is nothing to be looked at.
    """
    page, complaints = "", ""
    is_painted = terminal.is_screen and not terminal.as_json

    def looked() -> int:
        nonlocal page, complaints
        out, err = io.StringIO(), io.StringIO()
        status = look(Terminal(out, err, as_json=terminal.as_json, width=terminal.width))
        page, complaints = out.getvalue(), err.getvalue()
        return status

    try:
        status = looked()
        with terminal.screen() if is_painted and status != REFUSED else contextlib.nullcontext():
            while status != REFUSED:
                if is_painted:
                    terminal.paint(page + complaints)
                else:
                    terminal.print(page if terminal.as_json or not page else f"{page}\n", complaints)
                threading.Event().wait(seconds)
                status = looked()
    except KeyboardInterrupt:  # whoever watches has seen enough
        status = INTERRUPTED
    if is_painted or status == REFUSED:
        terminal.print(page, complaints)
    return status


def _newest(others: Sequence[NodeStatus]) -> list[NodeStatus]:
    """Those of these that run, and the first few of the others."""
    running = [each for each in others if each.state == "running"]
    return running + [each for each in others if each.state != "running"][:_MOST_ENDED]


# --- what has happened to a job, from the files of its run directories or from its master ----------------------------

_MOST_SHOWN = 50
_MOST_BYTES = 16 << 20
_FOLLOW_BYTES = 1 << 20
_LOOK_SECONDS = 0.2


def add_arguments_of_events(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext events``."""
    add_master_arguments(parser, add_places(parser))
    parser.add_argument("--follow", action="store_true", help="go on with those to come, until Ctrl-C")
    parser.add_argument(
        "--last",
        type=_count,
        default=_MOST_SHOWN,
        metavar="N",
        help=f"the newest N (default: {_MOST_SHOWN}); 0 for all",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per event")


def run_events(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show the events in the run directories of one job; gives the exit status."""
    try:
        folders = one_job(options.run_dir, options.job, environ, ways="RUN_DIR, or --job NAME").run_directories
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
    """Show the events that are new in the files, ordered by time."""
    found = [(event, folder) for folder, each in files.items() for event in each.look().events]
    found.sort(key=lambda each: each[0].time)
    for event, folder in found[-most:] if most else found:
        terminal.tell({**_record(event), "run_dir": str(folder)}, _words(event))
    terminal.flush()


def _record(event: JobEvent) -> dict[str, object]:
    """An event as a dictionary for JSON, with the names that events of a master have."""
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _LEAST_WATCH_SECONDS <= seconds <= _MOST_WATCH_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given; allowed: seconds from {_LEAST_WATCH_SECONDS:g} to {_MOST_WATCH_SECONDS:g}; a RUN_DIR "
            "goes before --watch"
        )
    return seconds


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: a number of events, or 0 for all")
    return int(text)
