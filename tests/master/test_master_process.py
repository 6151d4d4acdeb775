"""The process of a master: started, killed, started again, stopped, replaced, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from elastic_ext.master.credentials import make_token
from elastic_ext.master.wire import master_pb2 as wire
from tests.support.masters import ROOT, TOKEN, Caller, MasterProcess, join_request, master_in_process, until


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    yield from master_in_process(tmp_path, "--lease-seconds", "2", "--beat-seconds", "1")


def started(*arguments: str, **given: object) -> subprocess.CompletedProcess[str]:
    """What comes of starting one that should not start."""
    command = [sys.executable, "-m", "elastic_ext.master", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, **given)  # type: ignore[call-overload,no-any-return]


_START_EACH = """
import contextlib, io, json, sys
from elastic_ext.master.__main__ import main
told = []
for arguments in json.loads(sys.stdin.read()):
    err, status = io.StringIO(), 0
    with contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
    told.append([status, err.getvalue()])
print(json.dumps(told))
"""


def started_each(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """The status, and what is written to stderr, of several that should not start, one after another in one process."""
    command = [sys.executable, "-c", _START_EACH]
    asked = json.dumps(commands)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")  # nothing comes beside what Python writes
    return [(status, words) for status, words in json.loads(done.stdout)]


def test_a_master_that_was_killed_goes_on_with_the_job_where_it_was(master: MasterProcess) -> None:
    caller = master.caller()
    first = caller("Join", join_request("a", incarnation=5, agent_id="a-77-x"))
    caller.join("b")
    caller("Leave", wire.LeaveRequest(node_id="b", incarnation=1))
    caller.set(0.1, reason="before")
    number = [each for each in caller("ReadEvents") if each.kind == "config"][-1].number
    until(lambda: rows_of(master, "events") >= number)
    master.kill()
    master.start()
    caller = master.caller()
    status = caller.status()
    assert (status.epoch, status.job, status.job_id, status.config.version) == (2, "j", first.job_id, 1)
    assert caller.states() == {"a": "live", "b": "left"}, "a has its lease to be heard of again"
    assert [each.node.agent_id for each in status.nodes] == ["a-77-x", ""]
    assert caller.refusal("Join", join_request("a", 4))[0] == grpc.StatusCode.ABORTED
    assert caller.beat("a", 5).config_version == 1
    assert caller.set(0.2).version == 2
    assert [each.number for each in caller("ReadEvents")][:number] == list(range(1, number + 1))
    until(lambda: caller.states()["a"] == "lost")


def test_what_was_answered_is_there_after_a_kill_at_any_moment(master: MasterProcess) -> None:
    versions: list[int] = []

    def write() -> None:
        caller = master.caller()
        try:
            while True:
                versions.append(caller.set(0.1 + len(versions)).version)
        except grpc.RpcError:
            return

    for _ in range(3):
        before = len(versions)
        writer = threading.Thread(target=write)
        writer.start()
        until(lambda before=before: len(versions) > before + 5)  # type: ignore[misc]
        master.kill()
        writer.join(20)
        master.start()
        entries = master.caller()("GetConfigs").entries
        assert [each.version for each in entries][: len(versions)] == sorted(versions)
        versions[:] = [each.version for each in entries]  # one that was stored and could not be told of counts as well


def test_an_event_that_was_told_to_a_follower_keeps_its_number_whenever_the_master_is_killed(
    master: MasterProcess,
) -> None:
    caller = master.caller()
    caller.join()
    follower = caller("ReadEvents", wire.ReadEventsRequest(follow=True), timeout=60)
    caller.beat(events=[wire.JobEvent(kind="note", text="heard")])
    heard = next(each for each in follower if each.kind == "note")
    master.kill()
    master.start()
    assert [each.text for each in master.caller()("ReadEvents") if each.number == heard.number] == ["heard"]


def test_one_that_is_stopped_for_longer_than_the_lease_takes_nobody_for_lost(master: MasterProcess) -> None:
    caller = master.caller()
    caller.join()
    assert master.process is not None
    os.kill(master.process.pid, signal.SIGSTOP)
    threading.Event().wait(4.0)  # what is tried takes this long
    os.kill(master.process.pid, signal.SIGCONT)
    assert caller.states()["a"] in ("live", "late")
    assert not [each for each in caller("ReadEvents") if each.kind == "node-lost"]


def test_one_that_another_has_replaced_ends_and_says_so(master: MasterProcess, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "state" / "master.db") as other:  # on storage whose locks were lost
        other.execute("UPDATE meta SET value = '7' WHERE key = 'epoch'")
    assert master.process is not None
    assert master.process.wait(20) == 1
    assert "another process has become the master" in master.log.read_text()


def test_it_ends_in_order_at_a_signal_and_frees_its_folder_and_port(master: MasterProcess) -> None:
    caller = master.caller()
    caller.join()
    stream = caller.watch()
    for number in (signal.SIGTERM, signal.SIGINT):
        assert master.process is not None
        master.process.send_signal(number)
        assert master.process.wait(10) == 0
        master.start()
    assert until(lambda: stream.end)


def test_events_in_a_beat_that_is_answered_while_the_master_ends_are_kept(master: MasterProcess) -> None:
    channel = master.channel()
    caller, may_send = Caller(channel, TOKEN), threading.Event()
    caller.join()
    request = wire.BeatRequest(node_id="a", incarnation=1, events=[wire.JobEvent(kind="note", text="the last word")])

    def messages() -> Iterator[bytes]:
        may_send.wait(20)
        yield request.SerializeToString()

    beat = channel.stream_unary("/elastic_ext.v1.Master/Beat")
    call = beat.future(messages(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=20)
    caller.status()  # on the same connection, so that the call has begun there
    assert master.process is not None
    master.process.send_signal(signal.SIGTERM)
    until(lambda: "the master ends" in texts_of_events(master))
    may_send.set()
    wire.BeatReply.FromString(call.result(20))
    assert master.process.wait(20) == 0
    assert "the last word" in texts_of_events(master)


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    ours, its = os.pipe()
    master = MasterProcess(tmp_path, "--lifeline", str(ours))
    os.set_inheritable(ours, True)
    try:
        master.start(pass_fds=(ours,))
        os.close(its)
        assert master.process is not None and master.process.wait(10) == 0
    finally:
        os.close(ours)
        master.close()


def test_a_second_one_is_refused_the_folder_and_the_port(master: MasterProcess, tmp_path: Path) -> None:
    found = started("--port", "0", "--state-dir", str(tmp_path / "state"))
    assert found.returncode == 2 and "another master has" in found.stderr and "--state-dir" in found.stderr
    found = started("--port", str(master.port), "--state-dir", str(tmp_path / "other"))
    assert found.returncode == 2 and "cannot be listened at: it is taken" in found.stderr
    assert master.caller().status().epoch == 1


def test_a_port_that_something_else_has_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = started("--port", str(other.getsockname()[1]), "--state-dir", str(tmp_path / "state"))
    assert found.returncode == 2 and "it is taken" in found.stderr


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    open_token = tmp_path / "token"
    open_token.write_text("a-token-that-all-can-read\n")
    open_token.chmod(0o644)
    state = ("--port", "0", "--state-dir", str(tmp_path / "state"))
    refused = [
        (("--port", "0"), "--state-dir"),
        ((*state, "--bind", "0.0.0.0"), "give --token-file"),
        ((*state, "--bind", "example.org"), "an address of this machine"),
        ((*state, "--token-file", str(open_token)), "chmod 600"),
        ((*state, "--token-file", str(tmp_path / "none")), "does not exist"),
        ((*state, "--tls-cert", "x"), "both of them, or none"),
        ((*state, "--tls-cert", str(tmp_path / "x"), "--tls-key", str(tmp_path / "x")), "cannot be read"),
        ((*state, "--lease-seconds", "5"), "less than two of --beat-seconds"),
        (("--port", "65536", "--state-dir", "x"), "0 to 65535"),
        ((*state, "--port-file", str(tmp_path / "no" / "such")), "--port-file"),
    ]
    told = started_each([arguments for arguments, _ in refused])
    for (arguments, words), (status, written) in zip(refused, told, strict=True):
        assert status == 2 and words in written, (arguments, written)
        assert "Traceback" not in written and "a-token-that" not in written


def test_prometheus_is_answered_where_that_was_asked_for(tmp_path: Path) -> None:
    for master in master_in_process(tmp_path, "--metrics-port", "0"):
        caller = master.caller()
        caller.join()
        found = until(lambda master=master: re.search(r"at 127.0.0.1:(\d+)/metrics", master.log.read_text()))  # type: ignore[misc]
        address = f"http://127.0.0.1:{found.group(1)}/metrics"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address, timeout=10)
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {TOKEN}"})

        def page(request: urllib.request.Request = request) -> str:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return str(answer.read().decode())

        assert 'elastic_ext_nodes{state="live"} 1' in page() and "elastic_ext_master_joins_total 1" in page()
        assert TOKEN not in page()
        for number in range(17):  # as many ranks as have series, and more
            caller.join(f"gone-{number}")
            caller.beat(f"gone-{number}", workers=[wire.Worker(rank=64 * number + each) for each in range(64)])
        until(lambda page=page: "elastic_ext_ranks 1088\n" in page())  # type: ignore[misc]
        ranks = {int(each) for each in re.findall(r'_rank_running{rank="(\d+)"', page())}
        assert ranks == {*range(1024)} and "elastic_ext_ranks_left_out 64\n" in page()
        for number in range(17):
            caller("Leave", wire.LeaveRequest(node_id=f"gone-{number}", incarnation=1))
        caller.beat(workers=[wire.Worker(rank=0, state="running")])
        until(lambda page=page: 'elastic_ext_rank_running{rank="0",node="a"} 1' in page())  # type: ignore[misc]
        assert "elastic_ext_ranks 1\n" in page() and "elastic_ext_ranks_left_out 0\n" in page()
        taken = started("--port", "0", "--state-dir", str(tmp_path / "other"), "--metrics-port", found.group(1))
        assert taken.returncode == 2 and "--metrics-port 0" in taken.stderr


def test_one_that_others_can_use_says_so_in_its_log(tmp_path: Path) -> None:
    told = {}
    for name, options in {
        "open": ["--bind", "127.0.0.1"],
        "own": ["--bind", "127.0.0.1", "--token-file", str(a_token(tmp_path))],
        "seen": ["--bind", "0.0.0.0", "--token-file", str(tmp_path / "token")],
    }.items():
        port_file, log = tmp_path / f"{name}.port", tmp_path / f"{name}.log"
        given = ["--port", "0", "--port-file", str(port_file), "--state-dir", str(tmp_path / name)]
        command = [sys.executable, "-m", "elastic_ext.master", *given, *options]
        with log.open("wb") as file, subprocess.Popen(command, stderr=file, cwd=ROOT) as process:
            until(lambda port_file=port_file: port_file.exists() or process.poll() is not None)  # type: ignore[misc]
            process.terminate()
            assert process.wait(30) == 0
        told[name] = log.read_text()
    assert "asks for no token: any user of this machine can set the config" in told["open"]
    assert "give --token-file" in told["open"]
    assert "token" not in told["own"] and "TLS" not in told["own"]
    assert "reached at 0.0.0.0 without TLS" in told["seen"] and "give --tls-cert and --tls-key" in told["seen"]


def a_token(folder: Path) -> Path:
    make_token(folder / "token")
    return folder / "token"


def test_its_token_is_nowhere_to_be_seen(master: MasterProcess, tmp_path: Path) -> None:
    caller = master.caller()
    caller.join()
    master.caller("a-wrong-token-of-somebody").refusal("GetStatus")
    assert master.process is not None
    arguments = Path(f"/proc/{master.process.pid}/cmdline").read_bytes()
    environment = Path(f"/proc/{master.process.pid}/environ").read_bytes()
    status = caller.status(num_events=100).SerializeToString()
    log, state = master.log.read_bytes(), b"".join(each.read_bytes() for each in (tmp_path / "state").iterdir())
    for place in (arguments, environment, status, log, state):
        assert b"a-token-of-tests-alone" not in place and b"a-wrong-token" not in place


def test_it_loads_neither_torch_nor_numpy(master: MasterProcess) -> None:
    assert master.process is not None
    loaded = Path(f"/proc/{master.process.pid}/maps").read_text()
    assert "/grpc/" in loaded and "/torch/" not in loaded and "/numpy/" not in loaded


def rows_of(master: MasterProcess, table: str) -> int:
    with sqlite3.connect(master.folder / "state" / "master.db") as found:
        return int(found.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def texts_of_events(master: MasterProcess) -> set[str]:
    """The texts of all events in its store."""
    with sqlite3.connect(master.folder / "state" / "master.db") as found:
        return {json.loads(record)["text"] for (record,) in found.execute("SELECT record FROM events")}
