"""The sentence that a person reads about what holds training up: what it takes, on whom, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_ext.records.text import counted, on_one_line

from .causes import Cause, Job, Kind
from .phases import COMPUTING, Phase
from .straggling import is_far, usual
from .weighed import Roofline, Weighed

__all__ = ["hosts_of", "sentence"]

_NUM_NAMED = 3


def sentence(cause: Cause, job: Job, *, is_contended: bool) -> str:
    """One line, whatever hosts are called."""
    text = _SENTENCES[cause.kind](cause, job)
    if is_contended and cause.kind not in ("contention", "startup", "outside") and job.processor_share is not None:
        text += (
            f" (contended: while it computed, the training thread had {job.processor_share:.0%} of a processor, so "
            "these times are longer than they need be)"
        )
    if job.num_missing:
        text += f" ({counted(job.num_missing, 'rank')} more not looked at)"
    return on_one_line(text)


def hosts_of(ranks: Sequence[int], job: Job) -> tuple[str, ...]:
    """On which hosts they are, each once."""
    return tuple(sorted({each.host for each in job.ranks if each.rank in ranks}))


def _straggler(cause: Cause, job: Job) -> str:
    slow = max(job.ranks, key=lambda each: each.local_seconds)
    usually = job.usual_local_seconds
    phase, beyond = _where(slow, job)
    excess = max(slow.local_seconds - usually, 1e-12)
    text = (
        f"straggler: {_whom(cause.ranks, job)} {'takes' if len(cause.ranks) == 1 else 'take up to'} "
        f"{_time(slow.local_seconds)} for its own part of a step where {_time(usually)} are usual, "
        f"{min(beyond / excess, 1.0):.0%} of that in {phase.label}; the others wait for {cause.share:.0%} of the step"
        f"{_could(cause, job)}"
    )
    if not is_far(slow.local_seconds, [each.local_seconds for each in job.ranks]):
        return f"{text}: ranks differ as much among themselves, so look for work that is shared out unevenly"
    if slow.processor_share is not None and slow.processor_share < 0.8:
        own = f"it has {slow.processor_share:.0%} of a processor while it should compute"
        return f"{text}: {own}; look for what else runs on {slow.host}"
    return f"{text}: look at {slow.host}, or give it less to do"


def _data(cause: Cause, job: Job) -> str:
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
    text = f"data-bound: {cause.share:.0%} of the step waits for samples {whom if len(job.ranks) > 1 else ''}".rstrip()
    return f"{text}{could}: {advice}, or make samples cheaper to load"


def _communication(cause: Cause, job: Job) -> str:
    seconds, beside = min(each.waiting_seconds for each in job.ranks), job.overlapped_seconds
    overlapped = "" if beside is None else f", and {_time(beside)} more are overlapped by computing"
    return (
        f"communication-bound: each rank waits for at least {_time(seconds)} ({cause.share:.0%} of the step) for "
        f"gradients on their way, with nothing left to compute{overlapped}{_could(cause, job)}: take more samples "
        "between two exchanges, or exchange in smaller or fewer parts"
    )


def _contention(cause: Cause, job: Job) -> str:
    whom = f" on {_whom(cause.ranks, job)}" if cause.ranks else ""
    had = "part" if job.processor_share is None else f"{job.processor_share:.0%}"
    return (
        f"contention: {cause.share:.0%} of the step the training thread should compute and has no processor{whom}; it "
        f"has {had} of one{_could(cause, job)}: run fewer threads and processes on these machines, or see what sleeps "
        "within the passes"
    )


def _computing(bound: str, advice: str) -> Callable[[Cause, Job], str]:
    def words(cause: Cause, job: Job) -> str:
        seconds = usual([each.computing_seconds for each in job.ranks])
        least = "" if job.roofline is None else _at_best(job.roofline)
        return (
            f"{bound}: {cause.share:.0%} of the step ({_time(seconds)}) is forward, backward and optimizer{least}: "
            f"{advice}"
        )

    return words


def _at_best(best: Roofline) -> str:
    times = f"{_time(best.compute)} for arithmetic, {_time(best.memory)} for memory"
    return f": at best {times}, {_time(best.host)} for starting operations"


def _in_step(bound: str, what: str, advice: str) -> Callable[[Cause, Job], str]:
    def words(cause: Cause, job: Job) -> str:
        whom = f" on {_whom(cause.ranks, job)}" if cause.ranks else ""
        return f"{bound}: {cause.share:.0%} of the step {what}{whom}{_could(cause, job)}: {advice}"

    return words


def _pause(bound: str, what: str, advice: str) -> Callable[[Cause, Job], str]:
    def words(cause: Cause, job: Job) -> str:
        return f"{bound}: {cause.share:.0%} of training's time {what}{_could(cause, job)}: {advice}"

    return words


def _no_training(what: str) -> Callable[[Cause, Job], str]:
    return lambda cause, job: f"{cause.kind}: {cause.share:.0%} of the time {what}"


def _unknown(cause: Cause, job: Job) -> str:
    return f"unknown: {cause.share:.0%} of the step lies within steps that were not looked at closely"


_SENTENCES: dict[Kind, Callable[[Cause, Job], str]] = {
    "unknown": _unknown,
    "startup": _no_training("went before the first step"),
    "outside": _no_training("went outside of epochs, to evaluation for one"),
    "straggler": _straggler,
    "data": _data,
    "communication": _communication,
    "contention": _contention,
    "transfer": _in_step(
        "transfer-bound", "copies batches to the accelerator", "pin memory and copy while the step before computes"
    ),
    "loop": _in_step(
        "loop-bound", "is neither loading nor training, but what the loop does besides", "log and measure less often"
    ),
    "checkpoint": _pause("checkpoint-bound", "waits for checkpoints", "save less often, or in the background"),
    "change": _pause("change-bound", "goes to configs that come into force", "change several values at once, or less"),
    "rolled-back": _pause(
        "rolled back", "goes to steps that were taken back", "see why they fail; for lack of memory, take smaller parts"
    ),
    "compute": _computing("compute-bound", "lower precision or a smaller model would make it faster"),
    "memory": _computing("memory-bound", "fuse operations (torch.compile), or lower precision"),
    "host": _computing("host-bound", "take more samples at once, or fuse operations (torch.compile)"),
    "busy": _computing("busy", "what that is bound by is not known without a census and a calibration"),
}


def _where(slow: Weighed, job: Job) -> tuple[Phase, float]:
    """In which phase most of what a rank takes longer lies, and how much."""
    phases = (Phase.DATA, Phase.TRANSFER, *COMPUTING, Phase.OTHER)
    beyond = {
        phase: slow.step.get(phase, 0.0) - usual([each.step.get(phase, 0.0) for each in job.ranks]) for phase in phases
    }
    phase = max(phases, key=lambda each: beyond[each])
    return phase, beyond[phase]


def _could(cause: Cause, job: Job) -> str:
    """What training could be without this."""
    left = 1 - cause.share
    if left < 0.01:
        return ""
    if job.samples_per_second is not None:
        could = f"{_number(job.samples_per_second / left)}"
        return f", training could take {could}" if cause.kind == "data" else f"; training could take {could} samples/s"
    return f"; a step would take {_time(job.step_seconds * left)} instead of {_time(job.step_seconds)}"


def _whom(ranks: Sequence[int], job: Job) -> str:
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
