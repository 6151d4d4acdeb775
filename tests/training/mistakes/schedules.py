"""Schedules: of another length, order or optimizer than the steps they count."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import lr_scheduler

from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import Training

__all__ = ["SCHEDULES"]

SCHEDULES = Room()


@SCHEDULES.cause(
    "the schedule steps before its optimizer",
    says="scheduler.step() was called before optimizer.step(); call it after, in the same step",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def steps_the_schedule_first(training: Training) -> None:
    bare = training.sgd()
    training.prepare(bare, lr_scheduler.StepLR(bare, 100))
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.scheduler.step()
            training.optimizer.step()
            training.optimizer.zero_grad()


@SCHEDULES.cause(
    "the schedule belongs to another optimizer",
    says="lr_scheduler belongs to another optimizer than those given to prepare(); give both together",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def schedules_another_optimizer(training: Training) -> None:
    training.prepare(training.sgd(), lr_scheduler.StepLR(training.sgd(), 100))


@SCHEDULES.cause(
    "the schedule steps between two micro-steps",
    says="scheduler.step() was called between two micro-steps of a step; call it within `with "
    "trainer.step():`, or between two steps",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def steps_the_schedule_after_the_block(training: Training) -> None:
    bare = training.sgd()
    training.prepare(bare, lr_scheduler.StepLR(bare, 100))
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.step()
        training.scheduler.step()


@SCHEDULES.cause(
    "the bare schedule steps in every micro-step",
    says="the bare CosineAnnealingLR's step() was called within `with trainer.step():`, where it steps in every "
    "micro-step; call that of the scheduler that prepare() returned, which steps once per step",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def steps_the_bare_schedule(training: Training) -> None:
    bare = training.sgd()
    schedule = lr_scheduler.CosineAnnealingLR(bare, 100)
    training.prepare(bare, schedule)
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()


@SCHEDULES.cause(
    "the schedule's length was counted in micro-batches",
    says="training has ended after one epoch of 4 steps, and CosineAnnealingLR has T_max 16, which counts the 16 "
    "micro-batches of it, as len(dataloader) gives them: the schedule has not come to its end; give it the number of "
    "steps, 4",
    comes_as="warning",
    found="at the end",
    num_ranks=(1, 2),
)
def counts_micro_batches(training: Training) -> None:
    bare, loader = training.sgd(), training.elastic_loader()
    training.prepare(bare, lr_scheduler.CosineAnnealingLR(bare, len(loader)), loader=loader)
    training.go_on()


@SCHEDULES.cause(
    "a warm-up in transformers' way was counted in micro-batches",
    says="training has ended after one epoch of 4 steps, and LambdaLR has num_training_steps 16, which counts the 16 "
    "micro-batches of it",
    comes_as="warning",
    found="at the end",
)
def counts_micro_batches_in_a_partial_function(training: Training) -> None:
    bare, loader = training.sgd(), training.elastic_loader()
    falling = partial(_falling, num_training_steps=len(loader))
    training.prepare(bare, lr_scheduler.LambdaLR(bare, falling), loader=loader)
    training.go_on()


def _falling(step: int, *, num_training_steps: int) -> float:
    return 1.0 - step / num_training_steps


@SCHEDULES.cause(
    "the bare schedule is made of others and steps by itself",
    says="the bare SequentialLR's step() was called within `with trainer.step():`",
    comes_as="StepError",
    found="at once",
    num_committed=0,
)
def steps_a_bare_sequence(training: Training) -> None:
    bare = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    parts = [lr_scheduler.LinearLR(bare, total_iters=2), lr_scheduler.CosineAnnealingLR(bare, 98)]
    schedule = lr_scheduler.SequentialLR(bare, parts, [2])
    training.prepare(bare, schedule)
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()


_NOT_GIVEN = (
    "learning rates have changed between two micro-steps of a step, as where a scheduler that was not given to "
    "prepare() steps in each of them: it steps {num} times per step, so that its rates change {num} times too fast"
)


@SCHEDULES.cause(
    "a schedule that was not given to prepare() steps in every micro-step",
    says=_NOT_GIVEN.format(num=4),
    comes_as="warning",
    found="first steps",
)
def leaves_the_schedule_out(training: Training) -> None:
    bare = training.sgd()
    schedule = lr_scheduler.CosineAnnealingLR(bare, 100)
    training.prepare(bare)
    _train_under(schedule, training)


@SCHEDULES.cause(
    "a schedule made after prepare() steps in every micro-step, and the optimizer at the end of steps alone",
    says=_NOT_GIVEN.format(num=2),
    comes_as="warning",
    found="first steps",
    num_ranks=(2,),
)
def leaves_the_schedule_of_a_prepared_optimizer_out(training: Training) -> None:
    training.prepare()
    _train_under(lr_scheduler.ExponentialLR(training.optimizer, 0.9), training, always_steps=False)


def _train_under(schedule: lr_scheduler.LRScheduler, training: Training, *, always_steps: bool = True) -> None:
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            if always_steps or training.trainer.sync_gradients:
                training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()
