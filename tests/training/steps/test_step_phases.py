"""The phases of steps: the table of what leads from one to another, and that a real loop does all of it and no more."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from elastic_ext import ElasticError, StepError, TornStepError
from elastic_ext.training.steps.state import TRANSITIONS, StepEvent, StepPhase, StepState
from tests.support.faults import PlantedFault
from tests.support.training import ResumableSlices, make_data, make_model, trainer_of

WITHIN = {StepPhase.GATHERING, StepPhase.ENDING, StepPhase.UNDONE}
ENDED = {StepPhase.TORN, StepPhase.LOST}


# ---- the table ----


@pytest.mark.parametrize(("event", "phase"), list(product(StepEvent, StepPhase)))
def test_an_event_leads_to_one_phase_or_is_refused_and_changes_nothing(event: StepEvent, phase: StepPhase) -> None:
    state = StepState(phase=phase)
    if phase in TRANSITIONS[event]:
        state.move(event)
        assert state.phase is TRANSITIONS[event][phase]
    else:
        with pytest.raises(AssertionError, match=f"{event.name} of a step that is {phase.name}"):
            state.move(event)
        assert state.phase is phase


def test_every_phase_but_the_last_is_left_and_all_but_the_first_are_come_to() -> None:
    left = {phase for before in TRANSITIONS.values() for phase in before}
    come_to = {phase for before in TRANSITIONS.values() for phase in before.values()}
    assert left == set(StepPhase) - {StepPhase.LOST}
    assert come_to == set(StepPhase) - {StepPhase.UNBEGUN}


def test_no_micro_step_begins_within_one_or_before_an_owed_boundary_or_where_training_has_failed() -> None:
    for event in (StepEvent.ENTER, StepEvent.ENTER_LAST):
        assert not set(TRANSITIONS[event]) & (WITHIN | ENDED | {StepPhase.OWING})


def test_only_a_loaded_checkpoint_leads_out_of_a_torn_step_and_nothing_out_of_a_lost_training() -> None:
    for event, before in TRANSITIONS.items():
        for phase in ENDED & set(before):
            assert phase is StepPhase.TORN
            assert before[phase] is StepPhase.TORN or event in (StepEvent.LOAD, StepEvent.LOAD_TO_REPLAY)


def test_what_is_within_a_micro_step_and_what_ends_one_follows_from_the_phase() -> None:
    for phase in StepPhase:
        assert phase.is_inside is (phase in WITHIN)
        assert phase.is_last is (phase is StepPhase.ENDING)


# ---- loops ----


class Failing(SGD):
    """SGD that may fail in the middle of its step."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise PlantedFault
        return super().step(closure)


class Loop:
    """One rank's loop, in which a micro-step may fail in several ways."""

    def __init__(self, folder: Path, num_micro_steps: int) -> None:
        folder.mkdir(exist_ok=True)
        self.model = make_model()
        self.source = ResumableSlices(make_data(64), 4, is_endless=True)
        self.trainer = trainer_of(
            folder,
            self.model,
            self.source,
            global_batch_size=4 * num_micro_steps,
            shared_storage_path=folder / "kept",
        )
        self.inner = Failing(self.model.parameters(), lr=0.1)
        self.bare = StepLR(self.inner, 10)
        self.optimizer, self.schedule = self.trainer.prepare(self.inner, self.bare)
        self.steps = self.trainer._prepared.steps
        self.batches = iter(self.source)

    def phase(self) -> StepPhase:
        phase: StepPhase = self.trainer._training.state.phase
        return phase

    def next_batch(self) -> Any:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.source)
            batch = next(self.batches)
        return batch

    def micro_step(self, *, fails: str = "") -> None:
        inputs, classes = self.next_batch()
        with self.trainer.step():
            loss = torch.nn.functional.cross_entropy(self.model(inputs), classes)
            loss.backward()  # type: ignore[no-untyped-call]
            if fails == "by hand":
                self.trainer.rollback()
                return
            if fails == "before":
                raise PlantedFault
            if fails == "bare schedule":
                self.bare.step()
                return
            self.inner.fails = fails == "within"
            self.optimizer.step()
            self.optimizer.zero_grad()
            if fails == "after":
                raise PlantedFault

    def micro_steps(self, number: int) -> None:
        for _ in range(number):
            self.micro_step()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> set[tuple[StepEvent, StepPhase]]:
    """The moves that were made, each an event and the phase before."""
    made: set[tuple[StepEvent, StepPhase]] = set()
    move = StepState.move

    def noting(state: StepState, event: StepEvent) -> None:
        before = state.phase
        move(state, event)
        made.add((event, before))

    monkeypatch.setattr(StepState, "move", noting)
    return made


