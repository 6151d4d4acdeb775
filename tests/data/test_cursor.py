"""One number says how far an epoch has come: from there any ranks go on, and no sample is lost or repeated."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.order import Chunk, Cursor, chunks, num_chunks


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    num_ranks = draw(st.integers(1, 5))
    weights = draw(st.none() | st.lists(st.floats(0.5, 2), min_size=num_ranks, max_size=num_ranks).map(tuple))
    batch, micro_batch = draw(st.integers(num_ranks, 40)), draw(st.integers(1, 12))
    drop_last = draw(st.booleans())
    try:
        return BatchPlan(
            global_batch=batch, num_ranks=num_ranks, micro_batch=micro_batch, weights=weights, drop_last=drop_last
        )
    except ValueError:  # shares that cannot be cut so
        return BatchPlan(global_batch=batch, num_ranks=num_ranks, micro_batch=micro_batch, drop_last=drop_last)


@settings(max_examples=50)
@given(num_samples=st.integers(0, 200), data=st.data())
def test_ranks_and_sizes_that_change_take_every_sample_once(num_samples: int, data: st.DataObject) -> None:
    position, taken = 0, list[int]()
    while True:
        plan = data.draw(plans())
        cursors = [Cursor(num_samples, position=position) for _ in range(plan.num_ranks)]
        streams = [chunks(plan, rank, position=position, num_samples=num_samples) for rank in range(plan.num_ranks)]
        num_steps, is_rolled_back = data.draw(st.integers(0, 3)), data.draw(st.booleans())
        handed: list[int] = []
        for micro_step in zip(*streams, strict=True):
            for cursor, chunk in zip(cursors, micro_step, strict=True):
                assert chunk.num_samples > 0
                handed += range(chunk.start, chunk.stop)
                cursor.hand_out(chunk)
            assert len({(chunk.micro_step_stop, chunk.ends_step) for chunk in micro_step}) == 1
            if micro_step[0].ends_step:
                for cursor in cursors:
                    cursor.commit()
                taken += handed
                handed = []
                num_steps -= 1
                if num_steps < 0:
                    break
        else:
            left = num_samples - cursors[0].committed
            assert left < plan.num_ranks or (plan.drop_last and left < plan.global_batch)
            assert taken == list(range(num_samples - left))
            return
        if is_rolled_back:
            for cursor in cursors:
                cursor.rollback()
        assert {cursor.committed for cursor in cursors} == {len(taken)}
        position = cursors[0].committed


def test_what_is_cut_at_a_step_goes_on_as_it_would_have() -> None:
    plan = BatchPlan(global_batch=7, num_ranks=2, micro_batch=2)
    whole = list(chunks(plan, 1, position=0, num_samples=40))
    for number, chunk in enumerate(whole):
        if chunk.ends_step:
            assert list(chunks(plan, 1, position=chunk.micro_step_stop, num_samples=40)) == whole[number + 1 :]


def test_an_epoch_that_never_ends_goes_on() -> None:
    plan = BatchPlan(global_batch=4, num_ranks=2, micro_batch=2)
    found = list(itertools.islice(chunks(plan, 0, position=0, num_samples=None), 3))
    assert found == [Chunk(start, start + 2, start + 4, ends_step=True) for start in (0, 4, 8)]
    assert Cursor(None).remaining is None


def test_what_is_not_committed_comes_again() -> None:
    cursor = Cursor(10)
    assert not cursor.commit() and not cursor.rollback()
    cursor.hand_out(Chunk(0, 2, 4, ends_step=False))
    assert cursor.rollback() and (cursor.handed, cursor.remaining) == (0, 10)
    cursor.hand_out(Chunk(0, 2, 4, ends_step=True))
    assert cursor.commit() and not cursor.rollback() and cursor.remaining == 6


@pytest.mark.parametrize("position", [-1, 11])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=f"the position is {position}; allowed: 0 to 10"):
        Cursor(10, position=position)


@given(num_samples=st.integers(0, 300), plan=plans())
def test_the_number_of_micro_batches_is_known_beforehand(num_samples: int, plan: BatchPlan) -> None:
    for rank in range(plan.num_ranks):
        found = chunks(plan, rank, position=0, num_samples=num_samples)
        assert num_chunks(plan, rank, num_samples) == len(list(found))


def test_a_plan_that_is_not_even_takes_a_tail_at_once_also_where_a_full_step_has_several_micro_steps() -> None:
    plan = BatchPlan(global_batch=9, num_ranks=2, micro_batch=2, is_even=False)
    assert plan.full_step.micro_batches == ((1, 2, 2), (1, 1, 2))
    steps = [plan.next_step(num_samples) for num_samples in range(1, 9)]
    taken = [(step.global_batch, sum(map(sum, step.micro_batches))) for step in steps if step is not None]
    assert taken == [(num_samples, num_samples) for num_samples in range(1, 9)]


@given(
    num_samples=st.integers(0, 100), shares=st.lists(st.integers(1, 5), min_size=1, max_size=5), size=st.integers(1, 4)
)
def test_a_plan_that_is_not_even_takes_all_and_no_more_at_once_than_a_full_step(
    num_samples: int, shares: list[int], size: int
) -> None:
    plan = BatchPlan(
        global_batch=size * sum(shares),
        num_ranks=len(shares),
        micro_batch=size * max(shares),
        weights=tuple(shares),
        is_even=False,
    )
    found = [list(chunks(plan, rank, position=0, num_samples=num_samples)) for rank in range(len(shares))]
    assert [num_chunks(plan, rank, num_samples) for rank in range(len(shares))] == [len(mine) for mine in found]
    for mine, share in zip(found, shares, strict=True):
        assert all(0 < chunk.num_samples <= size * share for chunk in mine)
    everything = sorted((chunk.start, chunk.stop) for mine in found for chunk in mine)
    assert sorted(position for start, stop in everything for position in range(start, stop)) == list(range(num_samples))
    fewest, most = min(map(len, found)), max(map(len, found))
    assert most - fewest <= 1
    assert most == fewest or 0 < num_samples % plan.global_batch < len(shares)
