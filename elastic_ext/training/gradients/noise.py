"""The noise of gradients, from pairs of steps, and what the size of a step means to what is learned."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.ranks.world import World
from elastic_ext.records.metrics import LearningFacts
from elastic_ext.training.steps.state import StepState

from .sharing import SharesGradients

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["GradientPairs", "Learning"]

_logger = logging.getLogger(__name__)


# --- the gradients of two steps in a row, looked at as optimizers are about to use them, and compared ----------------
# No second copy of all gradients is kept: of each tensor some thousand elements are looked at, the same in both steps
# and spread evenly over the tensor, each of which counts for those around it. What follows from the numbers is in
# NoiseScale; which steps are looked at, in Learning. No parameter is held from one step to the next, since it may
# become another object.

_MOST_ELEMENTS = 4096  # of a tensor
_MOST_KEPT = 16  # weights of so many looks


@dataclass(frozen=True, slots=True)
class _NoisePiece:
    """The part of one gradient on this rank that the noise scale is measured on."""

    position: int
    """The place of the gradient's parameter among those of all optimizers."""
    num_elements: int
    weight: float
    """How many elements of the whole gradient each one stands for, divided among the ranks that have it."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece of a gradient, and the slice of its elements that are looked at."""

    piece: _NoisePiece
    elements: slice


_Seen = tuple[tuple[_NoisePiece, ...], torch.Tensor]  # elements of some tensors on one device, one after another


@dataclass(slots=True)
class _Look:
    """The gradient elements that were seen in one step."""

    places: dict[int, int]
    """Positions of the parameters that were not looked at so far, by their ids."""
    seen: list[_Seen] = field(default_factory=list)


