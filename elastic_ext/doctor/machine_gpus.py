"""What is wrong with the GPUs of a machine, and with what torch can do with them: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from elastic_ext.records.text import size_in_words

from .finding import Finding, error, note, ok, warning
from .hardware_records import Gpu, NodeHardware

__all__ = ["findings_of_gpus"]

_BUSY_PERCENT = 50
_USED_SHARE = 0.05
_BY_ITSELF = ("its power limit", "a clock that was set for it", "a clock that was set for its display")
"""What slows a clock down and is no illness."""
_CLOSE_CELSIUS = 5


def findings_of_gpus(hardware: NodeHardware) -> Iterator[Finding]:
    """What there is to say of them."""
    gpus = hardware.gpus
    if gpus.trouble is not None:
        yield error(
            f"the NVIDIA driver does not answer: {gpus.trouble}",
            "torch cannot use the GPUs",
            "nvidia-smi says the same; after an update of the driver the machine has to be started anew",
        )
    elif not gpus.devices:
        yield from _of_none(gpus.num_on_bus)
    elif gpus.num_on_bus is not None and gpus.num_on_bus > len(gpus.devices):
        yield note(
            f"{gpus.num_on_bus} NVIDIA GPUs are on the bus, and the driver shows {len(gpus.devices)}",
            "a container may be given some of them; a GPU that has failed is missing too",
            "nvidia-smi -L on the machine itself shows which; dmesg | grep -i xid says why one has failed",
        )
    bad = [found for gpu in gpus.devices for found in _of_one(gpu)]
    yield from bad
    yield from _of_all(gpus.devices)
    yield from _of_torch(hardware)
    if gpus.devices and not bad:
        names = Counter(gpu.name or "of unknown name" for gpu in gpus.devices)
        yield ok(", ".join(f"{count} x {name}" for name, count in names.items()) + f", driver {gpus.driver_version}")


def _of_none(num_on_bus: int | None) -> Iterator[Finding]:
    if num_on_bus:
        yield warning(
            f"{num_on_bus} NVIDIA GPUs are on the bus, and no driver is there for this process",
            "torch trains on the CPU, or fails",
            "install the NVIDIA driver; in a container, docker run --gpus all with the NVIDIA container toolkit",
        )
    else:
        yield note("no NVIDIA GPU", "torch trains on the CPU, or on a device that is not looked at here")


def _of_one(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    if gpu.trouble is not None:
        yield error(
            f"{name} does not answer: {gpu.trouble}",
            "a job that uses it fails, or hangs",
            "look in dmesg for Xid; start the machine anew, and have the GPU looked at if it happens again",
        )
        return
    yield from _of_link(gpu, name)
    yield from _of_speed(gpu, name)
    yield from _of_health(gpu, name)
    yield from _of_mode(gpu, name)


def _of_link(gpu: Gpu, name: str) -> Iterator[Finding]:
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
        yield warning(
            f"{name} is linked by {gpu.pcie_width} PCIe lanes, and could be by {gpu.pcie_width_max}",
            "copies between host and GPU, and to other GPUs, are slower by as much",
            "start the machine anew; then have the GPU seated again, or its riser and cable looked at",
        )
    busy = gpu.utilization_percent is not None and gpu.utilization_percent >= _BUSY_PERCENT
    now, most = gpu.pcie_generation, gpu.pcie_generation_max
    if busy and now is not None and most is not None and now < most:  # one that is idle lowers it to save power
        yield warning(
            f"{name} is at work and its PCIe link is of generation {now}, and could be of {most}",
            "copies between host and GPU, and to other GPUs, are slower: each generation halves the time",
            "look at the link speed in the firmware's settings, at risers and cables, and in dmesg for PCIe errors",
        )
    if gpu.num_nvlinks_down and gpu.num_nvlinks:
        yield warning(
            f"{gpu.num_nvlinks_down} NVLinks of {name} are down, {gpu.num_nvlinks} are up",
            "what GPUs exchange takes longer, or goes over PCIe",
            "nvidia-smi nvlink -s shows which; start the machine anew, look at the fabric manager and the bridges",
        )


def _of_speed(gpu: Gpu, name: str) -> Iterator[Finding]:
    ill = [reason for reason in gpu.slowed_by if reason not in _BY_ITSELF]
    clock = f" ({gpu.clock_mhz} of {gpu.clock_max_mhz} MHz)" if gpu.clock_mhz and gpu.clock_max_mhz else ""
    if ill:
        yield warning(
            f"{name} is slowed down by {', '.join(ill)}{clock}",
            "all others wait for the slowest GPU at every step",
            "look at fans, air flow and power cables; nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER shows more",
        )
    elif gpu.slowed_by and gpu.clock_mhz and gpu.clock_max_mhz and gpu.clock_mhz < 0.8 * gpu.clock_max_mhz:
        yield note(
            f"{name} is slowed down by {', '.join(gpu.slowed_by)}{clock}",
            "that is usual under full load; all others wait for the slowest GPU",
            "compare the GPUs of a job: their limits (nvidia-smi -q -d POWER,CLOCK) should be the same",
        )
    now, limit = gpu.temperature_celsius, gpu.slowdown_celsius
    if now is not None and limit is not None and now >= limit - _CLOSE_CELSIUS:
        yield warning(
            f"{name} has {now} degrees Celsius and slows down at {limit}",
            "all others wait for the slowest GPU at every step",
            "look at fans and air flow",
        )


def _of_health(gpu: Gpu, name: str) -> Iterator[Finding]:
    if gpu.is_remapping_failed:
        yield error(
            f"{name} has memory that has failed and can no longer be replaced by spare rows",
            "jobs on it die, or compute wrong numbers",
            "take the GPU out of use and have it replaced",
        )
    elif gpu.num_errors_uncorrected:
        yield error(
            f"{name} has had {gpu.num_errors_uncorrected} memory errors that could not be corrected",
            "each of them ends the process that meets it, and there are more as a rule",
            "end what runs on it and reset it (nvidia-smi --gpu-reset), so that spare memory is used; if they come "
            "back, have it replaced",
        )
    elif gpu.is_retirement_pending or gpu.is_remapping_pending:
        yield warning(
            f"{name} has memory that has failed and is replaced when the GPU is reset",
            "until then a job may meet it and die",
            "end what runs on it and reset it: nvidia-smi --gpu-reset",
        )
    if gpu.is_ecc is False:
        yield note(
            f"{name} does not correct errors of its memory (ECC is off)",
            "a bit that flips is not noticed",
            "nvidia-smi --ecc-config=1 and a reset switch it on",
        )


def _of_mode(gpu: Gpu, name: str) -> Iterator[Finding]:
    if gpu.compute_mode == "prohibited":
        yield error(
            f"{name} lets no process compute",
            "torch cannot use it",
            "nvidia-smi --compute-mode=DEFAULT, as an administrator",
        )
    elif gpu.compute_mode == "exclusive process":
        yield note(
            f"{name} lets one process compute at a time",
            "a worker that is started while the one before still ends, fails",
            "nvidia-smi --compute-mode=DEFAULT, as an administrator",
        )
    if gpu.is_mig:
        yield note(
            f"{name} is divided (MIG)", "each part counts as a GPU of its own, and NCCL does not join two of them"
        )
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is not None and total and used > _USED_SHARE * total and not gpu.is_mig:
        yield warning(
            f"{size_in_words(used)} of {size_in_words(total)} of the memory of {name} are in use",
            "another job, or what is left of one, leaves less for this one",
            "nvidia-smi shows whose it is; end what is left of earlier jobs",
        )


def _of_all(devices: tuple[Gpu, ...]) -> Iterator[Finding]:
    kinds = Counter((gpu.name, gpu.memory_total_bytes) for gpu in devices if gpu.trouble is None)
    if len(kinds) > 1:
        words = ", ".join(
            f"{count} x {name or 'of unknown name'} with {size_in_words(size) if size else 'unknown memory'}"
            for (name, size), count in kinds.items()
        )
        yield warning(
            f"the GPUs are unlike: {words}",
            "all wait for the slowest one, and the smallest memory is all that each may use",
            "choose like ones with CUDA_VISIBLE_DEVICES, in jobs of their own",
        )
    links = {gpu.num_nvlinks for gpu in devices if gpu.num_nvlinks is not None}
    if len(links) > 1:
        yield warning(
            "GPUs have unlike numbers of NVLinks: "
            + ", ".join(f"GPU {gpu.index} has {gpu.num_nvlinks}" for gpu in devices if gpu.num_nvlinks is not None),
            "what GPUs exchange takes as long as over the slowest way",
            "nvidia-smi topo -m shows who is linked to whom; look at bridges and at the fabric manager",
        )


def _of_torch(hardware: NodeHardware) -> Iterator[Finding]:
    gpus, versions = hardware.gpus, hardware.versions
    if not gpus.devices or versions.torch is None or not versions.is_torch_cuda_known:
        return
    if versions.torch_cuda is None:
        yield warning(
            f"torch {versions.torch} is built without CUDA, and there are {len(gpus.devices)} GPUs",
            "torch trains on the CPU",
            "install a build with CUDA: pytorch.org/get-started says how",
        )
        return
    built, offered = _numbers(versions.torch_cuda), _numbers(gpus.cuda_version)
    if not built or not offered or offered >= built:
        return
    if offered[0] < built[0]:
        yield error(
            f"torch {versions.torch} is built for CUDA {versions.torch_cuda}, and driver {gpus.driver_version} can do "
            f"{gpus.cuda_version}",
            "torch finds no GPU: 'The NVIDIA driver on your system is too old'",
            f"update the driver, or install a torch that is built for CUDA {offered[0]}",
        )
    else:
        yield note(
            f"torch {versions.torch} is built for CUDA {versions.torch_cuda}, and driver {gpus.driver_version} can do "
            f"{gpus.cuda_version}",
            "that works within one major version; what is compiled on the way (Triton) may need the newer one",
            "update the driver if kernels fail to load",
        )


def _numbers(version: str | None) -> tuple[int, ...]:
    parts = version.split(".")[:2] if version else []
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
