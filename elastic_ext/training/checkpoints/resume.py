"""Resuming: how a run goes on from a checkpoint, or goes back to one, and what it logs then.

When that is done, and what is saved afterwards, is in checkpoints.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.job import JobCheckpoints
from elastic_ext.fsdp.checkpoint.loading.source import Opened

from .state import Resumed, TrainingState

__all__ = ["Resuming"]

_logger = logging.getLogger(__name__)


class Resuming:
    """Loads a job's checkpoints: the newest as a run resumes, an earlier one as training goes back.

    ``startup`` are the config values that the script gives. A damaged checkpoint is passed over for the one before it,
    if this ``falls_back`` and the damaged one was not asked for.
    """

    def __init__(
        self, job: JobCheckpoints, state: TrainingState, startup: Mapping[str, object], *, falls_back: bool
    ) -> None:
        self._job = job
        self._state = state
        self._counts = state.counts
        self._startup = startup
        self._falls_back = falls_back

    def load(self, take_up: Callable[[Mapping[str, Any]], None]) -> Resumed | None:
        """Go on from the job's newest checkpoint; None where there is none. ``take_up`` is given its config."""
        resumed = self._job.restore(self._state, falls_back=self._falls_back)
        if resumed is None:
            return None
        self._state.let_go()  # before a config comes that spreads the model otherwise
        self._counts.load_state_dict(resumed.state["counts"])
        take_up(resumed.state["config"])
        if self._state.rank == 0:
            self._tell(resumed)
            self._tell_of_missing(resumed)
        self._state.take_up(resumed)
        return resumed

    def load_earlier(
        self, step: int | None, *, skips: bool, is_torn: bool, more: str, on_begin: Callable[[], None]
    ) -> Resumed:
        """Load the checkpoint of ``step``, or the newest before the present step; call ``go_back`` next.

        ``on_begin`` is called before anything is touched. ``more`` is what else has to be the same on all ranks.
        """
        into = _Earlier(self._state, replays=not skips, on_begin=on_begin)
        before = self._counts.global_step + is_torn  # what is torn was to come after it
        more = f"{', passing over the samples since' if skips else ''}{more}"
        resumed = self._job.go_back(into, step, before=before, more=more, falls_back=self._falls_back)
        self._state.let_go()
        return resumed

    def go_back(self, resumed: Resumed, in_force: ElasticConfig, *, skips: bool) -> None:
        """Go on from the earlier checkpoint that was loaded, under the config ``in_force``."""
        if self._state.rank == 0:
            then = ElasticConfig.from_dict(resumed.state["config"]["config"]).label
            _logger.info(
                "going back from step %d to %s, saved %s at step %d%s%s",
                self._counts.global_step,
                resumed.path,
                resumed.commit.saved_at,
                resumed.commit.global_step,
                ", passing over the samples since" if skips else "",
                "" if then == in_force.label else f"; {in_force.label} stays in force, it was saved under {then}",
            )
            self._tell_of_missing(resumed)
        self._state.go_back(resumed, skips=skips)

    def _tell_of_missing(self, resumed: Resumed) -> None:
        why = self._state.why_incomplete(resumed)
        if why is not None:
            _logger.warning("%s", why)

    def _tell(self, resumed: Resumed) -> None:
        """Log what differs from when the checkpoint was saved, and which of the script's values are not used."""
        commit = resumed.commit
        was = {**commit.about, "torch": commit.versions.get("torch")}
        now = {**self._state.about(), "torch": torch.__version__}
        differs = [f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value]
        config = ElasticConfig.from_dict(resumed.state["config"]["config"])
        differs += [
            f"{path} stays {config.get(path)}, the script's is {value}"
            for path, value in self._startup.items()
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


class _Earlier:
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
