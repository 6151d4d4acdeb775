"""A model and the plan by which it lies on its ranks: recognised where somebody else sharded it, put on, and changed in
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.blocks import RecomputeTrial, Units, blocks_of, recompute, why_not_recompute
from elastic_ext.fsdp.plan import Degrees, ParallelPlan
from elastic_ext.fsdp.worlds import Worlds
from elastic_ext.torch_private.meshes import let_go_of_groups, make_sure_of_meshes

from . import rewire
from .change import Agree, Change, ChangeCost, Regroup, Sharded, Whole
from .companions import Tensors
from .ddp import WrapperlessDDP, arguments_of, make_sure_of_ddp
from .fully_shard import make_sure_of_torch
from .references import holders_of
from .refusals import (
    why_not_called,
    why_not_cut,
    why_not_held,
    why_not_leave_ddp,
    why_not_mixed,
    why_not_other_ranks,
    why_not_parted,
    why_not_replace,
    why_not_tied,
    why_not_unit,
    why_not_whole,
)
from .transition import BUCKET_BYTES, Tensor, TransferRates, Transition, transition
from .units import EarlierUnits, Survey, Unit, modules_by_unit, prefetching, units_for

__all__ = ["Recognised", "Spread", "recognise", "root_of"]


# --- by which plan a model lies that somebody else has spread: its user, accelerate, or nobody -----------------------

_MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Recognised:
    """How a model was found to be spread over its ranks."""

    plan: ParallelPlan | None = None
    """The plan by which the model lies; None where it is not spread."""
    replica: WrapperlessDDP | None = None
    """The user's own DDP, if the model is in one."""
    mesh: tuple[Degrees, DeviceMesh] | None = None
    """The degrees and the mesh over which the model is sharded, if it is."""


