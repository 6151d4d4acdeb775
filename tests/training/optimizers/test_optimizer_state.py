"""Optimizer state made before the first step: for every optimizer of torch's, no step can tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic_ext.training.optimizers.optimizer import can_materialise, materialise
from tests.support.training import bits_of, make_model, trainer_of

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Parameters], Optimizer]

NUM_STEPS = 5
SHAPES = ((6, 4), (4, 4), (3, 5))  # all of them matrices, which Muon needs


def in_two_groups(parts: Parameters, **options: Any) -> list[dict[str, Any]]:
    return [{"params": parts[:1]}, {"params": parts[1:], **options}]


MADE: dict[str, MakeOptimizer] = {
    "SGD": lambda parts: SGD(parts, lr=0.1),
    "SGD momentum": lambda parts: SGD(parts, lr=0.1, momentum=0.9),
    "SGD nesterov decay": lambda parts: SGD(parts, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": lambda parts: SGD(parts, lr=0.1, momentum=0.9, maximize=True),
    "SGD foreach": lambda parts: SGD(parts, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD fused": lambda parts: SGD(parts, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "SGD tensor rate": lambda parts: SGD(parts, lr=torch.tensor(0.1), momentum=0.9),
    "SGD two groups": lambda parts: SGD(in_two_groups(parts, lr=0.0, weight_decay=0.5), lr=0.1, momentum=0.9),
    "Adam": lambda parts: Adam(parts, lr=0.1),
    "Adam amsgrad decay": lambda parts: Adam(parts, lr=0.1, amsgrad=True, weight_decay=0.1),
    "Adam maximize foreach": lambda parts: Adam(parts, lr=0.1, maximize=True, foreach=True),
    "AdamW": lambda parts: AdamW(parts, lr=0.1, weight_decay=0.5),
    "AdamW amsgrad foreach": lambda parts: AdamW(parts, lr=0.1, amsgrad=True, foreach=True),
    "AdamW fused": lambda parts: AdamW(parts, lr=0.1, fused=True),
    "AdamW fused amsgrad": lambda parts: AdamW(parts, lr=0.1, amsgrad=True, fused=True),
    "AdamW tensor rate": lambda parts: AdamW(parts, lr=torch.tensor(0.1)),
    "AdamW fused tensor rate": lambda parts: AdamW(parts, lr=torch.tensor(0.1), fused=True),
    "Adamax": lambda parts: optim.Adamax(parts, lr=0.1, weight_decay=0.1),
    "Adamax foreach": lambda parts: optim.Adamax(parts, lr=0.1, foreach=True),
    "Adadelta": lambda parts: optim.Adadelta(parts, weight_decay=0.1),
    "Adadelta foreach": lambda parts: optim.Adadelta(parts, foreach=True),
    "Adafactor": lambda parts: optim.Adafactor(parts, lr=0.1, weight_decay=0.1),
    "Adafactor foreach": lambda parts: optim.Adafactor(parts, lr=0.1, foreach=True),
    "Muon": lambda parts: optim.Muon(parts, lr=0.1, weight_decay=0.1),
    "Muon without nesterov": lambda parts: optim.Muon(parts, lr=0.1, nesterov=False),
    "RAdam": lambda parts: optim.RAdam(parts, lr=0.1, weight_decay=0.1),
    "RAdam decoupled foreach": lambda parts: optim.RAdam(
        parts, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "RMSprop": lambda parts: optim.RMSprop(parts, lr=0.1, weight_decay=0.1),
    "RMSprop centered momentum": lambda parts: optim.RMSprop(parts, lr=0.1, centered=True, momentum=0.9),
    "RMSprop foreach": lambda parts: optim.RMSprop(parts, lr=0.1, centered=True, momentum=0.9, foreach=True),
}
LEFT: dict[str, MakeOptimizer] = {
    "Adagrad": lambda parts: optim.Adagrad(parts, lr=0.1),  # makes its state by itself
    "ASGD": lambda parts: optim.ASGD(parts, lr=0.1),
    "LBFGS": lambda parts: optim.LBFGS(parts, lr=0.1),
    "NAdam": lambda parts: NAdam(parts, lr=0.1),
    "Rprop": lambda parts: optim.Rprop(parts, lr=0.1),
    "SparseAdam": lambda parts: optim.SparseAdam(parts, lr=0.1),
    "SGD dampening": lambda parts: SGD(parts, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD dampening in one group": lambda parts: SGD(in_two_groups(parts, dampening=0.5), lr=0.1, momentum=0.9),
    "Adam differentiable": lambda parts: Adam(parts, lr=0.1, differentiable=True),
}


class UsersSGD(SGD):
    """Of which nothing is known."""


pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(dtype: torch.dtype = torch.float64) -> Parameters:
    """A few matrices; among their values are both zeros."""
    draw = torch.Generator().manual_seed(0)
    parts = [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)) for shape in SHAPES]
    with torch.no_grad():
        for part in parts:
            part[0, 0] = -0.0
            part[0, 1] = 0.0
    return parts


def gradients(step: int, dtype: torch.dtype, *, with_zeros: bool = False) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    if with_zeros:
        for gradient in found:
            gradient[0] = -0.0 if step % 2 == 0 else 0.0
            gradient[1] *= torch.zeros((), dtype=dtype)  # of both signs, as a ReLU that is off gives them
    return found


def bits_after_steps(
    make: MakeOptimizer,
    *,
    beforehand: bool,
    dtype: torch.dtype = torch.float64,
    with_zeros: bool = False,
) -> Iterator[list[Any]]:
    """The bits of parameters and state_dict after every step."""
    parts = parameters(dtype)
    optimizer = make(parts)
    if beforehand:
        materialise(optimizer)
    for step in range(NUM_STEPS):
        for part, gradient in zip(parts, gradients(step, dtype, with_zeros=with_zeros), strict=True):
            part.grad = gradient
        optimizer.step()
        yield bits_of(*map(as_numpy_knows, parts), sorted_state(optimizer))


def as_numpy_knows(value: Any) -> Any:
    """The same bits in a type that numpy has."""
    is_short = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.detach().view(torch.int16) if is_short else value


def sorted_state(optimizer: Optimizer) -> dict[str, Any]:
    """A state_dict whose states come in the order of their names: an order of keys is no value."""
    told = optimizer.state_dict()
    states = [(index, sorted(state.items())) for index, state in sorted(told["state"].items())]
    numbered = [(index, [(name, as_numpy_knows(value)) for name, value in state]) for index, state in states]
    return {"state": numbered, "param_groups": told["param_groups"]}


def test_every_optimizer_of_torchs_is_looked_at_here() -> None:
    classes = {
        name
        for name, value in vars(optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    looked_at = {name.partition(" ")[0] for name in (*MADE, *LEFT)}
    assert classes == looked_at


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_five_steps_are_the_same_bit_for_bit_with_state_made_before(make: MakeOptimizer) -> None:
    assert can_materialise(make(parameters()))
    without = list(bits_after_steps(make, beforehand=False))
    assert list(bits_after_steps(make, beforehand=True)) == without


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_five_steps_are_the_same_where_gradients_are_zeros_of_both_signs(make: MakeOptimizer) -> None:
    without = list(bits_after_steps(make, beforehand=False, with_zeros=True))
    assert list(bits_after_steps(make, beforehand=True, with_zeros=True)) == without


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "Adafactor", "Muon", "RAdam", "RMSprop centered momentum"])
def test_five_steps_are_the_same_in_low_precision(name: str, dtype: torch.dtype) -> None:
    without = list(bits_after_steps(MADE[name], beforehand=False, dtype=dtype))
    assert list(bits_after_steps(MADE[name], beforehand=True, dtype=dtype)) == without


def test_five_steps_are_the_same_for_complex_parameters() -> None:
    def steps(*, beforehand: bool) -> list[Any]:
        draw = torch.Generator().manual_seed(0)
        part = nn.Parameter(torch.randn(3, 4, generator=draw, dtype=torch.complex128))
        optimizer = AdamW([part], lr=0.1, amsgrad=True)
        if beforehand:
            materialise(optimizer)
        for _ in range(NUM_STEPS):
            part.grad = torch.randn(3, 4, generator=draw, dtype=torch.complex128)
            optimizer.step()
        return bits_of(torch.view_as_real(part), [torch.view_as_real(optimizer.state[part]["exp_avg"])])

    assert steps(beforehand=True) == steps(beforehand=False)


def test_gradients_that_are_not_finite_do_the_same() -> None:
    def steps(make: MakeOptimizer, *, beforehand: bool) -> list[Any]:
        part = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
        optimizer = make([part])
        if beforehand:
            materialise(optimizer)
        part.grad = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e-320]], dtype=torch.float64)
        optimizer.step()
        return [str(part.tolist()), str(optimizer.state_dict())]  # a NaN's bits are the processor's choice

    for name in ("SGD momentum", "AdamW", "RMSprop"):
        assert steps(MADE[name], beforehand=True) == steps(MADE[name], beforehand=False)


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_optimizers_whose_first_step_would_differ_are_left_alone(make: MakeOptimizer) -> None:
    assert not can_materialise(make(parameters()))


def test_a_subclass_is_left_alone() -> None:
    assert not can_materialise(UsersSGD(parameters(), lr=0.1))


def test_sparse_gradients_give_the_same_steps() -> None:
    def steps(*, beforehand: bool) -> list[Any]:
        table = nn.Embedding(5, 2, sparse=True)
        nn.init.ones_(table.weight)
        optimizer = SGD(table.parameters(), lr=0.1, momentum=0.9)
        if beforehand and can_materialise(optimizer):
            materialise(optimizer)
        for step in range(3):
            table(torch.tensor([step, step + 1])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits_of(table.weight)

    assert steps(beforehand=True) == steps(beforehand=False)


# --- what materialise leaves as it was ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_parameters_keep_every_bit(make: MakeOptimizer) -> None:
    parts = parameters()
    with torch.no_grad():
        parts[0][1] = float("nan")
        parts[0][2] = float("-inf")
        parts[0][3] = 5e-324
        parts[1].view(torch.int64)[0, 2] = 0x7FF8_0000_0000_BEEF  # a NaN with a message in it
        parts[1].view(torch.int64)[0, 3] = -0x0007_0000_0000_0001  # and a negative one
    places = [part.data_ptr() for part in parts]
    before = bits_of(parts)
    materialise(make(parts))
    assert bits_of(parts) == before
    assert [part.data_ptr() for part in parts] == places
    assert all(part.grad is None and part.requires_grad for part in parts)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_settings_keep_every_bit(make: MakeOptimizer) -> None:
    optimizer = make(parameters())
    before = bits_of([{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups])
    groups = list(optimizer.param_groups)
    materialise(optimizer)
    after = bits_of([{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups])
    assert after == before
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_the_state_made_is_that_of_no_steps(make: MakeOptimizer) -> None:
    parts = parameters()
    optimizer = make(parts)
    materialise(optimizer)
    for part in parts:
        for name, value in optimizer.state[part].items():
            assert torch.is_tensor(value), name
            assert not value.any(), f"{name} is {value}"
            assert value.requires_grad is False
    stepped = make(parts)
    for part in parts:
        part.grad = torch.ones_like(part)
    stepped.step()
    described = [{n: (v.shape, v.dtype, v.stride()) for n, v in optimizer.state[part].items()} for part in parts]
    assert described == [{n: (v.shape, v.dtype, v.stride()) for n, v in stepped.state[part].items()} for part in parts]


def test_hooks_see_nothing_of_it() -> None:
    called: list[str] = []
    optimizer = AdamW(parameters())
    handles = [
        optimizer.register_step_pre_hook(lambda *ignored: called.append("pre")),
        optimizer.register_step_post_hook(lambda *ignored: called.append("post")),
        register_optimizer_step_pre_hook(lambda *ignored: called.append("pre of all")),
        register_optimizer_step_post_hook(lambda *ignored: called.append("post of all")),
    ]
    try:
        materialise(optimizer)
        assert called == []
        optimizer.step()
        assert called == ["pre of all", "pre", "post", "post of all"]
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_of_gradients_see_nothing_of_it() -> None:
    called: list[torch.Tensor] = []
    parts = parameters()
    for part in parts:
        part.register_hook(called.append)  # type: ignore[no-untyped-call]
        part.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    materialise(AdamW(parts))
    assert called == []


def test_a_scheduler_that_watches_the_order_sees_nothing_of_it() -> None:
    optimizer = AdamW(parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    materialise(optimizer)
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_frozen_parameters_get_no_state() -> None:
    parts = parameters()
    parts[1].requires_grad_(False)
    optimizer = AdamW(parts)
    materialise(optimizer)
    assert [part in optimizer.state for part in parts] == [True, False, True]
    assert parts[1].grad is None
    assert not parts[1].requires_grad


def test_a_frozen_parameter_with_a_gradient_keeps_it_and_is_not_stepped() -> None:
    parts = parameters()
    parts[1].grad = torch.ones_like(parts[1])
    parts[1].requires_grad_(False)
    before = bits_of(parts[1])
    optimizer = SGD(parts, lr=0.1, momentum=0.9)
    materialise(optimizer)
    assert bits_of(parts[1]) == before
    assert parts[1].grad is not None and parts[1].grad.eq(1).all()


def test_state_that_is_there_stays_to_the_bit() -> None:
    parts = parameters()
    optimizer = AdamW(parts, lr=0.1)
    for part, gradient in zip(parts[:2], gradients(0, torch.float64), strict=False):
        part.grad = gradient
    optimizer.step()
    held = [dict(optimizer.state[part]) for part in parts[:2]]
    before = bits_of(held, parts)
    materialise(optimizer)
    assert bits_of([optimizer.state[part] for part in parts[:2]], parts) == before
    assert all(
        optimizer.state[part][name] is value
        for part, was in zip(parts[:2], held, strict=True)
        for name, value in was.items()
    )
    assert optimizer.state[parts[2]]["step"].item() == 0


def test_state_made_twice_is_made_once() -> None:
    optimizer = AdamW(parameters())
    materialise(optimizer)
    held = {id(value) for state in optimizer.state.values() for value in state.values()}
    materialise(optimizer)
    assert {id(value) for state in optimizer.state.values() for value in state.values()} == held


def test_gradients_that_are_there_stay_the_same_objects() -> None:
    parts = parameters()
    parts[0].grad = torch.full_like(parts[0], -0.0)
    parts[2].grad = torch.full_like(parts[2], float("nan"))
    held = [part.grad for part in parts]
    before = bits_of(held)
    materialise(AdamW(parts))
    assert [part.grad for part in parts] == held or all(part.grad is was for part, was in zip(parts, held, strict=True))
    assert bits_of([part.grad for part in parts]) == before


def test_parameters_that_are_not_contiguous_or_share_memory_keep_every_bit() -> None:
    base = torch.randn(4, 6, dtype=torch.float64)
    parts = [nn.Parameter(base.t()), nn.Parameter(base[:2])]  # one lies within the other
    before = bits_of(base)
    materialise(AdamW(parts, weight_decay=0.5))
    assert bits_of(base) == before


class FailsAtSecond(SGD):
    """Runs out of memory at the second parameter's state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        made = len(self.state)
        result = super().step(closure)  # it changes parameters first
        for group in self.param_groups:
            for part in group["params"]:
                if part.grad is not None:
                    part.add_(1.0)
        if made == 1:
            raise RuntimeError("out of memory")
        return result