def test_steps_come_to_all_phases_in_turn(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 2)
    assert loop.phase() is StepPhase.UNBEGUN and loop.steps.has_not_begun
    assert not loop.trainer.sync_gradients
    loop.trainer.save_checkpoint()
    with loop.trainer.step():
        assert loop.phase() is StepPhase.GATHERING and loop.steps.is_inside
        assert not loop.trainer.sync_gradients
        loop.next_batch()
    assert loop.phase() is StepPhase.PARTIAL and loop.steps.is_partial
    loop.micro_step()
    assert loop.phase() is StepPhase.IDLE and not loop.steps.is_partial
    assert loop.trainer.sync_gradients
    loop.micro_step()
    loop.trainer.rollback()
    assert loop.phase() is StepPhase.TAKEN_BACK
    with loop.trainer.step():
        loop.next_batch()
        loop.trainer.rollback()
        assert loop.phase() is StepPhase.UNDONE and loop.steps.is_inside
        loop.trainer.rollback()  # nothing is left to be taken back
        assert loop.phase() is StepPhase.UNDONE
    assert loop.phase() is StepPhase.TAKEN_BACK
    loop.micro_step()
    with suppress(PlantedFault):
        loop.micro_step(fails="after")
    assert loop.phase() is StepPhase.OWING and loop.trainer.global_step == 2
    loop.micro_steps(2)
    assert loop.phase() is StepPhase.IDLE and loop.trainer.global_step == 3
    loop.micro_step()
    with pytest.raises(TornStepError):
        loop.micro_step(fails="within")
    assert loop.phase() is StepPhase.TORN and loop.steps.can_mend
    for _ in range(2):
        with pytest.raises(TornStepError), loop.trainer.step():
            raise AssertionError("a micro-step began")
    assert loop.phase() is StepPhase.TORN
    loop.trainer.rewind(0)
    assert loop.phase() is StepPhase.TAKEN_BACK and loop.trainer.global_step == 0
    loop.steps.give_up("no more")
    assert loop.phase() is StepPhase.LOST and not loop.steps.can_mend
    with pytest.raises(TornStepError, match="no more"):
        loop.trainer.rewind(0)
    assert loop.phase() is StepPhase.LOST
    loop.trainer.close()


@pytest.mark.parametrize("number", [2, 3])
def test_a_step_that_is_left_open_as_training_ends_within_a_micro_step_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    loop = Loop(tmp_path, 3)
    loop.micro_steps(number - 1)
    before = [part.detach().clone() for part in loop.model.parameters()]
    with suppress(ElasticError), loop.trainer.step():
        loop.next_batch()
        loop.trainer.close()
        loop.optimizer.step()
    assert f"{number - 1} of 3 micro-steps of a step were dropped" in caplog.text
    assert loop.trainer.global_step == 0
    assert all(torch.equal(*each) for each in zip(before, loop.model.parameters(), strict=True))


