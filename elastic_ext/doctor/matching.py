"""Who checks whom: rounds of disjoint pairs, so that in each round all nodes but at most one are busy at once. Pure."""

from __future__ import annotations

__all__ = ["MOST_NODES_IN_FULL", "MOST_ROUNDS", "matching"]

MOST_NODES_IN_FULL = 32
"""Up to so many nodes every pair meets."""
MOST_ROUNDS = 16
"""Of more nodes each meets so many others."""


def matching(num_nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Rounds of pairs (lower, higher): no node twice in a round, no pair in two rounds.

    All pairs of up to 32 nodes, in N - 1 rounds, or N where N is odd. Of more nodes a sample of these rounds, the same
    whoever asks; not equally far apart, or nodes would fall into parts that never meet.
    """
    if num_nodes < 2:
        return ()
    seats = num_nodes + num_nodes % 2  # whoever is paired with the seat that is empty has nothing to do in that round
    turning = seats - 1
    if num_nodes <= MOST_NODES_IN_FULL:
        chosen = list(range(turning))
    else:
        spacing = turning // MOST_ROUNDS
        chosen = [number * spacing + number * number % spacing for number in range(MOST_ROUNDS)]
    return tuple(tuple(pair for pair in _round(number, turning) if pair[1] < num_nodes) for number in chosen)


def _round(number: int, turning: int) -> list[tuple[int, int]]:
    """One seat stays, the others go around it and are paired across the circle."""
    pairs = [(number, turning)]
    for step in range(1, (turning + 1) // 2):
        one, other = (number + step) % turning, (number - step) % turning
        pairs.append((min(one, other), max(one, other)))
    return sorted(pairs)
