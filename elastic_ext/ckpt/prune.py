"""`ckpt prune`: removes what a rule does not keep, and what dead saves have left; also beside a run that is alive."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from elastic_ext.errors import CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.cleanup import (
    Visit,
    remove_or_warn,
    remove_unused_metas,
    retained,
    unused_metas,
    verdicts_on,
)
from elastic_ext.fsdp.checkpoint.folder.listing import Listing, Retention, Verdict
from elastic_ext.records.text import on_one_line, size_in_words

from .commands import DAMAGED, DONE, in_words
from .places import place_of
from .summary import bytes_of
from .terminal import Terminal

__all__ = ["run"]


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    place = place_of(options.path)
    if place.is_checkpoint:
        raise CheckpointNotFound(f"{place.path} is one checkpoint; give its job's folder, {place.path.parent}")
    rule = _rule(options)
    are_done = []
    for job in place.jobs:
        terminal.say(str(job))
        gone: set[str] = set()
        if rule is not None:
            verdicts = _retain(job, rule, terminal, is_dry=options.dry_run)
            are_done.append(not any(verdict.has_failed for verdict in verdicts))
            gone = {verdict.found.name for verdict in verdicts if not verdict.stays}
        are_done.append(_look(job, gone, terminal) if options.dry_run else _tidy(job, terminal))
    return DONE if all(are_done) else DAMAGED


def _rule(options: argparse.Namespace) -> Retention | None:
    """What is to be kept; None where all checkpoints are."""
    if options.keep_last is None and options.keep_every is None and not options.abandoned:
        return None
    only_the_newest = options.keep_every is not None and options.keep_last is None
    return Retention(
        keep_last=1 if only_the_newest else options.keep_last,
        keep_every=options.keep_every,
        keep_abandoned=not options.abandoned,
    )


def _retain(job: Path, rule: Retention, terminal: Terminal, *, is_dry: bool) -> list[Verdict]:
    """Remove what the rule does not keep; what became of each checkpoint."""
    verdicts = verdicts_on(job, rule, now_ns=time.time_ns()) if is_dry else retained(job, rule)
    for verdict in verdicts:
        _tell(verdict, terminal, is_dry=is_dry)
    for name, error in Listing.read(job).unreadable.items():
        record = {"path": str(job / name), "done": "stays", "why": in_words(error)}
        terminal.tell(record, f"  {name} stays, and is not counted: {in_words(error)}")
    gone = [bytes_of(verdict.found.commit) for verdict in verdicts if not verdict.stays]
    terminal.say(f"  {len(gone)} of {len(verdicts)} {_removed(is_dry)}, {size_in_words(sum(gone))}")
    return verdicts


def _tell(verdict: Verdict, terminal: Terminal, *, is_dry: bool) -> None:
    found = verdict.found
    done = "stays" if verdict.stays else _removed(is_dry)
    num_bytes = bytes_of(found.commit)
    record = {"path": str(found.path), "done": done, "why": verdict.why, "num_bytes": num_bytes}
    size = "" if verdict.stays else f", {size_in_words(num_bytes)}"
    terminal.tell(record, on_one_line(f"  {found.name} {done}{size}: {verdict.why}"))


def _tidy(job: Path, terminal: Terminal) -> bool:
    """Remove what dead saves have left; whether the storage let that be done."""
    visit = Visit(job)
    metas: list[str] = []
    with visit.alone() as why_not:  # shortly: what takes long is removed when runs may begin again
        if why_not is None:
            visit.put_garbage_aside()
            metas = remove_unused_metas(job)
        garbage = visit.garbage(is_alone=why_not is None)
        left = visit.unfinished() - set(garbage)
    are_removed = {path: remove_or_warn(path) for path in garbage}
    _tell_of_garbage(job, are_removed, metas, terminal, is_dry=False)
    _tell_of_others(left, why_not, terminal)
    return all(are_removed.values())


def _look(job: Path, gone: Collection[str], terminal: Terminal) -> bool:
    """Tell what ``_tidy`` would remove once the checkpoints that are ``gone`` are so; nothing is written."""
    visit = Visit(job, only_looking=True)
    with visit.alone() as why_not:
        garbage = [path for path in visit.garbage(is_alone=why_not is None) if path.parent.name not in gone]
        left = visit.unfinished() - set(garbage)
        dead = {path.name for path in visit.unfinished()} & {path.name for path in garbage}
        metas = unused_metas(job, without={*gone, *dead}) if why_not is None else []
    _tell_of_garbage(job, dict.fromkeys(garbage, True), metas, terminal, is_dry=True)
    _tell_of_others(left, why_not, terminal)
    return True


def _tell_of_garbage(
    job: Path, are_removed: Mapping[Path, bool], metas: Sequence[str], terminal: Terminal, *, is_dry: bool
) -> None:
    for path, is_removed in are_removed.items():
        done = _removed(is_dry) if is_removed else "stays"
        words = f"  {path.relative_to(job)} {done}: left by a save or a removal that died"
        terminal.tell({"path": str(path), "done": done, "why": "garbage"}, words)
    for name in metas:
        record = {"path": str(job / name), "done": _removed(is_dry), "why": "unused"}
        terminal.tell(record, f"  {name} {_removed(is_dry)}: of no checkpoint")
    if not are_removed and not metas:
        terminal.say("  no garbage")


def _tell_of_others(left: Collection[Path], why_not: str | None, terminal: Terminal) -> None:
    """What was never committed, and stays for now."""
    for path in sorted(left):
        why = why_not or "something was written there within the last hour"
        terminal.tell({"path": str(path), "done": "stays", "why": why}, on_one_line(f"  {path.name} stays: {why}"))


def _removed(is_dry: bool) -> str:
    return "would be removed" if is_dry else "removed"
