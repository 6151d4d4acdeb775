"""Ranks that die, fail, leave or lose count of their steps: every other rank learns of it, and of whom."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from elastic_ext import ElasticConfig, ElasticError
from elastic_ext.errors import RanksDisagreeError
from elastic_ext.ranks.group import Ranks
from tests.support.faults import Fault, Faults
from tests.support.loops import Every, RecordingApplier, errors_of, follower_of, put, rate, same, seen_by, take_step
from tests.support.ranks import RankPool
from tests.support.thinning import the_first

NUM_STEPS = 10_000  # more than ranks take before their deadline is over

# --- ranks that die, fail or come apart -----------------------------------------------------------------------------


def any_step(rank: int, phase: str, action: Literal["kill", "raise"]) -> Faults:
    """A fault at the first step from 5 on that comes to this phase, however late a change of the file is seen."""
    return Faults(*(Fault(rank=rank, step=step, phase=phase, action=action) for step in range(5, NUM_STEPS)))


def follow_and_die(rank: int, folder: Path, faults: Faults) -> None:
    """Only the agreement runs between the ranks here, so that it is what hears of the death."""

    def strike(phase: str, new: ElasticConfig) -> None:
        faults.at(rank=rank, step=follower.step, phase=phase)

    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        follower.add(RecordingApplier(before=strike))
        for step in range(NUM_STEPS):
            if step % 5 == 0:
                put(folder, rank, rate(step + 1, 0.1 + step))
            faults.at(rank=rank, step=step, phase="step")
            follower.boundary()


@pytest.mark.parametrize("phase", the_first(["apply", "step", "check"]))
def test_a_rank_killed_in_mid_agreement_is_named_by_the_others_within_seconds(
    ranks: RankPool, tmp_path: Path, phase: str
) -> None:
    outcomes = ranks.run_outcomes(3, follow_and_die, tmp_path, any_step(1, phase, "kill"), deadline_seconds=45.0)
    assert outcomes[1].exit_signal == 9
    for text in errors_of(outcomes, but=1):
        assert text.startswith("PeerLostError: rank ")
        assert (
            f"rank 1 ({socket.gethostname()}, pid {outcomes[1].pid}) gave no sign: it died, hangs or is elsewhere"
            in text
        )


def follow_the_holder_of_the_store(rank: int, folder: Path, num_ranks: int) -> None:
    """As without a launcher: the store lives in rank 0's process, and that process dies."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for other in range(1, num_ranks):
            (folder / f"port-for-{other}").write_text(str(store.port))
    else:
        port = int((folder / f"port-for-{rank}").read_text())  # waits for it
        store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    follow_and_die(rank, folder, Faults(Fault(rank=0, step=8, phase="step", action="kill")))


def test_survivors_of_the_rank_that_held_the_store_raise_without_it(ranks: RankPool, tmp_path: Path) -> None:
    for other in (1, 2):
        os.mkfifo(tmp_path / f"port-for-{other}")
    outcomes = ranks.run_outcomes(
        3, follow_the_holder_of_the_store, tmp_path, 3, process_group=False, deadline_seconds=45.0
    )
    assert outcomes[0].exit_signal == 9
    for text in errors_of(outcomes, but=0):
        assert text.startswith("PeerLostError: rank ")
        assert "the store cannot be reached either" in text


