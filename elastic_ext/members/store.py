"""Names in the store of a live plan, by which the workers of a generation find each other and say that they come.

The store is the one that the plan names, held by an agent. Where a live plan is applied the first rank of the old world
*calls* the workers that join, with all that they are told; each of them answers that it is *here*, or why it cannot
come, as its agent says where the worker is no more; then it is told to *go*, or why the ranks do without it.
"""

from __future__ import annotations

__all__ = ["CALL", "GO", "GROUPS", "GROUPS_BEFORE", "here", "left", "prefix_of"]

CALL = "call"
"""The key under which workers that join are told of the training that they are to join."""
GO = "go"
"""The key by which workers that join are told to form the process groups with the others, or why they are not."""
GROUPS = "groups"
"""The prefix of what the process groups of a generation need."""
GROUPS_BEFORE = "before"
"""The prefix of what the groups of the generation before need, where they have to be formed anew."""


def prefix_of(generation: int, version: int) -> str:
    """The prefix of all names in the store of a generation, by which the plan of a version comes into force.

    Where a plan was refused, the one after it may be of the same generation, and finds nothing of the first.
    """
    return f"members/{generation}/{version}"


def here(seat: int) -> str:
    """The key under which the worker with a seat answers a call."""
    return f"here/{seat}"


def left(seat: int) -> str:
    """The key under which the worker with a seat says what it holds, once others are lost."""
    return f"left/{seat}"
