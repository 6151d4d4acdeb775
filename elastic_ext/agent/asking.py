"""How an agent is asked: the words on its socket, and the end that asks. The agent's end is control.py.

One line of JSON asks, ``{"do": NAME, ...}``; one line answers; then the connection ends. An answer that holds
``refused`` or ``error`` says in words why there is none: what was asked for cannot be, or it went wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError, in_words
from elastic_ext.records.json import shown

__all__ = [
    "MOST_ANSWER_BYTES",
    "MOST_REQUEST_BYTES",
    "AgentAbsent",
    "AgentFailed",
    "AgentRefused",
    "AgentSilent",
    "ControlError",
    "address_of",
    "ask",
]

MOST_REQUEST_BYTES = 64 << 10
MOST_ANSWER_BYTES = 4 << 20
_MOST_PATH_BYTES = 107  # of a socket's address, without the zero that ends it
_PIECE_BYTES = 64 << 10
_POLL_SECONDS = 0.02


class ControlError(ElasticError):
    """An agent could not be asked, or had no answer."""


class AgentAbsent(ControlError):
    """Nobody listens there."""


class AgentSilent(ControlError):
    """Somebody listens, and has not answered in time, or not in these words."""


class AgentRefused(ControlError):
    """The agent says that what was asked for cannot be."""


class AgentFailed(ControlError):
    """The agent says that something went wrong."""


def ask(path: Path, request: Mapping[str, Any], *, timeout_seconds: float = 30.0) -> dict[str, Any]:
    """What the agent that listens at ``path`` answers; a ControlError says why there is no answer.

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
    """Connect, waiting while so many do that no more may wait."""
    while True:
        end.settimeout(_seconds_until(deadline))
        try:
            with address_of(path) as address:
                end.connect(address)
            return
        except BlockingIOError:
            time.sleep(min(_POLL_SECONDS, _seconds_until(deadline)))


def _received(end: socket.socket, deadline: float) -> bytes:
    """All that comes until the other end closes, or as much as an answer may have and some more."""
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
    if not data:
        raise AgentSilent(f"the agent at {path} has closed the connection without an answer")
    try:
        if not data.endswith(b"\n"):
            raise ValueError("it has no end")
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        heard = shown(data[:40].decode(errors="replace"))
        raise AgentSilent(f"what answers at {path} is no agent of this library, or was cut short: {heard}")
    return answer


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """By what name a socket at ``path`` is bound or connected to: a longer one leads there through an open folder."""
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
