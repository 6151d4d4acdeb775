"""What the analysis process is told of a model in training: shapes and types of its inputs and parameters, its factory,
its optimizers' settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .questions import MainModule, OptimizerKind, Origin, ParameterKind, origin_of

__all__ = [
    "FactoryOrigins",
    "batch_dim",
    "describe",
    "dtype_name",
    "dtype_of",
    "factory_of",
    "from_description",
    "names_of",
    "num_bytes_of",
    "optimizer_kinds",
    "parameter_kinds",
]


# --- what a model is given, told in JSON by shapes and types alone, and made again with other sizes ------------------
# A tensor is told by its shape, its type, and which dimension counts rows. What it holds is not told: where a model
# decides by that, it cannot be worked out what it takes. *Rows* are samples, as a rule; of some models several are one
# sample, as two views of it.

_MOST_DEPTH = 6


def describe(value: Any, num_rows: int, dim: int, depth: int = _MOST_DEPTH) -> dict[str, Any]:
    """The description of a model's inputs in JSON, tensors by shape and dtype; ValueError for what JSON cannot hold.

    A tensor whose dimension ``dim`` has size ``num_rows`` counts its rows there.
    """
    if isinstance(value, torch.Tensor):
        shape = _shape(value)
        if shape is None:
            raise ValueError("a tensor that is not dense")
        has_rows = len(shape) > dim and shape[dim] == num_rows
        return {"shape": list(shape), "dtype": dtype_name(value.dtype), "dim": dim if has_rows else None}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if depth == 0:
        raise ValueError("containers within containers, more than six deep")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(part, num_rows, dim, depth - 1) for key, part in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe(part, num_rows, dim, depth - 1) for part in value]}
    raise ValueError(f"a {type(value).__name__}")


def from_description(tree: Mapping[str, Any], num_rows: int) -> Any:
    """Inputs of ``num_rows`` rows, made by a description that ``describe`` gave; tensors are ``torch.empty``."""
    if "shape" in tree:
        shape = list(tree["shape"])
        if tree["dim"] is not None:
            shape[tree["dim"]] = num_rows
        return torch.empty(shape, dtype=dtype_of(tree["dtype"]))
    if "value" in tree:
        return tree["value"]
    if "dict" in tree:
        return {key: from_description(part, num_rows) for key, part in tree["dict"].items()}
    if "tuple" in tree:
        return tuple(from_description(part, num_rows) for part in tree["tuple"])
    return [from_description(part, num_rows) for part in tree["list"]]


def batch_dim(value: Any, micro_batch: int) -> tuple[int, int] | None:
    """The dimension in which a model's inputs count rows, and how many rows there are, by the inputs' first tensor.

    It is the first dimension of the size ``micro_batch``, the most samples at once; dimension 0, where none is of that
    size. None where there is no tensor, or the first one is not dense or has no dimensions.
    """
    first = next(_tensors_in(value, _MOST_DEPTH), None)
    shape = None if first is None else _shape(first)
    if not shape:
        return None
    for dim, size in enumerate(shape):
        if size == micro_batch:
            return dim, size
    return 0, shape[0]


def num_bytes_of(tree: Mapping[str, Any], num_rows: int) -> int:
    """Bytes of the tensors in a description that ``describe`` gave, for ``num_rows`` rows."""
    if "shape" in tree:
        shape = [num_rows if dim == tree["dim"] else size for dim, size in enumerate(tree["shape"])]
        return math.prod(shape) * dtype_of(tree["dtype"]).itemsize
    parts = tree.get("tuple") or tree.get("list") or list((tree.get("dict") or {}).values())
    return sum(num_bytes_of(part, num_rows) for part in parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name; ValueError where this torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return found


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of a tensor; None for one that is not dense, or has symbolic sizes, as while a compiler traces."""
    try:
        if tensor.is_sparse or tensor.is_nested or tensor.is_quantized:
            return None
        shape = tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return None
    return shape if all(type(size) is int for size in shape) else None


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part, depth - 1)
    elif depth > 0 and isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part, depth - 1)


# --- what another process has to be told of a model in training, to work out what its steps take ---------------------

_OF_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # parts of names that a module has by its wrapper
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoryOrigins:
    """Where another process imports the functions from that make a model like the trained one, and its loss."""

    main: MainModule | None
    model: Origin
    loss: Origin | None


def factory_of(
    model_factory: Callable[[], nn.Module] | None, loss_fn: Callable[..., torch.Tensor] | None
) -> FactoryOrigins | None:
    """Where the user's functions are found; None without a factory; ValueError if no other process can find them."""
    if model_factory is None:
        if loss_fn is not None:
            raise ValueError(
                "loss_fn was given without model_factory; it says what is computed from the outputs of the model that "
                "model_factory makes: give both or neither"
            )
        return None
    model, main = origin_of("model_factory", model_factory)
    if loss_fn is None:
        return FactoryOrigins(main=main, model=model, loss=None)
    loss, main_of_loss = origin_of("loss_fn", loss_fn)
    return FactoryOrigins(main=main or main_of_loss, model=model, loss=loss)


def parameter_kinds(model: nn.Module) -> tuple[ParameterKind, ...]:
    """The parameters of a model without its wrapper; ValueError where their whole shape is not known."""
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) holds parameters flattened, so that their shapes are not known; shard "
            "the model with fully_shard"
        )
    if any(is_lazy(each) for each in model.parameters()):
        raise ValueError("the model has lazy parameters, which have no shape before the first forward pass")
    return tuple(
        ParameterKind(
            name=_bare(name),
            shape=tuple(each.shape),
            dtype=dtype_name(each.dtype),
            is_trained=each.requires_grad,
        )
        for name, each in model.named_parameters()
    )


def optimizer_kinds(
    model: nn.Module, optimizers: Iterable[Optimizer], *, is_on_accelerator: bool
) -> tuple[OptimizerKind, ...]:
    """The settings of torch's own optimizers; none at all where one of them is of another kind."""
    names = {id(each): _bare(name) for name, each in model.named_parameters()}
    kinds = []
    for optimizer in optimizers:
        kind = type(optimizer)
        groups = [_settings(group, names, is_on_accelerator=is_on_accelerator) for group in optimizer.param_groups]
        is_known = kind.__module__.startswith("torch.optim") and getattr(torch.optim, kind.__name__, None) is kind
        if not is_known or None in groups:
            return ()
        kinds.append(OptimizerKind(name=kind.__name__, groups=tuple(each for each in groups if each is not None)))
    return tuple(kinds)


def names_of(model: nn.Module, parts: Sequence[nn.Module]) -> tuple[str, ...]:
    """The names of some modules within a model, in their order; ValueError where one is not in it any more."""
    names = {id(part): _bare(f"{name}.")[:-1] for name, part in model.named_modules()}
    if any(id(part) not in names for part in parts):
        raise ValueError("a block that the model had is no longer a part of it")
    return tuple(names[id(part)] for part in parts)


def _settings(
    group: Mapping[str, Any], names: Mapping[int, str], *, is_on_accelerator: bool
) -> Mapping[str, Any] | None:
    """A parameter group as JSON has it; None where it has parameters that are not the model's."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params":
            if any(id(each) not in names for each in value):
                return None
            found[key] = [names[id(each)] for each in value]
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            found[key] = value.item()
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(e, _PLAIN) for e in value)):
            found[key] = value
    if is_on_accelerator and found.get("foreach", False) is None and not found.get("fused"):
        found["foreach"] = True  # torch's choice there, and not where it is worked out
    if "capturable" in found:
        found["capturable"] = False  # which asks for an accelerator
    return found


def _bare(name: str) -> str:
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name
