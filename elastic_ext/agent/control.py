"""The agent's control socket: the format of requests and answers, ``ask`` for clients, and the agent's server."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_ext.errors import ElasticError, in_words
from elastic_ext.ranks.deadlines import OwnedThread
from elastic_ext.records.json import object_of, shown

__all__ = [
    "MOST_ANSWER_BYTES",
    "MOST_REQUEST_BYTES",
    "AgentAbsent",
    "AgentFailed",
    "AgentRefused",
    "AgentSilent",
    "Control",
    "ControlError",
    "Handler",
    "address_of",
    "ask",
]

_logger = logging.getLogger(__name__)


# --- how an agent is asked: the words on its socket, and the end that asks -------------------------------------------
# The agent's end is Control, below.
#
# One line of JSON asks, ``{"do": NAME, ...}``; one line answers; then the connection ends. An answer that holds
# ``refused`` or ``error`` says in words why there is none: what was asked for cannot be, or it went wrong.

MOST_REQUEST_BYTES = 64 << 10
MOST_ANSWER_BYTES = 4 << 20
_MOST_PATH_BYTES = 107  # of a socket's address, without the zero that ends it
_PIECE_BYTES = 64 << 10
_POLL_SECONDS = 0.02


class ControlError(ElasticError):
    """An agent could not be asked, or had no answer."""


class AgentAbsent(ControlError):
    """No agent listens on the control socket."""


class AgentSilent(ControlError):
    """The agent has not answered in time, or what answers on the socket is no agent of this library."""


class AgentRefused(ControlError):
    """The agent refuses a request as invalid."""


class AgentFailed(ControlError):
    """The agent answers that something went wrong as it did what was requested."""


def ask(path: Path, request: Mapping[str, Any], *, timeout_seconds: float = 30.0) -> dict[str, Any]:
    """The answer of the agent that listens on the socket at ``path``; a ControlError says why there is none.

    ValueError if the request cannot be sent.
    """
    line = json.dumps(request).encode() + b"\n"
    if len(line) > MOST_REQUEST_BYTES:
        raise ValueError(f"the request has {len(line)} bytes; allowed: at most {MOST_REQUEST_BYTES} to an agent")
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            _connect(end, path, deadline)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has answered before it heard all
                end.settimeout(_seconds_until(deadline))
                end.sendall(line)
            answer = _answer_of(_received(end, deadline), path)
    except TimeoutError:
        late = f"has not answered within {timeout_seconds:g} seconds, and may still do what it was asked to"
        raise AgentSilent(f"the agent at {path} {late}") from None
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise AgentAbsent(f"no agent listens at {path}") from None
    except OSError as error:
        raise AgentSilent(f"the agent at {path} cannot be asked: {in_words(error)}") from error
    if "refused" in answer:
        raise AgentRefused(str(answer["refused"]))
    if "error" in answer:
        raise AgentFailed(str(answer["error"]))
    return answer


def _connect(end: socket.socket, path: Path, deadline: float) -> None:
    """Connect to the socket at ``path``, trying again while its queue of connections is full; TimeoutError at last."""
    while True:
        end.settimeout(_seconds_until(deadline))
        try:
            with address_of(path) as address:
                end.connect(address)
            return
        except BlockingIOError:
            time.sleep(min(_POLL_SECONDS, _seconds_until(deadline)))


def _received(end: socket.socket, deadline: float) -> bytes:
    """All bytes until the other end closes, or somewhat more than an answer may have."""
    data = bytearray()
    while len(data) <= MOST_ANSWER_BYTES:
        end.settimeout(_seconds_until(deadline))
        try:
            piece = end.recv(_PIECE_BYTES)
        except ConnectionResetError:  # it has closed before it had heard all
            break
        if not piece:
            break
        data += piece
    return bytes(data)


def _answer_of(data: bytes, path: Path) -> dict[str, Any]:
    """The answer in what was received; AgentSilent where that is none."""
    if not data:
        raise AgentSilent(f"the agent at {path} has closed the connection without an answer")
    try:
        if not data.endswith(b"\n"):
            raise ValueError("it has no end")
        return object_of(data.decode())
    except ValueError:
        heard = shown(data[:40].decode(errors="replace"))
        raise AgentSilent(f"what answers at {path} is no agent of this library, or was cut short: {heard}") from None


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """The name to bind or connect a socket at ``path`` by; a path too long for that is shortened by an open folder."""
    if len(os.fsencode(path)) <= _MOST_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}"
        room = _MOST_PATH_BYTES - len(os.fsencode(short)) + len(os.fsencode(path.name))
        if room < len(os.fsencode(path.name)):
            raise ValueError(f"the socket's name {path.name} is too long; allowed: at most {room} bytes in its folder")
        yield short
    finally:
        os.close(folder)


def _seconds_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


# --- the socket by which an agent is spoken to, by processes of its own user on its own machine ----------------------
# Nothing here knows what is asked for.

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Called with a request, gives its answer; ValueError refuses the request, OSError or ElasticError is a failure."""
_PAUSE_SECONDS = 0.2
_JOIN_SECONDS = 30.0


