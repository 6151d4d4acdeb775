"""Schedules within a trainer: the rates that steps really use, while rate, decay and global batch change under them.

Every sequence is compared with that of plain torch: the same schedule without this library, times what was asked for.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from elastic_ext import ElasticOptimizer, StepError
from elastic_ext.config.lr_scaling import LearningRateRule, rate_factor
from tests.support.loops import put
from tests.support.thinning import each_once, the_first
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of

MakeSchedule = Callable[[Optimizer], Any]
Rates = list[list[float]]  # of every step, group by group

NUM_STEPS = 22
BATCH = 8

SCHEDULES: dict[str, MakeSchedule] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 6) * 0.97**step),  # begins with 0
    "LambdaLR per group": lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda optimizer: MultiplicativeLR(optimizer, lambda step: 0.9 + 0.01 * (step % 3)),
    "StepLR": lambda optimizer: StepLR(optimizer, 4, gamma=0.5),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [3, 7, 15], gamma=0.3),
    "ConstantLR": lambda optimizer: ConstantLR(optimizer, factor=0.25, total_iters=9),
    "LinearLR": lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=10),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, gamma=0.93),
    "PolynomialLR": lambda optimizer: PolynomialLR(optimizer, total_iters=15, power=2.0),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=9, eta_min=0.003),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.5, 0.1], total_steps=NUM_STEPS + 2),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, base_lr=[0.1, 0.02], max_lr=[0.4, 0.1], step_size_up=4),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, start_factor=0.2, total_iters=5), CosineAnnealingLR(optimizer, T_max=12, eta_min=0.001)],
        milestones=[5],
    ),
    "ChainedScheduler": lambda optimizer: ChainedScheduler(
        [ConstantLR(optimizer, factor=0.1, total_iters=6), ExponentialLR(optimizer, gamma=0.95)], optimizer
    ),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=2, eps=0.0),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=6),
}
SOME = ("LambdaLR", "ReduceLROnPlateau", "OneCycleLR", "SequentialLR", "StepLR", "CosineAnnealingLR")

# What is asked for after so many steps: every value live at once, and in the end as it was at the start.
CHANGES: dict[int, dict[str, float]] = {
    2: {"rate": 3.0},
    5: {"rate": 3.0, "decay": 0.5},
    8: {"rate": 3.0, "decay": 0.5, "batch": 16},
    12: {"rate": 0.3, "decay": 0.0, "batch": 4},
    16: {"rate": 1.0, "decay": 1.0, "batch": 8},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def two_groups(model: nn.Sequential) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.1},
    ]
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.2)


def advance(scheduler: Any, step: int) -> None:
    """Step a schedule after the ``step``-th step; a plateau's metric gets better now and then."""
    if isinstance(getattr(scheduler, "inner", scheduler), ReduceLROnPlateau):
        scheduler.step(1.0 / (1 + step // 5))
    else:
        scheduler.step()


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def plain_rates(make_schedule: MakeSchedule, num_steps: int = NUM_STEPS) -> Rates:
    """What a plain torch loop uses."""
    optimizer = two_groups(make_model())
    scheduler = make_schedule(optimizer)
    used: Rates = []
    for step in range(num_steps):
        used.append(rates_of(optimizer))
        optimizer.step()
        advance(scheduler, step)
    return used


@dataclass(slots=True)
class Used:
    """What the steps of a run used, and what was in force for each."""

    rates: Rates = field(default_factory=list)
    decays: Rates = field(default_factory=list)
    told: Rates = field(default_factory=list)
    """What the optimizer said that it would use."""
    asked: list[float] = field(default_factory=list)
    """The config's rate."""
    asked_decay: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def expected(self, plain: Rates, base: float, rule: LearningRateRule = "none") -> Rates:
        """The product: the schedule alone, times what is in force over what the script gave, times the rule's."""
        return [
            [rate * (asked / base) * rate_factor(rule, BATCH, batch) for rate in rates]
            for rates, asked, batch in zip(plain, self.asked, self.batches, strict=True)
        ]


class Run:
    """A training of two groups within a trainer, under a schedule; its steps can be watched."""

    def __init__(
        self,
        folder: Path,
        make_schedule: MakeSchedule,
        *,
        rule: LearningRateRule = "none",
        is_given: bool = True,
        micro_batch: int = 4,
        is_wrapped: bool = True,
        state: Mapping[str, Any] | None = None,
        order: str = "",
        make: Callable[[nn.Sequential], Optimizer] = two_groups,
    ) -> None:
        """``is_given``: the schedule goes through prepare; else it is made after, ``is_wrapped`` on what that gave."""
        self.model = make_model()
        self.source = Slices(make_data(48), micro_batch, is_endless=True)
        self.trainer = trainer_of(folder, self.model, self.source, global_batch_size=BATCH, learning_rate_rule=rule)
        self.raw = make(self.model)
        self.used = Used()
        self.scheduler: Any = make_schedule(self.raw) if is_given else None
        before, _, after = order.partition("|")
        self._load(state, before)
        if is_given:
            self.optimizer, self.scheduler = self.trainer.prepare(self.raw, self.scheduler)
        else:
            self.optimizer = self.trainer.prepare(self.raw)
            self.scheduler = make_schedule(self.optimizer if is_wrapped else self.raw)
        self._load(state, after)
        self.base: float = self.trainer.config.optimizer.learning_rate
        self.base_decay: float = self.trainer.config.optimizer.weight_decay
        self.raw.register_step_pre_hook(self._note)

    def _load(self, state: Mapping[str, Any] | None, letters: str) -> None:
        for letter in letters:
            assert state is not None
            name = {"t": "trainer", "o": "optimizer", "r": "raw", "s": "scheduler"}[letter]
            getattr(self, name).load_state_dict(copy.deepcopy(state["optimizer" if letter in "or" else name]))

    def _note(self, raw: Optimizer, *ignored: object) -> None:
        config, used = self.trainer.config, self.used
        used.rates.append(rates_of(raw))
        used.decays.append([group["weight_decay"] for group in raw.param_groups])
        used.asked.append(config.optimizer.learning_rate)
        used.asked_decay.append(config.optimizer.weight_decay)
        used.batches.append(config.global_batch_size)

    def take(
        self,
        num_steps: int,
        *,
        changes: Mapping[int, Mapping[str, float]] | None = None,
        advance: Callable[[Any, int], None] | None = advance,
        advance_after: Callable[[Any, int], None] | None = None,
    ) -> Used:
        """Take steps until so many lie behind; ``changes`` are asked for as they say."""
        trainer, optimizer, scheduler = self.trainer, self.optimizer, self.scheduler
        for inputs, targets in self.source:
            with trainer.step():
                nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if trainer.sync_gradients:
                    self.used.told.append(optimizer.effective_rates)
                optimizer.step()
                if advance is not None:
                    advance(scheduler, trainer.global_step)
                optimizer.zero_grad()
            if advance_after is not None:
                advance_after(scheduler, trainer.global_step)
            if trainer.sync_gradients and changes and trainer.global_step in changes:
                self.ask(changes[trainer.global_step])
            if trainer.sync_gradients and trainer.global_step == num_steps:
                break
        return self.used

    def ask(self, change: Mapping[str, float]) -> None:
        values = {
            "optimizer.learning_rate": change.get("rate", 1.0) * self.base,
            "optimizer.weight_decay": change.get("decay", 1.0) * self.base_decay,
            "global_batch_size": change.get("batch", BATCH),
        }
        self.trainer.propose(values, "to see what changes")

    def state(self) -> dict[str, Any]:
        state = {
            "trainer": self.trainer.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        return copy.deepcopy(state)


def assert_close(ours: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], rel: float = 1e-12) -> None:
    assert len(ours) == len(expected)
    for step, (used, wanted) in enumerate(zip(ours, expected, strict=True)):
        assert used == pytest.approx(wanted, rel=rel, abs=1e-300), f"step {step}"


# --- nothing changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "micro_batch"), [*((name, 4) for name in SCHEDULES), ("CosineAnnealingLR", 8), ("MultiplicativeLR", 3)]
)
def test_a_schedule_steps_once_per_commit_and_its_rates_are_plain_torchs_to_the_bit(
    tmp_path: Path, name: str, micro_batch: int
) -> None:
    run = Run(tmp_path, SCHEDULES[name], micro_batch=micro_batch)
    with run.trainer:
        used = run.take(NUM_STEPS)
    assert used.rates == used.told == plain_rates(SCHEDULES[name])
    assert used.decays == [[0.2, 0.1]] * NUM_STEPS


@pytest.mark.parametrize("name", the_first(SOME, 3))
def test_what_a_schedule_tells_is_what_the_next_step_uses(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, SCHEDULES[name], rule="linear")
    told: dict[int, list[float]] = {}

    def note(scheduler: Any, step: int) -> None:
        told[step] = scheduler.get_last_lr()

    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES, advance_after=note)
    assert [told[step] for step in range(1, NUM_STEPS)] == used.rates[1:]


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    the_first(
        [
            *((name, is_wrapped) for name in SOME for is_wrapped in (True, False)),
            *((name, True) for name in SCHEDULES if name not in SOME),
        ],
        2 * len(SOME),
    ),
)
def test_a_schedule_made_after_prepare_gives_the_same_rates(tmp_path: Path, name: str, is_wrapped: bool) -> None:
    run = Run(tmp_path, SCHEDULES[name], is_given=False, is_wrapped=is_wrapped, micro_batch=BATCH)
    with run.trainer:
        used = run.take(NUM_STEPS)
    assert used.rates == used.told == plain_rates(SCHEDULES[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_on_an_elastic_optimizer_without_a_trainer_give_the_same_rates(name: str) -> None:
    optimizer = ElasticOptimizer(two_groups(make_model()))
    scheduler = SCHEDULES[name](optimizer)
    used: Rates = []
    optimizer.register_step_pre_hook(lambda raw, *ignored: used.append(rates_of(raw)))
    for step in range(NUM_STEPS):
        optimizer.step()
        advance(scheduler, step)
    assert used == plain_rates(SCHEDULES[name])


# --- live changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_the_schedules_times_what_was_asked_for_and_in_the_end_the_schedules_to_the_bit(
    tmp_path: Path, name: str
) -> None:
    plain = plain_rates(SCHEDULES[name])
    run = Run(tmp_path, SCHEDULES[name])
    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES)
    assert len(set(used.asked)) == 3 and set(used.batches) == {8, 16, 4}
    assert_close(used.rates, used.expected(plain, run.base))
    assert used.rates == used.told
    assert used.rates[:3] == plain[:3]
    assert used.rates[-4:] == plain[-4:]
    assert_close(used.decays, [[decay, decay / 2] for decay in used.asked_decay])
    assert {decay for decay, _ in used.decays} == {0.2, 0.1, 0.0}


