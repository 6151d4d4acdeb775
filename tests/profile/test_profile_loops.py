"""Loops, models and inputs of all kinds: training goes on with them, and what the profile says of it is true."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticDataLoader
from elastic_ext.config.follower import Reports
from elastic_ext.profile.phases import Phase, Timeline
from elastic_ext.profile.probe import Probe
from elastic_ext.profile.sampled_steps import Surveyor
from elastic_ext.profile.windows import memory_held
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.world import PeerName, World
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.training.prepare import _started_at
from tests.profile.test_profile import PLANTED, Slow, data_of, loss_of, total, train, windows_of
from tests.report.test_report import gathered
from tests.support.training import make_data, make_model, trainer_of

NUM_STEPS = 4


class Around(nn.Module):
    """A layer whose outputs are given in some shape, and whose backward pass takes a while."""

    def __init__(self, give: Callable[[torch.Tensor, nn.Parameter], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self._give = give

    def forward(self, given: Any) -> Any:
        outputs = self.layer(given)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: time.sleep(PLANTED))
        return self._give(outputs * self.scale, self.scale)


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    number: int = 0


def take(
    folder: Path,
    model: nn.Module,
    work: Callable[[Any, torch.Tensor, torch.Tensor], Any],
    *,
    num_steps: int = NUM_STEPS,
    between: Callable[[Any, torch.Tensor], object] | None = None,
    loader: Any = None,
) -> list[StepWindow]:
    """So many steps; ``work`` gives the loss of each, and ``between`` is what the loop does after it."""
    loader = loader or ElasticDataLoader(data_of(4 * num_steps), batch_size=4)
    trainer = trainer_of(folder, model, loader, global_batch_size=4)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            for inputs, targets in loader:
                with trainer.step():
                    work(model, inputs, targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if between is not None:
                    between(model, inputs)
    windows = windows_of(folder)
    assert windows[-1].step == num_steps
    return windows


# --- whatever the loop does -------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(each).mean(0) for each in rows.unbind()])


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """A census is taken where nothing is; other tests of this process may have compiled something."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


