"""NVIDIA GPUs as their driver describes them. Each question may go unanswered alone: what a GPU, a driver or a virtual
machine does not offer is None, and the other fields are filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from .records import Gpu, Gpus

__all__ = ["QUESTIONS", "Driver", "DriverAbsent", "NvidiaDriver", "Unanswered", "gpus_of"]

QUESTIONS = (
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetName",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetUtilizationRates",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlSystemGetDriverVersion",
)
"""The functions of NVML that are called."""

_MOST_NVLINKS = 36
_REASONS: Mapping[int, str] = {
    0x2: "a clock that was set for it",
    0x4: "its power limit",
    0x8: "the hardware (too hot, or too little power)",
    0x10: "being kept in step with other GPUs",
    0x20: "its temperature",
    0x40: "its temperature, by the hardware",
    0x80: "the power supply",
    0x100: "a clock that was set for its display",
}
"""NVML's bits for what slows a clock down, in words; bit 0x1, an idle GPU, is left out."""
_MODES: Mapping[int, str] = {0: "default", 2: "prohibited", 3: "exclusive process"}
_ENABLED = 1
_UNCORRECTED, _CORRECTED = 1, 0
_SINCE_THE_DRIVER = 0
_PAGE_CAUSES = (0, 1)
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_GPU_TEMPERATURE, _SLOWDOWN_THRESHOLD = 0, 1


class DriverAbsent(Exception):
    """The machine has no NVIDIA driver, or nothing that could ask it."""


class Unanswered(Exception):
    """The NVIDIA driver does not answer a question; the text is what it says instead."""


class Driver(Protocol):
    """An NVIDIA driver that can be asked: this machine's, or a test's."""

    def open(self) -> None:
        """Begin to ask the driver; DriverAbsent where there is none, Unanswered where it does not work."""

    def ask(self, question: str, *arguments: object) -> Any:
        """The result of the NVML function named ``question``; Unanswered where it has none."""

    def close(self) -> None: ...


class NvidiaDriver:
    """This machine's NVIDIA driver, asked by pynvml, which is imported by ``open``."""

    def __init__(self) -> None:
        self._nvml: Any = None  # until open()

    def open(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise DriverAbsent(str(error)) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
            raise DriverAbsent(str(error)) from None
        except pynvml.NVMLError as error:
            raise Unanswered(str(error)) from None

    def ask(self, question: str, *arguments: object) -> Any:
        try:
            return getattr(self._nvml, question)(*arguments)
        except (self._nvml.NVMLError, AttributeError, UnicodeDecodeError) as error:  # an older pynvml has fewer
            raise Unanswered(str(error)) from None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):  # it has gone away, and there is nothing more to close
            self._nvml.nvmlShutdown()


def gpus_of(driver: Driver, *, num_on_bus: int | None) -> Gpus:
    """All GPUs as ``driver`` describes them; no devices where there is no driver, or where it does not answer."""
    try:
        driver.open()
    except DriverAbsent:
        return Gpus(trouble=None, driver_version=None, cuda_version=None, num_on_bus=num_on_bus, devices=())
    except Unanswered as error:
        return Gpus(trouble=str(error), driver_version=None, cuda_version=None, num_on_bus=num_on_bus, devices=())
    try:
        trouble = None
        try:
            count = int(driver.ask("nvmlDeviceGetCount"))
        except Unanswered as error:
            count, trouble = 0, str(error)
        return Gpus(
            trouble=trouble,
            driver_version=_text(_answer(driver, "nvmlSystemGetDriverVersion")),
            cuda_version=_cuda(_answer(driver, "nvmlSystemGetCudaDriverVersion_v2")),
            num_on_bus=num_on_bus,
            devices=tuple(_gpu(driver, index) for index in range(count)),
        )
    finally:
        driver.close()


def _gpu(driver: Driver, index: int) -> Gpu:
    try:
        handle = driver.ask("nvmlDeviceGetHandleByIndex", index)
    except Unanswered as error:
        return Gpu(index=index, trouble=str(error))

    def ask(question: str, *arguments: object) -> Any:
        return _answer(driver, question, handle, *arguments)

    memory, rows = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetRemappedRows")
    utilization, capability = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetCudaComputeCapability")
    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    links_up, links_down = _nvlinks(driver, handle)
    milliwatts, limit_milliwatts = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    pages = [ask("nvmlDeviceGetRetiredPages", cause) for cause in _PAGE_CAUSES]
    retired = [len(found) for found in pages if found is not None]
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        memory_total_bytes=int(memory.total) if memory is not None else None,
        memory_used_bytes=int(memory.used) if memory is not None else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        compute_mode=_MODES.get(ask("nvmlDeviceGetComputeMode")),
        is_mig=mig[0] == _ENABLED if mig is not None else None,
        pcie_generation=_count(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
        pcie_generation_max=_count(ask("nvmlDeviceGetMaxPcieLinkGeneration")),
        pcie_width=_count(ask("nvmlDeviceGetCurrPcieLinkWidth")),
        pcie_width_max=_count(ask("nvmlDeviceGetMaxPcieLinkWidth")),
        num_nvlinks=links_up,
        num_nvlinks_down=links_down,
        clock_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
        clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
        memory_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY),
        slowed_by=_reasons(driver, handle),
        utilization_percent=int(utilization.gpu) if utilization is not None else None,
        temperature_celsius=ask("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        slowdown_celsius=ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN_THRESHOLD),
        power_watts=milliwatts / 1000 if milliwatts is not None else None,
        power_limit_watts=limit_milliwatts / 1000 if limit_milliwatts is not None else None,
        is_ecc=ecc[0] == _ENABLED if ecc is not None else None,
        num_errors_corrected=ask("nvmlDeviceGetTotalEccErrors", _CORRECTED, _SINCE_THE_DRIVER),
        num_errors_uncorrected=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_THE_DRIVER),
        num_pages_retired=sum(retired) if retired else None,
        is_retirement_pending=_flag(ask("nvmlDeviceGetRetiredPagesPendingStatus")),
        num_rows_remapped=int(rows[0]) + int(rows[1]) if rows is not None else None,
        is_remapping_pending=_flag(rows[2]) if rows is not None else None,
        is_remapping_failed=_flag(rows[3]) if rows is not None else None,
    )


def _answer(driver: Driver, question: str, *arguments: object) -> Any:
    try:
        return driver.ask(question, *arguments)
    except Unanswered:
        return None


def _nvlinks(driver: Driver, handle: object) -> tuple[int | None, int | None]:
    """The numbers of NVLinks that are up and that are down; None for both where the driver tells of none."""
    states = [_answer(driver, "nvmlDeviceGetNvLinkState", handle, link) for link in range(_MOST_NVLINKS)]
    known = [state == _ENABLED for state in states if state is not None]
    return (sum(known), len(known) - sum(known)) if known else (None, None)


def _reasons(driver: Driver, handle: object) -> tuple[str, ...]:
    bits = _answer(driver, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # its name before 2023
        bits = _answer(driver, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return tuple(words for bit, words in _REASONS.items() if bits is not None and bits & bit)


def _cuda(number: object) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else None


def _text(found: object) -> str | None:
    if isinstance(found, bytes):  # of older pynvml
        return found.decode(errors="replace")
    return found if isinstance(found, str) else None


def _count(number: object) -> int | None:
    return number if isinstance(number, int) and number > 0 else None  # virtual machines say 0


def _flag(found: object) -> bool | None:
    return None if found is None else bool(found)
