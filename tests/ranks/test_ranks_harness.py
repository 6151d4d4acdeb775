"""The ranks of the tests themselves: what they return, how their failures are told, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.faults import Fault, Faults
from tests.support.ranks import Outcome, RankPool, RanksFailed
from tests.support.ranks_worker import RankError

pytestmark = pytest.mark.slow  # what tests run on is tried where that is changed

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0  # for processes to end; passing takes a fraction of a second

# Says which processes it has, then hangs with one of its ranks stopped.
ORPHANING_SCRIPT = """
import json
from tests.support.faults import Fault, Faults
from tests.support.ranks import RankPool
from tests.ranks.test_ranks_harness import pid_of, strike
with RankPool() as pool:
    pool.run(2, pid_of)
    print(json.dumps(pool.pids), flush=True)
    faults = Faults(Fault(rank=0, step=0, action="hang"), Fault(rank=1, step=0, action="stop"))
    pool.run(2, strike, faults, 0, deadline_seconds=600.0)
"""


# ---- what the ranks do ----


def pid_of(rank: int) -> int:
    return os.getpid()


def ten_times(rank: int, offset: int) -> int:
    return 10 * rank + offset


def all_reduce(rank: int) -> torch.Tensor:
    value = torch.full((3,), float(rank + 1))
    dist.all_reduce(value)
    return value


def strike(rank: int, faults: Faults, step: int) -> str | None:
    return faults.at(rank=rank, step=step)


def strike_then_all_reduce(rank: int, faults: Faults) -> None:
    dist.barrier()
    faults.at(rank=rank, step=0)
    dist.all_reduce(torch.zeros(1))


def wait_for_what_never_comes(rank: int) -> int:
    if rank == 1:
        threading.Event().wait()
    return rank


def exit_with_code_three(rank: int) -> None:
    os._exit(3)


def crash(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def return_what_cannot_be_pickled(rank: int) -> object:
    return threading.Lock()


def print_a_line(rank: int) -> None:
    print(f"a line of rank {rank}")


def raise_after_printing(rank: int) -> None:
    print("the last words")
    raise ValueError("no")


def read_environment(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def change_surroundings(rank: int, folder: str) -> None:
    os.environ["RANKS_HARNESS_LEFT"] = "something"
    os.environ.pop("HOME", None)
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)


def surroundings(rank: int) -> tuple[str | None, str | None, str, bool, torch.dtype, int]:
    handles_sigterm = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    environ = os.environ.get("RANKS_HARNESS_LEFT"), os.environ.get("HOME")
    return *environ, os.getcwd(), handles_sigterm, torch.get_default_dtype(), torch.get_num_threads()


def leave_a_thread(rank: int) -> None:
    if rank == 1:
        threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()


def interrupt_and_hang(rank: int, pid_of_the_tests: int) -> None:
    dist.barrier()
    if rank == 0:
        os.kill(pid_of_the_tests, signal.SIGUSR1)
    threading.Event().wait()


def large_tensor(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + rank


def sleep_for_ever() -> None:
    threading.Event().wait()


def die_leaving_a_child(rank: int, connection_path: str) -> None:
    child = get_context("fork").Process(target=sleep_for_ever)
    child.start()
    Path(connection_path).write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def has_process_group(rank: int) -> bool:
    return dist.is_initialized()


def random_numbers(rank: int) -> torch.Tensor:
    return torch.rand(4)


def train_sharded(rank: int) -> torch.Tensor:
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight: torch.Tensor = model.weight.full_tensor().detach()  # type: ignore[attr-defined]
    return weight


# ---- what becomes of them ----


@contextlib.contextmanager
def ends_of(pids: list[int]) -> Iterator[list[int]]:
    """Descriptors that become readable as each process ends."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def have_ended(descriptors: list[int]) -> bool:
    """True when all of the processes end before the deadline."""
    return all(wait([descriptor], END_SECONDS) for descriptor in descriptors)


def folder_of(pid: int) -> Path:
    """The folder of a worker's pool: the worker's stdout is a file there."""
    return Path(f"/proc/{pid}/fd/1").readlink().parent


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_values_come_back_in_rank_order(ranks: RankPool) -> None:
    assert ranks.run(4, ten_times, 5) == [5, 15, 25, 35]


def test_the_group_really_reduces_over_all_ranks(ranks: RankPool) -> None:
    for value in ranks.run(3, all_reduce):
        assert torch.equal(value, torch.full((3,), 6.0))


