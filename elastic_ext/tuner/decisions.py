"""The decisions of a tuner, in order, with their reasons and results, and where the tuner stands. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.json import JsonRecord

from .explain import listed

__all__ = ["PAUSED", "Book", "Decision", "Kind", "Outcome", "Stand", "Tried", "TuningStanding", "are_paused"]


# --- one thing that a tuner has decided, with why: what people read, and what is kept --------------------------------

Kind = Literal[
    "probe",  # a config is put in force, to be measured
    "settle",  # one that was measured is put in force, or stays
    "undo",  # a change is taken back: another config measures better, it cannot be measured, or a person asks for it
    "advise",  # what would be put in force, if that were allowed
    "pause",  # nothing is decided until a person resumes the tuner
    "resume",  # the tuner goes on after a pause
    "reopen",  # the job or its pace has changed, and the search begins again
    "hold",  # nothing new is tried, or a key is not tuned, for the reason that is given
]
Outcome = Literal["", "kept", "undone", "refused"]


PAUSED = "the tuner is paused, until `elastic-ext tuning resume`"
"""The sentence about where a tuner stands that is paused."""
_TAKEN_BACK = "a person took it back"
"""The end of the reason of a decision that a person took back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(JsonRecord):
    """One decision of a tuner, with its reason and its result. Rates are samples per second of all ranks together."""

    number: int
    """Decisions of a job are counted from 1 on."""
    time: float
    kind: Kind
    reason: str
    """Why it was decided, as a sentence for a person."""
    base: int
    """The version of the config that the decision is about, and that ``changes`` are made to."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The values to set, by key; None leaves a key out of the config, so that its start-up value is in force. Empty
    where there is nothing to set. Where ``kind`` is "advise", no config is written with them."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """The previous values of the keys in ``changes``, which take them back; None for a key that was left out."""
    version: int | None = None
    """The version of the config that was written for the decision; None until one is, and where none is to be."""
    before: float | None = None
    """The rate of the best steps before, as of when it was decided."""
    predicted: float | None = None
    """The rate that was predicted for the decision."""
    measured: float | None = None
    """The rate that was measured under the decision; None until then."""
    predicted_bytes: int | None = None
    """The predicted peak of memory; None where memory has no limit, or nothing is known of it."""
    outcome: Outcome = ""
    """Whether the change was kept, undone or refused; empty as long as that is open."""

    @property
    def newest_version(self) -> int:
        """The version of the config that was written for the decision, and until then the one that it is about."""
        return self.base if self.version is None else self.version

    @property
    def is_taken_back(self) -> bool:
        """Whether a person took the decision back after its changes were kept."""
        return self.outcome == "undone" and self.reason.endswith(_TAKEN_BACK)

    def check_read(self) -> None:
        rates = (self.before, self.predicted, self.measured, self.time)
        if not all(each is None or 0 <= each < math.inf for each in rates):
            raise ValueError(
                f"before, predicted, measured, time are {rates}; each must be a finite number of at least 0, "
                "the first three may be None"
            )


def are_paused(decisions: Iterable[Decision]) -> bool:
    """Whether the newest of all pauses and resumes among ``decisions``, the oldest first, is a pause."""
    words = [each.kind for each in decisions if each.kind in ("pause", "resume")]
    return words[-1:] == ["pause"]


# --- the decisions of a tuner, in the order in which they are made, and what has become of them ----------------------


class Tried(NamedTuple):
    """What one probe or several have set, by key, and what was set before the first of them."""

    changes: Mapping[str, Any]
    instead: Mapping[str, Any]

    def left_in(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The previous values to set, by key, for those tried values that ``values`` still have."""
        return {key: old for key, old in self.instead.items() if values.get(key) == self.changes.get(key)}


