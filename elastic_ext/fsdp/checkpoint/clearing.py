"""Clearing: what is in the way in a job's folder gets another name there, or is removed if it never was a checkpoint.

Everything is done under the run's claim. Where a file system has no locks another run may come between the look at the
claim and what follows it; so the claim is looked at again afterwards, and a name that was taken from another is given
back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from elastic_ext.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointFenced,
    CheckpointNotFound,
    in_words,
)
from elastic_ext.records.files import is_taken, is_temporary, look_afresh, move_folder, remove_folder

from .commit import COMMIT, Commit, read_commit
from .lineage import Lineage, place_in
from .listing import Listing, is_name, is_set_aside, left_for
from .reading import has_lapsed, is_mark

__all__ = ["GARBAGE", "Clearing", "Hold", "meta_path", "remove_or_warn"]

_logger = logging.getLogger(__name__)

GARBAGE = ".garbage-"
_META = "meta"
_KEPT = re.compile(r"([0-9a-f]{32})\.json")


class Hold(Protocol):
    """What a claim is to who clears: the right to change names in a job's folder."""

    folder: Path
    since_ns: int
    """What was written before this, by the file system's clock, nobody writes any more."""

    def check(self) -> None:
        """CheckpointFenced if nothing may be changed there any more."""


class Clearing:
    """The hand of who has ``claim``, on the names in its folder."""

    def __init__(self, claim: Hold) -> None:
        self._claim = claim
        self._path = claim.folder

    def vacate(self, name: str, chain: Sequence[Lineage], *, replaces: bool = False) -> Path | None:
        """See that nothing has the name of a checkpoint which is to begin; CheckpointExists if that is to stay.

        Where it ``replaces`` the one that the last run of ``chain`` went on from, that does not: it counts as before
        until there is one of this run. Gives where that lies now.
        """
        path = self._path / name
        if not is_taken(path):
            return None
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is no folder, and a checkpoint is to be saved there; move it away")
        try:
            commit = read_commit(path)
        except CheckpointNotFound:
            if self.put_aside(name) is None:
                raise CheckpointError(f"{path} was completed by another run just now; end one of the two") from None
        except CheckpointError as error:
            self._rename(name, _why_aside(error, chain), None)
        else:
            is_left = commit.generation == chain[-1].from_generation
            if _is_kept(commit, chain) and not (replaces and is_left):
                raise CheckpointExists(
                    f"{path} holds a checkpoint already, saved at step {commit.global_step} by run {commit.run_id}, "
                    "and no checkpoint is written twice; move it away, or save at another step"
                )
            aside = self._rename(name, f"abandoned-{chain[-1].id}", commit.generation)
            return aside if is_left else None
        return None

    def put_back(self, aside: Path, name: str) -> None:
        """Have what was set aside for a checkpoint that did not come to be under its name again."""
        self._move(aside, self._path / name, is_meant=lambda _: False)

    def abandon(self, chain: Sequence[Lineage]) -> None:
        """Rename all that does not lead to the state of ``chain``, newest first: what is left is one to go on from.

        The new name says for which run that was, so that all of it counts as before until that has a checkpoint. What
        counts so because of an earlier run gets the name of this one.
        """
        listing = Listing.counting(self._path)
        for name, error in listing.unreadable.items():
            if isinstance(error, OSError):  # of the file system, which says nothing of the checkpoint and may pass
                raise CheckpointError(
                    f"{self._path / name} cannot be read ({in_words(error)}), so that it is not known whether it was "
                    "abandoned; save again when it can be, or move it away"
                ) from error
        for found in reversed(listing.found):
            is_on_the_way = (
                place_in(chain, run_id=found.commit.run_id, global_step=found.commit.global_step) is not None
            )
            if not is_on_the_way and chain[-1].id not in left_for(found.name):
                self._rename(found.name, f"abandoned-{chain[-1].id}", found.commit.generation)
        for name, error in listing.unreadable.items():
            is_of_before = not is_name(name) and isinstance(error, CheckpointDamaged)
            if not is_of_before and chain[-1].id not in left_for(name):
                self._rename(name, _why_aside(error, chain), None)

    def put_aside(self, name: str) -> Path | None:
        """Where the unfinished checkpoint ``name`` lies now; None if it stays, having been finished this moment."""
        aside = self._to_garbage(name)
        look_afresh(aside)  # whether it has a COMMIT that another machine has put there, and this one does not know of
        if not is_taken(aside / COMMIT):
            return aside
        move_folder(aside, self._path / name)
        return None

    def give_up(self, name: str) -> None:
        """Remove the checkpoint ``name`` that was begun here, with a COMMIT or without."""
        remove_or_warn(self._to_garbage(name))

    def prune(self, *, begun: Collection[str], metas: Collection[str]) -> list[str]:
        """Remove what was never committed and is not in ``begun``, with what was being written before the claim.

        Of the descriptions that are kept, those that are neither in ``metas`` nor in a checkpoint; a save that would
        have had one writes it again.
        """
        self.put_all_aside(begun=begun)
        garbage = [*self.garbage(begun=begun), *self._unused_metas(metas)]
        self._claim.check()
        return [str(path.relative_to(self._path)) for path in garbage if remove_or_warn(path)]

    def put_all_aside(self, *, begun: Collection[str]) -> None:
        """Have nothing under the name of a checkpoint that was never committed, but for what is in ``begun``."""
        for name in Listing.read(self._path).unfinished:
            if name not in begun:
                self.put_aside(name)

    def garbage(self, *, begun: Collection[str]) -> list[Path]:
        """What is not part of anything, but for what is in ``begun``; who removes it does so in this order."""
        half_removed = Listing.read(self._path, aside=True).unfinished
        names = sorted(os.listdir(self._path))
        garbage = [self._path / name for name in names if name.startswith(GARBAGE) or name in half_removed]
        others = [
            self._path / name
            for name in names
            if name == _META or (is_name(name) and name not in begun) or is_set_aside(name)
        ]
        for folder in [self._path, *others]:
            if folder.is_dir():
                garbage += [folder / name for name in sorted(os.listdir(folder)) if self._is_left(folder / name)]
        return garbage

    def _unused_metas(self, used: Collection[str]) -> list[Path]:
        """The kept descriptions that no checkpoint has, under whatever name it lies here now."""
        try:
            kept = {meta_path(self._path, name): name for name in _kept_metas(self._path / _META)}
        except FileNotFoundError:
            return []
        named = {*used, *(checksum for name in os.listdir(self._path) for checksum in _metas_of(self._path / name))}
        return [path for path, checksum in sorted(kept.items()) if checksum not in named]

    def _is_left(self, path: Path) -> bool:
        """Whether a file is one that an earlier run was writing, or the mark of a reader that has died."""
        if not is_mark(path.name) and not is_temporary(path.name):
            return False
        try:
            written_ns = os.lstat(path).st_mtime_ns
        except FileNotFoundError:  # by whoever had put it there
            return False
        if is_mark(path.name):
            return has_lapsed(written_ns, self._claim.since_ns)
        return written_ns <= self._claim.since_ns

    def _to_garbage(self, name: str) -> Path:
        aside = self._path / f"{GARBAGE}{secrets.token_hex(8)}-{name}"
        self._move(self._path / name, aside, is_meant=lambda _: False)
        return aside

    def _rename(self, name: str, why: str, generation: str | None) -> Path:
        """Put ``why`` to the name of the checkpoint that was saved as ``generation``, or that cannot be read."""
        number, new_name = 1, f"{name.partition('.')[0]}.{why}"
        target = self._path / new_name
        while is_taken(target):
            number += 1
            target = self._path / f"{new_name}-{number}"
        self._move(self._path / name, target, is_meant=lambda folder: _generation_of(folder) == generation)
        _logger.warning("%s is now named %s: training went on without it", self._path / name, target.name)
        return target

    def _move(self, path: Path, target: Path, *, is_meant: Callable[[Path], bool]) -> None:
        """Move a folder; back, if another run has come and what was moved may be its own."""
        self._claim.check()
        move_folder(path, target)
        try:
            self._claim.check()
        except CheckpointFenced:
            if not is_meant(target):
                with contextlib.suppress(FileExistsError):
                    move_folder(target, path)
            raise


