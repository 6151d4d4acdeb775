"""The noise of gradients as a training sees it, beside what its data truly hold; and rates that follow it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticDataLoader, ParallelPlan
from elastic_ext.master.facts import checked_facts
from elastic_ext.records.metrics import LearningFacts
from elastic_ext.training.counters import NoiseScale
from elastic_ext.training.gradients.noise import _EVERY_STEPS, _FIRST_PAIRS, _MORE_PAIRS, _OFTEN_STEPS
from tests.support.loops import put
from tests.support.noisy import BATCH, LETS, Run, found_in, learnable, loss_of, truth
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS, values_of
from tests.support.thinning import the_first
from tests.support.training import make_model, shared

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- what is measured ----


def test_what_is_measured_is_what_the_data_hold(tmp_path: Path) -> None:
    true = truth(make_model(), learnable())
    often = 2 * _FIRST_PAIRS + (_MORE_PAIRS - _FIRST_PAIRS) * _OFTEN_STEPS
    found = found_in(Run(tmp_path), often + 4 * _EVERY_STEPS)
    assert found.num_pairs == found.num_tried == _MORE_PAIRS + 4
    assert found.value == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize(
    "options", [{"micro_batch": 2}, {"micro_batch": 3}, {"make": lambda model: AdamW(model.parameters(), lr=1e-12)}]
)
def test_micro_batches_and_the_optimizer_make_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = found_in(Run(tmp_path / "plain"))
    other = found_in(Run(tmp_path / "other", **options))
    assert other.num_pairs == plain.num_pairs == _FIRST_PAIRS
    assert other.value == pytest.approx(plain.value, rel=1e-4)


def test_gradients_are_seen_before_they_are_clipped(tmp_path: Path) -> None:
    plain, clipped = Run(tmp_path / "plain"), Run(tmp_path / "clipped")
    clipped.max_norm = 1e-3
    assert found_in(clipped).value == pytest.approx(found_in(plain).value, rel=1e-4)


def test_several_optimizers_and_groups_are_one_gradient(tmp_path: Path) -> None:
    def several(model: Any) -> list[Optimizer]:
        first = SGD([{"params": [part]} for part in model[0].parameters()], lr=1e-9)
        return [AdamW(model[2].parameters(), lr=1e-12), first]

    plain, other = found_in(Run(tmp_path / "plain")), found_in(Run(tmp_path / "other", make=several))
    assert other.value == pytest.approx(plain.value, rel=1e-4)


def test_of_large_tensors_some_elements_tell_what_all_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = Run(tmp_path, model=nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 5)).to(torch.float64))
    whole: list[torch.Tensor] = []

    def see_all(step: int) -> None:
        whole.append(torch.cat([part.grad.reshape(-1) for part in run.model.parameters() if part.grad is not None]))

    found = found_in(run, meanwhile=see_all)
    kept = [weights.numel() for weights in run.trainer._session._learning._pairs._weights.values()]
    assert kept and sum(kept) < len(whole[0]) / 3
    expected = NoiseScale()
    for one, other in zip(whole[::2], whole[1::2], strict=True):
        expected.add(BATCH, apart=float((one - other).square().sum()), product=float(one @ other))
    assert found.value == pytest.approx(expected.value, rel=0.05)
    assert found.size == pytest.approx(expected.size, rel=0.05), "each element counts for those around it"


class WithRare(nn.Module):
    """A model of which a part learns sparsely, and a part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = make_model()
        self.sparse = nn.Embedding(50, 5, sparse=True).to(torch.float64)
        self.rare = nn.Linear(6, 5).to(torch.float64)
        self.num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        outputs: torch.Tensor = self.usual(inputs) + 0.0 * self.sparse(torch.arange(len(inputs)))
        return outputs + 0.0 * self.rare(inputs) if self.num_calls % 3 == 0 else outputs


def test_sparse_gradients_are_passed_over_and_missing_ones_are_zeros(tmp_path: Path) -> None:
    plain, rare = found_in(Run(tmp_path / "plain")), found_in(Run(tmp_path / "rare", model=WithRare()))
    assert rare.num_pairs == _FIRST_PAIRS
    assert rare.value == pytest.approx(plain.value, rel=1e-6)


