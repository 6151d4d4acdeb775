"""What is shown of a profile: which windows count, what they come to, the line of the log, and sinks."""

from __future__ import annotations

import importlib
import logging
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.errors import ElasticError
from elastic_ext.profile.breakdown import merged
from elastic_ext.profile.output import ProfileOutput, Sinks, TensorBoardSink, TrainingFacts
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.reader import (
    present_windows,
    profiled_seats,
    read_profiles,
    rounds_of,
    tail_of,
    tails_of,
    view_of,
)
from elastic_ext.profile.summary import (
    StepProfile,
    duration_in_words,
    flops_share,
    line_of,
    number_in_words,
    shares_in_words,
    summary_of,
)
from elastic_ext.ranks.world import PeerName, World
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.run_dir import RunDirectory
from tests.support.profiles import calibration, census, made_window

STEP = {Phase.DATA: 0.004, Phase.FORWARD: 0.002, Phase.BACKWARD: 0.003, Phase.OPTIMIZER: 0.001}
SLOW = {**STEP, Phase.FORWARD: 0.014}
WAITING = {**STEP, Phase.COMMUNICATION: 0.012}


def window(at: float, step: Any = STEP, /, **values: Any) -> StepWindow:
    """One that ends then, of a second."""
    return replace(made_window(step, **values), begin=at - 1, end=at)


def startup(at: float, **values: Any) -> StepWindow:
    """What a process writes as its first step begins."""
    return replace(window(at, **values), num_steps=0, seconds={"startup": 1.0}, typical={}, step_seconds=())


def write(folder: Path, windows: Sequence[StepWindow]) -> None:
    for each in windows:
        RunDirectory(folder, seat=each.rank).add_window(each)


# ---- reading ----


def test_the_last_windows_of_a_file_are_read_and_broken_lines_passed_over(tmp_path: Path) -> None:
    windows = [window(float(at), rank=3) for at in range(1, 40)]
    write(tmp_path, windows)
    file = tmp_path / "profile-3.jsonl"
    assert tail_of(file, 3) == tuple(windows[-3:])
    with open(file, "a") as opened:
        opened.write(
            '{"begin": 1}\n\x00\n' + windows[0].to_json().replace('"num_steps":100', '"num_steps":1e300') + "\n"
        )
        opened.write(windows[0].to_json()[:50])
    assert tail_of(file, 5) == tuple(windows[-2:])
    assert tail_of(tmp_path / "profile-4.jsonl", 5) == ()
    assert profiled_seats(tmp_path) == [3]
    assert tails_of(tmp_path, [3, 4], 4) == {3: (windows[-1],), 4: ()}


@pytest.mark.parametrize("num_logged", [0, 100])
@pytest.mark.parametrize("number", [1, 3])
def test_the_last_windows_are_found_however_long_their_lines_are(tmp_path: Path, num_logged: int, number: int) -> None:
    logged = {f"a number of layer {each}": each / 7 for each in range(num_logged)}
    windows = [window(float(at), rank=3, logged=logged) for at in range(1, 6)]
    write(tmp_path, windows)
    assert tail_of(tmp_path / "profile-3.jsonl", number) == tuple(windows[-number:])


def test_what_is_read_of_workers_is_by_the_ranks_that_they_have_now(tmp_path: Path) -> None:
    had = {0: (0, 0, 1, 1), 1: (1, 1, 0, 0), 2: (1, 1)}  # by seat; the last one has gone
    rows = {seat: [window(float(at), rank=rank) for at, rank in enumerate(ranks, 1)] for seat, ranks in had.items()}
    for seat, row in rows.items():
        directory = RunDirectory(tmp_path, seat=seat)
        directory.write_census(census(num_ops=100 + seat))
        for each in row:
            directory.add_window(each)
    for seats in ([0, 1, 2], [2, 1, 0]):
        found = read_profiles(tmp_path, seats, num_windows=10)
        assert found.windows == tails_of(tmp_path, seats, 10) == {1: tuple(rows[0][2:]), 0: tuple(rows[1][2:])}
        assert {rank: each.num_ops for rank, each in found.censuses.items()} == {1: 100, 0: 101}
    assert tails_of(tmp_path, [2], 10) == {1: tuple(rows[2])}


