"""The process that a pool's workers are forked from: there is one, it lasts, and what becomes of it harms no batch."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ext.data.workers.fork_server import GONE_SECONDS, ForkServerStarter, is_readable
from elastic_ext.data.workers.pool import Pool
from elastic_ext.data.workers.worker import Worker
from elastic_ext.data.workers.worker_process import Seat
from elastic_ext.errors import WorkerDiedError
from tests.support import pools
from tests.support.pools import FORK, Both, Once, batches_made, child_pids, warnings_in, work, worker_pids

pytestmark = pytest.mark.usefixtures("started_once", "within_a_minute")


class Forks:
    """Counts the forks of this process, while it is asked to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.num = 0
        self.is_counting = True
        os.register_at_fork(before=self._count)

    def _count(self) -> None:
        self.num += self.is_counting and os.getpid() == self.pid


# --- there is one ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_this_process_forks_once_however_many_workers_come_and_go_and_die(tmp_path: Path) -> None:
    others = child_pids()
    doing: dict[int, Callable[[], Any]] = {0: pools.pid_and_parent, 1: Once(tmp_path / "m", pools.die_by_sigkill)}
    with Pool(work(doing), context=FORK) as pool:
        forks = Forks()
        made = batches_made(pool, 1, [[0], [0]])
        made += batches_made(pool, 3, [[1], [0], [0], [0]], 2)[1:]
        assert batches_made(pool, 0, []) == []
        made += batches_made(pool, 4, [[0], [0], [0], [0]], 10)
        forks.is_counting = False
        (nursery,) = child_pids() - others
    assert forks.num == 1
    assert {parent for ((_, parent),) in made} == {nursery}
    assert len({pid for ((pid, _),) in made}) > 3


def test_each_pool_has_its_own() -> None:
    doing: dict[int, Callable[[], Any]] = {0: pools.pid_and_parent}
    with Pool(work(doing), context=FORK) as one, Pool(work(doing), context=FORK) as other:
        ((_, first),), ((_, second),) = batches_made(one, 1, [[0]])[0], batches_made(other, 1, [[0]])[0]
        one.close()
        assert batches_made(other, 2, [[1], [1]], 1) == [[1], [1]]
    assert first != second


def test_workers_that_come_later_see_the_dataset_as_the_first_ones_do(tmp_path: Path) -> None:
    doing: dict[int, Callable[[], Any]] = {0: lambda: "as it was"}
    with Pool(work(doing), context=FORK) as pool:
        made = batches_made(pool, 1, [[0]])
        doing[0] = lambda: "as it is"
        made += batches_made(pool, 0, []) + batches_made(pool, 3, [[0]] * 3, 1)
    assert made == [["as it was"]] * 4


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_other_start_methods_have_none(method: str) -> None:
    made, others = work({0: pools.pid_and_parent}), child_pids()
    with Pool(made, context=multiprocessing.get_context(method)) as pool:
        (((pid, parent),),) = batches_made(pool, 1, [[0]])
        assert child_pids() - others <= {pid}
    assert parent in ({os.getpid()} if method == "spawn" else others)


# --- much happens while it does something else ----------------------------------------------------------------------


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """In here this child of ours does nothing; it sees all that has happened at once when it goes on."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_ready(worker: Worker) -> bool:
    """Whether a worker's first message comes before it ends, if it does."""
    assert is_readable(worker.results_descriptor, 30)
    try:
        ((_, payload),) = worker.inbox.read()
    except EOFError:
        return False
    worker.note_ready(payload)
    return True


