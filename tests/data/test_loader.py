"""A loader whose sizes, workers and ranks change in the middle of an epoch gives each sample once, in one order."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from elastic_ext import ElasticTrainer, FollowOptions, MicroBatchSource
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from tests.support.loading import Numbers, changed, collate_by_hand, indices_in, loader_of
from tests.support.pools import WaitAt, gate, open_gate
from tests.support.ranks import RankPool
from tests.support.scripts import Script
from tests.support.thinning import the_first
from tests.support.watching import collected_warnings

pytestmark = pytest.mark.usefixtures("started_once")


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    gc.collect()
    assert [child for child in psutil.Process().children() if child not in before and child.is_running()] == []


# --- as torch's -----------------------------------------------------------------------------------------------------

ARGUMENTS: list[dict[str, Any]] = [
    {"drop_last": True},
    {"batch_size": None},
    {"collate_fn": list},
    {},
    {"sampler": [3, 1, 2]},
    {"batch_size": 50},
]


@pytest.mark.parametrize(
    ("arguments", "num_workers"),
    [
        *((arguments, 0) for arguments in ARGUMENTS),
        *the_first([(arguments, 2) for arguments in ARGUMENTS], 3),
    ],
)
def test_batches_are_those_of_torch(arguments: dict[str, Any], num_workers: int) -> None:
    data = torch.arange(46).reshape(23, 2)
    ours: Any = ElasticDataLoader(data, **{"batch_size": 4} | arguments, num_workers=num_workers)
    theirs: Any = DataLoader(data, **{"batch_size": 4} | arguments)  # type: ignore[arg-type]
    for _ in range(2):
        own, other = list(ours), list(theirs)
        assert len(own) == len(other) == len(ours) == len(theirs)
        assert all(torch.equal(torch.as_tensor(a[0]), torch.as_tensor(b[0])) for a, b in zip(own, other, strict=True))


def test_an_empty_dataset_gives_nothing() -> None:
    for num_workers in (0, 1):
        assert list(loader_of(0, num_workers=num_workers)) == []
    assert len(loader_of(0)) == 0


def test_each_loop_shuffles_anew_and_a_named_epoch_as_it_did() -> None:
    loader = loader_of(50, shuffle=True, seed=3)
    loops = [indices_in(loader) for _ in range(3)]
    assert all(sorted(each) == list(range(50)) for each in loops) and len({tuple(each) for each in loops}) == 3
    loader.set_epoch(1)
    assert indices_in(loader) == loops[1]
    assert indices_in(loader_of(50, shuffle=True, seed=4)) != loops[0]
    generator = torch.Generator().manual_seed(3)
    assert indices_in(loader_of(50, shuffle=True, generator=generator)) == loops[0]


def test_what_a_sampler_draws_depends_on_seed_and_epoch() -> None:
    def drawn() -> list[list[int]]:
        loader = loader_of(9, sampler=WeightedRandomSampler([1.0] * 9, 30))
        return [indices_in(loader) for _ in range(2)]

    first = drawn()
    torch.rand(1)
    assert drawn() == first and first[0] != first[1]


def test_a_dataset_may_have_another_length_in_the_next_epoch() -> None:
    dataset = Numbers(5)
    loader = ElasticDataLoader(dataset, 2, shuffle=True)
    assert sorted(indices_in(loader)) == list(range(5))
    dataset.size = 8
    assert sorted(indices_in(loader)) == list(range(8)) and len(loader) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_cannot_be_had_raises_what_it_raised(num_workers: int) -> None:
    loader = ElasticDataLoader(Numbers(4), 2, sampler=[0, 1, 7, 2, 3, 1], num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(IndexError, match="7"):
        next(batches)
    assert indices_in(batches) == [3, 1]  # as torch's goes on


def test_workers_are_kept_from_epoch_to_epoch_where_that_is_asked_for() -> None:
    for is_kept in (False, True):
        loader = loader_of(40, num_workers=1, persistent_workers=is_kept)
        pids = [{int(pid) for _, makers in loader for pid in makers} for _ in range(2)]
        assert (pids[0] == pids[1]) is is_kept
        del loader


class Three(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [range(3), Three()], ids=["indexed", "stream"])
def test_kept_workers_make_way_for_those_that_collate_as_the_loader_does_now(dataset: Any) -> None:
    loader = ElasticDataLoader(dataset, 3, num_workers=1, persistent_workers=True, collate_fn=list)
    assert list(loader) == [[0, 1, 2]]
    loader.collate_fn = tuple
    assert list(loader) == [(0, 1, 2)]
    (producer,) = [each for each in loader._producers if not each._is_closed]
    loader.collate_fn = sum
    outer = iter(loader)
    loader.collate_fn = max
    assert list(loader) == [2] and list(outer) == [3]
    assert producer._is_closed


def test_a_loop_that_is_left_early_leaves_nothing() -> None:
    loader = loader_of(1000, num_workers=2)
    for _ in loader:
        break
    assert len(list(itertools.islice(loader, 3))) == 3


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: ElasticDataLoader(Numbers(5), 2, batch_sampler=[[1], [2]]), ValueError, "mutually exclusive"),
        (lambda: ElasticDataLoader(Endless(), seed_samples=True), ValueError, "samples with an index"),
        (lambda: ElasticDataLoader(Numbers(5), fast_forward=True), ValueError, "is for an IterableDataset"),
        (lambda: ElasticDataLoader(Numbers(5), 0), ValueError, "batch_size should be a positive integer"),
        (
            lambda: ElasticDataLoader(Numbers(5), num_workers=-1),
            ValueError,
            "num_workers option",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


# --- what changes ---------------------------------------------------------------------------------------------------


def test_workers_come_and_go_while_a_loop_goes_on() -> None:
    loader = loader_of(6000, 2, shuffle=True, seed=1)
    expected = indices_in(loader)
    loader.set_epoch(0)
    found: list[int] = []
    makers: list[set[int]] = []
    wanted = itertools.cycle([2, 0, 3, 1])
    for number, (indices, pids) in enumerate(loader):
        if number % 300 == 0:
            changed(loader, num_workers=next(wanted), prefetch_factor=1 + number % 3)
            makers.append(set())
        found += indices.tolist()
        makers[-1] |= set(pids.tolist())
    assert found == expected
    assert set.union(*makers) - {0}, "no worker made anything"


def test_until_a_worker_is_ready_this_process_makes_what_is_taken_and_nothing_ahead(tmp_path: Path) -> None:
    start = gate(tmp_path / "start")
    loader = loader_of(400, 2, worker_init_fn=lambda _: WaitAt(start)())
    batches = iter(loader)
    next(batches)
    changed(loader, num_workers=2, prefetch_factor=8)
    (producer,) = loader._producers
    for _ in range(3):
        (pids, is_settled) = next(batches)[1], producer.is_settled
        assert set(pids.tolist()) == {0} and not is_settled
    open_gate(start)
    assert producer._pool is not None
    producer._pool.wait_ready()
    assert 0 not in next(batches)[1].tolist()
    open_gate(start)
    producer._pool.wait_ready(2)
    assert producer.is_settled


@pytest.mark.parametrize("after", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 1}])
def test_a_loader_is_not_settled_while_batches_come_that_more_workers_had_made_ahead(after: dict[str, int]) -> None:
    loader = loader_of(400, 2, num_workers=2, prefetch_factor=6)
    batches = iter(loader)
    next(batches)
    (producer,) = loader._producers
    assert producer._pool is not None
    producer._pool.wait_ready(2)
    assert loader.is_settled
    changed(loader, **after)
    num_left = 0
    while not loader.is_settled:
        next(batches)
        num_left += 1
    assert num_left in (11, 12), "two workers had six batches each ahead, one of which the loop had taken"


@pytest.mark.parametrize(
    ("num_ranks", "collate_fn", "num_workers"),
    [
        (1, None, 0),
        (2, collate_by_hand, 0),
        (2, None, 2),
        (1, collate_by_hand, 2),
        *the_first([(1, collate_by_hand, 0), (2, None, 0), (1, None, 2), (2, collate_by_hand, 2)], 0),
    ],
)
def test_sizes_change_between_two_batches(num_workers: int, collate_fn: Any, num_ranks: int) -> None:
    loaders = [loader_of(400, shuffle=True, num_workers=num_workers, collate_fn=collate_fn) for _ in range(num_ranks)]
    expected = indices_in(loader_of(400, shuffle=True))
    sizes = [8, 12, 5, 5, 1, 30, 8, *[9] * 40]
    plans = [BatchPlan(global_batch=size * num_ranks, num_ranks=num_ranks, micro_batch=size) for size in sizes]
    found: list[int] = []
    for rank, loader in enumerate(loaders):
        loader.plan(plans[0], rank)
    for number, batches in enumerate(zip(*loaders, strict=True)):
        found += indices_in(batches)
        for rank, loader in enumerate(loaders):
            loader.commit()
            loader.plan(plans[number // 3 + 1], rank)
    assert found == expected


def test_what_workers_have_made_is_made_use_of_when_sizes_change(tmp_path: Path) -> None:
    dataset = Counted(tmp_path / "counted")
    loader = ElasticDataLoader(dataset, 8, num_workers=2, prefetch_factor=3)
    loader.plan(BatchPlan(global_batch=8, num_ranks=1, micro_batch=8), 0)
    found: list[int] = []
    for number, indices in enumerate(loader):
        found += indices.tolist()
        loader.commit()
        if number in (2, 6):
            size = 12 if number == 2 else 5
            loader.plan(BatchPlan(global_batch=size, num_ranks=1, micro_batch=size), 0)
    assert found == list(range(300))
    assert sorted(map(int, dataset.file.read_text().split())) == list(range(300))  # each was made once


def test_a_sample_that_cannot_be_had_fails_its_own_batch_alone_when_sizes_change() -> None:
    loader = ElasticDataLoader(Numbers(20), 10, sampler=[*range(18), 99, 19], num_workers=1, prefetch_factor=4)
    loader.plan(BatchPlan(global_batch=10, num_ranks=1, micro_batch=10), 0)
    batches = iter(loader)
    found = indices_in([next(batches)])
    loader.commit()
    loader.plan(BatchPlan(global_batch=5, num_ranks=1, micro_batch=5), 0)
    found += indices_in([next(batches)])
    with pytest.raises(IndexError, match="99"):
        next(batches)
    assert found == list(range(15))


class Counted:
    """Notes which samples are made."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> int:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return index


