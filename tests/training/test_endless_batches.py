"""trainer.batches(): the batches of a loop that counts steps, epoch after epoch, as a loop over epochs has them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticError, StepError
from elastic_ext.ranks.heartbeat import Activity, heartbeat_file, read_heartbeat
from elastic_ext.ranks.processes import is_alive, process_of
from elastic_ext.training.batches import name_epoch
from tests.support.beating import until
from tests.support.epochs import BATCH, BY_EPOCHS, LOADERS, STEPS, saved_in
from tests.support.faults import PlantedFault
from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.training import bits_of, make_data, shared, trainer_of

EPOCHS = 3
ALL = EPOCHS * STEPS
MIDDLE = STEPS + 2  # a step in the middle of epoch 1
EVERY_STEP = CheckpointInterval(steps=1)
GO_ON = [kind for kind in LOADERS if "torch's" not in kind]


def loader_of(kind: str, rank: int, num_ranks: int) -> Any:
    """A loader of ``tests.support.epochs``, or torch's with a sampler that shuffles by the epoch."""
    if kind == "by epochs":
        dataset = TensorDataset(*make_data(BATCH * STEPS))
        return DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, num_ranks, rank, seed=3))
    if kind == "stream without state":
        return ElasticDataLoader(Stateless(), batch_size=2)
    return LOADERS[kind](rank, num_ranks)


class Stateless(IterableDataset[Any]):
    """A stream that cannot tell where it is."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*make_data(BATCH * STEPS), strict=True)


@dataclass
class Seen:
    """What one run came to, on one rank."""

    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """The epoch, the step after it, and the loss of each micro-step."""
    samples: list[list[float]] = field(default_factory=list)
    """Those of each step that committed."""
    final: list[Any] = field(default_factory=list)


class Run:
    """One rank's training, whose loops note what they take; ``before`` and ``after`` act around a micro-step."""

    def __init__(
        self,
        folder: Path,
        name: str = "run",
        kind: str = "elastic",
        *,
        rank: int = 0,
        num_ranks: int = 1,
        loader: Any = None,
        every: CheckpointInterval | None = None,
        **given: Any,
    ) -> None:
        """Checkpoints are saved ``every`` so often, or there are none."""
        (folder / name).mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)).double()
        self.model = shared(self.plain, num_ranks)
        self.loader = loader_of(kind, rank, num_ranks) if loader is None else loader
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.storage = folder / f"storage of {name}"
        if every is not None:
            given |= {"shared_storage_path": self.storage, "checkpoint_interval": every}
        given = {"global_batch_size": BATCH} | given
        self.trainer = trainer_of(folder / name, self.model, self.loader, rank=rank, **given)
        self.optimizer = self.trainer.prepare(self.inner)
        self.seen = Seen()
        self.in_step: Callable[[int], object] = lambda step: None
        self.after_optimizer: Callable[[int], object] = lambda step: None
        self._taken: list[float] = []

    def __enter__(self) -> Any:
        self.trainer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.trainer.__exit__(*error)
        self.seen.final = bits_of(self.plain, self.inner.state_dict(), torch.get_rng_state(), self.trainer.global_step)

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        """Take one; gives whether a step has ended with it."""
        trainer, step = self.trainer, self.trainer.global_step
        epoch = trainer._counts.epoch
        try:
            with trainer.step():
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                trainer.backward(loss)
                self.in_step(step)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.after_optimizer(step)
        except PlantedFault:
            self._taken.clear()
            return False
        self.seen.steps.append((epoch, trainer.global_step, loss.item()))
        self._taken += inputs[:, 0].tolist()
        if trainer.global_step == step:
            return False
        self.seen.samples.append(self._taken)
        self._taken = []
        return True

    def train(self, max_steps: int | None = ALL, after: Callable[[int], object] = lambda step: None) -> None:
        """Take batches, however many loops have done so before."""
        for inputs, targets in self.trainer.batches(max_steps=max_steps):
            if self.micro_step(inputs, targets):
                after(self.trainer.global_step)


