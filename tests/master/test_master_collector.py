"""What a master makes of beats: bounded whatever comes, and true of what does."""

from __future__ import annotations

import gc
import math
import random
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.master_beats import NUM_WORKERS, STEP, made_worker, made_workers
from elastic_ext.master import node_metrics
from elastic_ext.master.collector import Collector
from elastic_ext.master.wire import logged_of, master_pb2, metrics_of, put_logged
from elastic_ext.records.logged import MOST_NAMES

BEGIN = 1.7e9
ABSURD = (math.nan, math.inf, -math.inf, -1.0, 1e300)
SLOW = {**STEP, "forward": 0.25, "communication": 0.0}
WAITING = {**STEP, "communication": 0.19}  # for the slow one


def _beat(collector: Collector, now: float, num_nodes: int = 2, *, slow: int | None = None, **changes: object) -> None:
    """One of every node; ``slow`` is a rank that the others wait for."""
    for node in range(num_nodes):
        workers = made_workers(node, end=now, num_nodes=num_nodes, **changes)
        if slow is not None:
            world_size = num_nodes * NUM_WORKERS
            workers = [
                made_worker(each.rank, end=now, world_size=world_size, step=SLOW if each.rank == slow else WAITING)
                for each in workers
            ]
        collector.take(now, f"node-{node}", workers, host=f"host-{node}")


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_progress_is_what_the_fresh_reports_say() -> None:
    collector = Collector(fresh_seconds=45)
    _beat(collector, BEGIN, at_step=90)
    _beat(collector, BEGIN + 10, at_step=100)
    found = collector.progress(BEGIN + 11)
    length = sum(STEP.values())
    assert found.step == 100
    assert found.steps_per_second == pytest.approx(1 / length, rel=0.03)
    assert found.samples_per_second == pytest.approx(32 * 16 / length, rel=0.03)
    assert found.tokens_per_second == pytest.approx(32 * 1024 * 16 / length, rel=0.03)
    assert set(found.shares) == set(STEP)
    assert found.shares["backward"] == pytest.approx(STEP["backward"] / length, rel=0.03)
    assert sum(found.shares.values()) == pytest.approx(1, abs=0.01)


def test_of_nodes_that_tell_no_more_nothing_is_said() -> None:
    collector = Collector(fresh_seconds=45)
    _beat(collector, BEGIN)
    assert not collector.progress(BEGIN + 46).HasField("step")
    assert not collector.progress(BEGIN - 46).HasField("step"), "nor of what lies ahead of a clock that was set back"


def test_a_node_that_has_left_does_not_count_any_more_until_it_reports_again() -> None:
    collector = Collector(fresh_seconds=45)
    staying, leaving = (made_worker(rank, end=BEGIN) for rank in (0, 1))
    staying.step, staying.config_version, leaving.step, leaving.config_version = 100, 3, 200, 2
    staying.state = leaving.state = "running"
    collector.take(BEGIN, "staying", [staying])
    collector.take(BEGIN, "leaving", [leaving])
    assert (collector.progress(BEGIN + 1).step, collector.versions_in_force(BEGIN + 1)) == (200, [2, 3])
    collector.note_gone("leaving")
    assert (collector.progress(BEGIN + 1).step, collector.versions_in_force(BEGIN + 1)) == (100, [3])
    for second in range(0, 30, 5):
        collector.tick(BEGIN + 1 + second)
    assert {(each.num_nodes, each.num_workers) for each in collector.history().points} == {(1, 1)}
    collector.take(BEGIN + 31, "leaving", [leaving])
    assert collector.progress(BEGIN + 31).step == 200


def test_a_straggler_whose_node_has_left_is_named_no_more_after_the_next_round() -> None:
    collector, second = Collector(fresh_seconds=1000), 0
    while not collector.stragglers:
        _beat(collector, BEGIN + second, num_nodes=4, slow=5)
        collector.tick(BEGIN + second)
        second += 5
        assert second < 300
    (node,) = {each.host.replace("host", "node") for each in collector.stragglers}
    collector.note_gone(node)
    for later in range(second, second + 15, 5):
        collector.tick(BEGIN + later)
    assert collector.stragglers == ()


