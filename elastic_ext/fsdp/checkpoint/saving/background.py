"""BackgroundSave: one save on a thread of each rank, while training goes on: no collectives here, only letters.

    first rank                               the others
    copies what may change                   copy theirs
    makes the folder, says `begun`           wait for that
    writes its files                         write theirs, say `written`
    waits for all, makes COMMIT, says `made` wait for that
    removes what is not to be kept

Whoever fails says so, and all of them give up. What was written by then is no checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elastic_ext.errors import CheckpointError, in_words
from elastic_ext.fsdp.checkpoint.contents import FileKind
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.deadlines import OwnedThread

from .letters import Letters, ToldOfFailure
from .rank_files import Shard, Writing

if TYPE_CHECKING:
    from .staging import Copying, Staging

__all__ = ["PATIENCE_SECONDS", "THREAD_NAME", "BackgroundSave"]

_logger = logging.getLogger(__name__)

THREAD_NAME = "elastic_ext save"
PATIENCE_SECONDS = 30.0
"""How long a save waits for other ranks once training has ended with an exception, or the process ends."""


class BackgroundSave:
    """One async save on one rank: a thread copies, writes the rank's files and, on rank 0, commits."""

    def __init__(
        self,
        writing: Writing,
        letters: Letters,
        staging: Staging,
        *,
        replaces: bool,
        retention: Retention,
        seconds: float,
        after: BackgroundSave | None,
    ) -> None:
        """``replaces`` is as ``SaveRequest`` has it; ``retention`` says what is removed once the checkpoint exists."""
        self.path = writing.path
        """The folder where the checkpoint will be."""
        self.step = writing.draft.global_step
        """The global step of the checkpoint."""
        self.shards: Mapping[FileKind, Shard] = {}
        """This rank's files, staged."""
        self.copying: Copying | None = None
        """The overlapped copy into the staging memory; None where all is staged when the save starts."""
        self.error: Exception | None = None
        """Why the save has failed, else None; ToldOfFailure where another rank has failed."""
        self.is_made = False
        """Whether the checkpoint exists; rank 0's thread may still be removing old checkpoints."""
        self.is_in_log = False
        """Whether the failure of the save was logged already."""
        self.is_given_up = False
        """Whether nobody waits for the save any more."""
        self._writing = writing
        self._letters = letters
        self._staging = staging
        self._replaces = replaces
        self._retention = retention
        self._seconds = seconds  # the time limit of the storage
        self._after = after  # the save before this one, which may still be removing checkpoints
        self._began = time.perf_counter()
        self._thread = OwnedThread(self._run, name=THREAD_NAME)

    def start(self) -> None:
        """Start the save's thread; from then on a process that ends waits for the save."""
        self._began = time.perf_counter()
        self._letters.restart_clock()
        atexit.register(self._finish)  # a script that ends has its last checkpoint
        try:
            self._thread.start()
        except BaseException:  # there are too many threads, or Ctrl-C
            atexit.unregister(self._finish)
            raise

    def ask_for(self) -> None:
        """Ask the other ranks to write this save, which they have only staged so far."""
        self._letters.ask_for()

    def is_asked_for(self) -> bool:
        """Whether some rank has asked, by ``ask_for``, that this save be written."""
        return self._letters.is_asked_for()

    def fail(self, error: Exception) -> None:
        """Fail the save before it is started on this rank, and tell the other ranks."""
        self.error = error
        self._letters.fail(in_words(error))

    @property
    def is_over(self) -> bool:
        """Whether the save's thread on this rank has ended, or was never started."""
        return not self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """How many seconds ago the save began on this rank."""
        return time.perf_counter() - self._began

    def join(self, seconds: float | None) -> None:
        """Wait until the save is over on this rank, for ``seconds`` at most; None has no limit."""
        self._thread.wait(seconds)

    def hurry(self, seconds: float) -> None:
        """Have the save wait for other ranks, which may be gone, no longer than ``seconds``."""
        self._letters.hurry(seconds)

    def give_up(self, why: str) -> None:
        """Stop waiting for the save; what its thread still does makes no checkpoint, or a whole one."""
        self.is_given_up = True
        self.error = self.error or CheckpointError(why)
        self._letters.cancel(why)

    def burn_letters(self) -> None:
        """Delete this rank's letters of the save from the store, once the save is over on all ranks."""
        self._letters.burn()

    def _run(self) -> None:
        try:
            self._save()
        except ToldOfFailure as error:
            self.error = error
            self._tidy(error)
        except Exception as error:  # whatever it is, the others are to hear of it, and whoever asks how it went
            self.error = error
            self._tidy(error)
            self._tell_of(error)
        finally:
            atexit.unregister(self._finish)
            # Through these it would keep the memory of what it has written from.
            del self._writing, self._staging, self.shards, self.copying

    def _finish(self) -> None:
        """At the end of the process: wait for a save that nobody has waited for."""
        _logger.info("waiting for %s to be saved", self.path)
        self._letters.hurry(PATIENCE_SECONDS)
        if not self._thread.wait(self._seconds):
            _logger.error("%s is not saved: the storage took longer than %g seconds", self.path, self._seconds)

    def _save(self) -> None:
        writing, letters, is_first = self._writing, self._letters, self._writing.is_first
        if self.copying is not None:  # in no variable: an error keeps those, and with that the memory copied into
            self.copying.run()
        if self._after is not None:
            self._after.join(None)
            self._after = None
        if is_first:
            writing.make_folder(replaces=self._replaces)
            letters.post("begun")
        else:
            letters.wait("begun", [0])
        written = writing.write(self.shards)
        if self.copying is not None:
            self.copying.make_sure(self._seconds)
        letters.post("written", written)
        if is_first:
            of_ranks = letters.wait("written", range(writing.draft.num_ranks))
            letters.raise_if_failed()
            writing.commit(of_ranks)
            letters.post("made")
            _logger.info("checkpoint %s was saved in %.2f s", self.path, time.perf_counter() - self._began)
        else:
            letters.wait("made", [0])
        self._staging.forget(writing.generation)
        self.is_made = True
        if is_first:
            writing.retain(self._retention)

    def _tidy(self, error: Exception) -> None:
        if self._writing.is_first:
            _logger.warning("checkpoint %s was not saved: %s", self.path, error)
            self.is_in_log = True
            self._writing.discard()

    def _tell_of(self, error: Exception) -> None:
        try:
            self._letters.fail(in_words(error))
        except BoardGone as another:
            _logger.warning("the other ranks could not be told that this save has failed: %s", another)
