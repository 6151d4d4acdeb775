"""Journal: what the agent saw and did, a line each: in the log, and in the run directory for those who come later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic_ext.records.agent import EVENTS_FILE
from elastic_ext.records.files import append_line
from elastic_ext.records.metrics import JobEvent

__all__ = ["OF_AGENT", "Journal"]

_logger = logging.getLogger(__name__)

OF_AGENT = -1
"""The rank of events that are the agent's own."""


class Journal:
    """One agent's journal, in its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / EVENTS_FILE
        self._has_warned = False
        self.restart = 0
        """How many failures were counted so far."""
        self._listener: Callable[[JobEvent], None] | None = None

    def listen(self, listener: Callable[[JobEvent], None]) -> None:
        """Have ``listener`` called with each event from now on, on the thread that tells it."""
        self._listener = listener

    def tell(self, kind: str, text: str, *, is_bad: bool = False, **details: object) -> None:
        """An event, and a line of the log."""
        _logger.log(logging.ERROR if is_bad else logging.INFO, "%s", text)
        self._write(kind, text, details)

    def note(self, kind: str, text: str, **details: object) -> None:
        """An event that the log has already, or need not have."""
        self._write(kind, text, details)

    def tell_staged(self, why: str, path: Path | None) -> None:
        """What became of what workers had staged; where nothing did, a checkpoint is there that is as new, or newer."""
        if path is not None:
            self.tell("staged", why, path=str(path))
        else:
            self.note("staged", why)

    def _write(self, kind: str, text: str, details: Mapping[str, object]) -> None:
        event = JobEvent(
            time=time.time(), generation=self.restart, rank=OF_AGENT, step=-1, kind=kind, text=text, details=details
        )
        if self._listener is not None:
            self._listener(event)
        try:
            append_line(self._file, event.to_json())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("%s cannot be written (%s): what happens stands in this log alone", self._file, error)
