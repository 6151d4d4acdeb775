"""Renaming and removing in a job's folder, by the run that holds it or by a process that tidies, so that a kill leaves
whole checkpoints or none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from elastic_ext.records.files import (
    is_locked,
    is_taken,
    is_temporary,
    look_afresh,
    move_folder,
    remove_folder,
    sync_folder,
    try_lock,
    write_new,
)

from .claim import LOCK, has_lapsed, is_mark, now_ns_in, read_holder, read_visitor, readers_of, sign
from .commit import COMMIT, Commit, Lineage, place_in, read_commit
from .listing import ListedCheckpoint, Listing, Retention, RetentionVerdict, is_name, is_set_aside, judge, left_for

__all__ = [
    "GARBAGE",
    "IDLE_SECONDS",
    "Clearing",
    "Hold",
    "Visit",
    "apply_retention",
    "meta_path",
    "remove_checkpoint",
    "remove_or_warn",
    "remove_unused_metas",
    "unused_metas",
    "verdicts_on",
]

_logger = logging.getLogger(__name__)


# --- what is in the way in a job's folder gets another name there, or is removed if it never was a checkpoint --------
# Everything is done under the run's claim. Where a file system has no locks another run may come between the look at
# the claim and what follows it; so the claim is looked at again afterwards, and a name that was taken from another is
# given back.

GARBAGE = ".garbage-"
_META = "meta"
_META_FILE = re.compile(r"([0-9a-f]{32})\.json")


class Hold(Protocol):
    """The right to change names in a job's folder: a run's ``Claim``, or the ``Visit`` of a process that tidies."""

    folder: Path
    since_ns: int
    """A time in nanoseconds by the file system's clock: files written before it are not being written any more."""

    def check(self) -> None:
        """CheckpointFenced if the holder may not change names in the folder any more."""


class Clearing:
    """Renames and removes what is in a job's folder, for the holder of ``claim``."""

    def __init__(self, claim: Hold) -> None:
        self._claim = claim
        self._path = claim.folder

    def vacate(self, name: str, chain: Sequence[Lineage], *, replaces: bool = False) -> Path | None:
        """Free the name of a checkpoint that is to begin; CheckpointExists if a checkpoint of ``chain`` has the name.

        With ``replaces`` that checkpoint may be the one from which the last run of ``chain`` went on: it is renamed,
        and training may still resume from it until this run has committed one. Gives the new path of that checkpoint,
        and None where something else had the name, or nothing.
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
        """Give a checkpoint, set ``aside`` for another one that was not committed, its ``name`` back."""
        self._move(aside, self._path / name, is_meant=lambda _: False)

    def abandon(self, chain: Sequence[Lineage]) -> None:
        """Rename all checkpoints that do not lead to ``chain``'s state, newest first: those left are fit to go on from.

        The new names say for which run that was, so that all of them count as before until that run has a checkpoint.
        Those that count so because of an earlier run are renamed for this one.
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
        """Rename the uncommitted checkpoint ``name`` as garbage; gives its path, None if it was committed meanwhile."""
        aside = self._to_garbage(name)
        look_afresh(aside)  # whether it has a COMMIT that another machine has put there, and this one does not know of
        if not is_taken(aside / COMMIT):
            return aside
        move_folder(aside, self._path / name)
        return None

    def give_up(self, name: str) -> None:
        """Remove the checkpoint ``name``, which was begun by this run, with a COMMIT or without."""
        remove_or_warn(self._to_garbage(name))

    def prune(self, *, begun: Collection[str], metas: Collection[str]) -> list[str]:
        """Remove what killed saves have left: checkpoints never committed, but for ``begun``, and temporary files.

        Metadata files in meta/ go too where neither ``metas`` nor a checkpoint names them; a save that needs one writes
        it again. Gives the names of what was removed.
        """
        self.put_all_aside(begun=begun)
        garbage = [*self.garbage(begun=begun), *self._unnamed_metas(metas)]
        self._claim.check()
        return [str(path.relative_to(self._path)) for path in garbage if remove_or_warn(path)]

    def put_all_aside(self, *, begun: Collection[str]) -> None:
        """Rename all uncommitted checkpoints as garbage, but for those in ``begun``."""
        for name in Listing.read(self._path).unfinished:
            if name not in begun:
                self.put_aside(name)

    def garbage(self, *, begun: Collection[str]) -> list[Path]:
        """Paths that belong to no checkpoint, nor to one in ``begun``, in the order in which they are to be removed."""
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

    def _unnamed_metas(self, used: Collection[str]) -> list[Path]:
        """The metadata files in meta/ that neither ``used`` nor any checkpoint here names, abandoned ones included.

        Unlike in ``unused_metas`` a checkpoint that cannot be read does not count: it has links of its own.
        """
        kept = _kept_metas(self._path)
        named = {*used, *(checksum for name in os.listdir(self._path) for checksum in _metas_of(self._path / name))}
        return [meta_path(self._path, checksum) for checksum in kept if checksum not in named]

    def _is_left(self, path: Path) -> bool:
        """Whether a file is a temporary one of an earlier run, or the mark of a reader that has died."""
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
        """Add ``why`` to the name of a checkpoint, saved as ``generation`` or unreadable; gives its new path."""
        number, new_name = 1, f"{name.partition('.')[0]}.{why}"
        target = self._path / new_name
        while is_taken(target):
            number += 1
            target = self._path / f"{new_name}-{number}"
        self._move(self._path / name, target, is_meant=lambda folder: _generation_of(folder) == generation)
        _logger.warning("%s is now named %s: training went on without it", self._path / name, target.name)
        return target

    def _move(self, path: Path, target: Path, *, is_meant: Callable[[Path], bool]) -> None:
        """Move a folder; if another run has claimed the job's folder meanwhile, move it back unless it ``is_meant``."""
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
    """The path of the metadata file with this checksum in a job's ``folder``, which checkpoints share by links."""
    return folder / _META / f"{checksum}.json"


