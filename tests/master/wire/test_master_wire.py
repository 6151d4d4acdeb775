"""The master's messages: as plain values and back, made from master.proto, loaded by every supported protobuf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from elastic_ext.master.node_metrics import fitting_window
from elastic_ext.master.wire import as_dict, window_message, window_record
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.records.metrics import StepWindow

ROOT = Path(__file__).resolve().parents[3]
WIRE = Path("elastic_ext/master/wire")
PINNED = Path(__file__).with_name("wire_v1.json")
"""What is on the wire for good. Lines are added to it, and none of them is ever changed or taken out.

Before anything was released two were: Worker.num_not_finite and num_skipped, now entries of Worker.metrics. Their
numbers stay reserved.
"""
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


def test_a_window_that_is_none_does_not_count() -> None:
    for changed in ({"begin": float("nan")}, {"seconds": {"data": float("inf")}}, {"step_seconds": [-1.0]}):
        message = window_message(WINDOW)
        for name, value in changed.items():
            if isinstance(value, dict):
                getattr(message, name).update(value)
            elif isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        assert fitting_window(message, WINDOW.rank) is None


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


# ---- what is said stays what it means ----


def said(proto: descriptor_pb2.FileDescriptorProto) -> dict[str, str]:
    """Every field and method of a .proto file, each in words that say all that others rely on."""
    prefix = f".{proto.package}."
    found: dict[str, str] = {}
    for message in proto.message_type:
        entries = {f"{prefix}{message.name}.{each.name}": each for each in message.nested_type}
        for field in message.field:
            kind = kind_of(field, prefix)
            if (entry := entries.get(field.type_name)) is not None:
                kind = f"map<{', '.join(kind_of(each, prefix) for each in entry.field)}>"
            elif field.label == field.LABEL_REPEATED:
                kind = f"repeated {kind}"
            elif field.proto3_optional:
                kind = f"optional {kind}"
            found[f"{message.name}.{field.name}"] = f"{field.number} {kind}"
    for service in proto.service:
        for method in service.method:
            asked, answered = (name.removeprefix(prefix) for name in (method.input_type, method.output_type))
            streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
            found[f"service {service.name}.{method.name}"] = f"{streams[0]}{asked} -> {streams[1]}{answered}"
    return found


def kind_of(field: descriptor_pb2.FieldDescriptorProto, prefix: str) -> str:
    if field.type_name:
        return str(field.type_name).removeprefix(prefix)
    return str(descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def wire_faults(pinned: dict[str, str], now: dict[str, str]) -> list[str]:
    """What of ``pinned`` is no longer so, and what is not pinned yet."""
    faults = [
        f"{name} was {was!r} and is {now.get(name, 'gone')!r}: others rely on it; give what is new a number of its own"
        for name, was in pinned.items()
        if now.get(name) != was
    ]
    new = [f'"{name}": "{kind}",' for name, kind in now.items() if name not in pinned]
    return faults + [f"add this line to {PINNED.name}, in its place by the alphabet: {line}" for line in new]


def test_what_was_said_on_the_wire_keeps_its_meaning_for_good_and_what_is_new_is_pinned() -> None:
    proto = descriptor_pb2.FileDescriptorProto()
    wire.DESCRIPTOR.CopyToProto(proto)
    assert proto.package == "elastic_ext.v1"
    pinned = json.loads(PINNED.read_text())
    faults = wire_faults(pinned, said(proto))
    assert not faults, "\n" + "\n".join(faults)
    lines = PINNED.read_text().splitlines()[1:-1]
    assert lines == sorted(lines) and len(lines) == len(pinned), "a line for each, sorted, so that additions merge"


def test_a_field_that_is_changed_moved_or_taken_away_is_found() -> None:
    proto = descriptor_pb2.FileDescriptorProto()
    wire.DESCRIPTOR.CopyToProto(proto)
    now = said(proto)
    assert now["Worker.step"] == "6 optional uint64" and now["Worker.shares"] == "19 map<string, double>"
    assert now["JobStatus.nodes"] == "7 repeated NodeStatus"
    assert now["service Master.Watch"] == "WatchRequest -> stream ConfigPush"
    for changed in ({**now, "Worker.step": "6 optional int64"}, {**now, "Worker.step": "60 optional uint64"}):
        assert "Worker.step was '6 optional uint64'" in wire_faults(now, changed)[0]
    without = {name: kind for name, kind in now.items() if name != "Worker.step"}
    assert "is 'gone'" in wire_faults(now, without)[0]
    assert wire_faults(without, now) == [
        'add this line to wire_v1.json, in its place by the alphabet: "Worker.step": "6 optional uint64",'
    ]


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
    files = [
        "tests/master/test_master_service.py",
        "tests/master/wire/test_master_wire.py",
        "tests/master/test_master_process.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
