"""Collecting: what a rank has of a model, its optimizers and more, for a checkpoint. Nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.fsdp.optim_state import held_of_optimizers
from elastic_ext.fsdp.plain import pack
from elastic_ext.fsdp.state import box_of, extra_states, held, held_of_model

from .contents import EXTRA_STATES, GROUPS, Contents

__all__ = ["Collect", "SaveRequest", "ToSave", "contents_of"]

Collect: TypeAlias = "Callable[[], Contents]"
"""Gives what this rank has."""


@dataclass(frozen=True, slots=True, eq=False)
class ToSave:
    """What one rank is to save."""

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
