"""elastic-ext status: the jobs of this machine, or one of them, in words or as JSON."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from elastic_ext.ckpt.terminal import Terminal
from elastic_ext.errors import in_words
from elastic_ext.master.named import add_ways
from elastic_ext.records.run_dir import Settings
from elastic_ext.records.text import expanded

from .contact import agent_in
from .folder import NODES, spare_cache
from .status import NodeStatus, status_of
from .status_files import is_run_directory, read_run_directory
from .status_words import line_of, words

__all__ = ["HEALTHY", "REFUSED", "TROUBLE", "add_arguments", "add_places", "folders_of_one_job", "run"]

HEALTHY = 0
TROUBLE = 1
REFUSED = 2
"""No such job or run directory."""
_MOST_JOBS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job, and how it is shown."""
    add_ways(parser, add_places(parser))
    parser.add_argument("--json", action="store_true", help="one JSON object per run directory")


def add_places(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Where the job's files are; the group of these arguments, of which one is given."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("run_dir", nargs="?", type=_path, metavar="RUN_DIR", help="the run directory of a job")
    which.add_argument("--job", help="the name of a job whose run directory is where it is by default")
    return which


def run(options: argparse.Namespace, environ: Mapping[str, str], terminal: Terminal) -> int:
    """Show it; gives the exit status."""
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
    """The run directories of the job that is meant; ValueError where there is none, or no telling which."""
    folders, is_list = _folders(run_dir, job, environ)
    if is_list:
        raise ValueError(f"there are {len(folders)} run directories; give one: RUN_DIR, or --job NAME")
    return folders


def _folders(run_dir: Path | None, job: str | None, environ: Mapping[str, str]) -> tuple[list[Path], bool]:
    """The run directories that are meant, and whether they are many that nobody named; ValueError if there is none."""
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
    """Where run directories are by default, and where agents make them that can make none there."""
    spare = Settings.jobs_folder({"XDG_CACHE_HOME": str(spare_cache())})
    try:
        return [Settings.jobs_folder(environ), spare]
    except ValueError:  # there is no home folder
        return [spare]


def _folders_of(job: str, environ: Mapping[str, str]) -> list[Path]:
    """The run directories of a job on this machine: its own, where no agent runs it, and one per agent."""
    places = _jobs_folders(environ)
    folders = [Settings.run_dir_of({"XDG_CACHE_HOME": str(place.parent)}, job) for place in places]
    found = [each for folder in folders for each in _of_job(folder)]
    if not found:
        there = [each.relative_to(place).parts[0] for place in places for each in _run_directories(place)]
        known = ", ".join(list(dict.fromkeys(there))[:10]) or "none"
        raise ValueError(f"job {job!r} has no run directory {folders[0]}; those that are there: {known}")
    return found


def _run_directories(jobs: Path) -> list[Path]:
    """Those of the newest jobs."""
    return [each for job in _newest(jobs)[:_MOST_JOBS] for each in _of_job(job)]


def _of_job(folder: Path) -> list[Path]:
    """The run directories in the folder of a job that are of this machine: other machines may have the same storage."""
    host = socket.gethostname()
    of_nodes = [each for each in _newest(folder / NODES) if is_run_directory(each)]
    of_nodes = [each for each in of_nodes if (agent := agent_in(each)) is None or agent.host == host]
    own = [folder] if folder.is_dir() and is_run_directory(folder) else []
    return own + of_nodes


def _newest(folder: Path) -> list[Path]:
    """The folders in it, newest first."""
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
