"""One connection of an agent to a master: it joins, sends beats, and reads the stream of configs."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elastic_ext.agent.event_files import EventFiles
from elastic_ext.errors import MasterAbsent, MasterBusy, MasterError, MasterRefused
from elastic_ext.master.address import MOST_BEAT_BYTES
from elastic_ext.master.client import MasterClient, MasterStream
from elastic_ext.master.wire import OLDEST_PROTOCOL, PROTOCOL
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.ranks.deadlines import Backoff, OwnedThread

from .identity import KnownMaster, NodeSelf
from .outbox import EventOutbox, HeldConfig, NewestConfig
from .report import NodeReporter, event_message, wire_text

__all__ = ["ConfigWatch", "Due", "MasterSession", "beat_due"]

_logger = logging.getLogger(__name__)


# --- a master's stream of configs, read on a thread of its own: each is taken as it comes ----------------------------
# That it was taken is said in the next message, for which the agent's other thread is woken.

_FIRST_SECONDS, _MOST_SECONDS = 0.5, 15.0
_STEADY_SECONDS = 10.0
"""A stream that has lasted so long counts as working: the next try after it comes without a long wait."""
_END_SECONDS = 1.0


class WatchingLink(Protocol):
    """The link to a master that a stream of configs belongs to."""

    @property
    def epoch(self) -> int:
        """The newest epoch of a master that the agent has heard of."""

    def hurry(self) -> None:
        """Send the next beat to the master at once."""

    def wake(self) -> None:
        """Have the link look whether a beat is due, since a config was taken."""

    def acknowledge_within(self, seconds: float) -> None:
        """Acknowledge the next config at a random moment within ``seconds``."""


class ConfigWatch:
    """A thread that reads the master's stream of configs and takes each into the config file.

    It asks for a new stream, after a while, where one ends; from ``start`` to ``close``.
    """

    def __init__(
        self,
        config: HeldConfig,
        *,
        node_id: str,
        incarnation: int,
        link: WatchingLink,
        chance: random.Random,
    ) -> None:
        self.error: MasterError | None = None
        """The error that has ended the reading for good, for the owner to raise; None until then."""
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._link = link
        self._backoff = Backoff(chance, first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the stream
        self._stream: MasterStream[pb.ConfigPush] | None = None
        self._thread: OwnedThread | None = None

    def start(self, client: MasterClient) -> None:
        """Start to read configs; a second call changes nothing."""
        if self._thread is None and not self._stop.is_set():
            self._thread = OwnedThread(partial(self._run, client), name="elastic_ext configs", stopping=self._stop)
            self._thread.start()

    def close(self) -> None:
        """End the stream and its thread."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.close()
        if self._thread is not None:
            self._thread.wait(_END_SECONDS)

    def _run(self, client: MasterClient) -> None:
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._read(client)
                except (MasterAbsent, MasterBusy) as error:
                    _logger.debug("the master's stream of configs is interrupted: %s", error)
                if self._stop.is_set():
                    return
                if time.monotonic() - began >= _STEADY_SECONDS:
                    self._backoff.forget()
                self._link.hurry()  # whether the master is there at all shows in the next message
                self._stop.wait(self._backoff.next_seconds())
        except MasterError as error:
            self.error = error
            self._link.hurry()
        except Exception:  # the top of a thread: configs come with the answers to messages as well
            _logger.exception("this agent reads no stream of configs any more; configs come with answers to its beats")

    def _read(self, client: MasterClient) -> None:
        """Read one stream to its end, and take each config that comes."""
        request = pb.WatchRequest(
            node_id=self._node_id,
            incarnation=self._incarnation,
            epoch=self._link.epoch,
            config_version=self._config.now().version,
        )
        with self._lock:
            if self._stop.is_set():
                return
            stream = self._stream = client.watch(request)
        for push in stream:
            if push.epoch < self._link.epoch:
                return
            self._link.acknowledge_within(push.acknowledge_within_seconds)
            if self._config.take(push.version, push.text):
                self._backoff.forget()
                self._link.wake()


# --- what one agent and one master say to one another, from joining to the end of their connection -------------------
# A session ends with an error. What is done then, and when the next one begins, is up to link.py.

