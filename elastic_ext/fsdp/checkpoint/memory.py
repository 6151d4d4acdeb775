"""Tensors' memory as bytes: what files are written from and read into.

A tensor on the host whose elements lie one after another is used as it is, and nothing is copied. Any other goes
through memory of its own, one tensor at a time.
"""

from __future__ import annotations

import torch

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.moves import moves_into
from elastic_ext.fsdp.state import memory_of

__all__ = ["bytes_of", "part_of", "put_part"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that is known to be one run on the host."""
    found = memory_of(tensor)
    assert found is not None
    return found


def part_of(tensor: torch.Tensor, box: Box, part: Box) -> memoryview:
    """The bytes of ``part``, in its row-major order, of a tensor that holds ``box``."""
    if part.is_empty:
        return memoryview(b"")
    memory = memory_of(tensor)
    if memory is not None and part == box:
        return memory
    moves = moves_into(part, Layout(box.shape, (box,)), target=-1)
    item_bytes = tensor.element_size()
    if memory is not None and len(moves) == 1 and moves[0].source_strides == (1,):
        first = moves[0].source_offset
        return memory[first * item_bytes : (first + part.num_elements) * item_bytes]
    source = tensor.detach().contiguous().reshape(-1)
    copy = torch.empty(part.num_elements, dtype=tensor.dtype, device="cpu")
    for move in moves:
        copy.as_strided(move.sizes, move.target_strides, move.target_offset).copy_(
            source.as_strided(move.sizes, move.source_strides, source.storage_offset() + move.source_offset)
        )
    return bytes_of(copy)


def put_part(into: torch.Tensor, box: Box, whole: torch.Tensor) -> None:
    """Fill a tensor that holds ``box`` from the whole tensor."""
    source = whole.detach().contiguous().reshape(-1)
    part = torch.empty(box.num_elements, dtype=whole.dtype, device=whole.device)
    for move in moves_into(box, Layout(box.shape, (Box.whole(box.shape),)), target=-1):
        part.as_strided(move.sizes, move.target_strides, move.target_offset).copy_(
            source.as_strided(move.sizes, move.source_strides, source.storage_offset() + move.source_offset)
        )
    with torch.no_grad():
        into.copy_(part.reshape(into.shape))
