"""ElasticOptimizer within a trainer: loops of every order, closures, GradScaler, several optimizers, live changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from elastic_ext import CheckpointInterval, StepError, TornStepError
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp import convert_to_dcp
from tests.support.loops import put, seen_by
from tests.support.training import Slices, bits_of, make_data, make_model, plain_losses, trainer_of
from tests.training.optimizers.test_optimizer import MADE, MakeOptimizer, Parameters, groups_of

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the loop -----------------------------------------------------------------------------------------------


def take_steps(
    trainer: Any,
    model: nn.Module,
    optimizer: Any,
    *,
    num_steps: int,
    micro_steps: int = 1,
    after: Callable[[], object] = lambda: None,
) -> None:
    """The loop over the same samples again and again; ``after`` is called after each micro-step."""
    inputs, targets = make_data(8)
    for _ in range(num_steps):
        for x, y in zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True):
            with trainer.step():
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            after()


def in_micro_steps(folder: Path, model: nn.Module, num: int, **arguments: Any) -> Any:
    """A trainer whose steps take the 8 samples in so many micro-steps."""
    return trainer_of(folder, model, micro_batch_size=8 // num, global_batch_size=8, **arguments)


def momentum(parts: Parameters) -> Optimizer:
    return SGD(parts, lr=0.1, momentum=0.9)


def run_in_order(folder: Path, order: str, micro_steps: int, num_steps: int = 4) -> tuple[list[Any], list[bool]]:
    """The bits of model and optimizer after a loop in that order, and after which micro-steps gradients were gone."""
    model = make_model()
    inputs, targets = make_data(8)
    with in_micro_steps(folder, model, micro_steps) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        are_gone: list[bool] = []
        for _ in range(num_steps):
            for x, y in zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True):
                with trainer.step():
                    if order == "zero_grad first":
                        optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    if order == "zero_grad before backward":
                        optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    if order == "twice":
                        optimizer.step()
                        optimizer.zero_grad()
                        optimizer.zero_grad()
                        continue
                    optimizer.step()
                    if order == "zero_grad last":
                        optimizer.zero_grad(set_to_none=True)
                if order == "outside":
                    optimizer.zero_grad()
                are_gone.append(all(part.grad is None for part in model.parameters()))
        return bits_of(model, optimizer.state_dict()), are_gone


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize("order", ["zero_grad first", "zero_grad before backward", "outside", "twice"])
def test_zero_grad_does_the_same_wherever_the_loop_has_it(tmp_path: Path, order: str, micro_steps: int) -> None:
    usual, are_gone = run_in_order(tmp_path, "zero_grad last", micro_steps)
    assert run_in_order(tmp_path, order, micro_steps)[0] == usual
    assert are_gone == ([False] * (micro_steps - 1) + [True]) * 4


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_the_loop_trains_as_a_plain_one_on_whole_batches(tmp_path: Path, micro_steps: int) -> None:
    model = make_model()
    with in_micro_steps(tmp_path, model, micro_steps) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        take_steps(trainer, model, optimizer, num_steps=5, micro_steps=micro_steps)
    _, plain = plain_losses(momentum, [make_data(8)] * 5)
    for part, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-14)


def test_gradients_made_before_training_are_zeroed_by_the_first_zero_grad(tmp_path: Path) -> None:
    model = make_model()
    nn.functional.cross_entropy(model(make_data(3)[0]), make_data(3)[1]).backward()  # type: ignore[no-untyped-call]
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        inputs, targets = make_data(8)
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with trainer.step():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    _, plain = plain_losses(momentum, [make_data(8)])
    for part, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-14)


def test_gradients_set_to_zero_are_gathered_as_well(tmp_path: Path) -> None:
    model = make_model()
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        inputs, targets = make_data(8)
        for _ in range(3):
            for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                with trainer.step():
                    optimizer.zero_grad(set_to_none=False)
                    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
    _, plain = plain_losses(momentum, [make_data(8)] * 3)
    for part, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-14)


def test_hooks_are_called_where_a_step_ends_and_nowhere_else(tmp_path: Path) -> None:
    model = make_model()
    with in_micro_steps(tmp_path, model, 4) as trainer:
        optimizer = trainer.prepare(AdamW(model.parameters()))
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *ignored: called.append("pre"))
        optimizer.register_step_post_hook(lambda *ignored: called.append("post"))
        take_steps(trainer, model, optimizer, num_steps=2, micro_steps=4, after=lambda: called.append("|"))
    assert "".join(called) == "|||prepost||||prepost|"


def test_a_step_outside_of_steps_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        before = bits_of(model)
        with pytest.raises(StepError, match=r"optimizer\.step\(\) was called outside of `with trainer\.step\(\):`"):
            optimizer.step()
        take_steps(trainer, model, optimizer, num_steps=1)
        changed = bits_of(model)
        with pytest.raises(StepError, match="outside"):
            optimizer.step(lambda: None)
        assert bits_of(model) == changed != before


def test_after_a_torn_step_no_optimizer_steps_again(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        handle = optimizer.register_step_post_hook(lambda *ignored: 1 / 0)
        with pytest.raises(TornStepError):
            take_steps(trainer, model, optimizer, num_steps=1)
        handle.remove()
        before = bits_of(model)
        with pytest.raises(StepError):
            optimizer.step()
        assert bits_of(model) == before


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_closures_do_what_the_loop_without_them_does(tmp_path: Path, micro_steps: int) -> None:
    usual, _ = run_in_order(tmp_path, "zero_grad first", micro_steps)
    model = make_model()
    inputs, targets = make_data(8)
    losses: list[float] = []
    with in_micro_steps(tmp_path, model, micro_steps) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        for _ in range(4):
            for x, y in zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True):

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()  # type: ignore[no-untyped-call]
                    return loss

                with trainer.step():
                    losses.append(optimizer.step(closure).item())
        assert trainer.global_step == 4
        assert bits_of(model, optimizer.state_dict()) == usual
    assert len(losses) == 4 * micro_steps


def test_a_closure_that_raises_leaves_a_step_that_never_happened(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(momentum(list(model.parameters())))
        before = bits_of(model, optimizer.state_dict())
        with pytest.raises(ZeroDivisionError), trainer.step():
            optimizer.step(lambda: 1 / 0)
        assert bits_of(model, optimizer.state_dict()) == before
        take_steps(trainer, model, optimizer, num_steps=1)
        assert trainer.global_step == 1


def lbfgs_steps(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> list[float]:
    inputs, targets = make_data(8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    losses = []
    for _ in range(3):
        with step():
            losses.append(optimizer.step(closure).item())
    return losses


def test_lbfgs_takes_its_steps_as_without_a_trainer(tmp_path: Path) -> None:
    plain_model, model = make_model(), make_model()
    plain = LBFGS(plain_model.parameters(), lr=0.2, max_iter=4)
    expected = lbfgs_steps(plain_model, plain, torch.enable_grad)
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(LBFGS(model.parameters(), lr=0.1, max_iter=4))
        optimizer.rates.set_batch_factor(2.0)
        assert lbfgs_steps(model, optimizer, trainer.step) == expected
        assert trainer.global_step == 3
    assert bits_of(model) == bits_of(plain_model)


def test_lbfgs_goes_on_from_a_checkpoint_and_back_to_one_bit_for_bit(tmp_path: Path) -> None:
    def prepared() -> tuple[Any, nn.Module, Any]:
        model, interval = make_model(), CheckpointInterval(steps=1)
        trainer = trainer_of(tmp_path, model, shared_storage_path=tmp_path / "storage", checkpoint_interval=interval)
        return trainer, model, trainer.prepare(LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=6))

    plain_model = make_model()
    plain = LBFGS(plain_model.parameters(), lr=0.2, max_iter=4, history_size=6)
    expected = lbfgs_steps(plain_model, plain, torch.enable_grad) + lbfgs_steps(plain_model, plain, torch.enable_grad)
    trainer, model, optimizer = prepared()
    with trainer:
        assert lbfgs_steps(model, optimizer, trainer.step) == expected[:3]
    trainer, model, optimizer = prepared()
    with trainer:
        assert lbfgs_steps(model, optimizer, trainer.step) == expected[3:]
        assert bits_of(model) == bits_of(plain_model)
        folder = trainer.rewind(1)  # when lists were shorter
        assert lbfgs_steps(model, optimizer, trainer.step) == expected[1:4]
    with pytest.raises(CheckpointError, match=r"that is a list of tensors, or the like: 0\.weight/al, "):
        convert_to_dcp(folder, tmp_path / "dcp")


def test_lbfgs_with_several_micro_steps_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = make_model()
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(LBFGS(model.parameters(), max_iter=4))
        with pytest.raises(StepError) as caught:
            lbfgs_steps(model, optimizer, trainer.step)
    told = f"{caught.value} {caught.value.__cause__}"
    assert "LBFGS evaluates its closure more than once, which cannot be done with 2 micro-steps per step" in told


# --- GradScaler -----------------------------------------------------------------------------------------------------


def scaled_steps(
    model: nn.Module,
    optimizer: Any,
    step: Callable[[], Any],
    *,
    micro_steps: int = 1,
    infinite_at: int | None = None,
    unscales: Callable[[], bool] = lambda: False,
    acts: Callable[[], bool] = lambda: True,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Four steps of the usual loop with a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, targets = make_data(8, torch.float32)
    for number in range(4):
        for x, y in zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True):
            with step():
                loss = nn.functional.cross_entropy(model(x), y)
                if number == infinite_at:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                if unscales():
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if acts():
                    scaler.step(optimizer)
                    scaler.update()
                after()
                optimizer.zero_grad()


@pytest.mark.parametrize("infinite_at", [None, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_scales_as_without_a_trainer(tmp_path: Path, fused: bool, infinite_at: int | None) -> None:
    plain_model, model = make_model(torch.float32), make_model(torch.float32)
    scaled_steps(
        plain_model, AdamW(plain_model.parameters(), eps=1e-3, fused=fused), torch.enable_grad, infinite_at=infinite_at
    )
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(AdamW(model.parameters(), eps=1e-3, fused=fused))
        scaled_steps(model, optimizer, trainer.step, infinite_at=infinite_at)
    assert bits_of(model) == bits_of(plain_model)


def test_a_step_that_a_grad_scaler_leaves_out_does_not_commit_and_no_schedule_moves(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    raw = SGD(model.parameters(), lr=0.1)
    with trainer_of(tmp_path, model) as trainer:
        optimizer, scheduler = trainer.prepare(raw, StepLR(raw, 1, gamma=0.5))
        rates: list[float] = []
        optimizer.register_step_pre_hook(lambda seen, *ignored: rates.append(seen.param_groups[0]["lr"]))
        scaled_steps(model, optimizer, trainer.step, infinite_at=0, after=scheduler.step)
        assert trainer.global_step == 3
    assert rates == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_in_every_micro_step_gives_the_gradient_of_the_whole_step(tmp_path: Path, fused: bool) -> None:
    plain_model, model = make_model(torch.float32), make_model(torch.float32)
    scaled_steps(plain_model, SGD(plain_model.parameters(), lr=0.1, fused=fused), torch.enable_grad)
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, fused=fused))
        scaled_steps(model, optimizer, trainer.step, micro_steps=2)
        assert trainer.global_step == 4
    for part, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-6)


def test_unscaling_in_a_micro_step_that_gathers_is_refused(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        with pytest.raises(StepError, match="unscale_"):
            scaled_steps(model, optimizer, trainer.step, micro_steps=2, unscales=lambda: True)


@pytest.mark.parametrize("acts_where", ["at the end", "always"])
@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_and_clipping_where_a_step_ends_do_what_they_do_without_a_trainer(
    tmp_path: Path, fused: bool, acts_where: str
) -> None:
    plain_model, model = make_model(torch.float32), make_model(torch.float32)
    plain = SGD(plain_model.parameters(), lr=0.1, fused=fused)
    scaled_steps(plain_model, plain, torch.enable_grad, unscales=lambda: True)
    with in_micro_steps(tmp_path, model, 2) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, fused=fused))
        scaled_steps(
            model,
            optimizer,
            trainer.step,
            micro_steps=2,
            unscales=lambda: trainer.sync_gradients,
            acts=lambda: trainer.sync_gradients or acts_where == "always",
        )
        assert trainer.global_step == 4
    for part, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=1e-6)


# --- several optimizers ---------------------------------------------------------------------------------------------


def test_several_optimizers_commit_when_all_have_stepped(tmp_path: Path) -> None:
    model = make_model()
    raw = [SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters(), lr=0.02)]
    with trainer_of(tmp_path, model, micro_batch_size=8, global_batch_size=8) as trainer:
        first, second = optimizers = trainer.prepare(raw)
        assert isinstance(optimizers, list)
        inputs, targets = make_data(8)
        counts = []
        for number in range(4):
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                first.step()
                first.zero_grad()
                if number % 2:
                    second.step()
                    second.zero_grad()
            counts.append(trainer.global_step)
            assert all(part.grad is None for part in model.parameters())
        assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize("micro_steps", [2, 4])
def test_a_loss_that_reaches_the_parameters_of_an_optimizer_that_has_gathered_is_refused(
    tmp_path: Path, micro_steps: int
) -> None:
    models = nn.ModuleDict({"maker": nn.Linear(6, 6).double(), "judge": nn.Linear(6, 1).double()})
    with in_micro_steps(tmp_path, models, micro_steps) as trainer:
        judge, maker = trainer.prepare([SGD(models[name].parameters(), lr=0.1) for name in ("judge", "maker")])
        before = bits_of(models)

        def train() -> None:
            for inputs in make_data(8)[0].chunk(micro_steps):
                with trainer.step():
                    judge.zero_grad()
                    models["judge"](inputs).mean().backward()
                    judge.step()
                    maker.zero_grad()
                    models["judge"](models["maker"](inputs)).mean().backward()
                    maker.step()

        with pytest.raises(StepError, match="parameters of an optimizer got gradients after its") as caught:
            train()
        assert not isinstance(caught.value, TornStepError)
        assert bits_of(models) == before


def test_one_optimizer_in_a_list_comes_back_in_a_list(tmp_path: Path) -> None:
    model = make_model()
    raw = SGD(model.parameters(), lr=0.1)
    with trainer_of(tmp_path, model) as trainer:
        prepared = trainer.prepare([raw], [StepLR(raw, 1)])
        assert [len(each) for each in prepared] == [1, 1]


def test_the_second_optimizer_that_fails_tears_the_step(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        first, second = trainer.prepare([SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)])
        second.register_step_pre_hook(lambda *ignored: 1 / 0)
        with pytest.raises(TornStepError, match="1 of 2 had ended"):
            take_steps(trainer, model, _All([first, second]), num_steps=1)


def test_optimizers_keep_their_ratios_to_the_first(tmp_path: Path) -> None:
    model = make_model()
    *parts, weight, bias = model.parameters()
    raw = [
        AdamW(parts, lr=0.1, weight_decay=0.2),
        AdamW([weight], lr=0.02, weight_decay=0.1),
        AdamW([bias], lr=0.0, weight_decay=0.0),
    ]
    with trainer_of(tmp_path, model) as trainer:
        optimizers = trainer.prepare(raw)
        trainer.propose({"optimizer.learning_rate": 0.5, "optimizer.weight_decay": 0.4}, "larger")
        take_steps(trainer, model, _All(optimizers), num_steps=2)
        assert [each.effective_rates for each in optimizers] == [[0.5], pytest.approx([0.1]), [0.0]]
        assert [each.rates.base_decay for each in optimizers] == [0.4, pytest.approx(0.2), 0.0]


class _All:
    """Several optimizers as one, for the loop here."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class WithoutRate(Optimizer):
    """An optimizer of a user's, which has no rate."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def test_a_second_optimizer_without_a_rate_is_no_obstacle_or_a_reason(tmp_path: Path) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizers = trainer.prepare([SGD(model[0].parameters(), lr=0.1), WithoutRate(model[2].parameters())])
        proposal = trainer.propose({"optimizer.learning_rate": 0.5}, "larger")
        take_steps(trainer, model, _All(optimizers), num_steps=2)
        assert proposal.outcome in ("in force", "refused")
        assert optimizers[0].effective_rates == [0.5 if proposal.outcome == "in force" else 0.1]
        assert optimizers[1].effective_rates == []


# --- live changes within a trainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_rate_and_decay_change_for_all_groups_with_and_without_a_schedule(
    tmp_path: Path, scheduled: bool, by_file: bool
) -> None:
    model = make_model()
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias], "lr": 0.05, "weight_decay": 0.0},
        {"params": [model[2].bias], "weight_decay": 0.6},
    ]
    raw = AdamW(groups, lr=0.1, weight_decay=0.3)
    trainer = trainer_of(tmp_path, model)
    used: list[tuple[list[float], list[float]]] = []
    raw.register_step_pre_hook(
        lambda seen, *ignored: used.append((groups_of(seen, "lr"), groups_of(seen, "weight_decay")))
    )
    with trainer:
        if scheduled:
            optimizer, _ = trainer.prepare(raw, StepLR(raw, 100))
        else:
            optimizer = trainer.prepare(raw)
        take_steps(trainer, model, optimizer, num_steps=1)
        for version, (rate, decay) in enumerate([(0.2, 0.3), (0.2, 0.15), (0.1, 0.3)], 1):
            if by_file:
                values = {"learning_rate": rate, "weight_decay": decay}
                put(tmp_path, 0, {"version": version, "optimizer": values}, seen_by=trainer._prepared.follower)
            else:
                trainer.propose({"optimizer.learning_rate": rate, "optimizer.weight_decay": decay}, "to see it")
            take_steps(trainer, model, optimizer, num_steps=3)
            assert trainer.config.optimizer.learning_rate == rate
            assert trainer.config.optimizer.weight_decay == decay
            assert used[-1][0] == pytest.approx([rate, rate / 2, rate], rel=1e-15)
            assert used[-1][1] == pytest.approx([decay, 0.0, decay * 2], rel=1e-15)
            assert optimizer.effective_rates == used[-1][0]
    assert used[0] == used[-1] == ([0.1, 0.05, 0.1], [0.3, 0.0, 0.6])


@pytest.mark.parametrize("name", ["SGD", "SGD fused", "AdamW foreach", "AdamW fused tensor rate", "NAdam"])
def test_a_live_change_and_the_same_change_by_hand_give_the_same_bits(tmp_path: Path, name: str) -> None:
    model, plain_model = make_model(), make_model()
    plain = MADE[name](list(plain_model.parameters()))
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(MADE[name](list(model.parameters())))
        inputs, targets = make_data(8)
        for number in range(6):
            if number == 2:
                trainer.propose({"optimizer.learning_rate": 0.03, "optimizer.weight_decay": 0.5}, "to see it")
            take_steps(trainer, model, optimizer, num_steps=1)
            nn.functional.cross_entropy(plain_model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            plain.step()
            plain.zero_grad()
            assert bits_of(model) == bits_of(plain_model)
            if trainer.config.optimizer.learning_rate == 0.03:
                rate = plain.param_groups[0]["lr"]
                plain.param_groups[0]["lr"] = torch.tensor(0.03) if isinstance(rate, torch.Tensor) else 0.03
                plain.param_groups[0]["weight_decay"] = 0.5
        assert trainer.config.optimizer.weight_decay == 0.5


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lambda parts: LBFGS(parts), {"optimizer.weight_decay": 0.1}, "LBFGS has no weight decay"),
        (lambda parts: SGD(parts, lr=0.0), {"optimizer.learning_rate": 0.1}, "the first group's learning rate is 0"),
        (lambda parts: WithoutRate(parts), {"optimizer.learning_rate": 0.1}, "WithoutRate has no learning rate"),
        (
            lambda parts: SGD(
                [{"params": parts[:2], "weight_decay": 0.0}, {"params": parts[2:]}], lr=0.1, weight_decay=0.1
            ),
            {"optimizer.weight_decay": 0.2},
            "put a decayed group first",
        ),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused_and_changes_nothing(
    tmp_path: Path, make: MakeOptimizer, change: dict[str, object], reason: str
) -> None:
    model = make_model()
    with seen_by() as seen, trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(make(list(model.parameters())))
        before = bits_of(optimizer.state_dict()["param_groups"])
        proposal = trainer.propose(change, "to be refused")
        for _ in range(2):
            with trainer.step():
                model(make_data(2)[0]).sum().backward()
                optimizer.step(lambda: 0.0)
        assert proposal.outcome == "refused"
        assert reason in proposal.refusal
        assert bits_of(optimizer.state_dict()["param_groups"]) == before
    assert any("was refused" in line and reason in line for line in seen.log)


def test_groups_added_in_mid_training_live_with_later_changes(tmp_path: Path) -> None:
    model = make_model()
    raw = SGD(model[0].parameters(), lr=0.1, weight_decay=0.2)
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(raw)
        take_steps(trainer, model, optimizer, num_steps=1)
        optimizer.add_param_group({"params": [model[2].weight], "lr": 0.05})
        raw.add_param_group({"params": [model[2].bias], "weight_decay": 0.1})
        before = bits_of(model[2])
        trainer.propose({"optimizer.learning_rate": 0.4, "optimizer.weight_decay": 0.6}, "larger")
        take_steps(trainer, model, optimizer, num_steps=3)
        assert optimizer.effective_rates == pytest.approx([0.4, 0.2, 0.4])
        assert groups_of(optimizer, "weight_decay") == pytest.approx([0.6, 0.6, 0.3])
        assert bits_of(model[2]) != before


def test_a_rate_set_by_hand_in_every_step_is_the_one_that_steps_use_times_the_batchs_factor(tmp_path: Path) -> None:
    """As in nanoGPT: the loop's own schedule has the last word over the group."""
    model = make_model()
    source = Slices(make_data(8), 4, is_endless=True)
    used: list[float] = []
    with trainer_of(tmp_path, model, source, global_batch_size=4, learning_rate_rule="linear") as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.5))
        optimizer.register_step_pre_hook(lambda seen, *ignored: used.append(seen.param_groups[0]["lr"]))
        for inputs, targets in source:
            with trainer.step():
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (1 + trainer.global_step)
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if trainer.global_step == 2 and trainer.sync_gradients:
                trainer.propose({"global_batch_size": 8}, "twice as large")
            if trainer.global_step == 6:
                break
    plain = [0.1 / (1 + step) for step in range(6)]
    factors = [rate / alone for rate, alone in zip(used, plain, strict=True)]
    assert factors[:3] == [1.0, 1.0, 1.0]
    assert factors[-1] == pytest.approx(2.0)
    assert set(factors) == {1.0, 2.0}