_MOST_EVENTS = 200
"""The most events in one beat."""
_LEAST_BEAT_SECONDS, _MOST_BEAT_SECONDS = 0.02, 60.0
"""The limits of the time between two beats, whatever a master asks for."""
_SPARE_BYTES = 64 << 10
"""How much of a beat is kept for events and for small fields."""
_NUMBERS_BYTES = 32  # what comes after them
_AROUND_BYTES = 8  # of a message within another one: its number and length
_MOST_DELAY_SECONDS = 2.0
"""The longest delay of a config's acknowledgement, whatever a master asks for."""
_EVENT_SECONDS = 0.25
"""The time between two beats that only events call for."""
_CALL_SECONDS = 10.0
_JOIN_SECONDS = 5.0
_LAST_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """The reasons for a beat before its usual time."""

    is_asked: bool = False
    """Whether a beat is wanted at once, as where the master has asked for something."""
    acknowledge_at: float | None = None
    """When to acknowledge a config that was taken, by the clock of ``beat_due``; None where none was taken."""
    has_events: bool = False


def beat_due(*, said_at: float, beat_seconds: float, due: Due) -> float:
    """When the next beat is due, after one at ``said_at``; both in seconds of the same clock."""
    if due.is_asked:
        return said_at + _LEAST_BEAT_SECONDS
    if due.acknowledge_at is not None:
        return min(max(said_at + _LEAST_BEAT_SECONDS, due.acknowledge_at), said_at + beat_seconds)
    return said_at + (min(_EVENT_SECONDS, beat_seconds) if due.has_events else beat_seconds)


