"""A change of how a model in training is spread over its ranks, or over which ranks, no value altered.

Everything that can be refused is refused before an element moves, and what was there is then there again. From the
first bucket that ranks have exchanged on there is no way back: a failure is raised on all ranks, and leaves a state
that only a checkpoint mends.

Where ranks leave, they give what they have on the process groups that are there; then the groups of the new world are
formed, and on these ranks that come get what they lack. Who stays keeps its process and its objects.

Words: parameters are *sharded*, each rank's part a DTensor in one of fully_shard's units; or *whole*, plain tensors on
every rank, their gradients averaged by DDP. Sharded parameters stay the same objects as long as they are sharded;
between sharded and whole others take their place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.layout import row_major, turn_of
from elastic_ext.fsdp.plan import Degrees
from elastic_ext.fsdp.state import local_of
from elastic_ext.fsdp.worlds import Worlds
from elastic_ext.torch_private.meshes import forget_propagation, let_go_of_groups

from . import rewire
from .affected_tensors import (
    MemberRoute,
    MovedParts,
    MovedTensor,
    PlacedParameter,
    begin_like,
    moved_tensors,
    outline_of,
    parameters_of,
    tell_outline,
)
from .buckets import Bucket, BucketItem, BucketPlan
from .companions import Tensors, replace_parameter
from .exchange import BucketExchange, Memories
from .references import replace_in
from .units import ParameterSlot, Survey, Unit

__all__ = ["Agree", "Change", "ChangeCost", "Regroup", "Sharded", "Whole"]

_Given = TypeVar("_Given")
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
    forming_seconds: float = 0.0
    """Seconds in which process groups were ended and formed."""


class Target(Protocol):
    """What a model shall be after a change, and what wraps it meanwhile."""

    def after(self, survey: Survey | None) -> Sharded | Whole:
        """What the model shall be; ``survey`` is what fully_shard has made of it, None where nothing is sharded."""

    def before(self) -> Degrees:
        """The degrees of the old plan in the old world."""

    def rest(self) -> None:
        """Take DDP off the model, where there may be one; on all ranks."""

    def wake_again(self) -> None:
        """Put DDP on again as it was, where the change is taken back; on all ranks."""

    def let_go_of_groups(self) -> None:
        """Keep no mesh and no process group, since these are about to end."""

    def mesh_before(self) -> DeviceMesh:
        """The mesh of the old degrees, made anew where it was let go of; on all ranks."""


class Regroup(Protocol):
    """The process groups of a change of members: who may end those that are there, and form others."""

    @property
    def can_go_back(self) -> bool:
        """Whether the groups of the old world could be formed anew: not where some of its ranks are lost."""

    def form(self) -> None:
        """Destroy all process groups, and form the default one of the new world; all of its ranks call this."""

    def have_met(self) -> None:
        """Note that all ranks of the formed world are there and well: collectives have their usual limit again."""

    def form_again(self) -> None:
        """Destroy what was formed, and form the default group of the old world; all of its ranks call this."""


@dataclass(frozen=True, eq=False)
class _Stage:
    """A part of a change whose moves all take place among the ranks of one world."""

    plan: BucketPlan
    rank_of: Sequence[int | None]
    """The rank of each holder in that world."""
    is_last: bool

    def item_of(self, each: MovedTensor) -> BucketItem:
        item = each.item if self.is_last else each.given
        assert item is not None
        return item


@dataclass(frozen=True, eq=False)
class _Among:
    """The ranks among which a change is made, and what they make it by."""

    agree: Agree
    device: torch.device
    group: dist.ProcessGroup | None
    """The process group on which buckets are exchanged; None: the default one that is there by then."""
    regroup: Regroup | None = None
    """What swaps the process groups, where the ranks change."""


class Change:
    """A change of how a model is spread: checked as it is made, on every rank, then made by ``run`` or ``regroup``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        registered: Sequence[Tensors],
        target: Target,
        *,
        worlds: Worlds,
        holder: int,
        bucket_bytes: int,
        left: Change | None = None,
    ) -> None:
        """Check everything that stands against the change; ValueError says why it cannot be.

        ``holder`` is this process's number among those of both worlds; ``left`` is the change by which it has left a
        world, if it comes back from none.
        """
        self._model = model
        self._optimizers = optimizers
        self._registered = registered
        self._worlds, self._holder = worlds, holder
        self._bucket_bytes = bucket_bytes
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._survey: Survey | None = None
        if left is not None:
            self._survey = left._survey
        elif is_sharded:
            self._survey = rewire.survey(model)
        self.target = target
        self.lists: Sequence[list[torch.Tensor]] = ()
        """The lists of the script's in which parameters are replaced, as in the groups of optimizers."""
        self._after = target.after(self._survey)
        self._parameters = list(parameters_of(model, self._survey) if left is None else left._as_left())
        managed = {id(each.tensor) for each in self._parameters}
        self.left_out = {parameter for parameter in model.parameters() if id(parameter) not in managed}
        """Parameters that the user has left out of fully_shard."""
        self._names = self._parts.names()
        if not worlds.is_same:  # who comes may have them in another order, by a plan of its own
            self._parameters.sort(key=lambda each: self._names[id(each.tensor)])
        self._tensors: list[MovedTensor | None] = []  # None: where it shall be
        self._slots: list[ParameterSlot] = []
        self._mesh: DeviceMesh | None = None
        self._locals_before: list[torch.Tensor] = []
        self._has_moved = False  # so that there is no way back
        self._has_let_go = False  # of the process groups of before
        self._look()
        tells = worlds.has_comers and worlds.new[holder] == 0
        self._outline = outline_of(self._named(), optimizers) if tells else None
        self.is_as_before = True
        """Whether nothing of the change has been done, or all of it was taken back."""

    def _look(self) -> None:
        """Find the tensors to move, and their moves."""
        is_sharded = isinstance(self._after, Sharded)
        after = self._after.degrees if isinstance(self._after, Sharded) else Degrees(self._worlds.num_new, 1)
        route = MemberRoute(self._worlds, self.target.before(), after, is_sharded, self.comes)
        tensors_that_move = moved_tensors(self._parts, self._names, route)
        self._tensors = [*tensors_that_move]
        self.bucket_plan = BucketPlan([each.item for each in tensors_that_move], 2 * self._bucket_bytes)
        """The tensors that have to be moved among the ranks of the new world, in buckets."""
        given = [each.given for each in tensors_that_move if each.given is not None]
        self.given_plan = BucketPlan(given, 2 * self._bucket_bytes)
        """The tensors that have to be moved before, among the ranks of the old world, in buckets."""

    @property
    def comes(self) -> bool:
        """Whether this rank is not in the old world."""
        return self._worlds.old[self._holder] is None

    @property
    def leaves(self) -> bool:
        """Whether this rank is not in the new world."""
        return self._worlds.new[self._holder] is None

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

    def _as_left(self) -> Iterator[PlacedParameter]:
        """The parameters of a rank that has left, for the change by which it comes back."""
        return (PlacedParameter(each.tensor, each.places, each.dim) for each in self._parameters)

    @property
    def _parts(self) -> MovedParts:
        left_out = [parameter for parameter in self._model.parameters() if parameter in self.left_out]
        return MovedParts(self._model, self._parameters, left_out, self._optimizers, self._registered)

    def run(self, agree: Agree, *, group: dist.ProcessGroup, device: torch.device) -> ChangeCost:
        """Make the change; all ranks call this between two steps. ``group`` has all ranks, for ``device``."""
        began = time.perf_counter()
        among = _Among(agree, device, group)
        mismatch, _ = self._compare(among, None)
        if mismatch is not None:
            raise mismatch
        self._begin()
        error = self._caught(self._make_mesh) or self._caught(self._unwire)
        return self._complete(among, error, began)

    def regroup(self, agree: Agree, groups: Regroup, *, device: torch.device) -> ChangeCost:
        """Make the change to a world of other ranks; the ranks of both worlds call this between two steps.

        Buckets are exchanged on the default process group that is there by then, which ``groups`` swaps; the ranks of
        that group call ``agree``. Who leaves is done once it has given what it has, and swaps nothing.
        """
        began = time.perf_counter()
        among = _Among(agree, device, None, groups)
        self._begin()
        error = self._caught(self._unwire)
        if self._worlds.has_leavers and not self.comes:
            self._move(among, error, _Stage(self.given_plan, self._worlds.old, is_last=False))
            error, self._has_moved = None, True
        let_go = time.perf_counter()
        self._let_go_of_groups()
        if self.leaves:
            return self._cost(0, began, 0.0, let_go)
        self._or_go_back(among, groups.form)
        forming_seconds = time.perf_counter() - let_go
        outline = None
        if self._worlds.has_comers:
            outline = self._or_go_back(among, lambda: tell_outline(self._outline, device))
        if isinstance(self._after, Sharded):
            self._agree_or_go_back(among, error)  # all have come; groups of a mesh wait long for who is lost
            error = self._caught(self._make_mesh)
        if error is None and outline is not None and self.comes:
            error = self._caught(lambda: self._begin_like(outline))
        return self._complete(among, error, began, forming_seconds)

    def _begin(self) -> None:
        """Note that the change has begun, and what there was before."""
        self.is_as_before = False
        self._locals_before = [local_of(each.tensor) for each in self._parameters]

    def _complete(
        self, among: _Among, error: BaseException | None, began: float, forming_seconds: float = 0.0
    ) -> ChangeCost:
        """Put on what shall wrap the model, and move all tensors to where they shall lie."""
        num_replaced = len(self.replaced)
        if error is None:
            error = self._caught(self._wire)
        wired = time.perf_counter()
        self._move(among, error, _Stage(self.bucket_plan, self._worlds.new, is_last=True))
        if isinstance(self._after, Whole):
            self._after.wake()
        return self._cost(num_replaced, began, forming_seconds, wired)

    def _cost(self, num_replaced: int, began: float, forming_seconds: float, wired: float) -> ChangeCost:
        """What the change has cost until now."""
        return ChangeCost(
            sent_bytes=self.given_plan.sent_bytes + self.bucket_plan.sent_bytes,
            num_replaced=num_replaced,
            extra_bytes=max(self.given_plan.extra_bytes, self.bucket_plan.extra_bytes),
            wiring_seconds=wired - began - forming_seconds,
            moving_seconds=time.perf_counter() - wired,
            forming_seconds=forming_seconds,
        )

    @staticmethod
    def _caught(act: Callable[[], object]) -> Exception | None:
        """The error that something raises, whatever it is: what was there has to come back."""
        try:
            act()
        except Exception as error:
            return error.with_traceback(None)  # which keeps alive what has been taken off
        return None

    def _compare(self, among: _Among, error: BaseException | None) -> tuple[ElasticError | None, bool]:
        """An error on all ranks where they would not move the same tensors, and whether no rank has an ``error``."""
        told = repr(
            [
                (item.name, item.new.shape, item.item_bytes, item.old == item.new)
                for plan in (self.given_plan, self.bucket_plan)
                for item in plan.items
            ]
        )
        own = torch.tensor([turn_of(told) % (1 << 62), int(error is None)], device=among.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(among.group))]
        dist.all_gather(found, own, group=among.group)
        rows = [each.tolist() for each in found]
        are_well = all(is_well for _, is_well in rows)
        if len({turn for turn, _ in rows}) == 1:
            return None, are_well
        mismatch = ElasticError(
            f"ranks would move different tensors: rank {dist.get_rank()} has {len(self.bucket_plan.items)} tensors and "
            "another rank has others, or as many of other names or shapes; train the same parameters on all ranks, "
            "and register the same state (trainer.register_state) under the same names"
        )
        return mismatch, are_well

    def _meet(self, among: _Among, error: BaseException | None) -> None:
        """Return where no rank brings an error and all would move the same tensors; else go back, and raise on all."""
        mismatch, are_well = self._or_go_back(among, lambda: self._compare(among, error))
        if mismatch is not None or not are_well:
            self._agree_or_go_back(among, error or mismatch)
        if among.regroup is not None:
            among.regroup.have_met()

    # --- other ranks -----------------------------------------------------------------------------------------------

    def _let_go_of_groups(self) -> None:
        """Keep no process group alive: those that are still known end with their sockets."""
        self.target.let_go_of_groups()
        meshes = [each.tensor.device_mesh for each in self._present() if isinstance(each.tensor, DTensor)]
        meshes += [unit.mesh for unit in self.units_before if unit.mesh is not None]
        for mesh in meshes if self._mesh is None else (*meshes, self._mesh):
            let_go_of_groups(mesh)
        self._mesh = None
        forget_propagation()
        self._has_let_go = True

    def _or_go_back(self, among: _Among, act: Callable[[], _Given]) -> _Given:
        """What ranks get together, by collectives of the new world; where one fails, what was there is put back.

        This rank is lost to the others then, with its groups, so that they fail too, wherever they are.
        """
        given: list[_Given] = []
        error = self._caught(lambda: given.append(act()))
        if error is not None:
            self._go_back_if_possible(among)
            raise error
        return given[0]

    def _named(self) -> dict[str, nn.Parameter]:
        """All parameters by name: those that lie by the plan, and those left out of fully_shard."""
        parts = self._parts
        return {self._names[id(each)]: each for each in (*(each.tensor for each in parts.parameters), *parts.left_out)}

    def _begin_like(self, outline: dict[str, Any]) -> None:
        """Have the tensors of those who stay, without memory as far as others take their place."""
        begin_like(outline, self._named(), self._optimizers)
        self._look()
        for each in self._present():
            if isinstance(each.tensor, DTensor):
                local = local_of(each.tensor)
                cast(Any, each.tensor)._local_tensor = local.new_empty(_with_size(local.shape, each.dim, 0))

    # --- moving ----------------------------------------------------------------------------------------------------

    def _move(self, among: _Among, error: BaseException | None, stage: _Stage) -> None:
        """Move all tensors, bucket by bucket; an error of this rank is raised on all."""
        exchange: BucketExchange | None = None
        new: list[torch.Tensor] | None = None
        buckets = stage.plan.buckets
        try:
            most_bytes = stage.plan.staged_bytes[self._holder] if buckets else 0
            exchange = BucketExchange(stage.rank_of, most_bytes, group=among.group, device=among.device)
            new = self._memory_for(buckets[0], stage) if buckets else []
        except Exception as caught:  # there is not enough of it, as a rule
            error = error or caught.with_traceback(None)
        self._meet(among, error)
        assert exchange is not None
        self._locals_before = []
        if stage.is_last:
            self._survey = None  # which keeps what was there
        for bucket in buckets:
            memories: Memories | None = None
            try:
                if error is None:
                    new = new if bucket.first == 0 and new is not None else self._memory_for(bucket, stage)
                    memories = Memories([self._source(each, stage) for each in self._tensors_in(bucket)], new)
            except Exception as caught:
                error = caught.with_traceback(None)
            is_well = exchange.carry(bucket, None if memories is None else {self._holder: memories})
            if not is_well and bucket.sent_bytes:
                break  # all ranks know that one is not well
            try:
                if memories is not None:
                    self._take_over(bucket, memories.new, stage)
            except Exception as caught:
                error = caught.with_traceback(None)
        else:
            try:
                if error is None and stage.is_last:
                    rewire.settle(self._model)
            except Exception as caught:
                error = caught.with_traceback(None)
        among.agree(error)

    def _unwire(self) -> None:
        """Take off what wraps the model."""
        if self._survey is not None:
            rewire.take_off(self._model)
        else:
            self.target.rest()

    def _make_mesh(self) -> None:
        """Make the mesh over which parameters are to be sharded, if they are; all ranks call this."""
        self._mesh = self._after.mesh() if isinstance(self._after, Sharded) else None

    def _wire(self) -> None:
        """Put on what shall wrap the model, with parameters that have no memory so far."""
        if self._survey is not None or isinstance(self._after, Sharded):
            rewire.stand_in((each.tensor, each.places) for each in self._parameters)
        if isinstance(self._after, Sharded):
            self._slots = self._put_on(self._after.units, self._mesh)

    def _put_on(self, units: Sequence[Unit], mesh: DeviceMesh | None) -> list[ParameterSlot]:
        dims = {each.places[0]: each.dim for each in self._parameters}
        rewire.put_on(units, mesh, dims, self.left_out)
        rewire.place_hooks(self._model, {} if self._survey is None else self._survey.ahead)
        by_place = {place: slot for slot in rewire.slots_of(self._model) for place in slot.places}
        return [by_place[each.places[0]] for each in self._parameters]

    def _agree_or_go_back(self, among: _Among, error: BaseException | None) -> None:
        try:
            among.agree(error)
        except Exception:
            self._go_back_if_possible(among)
            raise

    def _go_back_if_possible(self, among: _Among) -> None:
        """Go back to what was there before, on all ranks that were there, unless something has moved.

        Raises on all of them where one cannot.
        """
        if self.comes or self._has_moved or (among.regroup is not None and not among.regroup.can_go_back):
            return
        failure = self._caught(lambda: self._go_back(among))
        among.agree(failure)  # else some ranks would go on
        self.is_as_before = True

    def _go_back(self, among: _Among) -> None:
        """Put back what wrapped the model before, on process groups formed anew if those of before were ended."""
        rewire.take_off(self._model)
        mesh: DeviceMesh | None = None
        if among.regroup is not None and self._has_let_go:
            self._let_go_of_groups()
            among.regroup.form_again()
            mesh = None if self._survey is None else self.target.mesh_before()
        if self._survey is None:
            for each in self._parameters:
                each.register()
            self.target.rest()  # where it has not been taken off
            self.target.wake_again()
            return
        rewire.stand_in((each.tensor, each.places) for each in self._parameters)
        slots = self._put_on(self._survey.units, mesh)
        for slot, each, local in zip(slots, self._parameters, self._locals_before, strict=True):
            rewire.bind(slot, each.tensor, local)
        for moved in self._present():
            if mesh is not None and moved.parameter is None and isinstance(moved.tensor, DTensor):
                local = local_of(moved.tensor)
                rewire.rebind(moved.tensor, local, _sharded(moved.tensor, moved.dim, local, mesh))
        rewire.settle(self._model)

    def _present(self) -> list[MovedTensor]:
        return [each for each in self._tensors if each is not None]

    def _tensors_in(self, bucket: Bucket) -> list[MovedTensor]:
        found = self._tensors[bucket.first : bucket.first + len(bucket.items)]
        return [each for each in found if each is not None]

    def _source(self, each: MovedTensor, stage: _Stage) -> torch.Tensor:
        """What this rank has of a tensor, in the order of its elements; whatever there is where nothing is read."""
        local = local_of(each.tensor)
        return local if stage.item_of(each).old.boxes[self._holder].is_empty else local.contiguous()

    def _memory_for(self, bucket: Bucket, stage: _Stage) -> list[torch.Tensor]:
        return [self._memory(each, local_of(each.tensor), stage.item_of(each)) for each in self._tensors_in(bucket)]

    def _memory(self, each: MovedTensor, local: torch.Tensor, item: BucketItem) -> torch.Tensor:
        """Memory for this rank's new part of a tensor: the present memory, if the part stays the same or is all new."""
        box = item.new.boxes[self._holder]
        stays_plain = not isinstance(each.tensor, DTensor) and (each.is_copy or isinstance(self._after, Whole))
        if item.old.boxes[self._holder] == box and not self.comes:
            return local
        if stays_plain and (box.is_empty or local.is_contiguous()):
            return local
        shape = list(each.tensor.shape)
        num_across = math.prod(size for dim, size in enumerate(shape) if dim != each.dim)
        new_shape = _with_size(shape, each.dim, box.num_elements // max(1, num_across))
        if each.parameter is None or not isinstance(self._after, Sharded):
            return local.new_empty(new_shape)
        padded = local.new_empty(max(part.num_elements for part in item.new.boxes))  # fully_shard gathers equal parts
        padded[box.num_elements :].zero_()
        return padded[: box.num_elements].view(new_shape)

    def _take_over(self, bucket: Bucket, new: Sequence[torch.Tensor], stage: _Stage) -> None:
        """Put the bucket's tensors into their new memory, and let go of the old one."""
        for each, local in zip(self._tensors_in(bucket), new, strict=True):
            if stage.is_last:
                self._bind(each, local)
            elif isinstance(each.tensor, DTensor):
                cast(Any, each.tensor)._local_tensor = local  # it lies on no mesh until the last stage
        if stage.is_last:
            self._tensors[bucket.first : bucket.first + len(bucket.items)] = [None] * len(bucket.items)

    def _bind(self, each: MovedTensor, local: torch.Tensor) -> None:
        if each.parameter is not None:
            parameter = self._parameters[each.parameter]
            self._bind_parameter(parameter, local, self._slots[each.parameter] if self._slots else None)
            parameter.arrive()
        elif self._mesh is None or each.is_copy:
            if not _is_same_memory(each.tensor, local):
                for_all = each.puts or (cast(Any, each.tensor).detach().copy_,)
                for put in for_all:
                    put(local)
        else:
            made = _sharded(each.tensor, each.dim, local, self._mesh)
            if isinstance(each.tensor, DTensor):
                rewire.rebind(each.tensor, local, made)
            else:
                each.put(made)

    def _bind_parameter(self, each: PlacedParameter, local: torch.Tensor, slot: ParameterSlot | None) -> None:
        old = each.tensor
        if slot is not None and isinstance(old, DTensor):
            rewire.bind(slot, old, local)
            return
        if slot is not None:
            assert self._mesh is not None
            new = nn.Parameter(_sharded(old, each.dim, local, self._mesh), requires_grad=old.requires_grad)
            rewire.bind(slot, new, local)
        elif isinstance(old, DTensor):
            new = nn.Parameter(local, requires_grad=old.requires_grad)
        else:
            new = old
            if not _is_same_memory(old, local):
                old.detach().copy_(local)
        if new is not old:
            new.__dict__.update(rewire.noted_on(old))
            replace_in(self._optimizers, self.lists, old, new)
            replace_parameter(self._registered, old, new)
            each.tensor = new
        each.register()


def _sharded(tensor: torch.Tensor, dim: int, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor with ``local`` as this rank's part, of the shape of ``tensor``."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    shape, stride = tensor.shape, row_major(tuple(tensor.shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """A shape with another size of one dimension; that of a tensor of no dimension as it is."""
    return [size if at == dim else kept for at, kept in enumerate(shape)]


def _is_same_memory(tensor: torch.Tensor, local: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.data_ptr() == local.data_ptr()
