"""Shelf: where a rank keeps the copy of what it is saving when an agent gives it a folder that outlives the rank.

The folder is the agent's, which removes it; normally it lies in memory. What it has no room for is kept in the process
as it is without an agent, and a warning says so. What a record says is in ``shelved``; ``complete`` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import xxhash

from elastic_ext.records.files import is_temporary, write_whole

from .contents import FileKind
from .shelved import RECORD, Record, ShelvedFile, boot_id

__all__ = ["MEMORY", "Shelf", "remove_shelved", "room_in"]

_logger = logging.getLogger(__name__)

MEMORY = ".memory"
_AT_ONCE_BYTES = 64 << 20  # a signal has the system begin anew what it was making room for


def room_in(folder: Path) -> int:
    """How much may be written to the file system of ``folder`` yet: a quarter of it is left to others, such as loaders'
    workers, whom a lack of it would kill."""
    status = os.statvfs(folder)
    return max(0, status.f_bavail - status.f_blocks // 4) * status.f_frsize


class Shelf:
    """One rank's place in ``folder``, for what it saves under ``owner``, the name that its job has there.

    It has ``num_slots`` slots for a copy each. With two they are used in turn, and the copy before stays whole while
    the next one is made. What an earlier process of this rank has left goes when memory is first asked for.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        *,
        rank: int,
        num_slots: int = 1,
        room_in: Callable[[Path], int] = room_in,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._own = f"{xxhash.xxh3_64_hexdigest(os.fsencode(owner))}-{rank}."
        self._room_in = room_in
        self._memories: list[Path | None] = [None] * num_slots
        self._sizes = [0] * num_slots
        self._held: dict[int, str] = {}  # slot -> the generation of its copy, the oldest first
        self._turn = 0
        self._is_tidy = False
        self._is_off = False

    @property
    def num_slots(self) -> int:
        """How many copies are kept; one where the folder is not used, as without it."""
        return 1 if self._is_off else len(self._memories)

    def is_needed(self, slot: int) -> bool:
        """Whether what is in a slot is whole, and no checkpoint so far."""
        return slot in self._held

    def pages(self, slot: int, num_bytes: int) -> mmap.mmap | None:
        """New memory for a slot, all of it there; None where there is none, now and from then on.

        The caller has let go of what it had for that slot.
        """
        if self._is_off:
            return None
        needed = num_bytes
        try:
            if not self._is_tidy:
                remove_shelved(self._folder, lambda name: name.startswith(self._own))
                self._is_tidy = True
            self._drop(slot)
            needed = sum(num_bytes - size for size in self._sizes if size < num_bytes)
            if self._room_in(self._folder) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
            pages = self._new_pages(slot, num_bytes)
        except OSError as error:
            self._give_up(needed, error)
            return None
        self._sizes[slot] = num_bytes
        return pages

    def begin(self) -> int | None:
        """The slot for the next copy: until that is put there, nothing is. None where the folder is not used."""
        if self._is_off:
            return None
        slot = self._turn
        self._held.pop(slot, None)
        try:
            self._record(slot).unlink(missing_ok=True)
        except OSError as error:  # whoever finds the record would take what is written now for what it tells of
            self._give_up(self._sizes[slot], error)
            return None
        return slot

    def put(self, make: Callable[[], Record], files: Mapping[FileKind, ShelvedFile]) -> None:
        """The copy in the slot that has begun is whole: ``make`` says of what, ``files`` where it lies."""
        if self._is_off:
            return
        slot = self._turn
        path = self._memories[slot]
        memory = None if path is None else path.name
        try:
            record = replace(make(), memory=memory, files=files, boot=boot_id())
            write_whole(self._record(slot), record.encoded(), durable=False)
        except (OSError, TypeError, ValueError) as error:
            _logger.warning(
                "rank %d: what was staged has no record in %s, and is lost if this process dies before it is written: "
                "%s",
                self._rank,
                self._folder,
                error,
            )
            return
        self._held[slot] = record.row.generation
        self._turn = (slot + 1) % len(self._memories)

    def forget(self, generation: str) -> None:
        """What was staged of this save is a checkpoint now, and what came before it is of no use any more."""
        if generation not in self._held.values():
            return
        for slot, held in list(self._held.items()):
            del self._held[slot]
            with contextlib.suppress(OSError):  # then whoever finds it finds the checkpoint too
                self._record(slot).unlink(missing_ok=True)
            if held == generation:
                return

    def close(self) -> None:
        """Leave nothing here but what is no checkpoint yet."""
        self._is_off = True
        for slot in range(len(self._memories)):
            if not self.is_needed(slot):
                with contextlib.suppress(OSError):
                    self._drop(slot)

    def _new_pages(self, slot: int, num_bytes: int) -> mmap.mmap:
        path = self._folder / f"{self._own}{slot}.{secrets.token_hex(8)}{MEMORY}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for start in range(0, num_bytes, _AT_ONCE_BYTES):  # a page that is missing later would be a signal
                os.posix_fallocate(file, start, min(_AT_ONCE_BYTES, num_bytes - start))
            pages = mmap.mmap(file, num_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        self._memories[slot] = path
        return pages

    def _record(self, slot: int) -> Path:
        return self._folder / f"{self._own}{slot}{RECORD}"

    def _drop(self, slot: int) -> None:
        """Remove what a slot has, the record first."""
        self._record(slot).unlink(missing_ok=True)
        memory, self._memories[slot] = self._memories[slot], None
        self._sizes[slot] = 0
        self._held.pop(slot, None)
        if memory is not None:
            memory.unlink(missing_ok=True)

    def _give_up(self, num_bytes: int, error: OSError) -> None:
        """Use the folder no more, and say why."""
        self.close()
        has = str(error)
        if error.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                has = f"room for {self._room_in(self._folder)} bytes, with a quarter left to others"
        _logger.warning(
            "rank %d stages what it saves in its own memory, and it is lost if the process dies before it is written: "
            "%d bytes are needed in %s, and there is %s. Give it more: docker run --shm-size=..., or in Kubernetes an "
            "emptyDir with medium: Memory at /dev/shm",
            self._rank,
            num_bytes,
            self._folder,
            has,
        )


def remove_shelved(folder: Path, is_meant: Callable[[str], bool]) -> None:
    """Remove the copies in ``folder`` whose files' names are meant: each record before what it tells of."""
    names = [name for name in os.listdir(folder) if name.endswith((RECORD, MEMORY)) or is_temporary(name)]
    for name in sorted(names, key=lambda one: not one.endswith(RECORD)):
        if is_meant(name.lstrip(".")):
            (folder / name).unlink(missing_ok=True)
