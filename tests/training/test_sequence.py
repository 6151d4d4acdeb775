"""Sequence parallelism and loss_parallel: activations cut along the sequence, gradients that are sums over ranks, and
losses of logits cut along the classes; as by hand, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW, Optimizer

from tests.support.faults import Fault, Faults, PlantedFault
from tests.support.ranks import RankPool
from tests.support.sharded import Way, values_of
from tests.support.thinning import the_first
from tests.support.training import Batch, Slices, bits_of, trainer_of

NUM_STEPS = 3
MICRO_BATCH = 2
NUM_WORDS = 12
LENGTH = 8  # of a sequence
IGNORED = -100


class Reader(nn.Module):
    """A block between norms; what it reads is cut along the sequence, all but within the block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.last_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, NUM_WORDS)
        self.at: Callable[[str], object] = lambda phase: None
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.at("in forward")
        hidden = self.embedding(words)
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.at("in backward"))
        return cast("torch.Tensor", self.head(self.last_norm(hidden)))


def plan_of(*, is_loss_cut: bool) -> dict[str, Any]:
    along = Shard(1)
    head = (
        ColwiseParallel(input_layouts=along, output_layouts=Shard(-1), use_local_output=False)
        if is_loss_cut
        else ColwiseParallel(input_layouts=along, output_layouts=Replicate())
    )
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along, use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along, use_local_output=False),
        "last_norm": SequenceParallel(),
        "head": head,
    }


def in_sequence(model: nn.Module, *, is_loss_cut: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, plan_of(is_loss_cut=is_loss_cut))


def in_sequence_and_shards(model: nn.Module, *, is_loss_cut: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan_of(is_loss_cut=is_loss_cut))
    return cast("nn.Module", fully_shard(model, mesh=mesh["data"]))


def _alone() -> tuple[int, int]:
    return 1, 0


def _two_by_two() -> tuple[int, int]:
    return 2, dist.get_rank() // 2


WAYS = {
    "whole loss": Way(num_ranks=2, wrap=lambda model: in_sequence(model, is_loss_cut=False), degree=_alone),
    "cut loss": Way(num_ranks=2, wrap=lambda model: in_sequence(model, is_loss_cut=True), degree=_alone),
    "cut loss, fully_shard": Way(
        num_ranks=4, wrap=lambda model: in_sequence_and_shards(model, is_loss_cut=True), degree=_two_by_two
    ),
}


def around_loss(way: str) -> AbstractContextManager[None]:
    return loss_parallel() if way.startswith("cut") else nullcontext()


