"""A run that is resumed from a checkpoint goes on as one that never stopped."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import logging
import os
import random
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticError, RanksDisagreeError, StepError
from elastic_ext.cli import main
from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointFenced, CheckpointMismatch
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.records.files import write_whole
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS, Way, values_of
from tests.support.thinning import the_first
from tests.support.training import ResumableSlices, bits_of, make_data, trainer_of

BATCH = 12
EPOCH_STEPS = 7
NUM_STEPS = 10
HALF = 5


@dataclass
class Seen:
    """What a run came to."""

    losses: dict[int, float] = field(default_factory=dict)
    """By the step that they were the first of; several micro-steps are added up."""
    rates: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    final: list[Any] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    started_at: int = 0


MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(
        [
            {"params": [part for name, part in model.named_parameters() if "weight" in name], "weight_decay": 0.1},
            {"params": [part for name, part in model.named_parameters() if "bias" in name], "lr": 0.003},
        ],
        lr=0.01,
        foreach=True,
    ),
}
SCHEDULERS: dict[str, MakeScheduler] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=30),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])],
        milestones=[3],
    ),
}


def net(dropout: float, *, seed: int, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), norm(16), nn.Dropout(dropout), nn.Linear(16, 5)]
    return nn.Sequential(*layers).double()


def train(
    folder: Path,
    storage: Path | None,
    *,
    until: int,
    optimizer: str = "adamw",
    scheduler: str = "one cycle",
    seed: int = 0,
    rank: int = 0,
    way: Way | None = None,
    dropout: float = 0.3,
    micro_batch: int = 4,
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
    clips: bool = True,
    **arguments: Any,
) -> Seen:
    """Train until a step, from wherever the newest checkpoint is."""
    plain = net(dropout, seed=seed, norm=norm)
    model = plain if way is None else way.wrap(plain)
    loader = ResumableSlices(make_data(BATCH * EPOCH_STEPS), micro_batch)
    inner = OPTIMIZERS[optimizer](model)
    schedule = SCHEDULERS[scheduler](inner)
    options: dict[str, Any] = {"global_batch_size": BATCH, **arguments}
    if storage is not None:
        options = {"shared_storage_path": storage, "checkpoint_interval": CheckpointInterval(steps=HALF), **options}
    trainer = trainer_of(folder, model, loader, rank=rank, **options)
    seen = Seen()
    with trainer:
        wrapped, wrapped_schedule = trainer.prepare(inner, schedule)
        seen.started_at = trainer.global_step
        while trainer.global_step < until:
            with trainer.epoch(trainer.start_epoch if not seen.losses else None):
                for inputs, targets in loader:
                    step = trainer.global_step
                    with trainer.step():
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                        trainer.backward(loss)
                        if clips:
                            trainer.clip_grad_norm_(model.parameters(), 1.0)
                        wrapped.step()
                        wrapped_schedule.step(*([loss.item()] if scheduler == "plateau" else []))
                        wrapped.zero_grad()
                        seen.drawn.append(random.random())
                    seen.losses[step] = seen.losses.get(step, 0.0) + loss.item()
                    if trainer.global_step > step:
                        seen.rates.append(wrapped.effective_rates[0])
                    if trainer.global_step == until:
                        trainer.request_stop()
                        break
        seen.values = values_of(model)
        seen.final = bits_of(seen.values, list(plain.buffers()), inner.state_dict()["param_groups"])
        seen.final += bits_of([state for part, state in inner.state.items() if part.numel()])  # FSDP1 has empty ones
    return seen


def make(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    random.seed(7)


# --- as a run that never stopped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    the_first(  # each optimizer with one scheduler and each scheduler with one optimizer, and then all the others
        sorted(
            itertools.product(OPTIMIZERS, SCHEDULERS),
            key=lambda pair: list(OPTIMIZERS).index(pair[0]) * list(SCHEDULERS).index(pair[1]) > 0,
        ),
        len(OPTIMIZERS) + len(SCHEDULERS) - 1,
    ),
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    whole = train(make(tmp_path, "whole"), None, until=NUM_STEPS, optimizer=optimizer, scheduler=scheduler)
    random.seed(7)
    storage = tmp_path / "storage"
    first = train(make(tmp_path, "a"), storage, until=HALF, optimizer=optimizer, scheduler=scheduler)
    random.seed(99)  # another process would have drawn otherwise
    second = train(make(tmp_path, "b"), storage, until=NUM_STEPS, optimizer=optimizer, scheduler=scheduler, seed=3)
    assert (first.started_at, second.started_at) == (0, HALF)
    assert {**first.losses, **second.losses} == whole.losses
    assert first.rates + second.rates == whole.rates
    assert first.drawn + second.drawn == whole.drawn
    assert second.final == whole.final


def resumed_rank(rank: int, folder: Path, way: str, expected: Seen | None) -> None:
    storage = folder / "storage"
    options: dict[str, Any] = {
        "way": WAYS[way],
        "rank": rank,
        "dropout": 0.3,
        "micro_batch": 3,
        "clips": way != "FSDP1",  # which clips no doubles
        "use_fsdp": way != "ddp",
    }
    torch.manual_seed(0)
    random.seed(7)
    whole = train(make(folder, "whole"), None, until=NUM_STEPS, **options)
    random.seed(7)
    first = train(make(folder, "a"), storage, until=HALF, **options)
    random.seed(99)
    second = train(make(folder, "b"), storage, until=NUM_STEPS, seed=3, **options)
    assert (first.started_at, second.started_at) == (0, HALF), (first.started_at, second.started_at)
    assert {**first.losses, **second.losses} == whole.losses
    assert first.drawn + second.drawn == whole.drawn
    assert second.final == whole.final


@pytest.mark.parametrize("way", the_first(["ddp", "FSDP1", "fully_shard", "tensor and fully_shard", "hybrid"], 3))
def test_ranks_resume_bit_for_bit(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, resumed_rank, tmp_path, way, None)


# --- on other numbers of ranks, within rounding ---------------------------------------------------------------------


def part_rank(rank: int, folder: Path, name: str, way: str, until: int) -> Seen:
    return train(make(folder, name), folder / "storage", until=until, way=WAYS[way], rank=rank, **EXACT)


EXACT: dict[str, Any] = {  # the same however a batch is cut; and FSDP1 clips no doubles
    "dropout": 0.0,
    "micro_batch": 3,
    "norm": nn.LayerNorm,
    "clips": False,
}


@pytest.mark.parametrize(
    ("before", "after"),
    the_first([("ddp", "hybrid"), ("fully_shard", "FSDP1"), ("FSDP1", "plain"), ("hybrid", "ddp")], 3),
)
def test_a_run_goes_on_with_other_ranks_and_sharding(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    whole = train(make(tmp_path, "whole"), None, until=NUM_STEPS, **EXACT)
    ranks.run(WAYS[before].num_ranks, part_rank, tmp_path, "a", before, HALF)
    if after == "plain":
        second = [train(make(tmp_path, "b"), tmp_path / "storage", until=NUM_STEPS, **EXACT)]
        assert resuming_lines(caplog)[0].endswith("ranks 2 -> 1, sharding FSDP1 -> none")
    else:
        second = ranks.run(WAYS[after].num_ranks, part_rank, tmp_path, "b", after, NUM_STEPS)
    for seen in second:
        assert seen.started_at == HALF
        assert seen.rates == whole.rates[HALF:]
        for ours, expected in zip(seen.values, whole.values, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


# --- what is saved, and when ----------------------------------------------------------------------------------------


def saved_in(storage: Path) -> list[str]:
    return sorted(path.parent.name for path in storage.glob("fsdp_checkpoint/*/*/COMMIT"))


def test_a_checkpoint_lies_where_and_as_the_design_says(tmp_path: Path) -> None:
    train(make(tmp_path, "a"), tmp_path / "storage", until=HALF)
    (folder,) = (tmp_path / "storage" / "fsdp_checkpoint").glob("[!.]*")
    assert re.fullmatch(r"test_\d{8}-\d{6}", folder.name)
    files = {path.name for path in (folder / "step_5").iterdir()}
    assert files == {
        "COMMIT",
        "trainer_state.json",
        *(f"{kind}_meta.json" for kind in ("model", "optim", "extra")),
        *(f"{kind}_param.00000-00001.safetensors" for kind in ("model", "optim", "extra")),
    }
    state = json.loads((folder / "step_5" / "trainer_state.json").read_text())
    assert state["counts"]["global_step"] == 5
    assert "0.weight" in load_file(folder / "step_5" / "model_param.00000-00001.safetensors")


def test_metadata_is_written_once_while_it_stays_the_same(tmp_path: Path) -> None:
    train(make(tmp_path, "a"), tmp_path / "storage", until=4, checkpoint_interval=CheckpointInterval(steps=2))
    (folder,) = (tmp_path / "storage" / "fsdp_checkpoint").glob("[!.]*")
    for kind in ("model", "optim", "extra"):
        first, second = ((folder / step / f"{kind}_meta.json") for step in ("step_2", "step_4"))
        assert first.stat().st_ino == second.stat().st_ino
    assert len(list((folder / "meta").iterdir())) == 3


def test_epochs_are_saved_by_how_many_have_ended(tmp_path: Path) -> None:
    every = CheckpointInterval(epochs=2)
    options: dict[str, Any] = {"checkpoint_interval": every, "scheduler": "lambda"}
    train(make(tmp_path, "a"), tmp_path / "storage", until=4 * EPOCH_STEPS, **options)
    assert saved_in(tmp_path / "storage") == ["epoch_2", "epoch_4"]
    seen = train(make(tmp_path, "b"), tmp_path / "storage", until=5 * EPOCH_STEPS, **options)
    assert seen.started_at == 4 * EPOCH_STEPS


def put(folder: Path, **values: Any) -> None:
    write_whole(folder / "config.json", json.dumps(values).encode())


def test_the_config_asks_for_one_checkpoint_and_for_another_interval(tmp_path: Path) -> None:
    run = make(tmp_path, "run")
    (run / "0").mkdir()
    put(run / "0", version=1, checkpoint={"now": True})
    train(run, tmp_path / "storage", until=4, checkpoint_interval=CheckpointInterval())
    (first,) = saved_in(tmp_path / "storage")  # one, within two steps
    assert first in ("step_1", "step_2")
    put(run / "0", version=2, checkpoint={"steps": 2})
    train(run, tmp_path / "storage", until=7, checkpoint_interval=CheckpointInterval())
    assert saved_in(tmp_path / "storage") == sorted({first, "step_2", "step_4", "step_6", "step_7"})


def small(tmp_path: Path, name: str, **arguments: Any) -> tuple[Any, nn.Module, Any]:
    model = net(0.0, seed=0)
    options = {"shared_storage_path": tmp_path / "storage", "micro_batch_size": 4, "global_batch_size": 8, **arguments}
    trainer = trainer_of(make(tmp_path, name), model, **options)
    return trainer, model, trainer.prepare(SGD(model.parameters(), lr=0.1))


def take(trainer: Any, model: nn.Module, optimizer: Any, num_micro_steps: int = 2) -> None:
    inputs, targets = make_data(4)
    for _ in range(num_micro_steps):
        with trainer.step():
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def test_saving_by_hand_gives_the_folder_and_not_in_the_middle_of_a_step(tmp_path: Path) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    with trainer:
        take(trainer, model, optimizer)
        path = trainer.save_checkpoint()
        assert path.name == "step_1"
        assert (path / "COMMIT").exists()
        take(trainer, model, optimizer, 1)
        with pytest.raises(StepError, match="in the middle of a step"):
            trainer.save_checkpoint()
        take(trainer, model, optimizer, 1)
        assert trainer._save_fsdp_state().name == "step_2"
        with pytest.raises(StepError, match="before the first step"):
            trainer._load_fsdp_state()
    before = bits_of(model)
    trainer, model, optimizer = small(tmp_path, "b")
    with trainer:
        with torch.no_grad():
            next(model.parameters()).zero_()
        assert trainer._load_fsdp_state()
        assert bits_of(model) == before
        assert trainer.global_step == 2
        take(trainer, model, optimizer)
        assert trainer.save_checkpoint().name == "step_3"
        assert trainer.save_checkpoint().name == "step_3", "what is there is not written twice"


def test_without_storage_there_are_no_checkpoints(tmp_path: Path) -> None:
    trainer, _, _ = small(tmp_path, "a", shared_storage_path=None)
    with trainer, pytest.raises(ElasticError, match="give it shared_storage_path"):
        trainer.save_checkpoint()


def test_a_trainer_that_was_dropped_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    take(trainer, model, optimizer)
    trainer.save_checkpoint()
    with pytest.raises(CheckpointFenced, match=f"in use by another run of this job .process {os.getpid()} on"):
        small(tmp_path, "b")
    del trainer, optimizer
    gc.collect()
    later, _, _ = small(tmp_path, "c")
    assert later.global_step == 1
    later.close()


# --- what is resumed, and how ---------------------------------------------------------------------------------------


def test_registered_state_may_have_slashes_in_names_and_keys(tmp_path: Path) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    with trainer:
        trainer.register_state("my/ema", {"layer/w": torch.ones(3), "b": torch.ones(2)})
        trainer.register_state("my", {"ema/b": torch.full((2,), 2.0)})
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    trainer, _, _ = small(tmp_path, "b")
    with trainer:
        ema, other = {"layer/w": torch.zeros(3), "b": torch.zeros(2)}, {"ema/b": torch.zeros(2)}
        trainer.register_state("my/ema", ema)
        trainer.register_state("my", other)
        assert [tensor.tolist() for tensor in (*ema.values(), *other.values())] == [[1.0] * 3, [1.0] * 2, [2.0] * 2]


def test_registered_state_comes_back_before_prepare_and_after(tmp_path: Path) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    ema, count = {"w": torch.arange(3.0)}, torch.tensor(5)
    with trainer:
        trainer.register_state("ema", ema)
        trainer.register_state("count", count)
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    model = net(0.0, seed=1)
    later = trainer_of(make(tmp_path, "b"), model, shared_storage_path=tmp_path / "storage")
    held, number = {"w": torch.zeros(3)}, torch.tensor(0)
    later.register_state("ema", held)
    with later:
        later.prepare(SGD(model.parameters(), lr=0.1))
        assert torch.equal(held["w"], ema["w"])
        later.register_state("count", number)
        assert number == 5
    model = net(0.0, seed=1)
    other = trainer_of(make(tmp_path, "c"), model, shared_storage_path=tmp_path / "storage")
    other.register_state("ema", {"w": torch.zeros(4)})
    with pytest.raises(CheckpointMismatch, match="registered state 'ema'"):
        other.prepare(SGD(model.parameters(), lr=0.1))


def test_a_run_that_finds_nothing_left_to_do_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "nothing was left to do" in each.getMessage()]

    train(tmp_path, tmp_path / "storage", until=NUM_STEPS)
    assert told() == []
    train(tmp_path, tmp_path / "storage", until=NUM_STEPS)
    words = (
        "nothing was left to do: training had come to step 10, epoch 1, before this run, which has taken no step; to "
        "train on ask for more epochs or steps, to begin anew give the trainer "
        'follow_options=FollowOptions(job="another name"), another shared_storage_path, or '
        'checkpoint_options=CheckpointOptions(resume="never")'
    )
    assert told() == [words]
    events = [json.loads(line) for line in (tmp_path / "0" / "events-0.jsonl").read_text().splitlines()]
    assert [(each["step"], each["text"]) for each in events if each["kind"] == "nothing-left"] == [(10, words)]
    train(tmp_path, tmp_path / "storage", until=NUM_STEPS + HALF)
    train(tmp_path, None, until=0)  # which has nothing to do either, and went on from nothing
    assert told() == [words]


def test_the_command_against_a_file_that_was_left_restores_a_loaders_workers_past_a_checkpoint_that_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command is run once a checkpoint was saved under the file, as "now or at the next start" has it."""

    def run(*, steps: int) -> int:
        model = net(0.0, seed=0)
        loader = ElasticDataLoader(TensorDataset(*make_data(64)), batch_size=4, num_workers=1)
        trainer = trainer_of(tmp_path, model, loader, shared_storage_path=tmp_path / "storage")
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer:
            for inputs, targets in itertools.islice(loader, steps):
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
            if steps:
                trainer.save_checkpoint()
            return int(loader.num_workers)

    (tmp_path / "0").mkdir()
    put(tmp_path / "0", version=3, dataloader={"num_workers": 2})
    assert run(steps=1) == 2
    (warning,) = [each for each in caplog.messages if "was there at the start" in each]
    assert "dataloader.num_workers 1 -> 2; to have" in warning
    command = shlex.split(warning.partition("next start: ")[2])
    assert command[-1] == "dataloader.num_workers=1" and main(command[1:]) == 0
    assert run(steps=0) == 1
    assert main([*command[1:-1], "dataloader.num_workers="]) == 0
    caplog.clear()
    assert run(steps=0) == 2, "the checkpoint's value is above the script's"
    (line,) = [each for each in caplog.messages if "resuming from" in each]
    assert line.endswith("dataloader.num_workers stays 2, the script's is 1")
    metrics = json.loads((tmp_path / "0" / "metrics-0.json").read_text())
    assert metrics["from_checkpoint"] == {"dataloader.num_workers": "2 (the script has 1)"}


