"""How a refusal reaches a person: its sentence stands last, below at most one cause, whatever was refused."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from elastic_ext import (
    CheckpointInterval,
    CheckpointOptions,
    ElasticConfig,
    ElasticDataLoader,
    ElasticTrainer,
    ParallelPlan,
    StepOptions,
    follow_config,
)
from elastic_ext.errors import ApplyError, CheckpointError, ElasticError, RanksFailedError
from elastic_ext.fsdp import ShardCheckpointer
from tests.support.chains import num_causes
from tests.support.ranks import RankPool
from tests.support.training import trainer_of

ROOT = Path(__file__).resolve().parent.parent
REFUSALS: dict[str, Callable[[Path], object]] = {}
OPEN: list[Any] = []
"""Trainers that hold the process's signals until they are closed."""


@pytest.fixture(autouse=True)
def _close_trainers() -> Iterator[None]:
    yield
    while OPEN:
        with contextlib.suppress(Exception):  # storage that cannot be used still cannot be
            OPEN.pop().close()


def refusal(provoke: Callable[[Path], object]) -> Callable[[Path], object]:
    """A function that provokes a refusal, in a folder of its own, which has a ``file``."""
    REFUSALS[provoke.__name__] = provoke
    return provoke


def prepared(folder: Path, *, optimizer: type[Optimizer] = SGD, **arguments: Any) -> tuple[Any, nn.Module, Any]:
    """A trainer that is prepared, its model and optimizer."""
    model = nn.Linear(2, 2)
    trainer = trainer_of(folder, model, micro_batch_size=2, progress=False, **arguments)
    OPEN.append(trainer)
    return trainer, model, trainer.prepare(optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]


def take(trainer: Any, model: nn.Module, optimizer: Any) -> None:
    with trainer.step():
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def take_many(trainer: Any, model: nn.Module, optimizer: Any) -> None:
    for _ in range(10_000):
        take(trainer, model, optimizer)


def saved(folder: Path) -> Path:
    """The folder of a checkpoint that a trainer has saved into ``storage``."""
    trainer, model, optimizer = prepared(folder, shared_storage_path=folder / "storage")
    take(trainer, model, optimizer)
    path: Path = trainer.save_checkpoint()
    trainer.close()
    return path


def resumed(folder: Path) -> object:
    return prepared(folder, shared_storage_path=folder / "storage", resume="strict")


class TornSGD(SGD):
    """An optimizer that fails when it has changed parameters."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ArithmeticError("the optimizer failed")


class FailingDataset:
    """Samples that cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise LookupError(f"sample {index} cannot be read")


# ---- folders and files that cannot be used ----


@refusal
def storage_is_a_file(folder: Path) -> object:
    return prepared(folder, shared_storage_path=folder / "file")


@refusal
def storage_is_below_a_file(folder: Path) -> object:
    return prepared(folder, shared_storage_path=folder / "file" / "further")


@refusal
def storage_cannot_be_written(folder: Path) -> object:
    return prepared(folder, shared_storage_path="/proc/nobody")


@refusal
def config_file_is_a_folder(folder: Path) -> None:
    trainer, model, optimizer = prepared(folder, config_file=folder)
    take(trainer, model, optimizer)
    trainer.propose({"dataloader.batchsize": 3}, "a key that is not there")


@refusal
def shards_are_to_lie_in_a_file(folder: Path) -> None:
    with ShardCheckpointer(folder / "file", job="job") as checkpointer:
        checkpointer.save(1, nn.Linear(2, 2))


@refusal
def folder_becomes_a_file_while_training_goes_on(folder: Path) -> None:
    trainer, model, optimizer = prepared(folder, shared_storage_path=folder / "storage")
    take(trainer, model, optimizer)
    (folder / "storage").rename(folder / "moved")
    (folder / "storage").touch()
    trainer.save_checkpoint()


# ---- checkpoints that cannot be loaded ----


@refusal
def commit_is_damaged(folder: Path) -> object:
    (saved(folder) / "COMMIT").write_text("x")
    return resumed(folder)


