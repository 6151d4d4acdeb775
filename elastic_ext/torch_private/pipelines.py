"""Pipelines of torch.distributed.pipelining, noticed so that they can be refused; they are never loaded here."""

from __future__ import annotations

import gc
import inspect
import sys

__all__ = ["REFUSED", "are_in_use", "has_stage_of", "is_running_a_stage"]

_NAME = "torch.distributed.pipelining"

REFUSED = (
    f"{{}} ({_NAME}): its schedule cuts batches and passes gradients from stage to stage by itself, and the trainer "
    "would multiply gradients by the weight of their micro-batch at every stage again; leave the loop to the schedule, "
    "and have ElasticOptimizer(optimizer, config_file=...) or follow_config() follow the config"
)


def are_in_use(part: object) -> bool:
    """Whether ``part`` is an object of torch.distributed.pipelining, such as a schedule."""
    return any(kind.__module__.startswith(_NAME) for kind in type(part).__mro__)


def has_stage_of(modules: set[int]) -> bool:
    """Whether a pipeline stage holds one of ``modules``, given by ``id``; looks through all objects, which is slow."""
    pipelining = sys.modules.get(_NAME)
    if pipelining is None:
        return False
    kind = pipelining.PipelineStage.__base__
    # A stage holds its module, which knows nothing of it.
    return any(kind in type(each).__mro__ and id(each.submod) in modules for each in gc.get_objects())


def is_running_a_stage() -> bool:
    """Whether this is called, however deep, from within a pass of a pipeline stage."""
    if _NAME not in sys.modules:
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_NAME):
            return True
        frame = frame.f_back
    return False
