"""What the allocator of a processor gives while something is done, by torch.profiler's events of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["allocated_on_cpu"]


def allocated_on_cpu(act: Callable[[], object]) -> int:
    """The most bytes that ``act`` held at once of those that it was given."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    results: Any = seen.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda each: int(each.start_ns())):
        held += event.nbytes()
        most = max(most, held)
    return most
