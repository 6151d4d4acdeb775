"""Looks at gradients by themselves: of what layout, type and size these may be, and what a look costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from elastic_ext.profile.memory.live_bytes import LiveBytes
from elastic_ext.profile.memory.peaks import PeakTally
from elastic_ext.training.gradients.noise import _FIRST_PAIRS, GradientPairs
from elastic_ext.training.gradients.sharing import Sharing
from elastic_ext.training.steps.state import StepState
from tests.support.noisy import BATCH, Run, found_in
from tests.support.ranks import RankPool
from tests.support.training import make_model, shared


class Steps:
    """Of one model on one rank, whose gradients are given."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._state = StepState()
        self.sharing = Sharing(model)
        self.pairs = GradientPairs(self._state, [SGD(self.parameters)], self, num_ranks=1)

    def look(self, gradients: list[torch.Tensor | None]) -> None:
        for part, gradient in zip(self.parameters, gradients, strict=True):
            part.grad = gradient
        self._state.begin_anew()
        self.pairs.look(self.parameters, None)

    def compare(
        self, first: list[torch.Tensor | None], second: list[torch.Tensor | None]
    ) -> tuple[float, float] | None:
        self.look(first)
        self.pairs.keep()
        self.look(second)
        return self.pairs.compare()


def drawn(steps: Steps, seed: int) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(part.shape, generator=draw, dtype=torch.float64).to(part.dtype) for part in steps.parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_another_order_of_memory_tell_the_same_and_are_not_copied(dtype: torch.dtype) -> None:
    steps = Steps(nn.Conv2d(64, 128, 3, bias=False, dtype=dtype))
    first, second = drawn(steps, 0), drawn(steps, 1)
    plain = steps.compare(first, second)
    by_channels = [each.to(memory_format=torch.channels_last) for each in (*first, *second) if each is not None]
    assert not by_channels[0].is_contiguous()
    tally = PeakTally()
    with LiveBytes(tally):
        found = steps.compare(list(by_channels[:1]), list(by_channels[1:]))
    assert found == plain is not None
    assert tally.peaks.forward_bytes < by_channels[0].nbytes


def test_gradients_that_come_in_another_type_are_no_pair_with_those_before_and_one_with_those_after() -> None:
    steps = Steps(nn.Linear(4, 4))
    assert steps.compare(drawn(steps, 0), drawn(steps, 1)) is not None
    steps.look(drawn(steps, 2))
    steps.pairs.keep()
    for part in steps.parameters:
        part.data = part.data.double()
        part.grad = None
    steps.look(drawn(steps, 3))
    assert steps.pairs.compare() is None
    first, second = drawn(steps, 4), drawn(steps, 5)
    expected = sum(float(one @ other) for one, other in _flat(first, second))
    found = steps.compare(first, second)
    assert found is not None and found[1] == pytest.approx(expected, rel=1e-12)


def _flat(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> list[tuple[torch.Tensor, ...]]:
    pairs = zip(first, second, strict=True)
    return [tuple(each.reshape(-1) for each in pair if each is not None) for pair in pairs]


def test_parameters_without_a_size_so_far_are_passed_over() -> None:
    steps = Steps(nn.ModuleList([nn.Linear(4, 4), nn.LazyLinear(3)]))
    given: list[torch.Tensor | None] = [torch.ones(4, 4), torch.ones(4), None, None]
    assert steps.compare(given, given) == (0.0, 20.0)


# ---- numbers that are too large ----


def test_gradients_whose_products_are_beyond_all_numbers_tell_nothing(tmp_path: Path) -> None:
    def several(model: Any) -> list[Optimizer]:
        return [SGD(model[number].parameters(), lr=1e-30) for number in (0, 2)]

    run = Run(tmp_path, make=several, dtype=torch.float32)
    found = found_in(run, meanwhile=lambda step: make_huge(run, step, run.model.get_submodule("2")))
    assert (found.num_pairs, found.num_tried) == (_FIRST_PAIRS - 1, _FIRST_PAIRS)


def make_huge(run: Run, step: int, turning: nn.Module | None) -> None:
    """Of two steps that are a pair the gradients; those of ``turning`` turn around."""
    if step in (6, 7):
        for part in run.model.parameters():
            part.grad = torch.full_like(part, 1e20)
        for part in () if turning is None or step == 6 else turning.parameters():
            part.grad = torch.full_like(part, -1e20)


def with_huge_gradients(rank: int, folder: Path) -> tuple[int, int]:
    run = Run(
        folder,
        rank=rank,
        model=shared(make_model(torch.float32), 2),
        dtype=torch.float32,
        micro_batch=BATCH // 2,
        make=lambda model: SGD(model.parameters(), lr=1e-30),
    )
    found = found_in(run, 12, meanwhile=lambda step: make_huge(run, step, run.model if rank == 1 else None))
    return found.num_pairs, found.num_tried


def test_products_of_ranks_that_are_beyond_all_numbers_tell_nothing(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, with_huge_gradients, tmp_path) == [(5, 6), (5, 6)]
