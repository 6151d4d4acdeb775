"""Compiled models under a trainer: as many graphs as by hand, none cut by it, and none made anew while sizes stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset

from elastic_ext import ElasticDataLoader
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.probe import Probe
from elastic_ext.records.metrics import StepWindow
from tests.support.thinning import each_once
from tests.support.training import Slices, bits_of, make_data, trainer_of
from tests.support.ways import Block, Compiled, Net, Setting, by_hand, result_of, train

# Of torch's own, where what is compiled is given what has gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
Wrap = Callable[[nn.Module, Any], nn.Module]
Step = Callable[[Tensor, Tensor], Tensor]
"""From inputs and targets to a loss."""
Compile = Callable[[nn.Module, Any], Step]


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    torch.compiler.reset()
    counters.clear()


class Graphs:
    """A compiler that only counts what it is given."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.num_compiled += 1
        return graph.forward


def whole(model: nn.Module, backend: Any) -> nn.Module:
    return cast("nn.Module", torch.compile(model, backend=backend))


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: nn.Module, backend: Any) -> nn.Module:
    model.hidden = torch.compile(Block().double(), backend=backend)  # type: ignore[assignment]
    model.out = torch.compile(Net().double(), backend=backend)  # type: ignore[assignment]
    return model


def graphs_of(
    folder: Path,
    wrap: Wrap,
    *,
    steps: Sequence[Setting] = (Setting(),) * 6,
    changes: dict[int, dict[str, object]] | None = None,
    is_by_hand: bool = False,
) -> tuple[int, list[Setting]]:
    """How many graphs were compiled, and what was trained with; ``changes`` are proposed after so many steps."""
    graphs, taken = Graphs(), list(steps)

    class Counted(Compiled):
        def compiled(self, model: nn.Module) -> nn.Module:
            return wrap(model, graphs)

    def around(trainer: Any, loop: Any) -> Iterator[None]:
        for step, changed in (changes or {}).items():
            while trainer.global_step < step:
                yield
            trainer.propose(changed, "to see what is compiled")
        while True:
            yield

    if is_by_hand:
        by_hand(Counted(), taken)
    else:
        taken = train(Counted(), folder, steps[0], len(steps), around=around)
    assert not counters["graph_break"]
    return graphs.num_compiled, taken


@pytest.mark.parametrize(("wrap", "num_graphs"), [(whole, 1), (in_place, 1), (blocks, 2)])
def test_a_model_is_compiled_once_while_its_chunks_are_equal_whatever_else_changes(
    tmp_path: Path, wrap: Wrap, num_graphs: int
) -> None:
    assert graphs_of(tmp_path, wrap, is_by_hand=True)[0] == num_graphs
    torch.compiler.reset()
    changes: dict[int, dict[str, object]] = {
        1: {"optimizer.learning_rate": 0.25},
        3: {"global_batch_size": 16},
        5: {"global_batch_size": 2, "optimizer.weight_decay": 0.5},
    }
    compiled, taken = graphs_of(tmp_path, wrap, steps=(Setting(),) * 9, changes=changes)
    assert [*dict.fromkeys(step.global_batch for step in taken)] == [8, 16, 2]  # one micro-step: nothing is watched
    assert len({step.rates for step in taken}) == 2
    assert compiled == num_graphs


def test_chunks_of_a_second_size_make_a_graph_for_all_sizes(tmp_path: Path) -> None:
    sizes = (2, 4, 8, 3, 5)
    changes: dict[int, dict[str, object]] = {
        2 * index: {"dataloader.batch_size": size} for index, size in enumerate(sizes) if index
    }
    compiled, taken = graphs_of(tmp_path, whole, steps=(Setting(),) * 12, changes=changes)
    assert [*dict.fromkeys(step.micro_batch for step in taken)] == [*sizes]
    assert compiled == 2


def test_what_is_compiled_around_the_model_is_cut_at_its_call_and_as_exact(tmp_path: Path) -> None:
    found: list[Any] = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Net().double()

        def loss_of(inputs: Tensor, targets: Tensor, model: nn.Module = model) -> Tensor:
            return cross_entropy(model(inputs), targets)

        loss = torch.compile(loss_of, backend="eager") if is_compiled else loss_of
        source = Slices(make_data(32), 2)
        trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
        optimizer = trainer.prepare(SGD(model.parameters(), lr=0.125))
        with trainer, trainer.epoch():
            for inputs, targets in source:
                with trainer.step():
                    loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(bits_of(model))
    assert found[0] == found[1]
    assert sum(counters["graph_break"].values()) > 0


def test_a_whole_graph_around_the_model_is_refused_with_the_order_that_helps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5)).double()
    source = Slices(make_data(8), 2)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.125))
    late = torch.compile(model, backend="eager", fullgraph=True)
    inputs, _ = next(iter(source))
    with pytest.raises(Exception, match="compile the model before ElasticTrainer is given it"), trainer.step():
        late(inputs)
    optimizer.zero_grad()
    trainer.close()
    assert trainer.global_step == 0