def test_a_tail_is_read_in_bounded_time_whatever_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "profile-0.jsonl"
    with open(file, "wb") as opened:
        opened.truncate(1 << 30)
    begun = time.perf_counter()
    assert tail_of(file, 1000) == ()
    assert time.perf_counter() - begun < 1.0
    (tmp_path / "profile-1.jsonl").mkdir()
    assert tail_of(tmp_path / "profile-1.jsonl", 3) == ()


def test_windows_of_the_last_seconds_count_that_are_of_the_present_processes() -> None:
    rows = {
        0: [window(100.0), startup(200.0), window(201.0), window(202.0)],
        1: [window(100.5, rank=1), startup(200.1, rank=1), window(201.1, rank=1), window(202.1, rank=1)],
        2: [window(150.0, rank=2)],  # nothing was heard of it since the others began
    }
    found = present_windows(rows, seconds=60.0)
    assert {rank: [each.end for each in row] for rank, row in found.items()} == {0: [201.0, 202.0], 1: [201.1, 202.1]}
    assert {rank: len(row) for rank, row in present_windows(rows, seconds=1.0).items()} == {0: 1, 1: 1}
    assert present_windows(rows, seconds=60.0, since=300.0) == present_windows({}, seconds=60.0) == {}


def test_ranks_of_an_earlier_membership_are_left_out() -> None:
    rows = {
        0: [window(10.0, world_size=4), window(20.0, world_size=2, restart=1)],
        1: [window(10.0, world_size=4, rank=1), window(20.0, world_size=2, restart=1, rank=1)],
        2: [window(19.0, world_size=4, rank=2)],
    }
    found = present_windows(rows, seconds=60.0)
    assert {rank: [each.world_size for each in row] for rank, row in found.items()} == {0: [2], 1: [2]}
    moved = {
        0: [window(10.0, world_size=2), window(20.0, world_size=2, members=3)],
        1: [window(10.0, world_size=2, rank=1), window(20.0, world_size=2, members=3, rank=1)],
    }
    found = present_windows(moved, seconds=60.0)
    assert {rank: [each.end for each in row] for rank, row in found.items()} == {0: [20.0], 1: [20.0]}, "of equal sizes"


def test_the_newest_config_counts_that_all_ranks_have_told_of() -> None:
    old = {"config_version": 1, "config_revision": 3}
    rows = {
        0: [window(1.0, **old), window(2.0, config_version=2)],
        1: [window(1.0, rank=1, **old)],
    }
    assert {rank: [each.end for each in row] for rank, row in present_windows(rows, seconds=9).items()} == {
        0: [1.0],
        1: [1.0],
    }
    rows[1].append(window(2.0, rank=1, config_version=2))
    assert [each.config_version for row in present_windows(rows, seconds=9).values() for each in row] == [2, 2]


def test_rounds_are_of_all_ranks_and_of_a_few_steps() -> None:
    rows = {
        0: [window(float(at), num_steps=1) for at in range(1, 11)],
        1: [window(float(at), num_steps=5, rank=1) for at in range(1, 4)],
    }
    rounds = rounds_of(rows, 5)
    assert [{rank: each.num_steps for rank, each in one.items()} for one in rounds] == [{0: 3, 1: 5}] * 3
    assert rounds[-1][0].end == 10.0 and rounds[0][0].begin == 1.0
    assert rounds_of({**rows, 2: []}, 5) == [] == rounds_of({}, 3)


def test_a_view_has_what_the_metrics_say_and_the_micro_batch_that_follows() -> None:
    measures = Measures(num_workers=2, num_micro_steps=4, num_replicas=2, waits_in_passes=True)
    seen = view_of([window(1.0, world_size=4)] * 2, host="node", measures=measures, calibration=calibration())
    assert (seen.num_workers, seen.num_micro_steps, seen.waits_in_passes, seen.rank) == (2, 4, True, 0)
    assert seen.micro_batch == 4  # 32 samples a step, half of them here, in four parts
    assert seen.calibration is not None
    assert view_of([window(1.0)], host="other", measures=Measures(), calibration=calibration()).calibration is None


