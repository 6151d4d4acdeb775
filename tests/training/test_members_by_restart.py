"""Why members of a job can change by a restart alone: a sentence in each worker's record, known at ``prepare()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from elastic_ext import ElasticDataLoader, ParallelPlan
from elastic_ext.records.member import MemberRecord, member_file
from tests.support.living import Job, place_in
from tests.support.ranks import RankPool
from tests.support.training import trainer_of


def samples() -> TensorDataset:
    return TensorDataset(torch.zeros(16, 6))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(16, 6))


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Pairs(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number, number + 1] for number in range(0, 16, 2))


def fine(model: nn.Module) -> Any:
    return ElasticDataLoader(samples(), batch_size=4)


def as_torchs(model: nn.Module) -> Any:
    return DataLoader(samples(), batch_size=4)


def none_at_all(model: nn.Module) -> Any:
    return None


def of_a_stream(model: nn.Module) -> Any:
    return ElasticDataLoader(Stream(), batch_size=4)


def of_own_batches(model: nn.Module) -> Any:
    data = samples()
    return ElasticDataLoader(data, batch_sampler=Pairs(SequentialSampler(data), 2, False))


def of_own_order(model: nn.Module) -> Any:
    data = samples()
    return ElasticDataLoader(data, batch_size=4, sampler=Backwards(data))


def with_own_group(model: nn.Module) -> Any:
    dist.new_group()
    return fine(model)


def why(
    rank: int,
    job: Job,
    make_loader: Callable[[nn.Module], Any],
    options: dict[str, Any],
    kind: str,
) -> str:
    """What a worker says of itself."""
    with place_in(job, 0):
        model: nn.Module = nn.Linear(6, 6)
        loader = make_loader(model)
        if kind.startswith("ddp"):
            model = DistributedDataParallel(model, static_graph=kind == "ddp, static")
            if kind == "ddp, hook":
                model.register_comm_hook(None, _hook)
        elif kind == "FSDP1":
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        elif kind == "TP":
            parallelize_module(model, init_device_mesh("cpu", (1,)), ColwiseParallel())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "accelerate":
            accelerator = Accelerator(cpu=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            options = {"accelerator": accelerator}
        trainer = trainer_of(job.folder, model, loader, **options)
        if kind == "spread":
            trainer.parallelize(model, ParallelPlan(strategy="no_shard"))
        if "on_members" in kind:
            trainer.parallelize(model, ParallelPlan(strategy="no_shard"))
            trainer.on_members(print)
        trainer.prepare(optimizer)
        trainer.close()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return MemberRecord.from_json(member_file(job.run_dir(0), 0).read_text()).why_restart


def _hook(state: object, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError("no step is taken here")


@pytest.mark.parametrize(
    ("make_loader", "options", "kind", "words"),
    [
        (fine, {}, "spread", ""),
        (fine, {}, "ddp", ""),
        (fine, {}, "plain", "the model is not spread"),
        (as_torchs, {}, "spread", "a DataLoader: only an ElasticDataLoader can be told how many ranks there are"),
        (none_at_all, {"micro_batch_size": 4}, "spread", "no dataloader was given to the trainer: only an Elastic"),
        (of_a_stream, {}, "spread", "an IterableDataset is read by each rank from a position of its own"),
        (of_own_batches, {}, "spread", "a batch sampler of the script's own says which batches each rank has"),
        (of_own_order, {}, "spread", "a sampler of the script's own draws the order of samples"),
        (fine, {"share_weights": (1.0,)}, "spread", "share_weights has a weight for each of so many ranks"),
        (fine, {}, "ddp, static", "static_graph=True, which was recorded for this number of ranks"),
        (fine, {}, "ddp, hook", "a communication hook"),
        (with_own_group, {}, "spread", "the script has made 1 process group of its own, which would end"),
        (with_own_group, {}, "on_members", ""),
        (fine, {}, "FSDP1", "FSDP1 shards a model when it is wrapped, and not again"),
        (fine, {}, "TP", "parameters of the model are split over the ranks by tensor parallelism"),
        (as_torchs, {}, "accelerate", "accelerate has prepared the model, and keeps a world of its own"),
    ],
)
def test_why_members_change_by_a_restart_alone_is_known_at_prepare(
    ranks: RankPool,
    tmp_path: Path,
    port: int,
    make_loader: Callable[[nn.Module], Any],
    options: dict[str, Any],
    kind: str,
    words: str,
) -> None:
    job = Job(folder=tmp_path, port=port, first=(0,), last_step=0)
    (found,) = ranks.run(1, why, job, make_loader, options, kind, process_group=False)
    assert (words in found) if words else found == "", found


def unwatched(rank: int, folder: Path) -> bool:
    """Whether a worker that no agent has started writes nothing, and watches nothing."""
    model = nn.Linear(6, 6)
    trainer = trainer_of(folder, model, fine(model))
    trainer.parallelize(model, ParallelPlan(strategy="no_shard"))
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.close()
    return not list(folder.rglob("member-*"))


def test_without_an_agent_nothing_is_written(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, unwatched, tmp_path) == [True]
