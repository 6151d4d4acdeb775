"""Ways to train that are refused, and what to do instead: optimizers within backward, and pipelines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_ext import ElasticTrainer, StepError
from tests.support.ranks import RankPool
from tests.support.scripts import begun
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of
from tests.support.ways import Loop, Net, Setting, Way, by_hand, result_of, train

# ---- optimizers within backward ----


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own modules
def test_parameters_that_are_updated_within_backward_are_refused_by_prepare(tmp_path: Path) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    model = Net()
    _apply_optimizer_in_backward(SGD, [model.hidden.weight], {"lr": 0.1})
    trainer = trainer_of(tmp_path, model)
    with pytest.raises(ValueError, match=r"updated within backward .* make an optimizer of its own for each parameter"):
        trainer.prepare(SGD(model.out.parameters(), lr=0.1))
    trainer.close()


class StepsInBackward(Way):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    bare = False

    def make_optimizers(self) -> list[Optimizer]:
        return [SGD([part], lr=0.125, momentum=0.9) for part in self.trained]

    def learn(self, loss: torch.Tensor, loop: Loop) -> None:
        optimizers: list[Any] = [*self.optimizers] if self.bare else loop.optimizers
        hooks = [
            cast("Any", part).register_post_accumulate_grad_hook(lambda _, each=optimizer: step_and_clear(each))
            for part, optimizer in zip(self.trained, optimizers, strict=True)
        ]
        self.losses.append(loss.item())
        loop.backward(loss)
        for hook in hooks:
            hook.remove()


def step_and_clear(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_prepared_optimizers_may_step_within_backward_on_one_rank(tmp_path: Path, micro_batch: int) -> None:
    setting = Setting(micro_batch=micro_batch)
    plain, ours = StepsInBackward(), StepsInBackward()
    by_hand(plain, [setting] * 4)
    train(ours, tmp_path, setting, 4)
    assert result_of(ours) == result_of(plain)


def test_bare_optimizers_that_step_within_backward_are_refused(tmp_path: Path) -> None:
    way = StepsInBackward()
    way.bare = True
    with pytest.raises(StepError, match=r"call that of the one that prepare\(\) returned"):
        train(way, tmp_path, Setting(), 1)


def in_backward_on_a_rank(rank: int, folder: Path) -> str:
    way = StepsInBackward(DistributedDataParallel)
    source = Slices(make_data(16), 4)
    trainer = trainer_of(folder, way.model, source, rank=rank, global_batch_size=8, timeout_seconds=10.0)
    loop = Loop(way)
    loop.optimizers = trainer.prepare(way.optimizers)
    loop.backward = lambda loss: loss.backward()  # type: ignore[method-assign, no-untyped-call]
    inputs, targets = next(iter(source))
    with pytest.raises(StepError) as refused, trainer.step():
        way.work(inputs, targets, loop)
    trainer.close()
    return str(refused.value)


def test_on_several_ranks_optimizers_may_not_step_before_gradients_are_shared(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, in_backward_on_a_rank, tmp_path, process_group=True)
    assert all("where the ranks have not shared their gradients" in each for each in told)


# ---- pipelines ----


@pytest.fixture
def pipelines() -> Iterator[Any]:
    """torch.distributed.pipelining, and a process group that its stages need and that exchanges nothing."""
    import torch.distributed.pipelining as pipelining

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield pipelining
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch itself
def test_stages_and_schedules_of_a_pipeline_are_refused_with_what_to_do(pipelines: Any) -> None:
    stage = pipelines.PipelineStage(Net(), 0, 1, torch.device("cpu"))
    schedule = pipelines.ScheduleGPipe(stage, n_microbatches=2)
    pipe = pipelines.pipeline(nn.Sequential(Net()), (torch.zeros(2, 6),))
    for model in (stage, schedule, pipe):
        with pytest.raises(NotImplementedError, match=r"model is a .*pipelining.* have ElasticOptimizer\(optim"):
            ElasticTrainer(model)


def test_the_module_of_a_pipelines_stage_is_refused_by_prepare(pipelines: Any, tmp_path: Path) -> None:
    model, other = Net(), Net()
    trainer = trainer_of(tmp_path, model)
    stage = pipelines.PipelineStage(model, 0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the model is a stage of a pipeline .* leave the loop to the schedule"):
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.close()
    del stage, trainer
    with trainer_of(tmp_path, other) as trainer:
        trainer.prepare(SGD(other.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch itself
@pytest.mark.parametrize("num_micro_steps", [2, 4])
@pytest.mark.parametrize("num_late", [0, 5])
def test_a_stage_that_is_made_after_prepare_is_refused_when_it_calls_the_model(
    pipelines: Any, tmp_path: Path, num_micro_steps: int, num_late: int
) -> None:
    """In the first steps, and in those that look at little."""
    model, source = make_model(), Slices(make_data(64), 8 // num_micro_steps)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    schedule: Any = None
    before: list[Any] = []

    def train() -> None:
        nonlocal schedule, before
        for inputs, targets in source:
            if trainer.global_step == num_late and schedule is None:
                stage = pipelines.PipelineStage(model, 0, 1, torch.device("cpu"))
                schedule = pipelines.ScheduleGPipe(stage, n_microbatches=1, loss_fn=nn.functional.cross_entropy)
                before = bits_of(model)
            with trainer.step():
                if schedule is None:
                    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                else:
                    schedule.step(inputs, target=targets)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(StepError, match=r"called by a stage of a pipeline .* leave the loop to the schedule"):
        train()
    assert trainer.global_step == num_late
    assert bits_of(model) == before
    source.rollback()
    schedule = False
    for inputs, targets in source:
        with trainer.step():
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    trainer.close()
    assert trainer.global_step == num_late + 8


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch itself
def test_stages_of_the_models_parts_are_refused_too(pipelines: Any, tmp_path: Path) -> None:
    model, source = make_model(), Slices(make_data(64), 4)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    parts = [nn.Sequential(model[0], model[1]), model[2]]
    stages = [pipelines.PipelineStage(part, index, 2, torch.device("cpu")) for index, part in enumerate(parts)]
    schedule = pipelines.ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=nn.functional.cross_entropy)

    def train() -> None:
        for inputs, targets in source:
            with trainer.step():
                schedule.step(inputs, target=targets)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(StepError):
        train()
    assert trainer.global_step == 0
    trainer.close()


@pytest.mark.usefixtures("forked_jobs")
def test_pipelines_are_loaded_by_nobody_else(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, elastic_ext.training.prepare, elastic_ext.training.trainer, torch\n"
        "from elastic_ext.training.checks import check_model, check_updates\n"
        "model = torch.nn.Linear(1, 1)\n"
        "check_model(model, accelerator=None)\n"
        "check_updates(model)\n"
        "assert 'torch.distributed.pipelining' not in sys.modules\n"
    )
    with begun([str(script)], env=os.environ) as ended:
        told, _ = ended.communicate(timeout=120)
    assert (ended.returncode, told) == (0, "")
