"""Fake: tensors that have shapes and no memory; the one place that asks torch for them, which has them in private.

Tried first with a small step whose memory is known: where this torch has none, or they behave otherwise, nothing is
worked out with them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .live_bytes import LiveBytes
from .tally import Tally

__all__ = ["why_not_fake", "without_memory"]

_ROWS, _COLUMNS = 1 << 10, 1 << 8
_FLOAT_BYTES = 4


def without_memory() -> AbstractContextManager[Any]:
    """``with`` it, tensors are made without memory; ImportError where this torch has none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: AbstractContextManager[Any] = FakeTensorMode()
    return made


def why_not_fake() -> str | None:
    """Why this torch does not tell what a step takes by tensors without memory; None where it does."""
    try:
        found = _tried()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} has no FakeTensorMode as it is known here: {error}"
    one = _ROWS * _COLUMNS * _FLOAT_BYTES
    wanted = one, 3 * one  # what came of it; with its gradient, and that of what was given
    if found != wanted:
        return (
            f"torch {torch.__version__} tells of tensors without memory that a step took {found} bytes where it takes "
            f"{wanted}"
        )
    return None


def _tried() -> tuple[int, int]:
    """The most in the forward and in the backward pass of a step with one operation."""
    tally = Tally()
    with without_memory():
        given = torch.empty(_ROWS, _COLUMNS, requires_grad=True)
        with LiveBytes(tally):
            result = given.exp()
            tally.enter("backward")
            result.backward(torch.empty_like(result))  # type: ignore[no-untyped-call]
    return tally.peaks.forward_bytes, tally.peaks.backward_bytes
