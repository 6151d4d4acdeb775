"""Where the files of a run lie: one run directory, or those of several nodes below one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["RunPlaces", "find_places"]

_PROFILE = re.compile(r"profile-(\d{1,7})\.jsonl")
_EVENTS = re.compile(r"events-\d{1,7}\.jsonl")
_JOURNAL = "events-agent.jsonl"
_MOST_FOLDERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlaces:
    """The files of a run."""

    path: Path
    folders: tuple[Path, ...]
    """The run directories, one for each node."""
    profiles: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    """By rank; a rank has several where it was on one node after another."""
    events: tuple[Path, ...] = ()
    journals: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all profiles."""
        return sum(_size_of(each) for paths in self.profiles.values() for each in paths)


def find_places(path: Path) -> RunPlaces:
    """What lies at ``path``; ValueError where that is nothing of a run, or nothing with a profile."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the run directory of a job")
    folders = [each for each in _candidates(path) if _has_files(each)]
    if not folders:
        raise ValueError(f"{path} holds nothing of a job; give its run directory, or the folder that holds its nodes'")
    profiles: dict[int, list[Path]] = {}
    events: list[Path] = []
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if found := _PROFILE.fullmatch(file.name):
                profiles.setdefault(int(found[1]), []).append(file)
            elif _EVENTS.fullmatch(file.name):
                events.append(file)
    journals = [folder / _JOURNAL for folder in folders if (folder / _JOURNAL).exists()]
    if not profiles:
        raise ValueError(
            f"{path} has no profile (profile-<rank>.jsonl): training has not begun, or the profile is switched off"
        )
    return RunPlaces(
        path=path,
        folders=tuple(folders),
        profiles=dict(sorted(profiles.items())),
        events=tuple(events),
        journals=tuple(journals),
    )


def _size_of(path: Path) -> int:
    """0 where it cannot be told: what cannot be read is left out, and named, by whoever reads it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _candidates(path: Path) -> list[Path]:
    """Folders that may be run directories: this one, those of its nodes, or those that lie in it."""
    nodes = path / "nodes"
    below = _folders_in(nodes) if nodes.is_dir() else []
    found = [path, *below]
    return found if any(_has_files(each) for each in found) else _folders_in(path)


def _folders_in(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir())[:_MOST_FOLDERS]


def _has_files(folder: Path) -> bool:
    names = (each.name for each in folder.iterdir())
    return any(_PROFILE.fullmatch(name) or _EVENTS.fullmatch(name) or name == _JOURNAL for name in names)
