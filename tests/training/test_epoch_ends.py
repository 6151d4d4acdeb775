"""A checkpoint of an epoch's last step goes on with the next epoch: none is trained twice, none is left out."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from elastic_ext import CheckpointInterval, ElasticDataLoader
from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.training import ResumableSlices, bits_of, make_data, shared, trainer_of

BATCH = 4
STEPS = 4  # of an epoch, the last of which is smaller
SAMPLES = 14
EPOCHS = 3

How = Literal["interval", "by hand", "signal", "crash", "crash within"]


class Stream(IterableDataset[Any]):
    """One rank's part of the data, shared out among workers; it can tell where it is."""

    def __init__(self, rank: int, num_ranks: int, num_samples: int = BATCH * STEPS) -> None:
        self._own = list(zip(*make_data(num_samples), strict=True))[rank::num_ranks]
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, self._at = self._at, 0
        for number, sample in enumerate(self._own[0 if info is None else info.id :: info.num_workers if info else 1]):
            if number >= start:
                self._at = number + 1
                yield sample
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Stateless(IterableDataset[Any]):
    """One that cannot tell where it is."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stream = Stream(rank, num_ranks)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)


class Own(ResumableSlices):
    """A source of somebody's own, whose loop goes on at the end of an epoch with nothing; it can go back."""

    _is_looping = False

    def rewind(self, state: dict[str, int]) -> None:
        start = self._start
        self.load_state_dict(state)
        if self._is_looping:
            self._start = start
        self._num_cuts += 1

    def __iter__(self) -> Iterator[Any]:
        self._is_looping = True
        try:
            yield from super().__iter__()
        finally:
            self._is_looping = False


def indexed(**options: Any) -> Any:
    return ElasticDataLoader(TensorDataset(*make_data(SAMPLES)), batch_size=2, **options)


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "indexed": lambda rank, num_ranks: indexed(),
    "shuffled by a worker": lambda rank, num_ranks: indexed(shuffle=True, num_workers=1),
    "own": lambda rank, num_ranks: Own(make_data(SAMPLES), 2),
    "stream": lambda rank, num_ranks: ElasticDataLoader(Stream(rank, num_ranks), batch_size=2),
    "stream of a worker": lambda rank, num_ranks: ElasticDataLoader(Stream(rank, num_ranks), 2, num_workers=1),
    "stream without state": lambda rank, num_ranks: ElasticDataLoader(Stateless(rank, num_ranks), batch_size=2),
    "torch's": lambda rank, num_ranks: DataLoader(
        TensorDataset(*(part[rank::num_ranks] for part in make_data(BATCH * STEPS))), batch_size=2
    ),
}
WITH_A_REST: dict[str, Callable[[int, int], Any]] = {  # of samples that are too few for a step
    "stream with a rest": lambda rank, num_ranks: ElasticDataLoader(Stream(rank, num_ranks, BATCH * STEPS + 2), 2),
    "workers with a rest": lambda rank, num_ranks: ElasticDataLoader(
        Stream(rank, num_ranks, BATCH * STEPS + 2), 2, num_workers=1
    ),
}
CANNOT_GO_ON = {"stream without state", "torch's"}
CANNOT_SEE_THE_END = {"stream", "stream of a worker", "stream without state"}


@dataclass
class Seen:
    started_at: tuple[int, int] = (0, 0)
    """The epoch and the step."""
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """The epoch, the step after it, and the loss of each micro-step."""
    epochs: list[int] = field(default_factory=list)
    """That ended."""
    final: list[Any] = field(default_factory=list)
    rewound: int | None = None


