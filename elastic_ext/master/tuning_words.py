"""What a tuner has decided, in words for people: in events, and in `elastic-ext tuning log`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from elastic_ext.strict_json import shown
from elastic_ext.wording import on_one_line, size_in_words

from .strategy.decisions import Decision

__all__ = ["Mode", "changes_in_words", "event_text", "rates_in_words"]

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
    return ", ".join(_rates(decision))


def _rates(decision: Decision) -> Iterator[str]:
    if decision.before is not None:
        yield f"{decision.before:.4g} samples/s before"
    if decision.predicted is not None:
        yield f"{decision.predicted:.4g} predicted"
    if decision.measured is not None:
        yield f"{decision.measured:.4g} measured"
    if decision.predicted_bytes is not None:
        yield f"a peak of {size_in_words(decision.predicted_bytes)} predicted"


def _value(value: Any) -> str:
    return shown(value, _MOST_VALUE) if not isinstance(value, float) else json.dumps(value)
