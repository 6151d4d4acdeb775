"""What cannot be changed is refused with the reason, before anything is touched, and stays as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic_ext.fsdp.plan import ParallelPlan
from tests.ranks import RankPool
from tests.resharding import (
    FULL,
    KEPT,
    WHOLE,
    Net,
    all_of_it,
    change,
    make,
    take_step,
)


def _only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(FSDPModule, name), reason=f"this torch has no {name}()")


def _refused(rank: int, why: str, said: str) -> None:
    if why == "a machine's ranks":
        spread, optimizer = make(FULL)
        spread._num_local = 3
        plan = ParallelPlan(strategy="hybrid_shard")
    elif why == "no dimension":
        plain: Any = Net()
        plain.register_parameter("number", nn.Parameter(torch.ones(())))
        spread, optimizer = make(WHOLE, model=plain)
        plan = FULL
    elif why == "tied across units":
        plain = Net()
        plain.blocks[0].tied = plain.embed.weight
        spread, optimizer = make(WHOLE, model=plain)
        plan = FULL
    else:
        spread, optimizer = make(FULL if why != "a hook" else WHOLE)
        plan = KEPT
    model: Any = spread.model
    if why not in ("no gradients shared", "no dimension"):
        take_step(spread, optimizer, 0)
    held = []
    if why == "a stranger":
        held.append(model.embed.weight)
        plan = WHOLE
    elif why == "a hook":
        model.embed.weight.register_hook(lambda gradient: gradient)
        plan = FULL
    elif why == "no gradients shared":
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 7)).sum().backward()
        model.set_requires_gradient_sync(True)
    elif why == "shared by some":
        change(spread, KEPT, optimizer)
        model.set_requires_all_reduce(False)
        model(torch.ones(2, 7)).sum().backward()
        model.set_requires_all_reduce(True)
        plan = FULL
    elif why == "own communication":
        model.set_all_reduce_hook(lambda tensor: None)
    elif why == "own group":
        model.set_separate_reduce_scatter_group()
    elif why == "state of its own":
        optimizer.state[model.embed.weight]["rows"] = torch.ones(5)
    elif why == "a method":
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model.blocks[0], "extra_repr")
        plan = WHOLE
    before = all_of_it(model, optimizer)
    objects = list(map(id, model.parameters()))
    with pytest.raises(ValueError, match=re.escape(said)):
        change(spread, plan, optimizer)
    assert objects == list(map(id, model.parameters()))
    after = all_of_it(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if why not in ("no gradients shared", "shared by some", "own communication", "no dimension"):
        take_step(spread, optimizer, 1)
    del held
    spread.close()


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("a machine's ranks", "3 does not divide the 2 ranks; allowed: 1, 2"),
        ("no dimension", "give it the shape (1,)"),
        ("tied across units", "are one parameter, and would lie in two units"),
        ("a stranger", "also held by a list of 1"),
        ("a hook", "has hooks"),
        ("no gradients shared", "the change waits for the next step"),
        ("shared by some", "the change waits for the next step"),
        ("own communication", "all-reduce hook of your own"),
        pytest.param(
            "own group", "a group of its own for reduce-scatter", marks=_only("set_separate_reduce_scatter_group")
        ),
        ("state of its own", "embed.weight/rows is of shape (5,)"),
        ("a method", "extra_repr was registered as a forward method"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason_and_stays(ranks: RankPool, why: str, said: str) -> None:
    ranks.run(2, _refused, why, said)
