"""ElasticOptimizer and ElasticLRScheduler: torch's optimizers and schedules, taking part in steps and in changes of the
config.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.optim import Optimizer

from elastic_ext.config.follower import ConfigFollower, follow_config
from elastic_ext.errors import StepError
from elastic_ext.torch_private.engine import is_running
from elastic_ext.training.gradients.gradients import local_part
from elastic_ext.training.steps.state import StepState

from .accelerate import bare_optimizer
from .rates import OptimizerSettings, Rates

__all__ = ["NO_GRADIENTS_HERE", "ElasticLRScheduler", "ElasticOptimizer", "can_materialise", "materialise"]


# --- torch's optimizers, taking part in steps and in changes of the config -------------------------------------------

_GATHERED = (
    "parameters of an optimizer got gradients after its step(), and its zero_grad() would clear those of the step's "
    "earlier micro-steps too; keep gradients from them with requires_grad_(False) or backward(inputs=...), or make the "
    "micro-batch as large as the step"
)
_NO_GRADIENT = (
    "optimizer.step() was called, and no parameter of the optimizer has a gradient: {}. The step was taken back"
)
_NO_GRADIENT_LATER = (
    "optimizer.step() was called, and no parameter of the optimizer has a gradient, other than in steps before: {}. "
    "Nothing was changed, and the step counts; where that is meant, leave optimizer.step() out as well"
)
_NO_BACKWARD = "no backward() came to them in this step; call loss.backward() before optimizer.step()"
_CLEARED = (
    "zero_grad() was called between backward() and step(), and cleared them; call it after optimizer.step(), or before "
    "the forward pass"
)
NO_GRADIENTS_HERE = (
    "gradients are switched off here (torch.no_grad(), torch.inference_mode() or torch.set_grad_enabled(False), left "
    "on by a validation, maybe); switch them on for training"
)
_UNSHARED = (
    "optimizer.step() was called within a backward pass, where the ranks have not shared their gradients; on several "
    "ranks call it after backward"
)
_BARE_SCALER = (
    "a GradScaler that was not given to prepare() steps in every micro-step: it counts these in place of steps, and "
    "when it changes its scale in the middle of a step, accumulated gradients count too much or too little; give "
    "it to prepare(), or call its step() and update() `if trainer.sync_gradients:`"
)
_BARE_SCHEDULE = (
    "learning rates have changed between two micro-steps of a step, as where a scheduler that was not given to "
    "prepare() steps in each of them: it steps {num} times per step, so that its rates change {num} times too fast, "
    "and no checkpoint holds it; give it to prepare(), and call the step() of the scheduler that prepare() returns"
)

Closure = Callable[[], Any]
_NEVER = -1
_NUM_LOOKS = 3  # steps in which gradients that are used twice are noticed
_USED_TWICE = (
    "{name}.step() was called twice in one step, and no gradient came between the calls: the parameters were changed "
    "2 times by 1 backward pass; call it once, or once after each backward pass"
)


def _passed_on(name: str) -> Any:
    """A property that reads, sets and deletes the wrapped optimizer's attribute ``name``."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        lambda self: delattr(self.inner, name),
    )


