"""The trainer as its user meets it: loops, counts, live changes, state, and what it refuses."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticError, ElasticTrainer, RanksDisagreeError, StepError
from tests.support.loops import put, seen_by
from tests.support.ranks import RankPool
from tests.support.training import (
    Batch,
    ResumableSlices,
    Slices,
    bits_of,
    grouped,
    make_data,
    make_model,
    shared,
    trainer_of,
)


def loader_of(num_samples: int = 24, batch_size: int = 4, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(num_samples, dtype)), batch_size=batch_size)


def train_on(trainer: Any, optimizer: Any, batch: Batch) -> None:
    """One micro-step."""
    inputs, targets = batch
    with trainer.step():
        nn.functional.cross_entropy(trainer._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def in_step(trainer: Any, *work: Callable[[], object]) -> None:
    with trainer.step():
        for part in work:
            part()


# ---- the loop ----


@pytest.mark.parametrize("order", ["step first", "zero_grad first", "zero_grad outside"])
@pytest.mark.parametrize("global_batch", [4, 12])
def test_dlrovers_loop_trains_like_a_plain_one_in_either_order(tmp_path: Path, order: str, global_batch: int) -> None:
    data = make_data(48)
    plain = make_model()
    plain_optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain_scheduler = LambdaLR(plain_optimizer, lambda step: 0.9**step)
    for start in range(0, 48, global_batch):
        loss = nn.functional.cross_entropy(
            plain(data[0][start : start + global_batch]), data[1][start : start + global_batch]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        plain_optimizer.step()
        plain_scheduler.step()
        plain_optimizer.zero_grad()

    model = make_model()
    loader = DataLoader(TensorDataset(*data), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=global_batch)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    trainer.reset()
    for inputs, targets in loader:
        with trainer.step():
            if order == "zero_grad first":
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            if order == "step first":
                optimizer.zero_grad()
        if order == "zero_grad outside":
            optimizer.zero_grad()
    trainer.close()
    assert trainer.global_step == trainer.num_steps == 48 // global_batch
    assert scheduler.last_epoch == 48 // global_batch
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_with_one_micro_step_per_step_training_is_bit_for_bit_that_of_a_plain_loop(tmp_path: Path) -> None:
    plain, ours = make_model(torch.float32), make_model(torch.float32)
    by_hand = AdamW(plain.parameters(), lr=1e-2, amsgrad=True)
    trainer = trainer_of(tmp_path, ours, loader_of(dtype=torch.float32), global_batch_size=4)
    optimizer = trainer.prepare(AdamW(ours.parameters(), lr=1e-2, amsgrad=True))
    for inputs, targets in loader_of(dtype=torch.float32):
        train_on(trainer, optimizer, (inputs, targets))
        nn.functional.cross_entropy(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()
        by_hand.zero_grad()
    trainer.close()
    assert bits_of(ours, optimizer.state_dict()) == bits_of(plain, by_hand.state_dict())


def test_sync_gradients_tells_which_micro_steps_end_a_step(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=12)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    told = []
    with trainer, trainer.epoch():
        for batch in loader_of():
            train_on(trainer, optimizer, batch)
            told.append(trainer.sync_gradients)
            assert trainer.num_micro_steps == 3
    assert told == [False, False, True] * 2


def test_every_micro_step_commits_without_a_fixed_batch(tmp_path: Path) -> None:
    data = make_data(24)
    model, plain = make_model(), make_model()
    source = Slices(data, 4)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=12)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step(fix_total_batch_size=False):
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.global_step == 6
    assert source.committed == list(range(24))
    hand = SGD(plain.parameters(), lr=0.1)
    for start in range(0, 24, 4):
        loss = nn.functional.cross_entropy(plain(data[0][start : start + 4]), data[1][start : start + 4])
        loss.backward()  # type: ignore[no-untyped-call]
        hand.step()
        hand.zero_grad()
    assert bits_of(model) == bits_of(plain)


def test_the_batch_cannot_stop_being_fixed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=12)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    train_on(trainer, optimizer, make_data(4))
    with pytest.raises(StepError, match="in the middle of a step"), trainer.step(fix_total_batch_size=False):
        pass
    trainer.close()


def test_a_step_left_without_the_optimizer_consumes_its_samples_and_counts_nothing(tmp_path: Path) -> None:
    model = make_model()
    source = Slices(make_data(32), 4)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer, scheduler = trainer.prepare(optimizer, LambdaLR(optimizer, lambda step: 1.0))
    with trainer, trainer.epoch():
        for number, (inputs, targets) in enumerate(source):
            with trainer.step():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number != 3:
                    optimizer.step()
                scheduler.step()
            if number == 3:
                assert all(parameter.grad is None for parameter in model.parameters())
    assert source.committed == list(range(32))
    assert (trainer.global_step, scheduler.last_epoch) == (3, 3)


def test_gradients_of_a_plain_loop_without_a_batch_are_left_as_torch_leaves_them(tmp_path: Path) -> None:
    """A loop that gathers gradients by hand, stepping every third time, goes on doing so."""
    model, plain = make_model(), make_model()
    trainer = trainer_of(tmp_path, model)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    hand = SGD(plain.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(loader_of()):
        with trainer.step():
            (nn.functional.cross_entropy(model(inputs), targets) / 3).backward()  # type: ignore[no-untyped-call]
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        (nn.functional.cross_entropy(plain(inputs), targets) / 3).backward()  # type: ignore[no-untyped-call]
        if number % 3 == 2:
            hand.step()
            hand.zero_grad()
    trainer.close()
    assert bits_of(model) == bits_of(plain)
    assert trainer.global_step == 2


def test_several_optimizers_commit_when_all_have_stepped(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    first, second = trainer.prepare([SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.2)])
    for optimizers in ((first, second), (first,), (second, first)):
        with trainer.step():
            model(make_data(4)[0]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    trainer.close()
    assert trainer.global_step == 2


# ---- epochs ----


def test_epochs_are_counted_from_the_start_epoch_and_num_steps_within_them(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for expected in range(3):
            with trainer.epoch() as epoch:
                assert epoch == expected
                for batch in loader_of():
                    train_on(trainer, optimizer, batch)
                assert trainer.num_steps == 3
        assert trainer.global_step == 9
        assert trainer.start_epoch == 0
        with trainer.epoch(7) as epoch:
            assert epoch == 7
        assert trainer.state_dict()["epoch"] == 7, "of which nothing was taken: a run that resumes begins with it"
        with trainer.epoch(7):
            for batch in loader_of():
                train_on(trainer, optimizer, batch)
        assert trainer.state_dict()["epoch"] == 8


def test_micro_steps_left_at_an_epochs_end_are_dropped_and_logged(tmp_path: Path) -> None:
    model = make_model()
    with seen_by() as seen:
        trainer = trainer_of(tmp_path, model, micro_batch_size=4, global_batch_size=12)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer:
            for _ in range(2):
                with trainer.epoch():
                    for batch in loader_of(20):
                        train_on(trainer, optimizer, batch)
                assert all(parameter.grad is None for parameter in model.parameters())
    assert trainer.global_step == 2
    assert len([line for line in seen.log if "2 of 3 micro-steps of a step were dropped" in line]) == 2


def test_a_bar_is_shown_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, True):
        model = make_model()
        trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8, progress=progress)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer, trainer.epoch(4):
            for batch in loader_of():
                train_on(trainer, optimizer, batch)
        assert ("epoch 4" in capsys.readouterr().err) == (progress is True)  # what pytest captures is no terminal


def shown_by(rank: int, folder: Path, has_terminal: bool, progress: bool | None = None) -> str:
    """What an epoch's training writes where this rank's stderr is a terminal of its own, or a pipe."""
    read_end, write_end = os.openpty() if has_terminal else os.pipe()
    if has_terminal:
        fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # lines and columns
    stderr = os.dup(2)
    os.dup2(write_end, 2)
    try:
        assert sys.stderr.isatty() is has_terminal
        model, source = make_model(), Slices(make_data(24), 2)
        given: dict[str, Any] = {"rank": rank, "global_batch_size": 8, "progress": progress}
        with trainer_of(folder, shared(model, 2), source, **given) as trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            with trainer.epoch(4):
                for batch in source:
                    train_on(trainer, optimizer, batch)
        assert trainer.global_step == 3
        sys.stderr.write("that was all")
        sys.stderr.flush()
        shown = b""
        while not shown.endswith(b"that was all"):
            shown += os.read(read_end, 1 << 16)
        return shown.decode()
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, read_end, write_end):
            os.close(descriptor)


def test_a_bar_is_shown_on_the_first_ranks_terminal_alone(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, shown_by, tmp_path, True)
    assert "epoch 4:" in first and "step" in first and first.endswith("that was all")
    run_dir = tmp_path / "0"
    assert first.startswith(
        f"elastic_ext: job test, 2 ranks: training begins; config file {run_dir}/config.json; "
        f"to look at the job: elastic-ext status {run_dir}\r\n"
    )
    assert second == "that was all"


@pytest.mark.parametrize(("has_terminal", "progress"), [(False, None), (True, False)])
def test_nothing_is_shown_where_there_is_no_terminal_or_it_is_not_wanted(
    ranks: RankPool, tmp_path: Path, has_terminal: bool, progress: bool | None
) -> None:
    assert ranks.run(2, shown_by, tmp_path, has_terminal, progress) == ["that was all"] * 2


def test_a_log_has_the_line_of_the_start_with_the_step_that_training_goes_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for step in (0, 3):
        model, source = make_model(), ResumableSlices(make_data(24), 2)
        given: dict[str, Any] = {"global_batch_size": 8, "shared_storage_path": tmp_path / "storage"}
        with trainer_of(tmp_path, model, source, **given) as trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            (line,) = [each for each in caplog.messages if "to look at the job" in each]
            for batch in source if step == 0 else ():
                train_on(trainer, optimizer, batch)
            path = trainer.save_checkpoint()  # the one that is there, the second time
        begins = f"training goes on after step {step} of {path}" if step else "training begins"
        assert line.startswith(f"job test, 1 rank: {begins}; config file ")
        caplog.clear()


def test_the_line_of_the_start_says_how_much_a_config_file_that_was_left_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "0").mkdir()
    put(tmp_path, 0, {"version": 3, "optimizer": {"learning_rate": 0.025}, "user": {"a": 1}})
    model = make_model()
    with trainer_of(tmp_path, model, Slices(make_data(24), 2), global_batch_size=8) as trainer:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    (line,) = [each for each in caplog.messages if "to look at the job" in each]
    assert "/config.json, which sets 2 keys otherwise than the script; to look at the job" in line
    (warning,) = [each for each in caplog.messages if "was there at the start" in each]
    assert "optimizer.learning_rate 0.1 -> 0.025, user.a the script's -> 1; to have the script's own values" in warning


def test_a_trainer_describes_what_it_holds(tmp_path: Path) -> None:
    model, source = make_model(), ResumableSlices(make_data(24), 2)
    options: dict[str, Any] = {"checkpoint_interval": CheckpointInterval(steps=2), "shared_storage_path": tmp_path}
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8, **options)
    assert trainer.describe() == (
        "model        Sequential, 197 elements of parameters on cpu\n"
        "steps        0 so far; prepare() was not called yet"
    )
    assert repr(trainer) == "ElasticTrainer(Sequential, not prepared, 0 steps)"
    with trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            for batch in source:
                train_on(trainer, optimizer, batch)
        told = dict(line.split(maxsplit=1) for line in trainer.describe().splitlines() if "look at it" not in line)
        assert told["job"] == "test, rank 0 of 1 rank"
        assert f"look at it   elastic-ext status {tmp_path / '0'}\n" in trainer.describe()
        assert told["batch"] == "8 samples a step: 1 replica with 4 micro-steps of at most 2 samples"
        assert told["steps"] == "3 so far; epoch 1 is next"
        assert told["config"] == f"version 0 in force; file {tmp_path / '0' / 'config.json'}"
        assert re.fullmatch(rf"in {tmp_path}.*, every 2 steps; the newest is step_2", told["checkpoints"])
        assert repr(trainer) == "ElasticTrainer(Sequential, job 'test', 3 steps)"
    assert "3 so far" in trainer.describe(), "after the end too"
    shown = io.StringIO()
    trainer._repr_pretty_(SimpleNamespace(text=shown.write), cycle=False)
    assert shown.getvalue() == trainer.describe(), "in a notebook"


def test_parameters_without_a_shape_are_left_out_of_the_description(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    told, _ = trainer.describe().splitlines()
    assert told.endswith("10 elements of parameters on cpu; 2 parameters of lazy modules, without a shape so far")


@pytest.mark.parametrize("stderr", [None, SimpleNamespace(write=len, flush=list)])
def test_without_a_standard_error_that_can_be_a_terminal_no_bar_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: object
) -> None:
    for progress in (None, False):
        monkeypatch.setattr(sys, "stderr", stderr)
        model = make_model()
        trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8, progress=progress)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer, trainer.epoch(0):
            for batch in loader_of():
                train_on(trainer, optimizer, batch)
        assert trainer.global_step == 3


def test_no_bar_is_shown_without_a_terminal(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, shown_by, tmp_path, False) == ["that was all"] * 2


# ---- changes while it runs ----


def test_a_config_file_changes_rate_batch_and_knobs_between_steps(tmp_path: Path) -> None:
    model = make_model()
    source = Slices(make_data(48), 4, is_endless=True)
    with trainer_of(tmp_path, model, source, global_batch_size=12) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        version = {"version": 1, "optimizer": {"learning_rate": 0.2}, "dataloader": {"batch_size": 6}, "user": {"a": 5}}
        for number, batch in enumerate(source):
            train_on(trainer, optimizer, batch)
            if number == 2:
                put(tmp_path, 0, version, seen_by=trainer._session.follower)
            if trainer.global_step == 4:
                break
        assert optimizer.effective_rates == [0.2]
        assert trainer.knob("a", 1) == 5
        assert source.sizes == [(4, 4, 4), (4, 4, 4), (4, 4, 4), (6, 6)]  # told at one boundary, read at the next
        assert trainer.global_batch_size == 12


def test_the_global_batch_itself_changes_live_and_rates_follow_by_the_rule(tmp_path: Path) -> None:
    model = make_model()
    source = Slices(make_data(64), 4, is_endless=True)
    with trainer_of(tmp_path, model, source, global_batch_size=8, learning_rate_rule="sqrt") as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        proposal = trainer.propose({"global_batch_size": 32}, "the gradients have grown noisy")
        for batch in source:
            train_on(trainer, optimizer, batch)
            if trainer.global_step == 4:
                break
        assert proposal.outcome == "in force"
        assert source.sizes[-1] == (4,) * 8
        assert optimizer.effective_rates == [0.2]
        assert trainer.global_batch_size == 32


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataloader.batch_size": 8}, "the batch size of a DataLoader cannot change"),
        ({"dataloader.num_workers": 8}, "num_workers of this dataloader cannot change while it is in use"),
        ({"global_batch_size": 10}, "use 8 or 12"),
    ],
)
def test_what_a_plain_dataloader_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    model = make_model()
    with trainer_of(tmp_path, model, loader_of(), global_batch_size=8) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        proposal = trainer.propose(changes, "to see")
        for batch in loader_of():
            train_on(trainer, optimizer, batch)
        assert proposal.outcome == "refused"
        assert why in proposal.refusal


def test_of_a_dataloader_that_the_trainer_was_not_given_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        proposal = trainer.propose({"dataloader.num_workers": 8}, "to see")
        for number, batch in enumerate(loader_of()):
            if number == 1:
                with pytest.raises(LookupError):
                    in_step(trainer, lambda: [][0])
            train_on(trainer, optimizer, batch)
    words = "no dataloader was given to the trainer; give it an ElasticDataLoader, which could change them"
    assert proposal.outcome == "refused" and words in proposal.refusal
    (told,) = [each.getMessage() for each in caplog.records if each.name == "elastic_ext.training.steps.rollback"]
    assert told == (
        "a step was rolled back, and its samples do not come again: the trainer was given no dataloader, and the "
        "loop's own has gone past them; an ElasticDataLoader can hand them out again"
    )


def ends_its_with(trainer: Any) -> None:
    with trainer:
        pass


def closes_it(trainer: Any) -> None:
    trainer.close()


def leaves_by_an_exception(trainer: Any) -> None:
    with suppress(LookupError), trainer:
        raise LookupError


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ends_its_with, "`with trainer:` has ended, and"),
        (closes_it, "trainer.close() was called, and"),
        (leaves_by_an_exception, "an exception has left `with trainer:`, and"),
    ],
)
def test_what_comes_after_the_end_says_what_the_user_did(
    tmp_path: Path, end: Callable[[Any], None], words: str
) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    end(trainer)
    with pytest.raises(ElasticError, match=f"^{re.escape(words)}"):
        train_on(trainer, optimizer, next(iter(loader_of())))
    with pytest.raises(ElasticError, match=f"^{re.escape(words)}"):
        trainer.propose({"optimizer.learning_rate": 0.2}, "too late")


def test_a_plain_dataloaders_global_batch_changes_by_whole_micro_batches(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model, loader_of(48), global_batch_size=8) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        trainer.propose({"global_batch_size": 16}, "to see")
        for batch in loader_of(48):
            train_on(trainer, optimizer, batch)
        assert trainer.num_micro_steps == 4
        assert trainer.global_step == 4  # 8, 8, 16, 16


def test_stopping_is_agreed_and_told(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model, loader_of(), global_batch_size=4) as trainer:
        assert trainer.should_stop is False
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(loader_of()):
            if trainer.should_stop:
                break
            train_on(trainer, optimizer, batch)
            if number == 1:
                trainer.request_stop()
        assert trainer.global_step == 4


# ---- keeping and going on ----


def test_a_state_loaded_before_or_after_prepare_goes_on_where_it_was(tmp_path: Path) -> None:
    states: dict[str, dict[str, Any]] = {}
    for number, when in enumerate(("never", "before", "after")):
        folder = tmp_path / when
        folder.mkdir()
        model = make_model()
        source = Slices(make_data(64), 4, is_endless=True)
        noted = torch.zeros(2)
        trainer = trainer_of(folder, model, source, global_batch_size=12 if number == 0 else None)
        if when == "before":
            trainer.load_state_dict(states["never"])
        trainer.register_state("noted", noted)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        if when == "after":
            trainer.load_state_dict(states["never"])
        with trainer:
            if when == "never":
                trainer.propose({"dataloader.batch_size": 6, "optimizer.learning_rate": 0.5, "user.a": 1}, "to see")
                noted.fill_(3.0)
            for batch in source:
                train_on(trainer, optimizer, batch)
                if trainer.global_step == (4 if when == "never" else 5):
                    break
            states[when] = json.loads(json.dumps(trainer.state_dict() | {"registered": {}}))
            states[when]["registered"] = trainer.state_dict()["registered"]
            assert optimizer.effective_rates == [0.5]
            assert trainer.global_batch_size == 12
            assert trainer.knob("a", 0) == 1
            assert noted.tolist() == [3.0, 3.0]
            assert source.sizes[-1] == (6, 6)


def test_a_state_goes_on_with_a_dataloader_of_another_batch_size(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    for batch_size in (4, 6):
        model = make_model()
        trainer = trainer_of(tmp_path, model, loader_of(24, batch_size), global_batch_size=12)
        if states:
            trainer.load_state_dict(states[0])
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer:
            for batch in loader_of(24, batch_size):
                train_on(trainer, optimizer, batch)
            states.append(trainer.state_dict())
            assert trainer.num_micro_steps == 12 // batch_size
            assert trainer.config.dataloader.batch_size == batch_size
    assert states[1]["global_step"] == 4


def resuming_rank(
    rank: int, folder: Path, world_size: int, state: dict[str, Any] | None = None, rule: str = "none", when: str = ""
) -> dict[str, Any]:
    model = make_model()
    source = Slices(make_data(64), 3, is_endless=True)
    trainer = trainer_of(folder, shared(model, world_size), source, rank=rank, learning_rate_rule=rule)
    if state is not None and when == "before":
        trainer.load_state_dict(state)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    if state is not None and when == "after":
        trainer.load_state_dict(state)
    assert optimizer.effective_rates == [0.1]
    with trainer:
        for batch in source:
            train_on(trainer, optimizer, batch)
            if trainer.num_steps >= 2:
                break
        assert trainer.global_batch_size == 6
        kept: dict[str, Any] = trainer.state_dict()
        return kept | {"sizes": source.sizes}


@pytest.mark.parametrize(("rule", "when"), [("none", "before"), ("linear", "before"), ("linear", "after")])
def test_a_batch_that_came_of_two_ranks_stays_when_there_are_three_or_one_and_so_do_rates(
    ranks: RankPool, tmp_path: Path, rule: str, when: str
) -> None:
    first, _ = ranks.run(2, resuming_rank, tmp_path, 2)
    assert first["sizes"][-1] == (3,)
    state = {name: value for name, value in first.items() if name != "sizes"} | {"num_steps": 0}
    for world_size, sizes in ((3, (2,)), (1, (3, 3))):
        arguments = (tmp_path, world_size, state, rule, when)
        for kept in ranks.run(world_size, resuming_rank, *arguments, process_group=world_size > 1):
            assert kept["sizes"][-1] == sizes
            assert kept["global_step"] == 4


def test_a_registered_state_must_match_and_have_a_name_of_its_own(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    trainer.register_state("ema", {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="'ema' is registered already"):
        trainer.register_state("ema", torch.zeros(1))
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"has \['a'\], and what was loaded has \['b'\]"):
        trainer.load_state_dict(trainer.state_dict() | {"registered": {"ema": {"b": torch.zeros(1)}}})
    trainer.close()


def test_metrics_say_how_fast_training_goes_and_what_it_holds(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for batch in loader_of():
            train_on(trainer, optimizer, batch)
    record = json.loads((tmp_path / "0" / "metrics-0.json").read_text())
    assert (record["step"], record["config_version"], record["config_revision"]) == (3, 0, 0)
    measures = record["measures"]
    assert measures["samples_per_second"] == pytest.approx(8 * measures["steps_per_second"])
    assert measures["memory_bytes"] > 2**20
    assert measures["accelerator_bytes"] is None


# ---- ending ----


def test_closing_twice_leaves_no_thread_and_the_model_as_it_was(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8)
    trainer.close()  # before it began
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    train_on(trainer, optimizer, make_data(4))
    trainer.close()
    trainer.close()
    assert set(threading.enumerate()) == threads
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_without_the_library_switched_on_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for word in ("on", "off"):
        monkeypatch.setenv("ELASTIC_EXT", word)
        model = make_model()
        trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=8)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer:
            for batch in loader_of():
                train_on(trainer, optimizer, batch)
        results.append((bits_of(model), trainer.global_step))
    assert results[0] == results[1]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"global_batch_size": 0}, ValueError, "global_batch_size is 0; allowed: an integer >= 1"),
        ({"global_batch_size": 8}, ValueError, "the size of a micro-batch is not known; pass the dataloader"),
        ({"dataloader": loader_of(), "micro_batch_size": 4}, ValueError, "give one of them"),
        ({"dataloader": loader_of(), "share_weights": (1.0,)}, ValueError, "share_weights needs a dataloader"),
        ({"rollback": "half"}, ValueError, "rollback is 'half'; allowed: gradients, full"),
        ({"learning_rate_rule": "cube"}, ValueError, "allowed: none, linear, sqrt, adascale"),
        ({"checkpoint_interval": 5, "shared_storage_path": "x"}, ValueError, "allowed: a CheckpointInterval"),
        ({"checkpoint_interval": CheckpointInterval(steps=5)}, ValueError, "say where checkpoints go"),
        ({"shared_storage_path": 5}, ValueError, "allowed: a path"),
        ({"resume": "maybe"}, ValueError, "resume is 'maybe'; allowed: auto, strict, never"),
        ({"when_save_fails": "ignore"}, ValueError, "allowed: raise, warn"),
        ({"accelerator": object()}, ValueError, "accelerator is a object; allowed: an accelerate.Accelerator"),
        ({"overlap_saving": 0}, ValueError, "overlap_saving is 0; allowed: auto, True, False"),
        ({"overlap_saving": 1}, ValueError, "overlap_saving is 1; allowed: auto, True, False"),
        ({"save_in_background": "x"}, ValueError, "save_in_background is 'x'; allowed: True, False"),
        ({"keep_previous": 1}, ValueError, "keep_previous is 1; allowed: True, False"),
        ({"save_on_signals": "False"}, ValueError, "save_on_signals is 'False'; allowed: True, False"),
        ({"sync_every_micro_step": 0}, ValueError, "sync_every_micro_step is 0; allowed: True, False"),
        ({"use_fsdp": None}, ValueError, "use_fsdp is None; allowed: True, False"),
        ({"progress": "no"}, ValueError, "progress is 'no'; allowed: True, False, None"),
        ({"shared_storage_path": ""}, ValueError, "shared_storage_path is '', as where a variable is not set; allowed"),
        ({"shared_storage_path": "x", "job": ""}, ValueError, "job is '', which has 0 characters"),
        ({"shared_storage_path": "x", "job": "j" * 300}, ValueError, "has 300 characters and takes 300"),
        ({"shared_storage_path": "x", "job": 5}, ValueError, "job is 5; allowed: text"),
        ({"model": "resnet50"}, ValueError, "model is a str; allowed: a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_begins(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        ElasticTrainer(**grouped(**{"model": make_model(), **arguments}))


@pytest.mark.parametrize(
    ("prepared", "words"),
    [
        ((lambda model: ([],)), "no optimizer was given"),
        ((lambda model: ("adam",)), "optimizer is a str; allowed: a torch.optim.Optimizer"),
        (
            (lambda model: (SGD(model.parameters()), LambdaLR(SGD(model.parameters()), lambda step: 1.0))),
            "lr_scheduler belongs to another optimizer",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, prepared: Callable[[nn.Module], tuple[Any, ...]], words: str
) -> None:
    threads = set(threading.enumerate())
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    with pytest.raises(ValueError, match=words):
        trainer.prepare(*prepared(model))
    assert set(threading.enumerate()) == threads
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ElasticError, match="prepare\\(\\) was called before"):
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.close()


def test_a_batch_that_does_not_add_up_names_the_nearest_that_do(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=10)
    with pytest.raises(ValueError, match=r"global_batch_size 10 is not a multiple of 4 .* use 8 or 12"):
        trainer.prepare(SGD(model.parameters(), lr=0.1))


def test_what_needs_prepare_says_so(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, make_model())
    needy: list[Callable[[], object]] = [
        lambda: in_step(trainer),
        trainer.epoch,
        trainer.reset,
        trainer.rollback,
        trainer.state_dict,
        lambda: trainer.knob("a", 1),
        lambda: trainer.sync_gradients,
    ]
    for use in needy:
        with pytest.raises(ElasticError, match=r"prepare\(\) was not called"):
            use()
    assert (trainer.global_step, trainer.num_steps, trainer.start_epoch) == (0, 0, 0)


def test_a_step_within_a_step_and_work_outside_of_one_are_refused(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with pytest.raises(StepError, match="entered inside another"):
        in_step(trainer, lambda: in_step(trainer))
    with pytest.raises(StepError, match=r"outside of `with trainer\.step"):
        optimizer.step()
    with pytest.raises(StepError, match=r"outside of `with trainer\.step"):
        trainer.backward(model(make_data(4)[0]).sum())
    assert trainer.clip_grad_norm_(model.parameters(), 1.0) is None
    train_on(trainer, optimizer, make_data(4))
    trainer.close()
    assert trainer.global_step == 1


def test_a_source_that_has_run_dry_is_no_place_for_a_step(tmp_path: Path) -> None:
    model = make_model()
    source = Slices(make_data(8), 4)
    trainer = trainer_of(tmp_path, model, source)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    for batch in source:
        train_on(trainer, optimizer, batch)
    with pytest.raises(StepError, match="no samples left for a step"):
        in_step(trainer)
    trainer.close()


def refused_rank(rank: int, folder: Path, what: str) -> str:
    """What this rank is told when something is wrong on one rank or on all."""
    model = make_model()
    wrapped: nn.Module = model if what == "not wrapped" else DistributedDataParallel(model)
    batch_size = 8 if what == "batch on one" and rank == 1 else 4
    num_samples = 28 if what == "length on one" and rank == 1 else 24
    trainer = trainer_of(folder, wrapped, loader_of(num_samples, batch_size), rank=rank, global_batch_size=8)
    optimizer: Any = "adam" if what == "optimizer on one" and rank == 1 else SGD(model.parameters(), lr=0.1)
    try:
        trainer.prepare(optimizer)
    except (ValueError, ElasticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_several_ranks_need_a_model_that_shares_gradients(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, refused_rank, tmp_path, "not wrapped"):
        assert "ValueError: the model is not wrapped, and there are 2 ranks" in told
        assert "DistributedDataParallel" in told


@pytest.mark.parametrize("what", ["optimizer on one", "batch on one"])
def test_what_one_rank_cannot_prepare_every_rank_is_told(ranks: RankPool, tmp_path: Path, what: str) -> None:
    told = ranks.run(2, refused_rank, tmp_path, what)
    assert told[1].startswith("ValueError")
    assert told[0].startswith("RanksFailedError: 1 of 2 ranks failed while preparing a trainer")
    assert told[1].removeprefix("ValueError: ") in told[0]


def test_loaders_of_unlike_lengths_are_named(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, refused_rank, tmp_path, "length on one"):
        assert told.startswith(f"{RanksDisagreeError.__name__}: the ranks' dataloaders differ")
        assert "rank 0: 6 batches of 4 samples; rank 1: 7 batches of 4 samples" in told


# ---- what a notebook does ----


@pytest.mark.parametrize("order", ["first", "last"])
def test_gradients_from_before_the_first_step_are_no_part_of_it(tmp_path: Path, order: str) -> None:
    inputs, targets = make_data(8)
    model, plain = make_model(), make_model()
    hand = SGD(plain.parameters(), lr=0.1)
    nn.functional.cross_entropy(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
    hand.step()
    model(inputs).square().sum().backward()  # to look at something, say
    trainer = trainer_of(tmp_path, model, loader_of(8), global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    for batch in loader_of(8):
        with trainer.step():
            if order == "first":
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if order == "last":
                optimizer.zero_grad()
    trainer.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("clear", ["set to none", "to zero"])
def test_a_model_that_forgets_its_gradients_in_every_micro_step_is_noticed(tmp_path: Path, clear: str) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=12)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

    def train() -> None:
        for inputs, targets in loader_of():
            with trainer.step():
                if clear == "to zero":
                    model.zero_grad(set_to_none=False)
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if clear == "set to none":
                    model.zero_grad()

    with pytest.raises(StepError, match=r"optimizer\.zero_grad\(\)"):
        train()
    trainer.close()


def test_the_bare_optimizer_is_refused_within_a_step(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(), global_batch_size=12)
    bare = SGD(model.parameters(), lr=0.1)
    trainer.prepare(bare)
    with pytest.raises(StepError, match=r"the one that prepare\(\) returned"):
        train_on(trainer, bare, make_data(4))
    trainer.close()


def second_trainer_rank(rank: int, folder: Path) -> list[Any]:
    """A first trainer is left in the middle of a step, and a second one trains the same model."""
    model = make_model()
    wrapped = shared(model, 2)
    data = make_data(16)
    for global_batch in (16, 8):
        trainer = trainer_of(folder, wrapped, micro_batch_size=4, rank=rank, global_batch_size=global_batch)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for start in range(0, 12, 4):
            train_on(trainer, optimizer, (data[0][start + rank :][:4], data[1][start + rank :][:4]))
    trainer.close()
    return bits_of(model)


def test_a_second_trainer_of_a_model_shares_gradients_whatever_the_first_left(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, second_trainer_rank, tmp_path)
    assert first == second


def test_a_dataset_that_grows_between_epochs_is_cut_by_what_it_holds(tmp_path: Path) -> None:
    data = make_data(30)
    model, plain = make_model(), make_model()
    samples: list[tuple[torch.Tensor, torch.Tensor]] = []
    loader: DataLoader[Any] = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    samples += list(zip(data[0][:14], data[1][:14], strict=True))
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    hand = SGD(plain.parameters(), lr=0.1)
    with trainer:
        for num_samples in (14, 30):
            samples[:] = list(zip(data[0][:num_samples], data[1][:num_samples], strict=True))
            with trainer.epoch():
                for batch in loader:
                    train_on(trainer, optimizer, batch)
            for start in range(0, num_samples, 8):
                stop = min(start + 8, num_samples)
                nn.functional.cross_entropy(plain(data[0][start:stop]), data[1][start:stop]).backward()  # type: ignore[no-untyped-call]
                hand.step()
                hand.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
