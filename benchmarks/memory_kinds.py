"""Models whose steps take memory in different ways, and batches for them; at the top of a module, where the process
that works out their memory finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

__all__ = ["KINDS", "Kind", "blocks_of_kind", "loss_of"]

LENGTH, CLASSES = 128, 100


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        num_samples, length, width = given.shape
        split = self.projections(self.before_attention(given)).view(num_samples, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        given = given + self.drop(self.out(mixed.transpose(1, 2).reshape(num_samples, length, width)))
        found: torch.Tensor = given + self.drop(self.network(self.before_network(given)))
        return found


class Transformer(nn.Module):
    """GPT's."""

    def __init__(self, *, num_words: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words) + self.places.weight
        for block in self.blocks:
            found = block(found)
        scores: torch.Tensor = self.head(self.norm(found))
        return scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(2000, 256), nn.LSTM(256, 384, 2, batch_first=True)
        self.head = nn.Linear(384, 2000)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.words(words))[0])
        return scores


def transformer() -> nn.Module:
    return Transformer(num_words=4096, width=256, num_blocks=6)


def transformer_of_many_words() -> nn.Module:
    """Whose scores are most of what its steps take."""
    return Transformer(num_words=32768, width=128, num_blocks=2)


def recurrent() -> nn.Module:
    return Recurrent()


def convolutions() -> nn.Module:
    parts: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        for _ in range(2):
            parts += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def _sentences(num_words: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def made(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(num_words, (size, LENGTH))
        return words, words.roll(-1, 1)

    return made


def _classified(*shape: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda size: (torch.randn(size, *shape), torch.randint(CLASSES, (size,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One that is measured."""

    name: str
    factory: Callable[[], nn.Module]
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    most_error: float
    """That is claimed for what is worked out of it, and compared with one measured step."""
    ratio: float = 0.0
    """Of blocks that are computed again."""


TRANSFORMER, NATIVE = 0.02, 0.10
KINDS = (
    Kind(name="GPT", factory=transformer, batch_of=_sentences(4096), most_error=TRANSFORMER),
    Kind(name="GPT, recomputed", factory=transformer, batch_of=_sentences(4096), most_error=TRANSFORMER, ratio=1.0),
    Kind(
        name="GPT, half of it recomputed",
        factory=transformer,
        batch_of=_sentences(4096),
        most_error=TRANSFORMER,
        ratio=0.5,
    ),
    Kind(
        name="GPT of many words",
        factory=transformer_of_many_words,
        batch_of=_sentences(32768),
        most_error=TRANSFORMER,
    ),
    Kind(name="LSTM", factory=recurrent, batch_of=_sentences(2000), most_error=NATIVE),
    Kind(name="ConvNet", factory=convolutions, batch_of=_classified(3, 48, 48), most_error=NATIVE),
    Kind(name="MLP", factory=layers, batch_of=_classified(256), most_error=TRANSFORMER),
)


def blocks_of_kind(model: nn.Module) -> list[nn.Module]:
    """What it repeats."""
    return list(model.blocks) if isinstance(model, Transformer) else []
