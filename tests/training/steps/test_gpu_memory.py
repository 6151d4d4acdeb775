"""Memory of a GPU that runs out for real: steps come again, and nothing of the failed ones stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.training.steps.device_memory import DeviceMemory
from tests.support.training import Slices, trainer_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MIB = 1 << 20
SMALL, LARGE, WIDTH, DEPTH = 64, 8192, 2048, 8


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a GiB beside what is held already."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    allowed = torch.cuda.memory_reserved(DEVICE) + 512 * MIB
    torch.cuda.set_per_process_memory_fraction(allowed / total, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        torch.cuda.empty_cache()


class Training:
    """Of a model whose activations are most of its memory: 8 x 2048 numbers for each sample, and some more."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(16, WIDTH)]
        for _ in range(DEPTH):
            layers += [nn.GELU(), nn.LayerNorm(WIDTH)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 4)).to(DEVICE)
        draw = torch.Generator().manual_seed(1)
        data = torch.randn(2 * LARGE, 16, generator=draw).to(DEVICE), torch.randint(4, (2 * LARGE,)).to(DEVICE)
        self.loader = Slices(data, SMALL, is_endless=True)
        self.trainer = trainer_of(folder, self.model, self.loader, global_batch_size=LARGE)
        self.optimizer = self.trainer.prepare(torch.optim.SGD(self.model.parameters(), lr=1e-3))

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps: int) -> None:
        until = self.trainer.global_step + num_steps
        for batch in self.loader:
            self.trainer.run(self.micro_step, *batch)
            if self.trainer.global_step == until:
                return

    def ask(self, batch_size: int) -> Any:
        proposal = self.trainer.propose({"dataloader.batch_size": batch_size}, "a test")
        self.train(3)
        return proposal

    @property
    def held(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(DEVICE)


def test_grown_to_the_limit_and_back_twenty_times(
    tmp_path: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemory, "has_room", lambda memory, num_bytes: True)  # which would say no, and be right
    run = Training(tmp_path)
    with run.trainer:
        run.train(3)
        held, sizes = [run.held], []
        for _ in range(20):
            assert run.ask(LARGE).outcome == "in force"
            sizes.append(run.trainer.config.dataloader.batch_size)
            run.ask(SMALL)
            held.append(run.held)
    assert all(SMALL < size < LARGE for size in sizes)
    assert set(held) == {held[0]}


def test_what_has_no_room_is_refused_before_it_is_tried(tmp_path: Path, little_memory: None) -> None:
    run = Training(tmp_path)
    with run.trainer:
        run.train(3)
        num_failures = torch.cuda.memory_stats(DEVICE)["num_ooms"]
        proposal = run.ask(LARGE)
        assert proposal.outcome == "refused"
        assert f"{LARGE} samples at once are expected to take" in proposal.refusal
        run.train(2)
        assert torch.cuda.memory_stats(DEVICE)["num_ooms"] <= num_failures + 1  # the try itself
        assert run.ask(2 * SMALL).outcome == "in force"


def test_what_passes_take_is_measured(tmp_path: Path) -> None:
    run = Training(tmp_path)
    with run.trainer:
        run.train(4)
        memory = run.trainer._training.growing._memory
        least = DEPTH * WIDTH * 4  # the numbers that GELU keeps of each sample
        assert memory.per_sample is not None
        gradients = sum(part.numel() * 4 for part in run.model.parameters())
        assert least <= memory.per_sample <= 6 * least + gradients / SMALL
