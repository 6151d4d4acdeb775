"""`elastic-ext ckpt ls`, `show`, `verify` and `prune`: checkpoints listed, described, checked and removed, without
torch.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, FileKind, meta_file
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.cleanup import (
    GARBAGE,
    Visit,
    apply_retention,
    remove_or_warn,
    remove_unused_metas,
    unused_metas,
    verdicts_on,
)
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.folder.listing import (
    ListedCheckpoint,
    Listing,
    Retention,
    RetentionVerdict,
    abandoned_for_nothing,
    is_set_aside,
)
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES, JsonText, Long
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.loading.verify import Damage, damage_in
from elastic_ext.fsdp.layout import Box
from elastic_ext.records.json import shown
from elastic_ext.records.text import age_in_words, counted, on_one_line, size_in_words

from .ckpt import (
    DAMAGED,
    DONE,
    REFUSED,
    FolderContents,
    Terminal,
    age_of,
    bytes_of,
    in_words,
    layout_of,
    one_checkpoint,
    place_of,
    status_of,
)

__all__ = ["run_ls", "run_prune", "run_show", "run_verify"]


# --- the checkpoints of jobs, one a line, and what else lies among them ----------------------------------------------

_HEADINGS = ("NAME", "STEP", "EPOCHS DONE", "SIZE", "LAYOUT", "RUNS", "AGE", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    record: dict[str, object]
    cells: tuple[str, ...]


def run_ls(options: argparse.Namespace, terminal: Terminal) -> int:
    """List the checkpoints at a path; gives the exit status."""
    place = place_of(options.path)
    now = time.time()
    if place.is_checkpoint:
        _tell_rows([_row(ListedCheckpoint.read(place.path), place.path.parent, now)], terminal)
        return DONE
    statuses = [DONE]
    for number, job in enumerate(place.jobs):
        if number:
            terminal.say("")
        terminal.say(str(job))
        listings = [Listing.read(job), Listing.read(job, aside=True)]
        counting = {one.name for one in abandoned_for_nothing(listings[0].found, listings[1].found)}
        rows = [_row(found, job, now, counts=found.name in counting) for listing in listings for found in listing.found]
        _tell_rows(rows, terminal)
        for record, words in _others(job, listings):
            terminal.tell({"job": job.name, **record}, words)
        statuses += [status_of(error) for listing in listings for error in listing.unreadable.values()]
    return DAMAGED if DAMAGED in statuses else max(statuses)


def _row(found: ListedCheckpoint, job: Path, now: float, *, counts: bool = False) -> _Row:
    """A checkpoint as a record and in words; ``counts`` says that a run abandoned it and then saved nothing itself."""
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
    in_full = f"{state} for a run that has saved nothing: a resume may use it"
    cells = (
        found.name,
        str(commit.global_step),
        str(commit.epoch),
        size_in_words(bytes_of(commit)),
        layout_of(commit),
        _runs_of(commit),
        age_in_words(age_of(commit, now)),
        in_full if counts else "" if state == "committed" else state,
    )
    return _Row(record=record, cells=cells)


def _runs_of(commit: Commit) -> str:
    """The run that saved a checkpoint, and the run and step that it went on from, in words."""
    last = commit.lineage[-1]
    if len(commit.lineage) == 1:
        return last.id
    more = f", {len(commit.lineage)} runs" if len(commit.lineage) > 2 else ""
    return f"{last.id} (from {commit.lineage[-2].id} at step {last.from_step}{more})"


def _tell_rows(rows: Sequence[_Row], terminal: Terminal) -> None:
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
    """What lies in a job's folder beside checkpoints that can be listed, each as a record and in words."""
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


# --- what is in one checkpoint, tensor by tensor ---------------------------------------------------------------------

_MOST_BOXES = 4
_MOST_CHARACTERS = 100


def run_show(options: argparse.Namespace, terminal: Terminal) -> int:
    """Show what is in one checkpoint, tensor by tensor; gives the exit status."""
    path = one_checkpoint(place_of(options.path))
    with Reading(path):
        found = ListedCheckpoint.read(path)
        _tell_commit(found, terminal)
        _tell_state(found, terminal)
        for kind in KINDS:
            _tell_tensors(found, kind, terminal, with_boxes=options.boxes)
    return DONE


