"""Holders: whoever else has a parameter is found, and named so that people find the place; who may have it is not."""

from __future__ import annotations

import gc
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel

from elastic_ext.fsdp.reshard.references import holders_of, replace_in

HERE: Any = sys.modules[__name__]
Pair = namedtuple("Pair", ["weight", "bias"])


@dataclass
class Keeper:
    kept: Any


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def _found(model: nn.Module, *optimizers: Any, known: tuple[Any, ...] = ()) -> list[str]:
    gc.collect()
    parameters = list(model.parameters())
    return [*holders_of(model, optimizers, parameters, known).strangers]


# --- what is found, and how it is named -----------------------------------------------------------------------------


def test_a_global_of_a_module_is_named_with_it(model: nn.Module) -> None:
    HERE.the_weight = model[0].weight  # type: ignore[index]
    try:
        assert _found(model) == [f"'the_weight' in the module {__name__}"]
    finally:
        del HERE.the_weight


def test_a_list_that_is_a_global_is_named_with_its_module(model: nn.Module) -> None:
    HERE.the_weights = list(model.parameters())
    try:
        assert _found(model) == [f"a list of 4, 'the_weights' in the module {__name__}"]
    finally:
        del HERE.the_weights


KEPT: list[tuple[str, Callable[[Any], Any], str]] = [
    ("an attribute", lambda weight: Keeper(weight), f"'kept' in a {__name__}.Keeper"),
    ("a list of an object", lambda weight: Keeper([weight, 1]), f"a list of 2, 'kept' in a {__name__}.Keeper"),
    ("a dict of an object", lambda weight: Keeper({"w": weight}), f"'w' in a dict of 1, 'kept' in a {__name__}.Keeper"),
    ("a list", lambda weight: [weight], "a list of 1"),
    ("a tuple", lambda weight: (weight, [2]), "a tuple of 2"),
    ("a set", lambda weight: {weight}, "a set of 1"),
    ("a dict", lambda weight: {"w": weight}, "'w' in a dict of 1"),
    ("a dict by its keys", lambda weight: {weight: "w"}, "a key in a dict of 1"),
    ("a namedtuple", lambda weight: Pair(weight, []), "a Pair of 2"),
    ("a slot", lambda weight: Slotted(weight), f"a {__name__}.Slotted"),
    ("a closure", lambda weight: lambda: weight, "a variable of a function that is kept"),
    ("a default", lambda weight: lambda kept=weight: kept, "a tuple of 1"),
    ("a partial", lambda weight: __import__("functools").partial(print, weight), "a tuple of 1"),
]


def test_who_has_a_parameter_is_named(model: Any) -> None:
    """All at once: each look at all that this process holds takes seconds."""
    kept = [make(model[1].weight) for _, make, _ in KEPT]
    found = sorted(_found(model))
    expected = sorted(words for _, _, words in KEPT)
    assert len(found) == len(expected), found
    for words, start in zip(found, expected, strict=True):
        assert words.startswith(start), found
    del kept
    assert _found(model) == []


def test_a_module_that_has_it_as_a_plain_attribute_is_named(model: Any) -> None:
    model[0].__dict__["shortcut"] = model[1].weight
    assert _found(model) == ["'shortcut' in a torch.nn.modules.linear.Linear"]


def test_another_model_that_shares_it_is_named(model: Any) -> None:
    other = nn.Linear(3, 1)
    other.weight = model[1].weight
    (words,) = _found(model)
    assert words.startswith("'weight' in a dict")


def test_the_optimizer_of_somebody_else_is_found(model: Any) -> None:
    own, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    assert _found(model, own, other) == []
    (words,) = _found(model, own)
    assert words.startswith("a list of 4, 'params' in")


def test_hooks_of_a_parameter_are_found_by_what_they_close_over(model: Any) -> None:
    def make(weight: Any) -> Callable[[Any], Any]:
        return lambda gradient: gradient * weight.numel()

    model[0].weight.register_hook(make(model[0].weight))
    assert _found(model) == ["a variable of a function that is kept"]


def test_each_holder_of_several_is_found_once(model: Any) -> None:
    kept = [list(model.parameters()), {"w": model[0].weight}]
    assert sorted(_found(model)) == ["'w' in a dict of 1", "a list of 4"]
    del kept


