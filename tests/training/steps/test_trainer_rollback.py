"""A step commits or it never happened: exceptions at every phase of a step, on one rank and on all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic_ext import ElasticError, RanksDisagreeError, StepError, TornStepError
from tests.support.faults import Fault, Faults, PlantedFault
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.training import Slices, bits_of, make_data, make_model, shared, trainer_of

BEFORE = ("entered", "in forward", "forward done", "in backward", "backward done", "clipped")
AFTER = ("optimizer done", "scheduler done", "gradients zeroed")
NUM_STEPS = 6
FAULTY_STEP = 3


class Shaky(nn.Module):
    """A model that may fail in the middle of its forward or backward pass; with parts that change without gradients."""

    def __init__(self, *, has_moods: bool) -> None:
        super().__init__()
        self.first, self.second = make_model()[0], make_model()[2]
        self.norm = nn.BatchNorm1d(16).double() if has_moods else nn.Identity()
        self.dropout = 0.3 if has_moods else 0.0
        self.fail_in = ""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(inputs))), self.dropout)
        if self.fail_in == "in forward":
            raise PlantedFault("in forward")
        if self.fail_in == "in backward":
            hidden.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return self.second(hidden)  # type: ignore[no-any-return]

    @staticmethod
    def _fail(gradient: torch.Tensor) -> None:
        raise PlantedFault("in backward")


class HalfWay(AdamW):
    """AdamW that may fail between two groups."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise PlantedFault("in optimizer")
        return super().step(closure)


