"""Accelerated: training that Hugging Face accelerate has prepared, with the trainer's steps in place of its own.

Nothing here imports accelerate: its objects are known by what they hold, so that a script without it never loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from elastic_ext.errors import StepError
from elastic_ext.training.steps.state import StepState

__all__ = ["Accelerated", "bare_optimizer", "bare_scheduler", "is_prepared"]

_OWN_WAYS = {
    "DEEPSPEED": "DeepSpeed's engine divides losses, accumulates and shares gradients and steps optimizers by itself",
    "MEGATRON_LM": "Megatron-LM runs whole steps by itself, backward passes and optimizers included",
    "XLA": "on XLA accelerate's own optimizer shares gradients, in its step()",
}


class Scaler(Protocol):
    """The part of an ``ElasticScaler`` that steps of an accelerator go through."""

    def scale(self, outputs: Any) -> Any: ...
    def unscale_(self, optimizer: Any) -> None: ...
    def step(self, optimizer: Any, *arguments: Any) -> Any: ...
    def update(self) -> None: ...


class ScaledOptimizer(Protocol):
    """The part of an ``ElasticOptimizer`` that steps through a scaler need."""

    scaled_by: Callable[..., Any] | None

    @property
    def has_stepped(self) -> bool: ...


class Accelerated:
    """An ``accelerate.Accelerator`` whose steps are the trainer's, from ``begin`` to ``end``.

    It then divides no loss, its ``sync_gradients`` says whether the micro-step ends a step, and its ``accumulate()``
    neither counts nor keeps gradients from being shared: all of that it reads from its gradient state, so one of ours
    stands in for it.
    """

    def __init__(self, accelerator: Any) -> None:
        if not hasattr(accelerator, "gradient_state") or not hasattr(accelerator, "distributed_type"):
            raise ValueError(
                f"accelerator is a {type(accelerator).__name__}; allowed: an accelerate.Accelerator, or None"
            )
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind in _OWN_WAYS:
            raise ValueError(
                f"the accelerator is one of {kind}, where {_OWN_WAYS[kind]}; allowed: one process, DDP and FSDP2"
            )
        self._accelerator = accelerator
        self._scaler: Any = getattr(accelerator, "scaler", None)  # the one that it was found with
        self._elastic_scaler: Scaler | None = None
        self._given: dict[ScaledOptimizer, Any] = {}  # what was given to prepare(), by what steps through the scaler
        self._ours: _TrainersSteps | None = None  # while it is in the place of its gradient state

    @property
    def num_ranks(self) -> int:
        """The data-parallel degree that the accelerator cuts its loaders for."""
        plan = getattr(self._accelerator, "parallelism_config", None)
        num_processes: int = self._accelerator.num_processes
        return num_processes if plan is None else num_processes // int(plan.non_data_parallel_size)

    def scaler_beside(self, given: object) -> Any:
        """The scaler that takes part in the steps: the accelerator's where it has one, else the one that was given."""
        if self._scaler is None:
            return given
        if given is not None:
            raise ValueError(
                "a scaler was given to prepare(), and the accelerator has one of its own, which optimizer.step() goes "
                "through; leave it out"
            )
        return self._scaler

    def scale(self, optimizers: Iterable[tuple[ScaledOptimizer, Any]], scaler: Scaler | None, state: StepState) -> None:
        """Have ``optimizers``, each with the object that the user gave for it, step through the accelerator's scaler.

        Nothing happens where the accelerator has no scaler.
        """
        if self._scaler is not None and scaler is not None:
            self._elastic_scaler = scaler
            self._given = dict(optimizers)
            steps = _ScaledSteps(scaler, self._given, state)
            for optimizer in self._given:
                optimizer.scaled_by = steps.step

    def scaled(self, loss: Any) -> Any:
        """``loss`` multiplied by the accelerator's scale, if it has a scaler, as ``accelerator.backward`` does."""
        return loss if self._elastic_scaler is None else self._elastic_scaler.scale(loss)

    def unscale(self) -> None:
        """Divide gradients by the accelerator's scale, before they are clipped."""
        if self._elastic_scaler is not None:
            for optimizer in self._given:
                self._elastic_scaler.unscale_(optimizer)

    def begin(self, is_committing: Callable[[], bool]) -> None:
        """Have the accelerator go by the trainer's steps, by another gradient state; ``end`` undoes that."""
        theirs = self._accelerator.gradient_state
        if isinstance(theirs, _TrainersSteps):  # of a trainer before, which was not closed
            theirs = theirs.theirs
        self._ours = _TrainersSteps(theirs, is_committing)
        self._accelerator.gradient_state = self._ours
        if self._elastic_scaler is not None:
            self._accelerator.scaler = self._elastic_scaler

    def end(self) -> None:
        """Leave the accelerator as it was found. Twice is allowed."""
        ours, self._ours = self._ours, None
        if ours is not None and self._accelerator.gradient_state is ours:
            self._accelerator.gradient_state = ours.theirs
            self._accelerator.scaler = self._scaler


