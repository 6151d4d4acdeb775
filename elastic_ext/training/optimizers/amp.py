"""ElasticScaler: torch's GradScaler, taking part in steps; and all that is used of a GradScaler's private parts."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ext.errors import StepError
from elastic_ext.training.steps.state import StepState

if TYPE_CHECKING:
    from .optimizer import ElasticOptimizer

__all__ = ["ElasticScaler"]

_OWN = ("inner", "_optimizers", "_state", "_is_enabled", "_kept_in", "_sizes", "_left_out_in")
_USED = ("scale", "unscale_", "step", "update", "is_enabled")
_HANDED = ("grad_scale", "found_inf")  # to an optimizer that unscales in its own step, for as long as that takes
_SIZES = ("_scale", "_growth_tracker")  # None until something is scaled
_NEVER = -1


class ElasticScaler:
    """``scaler``, which unscales, steps and updates where the trainer's step ends; all else is the scaler's own.

    It takes the optimizers that ``trainer.prepare()`` returned, and those that were given to it for the same.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[ElasticOptimizer], *, state: StepState) -> None:
        _check(scaler)
        self.inner = scaler
        """The scaler that does the work."""
        self._optimizers = {id(name): each for each in optimizers for name in (each, each.inner)}
        self._state = state
        self._is_enabled: bool = scaler.is_enabled()
        self._kept_in = _NEVER  # the number of the step before whose update there were these sizes
        self._sizes: list[torch.Tensor] = []
        self._left_out_in = _NEVER  # the number of the step in which an optimizer was not stepped

    @property  # type: ignore[misc]  # object has it writable
    def __class__(self) -> Any:
        """The wrapped scaler's class, so that ``isinstance(..., GradScaler)`` holds for this object."""
        return type(self.inner)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale where the step ends, else do nothing."""
        if self._is_acting("unscale_"):
            self.inner.unscale_(self._optimizers.get(id(optimizer), optimizer))

    def step(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """Step the optimizer where the trainer's step ends and no gradient is infinite, else do nothing."""
        prepared = self._optimizers.get(id(optimizer))
        if not self._is_acting("step"):
            return None if prepared is None else prepared.step(*arguments, **options)  # which gathers, too
        num_stepped = self._state.num_stepped
        try:
            result = self.inner.step(optimizer if prepared is None else prepared, *arguments, **options)
            if self._state.num_stepped == num_stepped:
                self._left_out_in = self._state.number
                if self._is_enabled and self._state.phase.is_inside and self._state.on_left_out is not None:
                    self._state.on_left_out()
            return result
        finally:
            if prepared is not None:  # after an exception torch leaves them, and would divide by their product next
                for name in _HANDED:
                    vars(prepared.inner).pop(name, None)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale where the step ends, else do nothing."""
        if self._is_acting("update"):
            state = self._state
            may_come_again = state.phase.is_inside and state.num_begun == 0
            if may_come_again and self._kept_in != state.number:
                self._kept_in = state.number
                held = [getattr(self.inner, name, None) for name in _SIZES]
                self._sizes = [size.clone() for size in held if size is not None]
            self.inner.update(new_scale)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: while it is made, copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped scaler, unless it is one of this class's own."""
        object.__setattr__(self if name in _OWN else self.inner, name, value)

    def __repr__(self) -> str:
        return f"ElasticScaler({self.inner!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an ElasticScaler cannot be copied or pickled; use its state_dict()")

    # ---- for the trainer ----

    @property
    def leaves_out(self) -> bool:
        """Whether the scaler has kept an optimizer from stepping in the step under way, for infinities."""
        return self._left_out_in == self._state.number

    def rollback(self) -> None:
        """Put the scale back to before the step under way; called while that step has its number."""
        self.forget()
        if self._kept_in == self._state.number:
            for name, size in zip(_SIZES, self._sizes, strict=False):  # none of a scaler that has not scaled
                getattr(self.inner, name).copy_(size)

    def forget(self) -> None:
        """Forget the infinities found in a step that an exception has left, maybe before ``update()``."""
        if self._is_enabled:
            self.inner._per_optimizer_states.clear()

    def _is_acting(self, name: str) -> bool:
        """Whether a call of the method ``name`` does what it does in torch: where a step ends, and outside of steps."""
        state = self._state
        if state.phase.is_inside:
            return state.phase.is_last
        if state.index > 0:
            raise StepError(
                f"scaler.{name}() was called between two micro-steps of a step; call it within `with trainer.step():`, "
                "or between two steps"
            )
        return True


def _check(scaler: Any) -> None:
    """Raise where this is not a scaler, or one that keeps its state otherwise than torch's did so far."""
    if type(scaler) is ElasticScaler:
        raise ValueError("this scaler is an ElasticScaler already; give the one that it was made from")
    if not all(callable(getattr(scaler, name, None)) for name in _USED):
        raise ValueError(f"scaler is a {type(scaler).__name__}; allowed: one torch.amp.GradScaler, for all optimizers")
    if not scaler.is_enabled():
        return
    has_stages = isinstance(getattr(scaler, "_per_optimizer_states", None), MutableMapping)
    sizes = [getattr(scaler, name, "missing") for name in _SIZES]
    if not has_stages or not all(size is None or isinstance(size, torch.Tensor) for size in sizes):
        raise ValueError(
            f"{type(scaler).__name__} of torch {torch.__version__} keeps its state otherwise than this version of "
            "elastic_ext can put back when a step is rolled back; do not give it to prepare(), and call its "
            "unscale_(), step() and update() `if trainer.sync_gradients:`"
        )
