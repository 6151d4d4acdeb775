"""The decisions of a tuner, in order, with their reasons and results, and where the tuner stands. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.json import JsonRecord

from .explain import listed

__all__ = ["Book", "Decision", "Kind", "Outcome", "Stand", "Tried", "TuningStanding"]


# --- one thing that a tuner has decided, with why: what people read, and what is kept --------------------------------

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


# --- the decisions of a tuner, in the order in which they are made, and what has become of them ----------------------


class Tried(NamedTuple):
    """Of one try or several, by key, what they have set, and what was there before the first of them."""

    changes: Mapping[str, Any]
    instead: Mapping[str, Any]

    def left_in(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What is to be set where ``values`` still have what was tried."""
        return {key: old for key, old in self.instead.items() if values.get(key) == self.changes.get(key)}


class Book:
    """All decisions of a job, those from before a restart of the master among them."""

    def __init__(self, decisions: Sequence[Decision] = ()) -> None:
        self._decisions = {each.number: each for each in sorted(decisions, key=lambda each: each.number)}
        self._next = max(self._decisions, default=0) + 1

    @property
    def open(self) -> Decision | None:
        """The newest one that something is written for, while it is not known what comes of it."""
        waiting = [each for each in self._decisions.values() if each.changes and _is_open(each)]
        return waiting[-1] if waiting else None

    @property
    def last_kept(self) -> Decision | None:
        """The newest one whose changes are in force, or were when others were added to them.

        What has put in force again what was there before is none: taken back, it would bring what was found worse.
        """
        kept = [each for each in self._decisions.values() if each.changes and each.outcome == "kept"]
        return next((each for each in reversed(kept) if each.kind != "undo"), None)

    def way_back(self, decision: Decision) -> dict[str, Any]:
        """By key, what takes ``decision`` back, and with it what was tried before it and not kept: one try follows
        another, and what was found slow may be in force when the next one is made."""
        return {**decision.instead, **self.not_kept(decision.base).instead}

    def tried(self, decision: Decision) -> Tried:
        """What the config of ``decision`` has of tries that were not kept, its own among them where it is one."""
        earlier = self.not_kept(decision.base)
        if decision.kind != "probe":
            return earlier
        return Tried({**earlier.changes, **decision.changes}, {**decision.instead, **earlier.instead})

    def not_kept(self, version: int) -> Tried:
        """What the config of ``version`` has of tries that were not kept, or are not measured yet."""
        changes: dict[str, Any] = {}
        instead: dict[str, Any] = {}
        made = self.made_for(version)
        while made is not None and made.outcome != "kept" and (made.kind == "probe" or made.outcome == "refused"):
            if made.kind == "probe":
                changes, instead = {**made.changes, **changes}, {**instead, **made.instead}
            made = self.made_for(made.base)
        return Tried(changes, instead)

    def take_back(self, now: float, version: int, config: ElasticConfig) -> Decision | None:
        """What has out of ``config`` what it still has of tries up to ``version`` that were not kept; None where it
        has nothing of them."""
        tried = self.not_kept(version)
        left = tried.left_in(config.values())
        if not left:
            return None
        why = f"{listed(list(left))} as before: version {config.version} still had what was being tried"
        instead = {key: tried.changes.get(key) for key in left}
        return self.add(time=now, kind="undo", reason=why, base=config.version, changes=left, instead=instead)

    def is_dropped(self, version: int) -> bool:
        """Whether the config of ``version`` was written for a try of which nobody wanted to know any more by then."""
        made = self.made_for(version)
        return made is not None and made.kind == "probe" and made.outcome == "undone" and self.open is None

    def made_for(self, version: int) -> Decision | None:
        """The one that the config of ``version`` was written for, if any."""
        return next((each for each in reversed(self._decisions.values()) if each.version == version), None)

    @property
    def last(self) -> Decision | None:
        """The newest of all."""
        return self._decisions[max(self._decisions)] if self._decisions else None

    @property
    def _left(self) -> Decision | None:
        """The newest one whose config was written and is not in force."""
        refused = [each for each in self._decisions.values() if each.version is not None and each.outcome == "refused"]
        return refused[-1] if refused else None

    @property
    def is_paused(self) -> bool:
        """Whether the last word on that was a pause."""
        words = [each.kind for each in self._decisions.values() if each.kind in ("pause", "resume")]
        return words[-1:] == ["pause"]

    def add(
        self,
        *,
        time: float,
        kind: Kind,
        reason: str,
        base: int,
        changes: Mapping[str, Any] | None = None,
        instead: Mapping[str, Any] | None = None,
        before: float | None = None,
        predicted: float | None = None,
        predicted_bytes: int | None = None,
    ) -> Decision:
        """A new decision.

        Where ranks have refused the newest version, it is made from that all the same, since nothing is written from
        an older one: what was refused is taken out of it.
        """
        changes, instead = changes or {}, instead or {}
        left = self._left
        if left is not None and left.version is not None and base < left.version and changes and kind != "advise":
            base, changes, instead = left.version, {**left.instead, **changes}, {**left.instead, **instead}
        made = Decision(
            number=self._next,
            time=time,
            kind=kind,
            reason=reason,
            base=base,
            changes=changes,
            instead=instead,
            before=before,
            predicted=predicted,
            predicted_bytes=predicted_bytes,
        )
        self._decisions[made.number] = made
        self._next += 1
        return made

    def written(self, number: int, version: int) -> Decision | None:
        """A config was written for a decision; None where there is no such decision."""
        return self._change(number, version=version)

    def close(self, number: int, outcome: Outcome, measured: float | None = None, reason: str = "") -> Decision | None:
        """It is known what comes of a decision; a reason is added to the one that it was made for."""
        found = self._decisions.get(number)
        if found is None:
            return None
        told = f"{found.reason}; {reason}" if reason else found.reason
        more = {} if measured is None else {"measured": measured}
        return self._change(number, outcome=outcome, reason=told, **more)

    def _change(self, number: int, **changes: Any) -> Decision | None:
        if number not in self._decisions:
            return None
        self._decisions[number] = replace(self._decisions[number], **changes)
        return self._decisions[number]


def _is_open(decision: Decision) -> bool:
    return not decision.outcome and decision.kind in ("probe", "settle", "undo")


# --- where a tuner stands, for people --------------------------------------------------------------------------------

Stand = Literal["off", "waiting", "watching", "probing", "settled", "paused"]
"""Told to do nothing; without what it has to know; looking on, and advising; trying; done for now; stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningStanding(JsonRecord):
    """The state of a tuning, in a word and in a sentence."""

    stand: Stand
    sentence: str
    best_rate: float | None = None
    """Samples per second of all ranks, of the best config so far; None where none was measured."""