@pytest.mark.parametrize(
    ("way", "has_schedule"),
    [
        ("a checkpoint", False),
        ("a checkpoint", True),
        ("state_dict() before prepare()", False),
        ("state_dict() after prepare()", False),
    ],
)
def test_the_scripts_own_rate_and_decay_can_be_given_back_past_a_checkpoint_that_has_others(
    tmp_path: Path, way: str, has_schedule: bool
) -> None:
    """What training is done with, and not only what the config in force says."""
    state: dict[str, Any] = {}

    def run(version: int, rate: float, decay: float) -> None:
        (tmp_path / "0").mkdir(exist_ok=True)
        put(tmp_path / "0", version=version, optimizer={"learning_rate": rate, "weight_decay": decay})
        model = net(0.0, seed=0)
        groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.2}]
        inner = SGD(groups, lr=0.1, weight_decay=0.01)
        storage = tmp_path / "storage" if way == "a checkpoint" else None
        trainer = trainer_of(tmp_path, model, micro_batch_size=4, global_batch_size=8, shared_storage_path=storage)
        if state and way == "state_dict() before prepare()":
            trainer.load_state_dict(state["trainer"])
        optimizer, *_ = trainer.prepare([inner], [lr_scheduler.StepLR(inner, 100)] if has_schedule else [])[0]
        if state and way == "state_dict() after prepare()":
            trainer.load_state_dict(state["trainer"])
        if state:
            optimizer.load_state_dict(state["optimizer"])
        with trainer:
            assert trainer.config.optimizer.learning_rate == rate and trainer.config.optimizer.weight_decay == decay
            assert optimizer.effective_rates == pytest.approx([rate, 2 * rate])
            assert [group["weight_decay"] for group in inner.param_groups] == [decay, decay]
            take(trainer, model, optimizer)
            if storage is None:
                state.update(trainer=trainer.state_dict(), optimizer=copy.deepcopy(optimizer.state_dict()))
            else:
                trainer.save_checkpoint()

    run(1, 0.05, 0.2)
    run(2, 0.1, 0.01)  # as the script has them
    run(3, 0.3, 0.0)


