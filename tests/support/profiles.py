"""Profiles of ranks made up for tests: with a planted cause, noise, and processors that are wanted by others too."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_ext.profile.breakdown import RankView
from elastic_ext.profile.phases import COMPUTING, IN_STEPS, Phase
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow

__all__ = ["PLANTED", "calibration", "census", "made_view", "made_window", "planted"]

PLANTED = ("data", "communication", "straggler", "contention", "checkpoint", "compute", "memory", "host")

Steps = Mapping[Phase, float]


def made_window(
    step: Steps,
    /,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_steps: int = 100,
    besides: Mapping[Phase, float] | None = None,
    processor_share: float | None = 1.0,
    num_samples: int = 3200,
    num_undetailed: int = 0,
    **changes: Any,
) -> StepWindow:
    """A window of steps that are all alike, of which the last were not measured; ``besides`` is in all of it."""
    in_steps = {phase: spent * num_steps for phase, spent in step.items() if spent}
    for phase in (Phase.TRANSFER, *COMPUTING, Phase.COMMUNICATION):
        hidden = step.get(phase, 0.0) * num_undetailed
        if hidden:
            in_steps[phase] -= hidden
            in_steps[Phase.STEP] = in_steps.get(Phase.STEP, 0.0) + hidden
    seconds = {phase.label: spent for phase, spent in {**in_steps, **(besides or {})}.items() if spent > 0}
    had = {} if processor_share is None else {each.label: processor_share for each in COMPUTING}
    length = sum(step.get(phase, 0.0) for phase in IN_STEPS)
    is_measured = num_undetailed < num_steps
    window = StepWindow(
        begin=1000.0,
        end=1000.0 + sum(seconds.values()),
        rank=rank,
        world_size=world_size,
        restart=0,
        step=num_steps,
        num_steps=num_steps,
        config_version=1,
        config_revision=0,
        seconds=seconds,
        processor_seconds={label: had[label] * spent for label, spent in seconds.items() if label in had},
        typical={phase.label: spent for phase, spent in step.items() if spent} if is_measured else {},
        step_seconds=(length,) * 4 if is_measured else (),
        num_samples=num_samples,
        num_detailed=num_steps - num_undetailed,
    )
    return replace(window, **changes)


def made_view(step: Steps, /, *, host: str = "node", view: Mapping[str, Any] | None = None, **window: Any) -> RankView:
    """A rank whose window is made so."""
    return RankView(host=host, window=made_window(step, **window), **(view or {}))


def census(*, num_flops: int = 0, num_bytes: int = 0, num_ops: int = 0, device: str = "cpu") -> StepCensus:
    return StepCensus(
        time=0.0,
        rank=0,
        num_samples=16,
        num_ops=num_ops,
        num_bytes=num_bytes,
        num_flops=num_flops,
        optimizer_ops=0,
        optimizer_bytes=0,
        device=device,
    )


def calibration() -> NodeCalibration:
    return NodeCalibration(
        time=0.0,
        host="node",
        device="cpu",
        num_threads=1,
        torch="2",
        flops_per_second=1e11,
        bytes_per_second=1e10,
        seconds_per_op=2e-6,
    )


def planted(cause: str, seed: int, *, is_contended: bool) -> tuple[list[RankView], tuple[int, ...]]:
    """Ranks that something holds up, as the probe would tell of them; and which of them are slow."""
    draw = random.Random(f"{cause} {seed} {is_contended}")
    num_ranks = draw.choice((2, 2, 3, 4, 8))
    slow = draw.randrange(num_ranks)
    machine = draw.uniform(0.65, 0.9) if is_contended else 1.0
    if cause == "contention":
        machine *= draw.uniform(0.2, 0.45)
    apart = 0.15 if is_contended else 0.03
    processors = [min(machine * draw.uniform(1 - apart, 1 + apart), 1.0) for _ in range(num_ranks)]
    work = draw.uniform(2e-3, 30e-3)
    noise = 0.1 if is_contended else 0.03
    loading = work / machine * (draw.uniform(0.55, 2.0) if cause == "data" else 0.03)
    is_slow = [cause == "straggler" and rank == slow for rank in range(num_ranks)]
    local = [
        _local(work, loading, draw, share, noise, is_slow=each) for share, each in zip(processors, is_slow, strict=True)
    ]
    sent = work * (draw.uniform(0.6, 2.0) if cause == "communication" else draw.uniform(0.02, 0.1))
    views = []
    slowest = max(sum(each.values()) for each in local)
    shares = _works(cause, draw)
    for rank, step in enumerate(local):
        waiting = slowest - sum(step.values()) + sent * draw.uniform(1, 1 + 3 * noise)
        besides = {Phase.CHECKPOINT: 100 * slowest * draw.uniform(0.3, 1.0)} if cause == "checkpoint" else {}
        share = processors[rank]
        if is_slow[rank]:  # it is slow for want of something else than a processor
            share *= 0.6
        window = made_window(
            {**step, Phase.COMMUNICATION: waiting},
            rank=rank,
            world_size=num_ranks,
            besides=besides,
            processor_share=share,
            num_undetailed=draw.choice((0, 0, 60)),
        )
        views.append(
            RankView(
                host=f"node{rank % 2}",
                window=window,
                census=_census(work, shares, draw),
                calibration=calibration(),
                num_workers=2,
            )
        )
    draw.shuffle(views)
    return views, (slow,) if cause == "straggler" else ()


def _local(
    work: float, loading: float, draw: random.Random, processor: float, noise: float, *, is_slow: bool
) -> dict[Phase, float]:
    """What a rank is busy with by itself, where it has only a part of a processor."""

    def about(seconds: float) -> float:
        return seconds * draw.lognormvariate(0, noise)

    step = {
        Phase.DATA: about(loading),
        Phase.FORWARD: about(0.35 * work / processor),
        Phase.BACKWARD: about(0.5 * work / processor),
        Phase.OPTIMIZER: about(0.15 * work / processor),
        Phase.OTHER: about(0.04 * work / processor),
    }
    if is_slow:
        phase = draw.choice((Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OTHER))
        step[phase] += work / processor * draw.uniform(0.45, 2.0)
    return step


def _works(cause: str, draw: random.Random) -> Sequence[float]:
    """How near a step comes to what arithmetic, memory and operations take at best."""
    order = ("compute", "memory", "host")
    first = cause if cause in order else draw.choice(order)
    return [draw.uniform(0.5, 0.9) if each == first else draw.uniform(0.05, 0.35) for each in order]


def _census(work: float, shares: Sequence[float], draw: random.Random) -> StepCensus:
    best = calibration()
    compute, memory, host = (share * work * draw.lognormvariate(0, 0.1) for share in shares)
    return census(
        num_flops=int(compute * best.flops_per_second),
        num_bytes=int(memory * best.bytes_per_second),
        num_ops=int(host / best.seconds_per_op),
    )
