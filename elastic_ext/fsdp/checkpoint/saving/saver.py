"""One save by all ranks: they tell one another what they hold, each writes its part, and the first one commits."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import KINDS, VALUES, Contents, FileKind, Inventory, meta_of
from elastic_ext.fsdp.checkpoint.coordination import agree_and_gather, agree_on, gather_or_raise
from elastic_ext.fsdp.checkpoint.folder.commit import Commit, checksum_of
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import WrittenPart, part_of
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.fsdp.state import LocalShard, local_of
from elastic_ext.ranks.group import Ranks

from .background import BackgroundSave
from .collect import Comparable, SaveRequest, ToSave, differing_names
from .rank_files import Shard, Writing, give_up, make_folder

__all__ = ["Meetings", "Met", "SaveMeeting", "Saver", "beginning"]

_logger = logging.getLogger(__name__)


# --- what ranks tell one another when a save begins, so that they know what they hold together -----------------------
# That is compared by digests. The whole of it goes round once, and again when it has changed on one of them.


@dataclass(frozen=True, slots=True)
class _Agreed:
    """The metadata of all ranks' tensors as last agreed, used again while no rank's inventories change."""

    digests: Sequence[str]
    """The digest of each rank's inventories, in the order of ranks."""
    metas: Mapping[FileKind, StateMeta]
    data: Mapping[FileKind, bytes]
    """The metadata as JSON, as it is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Met:
    """What one rank knows of a save once all ranks have exchanged their inventories."""

    contents: Contents
    """What this rank contributes to the checkpoint."""
    parts: Mapping[FileKind, Sequence[WrittenPart]]
    """The parts of tensors that this rank writes, by the kind of file."""
    descriptions: Mapping[FileKind, bytes]
    """The metadata of all ranks' tensors, as JSON."""
    values: Mapping[str, Any]
    """The ``Contents.values`` of all ranks, merged."""
    generation: str
    """The random id of the save, the same on all ranks."""


class Meetings:
    """The exchanges of inventories before saves, on one rank; the whole of them goes round only after a change."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._agreed: _Agreed | None = None

    def of(self, what: ToSave) -> SaveMeeting:
        """The exchange for one save."""
        return SaveMeeting(self, self._ranks, what)

    def agree(self, inventories: Mapping[FileKind, Inventory], digests: Sequence[str], name: str) -> _Agreed:
        """The metadata of all ranks' tensors, the same on every rank; gathers inventories if a digest has changed."""
        if self._agreed is None or self._agreed.digests != digests:
            self._agreed = None
            metas: dict[FileKind, StateMeta] = {}
            for kind in KINDS:
                own = inventories[kind].to_json()
                rows = self._ranks.gather(own, f"comparing what ranks hold for checkpoint {name}")
                metas[kind] = meta_of([Inventory.from_json(row) for row in rows], is_of_one_model=kind == "model")
            data = {kind: meta.to_json() for kind, meta in metas.items()}
            self._agreed = _Agreed(digests, metas, data)
        return self._agreed


class SaveMeeting:
    """One rank's side of the exchange of inventories when a save begins."""

    def __init__(self, meetings: Meetings, ranks: Ranks, what: ToSave) -> None:
        self._meetings = meetings
        self._ranks = ranks
        self._what = what
        self._comparable: Comparable | None = None  # where there are others
        self._contents: Contents
        self._inventories: Mapping[FileKind, Inventory]

    def begin(self) -> dict[str, Any]:
        """Collect this rank's contents, as if buffers were equal on all ranks; gives what other ranks need to know."""
        self._contents = self._what.collect()
        self._inventories = self._contents.inventories()
        if self._ranks.world_size > 1:
            self._comparable = Comparable(self._contents, self._ranks.rank)
        return {
            "digest": checksum_of(b"\n".join(self._inventories[kind].to_json() for kind in KINDS)),
            "values": dict(self._contents.values),
            "alike": None if self._comparable is None else self._comparable.digest,
            "generation": secrets.token_hex(8),  # the first rank's counts
        }

    def end(self, name: str, said: Sequence[Mapping[str, Any]]) -> Met:
        """What this rank is to save, by what each rank has ``said``: what ``begin`` gave there. All ranks call this."""
        digests = [str(each["digest"]) for each in said]
        if len({each["alike"] for each in said}) > 1:
            own = self._add_own(name)
            digests = [checksum_of(f"{digest} {own}".encode()) for digest in digests]
        agreed, rank = self._meetings.agree(self._inventories, digests, name), self._ranks.rank
        stepped = {_place_of(local_of(parameter)) for parameter in self._what.stepped}
        return Met(
            contents=self._contents,
            parts={
                kind: list(_parts(agreed.metas[kind], held, rank, stepped)) for kind, held in self._contents.by_kind()
            },
            descriptions=agreed.data,
            values={key: value for each in said for key, value in each["values"].items()},
            generation=str(said[0]["generation"]),
        )

    def _add_own(self, name: str) -> list[str]:
        """Add this rank's own copies of tensors that differ between ranks; gives the names of those tensors."""
        comparable = self._comparable
        assert comparable is not None
        doing = f"comparing what ranks have alike for checkpoint {name}"
        names = differing_names(gather_or_raise(self._ranks, lambda: dict(comparable.digests), doing))
        self._contents = comparable.contents_with(names)
        self._inventories = self._contents.inventories()
        return names


