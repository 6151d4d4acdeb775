"""The sections of a config: frozen values whose fields are checked against the table of keys when they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ConfigError, Refusal
from .keys import KEYS
from .records.json import shown
from .rules import KnobBounds

__all__ = [
    "SECTION_TYPES",
    "CheckpointSection",
    "CommunicationSection",
    "DataloaderSection",
    "OptimizerSection",
    "ParallelismSection",
    "Section",
    "TuningSection",
    "fields_of",
]


class Section:
    """A section's fields, each checked against its row of the table."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        refusals = [*self._refused_fields(), *self._refused_pairs()]
        if refusals:
            raise ConfigError(refusals)

    def _refused_fields(self) -> Iterator[Refusal]:
        for name, value in fields_of(self):
            if value is None:
                continue
            path = f"{self.section}.{name}" if self.section else name
            try:
                object.__setattr__(self, name, KEYS[path].rule.check(value))
            except ValueError as error:
                yield Refusal(key=path, given=shown(value), allowed=str(error))

    def _refused_pairs(self) -> Iterator[Refusal]:
        return iter(())


def fields_of(section: Section) -> list[tuple[str, Any]]:
    """The section's fields with their values; its slots are its fields, and quicker to list."""
    names: tuple[str, ...] = section.__slots__
    return [(name, getattr(section, name)) for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataloaderSection(Section):
    """How samples reach the step."""

    section: ClassVar[str] = "dataloader"
    batch_size: int | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSection(Section):
    """What the optimizer multiplies with."""

    section: ClassVar[str] = "optimizer"
    learning_rate: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismSection(Section):
    """How training state is spread over ranks."""

    section: ClassVar[str] = "parallelism"
    strategy: str | None = None
    shard_degree: int | None = None
    unit: int | str | None = None
    activation_checkpoint: float | None = None
    prefetch: int | str | None = None

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.strategy == "no_shard" and type(self.shard_degree) is int and self.shard_degree > 1:
            yield Refusal(
                key="parallelism.shard_degree",
                given=str(self.shard_degree),
                allowed="1 or absent with the strategy no_shard",
                advice="choose another strategy or leave shard_degree out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSection(Section):
    """How gradients travel."""

    section: ClassVar[str] = "communication"
    bucket_cap_mb: float | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(Section):
    """When state is saved."""

    section: ClassVar[str] = "checkpoint"
    steps: int | None = None
    epochs: int | None = None
    now: bool | None = None

    def _refused_pairs(self) -> Iterator[Refusal]:
        if self.steps is not None and self.epochs is not None:
            yield Refusal(
                key="checkpoint",
                given=f"both steps {shown(self.steps)} and epochs {shown(self.epochs)}",
                allowed="one of steps and epochs",
                advice="leave one out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSection(Section):
    """What the tuner may do, and within which bounds."""

    section: ClassVar[str] = "tuning"
    mode: str | None = None
    knobs: Mapping[str, KnobBounds] | None = None
    headroom: float | None = None
    memory_bytes: int | None = None
    probe_steps: int | None = None
    probe_budget: float | None = None
    goal: float | None = None


SECTION_TYPES: tuple[type[Section], ...] = (
    DataloaderSection,
    OptimizerSection,
    ParallelismSection,
    CommunicationSection,
    CheckpointSection,
    TuningSection,
)
