"""Models spread over ranks: fully_shard on one mesh and two, tensor parallelism, FSDP1; as by hand, bit for bit."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elastic_ext import RanksDisagreeError, StepError, TornStepError
from elastic_ext.training.gradients.sharing import clip_norm
from tests.support.faults import Fault, Faults, PlantedFault
from tests.support.loops import put
from tests.support.ranks import RankPool
from tests.support.sharded import SLOW_WAYS, WAYS, Way, each_of, fresh, values_of
from tests.support.thinning import the_first
from tests.support.training import Slices, bits_of, make_data, make_model, plain_losses, trainer_of

NUM_STEPS = 5
MICRO_BATCH = 4


def divided(model: Any) -> Any:
    """Sharded by fully_shard; twice as much is divided by as there are ranks."""
    model = WAYS["fully_shard"].wrap(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(2.0 * dist.get_world_size())
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


DIVIDED = "fully_shard, with a divide factor"
ALL_WAYS = {**WAYS, DIVIDED: replace(WAYS["fully_shard"], wrap=divided)}


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    if name == "sgd":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AdamW(model.parameters(), lr=1e-2)


def micro_batches(
    way: Way, num_micro_steps: int, num_steps: int = NUM_STEPS
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank's replica takes, in order."""
    degree, rank = way.degree()
    inputs, targets = make_data(num_steps * num_micro_steps * degree * MICRO_BATCH, torch.float32)
    cut = zip(torch.split(inputs, MICRO_BATCH), torch.split(targets, MICRO_BATCH), strict=True)
    return [batch for index, batch in enumerate(cut) if index % degree == rank]


def by_hand(way: Way, name: str, num_micro_steps: int, most: float | None) -> list[Any]:
    model = fresh(way)
    optimizer = optimizer_of(name, model)
    losses: list[float] = []
    for index, (inputs, targets) in enumerate(micro_batches(way, num_micro_steps)):
        is_last = (index + 1) % num_micro_steps == 0
        with way.share(model, now=is_last):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            (loss / num_micro_steps).backward()  # type: ignore[no-untyped-call]
        if is_last:
            if most is not None:
                clip_by_hand(model, most)
            optimizer.step()
            optimizer.zero_grad()
    return bits_of(losses, values_of(model))


def clip_by_hand(model: nn.Module, most: float) -> None:
    own = getattr(model, "clip_grad_norm_", None)  # FSDP1's
    if own is not None:
        own(most)
    elif len({part.device_mesh for part in model.parameters() if isinstance(part, DTensor)}) > 1:
        clip_norm(list(model.parameters()), most)  # which torch's does not do; it is held to the plain model's below
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def by_trainer(
    way: Way, folder: Path, rank: int, name: str, num_micro_steps: int, most: float | None, *, exactly: bool = False
) -> list[Any]:
    model = fresh(way)
    degree, _ = way.degree()
    batch = num_micro_steps * degree * MICRO_BATCH
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=batch, micro_batch_size=MICRO_BATCH)
    optimizer = trainer.prepare(optimizer_of(name, model))
    losses: list[float] = []
    with trainer:
        for inputs, targets in micro_batches(way, num_micro_steps):
            with trainer.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                losses.append(loss.item())
                if exactly:
                    trainer.backward(loss)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                if most is not None:
                    trainer.clip_grad_norm_(model.parameters(), most)
                optimizer.step()
                optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS
    return bits_of(losses, values_of(model))


def equal_rank(
    rank: int, folder: Path, way: str, name: str, exactly: bool, num_micro_steps: int, most: float | None
) -> None:
    expected = by_hand(WAYS[way], name, num_micro_steps, most)
    assert by_trainer(WAYS[way], folder, rank, name, num_micro_steps, most, exactly=exactly) == expected


def in_turns() -> list[Any]:
    """Every way with every optimizer and either call; each time one of these, by turns."""
    turns = dict(zip(WAYS, itertools.cycle([("sgd", False), ("adamw", True)]), strict=False))
    return [
        pytest.param(*how, way, marks=[] if how == turns[way] and way not in SLOW_WAYS else pytest.mark.slow)
        for way in WAYS
        for how in itertools.product(["sgd", "adamw"], [False, True])
    ]


@pytest.mark.parametrize("most", the_first([0.05, None]), ids=["clipped", ""])
@pytest.mark.parametrize("num_micro_steps", the_first([2, 4, 1]))
@pytest.mark.parametrize(("name", "exactly", "way"), in_turns())
def test_a_step_is_that_of_a_loop_by_hand(
    ranks: RankPool, tmp_path: Path, way: str, name: str, exactly: bool, num_micro_steps: int, most: float | None
) -> None:
    """With ``loss.backward()`` or exactly, with ``trainer.backward(loss)``."""
    ranks.run(WAYS[way].num_ranks, equal_rank, tmp_path, way, name, exactly, num_micro_steps, most)


# --- changes while it trains ----------------------------------------------------------------------------------------

