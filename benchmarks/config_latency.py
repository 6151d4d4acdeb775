"""How soon a process holds a config that was put in place: from just before the rename until it was read and checked.

Eight processes, none with torch, follow one file in a folder of this machine's temporary files, and each tells when it
held each version, by the clock that all processes share. With events, our watcher and watchdog's bare observer take
turns, each on a file of its own, as eight processes that wake at once compete for the processors. Where no events
arrive, the fallback is compared with what else polls, all on one file.

Not measured: how long ranks take to agree afterwards (benchmarks/agreement.py), network file systems, and agents that
poll every so many seconds: their latency is that of their clock.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Literal

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

from benchmarks.gang import Gang
from benchmarks.harness import Result, shortened
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples
from benchmarks.replacing import replace_file
from elastic_ext.config.watcher import ConfigWatcher

__all__ = ["main"]

Kind = Literal["watcher", "watcher without events", "observer", "polling observer", "stat"]
KINDS: dict[Kind, str] = {
    "watcher": "ConfigWatcher, with events",
    "observer": "by hand: watchdog's Observer and json.loads, nothing checked",
    "watcher without events": "ConfigWatcher, without events, looking every 1 s",
    "polling observer": "by hand: watchdog's PollingObserver at its default interval",
    "stat": "by hand: os.stat every 0.5 s",
}
TARGETS: dict[Kind, QuantileTarget] = {
    "watcher": QuantileTarget(quantile=0.5, at_most=0.002),
    "watcher without events": QuantileTarget(quantile=0.99, at_most=2.0),
}
NUM_PROCESSES = 8
NUM_VERSIONS_WITH_EVENTS = 200
NUM_VERSIONS_WITHOUT = 15
SPACING_WITH_EVENTS = (0.02, 0.06)  # seconds; drawn between these, so that no version meets a poll by rhythm
SPACING_WITHOUT = (1.2, 2.4)  # longer than any interval, so that each version is held
SECONDS_TO_WAIT = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """What one process does: follow the file in one way."""

    kind: Kind
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """When one process held which version, and what following cost it."""

    held_ns: dict[int, int]
    cpu_share: float
    """Of one processor."""


class ByHand(FileSystemEventHandler):
    """What one writes with watchdog alone: at each event about the file, read it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = threading.Condition()
        self.version = 0
        self.held_at = 0.0

    def on_created(self, event: FileSystemEvent) -> None:
        self._read(event.src_path)

    def on_modified(self, event: FileSystemEvent) -> None:
        self._read(event.src_path)

    def on_moved(self, event: FileSystemEvent) -> None:
        self._read(event.dest_path)

    def wait_for_version(self, version: int, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version, timeout=timeout_seconds)

    def _read(self, touched: str | bytes) -> None:
        if os.fsdecode(touched) == str(self._file):
            with self._changed:
                self.version = json.loads(self._file.read_bytes())["version"]
                self.held_at = time.monotonic()
                self._changed.notify_all()


def main(share: float = 1.0) -> list[Result]:
    """A table with events and one without."""
    with_events, without = (shortened(num, share, least=5) for num in (NUM_VERSIONS_WITH_EVENTS, NUM_VERSIONS_WITHOUT))
    return [
        latencies_with_events(num_processes=NUM_PROCESSES, num_versions=with_events),
        latencies_without_events(num_processes=NUM_PROCESSES, num_versions=without),
    ]


def latencies_with_events(*, num_processes: int, num_versions: int) -> QuantileTable:
    """Our watcher and watchdog's bare observer, by turns."""
    draw = random.Random(0)
    kinds: Sequence[Kind] = ("watcher", "observer")
    with ExitStack() as stack:
        started = [_start(stack, [kind], num_processes, num_versions) for kind in kinds]
        renamed_ns: list[dict[int, int]] = [{} for _ in kinds]
        for version in range(2, num_versions + 2):
            for (file, _), renamed in zip(started, renamed_ns, strict=True):
                _pause(draw.uniform(*SPACING_WITH_EVENTS))
                renamed[version] = replace_file(file, _contents(version))
        rows = [
            _row(kind, gang.answers(deadline_seconds=SECONDS_TO_WAIT), renamed)
            for kind, (_, gang), renamed in zip(kinds, started, renamed_ns, strict=True)
        ]
    return QuantileTable(title=f"Rename to held, {num_processes} processes, with events", rows=tuple(rows))


