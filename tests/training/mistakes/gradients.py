"""Gradients: changed, cleared, weighed or shared otherwise than a step gathers them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import Training

__all__ = ["GRADIENTS"]

GRADIENTS = Room()


@GRADIENTS.cause(
    "gradients are clipped in every micro-step",
    says="gradients were changed in a micro-step that does not end a step, after its backward pass, as "
    "clip_grad_norm_() and a GradScaler's unscale_() do: accumulated gradients would be scaled again and again; call "
    "trainer.clip_grad_norm_(), give the scaler to prepare(), or do it `if trainer.sync_gradients:`",
    comes_as="StepError",
    found="sampled",
    num_ranks=(1, 2),
)
def clips_in_every_micro_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            training.finish()


@GRADIENTS.cause(
    "the model's zero_grad() clears what a step gathers",
    says="the gradients of this step's earlier micro-steps are gone or replaced: something other than the optimizer's "
    "zero_grad() has cleared or changed them, such as model.zero_grad(); call optimizer.zero_grad(), which waits for "
    "the step to end",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def clears_gradients_in_every_micro_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.model.zero_grad()
            training.learn(inputs, targets)


@GRADIENTS.cause(
    "a GradScaler that was not prepared steps in every micro-step",
    says="a GradScaler that was not given to prepare() steps in every micro-step: it counts these in place of "
    "steps, and ",
    comes_as="warning",
    found="first steps",
)
def steps_through_a_bare_scaler(training: Training) -> None:
    training.prepare()
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in training.batches:
        with training.trainer.step():
            scaler.scale(training.loss(inputs, targets)).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()


@GRADIENTS.cause(
    "a GradScaler that was not prepared updates in every micro-step",
    says="a GradScaler's step() or update() was called in a micro-step that does not end a step, where there are no ",
    comes_as="StepError",
    found="at once",
)
def updates_a_bare_scaler(training: Training) -> None:
    training.prepare()
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in training.batches:
        with training.trainer.step():
            scaler.scale(training.loss(inputs, targets)).backward()
            if training.trainer.sync_gradients:
                scaler.step(training.optimizer)
            scaler.update()


@GRADIENTS.cause(
    "a GradScaler that was not prepared unscales in every micro-step",
    says="scaler.unscale_() was called in a micro-step that does not end a step, so accumulated gradients ",
    comes_as="StepError",
    found="at once",
)
def unscales_too_early(training: Training) -> None:
    training.prepare()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for inputs, targets in training.batches:
        with training.trainer.step():
            scaler.scale(training.loss(inputs, targets)).backward()
            scaler.unscale_(training.optimizer)
            scaler.step(training.optimizer)
            scaler.update()


@GRADIENTS.cause(
    "a GradScaler is asked to update between two micro-steps",
    says="scaler.update() was called between two micro-steps of a step; call it within `with "
    "trainer.step():`, or between two steps",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def updates_the_scale_between_micro_steps(training: Training) -> None:
    training.prepare(scaler=torch.amp.GradScaler("cpu"))
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.scaler.scale(training.loss(inputs, targets)).backward()
            training.scaler.step(training.optimizer)
        training.scaler.update()


@GRADIENTS.cause(
    "the loss does not go through the model",
    says="gradients came from a loss that does not go through the model's outputs, so they do not count as a part of "
    "the step; call trainer.backward(loss) instead of loss.backward()",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def learns_from_the_parameters_alone(training: Training) -> None:
    training.prepare()
    for inputs, _ in training.batches:
        with training.trainer.step():
            training.model(inputs)
            sum(part.square().sum() for part in training.model.parameters()).backward()
            training.finish()


@GRADIENTS.cause(
    "the model is called before the step",
    says="gradients came in a micro-step in which the model itself was not called, but a part of it, or before the "
    "step, so they do not count as a part of the step: call model(...) within `with trainer.step():`, or else call "
    "trainer.backward(loss) instead of loss.backward()",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def calls_the_model_before_the_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        loss = training.loss(inputs, targets)
        with training.trainer.step():
            loss.backward()
            training.finish()


@GRADIENTS.cause(
    "a gradient is differentiated, as for a penalty",
    says="the model cannot weigh its own gradients here: its gradient was differentiated; call trainer.backward(loss) ",
    comes_as="StepError",
    found="at once",
)
def differentiates_twice(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            inputs.requires_grad_()
            loss = training.loss(inputs, targets)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + slope.square().sum()).backward()
            training.finish()


class Wrapped(nn.Module):
    """A model that gives an object of its own kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(inputs))


