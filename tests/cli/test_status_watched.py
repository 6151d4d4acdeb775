"""elastic-ext status as people look at it: how far training is, lines that fit, and a screen that is kept up."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.agent.status.status import status_of
from elastic_ext.agent.status.text import line_of, words
from elastic_ext.cli import main
from elastic_ext.cli.ckpt import Terminal
from elastic_ext.cli.status import watch
from elastic_ext.profile.summary import mfu_in_words
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import WORKERS_FILE
from elastic_ext.records.measures import Measures
from elastic_ext.records.text import cut, wrapped
from tests.agent.status.test_agent_status import LEFT, NOW, PLAIN, WITH_AGENT, metrics, write_all

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 120.0


# ---- how far training is ----


def test_progress_is_told_with_the_time_to_the_epochs_end_and_the_age_of_the_last_checkpoint() -> None:
    far = Measures(
        epoch=3, num_epoch_steps_left=301, steps_per_second=2.5, checkpoint_step=20, checkpoint_time=NOW - 90
    )
    status = status_of(replace(PLAIN, metrics=(metrics(0, measures=far), metrics(1, step=41))))
    assert status.progress is not None
    assert (status.progress.step, status.progress.seconds_left) == (41, 120.0)
    assert (
        "  progress       step 41 in epoch 3; 300 steps left of the epoch, about 2 min; last checkpoint of step 20, "
        "1 min ago\n"
    ) in words(status)
    ended = status_of(replace(PLAIN, living=frozenset(), metrics=(metrics(0, measures=far), metrics(1, step=41))))
    assert ended.progress is not None and ended.progress.seconds_left is None


@pytest.mark.parametrize(
    ("measures", "told"),
    [
        (Measures(), "step 50\n"),
        (Measures(epoch=0), "step 50 in epoch 0\n"),
        (Measures(epoch=0, num_epoch_steps_left=11), "step 50 in epoch 0; 1 step left of the epoch\n"),
        (Measures(epoch=0, num_epoch_steps_left=10), "step 50 in epoch 0; 0 steps left of the epoch\n"),
        (Measures(epoch=0, num_epoch_steps_left=9), "step 50\n"),
        (Measures(num_epoch_steps_left=19, steps_per_second=0.0), "step 50; 9 steps left of the epoch\n"),
        (Measures(num_epoch_steps_left=10**400, steps_per_second=1.0), "left of the epoch\n"),
        (Measures(num_epoch_steps_left=19, steps_per_second=5e-324), "step 50; 9 steps left of the epoch\n"),
        (Measures(checkpoint_step=8, checkpoint_time=NOW + 9), "step 50; last checkpoint of step 8, 0 s ago\n"),
    ],
)
def test_progress_is_of_one_step_and_what_is_not_known_of_it_is_not_guessed(measures: Measures, told: str) -> None:
    status = status_of(replace(WITH_AGENT, metrics=(metrics(0, measures=measures), metrics(1, time=NOW - 9))))
    assert told in words(status)
    assert json.dumps(status.to_dict(), allow_nan=False)


def test_a_job_of_which_no_rank_has_told_a_step_has_no_progress() -> None:
    silent = replace(LEFT, workers=tuple(replace(each, step=None) for each in LEFT.workers))
    status = status_of(replace(WITH_AGENT, metrics=(), workers=silent))
    assert status.progress is None and "progress" not in words(status)


@pytest.mark.parametrize(("mfu", "told"), [(None, ""), (0.0, ""), (0.0049, ""), (0.006, "MFU 1%"), (0.414, "MFU 41%")])
def test_an_mfu_that_would_round_to_nothing_is_not_told(mfu: float | None, told: str) -> None:
    assert mfu_in_words(mfu) == told


# ---- lines that fit ----


def test_rows_are_cut_and_sentences_are_wrapped_to_the_width_of_a_terminal() -> None:
    status = status_of(replace(WITH_AGENT, damaged=("workers.json is damaged and " + "was written by nobody " * 9,)))
    lines = words(status, 50).splitlines()
    assert max(map(len, lines)) <= 50
    assert any(line.startswith("    0  pid 100") and line.endswith("...") for line in lines)
    at = lines.index("  trouble")
    assert lines[at + 1].startswith("    workers.json") and lines[at + 2].startswith("      ")
    assert " ".join(words(status).split()) == " ".join(words(status, 200).split())
    assert len(line_of(status, 30)) == 30 and line_of(status, 30).endswith("...")


def test_words_that_have_no_space_are_never_broken() -> None:
    path = "/a/very-long/" + "path/" * 20
    assert wrapped(f"it is {path} there", 40, first="  name ", rest="       ") == [
        "  name it is",
        f"       {path}",
        "       there",
    ]
    assert wrapped("as long as it is", None, first="- ") == ["- as long as it is"]
    assert (cut("12345678", 8), cut("123456789", 8), cut("12345", 2), cut("a\x1bb", None)) == (
        "12345678",
        "12345...",
        "...",
        "a b",
    )


# ---- again and again ----


class Pages(io.StringIO):
    """An output that ends what goes on until Ctrl-C once it has ``most`` of something."""

    def __init__(self, mark: str, most: int) -> None:
        super().__init__()
        self._mark = mark
        self._most = most

    def flush(self) -> None:
        if self.getvalue().count(self._mark) >= self._most:
            raise KeyboardInterrupt


def test_where_the_output_is_no_terminal_one_status_follows_another() -> None:
    out, looks = Pages("of", 3), iter(range(9))

    def look(terminal: Terminal) -> int:
        number = next(looks)
        terminal.tell({"number": number}, f"page {number} of many")
        return 0

    assert watch(look, Terminal(out, out, as_json=False), 0.1) == 130
    assert out.getvalue() == "page 0 of many\n\npage 1 of many\n\npage 2 of many\n\n"
    out = Pages("number", 2)
    assert watch(look, Terminal(out, out, as_json=True), 0.1) == 130
    assert out.getvalue() == '{"number": 3}\n{"number": 4}\n'


def test_what_is_not_there_is_not_watched_and_what_goes_away_ends_it() -> None:
    out, err, statuses = io.StringIO(), io.StringIO(), iter([2, 0, 2])

    def look(terminal: Terminal) -> int:
        status = next(statuses)
        if status:
            terminal.complain("nothing here")
        else:
            terminal.say("something")
        return status

    assert watch(look, Terminal(out, err, as_json=False), 0.1) == 2
    assert (out.getvalue(), err.getvalue()) == ("", "elastic-ext: nothing here\n")
    assert watch(look, Terminal(out, err, as_json=False), 0.1) == 2
    assert (out.getvalue(), err.getvalue()) == ("something\n\n", "elastic-ext: nothing here\n" * 2)


def test_complaints_are_not_among_the_lines_of_json_and_ctrl_c_ends_the_first_look_too() -> None:
    out, err, statuses = Pages("{", 2), io.StringIO(), iter([0, 1, 0])

    def look(terminal: Terminal) -> int:
        status = next(statuses)
        if status:
            terminal.complain("nobody answers")
        else:
            terminal.tell({"healthy": True}, "")
        return status

    assert watch(look, Terminal(out, err, as_json=True), 0.1) == 130
    assert (out.getvalue(), err.getvalue()) == ('{"healthy": true}\n' * 2, "elastic-ext: nobody answers\n")

    def interrupted(_: Terminal) -> int:
        raise KeyboardInterrupt

    assert watch(interrupted, Terminal(out, err, as_json=True), 0.1) == 130


def test_a_row_as_wide_as_the_screen_keeps_its_last_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    monkeypatch.setenv("LINES", "3")
    out = io.StringIO()
    Terminal(out, out, as_json=False).paint("12345\nab\n67890\n")
    assert out.getvalue() == "\x1b[H\x1b[K12345\n\x1b[Kab\n\x1b[J67890", "nothing is cleared behind a row that is full"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "run"])
def test_seconds_that_cannot_be_waited_are_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", f"--watch={seconds}"])
    assert "allowed: seconds from 0.1 to 86400; a RUN_DIR goes before --watch" in capsys.readouterr().err


_IN_A_GROUP = "import os, sys; os.setpgid(0, 0); from elastic_ext.cli import main; sys.exit(main())"


OWN, FORMER = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""What shows a screen without a cursor, and the former one with its cursor."""