def latencies_without_events(*, num_processes: int, num_versions: int) -> QuantileTable:
    """The fallback and others that poll, at once."""
    draw = random.Random(0)
    kinds: Sequence[Kind] = ("watcher without events", "polling observer", "stat")
    with ExitStack() as stack:
        file, gang = _start(stack, kinds, num_processes, num_versions)
        renamed_ns = {}
        for version in range(2, num_versions + 2):
            _pause(draw.uniform(*SPACING_WITHOUT))
            renamed_ns[version] = replace_file(file, _contents(version))
        answers = gang.answers(deadline_seconds=SECONDS_TO_WAIT)
    by_kind = {kind: answers[place * num_processes :][:num_processes] for place, kind in enumerate(kinds)}
    rows = [_row(kind, held, renamed_ns) for kind, held in by_kind.items()]
    costs = [f"{KINDS[kind]}: {mean(one.cpu_share for one in held):.3%}" for kind, held in by_kind.items()]
    return QuantileTable(
        title=f"Rename to held, {num_processes} processes each, without events",
        rows=tuple(rows),
        notes=(f"of one processor, each process took {'; '.join(costs)}",),
    )


def _start(
    stack: ExitStack, kinds: Sequence[Kind], num_processes: int, num_versions: int
) -> tuple[Path, Gang[Following, int, Held]]:
    """A file that holds version 1, and processes that follow it until the last version."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.json"
    replace_file(file, _contents(1))
    gang = Gang(following_process, [Following(kind=kind, file=file) for kind in kinds for _ in range(num_processes)])
    stack.enter_context(gang)
    gang.tell(num_versions + 1)
    return file, gang


def _row(kind: Kind, answers: Sequence[Held], renamed_ns: dict[int, int]) -> Samples:
    occasions = [
        [(held.held_ns[version] - renamed) / 1e9 for held in answers if version in held.held_ns]
        for version, renamed in renamed_ns.items()
    ]
    num_missed = len(answers) * len(renamed_ns) - len(list(chain.from_iterable(occasions)))
    missed = f" ({num_missed} replaced before they were held)" if num_missed else ""
    return Samples(name=KINDS[kind] + missed, occasions=occasions, target=TARGETS.get(kind))


@contextmanager
def following_process(setup: Following) -> Iterator[Callable[[int], Held]]:
    """A process that follows the file from now on, and tells when it held each version up to the one asked for."""
    with ExitStack() as stack:
        watched = _watched(stack, setup)

        def follow(last_version: int) -> Held:
            held_ns: dict[int, int] = {}
            cpu_began, began = time.process_time(), time.monotonic()
            for version, now in watched(last_version):
                held_ns[version] = now
            cpu_share = (time.process_time() - cpu_began) / (time.monotonic() - began)
            assert "torch" not in sys.modules
            return Held(held_ns=held_ns, cpu_share=cpu_share)

        yield follow


def _watched(stack: ExitStack, setup: Following) -> Callable[[int], Iterator[tuple[int, int]]]:
    """What gives each version from the second on as it is held, with the time."""
    if setup.kind == "stat":
        return lambda last_version: _by_stat(setup.file, last_version)
    if setup.kind in ("watcher", "watcher without events"):
        watcher = stack.enter_context(ConfigWatcher(setup.file, poll_seconds=1.0, use_events=setup.kind == "watcher"))
        return lambda last_version: _by_waiting(
            watcher.wait_for_version,
            lambda: (watcher.newest.version if watcher.newest else 0, watcher.newest_at),
            last_version,
        )
    by_hand = ByHand(setup.file)
    observer: BaseObserver = PollingObserver() if setup.kind == "polling observer" else Observer()
    observer.schedule(by_hand, str(setup.file.parent))
    observer.start()
    stack.callback(observer.join)
    stack.callback(observer.stop)
    return lambda last_version: _by_waiting(
        by_hand.wait_for_version, lambda: (by_hand.version, by_hand.held_at), last_version
    )


def _by_waiting(
    wait: Callable[[int, float], bool], held: Callable[[], tuple[int, float]], last_version: int
) -> Iterator[tuple[int, int]]:
    version = 1
    while version < last_version:
        if not wait(version + 1, SECONDS_TO_WAIT):
            raise TimeoutError(f"no version above {version} was held within {SECONDS_TO_WAIT:g} s")
        version, held_at = held()
        yield version, int(held_at * 1e9)


def _by_stat(file: Path, last_version: int) -> Iterator[tuple[int, int]]:
    version = 1
    seen = os.stat(file)
    deadline = time.monotonic() + SECONDS_TO_WAIT + last_version * SPACING_WITHOUT[1]
    while version < last_version:
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {last_version} was not held in time, but {version}")
        _pause(0.5)
        now_there = os.stat(file)
        if (now_there.st_mtime_ns, now_there.st_ino) != (seen.st_mtime_ns, seen.st_ino):
            seen = now_there
            version = json.loads(file.read_bytes())["version"]
            yield version, time.monotonic_ns()


def _contents(version: int) -> bytes:
    config = {
        "version": version,
        "reason": "measuring",
        "dataloader": {"batch_size": 4, "num_workers": 2, "pin_memory": False},
        "optimizer": {"learning_rate": 0.001},
        "user": {"dropout": 0.1},
    }
    return json.dumps(config).encode()


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
