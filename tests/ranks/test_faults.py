"""What scripted failures do in the process that meets them; inside ranks they are met in test_ranks_harness.py."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import Fault, Faults, PlantedFault
from tests.support.ranks import RankPool

PHASES = st.sampled_from([None, "forward", "backward", "commit"])


def strike(rank: int, faults: Faults, step: int) -> str | None:
    return faults.at(rank=rank, step=step)


def test_a_fault_strikes_only_at_its_rank_step_and_phase() -> None:
    faults = Faults(Fault(rank=1, step=3, phase="backward", action="skip"))
    assert faults.at(rank=0, step=3, phase="backward") is None
    assert faults.at(rank=1, step=2, phase="backward") is None
    assert faults.at(rank=1, step=3, phase="forward") is None
    assert faults.at(rank=1, step=3) is None
    assert faults.at(rank=1, step=3, phase="backward") == "skip"


def test_a_fault_without_a_phase_strikes_at_the_first_place_of_its_step() -> None:
    faults = Faults(Fault(rank=0, step=1, action="skip"))
    assert faults.at(rank=0, step=1, phase="forward") == "skip"
    assert faults.at(rank=0, step=1, phase="backward") is None


def test_the_planted_exception_says_where_it_was_planted() -> None:
    faults = Faults(Fault(rank=2, step=5, phase="commit", action="raise"))
    with pytest.raises(PlantedFault, match="rank 2, step 5, phase commit"):
        faults.at(rank=2, step=5, phase="commit")
    assert faults.at(rank=2, step=5, phase="commit") is None


def test_pickling_takes_along_only_the_faults_still_to_happen() -> None:
    faults = Faults(Fault(rank=0, step=0, action="skip"), Fault(rank=0, step=1, action="skip"))
    faults.at(rank=0, step=0)
    copy: Faults = pickle.loads(pickle.dumps(faults))
    assert copy.at(rank=0, step=0) is None
    assert copy.at(rank=0, step=1) == "skip"
    assert faults.at(rank=0, step=1) == "skip"


@given(
    planted=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), PHASES), max_size=6),
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), PHASES), max_size=12),
)
def test_every_fault_happens_at_most_once(
    planted: list[tuple[int, int, str | None]], asked: list[tuple[int, int, str | None]]
) -> None:
    faults = Faults(*(Fault(rank=rank, step=step, phase=phase, action="skip") for rank, step, phase in planted))
    struck = [faults.at(rank=rank, step=step, phase=phase) for rank, step, phase in asked].count("skip")
    places = set(asked)
    reachable = sum(
        any((rank, step) == place[:2] and phase in (None, place[2]) for place in places)
        for rank, step, phase in planted
    )
    assert struck <= reachable


def test_a_fault_in_a_rank_kills_stops_or_hangs_that_rank_only(ranks: RankPool) -> None:
    faults = Faults(
        Fault(rank=0, step=7, action="kill"),
        Fault(rank=1, step=7, action="stop"),
        Fault(rank=2, step=7, action="hang"),
        Fault(rank=3, step=8, action="kill"),
    )
    killed, stopped, hung, untouched = ranks.run_outcomes(
        4, strike, faults, 7, deadline_seconds=5.0, process_group=False
    )
    assert killed.exit_signal == 9
    assert stopped.hung and "had been stopped" in stopped.stacks
    assert hung.hung and "in _strike" in hung.stacks
    assert untouched.ok
