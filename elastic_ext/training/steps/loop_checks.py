"""LoopChecks: what a loop does otherwise than its author believes, said once, as far as it can be meant.

It looks at the first steps and at ever fewer after them: forward and backward passes, what goes into the model, what
the loss was made by. A look costs what a few hooks do; other steps cost nothing. What cannot be meant is a StepError,
and is found where it happens.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from elastic_ext.torch_private.loss_graph import BackwardLook, factor_of, is_addition, is_sum_over, reads_graphs
from elastic_ext.torch_private.module_hooks import Hook, is_compiled, num_graphs_compiled
from elastic_ext.training.gradients.loss_weighting import callable_parts, replaced

from .state import StepState

if TYPE_CHECKING:
    from elastic_ext.training.optimizers.optimizer import ElasticOptimizer
    from elastic_ext.training.training import Training

__all__ = ["FEWER_BATCHES", "LoopChecks", "Rhythm"]

_NUM_ALIKE = 3
"""How many micro-batches of one other size are taken for a pattern, and not for chance."""
_NUM_OF_A_PATTERN = 3
"""How many steps in which an optimizer did not step are taken for a pattern, and not for chance."""
_NUM_LOSSES = 4
"""In how many first steps the graph of the loss is looked at, which takes most of a look's time."""
_NUM_COLLECTIONS = 4
"""How often garbage is collected before a graph counts as held; cycles through DDP's hooks take more than one."""

_DIVIDED = (
    "the loss is multiplied by {factor:g} before backward(), and a step has {num} micro-batches, each of which counts "
    "by its part of the step already: a mean over them would be {num} times as large. Take the division by {num} out "
    "of the loop, unless it is meant"
)
_SUMMED = (
    "the loss is a sum over the {size} samples of its micro-batch, and a step of {num} micro-batches weighs them as "
    "means: the gradient is neither the sum nor the mean over the step, and changes with the micro-batch. Use a mean "
    '(reduction="mean"), or trainer.backward(loss, num_items={size}), which divides by the items of the whole step'
)
_MISSING = (
    "{missing} of the {num} micro-steps of a step called the model and had no backward(): their samples count as "
    "trained on, and the gradient is that of {left} micro-batches divided by {num}. Call loss.backward() in every "
    "micro-step; where a batch is not to count, trainer.backward(loss * 0, num_items=0)"
)
_EVAL = (
    "the model is trained in evaluation mode (model.training is False): dropout is off, and batch norms use what they "
    "have gathered. Call model.train() before the loop and after each validation, unless it is meant"
)
_VALIDATED = (
    "the model was called {num} times in evaluation mode within a micro-step, with gradients, and no backward() came "
    "of it: such a validation makes a graph in each pass. Put it between two steps, or under torch.no_grad()"
)
_OTHER_SIZE = (
    "the model was given {found} samples, and the batch that the trainer's dataloader makes has {size}: steps are "
    "counted and weighed by the dataloader's. Give ElasticTrainer the dataloader that the loop is over, and train on "
    "whole batches; for a loop with batches of its own, micro_batch_size= in place of the dataloader"
)
_KEPT = (
    "the graphs of {num} steps in a row are still held: something keeps losses or outputs together with what they were "
    "computed from, and memory grows with every step. Keep loss.item() or loss.detach() instead"
)
_LEFT_OVER = (
    "gradients of the step before are still there as a step begins its backward pass: zero_grad() was not called, and "
    "gradients add up from step to step, as torch has them. Call optimizer.zero_grad() once in the loop, unless it is "
    "meant"
)
_NO_STEP = (
    "{num} steps have ended, and optimizer.step() was called in {stepped} of them: the gradients of the others were "
    "dropped, and their samples count as seen. trainer.step() accumulates gradients by itself: call optimizer.step() "
    "in every micro-step, where it does nothing until the step ends; or give the trainer no global_batch_size and "
    "accumulate gradients by hand"
)
_NEVER_STEPPED = (
    "{num} steps have ended, and no optimizer has stepped: nothing was trained. Call optimizer.step(), of the "
    "optimizer that trainer.prepare() returned, within trainer.step()"
)
_RHYTHMS = (
    "the optimizers step in different steps ({rhythms} of {num}), and a step counts as one where all have stepped: "
    "global_step, schedules and checkpoints by steps go by the {all} steps in which they did. Call step() of all in "
    "every step, or give prepare() only the optimizer whose steps are to count, and step the others without the trainer"
)
FEWER_BATCHES = (
    "a step of {num} micro-steps was taken with {handed} batches of the trainer's dataloader: samples that are trained "
    "on more than once, or come from elsewhere, count as the dataloader's. For such a loop give ElasticTrainer no "
    "dataloader, and micro_batch_size="
)


