"""A client of the master over gRPC: a method for each call, errors in words, and a job's config read and changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit, HistoryEntry
from elastic_ext.errors import MasterAbsent, MasterBusy, MasterError, MasterRefused, NodeFenced, NodeUnknown, in_words
from elastic_ext.records.files import read_at_most
from elastic_ext.records.text import on_one_line

from .address import MOST_MESSAGE_BYTES, MasterPlace
from .credentials import read_token
from .events import refused_versions, unset_values_of
from .wire import OLDEST_PROTOCOL, PROTOCOL, as_dict
from .wire import master_pb2 as pb
from .wire.master_pb2_grpc import MasterStub

__all__ = ["MasterClient", "MasterStream", "RemoteConfig"]


# --- a master spoken to over gRPC, by agents and by people: one call each, and errors in words -----------------------
# What to do about an error, and when to ask again, is up to who asks. What a refusal is ``about`` is said at
# MasterRefused: the token, the place (this master, which takes no such agent), or the words of the request.

_MOST_REPLY_BYTES = 64 << 20  # the status of a thousand nodes, with their workers
_MOST_CA_BYTES = 1 << 20
_MOST_CHARACTERS = 1000  # of what the master says of an error
_CALL_SECONDS = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", _MOST_REPLY_BYTES),
    ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # for streams, on which nothing may come for hours
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new client connects at once, however often others have tried
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # who asks knows what may be asked twice
    ("grpc.enable_http_proxy", 0),  # a proxy for the web leads to no master
)
_TOO_LARGE = "CLIENT: Received message larger than max"
_Reply = TypeVar("_Reply", bound=Message)


class MasterStream(Generic[_Reply]):
    """The messages of a stream from the master, as they come."""

    def __init__(self, call: Any, translate: Callable[[grpc.RpcError], MasterError]) -> None:
        """``translate`` gives the MasterError for an error of gRPC."""
        self._call = call
        self._translate = translate

    def __iter__(self) -> Iterator[_Reply]:
        """Messages until the master ends the stream in good order; MasterError at any other end, as by ``close``."""
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def close(self) -> None:
        """End the stream; from any thread."""
        self._call.cancel()


class MasterClient:
    """A connection to the master at ``place``, made by the first call and again after each that failed.

    ValueError if the token or the certificate cannot be used; they are read once. Calls raise MasterError. Any thread
    may call.
    """

    def __init__(self, place: MasterPlace) -> None:
        self._address = str(place.address)
        token = None if place.token_file is None else read_token(place.token_file)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._is_encrypted = place.ca_file is not None
        self._channel = _channel(place)
        self._stub = MasterStub(self._channel)  # type: ignore[no-untyped-call]

    # ---- agents ----

    def join(self, request: pb.JoinRequest, *, timeout_seconds: float = _CALL_SECONDS) -> pb.JoinReply:
        """Have a node's agent join the job; MasterRefused where the master speaks another protocol."""
        reply: pb.JoinReply = self._ask(self._stub.Join, request, timeout_seconds)
        if not OLDEST_PROTOCOL <= reply.protocol <= PROTOCOL:
            raise MasterRefused(
                f"the master at {self._address} speaks protocol {reply.protocol}; allowed: {OLDEST_PROTOCOL} to "
                f"{PROTOCOL}; have both sides use one version of this library",
                about="place",
            )
        return reply

    def beat(self, request: pb.BeatRequest, *, timeout_seconds: float = _CALL_SECONDS) -> pb.BeatReply:
        """Send the beat of a node (its heartbeat, with what is new on the node), and get the answer."""
        reply: pb.BeatReply = self._ask(self._stub.Beat, request, timeout_seconds)
        return reply

    def watch(self, request: pb.WatchRequest) -> MasterStream[pb.ConfigPush]:
        """The stream of the job's newest configs, for a node's agent."""
        return self._listen(self._stub.Watch, request)

    def leave(self, request: pb.LeaveRequest, *, timeout_seconds: float = _CALL_SECONDS) -> None:
        """Say that a node leaves the job."""
        self._ask(self._stub.Leave, request, timeout_seconds)

    # ---- people ----

    def status(self, *, without_workers: bool = False, num_events: int = 0) -> pb.JobStatus:
        """The status of the job, with its newest ``num_events`` events, at most 1000, or 20 for 0."""
        request = pb.GetStatusRequest(without_workers=without_workers, num_events=num_events)
        reply: pb.JobStatus = self._ask(self._stub.GetStatus, request, _CALL_SECONDS)
        return reply

    def events(self, *, after: int = 0, most: int = 0, follow: bool = False) -> MasterStream[pb.JobEvent]:
        """Events after number ``after``, the newest ``most`` of them (0: all); with ``follow`` also those to come."""
        return self._listen(self._stub.ReadEvents, pb.ReadEventsRequest(after=after, most=most, follow=follow))

    def set_config(self, request: pb.SetConfigRequest) -> pb.ConfigWritten:
        """Write the next version of the config."""
        reply: pb.ConfigWritten = self._ask(self._stub.SetConfig, request, _CALL_SECONDS)
        return reply

    def undo_config(self, *, job: str = "") -> pb.ConfigWritten:
        """Write the content before the newest one as a new version."""
        reply: pb.ConfigWritten = self._ask(self._stub.UndoConfig, pb.UndoConfigRequest(job=job), _CALL_SECONDS)
        return reply

    def configs(self) -> tuple[pb.ConfigEntry, ...]:
        """Every version that is kept, the oldest first."""
        reply: pb.ConfigHistory = self._ask(self._stub.GetConfigs, pb.GetConfigsRequest(), _CALL_SECONDS)
        return tuple(reply.entries)

    def report_pairs(self, report: str) -> tuple[str, ...]:
        """Report what pairs of nodes have measured, as JSON; the master's recommendations."""
        reply: pb.ReportPairsReply = self._ask(
            self._stub.ReportPairs, pb.ReportPairsRequest(report=report), _CALL_SECONDS
        )
        return tuple(reply.recommendations)

    def metrics(self, *, since: float = 0.0) -> tuple[pb.MetricPoint, ...]:
        """The job's metrics over time from ``since`` on, in seconds since 1970."""
        reply: pb.MetricHistory = self._ask(self._stub.GetMetrics, pb.GetMetricsRequest(since=since), _CALL_SECONDS)
        return tuple(reply.points)

    def tuning(self, *, most: int = 0) -> pb.TuningReport:
        """The state of the tuner and its decisions, the newest ``most`` of them (0 for all)."""
        reply: pb.TuningReport = self._ask(self._stub.GetTuning, pb.GetTuningRequest(most=most), _CALL_SECONDS)
        return reply

    def control_tuning(self, action: str, reason: str, *, job: str = "") -> pb.TuningReport:
        """Have the tuner pause, resume, or undo its last change; its state then, and its decisions since the call.

        MasterRefused where the master is of another job than ``job``, if that is given.
        """
        request = pb.ControlTuningRequest(action=action, reason=reason, job=job)
        reply: pb.TuningReport = self._ask(self._stub.ControlTuning, request, _CALL_SECONDS)
        return reply

    def close(self) -> None:
        """Close the connection; calls under way end with MasterAbsent."""
        self._channel.close()

    def __enter__(self) -> MasterClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, call: Any, request: Message, timeout_seconds: float) -> Any:
        num_bytes = request.ByteSize()
        if num_bytes > MOST_MESSAGE_BYTES:
            words = f"a message to a master has {num_bytes} bytes; allowed: {MOST_MESSAGE_BYTES}; send less in it"
            raise MasterRefused(words, about="words")
        try:
            return call(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translated(error, timeout_seconds) from None
        except ValueError:  # so gRPC says that the channel is closed
            raise MasterAbsent(f"the connection with the master at {self._address} was closed") from None

    def _listen(self, call: Any, request: Message) -> MasterStream[Any]:
        try:
            return MasterStream(call(request, metadata=self._metadata), self._translated)
        except ValueError:
            raise MasterAbsent(f"the connection with the master at {self._address} was closed") from None

    def _translated(self, error: grpc.RpcError, timeout_seconds: float = 0.0) -> MasterError:
        said = on_one_line(error.details() or "")[:_MOST_CHARACTERS]
        return _error_of(
            error.code(), said, self._address, is_encrypted=self._is_encrypted, timeout_seconds=timeout_seconds
        )


def _error_of(
    code: grpc.StatusCode, said: str, address: str, *, is_encrypted: bool, timeout_seconds: float
) -> MasterError:
    """The MasterError for the gRPC status of a call that failed."""
    codes = grpc.StatusCode
    if code == codes.DEADLINE_EXCEEDED and timeout_seconds:
        return MasterAbsent(f"the master at {address} has not answered within {timeout_seconds:g} seconds")
    if code == codes.UNAVAILABLE:
        return MasterAbsent(f"no master answers at {address}: {_cause_in(said)}{_hint(said, is_encrypted)}")
    if code == codes.CANCELLED:
        return MasterAbsent(f"the connection with the master at {address} was closed")
    if code == codes.UNIMPLEMENTED:
        return MasterAbsent(f"what answers at {address} is no master, or one of another version: {said}")
    if code == codes.RESOURCE_EXHAUSTED and _TOO_LARGE in said:  # so gRPC says of an answer that this client refuses
        return MasterError(f"the answer of the master at {address} is too large: {said}")
    if code == codes.RESOURCE_EXHAUSTED:
        return MasterBusy(f"the master at {address} takes no more calls for now: {said}")
    if code == codes.DEADLINE_EXCEEDED:  # which only the master can have set here
        return MasterBusy(f"the master at {address} has ended this call: {said}")
    if code == codes.NOT_FOUND:
        return NodeUnknown(f"the master at {address} does not know this node: {said}")
    if code == codes.ABORTED:
        return NodeFenced(f"the master at {address} has fenced this node: {said}", about="place")
    if code == codes.UNAUTHENTICATED:
        return MasterRefused(f"the master at {address} refuses this call: {said}", about="token")
    if code == codes.FAILED_PRECONDITION:
        return MasterRefused(f"the master at {address} refuses this call: {said}", about="place")
    if code == codes.INVALID_ARGUMENT:
        return MasterRefused(said, about="words")
    return MasterError(f"the master at {address} failed to answer ({code.name}): {said}")


def _cause_in(said: str) -> str:
    """The end of gRPC's words for a connection that cannot be made, which says why."""
    for mark in ("Failed to connect to remote host: ", "last error: "):
        said = said.rpartition(mark)[2]
    return said.removeprefix("connect: ") or "no reason was given"


def _hint(said: str, is_encrypted: bool) -> str:
    if is_encrypted and ("handshake" in said.lower() or "certificate" in said.lower() or "tsi" in said.lower()):
        return "; the master's certificate and the CA file given for it do not go together, or it has none"
    if not is_encrypted and ("Socket closed" in said or "reset" in said):
        return "; if it wants TLS, give the file with its CA certificate (--tls-ca, or elastic-run --master-ca)"
    return ""


def _channel(place: MasterPlace) -> grpc.Channel:
    if place.ca_file is None:
        return grpc.insecure_channel(place.address.target, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(root_certificates=_certificates_in(place.ca_file))
    return grpc.secure_channel(place.address.target, credentials, options=_OPTIONS)


def _certificates_in(path: Path) -> bytes:
    try:
        data = read_at_most(path, _MOST_CA_BYTES)
    except OSError as error:
        raise ValueError(
            f"the file {path} with the CA certificate of a master cannot be read: {in_words(error)}"
        ) from None
    if b"-----BEGIN CERTIFICATE-----" not in data or len(data) > _MOST_CA_BYTES:
        raise ValueError(f"the file {path} holds no certificate; allowed: some in PEM, as openssl writes them")
    return data


# --- a job's config, looked at and changed by asking its master; the same calls as on ConfigHistory ------------------

_TAKEN_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_MOST_EVENTS = 1000


class RemoteConfig:
    """A job's config, read and changed by asking the job's master over gRPC, with the calls of ``ConfigHistory``.

    Calls raise MasterError.
    """

    def __init__(self, place: MasterPlace) -> None:
        """ValueError if the token or the certificate cannot be used."""
        self.name = f"the config of the master at {place.address}"
        self._client = MasterClient(place)

    def current(self) -> ElasticConfig | None:
        """The newest config version; None before the first."""
        entries = self.entries()
        return entries[-1].config if entries else None

    def entries(self) -> list[HistoryEntry]:
        """Every version that is kept, the oldest first."""
        return [
            HistoryEntry(
                time=each.time,
                config=ElasticConfig.parse(each.text.encode()),
                restores=each.restores if each.HasField("restores") else None,
            )
            for each in self._client.configs()
        ]

    def json_lines(self) -> list[str]:
        """Every config version that is kept, each as a line of JSON with its author."""
        rows = [as_dict(each) for each in self._client.configs()]
        return [json.dumps({**row, "config": json.loads(row.pop("text"))}) for row in rows]

    def set(self, edit: ConfigEdit) -> ElasticConfig:
        """Have the master write the next config version; which versions are refused the master knows by itself."""
        values = {key: json.dumps(value) for key, value in edit.changes.items()}
        request = pb.SetConfigRequest(changes=values, remove=edit.remove, reason=edit.reason, at_step=edit.at_step)
        return ElasticConfig.parse(self._client.set_config(request).text.encode())

    def undo(self) -> ElasticConfig:
        """Have the master write the content before the present one as a new version."""
        return ElasticConfig.parse(self._client.undo_config().text.encode())

    def refused(self) -> dict[str, str]:
        """Why ranks have refused versions, by the digest of their contents, as the newest events say it."""
        return refused_versions(self._client.events(most=_MOST_EVENTS))

    def unset(self) -> dict[str, object]:
        """The values in force of keys that no version sets, as far as the newest events of ranks tell them."""
        return unset_values_of(self._client.events(most=_MOST_EVENTS))

    def judged(self, new: ElasticConfig) -> None:
        """None: what ranks make of a version is not waited for; the events of the job say it."""

    def beside(self, current: ElasticConfig | None) -> str:
        """Empty: what a revision has changed is not asked for; the events of the job say it."""
        return ""

    def taken(self, version: int) -> tuple[int, int] | None:
        """Wait a few seconds for all nodes to hold ``version`` or a later one; how many do, and how many there are.

        None where the master does not tell.
        """
        deadline = time.monotonic() + _TAKEN_SECONDS
        while True:
            try:
                status = self._client.status(without_workers=True, num_events=1)
            except MasterError:  # the version is written all the same
                return None
            present = [each for each in status.nodes if each.state in ("live", "late")]
            num_holding = sum(each.config_version >= version for each in present)
            if num_holding == len(present) or time.monotonic() >= deadline:
                return num_holding, len(present)
            Event().wait(_LOOK_SECONDS)

    def step(self) -> int | None:
        """How many steps training has taken; None where the master does not tell."""
        try:
            progress = self._client.status(without_workers=True, num_events=1).progress
        except MasterError:  # the version is written all the same
            return None
        return progress.step if progress.HasField("step") else None

    def close(self) -> None:
        self._client.close()
