"""Which master an agent uses: one at an address, one that the agent starts and restarts itself, or none."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from elastic_ext.agent.config_writer import ConfigWriter
from elastic_ext.agent.journal import Journal
from elastic_ext.errors import in_words
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.credentials import make_token, read_token
from elastic_ext.master.tuning import Mode
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.records.agent import MASTER_FILE
from elastic_ext.records.files import read_at_most
from elastic_ext.records.text import expanded, on_one_line

from .identity import NodeSelf, next_incarnation, node_id_of
from .link import FoundMaster, GivenMaster, MasterLink

__all__ = ["STATE_FOLDER", "MasterChoice", "OwnMaster", "link_with", "master_choice", "tuning_mode"]

_logger = logging.getLogger(__name__)


# --- a master that an agent starts by itself, as a process beside it, and starts again should it die -----------------
# What the job's master remembers lies in the run directory, so that one that is started again goes on as the same. It
# ends with the agent, however that ends: the process holds one end of a pipe, and the agent the other.

_HOST = "127.0.0.1"
STATE_FOLDER = "master"
"""The folder in the agent's run directory that holds the master's store."""
_PORT_FILE, _TOKEN_FILE, _LOG_FILE = "master.port", "master.token", "master.log"
_MOST_STARTS = 10
"""The most starts of the master, one after another, that did not last ``_STEADY_SECONDS``."""
_STEADY_SECONDS = 60.0
_END_SECONDS = 3.0
_BEAT_SECONDS = 2  # of one node, which costs nothing
_REFUSED = 2  # as a master ends that cannot be started so
_MOST_PORT_BYTES = 16
_MOST_CHARACTERS = 300


class OwnMaster:
    """A master that an agent starts as a process beside it, and starts again should it die; for the link's thread."""

    is_own = True

    def __init__(
        self,
        run_dir: Path,
        job: str,
        journal: Journal,
        backoff: Backoff,
        *,
        tuning: str = "advise",
        command: Sequence[str] = (sys.executable, "-m", "elastic_ext.master"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._job = job
        self._journal = journal
        self._backoff = backoff
        self._tuning = tuning
        self._command = command
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._has_given_up = False

    def find(self) -> FoundMaster | None:
        """Where the master is, which is started if it does not run; None until it listens, or once it is given up."""
        if self._has_given_up:
            return None
        if self._process is None:
            if self._clock() >= self._start_at:
                self._start()
            return None
        if (status := self._process.poll()) is not None:
            self._has_ended(self._process.pid, status)
            return None
        port = self._port()
        if port is None:
            return None
        place = MasterPlace(address=Address(host=_HOST, port=port), token_file=self._run_dir / _TOKEN_FILE)
        return FoundMaster(place=place, pid=self._process.pid)

    def close(self) -> None:
        """End the master's process, and remove the files by which it is found."""
        self._has_given_up = True
        self._let_go()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in (_PORT_FILE, MASTER_FILE):  # there is nobody to be found
            with contextlib.suppress(OSError):
                (self._run_dir / name).unlink(missing_ok=True)

    def _start(self) -> None:
        run_dir = self._run_dir
        try:
            _ensure_token(run_dir / _TOKEN_FILE)
            (run_dir / _PORT_FILE).unlink(missing_ok=True)  # of the one before
            with contextlib.ExitStack() as at_end, contextlib.ExitStack() as undo:
                reader, writer = os.pipe()  # no process has the writer but this one
                at_end.callback(os.close, reader)
                undo.callback(os.close, writer)
                log = at_end.enter_context(open(run_dir / _LOG_FILE, "wb"))
                self._process = subprocess.Popen(
                    [*self._command, *self._arguments(reader)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reader,),
                    start_new_session=True,
                )
                undo.pop_all()
            self._lifeline, self._started_at = writer, self._clock()
        except (OSError, ValueError) as error:
            self._try_again(f"this agent cannot start a master: {in_words(error)}")

    def _arguments(self, lifeline: int) -> list[str]:
        run_dir = self._run_dir
        files = ["--port-file", run_dir / _PORT_FILE, "--state-dir", run_dir / STATE_FOLDER]
        files += ["--token-file", run_dir / _TOKEN_FILE]
        often = ["--beat-seconds", str(_BEAT_SECONDS), "--tuning", self._tuning]
        return [
            "--port",
            "0",
            "--bind",
            _HOST,
            "--job",
            self._job,
            *map(str, files),
            *often,
            "--lifeline",
            str(lifeline),
        ]

    def _port(self) -> int | None:
        """The port at which the master listens; None until it does."""
        try:
            text = read_at_most(self._run_dir / _PORT_FILE, _MOST_PORT_BYTES).decode("ascii", "replace")
        except OSError:
            return None
        return int(text) if text.endswith("\n") and text.strip().isdecimal() else None

    def _has_ended(self, pid: int, status: int) -> None:
        self._process = None
        self._let_go()
        if self._clock() - self._started_at >= _STEADY_SECONDS:
            self._backoff.forget()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        why = f"the master that this agent has started (pid {pid}) {how}{self._last_words()}"
        if status == _REFUSED:
            self._give_up(why)
        else:
            self._try_again(why)

    def _give_up(self, why: str) -> None:
        self._has_given_up = True
        words = f"{why}; this agent does not start it again, and training goes on without a master"
        self._journal.tell("master-given-up", words, is_bad=True)

    def _try_again(self, why: str) -> None:
        if self._backoff.num_tries >= _MOST_STARTS:
            return self._give_up(f"{why}; that was start number {_MOST_STARTS + 1} in a row that did not last")
        self._start_at = self._clock() + self._backoff.next_seconds()
        words = f"{why}; training goes on, and this agent starts the master again"
        self._journal.tell("master-ended", words, is_bad=True)

    def _last_words(self) -> str:
        try:
            lines = read_at_most(self._run_dir / _LOG_FILE, 1 << 20).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {on_one_line(last)[:_MOST_CHARACTERS]}" if last else ""

    def _let_go(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _ensure_token(path: Path) -> None:
    """Make a token in ``path`` unless there is a valid one, such as that of an earlier master of the job."""
    try:
        read_token(path)
    except ValueError as error:
        if os.path.lexists(path):
            _logger.debug("%s; a new token is made", error)
            path.unlink()
        make_token(path)


# --- which master an agent is to have, as its command line says: one that runs somewhere, its own, or none -----------

MasterChoice = MasterPlace | Literal["own", "none"]
_OFF = "off"
_MODES: Mapping[str, Mode] = {"off": "off", "advise": "advise", "auto": "auto"}
_MOST_NAME = 200
_FIRST_SECONDS, _MOST_SECONDS = 0.2, 30.0


def master_choice(options: argparse.Namespace) -> MasterChoice:
    """The master that the command line asks for; ValueError for an address, token or certificate of no use."""
    if options.master is None:
        _check_alone(options)
        return "own" if options.standalone else "none"
    if options.master.strip().lower() == _OFF:
        return "none"
    try:
        address = Address.parse(options.master)
    except ValueError as error:
        raise ValueError(f"--master: {error}; or off, for no master") from None
    token_file = None if options.token_file is None else expanded(options.token_file).absolute()
    ca_file = None if options.master_ca is None else expanded(options.master_ca).absolute()
    if token_file is not None:
        read_token(token_file)
    if ca_file is not None:
        try:
            read_at_most(ca_file, 0)
        except OSError as error:
            raise ValueError(f"--master-ca cannot be read: {in_words(error)}") from None
    return MasterPlace(address=address, token_file=token_file, ca_file=ca_file)


def _check_alone(options: argparse.Namespace) -> None:
    """Refuse options of a named master where none is named: ValueError, as the user believes that there is one."""
    given = {"--token-file": options.token_file, "--master-ca": options.master_ca}
    names = [name for name, value in given.items() if value is not None]
    if names:
        verb = "is" if len(names) == 1 else "are"
        other = "; the master of --standalone has a token of its own" if options.standalone else ""
        raise ValueError(
            f"{' and '.join(names)} {verb} given, and there is no --master to use it with{other}; give "
            "--master HOST:PORT as well, or --master off where there is to be none"
        )


def tuning_mode(options: argparse.Namespace, choice: MasterChoice) -> Mode:
    """What the tuner of the agent's own master may do; ValueError where something else was asked for."""
    given = options.tuning
    if given is None:
        return "advise"
    found = _MODES.get(given.strip().lower())
    if found is None:
        raise ValueError(f"--tuning is {given!r}; allowed: {', '.join(_MODES)}")
    if choice == "none" and found != "off":
        raise ValueError(
            f"--tuning is {found}, and there is no master that could tune; --standalone starts one, --master names one"
        )
    if isinstance(choice, MasterPlace):
        raise ValueError(
            f"--tuning is {found}, and the master at {choice.address} has a --tuning of its own; leave it out, and "
            "give --tuning to that one, or set tuning.mode in the config"
        )
    return found


def link_with(
    choice: MasterChoice,
    run_dir: Path,
    config_writer: ConfigWriter,
    journal: Journal,
    *,
    job: str,
    agent_id: str,
    host: str,
    library: str,
    started_at: float,
    tuning: Mode = "advise",
) -> MasterLink | None:
    """The link of an agent to its master, not started; None without a master. ``tuning`` is for the agent's own one."""
    if choice == "none":
        return None
    job = on_one_line(job)[:_MOST_NAME].encode(errors="replace").decode()  # as masters know it
    node = NodeSelf(
        node_id=node_id_of(run_dir, host),
        incarnation=next_incarnation(run_dir, now_ns=time.time_ns()),
        host=host,
        pid=os.getpid(),
        library=library,
        started_at=started_at,
        job=job,
        agent_id=agent_id,
    )
    if choice == "own":
        chance = random.Random(f"{node.node_id}/{node.incarnation}/own")
        backoff = Backoff(chance, first_seconds=_FIRST_SECONDS, most_seconds=_MOST_SECONDS)
        own = OwnMaster(run_dir, job, journal, backoff, tuning=tuning)
        return MasterLink(run_dir, node, own, config_writer, journal)
    return MasterLink(run_dir, node, GivenMaster(choice), config_writer, journal)