def train(
    folder: Path,
    name: str,
    kind: str,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    how: How | None = None,
    until: int | None = None,
    back: int | None = None,
    every: CheckpointInterval | None = None,
    of_epoch: int = STEPS,
) -> Seen:
    """Three epochs, from wherever the newest checkpoint is; to ``until`` a step, which is saved as ``how`` says.

    With ``back`` training goes back to that step once, after the second epoch. A loop is left after ``of_epoch`` steps.
    """
    (folder / name).mkdir(exist_ok=True)
    torch.manual_seed(0)
    random.seed(7)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 5)).double()
    model = shared(plain, num_ranks)
    loader = (LOADERS | WITH_A_REST)[kind](rank, num_ranks)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_of(
        folder / name,
        model,
        loader,
        rank=rank,
        global_batch_size=BATCH,
        shared_storage_path=folder / f"storage of {name}",
        checkpoint_interval=CheckpointInterval() if how == "by hand" else every or CheckpointInterval(steps=STEPS),
        save_on_signals=how == "signal",
    )
    seen = Seen()
    try:
        with trainer:
            optimizer = trainer.prepare(inner)
            seen.started_at = trainer.start_epoch, trainer.global_step
            while trainer._counts.epoch < EPOCHS:
                with trainer.epoch() as epoch:
                    for inputs, targets in loader:
                        with trainer.step():
                            loss = nn.functional.cross_entropy(model(inputs), targets)
                            trainer.backward(loss)
                            optimizer.step()
                            optimizer.zero_grad()
                        seen.steps.append((epoch, trainer.global_step, loss.item()))
                        random.random()  # after the step, and before the epoch's end
                        if trainer.sync_gradients and trainer.global_step == until:
                            if how == "by hand":
                                trainer.save_checkpoint()
                                raise InterruptedError
                            if how == "crash within":
                                raise MemoryError
                            if how == "signal":
                                os.kill(os.getpid(), signal.SIGTERM)
                        if of_epoch < STEPS and trainer.sync_gradients and trainer.global_step % of_epoch == 0:
                            break
                if how == "interval" and trainer.global_step == until:
                    raise InterruptedError
                if how == "crash" and trainer.global_step == until:
                    raise MemoryError
                seen.epochs.append(epoch)
                if back is not None and epoch == 1:
                    trainer.rewind(back)
                    seen.rewound, back = len(seen.steps), None
    except (InterruptedError, MemoryError, SystemExit):
        pass
    seen.final = bits_of(plain, inner.state_dict(), random.getstate(), torch.get_rng_state(), trainer.global_step)
    return seen


def resume_rank(rank: int, folder: Path, kind: str, num_ranks: int, how: How, epoch: int) -> None:
    options: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks}
    until = STEPS * (epoch + 1)
    whole = train(folder, "whole", kind, **options)
    assert whole.epochs == [0, 1, 2] and whole.steps[-1][1] == STEPS * EPOCHS
    stopped = train(folder, "run", kind, how=how, until=until, **options)
    assert stopped.started_at == (0, 0) and stopped.steps[-1][1] == until
    resumed = train(folder, "run", kind, **options)
    has_rest = how == "by hand" and kind in CANNOT_SEE_THE_END
    assert resumed.started_at == (epoch if has_rest else epoch + 1, until)
    assert stopped.steps + resumed.steps == whole.steps
    assert resumed.epochs == list(range(resumed.started_at[0], EPOCHS))
    assert resumed.final == whole.final
    ended = train(folder, "run", kind, **options)  # a job that has ended does not train on
    assert (ended.started_at, ended.steps) == ((EPOCHS, STEPS * EPOCHS), [])


@pytest.mark.parametrize("kind", ["indexed", "stream of a worker"])
def test_an_epoch_that_was_left_before_its_end_is_over_for_a_resumed_run_once_the_next_has_begun(
    tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"of_epoch": 2, "every": CheckpointInterval(epochs=1)}
    whole = train(tmp_path, "whole", kind, **options)
    assert [step for _, step, _ in whole.steps][-1] == 2 * EPOCHS
    stopped = train(tmp_path, "run", kind, how="crash within", until=3, **options)
    resumed = train(tmp_path, "run", kind, **options)
    assert resumed.started_at == (1, 2)
    assert [each for each in stopped.steps if each[0] == 0] + resumed.steps == whole.steps
    assert resumed.final == whole.final


