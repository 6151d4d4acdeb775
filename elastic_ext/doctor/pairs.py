"""Nodes that check each other in pairs: the rounds of pairs, the measurements, and the process of each node."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_ext.ranks.board import BoardGone
from elastic_ext.records.json import records_of
from elastic_ext.torch_private.groups import destroy_groups

from .meeting import Meeting, MeetingFailed, Rendezvous, holds_store, meet
from .records import NodeHardware
from .report import CheckedNode, CheckedPair, PairReport

__all__ = [
    "MOST_NODES_IN_FULL",
    "MOST_ROUNDS",
    "NUM_WINDOWS",
    "SILENCE_SECONDS",
    "MeetingFailed",
    "Rendezvous",
    "check_pairs",
    "devices",
    "exchange",
    "matching",
    "matmul",
]

_logger = logging.getLogger(__name__)


# --- rounds of disjoint pairs, so that in each round all nodes but at most one are busy at once ----------------------

MOST_NODES_IN_FULL = 32
"""Number of nodes up to which every pair of them is checked."""
MOST_ROUNDS = 16
"""Rounds of pairs for more nodes than that, so that each node is checked with about so many others."""


def matching(num_nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The rounds in which pairs of nodes are checked, as pairs (lower, higher): no node twice in a round.

    No pair comes twice. Up to 32 nodes have all pairs, in N - 1 rounds, or N where N is odd. More nodes have a sample
    of these rounds, the same on every node. For the sample nodes are seated in a shuffled order, and the rounds lie at
    unequal distances: else nodes would fall into groups that no pair links, and neighbours would never be paired.
    """
    if num_nodes < 2:
        return ()
    seats = num_nodes + num_nodes % 2  # whoever is paired with the seat that is empty has nothing to do in that round
    turning = seats - 1
    if num_nodes <= MOST_NODES_IN_FULL:
        return tuple(
            tuple(pair for pair in _round(number, turning) if pair[1] < num_nodes) for number in range(turning)
        )
    node_at = _shuffled(num_nodes)
    spacing = turning // MOST_ROUNDS
    found = []
    for number in range(MOST_ROUNDS):
        pairs = (pair for pair in _round(number * spacing + number * number % spacing, turning) if pair[1] < num_nodes)
        nodes = ((node_at[one], node_at[other]) for one, other in pairs)
        found.append(tuple(sorted((min(pair), max(pair)) for pair in nodes)))
    return tuple(found)


def _shuffled(num: int) -> list[int]:
    """The numbers below ``num`` in a pseudo-random order, the same on every node and in every version of Python."""
    found, state = list(range(num)), 1
    for place in range(num - 1, 0, -1):
        state = (state * 1103515245 + 12345) % 2**31
        other = (state >> 8) % (place + 1)
        found[place], found[other] = found[other], found[place]
    return found


def _round(number: int, turning: int) -> list[tuple[int, int]]:
    """The pairs of seats of one round: one seat stays, the others turn around it and are paired across the circle."""
    pairs = [(number, turning)]
    for step in range(1, (turning + 1) // 2):
        one, other = (number + step) % turning, (number - step) % turning
        pairs.append((min(one, other), max(one, other)))
    return sorted(pairs)


# --- how fast a node multiplies matrices, and how fast two nodes exchange words and data -----------------------------

NUM_WINDOWS = 3
_PING_PONGS = 200 // NUM_WINDOWS + 1
_BLOCK_BYTES = 16 << 20
_MATMULS = 5
_CPU_SIZE, _GPU_SIZE = 768, 8192


def devices() -> list[str]:
    """The devices of this machine that torch can compute on: the CPU and each CUDA device."""
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]


def matmul(device: str) -> tuple[float, ...]:
    """Floating-point operations per second of matrix products on a device, the best of each window of time."""
    is_gpu = device.startswith("cuda")
    size = _GPU_SIZE if is_gpu else _CPU_SIZE
    left = torch.randn(size, size, dtype=torch.bfloat16 if is_gpu else torch.float32, device=device)
    right = torch.randn_like(left)
    out = torch.empty_like(left)

    def once() -> None:
        torch.mm(left, right, out=out)
        _settle(device)

    for _ in range(2):  # chooses the kernel, starts threads, wakes the clock
        once()
    return tuple(2 * size**3 / _least_seconds(once, _MATMULS) for _ in range(NUM_WINDOWS))


