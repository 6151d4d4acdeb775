"""The agent as the one writer of its node's config file: versions written by the agent, edits made by people, and how
another process hands a version to the agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit, ConfigHistory
from elastic_ext.errors import ConfigError, in_words
from elastic_ext.ranks.processes import ProcessIdentity, is_alive
from elastic_ext.records.agent import AGENT_FILE, MOST_BYTES, AgentRecord
from elastic_ext.records.files import FileStamp, read_at_most, stamp_of, write_whole
from elastic_ext.records.json import MAX_BYTES, record_of
from elastic_ext.records.text import on_one_line

from .control import AgentAbsent, AgentFailed, AgentRefused, AgentSilent, ask
from .folder import is_held

__all__ = [
    "AgentsConfig",
    "ConfigWriter",
    "ForeignWrite",
    "agent_in",
    "config_requests",
    "is_running",
    "living_agent_of",
]

_logger = logging.getLogger(__name__)


# --- while there is an agent, the one that writes its node's config file ---------------------------------------------
# Whatever else is found in the file was put there by a person. It is taken as their version, entered in the history,
# and told of once. Nothing here decides what training should be doing.
#
# Words: a *foreign write* is a file whose contents differ from what this agent has written or read last. The *newest*
# version is the highest one that the file has held here; nodes hand theirs to one another as text. A node takes what is
# higher than its own, and ranks take what all of them hold. Where one version has different contents on two nodes, both
# keep what they have and report it, and so do the ranks, until there is a higher version.

_NO_FILE = b""
_SETTLED_NS = 2_000_000_000
"""A file that was changed less than this ago may change again and keep its stamp: clocks of file systems are coarse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignWrite:
    """A change of the config file by somebody other than the agent."""

    version: int | None
    """The config version in the changed file; None where the file holds no valid config."""
    digest: str
    """The ``ElasticConfig.digest`` of the changed file; empty where it holds no valid config."""
    valid: bool
    words: str
    """The change in a sentence, for the log."""


