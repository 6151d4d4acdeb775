"""The client of a master: addresses, tokens, certificates, and what its refusals become, with real servers."""

from __future__ import annotations

import pickle
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from elastic_ext.errors import (
    MasterAbsent,
    MasterBusy,
    MasterError,
    MasterRefused,
    NodeFenced,
    NodeUnknown,
)
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.credentials import make_token, read_token
from elastic_ext.master.wire import master_pb2 as pb
from tests.support.certificates import Certificate, certificate_in
from tests.support.ports import free_port
from tests.support.scripted_master import Refusal, ScriptedMaster

TOKEN = "a-token-of-enough-length"


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("node-1:29600", "node-1", 29600, "dns:///node-1:29600"),
        ("node_1.cluster.local:1", "node_1.cluster.local", 1, "dns:///node_1.cluster.local:1"),
        ("10.0.0.1:65535", "10.0.0.1", 65535, "ipv4:10.0.0.1:65535"),
        ("[::1]:29600", "::1", 29600, "ipv6:[::1]:29600"),
    ],
)
def test_an_address_is_a_host_and_a_port_and_is_written_as_it_was_read(
    text: str, host: str, port: int, target: str
) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address), address.target) == (host, port, text, target)


@pytest.mark.parametrize(
    "text",
    [
        "", "node", "node:", ":1", "node:0", "node:65536", "node:-1", "node:1.0", "node:٣", "::1:29600", "[node]:1",
        "unix:/tmp/x:1", "dns:///a:1", "a b:1", "http://a:1", "[::1]", "a\n:1", "x" * 300 + ":1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: .*HOST:PORT"):
        Address.parse(text)


# ---- tokens ----


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_token_that_was_made_can_be_read_by_its_owner_alone_and_is_never_made_over(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    assert len(read_token(tmp_path / "token")) >= 32
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_token(tmp_path / "token")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o660, 0o604, 0o602])
def test_a_token_that_others_may_read_or_write_is_refused_with_the_command_that_helps(
    tmp_path: Path, mode: int
) -> None:
    with pytest.raises(ValueError, match=rf"mode {mode:04o}.*allowed: 0600 or 0400; do: chmod 600"):
        read_token(written(tmp_path / "token", TOKEN.encode(), mode))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"x" * 15, "has 15 characters"),
        (b"x" * 4097, "more than a token"),
        (b"first-line-of-it\nsecond-line-of-it\n", "characters that no token has"),
        (b"with a blank in between", "characters that no token has"),
        ("gr\u00f6\u00dfe-of-sixteen-and-more".encode(), "characters that no token has"),
        (b"\x00" * 20, "characters that no token has"),
    ],
)
def test_what_is_no_token_is_refused_and_the_words_do_not_hold_it(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_token(written(tmp_path / "token", data))
    assert not data.strip() or data.decode() not in str(refused.value)


def test_a_token_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_token(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_token(tmp_path)


def test_a_token_may_end_in_a_line_break_of_any_kind_and_be_read_only(tmp_path: Path) -> None:
    assert read_token(written(tmp_path / "a", TOKEN.encode() + b"\r\n", 0o400)) == TOKEN


# ---- calls ----


def test_a_call_is_answered_and_holds_the_token(tmp_path: Path) -> None:
    token_file = written(tmp_path / "token", TOKEN.encode())
    with ScriptedMaster(token=TOKEN) as master, MasterClient(master.place_with(token_file=token_file)) as client:
        assert client.status().job == "job"
    with ScriptedMaster(token=TOKEN) as master, MasterClient(master.place) as client:
        with pytest.raises(MasterRefused, match="the token is missing") as refused:
            client.status()
        assert refused.value.about == "token"


@pytest.mark.parametrize(
    ("code", "kind", "about"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, MasterRefused, "token"),
        (grpc.StatusCode.FAILED_PRECONDITION, MasterRefused, "place"),
        (grpc.StatusCode.INVALID_ARGUMENT, MasterRefused, "words"),
        (grpc.StatusCode.ABORTED, NodeFenced, "place"),
        (grpc.StatusCode.NOT_FOUND, NodeUnknown, None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, MasterBusy, None),
        (grpc.StatusCode.UNAVAILABLE, MasterAbsent, None),
        (grpc.StatusCode.UNIMPLEMENTED, MasterAbsent, None),
        (grpc.StatusCode.INTERNAL, MasterError, None),
    ],
)
def test_each_refusal_becomes_its_error_with_the_words_of_the_master(
    code: grpc.StatusCode, kind: type[MasterError], about: str | None
) -> None:
    with ScriptedMaster() as master, MasterClient(master.place) as client:
        master.answers["Beat"] = Refusal(code, "a sentence\nof its own")
        with pytest.raises(MasterError, match="a sentence of its own") as raised:
            client.beat(pb.BeatRequest())
        assert type(raised.value) is kind
        assert getattr(raised.value, "about", None) == about
        assert pickle.loads(pickle.dumps(raised.value)).args == raised.value.args


def test_a_message_that_is_too_large_is_refused_and_not_to_be_sent_again() -> None:
    with ScriptedMaster() as master, MasterClient(master.place) as client:
        with pytest.raises(MasterRefused, match=r"has 52428\d\d bytes; allowed: 4194304") as refused:
            client.report_pairs("x" * (5 << 20))
        assert refused.value.about == "words" and not master.called["ReportPairs"]
        master.answers["GetStatus"] = lambda request: pb.JobStatus(job="x" * (65 << 20))
        with pytest.raises(MasterError, match=r"the answer of the master at .* is too large") as raised:
            client.status()
        assert type(raised.value) is MasterError


def test_nobody_at_the_address_is_said_with_the_cause() -> None:
    place = MasterPlace(address=Address(host="127.0.0.1", port=free_port()))
    with (
        MasterClient(place) as client,
        pytest.raises(MasterAbsent, match=r"^no master answers at .*: Connection refused"),
    ):
        client.status()


def test_who_takes_connections_and_never_answers_is_absent_once_the_time_is_over() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        place = MasterPlace(address=Address(host="127.0.0.1", port=deaf.getsockname()[1]))
        with MasterClient(place) as client, pytest.raises(MasterAbsent):
            client.beat(pb.BeatRequest(), timeout_seconds=0.3)


def test_a_master_of_another_protocol_is_refused_by_the_client() -> None:
    with ScriptedMaster() as master, MasterClient(master.place) as client:
        master.answers["Join"] = lambda request: pb.JoinReply(protocol=2)
        with pytest.raises(MasterRefused, match="speaks protocol 2; allowed: 1 to 1"):
            client.join(pb.JoinRequest())


def test_a_stream_ends_from_either_side() -> None:
    with ScriptedMaster() as master, MasterClient(master.place) as client:
        master.configs = [(1, "one")]
        stream = client.watch(pb.WatchRequest())
        pushes = iter(stream)
        assert next(pushes).text == "one"
        master.push(2, "two")
        assert next(pushes).text == "two"
        stream.close()
        with pytest.raises(MasterAbsent, match="was closed"):
            next(pushes)
        again = iter(client.watch(pb.WatchRequest(config_version=1)))
        master.wait_for("Watch", lambda request: request.config_version == 1)
        master.end_streams()
        assert list(again) == []


def test_a_connection_that_is_closed_says_so() -> None:
    with ScriptedMaster() as master:
        client = MasterClient(master.place)
        client.close()
        with pytest.raises(MasterAbsent, match="was closed"):
            client.status()
        with pytest.raises(MasterAbsent, match="was closed"):
            client.watch(pb.WatchRequest())


def test_a_master_that_comes_back_is_found_by_the_same_client() -> None:
    with ScriptedMaster() as master:
        client, port = MasterClient(master.place), master.port
        assert client.status().job == "job"
    with pytest.raises(MasterAbsent):
        client.status()
    with ScriptedMaster(port=port):
        while True:  # gRPC waits a little between two tries
            try:
                assert client.status().job == "job"
                break
            except MasterAbsent:
                continue
    client.close()


# ---- certificates ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate of 127.0.0.1 and its key."""
    return certificate_in(tmp_path_factory.mktemp("tls"))


def test_a_master_with_a_certificate_is_spoken_to_by_those_who_can_check_it_alone(
    certificate: Certificate, tmp_path: Path
) -> None:
    cert, key = certificate
    with ScriptedMaster(credentials=grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])) as master:
        with MasterClient(master.place_with(ca_file=cert)) as client:
            assert client.status().job == "job"
        with MasterClient(master.place) as client, pytest.raises(MasterAbsent):
            client.status()
    with (
        ScriptedMaster() as plain,
        MasterClient(plain.place_with(ca_file=cert)) as client,
        pytest.raises(MasterAbsent),
    ):
        client.status()


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        with pytest.raises(ValueError, match="holds no certificate"):
            MasterClient(master.place_with(ca_file=written(tmp_path / "ca", b"text")))
        with pytest.raises(ValueError, match="No such file"):
            MasterClient(master.place_with(ca_file=tmp_path / "none"))


def test_the_command_line_loads_no_grpc_and_no_torch_before_it_is_asked_for_a_master() -> None:
    code = "import sys, elastic_ext.cli; assert not {'grpc', 'torch', 'google.protobuf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
