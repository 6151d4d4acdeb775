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
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.optim_state import held_of_optimizers
from elastic_ext.fsdp.plain import pack, unpack
from elastic_ext.fsdp.state import Held, box_of, extra_states, held, held_of_model, parameters_of
from elastic_ext.ranks import Ranks

from .claim import Claim
from .commit import Commit, chain_after
from .contents import Contents
from .jobfolder import JobFolder
from .jobname import job_name
from .lineage import Chain
from .listing import Found
from .loader import EXTRA_STATES, GROUPS, Loader, own_prefix
from .memory import part_of
from .opened import Opened
from .saver import Saver
from .together import gather_or_raise, within

__all__ = ["Loaded", "ShardCheckpointer", "contents_of"]

_logger = logging.getLogger(__name__)

STORAGE_TIMEOUT_SECONDS = 1800.0
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


def contents_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Contents:
    """What this rank has of a model, its optimizers and more for a checkpoint.

    ``tensors`` are the same on every rank, and the first one's are kept, or each rank's part of those that are spread;
    ``own`` are this rank's alone, under names that no other rank uses.
    """
    optim = held_of_optimizers(optimizers, parameters_of(model), rank=rank)
    extra = [held(name, tensor, box_of(name, tensor), "buffer") for name, tensor in (tensors or {}).items()]
    extra += [held(name, tensor, box_of(name, tensor), "opaque") for name, tensor in (own or {}).items()]
    packed = {name: pack(value, name) for name, value in extra_states(model).items()}
    return Contents(
        model=held_of_model(model),
        optim=optim.tensors,
        extra=extra,
        state={**(state or {}), GROUPS: optim.groups, EXTRA_STATES: packed},
        values=optim.values,
    )


