"""The whole state_dict under every sharding; and scripts that ask the model itself, where training has sharded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from elastic_ext import ElasticError, StepError
from elastic_ext.fsdp.plan import ParallelPlan
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, GRAD_OP, HYBRID, KEPT, WHOLE, Net, by_blocks
from tests.support.retraining import WIDTH, Retraining, are_in_force, stayed, whole
from tests.support.training import make_data, make_model, trainer_of

UNIT_WHOLE = ParallelPlan(strategy="full_shard", unit="whole")


def remarks(run: Retraining) -> list[str]:
    """What this rank was warned of."""
    lines = (run.folder / str(run.rank) / f"events-{run.rank}.jsonl").read_text().splitlines()
    return [event["text"] for event in map(json.loads, lines) if event["kind"] == "remark"]


def evaluate(model: nn.Module) -> None:
    inputs, _ = make_data(8, torch.float32)
    model.eval()
    with torch.no_grad():
        for batch in inputs.split(4):  # type: ignore[no-untyped-call]
            model(batch)
    model.train()


# ---- one rank that keeps the best model ----


def keep_the_best(rank: int, folder: Path, plan: ParallelPlan) -> None:
    """What one rank does with the model's state_dict() leaves it as gathered as the others have it."""
    losses, _ = stayed(rank, folder, None, 8, wrap=DistributedDataParallel, averages=False)
    run = Retraining(rank, folder, None, wrap=DistributedDataParallel, averages=False)

    def evaluate_and_keep(run: Retraining) -> None:
        assert run.plan == plan
        evaluate(run.model)
        if rank == 0:
            run.model.module.state_dict()
        evaluate(run.model.module)  # another data set, and no step in between
        if rank == 1:
            run.model.state_dict()

    with run.trainer:
        run.train(8, {1: plan, 4: evaluate_and_keep, 6: evaluate_and_keep})
    evaluate(run.model)
    if rank == 0:
        run.model.state_dict()
    evaluate(run.model)
    assert are_in_force(run)
    assert run.losses == losses
    told = remarks(run)
    assert len(told) == 1 and told[0].startswith(
        f"the script gave the model whole, and it is sharded now ({plan.strategy} on 2 ranks): "
    )


@pytest.mark.parametrize("plan", [FULL, GRAD_OP, UNIT_WHOLE, KEPT], ids=lambda plan: f"{plan.strategy}-{plan.unit}")
def test_one_rank_may_ask_a_model_for_its_state_between_passes_and_is_told_what_it_gets(
    ranks: RankPool, tmp_path: Path, plan: ParallelPlan
) -> None:
    ranks.run(2, keep_the_best, tmp_path, plan)


def evaluate_within_a_step(rank: int, folder: Path) -> None:
    run = Retraining(rank, folder, None, wrap=DistributedDataParallel, averages=False)
    with run.trainer:
        run.train(3, {1: FULL})
        assert run.plan == FULL
        inputs, targets = next(iter(run.loader))
        with run.trainer.step():
            loss = nn.functional.cross_entropy(run.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()
            run.schedule.step()
            run.optimizer.zero_grad()
            evaluate(run.model)
            if rank == 0:
                run.model.module.state_dict()
        run.train(6)


def test_one_rank_may_ask_within_a_step_once_the_optimizer_has_stepped(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, evaluate_within_a_step, tmp_path)


def ask_rightly(rank: int, folder: Path) -> None:
    run = Retraining(rank, folder, None, wrap=DistributedDataParallel, averages=False)
    with run.trainer:
        run.model.module.state_dict()  # whole so far
        run.train(4, {1: FULL})
        get_model_state_dict(run.model)
        run.trainer.model_state_dict()
        run.train(8, {5: WHOLE})
        assert run.plan == WHOLE
        run.model.module.state_dict()  # whole again
        root = run.model.module
        assert not root._state_dict_pre_hooks
    assert remarks(run) == []


def test_nothing_is_said_where_whole_tensors_are_given_or_shards_are_wanted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, ask_rightly, tmp_path)


