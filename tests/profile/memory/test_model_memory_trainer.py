"""A trainer knows what its steps take of memory: measured, or worked out beside training; and trains as before."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticDataLoader
from elastic_ext.records.metrics import MemoryFacts, PassesMemory
from tests.profile.memory.test_model_memory_process import children
from tests.support import memory_models
from tests.support.memory_models import CLASSES, LENGTH
from tests.support.training import bits_of, make_data, make_model, trainer_of

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 100.0
MICRO_BATCH = 4


def sentences(num_samples: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(CLASSES, (num_samples, LENGTH), generator=draw)
    return TensorDataset(words, words.roll(-1, 1))


def train(
    folder: Path,
    model: nn.Module,
    *,
    loader: Any = None,
    global_batch_size: int = MICRO_BATCH,
    by_function: bool = False,
    holds_outputs: bool = False,
    until: Callable[[MemoryFacts | None, Any], bool] = lambda facts, analyzer: facts is not None,
    least_steps: int = 0,
    **arguments: Any,
) -> Any:
    """Train until enough is known; the last facts, and the analyzer, which is closed."""
    if loader is None:
        loader = ElasticDataLoader(sentences(), batch_size=MICRO_BATCH)
    trainer = trainer_of(folder, model, loader, global_batch_size=global_batch_size, **arguments)
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    analyzer = trainer._training.analyzer
    give_up_at = time.monotonic() + WAIT_SECONDS

    def micro_step(*batch: Any) -> None:
        if holds_outputs:
            outputs = model(batch[0])
            loss = memory_models.cross_entropy(outputs, batch)
        else:
            loss = memory_models.cross_entropy(model(batch[0]), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    with trainer:
        while True:
            with trainer.epoch():
                for batch in loader:
                    if by_function:
                        trainer.run(micro_step, *batch)
                    else:
                        with trainer.step():
                            micro_step(*batch)
            if until is is_worked_out and analyzer.client is not None:
                analyzer.client.wait(WAIT_SECONDS)  # steps meanwhile would only take its time
            facts = analyzer.facts()
            is_enough = until(facts, analyzer) and trainer.global_step >= least_steps
            if is_enough or time.monotonic() > give_up_at:
                return facts, analyzer


def is_worked_out(facts: MemoryFacts | None, analyzer: Any) -> bool:
    return facts is not None and (analyzer.client is None or (analyzer.client.is_over and bool(analyzer._measured)))


def at(facts: MemoryFacts, size: int, ratio: float = 0.0) -> PassesMemory:
    (found,) = [e for e in facts.passes if (e.micro_batch, e.activation_checkpoint) == (size, ratio)]
    return found


@pytest.fixture(autouse=True)
def no_analysis_left() -> Iterator[None]:
    yield
    assert children() == []


# --- what is measured -------------------------------------------------------------------------------------------------


def bound(folder: Path) -> None:
    """A person says how much memory there is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"version": 1, "tuning": {"memory_bytes": 1000000000}}')


def test_where_nobody_says_how_much_memory_there_is_no_step_is_profiled(tmp_path: Path) -> None:
    facts, analyzer = train(
        tmp_path, memory_models.attention(), until=lambda facts, analyzer: analyzer is not None, least_steps=60
    )
    assert facts is None and analyzer._num_measurements == 0


def test_without_a_factory_what_steps_have_taken_is_told(tmp_path: Path) -> None:
    bound(tmp_path / "0")
    torch.manual_seed(0)
    model = memory_models.attention()
    facts, _ = train(tmp_path, model, global_batch_size=4 * MICRO_BATCH)
    assert facts.source == "measured" and "no model_factory was given" in facts.why_measured
    parameters = sum(4 * each.numel() for each in model.parameters())
    assert facts.parameter_bytes == facts.gradient_bytes == parameters
    assert facts.optimizer_bytes == 2 * parameters + 4 * len(list(model.parameters()))
    layers = [sum(4 * each.numel() for each in layer.parameters()) for layer in model.layers]  # type: ignore[union-attr]
    assert (facts.block_bytes, facts.other_bytes) == (max(layers), parameters - sum(layers))
    assert facts.capacity_bytes is None and facts.scale == 1.0 and facts.block_activation_bytes == ()
    assert sorted(each.micro_batch for each in facts.passes) == [1, 2, 4, 8, 16]
    assert 0 < facts.update_bytes < parameters  # which the last of a step's micro-steps tells


