"""elastic-ext config beside a job that runs: what its ranks make of a version is waited for, told and built upon."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW, lr_scheduler
from torch.utils.data import TensorDataset

from elastic_ext import ConfigFollower, ElasticConfig, ElasticDataLoader, follow_config
from elastic_ext.cli import main
from elastic_ext.config.history import ConfigEdit, ConfigHistory
from tests.support.training import make_data, make_model, trainer_of

END_SECONDS = 60.0
WHY = "rank 0: global_batch_size: 1 is too few"


class Job:
    """A job in this process, which takes steps while a command runs."""

    def __init__(
        self,
        run_dir: Path,
        follower: ConfigFollower,
        capsys: pytest.CaptureFixture[str],
        step: Callable[[], object] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.follower = follower
        self._step = step or follower.boundary
        self.out = self.err = ""
        self._capsys = capsys

    def run(self, *command: str) -> int:
        self._capsys.readouterr()
        end = time.monotonic() + END_SECONDS
        with ThreadPoolExecutor(1) as pool:
            status = pool.submit(main, ["config", *command, "--file", str(self.run_dir)])
            while not status.done():
                assert time.monotonic() < end
                self._step()
                threading.Event().wait(0.001)
        self.out, self.err = self._capsys.readouterr()
        self.out = re.sub(r"step \d+", "step N", self.out)
        return status.result()

    @property
    def in_file(self) -> Mapping[str, object]:
        return ElasticConfig.parse((self.run_dir / "config.json").read_bytes()).values()


@contextmanager
def training(run_dir: Path) -> Iterator[ConfigFollower]:
    """A job that refuses a global batch of one."""
    follower = follow_config(run_dir=run_dir, job="test", agree_every_steps=1, poll_seconds=0.2)

    def check(new: ElasticConfig) -> str | None:
        return "1 is too few" if new.global_batch_size == 1 else None

    follower.on_change("global_batch_size", lambda old, new: None, check)
    with follower:
        yield follower


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with training(tmp_path / "run") as follower:
        yield Job(tmp_path / "run", follower, capsys)


def test_a_version_that_the_job_takes_is_told_with_its_first_step(job: Job) -> None:
    job.follower.knob("x")
    assert job.run("set", "user.x=1") == 0
    assert job.out == "version 1 written\nuser.x: not set -> 1\nin force from step N\n"
    assert job.run("set", "user.x=2", "--json") == 0
    told = json.loads(job.out.replace("step N", "step 0"))
    assert told["version"] == 2 and told["outcome"] == "in force" and told["step"] <= job.follower.step
    assert told["in_force"] == {"user.x": [1, 2]} and told["effects"] == {} and told["unread"] == []


def test_before_a_change_a_key_is_told_with_the_value_that_was_in_force_and_not_as_absent(job: Job) -> None:
    job.follower.knob("mixup", 0.1)
    job.follower.knob("names")
    assert job.run("set", "user.mixup=0.3", "user.names=1") == 0
    assert job.out == "version 1 written\nuser.mixup: 0.1 -> 0.3\nuser.names: not set -> 1\nin force from step N\n"
    assert "user.mixup 0.1 -> 0.3, user.names not set -> 1" in (job.run_dir / "events-0.jsonl").read_text()
    assert job.run("undo") == 0
    assert job.run("diff") == 0
    shown = "user.mixup: 0.3 -> not set (then 0.1 is in force)\nuser.names: 1 -> not set\n"
    assert job.out == shown
    assert job.run("history") == 0
    assert "  user.mixup: not set (then 0.1 is in force) -> 0.3\n" in job.out


def test_a_version_that_the_job_refuses_is_told_with_the_reason_and_the_next_one_is_made_from_what_is_in_force(
    job: Job,
) -> None:
    assert job.run("set", "user.x=1") == 0
    job.follower.knob("mixup")
    assert job.run("set", "global_batch_size=1") == 2
    assert job.out == "version 2 written\nglobal_batch_size: not set -> 1\n"
    words = f"the job refuses version 2, and version 1 stays in force: {WHY}; `elastic-ext config undo` puts back what"
    assert job.err.startswith(f"elastic-ext: {words}")
    assert job.run("set", "user.mixup=0.3") == 0
    assert job.out == (
        f"version 3 written\nmade from version 1, since the job has refused version 2: {WHY}\n"
        "user.mixup: not set -> 0.3\nin force from step N\n"
    )
    assert job.in_file == job.follower.config.values() == {"user.x": 1, "user.mixup": 0.3}
    assert job.run("undo") == 0
    assert job.out == "version 4 written\nuser.mixup: 0.3 -> not set\nin force from step N\n", (
        "version 2 is passed over"
    )
    assert job.run("set", "global_batch_size=1", "--json") == 2
    assert json.loads(job.out)["outcome"] == "refused" and WHY in json.loads(job.out)["words"]


def test_show_says_that_the_job_has_revised_what_the_file_says(job: Job) -> None:
    assert job.run("set", "user.rate=50.0", "user.other=1") == 0
    assert job.run("show") == 0
    assert "revision" not in job.err
    job.follower.propose({"user.rate": 0.001}, "the loss has jumped")
    end = time.monotonic() + END_SECONDS
    while job.follower.config.revision < 1:
        assert time.monotonic() < end
        job.follower.boundary()
    assert job.run("show") == 0
    assert json.loads(job.out)["user"] == {"rate": 50.0, "other": 1}
    assert job.err.endswith(
        "elastic-ext: the running job has version 1, revision 1 in force, a change that it made itself: "
        "user.rate=0.001; the next version replaces it\n"
    )
    assert job.run("set", "user.other=2") == 0
    assert job.run("show") == 0
    assert "revision" not in job.err


def test_without_a_file_the_version_in_force_is_told_and_the_next_one_is_above_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a job has resumed a checkpoint of another run directory."""
    follower = follow_config(run_dir=tmp_path / "run", job="test", agree_every_steps=1, poll_seconds=0.2)
    follower.load_state_dict({"config": {"version": 14, "user": {"x": 1}}, "revision": 0, "step": 3})
    with follower:
        job = Job(tmp_path / "run", follower, capsys)
        assert job.run("show") == 2
        assert "config.json does not exist, and the running job has version 14 in force, of the checkpoint" in job.err
        assert "`config set` writes one, with the next version above the one in force" in job.err
        assert job.run("set", "user.x=2") == 0 and job.out.startswith("version 15 written\n")
        assert "in force from step N" in job.out and follower.config.user == {"x": 2}


