"""Runs of a small job that saves checkpoints, for tests of what becomes of them; and what lies in its folder.

The runs are functions for ranks, to be given to tests/support/trials.py. What they hold depends on the step alone, so
that every test can say which bits a step has to come back with.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp import Loaded, ShardCheckpointer
from elastic_ext.fsdp.checkpoint import storage as of_storage
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, read_commit
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint, is_name
from elastic_ext.fsdp.checkpoint.loading.verify import damage_in
from elastic_ext.fsdp.checkpoint.saving import background, saver, staging
from tests.support.file_operations import FileOperations, Strike
from tests.support.training import Slices, bits_of, make_data, make_model, shared, trainer_of

__all__ = [
    "FAILING",
    "JOB",
    "MOMENTS",
    "Moment",
    "Saved",
    "Small",
    "begin_job",
    "begin_training",
    "checkpointer_of",
    "digest_at",
    "digest_of",
    "end_saves",
    "extra_of",
    "fill",
    "garbage_in",
    "go_on",
    "is_loaded",
    "job_folder",
    "load_newest",
    "make_state",
    "newest_of",
    "take_over",
    "train",
    "train_on",
]

JOB = "a-job"

FAILING: Sequence[tuple[int, Strike, str, str]] = (
    (0, "full", "os.mkdir", "No space left on device"),
    (1, "full", "os.writev", "No space left on device"),
    (0, "broken", "/COMMIT", "Input/output error"),
)
"""A rank, what happens to the first operation of its save whose words hold this, and what is then said."""
Moment = Literal["a pass", "the first copy", "the fifth copy", "before optimizer.step()", "after it"]
"""Where no file is touched, and training goes on beside a save."""
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a run that goes on has come to, on one rank."""

    loaded_step: int
    loaded_digest: str
    step: int
    digest: str
    operations: list[str]


def make_state(*, seed: int = 0, width: int = 16, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded where there are ranks, and its optimizer, which has state already."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    for part in model.parameters():
        optimizer.state[part] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(part),
            "exp_avg_sq": torch.zeros_like(part),
        }
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give everything the numbers that it has at ``step``."""
    for place, tensor in enumerate(_tensors_of(model, optimizer)):
        whole = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1000 * step + place))
        if isinstance(tensor, DTensor):
            num_ranks, rank = dist.get_world_size(), dist.get_rank()
            tensor.to_local().copy_(whole.chunk(num_ranks)[rank])
        else:
            tensor.copy_(whole)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What is equal for equal bits in this rank's parts."""
    return hashlib.blake2b(repr(bits_of(*_tensors_of(model, optimizer))).encode(), digest_size=12).hexdigest()


def digest_at(step: int, width: int = 16) -> str:
    """The same of a process that has everything."""
    model, optimizer = make_state(width=width)
    fill(model, optimizer, step)
    return digest_of(model, optimizer)


def extra_of(step: int) -> dict[str, Any]:
    """What is saved besides."""
    return {"step": step, "order": torch.arange(step + 5)}


def checkpointer_of(storage: Path, **arguments: Any) -> ShardCheckpointer:
    return ShardCheckpointer(storage, job=JOB, timeout_seconds=60.0, **arguments)


def job_folder(storage: Path) -> Path:
    """The one that the job has."""
    (folder,) = (storage / "fsdp_checkpoint").glob("[!.]*")
    return folder


def begin_job(_: int, storage: Path, num_steps: int, width: int = 16) -> dict[int, str]:
    """A rank of a run from the beginning, which saves each step; the digests of its part."""
    model, optimizer = make_state(width=width)
    digests = {}
    with checkpointer_of(storage) as checkpointer:
        for step in range(1, num_steps + 1):
            fill(model, optimizer, step)
            checkpointer.save(step, model, optimizer, extra_of(step))
            digests[step] = digest_of(model, optimizer)
    return digests


