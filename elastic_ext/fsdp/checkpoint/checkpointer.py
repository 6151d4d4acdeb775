"""ShardCheckpointer: saves and loads a model and its optimizers, each rank its part, in a job's folder.

    checkpointer = ShardCheckpointer("/shared/storage", job="my-model")
    checkpointer.save(step, model, optimizer, {"epoch": 3})
    loaded = checkpointer.load(model, optimizer)        # on any number of ranks, sharded in any way

All ranks make it, and call ``save``, ``load`` and ``latest``, in the same order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.value_encoding import pack, unpack
from elastic_ext.ranks.group import Ranks
from elastic_ext.records.run_dir import GivenSeat
from elastic_ext.records.text import as_list, check_flag, path_given

from .contents import Contents
from .coordination import agree_on
from .folder.claim import check_job
from .folder.listing import Retention
from .job import JobCheckpoints, Launched, as_count
from .loading.loader import Loader
from .loading.source import Opened
from .saving.collect import Collect, SaveRequest, ToSave, contents_of
from .saving.saver import AsyncSaveMode
from .saving.staging import num_copies

__all__ = ["Loaded", "ShardCheckpointer"]

_EXTRA = "extra"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What ``ShardCheckpointer.load`` gives: which checkpoint was loaded, its step and epoch, and its extra values."""

    path: Path
    step: int
    epoch: int
    extra: Any
    """The extra values and tensors that ``save`` was given on the first rank."""
    num_ranks: int
    """How many ranks saved the checkpoint."""


