"""Sharded state: where tensors lie, and how they get from there to where they are wanted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint.checkpointer import Loaded as Loaded
    from .checkpoint.checkpointer import ShardCheckpointer as ShardCheckpointer
    from .checkpoint.export.convert import Converted as Converted
    from .checkpoint.export.convert import convert_from_dcp as convert_from_dcp
    from .checkpoint.export.convert import convert_to_dcp as convert_to_dcp
    from .checkpoint.export.safetensors import Exported as Exported
    from .checkpoint.export.safetensors import export_checkpoint as export_checkpoint

__all__ = [
    "Converted",
    "Exported",
    "Loaded",
    "ShardCheckpointer",
    "convert_from_dcp",
    "convert_to_dcp",
    "export_checkpoint",
]

_HOMES = {
    "Converted": "checkpoint.export.convert",
    "Exported": "checkpoint.export.safetensors",
    "Loaded": "checkpoint.checkpointer",
    "ShardCheckpointer": "checkpoint.checkpointer",
    "convert_from_dcp": "checkpoint.export.convert",
    "convert_to_dcp": "checkpoint.export.convert",
    "export_checkpoint": "checkpoint.export.safetensors",
}


def __getattr__(name: str) -> object:
    """Import public names when they are asked for: pure ones do without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
