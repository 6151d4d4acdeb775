"""What benchmarks train that ask nothing of a model but its size: linear layers, on batches that are in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import xxhash
from torch import nn

__all__ = ["Batch", "digest_of", "linear_model", "random_batches", "start_again"]

Batch = tuple[torch.Tensor, torch.Tensor]


def linear_model(widths: Sequence[int]) -> nn.Sequential:
    """The same layers every time, of these widths from the inputs to the outputs."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


def random_batches(
    widths: Sequence[int], num_samples: int, num_batches: int, *, seed: int, device: str = "cpu"
) -> list[Batch]:
    """Inputs and outputs of a model of these widths."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(num_samples, width, generator=draw).to(device)

    return [(drawn(widths[0]), drawn(widths[-1])) for _ in range(num_batches)]


def start_again(state: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> None:
    """Have tensors hold what they held at the start."""
    for tensor, begun in zip(state, start, strict=True):
        tensor.copy_(begun)


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Of every bit of them, in their order."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
