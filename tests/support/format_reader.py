"""A second reader of checkpoints, written from docs/checkpoint_format.md alone: standard library and xxhash.

It shares no code with the library, so that what the page leaves out, and what the code does otherwise, shows in
test_format_spec.py. It is written to be followed, not to be fast, and holds whole checkpoints in memory.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import xxhash

__all__ = ["Checkpoint", "Damaged", "Newer", "Tensor", "checkpoints_of", "job_folder", "newest", "read_checkpoint"]

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
KINDS = ("model", "optim", "extra")
TABLE = "elastic_ext.checksums"
COMMIT_KEYS = {
    *("format", "generation", "lineage", "global_step", "epoch", "num_ranks", "metas", "states", "shards"),
    *("saved_at", "versions", "about", "checksum"),
}


class Damaged(Exception):
    """What is on the disk is not what was saved."""


class Newer(Exception):
    """It may be in order, and was written in a format that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor: its elements in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a checkpoint holds, verified."""

    path: Path
    commit: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By kind (model, optim, extra) and name; aliases among them."""


# --- which checkpoint -----------------------------------------------------------------------------------------------


def job_folder(storage: Path, job: str) -> Path | None:
    """The newest folder of a job."""
    name = quote(job, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    form = re.compile(re.escape(name) + r"_[0-9]{8}-[0-9]{6}")
    found = [entry for entry in os.listdir(storage / "fsdp_checkpoint") if form.fullmatch(entry)]
    return storage / "fsdp_checkpoint" / max(found) if found else None


def checkpoints_of(folder: Path) -> list[Path]:
    """The committed checkpoints of a job's folder, newest first; what has a COMMIT that cannot be trusted raises."""
    found = []
    for name in os.listdir(folder):
        path = folder / name
        if re.fullmatch(r"(step|epoch)_[0-9]{1,18}", name) and (path / "COMMIT").exists():
            commit = read_commit(path)
            age = (commit["global_step"], len(commit["lineage"]), commit["epoch"], commit["saved_at"], name)
            found.append((age, path))
    return [path for _, path in sorted(found, reverse=True)]


def newest(storage: Path, job: str) -> Checkpoint:
    """The newest checkpoint of a job, read and verified."""
    folder = job_folder(storage, job)
    if folder is None:
        raise FileNotFoundError(f"{storage} has no folder of job {job}")
    return read_checkpoint(checkpoints_of(folder)[0])


# --- one checkpoint -------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> Checkpoint:
    """Every byte of a checkpoint, verified."""
    commit = read_commit(path)
    metas = {}
    for kind in KINDS:
        file = f"{kind}_meta.json"
        metas[kind] = _read_meta(_checked(path / file, commit["metas"][file]), path / file, commit["num_ranks"])
    said = commit["states"]["trainer_state.json"]
    state = _checked(path / "trainer_state.json", said["checksum"])
    if len(state) != said["num_bytes"]:
        _damaged(path / "trainer_state.json", "its size")
    shards = {file: _read_shard(path / file, said, commit["generation"]) for file, said in commit["shards"].items()}
    tensors: dict[str, dict[str, Tensor]] = {}
    for kind in KINDS:
        tensors[kind] = {name: _assembled(path, kind, name, metas[kind], shards) for name in metas[kind]["tensors"]}
        for alias, name in metas[kind]["aliases"].items():
            tensors[kind][alias] = tensors[kind][name]
    return Checkpoint(path, commit, json.loads(state), tensors)


def read_commit(path: Path) -> dict[str, Any]:
    """COMMIT, whose last 52 bytes hold the checksum of all that comes before them."""
    data = _bytes(path / "COMMIT")
    seal = re.fullmatch(rb',\n "checksum": "([0-9a-f]{32})"\n}\n', data[-52:])
    if seal is None or xxhash.xxh3_128(data[:-52]).hexdigest().encode() != seal.group(1):
        _damaged(path / "COMMIT", "its own checksum")
    commit = _json(data, path / "COMMIT")
    if type(commit.get("format")) is int and commit["format"] > 1:
        raise Newer(f"{path / 'COMMIT'} has format {commit['format']}")
    if commit.get("format") != 1 or set(commit) != COMMIT_KEYS:
        _damaged(path / "COMMIT", "its fields")
    return commit


def _read_meta(data: bytes, path: Path, num_ranks: int) -> dict[str, Any]:
    meta = _json(data, path)
    if meta.get("format") != 1:
        raise Newer(f"{path} has format {meta.get('format')}")
    if set(meta) != {"format", "num_ranks", "orders", "layouts", "tensors", "aliases"}:
        _damaged(path, "its fields")
    if meta["num_ranks"] != num_ranks:
        _damaged(path, "the number of ranks")
    return meta


# --- one shard file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shard:
    entries: Mapping[str, Any]
    data: bytes


def _read_shard(path: Path, said: Mapping[str, Any], generation: str) -> _Shard:
    """The tensors of one file, with everything checked that there is to check."""
    whole = _bytes(path)
    if len(whole) != said["num_bytes"] or len(whole) < 8:
        _damaged(path, "its size")
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    if start > min(len(whole), 8 + 100_000_000):
        _damaged(path, "its header")
    header = _json(whole[8:start], path)
    try:  # it is not checked yet: that takes the table, and the header says where it begins
        about = header.pop("__metadata__")
        version, of_save = about["elastic_ext.format"], about["elastic_ext.generation"]
        block_bytes = int(about["elastic_ext.block_bytes"])
        low, high = map(int, header.pop(TABLE)["data_offsets"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Damaged(f"{path}: its header is not what was saved") from None
    if version != "1":
        raise Newer(f"{path} has format {version}")
    if of_save != generation:
        _damaged(path, "its generation")
    if start + high != len(whole) or not 0 <= low <= high:
        _damaged(path, "its size")
    data, table = whole[start : start + low], whole[start + low :]
    if xxhash.xxh3_128(whole[:start] + table).hexdigest() != said["checksum"]:
        _damaged(path, "its header or its checksums")
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    if struct.pack(f"<{len(blocks)}Q", *(xxhash.xxh3_64(block).intdigest() for block in blocks)) != table:
        _damaged(path, "a block")
    return _Shard(header, data)


# --- one tensor -----------------------------------------------------------------------------------------------------


def _assembled(path: Path, kind: str, name: str, meta: Mapping[str, Any], shards: Mapping[str, _Shard]) -> Tensor:
    """A tensor put together of the boxes that ranks have written, each element once."""
    tensor = meta["tensors"][name]
    layout = meta["layouts"][tensor["layout"]]
    dtype, shape = tensor["dtype"], tuple(layout["shape"])
    item_bytes, size = ITEM_BYTES[dtype], math.prod(shape)
    target, times = bytearray(size * item_bytes), bytearray(size)
    for rank, start, end in _boxes(layout, meta["orders"]):
        file = f"{kind}_param.{rank:05}-{meta['num_ranks']:05}.safetensors"
        if file not in shards or name not in shards[file].entries:
            _damaged(path / file, f"{name}, which is missing")
        shard = shards[file]
        entry = shard.entries[name]
        if entry["dtype"] != dtype or entry["shape"] != [high - low for low, high in zip(start, end, strict=True)]:
            _damaged(path / file, f"what it says of {name}")
        low, high = entry["data_offsets"]
        source = shard.data[low:high]
        taken = 0
        for first, length in _runs(shape, start, end):
            num_bytes = length * item_bytes
            target[first * item_bytes : first * item_bytes + num_bytes] = source[taken : taken + num_bytes]
            times[first : first + length] = bytes(time + 1 for time in times[first : first + length])
            taken += num_bytes
        if taken != len(source):
            _damaged(path / file, f"the size of {name}")
    if times != b"\x01" * size:
        _damaged(path / f"{kind}_meta.json", f"the layout of {name}")
    return Tensor(dtype, shape, bytes(target))


def _boxes(layout: Mapping[str, Any], orders: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """The boxes of a layout: rank, start and end."""
    if "boxes" in layout:
        yield from layout["boxes"]
    else:
        for rank, (low, high) in zip(orders[layout["order"]], itertools.pairwise(layout["cuts"]), strict=True):
            yield rank, [low], [high]


def _runs(shape: Sequence[int], start: Sequence[int], end: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of elements, as places in the flattened tensor and lengths, that a box has, in its own order."""
    if len(start) == 1:  # into the flattened tensor, which is the same where the tensor has one dimension
        yield start[0], end[0] - start[0]
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rows = [range(low, high) for low, high in zip(start[:-1], end[:-1], strict=True)]
    for row in itertools.product(*rows):
        first = sum(at * stride for at, stride in zip((*row, start[-1]), strides, strict=True))
        yield first, end[-1] - start[-1]


# --- bytes and JSON -------------------------------------------------------------------------------------------------


def _checked(path: Path, checksum: str) -> bytes:
    data = _bytes(path)
    if xxhash.xxh3_128(data).hexdigest() != checksum:
        _damaged(path, "its checksum")
    return data


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None


def _json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise Damaged(f"{path}: {error}") from None
    if not isinstance(value, dict):
        _damaged(path, "its kind")
    return value


def _damaged(path: Path, what: str) -> NoReturn:
    raise Damaged(f"{path}: {what} is not what was saved")
