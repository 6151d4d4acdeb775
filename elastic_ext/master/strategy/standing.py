"""Standing: where a tuner stands, for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_ext.records.json import JsonRecord

__all__ = ["Stand", "Standing"]

Stand = Literal["off", "waiting", "watching", "probing", "settled", "paused"]
"""Told to do nothing; without what it has to know; looking on, and advising; trying; done for now; stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing(JsonRecord):
    """Where it stands, in a word and in a sentence."""

    stand: Stand
    sentence: str
    best_rate: float | None = None
    """Samples per second of all ranks, of the best config so far; None where none was measured."""
