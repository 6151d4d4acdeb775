"""Agreement among real ranks, each with a config file of its own: every change on all of them at the same step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic_ext import ApplyError, ElasticConfig
from elastic_ext.config.apply import AskAgainLater, Declined
from tests.support.loops import (
    Every,
    RecordingApplier,
    Seen,
    follower_of,
    put,
    rate,
    same,
    seen_by,
    step_until,
    take_step,
)
from tests.support.ranks import RankPool

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


@pytest.mark.parametrize(("seed", "every"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (3, 3), (4, "auto")])
def test_four_ranks_run_every_step_under_the_same_version_whenever_their_files_arrive(
    ranks: RankPool, tmp_path: Path, seed: int, every: Every
) -> None:
    values = same(ranks.run(4, follow_random_files, tmp_path, seed, every, 200))
    versions = [value for _, value in values]
    assert versions == sorted(versions)
    assert all(label == f"version {value}" for label, value in values)
    assert every == "auto" or len(set(versions)) > 3  # short steps on a busy machine may thin out to very few


# --- what a step has to tell first ------------------------------------------------------------------------------------


class Trying:
    """An applier that has to try each version first, in a step of one rank; the steps at which it was asked."""

    section = "optimizer"

    def __init__(self, *, tries: bool, refusal: str | None) -> None:
        self.asked: list[str] = []
        self.applied: list[str] = []
        self._tries, self._refusal = tries, refusal

    def check(self, new: ElasticConfig) -> str | None:
        self.asked.append(new.label)
        if self._tries and self.asked.count(new.label) == 1:
            raise AskAgainLater
        return self._refusal

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        self.applied.append(new.label)


def try_first(rank: int, folder: Path, how: str, refusal: str | None) -> tuple[list[str], list[str], list[str]]:
    applier = Trying(tries=rank == 1, refusal=refusal if rank == 1 else None)
    follower = follower_of(folder, rank)
    follower.add(applier)
    if how == "start":
        put(folder, rank, rate(2, 0.2))
    with seen_by() as seen, follower:
        if how == "revision":
            proposal = follower.propose({"optimizer.learning_rate": 0.2}, "a test") if rank == 0 else None
        elif how != "start":
            at_step = {"apply_at_step": 60} if how == "scheduled" else {}
            put(folder, rank, {**rate(2, 0.2), **at_step}, seen_by=follower)  # in time for that step
        step_until(follower, seen, lambda: bool(applier.asked))
        step_until(follower, seen, lambda: len(applier.asked) >= (3 if how == "scheduled" and refusal is None else 2))
        for _ in range(4):
            take_step(follower, seen)
        if how == "revision" and proposal is not None:
            assert proposal.outcome == ("in force" if refusal is None else "refused"), proposal
    return applier.asked, applier.applied, [line for line in seen.log if "was refused" in line]


@pytest.mark.parametrize("refusal", [None, "it was tried"])
@pytest.mark.parametrize("how", ["start", "file", "revision", "scheduled"])
def test_a_config_that_one_rank_has_to_try_is_asked_about_again_on_all(
    ranks: RankPool, tmp_path: Path, how: str, refusal: str | None
) -> None:
    results = ranks.run(2, try_first, tmp_path, how, refusal)
    label = "version 0, revision 1" if how == "revision" else "version 2"
    for asked, applied, _ in results:
        assert asked == [label] * (3 if how == "scheduled" and refusal is None else 2)
        assert applied == ([label] if refusal is None else [])
    warnings = [line for _, _, lines in results for line in lines]
    assert len(warnings) == (refusal is not None)
    assert all("rank 1: optimizer: it was tried" in line for line in warnings)


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
        "WARNING config version 2 was refused, version 0 stays in force: rank 1: optimizer: not with this card"
    ]


def test_one_version_with_different_contents_is_refused_until_the_contents_are_the_same(
    ranks: RankPool, tmp_path: Path
) -> None:
    seen = ranks.run(3, wait_for_the_conflict, tmp_path)
    assert [one.applied for one in seen] == [seen[0].applied] * 3
    conflicts = [line for line in seen[0].log if "different contents" in line]
    assert 1 <= len(conflicts) <= 3  # one more each time that a rank's contents become others
    assert "on ranks 0 and on ranks 1, 2" in conflicts[0]  # later ones are of ranks that are halfway
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
    assert first.startswith(f"{name}: 1 of 3 ranks failed while {doing} config version 2")
    assert "--- rank 2:" in first
    assert "tests/support/loops.py" in first
    assert f"ArithmeticError: {phase} of version 2 broke" in first
    assert second == first, "a follower whose ranks may differ must not go on"


def decline(rank: int, folder: Path) -> Seen:
    def before(doing: str, new: ElasticConfig) -> None:
        if (doing, new.version) == ("apply", 2):
            raise Declined(f"rank {rank} has no memory for {new.label}")

    applier = RecordingApplier(before=before)
    with seen_by() as seen, follower_of(folder, rank) as follower:
        follower.add(applier)
        put(folder, rank, rate(2, 0.2, user={"x": 1}), seen_by=follower)
        for _ in range(5):
            take_step(follower, seen)
        assert (follower.config.version, follower.knob("x", 0)) == (0, 0)
        put(folder, rank, rate(3, 0.3))
        step_until(follower, seen, lambda: follower.config.version == 3)
        assert applier.applied == [("version 0", "version 3")]
    return seen


def test_what_all_ranks_decline_as_it_is_applied_is_refused_and_training_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    seen = ranks.run(2, decline, tmp_path)
    refusals = [line for line in seen[0].log if "refused" in line]
    assert len(refusals) == 1
    assert refusals[0].startswith("WARNING config version 2 was refused, version 0 stays in force: ")
    for rank in range(2):
        assert f"rank {rank}: optimizer: rank {rank} has no memory for version 2" in refusals[0]
        assert [version for _, version in seen[rank].applied] == ["version 3"]


def decline_too_late(rank: int, folder: Path) -> str:
    def before(doing: str, new: ElasticConfig) -> None:
        if doing == "apply":
            raise Declined("too late")

    follower = follower_of(folder, rank)
    follower.add(RecordingApplier("dataloader"))
    follower.add(RecordingApplier("optimizer", before=before))
    follower.start()
    put(folder, rank, rate(2, 0.2, dataloader={"batch_size": 4}))
    with seen_by() as seen, pytest.raises(ApplyError, match="too late") as raised:
        step_until(follower, seen, lambda: follower.config.version == 2)
    follower.close()
    return str(raised.value)


def test_who_declines_after_something_was_applied_ends_the_run(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, decline_too_late, tmp_path)).startswith(
        "2 of 2 ranks failed while applying config version 2"
    )


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
    assert any(
        line.startswith("WARNING config version 2 was refused, version 1 stays in force: apply_at_step 40 has passed")
        for line in log
    ), log
    assert "INFO config version 3 is agreed and comes into force at step 10000" in log


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
    assert warnings[0].startswith("WARNING config version 3 waits for rank 1 (")
    assert "optimizer.lr is not a known key" in warnings[0]


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


def take_a_large_config(rank: int, folder: Path) -> int:
    with seen_by() as seen, follower_of(folder, rank) as follower:
        put(folder, rank, {"version": 1, "user": {"x": [["x" * 96]] * 9_500, "ä": "ö" * 1000}})
        step_until(follower, seen, lambda: follower.config.version == 1)
        return len(follower.knob("x"))


def test_a_config_of_almost_a_mebibyte_is_taken(ranks: RankPool, tmp_path: Path) -> None:
    assert same(ranks.run(2, take_a_large_config, tmp_path)) == 9_500
