"""The job that a command is about: the one that is named, or else the only one that runs on this machine; and what its
run directories say of its config file and of its checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.agent.config_writer import agent_in, is_running
from elastic_ext.agent.event_files import event_files_in, newest_event
from elastic_ext.agent.folder import NODES, is_held, is_own, spare_cache
from elastic_ext.agent.status.files import CONFIG_FILE, is_run_directory, read_run_directory
from elastic_ext.fsdp.checkpoint.folder.claim import newest_folder
from elastic_ext.fsdp.checkpoint.folder.job_folder import FOLDER
from elastic_ext.records.agent import AgentRecord
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.records.text import expanded

__all__ = [
    "JobHere",
    "add_job",
    "add_places",
    "checkpoints_of",
    "config_file_in",
    "folder_of",
    "jobs_here",
    "named_job",
    "one_job",
    "only_one",
]

_OF_SCRIPT = re.compile(r"(.*)-[0-9a-f]{8}")
_MOST_JOBS = 200
_MOST_NAMED = 10
_MOST_BYTES = 64 << 20
"""How much of an event file is searched for the beginning of training, from its end on."""


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
        """Whether an agent or a rank of the job runs on this machine, by the files of its run directories."""
        return bool(self.living_agents()) or any(_has_living_ranks(each) for each in self.run_directories)

    def living_agents(self) -> dict[Path, AgentRecord]:
        """The agents of the job that run on this machine, by their run directories."""
        host = socket.gethostname()
        agents = {each: agent for each in self.run_directories if (agent := agent_in(each)) is not None}
        return {each: one for each, one in agents.items() if one.host == host and is_running(one, each, host)}

    def newest_first(self) -> list[Path]:
        """The run directories: first those of agents that run here, then those where something has begun last."""
        living = self.living_agents()
        return sorted(self.run_directories, key=lambda each: (each in living, _last_began(each)), reverse=True)


def _has_living_ranks(run_dir: Path) -> bool:
    try:
        return bool(read_run_directory(run_dir, now=time.time(), host=socket.gethostname()).living)
    except OSError:  # it has gone meanwhile
        return False


def _last_began(run_dir: Path) -> float:
    """When the agent of a run directory, or training there, has begun last; 0 where neither is known."""
    agent, training = agent_in(run_dir), _newest_beginning([run_dir])
    return max(0.0 if agent is None else agent.time, 0.0 if training is None else training.time)


# --- arguments, and the job that they mean ---------------------------------------------------------------------------


def add_job(parser: argparse._ActionsContainer, **options: Any) -> None:
    """Give ``parser`` the argument that names a job, with ``options`` of argparse besides."""
    parser.add_argument("--job", help="the name of a job whose run directory is where it is by default", **options)


def add_places(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Give ``parser`` the arguments that name a job's run directory; gives their group, of which one may be given."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("run_dir", nargs="?", type=_path, metavar="RUN_DIR", help="the run directory of a job")
    add_job(which)
    return which


def one_job(
    run_dir: Path | None, job: str | None, environ: Mapping[str, str], *, ways: str, writes: bool = False
) -> JobHere:
    """The job that the arguments or the environment name, or else the only one that runs, or the only one there is.

    A command that ``writes`` takes no job that it was not told and that does not run. ValueError where there is none,
    or several may be meant: it lists them, and says in which ``ways`` one is named; or where several runs of the job
    go on at once.
    """
    found = named_job(run_dir, job, environ)
    if found is None:
        jobs = jobs_here(environ)
        running = [each for each in jobs if each.is_running()] if writes or len(jobs) > 1 else []
        found = only_one(jobs, running, ways=ways, writes=writes)
    _refuse_several_runs(found)
    return found


def _refuse_several_runs(job: JobHere) -> None:
    """Raise ValueError where several runs of a job go on at once on this machine."""
    agents = job.living_agents()
    if len({each.run_id for each in agents.values()}) > 1:
        raise ValueError(
            f"several runs of job {job.name} go on at once on this machine, in {_listed(map(str, agents))}; set "
            "ELASTIC_EXT_RUN_DIR to the one that is meant, without --job"
        )


def only_one(jobs: Sequence[JobHere], running: Sequence[JobHere], *, ways: str, writes: bool = False) -> JobHere:
    """The only job that runs, or the only one where none does, but for a command that ``writes``; else ValueError."""
    meant = running if running or writes else jobs
    if len(meant) == 1:
        return meant[0]
    if running:
        raise ValueError(f"{len(running)} jobs run on this machine: {_names(running)}; name one with {ways}")
    have = "1 has" if len(jobs) == 1 else f"{len(jobs)} have"
    raise ValueError(f"no job runs on this machine, and {have} run there: {_names(jobs)}; name one with {ways}")


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
    """The newest jobs that have their run directories where they are by default; ValueError where there is none.

    A folder that cannot be read is passed over.
    """
    places = _jobs_folders(environ)
    found = [job for place in places for job in _in_place(place)]
    if not found:
        raise ValueError(f"no job has a run directory in {places[0]}; give one, or set ELASTIC_EXT_RUN_DIR")
    return found


def folder_of(job: str, environ: Mapping[str, str]) -> Path:
    """The folder of the job of this name, whose run directories may all be of other machines.

    ValueError where several runs of the job go on at once on this machine.
    """
    folder = _folder_of(job, environ)
    _refuse_several_runs(JobHere(name=job, folder=folder, run_directories=tuple(_run_directories(folder))))
    return folder


def _folder_of(job: str, environ: Mapping[str, str]) -> Path:
    """The folder of the job of this name: the first with run directories of this machine, or else the first there is.

    Where there is none it is the one that the job would have.
    """
    places = _jobs_folders(environ)
    folders = [StartSettings.run_dir_of({"XDG_CACHE_HOME": str(place.parent)}, job) for place in places]
    if Path(job).name == job != "..":  # a long name is shortened there, and listed so
        folders += [place / job for place in places]
    here = (each for each in folders if _run_directories(each))
    found = next(here, next((each for each in folders if os.path.isdir(each)), None))
    if found is None:  # the name of a script, whose job has a hash of the script's path behind that
        of_script = [each.folder for place in places for each in _in_place(place) if _script_of(each.name) == job]
        found = of_script[0] if len(of_script) == 1 else folders[0]
    return found


def _of_name(job: str, environ: Mapping[str, str]) -> JobHere:
    folder = _folder_of(job, environ)
    found = _run_directories(folder)
    if not found:
        there = [each for place in _jobs_folders(environ) for each in _in_place(place)]
        raise ValueError(f"job {job!r} has no run directory {folder}; jobs that have one: {_names(there) or 'none'}")
    name = folder.name if _script_of(folder.name) == job else job
    return JobHere(name=name, folder=folder, run_directories=tuple(found))


def _script_of(name: str) -> str | None:
    """The name of the script whose job is called so by default; None for another name."""
    found = _OF_SCRIPT.fullmatch(name)
    return None if found is None else found[1]


def _names(jobs: Sequence[JobHere]) -> str:
    return _listed(each.name for each in jobs)


def _listed(words: Iterable[str]) -> str:
    """The words once each, or the first of them and how many more there are."""
    each = list(dict.fromkeys(words))
    more = f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
    return ", ".join(each[:_MOST_NAMED]) + more


def _jobs_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders that hold jobs' run directories by default, and those that agents use if they cannot write there.

    ValueError where there is neither.
    """
    cache = spare_cache()
    spare = [StartSettings.jobs_folder({"XDG_CACHE_HOME": str(cache)})] if is_own(cache) else []
    try:
        return [StartSettings.jobs_folder(environ), *spare]
    except ValueError:  # there is no home folder
        if not spare:
            raise
        return spare


