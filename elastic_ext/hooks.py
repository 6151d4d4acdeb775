"""Hook: what this library has modules call, without copies of these modules calling it too."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

__all__ = ["Hook"]


class Hook(partial[Any]):
    """A hook of this model, which copies of it do not take along: those made by copy, and those that are saved.

    A partial, since calling one runs no code that a compiler would want to see.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__  # takes anything and does nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # it loads without this library
