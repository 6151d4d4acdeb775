"""rollback="full": a step that never happened leaves random states, buffers and registered tensors as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from elastic_ext import ElasticTrainer, StepOptions
from elastic_ext.training.steps.rollback import Snapshot
from tests.support.ranks import RankPool
from tests.support.training import Slices, bits_of, make_data, shared, trainer_of


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Puts the generators back after a test that draws from them; threads that fight for few cores would be slow."""
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    numpy.random.set_state(before[2])


class Busy(nn.Module):
    """Buffers of every kind that change in a forward pass, with dropout."""

    counts: Tensor
    hidden: Tensor
    mean: Tensor
    empty: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("empty", None)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.body(inputs)
        self.counts[0] += len(inputs)
        self.hidden.add_(1.0)
        return logits


def buffers_of(model: nn.Module) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.clone() for name, tensor in model.named_buffers()}


def draws() -> tuple[float, float, float]:
    """What each generator gives next."""
    return random.random(), float(numpy.random.random()), torch.rand(()).item()


# --- by itself --------------------------------------------------------------------------------------------------------


def test_random_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    snapshot = Snapshot(nn.Linear(1, 1), {})
    snapshot.take()
    first = [draws() for _ in range(3)]
    numpy.random.standard_normal(1)  # of which numpy keeps a second one for the next call
    snapshot.restore()
    assert [draws() for _ in range(3)] == first
    snapshot.restore()
    assert draws() == first[0]


def test_every_kind_of_buffer_and_registered_tensor_is_put_back_in_place() -> None:
    model = Busy()
    registered = {"ema": {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float16)}, "one": {"": torch.ones(())}}
    snapshot = Snapshot(model, registered)
    held = [*model.buffers(), *(tensor for tensors in registered.values() for tensor in tensors.values())]
    before = bits_of(held)
    for _ in range(3):
        snapshot.take()
        with torch.no_grad():
            for tensor in held:
                tensor.add_(1)
        snapshot.restore()
        assert bits_of(held) == before
        assert [id(tensor) for tensor in model.buffers()] == [id(tensor) for tensor in held[: len(held) - 3]]


def test_copies_are_made_into_memory_that_is_kept() -> None:
    model = Busy()
    snapshot = Snapshot(model, {})
    snapshot.take()
    kept = [copy.data_ptr() for _, copy in snapshot._copies]
    model.mean.add_(1)
    snapshot.take()
    assert [copy.data_ptr() for _, copy in snapshot._copies] == kept
    model.mean.zero_()
    snapshot.restore()
    assert model.mean.tolist() == [1.0] * 5


def test_a_buffer_that_was_replaced_is_put_back() -> None:
    """As in ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)``."""
    model = Busy()
    snapshot = Snapshot(model, {})
    snapshot.take()
    before = buffers_of(model)
    model.mean = 0.9 * model.mean + 0.1
    model.counts = model.counts + 1
    snapshot.restore()
    assert bits_of(buffers_of(model)) == bits_of(before)


def test_a_buffer_that_another_of_a_different_size_and_type_took_the_place_of_is_put_back() -> None:
    model = Busy()
    snapshot = Snapshot(model, {})
    snapshot.take()
    before = buffers_of(model)
    model.mean = torch.zeros(7)
    model.hidden = model.hidden.half()
    snapshot.restore()
    assert bits_of(buffers_of(model)) == bits_of(before)


def test_a_buffer_that_appeared_is_gone_and_one_that_was_taken_away_is_there() -> None:
    model = Busy()
    snapshot = Snapshot(model, {})
    snapshot.take()
    before = buffers_of(model)
    model.empty = torch.ones(2)
    model.register_buffer("new", torch.ones(1))
    model.mean = None  # type: ignore[assignment]
    snapshot.restore()
    assert model.empty is None
    assert model.mean is not None
    assert {name: value for name, value in buffers_of(model).items() if name != "new"}.keys() == before.keys()


def test_shapes_that_differ_from_the_last_time_are_taken_anew() -> None:
    model = Busy()
    snapshot = Snapshot(model, {})
    snapshot.take()
    model.mean = torch.full((7,), 2.0)
    snapshot.take()
    model.mean.zero_()
    snapshot.restore()
    assert model.mean.tolist() == [2.0] * 7


def test_a_buffer_with_a_graph_is_put_back_without_touching_the_graph() -> None:
    """A state that is carried on from the step before."""
    model = Busy()
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    model.mean = weight * 2
    snapshot = Snapshot(model, {})
    snapshot.take()
    model.mean = model.mean * 3
    snapshot.restore()
    assert model.mean.tolist() == [2.0] * 5


