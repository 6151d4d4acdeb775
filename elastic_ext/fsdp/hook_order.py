"""Hook order: where among the hooks of a module one stands, and where it shall. Pure; whose hook it is, others know.

torch calls hooks in the order of a dict, and numbers them as they are registered, over all modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["before", "put_after", "registered_ahead"]


def before(hooks: Mapping[int, object], own: Collection[int]) -> frozenset[int]:
    """The hooks that are called before the first one of ours; all of them where none is."""
    found = []
    for number in hooks:
        if number in own:
            break
        found.append(number)
    return frozenset(found)


def put_after(hooks: OrderedDict[int, Any], own: int, ahead: Collection[int]) -> None:
    """Have one of ours called after those ``ahead``, and before the others, which keep their order."""
    behind = [number for number in hooks if number != own and number not in ahead]
    for number in (own, *behind):
        hooks.move_to_end(number)


def registered_ahead(hooks: Mapping[int, Any], is_ahead: Callable[[Any], bool]) -> frozenset[int]:
    """Those that were to be called before whatever was there (``prepend=True``), as far as numbers tell.

    The oldest counts as one that was not, but where ``is_ahead`` knows it.
    """
    known = {number for number, hook in hooks.items() if is_ahead(hook)}
    oldest = min((number for number in hooks if number not in known), default=None)
    return frozenset(known) | (before(hooks, {oldest}) if oldest is not None else frozenset())
