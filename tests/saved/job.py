"""The training whose checkpoint and records lie here: of one rank or two, with nothing in it that a machine rounds.

    elastic-run --standalone --nproc-per-node=2 job.py FOLDER    saves step 3 in FOLDER/storage, and fails on purpose

It uses what users may use and nothing else. Every number in it is a small multiple of a power of two, so that the same
state is saved to the bit wherever it runs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from elastic_ext import (
    CheckpointInterval,
    CheckpointOptions,
    ElasticDataLoader,
    ElasticTrainer,
    FollowOptions,
    ParallelPlan,
)

JOB = "saved"
NUM_STEPS = 3


class Numbers(Dataset[tuple[torch.Tensor, int, int]]):
    """Samples that name themselves, and the process that made them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.tensor([float(index % 4), 1.0, 0.0, 2.0], dtype=torch.float64), index, os.getpid()


class Model(nn.Module):
    """Two layers, a buffer, and a parameter without a gradient."""

    seen: torch.Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, start * (number + 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = self.second(self.first(inputs))
        return result


class Training:
    """One rank's part of it, from where the newest checkpoint below ``folder`` is."""

    def __init__(self, folder: Path, run_dir: Path | None = None, *, start: float = 0.25, num_workers: int = 0) -> None:
        random.seed(1)
        numpy.random.seed(2)
        torch.manual_seed(3)
        self.model: nn.Module = Model(start).double()  # what it comes to has few enough bits for no rounding
        self.dataloader = ElasticDataLoader(
            Numbers(), batch_size=2, shuffle=True, seed=4, num_workers=num_workers, drop_last=True
        )
        self.trainer = ElasticTrainer(
            self.model,
            self.dataloader,
            global_batch_size=4,
            shared_storage_path=folder / "storage",
            checkpoint_interval=CheckpointInterval(steps=NUM_STEPS),
            checkpoint_options=CheckpointOptions(keep_last=1),
            follow_options=FollowOptions(job=JOB, run_dir=run_dir),
        )
        if dist.is_initialized():
            self.trainer.parallelize(self.model, ParallelPlan("full_shard"), nn.Linear)
        self.average = {"of/first": torch.zeros(4)}
        self.trainer.register_state("average", self.average)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self._optimizer, self._scheduler = self.trainer.prepare(self.optimizer, scheduler)
        self.trainer.knob("note", "")
        self.samples: list[int] = []
        """Those that this rank has trained on, in turn."""
        self.makers: set[int] = set()
        """The processes that have made them."""

    def step_until(self, num_steps: int, *, act_at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        """Train to the end of that step, and ``act`` in between."""
        with self.trainer.epoch(self.trainer.start_epoch):
            for inputs, indices, makers in self.dataloader:
                with self.trainer.step():
                    loss = self.model(inputs).sum() / 64
                    loss.backward()
                    self._optimizer.step()
                    self._scheduler.step()
                    self._optimizer.zero_grad()
                self.average["of/first"] += 1
                self.samples += indices.tolist()
                self.makers.update(makers.tolist())
                if self.trainer.global_step == act_at:
                    act()
                    act_at = 0
                if self.trainer.global_step == num_steps:
                    break

    def facts(self) -> dict[str, Any]:
        """What it has come to, as plain values: the same on all ranks, which all call this."""
        momenta = {
            name: whole(self.optimizer.state[parameter]["momentum_buffer"])
            for name, parameter in self.model.named_parameters()
            if "momentum_buffer" in self.optimizer.state.get(parameter, {})
        }
        counts = ("global_step", "start_epoch", "num_steps", "global_batch_size")
        return {
            "model": {name: whole(tensor) for name, tensor in self.model.state_dict().items()},
            "momenta": momenta,
            "average": self.average["of/first"].tolist(),
            "rate": self.optimizer.param_groups[0]["lr"],
            "config": self.trainer.config.to_dict(),
            "counts": {name: getattr(self.trainer, name) for name in counts},
            "random": [random.random(), float(numpy.random.random()), float(torch.rand(()))],
        }


def whole(tensor: torch.Tensor) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def say(told: Mapping[str, object]) -> None:
    sys.stdout.write(f"told {json.dumps(told)}\n")  # at once: other ranks write there too
    sys.stdout.flush()


def main(folder: Path) -> None:
    """Take three steps more than are saved, while the loader's worker is sent the signal by which jobs are told to end;
    wait until whoever started this has looked; and fail."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    training = Training(folder, num_workers=1)
    with training.trainer:
        step = training.trainer.global_step
        facts = training.facts() if step else {}

        def end_worker() -> None:
            (pid,) = training.makers
            assert pid != os.getpid(), "the loader has no worker"
            subprocess.run(["kill", "-TERM", str(pid)], check=True)

        training.step_until(step + NUM_STEPS, act_at=step + 1, act=end_worker)
    facts = facts or training.facts()  # what is drawn for them is drawn after the checkpoint
    say(
        {
            "facts": facts,
            "samples": training.samples,
            "num_makers": len(training.makers),
            "environment": sorted(name for name in os.environ if name.startswith("ELASTIC_EXT")),
        }
    )
    while not (folder / "seen").exists():
        time.sleep(0.01)
    raise ValueError("negative loss")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