def go_on(
    rank: int,
    storage: Path,
    path: Path | None = None,
    victim: int | None = None,
    strike: Strike = "kill",
    at: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> Saved:
    """A rank of a run that loads the newest checkpoint, or the one in ``path``, and saves the step after it.

    The operation number ``at`` of rank ``victim``'s save is struck.
    """
    model, optimizer = make_state(seed=9)
    with checkpointer_of(storage, **(arguments or {})) as checkpointer:
        loaded: Loaded = checkpointer.load(model, optimizer, path)
        loaded_digest = digest_of(model, optimizer)
        assert loaded.extra["step"] == loaded.step and torch.equal(loaded.extra["order"], torch.arange(loaded.step + 5))
        step = loaded.step + 1
        fill(model, optimizer, step)
        operations = FileOperations(storage, strike, at if rank == victim else None)
        checkpointer.save(step, model, optimizer, extra_of(step))
        digest = digest_of(model, optimizer)
        if checkpointer.saves_in_background:  # what is trained goes on
            fill(model, optimizer, step + 100)
        checkpointer.wait()
        return Saved(
            loaded_step=loaded.step,
            loaded_digest=loaded_digest,
            step=step,
            digest=digest,
            operations=operations.end(),
        )


def begin_training(rank: int, storage: Path, num_steps: int) -> dict[int, str]:
    """``begin_job`` with a trainer."""
    model, optimizer = make_state(fused=True)
    digests = {}
    with _trainer_for(model, rank, storage, every=1) as trainer:
        stepped = trainer.prepare(optimizer)
        for step in range(1, num_steps + 1):
            _take(trainer, model, stepped)
            fill(model, optimizer, step)
            digests[step] = digest_of(model, optimizer)
    return digests


def train_on(
    rank: int,
    storage: Path,
    _: Path | None = None,
    victim: int | None = None,
    strike: Strike = "kill",
    at: int | Moment | None = None,
    arguments: dict[str, Any] | None = None,
) -> Saved:
    """``go_on`` with a trainer: the step after the newest is copied beside the one after that."""
    vars(saver)["PATIENCE_SECONDS"] = 1.0  # with who is dead; in a process that ends with this
    model, optimizer = make_state(seed=9, fused=True)
    step = newest_of(storage) + 1
    with _trainer_for(model, rank, storage, every=step, **(arguments or {})) as trainer:
        stepped = trainer.prepare(optimizer)
        loaded_step, loaded_digest = trainer.global_step, digest_of(model, optimizer)
        _take(trainer, model, stepped)
        fill(model, optimizer, step)
        digest = digest_of(model, optimizer)
        if rank == victim and isinstance(at, str):
            _die_at(at, model, optimizer)
        operations = FileOperations(storage, strike, at if rank == victim and isinstance(at, int) else None)
        _take(trainer, model, stepped)
        fill(model, optimizer, step + 100)
    return Saved(
        loaded_step=loaded_step,
        loaded_digest=loaded_digest,
        step=step,
        digest=digest,
        operations=operations.end(),
    )


def _trainer_for(model: nn.Module, rank: int, storage: Path, *, every: int, **arguments: Any) -> Any:
    folder = storage.with_name(f"{storage.name}-runs")  # where no operation is counted
    folder.mkdir(exist_ok=True)
    return trainer_of(
        folder,
        model,
        rank=rank,
        job=JOB,
        micro_batch_size=4,
        shared_storage_path=storage,
        checkpoint_interval=CheckpointInterval(steps=every),
        overlap_saving=True,
        **arguments,
    )


def _take(trainer: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = make_data(4, torch.float32)
    with trainer.step():
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _die_at(moment: Moment, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """This process ends there, in the step to come."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "a pass":
        model.register_forward_pre_hook(die)
    elif moment == "before optimizer.step()":
        optimizer.register_step_pre_hook(die)
    elif moment == "after it":
        optimizer.register_step_post_hook(die)
    else:
        copies, put = iter(range(5)), vars(staging)["put_bytes"]
        last = 0 if moment == "the first copy" else 4

        def put_or_die(*arguments: Any) -> None:
            if next(copies) == last:
                die()
            put(*arguments)

        vars(staging)["put_bytes"] = put_or_die


def end_saves() -> None:
    """Wait until no thread of this process saves any more."""
    for thread in threading.enumerate():
        if thread.name in (background.THREAD_NAME, of_storage.THREAD_NAME):
            thread.join()


def garbage_in(storage: Path) -> list[str]:
    """What lies in the job's folder and is no part of a checkpoint, nor of what the folder has besides."""
    folder, found = job_folder(storage), []
    for path in sorted(folder.iterdir()):
        if path.name == "meta":
            commits = [read_commit(commit.parent) for commit in folder.glob(f"*/{COMMIT}")]
            named = {f"{checksum}.json" for commit in commits for checksum in commit.metas.values()}
            found += [str(file) for file in path.iterdir() if file.name not in named]
        elif is_name(path.name) or ".abandoned-" in path.name:
            if not (path / COMMIT).exists():
                found.append(str(path))
                continue
            commit = read_commit(path)
            named = {COMMIT, *commit.metas, *commit.states, *commit.shards}
            found += [str(file) for file in path.iterdir() if file.name not in named]
        elif path.name not in ("RUN.json", "RUN.lock"):
            found.append(str(path))
    return found


def newest_of(storage: Path) -> int:
    """The step of the newest checkpoint that nobody has abandoned."""
    commits = [path for path in job_folder(storage).glob(f"*/{COMMIT}") if is_name(path.parent.name)]
    return max(read_commit(path.parent).global_step for path in commits)


def is_loaded(storage: Path, step: int) -> bool:
    """Whether the checkpoint of a step has, to the last bit, what it was saved with, and is verified."""
    path = job_folder(storage) / f"step_{step}"
    assert list(damage_in(ListedCheckpoint.read(path))) == []
    model, optimizer = make_state(seed=5)
    with checkpointer_of(storage) as checkpointer:
        loaded: Loaded = checkpointer.load(model, optimizer, path)
    assert loaded.extra["step"] == step and torch.equal(loaded.extra["order"], torch.arange(step + 5))
    return loaded.step == step and digest_of(model, optimizer) == digest_at(step)


def load_newest(storage: Path, step: int, *, width: int = 16) -> Loaded:
    """What a process gets that loads the newest checkpoint: that of ``step``, with its bits, and no garbage beside."""
    assert newest_of(storage) == step and garbage_in(storage) == []
    model, optimizer = make_state(seed=5, width=width)
    with checkpointer_of(storage) as checkpointer:
        loaded: Loaded = checkpointer.load(model, optimizer)
    assert loaded.step == step and digest_of(model, optimizer) == digest_at(step, width)
    return loaded


def take_over(storage: Path) -> None:
    """What another run does that has come since, on a machine whose locks this one does not see."""
    holder = {"id": "another", "host": "elsewhere", "pid": 4711, "since": "2026-01-01T00:00:00+00:00"}
    (job_folder(storage) / "RUN.json").write_text(json.dumps(holder))


def train(folder: Path, storage: Path, until: int, *, rank: int = 0, **arguments: Any) -> tuple[int, int]:
    """A trainer's run with a checkpoint after each step, until a global step; where it began and ended."""
    folder.mkdir(exist_ok=True)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = shared(make_model(), num_ranks)
    loader = Slices(make_data(400), 4, is_endless=True)
    interval = CheckpointInterval(steps=1)
    options: dict[str, Any] = {"shared_storage_path": storage, "checkpoint_interval": interval, **arguments}
    with trainer_of(folder, model, loader, rank=rank, global_batch_size=4 * num_ranks, **options) as trainer:
        optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
        began = trainer.global_step
        with trainer.epoch():
            for inputs, targets in loader:
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                if trainer.global_step >= until:
                    break
        return began, trainer.global_step


class Small:
    """A trainer that saves every second step, and its loop, a step at a time."""

    def __init__(self, tmp_path: Path, **arguments: Any) -> None:
        self.storage = tmp_path / "storage"
        self.model: nn.Module = make_model()
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        options: dict[str, Any] = {
            "micro_batch_size": 4,
            "checkpoint_interval": CheckpointInterval(steps=2),
            **arguments,
        }
        self.trainer = trainer_of(tmp_path, self.model, shared_storage_path=self.storage, **options)
        self.optimizer = self.trainer.prepare(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def take(self, num_steps: int = 1) -> None:
        inputs, targets = make_data(4)
        for _ in range(num_steps):
            with self.trainer.step():
                nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def saved(self) -> list[str]:
        return sorted(path.parent.name for path in self.storage.glob(f"fsdp_checkpoint/*/*/{COMMIT}"))


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    tensors = [*parameters, *(tensor for part in parameters for tensor in optimizer.state[part].values())]
    return [tensor.detach() for tensor in tensors]
