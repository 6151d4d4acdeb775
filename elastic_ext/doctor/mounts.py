"""Where paths lead to: which file system, how much is free there, and whether it is a network's or memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.ranks.deadlines import NoAnswer, within

from .records import StorageOfPath, StorageUse

__all__ = ["Mount", "is_memory", "is_network", "mount_of", "parse_mounts", "storage_of"]

_ESCAPED = re.compile(r"\\([0-7]{3})")
_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "beegfs",
        "gpfs",
        "ceph",
        "glusterfs",
        "9p",
        "afs",
        "ncpfs",
        "wekafs",
        "panfs",
        "pvfs2",
        "orangefs",
        "ocfs2",
        "gfs2",
        "vastnfs",
        "quobyte",
        "curvefs",
        "juicefs",
    }
)
_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_LOCAL_FUSE = frozenset(
    {"fuseblk", "fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.ntfs", "fuse.portal", "fuse.bindfs", "fuse.mergerfs"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A mounted file system: its type, and the folder at which it is mounted."""

    point: str
    file_system: str


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of /proc/self/mountinfo, in the order in which they were made."""
    mounts = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        mount, system = before.split(), after.split()
        if separator and len(mount) >= 5 and system:
            point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), mount[4])
            mounts.append(Mount(point=point, file_system=system[0]))
    return mounts


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path without links lies on; of two at one place, the later one hides the other."""
    found: Mount | None = None
    for mount in mounts:
        covers = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if covers and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def is_network(file_system: str) -> bool:
    """Whether files of such a file system lie on other machines; FUSE file systems count, but for known local ones."""
    return file_system in _NETWORK or (file_system.startswith("fuse") and file_system not in _LOCAL_FUSE)


def is_memory(file_system: str) -> bool:
    """Whether files of such a file system lie in this machine's memory, and are gone when it is switched off."""
    return file_system in _MEMORY


def storage_of(path: Path, use: StorageUse, mounts: Iterable[Mount], *, patience_seconds: float) -> StorageOfPath:
    """The file system that ``path`` leads to; of a path that is not there yet, that of the nearest folder above it.

    A file system that hangs, as one of a network whose server is gone, holds this up for ``patience_seconds`` at most.
    """
    try:
        return within(patience_seconds, lambda: _looked_at(path, use, mounts))
    except NoAnswer:
        return StorageOfPath(path=str(path), use=use, is_there=False, answers=False)


def _looked_at(path: Path, use: StorageUse, mounts: Iterable[Mount]) -> StorageOfPath:
    real = Path(os.path.realpath(path))
    is_there = True
    while True:
        try:
            numbers = os.statvfs(real)
            break
        except OSError:  # not there, or not to be seen by this user
            if real == real.parent:
                return StorageOfPath(path=str(path), use=use, is_there=False, answers=True)
            is_there, real = False, real.parent
    mount = mount_of(str(real), mounts)
    can_hold = real.is_dir() or (is_there and use == "asked for")  # a file can be data, and no folder
    return StorageOfPath(
        path=str(path),
        use=use,
        is_there=is_there,
        answers=True,
        file_system=mount.file_system if mount else None,
        mount_point=mount.point if mount else None,
        total_bytes=numbers.f_blocks * numbers.f_frsize,
        free_bytes=numbers.f_bavail * numbers.f_frsize,
        free_files=numbers.f_favail if numbers.f_files else None,
        is_network=is_network(mount.file_system) if mount else None,
        is_memory=is_memory(mount.file_system) if mount else None,
        is_writable=can_hold and os.access(real, os.W_OK) and not numbers.f_flag & os.ST_RDONLY,
    )
