"""FixedSharding: says no where a config asks a model for another sharding, and nothing can give it that."""

from __future__ import annotations

from collections.abc import Callable

from .config.elastic_config import ElasticConfig

__all__ = ["FixedSharding"]


class FixedSharding:
    """The applier of the section ``parallelism`` for a model whose sharding cannot be changed: it refuses that."""

    section = "parallelism"
    only_checks = True
    _PATHS = ("parallelism.strategy", "parallelism.shard_degree", "parallelism.unit")

    def __init__(self, reason: str, in_force: Callable[[], ElasticConfig]) -> None:
        self._reason = reason
        self._in_force = in_force

    def check(self, new: ElasticConfig) -> str | None:
        now = self._in_force()
        changed = [path for path in self._PATHS if new.get(path) is not None and new.get(path) != now.get(path)]
        return f"{', '.join(changed)} cannot be changed: {self._reason}" if changed else None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        """Of other keys of the section others may make something."""
