"""Visit: the hold on a job's folder of somebody who tidies it and is no run, and takes it over from none.

While it lasts no run can begin where there are locks, so it is to be short. Where a run is alive, or may be, nothing is
changed but what is safe beside it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ext.errors import CheckpointFenced
from elastic_ext.files import try_lock

from .claim import read_holder
from .clearing import GARBAGE, Clearing
from .listing import Listing, is_set_aside
from .reading import now_ns_in

__all__ = ["IDLE_SECONDS", "Visit"]

IDLE_SECONDS = 3600.0
"""What nobody has written to for so long is no save under way, whatever locks say."""
_LOCK = "RUN.lock"


class Visit:
    """Somebody in ``folder`` who is no run; ``alone`` lasts as long as no run may begin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.since_ns = now_ns_in(folder) - int(IDLE_SECONDS * 1e9)
        self._holder = read_holder(folder)

    def check(self) -> None:
        """CheckpointFenced if a run has begun since."""
        if read_holder(self.folder) != self._holder:
            raise CheckpointFenced(f"{self.folder}: a run of this job has begun just now; look again")

    @contextmanager
    def alone(self) -> Iterator[str | None]:
        """None while a ``with`` lasts in which no run is alive, or why one may be."""
        try:
            lock = try_lock(self.folder / _LOCK)
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            yield "there are no locks here that would tell whether a run is saving"
            return
        if lock is None:
            yield f"a run has this folder: {self._holder or 'it has not said who it is'}"
            return
        try:
            yield None
        finally:
            os.close(lock)

    def put_garbage_aside(self) -> None:
        """Have what dead saves have left lie where anybody can remove it. Called ``alone``.

        What has been written to of late stays where it is.
        """
        Clearing(self).put_all_aside(begun=self._lively())

    def garbage(self, *, is_alone: bool) -> list[Path]:
        """What is part of no checkpoint, nor of a save; beside a run, what is no concern of one."""
        lively = self._lively()
        dead = {path for path in self.unfinished() if path.name not in lively}
        lying = [path for path in Clearing(self).garbage(begun=lively) if path.parent not in dead]
        if is_alone:
            return [*sorted(dead), *lying]
        return [path for path in lying if path.name.startswith(GARBAGE) or is_set_aside(path.name)]

    def unfinished(self) -> set[Path]:
        """What was never committed, or is not yet."""
        return {self.folder / name for name in Listing.read(self.folder).unfinished}

    def _lively(self) -> list[str]:
        """The unfinished checkpoints that may be saves under way, for all that can be seen of them."""
        return [path.name for path in self.unfinished() if _written_ns(path) > self.since_ns]


def _written_ns(folder: Path) -> int:
    """When somebody last wrote to a folder, or to a file in it."""
    with os.scandir(folder) as files:
        times = [file.stat(follow_symlinks=False).st_mtime_ns for file in files]
    return max([*times, os.lstat(folder).st_mtime_ns])
