"""What a loop does between two epochs is in what a run resumes from: schedules, rates, averages, random numbers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.saving.rescue import complete
from elastic_ext.training.checkpoints.signals import EXIT_STATUS
from tests.support.epochs import BATCH, BY_EPOCHS, BY_STEPS, STEPS, Crash, saved_in, train
from tests.support.file_operations import Gate
from tests.support.leaving import started
from tests.support.ranks import RankPool
from tests.support.saving import Small, end_saves
from tests.support.sharded import WAYS
from tests.support.thinning import each_once, the_first
from tests.support.training import make_data, make_model, trainer_of

WAITING: dict[str, Any] = {"save_in_background": False}


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def resumes_bit_for_bit(
    rank: int, folder: Path, kind: str, every: CheckpointInterval, given: dict[str, Any], way: str | None = None
) -> None:
    """A run that crashes after the first step of epoch 2, and goes on from the end of epoch 1, twice."""
    given = {"rank": rank, "way": way, "every": every, **given}
    whole = train(folder, "whole", kind, **given)
    first = train(folder, "run", kind, crash_at=2 * STEPS + 1, **given)
    second = train(folder, "run", kind, crash_at=3 * STEPS + 1, **given)
    third = train(folder, "run", kind, **given)
    assert (second.started_at, third.started_at) == ((2, 2 * STEPS), (3, 3 * STEPS))
    assert first.steps[: 2 * STEPS] + second.steps[:STEPS] + third.steps == whole.steps
    assert third.final == whole.final


@pytest.mark.parametrize(
    ("kind", "every", "given"),
    the_first(
        [
            ("elastic", BY_EPOCHS, {}),
            ("torch's", BY_STEPS, {}),
            ("torch's", BY_EPOCHS, WAITING),
            ("elastic with workers", BY_STEPS, WAITING),
            ("own", BY_EPOCHS, {}),
            ("stream", BY_STEPS, {}),
            ("torch's with workers", BY_EPOCHS, {}),
            ("stream", BY_EPOCHS, WAITING),
            ("own", BY_STEPS, {"overlap_saving": True}),
        ],
        2,
    ),
)
def test_what_a_loop_does_between_two_epochs_is_resumed_bit_for_bit(
    tmp_path: Path, kind: str, every: CheckpointInterval, given: dict[str, Any]
) -> None:
    resumes_bit_for_bit(0, tmp_path, kind, every, given)


@pytest.mark.parametrize(
    ("way", "kind", "every", "given"),
    the_first(
        [
            ("fully_shard", "elastic", BY_STEPS, {}),
            ("ddp", "stream", BY_EPOCHS, WAITING),
            ("ddp", "stream", BY_STEPS, WAITING),
            ("ddp", "torch's", BY_EPOCHS, {}),
            ("fully_shard", "elastic with workers", BY_STEPS, {}),
            ("hybrid", "elastic", BY_EPOCHS, {}),
            ("fully_shard", "elastic", BY_EPOCHS, WAITING),
        ],
        2,
    ),
)
def test_the_same_on_ranks(
    ranks: RankPool, tmp_path: Path, way: str, kind: str, every: CheckpointInterval, given: dict[str, Any]
) -> None:
    ranks.run(WAYS[way].num_ranks, resumes_bit_for_bit, tmp_path, kind, every, given, way)


# --- how often it is saved, and under which names -------------------------------------------------------------------


def num_saves(caplog: pytest.LogCaptureFixture) -> int:
    return sum("was saved in" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("every", [None, BY_EPOCHS, BY_STEPS])
def test_a_loop_that_does_much_between_epochs_saves_each_of_them_once_and_by_default_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: CheckpointInterval | None
) -> None:
    with caplog.at_level(logging.INFO):
        train(tmp_path, "run", every=every)
    names = (
        ["epoch_1", "epoch_2", "epoch_3", "epoch_4"]
        if every is not BY_STEPS
        else sorted(f"step_{4 * n}" for n in range(1, 5))
    )
    assert saved_in(tmp_path / "storage of run") == names
    assert num_saves(caplog) == 4


def test_without_memory_for_copies_an_epoch_is_saved_at_its_end_and_again_if_anything_came_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[str]] = []
    train(
        tmp_path, "run", num_epochs=2, between=lambda *_: seen.append(saved_in(tmp_path / "storage of run")), **WAITING
    )
    assert seen == [["epoch_1"], ["epoch_1", "epoch_2", "step_4"]]
    assert saved_in(tmp_path / "storage of run") == ["epoch_1", "epoch_2", "step_4", "step_8"]


def test_an_epoch_that_is_due_with_a_checkpoint_that_was_asked_for_is_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path / "run")

    def ask(trainer: Any, _: int) -> None:
        if trainer.global_step == 2 * STEPS - 2:
            trainer.propose({"checkpoint.now": True, "checkpoint.epochs": 1}, "to have it")

    with caplog.at_level(logging.INFO):
        train(tmp_path, run.name, num_epochs=3, at_step=ask)
    assert saved_in(tmp_path / "storage of run") == ["epoch_1", "epoch_2", "epoch_3"]
    assert num_saves(caplog) == 3


def test_only_so_many_are_kept_as_are_to_be(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", keep_last=1)
    first = train(tmp_path, "run", keep_last=1, crash_at=2 * STEPS + 1)
    assert saved_in(tmp_path / "storage of run") == ["epoch_2"]
    second = train(tmp_path, "run", keep_last=1)
    assert first.steps[: 2 * STEPS] + second.steps == whole.steps and second.final == whole.final


# --- by hand, and going back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, WAITING])
def test_what_is_saved_by_hand_before_a_validation_is_the_epochs_and_is_saved_again_with_what_came_after_it(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    names: list[str] = []
    whole = train(tmp_path, "whole", **given)
    save: Any = lambda trainer, _: names.append(trainer.save_checkpoint().name)  # noqa: E731
    first = train(tmp_path, "run", between=save, crash_at=2 * STEPS + 1, **given)
    assert names == ["epoch_1", "epoch_2"]
    second = train(tmp_path, "run", **given)
    assert first.steps[: 2 * STEPS] + second.steps == whole.steps and second.final == whole.final


def test_a_run_that_goes_back_between_two_epochs_has_saved_the_one_that_ended(tmp_path: Path) -> None:
    went_back: list[str] = []

    def back(trainer: Any, epoch: int) -> None:
        if epoch == 1 and not went_back:
            went_back.append(trainer.rewind(STEPS).name)
            went_back.extend(saved_in(tmp_path / "storage of run"))

    train(tmp_path, "run", between=back, num_epochs=2)
    assert went_back == ["epoch_1", "epoch_1", "epoch_2"]


# --- what ends a run there ------------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize(("every", "given"), each_once([BY_EPOCHS, BY_STEPS], [{}, WAITING]))
def test_an_exception_between_two_epochs_leaves_a_checkpoint_of_the_epoch_and_who_resumes_is_told_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: CheckpointInterval, given: dict[str, Any]
) -> None:
    train(tmp_path, "run", crash_between=1, every=every, **given)
    caplog.clear()
    resumed = train(tmp_path, "run", every=every, **given)
    assert resumed.started_at == (2, 2 * STEPS)
    (line,) = told(caplog, "between two epochs")
    assert "as epoch 1 ended" in line and "StepLR" in line
    assert resumed.steps[0][3] == 0.4 / 2, "the step of the schedule that was not taken"
    caplog.clear()
    train(tmp_path, "run", every=every, num_epochs=5, **given)
    assert told(caplog, "between two epochs") == []


def test_a_schedule_that_has_stepped_as_its_epoch_ended_is_not_to_be_stepped_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, targets = make_data(BATCH)

    def run() -> int:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "checkpoint_interval": BY_EPOCHS}
        with trainer_of(tmp_path, model, micro_batch_size=BATCH, **options) as trainer:
            optimizer, scheduler = trainer.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 1))
            if trainer.global_step == 0:
                with trainer.epoch():
                    with trainer.step():
                        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                    scheduler.step()
                raise Crash
            return int(scheduler.last_epoch)

    with pytest.raises(Crash):
        run()
    assert run() == 1
    (line,) = told(caplog, "between two epochs")
    assert "StepLR" not in line


def test_who_resumes_where_nothing_is_missing_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, "run", crash_at=STEPS + 1)
    train(tmp_path, "run")
    assert told(caplog, "between two epochs") == []


def crash_between_rank(rank: int, folder: Path, way: str, given: dict[str, Any], alone: bool) -> tuple[int, int]:
    """Rank 1 raises between two epochs; the first one does so later, or once there is a checkpoint."""

    def wait_for_it(*_: Any) -> None:
        deadline = threading.Event()
        for _look in range(300):
            if "epoch_1" in saved_in(folder / "storage of run"):
                return
            deadline.wait(0.1)
        raise AssertionError("no checkpoint came")

    given = {"rank": rank, "way": way, **given}
    if alone and rank == 0:
        train(folder, "run", crash_between=0, between=wait_for_it, **given)
    else:
        train(folder, "run", crash_between=0, **given)
    return train(folder, "run", num_epochs=1, **given).started_at


@pytest.mark.parametrize(
    ("way", "given", "alone"),
    the_first(
        [
            ("ddp", {}, True),
            ("fully_shard", {}, False),
            ("ddp", {"save_on_signals": False}, True),
            ("ddp", WAITING, False),
            ("hybrid", {}, True),
        ],
        3,
    ),
)
def test_ranks_of_which_one_fails_between_two_epochs_leave_its_checkpoint(
    ranks: RankPool, tmp_path: Path, way: str, given: dict[str, Any], alone: bool
) -> None:
    ends = ranks.run(WAYS[way].num_ranks, crash_between_rank, tmp_path, way, given, alone)
    assert set(ends) == {(1, STEPS)}


LOOP = """
import logging, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from elastic_ext import CheckpointInterval, ElasticTrainer, FollowOptions

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
folder, how, num_epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = nn.Linear(4, 4)
if num_ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
dataset = TensorDataset(torch.ones(8, 4))
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, num_ranks, rank))
trainer = ElasticTrainer(
    model,
    loader,
    shared_storage_path=folder + "/storage",
    checkpoint_interval=CheckpointInterval(epochs=1),
    follow_options=FollowOptions(job="job", run_dir=f"{folder}/{rank}"),
)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer, scheduler = trainer.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 1))
print(f"at {trainer.global_step}, epoch {trainer.start_epoch}, rate {scheduler.get_last_lr()[0]:.3g}", flush=True)
for epoch in range(trainer.start_epoch, num_epochs):
    with trainer.epoch(epoch):
        for (inputs,) in loader:
            with trainer.step():
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    if how == "dies":
        raise RuntimeError("a validation fails")
    if how == "pauses":
        print("outside", flush=True)
        time.sleep(100)
    scheduler.step()
