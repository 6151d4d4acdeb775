"""A RunRecord from the files of a run: one rank after another, so that the windows of few are held."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ext.profile.breakdown import RankView, merged
from elastic_ext.profile.ledger import (
    ENTRIES,
    Happened,
    Life,
    Slice,
    in_order,
    ledger_of_job,
    lives_of,
    slices_of,
    trainings_of,
)
from elastic_ext.profile.ledger import within as lives_within
from elastic_ext.records.files import read_at_most
from elastic_ext.records.metrics import JobEvent, StepWindow

from .bins import Bins
from .effects import in_step_seconds, periods_of, spread_of
from .happenings import happened_of, happenings_of, last_word, launches_of, within
from .judging import Judging
from .known import known_of, not_finite_of, speeds_of
from .lines import Broken, events_in, windows_in
from .places import RunPlaces
from .ranks import MOST_BINS, rank_record
from .record import RankRecord, RunRecord
from .speeds import Speeds

__all__ = ["gather"]

_MOST_EVENTS = 20_000
_MOST_EVENTS_OF_RANK = 500
_MOST_JSON_BYTES = 1 << 20


def gather(places: RunPlaces, training: int | None, advance: Callable[[int], None]) -> RunRecord:
    """The record of a training, the last one for None; ValueError where there is none."""
    gathering = _Gathering(places, advance)
    gathering.choose(training)
    for rank in places.profiles:
        gathering.take(rank)
    return gathering.record()


@dataclass(slots=True)
class _Chosen:
    """One training: which it is, and what is known of it before the ranks are read."""

    number: int
    num_trainings: int
    begin: float
    end: float
    last_life_begin: float
    last_word: float
    happened: Happened
    events: list[JobEvent]
    journals: list[list[JobEvent]]


@dataclass(slots=True)
class _Gathering:
    places: RunPlaces
    advance: Callable[[int], None]
    broken: Broken = field(default_factory=Broken)
    spent: Bins = field(default_factory=lambda: Bins(len(ENTRIES), MOST_BINS))
    ranks: list[RankRecord] = field(default_factory=list)
    judging: Judging = field(default_factory=Judging)
    witness: list[Slice] = field(default_factory=list)
    """The time of the first rank that there is, by which the job's steps and samples are counted."""
    witness_speeds: Speeds = field(default_factory=Speeds)
    num_restarts: int = 0
    num_failures: int = 0
    chosen: _Chosen | None = None
    _lives_of_first: list[Life] | None = None
    _num_shifted: int = 0

    def choose(self, training: int | None) -> None:
        """Find out which trainings there are, by the first rank, and settle on one."""
        first = next(iter(self.places.profiles))
        lives = self._lives(first)
        journals = [self._journal(path) for path in self.places.journals]
        launches = sorted(moment for journal in journals for moment in launches_of(journal))
        begins = trainings_of(lives, launches or None)
        if not begins:
            raise ValueError(f"{self.places.path} has no line of a profile that can be read ({self._broken_words()})")
        number = len(begins) if training is None else training
        if not 1 <= number <= len(begins):
            raise ValueError(f"training {number} is not in {self.places.path}; it has 1 to {len(begins)}")
        begin = begins[number - 1] if number > 1 else float("-inf")
        end = begins[number] if number < len(begins) else float("inf")
        own = lives_within(lives, begin, end)
        events = [event for path in self.places.events for event in self._events(path)]
        self.chosen = _Chosen(
            number=number,
            num_trainings=len(begins),
            begin=begin,
            end=end,
            last_life_begin=own[-1].begin if own else 0.0,
            last_word=last_word(journals, begin, end),
            happened=happened_of(events, journals, begin, end),
            events=events,
            journals=journals,
        )
        self._lives_of_first = lives

    def take(self, rank: int) -> None:
        """Read one rank."""
        assert self.chosen is not None
        lives = self._lives_of_first if self._lives_of_first is not None else self._lives(rank)
        is_first, self._lives_of_first = self._lives_of_first is not None, None
        lives = lives_within(lives, self.chosen.begin, self.chosen.end)
        if not lives:
            return
        is_in_last = lives[-1].end >= self.chosen.last_life_begin
        slices = slices_of(lives, self.chosen.happened, until=self.chosen.last_word if is_in_last else 0.0)
        speeds = self._speeds(rank)
        self.ranks.append(rank_record(rank, lives, slices, speeds, self._not_finite(rank)))
        self.judging.take(rank, [each.piece.window for each in slices if each.piece is not None])
        self._num_shifted += sum(each.shift_seconds > 0 for each in lives)
        for each in slices:
            self.spent.add(each.begin, each.end, [each.seconds.get(entry, 0.0) for entry in ENTRIES])
        if is_first:
            self.witness, self.witness_speeds = slices, speeds
            self.num_restarts = sum(each.is_whole for each in lives[1:])
            self.num_failures = len(self.chosen.happened.failures) or max(each.restart for each in lives)

    def record(self) -> RunRecord:
        """All of it."""
        chosen = self.chosen
        assert chosen is not None
        begin, end = min(each.begin for each in self.ranks), max(each.end for each in self.ranks)
        pieces = [(each.piece, each.piece.window, each.kept) for each in self.witness if each.piece is not None]
        steady = [each for _, each, _ in pieces if each.num_steps and in_step_seconds(each) > 0]
        told = [*chosen.events, *(event for journal in chosen.journals for event in journal)]
        return RunRecord(
            path=str(self.places.path),
            job=self._job(),
            number=chosen.number,
            num_trainings=chosen.num_trainings,
            begin=begin,
            end=end,
            ledger=ledger_of_job([each.ledger for each in self.ranks], [(each.begin, each.end) for each in self.ranks]),
            ranks=tuple(self.ranks),
            first_step=min((each.first_step for each, _, _ in pieces), default=0),
            last_step=pieces[-1][1].step if pieces else 0,
            num_steps_again=round(sum(each.num_steps * (1 - kept) for _, each, kept in pieces)),
            num_samples=round(sum(each.num_samples * kept for _, each, kept in pieces)),
            samples_per_second=spread_of([each.num_samples / in_step_seconds(each) for each in steady]),
            tokens_per_second=spread_of(map(self.witness_speeds.tokens_per_second, steady)),
            step_seconds=spread_of([in_step_seconds(each) / each.num_steps for each in steady]),
            num_restarts=self.num_restarts,
            num_failures=self.num_failures,
            spent=self.spent,
            periods=tuple(
                periods_of(self.witness, within(chosen.events, chosen.begin, chosen.end), self.witness_speeds)
            ),
            happenings=tuple(happenings_of(within(told, chosen.begin, chosen.end))),
            notes=tuple(self._notes()),
            remarks=tuple(self.judging.remarks(self._view)),
        )

    def _view(self, rank: int, windows: list[StepWindow]) -> RankView:
        for path in reversed(self.places.profiles[rank]):
            if (found := known_of(path.parent, rank, windows)) is not None:
                return found
        return RankView(host="?", window=merged(windows))

    def _speeds(self, rank: int) -> Speeds:
        for path in reversed(self.places.profiles[rank]):
            if (found := speeds_of(path.parent, rank)) is not None:
                return found
        return Speeds()

    def _not_finite(self, rank: int) -> tuple[int, int] | None:
        """As the rank's last process told; None for a training before the last."""
        assert self.chosen is not None
        if self.chosen.number < self.chosen.num_trainings:
            return None
        found = (not_finite_of(path.parent, rank) for path in reversed(self.places.profiles[rank]))
        return next((each for each in found if each is not None), None)

    def _lives(self, rank: int) -> list[Life]:
        paths = self.places.profiles[rank]
        return in_order(life for path in paths for life in lives_of(windows_in(path, rank, self.broken, self.advance)))

    def _events(self, path: Path) -> Sequence[JobEvent]:
        is_first = path == self.places.events[0]
        return deque(events_in(path, self.broken), maxlen=_MOST_EVENTS if is_first else _MOST_EVENTS_OF_RANK)

    def _journal(self, path: Path) -> list[JobEvent]:
        return list(deque(events_in(path, self.broken), maxlen=_MOST_EVENTS))

    def _job(self) -> str:
        """What the job is called; empty where nothing says so."""
        for folder in self.places.folders:
            for file in (folder / "agent.json", *sorted(folder.glob("metrics-*.json"))[:1]):
                try:
                    job = json.loads(read_at_most(file, _MOST_JSON_BYTES))["job"]
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue
                if isinstance(job, str) and job:
                    return job
        return ""

    def _broken_words(self) -> str:
        return f"{self.broken.num_lines} broken" + "".join(f"; {each}" for each in self.broken.files[:3])

    def _notes(self) -> list[str]:
        notes = [f"{each}: left out" for each in self.broken.files]
        if self.broken.num_lines:
            notes.append(f"{self.broken.num_lines} lines of its files are broken, or another version's: left out")
        if self._num_shifted:
            notes.append(f"a clock was put back before {self._num_shifted} starts of processes: they are shown later")
        return notes