def exchange(
    store: Any, rank: int, *, backend: str, timeout_seconds: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The latency one way in seconds and the bandwidth in bytes per second between two processes, by windows of time.

    Both processes call this at the same time, as ranks 0 and 1 of a process group that is made for it and destroyed.
    Rank 1 gets empty results. RuntimeError if the other process cannot be reached, or ends.
    """
    device = "cuda:0" if backend == "nccl" else "cpu"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    except RuntimeError:
        destroy_groups()
        raise
    try:
        word = torch.zeros(1, dtype=torch.int64, device=device)
        block = torch.zeros(_BLOCK_BYTES // 8, dtype=torch.int64, device=device)
        _rally(rank, word, word, device)  # connects
        latencies = tuple(
            _least_seconds(lambda: _rally(rank, word, word, device), _PING_PONGS) / 2 for _ in range(NUM_WINDOWS)
        )
        rates = []
        for _ in range(NUM_WINDOWS):  # a block there and a word back, a word there and a block back: the slower way
            there = _least_seconds(lambda: _rally(rank, block, word, device), 1)
            back = _least_seconds(lambda: _rally(rank, word, block, device), 1)
            rates.append(_BLOCK_BYTES / max(there, back))
    finally:
        dist.destroy_process_group()
    return (latencies, tuple(rates)) if rank == 0 else ((), ())


def _rally(rank: int, there: torch.Tensor, back: torch.Tensor, device: str) -> None:
    """Send ``there`` from rank 0 to rank 1, and when it has come, ``back`` from rank 1 to rank 0."""
    if rank == 0:
        dist.send(there, 1)
        dist.recv(back, 1)
    else:
        dist.recv(there, 0)
        dist.send(back, 0)
    _settle(device)


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _least_seconds(once: Callable[[], None], times: int) -> float:
    least = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        once()
        least = min(least, time.perf_counter() - begin)
    return max(least, 1e-9)


# --- the process of each node ----------------------------------------------------------------------------------------
# Pairs of nodes check each other: one process of each node calls check_pairs, and each gets the whole report.
#
# 1. All meet through torch's rendezvous, and each tells what its machine has and how fast it multiplies matrices.
# 2. In rounds of disjoint pairs, two and two exchange words and data. A pair begins when both have come to it.
# 3. Each waits until all have finished or have fallen silent, and reads what all have told.

SILENCE_SECONDS = 15.0
"""Seconds without a heartbeat after which a node counts as dead; two nodes wait as long for each other's data."""


def check_pairs(
    rendezvous: Rendezvous,
    hardware: NodeHardware,
    *,
    say: Callable[[str], None],
    with_nccl: bool = False,
    silence_seconds: float = SILENCE_SECONDS,
) -> tuple[PairReport, int]:
    """Check this node together with others, in pairs; gives the report of all nodes and the number of this one.

    One process of each node calls this at the same time. ``say`` is told of the progress. With ``with_nccl`` on both
    nodes of a pair, their GPUs exchange the data. MeetingFailed if the nodes do not meet; a store that is lost later is
    trouble in the report, which then has what this node alone knows.
    """
    with meet(rendezvous, silence_seconds=silence_seconds) as meeting:
        notes = Notes(meeting, hardware, rendezvous, with_nccl=with_nccl)
        say(f"this is node {meeting.index} of {meeting.num_nodes}, counted from 0")
        trouble = None
        try:
            notes.introduce()
            notes.measure()
            _run_rounds(meeting, notes, say, silence_seconds)
            meeting.tell("finished", 1)
            meeting.hear_from_all("finished")
            notes.read_all()
            meeting.leave(notes.holders)
        except (BoardGone, MeetingFailed) as error:
            trouble = str(error)
            meeting.silent |= notes.holders  # it does not answer, and has not left either
        return notes.report(trouble), meeting.index


def _run_rounds(meeting: Meeting, notes: Notes, say: Callable[[str], None], patience_seconds: float) -> None:
    rounds = matching(meeting.num_nodes)
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            if meeting.index not in (first, second):
                continue
            other = second if meeting.index == first else first
            say(f"round {number + 1} of {len(rounds)}: this node and {notes.label(other)} exchange data")
            meeting.tell(f"ready/{number}", 1)
            if meeting.wait_for(other, f"ready/{number}") is None:
                say(f"{notes.label(other)} has stopped answering")
                continue
            store = meeting.store_of_pair(f"pair/{number}/{first}")
            notes.tell_pair(_pair(store, number, first, second, meeting.index == second, notes, patience_seconds))


def _pair(
    store: Any, number: int, first: int, second: int, is_second: bool, notes: Notes, seconds: float
) -> CheckedPair:
    backend = notes.backend_of(first, second)
    latency: tuple[float, ...] = ()
    bandwidth: tuple[float, ...] = ()
    trouble = None
    try:
        latency, bandwidth = exchange(store, int(is_second), backend=backend, timeout_seconds=seconds)
    except RuntimeError as error:  # of gloo, NCCL and the store
        trouble = (str(error).splitlines() or [type(error).__name__])[0]
        _logger.info("pair of nodes %d and %d: %s", first, second, error)
    return CheckedPair(
        round=number,
        first=first,
        second=second,
        backend=backend,
        latency_seconds=latency,
        bandwidth=bandwidth,
        trouble=trouble,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of a node as nodes meet: its pid, its hardware, and whether it hosts the store."""

    pid: int
    holds_store: bool
    """Whether the node's process hosts the store, which is gone when the process ends."""
    hardware: str
    """The NodeHardware of the node's machine, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The second message of a node: how fast it computes, and the GPU that it exchanges data from."""

    matmul: Mapping[str, Sequence[float]]
    """Floating-point operations per second in each window of time, by device."""
    gpu: str | None
    """The GPU's id; None where NCCL is not asked for, or there is none to use it with."""


class Notes:
    """What this node knows of all nodes: what it measured, and what the others have told."""

    def __init__(self, meeting: Meeting, hardware: NodeHardware, rendezvous: Rendezvous, *, with_nccl: bool) -> None:
        self.holders: set[int] = set()
        """The node whose process hosts the store, if it is one of these; else empty."""
        self._meeting = meeting
        self._rendezvous = rendezvous
        self._with_nccl = with_nccl
        self._hardware: dict[int, NodeHardware] = {meeting.index: hardware}
        self._matmul: dict[int, dict[str, tuple[float, ...]]] = {}
        self._gpus: dict[int, str | None] = {}
        self._pids: dict[int, int] = {}
        self._pairs: dict[tuple[int, int, int], CheckedPair] = {}

    def introduce(self) -> None:
        """Tell the other nodes this node's hardware, and read theirs."""
        own = self._meeting.index
        hardware = self._hardware[own]
        is_holder = holds_store(self._rendezvous.endpoint)
        hello = Hello(pid=os.getpid(), holds_store=is_holder, hardware=hardware.to_json())
        self._meeting.tell("hello", asdict(hello))
        for index, row in self._meeting.hear_from_all("hello").items():
            with _reading(index, "hardware record"):
                (hello,) = records_of(Hello, [row])
                self._pids[index] = hello.pid
                if hello.holds_store:
                    self.holders.add(index)
                self._hardware[index] = NodeHardware.from_json(hello.hardware)

    def measure(self) -> None:
        """Measure how fast this node multiplies matrices, tell the other nodes, and read what they measured."""
        speeds = {device: matmul(device) for device in devices()}
        own = Measured(matmul=speeds, gpu=_own_gpu() if self._with_nccl else None)
        self._meeting.tell("measured", asdict(own))
        for index, row in self._meeting.hear_from_all("measured").items():
            with _reading(index, "record of how fast it computes"):
                (measured,) = records_of(Measured, [row])
                self._gpus[index] = measured.gpu
                self._matmul[index] = {device: tuple(map(float, each)) for device, each in measured.matmul.items()}

    def backend_of(self, first: int, second: int) -> str:
        """The backend for a pair: nccl where both nodes ask for it and have GPUs, not the same one; else gloo."""
        gpus = self._gpus.get(first), self._gpus.get(second)
        return "nccl" if gpus[0] and gpus[1] and gpus[0] != gpus[1] else "gloo"

    def tell_pair(self, pair: CheckedPair) -> None:
        """Note what this node has measured with another one, and tell all nodes."""
        self._take(pair)
        self._meeting.tell(f"pair/{pair.round}", asdict(pair))

    def read_all(self) -> None:
        """Read what the other nodes have measured in pairs, silent ones too."""
        for number, pairs in enumerate(matching(self._meeting.num_nodes)):
            for pair in pairs:
                for index in pair:
                    row = self._meeting.hear(index, f"pair/{number}") if index != self._meeting.index else None
                    if row is not None:
                        with _reading(index, f"record of the pair of nodes {pair[0]} and {pair[1]}"):
                            (checked,) = records_of(CheckedPair, [row])
                            self._take(checked)

    def label(self, index: int) -> str:
        """The name of a node for people: its number, host and pid."""
        hardware, pid = self._hardware.get(index), self._pids.get(index)
        where = [hardware.network.host] if hardware is not None else []
        where += [f"pid {pid}"] if pid is not None else []
        return f"node {index} ({', '.join(where)})" if where else f"node {index}"

    def report(self, trouble: str | None) -> PairReport:
        """The report by what this node knows; ``trouble`` says why nothing more was measured."""
        return PairReport(
            num_wanted=self._rendezvous.min_nodes,
            nodes=tuple(
                CheckedNode(
                    index=index,
                    label=self.label(index),
                    is_silent=index in self._meeting.silent,
                    hardware=self._hardware.get(index),
                    matmul=self._matmul.get(index, {}),
                )
                for index in range(self._meeting.num_nodes)
            ),
            pairs=tuple(self._pairs[key] for key in sorted(self._pairs)),
            trouble=trouble,
        )

    def _take(self, pair: CheckedPair) -> None:
        """Keep of the two records of one pair that its nodes tell the one with times, or else the one with trouble."""
        key = (pair.round, pair.first, pair.second)
        before = self._pairs.get(key)
        if before is None or pair.trouble is not None or (pair.latency_seconds and before.trouble is None):
            self._pairs[key] = pair


@contextlib.contextmanager
def _reading(index: int, what: str) -> Iterator[None]:
    """A warning, and no error, where a node's message is invalid, as from another version of this library."""
    try:
        yield
    except (ValueError, TypeError) as error:
        _logger.warning("node %d: its %s cannot be read: %s", index, what, error)


def _own_gpu() -> str | None:
    """The GPU that NCCL would send from; None where there is none, or no NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(0).uuid)
