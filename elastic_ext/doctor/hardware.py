"""What this machine has, as one NodeHardware: the kernel's files, control groups and mounted file systems are read."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from elastic_ext.ranks.deadlines import NoAnswer, within

from .gpus import Driver, NvidiaDriver, gpus_of
from .mounts import parse_mounts, storage_of
from .records import (
    Cpu,
    Limits,
    MainMemory,
    Network,
    NetworkInterface,
    NodeHardware,
    StorageOfPath,
    StorageUse,
    System,
    Versions,
)

__all__ = [
    "GroupLimits",
    "NodeHardware",
    "count_gpus_on_bus",
    "cuda_of_torch",
    "group_folders",
    "group_limits",
    "look",
    "model_name",
    "parse_quota_v1",
    "parse_quota_v2",
    "parse_ranges",
    "sizes_of_memory",
    "version_of",
]


# --- what the kernel's control groups, version 1 and 2, allow the process that asks: cores and memory ----------------
# Texts are parsed by pure functions; a limit holds for a group and all below it, so every group up to the one that is
# mounted is read.

_NO_LIMIT_BYTES = 1 << 60
"""Limits from here on stand for none: control groups of version 1 write a number near 2**63."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimits:
    """What the control groups of this process let it use; None for no limit."""

    quota_cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


