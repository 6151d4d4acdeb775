"""Streams of configs: who is sent what and when, and who has not said in time that it holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic_ext.master.configs import ConfigStream, ConfigStreams, Unacknowledged

SECONDS = 0.05  # within which a version has to be held


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20.0))


async def served(stream: ConfigStream, sent: list[int], newest: list[int]) -> None:
    """As the service does it."""
    while not stream.is_over:
        if stream.take_news(newest[0]):
            sent.append(newest[0])
        else:
            await stream.rung()


def test_each_newer_version_is_sent_once_and_none_that_is_held() -> None:
    async def test() -> None:
        streams, sent, newest = ConfigStreams(600.0), list[int](), [2]
        stream = streams.begin("a", 2)
        serving = asyncio.ensure_future(served(stream, sent, newest))
        await asyncio.sleep(0)
        assert not sent
        for version in (3, 4, 4):
            newest[0] = version
            streams.tell(version)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert sent == [3, 4]
        streams.end_all()
        await serving

    run(test())


def test_who_does_not_say_in_time_that_it_holds_what_it_was_sent_is_ended() -> None:
    async def test() -> None:
        streams = ConfigStreams(SECONDS)
        with pytest.raises(Unacknowledged, match="version 1 was sent"):
            await served(streams.begin("a", 0), [], [1])

    run(test())


def test_who_says_so_is_not_ended_and_hears_of_the_next_version() -> None:
    async def test() -> None:
        streams, sent, newest = ConfigStreams(SECONDS), list[int](), [1]
        serving = asyncio.ensure_future(served(streams.begin("a", 0), sent, newest))
        await asyncio.sleep(0)
        streams.acknowledge("a", 1)
        await asyncio.sleep(3 * SECONDS)  # what is tried takes this long
        assert not serving.done()
        newest[0] = 2
        streams.tell(2)
        streams.acknowledge("a", 1)  # the one before, again
        with pytest.raises(Unacknowledged, match="version 2 was sent"):
            await serving
        assert sent == [1, 2]

    run(test())


def test_a_newer_stream_of_a_node_ends_the_older_which_takes_nothing_with_it() -> None:
    async def test() -> None:
        streams, sent, newest = ConfigStreams(600.0), list[int](), [0]
        first = streams.begin("a", 0)
        serving = asyncio.ensure_future(served(first, [], newest))
        await asyncio.sleep(0)
        second = streams.begin("a", 0)
        await serving
        streams.forget("a", first)
        serving = asyncio.ensure_future(served(second, sent, newest))
        await asyncio.sleep(0)
        newest[0] = 1
        streams.tell(1)
        streams.acknowledge("a", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent == [1]
        streams.forget("a", second)
        await serving

    run(test())


def test_a_stream_that_is_cancelled_while_it_waits_leaves_no_timer_behind() -> None:
    async def test() -> None:
        streams = ConfigStreams(SECONDS)
        stream = streams.begin("a", 0)
        serving = asyncio.ensure_future(served(stream, [], [1]))
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        streams.forget("a", stream)
        await asyncio.sleep(2 * SECONDS)
        streams.tell(2)  # nobody is there

    run(test())