def meta_path(folder: Path, checksum: str) -> Path:
    """Where a job's folder keeps the description of tensors that has this checksum."""
    return folder / _META / f"{checksum}.json"


def _kept_metas(folder: Path) -> list[str]:
    """The checksums of the descriptions in ``folder``."""
    found = map(_KEPT.fullmatch, os.listdir(folder))
    return [match[1] for match in found if match is not None]


def _metas_of(folder: Path) -> Collection[str]:
    """The checksums of the descriptions that a checkpoint has; none where there is no COMMIT that can be read."""
    try:
        return read_commit(folder).metas.values()
    except (CheckpointError, OSError):  # it has its own links all the same
        return []


def remove_or_warn(path: Path) -> bool:
    """Remove a file or a folder; a warning, and False, if it cannot be now."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_folder(path)
        else:
            os.unlink(path)
    except FileNotFoundError:  # somebody else removes it too
        return True
    except OSError as error:
        _logger.warning("%s cannot be removed, and will be tried again: %s", path, error)
        return False
    return True


def _generation_of(folder: Path) -> str | None:
    try:
        return read_commit(folder).generation
    except CheckpointError:
        return None


def _why_aside(error: CheckpointError | OSError, chain: Sequence[Lineage]) -> str:
    """What is put to the name of a checkpoint that the last run of ``chain`` cannot read, or not understand."""
    return "unreadable" if isinstance(error, CheckpointDamaged) else f"abandoned-{chain[-1].id}"


def _is_kept(commit: Commit, chain: Sequence[Lineage]) -> bool:
    """Whether a checkpoint is the work of ``chain``, whose last run must not put another in its place.

    Of what was saved at the very step from which that run went on, only the one that it went on from is.
    """
    last = chain[-1]
    if commit.run_id == last.id or commit.generation == last.from_generation:
        return True
    place = place_in(chain, run_id=commit.run_id, global_step=commit.global_step)
    return place is not None and commit.global_step < last.from_step
