"""Trainings that are saved beside their next steps, for tests of what is then in the checkpoint: a model whose passes
change a good deal, the ways to wrap it, a trainer that saves often, and a gate that holds copies up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.checkpoint.saving.staging import Copying
from tests.support.training import trainer_of

__all__ = ["MICRO_BATCH", "SAVED_STEP", "WRAPS", "Gate", "Net", "forget_newer", "learn", "saving_trainer"]

SAVED_STEP = 2
"""A checkpoint is due after every second step, and this is the first."""
MICRO_BATCH = 4
JOIN_SECONDS = 30.0
OPENED_AFTER_SECONDS = 0.05  # a step that does not wait for the copy is over long before


class Gate:
    """Nothing that may wait is copied before it is opened; who waits for it is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        run = Copying.run

        def run_late(copying: Copying) -> None:
            assert self._opened.wait(JOIN_SECONDS)
            run(copying)

        monkeypatch.setattr(Copying, "run", run_late)

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def open_soon(self) -> threading.Timer:
        """Open it once whoever does not wait for it is long past."""
        opened = threading.Timer(OPENED_AFTER_SECONDS, self.open)
        opened.start()
        return opened


class Net(nn.Module):
    """One whose passes change buffers of several kinds."""

    def __init__(self, seed: int, *, is_sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        if not is_sharded:  # which these do not know
            nn.utils.spectral_norm(self.first)
            nn.utils.parametrizations.spectral_norm(self.last)
        self.register_buffer("num_passes", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.get_buffer("num_passes").add_(1)
        result: torch.Tensor = self.last(self.norm(self.first(inputs)).relu())
        return result


def sharded(plain: nn.Module, **options: Any) -> nn.Module:
    fully_shard(plain, mesh=init_device_mesh("cpu", (2,)), **options)
    return plain


def offloaded(plain: nn.Module) -> nn.Module:
    """Where parameters are on the host anyway it copies nothing; pinning them takes a GPU."""
    return sharded(plain, offload_policy=CPUOffloadPolicy(pin_memory=False))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda plain: plain,
    "ddp": DistributedDataParallel,
    "fully_shard": sharded,
    "fully_shard, offloaded": offloaded,
}


def saving_trainer(folder: Path, model: nn.Module, **arguments: Any) -> Any:
    """A trainer that saves after every second step, beside the next, unless it is told otherwise."""
    return trainer_of(
        folder,
        model,
        **{
            "micro_batch_size": MICRO_BATCH,
            "shared_storage_path": folder / "storage",
            "checkpoint_interval": CheckpointInterval(steps=SAVED_STEP),
            "overlap_saving": True,
            **arguments,
        },
    )


def learn(model: nn.Module, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What a loop does in a step."""
    inputs, targets = batch
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def forget_newer(folder: Path, step: int) -> None:
    """Have the checkpoint before this one be the newest."""
    for path in (folder / "storage").glob(f"fsdp_checkpoint/*/step_{step}"):
        (path / "COMMIT").unlink()
