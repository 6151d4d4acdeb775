"""Checkpoints of what lies on a GPU: saved at once and in the background, loaded there and on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.saving import checkpointer_of
from tests.support.training import bits_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Model(nn.Module):
    """Parameters in memory order and turned, and buffers of other types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(300, 200)
        self.turned = nn.Parameter(torch.randn(70, 90).t())
        self.short = nn.Parameter(torch.randn(1000).to(torch.bfloat16), requires_grad=False)
        self.norm = nn.BatchNorm1d(200)


def trained(device: str) -> tuple[Model, torch.optim.Optimizer]:
    """A model with optimizer state of its own, which is not what it was made with."""
    model = Model().to(device)
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad])
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for part in model.parameters():
            part.grad = torch.randn(part.shape, generator=draw).to(part) if part.requires_grad else None
        optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    host = [tensor.cpu().float() for tensor in model.state_dict().values()]
    states = [
        optimizer.state[part][name].cpu()
        for group in optimizer.param_groups
        for part in group["params"]
        for name in ("step", "exp_avg", "exp_avg_sq")
    ]
    return bits_of(host), bits_of(states)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("to", ["cuda", "cpu"])
def test_what_lies_on_a_gpu_comes_back_bit_for_bit(tmp_path: Path, in_background: bool, to: str) -> None:
    model, optimizer = trained(DEVICE)
    saved = bits(model, optimizer)
    with checkpointer_of(tmp_path, in_background=in_background) as checkpointer:
        checkpointer.prepare(model, optimizer)
        checkpointer.save(1, model, optimizer)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        checkpointer.wait()
    other = Model().to(to)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    another = torch.optim.AdamW([part for part in other.parameters() if part.requires_grad])
    with checkpointer_of(tmp_path) as checkpointer:
        checkpointer.load(other, another)
    assert bits(other, another) == saved
    assert {each.device.type for each in other.state_dict().values()} == {to}
