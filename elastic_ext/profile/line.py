"""A profile on one line, for the log and the terminal: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .phases import Phase
from .summary import StepProfile

__all__ = ["duration_in_words", "line_of", "number_in_words", "shares_in_words"]

_LEAST_SHARE = 0.01
_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def line_of(profile: StepProfile, *, mfu: float | None, text: str) -> str:
    """All of it, and what holds training up, which is ``text``."""
    return f"step {profile.step}, {', '.join(_speeds(profile, mfu))}: {shares_in_words(profile.shares)}; {text}"


def shares_in_words(shares: Mapping[str, float]) -> str:
    """``data 41%, forward 20%``; what is little is ``other``."""
    found = {label: share for label, share in shares.items() if share >= _LEAST_SHARE and label != Phase.OTHER.label}
    words = [f"{label} {share:.0%}" for label, share in found.items()]
    rest = sum(shares.values()) - sum(found.values())
    if rest >= _LEAST_SHARE or not words:
        words.append(f"{Phase.OTHER.label} {rest:.0%}")
    return ", ".join(words)


def duration_in_words(seconds: float) -> str:
    """Three digits and a unit, such as ``12.3 ms``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def number_in_words(number: float) -> str:
    """``2,600`` and ``1.3M``."""
    for size, letter in _SIZES:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


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
    if mfu is not None:
        yield f"MFU {mfu:.0%}"
