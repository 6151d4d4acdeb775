"""The demo: a node joins a training job, loses a worker and leaves, and no process of the first node is restarted.

    make demo-members        or        python -m examples.nodes_come_and_go

Both nodes are on this machine, each an agent with two workers, as on two machines. The second one joins while the first
trains, takes half of each step, has a worker killed and joins with new ones, and is told to leave by a command. The
exit status is 0 only if the first node's processes are those that it began with, and no step was left out or taken
twice.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.training_job import NUM_RANKS, DemoError, Training

DEADLINE_SECONDS = 240.0
NUM_LINES = 3  # of the script's, by whose median speed is compared
_SCRIPT = Path(__file__).with_name("slow_samples.py")
_RATE = re.compile(r"step \d+: (\d+) samples/s")
_CHANGED = r"membership \d+ at step (\d+): \S+ {}; .* s without a step"
_LOST = r"membership \d+ at step \d+: rank \d+ \(pid {}\) .* go on after step \d+ without"
_SHOWN = re.compile(r"step \d+: |INFO membership |elastic-run [\d:]+ (?!  )")


def start(run_directory: Path, port: int, node: int, deadline_seconds: float) -> Training:
    """One node, whose output is echoed as far as it tells what happens."""
    meets = ["--nnodes=1:2", f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", "--rdzv-id=demo"]
    meets += ["--rdzv-conf=last_call_timeout=1"] if node == 0 else []  # nobody else comes as it starts
    return Training(
        run_directory,
        deadline_seconds,
        _SCRIPT,
        "--log-seconds=1",
        "--read-seconds=0.01",
        "--checkpoint-every=1000",
        launcher=["--members=live", "--local-addr=localhost"],
        meets=meets,
        node=node,
        shown=lambda line: line.removeprefix("INFO ") if _SHOWN.match(line) else None,
    )


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def run(*arguments: str) -> None:
    """Run ``elastic-ext ...`` as a person would in another terminal; DemoError where it fails."""
    print(f"$ elastic-ext {shlex.join(arguments)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "elastic_ext.cli", *arguments], check=False).returncode
    if status != 0:
        raise DemoError(f"the command ended with status {status}")


def rates(lines: Sequence[str]) -> list[float]:
    """Samples per second, by the lines that the script has printed."""
    return [float(match[1]) for line in lines if (match := _RATE.match(line))]


def speed(training: Training) -> float:
    """Samples per second from now on, by some lines of the script."""
    before = len(rates(training.lines)) + 1  # the first is of before and after
    training.wait_until(
        lambda: len(rates(training.lines)) >= before + NUM_LINES, "the script prints no speeds any more"
    )
    return statistics.median(rates(training.lines)[before : before + NUM_LINES])


def show(first: Training, folder: Path, port: int, deadline_seconds: float) -> tuple[float, float]:
    """Have a node join, lose a worker and leave; gives the samples per second without it and with it."""
    alone = speed(first)
    print("$ elastic-run ... (the same command, on a second node)", flush=True)
    second = start(folder, port, 1, deadline_seconds)
    try:
        first.wait_for_line(_CHANGED.format("joins"))
        together = speed(first)
        run("members", "--run-dir", str(first.run_directory))
        lose_worker(first, second)
        node = re.search(r"membership \d+ at step \d+: (\S+) joins", "\n".join(first.lines))
        assert node is not None
        run("members", "drain", node[1], "--run-dir", str(first.run_directory))
        first.wait_for_line(_CHANGED.format("leaves"))
        second.finish()
    finally:
        second.kill()
    first.wait_for_step(first.last_step() + 10)
    end = first.last_step() + 10
    run("config", "set", f"user.steps={end}", "--reason", "that is enough", "--file", str(first.config_file))
    first.finish()
    return alone, together


def lose_worker(first: Training, second: Training) -> None:
    """Kill a worker of the second node, and wait until others have joined in place of that node's."""
    joined = changes(first, "joins")
    pid = int(second.pids()[-1])
    print(f"$ kill -9 {pid} (a worker of the second node)", flush=True)
    os.kill(pid, signal.SIGKILL)
    first.wait_for_line(_LOST.format(pid))
    first.wait_until(lambda: changes(first, "joins") > joined, "no workers joined in place of those that were lost")


def changes(training: Training, what: str) -> int:
    """How many nodes have joined, or left, by the lines of a training."""
    return sum(re.search(_CHANGED.format(what), line) is not None for line in training.lines)


def check(first: Training) -> None:
    """DemoError unless training went on in the same processes, with each step once."""
    if len(first.pids()) != NUM_RANKS:
        raise DemoError(f"workers of the first node were restarted: their pids were {first.pids()}")
    checksums = first.checksums()
    if missing := sorted(set(range(1, max(checksums) + 1)) - set(checksums)):
        raise DemoError(f"steps {missing} were left out")
    if again := [step for step, found in checksums.items() if len(found) != 1]:
        raise DemoError(f"steps {again} were taken twice")


def main(deadline_seconds: float = DEADLINE_SECONDS) -> int:
    """Run the demo; gives its exit status."""
    with tempfile.TemporaryDirectory(prefix="elastic_ext-demo-") as folder:
        port = free_port()
        first = start(Path(folder), port, 0, deadline_seconds)
        try:
            alone, together = show(first, Path(folder), port, deadline_seconds)
            print(f"\n{alone:,.0f} samples/s with one node, {together:,.0f} with both")
            check(first)
        except DemoError as error:
            print(f"\nthe demo failed: {error}", file=sys.stderr)
            return 1
        finally:
            first.kill()
    print("a node joined, lost a worker and left while training went on: nothing was lost, and no step taken twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
