"""ExportFolder: the folder that an export goes into: a whole one comes to be there, or none.

Files are written under temporary names and synced. Once all are, those of an earlier export are removed, its index
first; then the new ones get their names, their index last. So at no moment is there an index of files that are not all
there, and what a killed export leaves under temporary names is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from elastic_ext.errors import CheckpointError
from elastic_ext.records.files import is_temporary, put_in_place, sync_folder

from .commit import COMMIT
from .exportplan import INDEX, is_weights_file
from .jobfolder import refuse_in_a_jobs_folder
from .parts import write_beside

__all__ = ["ExportFolder"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SUFFIX_CHARACTERS = len(".0123456789abcdef.tmp")


class ExportFolder:
    """One export on its way into the folder ``path``, for a ``with``; what ``finish`` has not put there is removed."""

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path = path
        self._force = force
        self._was_made = False
        self._waiting: dict[str, Path] = {}  # name -> where its contents are so far
        self._placed: list[Path] = []  # the index last

    def __enter__(self) -> ExportFolder:
        refuse_in_a_jobs_folder(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)
            self._was_made = True
        names = os.listdir(self.path)
        if COMMIT in names:
            raise CheckpointError(f"{self.path} is a checkpoint; export into another folder")
        self._refuse(names)
        for name in names:
            if is_temporary(name) and is_weights_file(name[1:-_SUFFIX_CHARACTERS]):
                os.unlink(self.path / name)
        return self

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write the file that is to be called ``name``, and have its contents on the disk."""
        with _told(self.path / name):
            self._waiting[name] = write_beside(self.path / name, parts)

    def finish(self) -> None:
        """Have all that was written there, in the place of an earlier export."""
        names = os.listdir(self.path)
        self._refuse(names)
        with _told(self.path):
            for name in sorted(filter(is_weights_file, names), key=_index_first):
                os.unlink(self.path / name)
                if name == INDEX:
                    sync_folder(self.path)
            for name in sorted(self._waiting, key=_index_first, reverse=True):
                if name == INDEX:
                    sync_folder(self.path)
                put_in_place(self._waiting[name], self.path / name)
                self._placed.append(self.path / name)
                del self._waiting[name]
            sync_folder(self.path)
            if self._was_made:
                sync_folder(self.path.absolute().parent)
        self._placed.clear()
        self._was_made = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in [*reversed(self._placed), *self._waiting.values()]:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self._was_made:
            with contextlib.suppress(OSError):  # where somebody has put something there
                os.rmdir(self.path)

    def _refuse(self, names: Iterable[str]) -> None:
        there = sorted(filter(is_weights_file, names))
        if there and not self._force:
            raise CheckpointError(
                f"{self.path} holds an export already, {there[0]}; replace it with force=True (--force), or move it"
            )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Have an OSError name ``path`` where it names no file; that of a full disk says what becomes of the rest."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"{os.strerror(error.errno)}; what was written of this export is removed"
            raise OSError(error.errno, what, str(path)) from None
        error.filename = error.filename or str(path)
        raise


def _index_first(name: str) -> tuple[bool, str]:
    return name != INDEX, name