def make_words(num_samples: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(NUM_WORDS, (num_samples, LENGTH), generator=draw)
    return words, torch.randint(NUM_WORDS, (num_samples, LENGTH), generator=draw)


def loss_of(model: nn.Module, words: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model(words).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def number_of(loss: torch.Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    if name == "sgd":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AdamW(model.parameters(), lr=1e-2)


def micro_batches(way: Way, num_micro_steps: int) -> list[Batch]:
    """What this rank's replica takes, in order."""
    degree, replica = way.degree()
    words, targets = make_words(NUM_STEPS * num_micro_steps * degree * MICRO_BATCH)
    cut = list(zip(torch.split(words, MICRO_BATCH), torch.split(targets, MICRO_BATCH), strict=True))
    return cut[replica::degree]


def by_hand(way: str, name: str, num_micro_steps: int, most: float | None) -> list[Any]:
    chosen = WAYS[way]
    model = chosen.wrap(Reader())
    optimizer = optimizer_of(name, model)
    losses: list[float] = []
    for index, (words, targets) in enumerate(micro_batches(chosen, num_micro_steps)):
        is_last = (index + 1) % num_micro_steps == 0
        with chosen.share(model, now=is_last), around_loss(way):
            loss = loss_of(model, words, targets)
            losses.append(number_of(loss))
            (loss / num_micro_steps).backward()  # type: ignore[no-untyped-call]
        if is_last:
            if most is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            optimizer.zero_grad()
    return bits_of(losses, values_of(model))


def by_trainer(
    folder: Path, rank: int, way: str, name: str, num_micro_steps: int, most: float | None, *, exactly: bool
) -> list[Any]:
    chosen = WAYS[way]
    degree, replica = chosen.degree()
    model = chosen.wrap(Reader())
    batch = num_micro_steps * degree * MICRO_BATCH
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=batch, micro_batch_size=MICRO_BATCH)
    optimizer = trainer.prepare(optimizer_of(name, model))
    assert (trainer.data_parallel_size, trainer.data_parallel_rank) == (degree, replica)
    losses: list[float] = []
    with trainer:
        for words, targets in micro_batches(chosen, num_micro_steps):
            with trainer.step():
                with around_loss(way):
                    loss = loss_of(model, words, targets)
                    losses.append(number_of(loss))
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
    rank: int, folder: Path, way: str, num_micro_steps: int, most: float | None, calls: dict[str, list[bool]]
) -> None:
    for name, are_exact in calls.items():
        expected = by_hand(way, name, num_micro_steps, most)
        for exactly in are_exact:
            run = folder / f"{name}-{exactly}"
            run.mkdir(exist_ok=True)
            found = by_trainer(run, rank, way, name, num_micro_steps, most, exactly=exactly)
            assert found == expected, (name, exactly)


BOTH = {"sgd": [False, True], "adamw": [False, True]}
ONE_EACH = {"sgd": [False], "adamw": [True]}


@pytest.mark.parametrize(
    ("num_micro_steps", "most", "calls"),
    the_first([(2, 0.05, ONE_EACH), (2, 0.05, BOTH), (4, 0.05, BOTH), (1, None, BOTH)]),
)
@pytest.mark.parametrize("way", the_first(WAYS, 2))
def test_a_step_is_that_of_a_loop_by_hand(
    ranks: RankPool, tmp_path: Path, way: str, num_micro_steps: int, most: float | None, calls: dict[str, list[bool]]
) -> None:
    """With ``loss.backward()`` or exactly, with ``trainer.backward(loss)``."""
    ranks.run(WAYS[way].num_ranks, equal_rank, tmp_path, way, num_micro_steps, most, calls)


def summing_rank(rank: int) -> None:
    """What is special here: gradients that the ranks of a replica have in parts, until the optimizer adds them up."""
    model = in_sequence(Reader(), is_loss_cut=True)
    with loss_parallel():
        loss_of(model, *make_words(MICRO_BATCH)).backward()  # type: ignore[no-untyped-call]
    gradient = model.get_parameter("norm.weight").grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Partial(),)


def test_gradients_of_norms_are_sums_that_are_not_formed(ranks: RankPool) -> None:
    ranks.run(2, summing_rank)


# --- losses by words, and changes while it trains -------------------------------------------------------------------

CHANGES = {1: {"optimizer.learning_rate": 0.05}, 2: {"global_batch_size": 12}, 4: {"dataloader.batch_size": 3}}
NUM_SAMPLES = 62  # the last step is smaller than the others


def words_with_gaps() -> Batch:
    """Sequences of unlike lengths."""
    words, targets = make_words(NUM_SAMPLES)
    lengths = torch.arange(NUM_SAMPLES) * 3 % LENGTH + 1
    return words, targets.where(torch.arange(LENGTH) < lengths[:, None], IGNORED)


