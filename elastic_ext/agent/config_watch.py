"""ConfigWatch: a master's stream of configs, read on a thread of its own: each is taken as it comes.

That it was taken is said in the next message, for which the agent's other thread is woken.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from elastic_ext.errors import MasterAbsent, MasterBusy, MasterError
from elastic_ext.master.client import MasterClient, MasterStream
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.ranks.deadlines import Backoff

from .held_config import HeldConfig

__all__ = ["ConfigWatch"]

_logger = logging.getLogger(__name__)

_FIRST_SECONDS, _MOST_SECONDS = 0.5, 15.0
_STEADY_SECONDS = 10.0
"""A stream that has lasted so long was in order."""
_JOIN_SECONDS = 1.0


class ConfigWatch:
    """The stream of one connection, from ``start`` to ``close``; one that ends is asked for anew, after a while."""

    def __init__(
        self,
        config: HeldConfig,
        *,
        node_id: str,
        incarnation: int,
        epoch: Callable[[], int],
        hurry: Callable[[], None],
        wake: Callable[[], None],
        spread: Callable[[float], None],
        chance: random.Random,
    ) -> None:
        self.error: MasterError | None = None
        """What has ended it for good, for the owner to raise."""
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._epoch = epoch
        self._hurry = hurry
        self._wake = wake
        self._spread = spread
        self._backoff = Backoff(chance, first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the stream
        self._stream: MasterStream[pb.ConfigPush] | None = None
        self._thread: threading.Thread | None = None

    def start(self, client: MasterClient) -> None:
        """Ask for configs; a second time changes nothing."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, args=(client,), name="elastic_ext configs", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.close()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self, client: MasterClient) -> None:
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._read(client)
                except (MasterAbsent, MasterBusy) as error:
                    _logger.debug("configs do not come for now: %s", error)
                if self._stop.is_set():
                    return
                if time.monotonic() - began >= _STEADY_SECONDS:
                    self._backoff.forget()
                self._hurry()  # whether the master is there at all shows in the next message
                self._stop.wait(self._backoff.next_seconds())
        except MasterError as error:
            self.error = error
            self._hurry()
        except Exception:  # the top of a thread: configs come with the answers to messages as well
            _logger.exception("configs are not pushed to this agent any more")

    def _read(self, client: MasterClient) -> None:
        request = pb.WatchRequest(
            node_id=self._node_id,
            incarnation=self._incarnation,
            epoch=self._epoch(),
            config_version=self._config.now().version,
        )
        with self._lock:
            if self._stop.is_set():
                return
            stream = self._stream = client.watch(request)
        for push in stream:
            if push.epoch < self._epoch():
                return
            self._spread(push.acknowledge_within_seconds)
            if self._config.take(push.version, push.text):
                self._backoff.forget()
                self._wake()
