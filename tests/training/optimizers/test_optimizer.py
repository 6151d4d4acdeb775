"""ElasticOptimizer: a torch Optimizer in every way, whose rate and decay change by hand, in a trainer, from a file."""

from __future__ import annotations

import copy
import io
import json
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, NAdam, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ext import ElasticOptimizer
from tests.support.loops import put, seen_by
from tests.support.ranks import RankPool
from tests.support.training import bits_of, make_model, trainer_of

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Parameters], Optimizer]

MADE: dict[str, MakeOptimizer] = {
    "SGD": lambda parts: SGD(parts, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD foreach": lambda parts: SGD(parts, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD fused": lambda parts: SGD(parts, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "SGD tensor rate": lambda parts: SGD(parts, lr=torch.tensor(0.1), weight_decay=0.1),
    "AdamW": lambda parts: AdamW(parts, lr=0.1, weight_decay=0.1),
    "AdamW foreach": lambda parts: AdamW(parts, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda parts: AdamW(parts, lr=0.1, weight_decay=0.1, fused=True),
    "AdamW tensor rate": lambda parts: AdamW(parts, lr=torch.tensor(0.1), weight_decay=0.1),
    "AdamW fused tensor rate": lambda parts: AdamW(parts, lr=torch.tensor(0.1), weight_decay=0.1, fused=True),
    "NAdam": lambda parts: NAdam(parts, lr=0.1, weight_decay=0.1),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(num: int = 2) -> Parameters:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2, generator=draw, dtype=torch.float64)) for _ in range(num)]


def give_gradients(parts: Parameters, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for part in parts:
        part.grad = torch.randn(part.shape, generator=draw, dtype=part.dtype)


def groups_of(optimizer: Optimizer, name: str) -> list[float]:
    return [float(group[name]) for group in optimizer.param_groups]


def in_groups(*rates: float, make: Any = SGD, **options: Any) -> ElasticOptimizer:
    """An optimizer with one parameter and one group for each rate."""
    groups = [{"params": [part], "lr": rate} for part, rate in zip(parameters(len(rates)), rates, strict=True)]
    return ElasticOptimizer(make(groups, **{"lr": 0.1, **options}))


def with_decays(*decays: float) -> ElasticOptimizer:
    groups = zip(parameters(len(decays)), decays, strict=True)
    return ElasticOptimizer(AdamW([{"params": [part], "weight_decay": decay} for part, decay in groups], lr=0.1))


# --- a torch optimizer ----------------------------------------------------------------------------------------------


def test_it_is_the_optimizer_it_was_made_from_in_all_that_can_be_read() -> None:
    inner = SGD(parameters(), lr=0.1, momentum=0.9)
    optimizer = ElasticOptimizer(inner)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.inner is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer) == f"ElasticOptimizer({inner!r})"
    assert bits_of(optimizer.state_dict()) == bits_of(inner.state_dict())


def test_what_a_users_own_optimizer_has_besides_can_be_reached() -> None:
    class Own(SGD):
        rho = 0.5

        def first_step(self) -> str:
            return "taken"

    optimizer = ElasticOptimizer(Own(parameters(), lr=0.1))
    assert (optimizer.rho, optimizer.first_step()) == (0.5, "taken")
    with pytest.raises(AttributeError, match="second_step"):
        optimizer.second_step()
    assert not hasattr(optimizer, "_never_heard_of")


def test_what_is_set_on_it_is_set_on_the_optimizer_it_was_made_from() -> None:
    """As loops do that begin anew: ``optimizer.state = defaultdict(dict)``."""
    inner = SGD(parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = ElasticOptimizer(inner)
    give_gradients(inner.param_groups[0]["params"], 0)
    optimizer.step()
    fresh: dict[Any, Any] = defaultdict(dict)
    optimizer.state = fresh
    assert inner.state is fresh
    groups = [{**inner.param_groups[0], "lr": 0.5}]
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    assert optimizer.effective_rates == [0.5]


def test_what_is_no_optimizer_or_one_of_these_already_is_refused() -> None:
    optimizer = ElasticOptimizer(SGD(parameters(), lr=0.1))
    with pytest.raises(ValueError, match="optimizer is an ElasticOptimizer; give the one that it was made from"):
        ElasticOptimizer(optimizer)
    not_one: Any = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"optimizer is a Linear; allowed: a torch\.optim\.Optimizer"):
        ElasticOptimizer(not_one)


def test_arguments_for_following_without_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"job, run_dir: allowed only with config_file"):
        ElasticOptimizer(SGD(parameters(), lr=0.1), job="test", run_dir=tmp_path)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do_instead(take: Callable[[Any], Any]) -> None:
    optimizer = ElasticOptimizer(SGD(parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; use its state_dict\(\)"):
        take(optimizer)
    optimizer.step()


def test_its_own_state_dict_can_be_copied_and_saved() -> None:
    optimizer = ElasticOptimizer(AdamW(parameters(), lr=torch.tensor(0.1)))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert bits_of(state) == bits_of(copy.deepcopy(optimizer.state_dict())) == bits_of(optimizer.state_dict())


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_state_goes_from_plain_torch_here_and_back_as_between_plain_ones(make: MakeOptimizer) -> None:
    def steps(path: list[Callable[[Optimizer], Optimizer]]) -> list[Any]:
        parts, state = parameters(), None
        for step, wrapped in enumerate(path):
            optimizer = wrapped(make(parts))
            if state is not None:
                optimizer.load_state_dict(state)
            give_gradients(parts, step)
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
        return bits_of(parts, state)

    assert steps([plainly, ElasticOptimizer, plainly]) == steps([plainly, plainly, plainly])


def plainly(optimizer: Optimizer) -> Optimizer:
    return optimizer


def test_hooks_are_called_once_for_what_they_were_registered_for() -> None:
    inner = SGD(parameters(), lr=0.1)
    optimizer = ElasticOptimizer(inner)
    called: list[tuple[str, Any]] = []
    handles = [
        optimizer.register_step_pre_hook(lambda seen, *ignored: called.append(("before step", seen))),
        optimizer.register_step_post_hook(lambda seen, *ignored: called.append(("after step", seen))),
        optimizer.register_state_dict_pre_hook(lambda seen: called.append(("before saving", seen))),
        optimizer.register_state_dict_post_hook(lambda seen, state: called.append(("after saving", seen))),
        optimizer.register_load_state_dict_pre_hook(lambda seen, state: called.append(("before loading", seen))),
        optimizer.register_load_state_dict_post_hook(lambda seen: called.append(("after loading", seen))),
        register_optimizer_step_pre_hook(lambda seen, *ignored: called.append(("before any step", seen))),
    ]
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    assert [name for name, _ in called] == [
        "before any step",
        "before step",
        "after step",
        "before saving",
        "after saving",
        "before loading",
        "after loading",
    ]
    assert all(seen is inner for _, seen in called)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(called) == 7


def test_hooks_that_are_put_in_front_come_first_and_can_replace_what_is_saved_and_loaded() -> None:
    optimizer = ElasticOptimizer(SGD(parameters(), lr=0.1))
    order: list[str] = []
    for name in ("second", "first"):
        optimizer.register_state_dict_pre_hook(lambda seen, name=name: order.append(name), prepend=True)
        optimizer.register_load_state_dict_post_hook(lambda seen, name=name: order.append(name), prepend=True)
    optimizer.register_state_dict_post_hook(lambda seen, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda seen, state: {k: v for k, v in state.items() if k != "more"})
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    assert order == ["first", "second", "first", "second"]


def test_a_closure_is_evaluated_with_gradients_and_its_loss_comes_back() -> None:
    parts, plain_parts = parameters(1), parameters(1)

    def closure_of(part: nn.Parameter, optimizer: Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (part**2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    optimizer, plain = ElasticOptimizer(SGD(parts, lr=0.1)), SGD(plain_parts, lr=0.1)
    with torch.no_grad():
        losses = [optimizer.step(closure_of(parts[0], optimizer)) for _ in range(3)]
        losses.append(optimizer.step(closure=closure_of(parts[0], optimizer)))
        plain_losses = [plain.step(closure_of(plain_parts[0], plain)) for _ in range(4)]
    assert bits_of(losses, parts) == bits_of(plain_losses, plain_parts)
    assert optimizer.step() is None


# --- rate and decay, by themselves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_changed_rate_and_decay_do_what_a_hand_on_the_groups_does(make: MakeOptimizer) -> None:
    plain_parts, parts = parameters(), parameters()
    plain, optimizer = make(plain_parts), ElasticOptimizer(make(parts))
    for step in range(6):
        if step == 2:
            rate = plain.param_groups[0]["lr"]
            plain.param_groups[0]["lr"] = torch.tensor(0.03) if isinstance(rate, torch.Tensor) else 0.03
            optimizer.rates.set_rate(0.03)
        if step == 4:
            plain.param_groups[0]["weight_decay"] = 0.7
            optimizer.rates.set_decay(0.7)
        give_gradients(plain_parts, step)
        give_gradients(parts, step)
        plain.step()
        optimizer.step()
        assert bits_of(parts, optimizer.state_dict()) == bits_of(plain_parts, plain.state_dict())
    assert optimizer.effective_rates == pytest.approx([0.03], rel=1e-7)
    assert optimizer.rates.base_decay == 0.7


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_factor_acts_in_a_step_alone_and_like_a_rate_so_much_larger(make: MakeOptimizer) -> None:
    plain_parts, parts = parameters(), parameters()
    plain, optimizer = make(plain_parts), ElasticOptimizer(make(parts))
    given_rate = optimizer.param_groups[0]["lr"]
    optimizer.rates.set_batch_factor(4.0)
    for group in plain.param_groups:
        group["lr"] = group["lr"] * 4.0
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda seen, *ignored: used.append(float(seen.param_groups[0]["lr"])))
    for step in range(3):
        give_gradients(plain_parts, step)
        give_gradients(parts, step)
        plain.step()
        optimizer.step()
        assert bits_of(parts) == bits_of(plain_parts)
    assert used == optimizer.effective_rates * 3 == [float(plain.param_groups[0]["lr"])] * 3
    assert optimizer.param_groups[0]["lr"] is given_rate
    assert float(given_rate) == pytest.approx(0.1, rel=1e-7)


def test_a_tensor_rate_stays_where_a_captured_graph_reads_it() -> None:
    rate = torch.tensor(0.1)
    optimizer = ElasticOptimizer(AdamW(parameters(), lr=rate))
    optimizer.rates.set_batch_factor(2.0)
    places = []
    optimizer.register_step_pre_hook(lambda seen, *ignored: places.append((seen.param_groups[0]["lr"], rate.item())))
    optimizer.step()
    optimizer.rates.set_rate(0.25)
    optimizer.step()
    assert all(seen is rate for seen, _ in places)
    assert [value for _, value in places] == pytest.approx([0.2, 0.5])
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_the_rate_is_put_back_where_a_step_raises() -> None:
    optimizer = in_groups(0.1, 0.3)
    optimizer.rates.set_batch_factor(0.5)
    handle = optimizer.register_step_post_hook(lambda *ignored: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    assert groups_of(optimizer, "lr") == [0.1, 0.3]
    assert optimizer.effective_rates == [0.05, 0.15]


def test_groups_keep_their_ratio_to_the_first() -> None:
    optimizer = in_groups(0.1, 0.01, 0.1, 0.2)
    optimizer.rates.set_rate(0.5)
    assert optimizer.effective_rates == pytest.approx([0.5, 0.05, 0.5, 1.0], rel=1e-15)
    assert optimizer.effective_rates[2] == 0.5, "an equal rate stays an equal rate"
    optimizer.rates.set_rate(0.001)
    assert optimizer.effective_rates == pytest.approx([0.001, 0.0001, 0.001, 0.002], rel=1e-15)


def test_a_group_with_rate_zero_stays_still() -> None:
    optimizer = in_groups(0.1, 0.0)
    optimizer.rates.set_rate(0.5)
    assert optimizer.effective_rates == [0.5, 0.0]


def test_groups_that_share_a_rate_tensor_are_changed_once() -> None:
    first, second = parameters()
    optimizer = ElasticOptimizer(AdamW([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.1)))
    optimizer.rates.set_rate(0.5)
    assert optimizer.effective_rates == [0.5, 0.5]
    optimizer.rates.set_batch_factor(2.0)
    used: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda seen, *ignored: used.append(groups_of(seen, "lr")))
    optimizer.step()
    assert used == [[1.0, 1.0]]
    assert optimizer.effective_rates == [1.0, 1.0]


def test_decays_keep_their_ratio_and_a_group_without_decay_stays_without() -> None:
    optimizer = with_decays(0.1, 0.0, 0.1, 0.2)
    optimizer.rates.set_decay(0.5)
    assert groups_of(optimizer, "weight_decay") == pytest.approx([0.5, 0.0, 0.5, 1.0])
    optimizer.rates.set_decay(0.0)
    assert groups_of(optimizer, "weight_decay") == [0.0, 0.0, 0.0, 0.0]
    optimizer.rates.set_decay(0.1)
    assert groups_of(optimizer, "weight_decay") == [0.1, 0.0, 0.1, 0.2]


def test_groups_that_all_have_no_decay_can_be_given_one() -> None:
    optimizer = with_decays(0.0, 0.0)
    assert optimizer.rates.why_not_decay() is None
    optimizer.rates.set_decay(0.3)
    assert groups_of(optimizer, "weight_decay") == [0.3, 0.3]


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=4), st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=4))
def test_a_change_that_is_taken_back_leaves_almost_nothing_and_of_the_first_group_no_bit(
    rates: list[float], changes: list[float]
) -> None:
    optimizer = in_groups(*rates)
    for change in [*changes, rates[0]]:
        optimizer.rates.set_rate(change)
        optimizer.rates.set_decay(change)
        assert optimizer.effective_rates[0] == change
    assert optimizer.effective_rates[0] == rates[0]
    assert optimizer.effective_rates == pytest.approx(rates, rel=1e-13)