def test_nothing_is_known_of_a_job_that_has_told_nothing() -> None:
    collector = Collector()
    assert collector.progress(BEGIN) == master_pb2.Progress()
    assert collector.verdict(BEGIN).kind == "unknown"
    assert collector.stragglers == ()
    assert collector.tick(BEGIN) == []
    assert list(collector.history().points) == []


def test_workers_are_shown_as_they_were_told_but_for_their_windows() -> None:
    collector = Collector()
    (worker,) = [made_worker(3, end=BEGIN)]
    told = master_pb2.Worker.FromString(worker.SerializeToString())
    collector.take(BEGIN, "a", [worker])
    del told.windows[:]
    assert collector.workers("a") == [told]
    assert collector.workers("b") == []


def test_a_node_that_is_forgotten_is_gone() -> None:
    collector = Collector()
    _beat(collector, BEGIN)
    collector.forget("node-0")
    collector.forget("node-0")
    assert collector.num_ranks == NUM_WORKERS
    assert collector.workers("node-0") == []
    assert len(collector.workers("node-1")) == NUM_WORKERS
    collector.forget("node-1")
    assert collector.progress(BEGIN) == master_pb2.Progress()


def test_a_verdict_is_judged_from_all_ranks_and_kept_for_some_seconds() -> None:
    collector = Collector()
    _beat(collector, BEGIN)
    _beat(collector, BEGIN + 10)
    found = collector.verdict(BEGIN + 11)
    assert found.kind == "busy"
    assert found.evidence["num_ranks"] == 16
    _beat(collector, BEGIN + 20, step={**STEP, "data": 0.4})
    _beat(collector, BEGIN + 30, step={**STEP, "data": 0.4})
    _beat(collector, BEGIN + 40, step={**STEP, "data": 0.4})
    assert collector.verdict(BEGIN + 15.9) is found
    assert collector.verdict(BEGIN + 41).kind == "data"


def test_a_verdict_on_a_large_job_looks_at_some_ranks_of_many_places() -> None:
    collector = Collector()
    for number in range(3):
        _beat(collector, BEGIN + 10 * number, 100)
    found = collector.verdict(BEGIN + 21)
    assert found.kind == "busy"
    assert 100 <= found.evidence["num_ranks"] <= 128
    assert found.evidence["num_ranks"] + found.evidence["num_missing"] == 800


def test_steps_of_which_each_takes_a_window_are_judged_too() -> None:
    collector = Collector()
    long = {name: 300 * seconds for name, seconds in STEP.items()}
    for number in range(4):
        workers = made_workers(0, end=BEGIN + 100 * number, step=long)
        for worker in workers:
            worker.windows[0].num_steps = worker.windows[0].num_detailed = 1
        collector.take(BEGIN + 100 * number, "a", workers)
    assert collector.verdict(BEGIN + 301).kind != "unknown"


def test_a_rank_that_is_slow_for_three_rounds_is_named_and_no_more_some_rounds_after() -> None:
    collector = Collector()
    now = BEGIN

    def rounds(number: int, **changes: object) -> list[tuple[int, ...]]:
        nonlocal now
        seen = []
        for _ in range(number):
            now += 10
            _beat(collector, now, 4, **changes)  # type: ignore[arg-type]
            collector.tick(now + 1)
            seen.append(tuple(each.rank for each in collector.stragglers))
        return seen

    assert set(rounds(8)) == {()}
    assert rounds(5, slow=13)[-1] == (13,)
    (found,) = collector.stragglers
    assert found.host == "host-1"
    assert found.score == pytest.approx(0.29 / 0.45, rel=0.05)
    assert found.own_score == pytest.approx(0.29 / 0.45, rel=0.05)
    assert "as long as it took before" in found.text
    assert rounds(3)[-1] == (13,), "it may be slow again"
    assert rounds(6)[-1] == ()


