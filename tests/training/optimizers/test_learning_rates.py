"""Rates that follow the noise of gradients: bounded, alike on all ranks, kept in checkpoints; and what they are worth.

How the noise is measured is tried in test_learning.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval
from elastic_ext.config.lr_scaling import LearningRateRule, rate_factor
from elastic_ext.training.gradients.noise import _FIRST_PAIRS
from tests.support.noisy import BATCH, Run, learnable
from tests.support.ranks import RankPool
from tests.support.training import ResumableSlices, Slices, bits_of, make_model, shared

RATE = 0.05
SAVED_AT = 13  # between two steps that make a pair


pytestmark = pytest.mark.usefixtures("one_thread")


def run_of(folder: Path, **options: Any) -> Run:
    given: dict[str, Any] = {"learning_rate_rule": "adascale", "config": None, **options}
    return Run(folder, make=lambda model: SGD(model.parameters(), lr=RATE), **given)


# ---- by which factor ----


def test_rates_follow_the_noise_from_when_it_is_known_and_the_batch_at_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    asked = {4: 4 * BATCH, 40: 16 * BATCH, 50: BATCH // 2, 60: BATCH}
    batches, expected, are_known = [], [], []

    def watch(step: int) -> None:
        if not run.trainer.sync_gradients:
            return
        batch, value = run.trainer.global_batch_size, run.noise.value
        batches.append(batch)
        are_known.append(value is not None)
        expected.append(RATE * rate_factor("adascale", BATCH, batch, value))
        if step in asked:
            run.trainer.propose({"global_batch_size": asked[step]}, "to see what rates do")

    with run.trainer:
        run.train(64, watch)
    assert run.rates == pytest.approx(expected, rel=1e-12)
    assert set(batches) == {BATCH, 4 * BATCH, 16 * BATCH, BATCH // 2}
    since = are_known.index(True)
    assert 4 * BATCH in batches[:since] and since < 2 * _FIRST_PAIRS
    assert set(run.rates[:since]) == {RATE}, "as long as the noise is not known"
    for batch, rate in list(zip(batches, run.rates, strict=True))[since:]:
        if batch == BATCH:
            assert rate == RATE
        elif batch > BATCH:
            assert RATE < rate < RATE * batch / BATCH
        else:
            assert RATE * batch / BATCH < rate < RATE
    assert batches[-1] == BATCH and len(set(run.rates)) > 4


def test_steps_of_a_loader_with_sizes_of_its_own_are_looked_at_too(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*learnable()), batch_size=BATCH)
    run = run_of(tmp_path, source=loader, global_batch_size=2 * BATCH)

    def grow(step: int) -> None:
        if step == 2 * _FIRST_PAIRS:
            run.trainer.propose({"global_batch_size": 6 * BATCH}, "more samples")

    with run.trainer, run.trainer.epoch():
        run.train(2 * _FIRST_PAIRS + 6, grow)
        assert run.trainer.global_batch_size == 6 * BATCH
    assert run.noise.num_pairs >= _FIRST_PAIRS
    assert run.rates[0] == RATE < run.rates[-1] < 3 * RATE


# ---- kept ----


def saving_run(folder: Path, storage: Path, **options: Any) -> Run:
    """One with four times as many samples in a step from the fourth on."""
    source = ResumableSlices(learnable(), BATCH, is_endless=True)
    kept = {"shared_storage_path": storage, "checkpoint_interval": CheckpointInterval(steps=SAVED_AT)}
    return run_of(folder, **{"source": source, **kept, **options})


def trained(run: Run, num_steps: int) -> Run:
    def grow(step: int) -> None:
        if step == 2:
            run.trainer.propose({"global_batch_size": 4 * BATCH}, "more samples")

    return run.train(num_steps, grow)


def test_a_run_that_resumes_within_a_pair_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, first = (saving_run(tmp_path / name, tmp_path / f"{name}'s") for name in ("whole", "first"))
    with whole.trainer:
        trained(whole, 3 * SAVED_AT)
    with first.trainer:
        trained(first, SAVED_AT)
    second = saving_run(tmp_path / "second", tmp_path / "first's")
    with second.trainer:
        assert second.trainer.global_step == SAVED_AT
        assert second.trainer.global_batch_size == 4 * BATCH
        trained(second, 3 * SAVED_AT)
    assert second.noise == whole.noise and whole.noise.value is not None
    assert first.rates + second.rates == whole.rates and len(set(whole.rates)) > 2
    assert bits_of(second.model) == bits_of(whole.model)
    assert whole.noise.num_pairs < whole.noise.num_tried, "a pair was given up when the first half was saved"


def on_more_ranks(rank: int, folder: Path, storage: Path) -> tuple[dict[str, Any], list[float], list[float]]:
    run = saving_run(folder, storage, rank=rank, model=shared(make_model(), 2))
    with run.trainer:
        resumed = run.noise.state_dict()
        trained(run, run.trainer.global_step + 4)
        return resumed, run.rates, [run.noise.noise, run.noise.signal]


def test_what_is_known_of_the_noise_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = saving_run(tmp_path / "alone", tmp_path / "storage")
    with alone.trainer:
        trained(alone, 2 * SAVED_AT)
        rate = alone.optimizer.effective_rates[0]
    first, second = ranks.run(2, on_more_ranks, tmp_path / "ranks", tmp_path / "storage")
    assert first == second
    resumed, rates, _ = first
    assert resumed == alone.noise.state_dict() and resumed["value"] is not None
    assert rates[0] == rate > RATE


def test_the_trainers_own_state_holds_it_too(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first")
    with first.trainer:
        trained(first, 2 * _FIRST_PAIRS)
        state = first.trainer.state_dict()
        rates = first.optimizer.effective_rates
    second = run_of(tmp_path / "second")
    with second.trainer:
        second.trainer.load_state_dict(json.loads(json.dumps(state)))
        assert second.noise == first.noise
        assert second.optimizer.effective_rates == rates != [RATE]


def test_going_back_forgets_what_was_seen_since(tmp_path: Path) -> None:
    run = saving_run(tmp_path / "run", tmp_path / "storage")
    seen: dict[int, dict[str, Any]] = {}
    with run.trainer:
        for inputs, targets in run.source:
            with run.trainer.step():
                run.loss(run.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
                run.optimizer.zero_grad()
            seen[run.trainer.global_step] = run.noise.state_dict()
            if run.trainer.global_step == SAVED_AT + 4:
                run.trainer.rewind(SAVED_AT)
                assert run.noise.state_dict() == seen[SAVED_AT] != seen[SAVED_AT + 4]
                break


def test_a_step_that_comes_again_for_want_of_memory_leaves_the_same(tmp_path: Path) -> None:
    fails = [5, 8]
    short, plain = run_of(tmp_path / "short"), run_of(tmp_path / "plain")

    def work(run: Run, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        run.trainer.backward(run.loss(run.model, inputs, targets))
        run.trainer.clip_grad_norm_(run.model.parameters(), 1e6)  # where gradients are seen
        if run is short and run.trainer.global_step in fails:
            fails.remove(run.trainer.global_step)
            raise torch.OutOfMemoryError("planted: out of memory")
        run.optimizer.step()
        run.optimizer.zero_grad()

    for run in (short, plain):
        with run.trainer:
            for inputs, targets in run.source:
                run.trainer.run(work, run, inputs, targets)
                if run.trainer.global_step == 2 * _FIRST_PAIRS:
                    break
    assert not fails and short.trainer._batches.largest < BATCH
    assert short.noise.num_pairs == plain.noise.num_pairs == _FIRST_PAIRS
    assert short.noise.value == pytest.approx(plain.noise.value, rel=1e-9)


# ---- what it is worth ----

WIDTH = 24


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that follow from inputs, but for much noise."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(1 << 14, WIDTH, generator=draw, dtype=torch.float64)
    weights = torch.randn(WIDTH, 1, generator=draw, dtype=torch.float64)
    return inputs, inputs @ weights + 3.0 * torch.randn(len(inputs), 1, generator=draw, dtype=torch.float64)


def squared(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = 0.5 * (model(inputs) - targets).square()
    return losses.mean()


@dataclass(frozen=True, slots=True)
class Outcome:
    num_steps: int
    excess: float
    """The loss beyond the least that there can be."""


def learnt(folder: Path, rule: LearningRateRule, batch: int, *, progress: float, rate: float = 0.01) -> Outcome:
    """By steps whose factors add up to ``progress``, with ``batch`` samples each from the fortieth on."""
    data = regression()
    model = nn.Linear(WIDTH, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    run = Run(
        folder,
        model=model,
        source=Slices(data, BATCH, is_endless=True),
        make=lambda model: SGD(model.parameters(), lr=rate),
        learning_rate_rule=rule,
        loss=squared,
        config=None,
    )

    def grow(step: int) -> None:
        if step == 40:
            run.trainer.propose({"global_batch_size": batch}, "more samples")

    with run.trainer:
        run.train(10_000, grow, is_enough=lambda: sum(run.rates) / rate >= progress - 1e-6)
    inputs, targets = data
    best = torch.linalg.lstsq(torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1), targets).solution
    with torch.no_grad():
        least = 0.5 * (inputs @ best[:-1] + best[-1] - targets).square().mean()
        return Outcome(run.trainer.global_step, float(squared(model, inputs, targets) - least))


def test_fewer_and_larger_steps_learn_as_much_by_the_sum_of_their_factors(tmp_path: Path) -> None:
    small = learnt(tmp_path / "small", "none", BATCH, progress=300)
    grown = learnt(tmp_path / "grown", "adascale", 4 * BATCH, progress=300)
    slow = learnt(tmp_path / "slow", "none", 4 * BATCH, progress=grown.num_steps)
    assert small.num_steps == 300
    assert 40 + 260 / 4 < grown.num_steps < 200, "no factor is above four, and they are well above one"
    assert grown.excess < 1.2 * small.excess
    assert slow.excess > 3.0 * small.excess, "as many steps of this size are not enough at the small one's rate"
