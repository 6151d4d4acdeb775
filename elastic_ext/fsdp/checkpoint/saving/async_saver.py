"""LiveSaver: saves while training goes on: what is saved is copied, and a thread of each rank writes it from there.

What that thread does is in background.py, what it writes in saver.py and rank_files.py, the memory in staging.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import FileKind
from elastic_ext.fsdp.checkpoint.coordination import agree_and_gather, failure_of, gather_or_raise, joined_failure
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import WrittenPart
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.group import Ranks

from .background import PATIENCE_SECONDS, BackgroundSave
from .collect import SaveRequest, ToSave
from .letters import Letters, ToldOfFailure
from .rank_files import Shard, make_folder
from .saver import Met, Saver, beginning
from .staging import Copying, Staging, free_bytes, why_no_room

__all__ = ["LiveSaver", "Manner"]

_logger = logging.getLogger(__name__)

_SHORT_SECONDS, _LONG_SECONDS = 0.002, 0.1  # to wait for one's own part before asking the others for theirs


def _nothing() -> None:
    """Do nothing: what is called at the end of no save."""


def _raise(error: CheckpointError) -> None:
    raise error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manner:
    """How one async save behaves: whether it waits for the one before, overlaps passes, and is written at once."""

    waits: bool = True
    """Whether to wait for an async save under way; if not, no save is begun beside that one."""
    overlaps: bool = False
    """Whether parameters, and optimizer state of their shape, are copied during the next passes, until ``fence``."""
    starts: bool = True
    """Whether the copy is written; if not it is held until the next save, for ``write_held`` or ``begin_held``."""
    on_failed: Callable[[CheckpointError], None] = _raise
    """Called on all ranks with the error of the save before this one, if that has failed."""


class LiveSaver:
    """Async saves on one rank: stages what is saved, and has a thread write it; needs ``staging``."""

    def __init__(self, ranks: Ranks, storage: Storage, saver: Saver, staging: Staging | None) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saver = saver
        self._staging = staging
        self._under_way: BackgroundSave | None = None
        self._on_end: Callable[[], None] = _nothing  # called when that save is known to be made
        self._copying: Copying | None = None
        self._held: BackgroundSave | None = None  # copied, and not to be written unless somebody asks
        self._written_late: BackgroundSave | None = None  # a held save that is written, since somebody has asked for it
        self._last: BackgroundSave | None = None  # the newest save that is known to be made
        self._lock = threading.Lock()

    @property
    def can_save(self) -> bool:
        """Whether async saves are possible: there is staging memory, and the ranks share a board."""
        return self._staging is not None and self._ranks.board is not None

    @property
    def is_free(self) -> bool:
        """Whether an async save can begin on this rank without waiting for staging memory or another save."""
        is_made = self._staging is not None and not self._staging.is_being_made
        return self.can_save and is_made and (self._under_way is None or not _is_running(self._under_way))

    def save(
        self,
        folder: JobFolder,
        request: SaveRequest,
        draft: Commit,
        manner: Manner,
        *,
        on_end: Callable[[], None],
    ) -> Path | None:
        """Begin an async save; gives its folder. On return what it holds may change; with ``overlaps`` after ``fence``.

        A failure is raised by ``settle``, or goes to ``manner.on_failed`` in the next call of this, which waits for the
        save before it. None, and no save begins, where another one is under way and ``manner`` does not wait.
        ``on_end`` is called when it is known that this checkpoint exists.
        """
        staging, board = self._staging, self._ranks.board
        assert staging is not None and board is not None
        after = self._under_way or self._last
        met = self._meet_after_the_last(request, manner)
        if met is None:
            return None
        name, generation, replaces = request.name, met.generation, request.replaces  # a thread keeps no tensors alive
        writing = self._saver.writing(folder, name, met)
        seconds = self._storage.seconds
        letters = Letters(board, name=generation, seconds=seconds)
        shards: dict[FileKind, Shard] = {}
        later: list[tuple[WrittenPart, memoryview]] = []

        def copy() -> None:
            if copying is not None:
                copying.run()

        def write() -> dict[str, list[object]]:
            rows = writing.write(shards)
            if copying is not None:
                copying.make_sure(seconds)
            return rows

        def commit(of_ranks: Sequence[Mapping[str, Sequence[Any]]]) -> None:
            writing.commit(draft, of_ranks)

        save = BackgroundSave(
            writing.path,
            letters,
            rank=self._ranks.rank,
            num_ranks=self._ranks.world_size,
            seconds=seconds,
            copy=copy,
            make_folder=lambda: make_folder(folder, name, generation, draft.lineage, replaces=replaces),
            write=write,
            commit=commit,
            discard=writing.discard,
            on_made=lambda: staging.forget(generation),
            after=after,
            clear=lambda: self._saver.retain(folder, draft.lineage),
        )
        self.drop_held()
        if manner.starts:
            self._under_way, self._on_end = save, on_end
        try:
            held = staging.hold(met.parts, later if manner.overlaps else None)
            for kind, staged in held.items():
                shards[kind] = Shard(staged.pieces, staged.data)

            def keep() -> None:
                staging.keep(held, lambda: writing.record(draft))

            copying = self._copying = Copying(later, keep) if later else None
            if copying is None:
                keep()
            if manner.starts:
                save.start()
            else:
                self._held = save
        except (MemoryError, OSError, RuntimeError) as error:  # what torch raises where there is no memory
            self._give_up_copying()
            save.fail(CheckpointError(f"there is no memory to keep what is saved while training goes on: {error}"))
            if not manner.starts:
                _logger.warning("what there is was not copied: %s", save.error)
        except BaseException:
            self._give_up_copying()
            save.fail(CheckpointError("it was interrupted while what is saved was being copied"))
            raise
        return writing.path

    @property
    def is_holding(self) -> bool:
        """Whether a copy is held that is not written, or was written only because somebody has asked for it."""
        return self._held is not None or self._written_late is not None

    @property
    def is_idle(self) -> bool:
        """Whether all saves that were begun are settled, and no copy is held."""
        return self._under_way is None and not self.is_holding

    def write_held(self, seconds: float) -> Path | None:
        """Write the held copy, on all ranks and from any thread; its folder, None where it is not made in ``seconds``.

        Without a held copy it waits for the last save.
        """
        with self._lock:
            save = self._held
            if save is not None:
                self._write_late(save)
                save.hurry(seconds)
        save = save or self._written_late or self._under_way or self._last
        if save is None:
            return None
        save.join(seconds)
        return save.path if save.is_made else None

    def begin_held(self) -> Path | None:
        """Begin to write the held copy, and have the other ranks do so; its folder, None where no copy is held.

        The other ranks need not call this: a thread of each calls ``follow_others`` now and then. ``end`` waits for the
        save.
        """
        with self._lock:
            save = self._held
            if save is None:
                return None
            self._write_late(save)
        with contextlib.suppress(BoardGone):
            save.ask_for()
        return save.path

    def wait_for_held(self) -> None:
        """Wait for the save that ``begin_held`` has begun; for other ranks no longer than half a minute at a time."""
        save = self._written_late
        if save is not None:
            save.hurry(PATIENCE_SECONDS)
            save.join(self._storage.seconds)

    def follow_others(self) -> None:
        """Begin to write the held copy if another rank has called ``begin_held``; from any thread."""
        save = self._held
        if save is not None and save.is_asked_for():
            with self._lock:
                if self._held is save:
                    self._write_late(save)

    def _write_late(self, save: BackgroundSave) -> None:
        self._held, self._written_late = None, save
        save.start()

    def _give_up_copying(self) -> None:
        """End the overlapped copy, which failed, so that nobody waits for it."""
        if self._copying is not None:
            self._copying.end()
            self._copying = None

    def drop_held(self) -> None:
        """Forget the held copy without writing it; where it is being written already, wait for that."""
        with self._lock:
            self._held = None
        if self._written_late is not None:
            self._written_late.join(None)
            self._written_late = None

    @property
    def is_copying(self) -> bool:
        """Whether an overlapped copy may still be under way, which ``fence`` waits for."""
        return self._copying is not None

    def fence(self) -> None:
        """Wait until the overlapped copy is made: from then on what is being saved may change."""
        if self._copying is not None:
            self._copying.wait()
            self._copying = None

    def is_busy(self) -> bool:
        """Whether a save is under way on any rank; all ranks call this."""
        is_own = self._under_way is not None and _is_running(self._under_way)
        return sum(self._ranks.sum([int(is_own)], "seeing whether a save is under way")) > 0

    def settle(self) -> None:
        """Wait until no async save is under way; raise on all ranks where it has failed on one of them.

        PeerLostError at once where a rank is gone.
        """
        save = self._under_way
        if save is None:
            return
        self.fence()
        self._wait_for(save)
        self._conclude(save, gather_or_raise(self._ranks, lambda: _failure_in(save), f"saving {save.path}"))

    def _conclude(self, save: BackgroundSave, failures: Sequence[Mapping[str, Any] | None]) -> None:
        """End a save that is over on all ranks, and raise where ``failures``, one of each rank or None, has any."""
        self._under_way = None
        save.burn_letters()
        failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
        if failed:
            failure = joined_failure(failed, f"saving {save.path}", len(failures))
            failure.is_in_log = save.is_in_log
            raise failure
        if save.error is not None:
            raise save.error
        self._last = save
        self._on_end()

    def _wait_for(self, save: BackgroundSave) -> None:
        """Wait until a save is over on all ranks, or its time is over on one: then no rank waits for it any more."""
        deadline, slice_seconds = time.monotonic() + self._storage.seconds, _SHORT_SECONDS
        doing = f"saving {save.path}"
        while True:
            save.join(slice_seconds)
            is_late = not save.is_over and time.monotonic() > deadline
            try:
                num_waiting, num_late = self._ranks.sum([int(not save.is_over), int(is_late)], doing)
            except BaseException:
                self._under_way, self._saver.late = None, save
                save.give_up(f"it was given up while {doing}")
                raise
            if num_late and save.is_made:
                _logger.warning("%s is saved; old checkpoints are still being removed", save.path)
                self._saver.late = save
            elif num_late:
                save.give_up(
                    f"the storage took longer than {self._storage.seconds:g} seconds while {doing}; look after it, or "
                    "allow it more with storage_timeout_seconds, a trainer with timeout_seconds, of which it is half"
                )
                self._saver.late = save
            if num_late or not num_waiting:
                return
            slice_seconds = min(2 * slice_seconds, _LONG_SECONDS)

    def end(self, *, hurries: bool = False) -> None:
        """Wait for this rank's saves without collectives, and close the staging memory; failures are only logged.

        With ``hurries`` a save waits for other ranks, which may be gone, half a minute at most.
        """
        self.fence()
        with self._lock:
            self._held, saves = None, [self._under_way, self._written_late]
            self._under_way = self._written_late = None
        for save in saves:
            if save is None:
                continue
            if hurries:
                save.hurry(PATIENCE_SECONDS)
            save.join(self._storage.seconds)
            save.give_up(f"saving {save.path} came to no end in {self._storage.seconds:g} seconds")
        if self._staging is not None:
            self._staging.close()

    def make_ready(self, what: ToSave) -> None:
        """Begin to allocate the staging memory for ``what``, on a thread; all ranks call this.

        Where one of their machines has too little memory, async saves are off from then on, on all ranks.
        """
        staging = self._staging
        if staging is None:
            return
        met, host = self._saver.meet("to come", what, lambda: "make ready for saving", None), self._ranks.host
        wants = gather_or_raise(
            self._ranks, lambda: [host, staging.num_missing(met.parts), free_bytes()], "looking for memory to save from"
        )
        why_not = why_no_room((host, wanted, free) for host, wanted, free in wants)
        if why_not is None:
            staging.make_ready(met.parts)
            return
        self._staging = None
        staging.close()
        if self._ranks.rank == 0:
            _logger.warning(
                "there is too little memory to copy what is saved (%s): training waits while checkpoints are written",
                why_not,
            )

    def _meet_after_the_last(self, request: SaveRequest, manner: Manner) -> Met | None:
        """Wait for the save under way and exchange inventories for this one; None where ``manner`` does not wait."""
        name, what, ask, last = request.name, request.what, request.ask, self._under_way
        if last is None:
            return self._saver.meet(name, what, ask, None)
        self.fence()
        meeting = self._saver.meetings.of(what)
        while True:
            answers = agree_and_gather(
                self._ranks,
                ask,
                lambda: [_is_running(last), last.seconds > self._storage.seconds, _failure_in(last), meeting.begin()],
                beginning(name),
            )
            if not any(is_running for is_running, *_ in answers):
                break
            if not manner.waits and not any(is_late for _, is_late, *_ in answers):
                return None
            self._wait_for(last)
        try:
            self._conclude(last, [failure for *_, failure, _ in answers])
        except CheckpointError as error:
            manner.on_failed(error)
        ask()  # again, now that it is known what there is: it raises on all ranks alike
        if self._saver.late is not None:  # the others are to hear of that too
            return self._saver.meet(name, what, ask, None)
        return meeting.end(name, [said for *_, said in answers])


def _is_running(save: BackgroundSave) -> bool:
    """Whether a save is to be waited for on this rank: one that has failed is, while it removes its files."""
    return not (save.is_over or save.is_made or save.is_given_up)


def _failure_in(save: BackgroundSave) -> dict[str, object] | None:
    """A save's failure on this rank, as JSON; None where it has not failed, or only because another rank has."""
    error = save.error
    return None if error is None or isinstance(error, ToldOfFailure) else failure_of(error)