# ---- what windows come to ----


def test_shares_add_up_and_rates_are_of_the_time_of_training() -> None:
    besides = {Phase.OUTSIDE: 1.0}
    one = made_window(STEP, num_steps=100, besides=besides, num_samples=3200, num_tokens=1000, num_undetailed=50)
    found = summary_of([one, one])
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["outside"] == pytest.approx(0.5) and found.shares["data"] == pytest.approx(0.2)
    assert found.samples_per_second == pytest.approx(3200)
    assert found.tokens_per_second == pytest.approx(2000)
    assert found.step_seconds == found.slow_step_seconds == pytest.approx(0.01)
    of_four = summary_of([replace(one, world_size=4)])
    of_two = summary_of([replace(one, world_size=4)], num_replicas=2)
    assert of_four is not None and of_two is not None
    assert of_four.tokens_per_second == pytest.approx(8000) and of_two.tokens_per_second == pytest.approx(4000)


def test_of_steps_that_nobody_looked_at_less_is_known() -> None:
    found = summary_of([made_window({Phase.STEP: 0.001}, num_undetailed=100)])
    assert found is not None
    assert (found.step_seconds, found.tokens_per_second) == (None, None)
    assert found.shares == {"step": pytest.approx(1.0)}
    assert summary_of([startup(1.0)]) is None


def test_a_quantile_is_that_of_the_window_in_the_middle_of_the_steps() -> None:
    rows = ((1, 1.0), (9, 5.0), (1, 9.0))
    windows = [replace(window(at, num_steps=num), step_seconds=(0.0, at, 2 * at, 99.0)) for num, at in rows]
    found = summary_of(windows)
    assert found is not None and (found.step_seconds, found.slow_step_seconds) == (5.0, 10.0)


def test_the_share_of_arithmetic_is_that_of_the_devices_best() -> None:
    one = made_window(STEP, num_steps=100, num_samples=1600, besides={Phase.OUTSIDE: 5.0})  # a second of training
    asked = census(num_flops=10**9)  # for 16 samples
    assert flops_share(one, asked, calibration()) == pytest.approx(100 * 1e9 / 1e11)
    halved = flops_share(replace(one, world_size=2), asked, calibration())
    assert halved == pytest.approx(0.5)
    for without in ((one, None, calibration()), (one, asked, None), (one, census(), calibration())):
        assert flops_share(*without) is None
    assert flops_share(replace(one, num_samples=0), asked, calibration()) is None
    assert flops_share(startup(1.0), asked, calibration()) is None


# ---- words ----


def test_a_line_says_speed_and_shares_and_what_holds_training_up() -> None:
    profile = summary_of([made_window(STEP, num_steps=1200, num_samples=2600 * 12, num_tokens=13_000_000)])
    assert profile is not None
    assert line_of(profile, mfu=0.412, text="data-bound: x") == (
        "step 1200, 10 ms a step (p50; 10 ms p90), 2,600 samples/s, 1.08M tokens/s, MFU 41%: "
        "data 40%, forward 20%, backward 30%, optimizer 10%; data-bound: x"
    )
    plain = replace(profile, step_seconds=None, samples_per_second=None, tokens_per_second=None, shares={"step": 1.0})
    assert line_of(plain, mfu=None, text="x") == "step 1200, 10 ms a step: step 100%; x"


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"data": 0.5, "other": 0.49, "change": 0.009}, "data 50%, other 50%"),
        ({"data": 1.0}, "data 100%"),
        ({"data": 0.996, "change": 0.004}, "data 100%"),
        ({}, "other 0%"),
    ],
)
def test_shares_that_are_small_are_told_together(shares: dict[str, float], words: str) -> None:
    assert shares_in_words(shares) == words


def test_numbers_have_three_digits() -> None:
    assert [duration_in_words(each) for each in (2.5, 0.0123, 4.2e-5)] == ["2.5 s", "12.3 ms", "42 µs"]
    assert [number_in_words(each) for each in (3.14159, 99.94, 2600.4, 1.3e6, 2.5e9)] == [
        "3.14",
        "99.9",
        "2,600",
        "1.3M",
        "2.5G",
    ]


