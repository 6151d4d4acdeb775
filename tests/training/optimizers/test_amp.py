"""Mixed precision under the trainer: bf16 autocast, and a GradScaler whose skipped steps are boundaries without a
commit; each beside the same training written by hand in plain torch.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from elastic_ext import ElasticScaler, StepError
from tests.support.faults import Fault, Faults, PlantedFault
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.thinning import each_once
from tests.support.training import Slices, bits_of, make_data, make_model, shared, trainer_of

NUM_STEPS = 6
BATCH = 8  # of one rank's step
Parameters = list[nn.Parameter]
Place = tuple[int, int]  # a step and a micro-step

MADE: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda parts: SGD(parts, lr=0.1, momentum=0.9),
    "SGD fused": lambda parts: SGD(parts, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parts: AdamW(parts, lr=0.02),
    "AdamW fused": lambda parts: AdamW(parts, lr=0.02, fused=True),
}
each_fused = pytest.mark.parametrize("made", ["AdamW", "AdamW fused"])
each_cut = pytest.mark.parametrize("micro_steps", [1, 4])
each_fused_and_cut = pytest.mark.parametrize(("made", "micro_steps"), each_once(["AdamW", "AdamW fused"], [1, 4]))


pytestmark = pytest.mark.usefixtures("one_thread")


def make_scaler(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, **options: Any) -> torch.amp.GradScaler:
    """A scaler whose scale grows after every second step without infinities."""
    return kind("cpu", **{"init_scale": 256.0, "growth_interval": 2, **options})


def make_scheduler(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 2, gamma=0.5)


def batch_of(step: int, micro_steps: int, rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's micro-batches of a step."""
    inputs, targets = make_data(BATCH, torch.float32, seed=100 * rank + step)
    return zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, is_infinite: bool) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return loss * float("inf") if is_infinite else loss


