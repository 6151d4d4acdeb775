"""What a step takes of memory as it was worked out, beside what it truly took.

Each kind of model takes steps of 1 to 32 samples, with AdamW, on gradients that are new. The truth is the most that the
allocator had given in a step, by torch.profiler's events of it on a CPU (which tell of workspaces of operations too) or
max_memory_allocated on a GPU, and what was there before: parameters, buffers, the optimizer's state, the batch.

*Worked out* is what the process beside training answers, on tensors without memory, at that very size. *Compared* is
the same as a trainer has it: a step of 4 samples was measured, and all sizes are corrected by that (upwards only, as by
one size alone). Beside them is what
measured steps of 2 and 4 samples alone would tell: *a straight line* through their peaks, and *lines by phase* as a
trainer without a module factory has them. An error is over the truth: below zero, a step takes more than was told.

Not measured by ``main``: the same on a GPU, which is ``main_on_gpu``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.allocated import allocated_on_cpu
from benchmarks.harness import Finding, Result, Verdict, shown_value
from benchmarks.memory_kinds import KINDS, Kind, blocks_of_kind, loss_of
from elastic_ext.fsdp.blocks import recompute
from elastic_ext.profile.memory.analysis_client import AnalysisClient
from elastic_ext.profile.memory.analyzer import ModelSizes
from elastic_ext.profile.memory.extrapolation import correction, lines_through
from elastic_ext.profile.memory.model_description import (
    describe,
    factory_of,
    names_of,
    optimizer_kinds,
    parameter_kinds,
)
from elastic_ext.profile.memory.peaks import Peaks
from elastic_ext.profile.memory.questions import Question
from elastic_ext.profile.memory.samples import sample_on
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import MemoryFacts, PassesMemory

__all__ = ["ErrorTable", "Point", "main", "points_of", "table_of"]

SIZES = (1, 2, 4, 8, 16, 32)
SHORT_SIZES = (1, 2, 4, 8)
COMPARED = 4
FROM = (2, 4)  # what lines are drawn through
HEADROOM = 0.06  # of memory that a tuner leaves: so much less than a step takes may be said of it
WAIT_SECONDS = 600.0
NUM_WARM_STEPS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Of one size: the truth in bytes, and what was said of it, over the truth, less one."""

    size: int
    true_bytes: int
    worked_out: float
    compared: float
    straight: float
    by_phase: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorTable:
    """Of one kind on one device."""

    heading: str
    points: Sequence[Point]
    most_error: float
    notes: Sequence[str] = ()

    @property
    def verdicts(self) -> Sequence[Verdict]:
        errors = [point.compared for point in self.points]
        is_well = max(map(abs, errors)) <= self.most_error and min(errors) >= -HEADROOM
        return ("pass" if is_well else "fail",)

    @property
    def findings(self) -> tuple[Finding, ...]:
        compared = max((point.compared for point in self.points), key=abs)
        straight = max((point.straight for point in self.points), key=abs)
        wanted = f"within {self.most_error:.0%}, and no less than {-HEADROOM:.0%}"
        return (
            Finding(
                claim=f"what is told of a step's memory is {wanted} of the truth, at every size",
                side="compared",
                value=f"at worst {compared:+.2%}",
                peer="a straight line through two sizes",
                peer_value=f"at worst {straight:+.2%}",
                target=wanted,
                verdict=self.verdicts[0],
            ),
        )

    def table_lines(self) -> list[str]:
        head = "| samples | truth | worked out | compared | a straight line | lines by phase |"
        rows = [
            f"| {point.size} | {shown_value(point.true_bytes, 'bytes')} | {point.worked_out:+.2%} | "
            f"{point.compared:+.2%} | {point.straight:+.2%} | {point.by_phase:+.2%} |"
            for point in self.points
        ]
        worst = [max((getattr(point, name) for point in self.points), key=abs) for name in Point.__slots__[2:]]
        claimed = f"compared is within {self.most_error:.0%}, and no less than {-HEADROOM:.0%}: {self.verdicts[0]}"
        last = f"| the worst | {claimed} | {' | '.join(f'{each:+.2%}' for each in worst)} |"
        return [head, "|---:|---:|---:|---:|---:|---:|", *rows, last]


def main(share: float = 1.0) -> list[Result]:
    """A table for each kind of model, on a CPU; with less time, of few and small sizes."""
    return _tables(torch.device("cpu"), SIZES if share >= 1 else SHORT_SIZES)


def main_on_gpu() -> list[Result]:
    """The same tables on a GPU."""
    return _tables(torch.device("cuda"), SIZES)


def _tables(device: torch.device, sizes: Sequence[int]) -> list[Result]:
    torch.manual_seed(0)
    return [table_of(kind, points_of(kind, device, sizes), device) for kind in KINDS]


def table_of(kind: Kind, points: Sequence[Point], device: torch.device) -> ErrorTable:
    heading = f"**What a step takes of memory, as told and in truth: {kind.name}, on {device.type}**"
    return ErrorTable(heading=heading, points=points, most_error=kind.most_error)


