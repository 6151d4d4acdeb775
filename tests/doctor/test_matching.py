"""Rounds of pairs: everybody meets, nobody twice at once."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.doctor.pairs import MOST_NODES_IN_FULL, MOST_ROUNDS, matching

many = st.integers(min_value=2, max_value=2000)


@given(st.integers(min_value=2, max_value=MOST_NODES_IN_FULL))
def test_all_pairs_of_a_few_nodes_meet_once_in_the_fewest_rounds(num_nodes: int) -> None:
    rounds = matching(num_nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(num_nodes), 2))
    assert len(rounds) == num_nodes - 1 + num_nodes % 2


@given(many)
def test_no_node_is_in_two_pairs_of_a_round_and_one_at_most_is_in_none(num_nodes: int) -> None:
    for pairs in matching(num_nodes):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) >= num_nodes - 1
        assert all(0 <= first < second < num_nodes for first, second in pairs)


@given(many)
def test_no_pair_meets_twice(num_nodes: int) -> None:
    pairs = [pair for pairs in matching(num_nodes) for pair in pairs]
    assert len(pairs) == len(set(pairs))


@given(st.integers(min_value=MOST_NODES_IN_FULL + 1, max_value=2000))
def test_many_nodes_meet_a_bounded_number_of_others(num_nodes: int) -> None:
    assert len(matching(num_nodes)) == MOST_ROUNDS


@pytest.mark.parametrize("num_nodes", [33, 49, 64, 65, 97, 128, 256, 1000, 1024])
def test_nodes_that_meet_some_others_are_linked_to_all_by_way_of_these(num_nodes: int) -> None:
    met: dict[int, set[int]] = {}
    for first, second in (pair for pairs in matching(num_nodes) for pair in pairs if num_nodes - 1 not in pair):
        met.setdefault(first, set()).add(second)
        met.setdefault(second, set()).add(first)
    reached, left = set(), [0]
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += met[node]
    assert len(reached) == num_nodes - 1  # though the last one, which links rounds of any distance, is left out


def test_who_is_alone_meets_nobody() -> None:
    assert matching(0) == matching(1) == ()
