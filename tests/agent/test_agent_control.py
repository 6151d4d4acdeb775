"""The socket of an agent: what is answered, what is refused, and that nothing that comes in ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ext.agent.control import (
    MOST_ANSWER_BYTES,
    MOST_REQUEST_BYTES,
    AgentAbsent,
    AgentFailed,
    AgentRefused,
    AgentSilent,
    Control,
    ControlError,
    ask,
)
from elastic_ext.errors import ElasticError

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 240.0
texts = st.text(st.characters(codec="utf-8"), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


def fail(error: Exception) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def handler(request: dict[str, Any]) -> dict[str, Any]:
        raise error

    return handler


HANDLERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "echo": lambda request: {"request": request},
    "long": lambda request: {"text": "x" * request["length"]},
    "refuse": fail(ValueError("x is 1; allowed: 2")),
    "fail": fail(OSError(28, "No space left on device", "/f")),
    "elastic": fail(ElasticError("lost")),
    "bug": fail(KeyError("x")),
    "no json": lambda request: {"x": object()},
}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    with Control(tmp_path / "socket", HANDLERS) as opened:
        yield opened
        assert is_well(opened.path)


def is_well(path: Path) -> bool:
    return ask(path, {"do": "echo"}, timeout_seconds=END_SECONDS) == {"request": {"do": "echo"}}


def connected(path: Path) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(END_SECONDS)
    end.connect(str(path))
    return end


def exchange(path: Path, data: bytes) -> bytes:
    """All that comes back for ``data``, after which nothing more is sent."""
    with connected(path) as end:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)
        return everything(end)


def everything(end: socket.socket) -> bytes:
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := end.recv(1 << 16):
            heard += piece
    return heard


# ---- questions and answers ----


@given(request_=st.dictionaries(texts, json_values, max_size=4))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_is_answered_by_the_handler_of_its_name(control: Control, request_: dict[str, Any]) -> None:
    request = request_ | {"do": "echo"}
    assert ask(control.path, request) == {"request": request}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("refuse", AgentRefused, "^x is 1; allowed: 2$"),
        ("fail", AgentFailed, r"^No space left on device \(/f\)$"),
        ("elastic", AgentFailed, "lost"),
        ("bug", AgentFailed, r"^KeyError: 'x' \(the agent's log says more\)$"),
        ("no json", AgentFailed, "not JSON serializable"),
        ("other", AgentRefused, '^do is "other"; allowed: one of bug, echo, elastic, fail, long, no json, refuse$'),
    ],
)
def test_what_a_handler_raises_travels_in_words(
    control: Control, name: str, kind: type[ControlError], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(kind, match=words):
        ask(control.path, {"do": name})
    assert bool(caplog.records) == (name in ("bug", "no json"))


def test_an_answer_may_be_long_and_one_that_is_too_long_is_an_error_in_words(control: Control) -> None:
    length = MOST_ANSWER_BYTES - len('{"text": ""}\n')
    assert len(ask(control.path, {"do": "long", "length": length})["text"]) == length
    with pytest.raises(AgentFailed, match=f"the answer has {MOST_ANSWER_BYTES + 1} bytes"):
        ask(control.path, {"do": "long", "length": length + 1})


def test_a_request_may_be_long_and_one_that_is_too_long_is_refused_at_both_ends(control: Control) -> None:
    length = MOST_REQUEST_BYTES - len('{"do": "echo", "x": ""}\n')
    assert ask(control.path, {"do": "echo", "x": "y" * length})["request"]["x"] == "y" * length
    with pytest.raises(ValueError, match=f"allowed: at most {MOST_REQUEST_BYTES}"):
        ask(control.path, {"do": "echo", "x": "y" * (length + 1)})
    for data in (b"x" * (MOST_REQUEST_BYTES + 2), b"x" * (MOST_REQUEST_BYTES + 2) + b"\n", b"x" * (1 << 20)):
        assert "the request is too long" in json.loads(exchange(control.path, data))["refused"]


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b"null", b"\xff", b"[" * 60_000, b"9" * 60_000, b'{"do": "echo"} {}', b'{"do": "echo"'],
)
def test_a_line_that_is_no_object_is_refused(control: Control, line: bytes) -> None:
    assert "the request is not a JSON object" in json.loads(exchange(control.path, line + b"\n"))["refused"]


@pytest.mark.parametrize("do", [None, 1, [], {}, "", "Echo", "\ud800"])
def test_a_request_that_asks_for_nothing_known_is_refused(control: Control, do: object) -> None:
    with pytest.raises(AgentRefused, match="allowed: one of bug"):
        ask(control.path, {"do": do})
    with pytest.raises(AgentRefused, match="do is null; allowed"):
        ask(control.path, {})


def test_a_request_in_single_bytes_is_put_together_and_what_follows_it_is_not_heard(control: Control) -> None:
    with connected(control.path) as end:
        for byte in b'{"do": "echo"}\n{"do": "bug"}\n':
            with contextlib.suppress(BrokenPipeError):
                end.send(bytes([byte]))
        assert json.loads(everything(end)) == {"request": {"do": "echo"}}


# ---- whatever comes in ----


@given(
    data=st.binary(max_size=200)
    | st.builds(lambda value: json.dumps(value).encode() + b"\n", json_values)
    | st.builds(lambda n, end: b"[" * n + b"]" * n + end, st.integers(0, 2000), st.sampled_from([b"", b"\n"])),
    drops=st.booleans(),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_comes_in_ends_it(control: Control, data: bytes, drops: bool) -> None:
    if drops:
        with connected(control.path) as end, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.sendall(data)
    else:
        heard = exchange(control.path, data)
        assert bool(heard) == (b"\n" in data)
        assert not heard or isinstance(json.loads(heard), dict)
    assert control.is_alive


def test_one_who_goes_before_taking_a_long_answer_harms_nobody(control: Control) -> None:
    for _ in range(5):
        with connected(control.path) as end:
            end.sendall(b'{"do": "long", "length": 1000000}\n')
            assert end.recv(10)
    assert is_well(control.path)


def test_those_who_never_end_are_dropped_and_others_wait_until_there_is_room(tmp_path: Path) -> None:
    with Control(tmp_path / "socket", HANDLERS, patience_seconds=1.0, most_connections=3) as control:
        slow = [connected(control.path) for _ in range(3)]
        for end in slow:
            end.sendall(b'{"do": ')
        assert is_well(control.path)  # it was let in once these were not
        for end in slow:
            assert everything(end) == b""
            end.close()
        deaf = [connected(control.path) for _ in range(3)]
        for end in deaf:
            end.sendall(b'{"do": "long", "length": 4000000}\n')
        assert is_well(control.path)
        for end in deaf:
            assert 0 < len(everything(end)) < 4_000_000
            end.close()


def test_many_who_ask_at_once_are_all_answered(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    with Control(tmp_path / "socket", HANDLERS, most_connections=2) as control:
        threads = [
            threading.Thread(target=lambda n=n: answers.append(ask(control.path, {"do": "echo", "n": n})))
            for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(END_SECONDS)
    assert sorted(answer["request"]["n"] for answer in answers) == list(range(30))


def test_while_a_handler_works_others_wait_and_are_not_dropped_for_that(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(request: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert go_on.wait(END_SECONDS)
        return {}

    with Control(tmp_path / "socket", {**HANDLERS, "wait": wait}, patience_seconds=2.0) as control:
        with connected(control.path) as early, connected(control.path) as waiting:
            early.sendall(b'{"do": "ec')
            waiting.sendall(b'{"do": "wait"}\n')
            assert entered.wait(END_SECONDS)
            assert not go_on.wait(2.1)  # longer than anybody is waited for
            early.sendall(b'ho"}\n')
            go_on.set()
            assert json.loads(everything(early)) == {"request": {"do": "echo"}}
            assert json.loads(everything(waiting)) == {}
        assert is_well(control.path)


def test_when_no_more_files_can_be_opened_those_who_ask_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Control(tmp_path / "socket", HANDLERS) as control, contextlib.ExitStack() as undo:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.callback(end.close)
        end.settimeout(END_SECONDS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (end.fileno() + 1, hard))
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with caplog.at_level(logging.WARNING):
            end.connect(str(control.path))
            end.sendall(b'{"do": "echo"}\n')
            deadline = time.monotonic() + END_SECONDS
            while not caplog.records:
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            threading.Event().wait(0.5)  # it is tried again meanwhile
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert json.loads(everything(end)) == {"request": {"do": "echo"}}
        (record,) = caplog.records
        assert "Too many open files" in record.getMessage()


# ---- who may ask ----


def test_the_socket_is_its_owners_alone(control: Control) -> None:
    assert stat.S_IMODE(control.path.stat().st_mode) == 0o600


def test_a_process_of_another_user_is_refused(tmp_path: Path) -> None:
    with Control(tmp_path / "socket", HANDLERS, uid=os.getuid() + 1) as control:
        with pytest.raises(AgentRefused, match=f"answers processes of user {os.getuid() + 1} alone"):
            ask(control.path, {"do": "echo"})
        assert control.is_alive


# ---- where it is ----


def test_a_path_that_is_longer_than_an_address_is_reached_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    with Control(folder / "socket", HANDLERS) as control:
        assert is_well(control.path) and stat.S_ISSOCK(control.path.stat().st_mode)
    assert os.listdir(folder) == []


def test_a_name_that_no_address_can_hold_is_refused_with_what_may_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the socket's name x+ is too long; allowed: at most \d+ bytes"):
        Control(tmp_path / ("x" * 120), HANDLERS).start()
    with pytest.raises(ValueError, match="is too long"):
        ask(tmp_path / ("x" * 120), {"do": "echo"})
    assert os.listdir(tmp_path) == []


def test_what_a_killed_agent_has_left_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    with pytest.raises(AgentAbsent, match="no agent listens at"):
        ask(path, {"do": "echo"})
    with Control(path, HANDLERS):
        assert is_well(path)
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="something else than a socket"):
        Control(path, HANDLERS).start()
    assert path.read_bytes() == b"mine"


def test_closing_takes_the_socket_away_unless_it_is_anothers_by_now_and_leaves_no_thread_or_file(
    tmp_path: Path,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        control = Control(tmp_path / "socket", HANDLERS)
        control.start()
        end = connected(control.path)
        assert is_well(control.path)
        control.close()
        control.close()
        assert everything(end) == b"" and not control.is_alive
        end.close()
    assert os.listdir(tmp_path) == [] and set(os.listdir("/proc/self/fd")) == before
    one, other = Control(tmp_path / "socket", HANDLERS), Control(tmp_path / "socket", HANDLERS)
    one.start()
    other.start()
    one.close()
    assert is_well(other.path)
    other.close()


# ---- who asks in vain ----


def test_where_nobody_listens_the_one_who_asks_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "socket", tmp_path / "file", tmp_path / "file" / "socket"):
        with pytest.raises(AgentAbsent, match=f"no agent listens at {path}"):
            ask(path, {"do": "echo"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed the connection without an answer"),
        (b"{}", "is no agent of this library, or was cut short"),
        (b"hello\n", 'cut short: "hello'),
        (b"[]\n", "is no agent"),
        (b"[" * 100_000 + b"\n", "is no agent"),
        (b"x" * (MOST_ANSWER_BYTES + 100), "is no agent"),
    ],
)
def test_an_answer_that_is_none_is_said_to_be(tmp_path: Path, answer: bytes, words: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()

        def answer_once() -> None:
            accepted, _ = listener.accept()
            with accepted, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                accepted.recv(1000)
                accepted.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(AgentSilent, match=words):
            ask(tmp_path / "socket", {"do": "echo"}, timeout_seconds=END_SECONDS)
        thread.join(END_SECONDS)


@pytest.mark.parametrize("backlog", [0, 5])
def test_an_agent_that_does_not_answer_is_waited_for_so_long_and_no_longer(tmp_path: Path, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, contextlib.ExitStack() as undo:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(backlog)
        if backlog == 0:  # one more waits than that; the next does not even get so far
            undo.enter_context(connected(tmp_path / "socket"))
        with pytest.raises(AgentSilent, match=r"has not answered within 0\.1 seconds"):
            ask(tmp_path / "socket", {"do": "echo"}, timeout_seconds=0.1)


def test_asking_imports_nothing_heavy() -> None:
    script = (
        "import sys, elastic_ext.agent.control, elastic_ext.agent.control, elastic_ext.agent.config_writer\n"
        "heavy = {'torch', 'numpy', 'grpc', 'watchdog', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY, timeout=END_SECONDS)
