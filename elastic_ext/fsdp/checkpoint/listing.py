"""Listing: the checkpoints of a job, as its folder tells of them, and which of them is newest."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import CheckpointError, CheckpointNotFound

from .commit import COMMIT, Commit, read_checked, read_commit
from .lineage import Lineage, place_in

__all__ = [
    "Found",
    "Listing",
    "abandoned_for_nothing",
    "check_name",
    "is_name",
    "is_set_aside",
    "leading_to",
    "newest_of",
    "oldest_first",
]

_NAME = re.compile(r"(?:step|epoch)_[0-9]{1,18}")
_ABANDONED = re.compile(_NAME.pattern + r"\.abandoned-.+")
_ASIDE = re.compile(rf"{_NAME.pattern}\.(?:abandoned-[0-9A-Za-z_-]+|unreadable(?:-[0-9]+)?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint that exists."""

    path: Path
    commit: Commit

    @classmethod
    def read(cls, path: Path) -> Found:
        """The checkpoint in the folder ``path``; raises what ``read_commit`` raises."""
        return cls(path=path, commit=read_commit(path))

    @property
    def name(self) -> str:
        return self.path.name

    def read_meta(self, file: str) -> bytes:
        """The contents of a file of tensors' descriptions, checked; KeyError for one that the commit does not name."""
        return read_checked(self.path / file, self.commit.metas[file])

    def read_state(self, file: str) -> bytes:
        """The contents of a file of plain values, checked; KeyError for one that the commit does not name."""
        return read_checked(self.path / file, self.commit.states[file].checksum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What lies in a job's folder under the names of checkpoints."""

    found: tuple[Found, ...]
    """Those that exist, oldest first."""
    unreadable: Mapping[str, CheckpointError | OSError]
    """Those whose COMMIT is there and cannot be read or trusted, with the reason."""
    unfinished: tuple[str, ...]
    """Those that were never committed: saves under way, and what is left of killed ones."""

    @classmethod
    def read(cls, folder: Path, *, aside: bool = False) -> Listing:
        """What lies in ``folder`` now, or what was set ``aside`` there; OSError if not even that can be told."""
        found, unfinished = [], []
        unreadable: dict[str, CheckpointError | OSError] = {}
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if not (is_set_aside if aside else is_name)(name):
                continue
            try:
                found.append(Found.read(path))
            except CheckpointNotFound:
                if _is_folder(path):
                    unfinished.append(name)
            except (CheckpointError, OSError) as error:
                unreadable[name] = error
        return cls(found=tuple(oldest_first(found)), unreadable=unreadable, unfinished=tuple(unfinished))


def abandoned_for_nothing(folder: Path, found: Sequence[Found]) -> list[Found]:
    """Those that were renamed for a save which then did not come to be, newest first: none of ``found`` came after.

    By the times of their COMMITs, which the file system's one clock has given them all.
    """
    renamed: list[tuple[int, Found]] = []
    for name in sorted(os.listdir(folder)):
        if _ABANDONED.fullmatch(name) is not None:
            try:
                renamed.append((_committed_ns(folder / name), Found.read(folder / name)))
            except (CheckpointError, OSError):
                continue
    last = max((_committed_ns(one.path) for one in found), default=0)
    return sorted((one for committed_ns, one in renamed if committed_ns > last), key=_age, reverse=True)


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint, or is to become one."""
    return _NAME.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a folder of this name had one of those, until training went on without it."""
    return _ASIDE.fullmatch(name) is not None


def check_name(name: str) -> None:
    """ValueError unless a checkpoint may be named so."""
    if not is_name(name):
        raise ValueError(f"a checkpoint is named {name[:80]!r}; allowed: step_N or epoch_N, with an integer N >= 0")


def oldest_first(found: Iterable[Found]) -> list[Found]:
    """The same in the order in which they follow one another."""
    return sorted(found, key=_age)


def newest_of(found: Sequence[Found], chain: Sequence[Lineage] | None = None) -> Found | None:
    """The newest of some checkpoints; with ``chain``, of those that its runs saved before they were left."""
    if chain is None:
        return max(found, key=_age, default=None)
    return next(iter(leading_to(chain, found)), None)


def leading_to(chain: Sequence[Lineage], found: Sequence[Found]) -> list[Found]:
    """Those that the runs of ``chain`` saved before they were left, newest first."""
    places = []
    for one in found:
        place = place_in(chain, run_id=one.commit.run_id, global_step=one.commit.global_step)
        if place is not None:
            places.append((place, one))
    return [one for _, one in sorted(places, key=lambda pair: (pair[0], _age(pair[1])), reverse=True)]


def _is_folder(path: Path) -> bool:
    """Whether there is a folder; a link to one is somebody's own. OSError where that cannot be told."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:  # renamed since its name was read
        return False


def _committed_ns(path: Path) -> int:
    return os.stat(path / COMMIT).st_mtime_ns


def _age(found: Found) -> tuple[int, int, int, str, str]:
    """What grows with every save of one run, and with every run that goes on from another."""
    commit = found.commit
    return commit.global_step, len(commit.lineage), commit.epoch, commit.saved_at, found.name
