"""Spans of time, and what of some lies outside of others: pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Span", "length", "outside", "united"]

Span = tuple[int, int]
"""From, and up to."""


def united(spans: Iterable[Span]) -> list[Span]:
    """The same moments, each in one span, in order."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    """How long they are together, each moment counted once."""
    return sum(end - begin for begin, end in united(spans))


def outside(spans: Iterable[Span], others: Iterable[Span]) -> int:
    """How long ``spans`` are where none of ``others`` is."""
    spans, others = list(spans), list(others)
    return length([*spans, *others]) - length(others)
