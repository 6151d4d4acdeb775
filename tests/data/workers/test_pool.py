"""Pool with real worker processes: batches are right whatever happens to who makes them, and nothing is left.

A sample is its own index, but for those that a test has do something. Workers wait at gates, which are named pipes.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data._utils.worker
from torch.utils.data import DataLoader, default_collate

from elastic_ext.data.workers.pool import Pool
from elastic_ext.data.workers.worker_process import WorkerSpec
from elastic_ext.errors import ElasticError, WorkerDiedError
from tests.support import pools
from tests.support.pools import (
    FORK,
    Both,
    Once,
    Raise,
    Samples,
    WaitAt,
    WhenTaken,
    batches_made,
    gate,
    held,
    open_gate,
    warnings_in,
    work,
)
from tests.support.ranks import RankPool
from tests.support.scripts import Script
from tests.support.thinning import the_first

pytestmark = pytest.mark.usefixtures("started_once", "within_a_minute")


def _is_readable_soon(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(20_000))


# --- as torch's ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", the_first(["fork", "forkserver", "spawn"], 2))
def test_batches_are_those_of_the_dataset_however_workers_are_started(method: str) -> None:
    made = work({3: pools.a_tensor}, collate_fn=default_collate)
    with Pool(made, context=multiprocessing.get_context(method)) as pool:
        batches = batches_made(pool, 2, [[3], [0, 1], [2, 4, 5], [3, 3]])
    assert [batch.tolist() for batch in batches[1:3]] == [[0, 1], [2, 4, 5]]
    assert torch.equal(batches[0], torch.arange(1000).reshape(1, -1))
    assert torch.equal(batches[3], torch.arange(1000).repeat(2, 1))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_info_and_random_numbers_are_those_of_torchs_workers(method: str) -> None:
    dataset = Samples(dict.fromkeys(range(2), pools.info_and_random_numbers))
    torchs: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]
        sampler=[0, 1],
        batch_size=1,
        num_workers=2,
        collate_fn=pools.as_they_are,
        generator=torch.Generator().manual_seed(3),
        multiprocessing_context=method,
    )
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item())
    made = WorkerSpec(dataset=dataset, collate_fn=pools.as_they_are, base_seed=base_seed)
    with Pool(made, context=multiprocessing.get_context(method)) as pool:
        ours = batches_made(pool, 2, [[0], [1]])
    assert sorted(ours) == sorted(torchs)


def test_worker_init_fn_is_called_in_each_worker_with_its_id(tmp_path: Path) -> None:
    def note(worker_id: int) -> None:
        (tmp_path / f"{worker_id}").write_text(str(os.getpid()))

    with Pool(work({0: pools.pid}, worker_init_fn=note), context=FORK) as pool:
        made = batches_made(pool, 3, [[0]] * 3)
    assert sorted((tmp_path / name).read_text() for name in "012") == sorted(str(pid) for (pid,) in made)


def test_exception_of_worker_init_fn_is_raised_for_the_first_batch() -> None:
    def fail(worker_id: int) -> None:
        raise ValueError("no start")

    with Pool(work(worker_init_fn=fail), context=FORK) as pool, pytest.raises(ValueError, match="no start"):
        batches_made(pool, 1, [[0]])


def test_without_auto_collation_a_task_is_one_index() -> None:
    with Pool(work(collate_fn=str, auto_collation=False), context=FORK) as pool:
        pool.resize(1)
        pool.submit(0, 5)
        assert pool.take(0) == "5"


def test_getitems_is_given_a_plain_list_and_its_exception_names_the_batch() -> None:
    dataset = pools.Whole({2: Raise(ValueError, ("bad",))})
    with Pool(WorkerSpec(dataset=dataset, collate_fn=pools.as_they_are, base_seed=0), context=FORK) as pool:
        assert batches_made(pool, 1, [[0, 1]]) == [[0, 1]]
        pool.submit(1, [1, 2])
        with pytest.raises(ValueError, match="bad") as caught:
            pool.take(1)
    assert "samples 1, 2" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "raised",
    [
        Raise(ValueError, ("bad",)),
        Raise(KeyError, ("bad",)),
        Raise(StopIteration, ("bad",)),
        Raise(pools.TwoArguments, ("bad", "worse")),
    ],
    ids=["ValueError", "KeyError", "StopIteration", "two arguments"],
)
def test_exception_is_torchs_word_for_word_and_names_the_sample(raised: Raise) -> None:
    dataset = Samples({41: raised})
    kind, words = _as_torch_raises_it(dataset, 41)
    with Pool(WorkerSpec(dataset=dataset, collate_fn=default_collate, base_seed=0), context=FORK) as pool:
        with pytest.raises(kind) as caught:
            batches_made(pool, 1, [[40, 41, 42]])
        pool.submit(1, [1])
        assert pool.take(1).tolist() == [1]
    assert type(caught.value) is kind
    assert str(caught.value) == words
    assert "sample 41" in "".join(traceback.format_exception(caught.value))


def _as_torch_raises_it(dataset: Samples, index: int) -> tuple[type[Exception], str]:
    loader: DataLoader[Any] = DataLoader(dataset, sampler=[index], num_workers=1)  # type: ignore[arg-type]
    batches: Any = iter(loader)
    try:
        next(batches)
    except Exception as error:
        return type(error), str(error)
    finally:
        batches._shutdown_workers()  # as garbage it would wait for them in another test
    raise AssertionError("it raised nothing")


def test_exception_of_collate_names_the_batch() -> None:
    def collate(samples: list[int]) -> int:
        raise ValueError("unlike")

    with Pool(work(collate_fn=collate), context=FORK) as pool, pytest.raises(ValueError, match="unlike") as caught:
        batches_made(pool, 1, [[8, 9]])
    assert "samples 8, 9" in "".join(traceback.format_exception(caught.value))


def test_what_cannot_be_pickled_is_raised_rather_than_waited_for() -> None:
    class Local(Exception):
        pass

    doing: dict[int, Callable[[], Any]] = {0: lambda: threading.Lock(), 1: Raise(Local, ("a local one",))}
    with Pool(work(doing), context=FORK) as pool:
        with pytest.raises(TypeError, match="cannot pickle"):
            batches_made(pool, 1, [[0]])
        pool.submit(1, [1])
        with pytest.raises(RuntimeError, match="a local one"):
            pool.take(1)


def test_what_cannot_be_unpickled_is_raised_once_and_others_come() -> None:
    with Pool(work({0: WhenTaken(int, "no number")}), context=FORK) as pool:
        pool.resize(1)
        pool.submit(0, [0])
        pool.submit(1, [1])
        with pytest.raises(ValueError, match="no number"):
            pool.take(0)
        assert pool.take(1) == [1]


# --- workers come and go ---------------------------------------------------------------------------------------------


def test_resize_does_not_wait_and_a_worker_counts_once_it_is_ready(tmp_path: Path) -> None:
    start = gate(tmp_path / "start")
    with Pool(work(worker_init_fn=lambda _: WaitAt(start)()), context=FORK) as pool:
        pool.resize(2)
        assert pool.num_ready == 0
        open_gate(start)
        pool.wait_ready()
        assert pool.num_ready == 1
        pool.submit(0, [4])
        assert pool.take(0) == [4]
        open_gate(start)
        pool.wait_ready(2)
        assert pool.num_ready == 2


def test_tasks_submitted_before_any_worker_is_ready_are_made() -> None:
    with Pool(work(), context=FORK) as pool:
        pool.resize(1)
        for number in range(5):
            pool.submit(number, [number])
        assert [pool.take(number) for number in range(5)] == [[0], [1], [2], [3], [4]]


def test_tasks_go_to_the_worker_that_has_least_to_do(tmp_path: Path) -> None:
    busy = gate(tmp_path / "busy")
    with Pool(work({0: Both(WaitAt(busy), pools.pid), 1: pools.pid}), context=FORK) as pool:
        pool.resize(2)
        pool.wait_ready(2)
        pool.submit(0, [0])
        pids = set()
        for number in range(1, 5):
            pool.submit(number, [1])
            pids.add(pool.take(number)[0])
        open_gate(busy)
        assert len(pids) == 1
        assert pool.take(0)[0] not in pids


def test_dealt_in_turn_a_task_goes_to_its_worker_whatever_that_has_to_do(tmp_path: Path) -> None:
    busy = gate(tmp_path / "busy")
    doing: dict[int, Callable[[], Any]] = {0: Both(WaitAt(busy), pools.pid), 1: pools.pid}
    with Pool(work(doing), context=FORK, round_robin=True) as pool:
        pool.resize(2, is_first=True)
        pool.wait_ready(2)  # a batch for a worker that is not ready goes out in a later call, and none is made below
        pool.submit(0, [0])
        pids = []
        for number in range(1, 6):
            pool.submit(number, [1])
            if number % 2:
                pids += pool.take(number)  # of the worker that has nothing else to do
        open_gate(busy)
        assert len(set(pids)) == 1
        others = {pool.take(number)[0] for number in (0, 2, 4)}
        assert len(others) == 1 and not others & set(pids)


def test_dealt_in_turn_a_worker_that_starts_is_waited_for(tmp_path: Path) -> None:
    starts = [gate(tmp_path / "first"), gate(tmp_path / "second")]
    with Pool(
        work(dict.fromkeys(range(4), pools.pid), worker_init_fn=lambda worker: WaitAt(starts[worker])()),
        context=FORK,
        round_robin=True,
    ) as pool:
        pool.resize(2, is_first=True)
        for number in range(4):
            pool.submit(number, [number])
        open_gate(starts[1])
        pids = [pool.take(1), pool.take(3)]
        open_gate(starts[0])
        pids += [pool.take(0), pool.take(2)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_dealt_in_turn_nobody_waits_for_one_that_comes_later_or_in_the_place_of_another(tmp_path: Path) -> None:
    start = gate(tmp_path / "start")
    doing: dict[int, Callable[[], Any]] = {**dict.fromkeys(range(8), pools.pid), 8: pools.die_by_exit}
    with Pool(
        work(doing, worker_init_fn=lambda worker: WaitAt(start)() if worker else None),
        context=FORK,
        round_robin=True,
        end_seconds=0.1,
    ) as pool:
        pool.resize(1, is_first=True)
        pool.wait_ready()
        pool.resize(2)
        for number in range(4):
            pool.submit(number, [number])
        assert len({pool.take(number)[0] for number in range(4)}) == 1
        open_gate(start)
        pool.wait_ready(2)
        for number in range(4, 8):
            pool.submit(number, [number])
        pids = [pool.take(number)[0] for number in range(4, 8)]
        assert pids[0] == pids[2] != pids[1] == pids[3]
        os.kill(pids[1], signal.SIGKILL)
        for number in range(8, 12):
            pool.submit(number, [number - 8])
        assert {pool.take(number)[0] for number in range(8, 12)} == {pids[0]}


def test_tasks_are_left_for_a_worker_that_is_still_starting(tmp_path: Path) -> None:
    start, meet = gate(tmp_path / "start"), gate(tmp_path / "meet")
    doing: dict[int, Callable[[], Any]] = {0: WaitAt(meet), 1: lambda: open_gate(meet)}
    with Pool(work(doing, worker_init_fn=lambda _: WaitAt(start)()), context=FORK) as pool:
        pool.resize(2)
        open_gate(start)
        pool.wait_ready()
        for number in range(4):
            pool.submit(number, [number])
        open_gate(start)
        assert [pool.take(number) for number in range(4)] == [[0], [1], [2], [3]]


def test_nobody_waits_for_a_worker_that_is_still_starting(tmp_path: Path) -> None:
    start = gate(tmp_path / "start")
    with Pool(work(worker_init_fn=lambda _: WaitAt(start)()), context=FORK, end_seconds=0.1) as pool:
        pool.resize(2)
        open_gate(start)
        pool.wait_ready()
        for number in range(6):
            pool.submit(number, [number])
        assert [pool.take(number) for number in range(6)] == [[number] for number in range(6)]


def test_worker_that_is_one_too_many_stays_until_its_batches_are_taken() -> None:
    made = work(dict.fromkeys(range(8), pools.a_tensor), collate_fn=default_collate)
    with Pool(made, context=FORK) as pool:
        pool.resize(4)
        pool.wait_ready(4)
        for number in range(8):
            pool.submit(number, [number])
        pool.resize(1)
        assert pool.num_ready == 1
        for number in range(8):
            assert torch.equal(pool.take(number), torch.arange(1000).reshape(1, -1))


def test_workers_that_are_wanted_again_before_they_retire_stay(tmp_path: Path) -> None:
    busy = [gate(tmp_path / name) for name in "ab"]
    doing: dict[int, Callable[[], Any]] = {index: Both(WaitAt(busy[index]), pools.pid) for index in range(2)}
    with Pool(work({**doing, 2: pools.pid}), context=FORK) as pool:
        pool.resize(2)
        pool.wait_ready(2)
        pool.submit(0, [0])
        pool.submit(1, [1])
        pool.resize(0)
        pool.resize(2)
        assert pool.num_ready == 2
        for each in busy:
            open_gate(each)
        first = {pool.take(0)[0], pool.take(1)[0]}
        pool.submit(2, [2])
        assert pool.take(2)[0] in first


def test_slots_are_given_again_with_other_random_numbers() -> None:
    made = work({0: pools.info_and_random_numbers})
    with Pool(made, context=FORK) as pool:
        ((first,),) = batches_made(pool, 1, [[0]])
        pool.resize(0)
        ((second,),) = batches_made(pool, 1, [[0]])
        pool.resize(3)
        pool.wait_ready(3)
        for number in range(3):
            pool.submit(number, [0])
        others = [pool.take(number)[0] for number in range(3)]
    assert (first[0], first[1], second[0], second[1]) == (0, 1, 0, 1)
    assert first[5] != second[5]
    assert sorted(info[0] for info in others) == [0, 1, 2]
    assert sorted(info[1] for info in others) == [1, 3, 3]
    assert len({info[2] for info in [first, *others]}) == 4


def test_random_resizes_lose_and_repeat_nothing() -> None:
    with Pool(work(), context=FORK) as pool:
        pool.resize(2)
        for number in range(200):
            if number % 10 == 0:
                pool.resize((number // 10) * 7 % 5 or 1)
            pool.submit(number, [number, number + 1])
            if number >= 8:
                assert pool.take(number - 8) == [number - 8, number - 7]
        for number in range(192, 200):
            assert pool.take(number) == [number, number + 1]


# --- batches come in -------------------------------------------------------------------------------------------------


def test_what_others_send_is_taken_in_while_one_is_waited_for(tmp_path: Path) -> None:
    busy = gate(tmp_path / "busy")
    with Pool(work({0: WaitAt(busy), 1: WhenTaken(open_gate, str(busy))}), context=FORK) as pool:
        assert batches_made(pool, 2, [[0], [1]]) == [[0], [None]]


def test_batches_may_be_taken_in_any_order() -> None:
    with Pool(work(), context=FORK) as pool:
        pool.resize(2)
        for number in range(6):
            pool.submit(number, [number])
        assert [pool.take(number) for number in (5, 0, 3, 4, 1, 2)] == [[5], [0], [3], [4], [1], [2]]


def test_pipes_that_are_full_both_ways_stop_nobody() -> None:
    indices = list(range(1, 20_000))
    with Pool(work({0: pools.a_megabyte}), context=FORK) as pool:
        pool.resize(1)
        pool.wait_ready()
        for number in range(20):
            pool.submit(number, [0, *indices])
        for number in range(20):
            assert pool.take(number) == [pools.a_megabyte(), *indices]


def test_worker_goes_on_to_the_next_batch_while_a_large_one_waits_to_be_taken(tmp_path: Path) -> None:
    after = gate(tmp_path / "after")
    with Pool(work({0: pools.a_megabyte, 1: WaitAt(after)}), context=FORK) as pool:
        pool.resize(1)
        pool.wait_ready()
        pool.submit(0, [0])
        pool.submit(1, [1])
        open_gate(after)  # nobody has taken the first
        assert pool.take(0) == [pools.a_megabyte()]


class Counted:
    """What a batch becomes where it is taken in."""

    num_alive = 0

    def __init__(self, _: str) -> None:
        Counted.num_alive += 1

    def __del__(self) -> None:
        Counted.num_alive -= 1


def test_forgotten_batches_are_freed(tmp_path: Path) -> None:
    busy = gate(tmp_path / "busy")
    doing: dict[int, Callable[[], Any]] = {0: WhenTaken(Counted, ""), 1: Both(WaitAt(busy), WhenTaken(Counted, ""))}
    with Pool(work(doing), context=FORK) as pool:
        pool.resize(1)
        pool.wait_ready()
        for number in range(4):
            pool.submit(number, [number % 2 if number < 3 else 9])
        assert type(pool.take(0)[0]) is Counted
        pool.forget(1)
        pool.forget(2)
        open_gate(busy)
        assert pool.take(3) == [9]
        gc.collect()
        assert Counted.num_alive == 0


def test_worker_that_is_one_too_many_is_killed_if_it_hangs_in_a_batch_that_nobody_wants() -> None:
    made = work({0: pools.pid, 1: pools.hang_for_ever})
    with Pool(made, context=FORK, end_seconds=0.1) as pool:
        ((pid,),) = batches_made(pool, 1, [[0]])
        watched = os.pidfd_open(pid)
        pool.submit(1, [1])
        pool.forget(1)
        pool.resize(0)
        assert _is_readable_soon(watched)
    os.close(watched)


def test_forgotten_before_any_worker_has_it_is_never_made(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with Pool(work({0: Once(mark, pools.pid)}), context=FORK) as pool:
        pool.submit(0, [0])
        pool.forget(0)
        assert batches_made(pool, 1, [[1]]) == [[1]]
    assert not mark.exists()


# --- workers die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("die", "words"),
    [
        (pools.die_by_sigkill, "was killed by SIGKILL"),
        (pools.die_by_segfault, "was killed by SIGSEGV"),
        (pools.die_by_exit, "exited with code 3"),
    ],
)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_a_dead_worker_had_is_made_again(
    method: str, die: Callable[[], None], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = work({7: Once(tmp_path / "mark", die)}, collate_fn=default_collate)
    with Pool(made, context=multiprocessing.get_context(method)) as pool:
        batches = batches_made(pool, 2, [[2 * number, 2 * number + 1] for number in range(12)])
        pool.wait_ready(2)
    assert [batch.tolist() for batch in batches] == [[2 * number, 2 * number + 1] for number in range(12)]
    (warning,) = warnings_in(caplog)
    assert words in warning
    assert "pid " in warning
    assert "samples 6, 7" in warning


def test_a_batch_that_took_long_is_pickled_while_the_next_is_made() -> None:
    begun = pools.Begun()
    with Pool(work({0: begun.first, 1: begun.second}), context=FORK) as pool:
        assert batches_made(pool, 1, [[0], [1]]) == [[True], [True]]


def test_what_a_worker_dies_of_in_pickling_is_named() -> None:
    def dies() -> pools.Heavy:
        pools.take_long()
        return pools.Heavy(pools.die_by_sigkill)

    with Pool(work({1: dies}), context=FORK) as pool, pytest.raises(WorkerDiedError, match=r"sample 1 of"):
        batches_made(pool, 1, [[0], [1]])


def test_what_a_dead_worker_had_is_made_again_in_order(tmp_path: Path) -> None:
    made = tmp_path / "made"
    doing = {index: pools.NoteIn(made, str(index)) for index in range(6)}
    with Pool(work({**doing, 0: Both(Once(tmp_path / "mark", pools.die_by_exit), doing[0])}), context=FORK) as pool:
        batches_made(pool, 1, [[index] for index in range(6)])
    assert made.read_text() == "012345"


def test_tensors_that_went_with_their_worker_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    after = gate(tmp_path / "after")
    doing: dict[int, Callable[[], Any]] = {0: pools.a_tensor, 1: Once(tmp_path / "mark", WaitAt(after))}
    with Pool(work({**doing, 2: pools.pid}), context=FORK) as pool:
        ((victim,),) = batches_made(pool, 1, [[2]])
        pool.submit(1, [0])
        pool.submit(2, [1])
        open_gate(after)  # the first is in the pipe
        os.kill(victim, signal.SIGKILL)
        assert torch.equal(pool.take(1)[0], torch.arange(1000))
        assert pool.take(2) == [1]
    assert len(warnings_in(caplog)) == 1


def test_tensors_that_went_with_a_worker_that_was_to_retire_are_made_again() -> None:
    with Pool(work({0: pools.a_tensor, 1: pools.pid}), context=FORK) as pool:
        ((victim,),) = batches_made(pool, 1, [[1]])
        watched = os.pidfd_open(victim)
        pool.submit(1, [0])
        assert _is_readable_soon(pool._crew.ready[0].results_descriptor)
        os.kill(victim, signal.SIGKILL)
        assert _is_readable_soon(watched)
        pool.resize(0)
        assert torch.equal(pool.take(1)[0], torch.arange(1000))
    os.close(watched)


def test_idle_worker_that_dies_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with Pool(work({0: pools.pid}), context=FORK) as pool:
        ((victim,),) = batches_made(pool, 1, [[0]])
        os.kill(victim, signal.SIGKILL)
        pool.submit(1, [0])
        assert pool.take(1)[0] != victim
    (warning,) = warnings_in(caplog)
    assert f"pid {victim} was killed by SIGKILL" in warning


def test_a_task_is_not_blamed_for_the_deaths_of_idle_workers_that_never_had_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (gate(tmp_path / name) for name in ("first", "second", "third"))
    doing = {0: Both(WaitAt(first), pools.pid), 1: Both(WaitAt(second), pools.pid), 2: Both(WaitAt(third), pools.pid)}
    with Pool(work({**doing, 3: pools.pid}), context=FORK) as pool:
        pool.resize(3)
        pool.wait_ready(3)
        for number in range(3):
            pool.submit(number, [number])
        for each in (first, second, third):
            open_gate(each)
        victims = {pid for number in range(3) for pid in pool.take(number)}
        assert len(victims) == 3
        for victim in victims:
            pools.kill_for_good(victim)
        pool.submit(3, [3])
        assert not set(pool.take(3)) & victims
    assert all("while it had nothing to do" in warning for warning in warnings_in(caplog))


def test_death_of_a_worker_is_seen_while_a_process_that_it_leaves_holds_its_pipes(tmp_path: Path) -> None:
    left = gate(tmp_path / "left")
    dies = Once(tmp_path / "mark", pools.DieAndLeaveAChild(left))
    try:
        with Pool(work({0: dies}), context=FORK) as pool:
            assert batches_made(pool, 1, [[0]]) == [[0]]
    finally:
        open_gate(left)


def test_every_worker_may_be_killed_again_and_again(tmp_path: Path) -> None:
    doing = {index: Once(tmp_path / f"{index}", pools.die_by_sigkill) for index in range(0, 60, 7)}
    with Pool(work(doing), context=FORK) as pool:
        pool.resize(2)
        for number in range(60):
            pool.submit(number, [number])
            if number >= 4:
                assert pool.take(number - 4) == [number - 4]
        assert [pool.take(number) for number in range(56, 60)] == [[number] for number in range(56, 60)]


def test_sample_that_kills_every_worker_is_named_and_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    with Pool(work({5: pools.die_by_exit}), context=FORK) as pool:
        pool.resize(2)
        pool.wait_ready(2)
        for number in range(4):
            pool.submit(number, [number * 3, number * 3 + 1, number * 3 + 2])
        assert pool.take(0) == [0, 1, 2]
        with pytest.raises(WorkerDiedError, match=r"sample 5 .*exited with code 3") as caught:
            pool.take(1)
        assert [pool.take(2), pool.take(3)] == [[6, 7, 8], [9, 10, 11]]
    assert caught.value.indices == (5,)
    assert isinstance(caught.value, ElasticError)
    assert len(warnings_in(caplog)) == 3


def test_batch_that_kills_every_worker_only_as_a_whole_is_named() -> None:
    def collate(samples: list[int]) -> list[int]:
        if len(samples) > 1:
            pools.die_by_sigkill()
        return samples

    with Pool(work(collate_fn=collate), context=FORK) as pool:
        with pytest.raises(WorkerDiedError, match="samples 0, 1, 2 ") as caught:
            batches_made(pool, 1, [[0, 1, 2]])
        pool.submit(1, [0])
        assert pool.take(1) == [0]
    assert caught.value.indices == (0, 1, 2)


def test_batch_that_kills_two_workers_is_made_by_the_third(tmp_path: Path) -> None:
    doing = {1: Both(Once(tmp_path / "a", pools.die_by_exit), Once(tmp_path / "b", pools.die_by_exit))}
    with Pool(work(doing), context=FORK) as pool:
        assert batches_made(pool, 1, [[0, 1, 2], [3]]) == [[0, 1, 2], [3]]


def test_retiring_worker_that_dies_leaves_nothing_unmade(tmp_path: Path) -> None:
    busy = gate(tmp_path / "busy")
    dies = Once(tmp_path / "mark", Both(WaitAt(busy), pools.die_by_sigkill))
    with Pool(work({0: dies}), context=FORK) as pool:
        pool.resize(1)
        pool.wait_ready()
        pool.submit(0, [0])
        pool.submit(1, [1])
        pool.resize(0)
        open_gate(busy)
        assert [pool.take(0), pool.take(1)] == [[0], [1]]
        assert pool.num_ready == 0


def test_workers_that_never_become_ready_are_an_error() -> None:
    with (
        Pool(work(worker_init_fn=lambda _: pools.die_by_exit()), context=FORK) as pool,
        pytest.raises(WorkerDiedError, match="exited with code 3"),
    ):
        batches_made(pool, 1, [[0]])


@pytest.mark.parametrize("waits", [False, True])
def test_dataset_that_cannot_be_sent_to_a_worker_is_an_error(waits: bool) -> None:
    with Pool(work({0: lambda: 0}), context=multiprocessing.get_context("spawn")) as pool:
        pool.resize(2)
        pool.submit(0, [0])
        with pytest.raises((AttributeError, TypeError, ValueError), match="pickle"):
            pool.wait_ready() if waits else pool.take(0)


# --- workers hang ----------------------------------------------------------------------------------------------------


def test_hung_worker_is_an_error_that_says_where_it_hangs() -> None:
    made = work({3: pools.hang_for_ever, 0: pools.pid})
    with Pool(made, context=FORK, timeout_seconds=0.5, end_seconds=0.1) as pool:
        pool.resize(1)
        pool.submit(0, [0])
        (pid,) = pools.however_late(lambda: pool.take(0))
        pool.submit(1, [2, 3])
        with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0\.5 seconds") as caught:
            pool.take(1)
    assert f"pid {pid}" in str(caught.value)
    assert "samples 2, 3" in str(caught.value)
    assert "in hang_for_ever" in str(caught.value)


def test_worker_that_hangs_while_it_starts_is_an_error() -> None:
    made = work(worker_init_fn=lambda _: pools.hang_for_ever())
    with Pool(made, context=FORK, timeout_seconds=0.5, end_seconds=0.1) as pool:
        pool.resize(1)
        with pytest.raises(RuntimeError, match="worker_init_fn"):
            pool.wait_ready()
        pool.submit(0, [0])
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
            pool.take(0)


# --- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_resizes", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_left")
def test_resizes_leave_nothing(num_resizes: int) -> None:
    most = 0
    with pools.within(600), Pool(work({0: pools.a_tensor}), context=FORK) as pool:
        pool.resize(1)
        pool.wait_ready()
        for number in range(num_resizes):
            pool.resize(1 + (number + 1) % 2)
            pool.wait_ready(2)
            pool.submit(2 * number, [0])
            pool.submit(2 * number + 1, [0])
            pool.take(2 * number)
            pool.take(2 * number + 1)
            most = max(most, len(held().descriptors))
    assert most < 100  # those that retire go at once, rather than in the end


@pytest.mark.usefixtures("nothing_left")
def test_resizes_that_nobody_waits_for_leave_nothing() -> None:
    with Pool(work(), context=FORK) as pool:
        for number in range(1000):
            pool.resize(number % 3)


@pytest.mark.usefixtures("nothing_left")
def test_early_close_with_batches_outstanding_leaves_nothing(tmp_path: Path) -> None:
    doing: dict[int, Callable[[], Any]] = {0: pools.a_tensor, 1: pools.a_megabyte, 2: WaitAt(gate(tmp_path / "never"))}
    pool = Pool(work(doing), context=FORK, end_seconds=0.1)
    pool.resize(3)
    pool.wait_ready(3)
    for number in range(12):
        pool.submit(number, [0, number % 2])
    pool.take(0)
    pool.submit(12, [2])
    pool.resize(5)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit(13, [0])
    with pytest.raises(ValueError, match="closed"):
        pool.resize(1)


@pytest.mark.usefixtures("nothing_left")
def test_pool_that_is_dropped_without_close_leaves_nothing() -> None:
    pool = Pool(work(), context=FORK)
    pool.resize(2)
    pool.wait_ready()
    del pool


@pytest.mark.usefixtures("nothing_left")
def test_dead_workers_and_probes_leave_nothing() -> None:
    doing: dict[int, Callable[[], Any]] = {1: pools.die_by_sigkill, 0: pools.a_tensor}
    with Pool(work(doing), context=FORK) as pool:
        with pytest.raises(WorkerDiedError):
            batches_made(pool, 2, [[0, 1], [0]])
        assert torch.equal(pool.take(1)[0], torch.arange(1000))


@pytest.mark.usefixtures("nothing_left")
def test_interrupt_while_a_batch_is_waited_for_leaves_nothing() -> None:
    with (
        Pool(work({0: pools.InterruptAndHang(os.getpid())}), context=FORK, end_seconds=0.1) as pool,
        pytest.raises(KeyboardInterrupt),
    ):
        batches_made(pool, 2, [[0], [1]])


def _interrupt_once(mark: str) -> str:
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return "taken"
    raise KeyboardInterrupt


@pytest.mark.usefixtures("nothing_left")
def test_after_an_interrupt_no_batch_is_taken_for_another(tmp_path: Path) -> None:
    with Pool(work({1: WhenTaken(_interrupt_once, str(tmp_path / "mark"))}), context=FORK) as pool:
        assert batches_made(pool, 1, [[0]]) == [[0]]
        for number in range(1, 4):
            pool.submit(number, [number])
        with pytest.raises(KeyboardInterrupt):
            pool.take(1)
        assert [pool.take(number) for number in (1, 2, 3)] == [["taken"], [2], [3]]


def test_after_an_interrupt_while_a_batch_is_pinned_it_can_be_taken() -> None:
    pinned: Future[Any] = Future()

    def finish(batch: Any) -> Future[Any]:
        interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        interrupt.start()  # while take() waits for what this gives
        return pinned

    with Pool(work(), context=FORK, finish=finish) as pool:
        with pytest.raises(KeyboardInterrupt):
            batches_made(pool, 1, [[0]])
        pinned.set_result("pinned")
        assert pool.take(0) == "pinned"
        with pytest.raises(KeyError):
            pool.take(0)


def test_workers_and_what_they_are_forked_from_go_away_when_the_parent_is_killed(
    ranks: RankPool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("from tests.support.pools import main_of_a_job; main_of_a_job()")
    with Script(ranks, [str(script)], folder=tmp_path, env=os.environ) as job:
        watched = [os.pidfd_open(int(pid)) for pid in job.stdout.readline().split()]
        job.kill()
    assert len(watched) >= 2
    for descriptor in watched:
        assert _is_readable_soon(descriptor), "a worker is still there"
        os.close(descriptor)


# --- beside others ---------------------------------------------------------------------------------------------------


def test_workers_may_be_forked_while_another_thread_holds_the_locks_of_logging() -> None:
    def log(worker_id: int) -> None:
        logging.getLogger("in a worker").error("started")

    handler = logging.StreamHandler()
    logging.getLogger("in a worker").addHandler(handler)
    try:
        handler.acquire()  # for as long as the workers start
        with Pool(work(worker_init_fn=log), context=FORK) as pool:
            assert batches_made(pool, 2, [[0], [1]]) == [[0], [1]]
    finally:
        handler.release()
        logging.getLogger("in a worker").removeHandler(handler)


@pytest.mark.usefixtures("nothing_left")
def test_pools_side_by_side_outlive_each_others_workers() -> None:
    doing: dict[int, Callable[[], Any]] = {0: pools.pid}
    with Pool(work(doing), context=FORK) as first:
        first.resize(1)
        with Pool(work(doing), context=FORK) as second:
            for number in range(5):
                for pool in (first, second):
                    pool.resize(1 + number % 2)
                    pool.submit(2 * number, [0])
                    pool.submit(2 * number + 1, [1])
                    os.kill(pool.take(2 * number)[0], signal.SIGKILL)
                    assert pool.take(2 * number + 1) == [1]
        first.submit(100, [1])
        assert first.take(100) == [1]


def test_torch_that_keeps_its_parts_elsewhere_is_declined_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_loop", lambda dataset, index_queue: None)
    with pytest.raises(ElasticError, match=r"_worker_loop with the known parameters .*done_event"):
        Pool(work(), context=FORK)
    monkeypatch.delattr(torch.utils.data._utils.worker, "_worker_loop")
    with pytest.raises(ElasticError, match=r"torch .* has no torch\.utils\.data\._utils\.worker\._worker_loop"):
        Pool(work(), context=FORK)