class Workers:
    """Workers of a nursery, without a pool; ``with`` it, and none is left."""

    def __init__(self) -> None:
        self._starter = ForkServerStarter(work(), FORK, contextlib.nullcontext())
        self._workers: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self.give_back(self._workers[-1])
        self._starter.close()

    def start(self, slot: int) -> Worker:
        worker = Worker(Seat(slot=slot, num_workers=2, base_seed=0), self._starter)
        self._workers.append(worker)
        return worker

    def give_back(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.ask_to_end()
        worker.end(GONE_SECONDS)
        worker.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_is_forked_as_another_is_given_back_is_not_taken_for_that_one() -> None:
    with Workers() as workers:
        first = workers.start(0)
        assert is_ready(first) and first.pid is not None
        with stopped(psutil.Process(first.pid).ppid()):
            pools.kill_for_good(first.pid)
            workers.give_back(first)  # the nursery's end of its line is ready, and its number is about to be free
            second = workers.start(1)
        assert is_ready(second), second.ending().how
        second.ask_to_end()
        assert second.has_ended(30)
        assert "exited with code 0" in second.ending().how


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_forked_after_it_was_told_to_end() -> None:
    with Workers() as workers:
        first = workers.start(0)
        assert is_ready(first) and first.pid is not None
        nursery = psutil.Process(first.pid).ppid()
        with stopped(nursery):
            os.kill(nursery, signal.SIGTERM)
            second = workers.start(1)
        assert not is_ready(second)


# --- it dies --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_batches_come_once_and_in_order_when_it_is_killed_and_no_sample_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kills: Callable[[], Any] = Once(tmp_path / "0", pools.kill_the_parent)
    for number in range(1, 4):  # more often than workers may die over one sample
        kills = Both(kills, Once(tmp_path / f"{number}", pools.kill_the_parent))
    note = tmp_path / "made"
    doing = {index: pools.NoteIn(note, f"{index} ") for index in range(10, 14)}
    with Pool(work({5: kills, **doing}), context=FORK) as pool:
        made = batches_made(pool, 2, [[number, number + 1] for number in range(0, 24, 2)])
        pool.wait_ready(2)
    assert made == [[number, number + 1] for number in range(0, 24, 2)]
    told = warnings_in(caplog)
    assert sum("samples 4, 5" in each for each in told) >= 4
    for each in told:
        assert "died together with its fork server" in each or "was never ready" in each, each
        assert "was killed by SIGKILL" in each


@pytest.mark.usefixtures("nothing_left")
def test_it_is_replaced_when_it_dies_idle_with_no_worker_left(caplog: pytest.LogCaptureFixture) -> None:
    with Pool(work({0: pools.pid_and_parent}), context=FORK) as pool:
        (((_, first),),) = batches_made(pool, 1, [[0]])
        watched = os.pidfd_open(first)
        batches_made(pool, 0, [])
        os.kill(first, signal.SIGKILL)
        assert is_readable(watched, 20)
        os.close(watched)
        (((_, second),),) = batches_made(pool, 1, [[0]], 1)
    assert first != second
    assert not warnings_in(caplog)


@pytest.mark.usefixtures("nothing_left")
def test_workers_that_go_with_it_before_they_are_ready_are_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kills = Both(Once(tmp_path / "0", pools.kill_the_parent), Once(tmp_path / "1", pools.kill_the_parent))
    with Pool(work({}, worker_init_fn=lambda _: kills()), context=FORK) as pool:
        assert batches_made(pool, 4, [[0], [1]]) == [[0], [1]]
    assert all("was killed by SIGKILL" in each for each in warnings_in(caplog))


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_is_told_to_end_before_it_is_ready_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is told to end has workers that start, and the signal finds them too."""
    caplog.set_level(logging.INFO, "elastic_ext")
    ends = Once(tmp_path / "0", lambda: signal.raise_signal(signal.SIGTERM))
    with Pool(work({}, worker_init_fn=lambda _: ends()), context=FORK) as pool:
        assert batches_made(pool, 2, [[0], [1]]) == [[0], [1]]
    assert not warnings_in(caplog)
    assert any("was never ready" in each and "SIGTERM" in each for each in caplog.messages)


@pytest.mark.usefixtures("nothing_left")
def test_nurseries_that_die_before_any_worker_is_ready_are_an_error() -> None:
    made = work({}, worker_init_fn=lambda _: pools.kill_the_parent())
    with (
        Pool(made, context=FORK) as pool,
        pytest.raises(WorkerDiedError, match=r"before they were ready .*its fork server"),
    ):
        batches_made(pool, 4, [[0]])


@pytest.mark.usefixtures("nothing_left")
def test_sample_over_which_it_dies_for_ever_is_an_error_in_the_end() -> None:
    with Pool(work({5: pools.kill_the_parent}), context=FORK) as pool:
        with pytest.raises(WorkerDiedError, match=r"samples 4, 5 .*look into the kernel's log") as caught:
            batches_made(pool, 1, [[4, 5]])
        assert batches_made(pool, 1, [[6]], 1) == [[6]]
    assert caught.value.indices == (4, 5)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("num_more", [0, 1])
def test_where_it_may_open_no_more_files_that_is_an_error_or_another_takes_its_place(num_more: int) -> None:
    with Pool(work({0: pools.pid_and_parent}), context=FORK) as pool:
        (((_, nursery),),) = batches_made(pool, 1, [[0]])
        is_open = set(map(int, os.listdir(f"/proc/{nursery}/fd")))
        first, second, *_ = (number for number in range(len(is_open) + 2) if number not in is_open)
        _, hard = resource.prlimit(nursery, resource.RLIMIT_NOFILE)
        resource.prlimit(nursery, resource.RLIMIT_NOFILE, (second if num_more else first, hard))
        if num_more:
            with pytest.raises(OSError, match="Too many open files"):
                batches_made(pool, 2, [[0]], 1)
        else:
            made = batches_made(pool, 2, [[0]], 1)
            assert made[0][0][1] != nursery


# --- signals --------------------------------------------------------------------------------------------------------


def test_what_a_whole_group_is_sent_leaves_it_alone() -> None:
    with Pool(work({0: pools.pid_and_parent}), context=FORK) as pool:
        (((_, nursery),),) = batches_made(pool, 1, [[0]])
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM):
            os.kill(nursery, number)
        subprocess.run(["kill", "-TERM", str(nursery)], check=True)  # not sent by its parent
        assert {parent for ((_, parent),) in batches_made(pool, 3, [[0]] * 3, 1)} == {nursery}


@pytest.mark.usefixtures("nothing_left")
def test_it_ends_as_any_child_does_when_this_process_ends_its_children(caplog: pytest.LogCaptureFixture) -> None:
    with Pool(work({0: pools.pid_and_parent}), context=FORK) as pool:
        (((_, nursery),),) = batches_made(pool, 2, [[0]])
        (child,) = (each for each in multiprocessing.active_children() if each.pid == nursery)
        child.terminate()
        child.join()
        (((_, other),),) = batches_made(pool, 2, [[0]], 1)
    assert other != nursery


def _signals() -> tuple[Any, ...]:
    handlers = [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1)]
    return [str(each) for each in handlers], sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.parametrize("chld", [signal.SIG_DFL, signal.SIG_IGN])
def test_workers_take_signals_as_this_process_does(chld: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGCHLD, chld)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        with Pool(work({0: _signals, 1: pools.pid}), context=FORK) as pool:
            ((found,), (victim,)) = batches_made(pool, 1, [[0], [1]])
            expected = _signals()
            os.kill(victim, signal.SIGKILL)
            assert batches_made(pool, 1, [[2]], 2) == [[2]]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, before)
    assert found == expected
    (warning,) = warnings_in(caplog)
    assert f"pid {victim} was killed by SIGKILL" in warning


# --- in the end -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_closing_leaves_nothing_whatever_its_workers_do() -> None:
    others, before = worker_pids(), child_pids()
    with Pool(work({0: pools.hang_for_ever}), context=FORK, end_seconds=0.1) as pool:
        pool.resize(3)
        pool.wait_ready(3)
        for number in range(4):
            pool.submit(number, [number])
        pool.resize(6)
        assert len(worker_pids() - others) >= 3
    assert worker_pids() == others
    assert child_pids() == before


@pytest.mark.usefixtures("nothing_left")
def test_closing_after_it_was_killed_leaves_nothing() -> None:
    with Pool(work({0: pools.pid_and_parent}), context=FORK) as pool:
        (((_, nursery),),) = batches_made(pool, 3, [[0]])
        os.kill(nursery, signal.SIGKILL)
        pool.submit(7, [1])