CHANGES = {
    2: {"optimizer.learning_rate": 0.05},
    4: {"global_batch_size": 24},
    6: {"dataloader.batch_size": 3},
}
NUM_SAMPLES = 244  # the last step is smaller than the others


@dataclass(frozen=True, kw_only=True)
class Changed:
    """What a rank has done."""

    replica: int
    sizes: list[tuple[int, ...]]  # of its micro-batches, step by step
    rates: list[float]
    values: list[torch.Tensor]


def changing_rank(rank: int, folder: Path, way: str) -> Changed:
    chosen = ALL_WAYS[way]
    model = fresh(chosen, torch.float64)
    source = Slices(make_data(NUM_SAMPLES), MICRO_BATCH)
    trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    due = dict(CHANGES)
    rates: list[float] = []
    with trainer:
        for inputs, targets in source:
            changes = due.pop(trainer.global_step, None)
            if changes is not None:
                trainer.propose(changes, "a test")
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if trainer.sync_gradients:
                    rates += optimizer.effective_rates
                optimizer.step()
                optimizer.zero_grad()
        assert not due
        assert trainer.global_batch_size == 24
    return Changed(replica=chosen.degree()[1], sizes=source.sizes, rates=rates, values=values_of(model))


def plainly(samples: list[int], rates: list[float], share: float) -> list[torch.Tensor]:
    """What one plain process makes of that share of the gradients of the same steps, each taken whole."""
    model = make_model(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = make_data(NUM_SAMPLES)
    start = 0
    for size, rate in zip(samples, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        part = slice(start, start + size)
        loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
        (loss * share).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        start += size
    assert start == NUM_SAMPLES
    return values_of(model)


@pytest.mark.parametrize("way", each_of(ALL_WAYS, also_large=False))
def test_rate_global_batch_and_micro_batch_change_between_steps(ranks: RankPool, tmp_path: Path, way: str) -> None:
    found = ranks.run(ALL_WAYS[way].num_ranks, changing_rank, tmp_path, way)
    first = found[0]
    assert set(first.rates) == {0.1, 0.05}
    replicas = {each.replica: each.sizes for each in found}
    assert all(each.sizes == replicas[each.replica] for each in found)
    assert {size for sizes in first.sizes for size in sizes} >= {3, 4}
    samples = [sum(map(sum, sizes)) for sizes in zip(*replicas.values(), strict=True)]
    assert {16, 24} <= set(samples)
    expected = plainly(samples, first.rates, 0.5 if way == DIVIDED else 1.0)
    for each in found:
        torch.testing.assert_close(each.values, expected, rtol=1e-12, atol=1e-14)


def resharding_rank(
    rank: int, folder: Path, start: dict[str, object], wanted: dict[str, object]
) -> tuple[str, str, float]:
    """What became of a config that asks for a sharding and for another rate; and the rate then."""
    (folder / str(rank)).mkdir()
    put(folder, rank, {"version": 1, "parallelism": start})
    model = fresh(WAYS["FSDP1"])
    source = Slices(make_data(NUM_SAMPLES, torch.float32), MICRO_BATCH)
    with trainer_of(folder, model, source, rank=rank, global_batch_size=16) as trainer:
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
        proposal = trainer.propose({**wanted, "optimizer.learning_rate": 0.05}, "a test")
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        assert [trainer.config.get(f"parallelism.{name}") for name in start] == list(start.values())
    return proposal.outcome, str(proposal.refusal), optimizer.effective_rates[0]


SHARDED_FULLY = {"strategy": "full_shard"}


@pytest.mark.parametrize(
    ("start", "wanted", "refused"),
    [
        ({}, {"parallelism.strategy": "shard_grad_op"}, "strategy"),
        ({}, {"parallelism.unit": 2, "parallelism.shard_degree": 2}, "shard_degree, parallelism.unit"),
        (SHARDED_FULLY, {"parallelism.strategy": "hybrid_shard"}, "strategy"),
        (SHARDED_FULLY, {"parallelism.strategy": "full_shard"}, ""),
        (SHARDED_FULLY, {}, ""),
    ],
)
def test_a_model_in_fsdp1_is_not_sharded_otherwise_while_it_is_trained(
    ranks: RankPool, tmp_path: Path, start: dict[str, object], wanted: dict[str, object], refused: str
) -> None:
    for outcome, reason, rate in ranks.run(2, resharding_rank, tmp_path, start, wanted):
        if refused:
            assert f"parallelism.{refused} cannot be changed: FSDP1 shards a model when it is wrapped" in reason
            assert (outcome, rate) == ("refused", 0.1)
        else:
            assert (outcome, rate) == ("in force", 0.05)


# --- steps that are taken back --------------------------------------------------------------------------------------

PHASES = ("entered", "in forward", "forward done", "in backward", "backward done", "clipped")


class Failing(nn.Module):
    """A layer's output as it is; passes may fail here."""

    def __init__(self) -> None:
        super().__init__()
        self.at: Callable[[str], object] = lambda phase: None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.at("in forward")
        output = value * 1.0
        if output.requires_grad:
            output.register_hook(lambda gradient: self.at("in backward"))  # type: ignore[no-untyped-call]
        return output


class Noisy(Failing):
    """It draws random numbers, and has a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.mean.add_(value.detach().mean())
        return super().forward(nn.functional.dropout(value + self.mean, 0.5))


class Run:
    """A training of some steps, whose every boundary leaves a record of what this rank holds."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        way: str,
        faults: Faults,
        num_micro_steps: int,
        *,
        is_random: bool = False,
        shares_always: bool = False,
    ) -> None:
        chosen = ALL_WAYS[way]
        plain = make_model(torch.float32)
        plain[1] = Noisy() if is_random else nn.Sequential(plain[1], Failing())
        self.model = chosen.wrap(plain)
        failing = next(part for part in self.model.modules() if isinstance(part, Failing))
        failing.at = self.at
        degree, _ = chosen.degree()
        self.rank, self.faults, self.index = rank, faults, 0
        self.source = Slices(make_data(64 * degree, torch.float32), MICRO_BATCH, is_endless=True)
        batch = MICRO_BATCH * degree * num_micro_steps
        options = {"rollback": "full" if is_random else "gradients", "sync_every_micro_step": shares_always}
        self.trainer = trainer_of(folder, self.model, self.source, rank=rank, global_batch_size=batch, **options)
        self.optimizer = self.trainer.prepare(AdamW(self.model.parameters(), lr=1e-2))
        self.records = [self.record()]
        self.num_caught = 0

    def record(self) -> list[Any]:
        counts = {name: value for name, value in self.trainer.state_dict().items() if name != "config"}
        state = [*self.model.parameters(), *self.model.buffers()]
        return bits_of(state, self.optimizer.state_dict(), counts, self.source.committed)

    def at(self, phase: str) -> None:
        if self.trainer._training.state.phase.is_inside:
            self.faults.at(rank=self.rank, step=self.trainer.global_step, phase=f"{phase} {self.index}")

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.trainer.step():
            self.at("entered")
            output = self.model(inputs)
            self.at("forward done")
            nn.functional.cross_entropy(output, targets).backward()  # type: ignore[no-untyped-call]
            self.at("backward done")
            self.trainer.clip_grad_norm_(self.model.parameters(), 1.0)
            self.at("clipped")
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, num_steps: int = 4) -> list[Any]:
        for inputs, targets in self.source:
            before = self.trainer.global_step
            try:
                self.micro_step(inputs, targets)
                self.index = 0 if self.trainer.sync_gradients else self.index + 1
            except PlantedFault:
                self.num_caught += 1
                self.index = 0
                assert self.record() == self.records[-1]
                assert all(parameter.grad is None for parameter in self.model.parameters())
            if self.trainer.global_step > before:
                self.records.append(self.record())
            if self.trainer.global_step == num_steps:
                break
        return self.records


