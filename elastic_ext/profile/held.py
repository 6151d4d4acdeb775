"""What this process holds of memory now."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

__all__ = ["Memory", "memory_held"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """In bytes; None for an accelerator where there is none in use."""

    process: int | None
    """None where the system does not say, as where this process may open no more files."""
    accelerator: int | None = None
    """What tensors hold,"""
    accelerator_peak: int | None = None
    """... and the most that they held at once, since torch's peak counters began anew."""


def memory_held() -> Memory:
    """As it is now."""
    try:
        held: int | None = psutil.Process().memory_info().rss
    except (OSError, psutil.Error):
        held = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Memory(
            process=held,
            accelerator=torch.cuda.memory_allocated(),
            accelerator_peak=torch.cuda.max_memory_allocated(),
        )
    return Memory(process=held)