def by_epochs(folder: Path, kind: str, *, name: str = "whole", **given: Any) -> Seen:
    """What a loop over epochs comes to."""
    with Run(folder, name, kind, **given) as run:
        for epoch in range(EPOCHS):
            name_epoch(getattr(run.loader, "sampler", None) if kind == "by epochs" else None, epoch)
            with run.trainer.epoch(epoch):
                for inputs, targets in run.loader:
                    run.micro_step(inputs, targets)
    seen: Seen = run.seen
    assert seen.steps[-1][:2] == (EPOCHS - 1, ALL)
    return seen


def crash(step: int) -> None:
    raise PlantedFault(f"after step {step}")


def at(step: int, act: Callable[[], object]) -> Callable[[int], None]:
    """What to do after a step: ``act`` after that one, once."""
    acts = [act]

    def after(now: int) -> None:
        if now == step and acts:
            acts.pop()()

    return after


# --- as a loop over epochs has it ------------------------------------------------------------------------------------


def alike_rank(rank: int, folder: Path, kind: str, num_ranks: int) -> None:
    given: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks}
    whole = by_epochs(folder, kind, **given)
    with Run(folder, "run", kind, **given) as run:
        run.train()
    assert (run.seen.steps, run.seen.samples, run.seen.final) == (whole.steps, whole.samples, whole.final)