def test_larger_micro_batches_are_measured_when_they_come(tmp_path: Path) -> None:
    bound(tmp_path / "0")
    torch.manual_seed(0)
    model, loader = memory_models.attention(), ElasticDataLoader(sentences(), batch_size=2)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=8)
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
    analyzer = trainer._training.analyzer
    sizes: set[int] = set()
    give_up_at = time.monotonic() + WAIT_SECONDS
    with trainer:
        while len(sizes) < 3 and time.monotonic() < give_up_at:
            with trainer.epoch():
                for batch in loader:
                    with trainer.step():
                        memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    sizes = {size for size, _ in analyzer._measured}
                    if analyzer._training.micro_batch in sizes:
                        trainer.try_grow()
        facts = analyzer.facts()
    assert sizes == {2, 4, 8}
    small, middle, large = (at(facts, size) for size in (2, 4, 8))
    assert large.forward_bytes - middle.forward_bytes == 2 * (middle.forward_bytes - small.forward_bytes)


def test_training_is_what_it_was_bit_for_bit(tmp_path: Path) -> None:
    found = []
    given: dict[str, Any] = {"model_factory": memory_models.attention, "loss_fn": memory_models.cross_entropy}
    sides: dict[str, dict[str, Any]] = {"without": {}, "with": given}
    for folder, arguments in sides.items():
        (tmp_path / folder).mkdir()
        torch.manual_seed(0)
        model = memory_models.attention()
        torch.manual_seed(1)  # dropout draws from here on
        is_enough: Any = lambda facts, analyzer: True  # noqa: E731
        train(tmp_path / folder, model, until=is_enough, least_steps=64, **arguments)
        found.append(bits_of(*model.parameters()))
    assert found[0] == found[1]


