"""Attempts: micro-steps that are functions, and come again in smaller micro-batches where memory does not suffice.

Only a function can be run again with nothing of the first time left: what it made goes when it is left, and the
exception with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import StepUndone
from .growing import Growing
from .guarding import Guarding, StepFailure
from .steps import Steps
from .torch_private.out_of_memory import advise, is_out_of_memory, let_go

__all__ = ["Attempts"]

_Result = TypeVar("_Result")

_CANNOT_SHRINK = (
    "{}. The step was taken back. It is not taken again in smaller micro-batches, since this dataloader has a batch "
    "size of its own; use an ElasticDataLoader"
)
_NOT_GUARDED = (
    "{}. Other ranks may be waiting for this one's gradients, so training ends here, to go on from a checkpoint; "
    'ElasticTrainer(guard="always") has steps taken again wherever memory runs out, where the model allows it'
)
_CANNOT_BE_GUARDED = (
    "{}. Other ranks may be waiting for this one's gradients, so training ends here, to go on from a checkpoint: the "
    "step cannot be taken again, since "
)
_NOT_KEPT = (
    "{}. The step was taken back, but for buffers and registered state that it may have changed; "
    'ElasticTrainer(guard="always") keeps them, and has the step taken again in smaller micro-batches'
)


_OFF = "{}. The step was taken back; with ELASTIC_EXT=off micro-batches stay as large as they are"


class Attempts:
    """Micro-steps of one rank that are functions, taken again where memory does not suffice."""

    def __init__(
        self,
        steps: Steps,
        guarding: Guarding,
        *,
        has_others: Callable[[], bool],
        leaves_nothing: Callable[[], bool],
        growing: Growing | None,
    ) -> None:
        """``has_others``: passes may depend on other ranks; ``leaves_nothing``: they change nothing but gradients.

        ``growing`` has steps cut smaller, on all ranks, and tells of the failures; None where nothing may change.
        """
        self._steps = steps
        self._guarding = guarding
        self._has_others = has_others
        self._leaves_nothing = leaves_nothing
        self._growing = growing
        self.on_batch: Callable[[Any], None] | None = None
        """Called with what a function is given, before it is called."""

    def run(
        self, function: Callable[..., _Result], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> _Result | None:
        """Take a micro-step; what ``function`` gives, or None where the step comes again."""
        steps = self._steps
        if self.on_batch is not None:
            self.on_batch(_batch_of(arguments, options))
        failures: dict[int, str] | None = None
        steps.by_function, steps.failure = True, None
        try:
            with steps:
                return function(*arguments, **options)
        except StepUndone as undone:  # all ranks have heard of it
            failures = undone.failures
        except (RuntimeError, MemoryError, ValueError) as error:
            failure = steps.failure
            if failure is None or not (is_out_of_memory(error) or self._has_come_to_one(failure)):
                raise
            why_not = self._why_not(failure)
            if why_not is not None:
                advise(error, why_not)
                raise
        finally:
            steps.by_function = False
        let_go()
        largest = steps.largest
        assert largest is not None
        assert self._growing is not None
        if failures is None:
            failures = self._tell(steps.failure)
        self._growing.shrink(largest, failures)
        self._guarding.expect_again()
        return None

    def _has_come_to_one(self, failure: StepFailure) -> bool:
        """Whether a layer refuses a single sample, which it was given because memory ran out before."""
        return bool(failure.refusal) and self._growing is not None and self._growing.has_shrunk

    def _tell(self, failure: StepFailure | None) -> dict[int, str]:
        """Tell the other ranks; gives what all of them tell."""
        assert failure is not None
        try:
            self._guarding.hear(str(failure))
        except StepUndone as undone:
            return undone.failures
        raise AssertionError("a failure was told, and nothing was undone")

    def _why_not(self, failure: StepFailure) -> str | None:
        """Why the step is not taken again, None where it is."""
        if self._growing is None:
            return _OFF
        if failure.largest is None:
            return _CANNOT_SHRINK
        if failure.is_guarded:
            return None
        if self._has_others():
            why_not = self._guarding.why_not
            return (
                _NOT_GUARDED if why_not is None else _CANNOT_BE_GUARDED + why_not.replace("{", "{{").replace("}", "}}")
            )
        return None if failure.keeps_all or self._leaves_nothing() else _NOT_KEPT


def _batch_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a function is given, as a loader would have given it."""
    if options and not arguments:
        return options
    return arguments[0] if len(arguments) == 1 else arguments