def test_a_rate_that_the_script_has_lowered_stays_lowered_against_the_file_that_had_set_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").mkdir()
    put(tmp_path / "0", version=2, optimizer={"learning_rate": 50.0})

    def run(file: dict[str, Any] | None = None, *, lowers: bool = False) -> float:
        """A run of a step more, or of some until the rate is lowered, which are saved; gives the rate then."""
        if file is not None:
            put(tmp_path / "0", **file)
        model = net(0.0, seed=0)
        trainer = trainer_of(tmp_path, model, shared_storage_path=tmp_path / "storage")
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.002))
        with trainer:
            proposal = trainer.propose({"optimizer.learning_rate": 0.001}, "the loss has jumped") if lowers else None
            while True:
                rate = float(optimizer.effective_rates[0])
                with trainer.step():
                    model(make_data(4)[0]).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if proposal is None or proposal.outcome == "in force":
                    trainer.save_checkpoint()
                    return rate if proposal is None else float(optimizer.effective_rates[0])

    caplog.set_level(logging.INFO)
    assert run(lowers=True) == 0.001
    assert run() == 0.001
    (line,) = [each for each in caplog.messages if "resuming from" in each]
    assert line.endswith("optimizer.learning_rate stays 0.001, the script's is 0.002")
    assert [each for each in caplog.messages if "version 2, revision 1 in force from" in each]
    assert run() == 0.001, "of what has resumed a revision, too"
    assert run({"version": 3, "optimizer": {"learning_rate": 0.5}}) == 0.5


