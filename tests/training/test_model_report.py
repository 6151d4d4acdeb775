"""What a rank reports of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_ext import ElasticTrainer, FollowOptions
from elastic_ext.records.metrics import ModelProfile
from elastic_ext.training.facts import profile_of
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, WHOLE
from tests.support.retraining import Retraining


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 2, dtype=torch.bfloat16)
        self.last.weight.requires_grad_(False)


def test_parameters_types_blocks_and_what_lies_on_this_rank_are_told() -> None:
    model = Model()
    optimizer = torch.optim.Adam(part for part in model.parameters() if part.dtype == torch.float32)
    for part in model.parameters():
        part.grad = torch.zeros_like(part)
    optimizer.step()
    found = profile_of(model, [optimizer], rank=2, sharing="DDP", plan=None)
    assert (found.name, found.rank, found.sharing, found.optimizers) == ("Model", 2, "DDP", "Adam")
    assert found.num_parameters == 3 * (20 + 8) + 10 and found.num_trainable == found.num_parameters - 8
    assert found.by_dtype == "float32 84, bfloat16 10" and found.blocks == "3 x Block"
    assert found.parameter_bytes == 84 * 4 + 10 * 2
    assert found.buffer_bytes == 3 * (2 * 4 * 4 + 8)
    assert found.optimizer_bytes == 84 * 4 * 2 + 12 * 4  # with a count of steps for each
    assert ModelProfile.from_json(found.to_json()) == found


def test_parameters_without_a_size_yet_are_left_out() -> None:
    found = profile_of(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), [], rank=0, sharing="", plan=None)
    assert found.num_parameters == 4


def train(rank: int, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    trainer = ElasticTrainer(
        model,
        micro_batch_size=2,
        global_batch_size=4,
        use_fsdp=True,
        follow_options=FollowOptions(run_dir=folder / str(rank)),
    )
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer:
        pass


def test_a_trainer_reports_the_whole_model_and_its_own_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path)
    for rank in (0, 1):
        found = ModelProfile.from_json((tmp_path / str(rank) / f"model-{rank}.json").read_text())
        assert (found.num_parameters, found.parameter_bytes) == (144, 144 * 4 // 2)
        assert found.rank == rank and "fully_shard" in found.sharing


def reshard(rank: int, folder: Path) -> None:
    told: list[ModelProfile] = []

    def look(run: Retraining) -> None:
        told.append(ModelProfile.from_json((run.folder / str(rank) / f"model-{rank}.json").read_text()))

    run = Retraining(rank, folder, WHOLE)
    with run.trainer:
        run.train(9, {0: look, 1: FULL, 4: look, 5: WHOLE, 8: look})
    first, sharded, last = told
    assert [(each.sharing, each.plan) for each in told] == [
        ("DDP", str(WHOLE)),
        ("fully_shard", str(FULL)),
        ("DDP", str(WHOLE)),
    ]
    assert sharded.parameter_bytes < first.parameter_bytes == last.parameter_bytes
    assert sharded.optimizer_bytes < first.optimizer_bytes == last.optimizer_bytes


def test_a_model_that_was_resharded_is_reported_as_it_lies_now(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, reshard, tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("[]", "not a JSON object"), ('{"time": 1.0}', "missing"), ('{"time": "now"}', "allowed: float")],
)
def test_what_is_no_report_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ModelProfile.from_json(text)
