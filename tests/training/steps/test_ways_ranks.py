"""Ways to train on two ranks, in DDP and sharded: the bits of training by hand, where a step ends with sharing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.faults import PlantedFault
from tests.support.ranks import RankPool
from tests.support.training import Slices, bits_of, make_data, trainer_of
from tests.support.ways import (
    Block,
    Checkpointed,
    Frozen,
    Gan,
    InBfloat16,
    InsAndOuts,
    Loop,
    Moody,
    Net,
    OwnLoss,
    Setting,
    Tied,
    TrainersLoop,
    Way,
    name_of,
)

NUM_SAMPLES = 64  # then they come again
NUM_GRAPHS = [0]  # compiled in this process for the way that is trained
Changes = dict[int, dict[str, object]]


def counted(graph: Any, inputs: Any) -> Any:
    """A compiler that only counts."""
    NUM_GRAPHS[0] += 1
    return graph.forward


class InDdp(Way):
    """A model in DDP."""

    options: ClassVar[dict[str, Any]] = {}

    def compiled(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, **self.options)


class DdpOfCompiled(InDdp):
    def compiled(self, model: nn.Module) -> nn.Module:
        return super().compiled(cast("nn.Module", torch.compile(model, backend=counted)))


class CompiledDdp(InDdp):
    def compiled(self, model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(super().compiled(model), backend=counted))


class CompiledDdpOfBlocks(InDdp):
    def make_model(self) -> nn.Module:
        blocks = [cast("nn.Module", torch.compile(Block(), backend=counted)) for _ in range(2)]
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


class InBfloat16InDdp(InDdp, InBfloat16):
    def compiled(self, model: nn.Module) -> nn.Module:
        return super().compiled(model.float())


class GanInDdp(Gan):
    """Both models in DDP; what the judge learned from is not what the maker learns from."""

    def compiled(self, model: nn.Module) -> nn.Module:
        return nn.ModuleDict({name: DistributedDataParallel(part) for name, part in cast(Any, model).items()})


class InShards(Way):
    """A model that fully_shard has sharded as one."""

    def compiled(self, model: nn.Module) -> nn.Module:
        fully_shard(model)
        return model


class TiedInShards(InShards, Tied): ...


class FrozenInShards(InShards, Frozen): ...


class InsAndOutsInShards(InShards, InsAndOuts): ...


class OwnLossInShards(InShards, OwnLoss): ...


class MoodyInShards(InShards, Moody): ...


class InBfloat16InShards(InShards, InBfloat16):
    def compiled(self, model: nn.Module) -> nn.Module:
        return super().compiled(model.float())


class CheckpointedInShards(Checkpointed):
    def compiled(self, model: nn.Module) -> nn.Module:
        model = super().compiled(model)
        fully_shard(model)
        return model


class CompiledBlocksInShards(InShards):
    """Each block compiled and sharded by itself, then the whole."""

    def make_model(self) -> nn.Module:
        blocks = [Block() for _ in range(2)]
        for block in blocks:
            block.compile(backend=counted)
            fully_shard(block)
        return nn.Sequential(*blocks, nn.Linear(6, 5))


class GanInShards(Gan):
    def compiled(self, model: nn.Module) -> nn.Module:
        for part in model.children():
            fully_shard(part)
        return model


class SharingLoop(Loop):
    """By hand: all passes but a step's last keep gradients to their rank; those that record a static graph do not."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.replicas = [part for part in way.model.modules() if isinstance(part, DistributedDataParallel)]
        self.shards = [part for part in way.model.modules() if isinstance(part, FSDPModule)]

    def begin(self, step: int, index: int) -> None:
        self.is_last = index + 1 == self.num_parts
        for replica in self.replicas:
            replica.require_backward_grad_sync = self.is_last or (replica.static_graph and step == 0)
        for shard in self.shards:
            shard.set_requires_gradient_sync(self.is_last)


@dataclass
class Trained:
    """What one rank's training came to."""

    losses: list[float]
    bits: list[Any]
    num_graphs: int


