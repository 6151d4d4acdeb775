"""What cannot be done with checkpoints: refused on every rank at once, in words that help, with nothing changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError, ElasticError, RanksDisagreeError
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.claim import is_mark
from tests.support.ranks import RankPool
from tests.support.saving import job_folder
from tests.support.training import ResumableSlices, make_data, make_model, shared, trainer_of


def everything_in(storage: Path) -> dict[str, tuple[int, bytes]]:
    """Every file by its path, with what changes when it is written or replaced; but for the mark of who reads yet."""
    files = sorted(path for path in storage.rglob("*") if not is_mark(path.name) and path.is_file())
    return {str(path.relative_to(storage)): (path.stat().st_ino, path.read_bytes()) for path in files}


def closed_rank(_: int, storage: Path) -> None:
    model = nn.Linear(2, 2)
    checkpointer = ShardCheckpointer(storage, job="x")
    path = checkpointer.save(1, model)
    checkpointer.save(2, model)
    checkpointer.close()
    before = everything_in(storage)
    asked: list[Callable[[], object]] = [
        lambda: checkpointer.save(3, model),
        lambda: checkpointer.load(model),
        lambda: checkpointer.load(model, path=path),
        checkpointer.latest,
        checkpointer.claim,
    ]
    for ask in asked:
        with pytest.raises(CheckpointError, match=r"of job 'x' is closed, .* call this before close"):
            ask()
    checkpointer.wait()
    checkpointer.close()
    assert everything_in(storage) == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_closed_neither_saves_nor_loads_nor_answers(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, closed_rank, tmp_path)


def small_trainer(folder: Path, rank: int, num_ranks: int, **arguments: Any) -> tuple[Any, nn.Module]:
    folder.mkdir(exist_ok=True)
    model = shared(make_model(), num_ranks)
    options = {"shared_storage_path": folder / "storage", "micro_batch_size": 4, **arguments}
    return trainer_of(folder, model, rank=rank, **options), model


def take(trainer: Any, model: nn.Module, optimizer: Any) -> None:
    inputs, targets = make_data(4)
    with trainer.step():
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def ended_rank(rank: int, folder: Path, num_ranks: int) -> None:
    trainer, model = small_trainer(folder, rank, num_ranks)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            take(trainer, model, optimizer)
            trainer.save_checkpoint()
        take(trainer, model, optimizer)
    before = everything_in(folder / "storage")
    for ask in (trainer.save_checkpoint, trainer._save_fsdp_state, trainer._load_fsdp_state):
        with pytest.raises(ElasticError, match=r"training has ended, .* within `with trainer:`"):
            ask()
    assert everything_in(folder / "storage") == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_that_has_ended_neither_saves_nor_loads(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, ended_rank, tmp_path, num_ranks)
    folder = job_folder(tmp_path / "storage")
    assert sorted(name for name in os.listdir(folder) if name.startswith("step")) == ["step_1", "step_2"]


# --- steps that would not be the newest -----------------------------------------------------------------------------


def earlier_step_rank(_: int, storage: Path) -> None:
    model = nn.Linear(2, 2)
    with ShardCheckpointer(storage, job="x") as checkpointer:
        early, newest = checkpointer.save(5, model), checkpointer.save(10, model)
        before = everything_in(storage)
        for step in (10, 7, 5, 0):
            with pytest.raises(
                ValueError, match=rf"step is {step}, and this run has saved step 10; .* older checkpoint"
            ):
                checkpointer.save(step, model)
        assert everything_in(storage) == before
        assert checkpointer.latest() == newest
    with ShardCheckpointer(storage, job="x") as checkpointer:
        checkpointer.load(model)
        before = everything_in(storage)
        for step in (10, 3):
            with pytest.raises(ValueError, match=rf"step is {step}, and this run has gone on from step 10; .* job="):
                checkpointer.save(step, model)
        assert everything_in(storage) == before
        checkpointer.load(model, path=early)
        path = checkpointer.save(7, model)
        assert checkpointer.latest() == path
        assert checkpointer.load(model).step == 7
        checkpointer.save(10, model)
    with ShardCheckpointer(storage, job="tuned") as checkpointer:
        checkpointer.load(model, path=path)
        assert checkpointer.save(0, model) == checkpointer.latest()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_is_not_the_next_is_refused(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, earlier_step_rank, tmp_path)


# --- arguments that one rank alone has, or that cannot be -----------------------------------------------------------

SAVED = 1  # the step of the checkpoint that is there


def asked_rank(rank: int, storage: Path, asked: str) -> tuple[str, str]:
    """What a rank raises, of which each is asked for something else."""
    model = nn.Linear(2, 2)
    with ShardCheckpointer(storage, job="x", timeout_seconds=60.0) as checkpointer:
        path = checkpointer.save(SAVED, model)
        before = everything_in(storage)
        second = rank == 1
        ask: dict[str, Callable[[], object]] = {
            "epoch -1": lambda: checkpointer.save(3, model, epoch=-rank),
            "step 2.5": lambda: checkpointer.save(2.5 if second else 3, model),  # type: ignore[arg-type]
            "step True": lambda: checkpointer.save(second or 3, model),
            "steps": lambda: checkpointer.save(3 + rank, model),
            "epochs": lambda: checkpointer.save(3, model, epoch=rank),
            "path 5": lambda: checkpointer.load(model, path=5 if second else path),  # type: ignore[arg-type]
            "path": lambda: checkpointer.load(model, path=path if second else None),
            "strict": lambda: checkpointer.load(model, strict=second),
            "save, load": lambda: checkpointer.load(model) if second else checkpointer.save(3, model),
            "save, latest": lambda: checkpointer.latest() if second else checkpointer.save(3, model),
        }
        with pytest.raises((ValueError, RanksDisagreeError)) as told:
            ask[asked]()
        assert everything_in(storage) == before
        checkpointer.save(4, model)  # and ranks are still at the same point
    return type(told.value).__name__, str(told.value)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ("epoch -1", "ValueError", "rank 1: epoch is -1; allowed: an integer from 0 to"),
        ("step 2.5", "ValueError", "rank 1: step is 2.5; allowed: an integer from 0 to"),
        ("step True", "ValueError", "rank 1: step is True; allowed: an integer from 0 to"),
        ("path 5", "ValueError", "rank 1: "),
        ("steps", "RanksDisagreeError", "(rank 0: save step 3 of epoch 0; rank 1: save step 4 of epoch 0)"),
        ("epochs", "RanksDisagreeError", "(rank 0: save step 3 of epoch 0; rank 1: save step 3 of epoch 1)"),
        ("path", "RanksDisagreeError", "rank 0: load the newest checkpoint; rank 1: load the checkpoint that is given"),
        ("strict", "RanksDisagreeError", "rank 0: load the newest checkpoint, as far as it fits; rank 1: load the"),
        ("save, load", "RanksDisagreeError", "rank 0: save step 3 of epoch 0; rank 1: load the newest checkpoint"),
        ("save, latest", "RanksDisagreeError", "rank 0: save step 3 of epoch 0; rank 1: tell the newest checkpoint"),
    ],
)
def test_ranks_that_are_asked_for_different_things_all_say_so(
    ranks: RankPool, tmp_path: Path, asked: str, kind: str, words: str
) -> None:
    first, second = ranks.run(2, asked_rank, tmp_path, asked)
    assert first == second
    assert first[0] == kind
    assert words in first[1]


def test_integers_of_other_libraries_are_integers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        checkpointer.save(numpy.int64(3), model, epoch=numpy.int32(2))
        loaded = checkpointer.load(model)
    assert (loaded.path.name, loaded.step, loaded.epoch) == ("step_3", 3, 2)


def unlike_trainer_rank(rank: int, folder: Path) -> str:
    trainer, model = small_trainer(folder, rank, 2)
    with trainer:
        trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(RanksDisagreeError) as told:
            _ = trainer._load_fsdp_state() if rank else trainer.save_checkpoint()
        trainer.save_checkpoint()
    return str(told.value)


def test_trainers_that_are_asked_for_different_things_all_say_so(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, unlike_trainer_rank, tmp_path)
    assert first == second
    assert "rank 0: save step_0 at step 0 of epoch 0; rank 1: load the newest checkpoint" in first


# --- optimizers whose state no checkpoint can hold ------------------------------------------------------------------


class Packed(torch.Tensor):
    """A tensor that is made of another, in half its bytes, as the state of torchao's optimizers is."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.packed = whole.to(torch.bfloat16)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole = [each.packed.to(each.dtype) if isinstance(each, Packed) else each for each in args]
        made = func(*whole, **(kwargs or {}))
        return Packed(made) if func is torch.ops.aten.detach.default else made


