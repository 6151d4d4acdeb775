"""Host memory: how much a process could still have, and whether what ranks want of it is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["free_bytes", "num_copies", "why_no_room"]

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # of the kernel's control groups, version 2 and version 1; the last is what is given back when asked for
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LEFT = 0.05  # of what is free, for whatever comes


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """What the machine has free, or the container that this runs in, whichever is less."""
    free = int(psutil.virtual_memory().available)
    for folder, limit_name, current_name, reclaimed in _LIMITS:
        try:
            limit, current = (int((cgroup / folder / name).read_text()) for name in (limit_name, current_name))
            stat = dict(line.split() for line in (cgroup / folder / "memory.stat").read_text().splitlines())
            return max(min(free, limit - current + int(stat[reclaimed])), 0)
        except (OSError, KeyError, ValueError):  # no such limit
            continue
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


def num_copies(*, in_background: bool, keep_previous: bool) -> int:
    """How many copies a process keeps of what it saves; with an agent's memory the previous one may be kept too."""
    if keep_previous and not in_background:
        raise ValueError(
            "keep_previous is True, and nothing is saved in the background, where copies are; give both, or none"
        )
    return 1 + keep_previous if in_background else 0
