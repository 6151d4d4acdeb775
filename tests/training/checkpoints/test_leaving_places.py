"""Wherever a training is when SIGTERM or SIGUSR1 comes, and whoever else is sent it, it ends with what it came to."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elastic_ext.training.checkpoints.signals import EXIT_STATUS
from tests.support.leaving import Job, started
from tests.support.thinning import the_first

pytestmark = pytest.mark.usefixtures("forked_jobs")

LOOP = """
import hashlib, logging, os, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from elastic_ext import CheckpointInterval, ElasticTrainer, FollowOptions

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
folder, where, num_samples = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(what):
    sys.stdout.write(what + "\\n")  # at once: several write to what torchrun's output is
    sys.stdout.flush()


def pause(*places):
    global where
    if where in places:
        say(where)
        where = ""
        sys.stdin.readline()


class Numbers(Dataset):
    def __len__(self):
        return num_samples

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Model(nn.Linear):
    def get_extra_state(self):
        if not is_prepared:
            pause("preparing")
        elif is_asked_for or trainer._training.saving._leaving.is_asked:  # and this is no copy in between
            pause("saving", "ending")
        return torch.zeros(1)

    def set_extra_state(self, state):
        if is_prepared:
            pause("rewinding")


class NoticesLoss(logging.Handler):
    def emit(self, record):
        if "are not heard of any more" in record.msg:
            say("alone")


logging.getLogger("elastic_ext.training.checkpoints.signals").addHandler(NoticesLoss())
logging.getLogger("elastic_ext.training.checkpoints.signals").setLevel(logging.DEBUG)


def held_up(file, fsync=os.fsync):
    if is_prepared and threading.current_thread() is not threading.main_thread():
        pause("background")
    return fsync(file)


if where == "background":
    os.fsync = held_up
is_prepared = is_asked_for = False
model = Model(4, 4)
if num_ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
workers = {"num_workers": 2 // num_ranks, "persistent_workers": True} if where == "loader" else {}
loader = DataLoader(Numbers(), batch_size=2, **workers)
trainer = ElasticTrainer(
    model,
    loader,
    shared_storage_path=folder + "/storage",
    checkpoint_interval=CheckpointInterval(steps=3 if where in ("background", "rewinding") else 1000),
    follow_options=FollowOptions(job="job", run_dir=f"{folder}/{rank}"),
)
try:
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=1e-6))
        is_prepared = True
        say(f"at {trainer.global_step}, epoch {trainer.start_epoch}")
        for epoch in range(trainer.start_epoch, 0 if where == "looking" else 1000):
            with trainer.epoch(epoch):
                for batch in loader:
                    with trainer.step():
                        model(batch).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        if trainer.num_steps == len(loader) - 1:
                            pause("last step")
                        if trainer.num_steps == len(loader) - 2:
                            pause("last step but one")
                    say(f"epoch {epoch} had {batch[0, 0]:.0f}")
                    if where == "failing" and trainer._training.saving.can_write():
                        say("copied")
                        while not trainer._training.saving._leaving.is_asked:
                            time.sleep(0.01)
                        raise RuntimeError("DataLoader worker is killed")
                    if trainer.global_step == 5:
                        say(f"pid of rank {rank}: {os.getpid()}")
                        say("steps")
                        if where == "saving":
                            is_asked_for = True
                            say(f"saved {trainer.save_checkpoint().name}")
                        if where == "rewinding":
                            say(f"back at {trainer.rewind().name}")
                        if where == "deep":
                            hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)  # which comes back from no signal
            if where == "resumed":
                break
except BaseException as error:
    say(f"rank {rank} ends: {error!r}")
    raise
