"""What a rank tells of the file it holds, whenever the watching thread replaces it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from elastic_ext.config.agreement import Agreement, JoinedAgreement
from elastic_ext.config.apply import NoSource
from elastic_ext.config.control_word import Purpose
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


# --- ranks that join ------------------------------------------------------------------------------------------------


class Given:
    """A source that holds what it was given last."""

    refusal = None
    newest: ElasticConfig | None = None


def joined_to(others: Agreement, source: Any = NoSource()) -> Agreement:  # noqa: B008
    """The agreement of a rank that has joined ``others``, by what they tell as JSON."""
    joiner = Agreement(Ranks.alone(), source, ElasticConfig(version=0), every=1)
    joiner.start()
    told = json.loads(json.dumps([asdict(others.place_to_join), others.tell_config()]))
    joiner.join(JoinedAgreement(**told[0]))
    joiner.join_config(told[1], leaves_out=())
    joiner.take_world(Ranks.alone().world)
    return joiner


@pytest.mark.parametrize("what", ["save", "copy"])
def test_what_was_asked_for_as_members_were_decided_on_is_told_to_those_who_join(what: str) -> None:
    """As where it was told by the pulse that ranks read when they meet to decide."""
    others = Agreement(Ranks.alone(), NoSource(), ElasticConfig(version=0), every=1)
    others.start()
    others.boundary(step=1)
    others.request_save() if what == "save" else others.request_copy()
    others.boundary(step=2)
    others.meet(Purpose.MEMBERS)
    joiner = joined_to(others)
    for each in (others, joiner):
        passed = each.boundary(step=3)
        assert (passed.save, passed.copy) == (what == "save", what == "copy"), each
        passed = each.boundary(step=4)
        assert not (passed.save or passed.copy)


def test_a_file_that_ranks_have_refused_is_no_news_from_a_rank_that_joins(caplog: pytest.LogCaptureFixture) -> None:
    source, same = Given(), Given()
    others = Agreement(Ranks.alone(), source, ElasticConfig(version=0), every=1)
    others.start()
    others.boundary(step=6)
    source.newest = ElasticConfig(version=3, apply_at_step=1)
    for step in range(7, 10):
        others.boundary(step=step)
    assert "apply_at_step 1 has passed" in caplog.text
    joiner = joined_to(others, same)
    same.newest = source.newest
    caplog.clear()
    for step in range(10, 14):
        joiner.boundary(step=step)
    assert not caplog.messages, "the refusal was told"
