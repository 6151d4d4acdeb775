"""The ways to save and load that benchmarks/checkpoint_load.py compares, each as one would write it with its library.

All ranks call them together. A save is durable when it returns, and a load leaves the model and the optimizer ready
to train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from elastic_ext.files import sync_folder
from elastic_ext.fsdp import ShardCheckpointer

__all__ = ["WAYS", "Way", "WayName"]

WayName = Literal["dcp", "ours", "full"]


class Way(Protocol):
    """One way, on one rank."""

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Give the folder or file that ``load`` takes; it is not there before."""

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Put what was saved into a model and an optimizer with other values."""


class _Ours:
    """One run saves and another loads, as after a restart."""

    def __init__(self, saving: ShardCheckpointer, loading: ShardCheckpointer) -> None:
        self._saving = saving
        self._loading = loading

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        path = self._saving.save(step, model, optimizer)
        self._saving.wait()
        return path

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._loading.load(model, optimizer, path)


class _Dcp:
    """torch.distributed.checkpoint with what was fastest of its settings, each tried with the others: not a file for
    each tensor, two threads, each of which writes a file, and plans that are kept from save to save."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        path = self._storage / f"dcp_{step}"
        dcp.save(  # type: ignore[attr-defined]
            _state_of(model, optimizer),
            storage_writer=FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=2),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        return path

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        state = _state_of(model, optimizer)
        dcp.load(state, storage_reader=FileSystemReader(path))  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class _Full:
    """The full state in one file, which the first rank writes and reads."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        state = _state_of(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
        path = self._storage / f"full_{step}.pt"
        if dist.get_rank() == 0:
            temporary = path.with_suffix(".tmp")
            with temporary.open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
        dist.barrier()
        return path

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:
            state = torch.load(path, mmap=True, weights_only=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


@contextmanager
def _ours(storage: Path) -> Iterator[Way]:
    job = f"of_{dist.get_world_size()}_ranks"
    with ShardCheckpointer(storage, job=job) as saving, ShardCheckpointer(storage, job=job) as loading:
        yield _Ours(saving, loading)


@contextmanager
def _dcp(storage: Path) -> Iterator[Way]:
    yield _Dcp(storage)


@contextmanager
def _full(storage: Path) -> Iterator[Way]:
    yield _Full(storage)


WAYS: Mapping[WayName, Callable[[Path], AbstractContextManager[Way]]] = MappingProxyType(
    {"dcp": _dcp, "ours": _ours, "full": _full}
)
"""What makes each of them, for a folder that all ranks save in."""


def _state_of(model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}
