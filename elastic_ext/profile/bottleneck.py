"""What holds training up, judged from the profiles of its ranks: one kind, with its share, its evidence and a sentence.

Pure, and no oracle: it judges the windows that it is given, and says that it does not know where they do not tell.
The kinds stand in causes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ext.records.json import JsonRecord
from elastic_ext.records.text import on_one_line

from .cause_words import hosts_of, sentence
from .causes import Cause, Job, Kind, causes, computing, dominating, job_of, limit
from .phases import Phase
from .straggling import usual
from .weighed import RankView, merged, why_not

__all__ = ["Kind", "RankView", "RunnerUp", "Verdict", "merged", "verdict"]

_CONTENDED = 0.85
"""With less of a processor than this while it computes, the training thread is held up by others."""
_LEAST_TOLD = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """What else takes time."""

    kind: Kind
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(JsonRecord):
    """What holds training up."""

    kind: Kind
    text: str
    """For a person: one line, with what to do."""
    share: float | None = None
    """Of training's time, that it takes; of all time for startup and outside; None where nothing can be said."""
    ranks: tuple[int, ...] = ()
    """Whom it concerns; empty where that is all, or not known."""
    hosts: tuple[str, ...] = ()
    is_contended: bool = False
    """Whether training threads had less than a processor, whatever else holds training up."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What it was judged from, as JSON has values."""
    runners_up: tuple[RunnerUp, ...] = ()
    """The largest first."""


def verdict(views: Sequence[RankView], *, is_partial: bool = False) -> Verdict:
    """What holds up the job whose ranks these are, in any order; ``is_partial`` where ranks may be missing."""
    reason = why_not(views, is_partial=is_partial)
    if reason is not None:
        return Verdict(kind="unknown", text=on_one_line(f"unknown: {reason}"))
    job = job_of(views)
    first, rest = _ranked(job)
    contended = job.processor_share is not None and job.processor_share < _CONTENDED
    return Verdict(
        kind=first.kind,
        text=sentence(first, job, is_contended=contended),
        share=None if first.kind == "unknown" else first.share,
        ranks=first.ranks,
        hosts=hosts_of(first.ranks, job),
        is_contended=contended,
        evidence=_evidence(job),
        runners_up=tuple(RunnerUp(kind=each.kind, share=each.share) for each in rest),
    )


def _ranked(job: Job) -> tuple[Cause, list[Cause]]:
    """What is told, and what takes time besides."""
    found = causes(job)
    bound = computing(job)
    first = dominating(job) or next((each for each in found if each.share > limit(each, job)), None)
    if first is None:
        unseen = _unseen(job)
        first = bound if unseen.share <= bound.share else unseen
    rest = [each for each in (*found, bound) if each.kind != first.kind and each.share >= _LEAST_TOLD]
    return first, sorted(rest, key=lambda each: -each.share)


def _unseen(job: Job) -> Cause:
    """Steps of which only the length is known."""
    seconds = max(each.step.get(Phase.STEP, 0.0) for each in job.ranks)
    return Cause(kind="unknown", share=min(seconds / job.step_seconds, 1.0) * job.in_step_share)


def _evidence(job: Job) -> dict[str, Any]:
    shares = {phase.label: usual([each.shares.get(phase, 0.0) for each in job.ranks]) for phase in Phase}
    step = {phase.label: usual([each.step.get(phase, 0.0) for each in job.ranks]) for phase in Phase}
    return {
        "num_ranks": len(job.ranks),
        "num_missing": job.num_missing,
        "num_steps": job.num_steps,
        "step_seconds": job.step_seconds,
        "samples_per_second": job.samples_per_second,
        "num_workers": job.num_workers,
        "shares": {label: share for label, share in shares.items() if share},
        "step": {label: seconds for label, seconds in step.items() if seconds},
        "local_seconds": {"usual": job.usual_local_seconds, "most": max(each.local_seconds for each in job.ranks)},
        "least_waiting_seconds": min(each.waiting_seconds for each in job.ranks),
        "overlapped_seconds": job.overlapped_seconds,
        "processor_share": job.processor_share,
        "roofline": None if job.roofline is None else asdict(job.roofline),
    }
