"""What elastic-run starts in master_config.py: a small training that writes when each version came into force.

    python -m benchmarks.master_config_job FOLDER STEP_SECONDS

In FOLDER: versions-<rank>.txt, a line for each step: the version that it ran under and when it began, in nanoseconds of
the clock that all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_ext import ElasticDataLoader, ElasticTrainer, FollowOptions

__all__ = ["train"]


def train(folder: Path, step_seconds: float) -> None:
    """Train until told to end."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(64, 64))
    loader = ElasticDataLoader(TensorDataset(torch.randn(960, 64)), batch_size=2)
    trainer = ElasticTrainer(model, loader, global_batch_size=4, follow_options=FollowOptions(agree_every_steps=1))
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    with trainer, open(folder / f"versions-{dist.get_rank()}.txt", "w", buffering=1) as file:
        epoch = 0
        while True:
            with trainer.epoch(epoch):
                for (inputs,) in loader:
                    with trainer.step():
                        print(trainer.config.version, time.monotonic_ns(), file=file)
                        model(inputs).pow(2).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        time.sleep(step_seconds)
            epoch += 1


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
