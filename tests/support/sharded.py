"""Models spread over ranks in every way that the trainer takes, and the same training by hand, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.training import make_model

__all__ = ["WAYS", "Way", "fresh", "values_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a model is spread."""

    num_ranks: int
    wrap: Callable[[nn.Module], nn.Module]
    degree: Callable[[], tuple[int, int]]
    """The number of replicas, and which one this rank belongs to."""

    def share(self, model: nn.Module, *, now: bool) -> AbstractContextManager[Any]:
        """By hand: keep the next pass's gradients on the rank, or share them."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        for part in model.children():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(now)
        if isinstance(model, (FullyShardedDataParallel, DistributedDataParallel)) and not now:
            return model.no_sync()
        return nullcontext()


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fully(model: Any) -> Any:
    mesh = _mesh(dist.get_world_size())
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _kept_after_forward(model: Any) -> Any:
    mesh = _mesh(dist.get_world_size())
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _offloaded(model: Any) -> Any:
    """On a machine without a GPU nothing is copied; what torch does otherwise for such a model, it does."""
    mesh = _mesh(dist.get_world_size())
    policy = CPUOffloadPolicy(pin_memory=False)  # which takes a GPU
    fully_shard(model[0], mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def _blocks_alone(model: Any) -> Any:
    mesh = _mesh(dist.get_world_size())
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    return model


def _hybrid(model: Any) -> Any:
    mesh = _mesh(2, 2, names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _tensor(model: nn.Module) -> nn.Module:
    return parallelize_module(model, _mesh(dist.get_world_size()), PLAN)


def _tensor_and_fully(model: Any) -> Any:
    mesh = _mesh(2, 2, names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})  # so not all of it
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _all() -> tuple[int, int]:
    return dist.get_world_size(), dist.get_rank()


WAYS = {
    "ddp": Way(num_ranks=2, wrap=DistributedDataParallel, degree=_all),
    "fully_shard": Way(num_ranks=2, wrap=_fully, degree=_all),
    "fully_shard, kept after forward": Way(num_ranks=2, wrap=_kept_after_forward, degree=_all),
    "fully_shard, offloaded": Way(num_ranks=2, wrap=_offloaded, degree=_all),
    "fully_shard of blocks alone": Way(num_ranks=2, wrap=_blocks_alone, degree=_all),
    "hybrid": Way(num_ranks=4, wrap=_hybrid, degree=_all),
    "tensor": Way(num_ranks=2, wrap=_tensor, degree=lambda: (1, 0)),
    "tensor and fully_shard": Way(num_ranks=4, wrap=_tensor_and_fully, degree=lambda: (2, dist.get_rank() // 2)),
    "FSDP1": Way(num_ranks=2, wrap=_flat, degree=_all),
}


SLOW_WAYS = ("fully_shard, offloaded", "fully_shard, with a divide factor")
"""Those in which little else happens than in another; left out of the tests that are run each time."""


LARGE_WAYS = ("hybrid", "tensor and fully_shard", "fully_shard, kept after forward")
"""Those on four ranks, and one like another: every time they are compared with loops by hand, and no more than that."""


def each_of(ways: Iterable[str], *, also_large: bool = True) -> list[Any]:
    """What a test is parametrised with."""
    slow = SLOW_WAYS if also_large else SLOW_WAYS + LARGE_WAYS
    return [pytest.param(way, marks=pytest.mark.slow) if way in slow else way for way in ways]


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter, whole."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [part.detach().clone() for part in model.parameters()]
    return [(part.full_tensor() if isinstance(part, DTensor) else part).detach().clone() for part in model.parameters()]


def fresh(way: Way, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same small model every time, spread."""
    return way.wrap(make_model(dtype))