def _kept_metas(folder: Path) -> list[str]:
    """The checksums of the metadata files in meta/ of a job's ``folder``, in order; none where there is no meta/."""
    try:
        found = map(_META_FILE.fullmatch, sorted(os.listdir(folder / _META)))
    except FileNotFoundError:
        return []
    return [match[1] for match in found if match is not None]


def _metas_of(folder: Path) -> Collection[str]:
    """The checksums of a checkpoint's metadata files; none where it has no COMMIT that can be read."""
    try:
        return read_commit(folder).metas.values()
    except (CheckpointError, OSError):  # it has its own links all the same
        return []


def remove_or_warn(path: Path) -> bool:
    """Remove a file or a folder; gives False, after a warning, if it cannot be removed now."""
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
    """What is added to the name of a checkpoint that the last run of ``chain`` cannot read or understand."""
    return "unreadable" if isinstance(error, CheckpointDamaged) else f"abandoned-{chain[-1].id}"


def _is_kept(commit: Commit, chain: Sequence[Lineage]) -> bool:
    """Whether a checkpoint belongs to the runs of ``chain``, so that the last of them may not replace it.

    Of those saved at the very step from which that run went on, only the one that it went on from belongs to them.
    """
    last = chain[-1]
    if commit.run_id == last.id or commit.generation == last.from_generation:
        return True
    place = place_in(chain, run_id=commit.run_id, global_step=commit.global_step)
    return place is not None and commit.global_step < last.from_step


# --- takes away the checkpoints that are not to be kept, so that whatever is killed leaves whole ones or none --------
# COMMIT goes first: from then on there is no checkpoint. Then the folder gets a name under which everybody takes it for
# garbage, and its files go last. Who dies in between leaves what the next one removes.


