"""What a worker says of itself as a member of its job, in its node's run directory, for the node's agent.

The file has one writer, the worker, and its agent reads it: whether members can come and go while this worker trains,
by which membership plan it trains, and what became of the newest plan that it was told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .json import JsonRecord

__all__ = ["MemberRecord", "member_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRecord(JsonRecord):
    """A worker as a member of its job."""

    seat: int
    pid: int
    time: float
    """When the record was written, seconds since 1970."""
    why_restart: str
    """Why members of this job can change by a restart alone, a sentence; empty where they can change live."""
    version: int
    """The version of the membership plan by which this worker trains; 0 where it knows of none."""
    why_restart_at_loss: str | None = None
    """Why all workers are started anew where one of them is lost, a sentence; empty where the others go on, and None
    where that is not known."""
    ready: int = 0
    """The version of the plan that this worker, which joins, is ready to join; 0 for all others."""
    agreed: int = 0
    """The version of the newest plan that the ranks have agreed on: they come to it as their next step begins."""
    refused: int = 0
    """The version of the newest plan that the ranks have refused; 0 where they have refused none."""
    why_refused: str = ""
    """Why they have refused it, a sentence that names the rank."""
    rank_multiple: int = 1
    """Of what the number of ranks has to be a multiple, as the model is sharded now; 1 where any number is allowed."""
    refused_seats: tuple[int, ...] = ()
    """The seats of those workers that were to join for whose sake they have refused it; none where it is not theirs."""


def member_file(run_dir: Path, seat: int) -> Path:
    """The file of the record of the worker with a seat."""
    return run_dir / f"member-{seat}.json"
