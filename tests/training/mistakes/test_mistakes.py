"""Every mistake of the table gets its sentence: on all ranks alike, in time, and with nothing lost."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from elastic_ext import ElasticError
from tests.support.chains import num_causes
from tests.support.ranks import RankPool
from tests.training.mistakes.batches import BATCHES
from tests.training.mistakes.causes import Cause
from tests.training.mistakes.epochs import EPOCHS
from tests.training.mistakes.gradients import GRADIENTS
from tests.training.mistakes.optimizers import OPTIMIZERS
from tests.training.mistakes.ranks import RANKS
from tests.training.mistakes.schedules import SCHEDULES
from tests.training.mistakes.training import NUM_SAMPLES, Training

CAUSES = [*BATCHES, *GRADIENTS, *OPTIMIZERS, *SCHEDULES, *EPOCHS, *RANKS]
BY_NAME = {cause.name: cause for cause in CAUSES}
DEADLINE_SECONDS = 60.0
NUM_FIRST_STEPS = 5


@dataclass(slots=True)
class Came:
    """What came of a mistake on one rank."""

    kind: str = ""
    """Of the error, if there was one."""
    text: str = ""
    num_causes: int = 0
    """Of the error, as Python shows them above it."""
    warnings: list[str] = field(default_factory=list)
    warned_after: list[int] = field(default_factory=list)
    """Steps that had committed when each of them came."""
    num_committed: int = 0
    """Steps, when the sentence came."""
    num_in_all: int = 0
    """The same when a loop without the mistake had gone on to the end."""
    num_expected: int = 0
    trained: list[int] = field(default_factory=list)


class _Warnings(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


@contextlib.contextmanager
def warnings_to(note: Callable[[str], None]) -> Iterator[None]:
    logger, handler = logging.getLogger("elastic_ext"), _Warnings(note)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def make_the_mistake(rank: int, name: str, num_ranks: int, folder: Path) -> Came:
    """Run one loop of the table, and what goes on after it."""
    cause, came = BY_NAME[name], Came()
    training = Training(rank, num_ranks, folder)

    def note(text: str) -> None:
        came.warnings.append(text)
        came.warned_after.append(0 if training.trainer is None else training.trainer.global_step)

    with warnings_to(note):
        try:
            cause.loop(training)
        except Exception as error:
            came.kind, came.text, came.num_causes = type(error).__name__, str(error), num_causes(error)
        came.num_committed = 0 if training.trainer is None else training.trainer.global_step
        if cause.is_mended:
            if came.kind:
                training.forget_taken(came.num_committed)
            training.go_on()
            came.num_in_all, came.trained = training.trainer.global_step, training.trained
            came.num_expected = training.num_steps
        if training.is_prepared:
            with contextlib.nullcontext() if cause.is_mended else contextlib.suppress(ElasticError):
                training.trainer.close()
    return came


@pytest.mark.parametrize(
    ("cause", "num_ranks"),
    [
        pytest.param(cause, num, id=f"{cause.name}-{num}".replace(" ", "_"))
        for cause in CAUSES
        for num in cause.num_ranks
    ],
)
def test_no_mistake_passes_in_silence(ranks: RankPool, tmp_path: Path, cause: Cause, num_ranks: int) -> None:
    everyone = ranks.run(
        num_ranks,
        make_the_mistake,
        cause.name,
        num_ranks,
        tmp_path,
        process_group=num_ranks > 1,
        deadline_seconds=DEADLINE_SECONDS,
    )
    said = [[text for text in came.warnings if cause.is_said_by(text)] for came in everyone]
    if cause.comes_as == "warning":
        assert [(came.kind, came.text) for came in everyone] == [("", "")] * num_ranks
        assert list(map(len, said)) == [1] + [0] * (num_ranks - 1), everyone
        if cause.found in ("first steps", "sampled"):
            (text,) = said[0]
            assert everyone[0].warned_after[everyone[0].warnings.index(text)] <= NUM_FIRST_STEPS
    else:
        assert {came.kind for came in everyone} == {cause.comes_as}, everyone
        assert len({came.text for came in everyone}) == 1, everyone
        assert cause.is_said_by(everyone[0].text), everyone[0].text
        assert max(came.num_causes for came in everyone) <= 1, everyone
        if cause.num_committed is not None:
            assert {came.num_committed for came in everyone} == {cause.num_committed}
    if cause.is_mended:
        assert [came.num_in_all for came in everyone] == [came.num_expected for came in everyone]
        assert [len(came.warnings) for came in everyone] == list(map(len, said)), everyone
        assert sorted(sample for came in everyone for sample in came.trained) == list(range(NUM_SAMPLES))


def test_rows_have_names_and_sentences_of_their_own() -> None:
    assert [name for name, number in Counter(cause.name for cause in CAUSES).items() if number > 1] == []
    sentences = [cause.says.pattern if isinstance(cause.says, re.Pattern) else cause.says for cause in CAUSES]
    assert [text for text, number in Counter(sentences).items() if number > 1] == []
    plain = [cause for cause in CAUSES if isinstance(cause.says, str)]
    confused = [
        (one.name, other.name)
        for one in plain
        for other in CAUSES
        if one is not other and other.is_said_by(str(one.says))
    ]
    assert confused == []
    assert {cause.num_ranks for cause in RANKS} != {(1,)}


def loop_without_a_mistake(rank: int, num_ranks: int, folder: Path, with_torchs_loader: bool) -> list[str]:
    """What is said of it."""
    texts: list[str] = []
    training = Training(rank, num_ranks, folder)
    with warnings_to(texts.append):
        sampler: Any = DistributedSampler(training.dataset, num_ranks, rank) if with_torchs_loader else None
        training.prepare(loader=None if sampler is None else training.torch_loader(sampler=sampler))
        for epoch in range(3):
            with training.trainer.epoch(epoch):
                if sampler is not None:
                    sampler.set_epoch(epoch)
                training.next_loop()
                training.go_on()
        training.trainer.close()
    return texts


@pytest.mark.parametrize("with_torchs_loader", [False, True], ids=["ours", "torchs"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_of_a_loop_without_a_mistake_nothing_is_said(
    ranks: RankPool, tmp_path: Path, num_ranks: int, with_torchs_loader: bool
) -> None:
    said = ranks.run(
        num_ranks, loop_without_a_mistake, num_ranks, tmp_path, with_torchs_loader, process_group=num_ranks > 1
    )
    assert said == [[]] * num_ranks


def leaves_alone(rank: int, folder: Path) -> None:
    training = Training(rank, 2, folder)
    training.prepare(timeout_seconds=5.0)
    with training.trainer.epoch(0):
        for inputs, targets in training.batches:
            with training.trainer.step():
                training.learn(inputs, targets)
            if rank == 1 and training.trainer.sync_gradients:
                break


def test_a_rank_that_leaves_its_epoch_before_the_others_ends_all_of_them(ranks: RankPool, tmp_path: Path) -> None:
    """The others wait for its gradients, where nothing reaches them until it has given them up and exits."""
    stayed, left = ranks.run_outcomes(2, leaves_alone, tmp_path, deadline_seconds=DEADLINE_SECONDS)
    assert left.error is not None and stayed.error is not None
    assert left.error.type_name == "PeerLostError"
    assert re.match(
        r"rank 1 .* lost a peer while waiting for the other ranks at the end of an epoch, after 1 steps, .*: rank 0 ",
        left.error.message,
    ), left.error.message


def leaves_a_step(rank: int, folder: Path) -> None:
    training = Training(rank, 2, folder)
    training.prepare(timeout_seconds=5.0, global_batch_size=16)
    with training.trainer.epoch(0):
        for number, (inputs, targets) in enumerate(training.batches):
            if rank == 1 and number == 3:
                break
            with training.trainer.step():
                training.learn(inputs, targets)


def test_a_rank_that_breaks_off_in_the_middle_of_a_step_blames_itself(ranks: RankPool, tmp_path: Path) -> None:
    stayed, left = ranks.run_outcomes(2, leaves_a_step, tmp_path, deadline_seconds=DEADLINE_SECONDS)
    assert left.error is not None and stayed.error is not None
    assert left.error.type_name == "RanksDisagreeError"
    assert re.fullmatch(
        r"rank 1 \(.*\) left a step after 1 of 2 micro-steps \(the epoch ended before the step did\), after 1 steps, "
        r".*: rank 0 \(.*\) did not, and waits for rank 1 in that step, unless it has died or hangs; do the same "
        r"on all ranks",
        left.error.message,
    ), left.error.message
    assert (
        "ranks that have not left the loop too wait for the gradients of this rank, and then all ranks end: leave the "
        "loop on all ranks" in left.output
    )
    assert "failed after 1 steps" in stayed.output
    assert "it left a step after 1 of 2 micro-steps" in stayed.output