class _ScaledSteps:
    """Steps through a scaler, as an ``AcceleratedOptimizer`` takes them, which unscales, steps and updates at once."""

    def __init__(self, scaler: Scaler, optimizers: dict[ScaledOptimizer, Any], state: StepState) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
        self._state = state
        self._called: tuple[int, set[int]] = (state.number, set())  # in the step of that number

    def step(self, optimizer: ScaledOptimizer, *closure: Any) -> Any:
        optimizer.scaled_by = None  # the scaler calls the optimizer's step() in its turn
        try:
            result = self._scaler.step(optimizer, *closure)
        finally:
            optimizer.scaled_by = self.step
        state = self._state
        if not state.phase.is_last:
            return result
        number, called = self._called
        if number != state.number:
            self._called = (state.number, called := set())
        called.add(id(optimizer))
        given = self._optimizers[optimizer]
        if _is_wrapped(given, "optimizer"):
            given._is_overflow = not optimizer.has_stepped  # what accelerator.optimizer_step_was_skipped looks at
        if len(called) == len(self._optimizers):
            self._scaler.update()
        return result


class _TrainersSteps:
    """Stands in for an accelerator's ``GradientState``: steps are the trainer's, what it knows of loaders its own."""

    num_steps = 1
    sync_with_dataloader = False

    def __init__(self, theirs: Any, is_committing: Callable[[], bool]) -> None:
        self.theirs = theirs
        # accumulate() is not to keep gradients to a rank either: the trainer does so, where that is right.
        self.plugin_kwargs = {**theirs.plugin_kwargs, "num_steps": 1, "sync_each_batch": True}
        self._is_committing = is_committing

    @property
    def sync_gradients(self) -> bool:
        return self._is_committing()

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        raise StepError(
            f"accelerator.sync_gradients was set to {value}, and the trainer decides it; set global_batch_size, or use "
            "trainer.step(fix_total_batch_size=False) to have a micro-step commit"
        )

    def _set_sync_gradients(self, value: bool) -> None:
        """Ignore what ``accumulate()`` has counted by itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # not there yet: while it is made, copied or unpickled
            raise AttributeError(name)
        return getattr(self.theirs, name)


def is_prepared(thing: object) -> bool:
    """Whether accelerate has prepared ``thing``: a model, an optimizer or a scheduler."""
    return bool(getattr(thing, "_is_accelerate_prepared", False)) or _is_wrapped(thing, "optimizer", "scheduler")


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer that an ``AcceleratedOptimizer`` steps; any other as it is."""
    while _is_wrapped(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def bare_scheduler(scheduler: Any) -> Any:
    """The scheduler that an ``AcceleratedScheduler`` steps once per process; any other as it is."""
    while _is_wrapped(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    target: Any = getattr(scheduler, "optimizer", None)
    if _is_wrapped(target, "optimizer"):
        # torch looks there whether step() was called before the schedule's; the bare one's is called instead of it.
        target._opt_called = True
    return scheduler


def _is_wrapped(thing: Any, *names: str) -> bool:
    held = getattr(thing, "__dict__", {})
    return "gradient_state" in held and any(name in held for name in names)
