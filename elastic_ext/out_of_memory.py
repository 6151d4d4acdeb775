"""Out of memory: which exceptions say so, what they are to say besides, and what lets memory go after them."""

from __future__ import annotations

import gc

import torch

__all__ = ["advise", "is_out_of_memory", "let_go"]

_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def advise(error: BaseException, advice: str) -> None:
    """Have the exception say what to do, after what it says; ``advice`` has a place for that."""
    error.args = (advice.format(str(error).rstrip(".")),)


def let_go() -> None:
    """Give back what nobody holds any more; to be called where no exception is being handled, which would hold it."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