def test_one_line_says_what_a_run_resumes_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer, model, optimizer = small(tmp_path, "a")
    with trainer:
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    trainer, _, _ = small(tmp_path, "b")
    trainer.close()
    (line,) = resuming_lines(caplog)
    assert line.endswith("at step 1: nothing has changed since")
    caplog.clear()
    trainer, _, _ = small(tmp_path, "b", global_batch_size=16)
    assert trainer.global_batch_size == 8, "the config in force is kept in the checkpoint"
    trainer.close()
    (line,) = resuming_lines(caplog)
    assert line.endswith("at step 1: global_batch_size stays 8, the script's is 16")
    (make(tmp_path, "c") / "0").mkdir()
    put(tmp_path / "c" / "0", version=7, optimizer={"learning_rate": 0.5})
    caplog.clear()
    trainer, _, _ = small(tmp_path, "c")
    trainer.close()
    (line,) = resuming_lines(caplog)
    assert line.endswith("at step 1: config version 0 -> 7")


def test_a_schedule_that_keeps_the_length_it_was_saved_with_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(name: str, length: int) -> list[str]:
        caplog.clear()
        model = net(0.0, seed=0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_of(make(tmp_path, name), model, micro_batch_size=4, shared_storage_path=tmp_path / "storage")
        with trainer:
            optimizer, scheduler = trainer.prepare(inner, lr_scheduler.CosineAnnealingLR(inner, T_max=length))
            inputs, targets = make_data(4)
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
            trainer.save_checkpoint()
        return resuming_lines(caplog)

    assert run("a", 100) == []
    (line,) = run("b", 200)
    assert line.endswith("at step 1: CosineAnnealingLR keeps T_max 100, the script's has 200")
    assert run("c", 100) == []


def resuming_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("resuming from")]