def test_arguments_and_values_may_be_large(ranks: RankPool) -> None:
    tensor = torch.arange(1_000_000)
    for rank, value in enumerate(ranks.run(2, large_tensor, tensor)):
        assert torch.equal(value, tensor + rank)


def test_without_a_process_group_ranks_know_only_their_number(ranks: RankPool) -> None:
    assert ranks.run(2, has_process_group, process_group=False) == [False, False]
    assert ranks.run(2, has_process_group) == [True, True]


def test_a_later_run_uses_the_same_processes(ranks: RankPool) -> None:
    first = ranks.run(2, pid_of)
    assert ranks.run(2, pid_of) == first
    assert ranks.run(3, pid_of)[:2] == first
    assert ranks.pids[1:3] == first
    assert os.getpid() not in first


def test_warm_ranks_shard_a_model_whatever_their_number_was_before(ranks: RankPool) -> None:
    weights = [weight for num_ranks in (2, 4, 2, 1) for weight in ranks.run(num_ranks, train_sharded)]
    for weight in weights[1:]:
        assert torch.equal(weight, weights[0])


def test_random_numbers_do_not_depend_on_earlier_runs(ranks: RankPool) -> None:
    assert torch.equal(ranks.run(1, random_numbers)[0], ranks.run(1, random_numbers)[0])


def test_failed_ranks_are_raised_together_with_their_own_tracebacks(ranks: RankPool) -> None:
    faults = Faults(Fault(rank=2, step=0, action="raise"), Fault(rank=0, step=0, action="raise"))
    with pytest.raises(RanksFailed) as failed:
        ranks.run(3, strike, faults, 0)
    text = str(failed.value)
    assert text.startswith("2 of 3 ranks failed")
    assert text.index("rank 0") < text.index("planted at rank 0") < text.index("planted at rank 2")
    assert text.count("in strike") == 2
    assert [outcome.ok for outcome in failed.value.outcomes] == [False, True, False]


