"""Small files that would have a reader make something large, or end it: refused in words, in memory that goes with
their sizes; and where it is a checkpoint, the one before is taken.
"""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.data.batch_plan import plan_step
from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp import ShardCheckpointer, convert_from_dcp, convert_to_dcp
from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, STATE_FILE, meta_file
from elastic_ext.fsdp.checkpoint.export.dcp_plan import ConversionRecord as Converted
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Commit, FileSummary, checksum_of
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta
from elastic_ext.fsdp.checkpoint.loading.description import StreamedCheckpoint
from elastic_ext.fsdp.checkpoint.saving.rescue import choose
from elastic_ext.fsdp.checkpoint.saving.shared_memory import StagedCopy, StagedFiles
from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.pickled_values import read_plain, tensors_in
from elastic_ext.fsdp.value_encoding import pack, unpack
from elastic_ext.records.metrics import RankMetrics
from tests.support.made import by_rows, make_checkpoint
from tests.support.saving import job_folder

DEEP = 100_000
METRICS = {
    **{"time": 1.0, "job": "j", "generation": 0, "rank": 0, "world_size": 1, "host": "h", "pid": 1, "step": 3},
    **{"config_version": 1, "config_revision": 0, "agree_every_steps": 1},
}


def peak_bytes(act: Callable[[], object]) -> int:
    """What it takes of memory that Python gives out."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sealed_with(folder: Path, file: str, data: bytes) -> None:
    """Put other contents into a file of plain values or of descriptions, as if they had been saved."""
    (folder / file).unlink()  # it may be the job's, linked
    (folder / file).write_bytes(data)
    commit = Commit.from_json((folder / COMMIT).read_bytes(), where="it")
    if file in commit.states:
        states = {**commit.states, file: FileSummary(num_bytes=len(data), checksum=checksum_of(data))}
        commit = replace(commit, states=states)
    else:
        commit = replace(commit, metas={**commit.metas, file: checksum_of(data)})
    (folder / COMMIT).write_bytes(commit.to_json())


def saved_twice(storage: Path, extra: object = None) -> Path:
    """A job's folder with two checkpoints."""
    with ShardCheckpointer(storage, job="test") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, nn.Linear(2, 2), extra=extra)
    return job_folder(storage)


def described(tensors: dict[str, object], layouts: list[object], num_ranks: int = 1) -> bytes:
    value = {
        "format": 1,
        "num_ranks": num_ranks,
        "orders": [[0]],
        "layouts": layouts,
        "tensors": tensors,
        "aliases": {},
    }
    return json.dumps(value).encode()


def with_large(folder: Path, kind: str) -> None:
    """Say that there is one tensor more, of a terabyte."""
    file = folder / f"{kind}_meta.json"
    value = json.loads(file.read_bytes())
    value["tensors"][f"{kind}/large"] = {"dtype": "U8", "kind": "buffer", "layout": len(value["layouts"])}
    value["orders"].append([0])
    value["layouts"].append({"shape": [1 << 40], "cuts": [0, 1 << 40], "order": len(value["orders"]) - 1})
    sealed_with(folder, file.name, json.dumps(value).encode())


NESTED = {
    "lists": '{"extra": ' + "[" * DEEP + "]" * DEEP + "}",
    "lists that JSON reads": '{"extra": ' + "[" * 400 + "]" * 400 + "}",
    "tuples": '{"extra": ' + '{"!": "tuple", "of": [' * 300 + "]}" * 300 + "}",
    "objects": '{"groups": ' + '{"a": ' * 300 + "1" + "}" * 300 + "}",
    "no object": "[1]",
    "no JSON": "{",
}


