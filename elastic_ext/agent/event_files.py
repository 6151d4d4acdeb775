"""EventFiles: the events that workers and the agent have added to a run directory since the last look, in bounded
memory; and newest_event: the last event of a kind in one file.

A line without an end is still being written, and is left for the next look; a line that cannot be parsed is skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ENXIO
from pathlib import Path
from typing import IO

from elastic_ext.records.agent import EVENTS_FILE
from elastic_ext.records.files import open_regular
from elastic_ext.records.metrics import JobEvent

__all__ = ["EventFiles", "NewEvents", "event_files_in", "newest_event"]

_FILE = re.compile(r"events-(\d{1,9}|agent)\.jsonl")
_MOST_FILES = 4096
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class NewEvents:
    """The events that one look at a run directory's event files has found."""

    events: tuple[JobEvent, ...] = ()
    """The new events, in the order of their times."""
    num_dropped: int = 0
    """How many new lines were skipped because there were too many."""


@dataclass(kw_only=True, slots=True)
class _Place:
    """How far one event file was read, and which file that was."""

    inode: int
    offset: int


class EventFiles:
    """A reader of new events in one run directory's event files; each look goes on where the last one ended.

    Of a file only the last ``most_bytes`` that are new are read. With ``of_agent=False`` the agent's own file is left
    out.
    """

    def __init__(self, run_dir: Path, *, most_bytes: int, of_agent: bool = True) -> None:
        self._run_dir = run_dir
        self._most_bytes = most_bytes
        self._of_agent = of_agent
        self._places: dict[str, _Place] = {}

    def skip(self) -> None:
        """Count the events that are in the files now as read."""
        for name in event_files_in(self._run_dir, of_agent=self._of_agent):
            try:
                status = os.stat(self._run_dir / name)
            except OSError:
                continue
            self._places[name] = _Place(inode=status.st_ino, offset=status.st_size)

    def look(self) -> NewEvents:
        """The events written since the last look; none of a file that cannot be read."""
        found: list[JobEvent] = []
        num_dropped = 0
        for name in event_files_in(self._run_dir, of_agent=self._of_agent):
            lines, num_passed = self._new_lines(name)
            found += [event for line in lines if (event := _event_in(line)) is not None]
            num_dropped += num_passed
        return NewEvents(events=tuple(sorted(found, key=lambda each: each.time)), num_dropped=num_dropped)

    def _new_lines(self, name: str) -> tuple[list[bytes], int]:
        """The whole lines that are new in one file, and how many new lines were skipped."""
        try:
            with open_regular(self._run_dir / name) as file:
                status = os.fstat(file.fileno())
                place = self._places.get(name)
                if place is None or place.inode != status.st_ino or place.offset > status.st_size:
                    place = self._places[name] = _Place(inode=status.st_ino, offset=0)
                if place.offset == status.st_size:
                    return [], 0
                file.seek(place.offset)
                begin = max(place.offset, status.st_size - self._most_bytes)
                num_passed = _num_lines(file, begin - place.offset)
                data = file.read(self._most_bytes)
        except OSError:
            return [], 0
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        is_cut = begin > place.offset and lines  # the first of them, as a rule
        place.offset = begin + len(whole)
        return (lines[1:], num_passed + 1) if is_cut else (lines, num_passed)


def event_files_in(run_dir: Path, *, of_agent: bool) -> list[str]:
    """The names of the event files in a run directory; with ``of_agent=False`` without the agent's own."""
    try:
        names = sorted(name for name in os.listdir(run_dir) if _FILE.fullmatch(name))
    except OSError:
        return []
    return [name for name in names if of_agent or name != EVENTS_FILE][:_MOST_FILES]


def newest_event(file: Path, kinds: Sequence[str], *, most_bytes: int) -> JobEvent | None:
    """The last event of these kinds in an event file; None where there is none, or the file cannot be read.

    It is looked for from the end on, piece by piece, within the last ``most_bytes``.
    """
    words = [each.encode() for each in kinds]
    try:
        with open_regular(file) as events:
            end = events.seek(0, os.SEEK_END)
            least, rest = max(end - most_bytes, 0), b""
            while end > least:
                begin = max(end - _PIECE_BYTES, least)
                events.seek(begin)
                first, *lines = (events.read(end - begin) + rest).split(b"\n")
                if begin == 0:
                    lines = [first, *lines]
                rest = first if len(first) <= _PIECE_BYTES else b""  # its beginning is in the piece before
                for line in reversed(lines):
                    event = _event_in(line) if any(word in line for word in words) else None
                    if event is not None and event.kind in kinds:
                        return event
                end = begin
    except OSError:
        pass
    return None


def _num_lines(file: IO[bytes], num_bytes: int) -> int:
    """How many lines end in the next ``num_bytes`` of a file, which are skipped; a sparse file's holes are not read."""
    end = file.tell() + num_bytes
    found = 0
    while file.tell() < end:
        try:
            begin = file.seek(file.tell(), os.SEEK_DATA)
        except OSError as error:
            if error.errno != ENXIO:
                raise
            break  # all the rest is a hole
        piece = file.read(min(max(end - begin, 0), _PIECE_BYTES))
        if not piece:
            break
        found += piece.count(b"\n")
    file.seek(end)
    return found


def _event_in(line: bytes) -> JobEvent | None:
    """The event of one line; None for a line that cannot be parsed."""
    try:
        return JobEvent.from_json(line.decode())
    except ValueError:
        return None
