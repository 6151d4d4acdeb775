"""What a model takes of its device's memory: its state from its parameters, its passes worked out beside training and
corrected by measurements.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elastic_ext.profile.probe import Probe
from elastic_ext.records.metrics import MemoryFacts

from .analysis_client import AnalysisClient
from .extrapolation import correction, lines_through, sizes_up_to
from .model_description import (
    FactoryOrigins,
    batch_dim,
    describe,
    dtype_name,
    names_of,
    num_bytes_of,
    optimizer_kinds,
    parameter_kinds,
)
from .peaks import Peaks
from .questions import Question
from .samples import MemorySample, Readiness, sample_on

__all__ = ["AnalyzedTraining", "Analyzer", "ModelSizes", "besides_bytes", "capacity_bytes"]

_logger = logging.getLogger(__name__)


# --- how large a model in training is, whole, whatever part of it a rank has; and what else its device holds ---------


class ModelSizes:
    """The bytes of one model's parameters, gradients, buffers and optimizer state.

    They are looked up anew each time, since optimizers make their state as they step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], blocks: Sequence[nn.Module]) -> None:
        self._model, self._optimizers, self._blocks = model, optimizers, blocks

    @property
    def parameter_bytes(self) -> int:
        return _whole(self._model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters that are trained."""
        return _whole(each for each in self._model.parameters() if each.requires_grad)

    @property
    def optimizer_bytes(self) -> int:
        states = [each for optimizer in self._optimizers for each in optimizer.state.values()]
        values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
        return _whole(value for value in values if isinstance(value, torch.Tensor))

    @property
    def buffer_bytes(self) -> int:
        return _whole(self._model.buffers())

    @property
    def block_bytes(self) -> int:
        """Bytes of the parameters of the largest block."""
        return max((_whole(block.parameters()) for block in self._blocks), default=0)

    @property
    def other_bytes(self) -> int:
        """Bytes of the parameters that are in no block."""
        in_blocks = {id(each) for block in self._blocks for each in block.parameters()}
        return _whole(each for each in self._model.parameters() if id(each) not in in_blocks)


def capacity_bytes(device: torch.device) -> int | None:
    """The bytes of device memory that this process may take; None where that is not known."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(free + torch.cuda.memory_reserved(device), allowed))


def besides_bytes(device: torch.device, allocated_bytes: int, sizes: ModelSizes) -> int:
    """Bytes that a CUDA device holds for this process between steps beside a whole model.

    They are its other tensors, and pieces of memory that its allocator has and cannot use.
    """
    known = sizes.parameter_bytes + sizes.optimizer_bytes + sizes.buffer_bytes
    split = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    return max(allocated_bytes - known, 0) + int(split)


def _whole(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors; for sharded ones, what all ranks hold of them together."""
    return sum(each.numel() * each.element_size() for each in tensors if not is_lazy(each))


# --- what a model takes, worked out beside training and measured -----------------------------------------------------
# With a model factory each size is worked out in another process, and measured steps say by how much that is to be
# corrected. Without one, or where it cannot be worked out, what was measured is all that there is, and lines through
# it.

_RECOMPUTED_SHARES = (0.0, 1.0, 0.5)  # of blocks, that are worked out beside the present one
_MOST_MEASUREMENTS = 64
_MOST_DEPTH = 4  # of containers among what the model gives
_NO_FACTORY = (
    "no model_factory was given, so that memory is known only for the sizes of micro-batches that steps have had"
)
_NO_BATCH = (
    "loss_fn is given, and no batch was seen to call it with: loop over an ElasticDataLoader, or call "
    "trainer.run(function, batch)"
)
_ROWS = (
    "the model is given {} rows where a step takes {} samples at once, so the number of rows at other batch sizes is "
    "unknown"
)
_WORKING = "the memory of micro-batches of other sizes is still being worked out"


class AnalyzedTraining(Protocol):
    """What the memory analyzer needs to know of its training at any moment."""

    @property
    def micro_batch(self) -> int:
        """The most samples that a rank takes at once."""

    @property
    def samples_per_step(self) -> int:
        """The most samples that one rank takes in a step, over all its micro-steps; 0 where that is not known."""

    @property
    def num_micro_steps(self) -> int:
        """How many micro-steps the step under way has."""

    @property
    def recomputed_share(self) -> float:
        """The share of blocks whose activations are computed again."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole model."""

    @property
    def may_sample(self) -> bool:
        """Whether nobody else measures the memory of the step that begins."""

    @property
    def is_bounded(self) -> bool:
        """Whether somebody has set a limit for memory, where the machine has no accelerator that has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shapes:
    """The shapes and types of the inputs that a model was given, and how many samples these were."""

    num_samples: int
    num_rows: int
    """Rows in the dimension of tensors that counts samples: several rows may be of one sample."""
    given: Mapping[str, Any]
    options: Mapping[str, Any]
    batch: Mapping[str, Any] | None
    autocast: str | None

    def num_bytes(self, num_samples: int) -> int:
        """Bytes of these inputs with ``num_samples`` samples; a batch contains what the model is given."""
        num_rows = num_samples * self.num_rows // self.num_samples
        passed = num_bytes_of(self.given, num_rows) + num_bytes_of(self.options, num_rows)
        return passed if self.batch is None else max(passed, num_bytes_of(self.batch, num_rows))


class Analyzer:
    """Measures and works out what memory one rank's steps take; Surveyor calls it in micro-steps, Probe in passes."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        probe: Probe,
        training: AnalyzedTraining,
        *,
        blocks: Sequence[nn.Module] = (),
        factory: FactoryOrigins | None = None,
    ) -> None:
        """``model`` is the one that holds the parameters, without a wrapper; ``blocks`` are what it repeats."""
        self._model, self._optimizers = model, tuple(optimizers)
        self._probe, self._training = probe, training
        self._factory = factory
        self._sizes = ModelSizes(model, self._optimizers, blocks)
        self._blocks = tuple(blocks)
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._batch: Any = None  # the last batch, until the shapes of a forward pass's inputs are kept
        self._shapes: _Shapes | None = None
        self._why_not = _NO_FACTORY if factory is None else ""
        self._outputs: list[weakref.ref[Any]] = []
        self._client: AnalysisClient | None = None
        self._readiness = Readiness(self._device)
        self._measurement: MemorySample | None = None
        self._measurement_key: tuple[int, float] = (0, 0.0)  # samples of the micro-step measured, recomputed share
        self._is_first = False  # whether the micro-step that is measured is the first of its step
        self._measured: dict[tuple[int, float], Peaks] = {}
        # Of first micro-steps, by the largest micro-batch and the share of blocks computed again: a step's first
        # micro-batch may be smaller.
        self._tried: set[tuple[int, float]] = set()
        self._update_bytes: int | None = None
        self._besides_bytes = 0
        self._num_measurements = 0
        self.wants_batch = True
        """Whether ``see_batch`` is to be called with the coming batches."""
        probe.watcher = self

    # ---- what it is told ----

    def see_batch(self, batch: Any) -> None:
        """Take in a batch, from which the next passes take their inputs."""
        if self.wants_batch:
            self._batch = batch

    def see_inputs(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Take in the inputs of a forward pass that begins."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # where sizes are no numbers
            return
        micro_batch = self._training.micro_batch
        found = batch_dim((arguments, dict(options)), micro_batch)
        if found is None:
            self._refuse("the model is given no tensor, or its first one is not dense or has no dimension of samples")
            return
        dim, num_rows = found
        num_samples = min(num_rows, micro_batch or num_rows)
        if self._measurement is not None:  # of several passes the largest
            self._measurement_key = max(num_samples, self._measurement_key[0]), self._measurement_key[1]
        if self._shapes is None and num_samples > 0:
            self._keep_shapes(arguments, options, dim, num_rows=num_rows, num_samples=num_samples)

    def see_outputs(self, outputs: Any) -> None:
        """Take in the outputs of a forward pass that has ended."""
        if self._measurement is not None:
            self._measurement.end_forward()
        if self._client is None and self._factory is not None:
            with suppress(RuntimeError, TypeError):  # a kind of tensor that tells of no memory
                self._outputs = [weakref.ref(each.untyped_storage()) for each in _tensors_in(outputs, _MOST_DEPTH)]

    def see_end_of_pass(self) -> None:
        """Take in that a backward pass has ended."""
        if self._client is None and self._factory is not None and self._shapes is not None and not self._why_not:
            keeps = any(each() is not None for each in self._outputs)
            self._outputs.clear()
            self._ask(self._factory, self._shapes, keeps_outputs=keeps)
        if self._measurement is None:
            self._probe.watcher = None  # until there is a sample to be taken

    def enter(self, micro_step: int) -> None:
        """Begin a micro-step that may be measured."""
        training = self._training
        self._is_first = micro_step == 0
        if self._is_first:
            key = training.micro_batch, training.recomputed_share
            is_new = key not in self._tried
        else:  # the last micro-step has the optimizer's step, whose memory is measured once
            is_new = self._update_bytes is None and micro_step + 1 == training.num_micro_steps
            key = self._measurement_key
        if not is_new or self._num_measurements >= _MOST_MEASUREMENTS:
            return
        if not (self._is_of_use and training.is_whole and training.may_sample and self._readiness.can_sample()):
            return
        self._num_measurements += 1
        if self._is_first:
            self._tried.add(key)
        self._measurement_key = 0, key[1]  # until the model is given some
        sample = sample_on(self._device, self._model.parameters())
        try:
            sample.begin()
        except RuntimeError as error:  # somebody else has begun to profile
            _logger.debug("the memory of a step is not measured: %s", error)
            return
        self._measurement, self._probe.watcher = sample, self
        self._probe.tell_phases(sample.see)

    def leave(self) -> None:
        """End the micro-step, which has ended or failed."""
        sample, self._measurement = self._measurement, None
        if sample is None:
            return
        self._probe.tell_phases(None)
        self._probe.watcher = None
        shapes, (num_samples, share) = self._shapes, self._measurement_key
        num_samples = num_samples or self._training.micro_batch  # inputs without a size count as a full micro-batch
        try:
            peaks = sample.end(0 if shapes is None else shapes.num_bytes(num_samples))
        except (RuntimeError, ValueError) as error:  # somebody else has ended the profile
            _logger.debug("the memory of a step was not measured: %s", error)
            return
        if peaks is None or not peaks.backward_bytes:  # the micro-step failed, or its passes were not seen
            return
        if peaks.update_bytes is not None:
            self._update_bytes = max(peaks.update_bytes, self._update_bytes or 0)
        if self._is_first and num_samples > 0 and not sample.had_gradients:
            self._measured[num_samples, share] = peaks
            if sample.base_bytes is not None:
                self._besides_bytes = besides_bytes(self._device, sample.base_bytes, self._sizes)

    def close(self) -> None:
        """End the analysis: training ends. Closing twice is allowed."""
        self.leave()
        self._probe.watcher = None
        self._batch, self.wants_batch = None, False
        if self._client is not None:
            self._client.close()

    # ---- what is known ----

    def facts(self) -> MemoryFacts | None:
        """What is known of the model's memory now, without waiting.

        None where nothing is, and where what was worked out is to be compared with a micro-step that can be measured.
        """
        answers = () if self._client is None else self._client.answers
        problems = [each.problem for each in answers if each.problem is not None]
        worked_out = tuple(each.passes for each in answers if each.passes is not None)
        measured = tuple(
            peaks.passes(micro_batch=size, activation_checkpoint=share)
            for (size, share), peaks in self._measured.items()
        )
        sizes = self._sizes
        scale, why_not = correction(measured, worked_out, sizes.gradient_bytes)
        problem = "".join(problems[:1])
        why_not = self._why_not or why_not or ("" if worked_out else problem or _WORKING)
        if why_not and not measured:
            return None
        if not why_not and not measured and self._may_be_measured:
            return None  # what was worked out is to be compared first
        passes = worked_out
        if why_not:
            largest = self._training.samples_per_step or max(each.micro_batch for each in measured)
            passes, scale = lines_through(measured, sizes_up_to(largest)), 1.0
        updates = [each.update_bytes for each in answers if each.update_bytes is not None]
        flops = [each.flops_per_sample for each in answers if each.flops_per_sample is not None]
        kept = [each.block_activation_bytes for each in answers if each.block_activation_bytes and not why_not]
        return MemoryFacts(
            source="measured" if why_not else "fake",
            why_measured=why_not or problem,  # with the source ``fake``, why some sizes were not worked out
            parameter_bytes=sizes.parameter_bytes,
            gradient_bytes=sizes.gradient_bytes,
            optimizer_bytes=sizes.optimizer_bytes,
            buffer_bytes=sizes.buffer_bytes,
            block_bytes=sizes.block_bytes,
            other_bytes=sizes.other_bytes,
            update_bytes=max([*updates, self._update_bytes or 0]),
            flops_per_sample=flops[0] if flops else None,
            block_activation_bytes=kept[0] if kept else (),
            passes=passes,
            scale=round(scale, 4),
            besides_bytes=self._besides_bytes,
            capacity_bytes=capacity_bytes(self._device),
        )

    @property
    def client(self) -> AnalysisClient | None:
        """The handle of the process that predicts the memory of steps; None where none was started."""
        return self._client

    # ---- what follows ----

    @property
    def _is_of_use(self) -> bool:
        """Whether measuring memory is of use: there is an accelerator, a model factory or a limit.

        Without an accelerator it takes a profile of a step, and there may be no limit to keep to.
        """
        return self._device.type != "cpu" or self._factory is not None or self._training.is_bounded

    @property
    def _may_be_measured(self) -> bool:
        """Whether the first sample is still to come. One that could not be kept is not waited for again."""
        is_to_come = not self._tried or self._measurement is not None
        is_possible = self._training.is_whole and not self._readiness.is_refused
        return is_to_come and is_possible and self._num_measurements < _MOST_MEASUREMENTS

    def _refuse(self, why: str) -> None:
        self._why_not = self._why_not or why
        self._batch, self.wants_batch = None, False

    def _keep_shapes(
        self, arguments: tuple[Any, ...], options: Mapping[str, Any], dim: int, *, num_rows: int, num_samples: int
    ) -> None:
        batch, self._batch, self.wants_batch = self._batch, None, False
        given = arguments, dict(options), batch
        try:
            self._shapes = _shapes_of(given, dim, num_rows, num_samples=num_samples, kind=self._device.type)
        except (ValueError, RuntimeError) as error:
            self._refuse(
                f"what the model or the loss is given cannot be described to the process that predicts memory: {error}"
            )
            return
        if num_rows > num_samples and self._factory is not None:
            self._refuse(_ROWS.format(num_rows, num_samples))
        if batch is None and self._factory is not None and self._factory.loss is not None:
            self._refuse(_NO_BATCH)

    def _ask(self, factory: FactoryOrigins, shapes: _Shapes, *, keeps_outputs: bool) -> None:
        training = self._training
        present, now = training.recomputed_share, max(training.micro_batch, shapes.num_samples)
        largest = max(training.samples_per_step, now)
        shares = (present, *_RECOMPUTED_SHARES) if self._blocks else (0.0,)
        try:
            question = Question(
                main=factory.main,
                factory=factory.model,
                loss=factory.loss,
                parameters=parameter_kinds(self._model),
                is_training=self._model.training,
                autocast=shapes.autocast,
                given=shapes.given,
                options=shapes.options,
                batch=shapes.batch,
                keeps_outputs=keeps_outputs,
                blocks=names_of(self._model, self._blocks),
                micro_batches=tuple(sizes_up_to(largest, shapes.num_samples, now)),
                ratios=tuple(dict.fromkeys(shares)),
                optimizers=optimizer_kinds(self._model, self._optimizers, is_on_accelerator=self._device.type != "cpu"),
            )
        except ValueError as error:
            self._refuse(str(error))
            return
        try:
            self._client = AnalysisClient(question)
            self._client.start()
        except (OSError, RuntimeError) as error:  # this process has no files or threads left
            self._refuse(f"the process that predicts memory could not be started: {error}")


def _shapes_of(
    given: tuple[tuple[Any, ...], dict[str, Any], Any], dim: int, num_rows: int, *, num_samples: int, kind: str
) -> _Shapes:
    """Shapes of arguments, options and batch on a device of this kind; ValueError for inputs that JSON cannot tell."""
    arguments, options, batch = given
    return _Shapes(
        num_samples=num_samples,
        num_rows=num_rows,
        given=describe(arguments, num_rows, dim),
        options=describe(options, num_rows, dim),
        batch=None if batch is None else describe(batch, num_rows, dim),
        autocast=dtype_name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
    )


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not (value.is_sparse or value.is_nested):
            yield value
    elif depth > 0 and isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part, depth - 1)
    elif depth > 0 and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors_in(getattr(value, name, None), depth - 1)
