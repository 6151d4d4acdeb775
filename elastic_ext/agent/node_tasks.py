"""The tasks of an agent about once a second, besides starting and stopping workers: it syncs the config between nodes,
monitors workers, and finds hangs and stragglers. Also what a restart costs, in steps and seconds.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.heartbeat import heartbeat_file, read_heartbeat
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.ranks.notices import ended_file
from elastic_ext.records.agent import WORKERS_FILE, Since, WorkersRecord
from elastic_ext.records.files import write_whole
from elastic_ext.records.metrics import CAN_GO_ON, TOLD_TO_END, JobEvent
from elastic_ext.records.text import counted

from .config_writer import ConfigWriter
from .control import Control
from .event_files import newest_event
from .folder import NodeFolders
from .journal import Journal
from .members import Drains
from .workers.hangs import Hang, WaitingNews, find_hang, standings_from_json, standings_to_json
from .workers.monitor import Monitor, Watched, WorkersLook
from .workers.stacks import capture
from .workers.stragglers import SlowWorkers

__all__ = ["Begun", "LastProgress", "NodeTasks", "begun_in", "cost_in_words", "left_in", "resumed_in_words"]


# --- the cost of a restart -------------------------------------------------------------------------------------------
# What a restart has cost: steps that are taken again, and time; pure, but for reading what workers have written.

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LastProgress:
    """How far training was when its workers were ended."""

    step: int
    """The last committed step."""
    clock: float
    """When the workers were ended, in seconds of ``time.monotonic``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Where training began in a round, as a rank's "training-began" event says."""

    step: int
    """The last committed step in the checkpoint that training went on from."""
    global_batch_size: int | None
    checkpoints: str | None
    """Where checkpoints are saved, and how often, in words; None where none are saved."""
    saves_on_signals: bool = False
    """Whether training ends with a checkpoint where it is told to end."""
    resumed_from: str | None = None
    """The checkpoint that training went on from; None where there is none."""
    saved_by_ranks: int | None = None
    """How many ranks had saved that checkpoint."""


def cost_in_words(ended: LastProgress, begun: Begun, *, now: float) -> str:
    """What a restart has cost in steps, samples and seconds, in a sentence; ``now`` in seconds of ``time.monotonic``.

    Called once the first step after the restart has been taken.
    """
    num_steps = max(ended.step - begun.step, 0)
    if num_steps == 0:
        lost = "no step is taken again"
    else:
        lost = f"{counted(num_steps, 'step')} taken again"
        if begun.global_batch_size is not None:
            lost += f" ({num_steps * begun.global_batch_size} samples)"
    return f"training goes on after step {begun.step}: {lost}, and {now - ended.clock:.1f} seconds without a step"


def resumed_in_words(begun: Begun) -> str:
    """The checkpoint from which a job that is started resumes, its step, and how many ranks saved it: a sentence."""
    words = f"training resumes from {begun.resumed_from}, of step {begun.step}"
    return words if begun.saved_by_ranks is None else f"{words}, saved by {counted(begun.saved_by_ranks, 'rank')}"


def begun_in(file: Path, *, since: float) -> Begun | None:
    """Where a rank's training began after ``since`` (seconds since 1970), by its event file; None if it has not."""

    event = _newest(file, ("training-began",), since=since)
    if event is None:
        return None
    size, num_ranks = event.details.get("global_batch_size"), event.details.get("saved_by_ranks")
    resumed_from = event.details.get("resumed_from")
    saving = [event.details.get(name) for name in ("checkpoints", "checkpoint_interval")]
    return Begun(
        step=event.step,
        global_batch_size=size if type(size) is int else None,
        checkpoints=", ".join(each for each in saving if type(each) is str) or None,
        saves_on_signals=event.details.get("saves_on_signals") is True,
        resumed_from=resumed_from if type(resumed_from) is str else None,
        saved_by_ranks=num_ranks if type(num_ranks) is int else None,
    )


