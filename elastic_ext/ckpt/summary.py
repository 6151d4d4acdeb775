"""What is said of a checkpoint in a few words, from its COMMIT alone."""

from __future__ import annotations

from datetime import datetime, timezone

from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.records.text import counted, on_one_line

__all__ = ["age_of", "bytes_of", "layout_of"]


def bytes_of(commit: Commit) -> int:
    """What a checkpoint's files take, but for those that checkpoints share."""
    return sum(commit.sizes().values())


def age_of(commit: Commit, now: float) -> float:
    """Seconds since a checkpoint was saved, as the clocks say of the machine that did and of this one."""
    saved = datetime.fromisoformat(commit.saved_at)
    return now - (saved if saved.tzinfo else saved.replace(tzinfo=timezone.utc)).timestamp()


def layout_of(commit: Commit) -> str:
    """Over how many ranks it is spread, and how, where the run has said so."""
    sharding = commit.about.get("sharding")
    ranks = counted(commit.num_ranks, "rank")
    return f"{ranks}, {on_one_line(sharding)}" if isinstance(sharding, str) and sharding != "none" else ranks
