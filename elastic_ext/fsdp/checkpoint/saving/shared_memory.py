"""The copy of what a rank is saving in a folder that outlives the rank, and the record by which it is made a checkpoint
later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from elastic_ext.fsdp.checkpoint.contents import KINDS, FileKind
from elastic_ext.fsdp.checkpoint.folder.commit import check_id
from elastic_ext.fsdp.checkpoint.folder.listing import check_name
from elastic_ext.fsdp.checkpoint.format.shardfile import laid_out
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from elastic_ext.records.files import is_temporary, read_at_most, write_whole

__all__ = [
    "MEMORY",
    "RECORD",
    "Shelf",
    "ShelvedFile",
    "StagedCopy",
    "StagedFiles",
    "boot_id",
    "remove_shelved",
    "room_in",
]

_logger = logging.getLogger(__name__)


# --- the record of a copy that a rank keeps where it outlives its process, and the copy itself, read back ------------
#     a shelf     the folder in memory that an agent gives its workers; it belongs to the agent
#     a copy      what one rank writes of one save, in a file there, its shard files' tensors as they will lie in them
#     a record    the file beside it that says so: it is there only while the copy is whole, and no checkpoint yet
#
# A record is one line with the checksum of what follows, one of JSON, and what the first rank has besides: the draft of
# COMMIT, the plain values and the metadata.

RECORD = ".record"
_FORMAT = 1
_MOST_BYTES = 1 << 30
_CHECKSUM_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedCopy:
    """One rank's staged save as other ranks know it; of plain values, so that it can be passed on as JSON."""

    folder: str
    """The job's folder, an absolute path."""
    name: str
    """The checkpoint's name."""
    generation: str
    run_id: str
    global_step: int
    rank: int
    num_ranks: int
    staged_ns: int
    """When the copy was whole, in nanoseconds by the clock of its machine."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_id("generation", self.generation)
        check_id("run_id", self.run_id)
        if not isinstance(self.folder, str) or not os.path.isabs(self.folder):
            raise ValueError(f"folder is {self.folder!r}; allowed: an absolute path")
        for name, least in (("global_step", 0), ("rank", 0), ("num_ranks", 1), ("staged_ns", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= {least}")
        if self.rank >= self.num_ranks:
            raise ValueError(f"rank is {self.rank} of {self.num_ranks}; allowed: a smaller one")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShelvedFile:
    """Where the tensors of a shard file lie in the copy: one after another from ``start``."""

    start: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, dtype, sizes), in the order of the file."""

    def pieces(self, memory: memoryview) -> tuple[list[TensorToWrite], memoryview]:
        """This file's tensors, as views of the whole copy's ``memory``, and one view that has them all."""
        header = laid_out(self.tensors, generation="")
        own = memory[self.start : self.start + header.data_bytes]
        pieces = [
            TensorToWrite(name, entry.dtype, entry.sizes, own[entry.offset : entry.offset + entry.num_bytes])
            for name, entry in header.entries.items()
        ]
        return pieces, own

    @property
    def end(self) -> int:
        return self.start + laid_out(self.tensors, generation="").data_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFiles:
    """All that another process needs to write the files of a rank's staged save."""

    row: StagedCopy
    memory: str | None = None
    """The name of the file that holds the copy, beside the record; None where the rank writes no tensor."""
    files: Mapping[FileKind, ShelvedFile] = field(default_factory=dict)
    boot: str = ""
    """The ``boot_id`` of the machine when the copy was made: a restart of the machine loses the copy."""
    draft: bytes = b""
    """Rank 0's draft of COMMIT as JSON, without the names of files; empty on other ranks."""
    state: bytes = b""
    """Rank 0's plain values as JSON; empty on other ranks."""
    descriptions: Mapping[FileKind, bytes] = field(default_factory=dict)
    """Rank 0's metadata of all ranks' tensors, as JSON, by the kind of file; empty on other ranks."""

    def encoded(self) -> bytes:
        """The record as bytes, as they stand in its file."""
        blobs = {
            "draft": self.draft,
            "state": self.state,
            **{str(kind): data for kind, data in self.descriptions.items()},
        }
        said = {
            "format": _FORMAT,
            "boot": self.boot,
            "row": asdict(self.row),
            "memory": self.memory,
            "files": {kind: {"start": file.start, "tensors": file.tensors} for kind, file in self.files.items()},
            "blobs": {name: len(blob) for name, blob in blobs.items()},
        }
        body = b"\n".join([json.dumps(said).encode(), b"".join(blobs.values())])
        return _checksum(body) + b"\n" + body

    @classmethod
    def read(cls, path: Path, *, boot: str) -> StagedFiles:
        """The record in ``path``, for a copy that is there; ValueError says why it is of no use, OSError is the
        file system's."""
        record = cls.decoded(read_at_most(path, _MOST_BYTES))
        if record.boot != boot:
            raise ValueError("it was made before this machine was started")
        end = max((file.end for file in record.files.values()), default=0)
        size = 0 if record.memory is None else os.stat(path.with_name(record.memory)).st_size
        if size < end:
            raise ValueError(f"its copy has {size} bytes where {end} were staged")
        return record

    @classmethod
    def decoded(cls, data: bytes) -> StagedFiles:
        """The record that ``encoded`` gave; ValueError if one bit is another."""
        body = data[_CHECKSUM_BYTES + 1 :]
        if _checksum(body) != data[:_CHECKSUM_BYTES]:
            raise ValueError("it does not match its checksum")
        line, _, blobs = body.partition(b"\n")
        try:
            said = json.loads(line)
            if said["format"] != _FORMAT:
                raise ValueError(f"its format is {said['format']!r}; this version uses {_FORMAT}")
            return _record_of(said, blobs)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no record: {error}") from None

    @contextlib.contextmanager
    def mapped(self, folder: Path) -> Iterator[memoryview]:
        """The staged copy in ``folder``, mapped into memory while a ``with`` lasts."""
        if self.memory is None:
            yield memoryview(b"")
            return
        with open(folder / self.memory, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield memoryview(pages)  # unmapped when nobody has a view of it any more


def boot_id() -> str:
    """The kernel's id of this start of the machine, another one after each; empty where it does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def _record_of(said: Mapping[str, Any], blobs: bytes) -> StagedFiles:
    found: dict[str, bytes] = {}
    start = 0
    for name, num_bytes in said["blobs"].items():
        if type(num_bytes) is not int or not 0 <= num_bytes <= len(blobs) - start:
            raise ValueError(f"{name} is of {num_bytes!r} bytes, and {len(blobs) - start} are left")
        found[name] = blobs[start : start + num_bytes]
        start += num_bytes
    memory = said["memory"]
    if memory is not None and (not memory or Path(memory).name != memory):
        raise ValueError(f"memory is {memory!r}; allowed: the name of a file")
    return StagedFiles(
        row=StagedCopy(**said["row"]),
        memory=memory,
        files={kind: _file_of(said["files"][kind]) for kind in KINDS if kind in said["files"]},
        boot=said["boot"],
        draft=found["draft"],
        state=found["state"],
        descriptions={kind: found[kind] for kind in KINDS if kind in found},
    )


def _file_of(said: Mapping[str, Any]) -> ShelvedFile:
    tensors = tuple((name, dtype, tuple(sizes)) for name, dtype, sizes in said["tensors"])
    if list(laid_out(tensors, generation="").entries) != [name for name, *_ in tensors]:
        raise ValueError("its tensors are not in the order in which this version writes them")
    return ShelvedFile(start=said["start"], tensors=tensors)


# --- where a rank keeps the copy of what it is saving when an agent gives it a folder that outlives the rank ---------
# The folder is the agent's, which removes it; normally it lies in memory. What it has no room for is kept in the
# process as it is without an agent, and a warning says so. What a record says stands above; rescue.py reads it.

MEMORY = ".memory"
_AT_ONCE_BYTES = 64 << 20  # a signal has the system begin anew what it was making room for


def room_in(folder: Path) -> int:
    """How many bytes may still be written to the file system of ``folder``: a quarter of it is left to others, such as
    loaders' workers, whom a lack of it would kill."""
    status = os.statvfs(folder)
    return max(0, status.f_bavail - status.f_blocks // 4) * status.f_frsize


class Shelf:
    """One rank's slots for staged copies in ``folder``, which outlives the rank; ``owner`` is its job's name there.

    It has ``num_slots`` slots for a copy each. With two they are used in turn, and the copy before stays whole while
    the next one is made. What an earlier process in this ``seat`` has left goes when memory is first asked for.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        *,
        seat: int,
        rank_now: Callable[[], int],
        num_slots: int = 1,
        room_in: Callable[[Path], int] = room_in,
    ) -> None:
        """``rank_now`` gives this rank's number, for warnings."""
        self._folder = folder
        self._rank_now = rank_now
        self._own = f"{xxhash.xxh3_64_hexdigest(os.fsencode(owner))}-{seat}."
        self._room_in = room_in
        self._memories: list[Path | None] = [None] * num_slots
        self._sizes = [0] * num_slots
        self._held: dict[int, str] = {}  # slot -> the generation of its copy, the oldest first
        self._turn = 0
        self._is_tidy = False
        self._is_off = False

    @property
    def num_slots(self) -> int:
        """How many copies are kept; 1 once the folder is not used any more."""
        return 1 if self._is_off else len(self._memories)

    def is_needed(self, slot: int) -> bool:
        """Whether a slot holds a whole copy that is no checkpoint yet."""
        return slot in self._held

    def pages(self, slot: int, num_bytes: int) -> mmap.mmap | None:
        """New memory for a slot, fully allocated; None where there is no room, and the folder is off from then on.

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
        """Clear the slot for the next copy, and give its number; None where the folder is not used."""
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

    def put(self, make: Callable[[], StagedFiles], files: Mapping[FileKind, ShelvedFile]) -> None:
        """Write the record of the whole copy in the slot of ``begin``; ``files`` says where in it tensors lie."""
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
                "rank %d: the staged copy has no record in %s, and is lost if this process dies before the checkpoint "
                "is written: %s",
                self._rank_now(),
                self._folder,
                error,
            )
            return
        self._held[slot] = record.row.generation
        self._turn = (slot + 1) % len(self._memories)

    def forget(self, generation: str) -> None:
        """Remove the records of this save, which is a checkpoint now, and of the saves before it."""
        if generation not in self._held.values():
            return
        for slot, held in list(self._held.items()):
            del self._held[slot]
            with contextlib.suppress(OSError):  # then whoever finds it finds the checkpoint too
                self._record(slot).unlink(missing_ok=True)
            if held == generation:
                return

    def close(self) -> None:
        """Stop using the folder, and remove all copies but those that are no checkpoint yet."""
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
        """Remove a slot's record and then its copy."""
        self._record(slot).unlink(missing_ok=True)
        memory, self._memories[slot] = self._memories[slot], None
        self._sizes[slot] = 0
        self._held.pop(slot, None)
        if memory is not None:
            memory.unlink(missing_ok=True)

    def _give_up(self, num_bytes: int, error: OSError) -> None:
        """Stop using the folder, and log why."""
        self.close()
        why = f"which cannot be used: {error}"
        if error.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                why = f"and there is room for {self._room_in(self._folder)} bytes, with a quarter left to others"
        _logger.warning(
            "rank %d stages what it saves in its own memory, and a staged copy is lost if the process dies before the "
            "checkpoint is written: %d bytes are needed in %s, %s. Give that folder more room: docker run "
            "--shm-size=..., or in Kubernetes an emptyDir with medium: Memory at /dev/shm",
            self._rank_now(),
            num_bytes,
            self._folder,
            why,
        )


def remove_shelved(folder: Path, is_meant: Callable[[str], bool]) -> None:
    """Remove the staged copies in ``folder`` whose files' names ``is_meant`` accepts, all records first."""
    names = [name for name in os.listdir(folder) if name.endswith((RECORD, MEMORY)) or is_temporary(name)]
    for name in sorted(names, key=lambda one: not one.endswith(RECORD)):
        if is_meant(name.lstrip(".")):
            (folder / name).unlink(missing_ok=True)
