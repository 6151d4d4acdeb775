"""A loader with in_order=False: batches come as they are made, each sample comes once, and so after a resume."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.indexed import IndexedEpochs
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.sampler import ElasticDistributedSampler
from tests.support.loading import OpenGate, SizedSamples, changed
from tests.support.pools import Once, WaitAt, gate, opened

# --- any order in which batches may be made --------------------------------------------------------------------------


class Scripted:
    """Makes batches, of which the first to come is chosen from a list of numbers."""

    def __init__(self, num_ahead: int, choices: Sequence[int]) -> None:
        self.num_ahead = num_ahead
        self._choices = iter([*choices, *([0] * 10_000)])
        self._asked: list[list[Any] | None] = []

    def submit(self, indices: list[Any], *, batch_index: int) -> int:
        self._asked.append(indices)
        return len(self._asked) - 1

    def take(self, number: int) -> list[Any]:
        indices, self._asked[number] = self._asked[number], None
        assert indices is not None, "nobody may take it twice"
        return indices

    def first_made(self, numbers: Sequence[int]) -> int:
        return numbers[next(self._choices) % len(numbers)]

    def forget(self, number: int) -> None:
        assert self._asked[number] is not None
        self._asked[number] = None


def loops_over(size: int, batch_size: int, *, in_order: bool = False) -> IndexedEpochs:
    return IndexedEpochs(
        range(size),
        ElasticDistributedSampler(range(size), 1, 0, seed=2),
        batch_size=batch_size,
        drop_last=False,
        is_of_batches=False,
        collate_fn=list,
        seeds_samples=False,
        in_order=in_order,
    )


@given(
    size=st.integers(0, 60),
    legs=st.lists(
        st.tuples(
            st.integers(1, 7),  # samples in a batch
            st.integers(1, 7),  # and in the later ones
            st.integers(1, 6),  # how many batches are made ahead
            st.integers(0, 6),  # how many are taken at each size
            st.lists(st.integers(0, 5), max_size=12),
        ),
        max_size=4,
    ),
    ends_in_order=st.booleans(),
)
def test_each_sample_comes_once_whatever_is_made_first_and_however_often_the_epoch_goes_on(
    size: int, legs: list[tuple[int, int, int, int, list[int]]], ends_in_order: bool
) -> None:
    state = loops_over(size, 1).state_dict()
    came: list[int] = []
    for number, (batch_size, then, num_ahead, num_taken, choices) in enumerate([*legs, (3, 3, 4, 1000, [3, 1, 2])]):
        is_last = number == len(legs)
        epochs = loops_over(size, batch_size, in_order=is_last and ends_in_order)
        epochs.load_state_dict(json.loads(json.dumps(state)))
        loop = epochs.begin(Scripted(num_ahead, choices))  # type: ignore[arg-type]
        length, num_came = len(loop), 0
        for each_size in (batch_size, then):
            epochs.resize(each_size)
            for _ in range(num_taken):
                batch = next(loop, None)
                if batch is None:
                    break
                num_came += 1
                came += batch
                loop.commit()
                assert epochs.remaining == size - len(came)
                assert batch_size != then or len(loop) == length
        state = epochs.state_dict()
        loop.end()
        if state["is_over"]:
            break
    assert sorted(came) == list(range(size))
    assert state["is_over"] and "completed" not in state


# --- over samples with an index -------------------------------------------------------------------------------------


def stuck_at(folder: Path, index: int, size: int) -> tuple[SizedSamples, Path]:
    """A dataset with a sample that is made once somebody opens its gate."""
    slow = gate(folder / "slow")
    return SizedSamples({index: WaitAt(slow)}, size), slow


def test_what_is_ready_comes_first_and_the_worker_that_is_slow_is_given_no_more(tmp_path: Path) -> None:
    dataset, slow = stuck_at(tmp_path, 0, 10)
    batches = iter(ElasticDataLoader(dataset, batch_size=None, num_workers=2, in_order=False))
    assert [next(batches) for _ in range(8)] == [1, 3, 4, 5, 6, 7, 8, 9]
    with opened(slow):
        assert list(batches) == [0, 2]


@pytest.mark.parametrize("then_in_order", [True, False])
def test_a_state_says_what_has_come_before_its_turn(tmp_path: Path, then_in_order: bool) -> None:
    dataset, slow = stuck_at(tmp_path, 0, 12)
    loader = ElasticDataLoader(dataset, 2, num_workers=2, in_order=False)
    batches = iter(loader)
    came = [next(batches).tolist() for _ in range(3)]
    assert came == [[2, 3], [6, 7], [8, 9]] and loader.remaining == 6
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["position"], state["completed"], state["is_over"]) == (0, [[2, 4], [6, 10]], False)
    with opened(slow):
        list(batches)
    again = ElasticDataLoader(range(12), 3, in_order=then_in_order)
    again.load_state_dict(state)
    assert len(again) == 2
    assert again.state_dict() == state
    assert [batch.tolist() for batch in again] == [[0, 1, 4], [5, 10, 11]]
    assert "completed" not in again.state_dict() and len(again) == 4


def test_ranks_go_on_with_what_one_has_left(tmp_path: Path) -> None:
    state = {**ElasticDataLoader(range(12)).state_dict(), "position": 1, "completed": [[2, 4], [6, 10]]}
    came = []
    for rank in range(2):
        loader = ElasticDataLoader(range(12), 2, sampler=ElasticDistributedSampler(range(12), 2, rank, shuffle=False))
        loader.load_state_dict(state)
        came += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(came) == [1, 4, 5, 10, 11]


def test_a_sampler_by_itself_refuses_a_state_that_it_cannot_keep() -> None:
    state = {**ElasticDataLoader(range(12)).state_dict(), "completed": [[2, 4]]}
    with pytest.raises(ValueError, match=r"in_order=False.*give it to an ElasticDataLoader"):
        ElasticDistributedSampler(range(12), 1, 0, shuffle=False).load_state_dict(state)


def test_sizes_and_workers_change_in_the_middle(tmp_path: Path) -> None:
    slow = gate(tmp_path / "slow")
    dataset = SizedSamples({0: Once(tmp_path / "was slow", WaitAt(slow))}, 40)
    loader = ElasticDataLoader(dataset, 2, num_workers=2, in_order=False)
    came: list[int] = []
    batches = iter(loader)
    came += [sample for batch in itertools.islice(batches, 4) for sample in batch.tolist()]
    assert 0 not in came
    changed(loader, batch_size=3, num_workers=3)  # the sample that is waited for is asked for again
    with opened(slow):
        came += [sample for batch in itertools.islice(batches, 3) for sample in batch.tolist()]
        changed(loader, num_workers=1)
        came += [sample for batch in batches for sample in batch.tolist()]
    assert sorted(came) == list(range(40))


def test_a_copy_stands_where_the_loop_does(tmp_path: Path) -> None:
    dataset, slow = stuck_at(tmp_path, 0, 8)
    loader = ElasticDataLoader(dataset, 1, num_workers=2, in_order=False)
    batches = iter(loader)
    next(batches)
    assert copy.copy(loader).state_dict() == loader.state_dict()
    with opened(slow):
        list(batches)


def test_a_trainers_steps_are_cut_in_order(tmp_path: Path) -> None:
    slow = gate(tmp_path / "slow")
    dataset = SizedSamples({0: WaitAt(slow), 2: OpenGate(slow)}, 8)  # the second batch is made first
    loader = ElasticDataLoader(dataset, 2, num_workers=2, in_order=False)
    loader.plan(BatchPlan(global_batch=2, num_ranks=1, micro_batch=2), 0)
    came = []
    for batch in loader:
        came.append(batch.tolist())
        loader.commit()
    assert came == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- over streams ---------------------------------------------------------------------------------------------------


class Halves(IterableDataset[int]):
    """Each of two workers has its half of the samples; one of them waits at a gate before its first."""

    def __init__(self, half: int, slow: Path | None = None) -> None:
        self.half, self.slow, self.at = half, slow, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 1 and self.slow is not None:
            WaitAt(self.slow)()
        start, self.at = self.at, 0
        for sample in range(start, self.half):
            self.at = sample + 1
            yield info.id * self.half + sample

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_streams_come_as_their_workers_are_ready_and_go_on_after_it(tmp_path: Path) -> None:
    slow = gate(tmp_path / "slow")
    arguments: dict[str, Any] = {"batch_size": None, "num_workers": 2, "in_order": False}
    loader = ElasticDataLoader(Halves(5, slow), **arguments)
    loader.state_dict()  # states are wanted
    batches = iter(loader)
    came = [next(batches) for _ in range(4)]
    assert came == [0, 1, 2, 3]
    state = json.loads(json.dumps(loader.state_dict()))
    again = ElasticDataLoader(Halves(5), **arguments)
    again.load_state_dict(state)
    assert sorted(came + list(again)) == list(range(10))
    assert next(batches) == 4
    with opened(slow):
        assert list(batches) == [5, 6, 7, 8, 9]