class Control:
    """The server of the agent's control socket: listens at ``path`` from ``start()`` (or ``with``) to ``close()``.

    It has one thread, on which the ``handlers`` (by the name of a request) are called, one after another. A connection
    that does not bring a whole request, or take its answer, within ``patience_seconds`` is dropped. Processes of the
    user ``uid`` alone are answered, by default of this process' own user.
    """

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        *,
        patience_seconds: float = 5.0,
        most_connections: int = 16,
        uid: int | None = None,
    ) -> None:
        self.path = path
        self._handlers = dict(handlers)
        self._patience_seconds = patience_seconds
        self._most_connections = most_connections
        self._uid = os.getuid() if uid is None else uid
        self._thread = OwnedThread(self._run, name="elastic_ext control", wake=self._wake)
        self._connections: set[_Connection] = set()  # this and what follows is the thread's
        self._pause_until: float | None = None
        self._is_short = False  # of what it takes to let somebody in; said once
        self._is_listening = False
        self._inode = 0

    def start(self) -> None:
        """Begin to listen. OSError where the socket cannot be made; ValueError where its file name is too long."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._waker, self._woken = socket.socketpair()
        try:
            self._listener.setblocking(False)
            os.fchmod(self._listener.fileno(), 0o600)  # which the file has from its first moment
            _remove_socket(self.path)
            with address_of(self.path) as address:
                self._listener.bind(address)
            self._inode = os.lstat(self.path).st_ino
            self._listener.listen(self._most_connections)
            self._selector.register(self._woken, selectors.EVENT_READ)
        except BaseException:
            self._release()
            raise
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread that listens on the socket runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening, and remove the socket. Connections end without an answer. Closing twice is allowed."""
        if self._thread.is_started and not self._thread.close(_JOIN_SECONDS):
            _logger.warning("a request to this agent has not ended; the thread that serves it is left behind")

    def __enter__(self) -> Control:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            while not self._thread.stopping.is_set():
                self._tidy()
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    if self._thread.stopping.is_set():
                        break
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Connection):
                        self._serve(key.data)
        except Exception:  # the top of a thread: the agent goes on, and those who ask find nobody
            _logger.exception("the control socket has failed: this agent takes no request any more")
        finally:
            self._release()

    def _seconds_to_wait(self) -> float | None:
        moments = [connection.deadline for connection in self._connections]
        if self._pause_until is not None:
            moments.append(self._pause_until)
        return max(min(moments) - time.monotonic(), 0.0) if moments else None

    def _tidy(self) -> None:
        """Drop connections that take too long, and accept new ones only while there is room for another."""
        now = time.monotonic()
        for connection in [each for each in self._connections if now >= each.deadline]:
            self._drop(connection)
        if self._pause_until is not None and now >= self._pause_until:
            self._pause_until = None
        listens = self._pause_until is None and len(self._connections) < self._most_connections
        if listens and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_listening and not listens:
            self._selector.unregister(self._listener)
        self._is_listening = listens

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # such as too many open files, which asking again at once does not change
            if not self._is_short:
                _logger.warning("the control socket takes no request for the moment: %s", in_words(error))
            self._is_short = True
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            return
        self._is_short = False
        connection = _Connection(accepted, deadline=time.monotonic() + self._patience_seconds)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        if _uid_of(accepted) != self._uid:
            words = f"this agent answers processes of user {self._uid} alone; run the command as that user"
            self._begin_answer(connection, _line_of({"refused": words}))

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.unsent:
                connection.send()
            else:
                self._hear(connection)
        except OSError:  # whoever asked has gone
            connection.is_over = True
        if connection.is_over:
            self._drop(connection)

    def _hear(self, connection: _Connection) -> None:
        """Receive from a connection; once its request is whole, answer it."""
        line = connection.receive()
        if line is None:
            return
        began = time.monotonic()
        answer = self._answer_to(line)
        for each in self._connections:  # nobody else was heard meanwhile
            each.deadline += time.monotonic() - began
        self._begin_answer(connection, answer)

    def _answer_to(self, line: bytes) -> bytes:
        """The line that answers a request, by the handler of its name; a refusal or an error is a line as well."""
        try:
            request = _request_of(line)
            return _line_of(self._handlers[_name_in(request, self._handlers)](request))
        except ValueError as error:
            return _line_of({"refused": str(error)})
        except (OSError, ElasticError) as error:
            return _line_of({"error": in_words(error)})
        except Exception as error:  # of whatever answers: only the one who asked is to suffer by that
            _logger.exception("a request to this agent failed")
            return _line_of({"error": f"{in_words(error)} (the agent's log says more)"})

    def _begin_answer(self, connection: _Connection, line: bytes) -> None:
        connection.unsent = memoryview(line)
        connection.deadline = time.monotonic() + self._patience_seconds
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _release(self) -> None:
        """Close everything, and remove the socket unless another has its name by now."""
        for connection in list(self._connections):
            self._drop(connection)
        with contextlib.suppress(OSError):
            if self._inode and os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        for each in (self._listener, self._waker, self._woken, self._selector):
            each.close()


