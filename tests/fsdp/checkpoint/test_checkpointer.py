"""ShardCheckpointer: what its users do with it besides saving and loading once."""

from __future__ import annotations

import gc
import os
import platform
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elastic_ext.errors import CheckpointError, CheckpointFenced, CheckpointMismatch
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.commit import read_commit
from elastic_ext.fsdp.checkpoint.job import versions
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.trials import Trial, run_trials


def test_one_that_was_dropped_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = ShardCheckpointer(tmp_path, job="x")
    first.save(1, model)
    del first
    gc.collect()
    with ShardCheckpointer(tmp_path, job="x") as second:
        assert second.load(model).step == 1
        assert second.save(2, model).name == "step_2"


def test_a_checkpoint_says_which_programs_saved_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        said = read_commit(checkpointer.save(1, nn.Linear(2, 2))).versions
    assert said == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "elastic_ext": metadata.version("elastic-ext"),
    }
    monkeypatch.setattr("sys.path", [])  # where it is not installed
    assert versions() == {name: version for name, version in said.items() if name != "elastic_ext"}


def test_a_claim_that_took_too_long_is_given_back_and_taken_anew(ranks: RankPool, tmp_path: Path) -> None:
    trial = Trial(fn=late_claim_rank, args=(tmp_path / "storage",), num_ranks=1)
    ((end,),) = run_trials(ranks, tmp_path / "ends", [trial])
    assert end.error is None, end.trace


def late_claim_rank(_: int, storage: Path) -> None:
    model = nn.Linear(2, 2)
    with ShardCheckpointer(storage, job="x") as first:
        first.save(1, model)
    answer = threading.Event()
    with ShardCheckpointer(storage, job="x", storage_timeout_seconds=0.1) as impatient:
        FileOperations(storage, answer.wait, 0, like="RUN.json")
        with pytest.raises(CheckpointError, match="the storage took longer than"):
            impatient.claim()
        answer.set()  # so that what was begun comes to the folder after all, and gives it back
        for thread in threading.enumerate():
            if thread.name == "elastic_ext checkpoint":
                thread.join(60)
        with ShardCheckpointer(storage, job="x") as patient:
            patient.load(model)
            assert patient.save(2, model).name == "step_2"


def test_a_folder_in_use_is_told_as_that_however_soon_storage_is_given_up(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ShardCheckpointer(tmp_path, job="x") as holder:
        holder.save(1, model)
        with ShardCheckpointer(tmp_path, job="x", timeout_seconds=8.0) as second:
            with pytest.raises(CheckpointFenced, match=f"in use by another run of this job .process {os.getpid()} on"):
                second.save(2, model)
            holder.close()
            second.load(model)
            assert second.save(2, model).name == "step_2"


def test_a_job_is_named_by_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_JOB", "from-outside")
    with ShardCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, nn.Linear(2, 2)).parent.name.startswith("from-outside_")
    with ShardCheckpointer(tmp_path, job="given") as checkpointer:
        assert checkpointer.save(1, nn.Linear(2, 2)).parent.name.startswith("given_")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launched")
    with ShardCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.save(2, nn.Linear(2, 2)).parent.name.startswith("from-outside_")
    monkeypatch.delenv("ELASTIC_EXT_JOB")
    with ShardCheckpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, nn.Linear(2, 2))
        assert path.parent.name.startswith("launched_")
    with ShardCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == path, "a job that is started again finds its folder"


def test_waiting_after_a_save_finds_it_done(tmp_path: Path) -> None:
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        checkpointer.wait()
        path = checkpointer.save(1, nn.Linear(2, 2))
        checkpointer.wait()
        assert checkpointer.latest() == path