def test_what_is_registered_after_it_was_made_is_kept_as_well() -> None:
    registered: dict[str, dict[str, Tensor]] = {}
    snapshot = Snapshot(nn.Linear(1, 1), registered)
    registered["late"] = {"": torch.zeros(2)}
    snapshot.take()
    registered["late"][""].add_(1)
    snapshot.restore()
    assert registered["late"][""].tolist() == [0.0, 0.0]


def test_nothing_is_lost_of_a_buffer_in_half_precision_or_of_numbers_that_are_none() -> None:
    model = nn.Module()
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-8], dtype=torch.float16)
    model.register_buffer("odd", values.clone())
    model.register_buffer("bits", torch.tensor([True, False]))
    model.register_buffer("wave", torch.tensor([1 + 2j]))
    snapshot = Snapshot(model, {})
    snapshot.take()
    before = bits_of(buffers_of(model))
    for buffer in model.buffers():
        buffer.zero_()
    snapshot.restore()
    assert bits_of(buffers_of(model)) == before


# --- in a training ----------------------------------------------------------------------------------------------------


def train(
    rank: int, folder: Path, world_size: int, fail_at: tuple[int, ...], rollback: str, how: str
) -> tuple[list[Any], list[float]]:
    """What comes of a training with dropout and batch norm, of whose micro-steps some fail or are rolled back."""
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    model = Busy()
    moving = {name: part.detach().clone() for name, part in model.named_parameters()}
    source = Slices(make_data(24 * world_size), 2)
    wrapped = shared(model, world_size)
    trainer = trainer_of(folder, wrapped, source, rank=rank, global_batch_size=6 * world_size, rollback=rollback)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.register_state("moving", moving)
    torch.manual_seed(rank + 1)  # not what a model's making has drawn
    losses: list[float] = []
    num_micro_steps = 0
    with trainer, trainer.epoch():
        for inputs, targets in source:
            num_micro_steps += 1
            try:
                with trainer.step():
                    take(trainer, optimizer, wrapped, (inputs, targets), moving, losses)
                    if num_micro_steps in fail_at:
                        if how == "raise":
                            raise ArithmeticError("scripted")
                        trainer.rollback()
                    else:
                        optimizer.step()
                        optimizer.zero_grad()
            except ArithmeticError:
                pass
            if num_micro_steps in fail_at:
                del losses[trainer.global_step * 3 :]
    assert trainer.global_step == 4
    return bits_of(model, buffers_of(model), moving, list(draws())), losses


def take(trainer: ElasticTrainer, optimizer: Any, model: Any, batch: Any, moving: Any, losses: list[float]) -> None:
    inputs, targets = batch
    noisy = inputs + 0.1 * torch.randn_like(inputs) + random.random() * float(numpy.random.random())
    loss = nn.functional.cross_entropy(model(noisy), targets)
    losses.append(loss.item())
    with torch.no_grad():
        for name, part in getattr(model, "module", model).named_parameters():
            moving[name].lerp_(part, 0.1)
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", ["raise", "rollback"])
@pytest.mark.parametrize("fail_at", [(1,), (2,), (3,), (5, 7), (1, 2, 3), (6, 9, 12)])
def test_a_training_with_failed_steps_ends_bit_for_bit_as_one_without(
    tmp_path: Path, fail_at: tuple[int, ...], how: str
) -> None:
    assert train(0, tmp_path, 1, fail_at, "full", how) == train(0, tmp_path, 1, (), "full", how)


def test_without_it_random_states_and_buffers_go_on(tmp_path: Path) -> None:
    with_failure = train(0, tmp_path, 1, (3,), "gradients", "raise")
    assert with_failure != train(0, tmp_path, 1, (), "gradients", "raise")
    assert train(0, tmp_path, 1, (), "full", "raise") == train(0, tmp_path, 1, (), "gradients", "raise")


@pytest.mark.parametrize("fail_at", [(2,), (3, 6)])
def test_ranks_that_fail_together_end_bit_for_bit_as_those_that_do_not(
    ranks: RankPool, tmp_path: Path, fail_at: tuple[int, ...]
) -> None:
    failed = ranks.run(2, train, tmp_path, 2, fail_at, "full", "raise")
    assert failed == ranks.run(2, train, tmp_path, 2, (), "full", "raise")


def test_another_word_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="rollback is 'buffers'; allowed: gradients, full"):
        ElasticTrainer(nn.Linear(1, 1), step_options=StepOptions(rollback="buffers"))  # type: ignore[arg-type]
