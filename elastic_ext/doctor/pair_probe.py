"""What is measured: how fast a node multiplies matrices, and how fast two nodes exchange words and data."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NUM_WINDOWS", "devices", "exchange", "matmul"]

NUM_WINDOWS = 3
_PING_PONGS = 200 // NUM_WINDOWS + 1
_BLOCK_BYTES = 16 << 20
_MATMULS = 5
_CPU_SIZE, _GPU_SIZE = 768, 8192


def devices() -> list[str]:
    """What torch can compute on here: the CPU and each CUDA device."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]


def matmul(device: str) -> tuple[float, ...]:
    """Floating-point operations a second, the best of each window of time."""
    is_gpu = device.startswith("cuda")
    size = _GPU_SIZE if is_gpu else _CPU_SIZE
    left = torch.randn(size, size, dtype=torch.bfloat16 if is_gpu else torch.float32, device=device)
    right = torch.randn_like(left)
    out = torch.empty_like(left)

    def once() -> None:
        torch.mm(left, right, out=out)
        _settle(device)

    for _ in range(2):  # chooses the kernel, starts threads, wakes the clock
        once()
    return tuple(2 * size**3 / _least_seconds(once, _MATMULS) for _ in range(NUM_WINDOWS))


def exchange(
    store: Any, rank: int, *, backend: str, timeout_seconds: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Latency in seconds one way and bytes a second, each by windows, of two processes that call this at the same time.

    A group of their own is made and taken away again. Only rank 0 has times; rank 1 gets nothing. RuntimeError if the
    other one cannot be reached, or ends.
    """
    device = "cuda:0" if backend == "nccl" else "cpu"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    except RuntimeError:
        _forget_what_failed()
        raise
    try:
        word = torch.zeros(1, dtype=torch.int64, device=device)
        block = torch.zeros(_BLOCK_BYTES // 8, dtype=torch.int64, device=device)
        _rally(rank, word, word, device)  # connects
        latencies = tuple(
            _least_seconds(lambda: _rally(rank, word, word, device), _PING_PONGS) / 2 for _ in range(NUM_WINDOWS)
        )
        rates = []
        for _ in range(NUM_WINDOWS):  # a block there and a word back, a word there and a block back: the slower way
            there = _least_seconds(lambda: _rally(rank, block, word, device), 1)
            back = _least_seconds(lambda: _rally(rank, word, block, device), 1)
            rates.append(_BLOCK_BYTES / max(there, back))
    finally:
        dist.destroy_process_group()
    return (latencies, tuple(rates)) if rank == 0 else ((), ())


def _forget_what_failed() -> None:
    """Have torch number the next group as a process does that has had none.

    The number of a group is part of its keys in the store, and one that could not be made is counted until another one
    is taken away: two processes of which one had failed before would look for each other under unlike keys.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def _rally(rank: int, there: torch.Tensor, back: torch.Tensor, device: str) -> None:
    """``there`` from rank 0 to rank 1, and ``back`` the other way when it has come."""
    if rank == 0:
        dist.send(there, 1)
        dist.recv(back, 1)
    else:
        dist.recv(there, 0)
        dist.send(back, 0)
    _settle(device)


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _least_seconds(once: Callable[[], None], times: int) -> float:
    least = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        once()
        least = min(least, time.perf_counter() - begin)
    return max(least, 1e-9)