class ElasticOptimizer(Optimizer):
    """A torch optimizer that steps when the trainer's step ends, and whose rate and weight decay follow the config.

    Alone, with ``config_file``, it follows that file by itself and passes a boundary at the end of its every
    ``step()``; all ranks make one, and ``close()`` it. ``follow`` holds more arguments for ``follow_config``.
    """

    param_groups: Any = _passed_on("param_groups")
    state: Any = _passed_on("state")
    defaults: Any = _passed_on("defaults")
    # A GradScaler hands these to an optimizer that unscales in its own step, as fused ones do, and takes them back.
    grad_scale = _passed_on("grad_scale")
    found_inf = _passed_on("found_inf")

    # Optimizer.__init__ would make parameter groups and state of its own; those of the wrapped optimizer are the ones.
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        state: StepState | None = None,
        config_file: str | Path | None = None,
        **follow: Any,
    ) -> None:
        if isinstance(optimizer, ElasticOptimizer):
            raise ValueError("optimizer is an ElasticOptimizer; give the one that it was made from, its `inner`")
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}; allowed: a torch.optim.Optimizer")
        self.inner = optimizer
        """The optimizer that does the work."""
        self._state = state
        self._begun_in = self._stepped_in = self._mixed_in = _NEVER  # numbers of steps
        self._may_zero = any(part.grad is not None for group in optimizer.param_groups for part in group["params"])
        self._cleared_in = _NEVER  # the number of the step whose own gradients zero_grad() has cleared
        self.num_steps = 0
        """In how many of the trainer's steps the optimizer has stepped."""
        self.num_zeroed = 0
        """How often ``zero_grad()`` has cleared the optimizer's gradients."""
        self.rates = Rates(optimizer)
        self._is_called = False  # the step under way came through this object
        self.scaled_by: Callable[..., Any] | None = None
        """Called in place of ``step()`` where accelerate has optimizers step through a GradScaler; else None."""
        self._schedulers: list[ElasticLRScheduler] = []
        self._num_looks = _NUM_LOOKS  # that are left
        self._used: tuple[Any, int] | None = None  # a gradient that the last call used, and its version
        self._gathered: tuple[int, Any] | None = None  # the step in which step() was left out, and what it saw then
        self._scheduled: list[Any] | None = None  # the rates of a schedule as the step under way began, if it gathers
        self._follower: ConfigFollower | None = None
        if config_file is not None:
            self._follow(config_file, follow)
        elif follow:
            raise ValueError(
                f"{', '.join(follow)}: allowed only with config_file, which the optimizer follows without a trainer"
            )

    @property
    def effective_rates(self) -> list[float]:
        """The learning rate that the next step uses, for each parameter group."""
        return self.rates.effective

    def step(self, closure: Closure | None = None) -> Any:
        """Step where the trainer's step ends, else do nothing but evaluate ``closure``."""
        if self.scaled_by is not None:
            return self.scaled_by(self, *([] if closure is None else [closure]))
        state = self._state
        if state is None:
            return self._step_alone(closure)
        if not state.phase.is_last:
            if not state.phase.is_inside:
                if state.index == 0 and _is_idle(self.param_groups):
                    return self.inner.step()  # torch.distributed.checkpoint has it make its state so
                raise StepError("optimizer.step() was called outside of `with trainer.step():`; call it inside")
            if "found_inf" in vars(self.inner) or "grad_scale" in vars(self.inner):
                self._look_at_scaler(state)
            result = None if closure is None else _evaluated(closure)
            if state.num_optimizers > 1:
                self._gathered = state.number, self._witness()
            return result
        for scheduler in self._schedulers:
            scheduler.make_sure_of_order()
        if self._mixed_in == state.number:
            raise StepError(_GATHERED)
        if state.check_batch is not None:
            state.check_batch()
        if closure is not None:
            return self._step_with(closure, state)
        if state.before_optimizer is not None:
            if is_running() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise StepError(_UNSHARED)
            state.before_optimizer()
        if "found_inf" in vars(self.inner) and _is_left_out(self.inner):
            return None
        if state.num_optimizers == 1 and not self._has_gradient():
            self._refuse_without_gradients(state)
        if state.number >= state.looks_from and not state.may_step(self._trained()):
            return None
        if state.on_gradients is not None:
            self._show_gradients(state)
        if self._num_looks > 0:
            self._look_twice(state)
        if self._scheduled is not None:
            self._look_at_schedule(state)
        rates = self.rates
        if rates.must_look:
            rates.look()
        if state.before_change is not None:
            state.before_change()
        self._begin(state)
        self._is_called = True
        try:
            result = self.inner.step() if rates.factor == 1.0 else self._step_scaled(None)
        finally:
            self._is_called = False
        self._end(state)
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler must not divide gradients in place; always while a step accumulates them."""
        state = self._state
        is_gathering = state is not None and state.phase.is_inside and not state.phase.is_last
        return is_gathering or getattr(self.inner, "_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the step that ended; within a step, which accumulates its own, do nothing."""
        state = self._state
        if (
            state is None
            or state.num_micro_steps == 1
            or (self._may_zero and self._stepped_in >= state.number - 1)  # else they were dropped with a step since
        ):
            if state is not None and state.phase.is_inside and not self._may_zero and self._has_gradient():
                self._cleared_in = state.number
            self.inner.zero_grad(set_to_none)
            self.num_zeroed += 1
            self._may_zero = False
            if state is not None and state.on_cleared is not None:
                state.on_cleared()
        elif state.num_optimizers > 1 and self._gathered is not None:
            number, witness = self._gathered
            if number == state.number and witness is not None and witness != self._witness():
                if not state.phase.is_last:
                    raise StepError(_GATHERED)
                self._mixed_in = state.number  # its step() raises; where that is left out, they are dropped

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, which loads without this library too; rates are as the schedule has them."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; a rate and a decay of the config in force replace those loaded."""
        self.rates.load(lambda: self.inner.load_state_dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with the script's rate and decay, which are scaled as the config scaled the others'."""
        self.rates.add_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: while it is made, copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.inner.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def __repr__(self) -> str:
        return f"ElasticOptimizer({self.inner!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an ElasticOptimizer cannot be copied or pickled; use its state_dict()")

    # ---- for the trainer and the appliers ----

    def watch_inner(self) -> None:
        """See from here on that the loop does not step the wrapped optimizer itself.

        Called once ``prepare()`` has succeeded: the wrapped optimizer may be given to another after one that failed.
        """
        self.inner.register_step_pre_hook(self._before_inner)

    @property
    def schedules(self) -> Sequence[ElasticLRScheduler]:
        """The prepared schedulers that set this optimizer's rates."""
        return self._schedulers

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has stepped in the step under way."""
        return self._state is not None and self._stepped_in == self._state.number

    @property
    def has_left_gradients(self) -> bool:
        """Whether gradients of the step before are still there."""
        state = self._state
        if state is None or not self._may_zero or self._stepped_in != state.number - 1:
            return False
        return any(part.grad is not None and bool(local_part(part.grad).any()) for part in self._trained())

    @property
    def is_gathering(self) -> bool:
        """Whether there are gradients with which the optimizer has not stepped so far; asked between two steps."""
        state = self._state
        return state is not None and self._stepped_in != state.number - 1 and self._has_gradient()

    @property
    def first_gradient(self) -> torch.Tensor | None:
        """The gradient of the first parameter that has one; None where none has."""
        gradients = (part.grad for group in self.param_groups for part in group["params"])
        return next((each for each in gradients if each is not None), None)

    @property
    def may_have_left_gradients(self) -> bool:
        """Whether ``zero_grad()`` was not called since the step before."""
        return self._may_zero

    def keep_left_gradients(self) -> None:
        """Count gradients left from the step before as a part of the step under way, as torch adds them up."""
        self._may_zero = False

    def forget_zeroing(self) -> None:
        """Wait for no ``zero_grad()``, since the gradients of the step that ended are gone."""
        self._may_zero = False

    def begin_gathering(self) -> None:
        """Begin a step of several micro-steps, before whose end no schedule is to change the rates."""
        self._scheduled = self.rates.scheduled

    def follows_schedule(self, scheduler: ElasticLRScheduler) -> None:
        """Note that ``scheduler`` sets the rates of this optimizer's groups."""
        self._schedulers.append(scheduler)
        self.rates.expect_schedule()

    # ---- alone ----

    def close(self) -> None:
        """Stop following a config file; the optimizer itself goes on."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def _follow(self, config_file: str | Path, options: dict[str, Any]) -> None:
        settings = OptimizerSettings([self])
        self._follower = follow_config(config_file, startup=settings.startup_values(), **options)
        settings.take_world(self._follower.ranks.world)
        self._follower.add(settings)
        self._follower.start()

    def _step_alone(self, closure: Closure | None) -> Any:
        self.rates.look()
        result = self._step_scaled(closure)
        if self._follower is not None:
            self._follower.boundary()
        return result

    # ---- a step ----

    def _has_gradient(self) -> bool:
        for group in self.inner.param_groups:  # asked in each step: most often of the first parameter alone
            for part in group["params"]:
                if part.grad is not None:
                    return True
        return False

    def _look_at_scaler(self, state: StepState) -> None:
        """Raise or warn of a GradScaler that steps in a micro-step that does not end a step."""
        given = vars(self.inner)
        if given.get("found_inf") is not None and given.get("grad_scale") is None:
            for name in ("found_inf", "grad_scale"):  # torch takes them back after a step() that returns
                given.pop(name, None)
            raise StepError(
                "scaler.unscale_() was called in a micro-step that does not end a step, so accumulated gradients would "
                "be divided more than once; call it only `if trainer.sync_gradients:`"
            )
        if given.get("grad_scale") is not None:
            state.remarks.say("a bare scaler", _BARE_SCALER)

    def _refuse_without_gradients(self, state: StepState) -> None:
        """Raise or warn where no parameter has a gradient, which torch passes over in silence."""
        if self._stepped_in == state.number or not any(part.requires_grad and part.numel() for part in self._trained()):
            return
        is_cleared = self._cleared_in == state.number
        why = NO_GRADIENTS_HERE if not torch.is_grad_enabled() else _CLEARED if is_cleared else _NO_BACKWARD
        if self.num_steps == 0:
            raise StepError(_NO_GRADIENT.format(why))
        state.remarks.say("no gradient", _NO_GRADIENT_LATER.format(why))  # as where a bad batch has no backward pass

    def _witness(self) -> tuple[int, int] | None:
        first = self.first_gradient
        return None if first is None else (id(first), first._version)

    def _look_twice(self, state: StepState) -> None:
        """Warn where this call of ``step()`` uses the same gradients as an earlier one in the same step."""
        now = self.first_gradient
        used, self._used = self._used, None if now is None else (weakref.ref(now), now._version)
        if self._stepped_in != state.number:
            self._num_looks -= 1
        elif used is not None and now is not None and used[0]() is now and used[1] == now._version:
            state.remarks.say("used twice", _USED_TWICE.format(name=type(self.inner).__name__))

    def _look_at_schedule(self, state: StepState) -> None:
        """Warn where the rates of a schedule have changed since the step began: it steps in every micro-step."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled != self.rates.scheduled and state.num_micro_steps > 1:
            state.remarks.say("a bare schedule", _BARE_SCHEDULE.format(num=state.num_micro_steps))

    def _before_inner(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Raise where the loop steps the wrapped optimizer itself in a micro-step: it would step in each of them."""
        if self._is_called:
            return
        if self._state is not None and self._state.phase.is_inside:
            raise StepError(
                "the bare optimizer's step() was called within `with trainer.step():`; call that of the one that "
                "prepare() returned"
            )
        self._wait_to_change()

    def _wait_to_change(self) -> None:
        """Wait until parameters may change, before the step and all hooks on the wrapped optimizer's step."""
        if self._state is not None and self._state.before_change is not None:
            self._state.before_change()

    def _show_gradients(self, state: StepState) -> None:
        """Have ``state.on_gradients`` see the gradients, and the scale by which a fused optimizer will divide them."""
        assert state.on_gradients is not None
        state.on_gradients(self._trained(), vars(self.inner).get("grad_scale"))

    def _trained(self) -> list[torch.Tensor]:
        return [part for group in self.param_groups for part in group["params"]]

    def _begin(self, state: StepState) -> None:
        if self._begun_in != state.number:
            self._begun_in = state.number
            state.num_begun += 1

    def _end(self, state: StepState) -> None:
        if self._stepped_in != state.number:
            self._stepped_in, self._may_zero = state.number, True
            self.num_steps += 1
            state.num_stepped += 1

    def _step_scaled(self, closure: Closure | None) -> Any:
        step = self.inner.step if closure is None else lambda: self.inner.step(closure)
        if self.rates.factor == 1.0:
            return step()
        with self.rates.scaled():
            return step()

    def _step_with(self, closure: Closure, state: StepState) -> Any:
        """Step with a closure, whose first evaluation comes before the optimizer begins to change parameters.

        A closure is evaluated again in steps of a single micro-step alone.
        """
        num_evaluations = 0
        loss: Any = None

        def evaluate() -> Any:
            nonlocal loss, num_evaluations
            num_evaluations += 1
            if num_evaluations > 1 and state.num_micro_steps > 1:
                raise StepError(
                    f"{type(self.inner).__name__} evaluates its closure more than once, which cannot be done with "
                    f"{state.num_micro_steps} micro-steps per step; use a micro-batch as large as the rank's share"
                )
            loss = closure()
            if num_evaluations == 1:
                if state.before_optimizer is not None:
                    state.before_optimizer()
                if state.number >= state.looks_from and not state.may_step(self._trained()):
                    raise _Unfit
                if state.on_gradients is not None:
                    self._show_gradients(state)
                self._begin(state)
            return loss

        self._wait_to_change()
        self.rates.look()
        self._is_called = True
        try:
            result = self._step_scaled(evaluate)
        except _Unfit:
            return loss
        finally:
            self._is_called = False
        self._end(state)
        return result


class _Unfit(Exception):
    """Leaves the step of an optimizer whose closure has given gradients that it is not to use; no user sees it."""


def _is_idle(groups: list[dict[str, Any]]) -> bool:
    """Whether a step now would change no parameter: its rates and its gradients are zero."""
    if any(float(group.get("lr", 1.0)) for group in groups):
        return False
    return not any(part.grad is not None and part.grad.any() for group in groups for part in group["params"])


def _is_left_out(optimizer: Optimizer) -> bool:
    """Whether a GradScaler found infinities and lets the optimizer, a fused one, leave the step out by itself."""
    found = vars(optimizer).get("found_inf")
    return found is not None and bool(found)  # on a GPU this waits for it


def _evaluated(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


# --- a schedule of torch's, stepping with the steps of its optimizer that commit -------------------------------------

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


class ElasticLRScheduler:
    """A torch scheduler that steps once per step that commits; all else is the scheduler's own."""

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
        """Called when the scheduler first steps within a step, and so counts steps, and when their size changes."""
        self._has_stepped_within = False  # a step, before this run was resumed
        self._steps_after_each = False  # of an epoch's steps, as far as the last one has shown

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step the schedule if the optimizer stepped in this micro-step; between steps, as after an epoch, always."""
        state = self._state
        if not state.phase.is_inside:
            if state.index > 0:
                raise StepError(
                    "scheduler.step() was called between two micro-steps of a step; call it within "
                    "`with trainer.step():`, or between two steps"
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
            elif state.phase.is_last:
                self._early_in = state.number

    @property
    def steps_within_steps(self) -> bool:
        """Whether the schedule has ever stepped within a step, and not only between two, as after an epoch."""
        return self._has_stepped_within or self._stepped_in != _NEVER

    @property
    def was_resumed(self) -> bool:
        """Whether the schedule has stepped within a step before this run was resumed."""
        return self._has_stepped_within

    @property
    def may_have_ended_epoch(self) -> bool:
        """Whether the schedule has stepped since the last step, and does not do so after each step of an epoch."""
        return not self._steps_after_each and self.bare_steps() is not None

    def remember_steps(self, within_steps: bool) -> None:
        """Take up the value of ``steps_within_steps`` that a checkpoint holds."""
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
        """Set an attribute of the wrapped scheduler, such as ``min_lrs``, unless it is one of this class's own."""
        object.__setattr__(self if name in _OWN else self.inner, name, value)

    def __repr__(self) -> str:
        return f"ElasticLRScheduler({self.inner!r})"

    def begin_step(self, *, is_epochs_first: bool) -> None:
        """Begin a step: accept the schedule's count as it is, since stepping between two steps is allowed."""
        has_stepped = self.bare_steps() is not None
        if not is_epochs_first:
            self._steps_after_each = has_stepped
        if has_stepped:
            self.note()

    def note(self) -> None:
        """Accept the schedule's count as it is now, so that ``bare_steps`` finds only steps made after this."""
        counted = self._counted
        now = counted[0].last_epoch if len(counted) == 1 else self._num_counted()
        object.__setattr__(self, "_num_known", now)

    def bare_steps(self) -> StepError | None:
        """The error of a wrapped schedule that was stepped by itself since ``note``; None where it was not."""
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
    """The schedulers whose ``last_epoch`` counts a schedule's steps: itself, and those that it is made of."""
    if isinstance(getattr(scheduler, "last_epoch", None), int):
        yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _counted(part)


# --- optimizer state made before the first step ----------------------------------------------------------------------
# So memory cannot run out for optimizer state in the middle of a step, which would tear the step.

# Those whose state begins as zeros, so that the first step does the same with it as without. Of any other optimizer,
# such as a subclass, nothing is known.
_BEGIN_AT_ZERO = tuple(
    getattr(optim, name)
    for name in ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RAdam", "RMSprop", "SGD")
    if hasattr(optim, name)
)


def can_materialise(optimizer: Optimizer) -> bool:
    """Whether a first step does the same bit for bit when the state was made before it."""
    if type(optimizer) not in _BEGIN_AT_ZERO:
        return False
    groups = optimizer.param_groups
    return not any(group.get("dampening") or group.get("differentiable") for group in groups)


def materialise(optimizer: Optimizer) -> None:
    """Make the state of every trained parameter that has none, as it is before the first step.

    A step with zero gradients is taken for one parameter at a time, and the parameter put back: so no more memory is
    used than the state itself and two copies of the largest parameter.
    """
    groups = optimizer.param_groups
    try:
        for group in groups:
            for part in group["params"]:
                if part.requires_grad and not optimizer.state.get(part):
                    optimizer.param_groups = [{**group, "params": [part]}]  # a step goes by this one alone
                    _materialise_one(optimizer, part)
    finally:
        optimizer.param_groups = groups


def _materialise_one(optimizer: Optimizer, part: torch.Tensor) -> None:
    before, gradient = part.detach().clone(), part.grad
    part.grad = torch.zeros_like(part)
    try:
        _bare_step(optimizer)(optimizer)
    finally:
        part.grad = gradient
        with torch.no_grad():
            part.copy_(before)
    state = optimizer.state.get(part, {})
    for name, value in state.items():
        # SGD's first step takes the gradient for its momentum, as 0.9 * -0.0 + gradient does, whatever its sign.
        _clear(value, zero=-0.0 if name == "momentum_buffer" and isinstance(optimizer, optim.SGD) else 0.0)
    _reset_count(state)


def _bare_step(optimizer: Optimizer) -> Any:
    """The class's ``step`` without the user's hooks: nothing that they could see has happened."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def _clear(value: object, *, zero: float) -> None:
    if isinstance(value, torch.Tensor):
        value.fill_(zero)


def _reset_count(state: dict[str, Any]) -> None:
    if isinstance(state.get("step"), (int, float)):
        state["step"] = 0