class ConfigWriter:
    """The one writer of a node's config file at ``path``; it also notices what somebody else has written there.

    The agent's loop calls ``look`` and ``take`` at every turn; these do not wait for other threads or processes: what
    cannot be done now is done at the next turn. ``settle_seconds`` is how long bad contents must stay before they are
    reported; ``patience_seconds`` is how long ``set`` and ``undo`` wait for another writer. ``on_foreign`` is called on
    the thread that found the write.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_foreign: Callable[[ForeignWrite], None],
        settle_seconds: float = 0.2,
        patience_seconds: float = 10.0,
    ) -> None:
        self.path = path
        self._on_foreign = on_foreign
        self._settle_seconds = settle_seconds
        self._patient = ConfigHistory(path, patience_seconds=patience_seconds)
        self._hasty = ConfigHistory(path, patience_seconds=0.0)
        self._lock = threading.Lock()  # guards everything below; taken before the history's own lock, never after
        self._has_begun = False
        self._stamp: FileStamp | None = None
        self._seen = _NO_FILE  # what of the contents is known: written here, or told of
        self._bad: tuple[bytes, float] | None = None  # what is no config, and since when: may be half-written
        self._is_entered = True
        self._looked_at = 0.0
        self._newest: tuple[int, str] | None = None
        self._digest = ""  # of the newest
        self._held_digest = ""  # of the config that the file held last
        self._told: list[ForeignWrite] = []
        self._complaint = ""
        self._trouble: str | None = None

    def look(self) -> None:
        """Read the file if it has changed, and report a foreign write. The first call reports only a bad file."""
        with self._turn(waits=False) as has_it:
            if has_it:
                self._look()
                self._enter()

    def set(self, edit: ConfigEdit) -> ElasticConfig:
        """Write the next config version, as ``ConfigHistory.set``; after an OSError the file is as it was."""
        with self._turn(waits=True):
            return self._write(lambda: self._patient.set(edit))

    def undo(self, refused: Collection[str] = (), *, above: int = 0) -> ElasticConfig:
        """Write the content before the present one as a new version, as ``ConfigHistory.undo``.

        After an OSError the file is as it was.
        """
        with self._turn(waits=True):
            return self._write(lambda: self._patient.undo(refused, above=above))

    def newest(self) -> tuple[int, str] | None:
        """The newest config version and its text, for other nodes to take; None before the first. It never waits."""
        return self._newest

    def take(self, text: str, *, whose: str = "another node", waits: bool = False) -> bool:
        """Write a config (``text``) from another node or the master into the file if its version is the highest so far.

        Gives whether it was written. One that could not be written now is written when it is given again. ``whose`` is
        where it comes from, for messages; ``waits`` is whether to wait while another thread uses the file.
        """
        with self._turn(waits=waits) as has_it:
            return has_it and self._take(text, whose)

    def set_aside(self) -> Path | None:
        """Move the config file of an earlier job out of the way, and give its new path; None where there is no file.

        OSError where that cannot be done, and the file is as it was.
        """
        with self._turn(waits=True):
            try:
                data = read_at_most(self.path, MAX_BYTES)
            except FileNotFoundError:
                return None
            kept = self.path.with_name(f"{self.path.stem}-of-before{self.path.suffix}")
            write_whole(kept, data)
            self._patient.clear()
            self._seen, self._digest, self._held_digest = _NO_FILE, "", ""
            self._stamp = self._bad = self._newest = self._trouble = None
            self._is_entered = True
            return kept

    @property
    def trouble(self) -> str | None:
        """Why this node does not have the newest config of the job, in a sentence; None where it has."""
        return self._trouble

    @contextlib.contextmanager
    def _turn(self, *, waits: bool) -> Iterator[bool]:
        """Hold the lock, and report foreign writes after its release; gives whether the lock is held.

        Without ``waits`` the lock is not held where another thread has it.
        """
        has_it = self._lock.acquire(blocking=waits)
        told: list[ForeignWrite] = []
        try:
            yield has_it
        finally:
            if has_it:
                told, self._told = self._told, []
                self._lock.release()
            for each in told:
                _logger.log(logging.INFO if each.valid else logging.WARNING, "%s", each.words)
                self._on_foreign(each)

    def _look(self) -> None:
        """Read the file and note what is new in it, unless its stamp says that it has not changed."""
        self._looked_at = time.time()
        try:
            stamp = stamp_of(self.path)
            if stamp is None or stamp != self._stamp or self._bad is not None:
                data = read_at_most(self.path, MAX_BYTES)
                is_old = stamp is not None and time.time_ns() - stamp.changed_ns > _SETTLED_NS
                self._stamp = stamp if is_old else None
                self._note(data)
        except (FileNotFoundError, NotADirectoryError):
            self._stamp = None
            self._note_bad(_NO_FILE, "the file is gone")
        except OSError as error:
            self._stamp = None
            self._note_bad(_hash(str(error).encode()), f"the file cannot be read: {in_words(error)}")
        self._has_begun = True

    def _note(self, data: bytes) -> None:
        """Note contents that were read from the file: a new version, or contents that are no config."""
        fingerprint = _hash(data)
        if fingerprint == self._seen:
            self._bad = None
            return
        try:
            config = ElasticConfig.parse(data)
        except ConfigError as error:
            self._note_bad(fingerprint, f"its content is refused: {error}")
            return
        self._seen, self._is_entered = fingerprint, False
        self._bad = self._trouble = None
        if self._has_begun:
            self._tell_of(config)
        self._held_digest = config.digest
        if self._newest is None or config.version >= self._newest[0]:
            self._newest, self._digest = (config.version, config.to_json()), config.digest

    def _note_bad(self, fingerprint: bytes, reason: str) -> None:
        """Report a file that holds no config, once it has stayed so: a file that is being written may look so too."""
        if fingerprint == self._seen:
            self._bad = None
            return
        now = time.monotonic()
        if self._bad is None or self._bad[0] != fingerprint:
            self._bad = fingerprint, now
        if now >= self._bad[1] + self._settle_seconds:
            self._seen, self._bad, self._is_entered = fingerprint, None, True
            words = f"somebody else has changed {self.path}: {reason}; the config in force stays in force"
            self._told.append(ForeignWrite(version=None, digest="", valid=False, words=words))

    def _tell_of(self, config: ElasticConfig) -> None:
        words = f"somebody else has put version {config.version} into {self.path}"
        if self._newest is None or config.version > self._newest[0]:
            words += f": {on_one_line(config.reason)}" if config.reason else ""
        elif config.version < self._newest[0]:
            words += f", which is not above version {self._newest[0]}: ranks refuse it while they train; "
            words += f"give it version {self._newest[0] + 1}"
        elif config.digest == self._digest:
            words += " anew, with the contents that it had"
        else:
            words += f", which had other contents before; give the new ones version {config.version + 1}, since ranks "
            words += "may run under the old ones"
        self._told.append(ForeignWrite(version=config.version, digest=config.digest, valid=True, words=words))

    def _enter(self) -> None:
        """Enter a person's version into the config history; tried again at the next look where that failed."""
        if self._is_entered:
            return
        try:
            self._hasty.take_in()
            self._is_entered = True
        except (ConfigError, TimeoutError):  # it has changed since, of which the next look tells; or others write it
            pass
        except OSError as error:
            self._complain(f"the history of {self.path} could not be written: {in_words(error)}")

    def _write(self, write: Callable[[], ElasticConfig]) -> ElasticConfig:
        self._look()
        try:
            new = write()
        except OSError as error:
            self._complain(f"{self.path} could not be written, and is as it was: {in_words(error)}")
            raise
        self._has_written(new)
        return new

    def _take(self, text: str, whose: str) -> bool:
        self._look()
        try:
            config = ElasticConfig.parse(text.encode(errors="surrogatepass"))
        except ConfigError as error:
            self._be_in_trouble(f"the config of {whose} is refused here: {error}")
            return False
        if self._newest is not None and config.version <= self._newest[0]:
            if config.version == self._newest[0] and config.digest != self._digest:
                self._be_in_trouble(
                    f"version {config.version} of {whose} has other contents than here, and no rank takes either; "
                    f"put one content under version {config.version + 1}"
                )
            return False
        try:
            if not self._hasty.put(config):
                return False  # somebody was quicker, of which the next look tells
        except TimeoutError:
            return False
        except OSError as error:
            self._be_in_trouble(f"version {config.version} of {whose} could not be written: {in_words(error)}")
            return False
        self._has_written(config)
        return True

    def _has_written(self, new: ElasticConfig) -> None:
        """Note a config that this object has written into the file."""
        self._tell_of_replaced(new)
        self._newest, self._digest = (new.version, new.to_json()), new.digest
        self._held_digest = new.digest
        self._seen = _hash(new.to_json().encode())
        self._stamp = self._bad = self._trouble = None
        self._is_entered = True
        self._complaint = ""

    def _tell_of_replaced(self, new: ElasticConfig) -> None:
        """Report a person's version that came between the last look and the write; the history has kept it."""
        with contextlib.suppress(ConfigError, OSError):
            entries = [entry for entry in self._patient.entries() if entry.config.version < new.version]
            if entries and entries[-1].time >= self._looked_at and entries[-1].config.digest != self._held_digest:
                self._tell_of(entries[-1].config)

    def _complain(self, words: str) -> None:
        if words != self._complaint:
            self._complaint = words
            _logger.warning("%s", words)

    def _be_in_trouble(self, words: str) -> None:
        if words != self._trouble:
            self._trouble = words
            _logger.warning("%s", words)


