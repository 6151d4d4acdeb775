"""The peer of benchmarks/reshard.py: a model spread by hand from the start, which a process that has just begun loads.

Nothing of the library is imported here, so that a restart does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.joined import joined

__all__ = [
    "Gpt",
    "Part",
    "Restart",
    "Task",
    "Training",
    "Way",
    "full_digest",
    "make_by_hand",
    "make_model",
    "make_optimizer",
    "parts_of",
    "restarted_rank",
    "rows_on",
    "take_step",
    "tensors_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The model that is trained, and on what."""

    num_blocks: int
    width: int
    num_words: int
    length: int = 16
    """Of a sequence, one for each rank and step."""

    @property
    def num_heads(self) -> int:
        return max(self.width // 64, 1)


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is spread."""

    strategy: Literal["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]
    unit: int | Literal["whole"] = 1
    is_recomputed: bool = False
    """Every block's activations, in the backward pass."""

    @property
    def shard_degree(self) -> int | None:
        """Two, where there may be several copies."""
        return 2 if self.strategy == "hybrid_shard" else None

    def __str__(self) -> str:
        told: str = "hybrid of 2" if self.strategy == "hybrid_shard" else self.strategy
        told += "" if self.unit == 1 else f", unit {self.unit}"
        return told + (", recomputed" if self.is_recomputed else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """A rank that begins anew, and loads what others have saved."""

    rank: int
    world_size: int
    port: int
    task: Task
    way: Way
    path: Path


class Gpt(nn.Module):
    """Words in, logits for each next word out."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.words = nn.Embedding(task.num_words, width)
        self.places = nn.Embedding(task.length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, task.num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(task.num_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, task.num_words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


@dataclass(frozen=True, slots=True)
class Training:
    """A model, what the loop calls, and its optimizer."""

    model: nn.Module
    outer: nn.Module
    optimizer: Optimizer


def make_model(task: Task, *, is_empty: bool = False) -> Gpt:
    """The same values each time; none at all where it is empty."""
    torch.manual_seed(0)
    with torch.device("meta" if is_empty else "cpu"):
        return Gpt(task)


def make_optimizer(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3)


def make_by_hand(model: Gpt, way: Way) -> Training:
    """Spread as torch's own documentation says; a model without values gets memory, whatever lies in it."""
    if way.is_recomputed:
        for block in model.blocks:
            checkpoint(block)
    is_empty = next(model.parameters()).is_meta
    if way.strategy == "no_shard":
        if is_empty:
            model.to_empty(device="cpu")
        outer: nn.Module = DistributedDataParallel(model, init_sync=not is_empty)
    else:
        outer = model
        num_ranks = dist.get_world_size()
        degree = way.shard_degree or num_ranks
        if degree == num_ranks:
            mesh = init_device_mesh("cpu", (num_ranks,))
        else:
            mesh = init_device_mesh("cpu", (num_ranks // degree, degree), mesh_dim_names=("replicate", "shard"))
        options: dict[str, Any] = {"mesh": mesh}
        if way.strategy == "shard_grad_op":
            options["reshard_after_forward"] = False
        blocks = list(model.blocks)
        if way.unit != "whole":
            for first in range(0, len(blocks), way.unit):
                group = blocks[first : first + way.unit]
                fully_shard(group[0] if way.unit == 1 else group, **options)
        fully_shard(model, **options)
        if is_empty:
            model.to_empty(device="cpu")
    return Training(model, outer, make_optimizer(model))


def take_step(training: Training, task: Task, number: int) -> float:
    """A step on what this rank reads at that number; gives the loss."""
    draw = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    words = torch.randint(task.num_words, (1, task.length + 1), generator=draw)
    logits = training.outer(words[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    training.optimizer.zero_grad()
    return float(loss.item())


# --- what a rank has ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one tensor."""

    first_row: int
    num_rows: int
    digests: bytes
    """Of the rows, one after another."""


def tensors_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole state, by names."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key, value in sorted(optimizer.state[parameter].items()):
            yield f"{name}/{key}", value


def rows_on(rank: int, num_ranks: int, way: Way, num_rows: int) -> range:
    """Those that a rank has of a tensor."""
    degree = 1 if way.strategy == "no_shard" else way.shard_degree or num_ranks
    size = -(-num_rows // degree)  # of a part, as chunk makes them
    first = min(rank % degree * size, num_rows)
    return range(first, min(first + size, num_rows))


def parts_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Part]:
    """What this rank has of each tensor; sharding is by rows."""
    return {name: _part(tensor) for name, tensor in tensors_of(model, optimizer)}


def _part(tensor: torch.Tensor) -> Part:
    first, rows = 0, tensor
    if isinstance(tensor, DTensor):
        mesh, rows = tensor.device_mesh, tensor.to_local()
        if len(rows):
            size = -(-len(tensor) // mesh.shape[-1])  # of a part, as chunk makes them
            first = mesh.get_local_rank(mesh.ndim - 1) * size
    values = rows.numpy()
    digests = values.tobytes() if values.ndim < 2 else b"".join(map(xxhash.xxh3_64_digest, values))
    return Part(first, len(values) if values.ndim else 1, digests)


def full_digest(of_ranks: Sequence[Mapping[str, Part]]) -> str:
    """The digest of the full state that the ranks hold together, however it is spread; AssertionError where copies of
    it differ or rows are missing."""
    digest = xxhash.xxh3_128()
    for name in sorted(of_ranks[0]):
        parts = {parts[name] for parts in of_ranks if parts[name].num_rows}
        in_order = sorted(parts, key=lambda part: part.first_row)
        assert not in_order or in_order[0].first_row == 0, f"the first rows of {name} are missing"
        for one, other in pairwise(in_order):
            assert one.first_row + one.num_rows == other.first_row, f"the ranks do not fit together in {name}"
        digest.update(name.encode())
        for part in in_order:
            digest.update(part.digests)
    return digest.hexdigest()


# --- the restart ----------------------------------------------------------------------------------------------------


@contextmanager
def restarted_rank(setup: Restart) -> Iterator[Callable[[None], dict[str, Part]]]:
    """A rank that is ready once it has the state that was saved; then it tells what it holds."""
    with joined(rank=setup.rank, world_size=setup.world_size, port=setup.port):
        training = make_by_hand(make_model(setup.task, is_empty=True), setup.way)
        model, optimizer = get_state_dict(training.outer, training.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=setup.path)  # type: ignore[attr-defined]
        set_state_dict(
            training.outer, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        dist.barrier()
        yield lambda _: parts_of(training.model, training.optimizer)
