"""Staging: memory that a rank keeps for what it is saving, so that training goes on while it is written.

It lies there as it will in the files, and is as large as what the rank writes. It is made once, touched beforehand on
a thread of its own (a page that is touched for the first time takes ten times as long as copying to it), and kept.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Mapping, Sequence

import torch

from .contents import FileKind
from .memory import Part, put_bytes
from .shardfile import laid_out
from .shardwriter import PAGE_BYTES, Piece

__all__ = ["THREAD_NAME", "Staged", "Staging"]

THREAD_NAME = "elastic_ext staging"
_AT_ONCE_BYTES = 16 << 20


class Staged:
    """A shard file's tensors, one after another as they will lie in it."""

    def __init__(self, pieces: Sequence[Piece], data: memoryview) -> None:
        self.pieces = pieces
        self.data = data


class Staging:
    """One rank's memory for one save at a time."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        self._finish()
        return self._memory.numel()

    def make_ready(self, parts: Mapping[FileKind, Sequence[Part]]) -> None:
        """Begin to make room for ``parts``, off the caller's way."""
        num_bytes = sum(_room_of(own) for own in parts.values())
        self._finish()
        if num_bytes <= self._memory.numel():
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old one first, so that there are never two

        def make() -> None:
            with contextlib.suppress(MemoryError, OSError, RuntimeError):  # hold() tries again, and says so
                self._memory = _touched(num_bytes, is_pinned=self._is_pinned)

        self._thread = threading.Thread(target=make, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def hold(self, parts: Mapping[FileKind, Sequence[Part]]) -> dict[FileKind, Staged]:
        """Copies of ``parts``, which stay until the next call of this."""
        self._finish()
        num_bytes = sum(_room_of(own) for own in parts.values())
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = _touched(num_bytes, is_pinned=self._is_pinned)
        memory = memoryview(self._memory.numpy().data)
        staged: dict[FileKind, Staged] = {}
        start = 0
        for kind, own in parts.items():
            staged[kind] = _put(memory[start : start + _room_of(own)], own)
            start += _room_of(own)
        return staged

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _put(memory: memoryview, parts: Sequence[Part]) -> Staged:
    header = laid_out(((part.name, part.dtype, part.sizes) for part in parts), generation="")
    by_name = {part.name: part for part in parts}
    pieces = []
    for name, entry in header.entries.items():
        part = by_name[name]
        into = memory[entry.offset : entry.offset + entry.num_bytes]
        put_bytes(part, into)
        pieces.append(Piece(name, part.dtype, part.sizes, into))
    return Staged(pieces, memory[: header.data_bytes])


def _room_of(parts: Sequence[Part]) -> int:
    num_bytes = sum(part.num_bytes for part in parts)
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _touched(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """New memory whose pages are there."""
    if is_pinned:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    elif num_bytes == 0:
        memory = torch.empty(0, dtype=torch.uint8)
    else:
        pages = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        for start in range(0, num_bytes, _AT_ONCE_BYTES):
            memory[start : start + _AT_ONCE_BYTES].zero_()  # torch leaves the interpreter to others meanwhile
    return memory
