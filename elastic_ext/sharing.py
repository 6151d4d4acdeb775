"""Sharing: how the ranks that train one model average its gradients. What all ways have in common, or none has.

The ways themselves, DDP, fully_shard and FSDP1, are in sharing_ways.py.

A model may besides be *spread*: cut by tensor parallelism, so that some ranks together are one replica of it. They take
the same samples, and count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .torch_private import gradients

__all__ = ["Sharing"]


class Sharing:
    """A model with one replica; and what the other ways have in common."""

    name = "none"
    """What people call it."""
    is_sharing = True
    """Whether the next backward pass averages gradients over the ranks."""
    is_average = True
    """Shared gradients are the average over the ranks, and not divided in a way of the user's own."""
    shares_first = False
    """The first passes have to share."""
    writes_gradients = False
    """Passes change ``grad`` other than by adding to it."""
    forgets_passes = False
    """``forget`` leaves nothing of a forward pass whose backward pass was not made."""
    shows_gathered = True
    """What passes gather without sharing it lies in the parameters' ``grad``."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: Sequence[nn.Module] = [model]
        """What the loop calls, or what holds that."""
        self.wrapped: Sequence[Any] = ()
        """Modules whose gradients are averaged."""
        self.sharing_buffers: Sequence[nn.Module] = ()
        """Modules that have the first rank's buffers given to all right before they are called."""
        self.exchanges_always = False
        """Every pass exchanges something with other ranks, also one that does not share gradients."""
        self._spread_groups: tuple[dist.ProcessGroup, ...] = ()

    def note_spread(self, model: nn.Module) -> None:
        """See over which ranks one replica is spread."""
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
        """Over which gradients are averaged, one after the other; the inner one first."""
        return ()

    @property
    def num_shards(self) -> int:
        """Over how many ranks what lies in ``grad`` as a plain tensor is shared out, without saying so."""
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
        """This one's place among them."""
        place, size = 0, 1
        for group in self.groups:
            place += dist.get_rank(group) * size
            size *= dist.get_world_size(group)
        return place

    @property
    def is_overridden(self) -> bool:
        """Whether somebody else has said what the next pass shares, and said otherwise."""
        return False

    @property
    def num_hidden(self) -> int:
        """Grows with what passes gather outside of ``grad``; 0 where they do not, or where there is nothing."""
        return 0

    def leaves_unused(self) -> bool:
        """Whether a pass has given some of the trained parameters no gradient, where passes may; after the first."""
        return False

    def versions_of_unshared(self) -> list[tuple[torch.Tensor, int]]:
        """Of each gradient that is gathered outside of ``grad``, what counts its changes, and how many there were."""
        return []

    def why_unfinished(self) -> str | None:
        """Why the step's last pass has not shared all gradients of a plan's own DDP, None where it has."""
        return None

    @property
    def num_exchanges(self) -> int:
        """Grows with every collective that this rank begins; the same on all ranks that have come equally far."""
        return gradients.num_exchanges(self.groups + self._spread_groups)

    def left_out(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of them whose gradients nothing averages over the ranks.

        What lies in a wrapped module and is not averaged was kept out of it by the user, who means it; so does one who
        has put hooks on a parameter that lies in none.
        """
        if self.num_ranks == 1:
            return []
        wrapped = {id(part) for module in self.wrapped for part in module.parameters()}
        own = {_members(group) for group in self.groups}
        return [part for part in parameters if not (id(part) in wrapped or _is_spread(part, own) or _has_hooks(part))]

    def share(self, *, now: bool) -> None:
        """Have the next backward pass average gradients over the ranks, or keep them to this rank."""
        self.is_sharing = now

    def add_up(self, number: torch.Tensor) -> None:
        """Turn the ranks' numbers into their sum."""
        for group in self.groups:
            dist.all_reduce(number, group=group)

    def total(self, number: torch.Tensor) -> float:
        """The sum over all ranks, those of one replica too."""
        for group in self.groups + self._spread_groups:
            dist.all_reduce(number, group=group)
        return float(number.item())

    def has_alike(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether every rank has the same gradients of these, once they are shared."""
        return not self.has_others

    def hooks(self) -> list[RemovableHandle]:
        """What the model calls while steps are taken; to be removed by the caller."""
        return []

    def wait(self) -> None:
        """Return once no collective of this rank is under way; all ranks call this."""
        for group in self.groups + self._spread_groups:
            dist.barrier(group)

    def why_not_guard(self) -> str | None:
        """Why passes cannot be made without other ranks, to share gradients after them; None where they can."""
        if self.exchanges_always and self.has_others:
            return f"{self.name} exchanges parameters or what is computed, not gradients alone"
        return None

    def averaged(self) -> Sequence[torch.Tensor]:
        """Whose gradients are averaged over the ranks, in an order that all have; of a model that can be guarded."""
        return []

    def share_buffers(self) -> None:
        """Give the first rank's buffers to all now, where the next pass would."""

    def expect_shared_buffers(self) -> None:
        """Have the next pass give the first rank's buffers to all."""

    def why_not_forget(self) -> str | None:
        """Why a pass that failed cannot be taken back, None where it can, or where none is under way."""
        return None

    def forget(self) -> None:
        """Drop what was gathered outside of the parameters' ``grad``, and give up a pass that failed."""

    def forget_unshared(self) -> None:
        """Have what passes used that have not shared gradients be no part of those that will."""

    def have_shared_buffers(self) -> None:
        """A step that is taken again does not share buffers again."""

    def clip(
        self, parameters: Sequence[torch.Tensor], most: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor | None:
        """Clip the parameters' gradients where that takes a way of its own; None where it does not."""
        return None


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _is_spread(parameter: torch.Tensor, over: set[tuple[int, ...]]) -> bool:
    """Whether it has a mesh with these groups, over which torch's own arithmetic then keeps it one parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return over <= {_members(group) for group in parameter.device_mesh.get_all_groups()}


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
