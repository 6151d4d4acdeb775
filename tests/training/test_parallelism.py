"""Parallelism, the applier: what it checks, applies, tells and lets go of; by itself, without a trainer."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ext import ElasticConfig, ParallelPlan, ReshardReport
from elastic_ext.training.parallelism import Parallelism, plan_of, values_of
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, KEPT, WHOLE, agreeing, make, take_step


def _parallelism(spread: Any, optimizer: Any, told: list[Any]) -> Parallelism:
    """That of a training before its first step, with nothing registered, whose parts note what they are told."""
    training: Any = SimpleNamespace(
        spread=spread,
        optimizers=[optimizer],
        registered_tensors=list,
        let_go_of_parameters=list,
        ranks=SimpleNamespace(all_or_raise=lambda error, doing: agreeing(error)),
        steps=SimpleNamespace(has_not_begun=True, give_up=told.append),
        session=SimpleNamespace(
            wait_for_staging=lambda: told.append("fence"),
            take_up_model=lambda: told.append("taken up"),
            tell_resharded=told.append,
        ),
    )
    return Parallelism(training)


def _config(plan: ParallelPlan) -> ElasticConfig:
    return ElasticConfig.from_values(values_of(plan))


def _apply(rank: int) -> None:
    told: list[Any] = []
    spread, optimizer = make(FULL)
    take_step(spread, optimizer, 0)
    parallelism = _parallelism(spread, optimizer, told)
    communication, section = parallelism.appliers()
    assert (communication.section, section.section) == ("communication", "parallelism")
    for applier in (communication, section):
        assert applier.check(_config(WHOLE)) is None
    assert told == []
    for applier in (communication, section):  # one change, whichever comes first
        applier.apply(_config(FULL), _config(WHOLE))
    assert spread.plan == WHOLE
    *before, report = told
    assert before == ["fence", "taken up"]
    assert isinstance(report, ReshardReport)
    assert report is parallelism.report
    assert (report.old, report.new, report.steps) == (FULL, WHOLE, ("spread",))
    assert report.replaced == sum(1 for _ in spread.model.parameters())
    assert report.details()["new"] == values_of(WHOLE)
    assert str(report).startswith("full_shard, unit 1 -> no_shard in ")
    assert section.check(_config(ParallelPlan(strategy="hybrid_shard", shard_degree=5))) is not None
    take_step(spread, optimizer, 1)
    parallelism.close()


def test_two_sections_are_one_change_and_one_report(ranks: RankPool) -> None:
    ranks.run(2, _apply)


def _forget(rank: int) -> None:
    spread, optimizer = make(FULL)
    take_step(spread, optimizer, 0, clears=False)
    parallelism = _parallelism(spread, optimizer, [])
    assert parallelism.check(_config(KEPT)) is None  # and another rank refuses it, or its step is still to come
    gradients = [weakref.ref(part.grad) for part in spread.model.parameters() if part.grad is not None]
    optimizer.zero_grad()
    parallelism.forget()
    gc.collect()
    assert gradients
    assert not any(gradient() is not None for gradient in gradients)
    parallelism.close()


def test_a_change_that_is_not_made_keeps_no_tensors(ranks: RankPool) -> None:
    ranks.run(1, _forget)


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"])
def test_a_plan_in_a_config_says_all_of_it_whatever_was_in_force(strategy: Any) -> None:
    before = ParallelPlan(strategy="hybrid_shard", shard_degree=2, unit=3, prefetch=2, bucket_cap_mb=4.0)
    config = ElasticConfig.from_values({"global_batch_size": 8, **values_of(before)})
    for plan in (ParallelPlan(strategy=strategy), ParallelPlan(strategy=strategy, prefetch=0, bucket_cap_mb=0.5)):
        assert plan_of(config.revise(values_of(plan), "another one")) == plan
        assert plan_of(ElasticConfig.from_values(values_of(plan)).over(config)) == plan
    assert plan_of(config) == before
