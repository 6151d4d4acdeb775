"""The records of the run directory, as a reader in another process finds them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import JobEvent, RankMetrics

METRICS = RankMetrics(
    time=1.5,
    job="größe\n",
    generation=2,
    rank=3,
    world_size=4,
    host="node",
    pid=77,
    step=1000,
    config_version=7,
    config_revision=2,
    agree_every_steps=10,
    measures=Measures(samples_per_second=1.5, memory_bytes=2**40),
)
EVENT = JobEvent(
    time=1.5, generation=2, rank=3, step=1000, kind="config-applied", text="two\nlines \u2028", details={"a": (1, None)}
)


def test_metrics_read_back_as_they_were_written() -> None:
    assert RankMetrics.from_json(METRICS.to_json()) == METRICS
    assert JobEvent.from_json(EVENT.to_json()) == dataclasses.replace(EVENT, details={"a": [1, None]})


def test_an_event_is_one_line_whatever_its_text() -> None:
    text = EVENT.to_json()
    assert len(text.splitlines()) == 1
    assert json.loads(text)["text"] == EVENT.text
    assert json.loads(text)["details"] == {"a": [1, None]}


@pytest.mark.parametrize("record", [METRICS, EVENT])
def test_records_are_frozen(record: RankMetrics | JobEvent) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 0  # type: ignore[misc]
