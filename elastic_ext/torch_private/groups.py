"""What torch does not tell of process groups in public: which there are, their store, and the limit of collectives.

Without the limits a rank that is lost is noticed later; without the store it is not named.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["destroy_groups", "groups_made", "limit_of_default_group", "set_limit", "store_of_default_group"]

_logger = logging.getLogger(__name__)


def groups_made() -> list[Any] | None:
    """All process groups that this process is in, the default one too; None where this torch keeps no list of them."""
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    made = getattr(world, "pg_map", None)
    return None if made is None else list(made)


def store_of_default_group() -> Any:
    """The store behind the default process group; None where this torch keeps it elsewhere."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:
        _logger.warning(
            "torch %s has no distributed_c10d._get_default_store: ranks that are lost cannot be named",
            torch.__version__,
        )
        return None
    return _get_default_store()


def limit_of_default_group() -> timedelta | None:
    """How long a collective of the default group may take; None where there is no group, or this torch does not say."""
    with contextlib.suppress(AttributeError, RuntimeError):
        if dist.is_initialized() and dist.group.WORLD is not None:
            limit: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
            return limit
    return None


def set_limit(limit: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long a collective of a group may take, by default of the default group; nothing where torch cannot."""
    from torch.distributed import distributed_c10d

    setting = getattr(distributed_c10d, "_set_pg_timeout", None)
    if setting is not None:
        setting(limit, group)


def destroy_groups() -> list[Any]:
    """Destroy all process groups, and begin their numbers anew, also after one that could not be made; gives them.

    The number of a group is part of its keys in the store, and a group that could not be made is counted until another
    one is destroyed: two processes of which one had failed before would look for each other under unlike keys.

    Connections of gloo end once nothing refers to their group any more, and that takes up to 10 ms for each of them.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    made = groups_made() or []
    dist.destroy_process_group()
    return made