class _Lazy(torch.optim.SGD):
    """Makes state for a parameter that it does not know yet."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.param_groups[0]["params"]:
            if part.grad is not None:
                if part not in self.state:
                    self.state[part]["count"] = 0
                self.state[part]["count"] += 1


def test_a_parameter_without_state_is_as_unknown_to_its_optimizer_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = _Lazy(model.parameters(), lr=0.1)
    model.weight.grad = torch.zeros(2, 2)
    optimizer.step()
    with ShardCheckpointer(tmp_path, job="x") as checkpointer:
        checkpointer.save(1, model, optimizer)
        later = _Lazy(model.parameters(), lr=0.1)
        checkpointer.load(model, later)
    model.bias.grad = torch.zeros(2)
    later.step()
    assert [later.state[part] for part in model.parameters()] == [{"count": 2}, {"count": 1}]


class _Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.counts: DTensor
        self.register_buffer("counts", distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]))


def cut_buffer_rank(rank: int, folder: Path) -> None:
    model = _Cut()
    before = model.counts.to_local().clone()
    with ShardCheckpointer(folder, job="x") as checkpointer:
        path = checkpointer.save(1, model)
        model.counts.to_local().zero_()
        checkpointer.load(model)
    assert torch.equal(model.counts.to_local(), before)
    assert not [name for name in os.listdir(path) if name.startswith("extra_param")]


def test_buffers_that_are_cut_over_ranks_come_back(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, cut_buffer_rank, tmp_path)


def test_values_of_another_job_change_nothing_of_where_this_one_stands(tmp_path: Path) -> None:
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    with ShardCheckpointer(tmp_path, job="teacher") as checkpointer:
        path = checkpointer.save(10_000, teacher)
    with ShardCheckpointer(tmp_path, job="student") as checkpointer:
        checkpointer.save(100, student)
        checkpointer.load(student, path=path)
        assert torch.equal(student.weight, teacher.weight)
        second = checkpointer.save(200, student)
        assert checkpointer.latest() == second
    assert len(list(second.parent.glob("step_*"))) == 2


@pytest.mark.parametrize("seconds", [0.0, 20.0, 30.0])
def test_storage_is_not_waited_for_longer_than_ranks_wait_for_one_another(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match="allowed: more than 0 and less than timeout_seconds, 20"):
        ShardCheckpointer(tmp_path, job="a", timeout_seconds=20.0, storage_timeout_seconds=seconds)


def test_another_optimizer_is_not_given_the_state_of_the_old_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    old = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    old.step()
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    with ShardCheckpointer(tmp_path, job="a") as checkpointer:
        checkpointer.save(1, model, old)
        with pytest.raises(CheckpointMismatch, match="the state of AdamW, and here is SGD"):
            checkpointer.load(model, new)
        checkpointer.load(model, new, strict=False)
    assert new.param_groups[0]["lr"] == 0.1
    assert not new.state


def unlike_rank(rank: int, storage: Path) -> list[bytes]:
    """A model that does not fit, on the second rank alone."""
    model = nn.Linear(2, 2)
    with ShardCheckpointer(storage, job=f"named by rank {rank}") as checkpointer:
        checkpointer.save(1, model)
        other = nn.Linear(2, 2 + rank)
        before = [part.detach().numpy().tobytes() for part in other.parameters()]
        with pytest.raises(CheckpointMismatch, match="do not go together"):
            checkpointer.load(other)
        assert [part.detach().numpy().tobytes() for part in other.parameters()] == before
        checkpointer.load(model)
        checkpointer.save(2, model)
    return before


def test_what_does_not_fit_on_one_rank_is_touched_on_none_and_the_first_rank_names_the_job(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, unlike_rank, tmp_path)
    (folder,) = (tmp_path / "fsdp_checkpoint").glob("[!.]*")
    assert folder.name.startswith("named%20by%20rank%200_")


def test_the_traceback_of_what_failed_is_in_the_log_of_the_rank_where_it_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ShardCheckpointer(tmp_path, job="a") as checkpointer:
        with pytest.raises(CheckpointError, match="extra/a is a object, which cannot be saved"):
            checkpointer.save(1, nn.Linear(2, 2), None, {"a": object()})
        assert "beginning checkpoint step_1 failed on rank 0" in caplog.text
        assert "in save\n" not in caplog.text and "in _pack\n" in caplog.text, "from where it was caught on"
        caplog.clear()
        with pytest.raises(CheckpointError, match="has no checkpoint of job"):
            checkpointer.load(nn.Linear(2, 2))
        assert "Traceback" not in caplog.text, "what says all by itself needs none"
