"""Optimizers: of other parameters than the model's, or stepped where the trainer does not know of it."""

from __future__ import annotations

import re

import torch
from torch import nn

from tests.support.training import make_model
from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import Training

__all__ = ["OPTIMIZERS"]

OPTIMIZERS = Room()


@OPTIMIZERS.cause(
    "the bare optimizer steps in place of the prepared one",
    says="the bare optimizer's step() was called within `with trainer.step():`; call that of the one that prepare() ",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def steps_the_bare_optimizer(training: Training) -> None:
    bare = training.sgd()
    training.prepare(bare)
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            bare.step()


@OPTIMIZERS.cause(
    "the optimizer steps outside of the step",
    says="optimizer.step() was called outside of `with trainer.step():`",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def steps_after_the_block(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
        training.optimizer.step()


@OPTIMIZERS.cause(
    "a prepared optimizer is prepared again",
    says="optimizer is an ElasticOptimizer; give the one that it was made from, its `inner`",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def prepares_an_optimizer_twice(training: Training) -> None:
    training.prepare()
    training.trainer.close()
    optimizer, training.trainer, training.is_prepared = training.optimizer, None, False
    training.prepare(optimizer)


@OPTIMIZERS.cause(
    "the optimizer was made of another model",
    says="the optimizer given to prepare() has none of the model's 4 parameters, which would stay as they "
    "are: it was made "
    "of another model, or before this one was wrapped, sharded or converted; make it afterwards, of the "
    "parameters() of "
    "the model that ElasticTrainer is given",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def trains_another_model(training: Training) -> None:
    training.prepare(torch.optim.SGD(make_model().parameters(), lr=0.1))


@OPTIMIZERS.cause(
    "a layer was replaced after the optimizer was made",
    says="optimizers have 2 parameters that are not the model's, and 2 of the model's that need gradients are in no "
    "optimizer (2.weight, 2.bias): these do not learn, as where a layer was replaced after the optimizer "
    "was made; make "
    "the optimizer afterwards, or set requires_grad_(False) on what is not to learn",
    comes_as="warning",
    found="at once",
)
def replaces_a_layer(training: Training) -> None:
    optimizer = training.sgd()
    training.bare_model[2] = nn.Linear(16, 5, dtype=torch.float64)
    training.prepare(optimizer)


@OPTIMIZERS.cause(
    "a parameter is in two optimizers",
    says="1 of 4 parameters are in more than one optimizer (0.bias), and each of these changes them in every "
    "step; give ",
    comes_as="warning",
    found="at once",
)
def gives_a_parameter_to_two_optimizers(training: Training) -> None:
    first, second = training.sgd(), torch.optim.AdamW([training.bare_model[0].bias], lr=1e-3)
    training.prepare([first, second])


@OPTIMIZERS.cause(
    "the optimizer steps twice by the same gradients",
    says="SGD.step() was called twice in one step, and no gradient came between the calls: the parameters "
    "were changed 2 "
    "times by 1 backward pass; call it once, or once after each backward pass",
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
)
def steps_twice(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.step()
            training.finish()


@OPTIMIZERS.cause(
    "no optimizer is prepared",
    says="no optimizer was given; give at least one",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def prepares_no_optimizer(training: Training) -> None:
    training.prepare([])


@OPTIMIZERS.cause(
    "the model is given as the optimizer",
    says="optimizer is a Sequential; allowed: a torch.optim.Optimizer",
    comes_as="ValueError",
    found="at once",
)
def prepares_the_model(training: Training) -> None:
    training.prepare(training.model)


@OPTIMIZERS.cause(
    "a list of scalers is given as the scaler",
    says="scaler is a list; allowed: one torch.amp.GradScaler, for all optimizers",
    comes_as="ValueError",
    found="at once",
)
def prepares_two_scalers(training: Training) -> None:
    training.prepare(scaler=[torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")])


@OPTIMIZERS.cause(
    "an optimizer that evaluates its closure again has steps of several micro-batches",
    says="an optimizer failed in the middle of its step (0 of 1 had ended): parameters may be half updated; "
    "resume from a ",
    comes_as="TornStepError",
    found="at once",
)
def evaluates_a_closure_often(training: Training) -> None:
    training.prepare(torch.optim.LBFGS(training.model.parameters(), lr=0.1))
    for inputs, targets in training.batches:

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            loss: torch.Tensor = training.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with training.trainer.step():
            training.optimizer.step(closure)


@OPTIMIZERS.cause(
    "what one of two optimizers is not to learn comes into its gradients",
    says="parameters of an optimizer got gradients after its step(), and its zero_grad() would clear those of the ",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def mixes_the_gradients_of_two(training: Training) -> None:
    parts = training.bare_model
    first, second = torch.optim.SGD(parts[0].parameters(), lr=0.1), torch.optim.SGD(parts[2].parameters(), lr=0.1)
    training.prepare([first, second])
    for inputs, targets in training.batches:
        with training.trainer.step():
            for optimizer in training.optimizer:
                training.loss(inputs, targets).backward()
                optimizer.step()
                training.optimizer[0].zero_grad()


@OPTIMIZERS.cause(
    "the optimizer steps within backward, before ranks have shared their gradients",
    says="optimizer.step() was called within a backward pass, where the ranks have not shared their "
    "gradients; on several",
    comes_as="StepError",
    found="at once",
    num_ranks=(2,),
    is_mended=False,
)
def steps_within_backward(training: Training) -> None:
    last = training.bare_model[2].bias
    training.prepare(global_batch_size=8)
    last.register_post_accumulate_grad_hook(lambda _: training.optimizer.step())
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()


@OPTIMIZERS.cause(
    "torch updates parameters within backward",
    says="parameters of the model are updated within backward (_apply_optimizer_in_backward), in every "
    "micro-step, before ",
    comes_as="ValueError",
    found="at once",
)
def updates_within_backward(training: Training) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    _apply_optimizer_in_backward(torch.optim.SGD, [training.bare_model[0].weight], {"lr": 0.1})
    training.prepare()


@OPTIMIZERS.cause(
    "a step is rolled back after its optimizer has stepped",
    says="an optimizer has stepped, so the step cannot be rolled back; leave it before optimizer.step()",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
    num_committed=1,
)
def rolls_back_too_late(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.learn(inputs, targets)
            if training.trainer.sync_gradients:
                training.trainer.rollback()


@OPTIMIZERS.cause(
    "the optimizer never steps",
    says="3 steps have ended, and no optimizer has stepped: nothing was trained. Call optimizer.step(), of the "
    "optimizer that trainer.prepare() returned, within trainer.step()",
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
    is_mended=False,
)
def never_steps(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()


@OPTIMIZERS.cause(
    "the optimizer steps in every third micro-step, as where gradients are gathered by hand",
    says="4 steps have ended, and optimizer.step() was called in 1 of them: the gradients of the others were dropped, ",
    comes_as="warning",
    found="first steps",
    is_mended=False,
)
def steps_in_every_third_micro_step(training: Training) -> None:
    training.prepare(global_batch_size=8)
    for number, (inputs, targets) in enumerate(training.batches):
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            if number % 3 == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()


@OPTIMIZERS.cause(
    "two optimizers step in different rhythms",
    says="the optimizers step in different steps (5, 2 of 5), and a step counts as one where all have stepped: ",
    comes_as="warning",
    found="first steps",
    num_ranks=(1,),
    is_mended=False,
)
def steps_in_two_rhythms(training: Training) -> None:
    model = training.model
    training.prepare([torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])], global_batch_size=4)
    first, second = training.optimizer
    for number, (inputs, targets) in enumerate(training.batches):
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            for optimizer in (first, second) if number % 2 else (first,):
                optimizer.step()
            for optimizer in (first, second):
                optimizer.zero_grad()


@OPTIMIZERS.cause(
    "the loop writes its rates by hand, and the config says another",
    says=re.compile(
        r"the loop writes learning rates into param_groups by itself, 0\.1 for the first group: "
        r"optimizer\.learning_rate 0\.05 of the config acts on them as a factor of 0\.5 \(over 0\.1\), so that 0\.05 "
        r"is used; this warning is logged once"
    ),
    comes_as="warning",
    found="at once",
    num_ranks=(1, 2),
)
def writes_its_rates(training: Training) -> None:
    training.prepare(global_batch_size=4 * training.num_ranks)
    training.trainer.propose({"optimizer.learning_rate": 0.05}, "to see")
    for inputs, targets in training.batches:
        with training.trainer.step():
            for group in training.optimizer.param_groups:
                group["lr"] = 0.1
            training.learn(inputs, targets)


@OPTIMIZERS.cause(
    "the loop writes its weight decay by hand, and the config says another",
    says=re.compile(
        r"a revision of the config \(to see\) was refused, version 0 stays in force: rank 0: optimizer: the loop "
        r"writes weight decay into param_groups by itself, 0\.01 of late, so that a value of the config would not act; "
        r".*"
    ),
    comes_as="warning",
    found="at once",
)
def writes_its_weight_decay(training: Training) -> None:
    training.prepare(training.sgd(weight_decay=0.1), global_batch_size=4)
    training.trainer.propose({"optimizer.weight_decay": 0.2}, "to see")
    for inputs, targets in training.batches:
        with training.trainer.step():
            for group in training.optimizer.param_groups:
                group["weight_decay"] = 0.01
            training.learn(inputs, targets)


@OPTIMIZERS.cause(
    "the gradients are not finite",
    says="the gradients of 4 of 4 parameters were not finite in the step after step 1, and optimizers have used them: ",
    comes_as="warning",
    found="sampled",
    num_ranks=(1, 2),
)
def steps_by_what_is_not_finite(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            (training.loss(inputs, targets) * (float("nan") if training.trainer.global_step == 1 else 1.0)).backward()
            training.finish()


@OPTIMIZERS.cause(
    "the gradients are not finite where such a step is not to be",
    says="the gradients of 4 of 4 parameters were not finite in the step after step 1; the step was taken back, and ",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
    num_committed=1,
)
def may_not_step_by_what_is_not_finite(training: Training) -> None:
    training.prepare(when_not_finite="stop")
    for inputs, targets in training.batches:
        with training.trainer.step():
            (training.loss(inputs, targets) * (float("nan") if training.trainer.global_step == 1 else 1.0)).backward()
            training.finish()
