"""A loader over an IterableDataset gives each sample once, whatever changes, and goes on where it was."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.seeding import Copied
from elastic_ext.data.streams import START, ResumePoint, Stream, StreamAnswer, StreamRequest
from elastic_ext.errors import WorkerDiedError
from tests.support.pools import kill_for_good, worker_pids
from tests.support.thinning import each_once, the_first


class Counting(IterableDataset[int]):
    """0 to ``size`` - 1, shared out among the workers; ``ends`` gives the workers streams of other lengths."""

    def __init__(self, size: int, ends: tuple[int, ...] = ()) -> None:
        self.size = size
        self.ends = ends
        self.num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        worker = get_worker_info()
        own, num = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self.ends and worker is not None:
            first = sum(self.ends[:own])
            yield from range(first, first + self.ends[own])
        else:
            yield from range(own, self.size, num)


class Telling(Counting):
    """One that tells where it is, and can go on there."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number, sample in enumerate(super().__iter__()):
            if number >= start:
                self.at = number + 1
                yield sample
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Dying(Telling):
    """One whose worker dies of ``sample`` as long as there is the file."""

    def __init__(self, size: int, sample: int, file: Path, *, forever: bool = False) -> None:
        super().__init__(size)
        self.sample, self.file, self.forever = sample, file, forever

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            if sample == self.sample and self.file.exists():
                if not self.forever:
                    self.file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def listed(samples: list[int]) -> list[int]:
    return list(samples)


def all_in(batches: Any) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


def changed(loader: ElasticDataLoader, **values: Any) -> None:
    new = ElasticConfig.from_values({f"dataloader.{name}": value for name, value in values.items()})
    assert loader.check(new) is None
    loader.apply(ElasticConfig.from_values({}), new)


# --- a worker's part ------------------------------------------------------------------------------------------------


def asked(
    start: int, num_samples: int, *, keep_from: int = 0, mark: ResumePoint | None = None, is_marked: bool = True
) -> StreamRequest:
    return StreamRequest(0, 1, 0, start, num_samples, keep_from, mark, wants_state=is_marked)


def marked(num_samples: int) -> ResumePoint:
    """So far in a dataset that tells it."""
    return ResumePoint(num_samples, Copied.of({"at": num_samples}))


def test_a_stream_gives_again_what_it_may_be_asked_for_again() -> None:
    dataset = Counting(20)
    stream = Stream(dataset, listed, auto_collation=True)
    assert stream[asked(0, 4, mark=START)] == StreamAnswer([0, 1, 2, 3], 4)
    assert stream[asked(4, 4)].batch == [4, 5, 6, 7]
    assert stream[asked(2, 3)].batch == [2, 3, 4]
    assert stream[asked(5, 2, keep_from=5)].batch == [5, 6]
    assert stream[asked(4, 2, keep_from=4)].is_lost
    assert stream[asked(18, 4, keep_from=5)] == StreamAnswer([18, 19], 2)
    assert stream[asked(20, 4, keep_from=5)] == StreamAnswer()
    assert dataset.num_passes == 1


def test_a_stream_that_is_new_has_to_be_told_where_to_go() -> None:
    stream = Stream(Telling(20), listed, auto_collation=True)
    assert stream[asked(4, 2)].is_lost
    assert stream[asked(7, 2, keep_from=7, mark=marked(5))] == StreamAnswer([7, 8], 2, marked(9))


def test_a_stream_that_has_ended_tells_no_state_which_may_be_the_next_epochs() -> None:
    stream = Stream(Telling(20), listed, auto_collation=True)
    assert stream[asked(12, 8, keep_from=12, mark=START)] == StreamAnswer(list(range(12, 20)), 8, marked(20))
    assert stream[asked(16, 8, keep_from=16)] == StreamAnswer([16, 17, 18, 19], 4)


def test_a_stream_without_a_state_passes_what_lies_before() -> None:
    stream = Stream(Counting(20), listed, auto_collation=True)
    assert stream[asked(7, 2, keep_from=7, mark=START)] == StreamAnswer([7, 8], 2)


