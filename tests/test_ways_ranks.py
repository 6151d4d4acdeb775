"""Ways to train on two ranks in DDP: the bits of training by hand, where gradients are shared as a step ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults import PlantedFault
from tests.ranks import RankPool
from tests.training import Slices, bits_of, make_data, trainer_of
from tests.ways import Block, Frozen, Gan, InsAndOuts, Loop, Moody, Net, OwnLoss, Tied, TrainersLoop, Way, name_of

GLOBAL_BATCH, MICRO_BATCH, NUM_STEPS = 16, 2, 4
DATA = 5 * GLOBAL_BATCH


class InDdp(Way):
    """A model in DDP."""

    options: ClassVar[dict[str, Any]] = {}

    def compiled(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, **self.options)


class DdpOfCompiled(InDdp):
    def compiled(self, model: nn.Module) -> nn.Module:
        return super().compiled(cast("nn.Module", torch.compile(model, backend="eager")))


class CompiledDdp(InDdp):
    def compiled(self, model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(super().compiled(model), backend="eager"))


class CompiledDdpOfBlocks(InDdp):
    def make_model(self) -> nn.Module:
        blocks = [cast("nn.Module", torch.compile(Block(), backend="eager")) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(6, 5))


class TiedInDdp(InDdp, Tied): ...


class FrozenInDdp(InDdp, Frozen): ...


class InsAndOutsInDdp(InDdp, InsAndOuts):
    """One output is not used, and its parameters are."""


class OwnLossInDdp(InDdp, OwnLoss): ...


class StaticInDdp(InDdp):
    """DDP told that its graph stays: it shares in its first passes, whatever the loop wants."""

    options: ClassVar[dict[str, Any]] = {"static_graph": True}


class UnusedInDdp(InDdp):
    """Parameters that no loss depends on."""

    options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def make_model(self) -> nn.Module:
        model = Net()
        model.spare = nn.Linear(2, 2)
        return model

    @property
    def bits(self) -> list[Any]:
        """The parameters alone: by hand the spare ones never get the momentum that here they have from the start."""
        return bits_of(list(self.model.parameters()))


class MoodyInDdp(InDdp, Moody):
    """BatchNorm, whose buffers are the first rank's."""


class GanInDdp(Gan):
    """Both models in DDP; what the judge learned from is not what the maker learns from."""

    def compiled(self, model: nn.Module) -> nn.Module:
        return nn.ModuleDict({name: DistributedDataParallel(part) for name, part in cast(Any, model).items()})


class SharingLoop(Loop):
    """By hand: all passes but a step's last keep gradients to their rank; those that record a static graph do not."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.replicas = [part for part in way.model.modules() if isinstance(part, DistributedDataParallel)]

    def begin(self, index: int) -> None:
        self.is_last = (index + 1) % self.num_parts == 0
        for replica in self.replicas:
            is_recorded = replica.static_graph and index < self.num_parts
            replica.require_backward_grad_sync = self.is_last or is_recorded


def on_a_rank(
    rank: int, folder: Path, kind: type[Way], is_by_hand: bool, fails: bool = False
) -> tuple[list[float], list[Any]]:
    """The losses and the state of one rank."""
    torch.compiler.reset()
    way = kind()
    torch.manual_seed(rank)
    data, num_parts = make_data(DATA), GLOBAL_BATCH // 2 // MICRO_BATCH
    if is_by_hand:
        loop = SharingLoop(way)
        loop.num_parts = num_parts
        for start in range(0, NUM_STEPS * GLOBAL_BATCH, 2 * MICRO_BATCH):
            loop.begin(start // (2 * MICRO_BATCH))
            part = slice(start + rank * MICRO_BATCH, start + (rank + 1) * MICRO_BATCH)
            way.work(data[0][part], data[1][part], loop)
        return way.losses, way.bits
    source = Slices(data, MICRO_BATCH)
    trainer = trainer_of(folder, way.model, source, rank=rank, global_batch_size=GLOBAL_BATCH, rollback="full")
    ours = TrainersLoop(way, trainer)
    due = iter([5, 11] if fails else [])  # micro-steps, in the middle of a step
    next_due, index, kept = next(due, None), -1, 0
    with trainer, trainer.epoch():
        for inputs, targets in source:
            index += 1
            try:
                with trainer.step():
                    if index == next_due:
                        next_due = next(due, None)
                        way.loss(inputs, targets)
                        raise PlantedFault("in the middle")
                    way.work(inputs, targets, ours)
            except PlantedFault:
                del way.losses[kept:]
                continue
            if trainer.sync_gradients:
                kept = len(way.losses)
            if trainer.global_step == NUM_STEPS:
                break
    return way.losses, way.bits


KINDS = [
    InDdp,
    DdpOfCompiled,
    CompiledDdp,
    CompiledDdpOfBlocks,
    TiedInDdp,
    FrozenInDdp,
    InsAndOutsInDdp,
    OwnLossInDdp,
    StaticInDdp,
    UnusedInDdp,
    MoodyInDdp,
    GanInDdp,
]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_two_ranks_train_with_the_bits_of_the_same_training_by_hand(
    ranks: RankPool, tmp_path: Path, kind: type[Way]
) -> None:
    plain = ranks.run(2, on_a_rank, tmp_path, kind, True, process_group=True)
    ours = ranks.run(2, on_a_rank, tmp_path, kind, False, process_group=True)
    assert ours == plain


@pytest.mark.parametrize("kind", [CompiledDdp, DdpOfCompiled, TiedInDdp, MoodyInDdp], ids=name_of)
def test_two_ranks_train_with_the_same_bits_where_steps_failed_and_were_taken_again(
    ranks: RankPool, tmp_path: Path, kind: type[Way]
) -> None:
    plain = ranks.run(2, on_a_rank, tmp_path, kind, True, process_group=True)
    ours = ranks.run(2, on_a_rank, tmp_path, kind, False, True, process_group=True)
    assert ours == plain
