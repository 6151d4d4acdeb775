"""Removing: takes away the checkpoints that are not to be kept, so that whatever is killed leaves whole ones or none.

COMMIT goes first: from then on there is no checkpoint. Then the folder gets a name under which everybody takes it for
garbage, and its files go last. Who dies in between leaves what the next one removes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_ext.errors import CheckpointError, CheckpointNotFound
from elastic_ext.records.files import move_folder, sync_folder, write_new

from .clearing import GARBAGE, remove_or_warn
from .commit import COMMIT, read_commit
from .lineage import Lineage
from .listing import Found, Listing
from .reading import readers_of
from .retain import Retention, Verdict, judge

__all__ = ["remove_checkpoint", "remove_unused_metas", "retained", "unused_metas", "verdicts_on"]

_logger = logging.getLogger(__name__)

_META = re.compile(r"([0-9a-f]{32})\.json")


def retained(
    folder: Path,
    rule: Retention,
    chain: Sequence[Lineage] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Remove from a job's ``folder`` what ``rule`` does not keep; what became of each checkpoint, oldest first.

    ``chain`` are the runs that lead to now, by default those that lead to the newest checkpoint. ``check`` raises where
    nothing may be removed any more.
    """
    return [verdict if verdict.stays else _carried_out(verdict, check) for verdict in verdicts_on(folder, rule, chain)]


def verdicts_on(
    folder: Path, rule: Retention, chain: Sequence[Lineage] | None = None, *, now_ns: int | None = None
) -> list[Verdict]:
    """What becomes of each checkpoint in a job's ``folder``, as things are now; nothing is removed.

    Nor is anything written where the time is given.
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


def remove_checkpoint(found: Found, check: Callable[[], None]) -> str | None:
    """Remove a checkpoint that nobody reads; None, or who reads it."""
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
    """Remove the descriptions of tensors that no checkpoint in a job's ``folder`` has; their names."""
    return [name for name in unused_metas(folder) if remove_or_warn(folder / name)]


def unused_metas(folder: Path, *, without: Collection[str] = ()) -> list[str]:
    """The names of those that no checkpoint in a job's ``folder`` has, or only what is among ``without``.

    None where one cannot be read, or is being saved: it may have them.
    """
    listings = [Listing.read(folder), Listing.read(folder, aside=True)]
    if any(listing.unreadable or not set(without).issuperset(listing.unfinished) for listing in listings):
        return []
    found = [one for listing in listings for one in listing.found if one.name not in without]
    used = {checksum for one in found for checksum in one.commit.metas.values()}
    metas = folder / "meta"
    try:
        names = sorted(os.listdir(metas))
    except FileNotFoundError:
        return []
    unused = [name for name in names if (match := _META.fullmatch(name)) is not None and match.group(1) not in used]
    return [f"{metas.name}/{name}" for name in unused]


def _carried_out(verdict: Verdict, check: Callable[[], None]) -> Verdict:
    try:
        who = remove_checkpoint(verdict.found, check)
    except (FileNotFoundError, CheckpointNotFound):  # somebody else removes it too
        return verdict
    except (OSError, CheckpointError) as error:
        return replace(verdict, stays=True, why=f"it cannot be removed now: {error}", has_failed=True)
    return verdict if who is None else replace(verdict, stays=True, why=f"being read by {who}")


def _take_commit_away(found: Found, folder: int) -> str | None:
    """Take COMMIT out of a checkpoint's ``folder``; None, or who reads it, and then it has its COMMIT."""
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
    """Give the folder ``itself`` another name; back, if what had its name is another one that began just now."""
    if not os.path.samestat(os.lstat(path), itself):
        raise CheckpointError("another checkpoint has its name now")
    move_folder(path, target)
    if not os.path.samestat(os.lstat(target), itself):
        move_folder(target, path)
        raise CheckpointError("another checkpoint has its name now")


def _lack_of(found: Found) -> str | None:
    """Which of its files a checkpoint does not have whole, in words; None where all are there."""
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
