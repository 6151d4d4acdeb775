"""A node's identity to a master: an id that stays the same for a run directory, and an incarnation that rises with each
start of an agent there; and the identity of the master that the agent has met."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import MasterAbsent, in_words
from elastic_ext.records.files import read_at_most, write_whole

__all__ = ["INCARNATION_FILE", "PLACE_FILE", "KnownMaster", "NodeSelf", "next_incarnation", "node_id_of"]

_logger = logging.getLogger(__name__)

INCARNATION_FILE = "incarnation"
PLACE_FILE = "place"
_MOST_PLACE = 100
_CHANCE_BYTES = 8
_MOST_CHARACTERS = 20
_MOST = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSelf:
    """A node's identity, as its agent gives it to the master when it joins."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    job: str
    agent_id: str = ""
    """The agent's id in membership plans, which is new at each start."""


@dataclass(kw_only=True, slots=True)
class KnownMaster:
    """The job id and epoch of the master that an agent has met, by which it recognises another or an older one."""

    job_id: str = ""
    epoch: int = 0

    def check(self, epoch: int, job_id: str = "") -> None:
        """Check the epoch and job id in an answer, and remember them; MasterAbsent for another or an older master."""
        if job_id and self.job_id and job_id != self.job_id:
            raise MasterAbsent(f"the master that answers is of another job (id {job_id[:80]}, not {self.job_id[:80]})")
        if epoch < self.epoch:
            words = f"the master that answers was replaced by a later one (epoch {self.epoch}; its own is {epoch})"
            raise MasterAbsent(words)
        self.job_id, self.epoch = job_id or self.job_id, epoch


def node_id_of(run_dir: Path, host: str) -> str:
    """The id of the node that has this run directory on this machine; the same at each start of an agent.

    Containers may share host name and path, so that a part of the id is random and kept in the directory. A shared
    directory has one agent at a time, and is one node; a copied one is another, although the random part was copied
    too. Where nothing can be kept, each start is a node of its own.
    """
    place = f"{os.path.realpath(run_dir)}\n{_chance_in(run_dir)}"
    return f"{host}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def next_incarnation(run_dir: Path, *, now_ns: int) -> int:
    """The incarnation of an agent that starts: above those of all earlier agents in this run directory.

    It is kept there, so that a clock put back does no harm; where it cannot be kept it is the clock, in nanoseconds.
    """
    path = run_dir / INCARNATION_FILE
    found = max(now_ns, _kept(path) + 1)
    try:
        write_whole(path, f"{found}\n".encode())
    except OSError as error:
        _logger.debug("the incarnation of this agent cannot be written: %s", in_words(error))
    return found


def _chance_in(run_dir: Path) -> str:
    """The random part of a node's id, kept in its run directory; made anew where there is none, or it was copied."""
    path = run_dir / PLACE_FILE
    try:
        inode = str(run_dir.stat().st_ino)  # a copy has another one
        words = read_at_most(path, _MOST_PLACE).decode("ascii", "replace").split()
        if len(words) == 2 and words[1] == inode:
            return words[0]
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.debug("the random part of this node's id cannot be read: %s", in_words(error))
    chance = secrets.token_hex(_CHANCE_BYTES)
    try:
        write_whole(path, f"{chance} {run_dir.stat().st_ino}\n".encode())
    except OSError as error:
        _logger.debug("the random part of this node's id cannot be written: %s", in_words(error))
    return chance


def _kept(path: Path) -> int:
    """The incarnation that is kept in ``path``; 0 where there is none."""
    try:
        text = read_at_most(path, _MOST_CHARACTERS).decode("ascii", "replace").strip()
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and int(text) < _MOST else 0
