"""The batch that a loop takes before its micro-step has ended, as nanoGPT's does between forward and backward: a
boundary passes what was trained on, and the batch in hand begins the next step, at its own size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils.data import IterableDataset

from elastic_ext import CheckpointInterval, ElasticConfig, ElasticError, StepError
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.training.batches import Batches
from tests.support.ranks import RankPool
from tests.support.training import shared, trainer_of

NUM_SAMPLES = 160
NUMBERS = torch.arange(float(NUM_SAMPLES)).unsqueeze(1)


class Stream(IterableDataset[torch.Tensor]):
    """The numbers, and where it stands."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._next < NUM_SAMPLES:
            self._next += 1
            yield NUMBERS[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Loop:
    """A loop that takes its next batch between forward and backward; a step's gradient is the mean of its samples."""

    def __init__(self, folder: Path, loader: Any, *, rank: int = 0, num_ranks: int = 1, batch: int = 16, **kw: Any):
        self.loader = loader
        self.model = shared(nn.Linear(1, 1, bias=False, dtype=torch.float64), num_ranks)
        self.trainer = trainer_of(folder, self.model, loader, rank=rank, global_batch_size=batch, **kw)
        self.optimizer = self.trainer.prepare(SGD(self.model.parameters(), lr=1.0))
        self.sizes: list[tuple[int, ...]] = []
        """Of each step's micro-batches on this rank."""
        self.steps: list[list[float]] = []
        """This rank's samples of each step."""
        self.means: list[float] = []
        self._batches = iter(loader)
        self.held = next(self._batches)
        self._step: list[list[float]] = []

    def take(self) -> None:
        """One micro-step."""
        weight = next(self.model.parameters())
        before, held = weight.item(), self.held
        with self.trainer.step():
            loss = self.model(held.double()).mean()
            self.held = next(self._batches)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._step.append(held.flatten().tolist())
        if self.trainer.sync_gradients:
            self.means.append(before - weight.item())
            self.sizes.append(tuple(map(len, self._step)))
            self.steps.append([number for batch in self._step for number in batch])
            self._step = []

    def take_steps(self, num: int) -> None:
        before = len(self.steps)
        while len(self.steps) < before + num:
            self.take()


@pytest.fixture(params=["indexed", "stream"])
def dataset(request: pytest.FixtureRequest) -> Any:
    return NUMBERS if request.param == "indexed" else Stream()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_smaller_micro_batch_comes_into_force_after_the_batch_in_hand(
    tmp_path: Path, dataset: Any, num_workers: int
) -> None:
    loop = Loop(tmp_path, ElasticDataLoader(dataset, 8, num_workers=num_workers))
    with loop.trainer:
        loop.take_steps(1)
        proposal = loop.trainer.propose({"dataloader.batch_size": 4}, "to see")
        loop.take_steps(4)
        assert proposal.outcome == "in force"
    assert loop.sizes == [(8, 8), (8, 8), (8, 8), (8, 4, 4), (4, 4, 4, 4)]
    assert [number for step in loop.steps for number in step] == NUMBERS[:80].flatten().tolist()
    assert loop.means == pytest.approx([sum(step) / 16 for step in loop.steps])


def test_a_larger_micro_batch_and_another_global_batch_do_too(tmp_path: Path, dataset: Any) -> None:
    loop = Loop(tmp_path, ElasticDataLoader(dataset, 4))
    with loop.trainer:
        loop.take_steps(1)
        loop.trainer.propose({"dataloader.batch_size": 10, "global_batch_size": 24}, "to see")
        loop.take_steps(2)
        loop.trainer.propose({"global_batch_size": 3}, "smaller than what is in hand")
        loop.take_steps(4)
    assert loop.sizes == [(4,) * 4, (4,) * 4, (4,) * 4, (4, 10, 10), (8, 8, 8), (8,), (3,)]
    assert [number for step in loop.steps for number in step] == NUMBERS[: sum(map(len, loop.steps))].flatten().tolist()
    assert loop.means == pytest.approx([sum(step) / len(step) for step in loop.steps])


def test_the_batch_in_hand_comes_again_after_a_resume(tmp_path: Path, dataset: Any) -> None:
    keeps: dict[str, Any] = {
        "shared_storage_path": tmp_path / "storage",
        "checkpoint_interval": CheckpointInterval(steps=2),
    }
    loop = Loop(tmp_path, ElasticDataLoader(dataset, 8), **keeps)
    with loop.trainer:
        loop.take_steps(2)
    assert loop.held.flatten().tolist() == list(range(32, 40))
    again = Loop(tmp_path, ElasticDataLoader(dataset, 4), **keeps)  # of the run's batches, which the config keeps at 8
    with again.trainer:
        again.take_steps(2)
    assert again.steps == [list(map(float, range(32, 48))), list(map(float, range(48, 64)))]


def test_the_next_epoch_may_begin_within_the_last_step_of_the_one_before(tmp_path: Path) -> None:
    loader = ElasticDataLoader(NUMBERS[:32], 8)
    model = nn.Linear(1, 1, bias=False)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.0))
    seen: list[float] = []
    with trainer:
        batches = iter(loader)
        held = next(batches)
        for _ in range(12):
            with trainer.step():
                loss = model(held).mean()
                seen += held.flatten().tolist()
                try:
                    held = next(batches)
                except StopIteration:
                    batches = iter(loader)
                    held = next(batches)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert loader.state_dict() == {**loader.state_dict(), "epoch": 3, "position": 0}
    assert seen == NUMBERS[:32].flatten().tolist() * 3 and trainer.global_step == 6


