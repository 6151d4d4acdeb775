"""The random state of every generator that this process draws from, as tensors, without pickle."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_tensors", "restore_random"]


def random_tensors() -> dict[str, torch.Tensor]:
    """Copies of this process's random states: of Python, numpy if imported, torch, and each CUDA device in use.

    The device that is current goes by no number, since it may have another one where this is restored.
    """
    found = {"python": _text(random.getstate()), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _text(numpy.random.get_state(legacy=False))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device()
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            found["cuda" if device == current else f"cuda:{device}"] = state
    return found


def restore_random(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Restore the states of random generators; gives the names of those that this process does not have.

    ValueError where a state is not one of its generator's; those before it are then restored all the same.
    """
    left = []
    for name, tensor in tensors.items():
        try:
            if not _restore(name, tensor.cpu()):
                left.append(name)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the random state {name!r} is not one that was saved: {error}") from error
    return left


def _restore(name: str, tensor: torch.Tensor) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if name == "python":
        version, words, drawn = _value(tensor)
        random.setstate((version, tuple(words), drawn))
    elif name == "torch":
        torch.set_rng_state(tensor)
    elif name == "numpy" and numpy is not None:
        state = _value(tensor)
        own = numpy.random.get_state(legacy=False)["bit_generator"]
        if state["bit_generator"] != own:
            raise ValueError(f"it is of {state['bit_generator']}, and numpy draws from {own} here")
        numpy.random.set_state(state)
    elif name == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor)
    elif name.startswith("cuda:") and torch.cuda.is_available() and int(name[5:]) < torch.cuda.device_count():
        if int(name[5:]) != torch.cuda.current_device():  # whose state is another's
            torch.cuda.set_rng_state(tensor, int(name[5:]))
    else:
        return False
    return True


def _text(state: object) -> torch.Tensor:
    """A random state as a tensor of the bytes of JSON text."""
    data = json.dumps(state, default=lambda array: array.tolist()).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _value(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.numpy()))
