"""Fleet: the machines of a job as its nodes have told of them, and what follows from that, worked out when asked."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from elastic_ext.profile.stragglers import Straggler

from .cluster import Cluster, Judged, cluster_of, judged
from .links import measured_in
from .machines import NodeFacts, facts_of

__all__ = ["Fleet"]


class Fleet:
    """The machines, by node, and what pairs of them have measured."""

    def __init__(self, pairs: str = "") -> None:
        """``pairs`` as ``take_pairs`` was given them, or empty."""
        self.pairs = pairs
        self._judged: Judged | None = judged(measured_in(pairs)) if pairs else None
        self._texts: dict[str, tuple[str, bytes]] = {}  # node -> its host, and what it has told, packed
        self._facts: dict[str, tuple[bool, NodeFacts]] = {}  # node -> whether there were others, and the facts
        self._cluster: tuple[Sequence[Straggler], Cluster] | None = None

    def hear(self, node_id: str, host: str, hardware: str) -> bool:
        """What a node has told of its machine, empty where it knows nothing yet; whether that is news."""
        known = self._texts.get(node_id)
        packed = zlib.compress(hardware.encode()) if hardware else b""
        if known == (host, packed) or (known is not None and known[0] == host and not hardware):
            return False
        self._texts[node_id] = host, packed
        self._facts.pop(node_id, None)
        self.facts(node_id)  # reading it takes a while: for all nodes at once, as they are asked for, too long
        self._cluster = None
        return True

    def forget(self, node_id: str) -> None:
        """A node is gone for good."""
        self._facts.pop(node_id, None)
        if self._texts.pop(node_id, None) is not None:
            self._cluster = None

    def hardware(self, node_id: str) -> str:
        """What a node has told; empty where that is not known."""
        return _unpacked(self._texts.get(node_id, ("", b""))[1])

    def facts(self, node_id: str) -> NodeFacts | None:
        """What there is to say of a node's machine."""
        known = self._texts.get(node_id)
        if known is None:
            return None
        host, packed = known
        has_others = len(self._texts) > 1
        kept = self._facts.get(node_id)
        if kept is None or kept[0] != has_others:
            kept = has_others, facts_of(node_id, host, _unpacked(packed), num_nodes=len(self._texts))
            self._facts[node_id] = kept
        return kept[1]

    def take_pairs(self, text: str) -> None:
        """What pairs of nodes have measured, in place of what they had; ValueError for anything else."""
        self._judged = judged(measured_in(text))
        self.pairs = text
        self._cluster = None

    def cluster(self, slow_ranks: Sequence[Straggler]) -> Cluster:
        """How the machines lie to each other, which are slow, and what to do."""
        if self._cluster is None or self._cluster[0] != slow_ranks:
            facts = [found for node_id in self._texts if (found := self.facts(node_id)) is not None]
            self._cluster = slow_ranks, cluster_of(facts, self._judged, slow_ranks)
        return self._cluster[1]


def _unpacked(packed: bytes) -> str:
    return zlib.decompress(packed).decode() if packed else ""
