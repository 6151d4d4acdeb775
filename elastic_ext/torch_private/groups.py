"""Which process groups there are in this process: torch tells of one by its object alone."""

from __future__ import annotations

from typing import Any

__all__ = ["groups_made"]


def groups_made() -> list[Any] | None:
    """All process groups that this process is in, the default one too; None where this torch keeps no list of them."""
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    made = getattr(world, "pg_map", None)
    return None if made is None else list(made)
