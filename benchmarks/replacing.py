"""Replacing a file as `elastic-ext config set` and careful scripts do, with the moment at which it happened."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, data: bytes) -> int:
    """Put ``data`` in place of the file; gives CLOCK_MONOTONIC in nanoseconds just before the rename."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    now = time.monotonic_ns()
    os.replace(temporary, path)
    return now
