"""A training that agents start in tests: it writes the samples of each step that it has committed.

    python -m tests.support.elastic_job FOLDER --steps N [--every K] [--hold-at STEP]

In FOLDER: checkpoints/, and a file for each process, samples-<rank>-<pid>.txt: where it began, and then a line for each
step: its number, then its samples. With --hold-at ranks wait at that step until there is a file FOLDER/go.

With --tells-state each writes state-<pid>.txt as well: a line after each step, and one after each change of members,
with the version of that (0 after a step), the step, the number of ranks, a hash of the whole state, and how many
descriptors, sockets and threads the process has (after a change alone).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticDataLoader, ElasticTrainer, ParallelPlan
from tests.support.file_operations import FileOperations
from tests.support.living import held
from tests.support.resharding import all_of_it

NUM_SAMPLES = 96
GLOBAL_BATCH = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--hang-at", type=int, default=-1, help="a step in which rank 1 waits for ever, once")
    parser.add_argument("--raise-at", type=int, default=-1, help="a step in which all ranks raise, once")
    parser.add_argument("--deadlock-at", type=int, default=-1, help="a step before which a loader locks up, once")
    parser.add_argument("--full-from", type=int, default=-1, help="from that step on nothing more goes on the disk")
    parser.add_argument("--sharded", action="store_true", help="with a model whose plan can be changed")
    parser.add_argument("--strategy", default="full_shard", help="that of --sharded")
    parser.add_argument("--shard-degree", type=int, help="that of hybrid_shard")
    parser.add_argument("--tells-state", action="store_true")
    options = parser.parse_args()
    joins = "ELASTIC_EXT_JOINS" in os.environ  # others, which are in the middle of their training; until it is prepared
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if not options.sharded:
        model = DistributedDataParallel(nn.Linear(4, 1))
    dataset: TensorDataset = TensorDataset(torch.arange(NUM_SAMPLES), torch.randn(NUM_SAMPLES, 4))
    num_workers = 0
    if options.deadlock_at >= 0 and dist.get_rank() == dist.get_world_size() - 1 and not was_restarted():
        dataset, num_workers = LocksUp(dataset, options.deadlock_at * GLOBAL_BATCH // dist.get_world_size()), 1
    loader = ElasticDataLoader(dataset, batch_size=2, shuffle=True, seed=3, num_workers=num_workers)
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=GLOBAL_BATCH,
        shared_storage_path=options.folder / "checkpoints",
        checkpoint_interval=CheckpointInterval(steps=options.every),
        checkpoint_options=CheckpointOptions(when_save_fails="warn"),
    )
    if options.sharded:
        model = trainer.parallelize(model, ParallelPlan(options.strategy, options.shard_degree))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    tells = StateFile(options.folder, trainer, model, inner) if options.tells_state else None
    if tells is not None:
        trainer.on_members(lambda change: tells.write(change.version))
    optimizer = trainer.prepare(inner)
    rank = dist.get_rank()
    with trainer, open(options.folder / f"samples-{rank}-{os.getpid()}.txt", "w") as file:
        number = time.time_ns() if joins else round_of_ranks()
        print("from", trainer.global_step, "round", number, file=file, flush=True)
        epoch = trainer.start_epoch
        while trainer.global_step < options.steps:
            with trainer.epoch(epoch):
                train(trainer, model, optimizer, loader, file, options, tells)
            epoch += 1
        print("done", file=file, flush=True)
    dist.destroy_process_group()


class LocksUp(TensorDataset):
    """Samples read under a lock, which one of this process's threads has when the worker is forked."""

    def __init__(self, dataset: TensorDataset, num_read: int) -> None:
        super().__init__(*dataset.tensors)
        self.num_left = num_read
        self.lock = multiprocessing.Lock()
        self.lock.acquire()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.num_left -= 1
        with self.lock if self.num_left < 0 else contextlib.nullcontext():
            return tuple(tensor[index] for tensor in self.tensors)


class StateFile:
    """What a process says of the whole state, which all ranks gather together."""

    def __init__(
        self, folder: Path, trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._what = (model, optimizer)
        self._trainer = trainer
        self._path = folder / f"state-{os.getpid()}.txt"

    def write(self, version: int = 0) -> None:
        """Write a line, on all ranks; with the version of a change that was just made."""
        told = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(all_of_it(*self._what).items()):
            told.update(name.encode() + tensor.numpy().tobytes())
        if version:
            self._trainer._training.ranks.wait_for_ends()  # of the groups of before
        counts = [*held().values()] if version else []
        with open(self._path, "a") as file:
            print(version, self._trainer.global_step, dist.get_world_size(), told.hexdigest(), *counts, file=file)


def hang() -> None:
    threading.Event().wait()


def was_restarted() -> bool:
    return os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"


def round_of_ranks() -> int:
    """What all ranks that were started together have in common; larger for those that came later."""
    now = torch.tensor([time.time_ns()])
    dist.broadcast(now, 0)
    return int(now)


def train(trainer, model, optimizer, loader, file, options, tells) -> None:  # type: ignore[no-untyped-def]
    samples: list[int] = []
    for indices, inputs in loader:
        step = trainer.global_step
        with trainer.step():
            if dist.get_rank() == 1 and step == options.hang_at and not was_restarted():
                hang()
            if step == options.raise_at and not was_restarted():
                raise ValueError("planted")
            loss = model(inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        samples = [] if trainer.step_was_undone else samples + indices.tolist()
        if trainer.global_step == options.full_from > step and not was_restarted():
            FileOperations(options.folder / "checkpoints", "full", range(100000), like="os.mkdir")
        if trainer.global_step > step:
            print(trainer.global_step, *samples, file=file, flush=True)
            samples = []
            if tells is not None:
                tells.write()
        if options.pace:
            time.sleep(options.pace)
        while trainer.global_step == options.hold_at and not (options.folder / "go").exists():
            time.sleep(0.02)
        if trainer.global_step >= options.steps:
            break


if __name__ == "__main__":
    main()
