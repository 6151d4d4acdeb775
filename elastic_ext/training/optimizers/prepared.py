"""What prepare() is given, as it takes part in steps, and which of the model's parameters the optimizers train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elastic_ext.records.text import as_list
from elastic_ext.training.checks import check_not_prepared
from elastic_ext.training.steps.state import StepState

from .accelerate import Accelerated, bare_optimizer, bare_scheduler
from .amp import ElasticScaler
from .optimizer import ElasticLRScheduler, ElasticOptimizer

__all__ = ["PreparedOptimizers", "check_optimizers", "remarks_on_optimizers"]


# --- the optimizers, schedulers and scaler that prepare() is given, as they take part in steps -----------------------


@dataclass(frozen=True, slots=True)
class PreparedOptimizers:
    """The optimizers, schedules and scaler that take part in steps, and how the user gave them to ``prepare``."""

    optimizers: list[ElasticOptimizer]
    schedulers: list[ElasticLRScheduler]
    scaler: ElasticScaler | None
    _given: tuple[Any, Any, Any]

    @classmethod
    def of(
        cls, optimizer: Any, lr_scheduler: Any, scaler: Any, *, state: StepState, accelerated: Accelerated | None
    ) -> PreparedOptimizers:
        """Wrap what ``prepare`` was given, each one or a list; ValueError or TypeError where it cannot be used."""
        given, schedules = as_list(optimizer), as_list(lr_scheduler)
        if accelerated is None:
            check_not_prepared(*given, *schedules)
        optimizers = [ElasticOptimizer(bare_optimizer(each), state=state) for each in given]
        if not optimizers:
            raise ValueError("no optimizer was given; give at least one")
        schedulers = [ElasticLRScheduler(bare_scheduler(each), optimizers, state=state) for each in schedules]
        own_scaler = scaler if accelerated is None else accelerated.scaler_beside(scaler)
        elastic_scaler = None if own_scaler is None else ElasticScaler(own_scaler, optimizers, state=state)
        if accelerated is not None:
            accelerated.scale(zip(optimizers, given, strict=True), elastic_scaler, state)
        return cls(optimizers, schedulers, elastic_scaler, (optimizer, lr_scheduler, scaler))

    @property
    def values(self) -> Any:
        """What ``prepare`` returns: as many values as it was given, in that order, a list for a list."""
        optimizer, lr_scheduler, scaler = self._given
        values: list[Any] = [self.optimizers if isinstance(optimizer, (list, tuple)) else self.optimizers[0]]
        if lr_scheduler is not None:
            values.append(self.schedulers if isinstance(lr_scheduler, (list, tuple)) else self.schedulers[0])
        if scaler is not None:
            values.append(self.scaler)
        return values[0] if len(values) == 1 else tuple(values)


# --- which of a model's are in optimizers, and which in none, in two, or not the model's at all ----------------------

_MOST_NAMES = 4


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """ValueError where the model learns nothing, since no optimizer has a parameter of it."""
    to_learn = [part for part in model.parameters() if part.requires_grad]
    trained = {id(part) for optimizer in optimizers for part in _parameters_of(optimizer)}
    if not to_learn or any(id(part) in trained for part in model.parameters()):
        return
    who = "the optimizer given to prepare() has none"
    if len(optimizers) > 1:
        who = f"none of the {len(optimizers)} optimizers given to prepare() has any"
    raise ValueError(
        f"{who} of the model's {len(to_learn)} parameters, which would stay as they are: it was made of another model, "
        "or before this one was wrapped, sharded or converted; make it afterwards, of the parameters() of the model "
        "that ElasticTrainer is given"
    )


def remarks_on_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str]]:
    """Warnings about parameters in no optimizer or in several, which are mostly mistakes: a kind and a text each."""
    names = {id(part): name for name, part in model.named_parameters()}
    each = [list({id(part): part for part in _parameters_of(optimizer)}.values()) for optimizer in optimizers]
    num_optimizers = Counter(id(part) for parts in each for part in parts)
    strange = [part for part in num_optimizers if part not in names]
    untrained = [
        name for name, part in model.named_parameters() if part.requires_grad and id(part) not in num_optimizers
    ]
    if strange and untrained:
        yield (
            "replaced parameters",
            f"optimizers have {len(strange)} parameters that are not the model's, and {len(untrained)} of the model's "
            f"that need gradients are in no optimizer ({_shown(untrained)}): these do not learn, as where a layer was "
            "replaced after the optimizer was made; make the optimizer afterwards, or set requires_grad_(False) on "
            "what is not to learn",
        )
    shared = [names.get(part, "one that is not the model's") for part, number in num_optimizers.items() if number > 1]
    if shared:
        yield (
            "parameters in two optimizers",
            f"{len(shared)} of {len(num_optimizers)} parameters are in more than one optimizer ({_shown(shared)}), and "
            "each of these changes them in every step; give each parameter to one optimizer",
        )


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
