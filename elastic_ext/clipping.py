"""Clipping: the norm of gradients that lie on several ranks, on one mesh or more, and gradients made to fit it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

__all__ = ["as_parameters", "clip_norm", "raise_if_not_finite"]


def as_parameters(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A list, of whatever the user may give."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def clip_norm(
    parameters: Sequence[torch.Tensor],
    most: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for gradients that are distributed over different meshes too.

    Gives the norm of all of them as a plain tensor, the same on every rank.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for part in parameters:
        gradient = part.grad
        if gradient is not None:
            by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(part)
    if set(by_mesh) <= {None}:
        return clip_grad_norm_(parameters, most, norm_type, error_if_nonfinite, foreach)
    norms = []
    for parts in by_mesh.values():
        norm = get_total_norm([part.grad for part in parts if part.grad is not None], norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        raise_if_not_finite(total, norm_type)
    for parts in by_mesh.values():
        clip_grads_with_norm_(parts, most, total, foreach)
    return total


def raise_if_not_finite(norm: torch.Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; leave "
            "error_if_nonfinite out to scale them by it all the same"
        )
