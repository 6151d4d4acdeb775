"""State of users' own optimizers and models of other kinds: what is seldom so moves right, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext import ElasticError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, KEPT, WHOLE, Net, all_of_it, change, make, take_step
from tests.support.retraining import whole

SMALL, LARGE = 64, 8 << 20
"""Bytes of a bucket: a few for each parameter, and one for all."""


TOUR = [FULL, FULL, KEPT, FULL, WHOLE, KEPT, WHOLE, FULL]
"""From each of the three to each other."""


class Momentum(Optimizer):
    """With state that lies and hangs together in many ways."""

    def __init__(self, parameters: Any, how: str = "") -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.param_groups[0]["params"]:
            if part.grad is None:
                continue
            state = self.state[part]
            momentum = state["momentum"] * 0.9 + part.grad if "momentum" in state else part.grad.clone()
            part.sub_(momentum, alpha=0.1)
            if "earlier" in state:
                part.sub_(state["earlier"], alpha=0.01)
            state["momentum"] = turned(momentum) if self.how == "turned" else momentum
            if self.how == "two keys":
                state["same"] = momentum
            elif self.how == "gradient":
                state["earlier"] = part.grad


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in memory in another order than its dimensions."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def trained_of(spread: Spread) -> list[tuple[str, nn.Parameter]]:
    return [(name, part) for name, part in spread.model.named_parameters() if part.requires_grad]


Before = Callable[[Spread, Optimizer], Sequence[dict[str, torch.Tensor]]]
"""What is done before a change; gives what is registered."""


def train(
    plans: Sequence[ParallelPlan],
    how: str = "",
    *,
    model: nn.Module | None = None,
    before: Before | None = None,
    **given: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A step under each of the plans: losses, and all that came of them but buffers, which DDP has of one rank."""
    spread = make(plans[0], model=model, **given)[0]  # and not the optimizer, which would keep parameters
    optimizer = Momentum([part for _, part in trained_of(spread)], how)
    losses = []
    for number, plan in enumerate(plans):
        if plan != spread.plan:
            registered = [] if before is None else before(spread, optimizer)
            values = all_of_it(spread.model, optimizer)
            held = [all_of(each) for each in registered]
            change(spread, plan, optimizer, registered=registered)
            assert differing(values, all_of_it(spread.model, optimizer)) == []
            for one, other in zip(held, registered, strict=True):
                assert differing(one, all_of(other)) == []
        optimizer.zero_grad()
        losses.append(take_step(spread, optimizer, number, clears=False))
    state = all_of_it(spread.model, optimizer)
    spread.close()
    return losses, {name: value for name, value in state.items() if not name.startswith("buffer")}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def all_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, whole; ranks may have them in other orders."""
    return {key: whole(tensor) for key, tensor in sorted(tensors.items())}


def is_as_if_it_never_changed(
    plans: Sequence[ParallelPlan], how: str = "", sizes: Sequence[int] = (SMALL, LARGE), **given: Any
) -> None:
    """In buckets of each of these sizes."""
    make_model = given.pop("make_model", lambda: Net(num_blocks=1))

    def makes() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = make_model()
        return made

    losses, state = train([plans[0]] * len(plans), how, model=makes())
    for bucket_bytes in sizes:
        changed, changed_state = train(plans, how, model=makes(), bucket_bytes=bucket_bytes, **given)
        assert changed == losses
        assert differing(changed_state, state) == []


# --- another order in memory ----------------------------------------------------------------------------------------


def go_turned(rank: int, sizes: Sequence[int]) -> None:
    def turn(spread: Spread, optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
        for _, part in trained_of(spread):
            assert part.grad is not None
            part.grad = turned(part.grad)
        if spread.plan == WHOLE:
            assert not spread.model.embed.weight.grad.is_contiguous()  # type: ignore[union-attr, operator]
        return []

    is_as_if_it_never_changed(TOUR, "turned", sizes, before=turn)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [
        (1, [LARGE]),
        (2, [SMALL]),
        pytest.param(1, [SMALL], marks=pytest.mark.slow),
        pytest.param(2, [LARGE], marks=pytest.mark.slow),
    ],
)
def test_state_and_gradients_in_another_order_in_memory_move_right(
    ranks: RankPool, num_ranks: int, sizes: Sequence[int]
) -> None:
    ranks.run(num_ranks, go_turned, sizes)


# --- one tensor in several places -----------------------------------------------------------------------------------


def go_with_one_in_several_places(rank: int, how: str, sizes: Sequence[int]) -> None:
    held: dict[str, torch.Tensor] = {}
    more: dict[str, torch.Tensor] = {}

    def is_one(spread: Spread, optimizer: Optimizer) -> None:
        for name, part in trained_of(spread):
            state = optimizer.state[part]
            if how == "registered":
                assert held[name] is more[name] is state["momentum"]
            elif how == "two keys":
                assert state["same"] is state["momentum"]
            else:
                assert state["earlier"] is part.grad

    def look(spread: Spread, optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
        for registered in (held, more):
            registered.clear()
            if how == "registered":
                registered.update((name, optimizer.state[part]["momentum"]) for name, part in trained_of(spread))
        is_one(spread, optimizer)
        real = spread.change

        def changing(*given: Any) -> Any:
            result = real(*given)
            is_one(spread, optimizer)
            return result

        spread.change = changing  # type: ignore[method-assign, assignment]
        return [held, more]

    is_as_if_it_never_changed(TOUR, how, sizes, before=look)


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ("registered", [LARGE]),
        ("two keys", [SMALL]),
        ("gradient", [LARGE]),
        pytest.param("registered", [SMALL], marks=pytest.mark.slow),
        pytest.param("two keys", [LARGE], marks=pytest.mark.slow),
        pytest.param("gradient", [SMALL], marks=pytest.mark.slow),
    ],
)
def test_one_tensor_in_several_places_moves_once_and_stays_one(ranks: RankPool, how: str, sizes: Sequence[int]) -> None:
    ranks.run(2, go_with_one_in_several_places, how, sizes)


# --- what ranks have registered -------------------------------------------------------------------------------------


def go_in_another_order(rank: int, sizes: Sequence[int]) -> None:
    def registered(spread: Spread, optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
        values = {name: part.detach() * 2 for name, part in trained_of(spread)}
        return [dict(sorted(values.items(), reverse=bool(rank)))]

    is_as_if_it_never_changed(TOUR, sizes=sizes, before=registered)


@pytest.mark.parametrize("sizes", [[LARGE], pytest.param([SMALL], marks=pytest.mark.slow)])
def test_what_ranks_have_registered_in_another_order_moves_right(ranks: RankPool, sizes: Sequence[int]) -> None:
    ranks.run(2, go_in_another_order, sizes)


def go_on_after_another_set(rank: int, sizes: Sequence[int]) -> None:
    def registered(spread: Spread, optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
        values = {name: part.detach() * 2 for name, part in trained_of(spread)}
        for_all, own = dict(list(values.items())[:3]), dict(list(values.items())[3 + rank : 4 + rank])
        before = all_of_it(spread.model, optimizer)
        objects, engine = [id(part) for part in spread.model.parameters()], spread.engine
        for others in ([own], [values] if rank else [], [for_all, own]):
            with pytest.raises(ElasticError, match="ranks would move different tensors"):
                change(spread, KEPT if spread.plan != KEPT else FULL, optimizer, registered=others)
        assert differing(before, all_of_it(spread.model, optimizer)) == []
        assert [id(part) for part in spread.model.parameters()] == objects
        assert spread.engine is engine
        return [for_all]

    is_as_if_it_never_changed([FULL, FULL, KEPT, WHOLE, WHOLE, FULL], sizes=sizes, before=registered)


@pytest.mark.parametrize("sizes", [[SMALL], pytest.param([LARGE], marks=pytest.mark.slow)])
def test_another_set_on_one_rank_is_refused_on_all_and_training_goes_on(ranks: RankPool, sizes: Sequence[int]) -> None:
    ranks.run(2, go_on_after_another_set, sizes)


# --- models of other kinds ------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Torch keeps the weights of an LSTM in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, num_layers=2)
        self.out = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.lstm(x[None])[0][0])
        return result


class OfTwoTypes(nn.Module):
    """Blocks in bfloat16, the rest not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()).bfloat16() for _ in range(2))
        self.last = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).bfloat16()
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x.float())
        return result


