"""What default_collate has made of samples can be cut and joined as if it had been made so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from elastic_ext.data.batch_plan import BatchPlan
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.data.order import SequentialOrder
from elastic_ext.data.prefetch import BatchNotReady, IndexedLoop, cut, join
from tests.support.loading import changed


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def sample(kind: int, number: int) -> Any:
    image = torch.full((2, 3), float(number))
    return [
        image,
        number,
        number / 2,
        f"text {number}",
        (image, number),
        [f"text {number}", b"bytes"],
        {"image": image, "more": {"name": f"name {number}", "at": (number, np.float32(number))}},
        Pair(image, number),
        np.full(3, number),
        torch.tensor(number),
    ][kind]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


@given(kind=st.integers(0, 9), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_any_samples_in_a_row_are_as_if_they_were_collated(kind: int, sizes: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    parts, first = [], 0
    for size in sizes:
        made = default_collate([sample(kind, number) for number in range(first, first + size)])
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            parts.append(cut(made, low, high, size))
        first += size
    assert same(join(parts), default_collate([sample(kind, number) for number in range(start, stop)]))


@pytest.mark.parametrize("batch", [3, "text", object(), [object()], torch.tensor(1), torch.zeros(5), ["a", "b"]])
def test_what_is_no_such_batch_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be cut|is no batch of 4|are no batch of 4"):
        cut(batch, 0, 1, 4)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.zeros(2), [torch.zeros(2)]],
        [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}],
        [[torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]],
    ],
)
def test_what_is_not_alike_is_not_joined(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        join(batches)


class Price:
    """A type of a user's own."""

    def __init__(self, value: float) -> None:
        self.value = value


class Prices:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Price:
        return Price(index + 1.0)


def shares_of(samples: list[Price], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Each one's of the sum of its batch: another batch has others."""
    values = torch.tensor([sample.value for sample in samples])
    return values / values.sum()


def test_batches_of_a_type_that_default_collate_was_taught_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Price, shares_of)
    loader = ElasticDataLoader(Prices(), 8, num_workers=1)
    batches = iter(loader)
    next(batches)
    changed(loader, batch_size=4)
    assert [batch.sum().item() for batch in batches] == pytest.approx([1.0] * 4)


class LateMaker:
    """Makes no batch of more than two samples, and each other one only when it is taken for the second time."""

    num_ahead = 1

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []
        self.kept: set[int] = set()
        self.late: set[int] = set()

    def submit(self, indices: list[int], *, batch_index: int) -> int:
        self.submitted.append(indices)
        self.kept.add(number := len(self.submitted) - 1)
        return number

    def take(self, number: int) -> torch.Tensor:
        indices = self.submitted[number]
        if len(indices) <= 2 and number not in self.late:
            self.late.add(number)
            raise BatchNotReady("it is still being made")
        self.kept.remove(number)
        if len(indices) > 2:
            raise ValueError("one of the samples cannot be made")
        return torch.tensor(indices)

    def first_made(self, numbers: Sequence[int]) -> int:
        return numbers[0]

    def forget(self, number: int) -> None:
        self.kept.remove(number)


def test_a_batch_made_again_that_is_late_is_asked_for_once_and_comes_later() -> None:
    maker = LateMaker()
    large, small = (BatchPlan(global_batch=size, num_ranks=1, micro_batch=size) for size in (4, 2))
    loop = IndexedLoop(SequentialOrder(4), 0, maker, large, 0, can_recut=True)
    loop.plan(small, 0)
    for samples in ([0, 1], [2, 3]):
        with pytest.raises(BatchNotReady):
            next(loop)
        assert next(loop).tolist() == samples
        loop.commit()
    assert maker.submitted == [[0, 1, 2, 3], [0, 1], [2, 3]] and not maker.kept
    with pytest.raises(StopIteration):
        next(loop)