def test_workers_that_cannot_go_are_not_taken() -> None:
    loader = loader_of(10, num_workers=1, persistent_workers=True)
    told = loader.check(ElasticConfig.from_values({"dataloader.num_workers": 0}))
    assert told is not None and "persistent_workers" in told


def test_a_step_that_commits_early_is_followed_by_one_that_begins_there() -> None:
    loader = loader_of(20, num_workers=1)
    loader.plan(BatchPlan(global_batch=8, num_ranks=1, micro_batch=3), 0)
    found = []
    for indices, _ in loader:
        loader.commit()  # every micro-step
        found.append(indices.tolist())
    assert list(itertools.chain(*found)) == list(range(20))
    assert [len(each) for each in found][:3] == [2, 2, 2]


@pytest.mark.parametrize("then", [None, BatchPlan(global_batch=9, num_ranks=1, micro_batch=2)])
def test_a_loop_has_the_same_length_in_the_middle_of_a_step(then: BatchPlan | None) -> None:
    loader = loader_of(31, 4)
    loader.plan(BatchPlan(global_batch=10, num_ranks=1, micro_batch=4), 0)
    batches = iter(loader)
    lengths: list[int] = []
    for number, _ in enumerate(batches, 1):
        lengths.append(len(loader))
        if number == 3:  # the first step
            loader.commit()
        if number == 4 and then is not None:  # the first of another, which is carried over
            loader.plan(then, 0)
            lengths = [len(loader)]
    assert set(lengths) == {number}


