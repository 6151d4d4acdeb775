"""`ckpt prune`: removes what a rule does not keep, and what dead saves have left; also beside a run that is alive."""

from __future__ import annotations

import argparse
from pathlib import Path

from elastic_ext.errors import CheckpointNotFound
from elastic_ext.fsdp.checkpoint.clearing import remove_or_warn
from elastic_ext.fsdp.checkpoint.removing import remove_unused_metas, retained, verdicts_on
from elastic_ext.fsdp.checkpoint.retain import Retention, Verdict
from elastic_ext.fsdp.checkpoint.visiting import Visit
from elastic_ext.wording import on_one_line, size_in_words

from .commands import DAMAGED, DONE
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
        if rule is not None:
            are_done.append(_retain(job, rule, terminal, is_dry=options.dry_run))
        are_done.append(_tidy(job, terminal, is_dry=options.dry_run))
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


def _retain(job: Path, rule: Retention, terminal: Terminal, *, is_dry: bool) -> bool:
    """Remove what the rule does not keep; whether the storage let that be done."""
    verdicts = verdicts_on(job, rule) if is_dry else retained(job, rule)
    for verdict in verdicts:
        _tell(verdict, terminal, is_dry=is_dry)
    gone = [bytes_of(verdict.found.commit) for verdict in verdicts if not verdict.stays]
    terminal.say(f"  {len(gone)} of {len(verdicts)} {_removed(is_dry)}, {size_in_words(sum(gone))}")
    return not any(verdict.has_failed for verdict in verdicts)


def _tell(verdict: Verdict, terminal: Terminal, *, is_dry: bool) -> None:
    found = verdict.found
    done = "stays" if verdict.stays else _removed(is_dry)
    num_bytes = bytes_of(found.commit)
    record = {"path": str(found.path), "done": done, "why": verdict.why, "num_bytes": num_bytes}
    size = "" if verdict.stays else f", {size_in_words(num_bytes)}"
    terminal.tell(record, on_one_line(f"  {found.name} {done}{size}: {verdict.why}"))


def _tidy(job: Path, terminal: Terminal, *, is_dry: bool) -> bool:
    """Remove what dead saves have left; whether the storage let that be done."""
    visit = Visit(job)
    metas: list[str] = []
    with visit.alone() as why_not:  # shortly: what takes long is removed when runs may begin again
        is_alone = why_not is None
        if is_alone and not is_dry:
            visit.put_garbage_aside()
            metas = remove_unused_metas(job)
        garbage = visit.garbage(is_alone=is_alone)
        left = visit.unfinished() - set(garbage)
    if not garbage and not metas and not left:
        terminal.say("  no garbage")
    is_done = True
    for path in garbage:
        is_removed = is_dry or remove_or_warn(path)
        is_done &= is_removed
        done = _removed(is_dry) if is_removed else "stays"
        words = f"  {path.relative_to(job)} {done}: left by a save or a removal that died"
        terminal.tell({"path": str(path), "done": done, "why": "garbage"}, words)
    for name in metas:
        terminal.tell(
            {"path": str(job / name), "done": "removed", "why": "unused"}, f"  {name} removed: of no checkpoint"
        )
    for path in sorted(left):
        why = why_not or "something was written there within the last hour"
        terminal.tell({"path": str(path), "done": "stays", "why": why}, on_one_line(f"  {path.name} stays: {why}"))
    return is_done


def _removed(is_dry: bool) -> str:
    return "would be removed" if is_dry else "removed"
