"""Micro-batches that are tried larger: they stay so where memory suffices, and else are as before, and remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_ext import ElasticError, Proposal
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.torch_private.out_of_memory import is_out_of_memory
from elastic_ext.training.steps.device_memory import Pressure, warning_of
from tests.support.ranks import RankPool
from tests.support.shortage import Short, Shortage
from tests.support.training import Slices, make_data

GIB = 1 << 30


def grow(run: Short, num_steps: int = 3) -> Proposal:
    """Ask on all ranks, and go on until it is decided and was tried."""
    proposal: Proposal = run.trainer.try_grow()
    run.train(run.trainer.global_step + num_steps)
    return proposal


def to_the_limit(rank: int, folder: Path) -> tuple[list[int], list[str]]:
    """Twice as large until memory does not suffice, and no more after that; another plan may try again."""
    limit = Shortage(limit=8) if rank == 0 else Shortage()
    run = Short(rank, folder, batch_size=2, has_moods=False, num_micro_steps=32, shortage=limit)
    sizes, refusals = [], []
    with run.trainer:
        run.train(4)  # which are guarded, as the script has started
        for _ in range(5):
            proposal = grow(run)
            refusals.append(proposal.refusal)
            sizes.append(run.trainer.config.dataloader.batch_size)
        assert run.trainer._training.growing.bound == 16
        assert limit.num_times == (rank == 0)
    return sizes, refusals


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_growth_ends_at_what_did_not_fit_and_is_not_tried_again(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    for sizes, refusals in ranks.run(num_ranks, to_the_limit, tmp_path):
        assert sizes == [4, 8, 8, 8, 8]
        assert refusals[:3] == ["", "", ""]
        assert set(refusals[3:]) == {"memory ran out with 16 samples at once, and 16 would be no fewer"}


def test_growth_ends_at_a_ranks_part_of_the_step(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=6, global_batch_size=16)
    with run.trainer:
        run.train(1)
        assert grow(run).outcome == "in force"
        assert run.trainer.config.dataloader.batch_size == 12
        assert grow(run).outcome == "in force"
        assert run.trainer.config.dataloader.batch_size == 16
        assert grow(run).refusal == "a micro-batch is a rank's whole part of the global batch already: 16 samples"


def test_a_loader_with_a_size_of_its_own_does_not_grow(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_data(64)), batch_size=8)
    run = Short(0, tmp_path, batch_size=8, loader=data)
    with run.trainer, pytest.raises(ElasticError, match="use ElasticDataLoader"):
        run.trainer.try_grow()


def in_another_plan(rank: int, folder: Path) -> list[str]:
    """What did not fit by one plan may fit by another."""
    limit = Shortage(limit=4)
    run = Short(rank, folder, batch_size=4, has_moods=False, global_batch_size=32, shortage=limit)
    with run.trainer:
        run.train(4)
        assert grow(run).outcome == "in force"
        assert run.trainer.config.dataloader.batch_size == 4
        told = [grow(run).refusal]
        limit.limit = None
        run.trainer.reshard(ParallelPlan(strategy="no_shard", activation_checkpoint=0, bucket_cap_mb=1.0))
        run.train(run.trainer.global_step + 3)
        told.append(grow(run).refusal)
        assert run.trainer.config.dataloader.batch_size == 8
    return told


def test_what_did_not_fit_by_one_plan_is_tried_by_another(ranks: RankPool, tmp_path: Path) -> None:
    for before, after in ranks.run(2, in_another_plan, tmp_path):
        assert before.startswith("memory ran out with 8 samples at once")
        assert after == ""


def sharded(model: nn.Module) -> Any:
    return fully_shard(model)


def without_room(rank: int, folder: Path, num_free: int) -> tuple[int, str]:
    """A sharded model cannot take a step again: it is found out before whether there is room, on all ranks."""
    run = Short(rank, folder, batch_size=4, has_moods=False, global_batch_size=32, wrap=sharded)
    asked: list[int] = []
    with run.trainer:
        run.train(2)
        memory = run.trainer._training.growing._memory
        memory.per_sample = float(GIB)

        def has_room(num_bytes: int) -> bool:
            asked.append(num_bytes)
            return rank == 0 or num_bytes <= num_free

        memory.has_room = has_room
        proposal = grow(run)
        assert asked == [8 * GIB]
        run.trainer.propose({"dataloader.batch_size": 2}, "less")  # for which nobody asks
        run.train(run.trainer.global_step + 3)
        assert asked == [8 * GIB]
        assert run.trainer.config.dataloader.batch_size == 2
    return (proposal.outcome == "in force"), proposal.refusal


def test_growth_is_refused_on_all_ranks_where_one_has_no_room_for_it(ranks: RankPool, tmp_path: Path) -> None:
    for is_done, refusal in ranks.run(2, without_room, tmp_path, 8 * GIB - 1):
        assert not is_done
        assert refusal.endswith(
            "rank 1: dataloader: 8 samples at once are expected to take 8.00 GiB on cpu, beside what lies there "
            "between steps, and there is not as much"
        )


def test_growth_is_made_where_all_ranks_have_room_for_it(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, without_room, tmp_path, 8 * GIB) == [(True, "")] * 2


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (Pressure(), Pressure(), None),
        (Pressure(num_retries=2), Pressure(num_retries=2, reserved_bytes=10 * GIB), None),
        (Pressure(), Pressure(num_retries=1, allocated_bytes=9 * GIB, reserved_bytes=10 * GIB), "nearly used up"),
        (
            Pressure(num_retries=1),
            Pressure(num_retries=4, allocated_bytes=6 * GIB, reserved_bytes=10 * GIB),
            "3 time(s) to find some, and 4.0 of 10.0 GiB were in pieces too small to use; PYTORCH_CUDA_ALLOC_CONF=exp",
        ),
        (Pressure(), Pressure(num_failures=1, reserved_bytes=GIB), "expandable_segments:True"),
    ],
)
def test_an_allocator_under_pressure_is_told_of_and_fragmentation_named(
    before: Pressure, now: Pressure, words: str | None
) -> None:
    told = warning_of(before, now)
    assert (told is None) is (words is None)
    assert words is None or words in str(told)


def test_what_torch_counts_is_read_as_it_names_it() -> None:
    stats = {"num_alloc_retries": 2, "num_ooms": 1, "allocated_bytes.all.peak": 3, "reserved_bytes.all.peak": 4}
    assert Pressure.of(stats) == Pressure(num_retries=2, num_failures=1, allocated_bytes=3, reserved_bytes=4)
    assert Pressure.of({}) == Pressure()


def pending(rank: int, folder: Path) -> list[tuple[int, ...]]:
    """Memory runs out with what there is while more has been asked for."""
    shortage = Shortage(phase="in backward", at=(4, 0)) if rank == 1 else Shortage()
    given: dict[str, Any] = {"shortage": shortage, "agree_every_steps": 3, "guard": "always"}
    run = Short(rank, folder, batch_size=8, has_moods=False, global_batch_size=32 * 2, **given)
    with run.trainer:
        run.train(4)
        proposal = run.trainer.try_grow()
        run.train(12)
    assert proposal.outcome == "refused"
    assert "memory ran out with 8 samples at once" in proposal.refusal
    sizes: list[tuple[int, ...]] = run.loader.sizes
    return sizes


def test_more_that_was_asked_for_before_memory_ran_out_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for sizes in ranks.run(2, pending, tmp_path):
        assert sizes == [(8,) * 4] * 4 + [(4,) * 8] * 8


def test_a_tail_that_did_not_fit_is_no_bound(tmp_path: Path) -> None:
    shortage = Shortage(phase="in backward", at=(3, 0))
    run = Short(
        0, tmp_path, batch_size=8, loader=Slices(make_data(27), 8), has_moods=False, shortage=shortage, guard="always"
    )
    trainer = run.trainer
    with trainer:
        for epoch in range(3):
            with trainer.epoch(epoch):
                for batch in run.loader:
                    run._micro_step = trainer._training.state.index
                    trainer.run(run.micro_step, *batch)
        assert shortage.num_times == 1
        assert run.loader.sizes[:5] == [(8,), (8,), (8,), (1, 2), (2, 2, 2, 2)]
        assert trainer._training.growing.bound is None


def test_uneven_parts_are_halved_until_fewer_are_taken_at_once(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, global_batch_size=10, shortage=Shortage(limit=4), has_moods=False)
    with run.trainer:
        run.train(2)
    assert run.loader.sizes == [(3, 3, 4)] * 2


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), False),  # its group is gone
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_a_rank_that_joins_knows_what_did_not_fit_there(tmp_path: Path) -> None:
    run = Short(0, tmp_path / "one", batch_size=4, has_moods=False, num_micro_steps=8, shortage=Shortage(limit=2))
    with run.trainer:
        run.train(2)
        growing = run.trainer._training.growing
        assert growing.has_shrunk and growing.bound == 4
        told = json.loads(json.dumps(growing.tell()))
    other = Short(0, tmp_path / "other", batch_size=4)
    with other.trainer:
        joiner = other.trainer._training.growing
        assert not joiner.has_shrunk
        joiner.join(told)
        assert joiner.has_shrunk and joiner.bound == 4 and joiner.tell() == told
    plan = ParallelPlan(strategy="hybrid_shard", shard_degree=2)
    growing._bounds[plan] = 8
    joiner.join(json.loads(json.dumps(growing.tell())))
    assert joiner._bounds[plan] == 8
