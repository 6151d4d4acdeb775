"""Worlds: who stays keeps the order and who comes follows, and where tensors lie on all of them meanwhile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.fsdp.plan import Degrees
from elastic_ext.fsdp.worlds import LayoutsBetween, Worlds
from tests.support.layouts import any_worlds, shapes, times_held


@pytest.mark.parametrize(
    ("old", "new", "ranks"),
    [
        ("ab", "abc", ((0, 1, None), (0, 1, 2))),
        ("abc", "ac", ((0, 1, 2), (0, None, 1))),
        ("abc", "bcd", ((0, 1, 2, None), (None, 0, 1, 2))),
        ("a", "a", ((0,), (0,))),
    ],
)
def test_ranks_of_two_worlds_by_the_processes_in_them(
    old: str, new: str, ranks: tuple[tuple[int | None, ...], tuple[int | None, ...]]
) -> None:
    worlds = Worlds.between(old, new, num_local=(len(old), len(new)))
    assert (worlds.old, worlds.new) == ranks
    assert worlds.is_same is (old == new)
    assert worlds.has_comers is bool({*new} - {*old})
    assert worlds.has_leavers is bool({*old} - {*new})
    assert [old[holder] for holder in worlds.survivors] == [each for each in old if each in new]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ab", "ba", r"the new world is \['b', 'a'\]; allowed: \['a', 'b'\], in which who stays keeps the order"),
        ("ab", "cab", r"the new world is \['c', 'a', 'b'\]; allowed: \['a', 'b', 'c'\]"),
        ("ab", "cd", "no rank of the old world stays"),
        ("aa", "a", "a process is named twice"),
    ],
)
def test_worlds_that_would_move_state_for_nothing_or_lose_it_are_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Worlds.between(old, new, num_local=(1, 1))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ((), (), "holders have 0 old and 0 new ranks"),
        ((0, 1), (0,), "holders have 2 old and 1 new ranks"),
        ((1, 0), (0, 1), "the old ranks are"),
        ((None, 0), (0, 1), "the old ranks are"),
        ((0, 1), (1, 0), "the new ranks are"),
        ((0, None), (0, None), "the new ranks are"),
        ((0, 1), (0, 2), "the new ranks are"),
        ((0, None), (None, 0), "no rank of the old world stays"),
    ],
)
def test_ranks_that_are_no_worlds_are_refused(
    old: tuple[int | None, ...], new: tuple[int | None, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Worlds(old, new, (1, 1))


def _degrees(draw: st.DataObject, num_ranks: int) -> Degrees:
    shard = draw.draw(st.sampled_from([each for each in range(1, num_ranks + 1) if num_ranks % each == 0]))
    return Degrees(num_ranks // shard, shard)


@given(any_worlds(), shapes.filter(bool), st.data())
def test_every_element_is_held_at_all_times_and_by_nobody_who_is_not_there(
    worlds: Worlds, shape: tuple[int, ...], data: st.DataObject
) -> None:
    layouts = LayoutsBetween(worlds, _degrees(data, worlds.num_old), _degrees(data, worlds.num_new))
    for laid in (layouts.of(shape), layouts.of_copies(shape), layouts.of_copies(shape, of_first=True)):
        for layout in (laid.old, laid.between, laid.new):
            assert len(layout.boxes) == len(worlds.old)
            assert math.prod(shape) == 0 or np.all(times_held(shape, layout.boxes) > 0)
        for holder, (old, new) in enumerate(zip(worlds.old, worlds.new, strict=True)):
            assert old is not None or (laid.old.boxes[holder].is_empty and laid.between.boxes[holder].is_empty)
            assert new is not None or (laid.between.boxes[holder].is_empty and laid.new.boxes[holder].is_empty)
        assert worlds.has_leavers or laid.between == laid.old
        assert worlds.has_comers or not worlds.has_leavers or laid.between == laid.new
