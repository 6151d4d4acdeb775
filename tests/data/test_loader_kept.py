"""What a loader must not lose or repeat where a loop is interrupted, left, named otherwise or begun twice."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic_ext import ElasticDataLoader, ElasticDistributedSampler
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.batch_plan import BatchPlan
from tests.support.pools import however_late


def plan_of(size: int) -> BatchPlan:
    return BatchPlan(global_batch=size, num_ranks=1, micro_batch=size)


def all_in(batches: Any) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


def shuffled(size: int = 8, **arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(range(size), 2, shuffle=True, seed=1, **arguments)


def test_naming_an_epoch_leaves_nothing_of_the_one_before() -> None:
    loader = shuffled()
    for number, _ in enumerate(loader):
        if number == 1:
            break
    loader.set_epoch(1)
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["is_over"]) == (1, 0, False)
    other = shuffled()
    other.load_state_dict(state)
    assert all_in(other) == all_in(loader)


def test_an_epoch_that_is_named_in_a_loop_is_the_next_ones() -> None:
    loader, expected = shuffled(), [all_in(shuffled()), []]
    found: list[int] = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        if number == 1:
            loader.set_epoch(5)
            assert loader.state_dict()["epoch"] == 0
    assert found == expected[0]
    named = shuffled()
    named.set_epoch(5)
    assert all_in(loader) == all_in(named)


def test_the_samplers_own_epoch_counts() -> None:
    sampler = ElasticDistributedSampler(range(8), 1, 0, seed=1)
    loader = ElasticDataLoader(range(8), 2, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        named = shuffled()
        named.set_epoch(epoch)
        assert all_in(loader) == all_in(named)


@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("names_epoch", [False, True])
def test_what_is_looked_at_and_not_committed_comes_in_the_next_loop(position: int, names_epoch: bool) -> None:
    expected = all_in(shuffled())
    loader = shuffled()
    loader.load_state_dict({**shuffled().state_dict(), "position": position})
    loader.plan(plan_of(2), 0)
    for _ in range(2):
        assert next(iter(loader)).tolist() == expected[position : position + 2]
        assert loader.state_dict()["position"] == position
        if names_epoch:
            loader.set_epoch(0)
    assert list(map(all_in, [loader])) == [expected[position:]]  # nothing of it is committed, too
    assert len(loader) == (8 - position) // 2
    found = []
    for batch in loader:
        found += batch.tolist()
        loader.commit()
    assert found == expected[position:] and loader.state_dict()["is_over"]
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_a_loop_without_anything_to_give_leaves_its_epoch() -> None:
    loader = shuffled()
    loader.load_state_dict({**shuffled().state_dict(), "position": 7})
    loader.plan(BatchPlan(global_batch=2, num_ranks=2, micro_batch=1), 0)
    assert list(loader) == [] and len(list(loader)) == 4


def test_an_epoch_that_is_named_again_is_whole_though_a_state_had_begun_within_it() -> None:
    loader = shuffled()
    loader.load_state_dict({**shuffled().state_dict(), "position": 4})
    assert len(all_in(loader)) == 4
    loader.set_epoch(0)
    assert all_in(loader) == all_in(shuffled())


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_stands_where_the_loader_does(is_left: bool, duplicate: Any) -> None:
    for loader in (shuffled(), ElasticDataLoader(Numbered(), 2)):
        batches = iter(loader)
        next(batches)
        if is_left:
            del batches
        other = duplicate(loader)
        assert other.state_dict() == duplicate(other).state_dict() == loader.state_dict()
        assert not other.state_dict()["is_over"]
        assert all_in(other) == all_in(loader)  # the epoch after this one
        assert other.state_dict()["is_over"] == loader.state_dict()["is_over"]


def test_a_sampler_that_goes_on_does_so_in_a_loader() -> None:
    first = ElasticDistributedSampler(range(8), 1, 0, shuffle=False)
    list(itertools.islice(first, 4))
    second = ElasticDistributedSampler(range(8), 1, 0, shuffle=False)
    second.load_state_dict(first.state_dict())
    loader = ElasticDataLoader(range(8), 2, sampler=second)
    assert [all_in(loader), all_in(loader)] == [[4, 5, 6, 7], [*range(8)]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_done_to_a_batch_does_not_come_back(num_workers: int) -> None:
    loader = ElasticDataLoader(torch.arange(48.0), 12, num_workers=num_workers)
    loader.plan(plan_of(12), 0)
    batches = iter(loader)
    next(batches)
    loader.commit()
    loader.plan(plan_of(8), 0)
    next(batches).mul_(-1)
    loader.rollback()
    assert next(batches).tolist() == list(range(12, 20))


class Slow:
    """Has to be interrupted, or waited for longer, at one sample."""

    def __init__(self, at: int, file: Path) -> None:
        self.at, self.file = at, file

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.at and self.file.exists():
            self.file.unlink()
            raise KeyboardInterrupt
        return index


def test_a_batch_whose_making_is_interrupted_is_not_consumed(tmp_path: Path) -> None:
    file = tmp_path / "interrupts"
    file.touch()
    loader = ElasticDataLoader(Slow(5, file), 2)
    batches = iter(loader)
    assert all_in(itertools.islice(batches, 2)) == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    other = ElasticDataLoader(range(12), 2)
    other.load_state_dict(loader.state_dict())
    assert all_in(other) == all_in(batches) == list(range(4, 12))


class Gated:
    """Waits for a file at one sample."""

    def __init__(self, at: int, gate: Path) -> None:
        self.at, self.gate = at, gate

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            with self.gate.open() as opened:  # a pipe, which opens when somebody writes
                opened.read()
        return index


class GatedStream(IterableDataset[int]):
    def __init__(self, gated: Gated) -> None:
        self.gated = gated

    def __iter__(self) -> Iterator[int]:
        return (self.gated[index] for index in range(12))


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_batch_that_is_late_comes_when_it_is_asked_for_again(tmp_path: Path, kind: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    gated = Gated(4, gate)
    loader = ElasticDataLoader(gated if kind == "indexed" else GatedStream(gated), 2, num_workers=1, timeout=0.5)
    batches = iter(loader)
    assert all_in(however_late(lambda: next(batches)) for _ in range(2)) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    with gate.open("w"):
        pass
    found: list[int] = []
    while len(found) < 8:
        with contextlib.suppress(RuntimeError):  # the machine may be busy
            found += next(batches).tolist()
    assert found == list(range(4, 12))


def test_a_loop_in_a_loop_of_a_trainers_loader_ends_the_outer_one_and_says_so() -> None:
    loader = ElasticDataLoader(range(16), 2)
    loader.plan(plan_of(2), 0)
    outer = iter(loader)
    next(outer)
    loader.commit()
    next(iter(loader))
    with pytest.raises(ValueError, match="a newer one has begun"):
        next(outer)


def test_states_survive_an_epochs_end_and_another_length_of_the_dataset() -> None:
    first = shuffled(8)
    all_in(first)
    second = shuffled(8)
    second.load_state_dict(first.state_dict())
    third = shuffled(10)
    third.load_state_dict(second.state_dict())
    assert second.state_dict()["is_over"]
    named = shuffled(10)
    named.set_epoch(1)
    assert all_in(third) == all_in(named)


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "streams": None, "is_over": False}, {"epoch": 0, "position": 1}])
def test_a_state_of_something_else_is_a_value_error(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the state has no"):
        shuffled().load_state_dict(state)


def test_a_length_counts_what_has_come_and_what_comes() -> None:
    loader = ElasticDataLoader(range(40), 4)
    batches = iter(loader)
    for number in range(5):
        next(batches)
        assert len(batches) == len(loader) == 10, number  # type: ignore[arg-type]
    loader.apply(ElasticConfig.from_values({}), ElasticConfig.from_values({"dataloader.batch_size": 10}))
    assert len(batches) == len(loader) == 5 + len(list(batches)) == 7  # type: ignore[arg-type]


class Numbered(IterableDataset[int]):
    """Its samples are of the epoch that it was told, which its state tells too."""

    epoch = at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < 4:
            self.at += 1
            yield self.epoch * 100 + self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_new_loop_leaves_a_dataset_as_it_was_told(num_workers: int) -> None:
    loader = ElasticDataLoader(Numbered(), 2, num_workers=num_workers)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert all_in(loader) == [epoch * 100 + place for place in range(4)]


def test_a_generator_that_is_not_torchs_stays() -> None:
    class Own:
        generator = "mine"

        def __iter__(self) -> Iterator[int]:
            assert self.generator == "mine"
            return iter([2, 0, 1])

        def __len__(self) -> int:
            return 3

    assert all_in(ElasticDataLoader(range(3), sampler=Own())) == [2, 0, 1]


@pytest.mark.parametrize("kind", [int, lambda index: torch.tensor(index)])
def test_a_seed_is_the_index_s_whatever_type_it_has(kind: Any) -> None:
    class Drawing:
        def __getitem__(self, index: Any) -> float:
            return float(torch.rand(()))

    loader = ElasticDataLoader(Drawing(), sampler=[kind(3)], seed_samples=True, seed=3, collate_fn=list)
    expected = ElasticDataLoader(Drawing(), sampler=[3], seed_samples=True, seed=3, collate_fn=list)
    assert list(loader) == list(expected)


class Locked:
    """Whoever makes a sample holds a lock meanwhile, for a while."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return int(torch.linalg.matrix_rank(torch.eye(200))) - 200 + index


def test_workers_that_come_while_this_process_makes_a_sample_find_no_lock_held() -> None:
    loader = ElasticDataLoader(Locked(60), 2, timeout=30)
    found: list[int] = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        if number == 1:
            new = ElasticConfig.from_values({"dataloader.num_workers": 2})
            loader.apply(ElasticConfig.from_values({}), new)
    assert found == list(range(60))


class Leaving(IterableDataset[int]):
    """The same of a dataset that is asked by index and of one that gives its samples: the second one leaves."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        return map(self.one, range(4))

    def one(self, index: int) -> int:
        if index == 1:
            raise self.error
        return index


class LeavingByIndex:
    def __init__(self, error: type[BaseException]) -> None:
        self.dataset = Leaving(error)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.dataset.one(index)


@pytest.mark.parametrize("loader_class", [DataLoader, ElasticDataLoader])
@pytest.mark.parametrize("kind", [Leaving, LeavingByIndex])
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_loop_in_this_process_goes_past_what_a_dataset_leaves_by(loader_class: Any, kind: Any, error: Any) -> None:
    batches = iter(loader_class(kind(error), None))
    assert next(batches) == 0
    with pytest.raises(error):
        next(batches)
    assert list(batches) == [2, 3]
