"""Planning: the thread on which a master has its tuner plan, so that those who call meanwhile are answered.

It does one thing after another; answers are heard on the event loop, as all else of a master.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["PlanningThread"]

_logger = logging.getLogger(__name__)

_Work = Callable[[], Callable[[], None]]
_CLOSE_SECONDS = 2.0


class PlanningThread:
    """One master's; it begins with the first that is to be done. All its methods are for the thread of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.answered = asyncio.Event()
        """Set with each answer; who waits for it clears it."""

    def run(self, work: _Work) -> None:
        """Do ``work``, which raises nothing, and call what it gives on the loop; nothing once this is closed."""
        if self._is_closed:
            return
        if self._thread is None:
            # A daemon: a plan that never ends is no reason for its master not to.
            self._thread = threading.Thread(target=self._work, name="elastic_ext tuner", daemon=True)
            self._thread.start()
        self._works.put(work)

    def end(self) -> None:
        """No answer is heard any more, and nothing else is begun."""
        self._is_closed = True
        self._works.put(None)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait for what is under way, and leave it to itself if it takes longer."""
        self.end()
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            _logger.warning("the tuner has planned for more than %g s, and the master ends without it", seconds)

    def _work(self) -> None:
        while (work := self._works.get()) is not None and not self._is_closed:
            then = work()
            if self._is_closed:
                return
            try:
                self._loop.call_soon_threadsafe(self._hear, then)
            except RuntimeError:  # the loop was closed meanwhile
                return

    def _hear(self, then: Callable[[], None]) -> None:
        if not self._is_closed:
            then()
            self.answered.set()