def test_going_back_hands_out_again_in_the_same_loop() -> None:
    loader = loader_of(40, shuffle=True, num_workers=1)
    loader.plan(BatchPlan(global_batch=4, num_ranks=1, micro_batch=4), 0)
    found: list[list[int]] = []
    state: dict[str, Any] = {}
    for number, (indices, _) in enumerate(loader):
        found.append(indices.tolist())
        loader.commit()
        if number == 2:
            state = loader.state_dict()
        if number == 5:
            loader.rewind(state)
    assert found[6:9] == found[3:6] and len(found) == 13
    assert sorted(itertools.chain(*found[:3], *found[6:])) == list(range(40))


def test_the_seed_of_a_state_at_an_epochs_end_is_taken_over_and_saved_again() -> None:
    first, second, third = (loader_of(40, shuffle=True, seed=seed) for seed in range(3))
    list(first)
    state = first.state_dict()
    assert state["is_over"] and len(second) == 10  # by an order that is drawn
    second.load_state_dict(state)
    assert second.state_dict()["order"] == state["order"]
    third.load_state_dict(second.state_dict())
    assert indices_in(first) == indices_in(third)


def test_a_loop_that_goes_back_to_an_epochs_end_has_no_samples_left_also_where_that_was_resumed_from() -> None:
    first, second = loader_of(40), loader_of(40)
    list(first)
    second.load_state_dict(first.state_dict())
    state = second.state_dict()
    batches = iter(second)
    next(batches)
    second.rewind(state)
    assert list(batches) == [] and second.state_dict()["is_over"]
    assert len(indices_in(second)) == 40


