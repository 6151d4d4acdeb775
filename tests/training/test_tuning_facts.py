"""job.json: what rank 0 says can be changed in its job, and what is in force; true of what the job then accepts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic_ext import ElasticDataLoader
from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.config.keys import TUNABLE, TuningSection
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.master.address import MOST_BEAT_BYTES
from elastic_ext.master.facts import checked_facts
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.records.agent import WORKERS_FILE, Since, WorkerSeen, WorkersRecord
from elastic_ext.records.metrics import FILE, JobFacts
from elastic_ext.tuner.space import space_of
from tests.support.loops import put
from tests.support.ranks import RankPool
from tests.support.training import trainer_of

WIDTH = 8
LOADER_KEYS = {"dataloader.batch_size", "dataloader.num_workers", "dataloader.prefetch_factor"}


def blocks(*more: nn.Module) -> nn.Module:
    repeated = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*repeated), *more, nn.Linear(WIDTH, 1))


def data(num_samples: int = 512) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, WIDTH))


class Run:
    """One rank's training, to be taken some steps further."""

    def __init__(
        self, folder: Path, model: nn.Module, loader: Any, *, rank: int = 0, wraps: bool = False, **given: Any
    ) -> None:
        self.folder = folder
        self.model, self.loader = model, loader
        self.trainer = trainer_of(folder, model, loader, rank=rank, **given)
        if wraps:
            self.trainer.parallelize(model, ParallelPlan("full_shard"))
        self.optimizer = self.trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    @property
    def file(self) -> Path:
        return self.folder / "0" / FILE

    @property
    def facts(self) -> JobFacts:
        return JobFacts.from_json(self.file.read_text())

    def train(self, num_steps: int, meanwhile: Any = None) -> None:
        with self.trainer.epoch():
            for (inputs,) in self.loader:
                with self.trainer.step():
                    self.model(inputs).pow(2).mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if meanwhile is not None:
                    meanwhile(self.trainer.global_step)
                if self.trainer.global_step >= num_steps:
                    break


def in_alone(folder: Path, model: nn.Module, loader: Any, **given: Any) -> JobFacts:
    """Those of a training of one rank, as it begins."""
    run = Run(folder, model, loader, **given)
    with run.trainer:
        found = run.facts
        run.train(2)
    assert {*found.choices} | {*found.fixed} == {*TUNABLE} and not {*found.choices} & {*found.fixed}
    assert json.loads(checked_facts(found.to_json()).to_json()) == json.loads(found.to_json()), (
        "a master takes it as it is"
    )
    return found


def test_of_a_loader_that_can_be_told_its_settings_and_sizes_can_be_chosen(tmp_path: Path) -> None:
    loader = ElasticDataLoader(data(), batch_size=2)
    found = in_alone(tmp_path, blocks(), loader, global_batch_size=16)
    assert {key for key in found.choices if key.startswith("dataloader")} == LOADER_KEYS
    assert "accelerator" in found.fixed["dataloader.pin_memory"]
    assert (found.global_batch, found.share, found.num_replicas, found.world_size) == (16, 16, 1, 1)
    assert found.values["dataloader.batch_size"] == 2 and found.values["dataloader.num_workers"] == 0
    assert found.values["global_batch_size"] == 16 and found.values["optimizer.learning_rate"] == 0.1
    assert "what the model learns depends on this value" in found.fixed["optimizer.learning_rate"]
    assert (found.num_blocks, found.bound, found.memory) == (3, None, None)
    assert found.num_parameters == sum(each.numel() for each in blocks().parameters())
    assert 1 <= found.num_processors <= (os.cpu_count() or 1)
    assert (found.device, found.restart, found.config_version) == ("cpu", 0, 0)


def test_of_another_loader_nothing_can(tmp_path: Path) -> None:
    found = in_alone(tmp_path, blocks(), DataLoader(data(), batch_size=4, num_workers=0), global_batch_size=16)
    assert not {key for key in found.choices if key.startswith("dataloader")}
    assert found.fixed["dataloader.num_workers"].endswith("; that of an ElasticDataLoader can")
    assert (found.values["dataloader.batch_size"], found.share) == (4, 16)
    assert not space_of(found, TuningSection()).choices["num_workers"][1:]


def test_a_model_that_normalises_over_micro_batches_keeps_their_size(tmp_path: Path) -> None:
    loader = ElasticDataLoader(data(), batch_size=4)
    found = in_alone(tmp_path, blocks(nn.BatchNorm1d(WIDTH)), loader, global_batch_size=16)
    assert "BatchNorm" in found.fixed["dataloader.batch_size"] and "dataloader.num_workers" in found.choices


class Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(WIDTH),)] * 64)


def test_workers_of_a_stream_do_not_change_within_a_loop_and_so_are_not_chosen(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    for number, given in enumerate(({}, kept)):
        folder = tmp_path / str(number)
        folder.mkdir()
        loader = ElasticDataLoader(Stream(), batch_size=2, **given)
        found = in_alone(folder, blocks(), loader, global_batch_size=4)
        assert "from one loop to the next" in found.fixed["dataloader.num_workers"]


def test_workers_that_are_kept_are_never_none(tmp_path: Path) -> None:
    loader = ElasticDataLoader(data(), batch_size=2, num_workers=1, persistent_workers=True)
    found = in_alone(tmp_path, blocks(), loader, global_batch_size=4)
    assert 0 not in found.choices["dataloader.num_workers"] and 1 in found.choices["dataloader.num_workers"]


def test_where_every_micro_step_commits_a_step_is_a_micro_batch_of_each_rank(tmp_path: Path) -> None:
    found = in_alone(tmp_path, blocks(), DataLoader(data(), batch_size=4))
    assert (found.global_batch, found.share) == (4, 4)


def test_where_it_is_not_known_how_many_samples_a_step_has_nothing_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, blocks(), None)
    with run.trainer:
        assert not run.file.exists()


