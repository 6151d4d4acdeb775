"""The benchmark of what is told of memory: what its tables claim, and that it tells the truth of a small model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory_kinds import KINDS
from benchmarks.model_memory import ErrorTable, Point, points_of, table_of


def table(*errors: float, most_error: float = 0.1) -> ErrorTable:
    points = [
        Point(size=2**at, true_bytes=1 << 20, worked_out=0.5, compared=error, straight=-0.3, by_phase=0.01)
        for at, error in enumerate(errors)
    ]
    return ErrorTable(heading="**A table**", points=points, most_error=most_error)


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [((0.0, 0.099), "pass"), ((0.0, 0.101), "fail"), ((-0.059,), "pass"), ((-0.061, 0.0), "fail")],
)
def test_a_claim_holds_where_no_size_is_told_wrong_or_too_low(errors: tuple[float, ...], verdict: str) -> None:
    assert table(*errors).verdicts == (verdict,)


def test_the_worst_of_each_column_stands_below() -> None:
    last = table(0.01, -0.02, 0.015).table_lines()[-1]
    assert [each.strip() for each in last.split("|")[3:-1]] == ["+50.00%", "-2.00%", "-30.00%", "+1.00%"]


@pytest.mark.slow
def test_what_is_told_of_plain_layers_is_true() -> None:
    (kind,) = [each for each in KINDS if each.name == "MLP"]
    torch.manual_seed(0)
    points = points_of(kind, torch.device("cpu"), sizes=(2, 4, 8))
    assert table_of(kind, points, torch.device("cpu")).verdicts == ("pass",)
    assert max(abs(point.worked_out) for point in points) < 0.01