def test_never_begins_anew_and_puts_nothing_in_the_place_of_what_is_there(tmp_path: Path) -> None:
    train(make(tmp_path, "a"), tmp_path / "storage", until=HALF)
    seen = train(make(tmp_path, "b"), tmp_path / "storage", until=HALF, resume="never")
    assert seen.started_at == 0
    (folder,) = (tmp_path / "storage" / "fsdp_checkpoint").glob("[!.]*")
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))
    assert len(names) == 2
    assert names[0] == "step_5"
    assert names[1].startswith("step_5.abandoned-")


def test_never_is_about_resuming_by_itself_and_not_about_being_asked(tmp_path: Path) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    with trainer:
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    before = bits_of(model)
    trainer, model, optimizer = small(tmp_path, "b", resume="never")
    with trainer:
        assert (trainer.global_step, bits_of(model) == before) == (0, False)
        assert trainer._load_fsdp_state()
        assert (trainer.global_step, bits_of(model) == before) == (1, True)
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    assert saved_in(tmp_path / "storage") == ["step_1", "step_2"], "and what is saved then follows what was loaded"


def damage(folder: Path) -> None:
    file = folder / "model_param.00000-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_loudly_or_stops_a_strict_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = tmp_path / "storage"
    train(make(tmp_path, "a"), storage, until=NUM_STEPS)
    (folder,) = (storage / "fsdp_checkpoint").glob("[!.]*")
    damage(folder / "step_10")
    with pytest.raises(CheckpointDamaged, match=r"model_param\.00000-00001\.safetensors"):
        train(make(tmp_path, "b"), storage, until=NUM_STEPS, resume="strict")
    seen = train(make(tmp_path, "c"), storage, until=NUM_STEPS + 1)
    assert seen.started_at == HALF
    told = [record for record in caplog.records if "model_param.00000-00001.safetensors" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "step_5" in told[0].getMessage()
    for name in ("step_5", "step_10", "step_11"):
        damage(folder / name)
    with pytest.raises(CheckpointDamaged):
        train(make(tmp_path, "d"), storage, until=NUM_STEPS)


def test_an_epoch_of_a_plain_loader_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(name: str, num_batches: int) -> int:
        model = net(0.0, seed=0)
        loader = DataLoader(TensorDataset(*make_data(40)), batch_size=4)
        trainer = trainer_of(
            make(tmp_path, name), model, loader, global_batch_size=8, shared_storage_path=tmp_path / "storage"
        )
        with trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            for taken, (inputs, targets) in enumerate(loader, start=1):
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                if taken == num_batches:
                    break
            trainer.save_checkpoint()
            return int(trainer.global_step)

    assert run("a", 4) == 2
    assert not [record for record in caplog.records if "begins anew" in record.getMessage()]
    assert run("b", 2) == 3
    assert len([record for record in caplog.records if "after 4 of its batches" in record.getMessage()]) == 1


def test_a_scaler_and_schedulers_must_be_those_that_were_saved(tmp_path: Path) -> None:
    train(make(tmp_path, "a"), tmp_path / "storage", until=HALF)
    model = net(0.3, seed=0)
    trainer = trainer_of(make(tmp_path, "b"), model, shared_storage_path=tmp_path / "storage")
    with pytest.raises(CheckpointMismatch, match=r"OneCycleLR and no scaler, .* no scheduler and a scaler"):
        trainer.prepare(OPTIMIZERS["adamw"](model), None, torch.amp.GradScaler("cpu"))


def test_a_scalers_scale_is_resumed(tmp_path: Path) -> None:
    def run(name: str) -> tuple[float, Any]:
        model = net(0.0, seed=0).float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        trainer = trainer_of(make(tmp_path, name), model, micro_batch_size=4, shared_storage_path=tmp_path / "storage")
        with trainer:
            optimizer, scaled = trainer.prepare(SGD(model.parameters(), lr=0.1), None, scaler)
            before = scaled.get_scale()
            inputs, targets = make_data(4, torch.float32)
            for _ in range(3):
                with trainer.step():
                    scaled.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
                    scaled.step(optimizer)
                    scaled.update()
                    optimizer.zero_grad()
            trainer.save_checkpoint()
        return before, scaled.state_dict()

    first, saved = run("a")
    second, _ = run("b")
    assert (first, second) == (2.0**10, saved["scale"])


def test_another_optimizer_or_scheduler_is_not_given_what_was_saved_of_the_old_one(tmp_path: Path) -> None:
    train(make(tmp_path, "a"), tmp_path / "storage", until=HALF)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("b", {"optimizer": "sgd"}, "the state of AdamW, and here is SGD"),
        ("c", {"scheduler": "lambda"}, "holds OneCycleLR and no scaler, and prepare.. was given LambdaLR"),
    ]
    for name, options, words in cases:
        with pytest.raises(CheckpointMismatch, match=words):
            train(make(tmp_path, name), tmp_path / "storage", until=NUM_STEPS, **options)


