"""From which commit ranks go on once some of them are lost, and who takes what from whom. Pure.

Words: a *piece* is what one rank of a group of shards holds; with whole copies on every rank there is one piece, and
all hold it. A *commit* is the state that a step has left as it ended, told by how many had ended. Each rank that is
left says which pieces it holds, as of which commits: those that it trains with, and copies of its own or of others. The
same is decided from the same words on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.records.json import JsonRecord

__all__ = ["HeldPiece", "Salvage", "SurvivorWords", "salvage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPiece(JsonRecord):
    """A piece of the training state that a rank holds, as of a commit."""

    end: int
    """How many steps had ended, whether or not optimizers have stepped in each."""
    piece: int
    """Which of the pieces it is, by number."""
    is_live: bool
    """Whether this is what the rank trains with, and not a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivorWords(JsonRecord):
    """What one rank that is left tells the others about itself once some are lost."""

    seat: int
    pieces: tuple[HeldPiece, ...]
    """What it holds; nothing where its step was broken off between two optimizers, and no copy was kept."""
    config: tuple[int, int]
    """The version and the revision of the config in force."""
    num_met: int
    """How often the rank has met all others between two steps, as at the ends of epochs."""
    is_entering: bool = False
    """Whether the loop is about to do its work on a batch that was cut for the ranks of before."""
    own: str = ""
    """A digest of the state that may differ between the ranks."""
    owes_save: bool = False
    """Whether a checkpoint was due, or being saved, that will not be made."""
    is_like: str = ""
    """A digest of what must be the same on all ranks, such as the names of tensors."""
    why_not: str = ""
    """Why this rank cannot go on without those who are lost, a sentence; empty where it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """The commit from which all ranks go on, and who has it; or why they cannot."""

    end: int = 0
    """How many steps had ended by the commit."""
    leader: int = 0
    """The rank, among those that are left, whose state besides tensors all take over: the one furthest on of the ranks
    that train with the commit."""
    holders: Mapping[int, tuple[int, ...]]
    """By piece, the ranks among those that are left that hold it as of the commit, those first that train with it."""
    behind: tuple[int, ...] = ()
    """The ranks that train with another commit, or with none that is whole, and take this one."""
    why_not: str = ""
    """Why ranks cannot go on, a sentence; empty where they can."""


def salvage(rows: Sequence[SurvivorWords], *, num_pieces: int) -> Salvage:
    """The newest commit of which every piece is held by some rank, by the words of all that are left, in rank order.

    A step that any of them has ended stands, where all pieces as of its end are held, since another rank may have acted
    on it: so no rank goes back behind a step that all of them have ended.
    """
    if reasons := {row.why_not: row.seat for row in rows if row.why_not}:
        why, seat = next(iter(reasons.items()))
        return _none(f"{why} (seat {seat})")
    if len({row.is_like for row in rows}) > 1:
        return _none("the ranks that are left train different tensors")
    ends = sorted({piece.end for row in rows for piece in row.pieces}, reverse=True)
    missing: Mapping[int, list[int]] = {}
    for end in ends:
        holders = {piece: _holders(rows, end, piece) for piece in range(num_pieces)}
        lost = [piece for piece, ranks in holders.items() if not ranks]
        if not lost:
            live = [rank for rank, row in enumerate(rows) if _trains_with(row, end)]
            leaders = live or [rank for ranks in holders.values() for rank in ranks]
            leader = max(leaders, key=lambda rank: (*_progress(rows[rank]), -rank))
            behind = tuple(rank for rank in range(len(rows)) if rank not in live)
            return Salvage(end=end, leader=leader, holders=holders, behind=behind)
        missing = {**missing, end: lost}
    if not missing:
        return _none("no rank that is left holds a whole step")
    newest = max(missing)
    which = ", ".join(map(str, missing[newest]))
    return _none(
        f"nobody that is left holds piece {which} of {num_pieces} as of the end of step {newest}, or of one before it"
    )


def _progress(row: SurvivorWords) -> tuple[int, tuple[int, int]]:
    """How far a rank has come since the step that it has ended."""
    return row.num_met, row.config


def _holders(rows: Sequence[SurvivorWords], end: int, piece: int) -> tuple[int, ...]:
    """The ranks that hold a piece as of a commit, those first that train with it."""
    held = [
        (not each.is_live, rank)
        for rank, row in enumerate(rows)
        for each in row.pieces
        if (each.end, each.piece) == (end, piece)
    ]
    return tuple(dict.fromkeys(rank for _, rank in sorted(held)))


def _trains_with(row: SurvivorWords, end: int) -> bool:
    return any(each.is_live and each.end == end for each in row.pieces)


def _none(why: str) -> Salvage:
    return Salvage(holders={}, why_not=why)