@dataclass(slots=True)
class _MicroStepLook:
    """What was seen of one micro-step: calls of the model, backward passes, and sizes of its inputs."""

    num_training: int = 0
    """Calls of the model in training mode, with gradients, whose outputs need some."""
    num_evaluating: int = 0
    """Calls of the model in evaluation mode, with gradients, whose outputs need some."""
    came_to_training: bool = False
    """Whether a backward pass came to the output of a call in training mode."""
    came_to_evaluating: bool = False
    """Whether a backward pass came to the output of a call in evaluation mode."""
    has_whole_batch: bool = False
    """Whether a call was given as many samples as the dataloader's batch has."""
    other_sizes: tuple[tuple[int, ...], ...] | None = None
    """The shapes of inputs of a call with fewer samples than the dataloader's batch; None where there was none."""

    @property
    def has_forward(self) -> bool:
        return self.num_training + self.num_evaluating > 0

    @property
    def has_backward(self) -> bool:
        return self.came_to_training or self.came_to_evaluating


class LoopChecks:
    """Looks for mistakes in one rank's training loop, in the first steps and in some later ones, and warns of them."""

    def __init__(self, training: Training) -> None:
        self.is_looking = False
        """Whether the step under way is looked at."""
        self.is_inside = False
        """Whether a micro-step is under way that is looked at."""
        self._model = training.model
        self._gradients = training.gradients
        self._num_compiled = num_graphs_compiled()
        self._state = training.state
        self._optimizers = training.prepared.optimizers
        self._scaler = training.prepared.scaler
        self._handles: list[RemovableHandle] = []
        self._sizes: Sequence[int] | None = None
        self._seen = _MicroStepLook()
        self._num_missing = 0
        self._other_sizes: list[tuple[tuple[int, ...], ...]] = []  # of the first micro-steps without a whole batch
        self._left: list[_LeftOver] = []  # of the step before, where several optimizers clear their own in turn
        self._graphs: dict[int, weakref.ref[Any]] = {}  # one of each step looked at, by its number
        self._look: ExitStack | None = None
        self._reads_graphs: bool | None = None

    def say(self, sentence: str, **numbers: object) -> None:
        """Log a sentence with ``numbers`` filled in, unless it was logged before."""
        self._state.remarks.say(sentence, sentence.format(**numbers))

    # ---- the step under way ----

    def begin_step(self, sizes: Sequence[int] | None) -> None:
        """Begin to look at a step; ``sizes`` are those of this rank's micro-batches, where they are known."""
        self.is_looking, self._sizes = True, sizes
        self._num_missing = 0
        if num_graphs_compiled() != self._num_compiled or any(map(is_compiled, self._model.modules())):
            return  # a compiler would make its graphs anew
        for entry in (entry for part in self._gradients.sharing.parts for entry in callable_parts(part)):
            if not isinstance(entry, torch.jit.ScriptModule):
                self._handles.append(entry.register_forward_hook(Hook(self._see_forward), with_kwargs=True))

    def begin_micro_step(self) -> None:
        """Begin to look at a micro-step."""
        self._seen, self.is_inside = _MicroStepLook(), True
        state = self._state
        if not self._handles or state.num_micro_steps == 1 or state.index > 0 or state.number >= _NUM_LOSSES:
            return
        if self._reads_graphs is None:
            self._reads_graphs = reads_graphs()
        if self._reads_graphs:
            self._look = ExitStack()
            self._look.enter_context(BackwardLook(self._see_loss))

    def end_micro_step(self) -> None:
        """End looking at a micro-step, which has ended or failed, and warn of what was seen."""
        self.is_inside = False
        if self._look is not None:
            self._look.close()
            self._look = None
        seen = self._seen
        if seen.has_forward and not seen.has_backward:
            self._num_missing += 1
        if seen.other_sizes is not None and not seen.has_whole_batch:
            self._note_other_sizes(seen.other_sizes)
        if self._left and self._state.phase.is_last:
            left, self._left = self._left, []
            if any(each.is_used for each in left):
                self.say(_LEFT_OVER)
        if seen.came_to_evaluating and not seen.num_training:
            self.say(_EVAL)
        elif seen.num_evaluating and seen.num_training and not seen.came_to_evaluating:
            self.say(_VALIDATED, num=seen.num_evaluating)

    def end_step(self, *, has_committed: bool) -> None:
        """End looking at a step, which has ended or was rolled back, and warn of what was seen."""
        self.is_looking = False
        self._left = []
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not has_committed:
            return
        num = self._state.num_micro_steps
        if 0 < self._num_missing < num:
            self.say(_MISSING, missing=self._num_missing, num=num, left=num - self._num_missing)
        self._look_for_graphs()

    def _look_for_graphs(self) -> None:
        number = self._state.number
        before = [each for step, each in self._graphs.items() if step in (number - 1, number - 2)]
        if len(before) == 2:
            for _ in range(_NUM_COLLECTIONS):
                if any(each() is None for each in before):
                    break
                gc.collect()  # what only refers to itself is no loop's
            else:
                self.say(_KEPT, num=2)
        self._graphs = {step: each for step, each in self._graphs.items() if step >= number - 1}

    # ---- what is seen ----

    def _see_forward(self, module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return
        if not self._state.phase.is_inside or not torch.is_grad_enabled():
            return
        seen = self._seen
        self._see_sizes(given, named)
        number, is_training = self._state.number, module.training

        @unserializable_hook  # type: ignore[untyped-decorator]  # outputs may be saved
        def come(gradient: torch.Tensor) -> None:
            self._see_backward(seen, is_training=is_training)

        made: list[torch.Tensor] = []
        replaced(output, lambda tensor: _noted(tensor, made))
        if not made:  # of a frozen part, for one: no backward pass can come
            return
        if is_training:
            seen.num_training += 1
        else:
            seen.num_evaluating += 1
        for tensor in made:
            tensor.register_hook(come)  # type: ignore[no-untyped-call]
        self._graphs.setdefault(number, weakref.ref(come))

    def _see_sizes(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note inputs with fewer samples than the dataloader's batch.

        More rows than samples may be nodes of graphs or tokens, and one may be many samples in a row.
        """
        index = self._state.index
        if self._sizes is None or index >= len(self._sizes):
            return
        size = self._sizes[index]
        shapes = tuple(shape for value in (*given, *named.values()) for shape in _shapes(value, size))
        if any(size in shape or (shape and shape[0] % size == 0) for shape in shapes):
            self._seen.has_whole_batch = True
        elif shapes and all(shape and 1 < shape[0] < size for shape in shapes):
            self._seen.other_sizes = shapes

    def _note_other_sizes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Warn of several micro-batches of one size that is not the dataloader's; a single one may be an epoch's last.

        Where they differ their first dimensions count something else than samples: the nodes of graphs, or the tokens
        of sequences that are packed.
        """
        if len(self._other_sizes) == _NUM_ALIKE:
            return
        found = max(shape[0] for shape in shapes)
        self._other_sizes.append(tuple(shape[:1] for shape in shapes))
        if len(self._other_sizes) == _NUM_ALIKE and len(set(self._other_sizes)) == 1:
            assert self._sizes is not None
            self.say(_OTHER_SIZE, found=found, size=self._sizes[self._state.index])

    def _see_backward(self, seen: _MicroStepLook, *, is_training: bool) -> None:
        is_first = not seen.has_backward
        if is_training:
            seen.came_to_training = True
        else:
            seen.came_to_evaluating = True
        if is_first and self._state.index == 0:
            left = [each for each in self._optimizers if each.has_left_gradients]
            if left and len(self._optimizers) == 1:
                self.say(_LEFT_OVER)
            else:  # as in a GAN, each optimizer may be cleared before its own pass
                self._left = [_LeftOver(each) for each in left]

    def _see_loss(self, loss: torch.Tensor) -> None:
        state = self._state
        product, node = factor_of(loss)
        factor = product / (1.0 if self._scaler is None else self._scaler.get_scale())
        num, size = state.num_micro_steps, None if self._sizes is None else self._sizes[0]
        is_sum = size is not None and size > 1 and is_sum_over(node, size)
        if is_sum and factor == 1.0:
            self.say(_SUMMED, size=size, num=num)
        elif is_sum and size is not None and abs(factor * size * num - 1.0) < 1e-6:  # a mean, and that divided
            self.say(_DIVIDED, factor=factor * size, num=num)
        elif abs(factor * num - 1.0) < 1e-6 and not (size == num and (is_sum or is_addition(node))):  # that is a mean
            self.say(_DIVIDED, factor=factor, num=num)


class Rhythm:
    """Notes steps in which not every optimizer stepped, and warns where that is a pattern."""

    def __init__(self, checks: LoopChecks) -> None:
        self._checks = checks
        self._num_left_out = self._num_partial = 0
        self._num_uncounted = 0

    def note(self, optimizers: Sequence[ElasticOptimizer], state: StepState, *, num_ended: int, is_known: bool) -> None:
        """Note a step that ended without committing, the last of ``num_ended`` steps since this run began.

        ``is_known`` says that the reason is known, as where a scaler saw infinities.
        """
        self._num_uncounted += 1
        num_committed = num_ended - self._num_uncounted
        if state.num_stepped:
            self._num_partial += 1
            if self._num_partial >= _NUM_OF_A_PATTERN:
                rhythms = ", ".join(str(each.num_steps) for each in optimizers)
                self._checks.say(_RHYTHMS, rhythms=rhythms, num=num_ended, all=num_committed)
        elif not is_known:
            self._num_left_out += 1
            if state.keeps_batch and self._num_left_out >= max(_NUM_OF_A_PATTERN, num_committed):
                sentence = _NO_STEP if num_committed else _NEVER_STEPPED
                self._checks.say(sentence, num=num_ended, stepped=num_committed)

    def end_epoch(self, *, num_ended: int) -> None:
        """Warn, as an epoch or training ends, if none of the ``num_ended`` steps of this run has trained anything."""
        if self._num_left_out == num_ended > 0:
            self._checks.say(_NEVER_STEPPED, num=num_ended)


class _LeftOver:
    """The first gradient that one optimizer's step has left, to see in the next step whether it was cleared."""

    def __init__(self, optimizer: ElasticOptimizer) -> None:
        self._optimizer, self._num_zeroed = optimizer, optimizer.num_zeroed
        gradient = optimizer.first_gradient
        assert gradient is not None  # it has left some
        self._gradient = weakref.ref(gradient)

    @property
    def is_used(self) -> bool:
        """Whether the optimizer has stepped with the left gradient, and no ``zero_grad()`` has cleared it.

        An optimizer that does not step in every step may clear it when it does.
        """
        optimizer = self._optimizer
        return (
            optimizer.has_stepped
            and optimizer.num_zeroed == self._num_zeroed
            and optimizer.first_gradient is self._gradient()
        )


def _noted(tensor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    if tensor.grad_fn is not None:
        made.append(tensor)
    return tensor


def _shapes(value: Any, size: int) -> Iterator[tuple[int, ...]]:
    """The shapes of tensors in nested containers; a list of one for each of ``size`` samples counts by its length."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            yield tuple(value.shape)
    elif isinstance(value, (tuple, list)):
        if len(value) == size and all(type(each) is type(value[0]) for each in value):
            yield (size,)
        for each in value:
            yield from _shapes(each, size)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _shapes(each, size)
