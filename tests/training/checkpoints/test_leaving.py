"""SIGTERM and SIGUSR1 end a training with a checkpoint of what it came to, on all ranks, and exit status 143."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext import CheckpointInterval, ElasticTrainer
from elastic_ext.ranks.board import Board
from elastic_ext.records.metrics import CAN_GO_ON
from elastic_ext.training.checkpoints.signals import EXIT_STATUS, Leaving
from tests.support.leaving import Job, started
from tests.support.stores import PlainStore
from tests.support.thinning import the_first
from tests.support.told_to_end import ToldToEnd
from tests.support.training import ResumableSlices, grouped, make_data

pytestmark = pytest.mark.usefixtures("forked_jobs")

LOOP = """
import hashlib, logging, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticTrainer, FollowOptions

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
folder, where, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = nn.Linear(4, 4)
if num_ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
if where == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
average = torch.zeros(4, 4)
trainer = ElasticTrainer(
    model,
    micro_batch_size=2,
    shared_storage_path=folder + "/storage",
    checkpoint_interval=CheckpointInterval() if where == "within" else CheckpointInterval(steps=1000),
    follow_options=FollowOptions(job="job", run_dir=f"{folder}/{rank}"),
    checkpoint_options=CheckpointOptions(save_on_signals=where != "off"),
)
trainer.register_state("average", average)


def say(what):
    print(what, flush=True)


with trainer:
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    say(f"at {trainer.global_step}")
    if where == "idle":
        say("idle")
        time.sleep(100)
    for epoch in range(trainer.start_epoch, 1000):
        with trainer.epoch(epoch):
            for _ in range(num_steps):
                with trainer.step():
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                average.fill_(trainer.global_step)
                time.sleep(0.002)
                if trainer.global_step == 5:
                    say("steps")
                    if where == "within":
                        say("within")
                        time.sleep(100)
                if where == "evaluation" and trainer._training.saving.can_write():
                    say("evaluation")
                    time.sleep(100)
        if where == "end":
            os.kill(os.getpid(), signal.SIGTERM)
            break
        if where == "outside":
            say("outside")
            time.sleep(100)
        if where == "deep":
            threading.Timer(0.1, say, ["outside"]).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)  # which comes back from no signal
