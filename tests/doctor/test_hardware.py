"""What a machine has: this one, and others whose files and drivers are planted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.agent.workers.monitor import NvidiaGpus
from elastic_ext.doctor.gpus import QUESTIONS, NvidiaDriver, gpus_of
from elastic_ext.doctor.hardware import (
    GroupLimits,
    count_gpus_on_bus,
    cuda_of_torch,
    group_folders,
    group_limits,
    look,
    model_name,
    parse_quota_v1,
    parse_quota_v2,
    parse_ranges,
    sizes_of_memory,
)
from elastic_ext.doctor.mounts import Mount, is_memory, is_network, mount_of, parse_mounts, storage_of
from elastic_ext.doctor.records import NodeHardware
from tests.support.machines import ANSWERS, GIB, PlantedDriver, gpu, gpus, machine

V2_MOUNTS = """\
29 1 0:26 / / rw - overlay overlay rw
31 29 0:28 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate
"""
V1_MOUNTS = """\
30 23 0:29 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory
"""


def _plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- this machine -------------------------------------------------------------------------------------------------
def test_this_machine_is_told_as_it_is(tmp_path: Path) -> None:
    seen = look([tmp_path], run_dir=tmp_path / "later" / "on")
    assert seen.cpu.num_allowed == len(os.sched_getaffinity(0))
    assert 0 < seen.cpu.effective_cores <= seen.cpu.num_logical
    assert seen.memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < seen.memory.free_bytes <= seen.memory.effective_bytes <= seen.memory.total_bytes
    assert any(one.is_loopback and one.is_up for one in seen.network.interfaces)
    assert seen.versions.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    by_path = {one.path: one for one in seen.storage}
    assert by_path[str(tmp_path)].is_there and by_path[str(tmp_path)].is_writable
    assert by_path[str(tmp_path)].total_bytes == by_path[str(tmp_path / "later" / "on")].total_bytes
    assert not by_path[str(tmp_path / "later" / "on")].is_there
    assert by_path["/dev/shm"].use == "shared memory"


def test_the_version_of_torch_and_its_cuda_are_told_without_importing_it() -> None:
    code = (
        "import sys; from elastic_ext.doctor.hardware import look; v = look().versions;"
        "assert not {'torch', 'numpy'} & set(sys.modules); import torch;"
        "assert (v.torch, v.torch_cuda, v.is_torch_cuda_known) == (torch.__version__, torch.version.cuda, True), v"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_record_comes_back_from_json_as_it_was() -> None:
    for hardware in (look(), machine(gpus=gpus(gpu(slowed_by=("a", "b"), power_watts=1.5), gpu(1, trouble="lost")))):
        assert NodeHardware.from_json(hardware.to_json()) == hardware


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("cpu"), "cpu"),
        (lambda found: found["cpu"].update(num_logical="many"), 'cpu.num_logical is "many"; allowed: int'),
        (lambda found: found["cpu"].update(num_logical=True), "cpu.num_logical is true; allowed: int"),
        (lambda found: found["storage"][0].update(use="fun"), 'storage[0].use is "fun"; allowed: StorageUse'),
        (lambda found: found["gpus"].update(devices=3), "gpus.devices is no list of objects"),
        (lambda found: found.update(memory=None), "memory is no object"),
        (lambda found: found["network"].update(host_addresses=[1]), "network.host_addresses[0] is 1; allowed: tuple"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_name(change, words) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(machine().to_json())
    change(found)
    with pytest.raises(ValueError, match=re.escape(words)):
        NodeHardware.from_json(json.dumps(found))


def test_what_a_newer_version_adds_to_a_record_is_left_out() -> None:
    found = json.loads(machine().to_json())
    found["later"] = found["cpu"]["later"] = 1
    assert NodeHardware.from_json(json.dumps(found)) == machine()


@given(st.text())
def test_no_text_breaks_the_reader_of_records(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|missing|Expecting|Extra data|Unexpected|Unterminated|Invalid"):
        NodeHardware.from_json(text)


# --- control groups -----------------------------------------------------------------------------------------------
def test_version_2_the_tightest_group_up_to_the_mounted_one_counts(tmp_path: Path) -> None:
    root = _plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "proc/self/mountinfo": V2_MOUNTS,
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/job/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/pod/job/memory.current": f"{GIB}\n",
        },
    )
    assert group_limits(root) == GroupLimits(quota_cores=1.5, memory_bytes=6 * GIB, memory_free_bytes=4 * GIB)


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = _plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert group_limits(root) == GroupLimits(quota_cores=0.5, memory_bytes=2 * GIB, memory_free_bytes=GIB)


def test_no_limit_is_none_and_so_is_no_file(tmp_path: Path) -> None:
    assert group_limits(tmp_path) == GroupLimits()
    root = _plant(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert group_limits(root) == GroupLimits()


def test_a_group_that_is_not_mounted_here_is_the_one_that_is() -> None:
    (folder,) = group_folders("cpu", "0::/../other\n", V2_MOUNTS)
    assert str(folder) == "/sys/fs/cgroup"


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_both_versions_say_the_same_of_a_quota(quota: int, period: int) -> None:
    assert parse_quota_v2(f"{quota} {period}\n") == parse_quota_v1(f"{quota}\n", f"{period}\n") == quota / period


@given(st.text(), st.text())
def test_no_text_breaks_the_parsers(text: str, other: str) -> None:
    for found in (parse_quota_v2(text), parse_quota_v1(text, other)):
        assert found is None or found > 0
    group_folders("cpu", text, other)
    parse_mounts(text)
    parse_ranges(text)
    sizes_of_memory(text)
    model_name(text)
    cuda_of_torch(text)


# --- the kernel's other texts -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "count"), [("0\n", 1), ("0-3\n", 4), ("0-1,8-9,12\n", 5), ("", None), ("a-b", None), ("1-", None)]
)
def test_ranges_are_counted(text: str, count: int | None) -> None:
    assert parse_ranges(text) == count


def test_processor_and_memory_are_read(tmp_path: Path) -> None:
    assert model_name("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert model_name("processor\t: 0\nCPU part\t: 0xd0c\n") is None
    assert sizes_of_memory("MemTotal:  10 kB\nHugePages_Total: 4\nSwapFree:\t2 kB\n") == {
        "MemTotal": 10240,
        "SwapFree": 2048,
    }
    root = _plant(
        tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\nSwapTotal: 9 kB\nSwapFree: 4 kB\n"}
    )
    memory = look(root=root, driver=PlantedDriver(None)).memory
    assert (memory.total_bytes, memory.available_bytes, memory.swap_used_bytes) == (102400, 51200, 5120)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cuda: Optional[str] = '13.0'\n", (True, "13.0")),
        ('cuda = "12.8"\n', (True, "12.8")),
        ("cuda: Optional[str] = None\nhip = '6.2'\n", (True, None)),
        ("git_version = 'abc'\n", (False, None)),
    ],
)
def test_the_cuda_that_torch_was_built_for_is_read(line: str, found: tuple[bool, str | None]) -> None:
    assert cuda_of_torch(f"__version__ = '2.13.0'\n{line}") == found


def test_gpus_on_the_bus_are_counted_and_other_devices_are_not(tmp_path: Path) -> None:
    assert count_gpus_on_bus(tmp_path) is None
    devices = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    for number, (vendor, kind) in enumerate(devices):
        folder = f"sys/bus/pci/devices/0000:0{number}:00.0"
        _plant(tmp_path, {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"})
    assert count_gpus_on_bus(tmp_path) == 2


# --- file systems -------------------------------------------------------------------------------------------------
def test_a_path_lies_on_the_longest_mount_and_the_later_of_two() -> None:
    mounts = parse_mounts(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /mnt/my\\040data rw shared:1 - nfs4 host:/x rw\n"
        "3 1 0:3 / /mnt rw - xfs /dev/b rw\n4 1 0:4 / /mnt rw - tmpfs tmpfs rw\n"
    )
    for path, file_system in [
        ("/", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mnt2/x", "ext4"),
        ("/mnt/my data", "nfs4"),
        ("/mnt/my data/x", "nfs4"),
    ]:
        found = mount_of(path, mounts)
        assert found is not None and found.file_system == file_system, path
    assert mount_of("/x", []) is None


@pytest.mark.parametrize(
    ("file_system", "network", "memory"),
    [
        ("nfs4", True, False),
        ("lustre", True, False),
        ("fuse.s3fs", True, False),
        ("fuse.fuse-overlayfs", False, False),
        ("ext4", False, False),
        ("overlay", False, False),
        ("tmpfs", False, True),
    ],
)
def test_file_systems_of_networks_and_memory_are_told(file_system: str, network: bool, memory: bool) -> None:
    assert (is_network(file_system), is_memory(file_system)) == (network, memory)


def test_links_are_followed_to_where_files_lie(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    mounts = [Mount(point="/", file_system="ext4"), Mount(point=str(tmp_path / "far"), file_system="nfs")]
    seen = storage_of(tmp_path / "link" / "new", "asked for", mounts, patience_seconds=60)
    assert (seen.file_system, seen.is_network, seen.is_there) == ("nfs", True, False)


# --- GPUs ---------------------------------------------------------------------------------------------------------
def test_all_that_a_driver_tells_is_in_the_record() -> None:
    driver = PlantedDriver(ANSWERS)
    seen = gpus_of(driver, num_on_bus=1)
    assert (seen.driver_version, seen.cuda_version, seen.trouble) == ("580.65.06", "13.0", None)
    (one,) = seen.devices
    unset = {field.name for field in dataclasses.fields(one) if getattr(one, field.name) is None}
    assert unset == {"trouble"}
    assert one.slowed_by == ("its power limit", "its temperature, by the hardware")
    assert (one.num_nvlinks, one.num_nvlinks_down, one.num_pages_retired, one.num_rows_remapped) == (17, 1, 3, 3)
    assert (one.num_errors_corrected, one.num_errors_uncorrected, one.power_watts) == (3, 2, 650.5)
    assert (one.is_retirement_pending, one.is_remapping_pending, one.is_remapping_failed) == (True, True, False)
    assert not driver.is_open


@pytest.mark.parametrize("question", sorted({key if isinstance(key, str) else key[0] for key in ANSWERS}))
def test_a_question_that_goes_unanswered_costs_no_other_answer(question: str) -> None:
    left = {key: answer for key, answer in ANSWERS.items() if (key if isinstance(key, str) else key[0]) != question}
    whole, seen = (gpus_of(PlantedDriver(answers), num_on_bus=1) for answers in (ANSWERS, left))
    if question == "nvmlDeviceGetCount":
        assert seen.devices == () and seen.trouble == "Not Supported"
    elif question == "nvmlDeviceGetHandleByIndex":
        assert [(one.index, one.trouble) for one in seen.devices] == [(0, "Not Supported")]
    else:
        before, after = (dataclasses.asdict(one.devices[0]) for one in (whole, seen))
        differing = {name for name in before if before[name] != after[name]}
        assert len(differing) <= 3
        assert all(after[name] in (None, ()) for name in differing)


def test_no_driver_is_no_trouble_and_one_that_fails_is() -> None:
    absent = gpus_of(PlantedDriver(None), num_on_bus=0)
    assert (absent.devices, absent.trouble) == ((), None)
    broken = gpus_of(PlantedDriver({}, broken="Driver/library version mismatch"), num_on_bus=0)
    assert (broken.devices, broken.trouble) == ((), "Driver/library version mismatch")


def test_without_pynvml_a_machine_counts_as_one_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    seen = gpus_of(NvidiaDriver(), num_on_bus=2)
    assert (seen.devices, seen.trouble, seen.num_on_bus) == ((), None, 2)
    assert NvidiaGpus.open() is None


def test_all_that_is_asked_is_there_in_pynvml() -> None:
    older_name = {key: answer for key, answer in ANSWERS.items() if key != "nvmlDeviceGetCurrentClocksEventReasons"}
    drivers = [PlantedDriver(ANSWERS), PlantedDriver(older_name)]
    for driver in drivers:
        gpus_of(driver, num_on_bus=None)
    assert drivers[0].asked | drivers[1].asked == set(QUESTIONS)
    assert all(callable(getattr(pynvml, question)) for question in QUESTIONS)
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) == (1, 2, 1)
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED) == (0, 1)
    assert (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_FEATURE_ENABLED) == (0, 0, 1)
    assert (pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS) == (2, 3)
    assert pynvml.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40


@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_told() -> None:
    seen = look().gpus
    assert seen.trouble is None and seen.driver_version and seen.cuda_version
    assert seen.devices
    for one in seen.devices:
        assert one.trouble is None and one.name and one.memory_total_bytes and one.temperature_celsius is not None
