"""Whether workers hang, decided from what is seen of them over time, under a planted clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.agent.workers.hangs import (
    HangLimits,
    HangVerdict,
    Judge,
    WaitingNews,
    WorkerLook,
    WorkerStanding,
    find_hang,
    ranks_in_words,
    standings_from_json,
    standings_to_json,
)
from elastic_ext.ranks.heartbeat import Activity, HeartbeatReading

START = 1000.0
STEADY = 10  # steps behind, none of them a first one any more


def reading(since: float, activity: Activity = Activity.STEP, *, steps: int = STEADY, **more: Any) -> HeartbeatReading:
    """What a pulse says; times in seconds."""
    values: dict[str, Any] = {
        "pid": 100,
        "start_ticks": 1,
        "thread": 1,
        "rank": 0,
        "restart": 0,
        "step": steps,
        "num_boundaries": steps,
        "micro_step": 0,
        "has_begun_save": False,
        "last_step_seconds": 0.1,
        "num_alike": steps,
        "stacks_signal": 0,
        "stacks_descriptor": -1,
        "stacks_inode": 0,
    }
    return HeartbeatReading(activity=activity, since_ns=round(since * 1e9), **(values | more))


def judged(
    pulses: Mapping[int, HeartbeatReading | None],
    seconds: float,
    *,
    limits: HangLimits | None = None,
    states: Mapping[int, str] | None = None,
    judge: Judge | None = None,
) -> tuple[WorkerStanding, ...]:
    """How workers stand whose pulses have said the same for so long, looked at every second; every five for hours."""
    judge = judge or Judge(limits or HangLimits())
    looks = [
        WorkerLook(rank=rank, pid=100 + rank, reading=found, process_state=(states or {}).get(rank, "S"))
        for rank, found in pulses.items()
    ]
    standings: tuple[WorkerStanding, ...] = ()
    for second in range(0, int(seconds) + 1, 5 if seconds >= 3600 else 1):
        standings = judge.look(START + second, looks)
    return standings


def verdict(
    pulses: Mapping[int, HeartbeatReading | None], seconds: float, *, world_size: int = 0, **more: Any
) -> HangVerdict:
    return find_hang(judged(pulses, seconds, **more), world_size=world_size or len(pulses))


# --- what is a hang -------------------------------------------------------------------------------------------------


def test_all_ranks_in_one_step_for_longer_than_the_limit_is_a_hang_of_one_of_them() -> None:
    pulses = {0: reading(START), 1: reading(START)}
    assert verdict(pulses, 30).hang is None
    found = verdict(pulses, 31).hang
    assert found is not None
    assert (found.ranks, found.seconds, found.may_be_elsewhere) == ((0, 1), 31.0, False)
    assert found.reason == (
        "rank 0: it has been in step 11 for 31 s (limit 30 s); rank 1: it has been in step 11 for 31 s (limit 30 s); "
        "one of them hangs"
    )


def test_where_other_nodes_have_ranks_the_words_say_that_it_may_be_one_of_those() -> None:
    found = verdict({0: reading(START), 1: reading(START)}, 40, world_size=4).hang
    assert found is not None
    assert found.may_be_elsewhere
    assert found.reason.endswith("one of them hangs, or waits for a rank of another node that does")


@pytest.mark.parametrize("hours", [1, 10])
def test_an_evaluation_is_no_hang_however_long_it_is_and_whoever_waits_is_said_to(hours: int) -> None:
    pulses = {rank: reading(START) for rank in (0, 2, 3)} | {1: reading(START, Activity.OUTSIDE)}
    found = verdict(pulses, 3600 * hours)
    assert found.hang is None
    assert found.said == f"rank 1 has been outside of steps for {3600 * hours} s; ranks 0, 2 and 3 wait for it"


def test_all_ranks_outside_of_steps_are_no_hang() -> None:
    found = verdict({rank: reading(START, Activity.OUTSIDE) for rank in range(3)}, 86400)
    assert found == HangVerdict()


def test_a_rank_alone_in_a_step_that_others_have_ended_hangs_though_they_evaluate() -> None:
    others = {rank: reading(START, Activity.OUTSIDE, steps=STEADY + 1) for rank in (0, 2)}
    found = verdict({**others, 1: reading(START)}, 31).hang
    assert found is not None
    assert (found.ranks, found.may_be_elsewhere) == ((1,), False)


def test_of_ranks_in_two_steps_the_one_behind_hangs_and_the_others_wait() -> None:
    pulses = {0: reading(START, steps=11), 1: reading(START, steps=10), 2: reading(START, steps=11)}
    found = verdict(pulses, 31, world_size=8).hang
    assert found is not None
    assert (found.ranks, found.may_be_elsewhere) == ((1,), False)
    assert found.reason == "rank 1: it has been in step 11 for 31 s (limit 30 s); ranks 0 and 2 wait for it"


@pytest.mark.parametrize(("micro_step", "is_hang"), [(0, False), (1, False), (2, True)])
def test_between_micro_steps_a_rank_is_waited_for_by_those_that_it_has_not_passed(
    micro_step: int, is_hang: bool
) -> None:
    other = reading(START, Activity.OUTSIDE, micro_step=micro_step)
    found = verdict({0: other, 1: reading(START, micro_step=1)}, 31)
    assert (found.hang is not None) is is_hang


def test_a_rank_that_came_late_to_a_step_is_waited_for_until_its_own_limit() -> None:
    judge = Judge(HangLimits())
    judged({0: reading(START), 1: reading(START, Activity.OUTSIDE)}, 100, judge=judge)
    looks = [
        WorkerLook(rank=0, pid=100, reading=reading(START), process_state="S"),
        WorkerLook(rank=1, pid=101, reading=reading(START + 100), process_state="S"),
    ]
    hung = [
        second
        for second in range(101, 200)
        if find_hang(judge.look(START + second, looks), world_size=2).hang is not None
    ]
    assert hung == list(range(131, 200))


def test_a_boundary_counts_as_a_step_does() -> None:
    found = verdict({0: reading(START, Activity.BOUNDARY), 1: reading(START, Activity.BOUNDARY)}, 31).hang
    assert found is not None
    assert "at a boundary for 31 s" in found.reason


@pytest.mark.parametrize("activity", [Activity.SAVING, Activity.RESUMING, Activity.STARTING])
def test_storage_and_starts_have_a_limit_of_their_own_and_others_wait_for_them(activity: Activity) -> None:
    pulses = {0: reading(START, activity), 1: reading(START)}
    assert verdict(pulses, 1800).hang is None
    found = verdict(pulses, 1801).hang
    assert found is not None
    assert found.ranks == (0,)
    assert found.reason.endswith("; rank 1 waits for it")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_first_steps_may_compile(steps: int) -> None:
    pulses = {0: reading(START, steps=steps)}
    assert verdict(pulses, 300).hang is None
    assert verdict(pulses, 301).hang is not None
    assert verdict({0: reading(START, steps=3)}, 31).hang is not None


def test_steps_after_a_change_are_first_ones_again_and_so_is_the_change() -> None:
    for pulse in (reading(START, num_alike=0), reading(START, Activity.CHANGING)):
        assert verdict({0: pulse}, 300).hang is None
        assert verdict({0: pulse}, 301).hang is not None


def test_a_rank_that_has_ended_is_waited_for_in_vain() -> None:
    found = verdict({0: reading(START), 1: reading(START, Activity.ENDED)}, 31).hang
    assert found is not None
    assert found.ranks == (0,)


def test_a_rank_that_tells_nothing_may_be_what_others_wait_for() -> None:
    found = verdict({0: reading(START), 1: None}, 500)
    assert found.hang is None
    assert found.said == "rank 1 writes no heartbeat; rank 0 waits for it"


@pytest.mark.parametrize("activity", [Activity.STEP, Activity.OUTSIDE])
def test_a_stopped_rank_is_named_with_what_lets_it_go_on(activity: Activity) -> None:
    pulses = {0: reading(START), 1: reading(START, activity)}
    early = find_hang(judged(pulses, 5, states={1: "T"}), world_size=2)
    assert early.hang is None
    assert "`kill -CONT 101` lets it go on" in early.said
    found = verdict(pulses, 31, states={1: "T"}, world_size=8).hang
    assert found is not None
    assert (found.ranks, found.may_be_elsewhere) == ((1,), False)
    assert "stopped it (state T); `kill -CONT 101` lets it go on; rank 0 waits for it" in found.reason


def test_a_stopped_rank_that_has_passed_the_step_is_not_what_is_waited_for() -> None:
    pulses = {0: reading(START), 1: reading(START, Activity.OUTSIDE, steps=STEADY + 1)}
    found = verdict(pulses, 31, states={1: "T"}).hang
    assert found is not None
    assert found.ranks == (0,)


def test_a_rank_that_nothing_can_wake_is_named_after_a_few_looks() -> None:
    pulses = {0: reading(START, Activity.OUTSIDE)}
    assert judged(pulses, 1, states={0: "D"})[0].progress == "getting on"
    (standing,) = judged(pulses, 3, states={0: "D"})
    assert standing.progress == "slow"
    assert "nothing can wake it (state D)" in standing.reason
    assert verdict(pulses, 1000, states={0: "D"}).hang is None


# --- between two steps ----------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_to_the_next_step_hangs_and_those_in_it_wait() -> None:
    pulses = {0: reading(START), 1: reading(START, Activity.BETWEEN), 2: reading(START)}
    waiting = verdict(pulses, 600)
    assert waiting.hang is None
    assert waiting.said == "rank 1 has been between two steps for 600 s; ranks 0 and 2 wait for it"
    found = verdict(pulses, 601).hang
    assert found is not None
    assert (found.ranks, found.may_be_elsewhere) == ((1,), False)
    assert found.reason == (
        "rank 1: it has been between two steps for 601 s (limit 600 s; what may take longer, such as an evaluation, "
        "goes into `with trainer.evaluation():`); ranks 0 and 2 wait for it"
    )


def test_all_ranks_that_wait_for_data_in_vain_hang() -> None:
    found = verdict({rank: reading(START, Activity.BETWEEN) for rank in range(2)}, 601).hang
    assert found is not None
    assert found.ranks == (0, 1)


@pytest.mark.parametrize(("has_begun_save", "seconds"), [(False, 601), (True, 1801)])
def test_a_save_that_waits_for_a_rank_does_not_hide_that_it_does_not_come(has_begun_save: bool, seconds: int) -> None:
    """One that it has begun too may be what the others are still about: that has its own limit."""
    saving = reading(START, Activity.SAVING, has_begun_save=True)
    stuck = reading(START, Activity.BETWEEN, has_begun_save=has_begun_save)
    assert verdict({0: saving, 1: stuck}, seconds - 1).hang is None
    found = verdict({0: saving, 1: stuck}, seconds).hang
    assert found is not None
    assert 1 in found.ranks
    assert found.ranks == ((0, 1) if has_begun_save else (1,))


def test_a_rank_that_is_late_with_a_save_is_waited_for_in_the_step_after_it() -> None:
    pulses = {0: reading(START, Activity.SAVING, has_begun_save=True), 1: reading(START, has_begun_save=True)}
    assert verdict(pulses, 1800).hang is None


def test_between_first_steps_there_is_more_time() -> None:
    pulses = {0: reading(START, Activity.BETWEEN, steps=2)}
    assert verdict(pulses, 1800).hang is None
    assert verdict(pulses, 1801).hang is not None


def test_ten_times_the_longest_time_between_two_steps_is_no_hang() -> None:
    judge = Judge(HangLimits())
    judged({0: reading(START, Activity.BETWEEN)}, 90, judge=judge)
    later = reading(START + 100, Activity.BETWEEN, steps=STEADY + 1)
    looks = [WorkerLook(rank=0, pid=100, reading=later, process_state="S")]
    stand = {second: judge.look(START + second, looks)[0] for second in range(91, 1003)}
    assert stand[1000].limit_seconds == 900.0
    assert (stand[1000].is_over, stand[1001].is_over) == (False, True)


# --- limits ---------------------------------------------------------------------------------------------------------


def after_steps_of(durations: Sequence[float]) -> Judge:
    judge = Judge(HangLimits())
    for number, seconds in enumerate(durations):
        pulse = reading(0.0, Activity.OUTSIDE, steps=STEADY + number, last_step_seconds=seconds)
        judge.look(START, [WorkerLook(rank=0, pid=100, reading=pulse, process_state="S")])
    return judge


def test_the_limit_is_ten_times_the_slowest_of_a_hundred_steps() -> None:
    pulse = reading(START, steps=STEADY + 199, last_step_seconds=20.0)
    (standing,) = judged({0: pulse}, 1, judge=after_steps_of([1.0] * 197 + [20.0] * 3))
    assert standing.limit_seconds == 200.0
    (standing,) = judged({0: reading(START, steps=STEADY + 199)}, 1, judge=after_steps_of([1.0] * 199 + [20.0]))
    assert standing.limit_seconds == 30.0


def test_first_steps_do_not_count_for_the_limit_and_a_change_forgets_those_before() -> None:
    judge = after_steps_of([20.0] * 100)
    for alike in range(8):
        pulse = reading(
            0.0,
            Activity.OUTSIDE,
            steps=500 + alike,
            num_alike=alike,
            last_step_seconds=60.0 if alike in (1, 2) else 0.1,
        )
        judge.look(START, [WorkerLook(rank=0, pid=100, reading=pulse, process_state="S")])
    (standing,) = judged({0: reading(START, steps=507, num_alike=7)}, 1, judge=judge)
    assert standing.limit_seconds == 30.0


def test_half_of_the_limit_is_slow() -> None:
    assert judged({0: reading(START)}, 15)[0].progress == "getting on"
    (standing,) = judged({0: reading(START)}, 16)
    assert (standing.progress, standing.reason) == (
        "slow",
        "it has been in step 11 for 16 s (that is a hang after 30 s)",
    )


@pytest.mark.parametrize(
    ("given", "limits"),
    [("auto", HangLimits()), ("", HangLimits()), (" Off ", None), ("90", HangLimits(step_seconds=90.0))],
)
def test_what_is_given_as_limit_is_a_word_or_seconds(given: str, limits: HangLimits | None) -> None:
    assert HangLimits.of(given) == limits


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "never", "1 min"])
def test_a_limit_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="allowed: auto, off, or seconds > 0"):
        HangLimits.of(given)


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(HangLimits)])
def test_each_part_of_a_limit_is_a_number_above_zero(field: str) -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{field} is {value}; allowed: a number > 0"):
            HangLimits(**{field: value})


def test_switched_off_nothing_is_a_hang() -> None:
    judge = Judge(None)
    standings = judged({0: reading(START)}, 10_000, judge=judge)
    assert find_hang(standings, world_size=1).hang is None
    assert standings[0].limit_seconds is None


# --- clocks ---------------------------------------------------------------------------------------------------------


def test_what_an_agent_did_not_see_is_not_held_against_workers() -> None:
    judge = Judge(HangLimits())
    look = WorkerLook(rank=0, pid=100, reading=reading(START), process_state="S")
    judge.look(START, [look])
    (standing,) = judge.look(START + 3600, [look])  # the agent was stopped, or the machine
    assert standing.seconds == 5.0
    assert not standing.is_over
    for second in range(1, 26):
        (standing,) = judge.look(START + 3600 + second, [look])
    assert (standing.seconds, standing.is_over) == (30.0, False)
    assert judge.look(START + 3626, [look])[0].is_over


def test_what_got_on_meanwhile_begins_anew() -> None:
    judge = Judge(HangLimits())
    judged({0: reading(START)}, 20, judge=judge)
    (standing,) = judge.look(
        START + 21, [WorkerLook(rank=0, pid=100, reading=reading(START + 20.5), process_state="S")]
    )
    assert standing.seconds == 0.5


# --- several nodes --------------------------------------------------------------------------------------------------


def test_what_looks_like_a_hang_here_is_none_with_a_rank_of_another_node_that_evaluates() -> None:
    here = judged({0: reading(START), 1: reading(START)}, 60)
    there = judged({2: reading(START, Activity.OUTSIDE), 3: reading(START)}, 60)
    alone = find_hang(here, world_size=4).hang
    assert alone is not None
    assert alone.may_be_elsewhere
    told = standings_from_json(standings_to_json(there))
    together = find_hang([*here, *told], world_size=4)
    assert together.hang is None
    assert together.said == "rank 2 has been outside of steps for 60 s; ranks 0, 1 and 3 wait for it"


places = st.none() | st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))


@st.composite
def standings(draw: st.DrawFn) -> list[WorkerStanding]:
    """Workers of any kind."""
    return [
        WorkerStanding(
            rank=rank,
            activity=draw(st.sampled_from(["in a step", "outside of steps", "ended", "saving"])),
            seconds=draw(st.floats(0, 1000)),
            where="somewhere",
            reason="it is there",
            place=(place := draw(places)),
            is_over=place is not None and draw(st.booleans()),
            is_held=draw(st.booleans()),
        )
        for rank in range(draw(st.integers(1, 6)))
    ]


@given(standings())
def test_standings_are_the_same_after_they_were_sent(given: list[WorkerStanding]) -> None:
    assert list(standings_from_json(standings_to_json(given))) == given


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"rank": "0"}]', "[" * 100_000, "null"])
def test_what_is_no_standings_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no standings of workers|Expecting value"):
        standings_from_json(text)


@given(standings())
def test_a_hang_is_of_ranks_that_are_there_and_only_where_one_waits_for_nobody_who_may_come(
    given: list[WorkerStanding],
) -> None:
    found = find_hang(given, world_size=len(given))
    waiting = [each for each in given if each.is_over]
    coming = [each for each in given if each.may_come]

    def has_reason(one: WorkerStanding) -> bool:
        return any(each.place is None or one.place is None or each.place <= one.place for each in coming)

    assert (found.hang is not None) == any(not has_reason(one) for one in waiting)
    if found.hang is not None:
        assert found.hang.ranks
        assert set(found.hang.ranks) <= {each.rank for each in given if each.is_over or each.is_held}
        assert found.said == ""


@given(standings())
def test_with_a_rank_at_the_beginning_that_may_come_nothing_is_a_hang(given: list[WorkerStanding]) -> None:
    evaluating = WorkerStanding(rank=99, activity="outside of steps", where="outside of steps", place=(0, 0, 0, 0))
    assert find_hang([*given, evaluating], world_size=100).hang is None


def test_ranks_are_told_in_their_order() -> None:
    assert ranks_in_words([WorkerStanding(rank=3)]) == "rank 3"
    assert ranks_in_words([WorkerStanding(rank=rank) for rank in (2, 0)]) == "ranks 0 and 2"
    assert ranks_in_words([WorkerStanding(rank=rank) for rank in (2, 0, 11)]) == "ranks 0, 2 and 11"


# --- when it is told ------------------------------------------------------------------------------------------------


def test_who_waits_for_whom_is_told_as_it_begins_and_each_time_it_has_lasted_twice_as_long() -> None:
    news = WaitingNews()
    for_rank_1 = [second for second in range(700) if news.is_due(f"rank 1 is between for {second} s", START + second)]
    assert for_rank_1 == [0, 10, 20, 40, 80, 160, 320, 640]
    assert not news.is_due("", START + 700)
    assert news.is_due("rank 1 is between for 1 s", START + 701)  # it is another time
    assert news.is_due("rank 2 is between for 2 s", START + 702)