def _in_place(place: Path) -> list[JobHere]:
    """The newest jobs in a folder of jobs."""
    found = ((job, tuple(_run_directories(job))) for job in _newest(place)[:_MOST_JOBS])
    return [JobHere(name=job.name, folder=job, run_directories=folders) for job, folders in found if folders]


def _run_directories(job: Path) -> list[Path]:
    """The run directories in the folder of a job that are of this machine: other machines may have the same storage."""
    host = socket.gethostname()
    found = [each for each in (job, *_newest(job / NODES)) if _has_records(each)]
    return [each for each in found if each == job or (agent := agent_in(each)) is None or agent.host == host]


def _has_records(folder: Path) -> bool:
    try:
        return is_run_directory(folder)
    except OSError:  # it is not there, or cannot be read
        return False


def _newest(folder: Path) -> list[Path]:
    """The folders in a folder, the newest first; a job's folder is as new as the newest of its nodes."""
    ages = {each: max([changed, *(node for node, _ in _folders(each / NODES))]) for changed, each in _folders(folder)}
    return sorted(ages, key=lambda each: ages[each], reverse=True)


def _folders(folder: Path) -> list[tuple[float, Path]]:
    """The folders in a folder, each with the time of its last change; without those of which it cannot be told."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            with contextlib.suppress(OSError):
                if each.is_dir():
                    found.append((each.stat().st_mtime, each))
    return found


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

    It is config.json in the folder where neither is known, or where the folder was copied: that is all there is, or the
    other is the config.json of another run directory.
    """
    named, own = _named_config_file(run_dir), run_dir / CONFIG_FILE
    if named is None or _is_of_another(named, run_dir) or (own.exists() and not os.path.exists(named)):
        return own
    return named


