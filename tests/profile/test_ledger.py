"""The goodput ledger: its entries add up to the wall time, whatever a profile holds; and each is what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.profile.ledger import (
    ENTRIES,
    Ledger,
    ProcessProfile,
    Slice,
    TimeUse,
    TrainingHistory,
    in_order,
    ledger_of_job,
    ledger_of_slices,
    merge_neighbours,
    pieces_of,
    processes_of,
    processes_within,
    slices_of,
    trainings_of,
)
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import StepWindow
from tests.support.run_profiles import START, first_window, life, window

# --- what is always so ----------------------------------------------------------------------------------------------

_SECONDS = st.dictionaries(
    st.sampled_from([*(phase.label for phase in Phase), "of-a-newer-version"]),
    st.floats(0, 500, allow_nan=False),
    max_size=6,
)


@st.composite
def windows(draw: st.DrawFn, rank: int = 0) -> list[StepWindow]:
    """What one file may hold: processes one after another, at once, after clocks have jumped, with lines missing."""
    found: list[StepWindow] = []
    now = START + draw(st.floats(0, 1000))
    for restart in range(draw(st.integers(1, 4))):
        now += draw(st.sampled_from([0.0, 1e-7, 3.0, 400.0, -5.0, -3000.0, 1e6]))
        step = draw(st.integers(0, 50))
        if draw(st.booleans()):
            found.append(first_window(now, draw(st.floats(0.01, 60)), step=step, rank=rank, restart=restart))
            now = found[-1].end
        for _ in range(draw(st.integers(0, 5))):
            seconds = draw(_SECONDS)
            num_steps = draw(st.integers(0, 20))
            step = max(step + num_steps - draw(st.sampled_from([0, 0, 0, 30])), 0)
            made = window(now, seconds, step=step, num_steps=num_steps, rank=rank, restart=restart)
            length = draw(st.sampled_from([sum(seconds.values()), 0.0, 7.5]))  # which phases may not add up to
            typical = draw(st.sampled_from([{}, {"forward": 0.1, "communication": 0.3}]))
            made = replace(made, end=made.begin + length, typical=typical)
            now = made.end
            if draw(st.integers(0, 9)):
                found.append(made)
    if draw(st.booleans()):
        found = draw(st.permutations(found))
    return found


@st.composite
def happenings(draw: st.DrawFn) -> TrainingHistory:
    moments = st.floats(START - 100, START + 5000)
    spans = draw(st.lists(st.tuples(moments, st.floats(0, 2000)), max_size=3))
    return TrainingHistory(
        begun=tuple(draw(st.lists(st.tuples(moments, st.integers(0, 60)), max_size=4))),
        failures=tuple(draw(st.lists(moments, max_size=3))),
        stopped=tuple((begin, begin + length) for begin, length in spans),
        has_launcher=draw(st.booleans()),
    )


def check(ledger: Ledger) -> None:
    assert set(ledger.seconds) == set(ENTRIES)
    assert all(spent >= 0 for spent in ledger.seconds.values())
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, abs=1e-6, rel=1e-9)
    assert 0 <= ledger.goodput <= 1 + 1e-9


@given(windows(), happenings(), st.floats(0, 5000))
def test_entries_add_up_to_the_wall_time_of_a_rank_and_none_is_negative(
    given_windows: list[StepWindow], history: TrainingHistory, later: float
) -> None:
    slices = slices_of(in_order(processes_of(given_windows)), history, until=START + later)
    ledger = ledger_of_slices(slices)
    check(ledger)
    if slices:
        assert ledger.wall_seconds == slices[-1].end - slices[0].begin
    for before, after in pairwise(slices):
        assert before.end == after.begin
    for each in slices:
        assert sum(each.seconds.values()) == pytest.approx(each.end - each.begin, abs=1e-6)
        assert 0 <= each.kept <= 1


@settings(max_examples=40)
@given(st.lists(st.tuples(windows(), st.floats(0, 5000)), min_size=1, max_size=4), happenings())
def test_entries_add_up_to_the_wall_time_of_the_job(
    ranks: list[tuple[list[StepWindow], float]], history: TrainingHistory
) -> None:
    found = [slices_of(in_order(processes_of(each)), history, until=START + later) for each, later in ranks]
    found = [each for each in found if each]
    spans = [(each[0].begin, each[-1].end) for each in found]
    ledger = ledger_of_job([ledger_of_slices(each) for each in found], spans)
    check(ledger)
    if spans:
        assert ledger.wall_seconds == max(end for _, end in spans) - min(begin for begin, _ in spans)


@given(windows())
def test_no_window_is_in_two_processes_and_none_is_lost(given_windows: list[StepWindow]) -> None:
    processes = processes_of(given_windows)
    assert sorted(map(id, given_windows)) == sorted(id(each) for process in processes for each in process.windows)
    pieces = pieces_of(in_order(processes))
    assert all(before.end <= after.begin for before, after in pairwise(pieces))


# --- what each entry is ---------------------------------------------------------------------------------------------


def ledger(
    found: Sequence[StepWindow], history: TrainingHistory | None = None, until: float = 0.0
) -> dict[TimeUse, float]:
    """The entries that there are, to the microsecond."""
    slices = slices_of(in_order(processes_of(found)), history or TrainingHistory(), until=until)
    result = ledger_of_slices(slices)
    check(result)
    return {entry: round(spent, 5) for entry, spent in result.seconds.items() if spent > 1e-5}


def chain(*parts: StepWindow) -> list[StepWindow]:
    """Windows moved so that each begins where the one before ends."""
    found = [parts[0]]
    for part in parts[1:]:
        begin = found[-1].end
        found.append(replace(part, begin=begin, end=begin + part.length))
    return found


def test_phases_of_steps_stay_what_they_are() -> None:
    seconds = {"data": 1.0, "forward": 2.0, "backward": 4.0, "communication": 3.0, "checkpoint": 0.5, "outside": 6.0}
    found = chain(first_window(START, 5.0), window(0.0, seconds, step=10, num_steps=10))
    assert ledger(found) == {
        TimeUse.STARTUP: 5.0,
        TimeUse.DATA: 1.0,
        TimeUse.FORWARD: 2.0,
        TimeUse.BACKWARD: 4.0,
        TimeUse.COMMUNICATION: 3.0,
        TimeUse.CHECKPOINT: 0.5,
        TimeUse.OUTSIDE: 6.0,
    }


def test_steps_that_were_not_looked_at_are_divided_as_those_before_them() -> None:
    looked_at = window(0.0, {"forward": 1.0, "communication": 1.0}, step=1, num_steps=1)
    looked_at = replace(looked_at, typical={"forward": 1.0, "communication": 3.0, "data": 9.0})
    found = chain(first_window(START, 1.0), looked_at, window(0.0, {"step": 8.0, "data": 1.0}, step=2, num_steps=1))
    assert ledger(found) == {TimeUse.STARTUP: 1.0, TimeUse.FORWARD: 3.0, TimeUse.COMMUNICATION: 7.0, TimeUse.DATA: 1.0}
    nothing_known = chain(first_window(START, 1.0), window(0.0, {"step": 8.0}, step=2, num_steps=1))
    assert ledger(nothing_known) == {TimeUse.STARTUP: 1.0, TimeUse.STEP: 8.0}


def killed_and_restarted() -> list[StepWindow]:
    """Ten steps of a second each, killed after the ninth, and again from the sixth on, 20 seconds later."""
    before = chain(
        first_window(START, 5.0),
        window(0.0, {"forward": 4.0}, step=4, num_steps=4),
        window(0.0, {"forward": 3.0, "data": 1.0}, step=8, num_steps=4),
    )
    begin = before[-1].end + 20.0
    after = chain(
        first_window(begin, 6.0, step=6, restart=1), window(0.0, {"forward": 4.0}, step=10, num_steps=4, restart=1)
    )
    return before + after


def test_time_between_a_process_and_the_first_step_of_the_next_is_a_restart() -> None:
    assert ledger(killed_and_restarted()) == {
        TimeUse.STARTUP: 5.0,
        TimeUse.FORWARD: 4.0 + 1.5 + 4.0,
        TimeUse.DATA: 0.5,
        TimeUse.LOST_STEPS: 2.0,  # half of the second window: steps 7 and 8
        TimeUse.RESTART: 26.0,
    }


def test_what_a_killed_process_had_not_written_is_lost_up_to_its_failure() -> None:
    history = TrainingHistory(failures=(START + 13.0 + 1.5,), has_launcher=True)
    found = ledger(killed_and_restarted(), history)
    assert (found[TimeUse.UNSEEN], found[TimeUse.RESTART]) == (1.5, 24.5)


def test_time_in_which_no_launcher_runs_is_no_restart() -> None:
    history = TrainingHistory(failures=(START + 15.0,), stopped=((START + 16.0, START + 30.0),), has_launcher=True)
    found = ledger(killed_and_restarted(), history)
    assert (found[TimeUse.UNSEEN], found[TimeUse.STOPPED], found[TimeUse.RESTART]) == (2.0, 14.0, 10.0)


def test_without_a_launcher_a_process_that_goes_on_by_hand_was_stopped_before() -> None:
    before = killed_and_restarted()[:3]
    after = chain(first_window(START + 100.0, 6.0, step=8), window(0.0, {"forward": 1.0}, step=9, num_steps=1))
    found = ledger(before + after)
    assert (found[TimeUse.STOPPED], found[TimeUse.STARTUP]) == (87.0, 11.0)
    assert TimeUse.RESTART not in found


def test_steps_count_as_lost_on_a_rank_that_did_not_come_back() -> None:
    found = killed_and_restarted()[:3]
    history = TrainingHistory(begun=((START + 40.0, 6),))
    assert ledger(found, history)[TimeUse.LOST_STEPS] == 2.0
    assert TimeUse.LOST_STEPS not in ledger(
        found, TrainingHistory(begun=((START + 2.0, 6),))
    )  # began before, or at the same time


def test_steps_that_are_taken_again_within_a_process_count_as_lost() -> None:
    found = chain(
        first_window(START, 1.0),
        window(0.0, {"forward": 10.0}, step=10, num_steps=10),
        window(0.0, {"checkpoint": 1.0}, step=5, num_steps=0),
        window(0.0, {"forward": 10.0}, step=15, num_steps=10),
    )
    assert ledger(found) == {
        TimeUse.STARTUP: 1.0,
        TimeUse.FORWARD: 15.0,
        TimeUse.LOST_STEPS: 5.0,
        TimeUse.CHECKPOINT: 1.0,
    }


def test_steps_that_do_not_commit_are_not_taken_for_lost_ones() -> None:
    """As where a loop gathers gradients over four steps by itself, or a scaler leaves steps out."""
    parts = [window(0.0, {"forward": 4.0}, step=step, num_steps=4) for step in (1, 2, 2, 3)]
    found = chain(first_window(START, 1.0), *parts)
    assert ledger(found) == {TimeUse.STARTUP: 1.0, TimeUse.FORWARD: 16.0}
    assert len(merge_neighbours(found, 1e9)) == 2, "and many of them are read in little memory"


def test_what_came_before_training_went_back_within_a_process_counts_as_lost() -> None:
    parts = [
        window(0.0, {"forward": 10.0}, step=10, num_steps=10),
        window(0.0, {"checkpoint": 1.0}, step=6),
        window(0.0, {"forward": 2.0}, step=8, num_steps=2),
        window(0.0, {"checkpoint": 1.0}, step=0),
        window(0.0, {"forward": 3.0}, step=3, num_steps=3),
    ]
    found = chain(first_window(START, 1.0), *parts)
    assert ledger(found) == {
        TimeUse.STARTUP: 1.0,
        TimeUse.CHECKPOINT: 2.0,
        TimeUse.LOST_STEPS: 12.0,
        TimeUse.FORWARD: 3.0,
    }
    assert ledger(merge_neighbours(found, 1e9)) == ledger(found)


def test_lines_that_could_not_be_read_are_time_that_nothing_is_known_of() -> None:
    found = list(life(START, START + 60.0))
    del found[20:30]
    assert ledger(found)[TimeUse.UNSEEN] == pytest.approx(10.0)
    assert len(processes_of(found)) == 2


def test_two_processes_that_write_at_the_same_time_count_once() -> None:
    one, other = list(life(START, START + 50.0)), list(life(START + 10.0, START + 80.0))
    together = sorted(one + other, key=lambda each: each.end)
    processes = in_order(processes_of(together))
    assert len(processes) == 2 and not any(each.shift_seconds for each in processes)
    assert sum(ledger(together).values()) == pytest.approx(80.0)


def test_a_clock_that_is_put_back_loses_no_time() -> None:
    before, after = list(life(START, START + 50.0)), list(life(START - 3600.0, START - 3500.0, restart=1))
    processes = processes_of(before + after)
    assert [each.shift_seconds for each in processes] == [0.0, pytest.approx(3650.0)]
    assert sum(ledger(before + after).values()) == pytest.approx(150.0)


def test_a_rank_of_the_job_that_came_late_has_its_own_wall_time() -> None:
    first = slices_of(processes_of(life(START, START + 100.0)), TrainingHistory())
    late = slices_of(processes_of(life(START + 60.0, START + 100.0, rank=1)), TrainingHistory())
    ledgers = [ledger_of_slices(each) for each in (first, late)]
    assert [round(each.wall_seconds) for each in ledgers] == [100, 40]
    job = ledger_of_job(ledgers, [(START, START + 100.0), (START + 60.0, START + 100.0)])
    check(job)
    assert job.seconds[TimeUse.STARTUP] == pytest.approx(10.0 * 100 / 140)


def test_time_in_which_no_rank_is_known_is_in_the_jobs_ledger() -> None:
    one = ledger_of_slices(slices_of(processes_of(life(START, START + 10.0)), TrainingHistory()))
    other = ledger_of_slices(slices_of(processes_of(life(START + 30.0, START + 40.0, rank=1)), TrainingHistory()))
    job = ledger_of_job([one, other], [(START, START + 10.0), (START + 30.0, START + 40.0)])
    check(job)
    assert job.wall_seconds == pytest.approx(40.0) and job.seconds[TimeUse.STOPPED] == pytest.approx(20.0)


@settings(max_examples=40)
@given(st.floats(1.0, 40.0))
def test_windows_made_one_have_the_same_ledger(longest: float) -> None:
    every = [*life(START, START + 100.0), *life(START + 110.0, START + 150.0, restart=1, first_step=900)]
    processes = processes_of(every)
    fewer = [replace(each, windows=tuple(merge_neighbours(each.windows, longest))) for each in processes]
    assert [each.is_whole for each in fewer] == [True, True]
    assert sum(len(each.windows) for each in fewer) <= len(every)
    before, after = (ledger_of_slices(slices_of(each, TrainingHistory())) for each in (processes, fewer))
    check(after)
    assert after.wall_seconds == pytest.approx(before.wall_seconds)
    assert after.goodput == pytest.approx(before.goodput, abs=0.01)
    for one, other in zip(processes, fewer, strict=True):
        assert sum(each.num_steps for each in one.windows) == sum(each.num_steps for each in other.windows)
        assert (one.begin, one.end, one.first_step) == (other.begin, other.end, other.first_step)


def test_a_job_that_restarts_all_the_time_is_read_in_little_memory() -> None:
    def every() -> Iterator[StepWindow]:
        for restart in range(50):
            begin = START + restart * 2000.0
            yield from life(begin, begin + 1500.0, restart=restart, step_seconds=0.5)

    processes = processes_of(every())
    assert len(processes) == 50
    assert sum(len(each.windows) for each in processes) <= 40_000
    check(ledger_of_slices(slices_of(processes, TrainingHistory())))


# --- trainings ------------------------------------------------------------------------------------------------------


def _processes(*spans: tuple[float, float, int, int]) -> list[ProcessProfile]:
    return [
        each
        for begin, end, restart, step in spans
        for each in processes_of(life(START + begin, START + end, restart=restart, first_step=step))
    ]


@pytest.mark.parametrize(
    ("spans", "launches", "num_trainings"),
    [
        ([(0, 50, 0, 0)], None, 1),
        ([(0, 50, 0, 0), (60, 90, 0, 0)], None, 2),  # once more, by hand
        ([(0, 50, 0, 0), (60, 90, 0, 400)], None, 1),  # goes on from a checkpoint
        ([(0, 50, 0, 0), (60, 90, 1, 0)], None, 1),  # restarted, and there was no checkpoint
        ([(0, 50, 0, 0), (60, 90, 0, 0)], [-1], 1),  # nodes came, and there was no checkpoint
        ([(0, 50, 0, 0), (60, 90, 0, 0)], [-1, 58], 2),
        ([(0, 50, 0, 0), (60, 90, 2, 300), (100, 120, 0, 0)], None, 2),
    ],
)
def test_a_process_that_begins_at_the_beginning_again_begins_another_training(
    spans: list[tuple[float, float, int, int]], launches: list[float] | None, num_trainings: int
) -> None:
    processes = _processes(*spans)
    begins = trainings_of(processes, None if launches is None else [START + each for each in launches])
    assert len(begins) == num_trainings
    ends = [*begins[1:], float("inf")]
    parts = [processes_within(processes, begin, end) for begin, end in zip(begins, ends, strict=True)]
    assert [each for part in parts for each in part] == processes


def test_a_slice_without_a_process_has_no_piece() -> None:
    slices: list[Slice] = slices_of(
        in_order(processes_of(killed_and_restarted())), TrainingHistory(), until=START + 500.0
    )
    assert [each.piece is None for each in slices] == [False, False, False, True, False, False, True]
    assert set(slices[-1].seconds) == {TimeUse.STOPPED}
