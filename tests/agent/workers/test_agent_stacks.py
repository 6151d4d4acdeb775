"""Stacks of workers that hang, asked of real processes; and what is read in them."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_ext.agent.workers.hangs import HangLimits
from elastic_ext.agent.workers.monitor import Monitor, Watched
from elastic_ext.agent.workers.stacks import Captured, Frame, Thread, Where, capture, parse_stacks, told_apart, where_of
from elastic_ext.ranks.heartbeat import heartbeat_file, read_heartbeat, stacks_file
from elastic_ext.ranks.processes import process_of
from tests.support.beating import Worker, state_of, until, worker
from tests.support.ranks import RankPool
from tests.support.training import make_data, make_model, trainer_of


def captured(folder: Path, *workers: Worker, patience_seconds: float = 30.0, py_spy: str | None = None) -> Captured:
    return capture(
        [each.watched for each in workers],
        run_dir=folder / "run",
        pulse_dir=folder,
        reason="a test",
        patience_seconds=patience_seconds,
        py_spy=py_spy,
    )


def text_of(found: Captured) -> str:
    assert found.path is not None
    return found.path.read_text()


def stop(process: Worker) -> None:
    os.kill(process.process.pid, signal.SIGSTOP)
    until(lambda: state_of(process.process.pid) == "T")


# --- real workers ---------------------------------------------------------------------------------------------------


def test_of_workers_that_hang_in_many_ways_each_is_asked_in_the_way_that_it_can_answer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        does = ["waits for a lock", "keeps the interpreter", "gets on", "is in a step", "tells nothing"]
        last = does.index("gets on")  # which takes a processor as long as it is there
        ranks = sorted(range(len(does)), key=lambda rank: rank == last)
        made = {rank: stack.enter_context(worker(does[rank], tmp_path, rank)) for rank in ranks}
        workers = [made[rank] for rank in range(len(does))]
        stop(workers[3])
        found = captured(tmp_path, *workers)
        text = text_of(found)
        places = {each.rank: str(each) for each in found.places}
        assert places[0].startswith("rank 0, MainThread: beating.py:")
        assert places[0].endswith("in waits_for_a_lock")
        assert places[1].endswith("in keeps_the_interpreter")
        assert 2 in places
        assert set(places) == {0, 1, 2}
        for place in places.values():
            assert place in text.partition("====")[0]
        sections = text.split("==== ")
        assert "it is stopped (state T), and writes nothing" in sections[4]
        assert f"{workers[3].process.pid}: python" in sections[4]
        assert "it does not write its stacks when it is asked to" in sections[5]
        assert all(each.process.poll() is None for each in workers), "asking has ended one"


def test_a_worker_writes_its_stacks_as_often_as_it_is_asked(tmp_path: Path) -> None:
    with worker("waits for a lock", tmp_path) as hung:
        for number in range(1, 4):
            (place,) = captured(tmp_path, hung).places
            assert place.frame is not None
            assert place.frame.function == "waits_for_a_lock"
            assert len(list((tmp_path / "run" / "stacks").iterdir())) == number


def test_a_process_that_has_become_another_program_is_not_sent_a_signal_that_would_end_it(tmp_path: Path) -> None:
    with worker("becomes another program", tmp_path) as changed:
        until(lambda: Path(f"/proc/{changed.process.pid}/comm").read_text().strip() == "sleep")
        found = captured(tmp_path, changed)
        assert found.places == ()
        assert changed.process.poll() is None


def test_a_worker_that_has_ended_is_no_error(tmp_path: Path) -> None:
    with worker("is in a step", tmp_path) as gone:
        gone.process.kill()
        gone.process.wait()
        assert "state ended" in text_of(captured(tmp_path, gone))


def test_whoever_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with worker("does not answer", tmp_path) as silent:
        text = text_of(captured(tmp_path, silent, patience_seconds=0.2))
        assert "it did not write its stacks within 0.2 s" in text
        assert f"{silent.process.pid}: python" in text


def test_no_stacks_are_written_to_a_file_that_is_another_by_now(tmp_path: Path) -> None:
    with worker("has closed what was open", tmp_path) as changed:
        text = text_of(captured(tmp_path, changed))
        assert "it has closed its stacks file" in text
        assert (tmp_path / "of its own").read_bytes() == b""
        assert changed.process.poll() is None


def test_the_file_is_found_wherever_the_worker_has_it(tmp_path: Path) -> None:
    with worker("waits for a lock", tmp_path) as hung:
        stacks_file(tmp_path / "run", 0).unlink()
        assert len(captured(tmp_path, hung).places) == 1


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    with worker("tells nothing", tmp_path) as silent:
        paths = [captured(tmp_path, silent).path for _ in range(12)]
    assert sorted((tmp_path / "run" / "stacks").iterdir()) == paths[-10:]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with worker("waits for a lock", tmp_path) as hung:
        (tmp_path / "run" / "stacks").write_text("no folder")
        found = captured(tmp_path, hung)
    assert found.path is None
    assert len(found.places) == 1
    assert "cannot be written" in caplog.text


def test_another_program_looks_at_what_says_nothing_itself(tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "looked: $*"\n')
    program.chmod(0o700)
    with worker("tells nothing", tmp_path) as silent:
        assert f"looked: dump --nonblocking --pid {silent.process.pid}" in text_of(
            captured(tmp_path, silent, py_spy=str(program))
        )
        program.write_text("#!/bin/sh\necho begun\nexec sleep 600\n")
        assert "begun" in text_of(captured(tmp_path, silent, patience_seconds=0.5, py_spy=str(program)))
        assert "py-spy: " in text_of(captured(tmp_path, silent, py_spy=str(tmp_path / "none")))


# --- two ranks that train -------------------------------------------------------------------------------------------


class Hanging(nn.Module):
    """A model whose forward pass waits, on one rank and in the third step, until a file is there."""

    def __init__(self, rank: int, go: Path) -> None:
        super().__init__()
        self.model, self.rank, self.go, self.num_calls = make_model(), rank, go, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.rank == 1 and self.num_calls == 3:
            self.wait_here()
        found: torch.Tensor = self.model(inputs)
        return found

    def wait_here(self) -> None:
        until(lambda: self.go.exists() or None)


def train(rank: int, folder: Path) -> int:
    model = nn.parallel.DistributedDataParallel(Hanging(rank, folder / "go"))
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=4, micro_batch_size=2)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = make_data(2)
    with trainer:
        for _ in range(4):
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    step: int = trainer.global_step
    return step


def test_of_two_ranks_that_train_the_hung_one_is_named_by_where_it_is(ranks: RankPool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(ranks.run, 2, train, tmp_path, env={"ELASTIC_EXT_PULSE_DIR": str(tmp_path)})
        try:
            pulses = [until(partial(read_heartbeat, heartbeat_file(tmp_path, rank))) for rank in (0, 1)]
            workers = []
            for pulse in pulses:
                process = process_of(pulse.pid)
                assert process is not None
                workers.append(Watched(local_rank=pulse.rank, rank=pulse.rank, seat=pulse.rank, process=process))
            monitor = Monitor(
                run_dir=tmp_path,
                pulse_dir=tmp_path,
                limits=HangLimits(step_seconds=1.0, first_seconds=1.0),
                every_seconds=0.1,
            )

            def hang() -> str | None:
                seen = monitor.look(workers, restart=0, membership_version=0, world_size=2)
                hangs = (
                    seen is not None and seen.hang is not None and all(each.step == 2 for each in seen.record.workers)
                )
                return seen.hang.reason if seen is not None and seen.hang is not None and hangs else None

            reason = until(hang)
            assert "in step 3" in reason
            found = capture(workers, run_dir=tmp_path, pulse_dir=tmp_path, reason=reason, patience_seconds=30.0)
        finally:
            (tmp_path / "go").touch()
        assert outcomes.result() == [4, 4]
    text = text_of(found)
    assert reason in text
    assert len(found.places) == 2
    assert found.look_at.startswith("rank 1, MainThread: ")
    assert found.look_at.endswith(", while rank 0 is in code that all ranks run together")
    assert "in wait_here" in text
    assert "_engine_run_backward" in text


# --- reading --------------------------------------------------------------------------------------------------------


def test_what_faulthandler_writes_is_read() -> None:
    lock, ready = threading.Lock(), threading.Event()

    def waits_in_a_thread() -> None:
        ready.set()
        with lock:
            pass

    with lock, tempfile.TemporaryFile("w+") as file:
        thread = threading.Thread(target=waits_in_a_thread)
        thread.start()
        ready.wait()
        faulthandler.dump_traceback(file)
        faulthandler.dump_traceback(file)  # the last one is what counts
        file.seek(0)
        text = file.read()
    thread.join()
    threads = parse_stacks(text)
    idents = [each.ident for each in threads]
    assert len(set(idents)) == len(idents)
    assert thread.ident in idents
    assert threads[-1].ident == threading.main_thread().ident
    assert threads[-1].frames[0].function == "test_what_faulthandler_writes_is_read"
    assert threads[-1].frames[0].file == __file__
    (waits,) = [each for each in threads if each.ident == thread.ident]
    assert "waits_in_a_thread" in [each.function for each in waits.frames]


TORCH = "/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (["/home/me/train.py:41:forward"], "rank 1, MainThread: train.py:41 in forward"),
        (
            [
                f"{TORCH}/autograd/graph.py:800:_engine_run_backward",
                f"{TORCH}/_tensor.py:9:backward",
                "/a/t.py:7:<module>",
            ],
            "rank 1, MainThread: t.py:7 in <module> (graph.py:800 in _engine_run_backward)",
        ),
        ([f"{TORCH}/_tensor.py:9:backward"], "rank 1, MainThread: _tensor.py:9 in backward"),
        ([], "rank 1, MainThread: no Python function"),
    ],
)
def test_a_rank_is_told_in_a_line_by_the_innermost_function_of_the_script(frames: list[str], told: str) -> None:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in (each.split(":") for each in frames)]
    text = "\n".join(["Thread 0x00000001 (most recent call first):", "  <no Python frame>", ""])
    text += "\n".join(["", "Current thread 0x0000abcd [MainThread] (most recent call first):", *lines, ""])
    assert str(where_of(1, parse_stacks(text), 0xABCD)) == told
    assert where_of(1, parse_stacks(text), 0x99) is None


def place(rank: int, file: str) -> Where:
    return Where(rank=rank, thread="MainThread", frame=Frame(file, 3, "f"), within=None)


def test_who_is_elsewhere_than_ranks_that_wait_together_is_told() -> None:
    waiting = [place(rank, f"{TORCH}/distributed/distributed_c10d.py") for rank in (0, 2)]
    assert told_apart([*waiting, place(1, "/a/train.py")]) == (
        "rank 1, MainThread: train.py:3 in f, while ranks 0 and 2 are in code that all ranks run together"
    )
    assert told_apart(waiting) == ""
    assert told_apart([place(0, "/a/train.py"), place(1, "/a/train.py")]) == ""
    assert told_apart([]) == ""


frames = st.lists(
    st.builds(
        Frame,
        st.text("abc/._-<> \"'", min_size=1, max_size=20),
        st.none() | st.integers(1, 10**6),
        st.text("abc_<>.", min_size=1, max_size=10),
    ),
    max_size=4,
)


@given(st.lists(frames, min_size=1, max_size=4), st.integers(0, 3))
def test_any_threads_are_read_as_they_were_written(given: list[list[Frame]], current: int) -> None:
    threads = tuple(Thread(number + 1, tuple(each)) for number, each in enumerate(given))
    lines = ["from something else", "  nothing"]
    for thread in threads:
        head = "Current thread" if thread.ident == current else "Thread"
        lines.append(f"{head} 0x{thread.ident:016x} (most recent call first):")
        for frame in thread.frames:
            lines.append(f'  File "{frame.file}", line {frame.line or "???"} in {frame.function}')
        lines.append("")
    assert parse_stacks("\n".join(lines)) == threads


@given(st.text())
def test_whatever_else_is_read_is_no_error(text: str) -> None:
    parse_stacks(text)
    parse_stacks(f"Current thread 0x01 (most recent call first):\n{text}")
