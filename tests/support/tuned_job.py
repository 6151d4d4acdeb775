"""A training that starts badly, for tests and to look at: its loader has no workers, and samples are long in coming.

    python -m tests.support.tuned_job FOLDER [--sample-seconds S] [--steps N]

In FOLDER, as of tests/support/elastic_job.py: samples-<rank>-<pid>.txt, a line for each step with its samples. It ends
after so many steps, or at the end of the epoch in which there is a file FOLDER/stop.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elastic_ext import ElasticDataLoader, ElasticTrainer

NUM_SAMPLES = 256
GLOBAL_BATCH = 16
WIDTH = 64


class Slow(Dataset[tuple[int, torch.Tensor]]):
    """Samples that are waited for, and take nobody's processor."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(self._seconds)
        return index, torch.full((WIDTH,), index / NUM_SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample-seconds", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    model = DistributedDataParallel(nn.Sequential(blocks, nn.Linear(WIDTH, 1)))
    loader = ElasticDataLoader(Slow(options.sample_seconds), batch_size=2, shuffle=True, seed=3)
    trainer = ElasticTrainer(model, loader, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(torch.optim.Adam(model.parameters(), lr=1e-3))
    with trainer, open(options.folder / f"samples-{dist.get_rank()}-{os.getpid()}.txt", "w") as file:
        print("from", trainer.global_step, "round", 1, file=file, flush=True)
        is_told = False
        epoch = trainer.start_epoch
        while trainer.global_step < options.steps and not is_told:
            with trainer.epoch(epoch):
                train(trainer, model, optimizer, loader, file, options.steps)
            epoch += 1
            stop = torch.tensor([(options.folder / "stop").exists()], dtype=torch.int32)
            dist.all_reduce(stop)
            is_told = bool(stop)
        print("done", file=file, flush=True)
    dist.destroy_process_group()


def train(trainer, model, optimizer, loader, file, most) -> None:  # type: ignore[no-untyped-def]
    held: list[int] = []
    for indices, inputs in loader:
        step = trainer.global_step
        with trainer.step():
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held += indices.tolist()
        if trainer.global_step > step:
            print(trainer.global_step, *held, file=file, flush=True)
            held = []
        if trainer.global_step >= most:
            break


if __name__ == "__main__":
    main()
