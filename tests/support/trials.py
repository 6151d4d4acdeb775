"""Trials: many short runs of gloo ranks in processes of their own, several at once, any of which may die.

A warm worker of tests/support/ranks.py that has no process group yet forks each of these processes, in milliseconds,
and every run begins as a new job's would. What a run is to do, and whether it went well, is up to the test.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.support.ranks import RankPool

__all__ = ["End", "Trial", "run_one", "run_trials"]

_HANGS_AFTER_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run of ``num_ranks``, each of which calls ``fn(rank, *args)``."""

    fn: Callable[..., object]
    args: tuple[object, ...]
    num_ranks: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """What became of one rank."""

    value: Any = None
    error: str | None = None
    """The type of what it raised, and the message."""
    trace: str = ""
    exit_signal: int | None = None
    log: tuple[str, ...] = ()
    """The warnings that it logged."""
    seconds: float = 0.0


def run_trials(ranks: RankPool, folder: Path, trials: Sequence[Trial], *, at_once: int = 24) -> list[list[End]]:
    """What became of each rank of each trial, in their order; ``folder`` is for what is passed back."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir(exist_ok=True)
    ranks.run_outcomes(1, _make_room, process_group=False)
    (ends,) = ranks.run(
        1, _direct, folder, store.port, list(trials), at_once, deadline_seconds=900.0, process_group=False
    )
    return ends


def run_one(ranks: RankPool, folder: Path, trial: Trial) -> list[End]:
    """What became of each rank of one trial."""
    (ends,) = run_trials(ranks, folder, [trial])
    return ends


def _make_room(_: int) -> None:
    """Have this worker's place taken by a new one: one that has been a rank remembers the places of that rank's parts,
    and torch's caches would give them to any other rank that is forked from it."""
    raise RuntimeError("another worker is to take this one's place")


def _direct(_: int, folder: Path, port: int, trials: Sequence[Trial], at_once: int) -> list[list[End]]:
    """In the worker: fork, wait, and fork on."""
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    number = len(list(folder.iterdir()))
    waiting = [(place, rank) for place, trial in enumerate(trials) for rank in range(trial.num_ranks)][::-1]
    running: dict[int, tuple[int, int, float]] = {}
    ends: dict[tuple[int, int], End] = {}
    try:
        while waiting or running:
            while waiting and len({place for place, _, _ in running.values()} | {waiting[-1][0]}) <= at_once:
                place, rank = waiting.pop()
                passed_back = folder / f"{number}-{place}-{rank}"
                pid = os.fork()
                if pid == 0:
                    _be_rank(trials[place], rank, port, f"{number}-{place}", passed_back)
                running[pid] = (place, rank, time.monotonic())
            pid, status = os.wait()
            place, rank, began = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - began
            if code < 0:
                ends[place, rank] = End(exit_signal=-code, seconds=seconds)
            else:
                data = (folder / f"{number}-{place}-{rank}").read_bytes()
                ends[place, rank] = End(seconds=seconds, **pickle.loads(data))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    (folder / f"{number}-done").touch()
    return [[ends[place, rank] for rank in range(trial.num_ranks)] for place, trial in enumerate(trials)]


def _be_rank(trial: Trial, rank: int, port: int, name: str, passed_back: Path) -> NoReturn:
    """In a forked process: one rank's life."""
    signal.setitimer(signal.ITIMER_REAL, _HANGS_AFTER_SECONDS)  # SIGALRM ends it
    result: dict[str, object] = {}
    file = open(passed_back, "wb")  # noqa: SIM115 - now, since later it may no longer be allowed
    try:
        with _warnings_in(result):
            if trial.num_ranks > 1:
                store = PrefixStore(name, TCPStore("127.0.0.1", port, is_master=False))
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=trial.num_ranks, timeout=timedelta(seconds=60)
                )
            result["value"] = trial.fn(rank, *trial.args)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["trace"] = traceback.format_exc()
    except BaseException:  # such as a skipped or failed test's
        result["error"] = result["trace"] = traceback.format_exc()
    with file:
        file.write(pickle.dumps(result))
    os._exit(0)


@contextlib.contextmanager
def _warnings_in(result: dict[str, object]) -> Iterator[None]:
    log: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("elastic_ext").addHandler(handler)
    try:
        yield
    finally:
        result["log"] = tuple(log)