say("going on")
"""


def job_in(
    folder: Path, num_ranks: int, where: str = "steps", *, num_steps: int = 10_000, seconds: float = 60.0
) -> AbstractContextManager[Job]:
    return started(folder, LOOP, where, str(num_steps), num_ranks=num_ranks, seconds=seconds)


_GOES_ON = "training was told to end, and can go on from step"


def told_on(folder: Path, num_ranks: int) -> list[tuple[int, str]]:
    """What each rank has written of where training can go on."""
    found = []
    for rank in range(num_ranks):
        lines = (folder / str(rank) / f"events-{rank}.jsonl").read_text().splitlines()
        (event,) = [event for event in map(json.loads, lines) if event["kind"] == CAN_GO_ON]
        found.append((event["step"], event["text"]))
    return found


def folder_of(folder: Path, name: str) -> Path:
    return next(folder.glob(f"storage/*/*/{name}"))


@pytest.mark.parametrize(
    ("num_ranks", "number"), the_first([(2, signal.SIGTERM), (1, signal.SIGUSR1), (1, signal.SIGTERM)])
)
def test_in_steps_all_ranks_finish_the_same_one_and_it_is_saved(
    tmp_path: Path, num_ranks: int, number: signal.Signals
) -> None:
    with job_in(tmp_path, num_ranks) as job:
        job.wait_for("steps")
        job.processes[-1].send_signal(number)
        job.processes[-1].send_signal(number)  # as a launcher and its process group may both do
        assert job.end() == [EXIT_STATUS] * num_ranks, job.text
        ((name, step),) = job.saved.items()
        assert step >= 5 and name == f"step_{step}"
        words = f"{_GOES_ON} {step}: {folder_of(tmp_path, name)} is saved"
        assert told_on(tmp_path, num_ranks) == [(step, words)] * num_ranks
        metrics = [json.loads((tmp_path / f"{rank}/metrics-{rank}.json").read_text()) for rank in range(num_ranks)]
        assert [each["step"] for each in metrics] == [step] * num_ranks
        assert metrics[0]["measures"]["checkpoint_step"] == step
        state = json.loads(next(tmp_path.glob(f"storage/*/*/{name}/trainer_state.json")).read_text())
        assert state["counts"]["global_step"] == step
    with job_in(tmp_path, 1, num_steps=1, where="outside") as job:
        job.wait_for(f"at {step}")


@pytest.mark.parametrize(("num_ranks", "where"), the_first([(2, "outside"), (1, "deep")]))
def test_outside_of_steps_what_the_last_epoch_came_to_is_saved(tmp_path: Path, num_ranks: int, where: str) -> None:
    with job_in(tmp_path, num_ranks, where, num_steps=7, seconds=5.0) as job:
        job.wait_for("outside")
        assert job.saved == {}
        job.processes[0].send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert job.end() == [EXIT_STATUS] * num_ranks, job.text
        assert time.monotonic() - began < 20
        assert job.saved == {"step_7": 7}, job.text
        assert "is what there is to go on from" in job.text
    for step, text in told_on(tmp_path, num_ranks):
        assert step == 7 and text.startswith(f"{_GOES_ON} 7: {folder_of(tmp_path, 'step_7')} is what there is to go on")


@pytest.mark.parametrize("num_ranks", the_first([2, 1]))
def test_in_the_middle_of_an_epoch_what_was_copied_of_it_last_is_saved(tmp_path: Path, num_ranks: int) -> None:
    with job_in(tmp_path, num_ranks, "evaluation", seconds=8.0) as job:
        job.wait_for("evaluation")
        job.processes[-1].send_signal(signal.SIGTERM)
        assert job.end() == [EXIT_STATUS] * num_ranks, job.text
        [(name, step)] = job.saved.items()
        assert name == f"step_{step}"
        assert "what there is to go on from" in job.text
    with job_in(tmp_path, num_ranks, "steps") as job:
        job.wait_for(f"at {step}")


def test_a_handler_of_the_users_own_stays_and_so_does_everything_if_they_say_so(tmp_path: Path) -> None:
    with job_in(tmp_path, 1, "own handler") as job:
        job.wait_for("steps")
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.end() == [7]
    with job_in(tmp_path, 1, "off") as job:
        job.wait_for("steps")
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.end() == [-signal.SIGTERM]
    assert job.saved == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_that_is_forked_is_ended_by_its_own_signal_and_nothing_else_is(number: signal.Signals) -> None:
    leaving, asked = leaving_of()
    leaving.start()
    try:
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(1)
        os.kill(child, number)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == number
        assert not asked.wait(0.6)
    finally:
        leaving.stop()


def leaving_of(board: Board | None = None) -> tuple[Leaving, threading.Event]:
    training = ToldToEnd(can_write=True)
    return Leaving(board or Board(PlainStore(), "job"), training, seconds=60.0), training.asked


@pytest.mark.parametrize(
    ("can_write", "has_some", "at"), [(True, True, 0.5), (False, True, 0.75), (False, False, None)]
)
def test_it_is_waited_longer_for_a_step_where_nothing_newer_was_copied(
    can_write: bool, has_some: bool, at: float | None
) -> None:
    leaving = Leaving(Board(PlainStore(), "job"), ToldToEnd(can_write=can_write, has_some=has_some), seconds=100.0)
    waited = [part for part in (0.4, 0.5, 0.6, 0.75, 0.8) if leaving._has_waited(part * leaving._seconds + 0.01)]
    leaving.stop()
    assert (waited[0] if waited else None) == at


def test_a_signal_to_one_rank_is_heard_by_the_others_and_handlers_are_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    board = Board(PlainStore(), "job")
    (mine, asked), (other, heard) = leaving_of(board), leaving_of(board)
    before = signal.getsignal(signal.SIGUSR1)
    mine.start()
    other.start()  # the signals are taken by then
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert asked.wait(30) and heard.wait(30)
        assert mine.claim() and other.claim()
    finally:
        mine.stop()
        other.stop()
    assert signal.getsignal(signal.SIGUSR1) is before
    what = "training is to end; the step under way is saved first, if it ends in time"
    assert {f"SIGUSR1: {what}", f"a signal to another rank: {what}"} <= {*caplog.messages}


def test_a_handler_that_the_script_installs_later_is_the_only_one() -> None:
    leaving, asked = leaving_of()
    before = signal.getsignal(signal.SIGUSR1)
    leaving.start()
    own = threading.Event()
    try:
        signal.signal(signal.SIGUSR1, lambda *_: own.set())
        signal.raise_signal(signal.SIGUSR1)
        assert own.wait(30) and not asked.wait(0.6)
    finally:
        leaving.stop()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_somebody_takes_in_c_stays_theirs(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        leaving, asked = leaving_of()
        try:
            leaving.start()
            signal.raise_signal(signal.SIGUSR1)
            assert not asked.wait(0.6)
            leaving.stop()
            signal.raise_signal(signal.SIGUSR1)
        finally:
            leaving.stop()
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "stacks").read_text().count("most recent call first") >= 2


def test_the_trainer_that_was_prepared_last_takes_the_signals_and_gives_them_back() -> None:
    (first, is_first), (second, is_second) = leaving_of(), leaving_of()
    before = signal.getsignal(signal.SIGUSR1)
    first.start()
    second.start()
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert is_second.wait(30) and not is_first.is_set()
        second.stop()
        signal.raise_signal(signal.SIGUSR1)
        assert is_first.wait(30)
    finally:
        second.stop()
        first.stop()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_before_the_first_step_nobody_waits_for_one(tmp_path: Path) -> None:
    with job_in(tmp_path, 1, "idle") as job:
        job.wait_for("idle")
        job.processes[0].send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert job.end() == [EXIT_STATUS], job.text
        assert time.monotonic() - began < 25  # of 60
    assert "there is nothing to save yet" in job.text


class Noisy(ResumableSlices):
    """Its samples have noise, drawn as they are handed out."""

    def __iter__(self) -> Iterator[Any]:
        for inputs, targets in super().__iter__():
            yield inputs + 0.1 * torch.randn_like(inputs), targets


def train(folder: Path, *, signal_at: int | None = None) -> tuple[int, torch.Tensor]:
    """To step 12, from wherever the job in this folder is; where it began, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5, dtype=torch.float64)
    source = Noisy(make_data(200), 4)
    arguments: dict[str, Any] = {"shared_storage_path": folder, "job": "job", "run_dir": folder / "run"}
    arguments |= {"checkpoint_interval": CheckpointInterval(steps=1000)}
    with ElasticTrainer(model, source, global_batch_size=4, **grouped(**arguments)) as trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        began_at = trainer.global_step
        with trainer.epoch(trainer.start_epoch):
            for inputs, targets in source:
                with trainer.step():
                    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    if trainer.global_step == signal_at:
                        signal.raise_signal(signal.SIGUSR1)
                if trainer.global_step == 12:
                    break
    return began_at, model.weight.detach().clone()