class Run:
    """One rank's training, whose every boundary leaves a record of all its state."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        faults: Faults,
        *,
        num_micro_steps: int,
        rollback: str,
        has_moods: bool = False,
        **arguments: Any,
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = rank
        self.faults = faults
        torch.manual_seed(7)
        random.seed(7)
        self.model = Shaky(has_moods=has_moods)
        self.source = Slices(make_data(64 * world_size), 4, is_endless=True)
        self.trainer = trainer_of(
            folder,
            shared(self.model, world_size),
            self.source,
            rank=rank,
            global_batch_size=4 * num_micro_steps * world_size,
            rollback=rollback,
            **arguments,
        )
        self.called = self.trainer._model
        optimizer = HalfWay([{"params": list(self.model.parameters())}], lr=1e-2)
        self.inner = optimizer
        self.optimizer, self.scheduler = self.trainer.prepare(optimizer, CosineAnnealingLR(optimizer, 20))
        self.noted = torch.zeros(3)
        self.trainer.register_state("noted", self.noted)
        self.caught: list[str] = []
        self.records = [self.record()]

    def record(self) -> list[Any]:
        """Every bit of state there is at a boundary."""
        counts = {name: value for name, value in self.trainer.state_dict().items() if name != "config"}
        return bits_of(
            self.model, self.optimizer.state_dict(), self.scheduler.state_dict(), counts, self.source.committed
        )

    def surroundings(self) -> list[Any]:
        return bits_of(torch.get_rng_state(), random.getstate(), self.noted, list(self.model.buffers()))

    def at(self, phase: str, micro_step: int) -> None:
        step = self.trainer.global_step
        self.faults.at(rank=self.rank, step=step, phase=f"{phase} {micro_step}")

    @contextmanager
    def failing_inside(self, micro_step: int) -> Iterator[None]:
        """Where the fault is one that strikes within the model or the optimizer, have it strike there."""
        step = self.trainer.global_step
        for phase in ("in forward", "in backward"):
            try:
                self.faults.at(rank=self.rank, step=step, phase=f"{phase} {micro_step}")
            except PlantedFault:
                self.model.fail_in = phase
        try:
            self.faults.at(rank=self.rank, step=step, phase=f"in optimizer {micro_step}")
        except PlantedFault:
            self.inner.fails = True
        try:
            yield
        finally:
            self.model.fail_in, self.inner.fails = "", False

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor, index: int) -> None:
        with self.trainer.step():
            self.at("entered", index)
            if self.model.dropout:
                self.noted.add_(random.random())
            loss = nn.functional.cross_entropy(self.called(inputs), targets)
            self.at("forward done", index)
            loss.backward()  # type: ignore[no-untyped-call]
            self.at("backward done", index)
            self.trainer.clip_grad_norm_(self.model.parameters(), 1.0)
            self.at("clipped", index)
            self.optimizer.step()
            self.at("optimizer done", index)
            self.scheduler.step()
            self.at("scheduler done", index)
            self.optimizer.zero_grad()
            self.at("gradients zeroed", index)

    def train(self, num_steps: int = NUM_STEPS) -> None:
        """So many steps, over whatever is raised on the way."""
        index = 0
        for inputs, targets in self.source:
            before = self.trainer.global_step
            try:
                with self.failing_inside(index):
                    self.micro_step(inputs, targets, index)
                index = 0 if self.trainer.sync_gradients else index + 1
            except PlantedFault as error:
                self.caught.append(str(error))
                index = 0
                if self.trainer.global_step == before:
                    assert self.record() == self.records[-1]
                    assert all(parameter.grad is None for parameter in self.model.parameters())
            if self.trainer.global_step > before:
                self.records.append(self.record())
            if self.trainer.global_step == num_steps:
                return


def training_rank(
    rank: int,
    folder: Path,
    faults: Faults,
    num_micro_steps: int,
    rollback: str,
    has_moods: bool,
    num_steps: int = NUM_STEPS,
) -> tuple[list[Any], list[str]]:
    run = Run(folder, rank, faults, num_micro_steps=num_micro_steps, rollback=rollback, has_moods=has_moods)
    with run.trainer:
        run.train(num_steps)
    return [*run.records, run.surroundings() if rollback == "full" else []], run.caught


def in_step(trainer: Any, *work: Callable[[], object]) -> None:
    with trainer.step():
        for part in work:
            part()


def fail() -> None:
    raise PlantedFault


def fails(*ranks: int, phase: str) -> Faults:
    return Faults(*(Fault(rank=rank, step=FAULTY_STEP, action="raise", phase=phase) for rank in ranks))


def fail_in_turn(*ranks: int, phases: Sequence[str]) -> Faults:
    """In one step after the other, from the second on, each time in the next of these phases."""
    return Faults(
        *(
            Fault(rank=rank, step=1 + number, action="raise", phase=phase)
            for number, phase in enumerate(phases)
            for rank in ranks
        )
    )


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize(("rollback", "has_moods"), [("gradients", False), ("full", True)])
def test_an_exception_before_the_optimizer_leaves_no_bit_changed_and_the_samples_come_again(
    tmp_path: Path, num_micro_steps: int, rollback: str, has_moods: bool
) -> None:
    num_steps = len(BEFORE) + 2
    expected, _ = training_rank(0, tmp_path, Faults(), num_micro_steps, rollback, has_moods, num_steps)
    for index in range(num_micro_steps):
        faults = fail_in_turn(0, phases=[f"{phase} {index}" for phase in BEFORE])
        records, caught = training_rank(0, tmp_path, faults, num_micro_steps, rollback, has_moods, num_steps)
        assert len(caught) == len(BEFORE), index
        assert records == expected, index


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_an_exception_after_the_optimizer_finds_the_step_committed(tmp_path: Path, num_micro_steps: int) -> None:
    expected, _ = training_rank(0, tmp_path, Faults(), num_micro_steps, "gradients", False)
    last = num_micro_steps - 1
    for phase in (f"scheduler done {last}", f"gradients zeroed {last}"):
        records, caught = training_rank(0, tmp_path, fails(0, phase=phase), num_micro_steps, "gradients", False)
        assert len(caught) == 1, phase
        assert records == expected, phase


def test_an_exception_between_optimizer_and_scheduler_leaves_the_schedule_where_it_was(tmp_path: Path) -> None:
    faults = fails(0, phase="optimizer done 0")
    run = Run(tmp_path, 0, faults, num_micro_steps=1, rollback="gradients")
    with run.trainer:
        run.train()
    assert run.trainer.global_step == NUM_STEPS
    assert run.scheduler.last_epoch == NUM_STEPS - 1


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_a_failing_optimizer_tears_the_step_and_nothing_goes_on(tmp_path: Path, num_micro_steps: int) -> None:
    faults = fails(0, phase=f"in optimizer {num_micro_steps - 1}")
    run = Run(tmp_path, 0, faults, num_micro_steps=num_micro_steps, rollback="gradients")
    with pytest.raises(TornStepError, match="resume from a checkpoint") as caught:
        run.train()
    assert isinstance(caught.value.__cause__, PlantedFault)
    assert run.trainer.global_step == FAULTY_STEP
    for _ in range(2):
        with pytest.raises(TornStepError):
            in_step(run.trainer)
    run.trainer.close()


def test_a_failing_optimizer_is_found_even_if_the_loop_swallows_its_exception(tmp_path: Path) -> None:
    model = make_model()
    optimizer = HalfWay(model.parameters())
    trainer = trainer_of(tmp_path, model)
    prepared = trainer.prepare(optimizer)
    optimizer.fails = True

    def swallow() -> None:
        with pytest.raises(PlantedFault):
            prepared.step()

    with pytest.raises(TornStepError):
        in_step(trainer, lambda: model(make_data(4)[0]).sum().backward(), swallow)
    trainer.close()


def test_an_interrupt_in_the_optimizer_goes_on_as_what_it_is_and_tears_the_step(tmp_path: Path) -> None:
    model = make_model()

    class Interrupted(SGD):
        def step(self, closure: Any = None) -> Any:
            raise KeyboardInterrupt

    trainer = trainer_of(tmp_path, model)
    optimizer = trainer.prepare(Interrupted(model.parameters()))
    with pytest.raises(KeyboardInterrupt):
        in_step(trainer, lambda: model(make_data(4)[0]).sum().backward(), optimizer.step)
    with pytest.raises(TornStepError):
        in_step(trainer)
    trainer.close()


def test_one_of_two_optimizers_that_stepped_tears_the_step_when_the_other_fails(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    first, second = trainer.prepare([SGD(model[0].parameters()), SGD(model[2].parameters())])
    with pytest.raises(TornStepError, match="1 of 2 had ended"):
        in_step(trainer, lambda: model(make_data(4)[0]).sum().backward(), first.step, fail)
    trainer.close()
    second.zero_grad()


# ---- several ranks ----


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize(("rollback", "has_moods"), [("gradients", False), ("full", True)])
def test_an_exception_on_all_ranks_leaves_no_bit_changed_on_any(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int, rollback: str, has_moods: bool
) -> None:
    phases = ("entered", "in forward", "forward done", "backward done", "clipped")
    options = (num_micro_steps, rollback, has_moods, len(phases) + 2)
    expected = ranks.run(2, training_rank, tmp_path, Faults(), *options)
    for index in {0, num_micro_steps - 1}:
        faults = fail_in_turn(0, 1, phases=[f"{phase} {index}" for phase in phases])
        got = ranks.run(2, training_rank, tmp_path, faults, *options)
        assert [len(caught) for _, caught in got] == [len(phases)] * 2
        assert [records for records, _ in got] == [records for records, _ in expected], index


@pytest.mark.parametrize(("rollback", "has_moods"), [("gradients", False), ("full", True)])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_takes_a_step_again_alone_before_gradients_are_exchanged(
    ranks: RankPool, tmp_path: Path, failing: int, rollback: str, has_moods: bool
) -> None:
    phases = ("entered 0", "in forward 0", "backward done 0", "in backward 1", "in forward 1", "entered 2")
    options = (3, rollback, has_moods, len(phases) + 2)
    expected = ranks.run(2, training_rank, tmp_path, Faults(), *options)
    got = ranks.run(2, training_rank, tmp_path, fail_in_turn(failing, phases=phases), *options)
    assert [len(caught) for _, caught in got] == [len(phases) * (rank == failing) for rank in (0, 1)]
    assert [records for records, _ in got] == [records for records, _ in expected]


def failing_rank(rank: int, folder: Path, phase: str, num_micro_steps: int = 1) -> str:
    """What ends this rank when rank 1 alone fails in the micro-step that exchanges gradients, and goes on."""
    options: dict[str, Any] = {"rollback": "gradients", "timeout_seconds": 3.0}
    run = Run(folder, rank, fails(1, phase=phase), num_micro_steps=num_micro_steps, **options)
    try:
        with run.trainer:
            run.train(NUM_STEPS + 20)
    except ElasticError as error:
        assert run.trainer.global_step == FAULTY_STEP
        print(type(error).__name__, error, flush=True)
        os._exit(3)  # as an exception that nobody catches would end it
    except RuntimeError as error:
        has_shared = phase.startswith(("backward done", "clipped", "in optimizer"))
        assert run.trainer.global_step == FAULTY_STEP + has_shared  # else it waits in the step that the other one left
        return str(error)
    raise AssertionError("ranks that came apart went on")


QUICK = (("clipped", 1), ("in backward", 3))  # each takes seconds to be noticed; the others are slow tests
EXCHANGING = [
    pytest.param(phase, num_micro_steps, marks=[] if (phase, num_micro_steps) in QUICK else pytest.mark.slow)
    for phase in BEFORE[1:]
    for num_micro_steps in (1, 3)
]


@pytest.mark.parametrize(("phase", "num_micro_steps"), EXCHANGING)
def test_a_rank_that_fails_alone_where_gradients_are_exchanged_does_not_go_on(
    ranks: RankPool, tmp_path: Path, phase: str, num_micro_steps: int
) -> None:
    place = f"{phase} {num_micro_steps - 1}"
    healthy, failed = ranks.run_outcomes(2, failing_rank, tmp_path, place, num_micro_steps, deadline_seconds=40)
    assert healthy.error is None and "peer" in str(healthy.value)
    assert failed.exit_code == 3
    assert "RanksDisagreeError rank 1 (" in failed.output and "took back a step that had failed on it" in failed.output
    assert "did not, and waits for rank 1 in that step, unless it has died or hangs" in failed.output


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize("failing", [(0, 1), (0,), (1,)])
def test_ranks_that_fail_after_scheduler_and_optimizer_stepped_find_the_step_committed(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int, failing: tuple[int, ...]
) -> None:
    expected = ranks.run(2, training_rank, tmp_path, Faults(), num_micro_steps, "gradients", False)
    phases = [f"{phase} {num_micro_steps - 1}" for phase in ("scheduler done", "gradients zeroed")]
    faults = fail_in_turn(*failing, phases=phases)
    got = ranks.run(2, training_rank, tmp_path, faults, num_micro_steps, "gradients", False)
    assert [len(caught) for _, caught in got] == [2 * (rank in failing) for rank in (0, 1)]
    assert [records for records, _ in got] == [records for records, _ in expected]


def scheduled_rank(rank: int, folder: Path, faults: Faults, num_micro_steps: int) -> tuple[int, int, list[Any], str]:
    """How far steps and their schedule came, the model then, and what ended training before all steps were taken."""
    run = Run(folder, rank, faults, num_micro_steps=num_micro_steps, rollback="gradients")
    told = ""
    try:
        with run.trainer:
            run.train()
    except ElasticError as error:
        told = f"{type(error).__name__}: {error}"
    return run.trainer.global_step, run.scheduler.last_epoch, bits_of(run.model), told


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_ranks_that_all_fail_between_optimizer_and_scheduler_go_on_alike(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int
) -> None:
    faults = fails(0, 1, phase=f"optimizer done {num_micro_steps - 1}")
    one, other = ranks.run(2, scheduled_rank, tmp_path, faults, num_micro_steps)
    assert one == other
    assert one[:2] == (NUM_STEPS, NUM_STEPS - 1)
    assert one[3] == ""


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_alone_fails_between_optimizer_and_scheduler_is_named_before_rates_drift_apart(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int, failing: int
) -> None:
    faults = fails(failing, phase=f"optimizer done {num_micro_steps - 1}")
    for step, _, _, told in ranks.run(2, scheduled_rank, tmp_path, faults, num_micro_steps, deadline_seconds=30):
        assert told.startswith("RanksDisagreeError: ranks differ in steps of schedules: ")
        assert f"rank {failing}: {FAULTY_STEP + 1} steps" in told
        assert step == FAULTY_STEP + 2  # an agreement is read one boundary after it is begun


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_optimizers_that_fail_on_all_ranks_tear_the_step_on_each(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int
) -> None:
    faults = fails(0, 1, phase=f"in optimizer {num_micro_steps - 1}")
    for *came, _, told in ranks.run(2, scheduled_rank, tmp_path, faults, num_micro_steps, deadline_seconds=30):
        assert told.startswith("TornStepError: ") and "resume from a checkpoint" in told
        assert came == [FAULTY_STEP, FAULTY_STEP]


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_an_optimizer_that_fails_on_one_rank_tears_the_step_there_and_the_other_rank_does_not_go_on(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int
) -> None:
    phase = f"in optimizer {num_micro_steps - 1}"
    healthy, torn = ranks.run_outcomes(2, failing_rank, tmp_path, phase, num_micro_steps, deadline_seconds=40)
    assert healthy.error is None and "peer" in str(healthy.value)
    assert torn.exit_code == 3
    assert "TornStepError" in torn.output and "resume from a checkpoint" in torn.output


def leaving_rank(rank: int, folder: Path, faults: Faults) -> str:
    """What ends this rank when an exception leaves the training of rank 1."""
    run = Run(folder, rank, faults, num_micro_steps=1, rollback="gradients")
    try:
        with run.trainer, run.trainer.epoch():
            for inputs, targets in run.source:
                run.micro_step(inputs, targets, 0)
                if run.trainer.global_step == NUM_STEPS:
                    break
    except (ElasticError, PlantedFault) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_exception_that_leaves_one_ranks_training_is_told_to_the_others(ranks: RankPool, tmp_path: Path) -> None:
    faults = Faults(Fault(rank=1, step=NUM_STEPS - 1, action="raise", phase="gradients zeroed 0"))
    told = ranks.run(2, leaving_rank, tmp_path, faults, process_group=True, deadline_seconds=30)
    assert told[1].startswith("PlantedFault")
    assert told[0].startswith("PeerLostError")
    assert "PlantedFault: planted at rank 1" in told[0]


# ---- rollback() ----


def test_rollback_hands_out_the_same_samples_again(tmp_path: Path) -> None:
    run = Run(tmp_path, 0, Faults(), num_micro_steps=2, rollback="gradients")
    seen = []
    with run.trainer:
        for number, (inputs, targets) in enumerate(run.source):
            seen.append(inputs)
            with run.trainer.step():
                nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number == 1:
                    run.trainer.rollback()
                    assert run.model.first.weight.grad is None
                else:
                    run.optimizer.step()
            if number == 3:
                break
        assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
        assert run.trainer.global_step == 1
        run.trainer.rollback()  # at a boundary there is nothing to undo
        assert run.trainer.global_step == 1


def test_rollback_after_the_optimizer_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, 0, Faults(), num_micro_steps=1, rollback="gradients")
    inputs, _ = make_data(4)
    with run.trainer:
        next(iter(run.source))
        work = (lambda: run.model(inputs).sum().backward(), run.optimizer.step, run.trainer.rollback)
        with pytest.raises(StepError, match="cannot be rolled back"):
            in_step(run.trainer, *work)
        assert run.trainer.global_step == 1


def test_a_plain_dataloader_goes_past_the_samples_of_a_failed_step_and_says_so_once(tmp_path: Path) -> None:
    model = make_model()
    loader = DataLoader(TensorDataset(*make_data(24)), batch_size=4)
    with seen_by() as seen:
        trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with trainer, trainer.epoch():
            for number, (inputs, targets) in enumerate(loader):
                try:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        if number in (1, 2):
                            raise PlantedFault
                        optimizer.step()
                except PlantedFault:
                    pass
    said = [line for line in seen.log if "do not come again" in line]
    assert len(said) == 1
    assert trainer.global_step == 2


def losing_rank(rank: int, folder: Path, places: tuple[int, int]) -> tuple[int, str]:
    """How many steps are taken where each rank fails at its place of the first one, and what ends training before."""
    model, data = make_model(), TensorDataset(*make_data(96))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, rank, shuffle=False))
    trainer = trainer_of(folder, shared(model, 2), loader, rank=rank, global_batch_size=32)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    told = ""
    try:
        with trainer, trainer.epoch():
            for number, (inputs, targets) in enumerate(loader):
                with suppress(PlantedFault), trainer.step():
                    nn.functional.cross_entropy(trainer._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    if number == places[rank]:
                        raise PlantedFault
                    optimizer.step()
                    optimizer.zero_grad()
    except RanksDisagreeError as error:
        told = str(error)
    return trainer.global_step, told


@pytest.mark.parametrize("places", [(0, 1), (2, 0)])
def test_ranks_that_lose_unlike_numbers_of_batches_to_a_step_do_not_go_on(
    ranks: RankPool, tmp_path: Path, places: tuple[int, int]
) -> None:
    for step, told in ranks.run(2, losing_rank, tmp_path, places, deadline_seconds=30):
        assert step == 0
        assert told.startswith("ranks differ in micro-batches of a step that failed: ")
        for rank, place in enumerate(places):
            assert f"rank {rank}: 0 steps, 0 boundaries, {place + 1} micro-batches of a step that failed" in told


def test_ranks_that_lose_as_many_batches_to_a_step_go_on(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, losing_rank, tmp_path, (1, 1), deadline_seconds=30) == [(3, "")] * 2  # 10 of 12 batches


def test_ranks_that_come_apart_in_an_epoch_are_named(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, breaking_rank, tmp_path, process_group=True, deadline_seconds=30)
    assert all(text.startswith("ranks differ in") and "rank 1: 2 steps" in text for text in told), told


def breaking_rank(rank: int, folder: Path) -> str:
    """Rank 1 leaves its epoch one step early, where nothing of torch keeps the ranks together."""
    model = make_model()
    trainer = trainer_of(folder, shared(model, 2), rank=rank, agree_every_steps=100)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    try:
        with trainer, trainer.epoch():
            for step in range(3):
                if rank == 1 and step == 2:
                    break
                with trainer.step():
                    if step < 2:
                        trainer._model(make_data(4)[0]).sum().backward()
                        optimizer.step()
    except RanksDisagreeError as error:
        return str(error)
    raise AssertionError("ranks that came apart ended well")
