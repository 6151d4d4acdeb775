"""elastic-run with a master that is encrypted, keeps bad machines out or has a full disk; nodes of one job with one."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.cli import main
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import MasterError
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.records.agent import MASTER_FILE, MasterRecord
from tests.support.certificates import certificate_in
from tests.support.masters import MasterProcess, master_in_process
from tests.support.nodes import FORKING_RUN, Node, last_step, nodes, until
from tests.support.ports import free_port

WAITS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "began").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""
TIMES = ("--beat-seconds", "0.5", "--lease-seconds", "3", "--job", "job")
LOST = "GPU is lost (as tests have it)"
GPU_IS_LOST = f"""
class NVMLError(Exception): ...
class NVMLError_LibraryNotFound(NVMLError): ...
class NVMLError_DriverNotLoaded(NVMLError): ...
def nvmlInit():
    raise NVMLError({LOST!r})
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """A worker that waits until there is a file `go`."""
    (tmp_path / "waits.py").write_text(WAITS)
    return ["--nproc-per-node=1", str(tmp_path / "waits.py"), str(tmp_path)]


@pytest.fixture
def of_master(tmp_path: Path) -> Path:
    folder = tmp_path / "of-master"
    folder.mkdir()
    return folder


@pytest.fixture
def master(of_master: Path) -> Iterator[MasterProcess]:
    yield from master_in_process(of_master, *TIMES)


def place_of(master: MasterProcess) -> MasterPlace:
    return MasterPlace(address=Address(host="127.0.0.1", port=master.port), token_file=master.token_file)


def ways(master: MasterProcess) -> list[str]:
    return ["--master", master.address, "--token-file", str(master.token_file)]


def version_in(node: Node) -> int:
    file = node.run_dir / "config.json"
    return ElasticConfig.parse(file.read_bytes()).version if file.exists() else 0


def in_force(node: Node, version: int) -> bool:
    """Whether the rank of this node has told that the version is in force."""
    files = [file.read_text() for file in node.run_dir.glob("events-[0-9]*.jsonl")]
    return bool(files) and all(f"version {version} " in text for text in files)


