"""Who calls a master again and again without its token, in ways of their own; or spins beside it and calls nobody.

Each is a process of its own, started by master_flood.py: it says that it is there, begins with the first line that it
is told, and at the end of what it is told says how many calls were refused and how many answered.

    messages     128 calls at once by one connection, each of 4 MB of empty parts
    calls        128 small calls at once by each of eight connections
    connections  sixteen at once, each with one call and a wrong token
    silence      128 calls at once by each of eight connections, of which no message ever comes
    spinning     none
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc

__all__ = ["WAYS", "main"]

_BEAT = "/elastic_ext.v1.Master/Beat"
_AT_ONCE = 128
_NUM_CONNECTIONS = 8
_NUM_NEW_AT_ONCE = 16
_LARGE = b"\x32\x00" * 2_000_000
_SMALL = b"\x0a\x01a\x10\x01"
_WRONG = (("authorization", "Bearer a-token-that-was-guessed"),)
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


class Calls:
    """What became of them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_refused = 0
        self.num_answered = 0

    def channel(self) -> Any:
        return grpc.aio.insecure_channel(self.address, options=_OPTIONS)

    async def one(self, call: Any) -> None:
        try:
            await call
            self.num_answered += 1
        except grpc.aio.AioRpcError:
            self.num_refused += 1


async def _at_once(num: int, one: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """So many at any time, for ever."""

    async def again() -> None:
        while True:
            await one()

    await asyncio.gather(*(again() for _ in range(num)))


async def _messages(calls: Calls) -> None:
    beat = calls.channel().unary_unary(_BEAT)
    await _at_once(_AT_ONCE, lambda: calls.one(beat(_LARGE)))


async def _calls(calls: Calls) -> None:
    beats = [calls.channel().unary_unary(_BEAT) for _ in range(_NUM_CONNECTIONS)]
    await asyncio.gather(*(_at_once(_AT_ONCE, lambda beat=beat: calls.one(beat(_SMALL))) for beat in beats))  # type: ignore[misc]


async def _connections(calls: Calls) -> None:
    async def one() -> None:
        async with calls.channel() as channel:
            await calls.one(channel.unary_unary(_BEAT)(_SMALL, metadata=_WRONG))

    await _at_once(_NUM_NEW_AT_ONCE, one)


async def _silence(calls: Calls) -> None:
    beats = [calls.channel().stream_unary(_BEAT) for _ in range(_NUM_CONNECTIONS)]  # given no messages, it sends none
    await asyncio.gather(*(_at_once(_AT_ONCE, lambda beat=beat: calls.one(beat())) for beat in beats))  # type: ignore[misc]


async def _spinning(calls: Calls) -> None:
    while True:
        for _ in range(10_000):
            pass
        await asyncio.sleep(0)


WAYS: Mapping[str, Callable[[Calls], Coroutine[Any, Any, None]]] = {
    "messages": _messages,
    "calls": _calls,
    "connections": _connections,
    "silence": _silence,
    "spinning": _spinning,
}


async def run(address: str, way: str) -> None:
    """All of it, told on the way."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    await reader.readline()
    calls = Calls(address)
    task = asyncio.ensure_future(WAYS[way](calls))
    await reader.read()
    task.cancel()
    print(calls.num_refused, calls.num_answered, flush=True)
    os._exit(0)  # with thousands of calls under way


def main(arguments: Sequence[str]) -> int:
    address, way = arguments
    asyncio.run(run(address, way))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
