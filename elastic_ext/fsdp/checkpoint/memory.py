"""Tensors' memory as bytes: what files are written from and read into.

A tensor on the host whose elements lie one after another is used as it is, and nothing is copied. Any other goes
through memory of its own, one tensor at a time.
"""

from __future__ import annotations

import torch

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.moves import moves_into

__all__ = ["bytes_of", "is_plain", "part_of"]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after another in the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a plain tensor; what is written to it is in the tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def part_of(tensor: torch.Tensor, box: Box, part: Box) -> memoryview:
    """The bytes of ``part``, in its row-major order, of a tensor that holds ``box``."""
    if part.is_empty:
        return memoryview(b"")
    moves = moves_into(part, Layout(box.shape, (box,)), target=0)
    item_bytes = tensor.element_size()
    if len(moves) == 1 and moves[0].source_strides == (1,) and is_plain(tensor):
        first = moves[0].source_offset
        return bytes_of(tensor)[first * item_bytes : (first + part.num_elements) * item_bytes]
    source = tensor.detach().contiguous().reshape(-1)
    copy = torch.empty(part.num_elements, dtype=tensor.dtype)
    for move in moves:
        copy.as_strided(move.sizes, move.target_strides, move.target_offset).copy_(
            source.as_strided(move.sizes, move.source_strides, source.storage_offset() + move.source_offset)
        )
    return bytes_of(copy)
