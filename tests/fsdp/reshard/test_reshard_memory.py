"""Memory while a model is spread otherwise: what ranks hold at each exchange, with gradients that a unit has in one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, KEPT, WHOLE, change, make

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
    spread.model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    gradients = [part.grad for part in model.parameters() if part.grad is not None]
    assert len(gradients) == NUM_BLOCKS
    if not old.is_replicated:  # or there would be nothing to see
        assert len({each.to_local().untyped_storage().data_ptr() for each in gradients}) == 1  # type: ignore[attr-defined]
    del gradients
    before, seen, real = _held(), [0], dist.all_to_all_single

    def exchange(*given: Any, **options: Any) -> Any:
        seen.append(_held())
        return real(*given, **options)

    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(dist, "all_to_all_single", exchange)
        change(spread, new, optimizer)
    assert len(seen) > 4
    peak, after = max(seen), _held()
    assert all(part.grad is not None for part in model.parameters())
    spread.close()
    return peak - max(before, after)


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