def test_a_rollback_goes_back_into_the_epoch_before(tmp_path: Path) -> None:
    loader = ElasticDataLoader(NUMBERS[:32], 8)
    model = nn.Linear(1, 1, bias=False)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    trainer.prepare(SGD(model.parameters(), lr=0.0))

    def fail_in_the_next_epoch(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        with trainer.step():
            pass
        with trainer.step():
            assert [len(batch) for batch in batches] == [8] * 3
            again = iter(loader)
            assert next(again).flatten().tolist() == list(range(8))
            raise KeyError(again)

    with trainer:
        batches = iter(loader)
        next(batches)
        with pytest.raises(KeyError) as failure:
            fail_in_the_next_epoch(batches)
        rest = [number for batch in failure.value.args[0] for number in batch.flatten().tolist()]
        assert rest == list(range(32)) and loader.state_dict()["epoch"] == 0


def test_a_loop_that_is_further_ahead_is_refused_and_nothing_is_lost(tmp_path: Path, dataset: Any) -> None:
    loop = Loop(tmp_path, ElasticDataLoader(dataset, 8))
    with loop.trainer:
        loop.take_steps(1)
        next(loop._batches)
        with pytest.raises(StepError, match=r"2 batches were taken .* at most 1 "):
            loop.take()
        loop.held = next(loop._batches)
        loop.take_steps(1)
    assert loop.steps == [list(map(float, range(16))), list(map(float, range(16, 32)))]


def test_a_batch_in_hand_is_not_trained_on_after_its_step_was_taken_back(tmp_path: Path, dataset: Any) -> None:
    loop = Loop(tmp_path, ElasticDataLoader(dataset, 8))

    def fail() -> None:
        with loop.trainer.step():
            loop.held = next(loop._batches)
            raise KeyError

    with loop.trainer:
        loop.take_steps(1)
        for _ in range(2):
            with pytest.raises(KeyError):
                fail()
            with pytest.raises(StepError, match="batch in hand was taken from the dataloader before its step was"):
                loop.take()
            loop.held = next(loop._batches)
        loop.take_steps(1)
    assert loop.steps == [list(map(float, range(16))), list(map(float, range(16, 32)))]


class Rank:
    """One rank's loop over its loader, of which steps are cut for several ranks in one process."""

    def __init__(self, rank: int, num_ranks: int, num_samples: int, config: ElasticConfig) -> None:
        self.loader = ElasticDataLoader(range(num_samples), 4)
        self.batches = Batches(self.loader, global_batch_size=config.global_batch_size)
        self._rank, self._num_ranks = rank, num_ranks
        self.begin(config)
        self.loop: Iterator[Any] | None = iter(self.loader)
        self._held: list[int] | None = None

    def begin(self, config: ElasticConfig) -> None:
        self.batches.begin(config, num_ranks=self._num_ranks, rank=self._rank)

    def fetch(self) -> None:
        batch = None if self.loop is None else next(self.loop, None)
        self._held = None if batch is None else batch.tolist()
        if batch is None:
            self.loop = None

    def take(self) -> list[int]:
        """The batch that is trained on."""
        if self._held is None:
            self.fetch()
        taken, self._held = self._held, None
        assert taken is not None
        return taken

    def roll_back(self) -> None:
        self.batches.rollback(1)
        self._held = None


@given(
    draw=st.builds(random.Random, st.integers(0, 2**32)), num_ranks=st.integers(1, 3), num_samples=st.integers(6, 150)
)
@settings(max_examples=200, deadline=None)
def test_every_sample_comes_once_in_the_sizes_that_steps_are_weighed_by(
    draw: random.Random, num_ranks: int, num_samples: int
) -> None:
    """Whatever is fetched ahead, changed, and taken back."""

    def drawn() -> ElasticConfig:
        sizes = {"global_batch_size": draw.randint(num_ranks, 40), "dataloader.batch_size": draw.randint(1, 12)}
        return ElasticConfig.from_values(sizes)

    config = drawn()
    everyone = [Rank(rank, num_ranks, num_samples, config) for rank in range(num_ranks)]
    trained: list[int] = []
    while None not in (steps := [one.batches.next_step() for one in everyone]):
        taken: list[int] = []
        (num,) = {step.num_micro_steps for step in steps if step is not None}
        is_ahead = draw.random() < 0.7
        for index in range(num):
            batches = [one.take() for one in everyone]
            assert [step.sizes[index] for step in steps if step is not None and step.sizes] == list(map(len, batches))
            taken += [sample for batch in batches for sample in batch]
            if index < num - 1 or is_ahead:
                for one in everyone:
                    one.fetch()
        assert sum(sum(step.weights) for step in steps if step is not None) == pytest.approx(num_ranks)
        assert {step.num_samples for step in steps if step is not None} == {len(taken)}
        if all(one.loop is not None for one in everyone) and draw.random() < 0.2:
            for one in everyone:
                one.roll_back()
            continue
        trained += taken
        for one in everyone:
            one.batches.commit(num)
        if draw.random() < 0.5:
            config = drawn()
            for one in everyone:
                one.begin(config)
    assert sorted(trained) == list(range(len(trained))) and num_samples - len(trained) < num_ranks


def of_rank(rank: int, folder: Path, num_ranks: int, dataset: Any) -> list[Any]:
    loop = Loop(folder, ElasticDataLoader(dataset, 4), rank=rank, num_ranks=num_ranks, batch=9 * num_ranks + 1)
    with loop.trainer:
        loop.take_steps(1)
        loop.trainer.propose({"dataloader.batch_size": 2}, "to see")
        loop.take_steps(3)
    return [loop.steps, loop.means, loop.sizes]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_weigh_a_step_that_begins_with_the_batches_in_hand(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    found = ranks.run(num_ranks, of_rank, tmp_path, num_ranks, NUMBERS, process_group=True)
    num_samples = 9 * num_ranks + 1
    for step in range(4):
        samples = sorted(number for steps, *_ in found for number in steps[step])
        assert samples == list(map(float, range(step * num_samples, (step + 1) * num_samples)))
        assert {round(means[step], 9) for _, means, _ in found} == {round(sum(samples) / num_samples, 9)}
    assert len({len(sizes[step]) for step in range(4) for *_, sizes in found}) > 1


def one_rank_ahead(rank: int, folder: Path) -> str:
    loop = Loop(folder, ElasticDataLoader(NUMBERS, 4), rank=rank, num_ranks=2, batch=16, timeout_seconds=5.0)
    batches, held = loop._batches, loop.held
    try:
        with loop.trainer:
            for _ in range(8):
                with loop.trainer.step():
                    loss = loop.model(held.double()).mean()
                    if rank == 0:
                        held = next(batches)
                    loss.backward()
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                if rank == 1:
                    held = next(batches)
    except (ElasticError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_ranks_that_are_ahead_by_other_numbers_of_batches_are_named(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(2, one_rank_ahead, tmp_path, process_group=True)
    assert all("batches taken ahead" in text for text in said), said


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_whose_end_was_seen_in_a_step_that_was_taken_back_goes_on(
    tmp_path: Path, dataset: Any, num_workers: int
) -> None:
    loader = ElasticDataLoader(dataset, 8, num_workers=num_workers)
    model = nn.Linear(1, 1, bias=False)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.0))
    for_epoch: list[list[float]] = []
    with trainer:
        for epoch in range(2):
            step: list[float] = []
            for_epoch.append([])
            may_fail = True
            with trainer.epoch(epoch):
                batches = iter(loader)
                held = next(batches, None)
                while held is not None:
                    with suppress(KeyError), trainer.step():
                        loss = model(held).mean()
                        step += held.flatten().tolist()
                        held = next(batches, None)
                        if held is None and may_fail:
                            may_fail, step, held = False, [], next(batches, held)
                            raise KeyError
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    if held is None and not step:
                        held = next(batches)  # as after every step that failed
                    elif trainer.sync_gradients:
                        for_epoch[-1] += step
                        step = []
                assert next(batches, None) is None
    assert for_epoch == [NUMBERS.flatten().tolist()] * 2
