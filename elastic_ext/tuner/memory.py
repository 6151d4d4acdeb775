"""Memory: the most that a rank's device would hold at some point, and whether that may be tried. Pure.

What lies there between steps, *state*, follows from the plan by a formula. What forward and backward passes take beside
it, *passes*, is interpolated between the sizes of micro-batches for which it was worked out or measured; separately for
the forward pass, the loss and the backward pass, since each is linear in the size, and their maximum is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic_ext.records.metrics import JobFacts, MemoryFacts, PassesMemory
from elastic_ext.records.text import size_in_words
from elastic_ext.strategies import STRATEGIES

from .space import Point, Shape, Value, knobs_of_cost, point_of, shape_of

__all__ = ["HEADROOM", "JobMemory", "Peak", "memory_knobs", "usable_bytes"]

HEADROOM = 0.06
"""Share of a device's memory that is left free, where tuning.headroom says nothing."""
_UNSEEN = 1.1
"""Factor on a predicted peak as long as no step has confirmed a prediction."""
_MOST_GROWTH = 4.0
"""Where memory is short, or its facts were measured and not worked out, no passes are tried that take more than so many
times the largest so far."""
_UNSURE = 0.015
"""Share that passes twice as large as any so far may take beyond the prediction."""
_PLENTY = 0.7
"""Share of the usable memory up to which memory is not short."""
_KEPT_OF_BLOCKS = 0.5
"""Share of a block's activations that is taken to stay in memory where the block is computed again, if never seen."""
_plan = knobs_of_cost("move", "wrap")
"""Gives the values of those knobs of a point that say how a model is spread over its ranks."""
memory_knobs = knobs_of_cost("nothing", "move", "wrap")
"""Gives the values of those knobs of a point that say how much of a device's memory it takes."""
_ALIKE = 0.97
"""A peak, measured or predicted, counts as lower than a predicted one only where it is below this share of it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The predicted peak of memory on a rank's device at one point."""

    num_bytes: int
    passes_bytes: int
    """The most that forward and backward passes take beside state."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes that passes take beside state, at most: in the forward pass, at the loss, and in the backward pass."""

    forward: float
    loss: float
    backward: float

    @property
    def most(self) -> float:
        return max(self.forward, self.loss, self.backward)


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What the measured peaks of a job have taught."""

    update_share: float = 1.0
    """Bytes that an optimizer's step takes for a moment, as a share of parameter bytes, where facts do not say: all of
    them, as foreach optimizers take, until a measured peak is too small for that."""
    factor: float | None = None
    """The largest ratio of a measured peak to its prediction, at least 1; peaks no higher than one before do not count.
    None where none was measured."""
    passes_bytes: int = 0
    """The largest passes that steps had, as predicted."""
    highest_bytes: int = 0
    """The highest measured peak."""


class JobMemory:
    """How much memory a job's steps take, predicted from its facts and from the peaks that its steps have had."""

    def __init__(
        self,
        facts: JobFacts,
        headroom: float | None = None,
        before: JobMemory | None = None,
        *,
        limit_bytes: int | None = None,
    ) -> None:
        """``before`` is the prediction by earlier facts of the same job, whose observations are kept; ``limit_bytes``
        is the most that a rank may take of its device, where a person gives a limit."""
        self._facts = facts
        self._present = point_of(facts.values)
        capacity = None if facts.memory is None else facts.memory.capacity_bytes
        self._usable = usable_bytes(capacity, limit_bytes, HEADROOM if headroom is None else headroom)
        # At most so many bytes were held, by memory_knobs of points; None where nobody told.
        self._seen: dict[tuple[Value, ...], int | None] = {}
        self._replayed: list[tuple[Point, int | None]] = []  # the measured peaks that say something, in their order
        self._learnt = self._learnt_elsewhere = _Learnt()
        """What measured peaks have taught; and what those had taught that were measured with other shares."""
        self._refused: list[Point] = []
        self._peaks: dict[Shape, Peak | None] = {}
        self._parts: dict[tuple[int, float], _Parts | None] = {}
        if before is not None:
            self._refused.extend(dict.fromkeys([*before._refused, *before._bound_points()]))
            self._go_on_from(before)

    def _go_on_from(self, before: JobMemory) -> None:
        """Take over the peaks that ``before`` has seen where a rank's share is the same, else only what they taught."""
        is_alike = before._facts.share == self._facts.share
        self._learnt_elsewhere = before._learnt_elsewhere if is_alike else before._learnt
        self._learnt = self._learnt_elsewhere
        for point, peak_bytes in before._replayed if is_alike else ():
            self.see(point, peak_bytes)

    def see(self, point: Point, peak_bytes: int | None) -> None:
        """Take a measured peak: steps were taken at ``point``, and ``peak_bytes`` is the most on any rank so far."""
        learnt, highest = self._learnt, self._learnt.highest_bytes
        is_highest = peak_bytes is not None and peak_bytes > highest  # so that these steps have reached it
        knobs = memory_knobs(point)
        if is_highest or knobs not in self._seen or (peak_bytes is not None and self._seen[knobs] is None):
            self._seen[knobs] = peak_bytes
            self._replayed.append((point, peak_bytes))
        self._learnt = learnt = replace(learnt, highest_bytes=max(highest, peak_bytes or 0))
        peak = self.peak(point)
        if peak is None:
            return
        if peak_bytes is not None and peak_bytes < _ALIKE * peak.num_bytes and learnt.update_share:
            self._learnt = learnt = replace(learnt, update_share=0.0)
            self._peaks.clear()  # they have that share in them, and such a peak was not reached
            peak = self.peak(point) or peak
        factor = learnt.factor
        if peak_bytes is not None and is_highest:
            factor = max(factor or 1.0, peak_bytes / max(peak.num_bytes, 1))
        self._learnt = replace(learnt, factor=factor, passes_bytes=max(learnt.passes_bytes, peak.passes_bytes))

    def peak(self, point: Point) -> Peak | None:
        """The predicted peak at ``point``; None where nothing is known of the job's memory."""
        shape = shape_of(point, self._facts)
        if shape not in self._peaks:
            self._peaks[shape] = self._peak_of(shape)
        return self._peaks[shape]

    def expected_bytes(self, point: Point) -> int | None:
        """The predicted peak at ``point``, corrected by measured peaks; None where it is unknown or has no limit."""
        peak = self.peak(point)
        return None if peak is None or self._usable is None else int(peak.num_bytes * (self._learnt.factor or 1.0))

    def why_not(self, point: Point) -> str:
        """Why memory might not suffice for ``point``, as a sentence; empty where ``point`` may be tried."""
        for refused in [*self._refused, *self._bound_points()]:
            if self._takes_no_less(point, refused):
                return f"memory did not suffice for {_words(refused)}, and {_words(point)} takes no less"
        if self._usable is None:
            return self._why_not_unlimited(point)
        peak = self.peak(point)
        if peak is None:
            is_present = memory_knobs(point) == memory_knobs(self._present)
            return "" if is_present else f"nothing is known of the memory that {_words(point)} takes"
        factor, passes_bytes = self._learnt.factor, self._learnt.passes_bytes
        expected = (peak.num_bytes + self._unsure_bytes(peak)) * (_UNSEEN if factor is None else factor)
        expected = min(expected, self._seen.get(memory_knobs(point)) or expected)
        if expected > self._usable:
            return f"{_words(point)} would take {size_in_words(int(expected))} of {size_in_words(int(self._usable))}"
        is_far = passes_bytes and peak.passes_bytes > _MOST_GROWTH * passes_bytes
        if is_far and (self._is_measured or expected > _PLENTY * self._usable):
            times = peak.passes_bytes / passes_bytes
            return f"passes of {_words(point)} would take {times:.1f} times what any have taken so far"
        return ""

    def _unsure_bytes(self, peak: Peak) -> float:
        """Bytes that passes may take beyond the prediction, since none have been so large yet."""
        most = self._learnt.passes_bytes
        if not most or peak.passes_bytes <= most:
            return 0.0
        return _UNSURE * peak.passes_bytes * min(math.log2(peak.passes_bytes / most), 2.0)

    def _why_not_unlimited(self, point: Point) -> str:
        """Why ``point`` may not be tried where no memory limit is known: empty on a CPU, which has none; on another
        device nothing may be tried that could take more than the present point."""
        if self._facts.device == "cpu":
            return ""
        if _same_plan(point, self._present) and self._micro_batch(point) <= self._micro_batch(self._present):
            return ""
        return f"nothing is known of the memory that {_words(point)} takes, and it may be more than is taken now"

    # ---- what did not suffice ----

    def _bound_points(self) -> list[Point]:
        """The present point at the micro-batch for which the job says that memory did not suffice, if it says so."""
        bound = self._facts.bound
        return [] if bound is None else [self._present._replace(batch_size=bound)]

    def _takes_no_less(self, point: Point, refused: Point) -> bool:
        """Whether ``point`` takes at least as much memory as ``refused``, which did not fit, by the same plan or by
        prediction."""
        if not _same_plan(point, refused):
            ours, theirs = self.peak(point), self.peak(refused)
            if ours is not None and theirs is not None:
                return ours.num_bytes >= _ALIKE * theirs.num_bytes
        return self._micro_batch(point) >= self._micro_batch(refused)

    def _micro_batch(self, point: Point) -> int:
        return shape_of(point, self._facts).micro_batch

    @property
    def _is_measured(self) -> bool:
        return self._facts.memory is not None and self._facts.memory.source == "measured"

    # ---- prediction ----

    def _update_bytes(self, memory: MemoryFacts) -> float:
        """Bytes that an optimizer's step takes for a moment beside state, for a whole model."""
        return memory.update_bytes or self._learnt.update_share * memory.parameter_bytes

    def _peak_of(self, shape: Shape) -> Peak | None:
        """The predicted peak of a step of ``shape``: the most that is allocated at any of three moments.

        These are the forward pass with the loss, the backward pass, and the optimizer's step. At each there is state
        (parameters and optimizer state by shard, buffers, and ``besides_bytes``, which hold no tensors of the model)
        and, of that moment, gathered parameters, gradients, and what passes or the optimizer take. Passes have so far
        taken ``scale`` times what was worked out.
        """
        memory = self._facts.memory
        if memory is None:
            return None
        size = shape.micro_batch, shape.activation_checkpoint
        if size not in self._parts:
            self._parts[size] = _passes_at(memory.passes, shape, self._facts.num_blocks)
        parts = self._parts[size]
        if parts is None:
            return None
        degree = shape.shard_degree
        state = (memory.parameter_bytes + memory.optimizer_bytes) / degree + memory.buffer_bytes + memory.besides_bytes
        gathered = _gathered_bytes(memory, shape)
        gradients = _gradient_bytes(memory, shape, self._facts.world_size)
        scale = memory.scale
        most = max(
            state + gathered + gradients.forward + scale * max(parts.forward, parts.loss),
            state + gathered + gradients.backward + scale * parts.backward,
            state + gradients.optimizer + self._update_bytes(memory) / degree,
        )
        return Peak(int(most), int(scale * parts.most))