def nest(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    rows = [each.expand(1 + number, 6) for number, each in enumerate(inputs)]
    return nn.functional.cross_entropy(model(torch.nested.nested_tensor(rows)), targets)


def trace(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    torch.jit.trace(model, (inputs,))  # type: ignore[no-untyped-call]
    return loss_of(model, inputs, targets)


def make_graph(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    make_fx(lambda values: model(values), tracing_mode="symbolic", _allow_non_fake_inputs=True)(inputs)
    return loss_of(model, inputs, targets)


def transform(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    parameters = {name: part.detach() for name, part in model.named_parameters()}

    def loss(parameters: Any, one: torch.Tensor, target: torch.Tensor) -> Any:
        outputs = functional_call(model, parameters, (one.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, target.unsqueeze(0))

    vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    vmap(lambda one: model(one))(inputs)
    return loss_of(model, inputs, targets)


def copies(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    outputs = model(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(outputs, io.BytesIO())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert torch.equal(each(inputs), outputs)
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("work", [nest, trace, make_graph, transform, copies], ids=lambda each: each.__name__)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:.*torch.jit.trace")
def test_training_goes_on_whatever_is_done_with_the_model(
    tmp_path: Path, work: Callable[[Any, torch.Tensor, torch.Tensor], Any]
) -> None:
    model = Nested() if work is nest else make_model(torch.float32)
    windows = take(tmp_path, model, work)
    assert total(windows, "forward") > 0 and total(windows, "backward") > 0


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_where_no_file_can_be_opened_memory_is_not_known_and_nothing_stops() -> None:
    with no_more_files():
        held, started_at = memory_held(), _started_at(7.0)
    assert held.memory_bytes is None and started_at == 7.0
    assert (memory_held().memory_bytes or 0) > 1 << 20


def test_a_machine_that_cannot_be_measured_is_left_so(tmp_path: Path) -> None:
    timeline = Timeline(Phase.OTHER)
    probe = Probe(timeline.enter, nn.Identity(), [], is_on_accelerator=False)
    surveyor = Surveyor(
        timeline,
        probe,
        world=World(rank=0, names=(PeerName(rank=0, host="node", pid=1, seat=0),)),
        device=torch.device("meta"),  # which nobody waits for
        reports=Reports(StartSettings.resolve({}, script="train.py", run_dir=tmp_path), Ranks.alone()),
        why_no_census=lambda: None,
        needs_trace=lambda: False,
    )
    surveyor.enter(0)
    surveyor.reach_boundary()
    surveyor.leave(has_ended=True)
    assert not any(tmp_path.iterdir())


# --- and what it says is true -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("give", "logits_of"),
    [
        (lambda outputs, scale: Outputs(outputs), lambda found: found.logits),
        (lambda outputs, scale: {"all": [outputs]}, lambda found: found["all"][0]),
        (lambda outputs, scale: (scale * 2, outputs), lambda found: found[1]),
        (lambda outputs, scale: (scale, outputs), lambda found: found[1]),
    ],
    ids=["dataclass", "containers", "another output first", "parameter first"],
)
def test_a_backward_pass_is_seen_whatever_the_model_gives(
    tmp_path: Path, give: Callable[[torch.Tensor, nn.Parameter], Any], logits_of: Callable[[Any], torch.Tensor]
) -> None:
    model = Around(give)
    windows = take(
        tmp_path, model, lambda model, inputs, targets: nn.functional.cross_entropy(logits_of(model(inputs)), targets)
    )
    assert total(windows, "backward") >= NUM_STEPS * PLANTED
    assert not model.scale._backward_hooks, "nothing is left on what outlives its step"


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 5)

    def forward(self, batch: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch
        outputs: torch.Tensor = self.layer(self.table(tokens).mean(1))
        return outputs


@pytest.mark.parametrize("form", ["table", "table and mask", "names", "dictionary", "two passes"])
def test_tokens_are_counted_once_in_whatever_form_they_are_given(tmp_path: Path, form: str) -> None:
    tokens, mask = torch.ones(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.long)

    def work(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if form == "table":
            outputs = model(tokens)
        elif form == "table and mask":
            outputs = model(tokens, mask=mask)
        elif form == "names":
            outputs = model(batch=tokens, mask=mask)
        elif form == "two passes":
            outputs = model(tokens) - model(mask)
        else:
            outputs = model({"tokens": tokens, "mask": mask})
        return nn.functional.cross_entropy(outputs, targets)

    windows = take(tmp_path, Embedding(), work, num_steps=20)
    assert sum(each.num_tokens for each in windows) == 20 * 12 * (2 if form == "two passes" else 1)
    assert sum(each.num_bytes for each in windows) == 20 * 12 * 8 * (1 if form == "table" else 2)
    assert '"num_samples":4' in (tmp_path / "0" / "census-0.json").read_text()


def test_other_threads_that_call_the_model_are_left_alone(tmp_path: Path) -> None:
    def work(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        def evaluate() -> None:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                model(inputs).sum().backward()

        loss = loss_of(model, inputs, targets)
        threads = [threading.Thread(target=evaluate) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return loss

    windows = take(tmp_path, make_model(torch.float32), work)
    assert sum(each.num_bytes for each in windows) == NUM_STEPS * 4 * 6 * 4
    for window in windows:
        for phase, spent in window.processor_seconds.items():
            assert spent <= window.seconds[phase] * 1.01 + 1e-3, phase


def test_a_thread_that_loads_ahead_is_none_that_training_waits_for(tmp_path: Path) -> None:
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(16), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        timeline = loader.timeline
        assert timeline is not None
        batches: Iterator[Any] = iter(loader)
        seen: list[int] = []
        for _ in range(3):
            with trainer.step():
                batch: list[Any] = []
                thread = threading.Thread(target=lambda batch=batch: batch.append(next(batches)))
                timeline.enter(Phase.FORWARD)
                thread.start()
                thread.join()
                seen.append(timeline.phase)
                loss_of(model, *batch[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert seen == [Phase.FORWARD] * 3


def test_evaluation_between_steps_is_no_waiting_for_data(tmp_path: Path) -> None:
    loader = DataLoader(data_of(16), batch_size=4)

    def evaluate(model: Any, inputs: torch.Tensor) -> None:
        with torch.no_grad():
            for _ in range(2):
                model(inputs)

    windows = take(tmp_path, Slow(PLANTED), loss_of, between=evaluate, loader=loader)
    assert total(windows, "other") >= 2 * NUM_STEPS * PLANTED
    assert total(windows, "data") < 2 * NUM_STEPS * PLANTED


class Asking(torch.optim.SGD):
    """Asks for passes as it steps, and takes a while after them."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        time.sleep(PLANTED)
        super().step()
        return loss


def test_what_an_optimizer_does_after_passes_of_its_own_is_its_time(tmp_path: Path) -> None:
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(16), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        optimizer = trainer.prepare(Asking(model.parameters(), lr=0.1))
        for inputs, targets in loader:
            with trainer.step():

                def closure(batch: Any = (inputs, targets)) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(model, *batch)
                    loss.backward()
                    return loss

                optimizer.step(closure)
    assert total(windows_of(tmp_path), "optimizer") >= 4 * PLANTED


def test_what_a_step_did_before_its_passes_comes_to_nothing_with_it(tmp_path: Path) -> None:
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(12), batch_size=4)
    trainer, failures = trainer_of(tmp_path, model, loader, global_batch_size=4), 0
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in loader:
            try:
                with trainer.step():
                    if failures < 2:
                        failures += 1
                        time.sleep(2 * PLANTED)
                        raise FloatingPointError
                    loss_of(model, inputs, targets).backward()
                    optimizer.step()
            except FloatingPointError:
                continue
    assert total(windows_of(tmp_path), "rolled-back") >= 4 * PLANTED


def test_steps_that_do_not_commit_are_no_steps_taken_again(tmp_path: Path) -> None:
    model, loader = make_model(torch.float32), ElasticDataLoader(data_of(64), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    with trainer:
        trainer.on_change("user", lambda old, new: None)
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (inputs, targets) in enumerate(loader):
            with trainer.step():
                loss_of(model, inputs, targets).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
            if number == 7:
                trainer.propose({"user.knob": 1}, "planted")
    record = gathered(tmp_path / "0")
    assert len(record.periods) == 2
    assert (record.first_step, record.last_step, record.num_steps_again, record.num_samples) == (0, 4, 0, 64)


def test_where_steps_become_longer_they_are_looked_at_again(tmp_path: Path) -> None:
    class Slowing(nn.Module):
        """Quick at first, so that steps are passed over by the thousand."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)
            self.num_calls = 0

        def forward(self, inputs: torch.Tensor) -> Any:
            self.num_calls += 1
            time.sleep(0.03 if self.num_calls > 200 else 0.0)
            return self.layer(inputs)

    windows = train(tmp_path, Slowing(), ElasticDataLoader(data_of(8 * 250), batch_size=8), global_batch_size=8)
    assert windows[-1].step == 250
    assert total(windows, "forward") > 4 * 0.03, "they are looked at after a second"
    assert sum(each.num_detailed for each in windows) < 180


class SlowFor(torch.utils.data.TensorDataset):
    """Whose sample of one number takes a while."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(5 * PLANTED if index == 80 else 0.0)
        found: Any = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("loader_class", [ElasticDataLoader, DataLoader])
def test_hooks_are_on_the_model_in_steps_that_are_measured_and_where_a_wait_may_be_an_evaluation(
    tmp_path: Path, loader_class: Any
) -> None:
    model, found = nn.Linear(6, 5), []
    loader = loader_class(TensorDataset(*make_data(300, torch.float32)), batch_size=1)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=1)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            for inputs, targets in loader:
                with trainer.step():
                    found.append(len(model._forward_pre_hooks))
                    loss_of(model, inputs, targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    measured = sum(each.num_detailed for each in windows_of(tmp_path))
    assert 64 <= measured < 300 and not model._forward_pre_hooks
    if loader_class is ElasticDataLoader:
        assert found[:64] == [found[0]] * 64 and min(found) < found[0]
        assert sum(each == found[0] for each in found) == measured
    else:
        assert min(found) == found[0]


@pytest.mark.parametrize("loader_class", [ElasticDataLoader, DataLoader])
def test_what_is_rare_and_long_is_told_apart_among_steps_that_are_passed_over(
    tmp_path: Path, loader_class: Any
) -> None:
    model, failures, failing = nn.Linear(6, 5), 0, 0.0
    loader = loader_class(SlowFor(*make_data(100, torch.float32)), batch_size=1)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=1)
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            ended = time.perf_counter()
            for number, (inputs, targets) in enumerate(loader):
                began, ended = ended, time.perf_counter()
                try:
                    with trainer.step():
                        if number in (70, 71):
                            failures += 1
                            time.sleep(5 * PLANTED)
                            raise FloatingPointError
                        loss_of(model, inputs, targets).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                except FloatingPointError:
                    ended = time.perf_counter()
                    failing += ended - began
                    continue
                if number == 90:
                    with torch.no_grad():  # an evaluation
                        model(inputs)
                    time.sleep(5 * PLANTED)
    windows = windows_of(tmp_path)
    assert failures == 2 and sum(each.num_detailed for each in windows) < 90, "others were passed over"
    assert 10 * PLANTED <= total(windows, "rolled-back") < 1.3 * failing, "each failure once"
    assert total(windows, "data") >= 5 * PLANTED
    if loader_class is ElasticDataLoader:  # torch's own tells nobody when it is waited for
        assert total(windows, "other") >= 5 * PLANTED
