"""Agents of a master, made up, in a process of their own: they join, watch, and beat with what eight workers tell.

Each line that it prints is a JSON object; it is started by master_load.py, which reads them. Each agent has a
connection and a stream of configs of its own, says at once that it holds what it was sent, and beats at its own times,
evenly spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from benchmarks.master_beats import made_workers
from elastic_ext.doctor.hardware import look
from elastic_ext.doctor.records import NodeHardware
from elastic_ext.master.credentials import read_token
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire.master_pb2_grpc import MasterStub

Metadata = tuple[tuple[str, str], ...]

__all__ = ["AGENTS_PER_CHANNEL", "main", "quantile"]

AGENTS_PER_CHANNEL = 1
_AT_ONCE = 64  # that join
_PUSH_SECONDS = 20.0  # to wait for the last agent
_BETWEEN_PUSHES_SECONDS = 1.0


@dataclass(slots=True)
class Seen:
    """What all agents have seen of their master."""

    beats: list[float] = field(default_factory=list)
    """What each beat took,"""
    acknowledgements: list[float] = field(default_factory=list)
    """... and those that said that a config is held, all at once after a push."""
    lags: list[float] = field(default_factory=list)
    """How much later than it should have a beat was begun: this process's own fault."""
    failures: list[str] = field(default_factory=list)
    version: int = 0
    """The config that is being pushed,"""
    received: list[float] = field(default_factory=list)
    """... and when each agent had it."""
    num_wanted: int = 0
    """Seconds over which agents spread their saying that they hold a config."""
    is_received: asyncio.Event = field(default_factory=asyncio.Event)


