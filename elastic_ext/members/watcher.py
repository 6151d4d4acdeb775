"""The newest membership plan in a node's run directory, followed as its config is."""

from __future__ import annotations

from elastic_ext.config.watcher import FileWatcher

from .plan import MembershipPlan

__all__ = ["PlanWatcher"]


class PlanWatcher(FileWatcher[MembershipPlan]):
    """The newest valid membership plan of one file."""

    def _parsed(self, data: bytes) -> MembershipPlan:
        plan = MembershipPlan.from_json(data.decode())
        plan.check()
        newest = self._newest
        if newest is not None and plan.version < newest.version:
            raise ValueError(f"version {plan.version} is older than version {newest.version}, which is known already")
        return plan

    def _are_same(self, one: MembershipPlan, other: MembershipPlan) -> bool:
        return one == other

    def _kept_in_words(self) -> str:
        return "the members stay as they are"
