"""A global batch that does not change: the losses of one plain process, whatever W and b, and while b changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.ranks import RankPool
from tests.support.thinning import the_first
from tests.support.training import Batch, Slices, make_data, make_model, plain_losses, shared, trainer_of

NUM_STEPS = 40
FEW_STEPS = 18  # all micro-batches once, and the first one again, in more than three epochs
MOST_APART = {torch.float64: 1e-13, torch.float32: 1e-6}
Parameters = list[nn.Parameter]


def sgd(parameters: Parameters) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Parameters) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def losses_of_rank(
    rank: int,
    folder: Path,
    make_optimizer: Callable[[Parameters], Optimizer],
    dtype: torch.dtype,
    data: Batch,
    global_batch: int,
    micro_batches: Sequence[int],
    weights: Sequence[float] | None = None,
    num_steps: int = FEW_STEPS,
    drop_last: bool = False,
    by_trainer: bool = False,
) -> list[float]:
    """The loss of every step's whole batch, this rank's part of it; the micro-batch is another one every few steps."""
    world_size = num_ranks()
    model = make_model(dtype)
    source = Slices(data, micro_batches[0], drop_last=drop_last)
    trainer = trainer_of(
        folder, shared(model, world_size), source, rank=rank, global_batch_size=global_batch, share_weights=weights
    )
    trained = trainer._model
    optimizer = trainer.prepare(make_optimizer(list(model.parameters())))
    losses: list[float] = []
    parts = 0.0
    with trainer:
        while trainer.global_step < num_steps:
            with trainer.epoch():
                for inputs, targets in source:
                    with trainer.step():
                        loss = nn.functional.cross_entropy(trained(inputs), targets)
                        parts += loss.item() * len(inputs)
                        trainer.backward(loss) if by_trainer else loss.backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    if trainer.sync_gradients:
                        losses.append(parts)
                        parts = 0.0
                        change_micro_batch(trainer, micro_batches)
                    if trainer.global_step == num_steps:
                        break
    assert len(losses) == num_steps
    return losses


def change_micro_batch(trainer: Any, micro_batches: Sequence[int]) -> None:
    """Ask for the next one of the micro-batches, every third step."""
    if trainer.global_step % 3 == 0:
        wanted = micro_batches[trainer.global_step // 3 % len(micro_batches)]
        if wanted != trainer.config.dataloader.batch_size:
            trainer.propose({"dataloader.batch_size": wanted}, "to see what changes")


def batches_of(data: Batch, global_batch: int, world_size: int, num_steps: int, drop_last: bool = False) -> list[Batch]:
    """The whole batches of so many steps, epoch after epoch; a tail with fewer samples than ranks joins the last."""
    found: list[Batch] = []
    while len(found) < num_steps:
        start, length = 0, len(data[0])
        while start < length:
            size = global_batch
            if length - start - size < world_size:
                size = length - start
            if drop_last and start + global_batch > length:
                break
            size = global_batch if drop_last else min(size, length - start)
            found.append((data[0][start : start + size], data[1][start : start + size]))
            start += size
    return found[:num_steps]


def farthest(ours: Sequence[Sequence[float]], plain: Sequence[float], batches: Sequence[Batch]) -> float:
    """The largest relative deviation of the ranks' losses, put together, from a plain process's."""
    together = [sum(parts) / len(batch[0]) for parts, batch in zip(zip(*ours, strict=True), batches, strict=True)]
    return float(max(abs(a - b) / abs(b) for a, b in zip(together, plain, strict=True)))


@pytest.mark.parametrize(
    ("make_optimizer", "dtype", "num_steps"),
    the_first(
        [
            (adamw, torch.float64, FEW_STEPS),
            (adamw, torch.float64, NUM_STEPS),
            (sgd, torch.float64, NUM_STEPS),
            (adamw, torch.float32, NUM_STEPS),
            (sgd, torch.float32, NUM_STEPS),
        ]
    ),
)
@pytest.mark.parametrize(
    ("world_size", "global_batch", "micro_batches"),
    [
        (1, 24, (24,)),
        (1, 24, (8, 3, 24, 5, 1)),
        (2, 24, (12, 4, 5, 1)),
        (2, 25, (4, 7, 13)),
        (3, 25, (2, 9, 4)),
        (4, 26, (3, 1, 7)),
        (4, 5, (1, 2)),
    ],
)
def test_losses_are_those_of_one_plain_process_whatever_the_ranks_and_micro_batches(
    ranks: RankPool,
    tmp_path: Path,
    make_optimizer: Callable[[Parameters], Optimizer],
    dtype: torch.dtype,
    num_steps: int,
    world_size: int,
    global_batch: int,
    micro_batches: tuple[int, ...],
) -> None:
    data = make_data(global_batch * 4 + global_batch // 2, dtype)  # with a tail in every epoch
    batches = batches_of(data, global_batch, world_size, num_steps)
    plain, _ = plain_losses(make_optimizer, batches, dtype)
    arguments = (tmp_path, make_optimizer, dtype, data, global_batch, micro_batches, None, num_steps)
    if world_size == 1:
        ours = [losses_of_rank(0, *arguments)]
    else:
        ours = ranks.run(world_size, losses_of_rank, *arguments, process_group=True)
    assert farthest(ours, plain, batches) <= MOST_APART[dtype]


@pytest.mark.parametrize(
    ("num_extra", "drop_last"),
    the_first(
        [(1, False), (2, False), (3, False), (7, True), (0, False), (7, False), *((n, True) for n in range(4))], 4
    ),
)
def test_every_tail_of_an_epoch_counts_as_what_it_holds(
    ranks: RankPool, tmp_path: Path, num_extra: int, drop_last: bool
) -> None:
    data = make_data(24 + num_extra)
    batches = batches_of(data, 8, 3, 12, drop_last)
    plain, _ = plain_losses(sgd, batches)
    ours = ranks.run(
        3, losses_of_rank, tmp_path, sgd, torch.float64, data, 8, (2,), None, 12, drop_last, process_group=True
    )
    assert farthest(ours, plain, batches) <= 1e-13


@pytest.mark.parametrize(
    ("make_optimizer", "dtype", "weights", "by_trainer", "num_steps"),
    the_first(
        [
            (adamw, torch.float64, (1.0, 2.5, 1.5), True, FEW_STEPS),
            (sgd, torch.float64, (1.0, 2.0, 4.0, 1.5), False, FEW_STEPS),
            (adamw, torch.float32, (3.0, 1.0), False, FEW_STEPS),
            (adamw, torch.float64, (1.0, 2.5, 1.5), False, NUM_STEPS),
            (adamw, torch.float64, (1.0, 2.5, 1.5), True, NUM_STEPS),
            (sgd, torch.float64, (3.0, 1.0), True, NUM_STEPS),
            (sgd, torch.float64, (1.0, 2.0, 4.0, 1.5), False, NUM_STEPS),
            (sgd, torch.float32, (1.0, 2.5, 1.5), False, NUM_STEPS),
            (adamw, torch.float32, (3.0, 1.0), False, NUM_STEPS),
            (adamw, torch.float32, (1.0, 2.0, 4.0, 1.5), True, NUM_STEPS),
        ],
        3,
    ),
)
def test_unequal_shares_change_no_loss(
    ranks: RankPool,
    tmp_path: Path,
    make_optimizer: Callable[[Parameters], Optimizer],
    dtype: torch.dtype,
    weights: tuple[float, ...],
    by_trainer: bool,
    num_steps: int,
) -> None:
    world_size = len(weights)
    data = make_data(110, dtype)  # with a tail in every epoch
    batches = batches_of(data, 25, world_size, num_steps)
    plain, _ = plain_losses(make_optimizer, batches, dtype)
    arguments = (tmp_path, make_optimizer, dtype, data, 25, (6, 13, 2), weights, num_steps, False, by_trainer)
    ours = ranks.run(world_size, losses_of_rank, *arguments, process_group=True)
    assert farthest(ours, plain, batches) <= MOST_APART[dtype]


def plain_loader_losses(
    rank: int, folder: Path, data: Batch, global_batch: int | None, batch_size: int
) -> list[list[float]]:
    """The losses of micro-steps, as lists per boundary, of two epochs of a plain DataLoader."""
    world_size = num_ranks()
    model = make_model()
    dataset = TensorDataset(*data)
    sampler: Any = DistributedSampler(dataset, world_size, rank, shuffle=False) if world_size > 1 else None
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    trainer = trainer_of(folder, shared(model, world_size), loader, rank=rank, global_batch_size=global_batch)
    trained = trainer._model
    optimizer = trainer.prepare(sgd(list(model.parameters())))
    steps: list[list[float]] = [[]]
    with trainer:
        for epoch in range(2):
            with trainer.epoch(epoch):
                for inputs, targets in loader:
                    with trainer.step():
                        loss = nn.functional.cross_entropy(trained(inputs), targets)
                        steps[-1].append(loss.item() * len(inputs))
                        loss.backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    if trainer.sync_gradients:
                        steps.append([])
    return steps[:-1]


@pytest.mark.parametrize("num_samples", [24, 26, 28, 29, 36])
def test_a_plain_dataloaders_last_step_counts_as_what_it_holds(tmp_path: Path, num_samples: int) -> None:
    data = make_data(num_samples)
    batches = [
        (data[0][start : start + 12], data[1][start : start + 12])
        for _ in range(2)
        for start in range(0, num_samples, 12)
    ]
    plain, _ = plain_losses(sgd, batches)
    ours = plain_loader_losses(0, tmp_path, data, 12, 4)
    assert farthest([[sum(step) for step in ours]], plain, batches) <= 1e-13


def test_a_plain_dataloader_with_a_distributed_sampler_keeps_the_batch(ranks: RankPool, tmp_path: Path) -> None:
    data = make_data(40)
    everyone = ranks.run(2, plain_loader_losses, tmp_path, data, 16, 4, process_group=True)
    order = [torch.arange(rank, 40, 2) for rank in range(2)]
    whole = [torch.cat([order[0][start : start + 8], order[1][start : start + 8]]) for start in (0, 8, 16)]
    batches = [(data[0][indices], data[1][indices]) for _ in range(2) for indices in whole]
    plain, _ = plain_losses(sgd, batches)
    assert farthest([[sum(step) for step in steps] for steps in everyone], plain, batches) <= 1e-13


def test_without_a_global_batch_every_micro_step_commits_as_in_a_plain_loop(tmp_path: Path) -> None:
    data = make_data(26)
    batches = [(data[0][start : start + 4], data[1][start : start + 4]) for _ in range(2) for start in range(0, 26, 4)]
    plain, _ = plain_losses(sgd, batches)
    ours = plain_loader_losses(0, tmp_path, data, None, 4)
    assert [step[0] / len(batch[0]) for step, batch in zip(ours, batches, strict=True)] == plain


def test_a_micro_batch_larger_than_a_ranks_share_is_told_with_what_a_rank_takes_at_once(tmp_path: Path) -> None:
    model, source = make_model(), Slices(make_data(64), 2, is_endless=True)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(sgd(list(model.parameters())))
    with trainer:
        asked = [16, 4, 6]
        for inputs, targets in source:
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if trainer.sync_gradients and trainer.global_step % 4 == 0:
                if not asked:
                    break
                trainer.propose({"dataloader.batch_size": asked.pop(0)}, "")
    events = [json.loads(line) for line in (tmp_path / "0" / "events-0.jsonl").read_text().splitlines()]
    texts = [event["text"].partition(": ")[2] for event in events if event["kind"] == "config-applied"]
    assert texts == [
        "dataloader.batch_size 2 -> 16 (8 at once: a rank's share of a step is 8)",
        "dataloader.batch_size 16 -> 4",
        "dataloader.batch_size 4 -> 6 (4 at once: a rank's share of a step is 8)",
    ]
