"""HeldConfig: a node's config as its master sees it: which one the node holds, and one that is to be taken."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.errors import ConfigError

from .tuner import ConfigTuner

__all__ = ["Held", "HeldConfig"]

_RETRY_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0
_MASTER = "the master"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The newest config that the node's file has held; version 0 where there is none."""

    version: int = 0
    digest: str = ""
    text: str = ""


class HeldConfig:
    """What ``tuner`` has, for the threads that speak with a master; none of them holds up the agent's loop."""

    def __init__(self, tuner: ConfigTuner, stop: threading.Event) -> None:
        self._tuner = tuner
        self._stop = stop
        self._is_in_use = False
        self._last = Held()

    def begin(self) -> None:
        """Nodes have met, and what an earlier job has left is set aside: from now on there is something to say."""
        self._is_in_use = True

    @property
    def is_in_use(self) -> bool:
        return self._is_in_use

    def now(self) -> Held:
        """What is held at this moment."""
        newest = self._tuner.newest() if self._is_in_use else None
        if newest is None:
            return Held()
        last = self._last
        if (last.version, last.text) != newest:
            last = self._last = Held(version=newest[0], digest=_digest_of(newest[1]), text=newest[1])
        return last

    @property
    def trouble(self) -> str:
        """What keeps the node from the version that it should have; empty where nothing does."""
        return self._tuner.trouble or ""

    def take(self, version: int, text: str) -> bool:
        """Put the master's config into the file, whoever else writes there; whether it is held now."""
        if not self._is_in_use:
            return False
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._tuner.take(text, whose=_MASTER, waits=True):
            if self.now().version >= version:
                return True
            if self._tuner.trouble is not None or time.monotonic() >= deadline or self._stop.wait(_RETRY_SECONDS):
                return False
        return True


def _digest_of(text: str) -> str:
    try:
        return ElasticConfig.parse(text.encode(errors="surrogatepass")).digest
    except ConfigError:  # the tuner holds none that is refused
        return ""
