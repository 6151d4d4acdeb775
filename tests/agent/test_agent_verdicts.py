"""What the end of a round means, and how failures are told of."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_ext.agent.arguments import AT_START
from elastic_ext.agent.journal import FailedNode, Failure, first_of, hung, is_consequence, told
from elastic_ext.agent.rendezvous import judge
from elastic_ext.members.decision import Counted, count

FAILURE = Failure(
    rank=3,
    local_rank=1,
    seat=3,
    host="one",
    node_id="one-1",
    pid=17,
    exit_code=1,
    time=100.0,
    message="ValueError: planted",
    traceback="Traceback (most recent call last):\n  ...\nValueError: planted\n",
)
CONSEQUENCES = [
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:10437",
    "PeerLostError: rank 0 lost a peer while beginning checkpoint step_3",
    "DistBackendError: NCCL error in: ..., remote process exited or there was a network error",
    "RanksFailedError: one rank raised",
    "DistNetworkError: failed to recv, got 0 bytes",
]


@pytest.mark.parametrize("message", CONSEQUENCES)
def test_who_lost_another_process_is_not_the_cause(message: str) -> None:
    later = replace(FAILURE, rank=1, time=101.0)
    consequence = replace(FAILURE, rank=0, message=message, time=99.0)
    assert is_consequence(consequence) and not is_consequence(later)
    assert first_of([consequence, later]) is later


def test_of_causes_the_first_is_named_and_those_that_were_told_to_end_come_last() -> None:
    killed = replace(FAILURE, exit_code=-signal.SIGKILL, message="", traceback="", time=102.0)
    drained = replace(FAILURE, exit_code=143, message="", time=90.0)
    assert first_of([killed, FAILURE, drained]) is FAILURE
    assert first_of([drained, killed]) is killed


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8), st.randoms())
def test_the_cause_is_the_same_in_whatever_order_failures_are_heard_of(times: list[float], random: object) -> None:
    failures = [replace(FAILURE, rank=rank, time=time) for rank, time in enumerate(times)]
    shuffled = list(failures)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert first_of(shuffled) == first_of(failures)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (1, "exited with status 1: ValueError: planted"),
        (-9, "ended by SIGKILL"),
        (-7, "ended by SIGBUS"),
        (-64, "ended by SIGRTMAX"),
        (-99, "ended by signal 99"),
    ],
)
def test_a_failure_names_rank_process_node_and_how_it_ended(exit_code: int, words: str) -> None:
    text = told(replace(FAILURE, exit_code=exit_code))
    assert text.startswith("rank 3 (local rank 1, pid 17) on one ") and words in text
    assert text.endswith("    ValueError: planted")


def test_a_signal_without_a_traceback_comes_with_what_may_be_behind_it() -> None:
    bare = replace(FAILURE, message="", traceback="")
    assert told(replace(bare, exit_code=-9)).endswith(
        "; either memory ran out and the kernel sent SIGKILL (`dmesg` says so), or a person or a scheduler sent it"
    )
    assert "/dev/shm" in told(replace(bare, exit_code=-7))
    assert "native code" in told(replace(bare, exit_code=-11))
    assert told(bare) == "rank 3 (local rank 1, pid 17) on one exited with status 1"


def test_a_worker_that_hung_is_told_of_as_such() -> None:
    node = FailedNode(host="one", node_id="one-1")
    assert told(hung(3, 1, 17, "it has been in step 8 for 31 s", seat=3, node=node)) == (
        "rank 3 (local rank 1, pid 17) on one hung: it has been in step 8 for 31 s"
    )


def test_of_a_long_traceback_the_end_is_told() -> None:
    text = told(replace(FAILURE, traceback="\n".join(f"line {number}" for number in range(500))))
    assert "line 499" in text and "line 100\n" not in text and "..." in text


def test_a_failure_comes_through_json() -> None:
    assert Failure.from_row(json.loads(json.dumps(FAILURE.to_row()))) == FAILURE


def verdict(failures: list[Failure], **changes: object) -> str:
    given: dict[str, object] = {
        "departed": (),
        "num_nodes": 2,
        "num_left": 0,
        "waited_seconds": 0.0,
        "silence_seconds": 16.0,
    }
    return judge(failures, **{**given, **changes}).kind  # type: ignore[arg-type]


def test_what_a_failure_is_taken_for() -> None:
    lost = replace(FAILURE, message=CONSEQUENCES[0])
    assert verdict([FAILURE]) == "failure"
    assert verdict([lost], num_nodes=1) == "failure"
    assert verdict([lost]) == "wait"  # a node may be gone, and that would not count
    assert verdict([lost], num_left=1) == "failure"  # and is taken back, should one be
    assert verdict([lost], waited_seconds=16.5) == "failure"
    assert verdict([lost], departed=["two-1"]) == "membership"
    assert verdict([lost, FAILURE]) == "failure"
    assert (
        "two-1"
        in judge([lost], departed=["two-1"], num_nodes=2, num_left=0, waited_seconds=0, silence_seconds=1).reason
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_a_round_counts_once_however_many_nodes_failed_and_not_where_one_was_lost(
    rows: list[tuple[int, bool]], num_lost: int
) -> None:
    counted = [Counted(num_failures=number, has_failed=failed) for number, failed in rows]
    most = max(number for number, _ in rows)
    has_failed = any(failed for _, failed in rows)
    assert count(counted, num_lost=num_lost) == most + (1 if has_failed and not num_lost else 0)


def test_what_is_written_at_an_exception_is_what_torchs_agent_reads(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(AT_START)!r})
os.environ["ELASTIC_EXT_AGENT_PID"] = str(os.getppid())
os.environ["TORCHELASTIC_ERROR_FILE"] = {str(tmp_path / "error.json")!r}
import sitecustomize
raise KeyError("planted")
"""
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "KeyError: 'planted'" in done.stderr
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.error_file_data["message"]["message"] == "KeyError: 'planted'"
    assert "raise KeyError" not in failure.message and failure.timestamp > 0
    assert failure.error_file_data["message"]["extraInfo"]["py_callstack"].endswith("KeyError: 'planted'\n")
