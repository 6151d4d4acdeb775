"""What may hold training up, and how much of its time each takes: pure; which of them is told is bottleneck.py's.

A share is what would be saved if its cause were gone, in parts of the time that training takes: steps, and what stands
between them, without startup and evaluation. So shares of unlike causes compare. They need not add up to 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .phases import Phase
from .straggling import usual
from .weighed import RankView, Roofline, Weighed, weigh

__all__ = ["KINDS", "LIMITS", "Cause", "Job", "Kind", "causes", "computing", "dominating", "job_of", "limit"]

Kind = Literal[
    "unknown",  # too little is known, or it does not fit together; the text says why
    "startup",  # most of the time went before the first step
    "outside",  # most of the time went outside of epochs, to evaluation for one
    "straggler",  # some ranks take longer for their own part of a step, and the others wait
    "data",  # steps wait for samples
    "transfer",  # batches are copied to the accelerator
    "communication",  # all ranks wait for gradients or words on their way, with nothing left to compute
    "contention",  # the training thread has no processor while it should compute
    "loop",  # what the loop does besides training
    "checkpoint",  # training waits for checkpoints
    "change",  # training waits for configs that come into force
    "rolled-back",  # steps are taken back and taken again
    "compute",  # arithmetic: the device computes as fast as it can
    "memory",  # reading and writing memory
    "host",  # having operations done at all: there are many, and each is small
    "busy",  # one of the last three, and nothing tells which
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_PAUSE, _WAIT = 0.15, 0.25
LIMITS: dict[Kind, float] = {
    "straggler": 0.20,
    "data": _WAIT,
    "communication": _WAIT,
    "contention": 1 / 3,
    "transfer": _WAIT,
    "loop": _WAIT,
    "checkpoint": _PAUSE,
    "change": _PAUSE,
    "rolled-back": _PAUSE,
}
"""What takes more than this is told; of several the largest, and the first here of those that are equal."""
_DOMINATES = 0.5
_LESS_SURE = 0.5
"""What ranks lack of processors makes them differ, by about half of it: then they are stragglers only beyond that."""
_PAUSES: dict[Kind, Phase] = {
    "checkpoint": Phase.CHECKPOINT,
    "change": Phase.CHANGE,
    "rolled-back": Phase.ROLLED_BACK,
}
_IN_STEP: dict[Kind, Phase] = {"data": Phase.DATA, "transfer": Phase.TRANSFER, "loop": Phase.OTHER}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One of them."""

    kind: Kind
    share: float
    ranks: tuple[int, ...] = ()
    """Whom it concerns; empty where that is all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All ranks side by side. What is *usual* among them is a median, which two ranks have too: the better of both."""

    ranks: tuple[Weighed, ...]
    """In their order."""
    num_missing: int
    num_steps: int
    """Of the rank that has told of the fewest."""
    step_seconds: float
    samples_per_second: float | None
    """Of all ranks together, while there is training; None where they are not counted."""
    num_workers: int | None
    """Of all loaders; None where that is not known."""
    processor_share: float | None
    roofline: Roofline | None
    in_step_share: float
    lost_share: float
    """Of a step, while the training thread should have computed and had no processor."""
    usual_local_seconds: float

    @property
    def is_known(self) -> bool:
        """Whether what is within steps is known of all ranks."""
        return all(each.is_known for each in self.ranks)

    @property
    def overlapped_seconds(self) -> float | None:
        """Of a step, in which something is computed beside communication; None where that is not known."""
        known = [each.overlapped_seconds for each in self.ranks if each.overlapped_seconds is not None]
        return usual(known) if known else None


def job_of(views: Sequence[RankView]) -> Job:
    """What several ranks tell, of which ``why_not`` says nothing."""
    ordered = sorted(views, key=lambda view: view.rank)
    ranks = tuple(weigh(view) for view in ordered)
    shares = [each.processor_share for each in ranks if each.processor_share is not None]
    workers = [view.num_workers for view in ordered if view.num_workers is not None]
    return Job(
        ranks=ranks,
        num_missing=max(ordered[0].window.world_size - len(ordered), 0),
        num_steps=min(view.window.num_steps for view in ordered),
        step_seconds=usual([each.step_seconds for each in ranks]),
        samples_per_second=_rate(ordered),
        num_workers=sum(workers) if len(workers) == len(ordered) else None,
        processor_share=statistics.median_high(shares) if shares else None,
        roofline=_usual_roofline([each.roofline for each in ranks if each.roofline is not None]),
        in_step_share=usual([each.in_step_share for each in ranks]),
        lost_share=usual([each.lost_share for each in ranks]),
        usual_local_seconds=usual([each.local_seconds for each in ranks]),
    )


