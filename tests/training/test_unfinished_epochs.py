"""An epoch whose loop was left by `break` is unfinished for a resumed run, unless the loop went on to the next one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader
from tests.support.epochs import BATCH, BY_EPOCHS, BY_STEPS, LOADERS, STEPS, saved_in, train
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS
from tests.support.thinning import the_first
from tests.support.training import make_data, make_model, trainer_of

AT = STEPS + 1  # the step at which training is left, the first of epoch 1
GO_ON = [kind for kind in LOADERS if "torch's" not in kind]
WAITING = {"save_in_background": False}


def max_steps_rank(
    rank: int, folder: Path, kind: str, every: CheckpointInterval, given: dict[str, Any], way: str | None = None
) -> None:
    """Left at a step in the middle of an epoch, and gone on with more steps; nothing is done between epochs."""
    given = {"rank": rank, "way": way, "every": every, "validates": False, **given}
    whole = train(folder, "whole", kind, **given)
    first = train(folder, "run", kind, max_steps=AT, **given)
    assert first.steps[-1][1] == AT
    second = train(folder, "run", kind, **given)
    assert second.started_at == (1, AT)
    assert first.samples + second.samples == whole.samples
    assert [step[:2] for step in first.steps + second.steps] == [step[:2] for step in whole.steps]


@pytest.mark.parametrize(
    ("kind", "every", "given"),
    the_first(
        [
            ("elastic", BY_EPOCHS, {}),
            ("stream", BY_STEPS, {}),
            ("elastic with workers", CheckpointInterval(steps=AT), {}),
            ("own", BY_EPOCHS, WAITING),
            ("stream", CheckpointInterval(steps=AT), WAITING),
            ("stream", BY_EPOCHS, {}),
            ("own", CheckpointInterval(steps=AT), {}),
            ("elastic", CheckpointInterval(steps=AT), WAITING),
        ],
        5,
    ),
)
def test_training_that_was_left_at_a_step_goes_on_with_the_next_sample(
    tmp_path: Path, kind: str, every: CheckpointInterval, given: dict[str, Any]
) -> None:
    if every is BY_STEPS:
        every = CheckpointInterval(steps=1)
    max_steps_rank(0, tmp_path, kind, every, given)


@pytest.mark.parametrize(
    ("way", "kind", "given"),
    the_first(
        [("ddp", "elastic", {}), ("fully_shard", "stream", {}), ("hybrid", "elastic", {}), ("ddp", "own", WAITING)], 2
    ),
)
def test_ranks_do_so_too(ranks: RankPool, tmp_path: Path, way: str, kind: str, given: dict[str, Any]) -> None:
    ranks.run(WAYS[way].num_ranks, max_steps_rank, tmp_path, kind, BY_EPOCHS, given, way)


def part_rank(rank: int, folder: Path, way: str | None, max_steps: int | None) -> Any:
    return train(folder, "run", rank=rank, way=way, max_steps=max_steps, validates=False)


@pytest.mark.parametrize(("before", "after"), the_first([(None, "ddp"), ("ddp", None)], 2))
def test_other_numbers_of_ranks_go_on_with_the_rest_too(
    ranks: RankPool, tmp_path: Path, before: str | None, after: str | None
) -> None:
    def part(way: str | None, max_steps: int | None) -> list[Any]:
        if way is None:
            return [part_rank(0, tmp_path, None, max_steps)]
        return ranks.run(WAYS[way].num_ranks, part_rank, tmp_path, way, max_steps)

    whole = train(tmp_path, "whole", validates=False)
    first, second = part(before, AT), part(after, None)
    assert second[0].started_at == (1, AT)
    seen = sorted(sample for run in (first, second) for rank in run for sample in rank.samples)
    assert seen == sorted(whole.samples)


@pytest.mark.parametrize(("every", "name"), [(BY_EPOCHS, f"step_{AT}"), (CheckpointInterval(steps=AT), f"step_{AT}")])
def test_what_there_is_of_such_an_epoch_is_saved_by_its_step(
    tmp_path: Path, every: CheckpointInterval, name: str
) -> None:
    train(tmp_path, "run", max_steps=AT, every=every)
    assert saved_in(tmp_path / "storage of run") == (["epoch_1", name] if every is BY_EPOCHS else [name])


@pytest.mark.parametrize("given", [{}, WAITING])
def test_a_torch_dataloader_begins_such_an_epoch_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    train(tmp_path, "run", "torch's", max_steps=AT, **given)
    caplog.clear()
    second = train(tmp_path, "run", "torch's", **given)
    assert second.started_at == (1, AT)
    assert "after 2 of its batches" in caplog.text and "the epoch begins anew" in caplog.text
    assert [step[0] for step in second.steps] == [1] * STEPS + [2] * STEPS + [3] * STEPS


@pytest.mark.parametrize("kind", the_first(["elastic", "stream with workers", "torch's", "elastic with workers"], 3))
def test_a_loop_that_takes_a_part_of_each_epoch_resumes_where_it_would_be(tmp_path: Path, kind: str) -> None:
    given: dict[str, Any] = {"of_epoch": 3}
    whole = train(tmp_path, "whole", kind, **given)
    first = train(tmp_path, "run", kind, crash_at=7, **given)
    second = train(tmp_path, "run", kind, **given)
    assert second.started_at == (2, 6)
    assert first.steps[:6] + second.steps == whole.steps
    assert second.final == whole.final
    assert {"epoch_1", "epoch_2"} <= set(saved_in(tmp_path / "storage of run"))


@pytest.mark.parametrize("kind", the_first(["elastic", "stream"], 2))
def test_one_that_crashes_before_the_next_epoch_has_begun_goes_on_with_the_rest(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path, "whole", kind)
    first = train(tmp_path, "run", kind, of_epoch=3, crash_between=0)
    second = train(tmp_path, "run", kind)
    assert second.started_at == (0, 3)
    assert first.samples + second.samples == whole.samples


@pytest.mark.parametrize("kind", the_first(["elastic", "stream", "own", "elastic with workers"], 3))
def test_the_same_epoch_in_the_same_run_goes_on_with_its_rest(tmp_path: Path, kind: str) -> None:
    model, loader = make_model(), LOADERS[kind](0, 1)
    begun: list[tuple[int, list[float]]] = []
    options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "global_batch_size": BATCH}
    with trainer_of(tmp_path, model, loader, **options) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for epoch, num_steps in ((0, 2), (0, STEPS), (1, 1), (1, STEPS), (None, STEPS)):
            taken: list[float] = []
            with trainer.epoch() if epoch is None else trainer.epoch(epoch) as number:
                for inputs, targets in loader:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    taken += inputs[:, 0].tolist()
                    if trainer.sync_gradients and trainer.num_steps == num_steps:
                        break
            begun.append((number, taken))
    assert [number for number, _ in begun] == [0, 0, 1, 1, 2]
    assert [len(taken) for _, taken in begun] == [2 * BATCH, 2 * BATCH, BATCH, 3 * BATCH, 4 * BATCH]
    for first, second in ((0, 1), (2, 3)):
        assert sorted(begun[first][1] + begun[second][1]) == sorted(begun[4][1])


def test_a_stream_that_has_ended_is_a_finished_epoch(tmp_path: Path) -> None:
    train(tmp_path, "run", "stream", num_epochs=2)
    assert saved_in(tmp_path / "storage of run") == ["epoch_1", "epoch_2"]
    assert train(tmp_path, "run", "stream", num_epochs=2).steps == []


def test_the_state_of_a_trainer_says_which_epoch_is_unfinished(tmp_path: Path) -> None:
    said: list[int] = []
    train(
        tmp_path, "run", of_epoch=2, num_epochs=2, between=lambda trainer, _: said.append(trainer.state_dict()["epoch"])
    )
    train(tmp_path, "other", num_epochs=2, between=lambda trainer, _: said.append(trainer.state_dict()["epoch"]))
    assert said == [0, 1, 1, 2]


@pytest.mark.parametrize("kind", ["elastic", "torch's"])
def test_an_epoch_that_was_left_before_its_first_step_is_the_one_that_comes(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "global_batch_size": BATCH}
    options["checkpoint_interval"] = BY_EPOCHS
    starts = []
    for _ in range(2):
        model, loader = make_model(), LOADERS[kind](0, 1)
        with trainer_of(tmp_path, model, loader, **options) as trainer:
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
            starts.append(trainer.start_epoch)
            for _ in range(2):  # the second one finds at its beginning that all steps are taken
                with trainer.epoch():
                    for inputs, targets in loader:
                        if trainer.global_step == STEPS:
                            break
                        with trainer.step():
                            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            optimizer.zero_grad()
                if trainer.global_step == STEPS and trainer.num_steps == 0:
                    break
    assert starts == [0, 1]


def test_other_steps_than_those_of_an_epoch_leave_it(tmp_path: Path) -> None:
    model, loader = make_model(), LOADERS["elastic"](0, 1)
    options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "global_batch_size": BATCH}
    with trainer_of(tmp_path, model, loader, checkpoint_interval=BY_EPOCHS, **options) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

        def take(num_steps: int) -> None:
            for inputs, targets in loader:
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                if trainer.sync_gradients:
                    num_steps -= 1
                    if num_steps == 0:
                        break

        with trainer.epoch(0):
            take(1)
        take(1)
        assert trainer.state_dict()["epoch"] == 1
    assert torch.isfinite(next(model.parameters())).all()


@pytest.mark.parametrize("every", [BY_EPOCHS, CheckpointInterval(steps=AT)])
def test_a_schedule_that_has_stepped_after_such_an_epoch_would_step_twice_for_it_and_who_resumes_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: CheckpointInterval
) -> None:
    train(tmp_path, "run", max_steps=AT, every=every)
    assert "had stepped" not in caplog.text
    resumed = train(tmp_path, "run", max_steps=2 * STEPS + 1, every=every)
    assert resumed.started_at == (1, AT)
    (text,) = [each.getMessage() for each in caplog.records if "had stepped" in each.getMessage()]
    assert f"step_{AT} was saved after the loop over epoch 1 was left before its end and StepLR had stepped. A " in text
    assert resumed.steps[0][3] == 0.4 / 4, "once too often"


def test_nothing_is_told_of_a_schedule_that_steps_behind_each_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the epoch, as torch's loops have it, where the last step of all is not the epoch's."""
    for num_steps in (6, 8):
        model, (inputs, targets) = make_model(), make_data(32)
        loader = ElasticDataLoader(TensorDataset(inputs, targets), 8)
        inner = SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "checkpoint_interval": BY_EPOCHS}
        trainer = trainer_of(tmp_path, model, loader, global_batch_size=8, **options)
        with trainer:
            optimizer, scheduler = trainer.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 2))
            for epoch in range(trainer.start_epoch, 2):
                with trainer.epoch(epoch):
                    for batch, classes in loader:
                        with trainer.step():
                            torch.nn.functional.cross_entropy(model(batch), classes).backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            optimizer.zero_grad()
                        scheduler.step()
                        if trainer.global_step == num_steps:
                            break
        assert trainer.global_step == num_steps
    assert "had stepped" not in caplog.text


