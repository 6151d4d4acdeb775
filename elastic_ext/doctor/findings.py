"""Findings on a machine and its GPUs: what is wrong, why that matters and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from elastic_ext.records.text import on_one_line, size_in_words
from elastic_ext.version import why_torch_is_untested

from .records import Gpu, NodeHardware, StorageOfPath

__all__ = [
    "SEVERITIES",
    "Finding",
    "Severity",
    "check_node",
    "error",
    "findings",
    "findings_of_gpus",
    "is_wrong",
    "note",
    "ok",
    "sorted_findings",
    "tell_findings",
    "warning",
]


# --- one thing that is said of a machine, or of machines together, in words ------------------------------------------

Severity = Literal["ok", "note", "warning", "error"]
"""How bad a finding is: "ok", as it should be; "note", worth knowing; "warning", training is slower for it or may die
of it; "error", a job can hardly run."""
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""All severities, from the least to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was found of a machine, or of machines together, with why it matters and what to do."""

    severity: Severity
    what: str
    why_it_matters: str = ""
    what_to_do: str = ""

    def to_record(self) -> dict[str, object]:
        """The finding as a dictionary for a line of JSON."""
        return asdict(self)

    def in_words(self) -> str:
        """The finding as a few lines of text: what it is, why that matters, what to do."""
        lines = [f"{self.severity + ':':9}{on_one_line(self.what)}"]
        lines += [f"{'':9}{on_one_line(line)}" for line in (self.why_it_matters, self.what_to_do) if line]
        return "\n".join(lines)


def ok(what: str) -> Finding:
    """A finding that something is as it should be."""
    return Finding(severity="ok", what=what)


def note(what: str, why: str, to_do: str = "") -> Finding:
    """A finding that is worth knowing, and is no fault."""
    return Finding(severity="note", what=what, why_it_matters=why, what_to_do=to_do)


def warning(what: str, why: str, to_do: str) -> Finding:
    """A finding for which training is slower, or of which it may die."""
    return Finding(severity="warning", what=what, why_it_matters=why, what_to_do=to_do)


def error(what: str, why: str, to_do: str) -> Finding:
    """A finding with which a job can hardly run."""
    return Finding(severity="error", what=what, why_it_matters=why, what_to_do=to_do)


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is a warning or an error."""
    return any(finding.severity in ("warning", "error") for finding in findings)


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, the worst first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))


class Listener(Protocol):
    """What findings are told to, such as a terminal."""

    def tell(self, record: Mapping[str, object], words: str) -> None:
        """Show one thing: ``words`` for a person, or ``record`` as JSON."""
        ...


def tell_findings(listener: Listener, findings: Iterable[Finding], about: str) -> None:
    """Tell a listener all findings, and what they are ``about``."""
    for finding in findings:
        listener.tell({"record": "finding", "about": about, **finding.to_record()}, finding.in_words())


# --- what is wrong with the GPUs of a machine, and with what torch can do with them ----------------------------------

_BUSY_PERCENT = 50
_USED_SHARE = 0.05
_BY_ITSELF = ("its power limit", "a clock that was set for it", "a clock that was set for its display")
"""Reasons for a slower clock that are no fault of the GPU."""
_CLOSE_CELSIUS = 5


def findings_of_gpus(hardware: NodeHardware) -> Iterator[Finding]:
    """The findings on a machine's GPUs, their driver, and what torch can do with them."""
    gpus = hardware.gpus
    if gpus.trouble is not None:
        yield error(
            f"the NVIDIA driver does not answer: {gpus.trouble}",
            "torch cannot use the GPUs",
            "run nvidia-smi, which gives the reason too; start the machine anew if its driver was updated",
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
            "install the NVIDIA driver, and nvidia-ml-py, which asks it; in a container, docker run --gpus all with "
            "the NVIDIA container toolkit",
        )
    else:
        yield note(
            "this machine has no NVIDIA GPU", "torch trains on the CPU, or on a device that this command does not check"
        )


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
            "that works within one major version; kernels compiled at run time (Triton) may need the newer one",
            "update the driver if kernels fail to load",
        )


def _numbers(version: str | None) -> tuple[int, ...]:
    parts = version.split(".")[:2] if version else []
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


# --- what is wrong with a machine, why that matters and what to do: pure, from what hardware.py has seen of it -------