def config_requests(writer: ConfigWriter) -> Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """The handlers of requests to change the config over the control socket, by name.

    Each gives the config that it has written; ValueError where a request is refused.
    """

    def config_set(request: Mapping[str, Any]) -> dict[str, Any]:
        edit = record_of(ConfigEdit, request, place="config-set.")
        return {"config": writer.set(edit).to_dict()}

    def config_undo(request: Mapping[str, Any]) -> dict[str, Any]:
        edit = record_of(ConfigEdit, request, place="config-undo.")
        return {"config": writer.undo(edit.refused, above=edit.above).to_dict()}

    return {"config-set": config_set, "config-undo": config_undo}


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# --- who writes a config file: the agent that has it, if one lives, or whoever wants to ------------------------------
# What an agent writes is on its node at once and goes to the others from there; a file that somebody else writes is
# taken as well, but only once it is noticed.

_FORCE = "with --force the file is written all the same, which the agent takes as your version once it notices"


class AgentsConfig:
    """The config file of a running agent, changed by requests to that agent; it has the calls of ``ConfigHistory``.

    It also raises AgentRefused, AgentFailed, and AgentSilent where the agent cannot be asked, which says what to do.
    """

    def __init__(self, agent: AgentRecord, *, timeout_seconds: float = 30.0) -> None:
        self._agent = agent
        self._timeout_seconds = timeout_seconds

    def set(self, edit: ConfigEdit) -> ElasticConfig:
        """Have the agent write the next config version."""
        return self._written({"do": "config-set", **asdict(edit)})

    def undo(self, refused: Collection[str] = (), *, above: int = 0) -> ElasticConfig:
        """Have the agent write the content before the present one as a new version."""
        return self._written({"do": "config-undo", "refused": list(refused), "above": above})

    def _written(self, request: Mapping[str, Any]) -> ElasticConfig:
        try:
            answer = ask(Path(self._agent.socket), request, timeout_seconds=self._timeout_seconds)
        except (AgentAbsent, AgentSilent) as error:
            agent = f"the agent of this file runs (pid {self._agent.pid} on {self._agent.host})"
            raise AgentSilent(f"{agent}, and cannot be asked: {error}; {_FORCE}") from None
        except ValueError as error:  # it is too long to be asked
            raise AgentRefused(f"{error}; {_FORCE}") from None
        if not isinstance(answer.get("config"), dict):
            raise AgentFailed("the agent is of another version of elastic_ext, and does not say what it has written")
        return ElasticConfig.from_dict(answer["config"])


