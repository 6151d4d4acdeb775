"""Out of memory: which exceptions say so, how to add advice to them, and how to free memory afterwards; and which
exception says that a micro-batch has become too small for a layer."""

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
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def refuses_one(error: BaseException) -> bool:
    """Whether an exception says that BatchNorm, or a layer like it, was given a micro-batch of a single sample."""
    return isinstance(error, ValueError) and _REFUSES_ONE in str(error)


def advise(error: BaseException, advice: str) -> None:
    """Put an exception's message into ``advice``, in the place of its ``{}``, as the new message."""
    error.args = (advice.format(str(error).rstrip(".")),)


def let_go() -> None:
    """Collect garbage and empty CUDA's cache; called where no exception is being handled, which would hold memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
