"""The master's messages: as plain values and back, made from master.proto, loaded by every supported protobuf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire.plain import as_dict, window_message, window_record
from elastic_ext.metrics import StepWindow

ROOT = Path(__file__).resolve().parent.parent
WIRE = Path("elastic_ext/master/wire")
OLDEST_COMPILER = ("grpcio-tools==1.62.3", "setuptools<81")
OLDEST = ("grpcio==1.62.3", "protobuf==4.25.0")

WINDOW = StepWindow(
    begin=1.0,
    end=2.5,
    rank=3,
    world_size=4,
    restart=1,
    step=30,
    num_steps=10,
    config_version=2,
    config_revision=1,
    seconds={"data": 0.5, "forward": 1.0},
    step_seconds=(0.1, 0.15, 0.2, 0.3),
    num_samples=80,
    memory_bytes=1 << 40,
)


def test_a_window_is_the_same_after_the_wire() -> None:
    sent = window_message(WINDOW).SerializeToString()
    assert window_record(wire.StepWindow.FromString(sent)) == WINDOW


def test_a_window_that_is_none_is_refused() -> None:
    for changed in ({"begin": float("nan")}, {"seconds": {"data": float("inf")}}, {"step_seconds": [-1.0]}):
        message = window_message(WINDOW)
        for name, value in changed.items():
            if isinstance(value, dict):
                getattr(message, name).update(value)
            elif isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        with pytest.raises(ValueError, match=r"begin|seconds"):
            window_record(message)


def test_messages_as_json_tell_what_is_not_known_from_what_is_zero() -> None:
    worker = wire.Worker(rank=1, step=0, shares={"data": 0.25})
    found = json.loads(json.dumps(as_dict(wire.NodeStatus(workers=[worker], state="live"))))
    assert found["node"] is None and found["state"] == "live" and found["troubles"] == []
    (kept,) = found["workers"]
    assert (kept["step"], kept["exit_code"], kept["shares"], kept["windows"]) == (0, None, {"data": 0.25}, [])
    largest = as_dict(wire.ConfigStatus(version=2**63))
    assert largest["version"] == 2**63


def test_what_a_newer_version_has_added_is_left_alone() -> None:
    unknown = b"\xfa\x3f\x03abc"  # field 1023, text
    assert wire.BeatRequest.FromString(wire.BeatRequest(node_id="a").SerializeToString() + unknown).node_id == "a"


def test_fields_keep_their_numbers_for_good() -> None:
    """What was released is never changed: add a field to this list, and change none of it."""
    numbers = {each.name: each.number for each in wire.DESCRIPTOR.message_types_by_name["JoinRequest"].fields}
    assert numbers == {
        "protocol": 1,
        "oldest_protocol": 2,
        "job": 3,
        "job_id": 4,
        "epoch": 5,
        "node": 6,
        "hardware": 7,
    }
    assert wire.DESCRIPTOR.package == "elastic_ext.v1"


@pytest.fixture(scope="module")
def python_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def installed(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0 and "No matching distribution" in done.stderr:
        pytest.skip(f"not made for this Python: {', '.join(packages)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_stubs_are_what_the_compiler_makes_of_the_proto(python_of_its_own: Path, tmp_path: Path) -> None:
    installed(python_of_its_own, *OLDEST_COMPILER)
    made = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [str(python_of_its_own), "-m", "grpc_tools.protoc", "-I", ".", *made, str(WIRE / "master.proto")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    for name in ("master_pb2.py", "master_pb2.pyi", "master_pb2_grpc.py"):
        assert (tmp_path / WIRE / name).read_text() == (ROOT / WIRE / name).read_text(), "make stubs"


@pytest.mark.slow
def test_a_master_and_its_callers_work_with_the_oldest_runtimes(tmp_path: Path) -> None:
    """All of test_master_service.py with the oldest gRPC and protobuf in front of those that are installed."""
    older = tmp_path / "older"
    installed(Path(sys.executable), "--target", str(older), *OLDEST)
    code = "import grpc, google.protobuf as found; print(grpc.__version__, found.__version__)"
    environment = {**os.environ, "PYTHONPATH": f"{older}{os.pathsep}{ROOT}"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() == ["1.62.3", "4.25.0"], told.stderr
    files = ["tests/test_master_service.py", "tests/test_master_wire.py", "tests/test_master_process.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