class Costly(Telling):
    """One whose state takes as long as five samples."""

    def __init__(self, size: int, sample_seconds: float = 0.0) -> None:
        super().__init__(size)
        self.now, self.num_told, self.sample_seconds = 0.0, 0, sample_seconds

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.now += 1.0
            yield sample

    def state_dict(self) -> dict[str, int]:
        self.now += 5.0
        self.num_told += 1
        time.sleep(5 * self.sample_seconds)
        return super().state_dict()


def test_a_state_that_nobody_is_known_to_want_is_told_when_samples_have_taken_fifty_times_as_long() -> None:
    dataset = Costly(4000)
    stream = Stream(dataset, listed, auto_collation=True, clock=lambda: dataset.now)
    marks = [
        stream[asked(start, 10, keep_from=start, mark=START if start == 0 else None, is_marked=False)].resume_point
        for start in range(0, 2000, 10)
    ]
    told = [marked(place) for place in range(10, 2000, 250)]
    assert [mark for mark in marks if mark is not None] == told
    assert stream[asked(2000, 10, keep_from=2000)].resume_point == marked(2010)
    assert dataset.num_told == 1 + len(told) + 1  # the first where the loop begins


def test_a_loader_asks_for_states_as_often_as_somebody_may_want_them() -> None:
    def told_in(loader: ElasticDataLoader, dataset: Costly) -> int:
        before, batches = dataset.num_told, iter(loader)
        list(itertools.islice(batches, 20))
        return dataset.num_told - before

    alone, asking, trained, resumed = (Costly(400, 0.001) for _ in range(4))
    assert told_in(ElasticDataLoader(alone, 4), alone) <= 3
    loader = ElasticDataLoader(asking, 4)
    state = loader.state_dict()
    assert told_in(loader, asking) == 21
    loader = ElasticDataLoader(trained, 4)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    assert told_in(loader, trained) == 21
    loader = ElasticDataLoader(resumed, 4)
    loader.load_state_dict(state)
    assert told_in(loader, resumed) == 21


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_goes_on_where_a_state_was_first_asked_for_wherever_the_dataset_had_told_one(num_workers: int) -> None:
    for num_batches in (1, 2, 7) if num_workers == 0 else (7,):
        first = ElasticDataLoader(Costly(60, 0.001), 4, num_workers=num_workers, collate_fn=listed)
        batches = iter(first)
        found = list(itertools.islice(batches, num_batches))
        for _ in range(2):  # the second time states are told after each batch
            state = json.loads(json.dumps(first.state_dict()))
            second = ElasticDataLoader(Costly(60), 4, num_workers=num_workers, collate_fn=listed)
            second.load_state_dict(state)
            assert all_in([*found, *second]) == list(range(60))
            found += list(itertools.islice(batches, 4))
        del batches


def test_a_copy_is_as_its_value_was_and_shares_nothing_with_it() -> None:
    value: dict[str, Any] = {"tensor": torch.zeros(3), "list": [1, 2]}
    copied = Copied.of(value)
    value["tensor"] += 1
    first, second = copied.value(), copied.value()
    first["list"].append(3)
    assert copied.is_pickled and second["list"] == [1, 2] and torch.equal(second["tensor"], torch.zeros(3))
    here = Copied.of({"call": lambda: 5, "list": [1]})  # what cannot be pickled
    assert not here.is_pickled and here.value()["call"]() == 5 and here.value()["list"] is not here.value()["list"]


def raising_at(*places: int) -> Iterator[Any]:
    """What an iterator gives that goes on after samples that it cannot give."""
    for number in range(12):
        yield KeyError(number) if number in places else number


class Stumbling(IterableDataset[int]):
    """One that raises in the place of some samples, and goes on after them, unless it is a generator that does so."""

    def __init__(self, *places: int, ends: bool = False) -> None:
        self.places, self.ends = places, ends

    def __iter__(self) -> Iterator[int]:
        samples = map(given_or_raised, raising_at(*self.places))
        return (sample for sample in samples) if self.ends else samples