@pytest.mark.parametrize(("name", "rule"), each_once(SOME, ["linear", "sqrt", "none"]))
def test_the_batchs_rule_multiplies_on(tmp_path: Path, name: str, rule: LearningRateRule) -> None:
    plain = plain_rates(SCHEDULES[name])
    run = Run(tmp_path, SCHEDULES[name], rule=rule)
    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES)
    assert_close(used.rates, used.expected(plain, run.base, rule))
    assert used.rates[:3] == plain[:3]
    assert used.rates[-4:] == plain[-4:]


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_without_a_schedule_rates_are_what_was_asked_for_times_the_rules_factor(
    tmp_path: Path, rule: LearningRateRule
) -> None:
    run = Run(tmp_path, lambda optimizer: None, rule=rule, is_given=False)
    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES, advance=None)
    assert_close(used.rates, used.expected([[0.1, 0.02]] * NUM_STEPS, 0.1, rule))
    assert used.rates[-1] == [0.1, pytest.approx(0.02, rel=1e-15)]


def test_a_schedule_never_sees_the_factors(tmp_path: Path) -> None:
    """A plain optimizer goes on from what was saved as if nothing had ever been asked for."""
    for name in SOME:
        plain = plain_rates(SCHEDULES[name])
        folder = tmp_path / name
        folder.mkdir()
        run = Run(folder, SCHEDULES[name], rule="linear")
        with run.trainer:
            run.take(9, changes=CHANGES)
            assert rates_of(run.raw) == plain[9]
            file = io.BytesIO()
            torch.save({name: run.state()[name] for name in ("optimizer", "scheduler")}, file)
        file.seek(0)
        state = torch.load(file, weights_only=False)
        optimizer = two_groups(make_model())
        scheduler = SCHEDULES[name](optimizer)
        scheduler.load_state_dict(state["scheduler"])
        optimizer.load_state_dict(state["optimizer"])
        went_on = []
        for step in range(9, NUM_STEPS):
            went_on.append(rates_of(optimizer))
            optimizer.step()
            advance(scheduler, step)
        assert went_on == plain[9:], name