def causes(job: Job) -> list[Cause]:
    """All that may be told before it is asked what computing is bound by; the largest first."""
    order = list(LIMITS)
    return sorted(_all_causes(job), key=lambda cause: (-cause.share, order.index(cause.kind)))


def limit(cause: Cause, job: Job) -> float:
    """What a cause has to take more than to be told."""
    return LIMITS[cause.kind] + (_LESS_SURE * job.lost_share if cause.kind == "straggler" else 0.0)


def dominating(job: Job) -> Cause | None:
    """What is no training at all, where most of the time goes to that."""
    kinds: tuple[tuple[Kind, Phase], ...] = (("startup", Phase.STARTUP), ("outside", Phase.OUTSIDE))
    for kind, phase in kinds:
        share = usual([each.shares.get(phase, 0.0) for each in job.ranks])
        if share > _DOMINATES:
            return Cause(kind=kind, share=share)
    return None


def computing(job: Job) -> Cause:
    """The passes and the optimizer's steps, and what they are bound by."""
    share = _in_step(job, usual([each.computing_seconds for each in job.ranks]))
    best = job.roofline
    if best is None:
        return Cause(kind="busy", share=share)
    times: dict[Kind, float] = {"compute": best.compute, "memory": best.memory, "host": best.host}
    kind = max(times, key=lambda each: times[each])
    return Cause(kind=kind if times[kind] > 0 else "busy", share=share)


# ---- each of them ----


def _all_causes(job: Job) -> Iterator[Cause]:
    if len(job.ranks) > 1 and job.is_known:
        yield _straggler(job)
    for kind, phase in _IN_STEP.items():
        yield _of_all(kind, [_in_step(job, each.step.get(phase, 0.0)) for each in job.ranks], job)
    waiting = min(each.waiting_seconds for each in job.ranks)  # whoever waits longer waits for a rank
    yield Cause(kind="communication", share=_in_step(job, waiting))
    yield _of_all("contention", [each.lost_share * job.in_step_share for each in job.ranks], job)
    for kind, phase in _PAUSES.items():
        yield Cause(kind=kind, share=usual([_of_training(each, phase) for each in job.ranks]))


def _straggler(job: Job) -> Cause:
    steady = usual([each.steady_seconds for each in job.ranks])
    beyond = {
        each.rank: _in_step(job, min(each.local_seconds - job.usual_local_seconds, each.steady_seconds - steady))
        for each in job.ranks
    }  # a rank that is slow is so in most steps, and one whose processor others want, in some
    largest = Cause(kind="straggler", share=max(beyond.values()))
    least = min(limit(largest, job), largest.share)
    slow = [rank for rank, share in beyond.items() if share > 0 and share >= least]
    return Cause(kind="straggler", share=largest.share, ranks=tuple(slow))


def _of_all(kind: Kind, shares: Sequence[float], job: Job) -> Cause:
    """Those ranks whose own share is beyond the limit, unless these are all or none."""
    above = [each.rank for each, share in zip(job.ranks, shares, strict=True) if share > LIMITS[kind]]
    return Cause(kind=kind, share=usual(shares), ranks=tuple(above) if len(above) < len(job.ranks) else ())


def _in_step(job: Job, seconds: float) -> float:
    return min(seconds / job.step_seconds, 1.0) * job.in_step_share


def _of_training(rank: Weighed, phase: Phase) -> float:
    training = 1 - rank.shares.get(Phase.STARTUP, 0.0) - rank.shares.get(Phase.OUTSIDE, 0.0)
    return min(rank.shares.get(phase, 0.0) / training, 1.0) if training > 0 else 0.0


def _rate(views: Sequence[RankView]) -> float | None:
    rates = []
    for view in views:
        left_out = (Phase.STARTUP.label, Phase.OUTSIDE.label)
        training = sum(spent for label, spent in view.window.seconds.items() if label not in left_out)
        if view.window.num_samples > 0 and training > 0:
            rates.append(view.window.num_samples / training)
    return usual(rates) if rates else None


def _usual_roofline(found: Sequence[Roofline]) -> Roofline | None:
    if not found:
        return None
    return Roofline(
        compute=usual([each.compute for each in found]),
        memory=usual([each.memory for each in found]),
        host=usual([each.host for each in found]),
    )
