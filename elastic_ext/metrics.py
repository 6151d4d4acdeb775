"""Frozen records of what was seen, as they stand in the files of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .record_json import object_of, record_of, with_record

__all__ = ["JobEvent", "Measures", "ModelProfile", "RankMetrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What was measured since the record before; None for what was not."""

    steps_per_second: float | None = None
    samples_per_second: float | None = None
    """Of all ranks together."""
    memory_bytes: int | None = None
    """What this process holds of the machine's memory."""
    accelerator_bytes: int | None = None
    """What its tensors hold on its accelerator."""
    accelerator_peak_bytes: int | None = None
    """The most that they held at once, since the process began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMetrics:
    """What one rank is doing, as of ``time`` (seconds since 1970)."""

    time: float
    job: str
    generation: int
    rank: int
    world_size: int
    host: str
    pid: int
    step: int
    config_version: int
    config_revision: int
    agree_every_steps: int
    measures: Measures = field(default_factory=Measures)

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RankMetrics:
        """The record that ``to_json`` gave; ValueError for anything else."""
        return record_of(cls, with_record(object_of(text), "measures", Measures))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """What a rank trains, as training begins."""

    time: float
    rank: int
    name: str
    """Of the model's class."""
    num_parameters: int
    """Of the whole model; as this rank holds them where it is FSDP1's."""
    num_trainable: int
    by_dtype: str
    """How many there are of each type, the most first: ``float32 1024, bfloat16 8``."""
    parameter_bytes: int
    """What lies on this rank of them,"""
    buffer_bytes: int
    """... of buffers,"""
    optimizer_bytes: int
    """... and of the optimizers' state."""
    optimizers: str
    blocks: str
    """The parts that it repeats: ``12 x Block``."""
    device: str
    sharing: str
    """How ranks share it."""
    plan: str | None = None
    """By which plan it is spread over them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The record that ``to_json`` gave; ValueError for anything else."""
        return record_of(cls, object_of(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Something worth remembering that happened to one rank, such as a config that came into force."""

    time: float
    generation: int
    rank: int
    step: int
    kind: str
    text: str
    details: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobEvent:
        """The record that ``to_json`` gave, its details as JSON has them; ValueError for anything else."""
        return record_of(cls, object_of(text))