def run_with_later_schedule(folder: Path, name: str, *, is_wrapped: bool) -> Used:
    """A run under CHANGES whose schedule is made after prepare; the global batch stays, as such a schedule needs."""
    run = Run(folder, SCHEDULES[name], is_given=False, is_wrapped=is_wrapped, micro_batch=BATCH)
    changes = {step: {**change, "batch": BATCH} for step, change in CHANGES.items()}
    with run.trainer:
        return run.take(NUM_STEPS, changes=changes)


@pytest.mark.parametrize(
    ("name", "is_wrapped"), each_once([name for name in SOME if name != "OneCycleLR"], [True, False])
)
def test_a_schedule_made_after_prepare_is_multiplied_as_well(tmp_path: Path, name: str, is_wrapped: bool) -> None:
    plain = plain_rates(SCHEDULES[name])
    used = run_with_later_schedule(tmp_path, name, is_wrapped=is_wrapped)
    assert_close(used.rates, used.expected(plain, 0.1))
    assert used.rates == used.told


def test_of_a_schedule_with_a_base_of_its_own_nothing_is_left_of_a_change_that_is_taken_back(tmp_path: Path) -> None:
    """Made after prepare, when the config has the optimizer's own rate as the one to start from."""
    plain = plain_rates(SCHEDULES["OneCycleLR"])
    used = run_with_later_schedule(tmp_path, "OneCycleLR", is_wrapped=True)
    assert used.asked[-1] == used.asked[0]
    assert_close(used.rates[:2] + used.rates[-4:], plain[:2] + plain[-4:])