def usable_bytes(capacity_bytes: int | None, allowed_bytes: int | None, headroom: float) -> float | None:
    """The memory that a rank may use: the lesser of capacity and allowance, less the headroom; None where neither is
    known."""
    known = [each for each in (capacity_bytes, allowed_bytes) if each is not None]
    return min(known) * (1 - headroom) if known else None


def _same_plan(one: Point, other: Point) -> bool:
    return _plan(one) == _plan(other)


def _gathered_bytes(memory: MemoryFacts, shape: Shape) -> float:
    """Bytes of gathered parameters at once, beside the shards that stay between steps.

    Parameters that are in no block (``other_bytes``) stay gathered with any units of blocks.
    """
    if not shape.is_sharded:
        return 0.0
    if not STRATEGIES[shape.strategy].gathers_again:
        return float(memory.parameter_bytes)
    blocks = min((1 + shape.units_ahead) * shape.unit * memory.block_bytes, memory.parameter_bytes - memory.other_bytes)
    return float(blocks + memory.other_bytes)


class _Gradients(NamedTuple):
    """Bytes of gradients: while a forward pass runs, in the last backward pass, and as the optimizer steps."""

    forward: float
    backward: float
    optimizer: float


def _gradient_bytes(memory: MemoryFacts, shape: Shape, world_size: int) -> _Gradients:
    """The bytes of gradients in three cases: DDP or one rank, sharded with several micro-steps, sharded with one.

    With several, gradients of earlier micro-steps are there from the forward pass on.
    """
    whole, has_earlier = float(memory.gradient_bytes), shape.num_micro_steps > 1
    if not shape.is_sharded:
        buckets = whole if world_size > 1 else 0.0  # DDP's buckets are a copy of all gradients
        return _Gradients(whole * has_earlier + buckets, whole + buckets, whole + buckets)
    part = whole / shape.shard_degree
    of_unit = min(whole, whole / max(memory.parameter_bytes, 1) * shape.unit * memory.block_bytes)
    if has_earlier:  # added up unsharded, and reduce-scattered unit by unit in the last micro-step
        return _Gradients(whole, whole + of_unit, part)
    return _Gradients(0.0, part + 2 * of_unit, part)  # one unit computed, the one before it reduce-scattered