# ---- the log ----


def training(**values: Any) -> TrainingFacts:
    usual: dict[str, Any] = {"num_replicas": 1, "num_micro_steps": 1, "num_workers": 2, "waits_in_passes": False}
    usual |= {"num_processors": 16}
    return TrainingFacts(**usual | values)


def world_on(*hosts: str, rank: int = 0) -> World:
    names = [PeerName(rank=number, host=host, pid=number, seat=number) for number, host in enumerate(hosts)]
    return World(rank=rank, names=tuple(names))


def shown(folder: Path, *, hosts: Sequence[str] = ("node",), seconds: float = 3.0, rank: int = 0) -> ProfileOutput:
    return ProfileOutput(
        folder,
        world=world_on(*hosts, rank=rank),
        every_seconds=seconds,
        facts=lambda: training(num_replicas=len(hosts)),
        sinks=Sinks(),
    )


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("profile: ")]


def test_a_line_is_logged_after_so_much_training_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path)
    output.see(startup(0.5))
    for at in range(1, 8):
        output.see(window(float(at), step=100 * at))
    assert [line.split(",")[0] for line in told(caplog)] == ["profile: step 300", "profile: step 600"]
    output.close()
    output.close()
    assert [line.split(",")[0] for line in told(caplog)][2:] == ["profile: step 700"]
    assert told(caplog)[0].endswith(
        "data 40%, forward 20%, backward 30%, optimizer 10%; data-bound: 40% of training's time goes to waiting for "
        "samples; 2 workers deliver 3,200 samples/s, training could take 5,333: add workers, or make samples cheaper "
        "to load"
    )


@pytest.mark.parametrize(("seconds", "rank"), [(0.0, 0), (3.0, 1)])
def test_no_line_is_logged_with_0_seconds_and_on_other_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float, rank: int
) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path, seconds=seconds, hosts=("node", "node"), rank=rank)
    for at in range(1, 8):
        output.see(window(float(at), world_size=2, rank=rank))
    output.close()
    assert told(caplog) == []


def test_the_verdict_is_on_all_ranks_of_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for at in range(1, 4):
        write(tmp_path, [window(at + 0.1, SLOW, rank=1, world_size=2)])
    output = shown(tmp_path, hosts=("node", "node"))
    for at in range(1, 4):
        output.see(window(float(at), WAITING, world_size=2))
    assert (
        "straggler: rank 1 on node takes 22 ms for its own part of a step, 12 ms longer than usual" in told(caplog)[0]
    )


def test_a_rank_that_has_not_told_of_a_new_config_hides_no_verdict_on_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, [window(1.1, rank=1, world_size=2)])
    output = shown(tmp_path, hosts=("node", "node"), seconds=60.0)
    output.see(window(1.0, world_size=2))
    output.see(window(2.0, world_size=2, config_version=7))
    output.close()
    assert "data-bound: 40% of training's time goes to waiting for samples" in told(caplog)[0]


def test_what_is_of_another_rank_in_a_ranks_file_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, [window(1.1, rank=1, world_size=2)])
    line = window(1.2, rank=7, world_size=2).to_json()
    with open(tmp_path / "profile-1.jsonl", "a") as file:
        file.write(line + "\n")
    output = shown(tmp_path, hosts=("node", "node"))
    for at in range(1, 4):
        output.see(window(float(at), world_size=2))
    assert len(told(caplog)) == 1


def test_ranks_of_other_nodes_are_said_not_to_be_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path, hosts=("node", "far", "far"))
    for at in range(1, 4):
        output.see(window(float(at), world_size=3))
    assert "(2 ranks more not looked at)" in told(caplog)[0]


def test_ranks_on_this_machine_whose_files_are_elsewhere_are_said_so_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path, hosts=("node", "node"))
    for at in range(1, 4):
        output.see(window(float(at), world_size=2))
    assert "(1 rank more not looked at)" in told(caplog)[0]


