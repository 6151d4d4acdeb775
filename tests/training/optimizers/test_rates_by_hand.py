"""Rates and decays that the loop writes into param_groups by itself: the loop's numbers stay, the config is a factor.

Every sequence is compared with a plain torch loop that writes the same numbers, times what was asked for.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticOptimizer
from elastic_ext.config.lr_scaling import rate_factor
from tests.support.loops import put
from tests.support.ranks import RankPool
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of
from tests.training.checkpoints.test_rewind import Rewindable
from tests.training.optimizers.test_accelerate import accelerate_forgotten

RATE, NUM_STEPS, BATCH = 0.1, 12, 8
WARMUP = 3

Write = Callable[[Optimizer, int], None]  # called before the step with this number
pytestmark = pytest.mark.usefixtures("one_thread")


def cosine(step: int) -> float:
    """nanoGPT's get_lr."""
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    return 0.01 + 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (NUM_STEPS - WARMUP))) * (RATE - 0.01)


def by_cosine(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = cosine(step)


def per_epoch(optimizer: Optimizer, step: int) -> None:
    """torch's old ImageNet example: what is written first is what is there."""
    if step % 4 == 0:
        for group in optimizer.param_groups:
            group["lr"] = RATE * (0.1 ** (step // 4))


def milestone_at(place: int) -> Write:
    def write(optimizer: Optimizer, step: int) -> None:
        if step == place:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1

    return write


def nothing(optimizer: Optimizer, step: int) -> None:
    pass


def two_groups(model: nn.Module, make: Any = AdamW, **options: Any) -> Optimizer:
    parts = list(model.parameters())
    groups = [
        {"params": [part for part in parts if part.dim() > 1], "weight_decay": 0.2},
        {"params": [part for part in parts if part.dim() < 2], "weight_decay": 0.0},
    ]
    return make(groups, **{"lr": RATE, **options})  # type: ignore[no-any-return]


def plain(write: Write, factor_of: Callable[[int], float] = lambda step: 1.0, num_steps: int = NUM_STEPS) -> nn.Module:
    """What plain torch makes of it, where each step's rates are those that were written, times a factor."""
    model = make_model()
    optimizer = two_groups(model)
    data = make_data(48)
    for step in range(num_steps):
        write(optimizer, step)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor_of(step)
        picked = [index % 48 for index in range(step * BATCH, (step + 1) * BATCH)]
        nn.functional.cross_entropy(model(data[0][picked]), data[1][picked]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return model


class Run:
    """A loop that writes its rates; what its steps used is noted."""

    def __init__(
        self,
        folder: Path,
        write: Write,
        *,
        make: Callable[[nn.Module], Optimizer] = two_groups,
        source: Any = None,
        config: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.model = make_model()
        self.source = source or Slices(make_data(48), BATCH, is_endless=True)
        self.write = write
        self.trainer = trainer_of(folder, self.model, self.source, global_batch_size=BATCH, **options)
        if config is not None:
            put(folder, 0, {"version": 1, "optimizer": dict(config)})
        self.raw = make(self.model)
        self.optimizer = self.trainer.prepare(self.raw)
        self.used: list[list[float]] = []
        self.effective: list[list[float]] = []
        self.decays: list[list[float]] = []
        self.shown: list[list[float]] = []
        self.asked: list[float] = []
        """The config's rate."""
        self.raw.register_step_pre_hook(self._note)

    def _note(self, raw: Optimizer, *ignored: object) -> None:
        self.used.append([float(group["lr"]) for group in raw.param_groups])
        self.decays.append([group["weight_decay"] for group in raw.param_groups])
        self.asked.append(self.trainer.config.optimizer.learning_rate)

    def take(self, num_steps: int = NUM_STEPS, asked: Mapping[int, Mapping[str, object]] | None = None) -> Run:
        """Take steps until so many lie behind; ``asked`` are proposed after so many."""
        trainer, optimizer = self.trainer, self.optimizer
        step = trainer.global_step
        for inputs, targets in self.source:
            self.write(optimizer, step)
            with trainer.step():
                nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                self.effective.append(optimizer.effective_rates)
                optimizer.step()
                optimizer.zero_grad()
            self.shown.append([float(group["lr"]) for group in optimizer.param_groups])
            step = trainer.global_step
            if asked and step in asked:
                trainer.propose(dict(asked[step]), "to see what changes")
            if step == num_steps:
                break
        return self


def asking(rate: float) -> dict[str, object]:
    return {"optimizer.learning_rate": rate}


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]


# ---- a loop that writes before each step ----


@pytest.mark.parametrize("write", [by_cosine, per_epoch, milestone_at(5)], ids=["cosine", "epochs", "milestone"])
def test_while_the_config_says_nothing_a_loop_by_hand_is_itself_to_the_bit_and_nothing_is_said(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, write)
    with run.trainer:
        run.take()
    assert bits_of(run.model) == bits_of(plain(write))
    assert said_in(caplog) == []


@pytest.mark.parametrize("write", [by_cosine, per_epoch], ids=["cosine", "epochs"])
def test_a_config_that_changes_the_rate_is_a_factor_to_the_bit_seen_and_said_once(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, write)
    with run.trainer:
        run.take(asked={2: asking(0.25), 6: asking(0.05), 9: asking(RATE)})
    factors = [asked / RATE for asked in run.asked]
    assert set(factors) == {1.0, 0.25 / RATE, 0.05 / RATE}
    assert bits_of(run.model) == bits_of(plain(write, lambda step: factors[step]))
    assert run.effective == run.used
    (said,) = said_in(caplog)
    assert "optimizer.learning_rate 0.25" in said and "factor of 2.5 (over 0.1)" in said
    events = [json.loads(line) for line in (tmp_path / "0" / "events-0.jsonl").read_text().splitlines()]
    texts = [event["text"] for event in events if event["kind"] == "config-applied"]
    assert "optimizer.learning_rate 0.1 -> 0.25 (a factor of 2.5 on the rates that the loop writes: " in texts[0]
    assert "optimizer.learning_rate 0.25 -> 0.05 (a factor of 0.5 on the rates that the loop writes: " in texts[1]
    assert "optimizer.learning_rate 0.05 -> 0.1 (to see what changes)" in texts[2], "as the loop writes them"


@pytest.mark.parametrize("write", [by_cosine, per_epoch], ids=["cosine", "epochs"])
def test_a_rate_that_the_file_gives_at_the_start_acts_from_the_first_step_on(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, write, config={"learning_rate": 0.2})
    with run.trainer:
        run.take()
    assert bits_of(run.model) == bits_of(plain(write, lambda step: 0.2 / RATE))
    assert run.effective == run.used
    (said,) = said_in(caplog)
    written = cosine(0) if write is by_cosine else RATE
    assert f"{written:g} for the first group" in said and f"so that {written * 2:g} is used" in said


def test_the_batchs_factor_multiplies_on(tmp_path: Path) -> None:
    run = Run(tmp_path, by_cosine, config={"learning_rate": 0.2}, learning_rate_rule="sqrt")
    with run.trainer:
        run.take(asked={4: {"global_batch_size": 2 * BATCH}})
    factors = {round(used[0] / cosine(step), 9) for step, used in enumerate(run.used)}
    assert factors == {2.0, round(2.0 * rate_factor("sqrt", BATCH, 2 * BATCH), 9)}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_tensor_rates_are_the_loops_whether_it_fills_or_replaces_them(tmp_path: Path, is_replaced: bool) -> None:
    def write(optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            if is_replaced:
                group["lr"] = torch.tensor(cosine(step), dtype=torch.float64)
            else:
                group["lr"].fill_(cosine(step))

    rate = torch.tensor(RATE, dtype=torch.float64)
    run = Run(tmp_path, write, make=lambda model: two_groups(model, lr=rate), config={"learning_rate": 0.2})
    with run.trainer:
        place = run.raw.param_groups[0]["lr"]
        run.take()
    assert [each[0] for each in run.used] == pytest.approx([2 * cosine(step) for step in range(NUM_STEPS)], rel=1e-12)
    assert is_replaced or run.raw.param_groups[0]["lr"] is place


def test_only_the_optimizer_whose_rates_are_written_takes_the_config_as_a_factor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    source = Slices(make_data(48), BATCH, is_endless=True)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=BATCH)
    put(tmp_path, 0, {"version": 1, "optimizer": {"learning_rate": 0.2}})
    optimizers = trainer.prepare([SGD(model[0].parameters(), lr=RATE), SGD(model[2].parameters(), lr=0.04)])
    with trainer:
        for inputs, targets in source:
            step = trainer.global_step
            by_cosine(optimizers[0], step)
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert optimizers[0].effective_rates == [cosine(step) * (0.2 / RATE)]
            assert optimizers[1].effective_rates == [optimizers[1].param_groups[0]["lr"]] == pytest.approx([0.08])
            if trainer.global_step == 4:
                break
    assert len(said_in(caplog)) == 1


# ---- a loop that writes once ----


def test_a_milestone_after_steps_at_the_configs_rate_is_made_from_that_rate(tmp_path: Path) -> None:
    """What the groups held then, and the loop has read, is the config's rate: it is not to count twice."""
    run = Run(tmp_path, milestone_at(5), config={"learning_rate": 0.2})
    with run.trainer:
        run.take(asked={8: asking(0.4)})
    rates = [used[0] for used in run.used]
    assert rates[:5] == [0.2] * 5 and rates[5:8] == pytest.approx([0.02] * 3)
    assert rates[-2:] == pytest.approx([0.04] * 2)
    assert run.effective == run.used


def test_where_the_loop_writes_some_groups_the_others_keep_what_the_config_makes_of_them(tmp_path: Path) -> None:
    def write(optimizer: Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = cosine(step)

    run = Run(tmp_path, write, config={"learning_rate": 0.2})
    with run.trainer:
        run.take()
    expected = [[2 * cosine(step), 0.2] for step in range(NUM_STEPS)]
    assert [rate for used in run.used for rate in used] == pytest.approx([rate for each in expected for rate in each])


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_group_that_is_added_later_takes_part(tmp_path: Path, is_bare: bool) -> None:
    run = Run(tmp_path, by_cosine, config={"learning_rate": 0.2})
    with run.trainer:
        run.take(3)
        added = {"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))], "lr": 0.03}
        (run.raw if is_bare else run.optimizer).add_param_group(added)
        assert run.optimizer.effective_rates[2] == pytest.approx(0.06)
        run.take(6)
    assert run.used[-1] == [cosine(5) * (0.2 / RATE)] * 3


def test_before_the_loop_writes_groups_show_the_configs_rate(tmp_path: Path) -> None:
    run = Run(tmp_path, nothing, config={"learning_rate": 0.2})
    with run.trainer:
        run.take(3, asked={1: asking(0.4)})
    assert run.shown[0] == [0.2, 0.2] and run.shown[-1] == [0.4, 0.4]


# ---- kept ----


def kept_run(folder: Path, storage: Path, write: Write, **options: Any) -> Run:
    source = Rewindable(make_data(48), BATCH, is_endless=True)
    interval = CheckpointInterval(steps=4)
    return Run(folder, write, source=source, shared_storage_path=storage, checkpoint_interval=interval, **options)


@pytest.mark.parametrize("write", [by_cosine, per_epoch, milestone_at(2)], ids=["cosine", "epochs", "milestone"])
def test_a_run_that_resumes_goes_on_at_the_same_rates_while_the_config_says_another(
    tmp_path: Path, write: Write
) -> None:
    whole = kept_run(tmp_path / "whole", tmp_path / "a", write, config={"learning_rate": 0.2})
    with whole.trainer:
        whole.take()
    first = kept_run(tmp_path / "first", tmp_path / "b", write, config={"learning_rate": 0.2})
    with first.trainer:
        first.take(4)
    second = kept_run(tmp_path / "first", tmp_path / "b", write, config={"learning_rate": 0.2})
    with second.trainer:
        assert second.trainer.global_step == 4
        second.take()
    assert first.used + second.used == whole.used
    assert bits_of(second.model) == bits_of(whole.model)


def test_a_milestone_survives_a_resume_under_a_file_that_says_another_rate(tmp_path: Path) -> None:
    first = kept_run(tmp_path / "run", tmp_path / "kept", milestone_at(2))
    with first.trainer:
        first.take(4)
    second = kept_run(tmp_path / "run", tmp_path / "kept", nothing, config={"learning_rate": 0.2})
    with second.trainer:
        second.take(6)
    assert [used[0] for used in first.used] == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert [used[0] for used in second.used] == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize("write", [by_cosine, milestone_at(6)], ids=["cosine", "milestone"])
def test_going_back_before_and_behind_the_loops_first_write_gives_the_rates_of_then(
    tmp_path: Path, write: Write
) -> None:
    run = kept_run(tmp_path, tmp_path / "kept", write, config={"learning_rate": 0.2})
    with run.trainer:
        run.take(9)
        run.trainer.rewind(8)
        run.take(10)
        run.trainer.rewind(4)
        run.take(10)
    before, behind, again = run.used[:9], run.used[9:11], run.used[11:]
    assert behind[0] == before[8] and again[:5] == before[4:9]


@pytest.mark.parametrize("order", ["to", "ot", "tr", "rt"])
def test_in_checkpoints_of_ones_own_it_is_kept_in_any_order_and_through_the_bare_optimizer(
    tmp_path: Path, order: str
) -> None:
    first = Run(tmp_path / "a", milestone_at(2), config={"learning_rate": 0.2})
    with first.trainer:
        first.take(4)
        saved = copy.deepcopy(
            {"t": first.trainer.state_dict(), "o": first.optimizer.state_dict(), "m": first.model.state_dict()}
        )
    second = Run(tmp_path / "b", nothing, config={"learning_rate": 0.4})
    second.model.load_state_dict(saved["m"])
    for letter in order:
        target = {"t": second.trainer, "o": second.optimizer, "r": second.raw}[letter]
        target.load_state_dict(copy.deepcopy(saved["t" if letter == "t" else "o"]))
    with second.trainer:
        second.take(6)
    assert [used[0] for used in second.used] == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_state_of_plain_torch_loads_and_a_loop_that_writes_is_known_anew(tmp_path: Path, is_bare: bool) -> None:
    """As a checkpoint of an older version has it: nothing in it says that the loop writes."""
    model = plain(by_cosine, num_steps=4)
    old = two_groups(model)
    by_cosine(old, 3)
    run = Run(tmp_path, by_cosine, config={"learning_rate": 0.2})
    (run.raw if is_bare else run.optimizer).load_state_dict(copy.deepcopy(old.state_dict()))
    with run.trainer:
        run.take(4)
    assert [used[0] for used in run.used] == [cosine(step) * (0.2 / RATE) for step in range(4)]


def test_what_the_bare_optimizer_loads_without_a_loop_that_writes_the_config_is_put_over(tmp_path: Path) -> None:
    """accelerator.load_state() does so."""
    old = two_groups(make_model(), lr=0.3)
    run = Run(tmp_path, nothing, config={"learning_rate": 0.2})
    run.raw.load_state_dict(old.state_dict())
    with run.trainer:
        run.take(2)
    assert run.used == [[0.2, 0.2]] * 2


def test_a_state_that_says_so_loads_in_plain_torch(tmp_path: Path) -> None:
    run = Run(tmp_path, by_cosine)
    with run.trainer:
        run.take(4)
    optimizer = two_groups(make_model())
    optimizer.load_state_dict(run.optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == cosine(3)
    for part in optimizer.param_groups[0]["params"]:
        part.grad = torch.zeros_like(part)
    optimizer.step()


# ---- weight decay ----


def decaying(optimizer: Optimizer, step: int) -> None:
    """DINO's: the first group's alone."""
    optimizer.param_groups[0]["weight_decay"] = 0.2 + 0.01 * step


def test_a_decay_that_the_loop_writes_is_its_own_and_a_config_that_would_change_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, decaying)
    with run.trainer:
        run.take(8, asked={4: {"optimizer.weight_decay": 0.5}, 6: asking(0.2)})
        assert run.trainer.config.optimizer.learning_rate == 0.2 and run.trainer.config.optimizer.weight_decay == 0.2
        proposal = run.trainer.propose({"optimizer.weight_decay": 0.5}, "again")
        run.take(10)
    assert proposal.outcome == "refused"
    assert "the loop writes weight decay into param_groups by itself" in proposal.refusal
    assert run.decays == [[0.2 + 0.01 * step, 0.0] for step in range(10)]
    assert run.used[-1] == [0.2, 0.2]
    assert said_in(caplog) == [] or all("refused" in said for said in said_in(caplog))


def test_a_decay_of_the_config_that_the_loop_writes_over_is_said_once_and_others_go_on_under_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, decaying, config={"weight_decay": 0.5})
    with run.trainer:
        run.take(6, asked={2: asking(0.2), 3: {"optimizer.weight_decay": 0.2}})
        assert run.trainer.config.optimizer.weight_decay == 0.2, "the script's own may come back"
    assert run.decays == [[0.2 + 0.01 * step, 0.0] for step in range(6)]
    said = [each for each in said_in(caplog) if "logged once" in each]
    assert len(said) == 1 and "optimizer.weight_decay 0.5" in said[0]


def test_a_decay_that_the_loop_writes_is_kept_in_checkpoints(tmp_path: Path) -> None:
    def once(optimizer: Optimizer, step: int) -> None:
        if step == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.07

    config = {"weight_decay": 0.5}
    first = kept_run(tmp_path / "run", tmp_path / "kept", once, config=config)
    with first.trainer:
        first.take(4)
    second = kept_run(tmp_path / "run", tmp_path / "kept", nothing, config=config)
    with second.trainer:
        second.take(6)
    assert [each[0] for each in first.decays + second.decays] == [0.5, 0.5, 0.07, 0.07, 0.07, 0.07]


# ---- on several ranks, and alone ----


def trained_on_ranks(rank: int, folder: str) -> tuple[list[list[float]], list[Any], list[str]]:
    torch.set_num_threads(1)
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("elastic_ext").addHandler(Lines())
    model = make_model()
    source = Slices(make_data(48), BATCH // 2, is_endless=True)
    trainer = trainer_of(Path(folder), DistributedDataParallel(model), source, rank=rank, global_batch_size=BATCH)
    raw = two_groups(model)
    used: list[list[float]] = []
    optimizer = trainer.prepare(raw)
    raw.register_step_pre_hook(lambda seen, *ignored: used.append([group["lr"] for group in seen.param_groups]))
    with trainer:
        for inputs, targets in source:
            by_cosine(optimizer, trainer.global_step)
            with trainer.step():
                nn.functional.cross_entropy(trainer._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if trainer.global_step == 3 and rank == 1:
                trainer.propose(asking(0.25), "from one rank")
            if trainer.global_step == NUM_STEPS:
                break
    return used, bits_of(model), [line for line in lines if "by itself" in line]


def test_ranks_take_the_factor_at_the_same_step_and_the_first_one_says_so(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, trained_on_ranks, str(tmp_path))
    assert first[:2] == second[:2]
    factors = [used[0] / cosine(step) for step, used in enumerate(first[0])]
    assert {round(each, 9) for each in factors} == {1.0, 2.5}
    assert len(first[2]) == 1 and second[2] == []


def test_alone_an_optimizer_takes_the_file_as_a_factor_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"version": 1, "optimizer": {"learning_rate": 0.2}}))
    model = make_model()
    raw = two_groups(model)
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "job": "test", "agree_every_steps": 1}
    optimizer = ElasticOptimizer(raw, config_file=path, **options)
    used: list[float] = []
    raw.register_step_pre_hook(lambda seen, *ignored: used.append(seen.param_groups[0]["lr"]))
    for step in range(4):
        by_cosine(optimizer, step)
        for part in model.parameters():
            part.grad = torch.zeros_like(part)
        optimizer.step()
    optimizer.close()
    assert used == [cosine(step) * (0.2 / RATE) for step in range(4)]
    assert len(said_in(caplog)) == 1


# ---- under accelerate ----


def test_under_accelerate_a_milestone_survives_its_own_checkpoints_while_the_config_says_another_rate(
    tmp_path: Path,
) -> None:
    """accelerator.load_state() loads the bare optimizer, behind the back of the one that prepare() has returned."""

    def train(folder: Path, num_steps: int, write: Write, *, loads: bool) -> list[float]:
        folder.mkdir(exist_ok=True)
        with accelerate_forgotten():
            accelerator = Accelerator(cpu=True)
            data = DataLoader(TensorDataset(*make_data(48)), batch_size=BATCH)
            bare = make_model()
            model, optimizer, batches = accelerator.prepare(bare, SGD(bare.parameters(), lr=RATE), data)
            trainer = trainer_of(folder, model, batches, global_batch_size=BATCH, accelerator=accelerator)
            put(folder, 0, {"version": 1, "optimizer": {"learning_rate": 0.2}})
            elastic = trainer.prepare(optimizer)
            used: list[float] = []
            elastic.register_step_pre_hook(lambda seen, *ignored: used.append(seen.param_groups[0]["lr"]))
            with trainer:
                if loads:
                    trainer.load_state_dict(torch.load(tmp_path / "trainer.pt"))
                    accelerator.load_state(str(tmp_path / "state"))
                for inputs, targets in batches:
                    write(elastic, trainer.global_step)
                    with trainer.step():
                        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                        elastic.step()
                        elastic.zero_grad()
                    if trainer.global_step == num_steps:
                        break
                if not loads:
                    torch.save(trainer.state_dict(), tmp_path / "trainer.pt")
                    accelerator.save_state(str(tmp_path / "state"))
        return used

    first = train(tmp_path / "a", 3, milestone_at(1), loads=False)
    second = train(tmp_path / "b", 5, nothing, loads=True)
    assert first == pytest.approx([0.2, 0.02, 0.02]) and second == pytest.approx([0.02, 0.02])
