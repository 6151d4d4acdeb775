"""JobCheckpoints: the checkpoints of a job, saved, found and loaded; how this process was launched, and the versions
that a checkpoint names.
"""

from __future__ import annotations

import logging
import operator
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import SupportsIndex, TypeVar

import torch

from elastic_ext.errors import CheckpointError, CheckpointNotFound
from elastic_ext.ranks.group import Ranks

from .contents import Contents
from .coordination import agree_and_gather, agree_on, gather_or_raise
from .folder.claim import job_name
from .folder.commit import Commit
from .folder.job_folder import JobFolder
from .folder.listing import ListedCheckpoint, Retention
from .folder.run import Run
from .loading.loader import first_change
from .loading.restorer import Destination, Restorer
from .loading.source import Opened
from .saving.collect import Collect, SaveRequest, with_own
from .saving.saver import AsyncSaveMode, Saver
from .saving.shared_memory import Shelf
from .saving.staging import Staging
from .storage import Storage

__all__ = ["JobCheckpoints", "Launched", "as_count", "versions"]

_logger = logging.getLogger(__name__)


# --- what checkpoints have to know of how this process was started ---------------------------------------------------
# Entry points read it, and hand it in.


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What checkpoints need to know of how a process was started: its job, script and staging folder."""

    job: str | None
    """The job's name, from ELASTIC_EXT_JOB; None where that is not set."""
    run_id: str | None
    """The launcher's run id, from TORCHELASTIC_RUN_ID; None without a launcher."""
    script: str | None
    """The absolute path of the script that is run; None where there is none, as in a notebook."""
    staging_folder: Path | None
    """The folder where an agent has its workers keep staged saves (ELASTIC_EXT_STAGING_DIR); None without an agent."""

    @classmethod
    def in_environment(cls, environ: Mapping[str, str]) -> Launched:
        """How this process was started, by the environment ``environ`` and its main module."""
        folder = environ.get("ELASTIC_EXT_STAGING_DIR")
        return cls(
            job=environ.get("ELASTIC_EXT_JOB") or None,
            run_id=environ.get("TORCHELASTIC_RUN_ID"),
            script=getattr(sys.modules.get("__main__"), "__file__", None),
            staging_folder=Path(folder).absolute() if folder else None,
        )


# --- what a checkpoint says of the programs that saved it ------------------------------------------------------------


def versions() -> dict[str, str]:
    """The versions of python, torch and elastic_ext in this process; of the last only where it is installed."""
    known = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        return {**known, "elastic_ext": metadata.version("elastic-ext")}
    except metadata.PackageNotFoundError:
        return known


# --- one rank's hand in the checkpoints of a job, whatever they are of -----------------------------------------------
# All ranks make it, and call it alike. What a checkpoint holds is given by whoever calls it: checkpointer.py for a
# script, a trainer for itself.

_Result = TypeVar("_Result")
_MOST = 10**18