def given_or_raised(sample: Any) -> int:
    if isinstance(sample, Exception):
        raise sample
    return int(sample)


@pytest.mark.parametrize("keep_from", [0, 4])
def test_a_second_sample_of_a_batch_that_cannot_be_had_does_not_end_the_stream(keep_from: int) -> None:
    stream = Stream(Stumbling(1, 3, 9), listed, auto_collation=True)
    with pytest.raises(KeyError, match="1"):
        stream[asked(0, 4, mark=START)]
    assert stream[asked(4, 4, keep_from=keep_from)].batch == [4, 5, 6, 7]
    with pytest.raises(KeyError, match="9"):
        stream[asked(8, 4, keep_from=keep_from)]


def test_a_sample_on_the_way_that_cannot_be_had_is_told_of_where_nothing_comes_after_it() -> None:
    on = Stream(Stumbling(3), listed, auto_collation=True)
    assert on[asked(4, 2, keep_from=4, mark=START)].batch == [4, 5]
    over = Stream(Stumbling(3, ends=True), listed, auto_collation=True)
    with pytest.raises(KeyError, match="3"):
        over[asked(4, 2, keep_from=4, mark=START)]


# --- as torch's -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", the_first([0, 2, 1], 2))
@pytest.mark.parametrize("arguments", [{}, {"drop_last": True}, {"batch_size": None}, {"batch_size": 50}])
def test_batches_are_those_of_torch(arguments: dict[str, Any], num_workers: int) -> None:
    settings = {"batch_size": 4, **arguments, "num_workers": num_workers}
    ours, theirs = ElasticDataLoader(Counting(23), **settings), DataLoader(Counting(23), **settings)
    for _ in range(2):
        own, other = list(ours), list(theirs)
        assert len(own) == len(other)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize(("ends", "drop_last"), each_once([(3, 17), (17, 3), (0, 9), (8, 8)], [False, True]))
def test_a_worker_whose_stream_has_ended_is_left_out_as_torch_does(ends: tuple[int, ...], drop_last: bool) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "drop_last": drop_last, "collate_fn": listed}
    assert list(ElasticDataLoader(Counting(0, ends), **settings)) == list(DataLoader(Counting(0, ends), **settings))


def only_whole(samples: list[int]) -> list[int]:
    """A collate_fn that takes full batches alone."""
    if len(samples) != 4:
        raise ValueError(f"{len(samples)} samples")
    return samples


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader_class", [DataLoader, ElasticDataLoader])
def test_a_batch_that_is_dropped_is_not_collated(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Counting(27), 4, drop_last=True, num_workers=num_workers, collate_fn=only_whole)
    assert sum(map(len, loader)) == 24


@pytest.mark.parametrize(("num_workers", "num_given"), [(0, 24), (2, 24)])
def test_samples_of_streams_that_have_too_few_for_a_batch_are_collated_as_one(num_workers: int, num_given: int) -> None:
    loader = ElasticDataLoader(Counting(27), 4, num_workers=num_workers, collate_fn=only_whole)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    assert sum(map(len, loader)) == num_given


class Sized(Counting):
    def __len__(self) -> int:
        return self.size


