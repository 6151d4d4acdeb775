"""`ckpt ls`: the checkpoints of jobs, one a line."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from elastic_ext.fsdp.checkpoint.listing import Found, Listing

from .commands import DONE
from .places import place_of
from .terminal import Terminal

__all__ = ["run"]


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    place = place_of(options.path)
    now = time.time()
    for job in place.jobs:
        for found in Listing.read(job).found:
            _tell(found, job, now, terminal)
    if place.is_checkpoint:
        _tell(Found.read(place.path), place.path.parent, now, terminal)
    return DONE


def _tell(found: Found, job: Path, now: float, terminal: Terminal) -> None:
    terminal.tell({"job": job.name, "name": found.name}, found.name)
