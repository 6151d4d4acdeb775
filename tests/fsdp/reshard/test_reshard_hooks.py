"""What users have hooked to a model, and told its units one by one, across changes of its plan; and what passes do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.fully_shard import before, groups_of, put_after, registered_ahead
from elastic_ext.fsdp.reshard.sharded_model import Spread
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, HYBRID, KEPT, WHOLE, Net, change, make, take_step
from tests.support.retraining import WIDTH, Retraining, are_in_force

TWO = ParallelPlan(strategy="full_shard", unit=2)
UNIT_WHOLE = ParallelPlan(strategy="full_shard", unit="whole")


# --- the order of hooks -----------------------------------------------------------------------------------------------


def _ordered(hooks: str) -> OrderedDict[int, str]:
    return OrderedDict((int(number), number) for number in hooks.split())


@pytest.mark.parametrize(
    ("hooks", "own", "ahead", "expected"),
    [
        ("1 2 9", 9, {1}, "1 9 2"),
        ("9 1 2", 9, {1, 2}, "1 2 9"),
        ("1 2 9", 9, set(), "9 1 2"),
        ("9", 9, set(), "9"),
        ("3 1 2 9", 9, {3}, "3 9 1 2"),
    ],
)
def test_a_hook_is_put_after_those_that_were_ahead_of_it(hooks: str, own: int, ahead: set[int], expected: str) -> None:
    found = _ordered(hooks)
    put_after(found, own, ahead)
    assert list(found.values()) == expected.split()
    assert before(found, {own}) == ahead


@pytest.mark.parametrize(
    ("hooks", "known", "expected"),
    [
        ("", "", set()),
        ("1 2", "", set()),
        ("3 1 2", "", {3}),
        ("4 3 1 2", "", {3, 4}),
        ("1 2", "1", {1}),
        ("1", "1", {1}),
    ],
)
def test_hooks_that_were_registered_ahead_are_told_by_their_numbers(hooks: str, known: str, expected: set[int]) -> None:
    assert registered_ahead(_ordered(hooks), lambda hook: hook == known) == expected


class Plain(nn.Module):
    """Nothing but blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _hooked(rank: int, plans: Sequence[ParallelPlan], kind: str) -> tuple[list[float], list[Any]]:
    """Losses of a training under these plans, and what a hook of the user's saw in each step."""
    torch.manual_seed(0)
    model: Any = Plain()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    seen: list[Any] = []

    def after(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.dtype)
        return torch.tanh(output * 1.3)

    def ahead(module: nn.Module, given: Any) -> tuple[torch.Tensor]:
        seen.append(given[0].dtype)
        return (given[0] * 1.001,)

    if kind == "after":
        model.blocks[1].register_forward_hook(after)
    elif kind == "first after":
        model.blocks[1].register_forward_hook(after, prepend=True)
    elif kind == "ahead":
        model.blocks[1].register_forward_pre_hook(ahead)
    else:
        model.blocks[1].register_forward_pre_hook(ahead, prepend=True)
    spread = Spread(model, num_local=2)
    optimizer = AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2)
    losses = []
    for number, plan in enumerate(plans):
        if plan != spread.plan:
            change(spread, plan, optimizer)
        losses.append(take_step(spread, optimizer, number))
    spread.close()
    return losses, seen


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        ("after", torch.float32),
        ("first after", torch.bfloat16),
        ("ahead", torch.bfloat16),
        ("first ahead", torch.float32),
    ],
)
def test_hooks_stay_on_their_side_of_those_of_fully_shard(ranks: RankPool, kind: str, sees: torch.dtype) -> None:
    stayed = ranks.run(2, _hooked, [FULL] * 4, kind)
    changed = ranks.run(2, _hooked, [FULL, KEPT, GRAD_OP, FULL], kind)
    for (losses, seen), (expected, seen_then) in zip(changed, stayed, strict=True):
        assert set(seen) == set(seen_then) == {sees}
        assert losses[:2] == expected[:2]
    assert changed[0][0][1] != changed[1][0][1], "each rank has its own samples"


@pytest.mark.parametrize(("kind", "sees"), [("after", torch.float32), ("ahead", torch.bfloat16)])
def test_where_units_come_back_hooks_count_as_registered_later(ranks: RankPool, kind: str, sees: torch.dtype) -> None:
    ((_, seen),) = ranks.run(1, _hooked, [FULL, UNIT_WHOLE, TWO, FULL], kind)
    assert seen[0] == seen[2] == seen[3] == sees, "a unit of its own or of two, and within the whole none"


