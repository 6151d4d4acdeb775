"""The store of a master's state, which outlives its process, in one sqlite file; and the changes not yet stored."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import HistoryEntry
from elastic_ext.doctor.mounts import is_network, mount_of, parse_mounts
from elastic_ext.errors import ConfigError, ElasticError
from elastic_ext.records.files import lock_holders, try_lock
from elastic_ext.tuner.decisions import Decision

from .cluster import Machines
from .collector import Collector
from .configs import Author, AuthoredVersion
from .events import EventLog, EventRecord, HeardRecord, NodeRecord, beginnings_in
from .nodes import MembershipPlans, Node, Nodes
from .tuning import Tuning

__all__ = [
    "JobStore",
    "StoreError",
    "Stored",
    "Superseded",
    "Unsaved",
    "UnsavedChanges",
    "stored_tuning",
    "why_no_store_in",
]


# --- what a master must know again after it was ended, in one sqlite file on a local disk ----------------------------
# A process that opens it is the next *epoch* of the job's master. One that finds, as it writes, that a later epoch has
# begun has been replaced, and writes nothing more. Heartbeats and metrics as they come are not kept, they come again.

_FILE = "master.db"
_LOCK = "master.lock"
_SCHEMA = 1
_MOST_VERSIONS = 200
_MOST_EVENTS = 5_000
_MOST_POINTS = 7 * 24 * 60
_MOST_DECISIONS = 1_000
_WAIT_SECONDS = 5.0  # for somebody who reads the file by hand

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE pages (
    version INTEGER PRIMARY KEY, time REAL NOT NULL, author TEXT NOT NULL, node_id TEXT NOT NULL,
    restores INTEGER, text TEXT NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE nodes (node_id TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE points (time REAL PRIMARY KEY, record TEXT NOT NULL);
"""
"""The first tables; those named pages are the versions of the config."""
_ADDED = """
CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS heard (node_id TEXT PRIMARY KEY, record TEXT NOT NULL);
"""
"""Tables that earlier versions of the library do not know, and leave alone."""
_STRANGE = """
SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index') UNION ALL
SELECT m.name FROM sqlite_master AS m, pragma_table_xinfo(m.name) AS c WHERE m.type = 'table' AND c.hidden <> 0
"""
"""A query for whatever has values that are computed and not stored: views, triggers, generated or hidden columns."""


class StoreError(ElasticError):
    """The store of a master cannot be read or written; its contents are as they were."""


class Superseded(StoreError):
    """Another process is this job's master now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The contents of a master's store, as it was opened."""

    job: str
    """The name of the job; empty before the first agent has given it."""
    job_id: str
    epoch: int
    versions: tuple[AuthoredVersion, ...]
    events: tuple[EventRecord, ...]
    nodes: tuple[NodeRecord, ...]
    membership: str
    """The newest membership plan as JSON; empty where there is none."""
    pairs: str
    """The report of what pairs of nodes have measured, as JSON; empty where there is none."""
    points: tuple[str, ...]
    """The points of the metrics' history as JSON, oldest first."""
    decisions: tuple[Decision, ...] = ()
    """The decisions of the tuner."""
    heard: tuple[HeardRecord, ...] = ()
    """Which events of nodes are among ``events``, or were."""


