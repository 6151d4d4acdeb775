"""Decision: one thing that a tuner has decided, with why: what people read, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_ext.records.json import JsonRecord

__all__ = ["Decision", "Kind", "Outcome"]

Kind = Literal[
    "probe",  # a config is put in force, to be measured
    "settle",  # one that was measured is put in force, or stays
    "undo",  # a change is taken back: it measures worse than was predicted, or a person asks for it
    "advise",  # what would be put in force, if that were allowed
    "pause",  # nothing is decided until somebody says so, or until what is said in the reason has passed
    "resume",  # it goes on
    "reopen",  # something has changed, and the search begins again
    "hold",  # nothing can be decided by what is known
]
Outcome = Literal["", "kept", "undone", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(JsonRecord):
    """One of them. Rates are samples per second, of all ranks together."""

    number: int
    """From 1 on."""
    time: float
    kind: Kind
    reason: str
    """A sentence for a person."""
    base: int
    """The version of the config that it is about, and that ``changes`` are to be made to."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """By key, what is to be set; None for what is to be left out, as at the start. Empty where nothing is written."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """By key of ``changes``, what was set before; None for what was left out: what takes the change back."""
    version: int | None = None
    """Of the config that was written for it; None until then, and where nothing is."""
    before: float | None = None
    """The rate when it was decided,"""
    predicted: float | None = None
    """... the one that was expected of it,"""
    measured: float | None = None
    """... and the one that it brought; None until it was measured."""
    predicted_bytes: int | None = None
    """The peak of memory that was expected; None where memory is no concern, or nothing is known of it."""
    outcome: Outcome = ""
    """What became of it; empty as long as that is open."""

    @property
    def newest(self) -> int:
        """The version that was written for it, and until then the one that it is about."""
        return self.base if self.version is None else self.version

    def check_read(self) -> None:
        rates = (self.before, self.predicted, self.measured, self.time)
        if not all(each is None or 0 <= each < math.inf for each in rates):
            raise ValueError("before, predicted, measured or time is no amount")
