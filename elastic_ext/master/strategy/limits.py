"""Limits: what people ask a tuner for that it leaves as it is in this job, and why, as sentences. Pure."""

from __future__ import annotations

from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts

from .sizes import RATE_KEY, SIZE_KEY, why_not_resized
from .space import KEYS, space_of
from .telling import listed

__all__ = ["limits_in_words"]

_LEARNED = (RATE_KEY, SIZE_KEY)
_MOST_REASONS = 3


def limits_in_words(facts: JobFacts, tuning: TuningSection) -> list[str]:
    """Each reason in a sentence of its own."""
    found = [_why_learned_stays(facts, tuning)]
    if not space_of(facts, tuning).is_open:
        reasons = [f"{key}: {why}" for key, why in facts.fixed.items() if key in KEYS.values()]
        found.append("; ".join(["there is nothing to choose", *reasons[:_MOST_REASONS]]))
    return [each for each in found if each]


def _why_learned_stays(facts: JobFacts, tuning: TuningSection) -> str:
    """Why keys that change what is learned have no effect in ``tuning.knobs``; empty where none is such."""
    named = [key for key in _LEARNED if key in (tuning.knobs or {})]
    why_not = why_not_resized(facts, tuning) if SIZE_KEY in named else ""
    if not named or (SIZE_KEY in named and not why_not):
        return ""
    what = "it changes" if len(named) == 1 else "they change"
    words = f"{listed(named)} in tuning.knobs: not tuned, since {what} what is learned"
    return f"{words}: {why_not}" if why_not else words
