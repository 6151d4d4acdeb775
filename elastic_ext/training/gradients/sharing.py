"""How the ranks that train one model average its gradients: DDP, fully_shard and FSDP1, averaging by hand, and
clipping.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils.hooks import RemovableHandle

from elastic_ext.torch_private import gradients
from elastic_ext.torch_private.engine import tells_of_passes
from elastic_ext.torch_private.module_hooks import Hook

__all__ = ["Averaging", "SharesGradients", "Sharing", "as_parameters", "clip_norm", "raise_if_not_finite", "sharing_of"]


# --- how the ranks that train one model average its gradients --------------------------------------------------------
# What all ways have in common, or none has.
#
# The ways themselves, DDP, fully_shard and FSDP1, stand below.
#
# A model may besides be *spread*: cut by tensor parallelism, so that some ranks together are one replica of it. They
# take the same samples, and count as one.


class SharesGradients(Protocol):
    """An object that knows how ranks average a model's gradients now; a change of plan replaces ``sharing``."""

    sharing: Sharing


class Sharing:
    """How the ranks that train one model average its gradients; this base class is a model with one replica."""

    name = "none"
    """The name of the way of sharing, as torch's users know it."""
    is_sharing = True
    """Whether the next backward pass averages gradients over the ranks."""
    is_average = True
    """Whether shared gradients are the average over the ranks, and not divided by a factor of the user's own."""
    shares_first = False
    """Whether the first backward passes have to share gradients."""
    writes_gradients = False
    """Whether backward passes change ``grad`` other than by adding to it."""
    forgets_passes = False
    """Whether ``forget`` leaves nothing of a forward pass whose backward pass was not made."""
    shows_gathered = True
    """Whether gradients that are accumulated, and not shared so far, lie in the parameters' ``grad``."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: Sequence[nn.Module] = [model]
        """The modules that the loop calls, or that hold those."""
        self.wrapped: Sequence[Any] = ()
        """Modules whose gradients are averaged."""
        self.sharing_buffers: Sequence[nn.Module] = ()
        """Modules whose buffers are broadcast from the first rank right before they are called."""
        self.exchanges_always = False
        """Whether every pass exchanges something with other ranks, also one that does not share gradients."""
        self._spread_groups: tuple[dist.ProcessGroup, ...] = ()

    def note_spread(self, model: nn.Module) -> None:
        """Find the process groups over which one replica is spread, as by tensor parallelism."""
        own = {_members(group) for group in self.groups}
        meshes = {part.device_mesh for part in model.parameters() if isinstance(part, DTensor)}
        groups = {_members(group): group for mesh in meshes for group in mesh.get_all_groups()}
        self._spread_groups = tuple(group for members, group in groups.items() if members not in own)
        self.exchanges_always |= bool(self._spread_groups)

    @property
    def num_parts(self) -> int:
        """How many ranks make one replica."""
        return math.prod(dist.get_world_size(group) for group in self._spread_groups)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which gradients are averaged, one after the other; the inner one first."""
        return ()

    @property
    def num_shards(self) -> int:
        """Over how many ranks a gradient is sharded that lies in ``grad`` as a plain tensor, as FSDP1's do."""
        return 1

    @property
    def num_ranks(self) -> int:
        """W, the data-parallel degree."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def has_others(self) -> bool:
        """Whether other ranks train the model as well."""
        return self.num_ranks * self.num_parts > 1

    @property
    def rank(self) -> int:
        """This rank's index among the ``num_ranks`` data-parallel ranks."""
        place, size = 0, 1
        for group in self.groups:
            place += dist.get_rank(group) * size
            size *= dist.get_world_size(group)
        return place

    @property
    def is_overridden(self) -> bool:
        """Whether somebody else has set whether the next pass shares gradients, and otherwise than ``share`` did."""
        return False

    @property
    def num_hidden(self) -> int:
        """A number that grows as passes accumulate gradients outside of ``grad``; 0 where there are none there."""
        return 0

    def leaves_unused(self) -> bool:
        """Whether a step's first pass has given some trained parameters no gradient, where a pass may do so."""
        return False

    def versions_of_unshared(self) -> list[tuple[torch.Tensor, int]]:
        """For each gradient accumulated outside of ``grad``, the tensor that counts its changes, and the count."""
        return []

    def why_unfinished(self) -> str | None:
        """Why the step's last pass has not shared all gradients of a plan's own DDP, None where it has."""
        return None

    @property
    def num_exchanges(self) -> int:
        """A number that grows with every collective of this rank; the same on all ranks that have come equally far."""
        return gradients.num_exchanges(self.groups + self._spread_groups)

    def left_out(self, parameters: Iterable[torch.Tensor], *, as_others_join: bool = False) -> list[torch.Tensor]:
        """The parameters whose gradients nothing averages over the ranks; with ``as_others_join`` over those to come.

        A parameter of a wrapped module that is not averaged was left out by the user on purpose, and is not given; nor
        is one outside of wrapped modules that has hooks.
        """
        if self.num_ranks == 1 and not (as_others_join and self.wrapped):
            return []
        wrapped = {id(part) for module in self.wrapped for part in module.parameters()}
        own = {_members(group) for group in self.groups}
        return [part for part in parameters if not (id(part) in wrapped or _is_spread(part, own) or _has_hooks(part))]

    def share(self, *, now: bool) -> None:
        """Have the next backward pass average gradients over the ranks, or keep them to this rank."""
        self.is_sharing = now

    def add_up(self, number: torch.Tensor) -> None:
        """Replace ``number`` by its sum over the data-parallel ranks, in place."""
        for group in self.groups:
            dist.all_reduce(number, group=group)

    def total(self, number: torch.Tensor) -> float:
        """The sum of ``number`` over all ranks, those of one replica too."""
        for group in self.groups + self._spread_groups:
            dist.all_reduce(number, group=group)
        return float(number.item())

    def has_alike(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether every rank has the same gradients of ``parameters``, once they are shared."""
        return not self.has_others

    def hooks(self) -> list[RemovableHandle]:
        """Handles of hooks on the model, set here and needed while steps are taken; the caller removes them."""
        return []

    def wait(self) -> None:
        """Wait until no collective of this rank is under way; all ranks call this."""
        for group in self.groups + self._spread_groups:
            dist.barrier(group)

    def why_not_guard(self) -> str | None:
        """Why steps cannot be guarded: passes need other ranks. None where gradients can be shared after passes."""
        if self.exchanges_always and self.has_others:
            return f"{self.name} exchanges parameters or what is computed, not gradients alone"
        return None

    def averaged(self) -> Sequence[torch.Tensor]:
        """Parameters whose gradients are averaged, in the same order on all ranks; of a model that can be guarded."""
        return []

    def share_buffers(self) -> None:
        """Broadcast the first rank's buffers now, where the next pass would."""

    def expect_shared_buffers(self) -> None:
        """Have the next pass broadcast the first rank's buffers."""

    def why_not_forget(self) -> str | None:
        """Why a pass that failed cannot be taken back, None where it can, or where none is under way."""
        return None

    def forget(self) -> None:
        """Drop gradients accumulated outside of the parameters' ``grad``, and give up a pass that failed."""

    def forget_unshared(self) -> None:
        """Forget which parameters were used by passes that have not shared gradients."""

    def have_shared_buffers(self) -> None:
        """Have no pass of a step that is taken again broadcast buffers again."""

    def clip(
        self, parameters: Sequence[torch.Tensor], most: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor | None:
        """Clip gradients in the way that this sharing needs, and give their norm; None where it needs none."""
        return None


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _is_spread(parameter: torch.Tensor, over: set[tuple[int, ...]]) -> bool:
    """Whether a parameter is distributed over a mesh with all these groups, whose ranks torch then keeps alike."""
    if not isinstance(parameter, DTensor):
        return False
    return over <= {_members(group) for group in parameter.device_mesh.get_all_groups()}


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# --- the norm of gradients that lie on several ranks, on one mesh or more, and gradients made to fit it --------------


def as_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A list of the parameters that a user gives, one or several."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_norm(
    parameters: Sequence[torch.Tensor],
    most: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients as ``torch.nn.utils.clip_grad_norm_`` does, also those distributed over different meshes.

    Gives the norm of all of them as a plain tensor, the same on every rank.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for part in parameters:
        gradient = part.grad
        if gradient is not None:
            by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(part)
    if set(by_mesh) <= {None}:
        return clip_grad_norm_(parameters, most, norm_type, error_if_nonfinite, foreach)
    norms = []
    for parts in by_mesh.values():
        norm = get_total_norm([part.grad for part in parts if part.grad is not None], norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        raise_if_not_finite(total, norm_type)
    for parts in by_mesh.values():
        clip_grads_with_norm_(parts, most, total, foreach)
    return total


def raise_if_not_finite(norm: torch.Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; leave "
            "error_if_nonfinite out to scale them by it all the same"
        )


# --- DDP, fully_shard and FSDP1, each as a Sharing; and which of them a model is wrapped in --------------------------

_Kind = TypeVar("_Kind")

_UNFINISHED = (
    "a pass has left out parameters that are trained, and DDP, which the plan no_shard has put on, has not shared the "
    "gradients of all others for want of theirs. It looks for such parameters only where a pass under a sharded plan "
    "has left some out before: train with every parameter in every pass, or with "
    'ParallelPlan(strategy="hybrid_shard", shard_degree=1), which keeps whole copies too, or give the trainer a model '
    "in DistributedDataParallel(model, find_unused_parameters=True) instead of calling parallelize()"
)


class _Replicated(Sharing):
    """How DDP averages gradients, on the model or on parts of it."""

    name = "DDP"
    writes_gradients = True

    def __init__(
        self, model: nn.Module, replicas: Sequence[DistributedDataParallel], *, is_beneath: bool = False
    ) -> None:
        """With ``is_beneath`` the loop calls the model, and not the DDP wrappers."""
        super().__init__(model)
        self.wrapped = self._replicas = replicas
        self._is_beneath = is_beneath
        if not is_beneath:
            self.parts = replicas
        self.sharing_buffers = [replica.module for replica in replicas]
        self.shares_first = any(replica.static_graph for replica in replicas)  # torch records the graph in them
        averaged = [list(gradients.averaged(replica)) for replica in replicas]
        self._averaged = list(dict.fromkeys(part for parts in averaged for part in parts))
        self._num_now, self._num_made = list(map(len, averaged)), list(map(gradients.num_averaged, replicas))
        self._are_averaged = frozenset(map(id, self._averaged))

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self._replicas[0].process_group,)

    @property
    def is_overridden(self) -> bool:
        return any(replica.require_backward_grad_sync is not self.is_sharing for replica in self._replicas)

    @property
    def num_exchanges(self) -> int:
        return 2 * super().num_exchanges + any(map(gradients.is_unfinished, self._replicas))

    def why_unfinished(self) -> str | None:
        is_unfinished = self._is_beneath and any(map(gradients.is_unfinished, self._replicas))
        return _UNFINISHED if is_unfinished else None  # a user's own DDP says so by itself

    def share(self, *, now: bool) -> None:
        self.is_sharing = now
        for replica in self._replicas:
            replica.require_backward_grad_sync = now

    def hooks(self) -> list[RemovableHandle]:
        if len(self._replicas) == 1:
            return []
        before, after = Hook(self._before_call), Hook(self._after_call)
        return [
            handle
            for replica in self._replicas
            for handle in (
                replica.register_forward_pre_hook(before),
                replica.register_forward_hook(after, always_call=True),
            )
        ]

    def _before_call(self, replica: DistributedDataParallel, arguments: object) -> None:
        """Keep a DDP module in which nothing is trained now, as in half of a GAN, from sharing in the next step."""
        if self.is_sharing and not any(part.requires_grad for part in replica.parameters()):
            replica.require_backward_grad_sync = False

    def _after_call(self, replica: DistributedDataParallel, arguments: object, output: object) -> None:
        replica.require_backward_grad_sync = self.is_sharing

    def why_not_guard(self) -> str | None:
        if self.exchanges_always:
            return super().why_not_guard()
        if not tells_of_passes():
            return f"torch {torch.__version__} does not tell when a backward pass ends"
        if self._num_now != self._num_made:
            return (
                f"DDP was made with {sum(self._num_made)} parameters that had requires_grad, and {sum(self._num_now)} "
                "had it when the trainer took the model up; freeze and thaw before DDP is made, or within steps"
            )
        if len({tuple(dist.get_process_group_ranks(replica.process_group)) for replica in self._replicas}) > 1:
            return "parts of the model are averaged over different ranks"
        if any(getattr(module, "sparse", False) for replica in self._replicas for module in replica.modules()):
            return "the model has sparse gradients"
        return next(filter(None, map(gradients.shares_otherwise, self._replicas)), None)

    def averaged(self) -> Sequence[torch.Tensor]:
        return self._averaged

    def has_alike(self, parameters: Iterable[torch.Tensor]) -> bool:
        if not self.has_others:
            return True
        learning = (id(part) for part in parameters if part.requires_grad)
        return not self._spread_groups and self._are_averaged.issuperset(learning)

    def share_buffers(self) -> None:
        for replica in self._replicas:
            gradients.share_buffers(replica)
            replica.require_forward_param_sync = False

    def expect_shared_buffers(self) -> None:
        for replica in self._replicas:
            replica.require_forward_param_sync = True

    def have_shared_buffers(self) -> None:
        for replica in self._replicas:  # DDP does so in a step's first pass alone, and forgets it where that failed
            replica.require_forward_param_sync = False

    def why_not_forget(self) -> str | None:
        if any(replica.static_graph and gradients.is_unfinished(replica) for replica in self._replicas):
            return "DDP with a static graph cannot take back a backward pass that failed"
        return None

    def forget(self) -> None:
        for replica in self._replicas:
            if gradients.is_unfinished(replica):
                gradients.forget_pass(replica)
        self.forget_unshared()

    def forget_unshared(self) -> None:
        for replica in self._replicas:
            if replica.find_unused_parameters and not replica.static_graph:  # it notes what was used until it shares
                gradients.forget_pass(replica)


class _Sharded(Sharing):
    """How fully_shard averages gradients, on the model or on parts of it."""

    name = "fully_shard"
    writes_gradients = True
    shows_gathered = False

    def __init__(self, model: nn.Module, roots: Sequence[FSDPModule]) -> None:
        super().__init__(model)
        self.exchanges_always = True
        self.wrapped = self._roots = roots
        self._sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
        sizes = {gradients.data_parallel_groups(root) for root in roots}
        if len({tuple(dist.get_world_size(group) for group in groups) for groups in sizes}) > 1:
            raise ValueError(
                "parts of the model are sharded over different numbers of ranks; shard all of it over one mesh"
            )

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return gradients.data_parallel_groups(self._roots[0])

    @property
    def is_overridden(self) -> bool:
        return not all(gradients.shares(part, all_of_it=self.is_sharing) for part in self._sharded)

    @property
    def num_hidden(self) -> int:
        return sum(map(gradients.num_hidden, self._roots))

    def leaves_unused(self) -> bool:
        return any(map(gradients.leaves_unused, self._roots))

    def versions_of_unshared(self) -> list[tuple[torch.Tensor, int]]:
        return [each for root in self._roots for each in gradients.versions_of_unshared(root)]

    @property
    def forgets_passes(self) -> bool:  # type: ignore[override]
        return gradients.can_take_back_passes()

    @property
    def is_average(self) -> bool:  # type: ignore[override]
        return all(gradients.divides_by(root) is None for root in self._roots)

    def share(self, *, now: bool) -> None:
        self.is_sharing = now
        for root in self._roots:
            root.set_requires_gradient_sync(now)

    def why_not_forget(self) -> str | None:
        if gradients.can_take_back_passes():
            return None
        return f"torch {torch.__version__} cannot take back a pass through sharded modules, 2.13 can"

    def forget(self) -> None:
        for root in self._roots:
            gradients.forget_step(root)


class _FlatSharded(Sharing):
    """How FSDP1 averages gradients, on the model or on parts of it."""

    name = "FSDP1"
    writes_gradients = True
    shows_gathered = False

    def __init__(self, model: nn.Module, roots: Sequence[FullyShardedDataParallel]) -> None:
        super().__init__(model)
        self.exchanges_always = True
        self.wrapped = self._roots = roots
        self._unshared = ExitStack()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return gradients.flat_groups(self._roots[0])

    @property
    def num_shards(self) -> int:
        return dist.get_world_size(self.groups[0])

    @property
    def is_overridden(self) -> bool:
        return any(gradients.is_flat_sharing(root) is not self.is_sharing for root in self._roots)

    def share(self, *, now: bool) -> None:
        self.is_sharing = now
        self._unshared.close()
        if not now:
            for root in self._roots:
                self._unshared.enter_context(root.no_sync())

    def why_not_forget(self) -> str | None:
        is_idle = all(gradients.is_idle(root) for root in self._roots)
        return None if is_idle else "FSDP1 cannot take back a pass that failed; fully_shard can"

    def clip(
        self, parameters: Sequence[torch.Tensor], most: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor | None:
        own = {id(part) for root in self._roots for part in root.parameters() if part.requires_grad}
        if len(self._roots) > 1 or own != {id(part) for part in parameters if part.requires_grad}:
            raise ValueError("FSDP1 clips all parameters of a model together; give it model.parameters()")
        if error_if_nonfinite:
            raise_if_not_finite(self._roots[0].clip_grad_norm_(math.inf, norm_type), norm_type)
        return self._roots[0].clip_grad_norm_(most, norm_type)


def sharing_of(model: nn.Module, engine: DistributedDataParallel | None = None) -> Sharing:
    """How the model, as it was wrapped, shares its gradients; ValueError where several ways are mixed.

    ``engine`` is the DDP that a plan has put beneath the model, if any. Wrappers that were set aside only call what
    they wrap.
    """
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    replicas = [part for part in wrappers if hasattr(part, "reducer")] if engine is None else [engine]
    roots = _outermost(model, FSDPModule)
    flat_roots = _outermost(model, FullyShardedDataParallel)
    if sum(map(bool, (replicas, roots, flat_roots))) > 1:
        raise ValueError("the model mixes DDP, fully_shard and FSDP1; wrap it in one of them")
    for part in (*replicas, *roots, *flat_roots):
        gradients.make_sure_of(part)  # type: ignore[arg-type]
    sharing: Sharing
    if replicas:
        sharing = _Replicated(model, replicas, is_beneath=engine is not None)
    elif roots:
        sharing = _Sharded(model, roots)
    else:
        sharing = _FlatSharded(model, flat_roots) if flat_roots else Sharing(model)
    sharing.note_spread(model)
    return sharing


def _outermost(model: nn.Module, kind: type[_Kind]) -> list[_Kind]:
    if isinstance(model, kind):
        return [model]
    return [found for child in model.children() for found in _outermost(child, kind)]


# --- the mean of gradients over ranks, made at once after backward passes, and not while they run --------------------
# What can fail on one rank alone is done before: ``reserve`` takes the memory. After ``average`` gradients are those
# that DDP would have made of them.

_BUCKET_BYTES = 25 << 20  # as DDP has it

_TypeAndDevice = tuple[torch.dtype, torch.device]


class Averaging:
    """Averages parameters' gradients over the ranks of a group, in buckets; all give them in the same order."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group
        self._memory: dict[_TypeAndDevice, torch.Tensor] = {}
        self._spare: dict[torch.Tensor, torch.Tensor] = {}  # gradients for those that have none so far

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this averages the gradients of just these parameters."""
        return len(parameters) == len(self._parameters) and all(map(operator.is_, parameters, self._parameters))

    @property
    def held(self) -> str:
        """Which parameters have a gradient on this rank: a text with 1 for those that do, and 0 for the others."""
        return "".join("01"[each.grad is not None] for each in self._parameters)

    def reserve(self) -> None:
        """Allocate the memory that ``average`` needs; memory may run out here, and not there."""
        self._spare = {}
        kinds: dict[_TypeAndDevice, list[int]] = {}
        for each in self._parameters:
            kinds.setdefault(_kind(each), []).append(each.numel())
        for kind, sizes in kinds.items():
            num_elements = max(max(sizes), min(sum(sizes), _most_elements(kind)))
            if kind not in self._memory or self._memory[kind].numel() < num_elements:
                self._memory[kind] = torch.empty(num_elements, dtype=kind[0], device=kind[1])
        self._spare = {each: torch.zeros_like(each) for each in self._parameters if each.grad is None}

    def average(self, held: Sequence[str]) -> None:
        """Replace each gradient by its mean over the ranks; ``held`` says which each rank has, the others are zeros."""
        having = [part for part, *flags in zip(self._parameters, *held, strict=True) if "1" in flags]
        factor = 1.0 / dist.get_world_size(self._group)
        with torch.no_grad():
            for kind, bucket in _buckets(having):
                sizes = [part.numel() for part in bucket]
                flat = self._memory[kind][: sum(sizes)]
                pieces = [piece.view(part.shape) for piece, part in zip(torch.split(flat, sizes), bucket, strict=True)]
                for part, piece in zip(bucket, pieces, strict=True):
                    if part.grad is None:
                        part.grad = self._spare[part]
                    torch.mul(part.grad, factor, out=piece)
                dist.all_reduce(flat, group=self._group)
                for part, piece in zip(bucket, pieces, strict=True):
                    assert part.grad is not None
                    part.grad.copy_(piece)
        self._spare = {}


def _kind(part: torch.Tensor) -> _TypeAndDevice:
    return part.dtype, part.device


def _most_elements(kind: _TypeAndDevice) -> int:
    return max(1, _BUCKET_BYTES // kind[0].itemsize)


def _buckets(parts: Sequence[torch.Tensor]) -> Iterator[tuple[_TypeAndDevice, list[torch.Tensor]]]:
    """Buckets of tensors of one dtype and device: as many as fit, or one that is larger; the same on all ranks."""
    open_ones: dict[_TypeAndDevice, list[torch.Tensor]] = {}
    for part in parts:
        kind = _kind(part)
        bucket = open_ones.setdefault(kind, [])
        if bucket and sum(each.numel() for each in bucket) + part.numel() > _most_elements(kind):
            yield kind, bucket
            bucket = open_ones[kind] = []
        bucket.append(part)
    yield from open_ones.items()