def test_a_whole_number_as_rate_can_change() -> None:
    optimizer = ElasticOptimizer(SGD(parameters(), lr=1))
    optimizer.rates.set_rate(0.5)
    assert optimizer.effective_rates == [0.5]


def test_why_a_decay_cannot_change_is_said() -> None:
    assert ElasticOptimizer(LBFGS(parameters())).rates.why_not_decay() == "LBFGS has no weight decay"
    reason = with_decays(0.0, 0.1).rates.why_not_decay()
    assert reason is not None and "put a decayed group first" in reason
    assert with_decays(0.1, 0.0).rates.why_not_decay() is None


def test_a_group_added_later_takes_part_and_a_change_taken_back_leaves_it_as_it_was_given() -> None:
    optimizer = in_groups(0.1, weight_decay=0.2)
    optimizer.rates.set_rate(0.2)
    optimizer.rates.set_decay(0.4)
    optimizer.add_param_group({"params": parameters(1), "lr": 0.05, "weight_decay": 0.1})
    assert optimizer.effective_rates[0] == 0.2
    optimizer.rates.set_rate(0.1)
    optimizer.rates.set_decay(0.2)
    assert optimizer.effective_rates == pytest.approx([0.1, 0.05])
    assert groups_of(optimizer, "weight_decay") == pytest.approx([0.2, 0.1])


