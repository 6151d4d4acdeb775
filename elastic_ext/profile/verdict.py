"""What holds training up: the causes, the share of time that each takes, and the sentence for people. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from elastic_ext.records.json import JsonRecord
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.text import age_in_words, counted, on_one_line

from .breakdown import RankBreakdown, RankView, Roofline, breakdown_of, merged, why_no_verdict
from .phases import COMPUTING, Phase
from .stragglers import is_far, usual

__all__ = [
    "KINDS",
    "LIMITS",
    "Cause",
    "Kind",
    "RankView",
    "RanksCompared",
    "RunnerUp",
    "Verdict",
    "causes",
    "compare_ranks",
    "computing",
    "dominating",
    "hosts_of",
    "limit",
    "merged",
    "sentence",
    "verdict",
]


# --- what may hold training up, and how much of its time each cause takes --------------------------------------------
# Which of the causes the verdict names is decided below, in ``_ranked``.
#
# A share is what would be saved if its cause were gone, in parts of *training's time*: steps, and what stands between
# them, without startup and what lies outside of epochs. So shares of unlike causes compare. They need not add up to 1.

Kind = Literal[
    "unknown",  # too little is known, or it does not fit together; the text says why
    "startup",  # most of the time went before the first step
    "outside",  # most of the time went outside of epochs, to evaluation for one
    "straggler",  # some ranks take longer for their own part of a step, and the others wait
    "data",  # steps wait for samples
    "transfer",  # batches are copied to the accelerator
    "communication",  # all ranks wait for gradients on their way or to agree, with nothing left to compute
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

_PAUSE = 0.15
"""The limit for causes that take time between steps, or take steps back."""
_WAIT = 0.25
"""The limit for causes that take time within steps."""
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
"""The share of time above which a cause is told.

Of several causes above their limits the one with the largest share is told; of equal shares the one listed first.
"""
_DOMINATES = 0.5
"""The share of all time above which startup, or time outside of epochs, is named before any other cause."""
_LESS_SURE = 0.5
"""How much of the CPU-starved share is added to the stragglers' limit: lack of processors alone makes ranks differ."""
_PAUSES: dict[Kind, Phase] = {
    "checkpoint": Phase.CHECKPOINT,
    "change": Phase.CHANGE,
    "rolled-back": Phase.ROLLED_BACK,
}
_IN_STEP: dict[Kind, Phase] = {"data": Phase.DATA, "transfer": Phase.TRANSFER, "loop": Phase.OTHER}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One thing that takes time from training: its kind, its share, and the ranks that it concerns."""

    kind: Kind
    share: float
    """The share of training's time that it takes; of all time for startup and outside."""
    ranks: tuple[int, ...] = ()
    """The ranks that this cause concerns; empty where it concerns all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksCompared:
    """The profile windows of all ranks, side by side.

    What is *usual* among them is the lower median: of two ranks, the smaller value.
    """

    ranks: tuple[RankBreakdown, ...]
    """The time of each rank, in rank order."""
    num_missing: int
    num_steps: int
    """Steps of the rank that has told of the fewest."""
    step_seconds: float
    samples_per_second: float | None
    """Samples per second of all ranks together while training goes on; None where they are not counted."""
    num_workers: int | None
    """Data workers of all loaders together; None where that is not known."""
    num_processors: int | None
    """Processors of all hosts together; None where that is not known."""
    processor_share: float | None
    """The upper median of ranks' processor shares; None where nobody can tell."""
    roofline: Roofline | None
    step_share_of_training: float
    """The share of training's time that usually goes to steps."""
    cpu_starved_share: float
    """The usual share of the time in steps in which a training thread should have computed and had no processor."""
    usual_local_seconds: float
    """Seconds of a step that a rank is usually busy with by itself."""

    @property
    def is_known(self) -> bool:
        """Whether the time within steps is known by phase on all ranks."""
        return all(each.is_known for each in self.ranks)

    @property
    def overlapped_seconds(self) -> float | None:
        """Seconds of a step in which communication and computing overlap; None where that is not known."""
        known = [each.overlapped_seconds for each in self.ranks if each.overlapped_seconds is not None]
        return usual(known) if known else None


