"""MetricsServer: a small HTTP server for what Prometheus reads, and for probes. What it tells is made elsewhere.

One request a connection, each within a few seconds and a few kilobytes; of many connections at once those that are too
many are told so and closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .prometheus import CONTENT_TYPE

__all__ = ["MetricsServer"]

_MOST_HEADER_BYTES = 8 << 10
_MOST_LEFT_BYTES = 64 << 10  # of what comes after a request, and is read so that the answer arrives
_READ_SECONDS = 5.0
_WRITE_SECONDS = 10.0
_LEFT_SECONDS = 1.0
_MOST_CONNECTIONS = 32
_FRESH_SECONDS = 1.0
_WORDS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What of a request matters here."""

    method: str
    path: str
    headers: Mapping[str, tuple[str, ...]]
    """By name in small letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What is sent back."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


class MetricsServer:
    """Answers at one port, on the event loop that starts it."""

    def __init__(
        self,
        render: Callable[[], str],
        is_healthy: Callable[[], bool],
        *,
        token: str | None = None,
        read_seconds: float = _READ_SECONDS,
        most_connections: int = _MOST_CONNECTIONS,
    ) -> None:
        """``render`` gives the page of metrics, and is asked at most once a second; with a ``token`` whoever reads it
        has to give that. Anybody may ask whether the master is healthy."""
        self._render = render
        self._is_healthy = is_healthy
        self._credentials = None if token is None else f"Bearer {token}".encode()
        self._read_seconds = read_seconds
        self._most_connections = most_connections
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._page: tuple[float, str] | None = None

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Listen, and give the port, which is any free one for 0; OSError where that cannot be."""
        self._server = await asyncio.start_server(
            self._connected,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._read_seconds,
            limit=_MOST_HEADER_BYTES,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Listen no more, and end what is under way. Twice is allowed."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.TimeoutError):  # whoever asked is gone, or does not read
            writer.transport.abort()
        except asyncio.CancelledError:  # the master ends
            writer.transport.abort()
            raise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) > self._most_connections:
            answer, has_body = _Answer(status=503, text="too many connections\n"), True
        else:
            answer, has_body = await self._answer(reader)
        writer.write(_as_bytes(answer, has_body=has_body))
        await asyncio.wait_for(writer.drain(), _WRITE_SECONDS)
        if writer.can_write_eof():
            writer.write_eof()
        if len(self._tasks) <= self._most_connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_read_the_rest(reader), _LEFT_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[_Answer, bool]:
        """What to answer, and whether with its text."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._read_seconds)
        except asyncio.LimitOverrunError:
            return _Answer(status=431, text=f"a request may have {_MOST_HEADER_BYTES} bytes of headers\n"), True
        except asyncio.IncompleteReadError:
            return _Answer(status=400, text="the request has no end\n"), True
        except asyncio.TimeoutError:
            return _Answer(status=408, text=f"a request has to come within {self._read_seconds:g} seconds\n"), True
        request = _request_in(head)
        if request is None:
            return _Answer(status=400, text="this is no request of HTTP/1.1\n"), True
        return self._answer_to(request), request.method != "HEAD"

    def _answer_to(self, request: _Request) -> _Answer:
        if request.headers.get("content-length", ("0",)) != ("0",) or "transfer-encoding" in request.headers:
            return _Answer(status=413, text="nothing is taken here\n")
        if request.path not in ("/metrics", "/healthz"):
            return _Answer(status=404, text="there are /metrics and /healthz\n")
        if request.method not in ("GET", "HEAD"):
            return _Answer(status=405, text="it can be read with GET\n", headers={"Allow": "GET, HEAD"})
        if request.path == "/healthz":
            is_healthy = self._is_healthy()
            return _Answer(status=200 if is_healthy else 503, text="ok\n" if is_healthy else "it ends\n")
        if self._credentials is not None and not self._is_theirs(request):
            text = "the master's token is wanted, as a bearer token\n"
            return _Answer(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        return _Answer(status=200, text=self._newest(), headers={"Content-Type": CONTENT_TYPE})

    def _is_theirs(self, request: _Request) -> bool:
        """Whether the caller has the token; how long that takes does not depend on how much of it is right."""
        given = request.headers.get("authorization", ())
        found = given[0] if len(given) == 1 else ""
        assert self._credentials is not None
        return hmac.compare_digest(found.encode("latin-1"), self._credentials)

    def _newest(self) -> str:
        now = asyncio.get_running_loop().time()
        if self._page is None or now - self._page[0] >= _FRESH_SECONDS:
            self._page = now, self._render()
        return self._page[1]


def _request_in(head: bytes) -> _Request | None:
    """None for what is no request."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[1].startswith("/") or parts[2] not in ("HTTP/1.0", "HTTP/1.1"):
        return None
    headers: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or not line.isprintable():
            return None
        headers[name.lower()] = (*headers.get(name.lower(), ()), value.strip())
    return _Request(method=parts[0], path=parts[1].partition("?")[0], headers=headers)


def _as_bytes(answer: _Answer, *, has_body: bool) -> bytes:
    body = answer.text.encode()
    headers = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {_WORDS[answer.status]}", *(f"{key}: {text}" for key, text in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + (body if has_body else b"")


async def _read_the_rest(reader: asyncio.StreamReader) -> None:
    """What was sent behind a request: a connection that is closed with something unread in it loses the answer."""
    left = _MOST_LEFT_BYTES
    while left > 0 and (data := await reader.read(left)):
        left -= len(data)