def changing_rank(rank: int, folder: Path, way: str, by_words: bool) -> None:
    """Against one plain process that takes each step whole, as many samples as this one's commits had."""
    chosen = WAYS[way]
    degree, replica = chosen.degree()
    model = chosen.wrap(Reader())
    data = words_with_gaps() if by_words else make_words(NUM_SAMPLES)
    source = Slices(data, MICRO_BATCH)
    trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert (trainer.data_parallel_size, trainer.data_parallel_rank) == (degree, replica)
    due = dict(CHANGES)
    steps: list[tuple[int, float]] = []  # samples, rate
    with trainer:
        for words, targets in source:
            changes = due.pop(trainer.global_step, None)
            if changes is not None:
                trainer.propose(changes, "a test")
            with trainer.step():
                with around_loss(way):
                    if by_words:
                        loss = loss_of(model, words, targets, "sum")
                        trainer.backward(loss, num_items=(targets != IGNORED).sum())
                    else:
                        loss_of(model, words, targets).backward()  # type: ignore[no-untyped-call]
                if trainer.sync_gradients:
                    steps.append((trainer.global_batch_size, optimizer.effective_rates[0]))
                optimizer.step()
                optimizer.zero_grad()
        assert not due
    assert {rate for _, rate in steps} == {0.1, 0.05}
    assert {batch for batch, _ in steps} == {8, 12}
    torch.testing.assert_close(values_of(model), plainly(data, steps), rtol=1e-11, atol=1e-13)


def plainly(data: Batch, steps: list[tuple[int, float]]) -> list[torch.Tensor]:
    model = Reader()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = 0
    for batch, rate in steps:
        optimizer.param_groups[0]["lr"] = rate
        part = slice(start, start + batch)
        loss_of(model, data[0][part], data[1][part]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        start += batch
    assert start >= NUM_SAMPLES
    return values_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("by_words", [False, True], ids=["", "by words"])
@pytest.mark.parametrize("way", WAYS)
def test_rate_global_batch_and_micro_batch_change_between_steps(
    ranks: RankPool, tmp_path: Path, way: str, by_words: bool
) -> None:
    ranks.run(WAYS[way].num_ranks, changing_rank, tmp_path, way, by_words)


# --- steps that are taken back --------------------------------------------------------------------------------------

NUM_MICRO_STEPS = 2
PLACES = ("in backward 0", "in forward 1", "forward done 1", "in backward 1", "backward done 1", "clipped 1")


def failing_rank(rank: int, folder: Path, way: str) -> None:
    """However a step failed, training is as if none had."""
    num_ranks = WAYS[way].num_ranks
    expected = training_with_faults(folder / "none", rank, way, Faults())
    for place in PLACES:
        faults = Faults(*(Fault(rank=each, step=1, action="raise", phase=place) for each in range(num_ranks)))
        assert training_with_faults(folder / place, rank, way, faults) == expected, place


def training_with_faults(folder: Path, rank: int, way: str, faults: Faults) -> list[Any]:
    chosen = WAYS[way]
    degree, _ = chosen.degree()
    plain = Reader()
    model = chosen.wrap(plain)
    source = Slices(make_words(64), MICRO_BATCH, is_endless=True)
    folder.mkdir(exist_ok=True)
    batch = MICRO_BATCH * degree * NUM_MICRO_STEPS
    trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=batch)
    optimizer = trainer.prepare(AdamW(model.parameters(), lr=1e-2))
    index = num_caught = 0

    def at(phase: str) -> None:
        faults.at(rank=rank, step=trainer.global_step, phase=f"{phase} {index}")

    plain.at = at
    losses: list[float] = []  # of steps that committed
    kept = 0
    with trainer:
        for words, targets in source:
            try:
                with trainer.step():
                    with around_loss(way):
                        loss = loss_of(model, words, targets)
                        losses.append(number_of(loss))
                        at("forward done")
                        loss.backward()  # type: ignore[no-untyped-call]
                    at("backward done")
                    trainer.clip_grad_norm_(model.parameters(), 0.05)
                    at("clipped")
                    optimizer.step()
                    optimizer.zero_grad()
                index = 0 if trainer.sync_gradients else index + 1
                kept = len(losses) if trainer.sync_gradients else kept
            except PlantedFault:
                num_caught, index = num_caught + 1, 0
                del losses[kept:]
            if trainer.global_step == NUM_STEPS:
                break
    assert num_caught == (0 if faults.is_empty_for(rank) else 1)
    return bits_of(losses, values_of(model), source.committed)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fails_on_all_ranks_is_taken_again(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(WAYS[way].num_ranks, failing_rank, tmp_path, way)
