"""NodeHardware: what a machine has, as one record that can be sent as JSON; hardware.py finds it out.

None stands for what is not known: it cannot be asked here, or was not answered. Sizes are bytes.
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
    """Logical processors that this process may run on (its affinity)."""
    quota_cores: float | None
    """Processor time that the control group of this process may use, such as 1.5 cores; None for no limit."""
    num_numa_nodes: int | None

    @property
    def effective_cores(self) -> float:
        """Processor time that there is for this process, in cores."""
        return float(self.num_allowed) if self.quota_cores is None else min(float(self.num_allowed), self.quota_cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class MainMemory:
    """A machine's main memory, and how much of it this process may use."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """The memory limit of this process's control group; None for no limit."""
    limit_free_bytes: int | None
    """What is left of that limit, counting caches that the kernel would give back."""
    swap_total_bytes: int
    swap_used_bytes: int

    @property
    def effective_bytes(self) -> int:
        """Memory that there is for this process and those beside it: the machine's, or the limit if that is less."""
        return self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)

    @property
    def free_bytes(self) -> int:
        """Memory that is left for this process and those beside it."""
        if self.limit_free_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.limit_free_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    index: int
    name: str | None = None
    uuid: str | None = None
    trouble: str | None = None
    """Why the driver tells nothing of this GPU; None where it does, and the fields below are filled."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: str | None = None
    compute_mode: str | None = None
    """Which processes may compute on it: ``default``, ``exclusive process`` or ``prohibited``."""
    is_mig: bool | None = None
    pcie_generation: int | None = None
    """PCIe generation of the link now; an idle GPU lowers it to save power."""
    pcie_generation_max: int | None = None
    """The highest PCIe generation that GPU and slot can do together."""
    pcie_width: int | None = None
    """PCIe lanes of the link now."""
    pcie_width_max: int | None = None
    """The most PCIe lanes that GPU and slot can do together."""
    num_nvlinks: int | None = None
    """NVLinks that are up."""
    num_nvlinks_down: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()
    """Reasons why the clock is lower than asked for, in words."""
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    """The temperature at which the GPU begins to slow down by itself."""
    power_watts: float | None = None
    power_limit_watts: float | None = None
    is_ecc: bool | None = None
    num_errors_corrected: int | None = None
    """Memory errors that ECC has corrected, since the driver was loaded."""
    num_errors_uncorrected: int | None = None
    """Memory errors that ECC could not correct, since the driver was loaded."""
    num_pages_retired: int | None = None
    """Pages of memory that have failed and are no longer used, over the life of the GPU."""
    is_retirement_pending: bool | None = None
    """Whether memory has failed that is still used until the GPU is reset."""
    num_rows_remapped: int | None = None
    is_remapping_pending: bool | None = None
    is_remapping_failed: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """All NVIDIA GPUs of a machine, and their driver."""

    trouble: str | None
    """Why a driver that is there does not answer; None where it does, or where there is none."""
    driver_version: str | None
    cuda_version: str | None
    """The newest CUDA version that the driver supports, such as ``12.8``."""
    num_on_bus: int | None
    """NVIDIA GPUs on the machine's bus, whether or not this process may see them."""
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
    """The machine's host name, its addresses, and its network interfaces."""

    host: str
    host_addresses: tuple[str, ...] | None
    """Addresses that the host name resolves to, empty where it resolves to none; None where no answer came in time."""
    interfaces: tuple[NetworkInterface, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOfPath:
    """The file system that a path leads to."""

    path: str
    use: StorageUse
    is_there: bool
    """Whether the path exists; otherwise the other fields are of the nearest folder above it that does."""
    answers: bool
    """Whether the file system has answered in time; otherwise the other fields are not known."""
    file_system: str | None = None
    mount_point: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    """Files that the file system can still hold."""
    is_network: bool | None = None
    is_memory: bool | None = None
    is_writable: bool | None = None
    """Whether this user may write there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the system grants a process; None for no limit."""

    open_files: int | None
    open_files_max: int | None
    """The hard limit, up to which a process may raise ``open_files`` by itself."""
    locked_bytes: int | None
    processes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The machine's kernel and clock."""

    kernel: str
    boot_id: str | None
    """An id that is new each time the machine is started, and the same in all its containers."""
    clock_source: str | None
    in_container: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The versions of Python and of the packages that matter, found without importing them."""

    python: str
    torch: str | None
    torch_cuda: str | None
    """The CUDA version that torch was built for; None for a build without CUDA, or where that is not known."""
    is_torch_cuda_known: bool
    numpy: str | None
    elastic_ext: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHardware(JsonRecord):
    """What a machine has: processors, memory, GPUs, network, storage, limits and versions."""

    time: float
    """When the machine was looked at, in seconds since 1970."""
    cpu: Cpu
    memory: MainMemory
    gpus: Gpus
    network: Network
    storage: tuple[StorageOfPath, ...]
    limits: Limits
    system: System
    versions: Versions

    def to_json(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"
