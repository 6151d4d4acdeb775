"""The agent's connection to its master, kept on a thread of its own: connecting, losing the connection, reconnecting,
and the sentences for each.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from elastic_ext.agent.config_writer import ConfigWriter
from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.journal import Journal
from elastic_ext.errors import MasterError, MasterRefused, NodeFenced, NodeUnknown, in_words
from elastic_ext.master.address import MasterPlace
from elastic_ext.ranks.deadlines import Backoff, OwnedThread
from elastic_ext.records.agent import HARDWARE_FILE, MASTER_FILE, MasterRecord, Since
from elastic_ext.records.files import write_whole
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.text import age_in_words

from .identity import KnownMaster, NodeSelf
from .outbox import EventOutbox, HeldConfig

if TYPE_CHECKING:
    from elastic_ext.master.client import MasterClient

    from .report import NodeReporter
    from .session import MasterSession

__all__ = ["FoundMaster", "GivenMaster", "LinkNews", "LinkState", "LinkStory", "MasterFinder", "MasterLink"]

_logger = logging.getLogger(__name__)


# --- what an agent tells of its master: once each time that something has changed ------------------------------------

LinkState = Literal["joined", "absent", "refused", "fenced"]
_GOES_ON = "training goes on"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkNews:
    """A change of the link between an agent and its master, as an event for the journal."""

    kind: str
    text: str
    is_bad: bool = False


class LinkStory:
    """The state of the link between an agent and its master, which says what change is news for the journal."""

    def __init__(self) -> None:
        self._state: LinkState | None = None
        self._refusal = ""  # that was told since the master was last there
        self._has_met = False
        self._since = 0.0

    def see(self, state: LinkState, words: str, *, now: float) -> LinkNews | None:
        """Note the link's ``state`` and its reason in ``words``; the news in that, None where it was told before."""
        if state == self._state != "refused":
            return None
        was_away = self._has_met and self._state != "joined"
        away_seconds = now - self._since
        news = self._news(state, words, was_away=was_away, away_seconds=away_seconds)
        if state != self._state and (state == "joined" or self._state in ("joined", None)):
            self._since = now
        self._state = state
        self._has_met = self._has_met or state == "joined"
        self._refusal = words if state == "refused" else "" if state == "joined" else self._refusal
        return news

    def _news(self, state: LinkState, words: str, *, was_away: bool, away_seconds: float) -> LinkNews | None:
        if state == "joined":
            if was_away:
                return LinkNews(kind="master-back", text=f"{words}, after {age_in_words(away_seconds)} without it")
            return LinkNews(kind="master-joined", text=words)
        if state == "refused":
            if words == self._refusal:
                return None
            return LinkNews(kind="master-refused", text=f"{words}; {_GOES_ON} without it", is_bad=True)
        if state == "fenced":
            text = f"{words}; this agent speaks with the master no more, and {_GOES_ON}"
            return LinkNews(kind="master-fenced", text=text, is_bad=True)
        if self._state == "joined":
            text = f"the master is lost: {words}; {_GOES_ON}, and this agent looks for it"
            return LinkNews(kind="master-lost", text=text)
        if self._state is None:
            return LinkNews(kind="master-absent", text=f"{words}; {_GOES_ON} without it, and this agent looks for it")
        return None  # it was refused or away before, and is told of when it is back


# --- an agent's link with its master, on a thread of its own: made, lost, made anew, each told of once ---------------
# Training never waits for it: nothing here is asked by the agent's loop but whether the master has refused this node
# before anything was started. Without a master the agent does its work as if it had never had one, and keeps what the
# master is to hear of, as much as there is room for.

_MOST_EVENTS = 1000
_MOST_EVENT_BYTES = 256 << 10
_FIRST_SECONDS, _MOST_SECONDS = 0.5, 15.0
_REFUSED_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # whether the config was changed by somebody here
_FIND_SECONDS = 0.05
_HARDWARE_SECONDS = 1.5
_END_SECONDS = 2.5
_HANG_UP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMaster:
    """The address and credentials of a master that was found."""

    place: MasterPlace
    pid: int = 0
    """The master's process where this agent has started it; else 0."""


