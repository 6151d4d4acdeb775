"""The standard health service of gRPC, as probes ask it: written out here, since its package wants a newer protobuf.

Anybody may ask, without the token: all that is said is whether the master serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from .guard import Ended, Peer

__all__ = ["SERVICE", "Health"]

SERVICE = "grpc.health.v1.Health"
_KNOWN = ("", "elastic_ext.v1.Master")
_SERVING, _NOT_SERVING, _UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"  # HealthCheckResponse
_MOST_WATCHING = 64
_FIELD_ONE_TEXT = 0x0A


class Health:
    """Whether this master serves."""

    def __init__(self) -> None:
        self._is_serving = True
        self._has_ended = asyncio.Event()
        self._num_watching = 0

    @property
    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """For the server to answer with."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    def end(self) -> None:
        """It does no more."""
        self._is_serving = False
        self._has_ended.set()

    async def _check(self, request: bytes, peer: Peer) -> bytes:
        if _service_in(request) not in _KNOWN:
            raise Ended(grpc.StatusCode.NOT_FOUND, f"no such service; there is {_KNOWN[1]}")
        return self._standing

    async def _watch(self, request: bytes, peer: Peer) -> AsyncIterator[bytes]:
        if self._num_watching >= _MOST_WATCHING:
            raise Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_WATCHING} others watch already")
        self._num_watching += 1
        try:
            yield self._standing if _service_in(request) in _KNOWN else _UNKNOWN
            await self._has_ended.wait()
            yield self._standing
        finally:
            self._num_watching -= 1

    @property
    def _standing(self) -> bytes:
        return _SERVING if self._is_serving else _NOT_SERVING


def _service_in(request: bytes) -> str | None:
    """The service that a HealthCheckRequest asks for; None where it is none."""
    if not request:
        return ""
    size = request[1] if len(request) > 1 else -1
    if request[0] != _FIELD_ONE_TEXT or not 0 <= size < 128 or len(request) != 2 + size:
        return None
    return request[2:].decode(errors="replace")