def test_a_training_that_was_told_to_end_goes_on_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "whole")
    with pytest.raises(SystemExit, match=str(EXIT_STATUS)):
        train(tmp_path / "told", signal_at=5)
    began_at, weights = train(tmp_path / "told")
    assert began_at > 0 and torch.equal(weights, expected)


def train_with_scaler(folder: Path) -> None:
    """Four steps, each of them saved, and then those that the scaler leaves out, until it is told to end."""
    model = torch.nn.Linear(2, 2)
    arguments: dict[str, Any] = {"shared_storage_path": folder, "job": "job", "run_dir": folder / "run"}
    arguments |= {"checkpoint_interval": CheckpointInterval(steps=1), "agree_every_steps": 1}
    with ElasticTrainer(model, micro_batch_size=1, **grouped(**arguments)) as trainer:
        optimizer, scaler = trainer.prepare(
            torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu")
        )
        for number in range(100):
            with trainer.step():
                loss = model(torch.ones(1, 2)).sum() * (math.inf if number > 3 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if number == 5:
                    signal.raise_signal(signal.SIGUSR1)


def test_what_a_scaler_left_out_since_the_last_checkpoint_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match=str(EXIT_STATUS)), caplog.at_level("INFO"):
        train_with_scaler(tmp_path)
    assert "nothing is saved again" in caplog.text and "step_4" in caplog.text


def test_where_nothing_is_held_and_no_step_ends_it_is_said_and_the_process_ends(tmp_path: Path) -> None:
    with job_in(tmp_path, 1, "within", seconds=3.0) as job:
        job.wait_for("within")
        job.processes[0].send_signal(signal.SIGUSR1)
        assert job.end() == [EXIT_STATUS], job.text
    assert job.saved == {}
    assert "after SIGUSR1 no step has ended: nothing is saved" in job.text


def test_at_the_end_of_training_it_is_no_less_heard(tmp_path: Path) -> None:
    with job_in(tmp_path, 1, "end", num_steps=5) as job:
        assert job.end() == [EXIT_STATUS], job.text
        assert "going on" not in job.text
        assert job.saved == {"step_5": 5}
