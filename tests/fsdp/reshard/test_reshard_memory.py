"""Memory while a model is spread otherwise: what ranks hold at each exchange, with gradients that a unit has in one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.regrouping import Members
from tests.support.resharding import FULL, HYBRID, KEPT, WHOLE, change, make

WIDTH, NUM_BLOCKS = 64, 8
LARGEST = WIDTH * WIDTH * 4  # bytes of a tensor
BUCKET = 2 * LARGEST


def _held() -> int:
    """Bytes of all tensors of some size, each memory once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            if local.device.type != "meta" and local.untyped_storage().nbytes() >= WIDTH * WIDTH:
                found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(found.values())


def _measured(rank: int, old: ParallelPlan, new: ParallelPlan) -> int:
    """The most that was held while it changed, over the larger of before and after."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))
    spread, optimizer = make(old, model=model, bucket_bytes=BUCKET)
    _take_step(spread, optimizer)
    gradients = [part.grad for part in model.parameters() if part.grad is not None]
    assert len(gradients) == NUM_BLOCKS
    if not old.is_replicated:  # or there would be nothing to see
        assert len({each.to_local().untyped_storage().data_ptr() for each in gradients}) == 1  # type: ignore[attr-defined]
    del gradients
    over = _most_held_over(lambda: change(spread, new, optimizer))
    assert all(part.grad is not None for part in model.parameters())
    spread.close()
    return over


def _take_step(spread: Spread, optimizer: Optimizer) -> None:
    spread.model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()


def _most_held_over(act: Callable[[], object]) -> int:
    """The most that is held at an exchange while something is done, over the larger of before and after."""
    before, seen, real = _held(), [0], dist.all_to_all_single

    def exchange(*given: Any, **options: Any) -> Any:
        seen.append(_held())
        return real(*given, **options)

    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(dist, "all_to_all_single", exchange)
        act()
    assert len(seen) > 4
    return max(seen) - max(before, _held())


@pytest.mark.parametrize(
    ("num_ranks", "old", "new"),
    [
        (2, ParallelPlan("full_shard", unit="whole"), KEPT),
        (2, ParallelPlan("full_shard", unit="whole"), WHOLE),
        (4, ParallelPlan("hybrid_shard", 2, unit="whole"), FULL),
    ],
)
def test_no_more_is_held_than_before_or_after_and_two_buckets(
    ranks: RankPool, num_ranks: int, old: ParallelPlan, new: ParallelPlan
) -> None:
    for over in ranks.run(num_ranks, _measured, old, new):
        assert over <= 2 * BUCKET + LARGEST


def _measured_regroup(rank: int, port: int, plan: ParallelPlan, worlds: list[list[int]]) -> int:
    """The most that was held as ranks come or leave, over the larger of before and after."""
    members = Members(rank, port, worlds)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))
    spread, optimizer = make(plan, model=model, bucket_bytes=BUCKET)
    if rank in worlds[0]:
        _take_step(spread, optimizer)
    return _most_held_over(lambda: members.change(1, spread, optimizer))


@pytest.mark.parametrize(
    ("plan", "worlds"),
    [
        (FULL, [[0, 1], [0, 1, 2]]),
        (FULL, [[0, 1, 2], [1, 2]]),
        (WHOLE, [[0, 1], [0, 1, 2]]),
        (HYBRID, [[0, 1], [0, 1, 2, 3]]),
    ],
    ids=["a rank comes", "the first leaves", "a whole copy comes", "two halves come"],
)
def test_no_more_is_held_than_before_or_after_and_two_buckets_as_ranks_come_and_leave(
    ranks: RankPool, plan: ParallelPlan, worlds: list[list[int]]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    num_ranks = 1 + max(map(max, worlds))
    for over in ranks.run(num_ranks, _measured_regroup, store.port, plan, worlds, process_group=False):
        assert over <= 2 * BUCKET + LARGEST