class Screen:
    """A terminal of 12 lines and 70 columns, on which a command of elastic-ext runs; what it writes is kept.

    The command has a process group of its own, with its parent outside: SIGTSTP stops no other.
    """

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 70, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-c", _IN_A_GROUP, *arguments]
        environ = {**kept, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ)
        os.close(slave)
        self.written = ""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, num_times: int = 1) -> None:
        end = time.monotonic() + END_SECONDS
        with self._more:
            while len(re.findall(pattern, self.written)) < num_times:
                assert self._more.wait(end - time.monotonic()), self.written

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the command has ended; gives its exit status."""
        status = self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        os.close(self._master)
        return status

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                with self._more:
                    self.written += data.decode()
                    self._more.notify_all()
        except OSError:  # as Linux says that nobody has it open any more
            pass


def test_a_terminal_shows_one_status_over_the_other_and_ctrl_c_leaves_the_last(tmp_path: Path) -> None:
    write_all(tmp_path, this_process())
    screen = Screen("status", str(tmp_path), "--watch", "0.2")
    screen.wait_for(r"\x1b\[H", 2)
    (tmp_path / WORKERS_FILE).write_bytes(b"{")
    screen.wait_for("in trouble")
    assert screen.end() == 130
    own, former = screen.written.split(FORMER)
    assert own.startswith(f"{OWN}\x1b[H") and "\x1b[2J" not in own
    frames = own.split("\x1b[H")[1:]
    for frame in frames:
        lines = re.sub(r"\x1b\[[KJ]", "", frame).split("\r\n")
        assert len(lines) <= 12 and max(map(len, lines)) <= 70
    assert frames[0].startswith("\x1b[Kj: running, 1 rank of 4 here\r\n")
    assert frames[0].split("\x1b[J")[1].endswith("more)")
    assert former.startswith("j: running, 1 rank of 4 here, in trouble\r\n") and "last events" in former


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_or_stops_it_gives_the_terminal_back(tmp_path: Path, number: signal.Signals) -> None:
    write_all(tmp_path, this_process())
    screen = Screen("status", str(tmp_path), "--watch", "1000")
    screen.wait_for(r"more\)")
    if number == signal.SIGTERM:
        screen.process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(screen.process.pid, os.WUNTRACED)[1])
        screen.wait_for(re.escape(FORMER))
        assert screen.written.endswith(FORMER)
        screen.process.send_signal(signal.SIGCONT)
        screen.wait_for(r"more\)", 2)  # long before another look
    assert screen.end(number) == -number
    own = screen.written.split(FORMER)
    assert own.pop() == "" and len({*own}) == 1 and own[0].startswith(f"{OWN}\x1b[H")


def test_what_is_not_there_is_told_without_another_screen(tmp_path: Path) -> None:
    screen = Screen("status", str(tmp_path / "none"), "--watch")
    assert screen.wait() == 2
    assert OWN not in screen.written and screen.written.count("elastic-ext: ") == 1