class GradientPairs:
    """Samples this rank's gradients in two steps in a row, and compares them, for the noise scale."""

    def __init__(
        self,
        state: StepState,
        optimizers: Sequence[Optimizer],
        gradients: SharesGradients,
        *,
        num_ranks: int,
    ) -> None:
        """``num_ranks`` ranks add up what ``compare`` gives on each of them."""
        self._state = state
        self._optimizers = optimizers
        self._gradients = gradients
        self._num_ranks = num_ranks
        self._number = -1  # of the step that was looked at last
        self._now: _Look | None = None
        self._first: _Look | None = None
        self._cuts: dict[tuple[int, int, int], _Cut] = {}  # by position, number of elements, and of ranks that share it
        self._weights: dict[tuple[tuple[_NoisePiece, ...], torch.dtype, torch.device], torch.Tensor] = {}

    def take_world(self, world: World) -> None:
        """Weigh what this rank sees as a part of what the ranks of ``world`` add up."""
        self._num_ranks = world.size
        self._cuts.clear()
        self._weights.clear()

    @torch.no_grad()
    def look(self, parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> None:
        """Sample the gradients of parameters not seen yet in this step; they are ``scale`` times too large.

        Calls no collective, and waits for no device.
        """
        look, num_shards = self._look_of(self._state.number), self._gradients.sharing.num_shards
        pieces: dict[torch.device, list[_NoisePiece]] = {}
        views: dict[torch.device, list[torch.Tensor]] = {}
        for part in parameters:
            position = look.places.pop(id(part), None)
            if position is None:
                continue
            held, shards = _local(part, num_shards)
            if is_lazy(held) or held.layout is not torch.strided or not held.dtype.is_floating_point:
                continue
            if held.numel() == 0:
                continue
            cut = self._cuts.get((position, held.numel(), shards)) or self._cut_of(position, held.numel(), shards)
            view = _some_of(held, cut.elements)
            if view.device not in pieces:
                pieces[view.device], views[view.device] = [], []
            pieces[view.device].append(cut.piece)
            views[view.device].append(view if part.grad is not None else torch.zeros_like(view))
        for device, found in views.items():
            elements = torch.cat(found)  # a copy: optimizers may change gradients
            if elements.dtype is not torch.float64:
                elements = elements.float()
            if scale is not None:
                elements /= scale.to(device)
            look.seen.append((tuple(pieces[device]), elements))

    def keep(self) -> None:
        """Keep the samples of the step that was looked at as the first of a pair."""
        self._first, self._now = self._now, None

    def compare(self) -> tuple[float, float] | None:
        """This rank's part of the pair's squared difference and of its product; the pair is forgotten.

        Zeros where no gradients lie on this rank, None where the two steps are no pair. Waits for the device.
        """
        first, second = self._first, self._now
        self.forget()
        if first is None or second is None:
            return None
        if not _is_pair(first.seen, second.seen):
            return None
        sums = [torch.zeros(2)]
        for (pieces, one), (_, other) in zip(first.seen, second.seen, strict=True):
            weights, apart = self._weights_of(pieces, one), one - other
            sums.append(torch.stack([torch.dot(apart * weights, apart), torch.dot(one * weights, other)]))
        apart_squares, products = zip(*(each.tolist() for each in sums), strict=True)
        return sum(apart_squares), sum(products)  # and not fsum, which raises where there are infinities

    def forget(self) -> None:
        """Drop what was seen so far, so that it is no part of a pair."""
        self._first = self._now = None
        self._number = -1

    def _look_of(self, number: int) -> _Look:
        """The look at the step with this number; a step that is taken again has another number."""
        if self._now is None or number != self._number:
            trained = (part for each in self._optimizers for group in each.param_groups for part in group["params"])
            self._now = _Look({id(part): position for position, part in enumerate(trained)})
            self._number = number
        return self._now

    def _cut_of(self, position: int, num_elements: int, num_shards: int) -> _Cut:
        """Which of a gradient's ``num_elements`` on this rank are looked at: each n-th, from one of the first n on.

        No row or column of the tensor is passed over, since n has no divisor in common with any of its sizes.
        """
        stride = -(-num_elements // _MOST_ELEMENTS)
        while math.gcd(stride, num_elements) > 1:
            stride += 1
        start = random.Random(position).randrange(stride) if stride < num_elements else 0
        num_seen = len(range(start, num_elements, stride))
        piece = _NoisePiece(position, num_seen, num_elements / num_seen * num_shards / self._num_ranks)
        cut = self._cuts[position, num_elements, num_shards] = _Cut(piece, slice(start, None, stride))
        return cut

    def _weights_of(self, pieces: tuple[_NoisePiece, ...], elements: torch.Tensor) -> torch.Tensor:
        """The weight of each element that was looked at, in the order of ``elements``."""
        key = pieces, elements.dtype, elements.device
        if key not in self._weights:
            if len(self._weights) >= _MOST_KEPT:
                self._weights.clear()
            each = torch.tensor([piece.weight for piece in pieces], dtype=elements.dtype)
            counts = torch.tensor([piece.num_elements for piece in pieces])
            self._weights[key] = torch.repeat_interleave(each, counts).to(elements.device)
        return self._weights[key]


def _is_pair(first: Sequence[_Seen], second: Sequence[_Seen]) -> bool:
    """Whether the same elements were seen in two steps; a model may be moved or cast to another type in between."""

    def kinds(seen: Sequence[_Seen]) -> list[tuple[tuple[_NoisePiece, ...], torch.dtype, torch.device]]:
        return [(pieces, elements.dtype, elements.device) for pieces, elements in seen]

    return kinds(first) == kinds(second)


def _some_of(held: torch.Tensor, elements: slice) -> torch.Tensor:
    """The given slice of a tensor's elements, in the order of their indices, without a copy of the others."""
    if held.is_contiguous():
        return held.view(-1)[elements]
    return held.take(torch.arange(elements.start, held.numel(), elements.step, device=held.device))


def _local(part: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, int]:
    """The part of a parameter's gradient on this rank, and over how many ranks one copy of it is sharded.

    The parameter's own part where it has no gradient; nothing of a distributed gradient that is not summed up yet.
    ``num_shards`` is the answer for a plain tensor.
    """
    held = part if part.grad is None else part.grad
    if not isinstance(held, DTensor):
        return held, num_shards
    placements = held.placements
    if any(placement.is_partial() for placement in placements):
        return held.to_local().new_empty(0), 1
    sizes = zip(placements, held.device_mesh.shape, strict=True)
    # Shards of a tensor that is cut by two dimensions of the mesh do not all call themselves so.
    return held.to_local(), math.prod(size for placement, size in sizes if not placement.is_replicate())


# --- what the size of a step means to what is learned, seen while training goes on -----------------------------------
# Looked at only where that is wanted: where the user lets steps grow, or where rates follow the noise of gradients.
# Which steps are looked at, and when ranks add up what they have seen, depends on what is the same on all of them.

_KEY = "global_batch_size"
_FIRST_PAIRS, _MORE_PAIRS = 16, 48  # of steps; so many without steps between them, and until there are so many
_OFTEN_STEPS, _EVERY_STEPS = 8, 32  # ... one pair in so many, and then in so many; even numbers
_DIGITS = 2  # of what is told: what is no news is not told again
_OWN_SIZE = (
    "the tuner changes how many samples a step has where the dataloader can be told its sizes; use ElasticDataLoader"
)


class Learning:
    """Measures the noise of gradients on this rank, and says whether the tuner may change a step's samples."""

    def __init__(self, training: Training) -> None:
        self.is_on = False
        """Whether gradients are looked at; the same on all ranks, from one boundary to the next."""
        self.lets_grow = False
        """Whether the user lets the tuner choose how many samples a step has, and the number can be changed."""
        self.why_not = ""
        """Why the number of samples cannot be changed, where the user would let the tuner; else empty."""
        self._training = training
        self._follower = training.follower
        self._counts = training.counts
        self._batches = training.batches
        self._state = training.state
        self._pairs = GradientPairs(
            training.state, training.optimizers, training.gradients, num_ranks=training.ranks.world_size
        )
        self._rule = training.options.learning_rate_rule
        self._step = self._num_samples = 0  # as the step under way began
        self._first: tuple[int, int] | None = None  # the first step of a pair, and its samples

    def take_up(self, config: ElasticConfig) -> None:
        """Follow ``config`` from the next step on; called on all ranks at the same boundary."""
        knobs = config.tuning.knobs or {}
        self.why_not = self._why_not(config) if _KEY in knobs else ""
        self.lets_grow = _KEY in knobs and not self.why_not
        is_wanted = self.lets_grow or self._rule == "adascale"
        self.is_on = is_wanted and self._follower.settings.enabled and self._batches.global_batch is not None
        if not self.is_on:
            self.forget()
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, whose gradients are looked at if it is one of a pair."""
        counts = self._counts
        self._step, self._num_samples = counts.global_step, counts.num_samples
        is_seen = self.is_on and self._is_seen(counts.noise_scale.num_steps)
        self._state.on_gradients = self._pairs.look if is_seen else None

    def end_step(self) -> None:
        """End a step, on all ranks, which after the second of a pair add up what they have seen.

        They also do where it has not committed, since other ranks may believe that it has: that is found out elsewhere.
        """
        counts, noise = self._counts, self._counts.noise_scale
        number, noise.num_steps = noise.num_steps, noise.num_steps + 1
        if not self._is_seen(number):
            return
        num_samples = counts.num_samples - self._num_samples if counts.global_step > self._step else 0
        if number % 2 == 0:
            self._pairs.keep()
            self._first = number, num_samples
            return
        is_pair, self._first = num_samples > 0 and self._first == (number - 1, num_samples), None
        seen = self._pairs.compare()
        self._take(num_samples, self._all_of(seen if is_pair else None))

    def take_world(self, world: World) -> None:
        """Look at gradients as one of the ranks of ``world``, from the next step on."""
        self._pairs.take_world(world)
        self.forget()

    def forget(self) -> None:
        """Drop the first step of a pair, since the next gradients are of another model or of another state of it."""
        self._pairs.forget()
        self._first = None

    def facts(self) -> LearningFacts | None:
        """What the tuner is told of learning: rate rule, first batch, noise scale; None where steps may not grow."""
        first = self._counts.reference_batch
        if not self.lets_grow or first is None:
            return None
        return LearningFacts(rule=self._rule, first_batch=first, noise_scale=self._told)

    @property
    def _told(self) -> float | None:
        """The noise scale rounded to the digits that are reported, None where it is not known."""
        found = self._counts.noise_scale.value
        return None if found is None else float(f"{found:.{_DIGITS}g}")

    def _why_not(self, config: ElasticConfig) -> str:
        """Why a step cannot have another number of samples, empty where it can."""
        batch = self._batches.global_batch
        if self._batches.source is None or batch is None:
            return _OWN_SIZE
        return self._batches.check(config.revise({_KEY: 2 * batch}, "to be asked for")) or ""

    def _is_seen(self, number: int) -> bool:
        """Whether the gradients of the step with this number are looked at; the same for both steps of a pair."""
        num_tried = self._counts.noise_scale.num_tried
        if num_tried < _FIRST_PAIRS:
            return True
        return number % (_OFTEN_STEPS if num_tried < _MORE_PAIRS else _EVERY_STEPS) < 2

    def _all_of(self, seen: tuple[float, float] | None) -> tuple[float, float] | None:
        """The sums over all ranks of what they have seen, the same on all to the bit; None where one saw no pair."""
        text = "" if seen is None else " ".join(map(float.hex, seen))
        texts = self._follower.bring_noise(text)
        if "" in texts:
            return None
        each = [tuple(map(float.fromhex, told.split())) for told in texts]
        apart, product = (sum(numbers) for numbers in zip(*each, strict=True))  # fsum raises for infinities
        return apart, product

    def _take(self, num_samples: int, seen: tuple[float, float] | None) -> None:
        noise = self._counts.noise_scale
        before = noise.value
        if seen is None or not all(map(math.isfinite, seen)):
            noise.note_nothing()
            return
        noise.add(num_samples, apart=seen[0], product=seen[1])
        if noise.value == before:
            return
        if before is None and self._follower.ranks.rank == 0:
            _logger.info(
                "gradients have as much noise as gradient at about %g samples per step; a step has %d samples now",
                self._told,
                num_samples,
            )
        self._training.session.follow_noise()
