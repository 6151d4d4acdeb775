"""What a trainer's rank writes of where its time went: real loops with something planted in them.

Only what takes at least so long is asserted of clocks: a machine that is busy makes all longer.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median_high
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastic_ext import CheckpointInterval, ElasticDataLoader
from elastic_ext.profile.step_costs import Census, why_no_census
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepTrace, StepWindow
from tests.support.ranks import RankPool
from tests.support.training import make_data, make_model, trainer_of

PLANTED = 0.02


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch says of a process that other tests ran in."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    monkeypatch.setitem(counters["stats"], "unique_graphs", 0)


class Slow(nn.Module):
    """A model whose passes take a while."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, inputs: torch.Tensor) -> Any:
        time.sleep(self.forward_seconds)
        outputs = self.layer(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: time.sleep(self.backward_seconds))
        return outputs * 1.0


class SlowData(Dataset[Any]):
    def __init__(self, num_samples: int, seconds: float) -> None:
        self.inputs, self.targets = make_data(num_samples, torch.float32)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(PLANTED)
        return super().step(closure)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(model(inputs), targets)


def lines_of(folder: Path, rank: int = 0) -> list[StepWindow]:
    text = (folder / str(rank) / f"profile-{rank}.jsonl").read_text()
    return [StepWindow.from_json(line) for line in text.splitlines()]


def windows_of(folder: Path, rank: int = 0) -> list[StepWindow]:
    found = lines_of(folder, rank)
    for one, other in pairwise(found):
        assert one.end == other.begin, "no moment is between two windows"
    for each in found:
        assert sum(each.seconds.values()) == pytest.approx(each.length, abs=1e-5)
    return found


def total(windows: Sequence[StepWindow], phase: str) -> float:
    return sum(each.seconds.get(phase, 0.0) for each in windows)


def last_typical(windows: Sequence[StepWindow]) -> Mapping[str, float]:
    """Of a step in the middle of the last window that has any: a slow machine's last one may have none."""
    return next(each.typical for each in reversed(windows) if each.num_detailed)