def go_with_a_model(
    rank: int, make_model: Callable[[], nn.Module], plans: Sequence[ParallelPlan], sizes: Sequence[int]
) -> None:
    is_as_if_it_never_changed(plans, sizes=sizes, make_model=make_model)


@pytest.mark.parametrize(
    ("make_model", "plans", "sizes"),
    [
        (Recurrent, TOUR, [SMALL]),
        pytest.param(Recurrent, TOUR, [LARGE], marks=pytest.mark.slow),
        # gradients of bfloat16 are added up otherwise where they are sharded
        (OfTwoTypes, [KEPT, WHOLE, KEPT, WHOLE], [SMALL, LARGE]),
        (OfTwoTypes, [FULL, GRAD_OP, FULL], [SMALL, LARGE]),
    ],
)
def test_models_of_other_kinds_change_as_well(
    ranks: RankPool, make_model: Callable[[], nn.Module], plans: Sequence[ParallelPlan], sizes: Sequence[int]
) -> None:
    ranks.run(2, go_with_a_model, make_model, plans, sizes)


def go_between_all_plans(rank: int) -> None:
    torch.manual_seed(0)
    losses, _ = train([FULL] * len(TOUR), model=OfTwoTypes())
    torch.manual_seed(0)
    changed, _ = train(TOUR, model=OfTwoTypes())  # which sees that no change alters a value
    assert changed == pytest.approx(losses, rel=1e-2)


def test_units_of_one_type_each_change_between_all_plans(ranks: RankPool) -> None:
    ranks.run(2, go_between_all_plans)