"""


def in_place(
    folder: Path,
    where: str = "steps",
    *,
    num_ranks: int = 1,
    num_samples: int = 100_000,
    launched: bool = False,
    seconds: float = 60.0,
) -> AbstractContextManager[Job]:
    return started(folder, LOOP, where, str(num_samples), num_ranks=num_ranks, launched=launched, seconds=seconds)


def begins_at(folder: Path, *, num_ranks: int = 1) -> list[str]:
    """What each rank of another run of the job says of where it begins."""
    with in_place(folder, "looking", num_ranks=num_ranks) as job:
        assert set(job.end()) == {0}, job.text
        return job.told("^at (.*)$")


# ---- under a launcher ----


@pytest.mark.parametrize("num_ranks", the_first([1, 2]))
def test_torchrun_that_is_told_to_end_ends_its_workers_with_a_checkpoint_and_goes_on_from_there(
    tmp_path: Path, num_ranks: int
) -> None:
    with in_place(tmp_path, "loader", num_ranks=num_ranks, launched=True) as job:  # whose workers are sent it as well
        job.wait_for("steps", times=num_ranks)
        job.send(signal.SIGTERM)
        job.end()
        ended = sorted(job.told(r"^rank (\d) ends: SystemExit\(143\)$"))
        assert ended == [str(rank) for rank in range(num_ranks)], job.text
        assert job.left_over() == []
        ((name, step),) = job.saved.items()
    assert step >= 5 and name == f"step_{step}"
    assert begins_at(tmp_path, num_ranks=num_ranks) == [f"{step}, epoch 0"] * num_ranks


@pytest.mark.slow
def test_torchrun_says_143_of_workers_of_which_one_was_sent_sigusr1(tmp_path: Path) -> None:
    with in_place(tmp_path, num_ranks=2, launched=True) as job:
        job.wait_for("steps", times=2)
        (pid,) = job.told(r"^pid of rank 1: (\d+)$")
        os.kill(int(pid), signal.SIGUSR1)
        assert job.end() == [1]
        assert sorted(job.told(r"^rank (\d) ends: SystemExit\(143\)$")) == ["0", "1"], job.text
        # When one has ended torchrun sends the other SIGTERM, which may have given the signals back by then.
        assert "143" in job.told(r"exitcode +: (\S+)")
        assert len(job.saved) == 1


# ---- with a loader's workers ----


@pytest.mark.parametrize("to_group", [False, True])
def test_no_worker_of_a_loader_ends_a_training_that_is_told_to_end_nor_outlives_it(
    tmp_path: Path, to_group: bool
) -> None:
    with in_place(tmp_path, "loader") as job:
        job.wait_for("steps")
        assert len(job.note_children()) >= 2
        if to_group:
            job.send_to_group(signal.SIGTERM)
        else:
            job.send(signal.SIGTERM)
        assert job.end() == [EXIT_STATUS], job.text
        assert job.left_over() == []
        assert len(job.saved) == 1


@pytest.mark.parametrize("num_ranks", the_first([2, 1]))
def test_a_training_that_fails_by_the_signal_has_what_was_copied_last_saved(tmp_path: Path, num_ranks: int) -> None:
    with in_place(tmp_path, "failing", num_ranks=num_ranks) as job:
        job.wait_for("copied", of=0)
        job.send(signal.SIGTERM)
        assert job.end() == [EXIT_STATUS] * num_ranks, job.text
        assert "training was told to end, and then failed: RuntimeError: DataLoader worker is killed" in job.text
        (step,) = job.saved.values()
    assert begins_at(tmp_path, num_ranks=num_ranks) == [f"{step}, epoch 0"] * num_ranks


# ---- in other places of a training ----


def test_before_there_is_anything_to_save_a_signal_ends_a_process_as_ever(tmp_path: Path) -> None:
    with in_place(tmp_path, "preparing") as job:
        job.wait_for("preparing")
        began = time.monotonic()
        job.send(signal.SIGTERM)
        assert job.end() == [-signal.SIGTERM]
        assert time.monotonic() - began < 10
        assert job.saved == {}


@pytest.mark.parametrize(
    ("where", "first", "num_undone"),
    [
        ("background", "step_3", 0),
        pytest.param("saving", "step_5", 0, marks=pytest.mark.slow),
        pytest.param("rewinding", "step_3", 2, marks=pytest.mark.slow),
    ],
)
def test_what_a_signal_comes_into_is_done_and_then_the_newest_is_saved(
    tmp_path: Path, where: str, first: str, num_undone: int
) -> None:
    with in_place(tmp_path, where) as job:
        job.wait_for(where)
        assert job.saved == ({} if where != "rewinding" else {first: 3})
        job.send(signal.SIGTERM)
        job.go_on()
        assert job.end() == [EXIT_STATUS], job.text
        assert first in job.saved, job.text
        assert max(job.saved.values()) == len(job.told(r"^epoch 0 had (\d+)$")) - num_undone


@pytest.mark.parametrize("where", ["last step", pytest.param("last step but one", marks=pytest.mark.slow)])
def test_at_an_epochs_end_that_is_saved_and_the_next_one_comes_next(tmp_path: Path, where: str) -> None:
    with in_place(tmp_path, where, num_samples=20) as job:
        job.wait_for(where)
        job.send(signal.SIGTERM)
        job.go_on()
        assert job.end() == [EXIT_STATUS], job.text
        assert job.told(r"^epoch (\d+ had \d+)$") == [f"0 had {first}" for first in range(0, 20, 2)]
        assert job.saved == {"step_10": 10}
    with in_place(tmp_path, "resumed", num_samples=20) as job:
        assert job.end() == [0], job.text
        assert job.told("^at (.*)$") == ["10, epoch 1"]
        assert job.told(r"^epoch (\d+ had \d+)$") == [f"1 had {first}" for first in range(0, 20, 2)]


# ---- more than one signal, and peers that do not come ----


def test_signals_that_come_while_one_is_obeyed_change_nothing(tmp_path: Path) -> None:
    with in_place(tmp_path, "ending") as job:
        job.wait_for("steps")
        job.send(signal.SIGTERM)
        job.wait_for("ending")
        job.send(signal.SIGTERM)
        job.send(signal.SIGUSR1)
        job.go_on()
        assert job.end() == [EXIT_STATUS], job.text
        assert list(job.saved.values()) == [len(job.told(r"^epoch 0 had (\d+)$"))]


def test_ranks_that_are_all_sent_it_end_with_one_checkpoint_of_one_step(tmp_path: Path) -> None:
    with in_place(tmp_path, num_ranks=2) as job:
        job.wait_for("steps")
        job.send(signal.SIGTERM, to=0)
        job.send(signal.SIGTERM, to=1)
        assert job.end() == [EXIT_STATUS] * 2, job.text
        (step,) = job.saved.values()
        assert [sum(line.startswith("epoch 0 had ") for line in lines) for lines in job.lines] == [step] * 2


@pytest.mark.parametrize(
    ("stuck", "said"),
    [
        (1, "the ranks' store does not answer"),  # which rank 0 has
        pytest.param(
            0, "nothing (newer )?is saved|rank 1 has not said", marks=pytest.mark.slow
        ),  # with a copy or without
    ],
)
def test_a_rank_that_waits_for_one_that_stands_still_ends_in_the_time_it_has(
    tmp_path: Path, stuck: int, said: str
) -> None:
    with in_place(tmp_path, num_ranks=2, seconds=4.0) as job:
        job.wait_for("steps")
        job.send(signal.SIGSTOP, to=1 - stuck)
        began = time.monotonic()
        job.send(signal.SIGTERM, to=stuck)
        assert job.processes[stuck].wait(30) == EXIT_STATUS
        assert time.monotonic() - began < 20  # of which 4 are the time it has
        job.processes[1 - stuck].kill()
        job.end()
        assert re.search(said, "\n".join(job.lines[stuck]))


def test_a_rank_that_is_stuck_and_alone_with_its_store_gone_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with in_place(tmp_path, "deep", num_ranks=2, seconds=10.0) as job:
        job.wait_for("steps")
        job.send(signal.SIGKILL, to=0)
        job.wait_for("alone", of=1)
        began = time.monotonic()
        job.send(signal.SIGTERM, to=1)
        assert job.processes[1].wait(30) == EXIT_STATUS
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_rank_whose_peer_is_dead_waits_for_no_step(tmp_path: Path) -> None:
    with in_place(tmp_path, "deep", num_ranks=2) as job:
        job.wait_for("steps")
        job.send(signal.SIGKILL, to=1)
        began = time.monotonic()
        job.send(signal.SIGTERM, to=0)
        assert job.processes[0].wait(60) == EXIT_STATUS
        assert time.monotonic() - began < 30
        job.end()
        assert "a rank gives no sign: nothing newer is saved" in job.text