class MasterFinder(Protocol):
    """Finds the master for an agent's link; used by the link's thread alone."""

    is_own: bool
    """Whether the agent starts the master itself; then workers need not wait for the master's first word."""

    def find(self) -> FoundMaster | None:
        """Where the master is now; None while it is not up, and the link then asks again soon."""

    def close(self) -> None:
        """End a master that this has started; called as the link closes."""


class GivenMaster:
    """The finder of a master whose address the user has named."""

    is_own = False

    def __init__(self, place: MasterPlace) -> None:
        self._found = FoundMaster(place=place)

    def find(self) -> FoundMaster | None:
        return self._found

    def close(self) -> None:
        return


class MasterLink:
    """An agent's link to its master: a thread that finds the master, speaks with it, and reconnects.

    It lasts from ``start`` to ``close``. Training never waits for it.
    """

    def __init__(
        self, run_dir: Path, node: NodeSelf, finder: MasterFinder, config_writer: ConfigWriter, journal: Journal
    ) -> None:
        self._run_dir = run_dir
        self._node = node
        self._finder = finder
        self._journal = journal
        self._wake = threading.Event()
        self._answered = threading.Event()
        self._thread = OwnedThread(self._run, name="elastic_ext master", wake=self._wake.set)
        self._stopping = self._thread.stopping
        self._config = HeldConfig(config_writer, self._stopping)
        self._outbox = EventOutbox(most=_MOST_EVENTS)
        self._rank_events = EventFiles(run_dir, most_bytes=_MOST_EVENT_BYTES, of_agent=False)
        self._chance = random.Random(f"{node.node_id}/{node.incarnation}")
        self._backoff = Backoff(self._chance, first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
        self._slow = Backoff(self._chance, first_seconds=_REFUSED_SECONDS / 4, most_seconds=_REFUSED_SECONDS)
        self._known = KnownMaster()
        self._story = LinkStory()
        self._refusal: str | None = None
        self._reason = ""
        self._client: MasterClient | None = None
        self._session: MasterSession | None = None

    def start(self) -> None:
        """Start the thread that looks for the master and speaks with it."""
        self._rank_events.skip()
        self._journal.listen(self._note)
        self._thread.start()

    def begin_configs(self) -> None:
        """Begin to exchange configs with the master; called once nodes have met and this node has the job's config."""
        if not self._config.is_in_use:
            self._config.begin()
            self.hurry()

    def refusal_within(self, seconds: float) -> str | None:
        """Why the master refuses this node, if it does so at the first contact within ``seconds``; else None."""
        if self._finder.is_own:
            return None
        self._answered.wait(seconds)
        return self._refusal

    def close(self, reason: str) -> None:
        """Tell the master that this node leaves, and why, if it answers; this takes a few seconds at most."""
        self._reason = reason
        if not self._thread.close(_END_SECONDS) and (client := self._client) is not None:
            client.close()
            self._thread.wait(_HANG_UP_SECONDS)
        self._finder.close()

    # ---- the thread ----

    def _run(self) -> None:
        from .report import NodeReporter

        report = NodeReporter(self._run_dir, since=Since(self._node.started_at))
        self._await_hardware()
        try:
            while not self._stopping.is_set():
                self._stopping.wait(self._try_once(report))
        except NodeFenced as error:
            self._tell("fenced", str(error))
        finally:
            self._answered.set()

    def _try_once(self, report: NodeReporter) -> float:
        """Connect to the master once, whatever fails; how many seconds to wait before the next try."""
        try:
            return self._try(report)
        except NodeFenced:
            raise
        except Exception:  # the agent goes on, and what this machine lacks now it may have later
            _logger.exception("this agent's exchange with its master has failed, and is tried again")
            return self._backoff.next_seconds()

    def _try(self, report: NodeReporter) -> float:
        """Speak with the master while that works; seconds to wait before the next try. NodeFenced ends it for good."""
        from elastic_ext.master.client import MasterClient

        found = self._finder.find()
        if found is None:
            return _FIND_SECONDS
        try:
            with MasterClient(found.place) as client:
                self._client = client
                self._speak(client, found, report)
            return 0.0
        except NodeFenced:
            raise
        except NodeUnknown as error:
            _logger.debug("this node joins the master again: %s", error)
        except ValueError as error:  # the token, or what the certificate is checked by
            self._tell("refused", str(error))
            return self._slow.next_seconds()
        except MasterRefused as error:
            if error.about != "place" or not self._known.job_id:
                if error.about == "place" and not self._answered.is_set():
                    self._refusal = str(error)
                self._tell("refused", str(error))
                return self._slow.next_seconds()
            self._tell("absent", str(error))  # the one that has let this node in is another
        except MasterError as error:
            self._tell("absent", str(error))
        finally:
            self._client = self._session = None
            self._answered.set()
        return self._backoff.next_seconds()

    def _speak(self, client: MasterClient, found: FoundMaster, report: NodeReporter) -> None:
        """Join the master over one connection and send beats, until the agent ends or the connection fails."""
        from .session import ConfigWatch, MasterSession

        watch = ConfigWatch(
            self._config,
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            link=self,
            chance=self._chance,
        )
        session = MasterSession(
            client, self._node, self._known, self._config, report, self._outbox, self._rank_events, watch
        )
        try:
            reply = session.join()
            self._session = session
            self._answered.set()
            self._write_record(found, job_id=reply.job_id, epoch=reply.epoch)
            session.beat()
            self._backoff.forget()
            self._slow.forget()
            self._tell("joined", f"master {found.place.address}: this node has joined (epoch {reply.epoch})")
            while not self._stopping.is_set():
                self._wake.clear()
                seconds = session.due_at() - time.monotonic()
                if seconds > 0:
                    self._wake.wait(min(seconds, _LOOK_SECONDS))
                else:
                    session.beat()
            session.end(self._reason)
        finally:
            watch.close()

    def _await_hardware(self) -> None:
        """Wait shortly for this machine's hardware record, so that a master can refuse a bad machine as it joins."""
        deadline = time.monotonic() + (0.0 if self._finder.is_own else _HARDWARE_SECONDS)
        while time.monotonic() < deadline and not self._stopping.is_set():
            with contextlib.suppress(OSError):
                if (self._run_dir / HARDWARE_FILE).stat().st_mtime >= self._node.started_at:
                    return
            self._stopping.wait(_FIND_SECONDS)

    def hurry(self) -> None:
        """Have the thread send the next beat at once."""
        session = self._session
        if session is not None:
            session.hurry()
        self._wake.set()

    @property
    def epoch(self) -> int:
        """The newest epoch of a master that this agent has heard of."""
        return self._known.epoch

    def wake(self) -> None:
        """Wake the thread, which then looks whether a beat is due."""
        self._wake.set()

    def acknowledge_within(self, seconds: float) -> None:
        """Acknowledge the next config at a random moment within ``seconds``."""
        session = self._session
        if session is not None:
            session.acknowledge_after(self._chance.uniform(0.0, 1.0) * seconds)

    def _note(self, event: JobEvent) -> None:
        """Keep an event of the agent for the master."""
        self._outbox.put([event])
        self._wake.set()

    def _tell(self, state: LinkState, words: str) -> None:
        """Note the link's state, and write an event where that is news."""
        news = self._story.see(state, words, now=time.monotonic())
        if news is not None and not self._stopping.is_set():
            self._journal.tell(news.kind, news.text, is_bad=news.is_bad)

    def _write_record(self, found: FoundMaster, *, job_id: str, epoch: int) -> None:
        """Write the master's address into the run directory, where commands look for it."""
        place = found.place
        record = MasterRecord(
            address=str(place.address),
            token_file="" if place.token_file is None else str(place.token_file),
            ca_file="" if place.ca_file is None else str(place.ca_file),
            pid=found.pid,
            job_id=job_id,
            epoch=epoch,
            time=time.time(),
        )
        try:
            write_whole(self._run_dir / MASTER_FILE, f"{record.to_json()}\n".encode(), durable=False)
        except OSError as error:
            _logger.debug("the master's address cannot be written: %s", in_words(error))
