"""Following: the config file of a loader that is used by itself, without a trainer that would follow one for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.watcher import ConfigWatcher

__all__ = ["Following"]

_logger = logging.getLogger(__name__)


class Following:
    """Takes what a file says, between two batches; ``close`` it."""

    def __init__(
        self,
        file: str | Path,
        *,
        check: Callable[[ElasticConfig], str | None],
        apply: Callable[[ElasticConfig, ElasticConfig], None],
        num_ranks: int = 1,
    ) -> None:
        self._watcher = ConfigWatcher(file)
        self._check = check
        self._apply = apply
        self._num_ranks = num_ranks
        self._has_news = True
        self._is_started = False
        self._in_force = ElasticConfig.from_values({})
        self._seen: ElasticConfig | None = None

    def look(self) -> None:
        """Take what the file says if that is another than before; costs next to nothing where it is not."""
        if not self._has_news:
            return
        if not self._is_started:
            self._is_started = True
            self._watcher.on_news = self._note
            self._watcher.start()
        self._has_news = False
        new = self._watcher.held
        if new is None or new is self._seen:
            return
        self._seen = new
        reason = _why_not_alone(new, self._num_ranks) or self._check(new)
        if reason is not None:
            _logger.warning("%s of %s is not taken: %s", new.label, self._watcher.path, reason)
            return
        self._apply(self._in_force, new)
        self._in_force = new
        _logger.info("%s of %s is in force in this loader", new.label, self._watcher.path)

    def close(self) -> None:
        """Follow no more; twice is allowed."""
        self._watcher.close()

    def _note(self) -> None:
        self._has_news = True


def _why_not_alone(new: ElasticConfig, num_ranks: int) -> str | None:
    if dist.is_available() and dist.is_initialized():
        num_ranks = max(num_ranks, dist.get_world_size())
    if new.dataloader.batch_size is None or num_ranks == 1:
        return None
    return (
        f"dataloader.batch_size is {new.dataloader.batch_size}, and {num_ranks} ranks have to change theirs together; "
        "give the loader to an ElasticTrainer, which sees to that, or leave the key out"
    )
