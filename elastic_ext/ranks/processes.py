"""Processes of this machine: named so that no other is taken for one, and what a forked one does first."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ProcessIdentity", "do_in_forked_processes", "end_groups", "is_alive", "process_of", "this_process"]

_logger = logging.getLogger(__name__)


# --- processes named by pid and start --------------------------------------------------------------------------------
# So no other process, which got the pid later, is taken for one.

_PROC = Path("/proc")
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process by its pid and start time: pids are given out again, the two of them together are not."""

    pid: int
    start_ticks: int


def process_of(pid: int) -> ProcessIdentity | None:
    """The process that has ``pid`` now; None if none has, or it has ended and nobody has asked how."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = text.rpartition(")")[2].split()  # its name, in parentheses, may hold anything
    if values[0] in ("Z", "X"):
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(values[19]))


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    found = process_of(os.getpid())
    if found is None:
        words = "there is no entry of this process; mount the proc file system there"
        raise OSError(errno.ENOENT, words, str(_PROC))
    return found


def is_alive(process: ProcessIdentity) -> bool:
    """Whether ``process`` has not ended."""
    return process_of(process.pid) == process


def end_groups(leaders: Iterable[ProcessIdentity], *, patience_seconds: float) -> list[ProcessIdentity]:
    """End the process groups of ``leaders`` by SIGTERM, and by SIGKILL after ``patience_seconds``.

    Gives the leaders of groups that had to be killed. A leader that has ended may have left others in its group: its
    pid is not given out again as long as there is one.
    """
    groups = [leader for leader in leaders if _is_its_group(leader)]
    for leader in groups:
        _signal(leader, signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    while groups and time.monotonic() < deadline:
        groups = [leader for leader in groups if _has_members(leader)]
        if groups:
            time.sleep(_POLL_SECONDS)
    for leader in groups:
        _signal(leader, signal.SIGKILL)
    return groups


def _is_its_group(leader: ProcessIdentity) -> bool:
    found = process_of(leader.pid)
    return _has_members(leader) and (found is None or found == leader)


def _has_members(leader: ProcessIdentity) -> bool:
    """Whether a process in the leader's group has not ended; zombies count as ended."""
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                values = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
                if int(values[2]) == leader.pid and values[0] not in ("Z", "X"):
                    return True
    return False


def _signal(leader: ProcessIdentity, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)


# --- what a process that is forked from this one, such as a loader's worker, does before anything else ---------------
# Python takes no fork hook back, and calls one that is registered while another thread forks after that fork without
# having called it before. So there is one set of hooks for a process, whose halves do not need each other.

_Owner = TypeVar("_Owner")

_ACTIONS: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


class _Masks(threading.local):
    """The signals that the thread which forks had blocked before; several where a hook is there twice."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_MASKS = _Masks()


def do_in_forked_processes(owner: _Owner, action: Callable[[_Owner], None]) -> None:
    """Have ``action(owner)`` called in each process that is forked from here on, for as long as ``owner`` lives.

    No signal comes there before that. It may be called more than once, and in processes that those fork.
    """
    _ACTIONS[owner] = action
    _register()


@functools.cache
def _register() -> None:  # two threads at once may both do it, and the hooks bear that
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_act)


def _block_signals() -> None:
    _MASKS.before.append(signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()))


def _unblock_signals() -> None:
    if _MASKS.before:
        signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.before.pop())


def _act() -> None:
    try:
        for owner, action in list(_ACTIONS.items()):
            try:
                action(owner)
            except OSError as error:  # a script that becomes a daemon has closed its files: the others' turn comes yet
                _logger.warning(
                    "a forked process could not give up the %s of its parent, and may go on using it: %s",
                    type(owner).__name__,
                    error,
                )
    finally:
        _unblock_signals()