# --- resuming -------------------------------------------------------------------------------------------------------


def resumed_run(
    folder: Path, *, state: dict[str, Any] | None, make: Callable[[Parameters], Optimizer], order: str = ""
) -> Any:
    """A trainer and its optimizer, brought to ``state`` in that order of calls."""
    model = make_model()
    trainer, raw = trainer_of(folder, model), make(list(model.parameters()))
    if state is None:
        return trainer, model, trainer.prepare(raw)
    loads: dict[str, Callable[[], None]] = {
        "t": lambda: trainer.load_state_dict(state["trainer"]),
        "r": lambda: raw.load_state_dict(state["optimizer"]),
    }
    before, after = order.split("|")
    for call in before:
        loads[call]()
    optimizer = trainer.prepare(raw)
    loads["o"] = lambda: optimizer.load_state_dict(state["optimizer"])
    for call in after:
        loads[call]()
    return trainer, model, optimizer


def two_groups(parts: Parameters) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": parts[:2]}, {"params": parts[2:], "lr": 0.05, "weight_decay": 0.1}]
    return AdamW(groups, lr=0.1, weight_decay=0.2)


@pytest.mark.parametrize("order", ["|to", "|ot", "t|o", "rt|", "r|t"])
@pytest.mark.parametrize("with_file", [False, True])
def test_a_run_resumed_under_a_live_change_goes_on_under_it(tmp_path: Path, order: str, with_file: bool) -> None:
    trainer, model, optimizer = resumed_run(tmp_path, state=None, make=two_groups)
    with trainer:
        trainer.propose({"optimizer.learning_rate": 0.4, "optimizer.weight_decay": 0.6}, "larger")
        take_steps(trainer, model, optimizer, num_steps=3)
        state = copy.deepcopy({"trainer": trainer.state_dict(), "optimizer": optimizer.state_dict()})
        assert optimizer.effective_rates == pytest.approx([0.4, 0.2])
    rate, decay = 0.4, 0.6
    if with_file:  # somebody changed it while nothing ran
        rate, decay = 0.8, 0.3
        put(tmp_path, 0, {"version": 3, "optimizer": {"learning_rate": rate, "weight_decay": decay}})
    trainer, model, optimizer = resumed_run(tmp_path, state=state, make=two_groups, order=order)
    with trainer:
        assert trainer.global_step == 3
        assert trainer.config.optimizer.learning_rate == rate
        assert optimizer.effective_rates == pytest.approx([rate, rate / 2])
        assert groups_of(optimizer, "weight_decay") == pytest.approx([decay, decay / 2])
        take_steps(trainer, model, optimizer, num_steps=1)
        trainer.propose({"optimizer.learning_rate": 0.1, "optimizer.weight_decay": 0.2}, "as it was")
        take_steps(trainer, model, optimizer, num_steps=3)
        assert optimizer.effective_rates == pytest.approx([0.1, 0.05])
        assert groups_of(optimizer, "weight_decay") == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize("make", [MADE["AdamW"], MADE["SGD"]])