def test_undo_goes_back_to_what_is_in_force_past_all_that_the_job_has_refused(job: Job) -> None:
    assert job.run("set", "user.x=1") == 0
    assert job.run("set", "user.x=2") == 0
    for number in range(2):  # as an editor writes it
        held = {"version": 3 + number, "global_batch_size": 1, "user": {"x": 2, "number": number}}
        (job.run_dir / "config.json").write_text(json.dumps(held))
        end = time.monotonic() + END_SECONDS
        while f"version {3 + number} was refused" not in (job.run_dir / "events-0.jsonl").read_text():
            assert time.monotonic() < end
            job.follower.boundary()
        assert main(["config", "history", "--file", str(job.run_dir)]) == 0
    assert job.run("undo") == 0
    assert job.out == (
        "version 5 written\nglobal_batch_size: 1 -> not set\nuser.number: 1 -> not set\nin force from step N\n"
    )
    assert job.in_file == {"user.x": 2}
    assert job.run("undo") == 0
    assert job.in_file == {"user.x": 1}


def test_undo_repairs_a_broken_file_with_what_is_in_force_and_not_with_what_was_refused(job: Job) -> None:
    assert job.run("set", "user.x=1") == 0
    assert job.run("set", "global_batch_size=1") == 2
    (job.run_dir / "config.json").write_bytes(b"half a fi")
    assert job.run("undo") == 0
    assert job.out == "version 3 written\nglobal_batch_size: 1 -> not set\nin force from step N\n"
    assert job.in_file == {"user.x": 1}


def test_where_the_first_version_was_refused_undo_puts_the_scripts_own_values_back(job: Job) -> None:
    assert job.run("set", "global_batch_size=1") == 2
    assert job.run("undo") == 0
    assert job.out == "version 2 written\nglobal_batch_size: 1 -> not set\nin force from step N\n"
    assert job.in_file == {}