def test_a_change_before_a_schedule_is_made_is_what_the_schedule_starts_from(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda optimizer: None, is_given=False, micro_batch=BATCH)
    with run.trainer:
        run.take(2, changes={1: {"rate": 5.0}}, advance=None)
        run.take(4, advance=None)
        assert run.optimizer.effective_rates == pytest.approx([0.5, 0.1])
        run.scheduler = ExponentialLR(run.optimizer, gamma=0.5)
        used = run.take(7)
        assert used.rates[4:7] == [pytest.approx([0.5 * 0.5**step, 0.1 * 0.5**step]) for step in range(3)]
        run.ask({"rate": 10.0})
        run.take(10)
        assert used.rates[-1] == pytest.approx([1.0 * 0.5**5, 0.2 * 0.5**5])


@pytest.mark.parametrize(
    "name", the_first(["CosineAnnealingWarmRestarts", *(name for name in SOME if name != "OneCycleLR")], 3)
)
def test_tensor_rates_are_scheduled_and_changed_in_place(tmp_path: Path, name: str) -> None:
    def with_tensors(model: nn.Sequential) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": torch.tensor(0.02, dtype=torch.float64)},
        ]
        return AdamW(groups, lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.2)

    run = Run(tmp_path, SCHEDULES[name], rule="linear", make=with_tensors)
    tensors = [group["lr"] for group in run.raw.param_groups]
    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES)
    assert all(group["lr"] is tensor for group, tensor in zip(run.raw.param_groups, tensors, strict=True))
    assert_close(used.rates, used.expected(plain_rates(SCHEDULES[name]), run.base, "linear"))


def test_a_change_at_a_step_that_the_file_names_takes_effect_with_that_step(tmp_path: Path) -> None:
    plain = plain_rates(SCHEDULES["CosineAnnealingLR"])
    run = Run(tmp_path, SCHEDULES["CosineAnnealingLR"])
    with run.trainer:
        put(
            tmp_path,
            0,
            {"version": 1, "apply_at_step": 7, "optimizer": {"learning_rate": 0.3}},
            seen_by=run.trainer._prepared.follower,
        )
        used = run.take(12)
    assert used.rates[:7] == plain[:7]
    assert_close(used.rates[7:], [[3 * rate for rate in rates] for rates in plain[7:12]])