def test_a_group_added_to_the_optimizer_itself_takes_part() -> None:
    inner = SGD(parameters(1), lr=0.1, weight_decay=0.2)
    optimizer = ElasticOptimizer(inner)
    inner.add_param_group({"params": parameters(1), "lr": 0.05, "weight_decay": 0.1})
    optimizer.rates.set_rate(0.2)
    optimizer.rates.set_decay(0.4)
    assert optimizer.effective_rates == pytest.approx([0.2, 0.1])
    assert groups_of(optimizer, "weight_decay") == pytest.approx([0.4, 0.2])


def test_what_the_config_says_is_put_over_what_is_loaded() -> None:
    optimizer = in_groups(0.1, 0.05, weight_decay=0.2)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.rates.set_rate(0.4)
    optimizer.rates.set_decay(0.8)
    optimizer.load_state_dict(state)
    assert optimizer.effective_rates == pytest.approx([0.4, 0.2])
    assert groups_of(optimizer, "weight_decay") == pytest.approx([0.8, 0.8])


def test_where_the_config_says_nothing_what_is_loaded_stays() -> None:
    optimizer, other = in_groups(0.1, 0.05), in_groups(0.7, 0.3, weight_decay=0.5)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.effective_rates == [0.7, 0.3]
    assert groups_of(optimizer, "weight_decay") == [0.5, 0.5]