def root_of(model: nn.Module) -> nn.Module:
    """The module that holds the parameters: the model, or the one in a user's own wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def recognise(model: nn.Module, blocks: Sequence[nn.Module], *, num_ranks: int) -> Recognised:
    """How a model is spread; ValueError, or ElasticError for an unknown torch, say why no plan tells that."""
    if any(type(module) is FullyShardedDataParallel for module in model.modules()):
        raise ValueError(
            "FSDP1 shards a model when it is wrapped, and not again; restart the job to shard it otherwise"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return _sharded(model, blocks, num_ranks)
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(wrappers) > 1:
        raise ValueError("several parts of the model are in DDP, each by itself; wrap the model as a whole")
    if not wrappers:
        return Recognised()
    (wrapper,) = wrappers
    if {*model.parameters()} - {*wrapper.parameters()}:
        raise ValueError(
            "some of the model's parameters lie outside of the part that is in DDP; wrap the model as a whole"
        )
    replica = WrapperlessDDP(wrapper.module, wrapper.process_group, arguments_of(wrapper))
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
    filled = [
        unit for unit in survey.units if unit.mesh is not None
    ]  # of an empty one torch does not keep what was said
    inner = [unit for unit in filled if root not in unit.modules] or filled
    after = {unit.reshard_after_forward for unit in inner}
    if not after <= {None, True, False}:
        raise ValueError(
            "the model reshards to fewer ranks after the forward pass, which no plan can say; set "
            "reshard_after_forward to True or False"
        )
    known = {id(block) for block in blocks}
    sizes = {len(unit.modules) for unit in inner if all(id(module) in known for module in unit.modules)}
    plan = ParallelPlan(
        strategy="hybrid_shard" if mesh.ndim > 1 else "shard_grad_op" if after == {False} else "full_shard",
        shard_degree=degrees.shard if mesh.ndim > 1 else None,
        unit=max(sizes) if sizes else 1 if len(survey.units) > 1 else "whole",
    )
    return Recognised(plan, mesh=(degrees, mesh))


# --- a model and the plan by which it lies on its ranks: put on it, and changed while it is trained ------------------

_NOT_SPREAD = "the model is not spread; call trainer.parallelize(model, plan) first"
_SPLIT = "parameters of the model are split over the ranks by tensor parallelism, for this number of ranks"
_PLAIN = "there is no process group to shard the model over; call torch.distributed.init_process_group() first"


class _ToPlan:
    """The target of a change from one plan of a model to another."""

    def __init__(self, spread: Spread, plan: ParallelPlan, before: ParallelPlan, worlds: Worlds) -> None:
        self._spread, self._before = spread, before
        self.plan, self.worlds = plan, worlds
        self._device = spread.device  # which a model that is taken apart does not tell

    def after(self, survey: Survey | None) -> Sharded | Whole:
        return self._spread.sharded_by(self.plan, survey, self.worlds)

    def before(self) -> Degrees:
        return self._before.degrees(self.worlds.num_old, self.worlds.num_local[0])

    def let_go_of_groups(self) -> None:
        self._spread.let_go_of_groups()

    def mesh_before(self) -> DeviceMesh:
        return self._spread.mesh_of(self.before(), self._device)

    def rest(self) -> None:
        self._spread.rest()

    def wake_again(self) -> None:
        self._spread.wake(self._before.bucket_cap_mb)


class Spread:
    """How one model is spread over all ranks: its plan, which can be put on and changed in training."""

    def __init__(
        self, model: nn.Module, units: Units = None, *, num_local: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """``units`` are the model's blocks, or how to find them; ``num_local`` ranks share a machine."""
        self.model = model
        self.plan: ParallelPlan | None
        """The plan by which the model lies now; None where the ranks do not share its gradients."""
        self.why_not: str | None = None
        """Why the model's plan cannot be changed; None where it can."""
        self._num_local = num_local
        self._bucket_bytes = bucket_bytes
        self._pace = TransferRates()
        self._group: dist.ProcessGroup | None = None
        self._root = root_of(model)
        self._blocks = blocks_of(model, units)
        self.plan = None
        self._replica: WrapperlessDDP | None = None
        self._meshes: dict[Degrees, DeviceMesh] = {}
        self._earlier: EarlierUnits | None = None  # those that were there before parameters became whole
        self._trial: RecomputeTrial | None = None  # of computing blocks again: under way, or what came of it
        self._leaves_unused = False  # some passes use only a part of the parameters
        self._left: Change | None = None  # by which this rank has left its world, and is in none since
        self._finds_unused = False  # as all ranks have agreed when DDP came last
        self.look()

    def look(self) -> None:
        """See how the model lies, where that could not be told before: its user may have changed it since."""
        if self.plan is not None:
            return
        found, self.why_not = Recognised(), None
        try:
            found = recognise(self.model, self._blocks, num_ranks=self.num_ranks)
        except (ValueError, ElasticError) as error:
            self.why_not = str(error)
        self.plan, self._replica = found.plan, found.replica
        if found.mesh is not None:
            self._meshes = dict([found.mesh])

    @property
    def num_ranks(self) -> int:
        """How many ranks train the model."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that were made for this model."""
        made = [group for mesh in self._meshes.values() for group in mesh.get_all_groups()]
        return made if self._group is None else [*made, self._group]

    @property
    def num_local(self) -> int:
        """How many ranks share a machine, as degrees of plans count them."""
        return self._num_local

    def why_not_other_ranks(self) -> str | None:
        """Why no rank can come to this model, or leave it, while it trains; None where that is not known before."""
        self.look()
        if self.why_not is not None:
            return self.why_not
        if self.plan is None:
            return _SPLIT if any(isinstance(part, DTensor) for part in self.model.parameters()) else _NOT_SPREAD
        try:
            make_sure_of_torch()
            make_sure_of_meshes()
            if self.plan.is_replicated:
                make_sure_of_ddp()
            rewire.make_sure_of(self.model)
        except (ValueError, ElasticError) as error:
            return str(error)
        return None if self._replica is None else why_not_other_ranks(self._replica)

    @property
    def root(self) -> nn.Module:
        """The module that holds the model's parameters, without a wrapper."""
        return self._root

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks of the model: the parts that it repeats."""
        return self._blocks

    @property
    def num_blocks(self) -> int:
        """How many blocks of the model were found or named."""
        return len(self._blocks)

    @property
    def engine(self) -> DistributedDataParallel | None:
        """The DDP that averages gradients beneath the model; None where there is none, or it is a user's wrapper."""
        return None if self._replica is None else self._replica.engine

    def put_on(self, plan: ParallelPlan) -> None:
        """Spread a model by a plan: all ranks take rank 0's values. All of them call this."""
        self.look()
        _raise(self.why_not)
        if self.plan is not None:
            raise ValueError("the model has a plan already; call trainer.reshard(plan) to change it")
        degrees = plan.degrees(self.num_ranks, self._num_local)
        _raise(why_not_parted(self.model.parameters()))
        _raise(why_not_recompute(self.model, self._blocks, plan.ratio) or why_not_called(self.model))
        if not plan.is_replicated:
            if not dist.is_initialized():
                raise ValueError(_PLAIN)
            _raise(why_not_cut(self.model))
            units = self._units(plan, None)
            self._give_all_the_first()
            rewire.put_on(units, self.mesh_of(degrees, self.device), {}, set())
        else:
            make_sure_of_ddp()
            self._give_all_the_first()
            self.wake(plan.bucket_cap_mb)
        self._recompute(plan.ratio)
        self.plan = plan

    def transition(
        self, plan: ParallelPlan, optimizers: Sequence[Optimizer] = (), worlds: Worlds | None = None
    ) -> tuple[Transition | None, str]:
        """What a change to another plan or world takes, or None and why it cannot be; nothing is changed."""
        self.look()
        if self.why_not is not None or self.plan is None:
            return None, self.why_not or _NOT_SPREAD
        refusal = why_not_recompute(self.model, self._blocks, plan.ratio) or why_not_unit(plan, self._blocks)
        if refusal is not None:
            return None, refusal
        tensors = self._tensors(optimizers)
        made, told = transition(
            self.plan,
            plan,
            tensors,
            worlds=worlds or self._same_world(),
            pace=self._pace,
            bucket_bytes=self._bucket_bytes,
        )
        if made is None or not {"spread", "gather", "prefetch", "buckets"} & {*made.steps}:
            return made, told
        try:
            if plan.is_replicated:
                make_sure_of_ddp()
            if made.steps[0] != "buckets":
                rewire.make_sure_of(self.model)
        except (ValueError, ElasticError) as error:
            return None, str(error)
        return made, told

    def prepare(
        self,
        plan: ParallelPlan,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        known: Sequence[object],
    ) -> Change:
        """A change to another plan, checked and ready to be made; ValueError says why it cannot be.

        ``known`` holders of parameters will let go of those that become other objects.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self._prepared(plan, optimizers, registered, known, (self._same_world(), rank))

    def prepare_regroup(
        self,
        worlds: Worlds,
        holder: int,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors] = (),
        *,
        plan: ParallelPlan | None = None,
    ) -> Change:
        """A change to a world of other ranks, checked and ready to be made; ValueError says why it cannot be.

        ``holder`` is this process's number among those of both worlds. A rank that comes gives its model as it lies in
        a world of its own; where it does not lie by the others' ``plan`` there, which may not fit so few ranks, it is
        told that. Or it has left a world before, and comes back from none.
        """
        self.look()
        if self.why_not is not None or self.plan is None:
            raise ValueError(self.why_not or _NOT_SPREAD)
        plan = plan or self.plan
        assert plan == self.plan or worlds.old[holder] is None, "those who stay or leave lie by the plan of all"
        _raise(why_not_recompute(self.model, self._blocks, plan.ratio))
        make_sure_of_torch()
        make_sure_of_meshes()
        if plan.is_replicated:
            make_sure_of_ddp()
        if self._replica is not None:
            _raise(why_not_other_ranks(self._replica))
        return self._prepared(plan, optimizers, registered, (), (worlds, holder))

    def regroup(self, prepared: Change, agree: Agree, groups: Regroup) -> ChangeCost:
        """Take the model and its optimizers to a world of other ranks, between two steps, on the ranks of both worlds.

        The default process group is that of the old world when this begins, and of the new one when it ends; that of a
        rank that comes is its own, and a rank that leaves keeps the old one, which nothing here holds.
        """
        target = prepared.target
        assert isinstance(target, _ToPlan) and self.plan is not None
        moved = prepared.regroup(agree, groups, device=self.device)
        self._left = prepared if prepared.leaves else None
        self._num_local = target.worlds.num_local[1]
        if target.plan.ratio != self.plan.ratio:
            self._recompute(target.plan.ratio)
        self.plan = target.plan
        return moved

    def _prepared(
        self,
        plan: ParallelPlan,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        known: Sequence[object],
        place: tuple[Worlds, int],
    ) -> Change:
        assert self.plan is not None
        worlds, holder = place
        before = self.plan if worlds.is_same else plan
        if not plan.is_replicated and self._replica is not None:
            _raise(why_not_leave_ddp(self._replica.options))
        change = Change(
            self.model,
            optimizers,
            registered,
            _ToPlan(self, plan, before, worlds),
            worlds=worlds,
            holder=holder,
            bucket_bytes=self._bucket_bytes,
            left=self._left,
        )
        if plan.is_replicated:
            _raise(why_not_whole(self.model, change.units_before, change.left_out))
        else:
            _raise(why_not_cut(self.model, change.left_out))
        if change.replaced:
            own = [] if self._replica is None else self._replica.holders
            held = [*registered, *known, *change.holders, *own]
            _raise(why_not_replace(change.replaced, is_whole=plan.is_replicated))
            holders = holders_of(self.model, optimizers, change.replaced, held)
            _raise(why_not_held(holders.strangers, is_whole=plan.is_replicated))
            change.lists = holders.lists
        return change

    def change(self, made: Transition, prepared: Change | None, agree: Agree) -> ChangeCost | None:
        """Make a transition between two steps, on all ranks; gives what moving has cost, None where nothing moved."""
        moved = None
        for step in made.steps:
            if step == "spread":
                assert prepared is not None
                units_before = tuple(prepared.units_before)
                moved = prepared.run(agree, group=self._exchange_group(), device=self.device)
                if made.new.is_replicated:
                    self._earlier = EarlierUnits(made.old, units_before)
                self._pace = made.pace.after(
                    prepared.bucket_plan, wiring_seconds=moved.wiring_seconds, moving_seconds=moved.moving_seconds
                )
            elif step == "gather":
                self._set_gathering(keeps=not made.new.reshards_after_forward)
            elif step == "prefetch":
                survey = rewire.survey(self.model)
                rewire.set_prefetch(prefetching(survey.units, made.new.prefetch))
            elif step == "buckets":
                self.rest()
                self.wake(made.new.bucket_cap_mb)
            elif step == "recompute":
                self._recompute(made.new.ratio)
        self.plan = made.new
        return moved

    def try_recomputing(self) -> tuple[bool, str | None]:
        """Whether it is known if blocks can be computed again, and why they cannot; else the next pass finds out.

        The first call begins a trial, in which the next pass computes blocks twice; a call after that pass ends the
        trial. Blocks that no pass has called meanwhile are taken for blocks that can be computed again. A reason
        against it is given once: the call after that begins another trial, since the user may have mended the model.
        """
        trial = self._trial
        if trial is None:
            self._trial = RecomputeTrial(self.model, self._blocks)
            return self._trial.is_over, None
        trial.stop()
        if trial.why_not is not None:
            self._trial = None
        return True, trial.why_not

    def expect_unused(self) -> None:
        """Note that a pass has left out parameters that are trained: a later DDP looks for them."""
        self._leaves_unused = True

    def keep_up(self) -> bool:
        """Make DDP anew where other parameters are trained now; gives whether it was. All ranks call this."""
        if self._replica is None or self.plan is None or not self._replica.is_outdated:
            return False
        self.rest()
        if self.num_ranks > 1:  # nothing is asked of the others here: a rank may come alone
            self._replica.wake(self.plan.bucket_cap_mb, finds_unused=self._finds_unused)
        return True

    def wait(self) -> None:
        """Wait until the model's device has done what it was told to."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        """Leave the process group that moves tensors."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _tensors(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """The tensors that move with the parameters, as far as can be told without looking for reasons against it."""
        found = []
        for name, parameter in self.model.named_parameters():
            state = [value for each in optimizers for value in each.state.get(parameter, {}).values()]
            for value in (parameter, parameter.grad, *state):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    dim = rewire.dim_of_tensor(value) if isinstance(value, DTensor) else 0
                    found.append(Tensor(name, tuple(value.shape), value.element_size(), dim))
        return found

    def sharded_by(self, plan: ParallelPlan, survey: Survey | None, worlds: Worlds) -> Sharded | Whole:
        """What parameters become under a plan; ``survey`` is of what fully_shard has made so far."""
        if plan.is_replicated:
            return Whole(lambda: self.wake(plan.bucket_cap_mb))
        degrees, device = plan.degrees(worlds.num_new, worlds.num_local[1]), self.device
        return Sharded(self._units(plan, survey), degrees, lambda: self.mesh_of(degrees, device))

    def let_go_of_groups(self) -> None:
        """Keep no mesh and no process group, since these are about to end; they are made anew when they are needed."""
        for mesh in self._meshes.values():  # also those of earlier plans
            let_go_of_groups(mesh)
        self._meshes, self._group = {}, None
        if self._replica is not None:
            self._replica.let_go_of_group()

    def _same_world(self) -> Worlds:
        return Worlds.unchanged(self.num_ranks, self._num_local)

    def _units(self, plan: ParallelPlan, survey: Survey | None) -> list[Unit]:
        """The units that fully_shard is to make for a plan, innermost first; ValueError where it cannot."""
        if survey is not None and self.plan is not None and self.plan.unit == plan.unit:
            groups = [unit.modules for unit in survey.units]
        else:
            groups = modules_by_unit(plan, self._root, self._blocks, survey)
        refusal = why_not_unit(plan, self._blocks) or why_not_tied(self._root, groups)
        _raise(refusal or why_not_mixed(self._root, groups))
        earlier = self._earlier if survey is None or self.plan is None else EarlierUnits(self.plan, survey.units)
        return units_for(plan, groups, survey, earlier)

    # --- doing it -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def mesh_of(self, degrees: Degrees, device: torch.device) -> DeviceMesh:
        """The mesh of these degrees, made once for each way to share ranks out, and kept until these are others."""
        if degrees not in self._meshes:
            sizes = {"replicate": degrees.replicate, "shard": degrees.shard}
            if degrees.replicate == 1:
                del sizes["replicate"]
            self._meshes[degrees] = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._meshes[degrees]

    def _exchange_group(self) -> dist.ProcessGroup:
        if self._group is None:
            made = dist.new_group()
            assert isinstance(made, dist.ProcessGroup)
            self._group = made
        return self._group

    def wake(self, bucket_cap_mb: float | None) -> None:
        """Have DDP average the model's gradients from now on; all ranks call this."""
        if self._replica is None:
            self._replica = WrapperlessDDP(self.model, None, {})
        if self.num_ranks > 1:
            leaves_unused = torch.tensor([int(self._leaves_unused)], device=self.device)
            dist.all_reduce(leaves_unused, op=dist.ReduceOp.MAX)  # DDPs that differ in it would wait for each other
            self._finds_unused = bool(leaves_unused.item())
            self._replica.wake(bucket_cap_mb, finds_unused=self._finds_unused)

    def _recompute(self, ratio: float) -> None:
        """Have blocks computed again; what no pass has told of before, the first one raises on all ranks."""
        recompute(self._blocks, ratio)
        if not ratio and self._trial is not None:  # what blocks are given may have changed when it is asked for again
            self._trial.stop()
            self._trial = None
        if ratio and self._trial is None:
            self._trial = RecomputeTrial(self.model, self._blocks, raises=True)

    def rest(self) -> None:
        """Take DDP off the model."""
        assert self._replica is not None
        self._replica.rest()

    def _give_all_the_first(self) -> None:
        """Give rank 0's parameters and buffers to all ranks, as DDP does."""
        if self.num_ranks == 1:
            return
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.device.type != "meta":
                    dist.broadcast(tensor.detach(), 0)

    def _set_gathering(self, *, keeps: bool) -> None:
        for unit in rewire.survey(self.model).units:
            first: Any = unit.modules[0]
            is_outermost = self._root in unit.modules  # which torch keeps gathered by itself
            first.set_reshard_after_forward(not (keeps or is_outermost), recurse=False)


def _raise(refusal: str | None) -> None:
    if refusal is not None:
        raise ValueError(refusal)