def compare_ranks(views: Sequence[RankView]) -> RanksCompared:
    """The times of several ranks side by side; ``why_no_verdict`` has to give None for these ranks."""
    ordered = sorted(views, key=lambda view: view.rank)
    ranks = tuple(breakdown_of(view) for view in ordered)
    shares = [each.processor_share for each in ranks if each.processor_share is not None]
    workers = [view.num_workers for view in ordered if view.num_workers is not None]
    return RanksCompared(
        ranks=ranks,
        num_missing=max(ordered[0].window.world_size - len(ordered), 0),
        num_steps=min(view.window.num_steps for view in ordered),
        step_seconds=usual([each.step_seconds for each in ranks]),
        samples_per_second=_rate(ordered),
        num_workers=sum(workers) if len(workers) == len(ordered) else None,
        num_processors=_num_processors(ordered),
        processor_share=statistics.median_high(shares) if shares else None,
        roofline=_usual_roofline([each.roofline for each in ranks if each.roofline is not None]),
        step_share_of_training=usual([each.step_share_of_training for each in ranks]),
        cpu_starved_share=usual([each.cpu_starved_share for each in ranks]),
        usual_local_seconds=usual([each.local_seconds for each in ranks]),
    )


def _num_processors(views: Sequence[RankView]) -> int | None:
    """The processors of all hosts of these ranks, of which ranks of a host share those that any of them may use."""
    on_hosts: dict[str, int] = {}
    for view in views:
        if view.num_processors is None:
            return None
        on_hosts[view.host] = max(view.num_processors, on_hosts.get(view.host, 0))
    return sum(on_hosts.values())


def causes(job: RanksCompared) -> list[Cause]:
    """The causes that ``LIMITS`` has a limit for, whether they exceed it or not, the largest first."""
    order = list(LIMITS)
    return sorted(_all_causes(job), key=lambda cause: (-cause.share, order.index(cause.kind)))


def limit(cause: Cause, job: RanksCompared) -> float:
    """The share that a cause has to exceed to be named; for stragglers it grows with the CPU-starved share."""
    return LIMITS[cause.kind] + (_LESS_SURE * job.cpu_starved_share if cause.kind == "straggler" else 0.0)


def dominating(job: RanksCompared) -> Cause | None:
    """The startup, or time outside of epochs, where it takes most of the time; else None."""
    kinds: tuple[tuple[Kind, Phase], ...] = (("startup", Phase.STARTUP), ("outside", Phase.OUTSIDE))
    for kind, phase in kinds:
        share = usual([each.shares.get(phase, 0.0) for each in job.ranks])
        if share > _DOMINATES:
            return Cause(kind=kind, share=share)
    return None


def computing(job: RanksCompared) -> Cause:
    """Computing as a cause: its share, and whether arithmetic, memory or the host bounds it."""
    share = _in_step(job, usual([each.computing_seconds for each in job.ranks]))
    best = job.roofline
    if best is None:
        return Cause(kind="busy", share=share)
    times: dict[Kind, float] = {"compute": best.compute, "memory": best.memory, "host": best.host}
    kind = max(times, key=lambda each: times[each])
    return Cause(kind=kind if times[kind] > 0 else "busy", share=share)


# ---- each of them ----


def _all_causes(job: RanksCompared) -> Iterator[Cause]:
    if len(job.ranks) > 1 and job.is_known:
        yield _straggler(job)
    for kind, phase in _IN_STEP.items():
        yield _of_all(kind, [_in_step(job, each.step.get(phase, 0.0)) for each in job.ranks], job)
    # What all ranks wait at least is communication; a rank that waits longer than that waits for a slower rank.
    waiting = min(each.waiting_seconds for each in job.ranks)
    yield Cause(kind="communication", share=_in_step(job, waiting))
    yield _of_all("contention", [each.cpu_starved_share * job.step_share_of_training for each in job.ranks], job)
    for kind, phase in _PAUSES.items():
        yield Cause(kind=kind, share=usual([_of_training(each, phase) for each in job.ranks]))


def _straggler(job: RanksCompared) -> Cause:
    """The ranks that take longer than usual for their own part of a step, by the share of the slowest one.

    A rank counts by the smaller of two differences from what is usual: of median steps, and of the lower quartile.
    """
    steady = usual([each.steady_seconds for each in job.ranks])
    beyond = {
        each.rank: _in_step(job, min(each.local_seconds - job.usual_local_seconds, each.steady_seconds - steady))
        for each in job.ranks
    }  # a slow rank is slow in most steps; a rank whose processor other processes use is slow in some
    largest = Cause(kind="straggler", share=max(beyond.values()))
    least = min(limit(largest, job), largest.share)
    slow = [rank for rank, share in beyond.items() if share > 0 and share >= least]
    return Cause(kind="straggler", share=largest.share, ranks=tuple(slow))


def _of_all(kind: Kind, shares: Sequence[float], job: RanksCompared) -> Cause:
    """A cause on all ranks; it names the ranks whose own share is above the limit, unless these are all or none."""
    above = [each.rank for each, share in zip(job.ranks, shares, strict=True) if share > LIMITS[kind]]
    return Cause(kind=kind, share=usual(shares), ranks=tuple(above) if len(above) < len(job.ranks) else ())


