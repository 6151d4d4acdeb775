"""Models that are spread otherwise while they are trained, on ranks: for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.change import Agree
from elastic_ext.fsdp.reshard.companions import Tensors
from elastic_ext.fsdp.reshard.sharded_model import Spread
from elastic_ext.fsdp.reshard.transition import Transition

__all__ = [
    "FULL",
    "GRAD_OP",
    "HYBRID",
    "KEPT",
    "PLANS",
    "WHOLE",
    "Net",
    "agreeing",
    "all_of_it",
    "any_plan",
    "by_blocks",
    "change",
    "hash_of",
    "in_rank_order",
    "make",
    "take_step",
]

FULL = ParallelPlan(strategy="full_shard")
GRAD_OP = ParallelPlan(strategy="shard_grad_op")
HYBRID = ParallelPlan(strategy="hybrid_shard", shard_degree=2)
KEPT = ParallelPlan(strategy="hybrid_shard", shard_degree=1)
WHOLE = ParallelPlan(strategy="no_shard")
PLANS = (WHOLE, GRAD_OP, FULL, HYBRID, KEPT)


class Block(nn.Module):
    """Sizes that no number of ranks divides, and a parameter smaller than the world."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        result: torch.Tensor = x + self.gain * self.dropout(self.down(hidden))
        return result


class Net(nn.Module):
    """Blocks between two tied weights, a frozen parameter, and buffers that training changes."""

    def __init__(self, width: int = 7, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.frozen = nn.Parameter(torch.ones(3, width), requires_grad=False)
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.frozen.sum(0)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.batch_norm(x))
        return result


def any_plan(draw: random.Random, num_ranks: int = 2) -> ParallelPlan:
    """One of all that so many ranks may have, a power of two of them."""
    strategy: Any = draw.choice(["no_shard", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard"])
    return ParallelPlan(
        strategy=strategy,
        shard_degree=draw.choice([1, 2] if num_ranks == 2 else [1, 2, 4]) if strategy == "hybrid_shard" else None,
        unit=draw.choice([1, 2, 3, "whole"]),
        activation_checkpoint=draw.choice([0.0, 0.4, 1.0]),
        prefetch=draw.choice([None, None, 0, 1, 2]),
        bucket_cap_mb=draw.choice([None, 0.01, 25.0]),
    )


def make(
    plan: ParallelPlan, *, model: nn.Module | None = None, bucket_bytes: int = 8 << 20
) -> tuple[Spread, Optimizer]:
    """A model that lies by a plan, and its optimizer."""
    torch.manual_seed(0)
    model = Net() if model is None else model
    spread = Spread(model, num_local=dist.get_world_size(), bucket_bytes=bucket_bytes)
    spread.put_on(plan)
    return spread, AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2)


def by_blocks(**options: Any) -> Callable[[Any], Any]:
    """Has fully_shard make a unit of each block, and of the rest."""

    def wrap(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


def take_step(spread: Spread, optimizer: Optimizer, number: int, *, clears: bool = True) -> float:
    """A step on samples that this number and this rank alone have."""
    seed = 1000 * number + dist.get_rank()
    inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.to(next(spread.model.parameters()).device)
    torch.manual_seed(seed)  # for dropout
    loss = spread.model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    if clears:
        optimizer.zero_grad()
    return float(loss.item())


def agreeing(error: BaseException | None) -> None:
    """Raise on all ranks where one brings an error."""
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed)
    if failed.item():
        raise RuntimeError("a rank has failed") from error


def change(
    spread: Spread,
    plan: ParallelPlan,
    optimizer: Optimizer,
    *,
    registered: Sequence[Tensors] = (),
    agree: Agree = agreeing,
) -> tuple[Transition, Any]:
    """Change the plan as the trainer does; gives what was foreseen, and what it has cost. ValueError says why not."""
    made, told = spread.transition(plan, [optimizer])
    if made is None:
        raise ValueError(told)
    prepared = None
    if "spread" in made.steps:
        prepared = spread.prepare(plan, [optimizer], registered, [])
    return made, spread.change(made, prepared, agree)


def all_of_it(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, gradients, buffers and optimizer state, whole."""
    found = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter)
        if parameter.grad is not None:
            found[f"{name} gradient"] = _whole(parameter.grad)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = _whole(value)
    return found


def hash_of(state: dict[str, torch.Tensor]) -> int:
    """Another number for other bits."""
    told = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(state.items()))
    return hash(told)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def in_rank_order(spread: Spread) -> Iterator[Callable[[], None]]:
    """Gradients are added up two by two, in the order of ranks, under any plan; call what is given after a change.

    On a number of ranks that is a power of two, and so is each degree.
    """
    names = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
    scatters, reduce = {name: getattr(dist, name) for name in names}, dist.all_reduce

    def scattered(
        output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        parts = torch.empty_like(input)
        dist.all_to_all_single(parts, input, group=group)
        output.copy_(_sum(list(parts.view(dist.get_world_size(group), -1).unbind()), op))

    def reduced(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.numel() == 1:
            return reduce(tensor, op=op, group=group, async_op=async_op)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return tensor.copy_(_sum(parts, op))

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer().div_(dist.get_world_size())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(reduced(tensor))
        return done

    hook.__annotations__ = {"bucket": dist.GradBucket}  # type: ignore[attr-defined]  # which torch looks at

    def arm() -> None:
        if spread.engine is not None and not spread.engine._comm_hooks:
            spread.engine.register_comm_hook(None, hook)

    dist.all_reduce = reduced
    for name in scatters:
        setattr(dist, name, scattered)
    try:
        arm()
        yield arm
    finally:
        dist.all_reduce = reduce
        for name, scatter in scatters.items():
            setattr(dist, name, scatter)


def _sum(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    num_parts = len(parts)
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0] / num_parts if op == dist.ReduceOp.AVG else parts[0]
