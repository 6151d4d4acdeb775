"""Shelved: the record of a copy that a rank keeps where it outlives its process, and the copy itself, read back.

    a shelf     the folder in memory that an agent gives its workers; it belongs to the agent
    a copy      what one rank writes of one save, in a file there, its shard files' tensors as they will lie in them
    a record    the file beside it that says so: it is there only while the copy is whole, and no checkpoint yet

A record is one line with the checksum of what follows, one of JSON, and what the first rank has besides: the draft of
COMMIT, the plain values and the metadata.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from elastic_ext.records.files import read_at_most

from .contents import KINDS, FileKind
from .lineage import check_id
from .listing import check_name
from .shardfile import laid_out
from .shardwriter import Piece

__all__ = ["RECORD", "Record", "Row", "ShelvedFile", "boot_id"]

RECORD = ".record"
_FORMAT = 1
_MOST_BYTES = 1 << 30
_CHECKSUM_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One rank's copy, as others have to know of it; of plain values, so that it can be passed on as JSON."""

    folder: str
    """The job's."""
    name: str
    """The checkpoint's."""
    generation: str
    run_id: str
    global_step: int
    rank: int
    num_ranks: int
    staged_ns: int
    """When it was whole, by that machine's clock."""

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

    def pieces(self, memory: memoryview) -> tuple[list[Piece], memoryview]:
        """The tensors in ``memory``, which is that of all the copy, and the memory of them together."""
        header = laid_out(self.tensors, generation="")
        own = memory[self.start : self.start + header.data_bytes]
        pieces = [
            Piece(name, entry.dtype, entry.sizes, own[entry.offset : entry.offset + entry.num_bytes])
            for name, entry in header.entries.items()
        ]
        return pieces, own

    @property
    def end(self) -> int:
        return self.start + laid_out(self.tensors, generation="").data_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All that is needed to write a rank's files without the rank."""

    row: Row
    memory: str | None = None
    """The file that holds the copy, beside the record; None where the rank writes no tensor."""
    files: Mapping[FileKind, ShelvedFile] = field(default_factory=dict)
    boot: str = ""
    """Which start of the machine it is of: what memory held before is gone."""
    draft: bytes = b""
    """Of the first rank, as the rest: what COMMIT says besides the names of files."""
    state: bytes = b""
    descriptions: Mapping[FileKind, bytes] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The contents of its file."""
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
    def read(cls, path: Path, *, boot: str) -> Record:
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
    def decoded(cls, data: bytes) -> Record:
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
        """The copy's memory, while a ``with`` lasts."""
        if self.memory is None:
            yield memoryview(b"")
            return
        with open(folder / self.memory, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield memoryview(pages)  # unmapped when nobody has a view of it any more


def boot_id() -> str:
    """What is another after each start of the machine; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def _record_of(said: Mapping[str, Any], blobs: bytes) -> Record:
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
    return Record(
        row=Row(**said["row"]),
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
