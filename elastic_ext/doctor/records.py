"""NodeHardware: what a machine has, as one record that can be sent as JSON; hardware.py looks for it.

None is what is not known: it cannot be asked here, or was not answered. Sizes are bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from elastic_ext.records.json import JsonRecord

__all__ = [
    "Cpu",
    "Gpu",
    "Gpus",
    "Limits",
    "MainMemory",
    "Network",
    "NetworkInterface",
    "NodeHardware",
    "StorageOfPath",
    "StorageUse",
    "System",
    "Versions",
]

StorageUse = Literal["run directory", "shared memory", "temporary files", "asked for"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """Processors, and how much of them this process may use."""

    model: str | None
    num_logical: int
    num_allowed: int
    """Of the logical ones, those that this process may run on (its affinity)."""
    quota_cores: float | None
    """What its control group may use of them in time, such as 1.5 cores; None for no limit."""
    num_numa_nodes: int | None

    @property
    def effective_cores(self) -> float:
        """How many cores' time there is for this process."""
        return float(self.num_allowed) if self.quota_cores is None else min(float(self.num_allowed), self.quota_cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class MainMemory:
    """A machine's main memory, and how much of it this process may use."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """Of its control group; None for no limit."""
    limit_free_bytes: int | None
    """What is left of that, counting what would be given back when asked for."""
    swap_total_bytes: int
    swap_used_bytes: int

    @property
    def effective_bytes(self) -> int:
        """How much there is for this process and those beside it."""
        return self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)

    @property
    def free_bytes(self) -> int:
        """How much of that is left."""
        if self.limit_free_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.limit_free_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as its driver tells of it."""

    index: int
    name: str | None = None
    uuid: str | None = None
    trouble: str | None = None
    """Why the driver tells nothing of it."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None
    """default, exclusive process, prohibited."""
    is_mig: bool | None = None
    pcie_generation: int | None = None
    """Of the link now; a GPU that does nothing saves power and lowers it."""
    pcie_generation_max: int | None = None
    """What GPU and slot can do together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    num_nvlinks: int | None = None
    """Links that are up."""
    num_nvlinks_down: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()
    """Why its clock is lower than asked for."""
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    """Where it begins to slow down by itself."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    is_ecc: bool | None = None
    num_errors_corrected: int | None = None
    """Of memory, since the driver was loaded."""
    num_errors_uncorrected: int | None = None
    num_pages_retired: int | None = None
    """Memory that is no longer used since it had failed, in the life of the GPU."""
    is_retirement_pending: bool | None = None
    """Memory has failed and is used until the GPU is reset."""
    num_rows_remapped: int | None = None
    is_remapping_pending: bool | None = None
    is_remapping_failed: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """All NVIDIA GPUs of a machine, and their driver."""

    trouble: str | None
    """Why the driver could not be asked, where there is one."""
    driver_version: str | None
    cuda_version: str | None
    """The newest CUDA that the driver can do, such as ``12.8``."""
    num_on_bus: int | None
    """How many the machine has, whether or not this process may see them."""
    devices: tuple[Gpu, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """One of the machine's connections to a network."""

    name: str
    is_up: bool
    is_loopback: bool
    addresses: tuple[str, ...]
    speed_mbits: int | None
    mtu: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How the machine reaches others, and what it is called."""

    host: str
    host_addresses: tuple[str, ...] | None
    """What its own name stands for, nothing where nobody knows; None where that was not answered in time."""
    interfaces: tuple[NetworkInterface, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOfPath:
    """The file system that a path leads to."""

    path: str
    use: StorageUse
    is_there: bool
    """False where the nearest folder above it that exists has been looked at."""
    answers: bool
    """False where the file system has not answered in time; then the rest is not known."""
    file_system: str | None = None
    mount_point: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    """How many more files it can hold."""
    is_network: bool | None = None
    is_memory: bool | None = None
    is_writable: bool | None = None
    """Whether this user may write there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the system grants a process; None for no limit."""

    open_files: int | None
    open_files_max: int | None
    """How far a process may raise it by itself."""
    locked_bytes: int | None
    processes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The machine's kernel and clock."""

    kernel: str
    boot_id: str | None
    """New each time it is started, and the same in all containers."""
    clock_source: str | None
    in_container: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What is installed beside Python, told without importing it."""

    python: str
    torch: str | None
    torch_cuda: str | None
    """The CUDA that torch was built for; None for a build that uses none, or where that is not known."""
    is_torch_cuda_known: bool
    numpy: str | None
    elastic_ext: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHardware(JsonRecord):
    """What a machine has."""

    time: float
    """When it was looked at, seconds since 1970."""
    cpu: Cpu
    memory: MainMemory
    gpus: Gpus
    network: Network
    storage: tuple[StorageOfPath, ...]
    limits: Limits
    system: System
    versions: Versions

    def to_json(self) -> str:
        """The contents of a file."""
        return json.dumps(asdict(self)) + "\n"