def _parts(meta: StateMeta, held: Sequence[LocalShard], rank: int, stepped: Collection[int]) -> Iterator[WrittenPart]:
    for each in held:
        if each.is_alias_of is not None:
            continue
        part = meta.tensors[each.name].layout.boxes[rank]
        if not part.is_empty:
            is_stepped = each.kind == "like" or (each.kind == "parameter" and _place_of(each.tensor) in stepped)
            yield WrittenPart(each.name, each.dtype, each.tensor, each.box, part, is_stepped)


def _place_of(tensor: torch.Tensor) -> int:
    """The address where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


# --- has every rank write its part of a checkpoint, and the first one make it exist ----------------------------------
# Each element is written once, by one of the ranks that have it. What ranks tell one another of what they hold is in
# SaveMeeting. Nothing is decided here of where checkpoints lie among each other, which is
# fsdp/checkpoint/folder/job_folder.py's affair, nor of what comes before what on the disk, which is rank_files.py's.


class Saver:
    """Saves checkpoints: every rank writes its part, and rank 0 commits."""

    def __init__(self, ranks: Ranks, storage: Storage, *, retention: Retention) -> None:
        self.meetings = Meetings(ranks)
        """The exchanges of inventories between these ranks, one before each save."""
        self.late: BackgroundSave | None = None
        """An async save that was given up, and whose thread may still read the staging memory; None without one."""
        self._ranks = ranks
        self._storage = storage
        self.retention = retention
        """Which checkpoints are kept."""

    def save(self, folder: JobFolder, request: SaveRequest, draft: Commit) -> Path:
        """Save a checkpoint while training waits; on return it exists, for every rank. All call this between two steps.

        What it holds is collected, which may raise on some. ``draft`` is the first rank's: what COMMIT says besides the
        names of files and the save's generation. Where one rank fails all raise, and there is no checkpoint of this
        name. Nothing else may be under way.
        """
        storage, rank, name = self._storage, self._ranks.rank, request.name

        def make(generation: str) -> None:
            storage.restart_clock()
            storage.within(
                lambda: make_folder(folder, name, generation, draft.lineage, replaces=request.replaces), beginning(name)
            )

        agree_on(self._ranks, request.ask)  # before anything is done
        try:
            met = self.meet(name, request.what, request.ask, make if rank == 0 else None)
            writing = self.writing(folder, name, met, draft)
            doing = f"writing checkpoint {name}"

            def write() -> dict[str, list[object]]:
                shards = {kind: Shard(list(map(_piece, parts))) for kind, parts in met.parts.items()}
                return storage.within(lambda: writing.write(shards), doing)

            of_ranks = storage.together(write, doing, is_patient=False)

            def commit() -> None:
                if rank == 0:
                    writing.commit(of_ranks)

            storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if rank == 0 and name in folder.begun:
                storage.restart_clock()
                discarding = f"discarding checkpoint {name}"
                give_up(lambda: storage.within(lambda: folder.discard(name), discarding), name)
            raise
        if rank == 0 and self.retention.keep_last is not None:  # within the storage's time limit, as other ranks go on
            storage.restart_clock()
            try:
                storage.within(lambda: writing.retain(self.retention), "removing old checkpoints")
            except CheckpointError as error:
                _logger.warning("old checkpoints are still being removed: %s", error)
        return writing.path

    def writing(self, folder: JobFolder, name: str, met: Met, draft: Commit) -> Writing:
        """The writer of this rank's files of a checkpoint."""
        is_first = self._ranks.rank == 0
        state = {**met.contents.state, VALUES: met.values}
        return Writing(
            folder,
            name,
            draft,
            generation=met.generation,
            rank=self._ranks.rank,
            num_ranks=self._ranks.world_size,
            descriptions=met.descriptions,
            state=json.dumps(state, allow_nan=False).encode() if is_first else b"",
        )

    def meet(self, name: str, what: ToSave, ask: Callable[[], str], and_then: Callable[[str], None] | None) -> Met:
        """Collect this rank's contents, call ``and_then`` with this rank's generation, and exchange inventories.

        The first rank's generation is the save's, so that ``and_then`` is given on the first rank alone.
        """
        doing = beginning(name)
        meeting = self.meetings.of(what)

        def begin() -> dict[str, Any]:
            self._storage.refuse_if(self.late is not None and not self.late.is_over, doing)
            self.late = None
            said = meeting.begin()
            if and_then is not None:
                and_then(said["generation"])
            return said

        return meeting.end(name, agree_and_gather(self._ranks, ask, begin, doing))


def beginning(name: str) -> str:
    """What a save is doing when ranks first meet, in words for errors."""
    return f"beginning checkpoint {name}"


def _piece(part: WrittenPart) -> TensorToWrite:
    return TensorToWrite(part.name, part.dtype, part.sizes, part_of(part.tensor, part.box, part.part))
