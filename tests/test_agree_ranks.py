"""Agreement among real ranks, each with a config file of its own: every change on all of them at the same step."""

from __future__ import annotations

import os
import random
import socket
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from elastic_ext import ElasticConfig, ElasticError
from elastic_ext.ranks import Ranks
from tests.faults import Fault, Faults
from tests.loops import RecordingApplier, Seen, follower_of, put, seen_by, step_until, take_step
from tests.ranks import Outcome, RankPool

Every = int | Literal["auto"]


def rate(version: int, value: float, **more: Any) -> dict[str, Any]:
    return {"version": version, "optimizer": {"learning_rate": value}, **more}


def same(everyone: list[Any]) -> Any:
    """What every rank gave, once it is sure that it is the same."""
    assert all(one == everyone[0] for one in everyone), everyone
    return everyone[0]


# --- any order, any delay -------------------------------------------------------------------------------------------


def follow_random_files(rank: int, folder: Path, seed: int, every: Every, num_steps: int) -> list[tuple[str, Any]]:
    """200 steps in which versions appear on this rank at steps of its own, some of them never, some out of order."""
    common, own = random.Random(seed), random.Random(seed * 1000 + rank)
    births = sorted(common.sample(range(num_steps - 40), 12))
    arrivals: dict[int, list[int]] = {}
    for version, birth in enumerate(births, start=1):
        if version == len(births) or own.random() < 0.75:
            arrivals.setdefault(birth + own.randrange(25), []).append(version)
    with seen_by() as seen, follower_of(folder, rank, agree_every_steps=every) as follower:
        values = []
        for step in range(num_steps):
            for version in arrivals.get(step, []):
                at_step = {"apply_at_step": step + 40} if version % 5 == 0 else {}
                put(folder, rank, {"version": version, "user": {"x": version}, **at_step}, seen_by=follower)
            values.append((follower.config.label, follower.knob("x", 0)))
            take_step(follower, seen)
        last = len(births)
        put(folder, rank, {"version": last + 1, "user": {"x": last + 1}})
        step_until(follower, seen, lambda: follower.config.version == last + 1)
    return values


@pytest.mark.parametrize(("seed", "every"), [(1, 1), (2, 1), (3, 3), (4, "auto")])
def test_four_ranks_run_every_step_under_the_same_version_whenever_their_files_arrive(
    ranks: RankPool, tmp_path: Path, seed: int, every: Every
) -> None:
    values = same(ranks.run(4, follow_random_files, tmp_path, seed, every, 200))
    versions = [value for _, value in values]
    assert versions == sorted(versions)
    assert all(label == f"version {value}" for label, value in values)
    assert every == "auto" or len(set(versions)) > 3  # short steps on a busy machine may thin out to very few


# --- refusals -------------------------------------------------------------------------------------------------------


def refuse_on_one_rank(rank: int, folder: Path) -> tuple[Seen, RecordingApplier]:
    applier = RecordingApplier(refuse={2: "not with this card"} if rank == 1 else None)
    with seen_by() as seen, follower_of(folder, rank) as follower:
        follower.add(applier)
        put(folder, rank, rate(2, 0.2))
        step_until(follower, seen, lambda: "version 2" in applier.checked)
        for _ in range(30):
            take_step(follower, seen)
        put(folder, rank, rate(3, 0.3))
        step_until(follower, seen, lambda: follower.config.version == 3)
    return seen, applier