def autocast_to(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast on the processor, or nothing."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


# --- the same training, by hand and under the trainer ---------------------------------------------------------------


def by_hand(
    made: str,
    micro_steps: int,
    infinite: Sequence[Place] = (),
    *,
    rank: int = 0,
    kind: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    max_norm: float | None = 0.5,
    autocast: torch.dtype | None = None,
    skipped_at: Sequence[int] | None = None,
    **options: Any,
) -> list[Any]:
    """The bits of model, optimizer, schedule and scaler after every step."""
    own = make_model(torch.float32)
    model = shared(own, num_ranks())
    optimizer = MADE[made](list(own.parameters()))
    scheduler, scaler = make_scheduler(optimizer), make_scaler(kind, **options)
    skipped = {step for step, _ in infinite} if skipped_at is None else set(skipped_at)
    records = []
    for step in range(NUM_STEPS):
        for index, (inputs, targets) in enumerate(batch_of(step, micro_steps, rank)):
            keeps = isinstance(model, DistributedDataParallel) and index < micro_steps - 1
            with model.no_sync() if keeps else nullcontext():  # type: ignore[operator]
                with autocast_to(autocast):
                    loss = loss_of(model, inputs, targets, is_infinite=(step, index) in infinite)
                scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        if step not in skipped:
            scheduler.step()
        optimizer.zero_grad()
        records.append(bits_of(own, optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict()))
    return records


def by_trainer(
    folder: Path,
    made: str,
    micro_steps: int,
    infinite: Sequence[Place] = (),
    *,
    way: str = "loss.backward",
    rank: int = 0,
    kind: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    max_norm: float | None = 0.5,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> tuple[list[Any], list[int]]:
    """The same, and ``global_step`` after every step."""
    own = make_model(torch.float32)
    model = shared(own, num_ranks())
    raw, scaler = MADE[made](list(own.parameters())), make_scaler(kind, **options)
    arguments = {"micro_batch_size": BATCH // micro_steps, "global_batch_size": BATCH * num_ranks()}
    records, steps = [], []
    with trainer_of(folder, model, rank=rank, **arguments) as trainer:
        if way == "bare":
            optimizer, scheduler = trainer.prepare(raw, make_scheduler(raw))
        else:
            optimizer, scheduler, scaler = trainer.prepare(raw, make_scheduler(raw), scaler)
        for step in range(NUM_STEPS):
            for index, (inputs, targets) in enumerate(batch_of(step, micro_steps, rank)):
                with trainer.step():
                    with autocast_to(autocast):
                        loss = loss_of(model, inputs, targets, is_infinite=(step, index) in infinite)
                    scaled = scaler.scale(loss)
                    trainer.backward(scaled) if way == "trainer.backward" else scaled.backward()  # type: ignore[no-untyped-call]
                    if way != "bare" or trainer.sync_gradients:
                        if max_norm is not None:
                            scaler.unscale_(optimizer)
                            trainer.clip_grad_norm_(own.parameters(), max_norm)
                        scaler.step(optimizer)
                        scaler.update()
                    scheduler.step()
                    optimizer.zero_grad()
            assert all(part.grad is None for part in own.parameters())
            assert trainer.num_steps == trainer.global_step
            steps.append(trainer.global_step)
            records.append(bits_of(own, optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict()))
    return records, steps


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def places(micro_steps: int) -> list[Place]:
    """Infinities in a step's last micro-step, and in another step's first one."""
    return [(1, micro_steps - 1), (4, 0)]


@pytest.mark.parametrize(("made", "cut_and_norm"), each_once(list(MADE), [(1, 0.5), (1, None), (4, 0.5), (4, None)]))
@pytest.mark.parametrize("way", ["loss.backward", "trainer.backward", "bare"])
def test_a_scaled_training_is_the_one_by_hand_and_steps_with_infinities_do_not_commit(
    tmp_path: Path, way: str, made: str, cut_and_norm: tuple[int, float | None]
) -> None:
    micro_steps, max_norm = cut_and_norm
    infinite = places(micro_steps)
    records, steps = by_trainer(tmp_path, made, micro_steps, infinite, way=way, max_norm=max_norm)
    assert records == by_hand(made, micro_steps, infinite, max_norm=max_norm)
    assert steps == [1, 1, 2, 3, 3, 4]


@each_fused
def test_infinities_in_the_first_steps_of_all_leave_the_optimizer_as_it_was(tmp_path: Path, made: str) -> None:
    infinite = [(0, 0), (1, 0)]
    records, steps = by_trainer(tmp_path, made, 1, infinite)
    assert records[2:] == by_hand(made, 1, infinite)[2:]  # before, the trainer has made what AdamW makes as it steps
    assert steps == [0, 0, 1, 2, 3, 4]


@each_cut
@each_fused
def test_a_scale_that_is_too_large_is_halved_until_steps_commit(tmp_path: Path, made: str, micro_steps: int) -> None:
    arguments: dict[str, Any] = {"autocast": torch.float16, "init_scale": 2.0**21, "growth_interval": 100}
    records, steps = by_trainer(tmp_path, made, micro_steps, **arguments)
    skipped = [step for step, (now, before) in enumerate(zip(steps, [0, *steps], strict=False)) if now == before]
    assert skipped[:2] == [0, 1] and len(skipped) < NUM_STEPS
    if micro_steps == 1:  # by hand, a loss is divided before it is scaled: it overflows later
        first = steps.index(1)  # before, the trainer has made what AdamW makes as it steps
        assert records[first:] == by_hand(made, 1, skipped_at=skipped, **arguments)[first:]


@each_cut
@each_fused
def test_a_disabled_scaler_changes_nothing(tmp_path: Path, made: str, micro_steps: int) -> None:
    records, steps = by_trainer(tmp_path, made, micro_steps, enabled=False)
    assert records == by_hand(made, micro_steps, enabled=False)
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("made", "micro_steps"), each_once(list(MADE), [1, 4]))
@pytest.mark.parametrize("way", ["loss.backward", "trainer.backward"])
def test_bf16_autocast_is_the_training_by_hand(tmp_path: Path, way: str, made: str, micro_steps: int) -> None:
    arguments: dict[str, Any] = {"autocast": torch.bfloat16, "enabled": False}
    records, steps = by_trainer(tmp_path, made, micro_steps, way=way, **arguments)
    assert records == by_hand(made, micro_steps, **arguments)
    assert records != by_hand(made, micro_steps, enabled=False)
    assert steps == [1, 2, 3, 4, 5, 6]


@each_fused
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_fp16_autocast_with_a_scaler_is_the_training_by_hand(tmp_path: Path, made: str, micro_steps: int) -> None:
    infinite = places(micro_steps)
    records, steps = by_trainer(tmp_path, made, micro_steps, infinite, autocast=torch.float16)
    assert records == by_hand(made, micro_steps, infinite, autocast=torch.float16)
    assert steps == [1, 1, 2, 3, 3, 4]


# --- ranks ----------------------------------------------------------------------------------------------------------


def both_ways_rank(
    rank: int, folder: Path, made: str, micro_steps: int, way: str, kind: type[torch.amp.GradScaler]
) -> tuple[list[int], int]:
    """``global_step`` after every step, and how many steps left other bits than by hand; infinities on rank 1."""
    everywhere = places(micro_steps)
    infinite = everywhere if rank == 1 else []
    records, steps = by_trainer(folder, made, micro_steps, infinite, way=way, rank=rank, kind=kind)
    skipped = [step for step, _ in everywhere]
    expected = by_hand(made, micro_steps, infinite, rank=rank, kind=kind, skipped_at=skipped)
    assert len(records) == len(expected)
    return steps, sum(one != other for one, other in zip(records, expected, strict=True))


@each_fused_and_cut
@pytest.mark.parametrize("way", ["loss.backward", "trainer.backward", "bare"])
def test_infinities_on_one_rank_leave_the_step_out_on_all(
    ranks: RankPool, tmp_path: Path, way: str, made: str, micro_steps: int
) -> None:
    arguments = (tmp_path, made, micro_steps, way, torch.amp.GradScaler)
    assert ranks.run(2, both_ways_rank, *arguments) == [([1, 1, 2, 3, 3, 4], 0)] * 2


def telling_rank(rank: int, folder: Path, made: str) -> list[str]:
    with seen_by() as seen:
        by_trainer(folder, made, 2, places(2), rank=rank)
    return [line for line in seen.log if "not finite" in line]


@each_fused
def test_the_first_step_that_is_left_out_for_infinities_is_told_once_by_the_first_rank(
    ranks: RankPool, tmp_path: Path, made: str
) -> None:
    told, silent = ranks.run(2, telling_rank, tmp_path, made)
    assert len(told) == 1 and silent == []
    assert "the step after step 1 was left out" in told[0]
    assert "samples are consumed, global_step and schedules stay" in told[0]


def test_a_step_that_the_loop_leaves_out_is_not_told_as_one_with_infinities(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    raw = SGD(model.parameters(), lr=0.1)
    with seen_by() as seen, trainer_of(tmp_path, model, global_batch_size=4, micro_batch_size=4) as trainer:
        optimizer, scaler = trainer.prepare(raw, scaler=make_scaler())
        inputs, targets = make_data(4, torch.float32)
        for is_taken in (True, False):
            with trainer.step():
                scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
                if is_taken:
                    scaler.step(optimizer)
                    scaler.update()
        assert trainer.global_step == 1
    assert not [line for line in seen.log if "not finite" in line]


@each_cut
def test_a_sharded_grad_scaler_takes_part_as_well(ranks: RankPool, tmp_path: Path, micro_steps: int) -> None:
    arguments = (tmp_path, "AdamW", micro_steps, "loss.backward", ShardedGradScaler)
    assert ranks.run(2, both_ways_rank, *arguments) == [([1, 1, 2, 3, 3, 4], 0)] * 2


# --- what is clipped, and what counts -------------------------------------------------------------------------------


def norm_of_uneven_step(folder: Path, way: str, *, is_scaled: bool) -> float:
    """The norm that clipping sees of a step of 7 samples in micro-batches of 4 and 3."""
    model = make_model()
    raw = SGD(model.parameters(), lr=0.1)
    source = Slices(make_data(7), 4)
    with trainer_of(folder, model, source, global_batch_size=7) as trainer:
        optimizer, scaler = trainer.prepare(raw, scaler=make_scaler(enabled=is_scaled))
        norms = []
        for inputs, targets in source:
            with trainer.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                if way == "num_items":
                    total = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
                    trainer.backward(scaler.scale(total), num_items=len(inputs))
                elif way == "trainer.backward":
                    trainer.backward(scaler.scale(loss))
                else:
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norms.append(trainer.clip_grad_norm_(model.parameters(), 100.0))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert trainer.global_step == 1
    first, last = norms
    assert first is None
    return float(last)


@pytest.mark.parametrize("way", ["loss.backward", "trainer.backward", "num_items"])
def test_clipping_sees_the_norm_of_the_whole_step(tmp_path: Path, way: str) -> None:
    model = make_model()
    inputs, targets = make_data(7)
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    true = float(nn.utils.clip_grad_norm_(model.parameters(), 100.0))
    assert norm_of_uneven_step(tmp_path, way, is_scaled=True) == pytest.approx(true, rel=1e-12)
    scaled, plain = (norm_of_uneven_step(tmp_path, way, is_scaled=is_scaled) for is_scaled in (True, False))
    assert scaled == plain  # a power of two changes no bit


@each_fused
def test_a_scaled_sum_over_items_is_the_one_by_hand(tmp_path: Path, made: str) -> None:
    num_items = (3, 5, 2, 7)
    plain_model, model = make_model(torch.float32), make_model(torch.float32)
    plain, plain_scaler = MADE[made](list(plain_model.parameters())), make_scaler()
    for step in range(NUM_STEPS):
        for inputs, targets in batch_of(step, 4):
            total = nn.functional.cross_entropy(plain_model(inputs), targets, reduction="sum")
            plain_scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        for part in plain_model.parameters():
            assert part.grad is not None
            part.grad /= sum(num_items)
        plain_scaler.step(plain)
        plain_scaler.update()
        plain.zero_grad()
    with trainer_of(tmp_path, model, micro_batch_size=2, global_batch_size=8) as trainer:
        optimizer, scaler = trainer.prepare(MADE[made](list(model.parameters())), scaler=make_scaler())
        for step in range(NUM_STEPS):
            for (inputs, targets), num in zip(batch_of(step, 4), num_items, strict=True):
                with trainer.step():
                    total = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
                    trainer.backward(scaler.scale(total), num_items=num)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS
    assert bits_of(model, scaler.state_dict()) == bits_of(plain_model, plain_scaler.state_dict())


# --- several optimizers ---------------------------------------------------------------------------------------------


def make_pair(made: str) -> tuple[nn.ModuleDict, list[Optimizer]]:
    """Two models, each with an optimizer of its own."""
    models = nn.ModuleDict({"first": make_model(torch.float32), "second": make_model(torch.float32, seed=3)})
    return models, [MADE[made](list(models[name].parameters())) for name in models]


@each_cut
@each_fused
def test_one_scaler_serves_several_optimizers_and_a_step_that_one_of_them_leaves_out_does_not_commit(
    tmp_path: Path, made: str, micro_steps: int
) -> None:
    infinite = {"first": [3], "second": [1, 3]}

    def losses(models: nn.ModuleDict, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> Iterator[torch.Tensor]:
        for name, model in models.items():
            yield loss_of(model, inputs, targets, is_infinite=step in infinite[name])

    plain_models, plain = make_pair(made)
    plain_scaler = make_scaler()
    for step in range(NUM_STEPS):
        for inputs, targets in batch_of(step, micro_steps):
            for loss in losses(plain_models, step, inputs, targets):
                plain_scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]
        for each in plain:
            plain_scaler.step(each)
            each.zero_grad()
        plain_scaler.update()
    models, raw = make_pair(made)
    arguments = {"micro_batch_size": BATCH // micro_steps, "global_batch_size": BATCH}
    steps = []
    with trainer_of(tmp_path, models, **arguments) as trainer:
        optimizers, scaler = trainer.prepare(raw, scaler=make_scaler())
        for step in range(NUM_STEPS):
            for inputs, targets in batch_of(step, micro_steps):
                with trainer.step():
                    for loss in losses(models, step, inputs, targets):
                        scaler.scale(loss).backward()
                    for each in optimizers:
                        scaler.step(each)
                        each.zero_grad()
                    scaler.update()
            steps.append(trainer.global_step)
    assert steps == [1, 1, 2, 2, 3, 4]
    ours = bits_of(models, [each.state_dict() for each in optimizers], scaler.state_dict())
    assert ours == bits_of(plain_models, [each.state_dict() for each in plain], plain_scaler.state_dict())


# --- steps that fail ------------------------------------------------------------------------------------------------


class Run:
    """A scaled training with a schedule that leaves a record of all its state at every boundary."""

    def __init__(self, folder: Path, made: str, micro_steps: int, faults: Faults, infinite: Sequence[int]) -> None:
        self.faults = faults
        self.infinite = infinite
        self.num_boundaries = 0
        self.model = make_model(torch.float32)
        self.source = Slices(make_data(64, torch.float32), BATCH // micro_steps, is_endless=True)
        self.trainer = trainer_of(folder, self.model, self.source, global_batch_size=BATCH)
        raw = MADE[made](list(self.model.parameters()))
        self.optimizer, self.scheduler, self.scaler = self.trainer.prepare(raw, make_scheduler(raw), make_scaler())
        self.caught: list[Exception] = []
        self.records = [self.record()]

    def record(self) -> list[Any]:
        states = [each.state_dict() for each in (self.optimizer, self.scheduler, self.scaler)]
        return bits_of(self.model, states, self.source.committed, self.trainer.global_step)

    def at(self, phase: str, index: int) -> None:
        self.faults.at(rank=0, step=self.num_boundaries, phase=f"{phase} {index}")

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor, index: int) -> None:
        with self.trainer.step():
            is_infinite = self.num_boundaries in self.infinite
            loss = loss_of(self.model, inputs, targets, is_infinite=is_infinite)
            self.scaler.scale(loss).backward()
            self.at("backward done", index)
            self.scaler.unscale_(self.optimizer)
            self.at("unscaled", index)
            self.trainer.clip_grad_norm_(self.model.parameters(), 0.5)
            self.at("clipped", index)
            self.scaler.step(self.optimizer)
            self.at("stepped", index)
            self.scaler.update()
            self.at("updated", index)
            self.scheduler.step()
            self.optimizer.zero_grad()

    def train(self) -> Run:
        """So many boundaries, over whatever is raised on the way."""
        index = 0
        with self.trainer:
            for inputs, targets in self.source:
                try:
                    self.micro_step(inputs, targets, index)
                    index += 1
                except (PlantedFault, StepError) as error:
                    self.caught.append(error)
                    index = 0
                if self.trainer._counts.num_boundaries > self.num_boundaries:
                    self.num_boundaries = self.trainer._counts.num_boundaries
                    self.records.append(self.record())
                    index = 0
                elif index == 0:
                    assert self.record() == self.records[-1]
                    assert all(part.grad is None for part in self.model.parameters())
                if self.num_boundaries == NUM_STEPS:
                    break
        return self


def run_with(folder: Path, made: str, micro_steps: int, *phases: str, infinite: Sequence[int] = (1,)) -> Run:
    """A run with a fault in its fourth step (or in the second, with infinities) at each of the places named."""
    faults = (Fault(rank=0, step=int(phase[0]), action="raise", phase=phase[2:]) for phase in phases)
    return Run(folder, made, micro_steps, Faults(*faults), infinite).train()


@each_fused_and_cut
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("phase", ["backward done", "unscaled", "clipped"])
def test_a_step_that_fails_before_the_optimizer_begins_is_taken_again_with_the_same_bits(
    tmp_path: Path, phase: str, step: int, made: str, micro_steps: int
) -> None:
    expected = run_with(tmp_path, made, micro_steps)
    assert not expected.caught
    for index in {0, micro_steps - 1}:
        failed = run_with(tmp_path, made, micro_steps, f"{step} {phase} {index}")
        assert len(failed.caught) == 1
        assert failed.records == expected.records


@each_cut
@each_fused
@pytest.mark.parametrize("phase", ["stepped", "updated"])
def test_a_step_left_out_for_infinities_that_fails_is_taken_again_with_the_scale_it_had(
    tmp_path: Path, phase: str, made: str, micro_steps: int
) -> None:
    expected = run_with(tmp_path, made, micro_steps)
    failed = run_with(tmp_path, made, micro_steps, f"1 {phase} {micro_steps - 1}")
    assert len(failed.caught) == 1
    assert failed.records == expected.records
    assert failed.scaler.get_scale() == 256.0 / 2 * 4  # it was halved once


@each_fused
def test_after_a_step_that_stands_and_was_left_before_update_the_next_one_is_scaled_as_before(
    tmp_path: Path, made: str
) -> None:
    failed = run_with(tmp_path, made, 1, "3 stepped 0", infinite=())
    assert len(failed.caught) == 1
    assert failed.trainer.global_step == NUM_STEPS
    assert failed.scaler.state_dict()["_growth_tracker"] == 1  # of 6 updates one was not reached
    assert failed.scaler.get_scale() == 256.0 * 4


@each_fused
def test_an_optimizer_that_refuses_to_begin_leaves_nothing_of_the_scaler_behind(tmp_path: Path, made: str) -> None:
    model = make_model(torch.float32)
    raw = MADE[made](list(model.parameters()))
    with trainer_of(tmp_path, model) as trainer:
        optimizer, scheduler, scaler = trainer.prepare(raw, make_scheduler(raw), make_scaler())
        before = bits_of(model, optimizer.state_dict())

        def step(*, is_in_order: bool) -> None:
            with trainer.step():
                scaler.scale(model(make_data(8, torch.float32)[0]).sum()).backward()
                if not is_in_order:
                    scheduler.step()
                scaler.step(optimizer)
                scaler.update()

        with pytest.raises(StepError, match=r"scheduler\.step\(\) was called before optimizer\.step\(\)"):
            step(is_in_order=False)
        assert bits_of(model, optimizer.state_dict()) == before
        step(is_in_order=True)
    plain_model = make_model(torch.float32)
    plain, plain_scaler = MADE[made](list(plain_model.parameters())), make_scaler()
    plain_scaler.scale(plain_model(make_data(8, torch.float32)[0]).sum()).backward()
    plain_scaler.step(plain)
    assert bits_of(model) == bits_of(plain_model)


def test_trainer_rollback_forgets_what_the_scaler_found(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    (inputs, targets), *_ = batch_of(0, 1)
    with trainer_of(tmp_path, model, micro_batch_size=8, global_batch_size=8) as trainer:
        optimizer, scaler = trainer.prepare(MADE["SGD"](list(model.parameters())), scaler=make_scaler())
        for is_infinite in (True, False):
            with trainer.step():
                scaler.scale(loss_of(model, inputs, targets, is_infinite=is_infinite)).backward()
                scaler.unscale_(optimizer)
                if is_infinite:
                    trainer.rollback()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert trainer.global_step == 1
        assert scaler.state_dict() == {**make_scaler().state_dict(), "_growth_tracker": 1}


# --- changes while it trains, and resuming --------------------------------------------------------------------------


@each_fused
def test_rates_and_the_global_batch_change_under_a_scaler_as_by_hand(tmp_path: Path, made: str) -> None:
    num_steps, infinite = 12, (7,)
    model = make_model(torch.float32)
    data = make_data(512, torch.float32)
    source = Slices(data, 4)
    used: list[tuple[float, int]] = []  # by every step: its rate and its micro-steps
    options: dict[str, Any] = {"global_batch_size": 8, "learning_rate_rule": "linear"}
    with trainer_of(tmp_path, model, source, **options) as trainer:
        optimizer, scaler = trainer.prepare(MADE[made](list(model.parameters())), scaler=make_scaler())
        for inputs, targets in source:
            step = len(used)
            with trainer.step():
                loss = loss_of(model, inputs, targets, is_infinite=step in infinite)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                trainer.clip_grad_norm_(model.parameters(), 0.5)
                if trainer.sync_gradients:
                    used.append((optimizer.effective_rates[0], trainer.num_micro_steps))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if trainer.sync_gradients and len(used) == 2:
                trainer.propose({"optimizer.learning_rate": 0.03125}, "another rate")
            if trainer.sync_gradients and len(used) == 5:
                trainer.propose({"global_batch_size": 16}, "a larger batch")
            if len(used) == num_steps:
                break
        assert trainer.global_step == num_steps - 1
        ours = bits_of(model, optimizer.inner.state, scaler.state_dict())
    first = MADE[made]([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    assert list(dict.fromkeys(used)) == [(first, 2), (0.03125, 2), (0.0625, 4)]

    model = make_model(torch.float32)
    plain, scaler = MADE[made](list(model.parameters())), make_scaler()
    start = 0
    for step, (rate, micro_steps) in enumerate(used):
        plain.param_groups[0]["lr"] = rate
        for _ in range(micro_steps):
            inputs, targets = (part[start : start + 4] for part in data)
            start += 4
            loss = loss_of(model, inputs, targets, is_infinite=step in infinite)
            scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert ours == bits_of(model, plain.state, scaler.state_dict())


def test_a_training_resumes_with_the_scale_that_its_loop_saved(tmp_path: Path) -> None:
    expected, _ = by_trainer(tmp_path, "AdamW", 2, [(1, 0)])
    saved: dict[str, Any] = {}
    records = []
    for part in range(2):
        model = make_model(torch.float32)
        raw = MADE["AdamW"](list(model.parameters()))
        with trainer_of(tmp_path, model, micro_batch_size=4, global_batch_size=8) as trainer:
            optimizer, scheduler, scaler = trainer.prepare(raw, make_scheduler(raw), make_scaler())
            objects = {
                "model": model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "scaler": scaler,
                "trainer": trainer,
            }
            for name, state in saved.items():
                objects[name].load_state_dict(state)
            for step in range(3 * part, 3 * part + 3):
                for index, (inputs, targets) in enumerate(batch_of(step, 2)):
                    with trainer.step():
                        loss = loss_of(model, inputs, targets, is_infinite=(step, index) == (1, 0))
                        scaler.scale(loss).backward()
                        scaler.unscale_(optimizer)
                        trainer.clip_grad_norm_(model.parameters(), 0.5)
                        scaler.step(optimizer)
                        scaler.update()
                        scheduler.step()
                        optimizer.zero_grad()
                records.append(bits_of(model, optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict()))
            saved = copy.deepcopy({name: each.state_dict() for name, each in objects.items()})
    assert saved["scaler"] != make_scaler().state_dict()
    assert records == expected


# --- the object itself ----------------------------------------------------------------------------------------------


def test_prepare_returns_as_many_values_as_it_was_given(tmp_path: Path) -> None:
    def prepared(*, has_schedule: bool, has_scaler: bool, is_list: bool = False) -> Any:
        model = make_model()
        raw = SGD(model.parameters(), lr=0.1)
        with trainer_of(tmp_path, model) as trainer:
            return trainer.prepare(
                [raw] if is_list else raw,
                StepLR(raw, 1) if has_schedule else None,
                make_scaler() if has_scaler else None,
            )

    optimizer = prepared(has_schedule=False, has_scaler=False)
    assert isinstance(optimizer, Optimizer)
    assert [type(each).__name__ for each in prepared(has_schedule=True, has_scaler=False)] == [
        "ElasticOptimizer",
        "ElasticLRScheduler",
    ]
    assert [type(each).__name__ for each in prepared(has_schedule=False, has_scaler=True)] == [
        "ElasticOptimizer",
        "ElasticScaler",
    ]
    assert [type(each).__name__ for each in prepared(has_schedule=True, has_scaler=True)] == [
        "ElasticOptimizer",
        "ElasticLRScheduler",
        "ElasticScaler",
    ]
    (optimizers, scaler) = prepared(has_schedule=False, has_scaler=True, is_list=True)
    assert [len(optimizers), type(scaler)] == [1, ElasticScaler]


def test_everything_but_steps_is_the_scalers_own(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    inner = make_scaler()
    with trainer_of(tmp_path, model) as trainer:
        _, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=inner)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scaler, ElasticScaler)
    assert scaler.inner is inner
    scaler.set_growth_interval(7)
    assert inner.get_growth_interval() == 7
    scaler.load_state_dict({**inner.state_dict(), "scale": 4.0})
    assert (inner.get_scale(), scaler.get_scale(), scaler.is_enabled()) == (4.0, 4.0, True)
    assert [float(part) for part in scaler.scale([torch.ones(()), torch.ones(())])] == [4.0, 4.0]
    scaler.noted = 1
    assert vars(inner)["noted"] == 1
    assert repr(scaler).startswith("ElasticScaler(<torch.amp.grad_scaler.GradScaler")
    with pytest.raises(AttributeError):
        _ = scaler.nothing_of_this_name
    for keep in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="use its state_dict"):
            keep(scaler)


@pytest.mark.parametrize("is_raw", [False, True])
def test_outside_of_steps_it_does_what_torchs_does(tmp_path: Path, is_raw: bool) -> None:
    model = make_model(torch.float32)
    raw = SGD(model.parameters(), lr=0.1)
    with trainer_of(tmp_path, model) as trainer:
        optimizer, scaler = trainer.prepare(raw, scaler=make_scaler())
        given = raw if is_raw else optimizer
        scaler.scale(model(make_data(8, torch.float32)[0]).sum()).backward()
        part = next(model.parameters())
        assert part.grad is not None
        gradient = part.grad.clone()
        scaler.unscale_(given)
        assert torch.equal(part.grad, gradient / 256.0)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.state_dict()["_growth_tracker"] == 1


def test_unscaling_twice_in_a_step_gives_torchs_own_error_and_the_step_can_be_taken_again(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    (inputs, targets), *_ = batch_of(0, 1)
    with trainer_of(tmp_path, model) as trainer:
        optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=make_scaler())
        for times in (2, 1):
            with (
                pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called")
                if times == 2
                else nullcontext(),
                trainer.step(),
            ):
                scaler.scale(loss_of(model, inputs, targets, is_infinite=False)).backward()
                for _ in range(times):
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert trainer.global_step == 1


@pytest.mark.parametrize("name", ["unscale_", "step", "update"])
def test_between_two_micro_steps_of_a_step_it_refuses(tmp_path: Path, name: str) -> None:
    model = make_model(torch.float32)
    (inputs, targets), *_ = batch_of(0, 2)
    with trainer_of(tmp_path, model, micro_batch_size=4, global_batch_size=8) as trainer:
        optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=make_scaler())
        with trainer.step():
            scaler.scale(loss_of(model, inputs, targets, is_infinite=False)).backward()
        with pytest.raises(StepError, match=rf"scaler\.{name}\(\) was called between two micro-steps"):
            getattr(scaler, name)(*([] if name == "update" else [optimizer]))


def test_update_after_the_with_of_a_step_is_as_good_as_in_it(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    (inputs, targets), *_ = batch_of(0, 1)
    with trainer_of(tmp_path, model, micro_batch_size=8, global_batch_size=8) as trainer:
        optimizer, scaler = trainer.prepare(MADE["AdamW"](list(model.parameters())), scaler=make_scaler())
        for is_infinite in (False, True, False):
            with trainer.step():
                scaler.scale(loss_of(model, inputs, targets, is_infinite=is_infinite)).backward()
                scaler.step(optimizer)
            scaler.update()
            with pytest.raises(PlantedFault), trainer.step():
                raise PlantedFault
        assert trainer.global_step == 2
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (128.0, 1)


def test_updating_twice_gives_torchs_own_error_and_the_scale_is_as_before_the_step(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    (inputs, targets), *_ = batch_of(0, 1)
    with trainer_of(tmp_path, model) as trainer:
        optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=make_scaler())

        def step() -> None:
            with trainer.step():
                scaler.scale(loss_of(model, inputs, targets, is_infinite=True)).backward()
                scaler.step(optimizer)
                scaler.update()
                scaler.update()

        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            step()
        assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_closure_is_evaluated_in_every_micro_step_under_a_disabled_scaler(tmp_path: Path, micro_steps: int) -> None:
    model = make_model(torch.float32)
    num_calls = 0
    with trainer_of(tmp_path, model, micro_batch_size=8 // micro_steps, global_batch_size=8) as trainer:
        optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=make_scaler(enabled=False))
        for inputs, targets in batch_of(0, micro_steps):

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                nonlocal num_calls
                num_calls += 1
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            with trainer.step():
                assert scaler.step(optimizer, closure).item() > 0
                scaler.update()
        assert trainer.global_step == 1
    assert num_calls == micro_steps


class _Other:
    """A scaler of another kind."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class _KeptElsewhere(torch.amp.GradScaler):
    """A scaler as a later torch might have it."""

    def __init__(self, without: str) -> None:
        super().__init__("cpu")
        delattr(self, without)


@pytest.mark.parametrize(
    ("scaler", "words"),
    [
        (_Other(), "scaler is a _Other; allowed: one torch.amp.GradScaler"),
        ([make_scaler()], "scaler is a list"),
        (_KeptElsewhere("_per_optimizer_states"), "keeps its state otherwise"),
        (_KeptElsewhere("_scale"), "keeps its state otherwise"),
        (_KeptElsewhere("_growth_tracker"), "keeps its state otherwise"),
    ],
)
def test_what_is_no_scaler_or_cannot_be_put_back_is_refused(tmp_path: Path, scaler: Any, words: str) -> None:
    model = make_model(torch.float32)
    with pytest.raises(ValueError, match=words):
        trainer_of(tmp_path, model).prepare(SGD(model.parameters(), lr=0.1), scaler=scaler)


def test_a_scaler_that_was_prepared_already_is_refused(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    with trainer_of(tmp_path, model) as trainer:
        _, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), scaler=make_scaler())
    with pytest.raises(ValueError, match="is an ElasticScaler already"):
        trainer_of(tmp_path, model).prepare(SGD(model.parameters(), lr=0.1), scaler=scaler)
