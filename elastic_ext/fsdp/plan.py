"""ParallelPlan: how the state of a model in training is spread over its ranks. Pure.

Words: a *copy* is the whole of a model's state, on one rank or sharded over several. The *shard degree* is over how
many ranks a copy is sharded, the *replicate degree* how many copies there are; their product is the number of ranks. A
*block* is one of the parts that a model repeats, a *unit* what is gathered at once: some blocks in a row, or the whole
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ext.strategies import STRATEGIES, StrategyName, strategies_in_words

from .layout import Box, Cut, Layout, box_after

__all__ = [
    "MOST_MIB",
    "UNEVEN",
    "Degrees",
    "Layouts",
    "ParallelPlan",
    "blocks_recomputed",
    "over_holders",
    "parts_of",
    "units_of_blocks",
]

MOST_MIB = 1 << 20
"""The largest size of a bucket in MiB: a tebibyte."""

UNEVEN = (
    "{} is cut along dimension {}, whose size {} cannot be shared out evenly over {} ranks, as fully_shard needs it "
    "there; choose a shard degree that divides it"
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many copies of a model there are, and over how many ranks each is sharded; ranks of a copy are neighbours."""

    replicate: int
    shard: int

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard

    def layout(self, shape: tuple[int, ...], dim: int = 0) -> Layout:
        """The layout of a tensor that is cut along ``dim``, in parts as ``torch.chunk`` makes them."""
        return Layout(shape, parts_of(shape, dim, self.shard) * self.replicate)


class Layouts:
    """Layouts of tensors by given degrees; a model repeats its shapes, and each layout is worked out once."""

    def __init__(self, degrees: Degrees, ranks: Sequence[int | None]) -> None:
        """``ranks`` are those of the holders of the layouts; a holder of no rank has nothing."""
        self._degrees, self._ranks = degrees, ranks
        self._known: dict[tuple[tuple[int, ...], int], Layout] = {}

    def of(self, shape: tuple[int, ...], dim: int = 0) -> Layout:
        """The layout of a tensor that is cut along ``dim``."""
        if (shape, dim) not in self._known:
            self._known[shape, dim] = over_holders(self._degrees.layout(shape, dim), self._ranks)
        return self._known[shape, dim]


def over_holders(layout: Layout, ranks: Sequence[int | None]) -> Layout:
    """A layout by rank as one over holders of these ranks; a holder of no rank has nothing."""
    nothing = Box.empty(layout.shape)
    return Layout(layout.shape, tuple(nothing if rank is None else layout.boxes[rank] for rank in ranks))