def test_alone_with_a_file_a_schedule_is_multiplied(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    optimizer = ElasticOptimizer(
        two_groups(make_model()),
        config_file=tmp_path / "0" / "config.json",
        run_dir=tmp_path / "0",
        job="test",
        poll_seconds=0.2,
        agree_every_steps=1,
    )
    plain = plain_rates(SCHEDULES["SequentialLR"])
    scheduler = SCHEDULES["SequentialLR"](optimizer)
    used: Rates = []
    optimizer.register_step_pre_hook(lambda raw, *ignored: used.append(rates_of(raw)))
    for version, (at_step, rate) in enumerate([(4, 0.3), (9, 0.1)], 1):
        values = {"version": version, "apply_at_step": at_step, "optimizer": {"learning_rate": rate}}
        put(tmp_path, 0, values, seen_by=optimizer._follower)
        while len(used) < at_step + 2:
            optimizer.step()
            advance(scheduler, len(used))
    optimizer.close()
    assert_close(used[:4], plain[:4])
    assert_close(used[4:9], [[3 * rate for rate in rates] for rates in plain[4:9]])
    assert used[9:] == plain[9 : len(used)]


# --- a plateau, which keeps no base of its own ----------------------------------------------------------------------


def plateau(optimizer: Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, eps=0.0)


@pytest.mark.parametrize("is_given", [True, False])
def test_what_a_plateau_took_off_stays_off_when_the_rate_changes(tmp_path: Path, is_given: bool) -> None:
    run = Run(tmp_path, plateau, is_given=is_given, micro_batch=BATCH)
    with run.trainer:
        run.take(3, advance=lambda scheduler, step: scheduler.step(1.0))
        assert run.optimizer.effective_rates == [0.025, 0.005], "two reductions"
        run.ask({"rate": 4.0})
        run.take(6, advance=lambda scheduler, step: scheduler.step(0.1))
        assert run.optimizer.effective_rates == pytest.approx([0.4 / 16, 0.08 / 16]), "and two more since"


def test_a_plateaus_base_is_still_known_after_a_plain_checkpoint_was_loaded(tmp_path: Path) -> None:
    state = two_groups(make_model()).state_dict()  # from a run without this library, which saves no base
    (tmp_path / "0").mkdir()
    put(tmp_path, 0, {"version": 1, "optimizer": {"learning_rate": 0.2}})
    run = Run(tmp_path, plateau)
    with run.trainer:
        assert run.optimizer.effective_rates == pytest.approx([0.2, 0.04])
        run.optimizer.load_state_dict(state)
        assert run.optimizer.effective_rates == pytest.approx([0.2, 0.04])
        used = run.take(3, advance=lambda scheduler, step: scheduler.step(1.0))
        assert used.rates == [pytest.approx([rate, rate / 5]) for rate in (0.2, 0.2, 0.1)]


# --- where schedules are stepped ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_a_schedule_per_epoch_is_stepped_between_steps(tmp_path: Path, name: str) -> None:
    plain = plain_rates(SCHEDULES[name], 4)
    run = Run(tmp_path, SCHEDULES[name])
    with run.trainer:
        for epoch in range(4):
            with run.trainer.epoch(epoch):
                run.take(3 * (epoch + 1), advance=None)
            advance(run.scheduler, epoch)
    assert run.used.rates == [rates for rates in plain for _ in range(3)]


def test_a_schedule_per_epoch_can_be_stepped_before_the_epoch_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, SCHEDULES["ExponentialLR"])
    with run.trainer:
        for epoch in range(3):
            with run.trainer.epoch(epoch):
                run.take(2 * (epoch + 1), advance=None)
                run.scheduler.step()
    assert [rates[0] for rates in run.used.rates] == pytest.approx([0.1, 0.1, 0.093, 0.093, 0.08649, 0.08649])


def test_a_schedule_that_is_told_a_fraction_of_an_epoch_takes_that_of_the_step_that_commits(tmp_path: Path) -> None:
    optimizer = two_groups(make_model())
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=3)
    plain: Rates = []
    for step in range(9):
        plain.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step((step + 1) / 2)
    run = Run(tmp_path, lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3))
    with run.trainer:
        used = run.take(9, advance=lambda scheduler, step: scheduler.step((step + 1) / 2))
    assert used.rates == plain