@pytest.mark.parametrize("num_ranks", [16, 2048, 2056, 3000, 4096, 10_000])
def test_what_is_usual_is_found_in_a_large_job_too_where_every_second_rank_is_slow(num_ranks: int) -> None:
    times = (0.2, 0.1) * (num_ranks // 2)
    report = node_metrics.report_of(BEGIN, "host", [])
    slow = node_metrics.SlowRanks()
    for number in range(3):
        reports = {
            f"node-{first}": replace(
                report,
                time=BEGIN + number,
                ranks=tuple(range(first, first + 8)),
                local_seconds=times[first : first + 8],
            )
            for first in range(0, num_ranks, 8)
        }
        slow.see(reports)
    assert slow.named and all(each.rank % 2 == 0 for each in slow.named)


def test_who_is_slow_is_named_also_once_the_masters_clock_was_put_back() -> None:
    collector = Collector()
    for begin, slow in ((BEGIN, None), (BEGIN - 3600, 13)):
        for number in range(8):
            _beat(collector, begin + 10 * number, 4, slow=slow)
            collector.tick(begin + 10 * number + 1)
    assert [each.rank for each in collector.stragglers] == [13]


def test_when_nobody_tells_of_anything_any_more_nobody_is_slow() -> None:
    collector = Collector(fresh_seconds=45)
    for number in range(6):
        _beat(collector, BEGIN + 10 * number, 4, slow=13)
        collector.tick(BEGIN + 10 * number + 1)
    assert collector.stragglers
    collector.tick(BEGIN + 200)
    assert collector.stragglers == ()


def test_noise_names_nobody() -> None:
    collector = Collector()
    draw = random.Random(0)
    for number in range(60):
        _beat(collector, BEGIN + 10 * number, 8, noise=0.15, draw=draw)
        collector.tick(BEGIN + 10 * number + 1)
        assert collector.stragglers == ()


def test_a_node_whose_report_is_old_is_not_judged_twice_by_it() -> None:
    collector = Collector(fresh_seconds=1000)
    _beat(collector, BEGIN, 4, slow=13)
    for number in range(8):
        collector.tick(BEGIN + 10 * number)
    assert collector.stragglers == ()


def test_steps_that_take_longer_for_good_are_told_of_once() -> None:
    collector = Collector()
    told = []
    for number in range(90):
        step = {name: (1.5 if number >= 50 else 1) * seconds for name, seconds in STEP.items()}
        _beat(collector, BEGIN + 10 * number, at_step=30 * number, step=step)
        told += [(number, text) for text in collector.tick(BEGIN + 10 * number)]
    ((number, text),) = told
    assert 50 < number < 60
    assert text.startswith("steps take 1.50 times as long as before since step ")


def test_logged_numbers_are_the_mean_of_all_ranks_that_log_them_and_of_no_others() -> None:
    collector = Collector()
    workers = {node: made_workers(node, end=BEGIN, num_nodes=2) for node in range(2)}
    for node, each in workers.items():
        for place, worker in enumerate(each):
            put_logged(
                worker, {"loss": float(node)} | ({"val_loss": 7.0, "bad": math.nan} if place == node == 0 else {})
            )
        collector.take(BEGIN, f"node-{node}", each)
    told = logged_of(collector.progress(BEGIN))
    assert (told["loss"], told["val_loss"], math.isnan(told["bad"])) == (0.5, 7.0, True)
    assert [logged_of(each) for each in collector.workers("node-1")] == [{"loss": 1.0}] * NUM_WORKERS
    assert "loss" not in metrics_of(collector.workers("node-1")[0])


def test_a_logged_number_is_weighed_by_the_ranks_that_log_it_and_not_by_all_of_their_node() -> None:
    collector = Collector()
    nodes = [made_workers(node, end=BEGIN, num_nodes=2)[:4] for node in range(2)]
    for worker in nodes[0]:
        put_logged(worker, {"x": 0.0})
    put_logged(nodes[1][0], {"x": 10.0})
    for node, workers in enumerate(nodes):
        collector.take(BEGIN, f"node-{node}", workers)
    assert logged_of(collector.progress(BEGIN)) == {"x": 2.0}


# --- what it does not believe -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ABSURD)
def test_numbers_that_cannot_be_are_left_out(value: float) -> None:
    collector = Collector()
    worker = made_worker(0, end=BEGIN)
    names = ("steps_per_second", "samples_per_second", "tokens_per_second", "cpu_percent", "gpu_percent")
    for name in (*names, "activity_seconds", "step_seconds", "slow_step_seconds"):
        setattr(worker, name, value)
    worker.shares["forward"] = value
    worker.windows[0].seconds["forward"] = value
    collector.take(BEGIN, "a", [worker])
    collector.take(BEGIN + 1, "b", [made_worker(1, end=BEGIN)])
    (found,) = collector.workers("a")
    assert not any(found.HasField(name) for name in (*names, "activity_seconds", "step_seconds"))
    assert "forward" not in found.shares and "backward" in found.shares
    progress = collector.progress(BEGIN + 1)
    assert progress.steps_per_second == pytest.approx(1 / sum(STEP.values()), rel=0.03)
    assert all(0 <= share <= 1 for share in progress.shares.values())
    assert collector.verdict(BEGIN + 1).evidence["num_ranks"] == 1


def test_long_words_are_cut_and_control_characters_go() -> None:
    collector = Collector()
    worker = made_worker(0, end=BEGIN)
    worker.trouble, worker.activity, worker.state = "\x1b[31m" + "x" * 10**6, "y\n" * 10**5, "z" * 10**5
    for number in range(1000):
        worker.shares[f"phase {number}"] = 0.001
    collector.take(BEGIN, "a", [worker])
    (found,) = collector.workers("a")
    assert len(found.trouble) <= 240 and found.trouble.isprintable()
    assert len(found.activity) <= 240 and found.activity.isprintable()
    assert len(found.state) <= 32 and len(found.shares) <= 24


def test_logged_numbers_are_few_and_have_names_that_a_script_may_give() -> None:
    collector = Collector()
    worker = made_worker(0, end=BEGIN)
    names = ["x" * 1000, "\x1b[31m", "", *(f"n{number}" for number in range(1000))]
    worker.metrics.update({f"logged.{name}": 1.0 for name in names} | {"of_a_newer_version": 2.0})
    collector.take(BEGIN, "a", [worker])
    for found in (*collector.workers("a"), collector.progress(BEGIN)):
        assert len(logged_of(found)) == MOST_NAMES and set(logged_of(found)) < set(names[3:])


def test_windows_of_another_rank_or_of_numbers_that_cannot_be_do_not_count() -> None:
    collector = Collector()
    worker = made_worker(0, end=BEGIN)
    worker.windows[0].rank = 7
    other = made_worker(1, end=BEGIN)
    other.windows[0].typical["x" * 1000] = 1.0
    third = made_worker(2, end=BEGIN)
    third.windows[0].end, third.windows[0].begin = 1e300, -5
    fourth = made_worker(3, end=BEGIN)
    fourth.windows[0].num_steps = 2**32 - 1
    collector.take(BEGIN, "a", [worker, other, third, fourth, made_worker(4, end=BEGIN)])
    assert collector.verdict(BEGIN).kind != "straggler"


_NUMBER = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(ABSURD), st.floats(0, 1))
_TABLE = st.dictionaries(st.sampled_from([*STEP, "step", "startup", "new", ""]), _NUMBER, max_size=6)


