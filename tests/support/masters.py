"""Masters for tests that talk to them over gRPC: on a thread of the test, or in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from elastic_ext.master.arguments import parse
from elastic_ext.master.process import serve
from elastic_ext.master.tuning import TunerFactory
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire.master_pb2_grpc import MasterStub

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-tests-alone"
_DEADLINE = 20.0


class Reached:
    """A master at an address of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN + "\n")
        self._channels: list[grpc.Channel] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """What all masters of tests are given."""
        files = ["--state-dir", str(self.folder / "state"), "--token-file", str(self.token_file)]
        return ["--port", str(self.port), "--port-file", str(self.folder / "port"), *files]

    def channel(self) -> Any:
        """A connection of its own."""
        channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._channels.append(channel)
        return channel

    def caller(self, token: str | None = TOKEN, *, is_connected: bool = False) -> Caller:
        """Somebody who calls it; who is connected knows how many calls may be under way, and has others wait."""
        channel = self.channel()
        if is_connected:
            grpc.channel_ready_future(channel).result(_DEADLINE)
        return Caller(channel, token)

    def disconnect(self) -> None:
        for channel in self._channels:
            channel.close()


class MasterThread(Reached):
    """A master on a thread of this process."""

    def __init__(self, folder: Path, *options: str, tuner: TunerFactory | None = None) -> None:
        super().__init__(folder)
        self._tuner = tuner
        self._options = parse([*self.arguments, *options])
        self._told: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        port_file = self.folder / "port"
        until(lambda: port_file.exists() or not self._thread.is_alive())
        self.port = int(port_file.read_text())

    def end(self) -> None:
        """As SIGTERM does."""
        loop, has_to_end = self._told.result(_DEADLINE)
        if not self._thread.is_alive():
            return
        loop.call_soon_threadsafe(has_to_end.set)
        self._thread.join(_DEADLINE)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        has_to_end = asyncio.Event()
        self._told.set_result((asyncio.get_running_loop(), has_to_end))
        await serve(self._options, has_to_end, tuner=self._tuner)


class MasterProcess(Reached):
    """A master in a process of its own; ``start`` begins it again, where it was."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self.options = options
        self.log = folder / "master.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **given: Any) -> MasterProcess:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "elastic_ext.master", *self.arguments, *self.options]
            self.process = subprocess.Popen(command, stderr=log, cwd=ROOT, **given)
        until(lambda: port_file.exists() or (self.process is not None and self.process.poll() is not None))
        assert self.process.poll() is None, self.log.read_text()
        self.port = int(port_file.read_text())
        return self

    def kill(self) -> None:
        """End it as SIGKILL does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.disconnect()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_DEADLINE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise


class Caller:
    """Somebody with a connection and, as a rule, the token."""

    def __init__(self, channel: Any, token: str | None) -> None:
        self._stub: Any = MasterStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def __call__(self, method: str, request: Any = None, *, timeout: float = _DEADLINE) -> Any:
        """The answer; grpc.RpcError where there is none."""
        asked = getattr(wire, f"{method}Request")() if request is None else request
        return getattr(self._stub, method)(asked, metadata=self._metadata, timeout=timeout)

    def future(self, method: str, request: Any, *, timeout: float = _DEADLINE) -> Any:
        """The answer to come."""
        return getattr(self._stub, method).future(request, metadata=self._metadata, timeout=timeout)

    def refusal(self, method: str, request: Any = None) -> tuple[grpc.StatusCode, str]:
        """With what status and words a call ends that must not be answered."""
        try:
            answer = self(method, request)
            if hasattr(answer, "__iter__"):
                answer = list(answer)
        except grpc.RpcError as error:
            return error.code(), str(error.details())
        raise AssertionError(f"it was answered: {answer}")

    def join(self, node_id: str = "a", incarnation: int = 1, **given: Any) -> wire.JoinReply:
        answer: wire.JoinReply = self("Join", join_request(node_id, incarnation, **given))
        return answer

    def beat(self, node_id: str = "a", incarnation: int = 1, **given: Any) -> wire.BeatReply:
        answer: wire.BeatReply = self("Beat", wire.BeatRequest(node_id=node_id, incarnation=incarnation, **given))
        return answer

    def set(self, rate: float, **given: Any) -> wire.ConfigWritten:
        changes = {"optimizer.learning_rate": str(rate)}
        answer: wire.ConfigWritten = self("SetConfig", wire.SetConfigRequest(changes=changes, **given))
        return answer

    def watch(self, node_id: str = "a", incarnation: int = 1, **given: Any) -> Listening:
        request = wire.WatchRequest(node_id=node_id, incarnation=incarnation, **given)
        return Listening(self("Watch", request, timeout=600.0))

    def status(self, **given: Any) -> wire.JobStatus:
        answer: wire.JobStatus = self("GetStatus", wire.GetStatusRequest(**given))
        return answer

    def states(self) -> dict[str, str]:
        """What the nodes' states are."""
        return {each.node.node_id: each.state for each in self.status().nodes}


class Listening:
    """A stream that is read by a thread."""

    def __init__(self, stream: Any) -> None:
        self.heard: list[Any] = []
        self.end: tuple[grpc.StatusCode, str] | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for each in self._stream:
                self.heard.append(each)
        except grpc.RpcError as error:
            self.end = error.code(), str(error.details())
        else:
            self.end = grpc.StatusCode.OK, ""

    def cancel(self) -> None:
        self._stream.cancel()
        self._thread.join(_DEADLINE)


def join_request(node_id: str = "a", incarnation: int = 1, *, agent_id: str = "", **given: Any) -> wire.JoinRequest:
    """As an agent of this version sends it."""
    node = wire.Node(
        node_id=node_id,
        incarnation=incarnation,
        host="h",
        pid=7,
        library="1",
        started_at=float(incarnation),
        agent_id=agent_id,
    )
    arguments = {"protocol": 1, "oldest_protocol": 1, "job": "j", **given}
    return wire.JoinRequest(node=node, **arguments)


def until(is_so: Callable[[], Any], seconds: float = _DEADLINE) -> Any:
    """What ``is_so`` gives, once that is something."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it never came"
        threading.Event().wait(0.05)  # a master answers a caller so many times a second and no more
    return found


def master_on_thread(folder: Path, *options: str, tuner: TunerFactory | None = None) -> Iterator[MasterThread]:
    """For a fixture: a master that has started, ended with the test."""
    master = MasterThread(folder, *options, tuner=tuner)
    master.start()
    try:
        yield master
    finally:
        master.disconnect()
        master.end()


def master_in_process(folder: Path, *options: str) -> Iterator[MasterProcess]:
    """The same in a process of its own."""
    master = MasterProcess(folder, *options)
    try:
        yield master.start()
    finally:
        master.close()
