"""ElasticOptimizer and ElasticLRScheduler: torch's, taking part in steps and in changes of the config.

Words: the *base* rate of a parameter group is what a schedule multiplies; without a schedule it is the group's ``lr``.
The *effective* rate is what a step uses: what the schedule made of the base, times the *factor* that a changed learning
rate and a changed global batch ask for. The factor acts around ``step()`` alone: schedules see their own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from .config import ElasticConfig
from .errors import StepError
from .follow import ConfigFollower, follow_config
from .step_state import StepState

__all__ = ["ElasticLRScheduler", "ElasticOptimizer", "OptimizerSettings"]

Closure = Callable[[], Any]


def _passed_on(name: str) -> Any:
    """An attribute that is the wrapped optimizer's, also when it is set or deleted."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        lambda self: delattr(self.inner, name),
    )


class ElasticOptimizer(Optimizer):
    """``optimizer``, whose rate and weight decay follow the config, and which a trainer lets act when a step ends.

    Alone, with ``config_file``, it follows that file by itself and passes a boundary at the end of its every
    ``step()``; all ranks make one, and ``close()`` it. ``follow`` holds more arguments for ``follow_config``.
    """

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
            raise ValueError("this optimizer is an ElasticOptimizer already; give the one that it was made from")
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer is a {type(optimizer).__name__}; allowed: a torch.optim.Optimizer")
        self.inner = optimizer
        """The optimizer that does the work."""
        self.has_begun = self.has_stepped = False
        """In the step under way."""
        self._state = state
        self._may_zero = any(part.grad is not None for group in optimizer.param_groups for part in group["params"])
        self._rate: float | None = None  # as the config says, where it says other than the script
        self._rate_factor = self._batch_factor = 1.0
        self._schedulers: list[ElasticLRScheduler] = []
        self._bases = [_base_rate(group) for group in optimizer.param_groups]
        self._decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
        self._follower: ConfigFollower | None = None
        if config_file is not None:
            self._follow(config_file, follow)
        elif follow:
            raise ValueError(f"{', '.join(follow)}: only with config_file, which has the optimizer follow a file alone")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def effective_rates(self) -> list[float]:
        """What the next step multiplies each group's update with."""
        return [float(group["lr"]) * self.factor for group in self.param_groups if "lr" in group]

    @property
    def factor(self) -> float:
        """What groups' rates are multiplied with around ``step()``."""
        return self._rate_factor * self._batch_factor

    def step(self, closure: Closure | None = None) -> Any:
        """Step where the trainer's step ends, else do nothing but evaluate ``closure``."""
        state = self._state
        if state is None:
            return self._step_alone(closure)
        if not state.is_last:
            if not state.is_inside:
                raise StepError("optimizer.step() was called outside of `with trainer.step():`")
            return None if closure is None else _evaluated(closure)
        for scheduler in self._schedulers:
            scheduler.make_sure_of_order()
        if closure is not None:
            return self._step_with(closure, state)
        state.before_optimizer()
        self._begin(state)
        result = self.inner.step() if self.factor == 1.0 else self._step_scaled(None)
        self._end(state)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step that ended; within a step, where they are gathered, do nothing."""
        state = self._state
        if state is None or state.num_micro_steps == 1 or self._may_zero:
            self.inner.zero_grad(set_to_none)
            self._may_zero = False

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which it loads as well without this library: rates as the schedule has them."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load; a rate that the config in force gives is put over what was loaded."""
        self.inner.load_state_dict(state_dict)
        if self._rate is not None:
            self.set_learning_rate(self._rate)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)
        self._bases.append(_base_rate(self.param_groups[-1]))
        self._decays.append(float(self.param_groups[-1].get("weight_decay", 0.0)))

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

    def base_rate(self) -> float | None:
        """The first group's base rate, None for an optimizer without rates."""
        return _base_rate(self.param_groups[0])

    def base_decay(self) -> float | None:
        """The first group's weight decay, None for an optimizer without."""
        decay = self.param_groups[0].get("weight_decay")
        return None if decay is None else float(decay)

    def set_learning_rate(self, rate: float) -> None:
        """Have the first group's base rate be ``rate``; other groups keep their ratio to it, schedules go on."""
        self._rate = rate
        groups = self.param_groups
        if "initial_lr" in groups[0]:  # a schedule starts from it
            self._rate_factor = rate / float(groups[0]["initial_lr"])
            return
        first = float(groups[0]["lr"])
        for index, group in enumerate(groups):
            now, whole = (float(group["lr"]), first) if first else (self._bases[index], self._bases[0])
            _set_rate(group, rate if index == 0 or not (now and whole) else rate * (now / whole))

    def set_weight_decay(self, decay: float) -> None:
        """Have the first group's weight decay be ``decay``; other groups keep their ratio to it."""
        for group, given in zip(self.param_groups, self._decays, strict=True):
            share = 1.0 if given == self._decays[0] else given / self._decays[0]
            group["weight_decay"] = decay * share

    def why_not_decay(self) -> str | None:
        """Why weight decay cannot be changed here, None where it can."""
        if self.base_decay() is None:
            return f"{type(self.inner).__name__} has no weight decay"
        if self._decays[0] == 0.0 and any(self._decays):
            return "the first group has no weight decay that others could keep a ratio to; put a decayed group first"
        return None

    def set_batch_factor(self, factor: float) -> None:
        """What rates are multiplied with because of the global batch's size."""
        self._batch_factor = factor

    def end_step(self) -> None:
        """A step ended or was rolled back. Where the optimizer did not step, its gradients are gone already."""
        if not self.has_stepped:
            self._may_zero = False
        self.has_begun = self.has_stepped = False

    def forget_zeroing(self) -> None:
        """The gradients of the step that ended are gone: ``zero_grad()`` is not waited for."""
        self._may_zero = False

    def follows_schedule(self, scheduler: ElasticLRScheduler) -> None:
        """``scheduler`` sets the rates of this optimizer's groups."""
        self._schedulers.append(scheduler)
        for group in self.param_groups:
            if "lr" in group:  # ReduceLROnPlateau does not keep the base by itself
                group.setdefault("initial_lr", _copied(group["lr"]))

    # ---- alone ----

    def close(self) -> None:
        """Stop following a config file; the optimizer itself goes on."""
        if self._follower is not None:
            self._follower.close()

    def _follow(self, config_file: str | Path, options: dict[str, Any]) -> None:
        settings = OptimizerSettings([self])
        self._follower = follow_config(config_file, startup=settings.startup_values(), **options)
        self._follower.add(settings)
        self._follower.start()

    def _step_alone(self, closure: Closure | None) -> Any:
        result = self._step_scaled(closure)
        if self._follower is not None:
            self._follower.boundary()
        return result

    # ---- a step ----

    def _begin(self, state: StepState) -> None:
        if not self.has_begun:
            self.has_begun = True
            state.num_begun += 1

    def _end(self, state: StepState) -> None:
        if not self.has_stepped:
            self.has_stepped = self._may_zero = True
            state.num_stepped += 1

    def _step_scaled(self, closure: Closure | None) -> Any:
        step = self.inner.step if closure is None else lambda: self.inner.step(closure)
        if self.factor == 1.0:
            return step()
        with _scaled(self.param_groups, self.factor):
            return step()

    def _step_with(self, closure: Closure, state: StepState) -> Any:
        """A closure's first evaluation is still before the optimizer begins; a further one needs a step to itself."""
        num_evaluations = 0

        def evaluate() -> Any:
            nonlocal num_evaluations
            num_evaluations += 1
            if num_evaluations > 1 and state.num_micro_steps > 1:
                raise StepError(
                    f"{type(self.inner).__name__} evaluates its closure more than once, which cannot be done with "
                    f"{state.num_micro_steps} micro-steps per step; use a micro-batch as large as the rank's share"
                )
            loss = closure()
            if num_evaluations == 1:
                state.before_optimizer()
                self._begin(state)
            return loss

        result = self._step_scaled(evaluate)
        self._end(state)
        return result


