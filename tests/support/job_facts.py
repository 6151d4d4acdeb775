"""Facts of jobs made up for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ext.records.metrics import JobFacts

__all__ = ["ALL_CHOICES", "made_facts"]

ALL_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "dataloader.batch_size": (),
    "dataloader.num_workers": (),
    "dataloader.prefetch_factor": (),
    "dataloader.pin_memory": (),
    "parallelism.strategy": ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard"),
    "parallelism.shard_degree": (),
    "parallelism.unit": (),
    "parallelism.activation_checkpoint": (),
    "communication.bucket_cap_mb": (),
}
"""Of a job of which all can be changed."""


def made_facts(
    *,
    choices: Mapping[str, tuple[Any, ...]] = ALL_CHOICES,
    values: Mapping[str, Any] | None = None,
    share: int = 64,
    world_size: int = 4,
    **changes: Any,
) -> JobFacts:
    """A job whose ranks all have samples of their own."""
    present = {"dataloader.batch_size": 1, "dataloader.num_workers": 0, **(values or {})}
    facts: dict[str, Any] = {
        "time": 1000.0,
        "restart": 0,
        "world_size": world_size,
        "num_local": world_size,
        "device": "cpu",
        "num_processors": 4,
        "config_version": 0,
        "config_revision": 0,
        "values": present,
        "choices": dict(choices),
        "global_batch": share * world_size,
        "share": share,
        "num_replicas": world_size,
        "num_blocks": 12,
    }
    return JobFacts(**{**facts, **changes})