def test_a_config_refused_by_one_rank_changes_none_and_is_not_asked_about_again(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(3, refuse_on_one_rank, tmp_path)
    for seen, applier in results:
        assert set(seen.in_force) == {"version 0"}
        assert applier.checked == ["version 2", "version 3"]
        assert applier.applied == [("version 0", "version 3")]
    warnings = [line for seen, _ in results for line in seen.log if "was refused" in line]
    assert warnings == [
        "WARNING version 2 was refused, version 0 stays in force: rank 1: optimizer: not with this card"
    ]


def test_one_version_with_different_contents_is_refused_until_the_contents_are_the_same(
    ranks: RankPool, tmp_path: Path
) -> None:
    seen = ranks.run(3, wait_for_the_conflict, tmp_path)
    assert [one.applied for one in seen] == [seen[0].applied] * 3
    conflicts = [line for line in seen[0].log if "different contents" in line]
    assert 1 <= len(conflicts) <= 3  # one more each time that a rank's contents become others
    assert "ranks 0 unlike ranks 1, 2" in conflicts[-1]
    assert not any("different contents" in line for one in seen[1:] for line in one.log)


def wait_for_the_conflict(rank: int, folder: Path) -> Seen:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        put(folder, rank, rate(2, 0.2 if rank == 0 else 0.9), seen_by=follower)
        for _ in range(20):
            take_step(follower, seen)
        assert follower.config.version == 0
        put(folder, rank, rate(2, 0.2))
        step_until(follower, seen, lambda: follower.config.version == 2)
        assert follower.knob("optimizer.learning_rate", 0.0) == 0.2
    return seen


# --- exceptions in appliers -----------------------------------------------------------------------------------------


def fail_on_one_rank(rank: int, folder: Path, phase: Literal["check", "apply"]) -> tuple[str, str]:
    applier = RecordingApplier(fail={2: phase} if rank == 2 else None)
    with seen_by() as seen:
        follower = follower_of(folder, rank)
        follower.add(applier)
        follower.start()
        put(folder, rank, rate(2, 0.2))
        try:
            step_until(follower, seen, lambda: follower.config.version == 2)
        except Exception as error:
            first = f"{type(error).__name__}: {error}"
        try:
            follower.boundary()
        except Exception as error:
            return first, f"{type(error).__name__}: {error}"
        finally:
            follower.close()
    return "", ""


@pytest.mark.parametrize(
    ("phase", "doing", "name"), [("check", "checking", "RanksFailedError"), ("apply", "applying", "ApplyError")]
)
def test_an_exception_in_an_applier_is_raised_on_all_ranks_with_its_traceback(
    ranks: RankPool, tmp_path: Path, phase: str, doing: str, name: str
) -> None:
    first, second = same(ranks.run(3, fail_on_one_rank, tmp_path, phase))
    assert first.startswith(f"{name}: 1 of 3 ranks failed while {doing} version 2")
    assert "--- rank 2:" in first
    assert "tests/loops.py" in first
    assert f"ArithmeticError: {phase} of version 2 broke" in first
    assert second == first, "a follower whose ranks may differ must not go on"


# --- ranks that die, fail or come apart -----------------------------------------------------------------------------


def errors_of(outcomes: list[Outcome], *, but: int) -> list[str]:
    survivors = [outcome for outcome in outcomes if outcome.rank != but]
    assert all(outcome.error is not None for outcome in survivors), outcomes
    return [f"{outcome.error.type_name}: {outcome.error.message}" for outcome in survivors if outcome.error]


def any_step(rank: int, phase: str, action: Literal["kill", "raise"]) -> Faults:
    """A fault at the first step from 5 on that comes to this phase."""
    return Faults(*(Fault(rank=rank, step=step, phase=phase, action=action) for step in range(5, 40)))


def follow_and_die(rank: int, folder: Path, faults: Faults) -> None:
    """Only the agreement runs between the ranks here, so that it is what hears of the death."""

    def strike(phase: str, new: ElasticConfig) -> None:
        faults.at(rank=rank, step=follower.step, phase=phase)

    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        follower.add(RecordingApplier(before=strike))
        for step in range(10_000):
            if step % 5 == 0:
                put(folder, rank, rate(step + 1, 0.1 + step))
            faults.at(rank=rank, step=step, phase="step")
            follower.boundary()


@pytest.mark.parametrize("phase", ["step", "check", "apply"])
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
        assert "rank 0: 10 steps, 10 boundaries (ending)" in text
        assert "rank 1: 1" in text
        assert "rank 2: 10 steps, 10 boundaries (ending)" in text


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
    assert all("while waiting for the others at the end, after 1 steps" in text and late in text for text in texts)
    assert any(late + "gave no sign" in text for text in texts)  # whoever gives up last may find it awake


# --- stop, save, revisions, schedules -------------------------------------------------------------------------------


def request_on_one_rank(rank: int, folder: Path, every: Every) -> tuple[int, list[int]]:
    with seen_by() as seen, follower_of(folder, rank, agree_every_steps=every) as follower:
        for step in range(200):
            if step == 10 and rank == 2:
                follower.request_save()
            if step == 30 and rank == 1:
                follower.request_stop()
            if take_step(follower, seen).stop:
                break
    return follower.step, seen.saves


@pytest.mark.parametrize("every", [1, 10])
def test_a_stop_and_a_save_asked_for_on_one_rank_happen_on_all_within_two_agreements(
    ranks: RankPool, tmp_path: Path, every: int
) -> None:
    stopped_at, saves = same(ranks.run(3, request_on_one_rank, tmp_path, every))
    assert len(saves) == 1
    assert 10 < saves[0] <= 10 + 2 * every + 1
    assert 30 < stopped_at <= 30 + 2 * every + 1


def propose(rank: int, folder: Path) -> tuple[list[tuple[int, str]], list[str], Any, Any]:
    with seen_by() as seen, follower_of(folder, rank, startup={"dataloader.batch_size": 16}) as follower:
        follower.add(RecordingApplier("dataloader", refuse={}))
        put(folder, rank, {"version": 7, "user": {"a": 1}})
        step_until(follower, seen, lambda: follower.config.version == 7)
        mine = []
        if rank == 1:
            mine.append(follower.propose({"dataloader.batch_size": 8}, "out of memory"))
        step_until(follower, seen, lambda: follower.config.revision == 1)
        mine.append(follower.propose({"dataloader.batch_size": 4}, "on every rank at once"))
        step_until(follower, seen, lambda: follower.config.revision == 2)
        mine.append(follower.propose({"user.a": 10 + rank}, "each rank another"))
        step_until(follower, seen, lambda: follower.config.revision == 5)
        for _ in range(5):
            take_step(follower, seen)
        assert follower.config.revision == 5
        values = follower.config.values()
        put(folder, rank, {"version": 8})
        step_until(follower, seen, lambda: follower.config.version == 8)
        return seen.applied, [one.outcome for one in mine], values, follower.config.values()


def test_changes_from_inside_the_job_are_revisions_and_the_next_version_starts_from_its_own_contents(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(3, propose, tmp_path)
    applied = same([one[0] for one in results])
    assert [label for _, label in applied] == [
        "version 7",
        *(f"version 7, revision {revision}" for revision in range(1, 6)),
        "version 8",
    ]
    assert all(outcome == "in force" for one in results for outcome in one[1])
    assert same([one[2] for one in results]) == {"dataloader.batch_size": 4, "user.a": 12}
    assert same([one[3] for one in results]) == {"dataloader.batch_size": 16}


def propose_and_refuse(rank: int, folder: Path) -> tuple[str, str, str]:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        follower.add(RecordingApplier("dataloader", refuse={0: "no room"} if rank == 0 else None))
        proposal = follower.propose({"dataloader.batch_size": 8}, "try more")
        step_until(follower, seen, lambda: proposal.outcome != "pending")
        return proposal.outcome, proposal.refusal, follower.config.label


def test_a_refused_revision_changes_nothing_and_its_proposer_learns_why(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, propose_and_refuse, tmp_path)) == (
        "refused",
        "rank 0: dataloader: no room",
        "version 0",
    )


def schedule(rank: int, folder: Path, every: Every) -> Seen:
    with seen_by() as seen, follower_of(folder, rank, agree_every_steps=every) as follower:

        def put_and_step(contents: dict[str, Any], num_steps: int) -> None:
            put(folder, rank, contents, seen_by=follower)
            for _ in range(num_steps):
                take_step(follower, seen)

        put_and_step(rate(1, 0.1, apply_at_step=60), 62)
        put_and_step(rate(2, 0.2, apply_at_step=40), 20)  # long past: refused
        put_and_step(rate(3, 0.3, apply_at_step=10_000), 20)
        put_and_step(rate(4, 0.4), 20)  # takes the place of what was scheduled
    return seen


@pytest.mark.parametrize("every", [1, 7])
def test_a_scheduled_version_takes_effect_at_exactly_its_step(ranks: RankPool, tmp_path: Path, every: Every) -> None:
    results = ranks.run(2, schedule, tmp_path, every)
    applied = same([seen.applied for seen in results])
    assert applied[0] == (60, "version 1")
    assert [label for _, label in applied] == ["version 1", "version 4"]
    assert same([seen.in_force[59:61] for seen in results]) == ["version 0", "version 1"]
    log = results[0].log
    assert any("version 2 was refused" in line and "apply_at_step 40 has passed" in line for line in log), log
    assert "INFO version 3 is agreed and comes into force at step 10000" in log


# --- ranks that lack what others hold -------------------------------------------------------------------------------


def lack_the_file(rank: int, folder: Path) -> tuple[Seen, int]:
    with seen_by() as seen, follower_of(folder, rank, lag_warning_seconds=0.3) as follower:
        put(folder, rank, rate(3, 0.3) if rank != 1 else '{"version": 3, "optimizer": {"lr": 0.3}}')
        named = False
        for _ in range(100_000):
            take_step(follower, seen)
            named = named or any("waits for" in line for line in seen.log)
            if follower.knob("told", False):
                break
            if rank == 0 and named:
                follower.propose({"user.told": True}, "the warning has come")
        steps = follower.step
        for _ in range(200):
            take_step(follower, seen)
        put(folder, rank, rate(3, 0.3))
        step_until(follower, seen, lambda: follower.config.version == 3)
    return seen, steps


def test_a_rank_whose_file_does_not_arrive_delays_the_change_and_is_named_once(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, lack_the_file, tmp_path)
    assert same([seen.applied for seen, _ in results])[-1][1] == "version 3"
    warnings = [line for seen, _ in results for line in seen.log if "waits for" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("WARNING version 3 waits for rank 1 (")
    assert "optimizer.lr is not a known key" in warnings[0]


# --- start, resume, thinning ----------------------------------------------------------------------------------------


def start_unlike(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, startup={"optimizer.learning_rate": 0.1 * (1 + (rank == 2))}):
        pass


def test_ranks_that_start_with_unlike_values_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(3, start_unlike, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: the start-up values of rank 2 differ from those of rank 0")


def start_with_files(rank: int, folder: Path, have: list[bool]) -> tuple[str, str]:
    (folder / str(rank)).mkdir(exist_ok=True)
    if have[rank]:
        put(folder, rank, rate(5, 0.5))
    with seen_by() as seen, follower_of(folder, rank) as follower:
        at_start = follower.config.label
        for _ in range(5):
            take_step(follower, seen)
        put(folder, rank, rate(5, 0.5))
        step_until(follower, seen, lambda: follower.config.version == 5)
    return at_start, follower.config.label


@pytest.mark.parametrize(("have", "expected"), [([True, True], "version 5"), ([True, False], "version 0")])
def test_the_file_found_at_start_is_in_force_from_the_first_step_if_every_rank_finds_it(
    ranks: RankPool, tmp_path: Path, have: list[bool], expected: str
) -> None:
    assert same(ranks.run(2, start_with_files, tmp_path, have)) == (expected, "version 5")


def count_agreements(rank: int, folder: Path) -> list[int]:
    with seen_by() as seen, follower_of(folder, rank, agree_every_steps="auto") as follower:
        intervals = []
        for _ in range(300):
            take_step(follower, seen)
            intervals.append(follower.agree_every_steps)
    return intervals


def test_agreements_thin_out_to_the_same_interval_on_all_ranks_when_steps_are_short(
    ranks: RankPool, tmp_path: Path
) -> None:
    intervals = same(ranks.run(2, count_agreements, tmp_path))
    assert intervals[0] == 1
    assert intervals[-1] > 1


def two_followers(rank: int, folder: Path) -> tuple[str, str]:
    first, second = folder / "first", folder / "second"
    for each in (first, second):
        each.mkdir(exist_ok=True)
    with seen_by() as seen, follower_of(first, rank) as one, follower_of(second, rank) as two:
        put(first, rank, rate(1, 0.1))
        put(second, rank, rate(9, 0.9))
        step_until(one, seen, lambda: one.config.version == 1)
        step_until(two, seen, lambda: two.config.version == 9)
        return one.config.label, two.config.label


def test_two_followers_in_one_process_do_not_know_of_each_other(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, two_followers, tmp_path)) == ("version 1", "version 9")


def share_a_file(rank: int, folder: Path) -> list[str]:
    (folder / "0").mkdir(exist_ok=True)
    with seen_by() as seen, follower_of(folder, 0) as follower:
        if rank == 0:
            put(folder, 0, "{", seen_by=follower)
        warned = False
        while not warned:  # rank 0 tells the others, step by step, whether it has warned
            flag = torch.tensor(float(rank == 0 and any("was refused" in line for line in seen.log)))
            dist.all_reduce(flag)
            warned = bool(flag)
            take_step(follower, seen)
        if rank == 0:
            put(folder, 0, {"version": 2})
        step_until(follower, seen, lambda: follower.config.version == 2)
        return [line for line in seen.log if "was refused" in line]


def test_of_the_ranks_on_a_machine_that_follow_one_file_one_warns(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(3, share_a_file, tmp_path)
    assert len(first) == 1
    assert others == [[], []]


# --- what must not get in each other's way ---------------------------------------------------------------------------


def schedule_then_refuse(rank: int, folder: Path) -> Seen:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        follower.add(RecordingApplier(refuse={2: "no"}))
        put(folder, rank, rate(1, 0.1, apply_at_step=60), seen_by=follower)
        for _ in range(10):
            take_step(follower, seen)
        put(folder, rank, rate(2, 0.2), seen_by=follower)
        for _ in range(10):
            take_step(follower, seen)
        put(folder, rank, rate(1, 0.7), seen_by=follower)  # neither what was agreed nor above it
        for _ in range(50):
            take_step(follower, seen)
    return seen


def test_what_was_agreed_for_a_later_step_outlives_a_newer_version_that_is_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(2, schedule_then_refuse, tmp_path)
    assert same([seen.applied for seen in results]) == [(60, "version 1")]
    assert any("version 2 was refused" in line for line in results[0].log)


def conflict_and_propose(rank: int, folder: Path) -> Seen:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        put(folder, rank, {"version": 5, "user": {"x": rank}})
        step_until(follower, seen, lambda: follower.step > 100)
        proposal = follower.propose({"user.y": 1}, "in spite of it") if rank == 1 else None
        step_until(follower, seen, lambda: follower.config.revision == 1)
        assert proposal is None or proposal.outcome == "in force"
        step_until(follower, seen, lambda: follower.step > 300)
    return seen


def test_a_proposal_goes_through_while_files_conflict_and_the_conflict_is_told_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(2, conflict_and_propose, tmp_path)
    assert same([[label for _, label in seen.applied] for seen in results]) == ["version 0, revision 1"]
    assert len([line for seen in results for line in seen.log if "different contents" in line]) == 1


def flip(rank: int, folder: Path) -> tuple[str, list[tuple[int, str]]]:
    with seen_by() as seen, follower_of(folder, rank) as follower:

        def steps() -> None:
            for _ in range(4):
                take_step(follower, seen)

        put(folder, rank, {"version": 1}, seen_by=follower)
        steps()
        for version in (5, 1, 5):
            if rank == 1:
                put(folder, rank, {"version": version}, seen_by=follower)
            steps()
            if version == 1 and rank == 0:
                put(folder, rank, {"version": 5}, seen_by=follower)
            steps()
    return follower.config.label, seen.applied


def test_a_version_that_came_went_and_came_again_is_taken(ranks: RankPool, tmp_path: Path) -> None:
    label, applied = same(ranks.run(2, flip, tmp_path))
    assert label == "version 5"
    assert [each for _, each in applied] == ["version 1", "version 5"]


def revise_right_before_the_schedule(rank: int, folder: Path) -> tuple[list[tuple[int, str]], list[int]]:
    (folder / str(rank)).mkdir(exist_ok=True)
    put(folder, rank, {"version": 1, "apply_at_step": 12})
    with seen_by() as seen, follower_of(folder, rank) as follower:
        for step in range(20):
            if step == 10:
                follower.propose({"checkpoint.now": True}, "both at one boundary")
            take_step(follower, seen)
    return seen.applied, seen.saves


def test_a_revision_and_a_scheduled_version_at_one_boundary_both_have_their_effect(
    ranks: RankPool, tmp_path: Path
) -> None:
    applied, saves = same(ranks.run(2, revise_right_before_the_schedule, tmp_path))
    assert applied == [(12, "version 1")]
    assert saves == [12]


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


def change_at_the_end_of_an_epoch(rank: int, folder: Path) -> tuple[str, list[int]]:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        take_step(follower, seen)
        follower.propose({"user.x": 1}, "under way when the epoch ends")
        follower.request_save()
        take_step(follower, seen)
        follower.end_epoch()
        label = follower.config.label
        take_step(follower, seen)
    assert seen.applied == [(2, "version 0, revision 1")] or seen.applied == [(3, "version 0, revision 1")]
    return label, seen.saves


def test_what_is_under_way_when_an_epoch_ends_is_finished_there(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, change_at_the_end_of_an_epoch, tmp_path)) == ("version 0, revision 1", [3])


def start_with_other_arguments(rank: int, folder: Path, arguments: list[dict[str, Any]]) -> None:
    with follower_of(folder, rank, **arguments[rank]):
        pass


@pytest.mark.parametrize(
    "arguments", [[{"agree_every_steps": 3}, {"agree_every_steps": 7}], [{}, {"agree_every_steps": "auto"}]]
)
def test_ranks_that_would_agree_at_other_intervals_are_refused(
    ranks: RankPool, tmp_path: Path, arguments: list[dict[str, Any]]
) -> None:
    outcomes = ranks.run_outcomes(2, start_with_other_arguments, tmp_path, arguments, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: the agree_every_steps of rank 1 differ from those of rank 0")


def test_an_argument_that_is_wrong_on_one_rank_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    arguments = [{}, {"startup": {"dataloader.batch_size": 0}}]
    outcomes = ranks.run_outcomes(2, start_with_other_arguments, tmp_path, arguments, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert second == "ConfigError: dataloader.batch_size is 0; allowed: an integer >= 1"
    assert first.startswith("RanksFailedError: 1 of 2 ranks failed while starting to follow a config\n--- rank 1:")
    assert "dataloader.batch_size is 0" in first


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
    assert all("was closed" in text for text in texts)


def take_a_large_config(rank: int, folder: Path) -> int:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        put(folder, rank, {"version": 1, "user": {"x": [[1, 2, 3]] * 90_000, "ä": "ö" * 1000}})
        step_until(follower, seen, lambda: follower.config.version == 1)
        return len(follower.knob("x"))


def test_a_config_of_almost_a_mebibyte_is_taken(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, take_a_large_config, tmp_path)) == 90_000


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
            "rank 0: 6 steps, 6 boundaries; rank 1: 7 steps, 7 boundaries"
        )


def start_at_other_steps(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, start_step=40 * rank, timeout_seconds=600.0):
        pass


def test_ranks_that_start_at_different_steps_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, start_at_other_steps, tmp_path, deadline_seconds=45.0)
    for text in errors_of(outcomes, but=-1):
        assert text.startswith("RanksDisagreeError: the steps behind of rank 1 differ from those of rank 0")


def close_on_one_rank(rank: int, folder: Path) -> None:
    with follower_of(folder, rank, timeout_seconds=600.0) as follower:
        follower.boundary()
        if rank == 1:
            follower.close()


def test_a_rank_that_closes_its_follower_before_the_end_is_named(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, close_on_one_rank, tmp_path, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert "failed after 1 steps, 1 boundaries: it closed its follower" in first
    assert second.startswith("ElasticError: this follower was closed")


def wrong_in_another_way(rank: int, folder: Path, arguments: list[dict[str, Any]], word: str) -> None:
    if rank == 1:
        os.environ["ELASTIC_EXT"] = word
    with follower_of(folder, rank, timeout_seconds=600.0, **arguments[rank]):
        pass


@pytest.mark.parametrize(
    ("startup", "word", "expected"),
    [(["x"], "on", "AttributeError"), ({}, "of", "ValueError: ELASTIC_EXT is 'of'")],
)
def test_whatever_is_wrong_on_one_rank_at_the_start_is_told_to_all(
    ranks: RankPool, tmp_path: Path, startup: Any, word: str, expected: str
) -> None:
    arguments = [{}, {"startup": startup}]
    outcomes = ranks.run_outcomes(2, wrong_in_another_way, tmp_path, arguments, word, deadline_seconds=45.0)
    first, second = errors_of(outcomes, but=-1)
    assert first.startswith("RanksFailedError: 1 of 2 ranks failed while starting to follow a config")
    assert expected in first
    assert second.startswith(expected)


# --- other default groups -------------------------------------------------------------------------------------------


def follow_beside_another_backend(rank: int, folder: Path) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    assert FakeStore is not None
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    with follower_of(folder, rank) as follower:
        put(folder, rank, rate(1, 0.5))
        for _ in range(100_000):
            follower.boundary()
            if follower.config.version == 1:
                break
    label = follower.config.label
    dist.destroy_process_group()
    return label


def test_ranks_agree_whatever_the_backend_of_the_default_group_and_wherever_its_store(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert same(ranks.run(2, follow_beside_another_backend, tmp_path, process_group=False)) == "version 1"
