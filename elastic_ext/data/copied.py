"""Copied: a value as it was, whatever becomes of what it was made of. It costs little until it is wanted."""

from __future__ import annotations

import copy
import copyreg
import io
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__ = ["Copied"]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy. It travels to another process as the bytes that it is, and nobody unpickles it on the way."""

    content: Any
    is_pickled: bool

    @classmethod
    def of(cls, value: Any) -> Copied:
        """What a value is now."""
        written = io.BytesIO()
        try:
            _Pickler(written).dump(value)
        except Exception:  # it is only this process that it cannot leave
            return cls(copy.deepcopy(value), is_pickled=False)
        return cls(written.getvalue(), is_pickled=True)

    def value(self) -> Any:
        """The value, another object each time."""
        return ForkingPickler.loads(self.content) if self.is_pickled else copy.deepcopy(self.content)


class _Pickler(ForkingPickler):
    """multiprocessing's without what is registered there, which has tensors shared among processes, and not copied."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.dispatch_table = copyreg.dispatch_table
