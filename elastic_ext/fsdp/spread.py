"""Spread: a model and the plan by which it lies on its ranks: recognised, put on, and changed while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from . import rewire
from .blocks import Units, blocks_of, recompute, why_not_recompute
from .companions import Tensors
from .holders import strangers
from .live import Agree, Change, Moved, Sharded, Whole
from .plan import Degrees, ParallelPlan, units_of_blocks
from .replica import Replica, arguments_of, holders_in
from .rewire import Survey, Unit
from .transition import BUCKET_BYTES, Tensor, Transition, transition

__all__ = ["Spread"]

_PLAIN = "no process group trains this model together; call torch.distributed.init_process_group() before that"
_MIB = 1 << 20


class Spread:
    """How one model is spread over all ranks."""

    def __init__(
        self, model: nn.Module, units: Units = None, *, num_local: int, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """``units`` are its repeated blocks, or how to find them; ``num_local`` ranks share a machine."""
        self.model = model
        self.plan: ParallelPlan | None = None
        """By which it lies now; None where the ranks do not share its gradients."""
        self.why_not: str | None = None
        """Why it cannot be changed, None where it can."""
        self._num_local = num_local
        self._bucket_bytes = bucket_bytes
        self._replica: Replica | None = None
        self._meshes: dict[Degrees, DeviceMesh] = {}
        self._group: dist.ProcessGroup | None = None
        self._blocks = blocks_of(model, units)
        try:
            self._recognise()
        except ValueError as error:
            self.why_not = str(error)

    @property
    def num_ranks(self) -> int:
        """All that train."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def _root(self) -> nn.Module:
        """What holds the parameters: the model, or what a wrapper of the user's own has wrapped."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def engine(self) -> DistributedDataParallel | None:
        """What averages gradients beneath the model, None where it is not DDP, or a wrapper of the user's own."""
        return None if self._replica is None else self._replica.engine

    def put_on(self, plan: ParallelPlan) -> None:
        """Spread a model that is not: all ranks take rank 0's values. All of them call this."""
        if self.why_not is not None:
            raise ValueError(self.why_not)
        if self.plan is not None:
            raise ValueError("the model is spread already; call trainer.reshard(plan) once it is trained")
        degrees = plan.degrees(self.num_ranks, self._num_local)
        refusal = why_not_recompute(self._blocks, plan.ratio) or _why_not_called(self.model)
        if refusal is not None:
            raise ValueError(refusal)
        if not plan.is_replicated:
            if not dist.is_initialized():
                raise ValueError(_PLAIN)
            self._refuse_undivided()
            units = self._units(plan, None)
            self._give_all_the_first()
            rewire.put_on(units, self._mesh(degrees), {}, set())
        else:
            self._give_all_the_first()
            self._wake(plan.bucket_cap_mb)
        recompute(self._blocks, plan.ratio)
        self.plan = plan

    def transition(self, plan: ParallelPlan, optimizers: Sequence[Optimizer] = ()) -> tuple[Transition | None, str]:
        """What a change to another plan takes, or None and why it cannot be; nothing is changed."""
        if self.why_not is not None or self.plan is None:
            return None, self.why_not or "the model is not spread; call trainer.parallelize(model, plan) first"
        refusal = why_not_recompute(self._blocks, plan.ratio) or _why_not_unit(plan, self._blocks)
        if refusal is not None:
            return None, refusal
        tensors = self._tensors(optimizers)
        return transition(
            self.plan,
            plan,
            tensors,
            num_ranks=self.num_ranks,
            num_local=self._num_local,
            bucket_bytes=self._bucket_bytes,
        )

    def prepare(
        self,
        plan: ParallelPlan,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        known: Sequence[object],
    ) -> Change:
        """A change of how it is spread, ready to be made; ValueError says why it cannot be.

        ``known`` holders of parameters will let go of those that become other objects.
        """
        assert self.plan is not None
        if plan.is_replicated:
            wake: Callable[[], object] = lambda: self._wake(plan.bucket_cap_mb)  # noqa: E731
            after: Callable[[Survey | None], Sharded | Whole] = lambda _: Whole(wake)  # noqa: E731
        else:
            degrees = plan.degrees(self.num_ranks, self._num_local)
            after = lambda survey: Sharded(self._units(plan, survey), degrees, lambda: self._mesh(degrees))  # noqa: E731
        change = Change(
            self.model, optimizers, registered, after=after, rest=self._rest, bucket_bytes=self._bucket_bytes
        )
        if plan.is_replicated:
            self._refuse_numerics(change)
        if change.replaced:
            self._refuse_strangers(change, optimizers, [*registered, *known])
        return change

    def change(self, made: Transition, prepared: Change | None, agree: Agree) -> Moved | None:
        """Make a transition; all ranks call this between two steps. What moving has cost, None where nothing moved."""
        moved = None
        for step in made.steps:
            if step == "spread":
                assert prepared is not None
                device = next(self.model.parameters()).device
                moved = prepared.run(agree, group=self._carriers(), device=torch.device(device.type))
            elif step == "gather":
                self._set_gathering(keeps=not made.new.reshards_after_forward)
            elif step == "prefetch":
                survey = rewire.survey(self.model)
                rewire.set_prefetch(_prefetching(survey.units, made.new.prefetch))
            elif step == "buckets":
                self._rest()
                self._wake(made.new.bucket_cap_mb)
            elif step == "recompute":
                recompute(self._blocks, made.new.ratio)
        self.plan = made.new
        return moved

    def close(self) -> None:
        """Leave the group that carries what is moved."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    # --- what is there ------------------------------------------------------------------------------------------------

    def _recognise(self) -> None:
        """See how a model is spread that somebody else has spread."""
        kinds = [type(module) for module in self.model.modules()]
        if FullyShardedDataParallel in kinds:
            raise ValueError("FSDP1 shards a model when it is wrapped, and not again; start the job anew for it")
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            self._recognise_sharded(rewire.survey(self.model))
            return
        wrappers = [module for module in self.model.modules() if isinstance(module, DistributedDataParallel)]
        if len(wrappers) > 1:
            raise ValueError("several parts of the model are in DDP, each by itself; wrap the model as a whole")
        if wrappers:
            self._replica = Replica(wrappers[0].module, wrappers[0].process_group, arguments_of(wrappers[0]))
            self._replica.wrapper = wrappers[0]
            self.plan = ParallelPlan(strategy="no_shard", bucket_cap_mb=wrappers[0].bucket_bytes_cap / _MIB)

    def _recognise_sharded(self, survey: Survey) -> None:
        meshes = [unit.mesh for unit in survey.units if unit.mesh is not None]
        mesh = meshes[0]
        if any(other != mesh for other in meshes):
            raise ValueError("parts of the model are sharded over different meshes; shard all of it over one")
        if mesh.mesh.flatten().tolist() != list(range(self.num_ranks)):
            raise ValueError(
                f"the model's mesh has the ranks {mesh.mesh.tolist()}; allowed: all {self.num_ranks} ranks in order"
            )
        degrees = Degrees(self.num_ranks // mesh.shape[-1], mesh.shape[-1])
        self._meshes[degrees] = mesh
        inner = [unit for unit in survey.units if self._root not in unit.modules] or list(survey.units)
        after = {unit.reshard_after_forward for unit in inner}
        if not after <= {None, True, False}:
            raise ValueError("the model reshards to fewer ranks after the forward pass, which no plan says")
        gathers_again = after != {False}
        blocks = {id(block): at for at, block in enumerate(self._blocks)}
        sizes = {len(unit.modules) for unit in inner if all(id(module) in blocks for module in unit.modules)}
        self.plan = ParallelPlan(
            strategy="hybrid_shard" if mesh.ndim > 1 else "full_shard" if gathers_again else "shard_grad_op",
            shard_degree=degrees.shard if mesh.ndim > 1 else None,
            unit=max(sizes) if sizes else 1 if len(survey.units) > 1 else "whole",
        )

    def _tensors(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """What moves with the parameters, as far as it can be told without looking for what stands against it."""
        found = []
        for name, parameter in self.model.named_parameters():
            state = [value for each in optimizers for value in each.state.get(parameter, {}).values()]
            for value in (parameter, parameter.grad, *state):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    dim = rewire.dim_of_tensor(value) if isinstance(value, DTensor) else 0
                    found.append(Tensor(name, tuple(value.shape), value.element_size(), dim))
        return found

    # --- what shall be ------------------------------------------------------------------------------------------------

    def _units(self, plan: ParallelPlan, survey: Survey | None) -> list[Unit]:
        """What fully_shard is to make for a plan, innermost first."""
        assert self.plan is not None or survey is None
        root = self._root
        if survey is not None and self.plan is not None and self.plan.unit == plan.unit:
            groups = [unit.modules for unit in survey.units]
        else:
            chosen = units_of_blocks(len(self._blocks), plan.unit)
            groups = [tuple(self._blocks[at] for at in unit) for unit in chosen]
            outer = [unit.modules for unit in survey.units if root in unit.modules] if survey is not None else []
            groups.append(outer[0] if outer else (root,))
        refusal = _why_not_unit(plan, self._blocks) or _why_not_tied(root, groups)
        if refusal is not None:
            raise ValueError(refusal)
        like = _like(survey)
        keeps = False if plan.strategy == "shard_grad_op" else None
        units = [replace(like(modules), modules=modules, mesh=None, reshard_after_forward=keeps) for modules in groups]
        return _prefetching(units, plan.prefetch)

    def _refuse_undivided(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(f"{name} has no dimension that fully_shard could cut; give it the shape (1,)")

    def _refuse_numerics(self, change: Change) -> None:
        """Whole parameters are trained as they are."""
        for unit in change.units_before:
            if unit.precision != MixedPrecisionPolicy() or type(unit.offload) is not OffloadPolicy:
                raise ValueError(f"the model is sharded with a policy for mixed precision or offloading, {_KEEPS}")
            if unit.settings != rewire.Settings():
                raise ValueError(f"gradients of the model are divided or shared in a way of your own, {_KEEPS}")
        patched = rewire.patched_methods(self.model)
        if patched:
            raise ValueError(f"{patched[0]} was registered as a forward method of fully_shard, {_KEEPS}")

    def _refuse_strangers(self, change: Change, optimizers: Sequence[Optimizer], known: Sequence[object]) -> None:
        for tensor in change.replaced:
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"a parameter of shape {tuple(tensor.shape)} has hooks, {_BECOMES}")
        replica = self._replica
        wrappers = [] if replica is None else [each for each in (replica.engine, replica.wrapper) if each is not None]
        own = [holder for wrapper in wrappers for holder in holders_in(wrapper)]
        found = strangers(self.model, optimizers, change.replaced, [*known, *change.holders, *own])
        if found:
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            raise ValueError(f"a parameter is also held by {', '.join(found[:3])}{more}, {_BECOMES}")

    # --- doing it -----------------------------------------------------------------------------------------------------

    def _mesh(self, degrees: Degrees) -> DeviceMesh:
        """One for each way to share ranks out, made once: its groups are never given back."""
        if degrees not in self._meshes:
            kind = next(self.model.parameters()).device.type
            sizes = {"replicate": degrees.replicate, "shard": degrees.shard}
            if degrees.replicate == 1:
                del sizes["replicate"]
            self._meshes[degrees] = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._meshes[degrees]

    def _carriers(self) -> dist.ProcessGroup:
        if self._group is None:
            made = dist.new_group()
            assert isinstance(made, dist.ProcessGroup)
            self._group = made
        return self._group

    def _wake(self, bucket_cap_mb: float | None) -> None:
        if self._replica is None:
            self._replica = Replica(self.model, None, {})
        if self.num_ranks > 1:
            self._replica.wake(bucket_cap_mb)

    def _rest(self) -> None:
        assert self._replica is not None
        self._replica.rest()

    def _give_all_the_first(self) -> None:
        """Give rank 0's parameters and buffers to all, as DDP does."""
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


