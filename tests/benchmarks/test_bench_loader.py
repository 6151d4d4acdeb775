"""What the benchmarks of data loading stand on: rates with a verdict, and loaders that give the same samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import torch

from benchmarks.harness import Reading, Side, UnlikeWorkError, check_same_work, table
from benchmarks.loader_first import first_batch
from benchmarks.loader_resume import Measured, measuring_process, resume_of
from benchmarks.loader_speed import Kind, Large, LoaderName, Sleeping, Tiny, sides_of, skewed_costs, without_advice
from benchmarks.loader_switch import Change, Switch, waits_live, waits_made_anew
from benchmarks.rates import compare_rates, decide_rate
from tests.support.pools import worker_pids

HAS_TORCHDATA = find_spec("torchdata") is not None  # which `make bench` installs, and the tests do without
NAMES: tuple[LoaderName, ...] = ("torch", "ours", "stateful") if HAS_TORCHDATA else ("torch", "ours")
WORKERS = [0, pytest.param(1, marks=pytest.mark.slow)]
KINDS = [
    Kind(name="tiny", dataset=Tiny, batch_size=4, num_batches=5, is_in_epochs=True),
    Kind(name="none to sleep", dataset=lambda n: Sleeping([0.0] * n), batch_size=2, num_batches=3),
    Kind(name="large", dataset=lambda n: Large(n, 64), batch_size=2, num_batches=3),
]
SWITCH = Switch(num_workers=(1, 2), batch_size=(2, 3), num_batches=(4, 20), sample_seconds=0.001, consumer_seconds=0.01)


@pytest.fixture(autouse=True)
def _as_benchmarks_run() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        without_advice()
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("ratio", "interval", "aa_interval", "at_least", "verdict", "reason"),
    [
        (1.01, (1.00, 1.02), (0.99, 1.01), 0.95, "pass", "1.010 is at least 0.950"),
        (1.50, (1.40, 1.60), (0.80, 1.20), 0.90, "pass", "1.500 is at least 0.900"),
        (0.90, (0.89, 0.91), (0.99, 1.01), 0.95, "fail", "0.900 is less than 0.950"),
        (0.96, (0.94, 0.98), (1.00, 1.00), 0.95, "inconclusive", "0.940 to 0.980, its interval and the A/A interval's"),
        (1.00, (1.00, 1.00), (1.00, 1.06), 0.95, "inconclusive", "0.943 to 1.060"),
        (1.00, (1.00, 1.00), (0.94, 0.98), 0.95, "inconclusive", "0.940 to 1.064"),
        (1.00, (1.00, 1.00), (0.50, 1.50), None, "none claimed", "nothing is claimed of it"),
    ],
)
def test_a_rate_is_decided_where_its_interval_and_what_the_baseline_differs_from_itself_allow_it(
    ratio: float,
    interval: tuple[float, float],
    aa_interval: tuple[float, float],
    at_least: float | None,
    verdict: str,
    reason: str,
) -> None:
    found = decide_rate(ratio, interval, aa_interval, at_least)
    assert found[0] == verdict
    assert found[1].startswith(reason)


def test_table_of_rates_shows_what_each_side_does_of_the_baselines_in_the_same_round() -> None:
    drift = iter([value for value in (1000.0, 1500.0, 3000.0) for _ in range(3)])  # one for each round's three runs

    def side(name: str, times: float) -> Side:
        return Side(name=name, run=lambda: Reading(value=next(drift) * times, work=1))

    sides = [side("base", 1.0), side("ours", 1.25)]
    shown = compare_rates("Speed", "batches", sides, {"ours": 1.2}, num_rounds=3, settle=lambda: None)
    lines = table(shown).splitlines()
    assert lines[0] == "**Speed** (3 rounds)"
    assert lines[4] == "| base | 1,500 |  | 1.000 to 1.000 |  |  |"
    assert lines[5] == (
        "| ours | 1,875 | 1.250 (1.250 to 1.250) | 1.000 to 1.000 | ≥ 1.2 | pass: 1.250 is at least 1.200 |"
    )
    assert shown.verdicts == ("none claimed", "pass")


def test_one_of_eight_samples_costs_ten_times_as_much() -> None:
    costs = skewed_costs(80)
    assert sorted(set(costs)) == [0.002, 0.020]
    assert costs.count(0.020) == 10


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_all_loaders_give_the_same_samples(kind: Kind, num_workers: int) -> None:
    with ExitStack() as stack:
        sides = sides_of(kind, num_workers, NAMES, stack)
        for _ in range(3):  # a loop goes on where it was, and gives as much
            done = {side.name: side.run() for side in sides}
            assert all(isinstance(each, Reading) and each.value > 0 for each in done.values())
            check_same_work({name: each.work for name, each in done.items() if isinstance(each, Reading)})


def test_an_epoch_that_lacks_samples_is_no_comparison() -> None:
    kind = Kind(name="less", dataset=lambda n: Tiny(n - 1), batch_size=4, num_batches=5, is_in_epochs=True)
    with ExitStack() as stack, pytest.raises(UnlikeWorkError, match="an epoch of 20 samples does not have each"):
        sides_of(kind, 0, ("torch",), stack)


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_a_loop_is_timed_up_to_its_first_batch_and_leaves_no_worker(name: LoaderName) -> None:
    others = worker_pids()
    read = first_batch(name, 1)
    assert read.value > 0 and read.work == tuple(range(8))
    assert worker_pids() <= others


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("workers",), ("batch size",), ("workers", "batch size")])
def test_a_loop_that_changes_waits_for_each_batch_and_has_each_sample_once(changes: tuple[Change, ...]) -> None:
    waits = waits_live(SWITCH, changes)
    assert len(waits) == (20 if "batch size" in changes else 30)
    assert min(waits) >= 0


@pytest.mark.slow
def test_a_loop_whose_loader_is_made_anew_has_each_sample_once() -> None:
    assert len(waits_made_anew(SWITCH)) == 20


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_new_loader_goes_on_where_a_state_was_saved(name: LoaderName, num_workers: int) -> None:
    resume = resume_of(name, 10_000, num_workers)
    first, second = resume(), resume()
    assert first.value > 0
    assert first.work == second.work == 1000


@pytest.mark.parametrize(("name", "num_samples"), [("torch", 20_000), ("ours", 20_000), ("ours", 10**9)])
def test_a_process_takes_as_many_samples_far_into_an_epoch_whatever_its_size(
    name: LoaderName, num_samples: int
) -> None:
    with measuring_process(Measured(name=name, num_samples=num_samples)) as ask:
        seen = ask(None)
    assert seen.num_taken == 4000
    assert seen.seconds > 0
    assert seen.peak_bytes < 64 * 2**20
