"""What code asks of the system, call by call: counted, and at a chosen call killed, failed, or interrupted.

Python tells a profile function of each function written in C before it is called, which is where things happen here.
The code under test runs as it is.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from unittest import mock

__all__ = ["Calls", "at_call", "can_fail", "every_kill", "failure", "recorded"]

_MODULES = frozenset({"posix", "fcntl", "_io"})
_SETTING = threading.Lock()
_HARMLESS = frozenset({"fspath", "getpid", "urandom", "register_at_fork", "fsencode", "fsdecode", "fileno"})


class Calls:
    """The calls that were made while they were watched, by name, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []


def _name_of(function: object) -> str | None:
    """The name of a function that has to do with files, None for another."""
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    if owner in (io.StringIO, io.BytesIO):  # which are memory
        return None
    modules = {getattr(function, "__module__", None), getattr(owner, "__module__", None)}
    name = str(getattr(function, "__name__", ""))
    return name if modules & _MODULES and name not in _HARMLESS else None


@contextlib.contextmanager
def at_call(
    number: int,
    happens: Callable[[], None],
    *,
    counts: Callable[[str], bool] = lambda name: True,
    is_after: bool = False,
    in_new_threads: bool = False,
) -> Iterator[Calls]:
    """Within this, just before the call ``number`` (from 0) of those whose name counts, ``happens`` is called once.

    Just after it where it ``is_after``: the call has been made, and what ``happens`` raises is its answer. Calls are
    those of this thread, and of those that are started meanwhile where they are ``in_new_threads``.
    """
    calls, is_over = Calls(), threading.Event()
    told = "c_return" if is_after else "c_call"

    def watch(frame: FrameType, event: str, function: object) -> None:
        name = _name_of(function) if event == told and not is_over.is_set() else None
        if name is not None and counts(name):
            calls.names.append(name)
            if len(calls.names) == number + 1:
                _set_profile(None)
                happens()
                _set_profile(watch)

    before = sys.getprofile()
    with _in_new_threads(watch) if in_new_threads else contextlib.nullcontext():
        _set_profile(watch)
        try:
            yield calls
        finally:
            _set_profile(before)
            is_over.set()


def _set_profile(function: Callable[..., object] | None) -> None:
    """Set this thread's profile function; Python refuses it where another thread is about the same."""
    with _SETTING:
        sys.setprofile(function)


@contextlib.contextmanager
def _in_new_threads(watch: Callable[..., object]) -> Iterator[None]:
    """Within this, threads that are started have a profile function, as with ``threading.setprofile``."""
    begin: Callable[[threading.Thread], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begin_watched(thread: threading.Thread) -> None:
        _set_profile(watch)
        begin(thread)

    with mock.patch.object(threading.Thread, "_bootstrap_inner", begin_watched):
        yield


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """Within this, calls are noted and nothing happens."""
    with at_call(-1, lambda: None) as calls:
        yield calls


def can_fail(name: str) -> bool:
    """Whether a call may fail and leave all as it was; one that closes a file has closed it all the same."""
    return name not in ("close", "__enter__", "__exit__")


def failure(number: int) -> Callable[[], None]:
    """What fails a call with the error ``number``, as a file system would."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def every_kill(prepare: Callable[[], Callable[[], None]], check: Callable[[int], None], *, stride: int = 1) -> int:
    """Kill what ``prepare`` gives at its first call, then ``stride`` calls later, and so on; at which one it ends.

    Each time in a child that is forked for it, so that no thread may run here; ``check`` looks at what is left.
    """
    number = 0
    while True:
        act = prepare()
        child = os.fork()
        if child == 0:
            _run_and_die(act, number)
        _, status = os.waitpid(child, 0)
        check(number)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"what was to be killed at call {number} failed by itself"
            return number
        assert os.WTERMSIG(status) == signal.SIGKILL
        number += stride


def _run_and_die(act: Callable[[], None], number: int) -> None:
    code = 1
    try:
        with at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            act()
        code = 0
    finally:
        os._exit(code)
