"""A change of how a model in training is spread over its ranks, in the same processes, no value altered.

Everything that can be refused is refused before an element moves, and what was there is then there again. From the
first bucket that ranks have exchanged on there is no way back: a failure is raised on all ranks, and leaves a state
that only a checkpoint mends.

Words: parameters are *sharded*, each rank's part a DTensor in one of fully_shard's units; or *whole*, plain tensors on
every rank, their gradients averaged by DDP. Sharded parameters stay the same objects as long as they are sharded;
between sharded and whole others take their place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.layout import turn_of
from elastic_ext.fsdp.plan import Degrees
from elastic_ext.fsdp.state import local_of

from . import rewire
from .affected_tensors import MovedTensor, PlacedParameter, moved_tensors, parameters_of
from .buckets import Bucket, BucketPlan
from .companions import Tensors, replace_parameter
from .exchange import BucketExchange
from .references import replace_in
from .units import ParameterSlot, Survey, Unit

__all__ = ["Agree", "Change", "ChangeCost", "Sharded", "Whole"]

Agree = Callable[[BaseException | None], None]
"""Called by all ranks with their errors: returns where none brings one, and raises on all where one does."""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A target of a change: the units that fully_shard shall make, innermost first."""

    units: Sequence[Unit]
    degrees: Degrees
    mesh: Callable[[], DeviceMesh]
    """Gives the mesh of the degrees; all ranks call this, which may make groups."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A target of a change: plain parameters; ``wake`` begins to average their gradients once they are there."""

    wake: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class ChangeCost:
    """What a change of plan has cost: bytes, memory and seconds."""

    sent_bytes: int
    """Bytes that went from one rank to another."""
    num_replaced: int
    """How many parameters are other objects now."""
    extra_bytes: int
    """The most bytes that a bucket took on a rank beside what the state took before and after."""
    wiring_seconds: float
    moving_seconds: float


class Target(Protocol):
    """What a model shall be after a change, and what wraps it meanwhile."""

    def after(self, survey: Survey | None) -> Sharded | Whole:
        """What the model shall be; ``survey`` is what fully_shard has made of it, None where nothing is sharded."""

    def rest(self) -> None:
        """Take DDP off the model, where there may be one; on all ranks."""

    def wake_again(self) -> None:
        """Put DDP on again as it was, where the change is taken back; on all ranks."""