class Agent:
    """One node's."""

    def __init__(
        self, number: int, num: int, stub: MasterStub, seen: Seen, hardware: NodeHardware, metadata: Metadata
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._seen = seen
        self._node = wire.Node(
            node_id=f"node-{number:05}", incarnation=1, host=f"host-{number:05}", pid=1, library="0.1.0"
        )
        workers = made_workers(number, end=time.time(), num_nodes=num)
        self._beat = wire.BeatRequest(node_id=self._node.node_id, incarnation=1, workers=workers)
        network = replace(hardware.network, host=self._node.host)
        system = replace(hardware.system, boot_id=self._node.host)
        self._hardware = replace(hardware, network=network, system=system).to_json()
        self._offset = random.Random(number).random()

    async def join(self) -> None:
        request = wire.JoinRequest(protocol=1, oldest_protocol=1, job="load", node=self._node, hardware=self._hardware)
        self._beat.epoch = (await self._stub.Join(request, timeout=60, metadata=self._metadata)).epoch

    async def watch(self) -> None:
        """Take configs as they come, and say so; again, after a while, where the stream has ended."""
        while True:
            try:
                await self._take_configs()
            except grpc.aio.AioRpcError as error:
                self._seen.failures.append(f"Watch: {error.code().name}: {error.details()}")
            await asyncio.sleep(2 * random.random())

    async def _take_configs(self) -> None:
        request = wire.WatchRequest(
            node_id=self._node.node_id, incarnation=1, epoch=self._beat.epoch, config_version=self._beat.held.version
        )
        async for push in self._stub.Watch(request, metadata=self._metadata):
            now = time.monotonic()
            self._beat.held.version = push.version
            seen = self._seen
            if push.version == seen.version:
                seen.received.append(now)
                if len(seen.received) >= seen.num_wanted:
                    seen.is_received.set()
            await asyncio.sleep(push.acknowledge_within_seconds * random.random())
            await self._send(seen.acknowledgements, with_windows=False)

    async def beat(self, every: float, num: int) -> None:
        """So many beats."""
        begin = time.monotonic() + every * self._offset
        for number in range(num):
            due = begin + number * every
            await asyncio.sleep(max(due - time.monotonic(), 0))
            self._seen.lags.append(time.monotonic() - due)
            for worker in self._beat.workers:
                worker.step += 30
                window = worker.windows[0]
                window.begin, window.end, window.step = window.end, window.end + every, worker.step
            await self._send(self._seen.beats, with_windows=True)

    async def _send(self, seconds: list[float], *, with_windows: bool) -> None:
        begin = time.monotonic()
        request = self._beat
        if not with_windows:
            request = wire.BeatRequest(
                node_id=self._beat.node_id, incarnation=1, epoch=self._beat.epoch, held=self._beat.held
            )
        try:
            await self._stub.Beat(request, timeout=60, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self._seen.failures.append(f"Beat: {error.code().name}: {error.details()}")
        else:
            seconds.append(time.monotonic() - begin)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so many of them lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def run(
    address: str, num: int, per_channel: int, every: float, num_beats: int, num_pushes: int, metadata: Metadata = ()
) -> None:
    """All of it, told on the way; beats begin when there is nothing more to read."""
    seen = Seen()
    hardware = look()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(-(-num // per_channel))]
    stubs = [MasterStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    agents = [Agent(number, num, stubs[number // per_channel], seen, hardware, metadata) for number in range(num)]
    begin = time.monotonic()
    await _at_most(_AT_ONCE, [agent.join for agent in agents])
    watching = [asyncio.ensure_future(agent.watch()) for agent in agents]
    _tell("joined", seconds=time.monotonic() - begin, num_channels=len(channels))
    await _push(stubs[0], seen, num, metadata)  # the first: all streams are there
    await _settle(seen, num)
    _tell("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.gather(*(agent.beat(every, num_beats) for agent in agents))
    _tell("beaten", **_summary(seen.beats), lag=quantile(seen.lags, 0.99), failures=seen.failures[:5])
    begin = time.monotonic()
    await stubs[0].GetStatus(wire.GetStatusRequest(without_workers=True), timeout=60, metadata=metadata)
    _tell("status", seconds=time.monotonic() - begin)
    for number in range(num_pushes):
        seconds, num_received = await _push(stubs[0], seen, num, metadata)
        _tell("pushed", seconds=seconds, num_received=num_received)
        await _settle(seen, (number + 2) * num)
    _tell("over", **_summary(seen.acknowledgements), failures=seen.failures[:5], num_failures=len(seen.failures))
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await asyncio.gather(*(channel.close(None) for channel in channels))


async def _push(stub: MasterStub, seen: Seen, num: int, metadata: Metadata) -> tuple[float, int]:
    """How long until the last agent has a new config, and how many have it."""
    seen.version, seen.num_wanted = seen.version + 1, num
    seen.received.clear()
    seen.is_received.clear()
    begin = time.monotonic()
    await stub.SetConfig(wire.SetConfigRequest(changes={"user.load": str(seen.version)}), timeout=60, metadata=metadata)
    try:
        await asyncio.wait_for(seen.is_received.wait(), _PUSH_SECONDS)
    except asyncio.TimeoutError:
        return float("inf"), len(seen.received)
    return max(seen.received) - begin, len(seen.received)


async def _settle(seen: Seen, num_acknowledgements: int) -> None:
    """Until all have said that they hold what they were sent, and a little longer."""
    limit = time.monotonic() + _PUSH_SECONDS
    while len(seen.acknowledgements) < num_acknowledgements and time.monotonic() < limit:
        await asyncio.sleep(0.1)
    await asyncio.sleep(_BETWEEN_PUSHES_SECONDS)


async def _at_most(num: int, calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    places = asyncio.Semaphore(num)

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        async with places:
            await call()

    await asyncio.gather(*(one(call) for call in calls))


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    found = {name: quantile(seconds, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {**found, "most": max(seconds, default=float("nan")), "num": len(seconds)}


def _tell(event: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds between an agent's beats")
    parser.add_argument("--beats", type=int, required=True, help="of each agent")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--per-channel", type=int, default=AGENTS_PER_CHANNEL, help="agents to each connection")
    parser.add_argument("--token-file", type=Path, help="with the master's token")
    given = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load = (given.agents, given.per_channel, given.every, given.beats, given.pushes)
    token = None if given.token_file is None else read_token(given.token_file)
    asyncio.run(run(given.address, *load, () if token is None else (("authorization", f"Bearer {token}"),)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
