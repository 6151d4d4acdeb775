"""Restorer: loads a given checkpoint, or tries a job's in turn, newest first, until one is whole.

Files are verified while they are read into memory that is in use. One that is found damaged halfway has left a part of
itself there, so that an older one is loaded in its place only if it fills all of that; what would come out otherwise is
a state that training never was in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.folder.run import Run
from elastic_ext.fsdp.checkpoint.storage import Storage
from elastic_ext.ranks.group import Ranks

from .source import Opened

__all__ = ["Destination", "Restorer"]

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Given = TypeVar("_Given", covariant=True)
_MOST_NAMES = 10


class Destination(Protocol[_Given]):
    """What a checkpoint is loaded into on one rank, such as a model with its optimizers, or a trainer."""

    def check(self, opened: Opened) -> None:
        """Raise where the checkpoint does not fit; changes nothing."""

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """The names in ``touched`` that loading this checkpoint overwrites wholly.

        ``touched`` names what a damaged checkpoint has begun to change in memory, as ``Opened.touched`` does.
        """

    def load(self, opened: Opened) -> _Given:
        """Load the checkpoint, once ``check`` has raised on no rank; gives what the caller of the restorer gets."""


class Restorer:
    """Loads a given checkpoint, or the newest good one of a job; all ranks call it alike."""

    def __init__(self, ranks: Ranks, storage: Storage, run: Run) -> None:
        self._ranks = ranks
        self._storage = storage
        self._run = run

    def restore(self, into: Destination[_Result], path: Path | None, *, falls_back: bool) -> _Result | None:
        """Load the checkpoint in ``path``, or the job's newest; gives what ``into.load`` gives, None where none is.

        With ``falls_back`` an older checkpoint is tried where ranks found the newer one damaged. All ranks raise where
        one does.
        """
        candidates = [path] if path is not None else self._run.candidates(falls_back=falls_back)
        return self.restore_first(into, candidates, falls_back=falls_back)

    def restore_first(
        self, into: Destination[_Result], candidates: Sequence[Path], *, falls_back: bool
    ) -> _Result | None:
        """Load the first of ``candidates``, with ``falls_back`` the first good one; None where there are none."""
        touched: set[str] = set()
        for place, candidate in enumerate(candidates):
            try:
                return self._restore_one(into, candidate, touched, damaged=candidates[:place])
            except CheckpointError as error:
                has_begun = any(self._ranks.gather(b"begun" if touched else b"", "telling how far loading has come"))
                if not (falls_back and isinstance(error, CheckpointDamaged) and place + 1 < len(candidates)):
                    if has_begun:
                        raise _with_more(error) from error.__cause__
                    raise
                if self._ranks.rank == 0:
                    _logger.warning("%s; going on from %s, which was saved before it", error, candidates[place + 1])
        return None

    def _restore_one(
        self, into: Destination[_Result], path: Path, touched: set[str], *, damaged: Sequence[Path]
    ) -> _Result:
        """Load ``path``, after the ``damaged`` ones have ``touched`` something; adds to that what it changes."""
        results: list[_Result] = []
        with ExitStack() as stack:
            opened: list[Opened] = []

            def open_it() -> list[Any]:
                if self._ranks.rank == 0:  # for all: nobody reads on unless COMMIT was there after this
                    stack.enter_context(self._storage.within(lambda: Reading(path), f"reading {path}"))
                found = self._storage.within(lambda: ListedCheckpoint.read_afresh(path), f"reading {path}")
                opened.append(stack.enter_context(Opened(found, self._storage, touched)))
                is_own = self._ranks.rank == 0 and self._storage.within(
                    lambda: self._run.is_own(path), f"reading {path}"
                )
                into.check(opened[0])
                if touched:
                    _refuse_mixture(touched - into.refilled(opened[0], touched), path, damaged)
                return [found.commit.generation, is_own]

            doing = f"loading {path}"
            answers = self._storage.together(open_it, doing, is_patient=False)
            if len({generation for generation, _ in answers}) > 1:
                raise CheckpointError(
                    f"ranks see different checkpoints in {path}: mount the same storage under this path on every node"
                )
            self._storage.together(lambda: results.append(into.load(opened[0])), doing, is_patient=False)
            if answers[0][1]:  # another job's checkpoint gives values alone: the chain of this run stays
                self._run.go_on_from(opened[0].found.commit)
        return results[0]


def _refuse_mixture(left: Collection[str], path: Path, damaged: Sequence[Path]) -> None:
    """CheckpointError where something of the ``damaged`` checkpoints would be ``left`` in memory."""
    if left:
        names = ", ".join(sorted(left)[:_MOST_NAMES])
        more = f" and {len(left) - _MOST_NAMES} more" if len(left) > _MOST_NAMES else ""
        raise CheckpointError(
            f"{path} does not overwrite all that {', '.join(map(str, damaged))} changed in memory before it was found "
            f"damaged: {names}{more}, so that memory would hold a mixture of both; to go on from {path}, move the "
            "damaged one away, and start the job again"
        )


def _with_more(error: CheckpointError) -> CheckpointError:
    """An error of its kind whose message adds that memory is half loaded, and of no use."""
    more = "memory now holds parts of a checkpoint that could not be loaded: do not train on, start the job again"
    if isinstance(error, CheckpointMismatch):
        told: CheckpointError = CheckpointMismatch(
            f"{error.message}; {more}", missing=error.missing, extra=error.extra, misshaped=error.misshaped
        )
    else:
        told = type(error)(f"{error}; {more}")
    told.says_all = error.says_all
    return told
