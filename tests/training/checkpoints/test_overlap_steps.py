"""A checkpoint of steps unlike others: of several micro-steps, taken within backward, or by unknown optimizers.

Where ``optimizer.step()`` alone changes parameters they are copied beside all micro-steps of the step that comes next;
where something else may, before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.support.overlapping import MICRO_BATCH, SAVED_STEP, WRAPS, Gate, Net, forget_newer, saving_trainer
from tests.support.ranks import RankPool
from tests.support.training import bits_of, make_data

NUM_MICRO_STEPS = 3


def nothing(_: int) -> None:
    """To be done in a micro-step."""


# --- several micro-steps --------------------------------------------------------------------------------------------


class Gathering:
    """A run whose steps have several micro-steps, and that saves after every second step."""

    def __init__(self, rank: int, folder: Path, way: str, *, seed: int = 0, **arguments: Any) -> None:
        num_ranks = 1 if way == "plain" else torch.distributed.get_world_size()
        self.model = WRAPS[way](Net(seed, is_sharded=way == "fully_shard"))
        self.inner = AdamW(self.model.parameters(), lr=0.01)
        global_batch = NUM_MICRO_STEPS * MICRO_BATCH * num_ranks
        self.trainer = saving_trainer(folder, self.model, rank=rank, global_batch_size=global_batch, **arguments)
        self._optimizer = self.trainer.prepare(self.inner)
        self._rank = rank

    @property
    def is_copying(self) -> bool:
        found: bool = self.trainer._training.checkpoints.job.saver.is_copying
        return found

    def state(self) -> list[Any]:
        return bits_of(self.model, [state for part, state in self.inner.state.items() if part.numel()])

    def take(self, place: int, within: Callable[[int], object] = nothing) -> None:
        """One step; ``within`` is called in each micro-step, between backward and ``optimizer.step()``."""
        for micro_step in range(NUM_MICRO_STEPS):
            inputs, targets = make_data(MICRO_BATCH, torch.float32, seed=100 * place + 10 * micro_step + self._rank)
            with self.trainer.step():
                nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                within(micro_step)
                self._optimizer.step()
                self._optimizer.zero_grad()


def gather_beside_a_copy(rank: int, folder: Path, way: str) -> tuple[list[Any], list[Any]]:
    """What there was when the checkpoint was due, and at the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        gate.open()
        run = Gathering(rank, folder, way)

        def open_in_the_last(micro_step: int) -> None:
            assert run.is_copying
            if micro_step == NUM_MICRO_STEPS - 1:
                gate.open_soon()

        with run.trainer:
            for place in range(SAVED_STEP):
                run.take(place)
            due = run.state()
            gate.close()
            run.take(SAVED_STEP, open_in_the_last)
            assert not run.is_copying
            run.take(SAVED_STEP + 1)
            assert run.trainer.global_step == SAVED_STEP + 2
        return due, run.state()


def gather_on_rank(rank: int, folder: Path, way: str) -> None:
    due, ended = gather_beside_a_copy(rank, folder, way)
    if rank == 0:
        forget_newer(folder, 2 * SAVED_STEP)
    if way != "plain":
        torch.distributed.barrier()
    resumed = Gathering(rank, folder, way, seed=7)
    with resumed.trainer:
        assert resumed.trainer.global_step == SAVED_STEP
        assert resumed.state() == due
    unlike = Gathering(rank, folder, way, job="another", overlap_saving=False)
    with unlike.trainer:
        for place in range(SAVED_STEP + 2):
            unlike.take(place)
    assert unlike.state() == ended != due


def test_what_is_copied_beside_all_micro_steps_of_a_step_is_saved_as_it_was_before_it(tmp_path: Path) -> None:
    gather_on_rank(0, tmp_path, "plain")


