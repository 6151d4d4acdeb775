"""An older checkpoint in the place of a damaged one: all of it, or nothing; never a mixture of both."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from elastic_ext.fsdp import Loaded, ShardCheckpointer
from tests.fsdp.checkpoint.format.test_format_spec import sealed_again
from tests.fsdp.checkpoint.test_checkpoint_anew import die_before_a_commit
from tests.support.ranks import RankPool
from tests.support.saves import Run
from tests.support.saving import job_folder
from tests.support.training import bits_of, make_model, shared, trainer_of


class Parts(nn.Module):
    """Parameters of a few blocks each."""

    def __init__(self, names: str, value: float) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((64, 512), value)))


def flip(file: Path, name: str) -> None:
    """Change a bit of a tensor's first element in a shard file."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    data[8 + length + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def saved(storage: Path, *models: nn.Module) -> Path:
    """The job's folder, with a checkpoint of each model."""
    with ShardCheckpointer(storage, job="x") as checkpointer:
        for step, model in enumerate(models, start=1):
            checkpointer.save(step, model)
    return job_folder(storage)


def values_in(*tensors: torch.Tensor) -> list[list[float]]:
    """Which values each has, each once."""
    return [sorted(set(tensor.flatten().tolist())) for tensor in tensors]


def load(storage: Path, model: nn.Module, **options: Any) -> Loaded:
    with ShardCheckpointer(storage, job="x") as checkpointer:
        return checkpointer.load(model, **options)


MODEL = "model_param.00000-00001.safetensors"
IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "a folder": os.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("what", IN_ITS_PLACE)
@pytest.mark.parametrize("file", ["COMMIT", "model_meta.json", "trainer_state.json"])
def test_what_is_no_file_in_the_place_of_one_is_damage(tmp_path: Path, file: str, what: str) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("a", 2.0))
    path = folder / "step_2" / file
    path.unlink()
    IN_ITS_PLACE[what](path)
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        model = Parts("a", 5.0)
        assert checkpointer.load(model).step == 1
        assert values_in(*model.parameters()) == [[1.0]]
        with pytest.raises(CheckpointDamaged, match=re.escape(str(path))):
            checkpointer.load(model, path=folder / "step_2")
        checkpointer.save(2, model)  # and its name is free again


def test_an_older_one_without_what_was_touched_is_refused_and_what_would_be_mixed_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("ab", 2.0))
    flip(folder / "step_2" / MODEL, "b")
    with pytest.raises(CheckpointError) as told:
        load(tmp_path, Parts("ab", 5.0), strict=False)
    words = str(told.value)
    assert f"{folder / 'step_1'} does not overwrite all that {folder / 'step_2'} changed in memory before" in words
    assert ": parameter b, so that memory would hold a mixture of both; " in words
    assert f"to go on from {folder / 'step_1'}, move the damaged one away" in words
    assert "do not train on, start the job again" in words
    (folder / "step_2").rename(tmp_path / "away")
    model = Parts("ab", 5.0)
    assert load(tmp_path, model, strict=False).step == 1
    assert values_in(*model.parameters()) == [[1.0], [5.0]]


def test_damage_that_is_found_before_anything_is_touched_leaves_the_older_one_to_be_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("ab", 2.0))
    (folder / "step_2" / MODEL).unlink()
    model = Parts("ab", 5.0)
    assert load(tmp_path, model, strict=False).step == 1
    assert values_in(*model.parameters()) == [[1.0], [5.0]]


def test_an_older_one_that_fills_all_that_was_touched_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, Parts("ab", 1.0), Parts("ab", 2.0))
    flip(folder / "step_2" / MODEL, "b")
    model = Parts("abc", 5.0)
    assert load(tmp_path, model, strict=False).step == 1
    assert values_in(*model.parameters()) == [[1.0], [1.0], [5.0]]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith(f"going on from {folder / 'step_1'}, which was saved before it")


def test_an_error_after_loading_has_begun_says_that_memory_is_of_no_use(tmp_path: Path) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("ab", 2.0))
    flip(folder / "step_2" / MODEL, "b")
    with pytest.raises(CheckpointMismatch, match=r"do not train on, start the job again; not in the checkpoint: b$"):
        load(tmp_path, Parts("ab", 5.0))
    (folder / "step_2" / MODEL).unlink()
    with pytest.raises(CheckpointMismatch) as told:
        load(tmp_path, Parts("ab", 5.0))
    assert "do not train on" not in str(told.value)


