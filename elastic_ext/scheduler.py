"""ElasticLRScheduler: a schedule of torch's, stepping with the steps of its optimizer that commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .accelerator import bare_optimizer
from .errors import StepError
from .step_state import StepState

if TYPE_CHECKING:
    from .optimizer import ElasticOptimizer

__all__ = ["ElasticLRScheduler"]

_OWN = (
    "inner",
    "look_at_length",
    "_optimizer",
    "_state",
    "_stepped_in",
    "_early_in",
    "_counted",
    "_num_known",
    "_has_stepped_within",
    "_steps_after_each",
)
_BARE = (
    "the bare {name}'s step() was called within `with trainer.step():`, where it steps in every micro-step; call that "
    "of the scheduler that prepare() returned, which steps once per step"
)
_NEVER = -1


class ElasticLRScheduler:
    """``scheduler``, stepping once per step that commits; all else is the scheduler's own."""

    def __init__(self, scheduler: Any, optimizers: Sequence[ElasticOptimizer], *, state: StepState) -> None:
        self.inner = scheduler
        """The scheduler that does the work."""
        target = bare_optimizer(getattr(scheduler, "optimizer", None))
        found = [optimizer for optimizer in optimizers if target in (optimizer, optimizer.inner)]
        if not found:
            raise ValueError(
                "lr_scheduler belongs to another optimizer than those given to prepare(); give both together"
            )
        self._optimizer = found[0]
        self._optimizer.follows_schedule(self)
        self._state = state
        self._stepped_in = self._early_in = _NEVER  # numbers of steps
        self._counted = list(_counted(scheduler))
        self._num_known = 0  # as this object, or what lies between steps, has left the count
        self.look_at_length: Callable[[], None] = lambda: None
        """Called when it first steps within a step, and so counts steps, and when these are of another size later."""
        self._has_stepped_within = False  # a step, before this run was resumed
        self._steps_after_each = False  # of an epoch's steps, as far as the last one has shown

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step if the optimizer did in this micro-step; between steps, as after an epoch, always."""
        state = self._state
        if not state.is_inside:
            if state.index > 0:
                raise StepError(
                    "scheduler.step() was called between two micro-steps of a step; call it within "
                    "`with trainer.step():`, or after a boundary"
                )
            self.inner.step(*arguments, **options)
            state.num_scheduled += 1
        elif self._stepped_in != state.number:
            if self._optimizer.has_stepped:
                is_first, self._stepped_in = self._stepped_in == _NEVER, state.number
                if is_first:
                    self.look_at_length()
                if (error := self.bare_steps()) is not None:
                    raise error
                self.inner.step(*arguments, **options)
                self.note()
                state.num_scheduled += 1
            elif state.is_last:
                self._early_in = state.number

    @property
    def steps_within_steps(self) -> bool:
        """Whether it has ever stepped within a step, and not only between two, as after an epoch."""
        return self._has_stepped_within or self._stepped_in != _NEVER

    @property
    def may_have_ended_epoch(self) -> bool:
        """Whether it has stepped since the last step, and does not do so after each step of an epoch."""
        return not self._steps_after_each and self.bare_steps() is not None

    def remember_steps(self, within_steps: bool) -> None:
        """Take up what was saved of ``steps_within_steps``."""
        self._has_stepped_within, self._stepped_in = within_steps, _NEVER

    def get_last_lr(self) -> list[float]:
        """The effective rates, group by group."""
        return [float(rate) * self._optimizer.rates.factor for rate in self.inner.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.note()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is not this class's own is the scheduler's: ``scheduler.min_lrs = ...`` acts."""
        object.__setattr__(self if name in _OWN else self.inner, name, value)

    def __repr__(self) -> str:
        return f"ElasticLRScheduler({self.inner!r})"

    def begin_step(self, *, is_epochs_first: bool) -> None:
        """A step begins: what the schedule counts now is right."""
        has_stepped = self.bare_steps() is not None
        if not is_epochs_first:
            self._steps_after_each = has_stepped
        if has_stepped:
            self.note()

    def note(self) -> None:
        """The schedule was stepped as it should be: what it counts now is right."""
        counted = self._counted
        now = counted[0].last_epoch if len(counted) == 1 else self._num_counted()
        object.__setattr__(self, "_num_known", now)

    def bare_steps(self) -> StepError | None:
        """What is wrong where the wrapped schedule was stepped by itself since then."""
        counted = self._counted
        now = counted[0].last_epoch if len(counted) == 1 else self._num_counted()
        return None if now == self._num_known else StepError(_BARE.format(name=type(self.inner).__name__))

    def _num_counted(self) -> int:
        return sum([each.last_epoch for each in self._counted])

    def make_sure_of_order(self) -> None:
        """Raise where the schedule was asked to step before the optimizer in this step, or was stepped by itself."""
        if self._early_in == self._state.number:
            raise StepError("scheduler.step() was called before optimizer.step(); call it after, in the same step")
        if self._state.num_micro_steps > 1 and (error := self.bare_steps()) is not None:
            raise error


def _counted(scheduler: Any) -> Iterator[Any]:
    """What counts a schedule's steps: itself, and those that it is made of."""
    if isinstance(getattr(scheduler, "last_epoch", None), int):
        yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _counted(part)
