"""A model on a GPU is spread otherwise while it is trained: nothing is altered, and memory is what was said.

One GPU is one rank of NCCL's, to which all plans give everything. Where memory is counted this rank is the first of
four whose collectives do nothing: what moves is then of no worth, and takes the memory that it would take.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks_worker import forget_meshes
from tests.support.resharding import FULL, GRAD_OP, HYBRID, KEPT, WHOLE, Net, change, take_step
from tests.support.retraining import MICRO_BATCH, TOUR, WIDTH, Retraining, are_in_force, differing, stayed
from tests.support.training import ResumableSlices, bits_of, make_data

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
MIB = 1 << 20
BUCKET_BYTES = 16 * MIB
ROUNDING_BYTES = MIB  # counts of optimizers, and other small things

UNITS = ParallelPlan(strategy="full_shard", unit=2, activation_checkpoint=0.5, prefetch=1)
RECOMPUTED = ParallelPlan(strategy="shard_grad_op", unit="whole", activation_checkpoint="all")
ALONE = (FULL, GRAD_OP, WHOLE, UNITS, KEPT, RECOMPUTED, WHOLE, KEPT, FULL, UNITS, GRAD_OP)


def agree_alone(error: BaseException | None) -> None:
    """As all ranks would, where there is one."""
    if error is not None:
        raise error


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """The bits of parameters, gradients, buffers and optimizer state, all of which a rank by itself has."""
    found: dict[str, object] = {name: bits_of(buffer) for name, buffer in model.named_buffers()}
    for name, part in model.named_parameters():
        found[name] = bits_of(part, part.grad, optimizer.state.get(part, {}))
    return found


@pytest.fixture(params=BACKENDS)
def one_rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A default process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    device = torch.device(DEVICE, 0)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()
    forget_meshes()


# --- nothing is altered ----------------------------------------------------------------------------------------------


def spread_by(plan: ParallelPlan, **options: Any) -> tuple[Spread, Optimizer]:
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    spread = Spread(model, num_local=1)
    spread.put_on(plan)
    return spread, AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2, **options)


def devices_of(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Where all lies that could be spread; a function of its own, since whoever holds parameters keeps them."""
    found = set()
    for part in model.parameters():
        tensors = (part, part.grad, *optimizer.state.get(part, {}).values())
        found |= {each.device.type for each in tensors if isinstance(each, torch.Tensor) and each.dim() > 0}
    return found


def losses_of(plans: list[ParallelPlan], **options: Any) -> tuple[list[float], dict[str, object]]:
    """Of a training whose plan is another one at each step; gradients are kept over every other change."""
    spread, optimizer = spread_by(plans[0], **options)
    losses = []
    for number, plan in enumerate(plans):
        if plan != spread.plan:
            before = values(spread.model, optimizer)
            change(spread, plan, optimizer, agree=agree_alone)
            assert values(spread.model, optimizer) == before, plan
        losses.append(take_step(spread, optimizer, number, clears=number % 2 == 0))
        assert devices_of(spread.model, optimizer) == {DEVICE}
    state = values(spread.model, optimizer)
    spread.close()
    return losses, state


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False, "capturable": True}], ids=str
)
def test_every_value_stays_and_training_is_that_which_never_changed(one_rank: None, options: dict[str, Any]) -> None:
    changed = losses_of(list(ALONE), **options)
    assert changed == losses_of([FULL] * len(ALONE), **options)


def test_a_policy_of_lower_precision_stays(one_rank: None) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    def train(plans: list[ParallelPlan]) -> list[float]:
        torch.manual_seed(0)
        model: Any = Net().to(DEVICE)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model)
        spread = Spread(model, num_local=1)
        optimizer = AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2)
        losses = []
        for number, plan in enumerate(plans):
            if plan != spread.plan:
                before = values(model, optimizer)
                change(spread, plan, optimizer, agree=agree_alone)
                assert values(model, optimizer) == before, plan
            losses.append(take_step(spread, optimizer, number))
        spread.close()
        return losses

    plans = [FULL, GRAD_OP, KEPT, replace(KEPT, activation_checkpoint=0.5), FULL]
    assert train(plans) == train([FULL] * len(plans))


