"""`ckpt ls`: the checkpoints of jobs, one a line, and what else lies among them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.fsdp.checkpoint.folder.cleanup import GARBAGE
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.folder.listing import Found, Listing, abandoned_for_nothing, is_set_aside
from elastic_ext.records.text import age_in_words, size_in_words

from .commands import DAMAGED, DONE, REFUSED, in_words, status_of
from .places import place_of
from .summary import age_of, bytes_of, layout_of
from .terminal import Terminal

__all__ = ["run"]

_HEADINGS = ("NAME", "STEP", "EPOCH", "SIZE", "LAYOUT", "RUNS", "AGE", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    record: dict[str, object]
    cells: tuple[str, ...]


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    place = place_of(options.path)
    now = time.time()
    if place.is_checkpoint:
        _tell([_row(Found.read(place.path), place.path.parent, now)], terminal)
        return DONE
    statuses = [DONE]
    for number, job in enumerate(place.jobs):
        if number:
            terminal.say("")
        terminal.say(str(job))
        listings = [Listing.read(job), Listing.read(job, aside=True)]
        counting = {one.name for one in abandoned_for_nothing(listings[0].found, listings[1].found)}
        rows = [_row(found, job, now, counts=found.name in counting) for listing in listings for found in listing.found]
        _tell(rows, terminal)
        for record, words in _others(job, listings):
            terminal.tell({"job": job.name, **record}, words)
        statuses += [status_of(error) for listing in listings for error in listing.unreadable.values()]
    return DAMAGED if DAMAGED in statuses else max(statuses)


def _row(found: Found, job: Path, now: float, *, counts: bool = False) -> _Row:
    """A checkpoint in words; ``counts`` says of one that was abandoned that this was for nothing."""
    commit, state = found.commit, "abandoned" if is_set_aside(found.name) else "committed"
    record: dict[str, object] = {
        "job": job.name,
        "name": found.name,
        "path": str(found.path),
        "state": state,
        "counts": counts or state == "committed",
        "step": commit.global_step,
        "epoch": commit.epoch,
        "num_bytes": bytes_of(commit),
        "num_ranks": commit.num_ranks,
        "sharding": commit.about.get("sharding"),
        "run": commit.run_id,
        "lineage": [{"run": one.id, "from_step": one.from_step} for one in commit.lineage],
        "saved_at": commit.saved_at,
        "age_seconds": round(age_of(commit, now)),
    }
    cells = (
        found.name,
        str(commit.global_step),
        str(commit.epoch),
        size_in_words(bytes_of(commit)),
        layout_of(commit),
        _runs_of(commit),
        age_in_words(age_of(commit, now)),
        f"{state} for a run that has saved nothing: it counts" if counts else "" if state == "committed" else state,
    )
    return _Row(record=record, cells=cells)


def _runs_of(commit: Commit) -> str:
    """The run that saved it, and where it went on from."""
    last = commit.lineage[-1]
    if len(commit.lineage) == 1:
        return last.id
    more = f", {len(commit.lineage)} runs" if len(commit.lineage) > 2 else ""
    return f"{last.id} (from {commit.lineage[-2].id} at step {last.from_step}{more})"


def _tell(rows: Sequence[_Row], terminal: Terminal) -> None:
    if not rows:
        terminal.say("  no checkpoints")
        return
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *(row.cells for row in rows), strict=True)]
    terminal.say(_aligned(_HEADINGS, widths))
    for row in rows:
        terminal.tell(row.record, _aligned(row.cells, widths))


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (1, 2, 3)
    return "  ".join(
        cell.rjust(width) if place in numbers else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _others(job: Path, listings: Sequence[Listing]) -> Iterator[tuple[dict[str, object], str]]:
    """What is no checkpoint that can be listed, each as a record and in words."""
    for listing in listings:
        for name, error in listing.unreadable.items():
            state = "newer" if status_of(error) == REFUSED else "unreadable"
            yield {"name": name, "state": state, "reason": in_words(error)}, f"{name}  {in_words(error)}"
    for listing in listings:
        for name in listing.unfinished:
            words = f"{name}  without COMMIT: being saved, or left by a save that died"
            yield {"name": name, "state": "unfinished"}, words
    for name in sorted(os.listdir(job)):
        if name.startswith(GARBAGE):
            yield {"name": name, "state": "garbage"}, f"{name}  being removed; `ckpt prune` removes what is left of it"