# ---- what is no pair ----


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_that_a_scaler_leaves_out_are_no_part_of_a_pair(tmp_path: Path, is_fused: bool) -> None:
    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1e-9, fused=is_fused)

    infinite = iter([False, False, True, False, True, True] + [False] * 100)

    def sometimes_infinite(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(model, inputs, targets) * (float("inf") if next(infinite) else 1.0)

    # Of the samples those of the three steps are passed over, and the scale changes all the time.
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scaled = Run(tmp_path / "scaled", make=make, scaler=scaler, loss=sometimes_infinite, dtype=torch.float32)
    found = found_in(scaled)
    assert found.num_pairs == found.num_tried - 2, "of three steps that were left out two belonged together"
    plain = found_in(Run(tmp_path / "plain", make=make, dtype=torch.float32))
    assert found.value == pytest.approx(plain.value, rel=0.5)
    assert found.size == pytest.approx(plain.size, rel=0.5), "gradients are seen without the scale"


def test_gradients_that_are_no_numbers_tell_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def spoil(step: int) -> None:
        if step == 7:
            next(run.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    state = make_model().state_dict()
    run.optimizer.register_step_post_hook(lambda *ignored: run.model.load_state_dict(state))
    found = found_in(run, meanwhile=spoil)
    assert (found.num_pairs, found.num_tried) == (_FIRST_PAIRS - 1, _FIRST_PAIRS)


def test_steps_of_unlike_sizes_are_no_pair(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def change(step: int) -> None:
        if step == 9:  # in force after the tenth step or the eleventh
            run.trainer.propose({"global_batch_size": 4 * BATCH}, "more samples")
        if step == 20:
            run.trainer.propose({"global_batch_size": 2 * BATCH}, "fewer")

    with run.trainer:
        run.train(2 * _FIRST_PAIRS, change)
        assert run.trainer.global_batch_size == 2 * BATCH
    assert run.noise.num_tried == _FIRST_PAIRS
    assert _FIRST_PAIRS - 2 <= run.noise.num_pairs < _FIRST_PAIRS
    assert run.noise.value == pytest.approx(truth(make_model(), learnable()), rel=0.5)


def test_a_step_that_is_taken_back_leaves_nothing(tmp_path: Path) -> None:
    fails = [3, 4, 9]

    def fail(step: int) -> None:
        if step in fails:
            fails.remove(step)
            failing.trainer._training.state.on_gradients(failing.model.parameters(), None)  # as before it is clipped
            raise ArithmeticError("planted")

    plain, failing = Run(tmp_path / "plain"), Run(tmp_path / "failing")
    found_in(plain)
    with failing.trainer:
        for _ in range(4):
            try:
                failing.train(2 * _FIRST_PAIRS, fail)
            except ArithmeticError:
                assert failing.trainer.global_step in (3, 4, 9)
    assert not fails
    assert failing.noise.num_pairs == _FIRST_PAIRS


# ---- several ranks ----


def on_ranks(rank: int, folder: Path, way: str) -> tuple[dict[str, Any], list[float]]:
    """With twice as many samples in a step once it is known how noisy gradients are."""
    dtype = torch.float32
    run = Run(
        folder,
        rank=rank,
        model=WAYS[way].wrap(make_model(dtype)) if way else None,
        dtype=dtype,
        micro_batch=BATCH // 4,
        learning_rate_rule="adascale",
        make=lambda model: SGD(model.parameters(), lr=1e-6),
    )

    def grow(step: int) -> None:
        if step == 2 * _FIRST_PAIRS:
            run.trainer.propose({"global_batch_size": 2 * BATCH}, "more samples")

    with run.trainer:
        run.train(2 * _FIRST_PAIRS + _OFTEN_STEPS + 2, grow)  # the last two are a pair of the larger steps
        values_of(run.model)
    return run.noise.state_dict(), run.rates


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    """What one rank sees."""
    return on_ranks(0, tmp_path_factory.mktemp("alone"), "")


@pytest.mark.parametrize("way", the_first(["ddp", "FSDP1", "tensor", "fully_shard", "tensor and fully_shard"], 3))
def test_ranks_see_the_same_to_the_bit_and_what_one_alone_sees(
    ranks: RankPool, tmp_path: Path, alone: tuple[dict[str, Any], list[float]], way: str
) -> None:
    first, *others = ranks.run(WAYS[way].num_ranks, on_ranks, tmp_path, way)
    assert all(other == first for other in others)
    state, rates = first
    state_alone, rates_alone = alone
    assert state["value"] is not None and state["num_pairs"] > _FIRST_PAIRS
    assert state == pytest.approx(state_alone, rel=1e-3)
    assert rates == pytest.approx(rates_alone, rel=1e-3)
    assert rates[0] == 1e-6 and 1e-6 < rates[-1] < 2e-6


def of_one_row(rank: int, folder: Path, is_alone: bool) -> dict[str, Any]:
    """A model so small that it lies on the first rank alone."""
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 1)
    run = Run(
        folder,
        rank=rank,
        model=model if is_alone else fully_shard(model),
        dtype=torch.float32,
        micro_batch=BATCH // 2,
        loss=lambda model, inputs, targets: (model(inputs)[:, 0] - targets).square().mean(),
    )
    return found_in(run).state_dict()


def test_a_rank_on_which_nothing_of_the_model_lies_keeps_nobody_from_seeing(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, of_one_row, tmp_path, False)
    assert first == second == pytest.approx(of_one_row(0, tmp_path / "alone", True), rel=1e-4)
    assert first["num_pairs"] == _FIRST_PAIRS


def told_other_rules(rank: int, folder: Path) -> None:
    Run(folder, rank=rank, model=shared(make_model(), 2), learning_rate_rule="adascale" if rank else "none")


def test_ranks_that_were_told_other_rules_do_not_start(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.run_outcomes(2, told_other_rules, tmp_path):
        assert outcome.error is not None and "learning_rate_rule" in outcome.error.message


def leaves_one_out(rank: int, folder: Path, step_left_out: int) -> None:
    run = Run(folder, rank=rank, model=shared(make_model(), 2), micro_batch=BATCH // 2)

    with run.trainer:
        for number, (inputs, targets) in enumerate(run.source):
            with run.trainer.step():
                run.loss(run.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
                if rank == 0 or number != step_left_out:
                    run.optimizer.step()
                run.optimizer.zero_grad()
            assert number < 40


@pytest.mark.parametrize("step_left_out", [4, 5])
def test_a_rank_that_steps_alone_is_found_out_and_nobody_waits_for_it(
    ranks: RankPool, tmp_path: Path, step_left_out: int
) -> None:
    for outcome in ranks.run_outcomes(2, leaves_one_out, tmp_path, step_left_out):
        assert outcome.error is not None and outcome.error.type_name == "RanksDisagreeError"
        assert "ranks differ in steps" in outcome.error.message


def resharded(rank: int, folder: Path) -> tuple[int, int, float | None]:
    run = Run(folder, rank=rank, plan=ParallelPlan("full_shard"), micro_batch=BATCH // 2, dtype=torch.float32)

    def change(step: int) -> None:
        if step in (10, 21):
            run.trainer.reshard(ParallelPlan("no_shard" if step == 10 else "full_shard"))

    with run.trainer:
        run.train(2 * _FIRST_PAIRS, change)
        assert run.trainer.reshard_report is not None
        return run.noise.num_pairs, run.noise.num_tried, run.noise.value


def test_pairs_go_on_when_the_model_is_spread_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, resharded, tmp_path)
    assert first == second
    num_pairs, num_tried, value = first
    assert _FIRST_PAIRS - 2 <= num_pairs <= num_tried == _FIRST_PAIRS
    alone = found_in(Run(tmp_path / "alone", dtype=torch.float32)).value
    assert value == pytest.approx(alone, rel=0.3)


# ---- only where it is wanted ----


def test_where_nobody_asked_nothing_is_looked_at_nor_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, config=None)
    seen = []
    with run.trainer:
        run.train(6, lambda step: seen.append(run.is_looking))
        assert not any(seen) and not run.trainer._session._learning.is_on
        assert "noise_scale" not in run.trainer.state_dict()
        found = run.facts
    assert found.learning is None
    assert "the tuner leaves it to people" in found.fixed["global_batch_size"]
    assert run.noise == NoiseScale()


def test_what_the_user_allows_may_come_and_go_while_training_runs(tmp_path: Path) -> None:
    run = Run(tmp_path, config=None, learning_rate_rule="sqrt")
    follower = run.trainer._session.follower
    with run.trainer:
        run.train(2)
        put(tmp_path, 0, LETS, seen_by=follower)
        run.train(4 + 2 * _FIRST_PAIRS)
        found = run.facts
        assert found.choices["global_batch_size"] == () or list(found.choices["global_batch_size"]) == []
        assert "global_batch_size" not in found.fixed
        assert found.learning is not None
        assert (found.learning.rule, found.learning.first_batch) == ("sqrt", BATCH)
        assert found.learning.noise_scale == pytest.approx(run.noise.value, rel=0.06)
        assert json.loads(checked_facts(found.to_json()).to_json()) == json.loads(found.to_json())
        put(tmp_path, 0, {"version": 2}, seen_by=follower)
        run.train(8 + 2 * _FIRST_PAIRS)
        assert not run.is_looking
        gone = run.facts
    assert gone.learning is None and "global_batch_size" in gone.fixed


def test_before_anything_is_known_facts_say_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.trainer:
        run.train(2)
        assert run.facts.learning == LearningFacts(rule="none", first_batch=BATCH, noise_scale=None)


def test_a_loader_that_cannot_be_told_its_sizes_keeps_them(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*learnable()), batch_size=BATCH)
    run = Run(tmp_path, source=loader, global_batch_size=2 * BATCH)
    with run.trainer:
        run.train(4)
        found = run.facts
    assert found.learning is None and not run.is_looking
    assert "use ElasticDataLoader" in found.fixed["global_batch_size"]
    assert "global_batch_size" not in found.choices


def test_of_an_elastic_loader_steps_may_grow(tmp_path: Path) -> None:
    loader = ElasticDataLoader(TensorDataset(*learnable()), batch_size=BATCH)
    run = Run(tmp_path, source=loader)
    with run.trainer, run.trainer.epoch():
        run.train(4)
        assert run.facts.learning is not None


def test_with_everything_off_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT", "off")
    run = Run(tmp_path, learning_rate_rule="adascale")
    with run.trainer:
        run.train(4)
        assert not run.is_looking


def test_it_is_said_once_when_it_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="elastic_ext"):
        found_in(Run(tmp_path), 4 * _FIRST_PAIRS)
    lines = [record.getMessage() for record in caplog.records if "as much noise as gradient" in record.getMessage()]
    assert len(lines) == 1 and lines[0].endswith(f"samples per step; a step has {BATCH} samples now")