# --- what may have it -----------------------------------------------------------------------------------------------


def test_the_model_and_its_optimizers_may(model: Any) -> None:
    groups: list[dict[str, Any]] = [{"params": [*part.parameters()], "lr": 0.1} for part in model]
    optimizer = AdamW(groups)
    del groups  # which has lists of its own
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert _found(model, optimizer) == []


def test_an_average_of_a_model_has_parameters_of_its_own(model: Any) -> None:
    average = AveragedModel(model)
    assert _found(model) == []
    del average


def test_frames_that_run_generators_and_iterators_pass_by_themselves(model: Any) -> None:
    weight = model[0].weight  # of this frame

    def each() -> Iterator[Any]:
        own = model[1].weight
        yield own

    generator, iterator = each(), iter(model[0]._parameters.values())
    next(generator), next(iterator)
    assert _found(model) == []
    del weight


def test_what_was_frozen_is_found_and_stays_frozen(model: Any) -> None:
    kept = Keeper([model[0].weight, 1])
    gc.collect()
    gc.freeze()
    assert _found(model) == [f"a list of 2, 'kept' in a {__name__}.Keeper"]
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        del kept
        assert _found(model) == []
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as all tests have it


def test_who_is_known_may(model: Any) -> None:
    kept = {"w": model[0].weight}
    assert _found(model, known=(kept,)) == []


def test_a_graph_that_is_still_there_keeps_a_parameter_out_of_sight(model: Any) -> None:
    loss = model(torch.ones(1, 2)).sum()
    assert _found(model) == []
    del loss


# --- lists from which groups were made ------------------------------------------------------------------------------


def _lists(model: nn.Module, *optimizers: Any) -> tuple[list[str], list[list[torch.Tensor]]]:
    gc.collect()
    found = holders_of(model, optimizers, list(model.parameters()), ())
    return [*found.strangers], [*found.lists]


def test_lists_from_which_groups_were_made_are_rewritten_with_these(model: Any) -> None:
    HERE.decay = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim == 1]
    optimizer = AdamW([{"params": HERE.decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    try:
        strangers, lists = _lists(model, optimizer)
        assert strangers == [] and {id(each) for each in lists} == {id(HERE.decay), id(rest)}
        old, new = model[1].bias, nn.Parameter(torch.zeros(1))
        replace_in([optimizer], lists, old, new)
        assert rest[1] is new and optimizer.param_groups[1]["params"][1] is new
        assert rest[0] is model[0].bias and [*map(id, HERE.decay)] == [id(model[0].weight), id(model[1].weight)]
    finally:
        del HERE.decay


def test_a_list_with_a_fellow_or_of_other_parameters_is_named(model: Any) -> None:
    """An object may have copies beside its list, which would be of the parameters before."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    average, some = Keeper(list(model.parameters())), list(model.parameters())[1:]
    strangers, lists = _lists(model, optimizer)
    assert sorted(strangers) == ["a list of 3", f"a list of 4, 'kept' in a {__name__}.Keeper"] and lists == []
    del average, some
    swapped = list(model.parameters())[::-1]
    assert _lists(model, optimizer) == (["a list of 4"], [])
    del swapped
    within = [list(model.parameters())]
    assert _lists(model, optimizer) == (["a list of 4"], [])
    del within


# --- put in the place of another ------------------------------------------------------------------------------------


def test_optimizers_train_another_parameter_with_the_state_of_the_old_one(model: Any) -> None:
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    old, new = model[0].weight, nn.Parameter(torch.zeros(3, 2))
    state, members = optimizer.state[old], optimizer.param_groups[0]["params"]
    replace_in([optimizer], (), old, new)
    assert optimizer.param_groups[0]["params"] is members
    assert members[0] is new
    assert len(members) == 4
    assert optimizer.state[new] is state
    assert old not in optimizer.state


def test_a_parameter_without_state_gets_none(model: Any) -> None:
    optimizer = AdamW(model.parameters(), lr=0.1)
    replace_in([optimizer], (), model[0].weight, nn.Parameter(torch.zeros(3, 2)))
    assert len(optimizer.state) == 0