def apply_retention(
    folder: Path,
    rule: Retention,
    chain: Sequence[Lineage] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[RetentionVerdict]:
    """Remove from a job's ``folder`` what ``rule`` does not keep; gives a verdict on each checkpoint, oldest first.

    ``chain`` are the runs that lead to now, by default those that lead to the newest checkpoint. ``check`` raises where
    nothing may be removed any more.
    """
    return [verdict if verdict.stays else _carried_out(verdict, check) for verdict in verdicts_on(folder, rule, chain)]


def verdicts_on(
    folder: Path, rule: Retention, chain: Sequence[Lineage] | None = None, *, now_ns: int | None = None
) -> list[RetentionVerdict]:
    """What ``rule`` would keep and remove of a job's ``folder`` now: a verdict on each checkpoint; removes nothing.

    Where ``now_ns`` is given, nothing is written there either.
    """
    found = list(Listing.counting(folder).found)
    if not rule.keep_abandoned:
        known = {one.name for one in found}
        found += (one for one in Listing.read(folder, aside=True).found if one.name not in known)
    incomplete = {one.name: lack for one in found if (lack := _lack_of(one)) is not None}
    first = judge(found, rule, chain=chain, incomplete=incomplete)
    being_read = {}
    for verdict in first:
        with contextlib.suppress(OSError):  # its removal will say what is wrong there
            who = None if verdict.stays else _read_by(verdict.found.path, now_ns)
            if who is not None:
                being_read[verdict.found.name] = who
    return judge(found, rule, chain=chain, being_read=being_read, incomplete=incomplete)


def remove_checkpoint(found: ListedCheckpoint, check: Callable[[], None]) -> str | None:
    """Remove a checkpoint; gives None, or, where it is being read, who reads it, and then it stays."""
    check()
    folder = os.open(found.path, os.O_RDONLY | os.O_DIRECTORY)  # another may get its name meanwhile
    try:
        who = _take_commit_away(found, folder)
        if who is None:
            check()
            garbage = found.path.with_name(f"{GARBAGE}{secrets.token_hex(8)}-{found.name}")
            with contextlib.suppress(FileNotFoundError):  # somebody else has taken it for garbage already
                _move_itself(found.path, garbage, os.fstat(folder))
                remove_or_warn(garbage)
        return who
    finally:
        os.close(folder)


def remove_unused_metas(folder: Path) -> list[str]:
    """Remove the metadata files in meta/ that no checkpoint in a job's ``folder`` has; gives their names."""
    return [name for name in unused_metas(folder) if remove_or_warn(folder / name)]


def unused_metas(folder: Path, *, without: Collection[str] = ()) -> list[str]:
    """The metadata files in meta/ that no checkpoint in a job's ``folder`` has; those in ``without`` do not count.

    No file is named where a checkpoint cannot be read or is being saved: it may have them.
    """
    listings = [Listing.read(folder), Listing.read(folder, aside=True)]
    if any(listing.unreadable or not set(without).issuperset(listing.unfinished) for listing in listings):
        return []
    found = [one for listing in listings for one in listing.found if one.name not in without]
    used = {checksum for one in found for checksum in one.commit.metas.values()}
    unused = [meta_path(folder, checksum) for checksum in _kept_metas(folder) if checksum not in used]
    return [str(path.relative_to(folder)) for path in unused]


def _carried_out(verdict: RetentionVerdict, check: Callable[[], None]) -> RetentionVerdict:
    try:
        who = remove_checkpoint(verdict.found, check)
    except (FileNotFoundError, CheckpointNotFound):  # somebody else removes it too
        return verdict
    except (OSError, CheckpointError) as error:
        return replace(verdict, stays=True, why=f"it cannot be removed now: {error}", has_failed=True)
    return verdict if who is None else replace(verdict, stays=True, why=f"being read by {who}")


def _take_commit_away(found: ListedCheckpoint, folder: int) -> str | None:
    """Remove COMMIT from a checkpoint's ``folder``; gives None, or who reads it, and then COMMIT stays."""
    if read_commit(found.path).generation != found.commit.generation:
        raise CheckpointError("another checkpoint has its name now")
    who = _read_by(found.path)
    if who is not None:
        return who
    os.unlink(COMMIT, dir_fd=folder)
    sync_folder(found.path)
    with contextlib.suppress(OSError):  # what cannot be looked at any more was looked at just now
        who = _read_by(found.path)
    if who is not None:  # and has seen COMMIT before it was taken away, or is about to look for it
        write_new(found.path / COMMIT, found.commit.to_json())
        sync_folder(found.path)
    return who


def _move_itself(path: Path, target: Path, itself: os.stat_result) -> None:
    """Rename the folder ``itself``; CheckpointError, and nothing renamed, if another folder has its name now."""
    if not os.path.samestat(os.lstat(path), itself):
        raise CheckpointError("another checkpoint has its name now")
    move_folder(path, target)
    if not os.path.samestat(os.lstat(target), itself):
        move_folder(target, path)
        raise CheckpointError("another checkpoint has its name now")


def _lack_of(found: ListedCheckpoint) -> str | None:
    """Which file a checkpoint lacks, or does not have whole, in words; None where all files are there."""
    commit = found.commit
    names: Mapping[str, object] = {**commit.metas, **commit.states, **commit.shards}
    try:
        missing = sorted({COMMIT, *names} - set(os.listdir(found.path)))
    except FileNotFoundError:
        missing = [COMMIT]
    if missing:
        return f"{missing[0]} is missing"
    for name, num_bytes in sorted(commit.sizes().items()):
        try:
            found_bytes = (found.path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found_bytes != num_bytes:
            return f"{name} has {found_bytes} of {num_bytes} bytes"
    return None


def _read_by(folder: Path, now_ns: int | None = None) -> str | None:
    readers = readers_of(folder, now_ns)
    return None if not readers else f"{readers[0]}" + (f" and {len(readers) - 1} more" if len(readers) > 1 else "")


# --- the hold on a job's folder of somebody who tidies it and is no run, and takes it over from none -----------------
# While it lasts no run can begin where there are locks, so it is to be short. Where a run is alive, or may be, nothing
# is changed but what is safe beside it.

IDLE_SECONDS = 3600.0
"""For how long a folder is not written to before it is taken for no save under way, whatever locks say."""


class Visit:
    """A process that tidies a job's ``folder`` and is no run; while ``alone`` lasts, no run can begin.

    With ``only_looking`` it writes nothing there, takes the time from this machine, and keeps no run out.
    """

    def __init__(self, folder: Path, *, only_looking: bool = False) -> None:
        self.folder = folder
        self._only_looks = only_looking
        self.now_ns = time.time_ns() if only_looking else now_ns_in(folder)
        self.since_ns = self.now_ns - int(IDLE_SECONDS * 1e9)
        self._holder = read_holder(folder)

    def check(self) -> None:
        """CheckpointFenced if a run has claimed the folder since this visit began."""
        if read_holder(self.folder) != self._holder:
            raise CheckpointFenced(f"{self.folder}: a run of this job has begun just now; run the command again")

    @contextmanager
    def alone(self) -> Iterator[str | None]:
        """Keep runs out while a ``with`` lasts, unless only looking; gives None, or why a run may be alive there."""
        lock: int | None = None
        try:
            if self._only_looks:
                is_alone = not is_locked(self.folder / LOCK)
            else:
                lock = try_lock(self.folder / LOCK)
                is_alone = lock is not None
        except PermissionError as error:
            yield f"whether a run is saving cannot be told: {in_words(error)}"
            return
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            yield "there are no locks here that would tell whether a run is saving"
            return
        if not is_alone:
            yield self._who()
            return
        try:
            if lock is not None:
                sign(lock)
            yield None
        finally:
            if lock is not None:
                os.close(lock)

    def _who(self) -> str:
        """Who holds the folder's lock, in words, as far as that is written there."""
        visitor = read_visitor(self.folder)
        if visitor is not None:
            return f"it is being tidied by {visitor}"
        return f"a run has this folder: {self._holder or 'it has not said who it is'}"

    def put_garbage_aside(self) -> None:
        """Rename what dead saves have left as garbage, which anybody may remove. Called while ``alone``.

        Folders that were written to of late keep their names.
        """
        Clearing(self).put_all_aside(begun=self._lively())

    def garbage(self, *, is_alone: bool) -> list[Path]:
        """Paths that belong to no checkpoint and no save under way; unless ``is_alone`` only those that no run uses."""
        lively = self._lively()
        dead = {path for path in self.unfinished() if path.name not in lively}
        lying = [path for path in Clearing(self).garbage(begun=lively) if path.parent not in dead]
        if is_alone:
            return [*sorted(dead), *lying]
        return [path for path in lying if path.name.startswith(GARBAGE) or is_set_aside(path.name)]

    def unfinished(self) -> set[Path]:
        """The folders of checkpoints that are not committed, or not yet."""
        return {self.folder / name for name in Listing.read(self.folder).unfinished}

    def _lively(self) -> list[str]:
        """The names of uncommitted checkpoints that were written to of late, and so may be saves under way."""
        return [path.name for path in self.unfinished() if _written_ns(path) > self.since_ns]


def _written_ns(folder: Path) -> int:
    """The time, in nanoseconds, when a folder or a file in it was last written to."""
    with os.scandir(folder) as files:
        times = [file.stat(follow_symlinks=False).st_mtime_ns for file in files]
    return max([*times, os.lstat(folder).st_mtime_ns])
