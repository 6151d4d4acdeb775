"""Names: what a model's parameters and buffers are called, whatever the model is wrapped in.

A name is what ``state_dict()`` of the bare model would call it. Tensors that a model holds under several names are one
tensor: the name that comes first in the alphabet is its own, the others are aliases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_ext.torch_private import sharded

__all__ = ["NamedTensor", "named_modules", "named_tensors"]

# Names that only wrappers give to what they wrap: torch.compile, FSDP1, activation checkpointing and offloading.
_ALWAYS_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_CALL_IT_MODULE = (DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A parameter or a persistent buffer, with its name in the model."""

    name: str
    tensor: torch.Tensor
    """The model's own tensor object, by which optimizers know parameters."""
    kind: Literal["parameter", "buffer"]
    is_alias_of: str | None


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name that it has; a wrapper has the name of the module that it wraps."""
    return _modules_under(model, "")


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Every parameter, and every buffer that ``state_dict()`` has, in the order of the model."""
    seen: dict[str, tuple[torch.Tensor, Literal["parameter", "buffer"]]] = {}
    for prefix, module in named_modules(model):
        transient = sharded.transient_buffers(module)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            _add(seen, prefix + name, parameter, "parameter")
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in transient:
                _add(seen, prefix + name, buffer, "buffer")
    own = _own_names((name, tensor) for name, (tensor, _) in seen.items())
    return [
        NamedTensor(name, tensor, kind, None if own[id(tensor)] == name else own[id(tensor)])
        for name, (tensor, kind) in seen.items()
    ]


def _modules_under(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    for name, part in module._modules.items():  # named_children() leaves out what it has given under another name
        if part is not None:
            yield from _modules_under(part, prefix if _is_wrapped(module, name) else f"{prefix}{name}.")


def _is_wrapped(holder: nn.Module, name: str) -> bool:
    return name in _ALWAYS_WRAPPED or (name == "module" and isinstance(holder, _CALL_IT_MODULE))


def _add(
    seen: dict[str, tuple[torch.Tensor, Literal["parameter", "buffer"]]],
    name: str,
    tensor: torch.Tensor,
    kind: Literal["parameter", "buffer"],
) -> None:
    if name in seen and seen[name][0] is not tensor:
        raise ValueError(
            f"two tensors of the model are called {name!r} once its wrappers are taken off; rename one of them"
        )
    seen[name] = tensor, kind


def _own_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """The own name of each tensor, by its identity: the first in the alphabet, so that wrapping never changes it."""
    own: dict[int, str] = {}
    for name, tensor in tensors:
        own[id(tensor)] = min(name, own.get(id(tensor), name))
    return own
