"""What one rank does in benchmarks/agreement.py: train in each of the ways compared, and follow changes of a config."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_ext import follow_config

__all__ = ["Block", "Changes", "Done", "Rank", "Seen", "SideName", "StepSize", "changing_rank", "training_rank"]

SideName = Literal["bare", "1", "10", "auto", "all_reduce", "object", "store"]

_WIDTH = 128  # of the square matrices that are multiplied
_SECONDS_TO_WAIT = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, and where it finds the others."""

    rank: int
    world_size: int
    port: int
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """The work of one step: matrix products, then a wait as for a device."""

    num_products: int
    wait_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some steps to take in one of the ways."""

    side: SideName
    num_steps: int
    size: StepSize
    is_call_timed: bool = False
    """Whether to time the call at each boundary too, which itself takes a little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a rank made of a block; times are per step."""

    wall_seconds: float
    cpu_seconds: float
    call_seconds: float
    work: tuple[int, float]
    every: int
    """How many steps lay between two agreements at the end; 0 where nothing agrees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """A config file to follow until a version is in force."""

    size: StepSize
    last_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """When a rank stood at each boundary, and which version came into force at which of them."""

    boundary_ns: list[int]
    applied: dict[int, int]
    """Version to the index of the boundary."""


class Training:
    """A step like one of data-parallel training: arithmetic, then a reduction that no rank leaves before the others."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._start = torch.randn(_WIDTH, _WIDTH, generator=generator)
        self._weight = torch.randn(_WIDTH, _WIDTH, generator=generator) / _WIDTH**0.5
        self._reduced = torch.zeros(1)
        self._state = self._start.clone()

    def restart(self) -> None:
        self._state = self._start.clone()

    def step(self, size: StepSize) -> None:
        for _ in range(size.num_products):
            self._state = torch.tanh(self._state @ self._weight)
        if size.wait_seconds:
            time.sleep(size.wait_seconds)
        self._reduced.copy_(self._state[0, :1])
        dist.all_reduce(self._reduced)

    def checksum(self) -> float:
        return float(self._state.double().sum() + self._reduced.double().sum())


@contextmanager
def training_rank(setup: Rank) -> Iterator[Callable[[Block], Done]]:
    """A rank with a follower for each interval, and what the peers need, all made before anything is timed."""
    with _joined(setup) as store, ExitStack() as stack:
        training = Training(setup.rank)
        followers = {}
        for name, every in _INTERVALS.items():
            folder = setup.folder / name
            follower = follow_config(folder / "config.json", job=name, run_dir=folder, agree_every_steps=every)
            stack.callback(follower.close)
            follower.start()
            followers[name] = follower
        group = dist.new_group(backend="gloo")
        number = torch.zeros(1, dtype=torch.int64)
        config = [{"version": 1, "learning_rate": 1e-3, "batch_size": 32}]

        def reduce_number() -> None:
            number.fill_(1)
            dist.all_reduce(number, dist.ReduceOp.MAX, group)
            number.item()

        calls: dict[str, Callable[[], object]] = {
            "bare": lambda: None,
            **{name: follower.boundary for name, follower in followers.items()},
            "all_reduce": reduce_number,
            "object": lambda: dist.broadcast_object_list(config, src=0, group=group),
            "store": lambda: store.check(["a config has come"]),
        }
        gc.collect()
        gc.freeze()

        def take(block: Block) -> Done:
            call = calls[block.side]
            call_seconds = 0.0
            training.restart()
            gc.collect()
            dist.barrier()
            wall_began, cpu_began = time.perf_counter(), time.process_time()
            if block.is_call_timed:
                for _ in range(block.num_steps):
                    training.step(block.size)
                    began = time.perf_counter()
                    call()
                    call_seconds += time.perf_counter() - began
            else:
                for _ in range(block.num_steps):
                    training.step(block.size)
                    call()
            wall, cpu = time.perf_counter() - wall_began, time.process_time() - cpu_began
            follower = followers.get(block.side)
            return Done(
                wall_seconds=wall / block.num_steps,
                cpu_seconds=cpu / block.num_steps,
                call_seconds=call_seconds / block.num_steps,
                work=(block.num_steps, training.checksum()),
                every=0 if follower is None else follower.agreement.every,
            )

        yield take


@contextmanager
def changing_rank(setup: Rank) -> Iterator[Callable[[Changes], Seen]]:
    """A rank that agrees at every step and uses a value of the config in each."""
    with _joined(setup), ExitStack() as stack:
        training = Training(setup.rank)
        follower = follow_config(setup.folder / "config.json", run_dir=setup.folder, job="changes", agree_every_steps=1)
        stack.callback(follower.close)
        follower.start()

        def follow(changes: Changes) -> Seen:
            seen = Seen(boundary_ns=[], applied={})
            deadline = time.monotonic() + _SECONDS_TO_WAIT
            while changes.last_version not in seen.applied:
                follower.knob("rate", 0.0)
                training.step(changes.size)
                passed = follower.boundary()
                if passed.applied is not None:
                    seen.applied[passed.config.version] = len(seen.boundary_ns)
                seen.boundary_ns.append(time.monotonic_ns())
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"version {changes.last_version} did not come into force: {sorted(seen.applied)}"
                    )
            return seen

        yield follow


@contextmanager
def _joined(setup: Rank) -> Iterator[TCPStore]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RES_OPTIONS"] = (
        "timeout:1"  # a store's client asks for a name, and waits for an answer that may not come
    )
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", setup.port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timedelta(seconds=_SECONDS_TO_WAIT)
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()


_INTERVALS: dict[SideName, int | Literal["auto"]] = {"1": 1, "10": 10, "auto": "auto"}
