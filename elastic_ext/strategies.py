"""The sharding strategies, a row for each: what it does with the state of a model. How a model is sharded by one is in
fsdp/reshard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["STRATEGIES", "Sharding", "StrategyName"]

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


STRATEGIES: Mapping[str, Sharding] = {
    "no_shard": Sharding(is_sharded=False),
    "shard_grad_op": Sharding(),
    "full_shard": Sharding(gathers_again=True),
    "hybrid_shard": Sharding(gathers_again=True, has_degree=True),
}
