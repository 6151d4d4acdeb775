"""The sharding strategies, a row for each: what it does with the state of a model. How a model is sharded by one is in
fsdp/reshard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["STRATEGIES", "Sharding", "StrategyName", "strategies_in_words"]

StrategyName: TypeAlias = Literal["no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What a strategy does with parameters, gradients and optimizer state."""

    is_sharded: bool = True
    """Whether parameters are parts that ranks gather before a pass; else each rank has a whole copy, as under DDP."""
    gathers_again: bool = False
    """Whether a unit gives back what it gathered for its forward pass, and gathers it again for its backward pass."""
    has_degree: bool = False
    """Whether a copy of the model may be sharded over fewer ranks than there are."""
    known_as: str = ""
    """The name that others have for the strategy, for messages; empty where there is none."""


STRATEGIES: Mapping[str, Sharding] = {
    "no_shard": Sharding(is_sharded=False, known_as="DDP"),
    "shard_grad_op": Sharding(known_as="ZeRO-2"),
    "full_shard": Sharding(gathers_again=True, known_as="FSDP"),
    "hybrid_shard": Sharding(gathers_again=True, has_degree=True, known_as="HSDP"),
}


def strategies_in_words() -> str:
    """The strategies, each with the name that others have for it: ``"no_shard" (DDP), ...``."""
    rows = STRATEGIES.items()
    return ", ".join(f'"{name}"' + (f" ({row.known_as})" if row.known_as else "") for name, row in rows)
