"""Damaged checkpoints: whatever is not what was saved is found when it is loaded, and the file is named; a job that
resumes goes on from the newest good one, or stops.

The checkpoints are those of two ranks, loaded in one process. A thousand damages, each alone and mended afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from tests.support.ranks import RankPool
from tests.support.saving import (
    begin_job,
    checkpointer_of,
    digest_at,
    digest_of,
    extra_of,
    fill,
    job_folder,
    make_state,
    train,
)
from tests.support.thinning import the_first

WIDTH = 1200  # so that files have several blocks
NUM_STEPS = 2


@pytest.fixture(scope="module")
def storage(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have saved two steps; whoever damages it mends it."""
    folder = tmp_path_factory.mktemp("storage")
    ranks.run(2, begin_job, folder, NUM_STEPS, WIDTH)
    return folder


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to the newest checkpoint."""

    kind: str
    contents: Mapping[Path, bytes | None]
    """What files have in the place of what was saved; None for one that is gone."""
    named: tuple[str, ...]
    """The error names one of these files."""


@contextmanager
def damaged(damage: Damage) -> Iterator[None]:
    saved = {path: path.read_bytes() for path in damage.contents}
    try:
        for path, data in damage.contents.items():
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
        yield
    finally:
        for path, data in saved.items():
            path.write_bytes(data)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def regions_of(path: Path) -> dict[str, tuple[int, int]]:
    """The parts of a file, by what they hold: from which byte to which."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return {"all": (0, len(data))}
    header = 8 + int.from_bytes(data[:8], "little")
    text = data[8:header].rstrip(b" ")
    table = json.loads(text)["elastic_ext.checksums"]["data_offsets"]
    return {
        "length": (0, 8),
        "header": (8, 8 + len(text)),
        "padding": (8 + len(text), header),
        "data": (header, header + table[0]),
        "table": (header + table[0], header + table[1]),
    }


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir())


