"""A global batch cut into shares and micro-batches: nothing lost, nobody empty, as equal as can be."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_ext.data.batch_plan import BatchPlan, can_cut, nearest_batches, next_batch, plan_step, shares

sizes = st.integers(1, 5000)
ranks = st.integers(1, 64)


@given(st.data(), ranks)
def test_shares_add_up_and_differ_by_one_at_most(data: st.DataObject, num_ranks: int) -> None:
    batch = data.draw(st.integers(num_ranks, 5000))
    each = shares(batch, num_ranks)
    assert sum(each) == batch
    assert max(each) - min(each) <= 1
    assert min(each) >= 1
    assert list(each) == sorted(each, reverse=True)


@given(st.data(), st.lists(st.floats(0.01, 100), min_size=1, max_size=16))
def test_weighted_shares_add_up_leave_nobody_out_and_follow_the_weights(
    data: st.DataObject, weights: list[float]
) -> None:
    batch = data.draw(st.integers(len(weights), 5000))
    each = shares(batch, len(weights), weights)
    assert sum(each) == batch
    assert min(each) >= 1
    spare = batch - len(weights)
    if [share / weight for share, weight in zip(each, weights, strict=True)] == pytest.approx(
        [batch / sum(weights)] * len(weights)
    ):
        return  # exactly
    for share, weight in zip(each, weights, strict=True):
        assert abs(share - 1 - spare * weight / sum(weights)) < 1 + 1e-9 * batch


@pytest.mark.parametrize(
    ("batch", "weights", "expected"),
    [(60, (5.0, 1.0), (50, 10)), (4, (3, 1), (3, 1)), (60, (0.1, 0.2, 0.3), (10, 20, 30)), (7, (3, 1), (5, 2))],
)
def test_shares_are_exactly_in_proportion_where_whole_numbers_are(
    batch: int, weights: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert shares(batch, len(weights), weights) == expected


@given(st.data(), ranks, st.integers(1, 300))
def test_a_plan_takes_every_sample_in_equally_many_micro_steps_none_of_them_empty(
    data: st.DataObject, num_ranks: int, micro_batch: int
) -> None:
    batch = data.draw(st.integers(num_ranks, 5000))
    plan = plan_step(batch, num_ranks, micro_batch)
    assert [sum(chunks) for chunks in plan.micro_batches] == list(shares(batch, num_ranks))
    assert {len(chunks) for chunks in plan.micro_batches} == {plan.num_micro_steps}
    for chunks in plan.micro_batches:
        assert min(chunks) >= 1
        assert max(chunks) - min(chunks) <= 1
        assert max(chunks) <= micro_batch + (micro_batch == 1)
    smallest = math.ceil(math.ceil(batch / num_ranks) / micro_batch)
    assert plan.num_micro_steps == min(smallest, batch // num_ranks)


@given(st.data(), ranks, st.integers(1, 300))
def test_the_weights_of_a_plan_average_to_one_over_the_ranks(
    data: st.DataObject, num_ranks: int, micro_batch: int
) -> None:
    plan = plan_step(data.draw(st.integers(num_ranks, 5000)), num_ranks, micro_batch)
    total = sum(
        plan.weight(rank, micro_step) for rank in range(num_ranks) for micro_step in range(plan.num_micro_steps)
    )
    assert total == pytest.approx(num_ranks)


@given(st.data(), ranks, st.integers(1, 300))
def test_chunks_of_a_step_have_one_size_or_two_neighbouring_ones(
    data: st.DataObject, num_ranks: int, micro_batch: int
) -> None:
    """What docs/trainer.md says of compiled models."""
    batch = data.draw(st.integers(num_ranks, 5000))
    plan = plan_step(batch, num_ranks, micro_batch)
    found = {size for chunks in plan.micro_batches for size in chunks}
    smaller, num_left = divmod(batch, plan.num_micro_steps * num_ranks)
    assert found == ({smaller} if num_left == 0 else {smaller, smaller + 1})
    if batch % (micro_batch * num_ranks) == 0:
        assert found == {micro_batch}


@given(st.data(), st.lists(st.floats(0.5, 2), min_size=1, max_size=8), st.integers(4, 300))
def test_chunks_of_a_rank_with_a_weight_have_one_size_or_two_neighbouring_ones(
    data: st.DataObject, weights: list[float], micro_batch: int
) -> None:
    batch = data.draw(st.integers(50 * len(weights), 5000))
    plan = plan_step(batch, len(weights), micro_batch, weights)
    for chunks in plan.micro_batches:
        smaller = sum(chunks) // plan.num_micro_steps
        assert set(chunks) <= {smaller, smaller + 1}


@given(st.data(), st.integers(1, 16), st.integers(1, 64), st.integers(1, 16))
def test_an_epoch_has_two_more_sizes_of_chunks_at_most_and_none_where_it_is_a_multiple(
    data: st.DataObject, num_ranks: int, micro_batch: int, num_micro_steps: int
) -> None:
    """What docs/trainer.md says of compiled models."""
    batch = num_ranks * micro_batch * num_micro_steps
    length = data.draw(st.integers(num_ranks, 6 * batch))
    for drop_last in (False, True):
        plan = BatchPlan(global_batch=batch, num_ranks=num_ranks, micro_batch=micro_batch, drop_last=drop_last)
        remaining, found = length, set[int]()
        while (step := plan.next_step(remaining)) is not None:
            found |= {size for chunks in step.micro_batches for size in chunks}
            remaining -= step.global_batch
        assert len(found - {micro_batch}) <= (0 if drop_last or length % batch == 0 else 2)


@given(
    st.data(),
    st.lists(st.floats(0.01, 100), min_size=1, max_size=8) | st.integers(1, 8),
    st.integers(1, 200),
    st.integers(1, 64),
    st.booleans(),
)
def test_an_epoch_is_cut_to_its_end_where_a_full_step_can_be(
    data: st.DataObject, weights: list[float] | int, batch: int, micro_batch: int, drop_last: bool
) -> None:
    num_ranks = weights if isinstance(weights, int) else len(weights)
    given_weights = None if isinstance(weights, int) else tuple(weights)
    assume(batch >= num_ranks and can_cut(batch, num_ranks, micro_batch, given_weights))
    options: dict[str, Any] = {"num_ranks": num_ranks, "micro_batch": micro_batch, "drop_last": drop_last}
    plan = BatchPlan(global_batch=batch, weights=given_weights, **options)
    remaining = length = data.draw(st.integers(num_ranks, 5 * batch))
    found = [set[int]() for _ in range(num_ranks)]
    while (step := plan.next_step(remaining)) is not None:
        assert sum(map(sum, step.micro_batches)) == step.global_batch
        assert {len(chunks) for chunks in step.micro_batches} == {step.num_micro_steps}
        assert all(1 <= size <= micro_batch + 1 for chunks in step.micro_batches for size in chunks)
        for sizes, chunks in zip(found, step.micro_batches, strict=True):
            sizes |= set(chunks)
        remaining -= step.global_batch
    assert remaining == (length % batch if drop_last else 0)
    for sizes, chunks in zip(found, plan.full_step.micro_batches, strict=True):  # what docs/trainer.md says
        assert len(sizes - set(chunks)) <= (0 if drop_last or length % batch == 0 else 2)


@given(st.data(), st.integers(1, 32), st.integers(1, 200), st.booleans())
def test_an_epoch_is_taken_whole_or_without_its_last_batch(
    data: st.DataObject, num_ranks: int, batch: int, drop_last: bool
) -> None:
    assume(batch >= num_ranks)
    length = data.draw(st.integers(0, 1000))
    taken: list[int] = []
    while step := next_batch(length - sum(taken), batch, num_ranks, drop_last=drop_last):
        taken.append(step)
    assert all(step >= num_ranks for step in taken)
    assert all(step == batch for step in taken[:-1])
    if drop_last:
        assert sum(taken) == length // batch * batch
    elif length >= num_ranks:
        assert sum(taken) == length
        assert taken[-1] < batch + num_ranks


@pytest.mark.parametrize(
    ("batch", "num_ranks", "micro_batch", "expected"),
    [
        (12, 3, 4, ((4,), (4,), (4,))),
        (12, 3, 2, ((2, 2), (2, 2), (2, 2))),
        (13, 3, 4, ((2, 3), (2, 2), (2, 2))),
        (10, 4, 2, ((1, 2), (1, 2), (1, 1), (1, 1))),
        (3, 2, 1, ((2,), (1,))),
        (7, 1, 3, ((2, 2, 3),)),
    ],
)
def test_plans(batch: int, num_ranks: int, micro_batch: int, expected: tuple[tuple[int, ...], ...]) -> None:
    assert plan_step(batch, num_ranks, micro_batch).micro_batches == expected


@pytest.mark.parametrize(
    ("batch", "micro_batch", "weights", "remaining", "expected"),
    [
        (15, 4, (7.0, 1.0), 16, ((4, 4), (4, 4))),  # 14 and 2 would be of 7
        (15, 4, (7.0, 1.0), 13, ((3, 4), (3, 3))),  # 11 and 2 would be micro-batches of 6
        (15, 4, (7.0, 1.0), 12, ((5, 5), (1, 1))),
        (3, 1, (3.0, 1.0), 4, ((1, 1), (1, 1))),
    ],
)
def test_a_tail_has_equal_shares_where_weights_leave_none_that_can_be_cut(
    batch: int, micro_batch: int, weights: tuple[float, ...], remaining: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    plan = BatchPlan(global_batch=batch, num_ranks=2, micro_batch=micro_batch, weights=weights)
    step = plan.next_step(remaining)
    assert step is not None
    assert step.micro_batches == expected


def test_what_cannot_be_cut_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match="a global batch of 2 samples leaves some of 4 ranks without any; use at least 4"
    ):
        plan_step(2, 4, 1)
    with pytest.raises(ValueError, match="use a micro-batch of at least 17"):
        plan_step(18, 2, 2, share_weights=[1000.0, 1.0])
    with pytest.raises(ValueError, match="2 finite numbers > 0"):
        shares(4, 2, [1.0, math.nan])


@pytest.mark.parametrize(("batch", "quantum", "expected"), [(10, 4, (8, 12)), (3, 4, (4,)), (8, 4, (12,))])
def test_the_nearest_batches(batch: int, quantum: int, expected: tuple[int, ...]) -> None:
    assert nearest_batches(batch, quantum) == expected
