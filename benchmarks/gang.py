"""Gang: processes that answer questions side by side, as ranks do, and are gone when the ``with`` ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, TypeVar

__all__ = ["Gang", "GangError"]

Setup = TypeVar("Setup")
Question = TypeVar("Question")
Answer = TypeVar("Answer")

_CLOSE_SECONDS = 10.0


class GangError(RuntimeError):
    """A member failed, died or did not answer in time."""


class Gang(Generic[Setup, Question, Answer]):
    """One process for each setup, in each of which ``member(setup)`` gives the function that answers.

    ``member`` is a context manager at the top of a module: processes are spawned, and import it by its name. It is
    left when the gang is closed, or when the process that made the gang is gone. Members that ``make_processes`` of
    their own may do so.
    """

    def __init__(
        self,
        member: Callable[[Setup], AbstractContextManager[Callable[[Question], Answer]]],
        setups: Sequence[Setup],
        *,
        make_processes: bool = False,
    ) -> None:
        self._member = member
        self._setups = setups
        self._is_daemon = not make_processes  # whose children python forbids
        self._processes: list[Any] = []
        self._connections: list[Connection[Any, Any]] = []

    def __enter__(self) -> Gang[Setup, Question, Answer]:
        context = multiprocessing.get_context("spawn")
        try:
            for setup in self._setups:
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._member, setup), daemon=self._is_daemon)
                self._connections.append(mine)
                process.start()
                self._processes.append(process)
                theirs.close()
            self.answers(deadline_seconds=120.0)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._kill()
            return
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self._kill()

    def tell(self, question: Question) -> None:
        """Put a question to every member; ``answers`` gets what they say."""
        for connection in self._connections:
            connection.send(question)

    def answers(self, *, deadline_seconds: float) -> list[Answer]:
        """What each member says to the last question, in their order; GangError if one does not."""
        deadline = time.monotonic() + deadline_seconds
        found = []
        for index, connection in enumerate(self._connections):
            if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                raise GangError(f"member {index} did not answer within {deadline_seconds:g} s")
            try:
                answer, failure = connection.recv()
            except EOFError:
                raise GangError(f"member {index} died; see its own output") from None
            if failure:
                raise GangError(f"member {index} failed:\n{failure}")
            found.append(answer)
        return found

    def ask(self, question: Question, *, deadline_seconds: float = 120.0) -> list[Answer]:
        """Put a question to every member and wait for what they say."""
        self.tell(question)
        return self.answers(deadline_seconds=deadline_seconds)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(
    connection: Connection[Any, Any], member: Callable[[Any], AbstractContextManager[Callable[[Any], Any]]], setup: Any
) -> None:
    """What a member's process does: say that it is ready, then answer until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; whoever made the gang ends it
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            with member(setup) as answer:
                connection.send((None, ""))
                while True:
                    connection.send((answer(_next_question(connection)), ""))
        except _NobodyAsks:
            return
        except Exception:
            connection.send((None, traceback.format_exc()))


class _NobodyAsks(BaseException):
    """The other end was closed."""


def _next_question(connection: Connection[Any, Any]) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise _NobodyAsks from None