@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
def test_the_same_on_ranks_that_share_gradients_in_the_last_micro_step(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    ranks.run(2, gather_on_rank, tmp_path, way)


def test_a_step_that_fails_between_micro_steps_while_it_is_copied_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.open()
    run = Gathering(0, tmp_path, "plain")

    def fail(micro_step: int) -> None:
        assert run.is_copying
        if micro_step == 1:
            raise ZeroDivisionError

    def open_in_the_last(micro_step: int) -> None:
        assert run.is_copying, "what the first attempt began goes on"
        if micro_step == NUM_MICRO_STEPS - 1:
            gate.open_soon()

    with run.trainer:
        for place in range(SAVED_STEP):
            run.take(place)
        due = bits_of(list(run.model.parameters()), list(run.inner.state.values()))
        gate.close()
        with pytest.raises(ZeroDivisionError):
            run.take(SAVED_STEP, fail)
        run.take(SAVED_STEP, open_in_the_last)
    forget_newer(tmp_path, SAVED_STEP + 1)  # of the end
    resumed = Gathering(0, tmp_path, "plain", seed=7)
    with resumed.trainer:
        assert resumed.trainer.global_step == SAVED_STEP
        assert bits_of(list(resumed.model.parameters()), list(resumed.inner.state.values())) == due


def test_mutate_between_micro_steps_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open()
    run = Gathering(0, tmp_path, "plain")

    def change(micro_step: int) -> None:
        assert run.is_copying is (micro_step == 0)
        if micro_step == 0:
            opened = gate.open_soon()
            with run.trainer.mutate(), torch.no_grad():
                assert not opened.is_alive()
                for part in run.model.parameters():
                    part.data.mul_(1.5)

    with run.trainer:
        for place in range(SAVED_STEP):
            run.take(place)
        due = run.state()
        gate.close()
        run.take(SAVED_STEP, change)
    forget_newer(tmp_path, SAVED_STEP + 1)  # of the end
    resumed = Gathering(0, tmp_path, "plain", seed=7)
    with resumed.trainer:
        assert resumed.state() == due


def test_once_an_epoch_is_left_in_the_middle_of_a_step_nothing_is_copied_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.open()
    run = Gathering(0, tmp_path, "plain")
    with run.trainer:
        with run.trainer.epoch(0):
            for place in range(SAVED_STEP):
                run.take(place)
            due = run.state()
            gate.close()
            with run.trainer.step():
                assert run.is_copying
            opened = gate.open_soon()
        assert not run.is_copying
        opened.join()
        with torch.no_grad():  # as where averaged weights are put in for an evaluation, and taken out again
            for part in run.model.parameters():
                part.data.mul_(2.0)
                part.mul_(0.5)
    resumed = Gathering(0, tmp_path, "plain", seed=7)
    with resumed.trainer:
        assert resumed.state() == due


# --- whatever else may change parameters ----------------------------------------------------------------------------


class Whole:
    """A run that saves after every second step, and of which nothing may be copied beside a step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
        self.gate = Gate(monkeypatch)  # and stays shut
        self.model = Net(seed, is_sharded=False)
        self.optimizers = self.make_optimizers(list(self.model.parameters()))
        self.trainer = saving_trainer(folder, self.model)
        self.before_prepare()
        self.prepared = self.trainer.prepare(self.optimizers)
        self.after_prepare()

    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        raise NotImplementedError

    def before_prepare(self) -> None:
        """What a script does then."""

    def after_prepare(self) -> None:
        """What a script does then."""

    def state(self) -> list[Any]:
        held = [each.state[part] for each in self.optimizers for part in each.param_groups[0]["params"]]
        return bits_of(self.model, [sorted(each.items()) for each in held])

    def learn(self, loss: torch.Tensor) -> None:
        """The backward pass, and what else there is to a step."""
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.prepared:
            optimizer.step()
            optimizer.zero_grad()

    def take(self, place: int) -> None:
        inputs, targets = make_data(MICRO_BATCH, torch.float32, seed=place)
        with self.trainer.step():
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            assert not self.trainer._training.checkpoints.job.saver.is_copying
            self.learn(loss)


class InBackward(Whole):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        return [AdamW([part], lr=0.01) for part in parts]

    def after_prepare(self) -> None:
        for part, optimizer in zip(self.model.parameters(), self.prepared, strict=True):
            cast("Any", part).register_post_accumulate_grad_hook(lambda _, each=optimizer: _step_and_clear(each))

    def learn(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class InBackwardSinceBefore(InBackward):
    """Its hooks find the optimizers that prepare() returns when they are called."""

    def before_prepare(self) -> None:
        for place, part in enumerate(self.model.parameters()):
            cast("Any", part).register_post_accumulate_grad_hook(
                lambda _, place=place: _step_and_clear(self.prepared[place])
            )

    def after_prepare(self) -> None:
        """The hooks are there."""


class ByHandInBackward(Whole):
    """Some parameters are changed by a hook of the script's own, which no optimizer and no version tells of."""

    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        return [SGD(parts, lr=0.1, momentum=0.9)]

    def after_prepare(self) -> None:
        for part in self.model.first.parameters():
            cast("Any", part).register_post_accumulate_grad_hook(_descend)


class OwnAdamW(AdamW):
    """Torch's, under another name."""


class Averaging(Optimizer):
    """An optimizer of somebody's own, which trains other parameters than are evaluated, and swaps them in between."""

    def __init__(self, parts: Iterable[nn.Parameter], rate: float) -> None:
        super().__init__(parts, {"lr": rate})
        self._trains = True

    def turn(self, *, trains: bool) -> None:
        """Have the parameters to train, or their average, in the model."""
        for part in self.param_groups[0]["params"] if trains is not self._trains else ():
            other = self.state[part]["average"]
            part.data, self.state[part]["average"] = other, part.data.clone()
        self._trains = trains

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.param_groups[0]["params"]:
            state = self.state[part]
            if not state:
                state["average"], state["num_steps"] = part.detach().clone(), torch.tensor(0.0)
            state["num_steps"] += 1
            part.sub_(part.grad, alpha=self.param_groups[0]["lr"])
            state["average"].lerp_(part, 1 / float(state["num_steps"]))


class OfTorchsKind(Whole):
    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        return [OwnAdamW(parts, lr=0.01)]


class OfNoKnownKind(Whole):
    """Whose parameters change in the middle of a step, by no ``step()``."""

    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        return [Averaging(parts, 0.1)]

    def learn(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        (average,) = cast("list[Averaging]", self.optimizers)
        if average.state:
            average.turn(trains=False)
            average.turn(trains=True)
        for part in self.model.parameters():
            part.data.mul_(1.5)
        self.prepared[0].step()
        self.prepared[0].zero_grad()


class OneUnknownOfTwo(Whole):
    def make_optimizers(self, parts: list[nn.Parameter]) -> list[Optimizer]:
        return [AdamW(parts[:2], lr=0.01), OwnAdamW(parts[2:], lr=0.01)]


def _step_and_clear(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _descend(part: Any) -> None:
    part.data.sub_(part.grad, alpha=0.5)


@pytest.mark.parametrize(
    "kind",
    [InBackward, InBackwardSinceBefore, ByHandInBackward, OfTorchsKind, OfNoKnownKind, OneUnknownOfTwo],
)
def test_what_may_change_elsewhere_than_in_a_known_step_is_copied_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Whole]
) -> None:
    run = kind(tmp_path, monkeypatch)
    with run.trainer:
        for place in range(SAVED_STEP):
            run.take(place)
        due = run.state()
        run.take(SAVED_STEP)
        run.take(SAVED_STEP + 1)
        assert run.trainer.global_step == SAVED_STEP + 2
        assert run.state() != due
        ended = run.state()
    resumed = kind(tmp_path, monkeypatch, seed=7)
    with resumed.trainer:
        assert resumed.trainer.global_step == SAVED_STEP + 2
        assert resumed.state() == ended
    forget_newer(tmp_path, 2 * SAVED_STEP)
    resumed = kind(tmp_path, monkeypatch, seed=7)
    with resumed.trainer:
        assert resumed.trainer.global_step == SAVED_STEP
        assert resumed.state() == due


def test_hooks_that_have_gone_hold_up_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open()
    run = Gathering(0, tmp_path, "plain")
    part: Any = next(run.model.parameters())
    hook = part.register_post_accumulate_grad_hook(lambda _: None)
    seen: list[bool] = []
    with run.trainer:
        for place in range(2 * SAVED_STEP + 1):
            run.take(place, lambda micro_step: seen.append(run.is_copying) if micro_step == 0 else None)
            if place == SAVED_STEP:
                hook.remove()
    assert seen == [False, False, False, False, True]