def _in_step(job: RanksCompared, seconds: float) -> float:
    """The share of training's time that so many ``seconds`` of each step take."""
    return min(seconds / job.step_seconds, 1.0) * job.step_share_of_training


def _of_training(rank: RankBreakdown, phase: Phase) -> float:
    """The share that a phase takes of a rank's time without startup and without time outside of epochs."""
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


# --- the sentence that a person reads about what holds training up: what it takes, on whom, and what to do -----------

_NUM_NAMED = 3


def sentence(cause: Cause, job: RanksCompared, *, is_contended: bool) -> str:
    """The sentence for people about a cause, on one line whatever the hosts are called."""
    text = _SENTENCES[cause.kind](cause, job)
    if is_contended and cause.kind not in ("contention", "startup", "outside") and job.processor_share is not None:
        text += (
            f" (contended: while it computed, the training thread had {job.processor_share:.0%} of a processor, so "
            "these times are longer than they need be)"
        )
    if job.num_missing:
        text += f" ({counted(job.num_missing, 'rank')} more not looked at)"
    return on_one_line(text)


def hosts_of(ranks: Sequence[int], job: RanksCompared) -> tuple[str, ...]:
    """The hosts of these ranks, each once."""
    return tuple(sorted({each.host for each in job.ranks if each.rank in ranks}))


def _straggler_words(cause: Cause, job: RanksCompared) -> str:
    slow = max((each for each in job.ranks if each.rank in cause.ranks), key=lambda each: each.local_seconds)
    usually = job.usual_local_seconds
    phase, beyond = _where(slow, job)
    excess = max(slow.local_seconds - usually, 1e-12)
    is_one = len(cause.ranks) == 1
    takes, its, longer = ("takes", "its", "") if is_one else ("take up to", "their", "up to ")
    text = (
        f"straggler: {_whom(cause.ranks, job)} {takes} {_time(slow.local_seconds)} for {its} own part of a step, "
        f"{longer}{_time(excess)} longer than usual; {min(beyond / excess, 1.0):.0%} of the excess is in "
        f"{phase.label}; the others wait for {_share(cause)}{_could(cause, job)}"
    )
    if not is_far(slow.local_seconds, [each.local_seconds for each in job.ranks]):
        return f"{text}: ranks differ as much among themselves, so look for work that is shared out unevenly"
    if slow.processor_share is not None and slow.processor_share < 0.8:
        own = f"it has {slow.processor_share:.0%} of a processor while it should compute"
        return f"{text}: {own}; look for what else runs on {slow.host}"
    return f"{text}: look at {slow.host}, or give the rank fewer samples by share_weights"


def _data(cause: Cause, job: RanksCompared) -> str:
    whom = "on all ranks" if not cause.ranks else f"on {_whom(cause.ranks, job)}"
    if job.num_workers is None:
        who, advice = "the loader delivers", "add workers to the loader"
    elif job.num_workers == 0:
        who, advice = "loading within the training process delivers", "give the loader workers"
    else:
        who = f"{counted(job.num_workers, 'worker')} {'delivers' if job.num_workers == 1 else 'deliver'}"
        advice = "add workers"
    rate = job.samples_per_second
    could = "" if rate is None else f"; {who} {_number(rate)} samples/s{_could(cause, job)}"
    text = f"data-bound: {_share(cause)} goes to waiting for samples {whom if len(job.ranks) > 1 else ''}".rstrip()
    if job.num_workers and job.num_processors is not None and job.num_workers >= job.num_processors:
        few = f"there are no more than {counted(job.num_processors, 'processor')}, so that more workers help only"
        return f"{text}{could}: make samples cheaper to load; {few} where loading waits for storage"
    return f"{text}{could}: {advice}, or make samples cheaper to load"


def _communication(cause: Cause, job: RanksCompared) -> str:
    seconds, beside = min(each.waiting_seconds for each in job.ranks), job.overlapped_seconds
    overlapped = "" if beside is None else f", and {_time(beside)} more are overlapped by computing"
    return (
        f"communication-bound: each rank waits for at least {_time(seconds)} a step ({_share(cause)}) for "
        f"gradients on their way, with nothing left to compute{overlapped}{_could(cause, job)}: raise "
        "global_batch_size, or under no_shard try another communication.bucket_cap_mb"
    )


