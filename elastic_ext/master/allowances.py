"""Allowances: how many calls one peer may make in a while. Pure."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Allowances"]


class Allowances:
    """Each peer may make ``at_once`` calls, and ``per_second`` in the long run. The peers least heard of are forgotten
    beyond ``most_peers``: they begin anew, which gives them no more than anybody."""

    def __init__(self, *, per_second: float, at_once: float, most_peers: int) -> None:
        self._per_second, self._at_once, self._most_peers = per_second, at_once, most_peers
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer -> how many more, as of when

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, peer: str) -> bool:
        return peer in self._left

    def take(self, now: float, peer: str) -> bool:
        """Whether this peer may make a call now, which is counted if so."""
        left, since = self._left.pop(peer, (self._at_once, now))
        left = min(self._at_once, left + (now - since) * self._per_second)
        may = left >= 1
        self._left[peer] = (left - 1 if may else left), now
        if len(self._left) > self._most_peers:
            self._left.popitem(last=False)
        return may