def living_agent_of(config_file: Path, folders: Sequence[Path], *, host: str) -> AgentRecord | None:
    """The record, in one of ``folders``, of the running agent that writes ``config_file``; None if there is none.

    ``host`` is the name of this machine. AgentSilent where the agent runs on another machine, and cannot be asked from
    here.
    """
    for folder in dict.fromkeys(folders):
        agent = agent_in(folder)
        if agent is None or not agent.socket or not _is_same(Path(agent.config_file), config_file):
            continue
        if not is_running(agent, folder, host):
            continue
        if agent.host != host:
            where = f"the agent of this file runs on {agent.host}, and this is {host}"
            raise AgentSilent(f"{where}; run this command there, or {_FORCE}")
        return agent
    return None


def agent_in(folder: Path) -> AgentRecord | None:
    """The record that an agent has written into its run directory (agent.json); None where there is no valid one."""
    try:
        data = read_at_most(folder / AGENT_FILE, MOST_BYTES)
        return AgentRecord.from_json(data.decode(errors="replace"))
    except (OSError, ValueError):
        return None


def is_running(agent: AgentRecord, folder: Path, host: str) -> bool:
    """Whether the agent of the run directory ``folder`` is running, as far as this machine, ``host``, can tell."""
    if agent.host == host:
        return is_alive(ProcessIdentity(pid=agent.pid, start_ticks=agent.start_ticks))
    try:
        return is_held(folder)
    except OSError:  # storage without locks, of which nothing can be told
        return False


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