def test_facts_are_written_again_where_anything_in_them_has_changed_and_only_there(tmp_path: Path) -> None:
    run = Run(tmp_path, blocks(), ElasticDataLoader(data(), batch_size=2), global_batch_size=16)
    with run.trainer:
        run.train(3)
        first = run.file.stat().st_ino
        follower = run.trainer._session.follower
        follower.write_metrics()
        assert run.file.stat().st_ino == first, "a file that is written whole is another one each time"
        put(tmp_path, 0, {"version": 4, "dataloader": {"batch_size": 8, "num_workers": 1}}, seen_by=follower)
        run.train(8)
        found = run.facts
    assert run.file.stat().st_ino != first
    assert found.config_version == 4
    assert (found.values["dataloader.batch_size"], found.values["dataloader.num_workers"]) == (8, 1)


def test_a_version_that_is_refused_is_an_event_with_the_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, blocks(), DataLoader(data(), batch_size=4), global_batch_size=16)
    with run.trainer:
        put(tmp_path, 0, {"version": 1, "dataloader": {"num_workers": 2}}, seen_by=run.trainer._session.follower)
        run.train(4)
    events = [json.loads(line) for line in (tmp_path / "0" / "events-0.jsonl").read_text().splitlines()]
    (event,) = [each for each in events if each["kind"] == "config-refused"]
    assert event["details"]["version"] == 1
    assert "num_workers of this dataloader cannot change" in event["details"]["why"]
    assert event["text"] == f"version 1 was refused: {event['details']['why']}"


# ---- several ranks ----


def told_of(rank: int, folder: Path, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = blocks()
    loader = ElasticDataLoader(data(), batch_size=2)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    run = Run(folder, wrapped, loader, rank=rank, wraps=kind == "full_shard", global_batch_size=16)
    with run.trainer:
        run.train(2)
        if rank == 0:
            return json.loads(run.file.read_text())  # type: ignore[no-any-return]
        assert not (folder / "1" / FILE).exists()
    return {}


def test_of_a_model_in_ddp_the_strategies_that_it_can_be_changed_to_are_told(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, told_of, tmp_path, "ddp")[0]
    assert found["choices"]["parallelism.strategy"] == ["no_shard", "shard_grad_op", "full_shard"]
    assert found["choices"]["communication.bucket_cap_mb"] == []
    assert found["choices"]["parallelism.activation_checkpoint"] == []
    assert "parallelism.shard_degree" in found["fixed"], "two ranks have no groups within them"
    assert found["values"]["parallelism.strategy"] == "no_shard"
    assert (found["num_replicas"], found["share"], found["num_local"]) == (2, 8, 2)


def test_of_a_model_that_is_sharded_its_units_are_told(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, told_of, tmp_path, "full_shard")[0]
    assert "no_shard" in found["choices"]["parallelism.strategy"]
    assert found["choices"]["parallelism.unit"] == [1, 2]
    assert found["values"]["parallelism.strategy"] == "full_shard"


# ---- by its agent ----


def seen(folder: Path, *ranks: int, restart: int = 0) -> None:
    """What an agent sees of its workers, these ranks."""
    workers = tuple(WorkerSeen(local_rank=each, rank=each, pid=1, start_ticks=1, state="running") for each in ranks)
    record = WorkersRecord(time=time.time(), restart=restart, membership_version=1, workers=workers)
    (folder / WORKERS_FILE).write_text(record.to_json())


def filled(report: NodeReporter) -> str:
    request = wire.BeatRequest()
    report.fill(request, MOST_BEAT_BYTES)
    return request.facts


def test_an_agent_tells_of_facts_once_and_again_where_they_have_changed_or_the_master_has(tmp_path: Path) -> None:
    run = Run(tmp_path, blocks(), ElasticDataLoader(data(), batch_size=2), global_batch_size=16)
    with run.trainer:
        run.train(2)
    text = run.file.read_text().strip()
    report = NodeReporter(tmp_path / "0", since=Since(0.0))
    seen(tmp_path / "0", 1)
    assert filled(report) == "", "which are of another node, where rank 0 is not here"
    seen(tmp_path / "0", 0, 1)
    assert filled(report) == text == filled(report), "until the master has it"
    report.confirm()
    assert filled(report) == ""
    run.file.write_text(text.replace('"restart":0', '"restart":1'))
    assert filled(report) == "", "as long as these processes have not written any"
    seen(tmp_path / "0", 0, 1, restart=1)
    assert json.loads(filled(report))["restart"] == 1
    report.confirm()
    report.forget()
    assert filled(report) != "", "to a master that may know nothing"
    earlier = NodeReporter(tmp_path / "0", since=Since(time.time() + 60))
    assert filled(earlier) == "", "what is there from an earlier start is told to nobody"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": 1}', "x" * (300 << 10)])
def test_a_file_that_is_damaged_is_told_to_nobody(tmp_path: Path, text: str) -> None:
    seen(tmp_path, 0)
    (tmp_path / FILE).write_text(text)
    assert filled(NodeReporter(tmp_path, since=Since(0.0))) == ""
