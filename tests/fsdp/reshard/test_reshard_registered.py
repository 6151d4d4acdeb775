"""Tensors that were registered, in trainings whose model is spread otherwise: they follow, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, KEPT, WHOLE, Net, all_of_it, change, make, take_step
from tests.support.retraining import WIDTH, Retraining, are_in_force, differing, stayed, whole


def refuse_registered(rank: int, folder: Path) -> None:
    cases: list[tuple[str, ParallelPlan, Callable[[Any], Any], str]] = [
        ("alone", FULL, lambda model: next(model.parameters()).detach().clone(), "by itself"),
        ("module", WHOLE, lambda model: model.state_dict(), "module's state_dict"),
    ]
    for name, start, registered, why in cases:
        run = Retraining(rank, folder, start, name=name, averages=False)
        run.trainer.register_state("own", registered(run.model))
        with run.trainer:
            run.train(4, {1: WHOLE if start is FULL else FULL})
            assert run.plan == start
            assert why in run.proposals[0].refusal
            if start is FULL:
                run.train(7, {4: KEPT})
                assert run.plan == KEPT


def test_what_could_not_follow_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, refuse_registered, tmp_path)


def hold_parameters(rank: int, folder: Path) -> None:
    """Parameters themselves, under two keys and with something else beside them."""
    run = Retraining(rank, folder, WHOLE, averages=False)
    held = {"one": run.model.embed.weight, "two": run.model.head.weight, "count": torch.zeros(3)}
    count = held["count"]
    run.trainer.register_state("held", held)
    with run.trainer:
        run.train(4, {1: FULL})
        assert held["one"] is held["two"] is run.model.embed.weight
        run.train(7, {4: WHOLE})
        assert held["one"] is held["two"] is run.model.embed.weight
        assert held["count"] is count
    assert are_in_force(run)


def test_registered_parameters_are_those_that_are_trained(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, hold_parameters, tmp_path)


def register_in_other_orders(rank: int, folder: Path) -> None:
    """Ranks give their names, and the tensors of each, in another order."""
    values: list[list[dict[str, torch.Tensor]]] = []
    for name, plans in (("stayed", {}), ("changed", {1: WHOLE, 3: FULL, 5: KEPT})):
        run = Retraining(rank, folder, FULL, name=name, averages=False)
        with torch.no_grad():
            own = {
                which: {key: part * scale for key, part in run.model.named_parameters()}
                for which, scale in (("double", 2.0), ("treble", 3.0))
            }
        for which in sorted(own, reverse=bool(rank)):
            own[which] = dict(sorted(own[which].items(), reverse=bool(rank)))
            run.trainer.register_state(which, own[which])
        with run.trainer:
            run.train(7, plans)
            assert are_in_force(run) is bool(plans)
            values.append([{key: whole(own[which][key]) for key in sorted(own[which])} for which in sorted(own)])
            values[-1].append(run.state())
    for one, other in zip(*values, strict=True):
        assert differing(one, other) == []


def test_what_ranks_register_in_another_order_follows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, register_in_other_orders, tmp_path)


def register_other_names(rank: int, folder: Path) -> str:
    _, state = stayed(rank, folder, FULL, 8, averages=False)
    run = Retraining(rank, folder, FULL, averages=False)
    name, part = next(iter(run.model.named_parameters()))
    held = {name: part.detach().clone(), **({"more": part.detach().clone()} if rank else {})}
    run.trainer.register_state("held", held)
    with run.trainer:
        run.train(8, {1: KEPT})
        assert run.plan == FULL
        assert differing(run.state(), state) == []
    (proposal,) = run.proposals
    assert proposal.outcome == "refused"
    return proposal.refusal


def test_what_only_one_rank_has_registered_is_refused_on_all_before_anything_moves(
    ranks: RankPool, tmp_path: Path
) -> None:
    for told in ranks.run(2, register_other_names, tmp_path):
        assert "nothing has changed, since ranks would move different tensors: rank 0 has 74 tensors" in told
        assert "rank 1 has 75 tensors" in told
        assert "register the same state (trainer.register_state) under the same names" in told


def count_bytes(rank: int, folder: Path) -> None:
    """On two ranks, each lacks half of what is sharded: all of it is moved once where both come to have it."""
    run = Retraining(rank, folder, FULL)
    parallelism = run.trainer._training.parallelism
    planned: list[int] = []
    check = parallelism.check

    def checking(new: Any) -> Any:
        refusal = check(new)
        if parallelism._prepared is not None:
            planned.append(parallelism._prepared[1].sent_bytes)
        return refusal

    parallelism.check = checking
    with run.trainer:
        run.train(3)
        lies = [*run.model.parameters(), *run.average.values()]
        lies += [value for state in run.inner.state.values() for value in state.values() if value.dim()]
        expected = sum(each.numel() * each.element_size() for each in lies)
        del lies
        run.train(6, {3: KEPT})
        report = run.trainer.reshard_report
        assert report is not None
        assert report.moved_bytes == expected
        assert planned[-1] == expected
    assert are_in_force(run)


def test_bytes_that_are_planned_are_those_that_are_moved_with_what_is_registered(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, count_bytes, tmp_path)


def leave_some_untrained(rank: int, folder: Path, plan: ParallelPlan) -> list[torch.Tensor]:
    """Gradients of what no optimizer has, which nobody clears, after each step."""
    seen: list[torch.Tensor] = []
    torch.manual_seed(0)
    model: Any = Net(WIDTH)

    def some(_: Any) -> Any:
        return AdamW([part for name, part in model.named_parameters() if "head" not in name and "embed" not in name])

    run = Retraining(
        rank, folder, plan, name=plan.strategy, model=model, make_optimizer=some, averages=False, num_micro_steps=2
    )

    def look(run: Retraining) -> None:
        seen.append(whole(run.model.embed.weight.grad))

    with run.trainer:
        run.train(4, dict.fromkeys(range(1, 5), look))
    return seen


def test_gradients_that_no_optimizer_takes_add_up_alike_under_all_plans(ranks: RankPool, tmp_path: Path) -> None:
    whole_ones, _ = ranks.run(2, leave_some_untrained, tmp_path, WHOLE)
    sharded, _ = ranks.run(2, leave_some_untrained, tmp_path, FULL)
    assert len(whole_ones) == 4
    for one, other in zip(whole_ones, sharded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def refuse_left_behind(rank: int, what: str) -> str:
    """What would be left behind, or cannot be moved."""
    plan, other = (WHOLE, FULL) if what in ("data", "state of a part", "sparse") else (FULL, KEPT)
    spread, optimizer = make(plan)
    take_step(spread, optimizer, 0)
    name, part = next(iter(spread.model.named_parameters()))
    held: Mapping[str, torch.Tensor] = {}
    if what == "data":
        held = {f"own {name}": part.data}
    elif what == "state of a part":
        held = spread.model.blocks[0].state_dict()  # type: ignore[index, union-attr]
    elif what == "local part":
        held = {"mine": part.to_local()}  # type: ignore[attr-defined]
    elif what == "no elements":
        empty = part.to_local().new_empty(2, 0)  # type: ignore[attr-defined]
        held = {"empty": DTensor.from_local(empty, part.device_mesh, [Shard(0)])}  # type: ignore[attr-defined]
    else:
        optimizer.state[part]["seen"] = torch.zeros(part.shape).to_sparse()
    before = all_of_it(spread.model, optimizer) if what != "sparse" else {}
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the words are looked at where it was asked for
        change(spread, other, optimizer, registered=[held])
    if what != "sparse":
        assert differing(before, all_of_it(spread.model, optimizer)) == []
    spread.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("data", "own frozen was registered and shows the memory of a parameter"),
        ("state of a part", "was registered and shows the memory of a parameter"),
        ("local part", "mine was registered and shows the memory of a parameter"),
        ("no elements", "empty was registered and has no elements to move; leave it out"),
        ("sparse", "torch.sparse_coo, which has no part that could be moved; keep it dense"),
    ],
)
def test_what_would_be_left_behind_or_has_no_parts_is_refused(ranks: RankPool, what: str, words: str) -> None:
    for told in ranks.run(2, refuse_left_behind, what):
        assert words in told
