"""Overlap: whether a checkpoint may be copied while the next step's passes run, or is to be copied before them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from .torch_private.gradients import acts_on_gradients

__all__ = ["Overlap", "has_idle_core", "num_cores", "why_not_overlap"]

Overlap = Literal["auto", True, False]
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def has_idle_core(*, num_cores: float, num_ranks: int, num_threads: int) -> bool:
    """Whether each of a machine's ranks finds a core for copying beside those that its own threads use."""
    return num_cores >= num_ranks * (num_threads + 1)


def num_cores() -> float:
    """How many this process may use at once."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, _, period = _CGROUP_QUOTA.read_text().partition(" ")
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such limit
        return cores


def why_not_overlap(
    model: nn.Module, optimizers: Sequence[Optimizer], *, sharding: str, ranks_here: int, asked: Overlap
) -> str | None:
    """Why parameters and optimizer state are to be copied before the next step begins, None where that can wait."""
    if asked is False:
        return "overlap_saving is False"
    unknown = [type(optimizer).__name__ for optimizer in optimizers if not _is_torchs(optimizer)]
    if unknown:
        return f"{', '.join(unknown)} may change parameters elsewhere than in step()"
    if any(acts_on_gradients(parameter) for parameter in model.parameters()):
        return "hooks act on parameters as soon as these have their gradients"
    renorming = {type(part).__name__ for part in model.modules() if _changes_in_passes(part)}
    if renorming:
        return f"{', '.join(sorted(renorming))} with max_norm changes its weight in each pass"
    if sharding == "FSDP1":
        return "FSDP1 moves its parameters within a pass"
    if asked is True or _are_on_gpus(model.parameters()):
        return None
    if has_idle_core(num_cores=num_cores(), num_ranks=ranks_here, num_threads=torch.get_num_threads()):
        return None
    return "no core is idle"


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _changes_in_passes(part: nn.Module) -> bool:
    """Whether torch's own forward of this module changes a parameter."""
    return isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None


def _are_on_gpus(parameters: Iterable[nn.Parameter]) -> bool:
    devices = {parameter.device.type for parameter in parameters}
    return devices == {"cuda"}