def _contention(cause: Cause, job: RanksCompared) -> str:
    whom = f" on {_whom(cause.ranks, job)}" if cause.ranks else ""
    had = "part" if job.processor_share is None else f"{job.processor_share:.0%}"
    return (
        f"contention: for {_share(cause)} the training thread should compute and has no processor{whom}; "
        f"the thread has {had} of one{_could(cause, job)}: run fewer threads and processes on these machines, or look "
        "for what sleeps within the passes"
    )


def _computing(bound: str, advice: str) -> Callable[[Cause, RanksCompared], str]:
    def words(cause: Cause, job: RanksCompared) -> str:
        seconds = usual([each.computing_seconds for each in job.ranks])
        least = "" if job.roofline is None else _at_best(job.roofline)
        took = f"{_share(cause)} ({_time(seconds)} a step)"
        return f"{bound}: {took} goes to forward, backward and optimizer{least}: {advice}"

    return words


def _at_best(best: Roofline) -> str:
    times = f"{_time(best.compute)} for arithmetic, {_time(best.memory)} for memory"
    return f": at best {times}, {_time(best.host)} for starting operations"


def _goes_to(bound: str, what: str, advice: str) -> Callable[[Cause, RanksCompared], str]:
    def words(cause: Cause, job: RanksCompared) -> str:
        whom = f" on {_whom(cause.ranks, job)}" if cause.ranks else ""
        return f"{bound}: {_share(cause)} goes to {what}{whom}{_could(cause, job)}: {advice}"

    return words


def _no_training(what: str) -> Callable[[Cause, RanksCompared], str]:
    return lambda cause, job: f"{cause.kind}: {cause.share:.0%} of the time {what}"


def _unknown(cause: Cause, job: RanksCompared) -> str:
    return f"unknown: {_share(cause)} went to steps that were not measured, so that their phases are not known"


_SENTENCES: dict[Kind, Callable[[Cause, RanksCompared], str]] = {
    "unknown": _unknown,
    "startup": _no_training("went before the first step"),
    "outside": _no_training("went outside of epochs, to evaluation for one"),
    "straggler": _straggler_words,
    "data": _data,
    "communication": _communication,
    "contention": _contention,
    "transfer": _goes_to(
        "transfer-bound", "copying batches to the accelerator", "pin memory and copy while the step before computes"
    ),
    "loop": _goes_to("loop-bound", "what the loop does beside loading and training", "log and measure less often"),
    "checkpoint": _goes_to("checkpoint-bound", "waiting for checkpoints", "save less often, or in the background"),
    "change": _goes_to("change-bound", "configs that come into force", "change several values at once, or less often"),
    "rolled-back": _goes_to(
        "rolled back",
        "steps that were taken back",
        "see why they fail; for lack of memory, take smaller micro-batches",
    ),
    "compute": _computing("compute-bound", "lower precision or a smaller model would make it faster"),
    "memory": _computing("memory-bound", "fuse operations (torch.compile), or lower precision"),
    "host": _computing("host-bound", "take more samples at once, or fuse operations (torch.compile)"),
    "busy": _computing(
        "busy", "what bounds it is not known: operations were not counted, or the device speed was not measured"
    ),
}


def _where(slow: RankBreakdown, job: RanksCompared) -> tuple[Phase, float]:
    """The phase that makes most of what a slow rank takes longer than usual, and its seconds."""
    phases = (Phase.DATA, Phase.TRANSFER, *COMPUTING, Phase.OTHER)
    beyond = {
        phase: slow.step.get(phase, 0.0) - usual([each.step.get(phase, 0.0) for each in job.ranks]) for phase in phases
    }
    phase = max(phases, key=lambda each: beyond[each])
    return phase, beyond[phase]


def _share(cause: Cause) -> str:
    return f"{cause.share:.0%} of training's time"


def _could(cause: Cause, job: RanksCompared) -> str:
    """How fast training could be without this cause, in words."""
    left = 1 - cause.share
    if left < 0.01:
        return ""
    if job.samples_per_second is not None:
        could = f"{_number(job.samples_per_second / left)}"
        return f", training could take {could}" if cause.kind == "data" else f"; training could take {could} samples/s"
    if cause.kind in _PAUSES:
        return ""
    of_step = cause.share / (job.step_share_of_training or 1.0)
    without = job.step_seconds * max(1 - of_step, 0.0)
    return f"; a step would take {_time(without)} instead of {_time(job.step_seconds)}"


def _whom(ranks: Sequence[int], job: RanksCompared) -> str:
    """Some ranks with their hosts, in words."""
    by_rank = {each.rank: each.host for each in job.ranks}
    named = [f"{rank} on {by_rank[rank]}" for rank in ranks[:_NUM_NAMED]]
    more = len(ranks) - len(named)
    text = ", ".join(named)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" + (f" and {more} more" if more > 0 else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


