"""Versions: what a checkpoint says of the programs that saved it."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Those of this process by name; that of elastic_ext where it is installed, and not only on the path."""
    known = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        return {**known, "elastic_ext": metadata.version("elastic-ext")}
    except metadata.PackageNotFoundError:
        return known