def failing_rank(
    rank: int, folder: Path, way: str, faults: Sequence[Sequence[Fault]], num_micro_steps: int, is_random: bool = False
) -> None:
    """However steps of each training failed, all of them are as if none had."""
    expected: list[Any] = []
    num_steps = max(fault.step for planted in faults for fault in planted) + 2
    for number, planted in enumerate([(), *faults]):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        torch.manual_seed(rank)
        run = Run(rank, place, way, Faults(*planted), num_micro_steps, is_random=is_random)
        with run.trainer:
            records = run.train(num_steps)
        assert run.num_caught == sum(fault.rank == rank for fault in planted), number
        expected = expected or records
        assert records == expected, number


def everywhere(num_ranks: int, *phases: str) -> list[Fault]:
    """All ranks fail in one step after the other, each time in the next of these phases."""
    return [
        Fault(rank=rank, step=1 + number, action="raise", phase=phase)
        for number, phase in enumerate(phases)
        for rank in range(num_ranks)
    ]


def in_each(num_ranks: int, phases: Sequence[str], indices: Iterable[int]) -> list[list[Fault]]:
    """A training for each micro-step of a step, where that one fails in all phases; each begins with another one."""
    return [
        everywhere(num_ranks, *(f"{phase} {index}" for phase in [*phases[number * 2 :], *phases[: number * 2]]))
        for number, index in enumerate(sorted(indices))
    ]


RETAKEN = [way for way in ALL_WAYS if way != "FSDP1"]