def one_function(model: nn.Module, backend: Any) -> Step:
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs), targets)

    return cast("Step", torch.compile(loss_of, backend=backend, fullgraph=True))


def wrapped(model: nn.Module, backend: Any) -> Step:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return lambda inputs, targets: cross_entropy(compiled(inputs), targets)


def itself(model: nn.Module, backend: Any) -> Step:
    model.compile(backend=backend, fullgraph=True)
    return lambda inputs, targets: cross_entropy(model(inputs), targets)


def its_blocks(model: nn.Module, backend: Any) -> Step:
    for part in model.children():
        part.compile(backend=backend, fullgraph=True)
    return lambda inputs, targets: cross_entropy(model(inputs), targets)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = Net()

    def forward(self, inputs: Tensor) -> Any:
        return self.out(self.block(inputs))


@pytest.mark.parametrize(
    ("compiled", "guards_hooks"), each_once([one_function, wrapped, itself, its_blocks], [False, True])
)
def test_steps_that_are_looked_at_and_those_that_are_not_are_of_the_same_graphs(
    compiled: Compile, guards_hooks: bool
) -> None:
    config: Any = torch._dynamo.config
    with config.patch(skip_nnmodule_hook_guards=not guards_hooks):
        assert_same_graphs(compiled)


class Marks:
    """What a probe's marks are written into."""

    def __init__(self, marks: list[int]) -> None:
        self._marks = marks

    def __call__(self, phase: int) -> int:
        self._marks.append(phase)
        return phase


def assert_same_graphs(compiled: Compile) -> None:
    inputs, targets = make_data(4, torch.float32)
    num_graphs, marks, looks = [], list[int](), 12
    for is_attached in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        graphs, model = Graphs(), TwoBlocks()
        optimizer = SGD(model.parameters(), lr=0.125)
        step = compiled(model, graphs)
        probe = Probe(Marks(marks), model, [optimizer], is_on_accelerator=False)
        if is_attached:
            probe.attach()
        for number in range(2 * looks):
            if number % 2 == 1:
                probe.enter_micro_step()
            else:
                probe.enter_unmeasured_micro_step()
            step(inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            probe.leave_micro_step()
        probe.detach()
        num_graphs.append(graphs.num_compiled)
    assert not counters["graph_break"] and num_graphs[0] == num_graphs[1] > 0
    num_seen = 0 if compiled is one_function else looks
    assert marks.count(Phase.FORWARD) == marks.count(Phase.BACKWARD) == num_seen
    assert marks.count(Phase.OPTIMIZER) == looks and probe.has_seen is bool(num_seen)


@pytest.mark.parametrize("profile", ["off", "on"])
@pytest.mark.parametrize("compiled", [one_function, itself])
def test_a_step_that_compiles_in_one_graph_does_so_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Compile, profile: str
) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PROFILE", profile)
    model, graphs = TwoBlocks().double(), Graphs()
    step = compiled(model, graphs)
    source = Slices(make_data(8 * 160), 8)  # more steps than are looked at one after another
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.125))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                step(inputs, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.global_step == 160
    assert graphs.num_compiled == 1 and not counters["graph_break"]
    if profile == "on":
        lines = (tmp_path / "0" / "profile-0.jsonl").read_text().splitlines()
        windows = [StepWindow.from_json(line) for line in lines]
        num_detailed, is_seen = sum(each.num_detailed for each in windows), compiled is itself
        forward, whole, other = (  # in all windows: a slow machine's last one may be of a few unmeasured steps
            sum([each.seconds.get(phase, 0.0) for each in windows], 0.0) for phase in ("forward", "step", "other")
        )
        assert (num_detailed >= 64) is is_seen and (forward > 0) is is_seen
        assert is_seen or whole > other


@pytest.mark.parametrize("compiled", [one_function, wrapped, itself, its_blocks])
def test_hooks_that_could_rest_do_not_where_something_is_compiled(tmp_path: Path, compiled: Compile) -> None:
    """A compiler would make its graph anew each time that they come and go, as they do beside this loader."""
    model, graphs = TwoBlocks().double(), Graphs()
    step = compiled(model, graphs)
    loader = ElasticDataLoader(TensorDataset(*make_data(8 * 160)), 8)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.125))
    num_compiled, num_hooks = [], set()
    with trainer, trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                step(inputs, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            num_compiled.append(graphs.num_compiled)
            num_hooks.add(len(model._forward_pre_hooks))
    assert num_compiled[0] == num_compiled[-1] > 0 and not counters["graph_break"]
    assert len(num_hooks) == 1 and 0 not in num_hooks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports to compile
def test_a_model_compiled_for_this_machine_gives_the_bits_of_the_same_training_by_hand(tmp_path: Path) -> None:
    class ForThisMachine(Compiled):
        backend = "inductor"

    for setting in (Setting(micro_batch=8), Setting()):
        plain, ours = ForThisMachine(), ForThisMachine()
        by_hand(plain, [setting] * 4)
        train(ours, tmp_path, setting, 4)
        assert result_of(ours) == result_of(plain)
