"""Comparing: whether a rank still holds, bit for bit, what a checkpoint has of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from elastic_ext.fsdp.state import Held

from .contents import VALUES, Contents, FileKind, own_prefix, own_registered_prefix
from .memory import bytes_of, part_of
from .opened import Opened, Wanted

__all__ = ["first_change"]

_OF_THE_FIRST = frozenset({"buffer", "scalar"})  # which the first rank alone has saved


def first_change(opened: Opened, contents: Contents, *, rank: int, passes_over: tuple[str, ...]) -> str | None:
    """What of ``contents`` is not as it was saved, None where all of it is; it holds one tensor twice at a time.

    ``passes_over`` are what does not matter: what the names of tensors, and the keys of plain values, begin with.
    """
    saved, state, values = opened.state, _as_json(contents.state), _as_json(contents.values)
    changed = [f"optimizer state {name}" for name, value in values.items() if value != saved[VALUES].get(name)]
    if rank == 0:
        changed += [key for key, value in state.items() if value != saved.get(key) and not key.startswith(passes_over)]
    if changed:
        return changed[0]
    for kind, held in contents.by_kind():
        for each in held:
            is_anothers = each.is_alias_of is not None or (rank > 0 and each.kind in _OF_THE_FIRST)
            if not (is_anothers or each.name.startswith(passes_over) or _is_saved(opened, kind, each)):
                return each.name
    here = {each.name for each in contents.extra}
    own = own_prefix(rank), own_registered_prefix(rank)
    return min((name for name in opened.names("extra") - here if name.startswith(own)), default=None)  # alike by now


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(values))
    return result


def _is_saved(opened: Opened, kind: FileKind, held: Held) -> bool:
    meta = opened.tensor(kind, held.name)
    if meta is None or meta.layout.shape != held.box.shape or meta.dtype != held.dtype:
        return False
    copy = torch.empty(held.box.num_elements, dtype=held.tensor.dtype, device="cpu")
    opened.read(kind, [Wanted(held.name, copy, held.box)])
    return bytes_of(copy) == part_of(held.tensor, held.box, held.box)