@pytest.mark.parametrize("fails_in", [0, 2])
@pytest.mark.parametrize("every", [BY_EPOCHS, CheckpointInterval(steps=100)])
def test_training_that_goes_on_after_an_exception_has_left_an_epoch_is_saved_as_it_ends(
    tmp_path: Path, every: CheckpointInterval, fails_in: int
) -> None:
    model, loader = make_model(), ElasticDataLoader(TensorDataset(*make_data(BATCH * STEPS)), BATCH)
    options: dict[str, Any] = {"shared_storage_path": tmp_path / "storage", "checkpoint_interval": every}
    trainer = trainer_of(tmp_path, model, loader, **options)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

    def take(epoch: int) -> None:
        with trainer.epoch(epoch):
            for inputs, targets in loader:
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                if epoch == fails_in:
                    raise InterruptedError

    with trainer:
        for epoch in range(3):
            with contextlib.suppress(InterruptedError):
                take(epoch)
    assert trainer.global_step == 2 * STEPS + 1
    expected = {f"step_{trainer.global_step}"} if every is not BY_EPOCHS or fails_in == 2 else set()
    if every is BY_EPOCHS:
        expected |= {f"epoch_{epoch + 1}" for epoch in range(3) if epoch != fails_in}
    assert set(saved_in(tmp_path / "storage")) == expected
