"""Pairs of nodes check each other: one process of each node calls check_pairs, and each gets the whole report.

1. All meet through torch's rendezvous, and each tells what its machine has and how fast it multiplies matrices.
2. In rounds of disjoint pairs, two and two exchange words and data. A pair begins when both have come to it.
3. Each waits until all have finished or have fallen silent, and reads what all have told.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from .hardware_records import NodeHardware
from .matching import matching
from .pair_meeting import Meeting, MeetingFailed, Rendezvous, holds_store, meet
from .pair_probe import devices, exchange, matmul
from .pair_report import CheckedNode, CheckedPair, PairReport

__all__ = ["SILENCE_SECONDS", "MeetingFailed", "Rendezvous", "check_pairs"]

_logger = logging.getLogger(__name__)

SILENCE_SECONDS = 15.0
"""Without a beat for so long a node is taken for dead; two wait for each other's data as long."""


def check_pairs(
    rendezvous: Rendezvous,
    hardware: NodeHardware,
    *,
    say: Callable[[str], None],
    with_nccl: bool = False,
    silence_seconds: float = SILENCE_SECONDS,
) -> tuple[PairReport, int]:
    """What the nodes have measured of each other, and which of them this one is.

    ``say`` is told how far it has come. ``with_nccl``, GPUs exchange the data where both nodes of a pair have some and
    ask for it. MeetingFailed if the nodes do not meet; a store that is lost later is trouble
    in the report, which then has what this node alone knows.
    """
    with meet(rendezvous, silence_seconds=silence_seconds) as meeting:
        notes = _Notes(meeting, hardware, rendezvous, with_nccl=with_nccl)
        say(f"node {meeting.index} of {meeting.num_nodes}")
        trouble = None
        try:
            notes.introduce()
            notes.measure()
            _run_rounds(meeting, notes, say, silence_seconds)
            meeting.tell("finished", "1")
            meeting.hear_from_all("finished")
            notes.read_all()
            meeting.leave(notes.holders)
        except MeetingFailed as error:
            trouble = str(error)
            meeting.silent |= notes.holders  # it does not answer, and has not left either
        return notes.report(trouble), meeting.index


def _run_rounds(meeting: Meeting, notes: _Notes, say: Callable[[str], None], patience_seconds: float) -> None:
    rounds = matching(meeting.num_nodes)
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            if meeting.index not in (first, second):
                continue
            other = second if meeting.index == first else first
            say(f"round {number + 1} of {len(rounds)}: with {notes.label(other)}")
            meeting.tell(f"ready/{number}", "1")
            if meeting.wait_for(other, f"ready/{number}") is None:
                say(f"{notes.label(other)} has stopped to answer")
                continue
            store = meeting.store_of_pair(f"pair/{number}/{first}")
            notes.tell_pair(_pair(store, number, first, second, meeting.index == second, notes, patience_seconds))


def _pair(
    store: Any, number: int, first: int, second: int, is_second: bool, notes: _Notes, seconds: float
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


class _Notes:
    """What this node knows of all of them."""

    def __init__(self, meeting: Meeting, hardware: NodeHardware, rendezvous: Rendezvous, *, with_nccl: bool) -> None:
        self.holders: set[int] = set()
        """The node that the store goes with, where it is one of these."""
        self._meeting = meeting
        self._rendezvous = rendezvous
        self._with_nccl = with_nccl
        self._hardware: dict[int, NodeHardware] = {meeting.index: hardware}
        self._matmul: dict[int, dict[str, tuple[float, ...]]] = {}
        self._gpus: dict[int, str | None] = {}
        self._pids: dict[int, int] = {}
        self._pairs: dict[tuple[int, int, int], CheckedPair] = {}

    def introduce(self) -> None:
        """Tell what this node has, and hear it of all."""
        own = self._meeting.index
        hardware = self._hardware[own]
        is_holder = holds_store(self._rendezvous)
        hello = {"pid": os.getpid(), "holds_store": is_holder, "hardware": hardware.to_json()}
        self._meeting.tell("hello", json.dumps(hello))
        for index, text in self._meeting.hear_from_all("hello").items():
            hello = json.loads(text)
            self._pids[index] = hello["pid"]
            try:
                self._hardware[index] = NodeHardware.from_json(hello["hardware"])
            except ValueError as error:  # of a node with another version of this library
                _logger.warning("node %d: what its machine has cannot be read: %s", index, error)
            if hello["holds_store"]:
                self.holders.add(index)

    def measure(self) -> None:
        """Tell how fast this node computes, and hear it of all."""
        speeds = {device: matmul(device) for device in devices()}
        self._meeting.tell("measured", json.dumps({"matmul": speeds, "gpu": _own_gpu() if self._with_nccl else None}))
        for index, text in self._meeting.hear_from_all("measured").items():
            measured = json.loads(text)
            self._matmul[index] = {device: tuple(windows) for device, windows in measured["matmul"].items()}
            self._gpus[index] = measured["gpu"]

    def backend_of(self, first: int, second: int) -> str:
        """nccl where both have asked for it and have GPUs, and not the same one to send from; else gloo."""
        gpus = self._gpus.get(first), self._gpus.get(second)
        return "nccl" if gpus[0] and gpus[1] and gpus[0] != gpus[1] else "gloo"

    def tell_pair(self, pair: CheckedPair) -> None:
        """Note what this node has measured with another one, and have all hear it."""
        self._take(pair)
        self._meeting.tell(f"pair/{pair.round}", json.dumps(asdict(pair)))

    def read_all(self) -> None:
        """Take over what the others have measured, those that have fallen silent too."""
        for number, pairs in enumerate(matching(self._meeting.num_nodes)):
            for pair in pairs:
                for index in pair:
                    text = self._meeting.hear(index, f"pair/{number}") if index != self._meeting.index else None
                    if text is not None:
                        self._take(CheckedPair.from_json(text))

    def label(self, index: int) -> str:
        """What people call a node."""
        hardware, pid = self._hardware.get(index), self._pids.get(index)
        where = [hardware.network.host] if hardware is not None else []
        where += [f"pid {pid}"] if pid is not None else []
        return f"node {index} ({', '.join(where)})" if where else f"node {index}"

    def report(self, trouble: str | None) -> PairReport:
        """All that is known."""
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
        """Keep of what two have told of their pair the one with times, or the one with trouble."""
        key = (pair.round, pair.first, pair.second)
        before = self._pairs.get(key)
        if before is None or pair.trouble is not None or (pair.latency_seconds and before.trouble is None):
            self._pairs[key] = pair


def _own_gpu() -> str | None:
    """The GPU that NCCL would send from; None where there is none, or no NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(0).uuid)