def by_hand_on_a_rank(rank: int, kind: type[Way], steps: list[Setting]) -> Trained:
    way = made(kind, rank)
    data, start, loop = make_data(NUM_SAMPLES), 0, SharingLoop(way)
    for number, setting in enumerate(steps):
        for optimizer, rate in zip(way.optimizers, setting.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        loop.num_parts = setting.global_batch // 2 // setting.micro_batch
        for index in range(loop.num_parts):
            loop.begin(number, index)
            mine = start + rank * setting.micro_batch
            part = torch.arange(mine, mine + setting.micro_batch) % NUM_SAMPLES
            way.work(data[0][part], data[1][part], loop)
            start += 2 * setting.micro_batch
    return Trained(way.losses, way.bits, NUM_GRAPHS[0])


def on_a_rank(
    rank: int, folder: Path, kind: type[Way], changes: Changes, fails: bool, num_steps: int
) -> tuple[Trained, list[Setting]]:
    """With a trainer; also what each step was trained with. Both ranks fail in the middle of two steps, if they do."""
    way = made(kind, rank)
    source = Slices(make_data(NUM_SAMPLES), 2, is_endless=True)
    trainer = trainer_of(folder, way.model, source, rank=rank, global_batch_size=16, rollback="full")
    loop = TrainersLoop(way, trainer)
    due = [5, 11] if fails else []  # micro-steps
    taken: list[Setting] = []
    kept = 0
    with trainer, trainer.epoch():
        for index, (inputs, targets) in enumerate(source):
            setting = Setting(
                global_batch=trainer.global_batch_size,
                micro_batch=trainer.config.dataloader.batch_size,
                rates=tuple(optimizer.effective_rates[0] for optimizer in loop.optimizers),
            )
            try:
                with trainer.step():
                    if index in due:
                        way.called(inputs) if kind in CALLED_WITH_INPUTS else way.loss(inputs, targets)
                        raise PlantedFault("in the middle")
                    way.work(inputs, targets, loop)
            except PlantedFault:
                del way.losses[kept:]
                continue
            if trainer.sync_gradients:
                kept = len(way.losses)
                taken.append(setting)
                if trainer.global_step in changes:
                    trainer.propose(changes[trainer.global_step], "to see what changes")
            if trainer.global_step == num_steps:
                break
    return Trained(way.losses, way.bits, NUM_GRAPHS[0]), taken


def with_a_trainer_and_by_hand(
    rank: int, folder: Path, kind: type[Way], changes: Changes, fails: bool, num_steps: int
) -> tuple[Trained, list[Setting], Trained]:
    ours, steps = on_a_rank(rank, folder, kind, changes, fails, num_steps)
    return ours, steps, by_hand_on_a_rank(rank, kind, steps)


def made(kind: type[Way], rank: int) -> Way:
    torch.compiler.reset()
    NUM_GRAPHS[0] = 0
    way = kind()
    torch.manual_seed(rank)
    return way


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
    InBfloat16InDdp,
    GanInDdp,
    InShards,
    TiedInShards,
    FrozenInShards,
    InsAndOutsInShards,
    OwnLossInShards,
    MoodyInShards,
    InBfloat16InShards,
    CheckpointedInShards,
    CompiledBlocksInShards,
    GanInShards,
]

CHANGING = [CompiledDdp, OwnLossInDdp, GanInDdp, FrozenInShards, GanInShards, InBfloat16InDdp]
FAILING = [TiedInDdp, MoodyInDdp, StaticInDdp, MoodyInShards, InBfloat16InShards]
PLAIN: list[type[Way]] = [InDdp, InShards]  # which other kinds are too, with more to them
AS_THEY_ARE = [kind for kind in KINDS if kind not in CHANGING + FAILING + PLAIN]  # with which more is done
CALLED_WITH_INPUTS = [GanInDdp, GanInShards]


def each_of(quick: Sequence[type[Way]], how: str, *, num_steps: int) -> list[Any]:
    """Every kind for eight steps, and the ``quick`` ones for ``num_steps``; the others are left to the slow tests."""
    slow = [kind for kind in KINDS if num_steps < 8 or kind not in quick]
    return [
        *(pytest.param(kind, how, num_steps) for kind in quick),
        *(pytest.param(kind, how, 8, marks=pytest.mark.slow) for kind in slow),
    ]


@pytest.mark.parametrize(
    ("kind", "how", "num_steps"),
    [
        *each_of(AS_THEY_ARE, "as it is", num_steps=4),
        *each_of(CHANGING, "while it changes", num_steps=8),
        *each_of(FAILING, "where it fails", num_steps=4),
    ],
    ids=name_of,
)
def test_two_ranks_train_with_the_bits_of_the_same_training_by_hand(
    ranks: RankPool, tmp_path: Path, kind: type[Way], how: str, num_steps: int
) -> None:
    changes: Changes = {}
    if how == "while it changes":
        changes = {
            1: {"optimizer.learning_rate": 0.25},
            3: {"dataloader.batch_size": 4},
            5: {"global_batch_size": 32, "optimizer.learning_rate": 0.125},
        }
    fails = how == "where it fails"
    both = ranks.run(2, with_a_trainer_and_by_hand, tmp_path, kind, changes, fails, num_steps, process_group=True)
    (first, steps, _), (second, same_steps, _) = both
    assert steps == same_steps
    assert len({(step.global_batch, step.micro_batch) for step in steps}) == (3 if changes else 1)
    by_hand = [theirs for *_, theirs in both]
    if kind is GanInDdp:
        # What the maker learns goes through a judge that DDP prepares to share, and that has no gradients: by hand DDP
        # then shares those of the next step's first micro-batch alone, which changes the order in which they are added.
        for ours, theirs in zip([first, second], by_hand, strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-13)
        return
    assert [first, second] == by_hand
