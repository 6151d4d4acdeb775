"""Wherever a training is when SIGTERM or SIGUSR1 comes, and whoever else is sent it, it ends with what it came to."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from elastic_ext.leaving import EXIT_STATUS
from tests.leaving import Job, started

LOOP = """
import logging, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from elastic_ext import CheckpointInterval, ElasticTrainer

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
folder, where, num_samples = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(what):
    sys.stdout.write(what + "\\n")  # at once: several write to what torchrun's output is
    sys.stdout.flush()


def pause(*places):
    if where in places:
        say(where)
        sys.stdin.readline()


class Pausing(nn.Linear):
    def get_extra_state(self):
        pause("preparing")
        return None

    def set_extra_state(self, state): ...


class Numbers(Dataset):
    def __len__(self):
        return num_samples

    def __getitem__(self, index):
        return torch.full((4,), float(index))


model = nn.Linear(4, 4)
if num_ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
workers = {"num_workers": 2 // num_ranks, "persistent_workers": True} if where == "loader" else {}
loader = DataLoader(Numbers(), batch_size=2, **workers)
trainer = ElasticTrainer(
    model,
    loader,
    shared_storage_path=folder + "/storage",
    checkpoint_interval=CheckpointInterval(steps=1 if where == "background" else 1000),
    run_dir=f"{folder}/{rank}",
    job="job",
    save_on_signals=True,
)
try:
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=1e-6))
        say(f"at {trainer.global_step}, epoch {trainer.start_epoch}")
        for epoch in range(trainer.start_epoch, 1000):
            with trainer.epoch(epoch):
                for batch in loader:
                    with trainer.step():
                        model(batch).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if trainer.num_steps == len(loader) - 1:
                            pause("last step")
                        if trainer.num_steps == len(loader) - 2:
                            pause("last step but one")
                    say(f"epoch {epoch} had {batch[0, 0]:.0f}")
                    if trainer.global_step == 5:
                        say("steps")
                        say(f"pid of rank {rank}: {os.getpid()}")
except BaseException as error:
    say(f"rank {rank} ends: {error!r}")
    raise
"""


def in_place(
    folder: Path, where: str = "steps", *, num_ranks: int = 1, num_samples: int = 100_000, launched: bool = False
) -> ...:
    return started(folder, LOOP, where, str(num_samples), num_ranks=num_ranks, launched=launched)


@pytest.mark.parametrize("where", ["steps", "loader"])
def test_torchrun(tmp_path: Path, where: str) -> None:
    with in_place(tmp_path, where, num_ranks=2, launched=True) as job:
        job.wait_for("steps", times=2)
        job.send(signal.SIGTERM)
        print(job.end())
        print(job.text[-6000:])
        print(job.saved)
        assert 0


@pytest.mark.parametrize("how", ["alone", "group"])
def test_loader(tmp_path: Path, how) -> None:
    with in_place(tmp_path, "loader") as job:
        job.wait_for("steps")
        if how == "alone":
            job.send(signal.SIGTERM)
        else:
            job.send_to_group(signal.SIGTERM)
        print(job.end())
        print(job.text[-6000:])
        print(job.saved, job.left_over())
        assert 0
