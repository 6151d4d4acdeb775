"""The job that a command is about: the one that is named, or else the only one that runs on this machine; and what its
run directories say of its config file and of its checkpoints.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.agent.config_writer import agent_in
from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.folder import NODES, spare_cache
from elastic_ext.agent.status.files import CONFIG_FILE, is_run_directory, read_run_directory
from elastic_ext.agent.status.status import status_of
from elastic_ext.fsdp.checkpoint.folder.claim import newest_folder
from elastic_ext.fsdp.checkpoint.folder.job_folder import FOLDER
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.records.text import expanded

__all__ = [
    "JobHere",
    "add_job",
    "add_places",
    "checkpoints_of",
    "config_file_in",
    "jobs_here",
    "named_job",
    "one_job",
    "only_one",
]

_MOST_JOBS = 200
_MOST_NAMED = 10
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHere:
    """A job with run directories on this machine."""

    name: str
    """The name by which --job finds the job, or the run directory that was given."""
    folder: Path
    """The job's folder, which holds all its run directories, or the run directory that was given."""
    run_directories: tuple[Path, ...]
    """The job's run directories on this machine: its own, where it runs without an agent, and one per agent."""

    def is_running(self) -> bool:
        """Whether a process of the job runs on this machine, by the files of its run directories."""
        now, host = time.time(), socket.gethostname()
        found = (status_of(read_run_directory(each, now=now, host=host)) for each in self.run_directories)
        return any(each.state == "running" for each in found)


# --- arguments, and the job that they mean ---------------------------------------------------------------------------


def add_job(parser: argparse._ActionsContainer) -> None:
    """Give ``parser`` the argument that names a job."""
    parser.add_argument("--job", help="the name of a job whose run directory is where it is by default")


