"""Tensors' memory as bytes: what files are written from and read into.

A tensor on the host whose elements lie one after another is used as it is, and nothing is copied. Any other goes
through memory of its own, one tensor at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic_ext.fsdp.layout import Box, Layout
from elastic_ext.fsdp.moves import moves_into
from elastic_ext.fsdp.state import memory_of

__all__ = ["WrittenPart", "bytes_of", "part_of", "put_bytes", "put_part"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's own memory, which is known to be one run on the host."""
    found = memory_of(tensor)
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WrittenPart:
    """The part of a tensor that a rank writes: ``part`` of the ``box`` that its local ``tensor`` holds."""

    name: str
    dtype: str
    tensor: torch.Tensor
    box: Box
    part: Box
    is_stepped: bool = False
    """Whether the tensor changes in ``optimizer.step()`` alone."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.part.sizes

    @property
    def num_bytes(self) -> int:
        return self.part.num_elements * self.tensor.element_size()


def part_of(tensor: torch.Tensor, box: Box, part: Box) -> memoryview:
    """The bytes of ``part``, in row-major order, from a local tensor that holds ``box``; a copy where needed."""
    if part.is_empty:
        return memoryview(b"")
    memory = _memory_of(tensor, box, part)
    if memory is not None:
        return memory
    copy = torch.empty(part.num_elements, dtype=tensor.dtype, device="cpu")
    _gather(tensor, box, part, copy)
    return bytes_of(copy)


def put_bytes(part: WrittenPart, into: memoryview) -> None:
    """Copy the bytes of a part to ``into``."""
    if part.part.is_empty:
        return
    target = torch.frombuffer(into, dtype=torch.uint8)
    memory = _memory_of(part.tensor, part.box, part.part)
    if memory is not None:
        target.copy_(torch.frombuffer(memory, dtype=torch.uint8))
    else:
        _gather(part.tensor, part.box, part.part, target.view(part.tensor.dtype))


def _memory_of(tensor: torch.Tensor, box: Box, part: Box) -> memoryview | None:
    """The memory of ``part`` within the tensor, None unless it lies on the host as one run."""
    memory = memory_of(tensor)
    if memory is None or part == box:
        return memory
    moves = moves_into(part, Layout(box.shape, (box,)), target=-1)
    if len(moves) > 1 or moves[0].source_strides != (1,):
        return None
    first, item_bytes = moves[0].source_offset, tensor.element_size()
    return memory[first * item_bytes : (first + part.num_elements) * item_bytes]


def _gather(tensor: torch.Tensor, box: Box, part: Box, into: torch.Tensor) -> None:
    """Copy the elements of ``part`` to ``into``, which is flat."""
    source = tensor.detach().contiguous().reshape(-1)
    for move in moves_into(part, Layout(box.shape, (box,)), target=-1):
        into.as_strided(move.sizes, move.target_strides, into.storage_offset() + move.target_offset).copy_(
            source.as_strided(move.sizes, move.source_strides, source.storage_offset() + move.source_offset)
        )


def put_part(into: torch.Tensor, box: Box, whole: torch.Tensor) -> None:
    """Fill the local tensor ``into``, which holds ``box``, from the whole tensor."""
    source = whole.detach().contiguous().reshape(-1)
    part = torch.empty(box.num_elements, dtype=whole.dtype, device=whole.device)
    for move in moves_into(box, Layout(box.shape, (Box.whole(box.shape),)), target=-1):
        part.as_strided(move.sizes, move.target_strides, move.target_offset).copy_(
            source.as_strided(move.sizes, move.source_strides, source.storage_offset() + move.source_offset)
        )
    with torch.no_grad():
        into.copy_(part.reshape(into.shape))
