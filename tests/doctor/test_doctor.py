"""What the doctor says of machines: each fault planted by itself in a machine that has none."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.cli import main
from elastic_ext.doctor.findings import SEVERITIES, Finding, check_node, findings, sorted_findings
from elastic_ext.doctor.records import NodeHardware
from tests.support.machines import GIB, SHARED_MEMORY, gpu, gpus, machine, storage

GOOD = machine()


def _with(part: str, **changes: Any) -> NodeHardware:
    return machine(**{part: dataclasses.replace(getattr(GOOD, part), **changes)})


def _of_storage(**changes: Any) -> NodeHardware:
    return machine(storage=(SHARED_MEMORY, storage(**changes)))


def _shared(**changes: Any) -> NodeHardware:
    return machine(storage=(dataclasses.replace(SHARED_MEMORY, **changes),))


def _interfaces(**changes: Any) -> NodeHardware:
    """Of the loopback interface."""
    loopback, other = GOOD.network.interfaces
    return _with("network", interfaces=(dataclasses.replace(loopback, **changes), other))


FAULTS: list[tuple[str, NodeHardware, str, str, str]] = [
    # of what, machine, severity, words, words of what to do
    ("quota", _with("cpu", quota_cores=8.0), "warning", "64 CPU cores are seen, and", "OMP_NUM_THREADS"),
    ("affinity", _with("cpu", num_allowed=8), "note", "8 of 64 CPU cores", "OMP_NUM_THREADS"),
    ("few cores", _with("cpu", num_logical=2, num_allowed=2), "warning", "2 CPU cores for 2 GPUs", "more cores"),
    ("memory used", _with("memory", available_bytes=20 * GIB), "warning", "20.0 GiB of 512 GiB of memory", "ps aux"),
    (
        "memory limit",
        _with("memory", limit_bytes=64 * GIB, limit_free_bytes=60 * GIB),
        "note",
        "the control group allows 64.0 GiB",
        "docker run --memory",
    ),
    (
        "memory limit reached",
        _with("memory", limit_bytes=400 * GIB, limit_free_bytes=GIB),
        "warning",
        "1.00 GiB of 400 GiB of memory are free",
        "ps aux",
    ),
    (
        "swap",
        _with("memory", swap_total_bytes=64 * GIB, swap_used_bytes=60 * GIB),
        "note",
        "on a disk (swap)",
        "memory",
    ),
    (
        "shm of docker",
        _shared(total_bytes=64 << 20, free_bytes=64 << 20),
        "error",
        "/dev/shm has 64.0 MiB",
        "--shm-size",
    ),
    (
        "shm of docker with one GPU",
        dataclasses.replace(_shared(total_bytes=64 << 20, free_bytes=64 << 20), gpus=gpus(gpu())),
        "warning",
        "/dev/shm has 64.0 MiB",
        "--shm-size",
    ),
    ("shm full", _shared(free_bytes=GIB), "warning", "1.00 GiB of 64.0 GiB of /dev/shm are free", "ls -la /dev/shm"),
    ("shm on a disk", _shared(is_memory=False), "warning", "/dev/shm is no memory", "mount -t tmpfs"),
    ("no driver", machine(gpus=gpus(num_on_bus=4)), "warning", "4 NVIDIA GPUs are on the bus", "--gpus all"),
    ("no GPU", machine(gpus=gpus()), "note", "no NVIDIA GPU", ""),
    ("broken driver", machine(gpus=gpus(trouble="mismatch")), "error", "does not answer: mismatch", "nvidia-smi"),
    (
        "GPUs not shown",
        machine(gpus=gpus(gpu(), num_on_bus=8)),
        "note",
        "8 NVIDIA GPUs are on the bus",
        "nvidia-smi -L",
    ),
    ("lost GPU", machine(gpus=gpus(gpu(), gpu(1, trouble="GPU is lost"))), "error", "GPU 1 does not answer", "Xid"),
    ("narrow link", machine(gpus=gpus(gpu(pcie_width=8))), "warning", "by 8 PCIe lanes, and could be by 16", "seated"),
    (
        "slow link",
        machine(gpus=gpus(gpu(pcie_generation=3, utilization_percent=90))),
        "warning",
        "of generation 3, and could be of 5",
        "firmware",
    ),
    ("NVLink down", machine(gpus=gpus(gpu(num_nvlinks_down=2))), "warning", "2 NVLinks of GPU 0 are down", "nvlink -s"),
    (
        "hot",
        machine(gpus=gpus(gpu(slowed_by=("its temperature",), temperature_celsius=80))),
        "warning",
        "GPU 0 is slowed down by its temperature (345 of 1980 MHz)",
        "fans",
    ),
    ("nearly hot", machine(gpus=gpus(gpu(temperature_celsius=85))), "warning", "85 degrees Celsius", "fans"),
    (
        "power limit",
        machine(gpus=gpus(gpu(slowed_by=("its power limit",), utilization_percent=99, pcie_generation=5))),
        "note",
        "slowed down by its power limit",
        "POWER",
    ),
    (
        "memory errors",
        machine(gpus=gpus(gpu(num_errors_uncorrected=3))),
        "error",
        "3 memory errors that could not be corrected",
        "--gpu-reset",
    ),
    (
        "remapping",
        machine(gpus=gpus(gpu(is_remapping_pending=True))),
        "warning",
        "when the GPU is reset",
        "--gpu-reset",
    ),
    ("retirement", machine(gpus=gpus(gpu(is_retirement_pending=True))), "warning", "when the GPU is reset", "reset"),
    ("no spare rows", machine(gpus=gpus(gpu(is_remapping_failed=True))), "error", "spare rows", "replaced"),
    ("ECC off", machine(gpus=gpus(gpu(is_ecc=False))), "note", "ECC is off", "--ecc-config=1"),
    ("prohibited", machine(gpus=gpus(gpu(compute_mode="prohibited"))), "error", "lets no process compute", "DEFAULT"),
    ("exclusive", machine(gpus=gpus(gpu(compute_mode="exclusive process"))), "note", "one process compute", "DEFAULT"),
    ("MIG", machine(gpus=gpus(gpu(is_mig=True))), "note", "is divided (MIG)", ""),
    (
        "GPU in use",
        machine(gpus=gpus(gpu(memory_used_bytes=40 * GIB))),
        "warning",
        "40.0 GiB of 80.0 GiB",
        "nvidia-smi",
    ),
    ("unlike GPUs", machine(gpus=gpus(gpu(), gpu(1, name="A100"))), "warning", "the GPUs are unlike", "VISIBLE"),
    ("unlike links", machine(gpus=gpus(gpu(), gpu(1, num_nvlinks=12))), "warning", "GPU 1 has 12", "topo -m"),
    (
        "old driver",
        machine(gpus=gpus(gpu(), cuda_version="12.8")),
        "error",
        "built for CUDA 13.0, and driver 580.65 can do 12.8",
        "update the driver",
    ),
    (
        "older minor version",
        dataclasses.replace(
            machine(gpus=gpus(gpu(), cuda_version="12.4")),
            versions=dataclasses.replace(GOOD.versions, torch_cuda="12.8"),
        ),
        "note",
        "can do 12.4",
        "update the driver",
    ),
    ("torch of CPUs", _with("versions", torch_cuda=None), "warning", "built without CUDA", "pytorch.org"),
    ("another torch", _with("versions", torch="2.12.1"), "note", "torch 2.12.1 was never tested with", "was tested"),
    ("no torch", _with("versions", torch=None, is_torch_cuda_known=False), "error", "torch is not installed", "pip"),
    ("loopback down", _interfaces(is_up=False), "error", "loopback interface is not up", "ip link set lo up"),
    ("unknown name", _with("network", host_addresses=()), "warning", "one stands for no address", "/etc/hosts"),
    ("name service hangs", _with("network", host_addresses=None), "warning", "answered in time", "resolv.conf"),
    (
        "run directory on NFS",
        _of_storage(use="run directory", file_system="nfs4", is_network=True),
        "warning",
        "lies on nfs4",
        "ELASTIC_EXT_RUN_DIR",
    ),
    ("checkpoints on NFS", _of_storage(file_system="nfs4", is_network=True), "note", "lies on nfs4", "Shared storage"),
    ("checkpoints in memory", _of_storage(file_system="tmpfs", is_memory=True), "warning", "lies in memory", "disk"),
    ("dead server", _of_storage(answers=False), "error", "/data does not answer", "umount"),
    ("nothing there", _of_storage(is_there=False), "note", "/data is not there", ""),
    ("read-only", _of_storage(is_writable=False), "note", "cannot be written to", "another folder"),
    ("temp read-only", _of_storage(use="temporary files", is_writable=False), "warning", "cannot be written", "choose"),
    ("low space", _of_storage(free_bytes=5 * GIB), "warning", "5.00 GiB of 0.98 TiB are free", "ckpt prune"),
    ("full", _of_storage(use="run directory", free_bytes=0), "error", "0 B of 0.98 TiB are free", "another folder"),
    ("full of files", _of_storage(free_files=5), "warning", "5 more files fit", "small files"),
    ("few files", _with("limits", open_files=1024), "note", "1024 files open", "ulimit -n 65536"),
    ("very few", _with("limits", open_files=256, open_files_max=256), "warning", "256 files open", "limits.conf"),
    ("slow clock", _with("system", clock_source="hpet"), "note", "clock is hpet", "dmesg"),
]


def test_a_machine_without_fault_is_told_to_be_fine() -> None:
    found = findings(GOOD, num_nodes=4)
    assert found and {one.severity for one in found} == {"ok"}
    assert check_node(GOOD) == (None, ())


@pytest.mark.parametrize(
    ("hardware", "severity", "what", "to_do"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_a_fault_is_found_and_no_other(hardware: NodeHardware, severity: str, what: str, to_do: str) -> None:
    wrong = [one for one in findings(hardware) if one.severity != "ok"]
    assert len(wrong) == 1, wrong
    assert wrong[0].severity == severity
    assert what in wrong[0].what
    assert to_do in wrong[0].what_to_do
    assert wrong[0].why_it_matters


@pytest.mark.parametrize(
    ("hardware", "what"),
    [
        (_with("network", host_addresses=("127.0.1.1",)), "one stands for 127.0.1.1"),
        (_with("network", interfaces=GOOD.network.interfaces[:1]), "no network interface but loopback"),
        (
            _with(
                "network",
                interfaces=(
                    GOOD.network.interfaces[0],
                    dataclasses.replace(GOOD.network.interfaces[1], speed_mbits=1000),
                ),
            ),
            "1000 Mbit/s",
        ),
        (_of_storage(), "of this node alone"),
    ],
)
def test_what_matters_to_several_nodes_alone_is_told_to_them_alone(hardware: NodeHardware, what: str) -> None:
    assert [one for one in findings(hardware) if one.severity != "ok"] == []
    (wrong,) = [one for one in findings(hardware, num_nodes=2) if one.severity != "ok"]
    assert what in wrong.what


def test_several_nodes_are_told_who_can_reach_their_rendezvous() -> None:
    assert [one.what for one in findings(GOOD, num_nodes=2) if "whoever reaches its port can run code" in one.what]
    assert not any("rendezvous" in one.what for one in findings(GOOD))


def test_a_gpu_that_idles_may_have_a_slow_link_and_a_low_clock() -> None:
    idle = gpu(pcie_generation=1, clock_mhz=210, slowed_by=())
    assert all(one.severity == "ok" for one in findings(machine(gpus=gpus(idle))))


def test_errors_keep_a_job_from_starting_and_warnings_do_not() -> None:
    why, lines = check_node(machine(gpus=gpus(gpu(pcie_width=8), gpu(1, trouble="GPU is lost"))))
    assert why is not None and why.startswith("GPU 1 does not answer: GPU is lost; a job")
    assert [line[:20] for line in lines] == ["GPU 0 is linked by 8"]
    for _, hardware, severity, what, _ in FAULTS:
        refused, lines = check_node(hardware)
        assert (refused is not None) == (severity == "error")
        assert (what in (refused or "")) == (severity == "error")
        assert bool(lines) == (severity == "warning")


@given(st.lists(st.sampled_from(SEVERITIES)))
def test_the_worst_comes_first_and_equals_keep_their_order(severities: list[Any]) -> None:
    found = [Finding(severity=severity, what=str(number)) for number, severity in enumerate(severities)]
    ranked = sorted_findings(found)
    assert sorted(ranked, key=found.index) == found
    keys = [(-SEVERITIES.index(one.severity), int(one.what)) for one in ranked]
    assert keys == sorted(keys)


def test_words_of_a_finding_stay_on_lines_of_their_own_and_steer_no_terminal() -> None:
    one = Finding(severity="error", what="a\x1b[31m\nb", why_it_matters="c", what_to_do="")
    assert one.in_words() == "error:   a [31m b\n         c"


# --- the command ---------------------------------------------------------------------------------------------------
def test_the_command_says_what_it_found_and_whether_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", "--json", "--run-dir", str(tmp_path), "--path", str(tmp_path / "checkpoints")])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    hardware = NodeHardware.from_json(json.dumps(records[0]))
    assert [one.path for one in hardware.storage][-2:] == [str(tmp_path), str(tmp_path / "checkpoints")]
    told = [record for record in records if record["record"] == "finding"]
    assert [one["what"] for one in told] == [one.what for one in findings(hardware)]
    assert any("checkpoints is not there" in one["what"] for one in told)
    assert status == int(any(one["severity"] in ("warning", "error") for one in told))

    assert main(["doctor", "--run-dir", str(tmp_path)]) in (0, 1)
    assert "CPU core" in capsys.readouterr().out

    (tmp_path / "file").write_text("")
    assert main(["doctor", "--run-dir", str(tmp_path / "file")]) == 1
    assert "file (run directory) cannot be written to" in capsys.readouterr().out
    main(["doctor", "--run-dir", str(tmp_path), "--path", str(tmp_path / "file" / "below")])
    assert "below cannot be written to" in capsys.readouterr().out


def test_the_run_directory_is_that_of_the_environment_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def looked_at() -> list[str]:
        main(["doctor", "--json"])
        hardware = NodeHardware.from_json(capsys.readouterr().out.splitlines()[0])
        return [one.path for one in hardware.storage if one.use == "run directory"]

    monkeypatch.delenv("ELASTIC_EXT_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert looked_at() == [str(tmp_path / "cache" / "elastic_ext")]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", "~/run")
    assert looked_at() == [str(tmp_path / "run")]
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", "~nobody-is-called-so/run")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "the run directory: ~nobody-is-called-so/run: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2"], "--nnodes is given and --rdzv-endpoint is not; add --rdzv-endpoint HOST:PORT"),
        (["--rdzv_id", "a"], "--rdzv-id is given and --rdzv-endpoint is not"),
        (["--rdzv-endpoint", "127.0.0.1:1"], "--nnodes is not; add --nnodes N"),
        (["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "3:2"], "'3:2' is given; allowed: N, or MIN:MAX"),
        (["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "0"], "'0' is given"),
        (["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "2", "--rdzv-conf", "a"], "'a' is given; allowed: KEY=VALUE"),
        (["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "2", "--silence", "0"], "'0' is given; allowed: seconds"),
        (
            ["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "2", "--rdzv-conf", "join_timeout=soon"],
            "join_timeout is 'soon'; allowed: seconds",
        ),
        (["--master", "127.0.0.1:1"], "--master is given and --rdzv-endpoint is not"),
        (["--master", "nowhere"], "is no address of a master"),
        (["--path", ""], "it is ''"),
    ],
)
def test_arguments_that_cannot_be_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *arguments])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_imports_no_torch_for_one_machine(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic_ext.cli import main;"
        f"main(['doctor', '--run-dir', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL, env=os.environ)