def ask_of_shards(rank: int, folder: Path) -> None:
    """A script that shards its model by itself knows of it, and its passes are as torch has them."""
    run = Retraining(rank, folder, None, wrap=by_blocks(reshard_after_forward=False), averages=False)
    with run.trainer:
        run.train(2)
        evaluate(run.model)
        assert not any(isinstance(part, DTensor) for part in run.model.parameters())  # still gathered
        assert any(isinstance(part, DTensor) for part in run.model.state_dict().values())
        run.train(4)
    assert remarks(run) == []


def test_a_model_that_its_script_has_sharded_is_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, ask_of_shards, tmp_path)


# ---- the whole state_dict ----


def take_whole(rank: int, folder: Path, plan: ParallelPlan | None, is_wrapped: bool, is_compiled: bool) -> None:
    given: dict[str, Any] = {"averages": False, "wrap": DistributedDataParallel if is_wrapped else None}
    if is_compiled:
        given["wrap"] = lambda model: DistributedDataParallel(torch.compile(model, backend="eager"))
    run = Retraining(rank, folder, None if is_wrapped else plan, **given)
    bare: Any = Net(WIDTH)
    with run.trainer:
        run.train(4, {1: plan} if is_wrapped and plan is not None else {})
        assert plan is None or run.plan == plan
        evaluate(run.model)
        found = run.trainer.model_state_dict()
        kept = {name: value.clone() for name, value in found.items()}
        parts = {
            name.removeprefix("module.").removeprefix("_orig_mod."): whole(part)
            for name, part in run.model.named_parameters()
        }
        run.train(6)
        if rank == 0:
            assert list(found) == list(bare.state_dict())
            assert {name: value for name, value in found.items() if name in parts}.keys() == parts.keys()
            assert all(torch.equal(found[name], value) for name, value in parts.items())
            assert all(torch.equal(found[name], value) for name, value in kept.items())  # no step has changed them
            assert not any(isinstance(value, DTensor) or value.device.type != "cpu" for value in found.values())
            bare.load_state_dict(found)
        else:
            assert found == {}
    after = run.trainer.model_state_dict()
    assert list(after) == list(found)


@pytest.mark.parametrize(
    ("num_ranks", "plan", "is_wrapped", "is_compiled"),
    [
        (2, None, True, False),
        (2, FULL, True, False),
        (2, KEPT, True, False),
        (2, FULL, False, False),
        (2, WHOLE, False, False),
        (1, FULL, False, False),
        (2, None, True, True),
        pytest.param(2, FULL, True, True, marks=pytest.mark.slow),
        pytest.param(4, HYBRID, True, False, marks=pytest.mark.slow),
    ],
)
def test_the_whole_state_comes_to_rank_0_however_the_model_is_sharded_or_wrapped(
    ranks: RankPool, tmp_path: Path, num_ranks: int, plan: ParallelPlan | None, is_wrapped: bool, is_compiled: bool
) -> None:
    ranks.run(num_ranks, take_whole, tmp_path, plan, is_wrapped, is_compiled)


def test_the_whole_state_of_a_process_by_itself_is_a_copy_in_which_tied_tensors_are_one(tmp_path: Path) -> None:
    model: Any = make_model()
    model.again = model[0]
    trainer = trainer_of(tmp_path, model, micro_batch_size=4)
    with pytest.raises(ElasticError, match=r"prepare\(\) was not called"):
        trainer.model_state_dict()
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        with pytest.raises(StepError, match=r"trainer\.model_state_dict\(\) was called inside"), trainer.step():
            trainer.model_state_dict()
        found = trainer.model_state_dict()
    assert found.keys() == model.state_dict().keys()
    assert found["again.weight"].data_ptr() == found["0.weight"].data_ptr() != model[0].weight.data_ptr()
