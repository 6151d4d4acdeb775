"""What torch keeps of a DeviceMesh whose process groups are to end: the groups, and results of sharding propagation.

Meshes of equal ranks compare equal, also where the groups of one are gone: what torch has worked out for one mesh it
gives out for the other, results that lie on groups which are gone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from elastic_ext.errors import ElasticError
from elastic_ext.version import TESTED_TORCH_IN_WORDS

__all__ = ["forget_propagation", "let_go_of_groups", "make_sure_of_meshes"]


def make_sure_of_meshes() -> None:
    """Raise ElasticError where this torch keeps what this file needs in another place."""
    _clearing()


def forget_propagation() -> None:
    """Empty what torch has cached of sharding propagation of DTensors, in Python and in C++."""
    if "torch.distributed.tensor" in sys.modules:
        _clearing()()


def let_go_of_groups(mesh: Any) -> None:
    """Have a mesh, and those that it is a part of, keep no process group alive; it can be used no more."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    for each in (mesh, root):
        registry = getattr(each, "_pg_registry", None)  # an older torch finds groups by name alone
        if registry is not None:
            registry.clear()


def _clearing() -> Any:
    try:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError:
        raise ElasticError(
            f"torch {torch.__version__} has no _clear_sharding_prop_cache in torch.distributed.tensor.debug, without "
            "which DTensors would come out on process groups that are gone; ranks come and leave running processes "
            f"with torch {TESTED_TORCH_IN_WORDS}, and otherwise by a restart"
        ) from None
    return _clear_sharding_prop_cache
