"""Positions: where an epoch's samples stood when a checkpoint was saved, and how a loader goes on there, or back to it.

What a loader must offer for that is in sources.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sources import OwnPositions, ResumableSource, RewindableSource

__all__ = ["Positions"]

_CANNOT_GO_BACK = (
    "this dataloader cannot go back to where the checkpoint was saved: a loop over it that is under way goes on with "
    "its next batches, and one that comes begins anew; an ElasticDataLoader can go back"
)
_GOES_BACK_LATER = (
    "the samples since the checkpoint come again in the loop over the dataloader that comes: leave a loop that is "
    "under way, and begin another; an ElasticDataLoader hands them out again in the same loop"
)

_OWN = {"of": "each rank"}
"""What stands for a position where each rank has one of its own."""
_WHY_NOT = "why there is none"


class Positions:
    """Those of one loader, if there is one; only a MicroBatchSource knows of any itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def held(self) -> Any:
        """What the loader says of where it stands, as plain values; None where it cannot go on from there."""
        source = self._loader
        if isinstance(source, OwnPositions) and source.has_own_positions:
            why_not = source.why_no_position
            return dict(_OWN) if why_not is None else {_WHY_NOT: why_not}
        return source.state_dict() if isinstance(source, ResumableSource) else None

    def own(self) -> Any:
        """The same of a loader that stands elsewhere on each rank; None of all others."""
        source = self._loader
        has_own = isinstance(source, OwnPositions) and source.has_own_positions and source.why_no_position is None
        return source.state_dict() if has_own else None

    def resume(self, position: Mapping[str, Any], own: Any) -> str | None:
        """Go on from a position; gives why the epoch begins anew instead, where it does."""
        held, source = _either(position["source"], own), self._loader
        if isinstance(held, str):
            return f"{held}: the epoch begins anew"
        if held is not None and isinstance(source, ResumableSource):
            source.load_state_dict(held)
            return None
        if source is None or (held is None and not position["num_batches"]):
            return None
        done = "in the middle of an epoch" if held is not None else f"after {position['num_batches']} of its batches"
        return (
            f"the checkpoint was saved {done}, and this dataloader cannot go on there: the epoch begins anew; an "
            "ElasticDataLoader goes on with the next sample"
        )

    def go_on(self) -> str | None:
        """Have the loop that comes go on where the last one was left; gives why its epoch begins anew, where it does.

        A loader that cannot go on anywhere is left as it is.
        """
        held, source = _either(self.held(), self.own()), self._loader
        if isinstance(held, str):
            return f"{held}: the epoch begins anew"
        if isinstance(source, RewindableSource):
            source.rewind(held)
        elif held is not None and isinstance(source, ResumableSource):
            source.load_state_dict(held)
        return None

    def can_go_back(self, position: Mapping[str, Any]) -> bool:
        """Whether what came after a position can come again."""
        held = position["source"]
        return held is not None and not _is_missing(held) and isinstance(self._loader, ResumableSource)

    def go_back(self, position: Mapping[str, Any], own: Any) -> str | None:
        """Have what came after a position come again, between two steps; gives what has to be known where it may not.

        A loader with sizes of its own goes on as if nothing had happened.
        """
        held, source = _either(position["source"], own), self._loader
        if not self.can_go_back(position) or isinstance(held, str):
            return None if source is None else _CANNOT_GO_BACK
        if isinstance(source, RewindableSource):
            source.rewind(held)
            return None
        assert isinstance(source, ResumableSource)
        source.load_state_dict(held)
        return _GOES_BACK_LATER


def _either(held: Any, own: Any) -> Any:
    """What all ranks hold, or this one's own; a string says why there is none."""
    if _is_missing(held):
        return f"where the dataloader stood is not known: {held[_WHY_NOT]}"
    if held != _OWN:
        return held
    return "each rank stood elsewhere in the dataset, and there were more or fewer ranks" if own is None else own


def _is_missing(held: Any) -> bool:
    return isinstance(held, Mapping) and _WHY_NOT in held