def test_a_job_with_a_certificate_is_encrypted_from_the_agent_and_from_the_shell(
    of_master: Path, tmp_path: Path, script: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate_in(tmp_path / "tls")
    other = certificate_in(tmp_path / "other").cert
    for master in master_in_process(of_master, *TIMES, "--tls-cert", str(cert), "--tls-key", str(key)):
        made = [
            Node(tmp_path / name, [*ways(master), "--job=job", *ca, *script])
            for name, ca in {
                "knows": ["--master-ca", str(cert)],
                "takes another": ["--master-ca", str(other)],
                "takes none": [],
            }.items()
        ]
        with nodes(*made) as (knows, takes_another, takes_none):
            knows.wait_for("this node has joined")
            record = MasterRecord.from_json(until(lambda: read(knows.run_dir / MASTER_FILE)))
            assert record.ca_file == str(cert) and record.epoch == 1
            until(lambda: (tmp_path / "began").exists() or None)
            assert main(["config", "set", "user.x=1", *ways(master), "--tls-ca", str(cert)]) == 0
            assert "taken by 1 of 1 node" in capsys.readouterr().out
            assert version_in(knows) == 1
            assert main(["status", "--master", str(knows.run_dir)]) == 0, "the run directory knows the certificate"
            assert main(["status", *ways(master), "--tls-ca", str(other)]) == 1
            assert "do not go together" in capsys.readouterr().err
            takes_another.wait_for("do not go together, .* training goes on without it")
            takes_none.wait_for("if it wants TLS, give the file .* training goes on without it")
            (tmp_path / "go").touch()
            assert [node.end() for node in made] == [0, 0, 0]
        log = master.log.read_text()
        assert "Traceback" not in log


def test_a_master_that_keeps_bad_machines_out_ends_their_launch_and_lets_good_ones_in(
    of_master: Path, tmp_path: Path, script: list[str]
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "pynvml.py").write_text(GPU_IS_LOST)
    path = os.pathsep.join([str(tmp_path / "bad"), str(Path(__file__).resolve().parents[3])])
    for master in master_in_process(of_master, *TIMES, "--refuse-bad-nodes"):
        given = [*ways(master), "--job=job", *script]
        bad = Node(tmp_path / "node-bad", given, environ={"PYTHONPATH": path})
        with nodes(bad):
            assert bad.end() == 2, bad.text
        assert LOST in bad.text and "this machine is refused" in bad.text and not (tmp_path / "began").exists()
        with nodes(Node(tmp_path / "node-good", given)) as (good,):
            good.wait_for("this node has joined")
            with MasterClient(place_of(master)) as client:
                kinds = [each.kind for each in client.events()]
                (only,) = client.status().nodes
            assert "node-refused" in kinds and only.state == "live"
            (tmp_path / "go").touch()
            assert good.end() == 0


def test_a_master_whose_disk_is_full_says_so_and_a_node_goes_on_and_hears_of_what_can_be_written_again(
    master: MasterProcess, tmp_path: Path, script: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert master.process is not None
    pid = master.process.pid
    with nodes(Node(tmp_path / "node", [*ways(master), "--job=job", *script])) as (node,):
        node.wait_for("this node has joined")
        until(lambda: (tmp_path / "began").exists() or None)
        assert main(["config", "set", "user.x=1", *ways(master)]) == 0
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # as where nothing more fits
        capsys.readouterr()
        assert main(["config", "set", "user.x=2", *ways(master)]) == 1
        assert "nothing was changed" in capsys.readouterr().err
        with MasterClient(place_of(master)) as client:
            trouble = until(lambda: list(client.status().troubles) or None)
            assert "cannot be written" in trouble[0] and client.status().config.version == 1
            with pytest.raises(MasterError, match="nothing was changed"):
                client.set_config(pb.SetConfigRequest(changes={"user.x": "3"}))
            assert client.status().nodes[0].state == "live" and version_in(node) == 1
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            until(lambda: not client.status().troubles or None)
            assert client.set_config(pb.SetConfigRequest(changes={"user.x": "4"})).version == 2
        until(lambda: version_in(node) == 2 or None)
        (tmp_path / "go").touch()
        assert node.end() == 0, node.text
    assert [kind for kind in node.kinds() if kind.startswith("master-")] == ["master-joined"], "it was never away"


def test_nodes_of_one_job_take_one_config_from_the_master_and_agree_on_it(
    master: MasterProcess, tmp_path: Path
) -> None:
    launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launch += ["--rdzv-id=job", "--rdzv-conf=last_call_timeout=5", "--local-addr=127.0.0.1", "--job=job"]
    job = ["-m", "tests.support.elastic_job", str(tmp_path), "--steps=100000", "--pace=0.05", "--every=100000"]
    given = [*ways(master), *launch, *job]
    made = [Node(tmp_path / f"node-{number}", given, launcher=FORKING_RUN) for number in range(2)]
    with nodes(*made), MasterClient(place_of(master)) as client:
        until(lambda: last_step(tmp_path) > 3 or None)
        status = until(lambda: found if len((found := client.status()).membership.nodes) == 2 else None)
        assert {each.node.agent_id for each in status.nodes} == {each.node_id for each in status.membership.nodes}
        for value in (1, 2):
            version = client.set_config(pb.SetConfigRequest(changes={"user.x": str(value)}, reason="both")).version
            for node in made:
                until(lambda node=node, version=version: in_force(node, version) or None)  # type: ignore[misc]
        texts = {(node.run_dir / "config.json").read_text() for node in made}
        assert len(texts) == 1
        status = until(lambda: found if (found := client.status()).config.num_holding == 2 else None)
        assert (status.config.version, status.config.num_nodes) == (2, 2)
        until(lambda: list(client.status().config.in_force) == [2] or None)
        ranks = sorted(worker.rank for node in status.nodes for worker in node.workers)
        assert ranks == [0, 1] and not [each for each in client.events() if each.kind == "config-conflict"]
        for node in made:
            node.send(signal.SIGTERM)
        assert [node.end() for node in made] == [143, 143]


def read(file: Path) -> str | None:
    return file.read_text() if file.exists() else None