class MasterSession:
    """The exchange of one agent with one master over one connection: join, beats, end. Used by the link's thread."""

    def __init__(
        self,
        client: MasterClient,
        node: NodeSelf,
        known: KnownMaster,
        config: HeldConfig,
        report: NodeReporter,
        outbox: EventOutbox,
        rank_events: EventFiles,
        watch: ConfigWatch,
    ) -> None:
        self._client = client
        self._node = node
        self._known = known
        self._config = config
        self._report = report
        self._outbox = outbox
        self._rank_events = rank_events
        self._watch = watch
        self._told = NewestConfig()
        self._given = NewestConfig()  # whose text was
        self._wants_text = self._is_asked = False
        self._lease_seconds = self._beat_seconds = 1.0
        self._said_at = self._acknowledge_at = 0.0
        self._num_dropped = 0

    def join(self) -> pb.JoinReply:
        """Join the master's job; MasterError where that fails."""
        node = self._node
        reply = self._client.join(
            pb.JoinRequest(
                protocol=PROTOCOL,
                oldest_protocol=OLDEST_PROTOCOL,
                job=wire_text(node.job),
                job_id=self._known.job_id,
                epoch=self._known.epoch,
                node=pb.Node(
                    node_id=wire_text(node.node_id),
                    incarnation=node.incarnation,
                    host=wire_text(node.host),
                    pid=node.pid,
                    library=node.library,
                    started_at=node.started_at,
                    agent_id=wire_text(node.agent_id),
                ),
                hardware=self._report.hardware(),
            ),
            timeout_seconds=_JOIN_SECONDS,
        )
        self._known.check(reply.epoch, reply.job_id)
        self._report.forget()
        self._set_times(reply.lease_seconds, reply.beat_seconds)
        self._is_asked = True  # the first message goes at once
        return reply

    def hurry(self) -> None:
        """Have the next beat sent at once; from any thread."""
        self._is_asked = True

    def acknowledge_after(self, seconds: float) -> None:
        """Acknowledge the next config in ``seconds`` from now, or in 2 if that is less; from any thread."""
        delay = min(seconds, _MOST_DELAY_SECONDS) if seconds > 0 else 0.0
        self._acknowledge_at = time.monotonic() + delay

    def due_at(self) -> float:
        """When the next beat is due, by ``time.monotonic``."""
        is_news = self._config.now().version != self._told.version
        due = Due(
            is_asked=self._is_asked,
            acknowledge_at=self._acknowledge_at if is_news else None,
            has_events=len(self._outbox) > 0,
        )
        return beat_due(said_at=self._said_at, beat_seconds=self._beat_seconds, due=due)

    def beat(self) -> None:
        """Send a beat (held config, workers, events), and do what the answer asks for; MasterError ends the session."""
        if self._config.is_in_use:
            self._watch.start(self._client)
        if self._watch.error is not None:
            raise self._watch.error
        self._is_asked = False  # who asks from here on may have news that this beat is made without
        found = self._rank_events.look()
        self._outbox.put(found.events, num_dropped=found.num_dropped)
        held = self._config.now()
        request = self._request(held)
        self._said_at = time.monotonic()
        try:
            reply = self._client.beat(request, timeout_seconds=self._call_seconds)
        except MasterError as error:
            if _is_for_good(error):
                self._confirm(held)
            raise
        self._confirm(held)
        self._known.check(reply.epoch, reply.job_id)
        self._take(reply, held)

    def end(self, reason: str) -> None:
        """Send the last events, and say that this node leaves, as far as that can be done quickly."""
        try:
            self._client.beat(self._request(self._config.now()), timeout_seconds=_LAST_SECONDS)
            self._outbox.confirm()
            last = pb.LeaveRequest(
                node_id=wire_text(self._node.node_id), incarnation=self._node.incarnation, reason=wire_text(reason)
            )
            last.events.extend(self._events(MOST_BEAT_BYTES - last.ByteSize()))
            self._client.leave(last, timeout_seconds=_LAST_SECONDS)
        except MasterError as error:
            _logger.debug("the master does not hear that this node leaves: %s", error)

    @property
    def _call_seconds(self) -> float:
        """How long a master may take to answer: one that is stopped must not look alive until the lease runs out."""
        return min(max(self._lease_seconds / 3, 1.0), _CALL_SECONDS)

    def _request(self, held: NewestConfig) -> pb.BeatRequest:
        request = pb.BeatRequest(
            node_id=wire_text(self._node.node_id),
            incarnation=self._node.incarnation,
            epoch=self._known.epoch,
            held=pb.ConfigHeld(
                version=held.version,
                digest=held.digest,
                text=wire_text(held.text, len(held.text)) if self._wants_text else "",
            ),
            trouble=wire_text(self._config.trouble),
        )
        self._report.fill(request, MOST_BEAT_BYTES - _SPARE_BYTES)
        request.events.extend(self._events(MOST_BEAT_BYTES - _NUMBERS_BYTES - request.ByteSize()))
        request.first_event = self._outbox.lent_from
        request.num_events_dropped = self._num_dropped
        return request

    def _events(self, most_bytes: int) -> list[pb.JobEvent]:
        """Messages of the oldest events that wait, no more than ``most_bytes`` of them; the others go on waiting."""
        node_id = wire_text(self._node.node_id)
        found: list[pb.JobEvent] = []
        events, self._num_dropped = self._outbox.lend(_MOST_EVENTS)
        for each in events:
            message = event_message(each, node_id)
            most_bytes -= message.ByteSize() + _AROUND_BYTES
            if most_bytes < 0:
                break
            found.append(message)
        self._outbox.lend_less(len(found))
        return found

    def _confirm(self, held: NewestConfig) -> None:
        self._outbox.confirm()
        self._report.confirm()
        self._told = held
        if self._wants_text:
            self._given, self._wants_text = held, False

    def _take(self, reply: pb.BeatReply, held: NewestConfig) -> None:
        self._set_times(reply.lease_seconds, reply.beat_seconds)
        if reply.wants_config and held.version > 0:
            self._wants_text = True
            self._is_asked = held.digest != self._given.digest  # a second time it can wait
        if reply.wants_hardware:
            self._is_asked |= self._report.forget_hardware()
        if reply.config and self._config.take(reply.config_version, reply.config):
            self._is_asked = True

    def _set_times(self, lease_seconds: float, beat_seconds: float) -> None:
        if math.isfinite(lease_seconds) and lease_seconds > 0:
            self._lease_seconds = lease_seconds
        if math.isfinite(beat_seconds) and beat_seconds > 0:
            self._beat_seconds = min(max(beat_seconds, _LEAST_BEAT_SECONDS), _MOST_BEAT_SECONDS)


def _is_for_good(error: MasterError) -> bool:
    """Whether the same message would fail again, so that it must not be sent again."""
    if isinstance(error, MasterRefused):
        return error.about == "words"
    return type(error) is MasterError
