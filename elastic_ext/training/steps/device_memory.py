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
    """How hard it is for the allocator to find memory."""

    num_retries: int = 0
    """How often it had to give back all that it kept for later, to find some."""
    num_failures: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Pressure:
        """As torch.cuda.memory_stats() tells it."""
        return cls(
            num_retries=stats.get("num_alloc_retries", 0),
            num_failures=stats.get("num_ooms", 0),
            allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        )


def warning_of(before: Pressure, now: Pressure) -> str | None:
    """What to tell a person who would go on like this; None where nothing has changed for the worse."""
    num_retries = now.num_retries - before.num_retries
    if num_retries <= 0 and now.num_failures <= before.num_failures:
        return None
    told = f"memory is nearly used up: the allocator had to start over {num_retries} time(s) to find some"
    unused = now.reserved_bytes - now.allocated_bytes
    if unused > _FRAGMENTED * now.reserved_bytes:
        told += (
            f", and {unused / 2**30:.1f} of {now.reserved_bytes / 2**30:.1f} GiB were in pieces too small to use; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment avoids that"
        )
    return told


class DeviceMemory:
    """Of one device, as far as this process uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = device.type == "cuda"
        self._before = 0
        self._last = Pressure()
        self.per_sample: float | None = None
        """Bytes that a pass takes for each sample beside what lies there between steps; None where not known."""

    def begin_step(self) -> None:
        """Look at what the step that begins takes. Torch's peak counters of the device begin anew."""
        if self._is_known:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def end_step(self, largest: int) -> None:
        """It has ended, and has taken so many samples at once at most."""
        if self._is_known:
            self.per_sample = max(0, torch.cuda.max_memory_allocated(self._device) - self._before) / largest

    def why_no_room(self, num_samples: int) -> str | None:
        """Whether so many samples at once would find room, by taking it for a moment; why not, or None."""
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
        """Whether there is so much memory, found out by taking it for a moment."""
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
        """What is to be told of it since it was last asked for, if anything."""
        if not self._is_known:
            return None
        before, self._last = self._last, Pressure.of(torch.cuda.memory_stats(self._device))
        return warning_of(before, self._last)
