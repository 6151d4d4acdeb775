"""Switching: how long training stands still for a change from one point to another, and what a probe costs with that.
Pure, with numpy.

How long it stands still is guessed by what has to be moved, and corrected by how long it did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_ext.records.metrics import JobFacts

from .budget import Budget
from .columns import Floats
from .measuring import PROBE_STEPS
from .space import Point

__all__ = ["Switching", "cost_of_probes"]

_LOADED, _LAID_OUT, _WRAPPED = slice(1, 4), slice(4, 7), slice(7, 10)
"""Fields of a point: of the loader, of where the model lies, and of how it is wrapped there."""
assert list(Point._fields)[_LOADED] == ["num_workers", "prefetch_factor", "pin_memory"]
assert list(Point._fields)[_LAID_OUT] == ["strategy", "shard_degree", "unit"]
assert list(Point._fields)[_WRAPPED] == ["activation_checkpoint", "prefetch", "bucket_cap_mb"]
_SECONDS_TO_MOVE = 1.0
_BYTES_PER_SECOND = 2e9
_SECONDS_TO_WRAP = 0.1
_SECONDS_TO_START = 0.4
_BYTES_OF_A_PARAMETER = 12
"""With its optimizer's state, where that is not known."""


class Switching:
    """Of one job."""

    def __init__(self, facts: JobFacts) -> None:
        memory = facts.memory
        size = _BYTES_OF_A_PARAMETER * facts.num_parameters
        if memory is not None:
            size = memory.parameter_bytes + memory.optimizer_bytes
        self._to_move = _SECONDS_TO_MOVE + size / facts.world_size / _BYTES_PER_SECOND
        self._to_start = _SECONDS_TO_START

    def see(self, old: Point, new: Point, seconds: float) -> None:
        """A change was waited for so long."""
        if old[_LAID_OUT] != new[_LAID_OUT]:
            self._to_move = (self._to_move + seconds) / 2
        elif old[_LOADED] != new[_LOADED] and old[_WRAPPED] == new[_WRAPPED]:
            self._to_start = (self._to_start + seconds) / 2

    def seconds(self, here: Point, points: Sequence[Point]) -> Floats:
        """For a change from ``here`` to each of ``points``."""
        laid_out, wrapped, loaded = here[_LAID_OUT], here[_WRAPPED], here[_LOADED]
        found = [
            (self._to_move if point[_LAID_OUT] != laid_out else _SECONDS_TO_WRAP if point[_WRAPPED] != wrapped else 0.0)
            + (self._to_start if point[_LOADED] != loaded else 0.0)
            for point in points
        ]
        return np.array(found)


def cost_of_probes(budget: Budget, seconds: Floats, switching: Floats, probe_steps: int, usual: float) -> Floats:
    """What has to be saved for probes whose steps take so long, and the changes to them ``switching``.

    A probe is as many steps as are measured and one more, or as long as it takes that as many are told of: short steps
    are told of by the second. ``usual`` is a step's length where that of the user's own config is not known.
    """
    own = usual if budget.own_seconds is None else budget.own_seconds
    num_reports = min(probe_steps, PROBE_STEPS) + 1
    num_steps = np.maximum(probe_steps + 1, num_reports * budget.report_seconds / seconds)
    return budget.least_pace * (num_steps * seconds + switching) - num_steps * own
