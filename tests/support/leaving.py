"""Jobs that are told to end: a script of several processes that say where they are, and what is saved of them."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, read_commit
from tests.support.ports import free_port
from tests.support.scripts import begun

__all__ = ["Job", "started"]

_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
_DEADLINE_SECONDS = 60


class Job:
    """Processes of one training, and what they print. With ``launched`` the one process is torchrun's own."""

    def __init__(
        self, folder: Path, script: str, *arguments: str, num_ranks: int, seconds: float, launched: bool = False
    ) -> None:
        self.folder = folder
        file = folder / "loop.py"
        file.write_text(script)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "ELASTIC_EXT_SHUTDOWN_SECONDS": str(seconds),
            "OMP_NUM_THREADS": "1",
        }
        argv = [str(file), str(folder), *arguments]
        if launched:
            argv = [*_TORCHRUN, str(num_ranks), *argv]
            environs = [environ]
        else:
            environ |= {
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()) if num_ranks > 1 else "0",
            }
            environs = [{**environ, "RANK": str(rank)} for rank in range(num_ranks)]
        self.processes = [begun(argv, env=each) for each in environs]
        self.lines: list[list[str]] = [[] for _ in self.processes]
        self._begun: list[psutil.Process] = []  # by these processes, as far as they are known

    def wait_for(self, line: str, *, times: int = 1, of: int | None = None) -> None:
        """Until all have printed it, or one of them, so often."""
        end = threading.Timer(_DEADLINE_SECONDS, self.kill)  # then nothing more is printed
        end.start()
        try:
            self._read_until(line, times, of)
        finally:
            end.cancel()
        self.note_children()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _read_until(self, line: str, times: int, of: int | None) -> None:
        for number, (process, lines) in enumerate(zip(self.processes, self.lines, strict=True)):
            if of is not None and number != of:
                continue
            assert process.stdout is not None
            left = times
            for text in process.stdout:
                lines.append(text.rstrip())
                left -= lines[-1] == line
                if left == 0:
                    break
            else:
                raise AssertionError("\n".join(lines))

    def note_children(self) -> list[psutil.Process]:
        """The processes that these have started, and those that they have."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                self._begun += psutil.Process(process.pid).children(recursive=True)
        return self._begun

    def send(self, number: signal.Signals, *, to: int = 0) -> None:
        self.processes[to].send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """To everything that these have started too."""
        for process in self.processes:
            os.killpg(process.pid, number)

    def go_on(self) -> None:
        """Have those that wait for a line get one; a signal that was sent before has come by then."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.flush()

    def end(self) -> list[int]:
        """Their exit statuses; what they have printed besides is in ``lines``."""
        for process, lines in zip(self.processes, self.lines, strict=True):
            output, _ = process.communicate(timeout=_DEADLINE_SECONDS)
            lines += output.splitlines()
        return [process.wait() for process in self.processes]

    def left_over(self) -> list[psutil.Process]:
        """Of what they had started, what does not end."""
        _, alive = psutil.wait_procs(self._begun, timeout=20)
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    @property
    def text(self) -> str:
        return "\n".join(line for lines in self.lines for line in lines)

    def told(self, pattern: str) -> list[str]:
        """What lines have of ``pattern`` in their one group, in order."""
        return re.findall(pattern, self.text, flags=re.MULTILINE)

    @property
    def saved(self) -> dict[str, int]:
        """The step of every checkpoint, by its name."""
        found = sorted(self.folder.glob(f"storage/fsdp_checkpoint/*/*/{COMMIT}"))
        return {path.parent.name: read_commit(path.parent).global_step for path in found}


@contextmanager
def started(
    folder: Path,
    script: str,
    *arguments: str,
    num_ranks: int = 1,
    seconds: float = 60.0,
    launched: bool = False,
) -> Iterator[Job]:
    """A job whose processes do not outlive this."""
    job = Job(folder, script, *arguments, num_ranks=num_ranks, seconds=seconds, launched=launched)
    try:
        yield job
    finally:
        for begun in job.note_children():
            with suppress(psutil.NoSuchProcess):
                begun.kill()
        for process in job.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
