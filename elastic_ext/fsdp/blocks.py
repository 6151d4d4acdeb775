"""Blocks: the parts that a model repeats, found or named; and which of them form a unit, or are computed again.

Activations are computed again by torch's composable checkpointing, which changes no name; it is put on a block when it
is first asked for, and from then on only told whether to act.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from elastic_ext.errors import ElasticError

from .plan import blocks_recomputed

__all__ = ["Units", "blocks_of", "recompute", "why_not_recompute"]

Units: TypeAlias = type[nn.Module] | Sequence[str] | None
"""A class of modules, their names, or None for the repeated blocks that are found."""


def blocks_of(model: nn.Module, units: Units = None) -> list[nn.Module]:
    """The model's blocks, in its order; ValueError where what was given names none."""
    if units is None:
        return list(_repeated(model))
    if isinstance(units, type) and issubclass(units, nn.Module):
        found = [module for module in _outermost(model, units) if any(True for _ in module.parameters())]
        if not found:
            raise ValueError(f"units is the class {units.__name__}, and the model has no module of it with parameters")
        return found
    is_list = isinstance(units, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in units)
    if not is_list:
        raise ValueError(f"units is {units!r}; allowed: a class of modules, a list of names of modules, or None")
    by_name = dict(model.named_modules())
    unknown = [name for name in units if not name or name not in by_name]
    if unknown:
        raise ValueError(f"units has {unknown[0]!r}, which is no module within the model; see model.named_modules()")
    chosen = {id(by_name[name]): name for name in units}
    found = [module for module in model.modules() if id(module) in chosen]
    for module in found:
        for inner in module.modules():
            if inner is not module and id(inner) in chosen:
                raise ValueError(
                    f"units has {chosen[id(module)]!r} and {chosen[id(inner)]!r}, which lies within it; leave one out"
                )
    return found


def recompute(blocks: Sequence[nn.Module], ratio: float) -> None:
    """Have the activations of a share of the blocks computed again in the backward pass."""
    for block, is_chosen in zip(blocks, blocks_recomputed(len(blocks), ratio), strict=True):
        state = _recomputing(block)
        if state is None:
            if not is_chosen:
                continue
            _composable()(block)
            state = _recomputing(block)
        state.enable_hook = is_chosen


def why_not_recompute(blocks: Sequence[nn.Module], ratio: float) -> str | None:
    """Why a share of the blocks cannot be computed again, None where it can."""
    if ratio and not blocks:
        return "activation_checkpoint is given, and no repeated blocks were found; name them with units="
    try:
        _composable()
    except ElasticError as error:
        return str(error) if ratio else None
    return None


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """What lies in lists of two or more modules of one class, each of several parts; the outermost of them."""
    parts = [part for part in module.children() if any(True for _ in part.parameters())]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    if is_list and len(parts) > 1 and len({type(part) for part in parts}) == 1:
        is_of_lists = isinstance(parts[0], (nn.ModuleList, nn.ModuleDict))  # which nobody calls
        if not is_of_lists and all(any(True for _ in part.children()) for part in parts):
            yield from parts
            return
    for part in parts:
        yield from _repeated(part)


def _outermost(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, kind):
            yield child
        else:
            yield from _outermost(child, kind)


def _composable() -> Any:
    try:
        from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
    except ImportError:
        raise ElasticError(
            "this torch has no composable activation checkpointing, which the trainer turns on and off; leave "
            "activation_checkpoint at 0"
        ) from None
    return checkpoint


def _recomputing(block: nn.Module) -> Any:
    """What composable checkpointing keeps of a block, None where it was never put on."""
    checkpoint = _composable()
    try:
        state = checkpoint.state(block)
    except (AttributeError, KeyError, AssertionError):
        return None
    return state
