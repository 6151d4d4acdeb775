"""Which micro-batches a rank's steps are made of, and why some sizes are refused, as values without any training."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic_ext import BatchPlan, ElasticConfig
from elastic_ext.training.batches import Batches, RankStep


def loader_of(num_samples: int, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, **options)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


class Source:
    """A loader that can be told; it hands out nothing, and notes what it is told."""

    def __init__(self, batch_size: int = 4, remaining: int | None = None, *, drop_last: bool = False) -> None:
        self.batch_size = batch_size
        self.remaining = remaining
        self.drop_last = drop_last
        self.told: list[Any] = []

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self.told.append((plan, rank))

    def commit(self, num_micro_batches: int) -> None:
        self.told.append("commit")

    def rollback(self) -> None:
        self.told.append("rollback")


class FollowingSource(Source):
    """One that follows keys of the config by itself."""

    section = "dataloader"

    def check(self, new: ElasticConfig) -> str | None:
        return None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        self.told.append(new)


def config_of(**values: object) -> ElasticConfig:
    return ElasticConfig.from_values({path.replace("__", "."): value for path, value in values.items()})


def begun(loader: Any = None, *, num_ranks: int = 1, rank: int = 0, **arguments: Any) -> Batches:
    """Batches as a trainer has them when its first step comes."""
    batches = Batches(loader, **arguments)
    startup = ElasticConfig.from_values(batches.startup_values(num_ranks))
    batches.begin(startup, num_ranks=num_ranks, rank=rank)
    return batches


def steps_of(batches: Batches, most: int = 100, *, keep_batch: bool = True) -> list[RankStep]:
    """An epoch's steps, each of them committed; ``most`` where it has no end."""
    found: list[RankStep] = []
    while len(found) < most and (step := batches.next_step(keep_batch=keep_batch)) is not None:
        found.append(step)
        batches.commit(step.num_micro_steps)
    return found


# --- what the script says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "arguments", "num_ranks", "values"),
    [
        (None, {}, 2, {}),
        (None, {"micro_batch_size": 4}, 2, {"dataloader.batch_size": 4}),
        (
            None,
            {"micro_batch_size": 4, "global_batch_size": 24},
            2,
            {"global_batch_size": 24, "dataloader.batch_size": 4},
        ),
        (loader_of(24), {}, 2, {"dataloader.batch_size": 4}),
        (loader_of(24), {"global_batch_size": 24}, 2, {"global_batch_size": 24, "dataloader.batch_size": 4}),
        (loader_of(24, None), {}, 2, {}),
        ([1, 2], {}, 1, {}),
        (Source(), {}, 3, {"global_batch_size": 12, "dataloader.batch_size": 4}),
        (Source(), {"global_batch_size": 7}, 3, {"global_batch_size": 7, "dataloader.batch_size": 4}),
    ],
)
def test_start_up_values_are_what_the_script_says(
    loader: Any, arguments: dict[str, Any], num_ranks: int, values: dict[str, object]
) -> None:
    assert Batches(loader, **arguments).startup_values(num_ranks) == values


