"""Where one rank's dataloader stands, as its own part of a checkpoint: what no other rank has, nor can go on from."""

from __future__ import annotations

import json
from typing import Any

import torch

from .errors import CheckpointDamaged
from .fsdp.checkpoint.loading.source import Opened
from .fsdp.pickled_values import read_plain
from .fsdp.value_encoding import pack, unpack

__all__ = ["own_position", "packed_position"]

_PREFIX = "position"  # of the names of its tensors


def packed_position(held: Any, rank: int) -> dict[str, torch.Tensor]:
    """What a loader says of where it stands, as tensors by names; none where it says nothing."""
    if held is None:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    whole = json.dumps(pack(held, f"{_PREFIX}/{rank}", tensors)).encode()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return {**copies, f"{_PREFIX}/{rank}": torch.frombuffer(bytearray(whole), dtype=torch.uint8)}


def own_position(opened: Opened, *, rank: int, num_ranks: int) -> Any:
    """What the same rank had packed, if there were as many; else None."""
    whole = f"{_PREFIX}/{rank}"
    names = {name for name in opened.names("extra") if name == whole or name.startswith(f"{whole}/")}
    if opened.num_ranks != num_ranks or whole not in names:
        return None
    tensors = {name: opened.read_whole("extra", name) for name in sorted(names)}
    try:
        return unpack(read_plain(tensors[whole].numpy().tobytes()), tensors)
    except ValueError as error:
        raise CheckpointDamaged(f"{opened.found.path} does not say where the dataloader stood: {error}") from None