def test_what_is_saved_under_a_change_is_what_plain_torch_would_go_on_with() -> None:
    optimizer, plain = in_groups(0.1, 0.05), SGD([{"params": [part]} for part in parameters()], lr=0.1)
    optimizer.rates.set_rate(0.4)
    optimizer.rates.set_batch_factor(2.0)
    plain.load_state_dict(optimizer.state_dict())
    assert groups_of(plain, "lr") == pytest.approx([0.4, 0.2])


# --- alone, following a file ----------------------------------------------------------------------------------------


def alone(folder: Path, inner: Optimizer, *, rank: int = 0, **arguments: Any) -> ElasticOptimizer:
    """An optimizer that follows this rank's own ``config.json`` by itself."""
    run_dir = folder / str(rank)
    run_dir.mkdir(exist_ok=True)
    options: dict[str, Any] = {"job": "test", "poll_seconds": 0.2, "agree_every_steps": 1, **arguments}
    return ElasticOptimizer(inner, config_file=run_dir / "config.json", run_dir=run_dir, **options)


def test_alone_it_takes_the_file_that_is_there_and_those_that_come(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    put(tmp_path, 0, {"version": 1, "optimizer": {"learning_rate": 0.5}})
    threads = set(threading.enumerate())
    optimizer = alone(tmp_path, SGD(parameters(), lr=0.1, weight_decay=0.3))
    assert optimizer.effective_rates == [0.5]
    assert set(threading.enumerate()) > threads
    put(tmp_path, 0, {"version": 2, "optimizer": {"weight_decay": 0.7}}, seen_by=optimizer._follower)
    for _ in range(3):
        optimizer.step()
    assert optimizer.effective_rates == [0.1], "an absent key is the script's own value"
    assert optimizer.rates.base_decay == 0.7
    optimizer.close()
    assert set(threading.enumerate()) == threads
    metrics = json.loads((tmp_path / "0" / "metrics-0.json").read_text())
    assert metrics["config_version"] == 2


def test_alone_a_step_uses_what_was_in_force_before_it_and_the_next_one_what_came(tmp_path: Path) -> None:
    optimizer = alone(tmp_path, SGD(parameters(), lr=0.1))
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda seen, *ignored: used.append(seen.param_groups[0]["lr"]))
    put(
        tmp_path,
        0,
        {"version": 1, "apply_at_step": 3, "optimizer": {"learning_rate": 0.5}},
        seen_by=optimizer._follower,
    )
    for _ in range(6):
        optimizer.step()
    optimizer.close()
    assert used == [0.1, 0.1, 0.1, 0.5, 0.5, 0.5]


