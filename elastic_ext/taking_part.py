"""TakingPart: the optimizers, schedulers and scaler that prepare() is given, as they take part in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .accelerator import Accelerated, bare_optimizer, bare_scheduler
from .amp import ElasticScaler
from .arguments import check_not_prepared
from .optimizer import ElasticOptimizer
from .records.text import as_list
from .scheduler import ElasticLRScheduler
from .step_state import StepState

__all__ = ["TakingPart"]


@dataclass(frozen=True, slots=True)
class TakingPart:
    """What was wrapped, and how it was given."""

    optimizers: list[ElasticOptimizer]
    schedulers: list[ElasticLRScheduler]
    scaler: ElasticScaler | None
    _given: tuple[Any, Any, Any]

    @classmethod
    def of(
        cls, optimizer: Any, lr_scheduler: Any, scaler: Any, *, state: StepState, accelerated: Accelerated | None
    ) -> TakingPart:
        """Each of them, or a list; ValueError or TypeError where they cannot be used."""
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
        """As many as were given, in that order, a list where a list was given."""
        optimizer, lr_scheduler, scaler = self._given
        values: list[Any] = [self.optimizers if isinstance(optimizer, (list, tuple)) else self.optimizers[0]]
        if lr_scheduler is not None:
            values.append(self.schedulers if isinstance(lr_scheduler, (list, tuple)) else self.schedulers[0])
        if scaler is not None:
            values.append(self.scaler)
        return values[0] if len(values) == 1 else tuple(values)
