"""Tensors that were registered, in trainings whose model is spread otherwise: they follow, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic_ext.fsdp.plan import ParallelPlan
from tests.ranks import RankPool
from tests.resharding import FULL, KEPT, WHOLE
from tests.retraining import (
    Retraining,
    are_in_force,
)


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
