"""`ckpt show`: what is in one checkpoint, tensor by tensor."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, FileKind, meta_file
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.listing import Found
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES, JsonText, Long
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.layout import Box
from elastic_ext.records.json import shown
from elastic_ext.records.text import age_in_words, on_one_line, size_in_words

from .commands import DONE
from .places import one_checkpoint, place_of
from .summary import age_of, bytes_of, layout_of
from .terminal import Terminal

__all__ = ["run"]

_MOST_BOXES = 4
_MOST_CHARACTERS = 100


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    path = one_checkpoint(place_of(options.path))
    with Reading(path):
        found = Found.read(path)
        _tell_commit(found, terminal)
        _tell_state(found, terminal)
        for kind in KINDS:
            _tell_tensors(found, kind, terminal, with_boxes=options.boxes)
    return DONE


def _tell_commit(found: Found, terminal: Terminal) -> None:
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
        f"  step {commit.global_step}, epoch {commit.epoch}, {size_in_words(bytes_of(commit))}, {layout_of(commit)}",
        f"  saved {commit.saved_at}, {age} ago" + (f", with {versions}" if versions else ""),
        f"  runs: {runs}",
        *((f"  about: {about}",) if about else ()),
    )
    terminal.tell({"checkpoint": record}, "\n".join(map(on_one_line, lines)))


def _tell_state(found: Found, terminal: Terminal) -> None:
    """The plain values, each in a few words."""
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


def _tell_tensors(found: Found, kind: FileKind, terminal: Terminal, *, with_boxes: bool) -> None:
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