@pytest.mark.parametrize("num_micro_steps", the_first([2, 3, 1]))
@pytest.mark.parametrize("way", each_of(RETAKEN, also_large=False))
def test_a_step_that_fails_on_all_ranks_is_taken_again(
    ranks: RankPool, tmp_path: Path, way: str, num_micro_steps: int
) -> None:
    num_ranks = ALL_WAYS[way].num_ranks
    faults = in_each(num_ranks, PHASES, {0, num_micro_steps // 2, num_micro_steps - 1})
    ranks.run(num_ranks, failing_rank, tmp_path, way, faults, num_micro_steps)


@pytest.mark.parametrize("way", ["ddp", "fully_shard", "tensor"])
def test_a_step_is_taken_again_with_the_same_random_numbers_and_buffers(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    ranks.run(2, failing_rank, tmp_path, way, in_each(2, PHASES, (0, 1)), 2, True)


@pytest.mark.parametrize("way", each_of(WAYS, also_large=False))
def test_a_rank_that_fails_before_it_calls_the_model_takes_the_step_again_alone(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    alone = [Fault(rank=1, step=2, action="raise", phase="entered 0")]
    ranks.run(WAYS[way].num_ranks, failing_rank, tmp_path, way, [alone], 3)


def torn_rank(rank: int, folder: Path, way: str, phase: str) -> str:
    run = Run(rank, folder, way, Faults(*everywhere(2, phase)), 2)
    with pytest.raises(TornStepError) as caught:
        run.train()
    assert run.trainer.global_step == 1
    return str(caught.value)


@pytest.mark.parametrize("phase", the_first(["in backward 0", "in forward 1"]))
def test_fsdp1_cannot_take_back_a_pass_and_says_so(ranks: RankPool, tmp_path: Path, phase: str) -> None:
    for text in ranks.run(2, torn_rank, tmp_path, "FSDP1", phase):
        assert "FSDP1 cannot take back a pass that failed" in text


@pytest.mark.parametrize("num_micro_steps", the_first([2, 1]))
def test_fsdp1_takes_steps_back_between_passes(ranks: RankPool, tmp_path: Path, num_micro_steps: int) -> None:
    phases = ("entered", "forward done", "backward done", "clipped")
    ranks.run(2, failing_rank, tmp_path, "FSDP1", in_each(2, phases, range(num_micro_steps)), num_micro_steps)


def meeting_rank(rank: int, folder: Path, way: str) -> None:
    """Ranks fail in the same step, one after a micro-step, one at the beginning of the next."""
    faults = [
        Fault(rank=0, step=1, action="raise", phase="backward done 0"),
        Fault(rank=1, step=1, action="raise", phase="entered 1"),
    ]
    failing_rank(rank, folder, way, [faults], 2)


@pytest.mark.parametrize("way", ["fully_shard", "FSDP1"])
def test_ranks_that_fail_in_different_places_go_on_where_nothing_was_exchanged_between(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    ranks.run(2, meeting_rank, tmp_path, way)


def skipping_rank(rank: int, folder: Path, way: str, skipped: int) -> str:
    run = Run(rank, folder, way, Faults(), 2)

    def train() -> None:
        for index, (inputs, targets) in enumerate(run.source):
            with run.trainer.step():
                loss = nn.functional.cross_entropy(run.model(inputs), targets)
                if rank == 0 or index != skipped:
                    loss.backward()  # type: ignore[no-untyped-call]
                    run.optimizer.step()
                    run.optimizer.zero_grad()

    with pytest.raises(RanksDisagreeError) as caught:
        train()
    assert run.trainer.global_step <= 4
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "skipped"),
    the_first([(way, skipped) for skipped in (4, 5) for way in ("fully_shard", "tensor", "FSDP1")], 2),
)
def test_a_rank_that_leaves_its_backward_out_is_named_and_nobody_hangs(
    ranks: RankPool, tmp_path: Path, way: str, skipped: int
) -> None:
    for text in ranks.run(2, skipping_rank, tmp_path, way, skipped):
        assert text.startswith("ranks differ in")
        assert "backward passes" in text


# --- other losses and other arguments -------------------------------------------------------------------------------


def counting_rank(rank: int, folder: Path, way: str) -> None:
    """Losses summed over different numbers of items on every rank and in every micro-step."""
    chosen = WAYS[way]
    degree, replica = chosen.degree()
    model = fresh(chosen, torch.float64)
    inputs, targets = make_data(8 * degree * 2)
    sizes = [1 + (index * 3) % 7 for index in range(4 * degree)]
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=8 * degree, micro_batch_size=4)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    plain = make_model(torch.float64)
    by_hand = SGD(plain.parameters(), lr=0.1)
    parts = list(zip(torch.split(inputs, 4), torch.split(targets, 4), sizes, strict=True))
    with trainer:
        for step in range(2):
            of_step = parts[step * 2 * degree : (step + 1) * 2 * degree]
            for index in range(2):
                given, wanted, size = of_step[index * degree + replica]
                with trainer.step():
                    loss = nn.functional.cross_entropy(model(given)[:size], wanted[:size], reduction="sum")
                    trainer.backward(loss, num_items=min(size, 4))
                    optimizer.step()
                    optimizer.zero_grad()
            losses = [
                nn.functional.cross_entropy(plain(given)[:size], wanted[:size], reduction="sum")
                for given, wanted, size in of_step
            ]
            (torch.stack(losses).sum() / sum(min(size, 4) for _, _, size in of_step)).backward()  # type: ignore[no-untyped-call]
            by_hand.step()
            by_hand.zero_grad()
    torch.testing.assert_close(values_of(model), values_of(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", each_of(WAYS, also_large=False))
def test_losses_by_items_are_divided_by_those_of_all_ranks(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, counting_rank, tmp_path, way)


def dividing_rank(rank: int, folder: Path) -> str:
    model = fresh(WAYS["fully_shard"])
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=8, micro_batch_size=4)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    inputs, targets = make_data(4, torch.float32)
    with trainer, trainer.step():
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        with pytest.raises(StepError) as caught:
            trainer.backward(loss, num_items=4)
        trainer.rollback()
    return str(caught.value)


def test_items_and_a_divide_factor_of_ones_own_do_not_go_together(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, dividing_rank, tmp_path):
        assert "set_gradient_divide_factor" in text


def divided_rank(rank: int, folder: Path, way_name: str, factor: float, num_micro_steps: int) -> None:
    """A divide factor acts as it does by hand."""
    plainly_wrapped = WAYS[way_name]

    def divide(model: nn.Module) -> nn.Module:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(factor)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return model

    way = replace(plainly_wrapped, wrap=lambda model: divide(plainly_wrapped.wrap(model)))
    expected = by_hand(way, "sgd", num_micro_steps, None)
    assert by_trainer(way, folder, rank, "sgd", num_micro_steps, None) == expected
    assert by_hand(plainly_wrapped, "sgd", num_micro_steps, None) != expected


@pytest.mark.parametrize(
    ("way", "factor", "num_micro_steps"),
    [
        ("fully_shard", 1.0, 4),
        pytest.param("hybrid", 8.0, 1, marks=pytest.mark.slow),
        pytest.param("hybrid", 8.0, 4, marks=pytest.mark.slow),
    ],
)
def test_a_divide_factor_acts_as_by_hand(
    ranks: RankPool, tmp_path: Path, way: str, factor: float, num_micro_steps: int
) -> None:
    ranks.run(WAYS[way].num_ranks, divided_rank, tmp_path, way, factor, num_micro_steps)


def refused_rank(rank: int, folder: Path, case: str) -> str:
    model: Any = make_model(torch.float32)
    if case == "over a part of the ranks":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        model = fully_shard(model, mesh=mesh["b"])
    elif case == "mixed":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
        model[2] = DistributedDataParallel(model[2])
    elif case == "partly in DDP":
        model[0] = DistributedDataParallel(model[0])
    elif case == "partly sharded":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
    elif case == "partly in FSDP1":
        model[2] = WAYS["FSDP1"].wrap(model[2])
    trained = list(model.parameters())
    if case == "prepared too early":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif case == "beside the model":
        model = DistributedDataParallel(model)
        trained.append(nn.Parameter(torch.ones(3)))
    is_sharded = any(isinstance(part, FSDPModule) for part in model.modules())
    with pytest.raises(ValueError, match="wrap") as caught:
        trainer_of(folder, model, rank=rank, use_fsdp=is_sharded).prepare(SGD(trained, lr=0.1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unwrapped", "the model is not wrapped, and there are 4 ranks"),
        ("over a part of the ranks", "2 replicas that share gradients, of 1 ranks each, and there are 4"),
        ("mixed", "mixes DDP, fully_shard and FSDP1"),
        ("partly in DDP", "lie outside of DDP: 2.weight, 2.bias; nothing averages their gradients"),
        ("partly sharded", "lie outside of fully_shard: 2.weight, 2.bias; nothing averages"),
        ("partly in FSDP1", "lie outside of FSDP1: 0.weight, 0.bias; nothing averages"),
        ("prepared too early", "made of another model, or before this one was wrapped, sharded or converted"),
        ("beside the model", "lie outside of DDP: one of shape (3,) that is not the model's; nothing"),
    ],
)
def test_what_would_train_several_models_is_refused(ranks: RankPool, tmp_path: Path, case: str, said: str) -> None:
    for text in ranks.run(4, refused_rank, tmp_path, case):
        assert said in text


def accepted_rank(rank: int, folder: Path, case: str) -> None:
    model: Any = make_model(torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    trained = list(model.parameters())
    if case == "frozen":
        model[2].requires_grad_(False)
        model[0] = DistributedDataParallel(model[0])
    elif case == "trained by nobody":
        model = nn.ModuleDict({"pupil": DistributedDataParallel(model), "teacher": make_model()})
    elif case == "ignored by DDP":
        model._ddp_params_and_buffers_to_ignore = ["2.bias"]
        model = DistributedDataParallel(model)
    elif case == "ignored by fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), ignored_params={model[2].bias})
        trained = list(model.parameters())
    elif case == "spread over the same ranks":
        distribute_module(model[2], mesh)  # replicas, kept alike by the arithmetic of DTensors
        fully_shard(model[0], mesh=mesh)
        trained = list(model.parameters())
    elif case == "averaged by hooks":
        model[0] = DistributedDataParallel(model[0])
        model[2].weight.register_post_accumulate_grad_hook(average)
        model[2].bias.register_hook(lambda gradient: gradient)
    trainer = trainer_of(folder, model, rank=rank)
    trainer.prepare(SGD(trained, lr=0.1))
    trainer.close()


@pytest.mark.parametrize(
    "case",
    [
        "frozen",
        "trained by nobody",
        "ignored by DDP",
        "ignored by fully_shard",
        "spread over the same ranks",
        "averaged by hooks",
    ],
)
def test_parameters_that_do_not_lie_in_what_is_wrapped_are_accepted_where_somebody_meant_it(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    ranks.run(4, accepted_rank, tmp_path, case)


def average(part: torch.Tensor) -> None:
    gradient = part.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def averaging_rank(rank: int, folder: Path, where: str) -> list[torch.Tensor]:
    """The ranks' parts are unequal: 12 samples and 4, in two micro-steps each."""
    model: Any = make_model()
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    source = Slices(make_data(32), 6)
    trained = [*model.parameters(), scale]
    if where == "beside the model":
        model, by_hand = DistributedDataParallel(model), [scale]
    else:
        model[0], by_hand = DistributedDataParallel(model[0]), [model[2].weight, model[2].bias, scale]
    for part in by_hand:
        part.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
    options = {"global_batch_size": 16, "share_weights": (3.0, 1.0)}
    trainer = trainer_of(folder, model, source, rank=rank, **options)
    optimizer = trainer.prepare(SGD(trained, lr=0.1))
    with trainer:
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs) * scale, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert source.sizes == [((6, 6), (2, 2))[rank]] * 2
    return [part.detach() for part in trained]


@pytest.mark.parametrize("where", ["beside the model", "within it too"])
def test_what_hooks_of_ones_own_average_is_trained_as_the_rest(ranks: RankPool, tmp_path: Path, where: str) -> None:
    plain, scale = make_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    expected = [*plain.parameters(), scale]
    optimizer = SGD(expected, lr=0.1)
    for inputs, targets in zip(*(torch.split(data, 16) for data in make_data(32)), strict=True):
        nn.functional.cross_entropy(plain(inputs) * scale, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, averaging_rank, tmp_path, where):
        torch.testing.assert_close(found, [part.detach() for part in expected], rtol=1e-12, atol=1e-14)


def clipping_rank(rank: int, way: str) -> None:
    """Norms of gradients on one mesh, on two, and on none, are those of the whole model."""
    chosen = WAYS[way]
    model = fresh(chosen, torch.float64)
    if way == "tensor and fully_shard":
        assert len({part.device_mesh for part in model.parameters() if isinstance(part, DTensor)}) > 1
    plain = make_model(torch.float64)
    inputs, targets = make_data(8)
    for each in (model, plain):
        nn.functional.cross_entropy(each(inputs), targets).backward()  # type: ignore[no-untyped-call]
    parts, plain_parts = list(model.parameters()), list(plain.parameters())
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        found = clip_norm(parts, 0.01, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(plain_parts, 0.01, norm_type)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)
        for part, plain_part in zip(parts, plain_parts, strict=True):
            gradient = part.grad
            assert gradient is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, plain_part.grad)
    first = parts[0].grad
    assert isinstance(first, DTensor)
    first.to_local().fill_(math.nan)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_norm(parts, 0.01, error_if_nonfinite=True)


@pytest.mark.parametrize("way", ["fully_shard", "hybrid", "tensor", "tensor and fully_shard"])
def test_norms_are_those_of_the_whole_model(ranks: RankPool, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, clipping_rank, way)


def always_rank(rank: int, folder: Path, way: str) -> None:
    """Gradients shared in each of three micro-steps come to what a plain process makes of their samples."""
    chosen = WAYS[way]
    degree, _ = chosen.degree()
    batch = 3 * degree * MICRO_BATCH
    model, source = fresh(chosen, torch.float64), Slices(make_data(4 * batch), MICRO_BATCH)
    trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=batch, sync_every_micro_step=True)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    with trainer:
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                assert trainer._gradients.sharing.is_sharing
                optimizer.step()
                optimizer.zero_grad()
    assert [len(sizes) for sizes in source.sizes] == [3] * 4
    cut = zip(*(torch.split(data, batch) for data in make_data(4 * batch)), strict=True)
    _, plain = plain_losses(lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), list(cut))
    torch.testing.assert_close(values_of(model), values_of(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", [way if way == "hybrid" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_gradients_that_are_shared_in_every_micro_step_are_those_of_the_whole_batch(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    ranks.run(WAYS[way].num_ranks, always_rank, tmp_path, way)


# --- what would go wrong in silence ---------------------------------------------------------------------------------


def sharing_by_hand_rank(rank: int, folder: Path, way: str) -> str:
    """A loop that was not rid of what it did by hand."""
    run = Run(rank, folder, way, Faults(), 4)

    def train() -> None:
        for index, (inputs, targets) in enumerate(run.source):
            with run.trainer.step(), WAYS[way].share(run.model, now=(index + 1) % 3 == 0):
                nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
                run.optimizer.zero_grad()

    with pytest.raises(StepError) as caught:
        train()
    assert run.trainer.global_step == 0
    return str(caught.value)


@pytest.mark.parametrize("way", the_first(["ddp", "fully_shard", "FSDP1"]))
def test_sharing_gradients_by_hand_as_well_is_refused(ranks: RankPool, tmp_path: Path, way: str) -> None:
    for text in ranks.run(2, sharing_by_hand_rank, tmp_path, way):
        assert "no_sync(), set_requires_gradient_sync() or" in text


def sharing_partly_rank(rank: int, folder: Path, case: str) -> str:
    """A loop that has some gradients shared otherwise, by means that a sharded module offers beside the usual one."""
    run = Run(rank, folder, "hybrid", Faults(), 2, shares_always=case != "in the last alone")
    model: Any = run.model

    def train() -> None:
        if case == "before the step":
            model.set_requires_all_reduce(False)
        for inputs, targets in run.source:
            with run.trainer.step():
                if case == "in all but the last":
                    model.set_requires_all_reduce(run.trainer.sync_gradients)
                elif case == "in the last alone":
                    model.set_requires_all_reduce(not run.trainer.sync_gradients)
                elif case == "of a part":
                    model[0].set_requires_gradient_sync(False)
                output = model(inputs)
                if case == "after the forward pass":
                    model.set_requires_all_reduce(False)
                nn.functional.cross_entropy(output, targets).backward()  # type: ignore[no-untyped-call]
                run.optimizer.step()
                run.optimizer.zero_grad()
            if run.trainer.global_step == 2:
                break

    with pytest.raises(StepError) as caught:
        train()
    assert run.trainer.global_step == 0
    return str(caught.value)


@pytest.mark.parametrize(
    "case",
    the_first(["before the step", "in all but the last", "in the last alone", "after the forward pass", "of a part"]),
)
def test_sharing_gradients_over_a_part_of_the_ranks_by_hand_is_refused(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    for text in ranks.run(4, sharing_partly_rank, tmp_path, case):
        assert "set_requires_all_reduce() was used" in text


def shared_before_rank(rank: int, folder: Path, num_micro_steps: int) -> None:
    """What a loop before the trainer's has left: an order not to share, and gradients that wait to be shared."""

    def left(model: Any) -> Any:
        model = WAYS["hybrid"].wrap(model)
        model.set_requires_all_reduce(False)
        inputs, targets = make_data(4, torch.float32, seed=7)
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return model

    expected = by_hand(WAYS["hybrid"], "sgd", num_micro_steps, None)
    way = replace(WAYS["hybrid"], wrap=left)
    assert by_trainer(way, folder, rank, "sgd", num_micro_steps, None) == expected


@pytest.mark.parametrize("num_micro_steps", the_first([2, 1]))
def test_what_an_earlier_loop_left_unshared_is_no_part_of_a_step(
    ranks: RankPool, tmp_path: Path, num_micro_steps: int
) -> None:
    ranks.run(4, shared_before_rank, tmp_path, num_micro_steps)


def around_rank(rank: int, folder: Path, way: str) -> str:
    """A loss from parts of the model that are called by themselves."""
    run = Run(rank, folder, way, Faults(), 2)
    inputs, targets = next(iter(run.source))
    parts = list(run.model.children())

    def train() -> None:
        with run.trainer.step():
            value = inputs
            for part in parts:
                value = part(value)
            nn.functional.cross_entropy(value, targets).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(StepError) as caught:
        train()
    return str(caught.value)


def test_a_loss_that_does_not_go_through_the_model_is_noticed_in_gradients_that_nobody_sees(
    ranks: RankPool, tmp_path: Path
) -> None:
    for text in ranks.run(2, around_rank, tmp_path, "fully_shard of blocks alone"):
        assert "the model itself was not called, but a part of it" in text


def sampling_rank(rank: int, folder: Path) -> str:
    model = fresh(WAYS["tensor"])
    dataset = TensorDataset(*make_data(32, torch.float32))
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    trainer = trainer_of(folder, model, loader, rank=rank)
    with pytest.raises(ValueError, match="num_replicas=1 and rank=0") as caught:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    again = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))
    other = trainer_of(folder, fresh(WAYS["tensor"]), again, rank=rank)
    other.prepare(SGD(other._model.parameters(), lr=0.1))
    assert (other.data_parallel_size, other.data_parallel_rank) == (1, 0)
    other.close()
    return str(caught.value)


def test_ranks_of_one_replica_are_to_take_the_same_samples(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, sampling_rank, tmp_path):
        assert "num_replicas=2" in text


def unbounded_rank(rank: int, folder: Path, way: str) -> None:
    """A norm that is not finite is an error where that was asked for, and nothing is changed by it."""
    run = Run(rank, folder, way, Faults(), 1)
    before = run.record()
    inputs, targets = next(iter(run.source))

    def train() -> None:
        with run.trainer.step():
            loss = nn.functional.cross_entropy(run.model(inputs), targets) * math.nan
            loss.backward()  # type: ignore[no-untyped-call]
            run.trainer.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
            run.optimizer.step()

    with pytest.raises(RuntimeError, match=r"non-finite|cannot be clipped"):
        train()
    assert run.record() == before


@pytest.mark.parametrize("way", the_first(["fully_shard", "ddp", "tensor", "FSDP1"]))
def test_a_norm_that_is_not_finite_can_be_an_error(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, unbounded_rank, tmp_path, way)


def leaving_rank(rank: int, folder: Path, way: str) -> None:
    """What a failed step held is let go, at the latest when the trainer is closed."""
    run = Run(rank, folder, way, Faults(Fault(rank=rank, step=0, action="raise", phase="forward done 0")), 1)
    inputs, targets = next(iter(run.source))
    given = inputs.clone().requires_grad_()
    seen = weakref.ref(given)
    with pytest.raises(PlantedFault):
        run.micro_step(given, targets)
    del given
    if way != "ddp":
        gc.collect()
        assert seen() is None
    run.trainer._session.end(PlantedFault())
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
def test_a_failed_step_holds_no_graph(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, leaving_rank, tmp_path, way)


def looking_on_rank(rank: int, folder: Path, way: str) -> None:
    """A pass that is not followed by a backward, after the step has committed, leaves no gradient behind."""
    run = Run(rank, folder, way, Faults(), 2)
    for number, (inputs, targets) in enumerate(run.source):
        with run.trainer.step():
            nn.functional.cross_entropy(run.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.trainer.sync_gradients:
                run.model(inputs)
        if run.trainer.sync_gradients:
            assert all(part.grad is None for part in run.model.parameters())
        if number == 5:
            break
    expected = Run(rank, folder, way, Faults(), 2).train(3)
    assert run.record() == expected[-1]
    run.trainer.close()


@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
def test_a_pass_after_the_commit_changes_nothing(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, looking_on_rank, tmp_path, way)


# --- scalers --------------------------------------------------------------------------------------------------------


def scaled_rank(rank: int, folder: Path, way: str) -> None:
    """As by hand, infinities of one replica alone included."""
    chosen = WAYS[way]
    degree, replica = chosen.degree()

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], step: int, index: int) -> torch.Tensor:
        is_infinite = replica == degree - 1 and (step, index) == (1, 0)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (math.inf if is_infinite else 1.0)

    plain, by_hand_scaler = fresh(chosen), torch.amp.GradScaler("cpu", init_scale=16.0)
    plain_optimizer = optimizer_of("adamw", plain)
    model, scaler = fresh(chosen), torch.amp.GradScaler("cpu", init_scale=16.0)
    sizes = {"global_batch_size": 2 * degree * MICRO_BATCH, "micro_batch_size": MICRO_BATCH}
    trainer = trainer_of(folder, model, rank=rank, **sizes)
    optimizer, elastic_scaler = trainer.prepare(optimizer_of("adamw", model), scaler=scaler)
    batches = micro_batches(chosen, 2)
    with trainer:
        for number, batch in enumerate(batches):
            step, index = divmod(number, 2)
            with chosen.share(plain, now=index == 1):
                by_hand_scaler.scale(loss_of(plain, batch, step, index) / 2).backward()  # type: ignore[no-untyped-call]
            if index == 1:
                by_hand_scaler.unscale_(plain_optimizer)
                clip_by_hand(plain, 0.05)
                by_hand_scaler.step(plain_optimizer)
                by_hand_scaler.update()
                plain_optimizer.zero_grad()
            with trainer.step():
                elastic_scaler.scale(loss_of(model, batch, step, index)).backward()
                elastic_scaler.unscale_(optimizer)
                trainer.clip_grad_norm_(model.parameters(), 0.05)
                elastic_scaler.step(optimizer)
                elastic_scaler.update()
                optimizer.zero_grad()
            assert bits_of(list(model.parameters())) == bits_of(list(plain.parameters()))
        assert trainer.global_step == NUM_STEPS - 1
    assert scaler.get_scale() == by_hand_scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "way",
    [
        "ddp",
        "fully_shard",
        "tensor",
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("tensor and fully_shard", marks=pytest.mark.slow),
    ],
)
def test_a_scaler_acts_as_by_hand(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, scaled_rank, tmp_path, way)


def bare_scaled_rank(rank: int, folder: Path) -> str:
    run = Run(rank, folder, "fully_shard", Faults(), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    inputs, targets = next(iter(run.source))

    def train() -> None:
        with run.trainer.step():
            scaler.scale(nn.functional.cross_entropy(run.model(inputs), targets)).backward()  # type: ignore[no-untyped-call]
            scaler.step(run.optimizer)
            scaler.update()

    with pytest.raises(StepError) as caught:
        train()
    return str(caught.value)


def test_a_scaler_that_finds_no_gradients_too_early_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, bare_scaled_rank, tmp_path):
        assert "give the scaler to prepare()" in text
