"""From which commit ranks go on once some are lost: every loss of up to two of five ranks, at every point of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from elastic_ext.members.salvage import HeldPiece, SurvivorWords, salvage

NUM_RANKS = 5
LOSSES = [lost for number in (1, 2) for lost in itertools.combinations(range(NUM_RANKS), number)]


def end_of(row: SurvivorWords) -> int:
    """How many steps a rank has ended, by what it trains with."""
    return next(piece.end for piece in row.pieces if piece.is_live)


def left(seat: int, step: int, *pieces: tuple[int, int], live: int | None = 0, **more: object) -> SurvivorWords:
    """A rank that has ended so many steps, trains with piece ``live``, and has copies (step, piece)."""
    held = [HeldPiece(end=at, piece=piece, is_live=False) for at, piece in pieces]
    if live is not None:
        held.insert(0, HeldPiece(end=step, piece=live, is_live=True))
    values: dict[str, object] = {"config": (1, 0), "num_met": 0, **more}
    return SurvivorWords(seat=seat, pieces=tuple(held), **values)  # type: ignore[arg-type]


def steps_of_ranks() -> Iterator[tuple[int, ...]]:
    """How many steps each rank has committed as others are lost: some may have stepped that others have not."""
    return itertools.product((7, 8), repeat=NUM_RANKS)


@pytest.mark.parametrize("lost", LOSSES)
def test_of_whole_copies_the_newest_that_is_left_counts_and_all_others_take_it(lost: tuple[int, ...]) -> None:
    for steps in steps_of_ranks():
        rows = [left(seat, step) for seat, step in enumerate(steps) if seat not in lost]
        found = salvage(rows, num_pieces=1)
        newest = max(map(end_of, rows))
        assert found.end == newest and not found.why_not
        assert end_of(rows[found.leader]) == newest and found.leader not in found.behind
        assert [end_of(rows[rank]) < newest for rank in range(len(rows))] == [
            rank in found.behind for rank in range(len(rows))
        ]
        assert found.holders[0] == tuple(rank for rank, row in enumerate(rows) if end_of(row) == newest)


@pytest.mark.parametrize("lost", LOSSES)
def test_of_parts_the_newest_commit_counts_of_which_each_part_is_held_by_itself_or_as_a_copy(
    lost: tuple[int, ...],
) -> None:
    """Each rank keeps its part, and that of the rank before it, as of the last two commits that it has made."""
    for steps in steps_of_ranks():
        rows = []
        for rank in (each for each in range(NUM_RANKS) if each not in lost):
            before = (rank - 1) % NUM_RANKS
            own = [(step, rank) for step in (steps[rank] - 1, steps[rank])]
            of_other = [(step, before) for step in (steps[before] - 1, steps[before])]
            rows.append(left(rank, steps[rank], *own, *of_other, live=rank))
        found = salvage(rows, num_pieces=NUM_RANKS)
        held = [{(piece.end, piece.piece) for piece in row.pieces} for row in rows]
        possible = [
            step
            for step in range(5, 9)
            if all(any((step, piece) in each for each in held) for piece in range(NUM_RANKS))
        ]
        are_neighbours = len(lost) == 2 and (lost[1] - lost[0]) in (1, NUM_RANKS - 1)
        if are_neighbours:
            assert not possible and found.why_not.startswith("nobody that is left holds piece")
            continue
        assert found.end == max(possible) >= min(steps), "no commit that all had made is lost"
        for piece, ranks in found.holders.items():
            assert ranks and all((found.end, piece) in held[rank] for rank in ranks)
        assert {rank for rank, row in enumerate(rows) if end_of(row) != found.end} == {*found.behind}


def test_who_trains_with_a_piece_is_named_before_who_has_a_copy() -> None:
    rows = [left(0, 3, (3, 1), live=0), left(1, 3, live=1)]
    assert salvage(rows, num_pieces=2).holders == {0: (0,), 1: (1, 0)}


def test_whose_step_is_torn_holds_nothing_and_takes_all_from_others() -> None:
    rows = [left(0, 4, live=None), left(1, 4)]
    found = salvage(rows, num_pieces=1)
    assert (found.end, found.leader, found.behind) == (4, 1, (0,))
    torn: Sequence[SurvivorWords] = [left(0, 4, live=None), left(1, 4, live=None)]
    assert salvage(torn, num_pieces=1).why_not == "no rank that is left holds a whole step"


@pytest.mark.parametrize("name", ["num_met", "config"])
def test_of_those_with_the_commit_that_leads_which_has_come_furthest(name: str) -> None:
    further: dict[str, Any] = {name: (2, 0) if name == "config" else 9}
    rows = [left(0, 4), left(1, 4, **further), left(2, 3, **further)]
    assert salvage(rows, num_pieces=1).leader == 1
    assert salvage(rows[:1] * 2, num_pieces=1).leader == 0


def test_one_rank_that_cannot_go_on_keeps_all_from_it_and_says_why() -> None:
    rows = [left(0, 4), left(1, 4, why_not="the script has made a process group")]
    assert salvage(rows, num_pieces=1).why_not == "the script has made a process group (seat 1)"
    unlike = [left(0, 4, is_like="a"), left(1, 4, is_like="b")]
    assert "different tensors" in salvage(unlike, num_pieces=1).why_not
