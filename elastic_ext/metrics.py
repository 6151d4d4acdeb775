"""Frozen records of what was seen, as they stand in the files of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["JobEvent", "RankMetrics"]


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

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


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
