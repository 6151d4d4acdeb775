"""Signals that tell an agent to end: the first counts, and is raised where that is wanted."""

from __future__ import annotations

import io
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    SignalException,
    start_processes,
)

from elastic_ext.agent.workers.workers import StopSignals
from tests.support.nodes import until

NAMES = "SIGUSR1, SIGUSR2,SIGNONE"


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals(NAMES) as made:
        yield made
    assert signal.getsignal(signal.SIGUSR1) == before


def test_one_that_comes_is_noted_and_raised_once_that_is_wanted(signals: StopSignals) -> None:
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    assert signals.told == signal.SIGUSR2
    with pytest.raises(SignalException) as raised:
        signals.let_through()
    assert raised.value.sigval == signal.SIGUSR2


def test_a_second_one_breaks_nothing_off(signals: StopSignals) -> None:
    signals.let_through()
    with pytest.raises(SignalException, match="SIGUSR1"):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    assert signals.told == signal.SIGUSR1


def test_they_are_taken_back_from_whoever_took_them(signals: StopSignals) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.take()
    signal.raise_signal(signal.SIGUSR1)
    assert signals.told == signal.SIGUSR1


def sleeps(begun: Path) -> None:
    begun.touch()
    time.sleep(60)


def worker_started(signals: StopSignals, folder: Path, start_method: str) -> PContext:
    """A worker that torch has started for an agent; it touches ``begun`` in ``folder``, and sleeps."""
    with signals.in_torchs_place():
        return start_processes(
            name="sleeper",
            entrypoint=sleeps,
            args={0: (folder / "begun",)},
            envs={0: {}},
            logs_specs=DefaultLogsSpecs(str(folder)),
            start_method=start_method,
        )


@pytest.mark.parametrize("moment", ["before it runs", "when it runs"])
def test_one_that_comes_while_torch_starts_a_worker_leaves_none_that_nobody_knows(
    signals: StopSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,SIGUSR2")
    start = MultiprocessContext._start

    def start_at_that_moment(context: MultiprocessContext) -> None:
        if moment == "before it runs":
            signal.raise_signal(signal.SIGUSR1)
        start(context)  # type: ignore[no-untyped-call]
        if moment == "when it runs":
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(MultiprocessContext, "_start", start_at_that_moment)
    context = worker_started(signals, tmp_path, "spawn")
    try:
        assert signals.told == signal.SIGUSR1
        assert psutil.pid_exists(context.pids()[0])
    finally:
        context.close()
    with pytest.raises(SignalException):
        signals.let_through()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_one_that_is_sent_to_a_worker_ends_it_however_it_was_started(
    signals: StopSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,SIGUSR2")
    context = worker_started(signals, tmp_path, start_method)
    try:
        until((tmp_path / "begun").exists)
        os.kill(context.pids()[0], signal.SIGUSR1)
        result = context.wait(30)
        assert result is not None and list(result.failures) == [0]
    finally:
        context.close()
    assert signals.told is None


@pytest.mark.parametrize("is_nohup", [True, False])
def test_what_nohup_has_had_ignored_stays_so(is_nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_nohup else signal.SIG_DFL)
    try:
        with StopSignals("SIGHUP") as signals:
            signal.signal(signal.SIGHUP, signal.default_int_handler)  # as torch does when it starts workers
            signals.take()
            signal.raise_signal(signal.SIGHUP)
            assert signals.told == (None if is_nohup else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_that_comes_to_what_passes_over_exceptions_is_raised_again_until_it_is_held(signals: StopSignals) -> None:
    class Told(logging.StreamHandler[io.StringIO]):
        """Tells the agent to end once it reads a line, and before the line's writer has come back from writing it."""

        def flush(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    logging.raiseExceptions, before = False, logging.raiseExceptions
    try:
        signals.let_through()
        Told(io.StringIO()).emit(logging.makeLogRecord({"msg": "waits for other nodes"}))
    finally:
        logging.raiseExceptions = before
    with pytest.raises(SignalException, match="SIGUSR1"):
        time.sleep(60.0)
    signals.hold()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