def test_a_name_that_nothing_in_the_job_reads_is_told_to_whoever_sets_it(job: Job) -> None:
    job.follower.knob("x")
    assert job.run("set", "user.x=1", "user.mixpu=0.2", "user.y=1") == 0
    assert job.out.endswith(
        "in force from step N\nnothing in this job has asked for user.mixpu, user.y so far; correct the name if it is "
        "misspelt\n"
    )
    assert job.run("set", "user.y=2", "--json") == 0
    assert json.loads(job.out.replace("step N", "step 0"))["unread"] == ["user.y"]


@contextmanager
def a_trainer(folder: Path, capsys: pytest.CaptureFixture[str], schedule: str = "") -> Iterator[Job]:
    """A job with a trainer and a loader with a worker of its own."""
    model = make_model()
    loader = ElasticDataLoader(TensorDataset(*make_data(256)), batch_size=4, num_workers=1)
    trainer = trainer_of(folder, model, loader, global_batch_size=8)
    bare = AdamW(model.parameters(), lr=3e-3)
    made: dict[str, Callable[[], Any]] = {
        "one cycle": lambda: lr_scheduler.OneCycleLR(bare, max_lr=3e-3, total_steps=10**6),
        "halved": lambda: lr_scheduler.LambdaLR(bare, lambda step: 0.5),
    }
    prepared = [trainer.prepare(bare, made[schedule]()) if schedule else trainer.prepare(bare)]
    optimizer, scheduler = prepared[0] if schedule else (prepared[0], None)
    with trainer:
        batches = iter(trainer.batches())

        def step() -> None:
            while True:
                inputs, targets = next(batches)
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
                if trainer.sync_gradients:
                    return

        yield Job(folder / "0", trainer._training.follower, capsys, step)


def test_what_a_version_leads_to_is_printed_with_the_values_that_were_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_trainer(tmp_path, capsys) as job:
        assert job.run("set", "dataloader.batch_size=1000", "dataloader.num_workers=2") == 0
        assert job.out == (
            "version 1 written\n"
            "dataloader.batch_size: 4 -> 1000 (8 at once: a rank's share of a step is 8)\n"
            "dataloader.num_workers: 1 -> 2\nin force from step N\n"
        )
        assert job.run("undo") == 0
        assert job.out == (
            "version 2 written\ndataloader.batch_size: 1000 -> not set (4 is in force)\n"
            "dataloader.num_workers: 2 -> not set (1 is in force)\nin force from step N\n"
        )


@pytest.mark.parametrize(
    ("schedule", "base", "effect"),
    [
        (
            "one cycle",
            "0.00012",
            "the base that the schedule multiplies: the schedule began with 0.00012, this is 12.5 times that, and so "
            "are all rates to come; the next step uses 0.0015, and not 0.00012",
        ),
        ("halved", "0.003", "the base that the schedule multiplies: the next step uses 0.00075, and not 0.0015"),
    ],
)
def test_a_rate_under_a_schedule_is_told_with_the_rates_that_steps_use(
    schedule: str, base: str, effect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_trainer(tmp_path, capsys, schedule) as job:
        assert job.run("set", "optimizer.learning_rate=1.5e-3") == 0
        assert job.out == (
            f"version 1 written\noptimizer.learning_rate: {base} -> 0.0015 ({effect})\nin force from step N\n"
        )
        assert job.run("set", "optimizer.learning_rate=", "optimizer.weight_decay=0.5") == 0
        assert f"optimizer.learning_rate: 0.0015 -> not set ({base} is in force; the base that the " in job.out


def test_a_key_that_is_taken_out_and_stays_in_force_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path / "run") as follower:
        state = {"config": {"version": 0, "user": {"x": 2}}, "revision": 0, "step": 9}
        follower.load_state_dict(state)  # as a checkpoint brings it
        job = Job(tmp_path / "run", follower, capsys)
        assert job.run("set", "user.x=2", "user.y=2") == 0
        assert job.run("set", "user.x=2", "user.y=3") == 0
        assert job.run("set", "user.x=") == 0
        assert job.out == (
            "version 3 written\nuser.x: 2 -> not set (2 stays in force: the script has it too, or the checkpoint that "
            "was resumed)\nin force from step N\n"
        )


