"""Sharing ways: DDP, fully_shard and FSDP1, each as a Sharing; and which of them a model is wrapped in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .clipping import raise_if_not_finite
from .sharing import Sharing
from .torch_private import gradients
from .torch_private.engine import tells_of_passes
from .torch_private.module_hooks import Hook

__all__ = ["sharing_of"]

_Kind = TypeVar("_Kind")

_UNFINISHED = (
    "a pass has left out parameters that are trained, and DDP, which the plan no_shard has put on, has not shared the "
    "gradients of all others for want of theirs. It looks for such parameters only where a pass under a sharded plan "
    "has left some out before: train with every parameter in every pass, or with "
    'ParallelPlan(strategy="hybrid_shard", shard_degree=1), which keeps whole copies too, or give the trainer a model '
    "in DistributedDataParallel(model, find_unused_parameters=True) instead of calling parallelize()"
)


class _Replicated(Sharing):
    """DDP, of the model or of parts of it."""

    name = "DDP"
    writes_gradients = True

    def __init__(
        self, model: nn.Module, replicas: Sequence[DistributedDataParallel], *, is_beneath: bool = False
    ) -> None:
        """``is_beneath``: the loop calls the model, and not the wrappers."""
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
        """Where nothing in it learns, as in half of a GAN, DDP would share what the next step's first pass gives."""
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
            return "its parts are averaged over different ranks"
        if any(getattr(module, "sparse", False) for replica in self._replicas for module in replica.modules()):
            return "it has sparse gradients"
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
    """fully_shard, of the model or of parts of it."""

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
    """FSDP1, of the model or of parts of it."""

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

    With ``engine`` that is DDP's part beneath the model. Wrappers that were set aside only call what they wrap.
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
