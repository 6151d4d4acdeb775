"""What members.py starts: a small training that writes which samples it has drawn, and which steps it has committed.

    python -m benchmarks.members_job ddp|full_shard|busy FOLDER          with ElasticTrainer, started by a launcher
    python -m benchmarks.members_job torchft FOLDER NUMBER LIGHTHOUSE    a replica of torchft's, which nothing launches

In FOLDER: checkpoints/, and steps-<pid>.txt: lines ``drawn SAMPLE,...`` as a micro-batch is taken, and ``step NUMBER
WHEN RANKS SAMPLE,...`` as a step has been committed: when, in seconds since 1970, among how many ranks, and the samples
that this process had in it. A replica of torchft's that is sent SIGTERM ends between two steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticTrainer

__all__ = ["GLOBAL_BATCH", "MOST_REPLICAS", "Record", "main"]

GLOBAL_BATCH = 12
MOST_REPLICAS = 3
"""How many replicas torchft's sampler shares the samples out to: it has to be told before."""
_NUM_SAMPLES = 48_000
_WIDTH = 64
_LARGE_WIDTH, _NUM_LARGE = 2000, 10
"""40 million parameters."""
_STEP_SECONDS = 0.02
_BUSY_SECONDS = 0.05
_STEPS_PER_CHECKPOINT = 50


class Record:
    """The lines of this process."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._samples: list[int] = []

    def drawn(self, samples: torch.Tensor) -> None:
        """A micro-batch was taken from the loader."""
        self._samples += samples.tolist()
        self._write("drawn", _joined(samples.tolist()))

    def committed(self, step: int, num_ranks: int, *, counts: bool = True) -> None:
        """The samples drawn since the last one were trained on in a step; not if they do not count there."""
        self._write("step", str(step), repr(time.time()), str(num_ranks), _joined(self._samples if counts else []))
        self._samples = []

    def discarded(self) -> None:
        """The samples drawn since the last step were in none, which is committed."""
        self._samples = []

    def _write(self, *words: str) -> None:
        print(*words, file=self._file, flush=True)


def _joined(samples: Sequence[int]) -> str:
    return ",".join(map(str, samples)) or "-"


def _dataset(width: int) -> TensorDataset:
    return TensorDataset(torch.randn(16, width).repeat(_NUM_SAMPLES // 16, 1), torch.arange(_NUM_SAMPLES))


def train_elastic(way: str, folder: Path, record: Record) -> None:
    """Train until told to end. Nothing in it is for members that change."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = _LARGE_WIDTH if way == "full_shard" else _WIDTH
    net: nn.Module
    if way == "full_shard":
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_NUM_LARGE)))
        for layer in (*net, net):
            fully_shard(layer)
    else:
        net = DistributedDataParallel(nn.Linear(width, width))
    loader = ElasticDataLoader(_dataset(width), batch_size=2)
    trainer = ElasticTrainer(
        net,
        loader,
        global_batch_size=GLOBAL_BATCH,
        shared_storage_path=folder / "checkpoints",
        checkpoint_interval=CheckpointInterval(steps=_STEPS_PER_CHECKPOINT),
    )
    optimizer = trainer.prepare(torch.optim.Adam(net.parameters(), lr=1e-4))
    with trainer:
        for epoch in range(trainer.start_epoch, 1_000_000):
            with trainer.epoch(epoch):
                for inputs, samples in loader:
                    record.drawn(samples)
                    with trainer.step():
                        net(inputs).pow(2).mean().backward()
                        if way == "busy":
                            _be_busy(_BUSY_SECONDS * inputs.shape[0] / GLOBAL_BATCH)
                        optimizer.step()
                        optimizer.zero_grad()
                    if trainer.step_was_undone:  # and its samples come again
                        record.discarded()
                    elif trainer.sync_gradients:
                        record.committed(trainer.global_step, dist.get_world_size())
                        if way == "ddp":
                            time.sleep(_STEP_SECONDS)


def _be_busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def train_torchft(number: int, lighthouse: str, record: Record) -> None:
    """Train as its documentation has it: replicas of one rank, its own DDP, optimizer and sampler."""
    import torchft

    ends = False

    def end(*_: Any) -> None:
        nonlocal ends
        ends = True

    signal.signal(signal.SIGTERM, end)
    torch.manual_seed(0)
    net = nn.Linear(_WIDTH, _WIDTH)
    plain = torch.optim.Adam(net.parameters(), lr=1e-4)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}_",
    )
    model = torchft.DistributedDataParallel(manager, net)
    optimizer = torchft.Optimizer(manager, plain)
    dataset = _dataset(_WIDTH)
    sampler = torchft.DistributedSampler(
        dataset, replica_rank=number, num_replica_groups=MOST_REPLICAS, group_rank=0, num_replicas=1, shuffle=False
    )
    for inputs, samples in DataLoader(dataset, batch_size=GLOBAL_BATCH // MOST_REPLICAS, sampler=sampler):
        record.drawn(samples)
        before = manager.current_step()
        optimizer.zero_grad()  # here the replicas of the step are agreed on
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            record.committed(
                manager.current_step(),
                manager.num_participants(),
                counts=manager.participating_rank() is not None,
            )
        else:
            record.discarded()
        if ends:
            break
        time.sleep(_STEP_SECONDS)
    manager.shutdown()


def main(way: str, folder: Path, *given: str) -> None:
    """Train in one of the ways."""
    with open(folder / f"steps-{os.getpid()}.txt", "w") as file:
        if way == "torchft":
            train_torchft(int(given[0]), given[1], Record(file))
        else:
            train_elastic(way, folder, Record(file))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