# ---- passes: lines through what is known ----


def _passes_at(passes: Sequence[PassesMemory], shape: Shape, num_blocks: int) -> _Parts | None:
    """What passes of ``shape`` take, by lines through the ``passes`` that are known; None where none are known."""
    by_share: dict[float, list[PassesMemory]] = {}  # by the share of blocks whose activations are computed again
    for each in passes:
        by_share.setdefault(each.activation_checkpoint, []).append(each)
    if not by_share:
        return None
    known = {recomputed: _on_lines(found, shape.micro_batch) for recomputed, found in by_share.items()}
    least, most = min(known), max(known)
    if least > 0:
        known[0.0] = _with_none_recomputed(known[least], least, num_blocks)
    if most < 1:
        known[1.0] = _with_all_recomputed(known[most], most)
    return _between(known, shape.activation_checkpoint)


def _on_lines(found: Sequence[PassesMemory], micro_batch: int) -> _Parts:
    """What passes of ``micro_batch`` samples take, each part on a line of its own through the sizes in ``found``."""
    sizes = sorted({each.micro_batch for each in found})
    most = {size: [each for each in found if each.micro_batch == size] for size in sizes}

    def line(name: str) -> float:
        return _on_line([(size, max(getattr(each, name) for each in most[size])) for size in sizes], micro_batch)

    return _Parts(line("forward_bytes"), line("loss_bytes"), line("backward_bytes"))


