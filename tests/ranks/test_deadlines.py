"""Calls with a limit of time, and threads that their owner ends."""

from __future__ import annotations

import os
import threading
from functools import partial
from queue import SimpleQueue

import pytest

from elastic_ext.ranks.deadlines import NoAnswer, OwnedThread, within

DEADLINE_SECONDS = 60.0


def test_a_call_that_does_not_come_back_in_time_is_left_to_its_thread() -> None:
    hung, called = threading.Event(), threading.Event()
    names = []

    def act() -> None:
        names.append(threading.current_thread().name)
        called.set()
        hung.wait(DEADLINE_SECONDS)

    with pytest.raises(NoAnswer, match=r"no answer within 0\.05 s"):
        within(0.05, act, name="elastic_ext test")
    assert called.wait(DEADLINE_SECONDS) and names == ["elastic_ext test"]
    hung.set()


def test_what_a_call_gives_or_raises_is_given_and_raised() -> None:
    assert within(DEADLINE_SECONDS, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(DEADLINE_SECONDS, lambda: os.environ["NO_SUCH_VARIABLE"])
    with pytest.raises(SystemExit):
        within(DEADLINE_SECONDS, exit)


def test_a_thread_that_waits_on_its_event_ends_as_it_is_closed() -> None:
    thread = OwnedThread(lambda: thread.stopping.wait(DEADLINE_SECONDS), name="elastic_ext test")
    assert thread.daemon and not thread.is_started
    thread.start()
    assert thread.is_started and not thread.wait(0.0)
    assert thread.close(DEADLINE_SECONDS) and not thread.is_alive()
    assert thread.close(None)


def test_a_thread_that_waits_on_something_else_is_woken_after_its_event_is_set() -> None:
    works: SimpleQueue[None] = SimpleQueue()
    seen = []

    def run() -> None:
        works.get()
        seen.append(thread.stopping.is_set())

    thread = OwnedThread(run, name="elastic_ext test", wake=partial(works.put, None))
    thread.start()
    assert thread.close(DEADLINE_SECONDS) and seen == [True]


def test_a_thread_that_was_never_started_is_closed_at_once_and_looks_at_its_owners_event() -> None:
    stopping = threading.Event()
    thread = OwnedThread(lambda: None, name="elastic_ext test", stopping=stopping)
    assert thread.close(None) and stopping.is_set()


def test_a_thread_that_outlasts_its_time_is_told_of_and_one_that_closes_itself_does_not_wait() -> None:
    held, told = threading.Event(), []

    def run() -> None:
        told.append(thread.close(None))
        held.wait(DEADLINE_SECONDS)

    thread = OwnedThread(run, name="elastic_ext test")
    thread.start()
    assert not thread.close(0.05)
    held.set()
    assert thread.wait(DEADLINE_SECONDS) and told == [False]