class ElasticLRScheduler:
    """``scheduler``, stepping once per step that commits; all else is the scheduler's own."""

    def __init__(self, scheduler: Any, optimizers: Sequence[ElasticOptimizer], *, state: StepState) -> None:
        self.inner = scheduler
        """The scheduler that does the work."""
        target = getattr(scheduler, "optimizer", None)
        found = [optimizer for optimizer in optimizers if target in (optimizer, optimizer.inner)]
        if not found:
            raise ValueError(
                "lr_scheduler belongs to another optimizer than those given to prepare(); give both together"
            )
        self._optimizer = found[0]
        self._optimizer.follows_schedule(self)
        self._state = state
        self._was_early = False
        self.has_stepped = False

    def step(self, *arguments: Any, **options: Any) -> None:
        """Step if the optimizer did in this micro-step; between steps, as after an epoch, always."""
        if not self._state.is_inside:
            self.inner.step(*arguments, **options)
        elif self._optimizer.has_stepped and not self.has_stepped:
            self.has_stepped = True
            self.inner.step(*arguments, **options)
        elif self._state.is_last and not self.has_stepped:
            self._was_early = True

    def get_last_lr(self) -> list[float]:
        """The effective rates, group by group."""
        return [float(rate) * self._optimizer.factor for rate in self.inner.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"ElasticLRScheduler({self.inner!r})"

    def make_sure_of_order(self) -> None:
        """Raise where the schedule was asked to step before the optimizer, in this step."""
        if self._was_early:
            raise StepError("scheduler.step() was called before optimizer.step(); call it after, in the same step")

    def end_step(self) -> None:
        """A step ended or was rolled back."""
        self.has_stepped = self._was_early = False


class OptimizerSettings:
    """The applier of the section ``optimizer``, for one or several optimizers."""

    section = "optimizer"

    def __init__(self, optimizers: Sequence[ElasticOptimizer]) -> None:
        self.optimizers = optimizers
        self._rates = [optimizer.base_rate() for optimizer in optimizers]
        self._decays = [optimizer.base_decay() for optimizer in optimizers]

    def startup_values(self) -> dict[str, object]:
        """What the script gave the first optimizer."""
        values: dict[str, object] = {}
        if self._rates[0]:
            values["optimizer.learning_rate"] = self._rates[0]
        if self._decays[0] is not None:
            values["optimizer.weight_decay"] = self._decays[0]
        return values

    def check(self, new: ElasticConfig) -> str | None:
        wanted = new.optimizer
        if wanted.learning_rate is not None and wanted.learning_rate != self._rates[0]:
            if self._rates[0] is None:
                return f"{type(self.optimizers[0].inner).__name__} has no learning rate"
            if self._rates[0] == 0.0:
                return "the first group's learning rate is 0, so the others have no ratio to it; give it a rate"
        if wanted.weight_decay is not None and wanted.weight_decay != self._decays[0]:
            reasons = [optimizer.why_not_decay() for optimizer in self.optimizers]
            return next((reason for reason in reasons if reason is not None), None)
        return None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        rate, decay = new.optimizer.learning_rate, new.optimizer.weight_decay
        if rate is not None and rate != old.optimizer.learning_rate:
            for optimizer, base in zip(self.optimizers, self._rates, strict=True):
                optimizer.set_learning_rate(_in_ratio(rate, base, self._rates[0]))
        if decay is not None and decay != old.optimizer.weight_decay:
            for optimizer, base in zip(self.optimizers, self._decays, strict=True):
                optimizer.set_weight_decay(_in_ratio(decay, base, self._decays[0]))


def _in_ratio(value: float, base: float | None, first_base: float | None) -> float:
    if not base or not first_base or base == first_base:
        return value
    return value * (base / first_base)


def _evaluated(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def _base_rate(group: dict[str, Any]) -> float | None:
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Tensor rates change in place: a captured graph reads them where they are."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate


@contextmanager
def _scaled(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Every group's rate times ``factor``, and as it was afterwards, whatever happens."""
    rates = [(group, _copied(group["lr"])) for group in groups if "lr" in group]
    try:
        for group, rate in rates:
            _set_rate(group, rate * factor)
        yield
    finally:
        for group, rate in rates:
            _set_rate(group, rate)