class Book:
    """All decisions of a job, those from before a restart of the master among them."""

    def __init__(self, decisions: Sequence[Decision] = ()) -> None:
        self._decisions = {each.number: each for each in sorted(decisions, key=lambda each: each.number)}
        self._next = max(self._decisions, default=0) + 1

    @property
    def open(self) -> Decision | None:
        """The newest decision with changes whose outcome is not known yet; None where there is none."""
        waiting = [each for each in self._decisions.values() if each.changes and _is_open(each)]
        return waiting[-1] if waiting else None

    @property
    def last_kept(self) -> Decision | None:
        """The newest decision whose changes were kept, undos left out: taking one back would bring what was worse."""
        kept = [each for each in self._decisions.values() if each.changes and each.outcome == "kept"]
        return next((each for each in reversed(kept) if each.kind != "undo"), None)

    def way_back(self, decision: Decision) -> dict[str, Any]:
        """The values, by key, that undo ``decision``, and with it the probes before it that were not kept.

        One probe follows another: what was found slow may be in force when the next decision is made.
        """
        return {**decision.instead, **self.not_kept(decision.base).instead}

    def tried(self, decision: Decision) -> Tried:
        """The changes of probes in the config of ``decision`` that were not kept, with its own if it is a probe."""
        earlier = self.not_kept(decision.base)
        if decision.kind != "probe":
            return earlier
        return Tried({**earlier.changes, **decision.changes}, {**decision.instead, **earlier.instead})

    def not_kept(self, version: int) -> Tried:
        """The changes of probes that the config of ``version`` still has: of those not measured yet, found to be slower
        or refused."""
        changes: dict[str, Any] = {}
        instead: dict[str, Any] = {}
        made = self.made_for(version)
        while made is not None and made.outcome != "kept" and (made.kind == "probe" or made.outcome == "refused"):
            if made.kind == "probe":
                changes, instead = {**made.changes, **changes}, {**instead, **made.instead}
            made = self.made_for(made.base)
        return Tried(changes, instead)

    def take_back(self, now: float, version: int, config: ElasticConfig) -> Decision | None:
        """Add a decision that removes from ``config`` what is left of probes up to ``version`` that were not kept.

        None where nothing is left of any.
        """
        tried = self.not_kept(version)
        left = tried.left_in(config.values())
        if not left:
            return None
        why = f"{listed(list(left))} as before: version {config.version} still had what was being tried"
        instead = {key: tried.changes.get(key) for key in left}
        return self.add(time=now, kind="undo", reason=why, base=config.version, changes=left, instead=instead)

    def is_of_abandoned_probe(self, version: int) -> bool:
        """Whether the config of ``version`` comes too late: its probe was given up before the config was written.

        False while another decision is open, which replaces that config.
        """
        made = self.made_for(version)
        return made is not None and made.kind == "probe" and made.outcome == "undone" and self.open is None

    def made_for(self, version: int) -> Decision | None:
        """The decision that the config of ``version`` was written for, if any."""
        return next((each for each in reversed(self._decisions.values()) if each.version == version), None)

    @property
    def last(self) -> Decision | None:
        """The newest decision of all, if any."""
        return self._decisions[max(self._decisions)] if self._decisions else None

    @property
    def _last_refused(self) -> Decision | None:
        """The newest decision whose config was written and was refused by ranks, if any."""
        refused = [each for each in self._decisions.values() if each.version is not None and each.outcome == "refused"]
        return refused[-1] if refused else None

    @property
    def has_search(self) -> bool:
        """Whether any decision came from a search: not all only pause the tuner, or say what is not tuned or tried."""
        return any(each.kind not in ("hold", "pause", "resume") for each in self._decisions.values())

    @property
    def is_paused(self) -> bool:
        """Whether the newest of all pauses and resumes is a pause."""
        return are_paused(self._decisions.values())

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
        """Add a new decision and give it.

        Where ranks have refused the newest version, the decision is based on that version all the same, since no config
        is made from an older one; its changes take out what was refused.
        """
        changes, instead = changes or {}, instead or {}
        left = self._last_refused
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
        """Note the version that was written for a decision; None where no decision has ``number``."""
        return self._change(number, version=version)

    def close(self, number: int, outcome: Outcome, measured: float | None = None, reason: str = "") -> Decision | None:
        """Note the outcome of a decision, and add ``reason`` to its own; None where no decision has ``number``."""
        found = self._decisions.get(number)
        if found is None:
            return None
        told = f"{found.reason}; {reason}" if reason else found.reason
        more = {} if measured is None else {"measured": measured}
        return self._change(number, outcome=outcome, reason=told, **more)

    def close_taken_back(self, number: int) -> Decision | None:
        """Note that a person took a decision back, also for a master that is started again; None without ``number``."""
        return self.close(number, "undone", reason=_TAKEN_BACK)

    def _change(self, number: int, **changes: Any) -> Decision | None:
        if number not in self._decisions:
            return None
        self._decisions[number] = replace(self._decisions[number], **changes)
        return self._decisions[number]


def _is_open(decision: Decision) -> bool:
    return not decision.outcome and decision.kind in ("probe", "settle", "undo")


# --- where a tuner stands, for people --------------------------------------------------------------------------------

Stand = Literal["off", "waiting", "watching", "probing", "settled", "paused"]
"""What a tuner does: "off", nothing, as it was told; "waiting", it lacks facts of the job; "watching", it only advises;
"probing", it tries points; "settled", it is done for now; "paused", a person has stopped it, or a config has that the
tuner did not write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningStanding(JsonRecord):
    """The state of a job's tuner, in a word and in a sentence, for people."""

    stand: Stand
    sentence: str
    best_rate: float | None = None
    """Samples per second of all ranks, of the best config so far; None where none was measured."""
