"""What a loader offers to whoever times it: where it marks what it does, and which of its settings change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from .timeline import Timeline

__all__ = ["ChangingSource", "TimedSource"]


@runtime_checkable
class TimedSource(Protocol):
    """A loader that says when the loop waits for it."""

    timeline: Timeline | None
    """Where it says so."""


@runtime_checkable
class ChangingSource(Protocol):
    """A loader whose workers and their like follow the config while a loop is over it."""

    @property
    def fixed_settings(self) -> Mapping[str, str]:
        """Those of num_workers, prefetch_factor and pin_memory that cannot change there, each with the reason."""

    @property
    def least_workers(self) -> int:
        """The fewest that it can have."""
