"""Seen: what steps under one config took, over all ranks: what a strategy learns from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Seen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Some steps that followed each other, under one version and revision of the config on all ranks."""

    time: float
    """When the last of them ended, in seconds since 1970."""
    version: int
    revision: int = 0
    step: int
    """Steps that had committed since training began, at their end."""
    num_steps: int
    num_ranks: int
    """That told of them,"""
    world_size: int
    """... of so many that there are,"""
    num_asked: int | None = None
    """... and of so many that are looked at, which is fewer in a very large job; None where all are."""
    step_seconds: float
    """What a step took, the mean of them, on the rank where that is the most: bursts count as they are."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Of that, by phase as profile/phases.py names them, usual among ranks; empty where steps were not looked at."""
    held_up_seconds: float = 0.0
    """In which training waited for checkpoints or changes, or was rolled back: beside the steps."""
    processor_share: float | None = None
    """What the training thread had of a processor while it computed,"""
    loading_processor_share: float | None = None
    """... and while it waited for samples: without workers it loads them itself, and little of one says that they are
    waited for and not worked out. None where it did not wait."""
    peak_bytes: int | None = None
    """The most that an accelerator of any rank held at once, in these steps or before."""
    slow_rank: str = ""
    """Who keeps the others waiting, as profile/straggling.py has it: a sentence; empty where nobody does."""
    trouble: str = ""
    """Why nothing is to be decided by this: a sentence, such as that a rank is silent; empty where there is nothing."""
