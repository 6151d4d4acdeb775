"""Speed: how fast training goes, and what it takes, for the metrics."""

from __future__ import annotations

import time

from .counts import Counts
from .profile.held import memory_held
from .records.metrics import Measures

__all__ = ["Speed"]


class Speed:
    """How fast training goes, from one look to the next."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._since = time.perf_counter()
        self._num_boundaries = self._num_samples = 0  # so many there were then

    def measure(self) -> Measures:
        """What was counted since the last call, per second, and the memory held now."""
        now, counts = time.perf_counter(), self._counts
        seconds = now - self._since
        num_steps, num_samples = counts.num_boundaries - self._num_boundaries, counts.num_samples - self._num_samples
        self._since, self._num_boundaries, self._num_samples = now, counts.num_boundaries, counts.num_samples
        held = memory_held()
        return Measures(
            steps_per_second=num_steps / seconds if num_steps else None,
            samples_per_second=num_samples / seconds if num_samples else None,
            memory_bytes=held.process,
            accelerator_bytes=held.accelerator,
            accelerator_peak_bytes=held.accelerator_peak,
            num_not_finite=counts.num_not_finite,
            num_skipped=counts.num_skipped,
        )
