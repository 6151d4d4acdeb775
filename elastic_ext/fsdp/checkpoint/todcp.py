"""To DCP: a checkpoint as a folder of torch.distributed.checkpoint, which ``dcp.load`` reads on any number of ranks.

One process does it, without a process group, and holds some megabytes at a time. Under which keys things stand is
decided in `dcpplan`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.dtypes import dtype_of
from elastic_ext.fsdp.plain import unpack
from elastic_ext.records.files import is_temporary, move_folder, remove_folder, temporary_beside

from .contents import EXTRA_STATES, KINDS, STATE_FILE, meta_file
from .dcpplan import METAS, RECORD, STATE, Keys, Leaf, Outgoing, OutTensor, Refusals, joined, leaves_of, runs_of
from .dcprecord import Record
from .dcpwriter import DcpWriter
from .dtypes import ITEM_BYTES
from .jobfolder import refuse_in_a_jobs_folder
from .listing import Found
from .streamed import Streamed, Stretch

__all__ = ["write_dcp"]

_PIECE_BYTES = 16 << 20  # dcp.load reads a piece as a whole, for whatever part of it
_SUFFIX_CHARACTERS = len(".0123456789abcdef.tmp")


def write_dcp(
    found: Found,
    dest: Path,
    *,
    keys: Keys,
    first_names: Collection[str],
    force: bool,
    on_progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write a checkpoint as the folder ``dest``; how many tensors, and how many bytes they have."""
    with Streamed(found) as streamed:
        refusals = Refusals()
        metas = {kind: streamed.meta(kind) for kind in KINDS}
        state = streamed.state()
        outgoing = Outgoing.of(metas, state, keys=keys, first_names=first_names, refusals=refusals)
        values = {leaf: unpack(value) for leaf, value in outgoing.values.items()}
        for name, value in state[EXTRA_STATES].items():
            values.update(leaves_of(keys.of_model(name), unpack(value)))
        _refuse_twice(itertools.chain(*(tensor.leaves for tensor in outgoing.tensors), values), refusals)
        refusals.raise_if_any(found.path)
        reading = _Reading(streamed, outgoing, on_progress)
        num_tensors = len(outgoing.tensors)
        with _new_folder(dest, force=force) as folder, DcpWriter(folder) as writer:
            for leaf, value in values.items():
                writer.put_value(leaf, value)
            for tensor in outgoing.tensors:
                shape = tensor.meta.layout.shape
                writer.put_tensor(tensor.leaves, dtype_of(tensor.meta.dtype), shape, reading.blocks_of(tensor))
            _put_text(writer, RECORD, Record.of(found.commit, keys, first_names).to_json())
            _put_text(writer, STATE, found.read_state(STATE_FILE))
            for kind in KINDS:
                _put_text(writer, (*METAS, kind), found.read_meta(meta_file(kind)))
            streamed.close()
            del metas, state, outgoing, values  # torch's metadata of many tensors needs the room
            writer.finish()
    return num_tensors, reading.num_bytes


class _Reading:
    """Tensors of one checkpoint, read a block at a time."""

    def __init__(self, streamed: Streamed, outgoing: Outgoing, on_progress: Callable[[int, int], None]) -> None:
        self.num_bytes = sum(_num_bytes_in(tensor) for tensor in outgoing.tensors)
        self._num_done = 0
        self._streamed = streamed
        self._on_progress = on_progress

    def blocks_of(self, tensor: OutTensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Offsets and elements of each, in memory that the next one has too."""
        dtype = dtype_of(tensor.meta.dtype)
        start = 0
        for offsets, sizes in runs_of(tensor.meta.layout.shape, _PIECE_BYTES // ITEM_BYTES[tensor.meta.dtype]):
            end = start + math.prod(sizes)
            if start == end:
                yield offsets, torch.empty(sizes, dtype=dtype)
                continue
            (view,) = self._streamed.read(tensor.kind, [Stretch(tensor.meta, start, end)])
            self._num_done += len(view)
            self._on_progress(self._num_done, self.num_bytes)
            yield offsets, torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(sizes)
            start = end


def _num_bytes_in(tensor: OutTensor) -> int:
    return math.prod(tensor.meta.layout.shape) * ITEM_BYTES[tensor.meta.dtype]


def _put_text(writer: DcpWriter, leaf: Leaf, text: bytes) -> None:
    """Text as a tensor of its bytes, which needs no pickle to be read."""
    block = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    writer.put_tensor([leaf], torch.uint8, block.shape, [((0,), block)])


def _refuse_twice(leaves: Iterable[Leaf], refusals: Refusals) -> None:
    keys: set[str] = set()
    for leaf in leaves:
        if joined(leaf) in keys:
            refusals.add("keys that two things would have", joined(leaf))
        keys.add(joined(leaf))


@contextlib.contextmanager
def _new_folder(dest: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside ``dest``, which takes its place when the ``with`` ends well, and is removed where it does not."""
    dest = Path(os.path.abspath(dest))
    refuse_in_a_jobs_folder(dest)
    _refuse_taken(dest, force=force)
    for name in os.listdir(dest.parent):  # of those that were killed
        if is_temporary(name) and name[1:-_SUFFIX_CHARACTERS] == dest.name:
            remove_folder(dest.parent / name)
    folder = temporary_beside(dest)
    folder.mkdir(mode=0o775)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, folder)
        yield folder
        _refuse_taken(dest, force=force)
        if os.path.lexists(dest):
            remove_folder(dest)
        move_folder(folder, dest)
        undo.pop_all()


def _refuse_taken(dest: Path, *, force: bool) -> None:
    if not os.path.lexists(dest):
        return
    if dest.is_dir() and not dest.is_symlink():
        names = os.listdir(dest)
        others = [name for name in names if not (name.endswith(".distcp") or name == ".metadata")]
        if not names or (force and not others):
            return
        if force:
            raise CheckpointError(f"{dest} holds {others[0]} besides what dcp.save has made; remove it by hand")
    raise CheckpointError(
        f"{dest} is there already; give another dest, or force=True (--force), which replaces a folder of DCP's"
    )


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        remove_folder(folder)
