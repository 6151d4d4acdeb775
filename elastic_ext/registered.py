"""Registered: tensors that a script has a trainer's checkpoints hold: named among the others, and filled again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

import torch
from torch.distributed.tensor import DTensor

from .errors import CheckpointMismatch
from .fsdp.checkpoint.contents import REGISTERED, own_registered_prefix
from .fsdp.checkpoint.format.tensor_bytes import put_part
from .fsdp.checkpoint.loading.source import Opened, Wanted
from .fsdp.layout import Box
from .fsdp.state import box_of, local_of
from .fsdp.value_encoding import dtype_of

__all__ = ["Registered", "claim_registered", "fill_registered", "named_registered", "wanted_of_registered"]

_logger = logging.getLogger(__name__)

Registered = dict[str, Mapping[str, torch.Tensor]]


def named_registered(registered: Registered) -> dict[str, torch.Tensor]:
    """All their tensors, as they are called in a checkpoint."""
    return {
        f"{REGISTERED}{quote(name, safe='')}/{key}": tensor  # keys may have slashes in them
        for name, held in registered.items()
        for key, tensor in held.items()
    }


def wanted_of_registered(
    opened: Opened, registered: Registered, unclaimed: Registered, *, rank: int, num_ranks: int
) -> list[Wanted]:
    """What is registered, to be filled; what is not so far waits for whoever registers it.

    Of what ranks had of their own each gets its own where there are as many ranks, and the first one's elsewhere.
    """
    saved = _saved_under(opened, REGISTERED)
    unsaved = sorted(registered.keys() - saved.keys())
    if unsaved and rank == 0:
        _logger.warning("%s has no registered state %s: it stays as it is", opened.found.path, ", ".join(unsaved))
    is_own = opened.num_ranks == num_ranks
    own = _saved_under(opened, own_registered_prefix(rank if is_own else 0))
    if own and not is_own and rank == 0:
        _logger.warning(
            "%s has registered state %s of each of %d ranks, and here are %d: all get that of rank 0",
            opened.found.path,
            ", ".join(sorted(own)),
            opened.num_ranks,
            num_ranks,
        )
    for name, keys in own.items() if is_own else ():
        saved[name] |= {key: full for key, full in keys.items() if _is_whole(registered.get(name, {}).get(key))}
    unclaimed.clear()
    wanted = []
    for name, keys in saved.items():
        held = registered.get(name)
        if held is None:
            unclaimed[name] = {key: opened.read_whole("extra", full) for key, full in keys.items()}
            continue
        metas = {key: opened.tensor("extra", full) for key, full in keys.items()}
        kept = {key: _Kept(meta.layout.shape, dtype_of(meta.dtype)) for key, meta in metas.items() if meta}
        _check_registered(name, held, kept, str(opened.found.path))
        what = f"registered state {name}"
        wanted += [Wanted(full, local_of(held[key]), box_of(full, held[key]), what) for key, full in keys.items()]
    return wanted


def _saved_under(opened: Opened, prefix: str) -> dict[str, dict[str, str]]:
    """What there is of registered state: its tensors' names in the checkpoint, by its own and their keys."""
    saved: dict[str, dict[str, str]] = {}
    for full in opened.names("extra"):
        if full.startswith(prefix):
            quoted, _, key = full.removeprefix(prefix).partition("/")
            saved.setdefault(unquote(quoted), {})[key] = full
    return saved


def _is_whole(held: torch.Tensor | None) -> bool:
    """Whether a rank has all of what is registered by now; parts of what ranks had differently make no whole."""
    return held is None or box_of("registered", held) == Box.whole(tuple(held.shape))


def claim_registered(name: str, held: Mapping[str, torch.Tensor], unclaimed: Registered) -> None:
    """Fill what is registered now with what was loaded under its name, if anything was; it stays there if it cannot."""
    if name in unclaimed:
        fill_registered(name, held, unclaimed[name])
        del unclaimed[name]


def fill_registered(name: str, held: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    """Put tensors that were loaded, whole, into those that are registered; CheckpointMismatch if they do not fit."""
    kept = {key: _Kept(tuple(tensor.shape), tensor.dtype) for key, tensor in loaded.items()}
    _check_registered(name, held, kept, "what was loaded")
    with torch.no_grad():
        for key, tensor in held.items():
            if isinstance(tensor, DTensor) and not isinstance(loaded[key], DTensor):
                put_part(local_of(tensor), box_of(key, tensor), loaded[key])
            else:
                tensor.copy_(loaded[key])


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor of registered state, as it was saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _check_registered(name: str, held: Mapping[str, torch.Tensor], kept: Mapping[str, _Kept], where: str) -> None:
    """CheckpointMismatch unless the tensors that are registered can be filled with those that were saved."""
    if held.keys() != kept.keys():
        raise CheckpointMismatch(f"registered state {name!r} has {sorted(held)}, and {where} has {sorted(kept)}")
    misshaped = {
        key or name: f"{tensor.dtype} {tuple(tensor.shape)} here, {kept[key].dtype} {kept[key].shape} there"
        for key, tensor in held.items()
        if tuple(tensor.shape) != kept[key].shape or not torch.can_cast(kept[key].dtype, tensor.dtype)
    }
    if misshaped:
        raise CheckpointMismatch(f"registered state {name!r} is not that of {where}", misshaped=misshaped)