def test_no_command_waits_for_a_version_that_no_job_is_to_take_now(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert main(["config", "set", "user.x=1", "--at-step", "9999", "--file", str(job.run_dir)]) == 0
    assert main(["config", "set", "user.x=1", "--file", str(job.run_dir / "another.json")]) == 0
    assert main(["config", "set", "user.x=1", "--file", str(tmp_path / "elsewhere" / "config.json")]) == 0
    assert capsys.readouterr().out == "version 1 written\nuser.x: not set -> 1\n" * 3
    assert time.monotonic() - began < 4.0, "it waits five seconds for a job"


def test_what_was_set_for_a_later_step_is_told_to_come_with_the_next_version_while_its_step_is_to_come(
    job: Job,
) -> None:
    early = "version {} holds what version {} set for step {} as well ({}): it comes into force with this version"
    for name in "abcdef":
        job.follower.knob(name)
    assert job.run("set", "user.a=1", "user.b=1") == 0
    assert job.run("set", "user.a=2", "user.b=2", "--at-step", "1000000") == 0
    assert "holds what" not in job.out
    assert job.run("set", "user.c=1", "--at-step", "1000000") == 0
    assert "holds what" not in job.out, "what waits goes on waiting"
    assert job.run("set", "user.d=1", "--json") == 0
    said = json.loads(job.out.replace("step N", "step 0"))["early"]
    assert said == f"{early.format(4, 3, 0, 'user.a, user.b, user.c')}; --at-step 0 would keep it waiting"


def test_an_undo_tells_what_it_brings_into_force_that_waited_for_a_later_step(job: Job) -> None:
    for name in "ab":
        job.follower.knob(name)
    assert job.run("set", "user.a=1") == 0
    assert job.run("set", "user.a=2", "--at-step", "1000000") == 0
    assert job.run("set", "user.a=3", "--at-step", "2000000") == 0
    assert job.run("undo") == 0
    early = (
        "version 4 holds what version 2 set for step N (user.a): it comes into force with this version; set it again"
    )
    assert f"user.a: 3 -> 2\n{early} with --at-step N to have it wait\nin force from step N\n" in job.out
    assert job.run("set", "user.b=1") == 0
    assert job.run("undo") == 0
    assert "holds what" not in job.out, "it is in force by now"
    assert job.run("undo") == 0
    assert "user.a: 2 -> 1\n" in job.out and "holds what" not in job.out


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({"user.b": 2}, "version 2 (another) came after it, has the same values, and is in force from step N"),
        ({"user.a": 3}, "version 2 (another) came after it, has user.a=3 instead, and is in force from step N"),
    ],
)
def test_a_version_that_a_later_one_overtakes_is_told_with_what_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later: dict[str, object], words: str
) -> None:
    with training(tmp_path) as follower:
        history = ConfigHistory(tmp_path / "config.json")

        def step() -> None:
            held = history.current()
            if held is not None and held.version == 1:  # as a tuner's may come, before a step has seen the first one
                history.set(ConfigEdit(later, reason="another"))
                assert follower._watcher is not None
                assert follower._watcher.wait_for_version(2, END_SECONDS)
            elif held is not None:
                follower.boundary()

        job = Job(tmp_path, follower, capsys, step)
        assert job.run("set", "user.a=1") == 0
        assert words in job.out, job.out


def test_what_was_set_for_a_step_that_the_job_has_come_to_is_not_early(job: Job) -> None:
    for name in "ab":
        job.follower.knob(name)
    assert job.run("set", "user.a=1") == 0
    assert job.run("set", "user.a=2", "--at-step", str(job.follower.step + 20_000)) == 0
    end = time.monotonic() + END_SECONDS
    while job.follower.config.version < 2:
        assert time.monotonic() < end
        job.follower.boundary()
    assert job.run("set", "user.b=1") == 0
    assert job.out == "version 3 written\nuser.b: not set -> 1\nin force from step N\n"


def test_a_version_that_came_too_late_for_its_run_is_built_upon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "config.json"
    with training(tmp_path / "run") as follower:
        follower.boundary()
        follower.finish()
        path.write_text(json.dumps({"version": 1, "user": {"x": 1}}))
    assert "before all ranks had agreed on it" in (tmp_path / "run" / "events-0.jsonl").read_text()
    assert main(["config", "set", "user.y=1", "--file", str(path), "--at-step", "1"]) == 0
    assert capsys.readouterr().out == "version 2 written\nuser.y: not set -> 1\n"
    assert ElasticConfig.parse(path.read_bytes()).values() == {"user.x": 1, "user.y": 1}