def _tell_commit(found: ListedCheckpoint, terminal: Terminal) -> None:
    commit = found.commit
    age = age_in_words(age_of(commit, time.time()))
    record: dict[str, object] = {
        "path": str(found.path),
        "generation": commit.generation,
        "step": commit.global_step,
        "epoch": commit.epoch,
        "num_ranks": commit.num_ranks,
        "num_bytes": bytes_of(commit),
        "saved_at": commit.saved_at,
        "versions": dict(commit.versions),
        "about": dict(commit.about),
        "lineage": [
            {"run": one.id, "from_step": one.from_step, "from_generation": one.from_generation}
            for one in commit.lineage
        ],
    }
    versions = ", ".join(f"{name} {version}" for name, version in commit.versions.items())
    runs = ", ".join(
        one.id + (f" from step {one.from_step}" if place else "") for place, one in enumerate(commit.lineage)
    )
    about = ", ".join(f"{name} {shown(value)}" for name, value in commit.about.items())
    lines = (
        str(found.path),
        f"  step {commit.global_step}, {counted(commit.epoch, 'epoch')} done, {size_in_words(bytes_of(commit))}, "
        f"{layout_of(commit)}",
        f"  saved {commit.saved_at}, {age} ago" + (f", with {versions}" if versions else ""),
        f"  runs: {runs}",
        *((f"  about: {about}",) if about else ()),
    )
    terminal.tell({"checkpoint": record}, "\n".join(map(on_one_line, lines)))


