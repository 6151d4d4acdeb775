"""A master flooded by those who have no token: how long its own wait meanwhile, and what it holds.

Eight processes on one core call it without the token, or with a wrong one, in four ways (master_flood_strangers.py);
the master and 200 agents (master_load_agents.py) share another core. Beside it the same with eight processes that spin
on the first core and call nobody. The two are run in turn, some times.

Not measured: a flood from other machines, which has more processors than this one, and TLS.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Result, shortened, shown_value
from benchmarks.master_load import Load, LoadTable, Measured, Row, measured

__all__ = ["FLOOD", "SPINNING", "Flooded", "flooded", "main", "table_of"]

_ROOT = Path(__file__).resolve().parent.parent
FLOOD = ("messages", "calls", "connections", "silence") * 2
SPINNING = ("spinning",) * len(FLOOD)
_NUM_ROUNDS = 3
_END_SECONDS = 60.0
_MOST_TIMES = 1.5
_MOST_SECONDS = 0.1
_MOST_BYTES = 300e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Flooded:
    """What was seen of a master whose neighbours want its time."""

    measured: Measured
    num_refused: int
    """Calls of those who have no token."""
    num_answered: int
    """Such calls, which nobody should have answered."""

    @property
    def p99(self) -> float:
        return float(self.measured.told["beaten"][0]["p99"])

    @property
    def most_bytes(self) -> float:
        return max(*self.measured.bytes_in_quarters, self.measured.bytes_at_end)


def main(share: float = 1.0) -> list[Result]:
    """A flood and spinning, in turn."""
    load = Load(num_agents=200, every_seconds=1.0, num_beats=shortened(60, share, least=20), num_pushes=1)
    rounds = [(flooded(load, SPINNING), flooded(load, FLOOD)) for _ in range(shortened(_NUM_ROUNDS, share, least=1))]
    return [table_of(load, [spun for spun, _ in rounds], [found for _, found in rounds])]


def flooded(load: Load, ways: Sequence[str]) -> Flooded:
    """Put a master under a load, on a core of its own, while others do what they do on another."""
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, "this process may use one core; two are needed: one for those who flood, one for the master"
    with contextlib.ExitStack() as at_end:
        numbers: list[tuple[int, int]] = []

        def begin(port: int) -> contextlib.AbstractContextManager[None]:
            return _strangers(port, ways, cores[0], numbers)

        at_end.enter_context(_on(cores[1]))
        found = measured(load, token="a-token-of-benchmarks", beside=begin)
    return Flooded(
        measured=found, num_refused=sum(num for num, _ in numbers), num_answered=sum(num for _, num in numbers)
    )


@contextlib.contextmanager
def _strangers(port: int, ways: Sequence[str], core: int, numbers: list[tuple[int, int]]) -> Iterator[None]:
    """Processes that do what they do while the block runs; how many calls of each were refused, and answered."""
    command = [sys.executable, "-m", "benchmarks.master_flood_strangers", f"127.0.0.1:{port}"]
    with contextlib.ExitStack() as at_end, _on(core):
        processes = [
            at_end.enter_context(
                subprocess.Popen([*command, way], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for way in ways
        ]
        for each in processes:
            at_end.callback(each.kill)
        for each in processes:
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        for each in processes:
            assert each.stdin is not None
            print("go", file=each.stdin, flush=True)
        yield
        for each in processes:
            assert each.stdin is not None and each.stdout is not None
            each.stdin.close()
        limit = threading.Timer(_END_SECONDS, _kill, [processes])
        at_end.callback(limit.cancel)
        limit.start()
        for way, each in zip(ways, processes, strict=True):
            assert each.stdout is not None
            told = each.stdout.readline()
            assert told, f"what floods by {way} has not ended within {_END_SECONDS:g} seconds, or has failed"
            refused, answered = told.split()
            numbers.append((int(refused), int(answered)))


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for each in processes:
        each.kill()


@contextlib.contextmanager
def _on(core: int) -> Iterator[None]:
    """What this thread starts meanwhile runs on that core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def table_of(load: Load, spun: Sequence[Flooded], found: Sequence[Flooded]) -> LoadTable:
    """What was measured, beside what is wanted."""
    usual, busy = (median(each.p99 for each in many) for many in (spun, found))
    most = max(each.most_bytes for each in found)
    rows = (
        Row(name="a beat beside eight that spin, p99", value=usual, shown=shown_value(usual, "seconds")),
        Row(
            name="a beat in a flood, p99",
            value=busy,
            shown=shown_value(busy, "seconds"),
            at_most=_MOST_SECONDS,
            wanted=f"≤ {shown_value(_MOST_SECONDS, 'seconds')}",
        ),
        Row(
            name="a beat in a flood, over one beside eight that spin",
            value=busy / usual,
            shown=f"{busy / usual:.2f}",
            at_most=_MOST_TIMES,
            wanted=f"≤ {_MOST_TIMES:g}",
        ),
        Row(
            name="memory, at most",
            value=most,
            shown=shown_value(most, "bytes"),
            at_most=_MOST_BYTES,
            wanted="≤ 300 MB",
        ),
        Row(
            name="calls without the token that were answered",
            value=sum(each.num_answered for each in found),
            shown=str(sum(each.num_answered for each in found)),
            at_most=0,
            wanted="0",
        ),
    )
    told = [each.measured.told for each in found]
    failures = [text for each in told for text in (*each["beaten"][0]["failures"], *each["over"][0]["failures"])]
    notes = (
        f"medians of {len(found)} rounds; p99 in a flood: {_shown(found)}; beside those that spin: {_shown(spun)}",
        f"{median(each.num_refused for each in found):,.0f} calls were refused in a round; the master took "
        f"{median(each.measured.cpu_share for each in found):.0%} of its core, beside those that spin "
        f"{median(each.measured.cpu_share for each in spun):.0%}",
        f"{len(failures)} calls of agents failed" + (f", such as: {failures[0]}" if failures else ""),
    )
    return LoadTable(title=f"{load.name}, while eight processes flood the master", rows=rows, notes=notes)


def _shown(many: Sequence[Flooded]) -> str:
    return ", ".join(shown_value(each.p99, "seconds") for each in many)
