"""Models and optimizers of many kinds in trainings that change plans, and what is done with them; nothing is left."""

from __future__ import annotations

import copy
import gc
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import gt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adafactor, AdamW

from elastic_ext import CheckpointInterval
from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net, by_blocks
from tests.support.retraining import RECOMPUTED, WIDTH, Retraining, differing, stayed
from tests.support.thinning import the_first
from tests.support.training import make_data, trainer_of

# --- models and optimizers of many kinds ------------------------------------------------------------------------------


def _compiled_whole(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def _compiled_in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def _compiled_blocks(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def _compiled_wrapped(model: Any, backend: str) -> Any:
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch.compile(block, backend=backend)
    return model


COMPILED = {
    "blocks": _compiled_blocks,
    "wrapped blocks": _compiled_wrapped,
    "the whole": _compiled_whole,
    "the whole in place": _compiled_in_place,
}


def compiled(rank: int, folder: Path, how: str, backend: str) -> list[int]:
    """How many graphs there were under each plan; the numbers are those of a compiled model that never changed."""
    counters = torch._dynamo.utils.counters

    def given() -> dict[str, Any]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Net(WIDTH)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # compiled, it draws in a way of its own
        return {"model": model, "wrap": partial(COMPILED[how], backend=backend), "averages": False}

    losses, state = stayed(rank, folder, FULL, 21, **given())
    run = Retraining(rank, folder, FULL, **given())
    num_graphs: list[int] = []

    def ask(plan: ParallelPlan) -> Callable[[Retraining], None]:
        def asking(run: Retraining) -> None:
            num_graphs.append(counters["stats"]["unique_graphs"])
            run.proposals.append(run.trainer.reshard(plan))

        return asking

    tour = [KEPT, WHOLE, FULL, replace(WHOLE, activation_checkpoint="all"), replace(FULL, unit=2), WHOLE]
    with run.trainer:
        run.train(21, {3 * at + 2: ask(plan) for at, plan in enumerate(tour)})
        changed = run.state()
    num_graphs.append(counters["stats"]["unique_graphs"])
    refused = [each.refusal for each in run.proposals if each.outcome != "in force"]
    assert len(refused) == how.startswith("the whole"), refused
    assert all("compiled as parts of a larger module" in each for each in refused)
    if backend == "inductor":  # which may order sums otherwise where tensors lie otherwise
        assert run.losses == pytest.approx(losses, rel=1e-5)
        for name, tensor in state.items():
            torch.testing.assert_close(changed[name], tensor, rtol=1e-3, atol=1e-5)
    else:
        assert run.losses == losses
        assert differing(changed, state) == []
    return num_graphs


HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")))
INDUCTOR = (pytest.mark.slow, pytest.mark.skipif(not HAS_COMPILER, reason="Inductor needs a C++ compiler"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports to compile
@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("blocks", "eager"),
        *(pytest.param(how, "eager", marks=pytest.mark.slow) for how in COMPILED if how != "blocks"),
        *(pytest.param(how, "aot_eager", marks=pytest.mark.slow) for how in COMPILED),
        *(pytest.param(how, "inductor", marks=INDUCTOR) for how in COMPILED),
    ],
)
def test_compiled_models_give_the_same_numbers_and_have_one_graph_for_plain_parameters_and_one_for_sharded_ones(
    ranks: RankPool, tmp_path: Path, how: str, backend: str
) -> None:
    for num_graphs in ranks.run(2, compiled, tmp_path, how, backend, deadline_seconds=280):
        assert num_graphs == ([1] * 7 if how == "wrapped blocks" else [1, 1, 2, 2, 2, 2, 2])


class Adversaries(nn.Module):
    """Two parts, an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.judge(self.maker(noise))
        return result


def train_adversaries(rank: int, folder: Path, plans: dict[int, ParallelPlan]) -> list[float]:
    torch.manual_seed(0)
    model = Adversaries()
    trainer = trainer_of(folder, model, rank=rank, micro_batch_size=4, global_batch_size=8)
    trainer.parallelize(model, FULL)
    maker = AdamW(model.maker.parameters(), lr=0.01)
    judge = SGD(model.judge.parameters(), lr=0.1, momentum=0.9)
    makers, judges = trainer.prepare([maker, judge])
    losses = []
    with trainer:
        for number in range(10):
            noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
            with trainer.step():
                loss = model(noise).square().mean()
                loss.backward()
                for optimizer in (makers, judges):
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if number in plans:
                trainer.reshard(plans[number])
    assert trainer.global_step == 10
    assert set(maker.state) == set(model.maker.parameters())
    return losses


def test_two_optimizers_keep_their_parts(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, train_adversaries, tmp_path, {})
    assert ranks.run(2, train_adversaries, tmp_path, {1: WHOLE, 3: KEPT, 5: WHOLE, 7: FULL}) == expected


def refuse_container(rank: int, folder: Path) -> None:
    for plan in (WHOLE, FULL):
        model = nn.ModuleDict({"maker": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
        with pytest.raises(ValueError, match="only holds others and is not called"):
            trainer_of(folder, model, rank=rank).parallelize(model, plan)


def test_a_container_that_nobody_calls_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, refuse_container, tmp_path)


def with_unlike_optimizers(rank: int, folder: Path) -> None:
    makes: dict[str, Callable[[Any], Any]] = {
        "LBFGS": lambda parameters: LBFGS(parameters, lr=1e-3, max_iter=1),
        "Adafactor": lambda parameters: Adafactor(parameters, lr=1e-3),
        "lists": lambda parameters: Listing(parameters, lr=1e-3),
    }
    for name, make in makes.items():
        run = Retraining(rank, folder, WHOLE, name=name, make_optimizer=make, averages=False)
        if name == "LBFGS":  # which takes a closure
            step = run.optimizer.step
            run.optimizer.step = lambda step=step: step(lambda: torch.zeros(()))
        with run.trainer:
            run.train(4, {1: FULL})
            assert run.plan == WHOLE
            assert run.proposals[0].outcome == "refused", name
            assert run.proposals[0].refusal


class Listing(SGD):
    """Keeps tensors of each parameter where nobody looks for them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for part in group["params"]:
                self.state[part].setdefault("past", []).append(part.detach().clone())
        return super().step(closure)


def test_optimizers_whose_state_could_not_follow_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, with_unlike_optimizers, tmp_path)


# --- what a user does with the model ----------------------------------------------------------------------------------


def use_the_model(rank: int, folder: Path) -> None:
    run = Retraining(rank, folder, WHOLE)
    model = run.model
    names, inputs = list(Net(WIDTH).state_dict()), make_data(4, torch.float32)[0]
    with run.trainer:
        for plan in (WHOLE, FULL, WHOLE):
            step = run.trainer.global_step
            run.train(step + 3, {step: plan, step + 1: plan})
            assert run.plan == plan
            state = model.state_dict()
            assert list(state) == names
            written = io.BytesIO()
            torch.save(state, written)
            before = run.state()
            model.load_state_dict(state)
            assert differing(run.state(), before) == []
            if plan == WHOLE:
                written.seek(0)
                assert torch.load(written).keys() == state.keys()
                model.eval()
                with torch.no_grad():
                    given = model(inputs)  # under DDP with the first rank's buffers
                copied = copy.deepcopy(model)
                assert not any(isinstance(each, DistributedDataParallel) for each in held_by(copied))
                assert torch.equal(copied(inputs), given)
                if rank == 0:  # alone: it talks to nobody
                    copied.train()(inputs).sum().backward()
                model.train()


def held_by(model: nn.Module) -> list[object]:
    """What hooks of its modules hold."""
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    ]
    return [each for hook in hooks for each in getattr(hook, "args", ())]