CLOSED_FORMS = ("LambdaLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR")


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", the_first(["CosineAnnealingLR", *CLOSED_FORMS], 4))
def test_a_schedule_that_is_told_the_number_of_the_step_gives_the_rates_of_that_step_times_what_was_asked_for(
    tmp_path: Path, name: str
) -> None:
    optimizer = two_groups(make_model())
    scheduler = SCHEDULES[name](optimizer)
    plain: Rates = []
    for step in range(NUM_STEPS):
        plain.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step(step + 1)
    run = Run(tmp_path, SCHEDULES[name], rule="linear")
    with run.trainer:
        used = run.take(NUM_STEPS, changes=CHANGES, advance=lambda scheduler, step: scheduler.step(step + 1))
    assert_close(used.rates, used.expected(plain, run.base, "linear"))


def test_a_schedule_stepped_twice_in_a_micro_step_moves_once(tmp_path: Path) -> None:
    def twice(scheduler: Any, step: int) -> None:
        scheduler.step()
        scheduler.step()

    run = Run(tmp_path, SCHEDULES["ExponentialLR"])
    with run.trainer:
        used = run.take(6, advance=twice)
    assert used.rates == plain_rates(SCHEDULES["ExponentialLR"], 6)


def test_a_schedule_stepped_in_the_middle_of_a_step_and_outside_of_it_is_refused(tmp_path: Path) -> None:
    """After each `with`, as a loop without a trainer has it, it would go too fast by the number of micro-steps."""
    run = Run(tmp_path, SCHEDULES["ExponentialLR"])
    with run.trainer, pytest.raises(StepError, match=r"scheduler\.step\(\)"):
        run.take(6, advance=None, advance_after=advance)


def test_a_schedule_stepped_after_each_with_of_whole_steps_moves_once_per_step(tmp_path: Path) -> None:
    run = Run(tmp_path, SCHEDULES["ExponentialLR"], micro_batch=BATCH)
    with run.trainer:
        used = run.take(6, advance=None, advance_after=advance)
    assert used.rates == plain_rates(SCHEDULES["ExponentialLR"], 6)


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_schedule_stepped_before_the_optimizer_is_refused_and_the_step_never_happened(
    tmp_path: Path, micro_batch: int
) -> None:
    run = Run(tmp_path, SCHEDULES["ExponentialLR"], micro_batch=micro_batch)
    before = bits_of(run.model, run.optimizer.state_dict())
    samples = iter(run.source)
    with run.trainer:
        with pytest.raises(StepError, match=r"scheduler\.step\(\) was called before optimizer\.step\(\)"):
            take_in_wrong_order(run, samples)
        assert run.trainer.global_step == 0
        assert bits_of(run.model, run.optimizer.state_dict()) == before
        samples.close()  # type: ignore[attr-defined]
        assert run.take(3).rates == plain_rates(SCHEDULES["ExponentialLR"], 3)


def take_in_wrong_order(run: Run, samples: Iterator[Any]) -> None:
    for inputs, targets in samples:
        with run.trainer.step():
            nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            run.scheduler.step()
            run.optimizer.step()


def fail_in(run: Run, micro_step: int) -> None:
    for number, (inputs, targets) in enumerate(run.source):
        with run.trainer.step():
            nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            if number == micro_step:
                raise ZeroDivisionError
            run.optimizer.step()
            run.scheduler.step()


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_step_that_is_rolled_back_moves_no_schedule(tmp_path: Path, fails_in: int) -> None:
    run = Run(tmp_path, SCHEDULES["MultiplicativeLR"])
    with run.trainer:
        run.take(3)
        with pytest.raises(ZeroDivisionError):
            fail_in(run, fails_in)
        assert run.take(8).rates == plain_rates(SCHEDULES["MultiplicativeLR"], 8)


def test_a_boundary_without_a_commit_moves_no_schedule_from_the_first_step_on(tmp_path: Path) -> None:
    run = Run(tmp_path, SCHEDULES["ExponentialLR"], micro_batch=BATCH)
    with run.trainer:
        for number, (inputs, targets) in enumerate(run.source):
            with run.trainer.step():
                nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number % 3 == 2:
                    run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
            if run.trainer.global_step == 4:
                break
        assert number == 11
    assert run.used.rates == plain_rates(SCHEDULES["ExponentialLR"], 4)


