"""The control word and its pulse: a sum that is as it should be means that nobody differs and nobody has news."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.config.control_word import ControlWord, GatheredWords, Purpose
from tests.support.configs import unhurried

counts = st.integers(0, 2**53)
words = st.builds(
    ControlWord,
    purpose=st.sampled_from(Purpose),
    boundary=counts,
    step=counts,
    backwards=counts,
    schedules=counts,
    exchanges=counts,
    lost=counts,
    in_force=st.text("0123456789abcdef", min_size=8, max_size=8),
    held_version=counts,
    fresh=st.booleans(),
    proposing=st.booleans(),
    asks_for_lag=st.booleans(),
    stop=st.booleans(),
    save=st.booleans(),
    pacing=st.booleans(),
    wanted_interval=st.integers(1, 1000),
    refusal=st.text(st.characters(codec="utf-8"), max_size=20),
)
SAME = {
    "purpose": "what they do",
    "boundary": "boundaries",
    "step": "steps",
    "backwards": "backward passes",
    "schedules": "steps of schedules",
    "exchanges": "collectives of the model",
    "lost": "micro-batches of a step that failed",
    "in_force": "the config in force",
}
FLAGS = ("fresh", "proposing", "asks_for_lag", "stop", "save")
PLAIN = ControlWord(
    purpose=Purpose.ROUTINE,
    boundary=3,
    step=40,
    backwards=160,
    schedules=39,
    exchanges=5,
    lost=2,
    in_force="12345abc",
    held_version=7,
    wanted_interval=10,
)


def agreed(ranks: list[ControlWord]) -> GatheredWords:
    return GatheredWords(words=tuple(ControlWord.from_bytes(word.to_bytes()) for word in ranks))


@unhurried
@given(st.lists(words, min_size=1, max_size=6))
def test_the_words_together_say_what_holds_for_all_ranks(ranks: list[ControlWord]) -> None:
    word = agreed(ranks)
    assert word.differing == tuple(
        words for name, words in SAME.items() if len({getattr(rank, name) for rank in ranks}) > 1
    )
    assert word.lowest_held == min(rank.held_version for rank in ranks)
    assert word.highest_held == max(rank.held_version for rank in ranks)
    assert word.interval == max(rank.wanted_interval for rank in ranks)
    for name in FLAGS:
        assert getattr(word, name) is any(getattr(rank, name) for rank in ranks)


@unhurried
@given(st.lists(words, min_size=1, max_size=6), st.randoms())
def test_the_order_of_ranks_makes_no_difference(ranks: list[ControlWord], random: object) -> None:
    shuffled = list(ranks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = agreed(shuffled), agreed(ranks)
    assert (one.differing, one.interval, one.lowest_held) == (other.differing, other.interval, other.lowest_held)


@unhurried
@given(words)
def test_a_word_comes_back_from_its_bytes(word: ControlWord) -> None:
    assert ControlWord.from_bytes(word.to_bytes()) == word


@unhurried
@given(st.lists(words, min_size=1, max_size=6))
def test_every_rank_learns_from_the_sum_of_the_pulses_whether_anyone_differs_or_has_news(
    ranks: list[ControlWord],
) -> None:
    total = sum(word.pulse for word in ranks)
    need = [word.has_news or total != len(ranks) * word.pulse for word in ranks]
    anyone = any(word.has_news for word in ranks) or bool(agreed(ranks).differing)
    assert need == [anyone] * len(ranks)


@unhurried
@given(words)
def test_the_pulses_of_thirty_thousand_ranks_add_up_within_64_bits(word: ControlWord) -> None:
    assert 0 <= word.pulse * 2**15 < 2**63


def test_a_refusal_of_any_length_travels_cut() -> None:
    long = dataclasses.replace(PLAIN, refusal="x" * 10_000)
    assert len(ControlWord.from_bytes(long.to_bytes()).refusal) == 500


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("difference", [1, -1])
def test_one_rank_that_differs_in_one_field_is_found(name: str, difference: int) -> None:
    values: dict[str, Any] = {"purpose": Purpose.APPLY, "in_force": f"other{difference}"}
    value = values[name] if name in values else getattr(PLAIN, name) + difference
    change: dict[str, Any] = {name: value}
    other = dataclasses.replace(PLAIN, **change)
    found = agreed([PLAIN, PLAIN, other, PLAIN])
    assert found.differing == (SAME[name],)
    told = [text.partition(": ")[2] for text in found.account.split("; ")]
    assert [text == told[0] for text in told] == [True, True, False, True], "what differs is shown"
    assert agreed([PLAIN, PLAIN]).differing == ()


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_one_rank_reaches_all_and_raises_no_other(name: str) -> None:
    raised: dict[str, Any] = {name: True}
    word = agreed([PLAIN, dataclasses.replace(PLAIN, **raised)])
    assert [flag for flag in FLAGS if getattr(word, flag)] == [name]


def test_ranks_may_hold_unlike_versions_without_having_come_apart() -> None:
    word = agreed([PLAIN, dataclasses.replace(PLAIN, held_version=9)])
    assert (word.differing, word.lowest_held, word.highest_held) == ((), 7, 9)