@pytest.mark.parametrize(
    ("kind", "how"),
    the_first(
        sorted(
            itertools.product(LOADERS, ["interval", "by hand", "signal"]),
            key=lambda pair: (
                pair not in {("indexed", "by hand"), ("own", "signal"), ("stream without state", "interval")}
            ),
        ),
        3,
    ),
)
def test_a_run_resumed_after_an_epochs_last_step_goes_on_with_the_next_epoch(
    tmp_path: Path, kind: str, how: How
) -> None:
    if how == "by hand" and kind == "stream without state":
        pytest.skip("it begins that epoch anew, and says so: nothing tells that the epoch is over")
    resume_rank(0, tmp_path, kind, 1, how, 0)


@pytest.mark.parametrize("kind", WITH_A_REST)
def test_an_epoch_whose_last_samples_are_too_few_for_a_step_is_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    every = CheckpointInterval(epochs=1)
    whole = train(tmp_path, "whole", kind, every=every)
    assert "1 of 2 micro-steps of a step were dropped: the epoch ended before the step did" in caplog.text
    stopped = train(tmp_path, "run", kind, how="crash", until=STEPS, every=every)
    resumed = train(tmp_path, "run", kind, every=every)
    assert resumed.started_at == (1, STEPS)
    assert stopped.steps + resumed.steps == whole.steps
    assert resumed.final == whole.final
    ended = train(tmp_path, "run", kind, every=every)
    assert (ended.started_at, ended.steps) == ((EPOCHS, STEPS * EPOCHS), [])


@pytest.mark.parametrize("kind", the_first(["indexed", "own"], 1))
def test_a_run_that_crashed_after_it_does_so_too(tmp_path: Path, kind: str) -> None:
    resume_rank(0, tmp_path, kind, 1, "crash", 1)


@pytest.mark.parametrize(
    ("kind", "how"), the_first([*itertools.product(["indexed", "own", "stream"], ["by hand", "interval"])], 1)
)
def test_ranks_do_so_too(ranks: RankPool, tmp_path: Path, kind: str, how: How) -> None:
    ranks.run(2, resume_rank, tmp_path, kind, 2, how, 0)


@pytest.mark.parametrize("kind", the_first(sorted(LOADERS, key="own".__ne__), 1))
def test_epochs_are_gone_on_from_by_their_ends(tmp_path: Path, kind: str) -> None:
    every = CheckpointInterval(epochs=1)
    whole = train(tmp_path, "whole", kind, every=every)
    stopped = train(tmp_path, "run", kind, how="crash", until=STEPS, every=every)
    resumed = train(tmp_path, "run", kind, every=every)
    assert resumed.started_at == (1, STEPS)
    assert stopped.steps + resumed.steps == whole.steps
    assert resumed.final == whole.final


@pytest.mark.parametrize("kind", the_first([kind for kind in LOADERS if kind not in CANNOT_GO_ON], 1))
def test_training_that_went_back_to_an_epochs_last_step_goes_on_with_the_next(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path, "whole", kind)
    run = train(tmp_path, "run", kind, back=STEPS)
    assert run.rewound is not None
    assert run.steps[run.rewound :] == [seen for seen in whole.steps if seen[0] > 0]
    assert run.epochs == [0, 1, 1, 2]
    assert run.final == whole.final


@pytest.mark.parametrize("kind", ["indexed", "own"])
def test_within_the_epoch_its_end_comes_again(tmp_path: Path, kind: str) -> None:
    model, loader = nn.Linear(6, 5).double(), LOADERS[kind](0, 1)
    options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "global_batch_size": BATCH}
    trainer = trainer_of(tmp_path, model, loader, checkpoint_interval=CheckpointInterval(steps=1), **options)
    steps = []
    with trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with trainer.epoch() as epoch:
                for inputs, targets in loader:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    if trainer.sync_gradients:
                        steps.append((epoch, trainer.global_step))
                    if len(steps) == STEPS and trainer.sync_gradients:
                        assert trainer.rewind(STEPS).name == f"step_{STEPS}"
    assert steps == [(number // STEPS, number + 1) for number in range(2 * STEPS)]
