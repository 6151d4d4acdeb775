"""Staging: host memory that holds what is being saved while training goes on, filled at a boundary or during the next
passes.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import FileKind
from elastic_ext.fsdp.checkpoint.format.shardfile import laid_out
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import WrittenPart, put_bytes
from elastic_ext.fsdp.checkpoint.format.writer import PAGE_BYTES, TensorToWrite
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.torch_private.sharded import version_of

from .rank_files import Shard, Writing
from .shared_memory import Shelf, ShelvedFile

__all__ = ["THREAD_NAME", "Copying", "Samples", "Staging", "free_bytes", "num_copies", "why_no_room"]


# --- memory that a rank keeps for what it is saving, so that training goes on while it is written --------------------
# It lies there as it will in the files, and is as large as what the rank writes. It is made once, touched beforehand on
# a thread of its own (a page that is touched for the first time takes ten times as long as copying to it), and kept: in
# this process, or on a shelf that outlives it.

THREAD_NAME = "elastic_ext staging"
_AT_ONCE_BYTES = 16 << 20


class Staging:
    """One rank's staging memory, for one save at a time; on ``shelf`` where that is given and has room."""

    def __init__(self, *, is_pinned: bool = False, shelf: Shelf | None = None) -> None:
        self._is_pinned = is_pinned
        self._shelf = shelf
        self._slots: dict[int, torch.Tensor] = {}
        self._slot = 0  # the slot that holds the last copy
        self._thread: OwnedThread | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the staging memory, in bytes."""
        self._finish()
        return sum(memory.numel() for memory in self._slots.values())

    @property
    def is_being_made(self) -> bool:
        """Whether staging memory is still being allocated, which ``hold`` would wait for."""
        return self._thread is not None and self._thread.is_alive()

    def num_missing(self, parts: Mapping[FileKind, Sequence[WrittenPart]]) -> int:
        """How many more bytes of staging memory ``make_ready`` would allocate for ``parts``."""
        num_bytes = sum(_room_of(own) for own in parts.values())
        self._finish()
        slots = range(1 if self._shelf is None else self._shelf.num_slots)
        return sum(num_bytes - self._size_of(slot) for slot in slots if num_bytes > self._size_of(slot))

    def make_ready(self, parts: Mapping[FileKind, Sequence[WrittenPart]]) -> None:
        """Begin to allocate staging memory for ``parts``, on a thread."""
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

        self._thread = OwnedThread(make, name=THREAD_NAME)
        self._thread.start()

    def hold(
        self, parts: Mapping[FileKind, Sequence[WrittenPart]], later: list[tuple[WrittenPart, memoryview]] | None = None
    ) -> dict[FileKind, Shard]:
        """Copy ``parts`` into the staging memory; gives the copies, which stay until the next call of this.

        If a list ``later`` is given, parts that change in ``optimizer.step()`` alone are not copied: each is added to
        the list, with the memory that it is to be copied to.
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
        shards: dict[FileKind, Shard] = {}
        start = 0
        for kind, own in parts.items():
            shards[kind] = _put(memory[start : start + _room_of(own)], own, start, later)
            start += _room_of(own)
        return shards

    def keep(self, shards: Mapping[FileKind, Shard], writing: Writing) -> None:
        """Have the last copy, now whole, outlive this process: put its record on the shelf, if there is one."""
        if self._shelf is not None:
            files = {kind: _shelved(shard) for kind, shard in shards.items() if shard.pieces}
            self._shelf.put(writing.record, files)

    def forget(self, generation: str) -> None:
        """Remove the record of a save's copy from the shelf, since the save is a checkpoint now."""
        if self._shelf is not None:
            self._shelf.forget(generation)

    def close(self) -> None:
        """Close the shelf, if there is one; copies that are no checkpoint yet stay there."""
        if self._shelf is not None:
            self._finish()
            self._shelf.close()

    @property
    def _memory(self) -> torch.Tensor:
        """The memory that the last copy is in."""
        return self._slots.get(self._slot, _nothing())

    def _size_of(self, slot: int) -> int:
        return self._slots[slot].numel() if slot in self._slots else 0

    def _make(self, slot: int, num_bytes: int) -> int:
        """Allocate memory for a slot; gives that slot, or the one of this process's own memory if the shelf is off."""
        self._slots.pop(slot, None)  # first, so that there are never two
        pages = None if self._shelf is None else self._shelf.pages(slot, num_bytes)
        if pages is None:
            slot = self._leave_shelf()
            self._slots.pop(slot, None)
        self._slots[slot] = _touched(num_bytes, pages, is_pinned=self._is_pinned)
        return slot

    def _leave_shelf(self) -> int:
        """Use memory of this process's own from now on, and not the shelf; gives its slot."""
        if self._shelf is not None:
            self._shelf = None
            self._slots.clear()
        return 0

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.wait(None)
            self._thread = None