# --- what is worked out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_function", "num_micro_steps", "sizes"), [(False, 4, {1, 2, 4, 8, 16}), (True, 1, {1, 2, 4})]
)
def test_with_a_factory_all_sizes_are_worked_out_and_compared(
    tmp_path: Path, by_function: bool, num_micro_steps: int, sizes: set[int]
) -> None:
    torch.manual_seed(0)
    model = memory_models.attention()
    loader = (
        DataLoader(sentences(), batch_size=MICRO_BATCH) if by_function else None
    )  # which shows its batches to nobody
    facts, analyzer = train(
        tmp_path,
        model,
        loader=loader,
        by_function=by_function,
        global_batch_size=num_micro_steps * MICRO_BATCH,
        model_factory=memory_models.attention,
        loss_fn=memory_models.cross_entropy,
        until=is_worked_out,
    )
    assert (facts.source, facts.why_measured) == ("fake", "")
    assert facts.scale == pytest.approx(1.0, abs=0.01)
    ratios = {each.activation_checkpoint for each in facts.passes}
    assert ratios == {0.0, 0.5, 1.0}
    assert {each.micro_batch for each in facts.passes} == sizes
    assert facts.flops_per_sample > 0 and facts.update_bytes > 0
    assert len(facts.block_activation_bytes) == len(model.layers)  # type: ignore[arg-type]
    kept = MICRO_BATCH * sum(facts.block_activation_bytes)
    assert 0.5 * at(facts, MICRO_BATCH).forward_bytes < kept <= at(facts, MICRO_BATCH).forward_bytes
    measured = analyzer._measured[MICRO_BATCH, 0.0]
    found = at(facts, MICRO_BATCH)
    for name in ("forward_bytes", "loss_bytes", "backward_bytes", "with_gradients_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(measured, name), rel=0.02), name


@pytest.mark.slow
def test_a_loop_that_holds_outputs_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    taken = []
    for holds in (False, True):
        (tmp_path / str(holds)).mkdir()
        facts, _ = train(
            tmp_path / str(holds),
            memory_models.attention(),
            holds_outputs=holds,
            model_factory=memory_models.attention,
            loss_fn=memory_models.cross_entropy,
            until=is_worked_out,
        )
        assert facts.source == "fake" and facts.scale == pytest.approx(1.0, abs=0.02)
        taken.append(at(facts, MICRO_BATCH).backward_bytes)
    assert taken[0] < taken[1]


@pytest.mark.slow
def test_a_factory_of_something_else_is_found_out(tmp_path: Path) -> None:
    facts, _ = train(
        tmp_path,
        memory_models.attention(),
        model_factory=memory_models.recurrent,
        loss_fn=memory_models.cross_entropy,
        until=is_worked_out,
    )
    assert facts.source == "measured" and "another model than the one that is trained" in facts.why_measured


@pytest.mark.slow
def test_a_loss_that_takes_much_more_is_found_out(tmp_path: Path) -> None:
    """The process has worked out steps that are nothing like those that are taken."""
    facts, _ = train(
        tmp_path,
        memory_models.attention(),
        model_factory=memory_models.attention,
        loss_fn=memory_models.wasteful,
        until=is_worked_out,
    )
    assert facts.source == "measured" and "were predicted, so that model_factory or loss_fn" in facts.why_measured


@pytest.mark.slow
def test_where_it_cannot_be_worked_out_what_is_measured_is_told(tmp_path: Path) -> None:
    inputs, targets = make_data(64, torch.float32)
    facts, _ = train(
        tmp_path,
        memory_models.picks(),
        loader=ElasticDataLoader(TensorDataset(inputs, targets), batch_size=MICRO_BATCH),
        model_factory=memory_models.picks,
        loss_fn=memory_models.cross_entropy,
        until=is_worked_out,
    )
    assert facts.source == "measured"
    assert "on fake tensors, which have no memory, failed: DynamicOutputShapeException" in facts.why_measured


def test_a_block_that_was_replaced_since_is_told_and_training_goes_on(tmp_path: Path) -> None:
    model = memory_models.attention()
    trainer = trainer_of(
        tmp_path,
        model,
        loader := ElasticDataLoader(sentences(), batch_size=MICRO_BATCH),
        model_factory=memory_models.attention,
        loss_fn=memory_models.cross_entropy,
    )
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
    layers: Any = model.layers
    layers[0] = copy.deepcopy(layers[0])
    with trainer, trainer.epoch():
        for batch in loader:
            with trainer.step():
                memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert "is no longer a part of it" in trainer._training.analyzer._why_not


def test_a_machine_without_files_left_for_another_process_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", has_none)
    facts, _ = train(
        tmp_path,
        memory_models.attention(),
        model_factory=memory_models.attention,
        loss_fn=memory_models.cross_entropy,
    )
    assert facts.source == "measured"
    assert "could not be started: [Errno 24] Too many open files" in facts.why_measured


class Views(nn.Module):
    """Which is given two views of each sample, one after another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(torch.cat([words, words.flip(1)]))
        return outputs[: len(words)]


class OfText(nn.Module):
    """Which is given numbers as text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, lines: list[str]) -> torch.Tensor:
        outputs: torch.Tensor = self.model(torch.tensor([list(map(int, line.split())) for line in lines]))
        return outputs


def test_what_tells_no_size_is_taken_to_be_a_full_micro_batch(tmp_path: Path) -> None:
    bound(tmp_path / "0")
    model, loader = OfText(memory_models.attention()), ElasticDataLoader(sentences(), batch_size=MICRO_BATCH)
    trainer = trainer_of(tmp_path, model, loader)
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
    analyzer = trainer._training.analyzer
    with trainer:
        while trainer.global_step < 40:
            with trainer.epoch():
                for batch in loader:
                    lines = [" ".join(map(str, words)) for words in batch[0].tolist()]
                    with trainer.step():
                        memory_models.cross_entropy(model(lines), batch).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
        facts = analyzer.facts()
    assert {each.micro_batch for each in facts.passes} == {1, 2, MICRO_BATCH}
    assert facts.source == "measured"


def test_what_is_worked_out_is_told_where_no_sample_can_be_kept(tmp_path: Path) -> None:
    """Gradients that stay as zeros are in every sample, which is not like what was worked out."""
    model, loader = memory_models.attention(), ElasticDataLoader(sentences(), batch_size=MICRO_BATCH)
    given: dict[str, Any] = {"model_factory": memory_models.attention, "loss_fn": memory_models.cross_entropy}
    trainer = trainer_of(tmp_path, model, loader, **given)
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
    analyzer = trainer._training.analyzer
    with trainer:
        while trainer.global_step < 40:
            with trainer.epoch():
                for batch in loader:
                    with trainer.step():
                        memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=False)
        analyzer.client.wait(WAIT_SECONDS)
        facts = analyzer.facts()
    assert analyzer._num_measurements > 0 and not analyzer._measured
    assert (facts.source, facts.why_measured, facts.scale) == ("fake", "", 1.0)