class ShardCheckpointer:
    """One rank's hand in a job's checkpoints.

    ``job`` names the folder; by default it is ELASTIC_EXT_JOB, the launcher's run id, or the script. ``ranks`` is given
    by a trainer, which has them already. What touches the storage may take ``storage_timeout_seconds``.
    """

    def __init__(
        self,
        shared_storage_path: str | Path,
        *,
        job: str | None = None,
        ranks: Ranks | None = None,
        timeout_seconds: float = 600.0,
        storage_timeout_seconds: float = STORAGE_TIMEOUT_SECONDS,
    ) -> None:
        self._storage = Path(shared_storage_path).absolute()
        named = job if job is not None else os.environ.get("ELASTIC_EXT_JOB") or None
        self._job = job_name(named, os.environ.get("TORCHELASTIC_RUN_ID"), sys.argv[0])
        self._owns_ranks = ranks is None
        self._ranks = Ranks.join(timeout_seconds=timeout_seconds) if ranks is None else ranks
        self._seconds = storage_timeout_seconds
        self._saver = Saver(self._ranks, storage_timeout_seconds=storage_timeout_seconds)
        self._folder: JobFolder | None = None  # once this run has claimed it
        self._claim: Claim | None = None  # on the first rank
        self._run_id = ""
        self._came_from: Commit | None = None  # what this run went on from
        self._has_saved = False  # this run, under its id

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

        def act(opened: Opened) -> Loaded:
            loader = Loader(model, optimizers, rank=self._ranks.rank, num_ranks=self._ranks.world_size)
            if strict:
                loader.check(opened)
            loader.load_model(opened)
            if optimizers:
                loader.load_optimizers(opened)
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

        loaded: Loaded | None = self.restore(act, None if path is None else Path(path))
        if loaded is None:
            raise CheckpointNotFound(
                f"{self._storage} has no checkpoint of job {self._job!r}; give path= to load another's, or job="
            )
        return loaded

    def latest(self) -> Path | None:
        """The folder of the newest checkpoint, of those that lead to where this run is; None if there is none."""
        is_somewhere = self._folder is not None or self._came_from is not None
        chain = self._chain() if is_somewhere else None

        def find() -> str | None:
            if self._ranks.rank > 0:
                return None
            folder = self._found_folder()
            found = None if folder is None else folder.latest(chain)
            return None if found is None else str(found.path)

        path = self._together(find, "looking for the newest checkpoint")[0]
        return None if path is None else Path(path)

    def wait(self) -> None:
        """Return once what ``save`` has begun is done, which it is."""

    def close(self) -> None:
        """Let another run of the job have the folder. Twice is allowed."""
        self._end_run()
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
        if self._folder is not None:
            return
        claims: list[Claim] = []
        is_over = threading.Event()

        def take() -> tuple[str, str]:
            if self._ranks.rank > 0:
                return "", ""
            folder = JobFolder.find_or_make(self._storage, self._job, now=datetime.now())
            run_id = secrets.token_hex(6)
            claims.append(folder.claim(run_id))
            if is_over.is_set():  # it came after all, when nobody waited for it any more
                claims[0].release()
                return "", ""
            folder.prune_garbage()
            folders.append(folder)
            return str(folder.path), run_id

        folders: list[JobFolder] = []
        try:
            path, run_id = self._together(take, "claiming the job's folder of checkpoints")[0]
            self._run_id = run_id
            self._folder = folders[0] if folders else JobFolder(Path(path))
        finally:
            if self._folder is None:
                is_over.set()
                for claim in claims:
                    claim.release()
        if claims:
            self._claim = claims[0]
            weakref.finalize(self, claims[0].release)  # a notebook's cell, run again

    def own_buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """This rank's buffers, where ranks that share a model have come to different ones, as running means may be.

        In the model's own place are those of the first rank; as many ranks as there are now get back their own.
        """
        if self._ranks.world_size == 1:
            return {}
        buffers: list[Held] = []

        def compare() -> str:
            buffers.extend(each for each in held_of_model(model) if each.kind == "buffer" and _is_whole(each))
            digest = xxhash.xxh3_64()
            for each in buffers:
                digest.update(part_of(each.tensor, each.box, each.box))
            return digest.hexdigest()

        if len(set(gather_or_raise(self._ranks, compare, "comparing buffers"))) == 1:
            return {}
        return {f"{own_prefix(self._ranks.rank)}{each.name}": each.tensor for each in buffers}

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
        self.claim()
        assert self._folder is not None
        began = time.perf_counter()
        draft = Commit(
            generation="not-begun",
            lineage=self._chain(),
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
        path = self._saver.save(self._folder, name, collect, draft)
        self._has_saved = True
        if self._ranks.rank == 0:
            _logger.info("checkpoint %s was saved in %.2f s", path, time.perf_counter() - began)
        return path

    def restore(self, act: Callable[[Opened], Any], path: Path | None = None, *, falls_back: bool = True) -> Any:
        """What ``act`` gives of the checkpoint in ``path`` or of the newest good one; None where the job has none.

        ``act`` is called on every rank, and may be called again for an older checkpoint where ranks found the newer
        one damaged.
        """
        candidates = [path] if path is not None else self._candidates(falls_back)
        for place, candidate in enumerate(candidates):
            results: list[Any] = []
            commits: list[Commit] = []

            def attempt(
                candidate: Path = candidate, results: list[Any] = results, commits: list[Commit] = commits
            ) -> str:
                with Opened(Found.read(candidate)) as opened:
                    commits.append(opened.found.commit)
                    results.append(act(opened))
                return opened.found.commit.generation

            try:
                generations = self._together(attempt, f"loading {candidate}")
            except CheckpointDamaged as error:
                if not falls_back or place + 1 == len(candidates):
                    raise
                if self._ranks.rank == 0:
                    _logger.warning("%s; going on from %s, which was saved before it", error, candidates[place + 1])
                continue
            if len(set(generations)) > 1:
                raise CheckpointError(f"ranks see different checkpoints in {candidate}: look after the storage")
            self._came_from = commits[0]
            if self._has_saved:  # what it saves from here on is not what leads from there to what it has saved
                self._end_run()
            return results[0]
        return None

    # ---- within ----

    def _end_run(self) -> None:
        """Give the folder back; the next save claims it for a run with an id of its own."""
        if self._claim is not None:
            self._claim.release()
        self._claim = self._folder = None
        self._has_saved = False

    def _chain(self) -> Chain:
        return chain_after(self._came_from, run_id=self._run_id or "not-begun")

    def _found_folder(self) -> JobFolder | None:
        return self._folder or JobFolder.find(self._storage, self._job)

    def _candidates(self, falls_back: bool) -> list[Path]:
        """The job's checkpoints, newest first, as the first rank finds them."""

        def find() -> list[str]:
            folder = self._found_folder() if self._ranks.rank == 0 else None
            if folder is None:
                return []
            listing = folder.listing()
            for name, error in listing.unreadable.items():
                if not falls_back or not listing.found or isinstance(error, OSError):  # which may pass
                    raise error
                _logger.warning("%s is passed over: %s", name, error)
            return [str(found.path) for found in reversed(listing.found)]

        return [Path(path) for path in self._together(find, "looking for checkpoints")[0]]

    def _together(self, act: Callable[[], object], doing: str) -> list[Any]:
        return gather_or_raise(self._ranks, lambda: within(self._seconds, act, doing), doing)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def _is_whole(held: Held) -> bool:
    """Whether a rank could have come to a value of its own; what is cut differs between ranks as it should."""
    return held.is_alias_of is None and held.box == Box.whole(held.box.shape)


def _as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