def group_folders(controller: str, cgroup: str, mountinfo: str) -> Sequence[PurePosixPath]:
    """The folders with the limits of a controller (cpu, memory) for this process, its own control group first.

    ``cgroup`` and ``mountinfo`` are the texts of these files in /proc/self. In a container the path in ``cgroup`` may
    not be mounted; the group that is mounted then counts as the process's own.
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
    """The cores that ``cpu.max`` allows, from its quota and period; None for no limit (``max``)."""
    quota, _, period = text.strip().partition(" ")
    return _quotient(quota, period or "100000")


def parse_quota_v1(quota: str, period: str) -> float | None:
    """The cores that ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` allow; None for no limit (a quota of -1)."""
    return _quotient(quota.strip(), period.strip())


def group_limits(root: Path = Path("/")) -> GroupLimits:
    """What the control groups that are mounted under ``root`` let this process use: the least of each limit."""
    cgroup, mountinfo = (_text_of_group(root / "proc/self" / name) for name in ("cgroup", "mountinfo"))
    cores = [
        found
        for folder in _below(root, group_folders("cpu", cgroup, mountinfo))
        for found in (
            parse_quota_v2(_text_of_group(folder / "cpu.max")),
            parse_quota_v1(_text_of_group(folder / "cpu.cfs_quota_us"), _text_of_group(folder / "cpu.cfs_period_us")),
        )
        if found is not None
    ]
    memory = [
        found
        for folder in _below(root, group_folders("memory", cgroup, mountinfo))
        for found in (
            _memory_of_group(folder, "memory.max", "memory.current", "inactive_file"),
            _memory_of_group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if found is not None
    ]
    return GroupLimits(
        quota_cores=min(cores, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_free_bytes=min((free for _, free in memory if free is not None), default=None),
    )


def _memory_of_group(folder: Path, limit_name: str, used_name: str, reclaimed: str) -> tuple[int, int | None] | None:
    """The memory limit of a control group and what is left of it, in bytes; None for no limit."""
    limit = _number(_text_of_group(folder / limit_name))
    if limit is None or limit >= _NO_LIMIT_BYTES:
        return None
    used = _number(_text_of_group(folder / used_name))
    if used is None:
        return limit, None
    stat = dict(line.split(" ", 1) for line in _text_of_group(folder / "memory.stat").splitlines() if " " in line)
    return limit, max(limit - used + (_number(stat.get(reclaimed, "0")) or 0), 0)


def _paths(cgroup: str) -> dict[str, PurePosixPath]:
    """The path of this process's control group by controller of version 1, and under ``""`` that of version 2."""
    paths: dict[str, PurePosixPath] = {}
    for line in cgroup.splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path or "/")
    return paths


def _mounts(mountinfo: str) -> Iterable[tuple[str, PurePosixPath, PurePosixPath, Sequence[str]]]:
    """Each mount: the file system's type, the part of it that is mounted, the mount point, and the options."""
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


def _text_of_group(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# --- look(): what this machine has, as one NodeHardware --------------------------------------------------------------
# It changes nothing and imports no torch; what cannot be told is None. The kernel's files are read under ``root``, so
# that texts of other machines can be read too.

_ROOT = Path("/")
_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_SECONDS = 5.0
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([0-9.]+)'|\"([0-9.]+)\"|(None))", re.MULTILINE)


def look(
    paths: Sequence[Path] = (),
    *,
    run_dir: Path | None = None,
    driver: Driver | None = None,
    root: Path = _ROOT,
    patience_seconds: float = _PATIENCE_SECONDS,
) -> NodeHardware:
    """Look what this machine has, and which file systems ``run_dir`` and ``paths`` lead to.

    It takes well under a second, and ``patience_seconds`` more for each file system or host name that does not answer.
    """
    limits = group_limits(root)
    places: list[tuple[Path, StorageUse]] = [
        (_SHARED_MEMORY, "shared memory"),
        (Path(tempfile.gettempdir()), "temporary files"),
    ]
    if run_dir is not None:
        places.append((run_dir, "run directory"))
    places += [(path, "asked for") for path in paths]
    return NodeHardware(
        time=time.time(),
        cpu=_cpu(root, limits.quota_cores),
        memory=_memory(root, limits.memory_bytes, limits.memory_free_bytes),
        gpus=gpus_of(driver or NvidiaDriver(), num_on_bus=count_gpus_on_bus(root)),
        network=_network(patience_seconds),
        storage=_storage(places, root, patience_seconds),
        limits=_limits(),
        system=_system(root),
        versions=_versions(),
    )


def parse_ranges(text: str) -> int | None:
    """The count of numbers in a list as the kernel writes it, such as 5 for ``0-3,8``; None for anything else."""
    count = 0
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        count += int(last or first) - int(first) + 1
    return count


def model_name(cpuinfo: str) -> str | None:
    """The name of the processor, from the text of /proc/cpuinfo; None where it has none."""
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() in ("model name", "Model", "cpu model", "cpu"):
            return value.strip() or None
    return None


def sizes_of_memory(meminfo: str) -> dict[str, int]:
    """The sizes in the text of /proc/meminfo, in bytes by name."""
    sizes = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdecimal() and unit == "kB":
            sizes[name] = int(number) * 1024
    return sizes


def cuda_of_torch(version_file: str) -> tuple[bool, str | None]:
    """Whether the text of torch/version.py says which CUDA torch was built for, and which one; None for none."""
    found = _CUDA.search(version_file)
    return (found is not None, (found[1] or found[2]) if found else None)


def count_gpus_on_bus(root: Path = _ROOT) -> int | None:
    """The number of NVIDIA GPUs on the machine's PCI bus; None where the bus is not shown."""
    try:
        devices = list((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return None
    kinds = [(_text(device / "vendor").strip(), _text(device / "class").strip()[:6]) for device in devices]
    return sum(vendor == _NVIDIA and kind in _DISPLAY_CLASSES for vendor, kind in kinds)


def _cpu(root: Path, quota_cores: float | None) -> Cpu:
    return Cpu(
        model=model_name(_text(root / "proc/cpuinfo")),
        num_logical=os.cpu_count() or 1,
        num_allowed=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores,
        num_numa_nodes=parse_ranges(_text(root / "sys/devices/system/node/online")),
    )


def _memory(root: Path, limit_bytes: int | None, limit_free_bytes: int | None) -> MainMemory:
    sizes = sizes_of_memory(_text(root / "proc/meminfo"))
    total = sizes.get("MemTotal", 0)
    return MainMemory(
        total_bytes=total,
        available_bytes=sizes.get("MemAvailable", sizes.get("MemFree", 0)),
        limit_bytes=limit_bytes if limit_bytes is not None and limit_bytes < total else None,
        limit_free_bytes=limit_free_bytes,
        swap_total_bytes=sizes.get("SwapTotal", 0),
        swap_used_bytes=sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0),
    )


def _network(patience_seconds: float) -> Network:
    host = socket.gethostname()
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    interfaces = []
    for name, state in sorted(states.items()):
        own = [
            one.address.partition("%")[0]
            for one in addresses.get(name, [])
            if one.family in (socket.AF_INET, socket.AF_INET6)
        ]
        interfaces.append(
            NetworkInterface(
                name=name,
                is_up=state.isup,
                is_loopback="127.0.0.1" in own or "::1" in own or name == "lo",
                addresses=tuple(own),
                speed_mbits=state.speed or None,  # virtual ones say 0
                mtu=state.mtu or None,
            )
        )
    return Network(
        host=host,
        host_addresses=_addresses_of(host, patience_seconds),
        interfaces=tuple(interfaces),
    )


def _addresses_of(host: str, patience_seconds: float) -> tuple[str, ...] | None:
    try:
        found = within(patience_seconds, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except NoAnswer:
        return None
    except (OSError, UnicodeError):
        return ()
    return tuple(sorted({str(address[0]).partition("%")[0] for *_, address in found}))


def _storage(
    places: Iterable[tuple[Path, StorageUse]], root: Path, patience_seconds: float
) -> tuple[StorageOfPath, ...]:
    mounts = parse_mounts(_text(root / "proc/self/mountinfo"))
    return tuple(storage_of(path.absolute(), use, mounts, patience_seconds=patience_seconds) for path, use in places)


def _limits() -> Limits:
    def limits(which: int) -> list[int | None]:
        return [None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which)]

    open_files, open_files_max = limits(resource.RLIMIT_NOFILE)
    return Limits(
        open_files=open_files,
        open_files_max=open_files_max,
        locked_bytes=limits(resource.RLIMIT_MEMLOCK)[0],
        processes=limits(resource.RLIMIT_NPROC)[0],
    )


def _system(root: Path) -> System:
    marks = [root / ".dockerenv", root / "run/.containerenv", root / "var/run/secrets/kubernetes.io"]
    return System(
        kernel=platform.release(),
        boot_id=_text(root / "proc/sys/kernel/random/boot_id").strip() or None,
        clock_source=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource").strip() or None,
        in_container=True if any(mark.exists() for mark in marks) else None,
    )


def _versions() -> Versions:
    is_known, cuda = False, None
    try:
        torch = importlib.metadata.distribution("torch")
        is_known, cuda = cuda_of_torch(_text(Path(str(torch.locate_file("torch/version.py")))))
    except importlib.metadata.PackageNotFoundError:
        pass
    return Versions(
        python=".".join(map(str, sys.version_info[:3])),
        torch=version_of("torch"),
        torch_cuda=cuda,
        is_torch_cuda_known=is_known,
        numpy=version_of("numpy"),
        elastic_ext=version_of("elastic-ext"),
    )


def version_of(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