_GIB = 1 << 30
_LEAST_SHARED_BYTES = _GIB
_CONTAINERS_SHARED_BYTES = 64 << 20
_LEAST_OPEN_FILES = 4096
_LEAST_FREE_SHARE = 0.10
_LEAST_FREE_BYTES = 10 * _GIB
_NOTHING_FREE_BYTES = 256 << 20
_LEAST_FREE_FILES = 10_000
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "xen", "pit")


def findings(hardware: NodeHardware, *, num_nodes: int = 1) -> tuple[Finding, ...]:
    """All findings on a machine that is to be one of ``num_nodes`` in a job, the worst first."""
    return sorted_findings(
        [
            *_of_cpu(hardware),
            *_of_memory(hardware),
            *_of_shared_memory(hardware),
            *findings_of_gpus(hardware),
            *_of_network(hardware, num_nodes),
            *(found for storage in hardware.storage for found in _of_storage(storage, num_nodes)),
            *_of_limits(hardware),
            *_of_system(hardware),
        ]
    )


def check_node(hardware: NodeHardware, *, num_nodes: int = 1) -> tuple[str | None, tuple[str, ...]]:
    """The errors of a machine, on which a job must not be started, and its warnings: a line for each.

    The errors are one text, or None where a job may be started.
    """
    found = findings(hardware, num_nodes=num_nodes)
    lines = {
        severity: tuple(
            f"{one.what}; {one.why_it_matters}. What to do: {one.what_to_do}"
            for one in found
            if one.severity == severity
        )
        for severity in ("error", "warning")
    }
    return "\n".join(lines["error"]) or None, lines["warning"]


def _of_cpu(hardware: NodeHardware) -> Iterator[Finding]:
    cpu = hardware.cpu
    model = f" ({cpu.model})" if cpu.model else ""
    if cpu.quota_cores is not None and cpu.quota_cores < 0.9 * cpu.num_allowed:
        yield warning(
            f"{cpu.num_allowed} CPU cores are seen, and the control group allows the time of {cpu.quota_cores:g} of "
            "them",
            "programs start a thread for each core they see, and all are halted when the time is used up",
            f"give the container more (docker run --cpus, a Kubernetes limit of cpu), or set OMP_NUM_THREADS and "
            f"loader workers so that {cpu.effective_cores:g} cores suffice",
        )
    elif cpu.num_allowed < 0.5 * cpu.num_logical:
        yield note(
            f"this process may run on {cpu.num_allowed} of {cpu.num_logical} CPU cores{model}",
            "programs that ask how many cores the machine has start too many threads",
            "set OMP_NUM_THREADS, or widen what taskset, numactl or the batch system has set",
        )
    else:
        yield ok(f"{cpu.effective_cores:g} CPU core{'' if cpu.effective_cores == 1 else 's'}{model}")
    num_gpus = len(hardware.gpus.devices)
    if num_gpus and cpu.effective_cores < 2 * num_gpus:
        yield warning(
            f"there are {cpu.effective_cores:g} CPU cores for {num_gpus} GPUs",
            "each GPU needs a core for its process, and more for loading data",
            "give the job more cores; 8 for each GPU are usual",
        )


def _of_memory(hardware: NodeHardware) -> Iterator[Finding]:
    memory = hardware.memory
    share = memory.free_bytes / memory.effective_bytes if memory.effective_bytes else 1.0
    total, free = size_in_words(memory.effective_bytes), size_in_words(memory.free_bytes)
    if memory.limit_bytes is not None and memory.limit_bytes < 0.5 * memory.total_bytes:
        yield note(
            f"the machine has {size_in_words(memory.total_bytes)} of memory, and the control group allows {total}",
            "a process that asks how much the machine has may take more than that, and is killed without a word",
            "give the container more (docker run --memory, a Kubernetes limit of memory) where that is too little",
        )
    if share < _LEAST_FREE_SHARE:
        yield warning(
            f"{free} of {total} of memory are free",
            "the kernel kills a process when nothing is left, as a rule the largest one",
            "look who uses it (ps aux --sort=-rss | head), end what is left of earlier jobs",
        )
    else:
        yield ok(f"{free} of {total} of memory are free")
    if memory.swap_used_bytes > 0.05 * memory.effective_bytes:
        yield note(
            f"{size_in_words(memory.swap_used_bytes)} of memory lie on a disk (swap)",
            "whatever needs them waits for the disk",
            "look who uses memory; training is steadier without swap",
        )


