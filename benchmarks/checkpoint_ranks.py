"""The ranks of benchmarks/checkpoint_load.py: each saves and loads its part of a sharded model and of AdamW's state.

What a rank holds afterwards it tells as digests that, put side by side, are those of the full state, however many
ranks hold it.
"""

from __future__ import annotations

import ctypes
import gc
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from benchmarks.checkpoint_ways import WAYS, WayName
from benchmarks.joined import joined

__all__ = [
    "Done",
    "Load",
    "Measures",
    "Order",
    "Part",
    "Rank",
    "Save",
    "Show",
    "Task",
    "checkpointing_rank",
    "draw_values",
    "full_digest",
    "give_memory_back",
    "make_training",
    "number_in",
    "parts_of",
    "tensors_of",
]

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The model whose state is saved: a language model's parameters, in transformer blocks."""

    num_blocks: int
    width: int
    num_words: int

    @property
    def num_heads(self) -> int:
        return max(self.width // 64, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, where it finds the others, and where it keeps what it saves."""

    rank: int
    world_size: int
    port: int
    storage: Path
    task: Task


@dataclass(frozen=True, slots=True)
class Save:
    """Save the state that all ranks began with."""

    way: WayName
    step: int
    """Not saved before in this way."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load into a model and an optimizer that hold other values."""

    way: WayName
    path: Path


@dataclass(frozen=True, slots=True)
class Show:
    """Tell what all ranks began with."""


Order = Save | Load | Show


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one tensor."""

    is_spread: bool
    """Each rank has some rows of it, in the order of the ranks; else each has all of it."""
    digests: bytes
    """Of the rows, one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What a save or a load took on a rank."""

    wall_seconds: float
    cpu_seconds: float
    """Of all its threads."""
    read_bytes: int
    """By read calls; what is only mapped is not in it."""
    peak_bytes: int
    """By how much more memory lay in the process at once than when all was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of an order."""

    took: Measures | None = None
    path: Path | None = None
    """Of what was saved."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """What the rank holds: of Load and Show."""
    state_bytes: int = 0
    """Of its part of the state."""


# --- what is saved and loaded ---------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.words = nn.Embedding(task.num_words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, task.num_heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(task.num_blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.norm(hidden)
        return out


def make_training(task: Task, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    """The model, sharded over ``mesh`` block by block, and its optimizer as after some steps; all hold -1."""
    with torch.device("meta"):
        model = _Model(task)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = AdamW(model.parameters(), lr=0.001)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
            optimizer.state[parameter] = {
                "step": torch.tensor(-1.0),
                "exp_avg": torch.full_like(parameter, -1.0),
                "exp_avg_sq": torch.full_like(parameter, -1.0),
            }
    return model, optimizer


def draw_values(model: nn.Module, optimizer: Optimizer) -> None:
    """Give every tensor values of its own, the same whatever the number of ranks."""
    for name, tensor in tensors_of(model, optimizer):
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            parts = full.chunk(mesh.size())
            rank = mesh.get_local_rank()
            full = parts[rank] if rank < len(parts) else full[:0]
        _local(tensor).copy_(full)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """What this rank has of each tensor; sharding is by rows."""
    digest = xxhash.xxh3_64_digest
    parts = {}
    for name, tensor in tensors.items():
        rows = _local(tensor).numpy()
        is_short = rows.ndim < 2  # a row is one number, and tells itself
        parts[name] = Part(isinstance(tensor, DTensor), rows.tobytes() if is_short else b"".join(map(digest, rows)))
    return parts


def tensors_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole state, by names."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key, value in sorted(optimizer.state[parameter].items()):
            yield f"{name}/{key}", value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_digest(of_ranks: Sequence[Mapping[str, Part]]) -> str:
    """The digest of the full state that the ranks hold together, whatever their number."""
    digest = xxhash.xxh3_128()
    first = of_ranks[0]
    for name in sorted(first):
        parts = [parts[name] for parts in of_ranks]
        if not first[name].is_spread:
            assert all(part == parts[0] for part in parts), f"the ranks do not have the same {name}"
            parts = parts[:1]
        digest.update(name.encode())
        for part in parts:
            digest.update(part.digests)
    return digest.hexdigest()


# --- ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def checkpointing_rank(setup: Rank) -> Iterator[Callable[[Order], Done]]:
    """A rank with a state to save, and with what it needs to save and load it in every way."""
    with joined(rank=setup.rank, world_size=setup.world_size, port=setup.port), ExitStack() as stack:
        mesh = init_device_mesh("cpu", (setup.world_size,))
        model, optimizer = make_training(setup.task, mesh)
        draw_values(model, optimizer)
        tensors = dict(tensors_of(model, optimizer))
        ways = {name: stack.enter_context(make(setup.storage)) for name, make in WAYS.items()}

        def answer(order: Order) -> Done:
            if isinstance(order, Save):
                path, took = _measured(lambda: ways[order.way].save(order.step, model, optimizer))
                return Done(took=took, path=path, state_bytes=_bytes_of(tensors))
            if isinstance(order, Show):
                return Done(parts=parts_of(tensors), state_bytes=_bytes_of(tensors))
            others = make_training(setup.task, mesh)
            _, took = _measured(lambda: ways[order.way].load(order.path, *others))
            loaded = dict(tensors_of(*others))
            return Done(took=took, parts=parts_of(loaded), state_bytes=_bytes_of(loaded))

        yield answer


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors.values())


def _measured(act: Callable[[], _Result]) -> tuple[_Result, Measures]:
    """What ``act`` gives and what it took, in a process that keeps no memory for it, as one that has just begun."""
    give_memory_back()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    read_before = number_in("/proc/self/io", "rchar")
    wall_began, cpu_began = time.perf_counter(), time.process_time()
    result = act()
    wall, cpu = time.perf_counter() - wall_began, time.process_time() - cpu_began
    read = number_in("/proc/self/io", "rchar") - read_before
    peak_kib = number_in("/proc/self/status", "VmHWM")
    give_memory_back()
    peak = (peak_kib - number_in("/proc/self/status", "VmRSS")) * 1024
    return result, Measures(wall_seconds=wall, cpu_seconds=cpu, read_bytes=read, peak_bytes=max(peak, 0))


def give_memory_back() -> None:
    """To the system: what is free, but kept for later, would hide what is needed beside the state."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def number_in(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
