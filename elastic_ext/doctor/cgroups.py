"""What the kernel's control groups, version 1 and 2, allow the process that asks: cores and memory. Texts are parsed
by pure functions; a limit holds for a group and all below it, so every group up to the one that is mounted is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["GroupLimits", "group_folders", "group_limits", "parse_quota_v1", "parse_quota_v2"]

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2**63 where there is none."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimits:
    """What a process may use; None for no limit."""

    quota_cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


def group_folders(controller: str, cgroup: str, mountinfo: str) -> Sequence[PurePosixPath]:
    """Where the limits of ``controller`` (cpu, memory) stand, the process's own group first.

    ``cgroup`` and ``mountinfo`` are texts of /proc/self. In a container the path in the first may lead to what is not
    mounted there; then what is mounted is its group.
    """
    paths = _paths(cgroup)
    folders: list[PurePosixPath] = []
    for kind, root, point, options in _mounts(mountinfo):
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in options:
            path = paths.get(controller)
        else:
            continue
        folders += _from_own_to_mounted(path, root, point)
    return folders


def parse_quota_v2(text: str) -> float | None:
    """Cores, of ``cpu.max``: a quota and a period, or ``max``."""
    quota, _, period = text.strip().partition(" ")
    return _quotient(quota, period or "100000")


def parse_quota_v1(quota: str, period: str) -> float | None:
    """Cores, of ``cpu.cfs_quota_us`` (-1 for no limit) and ``cpu.cfs_period_us``."""
    return _quotient(quota.strip(), period.strip())


def group_limits(root: Path = Path("/")) -> GroupLimits:
    """What this process may use, of the control groups that are mounted under ``root``."""
    cgroup, mountinfo = (_text(root / "proc/self" / name) for name in ("cgroup", "mountinfo"))
    cores = [
        found
        for folder in _below(root, group_folders("cpu", cgroup, mountinfo))
        for found in (
            parse_quota_v2(_text(folder / "cpu.max")),
            parse_quota_v1(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")),
        )
        if found is not None
    ]
    memory = [
        found
        for folder in _below(root, group_folders("memory", cgroup, mountinfo))
        for found in (
            _memory(folder, "memory.max", "memory.current", "inactive_file"),
            _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if found is not None
    ]
    return GroupLimits(
        quota_cores=min(cores, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_free_bytes=min((free for _, free in memory if free is not None), default=None),
    )


def _memory(folder: Path, limit_name: str, used_name: str, reclaimed: str) -> tuple[int, int | None] | None:
    """A group's limit and what is left of it; None for no limit."""
    limit = _number(_text(folder / limit_name))
    if limit is None or limit >= _NO_LIMIT_BYTES:
        return None
    used = _number(_text(folder / used_name))
    if used is None:
        return limit, None
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return limit, max(limit - used + (_number(stat.get(reclaimed, "0")) or 0), 0)


def _paths(cgroup: str) -> dict[str, PurePosixPath]:
    """The group of each controller of version 1, and under ``""`` that of version 2."""
    paths: dict[str, PurePosixPath] = {}
    for line in cgroup.splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path or "/")
    return paths


def _mounts(mountinfo: str) -> Iterable[tuple[str, PurePosixPath, PurePosixPath, Sequence[str]]]:
    """Of each mount: its type, what of the file system it shows, where, and the options of the file system."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        mount, system = before.split(), after.split()
        if separator and len(mount) >= 5 and len(system) >= 3:
            yield system[0], PurePosixPath(_plain(mount[3])), PurePosixPath(_plain(mount[4])), system[2].split(",")


def _plain(path: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), path)


def _from_own_to_mounted(path: PurePosixPath | None, root: PurePosixPath, point: PurePosixPath) -> list[PurePosixPath]:
    if path is None or ".." in path.parts or root not in (path, *path.parents):
        return [point]
    below = path.relative_to(root)
    return [point / one for one in (below, *below.parents)] if below.parts else [point]


def _below(root: Path, folders: Iterable[PurePosixPath]) -> list[Path]:
    return [root / folder.relative_to("/") for folder in folders]


def _quotient(quota: str, period: str) -> float | None:
    above, below = _number(quota), _number(period)
    return above / below if above and below and above > 0 else None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
