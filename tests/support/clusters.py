"""Clusters for tests of a master: machines in racks, and what pairs of them would measure, with noise."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_ext.doctor.pairs import matching
from elastic_ext.doctor.report import CheckedNode, CheckedPair, PairReport
from tests.support.machines import GOOD_MACHINE

__all__ = ["FAR", "FAST", "NARROW", "NEAR", "machine_of", "pair_report"]

NEAR, FAR = 2e-5, 6e-5  # seconds
FAST, NARROW = 3e9, 1e9  # bytes a second


def machine_of(number: int, **changes: Any) -> Any:
    """A machine of its own, in good order but for what is changed."""
    network = dataclasses.replace(GOOD_MACHINE.network, host=f"host-{number:03}")
    system = dataclasses.replace(GOOD_MACHINE.system, boot_id=f"boot-{number:03}")
    return dataclasses.replace(GOOD_MACHINE, network=network, system=system, **changes)


def pair_report(
    racks: Sequence[int],
    *,
    noise: float = 0.0,
    seed: int = 0,
    slow_links: Collection[tuple[int, int]] = (),
    slow_nodes: Mapping[int, float] | None = None,
    hot_nodes: Collection[int] = (),
    by_latency: bool = True,
    **changes: Any,
) -> PairReport:
    """Nodes in racks, measured as doctor does, with noise."""
    draw = random.Random(seed)
    slow_nodes = slow_nodes or {}
    nodes = tuple(
        CheckedNode(
            index=number,
            label=f"node {number} (host-{number:03}, pid 1)",
            is_silent=False,
            hardware=machine_of(number),
            matmul={"cpu": tuple((5e10 if number in hot_nodes else 1e11) * _spread(draw, noise) for _ in range(3))},
        )
        for number in range(len(racks))
    )
    pairs = []
    for index, round_ in enumerate(matching(len(racks))):
        for first, second in round_:
            is_near = racks[first] == racks[second]
            times = max(slow_nodes.get(first, 1.0), slow_nodes.get(second, 1.0))
            times *= 20 if (first, second) in slow_links else 1
            latency = (NEAR if is_near or not by_latency else FAR) * times
            bandwidth = (FAST if is_near else NARROW) / times
            pairs.append(
                CheckedPair(
                    round=index,
                    first=first,
                    second=second,
                    backend="gloo",
                    latency_seconds=tuple(latency * _spread(draw, noise) for _ in range(3)),
                    bandwidth=tuple(bandwidth / _spread(draw, noise) for _ in range(3)),
                    trouble=None,
                )
            )
    good = PairReport(num_wanted=len(racks), nodes=nodes, pairs=tuple(pairs), trouble=None)
    return dataclasses.replace(good, **changes)


def _spread(draw: random.Random, noise: float) -> float:
    return math.exp(draw.gauss(0, noise))
