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
    whoever asks. Seats are shuffled and rounds not equally far apart for it, or nodes would fall into parts that
    never meet, as would those that stand beside each other.
    """
    if num_nodes < 2:
        return ()
    seats = num_nodes + num_nodes % 2  # whoever is paired with the seat that is empty has nothing to do in that round
    turning = seats - 1
    if num_nodes <= MOST_NODES_IN_FULL:
        return tuple(
            tuple(pair for pair in _round(number, turning) if pair[1] < num_nodes) for number in range(turning)
        )
    node_at = _shuffled(num_nodes)
    spacing = turning // MOST_ROUNDS
    found = []
    for number in range(MOST_ROUNDS):
        pairs = (pair for pair in _round(number * spacing + number * number % spacing, turning) if pair[1] < num_nodes)
        nodes = ((node_at[one], node_at[other]) for one, other in pairs)
        found.append(tuple(sorted((min(pair), max(pair)) for pair in nodes)))
    return tuple(found)


def _shuffled(num: int) -> list[int]:
    """Numbers below ``num`` in an order without any; the same wherever it is asked for, by whichever Python."""
    found, state = list(range(num)), 1
    for place in range(num - 1, 0, -1):
        state = (state * 1103515245 + 12345) % 2**31
        other = (state >> 8) % (place + 1)
        found[place], found[other] = found[other], found[place]
    return found


def _round(number: int, turning: int) -> list[tuple[int, int]]:
    """One seat stays, the others go around it and are paired across the circle."""
    pairs = [(number, turning)]
    for step in range(1, (turning + 1) // 2):
        one, other = (number + step) % turning, (number - step) % turning
        pairs.append((min(one, other), max(one, other)))
    return sorted(pairs)
