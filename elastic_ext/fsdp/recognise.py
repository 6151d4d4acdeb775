"""Recognise: by which plan a model lies that somebody else has spread: its user, accelerate, or nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from . import rewire
from .plan import Degrees, ParallelPlan
from .replica import Replica, arguments_of

__all__ = ["Recognised", "recognise", "root_of"]

_MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Recognised:
    """What was found."""

    plan: ParallelPlan | None = None
    """None where the model is not spread."""
    replica: Replica | None = None
    """Of a user's own DDP."""
    mesh: tuple[Degrees, DeviceMesh] | None = None
    """What it is sharded over."""


def root_of(model: nn.Module) -> nn.Module:
    """What holds the parameters: the model, or what a wrapper of the user's own has wrapped."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def recognise(model: nn.Module, blocks: Sequence[nn.Module], *, num_ranks: int) -> Recognised:
    """See how it is spread; ValueError, or ElasticError of a torch that is not known, say why no plan tells that."""
    if any(type(module) is FullyShardedDataParallel for module in model.modules()):
        raise ValueError("FSDP1 shards a model when it is wrapped, and not again; start the job anew for it")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return _sharded(model, blocks, num_ranks)
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(wrappers) > 1:
        raise ValueError("several parts of the model are in DDP, each by itself; wrap the model as a whole")
    if not wrappers:
        return Recognised()
    (wrapper,) = wrappers
    if {*model.parameters()} - {*wrapper.parameters()}:
        raise ValueError("some of the model's parameters lie outside of the part that is in DDP; wrap it as a whole")
    replica = Replica(wrapper.module, wrapper.process_group, arguments_of(wrapper))
    replica.wrapper = wrapper
    is_torchs_own = getattr(wrapper, "bucket_bytes_cap_default", False)  # where the first bucket is a smaller one
    cap = None if is_torchs_own else wrapper.bucket_bytes_cap / _MIB
    return Recognised(ParallelPlan(strategy="no_shard", bucket_cap_mb=cap), replica)


def _sharded(model: nn.Module, blocks: Sequence[nn.Module], num_ranks: int) -> Recognised:
    survey = rewire.survey(model)
    meshes = [unit.mesh for unit in survey.units if unit.mesh is not None]
    if not meshes:
        raise ValueError("the model is sharded by fully_shard, and has no parameters there")
    mesh = meshes[0]
    if any(other != mesh for other in meshes):
        raise ValueError("parts of the model are sharded over different meshes; shard all of it over one")
    if mesh.mesh.flatten().tolist() != list(range(num_ranks)):
        raise ValueError(
            f"the model's mesh has the ranks {mesh.mesh.tolist()}; allowed: all {num_ranks} ranks in order"
        )
    degrees = Degrees(num_ranks // mesh.shape[-1], mesh.shape[-1])
    root = root_of(model)
    inner = [unit for unit in survey.units if root not in unit.modules] or list(survey.units)
    after = {unit.reshard_after_forward for unit in inner}
    if not after <= {None, True, False}:
        raise ValueError("the model reshards to fewer ranks after the forward pass, which no plan says")
    known = {id(block) for block in blocks}
    sizes = {len(unit.modules) for unit in inner if all(id(module) in known for module in unit.modules)}
    plan = ParallelPlan(
        strategy="hybrid_shard" if mesh.ndim > 1 else "shard_grad_op" if after == {False} else "full_shard",
        shard_degree=degrees.shard if mesh.ndim > 1 else None,
        unit=max(sizes) if sizes else 1 if len(survey.units) > 1 else "whole",
    )
    return Recognised(plan, mesh=(degrees, mesh))
