"""Holders: the objects that refer to a model's parameters, when these become other objects.

Optimizers' groups and state, and mappings that were registered, are rewritten in place, and so are lists from which a
script has made an optimizer's groups, where only variables have them. Whatever else refers to one would be left with a
parameter that nothing trains: Python's garbage collector finds it, and it is named.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Holders", "holders_of", "replace_in"]


@dataclass(frozen=True, eq=False, slots=True)
class Holders:
    """What refers to parameters, beside a model, its optimizers and what is known."""

    strangers: Sequence[str] = ()
    """The holders that cannot be rewritten, in words for people."""
    lists: Sequence[list[torch.Tensor]] = ()
    """The lists of the script's that have the parameters of an optimizer's group, and are to be rewritten with it."""


def replace_in(
    optimizers: Sequence[Optimizer], lists: Iterable[list[torch.Tensor]], old: torch.Tensor, new: torch.Tensor
) -> None:
    """Have optimizers train ``new`` instead of ``old``, with its state; ``lists`` have it instead too."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    for members in (*groups, *lists):
        for at, member in enumerate(members):
            if member is old:
                members[at] = new
    for optimizer in optimizers:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def holders_of(
    model: nn.Module, optimizers: Sequence[Optimizer], parameters: Sequence[torch.Tensor], known: Iterable[object]
) -> Holders:
    """What refers to one of the parameters and is not ``known``."""
    allowed: list[object] = [parameters, *known, *(module._parameters for module in model.modules())]
    for optimizer in optimizers:
        allowed += [optimizer.state, *(group["params"] for group in optimizer.param_groups)]
    by_id = {id(each): each for each in allowed}
    suspects = _held_elsewhere(parameters, list(by_id.values()))
    wanted = set(map(id, suspects))
    with _all_tracked():
        found = [each for each in gc.get_referrers(*suspects) if id(each) not in by_id and each is not suspects]
        lists = [each for each in found if _is_of_group(each, optimizers) and _is_in_variables(each, found)]
        followed = set(map(id, lists))
        others = (_in_words(each, wanted) for each in found if id(each) not in followed)
        return Holders([words for words in others if words is not None], lists)


def _is_of_group(holder: object, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a holder is a list of the same parameters, in the same order, as a group of an optimizer."""
    if type(holder) is not list:
        return False
    wanted = list(map(id, holder))
    return any(list(map(id, group["params"])) == wanted for each in optimizers for group in each.param_groups)


def _is_in_variables(holder: object, found: object) -> bool:
    """Whether only variables of modules and functions have a holder: an object may keep copies beside it.

    ``found`` has it too, and does not count.
    """
    owners = [each for each in gc.get_referrers(holder) if each is not found]
    return all(
        isinstance(each, (types.FrameType, types.CellType)) or (isinstance(each, dict) and _is_of_module(each))
        for each in owners
    )


@contextmanager
def _all_tracked() -> Iterator[None]:
    """A context in which Python's collector finds frozen objects too.

    Garbage since the freeze is not to be kept with them. It is looked for before, among what was not frozen: it takes
    no time, and among all it would take the longest.
    """
    has_frozen = gc.get_freeze_count() > 0
    if has_frozen:
        gc.collect()
        gc.unfreeze()
    try:
        yield
    finally:
        if has_frozen:
            gc.freeze()


def _held_elsewhere(parameters: Sequence[torch.Tensor], holders: Sequence[object]) -> list[torch.Tensor]:
    """The parameters that have more references than these holders: from torch, say, or from a name in a function.

    To count is quicker than to look through all that Python has, which takes longer with each that is looked for.
    """
    counted = Counter(map(id, gc.get_referents(*holders)))
    (looking,) = _counts([object()])  # with the list that is looked into
    counts = zip(parameters, _counts(parameters), strict=True)
    return [parameter for parameter, count in counts if count != counted[id(parameter)] + looking - 1]


def _counts(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


def _in_words(holder: object, wanted: set[int]) -> str | None:
    """A holder in words by which a person may find it; None for what is ours or passes by itself."""
    if isinstance(holder, (types.FrameType, types.GeneratorType)) or _is_iterator(holder):
        return None
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if id(value) in wanted]
        return f"{keys[0]!r} in {_dict_in_words(holder)}" if keys else f"a key in {_dict_in_words(holder)}"
    if isinstance(holder, (list, tuple, set, frozenset)):
        return f"a {type(holder).__name__} of {len(holder)}{_owner_of(holder)}"
    if isinstance(holder, types.CellType):
        return "a variable of a function that is kept"
    names = [name for name, value in _attributes(holder).items() if id(value) in wanted]
    return f"{names[0]!r} in {_kind(holder)}" if names else _kind(holder)


def _is_iterator(holder: object) -> bool:
    return isinstance(holder, Iterator) and type(holder).__module__ == "builtins"


def _is_of_module(holder: dict[Any, Any]) -> bool:
    """Whether a dict has the names of a module."""
    return "__name__" in holder and "__spec__" in holder


def _dict_in_words(holder: dict[Any, Any]) -> str:
    if _is_of_module(holder):
        return f"the module {holder['__name__']}"
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            return _kind(owner)
    return f"a dict of {len(holder)}{_owner_of(holder)}"


def _owner_of(holder: object) -> str:
    """Where a list or a dict is kept: under a name in a module, an object or a dict; empty where in none."""
    told = ""
    for owner in gc.get_referrers(holder):
        is_dict = isinstance(owner, dict)
        names = [name for name, value in (owner if is_dict else _attributes(owner)).items() if value is holder]
        if not names:
            continue
        if not is_dict:
            return f", {names[0]!r} in {_kind(owner)}"
        if _is_of_module(owner):
            return f", {names[0]!r} in the module {owner['__name__']}"
        objects = [each for each in gc.get_referrers(owner) if getattr(each, "__dict__", None) is owner]
        if objects:
            return f", {names[0]!r} in {_kind(objects[0])}"
        told = f", {names[0]!r} in a dict of {len(owner)}"
    return told


def _attributes(holder: object) -> dict[str, Any]:
    """The attributes of an object, which may keep them without a dict of its own from Python 3.11 on."""
    if isinstance(holder, (types.FrameType, types.ModuleType)):
        return {}
    found = getattr(holder, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def _kind(holder: object) -> str:
    return f"a {type(holder).__module__}.{type(holder).__qualname__}"