def train(
    folder: Path, model: nn.Module, loader: Any, *, optimizer: Any = None, alone: bool = True, **arguments: Any
) -> list[StepWindow]:
    """One epoch, as a user writes it."""
    trainer = trainer_of(folder, model, loader, **arguments)
    with trainer:
        prepared = trainer.prepare(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            for inputs, targets in loader:
                with trainer.step():
                    loss_of(model, inputs, targets).backward()
                    prepared.step()
                    prepared.zero_grad()
    return windows_of(folder) if alone else []


def data_of(num_samples: int) -> TensorDataset:
    return TensorDataset(*make_data(num_samples, torch.float32))


def test_each_phase_is_found_where_it_was_planted(tmp_path: Path) -> None:
    model = Slow(forward=2 * PLANTED, backward=3 * PLANTED)
    loader = ElasticDataLoader(SlowData(20, PLANTED), batch_size=4)
    windows = train(tmp_path, model, loader, optimizer=SlowSGD(model.parameters(), lr=0.1), global_batch_size=4)
    assert sum(each.num_steps for each in windows) == 5 and windows[-1].step == 5
    assert total(windows, "data") >= 5 * 4 * PLANTED
    assert total(windows, "forward") >= 5 * 2 * PLANTED
    assert total(windows, "backward") >= 5 * 3 * PLANTED
    assert total(windows, "optimizer") >= 5 * PLANTED
    assert windows[0].num_steps == 0 and windows[0].seconds["startup"] > 0.1
    middle = last_typical(windows)
    assert middle["forward"] >= 2 * PLANTED and middle["backward"] >= 3 * PLANTED
    assert middle["data"] >= 4 * PLANTED and middle["optimizer"] >= PLANTED
    assert sum(each.processor_seconds.get("forward", 0.0) for each in windows) < total(windows, "forward") / 2
    assert sum(each.num_samples for each in windows) == 20
    assert sum(each.num_bytes for each in windows) == 20 * 6 * 4 and windows[-1].num_tokens == 0


def test_phases_add_up_to_the_time_that_training_took(tmp_path: Path) -> None:
    began = time.time()
    windows = train(tmp_path, Slow(PLANTED, PLANTED), ElasticDataLoader(data_of(40), batch_size=4))
    took = time.time() - began
    assert windows[-1].end <= time.time() + 1  # two clocks, which part by parts of a second within a long test run
    in_all = sum(sum(each.seconds.values()) for each in windows[1:])
    assert took * 1.01 >= in_all >= 10 * 2 * PLANTED
    assert windows[-1].end - windows[0].begin == pytest.approx(
        sum(sum(each.seconds.values()) for each in windows), rel=1e-6
    )


def test_of_another_loader_what_lies_between_two_steps_is_waiting_for_data(tmp_path: Path) -> None:
    windows = train(tmp_path, make_model(torch.float32), DataLoader(SlowData(20, PLANTED), batch_size=4))
    assert total(windows, "data") >= 20 * PLANTED


def test_what_lies_outside_of_epochs_is_no_part_of_steps(tmp_path: Path) -> None:
    model, loader = Slow(), ElasticDataLoader(data_of(12), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in range(2):
            with trainer.epoch(epoch):
                for inputs, targets in loader:
                    with trainer.step():
                        loss_of(model, inputs, targets).backward()
                        optimizer.step()
            model.forward_seconds = 5 * PLANTED
            model(inputs)
            model.forward_seconds = 0.0
            time.sleep(5 * PLANTED)
    assert total(windows_of(tmp_path), "outside") >= 20 * PLANTED, "a pass outside of steps is none of theirs"


def test_evaluation_within_a_step_is_not_taken_for_training(tmp_path: Path) -> None:
    model, loader = Slow(PLANTED), ElasticDataLoader(data_of(12), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in loader:
            with trainer.step():
                loss_of(model, inputs, targets).backward()
                optimizer.step()
                with torch.no_grad():
                    model(inputs)
                time.sleep(3 * PLANTED)
    windows = windows_of(tmp_path)
    assert total(windows, "other") >= 9 * PLANTED


def test_micro_steps_of_a_step_are_counted_together(tmp_path: Path) -> None:
    model = Slow(PLANTED, PLANTED)
    windows = train(tmp_path, model, ElasticDataLoader(data_of(24), batch_size=2), global_batch_size=8)
    assert sum(each.num_steps for each in windows) == 3
    middle = last_typical(windows)
    assert middle["forward"] >= 4 * PLANTED and middle["backward"] >= 4 * PLANTED


def test_a_step_that_is_taken_back_is_counted_as_that(tmp_path: Path) -> None:
    model, loader = Slow(PLANTED), ElasticDataLoader(data_of(12), batch_size=4)
    trainer, failures = trainer_of(tmp_path, model, loader, global_batch_size=4), 0
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in loader:
            try:
                with trainer.step():
                    loss = loss_of(model, inputs, targets)
                    if trainer.global_step == 1 and failures < 2:
                        failures += 1
                        raise FloatingPointError
                    loss.backward()
                    optimizer.step()
            except FloatingPointError:
                continue
    windows = windows_of(tmp_path)
    assert failures == 2 and sum(each.num_steps for each in windows) == 3
    assert total(windows, "rolled-back") >= 2 * PLANTED and total(windows, "forward") >= 3 * PLANTED


def test_memory_that_does_not_suffice_is_seen_as_work_that_was_taken_back(tmp_path: Path) -> None:
    model, loader = Slow(PLANTED), ElasticDataLoader(data_of(16), batch_size=8)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)

    def work(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = loss_of(model, inputs, targets)
        if len(inputs) > 4:
            raise torch.OutOfMemoryError("planted")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in loader:
            trainer.run(work, inputs, targets)
    windows = windows_of(tmp_path)
    assert total(windows, "rolled-back") >= PLANTED
    assert sum(each.num_steps for each in windows) == 2
    assert total(windows, "forward") >= 4 * PLANTED


def test_a_change_ends_a_window_and_the_next_is_of_the_new_config(tmp_path: Path) -> None:
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(40), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    with trainer:
        trainer.on_change("user", lambda old, new: time.sleep(3 * PLANTED))
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (inputs, targets) in enumerate(loader):
            with trainer.step():
                loss_of(model, inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            if number == 3:
                trainer.propose({"user.knob": 1}, "planted")
    windows = windows_of(tmp_path)
    revisions = [each.config_revision for each in windows if each.num_steps]
    assert sorted(set(revisions)) == [0, 1] and revisions == sorted(revisions)
    changed = [each for each in windows if each.seconds.get("change", 0.0) >= 3 * PLANTED]
    assert [each.config_revision for each in changed] == [0], "the time that it took is the old one's"


def test_waiting_for_checkpoints_is_seen(tmp_path: Path) -> None:
    windows = train(
        tmp_path,
        make_model(torch.float32),
        ElasticDataLoader(data_of(16), batch_size=4),
        global_batch_size=4,
        shared_storage_path=tmp_path / "kept",
        checkpoint_interval=CheckpointInterval(steps=1),
        save_in_background=False,
    )
    assert total(windows, "checkpoint") > 0


def test_with_the_switch_off_nothing_is_written_and_nothing_hangs_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PROFILE", "off")
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(16), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        prepared = trainer.prepare(optimizer)
        for inputs, targets in loader:
            with trainer.step():
                loss_of(model, inputs, targets).backward()
                hooks: list[Any] = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
                owners = {type(hook.func.__self__).__module__ for hook in hooks}
                assert owners <= {"elastic_ext.training.steps.loop_checks"} and loader.timeline is None
                prepared.step()
    assert not list((tmp_path / "0").glob("profile-*")) and not list((tmp_path / "0").glob("census-*"))


def test_what_was_hung_on_the_model_and_its_loader_is_gone_at_the_end(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ElasticDataLoader(data_of(16), batch_size=4)
    before = len(optimizer._optimizer_step_pre_hooks)
    windows = train(tmp_path, model, loader, optimizer=optimizer)
    assert total(windows, "data") > 0 and loader.timeline is None
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert len(optimizer._optimizer_step_post_hooks) == 0 and len(optimizer._optimizer_step_pre_hooks) <= before + 1


def test_a_second_training_of_a_process_begins_where_the_first_has_ended(tmp_path: Path) -> None:
    first = train(tmp_path, make_model(torch.float32), ElasticDataLoader(data_of(8), batch_size=4))
    train(tmp_path, make_model(torch.float32), ElasticDataLoader(data_of(8), batch_size=4), alone=False)
    both = lines_of(tmp_path)
    assert both[: len(first)] == first
    assert both[len(first)].begin >= first[-1].end - 1.0, (
        "but for how far two clocks have parted since the process began"
    )


# --- the census -------------------------------------------------------------------------------------------------------


def test_one_step_is_counted_and_the_machine_is_measured_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    train(tmp_path, model, ElasticDataLoader(data_of(8 * 30), batch_size=4), global_batch_size=8)
    census = StepCensus.from_json((tmp_path / "0" / "census-0.json").read_text())
    assert census.num_samples == 4
    inputs_to_layers = 2 * 4 * (6 * 16 + 16 * 5)
    assert census.num_flops == 2 * inputs_to_layers + 2 * 4 * 16 * 5, "two passes, and back to what needs a gradient"
    assert 0 < census.optimizer_ops < census.num_ops and 0 < census.optimizer_bytes < census.num_bytes
    best = NodeCalibration.from_json((tmp_path / "0" / "calibration.json").read_text())
    assert best.flops_per_second > 1e8 and best.bytes_per_second > 1e8 and 1e-8 < best.seconds_per_op < 1e-2


def test_a_step_that_is_counted_computes_what_it_would_have(tmp_path: Path) -> None:
    inputs, targets = make_data(16)
    found = []
    for counts in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            if counts:
                with Census(lambda: False):
                    loss_of(model, inputs, targets).backward()
                    optimizer.step()
            else:
                loss_of(model, inputs, targets).backward()
                optimizer.step()
            optimizer.zero_grad()
        found.append([part.detach().clone() for part in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Attending(nn.Module):
    """A model that has operators which take functions, and which torch may compile on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, inputs: torch.Tensor) -> Any:
        states = inputs[None, None]  # which need no gradient: it gives none on a CPU
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which say that it would be faster compiled
            attended: Any = flex_attention(states, states, states)
        return self.layer(attended[0, 0])


def test_operators_that_take_functions_go_on_in_a_step_that_is_counted() -> None:
    torch.manual_seed(0)
    model = Attending()
    plain = model(torch.ones(4, 6))
    with Census(lambda: False):
        counted = model(torch.ones(4, 6))
    assert torch.equal(plain, counted)


@pytest.mark.parametrize("is_new", [True, False], ids=["first called within it", "called before"])
def test_what_is_compiled_is_run_so_in_a_step_that_is_counted(is_new: bool) -> None:
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda values: values.sin() + 1, backend=backend, fullgraph=True)
    if not is_new:
        compiled(torch.ones(4))
    with Census(lambda: False):
        found = compiled(torch.ones(4))
    assert torch.equal(found, torch.ones(4).sin() + 1) and len(graphs) == 1


def test_a_model_with_such_operators_trains_through_the_step_that_is_counted(tmp_path: Path) -> None:
    model = Attending()
    windows = train(tmp_path, model, ElasticDataLoader(data_of(8 * 30), batch_size=4), global_batch_size=8)
    assert windows[-1].step == 30


def test_training_says_once_why_a_models_operations_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(make_model(torch.float32))
    model[0].compile(backend="eager")
    with caplog.at_level(logging.INFO, logger="elastic_ext.profile"):
        train(tmp_path, model, ElasticDataLoader(data_of(8 * 30), batch_size=4), global_batch_size=8)
    (said,) = [each for each in caplog.messages if "not counted" in each]
    assert said.startswith("the model's operations are not counted, so that its MFU is not known: it is compiled, and")


def test_compiled_and_scripted_models_are_not_counted() -> None:
    assert why_no_census(make_model()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # which says so of scripting
        scripted: Any = torch.jit.script(nn.Linear(2, 2))
    assert "ScriptModule" in str(why_no_census(scripted))
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    assert "compiled" in str(why_no_census(compiled))
    torch.compile(torch.sin, backend="eager")(torch.ones(3))
    assert "in this process" in str(why_no_census(make_model())), "a function within a model is not to be told"


# --- several ranks ----------------------------------------------------------------------------------------------------


def slow_exchange(group: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What DDP does, and 30 ms more, beside the rest of the backward pass."""
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None

    def later() -> None:
        work.wait()
        time.sleep(0.03)
        found.set_result(buffer)

    threading.Thread(target=later).start()
    return found


slow_exchange.__annotations__ = {
    "bucket": vars(dist)["GradBucket"],
    "return": torch.futures.Future[torch.Tensor],
}  # asked for


def exchange(rank: int, folder: Path) -> tuple[float, float]:
    """What is exposed of communication in the median step of a window: by DDP's own counters, and by the profile."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    wrapped.register_comm_hook(None, slow_exchange)
    wrapped._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
    trainer = trainer_of(folder, wrapped, rank=rank, global_batch_size=8, micro_batch_size=4)
    theirs: list[float] = []  # of each step; the first has none
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        for _ in range(20):
            with trainer.step():
                wrapped(torch.ones(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            told = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            exposed = [told.get(name, nan) for name in ("backward_comm_time", "backward_compute_comm_overlap_time")]
            theirs.append(exposed[0] - exposed[1])
    windows = windows_of(folder, rank)
    assert sum(each.num_steps for each in windows) == sum(each.num_detailed for each in windows) == len(theirs)
    longest = max(windows, key=lambda each: each.num_steps)
    begin = sum(each.num_steps for each in windows[: windows.index(longest)])
    of_its_steps = [each for each in theirs[begin : begin + longest.num_steps] if isfinite(each)]
    return median_high(of_its_steps) / 1e9, longest.typical["communication"]


def test_exposed_communication_is_what_ddp_counts_itself(ranks: RankPool, tmp_path: Path) -> None:
    for theirs, ours in ranks.run(2, exchange, tmp_path):
        assert theirs >= 0.02, "most of the 30 ms is after the pass"
        assert ours == pytest.approx(theirs, rel=0.1, abs=2e-3)


def wait_for_slow_rank(rank: int, folder: Path) -> list[str]:
    model = DistributedDataParallel(Slow(forward=3 * PLANTED if rank == 1 else 0.0))
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=8, micro_batch_size=4)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(10):
            with trainer.step():
                model(torch.ones(4, 6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [each.to_json() for each in windows_of(folder, rank)]


def test_who_waits_for_a_slow_rank_waits_in_communication(ranks: RankPool, tmp_path: Path) -> None:
    quick, slow = (
        [StepWindow.from_json(line) for line in lines] for lines in ranks.run(2, wait_for_slow_rank, tmp_path)
    )
    assert total(slow, "forward") >= 30 * PLANTED
    waited = total(quick, "communication") + total(quick, "agreement")
    assert waited >= 10 * PLANTED and waited > total(quick, "forward")


def train_sharded(rank: int, folder: Path) -> tuple[list[str], str, str]:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    trainer = trainer_of(folder, model, rank=rank, global_batch_size=8, micro_batch_size=2, use_fsdp=True)
    with trainer:
        optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
        for _ in range(60):
            with trainer.step():
                model(torch.ones(2, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    own = folder / str(rank)
    lines = [each.to_json() for each in windows_of(folder, rank)]
    return lines, (own / f"census-{rank}.json").read_text(), (own / f"trace-{rank}.json").read_text()


def test_sharded_models_in_steps_of_several_micro_steps(ranks: RankPool, tmp_path: Path) -> None:
    for lines, census, traced in ranks.run(2, train_sharded, tmp_path):
        windows = [StepWindow.from_json(line) for line in lines]
        assert sum(each.num_steps for each in windows) == 30
        for phase in ("forward", "backward", "optimizer"):
            assert total(windows, phase) > 0
        found = json.loads(census)
        assert found["num_samples"] == 2
        assert found["num_flops"] == 2 * (3 * 2 * 32 * 32) * 3 - 2 * 2 * 32 * 32, "the first layer's inputs need none"
        assert 0 < found["optimizer_ops"] < found["num_ops"]
        trace = StepTrace.from_json(traced)
        assert 0 < trace.exposed_seconds <= trace.communication_seconds <= 2 * trace.step_seconds
        assert 0 < trace.computing_seconds <= trace.step_seconds
        assert any(name.startswith("aten::") for name in trace.top), "which of them took longest is the machine's"