def _tell_state(found: ListedCheckpoint, terminal: Terminal) -> None:
    """Tell the values of a checkpoint's state file, each in a few words."""
    if STATE_FILE not in found.commit.states:
        raise CheckpointDamaged(f"{found.path}: COMMIT does not name {STATE_FILE}")
    terminal.say(f"\n{STATE_FILE}")
    try:
        for key, value in JsonText(found.state_pieces(STATE_FILE)).members(lambda key: terminal.as_json):
            terminal.tell({"state": key, "value": value}, on_one_line(f"  {key}: {_shown(value)}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{found.path / STATE_FILE} is no JSON object, as was saved: {error}") from None


def _shown(value: object) -> str:
    if isinstance(value, Long):
        return value.beginning[: _MOST_CHARACTERS - 3] + "..."
    return shown(value, _MOST_CHARACTERS)


def _tell_tensors(found: ListedCheckpoint, kind: FileKind, terminal: Terminal, *, with_boxes: bool) -> None:
    file = meta_file(kind)
    if file not in found.commit.metas:
        raise CheckpointDamaged(f"{found.path}: COMMIT does not name {file}")
    meta = StateMeta.from_json(found.read_meta(file), where=str(found.path / file))
    num_bytes = sum(_bytes_of(tensor) for tensor in meta.tensors.values())
    terminal.say(f"\n{file}: {len(meta.tensors)} tensors, {size_in_words(num_bytes)}")
    for name, tensor in sorted(meta.tensors.items()):
        record = {
            "kind": kind,
            "name": name,
            "dtype": tensor.dtype,
            "shape": tensor.layout.shape,
            "of": tensor.kind,
            "num_bytes": _bytes_of(tensor),
            "boxes": [[rank, box.start, box.end] for rank, box in _held(tensor)],
        }
        terminal.tell(record, _in_words(tensor, with_boxes=with_boxes))
    for alias, name in sorted(meta.aliases.items()):
        terminal.tell({"kind": kind, "name": alias, "alias_of": name}, on_one_line(f"  {alias} is {name}"))


def _in_words(tensor: TensorMeta, *, with_boxes: bool) -> str:
    held = list(_held(tensor))
    told = [f"rank {rank} {_where(box)}" for rank, box in held[:_MOST_BOXES]]
    head = on_one_line(f"  {tensor.name}  {tensor.dtype} {list(tensor.layout.shape)}  {tensor.kind}")
    if with_boxes:
        return "\n".join([head, *(f"    rank {rank}: {_where(box)}" for rank, box in held)])
    if len(held) == 1 and held[0][1].num_elements == math.prod(tensor.layout.shape):
        return f"{head}  all on rank {held[0][0]}"
    return f"{head}  " + ", ".join(told) + (f" and {len(held) - _MOST_BOXES} more" if len(held) > _MOST_BOXES else "")


def _held(tensor: TensorMeta) -> Iterator[tuple[int, Box]]:
    return tensor.layout.held()


def _where(box: Box) -> str:
    ranges = ", ".join(f"{low}:{high}" for low, high in zip(box.start, box.end, strict=True))
    return ranges if box.is_flat else f"[{ranges}]"


def _bytes_of(tensor: TensorMeta) -> int:
    return math.prod(tensor.layout.shape) * ITEM_BYTES[tensor.dtype]


# --- every byte of checkpoints read and checked; each damage is told with its file, blocks and tensors ---------------


def run_verify(options: argparse.Namespace, terminal: Terminal) -> int:
    """Read and check every byte of the checkpoints at a path; gives the exit status."""
    statuses = [_verify(path, terminal) for path in _checkpoints(place_of(options.path))]
    if not statuses:
        raise CheckpointNotFound(f"{options.path} holds no checkpoint that was completed")
    return DAMAGED if DAMAGED in statuses else max(statuses)


def _checkpoints(place: FolderContents) -> Iterator[Path]:
    """The folder of every checkpoint that has a COMMIT, be it damaged."""
    if place.is_checkpoint:
        yield place.path
    for job in place.jobs:
        for listing in (Listing.read(job), Listing.read(job, aside=True)):
            yield from (found.path for found in listing.found)
            yield from (job / name for name in listing.unreadable)


def _verify(path: Path, terminal: Terminal) -> int:
    with Reading(path):
        try:
            found = ListedCheckpoint.read(path)
            with terminal.bar(path.name, sum(shard.num_bytes for shard in found.commit.shards.values())) as advance:
                return _tell_damages(found, advance, terminal)
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


def _tell_damages(found: ListedCheckpoint, advance: Callable[[int], None], terminal: Terminal) -> int:
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


# --- removes what a rule does not keep, and what dead saves have left; also beside a run that is alive ---------------


def run_prune(options: argparse.Namespace, terminal: Terminal) -> int:
    """Remove old checkpoints, and what dead saves have left; gives the exit status."""
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
    """The rule for the checkpoints that `ckpt prune` keeps; None where it keeps all."""
    if options.keep_last is None and options.keep_every is None and not options.abandoned:
        return None
    only_the_newest = options.keep_every is not None and options.keep_last is None
    return Retention(
        keep_last=1 if only_the_newest else options.keep_last,
        keep_every=options.keep_every,
        keep_abandoned=not options.abandoned,
    )


def _retain(job: Path, rule: Retention, terminal: Terminal, *, is_dry: bool) -> list[RetentionVerdict]:
    """Remove the checkpoints that the rule does not keep, or with ``is_dry`` tell which; gives the verdict on each."""
    verdicts = verdicts_on(job, rule, now_ns=time.time_ns()) if is_dry else apply_retention(job, rule)
    for verdict in verdicts:
        _tell_verdict(verdict, terminal, is_dry=is_dry)
    for name, error in Listing.read(job).unreadable.items():
        record = {"path": str(job / name), "done": "stays", "why": in_words(error)}
        terminal.tell(record, f"  {name} stays, and does not count among those kept: {in_words(error)}")
    gone = [bytes_of(verdict.found.commit) for verdict in verdicts if not verdict.stays]
    terminal.say(f"  {len(gone)} of {len(verdicts)} {_removed(is_dry)}, {size_in_words(sum(gone))}")
    return verdicts


def _tell_verdict(verdict: RetentionVerdict, terminal: Terminal, *, is_dry: bool) -> None:
    found = verdict.found
    done = "stays" if verdict.stays else _removed(is_dry)
    num_bytes = bytes_of(found.commit)
    record = {"path": str(found.path), "done": done, "why": verdict.why, "num_bytes": num_bytes}
    size = "" if verdict.stays else f", {size_in_words(num_bytes)}"
    terminal.tell(record, on_one_line(f"  {found.name} {done}{size}: {verdict.why}"))


def _tidy(job: Path, terminal: Terminal) -> bool:
    """Remove what dead saves have left; gives whether the storage let that be done."""
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
        terminal.tell(record, f"  {name} {_removed(is_dry)}: no checkpoint uses it")
    if not are_removed and not metas:
        terminal.say("  no garbage")


def _tell_of_others(left: Collection[Path], why_not: str | None, terminal: Terminal) -> None:
    """Tell which saves were never committed and stay for now, and why."""
    for path in sorted(left):
        why = why_not or "something was written there within the last hour"
        terminal.tell({"path": str(path), "done": "stays", "why": why}, on_one_line(f"  {path.name} stays: {why}"))


def _removed(is_dry: bool) -> str:
    return "would be removed" if is_dry else "removed"
