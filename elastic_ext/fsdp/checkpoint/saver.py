"""Saver: has every rank write its part of a checkpoint, and the first one make it exist.

Each element is written once, by one of the ranks that have it. What ranks tell one another of what they hold is in
meeting.py. Nothing is decided here of where checkpoints lie among each other, which is jobfolder.py's affair,
nor of what comes before what on the disk, which is writing.py's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ext.errors import CheckpointError
from elastic_ext.ranks.group import Ranks

from .background import BackgroundSave
from .collecting import SaveRequest, ToSave
from .commit import Commit
from .contents import VALUES
from .jobfolder import JobFolder
from .lineage import Chain
from .meeting import Meetings, Met
from .memory import Part, part_of
from .retain import Retention
from .shardwriter import Piece
from .storage import Storage
from .together import agree_and_gather, agree_on
from .writing import Shard, Writing, give_up, make_folder

__all__ = ["Saver", "beginning"]

_logger = logging.getLogger(__name__)


class Saver:
    """One rank's part in saving."""

    def __init__(self, ranks: Ranks, storage: Storage, *, retention: Retention) -> None:
        self.meetings = Meetings(ranks)
        """Of these ranks, before each save."""
        self.late: BackgroundSave | None = None
        """One that was given up, and whose thread may still write from the memory that is kept."""
        self._ranks = ranks
        self._storage = storage
        self._retention = retention

    def save(self, folder: JobFolder, request: SaveRequest, draft: Commit) -> Path:
        """Write the checkpoint; on return it exists, for every rank. All ranks call this between two steps.

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
            writing = self.writing(folder, name, met)
            doing = f"writing checkpoint {name}"

            def write() -> dict[str, list[object]]:
                shards = {kind: Shard(list(map(_piece, parts))) for kind, parts in met.parts.items()}
                return storage.within(lambda: writing.write(shards), doing)

            of_ranks = storage.together(write, doing, is_patient=False)

            def commit() -> None:
                if rank == 0:
                    writing.commit(draft, of_ranks)

            storage.together(commit, f"committing checkpoint {name}")
        except BaseException:
            if rank == 0 and name in folder.begun:
                storage.restart_clock()
                discarding = f"discarding checkpoint {name}"
                give_up(lambda: storage.within(lambda: folder.discard(name), discarding), name)
            raise
        if rank == 0:
            self._retain_in_time(folder, draft.lineage)
        return writing.path

    def retain(self, folder: JobFolder, chain: Chain) -> None:
        """On the first rank, after a commit: remove the checkpoints that are not to be kept any more."""
        if self._retention.keep_last is not None:
            folder.retain(self._retention, chain)

    def _retain_in_time(self, folder: JobFolder, chain: Chain) -> None:
        """The same while the other ranks go on; what the storage does not do in time it does later."""
        if self._retention.keep_last is not None:
            self._storage.restart_clock()
            try:
                self._storage.within(lambda: self.retain(folder, chain), "removing old checkpoints")
            except CheckpointError as error:
                _logger.warning("old checkpoints are still being removed: %s", error)

    def writing(self, folder: JobFolder, name: str, met: Met) -> Writing:
        """What this rank is to write."""
        is_first = self._ranks.rank == 0
        state = {**met.contents.state, VALUES: met.values}
        return Writing(
            folder,
            name,
            generation=met.generation,
            rank=self._ranks.rank,
            num_ranks=self._ranks.world_size,
            descriptions=met.descriptions,
            state=json.dumps(state, allow_nan=False).encode() if is_first else b"",
        )

    def meet(self, name: str, what: ToSave, ask: Callable[[], str], and_then: Callable[[str], None] | None) -> Met:
        """Collect what this rank has, do what is given, by the save's generation, and hear of what the others have."""
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
    return f"beginning checkpoint {name}"


def _piece(part: Part) -> Piece:
    return Piece(part.name, part.dtype, part.sizes, part_of(part.tensor, part.box, part.part))
