"""Collecting: what a rank has of a model, its optimizers and more, for a checkpoint. Nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.optim_state import held_of_optimizers
from elastic_ext.fsdp.plain import pack
from elastic_ext.fsdp.state import Held, box_of, extra_states, held, held_buffers, held_of_model
from elastic_ext.ranks import Ranks

from .contents import EXTRA_STATES, GROUPS, Contents, own_prefix
from .memory import part_of
from .together import gather_or_raise

__all__ = ["Collect", "OwnBuffers", "SaveRequest", "ToSave", "contents_of", "own_buffers"]

Collect: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], Contents]"
"""Gives what this rank has, when it is told which buffers are its own."""


@dataclass(frozen=True, slots=True, eq=False)
class ToSave:
    """What one rank is to save."""

    model: nn.Module
    collect: Collect
    stepped: Sequence[torch.Tensor] = ()
    """Parameters that are known to change in ``optimizer.step()`` alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SaveRequest:
    """One checkpoint that all ranks are to save."""

    name: str
    what: ToSave
    ask: Callable[[], str]
    """Says what this rank is asked for, as ``agree_on`` takes it."""
    step: int
    epoch: int
    replaces: bool = False
    """The checkpoint that this run went on from, if that has the name: it is set aside."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What somebody who resumes is told."""


def contents_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Contents:
    """What this rank has of a model, its optimizers and more for a checkpoint.

    ``tensors`` are the same on every rank, and the first one's are kept, or each rank's part of those that are spread;
    ``own`` are this rank's alone, under names that no other rank uses.
    """
    of_model = held_of_model(model)
    optim = held_of_optimizers(optimizers, of_model.parameters, rank=rank)
    shared = dict(tensors or {})
    packed = {name: pack(value, f"{EXTRA_STATES}/{name}", shared) for name, value in extra_states(model).items()}
    extra = [held(name, tensor, box_of(name, tensor), "buffer") for name, tensor in shared.items()]
    extra += [held(name, tensor, box_of(name, tensor), "opaque") for name, tensor in (own or {}).items()]
    return Contents(
        model=of_model.tensors,
        optim=optim.tensors,
        extra=extra,
        state={**(state or {}), GROUPS: optim.groups, EXTRA_STATES: packed},
        values=optim.values,
    )


class OwnBuffers:
    """A rank's buffers, where ranks that share a model may have come to different ones, as running means may be.

    In the model's own place are those of the first rank; as many ranks as there are now get back their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [each for each in held_buffers(model) if _is_whole(each)]

    def digest(self) -> str:
        """The same on ranks that have the same."""
        digest = xxhash.xxh3_64()
        for each in self._held:
            digest.update(part_of(each.tensor, each.box, each.box))
        return digest.hexdigest()

    def named(self, rank: int) -> dict[str, torch.Tensor]:
        """As they are saved where ranks differ."""
        return {f"{own_prefix(rank)}{each.name}": each.tensor for each in self._held}


def own_buffers(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """This rank's buffers, if the ranks differ in them; all ranks call this."""
    if ranks.world_size == 1:
        return {}
    found: list[OwnBuffers] = []

    def compare() -> str:
        found.append(OwnBuffers(model))
        return found[0].digest()

    are_alike = len(set(gather_or_raise(ranks, compare, "comparing buffers"))) == 1
    return {} if are_alike else found[0].named(ranks.rank)


def _is_whole(held: Held) -> bool:
    """Whether a rank could have come to a value of its own; what is cut differs between ranks as it should."""
    return held.is_alias_of is None and held.box == Box.whole(held.box.shape)