def test_every_micro_step_that_commits_by_itself_moves_the_schedule(tmp_path: Path) -> None:
    run = Run(tmp_path, SCHEDULES["ExponentialLR"])
    with run.trainer:
        for inputs, targets in run.source:
            with run.trainer.step(fix_total_batch_size=False):
                nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
            if run.trainer.global_step == 5:
                break
    assert run.used.rates == plain_rates(SCHEDULES["ExponentialLR"], 5)


# --- several, and the schedule's own --------------------------------------------------------------------------------


def test_two_schedules_of_one_optimizer_work_together_as_in_plain_torch(tmp_path: Path) -> None:
    def plain() -> Rates:
        optimizer = two_groups(make_model())
        both = [ExponentialLR(optimizer, 0.9), MultiStepLR(optimizer, [3, 6], 0.1)]
        used = []
        for _ in range(8):
            used.append(rates_of(optimizer))
            optimizer.step()
            for each in both:
                each.step()
        return used

    model, source = make_model(), Slices(make_data(48), 4, is_endless=True)
    raw = two_groups(model)
    used: Rates = []
    with trainer_of(tmp_path, model, source, global_batch_size=BATCH) as trainer:
        optimizer, schedulers = trainer.prepare(raw, [ExponentialLR(raw, 0.9), MultiStepLR(raw, [3, 6], 0.1)])
        raw.register_step_pre_hook(lambda seen, *ignored: used.append(rates_of(seen)))
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                optimizer.zero_grad()
            if trainer.global_step == 8:
                break
    assert used == plain()


