"""A training that launchers start in tests: rank 1 sleeps longer in its forward passes than the others do."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticTrainer


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03 if dist.get_rank() == 1 else 0.01)
        found: torch.Tensor = self.layer(inputs)
        return found


def main() -> None:
    """Until it is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Sleeping())
    loader = DataLoader(TensorDataset(torch.randn(100_000, 4)), batch_size=2)
    trainer = ElasticTrainer(model, loader)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=1e-3))
        with trainer.epoch(0):
            for (inputs,) in loader:
                with trainer.step():
                    model(inputs).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if trainer.should_stop:
                    break


if __name__ == "__main__":
    main()