_KEEPS = (
    'which DDP does not know of; choose the strategy "hybrid_shard" with shard_degree=1 instead of no_shard, which '
    "keeps it"
)
_BECOMES = (
    "and it becomes another object when the model goes between no_shard and a sharded plan; let go of it, register it "
    'with trainer.register_state, or choose the strategy "hybrid_shard" with shard_degree=1 instead of no_shard, under '
    "which parameters stay the same objects"
)


def _why_not_called(model: nn.Module) -> str | None:
    """Why nothing would see the model's passes."""
    if getattr(type(model), "forward", None) is not nn.Module.forward or "forward" in vars(model):
        return None
    return (
        f"the model is a {type(model).__name__} that only holds others and is not called, and its gradients are shared "
        "where it is; give the trainer a module whose forward() calls them"
    )


def _why_not_unit(plan: ParallelPlan, blocks: Sequence[nn.Module]) -> str | None:
    if plan.is_replicated or plan.unit in (1, "whole") or blocks:
        return None
    return f'unit is {plan.unit}, and no repeated blocks were found; name them with units=, or give "whole"'


def _why_not_tied(root: nn.Module, groups: Sequence[tuple[nn.Module, ...]]) -> str | None:
    """Why the units cannot be: one parameter would lie in two of them."""
    owner: dict[int, int] = {}
    for at, modules in reversed(list(enumerate(groups))):  # the outermost first, then what lies within it
        for module in modules:
            owner.update((id(part), at) for part in module.modules())
    seen: dict[int, tuple[int, str]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(module) not in owner:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first = seen.setdefault(id(parameter), (owner[id(module)], full))
            if first[0] != owner[id(module)]:
                return (
                    f"{first[1]} and {full} are one parameter, and would lie in two units; choose units that hold "
                    'both, or unit="whole"'
                )
    return None


def _like(survey: Survey | None) -> Callable[[tuple[nn.Module, ...]], Unit]:
    """What was set on the units that are there, for those that come in their place."""
    if survey is None:
        plain = Unit((), None, None, MixedPrecisionPolicy(), OffloadPolicy(), rewire.Settings(), (), ())
        return lambda modules: plain
    own = [unit for unit in survey.units if unit.mesh is not None]
    if all(
        (unit.precision, unit.settings) == (own[0].precision, own[0].settings)
        and type(unit.offload) is type(own[0].offload)
        for unit in own
    ):
        return lambda modules: own[0]
    by_modules = {unit.modules: unit for unit in survey.units}

    def found(modules: tuple[nn.Module, ...]) -> Unit:
        if modules not in by_modules:
            raise ValueError(
                "units of the model differ in mixed precision, offloading or how gradients are divided; their number "
                "of blocks has to stay"
            )
        return by_modules[modules]

    return found


def _prefetching(units: Sequence[Unit], depth: int | None) -> list[Unit]:
    """Units that gather ``depth`` others ahead; as torch does by itself where it is None."""
    *inner, outermost = units
    chosen: list[Unit] = []
    for at, unit in enumerate(inner):
        if depth is None:
            chosen.append(replace(unit, forward_prefetch=(), backward_prefetch=()))
            continue
        ahead = tuple(other.modules for other in inner[at + 1 : at + 1 + depth])
        behind = tuple(other.modules for other in reversed(inner[max(0, at - depth) : at]))
        # One that names itself gathers nothing ahead; an empty list would leave it to torch.
        chosen.append(replace(unit, forward_prefetch=ahead, backward_prefetch=behind or (unit.modules,)))
    first = tuple(unit.modules for unit in inner[: depth or 0])
    last = tuple(unit.modules for unit in reversed(inner[len(inner) - (depth or 0) :]))
    back = () if depth is None else last or (outermost.modules,)
    return [*chosen, replace(outermost, forward_prefetch=first, backward_prefetch=back)]
