"""What schedulers and scripts keep goes through JSON and comes back as it was."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, lr_scheduler

from elastic_ext.plain import from_plain, to_plain

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def there_and_back(value: Any, own: Any = None) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value, "it"), allow_nan=False)), own)


@given(values)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize("name", ["(tuple)", "(float)", "(pairs)", "(counts)", "(tensor)", "(function)"])
def test_a_key_that_looks_like_a_mark_is_a_key(name: str) -> None:
    assert there_and_back({name: [1, 2]}) == {name: [1, 2]}


def test_counts_infinities_and_numbers_of_numpy_come_back() -> None:
    counts = there_and_back(Counter({3: 1, 7: 2}))
    assert type(counts) is Counter
    assert counts == {3: 1, 7: 2}
    assert there_and_back(-math.inf) == -math.inf
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back(numpy.float64(0.1)) == 0.1
    assert there_and_back(numpy.int32(3)) == 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_small_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in ((), (0, 4), (2, 3)):
        tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
        back = there_and_back(tensor)
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_functions_are_those_of_whoever_takes_the_values_back() -> None:
    def own(step: int) -> float:
        return 0.5

    assert there_and_back({"at": [max], "n": 1}, {"at": [own]}) == {"at": [own], "n": 1}


class _Strange:
    """Neither a value nor a function."""


@pytest.mark.parametrize("value", [_Strange(), {1, 2}, b"x", 1j, torch.zeros(2, dtype=torch.complex64)])
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("state['a'][1] is a")):
        to_plain({"a": [0, value]}, "state")


def test_a_large_tensor_is_not_kept_as_text() -> None:
    with pytest.raises(TypeError, match="register_state"):
        to_plain(torch.zeros(100_000), "extra")


def _schedulers(optimizer: SGD) -> list[Any]:
    return [
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]),
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
        lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)],
            milestones=[3],
        ),
        lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]),
        lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    ]


@pytest.mark.parametrize("which", range(9))
def test_every_schedulers_state_goes_through_json(which: int) -> None:
    def made() -> tuple[SGD, Any]:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2, momentum=0.9)
        return optimizer, _schedulers(optimizer)[which]

    def advance(optimizer: SGD, scheduler: Any, num_steps: int) -> list[float]:
        rates = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler = made()
    advance(optimizer, scheduler, 4)
    state, groups = scheduler.state_dict(), optimizer.state_dict()
    later_optimizer, later = made()
    later_optimizer.load_state_dict(groups)
    later.load_state_dict(there_and_back(state, later.state_dict()))
    assert advance(later_optimizer, later, 5) == advance(optimizer, scheduler, 5)