class ShardCheckpointer:
    """Saves a model and its optimizers as checkpoints of a job, and loads them; each rank writes and reads its part.

    ``job`` names the folder; by default it is ELASTIC_EXT_JOB, the launcher's run id, or the script. A rank waits at
    most ``timeout_seconds`` for the others. Each operation on the storage may take ``storage_timeout_seconds``, by
    default half of that.

    With ``in_background`` saves are async: ``save`` copies what this rank writes into staging memory of that size,
    which is kept, and a thread writes the files from there; one save at a time.

    An agent that starts the ranks anew when one dies can give them a folder in memory, as ELASTIC_EXT_STAGING_DIR: the
    copies lie there, and what was copied on every rank can be made a checkpoint after some have died. ``keep_previous``
    has each rank keep two copies, so that the one before is not lost with a rank that dies while it copies.

    After each save only the ``keep_last`` newest checkpoints are kept, and the first one at or after each multiple of
    ``keep_every`` steps; by default all.
    """

    def __init__(
        self,
        shared_storage_path: str | Path,
        *,
        job: str | None = None,
        timeout_seconds: float = 1800.0,
        storage_timeout_seconds: float | None = None,
        in_background: bool = False,
        keep_previous: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        root = path_given("shared_storage_path", shared_storage_path)
        if job is not None:
            check_job(job)
        check_flag("in_background", in_background)
        check_flag("keep_previous", keep_previous)
        retention = Retention(keep_last=keep_last, keep_every=keep_every)
        copies = num_copies(in_background=in_background, keep_previous=keep_previous)
        if storage_timeout_seconds is None:
            storage_timeout_seconds = timeout_seconds / 2
        if not 0 < storage_timeout_seconds < timeout_seconds:
            raise ValueError(
                f"storage_timeout_seconds is {storage_timeout_seconds:g}; allowed: more than 0 and less than "
                f"timeout_seconds, {timeout_seconds:g}, after which the other ranks give up waiting"
            )
        self._is_closed = False
        self._ranks = Ranks.join(timeout_seconds=timeout_seconds, seat=GivenSeat.in_environment(os.environ))
        with ExitStack() as undoing:
            undoing.callback(self._ranks.close)
            self._job = JobCheckpoints(
                root,
                job,
                self._ranks,
                launched=Launched.in_environment(os.environ),
                storage_seconds=storage_timeout_seconds,
                retention=retention,
                num_copies=copies,
            )
            undoing.pop_all()

    def claim(self) -> None:
        """Claim the job's folder for this run, as the first save does; CheckpointFenced where another run has it."""
        self._refuse_closed()
        self._job.run.claim()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        extra: Any = None,
        *,
        epoch: int = 0,
    ) -> Path:
        """Save a checkpoint named ``step_<step>``; on return it exists, and is the newest. Gives its folder.

        With ``in_background`` the save has only begun on return, once the save before it is done, and the model and
        the optimizers may change. If the save before it has failed, this raises, and no save begins.

        ``step`` is larger than that of the checkpoint loaded or saved last: ValueError otherwise, and nothing is
        changed.
        ``extra`` are plain values and tensors, in lists and dicts; the first rank's are kept.
        """
        self._refuse_closed()
        place: list[int] = []

        def ask() -> str:
            place[:] = as_count("step", step), as_count("epoch", epoch)
            self._job.run.check_is_next(place[0])
            return f"save step {place[0]} of epoch {place[1]}"

        try:
            ask()
        except (ValueError, TypeError):
            agree_on(self._ranks, ask)  # which raises, here and on those that would save
        what = ToSave(self._collector(model, optimizer, extra))
        request = SaveRequest(name=f"step_{place[0]}", what=what, ask=ask, step=place[0], epoch=place[1])
        if not self._job.saver.can_save:
            return self._job.save(request)
        path = self._job.save_async(request, AsyncSaveMode())
        assert path is not None  # it waits
        return path

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, extra: Any = None
    ) -> None:
        """Allocate the staging memory for background saves of these now, on a thread, instead of in the first save.

        Call it once the optimizer has its state. Otherwise the first save makes the memory, and takes longer.
        """
        self._refuse_closed()
        agree_on(self._ranks, lambda: "make ready for saving")
        self._job.saver.make_ready(ToSave(self._collector(model, optimizer, extra)))

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        path: str | Path | None = None,
        *,
        strict: bool = True,
    ) -> Loaded:
        """Load the checkpoint in the folder ``path``, or the job's newest one; all ranks raise where one cannot.

        Where the newest one is damaged, the one before it is loaded with a warning, if it overwrites all that the
        damaged one has begun to overwrite; otherwise CheckpointError, and the model is a mixture of no use. Without
        ``strict`` what fits is loaded, what the model has besides stays as it is, and its optimizer state begins anew.
        CheckpointNotFound where there is no checkpoint.
        """
        self._come_to_rest()
        given: list[Path] = []

        def ask() -> str:
            given[:] = [] if path is None else [Path(path)]  # which hosts may have under different names
            which = "the checkpoint that is given" if given else "the newest checkpoint"
            return f"load {which}{'' if strict else ', as far as it fits'}"

        agree_on(self._ranks, ask)
        into = _Into(model, as_list(optimizer), self._ranks, is_strict=strict)
        loaded = self._job.restorer.restore(into, given[0] if given else None, falls_back=True)
        if loaded is None:
            raise CheckpointNotFound(
                f"{self._job.root} has no checkpoint of job {self._job.name!r}; give path= to load a checkpoint "
                "of another job, or job= to name that job"
            )
        return loaded

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint that led to this run's state, None if there is none.

        Before this run has claimed the folder or loaded, that is the job's newest.
        """
        self._refuse_closed()
        agree_on(self._ranks, lambda: "tell the newest checkpoint")
        return self._job.run.latest()

    def wait(self) -> None:
        """Wait until a background save is done, if any; CheckpointError on all ranks where it failed on one."""
        self._job.saver.settle()

    @property
    def saves_in_background(self) -> bool:
        """Whether saves run in the background: it was asked for, memory allows it, and the ranks share a store."""
        return self._job.saver.can_save

    def is_saving(self) -> bool:
        """Whether a background save is under way on any rank, which the next ``save`` would wait for."""
        self._refuse_closed()
        return self._job.saver.is_busy()

    def close(self) -> None:
        """Let another run of the job have the folder; nothing can be saved or loaded afterwards. Twice is allowed.

        A background save is finished first; a failure of it is only logged here, while ``wait`` raises it. Called
        while an exception is handled it waits for other ranks, which may be gone, no longer than half a minute.
        """
        if not self._is_closed:
            self._is_closed = True
            self._job.close(hurries=sys.exc_info()[1] is not None)
            self._ranks.close()

    def __enter__(self) -> ShardCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collector(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, extra: Any) -> Collect:
        """A function that collects what this rank saves of the model, the optimizers and ``extra``."""

        def collect() -> Contents:
            tensors: dict[str, torch.Tensor] = {}
            packed = pack(extra, _EXTRA, tensors)
            optimizers = as_list(optimizer)
            rank = self._ranks.rank
            return contents_of(model, optimizers, rank=rank, tensors=tensors, state={_EXTRA: packed})

        return collect

    def _come_to_rest(self) -> None:
        """Refuse a closed checkpointer, and wait until no background save is under way; raise where one has failed."""
        self._refuse_closed()
        self._job.saver.settle()

    def _refuse_closed(self) -> None:
        """CheckpointError where this checkpointer is closed: it has left the ranks, and released the job's folder."""
        if self._is_closed:
            raise CheckpointError(
                f"the ShardCheckpointer of job {self._job.name!r} is closed, and saves and loads nothing any more; "
                "call this before close(), or within its `with`, or make another one"
            )


class _Into:
    """The destination of ``ShardCheckpointer.load``: a model and its optimizers on one rank."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, *, is_strict: bool) -> None:
        self._model, self._optimizers = model, optimizers
        self._ranks = ranks
        self._is_strict = is_strict
        self._loader: Loader

    def check(self, opened: Opened) -> None:
        ranks = self._ranks
        self._loader = Loader(self._model, self._optimizers, rank=ranks.rank, num_ranks=ranks.world_size)
        if self._is_strict:
            self._loader.check(opened)

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        return self._loader.refilled(opened, touched)

    def load(self, opened: Opened) -> Loaded:
        """Load the checkpoint; extra tensors first, into new memory, so that damage in them has changed nothing."""
        names = [name for name in opened.names("extra") if name.startswith(f"{_EXTRA}/") or name == _EXTRA]
        tensors = {name: opened.read_whole("extra", name) for name in names}
        self._loader.load_model(opened)
        if self._optimizers:
            self._loader.load_optimizers(opened)
        commit = opened.found.commit
        return Loaded(
            path=opened.found.path,
            step=commit.global_step,
            epoch=commit.epoch,
            extra=unpack(opened.state.get(_EXTRA), tensors),
            num_ranks=commit.num_ranks,
        )
