"""Tampering: notices that gradients are changed while a step gathers them, as clipping in every micro-step would do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Tampering", "local_part"]

_SOME = 256


class Tampering:
    """Looks on in some steps: in every one it would cost too much."""

    def __init__(self) -> None:
        self.is_looking = False
        """In the step under way."""
        self._seen: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}  # gradients' versions, and some of their values

    def begin_step(self, *, is_looking: bool) -> None:
        """A step of several micro-steps begins."""
        self._seen.clear()
        self.is_looking = is_looking

    def forget(self) -> None:
        """Hold no parameter until the next pass."""
        self._seen.clear()

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward pass has ended: so gradients are to stay."""
        for part in parameters:
            gradient = part.grad
            if gradient is not None and not gradient.is_sparse:
                self._seen[part] = local_part(gradient)._version, _some(gradient).clone()

    def has_seen_change(self) -> bool:
        """Whether a gradient is another than the last backward pass has left it, or gone."""
        seen = ((part.grad, version, values) for part, (version, values) in self._seen.items())
        return any(
            gradient is None or local_part(gradient)._version != version or not _are_alike(_some(gradient), values)
            for gradient, version, values in seen
        )


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """What of a gradient lies on this rank: to look at it takes no other."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _some(gradient: torch.Tensor) -> torch.Tensor:
    """Enough to see a change that leaves the version as it is, as a GradScaler's do."""
    return local_part(gradient).detach().reshape(-1)[:_SOME]


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