def test_a_killed_rank_is_told_by_its_signal_and_its_peers_by_their_errors(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(3, strike_then_all_reduce, Faults(Fault(rank=1, step=0, action="kill")))
    assert "died of SIGKILL" in str(failed.value)
    first, killed, last = failed.value.outcomes
    assert killed.exit_signal == signal.SIGKILL
    for peer in (first, last):
        assert peer.error is not None and "in strike_then_all_reduce" in peer.error.traceback


def test_a_rank_that_raises_does_not_leave_its_peers_waiting(ranks: RankPool) -> None:
    outcomes = ranks.run_outcomes(2, strike_then_all_reduce, Faults(Fault(rank=0, step=0, action="raise")))
    errors = [outcome.error for outcome in outcomes]
    assert errors[0] is not None and errors[0].type_name == "PlantedFault"
    assert errors[1] is not None and "in all_reduce" in errors[1].traceback


def test_a_hung_rank_is_told_with_the_function_it_hangs_in(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 .* hung: still running when its 5 s were over") as failed:
        ranks.run(2, wait_for_what_never_comes, deadline_seconds=5.0)
    assert "in wait_for_what_never_comes" in str(failed.value)
    assert failed.value.outcomes[0].value == 0


def test_a_rank_that_hangs_in_a_collective_is_told_with_its_stack(ranks: RankPool) -> None:
    outcomes = ranks.run_outcomes(
        2, strike_then_all_reduce, Faults(Fault(rank=1, step=0, action="stop")), deadline_seconds=5.0
    )
    assert [outcome.hung for outcome in outcomes] == [True, True]
    assert "in all_reduce" in outcomes[0].stacks
    assert "had been stopped" in outcomes[1].stacks


def test_an_exit_code_is_told(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="ended with exit code 3"):
        ranks.run(1, exit_with_code_three)


def test_a_crash_is_told_with_its_signal_and_stack(ranks: RankPool) -> None:
    (outcome,) = ranks.run_outcomes(1, crash, process_group=False)
    assert outcome.exit_signal == signal.SIGSEGV
    assert "in crash" in outcome.stacks


def test_a_value_that_cannot_be_pickled_is_that_ranks_error(ranks: RankPool) -> None:
    (outcome,) = ranks.run_outcomes(1, return_what_cannot_be_pickled)
    assert outcome.error is not None and outcome.error.type_name == "TypeError"


def test_a_function_that_cannot_be_pickled_is_refused_before_anything_runs(ranks: RankPool) -> None:
    pids = ranks.pids
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        ranks.run(1, lambda rank: rank)
    assert ranks.pids == pids


def test_what_a_rank_prints_belongs_to_its_outcome(ranks: RankPool) -> None:
    assert [outcome.output for outcome in ranks.run_outcomes(2, print_a_line)] == [
        "a line of rank 0\n",
        "a line of rank 1\n",
    ]
    with pytest.raises(RanksFailed, match="the last words"):
        ranks.run(1, raise_after_printing)


def test_only_a_worker_that_failed_is_replaced(ranks: RankPool) -> None:
    before = ranks.run(3, pid_of)
    ranks.run_outcomes(3, strike, Faults(Fault(rank=1, step=0, action="raise")), 0)
    after = ranks.run(3, pid_of)
    assert [after[0], after[2]] == [before[0], before[2]]
    assert after[1] != before[1]
    assert not exists(before[1])


def test_a_worker_that_died_between_runs_is_replaced(ranks: RankPool) -> None:
    (pid,) = ranks.run(1, pid_of)
    with ends_of([pid]) as ends:
        os.kill(pid, signal.SIGKILL)
        assert have_ended(ends)
    assert ranks.run(1, pid_of) != [pid]


def test_workers_of_an_interrupted_run_are_replaced(ranks: RankPool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = ranks.run(2, pid_of)
    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.run(2, interrupt_and_hang, os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert not set(before) & set(ranks.run(2, pid_of))


def test_a_worker_left_with_a_thread_is_replaced(ranks: RankPool) -> None:
    clean, unclean = ranks.run_outcomes(2, leave_a_thread)
    assert clean.ok and unclean.ok
    assert (clean.unclean, unclean.unclean) == ("", "left running: left behind")
    first, second = ranks.run(2, pid_of)
    assert first == clean.pid
    assert second != unclean.pid


def test_environment_folder_handlers_and_settings_are_restored(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks.run(1, surroundings)
    (changed,) = ranks.run_outcomes(1, change_surroundings, str(tmp_path))
    assert changed.ok and not changed.unclean
    assert ranks.run(1, surroundings) == before
    assert ranks.run(1, pid_of) == [changed.pid]
    assert before[0][-1] == 1


def test_environment_is_set_for_one_run(ranks: RankPool) -> None:
    name = "RANKS_HARNESS_GIVEN"
    assert ranks.run(2, read_environment, name, env={name: "for now"}) == ["for now", "for now"]
    assert ranks.run(2, read_environment, name) == [None, None]


def test_a_child_of_a_dead_rank_is_ended_with_it(ranks: RankPool, tmp_path: Path) -> None:
    (outcome,) = ranks.run_outcomes(1, die_leaving_a_child, str(tmp_path / "pid"))
    assert outcome.exit_signal == signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    if exists(pid):  # killed, and perhaps not yet gone
        with contextlib.suppress(ProcessLookupError), ends_of([pid]) as ends:
            assert have_ended(ends)


def test_closing_a_pool_leaves_no_process_or_file() -> None:
    with RankPool() as pool:
        pool.run(2, all_reduce)
        pids = pool.pids
        folder = folder_of(pids[1])
        assert folder.exists()
        with ends_of(pids) as ends:
            pool.close()
            assert have_ended(ends)
    assert not any(exists(pid) for pid in pids)
    assert not folder.exists()


def test_workers_and_files_end_with_the_process_of_the_tests_when_it_is_killed() -> None:
    script = subprocess.Popen([sys.executable, "-c", ORPHANING_SCRIPT], stdout=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert script.stdout is not None
        with script.stdout as lines:
            pids: list[int] = json.loads(lines.readline())
        assert len(pids) == 3
        folder = folder_of(pids[1])
        assert folder.exists()
        with ends_of(pids) as ends:
            assert not wait(ends, 0)
            script.kill()
            assert have_ended(ends)
        assert not folder.exists()
    finally:
        script.kill()
        script.wait()


def test_workers_end_when_their_nursery_is_killed() -> None:
    with RankPool() as pool:
        pool.run(2, pid_of)
        nursery, *workers = pool.pids
        with ends_of(workers) as ends:
            os.kill(nursery, signal.SIGKILL)
            assert have_ended(ends)
        with pytest.raises(RuntimeError, match="nursery of the ranks does not answer"):
            pool.run(3, pid_of)


def test_an_outcome_is_ok_only_when_the_function_returned() -> None:
    error = RankError(type_name="E", message="m", traceback="t")
    assert Outcome(rank=0, pid=1).ok
    assert not Outcome(rank=0, pid=1, error=error).ok
    assert not Outcome(rank=0, pid=1, exit_signal=9).ok
    assert not Outcome(rank=0, pid=1, exit_code=0).ok
    assert not Outcome(rank=0, pid=1, hung=True).ok
