"""What a run logs as it goes on from a checkpoint or goes back to one, and what it checks before it goes back.

When that is done, and what is saved afterwards, is in checkpoints.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import torch

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.loading.source import Opened

from .state import Resumed, TrainingState

__all__ = ["Earlier", "tell_resumed", "tell_rewound"]

_logger = logging.getLogger(__name__)


def tell_resumed(resumed: Resumed, state: TrainingState, startup: Mapping[str, object]) -> None:
    """Log what differs from when the checkpoint was saved, and which of the script's ``startup`` values are unused."""
    commit = resumed.commit
    was = {**commit.about, "torch": commit.versions.get("torch")}
    now = {**state.about(), "torch": torch.__version__}
    differs = [f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value]
    config = ElasticConfig.from_dict(resumed.state["config"]["config"])
    differs += [
        f"{path} stays {config.get(path)}, the script's is {value}"
        for path, value in startup.items()
        if config.get(path) != value
    ]
    _logger.log(
        logging.WARNING if differs else logging.INFO,
        "resuming from %s, saved %s at step %d: %s",
        resumed.path,
        commit.saved_at,
        commit.global_step,
        ", ".join(differs) or "nothing has changed since",
    )
    _tell_of_missing(resumed, state)


def tell_rewound(resumed: Resumed, state: TrainingState, in_force: ElasticConfig, *, skips: bool) -> None:
    """Log that training goes back to a checkpoint, under the config ``in_force``; called before counters go back."""
    then = ElasticConfig.from_dict(resumed.state["config"]["config"]).label
    _logger.info(
        "going back from step %d to %s, saved %s at step %d%s%s",
        state.counts.global_step,
        resumed.path,
        resumed.commit.saved_at,
        resumed.commit.global_step,
        ", passing over the samples since" if skips else "",
        "" if then == in_force.label else f"; {in_force.label} stays in force, it was saved under {then}",
    )
    _tell_of_missing(resumed, state)


def _tell_of_missing(resumed: Resumed, state: TrainingState) -> None:
    why = state.why_incomplete(resumed)
    if why is not None:
        _logger.warning("%s", why)


class Earlier:
    """A training state that an earlier checkpoint is loaded into while training is under way."""

    def __init__(self, state: TrainingState, *, replays: bool, on_begin: Callable[[], None]) -> None:
        self._state = state
        self._replays = replays
        self._on_begin = on_begin

    def check(self, opened: Opened) -> None:
        """Raise where the checkpoint does not fit, or its place in the data cannot be gone back to."""
        why_not = self._state.why_not_replay(opened) if self._replays else None
        if why_not is not None:
            raise CheckpointError(why_not)
        self._state.check(opened)

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """Parts of the state, of those that another checkpoint has ``touched``, that this one fills in whole."""
        return self._state.refilled(opened, touched)

    def load(self, opened: Opened) -> Resumed:
        """Fill all tensors, as when a run is resumed; until all is done training cannot go on."""
        self._on_begin()
        return self._state.load(opened)
