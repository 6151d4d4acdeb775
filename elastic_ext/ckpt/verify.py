"""`ckpt verify`: every byte of checkpoints read and checked; each damage is told with its file, blocks and tensors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic_ext.errors import CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.listing import Found, Listing
from elastic_ext.fsdp.checkpoint.loading.verify import Damage, damage_in
from elastic_ext.records.text import on_one_line, size_in_words

from .commands import DAMAGED, DONE, REFUSED, in_words, status_of
from .places import Place, place_of
from .summary import bytes_of
from .terminal import Terminal

__all__ = ["run"]


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    statuses = [_verify(path, terminal) for path in _checkpoints(place_of(options.path))]
    if not statuses:
        raise CheckpointNotFound(f"{options.path} holds no checkpoint that was completed")
    return DAMAGED if DAMAGED in statuses else max(statuses)


def _checkpoints(place: Place) -> Iterator[Path]:
    """Every checkpoint with a COMMIT, whatever that is worth."""
    if place.is_checkpoint:
        yield place.path
    for job in place.jobs:
        for listing in (Listing.read(job), Listing.read(job, aside=True)):
            yield from (found.path for found in listing.found)
            yield from (job / name for name in listing.unreadable)


def _verify(path: Path, terminal: Terminal) -> int:
    with Reading(path):
        try:
            found = Found.read(path)
            with terminal.bar(path.name, sum(shard.num_bytes for shard in found.commit.shards.values())) as advance:
                return _tell(found, advance, terminal)
        except CheckpointNotFound:
            terminal.tell({"path": str(path), "state": "removed"}, f"{path}: removed in the meantime")
            return DONE
        except (CheckpointError, OSError) as error:
            status = status_of(error)
            state = (
                "refused" if status == REFUSED else "damaged" if isinstance(error, CheckpointError) else "unreadable"
            )
            what = in_words(error)
            terminal.tell({"path": str(path), "state": state, "what": what}, f"{path}: {state}\n  {what}")
            return status


def _tell(found: Found, advance: Callable[[int], None], terminal: Terminal) -> int:
    commit = found.commit
    damages: list[Damage] = []
    for damage in damage_in(found, advance):
        if not damages:
            terminal.say(f"{found.path}: damaged")
        damages.append(damage)
        terminal.say(on_one_line(f"  {damage.file}: {damage.what}"))
    record = {
        "path": str(found.path),
        "state": "damaged" if damages else "whole",
        "step": commit.global_step,
        "num_bytes": bytes_of(commit),
        "damage": [_record(damage) for damage in damages],
    }
    if terminal.as_json or not damages:
        num_files = len(commit.metas) + len(commit.states) + len(commit.shards)
        terminal.tell(record, f"{found.path}: whole, {size_in_words(bytes_of(commit))} in {num_files} files")
    return DAMAGED if damages else DONE


def _record(damage: Damage) -> dict[str, object]:
    return {"file": damage.file, "what": damage.what, "blocks": damage.blocks, "tensors": damage.tensors}