def test_an_epoch_that_a_loop_went_back_in_begins_at_its_beginning_when_it_is_named_again() -> None:
    loader = loader_of(40, 4)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.rewind(state)
    assert len(list(batches)) == 9
    loader.set_epoch(0)
    assert sorted(indices_in(loader)) == list(range(40))


class _Random(Dataset[float]):
    """Samples that are random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return random.random()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_with_seeds_of_another_epoch_are_made_anew_when_a_loop_goes_back(num_workers: int) -> None:
    def loader() -> ElasticDataLoader:
        return ElasticDataLoader(_Random(), seed_samples=True, num_workers=num_workers)

    first = loader()
    batches = iter(first)
    begun = [float(next(batches)) for _ in range(2)]
    state = first.state_dict()
    expected = [float(batch) for batch in batches]
    again = iter(first)
    assert [float(next(again)) for _ in range(2)] != begun
    first.rewind(state)
    assert [float(batch) for batch in again] == expected


def test_samples_that_are_too_few_for_the_ranks_of_a_resumed_run_are_warned_of_by_the_first() -> None:
    before, *after = (loader_of(7, 2) for _ in range(4))
    before.plan(BatchPlan(global_batch=5, num_ranks=1, micro_batch=5), 0)
    next(iter(before))
    before.commit()
    with collected_warnings() as warnings:
        for rank, loader in enumerate(after):
            loader.plan(BatchPlan(global_batch=6, num_ranks=3, micro_batch=2), rank)
            loader.load_state_dict(before.state_dict())
            assert list(loader) == []
        (told,) = warnings.messages
        assert "the last 2 samples of epoch 0 are left out" in told and "at most 2 ranks" in told
        assert [len(indices_in(loader)) for loader in after] == [3, 2, 2]  # all of the next epoch
        assert warnings.messages == [told]


# --- with a trainer -------------------------------------------------------------------------------------------------


def test_a_trainer_has_it_cut_steps_and_resumes_where_it_was(tmp_path: Path) -> None:
    def train(num_steps: int, batch_size: int, num_workers: int) -> tuple[list[list[int]], int]:
        model = torch.nn.Linear(1, 1)
        loader = loader_of(50, batch_size, shuffle=True, num_workers=num_workers)
        assert isinstance(loader, MicroBatchSource)
        trainer = ElasticTrainer(
            model,
            loader,
            global_batch_size=8,
            shared_storage_path=tmp_path / "storage",
            follow_options=FollowOptions(job="job", run_dir=tmp_path),
        )
        taken: list[list[int]] = []
        with trainer:
            optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
            begins_at = trainer.global_step
            for epoch in range(trainer.start_epoch, 2):
                with trainer.epoch(epoch):
                    for indices, _ in loader:
                        with trainer.step():
                            model(indices[:, None].float()).sum().backward()
                            optimizer.step()
                            optimizer.zero_grad()
                        taken.append(indices.tolist())
                        if trainer.global_step == num_steps and not trainer._session.steps.is_partial:
                            trainer.save_checkpoint()
                            return taken, begins_at
        return taken, begins_at

    first, _ = train(4, 4, 0)
    second, begins_at = train(1 << 30, 3, 2)
    assert begins_at == 4
    whole = loader_of(50, 1, shuffle=True)
    epochs = [indices_in(whole), indices_in(whole)]
    taken = list(itertools.chain(*first, *second))
    assert taken == epochs[0] + epochs[1]
    assert {len(each) for each in [*first, *second]} == {4, 2}  # the batch size in force was saved, too


AFTER_A_GROUP = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from elastic_ext.data.loader import ElasticDataLoader
from tests.support.loading import Numbers, changed, collate_by_hand, indices_in, loader_of
from tests.support.pools import WaitAt, gate, open_gate

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]) * 2 + 1).sum()
del mesh
dist.destroy_process_group()
print(sum(len(batch) for batch in ElasticDataLoader(torch.arange(20), 4, num_workers=2)))
"""


def test_workers_start_after_a_process_group_has_gone(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AFTER_A_GROUP)
    with Script(ranks, [str(tmp_path / "script.py")], folder=tmp_path, env=os.environ) as script:
        told, _ = script.communicate(60)
    assert told.split() == ["20"], told