def add_places(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Give ``parser`` the arguments that name a job's run directory; gives their group, of which one may be given."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("run_dir", nargs="?", type=_path, metavar="RUN_DIR", help="the run directory of a job")
    add_job(which)
    return which


def one_job(run_dir: Path | None, job: str | None, environ: Mapping[str, str], *, ways: str) -> JobHere:
    """The job that the arguments or the environment name, or else the only one that runs, or the only one there is.

    ValueError where there is none, or several may be meant: it lists them, and says in which ``ways`` one is named.
    """
    named = named_job(run_dir, job, environ)
    if named is not None:
        return named
    jobs = jobs_here(environ)
    return only_one(jobs, [each for each in jobs if each.is_running()] if len(jobs) > 1 else [], ways=ways)


def only_one(jobs: Sequence[JobHere], running: Sequence[JobHere], *, ways: str) -> JobHere:
    """The only job that runs, or the only one where none does; ValueError where there are several."""
    meant = running or jobs
    if len(meant) == 1:
        return meant[0]
    if running:
        raise ValueError(f"{len(running)} jobs run on this machine: {_names(running)}; name one with {ways}")
    raise ValueError(
        f"no job runs on this machine, and {len(jobs)} have run there: {_names(jobs)}; name one with {ways}"
    )


def named_job(run_dir: Path | None, job: str | None, environ: Mapping[str, str]) -> JobHere | None:
    """The job that the arguments or ELASTIC_EXT_RUN_DIR name; None where they name none, ValueError for no job's."""
    if run_dir is None and job is not None:
        return _of_name(job, environ)
    if run_dir is None and environ.get("ELASTIC_EXT_RUN_DIR"):
        run_dir = expanded(environ["ELASTIC_EXT_RUN_DIR"])
    if run_dir is None:
        return None
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; give the run directory of a job")
    if not is_run_directory(run_dir):
        raise ValueError(f"{run_dir} holds nothing of a job; give its run directory, or --job NAME")
    return JobHere(name=str(run_dir), folder=run_dir, run_directories=(run_dir,))


def jobs_here(environ: Mapping[str, str]) -> list[JobHere]:
    """The newest jobs that have their run directories where they are by default; ValueError where there is none."""
    places = _jobs_folders(environ)
    found = [job for place in places for job in _in_place(place)]
    if not found:
        raise ValueError(f"no job has a run directory in {places[0]}; give one, or set ELASTIC_EXT_RUN_DIR")
    return found


def _of_name(job: str, environ: Mapping[str, str]) -> JobHere:
    places = _jobs_folders(environ)
    folders = [StartSettings.run_dir_of({"XDG_CACHE_HOME": str(place.parent)}, job) for place in places]
    found = [each for folder in folders for each in _run_directories(folder)]
    if not found:
        there = [each for place in places for each in _in_place(place)]
        raise ValueError(
            f"job {job!r} has no run directory {folders[0]}; those that are there: {_names(there) or 'none'}"
        )
    folder = next(each for each in folders if found[0].is_relative_to(each))
    return JobHere(name=job, folder=folder, run_directories=tuple(found))


def _names(jobs: Sequence[JobHere]) -> str:
    names = list(dict.fromkeys(each.name for each in jobs))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _jobs_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that hold jobs' run directories by default, and those that agents use if they cannot write there."""
    spare = StartSettings.jobs_folder({"XDG_CACHE_HOME": str(spare_cache())})
    try:
        return [StartSettings.jobs_folder(environ), spare]
    except ValueError:  # there is no home folder
        return [spare]


def _in_place(place: Path) -> list[JobHere]:
    """The newest jobs in a folder of jobs."""
    found = ((job, tuple(_run_directories(job))) for job in _newest(place)[:_MOST_JOBS])
    return [JobHere(name=job.name, folder=job, run_directories=folders) for job, folders in found if folders]


def _run_directories(job: Path) -> list[Path]:
    """The run directories in the folder of a job that are of this machine: other machines may have the same storage."""
    host = socket.gethostname()
    of_nodes = [each for each in _newest(job / NODES) if is_run_directory(each)]
    of_nodes = [each for each in of_nodes if (agent := agent_in(each)) is None or agent.host == host]
    own = [job] if job.is_dir() and is_run_directory(job) else []
    return own + of_nodes


def _newest(folder: Path) -> list[Path]:
    """The folders in a folder, the newest first."""
    try:
        inside = [(each.stat().st_mtime, each) for each in folder.iterdir() if each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [each for _, each in sorted(inside, reverse=True)]


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is given, as where a variable is not set; allowed: a run directory")
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- the files of a job that lie elsewhere ---------------------------------------------------------------------------


def config_file_in(run_dir: Path) -> Path:
    """The config file that the job of a run directory follows: its agent's, or the one that its ranks have named.

    It is config.json in the folder where neither is known, or where that is all there is: the folder was copied.
    """
    agent, own = agent_in(run_dir), run_dir / CONFIG_FILE
    if agent is not None:
        named: object = agent.config_file
    else:
        began = _newest_beginning([run_dir])
        named = None if began is None else began.details.get("config_file")
    return Path(named) if isinstance(named, str) and (os.path.exists(named) or not own.exists()) else own


def checkpoints_of(job: JobHere) -> Path:
    """The folder of a job's checkpoints, as its ranks have named it; ValueError where they have named none."""
    began = _newest_beginning(job.run_directories)
    if began is None:
        raise ValueError(f"job {job.name} has not said where its checkpoints are: training has not begun; give PATH")
    storage, name = began.details.get("checkpoints"), began.details.get("checkpoint_job")
    if not isinstance(storage, str):
        raise ValueError(f"job {job.name} keeps no checkpoints, as its trainer has no shared_storage_path; give PATH")
    if not isinstance(name, str):  # as an earlier version has written
        return Path(storage)
    jobs = Path(storage) / FOLDER
    found = newest_folder(os.listdir(jobs), name) if jobs.is_dir() else None
    if found is None:
        raise ValueError(f"job {job.name} has saved no checkpoint in {storage} so far")
    return jobs / found


def _newest_beginning(run_dirs: Sequence[Path]) -> JobEvent | None:
    """The newest event by which a rank says that training has begun; None where there is none."""
    looks = (EventFiles(each, most_bytes=_MOST_BYTES, of_agent=False).look() for each in run_dirs)
    found = [event for look in looks for event in look.events if event.kind == "training-began"]
    return max(found, key=lambda event: event.time, default=None)
