"""What is asked of the process that works out a model's memory, and what it answers, one line of JSON each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.records.json import JsonRecord
from elastic_ext.records.metrics import PassesMemory

from .origins import MainModule, Origin

__all__ = ["IS_ANALYSIS", "Answer", "OptimizerKind", "ParameterKind", "Question", "refuse_in_analysis"]

IS_ANALYSIS = "ELASTIC_EXT_IS_ANALYSIS"
"""In the environment of the process that is asked: no trainer is made in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterKind:
    """A parameter of the model that is trained; whole, whatever part of it a rank has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """One of torch's own optimizers."""

    name: str
    groups: tuple[Mapping[str, Any], ...]
    """Its settings, and the names of its parameters under ``params``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(JsonRecord):
    """A model, what it is given, and of which steps to tell what they take."""

    main: MainModule | None
    """The script that has the factory or the loss, if it is one."""
    factory: Origin
    loss: Origin | None
    parameters: tuple[ParameterKind, ...]
    is_training: bool
    """Whether the model is in training mode."""
    autocast: str | None
    """The type that passes are computed in, where autocast is on."""
    given: Mapping[str, Any]
    options: Mapping[str, Any]
    batch: Mapping[str, Any] | None
    """Positional and named arguments of the model, and the batch, as likeness.py tells them."""
    keeps_outputs: bool
    """Whether the loop holds on to what the model has given while the backward pass runs."""
    blocks: tuple[str, ...]
    micro_batches: tuple[int, ...]
    ratios: tuple[float, ...]
    """Shares of blocks that are computed again; the first is tried with all sizes before the others."""
    optimizers: tuple[OptimizerKind, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(JsonRecord):
    """One of these."""

    passes: PassesMemory | None = None
    update_bytes: int | None = None
    flops_per_sample: int | None = None
    block_activation_bytes: tuple[int, ...] = ()
    """Of one sample, by block."""
    problem: str | None = None
    """Why there is no more."""


def refuse_in_analysis(environment: Mapping[str, str]) -> None:
    """Raise in a process that imports a script for its model_factory alone, where that trains as it is imported."""
    if IS_ANALYSIS in environment:
        raise ElasticError(
            "this process imports the script for its model_factory; put training under "
            'if __name__ == "__main__":, or the factory in a module of its own'
        )