class PackedMomentum(torch.optim.Optimizer):
    """SGD whose momentum is packed, and is made in the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for part in group["params"]:
                before = self.state[part].get("momentum", Packed(torch.zeros_like(part)))
                self.state[part]["momentum"] = Packed(before * 0.9 + part.grad)
                part.sub_(0.1 * (self.state[part]["momentum"] * 1.0))


CANNOT_HOLD = (
    r"0\.weight/momentum is a Packed, made of other tensors; .* plain tensors, as torch\.optim's are, or have no"
)


def take_packed_steps(trainer: Any, model: nn.Module) -> None:
    with trainer:
        optimizer = trainer.prepare(PackedMomentum(model.parameters(), {}))
        for _ in range(3):
            take(trainer, model, optimizer)


def packed_rank(rank: int, folder: Path, num_ranks: int) -> int:
    """The step that training had come to when it was refused."""
    trainer, model = small_trainer(folder, rank, num_ranks, checkpoint_interval=CheckpointInterval(steps=1000))
    with pytest.raises(CheckpointError, match=CANNOT_HOLD):
        take_packed_steps(trainer, model)
    return int(trainer.global_step)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_state_that_no_checkpoint_can_hold_is_refused_after_the_first_step(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    assert ranks.run(num_ranks, packed_rank, tmp_path, num_ranks) == [1] * num_ranks


@pytest.mark.parametrize("asks", [{"checkpoint_interval": CheckpointInterval()}, {"when_save_fails": "warn"}])
def test_state_that_no_checkpoint_can_hold_is_a_warning_where_none_has_to_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asks: dict[str, Any]
) -> None:
    trainer, model = small_trainer(tmp_path, 0, 1, **{"checkpoint_interval": CheckpointInterval(steps=1000), **asks})
    with trainer:
        optimizer = trainer.prepare(PackedMomentum(model.parameters(), {}))
        for _ in range(3):
            take(trainer, model, optimizer)
        (told,) = messages_of(caplog)
        assert re.search(CANNOT_HOLD, told)
        assert told.endswith("; training goes on without")
        later = trainer.propose({"checkpoint.steps": 5}, "what if")
        for _ in range(3):
            take(trainer, model, optimizer)
        assert later.outcome == ("in force" if "when_save_fails" in asks else "refused")
        assert "when_save_fails" in asks or re.search(CANNOT_HOLD, later.refusal)


TORCHAO = """
import sys
import torch
from torchao.optim import AdamW8bit
from elastic_ext import CheckpointInterval, ElasticTrainer, FollowOptions