def points_of(kind: Kind, device: torch.device, sizes: Sequence[int] = SIZES) -> list[Point]:
    """Everything there is to tell of one kind."""
    answers = _answers(kind, sizes)
    facts, true_bytes, measured = _facts(kind, device), {}, {}
    for size in sizes:
        true_bytes[size], peaks = _true(kind, device, size)
        measured[size] = peaks.passes(micro_batch=size, activation_checkpoint=kind.ratio)
    facts = replace(facts, update_bytes=max(each.update_bytes or 0 for each in answers))
    worked_out = {each.micro_batch: each for answer in answers if (each := answer.passes) is not None}
    scale, why_not = correction([measured[COMPARED]], list(worked_out.values()), facts.gradient_bytes)
    if why_not:
        raise RuntimeError(f"{kind.name}: {why_not}")
    corrected = replace(facts, scale=scale)
    first, second = FROM
    slope = (true_bytes[second] - true_bytes[first]) / (second - first)
    by_phase = {each.micro_batch: each for each in lines_through([measured[size] for size in FROM], sizes)}

    def error(size: int, told_bytes: float) -> float:
        return told_bytes / true_bytes[size] - 1

    def peak(told: MemoryFacts, passes: PassesMemory) -> int:
        return told.peak_bytes(passes, has_gradients=False)

    return [
        Point(
            size=size,
            true_bytes=true_bytes[size],
            worked_out=error(size, peak(facts, worked_out[size])),
            compared=error(size, peak(corrected, worked_out[size])),
            straight=error(size, true_bytes[first] + slope * (size - first)),
            by_phase=error(size, peak(facts, by_phase.get(size) or _beyond(measured, size))),
        )
        for size in sizes
    ]


def _beyond(measured: dict[int, PassesMemory], size: int) -> PassesMemory:
    """On the same lines, further than a trainer would go along them: four times what was measured, and again."""
    nearer = lines_through([measured[each] for each in FROM], [FROM[-1] * 4])
    return {each.micro_batch: each for each in lines_through(nearer, [size])}[size]


def _answers(kind: Kind, sizes: Sequence[int]) -> Sequence[Any]:
    """Of the process that works it out."""
    model, batch = kind.factory(), kind.batch_of(COMPARED)
    factory = factory_of(kind.factory, loss_of)
    assert factory is not None
    question = Question(
        main=factory.main,
        factory=factory.model,
        loss=factory.loss,
        parameters=parameter_kinds(model),
        is_training=True,
        autocast=None,
        given=describe(batch[:1], COMPARED, 0),
        options=describe({}, COMPARED, 0),
        batch=describe(batch, COMPARED, 0),
        keeps_outputs=False,
        blocks=names_of(model, blocks_of_kind(model)),
        micro_batches=tuple(sizes),
        ratios=(kind.ratio,),
        optimizers=optimizer_kinds(model, [_optimizer(model)], is_on_accelerator=False),
    )
    asking = AnalysisClient(question)
    asking.start()
    try:
        if not asking.wait(WAIT_SECONDS) or any(each.problem is not None for each in asking.answers):
            raise RuntimeError(f"{kind.name} was not worked out: {[each.problem for each in asking.answers][-1]}")
        return asking.answers
    finally:
        asking.close()


def _facts(kind: Kind, device: torch.device) -> MemoryFacts:
    """Sizes of the model and its optimizer's state."""
    model, optimizer = _trained(kind, device)
    sizes = ModelSizes(model, [optimizer], blocks_of_kind(model))
    return MemoryFacts(
        source="fake",
        parameter_bytes=sizes.parameter_bytes,
        gradient_bytes=sizes.gradient_bytes,
        optimizer_bytes=sizes.optimizer_bytes,
        buffer_bytes=sizes.buffer_bytes,
    )


# --- true steps -------------------------------------------------------------------------------------------------------


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _trained(kind: Kind, device: torch.device, size: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has taken some steps: what is made once is there."""
    model = kind.factory().to(device)
    recompute(blocks_of_kind(model), kind.ratio)
    optimizer = _optimizer(model)
    batch = tuple(each.to(device) for each in kind.batch_of(size))
    for _ in range(NUM_WARM_STEPS):
        _step(model, optimizer, batch)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, see: Any = None) -> None:
    """As loops have it. ``see`` is told of phases."""
    outputs = model(batch[0])
    if see is not None:
        see.end_forward()
        outputs.register_hook(lambda gradient: see.see(Phase.BACKWARD))
    loss = loss_of(outputs, batch)
    del outputs
    loss.backward()  # type: ignore[no-untyped-call]
    if see is not None:
        see.see(Phase.OPTIMIZER)
    optimizer.step()
    if see is not None:
        see.see(Phase.OTHER)
    optimizer.zero_grad()


def _true(kind: Kind, device: torch.device, size: int) -> tuple[int, Peaks]:
    """The most that a step took with what was there before; and, of another one, what its phases took."""
    model, optimizer = _trained(kind, device, size)
    batch = tuple(each.to(device) for each in kind.batch_of(size))
    sizes = ModelSizes(model, [optimizer], ())
    given = sum(each.numel() * each.element_size() for each in batch)
    before = sizes.parameter_bytes + sizes.buffer_bytes + sizes.optimizer_bytes + given
    gc.collect()
    most = partial(_most_on_gpu, device) if device.type == "cuda" else allocated_on_cpu
    true_bytes = before + most(lambda: _step(model, optimizer, batch))
    sample = sample_on(device, model.parameters())
    sample.begin()
    sample.see(Phase.FORWARD)
    _step(model, optimizer, batch, sample)
    peaks = sample.end(given)
    assert peaks is not None
    return true_bytes, peaks


def _most_on_gpu(device: torch.device, act: Callable[[], object]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    act()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
