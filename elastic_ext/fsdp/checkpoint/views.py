"""Views of memory, gone through by system calls that take as much of them at a time as they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["MOST_VIEWS", "go_through"]

MOST_VIEWS = 1000  # Linux takes 1024 in one call


def go_through(views: Sequence[memoryview], call: Callable[[Sequence[memoryview], int], int]) -> int:
    """Have ``call`` take what is left of ``views``, and after how many bytes that is, until all is taken; their number.

    It gives how many bytes it took: at least one.
    """
    waiting = [view for view in views if view]
    total = 0
    while waiting:
        num_bytes = call(waiting[:MOST_VIEWS], total)
        total += num_bytes
        waiting = _after(waiting, num_bytes)
    return total


def _after(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    done = 0
    while done < len(views) and num_bytes >= len(views[done]):
        num_bytes -= len(views[done])
        done += 1
    left = list(views[done:])
    if num_bytes:
        left[0] = left[0][num_bytes:]
    return left
