"""Epochs, and what lies around steps: begun within one another, in the wrong order, or not where training goes on."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import Training

__all__ = ["EPOCHS"]

EPOCHS = Room()


@EPOCHS.cause(
    "a step stands within a step",
    says="trainer.step() was entered inside another `with trainer.step():`",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def steps_within_a_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step(), training.trainer.step():
            training.learn(inputs, targets)


@EPOCHS.cause(
    "an epoch stands within an epoch",
    says="trainer.epoch() was entered inside another `with trainer.epoch():`",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def begins_an_epoch_within_an_epoch(training: Training) -> None:
    training.prepare()
    with training.trainer.epoch(0), training.trainer.epoch(0):
        training.go_on()


@EPOCHS.cause(
    "the loop runs without prepare()",
    says="prepare() was not called; call it with the optimizer, on every rank, before the loop",
    comes_as="ElasticError",
    found="at once",
)
def forgets_to_prepare(training: Training) -> None:
    training.make()
    with training.trainer.step():
        pass


@EPOCHS.cause(
    "prepare() is called for each optimizer",
    says="prepare() was called before; give it all optimizers and schedulers at once",
    comes_as="ElasticError",
    found="at once",
    num_ranks=(1, 2),
)
def prepares_again(training: Training) -> None:
    training.prepare()
    training.prepare()


@EPOCHS.cause(
    "a checkpoint is saved in the middle of a step",
    says="a checkpoint was asked for in the middle of a step; save and load between two steps",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def saves_within_a_step(training: Training) -> None:
    training.prepare(shared_storage_path=training.folder / "storage")
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.learn(inputs, targets)
            training.trainer.save_checkpoint()


@EPOCHS.cause(
    "a checkpoint is saved by a trainer that keeps none",
    says="this trainer keeps no checkpoints; give it shared_storage_path",
    comes_as="ElasticError",
    found="at once",
    num_ranks=(1, 2),
    num_committed=4,
)
def saves_nowhere(training: Training) -> None:
    training.prepare()
    training.go_on()
    training.trainer.save_checkpoint()


@EPOCHS.cause(
    "an epoch is left in the middle of a step",
    says="1 of 4 micro-steps of a step were dropped: the epoch ended before the step did",
    comes_as="warning",
    found="at once",
    is_mended=False,
)
def leaves_an_epoch_in_a_step(training: Training) -> None:
    training.prepare()
    with training.trainer.epoch(0):
        for inputs, targets in training.batches:
            with training.trainer.step():
                training.learn(inputs, targets)
            break


@EPOCHS.cause(
    "set_epoch() of the DistributedSampler is forgotten",
    says="epochs 0 and 1 had the same order of samples: the DistributedSampler shuffles by its epoch, which "
    "was 0 in both; "
    "call dataloader.sampler.set_epoch(epoch) before each loop, or use an ElasticDataLoader, which needs no such call",
    comes_as="warning",
    found="at once",
    num_ranks=(1, 2),
    is_mended=False,
)
def forgets_the_samplers_epoch(training: Training) -> None:
    sampler: Any = DistributedSampler(training.dataset, training.num_ranks, training.rank)
    training.prepare(loader=training.torch_loader(sampler=sampler))
    for epoch in range(4):
        with training.trainer.epoch(epoch):
            training.next_loop()
            training.go_on()


@EPOCHS.cause(
    "a resumed loop begins with epoch 0",
    says="training goes on in epoch 2, and the loop begins with epoch 0: it would train 2 epochs again; loop over "
    "range(trainer.start_epoch, num_epochs)",
    comes_as="warning",
    found="at once",
    num_ranks=(1, 2),
    is_mended=False,
)
def begins_at_zero_after_a_resume(training: Training) -> None:
    training.prepare()
    for epoch in range(2):
        with training.trainer.epoch(epoch):
            training.next_loop()
            training.go_on()
    state = training.trainer.state_dict()
    training.trainer.close()
    training.trainer = None
    training.make()
    training.trainer.load_state_dict(state)
    training.prepare()
    for epoch in range(3):
        with training.trainer.epoch(epoch):
            training.next_loop()
            training.go_on()


@EPOCHS.cause(
    "model.eval() is left on by a validation",
    says="the model is trained in evaluation mode (model.training is False): dropout is off, and batch norms use what "
    "they have gathered. Call model.train() before the loop and after each validation, unless it is meant",
    comes_as="warning",
    found="sampled",
    num_ranks=(1, 2),
)
def trains_in_evaluation_mode(training: Training) -> None:
    training.prepare()
    training.model.eval()
    training.go_on()


@EPOCHS.cause(
    "a validation within the step makes graphs",
    says="the model was called 2 times in evaluation mode within a micro-step, with gradients, and no backward() came "
    "of it: such a validation makes a graph in each pass. Put it between two steps, or under torch.no_grad()",
    comes_as="warning",
    found="sampled",
)
def validates_within_the_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.model.eval()
            for _ in range(2):
                training.loss(inputs, targets)
            training.model.train()
            training.learn(inputs, targets)
