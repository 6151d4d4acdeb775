"""Out of memory: which exceptions say so, what they are to say besides, and what lets memory go after them; and which
one says that micro-batches have become too small for that."""

from __future__ import annotations

import gc

import torch

__all__ = ["advise", "is_out_of_memory", "let_go", "refuses_one"]

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
_REFUSES_ONE = "Expected more than 1 value per channel when training"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def refuses_one(error: BaseException) -> bool:
    """Whether a layer that normalises over a micro-batch, as BatchNorm does, was given one of a single sample."""
    return isinstance(error, ValueError) and _REFUSES_ONE in str(error)


def advise(error: BaseException, advice: str) -> None:
    """Have the exception say what to do, after what it says; ``advice`` has a place for that."""
    error.args = (advice.format(str(error).rstrip(".")),)


def let_go() -> None:
    """Give back what nobody holds any more; to be called where no exception is being handled, which would hold it."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
