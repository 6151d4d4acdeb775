"""Models whose steps take memory in different ways, at the top of a module, where another process finds them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy
import torch
import torch.nn.functional as functional
from torch import nn

__all__ = [
    "CLASSES",
    "Attention",
    "Picks",
    "Recurrent",
    "attention",
    "convolutions",
    "cross_entropy",
    "exits",
    "is_slow",
    "kills_itself",
    "layers",
    "no_module",
    "normalised",
    "other_layers",
    "other_names",
    "picks",
    "prints",
    "recurrent",
    "takes_memory",
    "wasteful",
    "with_loss",
]

CLASSES, WIDTH, LENGTH = 50, 64, 24


class Layer(nn.Module):
    """Attention and a network, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        batch, length, _ = given.shape
        heads = self.parts(self.before(given)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        given = given + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        found: torch.Tensor = given + self.drop(self.network(self.between(given)))
        return found


class Attention(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.table(words)
        for layer in self.layers:
            found = layer(found)
        scores: torch.Tensor = self.head(found)
        return scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.LSTM(WIDTH, 2 * WIDTH, 2, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.table(words))[0])
        return scores


class Picks(nn.Module):
    """What it takes depends on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(given[given[:, 0] > -9])
        return outputs


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(inputs)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


def attention() -> nn.Module:
    return Attention()


def recurrent() -> nn.Module:
    return Recurrent()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def layers() -> nn.Module:
    """As tests.support.training.make_model has them, in float32."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def normalised() -> nn.Module:
    """Whose passes refuse a single sample."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))


def picks() -> nn.Module:
    return Picks()


def with_loss() -> nn.Module:
    return WithLoss()


def cross_entropy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Of batches whose second part are classes."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def wasteful(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Another loss than is trained with, which takes much more."""
    return outputs[..., None].expand(*outputs.shape, 64).exp().sum()


# --- that do not help -------------------------------------------------------------------------------------------------


def prints() -> nn.Module:
    """What is printed, by Python or by others, is no answer."""
    print("{}")
    os.write(1, b"not an answer\n")
    return layers()


def other_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def other_names() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5))


def no_module() -> nn.Module:
    found: Any = "a model"
    return found  # type: ignore[no-any-return]


def is_slow() -> nn.Module:
    time.sleep(600)
    return layers()


def exits() -> nn.Module:
    sys.exit(3)


def kills_itself() -> nn.Module:
    os.abort()


def takes_memory() -> nn.Module:
    """Which is not touched, and counts all the same."""
    return nn.Linear(len(numpy.empty(1 << 33, dtype=numpy.uint8)), 1)