def left_in(file: Path, *, since: float) -> str | None:
    """What a rank that was told to end after ``since`` says in its event file of where training can go on."""
    event = _newest(file, (CAN_GO_ON, TOLD_TO_END), since=since)
    return None if event is None else event.text


def _newest(file: Path, kinds: Sequence[str], *, since: float) -> JobEvent | None:
    """The newest event of these kinds in an event file; None where it is older than ``since``, or there is none."""
    event = newest_event(file, kinds, most_bytes=_MOST_BYTES)
    return None if event is None or event.time < since else event


# --- what an agent does for its node besides starting and stopping workers, about once a second ----------------------
# It keeps the config file and hands versions to other nodes, looks at the workers and writes what it sees, finds hangs
# and who is slow, and says what a restart has cost.

_CAPTURE_SECONDS = 15.0  # for the stacks of other nodes


class NodeTasks:
    """An agent's tasks besides starting and stopping workers; the agent's loop calls ``look`` for what is due."""

    def __init__(
        self,
        folders: NodeFolders,
        journal: Journal,
        config_writer: ConfigWriter,
        control: Control,
        monitor: Monitor,
        slow_workers: SlowWorkers,
        *,
        drains: Drains,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_begun`` is called after each rendezvous, once this node's config is the job's."""
        self.drains = drains
        """The requests over the control socket that nodes leave."""
        self._on_begun = on_begun
        self._folders = folders
        self._journal = journal
        self._config_writer = config_writer
        self._control = control
        self._monitor = monitor
        self._slow_workers = slow_workers
        self._board: RoundBoard | None = None
        self._membership_version = self._world_size = 0
        self._together: frozenset[int] = frozenset()
        self._waiting_news = WaitingNews()
        self._has_warned = False
        self._ended: LastProgress | None = None
        self._round = Since(0.0)
        self._is_after_others = False  # whether the round comes after one whose workers were ended
        self._has_told_begun = False

    def start(self) -> None:
        """Read the config file, and listen on the control socket."""
        self._config_writer.look()
        self._control.start()

    def begin_round(
        self, board: RoundBoard, *, membership_version: int, world_size: int, together: frozenset[int], is_new: bool
    ) -> None:
        """Begin the tasks of a new round, after the rendezvous: forget the workers before, and sync the config.

        ``together`` are the places of the nodes whose workers train together with those of this node. ``is_new`` says
        that this node joins a job that has worked already; it then takes the job's config.
        """
        self._board = board
        self._take(membership_version, world_size, together)
        self._monitor.forget()
        self._waiting_news = WaitingNews()
        self._round = Since(time.time())
        self._is_after_others = self._ended is not None
        self._slow_workers.forget(since=self._round.seconds)
        if is_new:
            self._set_config_aside()
        self._hand_config(offers=not is_new)
        self._on_begun()

    def go_on(self, board: RoundBoard, *, together: frozenset[int]) -> None:
        """Go on in a new round with the same workers, as nodes have met and none were started here."""
        self._board = board
        self._take(self._membership_version, self._world_size, together)
        self._hand_config(offers=True)

    def take_plan(self, *, membership_version: int, world_size: int, together: frozenset[int]) -> None:
        """Go on with the same workers in another world, which they have come to."""
        self._take(membership_version, world_size, together)
        self._waiting_news = WaitingNews()
        self._slow_workers.forget(since=time.time())
        self._monitor.count_anew()

    def _take(self, membership_version: int, world_size: int, together: frozenset[int]) -> None:
        self._membership_version, self._world_size, self._together = membership_version, world_size, together

    def look(self, workers: Sequence[Watched], *, waiting: str = "") -> Hang | None:
        """Do every task that is due: config, workers' records, events, stragglers. Gives a hang where there is one.

        ``waiting`` says which nodes wait to join, for the record.
        """
        seen = self._monitor.look(
            workers,
            restart=self._journal.restart,
            membership_version=self._membership_version,
            world_size=self._world_size,
        )
        if seen is None:
            return None
        self._config_writer.look()
        self._hand_config(offers=True)
        self._write(replace(seen.record, waiting=waiting))
        self._tell_begun(workers)
        self._tell_slow(workers)
        return self._judge(seen)

    def with_present_ranks(self, workers: Sequence[Watched]) -> tuple[Watched, ...]:
        """The workers with the ranks that they have by now, as far as they have told the monitor."""
        return self._monitor.with_present_ranks(workers)

    def note_end(self, workers: Sequence[Watched]) -> bool:
        """Note the last step of workers that end now, or have ended; whether any of them has taken a step."""
        steps = []
        for each in workers:
            reading = read_heartbeat(heartbeat_file(self._folders.pulses, each.seat))
            if reading is not None and reading.num_boundaries > 0:
                steps.append(reading.step)
        if steps and self._ended is None:
            self._ended = LastProgress(step=max(steps), clock=time.monotonic())
        return bool(steps)

    def saves_on_signals(self, seats: Iterable[int]) -> bool:
        """Whether some of the workers have begun training in this round that ends with a checkpoint if told to end."""
        files = (self._folders.run_dir / f"events-{seat}.jsonl" for seat in seats)
        found = (begun_in(file, since=self._round.seconds) for file in files)
        return any(begun is not None and begun.saves_on_signals for begun in found)

    def words_of_leaving(self, seats: Iterable[int]) -> str:
        """What workers that were told to end in this round say of where training can go on; empty if none says it."""
        files = (self._folders.run_dir / f"events-{seat}.jsonl" for seat in seats)
        return next((words for file in files if (words := left_in(file, since=self._round.seconds))), "")

    def tell_workers(self, ended: Mapping[int, str]) -> None:
        """Tell the workers of this node which seats' workers have ended and how, so that they do not wait for those."""
        for seat, words in ended.items():
            with contextlib.suppress(OSError):  # they find out
                write_whole(ended_file(self._folders.pulses, seat), words.encode(errors="replace"), durable=False)

    def capture(self, workers: Sequence[Watched], reason: str) -> None:
        """Write the stacks of this node's workers, and wait until other nodes have written theirs.

        Called on all nodes before any worker is ended.
        """
        captured = capture(
            workers,
            run_dir=self._folders.run_dir,
            pulse_dir=self._folders.pulses,
            reason=reason,
            py_spy=shutil.which("py-spy"),
        )
        words = "; ".join(map(str, captured.places)) or "no worker wrote its stacks"
        if captured.look_at:
            words += f"; look at this first: {captured.look_at}"
        words += f"; all stacks are in {captured.path}" if captured.path else "; the file of stacks cannot be written"
        self._journal.tell("stacks", words, path=str(captured.path or ""))
        if self._board is not None and len(self._together) > 1:
            try:
                self._board.exchange("captured", True, timeout_seconds=_CAPTURE_SECONDS, places=self._together)
            except BoardGone:
                return  # they are not heard of, and nothing is gained by waiting

    def end(self, workers: Sequence[Watched]) -> None:
        """Write how the workers have ended, and close the control socket and the monitor."""
        seen = self._monitor.look(
            workers,
            restart=self._journal.restart,
            membership_version=self._membership_version,
            world_size=self._world_size,
            at_once=True,
        )
        if seen is not None:
            self._write(seen.record)
        self._tell_begun(workers)
        self._control.close()
        self._monitor.close()

    # ---- the config ----

    def _set_config_aside(self) -> None:
        """Move an earlier job's config file out of the way, so that this node, which joins, takes the job's config."""
        if self._config_writer.path.parent != self._folders.run_dir:
            return  # a file that somebody has named, and may be everybody's
        try:
            kept = self._config_writer.set_aside()
        except OSError as error:
            words = f"the config file from before this node joined cannot be moved aside: {error}"
            self._journal.tell("trouble", words, is_bad=True)
            return
        if kept is not None:
            self._journal.tell("config-aside", f"the config that was here before this node joined is {kept} now")

    def _hand_config(self, *, offers: bool) -> None:
        """Announce this node's config to the other nodes if it is the newest, or take a newer one that is announced."""
        board = self._board
        if board is None or board.num_peers == 1:
            return
        try:
            theirs = board.read("config-version") or 0
            newest = self._config_writer.newest()
            if theirs > (newest[0] if newest else 0):
                self._config_writer.take(board.read("config"))
            elif offers and newest and newest[0] > theirs:
                board.post("config", newest[1])
                board.post("config-version", newest[0])
        except BoardGone:
            return

    # ---- the workers ----

    def _write(self, record: WorkersRecord) -> None:
        try:
            write_whole(self._folders.run_dir / WORKERS_FILE, f"{record.to_json()}\n".encode(), durable=False)
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._journal.tell("trouble", f"the record of the workers cannot be written: {error}", is_bad=True)

    def _judge(self, seen: WorkersLook) -> Hang | None:
        """The hang that the workers of all nodes show; None if there is none."""
        board, hang, said = self._board, seen.hang, seen.said
        if board is not None and len(self._together) > 1:
            try:
                wanted, name = (f"{each}/{self._membership_version}" for each in ("standings-wanted", "standings"))
                if any(each.is_over for each in seen.standings):
                    board.post(wanted, True)
                if board.read(wanted):
                    board.tell(name, standings_to_json(seen.standings))
                    told = [text for place, text in board.values_of(name).items() if place in self._together]
                    everyone = [each for text in told for each in standings_from_json(text)]
                    verdict = find_hang(everyone, world_size=self._world_size)
                    is_heard = len(told) == len(self._together)  # else one that has still to tell may be waited for
                    hang, said = verdict.hang if is_heard else None, verdict.said
            except (BoardGone, ValueError):
                hang = None
        if self._waiting_news.is_due(said, time.monotonic()):
            self._journal.tell("waiting", said)
        return hang

    def _tell_slow(self, workers: Sequence[Watched]) -> None:
        """Write an event for each worker that has become a straggler, or is one no longer."""
        seats = [each.seat for each in workers if each.state == "running"]
        with contextlib.suppress(BoardGone, ValueError):  # a node is gone, or of another version
            for news in self._slow_workers.look(seats, self._board, self._together):
                kind = "slow-worker" if news.is_slow else "slow-worker-over"
                self._journal.tell(kind, news.text, rank=news.rank, host=news.host)

    def _tell_begun(self, workers: Sequence[Watched]) -> None:
        """Write events once workers have taken their first step: where they save, and what they go on from.

        That is the checkpoint that a first start resumes from, or what a restart has cost.
        """
        if self._has_told_begun and not self._is_after_others:
            return
        begun = self._begun(workers)
        if begun is None:
            return
        if not self._has_told_begun:
            self._has_told_begun = True
            self._journal.tell("checkpoints", f"checkpoints: {begun.checkpoints or 'none are saved'}")
            if begun.resumed_from is not None and not self._is_after_others:
                self._journal.tell("resumed", resumed_in_words(begun), step=begun.step)
        if self._ended is not None and self._is_after_others:
            self._journal.tell("went-on", cost_in_words(self._ended, begun, now=time.monotonic()), step=begun.step)
            self._ended, self._is_after_others = None, False

    def _begun(self, workers: Sequence[Watched]) -> Begun | None:
        """Where training began in this round; None until a worker has ended a step of the round."""
        for each in workers:
            reading = read_heartbeat(heartbeat_file(self._folders.pulses, each.seat))
            if reading is not None and reading.num_boundaries > 0:
                return begun_in(self._folders.run_dir / f"events-{each.seat}.jsonl", since=self._round.seconds)
        return None
