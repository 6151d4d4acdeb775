"""The control word, in which a rank says what it has to say at an agreement, and the decisions that all ranks draw from
the words of all. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal

from elastic_ext.records.json import shown

__all__ = [
    "REFUSES_SINGLE_SAMPLE",
    "ControlWord",
    "GatheredWords",
    "IntervalEstimator",
    "Lag",
    "Purpose",
    "RankReport",
    "RoundDecision",
    "RoundPlace",
    "choose",
    "start_differences",
]


# --- what one rank has to say at an agreement, and the pulse: one integer that says whether anyone has ---------------
# Most agreements have nothing to say, so they must cost next to nothing: each rank sends a *pulse*, a hash of what
# should be the same everywhere, and the pulses are summed. A sum that is not the number of ranks times a rank's own
# pulse means that somebody differs or has news: then the *words* themselves are exchanged. They are too where a rank
# has news itself, since the pulses of ranks that all have news may be alike; otherwise they are not.

REFUSES_SINGLE_SAMPLE = "a layer refuses a single sample"
"""How ``ControlWord.failed`` begins where memory did not run out, but a layer (such as BatchNorm in training) cannot
take a micro-batch of one sample."""

_PULSE_BYTES = 6  # 2**15 ranks' pulses still add up to a 64-bit integer
_MOST_TEXT = 500
_DIGITS_SHOWN = 12  # of a config's digest


class Purpose(IntEnum):
    """Why ranks exchange pulses; ranks with unlike purposes have lost step with each other."""

    ROUTINE = 1
    """A regular agreement, every so many boundaries; read one boundary later."""
    APPLY = 2
    """An exchange right before a scheduled config is applied."""
    END_EPOCH = 3
    """An exchange at the end of an epoch."""
    FINISH = 4
    """An exchange at the end of training."""
    RETRY = 5
    """After a step that was rolled back, and that the ranks take again together; the model was not called in it."""
    RETRY_CALLED = 6
    """After a step that was rolled back once the model had been called, and that the ranks take again together."""
    RETRY_AWAITED = 7
    """After a step that was rolled back between a forward pass and the backward pass that shares gradients, for which
    other ranks may be waiting."""
    REWIND = 8
    """Before training goes back to a checkpoint."""
    SHARE = 9
    """Within a step that is guarded against running out of memory, before its gradients are shared."""
    RETRY_SMALLER = 10
    """Before a step for which memory did not suffice is taken again in smaller micro-batches."""
    NOISE = 11
    """After a step in which ranks have measured the noise of gradients, to compare what they measured."""
    MEMBERS = 12
    """After a step at which all ranks have learned of a membership plan, to decide on it."""

    def __str__(self) -> str:
        return _PURPOSES[self.value]


_PURPOSES = {
    1: "between two steps",
    2: "applying a scheduled config",
    3: "ending an epoch",
    4: "ending training",
    5: "going on after a step that failed",
    6: "going on after a step that failed after the model was called",
    7: "going on after a step that failed before the backward pass",
    8: "going back to a checkpoint",
    9: "sharing the gradients of a step",
    10: "taking a step again that ran out of memory",
    11: "measuring the noise of gradients",
    12: "deciding on other members",
}

# What should be the same on all ranks, and how to name it to a person.
_SAME = {
    "purpose": "what they do",
    "boundary": "boundaries",
    "step": "steps",
    "backwards": "backward passes",
    "schedules": "steps of schedules",
    "ahead": "batches taken ahead of their step",
    "exchanges": "collectives of the model",
    "lost": "micro-batches of a step that failed",
    "in_force": "the config in force",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlWord:
    """What one rank tells the others at an agreement: its counts, its config, its requests and its news.

    Sent as JSON by the names of the fields.
    """

    # What should be the same on all ranks: the counts, and the config in force.
    purpose: Purpose
    boundary: int
    """How many boundaries this rank has passed."""
    step: int
    """How many steps this rank has taken."""
    backwards: int
    """How many backward passes the caller has counted."""
    schedules: int = 0
    """How often the caller's schedules have stepped."""
    ahead: int = 0
    """How many batches the caller has taken from its loader that no step has trained on yet; compared between steps."""
    exchanges: int = 0
    """How many collectives of the model a failed step had begun, before ranks take it again; else 0."""
    lost: int = 0
    """How many micro-batches a failed step took that do not come again, before ranks take it again; else 0."""
    in_force: str
    """The digest of the config in force."""
    # What this rank has and would have.
    held_version: int
    """The version this rank could put in force; the newest one agreed on where it has nothing new."""
    wanted_interval: int
    """How many boundaries this rank would have between two agreements."""
    members: int = 0
    """The version of the newest membership plan that this rank holds; 0 where it holds none."""
    # What this rank has to ask or to tell: where one of these is true, all ranks exchange their words.
    fresh: bool = False
    """Whether this rank holds a config, or a membership plan, that it has not told the others of."""
    proposing: bool = False
    """Whether this rank proposes a revision, on which a round is to decide."""
    asks_for_lag: bool = False
    """Whether this rank asks which ranks lack a config, to warn of them."""
    stop: bool = False
    """Whether the script has asked on this rank to end its loop."""
    save: bool = False
    """Whether this rank asks for a checkpoint."""
    leave: bool = False
    """Whether this rank's process was told to end, as by SIGTERM."""
    copy: bool = False
    """Whether this rank asks to copy training state in memory, so that it can be saved after a SIGTERM."""
    pacing: bool = False
    """Whether this rank's wanted interval has changed, by enough to tell, since it last told it."""
    refusal: str = ""
    """Why this rank holds no newer config, where a file was refused."""
    # What came of this rank's step, where ranks compare that before they go on (Purpose.SHARE, Purpose.NOISE).
    failed: str = ""
    """How memory ran out in this rank's step, or that a layer refuses a single sample; empty where neither."""
    brings: str = ""
    """The payload that all ranks compare, by ``purpose``. SHARE: which parameters have a gradient on this rank, as a 1
    or 0 each. NOISE: what this rank has measured of the noise of gradients. Where ranks differ, all exchange words."""

    @property
    def progress(self) -> str:
        """How far this rank has come, in words."""
        passes = f", {self.backwards} backward passes" if self.backwards else ""
        schedules = f", {self.schedules} steps of schedules" if self.schedules else ""
        ahead = f", {self.ahead} batches taken ahead" if self.ahead else ""
        exchanges = f", {self.exchanges} collectives of the model" if self.exchanges else ""
        lost = f", {self.lost} micro-batches of a step that failed" if self.lost else ""
        return f"{self.step} steps, {self.boundary} boundaries{passes}{schedules}{ahead}{exchanges}{lost}"

    @property
    def has_news(self) -> bool:
        """Whether the other ranks should read this word: this rank has something to ask or to tell, or has failed."""
        asks = self.stop or self.save or self.leave or self.copy
        return asks or self.fresh or self.proposing or self.asks_for_lag or self.pacing or bool(self.failed)

    @property
    def pulse(self) -> int:
        """The number that ranks sum up: the same on all ranks that are at the same place and have nothing to say.

        A hash of what should be the same on all ranks, of whether this rank has news, and of what it ``brings``.
        """
        said = [*(str(getattr(self, name)) for name in _SAME), str(self.has_news), self.brings]
        digest = hashlib.blake2b(" ".join(said).encode(), digest_size=_PULSE_BYTES).digest()
        return int.from_bytes(digest, "big")

    def to_bytes(self) -> bytes:
        """This control word as it is sent to the other ranks."""
        record = asdict(self) | {"refusal": self.refusal[:_MOST_TEXT], "failed": self.failed[:_MOST_TEXT]}
        record["asking"] = record.pop("asks_for_lag")  # its name in what ranks exchange
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ControlWord:
        record = json.loads(data)
        record["asks_for_lag"] = record.pop("asking")
        return cls(**record | {"purpose": Purpose(record["purpose"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredWords:
    """The control words of all ranks, and what follows from them; the same on every rank.

    ``fresh``, ``proposing``, ``asks_for_lag``, ``stop``, ``save``, ``leave`` and ``copy`` are true where some rank's
    word has them true.
    """

    words: tuple[ControlWord, ...]
    """The control words of all ranks, by rank."""

    @property
    def differing(self) -> tuple[str, ...]:
        """The counts and configs that should be the same on all ranks and are not, in words for a person."""
        return tuple(words for name, words in _SAME.items() if len({getattr(word, name) for word in self.words}) > 1)

    @property
    def account(self) -> str:
        """What each rank is doing and how far it has come, for a person; with its config where ranks differ in that."""
        is_same_config = len({word.in_force for word in self.words}) == 1
        configs = ["" if is_same_config else f", config {word.in_force[:_DIGITS_SHOWN]}" for word in self.words]
        return "; ".join(
            f"rank {rank}: {word.progress}{config} ({word.purpose})"
            for rank, (word, config) in enumerate(zip(self.words, configs, strict=True))
        )

    def laggards(self, names: Sequence[object]) -> list[str]:
        """The ranks, by name, that lack the config version which others hold, and why where that is known."""
        return [
            f"{name}, which has version {word.held_version}" + (f" ({word.refusal})" if word.refusal else "")
            for name, word in zip(names, self.words, strict=True)
            if word.held_version < self.highest_held
        ]

    @property
    def failures(self) -> dict[int, str]:
        """How memory ran out in the step, or that a layer refuses a single sample, by rank; only ranks that failed."""
        return {rank: word.failed for rank, word in enumerate(self.words) if word.failed}

    @property
    def lowest_held(self) -> int:
        return min(word.held_version for word in self.words)

    @property
    def highest_held(self) -> int:
        return max(word.held_version for word in self.words)

    @property
    def lowest_members(self) -> int:
        """The version of the membership plan of the rank that is furthest behind; 0 where one holds none."""
        return min(word.members for word in self.words)

    @property
    def interval(self) -> int:
        """The largest of the wanted intervals: with it agreements cost no rank more than it would spend on them."""
        return max(word.wanted_interval for word in self.words)

    @property
    def fresh(self) -> bool:
        return any(word.fresh for word in self.words)

    @property
    def proposing(self) -> bool:
        return any(word.proposing for word in self.words)

    @property
    def asks_for_lag(self) -> bool:
        return any(word.asks_for_lag for word in self.words)

    @property
    def stop(self) -> bool:
        return any(word.stop for word in self.words)

    @property
    def save(self) -> bool:
        return any(word.save for word in self.words)

    @property
    def leave(self) -> bool:
        return any(word.leave for word in self.words)

    @property
    def copy(self) -> bool:
        return any(word.copy for word in self.words)


# --- decisions of an agreement, as pure functions: whose config comes next, and how often to ask ---------------------
# Words: a *round* is the exchange that follows a control word which says that there is something to decide. A
# *report* is what one rank brings to a round; a *decision* is what all ranks make of the reports.

_FEWEST_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlace:
    """The step and the boundary at which a rank joins a round; all ranks must be at the same."""

    boundary: int
    step: int

    def __str__(self) -> str:
        return f"{self.step} steps, {self.boundary} boundaries"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank tells the others in a round."""

    place: RoundPlace
    version: int | None = None
    """The version of the config file that this rank holds, where that is news."""
    digest: str = ""
    """The digest of that config file."""
    changes: Mapping[str, Any] | None = None
    """The changes of the revision that this rank proposes; None where it proposes none."""
    reason: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankReport:
        record = json.loads(data)
        return cls(**record | {"place": RoundPlace(**record["place"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundDecision:
    """What all ranks decide from the reports of one round."""

    kind: Literal["file", "revision", "nothing"]
    source: int = 0
    """The rank whose file, or whose proposal, is taken."""
    conflict: str = ""
    """Why the files that the ranks hold cannot be taken, where they contradict each other."""


def choose(reports: Sequence[RankReport]) -> RoundDecision:
    """What a round takes next: a file if every rank has one in its report, else a proposal, the lowest rank's.

    Of files with different versions the lowest version is taken; the ranks that hold a higher one take this one too,
    and theirs in a later round. Where files of the lowest version have different contents no file is taken: that is a
    conflict.
    """
    versions = [report.version for report in reports if report.version is not None]
    conflict = ""
    if len(versions) == len(reports):  # every rank has a file
        version = min(versions)
        digests: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            if report.version == version:
                digests.setdefault(report.digest, []).append(rank)
        if len(digests) == 1:
            return RoundDecision(kind="file", source=versions.index(version))
        groups = " and on ".join("ranks " + ", ".join(map(str, ranks)) for ranks in digests.values())
        conflict = f"version {version} has different contents on {groups}; put one content under a higher version"
    for rank, report in enumerate(reports):
        if report.changes is not None:
            return RoundDecision(kind="revision", source=rank, conflict=conflict)
    return RoundDecision(kind="nothing", conflict=conflict)


def start_differences(answers: Sequence[Mapping[str, Any]]) -> str:
    """The start-up values that are not the same on all ranks, and who has what; empty where all are."""
    differences = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        ranks_of: dict[str, list[str]] = {}  # by value
        for rank, answer in enumerate(answers):
            ranks_of.setdefault(shown(answer[name]) if name in answer else "nothing", []).append(str(rank))
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items())
            differences.append(f"{name} is {values}")
    return "; ".join(differences)


class IntervalEstimator:
    """Estimates the interval between two agreements, in boundaries, whose cost stays below a share of training time.

    ``share`` is that share, ``longest`` the largest interval, and ``window`` of how many steps the times are kept.
    ``pulse_seconds`` is what a pulse takes of the CPU, measured beforehand; how long an agreement keeps the training
    thread is noted while training runs.
    """

    def __init__(self, *, pulse_seconds: float, share: float = 0.005, longest: int = 10_000, window: int = 32) -> None:
        self._pulse_seconds = pulse_seconds
        self._share = share
        self._longest = longest
        self._step_seconds: deque[float] = deque(maxlen=window)
        self._agreement_seconds: deque[float] = deque(maxlen=window)
        self._idle_seconds: deque[float] = deque(maxlen=window)

    def note_step(self, seconds: float) -> None:
        """Take in how long one step lasted."""
        self._step_seconds.append(seconds)

    def note_agreement(self, seconds: float) -> None:
        """Take in how long one agreement kept the training thread."""
        self._agreement_seconds.append(seconds)

    def note_idle(self, seconds: float) -> None:
        """Take in how long a boundary without an agreement kept the training thread."""
        self._idle_seconds.append(seconds)

    def interval(self) -> int:
        """The smallest number of boundaries that keeps the share; 1 until enough steps were noted.

        One agreement's cost is spread over the boundaries of an interval, and each can afford ``share`` of a step. What
        a boundary takes without an agreement comes off that, up to half of it: a longer interval does not lessen that.
        """
        if len(self._step_seconds) < _FEWEST_STEPS:
            return 1
        cost = self._pulse_seconds + _lower_quartile(self._agreement_seconds)
        allowed = statistics.median(self._step_seconds) * self._share
        affordable = max(allowed - _lower_quartile(self._idle_seconds), allowed / 2)
        if affordable * self._longest <= cost:
            return self._longest
        return max(1, math.ceil(cost / affordable))


def _lower_quartile(seconds: Sequence[float]) -> float:
    """The lower quartile: what something takes when it waits for nobody; 0 where it was not seen."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


class Lag:
    """Decides when to warn of ranks that lack a config which others hold."""

    def __init__(self, *, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._lowest: int | None = None  # what the rank furthest behind holds; None while none is
        self._since = 0.0
        self._named = False

    def note(self, lowest_version: int, highest_version: int, now: float) -> None:
        """Take in which versions the ranks hold at ``now``. A rank that moves on gets its time anew."""
        lowest = lowest_version if highest_version > lowest_version else None
        if lowest != self._lowest:
            self._lowest, self._since, self._named = lowest, now, False

    def mark_named(self) -> None:
        """Note that the ranks that are behind now were named in a warning."""
        self._named = True

    def is_due(self, now: float) -> bool:
        """Whether some rank has been behind for too long and was not named in a warning for it."""
        return self._lowest is not None and not self._named and now - self._since > self._patience_seconds