def test_names_states_and_copies_of_the_model_are_its_own_under_each_plan(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, use_the_model, tmp_path)


# --- the same collectives as by hand ----------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
)


def recorded(model: Any, engine: DistributedDataParallel | None, take: Callable[[], object]) -> list[tuple[Any, ...]]:
    """The collectives on training's groups while steps are taken: kind, elements, type and size of the group."""
    found: list[tuple[Any, ...]] = []
    real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
            if tensors[0].dtype.is_floating_point:
                told = [(each.numel(), str(each.dtype)) for each in tensors]
                found.append((name, told, dist.get_world_size(options.get("group"))))
            return real[name](*arguments, **options)

        return call

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        found.append(("bucket", bucket.index(), bucket.buffer().numel(), [each.numel() for each in bucket.gradients()]))
        return allreduce_hook(dist.distributed_c10d._get_default_group(), bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket}  # type: ignore[attr-defined]  # which torch looks at
    if engine is not None:
        engine.register_comm_hook(None, hook)
    for name in real:
        setattr(dist, name, recording(name))
    try:
        take()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return found


def collectives(rank: int, folder: Path, from_ddp: Sequence[ParallelPlan]) -> None:
    def by_hand(plan: ParallelPlan) -> Callable[[Any], Any]:
        sharding: dict[str, Any] = {}
        if plan == WHOLE:
            return DistributedDataParallel
        if plan == KEPT:
            sharding["mesh"] = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (2, 1), mesh_dim_names=("replicate", "shard")
            )
        if plan == GRAD_OP:
            sharding["reshard_after_forward"] = False
        return by_blocks(**sharding)

    options: dict[str, Any] = {"num_micro_steps": 2, "averages": False}
    expected = {}
    for plan in (WHOLE, GRAD_OP, FULL, KEPT):
        run = Retraining(rank, folder, None, wrap=by_hand(plan), name=f"by hand {plan.strategy}", **options)
        engine = run.model if plan == WHOLE else None
        with run.trainer:
            run.train(2)  # DDP orders its buckets anew in the first
            expected[plan] = recorded(run.model, engine, partial(run.train, 3))
    for start, tour in ((FULL, (WHOLE, GRAD_OP, KEPT, FULL)), (WHOLE, from_ddp)):
        run = Retraining(rank, folder, start, name=f"changed {start.strategy}", **options)
        with run.trainer:
            for plan in tour:
                step = run.trainer.global_step
                run.train(step + 4, {step + 1: plan})
                assert run.plan == plan
                spread = run.trainer._training.spread
                found = recorded(run.model, spread.engine, partial(run.train, step + 5))
                assert found == expected[plan], (plan, found, expected[plan])