def test_under_another_config_a_line_tells_of_that_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path)
    for at in range(1, 4):
        output.see(window(float(at), SLOW if at < 3 else STEP, config_version=1 + at // 3))
    assert "10 ms a step" in told(caplog)[0]


def test_metrics_say_where_the_time_went_of_late(tmp_path: Path) -> None:
    output = shown(tmp_path, rank=1, hosts=("node", "node"))
    measures = output.with_profile(Measures(memory_bytes=5))
    assert (measures.shares, measures.num_workers, measures.memory_bytes) == ({}, 2, 5)
    output.see(window(1.0, rank=1, num_tokens=100))
    measures = output.with_profile(Measures())
    assert measures.shares == {"data": 0.4, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    assert measures.step_seconds == pytest.approx(0.01) and measures.tokens_per_second == pytest.approx(200)
    measures = output.with_profile(Measures(samples_per_second=320.0))  # a sixteenth of a token a sample
    assert measures.tokens_per_second == pytest.approx(20), "samples and tokens are counted over unlike times"


def test_a_minute_of_windows_costs_little(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for at in range(1, 61):
        write(tmp_path, [window(at + 0.1, rank=rank, world_size=8) for rank in range(1, 8)])
    output = shown(tmp_path, hosts=("node",) * 8, seconds=1e9)
    took = time.process_time()
    for at in range(1, 61):
        output.see(window(float(at), world_size=8))
    output.close()
    assert time.process_time() - took < 0.1  # 5 ms, about
    assert len(told(caplog)) == 1


# ---- sinks ----


class Kept:
    """A sink that keeps what it is told, until it fails."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.profiles: list[StepProfile] = []
        self.num_closed = 0
        self._fails_after = fails_after

    def write(self, profile: StepProfile) -> None:
        if len(self.profiles) == self._fails_after:
            raise OSError("no space left")
        self.profiles.append(profile)

    def close(self) -> None:
        self.num_closed += 1
        if self._fails_after == 0:
            raise OSError("no space left")


def test_a_sink_that_raises_is_told_of_once_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Kept(), Kept(fails_after=2)
    sinks = Sinks()
    sinks.add(bad)
    sinks.add(good)
    output = ProfileOutput(tmp_path, world=world_on("n"), every_seconds=0, facts=training, sinks=sinks)
    for at in range(1, 6):
        output.see(window(float(at)))
    output.close()
    assert (len(good.profiles), good.num_closed, len(bad.profiles), bad.num_closed) == (5, 1, 2, 0)
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.getMessage() == "the profile could not be written to Kept, which is dropped; training goes on"
    with pytest.raises(ElasticError, match="training has ended"):
        sinks.add(good)


def test_a_sink_that_cannot_be_closed_stands_in_nobodys_way(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Kept(), Kept(fails_after=0)
    sinks = Sinks()
    sinks.add(good)
    sinks.add(bad)
    sinks.close()
    assert good.num_closed == bad.num_closed == 1
    assert "Kept could not be closed" in caplog.text


def test_sinks_are_written_on_rank_0_alone(tmp_path: Path) -> None:
    kept, sinks = Kept(), Sinks()
    sinks.add(kept)
    output = ProfileOutput(tmp_path, world=world_on("n", "n", rank=1), every_seconds=0, facts=training, sinks=sinks)
    output.see(window(1.0))
    output.close()
    assert (kept.profiles, kept.num_closed) == ([], 1)


def test_numbers_that_were_logged_come_to_sinks_with_steps_and_without(tmp_path: Path) -> None:
    kept, sinks = Kept(), Sinks()
    sinks.add(kept)
    output = ProfileOutput(tmp_path, world=world_on("n"), every_seconds=60, facts=training, sinks=sinks)
    output.see(replace(window(1.0), logged={"loss": 2.5}))
    output.see(startup(2.0))
    output.see(replace(startup(3.0), logged={"val_loss": 7.0}))
    output.close()
    assert [(each.num_steps, dict(each.logged)) for each in kept.profiles] == [
        (100, {"loss": 2.5}),
        (0, {"val_loss": 7.0}),
    ]
    assert kept.profiles[1].shares == {} and kept.profiles[1].step_seconds is None


def test_a_line_tells_logged_numbers_as_means_over_the_steps_of_its_windows() -> None:
    windows = [
        replace(window(1.0, num_steps=30), logged={"loss": 4.0}),
        replace(window(2.0, num_steps=10), logged={"loss": 2.0}),
    ]
    profile = summary_of(windows)
    assert profile is not None and profile.logged == {"loss": 3.5}
    assert line_of(profile, mfu=None, text="").split(",")[1] == " loss 3.5"


def test_a_number_weighs_in_a_line_as_often_as_it_was_logged_and_not_as_its_windows_have_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = shown(tmp_path, seconds=60.0)
    for at, accuracy, num_steps in ((1.0, 0.5, 90), (2.0, 1.0, 10), (3.0, 1.0, 20), (4.0, 1.0, 0)):
        of_window = window(at, num_steps=num_steps) if num_steps else startup(at)
        output.see(replace(of_window, logged={"val_acc": accuracy}, logged_weights={"val_acc": 16.0}))
    output.close()
    output.see(replace(startup(5.0), step=500, logged={"val_acc": 0.25}, logged_weights={"val_acc": 16.0}))
    output.close()
    assert [line.split(":")[1].split(", ")[1] for line in told(caplog)] == ["val_acc 0.875", "val_acc 0.25"]
    assert told(caplog)[1] == "profile: step 500, val_acc 0.25"


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 64)), max_size=3), min_size=1, max_size=6))
def test_windows_that_are_merged_tell_the_mean_that_one_window_would_have_told(
    rows: list[list[tuple[float, int]]],
) -> None:
    windows = []
    for at, row in enumerate(rows):
        weight = float(sum(each for _, each in row))
        mean = {"n": sum(value * each for value, each in row) / weight} if row else {}
        windows.append(replace(window(float(at)), logged=mean, logged_weights=dict.fromkeys(mean, weight)))
    everything = [each for row in rows for each in row]
    total = sum(weight for _, weight in everything)
    expected = {"n": sum(value * weight for value, weight in everything) / total} if everything else {}
    for found in (merged(windows), merged([merged(windows[:1]), *windows[1:]])):
        assert found.logged == pytest.approx(expected)
        assert found.logged_weights == pytest.approx({"n": float(total)} if everything else {})


class FakeWriter:
    """In the place of torch's SummaryWriter."""

    made: ClassVar[list[FakeWriter]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.is_closed = folder, False
        self.scalars: list[tuple[str, float, int, float]] = []
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, *, global_step: int, walltime: float) -> None:
        self.scalars.append((name, value, global_step, walltime))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def fake_tensorboard(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[FakeWriter]]:
    FakeWriter.made = []
    package, module = types.ModuleType("tensorboard"), types.ModuleType("torch.utils.tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return lambda: FakeWriter.made


def test_tensorboard_gets_a_point_of_each_curve(
    tmp_path: Path, fake_tensorboard: Callable[[], list[FakeWriter]]
) -> None:
    sink = TensorBoardSink(tmp_path)
    assert fake_tensorboard() == []  # until there is something to write
    profile = summary_of([replace(window(7.0, step=42, memory_bytes=5, config_version=3), logged={"train/loss": 2.5})])
    assert profile is not None
    sink.write(profile)
    sink.write(replace(profile, step=43))
    (writer,) = fake_tensorboard()
    first = {name: value for name, value, step, at in writer.scalars if step == 42 and at == 7.0}
    assert writer.folder == str(tmp_path) and len(writer.scalars) == 2 * len(first)
    assert first["memory/process_bytes"] == 5 and first["config/version"] == 3
    assert first["time/data"] == pytest.approx(0.4) and first["speed/step_seconds"] == pytest.approx(0.01)
    assert first["logged/train/loss"] == 2.5
    assert "memory/accelerator_bytes" not in first and "speed/tokens_per_second" not in first
    sink.close()
    sink.close()
    assert writer.is_closed


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed here")
def test_without_tensorboard_it_is_said_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match="pip install tensorboard"):
        TensorBoardSink(tmp_path)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("default")  # of what it imports
def test_a_real_file_of_tensorboard_holds_the_curves(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    profile = summary_of([window(7.0, step=42)])
    assert profile is not None
    sink.write(profile)
    sink.close()
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    (point,) = found.Scalars("time/data")
    assert (point.step, point.value) == (42, pytest.approx(0.4))
