"""What a PATH leads to: the storage of many jobs, a job's folder, or one checkpoint's; known by what lies there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import CheckpointDamaged, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from elastic_ext.fsdp.checkpoint.folder.job_folder import FOLDER
from elastic_ext.fsdp.checkpoint.folder.listing import Found, Listing, is_name, is_set_aside, newest_of

__all__ = ["Place", "one_checkpoint", "place_of"]

_HOLDERS = ("RUN.json", "RUN.lock")
_WANTED = (
    f"a shared_storage_path (which holds {FOLDER}/), a job's folder in that, or a checkpoint's folder (which holds "
    f"{COMMIT})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What was found at a path; ``jobs`` are folders of jobs, and there are none where it is one checkpoint's."""

    path: Path
    jobs: tuple[Path, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        return not self.jobs


def place_of(path: Path) -> Place:
    """What ``path`` leads to; CheckpointNotFound says what it is instead, OSError that nobody can tell."""
    path = Path(os.path.abspath(path))
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} does not exist; give {_WANTED}") from None
    except NotADirectoryError:
        raise CheckpointNotFound(f"{path} is no folder; give {_WANTED}") from None
    if COMMIT in names:
        return Place(path=path)
    if FOLDER in names:
        path = path / FOLDER
        names = os.listdir(path)
    elif _is_job(names):
        return Place(path=path, jobs=(path,))
    jobs = tuple(path / name for name in sorted(names) if _is_job_folder(path / name))
    if not jobs:
        raise CheckpointNotFound(_refusal(path, names))
    return Place(path=path, jobs=jobs)


def one_checkpoint(place: Place) -> Path:
    """The folder of the checkpoint that is meant: the newest one, where the place is a job's folder."""
    if place.is_checkpoint:
        return place.path
    if len(place.jobs) > 1:
        names = ", ".join(job.name for job in place.jobs)
        raise CheckpointNotFound(f"{place.path} holds several jobs; give the folder of one of them: {names}")
    listing = Listing.counting(place.jobs[0])
    newest: Found | None = newest_of(listing.found)
    for error in listing.unreadable.values():
        if newest is None or not isinstance(error, CheckpointDamaged):  # of a newer format, or out of reach
            raise error
    if newest is not None:
        return newest.path
    raise CheckpointNotFound(f"{place.jobs[0]} holds no checkpoint that was completed")


def _is_job_folder(path: Path) -> bool:
    try:
        return _is_job(os.listdir(path))
    except NotADirectoryError:
        return False


def _is_job(names: list[str]) -> bool:
    return any(name in _HOLDERS or is_name(name) or is_set_aside(name) for name in names)


def _refusal(path: Path, names: list[str]) -> str:
    if is_name(path.name) or is_set_aside(path.name):
        return f"{path} holds no {COMMIT}: no checkpoint was completed there, or it is being removed"
    what = "is empty" if not names else f"holds no checkpoints of elastic_ext (but {', '.join(sorted(names)[:3])}, ...)"
    return f"{path} {what}; give {_WANTED}"