def test_alone_closures_hooks_zero_grad_and_state_are_plain_torchs(tmp_path: Path) -> None:
    plain_parts, parts = parameters(), parameters()
    plain, optimizer = AdamW(plain_parts, lr=0.1), alone(tmp_path, AdamW(parts, lr=0.1))
    for each, its_parts in ((plain, plain_parts), (optimizer, parts)):

        def closure(each: Optimizer = each, its_parts: Parameters = its_parts) -> torch.Tensor:
            each.zero_grad()
            loss = torch.stack([(part**2).sum() for part in its_parts]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):
            each.step(closure)
    assert bits_of(parts, optimizer.state_dict()) == bits_of(plain_parts, plain.state_dict())
    optimizer.zero_grad()
    optimizer.zero_grad()
    assert all(part.grad is None for part in parts)
    optimizer.close()


def test_alone_what_cannot_be_done_is_refused_and_said(tmp_path: Path) -> None:
    with seen_by() as seen:
        optimizer = alone(tmp_path, LBFGS(parameters(), lr=0.1))
        put(tmp_path, 0, {"version": 1, "optimizer": {"weight_decay": 0.5}}, seen_by=optimizer._follower)
        for _ in range(2):
            optimizer.step(lambda: torch.zeros(()))
        optimizer.close()
    assert any("version 1 was refused" in line and "LBFGS has no weight decay" in line for line in seen.log)


