"""Rates: the learning rates and weight decays of an optimizer's groups, which the config changes while schedules go on.

Words: the *base* rate of a parameter group is what a schedule multiplies; without a schedule it is the group's ``lr``.
The *effective* rate is what a step uses: what the schedule made of the base, times the *factor* that a changed learning
rate and a changed global batch ask for. The factor acts around ``step()`` alone: schedules see their own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .config import ElasticConfig

__all__ = ["OptimizerSettings", "Rates"]


class Rates:
    """The rates and decays of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rate: float | None = None  # as the config says, where it says other than the script
        self._decay: float | None = None  # likewise
        self.factor = 1.0
        """What groups' rates are multiplied with around ``step()``."""
        self._rate_factor = self._batch_factor = 1.0
        # The base is what the first group's rate, or its schedule's, goes back to while the config does not change it.
        self._given_rate = self._base = self.base_rate or 0.0
        self._decays = [_decay_of(group) for group in self._groups]

    @property
    def base_rate(self) -> float | None:
        """The first group's base rate, None for an optimizer without rates."""
        group = self._groups[0]
        rate = group.get("initial_lr", group.get("lr"))
        return None if rate is None else float(rate)

    @property
    def base_decay(self) -> float | None:
        """The first group's weight decay, None for an optimizer without."""
        decay = self._groups[0].get("weight_decay")
        return None if decay is None else float(decay)

    @property
    def effective(self) -> list[float]:
        """What the next step uses, group by group."""
        return [float(group["lr"]) * self.factor for group in self._groups if "lr" in group]

    def set_rate(self, rate: float) -> None:
        """Have the first group's base rate be ``rate``; other groups keep their ratio to it, schedules go on."""
        self._rate = rate
        groups = self._groups
        if "initial_lr" in groups[0]:  # a schedule starts from it
            self._rate_factor = rate / self._base
            self.factor = self._rate_factor * self._batch_factor
            return
        rates = [float(group["lr"]) for group in groups]  # all of them before any is set: they may share a tensor
        for group, now in zip(groups, rates, strict=True):
            _put(group, rate * (now / self._base))
        self._base = rate

    def set_decay(self, decay: float) -> None:
        """Have the first group's weight decay be ``decay``; other groups keep their ratio to it."""
        self._decay = decay
        groups = self._groups
        self._decays += [_decay_of(group) for group in groups[len(self._decays) :]]  # groups that were added since
        for group, given in zip(groups, self._decays, strict=True):
            share = 1.0 if given == self._decays[0] else given / self._decays[0]
            group["weight_decay"] = decay * share

    def set_batch_factor(self, factor: float) -> None:
        """What rates are multiplied with because of the global batch's size."""
        self._batch_factor = factor
        self.factor = self._rate_factor * factor

    def why_not_decay(self) -> str | None:
        """Why weight decay cannot be changed here, None where it can."""
        if self.base_decay is None:
            return f"{type(self._optimizer).__name__} has no weight decay"
        if self._decays[0] == 0.0 and any(self._decays):
            return "the first group has no weight decay that others could keep a ratio to; put a decayed group first"
        return None

    def expect_schedule(self) -> None:
        """A schedule sets the groups' rates: keep the base, which ReduceLROnPlateau does not do by itself."""
        for group in self._groups:
            if "lr" in group:
                group.setdefault("initial_lr", _copied(group["lr"]))

    def add_group(self, group: dict[str, Any]) -> None:
        """Add a group, whose rate and decay are given as the script's are, whatever the config made of those since."""
        rate, decay = self._rate, self._decay
        if rate is not None:
            self.set_rate(self._given_rate)
        if decay is not None:
            self.set_decay(self._decays[0])
        self._optimizer.add_param_group(group)
        if rate is not None:
            self.set_rate(rate)
        if decay is not None:
            self.set_decay(decay)

    def load(self, load: Callable[[], object]) -> None:
        """Have ``load`` put other rates in place; what the config in force gives is put over what was loaded."""
        bases = [group.get("initial_lr") for group in self._groups]
        load()
        for group, base in zip(self._groups, bases, strict=True):
            if base is not None:  # what was saved without a schedule has none
                group.setdefault("initial_lr", base)
        loaded = self.base_rate
        if loaded:
            self._base = self._base * (loaded / float(bases[0])) if bases[0] else loaded
        if self._rate is not None:
            self.set_rate(self._rate)
        if self._decay is not None:
            self.set_decay(self._decay)

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Every group's rate times the factor, and as it was afterwards, whatever happens."""
        rates = [(group, _copied(group["lr"])) for group in self._groups if "lr" in group]
        try:
            for group, rate in rates:
                _put(group, rate * self.factor)
            yield
        finally:
            for group, rate in rates:
                _put(group, rate)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups


class _Rated(Protocol):
    """What is asked of an ``ElasticOptimizer``."""

    rates: Rates

    @property
    def inner(self) -> Optimizer: ...


class OptimizerSettings:
    """The applier of the section ``optimizer``, for one or several optimizers."""

    section = "optimizer"

    def __init__(self, optimizers: Sequence[_Rated]) -> None:
        self.optimizers = optimizers
        self._rates = [optimizer.rates.base_rate for optimizer in optimizers]
        self._decays = [optimizer.rates.base_decay for optimizer in optimizers]

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
            reasons = [optimizer.rates.why_not_decay() for optimizer in self.optimizers]
            if self._decays[0] == 0.0 and any(self._decays):
                reasons.append("the first optimizer has no weight decay that others could keep a ratio to")
            return next((reason for reason in reasons if reason is not None), None)
        return None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        rate, decay = new.optimizer.learning_rate, new.optimizer.weight_decay
        if rate is not None and rate != old.optimizer.learning_rate:
            for optimizer, base in zip(self.optimizers, self._rates, strict=True):
                if base:  # an optimizer without a rate, or with rate 0, stays so
                    optimizer.rates.set_rate(_in_ratio(rate, base, self._rates[0]))
        if decay is not None and decay != old.optimizer.weight_decay:
            for optimizer, base in zip(self.optimizers, self._decays, strict=True):
                optimizer.rates.set_decay(_in_ratio(decay, base, self._decays[0]))


def _in_ratio(value: float, base: float | None, first_base: float | None) -> float:
    if base is None or not first_base or base == first_base:
        return value
    return value * (base / first_base)


def _decay_of(group: dict[str, Any]) -> float:
    return float(group.get("weight_decay", 0.0))


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _put(group: dict[str, Any], rate: Any) -> None:
    """Tensor rates change in place: a captured graph reads them where they are."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