@pytest.mark.parametrize("kind", the_first(["elastic", "by epochs", "torch's", "stream", "own", *LOADERS], 5))
def test_a_loop_that_counts_steps_trains_as_one_over_epochs_does(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    alike_rank(0, tmp_path, kind, 1)
    assert "same order" not in caplog.text


@pytest.mark.parametrize("kind", the_first(["by epochs", "elastic", "stream"], 2))
def test_ranks_do_so_too(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks.run(2, alike_rank, tmp_path, kind, 2)


@pytest.mark.parametrize("every", [BY_EPOCHS, None])
def test_a_checkpoint_is_made_as_each_epoch_ends_and_by_default_too(
    tmp_path: Path, every: CheckpointInterval | None
) -> None:
    with Run(tmp_path, shared_storage_path=tmp_path / "storage of run", checkpoint_interval=every) as run:
        run.train(2 * STEPS + 1)
    assert saved_in(run.storage) == ["epoch_1", "epoch_2", f"step_{2 * STEPS + 1}"]


def test_the_size_of_micro_batches_changes_while_batches_are_taken(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "elastic")
    with Run(tmp_path) as run:
        run.train(after=at(MIDDLE, lambda: run.trainer.propose({"dataloader.batch_size": 1}, "to see whether it goes")))
        assert run.trainer.config.dataloader.batch_size == 1
    assert run.seen.samples == whole.samples
    assert len(run.seen.steps) > len(whole.steps)


@pytest.mark.parametrize("failing", [STEPS - 1, STEPS])
def test_the_samples_of_a_step_that_was_taken_back_come_again(tmp_path: Path, failing: int) -> None:
    """The last step of an epoch, and the first one of the next."""
    whole = by_epochs(tmp_path, "elastic")
    failures = [failing]

    def fail_once(step: int) -> None:
        if step in failures and run.trainer.sync_gradients:
            failures.remove(step)
            raise PlantedFault("in a step")

    with Run(tmp_path) as run:
        run.in_step = fail_once
        run.train()
    assert not failures
    assert run.seen.samples == whole.samples


def test_batches_that_the_loop_passes_over_do_not_hold_up_its_epoch(tmp_path: Path) -> None:
    """The trainer counts the batches of steps: an epoch with fewer would seem to have more to come."""
    seen: list[tuple[int, bool]] = []
    with Run(tmp_path, kind="torch's", global_batch_size=2) as run:
        for number, (inputs, targets) in enumerate(run.trainer.batches(max_steps=20)):
            is_taken = number % (2 * STEPS) != 3
            seen.append((run.trainer._counts.epoch, is_taken))
            if is_taken:
                run.micro_step(inputs, targets)
    per_epoch = 2 * STEPS
    assert [epoch for epoch, _ in seen] == [number // per_epoch for number in range(len(seen))]
    assert sum(is_taken for _, is_taken in seen) == 20


# --- where a loop is left, and gone on with --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", the_first(["elastic", "torch's", "stream", *LOADERS], 2))
def test_a_second_call_goes_on_where_the_loop_before_was_left(tmp_path: Path, kind: str) -> None:
    whole = by_epochs(tmp_path, kind)
    with Run(tmp_path, "run", kind) as run:
        run.train(STEPS - 1)
        with run.trainer.evaluation():
            run.plain.eval()
            run.plain.train()
        for inputs, targets in run.trainer.batches():
            if run.micro_step(inputs, targets) and run.trainer.global_step == MIDDLE:
                break
        batches = run.trainer.batches()
        while run.trainer.global_step < ALL:
            run.micro_step(*next(batches))
    assert run.seen.steps == whole.steps
    assert run.seen.samples == whole.samples


@pytest.mark.parametrize(("kind", "num_in_step"), [("elastic", 0), ("stream", 1), ("elastic with workers", 1)])
def test_a_batch_with_which_a_loop_was_left_before_its_micro_step_comes_again(
    tmp_path: Path, kind: str, num_in_step: int
) -> None:
    whole = by_epochs(tmp_path, kind)
    with Run(tmp_path, "run", kind) as run:
        for number, batch in enumerate(run.trainer.batches()):
            if number == 2 * MIDDLE + num_in_step:
                break
            run.micro_step(*batch)
        run._taken.clear()  # the micro-steps of its step come again, too
        run.train()
    assert run.seen.samples == whole.samples


How = Callable[[Run], object]


def by_max_steps(run: Run) -> None:
    run.train(MIDDLE)


def by_break(run: Run) -> None:
    for inputs, targets in run.trainer.batches():
        if run.micro_step(inputs, targets) and run.trainer.global_step == MIDDLE:
            break


def by_leaving_it_there(run: Run) -> None:
    batches = run.left = run.trainer.batches()  # type: ignore[attr-defined]
    while run.trainer.global_step < MIDDLE:
        run.micro_step(*next(batches))


def by_a_stop(run: Run) -> None:
    run.train(None, after=at(MIDDLE - 2, run.trainer.request_stop))
    assert run.trainer.should_stop


def by_a_crash(run: Run) -> None:
    run.train(after=at(MIDDLE + 1, lambda: crash(MIDDLE + 1)))


@pytest.mark.parametrize(
    ("how", "kind"),
    the_first(
        [
            (by_max_steps, "elastic"),
            (by_break, "stream"),
            (by_leaving_it_there, "own"),
            (by_a_stop, "elastic"),
            (by_a_crash, "elastic"),
            *((how, kind) for how in (by_max_steps, by_break, by_a_crash) for kind in GO_ON),
        ],
        5,
    ),
)
def test_a_run_that_was_left_in_the_middle_of_an_epoch_resumes_with_the_next_sample(
    tmp_path: Path, how: How, kind: str
) -> None:
    whole = by_epochs(tmp_path, kind)
    try:
        with Run(tmp_path, "run", kind, every=EVERY_STEP) as first:
            how(first)
    except PlantedFault:
        assert how is by_a_crash
    with Run(tmp_path, "run", kind, every=EVERY_STEP) as second:
        assert (second.trainer.start_epoch, second.trainer.global_step) == (1, MIDDLE)
        second.train()
    assert first.seen.samples[:MIDDLE] + second.seen.samples == whole.samples
    assert first.seen.steps[: 2 * MIDDLE] + second.seen.steps == whole.steps
    assert second.seen.final == whole.final


@pytest.mark.parametrize("kind", the_first(["stream", "elastic", "own", "torch's"], 2))
def test_a_run_that_was_left_at_the_end_of_an_epoch_resumes_with_the_next_one(tmp_path: Path, kind: str) -> None:
    whole = by_epochs(tmp_path, kind)
    with Run(tmp_path, "run", kind, every=EVERY_STEP) as first:
        first.train(STEPS)
    with Run(tmp_path, "run", kind, every=EVERY_STEP) as second:
        second.train()
    assert first.seen.samples + second.seen.samples == whole.samples
    assert [step[:2] for step in first.seen.steps + second.seen.steps] == [step[:2] for step in whole.steps]


def test_a_run_that_has_taken_its_steps_takes_none_when_it_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, every=EVERY_STEP) as first:
        first.train(MIDDLE)
    with Run(tmp_path, every=EVERY_STEP) as second:
        second.train(MIDDLE)
    assert second.seen.steps == []
    assert "nothing was left to do" in caplog.text


def part_rank(rank: int, folder: Path, num_ranks: int, max_steps: int) -> list[list[float]]:
    with Run(folder, rank=rank, num_ranks=num_ranks, every=EVERY_STEP) as run:
        run.train(max_steps)
    samples: list[list[float]] = run.seen.samples
    return samples


def test_another_number_of_ranks_goes_on_with_the_next_sample(ranks: RankPool, tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "elastic")
    parts = [ranks.run(2, part_rank, tmp_path, 2, MIDDLE), ranks.run(3, part_rank, tmp_path, 3, ALL)]
    steps = [sorted(itertools.chain.from_iterable(step)) for part in parts for step in zip(*part, strict=True)]
    assert steps == [sorted(step) for step in whole.samples]


def failing_rank(rank: int, folder: Path) -> str:
    """Rank 0 leaves the loop by an exception, rank 1 by a break after the same step."""
    try:
        with Run(folder, rank=rank, num_ranks=2) as run:
            for inputs, targets in run.trainer.batches():
                if run.micro_step(inputs, targets) and run.trainer.global_step == MIDDLE:
                    if rank == 0:
                        crash(MIDDLE)
                    break
    except (PlantedFault, ElasticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_exception_that_leaves_the_loop_on_one_rank_is_told_to_the_others_as_training_ends(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, failing_rank, tmp_path)
    assert first == f"PlantedFault: after step {MIDDLE}"
    assert f"after step {MIDDLE}" in second, second


def test_a_loop_that_was_left_is_no_hang_until_it_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    doing: list[Activity] = []

    def note() -> None:
        reading = read_heartbeat(heartbeat_file(tmp_path, 0))
        assert reading is not None
        doing.append(reading.activity)

    with Run(tmp_path) as run:
        run.train(1, after=at(1, note))
        note()
        run.train(2, after=at(2, note))
        note()
    assert doing == [Activity.BETWEEN, Activity.OUTSIDE] * 2


@pytest.mark.parametrize("number", [None, 1, 2])
def test_an_epoch_that_the_loop_has_left_makes_way_for_one_by_hand(tmp_path: Path, number: int | None) -> None:
    """The rest of it where it is named, and else the one that comes."""
    whole = by_epochs(tmp_path, "elastic")
    with Run(tmp_path) as run:
        by_break(run)
        with run.trainer.epoch(number) as epoch:
            for inputs, targets in run.loader:
                run.micro_step(inputs, targets)
        assert epoch == (2 if number is None else number)
        run.train(run.trainer.global_step + 1)
    begun = {None: slice(2 * STEPS, ALL), 1: slice(MIDDLE, 2 * STEPS), 2: slice(2 * STEPS, ALL)}[number]
    expected = whole.samples[:MIDDLE] + whole.samples[begun]
    assert run.seen.samples[: len(expected)] == expected
    assert run.seen.steps[-1][0] == epoch + 1


def test_a_torch_dataloader_begins_the_epoch_anew_where_a_run_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path, kind="by epochs", every=EVERY_STEP) as first:
        first.train(MIDDLE)
    with Run(tmp_path, kind="by epochs", every=EVERY_STEP) as second:
        second.train(MIDDLE + STEPS)
    assert "the epoch begins anew" in caplog.text
    assert second.seen.samples[:2] == first.seen.samples[STEPS:MIDDLE]
    assert [step[0] for step in second.seen.steps] == [1] * 2 * STEPS


@pytest.mark.parametrize("step", [MIDDLE, 2 * STEPS])
def test_no_batch_is_taken_after_a_boundary_that_an_exception_has_put_off_and_that_says_to_stop(
    tmp_path: Path, step: int
) -> None:
    """Ranks without the exception have passed that boundary as the step ended, and stop there."""
    num_taken = 0

    def stop_and_fail(before: int) -> None:
        if before == step - 2:
            run.trainer.request_stop()  # which is agreed at the boundary after the next step
        if before == step - 1 and run.trainer.sync_gradients:
            raise PlantedFault("after optimizer.step()")

    with Run(tmp_path) as run:
        run.after_optimizer = stop_and_fail
        for inputs, targets in run.trainer.batches():
            num_taken += 1
            run.micro_step(inputs, targets)
        assert (run.trainer.global_step, run.trainer.should_stop) == (step, True)
        assert run.trainer._counts.is_in_epoch
    assert num_taken == 2 * step


def test_an_epoch_by_hand_that_was_left_is_not_begun_again_with_a_loader_that_cannot_go_on(tmp_path: Path) -> None:
    with Run(tmp_path, kind="by epochs") as run:
        with run.trainer.epoch():
            for inputs, targets in run.loader:
                if run.micro_step(inputs, targets):
                    break
        run.train(1 + STEPS)
    assert [step[0] for step in run.seen.steps] == [0] * 2 + [1] * 2 * STEPS


def test_another_loop_over_the_dataloader_is_refused_until_the_epoch_has_ended(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "elastic")
    with Run(tmp_path) as run:
        by_break(run)
        with pytest.raises(StepError, match=r"begun in an epoch of trainer.batches\(\), and would leave out the rest"):
            iter(run.loader)
        run.train()
    assert run.seen.samples == whole.samples
    iter(run.loader)


def test_a_trainer_that_is_dropped_has_the_checkpoint_of_its_last_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test that has failed
    run = Run(tmp_path, every=BY_EPOCHS)
    run.train(2 * STEPS)
    storage = run.storage
    del run
    gc.collect()
    assert saved_in(storage) == ["epoch_1", "epoch_2"]


def test_a_loop_that_another_thread_ends_notes_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PULSE_DIR", str(tmp_path))
    with Run(tmp_path) as run:
        batches = run.trainer.batches()
        run.micro_step(*next(batches))
        thread = threading.Thread(target=batches.close)
        thread.start()
        thread.join()
        reading = read_heartbeat(heartbeat_file(tmp_path, 0))
        assert reading is not None and reading.activity is Activity.BETWEEN
        run.train()


class Breaking(Dataset[Any]):
    """Samples of which one cannot be had, the first time that it is asked for."""

    def __init__(self) -> None:
        self._data = TensorDataset(*make_data(BATCH * STEPS))
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index == BATCH and not self._has_failed:
            self._has_failed = True
            raise PlantedFault("a sample cannot be had")
        return self._data[index]


class Generated:
    """The batches of a loader, out of a generator: it ends with the first error."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


@pytest.mark.parametrize(("wrap", "num_left"), [(Generated, 0), (lambda loader: loader, 2 * STEPS - 3)])
def test_an_epoch_that_an_error_has_ended_early_is_told_of(
    tmp_path: Path, wrap: Callable[[Any], Any], num_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = wrap(DataLoader(Breaking(), batch_size=2))
    with Run(tmp_path, loader=loader, global_batch_size=None) as run:
        with pytest.raises(PlantedFault, match="a sample cannot be had"):
            run.train(20)
        run.train(20)
    assert [step[0] for step in run.seen.steps].count(0) == 2 + num_left
    is_told = "gave no batch after it had raised an error, and epoch 0 ends there" in caplog.text
    assert is_told is (num_left == 0)


# --- going back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", the_first(["elastic", "own", "stream", *GO_ON], 3))
@pytest.mark.parametrize("back", [2, STEPS + 1])
def test_training_goes_back_into_this_epoch_or_an_earlier_one(tmp_path: Path, kind: str, back: int) -> None:
    whole = by_epochs(tmp_path, kind)
    with Run(tmp_path, "run", kind, every=EVERY_STEP) as run:
        run.train(after=at(MIDDLE, lambda: run.trainer.rewind(back)))
    assert run.seen.samples == whole.samples[:MIDDLE] + whole.samples[back:]
    assert run.seen.steps == whole.steps[: 2 * MIDDLE] + whole.steps[2 * back :]
    assert run.seen.final == whole.final


def test_a_loader_that_cannot_go_back_goes_on_with_its_next_batches(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "by epochs")
    with Run(tmp_path, "run", "by epochs", every=EVERY_STEP) as run:
        run.train(ALL - MIDDLE + 2, after=at(MIDDLE, lambda: run.trainer.rewind(2)))
    assert run.seen.samples == whole.samples


@pytest.mark.parametrize("back", [STEPS + 1, 99])
def test_a_stream_without_state_goes_on_where_it_cannot_go_back_to_a_checkpoint(tmp_path: Path, back: int) -> None:
    whole = by_epochs(tmp_path, "stream without state")

    def rewind() -> None:
        with contextlib.nullcontext() if back < MIDDLE else pytest.raises(ElasticError, match="99"):
            run.trainer.rewind(back)

    with Run(tmp_path, "run", "stream without state", every=EVERY_STEP) as run:
        run.train(ALL - MIDDLE + min(back, MIDDLE), after=at(MIDDLE, rewind))
    assert run.seen.samples == whole.samples


def test_a_stream_without_state_goes_back_to_where_an_epoch_began(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "stream without state")
    with Run(tmp_path, "run", "stream without state", every=BY_EPOCHS) as run:
        run.train(after=at(MIDDLE, lambda: run.trainer.rewind(STEPS)))
    assert run.seen.samples == whole.samples[:MIDDLE] + whole.samples[STEPS:]
    assert [step[0] for step in run.seen.steps[2 * MIDDLE :]] == [step[0] for step in whole.steps[2 * STEPS :]]


def test_going_back_without_samples_goes_on_with_the_next_ones(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "elastic")
    with Run(tmp_path, every=EVERY_STEP) as run:
        run.train(ALL - MIDDLE + 2, after=at(MIDDLE, lambda: run.trainer.rewind(2, skip_samples=True)))
    assert run.seen.samples == whole.samples


@pytest.mark.parametrize("step", [MIDDLE, 2 * STEPS])
def test_where_there_is_nothing_to_go_back_to_the_loop_goes_on(tmp_path: Path, step: int) -> None:
    whole = by_epochs(tmp_path, "elastic")

    def try_to() -> None:
        with pytest.raises(ElasticError, match="99"):
            run.trainer.rewind(99)

    with Run(tmp_path, every=BY_EPOCHS) as run:
        run.train(after=at(step, try_to))
    assert run.seen.samples == whole.samples
    assert [step[:2] for step in run.seen.steps] == [step[:2] for step in whole.steps]
    assert saved_in(run.storage) == ["epoch_1", "epoch_2", "epoch_3"]


# --- no batches, and mistakes ----------------------------------------------------------------------------------------


class Few(IterableDataset[Any]):
    """Samples that fill one batch, and not the several of a step; it has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*make_data(2), strict=True)


def few(num_samples: int) -> TensorDataset:
    return TensorDataset(*make_data(num_samples))


@pytest.mark.parametrize(
    ("loader", "given"),
    [
        (lambda: ElasticDataLoader(few(BATCH - 1), batch_size=1, drop_last=True), {}),
        (lambda: DataLoader(few(3), batch_size=4, drop_last=True), {"global_batch_size": None}),
        (lambda: iter([make_data(4)]), {"global_batch_size": None}),
    ],
)
def test_a_loader_without_batches_is_an_error_and_not_waited_for(
    tmp_path: Path, loader: Callable[[], Any], given: dict[str, Any]
) -> None:
    def count_down() -> None:
        with Run(tmp_path, loader=loader(), **given) as run:
            run.train(ALL)

    with pytest.raises(ValueError, match="gave no batch in two epochs in a row"):
        count_down()


def test_epochs_without_a_step_are_an_error(tmp_path: Path) -> None:
    told = r"gave 1 batches in the second one.*step of 4 samples"
    with Run(tmp_path, loader=DataLoader(Few(), batch_size=2)) as run, pytest.raises(StepError, match=told):
        run.train()
    with Run(tmp_path, "other", "torch's") as run, pytest.raises(StepError, match="gave 8 batches"):
        for _ in run.trainer.batches():
            pass


@pytest.mark.parametrize("max_steps", [-1, 1.0, "10", True])
def test_a_number_of_steps_that_is_none_is_refused(tmp_path: Path, max_steps: Any) -> None:
    with Run(tmp_path) as run, pytest.raises(ValueError, match=r"max_steps is .*; allowed: an integer >= 0"):
        run.trainer.batches(max_steps=max_steps)


def test_no_steps_are_no_batches(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        assert list(run.trainer.batches(max_steps=0)) == []


def test_without_a_dataloader_or_before_prepare_there_are_no_batches(tmp_path: Path) -> None:
    model = nn.Linear(6, 5).double()
    trainer = trainer_of(tmp_path, model, micro_batch_size=2)
    with pytest.raises(ElasticError, match=r"prepare\(\) was not called"):
        trainer.batches()
    with trainer:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=r"was given none; make it as ElasticTrainer\(model, dataloader"):
            trainer.batches()


def test_epochs_are_not_begun_by_hand_around_batches_or_among_them(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        trainer = run.trainer
        batches = trainer.batches()
        with trainer.epoch():
            with pytest.raises(StepError, match=r"was called inside `with trainer.epoch\(\):`"):
                trainer.batches()
            with pytest.raises(StepError, match=r"was asked for a batch inside `with trainer.epoch\(\):`"):
                next(batches)
        batches = trainer.batches()
        run.micro_step(*next(batches))
        within = r"trainer.epoch\(\) was entered in a loop over trainer.batches\(\)"
        with pytest.raises(StepError, match=within), trainer.epoch():
            pass
        with pytest.raises(StepError, match=r"trainer.reset\(\) was called in a loop .* batches.close\(\) leaves"):
            trainer.reset()
        batches.close()
        trainer.reset()
        assert trainer.num_steps == 0


def test_a_batch_is_not_taken_within_a_step(tmp_path: Path) -> None:
    whole = by_epochs(tmp_path, "elastic")
    with Run(tmp_path) as run:
        batches = run.trainer.batches()
        next(batches)
        told = "take the next batch once the step's block has ended"
        with pytest.raises(StepError, match=told), run.trainer.step():
            next(batches)
        run.train()
    assert run.seen.samples == whole.samples


def test_a_training_that_has_ended_has_no_batches(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        batches = run.trainer.batches()
        run.micro_step(*next(batches))
    for take in (lambda: next(batches), run.trainer.batches):
        with pytest.raises(ElasticError, match=r"training has ended, and trainer.batches\(\) has no more batches"):
            take()


class Makers(Dataset[int]):
    """Samples that say which process made them."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_end_with_training_also_where_the_loop_was_not_left(tmp_path: Path) -> None:
    with Run(tmp_path, loader=ElasticDataLoader(Makers(), batch_size=2, num_workers=1)) as run:
        batches = run.trainer.batches()
        (worker,) = map(process_of, set(next(batches).tolist()))
        assert worker is not None and worker.pid != os.getpid()
    until(lambda: not is_alive(worker))
    batches.close()


def test_an_epoch_is_named_to_whatever_shuffles_by_it() -> None:
    named: list[tuple[str, int]] = []

    class Part:
        def __init__(self, name: str, **parts: Any) -> None:
            self.__dict__.update(parts)
            self._name = name

    class Named(Part):
        def set_epoch(self, epoch: int) -> None:
            named.append((self._name, epoch))

    name_epoch(Named("loader", sampler=Named("sampler")), 3)
    name_epoch(Part("loader", sampler=Named("sampler"), batch_sampler=Part("batches", sampler=Named("inner"))), 4)
    name_epoch(Part("loader", batch_sampler=Named("batches")), 5)
    name_epoch([1, 2], 6)
    assert named == [("loader", 3), ("sampler", 4), ("inner", 4), ("batches", 5)]