def _on_line(known: Sequence[tuple[int, float]], size: int) -> float:
    """Bytes at ``size``, interpolated or extrapolated from the ``known`` sizes and their bytes.

    Below the smallest size it is that size's bytes; above the largest one, the steeper of the last slope and the mean
    slope goes on; with one known size, bytes are proportional to the size.
    """
    first, last = known[0], known[-1]
    if size <= first[0]:
        return first[1]
    for (low, few), (high, many) in itertools.pairwise(known):
        if size <= high:
            return few + (many - few) * (size - low) / (high - low)
    if len(known) == 1:
        return last[1] * size / last[0]
    before = known[-2]
    slope = max((last[1] - before[1]) / (last[0] - before[0]), (last[1] - first[1]) / (last[0] - first[0]), 0.0)
    return last[1] + slope * (size - last[0])


def _with_none_recomputed(parts: _Parts, recomputed: float, num_blocks: int) -> _Parts:
    """An upper bound of what passes take with no block computed again, from ``parts`` at the share ``recomputed``.

    A block's activations were in memory whole while the block was computed again, so no block takes more than the peak:
    all blocks and the rest take at most num_blocks + 1 peaks. By the other bound the share 1 - ``recomputed`` of blocks
    took no more than the peak, so that all take at most peak / (1 - ``recomputed``).
    """
    times = max(num_blocks, 1) + 1.0
    if recomputed < 1:
        times = min(times, 1 / (1 - recomputed))
    more = (times - 1) * parts.most
    return _Parts(parts.forward + more, parts.loss + more, parts.backward + more)


def _with_all_recomputed(parts: _Parts, recomputed: float) -> _Parts:
    """A high estimate of what passes take with all blocks computed again, from ``parts`` at the share ``recomputed``.

    Of the blocks that were not computed again so far, _KEPT_OF_BLOCKS stays. Logits take as much as before.
    """
    less = (1 - _KEPT_OF_BLOCKS) * (1 - recomputed) * parts.forward
    return _Parts(parts.forward - less, max(parts.loss - less, 0.0), max(parts.backward - less, 0.0))


def _between(known: dict[float, _Parts], recomputed: float) -> _Parts:
    """What passes take at the share ``recomputed`` of blocks computed again, interpolated between ``known`` shares."""
    shares = sorted(known)
    if recomputed <= shares[0]:
        return known[shares[0]]
    for low, high in itertools.pairwise(shares):
        if recomputed <= high:
            part = (recomputed - low) / (high - low)
            one, other = known[low], known[high]
            return _Parts(
                one.forward + (other.forward - one.forward) * part,
                one.loss + (other.loss - one.loss) * part,
                one.backward + (other.backward - one.backward) * part,
            )
    return known[shares[-1]]


def _words(point: Point) -> str:
    recomputed = point.activation_checkpoint
    computed = (
        f" with {recomputed:.0%} of blocks computed again" if isinstance(recomputed, float) and recomputed else ""
    )
    return f"{point.batch_size} samples at once by {point.strategy or 'the present plan'}{computed}"
