"""What a tuner has decided, in words for people: in events, and in `elastic-ext tuning log`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from elastic_ext.records.json import shown
from elastic_ext.records.text import on_one_line, size_in_words
from elastic_ext.tuner.decisions import Decision

__all__ = ["Mode", "changes_in_words", "event_text", "rates_in_words", "rates_of"]

Mode = Literal["off", "advise", "auto"]
"""What a tuner may do."""
_MOST_VALUE = 60


def event_text(decision: Decision) -> str:
    """All of it on a line."""
    parts = [f"decision {decision.number} ({decision.kind})"]
    if decision.outcome:
        parts[0] += f" is {decision.outcome}"
    if decision.changes:
        parts.append(changes_in_words(decision.changes))
    parts.append(decision.reason)
    if rates := rates_in_words(decision):
        parts.append(rates)
    return on_one_line(": ".join(each for each in parts if each))


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """What is set to what."""
    return ", ".join(
        f"{path} as at the start" if value is None else f"{path}={_value(value)}" for path, value in changes.items()
    )


def rates_in_words(decision: Decision) -> str:
    """What was expected and what came of it; empty where nothing of that is known."""
    return ", ".join(rates_of(decision.before, decision.predicted, decision.measured, decision.predicted_bytes))


def rates_of(
    before: float | None, predicted: float | None, measured: float | None, predicted_bytes: int | None
) -> Iterator[str]:
    """Each of those that are known."""
    rates = {"before": before, "predicted": predicted, "measured": measured}
    for word, rate in rates.items():
        if rate is not None:
            yield f"{rate:.4g} samples/s {word}"
    if predicted_bytes is not None:
        yield f"a peak of {size_in_words(predicted_bytes)} predicted"


def _value(value: Any) -> str:
    return shown(value, _MOST_VALUE) if not isinstance(value, float) else json.dumps(value)