def test_registered_state_that_nobody_claims_is_kept_and_what_is_missing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, model, optimizer = small(tmp_path, "a")
    with trainer:
        trainer.register_state("ema", torch.arange(3.0))
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    trainer, model, optimizer = small(tmp_path, "b")
    with trainer:
        take(trainer, model, optimizer)
        trainer.save_checkpoint()
    model = net(0.0, seed=1)
    later = trainer_of(make(tmp_path, "c"), model, shared_storage_path=tmp_path / "storage")
    held, other = torch.zeros(3), torch.ones(2)
    later.register_state("ema", held)
    later.register_state("other", other)
    with later:
        later.prepare(SGD(model.parameters(), lr=0.1))
    assert torch.equal(held, torch.arange(3.0))
    assert torch.equal(other, torch.ones(2))
    told = [record.getMessage() for record in caplog.records if "no registered state other" in record.getMessage()]
    assert len(told) == 1


def test_what_cannot_be_saved_is_found_before_training_begins(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

        def set_extra_state(self, state: object) -> None: ...

    model = Odd(2, 2)
    trainer = trainer_of(make(tmp_path, "a"), model, micro_batch_size=4, shared_storage_path=tmp_path / "storage")
    with pytest.raises(CheckpointError, match="is a object, which cannot be saved without pickle"):
        trainer.prepare(SGD(model.parameters(), lr=0.1))


def test_what_shuffles_a_plain_loader_goes_on(tmp_path: Path) -> None:
    def run(name: str, num_epochs: int, storage: Path | None) -> list[list[float]]:
        model = net(0.0, seed=0)
        inputs, targets = make_data(8)
        loader = DataLoader(
            TensorDataset(inputs, targets), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        interval = None if storage is None else CheckpointInterval(epochs=1)
        trainer = trainer_of(
            make(tmp_path, name), model, loader, shared_storage_path=storage, checkpoint_interval=interval
        )
        seen = []
        with trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            for epoch in range(trainer.start_epoch, num_epochs):
                with trainer.epoch(epoch):
                    for batch, classes in loader:
                        seen.append(batch[:, 0].tolist())
                        with trainer.step():
                            loss = nn.functional.cross_entropy(model(batch), classes)
                            loss.backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            optimizer.zero_grad()
        return seen

    whole = run("whole", 4, None)
    assert run("a", 2, tmp_path / "storage") + run("b", 4, tmp_path / "storage") == whole


def ema_rank(rank: int, folder: Path) -> None:
    way = WAYS["fully_shard"]
    options: dict[str, Any] = {"rank": rank, "shared_storage_path": folder / "storage", "micro_batch_size": 4}
    model = way.wrap(net(0.0, seed=0, norm=nn.LayerNorm))
    average = {name: part.detach().clone() + 1 for name, part in model.named_parameters()}
    trainer = trainer_of(make(folder, "a"), model, **options)
    trainer.register_state("ema", average)
    with trainer:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
        trainer.save_checkpoint()
    for when in ("before", "after"):
        model = way.wrap(net(0.0, seed=1, norm=nn.LayerNorm))
        later = {name: torch.zeros_like(part) for name, part in average.items()}
        trainer = trainer_of(make(folder, when), model, **options)
        if when == "before":
            trainer.register_state("ema", later)
        with trainer:
            trainer.prepare(SGD(model.parameters(), lr=0.1))
            if when == "after":
                trainer.register_state("ema", later)
        assert bits_of(later) == bits_of(average), when


def test_spread_registered_state_comes_back_before_prepare_and_after(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, ema_rank, tmp_path)


def unlike_rank(rank: int, folder: Path) -> str:
    model = WAYS["ddp"].wrap(net(0.0, seed=0))
    interval = CheckpointInterval(steps=rank + 1)
    trainer = trainer_of(
        make(folder, "a"),
        model,
        rank=rank,
        micro_batch_size=4,
        shared_storage_path=folder / "storage",
        checkpoint_interval=interval,
    )
    with pytest.raises(RanksDisagreeError) as told:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    return str(told.value)


def test_ranks_that_were_told_different_things_of_checkpoints_are_named(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, unlike_rank, tmp_path)
    assert first == second
    assert "rank 1: " in first
    assert "steps=2" in first


def test_a_checkpoint_without_a_trainer_is_refused_by_one(tmp_path: Path) -> None:
    model = net(0.0, seed=0)
    with ShardCheckpointer(tmp_path / "storage", job="test") as checkpointer:
        checkpointer.save(1, model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointMismatch, match="was saved without a trainer"):
        small(tmp_path, "a")


@pytest.mark.parametrize("num_first", [1, 2])
def test_an_epoch_whose_last_step_is_saved_is_not_trained_again(tmp_path: Path, num_first: int) -> None:
    def run(name: str, num_epochs: int) -> tuple[int, int]:
        model = net(0.0, seed=0)
        loader = DataLoader(TensorDataset(*make_data(16)), batch_size=4)
        trainer = trainer_of(
            make(tmp_path, name),
            model,
            loader,
            shared_storage_path=tmp_path / "storage",
            checkpoint_interval=CheckpointInterval(steps=4),
        )
        with trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            started = trainer.start_epoch
            for epoch in range(started, num_epochs):
                with trainer.epoch(epoch):
                    for inputs, targets in loader:
                        with trainer.step():
                            loss = nn.functional.cross_entropy(model(inputs), targets)
                            loss.backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            optimizer.zero_grad()
                assert trainer.save_checkpoint().name == f"step_{4 * (epoch + 1)}"
            return started, int(trainer.global_step)

    assert run("a", num_first) == (0, 4 * num_first)
    assert run("b", 3) == (num_first, 12)
    assert run("c", 3) == (3, 12)