class Change:
    """A change of how a model is spread: checked as it is made, on every rank, and then ``run``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        target: Target,
        *,
        bucket_bytes: int,
    ) -> None:
        """Check everything that stands against the change; ValueError says why it cannot be."""
        self._model = model
        self._optimizers = optimizers
        self._registered = registered
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._survey = rewire.survey(model) if is_sharded else None
        self._target = target
        self._after = target.after(self._survey)
        self._parameters = list(parameters_of(model, self._survey))
        managed = {id(each.tensor) for each in self._parameters}
        self.left_out = {parameter for parameter in model.parameters() if id(parameter) not in managed}
        """Parameters that the user has left out of fully_shard."""
        degrees = self._after.degrees if isinstance(self._after, Sharded) else None
        tensors_that_move = moved_tensors(model, self._parameters, optimizers, registered, degrees)
        self._tensors: list[MovedTensor | None] = [*tensors_that_move]  # None: where it shall be
        self.bucket_plan = BucketPlan([each.item for each in tensors_that_move], 2 * bucket_bytes)
        """The tensors that have to be moved, in buckets."""
        self.is_as_before = True
        """Whether nothing of the change has been done, or all of it was taken back."""

    @property
    def replaced(self) -> list[torch.Tensor]:
        """The parameters that will be other objects after the change."""
        stays = (self._survey is None) is isinstance(self._after, Whole)
        return [] if stays else [each.tensor for each in self._parameters]

    @property
    def units_before(self) -> Sequence[Unit]:
        """The units that fully_shard has made so far."""
        return () if self._survey is None else self._survey.units

    @property
    def holders(self) -> list[object]:
        """The objects of this change that refer to parameters."""
        own: list[object] = [self.left_out, *self._parameters, *self._tensors]
        own += [module._flat_weights for module in self._model.modules() if isinstance(module, nn.RNNBase)]
        if self._survey is not None:
            own += [*self._survey.slots, *(slot.keeper for slot in self._survey.slots)]
        return own + [vars(each) for each in own if hasattr(each, "__dict__")]

    def run(self, agree: Agree, *, group: dist.ProcessGroup, device: torch.device) -> ChangeCost:
        """Make the change; all ranks call this between two steps. ``group`` has all ranks, for ``device``."""
        began = time.perf_counter()
        self._compare(group, device)
        num_replaced = len(self.replaced)
        mesh: DeviceMesh | None = None
        error: BaseException | None = None
        locals_before = [local_of(each.tensor) for each in self._parameters]
        slots: list[ParameterSlot] = []
        self.is_as_before = False
        try:
            mesh = self._after.mesh() if isinstance(self._after, Sharded) else None
            slots = self._wire(mesh)
        except Exception as caught:  # whatever it is, what was there has to come back
            error = caught.with_traceback(None)  # which keeps alive what has been taken off
        self._agree_or_go_back(agree, error, locals_before)
        wired = time.perf_counter()
        self._move(agree, locals_before, slots, mesh, group=group, device=device)
        if isinstance(self._after, Whole):
            self._after.wake()
        return ChangeCost(
            sent_bytes=self.bucket_plan.sent_bytes,
            num_replaced=num_replaced,
            extra_bytes=self.bucket_plan.extra_bytes,
            wiring_seconds=wired - began,
            moving_seconds=time.perf_counter() - wired,
        )

    def _compare(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raise on all ranks where they would not move the same tensors."""
        told = repr(
            [(item.name, item.new.shape, item.item_bytes, item.old == item.new) for item in self.bucket_plan.items]
        )
        own = torch.tensor([turn_of(told) % (1 << 62)], device=device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        if any(bool(each != own) for each in found):
            raise ElasticError(
                f"ranks would move different tensors: rank {dist.get_rank()} has {len(self.bucket_plan.items)} tensors "
                "and another rank has others, or as many of other names or shapes; train the same parameters on all "
                "ranks, and register the same state (trainer.register_state) under the same names"
            )

    def _move(
        self,
        agree: Agree,
        locals_before: list[torch.Tensor],
        slots: Sequence[ParameterSlot],
        mesh: DeviceMesh | None,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Move all tensors, bucket by bucket; an error of this rank is raised on all."""
        error: BaseException | None = None
        exchange: BucketExchange | None = None
        new: list[torch.Tensor] | None = None
        buckets = self.bucket_plan.buckets
        try:
            most_bytes = self.bucket_plan.staged_bytes[dist.get_rank()] if buckets else 0
            exchange = BucketExchange(most_bytes, group=group, device=device)
            new = self._memory_for(buckets[0], slots) if buckets else []
        except Exception as caught:  # there is not enough of it, as a rule
            error = caught.with_traceback(None)
        self._agree_or_go_back(agree, error, locals_before)
        assert exchange is not None
        locals_before.clear()
        self._survey = None  # which keeps what was there
        for bucket in buckets:
            tensors: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
            try:
                if error is None:
                    new = new if bucket.first == 0 and new is not None else self._memory_for(bucket, slots)
                    tensors = [local_of(each.tensor).contiguous() for each in self._tensors_in(bucket)], new
            except Exception as caught:
                error = caught.with_traceback(None)
            is_well = exchange.carry(bucket, tensors)
            if not is_well and bucket.sent_bytes:
                break  # all ranks know that one is not well
            try:
                if tensors is not None:
                    self._take_over(bucket, tensors[1], slots, mesh)
            except Exception as caught:
                error = caught.with_traceback(None)
        else:
            try:
                if error is None:
                    rewire.settle(self._model)
            except Exception as caught:
                error = caught.with_traceback(None)
        agree(error)

    def _wire(self, mesh: DeviceMesh | None) -> list[ParameterSlot]:
        """Take off what wraps the model and put on what shall wrap it; gives the slots in order of the parameters."""
        if self._survey is not None:
            rewire.take_off(self._model)
        elif self.replaced:
            self._target.rest()
        rewire.stand_in((each.tensor, each.places) for each in self._parameters)
        return self._put_on(self._after.units, mesh) if isinstance(self._after, Sharded) else []

    def _put_on(self, units: Sequence[Unit], mesh: DeviceMesh | None) -> list[ParameterSlot]:
        dims = {each.places[0]: each.dim for each in self._parameters}
        rewire.put_on(units, mesh, dims, self.left_out)
        rewire.place_hooks(self._model, {} if self._survey is None else self._survey.ahead)
        by_place = {place: slot for slot in rewire.slots_of(self._model) for place in slot.places}
        return [by_place[each.places[0]] for each in self._parameters]

    def _agree_or_go_back(
        self, agree: Agree, error: BaseException | None, locals_before: Sequence[torch.Tensor]
    ) -> None:
        try:
            agree(error)
        except Exception:
            failure: Exception | None = None
            try:
                self._go_back(locals_before)
            except Exception as caught:
                failure = caught.with_traceback(None)
            agree(failure)  # else some ranks would go on
            self.is_as_before = True
            raise

    def _go_back(self, locals_before: Sequence[torch.Tensor]) -> None:
        """Put back what wrapped the model before the change."""
        rewire.take_off(self._model)
        if self._survey is None:
            for each in self._parameters:
                each.register()
            if self.replaced:
                self._target.wake_again()
            return
        rewire.stand_in((each.tensor, each.places) for each in self._parameters)
        slots = self._put_on(self._survey.units, None)
        for slot, each, local in zip(slots, self._parameters, locals_before, strict=True):
            rewire.bind(slot, each.tensor, local)
        rewire.settle(self._model)

    def _tensors_in(self, bucket: Bucket) -> list[MovedTensor]:
        found = self._tensors[bucket.first : bucket.first + len(bucket.items)]
        return [each for each in found if each is not None]

    def _memory_for(self, bucket: Bucket, slots: Sequence[ParameterSlot]) -> list[torch.Tensor]:
        return [self._memory(each, local_of(each.tensor), slots) for each in self._tensors_in(bucket)]

    def _memory(self, each: MovedTensor, local: torch.Tensor, slots: Sequence[ParameterSlot]) -> torch.Tensor:
        """Memory for this rank's new part of a tensor: the present memory, if the part stays the same."""
        rank = dist.get_rank()
        box = each.item.new.boxes[rank]
        if each.item.old.boxes[rank] == box:
            return local
        shape = list(each.tensor.shape)
        num_across = math.prod(size for dim, size in enumerate(shape) if dim != each.dim)
        shape[each.dim] = box.num_elements // max(1, num_across)
        if each.parameter is None or not slots:
            return local.new_empty(shape)
        padded = local.new_empty(rewire.padded_size(slots[each.parameter]))
        padded[box.num_elements :].zero_()
        return padded[: box.num_elements].view(shape)

    def _take_over(
        self, bucket: Bucket, new: Sequence[torch.Tensor], slots: Sequence[ParameterSlot], mesh: DeviceMesh | None
    ) -> None:
        """Put the bucket's tensors into their new memory, and let go of the old one."""
        for each, local in zip(self._tensors_in(bucket), new, strict=True):
            self._bind(each, local, slots, mesh)
        self._tensors[bucket.first : bucket.first + len(bucket.items)] = [None] * len(bucket.items)

    def _bind(
        self, each: MovedTensor, local: torch.Tensor, slots: Sequence[ParameterSlot], mesh: DeviceMesh | None
    ) -> None:
        if each.parameter is not None:
            parameter = self._parameters[each.parameter]
            self._bind_parameter(parameter, local, slots[each.parameter] if slots else None, mesh)
            parameter.arrive()
        elif mesh is None:
            if each.tensor is not local:
                each.put(local)
        else:
            made = _sharded(each.tensor, each.dim, local, mesh)
            if isinstance(each.tensor, DTensor):
                rewire.rebind(each.tensor, local, made)
            else:
                each.put(made)

    def _bind_parameter(
        self, each: PlacedParameter, local: torch.Tensor, slot: ParameterSlot | None, mesh: DeviceMesh | None
    ) -> None:
        old = each.tensor
        if slot is not None and isinstance(old, DTensor):
            rewire.bind(slot, old, local)
            return
        if slot is not None:
            assert mesh is not None
            new = nn.Parameter(_sharded(old, each.dim, local, mesh), requires_grad=old.requires_grad)
            rewire.bind(slot, new, local)
        elif isinstance(old, DTensor):
            new = nn.Parameter(local, requires_grad=old.requires_grad)
        else:
            new = old
        if new is not old:
            new.__dict__.update(rewire.noted_on(old))
            replace_in(self._optimizers, old, new)
            replace_parameter(self._registered, old, new)
            each.tensor = new
        each.register()


def _sharded(tensor: torch.Tensor, dim: int, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor with ``local`` as this rank's part, of the shape of ``tensor``."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
