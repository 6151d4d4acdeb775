"""Who a node is to a master, the same name each time an agent starts in the same place and a higher number each time;
and which master it has met."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import MasterAbsent, in_words
from elastic_ext.records.files import read_at_most, write_whole

__all__ = ["INCARNATION_FILE", "PLACE_FILE", "Acquaintance", "NodeSelf", "next_incarnation", "node_id_of"]

_logger = logging.getLogger(__name__)

INCARNATION_FILE = "incarnation"
PLACE_FILE = "place"
_MOST_PLACE = 100
_CHANCE_BYTES = 8
_MOST_CHARACTERS = 20
_MOST = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSelf:
    """What an agent says of itself when it joins."""

    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    job: str
    agent_id: str = ""
    """What the other agents of its job call it, another name at each start."""


@dataclass(kw_only=True, slots=True)
class Acquaintance:
    """Which master an agent has met, so that another one in its place is not taken for it."""

    job_id: str = ""
    epoch: int = 0

    def check(self, epoch: int, job_id: str = "") -> None:
        """MasterAbsent where somebody else has answered; else that is what is known from now on."""
        if job_id and self.job_id and job_id != self.job_id:
            raise MasterAbsent(f"the master of another job answers there (id {job_id[:80]}, not {self.job_id[:80]})")
        if epoch < self.epoch:
            raise MasterAbsent(f"a master answers there that was replaced (epoch {epoch}, and {self.epoch} was met)")
        self.job_id, self.epoch = job_id or self.job_id, epoch


def node_id_of(run_dir: Path, host: str) -> str:
    """The name of the node that has this run directory, on this machine.

    Containers may have host name and path in common, so that a part of it is chance, which is kept in the directory. A
    directory that is shared has one agent at a time, and is one place; one that was copied is another, although what
    is kept in it was copied too. Where nothing can be kept, each start is a place of its own.
    """
    place = f"{os.path.realpath(run_dir)}\n{_chance_in(run_dir)}"
    return f"{host}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:8]}"


def next_incarnation(run_dir: Path, *, now_ns: int) -> int:
    """A number above those of all agents that have had this run directory before, whatever the clock says.

    It is kept there; where that cannot be done, the clock alone has to tell them apart.
    """
    path = run_dir / INCARNATION_FILE
    found = max(now_ns, _kept(path) + 1)
    try:
        write_whole(path, f"{found}\n".encode())
    except OSError as error:
        _logger.debug("which start of this agent it is cannot be kept: %s", in_words(error))
    return found


def _chance_in(run_dir: Path) -> str:
    """What tells this directory from all others of its path; made where there is none of it yet."""
    path = run_dir / PLACE_FILE
    try:
        inode = str(run_dir.stat().st_ino)  # a copy has another one
        words = read_at_most(path, _MOST_PLACE).decode("ascii", "replace").split()
        if len(words) == 2 and words[1] == inode:
            return words[0]
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.debug("which place this is cannot be read: %s", in_words(error))
    chance = secrets.token_hex(_CHANCE_BYTES)
    try:
        write_whole(path, f"{chance} {run_dir.stat().st_ino}\n".encode())
    except OSError as error:
        _logger.debug("which place this is cannot be kept: %s", in_words(error))
    return chance


def _kept(path: Path) -> int:
    try:
        text = read_at_most(path, _MOST_CHARACTERS).decode("ascii", "replace").strip()
    except OSError:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and int(text) < _MOST else 0
