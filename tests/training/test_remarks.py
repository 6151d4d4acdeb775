"""What is said once about a loop: which loops it is said of, and of which not. The sentences are in mistakes/."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from elastic_ext.training.batches import Batches
from elastic_ext.training.checks import EpochsOfSampler, num_unshared
from elastic_ext.training.counters import Counts
from elastic_ext.training.optimizers.prepared import check_optimizers, remarks_on_optimizers
from elastic_ext.training.remarks import EpochLength, Remarks, remark_on_length
from tests.support.ranks import RankPool
from tests.support.training import ResumableSlices, Slices, bits_of, make_data, make_model, shared, trainer_of


def test_a_remark_is_said_once_of_its_kind_and_by_the_rank_that_is_to(caplog: pytest.LogCaptureFixture) -> None:
    remarks, silent = Remarks(), Remarks()
    silent.are_logged = False
    with caplog.at_level(logging.WARNING):
        for kind, text in (("a", "one"), ("a", "two"), ("b", "three")):
            remarks.say(kind, text)
            silent.say(kind, text)
    assert [record.message for record in caplog.records] == [
        "one (this warning is logged once)",
        "three (this warning is logged once)",
    ]


# ---- schedules ----


def _falling(step: int, *, num_training_steps: int) -> float:
    return 1.0 - step / num_training_steps


def schedule_of(kind: str, length: int) -> Any:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    warm = lr_scheduler.LinearLR(optimizer, total_iters=10)
    made: dict[str, Any] = {
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, length),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, total_iters=length),
        "polynomial": lambda: lr_scheduler.PolynomialLR(optimizer, total_iters=length),
        "milestones": lambda: lr_scheduler.MultiStepLR(optimizer, [length // 2, length]),
        "partial": lambda: lr_scheduler.LambdaLR(optimizer, partial(_falling, num_training_steps=length)),
        "sequence": lambda: lr_scheduler.SequentialLR(
            optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, length - 10)], [10]
        ),
        "chain": lambda: lr_scheduler.ChainedScheduler([lr_scheduler.CosineAnnealingLR(optimizer, length)]),
        "steps": lambda: lr_scheduler.StepLR(optimizer, length),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=length),
    }
    return made[kind]()


WITH_A_LENGTH = ["cosine", "one cycle", "linear", "polynomial", "milestones", "partial", "sequence", "chain"]
EPOCH = EpochLength(num_batches=100, batch_samples=16)


@pytest.mark.parametrize("kind", WITH_A_LENGTH)
def test_a_length_that_was_counted_in_micro_batches_is_told_with_both_numbers(kind: str) -> None:
    told = remark_on_length(schedule_of(kind, 400), EPOCH, 64)
    assert told is not None and told.may_be_right and told.num_steps == 100
    words = ": right for 16 epochs of 25 steps each; if training has 4 epochs, 400 counts the 100 micro-batches "
    assert words in told.text
    assert told.text.endswith(": give it the number of steps, 100")


def test_the_sentence_of_a_cosine_has_both_readings_of_its_length() -> None:
    told = remark_on_length(schedule_of("cosine", 400), EPOCH, 64)
    assert told is not None and told.text == (
        "CosineAnnealingLR has T_max 400, and steps once per step of the global batch of 64 samples: right for 16 "
        "epochs of 25 steps each; if training has 4 epochs, 400 counts the 100 micro-batches of each, as "
        "len(dataloader) gives them, and the schedule would not come to its end: give it the number of steps, 100"
    )


def test_a_length_of_no_whole_number_of_epochs_is_right_for_none() -> None:
    told = remark_on_length(schedule_of("cosine", 100), EPOCH, 60)
    assert told is not None and not told.may_be_right
    assert "of 60 samples: no whole number of epochs; if training has one epoch, 100 counts the 100 " in told.text
    assert told.text.endswith(" would not come to its end: give it the number of steps, 27")


@pytest.mark.parametrize(("max_steps", "is_said"), [(100, True), (400, False), (600, False)])
def test_a_loop_that_says_how_many_steps_it_takes_is_told_of_a_longer_schedule_alone(
    max_steps: int, is_said: bool
) -> None:
    told = remark_on_length(schedule_of("cosine", 400), EPOCH, 64, max_steps)
    assert (told is not None) == is_said and (told is None or not told.may_be_right)


@pytest.mark.parametrize("kind", [*WITH_A_LENGTH, "steps", "lambda", "plateau"])
@pytest.mark.parametrize(
    ("length", "epoch", "global_batch"),
    [
        (100, EPOCH, 16),  # a step is a micro-batch
        (250, EPOCH, 64),  # no whole number of epochs
        (75, EPOCH, 64),  # three epochs of steps
        (400, EpochLength(num_batches=4, batch_samples=16), 64),  # too few for a multiple to say anything
        (101 * 4, EpochLength(num_batches=101, batch_samples=16), 17),  # an epoch's steps are nearly as many
    ],
)
def test_nothing_is_said_of_a_length_that_counts_steps(
    kind: str, length: int, epoch: EpochLength, global_batch: int
) -> None:
    assert remark_on_length(schedule_of(kind, length), epoch, global_batch) is None


@pytest.mark.parametrize("kind", ["steps", "lambda", "plateau"])
def test_nothing_is_said_of_a_schedule_without_a_length(kind: str) -> None:
    assert remark_on_length(schedule_of(kind, 400), EPOCH, 64) is None


def test_the_length_of_an_epoch_is_what_a_script_counts() -> None:
    data = TensorDataset(*make_data(50))
    assert Batches(DataLoader(data, batch_size=4)).epoch_length(2) == EpochLength(num_batches=13, batch_samples=8)
    assert Batches(Slices(make_data(50), 4)).epoch_length(2) == EpochLength(num_batches=13, batch_samples=4)
    assert Batches(Slices(make_data(50), 4, is_endless=True)).epoch_length(2) is None
    assert Batches(None, global_batch_size=8, micro_batch_size=4).epoch_length(2) is None


@pytest.mark.parametrize("steps_where", ["within", "after"])
def test_a_schedule_that_steps_after_epochs_counts_those(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps_where: str
) -> None:
    caplog.set_level(logging.INFO)
    model, bare = make_model(), None
    bare = SGD(model.parameters(), lr=0.1)
    source = Slices(make_data(64), 4)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=16)
    optimizer, scheduler = trainer.prepare(bare, lr_scheduler.CosineAnnealingLR(bare, 16))
    for epoch in range(2):
        with trainer.epoch(epoch):
            for inputs, targets in source:
                with trainer.step():
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    if steps_where == "within":
                        scheduler.step()
                    optimizer.zero_grad()
            if steps_where == "after":
                scheduler.step()
    trainer.close()
    told = [each for each in caplog.records if "has T_max" in each.message]
    assert [each.levelname for each in told] == ["INFO"] * (steps_where == "within")
    assert all(each.levelname == "INFO" for each in caplog.records)


LENGTH = "CosineAnnealingLR has T_max "
ENDED = "training has ended after 2 epochs of 4 steps, and CosineAnnealingLR has T_max 32, which counts the 16 "


@pytest.mark.parametrize(
    ("length", "num_epochs", "ends"),
    [(32, 8, []), (32, 2, [("WARNING", ENDED)]), (32, 3, []), (8, 2, [])],
)
def test_a_length_that_may_be_right_is_mentioned_once_and_warned_of_where_training_ends_as_if_it_were_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int, num_epochs: int, ends: list[tuple[str, str]]
) -> None:
    """A run of one epoch, and another that is resumed from it: the second says nothing of the length as it begins."""
    caplog.set_level(logging.INFO)
    for until in (1, num_epochs):
        model, source = make_model(), ResumableSlices(make_data(64), 4)
        bare = SGD(model.parameters(), lr=0.1)
        trainer = trainer_of(tmp_path, model, source, global_batch_size=16, shared_storage_path=tmp_path / "storage")
        optimizer, scheduler = trainer.prepare(bare, lr_scheduler.CosineAnnealingLR(bare, length))
        with trainer:
            for epoch in range(trainer.start_epoch, until):
                with trainer.epoch(epoch):
                    for inputs, targets in source:
                        with trainer.step():
                            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            scheduler.step()
                            optimizer.zero_grad()
            trainer.save_checkpoint()
    told = [(each.levelname, each.message) for each in caplog.records if LENGTH in each.message]
    begins = [("INFO", f"{LENGTH}32, and steps once per step")] if length == 32 else []
    expected = [*begins, *ends]
    assert [level for level, _ in told] == [level for level, _ in expected]
    assert all(text.startswith(words) for (_, text), (_, words) in zip(told, expected, strict=True))


@pytest.mark.parametrize(("batch", "num_said"), [(16, 1), (5, 0)])
def test_a_schedule_as_long_as_steps_were_is_told_of_when_they_become_larger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int, num_said: int
) -> None:
    caplog.set_level(logging.INFO)
    model, source = make_model(), Slices(make_data(64), 4)
    bare = SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=4)
    optimizer, scheduler = trainer.prepare(bare, lr_scheduler.CosineAnnealingLR(bare, 32))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if trainer.global_step == 3:
                assert not [each for each in caplog.records if "T_max" in each.message]
                trainer.propose({"global_batch_size": batch}, "to see")
        assert trainer.global_batch_size == batch
    told = "CosineAnnealingLR has T_max 32, and steps once per step of the global batch of 16 samples: right for 8 "
    found = [each for each in caplog.records if "T_max" in each.message]
    assert [(each.levelname, each.message.startswith(told)) for each in found] == [("INFO", True)] * num_said


# ---- samplers ----


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(8))


class Unsized(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> int:
        return index


def test_samplers_that_share_nothing_out_are_those_that_give_as_many_samples_as_the_dataset_has() -> None:
    data = TensorDataset(*make_data(8))
    prepared = DataLoader(data, batch_size=2)
    prepared._is_accelerate_prepared = True
    own: Any = torch.utils.data.BatchSampler
    of_a_user = type("OfAUser", (own,), {})(RandomSampler(data), 2, False)
    assert [
        num_unshared(loader)
        for loader in (
            DataLoader(data, batch_size=2),
            DataLoader(data, batch_size=2, shuffle=True),
            DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0)),
            DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(4))),
            DataLoader(data, batch_sampler=of_a_user),
            DataLoader(Numbers(), batch_size=2),
            DataLoader(Unsized(), batch_size=2, sampler=range(4)),
            DataLoader(data, batch_size=None),
            prepared,
            None,
            [1, 2],
        )
    ] == [8, 8, *[None] * 9]


def datasets_of_their_own(rank: int, folder: Path) -> int:
    """As many batches on each rank, of datasets that differ in length by less than a batch."""
    records: list[Any] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[assignment]
    logging.getLogger("elastic_ext").addHandler(handler)
    data = TensorDataset(*make_data(34 if rank else 33))
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = shared(make_model(), 2)
    trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=8)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.close()
    logging.getLogger("elastic_ext").removeHandler(handler)
    return len(records)


def test_nothing_is_said_where_each_rank_has_a_dataset_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, datasets_of_their_own, tmp_path) == [0, 0]


def test_an_epoch_of_the_sampler_is_missed_where_two_epochs_in_a_row_had_the_same() -> None:
    data = TensorDataset(*make_data(8))
    sampler: Any = DistributedSampler(data, 2, 0)

    def told(epochs: list[tuple[int, int]], **options: bool) -> list[bool]:
        sampler.shuffle = options.get("shuffle", True)
        seen = EpochsOfSampler(DataLoader(data, batch_size=2, sampler=sampler))
        found = []
        for epoch, of_sampler in epochs:
            sampler.set_epoch(of_sampler)
            found.append(seen.end(epoch) is not None)
        return found

    assert told([(0, 0), (1, 0), (2, 0)]) == [False, True, True]
    assert told([(0, 0), (1, 1), (2, 2)]) == [False, False, False]
    assert told([(0, 0), (0, 0)]) == [False, False]  # the epoch again
    assert told([(0, 0), (2, 0)]) == [False, False]
    assert told([(5, 7), (6, 7)]) == [False, True]
    assert told([(0, 0), (1, 0)], shuffle=False) == [False, False]
    assert EpochsOfSampler(DataLoader(data, batch_size=2, shuffle=True)).end(0) is None
    assert EpochsOfSampler(None).end(0) is None


# ---- optimizers ----


def kinds_of(model: nn.Module, *optimizers: Any) -> list[str]:
    check_optimizers(model, optimizers)
    return [kind for kind, _ in remarks_on_optimizers(model, optimizers)]


def test_optimizers_of_a_model_are_those_that_have_something_of_it() -> None:
    model, other = make_model(), make_model()
    assert kinds_of(model, SGD(model.parameters(), lr=0.1)) == []
    assert kinds_of(model, SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters())) == []
    assert kinds_of(model, SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)) == []  # half of a GAN
    assert kinds_of(model, SGD(model[2].parameters(), lr=0.1)) == []  # the rest is not to learn
    outside = SGD([*model[2].parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
    assert kinds_of(model, outside) == ["replaced parameters"]  # it may be meant: a loss with parameters of its own
    model[0].requires_grad_(False)
    assert kinds_of(model, outside) == []
    assert kinds_of(model, SGD(model.parameters(), lr=0.1), outside) == ["parameters in two optimizers"]
    with pytest.raises(ValueError, match=r"none of the 2 optimizers given to prepare\(\) has any of the model's 2 par"):
        check_optimizers(model, [SGD(other.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)])
    model.requires_grad_(False)
    check_optimizers(model, [SGD([nn.Parameter(torch.zeros(2))], lr=0.1)])  # a prompt before a frozen model
    check_optimizers(nn.Tanh(), [SGD(other.parameters(), lr=0.1)])


def test_an_optimizer_may_step_again_after_another_backward_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, source = make_model(), Slices(make_data(32), 8)
    with trainer_of(tmp_path, model, source, global_batch_size=8) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        for inputs, targets in source:
            with trainer.step():
                for clears in (True, False, True):
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    if clears:
                        optimizer.zero_grad()
                        optimizer.step()  # by nothing
    assert caplog.records == []


# ---- epochs and schedules that were stepped elsewhere ----


def test_a_run_that_goes_on_begins_with_the_epoch_that_it_was_in() -> None:
    counts = Counts()
    assert counts.remark_on_beginning(0, is_whole=True) is None
    assert counts.remark_on_beginning(1, is_whole=True) is None, "it counts epochs from 1 on"
    counts.load_state_dict({**counts.state_dict(), "epoch": 3})
    assert counts.remark_on_beginning(3, is_whole=True) is None
    assert "training goes on in epoch 3, and the loop begins with epoch 2: it would train 1 epochs again" in str(
        counts.remark_on_beginning(2, is_whole=True)
    )
    later = "training goes on after step 0, in epoch 3, and the loop begins with epoch 5: "
    assert f"{later}the samples of epochs 3 to 4 that come after step 0 are left out; to train on those" in str(
        counts.remark_on_beginning(5, is_whole=True)
    )
    assert f"{later}what comes is the rest of epoch 3, and training ends 2 epochs early" in str(
        counts.remark_on_beginning(5, is_whole=False)
    )


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_bare_schedule_may_step_and_be_loaded_between_steps(tmp_path: Path, micro_batch: int) -> None:
    """As the prepared one would: an epoch's schedule counts no steps."""
    models = []
    for is_bare in (False, True):
        model, source = make_model(), Slices(make_data(32), micro_batch)
        bare = SGD(model.parameters(), lr=0.1)
        schedule = lr_scheduler.StepLR(bare, 1, gamma=0.5)
        with trainer_of(tmp_path, model, source, global_batch_size=8) as trainer:
            optimizer, scheduler = trainer.prepare(bare, schedule)
            for epoch in range(3):
                with trainer.epoch(epoch):
                    for inputs, targets in source:
                        with trainer.step():
                            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            optimizer.zero_grad()
                stepped = schedule if is_bare else scheduler
                stepped.step()
                stepped.load_state_dict(stepped.state_dict())
        models.append(bits_of(model))
    assert models[0] == models[1]
