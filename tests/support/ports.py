"""Ports that tests hand to processes which listen there later: nobody else takes one in between.

A port that the kernel found free a moment ago may be the next one that it gives to any other process; the ports here
are none of those that it gives, and processes of one test run have ranges of their own.
"""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

_FIRST = 10_000  # up to 26,000: Linux gives those from 32,768 on by itself
_NUM_RANGES = 16
_NUM_IN_RANGE = 1000
_asked = itertools.count(os.getpid())  # another place for each run: several may share a machine


def free_port() -> int:
    """A port where nobody listens, and that this process has not given for a thousand others."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker % _NUM_RANGES * _NUM_IN_RANGE
    for _ in range(_NUM_IN_RANGE):
        port = first + next(_asked) % _NUM_IN_RANGE
        with socket.socket() as listening:
            try:
                listening.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"all ports from {first} to {first + _NUM_IN_RANGE - 1} are taken")
