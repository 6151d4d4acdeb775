"""SIGTERM and SIGUSR1 end a training with a checkpoint of what it came to, on all ranks, and exit status 143."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elastic_ext.fsdp.checkpoint.letters import OwnStore
from elastic_ext.leaving import EXIT_STATUS, Leaving
from tests.leaving import Job, started

LOOP = """
import hashlib, logging, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from elastic_ext import CheckpointInterval, ElasticTrainer

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
    checkpoint_interval=None if where == "within" else CheckpointInterval(steps=1000),
    run_dir=f"{folder}/{rank}",
    job="job",
    save_on_signals=where != "off",
)
trainer.register_state("average", average)


def say(what):
    print(what, flush=True)


with trainer:
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    say(f"at {trainer.global_step}")
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
                if where == "evaluation" and trainer._session.checkpoints.has_newest():
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


@pytest.mark.parametrize(("num_ranks", "number"), [(1, signal.SIGUSR1), (1, signal.SIGTERM), (2, signal.SIGTERM)])
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
        state = json.loads(next(tmp_path.glob(f"storage/*/*/{name}/trainer_state.json")).read_text())
        assert state["counts"]["global_step"] == step
    with job_in(tmp_path, 1, num_steps=1, where="outside") as job:
        job.wait_for(f"at {step}")


@pytest.mark.parametrize(("num_ranks", "where"), [(2, "outside"), (1, "deep")])
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


@pytest.mark.parametrize("num_ranks", [1, 2])
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


def test_a_process_that_is_forked_is_ended_by_its_own_signal_and_nothing_else_is() -> None:
    leaving, asked = leaving_of(OwnStore())
    leaving.start()
    try:
        child = os.fork()
        if child == 0:
            while True:
                time.sleep(1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not asked.wait(0.6)
    finally:
        leaving.stop()


def leaving_of(store: OwnStore, *, seconds: float = 60.0, can_write: bool = True) -> tuple[Leaving, threading.Event]:
    asked = threading.Event()
    leaving = Leaving(
        store, seconds=seconds, request=asked.set, can_write=lambda: can_write, write=lambda _: "nothing is written"
    )
    return leaving, asked


def test_a_signal_to_one_rank_is_heard_by_the_others_and_handlers_are_given_back() -> None:
    store = OwnStore()
    (mine, asked), (other, heard) = leaving_of(store), leaving_of(store)
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