def parts_of(shape: tuple[int, ...], dim: int, num_parts: int) -> tuple[Box, ...]:
    """The part of a tensor for each of ``num_parts`` ranks when it is cut along ``dim``."""
    boxes = [box_after(shape, [Cut(dim, num_parts, part)]) for part in range(num_parts)]
    return tuple(box for box in boxes if box is not None)  # a single cut leaves one block


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How a model is to be spread; the strategies are named as torch's are, in either case.

    ``no_shard`` is torch's DistributedDataParallel. ``hybrid_shard`` with a ``shard_degree`` of 1 keeps whole copies as
    well, as parameters that stay the same objects when they are sharded. Without a degree its copies are those of a
    machine. ``unit`` is a number of blocks, or "whole". ``activation_checkpoint`` is the share of blocks whose
    activations are computed again in the backward pass; ``prefetch`` how many units are gathered ahead, where not as
    torch does by itself; ``bucket_cap_mb`` the size of DDP's buckets.
    """

    strategy: StrategyName
    shard_degree: int | None = None
    unit: int | Literal["whole"] = 1
    activation_checkpoint: float | Literal["none", "all"] = 0.0
    prefetch: int | None = None
    bucket_cap_mb: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", _strategy(self.strategy))
        object.__setattr__(self, "activation_checkpoint", _ratio(self.activation_checkpoint))
        if self.shard_degree is not None:
            _check_count("shard_degree", self.shard_degree, 1)
        if self.prefetch is not None:
            _check_count("prefetch", self.prefetch, 0)
        if self.unit != "whole":
            _check_count("unit", self.unit, 1, also=' or "whole"')
        cap = self.bucket_cap_mb
        if cap is not None and not (_is_number(cap) and 0 < cap <= MOST_MIB):
            raise ValueError(
                f"bucket_cap_mb is {cap!r}; allowed: a number above 0, up to {MOST_MIB}, in MiB, or None for torch's"
            )
        if self.is_replicated and (self.shard_degree or 1) > 1:
            raise ValueError(
                f"shard_degree is {self.shard_degree} with the strategy {self.strategy}, where nothing is sharded; "
                "choose another strategy or leave it out"
            )

    @property
    def ratio(self) -> float:
        """The share of blocks whose activations are computed again."""
        assert isinstance(self.activation_checkpoint, float)
        return self.activation_checkpoint

    @property
    def reshards_after_forward(self) -> bool:
        """Whether units give gathered parameters back after the forward pass, and gather them anew for the backward."""
        return STRATEGIES[self.strategy].gathers_again

    @property
    def is_replicated(self) -> bool:
        """Whether parameters are plain tensors, whole on each rank, and DDP averages their gradients."""
        return not STRATEGIES[self.strategy].is_sharded

    def rank_multiple(self, num_local: int) -> int:
        """Of what the number of ranks, ``num_local`` to a machine, has to be a multiple; 1 where any is allowed."""
        return (self.shard_degree or num_local) if STRATEGIES[self.strategy].has_degree else 1

    def degrees(self, num_ranks: int, num_local: int) -> Degrees:
        """The degrees on ``num_ranks`` ranks, ``num_local`` to a machine; ValueError where they do not divide."""
        if self.is_replicated:
            return Degrees(num_ranks, 1)
        shard = self.shard_degree
        if not STRATEGIES[self.strategy].has_degree:
            if shard not in (None, num_ranks):
                raise ValueError(
                    f"shard_degree is {shard} with the strategy {self.strategy}, which shards over all {num_ranks} "
                    "ranks; leave it out, or choose hybrid_shard"
                )
            return Degrees(1, num_ranks)
        if shard is None:
            shard = num_local
        if num_ranks % shard:
            given = "the ranks of a machine" if self.shard_degree is None else "shard_degree"
            divisors = ", ".join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)
            raise ValueError(f"{given}: {shard} does not divide the {num_ranks} ranks; allowed: {divisors}")
        return Degrees(num_ranks // shard, shard)


def blocks_recomputed(num_blocks: int, ratio: float) -> list[bool]:
    """For each block whether it is computed again, spread evenly over the model."""
    num_chosen = round(num_blocks * ratio)
    return [(at + 1) * num_chosen // num_blocks > at * num_chosen // num_blocks for at in range(num_blocks)]


def units_of_blocks(num_blocks: int, unit: int | Literal["whole"]) -> list[range]:
    """The numbers of the blocks of each unit, in order; none where the whole model is one. The last may be smaller."""
    if unit == "whole":
        return []
    return [range(first, min(first + unit, num_blocks)) for first in range(0, num_blocks, unit)]


def _strategy(given: object) -> StrategyName:
    name = getattr(given, "name", given)  # torch's own is an enum
    if isinstance(name, str) and name.lower() in STRATEGIES:
        return name.lower()  # type: ignore[return-value]
    raise ValueError(f"strategy is {given!r}; allowed: {strategies_in_words()}")


def _ratio(given: object) -> float:
    if given in ("none", "all"):
        return float(given == "all")
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1:
        return float(given)
    raise ValueError(f'activation_checkpoint is {given!r}; allowed: "none", "all", or a share of blocks from 0 to 1')


def _check_count(name: str, given: object, least: int, also: str = "") -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"{name} is {given!r}; allowed: an integer >= {least}{also}")


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
