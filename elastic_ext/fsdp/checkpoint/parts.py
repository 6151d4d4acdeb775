"""A file written from parts as they come, under a temporary name, until it is durable."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from elastic_ext.records.files import FILE_MODE, temporary_beside

__all__ = ["write_beside"]


def write_beside(path: Path, parts: Iterable[bytes | memoryview]) -> Path:
    """The temporary name beside ``path`` of a new file that holds ``parts``, durably; nothing where that fails.

    Each part is good until the next is asked for. OSError names ``path`` where it names no other file.
    """
    temporary = temporary_beside(path)
    with contextlib.ExitStack() as undo:
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            undo.callback(_remove, temporary)
            try:
                for part in parts:
                    _write(file, memoryview(part))
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            error.filename = error.filename or str(path)  # calls on descriptors do not name the file
            raise
        undo.pop_all()
    return temporary


def _write(file: int, data: memoryview) -> None:
    """Write all of it, however little the system takes at a time."""
    while data:
        num_bytes = os.write(file, data)
        if not num_bytes:
            raise OSError(errno.EIO, "nothing was written, and no reason was given")
        data = data[num_bytes:]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