def test_its_length_is_what_the_dataset_says() -> None:
    assert [len(ElasticDataLoader(Sized(23), 4, drop_last=drops)) for drops in (False, True)] == [6, 5]
    with pytest.raises(TypeError):
        len(ElasticDataLoader(Counting(23), 4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_length_counts_the_batches_that_a_plan_can_fill(num_workers: int) -> None:
    plan = BatchPlan(global_batch=10, num_ranks=1, micro_batch=4)
    assert plan.full_step.micro_batches == ((3, 3, 4),)
    for size, num_batches in ((20, 6), (22, 6), (23, 7), (28, 8)):
        loader = ElasticDataLoader(Sized(size), 4, num_workers=num_workers)
        loader.plan(plan, 0)
        assert len(loader) == len(list(loader)) == num_batches


def test_workers_are_kept_from_loop_to_loop_and_more_come_with_the_next_one() -> None:
    loader = ElasticDataLoader(Counting(24), 4, num_workers=1, persistent_workers=True)
    before = worker_pids()
    batches = iter(loader)
    found = all_in([next(batches)])
    workers = worker_pids() - before
    changed(loader, num_workers=2)
    assert found + all_in(batches) == list(range(24))  # the one worker's
    assert worker_pids() - before == workers
    assert sorted(all_in(loader)) == list(range(24))
    assert len(worker_pids() - before) == 2
    assert sorted(all_in(loader)) == list(range(24))


class Shown(IterableDataset[int]):
    """Gives what ``worker_init_fn`` has left at the dataset."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        return iter([self.first])


def leave_id(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.first = 10 + info.id  # as torch's documentation has it


def test_worker_init_fn_finds_the_dataset_that_was_given() -> None:
    assert all_in(ElasticDataLoader(Shown(), num_workers=2, worker_init_fn=leave_id)) == [10, 11]


# --- what changes ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 90),
    stages=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 7), st.integers(0, 4), st.none() | st.integers(1, 3)), max_size=5
    ),
    collates=st.booleans(),
)
def test_every_sample_is_committed_once_in_order(
    size: int, stages: list[tuple[int, int, int, int | None]], collates: bool
) -> None:
    check_stages(size, stages, num_workers=0, collates=collates)


@pytest.mark.parametrize(("num_workers", "collates"), each_once([1, 2], [False, True]))
def test_every_sample_of_workers_is_committed_once(num_workers: int, collates: bool) -> None:
    check_stages(
        150,
        [(8, 3, 3, 2), (12, 12, 1, 1), (5, 2, 4, None), (9, 9, 3, None)],
        num_workers=num_workers,
        collates=collates,
    )


def check_stages(
    size: int, stages: list[tuple[int, int, int, int | None]], *, num_workers: int, collates: bool
) -> None:
    """A loader is cut otherwise in mid-epoch, and each time another goes on from its state."""
    state: dict[str, Any] | None = None
    committed: list[int] = []
    for global_batch, micro_batch, num_steps, rolls_back_after in [*stages, (5, 2, 1 << 30, None)]:
        loader = ElasticDataLoader(Telling(size), 4, num_workers=num_workers, collate_fn=None if collates else listed)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        plan = BatchPlan(global_batch=global_batch, num_ranks=1, micro_batch=micro_batch)
        loader.plan(plan, 0)
        batches = iter(loader)
        for _ in range(num_steps):
            if rolls_back_after is not None:
                list(itertools.islice(batches, min(rolls_back_after, plan.full_step.num_micro_steps)))
                rolls_back_after = None
                loader.rollback()
            taken = list(itertools.islice(batches, plan.full_step.num_micro_steps))
            if len(taken) < plan.full_step.num_micro_steps:
                loader.rollback()
                break
            assert [len(batch) for batch in taken] == list(plan.full_step.micro_batches[0])
            committed += all_in(taken)
            loader.commit()
        state = loader.state_dict()
        if state["is_over"]:
            break
    assert len(set(committed)) == len(committed) and set(committed) <= set(range(size))
    if num_workers <= 1:
        assert committed == list(range(len(committed)))
    assert size - len(committed) < max(stage[0] for stage in [*stages, (5, 0, 0, 0)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_size_without_a_trainer_changes_between_two_batches(num_workers: int) -> None:
    loader = ElasticDataLoader(Counting(60), 4, num_workers=num_workers, collate_fn=listed)
    sizes = []
    found: list[int] = []
    for batch in loader:
        found += batch
        sizes.append(len(batch))
        changed(loader, batch_size=6 if len(sizes) < 4 else 5)
    assert sorted(found) == list(range(60)) and sizes[:6] == [4, 6, 6, 6, 5, 5]


def test_going_back_hands_out_again_in_the_same_loop() -> None:
    loader = ElasticDataLoader(Telling(40), 4, num_workers=2, collate_fn=listed)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    found: list[list[int]] = []
    state: dict[str, Any] = {}
    for number, batch in enumerate(loader):
        found.append(batch)
        loader.commit()
        if number == 2:
            state = loader.state_dict()
        if number == 5:
            loader.rewind(state)
    assert found[6:9] == found[3:6] and len(found) == 13
    assert sorted(itertools.chain(*found[:3], *found[6:])) == list(range(40))


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loop_that_goes_back_to_an_epochs_end_has_no_samples_left(is_planned: bool, is_resumed: bool) -> None:
    first, second = (ElasticDataLoader(Counting(40), 4, collate_fn=listed) for _ in range(2))
    for each in (first, second) if is_planned else ():
        each.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    for _ in first:
        first.commit()
    state = first.state_dict()
    if is_resumed:
        second.load_state_dict(state)
        state = second.state_dict()
    batches = iter(second)
    next(batches)
    second.rewind(state)
    assert list(batches) == [] and second.state_dict()["is_over"]
    assert second.state_dict()["epoch"] == 0
    assert sorted(all_in(second)) == list(range(40)) and second.state_dict()["epoch"] == 1


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_dies_is_replaced_and_its_stream_goes_on(tmp_path: Path, num_workers: int) -> None:
    file = tmp_path / "dies"
    file.touch()
    loader = ElasticDataLoader(Dying(60, 31, file), 4, num_workers=num_workers, collate_fn=listed)
    expected = list(ElasticDataLoader(Counting(60), 4, num_workers=num_workers, collate_fn=listed))
    assert list(loader) == expected and not file.exists()


def test_a_sample_that_kills_three_workers_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "dies"
    file.touch()
    loader = ElasticDataLoader(Dying(60, 31, file, forever=True), 4, num_workers=1, collate_fn=listed)
    batches = iter(loader)
    assert all_in(itertools.islice(batches, 7)) == list(range(28))
    with pytest.raises(WorkerDiedError, match="28 to 31 of the stream of worker 0"):
        next(batches)


class Silent(Dying):
    """One that cannot tell where it is."""

    state_dict = load_state_dict = property()


def test_a_worker_without_a_state_is_replaced_only_where_samples_may_be_passed(tmp_path: Path) -> None:
    file = tmp_path / "dies"
    file.touch()
    with pytest.raises(WorkerDiedError, match="has no state_dict"):
        list(ElasticDataLoader(Silent(60, 31, file), 4, num_workers=1))
    file.touch()
    assert all_in(ElasticDataLoader(Silent(60, 31, file), 4, num_workers=1, fast_forward=True)) == list(range(60))


@pytest.mark.parametrize("sizes", [None, (8, 4), (6, 6)])
def test_a_worker_that_cannot_be_replaced_is_told_of_once_and_the_others_go_on(
    tmp_path: Path, sizes: tuple[int, int] | None
) -> None:
    """The sixteenth sample of one of two workers kills it; ``sizes`` are those of a trainer's steps."""
    file = tmp_path / "dies"
    file.touch()
    loader = ElasticDataLoader(Silent(60, 31, file), 4, num_workers=2, collate_fn=listed)
    if sizes is not None:
        loader.plan(BatchPlan(global_batch=sizes[0], num_ranks=1, micro_batch=sizes[1]), 0)
    batches, found, taken = iter(loader), list[int](), list[int]()
    errors: list[WorkerDiedError] = []
    is_over = False
    while not is_over and len(errors) < 3:
        try:
            taken += next(batches)
            if sizes is None or len(taken) == sizes[0]:
                loader.commit()
                found, taken = found + taken, []
        except WorkerDiedError as error:
            loader.rollback()
            errors.append(error)
            taken = []
        except StopIteration:
            is_over = True
    assert len(errors) == 1 and "the rest of that stream is left out" in str(errors[0])
    assert len(set(found)) == len(found) and set(range(0, 60, 2)) <= {*found, 54, 56, 58}
    assert max(sample for sample in found if sample % 2) < 31


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_without_a_state_is_refused_or_passes_what_lies_before(num_workers: int) -> None:
    def loader(**arguments: Any) -> ElasticDataLoader:
        return ElasticDataLoader(Counting(40), 4, num_workers=num_workers, collate_fn=listed, **arguments)

    whole = list(loader())
    first = loader()
    batches = iter(first)
    assert list(itertools.islice(batches, 3)) == whole[:3]
    state = json.loads(json.dumps(first.state_dict()))
    with pytest.raises(ValueError, match=r"has no state_dict.*fast_forward=True"):
        loader().load_state_dict(state)
    second = loader(fast_forward=True)
    second.load_state_dict(state)
    assert list(second) == whole[3:]
    assert list(second) == whole  # the next epoch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("size", [3, 8, 11])
def test_a_loop_that_was_left_with_its_last_batch_gives_nothing_again(size: int, num_workers: int) -> None:
    first = ElasticDataLoader(Telling(size), 4, num_workers=num_workers, collate_fn=listed)
    batches = iter(first)
    found = all_in(itertools.islice(batches, -(-size // 4)))
    state = json.loads(json.dumps(first.state_dict()))
    assert found == list(range(size)) and not state["is_over"]
    second = ElasticDataLoader(Telling(size), 4, num_workers=num_workers, collate_fn=listed)
    second.load_state_dict(state)
    assert list(second) == [] and all_in(second) == found  # the next epoch


def test_a_worker_that_dies_within_the_first_batch_it_told_a_state_of_is_replaced() -> None:
    others = worker_pids()
    loader = ElasticDataLoader(Telling(40), 8, num_workers=1, collate_fn=listed)
    loader.plan(BatchPlan(global_batch=8, num_ranks=1, micro_batch=8), 0)
    batches = iter(loader)
    next(batches)
    loader.rollback()
    loader.plan(BatchPlan(global_batch=3, num_ranks=1, micro_batch=3), 0)
    found = next(batches)
    loader.commit()
    for pid in worker_pids() - others:
        kill_for_good(pid)
    assert all_in(batches) + found == [*range(3, 39), 0, 1, 2]


def test_an_epoch_that_is_named_is_to_come_though_the_one_before_was_given_up() -> None:
    loader = ElasticDataLoader(Telling(8), batch_size=2)
    loader.plan(BatchPlan(global_batch=2, num_ranks=1, micro_batch=2), 0)
    batches: Any = iter(loader)
    next(batches)
    loader.commit()
    batches.close()
    loader.leave_epoch()
    assert loader.state_dict()["is_over"]
    loader.set_epoch(1)
    state = loader.state_dict()
    assert (state["epoch"], state["is_over"]) == (1, False)
    second = ElasticDataLoader(Telling(8), batch_size=2)
    second.load_state_dict(state)
    assert all_in(second) == list(range(8)) and second.state_dict()["epoch"] == 1


def test_a_state_of_another_kind_of_dataset_is_refused() -> None:
    of_indices = ElasticDataLoader(range(5)).state_dict()
    with pytest.raises(ValueError, match="asked for by index"):
        ElasticDataLoader(Counting(5)).load_state_dict(of_indices)


class OneShot(IterableDataset[int]):
    def __iter__(self) -> OneShot:
        return self

    def __next__(self) -> int:
        raise StopIteration


def test_workers_of_a_dataset_that_is_an_iterator_do_not_change() -> None:
    told = ElasticDataLoader(OneShot(), num_workers=1).check(ElasticConfig.from_values({"dataloader.num_workers": 2}))
    assert told is not None and "this dataset is an iterator" in told