def _ways_of_passes(rank: int, plans: list[ParallelPlan]) -> list[tuple[bool, bool]]:
    """Whether DDP's part is first before the pass, and last after it, with hooks from before and after it came."""
    spread, optimizer = make(plans[0])
    module: Any = spread.model
    module.register_forward_pre_hook(lambda *_: None, prepend=True)
    module.register_forward_hook(lambda *_: None)
    found = []
    for number, plan in enumerate(plans[1:], 1):
        change(spread, plan, optimizer)
        module.register_forward_pre_hook(lambda *_: None, prepend=True)
        module.register_forward_hook(lambda *_: None)
        take_step(spread, optimizer, number)
        if plan.is_replicated:
            handles = spread._replica._handles  # type: ignore[union-attr]
            found.append((next(iter(module._forward_pre_hooks)), next(reversed(module._forward_hooks))))
            assert found[-1] == (handles[0].id, handles[1].id)
    spread.close()
    return found


def test_what_ddp_does_beneath_a_model_is_around_the_hooks(ranks: RankPool) -> None:
    assert len(ranks.run(2, _ways_of_passes, [FULL, WHOLE, KEPT, WHOLE])[0]) == 2


# --- what units were told one by one ----------------------------------------------------------------------------------


def _told(rank: int, what: str, plans: list[ParallelPlan]) -> tuple[list[Any], str]:
    """What units gather ahead, or keep, before and after each change; and why the last one was refused."""
    torch.manual_seed(0)
    model: Any = Net()
    for at, block in enumerate(model.blocks):
        fully_shard(block, reshard_after_forward=what != "kept" or at != 1)
    fully_shard(model)
    if what == "ahead":
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    spread = Spread(model, num_local=2)
    optimizer = AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-2)
    take_step(spread, optimizer, 0)
    found, refusal = [_look(model, what)], ""
    for number, plan in enumerate(plans, 1):
        try:
            change(spread, plan, optimizer)
        except ValueError as error:
            refusal = str(error)
        take_step(spread, optimizer, number)
        found.append(_look(model, what))
    spread.close()
    return found, refusal


def _look(model: Any, what: str) -> list[Any]:
    states = [block._get_fsdp_state() for block in model.blocks if isinstance(block, FSDPModule)]
    if what == "kept":
        return [groups_of(state)[0].post_forward_mesh_info is not None for state in states]
    blocks = list(model.blocks)
    return [
        [blocks.index(other._modules[0]) for other in given if other._modules[0] in blocks]
        for state in states
        for given in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
    ]


AHEAD = [[1, 2], [], [], [], [], [1]]
KEEPS = [True, False, True]


@pytest.mark.parametrize(
    ("what", "plans", "expected"),
    [
        ("ahead", [KEPT, GRAD_OP, FULL], [AHEAD] * 4),
        ("ahead", [WHOLE, KEPT], [AHEAD, [], AHEAD]),
        ("ahead", [ParallelPlan(strategy="full_shard", unit=2, prefetch=0), FULL], None),
        ("kept", [KEPT, FULL], [KEEPS] * 3),
        ("kept", [WHOLE, KEPT], [KEEPS, [], KEEPS]),
        ("kept", [GRAD_OP, FULL], [KEEPS, [False] * 3, [True] * 3]),
    ],
)
def test_what_units_were_told_stays_where_they_do(
    ranks: RankPool, what: str, plans: list[ParallelPlan], expected: list[Any] | None
) -> None:
    for found, refusal in ranks.run(2, _told, what, plans):
        assert refusal == ""
        if expected is None:  # a depth has taken its place, and torch's own way that of the depth
            assert found[0] == AHEAD
            assert found[-1] == [[]] * 6
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("what", "words"),
    [("ahead", "give it a prefetch depth (prefetch=0 for none)"), ("kept", 'or choose the strategy "shard_grad_op"')],
)
def test_what_units_were_told_stands_against_other_units(ranks: RankPool, what: str, words: str) -> None:
    for found, refusal in ranks.run(2, _told, what, [TWO]):
        assert words in refusal
        assert found[0] == found[1]


# --- the first pass after a change ------------------------------------------------------------------------------------


