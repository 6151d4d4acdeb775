"""What a rank has of a model, its optimizers and more, collected for a checkpoint; tensors that differ between ranks
are found here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from elastic_ext.fsdp.checkpoint.contents import (
    EXTRA_STATES,
    GROUPS,
    REGISTERED,
    Contents,
    own_prefix,
    own_registered_prefix,
)
from elastic_ext.fsdp.checkpoint.coordination import gather_or_raise
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import bytes_of
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.optimizers import held_of_optimizers
from elastic_ext.fsdp.state import LocalShard, box_of, extra_states, held, held_of_model, memory_of
from elastic_ext.fsdp.value_encoding import pack
from elastic_ext.ranks.group import Ranks

__all__ = [
    "Collect",
    "Comparable",
    "SaveRequest",
    "ToSave",
    "contents_of",
    "differing_names",
    "mixed_words",
    "with_own",
]


# --- what a rank has of a model, its optimizers and more, for a checkpoint -------------------------------------------
# Nothing is copied.

Collect: TypeAlias = "Callable[[], Contents]"
"""A function that collects what this rank contributes to a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class ToSave:
    """What one rank is to save: how to collect it, and which parameters change in ``optimizer.step()`` alone."""

    collect: Collect
    stepped: Sequence[torch.Tensor] = ()
    """Parameters that are known to change in ``optimizer.step()`` alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SaveRequest:
    """One checkpoint that all ranks are to save."""

    name: str
    what: ToSave
    ask: Callable[[], str]
    """Says in words what this rank was called for, so that ``agree_on`` can compare ranks."""
    step: int
    epoch: int
    replaces: bool = False
    """Whether the checkpoint that this run went on from may be replaced, if it has this name; it is set aside."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """JSON that whoever resumes from the checkpoint is told of the run that saved it."""


def contents_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    rank: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Contents:
    """What this rank contributes to a checkpoint of a model, its optimizers and more; copies nothing.

    ``tensors`` are the same on every rank, and the first one's are kept, or each rank's part of those that are spread;
    ``own`` are this rank's alone, under names that no other rank uses.
    """
    of_model = held_of_model(model)
    optim = held_of_optimizers(optimizers, of_model.parameters, rank=rank)
    shared = dict(tensors or {})
    packed = {name: pack(value, f"{EXTRA_STATES}/{name}", shared) for name, value in extra_states(model).items()}
    extra = [held(name, tensor, box_of(name, tensor), "buffer") for name, tensor in shared.items()]
    extra += [held(name, tensor, box_of(name, tensor), "opaque") for name, tensor in (own or {}).items()]
    return Contents(
        model=of_model.tensors,
        optim=optim.tensors,
        extra=extra,
        state={**(state or {}), GROUPS: optim.groups, EXTRA_STATES: packed},
        values=optim.values,
    )


# --- whole tensors that each rank has, and may have come to differently, such as running means -----------------------
# In their own place are those of the first rank; each rank's own are saved besides, where they differ.

_WORDS_AT_ONCE = 1 << 21  # of 8 bytes, on a device: so much memory is needed there, a few times over
_FACTORS = (-0x61C8864680B583EB, -0x4B47D0C5A1A6B5D9)  # odd, as they have to be; what overflows is cut off


class Comparable:
    """Tensors that each rank has whole, maybe with different values: the model's buffers, and registered ones."""

    def __init__(self, contents: Contents, rank: int) -> None:
        self._contents = contents
        self._held = dict(_own_names(contents, rank))
        self._digests: dict[str, str] | None = None

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each of these tensors by its name; equal on ranks where the tensor is equal."""
        if self._digests is None:
            self._digests = {each.name: _digest_of(each.tensor) for each in self._held.values()}
        return self._digests

    @property
    def digest(self) -> str:
        """One digest of all these tensors; equal on ranks where all of them are equal."""
        return xxhash.xxh3_64(repr(sorted(self.digests.items())).encode()).hexdigest()

    def contents_with(self, names: Collection[str]) -> Contents:
        """The rank's contents, and besides its own copies of the tensors in ``names``, under names of this rank."""
        own = [held(name, each.tensor, each.box, "opaque") for name, each in self._held.items() if each.name in names]
        return replace(self._contents, extra=[*self._contents.extra, *own])


def differing_names(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The names of tensors that differ between ranks that have them, by the ``Comparable.digests`` of each rank."""
    seen: dict[str, set[str]] = {}
    for of_rank in digests:
        for name, digest in of_rank.items():
            seen.setdefault(name, set()).add(digest)
    return sorted(name for name, different in seen.items() if len(different) > 1)


def with_own(collect: Callable[[], Contents], ranks: Ranks) -> Contents:
    """This rank's contents as a save has them: with its own copies of tensors that differ. All ranks call this."""
    if ranks.world_size == 1:
        return collect()
    found: list[Comparable] = []

    def compare() -> dict[str, str]:
        found.append(Comparable(collect(), ranks.rank))
        return dict(found[0].digests)

    names = differing_names(gather_or_raise(ranks, compare, "comparing buffers and registered tensors of the ranks"))
    return found[0].contents_with(names)


def _own_names(contents: Contents, rank: int) -> Iterator[tuple[str, LocalShard]]:
    """Whole buffers and registered tensors, each after its name among the rank's own; shards always differ."""
    for each in contents.model:
        if each.kind == "buffer" and each.is_alias_of is None and each.box == Box.whole(each.box.shape):
            yield f"{own_prefix(rank)}{each.name}", each
    for each in contents.extra:
        if each.name.startswith(REGISTERED) and each.box == Box.whole(each.box.shape):
            yield f"{own_registered_prefix(rank)}{each.name.removeprefix(REGISTERED)}", each


def _digest_of(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bits; equal bits on devices of one kind give equal digests."""
    if tensor.device.type == "cpu":
        whole = tensor if memory_of(tensor) is not None else tensor.contiguous()
        return xxhash.xxh3_64(bytes_of(whole)).hexdigest()
    return mixed_words(tensor)


def mixed_words(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bits, computed on its device as a sum of words, each mixed with its place: to copy many
    gigabytes to the host would take seconds."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    num_words = data.numel() // 8
    rest = data[8 * num_words :].cpu().numpy().tobytes().hex()  # also of what is too short for a word
    words = data[: 8 * num_words].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, num_words, _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        mixed = torch.arange(start + 1, start + 1 + part.numel(), device=data.device).mul_(_FACTORS[0])
        mixed.bitwise_xor_(part).mul_(_FACTORS[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_FACTORS[0])
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum()
    return f"{data.numel()} {int(total)} {rest}"