def test_a_loop_that_goes_on_after_it_was_told_that_training_is_lost_is_told_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 2)
    loop.trainer._gradients.sharing.why_not_forget = lambda: "what it has begun cannot be taken back"
    inputs, classes = loop.next_batch()

    def go_on() -> None:
        with loop.trainer.step():
            torch.nn.functional.cross_entropy(loop.model(inputs), classes)
            with suppress(TornStepError):
                loop.trainer.rollback()

    for _ in range(2):
        with pytest.raises(TornStepError, match="cannot be taken back"):
            go_on()
    loop.trainer.close()


@pytest.mark.parametrize(("position", "doing"), [("first", "_check"), ("last", "_bare_steps"), ("last", "roll_back")])
def test_a_loop_goes_on_after_an_interrupt_while_a_micro_step_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: str, doing: str
) -> None:
    loop = Loop(tmp_path, 2)
    if position == "last":
        loop.micro_step()
    of = loop.steps._undoing if doing == "roll_back" else loop.steps
    act = getattr(of, doing)

    def act_and_be_interrupted(*arguments: Any, **options: Any) -> None:
        act(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(of, doing, act_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.micro_step(fails="before" if doing == "roll_back" else "")
    monkeypatch.undo()
    has_committed = doing == "_bare_steps"  # after optimizer.step()
    assert loop.phase() is (StepPhase.OWING if has_committed else StepPhase.TAKEN_BACK)
    loop.micro_steps(2)
    assert loop.phase() is StepPhase.IDLE and loop.trainer.global_step == 1 + has_committed
    loop.trainer.close()


def test_loops_make_every_move_of_the_table(tmp_path: Path, moves: set[tuple[StepEvent, StepPhase]]) -> None:
    for number in (1, 3):  # micro-steps in a step
        loop = Loop(tmp_path / f"{number}", number)
        loop.trainer.save_checkpoint()
        for position, fails in product(range(number), ("before", "by hand")):
            loop.micro_steps(position)
            with suppress(PlantedFault):
                loop.micro_step(fails=fails)
            loop.micro_steps(number)
        loop.micro_steps(number - 1)
        with pytest.raises(StepError, match="the bare StepLR"):
            loop.micro_step(fails="bare schedule")
        loop.micro_steps(number - 1)
        with suppress(PlantedFault):
            loop.micro_step(fails="after")
        loop.trainer.rewind(0)
        loop.micro_steps(2 * number - 1)
        loop.trainer.rollback()
        loop.trainer.rewind(0, skip_samples=True)
        loop.micro_steps(2 * number - 1)
        with pytest.raises(TornStepError):
            loop.micro_step(fails="within")
        loop.trainer.rewind(0)
        loop.micro_steps(number)
        loop.trainer.save_checkpoint()
        loop.trainer.close()
        second = Loop(tmp_path / f"{number}", number)
        second.trainer.rewind(0)  # before its first step
        second.micro_steps(number)
        second.trainer.close()

    for position in range(2):  # as where torch cannot take back a pass through sharded modules
        loop = Loop(tmp_path / f"stuck {position}", 2)
        loop.trainer._gradients.sharing.why_not_forget = lambda: "what it has begun cannot be taken back"
        loop.micro_steps(position)
        with pytest.raises(TornStepError, match="cannot be taken back"):
            loop.micro_step(fails="before")
        loop.trainer.close()
    for taken, how in ((0, ""), (1, ""), (1, "taken back"), (2, ""), (1, "after")):
        loop = Loop(tmp_path / f"given up {taken} {how}", 2)  # as a change of plan does that has failed halfway
        loop.micro_steps(taken)
        if how == "taken back":
            loop.trainer.rollback()
        if how == "after":
            with suppress(PlantedFault):
                loop.micro_step(fails=how)
        loop.steps.give_up("the plan was changed by half")
        with pytest.raises(TornStepError, match="by half"):
            loop.micro_step()
        loop.trainer.close()

    assert moves == {(event, phase) for event, before in TRANSITIONS.items() for phase in before}
