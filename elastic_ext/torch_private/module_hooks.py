"""Hook: a module's hook that copies of the module do not have; what ``torch.compile`` leaves out, and has compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Hook", "beside_graphs", "is_compiled", "num_graphs_compiled", "skipped_by_compiler"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Hook(partial[Any]):
    """A module's hook that does nothing in copies of the module, whether made by deepcopy or by pickling.

    A partial, since calling one runs no code that a compiler would want to see.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__  # takes anything and does nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # it loads without this library


def beside_graphs(act: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """``act`` as a compiled model's hook calls it: beside a graph, with none of its frames compiled.

    ``reason`` is what torch says where a model has to be one graph. Nothing is done where nothing is compiled.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    return act if dynamo is None else dynamo.disable(act, reason=reason)


def skipped_by_compiler(hook: _Function) -> _Function:
    """The same hook, of which alone no graph is made, where torch lets that be said; what it calls may be in one."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    skip = getattr(getattr(dynamo, "eval_frame", None), "skip_code", None)
    if skip is not None:
        skip(hook.__code__)
    return hook


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def num_graphs_compiled() -> int:
    """How many graphs ``torch.compile`` has made in this process; 0 where torch does not tell.

    A hook that is put on a module makes torch compile anew the functions that call the module.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return int(getattr(dynamo, "counters", {}).get("stats", {}).get("unique_graphs", 0))
