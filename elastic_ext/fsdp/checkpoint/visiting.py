"""Visit: the hold on a job's folder of somebody who tidies it and is no run, and takes it over from none.

While it lasts no run can begin where there are locks, so it is to be short. Where a run is alive, or may be, nothing is
changed but what is safe beside it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ext.errors import CheckpointFenced, in_words
from elastic_ext.records.files import is_locked, try_lock

from .claim import LOCK, read_holder, read_visitor, sign
from .clearing import GARBAGE, Clearing
from .listing import Listing, is_set_aside
from .reading import now_ns_in

__all__ = ["IDLE_SECONDS", "Visit"]

IDLE_SECONDS = 3600.0
"""What nobody has written to for so long is no save under way, whatever locks say."""


class Visit:
    """Somebody in ``folder`` who is no run; ``alone`` lasts as long as no run may begin.

    One that is ``only_looking`` writes nothing at all there, takes the time from this machine, and keeps no run out.
    """

    def __init__(self, folder: Path, *, only_looking: bool = False) -> None:
        self.folder = folder
        self._only_looks = only_looking
        self.now_ns = time.time_ns() if only_looking else now_ns_in(folder)
        self.since_ns = self.now_ns - int(IDLE_SECONDS * 1e9)
        self._holder = read_holder(folder)

    def check(self) -> None:
        """CheckpointFenced if a run has begun since."""
        if read_holder(self.folder) != self._holder:
            raise CheckpointFenced(f"{self.folder}: a run of this job has begun just now; look again")

    @contextmanager
    def alone(self) -> Iterator[str | None]:
        """None while a ``with`` lasts in which no run is alive, or why one may be."""
        lock: int | None = None
        try:
            if self._only_looks:
                is_alone = not is_locked(self.folder / LOCK)
            else:
                lock = try_lock(self.folder / LOCK)
                is_alone = lock is not None
        except PermissionError as error:
            yield f"whether a run is saving cannot be told: {in_words(error)}"
            return
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            yield "there are no locks here that would tell whether a run is saving"
            return
        if not is_alone:
            yield self._who()
            return
        try:
            if lock is not None:
                sign(lock)
            yield None
        finally:
            if lock is not None:
                os.close(lock)

    def _who(self) -> str:
        """Who has the lock, as far as it has said so."""
        visitor = read_visitor(self.folder)
        if visitor is not None:
            return f"it is being tidied by {visitor}"
        return f"a run has this folder: {self._holder or 'it has not said who it is'}"

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
