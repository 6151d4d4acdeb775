"""The numbers that a script gives to ``trainer.log()``, as they stand in files, on the wire and on the terminal: their
names, their means, and their words. How a rank adds them up is in training/logged.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

from .measures import METRICS

__all__ = ["MOST_NAMES", "as_json", "fitting", "logged_in_words", "mean_logged", "sum_logged", "why_no_name"]

MOST_NAMES = 32
"""The most names that a script may log numbers under."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,47}")


def why_no_name(name: str, known: Collection[str]) -> str | None:
    """Why a script cannot log numbers under ``name``, beside the ``known`` ones; None where it can."""
    if not _NAME.fullmatch(name):
        return (
            f"a number is named {name!r}; allowed: at most 48 letters, digits and _ . / -, of which a letter or _ "
            "comes first"
        )
    if name in METRICS:
        return f"a number is named {name!r}, as a metric of this library is; give it another name"
    if len(known) >= MOST_NAMES:
        return f"{name!r} would be number {len(known) + 1} of the names; at most {MOST_NAMES} names may be logged"
    return None


def fitting(values: Mapping[str, object]) -> dict[str, float]:
    """The logged numbers in ``values``, which another process has written: whatever cannot be one is left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if len(found) < MOST_NAMES and _NAME.fullmatch(name) and isinstance(value, float):
            found[name] = value
    return found


def mean_logged(rows: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """The mean of each number over rows that have it, each with its weight, such as those of ranks or of windows."""
    return {name: total / weights for name, (total, weights) in sum_logged(rows).items() if weights > 0}


def sum_logged(rows: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, tuple[float, float]]:
    """The weighted sum of each number over rows that have it, and the sum of their weights."""
    sums: dict[str, tuple[float, float]] = {}
    for values, weight in rows:
        for name, value in values.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + value * weight, weights + weight
    return sums


def logged_in_words(values: Mapping[str, float]) -> str:
    """Logged numbers on one line, such as ``loss 2.31, acc 0.47``; empty where there are none."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def as_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """Logged numbers for JSON, which has no NaN and no infinity: these are text there, ``NaN`` and ``-Infinity``."""
    return {name: value if math.isfinite(value) else _NOT_FINITE[str(value)] for name, value in values.items()}


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