def test_torchs_checkpoints_save_and_load_it(tmp_path: Path, make: MakeOptimizer) -> None:
    model = make_model()
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(make(list(model.parameters())))
        take_steps(trainer, model, optimizer, num_steps=2)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        held = bits_of(optimizer.state_dict())
        take_steps(trainer, model, optimizer, num_steps=1)
        assert bits_of(optimizer.state_dict()) != held
        set_optimizer_state_dict(model, optimizer, state)
        assert bits_of(optimizer.state_dict()) == held


@pytest.mark.parametrize(
    "make", [MADE["NAdam"], lambda parts: SGD(parts, lr=0.1)], ids=["NAdam", "SGD without momentum"]
)
def test_torchs_checkpoints_load_into_one_that_has_no_state_yet(tmp_path: Path, make: MakeOptimizer) -> None:
    """torch makes the state by a step of its own, at rate 0 and between steps."""
    saved_model, plain_model, model = make_model(), make_model(), make_model()
    saved, plain = make(list(saved_model.parameters())), make(list(plain_model.parameters()))
    nn.functional.cross_entropy(saved_model(make_data(8)[0]), make_data(8)[1]).backward()  # type: ignore[no-untyped-call]
    saved.step()
    state = get_optimizer_state_dict(saved_model, saved)
    set_optimizer_state_dict(plain_model, plain, copy.deepcopy(state))
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(make(list(model.parameters())))
        before = bits_of(model)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        assert bits_of(optimizer.state_dict()) == bits_of(plain.state_dict())
        assert bits_of(model) == before
