"""The sentences of the tuner, for people who know what they train and not how a tuner works."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ext.tuner.explain import change_in_words, why_try
from elastic_ext.tuner.measurements import PointMeasurement
from elastic_ext.tuner.search import PointProposal
from elastic_ext.tuner.space import Point


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (
            {"batch_size": 8, "num_workers": 2},
            {"batch_size": 2, "num_workers": 0},
            "micro-batch 8 instead of 2, 2 workers instead of 0",
        ),
        ({"bucket_cap_mb": 1.0}, {"bucket_cap_mb": "torch"}, "1 MiB per DDP bucket instead of torch's default"),
        ({"prefetch": "torch"}, {"prefetch": 2}, "torch's default instead of 2 units prefetched"),
        ({"pin_memory": True}, {}, "pinned memory on instead of the default"),
        ({}, {"strategy": "full_shard"}, "the default instead of strategy full_shard"),
    ],
)
def test_a_change_names_what_is_left_to_torch_or_to_the_library(
    new: dict[str, Any], old: dict[str, Any], words: str
) -> None:
    assert change_in_words(Point(**new), Point(**old)) == words


def test_a_try_that_is_not_expected_to_be_faster_says_what_is_possible() -> None:
    here, other = Point(num_workers=0), Point(num_workers=2)
    best = PointMeasurement(point=here, seconds=1.0, spread=0.01, num_steps=3, num_reports=3, phases={})
    proposal = PointProposal(point=other, seconds=2.0, least_seconds=0.5, most_seconds=3.0)
    rates = "50.0 samples/s predicted (200 if all goes well), 100"
    assert why_try(proposal, best, here, 100) == f"2 workers instead of 0: {rates} now"
    elsewhere = why_try(proposal, best, Point(num_workers=4), 100)
    assert elsewhere == f"2 workers instead of 4: {rates} with the best config so far"