@pytest.mark.parametrize("how", NESTED)
def test_in_place_of_a_checkpoint_whose_values_nest_too_deeply_the_one_before_is_taken(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved_twice(tmp_path)
    sealed_with(folder / "step_2", STATE_FILE, NESTED[how].encode())
    with ShardCheckpointer(tmp_path, job="test") as checkpointer:
        with pytest.raises(CheckpointDamaged, match=rf"{STATE_FILE} is damaged"):
            checkpointer.load(nn.Linear(2, 2), path=folder / "step_2")
        assert checkpointer.load(nn.Linear(2, 2)).step == 1
    assert "going on from" in caplog.text


def test_extra_states_that_nest_too_deeply_are_damage_to_an_export_too(tmp_path: Path) -> None:
    folder = saved_twice(tmp_path)
    for depth in (300, 600, DEEP):
        data = f'{{"{EXTRA_STATES}": {{"a": {"[" * depth}{"]" * depth}}}}}'
        sealed_with(folder / "step_2", STATE_FILE, data.encode())
        with contextlib.closing(StreamedCheckpoint(ListedCheckpoint.read(folder / "step_2"))) as streamed:
            if depth == DEEP:
                with pytest.raises(CheckpointDamaged, match=f"{STATE_FILE} is damaged"):
                    streamed.extra_states()
            else:
                assert tensors_in(streamed.extra_states()) == {}


@pytest.mark.parametrize("kind", ["model", "extra"])
def test_in_place_of_a_checkpoint_that_tells_of_a_terabyte_the_one_before_is_taken(tmp_path: Path, kind: str) -> None:
    folder = saved_twice(tmp_path, extra={"order": torch.arange(3)})
    with_large(folder / "step_2", kind)
    with ShardCheckpointer(tmp_path, job="test") as checkpointer:
        assert checkpointer.load(nn.Linear(2, 2), strict=False).step == 1


def test_memory_for_a_tensor_is_taken_when_its_file_has_told_its_size(tmp_path: Path) -> None:
    folder = saved_twice(tmp_path, extra={"order": torch.arange(3)})
    with_large(folder / "step_2", "extra")
    path = folder / "step_2" / COMMIT
    commit = Commit.from_json(path.read_bytes(), where="it")
    shards = {name: replace(summary, num_bytes=1 << 41) for name, summary in commit.shards.items()}
    path.write_bytes(replace(commit, shards=shards).to_json())
    with ShardCheckpointer(tmp_path, job="test") as checkpointer:
        assert checkpointer.load(nn.Linear(2, 2), strict=False).step == 1


def test_a_commit_that_names_no_values_is_damaged(tmp_path: Path) -> None:
    folder = saved_twice(tmp_path)
    path = folder / "step_2" / COMMIT
    path.write_bytes(replace(Commit.from_json(path.read_bytes(), where="it"), states={}).to_json())
    with ShardCheckpointer(tmp_path, job="test") as checkpointer:
        assert checkpointer.load(nn.Linear(2, 2)).step == 1


def test_what_is_packed_at_its_deepest_is_read(tmp_path: Path) -> None:
    for wrap in (lambda each: [each], lambda each: {"a": each}, lambda each: (each,), lambda each: {1: each}):
        value: Any = 1
        for _ in range(100):
            value = wrap(value)
        read = read_plain(json.dumps({"extra": pack(value, "it"), "groups": []}).encode())
        assert unpack(read["extra"]) == value
        with pytest.raises(TypeError, match="nests more than 100 levels deep"):
            pack(wrap(value), "it")


# --- layouts -------------------------------------------------------------------------------------------------------


def test_blocks_that_overlap_in_many_dimensions_are_told_without_all_their_regions() -> None:
    num_boxes, num_dimensions = 24, 6
    shape = [100] * num_dimensions
    boxes = [[rank, [rank] * num_dimensions, [rank + 50] * num_dimensions] for rank in range(num_boxes)]
    tensors: dict[str, object] = {"w": {"dtype": "F32", "kind": "parameter", "layout": 0}}
    data = described(tensors, [{"shape": shape, "boxes": boxes}], num_boxes)
    meta = StateMeta.from_json(data)
    found: list[str | None] = []
    assert peak_bytes(lambda: found.append(meta.fault())) < 64 << 20
    assert found == ["tensor 'w': 24 different boxes overlap, many times over"]


def test_blocks_that_tile_a_tensor_may_be_many() -> None:
    shape, size = (64, 64, 8), 4
    starts = [(a, b, c) for a in range(0, 64, size) for b in range(0, 64, size) for c in range(0, 8, size)]
    boxes = tuple(Box.block(shape, start, tuple(at + size for at in start)) for start in starts)
    assert Layout(shape, boxes).fault() is None
    assert Layout(shape, boxes[:-1]).fault() == "no holder has [60:64, 60:64, 4:8] of (64, 64, 8)"


def test_a_tensor_of_very_many_dimensions_is_refused() -> None:
    tensors: dict[str, object] = {"w": {"dtype": "F32", "kind": "parameter", "layout": 0}}
    data = described(tensors, [{"shape": [1] * 20_000, "cuts": [0, 1], "order": 0}])
    with pytest.raises(CheckpointDamaged, match="at most 256 dimensions"):
        StateMeta.from_json(data)


def test_a_layout_that_is_read_is_equal_to_the_one_that_was_written(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    path = make_checkpoint(tmp_path / "step_1", {"w": weight}, {"w": by_rows((6,), 2)}, num_ranks=2)
    file = path / meta_file("model")
    meta = StateMeta.from_json(file.read_bytes())
    assert meta.tensors["w"].layout == by_rows((6,), 2) and by_rows((6,), 2) == meta.tensors["w"].layout
    assert hash(meta.tensors["w"].layout) == hash(by_rows((6,), 2))
    assert meta.tensors["w"].layout != by_rows((6,), 3)


# --- converted folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"num_ranks": 1 << 60}, {"num_ranks": "2"}, {"num_ranks": 0}, {"global_step": -1}, {"about": 3}]
)
def test_what_a_converted_checkpoint_says_of_itself_is_checked(change: dict[str, Any]) -> None:
    said = {
        "global_step": 1, "epoch": 0, "num_ranks": 2, "versions": {}, "about": {}, "model_key": "model",
        "optim_key": "optim", "first_names": ["a"], "format": 1,
    }  # fmt: skip
    record = Converted.from_json(json.dumps(said).encode(), where="it")
    assert record.first_names == ("a",) and Converted.from_json(record.to_json(), where="it") == record
    with pytest.raises(CheckpointDamaged, match="it "):
        Converted.from_json(json.dumps({**said, **change}).encode(), where="it")
    with pytest.raises(CheckpointError, match="format 2, and this elastic_ext reads format 1"):
        Converted.from_json(json.dumps({**said, "format": 2}).encode(), where="it")


def test_a_converted_checkpoint_of_many_ranks_comes_back_in_little_memory(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    path = make_checkpoint(tmp_path / "step_1", {"w": weight}, {"w": by_rows((6,), 2)}, num_ranks=2)
    commit = Commit.from_json((path / COMMIT).read_bytes(), where="it")
    many = 1 << 20
    meta = StateMeta.from_json((path / meta_file("model")).read_bytes())
    for kind in ("model", "optim", "extra"):
        of_kind = meta if kind == "model" else StateMeta(2, {}, {})
        data = of_kind.to_json().replace(b'"num_ranks": 2', f'"num_ranks": {many}'.encode())
        sealed_with(path, meta_file(kind), data)
    renamed = {name.replace("00002", f"{many:05}"): summary for name, summary in commit.shards.items()}
    for old, new in zip(commit.shards, renamed, strict=True):
        (path / old).rename(path / new)
    sealed = Commit.from_json((path / COMMIT).read_bytes(), where="it")
    (path / COMMIT).write_bytes(replace(sealed, num_ranks=many, shards=renamed).to_json())
    convert_to_dcp(path, tmp_path / "dcp")
    assert peak_bytes(lambda: convert_from_dcp(tmp_path / "dcp", tmp_path / "storage", job="new")) < 16 << 20


# --- what ranks have staged, and configs ---------------------------------------------------------------------------


def test_what_one_rank_of_very_many_has_staged_is_told_in_few_words() -> None:
    place: dict[str, Any] = {"name": "step_5", "folder": "/nowhere", "generation": "g", "run_id": "r"}
    row = StagedCopy(**place, global_step=5, rank=7, num_ranks=1 << 50, staged_ns=0)
    (choice,) = choose([row])
    assert choice.generation is None
    assert choice.why.endswith(
        f"of {1 << 50} ranks these had not staged it: 0, 1, 2, 3, 4, 5, 6, 8, 9, 10 and {(1 << 50) - 11} more"
    )


def test_records_of_what_is_staged_may_nest_as_they_like() -> None:
    body = b'{"format": ' + b"[" * DEEP + b"\n"
    with pytest.raises(ValueError, match="it is no record"):
        StagedFiles.decoded(checksum_of(body).encode() + b"\n" + body)


def test_a_step_of_very_many_micro_batches_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"1000000000 micro-steps; use larger micro-batches or .* at most 2097152"):
        plan_step(2_000_000_000, 2, 1)
    assert plan_step(1_000_000, 1, 1).micro_batches == ((1,) * 1_000_000,)


@pytest.mark.parametrize("depth", [10, 400, 900, DEEP])
def test_a_record_whose_value_nests_is_refused_in_few_words(depth: int) -> None:
    with pytest.raises(ValueError, match=r"^(step is .*; allowed: int|not a JSON object)$") as told:
        RankMetrics.from_json(json.dumps(METRICS)[:-1] + ', "step": ' + "[" * depth + "]" * depth + "}")
    assert len(str(told.value)) < 200