"""


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(("num_ranks", "how"), the_first([(1, "dies"), (2, "goes on"), (1, "goes on"), (2, "dies")], 2))
def test_a_script_that_closes_nothing_has_its_last_epochs_checkpoint(tmp_path: Path, num_ranks: int, how: str) -> None:
    with started(tmp_path, LOOP, how, "2" if how == "goes on" else "1", num_ranks=num_ranks) as job:
        statuses = job.end()
        assert statuses == [int(how == "dies")] * num_ranks, job.text
        assert "epoch_2" in job.saved if how == "goes on" else list(job.saved) == ["epoch_1"], job.text
    with started(tmp_path, LOOP, "looks", "0", num_ranks=num_ranks) as job:
        assert job.end() == [0] * num_ranks
        if how == "goes on":
            (found,) = set(job.told("^at (.*), rate .*$"))
            assert found == f"{8 // num_ranks}, epoch 2"
        else:
            assert set(job.told("^at (.*)$")) == {f"{4 // num_ranks}, epoch 1, rate 0.1"}
            assert "between two epochs" in job.text


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("num_ranks", the_first([2, 1]))
def test_a_signal_between_two_epochs_has_the_epochs_checkpoint_written(tmp_path: Path, num_ranks: int) -> None:
    with started(tmp_path, LOOP, "pauses", "2", num_ranks=num_ranks, seconds=5.0) as job:
        job.wait_for("outside")
        assert job.saved == {}
        job.processes[-1].send_signal(signal.SIGTERM)
        assert job.end() == [EXIT_STATUS] * num_ranks, job.text
        assert list(job.saved) == ["epoch_1"], job.text


@pytest.mark.parametrize("kind", the_first(["torch's", "elastic"]))
def test_a_signal_that_comes_with_an_epochs_last_step_has_the_epoch_saved_and_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def end(trainer: Any, _: int) -> None:
        if trainer.global_step == STEPS - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    seen = train(tmp_path, "run", kind, at_step=end)
    assert isinstance(seen.error, SystemExit)
    assert saved_in(tmp_path / "storage of run") == ["epoch_1"]
    caplog.clear()
    assert train(tmp_path, "run", kind).started_at == (1, STEPS)
    assert len(told(caplog, "between two epochs")) == 1


def test_a_schedule_that_steps_within_steps_is_not_named_as_one_that_missed_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, targets = make_data(BATCH)

    def run() -> None:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "checkpoint_interval": BY_EPOCHS}
        with trainer_of(tmp_path, model, micro_batch_size=BATCH, **options) as trainer:
            optimizer, scheduler = trainer.prepare(inner, schedule)
            with trainer.epoch(), trainer.step():
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            raise ZeroDivisionError

    for _ in range(3):  # the third resumes from what the second has only loaded of it
        caplog.clear()
        with pytest.raises(ZeroDivisionError):
            run()
    (line,) = told(caplog, "between two epochs")
    assert "as epoch 1 ended" in line and "StepLR" not in line


# --- where it is begun ----------------------------------------------------------------------------------------------

GOES_ON: dict[str, Callable[[Small], object]] = {
    "an epoch": lambda small: small.trainer.epoch().__enter__(),
    "reset": lambda small: small.trainer.reset(),
    "a step": lambda small: small.take(),
    "by hand": lambda small: small.trainer.save_checkpoint(),
    "close": lambda small: small.trainer.close(),
}


@pytest.mark.parametrize("given", [{}, WAITING])
@pytest.mark.parametrize("how", GOES_ON)
def test_it_is_begun_where_the_loop_goes_on_whatever_comes_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, given: dict[str, Any]
) -> None:
    first = Small(tmp_path, checkpoint_interval=BY_EPOCHS, **given)

    def train_and_crash() -> None:
        with first.trainer:
            with first.trainer.epoch():
                first.take()
            first.optimizer.inner.param_groups[0]["weight_decay"] = 0.25  # by hand
            GOES_ON[how](first)
            raise Crash

    with pytest.raises(Crash):
        train_and_crash()
    assert first.saved == ["epoch_1"] if not given else ["epoch_1", "step_1"]
    with Small(tmp_path, **given).trainer as trainer:
        assert (trainer.start_epoch, trainer.global_step) == (1, 1)
        assert trainer._training.settings.optimizers[0].inner.param_groups[0]["weight_decay"] == 0.25
    assert told(caplog, "between two epochs") == []


def test_a_save_that_fails_as_an_epoch_begins_is_an_error_that_a_loop_can_go_on_after(tmp_path: Path) -> None:
    small = Small(tmp_path, checkpoint_interval=BY_EPOCHS, when_saving="error")
    with small.trainer:
        gate = Gate(small.storage, like="os.mkdir")
        for _ in range(2):
            with small.trainer.epoch():
                small.take()
        with pytest.raises(CheckpointError, match="is due while"):
            small.trainer.epoch().__enter__()
        gate.open()
        end_saves()
        with small.trainer.epoch() as number:
            assert number == 2
            small.take()
    assert small.saved == ["epoch_1", "epoch_3"]


def test_an_agent_completes_the_copy_of_an_epoch_after_which_a_run_was_killed(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf, kept = ram / "shelf", ram / "kept"
    shelf.mkdir()
    monkeypatch.setenv("ELASTIC_EXT_STAGING_DIR", str(shelf))

    def kill(_: Any, epoch: int) -> None:
        if epoch == 1:
            shutil.copytree(shelf, kept)  # a process that is killed leaves it as it is
            shutil.copytree(tmp_path / "storage of run", tmp_path / "storage of killed")

    train(tmp_path, "run", between=kill, crash_between=1)
    assert saved_in(tmp_path / "storage of killed") == ["epoch_1"]
    shutil.rmtree(tmp_path / "storage of run")
    shutil.copytree(tmp_path / "storage of killed", tmp_path / "storage of run")
    (outcome,) = complete(kept)
    assert outcome.path is not None and outcome.path.name == "epoch_2", outcome.why
    caplog.clear()
    assert train(tmp_path, "run").started_at == (2, 2 * STEPS)
    assert len(told(caplog, "as epoch 1 ended")) == 1