def stepped(model: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for part in model.parameters():
        part.grad = torch.ones_like(part)
    optimizer.step()
    return optimizer


def test_the_state_of_another_optimizer_does_not_stand_in_for_what_was_touched(tmp_path: Path) -> None:
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        for step, kind in enumerate((torch.optim.SGD, torch.optim.AdamW), start=1):
            model = Parts("a", float(step))
            checkpointer.save(step, model, stepped(model, kind))
    flip(job_folder(tmp_path) / "step_2" / "optim_param.00000-00001.safetensors", "a/exp_avg_sq")
    model = Parts("a", 5.0)
    with pytest.raises(CheckpointError, match=r"found damaged: optimizer state a/exp_avg, .* values of optimizers' "):
        load(tmp_path, model, optimizer=torch.optim.AdamW(model.parameters()), strict=False)


def half_damaged_rank(rank: int, storage: Path) -> tuple[str, str]:
    """A rank of two, where only the second one's file is damaged."""

    def sharded(names: str, value: float) -> nn.Module:
        model = Parts(names, value)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model

    folder = saved(storage, sharded("a", 1.0), sharded("ab", 2.0), sharded("ab", 3.0))
    if rank == 0:
        flip(folder / "step_3" / "model_param.00001-00002.safetensors", "b")
    dist.barrier()
    whole = sharded("ab", 5.0)
    assert load(storage, whole).step == 2
    assert bits_of(whole) == bits_of(sharded("ab", 2.0))
    if rank == 0:
        flip(folder / "step_2" / "model_param.00001-00002.safetensors", "b")
    dist.barrier()
    with pytest.raises(CheckpointError) as told:
        load(storage, sharded("ab", 5.0), strict=False)
    return type(told.value).__name__, str(told.value)


def test_ranks_refuse_a_mixture_alike_wherever_the_damage_is(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, half_damaged_rank, tmp_path)
    assert first == second
    assert "step_2 changed in memory before it was found damaged: parameter b, " in first[1]
    assert first[1].endswith("start the job again")


NEWER: dict[str, tuple[str, bytes, bytes]] = {
    "COMMIT": ("COMMIT", b'"format": 1', b'"format": 2'),
    "metadata": ("optim_meta.json", b'"format": 1', b'"format": 2'),
    "a shard file": (MODEL, b'format":"1"', b'format":"2"'),
    "a shard file that says what is new": (MODEL, b'format":"1","elastic_ext.gen', b'format":"2","elastic_ext.new'),
}


def make_newer(folder: Path, what: str) -> None:
    file, old, new = NEWER[what]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert old in files[file]
    files[file] = files[file].replace(old, new)
    for name, data in sealed_again(files).items():
        (folder / name).unlink()
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("what", NEWER)
def test_a_newer_format_is_no_damage_and_no_older_one_is_taken_for_it(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("a", 2.0))
    make_newer(folder / "step_2", what)
    model = Parts("a", 5.0)
    for _ in range(2):  # nothing has changed by the first
        with pytest.raises(CheckpointError, match=r"it is not damaged\. Use a newer elastic_ext") as told:
            load(tmp_path, model)
        assert not isinstance(told.value, CheckpointDamaged)
        assert f"{folder / 'step_2' / NEWER[what][0]} has format 2, and this elastic_ext reads" in str(told.value)
    assert ("saved with python " in str(told.value)) == (what == "COMMIT")
    assert values_in(*model.parameters()) == [[5.0]]
    (folder / "step_2").rename(tmp_path / "away")
    assert load(tmp_path, model).step == 1


def test_a_flipped_bit_makes_no_newer_format(tmp_path: Path) -> None:
    folder = saved(tmp_path, Parts("a", 1.0), Parts("a", 2.0))
    path = folder / "step_2" / MODEL
    path.write_bytes(path.read_bytes().replace(b'format":"1"', b'format":"3"'))
    assert load(tmp_path, Parts("a", 5.0)).step == 1


def test_what_a_run_began_anew_without_understanding_it_is_no_nothing_when_that_dies(tmp_path: Path) -> None:
    folder = saved(tmp_path, Parts("a", 1.0))
    make_newer(folder / "step_1", "COMMIT")
    for run_id in ("b", "c"):
        die_before_a_commit(Run(folder, run_id), "step_1")
        assert os.listdir(folder / f"step_1.abandoned-{run_id}")
        with ShardCheckpointer(tmp_path, job="x") as checkpointer:
            for look in (checkpointer.latest, lambda: checkpointer.load(Parts("a", 5.0))):
                with pytest.raises(CheckpointError, match="it is not damaged"):
                    look()
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        checkpointer.save(1, Parts("a", 2.0))
        assert checkpointer.load(Parts("a", 5.0)).step == 1


def refused_by_a_trainer(rank: int, storage: Path) -> list[str]:
    said = []
    for how in ("auto", "strict"):
        model, folder = shared(make_model(), 2), storage.parent / f"{how}-{rank}"
        folder.mkdir()
        with trainer_of(folder, model, rank=rank, shared_storage_path=storage, resume=how, job="x") as trainer:
            with pytest.raises(CheckpointError) as told:
                trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            said.append(str(told.value))
    return said


def test_all_ranks_of_a_trainer_raise_on_a_newer_format(ranks: RankPool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "storage", Parts("a", 1.0), Parts("a", 2.0))
    make_newer(folder / "step_2", "COMMIT")
    first, second = ranks.run(2, refused_by_a_trainer, tmp_path / "storage")
    assert first == second
    assert all(
        "has format 2, and this elastic_ext reads formats up to 1: it is not damaged" in words for words in first
    )


def test_a_trainer_does_not_mix_registered_state(tmp_path: Path) -> None:
    def run(name: str, registered: torch.Tensor | None, num_saves: int = 0) -> None:
        model = make_model()
        (tmp_path / name).mkdir()
        trainer = trainer_of(tmp_path / name, model, shared_storage_path=tmp_path / "storage")
        if registered is not None:
            trainer.register_state("ema", registered)
        with trainer:
            optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(num_saves):
                with trainer.step():
                    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
                    optimizer.step()
                trainer.save_checkpoint()

    run("a", None, num_saves=1)
    run("b", torch.full((50_000,), 2.0), num_saves=1)
    newest = job_folder(tmp_path / "storage") / "step_2"
    flip(newest / "extra_param.00000-00001.safetensors", "registered/ema/")
    with pytest.raises(CheckpointError, match=r"found damaged: registered state ema, so that memory would hold a"):
        run("c", torch.full((50_000,), 5.0))
    newest.rename(tmp_path / "away")
    held = torch.full((50_000,), 5.0)
    run("d", held)
    assert values_in(held) == [[5.0]]
    (tmp_path / "away").rename(newest)
    (newest / "extra_param.00000-00001.safetensors").unlink()
    run("e", held)
    assert values_in(held) == [[5.0]]