def test_alone_and_closed_it_goes_on_as_the_optimizer_it_is(tmp_path: Path) -> None:
    parts = parameters()
    optimizer = alone(tmp_path, SGD(parts, lr=0.1))
    optimizer.step()
    optimizer.close()
    optimizer.close()
    before = bits_of(parts)
    give_gradients(parts, 0)
    optimizer.step()
    assert bits_of(parts) != before


def test_alone_and_switched_off_it_follows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT", "off")
    (tmp_path / "0").mkdir()
    put(tmp_path, 0, {"version": 1, "optimizer": {"learning_rate": 0.5}})
    threads = set(threading.enumerate())
    optimizer = alone(tmp_path, SGD(parameters(), lr=0.1))
    optimizer.step()
    assert set(threading.enumerate()) == threads
    assert optimizer.effective_rates == [0.1]
    optimizer.close()


def test_alone_wrong_arguments_leave_no_thread(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="agree_every_steps"):
        alone(tmp_path, SGD(parameters(), lr=0.1), agree_every_steps=0)
    with pytest.raises(TypeError, match="no_such_argument"):
        alone(tmp_path, SGD(parameters(), lr=0.1), no_such_argument=1)
    assert set(threading.enumerate()) == threads


def test_a_trainer_refuses_one_that_follows_a_file_alone(tmp_path: Path) -> None:
    model = make_model()
    optimizer = alone(tmp_path, SGD(model.parameters(), lr=0.1))
    trainer = trainer_of(tmp_path, model)
    with pytest.raises(ValueError, match="give the one that it was made from"):
        trainer.prepare(optimizer)
    optimizer.close()


def rates_of_rank(rank: int, folder: Path, num_steps: int) -> list[float]:
    """The rate of every step, on one of several ranks, each of which has the file on a node of its own."""
    optimizer = alone(folder, SGD(parameters(), lr=0.1), rank=rank)
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda seen, *ignored: used.append(seen.param_groups[0]["lr"]))
    for number in range(num_steps):
        if number in (3, 6):
            values = {"version": number, "optimizer": {"learning_rate": 0.1 * number}}
            put(folder, rank, values, seen_by=optimizer._follower)
        dist.barrier()
        optimizer.step()
    optimizer.close()
    return used


def test_alone_on_several_ranks_all_change_at_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    used = ranks.run(2, rates_of_rank, tmp_path, 12, process_group=True)
    assert used[0] == used[1]
    assert sorted(set(used[0])) == [0.1, 0.1 * 3, 0.1 * 6]
    assert used[0] == sorted(used[0])
