"""Machines that tests of the doctor look at: records of a good one, and planted drivers of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from elastic_ext.doctor.gpus import DriverAbsent, Unanswered
from elastic_ext.doctor.records import (
    Cpu,
    Gpu,
    Gpus,
    Limits,
    MainMemory,
    Network,
    NetworkInterface,
    NodeHardware,
    StorageOfPath,
    System,
    Versions,
)

GIB = 1 << 30


def storage(**changes: Any) -> StorageOfPath:
    """A disk with room, as ``changes`` have it."""
    good = StorageOfPath(
        path="/data",
        use="asked for",
        is_there=True,
        answers=True,
        file_system="ext4",
        mount_point="/",
        total_bytes=1000 * GIB,
        free_bytes=500 * GIB,
        free_files=10**8,
        is_network=False,
        is_memory=False,
        is_writable=True,
    )
    return dataclasses.replace(good, **changes)


SHARED_MEMORY = storage(
    path="/dev/shm", use="shared memory", file_system="tmpfs", total_bytes=64 * GIB, free_bytes=64 * GIB, is_memory=True
)


def gpu(index: int = 0, **changes: Any) -> Gpu:
    """A GPU without fault, as ``changes`` have it."""
    good = Gpu(
        index=index,
        name="NVIDIA H100",
        uuid=f"GPU-{index}",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=GIB // 2,
        compute_capability="9.0",
        compute_mode="default",
        is_mig=False,
        pcie_generation=1,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        num_nvlinks=18,
        num_nvlinks_down=0,
        clock_mhz=345,
        clock_max_mhz=1980,
        utilization_percent=0,
        temperature_celsius=40,
        slowdown_celsius=87,
        is_ecc=True,
        num_errors_corrected=0,
        num_errors_uncorrected=0,
        is_remapping_pending=False,
        is_remapping_failed=False,
    )
    return dataclasses.replace(good, **changes)


def gpus(*devices: Gpu, **changes: Any) -> Gpus:
    """These GPUs with a driver that works, as ``changes`` have it."""
    good = Gpus(
        trouble=None, driver_version="580.65", cuda_version="13.0", num_on_bus=len(devices), devices=tuple(devices)
    )
    return dataclasses.replace(good, **changes)


def machine(**changes: Any) -> NodeHardware:
    """A machine with nothing to find fault with, as ``changes`` have it."""
    good = NodeHardware(
        time=0.0,
        cpu=Cpu(model="Some CPU", num_logical=64, num_allowed=64, quota_cores=None, num_numa_nodes=2),
        memory=MainMemory(
            total_bytes=512 * GIB,
            available_bytes=400 * GIB,
            limit_bytes=None,
            limit_free_bytes=None,
            swap_total_bytes=0,
            swap_used_bytes=0,
        ),
        gpus=gpus(gpu(0), gpu(1)),
        network=Network(
            host="one",
            host_addresses=("10.0.0.1",),
            interfaces=(
                NetworkInterface(
                    name="lo",
                    is_up=True,
                    is_loopback=True,
                    addresses=("127.0.0.1",),
                    speed_mbits=None,
                    mtu=65536,
                ),
                NetworkInterface(
                    name="eth0",
                    is_up=True,
                    is_loopback=False,
                    addresses=("10.0.0.1",),
                    speed_mbits=100_000,
                    mtu=9000,
                ),
            ),
        ),
        storage=(SHARED_MEMORY, storage(path="/run/job", use="run directory")),
        limits=Limits(open_files=65536, open_files_max=65536, locked_bytes=None, processes=None),
        system=System(kernel="6.1", boot_id="a", clock_source="tsc", in_container=None),
        versions=Versions(
            python="3.11.7",
            torch="2.13.0",
            torch_cuda="13.0",
            is_torch_cuda_known=True,
            numpy="2.0",
            elastic_ext="0.1.0",
        ),
    )
    return dataclasses.replace(good, **changes)


GOOD_MACHINE = machine()


class PlantedDriver:
    """A driver that gives planted answers, and none to all other questions; it notes what it was asked."""

    def __init__(self, answers: Mapping[Any, Any] | None, *, broken: str | None = None) -> None:
        self.asked: set[str] = set()
        self.is_open = False
        self._answers = answers
        self._broken = broken

    def open(self) -> None:
        if self._answers is None:
            raise DriverAbsent("no library")
        if self._broken is not None:
            raise Unanswered(self._broken)
        self.is_open = True

    def ask(self, question: str, *arguments: object) -> Any:
        assert self.is_open and self._answers is not None
        self.asked.add(question)
        for key in ((question, *arguments), question):
            if key in self._answers:
                return self._answers[key]
        raise Unanswered("Not Supported")

    def close(self) -> None:
        self.is_open = False


ANSWERS: Mapping[Any, Any] = {
    "nvmlDeviceGetCount": 1,
    "nvmlSystemGetDriverVersion": "580.65.06",
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143 * GIB, used=GIB, free=142 * GIB),
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetMigMode": (0, 0),
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    **{("nvmlDeviceGetNvLinkState", "handle", link): int(link != 3) for link in range(18)},
    ("nvmlDeviceGetClockInfo", "handle", 1): 1200,
    ("nvmlDeviceGetClockInfo", "handle", 2): 3201,
    ("nvmlDeviceGetMaxClockInfo", "handle", 1): 1980,
    ("nvmlDeviceGetMaxClockInfo", "handle", 2): 3201,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x4,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetTemperature": 84,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetPowerUsage": 650_500,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetEccMode": (1, 1),
    ("nvmlDeviceGetTotalEccErrors", "handle", 0, 0): 3,
    ("nvmlDeviceGetTotalEccErrors", "handle", 1, 0): 2,
    ("nvmlDeviceGetRetiredPages", "handle", 0): [1, 2],
    ("nvmlDeviceGetRetiredPages", "handle", 1): [3],
    "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
}
"""Of a GPU that is not well."""
