"""Change: whether what a search has found still holds, or the search has to begin again, and why. Pure.

Two things are compared: steps with those before them, and facts of a job with those that a search was made for.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ext.profile.changing import ChangeDetector, PaceChange
from elastic_ext.records.metrics import JobFacts

from .seen import Seen

__all__ = ["LEAST_GAIN", "PaceWatch", "changed_facts"]

LEAST_GAIN = 0.05
"""What a change has to bring where a search has ended before: less is not worth beginning again."""
_NUM_NAMED = 240
"""Windows for which somebody who was slow is remembered: a pace is told after the rank that caused it."""


class PaceWatch:
    """Steps at the point that was settled on, window by window."""

    def __init__(self) -> None:
        self._detector = ChangeDetector(least_seconds=0.0)  # a window has many steps where they are short
        self._slow_rank = ""
        self._num_since = 0

    def see(self, seen: Seen) -> PaceChange | None:
        """Gives a change of pace at the window that shows it."""
        self._num_since += 1
        if seen.slow_rank:
            self._slow_rank, self._num_since = seen.slow_rank, 0
        return self._detector.see(seen.step, seen.step_seconds, (seen.version, seen.revision))

    def why(self, change: PaceChange) -> str:
        """What people are told of a change: who keeps the others waiting comes first."""
        if self._slow_rank and self._num_since <= _NUM_NAMED and change.ratio > 1:
            return f"{self._slow_rank}: {change.text}"
        return change.text


def changed_facts(before: JobFacts, now: JobFacts) -> str:
    """What makes another job of it, for which there has to be another search: a sentence; empty where nothing does."""
    if now.world_size != before.world_size:
        return f"{now.world_size} ranks train instead of {before.world_size}"
    if now.restart != before.restart:
        return "the job's processes were started again"
    if now.num_local != before.num_local or now.device != before.device:
        ranks = f"{now.num_local} ranks with {now.device} to a machine"
        return f"the job has {ranks}, before {before.num_local} with {before.device}"
    if now.global_batch != before.global_batch:
        return f"a step has {now.global_batch:,} samples instead of {before.global_batch:,}"
    if now.share != before.share or now.num_replicas != before.num_replicas:
        return f"a rank has {now.share:,} samples of a step instead of {before.share:,}"
    if _plain(now.choices) != _plain(before.choices) or dict(now.fixed) != dict(before.fixed):
        return "what the job can change while it trains is not what it was"
    return ""


def _plain(choices: Mapping[str, object]) -> dict[str, list[object]]:
    return {key: list(each) if isinstance(each, (list, tuple)) else [each] for key, each in choices.items()}