def test_running_out_of_memory_leaves_parameters_and_gradients_as_they_were() -> None:
    parts = parameters()
    parts[0].grad = torch.ones_like(parts[0])
    held = [part.grad for part in parts]
    before = bits_of(parts)
    with pytest.raises(RuntimeError, match="out of memory"):
        materialise(FailsAtSecond(parts, lr=0.1, momentum=0.9, weight_decay=0.5))
    assert bits_of(parts) == before
    assert all(part.grad is was for part, was in zip(parts, held, strict=True))


# --- in a trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "is_made"), [("AdamW", True), ("SGD momentum", True), ("NAdam", False)])
def test_prepare_makes_the_state_of_those_optimizers_whose_steps_stay_the_same(
    tmp_path: Path, name: str, is_made: bool
) -> None:
    model = make_model()
    parts = list(model.parameters())
    raw = {**MADE, **LEFT}[name](parts)
    before = bits_of(model)
    with trainer_of(tmp_path, model) as trainer:
        optimizer = trainer.prepare(raw)
        assert [bool(raw.state.get(part)) for part in parts] == [is_made] * len(parts)
        assert bits_of(model) == before
        with trainer.step():
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert all(raw.state[part] for part in parts)


def test_prepare_keeps_loaded_state_and_gradients(tmp_path: Path) -> None:
    model = make_model()
    raw = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    raw.step()
    held = bits_of(raw.state_dict(), [part.grad for part in model.parameters()], model)
    with trainer_of(tmp_path, model) as trainer:
        trainer.prepare(raw)
        assert bits_of(raw.state_dict(), [part.grad for part in model.parameters()], model) == held


def test_prepare_makes_the_state_of_every_one_of_several_optimizers(tmp_path: Path) -> None:
    model = make_model()
    first, second = AdamW(model[0].parameters()), SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    with trainer_of(tmp_path, model) as trainer:
        trainer.prepare([first, second])
        assert len(first.state) == len(second.state) == 2
