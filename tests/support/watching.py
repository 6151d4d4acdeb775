"""What the tests of ConfigWatcher share: config files, and log records that can be waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.records.files import write_whole

__all__ = ["DEADLINE_SECONDS", "Warnings", "collected_warnings", "text_of", "write_whole"]

DEADLINE_SECONDS = 30.0  # passing takes milliseconds; the machine may be busy


def text_of(version: int, note: str = "") -> bytes:
    """A valid file of that version."""
    return f'{{"version": {version}, "user": {{"note": "{note}"}}}}\n'.encode()


class Warnings(logging.Handler):
    """Collects the messages of a logger's warnings; can wait for them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._arrived = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._arrived:
            self.messages.append(record.getMessage())
            self._arrived.notify_all()

    def about(self, words: str) -> list[str]:
        return [message for message in self.messages if words in message]

    def wait_for(self, words: str) -> bool:
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self.about(words)), DEADLINE_SECONDS)


@contextmanager
def collected_warnings() -> Iterator[Warnings]:
    """The warnings that the library logs meanwhile."""
    logger, handler = logging.getLogger("elastic_ext"), Warnings()
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