model = torch.nn.Linear(64, 128)
interval = CheckpointInterval(steps=1000)
with ElasticTrainer(
    model, micro_batch_size=4, shared_storage_path=sys.argv[1], checkpoint_interval=interval,
    follow_options=FollowOptions(job="packed"),
) as trainer:
    optimizer = trainer.prepare(AdamW8bit(model.parameters()))
    for _ in range(3):
        with trainer.step():
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("a step came to its end")
"""


@pytest.mark.slow  # torchao takes seconds to import
def test_the_optimizer_of_torchao_is_refused_after_its_first_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TORCHAO, tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},  # it compiles its step, which takes long and changes nothing
    )
    assert done.returncode == 1
    assert done.stdout == ""
    told = done.stderr.splitlines()[-1]
    assert "CheckpointError: checkpoints cannot hold what the optimizers have made in the first step: " in told
    assert "seeing what a checkpoint would hold failed: weight/exp_avg is a " in told
    assert (
        "OptimState8bit, made of other tensors; allowed: plain tensors and DTensors of them. Use an optimizer" in told
    )


# --- models that are not one ----------------------------------------------------------------------------------------


def stage_rank(rank: int, storage: Path) -> str:
    """A rank of a pipeline, which has made its own stage alone."""
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    with ShardCheckpointer(storage, job="x", timeout_seconds=60.0) as checkpointer:
        with pytest.raises(CheckpointError) as told:
            checkpointer.save(1, model)
        assert checkpointer.latest() is None
    return str(told.value)


def test_models_with_other_names_on_each_rank_are_refused_when_they_are_saved(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, stage_rank, tmp_path)
    assert first == second
    assert "rank 0 has stage0.bias and 1 more in its model, and rank 1 has not; allowed: the same model on" in first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shared_storage_path": ""}, "shared_storage_path is '', as where a variable is not set; allowed: a path"),
        ({"job": ""}, "job is '', which has 0 characters"),
        ({"in_background": "no"}, "in_background is 'no'; allowed: True, False"),
        ({"keep_previous": 1, "in_background": True}, "keep_previous is 1; allowed: True, False"),
    ],
)
def test_what_a_checkpointer_cannot_be_given_is_refused_before_ranks_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        ShardCheckpointer(**{"shared_storage_path": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_name_that_the_environment_gives_a_job_is_refused_as_an_argument_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_JOB", "j" * 300)
    with pytest.raises(ValueError, match="which has 300 characters and takes 300"):
        ShardCheckpointer(tmp_path)
    assert messages_of(caplog) == []


def test_a_file_where_checkpoints_are_to_lie_is_one_error_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fsdp_checkpoint").touch()
    (tmp_path / "file").touch()
    for storage, wrong in ((tmp_path, "fsdp_checkpoint"), (tmp_path / "file", "file")):
        with (
            ShardCheckpointer(storage, job="x") as checkpointer,
            pytest.raises(CheckpointError, match=f"{wrong} is no folder, and checkpoints are to lie there; move it"),
        ):
            checkpointer.claim()
    assert messages_of(caplog) == []


def test_of_a_folder_that_cannot_be_used_a_script_sees_its_own_line_and_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = nn.Linear(2, 2)
    trainer = trainer_of(tmp_path, model, shared_storage_path=tmp_path / "file" / "further")
    with pytest.raises(CheckpointError, match="file is no folder, and checkpoints are to lie there") as caught:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    assert [Path(each.path).name for each in caught.traceback] == ["test_checkpoint_misuse.py", "trainer.py"]
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


class Misplaced(ResumableSlices):
    """A dataset whose position is in a file that is not there."""

    def state_dict(self) -> dict[str, int]:
        return {"position": int((Path(__file__) / "position").read_text())}


def misplaced_rank(rank: int, folder: Path) -> tuple[str, str, bool]:
    """What a trainer raises where rank 0 has no dataset: its words, its traceback, and whether that is left out."""
    model, kind = make_model(), Misplaced if rank == 0 else ResumableSlices
    trainer = trainer_of(folder, shared(model, 2), kind(make_data(24), 2), rank=rank, shared_storage_path=folder / "s")
    with pytest.raises(CheckpointError) as caught:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    return str(caught.value), "".join(traceback.format_exception(caught.value)), caught.value.says_all


def test_an_error_of_the_system_in_the_scripts_own_code_is_raised_with_its_traceback(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, misplaced_rank, tmp_path)
    assert first[0] == second[0] and "rank 0: Not a directory" in first[0]
    assert "test_checkpoint_misuse.py" in first[1] and 'Path(__file__) / "position"' in first[1]
    assert (first[2], second[2]) == (False, False)


@pytest.mark.parametrize("folder", ["/proc/elastic-ext", "loop/further", "n" * 300])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    model = nn.Linear(2, 2)
    trainer = trainer_of(tmp_path, model, shared_storage_path=tmp_path / folder)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be kept in .*; give a shared_storage_path in which"):
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    assert messages_of(caplog) == []
