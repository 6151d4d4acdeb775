"""What another process has to be told of a model in training, to work out what its steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .likeness import dtype_name
from .origins import MainModule, Origin, origin_of
from .questions import OptimizerKind, ParameterKind

__all__ = ["Factory", "factory_of", "names_of", "optimizer_kinds", "parameter_kinds"]

_OF_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # parts of names that a module has by its wrapper
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Factory:
    """What makes a model like the one that is trained, and its loss, where another process finds them."""

    main: MainModule | None
    model: Origin
    loss: Origin | None


def factory_of(
    model_factory: Callable[[], nn.Module] | None, loss_fn: Callable[..., torch.Tensor] | None
) -> Factory | None:
    """What was given, None where nothing was; ValueError where another process could not find it."""
    if model_factory is None:
        if loss_fn is not None:
            raise ValueError(
                "loss_fn was given without model_factory; it says what is computed from the outputs of the model that "
                "model_factory makes: give both or neither"
            )
        return None
    model, main = origin_of("model_factory", model_factory)
    if loss_fn is None:
        return Factory(main=main, model=model, loss=None)
    loss, main_of_loss = origin_of("loss_fn", loss_fn)
    return Factory(main=main or main_of_loss, model=model, loss=loss)


def parameter_kinds(model: nn.Module) -> tuple[ParameterKind, ...]:
    """Of a model without its wrapper; ValueError where its parameters do not tell what they are in the whole model."""
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise ValueError("FSDP1 holds parameters flattened, so that they do not tell what they were")
    if any(is_lazy(each) for each in model.parameters()):
        raise ValueError("the model has parameters without a shape")
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
    """Those of torch's own; none at all, where there is one of another kind."""
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
    """Of some modules within a model, in their order; ValueError where one has been taken out of it."""
    names = {id(part): _bare(f"{name}.")[:-1] for name, part in model.named_modules()}
    if any(id(part) not in names for part in parts):
        raise ValueError("a block that the model had is no longer a part of it")
    return tuple(names[id(part)] for part in parts)


def _settings(
    group: Mapping[str, Any], names: Mapping[int, str], *, is_on_accelerator: bool
) -> Mapping[str, Any] | None:
    """A group as JSON has it; None where it has parameters that are not the model's."""
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
