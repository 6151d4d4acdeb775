"""The ways to save and load that benchmarks/checkpoint_load.py compares, each as one would write it with its library,
and those to save while training goes on, of benchmarks/checkpoint_save.py.

All ranks call them together. A load leaves the model and the optimizer ready to train.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.records.files import sync_folder

__all__ = ["BACKGROUND_WAYS", "WAYS", "BackgroundName", "BackgroundWay", "Way", "WayName", "locals_of"]

WayName = Literal["dcp", "ours", "full"]
BackgroundName = Literal["dcp", "ours", "default", "reused", "process", "machine"]

_AT_ONCE_BYTES = 4 << 20


class Way(Protocol):
    """One way, on one rank. A save is durable when it returns."""

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
        dcp.save(_state_of(model, optimizer), **fast_settings(path))  # type: ignore[attr-defined]
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


# --- while training goes on -----------------------------------------------------------------------------------------


class BackgroundWay(Protocol):
    """One way to save while training goes on, on one rank; one save at a time."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Do what can be done before the first save."""

    def begin(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        """Return when the model may change; gives the folder that ``load`` takes, and that is not there before."""

    def is_saving(self) -> bool:
        """Whether what was begun goes on on any rank."""

    def finish(self) -> None:
        """Return when what was begun is durable."""

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Put what was saved into a model and an optimizer with other values."""


class _OursInBackground(_Ours):
    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._saving.prepare(model, optimizer)

    def begin(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        return self._saving.save(step, model, optimizer)

    def is_saving(self) -> bool:
        return self._saving.is_saving()

    def finish(self) -> None:
        self._saving.wait()


class _DcpInForeground(_Dcp):
    """Training goes on when all is done."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Nothing can be done."""

    def begin(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        return self.save(step, model, optimizer)

    def is_saving(self) -> bool:
        return False

    def finish(self) -> None:
        """It is durable."""


class _AsyncDcp(_DcpInForeground):
    """dcp.async_save, whose threads talk in a group of their own; ``settings`` are the call's, for a folder."""

    def __init__(self, storage: Path, settings: Callable[[Path], Mapping[str, Any]]) -> None:
        super().__init__(storage)
        self._folder = storage
        self._settings = settings
        self._group = dist.new_group(backend="gloo")
        self._future: Future[Any] | None = None

    def begin(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        path = self._folder / f"async_{step}"
        future = dcp.async_save(  # type: ignore[attr-defined]
            _state_of(model, optimizer), process_group=self._group, **self._settings(path)
        )
        assert isinstance(future, Future), "no stager here works on a thread of its own"
        self._future = future
        return path

    def is_saving(self) -> bool:
        num_saving = torch.tensor([int(self._future is not None and not self._future.done())])
        dist.all_reduce(num_saving)
        return num_saving.item() > 0

    def finish(self) -> None:
        assert self._future is not None
        self._future.result()
        self._future = None


class _Machine:
    """What no way does without: one copy to memory that was touched before, and one file written past the cache."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._path = storage

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        num_bytes = sum(tensor.nbytes for tensor in locals_of(model, optimizer))
        self._memory = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._bytes().zero_()

    def begin(self, step: int, model: nn.Module, optimizer: Optimizer) -> Path:
        memory, start = self._bytes(), 0
        for tensor in locals_of(model, optimizer):
            memory[start : start + tensor.nbytes].copy_(_flat_bytes(tensor))
            start += tensor.nbytes
        self._path = self._storage / f"machine_{step}"
        return self._path

    def is_saving(self) -> bool:
        return False

    def finish(self) -> None:
        self._path.mkdir(exist_ok=True)
        file = os.open(self._own(self._path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        try:
            view = memoryview(self._memory)
            for start in range(0, len(view), _AT_ONCE_BYTES):
                os.pwrite(file, view[start : start + _AT_ONCE_BYTES], start)
            os.fsync(file)
        finally:
            os.close(file)

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        read, start = torch.frombuffer(bytearray(self._own(path).read_bytes()), dtype=torch.uint8), 0
        for tensor in locals_of(model, optimizer):
            _flat_bytes(tensor).copy_(read[start : start + tensor.nbytes])
            start += tensor.nbytes

    def _own(self, path: Path) -> Path:
        return path / f"rank_{dist.get_rank()}"

    def _bytes(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)


def locals_of(model: nn.Module, optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What of each parameter and of its state lies on this rank, in the order of the parameters."""
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *(value for _, value in sorted(optimizer.state[parameter].items()))):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def fast_settings(path: Path) -> dict[str, Any]:
    """The settings of DCP that were fastest."""
    return {
        "storage_writer": FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=2),
        "planner": DefaultSavePlanner(enable_plan_caching=True),
    }


# --- making them ----------------------------------------------------------------------------------------------------


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


@contextmanager
def _ours_in_background(storage: Path) -> Iterator[BackgroundWay]:
    with (
        ShardCheckpointer(storage, job="background", in_background=True) as saving,
        ShardCheckpointer(storage, job="background") as loading,
    ):
        yield _OursInBackground(saving, loading)


@contextmanager
def _dcp_in_foreground(storage: Path) -> Iterator[BackgroundWay]:
    yield _DcpInForeground(storage)


@contextmanager
def _async_default(storage: Path) -> Iterator[BackgroundWay]:
    yield _AsyncDcp(storage, lambda path: {"checkpoint_id": path})


@contextmanager
def _async_reused(storage: Path) -> Iterator[BackgroundWay]:
    stager = _stager(is_shared=False)
    try:
        yield _AsyncDcp(storage, lambda path: {**fast_settings(path), "async_stager": stager})
    finally:
        stager.close()


@contextmanager
def _async_process(storage: Path) -> Iterator[BackgroundWay]:
    stager = _stager(is_shared=True)
    kind = AsyncCheckpointerType.PROCESS
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where its processes find each other
    try:
        yield _AsyncDcp(
            storage, lambda path: {**fast_settings(path), "async_stager": stager, "async_checkpointer_type": kind}
        )
    finally:
        stager.close()


@contextmanager
def _machine(storage: Path) -> Iterator[BackgroundWay]:
    yield _Machine(storage)


def _stager(*, is_shared: bool) -> DefaultStager:
    """One to be kept from save to save; pinned memory and copies aside are for accelerators."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=is_shared,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


WAYS: Mapping[WayName, Callable[[Path], AbstractContextManager[Way]]] = MappingProxyType(
    {"dcp": _dcp, "ours": _ours, "full": _full}
)
"""What makes each of them, for a folder that all ranks save in."""

BACKGROUND_WAYS: Mapping[BackgroundName, Callable[[Path], AbstractContextManager[BackgroundWay]]] = MappingProxyType(
    {
        "dcp": _dcp_in_foreground,
        "ours": _ours_in_background,
        "default": _async_default,
        "reused": _async_reused,
        "process": _async_process,
        "machine": _machine,
    }
)
"""The same, for those that save while training goes on; "process" needs to make processes."""


def _state_of(model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}
