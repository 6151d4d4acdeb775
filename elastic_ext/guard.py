"""Guard: notices that gradients are changed while a step gathers them, as clipping in every micro-step would do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

__all__ = ["Guard"]

_FIRST = 3
_EVERY = 64
_SOME = 256


class Guard:
    """Looks on in the first steps, and in one of many after them: in every step it would cost too much."""

    def __init__(self) -> None:
        self.is_looking = False
        self._num_steps = 0
        self._handles: list[RemovableHandle] = []
        self._seen: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}  # gradients' versions, and some of their values

    def begin_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step of several micro-steps begins."""
        is_due = self._num_steps < _FIRST or self._num_steps % _EVERY == 0
        self._num_steps += 1
        if is_due or self.is_looking:
            self.rest()
        if is_due:
            self.is_looking = True
            for part in parameters:
                if part.requires_grad and part.is_leaf:
                    self._handles.append(part.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]

    def has_seen_change(self) -> bool:
        """Whether a gradient is another than the last backward pass has left it, or gone."""
        seen = ((part.grad, version, values) for part, (version, values) in self._seen.items())
        return any(
            gradient is None or (gradient._version != version or not _are_alike(_some(gradient), values))
            for gradient, version, values in seen
        )

    def rest(self) -> None:
        """Look on no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self.is_looking = False

    def _note(self, part: torch.Tensor) -> None:
        if part.grad is not None and not part.grad.is_sparse:
            self._seen[part] = part.grad._version, _some(part.grad).clone()


def _some(gradient: torch.Tensor) -> torch.Tensor:
    """Enough to see a change that leaves the version as it is, as a GradScaler's do."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach().reshape(-1)[:_SOME]


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
