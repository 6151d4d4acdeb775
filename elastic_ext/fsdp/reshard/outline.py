"""The outline of a training's tensors: what a rank that comes is told, so that it has the same ones to be filled.

Told are parameters, to be compared, and which gradients and optimizer state there are; numbers that optimizers keep,
such as counts of steps, are in it. What is in the tensors is moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.fsdp.layout import row_major
from elastic_ext.fsdp.value_encoding import pack, unpack

from .affected_tensors import lies_like

__all__ = ["begin_like", "outline_of", "tell_outline"]


def outline_of(parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The outline of these parameters, their gradients, and the state that optimizers keep of them, as JSON has it.

    ValueError where there is state of them that cannot be told.
    """
    state: list[Any] = []
    for number, optimizer in enumerate(optimizers):
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                where = f"the optimizer's state {key!r} of {name}"
                if not isinstance(key, str):
                    raise ValueError(f"{where} has a key that is no text")
                if lies_like(parameter, value, f"{name}/{key}"):
                    state.append([number, name, key, "like", _dtype(value)])
                elif isinstance(value, torch.Tensor):
                    is_beside = value.device.type == parameter.device.type
                    told = [list(value.shape), value.flatten().tolist(), is_beside]
                    state.append([number, name, key, "number", _dtype(value), *told])
                else:
                    try:
                        state.append([number, name, key, "value", pack(value, where)])
                    except TypeError as error:
                        raise ValueError(str(error)) from error
    return {
        "parameters": [[name, list(each.shape), _dtype(each)] for name, each in parameters.items()],
        "gradients": [name for name, each in parameters.items() if each.grad is not None],
        "state": state,
    }


def tell_outline(outline: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """The outline that rank 0 gives, on all ranks of the default group; all of them call this."""
    told = b"" if outline is None else json.dumps(outline).encode()
    size = torch.tensor([len(told)], device=device)
    dist.broadcast(size, 0)
    memory = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if told:
        memory.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
    dist.broadcast(memory, 0)
    found: dict[str, Any] = json.loads(bytes(memory.cpu().numpy()))
    return found


def begin_like(
    outline: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> None:
    """Have the gradients and the state that an outline tells of, without memory, in place of what is there.

    ValueError where the parameters are not those of the outline.
    """
    own = [[name, list(each.shape), _dtype(each)] for name, each in parameters.items()]
    told = outline["parameters"]
    if own != told:
        differing = [each for each in (*own, *told) if each not in own or each not in told] or ["their order"]
        raise ValueError(
            f"the model of this rank has {len(own)} parameters and that of the others {len(told)}; they differ in "
            f"{differing[0]}: run the same script with the same model on all ranks"
        )
    if outline["state"] and max(row[0] for row in outline["state"]) >= len(optimizers):
        raise ValueError(f"this rank has {len(optimizers)} optimizers, and the others have more; give it the same ones")
    for name, parameter in parameters.items():
        parameter.grad = _without_memory(parameter, parameter.dtype) if name in outline["gradients"] else None
    for optimizer in optimizers:
        optimizer.state.clear()
    for number, name, key, kind, *rest in outline["state"]:
        parameter = parameters[name]
        optimizers[number].state[parameter][key] = _made(parameter, kind, rest)


def _made(parameter: nn.Parameter, kind: str, told: Sequence[Any]) -> object:
    if kind == "value":
        return unpack(told[0])
    dtype = getattr(torch, told[0])
    if kind == "like":
        return _without_memory(parameter, dtype)
    shape, numbers, is_beside = told[1:]
    return torch.tensor(numbers, dtype=dtype, device=parameter.device if is_beside else "cpu").view(shape)


def _without_memory(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a parameter's shape, spread as the parameter is, that takes no memory."""
    zero = torch.zeros((), dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zero.expand(parameter.shape)
    shape = tuple(parameter.shape)
    return DTensor.from_local(
        zero.expand(parameter._local_tensor.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=row_major(shape),
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
