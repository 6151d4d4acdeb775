"""DeviceMemory: what a step's passes take of an accelerator's memory, and whether there is room for more.

On a device without an allocator of torch's that can be asked, such as the CPU, nothing is known and nothing refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ext.torch_private.out_of_memory import is_out_of_memory, let_go

__all__ = ["DeviceMemory", "Pressure", "warning_of"]

_PIECE_BYTES = 512 << 20  # as large as activations may be in one piece; the allocator finds room for pieces apart
_FRAGMENTED = 0.2  # of what the allocator has


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Counters of a device's allocator, which show how hard it is to find memory."""

    num_retries: int = 0
    """How often the allocator had to give back its cache to find memory."""
    num_failures: int = 0
    """How often the allocator has found no memory."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Pressure:
        """The pressure that ``torch.cuda.memory_stats()`` tells of."""
        return cls(
            num_retries=stats.get("num_alloc_retries", 0),
            num_failures=stats.get("num_ooms", 0),
            allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        )


def warning_of(before: Pressure, now: Pressure) -> str | None:
    """A warning that the allocator finds memory hard to get; None where nothing has become worse."""
    num_retries = now.num_retries - before.num_retries
    if num_retries <= 0 and now.num_failures <= before.num_failures:
        return None
    told = f"GPU memory is nearly used up: the allocator had to empty its cache {num_retries} time(s) to find some"
    unused = now.reserved_bytes - now.allocated_bytes
    if unused > _FRAGMENTED * now.reserved_bytes:
        told += (
            f", and {unused / 2**30:.1f} of {now.reserved_bytes / 2**30:.1f} GiB were in pieces too small to use; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment avoids that"
        )
    return told


class DeviceMemory:
    """What steps of this process take of one device's memory, and whether there is room for more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = device.type == "cuda"
        self._before = 0
        self._last = Pressure()
        self.per_sample: float | None = None
        """Bytes that a step takes for each sample, beside what is allocated between steps; None where not known."""

    def begin_step(self) -> None:
        """Begin to measure a step's memory; torch's peak counters of the device begin anew."""
        if self._is_known:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def end_step(self, largest: int) -> None:
        """Measure a step that has ended, and has taken at most ``largest`` samples at once."""
        if self._is_known:
            self.per_sample = max(0, torch.cuda.max_memory_allocated(self._device) - self._before) / largest

    def why_no_room(self, num_samples: int) -> str | None:
        """Why ``num_samples`` at once would not fit into memory, found by allocating that for a moment; else None."""
        if self.per_sample is None:
            return None
        num_bytes = int(self.per_sample * num_samples)
        if self.has_room(num_bytes):
            return None
        return (
            f"{num_samples} samples at once are expected to take {num_bytes / 2**30:.2f} GiB on {self._device}, beside "
            "what lies there between steps, and there is not as much"
        )

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` of memory are free, found out by allocating them for a moment."""
        pieces: list[torch.Tensor] = []
        has_failed = False
        try:
            for start in range(0, num_bytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, num_bytes - start)
                pieces.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            has_failed = True
        pieces.clear()
        if has_failed:
            let_go()
        return not has_failed

    def warning(self) -> str | None:
        """A warning that memory has become hard to get since this was last asked; None where it has not."""
        if not self._is_known:
            return None
        before, self._last = self._last, Pressure.of(torch.cuda.memory_stats(self._device))
        return warning_of(before, self._last)
