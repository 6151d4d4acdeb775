"""`elastic-ext status` and `elastic-ext events` where the files of this machine's run directories are read."""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.folder import NODES, spare_cache
from elastic_ext.agent.status.files import is_run_directory, read_run_directory
from elastic_ext.agent.status.status import NodeStatus, status_of
from elastic_ext.agent.status.text import line_of, words
from elastic_ext.errors import in_words
from elastic_ext.master.address import add_master_arguments
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.records.text import expanded

from .ckpt import Terminal

__all__ = [
    "HEALTHY",
    "REFUSED",
    "TROUBLE",
    "add_arguments_of_events",
    "add_arguments_of_status",
    "add_places",
    "folders_of_one_job",
    "run_events",
    "run_status",
]


# --- the jobs of this machine, or one of them, in words or as JSON ---------------------------------------------------

HEALTHY = 0
TROUBLE = 1
REFUSED = 2
"""Exit status where there is no such job or run directory."""
_MOST_JOBS = 200


def add_arguments_of_status(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the arguments of ``elastic-ext status``."""
    add_master_arguments(parser, add_places(parser))
    parser.add_argument("--json", action="store_true", help="one JSON object per run directory")


def add_places(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Give ``parser`` the arguments that name a job's run directory; gives their group, of which one may be given."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("run_dir", nargs="?", type=_path, metavar="RUN_DIR", help="the run directory of a job")
    which.add_argument("--job", help="the name of a job whose run directory is where it is by default")
    return which


def run_status(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show the status of jobs from their run directories; gives the exit status."""
    try:
        folders, is_list = _folders(options.run_dir, options.job, environ)
        now, host = time.time(), socket.gethostname()
        found = [status_of(read_run_directory(folder, now=now, host=host)) for folder in folders]
    except OSError as error:
        terminal.complain(in_words(error))
        return REFUSED
    except ValueError as error:
        terminal.complain(str(error))
        return REFUSED
    if is_list:
        found.sort(key=lambda each: (each.state == "running", _last_seen(each)), reverse=True)
        for status in found:
            terminal.tell(status.to_dict(), line_of(status))
        terminal.say("one of them in full: elastic-ext status RUN_DIR, or --job NAME")
    else:
        for number, status in enumerate(found):
            terminal.tell(status.to_dict(), ("\n" if number else "") + words(status))
    counted = [each for each in found if not is_list or each.state == "running"]
    return TROUBLE if any(each.troubles for each in counted) else HEALTHY


def folders_of_one_job(run_dir: Path | None, job: str | None, environ: Mapping[str, str]) -> list[Path]:
    """The run directories of the job that the arguments or the environment name; ValueError if none or several."""
    folders, is_list = _folders(run_dir, job, environ)
    if is_list:
        raise ValueError(f"there are {len(folders)} run directories; give one: RUN_DIR, or --job NAME")
    return folders


def _folders(run_dir: Path | None, job: str | None, environ: Mapping[str, str]) -> tuple[list[Path], bool]:
    """The run directories to show, and whether they are those of all jobs since none is named; ValueError if none."""
    if run_dir is not None:
        return [_checked(run_dir)], False
    if job is not None:
        return _folders_of(job, environ), False
    if environ.get("ELASTIC_EXT_RUN_DIR"):
        return [_checked(expanded(environ["ELASTIC_EXT_RUN_DIR"]))], False
    places = _jobs_folders(environ)
    found = [each for place in places for each in _run_directories(place)]
    if not found:
        raise ValueError(f"no job has a run directory in {places[0]}; give one, or set ELASTIC_EXT_RUN_DIR")
    return found, len(found) > 1


def _jobs_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that hold jobs' run directories by default, and those that agents use if they cannot write there."""
    spare = StartSettings.jobs_folder({"XDG_CACHE_HOME": str(spare_cache())})
    try:
        return [StartSettings.jobs_folder(environ), spare]
    except ValueError:  # there is no home folder
        return [spare]


def _folders_of(job: str, environ: Mapping[str, str]) -> list[Path]:
    """The run directories of a job on this machine: its own, where no agent runs it, and one per agent."""
    places = _jobs_folders(environ)
    folders = [StartSettings.run_dir_of({"XDG_CACHE_HOME": str(place.parent)}, job) for place in places]
    found = [each for folder in folders for each in _of_job(folder)]
    if not found:
        there = [each.relative_to(place).parts[0] for place in places for each in _run_directories(place)]
        known = ", ".join(list(dict.fromkeys(there))[:10]) or "none"
        raise ValueError(f"job {job!r} has no run directory {folders[0]}; those that are there: {known}")
    return found


def _run_directories(jobs: Path) -> list[Path]:
    """The run directories of the newest jobs in a folder."""
    return [each for job in _newest(jobs)[:_MOST_JOBS] for each in _of_job(job)]


def _of_job(folder: Path) -> list[Path]:
    """The run directories in the folder of a job that are of this machine: other machines may have the same storage."""
    host = socket.gethostname()
    of_nodes = [each for each in _newest(folder / NODES) if is_run_directory(each)]
    of_nodes = [each for each in of_nodes if (agent := agent_in(each)) is None or agent.host == host]
    own = [folder] if folder.is_dir() and is_run_directory(folder) else []
    return own + of_nodes


def _newest(folder: Path) -> list[Path]:
    """The folders in a folder, the newest first."""
    try:
        inside = [(each.stat().st_mtime, each) for each in folder.iterdir() if each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [each for _, each in sorted(inside, reverse=True)]


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the run directory of a job")
    if not is_run_directory(folder):
        raise ValueError(f"{folder} holds nothing of a job; give its run directory, or --job NAME")
    return folder


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is given, as where a variable is not set; allowed: a run directory")
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _last_seen(status: NodeStatus) -> float:
    return -min((each.seen_seconds for each in status.ranks), default=float("inf"))


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


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is given; allowed: a number of events, or 0 for all")
    return int(text)