def test_a_trainers_changes_are_as_if_they_had_never_been(one_rank: None, tmp_path: Path) -> None:
    """Its agreements have a group of gloo's, beside what the model's gradients are shared by."""

    def given() -> dict[str, Any]:
        inputs, targets = make_data(64, torch.float32)
        loader = ResumableSlices((inputs.to(DEVICE), targets.to(DEVICE)), MICRO_BATCH, is_endless=True)
        torch.manual_seed(0)
        return {"model": Net(WIDTH).to(DEVICE), "loader": loader, "num_micro_steps": 2}

    losses, state = stayed(0, tmp_path, FULL, 15, **given())
    run = Retraining(0, tmp_path, FULL, **given())
    with run.trainer:
        run.train(15, TOUR)
        assert differing(run.state(), state) == []
        assert run.trainer.reshard_report.seconds > 0
    assert are_in_force(run)
    assert run.losses == losses


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def first_of_four() -> Iterator[None]:
    """A default process group of four ranks, the others of which do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
    forget_meshes()


def taken() -> int:
    """Bytes on the GPU."""
    gc.collect()
    return torch.cuda.memory_allocated()


def most_taken() -> int:
    return torch.cuda.max_memory_allocated()


def forget_most_taken() -> None:
    torch.cuda.reset_peak_memory_stats()


def large(plan: ParallelPlan) -> tuple[Spread, Optimizer]:
    """Tensors of 8 MiB, of whose parts the allocator rounds none up, and their gradients and moments.

    Each gradient has memory of its own here. Those of a unit's first pass are parts of one tensor, which stays as long
    as one of them does.
    """
    blocks = (
        nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.GELU(), nn.Linear(2048, 1024, bias=False)) for _ in range(6)
    )
    model = nn.Sequential(*blocks).to(DEVICE)
    spread = Spread(model, num_local=4, bucket_bytes=BUCKET_BYTES)
    spread.put_on(plan)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for part in model.parameters():
        part.grad = torch.ones_like(part)
    optimizer.step()
    return spread, optimizer


def pass_through(spread: Spread) -> None:
    """What fully_shard gathers and shares is then among what it holds; DDP has nobody here to share with."""
    if spread.engine is None:
        spread.model(torch.ones(2, 1024, device=DEVICE)).square().mean().backward()


PLANS = (FULL, GRAD_OP, WHOLE, HYBRID, KEPT, UNITS)


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(PLANS, 2)), ids=lambda plan: f"{plan.strategy}")
def test_a_change_takes_two_buckets_beside_what_is_there_before_or_after(
    first_of_four: None, old: ParallelPlan, new: ParallelPlan
) -> None:
    spread, optimizer = large(old)
    pass_through(spread)
    before = taken()
    forget_most_taken()
    made, moved = change(spread, new, optimizer, agree=agree_alone)
    most, after = most_taken(), taken()
    assert most <= max(before, after) + 2 * BUCKET_BYTES + ROUNDING_BYTES
    if moved is not None:
        assert moved.extra_bytes <= 2 * BUCKET_BYTES
        assert moved.sent_bytes == made.sent_bytes
    for part in spread.model.parameters():
        state = optimizer.state[part]
        for tensor in (part, part.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert isinstance(tensor, torch.Tensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert local.device.type == DEVICE
            assert local.numel() == part.numel() // new.degrees(4, 4).shard
    pass_through(spread)
    spread.close()


def test_changes_leave_no_memory_behind(first_of_four: None) -> None:
    spread, optimizer = large(FULL)
    counts = []
    for _ in range(4):
        for plan in (WHOLE, HYBRID, UNITS, KEPT, GRAD_OP, FULL):
            change(spread, plan, optimizer, agree=agree_alone)
            pass_through(spread)
        counts.append(taken())
    assert max(counts) <= counts[0] + ROUNDING_BYTES, counts
    spread.close()


def test_a_gpu_that_is_full_has_everything_as_it_was(first_of_four: None) -> None:
    spread, optimizer = large(FULL)
    before, objects = values_here(spread, optimizer), list(map(id, spread.model.parameters()))
    taken()
    with no_more_memory(), pytest.raises(torch.OutOfMemoryError):
        change(spread, WHOLE, optimizer, agree=agree_alone)
    assert list(map(id, spread.model.parameters())) == objects
    assert values_here(spread, optimizer) == before
    assert spread.plan == FULL
    pass_through(spread)
    change(spread, replace(KEPT, unit=2), optimizer, agree=agree_alone)
    pass_through(spread)
    spread.close()


def values_here(spread: Spread, optimizer: Optimizer) -> list[Any]:
    return bits_of([(part, part.grad, optimizer.state[part]) for part in spread.model.parameters()])


@contextmanager
def no_more_memory() -> Iterator[None]:
    """What the allocator holds is taken to the last MiB, and it gets no more."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held: list[torch.Tensor] = []
    try:
        with suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