def _named_config_file(run_dir: Path) -> Path | None:
    """The config file that the agent of a run directory has named, or its ranks have where there is no agent."""
    agent = agent_in(run_dir)
    if agent is not None:
        return Path(agent.config_file)
    began = _newest_beginning([run_dir])
    named = None if began is None else began.details.get("config_file")
    return Path(named) if isinstance(named, str) else None


def _is_of_another(config_file: Path, run_dir: Path) -> bool:
    """Whether ``config_file`` belongs to another run directory, of which ``run_dir`` is a copy.

    It does not where an agent has ``run_dir`` locked: then the user has given that agent the other directory's file.
    """
    other, here = Path(os.path.realpath(config_file.parent)), Path(os.path.realpath(run_dir))
    if config_file.name != CONFIG_FILE or other in (here, *here.parents):  # a job's folder may have its nodes' file
        return False
    with contextlib.suppress(OSError):  # storage without locks
        if is_held(run_dir):
            return False
    return _named_config_file(config_file.parent) == config_file


def checkpoints_of(job: JobHere, *, removes: bool = False) -> Path:
    """The folder of a job's checkpoints, as its ranks have named it; ValueError where they have named none.

    An earlier version has named the storage alone, where other jobs may save too: a command that ``removes`` gets
    ValueError then.
    """
    began = _newest_beginning(job.run_directories)
    if began is None:
        raise ValueError(f"job {job.name} has not said where its checkpoints are: training has not begun; give PATH")
    storage, name = began.details.get("checkpoints"), began.details.get("checkpoint_job")
    if not isinstance(storage, str):
        raise ValueError(f"job {job.name} keeps no checkpoints, as its trainer has no shared_storage_path; give PATH")
    if not isinstance(name, str):  # as an earlier version has written
        if removes:
            raise ValueError(
                f"job {job.name} was started by an earlier version of elastic_ext, which has not said which folder in "
                f"{storage} is the job's; give PATH"
            )
        return Path(storage)
    jobs = Path(storage) / FOLDER
    found = newest_folder(os.listdir(jobs), name) if jobs.is_dir() else None
    if found is None:
        raise ValueError(f"job {job.name} has saved no checkpoint in {storage} so far")
    return jobs / found


def _newest_beginning(run_dirs: Sequence[Path]) -> JobEvent | None:
    """The newest event by which a rank says that training has begun; None where there is none.

    Of each rank's events the last 64 MiB are searched.
    """
    files = [each / name for each in run_dirs for name in event_files_in(each, of_agent=False)]
    found = (newest_event(file, ("training-began",), most_bytes=_MOST_BYTES) for file in files)
    return max((each for each in found if each is not None), key=lambda event: event.time, default=None)