@refusal
def file_is_damaged(folder: Path) -> object:
    path = next(saved(folder).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return resumed(folder)


@refusal
def file_is_missing(folder: Path) -> object:
    next(saved(folder).glob("*.safetensors")).unlink()
    return resumed(folder)


@refusal
def model_has_another_shape(folder: Path) -> None:
    saved(folder)
    model = nn.Linear(2, 3)
    trainer = trainer_of(folder, model, micro_batch_size=2, shared_storage_path=folder / "storage")
    trainer.prepare(SGD(model.parameters(), lr=0.1))


@refusal
def checkpoint_is_not_there(folder: Path) -> object:
    return prepared(folder, shared_storage_path=folder / "storage")[0].rewind()


# ---- arguments and config that are refused ----

PURE: dict[str, Callable[[], object]] = {
    "model": lambda: ElasticTrainer(3),  # type: ignore[arg-type]
    "step options": lambda: StepOptions(guard="sometimes"),  # type: ignore[arg-type]
    "checkpoint options": lambda: CheckpointOptions(keep_previous=True, save_in_background=False),
    "interval": lambda: CheckpointInterval(steps=0),
    "interval without a folder": lambda: ElasticTrainer(
        nn.Linear(2, 2), micro_batch_size=2, checkpoint_interval=CheckpointInterval(steps=1)
    ),
    "plan": lambda: ParallelPlan(strategy="half"),  # type: ignore[arg-type]
    "loader": lambda: ElasticDataLoader([1, 2], batch_size=0),
    "config": lambda: ElasticConfig.from_dict({"dataloader": {"batch_size": "many"}, "nothing": 1}),
    "startup": lambda: follow_config(startup={"optimizer.learningrate": 1}),
    "interval of agreements": lambda: follow_config(agree_every_steps=0),
}


@refusal
def optimizer_is_of_another_model(folder: Path) -> None:
    trainer_of(folder, nn.Linear(2, 2), micro_batch_size=2).prepare(SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@refusal
def model_is_not_sharded(folder: Path) -> object:
    return prepared(folder, use_fsdp=True)


@refusal
def proposal_has_an_unknown_key(folder: Path) -> None:
    prepared(folder)[0].propose({"dataloader.batchsize": 3}, "a test")


# ---- calls in a wrong order, and steps that go wrong ----


@refusal
def checkpoint_is_saved_before_prepare(folder: Path) -> None:
    trainer_of(folder, nn.Linear(2, 2), micro_batch_size=2).save_checkpoint()


@refusal
def checkpoint_has_no_folder(folder: Path) -> None:
    prepared(folder)[0].save_checkpoint()


@refusal
def trainer_is_prepared_twice(folder: Path) -> None:
    trainer, _, optimizer = prepared(folder)
    trainer.prepare(optimizer)


@refusal
def plan_of_a_model_that_is_not_spread_is_changed(folder: Path) -> None:
    prepared(folder)[0].reshard(ParallelPlan(strategy="no_shard"))


@refusal
def step_is_entered_within_a_step(folder: Path) -> None:
    trainer, _, _ = prepared(folder)
    with trainer.step(), trainer.step():
        pass


@refusal
def optimizer_steps_without_gradients(folder: Path) -> None:
    trainer, _, optimizer = prepared(folder)
    with trainer.step():
        optimizer.step()


@refusal
def optimizer_fails_halfway(folder: Path) -> None:
    take(*prepared(folder, optimizer=TornSGD))


@refusal
def memory_runs_out(folder: Path) -> None:
    trainer, _, _ = prepared(folder)

    def passes() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with trainer.step():
        passes()


# ---- what runs the user's code ----


@refusal
def applier_raises(folder: Path) -> None:
    def apply(old: ElasticConfig, new: ElasticConfig) -> None:
        raise ArithmeticError("the applier failed")

    model = nn.Linear(2, 2)
    trainer = trainer_of(folder, model, micro_batch_size=2)
    trainer.on_change("user", apply)
    (folder / "0" / "config.json").write_text('{"version": 1, "user": {"dropout": 0.5}}')
    trainer.prepare(SGD(model.parameters(), lr=0.1))


@refusal
def dataset_raises(folder: Path) -> None:
    for _ in ElasticDataLoader(FailingDataset(), batch_size=2):
        pass


def assert_shows(error: BaseException) -> None:
    """That the words of ``error`` stand last in what Python prints, with its notes, below one cause at most."""
    told = "".join(traceback.format_exception(error))
    assert told.endswith("".join(traceback.format_exception_only(error))), told
    assert num_causes(error) <= 1, told


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_stands_last_below_one_cause(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception) as caught:  # noqa: PT011 each has a test of its words elsewhere
        REFUSALS[name](tmp_path)
    assert_shows(caught.value)


@pytest.mark.parametrize("name", PURE)
def test_a_wrong_argument_stands_last_and_has_no_cause(name: str) -> None:
    with pytest.raises((ValueError, ElasticError)) as caught:
        PURE[name]()
    assert_shows(caught.value)
    assert num_causes(caught.value) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_disk_that_is_full_is_told_in_the_script_s_own_line_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    trainer, model, optimizer = prepared(
        tmp_path, shared_storage_path=tmp_path / "storage", save_in_background=not waits
    )
    take(trainer, model, optimizer)

    with open("/dev/full", "wb", buffering=0) as full:
        # The error comes from C, as from a disk: one that is raised in a function of a script shows its traceback.
        monkeypatch.setattr(os, "fsync", functools.partial(os.pwrite, full.fileno(), b"x"))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            trainer.save_checkpoint()
        monkeypatch.undo()
    assert_shows(caught.value)
    assert {Path(each.path).name for each in caught.traceback} == {"test_refusals.py", "trainer.py"}
    if caught.value.__cause__ is not None:
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.__traceback__ is None
    assert not any(record.exc_info for record in caplog.records), "the sentence says all"
    trainer.close()


def test_a_save_that_has_failed_is_told_in_the_script_s_own_line_as_a_step_begins(tmp_path: Path) -> None:
    trainer, model, optimizer = prepared(
        tmp_path, shared_storage_path=tmp_path / "storage", checkpoint_interval=CheckpointInterval(steps=1)
    )
    (tmp_path / "storage").rename(tmp_path / "moved")
    (tmp_path / "storage").touch()
    with pytest.raises(CheckpointError, match="Not a directory") as caught:
        take_many(trainer, model, optimizer)
    assert_shows(caught.value)
    assert num_causes(caught.value) == 0
    assert {Path(each.path).name for each in caught.traceback} == {"test_refusals.py", "steps.py"}


def test_an_applier_that_raises_is_told_in_the_script_s_own_line_as_a_step_ends(tmp_path: Path) -> None:
    def apply(old: ElasticConfig, new: ElasticConfig) -> None:
        raise ArithmeticError("the applier failed")

    trainer, model, optimizer = prepared(tmp_path)
    trainer.on_change("user", apply)
    trainer.propose({"user.dropout": 0.5}, "a test")
    with pytest.raises(ApplyError, match="the applier failed") as caught:
        take_many(trainer, model, optimizer)
    assert_shows(caught.value)
    assert {Path(each.path).name for each in caught.traceback} == {"test_refusals.py", "steps.py"}


def fails_on_rank_one(rank: int, folder: Path) -> tuple[str, int, str]:
    """The words of an error, its causes, and all that Python would print of it."""
    model = nn.Linear(2, 2)
    trainer = trainer_of(folder, nn.parallel.DistributedDataParallel(model), rank=rank, micro_batch_size=2)
    wrong = nn.Linear(2, 2) if rank == 1 else model
    with pytest.raises((ValueError, RanksFailedError)) as caught:
        trainer.prepare(SGD(wrong.parameters(), lr=0.1))
    return str(caught.value), num_causes(caught.value), "".join(traceback.format_exception(caught.value))


def test_what_one_rank_refuses_the_others_say_in_its_words_without_its_traceback(
    ranks: RankPool, tmp_path: Path
) -> None:
    (others, causes, _), (own, own_causes, _) = ranks.run(2, fails_on_rank_one, tmp_path, process_group=True)
    assert others == f"1 of 2 ranks failed while preparing a trainer\n--- rank 1:\nValueError: {own}"
    assert (causes, own_causes) == (0, 0)


def raises_in_an_applier(rank: int, folder: Path) -> tuple[str, int]:
    with pytest.raises(RanksFailedError) as caught:
        applier_raises(folder / str(rank))
    return "".join(traceback.format_exception(caught.value)), num_causes(caught.value)


def test_the_traceback_of_an_applier_that_raises_is_shown_once_on_its_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    ((told, causes),) = ranks.run(1, raises_in_an_applier, tmp_path)
    assert causes == 1
    assert told.count("raise ArithmeticError(") == 1 and told.count("ArithmeticError: the applier failed") == 2


SCRIPT = """
import torch
from elastic_ext import ElasticTrainer, FollowOptions

model = torch.nn.Linear(2, 2)
trainer = ElasticTrainer(
    model, micro_batch_size=2, shared_storage_path="/proc/nobody", follow_options=FollowOptions(run_dir="run")
)
trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_folder_that_cannot_be_written_takes_a_few_lines_of_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and done.stderr.count("Traceback (most recent call last)") <= 1
    assert "/proc/nobody" in lines[-1] and lines[-1].startswith("elastic_ext.errors.CheckpointError: ")
    assert len(lines) <= 12, done.stderr