def test_each_of_several_optimizers_has_its_own_schedule_and_all_follow_one_rate(tmp_path: Path) -> None:
    model, source = make_model(), Slices(make_data(48), 4, is_endless=True)
    raw = [SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.02)]
    used: list[Rates] = [[], []]
    with trainer_of(tmp_path, model, source, global_batch_size=BATCH) as trainer:
        optimizers, schedulers = trainer.prepare(raw, (StepLR(raw[1], 2, 0.1), ExponentialLR(raw[0], 0.9)))
        for each, rates in zip(raw, used, strict=True):
            each.register_step_pre_hook(lambda seen, *ignored, rates=rates: rates.append(rates_of(seen)))
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                for each in (*optimizers, *schedulers):
                    each.step()
                for each in optimizers:
                    each.zero_grad()
            if trainer.sync_gradients and trainer.global_step == 3:
                trainer.propose({"optimizer.learning_rate": 0.3}, "three times as fast")
            if trainer.global_step == 8:
                break
    alone = [[0.1 * 0.9**step, 0.02 * 0.1 ** (step // 2)] for step in range(8)]
    factors = [[round(used[each][step][0] / alone[step][each], 9) for each in (0, 1)] for step in range(8)]
    num_before = factors.count([1.0, 1.0])
    assert 3 <= num_before < 8
    assert factors == [[1.0, 1.0]] * num_before + [[3.0, 3.0]] * (8 - num_before)


def test_a_schedule_of_an_optimizer_that_was_not_given_is_refused_and_its_own_is_prepared_after_that(
    tmp_path: Path,
) -> None:
    model, loader = make_model(), Slices(make_data(BATCH), 4)
    trainer, inner = trainer_of(tmp_path, model, loader, global_batch_size=BATCH), two_groups(model)
    with pytest.raises(ValueError, match="belongs to another optimizer than those given to prepare"):
        trainer.prepare(inner, StepLR(two_groups(make_model()), 1))
    optimizer, scheduler = trainer.prepare(inner, StepLR(inner, 1))
    with trainer:
        for inputs, targets in loader:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert trainer.global_step == 1
    assert rates_of(inner) == pytest.approx([0.01, 0.002])


def test_all_else_is_the_schedulers_own(tmp_path: Path) -> None:
    run = Run(tmp_path, SCHEDULES["CosineAnnealingLR"])
    with run.trainer:
        run.take(5)
        inner = run.scheduler.inner
        assert (run.scheduler.last_epoch, run.scheduler.T_max, run.scheduler.base_lrs) == (5, 9, [0.1, 0.02])
        assert run.scheduler.optimizer is run.raw
        assert run.scheduler.state_dict() == inner.state_dict()
        assert repr(run.scheduler) == f"ElasticLRScheduler({inner!r})"
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = run.scheduler.no_such_name


def test_what_is_set_on_a_schedule_is_set_on_the_scheduler_itself(tmp_path: Path) -> None:
    """As torch's own message asks for: "Please modify the `min_lrs` field"."""
    run = Run(tmp_path, plateau)
    with run.trainer:
        run.scheduler.min_lrs = [0.05, 0.01]
        run.scheduler.patience = 1
        assert run.scheduler.inner.min_lrs == [0.05, 0.01]
        used = run.take(8, advance=lambda scheduler, step: scheduler.step(1.0))
    assert [rates[0] for rates in used.rates] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05]


# --- resuming -------------------------------------------------------------------------------------------------------

ORDERS = ("|tos", "t|os", "rs|t", "|ost", "|sot", "t|so", "trs|", "r|st")


def run_resumed(folder: Path, name: str, order: str, *, file: Mapping[str, Any] | None = None) -> tuple[Used, Run]:
    """Nine steps under CHANGES, and the rest of a run that was resumed there; what its steps used."""
    (folder / "first").mkdir()
    (folder / "second").mkdir()
    first = Run(folder / "first", SCHEDULES[name], rule="sqrt")
    with first.trainer:
        first.take(11, changes=CHANGES)
        assert set(first.used.batches[-1:]) == {16}
        state = first.state()
    if file is not None:
        (folder / "second" / "0").mkdir()
        put(folder / "second", 0, file)
    second = Run(folder / "second", SCHEDULES[name], rule="sqrt", state=state, order=order)
    second.base, second.base_decay = first.base, first.base_decay
    with second.trainer:
        assert second.trainer.global_step == 11
        second.take(NUM_STEPS, changes=CHANGES)
    return second.used, first


@pytest.mark.parametrize(
    ("name", "order"),
    the_first(
        [
            *(("ReduceLROnPlateau", order) for order in ORDERS),
            *((name, "t|os") for name in SOME if name != "ReduceLROnPlateau"),
        ],
        len(ORDERS) + 2,
    ),
)
def test_a_run_resumed_in_mid_schedule_under_a_live_change_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, name: str, order: str
) -> None:
    (tmp_path / "whole").mkdir()
    whole = Run(tmp_path / "whole", SCHEDULES[name], rule="sqrt")
    with whole.trainer:
        whole.take(NUM_STEPS, changes=CHANGES)
    used, _ = run_resumed(tmp_path, name, order)
    assert used.rates == whole.used.rates[11:]
    assert used.decays == whole.used.decays[11:]
    assert used.told == used.rates


@pytest.mark.parametrize("order", the_first(ORDERS, 3))
def test_a_file_put_there_while_nothing_ran_is_what_a_resumed_schedule_is_multiplied_with(
    tmp_path: Path, order: str
) -> None:
    plain = plain_rates(SCHEDULES["CosineAnnealingLR"])
    file = {"version": 5, "optimizer": {"learning_rate": 0.7, "weight_decay": 0.02}, "global_batch_size": 32}
    used, _ = run_resumed(tmp_path, "CosineAnnealingLR", order, file=file)
    assert_close(used.rates[:1], [[rate * (0.7 / 0.1) * 2.0 for rate in plain[11]]])
    assert_close(used.decays[:1], [[0.02, 0.01]])


@pytest.mark.parametrize("name", SOME)
def test_a_plain_run_is_taken_up_in_mid_schedule(tmp_path: Path, name: str) -> None:
    plain = plain_rates(SCHEDULES[name])
    optimizer = two_groups(make_model())
    scheduler = SCHEDULES[name](optimizer)
    for step in range(9):
        optimizer.step()
        advance(scheduler, step)
    run = Run(tmp_path, SCHEDULES[name])
    run.scheduler.load_state_dict(scheduler.state_dict())
    run.optimizer.load_state_dict(optimizer.state_dict())
    with run.trainer:
        run.take(2, advance=lambda scheduler, step: advance(scheduler, step + 9))
        run.ask({"rate": 2.0})
        used = run.take(8, advance=lambda scheduler, step: advance(scheduler, step + 9))
    assert used.rates[:3] == plain[9:12]
    assert_close(used.rates, used.expected(plain[9:17], run.base))
    assert used.asked[-1] == 2 * run.base
