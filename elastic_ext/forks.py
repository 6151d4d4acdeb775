"""Forks: what a process that is forked from this one, such as a loader's worker, does before anything else.

Python takes no fork hook back, and calls one that is registered while another thread forks after that fork without
having called it before. So there is one set of hooks for a process, whose halves do not need each other.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["do_in_forked_processes"]

_logger = logging.getLogger(__name__)

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
                _logger.warning("a forked process may keep what is its parent's: %s: %s", type(owner).__name__, error)
    finally:
        _unblock_signals()
