"""StepProfile: some windows of one rank in a few numbers, and the line that shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_ext.records.logged import logged_in_words
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow

from .breakdown import RankView, breakdown_of, is_usable, merged, replicas_of
from .phases import LEAST_SECONDS, Phase

__all__ = [
    "StepProfile",
    "duration_in_words",
    "flops_share",
    "line_of",
    "mfu_in_words",
    "num_tokens",
    "number_in_words",
    "shares_in_words",
    "summary_of",
    "training_seconds",
]


# --- what some windows of one rank come to, in a few numbers ---------------------------------------------------------

_MIDDLE, _NINE_TENTHS = 1, 2  # of a window's quantiles


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Where the time of one rank went over some steps, and how fast they were; None for what is not known."""

    time: float
    """When the last of these steps ended, in seconds since 1970."""
    step: int
    """How many steps had committed when the last of these ended, since training began."""
    num_steps: int
    seconds: float
    """Seconds that these steps took, with all that lay between them."""
    config_version: int
    config_revision: int
    shares: Mapping[str, float]
    """The share of that time that each phase took; they add up to 1. Empty where no step has ended."""
    step_seconds: float | None
    """The median length of a step; ``slow_step_seconds`` is the length that nine tenths of steps stay within."""
    slow_step_seconds: float | None
    samples_per_second: float | None
    """Samples per second of all ranks together, as ``tokens_per_second`` is of tokens."""
    tokens_per_second: float | None
    memory_bytes: int | None
    """Host memory of this rank's process at the end; ``accelerator_bytes`` is its tensors' accelerator memory."""
    accelerator_bytes: int | None
    accelerator_peak_bytes: int | None
    """The most accelerator memory of tensors since torch's peak counters were last reset."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """This rank's mean of each number that the script has given to ``trainer.log()``, by name."""


def summary_of(windows: Sequence[StepWindow], *, num_replicas: int | None = None) -> StepProfile | None:
    """The profile of one rank's windows under one config, the oldest first; None if no step has ended in them, and
    nothing was logged.

    ``num_replicas`` of the model take samples of their own; without it each rank does.
    """
    window = merged(windows)
    if window.num_steps == 0 and not window.logged:
        return None
    training = training_seconds(window)
    return StepProfile(
        time=window.end,
        step=window.step,
        num_steps=window.num_steps,
        seconds=window.length,
        config_version=window.config_version,
        config_revision=window.config_revision,
        shares=_shares(window),
        step_seconds=_quantile(windows, _MIDDLE),
        slow_step_seconds=_quantile(windows, _NINE_TENTHS),
        samples_per_second=_rate(window.num_samples, training),
        tokens_per_second=_rate(num_tokens(window, num_replicas=num_replicas), training),
        memory_bytes=window.memory_bytes,
        accelerator_bytes=window.accelerator_bytes,
        accelerator_peak_bytes=window.accelerator_peak_bytes,
        logged=window.logged,
    )


def flops_share(
    window: StepWindow, census: StepCensus | None, best: NodeCalibration | None, *, num_replicas: int | None = None
) -> float | None:
    """Model flops utilisation (MFU): the share of the device's best arithmetic that the model did; None if unknown."""
    training = training_seconds(window)
    if census is None or best is None or min(census.num_flops, census.num_samples, window.num_samples) <= 0:
        return None
    if training <= 0 or not is_usable(census, best):
        return None
    own_samples = window.num_samples / replicas_of(window, num_replicas)
    return census.num_flops * own_samples / census.num_samples / (training * best.flops_per_second)


def training_seconds(window: StepWindow) -> float:
    """The seconds of a window that rates are counted in: without startup, and without time outside of epochs."""
    left_out = (Phase.STARTUP.label, Phase.OUTSIDE.label)
    found = sum(spent for label, spent in window.seconds.items() if label not in left_out)
    return found if found >= LEAST_SECONDS else 0.0


def num_tokens(window: StepWindow, *, num_replicas: int | None = None) -> float:
    """Tokens that all ranks' models were given in all steps, by the steps of this rank that were measured."""
    own = window.num_tokens * window.num_steps / window.num_detailed if window.num_detailed else 0.0
    return own * replicas_of(window, num_replicas)


def _shares(window: StepWindow) -> dict[str, float]:
    if window.num_steps == 0:
        return {}
    return {
        phase.label: share for phase, share in breakdown_of(RankView(host="", window=window)).shares.items() if share
    }


def _rate(number: float, seconds: float) -> float | None:
    return number / seconds if number > 0 and seconds > 0 else None


def _quantile(windows: Sequence[StepWindow], which: int) -> float | None:
    """A quantile of step lengths: that of the median window, each weighed by its steps."""
    rows = sorted(_quantiles(windows, which))
    middle = sum(num_steps for _, num_steps in rows) / 2
    for seconds, num_steps in rows:
        middle -= num_steps
        if middle <= 0:
            return seconds
    return None


def _quantiles(windows: Sequence[StepWindow], which: int) -> Iterator[tuple[float, int]]:
    for window in windows:
        if len(window.step_seconds) > which:
            yield window.step_seconds[which], window.num_steps


# --- a profile on one line, for the log and the terminal -------------------------------------------------------------

_LEAST_SHARE = 0.01
_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def line_of(profile: StepProfile, *, mfu: float | None, text: str) -> str:
    """A profile on one line, with ``text``, which says what holds training up; without steps, what was logged alone."""
    if profile.num_steps == 0:
        return f"step {profile.step}, {logged_in_words(profile.logged)}"
    told = ", ".join(filter(None, (logged_in_words(profile.logged), *_speeds(profile, mfu))))
    return f"step {profile.step}, {told}: {shares_in_words(profile.shares)}; {text}"


def shares_in_words(shares: Mapping[str, float]) -> str:
    """Shares by phase on one line, as ``data 41%, forward 20%``; small ones are ``other``."""
    found = {label: share for label, share in shares.items() if share >= _LEAST_SHARE and label != Phase.OTHER.label}
    words = [f"{label} {share:.0%}" for label, share in found.items()]
    rest = sum(shares.values()) - sum(found.values())
    if rest >= _LEAST_SHARE or not words:
        words.append(f"{Phase.OTHER.label} {rest:.0%}")
    return ", ".join(words)


def duration_in_words(seconds: float) -> str:
    """A duration with three digits and a unit, such as ``12.3 ms``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def number_in_words(number: float) -> str:
    """A large number in short, such as ``2,600`` and ``1.3M``."""
    for size, letter in _SIZES:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def mfu_in_words(mfu: float | None) -> str:
    """Model flops utilisation in words; empty where it is not known, or rounds to 0% and so says nothing."""
    words = "" if mfu is None else f"MFU {mfu:.0%}"
    return "" if words == "MFU 0%" else words


def _speeds(profile: StepProfile, mfu: float | None) -> Iterator[str]:
    if profile.step_seconds is not None and profile.slow_step_seconds is not None:
        typical, slow = duration_in_words(profile.step_seconds), duration_in_words(profile.slow_step_seconds)
        yield f"{typical} a step (p50; {slow} p90)"
    else:
        yield f"{duration_in_words(profile.seconds / profile.num_steps)} a step"
    if profile.samples_per_second is not None:
        yield f"{number_in_words(profile.samples_per_second)} samples/s"
    if profile.tokens_per_second is not None:
        yield f"{number_in_words(profile.tokens_per_second)} tokens/s"
    if words := mfu_in_words(mfu):
        yield words