class JobStore:
    """A master's store in ``folder``, for one thread at a time. A call that raises StoreError has changed nothing."""

    def __init__(self, folder: Path) -> None:
        """Open the store, or make it, and begin the next epoch.

        StoreError where another master has it, it is damaged, the disk is full, or it is on network storage.
        """
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:  # nothing is known of mounts here
            mounts = ""
        why_not = why_no_store_in(os.path.realpath(folder), mounts)
        if why_not is not None:
            raise StoreError(why_not)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = try_lock(folder / _LOCK)
        except OSError as error:
            raise StoreError(f"{folder} cannot be used: {error.strerror}; give --state-dir another folder") from error
        if lock is None:
            holders = lock_holders(folder / _LOCK)
            raise StoreError(
                f"another master has {folder}, {holders}; end it first, or give --state-dir another folder"
            )
        self._lock = lock
        self.path = folder / _FILE
        with contextlib.ExitStack() as undone:
            undone.callback(os.close, lock)
            with self._as_store_errors("opened"):
                self._db = sqlite3.connect(
                    self.path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
                )
                undone.callback(self._db.close)
                self._epoch = 0
                self._begin()
                self._file = _file_at(self.path)
            undone.pop_all()

    @property
    def epoch(self) -> int:
        """The number of this process among those that have been this job's master, from 1."""
        return self._epoch

    def read(self) -> Stored:
        """The contents of the store."""
        with self._as_store_errors("read"):
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
            versions = self._db.execute("SELECT time, author, node_id, restores, text FROM pages ORDER BY version")
            events = self._db.execute("SELECT record FROM events ORDER BY number")
            nodes = self._db.execute("SELECT record FROM nodes ORDER BY node_id")
            points = self._db.execute("SELECT record FROM points ORDER BY time")
            decisions = self._db.execute("SELECT record FROM decisions ORDER BY number")
            heard = self._db.execute("SELECT record FROM heard ORDER BY node_id")
            return Stored(
                job=meta["job"],
                job_id=meta["job_id"],
                epoch=self._epoch,
                versions=tuple(_authored(*row) for row in versions),
                events=tuple(EventRecord.from_json(text) for (text,) in events),
                nodes=tuple(NodeRecord.from_json(text) for (text,) in nodes),
                membership=meta["membership"],
                pairs=meta["pairs"],
                points=tuple(text for (text,) in points),
                decisions=tuple(Decision.from_json(text) for (text,) in decisions),
                heard=tuple(HeardRecord.from_json(text) for (text,) in heard),
            )

    def enter_version(self, authored: AuthoredVersion, decision: Decision | None = None) -> None:
        """Store the next config version, with the tuner's decision that it was written for, if any."""
        with self._writing() as db:
            entry = authored.entry
            row = (
                entry.config.version,
                entry.time,
                authored.author,
                authored.node_id,
                entry.restores,
                entry.config.to_json(),
            )
            db.execute("INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?)", row)
            if decision is not None:
                db.execute("INSERT OR REPLACE INTO decisions VALUES (?, ?)", (decision.number, decision.to_json()))
            db.execute(
                "DELETE FROM pages WHERE version NOT IN (SELECT version FROM pages ORDER BY version DESC LIMIT ?)",
                (_MOST_VERSIONS,),
            )

    def keep(
        self,
        *,
        events: Sequence[EventRecord] = (),
        nodes: Sequence[NodeRecord] = (),
        forgotten: Sequence[str] = (),
        membership: str | None = None,
        points: Sequence[tuple[float, str]] = (),
        job: str | None = None,
        pairs: str | None = None,
        decisions: Sequence[Decision] = (),
        heard: Sequence[HeardRecord] = (),
    ) -> None:
        """Store what is new since the last call, all of it or nothing.

        None and an empty sequence mean unchanged; an empty text is stored as it is.
        """
        with self._writing() as db:
            db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?)", [(e.number, e.to_json()) for e in events])
            db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?)", [(n.node_id, n.to_json()) for n in nodes])
            db.executemany("INSERT OR REPLACE INTO heard VALUES (?, ?)", [(h.node_id, h.to_json()) for h in heard])
            for table in ("nodes", "heard"):
                db.executemany(f"DELETE FROM {table} WHERE node_id = ?", [(node_id,) for node_id in forgotten])
            db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?)", points)
            rows = [(each.number, each.to_json()) for each in decisions]
            db.executemany("INSERT OR REPLACE INTO decisions VALUES (?, ?)", rows)
            for key, value in {"job": job, "membership": membership, "pairs": pairs}.items():
                if value is not None:
                    db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
            if events:
                db.execute("DELETE FROM events WHERE number <= ?", (max(e.number for e in events) - _MOST_EVENTS,))
            if decisions:
                last = max(each.number for each in decisions)
                db.execute("DELETE FROM decisions WHERE number <= ?", (last - _MOST_DECISIONS,))
            if points:
                db.execute(
                    "DELETE FROM points WHERE time NOT IN (SELECT time FROM points ORDER BY time DESC LIMIT ?)",
                    (_MOST_POINTS,),
                )

    def close(self) -> None:
        """Close the store, and unlock it for another process."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        os.close(self._lock)

    def _begin(self) -> None:
        """Make tables that are missing, and begin the next epoch; StoreError for a file that no master has written."""
        db = self._db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema > _SCHEMA:
            raise StoreError(f"{self.path} is of a newer version of this library: start the master of that version")
        strange = db.execute(_STRANGE).fetchone()
        if strange is not None:  # what is read would be computed, and might be of any size
            raise StoreError(
                f"{self.path} holds what no master has written: {ascii(strange[0])[:80]} is a view, a trigger or a "
                "table with a generated column; give --state-dir another folder to begin anew"
            )
        for statement in (_TABLES * (schema == 0) + _ADDED).split(";"):
            db.execute(statement)
        if schema == 0:
            first = {"job": "", "job_id": uuid.uuid4().hex, "epoch": "0", "membership": "", "pairs": ""}
            db.executemany("INSERT INTO meta VALUES (?, ?)", first.items())
            db.execute(f"PRAGMA user_version = {_SCHEMA}")
        self._epoch = self._epoch_there() + 1
        db.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (str(self._epoch),))
        db.execute("COMMIT")

    def _check_there(self) -> None:
        """Check that the file is still there and the same: sqlite would go on writing into one that was removed."""
        there = _file_at(self.path)
        if there == self._file:
            return
        if there is None:
            raise StoreError(
                f"{self.path} was removed while this master ran, and nothing can be kept; put it back, or end this "
                "master and start it anew"
            )
        raise Superseded(f"another file has taken the place of {self.path}, perhaps another master's: this one ends")

    def _epoch_there(self) -> int:
        (text,) = self._db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        return int(text)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction; Superseded where a later epoch has begun."""
        with self._as_store_errors("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_there()
                if self._epoch_there() != self._epoch:
                    raise Superseded(f"another process has become the master of {self.path}: this one ends")
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:  # something has failed
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _as_store_errors(self, done: str) -> Iterator[None]:
        """Raise StoreError in place of sqlite's errors and of damaged records, as the store is ``done`` ("read")."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            advice = "; keep it for whoever looks into this, and give --state-dir another folder to begin anew"
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            raise StoreError(f"{self.path} cannot be {done}: {error}{advice if is_damaged else ''}") from error
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise StoreError(f"{self.path} holds what no master has written: {error}") from error


class StoredTuning(NamedTuple):
    """What the store of a master that has ended says of the job's tuner."""

    decisions: Sequence[Decision]
    """The tuner's decisions, oldest first."""
    beginnings: Sequence[float]
    """When trainings of the job have begun, in seconds since 1970."""


def stored_tuning(folder: Path) -> StoredTuning | None:
    """What the store in ``folder`` says of the job's tuner; None without a store.

    Nothing is changed there. StoreError where the store is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            if db.execute(_STRANGE).fetchone() is not None:
                raise ValueError("it holds what no master has written")
            decisions = db.execute("SELECT record FROM decisions ORDER BY number")
            events = db.execute("SELECT record FROM events ORDER BY number")
            return StoredTuning(
                [Decision.from_json(text) for (text,) in decisions],
                beginnings_in(EventRecord.from_json(text) for (text,) in events),
            )
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _file_at(path: Path) -> tuple[int, int] | None:
    """The device and inode of the file at ``path``; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def why_no_store_in(folder: str, mountinfo: str) -> str | None:
    """Why no store may be in ``folder``: ``mountinfo`` says that it is on network storage. None where one may be."""
    mount = mount_of(folder, parse_mounts(mountinfo))
    if mount is None or not is_network(mount.file_system):
        return None
    return (
        f"{folder} is on {mount.file_system}, storage over a network, where locks and the order of writes cannot be "
        "relied on; give --state-dir a folder on a local disk"
    )


def _authored(seconds: float, author: str, node_id: str, restores: int | None, text: str) -> AuthoredVersion:
    entry = HistoryEntry(time=seconds, config=ElasticConfig.parse(text.encode()), restores=restores)
    return AuthoredVersion(entry=entry, author=_AUTHORS[author], node_id=node_id)


_AUTHORS: Mapping[str, Author] = {"person": "person", "generated": "generated", "node": "node"}


# --- what is to be stored and is not yet -----------------------------------------------------------------------------
# Changes are gathered as they come, given once, and taken back where they could not be written.


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """The changes of a job since the store was last given some; None for a value that has not changed."""

    events: Sequence[EventRecord]
    nodes: Sequence[NodeRecord]
    forgotten: Sequence[str]
    """The ids of nodes to remove from the store, which have been gone for long."""
    membership: str | None
    job: str | None
    """The name of the job."""
    pairs: str | None
    points: Sequence[tuple[float, str]]
    decisions: Sequence[Decision]
    """The decisions of the tuner that are new or have changed."""
    heard: Sequence[HeardRecord]
    """Which of their events nodes have sent, of nodes that have sent some."""


class UnsavedChanges:
    """Gathers what has changed in the parts of one job and is not stored yet."""

    def __init__(
        self,
        *,
        nodes: Nodes,
        machines: Machines,
        membership_plans: MembershipPlans,
        event_log: EventLog,
        collector: Collector,
        tuning: Tuning,
        saved_until: float,
    ) -> None:
        self._nodes = nodes
        self._machines = machines
        self._membership_plans = membership_plans
        self._event_log = event_log
        self._collector = collector
        self._tuning = tuning
        self._saved_until = saved_until  # of the history
        self._changed_nodes: set[str] = set()
        self._heard_nodes: set[str] = set()
        self._forgotten: list[str] = []
        self._whole: set[Literal["membership", "job", "pairs"]] = set()

    def note_node(self, node_id: str) -> None:
        """Note that a node has changed."""
        self._changed_nodes.add(node_id)

    def note_heard(self, node_id: str) -> None:
        """Note that a node has sent events, or has dropped some."""
        self._heard_nodes.add(node_id)

    def note_forgotten(self, node_id: str) -> None:
        """Note that a node is gone for good."""
        self._changed_nodes.discard(node_id)
        self._heard_nodes.discard(node_id)
        self._forgotten.append(node_id)

    def note(self, what: Literal["membership", "job", "pairs"]) -> None:
        """Note that the membership plan, the job's name or the report of pairs is new, and to be stored as a whole."""
        self._whole.add(what)

    def take(self, job: str) -> Unsaved:
        """The changes that are to be stored, each given once; ``job`` is the present name of the job."""
        nodes = [self._record(node) for each in self._changed_nodes if (node := self._nodes.get(each)) is not None]
        self._changed_nodes.clear()
        heard = [_heard_of(node) for each in self._heard_nodes if (node := self._nodes.get(each)) is not None]
        self._heard_nodes.clear()
        forgotten = [each for each in self._forgotten if self._nodes.get(each) is None]  # others have come back since
        self._forgotten.clear()
        whole, self._whole = self._whole, set()
        plan = self._membership_plans.newest
        self._saved_until = min(self._saved_until, self._collector.last_time)  # as where the clock was set back
        points = self._collector.rows(self._saved_until)
        self._saved_until = max([self._saved_until, *(time for time, _ in points)])
        return Unsaved(
            events=self._event_log.take_new(),
            nodes=nodes,
            forgotten=forgotten,
            membership=plan.to_json() if plan is not None and "membership" in whole else None,
            job=job if "job" in whole else None,
            pairs=self._machines.pairs if "pairs" in whole else None,
            points=points,
            decisions=self._tuning.take_unsaved(),
            heard=heard,
        )

    def give_back(self, unsaved: Unsaved) -> None:
        """Take back changes that could not be stored; ``take`` gives them again."""
        self._event_log.give_back(unsaved.events)
        self._tuning.give_back(unsaved.decisions)
        self._forgotten += unsaved.forgotten
        self._changed_nodes.update(each.node_id for each in unsaved.nodes)
        self._heard_nodes.update(each.node_id for each in unsaved.heard)
        if unsaved.membership is not None:
            self._whole.add("membership")
        if unsaved.job is not None:
            self._whole.add("job")
        if unsaved.pairs is not None:
            self._whole.add("pairs")
        # points later than this are given again, so it is set to before the first of them
        self._saved_until = min([self._saved_until, *(time - 1 for time, _ in unsaved.points)])

    def _record(self, node: Node) -> NodeRecord:
        return NodeRecord(
            node_id=node.node_id,
            incarnation=node.incarnation,
            host=node.host,
            pid=node.pid,
            library=node.library,
            started_at=node.started_at,
            state=node.state,
            hardware=self._machines.hardware(node.node_id),
            agent_id=node.agent_id,
        )


def _heard_of(node: Node) -> HeardRecord:
    return HeardRecord(
        node_id=node.node_id, incarnation=node.incarnation, num_heard=node.num_heard, num_dropped=node.num_dropped
    )