@GRADIENTS.cause(
    "the model's output hides its tensors",
    says="the model cannot weigh its own gradients here: its output holds a SimpleNamespace, whose tensors it cannot ",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def hides_the_outputs(training: Training) -> None:
    training.model = Wrapped(training.model)
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            nn.functional.cross_entropy(training.model(inputs).logits, targets).backward()  # type: ignore[no-untyped-call]
            training.finish()


@GRADIENTS.cause(
    "no_sync() is still used by hand",
    says="no_sync(), set_requires_gradient_sync() or set_requires_all_reduce() was used, and otherwise than "
    "the trainer ",
    comes_as="StepError",
    found="at once",
    num_ranks=(2,),
)
def keeps_gradients_unshared_by_hand(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            with training.model.no_sync():
                loss = training.loss(inputs, targets)
            loss.backward()
            training.finish()


@GRADIENTS.cause(
    "the model within DDP is called instead of DDP",
    says="optimizer.step() was called in a micro-step that ends a step, and no backward pass through the model went ",
    comes_as="StepError",
    found="at once",
    num_ranks=(2,),
)
def calls_the_model_within_ddp(training: Training) -> None:
    training.prepare(global_batch_size=8)
    for inputs, targets in training.batches:
        with training.trainer.step():
            nn.functional.cross_entropy(training.bare_model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            training.finish()


@GRADIENTS.cause(
    "items are counted in some micro-steps of a step, and not in others",
    says=re.compile(
        r"backward passes with num_items and without were mixed in one step: without here, and otherwise before; call "
        r"trainer\.backward\(loss_sum, num_items=\.\.\.\) in every micro-step, .*"
    ),
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def counts_items_now_and_then(training: Training) -> None:
    training.prepare()
    for number, (inputs, targets) in enumerate(training.batches):
        with training.trainer.step():
            loss = training.loss(inputs, targets)
            if number == 0:
                training.trainer.backward(loss * len(inputs), num_items=len(inputs))
            else:
                training.trainer.backward(loss)
            training.finish()


@GRADIENTS.cause(
    "a step has no items at all",
    says="the num_items of the step add up to 0 over all ranks; allowed: more than 0",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def counts_no_items(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.trainer.backward(training.loss(inputs, targets) * 0, num_items=0)
            training.finish()


@GRADIENTS.cause(
    "trainer.backward() is called between two steps",
    says="trainer.backward() was called outside of `with trainer.step():`",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def learns_outside_of_a_step(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        training.trainer.backward(training.loss(inputs, targets))


@GRADIENTS.cause(
    "items are counted of gradients that are divided by a factor of one's own",
    says="num_items needs gradients that are averaged over the ranks, and this model's are divided by a "
    "factor of its own",
    comes_as="StepError",
    found="at once",
    num_ranks=(2,),
    is_mended=False,
)
def divides_gradients_by_hand(training: Training) -> None:
    model: Any = fully_shard(training.bare_model)
    model.set_gradient_divide_factor(3.0)
    training.model = model
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.trainer.backward(training.loss(inputs, targets), num_items=len(inputs))
            training.finish()


@GRADIENTS.cause(
    "zero_grad() is forgotten",
    says="gradients of the step before are still there as a step begins its backward pass: zero_grad() was not called, "
    "and gradients add up from step to step, as torch has them. Call optimizer.zero_grad() once in the loop, unless it "
    "is meant",
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
)
def forgets_zero_grad(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.step()


@GRADIENTS.cause(
    "zero_grad() stands between backward and step",
    says="optimizer.step() was called, and no parameter of the optimizer has a gradient: zero_grad() was called "
    "between backward() and step(), and cleared them; call it after optimizer.step(), or before the forward pass. ",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def clears_before_it_steps(training: Training) -> None:
    training.prepare(global_batch_size=4 * training.num_ranks)
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets).backward()
            training.optimizer.zero_grad()
            training.optimizer.step()


@GRADIENTS.cause(
    "the loss is still divided by the number of micro-batches",
    says=re.compile(
        r"the loss is multiplied by 0\.(25|5) before backward\(\), and a step has (4|2) micro-batches, each of which "
        r"counts by its part of the step already: a mean over them would be (4|2) times as large\. .* unless it is "
        r"meant.*"
    ),
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
)
def divides_the_loss(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            (training.loss(inputs, targets) / training.trainer.num_micro_steps).backward()
            training.finish()


@GRADIENTS.cause(
    "the loss is a sum over its micro-batch",
    says=re.compile(
        r"the loss is a sum over the 4 samples of its micro-batch, and a step of (4|2) micro-batches weighs them as "
        r"means: .* or trainer\.backward\(loss, num_items=4\), which divides by the items of the whole step.*"
    ),
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
)
def sums_its_losses(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            loss: Any = nn.functional.cross_entropy(training.model(inputs), targets, reduction="sum")
            loss.backward()
            training.finish()


@GRADIENTS.cause(
    "backward() is forgotten",
    says="optimizer.step() was called, and no parameter of the optimizer has a gradient: no backward() came to them in "
    "this step; call loss.backward() before optimizer.step(). The step was taken back",
    comes_as="StepError",
    found="at once",
)
def forgets_backward(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.loss(inputs, targets)
            training.finish()


@GRADIENTS.cause(
    "backward() is left out in some micro-steps",
    says="1 of the 4 micro-steps of a step called the model and had no backward(): their samples count as trained on, "
    "and the gradient is that of 3 micro-batches divided by 4. Call loss.backward() in every micro-step; where a batch "
    "is not to count, trainer.backward(loss * 0, num_items=0)",
    comes_as="warning",
    found="sampled",
)
def leaves_backward_out(training: Training) -> None:
    training.prepare()
    for number, (inputs, targets) in enumerate(training.batches):
        with training.trainer.step():
            loss = training.loss(inputs, targets)
            if number % 4:
                loss.backward()
            training.finish()


@GRADIENTS.cause(
    "no_grad() is left on by a validation",
    says="gradients are switched off here (torch.no_grad(), torch.inference_mode() or torch.set_grad_enabled(False), "
    "left on by a validation, maybe); switch them on for training",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def leaves_gradients_off(training: Training) -> None:
    training.prepare()
    with torch.no_grad():
        for inputs, targets in training.batches:
            with training.trainer.step():
                training.learn(inputs, targets)


@GRADIENTS.cause(
    "losses are kept with their graphs",
    says="the graphs of 2 steps in a row are still held: something keeps losses or outputs together with what they "
    "were computed from, and memory grows with every step. Keep loss.item() or loss.detach() instead",
    comes_as="warning",
    found="first steps",
    num_ranks=(1, 2),
)
def keeps_its_losses(training: Training) -> None:
    training.prepare()
    kept = []
    for inputs, targets in training.batches:
        with training.trainer.step():
            kept.append(training.loss(inputs, targets))
            kept[-1].backward()
            training.finish()
