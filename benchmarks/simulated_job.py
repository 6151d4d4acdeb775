"""A job that is simulated: it trains, step by step, under whatever config is put in force, and shows what a job shows.

What a tuner may see is ``facts``, ``space``, and what ``step`` returns. ``true_step_seconds``, ``is_safe`` and
``oracle`` are the referee's. Time is simulated: ``now`` moves on by what steps, changes and failures take.

A step under a new config takes longer once. Where memory does not suffice, the step is lost and so is some time; its
micro-batch is halved until it fits, as a guarded step does, and where nothing fits training starts again by the last
point that did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_best import best_point
from benchmarks.simulated_draw import STRATEGIES, Array, Columns, Hidden, columns_of, draw
from benchmarks.simulated_memory import HEADROOM, expected_bytes, memory_facts, true_bytes
from benchmarks.simulated_time import PHASES, Circumstances, phase_seconds
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.metrics import JobFacts, NodeCalibration, StepCensus
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import KEYS, Point, Space, space_of

__all__ = ["CHOICES", "RESTART_SECONDS", "SimulatedJob"]

CHOICES: dict[str, tuple[str, ...]] = {
    "dataloader.batch_size": (),
    "dataloader.num_workers": (),
    "dataloader.prefetch_factor": (),
    "dataloader.pin_memory": (),
    "parallelism.strategy": STRATEGIES,
    "parallelism.shard_degree": (),
    "parallelism.unit": (),
    "parallelism.activation_checkpoint": (),
    "communication.bucket_cap_mb": (),
}
RESTART_SECONDS = 60.0
NUM_STEPS_UNKNOWN = 5
"""So many steps have to be made before rank 0 has counted and measured what its facts tell."""
_NOISE, _PHASE_NOISE = 0.03, 0.02
_SPIKES = 0.02
_FAILED_SHARE, _FAILED_SECONDS = 0.7, 0.5


@dataclass(frozen=True, slots=True)
class _Truth:
    """Of all points of a space, in its order."""

    phases: Array
    step_seconds: Array
    held_bytes: Array
    device_bytes: Array


class SimulatedJob:
    """One of them; the same seed and the same points give the same again."""

    def __init__(self, seed: int, *, noise_seed: int = 0) -> None:
        self.hidden: Hidden = draw(seed)
        self.now = 1.7e9
        self.num_steps = 0
        """That have committed."""
        self.num_failures = 0
        """Steps for which memory did not suffice."""
        self.lost_seconds = 0.0
        """In changes and failures."""
        self.version = self.revision = 0
        self.circumstances = Circumstances()
        self._random = np.random.default_rng((seed, noise_seed))
        self._known: dict[Point, tuple[Array, float, float]] = {}
        self._bound: int | None = None
        self._most_held = 0.0
        self._scale, self._besides = 1.0, 0.0
        self._calibrated_at = 0.0
        self._held_up = 0.0
        self._is_new = True
        self._best: Point | None = None
        self._is_best_known = False
        start = self._start()
        self.has_start = start is not None
        """Whether a user's plausible config is safe; where not, the job is none to be tried."""
        self.point = start or self._plausible()[-1]
        self.start = self._last_good = self.point
        self.space: Space = space_of(self._facts_of(self.point), TuningSection())
        self._places = {point: at for at, point in enumerate(self.space.points)}
        self._columns = columns_of(self.hidden, self.space.points)
        self._truth = self._work_out()

    # ---- what a tuner may see, and do ----

    @property
    def facts(self) -> JobFacts:
        """What rank 0 has written last."""
        return self._facts_of(self.point)

    def step(self) -> StepReport | None:
        """Train one step under the config in force; None where memory did not suffice, and the step was lost."""
        phases, held, device = self._of(self.point)
        if device > self.hidden.capacity_bytes:
            self._fail(float(phases.sum()))
            return None
        noisy = phases * np.exp(self._random.normal(0, _PHASE_NOISE, len(phases)))
        noisy = noisy * math.exp(self._random.normal(0, _NOISE))
        if self._random.random() < _SPIKES:
            noisy[self._random.choice([0, 3, 4, 6])] += phases.sum() * self._random.uniform(0.2, 2.0)
        first = self._random.uniform(0.05, 0.8)
        if self._is_new:
            noisy[2] += first * phases.sum()
        seconds = float(noisy.sum())
        self.now += seconds
        self.num_steps += 1
        self._most_held = max(self._most_held, held * (1 - 0.003 * self._random.random()))
        self._last_good, self._is_new = self.point, False
        self._calibrate(held)
        held_up, self._held_up = self._held_up, 0.0
        return StepReport(
            time=self.now,
            version=self.version,
            revision=self.revision,
            step=self.num_steps,
            num_steps=1,
            num_ranks=self.hidden.world_size,
            world_size=self.hidden.world_size,
            step_seconds=seconds,
            phases={phase.label: float(each) for phase, each in zip(PHASES, noisy, strict=True)},
            held_up_seconds=held_up,
            processor_share=self._processor_share(),
            peak_bytes=int(self._most_held),
        )

    def change(self, point: Point, *, version: int | None = None) -> None:
        """Put a point in force, under a new version of the config; training stands still as long as that takes."""
        self.version = self.version + 1 if version is None else version
        self.revision = 0
        if point != self.point:
            self._lose(self.change_seconds(self.point, point))
            if _is_kept_apart(self.point, point):
                self._bound = None
            self.point, self._is_new = point, True

    def restart(self, point: Point) -> None:
        """Start the job's processes again by another point, as a tuner does that knows no other way."""
        self._lose(RESTART_SECONDS)
        self.point, self._is_new, self._most_held, self._bound = point, True, 0.0, None

    def change_seconds(self, old: Point, new: Point) -> float:
        """How long training stands still for a change: that of sharding is dear, and of micro-batches free."""
        found = 0.0
        moved = (old.strategy, old.shard_degree) != (new.strategy, new.shard_degree) or old.unit != new.unit
        if moved and (old.strategy != "no_shard" or new.strategy != "no_shard"):
            sizes = self.hidden.parameter_bytes + self.hidden.optimizer_bytes
            found += 0.5 + 2 * sizes / self.hidden.world_size / self.hidden.move_speed
        if old.activation_checkpoint != new.activation_checkpoint:
            found += 0.1
        if old.bucket_cap_mb != new.bucket_cap_mb:
            found += 0.05
        if (old.num_workers, old.prefetch_factor) != (new.num_workers, new.prefetch_factor):
            found += self.hidden.workers_seconds
        return found + (0.02 if old.pin_memory != new.pin_memory else 0.0)

    def expected_bytes(self, points: Sequence[Point]) -> Array:
        """What the device will hold at most by the facts as they are now, for peers that predict memory."""
        return expected_bytes(self.facts, self.hidden, points)

    # ---- the referee's ----

    def true_step_seconds(self, point: Point) -> float:
        """What a step takes by that point, without noise."""
        return float(self._of(point)[0].sum())

    def bytes_of(self, point: Point) -> float:
        """The most that the device holds for a process by that point."""
        return self._of(point)[2]

    def is_safe(self, point: Point) -> bool:
        """Whether it leaves some of the memory free."""
        return self.bytes_of(point) <= (1 - HEADROOM) * self.hidden.capacity_bytes

    @property
    def all_step_seconds(self) -> Array:
        """What steps take by each point of the space."""
        return self._truth.step_seconds

    @property
    def all_bytes(self) -> Array:
        """The most that the device holds by each point of the space."""
        return self._truth.device_bytes

    @property
    def oracle(self) -> Point | None:
        """The fastest safe point by the present circumstances, of the space or not; None where none is safe."""
        if not self._is_best_known:
            self._best = best_point(self.hidden, self.circumstances)
            self._is_best_known = True
        return self._best

    def meet(self, circumstances: Circumstances) -> None:
        """From now on, all is otherwise."""
        self.circumstances = circumstances
        self._known.clear()
        self._is_best_known = False
        self._truth = self._work_out()

    # ---- within ----

    def _plausible(self) -> list[Point]:
        """What a user might begin with, the simplest first."""
        r = np.random.default_rng((self.hidden.seed, 1))
        workers, pinned = int(r.choice([0, 0, 2])), bool(r.random() < 0.3)
        batches = [int(each) for each in (2, 1)] if r.random() < 0.5 else [1]
        return [
            Point(
                batch_size=min(batch, self.hidden.share),
                num_workers=workers,
                pin_memory=pinned,
                strategy=strategy,
                activation_checkpoint=ratio,
            )
            for strategy, ratio in (("no_shard", 0.0), ("full_shard", 0.0), ("full_shard", 1.0))
            for batch in batches
            if strategy == "no_shard" or self.hidden.world_size > 1
        ]

    def _start(self) -> Point | None:
        return next((point for point in self._plausible() if self.is_safe(point)), None)

    def _work_out(self) -> _Truth:
        phases = phase_seconds(self.hidden, self._columns, self.circumstances)
        held, device = true_bytes(self.hidden, self._columns)
        return _Truth(phases, phases.sum(axis=0), held, device)

    def _of(self, point: Point) -> tuple[Array, float, float]:
        """Phases of a step, what tensors hold, and what the device holds."""
        if point not in self._known:
            columns: Columns = columns_of(self.hidden, [point])
            held, device = true_bytes(self.hidden, columns)
            phases = phase_seconds(self.hidden, columns, self.circumstances)[:, 0]
            self._known[point] = phases, float(held[0]), float(device[0])
        return self._known[point]

    def _lose(self, seconds: float) -> None:
        self.now += seconds
        self.lost_seconds += seconds
        self._held_up += seconds

    def _fail(self, step_seconds: float) -> None:
        """As a guard has it: the micro-batch is halved until it fits."""
        self.num_failures += 1
        self._lose(step_seconds * _FAILED_SHARE + _FAILED_SECONDS)
        size = int(self.point.batch_size or 1)
        self._bound = size if self._bound is None else min(self._bound, size)
        self.revision += 1
        if size > 1:
            self.point = self.point._replace(batch_size=size // 2)
        else:
            self._lose(RESTART_SECONDS)
            self.point = self._last_good
        self._is_new = True

    def _calibrate(self, held: float) -> None:
        """Passes that were larger than any before tell by how much an analyzer is wrong."""
        if held <= self._calibrated_at or self.num_steps < NUM_STEPS_UNKNOWN:
            return
        self._calibrated_at = held
        now = self._facts_of(self.point, scale=1.0)
        columns_now = [self.point]
        passes = expected_bytes(now, self.hidden, columns_now)[0] - self._besides
        alone = expected_bytes(self._facts_of(self.point, scale=1e-12), self.hidden, columns_now)[0] - self._besides
        self._scale = max((held * (1 + 0.0005 * self._random.normal()) - alone) / max(passes - alone, 1.0), 0.5)
        self._besides = self._of(self.point)[2] - held

    def _processor_share(self) -> float:
        lacking = max(int(self.point.num_workers or 0) + 1 - self.hidden.num_processors, 0)
        return float(np.clip(1 / (1 + 0.2 * lacking) - 0.02 * self._random.random(), 0.05, 1.0))

    def _facts_of(self, point: Point, scale: float | None = None) -> JobFacts:
        hidden = self.hidden
        is_known = self.num_steps >= NUM_STEPS_UNKNOWN or scale is not None
        scale = self._scale if scale is None else scale
        return JobFacts(
            time=self.now,
            restart=0,
            world_size=hidden.world_size,
            num_local=hidden.num_local,
            device="cuda",
            num_processors=hidden.num_processors,
            config_version=self.version,
            config_revision=self.revision,
            values={KEYS[name]: value for name, value in point._asdict().items()},
            choices=CHOICES,
            global_batch=hidden.share * hidden.world_size,
            share=hidden.share,
            num_replicas=hidden.world_size,
            bound=self._bound,
            num_blocks=hidden.num_blocks,
            num_parameters=hidden.num_parameters,
            census=self._census() if is_known else None,
            calibration=self._calibration() if is_known else None,
            memory=memory_facts(hidden, scale=scale, besides_bytes=self._besides) if is_known else None,
        )

    def _census(self) -> StepCensus:
        """Of a micro-step as training began."""
        hidden, size = self.hidden, int(self.start.batch_size or 1)
        again = 1 + 0.34 * float(self.start.activation_checkpoint or 0)
        optimizer_bytes = 2 * hidden.parameter_bytes + hidden.gradient_bytes + 2 * hidden.optimizer_bytes
        degree = columns_of(hidden, [self.start]).degree[0]
        return StepCensus(
            time=self.now,
            rank=0,
            num_samples=size,
            num_ops=int(hidden.num_ops * again) + 40,
            num_bytes=int((hidden.moved_bytes * size + 2 * hidden.parameter_bytes) * again + optimizer_bytes / degree),
            num_flops=int(hidden.flops * size * again),
            optimizer_ops=40,
            optimizer_bytes=int(optimizer_bytes / degree),
            device="cuda",
        )

    def _calibration(self) -> NodeCalibration:
        r = np.random.default_rng((self.hidden.seed, 2))
        return NodeCalibration(
            time=self.now,
            host="simulated",
            device="simulated",
            num_threads=1,
            torch="simulated",
            flops_per_second=self.hidden.flops_per_second * r.uniform(0.7, 0.95),
            bytes_per_second=self.hidden.bytes_per_second * r.uniform(0.8, 0.95),
            seconds_per_op=self.hidden.seconds_per_op * r.uniform(0.95, 1.05),
        )


def _is_kept_apart(old: Point, new: Point) -> bool:
    """Whether the plan differs, so that what memory did not suffice for by one says nothing of the other."""
    fields = ("strategy", "shard_degree", "unit", "activation_checkpoint")
    return any(getattr(old, name) != getattr(new, name) for name in fields)