def _of_shared_memory(hardware: NodeHardware) -> Iterator[Finding]:
    num_gpus = len(hardware.gpus.devices)
    for storage in hardware.storage:
        free, total = size_in_words(storage.free_bytes or 0), size_in_words(storage.total_bytes or 0)
        if storage.use != "shared memory" or not storage.answers:
            continue
        if not storage.is_there or not storage.is_memory or not storage.is_writable:
            yield warning(
                "/dev/shm is no memory that this user can write to",
                "loaders with workers, NCCL and what is staged of checkpoints need it",
                "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            )
        elif storage.total_bytes is not None and storage.total_bytes < _LEAST_SHARED_BYTES:
            is_too_small = storage.total_bytes <= _CONTAINERS_SHARED_BYTES and num_gpus > 1
            yield (error if is_too_small else warning)(
                f"/dev/shm has {total}",
                "loader workers pass batches through it and die of SIGBUS (bus error) where it is full; "
                "NCCL between the GPUs of a machine needs it too",
                "docker run --shm-size=32g; in Kubernetes an emptyDir with medium: Memory, mounted at /dev/shm",
            )
        elif storage.total_bytes and (storage.free_bytes or 0) < _LEAST_FREE_SHARE * storage.total_bytes:
            yield warning(
                f"{free} of {total} of /dev/shm are free",
                "loader workers die of SIGBUS (bus error) where it is full",
                "look what is left of earlier jobs (ls -la /dev/shm) and remove it",
            )
        else:
            yield ok(f"/dev/shm has {total}")


def _of_network(hardware: NodeHardware, num_nodes: int) -> Iterator[Finding]:
    network = hardware.network
    if not any(one.is_up and one.is_loopback for one in network.interfaces):
        yield error(
            "the loopback interface is not up",
            "processes of this machine reach each other through it",
            "ip link set lo up",
        )
    host, addresses = network.host, network.host_addresses
    if addresses is None:
        yield warning(
            f"the lookup of the host name {host} was not answered in time",
            "processes look up the name as they form a process group, and each waits as long",
            f"look at /etc/resolv.conf, or write {host} into /etc/hosts",
        )
    elif not addresses:
        yield warning(
            f"the host name {host} stands for no address",
            "gloo and torchrun look up the name when processes meet, and fail",
            f"write {host} with this machine's address into /etc/hosts, or set GLOO_SOCKET_IFNAME and --local-addr",
        )
    elif num_nodes > 1 and all(_is_loopback(address) for address in addresses):
        yield warning(
            f"the host name {host} stands for {', '.join(addresses)}",
            "other nodes are told this address, and reach themselves by it",
            f"give {host} this machine's address in /etc/hosts, or set GLOO_SOCKET_IFNAME and --local-addr",
        )
    else:
        yield ok(f"the host name {host} stands for {', '.join(addresses)}")
    outward = [one for one in network.interfaces if one.is_up and not one.is_loopback and one.addresses]
    if num_nodes > 1 and not outward:
        yield error(
            "no network interface but loopback is up and has an address",
            "other nodes cannot be reached",
            "ip addr shows what there is; in a container, docker run --network=host",
        )
    if num_nodes > 1:
        yield ok(
            "torch's rendezvous of several nodes listens on all addresses, and whoever reaches its port can run code: "
            "keep it within a network of your own"
        )
    speeds = [one.speed_mbits for one in outward if one.speed_mbits is not None]
    if num_nodes > 1 and len(speeds) == len(outward) and speeds and max(speeds) < 10_000:
        yield note(
            f"the fastest network interface has {max(speeds)} Mbit/s",
            "gradients of all parameters go through it at every step",
            "measure it with elastic-ext doctor --rdzv-endpoint on all nodes; look whether a faster one is down",
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _of_storage(storage: StorageOfPath, num_nodes: int) -> Iterator[Finding]:
    if storage.use == "shared memory" and storage.answers:
        return
    name = storage.path if storage.use == "asked for" else f"{storage.path} ({storage.use})"
    if not storage.answers:
        yield error(
            f"the file system of {name} does not answer",
            "a process that opens a file there hangs, and cannot be killed meanwhile",
            "look at its server and the network; umount -l detaches it, and a mount with soft,timeo=100 fails instead",
        )
        return
    if not storage.is_there and storage.use == "asked for":
        yield note(
            f"{name} is not there; the findings on it are of the nearest folder above that exists",
            "a checkpoint folder is made when it is first saved to, in a folder where this user may write",
        )
    if storage.is_writable is False:
        yield (note if storage.use == "asked for" else warning)(
            f"{name} cannot be written to",
            "data may be read from there; checkpoints, logs and metrics cannot be kept there",
            "choose another folder, or have it mounted so that this user may write",
        )
    yield from _of_kind(storage, name, num_nodes)
    yield from _of_room(storage, name)


def _of_kind(storage: StorageOfPath, name: str, num_nodes: int) -> Iterator[Finding]:
    if storage.use == "run directory" and storage.is_network:
        yield warning(
            f"{name} lies on {storage.file_system}, a network's file system",
            "files of one node are locked, watched and replaced there every few seconds; locks may not hold between "
            "machines, and training waits where the server does",
            "set ELASTIC_EXT_RUN_DIR to a folder on a disk of this machine",
        )
    elif storage.use == "asked for" and storage.is_memory:
        yield warning(
            f"{name} lies in memory ({storage.file_system})",
            "what is there is gone when the machine or the container is started anew",
            "keep checkpoints on a disk or on shared storage",
        )
    elif storage.use == "asked for" and storage.is_network:
        yield note(
            f"{name} lies on {storage.file_system}, a network's file system",
            "it can be shared by several nodes, as checkpoints have to be; it may be slow, and may stop to answer",
            "see Shared storage in the documentation for what is asked of it",
        )
    elif storage.use == "asked for" and num_nodes > 1:
        yield note(
            f"{name} lies on {storage.file_system or 'a disk'} of this node alone",
            "checkpoints of several nodes have to lie where all of them can read and write",
            "choose shared storage for checkpoints",
        )


def _of_room(storage: StorageOfPath, name: str) -> Iterator[Finding]:
    free, total = storage.free_bytes, storage.total_bytes
    if free is None or total is None or not storage.is_writable:
        return
    if total and free < min(_LEAST_FREE_BYTES, _LEAST_FREE_SHARE * total):
        yield (error if free < _NOTHING_FREE_BYTES and storage.use != "asked for" else warning)(
            f"{size_in_words(free)} of {size_in_words(total)} are free for {name}",
            "checkpoints, logs and metrics are written until it is full, and then fail",
            "remove what is not needed (elastic-ext ckpt prune removes old checkpoints), or choose another folder",
        )
    elif storage.free_files is not None and storage.free_files < _LEAST_FREE_FILES:
        yield warning(
            f"{storage.free_files} more files fit where {name} lies (df -i)",
            "a file system can be full of files before it is full of bytes",
            "remove small files that are not needed, or choose another folder",
        )
    elif total:
        yield ok(f"{name}: {size_in_words(free)} free ({storage.file_system or 'file system not known'})")


def _of_limits(hardware: NodeHardware) -> Iterator[Finding]:
    limits = hardware.limits
    if limits.open_files is None or limits.open_files >= _LEAST_OPEN_FILES:
        many = "any number of" if limits.open_files is None else str(limits.open_files)
        yield ok(f"a process may have {many} files open")
    else:
        most = limits.open_files_max
        can_raise = most is None or most > limits.open_files
        yield (warning if limits.open_files < 1024 else note)(
            f"a process may have {limits.open_files} files open",
            "loader workers pass tensors as open files, and each connection is one: 'Too many open files'",
            f"ulimit -n {most or 65536}, before the job is started"
            if can_raise
            else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536:65536",
        )


def _of_system(hardware: NodeHardware) -> Iterator[Finding]:
    clock = hardware.system.clock_source
    if clock in _SLOW_CLOCKS:
        yield note(
            f"the kernel's clock is {clock}",
            "each reading of the time takes microseconds, and torch and Python read it often",
            "look in dmesg for why tsc was given up; in a virtual machine choose its own clock",
        )
    if hardware.versions.torch is None:
        yield error(
            f"torch is not installed beside Python {hardware.versions.python}",
            "training needs it",
            "pip install torch, into the environment that this command runs in",
        )
    else:
        yield ok(f"Python {hardware.versions.python}, torch {hardware.versions.torch}")
        if (why := why_torch_is_untested(hardware.versions.torch)) is not None:
            yield note(
                why,
                "elastic_ext uses private parts of torch; a feature whose part is missing is declined by its name",
                "where a feature is declined, install a version of torch that was tested",
            )
