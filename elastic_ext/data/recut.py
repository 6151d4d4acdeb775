"""Recut: batches that torch's default_collate has made, cut and joined as if they had been made so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map  # as torch's documentation has it

__all__ = ["can_be_recut", "cut", "join"]


def can_be_recut(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether batches are made as is known here: by default_collate, which nobody has taught other types."""
    known = default_collate.__module__
    return collate_fn is default_collate and all(
        getattr(each, "__module__", None) == known for each in default_collate_fn_map.values()
    )


def cut(batch: Any, start: int, stop: int, num_samples: int) -> Any:
    """The samples from ``start`` to before ``stop`` of a batch of so many; ValueError where it cannot be cut."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or batch.shape[0] != num_samples:
            raise ValueError(f"a tensor of shape {list(batch.shape)} is no batch of {num_samples} samples")
        return batch[start:stop].clone()  # the rest is handed out later, whatever becomes of this
    if _is_of_texts(batch):
        if len(batch) != num_samples:
            raise ValueError(f"{len(batch)} texts are no batch of {num_samples} samples")
        return batch[start:stop]
    return _like(batch, [cut(part, start, stop, num_samples) for part in _parts(batch)])


def join(batches: Sequence[Any]) -> Any:
    """One batch of the samples of all; ValueError where they are not alike."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise ValueError("batches of unlike types cannot be joined")
    if isinstance(first, torch.Tensor):
        if len({(batch.dtype, batch.shape[1:]) for batch in batches}) > 1:
            raise ValueError("batches of unlike tensors cannot be joined")
        return torch.cat(list(batches))
    if _is_of_texts(first):
        return type(first)(text for batch in batches for text in batch)
    columns = [_parts(batch) for batch in batches]
    if len({len(parts) for parts in columns}) > 1:
        raise ValueError("batches of unlike lengths cannot be joined")
    if isinstance(first, Mapping) and any(list(batch) != list(first) for batch in batches):
        raise ValueError("batches of unlike keys cannot be joined")
    return _like(first, [join(column) for column in zip(*columns, strict=True)])


def _is_of_texts(batch: Any) -> bool:
    """Texts are left as they are: a sequence of them has one for each sample."""
    return isinstance(batch, (list, tuple)) and bool(batch) and all(isinstance(part, (str, bytes)) for part in batch)


def _parts(batch: Any) -> list[Any]:
    """What a sample consists of, each part a batch."""
    if isinstance(batch, Mapping) and type(batch) is dict:
        return list(batch.values())
    if type(batch) in (list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return list(batch)
    raise ValueError(f"a {type(batch).__name__} cannot be cut")


def _like(batch: Any, parts: list[Any]) -> Any:
    if isinstance(batch, Mapping):
        return dict(zip(batch, parts, strict=True))
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
