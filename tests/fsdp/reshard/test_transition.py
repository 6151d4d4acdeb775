"""transition: the steps from each plan to each other one, what they move, and why some cannot be."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext import ParallelPlan
from elastic_ext.fsdp.reshard.buckets import BucketItem, BucketPlan
from elastic_ext.fsdp.reshard.transition import Tensor, TransferRates, Transition, transition
from elastic_ext.fsdp.worlds import Worlds
from tests.support.layouts import Array, any_worlds, carry, memory_of, tensor_of

WHOLE = ParallelPlan(strategy="no_shard")
GRAD_OP = ParallelPlan(strategy="shard_grad_op")
FULL = ParallelPlan(strategy="full_shard")
HYBRID = ParallelPlan(strategy="hybrid_shard", shard_degree=2)
KEPT = ParallelPlan(strategy="hybrid_shard", shard_degree=1)
PLANS = {"whole": WHOLE, "grad_op": GRAD_OP, "full": FULL, "hybrid": HYBRID, "kept": KEPT}
SHAPES = [(7, 3), (1,), (4,), (2, 0), (9, 2, 2)]


def _made(
    old: ParallelPlan, new: ParallelPlan, tensors: Sequence[Tensor] = (), *, num_ranks: int = 4, **options: Any
) -> Transition:
    made, told = transition(old, new, tensors, worlds=Worlds.unchanged(num_ranks, num_ranks), **options)
    assert made is not None, told
    assert told == str(made)
    return made


def _least_bytes(old: ParallelPlan, new: ParallelPlan, tensors: Sequence[Tensor], num_ranks: int) -> int:
    """Found another way: for each rank, the elements that it is to have, and has not."""
    total = 0
    for tensor in tensors:
        numbers = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
        before, after = (_parts(plan, numbers, tensor.dim, num_ranks) for plan in (old, new))
        total += sum(len(wanted - had) for had, wanted in zip(before, after, strict=True)) * tensor.item_bytes
    return total


def _parts(plan: ParallelPlan, numbers: Any, dim: int, num_ranks: int) -> list[set[int]]:
    """The elements of each rank, by number: as DDP and fully_shard have them."""
    shard = {"no_shard": 1, "hybrid_shard": plan.shard_degree}.get(plan.strategy, num_ranks)
    assert shard is not None
    rows = -(-numbers.shape[dim] // shard)
    parts = [
        set(np.take(numbers, range(*slice(part * rows, (part + 1) * rows).indices(numbers.shape[dim])), dim).flatten())
        for part in range(shard)
    ]
    return [parts[rank % shard] for rank in range(num_ranks)]


# --- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), list(itertools.product(PLANS, PLANS)))
def test_steps_between_strategies(old: str, new: str) -> None:
    made = _made(PLANS[old], PLANS[new], [Tensor("weight", (8, 2), 4)])
    expected: tuple[str, ...] = ("spread",)
    if old == new:
        expected = ()
    elif {old, new} == {"full", "grad_op"}:
        expected = ("gather",)
    assert made.steps == expected
    assert made.replaces is ((old == "whole") is not (new == "whole"))
    assert made.sent_bytes == (0 if old in ("whole", "kept") else _least_bytes(PLANS[old], PLANS[new], _one(), 4))


def _one() -> list[Tensor]:
    return [Tensor("weight", (8, 2), 4)]


@pytest.mark.parametrize(
    ("old", "changes", "steps"),
    [
        (FULL, {}, ()),
        (FULL, {"unit": 2}, ("spread",)),
        (FULL, {"unit": "whole"}, ("spread",)),
        (FULL, {"prefetch": 2}, ("prefetch",)),
        (FULL, {"activation_checkpoint": 0.5}, ("recompute",)),
        (FULL, {"bucket_cap_mb": 4}, ()),
        (FULL, {"shard_degree": 4}, ()),
        (
            FULL,
            {"strategy": "shard_grad_op", "prefetch": 1, "activation_checkpoint": 1},
            ("gather", "prefetch", "recompute"),
        ),
        (FULL, {"unit": 2, "prefetch": 1, "activation_checkpoint": 1}, ("spread", "recompute")),
        (WHOLE, {"unit": 2}, ()),
        (WHOLE, {"prefetch": 2}, ()),
        (WHOLE, {"bucket_cap_mb": 4}, ("buckets",)),
        (WHOLE, {"bucket_cap_mb": 4, "activation_checkpoint": 1}, ("buckets", "recompute")),
        (WHOLE, {"strategy": "full_shard", "activation_checkpoint": 1, "unit": 2}, ("spread", "recompute")),
        (HYBRID, {"shard_degree": 4}, ("spread",)),
        (ParallelPlan(strategy="hybrid_shard", shard_degree=4), {"strategy": "full_shard", "shard_degree": None}, ()),
        (GRAD_OP, {"strategy": "hybrid_shard", "shard_degree": 4}, ("gather",)),
    ],
)
def test_steps_are_those_that_make_a_difference_in_their_order(
    old: ParallelPlan, changes: dict[str, Any], steps: tuple[str, ...]
) -> None:
    made = _made(old, replace(old, **changes))
    assert made.steps == steps
    assert str(made).startswith(", ".join(steps) if steps else "nothing changes")


def test_a_change_of_units_moves_nothing_between_ranks() -> None:
    made = _made(FULL, replace(FULL, unit=2), [Tensor("weight", (8, 2), 4)])
    assert (made.sent_bytes, made.extra_bytes) == (0, 0)


# --- bytes ----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 3, 4, 6]),
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    st.data(),
)
def test_bytes_are_the_least_there_can_be(num_ranks: int, shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    degrees = [degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0]
    hybrid = [ParallelPlan(strategy="hybrid_shard", shard_degree=degree) for degree in degrees]
    plans = st.sampled_from([WHOLE, GRAD_OP, FULL, *hybrid])
    old, new = data.draw(plans), data.draw(plans)
    tensors = [
        Tensor(f"weight {at}", shape, data.draw(st.sampled_from([1, 2, 4, 8]))) for at, shape in enumerate(shapes)
    ]
    made = _made(old, new, tensors, num_ranks=num_ranks)
    assert made.sent_bytes == (_least_bytes(old, new, tensors, num_ranks) if "spread" in made.steps else 0)
    assert made.sent_bytes == sum(item.sent_bytes for item in made.items)


def test_tensors_that_are_cut_along_another_dimension_are_moved_along_that() -> None:
    tensors = [Tensor("weight", (3, 8), 4, dim=1)]
    for old, new in itertools.permutations((FULL, HYBRID, WHOLE), 2):
        assert _made(old, new, tensors).sent_bytes == _least_bytes(old, new, tensors, 4)


def test_extra_bytes_are_those_of_the_largest_bucket_and_grow_with_what_a_bucket_may_take() -> None:
    tensors = [Tensor(f"weight {at}", (64, 4), 4) for at in range(8)]
    loads = [_made(FULL, WHOLE, tensors, bucket_bytes=size).extra_bytes for size in (1, 2000, 1 << 20)]
    one, all_of_them = (
        BucketPlan(items, 1 << 20).extra_bytes
        for made in [_made(FULL, WHOLE, tensors)]
        for items in (made.items[:1], made.items)
    )
    assert loads[0] == one
    assert one <= loads[1] <= max(one, 4000)
    assert loads[2] == all_of_them


def test_seconds_follow_the_busiest_rank_and_the_number_of_tensors() -> None:
    tensors = [Tensor("weight", (64, 4), 4), Tensor("bias", (64,), 4)]
    made = _made(FULL, WHOLE, tensors, pace=TransferRates(bytes_per_second=1000.0, seconds_per_tensor=0.5))
    busiest = max(
        map(sum, zip(*(map(add, item.exchanged_bytes, item.taken_bytes) for item in made.items), strict=True))
    )
    assert made.seconds == busiest / 1000.0 + 2 * 0.5
    slower = _made(FULL, WHOLE, tensors, pace=TransferRates(bytes_per_second=500.0, seconds_per_tensor=0.5))
    assert slower.seconds > made.seconds
    assert _made(FULL, replace(FULL, prefetch=1), tensors).seconds == 0


@given(any_worlds(), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), st.data())
def test_ranks_that_come_and_leave_have_every_element_arrive_once_and_none_that_lies_there_already(
    worlds: Worlds, shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    both = math.gcd(worlds.num_old, worlds.num_new)
    hybrid = [ParallelPlan("hybrid_shard", degree) for degree in range(1, both + 1) if both % degree == 0]
    plan = data.draw(st.sampled_from([WHOLE, GRAD_OP, FULL, *hybrid]))
    tensors = [Tensor(f"weight {at}", shape, data.draw(st.sampled_from([1, 4]))) for at, shape in enumerate(shapes)]
    made, told = transition(plan, plan, tensors, worlds=worlds)
    assert made is not None, told
    assert (made.steps, made.replaces) == (() if worlds.is_same else ("spread",), False)
    assert len(made.given) == (len(tensors) if worlds.has_leavers else 0)
    stages = [stage for stage in (made.given, made.items) if stage]
    for at, tensor in enumerate(tensors if stages else ()):
        whole = tensor_of(tensor.shape)
        here = [memory_of(whole, box) for box in stages[0][at].old.boxes]
        direct = _not_had(plan, whole, worlds)
        sent = 0
        for item in (stage[at] for stage in stages):
            here, num_sent = _moved(item, whole, here)
            assert item.sent_bytes == num_sent * tensor.item_bytes
            sent += num_sent
        assert sent == direct or (worlds.has_leavers and worlds.has_comers and sent >= direct)
        for rank, held in zip(worlds.new, here, strict=True):
            parts = _parts(plan, whole, 0, worlds.num_new)
            assert set(held.tolist()) == (set() if rank is None else parts[rank])
    assert made.sent_bytes == sum(item.sent_bytes for stage in stages for item in stage)


def _moved(item: BucketItem, whole: Array, here: Sequence[Array]) -> tuple[list[Array], int]:
    """The memory of each holder after the moves, and how many elements went from one to another: the least there is."""
    boxes = list(zip(item.old.boxes, item.new.boxes, strict=True))
    stays = [old == new for old, new in boxes]
    after = [
        held if stay else np.zeros(new.num_elements, dtype=np.int64)
        for held, stay, (_, new) in zip(here, stays, boxes, strict=True)
    ]
    counts = carry(item.moves, here, after)
    for stay, count, held, (old, new) in zip(stays, counts, after, boxes, strict=True):
        assert np.all(count == int(not stay)), (old, new)
        assert np.array_equal(held, memory_of(whole, new))
    sent = sum(move.num_elements for move in item.moves if move.source != move.target)
    least = sum(len({*memory_of(whole, new).tolist()} - {*memory_of(whole, old).tolist()}) for old, new in boxes)
    assert sent == least
    return after, sent


def _not_had(plan: ParallelPlan, whole: Array, worlds: Worlds) -> int:
    """Found another way: how many elements ranks of the new world are to have, and have not had in the old one."""
    before, after = (_parts(plan, whole, 0, number) for number in (worlds.num_old, worlds.num_new))
    return sum(
        len(after[new] - (set() if old is None else before[old]))
        for old, new in zip(worlds.old, worlds.new, strict=True)
        if new is not None
    )


@pytest.mark.parametrize("plan", [WHOLE, KEPT, HYBRID], ids=lambda plan: plan.strategy)
def test_whole_copies_come_from_all_who_have_them_in_equal_parts(plan: ParallelPlan) -> None:
    worlds = Worlds.between("abcd", "abcdef", num_local=(4, 6))
    tensors = [Tensor(f"weight {at}", (1 << 10, 1 << 8), 4) for at in range(8)]
    made, told = transition(plan, plan, tensors, worlds=worlds)
    assert made is not None, told
    given = [0] * 4
    for item in made.items:
        for move in item.moves:
            if move.source != move.target:
                given[move.source] += move.num_elements * item.item_bytes
    assert sum(given) == made.sent_bytes > 0
    assert max(given) <= 1.1 * sum(given) / 4


def test_a_plan_that_does_not_fit_the_new_world_is_refused_in_words() -> None:
    made, told = transition(HYBRID, HYBRID, [], worlds=Worlds.between("abcd", "abc", num_local=(4, 3)))
    assert made is None
    assert "shard_degree: 2 does not divide the 3 ranks; allowed: 1, 3" in told


def test_the_pace_of_a_change_is_that_of_the_next_estimate() -> None:
    tensors = [Tensor(f"weight {at}", (1024, 1024), 4) for at in range(4)]
    made = _made(FULL, WHOLE, tensors)
    seen = TransferRates().after(made.bucket_plan, wiring_seconds=0.25, moving_seconds=2.0)
    assert _made(FULL, WHOLE, tensors, pace=seen).seconds == pytest.approx(2.25)
    small = _made(FULL, WHOLE, _one())
    assert seen.after(small.bucket_plan, wiring_seconds=0.5, moving_seconds=9.0) == replace(
        seen, seconds_per_tensor=0.5
    )
    assert seen.after(_made(FULL, FULL).bucket_plan, wiring_seconds=9.0, moving_seconds=9.0) == seen


def test_words_tell_steps_tensors_bytes_and_seconds() -> None:
    made = _made(FULL, WHOLE, _one(), pace=TransferRates(bytes_per_second=1000.0, seconds_per_tensor=0.1))
    assert str(made) == f"spread: 1 tensors, {made.sent_bytes} bytes between ranks, about {made.seconds:.2g} s"
    assert str(_made(FULL, FULL)) == "nothing changes"
    assert str(_made(FULL, replace(FULL, prefetch=1, activation_checkpoint=1))) == "prefetch, recompute"


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "num_ranks", "words"),
    [
        (ParallelPlan(strategy="hybrid_shard", shard_degree=3), 4, "shard_degree: 3 does not divide the 4 ranks"),
        (ParallelPlan(strategy="full_shard", shard_degree=2), 4, "shard_degree is 2 with the strategy full_shard"),
    ],
)
def test_plans_that_do_not_fit_the_ranks_are_refused_in_words(new: ParallelPlan, num_ranks: int, words: str) -> None:
    made, told = transition(WHOLE, new, [], worlds=Worlds.unchanged(num_ranks, num_ranks))
    assert made is None
    assert re.match(words, told)


def test_hybrid_without_a_degree_has_a_machine_share_a_copy() -> None:
    plan = ParallelPlan(strategy="hybrid_shard")
    made, _ = transition(FULL, plan, _one(), worlds=Worlds.unchanged(4, 2))
    assert made is not None
    assert made.sent_bytes == _least_bytes(FULL, HYBRID, _one(), 4)
    made, told = transition(FULL, plan, _one(), worlds=Worlds.unchanged(4, 3))
    assert made is None
    assert "the ranks of a machine: 3 does not divide the 4 ranks" in told


def test_a_dimension_that_cannot_be_shared_out_evenly_is_refused_unless_it_is_the_first() -> None:
    uneven = [Tensor("head.weight", (4, 6), 4, dim=1)]
    made, told = transition(HYBRID, FULL, uneven, worlds=Worlds.unchanged(4, 4))
    assert made is None
    assert "head.weight is cut along dimension 1, whose size 6 cannot be shared out evenly over 4 ranks" in told
    assert transition(HYBRID, WHOLE, uneven, worlds=Worlds.unchanged(4, 4))[0] is not None
    assert transition(HYBRID, replace(HYBRID, prefetch=1), uneven, worlds=Worlds.unchanged(4, 4))[0] is not None
    assert transition(HYBRID, FULL, [Tensor("weight", (6, 4), 4)], worlds=Worlds.unchanged(4, 4))[0] is not None
