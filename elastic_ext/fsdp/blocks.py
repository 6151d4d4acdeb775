"""Blocks: the parts that a model repeats, found or named; and which of them form a unit, or are computed again.

Activations are computed again by torch's composable checkpointing, which changes no name; it is put on a block when it
is first asked for, and from then on only told whether to act.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from elastic_ext.errors import ElasticError

from .internals import is_compiled
from .plan import blocks_recomputed

__all__ = ["Units", "blocks_of", "recompute", "why_not_recompute"]

Units: TypeAlias = type[nn.Module] | Sequence[str] | None
"""A class of modules, their names, or None for the repeated blocks that are found."""

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, units: Units = None) -> list[nn.Module]:
    """The model's blocks, in its order; ValueError where what was given names none."""
    if units is None:
        return _repeated(model)
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


def why_not_recompute(model: nn.Module, blocks: Sequence[nn.Module], ratio: float) -> str | None:
    """Why a share of the model's blocks cannot be computed again, None where it can."""
    if ratio and not blocks:
        return "activation_checkpoint is given, and no repeated blocks were found; name them with units="
    if ratio and _are_in_compiled(model, {id(block) for block in blocks}, is_within=False):
        return (
            "activation_checkpoint is given, and blocks are compiled as parts of a larger module, where torch cannot "
            "compute them again; compile each by itself instead, with block.compile()"
        )
    try:
        _composable()
    except ElasticError as error:
        return str(error) if ratio else None
    return None


def _are_in_compiled(module: nn.Module, blocks: Collection[int], *, is_within: bool) -> bool:
    if id(module) in blocks:
        return is_within
    is_within = is_within or is_compiled(module)
    return any(_are_in_compiled(part, blocks, is_within=is_within) for part in module.children())


def _repeated(model: nn.Module) -> list[nn.Module]:
    """What lists of modules repeat; and what a list has one of, where others repeat it, or nothing is repeated."""
    several = list(_several(model))
    found = several + list(_lone(model, {type(block) for block in several}))
    chosen = {id(block) for block in found}
    return [module for module in model.modules() if id(module) in chosen]


def _several(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost lists' candidates, where there are several in one."""
    chosen = _candidates(module)
    for part in _parts(module):
        if len(chosen) > 1 and any(part is each for each in chosen):
            yield part
        else:
            yield from _several(part)


def _lone(module: nn.Module, kinds: Collection[type[nn.Module]]) -> Iterator[nn.Module]:
    """Of lists with one candidate: those of these kinds; where there are none, those that hold no other."""
    chosen = _candidates(module)
    for part in _parts(module):
        is_chosen = any(part is each for each in chosen)
        if is_chosen and (len(chosen) > 1 or type(part) in kinds):
            yield part
            continue
        inner = list(_lone(part, kinds))
        yield from inner
        if is_chosen and not kinds and not inner:
            yield part


def _candidates(module: nn.Module) -> list[nn.Module]:
    """What may be blocks of a list: modules of one class, each of several parts, beside whatever has none."""
    if not isinstance(module, _LISTS):
        return []
    parts = _parts(module)
    if len(parts) == 1 or len({type(part) for part in parts}) > 1:
        parts = [part for part in parts if not isinstance(part, _LISTS)]
    else:
        parts = [part for part in parts if not isinstance(part, (nn.ModuleList, nn.ModuleDict))]  # nobody calls these
    parts = [part for part in parts if any(True for _ in part.children())]
    return parts if len({type(part) for part in parts}) == 1 else []


def _parts(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.children() if any(True for _ in part.parameters())]


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