def test_samples_are_counted_and_not_the_rows_that_a_loop_makes_of_them(tmp_path: Path) -> None:
    bound(tmp_path / "0")
    model, loader = memory_models.attention(), ElasticDataLoader(sentences(), batch_size=MICRO_BATCH)
    given: dict[str, Any] = {"model_factory": memory_models.attention, "loss_fn": memory_models.cross_entropy}
    trainer = trainer_of(tmp_path, model, loader, **given)
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters()))
    analyzer = trainer._training.analyzer
    views = Views(model)
    with trainer:
        while trainer.global_step < 40:
            with trainer.epoch():
                for batch in loader:
                    with trainer.step():
                        memory_models.cross_entropy(views(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
        facts = analyzer.facts()
    assert list(analyzer._measured) == [(MICRO_BATCH, 0.0)]
    assert facts.source == "measured"
    assert f"{2 * MICRO_BATCH} rows where a step takes {MICRO_BATCH} samples at once" in facts.why_measured


def test_a_loss_without_a_batch_is_told(tmp_path: Path) -> None:
    facts, analyzer = train(
        tmp_path,
        memory_models.attention(),
        loader=DataLoader(sentences(), batch_size=MICRO_BATCH),
        model_factory=memory_models.attention,
        loss_fn=memory_models.cross_entropy,
    )
    assert analyzer.client is None
    assert facts.source == "measured" and "no batch was seen to call it with" in facts.why_measured


def test_what_cannot_be_told_to_a_process_is_told_to_the_user(tmp_path: Path) -> None:
    class Given(memory_models.Attention):
        def forward(self, words: Any) -> torch.Tensor:
            return super().forward(words["words"])

    class Words(dict[Any, Any]):
        def __init__(self, words: torch.Tensor) -> None:
            super().__init__({"words": words, 5: object()})

    model = Given()
    loader = ElasticDataLoader(sentences(), batch_size=MICRO_BATCH)
    trainer = trainer_of(tmp_path, model, loader, model_factory=memory_models.attention)
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch():
        for words, _ in loader:
            with trainer.step():
                model(Words(words)).sum().backward()
                optimizer.step()
        assert "cannot be described to the process that predicts memory: a Words" in trainer._training.analyzer._why_not


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_factory": lambda: nn.Linear(1, 1)}, "model_factory is a lambda"),
        ({"model_factory": 5}, "model_factory is 5; allowed"),
        ({"loss_fn": memory_models.cross_entropy}, "loss_fn was given without model_factory"),
        ({"model_factory": memory_models.attention, "loss_fn": "ce"}, "loss_fn is 'ce'; allowed"),
    ],
)
def test_mistakes_are_told_as_the_trainer_is_made(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_of(tmp_path, make_model(), micro_batch_size=1, **arguments)


@pytest.mark.slow
def test_a_script_has_its_own_factory_and_trains_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            import torch
            from torch import nn
            from torch.utils.data import TensorDataset
            from elastic_ext import ElasticDataLoader, ElasticTrainer, FollowOptions, MemoryModel

            def make_model():
                return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

            def loss_of(outputs, batch):
                return nn.functional.cross_entropy(outputs, batch[1])

            if __name__ == "__main__":
                print("begun", flush=True)
                data = TensorDataset(torch.randn(64, 6), torch.randint(5, (64,)))
                loader = ElasticDataLoader(data, batch_size=4)
                model = make_model()
                trainer = ElasticTrainer(
                    model,
                    loader,
                    global_batch_size=4,
                    follow_options=FollowOptions(run_dir=sys.argv[1]),
                    memory_model=MemoryModel(model_factory=make_model, loss_fn=loss_of),
                )
                optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
                analyzer = trainer._training.analyzer
                until = time.monotonic() + 100
                with trainer:
                    while time.monotonic() < until and not (analyzer.facts() and analyzer.client.is_over):
                        with trainer.epoch():
                            for batch in loader:
                                with trainer.step():
                                    loss_of(model(batch[0]), batch).backward()
                                    optimizer.step()
                                    optimizer.zero_grad()
                print(analyzer.facts().source, analyzer.facts().why_measured, flush=True)
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, env=env, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["begun", "fake"]
