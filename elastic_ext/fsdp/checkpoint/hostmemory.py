"""Host memory: how much a process could still have, and whether what ranks want of it is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["free_bytes", "why_no_room"]

_CGROUP = Path("/sys/fs/cgroup")
_LEFT = 0.05  # of what is free, for whatever comes


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """What the machine has free, or the container that this runs in, whichever is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, current = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(min(free, limit - current + int(stat["inactive_file"])), 0)  # which is given back when asked for
    except (OSError, KeyError, ValueError):  # no such limit
        return free


def why_no_room(wants: Iterable[tuple[str, int, int]]) -> str | None:
    """Why not all ranks can have what they want, None where they can: host, bytes wanted and bytes free there, each."""
    by_host: dict[str, tuple[int, int]] = {}
    for host, wanted, free in wants:
        before, least = by_host.get(host, (0, free))
        by_host[host] = before + wanted, min(least, free)
    for host, (wanted, free) in by_host.items():
        if wanted > free * (1 - _LEFT):
            return f"{wanted / 1e9:.2f} GB are wanted on {host}, which has {free / 1e9:.2f} GB free"
    return None
