"""Plans: which nodes a job runs on, as one version after another. Pure.

Agents count the plans of one start of a job; here they are counted on where a job is started again.
"""

from __future__ import annotations

from elastic_ext.records.agent import MembershipPlan, NodeShare
from elastic_ext.records.text import counted, on_one_line

from .wire import master_pb2 as wire

__all__ = ["Plans"]

_MOST_NAME = 256
_MOST_REASON = 1_000
_MOST_SHARES = 10_000


class Plans:
    """The newest plan; None before there is one."""

    def __init__(self, stored: str) -> None:
        """``stored`` is JSON, or empty."""
        self.newest = MembershipPlan.from_json(stored) if stored else None
        self._told_version = 0  # that the agents have given to it

    def take(self, told: wire.Membership, time: float) -> str | None:
        """What an agent tells of; where that is a new plan, what is to be said of it."""
        nodes = tuple(
            NodeShare(
                node_id=each.node_id[:_MOST_NAME],
                host=each.host[:_MOST_NAME],
                first_rank=each.first_rank,
                num_workers=each.num_workers,
            )
            for each in told.nodes[:_MOST_SHARES]
        )
        known = self.newest
        if known is not None:
            is_of_same_start = {each.node_id for each in nodes} & {each.node_id for each in known.nodes}
            if nodes == known.nodes or (is_of_same_start and told.version < self._told_version):
                return None
        self._told_version = told.version
        version = 1 if known is None else known.version + 1
        reason = on_one_line(told.reason[:_MOST_REASON])
        self.newest = MembershipPlan(version=version, nodes=nodes, reason=reason, time=time)
        size = f"{counted(len(nodes), 'node')}, {counted(self.newest.world_size, 'rank')}"
        return f"membership {version}: {size}: {reason}"