@pytest.mark.parametrize(
    ("loader", "arguments", "reason"),
    [
        (None, {"global_batch_size": 0}, "global_batch_size is 0; allowed: an integer >= 1, or None"),
        (None, {"global_batch_size": True}, "global_batch_size is True; allowed"),
        (None, {"global_batch_size": 8.0}, "global_batch_size is 8.0; allowed"),
        (None, {"micro_batch_size": -1}, "micro_batch_size is -1; allowed"),
        (None, {"global_batch_size": 8}, "the size of a micro-batch is not known; pass the dataloader"),
        (loader_of(8, None), {"global_batch_size": 8}, "the size of a micro-batch is not known"),
        (loader_of(8), {"micro_batch_size": 4}, "micro_batch_size is 4, and a dataloader has a batch size"),
        (Source(), {"micro_batch_size": 4}, "micro_batch_size is 4, and a dataloader has a batch size"),
        (
            loader_of(8),
            {"share_weights": (1.0,)},
            "share_weights needs a dataloader that gives ranks unequal parts, an",
        ),
        (None, {"share_weights": (1.0,)}, "share_weights needs a dataloader that gives ranks unequal parts"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(loader: Any, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Batches(loader, **arguments)


@pytest.mark.parametrize(
    ("loader", "arguments", "num_ranks", "reason"),
    [
        (
            loader_of(24),
            {"global_batch_size": 12},
            2,
            "is not a multiple of 8 (2 ranks with micro-batches of 4); use 8 or 16",
        ),
        (None, {"global_batch_size": 12, "micro_batch_size": 5}, 1, "use 10 or 15"),
        (Source(), {"global_batch_size": 2}, 3, "leaves some of 3 ranks without any; use at least 3"),
        (Source(), {"share_weights": (1.0, 2.0)}, 3, "allowed: 3 finite numbers > 0, one per rank"),
        (Source(), {"share_weights": (1.0, 0.0)}, 2, "allowed: 2 finite numbers > 0"),
        (Source(1), {"global_batch_size": 9, "share_weights": (1.0, 50.0)}, 2, "use a micro-batch of at least"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_when_the_ranks_are_known(
    loader: Any, arguments: dict[str, Any], num_ranks: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Batches(loader, **arguments).startup_values(num_ranks)


def test_a_loader_whose_sizes_nobody_knows_may_be_joined_by_a_micro_batch_size() -> None:
    batches = begun(loader_of(24, None), micro_batch_size=4, global_batch_size=12)
    assert [step.weights for step in steps_of(batches, 2)] == [(1 / 3,) * 3] * 2


@pytest.mark.parametrize(
    ("loader", "arguments", "description"),
    [
        (None, {}, (None,)),
        (Source(), {}, (None,)),
        (loader_of(24, None), {}, (None,)),
        (loader_of(26), {}, (4, 7, 2)),
        (loader_of(24), {}, (4, 6, None)),
        (DataLoader(Endless(), batch_size=4), {}, (4, None, None)),
        (None, {"micro_batch_size": 4}, (4, None, None)),
    ],
)
def test_what_ranks_compare_is_what_makes_their_steps(
    loader: Any, arguments: dict[str, Any], description: tuple[int | None, ...]
) -> None:
    assert Batches(loader, **arguments).description == description


# --- a loader with sizes of its own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_epoch_of_a_plain_loader_ends_with_what_is_left_and_the_next_one_begins_anew(num_ranks: int) -> None:
    batches = begun(loader_of(4 * 7 + 2), global_batch_size=12 * num_ranks, num_ranks=num_ranks, rank=num_ranks - 1)
    assert batches.global_batch == 12 * num_ranks
    assert batches.num_steps == 3
    third = (1 / 3,) * 3
    for _ in range(3):
        steps = steps_of(batches, 3)
        assert [step.weights for step in steps] == [third, third, pytest.approx((4 / 6, 2 / 6))]
        assert [step.num_samples for step in steps] == [12 * num_ranks, 12 * num_ranks, 6 * num_ranks]


@pytest.mark.parametrize(
    ("num_samples", "weights"),
    [
        (24, [(0.5, 0.5)] * 3),
        (21, [(0.5, 0.5), (0.5, 0.5), (0.8, 0.2)]),
        (20, [(0.5, 0.5), (0.5, 0.5), (1.0,)]),
        (18, [(0.5, 0.5), (0.5, 0.5), (1.0,)]),
        (3, [(1.0,)] * 3),
    ],
)
def test_the_last_step_of_a_plain_loaders_epoch_weighs_its_batches_by_their_samples(
    num_samples: int, weights: list[tuple[float, ...]]
) -> None:
    batches = begun(loader_of(num_samples), global_batch_size=8)
    assert [step.weights for step in steps_of(batches, 3)] == [pytest.approx(each) for each in weights]


@pytest.mark.parametrize("loader", [DataLoader(Endless(), batch_size=4), None])
def test_without_a_known_length_every_step_is_a_full_one(loader: Any) -> None:
    arguments = {} if loader is not None else {"micro_batch_size": 4}
    batches = begun(loader, global_batch_size=12, **arguments)
    steps = steps_of(batches, 50)
    assert batches.num_steps is None
    assert all(step is steps[0] for step in steps), "a step that is like the last one is the same object"
    assert steps[0] == RankStep(weights=(1 / 3,) * 3, num_samples=12)


@pytest.mark.parametrize(
    ("loader", "arguments", "num_samples"),
    [
        (None, {}, None),
        ([1, 2], {}, None),
        (loader_of(8, None), {}, None),
        (loader_of(28), {}, 12),
        (None, {"micro_batch_size": 5}, 15),
    ],
)
def test_without_a_global_batch_every_micro_step_is_a_step(
    loader: Any, arguments: dict[str, Any], num_samples: int | None
) -> None:
    batches = begun(loader, num_ranks=3, rank=1, **arguments)
    assert batches.global_batch is None
    assert steps_of(batches, 20) == [RankStep(weights=(1.0,), num_samples=num_samples)] * 20


@pytest.mark.parametrize(("arguments", "keep_batch"), [({}, True), ({"global_batch_size": 24}, False)])
def test_a_single_micro_batch_has_the_size_that_it_has_at_an_epochs_end_too(
    arguments: dict[str, Any], keep_batch: bool
) -> None:
    batches = begun(loader_of(10), num_ranks=3, rank=1, **arguments)
    for _ in range(2):
        steps = steps_of(batches, 3, keep_batch=keep_batch)
        assert [(step.sizes, step.num_samples) for step in steps] == [((4,), 12), ((4,), 12), ((2,), 6)]
        assert {step.weights for step in steps} == {(1.0,)} and steps[0] is steps[1]


def test_a_step_of_one_micro_batch_on_request_takes_it_from_the_epoch() -> None:
    batches = begun(loader_of(4 * 7), global_batch_size=12)
    assert steps_of(batches, 2, keep_batch=False) == [RankStep(weights=(1.0,), num_samples=4)] * 2
    assert [step.num_micro_steps for step in steps_of(batches, 4)] == [3, 2, 3, 3]


def test_a_plain_loader_goes_past_what_was_rolled_back() -> None:
    batches = begun(loader_of(4 * 7), global_batch_size=12)
    assert not batches.can_replay
    batches.rollback(2)
    assert [step.num_micro_steps for step in steps_of(batches, 3)] == [3, 2, 3]


@pytest.mark.parametrize("num_batches", [6, 7])
def test_a_rollback_of_an_epochs_last_step_does_not_touch_the_next_epoch(num_batches: int) -> None:
    batches = begun(loader_of(4 * num_batches), global_batch_size=12)
    steps_of(batches, 2 if num_batches == 7 else 1)
    step = batches.next_step(keep_batch=True)
    assert step is not None
    batches.rollback(step.num_micro_steps)
    for _ in range(2):
        assert [step.num_micro_steps for step in steps_of(batches, 2)] == [3, 3]
        batches.begin_epoch()


def test_an_epoch_begins_anew_wherever_the_last_one_was_left() -> None:
    batches = begun(loader_of(4 * 7), global_batch_size=12)
    for num_taken in range(3):
        steps_of(batches, num_taken)
        batches.begin_epoch()
        assert [step.num_micro_steps for step in steps_of(batches, 3)] == [3, 3, 1]


@given(
    num_samples=st.integers(1, 60),
    size=st.integers(1, 7),
    num_micro_steps=st.integers(1, 4),
    num_ranks=st.integers(1, 3),
)
def test_weights_of_a_plain_loaders_step_are_its_samples_share(
    num_samples: int, size: int, num_micro_steps: int, num_ranks: int
) -> None:
    batches = begun(
        loader_of(num_samples, size), global_batch_size=size * num_micro_steps * num_ranks, num_ranks=num_ranks
    )
    sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
    steps = steps_of(batches, -(-len(sizes) // num_micro_steps))
    for step in steps:
        own, sizes = sizes[: step.num_micro_steps], sizes[step.num_micro_steps :]
        assert step.weights == pytest.approx([float(Fraction(each, sum(own))) for each in own], rel=1e-15)
        assert step.num_samples == sum(own) * num_ranks
    assert not sizes


# --- a loader that can be told --------------------------------------------------------------------------------------


def test_a_source_is_told_how_steps_are_cut_and_where_they_end() -> None:
    source = Source(remaining=30)
    batches = begun(source, global_batch_size=13, num_ranks=2, rank=1, share_weights=(1.0, 2.0))
    assert batches.can_replay
    assert batches.num_steps == 3  # of 13, 13 and 4 samples
    plan = BatchPlan(global_batch=13, num_ranks=2, micro_batch=4, weights=(1.0, 2.0))
    assert source.told == [(plan, 1)]
    batches.commit(3)
    batches.rollback(1)
    assert source.told[1:] == ["commit", "rollback"]


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_of_a_sources_step_are_those_of_this_ranks_micro_batches(rank: int) -> None:
    batches = begun(Source(batch_size=2), global_batch_size=7, num_ranks=2, rank=rank)
    step = batches.next_step(keep_batch=True)
    assert step is not None
    sizes = [(2, 2), (1, 2)][rank]
    assert step == RankStep(weights=tuple(size * 2 / 7 for size in sizes), num_samples=7, largest=2)
    assert batches.next_step(keep_batch=True) is step


@pytest.mark.parametrize(
    ("remaining", "drop_last", "num_samples"),
    [
        (30, False, 12),
        (13, False, 13),
        (12, False, 12),
        (5, False, 5),
        (1, False, None),
        (11, True, None),
        (0, False, None),
    ],
)
def test_a_sources_last_step_takes_what_remains(remaining: int, drop_last: bool, num_samples: int | None) -> None:
    batches = begun(Source(remaining=remaining, drop_last=drop_last), global_batch_size=12, num_ranks=2)
    step = batches.next_step(keep_batch=True)
    assert (None if step is None else step.num_samples) == num_samples


@given(
    num_samples=st.integers(0, 60),
    global_batch=st.integers(4, 20),
    num_ranks=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_a_sources_epoch_has_as_many_steps_as_are_taken(
    num_samples: int, global_batch: int, num_ranks: int, drop_last: bool
) -> None:
    source = Source(remaining=num_samples, drop_last=drop_last)
    batches = begun(source, global_batch_size=global_batch, num_ranks=num_ranks)
    told, num_steps = batches.num_steps, 0
    while (step := batches.next_step()) is not None:
        assert step.num_samples is not None and source.remaining is not None
        source.remaining -= step.num_samples
        num_steps += 1
    assert told == max(num_steps, 1)


@pytest.mark.parametrize(("global_batch", "num_samples"), [(26, 6), (8, 8), (7, 7)])
def test_a_sources_step_of_one_micro_batch_on_request_holds_every_ranks_first(
    global_batch: int, num_samples: int
) -> None:
    weights: list[float] = []
    for rank in range(2):
        batches = begun(Source(), global_batch_size=global_batch, num_ranks=2, rank=rank)
        step = batches.next_step(keep_batch=False)
        assert step is not None and step.num_micro_steps == 1 and step.num_samples == num_samples
        weights += step.weights
    assert sum(weights) == pytest.approx(2.0)


def test_a_source_without_an_end_has_no_number_of_steps() -> None:
    assert begun(Source()).num_steps is None


def test_only_a_source_that_follows_keys_of_its_own_is_asked_about_them() -> None:
    assert Batches(Source()).loader_applier is None
    assert Batches(loader_of(8)).loader_applier is None
    source = FollowingSource()
    assert Batches(source).loader_applier is source


# --- live changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "values", "reason"),
    [
        (Source(), {"global_batch_size": 5}, None),
        (Source(), {"global_batch_size": 24, "dataloader__batch_size": 1}, None),
        (Source(), {"global_batch_size": 1}, "leaves some of 2 ranks without any; use at least 2"),
        (
            Source(),
            {"global_batch_size": 24, "dataloader__num_workers": 2},
            "num_workers of this dataloader cannot change",
        ),
        (FollowingSource(), {"global_batch_size": 24, "dataloader__num_workers": 2}, None),
        (loader_of(64), {"global_batch_size": 24}, None),
        (loader_of(64), {"global_batch_size": 8, "dataloader__batch_size": 4}, None),
        (
            loader_of(64),
            {"global_batch_size": 12},
            "is not a multiple of 8 (2 ranks with micro-batches of 4); use 8 or 16",
        ),
        (
            loader_of(64),
            {"global_batch_size": 16, "dataloader__batch_size": 8},
            "the batch size of a DataLoader cannot change (this one has 4); use an ElasticDataLoader, whose",
        ),
        (
            None,
            {"global_batch_size": 16, "dataloader__num_workers": 2},
            "num_workers cannot change: no dataloader was given to the trainer; give it an ElasticDataLoader,",
        ),
        (
            None,
            {"global_batch_size": 16, "dataloader__batch_size": 8},
            "the loop itself sets the batch size: no dataloader was given to the trainer; give it an ElasticDataLoader",
        ),
        (
            loader_of(64),
            {"global_batch_size": 16, "dataloader__pin_memory": True, "dataloader__prefetch_factor": 2},
            "prefetch_factor, pin_memory of this dataloader cannot change while it is in use",
        ),
    ],
)
def test_a_live_change_is_refused_with_the_reason(loader: Any, values: dict[str, object], reason: str | None) -> None:
    batches = begun(loader, global_batch_size=16, num_ranks=2, micro_batch_size=None if loader is not None else 4)
    told = batches.check(config_of(**values))
    assert told is None if reason is None else told is not None and reason in told


@pytest.mark.parametrize(
    ("loader", "arguments"), [(None, {}), (loader_of(8), {}), (None, {"micro_batch_size": 4}), (loader_of(8, None), {})]
)
def test_a_run_whose_micro_steps_all_commit_cannot_be_given_a_global_batch(
    loader: Any, arguments: dict[str, Any]
) -> None:
    batches = begun(loader, **arguments)
    told = batches.check(config_of(global_batch_size=8))
    assert told == (
        "this run has no global batch: each micro-step is a step; start it with global_batch_size= to change that size"
    )
    assert batches.check(config_of()) is None
    assert batches.check(config_of(optimizer__learning_rate=0.1)) is None


def test_a_batch_size_is_refused_where_no_dataloader_is_known() -> None:
    told = begun(None).check(config_of(dataloader__batch_size=8))
    assert told is not None and "no dataloader was given to the trainer" in told


def test_a_check_changes_nothing() -> None:
    source = Source()
    batches = begun(source, global_batch_size=16)
    before = batches.next_step(keep_batch=True)
    assert batches.check(config_of(global_batch_size=32)) is None
    assert batches.next_step(keep_batch=True) is before
    assert len(source.told) == 1


def test_a_change_is_in_force_from_the_next_step_on() -> None:
    source = Source()
    batches = begun(source, global_batch_size=16, num_ranks=2, rank=1)
    config = config_of(global_batch_size=9, dataloader__batch_size=3)
    batches.begin(config, num_ranks=2, rank=1)
    assert batches.global_batch == 9
    assert source.told[-1] == (BatchPlan(global_batch=9, num_ranks=2, micro_batch=3), 1)
    assert batches.next_step(keep_batch=True) == RankStep(weights=(4 / 9, 4 / 9), num_samples=9, largest=3)

    plain = begun(loader_of(4 * 9), global_batch_size=8)
    steps_of(plain, 1)
    plain.begin(config_of(global_batch_size=16, dataloader__batch_size=4), num_ranks=1, rank=0)
    assert [step.num_micro_steps for step in steps_of(plain, 3)] == [4, 3, 4]


@pytest.mark.parametrize(
    ("loader", "arguments", "own"),
    [
        (loader_of(8), {}, {"dataloader.batch_size": 4}),
        (None, {"micro_batch_size": 5}, {"dataloader.batch_size": 5}),
        (Source(), {}, {}),
        (None, {}, {}),
    ],
)
def test_a_resumed_config_gives_way_to_the_size_that_a_loader_has_of_its_own(
    loader: Any, arguments: dict[str, Any], own: dict[str, object]
) -> None:
    assert Batches(loader, **arguments).own_values() == own


def test_a_resumed_config_gives_a_source_its_sizes_back() -> None:
    source = Source()
    batches = Batches(source)
    assert batches.startup_values(4)["global_batch_size"] == 16
    batches.begin(config_of(global_batch_size=12, dataloader__batch_size=2), num_ranks=4, rank=3)
    assert batches.global_batch == 12
    assert source.told == [(BatchPlan(global_batch=12, num_ranks=4, micro_batch=2), 3)]


def test_a_config_that_comes_with_a_global_batch_gives_a_plain_loader_one() -> None:
    batches = Batches(loader_of(64))
    batches.begin(config_of(global_batch_size=12, dataloader__batch_size=4), num_ranks=1, rank=0)
    assert batches.global_batch == 12
    assert [step.num_micro_steps for step in steps_of(batches, 2)] == [3, 3]


def test_a_config_that_comes_with_a_global_batch_changes_nothing_where_micro_batches_have_no_known_size() -> None:
    batches = Batches(None)
    batches.begin(config_of(global_batch_size=12), num_ranks=1, rank=0)
    assert [step.num_micro_steps for step in steps_of(batches, 2)] == [1, 1]
    assert batches.global_batch is None, "what steps do not keep is not said to be their size"


# --- fewer and more samples at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "global_batch", "remaining", "largest", "halved"),
    [
        (8, 16, None, 8, 4),
        (8, 10, None, 5, 4),  # which are taken as three and two
        (8, 16, 3, 3, 2),  # an epoch's tail: 8 and 4 would leave it as it is
        (8, 16, None, 9, 8),  # another config has come into force since, by which fewer are taken
        (1, 2, None, 1, 0),
        (2, 2, None, 1, 0),
    ],
)
def test_sizes_are_halved_until_the_step_that_comes_takes_fewer_at_once(
    batch_size: int, global_batch: int, remaining: int | None, largest: int, halved: int
) -> None:
    source = Source(batch_size=batch_size)
    batches = begun(source, global_batch_size=global_batch, num_ranks=2 if batch_size < 8 else 1)
    source.remaining = remaining
    assert batches.fewer(largest, takes_one=True) == halved


@pytest.mark.parametrize(
    ("batch_size", "share", "largest", "fewer"),
    [
        (8, 16, 8, 4),
        (3, 12, 3, 2),  # halved it would be one
        (4, 9, 3, 0),  # by two, one of the micro-batches would have a single sample
        (1, 6, 4, 3),  # which one has been tried
        (2, 6, 2, 0),
    ],
)
def test_where_one_sample_is_refused_no_micro_batch_has_a_single_one(
    batch_size: int, share: int, largest: int, fewer: int
) -> None:
    batches = begun(Source(batch_size=batch_size), global_batch_size=2 * share, num_ranks=2)
    assert batches.fewer(largest, takes_one=False) == fewer


def test_unequal_parts_that_cannot_be_cut_are_left_to_whoever_says_why() -> None:
    batches = begun(Source(batch_size=7), global_batch_size=8, num_ranks=2, share_weights=(1.0, 7.0))
    assert batches.largest == 7  # in one micro-step, since a rank has a single sample
    assert batches.fewer(7, takes_one=True) == 3
    assert "cannot be cut" in (batches.check(config_of(global_batch_size=8, dataloader__batch_size=3)) or "")


def test_what_is_taken_at_once_is_known_of_a_source_alone() -> None:
    batches = begun(Source(batch_size=4), global_batch_size=12, num_ranks=2)
    assert (batches.largest, batches.share) == (3, 6)
    assert batches.largest_under(config_of(global_batch_size=12, dataloader__batch_size=6)) == 6
    fixed = begun([[1, 2], [3, 4]])
    assert (fixed.largest, fixed.share, fixed.largest_under(config_of())) == (0, 0, 0)


@pytest.mark.parametrize(
    ("left", "now", "then", "loses"),
    [
        pytest.param(2, 2, 4, True, id="a step of two samples, for four ranks"),
        pytest.param(2, 2, 3, True),
        pytest.param(3, 2, 3, False),
        pytest.param(12, 2, 4, False),
        pytest.param(2, 4, 2, False, id="fewer ranks take what these could not"),
        pytest.param(2, 4, 8, False, id="nobody could take them anyway"),
        pytest.param(0, 2, 4, False, id="the epoch is over"),
        pytest.param(None, 2, 4, False, id="it never ends"),
    ],
)
def test_it_is_known_where_more_ranks_would_leave_out_what_these_can_take(
    left: int | None, now: int, then: int, loses: bool
) -> None:
    source = Source(2, remaining=12)
    batches = begun(source, num_ranks=now, global_batch_size=8)
    source.remaining = left
    assert batches.loses_rest(config_of(global_batch_size=8, dataloader__batch_size=2), then) is loses