def damages_of(checkpoint: Path, other: Path, draw: random.Random, num_flips: int) -> Iterator[Damage]:
    """Some of every kind, at random places of every file: most are bits that are flipped, in every part of it."""
    files = files_of(checkpoint)
    assert len(files) == 10  # COMMIT, three descriptions, the state, five shards
    for path in files:
        data = path.read_bytes()
        for region, (start, end) in regions_of(path).items():
            for _ in range(num_flips):
                bit = draw.randrange(start * 8, end * 8)
                yield Damage(f"flipped bit, {region}", {path: flipped(data, bit)}, (path.name,))
        for length in {0, 1, 8, len(data) - 1, *(draw.randrange(len(data)) for _ in range(num_flips // 5))}:
            yield Damage("truncated", {path: data[:length]}, (path.name,))
        yield Damage("longer", {path: data + b"\0"}, (path.name,))
        yield Damage("missing", {path: None}, (path.name,))
        twin = other / path.name
        yield Damage("from another checkpoint", {path: twin.read_bytes()}, (path.name, "safetensors"))
        start = draw.randrange(len(data) // 2)
        length = draw.randrange(1, len(data) // 2)
        hole = data[:start] + bytes(length) + data[start + length :]
        yield Damage("a part never written", {path: hole}, (path.name,))
        yield Damage("zeros", {path: bytes(len(data))}, (path.name,))
    yield from _exchanged(files, draw, num_flips // 6)
    yield from _stale(checkpoint, other)


def _exchanged(files: list[Path], draw: random.Random, num_others: int) -> Iterator[Damage]:
    """Files of one checkpoint under each other's names."""
    for first in files:
        for second in draw.sample([path for path in files if path != first], num_others):
            contents = {first: second.read_bytes(), second: first.read_bytes()}
            yield Damage("exchanged within", contents, (first.name, second.name))


def _stale(checkpoint: Path, other: Path) -> Iterator[Damage]:
    """Shards of the save before it under the metadata of this one, with its generation written over theirs too."""
    shards = [path for path in files_of(checkpoint) if path.suffix == ".safetensors"]
    old = {path: (other / path.name).read_bytes() for path in shards}
    generation, former = (json.loads((folder / COMMIT).read_bytes())["generation"] for folder in (checkpoint, other))
    for path in shards:
        renamed = old[path].replace(former.encode(), generation.encode())
        yield Damage("stale shard, named anew", {path: renamed}, (path.name,))
    yield Damage("stale shards, all", dict(old), tuple(path.name for path in shards))
    metadata = {path: (other / path.name).read_bytes() for path in files_of(checkpoint) if path not in shards}
    yield Damage("new shards under stale metadata", dict(metadata), tuple(path.name for path in shards))


@pytest.mark.parametrize(("num_flips", "least"), the_first([(6, 250), (30, 1000)]))
def test_hundreds_of_damages_are_each_found_and_the_file_is_named(storage: Path, num_flips: int, least: int) -> None:
    newest, before = (job_folder(storage) / f"step_{step}" for step in (NUM_STEPS, NUM_STEPS - 1))
    model, optimizer = make_state(width=WIDTH)
    expected = digest_at(NUM_STEPS, WIDTH)
    found: Counter[str] = Counter()
    harmless: Counter[str] = Counter()
    with checkpointer_of(storage) as checkpointer:
        for damage in damages_of(newest, before, random.Random(5), num_flips):
            if all(data == path.read_bytes() for path, data in damage.contents.items()):
                harmless[damage.kind] += 1  # the same bytes: nothing is damaged
                continue
            with damaged(damage), pytest.raises((CheckpointDamaged, CheckpointNotFound)) as caught:
                checkpointer.load(model, optimizer, newest)
            text = str(caught.value)
            assert any(name in text for name in damage.named), (damage.kind, damage.named, text)
            if damage.kind == "flipped bit, data":
                assert "block" in text and "'" in text, text
            assert isinstance(caught.value, CheckpointDamaged) or damage.contents == {newest / COMMIT: None}
            found[damage.kind] += 1
        assert checkpointer.load(model, optimizer).path == newest
    assert digest_of(model, optimizer) == expected
    print(f"\n{found.total()} damages found: {dict(found)}; the same bytes: {dict(harmless)}")
    assert found.total() >= least


def test_damage_outside_the_checkpoint_is_harmless_to_loading(storage: Path) -> None:
    newest, expected = job_folder(storage) / f"step_{NUM_STEPS}", digest_at(NUM_STEPS, WIDTH)
    draw = random.Random(7)
    path = job_folder(storage) / "RUN.json"
    model, optimizer = make_state(width=WIDTH)
    with checkpointer_of(storage) as checkpointer:
        for _ in range(20):
            data = path.read_bytes()
            with damaged(Damage("flipped bit", {path: flipped(data, draw.randrange(len(data) * 8))}, ())):
                fill(model, optimizer, 77)
                assert checkpointer.load(model, optimizer).path == newest
            assert digest_of(model, optimizer) == expected


def _load_both_ways(rank: int, storage: Path, path: Path | None) -> tuple[str, int]:
    model, optimizer = make_state(width=WIDTH)
    with checkpointer_of(storage) as checkpointer:
        try:
            return "", checkpointer.load(model, optimizer, path).step
        except CheckpointDamaged as error:
            return str(error), 0


def test_damage_that_one_rank_finds_is_the_same_error_on_all(ranks: RankPool, storage: Path) -> None:
    newest = job_folder(storage) / f"step_{NUM_STEPS}"
    path = newest / "optim_param.00001-00002.safetensors"  # only rank 1 reads it
    start, _ = regions_of(path)["data"]
    with damaged(Damage("flipped bit", {path: flipped(path.read_bytes(), start * 8 + 3)}, ())):
        told = ranks.run(2, _load_both_ways, storage, newest)
        fallen_back = ranks.run(2, _load_both_ways, storage, None)
    (first, _), (second, _) = told
    assert first == second and first.startswith("rank 1: ")
    assert path.name in first and "block 0" in first and "exp_avg" in first
    assert fallen_back == [("", NUM_STEPS - 1)] * 2


# --- a trainer that resumes -----------------------------------------------------------------------------------------


def break_checkpoint(storage: Path, step: int, how: str) -> str:
    """Damage one; the name of the file."""
    checkpoint = job_folder(storage) / f"step_{step}"
    path = checkpoint / (COMMIT if how == "commit" else "model_param.00000-00001.safetensors")
    if how == "missing shard":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(flipped(data, len(data) * 4))
    return path.name


@pytest.mark.parametrize("how", ["commit", "shard", "missing shard"])
def test_resuming_falls_back_to_the_newest_good_checkpoint_with_a_warning(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = tmp_path / "storage"
    assert train(tmp_path / "run", storage, 4) == (0, 4)
    name = break_checkpoint(storage, 4, how)
    break_checkpoint(storage, 3, "shard")
    with caplog.at_level(logging.WARNING, "elastic_ext"):
        assert train(tmp_path / "run", storage, 5) == (2, 5)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("step_4" in text and name in text for text in warnings), warnings
    assert any("step_3" in text for text in warnings), warnings
    assert train(tmp_path / "run", storage, 6) == (5, 6)


@pytest.mark.parametrize("how", ["commit", "shard"])
def test_strict_resuming_stops_at_a_damaged_newest_checkpoint(how: str, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    train(tmp_path / "run", storage, 2)
    name = break_checkpoint(storage, 2, how)
    with pytest.raises(CheckpointDamaged, match=name):
        train(tmp_path / "run", storage, 3, resume="strict")
    assert train(tmp_path / "run", storage, 2) == (1, 2)


@pytest.mark.parametrize("how", ["commit", "shard"])
@pytest.mark.parametrize("resume", ["auto", "strict"])
def test_job_whose_checkpoints_are_all_damaged_does_not_begin_anew(how: str, resume: str, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    train(tmp_path / "run", storage, 2)
    names = [break_checkpoint(storage, step, how) for step in (1, 2)]
    with pytest.raises(CheckpointError, match=names[0]):
        train(tmp_path / "run", storage, 3, resume=resume)
    assert sorted(os.listdir(job_folder(storage))) == ["RUN.json", "RUN.lock", "meta", "step_1", "step_2"]


def test_damaged_extra_is_found_too(tmp_path: Path) -> None:
    model, optimizer = make_state()
    fill(model, optimizer, 1)
    with checkpointer_of(tmp_path) as checkpointer:
        path = checkpointer.save(1, model, optimizer, extra_of(1)) / "extra_param.00000-00001.safetensors"
        start, _ = regions_of(path)["data"]
        path.write_bytes(flipped(path.read_bytes(), start * 8))
        with pytest.raises(CheckpointDamaged, match=r"extra_param.*'extra/order'"):
            checkpointer.load(model, optimizer)
