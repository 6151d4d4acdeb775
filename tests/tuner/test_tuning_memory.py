"""The most that a device would hold at a point, and whether that may be tried."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated_cases import DEVELOPMENT_SEEDS
from benchmarks.simulated_job import SimulatedJob
from elastic_ext.records.metrics import JobFacts, MemoryFacts, PassesMemory
from elastic_ext.tuner.memory import JobMemory
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import made_facts
from tests.support.thinning import the_first

GIB = 2**30
START = {"parallelism.strategy": "no_shard"}


def _passes(micro_batch: int, ratio: float = 0.0, **parts: int) -> PassesMemory:
    sizes = {"forward_bytes": 100, "loss_bytes": 120, "backward_bytes": 110, **parts}
    sizes = {name: size * micro_batch for name, size in sizes.items()}
    return PassesMemory(micro_batch=micro_batch, activation_checkpoint=ratio, **sizes)


def _memory(**changes: Any) -> MemoryFacts:
    facts: dict[str, Any] = {
        "source": "fake",
        "parameter_bytes": 1000,
        "gradient_bytes": 1000,
        "optimizer_bytes": 2000,
        "buffer_bytes": 10,
        "block_bytes": 50,
        "other_bytes": 400,
        "passes": (_passes(1), _passes(64)),
    }
    return MemoryFacts(**{**facts, **changes})


def _facts(memory: MemoryFacts | None, **changes: Any) -> JobFacts:
    return made_facts(**{"memory": memory, "device": "cuda", "values": START, **changes})


def _point(facts: JobFacts, **changes: Any) -> Point:
    return point_of(facts.values)._replace(**changes)


def _bytes(facts: JobFacts, **changes: Any) -> int:
    peak = JobMemory(facts).peak(_point(facts, **changes))
    assert peak is not None
    return peak.num_bytes


def test_state_and_passes_add_up_without_sharding() -> None:
    facts = _facts(_memory())
    buckets = 1000
    assert _bytes(facts, batch_size=64) == 1000 + 2000 + 10 + max(buckets + 120 * 64, buckets + 1000 + 110 * 64)
    assert _bytes(facts, batch_size=32) == 3010 + buckets + 1000 + 120 * 32, "gradients of earlier micro-steps"
    assert _bytes(_facts(_memory(), world_size=1), batch_size=32) == 3010 + 1000 + 120 * 32, "no buckets alone"


def test_sharding_divides_what_lies_there_between_steps() -> None:
    facts = _facts(_memory())
    gathered = 2 * 50 + 400
    assert _bytes(facts, strategy="full_shard", batch_size=64) == 3000 // 4 + 10 + gathered + 120 * 64
    of_unit = 50
    assert _bytes(facts, strategy="full_shard", batch_size=1) == 760 + gathered + 1000 + max(120, of_unit + 110)
    assert _bytes(facts, strategy="shard_grad_op", batch_size=64) == 760 + 1000 + 120 * 64
    assert _bytes(facts, strategy="hybrid_shard", shard_degree=2, batch_size=64) == 1510 + gathered + 120 * 64
    four = _bytes(facts, strategy="full_shard", unit=4, batch_size=64)
    assert four == 760 + 2 * 4 * 50 + 400 + max(120 * 64, 1000 // 4 + 2 * 4 * 50 + 110 * 64)


def test_the_peak_is_the_most_of_parts_that_lie_on_lines_each() -> None:
    """Logits are most in large micro-batches, the backward pass in small ones: a line through peaks would be wrong."""
    passes = (
        PassesMemory(micro_batch=1, activation_checkpoint=0.0, forward_bytes=0, loss_bytes=10, backward_bytes=5000),
        PassesMemory(micro_batch=3, activation_checkpoint=0.0, forward_bytes=0, loss_bytes=8010, backward_bytes=5200),
    )
    facts = _facts(_memory(passes=passes, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0), share=8)
    assert [_bytes(facts, batch_size=size) for size in (1, 2, 3, 5)] == [5010, 5110, 8020, 16020]


def test_shares_of_recomputed_blocks_lie_between_known_ones() -> None:
    facts = _facts(_memory(passes=(_passes(64), _passes(64, 1.0, forward_bytes=10, loss_bytes=12, backward_bytes=20))))
    all_kept, half, none_kept = (_bytes(facts, batch_size=64, activation_checkpoint=each) for each in (0.0, 0.5, 1.0))
    assert all_kept > half > none_kept
    assert half == 3010 + 1000 + max((120 + 12) * 32, 1000 + (110 + 20) * 32)


def test_what_is_known_for_one_share_bounds_the_others() -> None:
    """Where nobody knows, it is taken for more than it can be, and not for less."""
    less = _facts(_memory(source="measured", passes=(_passes(8, 1.0),)), num_blocks=12)
    assert _bytes(less, batch_size=8, activation_checkpoint=0.0) > 12 * 120 * 8
    plain = _facts(_memory(source="measured", passes=(_passes(8),)))
    known, guessed = (_bytes(plain, batch_size=8, activation_checkpoint=each) for each in (0.0, 1.0))
    assert 0.5 * 120 * 8 <= guessed - (known - 120 * 8) <= 120 * 8


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True),
    amounts=st.lists(st.tuples(*[st.integers(0, 10**9)] * 3), min_size=4, max_size=4),
    sharded=st.booleans(),
)
def test_more_samples_at_once_never_take_less(
    sizes: list[int], amounts: list[tuple[int, int, int]], sharded: bool
) -> None:
    """But for what comes of a step that is one micro-step, whose gradients are nowhere twice."""
    totals = [0, 0, 0]
    passes = []
    for size, more in zip(sorted(sizes), amounts, strict=False):
        totals = [before + each for before, each in zip(totals, more, strict=True)]
        forward, loss, backward = totals
        passes.append(
            PassesMemory(
                micro_batch=size,
                activation_checkpoint=0.0,
                forward_bytes=forward,
                loss_bytes=loss,
                backward_bytes=backward,
            )
        )
    facts = _facts(_memory(passes=tuple(passes)))
    strategy = "full_shard" if sharded else "no_shard"
    found = [_bytes(facts, strategy=strategy, batch_size=size) for size in range(1, 64)]
    assert found == sorted(found)


def test_some_memory_is_left_free_and_what_was_not_seen_is_not_believed_to_the_last_byte() -> None:
    facts = _facts(_memory(capacity_bytes=20_000))
    unseen = JobMemory(facts)
    assert not unseen.why_not(_point(facts, batch_size=64)), f"{_bytes(facts, batch_size=64)} of 20,000"
    tight = _facts(_memory(capacity_bytes=13_200))
    why = JobMemory(tight).why_not(_point(tight, batch_size=64))
    assert "64 samples at once by no_shard would take" in why
    seen = JobMemory(tight)
    seen.see(_point(tight, batch_size=16), _bytes(tight, batch_size=16))
    assert not seen.why_not(_point(tight, batch_size=64)), "it was right so far"
    assert JobMemory(tight, headroom=0.2).why_not(_point(tight, batch_size=64))


def test_a_peak_above_what_was_expected_raises_what_is_expected() -> None:
    facts = _facts(_memory(capacity_bytes=13_000))
    memory = JobMemory(facts)
    memory.see(_point(facts, batch_size=16), int(1.2 * _bytes(facts, batch_size=16)))
    expected = memory.expected_bytes(_point(facts, batch_size=64))
    assert expected is not None and abs(expected / _bytes(facts, batch_size=64) - 1.2) < 0.01
    assert memory.why_not(_point(facts, batch_size=64))
    memory.see(_point(facts, batch_size=1), int(1.2 * _bytes(facts, batch_size=16)))
    assert memory.expected_bytes(_point(facts, batch_size=64)) == expected, "that peak was of the steps before"


def test_a_peak_that_rises_at_a_point_counts_there_and_with_newer_facts() -> None:
    """As where sequences become longer, or the first report had no peak."""
    facts = _facts(_memory(capacity_bytes=14_000))
    for first in (_bytes(facts, batch_size=32), None):
        memory, point = JobMemory(facts), _point(facts, batch_size=32)
        memory.see(point, first)
        assert not memory.why_not(point)
        memory.see(point, int(1.8 * _bytes(facts, batch_size=32)))
        for each in (memory, JobMemory(facts, before=memory)):
            assert each.expected_bytes(point) == pytest.approx(1.8 * _bytes(facts, batch_size=32), abs=2)
            assert each.why_not(point)


def test_what_the_optimizer_takes_for_a_moment_is_counted_until_it_is_seen_not_to() -> None:
    memory = _memory(capacity_bytes=10**6, optimizer_bytes=0, parameter_bytes=10_000, gradient_bytes=0)
    facts = _facts(memory, world_size=1)
    found = JobMemory(facts)
    point = _point(facts, batch_size=1)
    assert found.expected_bytes(point) == 10_000 + 10 + 10_000
    found.see(point, 10_000 + 10 + 120)
    assert found.expected_bytes(point) == 10_000 + 10 + 120


def test_a_point_that_was_in_force_takes_no_more_than_was_ever_taken() -> None:
    facts = _facts(_memory(capacity_bytes=12_000))
    memory = JobMemory(facts)
    assert memory.why_not(_point(facts, batch_size=64))
    memory.see(_point(facts, batch_size=64), 11_000)
    assert not memory.why_not(_point(facts, batch_size=64))


def test_a_measured_peak_counts_for_all_points_that_take_as_much() -> None:
    facts = _facts(_memory(capacity_bytes=12_000), choices={"dataloader.num_workers": (0, 2, 4)})
    seen, alike = (_point(facts, batch_size=64, num_workers=workers) for workers in (2, 4))
    memory = JobMemory(facts)
    assert memory.why_not(seen) and memory.why_not(alike)
    memory.see(seen, 11_000)
    assert not memory.why_not(seen) and not memory.why_not(alike)
    unknown = JobMemory(_facts(_memory(capacity_bytes=12_000, passes=())))
    assert not unknown.why_not(_point(facts, num_workers=4)), "it takes what the present point takes"
    assert unknown.why_not(_point(facts, batch_size=2))


@pytest.mark.parametrize(("source", "is_tried"), [("measured", False), ("fake", True)])
def test_measured_passes_are_not_believed_far_beyond_what_was_measured(source: str, is_tried: bool) -> None:
    facts = _facts(_memory(source=source, capacity_bytes=10**6))
    memory = JobMemory(facts)
    memory.see(_point(facts, batch_size=4), None)
    assert not memory.why_not(_point(facts, batch_size=16))
    why = memory.why_not(_point(facts, batch_size=32))
    assert (not why) is is_tried
    assert is_tried or "8.0 times" in why


def test_worked_out_passes_grow_by_steps_where_memory_is_short() -> None:
    facts = _facts(_memory(capacity_bytes=14_000))
    memory = JobMemory(facts)
    memory.see(_point(facts, batch_size=4), None)
    memory.see(_point(facts, batch_size=4), 1)
    assert "times what any have taken" in memory.why_not(_point(facts, batch_size=64))
    memory.see(_point(facts, batch_size=16), None)
    assert not memory.why_not(_point(facts, batch_size=64))


def test_passes_that_are_larger_than_any_so_far_get_some_room_beside() -> None:
    facts = _facts(_memory())
    needed = _bytes(facts, batch_size=64)
    for size, fits in ((64, True), (32, False)):
        tight = _facts(_memory(capacity_bytes=int(needed / 0.94) + 10))
        memory = JobMemory(tight)
        memory.see(_point(tight, batch_size=size), _bytes(facts, batch_size=size))
        assert (not memory.why_not(_point(tight, batch_size=64, num_workers=1))) is fits


def test_what_did_not_fit_is_not_tried_again_nor_what_takes_as_much() -> None:
    facts = _facts(_memory(capacity_bytes=10**6), bound=32, values={**START, "dataloader.batch_size": 16})
    memory = JobMemory(facts)
    for size, fits in ((16, True), (31, True), (32, False), (64, False)):
        assert (not memory.why_not(_point(facts, batch_size=size))) is fits
    assert not memory.why_not(_point(facts, batch_size=32, strategy="full_shard")), "it takes less"
    plain = _facts(None, device="cpu", bound=32)
    assert "did not suffice for 32 samples" in JobMemory(plain).why_not(
        _point(plain, batch_size=64, strategy="full_shard")
    )


def test_a_bound_of_another_plan_is_remembered_with_that_plan() -> None:
    before = _facts(_memory(capacity_bytes=10**6), bound=32)
    after = _facts(_memory(capacity_bytes=10**6), values={**START, "parallelism.strategy": "full_shard"})
    memory = JobMemory(after, None, JobMemory(before))
    assert memory.why_not(_point(before, batch_size=32))
    assert not memory.why_not(_point(after, batch_size=32))


def test_memory_is_no_concern_where_there_is_no_limit() -> None:
    facts = _facts(_memory(), device="cpu")
    memory = JobMemory(facts)
    assert not memory.why_not(_point(facts, batch_size=64)) and memory.expected_bytes(_point(facts)) is None


@pytest.mark.parametrize("memory", [None, _memory(capacity_bytes=None), _memory(capacity_bytes=10**9, passes=())])
def test_an_accelerator_of_which_nothing_is_known_gets_no_more_than_it_has(memory: MemoryFacts | None) -> None:
    facts = _facts(memory, values={**START, "dataloader.batch_size": 8, "dataloader.num_workers": 0})
    found = JobMemory(facts)
    assert found.expected_bytes(_point(facts)) is None
    assert not found.why_not(_point(facts))
    assert found.why_not(_point(facts, batch_size=16)) and found.why_not(_point(facts, strategy="full_shard"))


@pytest.mark.parametrize("seed", the_first(DEVELOPMENT_SEEDS[:12], 5))
def test_what_is_expected_of_simulated_jobs_is_not_too_little(seed: int) -> None:
    job = SimulatedJob(seed)
    seen = [job.step() for _ in range(6)]
    memory = JobMemory(job.facts)
    memory.see(job.point, seen[-1].peak_bytes if seen[-1] else None)
    points = job.space.points[:: max(len(job.space.points) // 100, 1)]
    for point in points:
        expected = memory.expected_bytes(point)
        assert expected is not None
        assert expected >= 0.94 * job.bytes_of(point), point


def test_each_unit_that_is_gathered_ahead_is_whole_beside_the_one_in_use() -> None:
    facts = _facts(_memory(), num_blocks=12, values={**START, "parallelism.strategy": "full_shard"})
    none, usual, one, two = (_bytes(facts, batch_size=64, prefetch=ahead) for ahead in (0, "torch", 1, 2))
    assert usual == one and one - none == two - one == 50
    many, all_of_them = (_bytes(facts, batch_size=64, prefetch=ahead) for ahead in (12, 40))
    assert many == all_of_them, "there are no more"
