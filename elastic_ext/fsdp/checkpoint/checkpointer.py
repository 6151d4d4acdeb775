"""ShardCheckpointer: saves and loads a model and its optimizers, each rank its part, in a job's folder.

    checkpointer = ShardCheckpointer("/shared/storage", job="my-model")
    checkpointer.save(step, model, optimizer, {"epoch": 3})
    loaded = checkpointer.load(model, optimizer)        # on any number of ranks, sharded in any way

All ranks make it, and call ``save``, ``load`` and ``latest``, in the same order.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.plain import pack, unpack
from elastic_ext.ranks import Ranks

from .collecting import contents_of, own_buffers
from .commit import Commit
from .contents import Contents
from .jobname import job_name
from .listing import Found
from .loader import Loader
from .opened import Opened
from .reading import Reading
from .run import Run
from .saver import Saver
from .storage import Storage
from .together import gather_or_raise

__all__ = ["Loaded", "ShardCheckpointer"]

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_EXTRA = "extra"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What was loaded besides the model and the optimizers."""

    path: Path
    step: int
    epoch: int
    extra: Any
    """What ``save`` was given."""
    num_ranks: int
    """That saved it."""


class ShardCheckpointer:
    """One rank's hand in a job's checkpoints.

    ``job`` names the folder; by default it is ELASTIC_EXT_JOB, the launcher's run id, or the script. ``ranks`` is given
    by a trainer, which has them already; they lose patience with one another after ``timeout_seconds``. Each thing that
    touches the storage may take ``storage_timeout_seconds``, by default half of that.
    """

    def __init__(
        self,
        shared_storage_path: str | Path,
        *,
        job: str | None = None,
        ranks: Ranks | None = None,
        timeout_seconds: float = 1800.0,
        storage_timeout_seconds: float | None = None,
    ) -> None:
        if storage_timeout_seconds is None:
            storage_timeout_seconds = timeout_seconds / 2
        if not 0 < storage_timeout_seconds < timeout_seconds:
            raise ValueError(
                f"storage_timeout_seconds is {storage_timeout_seconds:g}; allowed: more than 0 and less than "
                f"timeout_seconds, {timeout_seconds:g}, after which the other ranks give up waiting"
            )
        self._root = Path(shared_storage_path).absolute()
        self._owns_ranks = ranks is None
        self._ranks = Ranks.join(timeout_seconds=timeout_seconds) if ranks is None else ranks
        named = job if job is not None else os.environ.get("ELASTIC_EXT_JOB") or None
        names = gather_or_raise(
            self._ranks,
            lambda: job_name(named, os.environ.get("TORCHELASTIC_RUN_ID"), _script()),
            "naming the job",
        )
        self._job = str(names[0])  # the first rank alone looks for it, and hosts may have the script elsewhere
        self._storage = Storage(self._ranks, timeout_seconds=storage_timeout_seconds)
        self._saver = Saver(self._ranks, self._storage)
        self._run = Run(self._ranks, self._storage, self._root, self._job)

    # ---- for users ----

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        extra: Any = None,
        *,
        epoch: int = 0,
    ) -> Path:
        """Save under the name ``step_<step>``; on return the checkpoint exists, and it is the newest. Gives its folder.

        ``extra`` are plain values and tensors, in lists and dicts; the first rank's are kept.
        """
        own = self.own_buffers(model)

        def collect() -> Contents:
            tensors: dict[str, torch.Tensor] = {}
            packed = pack(extra, _EXTRA, tensors)
            optimizers = _as_list(optimizer)
            rank = self._ranks.rank
            return contents_of(model, optimizers, rank=rank, tensors=tensors, own=own, state={_EXTRA: packed})

        return self.save_contents(f"step_{step}", collect, step=step, epoch=epoch)

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        path: str | Path | None = None,
        *,
        strict: bool = True,
    ) -> Loaded:
        """Load the checkpoint in the folder ``path``, or the job's newest one; all ranks raise where one cannot.

        A newest one that is damaged is passed over with a warning, for the one before it. Without ``strict`` what fits
        is loaded, what the model has besides stays as it is, and its optimizer state begins anew. CheckpointNotFound
        where there is none.
        """
        optimizers = _as_list(optimizer)
        loaders: list[Loader] = []

        def check(opened: Opened) -> None:
            loader = Loader(model, optimizers, rank=self._ranks.rank, num_ranks=self._ranks.world_size)
            if strict:
                loader.check(opened)
            loaders[:] = [loader]

        def act(opened: Opened) -> Loaded:
            loaders[0].load_model(opened)
            if optimizers:
                loaders[0].load_optimizers(opened)
            commit = opened.found.commit
            names = [name for name in opened.names("extra") if name.startswith(f"{_EXTRA}/") or name == _EXTRA]
            tensors = {name: opened.read_whole("extra", name) for name in names}
            extra = unpack(opened.state.get(_EXTRA), tensors)
            return Loaded(
                path=opened.found.path,
                step=commit.global_step,
                epoch=commit.epoch,
                extra=extra,
                num_ranks=commit.num_ranks,
            )

        loaded = self.restore(check, act, None if path is None else Path(path))
        if loaded is None:
            raise CheckpointNotFound(
                f"{self._root} has no checkpoint of job {self._job!r}; give path= to load another's, or job="
            )
        return loaded

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, of those that lead to where this run is; None if there is none."""
        return self._run.latest()

    def wait(self) -> None:
        """Return once what ``save`` has begun is done, which it is."""

    def close(self) -> None:
        """Let another run of the job have the folder. Twice is allowed."""
        self._run.leave()
        if self._owns_ranks:
            self._owns_ranks = False
            self._ranks.close()

    def __enter__(self) -> ShardCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for the trainer ----

    def claim(self) -> None:
        """Make the job's folder this run's own; CheckpointFenced where another run of the job is alive."""
        self._run.claim()

    def try_out(self, collect: Callable[[], Contents]) -> None:
        """Raise on all ranks where one of them could not collect its contents for a checkpoint."""

        def act() -> None:
            for inventory in collect().inventories().values():
                inventory.to_json()

        gather_or_raise(self._ranks, act, "seeing what a checkpoint would hold")

    def own_buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's buffers, where ranks that share a model have come to different ones."""
        return own_buffers(model, self._ranks)

    def save_contents(
        self,
        name: str,
        collect: Callable[[], Contents],
        *,
        step: int,
        epoch: int,
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save what ``collect`` gives, which is what ``contents_of`` does, on each rank."""
        folder = self._run.claim()
        began = time.perf_counter()
        draft = Commit(
            generation="not-begun",
            lineage=self._run.chain,
            global_step=step,
            epoch=epoch,
            num_ranks=self._ranks.world_size,
            metas={},
            states={},
            shards={},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=_versions(),
            about=dict(about or {}),
        )
        path = self._saver.save(folder, name, collect, draft)
        self._run.note_save()
        if self._ranks.rank == 0:
            _logger.info("checkpoint %s was saved in %.2f s", path, time.perf_counter() - began)
        return path

    def restore(
        self,
        check: Callable[[Opened], None],
        act: Callable[[Opened], _Result],
        path: Path | None = None,
        *,
        falls_back: bool = True,
    ) -> _Result | None:
        """What ``act`` gives of the checkpoint in ``path`` or of the newest good one; None where the job has none.

        Both are called on every rank, ``act`` once ``check`` has raised on none; and again for an older checkpoint
        where ranks found the newer one damaged.
        """
        candidates = [path] if path is not None else self._run.candidates(falls_back=falls_back)
        for place, candidate in enumerate(candidates):
            try:
                return self._restore_one(check, act, candidate)
            except CheckpointDamaged as error:
                if not falls_back or place + 1 == len(candidates):
                    raise
                if self._ranks.rank == 0:
                    _logger.warning("%s; going on from %s, which was saved before it", error, candidates[place + 1])
        return None

    def _restore_one(self, check: Callable[[Opened], None], act: Callable[[Opened], _Result], path: Path) -> _Result:
        results: list[_Result] = []
        with ExitStack() as stack:
            opened: list[Opened] = []

            def open_it() -> list[Any]:
                if self._ranks.rank == 0:  # for all: nobody reads on unless COMMIT was there after this
                    stack.enter_context(self._storage.within(lambda: Reading(path), f"reading {path}"))
                found = self._storage.within(lambda: Found.read(path), f"reading {path}")
                opened.append(stack.enter_context(Opened(found, self._storage)))
                is_own = self._ranks.rank == 0 and self._storage.within(
                    lambda: self._run.is_own(path), f"reading {path}"
                )
                check(opened[0])
                return [found.commit.generation, is_own]

            doing = f"loading {path}"
            answers = self._storage.together(open_it, doing, is_patient=False)
            if len({generation for generation, _ in answers}) > 1:
                raise CheckpointError(f"ranks see different checkpoints in {path}: look after the storage")
            self._storage.together(lambda: results.append(act(opened[0])), doing, is_patient=False)
            if answers[0][1]:  # of another job's it has values alone, and goes on as it was
                self._run.go_on_from(opened[0].found.commit)
        return results[0]


def _script() -> str | None:
    """The file that is run, None where there is none; an absolute path, whatever folder the process has gone to."""
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def _as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