@pytest.mark.parametrize("from_ddp", the_first([[FULL, KEPT, WHOLE], [FULL, KEPT, WHOLE, GRAD_OP]]), ids=len)
def test_steps_after_a_change_make_the_collectives_of_the_plan_written_by_hand(
    ranks: RankPool, tmp_path: Path, from_ddp: Sequence[ParallelPlan]
) -> None:
    ranks.run(2, collectives, tmp_path, from_ddp)


# --- nothing is left --------------------------------------------------------------------------------------------------


def held_now(model: nn.Module) -> tuple[int, ...]:
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter) and each.is_floating_point() and not each.is_sparse
    }  # and not bytes: random states that are noted for a checkpoint, or what was staged, come and go
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        len(dist.distributed_c10d._world.pg_map),
        sum(storages.values()),
        sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()),
    )


def leak_nothing(rank: int, folder: Path, plans: Sequence[ParallelPlan], num_rounds: int) -> list[tuple[int, ...]]:
    run = Retraining(
        rank,
        folder,
        FULL,
        model=Net(WIDTH, num_blocks=1),
        num_micro_steps=2,
        rollback="full",
        shared_storage_path=folder / "kept",
        checkpoint_interval=CheckpointInterval(steps=1),
        keep_last=2,
    )
    counts: list[tuple[int, ...]] = []
    with run.trainer:
        for number in range(num_rounds * len(plans)):
            step = run.trainer.global_step
            run.train(step + 2, {step + 1: plans[number % len(plans)]} if number else {1: plans[0]})
            if (number + 1) % len(plans) == 0:
                until = time.monotonic() + 20
                held = held_now(run.model)
                while len(counts) > 1 and any(map(gt, held, counts[1])) and time.monotonic() < until:
                    time.sleep(0.05)  # a copy may be under way, which ends; what is left behind stays
                    held = held_now(run.model)
                counts.append(held)
    return counts


@pytest.mark.parametrize(
    ("plans", "num_rounds"),
    [
        ([WHOLE, GRAD_OP, RECOMPUTED, KEPT], 3),
        pytest.param([WHOLE, GRAD_OP, KEPT, RECOMPUTED, WHOLE, FULL], 20, marks=pytest.mark.slow),
    ],
)
def test_many_changes_in_one_training_leave_nothing_behind(
    ranks: RankPool, tmp_path: Path, plans: Sequence[ParallelPlan], num_rounds: int
) -> None:
    for counts in ranks.run(2, leak_nothing, tmp_path, plans, num_rounds, deadline_seconds=300):
        assert all(last <= first for last, first in zip(counts[-1], counts[1], strict=True)), counts