def _evaluate_first(rank: int, plan: ParallelPlan, new: ParallelPlan, how: str) -> tuple[list[float], int]:
    spread, optimizer = make(plan)
    model: Any = spread.model
    losses = [take_step(spread, optimizer, 0)]
    change(spread, new, optimizer)
    num_hooks = sum(len(part._forward_pre_hooks) for part in model.modules())
    model.eval()
    if how == "a part":
        with torch.no_grad():
            model.blocks[0](torch.ones(2, 7))
    elif how != "nothing":
        with torch.inference_mode():
            model(torch.ones(2, 7))
    model.train()
    losses += [take_step(spread, optimizer, number) for number in (1, 2)]
    left = sum(len(part._forward_pre_hooks) for part in model.modules()) - num_hooks
    spread.close()
    return losses, left


@pytest.mark.parametrize(
    ("num_ranks", "plan", "new"),
    [
        (2, FULL, KEPT),
        (2, WHOLE, FULL),
        pytest.param(2, FULL, TWO, marks=pytest.mark.slow),
        pytest.param(4, FULL, HYBRID, marks=pytest.mark.slow),
        (2, FULL, WHOLE),
        (1, WHOLE, FULL),
    ],
)
def test_an_evaluation_right_after_a_change_does_no_harm(
    ranks: RankPool, num_ranks: int, plan: ParallelPlan, new: ParallelPlan
) -> None:
    expected = ranks.run(num_ranks, _evaluate_first, plan, new, "nothing")
    for how in ("inference", "a part"):
        assert ranks.run(num_ranks, _evaluate_first, plan, new, how) == expected
    assert {left for _, left in expected} == {0}


# --- parameters that are frozen and thawed under DDP ------------------------------------------------------------------


def _frozen(
    rank: int, folder: Path, name: str, plans: dict[int, Any], is_thawed: bool
) -> tuple[dict[str, torch.Tensor], bool, bool]:
    """A parameter is thawed, or frozen, after the fourth step; whether ranks have come to the same."""
    torch.manual_seed(0)
    model: Any = Net(WIDTH)
    name_of_it = "blocks.1.up.weight"
    model.get_parameter(name_of_it).requires_grad_(not is_thawed)
    run = Retraining(
        rank,
        folder,
        plans.get(0),
        name=name,
        model=model,
        averages=False,
        make_optimizer=lambda _: SGD(model.parameters(), lr=0.1),
    )

    def turn(_: Retraining) -> None:
        model.get_parameter(name_of_it).requires_grad_(is_thawed)

    with run.trainer:
        engine = run.trainer._training.spread.engine
        run.train(8, {**{at: plan for at, plan in plans.items() if at}, 4: turn})
        state = run.state()
        own = state[name_of_it]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
    assert not run.proposals or are_in_force(run)
    return state, all(torch.equal(parts[0], part) for part in parts), run.trainer._training.spread.engine is engine


@pytest.mark.parametrize("is_thawed", [True, False])
def test_a_parameter_that_is_thawed_or_frozen_under_ddp_trains_as_when_sharded(
    ranks: RankPool, tmp_path: Path, is_thawed: bool
) -> None:
    sharded = ranks.run(2, _frozen, tmp_path, "sharded", {0: FULL}, is_thawed)
    for name, plans in (("changed", {0: FULL, 1: WHOLE}), ("from the start", {0: WHOLE})):
        found = ranks.run(2, _frozen, tmp_path, name, plans, is_thawed)
        for (state, are_alike, is_same), (expected, _, _) in zip(found, sharded, strict=True):
            assert are_alike
            assert not is_same
            trained = [key for key in expected if key.endswith(("weight", "bias"))]
            assert [key for key in trained if not torch.allclose(state[key], expected[key], atol=1e-6)] == []


def _turned_within(rank: int, act: str) -> tuple[bool, str]:
    spread, optimizer = make(WHOLE)
    model: Any = spread.model
    take_step(spread, optimizer, 0)
    part = model.frozen if act == "thaw" else model.blocks[1].up.weight
    if act == "freeze all":
        model.requires_grad_(False)
    else:
        part.requires_grad_(act == "thaw")
    with torch.no_grad():
        model(torch.ones(2, 7))
    given = torch.ones(2, 7, requires_grad=True)
    said = ""
    try:
        model(given).sum().backward()
    except ValueError as error:
        said = str(error)
    was_made = spread.keep_up()
    if was_made:
        take_step(spread, optimizer, 1)
        assert not spread.keep_up()
    spread.close()
    return was_made, said


@pytest.mark.parametrize("act", ["thaw", "freeze", "freeze all"])
def test_what_is_trained_is_not_changed_within_a_step_of_ddp(ranks: RankPool, act: str) -> None:
    for was_made, said in ranks.run(2, _turned_within, act):
        assert was_made is (act != "freeze all")
        assert ("set it between two steps" in said) is (act != "freeze all")