def _put(
    memory: memoryview, parts: Sequence[WrittenPart], start: int, later: list[tuple[WrittenPart, memoryview]] | None
) -> Shard:
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
        pieces.append(TensorToWrite(name, part.dtype, part.sizes, into))
    return Shard(pieces, memory[: header.data_bytes], start)


def _shelved(shard: Shard) -> ShelvedFile:
    return ShelvedFile(start=shard.start, tensors=tuple((one.name, one.dtype, one.sizes) for one in shard.pieces))


def _room_of(parts: Sequence[WrittenPart]) -> int:
    num_bytes = sum(part.num_bytes for part in parts)
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _touched(num_bytes: int, pages: mmap.mmap | None, *, is_pinned: bool) -> torch.Tensor:
    """Memory whose pages are all there, as a tensor of bytes: in ``pages`` if given, else new."""
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


# --- some elements of each of many tensors, to find out later whether the tensors were changed since -----------------
# No counter is told of what is written through numpy, dlpack, ``.data`` or a storage: such a change is seen in memory
# alone, and to read all of that again would take as long as copying it.

_NUM_PLACES, _NUM_TOGETHER = 16, 8  # how many runs of elements are sampled of a tensor, and how long each is
_NUM_ELEMENTS = _NUM_PLACES * _NUM_TOGETHER


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples of some tensors of one device and dtype, compared all at once."""

    places: list[int]
    views: list[torch.Tensor]  # of the samples, in the tensors' own memory
    seen: torch.Tensor


class Samples:
    """Some elements of each of ``tensors``, kept to find out later whether one was changed.

    The elements are those after the work given to devices so far; nothing here shares memory with autograd.

    A tensor of up to 128 elements is looked at whole, of another one 128 elements: what changes one in twenty of its
    elements, wherever they lie, escapes once in seven hundred times.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        of_kinds: dict[tuple[torch.device, torch.dtype, int], tuple[list[int], list[torch.Tensor]]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.numel():
                view = _sampled(tensor)
                places, views = of_kinds.setdefault((tensor.device, tensor.dtype, view.dim()), ([], []))
                places.append(place)
                views.append(view)
        self._groups = [_Group(places, views, torch.cat(views)) for places, views in of_kinds.values()]

    def changed(self) -> int | None:
        """The index of a tensor whose samples have changed, None where none have; waits for a GPU."""
        for group in self._groups:
            if not _are_alike(torch.cat(group.views), group.seen):
                earlier = torch.split(group.seen, [view.shape[0] for view in group.views])
                for place, view, seen in zip(group.places, group.views, earlier, strict=True):
                    if not _are_alike(view, seen):
                        return place
        return None


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some of a tensor's elements: runs at odd distances, so that they lie in different columns."""
    size, stride = tensor.numel(), 1
    if not tensor.is_contiguous() and _extent(tensor) != size:  # it has gaps: along its longest dimension
        size, stride = max(zip(tensor.shape, tensor.stride(), strict=True))
    if size <= _NUM_ELEMENTS:
        return tensor.as_strided((size,), (stride,))
    distance = ((size - _NUM_TOGETHER) // (_NUM_PLACES - 1) - 1) | 1
    return tensor.as_strided((_NUM_PLACES, _NUM_TOGETHER), (distance * stride, stride))


def _extent(tensor: torch.Tensor) -> int:
    """How many elements of memory a tensor spans, from its first to its last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, so that a NaN is no change."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# --- tensors that are being copied while the next forward and backward passes run ------------------------------------
# They are those that change in ``optimizer.step()`` alone, which waits for the end of it.


class Copying:
    """An overlapped copy of some parts: made by another thread during the next passes, for ``keep`` if none changed."""

    def __init__(self, parts: Sequence[tuple[WrittenPart, memoryview]], keep: Callable[[], None]) -> None:
        self._parts = parts
        self._keep = keep
        self._is_whole = False
        self._versions = [version_of(part.tensor) for part, _ in parts]
        self._samples = Samples([part.tensor for part, _ in parts])
        self._has_ended, self._is_judged = threading.Event(), threading.Event()
        self._changed: str | None = None  # the name of a part that was
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {part.tensor.device for part, _ in parts if part.tensor.is_cuda}:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))  # the last step is still being worked on

    def run(self) -> None:
        """Copy all parts; on the save's thread."""
        try:
            for part, into in self._parts:
                stream = self._streams.get(part.tensor.device)
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    put_bytes(part, into)
            self._is_whole = True
        finally:
            self._has_ended.set()

    def wait(self) -> None:
        """Wait until the parts may change, and call ``keep`` if none has; on the training's thread, between changes."""
        if self._is_judged.is_set():
            return
        self._has_ended.wait()
        self._changed = self._changed or self._find_changed()
        is_good, self._is_whole = self._is_whole and self._changed is None, False  # kept once, if that is interrupted
        if is_good:
            self._keep()
        self._is_judged.set()  # only now: what is committed is kept no more
        self._parts, self._samples = (), Samples([])  # which may be freed while what was copied is written

    def _find_changed(self) -> str | None:
        """The name of a part that was changed since the copy began; writes past autograd are seen by samples."""
        for (part, _), version in zip(self._parts, self._versions, strict=True):
            if version_of(part.tensor) != version:
                return part.name
        place = self._samples.changed()
        return None if place is None else self._parts[place][0].name

    def end(self) -> None:
        """Release whoever waits for this copy, which will not be made."""
        self._has_ended.set()
        self._is_judged.set()

    def make_sure(self, seconds: float) -> None:
        """CheckpointError where a part was changed during the copy, or nobody has called ``wait`` in ``seconds``."""
        if not self._is_judged.wait(seconds):
            raise CheckpointError(f"no step has ended within {seconds:g} seconds since this checkpoint was copied")
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed in place while it was being copied for this checkpoint; change "
                "parameters and optimizer state within `with trainer.mutate():`, which waits for that, or give "
                "the trainer overlap_saving=False"
            )


# --- how much a process could still have, and whether what ranks want of it is there ---------------------------------

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # of the kernel's control groups, version 2 and version 1; the last is what is given back when asked for
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LEFT = 0.05  # the share of free memory that is left for whatever comes


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """How many bytes of memory are free on the machine or in this process's container, whichever is less."""
    free = int(psutil.virtual_memory().available)
    for folder, limit_name, current_name, reclaimed in _LIMITS:
        try:
            limit, current = (int((cgroup / folder / name).read_text()) for name in (limit_name, current_name))
            stat = dict(line.split() for line in (cgroup / folder / "memory.stat").read_text().splitlines())
            return max(min(free, limit - current + int(stat[reclaimed])), 0)
        except (OSError, KeyError, ValueError):  # no such limit
            continue
    return free


def why_no_room(wants: Iterable[tuple[str, int, int]]) -> str | None:
    """Why a host lacks memory, or None; ``wants`` has each rank's host, the bytes it wants and those free there."""
    by_host: dict[str, tuple[int, int]] = {}
    for host, wanted, free in wants:
        before, least = by_host.get(host, (0, free))
        by_host[host] = before + wanted, min(least, free)
    for host, (wanted, free) in by_host.items():
        if wanted > free * (1 - _LEFT):
            return f"{wanted / 1e9:.2f} GB are wanted on {host}, which has {free / 1e9:.2f} GB free"
    return None


def num_copies(*, in_background: bool, keep_previous: bool) -> int:
    """How many copies a process keeps of what it saves; with an agent's memory the previous one may be kept too."""
    if keep_previous and not in_background:
        raise ValueError(
            "keep_previous is True, and nothing is saved in the background; only background saves keep copies: turn "
            "them on, or leave keep_previous out"
        )
    return 1 + keep_previous if in_background else 0