# --- the verdict -----------------------------------------------------------------------------------------------------
# What holds training up, judged from the profiles of its ranks: one kind, with its share, its evidence and a sentence.
#
# Pure, and no oracle: it judges the windows that it is given, and says that it does not know where they do not tell.
# The kinds stand above.

_CONTENDED = 0.85
"""Below this share of a processor while it computes, the training thread is held up by other threads."""
_LEAST_TOLD = 0.05
"""The share from which on a cause is listed as a runner-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """A cause that takes time besides the one that the verdict names."""

    kind: Kind
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(JsonRecord):
    """What holds training up most, with its share of the time, its ranks and a sentence for people."""

    kind: Kind
    text: str
    """A sentence for people, on one line, with what to do."""
    share: float | None = None
    """The share of training's time that it takes, of all time for startup and outside; None for ``unknown``."""
    ranks: tuple[int, ...] = ()
    """The ranks that the cause concerns; empty where these are all, or not known."""
    hosts: tuple[str, ...] = ()
    is_contended: bool = False
    """Whether training threads had less than a processor while they computed, whatever the cause."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The numbers that the verdict was judged from, as plain values for JSON."""
    runners_up: tuple[RunnerUp, ...] = ()
    """Other causes that take time, the largest first."""
    steps: str = ""
    """The steps that were judged and how long these took, in words; empty where windows could not be judged."""

    @property
    def text_over_steps(self) -> str:
        """The sentence for people, with the steps that it is about."""
        return f"{self.text} (over {self.steps})" if self.steps else self.text


def verdict(views: Sequence[RankView], *, is_partial: bool = False) -> Verdict:
    """What holds up the job of these ranks, given in any order; ``is_partial`` where ranks may be missing."""
    reason = why_no_verdict(views, is_partial=is_partial)
    if reason is not None:
        return Verdict(kind="unknown", text=on_one_line(f"unknown: {reason}"))
    job = compare_ranks(views)
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
        steps=_steps_in_words([view.window for view in views]),
    )


def _steps_in_words(windows: Sequence[StepWindow]) -> str:
    """The steps of these windows, from the first to the last of any, and how long they took."""
    first, last = min(max(each.step - each.num_steps + 1, 1) for each in windows), max(each.step for each in windows)
    seconds = max(each.end for each in windows) - min(each.begin for each in windows)
    steps = f"step {last}" if first >= last else f"steps {first} to {last}"
    return f"{steps}, {age_in_words(seconds)}"


def _ranked(job: RanksCompared) -> tuple[Cause, list[Cause]]:
    """The cause that the verdict names, and the others that take time.

    The first of these that there is: startup or time outside of epochs, if it dominates; the largest cause above its
    limit; computing, or ``unknown`` where steps of unknown phases take more time than computing.
    """
    found = causes(job)
    bound = computing(job)
    first = dominating(job) or next((each for each in found if each.share > limit(each, job)), None)
    if first is None:
        unseen = _unseen(job)
        first = bound if unseen.share <= bound.share else unseen
    rest = [each for each in (*found, bound) if each.kind != first.kind and each.share >= _LEAST_TOLD]
    return first, sorted(rest, key=lambda each: -each.share)


def _unseen(job: RanksCompared) -> Cause:
    """The cause ``unknown``: steps of which only the length is known."""
    seconds = max(each.step.get(Phase.STEP, 0.0) for each in job.ranks)
    return Cause(kind="unknown", share=min(seconds / job.step_seconds, 1.0) * job.step_share_of_training)


def _evidence(job: RanksCompared) -> dict[str, Any]:
    shares = {phase.label: usual([each.shares.get(phase, 0.0) for each in job.ranks]) for phase in Phase}
    step = {phase.label: usual([each.step.get(phase, 0.0) for each in job.ranks]) for phase in Phase}
    return {
        "num_ranks": len(job.ranks),
        "num_missing": job.num_missing,
        "num_steps": job.num_steps,
        "step_seconds": job.step_seconds,
        "samples_per_second": job.samples_per_second,
        "num_workers": job.num_workers,
        "num_processors": job.num_processors,
        "shares": {label: share for label, share in shares.items() if share},
        "step": {label: seconds for label, seconds in step.items() if seconds},
        "local_seconds": {"usual": job.usual_local_seconds, "most": max(each.local_seconds for each in job.ranks)},
        "least_waiting_seconds": min(each.waiting_seconds for each in job.ranks),
        "overlapped_seconds": job.overlapped_seconds,
        "processor_share": job.processor_share,
        "roofline": None if job.roofline is None else asdict(job.roofline),
    }
