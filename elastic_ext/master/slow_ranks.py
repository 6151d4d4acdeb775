"""Which ranks keep the others waiting, by what all nodes tell in their beats: pure, one round after another.

It judges as profile/stragglers.py does, by what each rank is busy with by itself in a step, and in a few numbers for
each rank: jobs may have tens of thousands. A *round* is the newest report of every node.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.profile.stragglers import Straggler

from .reported import NodeReport

__all__ = ["SlowRanks"]

_SLOW = 1.2  # times as long as is usual
_ROUNDS_IN_A_ROW = 3
_CALM_ROUNDS = 6  # in which it is not slow, before a rank that was named is named no more
_LEAST_BEFORE = 3
_BEFORE_SECONDS = 60  # between rounds that count in what a rank took before
_OF_THE_NEWEST = 0.1  # ... and how much the newest does
_MOST_COMPARED = 2047  # ranks that tell what is usual; odd, as what differs within nodes comes in twos and eights
_OF_A_NORMAL_DISTRIBUTION = 1.4826  # the standard deviation, over the median distance from the median
_FAR = 3.0
_MOST_NAMED = 64


@dataclass(slots=True)
class _Node:
    """What is kept of a node's ranks, each at the place that it has in the node's report."""

    ranks: tuple[int, ...]
    before: array[float]
    """What each took in rounds in which it was not slow, the newer ones more than the older; 0 where none is known."""
    time: float = 0.0
    """Of the report that was judged last."""
    num_before: int = 0
    """Rounds that this was taken from."""


@dataclass(slots=True)
class _Suspect:
    """A rank that was slow not long ago."""

    num_slow: int = 0
    num_calm: int = 0
    named: Straggler | None = None


class SlowRanks:
    """Those of one job."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._suspects: dict[tuple[str, int], _Suspect] = {}
        self._config: object = None
        self.suspected: frozenset[int] = frozenset()
        """Ranks that may turn out to be."""

    @property
    def named(self) -> tuple[Straggler, ...]:
        """Who is slow by now, the slowest first."""
        found = [each.named for each in self._suspects.values() if each.named is not None]
        return tuple(sorted(found, key=lambda each: (each.score, each.rank))[:_MOST_NAMED])

    def see(self, reports: Mapping[str, NodeReport], config: object = None) -> None:
        """A round, under a config that compares with others; a node whose report was seen is not judged again."""
        if config != self._config:
            self._config = config
            self._nodes, self._suspects = {}, {}
        self._nodes = {node_id: self._node(node_id, report) for node_id, report in reports.items()}
        self._suspects = {key: each for key, each in self._suspects.items() if _is_of(key, reports)}
        found = _usual_and_limit([each for report in reports.values() for each in report.local_seconds])
        if found is not None:
            suspects = {node_id for node_id, _ in self._suspects}
            for node_id, report in reports.items():
                node = self._nodes[node_id]
                if report.time != node.time:  # be it earlier, as once the master's clock was put back
                    is_new = node.num_before < _LEAST_BEFORE
                    is_due = is_new or int(report.time) // _BEFORE_SECONDS != int(node.time) // _BEFORE_SECONDS
                    node.time = report.time
                    if is_due or node_id in suspects or max(report.local_seconds, default=0.0) > found[1]:
                        self._judge(node_id, node, report, *found, is_due=is_due)
        self.suspected = frozenset(rank for _, rank in list(self._suspects)[:_MOST_NAMED])

    def _node(self, node_id: str, report: NodeReport) -> _Node:
        known = self._nodes.get(node_id)
        if known is not None and known.ranks == report.ranks:
            return known
        return _Node(ranks=report.ranks, before=array("f", bytes(4 * len(report.ranks))))

    def _judge(
        self, node_id: str, node: _Node, report: NodeReport, usual: float, limit: float, *, is_due: bool
    ) -> None:
        has_before = node.num_before >= _LEAST_BEFORE
        node.num_before += is_due
        before = node.before
        for place, seconds in enumerate(report.local_seconds):
            key = node_id, report.ranks[place]
            is_slow = seconds > limit
            if is_slow or key in self._suspects:
                self._suspect(key, report, place, usual, before[place] if has_before else 0.0, is_slow=is_slow)
            if is_due and seconds > 0 and not (is_slow and has_before):
                old = before[place]
                before[place] = old + _OF_THE_NEWEST * (seconds - old) if old > 0 else seconds

    def _suspect(
        self,
        key: tuple[str, int],
        report: NodeReport,
        place: int,
        usual: float,
        before: float,
        *,
        is_slow: bool,
    ) -> None:
        known = self._suspects.setdefault(key, _Suspect())
        known.num_slow = known.num_slow + 1 if is_slow else 0
        known.num_calm = 0 if is_slow else known.num_calm + 1
        if not is_slow and (known.named is None or known.num_calm >= _CALM_ROUNDS):
            del self._suspects[key]
        elif known.num_slow >= _ROUNDS_IN_A_ROW:
            seconds = report.local_seconds[place]
            step_seconds = report.step_seconds if report.step_seconds > 0 else seconds
            known.named = Straggler(
                rank=key[1],
                host=report.host,
                score=usual / seconds,
                own_score=before / seconds if before > 0 else None,
                slowed=min((seconds - usual) / max(step_seconds, seconds), 1.0),
                num_rounds=known.num_slow,
            )


def _is_of(key: tuple[str, int], reports: Mapping[str, NodeReport]) -> bool:
    report = reports.get(key[0])
    return report is not None and key[1] in report.ranks


def _usual_and_limit(times: list[float]) -> tuple[float, float] | None:
    """What is usual, and above what a rank is slow, by some of very many; None where nothing is known."""
    known = sorted(each for each in times[:: -(-len(times) // _MOST_COMPARED) or 1] if each > 0)
    if not known:
        return None
    usual = _middle(known)
    spread = _middle(sorted(abs(each - usual) for each in known))
    return usual, max(_SLOW * usual, usual + _FAR * _OF_A_NORMAL_DISTRIBUTION * spread)


def _middle(ordered: list[float]) -> float:
    """The lower median: of two the faster, and where every second rank is slow those that are not."""
    return ordered[(len(ordered) - 1) // 2]