class _Connection:
    """One connection to the control socket: what it has sent so far, and what of its answer is unsent."""

    def __init__(self, accepted: socket.socket, *, deadline: float) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.deadline = deadline
        self.unsent = memoryview(b"")
        self.is_over = False
        self._received = bytearray()

    def receive(self) -> bytes | None:
        """The request's line once all of it has come, else None; of one that is too long, more than is allowed."""
        piece = self.socket.recv(_PIECE_BYTES)
        self.is_over = not piece
        self._received += piece
        end = self._received.find(b"\n", len(self._received) - len(piece))
        if end < 0 and len(self._received) <= MOST_REQUEST_BYTES:
            return None
        return bytes(self._received if end < 0 else self._received[:end])

    def send(self) -> None:
        self.unsent = self.unsent[self.socket.send(self.unsent[:_PIECE_BYTES]) :]
        self.is_over = not self.unsent


def _request_of(line: bytes) -> dict[str, Any]:
    if len(line) > MOST_REQUEST_BYTES:
        raise ValueError(f"the request is too long; allowed: at most {MOST_REQUEST_BYTES} bytes")
    try:
        return object_of(line.decode())
    except ValueError:
        raise ValueError("the request is not a JSON object; allowed: one on a single line") from None


def _name_in(request: Mapping[str, Any], handlers: Mapping[str, Handler]) -> str:
    """The name of what a request asks for, its ``do``; ValueError where no handler has that name."""
    name = request.get("do")
    if not isinstance(name, str) or name not in handlers:
        raise ValueError(f"do is {shown(name)}; allowed: one of {', '.join(sorted(handlers))}")
    return name


def _line_of(answer: Mapping[str, Any]) -> bytes:
    line = json.dumps(answer).encode() + b"\n"
    if len(line) > MOST_ANSWER_BYTES:
        return _line_of({"error": f"the answer has {len(line)} bytes, and at most {MOST_ANSWER_BYTES} are sent"})
    return line


def _remove_socket(path: Path) -> None:
    """Remove the socket that a killed agent has left at ``path``; FileExistsError where something else is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else than a socket", str(path))
        os.unlink(path)


def _uid_of(connected: socket.socket) -> int:
    """The id of the user whose process is at the other end of a connection."""
    size = struct.calcsize("3i")
    uid: int = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid
