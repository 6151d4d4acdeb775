"""Staging: memory that a rank keeps for what it is saving, so that training goes on while it is written.

It lies there as it will in the files, and is as large as what the rank writes. It is made once, touched beforehand on
a thread of its own (a page that is touched for the first time takes ten times as long as copying to it), and kept: in
this process, or on a shelf that outlives it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from .contents import FileKind
from .memory import Part, put_bytes
from .shardfile import laid_out
from .shardwriter import PAGE_BYTES, Piece
from .shelf import Shelf
from .shelved import Record, ShelvedFile

__all__ = ["THREAD_NAME", "Staged", "Staging"]

THREAD_NAME = "elastic_ext staging"
_AT_ONCE_BYTES = 16 << 20


class Staged:
    """A shard file's tensors, one after another as they will lie in it, ``start`` bytes into the memory."""

    def __init__(self, pieces: Sequence[Piece], data: memoryview, start: int) -> None:
        self.pieces = pieces
        self.data = data
        self.start = start


class Staging:
    """One rank's memory for one save at a time, on ``shelf`` where that is given and has room for it."""

    def __init__(self, *, is_pinned: bool = False, shelf: Shelf | None = None) -> None:
        self._is_pinned = is_pinned
        self._shelf = shelf
        self._slots: dict[int, torch.Tensor] = {}
        self._slot = 0  # what is held lies in
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        self._finish()
        return sum(memory.numel() for memory in self._slots.values())

    @property
    def is_being_made(self) -> bool:
        """Whether ``hold`` would wait for memory."""
        return self._thread is not None and self._thread.is_alive()

    def num_missing(self, parts: Mapping[FileKind, Sequence[Part]]) -> int:
        """How many bytes of memory ``make_ready`` would make for ``parts``."""
        num_bytes = sum(_room_of(own) for own in parts.values())
        self._finish()
        slots = range(1 if self._shelf is None else self._shelf.num_slots)
        return sum(num_bytes - self._size_of(slot) for slot in slots if num_bytes > self._size_of(slot))

    def make_ready(self, parts: Mapping[FileKind, Sequence[Part]]) -> None:
        """Begin to make room for ``parts``, off the caller's way."""
        num_bytes = sum(_room_of(own) for own in parts.values())
        self._finish()
        shelf = self._shelf
        slots = range(1 if shelf is None else shelf.num_slots)
        small = [
            slot
            for slot in slots
            if num_bytes > self._size_of(slot) and not (shelf is not None and shelf.is_needed(slot))
        ]
        if not small:
            return

        def make() -> None:
            with contextlib.suppress(MemoryError, OSError, RuntimeError):  # hold() tries again, and says so
                for slot in small:
                    self._make(slot, num_bytes)
                    if self._shelf is not shelf:  # one of this process's own is enough
                        break

        self._thread = threading.Thread(target=make, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def hold(
        self, parts: Mapping[FileKind, Sequence[Part]], later: list[tuple[Part, memoryview]] | None = None
    ) -> dict[FileKind, Staged]:
        """Copies of ``parts``, which stay until the next call of this.

        With ``later`` those that change in ``optimizer.step()`` alone are put there, with where to copy them to.
        """
        self._finish()
        num_bytes = sum(_room_of(own) for own in parts.values())
        slot = None if self._shelf is None else self._shelf.begin()
        if slot is None:
            slot = self._leave_shelf()
        if num_bytes > self._size_of(slot):
            slot = self._make(slot, num_bytes)
        self._slot = slot
        memory = memoryview(self._memory.numpy().data)
        staged: dict[FileKind, Staged] = {}
        start = 0
        for kind, own in parts.items():
            staged[kind] = _put(memory[start : start + _room_of(own)], own, start, later)
            start += _room_of(own)
        return staged

    def keep(self, staged: Mapping[FileKind, Staged], record: Callable[[], Record]) -> None:
        """What is held is whole: have it outlive this process, with what ``record`` says of it."""
        if self._shelf is not None:
            files = {kind: _shelved(each) for kind, each in staged.items() if each.pieces}
            self._shelf.put(record, files)

    def forget(self, generation: str) -> None:
        """What was held for this save is a checkpoint now."""
        if self._shelf is not None:
            self._shelf.forget(generation)

    def close(self) -> None:
        """Nothing is held any more; on the shelf stays what is no checkpoint yet."""
        if self._shelf is not None:
            self._finish()
            self._shelf.close()

    @property
    def _memory(self) -> torch.Tensor:
        """What the last copy is in."""
        return self._slots.get(self._slot, _nothing())

    def _size_of(self, slot: int) -> int:
        return self._slots[slot].numel() if slot in self._slots else 0

    def _make(self, slot: int, num_bytes: int) -> int:
        """Make memory for a slot; the slot that it is for, another one where it is not on the shelf."""
        self._slots.pop(slot, None)  # first, so that there are never two
        pages = None if self._shelf is None else self._shelf.pages(slot, num_bytes)
        if pages is None:
            slot = self._leave_shelf()
            self._slots.pop(slot, None)
        self._slots[slot] = _touched(num_bytes, pages, is_pinned=self._is_pinned)
        return slot

    def _leave_shelf(self) -> int:
        """Have one memory of this process's own from now on: its slot."""
        if self._shelf is not None:
            self._shelf = None
            self._slots.clear()
        return 0

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _put(memory: memoryview, parts: Sequence[Part], start: int, later: list[tuple[Part, memoryview]] | None) -> Staged:
    header = laid_out(((part.name, part.dtype, part.sizes) for part in parts), generation="")
    by_name = {part.name: part for part in parts}
    pieces = []
    for name, entry in header.entries.items():
        part = by_name[name]
        into = memory[entry.offset : entry.offset + entry.num_bytes]
        if later is not None and part.is_stepped:
            later.append((part, into))
        else:
            put_bytes(part, into)
        pieces.append(Piece(name, part.dtype, part.sizes, into))
    return Staged(pieces, memory[: header.data_bytes], start)


def _shelved(staged: Staged) -> ShelvedFile:
    return ShelvedFile(start=staged.start, tensors=tuple((one.name, one.dtype, one.sizes) for one in staged.pieces))


def _room_of(parts: Sequence[Part]) -> int:
    num_bytes = sum(part.num_bytes for part in parts)
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _touched(num_bytes: int, pages: mmap.mmap | None, *, is_pinned: bool) -> torch.Tensor:
    """Memory whose pages are there: new, unless some is given."""
    if is_pinned and pages is None:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    elif num_bytes == 0:
        memory = _nothing()
    else:
        pages = mmap.mmap(-1, num_bytes) if pages is None else pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        for start in range(0, num_bytes, _AT_ONCE_BYTES):
            memory[start : start + _AT_ONCE_BYTES].zero_()  # torch leaves the interpreter to others meanwhile
    return memory
