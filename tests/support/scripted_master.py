"""A master that does what a test tells it to: every call is noted, and answered or refused as scripted."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.master.wire.master_pb2_grpc import MasterServicer, add_MasterServicer_to_server

__all__ = ["Refusal", "ScriptedMaster"]

DEADLINE_SECONDS = 20.0
_END = object()
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


@dataclass(frozen=True)
class Refusal:
    """What a call ends with instead of an answer."""

    code: grpc.StatusCode
    words: str = "because the test wants it"


@dataclass
class _Streams:
    """What is to be sent to those who watch."""

    open: list[queue.Queue[Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class ScriptedMaster(MasterServicer):
    """One that listens at 127.0.0.1 while a ``with`` lasts."""

    def __init__(
        self, *, token: str = "", port: int = 0, credentials: grpc.ServerCredentials | None = None, epoch: int = 1
    ) -> None:
        self.token = token
        self.epoch = epoch
        self.job_id = "job-1"
        self.beat_seconds = 0.05
        self.acknowledge_seconds = 5.0
        self.answers: dict[str, Callable[[Any], Any] | Refusal] = {}
        """By the name of the call: what is done instead of what is done here."""
        self.events: list[pb.JobEvent] = []
        self.configs: list[tuple[int, str]] = []
        self.called: dict[str, list[Any]] = defaultdict(list)
        self._nodes = {""}
        self._more = threading.Condition()
        self._watchers = _Streams()
        self._server = grpc.server(ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0),))
        add_MasterServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        where = f"127.0.0.1:{port}"
        self.port = (
            self._server.add_insecure_port(where)
            if credentials is None
            else self._server.add_secure_port(where, credentials)
        )

    @property
    def place(self) -> MasterPlace:
        return MasterPlace(address=Address(host="127.0.0.1", port=self.port))

    def place_with(self, **given: Path) -> MasterPlace:
        return MasterPlace(address=Address(host="127.0.0.1", port=self.port), **given)

    def __enter__(self) -> ScriptedMaster:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """As if it had been killed."""
        self.end_streams()
        self._server.stop(None).wait(DEADLINE_SECONDS)

    def wait_for(self, name: str, is_it: Callable[[Any], bool] = lambda request: True, *, after: int = 0) -> Any:
        """The first request of that name which is so, of those after the first so many."""
        with self._more:
            found: list[Any] = []

            def has_come() -> bool:
                found[:] = [each for each in self.called[name][after:] if is_it(each)]
                return bool(found)

            assert self._more.wait_for(has_come, DEADLINE_SECONDS), (name, self.called[name][-3:])
            return found[0]

    def push(self, version: int, text: str) -> None:
        """Send a config to all who watch."""
        for each in list(self._watchers.open):
            each.put(pb.ConfigPush(epoch=self.epoch, version=version, text=text))

    def end_streams(self) -> None:
        for each in list(self._watchers.open):
            each.put(_END)

    # ---- calls ----

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        self._nodes.add(request.node.node_id)
        return self._answered("Join", request, context, self._joined)

    def Beat(self, request: pb.BeatRequest, context: grpc.ServicerContext) -> pb.BeatReply:
        if request.node_id not in self._nodes:
            context.abort(grpc.StatusCode.NOT_FOUND, "this node has not joined")
        return self._answered("Beat", request, context, self._beaten)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        return self._answered("Leave", request, context, lambda _: pb.LeaveReply())

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.ConfigPush]:
        sent: queue.Queue[Any] = queue.Queue()
        context.add_callback(lambda: sent.put(_END))
        with self._watchers.lock:
            self._watchers.open.append(sent)
        self._answered("Watch", request, context, lambda _: None)
        for version, text in self.configs:
            if version > request.config_version:
                yield pb.ConfigPush(epoch=self.epoch, version=version, text=text)
        while (each := sent.get()) is not _END:
            yield each
        with self._watchers.lock:
            self._watchers.open.remove(sent)

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        return self._answered("GetStatus", request, context, lambda _: pb.JobStatus(job="job", job_id=self.job_id))

    def ReadEvents(self, request: pb.ReadEventsRequest, context: grpc.ServicerContext) -> Iterator[pb.JobEvent]:
        self._answered("ReadEvents", request, context, lambda _: None)
        found = [each for each in self.events if each.number > request.after]
        yield from found[-request.most :] if request.most else found

    def SetConfig(self, request: pb.SetConfigRequest, context: grpc.ServicerContext) -> pb.ConfigWritten:
        return self._answered("SetConfig", request, context, lambda _: pb.ConfigWritten())

    def UndoConfig(self, request: pb.UndoConfigRequest, context: grpc.ServicerContext) -> pb.ConfigWritten:
        return self._answered("UndoConfig", request, context, lambda _: pb.ConfigWritten())

    def GetConfigs(self, request: pb.GetConfigsRequest, context: grpc.ServicerContext) -> pb.ConfigHistory:
        return self._answered("GetConfigs", request, context, lambda _: pb.ConfigHistory())

    def _answered(
        self, name: str, request: _Request, context: grpc.ServicerContext, usual: Callable[[_Request], _Reply]
    ) -> _Reply:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if self.token and given != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing, or is not the master's")
        with self._more:
            self.called[name].append(request)
            self._more.notify_all()
        answer = self.answers.get(name, usual)
        reply: Any = answer if isinstance(answer, Refusal) else answer(request)
        if isinstance(reply, Refusal):
            context.abort(reply.code, reply.words)
        found: _Reply = reply
        return found

    def _joined(self, request: pb.JoinRequest) -> pb.JoinReply:
        return pb.JoinReply(
            protocol=1,
            job_id=self.job_id,
            job=request.job,
            epoch=self.epoch,
            lease_seconds=5.0,
            beat_seconds=self.beat_seconds,
            acknowledge_seconds=self.acknowledge_seconds,
        )

    def _beaten(self, request: pb.BeatRequest) -> pb.BeatReply:
        reply = pb.BeatReply(epoch=self.epoch, lease_seconds=5.0, beat_seconds=self.beat_seconds)
        newest = max(self.configs, default=(0, ""))
        reply.config_version = newest[0]
        if request.held.version < newest[0]:
            reply.config = newest[1]
        return reply


def in_order(events: Sequence[pb.JobEvent]) -> list[str]:
    """Their texts."""
    return [each.text for each in events]
