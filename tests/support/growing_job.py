"""A training whose gradient has far more noise than gradient, and whose steps have a cost of their own, for tests.

    python -m tests.support.growing_job FOLDER

In FOLDER, as rank 0 writes it: steps.txt, a line for each step with how many samples it had over all ranks, and the
rate that it was taken with. It ends at the end of the epoch in which there is a file FOLDER/stop.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elastic_ext import ElasticDataLoader, ElasticTrainer, StepOptions

NUM_SAMPLES = 4096
FIRST_BATCH = 16
RATE = 1e-3
WIDTH = 16
NOISE = 4.0
SECONDS_OF_A_STEP = 0.02


class Noisy(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """A sum of inputs, and much else."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=draw)
        self._targets = self._inputs.sum(1) + NOISE * torch.randn(NUM_SAMPLES, generator=draw)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self._inputs[index], self._targets[index]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, 1))
    loader = ElasticDataLoader(Noisy(), batch_size=FIRST_BATCH // 2, shuffle=True, seed=3)
    trainer = ElasticTrainer(
        model, loader, global_batch_size=FIRST_BATCH, step_options=StepOptions(learning_rate_rule="adascale")
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=RATE))
    with trainer, open(folder / f"steps-{dist.get_rank()}.txt", "w", buffering=1) as file:
        epoch, is_told = trainer.start_epoch, False
        while not is_told:
            with trainer.epoch(epoch):
                held = 0
                for indices, inputs, targets in loader:
                    rate, step = optimizer.effective_rates[0], trainer.global_step
                    with trainer.step():
                        (model(inputs).squeeze(1) - targets).pow(2).mean().backward()
                        if trainer.sync_gradients:
                            time.sleep(SECONDS_OF_A_STEP)
                        optimizer.step()
                        optimizer.zero_grad()
                    held += len(indices)
                    if trainer.global_step > step:
                        print(held, rate, file=file)
                        held = 0
            epoch += 1
            stop = torch.tensor([(folder / "stop").exists()], dtype=torch.int32)
            dist.all_reduce(stop)
            is_told = bool(stop)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
