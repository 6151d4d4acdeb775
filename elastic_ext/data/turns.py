"""Turns: the streams of a loop, one of each worker, how far each has come, and whose turn it is. Pure.

A sample is *asked* for, *handed* out, and at last *passed*: consumed. Each is counted stream by stream, and has whose
turn is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .copied import Copied
from .stream import START, Mark

__all__ = ["Slot", "StreamsPosition", "Turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsPosition:
    """How far each worker's stream is consumed, and who comes next."""

    num_passed: tuple[int, ...]
    marks: tuple[Mark, ...]
    """One of each stream, at or before what is passed."""
    num_workers: int
    """0: the one stream is this process's own."""
    turn: int = 0
    is_over: bool = False

    @classmethod
    def start(cls, num_workers: int) -> StreamsPosition:
        num_streams = max(num_workers, 1)
        return cls(num_passed=(0,) * num_streams, marks=(START,) * num_streams, num_workers=num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, but for what the dataset's own states hold."""
        return {
            "num_workers": self.num_workers,
            "streams": [
                {
                    "passed": passed,
                    "at": mark.num_samples,
                    "has_state": mark.state is not None,
                    "state": None if mark.state is None else mark.state.value(),
                }
                for passed, mark in zip(self.num_passed, self.marks, strict=True)
            ],
            "turn": self.turn,
            "is_over": self.is_over,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StreamsPosition:
        """What ``state_dict`` gave."""
        streams = state["streams"]
        return cls(
            num_passed=tuple(int(each["passed"]) for each in streams),
            marks=tuple(
                Mark(int(each["at"]), Copied.of(each["state"]) if each["has_state"] else None) for each in streams
            ),
            num_workers=int(state["num_workers"]),
            turn=int(state["turn"]),
            is_over=bool(state["is_over"]),
        )


@dataclass(slots=True, eq=False)
class Slot:
    """One worker's stream. All numbers count its samples."""

    number: int
    passed: int
    marks: deque[Mark]
    asked: int = 0
    handed: int = 0
    end: int | None = None
    """How many it has, once that is known."""
    is_found: bool = False
    """Its worker knows where to go on."""

    def __post_init__(self) -> None:
        self.asked = self.handed = self.passed

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.asked >= self.end

    def drop_marks(self) -> None:
        """All but the last one that can still be needed, and those behind it."""
        while len(self.marks) > 1 and self.marks[1].num_samples <= self.passed:
            self.marks.popleft()


class Turns:
    """All streams from a position on. Workers take turns, and one whose stream has ended is left out."""

    def __init__(self, position: StreamsPosition) -> None:
        self.num_workers = position.num_workers
        self.slots = [
            Slot(number, passed, deque([mark]))
            for number, (passed, mark) in enumerate(zip(position.num_passed, position.marks, strict=True))
        ]
        self.asked = self.handed = self._passed = position.turn
        self.is_over = False

    @property
    def position(self) -> StreamsPosition:
        """What is consumed."""
        return StreamsPosition(
            num_passed=tuple(slot.passed for slot in self.slots),
            marks=tuple(slot.marks[0] for slot in self.slots),
            num_workers=self.num_workers,
            turn=self._passed,
            is_over=self.is_over,
        )

    def next_slot(self, num_asked: Mapping[int, int] | None = None) -> Slot | None:
        """Who is to be asked, of those whose stream may have more.

        It is the one whose turn it is, or, where it is told how much each has to answer, the one with least of it.
        """
        in_turn = [self.slots[(self.asked + number) % len(self.slots)] for number in range(len(self.slots))]
        left = [slot for slot in in_turn if not slot.is_over]
        if not left:
            return None
        slot = left[0] if num_asked is None else min(left, key=lambda slot: num_asked.get(slot.number, 0))
        self.asked = (slot.number + 1) % len(self.slots)
        return slot

    @property
    def place(self) -> tuple[tuple[int, ...], int]:
        """How much of each stream is handed out, and whose turn is next; for ``commit``."""
        return tuple(slot.handed for slot in self.slots), self.handed

    def commit(self, place: tuple[tuple[int, ...], int] | None = None) -> None:
        """What was handed out is consumed, up to ``place`` or all of it."""
        handed, turn = place or self.place
        for slot, passed in zip(self.slots, handed, strict=True):
            slot.passed = passed
            slot.drop_marks()
        self._passed = turn

    def rollback(self) -> bool:
        """What was handed out and is not consumed comes again; whether that is something."""
        has_moved = any(slot.handed != slot.passed for slot in self.slots)
        if has_moved:
            self.is_over = False
            for slot in self.slots:
                slot.handed = slot.passed
            self.handed = self._passed
        return has_moved

    def take_back(self) -> None:
        """What was asked for and not handed out is asked for again."""
        for slot in self.slots:
            slot.asked = slot.handed
        self.asked = self.handed

    def hand_out_asked(self) -> None:
        """All that was asked for is handed out."""
        for slot in self.slots:
            slot.handed = slot.asked
        self.handed = self.asked
