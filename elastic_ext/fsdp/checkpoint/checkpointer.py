"""ShardCheckpointer: saves and loads a model and its optimizers, each rank its part, in a job's folder.

    checkpointer = ShardCheckpointer("/shared/storage", job="my-model")
    checkpointer.save(step, model, optimizer, {"epoch": 3})
    loaded = checkpointer.load(model, optimizer)        # on any number of ranks, sharded in any way

All ranks make it, and call ``save``, ``load`` and ``latest``, in the same order.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.plain import pack, unpack
from elastic_ext.given import as_list
from elastic_ext.ranks import Ranks

from .collecting import Collect, ToSave, contents_of, own_buffers
from .commit import Commit
from .comparing import first_change
from .contents import Contents
from .jobname import job_name
from .listing import Found
from .loader import Loader
from .opened import Opened
from .restorer import Destination, Restorer
from .retain import Retention
from .run import Run
from .saver import Saver
from .shelf import Shelf
from .staging import Staging
from .storage import Storage
from .together import agree_on, gather_or_raise
from .versions import versions

__all__ = ["Loaded", "ShardCheckpointer"]

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_EXTRA = "extra"
_MOST = 10**18


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

    With ``in_background`` a save copies what it is given, into memory that is kept for it and is as large as what this
    rank writes, and goes on on a thread of its own; one at a time.

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
        ranks: Ranks | None = None,
        timeout_seconds: float = 1800.0,
        storage_timeout_seconds: float | None = None,
        in_background: bool = False,
        keep_previous: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        retention = Retention(keep_last=keep_last, keep_every=keep_every)
        if keep_previous and not in_background:
            raise ValueError("keep_previous is True and in_background False, which copies nothing; give both, or none")
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
        self._saver = Saver(
            self._ranks,
            self._storage,
            staging=self._staging(keep_previous=keep_previous) if in_background else None,
            retention=None if keep_last is None else retention,
        )
        self._run = Run(self._ranks, self._storage, self._root, self._job)
        self._restorer = Restorer(self._ranks, self._storage, self._run)
        self._versions = versions()
        self._is_closed = False

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

        In the background it is begun, once the one before is done, and what it holds may change on return. If that one
        has failed, this raises, and nothing is begun.

        ``step`` comes after the one that was loaded or saved last: ValueError otherwise, and nothing is changed.
        ``extra`` are plain values and tensors, in lists and dicts; the first rank's are kept.
        """
        self._refuse_closed()
        place: list[int] = []

        def ask() -> str:
            place[:] = _as_count("step", step), _as_count("epoch", epoch)
            self._run.check_is_next(place[0])
            return f"save step {place[0]} of epoch {place[1]}"

        try:
            ask()
        except (ValueError, TypeError):
            agree_on(self._ranks, ask)  # which raises, here and on those that would save
        what = ToSave(model, self._collector(model, optimizer, extra))
        path = self._save(f"step_{place[0]}", what, ask, step=place[0], epoch=place[1])
        assert path is not None
        return path

    def prepare(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, extra: Any = None
    ) -> None:
        """Make the memory for saving these in the background now, beside what comes next, and not in the first save.

        Call it once the optimizer has its state. Otherwise the first save makes the memory, and takes longer.
        """
        self._refuse_closed()
        agree_on(self._ranks, lambda: "make ready for saving")
        self.make_ready(ToSave(model, self._collector(model, optimizer, extra)))

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        path: str | Path | None = None,
        *,
        strict: bool = True,
    ) -> Loaded:
        """Load the checkpoint in the folder ``path``, or the job's newest one; all ranks raise where one cannot.

        A newest one that is damaged is passed over with a warning, for the one before it, if that fills all that the
        damaged one has begun to fill; otherwise that is a CheckpointError, and memory is of no use. Without ``strict``
        what fits is loaded, what the model has besides stays as it is, and its optimizer state begins anew.
        CheckpointNotFound where there is none.
        """
        self._come_to_rest()
        given: list[Path] = []

        def ask() -> str:
            given[:] = [] if path is None else [Path(path)]  # which hosts may have under different names
            which = "the checkpoint that is given" if given else "the newest checkpoint"
            return f"load {which}{'' if strict else ', as far as it fits'}"

        agree_on(self._ranks, ask)
        into = _Into(model, as_list(optimizer), self._ranks, is_strict=strict)
        loaded = self._restorer.restore(into, given[0] if given else None, falls_back=True)
        if loaded is None:
            raise CheckpointNotFound(
                f"{self._root} has no checkpoint of job {self._job!r}; give path= to load another's, or job="
            )
        return loaded

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, of those that lead to where this run is; None if there is none."""
        self._refuse_closed()
        agree_on(self._ranks, lambda: "tell the newest checkpoint")
        return self._run.latest()

    def wait(self) -> None:
        """Return once what ``save`` has begun is done; CheckpointError on all ranks where it failed on one of them."""
        self._saver.settle()

    @property
    def saves_in_background(self) -> bool:
        """Whether saves go on while training does: it was asked for, and the ranks have a store to tell by."""
        return self._saver.can_save_in_background

    def is_saving(self) -> bool:
        """Whether what ``save`` has begun goes on on any rank: then the next one would wait for it."""
        self._refuse_closed()
        return self._saver.is_busy()

    def close(self) -> None:
        """Let another run of the job have the folder; nothing can be saved or loaded afterwards. Twice is allowed.

        What is being saved is saved first. Whether that has worked out is in the log; ``wait`` raises. Called while an
        exception is handled it waits for other ranks, which may be gone, no longer than half a minute.
        """
        self._is_closed = True
        self._saver.end(hurries=sys.exc_info()[1] is not None)
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
        self._refuse_closed()
        self._run.claim()

    def try_out(self, collect: Callable[[], Contents]) -> None:
        """Raise on all ranks where one of them could not collect its contents for a checkpoint."""

        def act() -> None:
            for inventory in collect().inventories().values():
                inventory.to_json()

        gather_or_raise(self._ranks, act, "seeing what a checkpoint would hold")

    def save_contents(
        self,
        name: str,
        what: ToSave,
        *,
        step: int,
        epoch: int,
        about: Mapping[str, Any],
        on_failed: Callable[[CheckpointError], None],
        in_background: bool = True,
        waits: bool = True,
        overlaps: bool = False,
        starts: bool = True,
    ) -> Path | None:
        """Save ``what``; ``on_failed`` takes the error of the save before, if it has failed, on all ranks.

        Unless it ``waits``, None while another one is under way, and nothing is done. Unless it ``starts`` it is
        copied, and left to ``write_held``. If it ``overlaps``, what changes
        in ``optimizer.step()`` alone is copied until ``fence`` returns.
        """
        self._refuse_closed()
        if not in_background or not self._saver.can_save_in_background:
            try:
                self._saver.settle()
            except CheckpointError as error:
                on_failed(error)
        asks = f"save {name} at step {step} of epoch {epoch}"
        return self._save(
            name,
            what,
            lambda: asks,
            step=step,
            epoch=epoch,
            about=about,
            in_background=in_background,
            on_failed=on_failed,
            waits=waits,
            overlaps=overlaps,
            starts=starts,
        )

    def first_says(self, opinion: bool) -> bool:
        """The first rank's opinion, on all ranks."""
        says = self._ranks.sum([int(opinion and self._ranks.rank == 0)], "agreeing on a copy")
        return says[0] > 0

    @property
    def is_holding(self) -> bool:
        """Whether there is something that was copied and not written."""
        return self._saver.is_holding

    def drop_held(self) -> None:
        """What was copied and not written is not to be written any more."""
        self._saver.drop_held()

    def write_held(self, seconds: float) -> Path | None:
        """Write what was saved last, if it did not start; its folder, if it exists in time. From any thread."""
        return self._saver.write_held(seconds)

    @property
    def is_copying(self) -> bool:
        """Whether ``fence`` has something to wait for."""
        return self._saver.is_copying

    def fence(self) -> None:
        """Return once parameters and optimizers may change."""
        self._saver.fence()

    def make_ready(self, what: ToSave) -> None:
        """Make the memory for ``what``, where that is needed."""
        if self._saver.can_save_in_background:
            self._saver.make_ready(what)

    def change_since(self, path: Path, model: nn.Module, collect: Collect, passes_over: tuple[str, ...]) -> str | None:
        """What is not as the checkpoint in ``path`` has it, on any rank; None where saving would give the same again.

        ``passes_over`` is what does not matter, as ``first_change`` takes it.
        """
        self._come_to_rest()
        agree_on(self._ranks, lambda: f"save again what {path.name} has")
        own = own_buffers(model, self._ranks)

        def compare() -> str | None:
            try:
                found = self._storage.within(lambda: Found.read(path), f"reading {path}")
            except CheckpointNotFound:
                return "anything"
            with Opened(found, self._storage) as opened:
                return first_change(opened, collect(own), rank=self._ranks.rank, passes_over=passes_over)

        answers = self._storage.together(compare, f"comparing {path} with what is here", is_patient=False)
        return next((change for change in answers if change is not None), None)

    def restore(self, into: Destination[_Result], *, falls_back: bool) -> _Result | None:
        """What ``into`` gives of the newest good checkpoint; None where the job has none."""
        self._come_to_rest()
        agree_on(self._ranks, lambda: "load the newest checkpoint")
        return self._restorer.restore(into, None, falls_back=falls_back)

    def go_back(
        self, into: Destination[_Result], step: int | None, *, before: int, falls_back: bool, more: str
    ) -> _Result:
        """What ``into`` gives of the checkpoint of ``step``, or of the newest one, or good one, ``before`` a step.

        Only those that led to where this run is are asked. What is saved from here on goes on from that one, and is the
        work of another run. ``more`` is what else has to be the same on all ranks, in words.
        """
        self._come_to_rest()

        def ask() -> str:
            which = "the newest checkpoint" if step is None else f"the checkpoint of step {_as_count('step', step)}"
            return f"go back to {which}{more}"

        agree_on(self._ranks, ask)
        asked = None if step is None else operator.index(step)
        candidates = self._run.behind(step=asked, before=before)
        result = self._restorer.restore_first(into, candidates, falls_back=falls_back and step is None)
        assert result is not None
        self._run.claim()
        return result

    def _save(
        self,
        name: str,
        what: ToSave,
        ask: Callable[[], str],
        *,
        step: int,
        epoch: int,
        about: Mapping[str, Any] | None = None,
        in_background: bool = True,
        **of_background: Any,
    ) -> Path | None:
        if not self._run.is_claimed:
            agree_on(self._ranks, ask)  # claiming is no answer to who is asked for something else
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
            versions=self._versions,
            about=dict(about or {}),
        )
        if self._saver.can_save_in_background and in_background:

            def on_end() -> None:
                self._run.note_save(step)

            return self._saver.save_in_background(folder, name, what, draft, ask=ask, on_end=on_end, **of_background)
        path = self._saver.save(folder, name, what, draft, ask=ask)
        self._run.note_save(step)
        if self._ranks.rank == 0:
            _logger.info("checkpoint %s was saved in %.2f s", path, time.perf_counter() - began)
        return path

    def _staging(self, *, keep_previous: bool) -> Staging:
        """Memory of this process's own, or in the folder of an agent, if there is one."""
        folder = os.environ.get("ELASTIC_EXT_STAGING_DIR")
        if not folder:
            return Staging(is_pinned=torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        owner, num_slots = f"{self._root}/{self._job}", 2 if keep_previous else 1
        return Staging(shelf=Shelf(Path(folder).absolute(), owner, rank=self._ranks.rank, num_slots=num_slots))

    def _collector(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, extra: Any) -> Collect:
        """What gives the contents of a checkpoint of these."""

        def collect(own: Mapping[str, torch.Tensor]) -> Contents:
            tensors: dict[str, torch.Tensor] = {}
            packed = pack(extra, _EXTRA, tensors)
            optimizers = as_list(optimizer)
            rank = self._ranks.rank
            return contents_of(model, optimizers, rank=rank, tensors=tensors, own=own, state={_EXTRA: packed})

        return collect

    def _come_to_rest(self) -> None:
        """Nothing is under way when what comes next begins."""
        self._refuse_closed()
        self._saver.settle()

    def _refuse_closed(self) -> None:
        """What is closed has left the other ranks, and its place among the job's checkpoints."""
        if self._is_closed:
            raise CheckpointError(
                f"the ShardCheckpointer of job {self._job!r} is closed, and saves and loads nothing any more; call "
                "this before close(), or within its `with`, or make another one"
            )


class _Into:
    """A model and its optimizers on one rank, to be loaded into."""

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
        """What goes into memory of its own is read first: damage that is found there has touched nothing."""
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


def _script() -> str | None:
    """The file that is run, None where there is none; an absolute path, whatever folder the process has gone to."""
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _as_count(what: str, given: object) -> int:
    """An integer of Python's or numpy's as Python's own; ValueError where it cannot be a count."""
    if isinstance(given, SupportsIndex) and not isinstance(given, bool):
        count = operator.index(given)
        if 0 <= count < _MOST:
            return count
    raise ValueError(f"{what} is {given!r}; allowed: an integer from 0 to {_MOST - 1}")
