"""What a rank tells of the file it holds, whenever the watching thread replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic_ext.config.agreement import Agreement
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.ranks.group import Ranks


class Arriving:
    """A source whose config arrives at its n-th reading, as a watcher's may at any time."""

    refusal = None

    def __init__(self, at_reading: int) -> None:
        self._left = at_reading
        self._config = ElasticConfig(version=1)
        self.tell: Callable[[], object] = lambda: None

    @property
    def newest(self) -> ElasticConfig | None:
        self._left -= 1
        if self._left == -1:
            self.tell()
        return self._config if self._left < 0 else None


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("reading", range(12))
def test_a_config_is_taken_though_boundaries_are_quiet(reading: int, every: int) -> None:
    source = Arriving(reading)
    agreement = Agreement(Ranks.alone(), source, ElasticConfig(version=0), every=every)
    source.tell = agreement.rouse
    agreement.start()
    num_quiet = 0
    for step in range(1, 40):
        if agreement.pass_quietly(float(step), step, 0):
            num_quiet += 1
            source.newest  # noqa: B018 as time goes by it arrives
        else:
            agreement.boundary(step=step)
    assert agreement.config.version == 1
    assert num_quiet > 10


@pytest.mark.parametrize(
    ("ask", "seen"),
    [
        (lambda agreement: agreement.request_stop(), lambda passed: passed.stop),
        (lambda agreement: agreement.request_save(), lambda passed: passed.save),
        (lambda agreement: agreement.propose({"user.a": 1}, "a test"), lambda passed: passed.applied),
    ],
    ids=["stop", "save", "revision"],
)
def test_who_asks_is_heard_at_the_next_boundaries(ask: Any, seen: Any) -> None:
    agreement = Agreement(Ranks.alone(), Arriving(10**6), ElasticConfig(version=0), every=1)
    agreement.start()
    agreement.boundary(step=1)
    assert agreement.pass_quietly(0.0, 2, 0)
    ask(agreement)
    passed = [agreement.boundary(step=step) for step in range(3, 9) if not agreement.pass_quietly(0.0, step, 0)]
    assert any(map(seen, passed))
    assert agreement.pass_quietly(0.0, 9, 0)


@pytest.mark.parametrize("reading", range(12))
def test_a_config_is_taken_whichever_reading_it_arrives_at(reading: int) -> None:
    agreement = Agreement(Ranks.alone(), Arriving(reading), ElasticConfig(version=0), every=1)
    agreement.start()
    for step in range(1, 20):
        agreement.boundary(step=step)
    assert agreement.config.version == 1
