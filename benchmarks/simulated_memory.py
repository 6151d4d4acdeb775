"""What a simulated job takes of a device's memory, and what its facts let one expect of it.

Both are put together in the same way, which is that of torch: there is no secret in it. All that lies there between
steps is parameters and the optimizer's state, sharded by the shard degree, and buffers. On top of it come

- without sharding gradients, and DDP's buckets, which are as large and are there always where there are several ranks;
- with it the parameters of two units and of what is in no block, or all of them where they stay gathered until the
  backward pass (``shard_grad_op``); gradients sharded, with those of two units, or all of them and those of one unit
  where a step has several micro-steps, since they are shared in the last one alone;
- what the passes take; in the forward pass and the loss there are gradients only of earlier micro-steps.

What is hidden is what the passes truly take, which depends on the size, and how much lies idle beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from benchmarks.simulated_draw import GRAD_OP, Array, Columns, Hidden, columns_of, quirk
from elastic_ext.records.metrics import JobFacts, MemoryFacts, PassesMemory
from elastic_ext.tuner.space import Point

__all__ = ["HEADROOM", "expected_bytes", "memory_facts", "pass_bytes", "true_bytes"]

HEADROOM = 0.06
"""Of the memory that there is, what a point has to leave free to be safe."""
_RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)


def true_bytes(hidden: Hidden, columns: Columns) -> tuple[Array, Array]:
    """For each point the most that tensors hold at once, and the most that the device holds for this process."""
    passes = _true_passes(hidden, columns)
    held = _most(hidden_sizes(hidden), hidden.world_size, hidden.share, columns, passes)
    return held, held + hidden.context_bytes + hidden.fragments * np.max(passes, axis=0)


def hidden_sizes(hidden: Hidden) -> MemoryFacts:
    """What lies there beside the passes, which everybody can count."""
    return MemoryFacts(
        source="fake",
        parameter_bytes=int(hidden.parameter_bytes),
        gradient_bytes=int(hidden.gradient_bytes),
        optimizer_bytes=int(hidden.optimizer_bytes),
        buffer_bytes=int(hidden.buffer_bytes),
        block_bytes=int(hidden.block_bytes),
        other_bytes=int(hidden.other_bytes),
    )


def memory_facts(hidden: Hidden, *, scale: float, besides_bytes: float) -> MemoryFacts:
    """What an analyzer says, which has worked the passes out without the quirks of this device."""
    sizes = _sizes_told(hidden.share)
    told = [
        PassesMemory(
            micro_batch=size,
            activation_checkpoint=ratio,
            forward_bytes=int(forward),
            loss_bytes=int(loss),
            backward_bytes=int(backward),
        )
        for ratio in _RATIOS
        for size, (forward, loss, backward) in zip(
            sizes, zip(*pass_bytes(hidden, np.array(sizes), ratio), strict=True), strict=True
        )
    ]
    return replace(
        hidden_sizes(hidden),
        passes=tuple(told),
        scale=scale,
        besides_bytes=int(besides_bytes),
        capacity_bytes=int(hidden.capacity_bytes),
    )


def pass_bytes(hidden: Hidden, batch: Array, ratio: Array | float) -> tuple[Array, Array, Array]:
    """What an analyzer works out for the passes of these sizes: until the forward pass ends, the loss, and backward."""
    chosen = np.round(np.asarray(ratio) * hidden.num_blocks)
    plain = hidden.num_blocks - chosen
    saved = batch * (plain * hidden.saved_bytes + chosen * hidden.kept_bytes)
    again = batch * hidden.saved_bytes * (chosen > 0)  # one block's at a time
    forward = saved + batch * hidden.temporary_bytes * 0.5
    loss = saved + batch * hidden.logit_bytes
    backward = saved + again + batch * (hidden.temporary_bytes + 0.25 * hidden.logit_bytes)
    return forward, loss, backward


def expected_bytes(facts: JobFacts, hidden: Hidden, points: Iterable[Point]) -> Array:
    """What the device will hold at most, by the facts: what every peer that predicts memory predicts it with.

    Of the hidden job, only how points are to be read is used.
    """
    memory = facts.memory
    assert memory is not None
    columns = columns_of(hidden, list(points))
    names = ("forward_bytes", "loss_bytes", "backward_bytes")
    passes = [_between(memory.passes, name, columns) * memory.scale for name in names]
    most = _most(memory, facts.world_size, facts.share, columns, np.stack(passes))
    return most + memory.besides_bytes


def _true_passes(hidden: Hidden, columns: Columns) -> Array:
    by_size = quirk(hidden.seed, "passes", columns.batch, columns.ratio)
    factor = hidden.bias * (1 + hidden.bias_by_size * by_size)
    return np.stack(pass_bytes(hidden, columns.batch, columns.ratio)) * factor


def _most(memory: MemoryFacts, world_size: int, share: int, columns: Columns, passes: Array) -> Array:
    is_sharded, degree = columns.is_sharded, columns.degree
    unit_bytes = np.minimum(columns.unit * memory.block_bytes, memory.parameter_bytes)
    always = (memory.parameter_bytes + memory.optimizer_bytes) / degree + memory.buffer_bytes
    gathered = np.minimum(2 * unit_bytes + memory.other_bytes, memory.parameter_bytes)
    gathered = np.where(columns.strategy == GRAD_OP, memory.parameter_bytes, gathered)
    is_accumulating = columns.batch < share
    own = np.where(is_accumulating, memory.gradient_bytes + unit_bytes, memory.gradient_bytes / degree + 2 * unit_bytes)
    earlier = np.where(is_accumulating, memory.gradient_bytes, 0)
    buckets = np.where(is_sharded | (world_size == 1), 0, memory.gradient_bytes)
    gradients = np.where(is_sharded, own, memory.gradient_bytes)
    forward, loss, backward = passes
    highest = np.maximum(np.maximum(forward, loss) + earlier, backward + gradients)
    found: Array = always + buckets + np.where(is_sharded, gathered, 0) + highest
    return found


def _sizes_told(share: int) -> list[int]:
    return sorted({share, *(2**power for power in range(share.bit_length()) if 2**power <= share)})


def _between(told: Iterable[PassesMemory], name: str, columns: Columns) -> Array:
    """Lines between what is told, by size and by how many blocks are computed again."""
    told = tuple(told)
    ratios = sorted({each.activation_checkpoint for each in told})
    rows = []
    for ratio in ratios:
        here = sorted((each.micro_batch, getattr(each, name)) for each in told if each.activation_checkpoint == ratio)
        sizes, values = zip(*here, strict=True)
        rows.append(np.interp(columns.batch, sizes, values))
    table = np.stack(rows)
    place = np.interp(columns.ratio, ratios, range(len(ratios)))
    low = np.floor(place).astype(int)
    high = np.minimum(low + 1, len(ratios) - 1)
    rows_at = np.arange(len(place))
    found: Array = table[low, rows_at] + (place - low) * (table[high, rows_at] - table[low, rows_at])
    return found