class JobCheckpoints:
    """Saves, finds and loads the checkpoints of ``job`` under ``root``; every rank has one, and calls it alike.

    By default the job is what this process was ``launched`` as: ELASTIC_EXT_JOB, the launcher's run id, or the script.
    Each operation on the storage may take ``storage_seconds``. ``num_copies`` staged copies of what is saved are kept
    in memory, for async saves; with 0 training waits for each save.
    """

    def __init__(
        self,
        root: Path,
        job: str | None,
        ranks: Ranks,
        *,
        launched: Launched,
        storage_seconds: float,
        retention: Retention,
        num_copies: int,
    ) -> None:
        self.ranks = ranks
        self.root = root.absolute()
        named = job if job is not None else launched.job

        def name() -> str:
            return job_name(named, launched.run_id, launched.script)

        def ask() -> str:
            name()  # ValueError for what cannot be one
            return "name the job"

        names = agree_and_gather(ranks, ask, name, "naming the job")
        self.name = str(names[0])  # the first rank alone looks for it, and hosts may have the script elsewhere
        """The job's name."""
        self._storage = Storage(ranks, timeout_seconds=storage_seconds)
        self.run = Run(ranks, self._storage, self.root, self.name)
        """This run of the job, and its hold on the job's folder."""
        staging = self._staging(launched.staging_folder, num_copies) if num_copies > 0 else None
        self.saver = Saver(ranks, self._storage, self.run, retention=retention, staging=staging)
        """Saves checkpoints: while training waits, or staged and written by a thread of each rank."""
        self.restorer = Restorer(ranks, self._storage, self.run)
        """Loads checkpoints; no save is under way when it is called."""
        self._versions = versions()

    # ---- saving ----

    def try_out(self, collect: Callable[[], Contents]) -> None:
        """Try to collect a checkpoint's contents, without saving; raise on all ranks where that fails on one."""

        def act() -> None:
            try:
                for inventory in collect().inventories().values():
                    inventory.to_json()
            except (ValueError, TypeError) as error:
                raise CheckpointError(str(error)) from None  # its words say it all

        gather_or_raise(self.ranks, act, "seeing what a checkpoint would hold")

    def save(self, request: SaveRequest) -> Path:
        """Save while training waits; on return the checkpoint exists. Gives its folder.

        No other save is under way.
        """
        began = time.perf_counter()
        agree_on(self.ranks, request.ask)  # until all have come here, what is held may still be all there is
        self.saver.drop_held()
        path = self.saver.save(*self._begin(request), request)
        if self.ranks.rank == 0:
            _logger.info("checkpoint %s was saved in %.2f s", path, time.perf_counter() - began)
        return path

    def save_async(self, request: SaveRequest, mode: AsyncSaveMode) -> Path | None:
        """Begin an async save; gives the checkpoint's folder, or None as ``Saver.save_async`` does."""
        return self.saver.save_async(*self._begin(request), request, mode)

    def close(self, *, hurries: bool = False) -> None:
        """Release the job's folder to other runs, once the saves under way on this rank are over.

        With ``hurries`` a save waits for other ranks, which may be gone, half a minute at most.
        """
        self.saver.end(hurries=hurries)
        self.run.leave()

    # ---- loading ----

    def change_since(self, path: Path, collect: Collect, passes_over: tuple[str, ...]) -> str | None:
        """What differs from the checkpoint in ``path`` on any rank, in words; None where a save would give the same.

        ``passes_over`` are prefixes of names that are not compared, as in ``first_change``.
        """
        self.saver.settle()
        agree_on(self.ranks, lambda: f"save again what {path.name} has")
        contents = with_own(collect, self.ranks)

        def compare() -> str | None:
            try:
                found = self._storage.within(lambda: ListedCheckpoint.read(path), f"reading {path}")
            except CheckpointNotFound:
                return "anything"
            with Opened(found, self._storage) as opened:
                return first_change(opened, contents, rank=self.ranks.rank, passes_over=passes_over)

        answers = self._storage.together(compare, f"comparing {path} with what is here", is_patient=False)
        return next((change for change in answers if change is not None), None)

    def restore(self, into: Destination[_Result], *, falls_back: bool) -> _Result | None:
        """Load the job's newest good checkpoint; gives what ``into.load`` returns, None where the job has none."""
        self.saver.settle()
        agree_on(self.ranks, lambda: "load the newest checkpoint")
        return self.restorer.restore(into, None, falls_back=falls_back)

    def restore_earlier(
        self, into: Destination[_Result], step: int | None, *, before: int, falls_back: bool, more: str
    ) -> _Result:
        """Load the checkpoint of ``step``, or the newest one ``before`` a step; gives what ``into.load`` returns.

        Only checkpoints that led to where this run is are candidates; with ``falls_back`` and no ``step`` damaged ones
        are passed over. What is saved from here on goes on from the loaded one, and is the work of another run.
        ``more`` is what else has to be the same on all ranks, in words.
        """
        self.saver.settle()

        def ask() -> str:
            which = "the newest checkpoint" if step is None else f"the checkpoint of step {as_count('step', step)}"
            return f"go back to {which}{more}"

        agree_on(self.ranks, ask)
        asked = None if step is None else operator.index(step)
        candidates = self.run.behind(step=asked, before=before)
        result = self.restorer.restore_first(into, candidates, falls_back=falls_back and step is None)
        assert result is not None
        self.run.claim()
        return result

    def _begin(self, request: SaveRequest) -> tuple[JobFolder, Commit]:
        """Claim the job's folder; gives it, and a draft of COMMIT that lacks the generation and the files."""
        if not self.run.is_claimed:
            agree_on(self.ranks, request.ask)  # claiming is no answer to who is asked for something else
        folder = self.run.claim()
        draft = Commit(
            generation="not-begun",
            lineage=self.run.chain,
            global_step=request.step,
            epoch=request.epoch,
            num_ranks=self.ranks.world_size,
            metas={},
            states={},
            shards={},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=self._versions,
            about=dict(request.about),
        )
        return folder, draft

    def _staging(self, folder: Path | None, num_copies: int) -> Staging:
        """The staging memory: in an agent's ``folder`` if there is one, else of this process alone."""
        if folder is None:
            return Staging(is_pinned=torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        owner, ranks = f"{self.root}/{self.name}", self.ranks
        return Staging(shelf=Shelf(folder, owner, seat=ranks.seat, rank_now=lambda: ranks.rank, num_slots=num_copies))


def as_count(what: str, given: object) -> int:
    """An integer of Python's or numpy's as Python's own; ValueError where it cannot be a count."""
    if isinstance(given, SupportsIndex) and not isinstance(given, bool):
        count = operator.index(given)
        if 0 <= count < _MOST:
            return count
    raise ValueError(f"{what} is {given!r}; allowed: an integer from 0 to {_MOST - 1}")
