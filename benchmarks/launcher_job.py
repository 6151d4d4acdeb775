"""What the launchers start in launcher.py: a small training that writes when each step was committed.

    python -m benchmarks.launcher_job FOLDER

In FOLDER: checkpoints/, and steps-<rank>-<pid>.txt: the number of ranks, when this round of them began, and a line for
each step: its number and when, in seconds since 1970.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticTrainer

__all__ = ["main"]

GLOBAL_BATCH = 12
STEP_SECONDS = 0.02


def main(folder: Path) -> None:
    """Train until told to end."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    loader = ElasticDataLoader(TensorDataset(torch.randn(9600, 64)), batch_size=2, shuffle=True)
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=GLOBAL_BATCH,
        shared_storage_path=folder / "checkpoints",
        checkpoint_interval=CheckpointInterval(steps=50),
    )
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    began = torch.tensor([time.time_ns()])
    dist.broadcast(began, 0)
    with trainer, open(folder / f"steps-{dist.get_rank()}-{os.getpid()}.txt", "w") as file:
        print(dist.get_world_size(), int(began), file=file, flush=True)
        epoch = trainer.start_epoch
        while True:
            with trainer.epoch(epoch):
                for (inputs,) in loader:
                    with trainer.step():
                        model(inputs).pow(2).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    if trainer.sync_gradients:
                        print(trainer.global_step, time.time(), file=file, flush=True)
                        time.sleep(STEP_SECONDS)
            epoch += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