def fail_between_steps(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        for step in range(1000):
            if rank == 2 and step == 7:
                raise LookupError("no such sample")
            follower.boundary()


def test_an_exception_that_leaves_one_rank_is_told_to_the_others(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, fail_between_steps, tmp_path, deadline_seconds=45.0)
    assert outcomes[2].error is not None
    assert outcomes[2].error.type_name == "LookupError"
    for text in errors_of(outcomes, but=2):
        assert text.startswith("PeerLostError")
        assert "failed after 7 steps" in text
        assert "LookupError: no such sample" in text


def take_own_number_of_steps(rank: int, folder: Path, numbers: list[int], every: Every) -> None:
    with follower_of(folder, rank, agree_every_steps=every) as follower:
        for _ in range(numbers[rank]):
            follower.boundary()


@pytest.mark.parametrize("every", [1, 50])
def test_ranks_that_stop_after_different_numbers_of_steps_all_learn_who_did_what(
    ranks: RankPool, tmp_path: Path, every: Every
) -> None:
    outcomes = ranks.run_outcomes(3, take_own_number_of_steps, tmp_path, [10, 12, 10], every, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in "), text
        assert "rank 0: 10 steps, 10 boundaries (ending training)" in text
        assert "rank 1: 1" in text
        assert "rank 2: 10 steps, 10 boundaries (ending training)" in text


def skip_one_backward(rank: int, folder: Path) -> None:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        for step in range(30):
            take_step(follower, seen, backwards=step + 1 - (rank == 1 and step >= 9))


def test_a_backward_pass_skipped_on_one_rank_is_found_at_the_next_agreement(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, skip_one_backward, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in backward passes: ")
        assert "rank 0: 10 steps, 10 boundaries, 10 backward passes" in text
        assert "rank 1: 10 steps, 10 boundaries, 9 backward passes" in text
        assert "rank 2: 10 steps" in text


def skip_one_boundary(rank: int, folder: Path) -> None:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        for step in range(30):
            if not (rank == 0 and step == 12):
                follower.boundary(step=step + 1)
        assert seen is not None


def test_a_boundary_left_out_by_one_rank_is_found(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, skip_one_boundary, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in steps: ")


def schedule_and_skip(rank: int, folder: Path) -> None:
    put_folder = folder / str(rank)
    put_folder.mkdir(exist_ok=True)
    put(folder, rank, rate(1, 0.5, apply_at_step=20))
    with follower_of(folder, rank) as follower:
        for step in range(40):
            if not (rank == 1 and step == 18):
                follower.boundary(step=step + 1)


def test_a_rank_that_is_elsewhere_when_a_scheduled_config_is_due_is_found_before_it_is_applied(
    ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = ranks.run_outcomes(2, schedule_and_skip, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in ")


def end_epochs(rank: int, folder: Path, lengths: list[list[int]]) -> None:
    with follower_of(folder, rank, agree_every_steps=100, timeout_seconds=4.0) as follower:
        for epoch in lengths[rank]:
            for _ in range(epoch):
                follower.boundary()
            follower.end_epoch()


def test_an_epoch_that_ended_early_on_one_rank_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, end_epochs, tmp_path, [[5, 8], [5, 6], [5, 8]], deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in boundaries, steps: ")
        assert "rank 0: 13 steps" in text
        assert "rank 1: 11 steps" in text


def test_ranks_that_end_their_epochs_together_go_on(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, end_epochs, tmp_path, [[5, 8, 0, 3]] * 3)


def come_late_to_the_end(rank: int, folder: Path, gate: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=2.0) as follower:
        follower.boundary()
        if rank == 1:
            gate.read_bytes()  # until rank 0 has given up
        try:
            follower.end_epoch()
        finally:
            if rank == 0:
                gate.write_bytes(b"go on")


def test_a_rank_that_does_not_come_to_the_end_is_named_after_the_deadline(ranks: RankPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    outcomes = ranks.run_outcomes(3, come_late_to_the_end, tmp_path, gate, deadline_seconds=45.0)
    texts = errors_of(outcomes, but=1)
    late = f"rank 1 ({socket.gethostname()}, pid {outcomes[1].pid}) "
    assert all("while waiting for the other ranks at the end of an epoch, after 1 steps" in text for text in texts)
    assert all(late in text for text in texts)
    assert any(late + "gave no sign" in text for text in texts)  # whoever gives up last may find it awake


# --- at the end, and after it ------------------------------------------------------------------------------------


def die_at_the_end(rank: int, folder: Path, gate: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        for _ in range(5):
            follower.boundary()
        if rank == 1:
            gate.read_bytes()
            os.kill(os.getpid(), 9)
        if rank == 0:
            gate.write_bytes(b"the others are at the end, or nearly")


def test_a_rank_that_dies_while_the_others_wait_at_the_end_is_noticed_at_once(ranks: RankPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    outcomes = ranks.run_outcomes(3, die_at_the_end, tmp_path, gate, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=1):
        assert text.startswith("PeerLostError")
        assert f"pid {outcomes[1].pid}) gave no sign" in text


def end_unevenly_with_news(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        for step in range(10 + (rank == 0)):
            if step == 9:
                follower.request_save()
            follower.boundary()


def test_ranks_that_end_unevenly_with_something_to_say_learn_who_did_what(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, end_unevenly_with_news, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in ")
        assert "rank 0: 11 steps" in text
        assert "rank 1: 10 steps" in text


def end_an_epoch_or_the_run(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        follower.boundary()
        if rank == 0:
            follower.end_epoch()


def test_the_end_of_an_epoch_is_not_taken_for_the_end_of_the_run(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, end_an_epoch_or_the_run, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: ranks differ in what they do: ")
        assert "rank 0: 1 steps, 1 boundaries (ending an epoch)" in text


def go_on_after_close(rank: int, folder: Path) -> list[str]:
    follower = follower_of(folder, rank)
    with follower:
        follower.boundary()
    texts = []
    for call in (follower.boundary, follower.end_epoch, lambda: follower.propose({"user.x": 1}, "late")):
        try:
            call()
        except ElasticError as error:
            texts.append(str(error))
    return texts


def test_a_closed_follower_does_not_go_on_alone(ranks: RankPool, tmp_path: Path) -> None:
    texts = same(ranks.run(2, go_on_after_close, tmp_path))
    assert len(texts) == 3
    assert all("the connection to the other ranks has ended" in text for text in texts)


def wait_at_the_edge_of_a_slice(rank: int, num_waits: int) -> None:
    pause = threading.Event()
    joined = Ranks.join(timeout_seconds=60.0)
    joined.slice_seconds = 0.002
    for number in range(num_waits):
        if rank == 1:
            pause.wait(0.0015 + 0.001 * (number % 100) / 100)
        joined.sum([1], "waiting")
    joined.close()


def test_a_wait_that_is_over_just_as_its_slice_of_time_is_loses_nobody(ranks: RankPool) -> None:
    ranks.run(2, wait_at_the_edge_of_a_slice, 1500)


def end_early_with_a_schedule_under_way(rank: int, folder: Path) -> None:
    with seen_by() as seen, follower_of(folder, rank, timeout_seconds=600.0) as follower:
        for step in range(6 + (rank == 1)):
            if step == 5:
                put(folder, rank, rate(1, 0.5, apply_at_step=6), seen_by=follower)
            follower.boundary()
        assert seen.applied == []


def test_ranks_that_read_one_pulse_at_different_places_raise_before_anything_is_applied(
    ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = ranks.run_outcomes(2, end_early_with_a_schedule_under_way, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text == (
            "RanksDisagreeError: ranks are at different places: "
            "rank 0: 6 steps, 6 boundaries; rank 1: 7 steps, 7 boundaries; make the same calls on every rank"
        )


def close_on_one_rank(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        follower.boundary()
        if rank == 1:
            follower.close()


def test_a_rank_that_closes_its_follower_before_the_end_is_named(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, close_on_one_rank, tmp_path, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert "failed after 1 steps, 1 boundaries: it closed its follower" in first
    assert second.startswith("ElasticError: follower.close() was called, and with that the connection")


def end_while_a_peer_is_in_a_collective_of_its_own(rank: int, folder: Path) -> None:
    with seen_by() as seen, follower_of(folder, rank, timeout_seconds=2.0) as follower:
        for _ in range(3):
            take_step(follower, seen)
        if rank == 1:
            follower.end_epoch()
        dist.all_reduce(torch.ones(()))


def test_a_rank_that_ended_early_gives_up_after_the_timeout_and_frees_its_peers(
    ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = ranks.run_outcomes(2, end_while_a_peer_is_in_a_collective_of_its_own, tmp_path, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert second.startswith("PeerLostError: rank 1")
    assert "rank 0" in second
    assert "gave no sign: it died, hangs or is elsewhere" in second
    assert first.startswith("RuntimeError"), "what the user's own collective raises"


def give_up_and_end(rank: int) -> str:
    """The first rank waits for the other, where nothing tells it that this has given up."""
    ranks = Ranks.join(timeout_seconds=600.0)
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(()))
        return str(raised.value)
    words = r"rank 1 .* left a step, after the start: rank 0 .* did not, and waits"
    with ranks.waiting_at_most(1.0, "left a step"), pytest.raises(RanksDisagreeError, match=words):
        ranks.sum([1], "ending")
    ranks.close()
    raise LookupError("and this process ends")


def test_what_a_rank_gave_up_waiting_for_does_not_keep_its_process(ranks: RankPool) -> None:
    stayed, left = ranks.run_outcomes(2, give_up_and_end, deadline_seconds=60.0)
    assert left.error is not None and left.error.type_name == "LookupError"
    assert "Connection closed" in stayed.value or "Connection reset" in stayed.value