@st.composite
def _workers(draw: st.DrawFn) -> master_pb2.Worker:
    worker = master_pb2.Worker(
        rank=draw(st.integers(0, 2**32 - 1) | st.integers(0, 3)),
        state=draw(st.sampled_from(["running", "failed", "", "\x00"])),
        shares=draw(_TABLE),
    )
    for name in ("steps_per_second", "samples_per_second", "step_seconds", "gpu_percent"):
        if draw(st.booleans()):
            setattr(worker, name, draw(_NUMBER))
    if draw(st.booleans()):
        worker.step = draw(st.integers(0, 2**64 - 1))
        worker.config_version = draw(st.integers(0, 2**64 - 1))
    for _ in range(draw(st.integers(0, 3))):
        worker.windows.add(
            begin=draw(_NUMBER),
            end=draw(_NUMBER | st.just(BEGIN)),
            rank=draw(st.sampled_from([worker.rank, 1])),
            world_size=draw(st.integers(0, 2**32 - 1)),
            num_steps=draw(st.integers(0, 2**32 - 1)),
            seconds=draw(_TABLE),
            typical=draw(_TABLE),
            step_seconds=draw(st.lists(_NUMBER, max_size=5)),
            num_samples=draw(st.integers(0, 2**64 - 1)),
        )
    return worker


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 100), st.sampled_from("abc"), st.lists(_workers(), max_size=4)), max_size=6))
def test_whatever_is_told_all_that_is_said_is_numbers_that_can_be(beats: list[tuple[float, str, list[object]]]) -> None:
    collector = Collector()
    for seconds, node_id, workers in beats:
        now = BEGIN + seconds
        collector.take(now, node_id, workers)  # type: ignore[arg-type]
        collector.tick(now)
        progress = collector.progress(now)
        assert collector.verdict(now).text
        for each in collector.stragglers:
            assert each.text
        for number in (progress.steps_per_second, progress.samples_per_second, *progress.shares.values()):
            assert 0 <= number < math.inf
        for point in collector.history().points:
            assert 0 <= point.steps_per_second < math.inf
    fresh = Collector()
    fresh.restore(text for _, text in collector.rows())
    assert fresh.rows() == collector.rows()


