"""In training: the handle of a process that predicts the memory of a model's steps, and its answers so far.

analysis_process.py is the main of that process, and analysis.py is what it does.

Training asks once and looks now and then; it never waits. One thread starts the process, reads what it answers, and
sees to its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from elastic_ext.ranks.deadlines import OwnedThread

from .questions import AnalysisRequest, MemoryAnswer, Question

__all__ = ["THREAD_NAME", "AnalysisClient"]

_logger = logging.getLogger(__name__)

THREAD_NAME = "elastic_ext analysis"
_BEGIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from elastic_ext.profile.memory.analysis_process import main; main()"
)
_MOST_SECONDS = 900.0
_MOST_LINE_BYTES = 1 << 16
_END_SECONDS = 5.0


class AnalysisClient:
    """One question to a process that predicts the memory of steps, and its answers; ``close`` when training ends."""

    def __init__(
        self,
        question: Question,
        *,
        most_seconds: float = _MOST_SECONDS,
        command: Sequence[str] = (sys.executable, "-c", _BEGIN),
    ) -> None:
        self._question = question
        self._most_seconds = most_seconds
        self._command = [*command, json.dumps(_path())]
        self._answers: list[MemoryAnswer] = []  # only ever appended to, on the thread
        self._is_over = threading.Event()
        self._closing, close_here = os.pipe()
        self._thread = OwnedThread(self._run, name=THREAD_NAME, wake=partial(os.close, close_here))

    def start(self) -> None:
        """Ask the question on a thread, and come back at once."""
        self._thread.start()

    @property
    def answers(self) -> Sequence[MemoryAnswer]:
        """The answers that have come so far."""
        return tuple(self._answers)

    @property
    def is_over(self) -> bool:
        """Whether no more answers will come."""
        return self._is_over.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no more answers will come; False if the time was up before. Training never calls this."""
        return self._is_over.wait(timeout_seconds)

    def close(self) -> None:
        """End the process that predicts memory, whatever it does. Closing twice is allowed."""
        if not self._thread.stopping.is_set() and self._thread.close(_END_SECONDS):
            os.close(self._closing)

    def _run(self) -> None:
        try:
            problem = self._ask()
        except (OSError, ValueError) as error:  # no process could be started, or what it says is no answer
            problem = f"the process that predicts memory failed: {error}"
        if problem is not None:
            self._answers.append(MemoryAnswer(problem=problem))
        self._is_over.set()

    def _ask(self) -> str | None:
        """Start the process and read its answers until the end; gives why some are missing, or None."""
        until = time.monotonic() + self._most_seconds
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for training, which ends it
        )
        assert process.stdin is not None and process.stdout is not None
        problem: str | None = "reading its answers failed"
        try:
            problem = self._converse(process.stdin.fileno(), process.stdout.fileno(), until)
        finally:
            if problem is not None or not _ends_by_itself(process):
                process.kill()
            status = process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
        if problem is not None or status == 0:
            return problem
        return f"the process that predicts memory {_ending(status)}"

    def _request(self) -> bytes:
        argv = tuple(map(str, sys.argv))
        request = AnalysisRequest(path=tuple(_path()), argv=argv, folder=os.getcwd(), question=self._question)
        return request.to_json().encode() + b"\n"

    def _converse(self, questions: int, answers: int, until: float) -> str | None:
        """Send the question and take answers, by two file descriptors; gives why their end did not come, or None.

        A question may be more than a pipe holds, and the process reads it only after a while: so writing and reading
        are waited for together.
        """
        poll = select.poll()
        for descriptor in (answers, self._closing):
            poll.register(descriptor, select.POLLIN)
        os.set_blocking(questions, False)
        poll.register(questions, select.POLLOUT)
        question = self._request()
        rest = b""
        while True:
            left = until - time.monotonic()
            ready = dict(poll.poll(max(left, 0.0) * 1000))
            if self._closing in ready:
                return "training has ended"
            if not ready:
                return f"the memory of steps was not predicted within {self._most_seconds:.0f} seconds"
            if questions in ready:
                question = question[_write(questions, question) :]
                if not question:
                    poll.unregister(questions)
            if answers not in ready:
                continue
            data = os.read(answers, _MOST_LINE_BYTES)
            *lines, rest = (rest + data).split(b"\n")
            self._answers.extend(MemoryAnswer.from_json(line.decode()) for line in lines)
            if len(rest) > _MOST_LINE_BYTES:
                raise ValueError(f"an answer is longer than {_MOST_LINE_BYTES} bytes")
            if not data:
                return None


def _path() -> list[str]:
    """The folders where modules are looked for: entries that are no text are left out, as an import does."""
    return [each for each in sys.path if isinstance(each, str)]


def _write(pipe: int, question: bytes) -> int:
    """Write to a pipe; gives how many bytes it took: all where nobody reads any more, as the end of answers tells."""
    try:
        return os.write(pipe, question)
    except BrokenPipeError:
        return len(question)
    except BlockingIOError:
        return 0


def _ends_by_itself(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _ending(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    if -status == signal.SIGXCPU:
        return "used up its limit of CPU time"
    with contextlib.suppress(ValueError):  # a signal without a name
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