# --- what it costs ----------------------------------------------------------------------------------------------------


def _kept_bytes(num_nodes: int, num_rounds: int = 4) -> float:
    """What is kept of each node."""
    collector = Collector()
    nodes = [made_workers(node, end=BEGIN, num_nodes=num_nodes) for node in range(num_nodes)]
    said = [master_pb2.BeatRequest(workers=workers).SerializeToString() for workers in nodes]
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(num_rounds):
            for node, beat in enumerate(said):
                workers = master_pb2.BeatRequest.FromString(beat).workers
                collector.take(BEGIN + 10 * number, f"node-{node}", workers, host=f"host-{node}")
            collector.tick(BEGIN + 10 * number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / num_nodes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("num_nodes", "most_bytes"), [(10, 20_000), (200, 6_500)])
def test_a_node_of_eight_workers_takes_few_kilobytes(num_nodes: int, most_bytes: float) -> None:
    assert _kept_bytes(num_nodes) < most_bytes


def test_a_node_that_tells_of_very_many_workers_in_many_words_is_bounded() -> None:
    collector = Collector()
    workers = []
    for rank in range(5000):
        worker = made_worker(rank, end=BEGIN, num_windows=1)
        worker.trouble = "x" * 1000
        workers.append(worker)
    collector.take(BEGIN, "a", workers)
    assert len(collector.workers("a")) == 64


def test_very_many_nodes_are_bounded_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ext.master.collector._MOST_BYTES", 100_000)
    collector = Collector()
    for number in range(200):
        collector.take(BEGIN + number, f"node-{number}", made_workers(0, end=BEGIN))
    kept = [number for number in range(200) if collector.workers(f"node-{number}")]
    assert kept == list(range(200 - len(kept), 200))
    assert 10 < len(kept) < 30


def test_windows_that_are_kept_are_bounded_however_many_call_themselves_the_same_rank() -> None:
    collector = Collector()
    for number in range(300):
        collector.take(BEGIN, f"node-{number}", made_workers(0, end=BEGIN))
    assert collector._num_kept <= 512
    for number in range(300):
        collector.forget(f"node-{number}")
    assert collector._num_kept == collector._num_bytes == collector._num_ranks == 0


def test_ranks_of_nodes_that_are_gone_take_nothing_from_those_that_are_there() -> None:
    """Neither are they counted, by which fewer ranks would be looked at, nor do their windows take the room."""
    collector = Collector()
    for start in range(40):
        for node in range(2):
            collector.take(BEGIN, f"start-{start}-node-{node}", made_workers(node, end=BEGIN))
        assert collector.num_ranks == 2 * NUM_WORKERS
        for node in range(2):
            collector.note_gone(f"start-{start}-node-{node}")
            collector.note_gone(f"start-{start}-node-{node}")
        assert collector.num_ranks == 0
    _beat(collector, BEGIN + 60)
    assert collector.verdict(BEGIN + 60).evidence["num_ranks"] == 2 * NUM_WORKERS
    collector.take(BEGIN + 60, "start-0-node-0", made_workers(0, end=BEGIN + 60))
    assert collector.num_ranks == 3 * NUM_WORKERS, "it is there again"
    assert collector.workers("start-0-node-1"), "its last report is shown still"


def test_a_beat_of_eight_workers_is_taken_in_well_below_a_millisecond() -> None:
    collector = Collector()
    seconds = []
    for number in range(200):
        workers = made_workers(0, end=BEGIN + number)
        begin = time.perf_counter()
        collector.take(BEGIN + number, "a", workers)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 300e-6  # it was 60 on a machine that was busy
