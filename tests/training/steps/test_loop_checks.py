"""What a loop does otherwise than its author believes: each is said once, or refused, and the arithmetic is torch's."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import StepError
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.torch_private.loss_graph import factor_of, is_sum_over, reads_graphs
from tests.support.ranks import RankPool
from tests.support.thinning import each_once
from tests.support.training import bits_of, make_data, make_model, shared, trainer_of

INPUTS: Any
TARGETS: Any
INPUTS, TARGETS = make_data(64)
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return cross_entropy(model(inputs), targets)


def loader_of(kind: str, batch_size: int = 4) -> Any:
    dataset = TensorDataset(INPUTS, TARGETS)
    return ElasticDataLoader(dataset, batch_size) if kind == "ours" else DataLoader(dataset, batch_size)


@pytest.fixture(params=["ours", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Loop:
    """A trainer, and the loop over its loader as somebody has written it."""

    def __init__(self, folder: Path, loader: Any, *, batch: int | None = 16, **options: Any) -> None:
        self.loader, self.model = loader, make_model()
        self.trainer = trainer_of(folder, self.model, loader, global_batch_size=batch, **options)
        self.optimizer = self.trainer.prepare(SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def run(self, loss_of: Loss = mean_loss, *, zeroes: bool = True, loader: Any = None, num: int = 99) -> None:
        with self.trainer, self.trainer.epoch():
            for index, (inputs, targets) in enumerate(self.loader if loader is None else loader):
                if index == num:
                    break
                with self.trainer.step():
                    loss_of(self.model, inputs, targets).backward()
                    self.optimizer.step()
                    if zeroes:
                        self.optimizer.zero_grad()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "this warning is logged once" in record.message]


def raised_by(loop: Loop, work: Callable[..., object], *, is_open: bool = False) -> str:
    """What the first micro-step raises whose work this is, before the optimizer's step."""
    inputs, targets = next(iter(loop.loader))

    def take() -> None:
        with loop.trainer.step():
            work(inputs, targets)
            loop.optimizer.step()

    with pytest.raises(StepError) as raised:
        take()
    if not is_open:
        loop.trainer.close()
    return str(raised.value)


# ---- what adds up as torch has it ----


def plain(num_gathered: int, *, zeroes: bool = True, size: int = 4) -> nn.Module:
    """A loop without the library."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = zip(INPUTS.split(size), TARGETS.split(size), strict=True)
    for index, (inputs, targets) in enumerate(batches, start=1):
        (mean_loss(model, inputs, targets) / num_gathered).backward()
        if index % num_gathered == 0:
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
    return model


@pytest.mark.parametrize("num_gathered", [1, 2, 4])
def test_gradients_that_nobody_clears_add_up_as_torchs_do(
    tmp_path: Path, kind: str, num_gathered: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4 * num_gathered)
    loop.run(zeroes=False)
    assert bits_of(loop.model) == bits_of(plain(num_gathered, zeroes=False))
    assert len(said(caplog)) == 1 and "zero_grad() was not called" in said(caplog)[0]


def test_gradients_that_are_cleared_every_second_step_do_too(tmp_path: Path, kind: str) -> None:
    loop, model = Loop(tmp_path, loader_of(kind), batch=8), make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with loop.trainer:
        for index, (inputs, targets) in enumerate(loop.loader, start=1):
            with loop.trainer.step():
                mean_loss(loop.model, inputs, targets).backward()
                loop.optimizer.step()
                if index % 4 == 0:
                    loop.optimizer.zero_grad()
            (mean_loss(model, inputs, targets) / 2).backward()
            if index % 2 == 0:
                optimizer.step()
            if index % 4 == 0:
                optimizer.zero_grad()
    assert bits_of(loop.model) == bits_of(model)


def test_what_is_left_over_is_not_divided_by_the_items_of_the_next_step(tmp_path: Path) -> None:
    loop, model = Loop(tmp_path, loader_of("ours"), batch=8), make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with loop.trainer:
        for inputs, targets in loop.loader:
            with loop.trainer.step():
                loss = cross_entropy(loop.model(inputs), targets, reduction="sum")
                loop.trainer.backward(loss, num_items=len(inputs))
                loop.optimizer.step()
    for inputs, targets in zip(INPUTS.split(8), TARGETS.split(8), strict=True):
        mean_loss(model, inputs, targets).backward()
        optimizer.step()
    for mine, theirs in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("num_gathered", [1, 4])
def test_a_loop_that_gathers_by_itself_trains_alike_with_either_loader(
    tmp_path: Path, kind: str, num_gathered: int, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=None)
    with loop.trainer, loop.trainer.epoch():
        for index, (inputs, targets) in enumerate(loop.loader, start=1):
            with loop.trainer.step():
                (mean_loss(loop.model, inputs, targets) / num_gathered).backward()
                if index % num_gathered == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    assert bits_of(loop.model) == bits_of(plain(num_gathered))
    assert loop.trainer.global_step == 16 // num_gathered and not said(caplog)


def test_micro_batches_of_a_loop_that_gathers_by_itself_do_not_become_parts_of_steps(tmp_path: Path) -> None:
    loop = Loop(tmp_path, loader_of("ours"), batch=None)
    proposal: Any = None
    with loop.trainer:
        for index, (inputs, targets) in enumerate(loop.loader, start=1):
            with loop.trainer.step():
                (mean_loss(loop.model, inputs, targets) / 2).backward()
                if index % 2 == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
            if index == 4:
                proposal = loop.trainer.propose({"dataloader.batch_size": 2}, "to see")
    assert proposal.outcome == "refused"
    assert "accumulates gradients over several micro-batches by itself" in proposal.refusal
    assert bits_of(loop.model) == bits_of(plain(2))


# ---- what is trained on ----


@pytest.mark.parametrize(("num_gathered", "num_told"), [(6, 1), (8, 0)])
def test_a_checkpoint_of_gathered_gradients_says_that_they_are_not_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_gathered: int, num_told: int
) -> None:
    for _run in range(2):
        loop = Loop(tmp_path, loader_of("ours"), batch=None, shared_storage_path=tmp_path / "storage")
        with loop.trainer, loop.trainer.epoch():
            for number, (inputs, targets) in enumerate(loop.loader, start=1):
                with loop.trainer.step():
                    mean_loss(loop.model, inputs, targets).backward()
                    if number % 4 == 0:
                        loop.optimizer.step()
                        loop.optimizer.zero_grad()
                if number == num_gathered:
                    loop.trainer.save_checkpoint()
                    break
    told = [each.message for each in caplog.records if "accumulating gradients by itself" in each.message]
    assert len(told) == num_told


def test_a_loop_over_another_loader_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    loop, before = Loop(tmp_path, loader_of("ours")), bits_of(make_model())
    with pytest.raises(StepError, match=r"no batch from the dataloader .*\(ElasticDataLoader\)"):
        loop.run(loader=loader_of("torch", 2))
    assert bits_of(loop.model) == before and loop.trainer.global_step == 0


def test_batches_of_another_size_than_the_loaders_are_noticed_in_what_the_model_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of("torch"))
    loop.run(loader=loader_of("torch", 2))
    assert len(said(caplog)) == 1 and "was given 2 samples, and the batch that" in said(caplog)[0]


def test_batches_that_are_trained_on_twice_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, loader_of("ours"), batch=8)
    with loop.trainer:
        for index, (inputs, targets) in enumerate(loop.loader):
            for _ in range(0 if index > 6 else 2):
                with loop.trainer.step():
                    mean_loss(loop.model, inputs, targets).backward()
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    assert [text.split(" (")[0] for text in said(caplog)] == [
        "a step of 2 micro-steps was taken with 1 batches of the trainer's dataloader: samples that are trained on "
        "more than once, or come from elsewhere, count as the dataloader's. For such a loop give ElasticTrainer no "
        "dataloader, and micro_batch_size="
    ]


def test_the_batches_of_two_models_that_are_called_together_are_nobodys_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pairs(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(torch.cat([inputs, inputs])), torch.cat([targets, targets]))

    Loop(tmp_path, loader_of("torch")).run(pairs)
    assert not said(caplog)


@pytest.mark.parametrize("shape", [(13, 6), (1, 24), (6, 4)], ids=["nodes of graphs", "one row", "samples second"])
def test_what_the_model_is_given_need_not_be_rows_of_samples(
    tmp_path: Path, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def reshaped(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return model(inputs.new_zeros(*shape)).square().mean()

    loop = Loop(tmp_path, loader_of("torch"))
    loop.model[0] = nn.LazyLinear(16, dtype=torch.float64)
    loop.model[0](torch.zeros(shape, dtype=torch.float64))
    loop.run(reshaped)
    assert not [text for text in said(caplog) if "was given" in text]


# ---- what the loss is ----


def divided(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return mean_loss(model, inputs, targets) / 4


def multiplied(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return 0.25 * mean_loss(model, inputs, targets)


def summed(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs), targets, reduction="sum")


def summed_by_hand(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = model(inputs).log_softmax(1)[range(len(targets)), targets]
    return -losses.sum()


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (divided, "multiplied by 0.25 before backward(), and a step has 4 micro-batches"),
        (multiplied, "multiplied by 0.25 before backward(), and a step has 4 micro-batches"),
        (summed, "a sum over the 4 samples of its micro-batch, and a step of 4 micro-batches"),
        (summed_by_hand, "a sum over the 4 samples of its micro-batch, and a step of 4 micro-batches"),
    ],
)
def test_a_loss_that_is_no_mean_over_its_micro_batch_is_noticed(
    tmp_path: Path, kind: str, loss_of: Loss, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path, loader_of(kind)).run(loss_of)
    assert len(said(caplog)) == 1 and words in said(caplog)[0]


@pytest.mark.parametrize("loss_of", [divided, summed])
def test_with_one_micro_batch_per_step_a_loss_is_whatever_it_is(
    tmp_path: Path, loss_of: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path, loader_of("torch"), batch=4).run(loss_of)
    assert not said(caplog)


def test_a_scale_or_two_losses_in_one_are_no_division(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def of_two(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = model(inputs)
        both: torch.Tensor = cross_entropy(outputs, targets) + 0.25 * outputs.square().mean()
        return both / 2 * 1024.0

    Loop(tmp_path, loader_of("torch")).run(of_two)
    assert not said(caplog)


def test_this_torch_keeps_in_its_graphs_what_is_read_there() -> None:
    assert reads_graphs()
    leaf = torch.ones(3, requires_grad=True)
    assert factor_of((leaf * leaf).sum() * 2)[0] == 2.0
    assert factor_of(leaf.sum() * leaf.sum())[0] == 1.0
    assert factor_of(leaf.sum() / 0.5 / 4)[0] == 0.5
    assert not is_sum_over(factor_of(leaf.sum())[1], 4)


# ---- passes and steps ----


def test_a_pass_that_was_forgotten_in_some_micro_steps_is_noticed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind))
    with loop.trainer, loop.trainer.epoch():
        for index, (inputs, targets) in enumerate(loop.loader):
            with loop.trainer.step():
                loss = mean_loss(loop.model, inputs, targets)
                if index % 4:
                    loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert len(said(caplog)) == 1 and said(caplog)[0].startswith("1 of the 4 micro-steps of a step called the model")


def test_a_step_without_any_gradient_is_refused(tmp_path: Path, kind: str) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4)
    error = raised_by(loop, lambda inputs, targets: loop.model(inputs))
    assert "no parameter of the optimizer has a gradient: no backward() came to them" in error
    assert loop.trainer.global_step == 0


def test_a_later_step_without_any_gradient_is_torchs_and_is_said(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4)
    with loop.trainer, loop.trainer.epoch():
        for index, (inputs, targets) in enumerate(loop.loader):
            with loop.trainer.step():
                loss = mean_loss(loop.model, inputs, targets)
                if index != 5:  # a bad batch
                    loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert loop.trainer.global_step == 16
    assert len(said(caplog)) == 1 and "has a gradient, other than in steps before: no backward()" in said(caplog)[0]


def test_gradients_that_are_cleared_before_they_are_used_are_named(tmp_path: Path, kind: str) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4)

    def clear(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        mean_loss(loop.model, inputs, targets).backward()
        loop.optimizer.zero_grad()

    assert "zero_grad() was called between backward() and step()" in raised_by(loop, clear)
    assert loop.trainer.global_step == 0


def test_gradients_that_are_switched_off_are_named(tmp_path: Path, kind: str) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4)

    def pass_back(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        mean_loss(loop.model, inputs, targets).backward()

    with torch.no_grad():
        for work in (pass_back, lambda inputs, targets: loop.model(inputs)):
            assert "gradients are switched off here (torch.no_grad()" in raised_by(loop, work, is_open=True)
    loop.trainer.close()
    assert loop.trainer.global_step == 0


def test_an_optimizer_that_steps_at_every_third_micro_step_is_noticed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=8)
    with loop.trainer, loop.trainer.epoch():
        for index, (inputs, targets) in enumerate(loop.loader, start=1):
            with loop.trainer.step():
                mean_loss(loop.model, inputs, targets).backward()
                if index % 3 == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    assert len(said(caplog)) == 1 and "optimizer.step() was called in 1 of them" in said(caplog)[0]


@pytest.mark.parametrize("batch", [None, 8])
def test_an_optimizer_that_never_steps_is_noticed(
    tmp_path: Path, kind: str, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=batch)
    with loop.trainer, loop.trainer.epoch():
        for inputs, targets in loop.loader:
            with loop.trainer.step():
                mean_loss(loop.model, inputs, targets).backward()
    assert len(said(caplog)) == 1 and "no optimizer has stepped: nothing was trained" in said(caplog)[0]


def test_optimizers_of_different_rhythms_are_noticed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader = make_model(), loader_of(kind)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    first, second = trainer.prepare([SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)])
    with trainer, trainer.epoch():
        for index, (inputs, targets) in enumerate(loader):
            with trainer.step():
                mean_loss(model, inputs, targets).backward()
                first.step()
                if index % 2:
                    second.step()
                first.zero_grad()
                second.zero_grad()
    assert trainer.global_step == 8
    assert len(said(caplog)) == 1 and "different steps (5, 2 of 5)" in said(caplog)[0]


def test_a_model_that_is_trained_in_evaluation_mode_is_noticed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=4)
    loop.model.eval()
    loop.run()
    assert len(said(caplog)) == 1 and "model.training is False" in said(caplog)[0]


def test_a_validation_with_gradients_within_a_step_is_noticed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def validating(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        model.eval()
        model(INPUTS)
        model.train()
        return mean_loss(model, inputs, targets)

    Loop(tmp_path, loader_of(kind), batch=4).run(validating)
    assert len(said(caplog)) == 1 and "called 1 times in evaluation mode within a micro-step" in said(caplog)[0]


@pytest.mark.parametrize("batch", [4, 16])
def test_losses_that_are_kept_with_their_graphs_are_noticed(
    tmp_path: Path, kind: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[torch.Tensor] = []

    def keeping(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kept.append(mean_loss(model, inputs, targets))
        return kept[-1]

    Loop(tmp_path, loader_of(kind), batch=batch).run(keeping)
    assert len(said(caplog)) == 1 and "graphs of 2 steps in a row are still held" in said(caplog)[0]


@pytest.mark.parametrize(("batch", "order"), each_once([None, 4, 16], ["last", "first", "middle"]))
def test_of_a_loop_that_does_nothing_wrong_nothing_is_said(
    tmp_path: Path, kind: str, batch: int | None, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, loader_of(kind), batch=batch)
    losses: list[float] = []
    with loop.trainer:
        for epoch in range(17):  # a further look is at step 256
            with loop.trainer.epoch(epoch):
                for inputs, targets in loop.loader:
                    with loop.trainer.step():
                        if order == "first":
                            loop.optimizer.zero_grad()
                        loss = mean_loss(loop.model, inputs, targets)
                        if order == "middle":
                            loop.optimizer.zero_grad()
                        loss.backward()
                        losses.append(loss.item())
                        loop.optimizer.step()
                        if order == "last":
                            loop.optimizer.zero_grad()
            loop.model.eval()
            with torch.no_grad():
                mean_loss(loop.model, INPUTS, TARGETS)
            loop.model.train()
    assert not said(caplog)


class Marked(torch.autograd.Function):
    """Keeps something in its place of the graph, as long as there is one."""

    kept: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        ctx.marker = nn.Identity()
        Marked.kept.append(weakref.ref(ctx.marker))
        return inputs * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("batch", [4, 16])
def test_graphs_go_with_the_losses_and_wait_for_no_garbage_collection(tmp_path: Path, kind: str, batch: int) -> None:
    def of_marked(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        assert not any(each() is not None for each in Marked.kept)
        marked: Any = Marked
        return mean_loss(model, marked.apply(inputs.requires_grad_()), targets)

    Marked.kept.clear()
    gc.disable()
    try:
        Loop(tmp_path, loader_of(kind), batch=batch).run(of_marked)
    finally:
        gc.enable()


class OfParts(nn.Module):
    """A model that is given the rows of all its samples one after another, and of which sample each is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).double()

    def forward(self, rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(int(owners[-1]) + 1, 5, dtype=rows.dtype)
        return sums.index_add(0, owners, self.layer(rows))


def test_rows_of_graphs_and_packed_sequences_are_no_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loader = OfParts(), loader_of("ours")
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch():
        for number, (inputs, targets) in enumerate(loader):
            repeats = torch.arange(len(inputs)) + number + 2
            with trainer.step():
                owners = torch.arange(len(inputs)).repeat_interleave(repeats)
                cross_entropy(model(inputs[owners], owners), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert not said(caplog)


class OfLists(nn.Module):
    """A model that is given a list of tensors of different sizes, as detectors are, and makes their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).double()

    def forward(self, images: list[torch.Tensor], targets: torch.Tensor) -> Any:
        losses = [cross_entropy(self.layer(each.mean(0)), target) for each, target in zip(images, targets, strict=True)]
        return sum(losses) / len(losses)


def test_lists_of_images_are_batches_and_their_mean_is_no_division(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, loader = OfLists(), loader_of("ours")
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                model([each.expand(5 + index, 6) for index, each in enumerate(inputs)], list(targets)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert not said(caplog)


def test_a_part_of_a_batch_beside_all_of_it_is_no_other_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def both(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return mean_loss(model, inputs, targets) + mean_loss(model, inputs[:3], targets[:3])

    Loop(tmp_path, loader_of("ours")).run(both)
    assert not said(caplog)


def test_a_mean_by_hand_is_no_division_and_one_that_is_divided_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def mean_by_hand(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed(model, inputs, targets) / len(inputs)

    def divided_mean(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_by_hand(model, inputs, targets) / 4

    Loop(tmp_path, loader_of("ours")).run(mean_by_hand)
    assert not said(caplog)
    Loop(tmp_path, loader_of("ours")).run(divided_mean)
    assert len(said(caplog)) == 1 and "multiplied by 0.25 before backward()" in said(caplog)[0]


def test_a_divided_loss_is_noticed_under_a_scaler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loader = make_model(torch.float32), loader_of("ours")
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), None, scaler)
    with trainer, trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                scaler.scale(divided(model, inputs.float(), targets)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert len(said(caplog)) == 1 and "multiplied by 0.25 before backward()" in said(caplog)[0]


def test_a_frozen_part_in_evaluation_mode_is_no_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(6, 6).double(), "head": nn.Linear(6, 5).double()})
    model["encoder"].requires_grad_(False).eval()
    loader = loader_of("ours")
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model["head"].parameters(), lr=0.1))
    with trainer, trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                cross_entropy(model["head"](model["encoder"](inputs)), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert not said(caplog)


def train_two(trainer: Any, loader: Any, model: Any, optimizers: Any, zeroes: str) -> None:
    """As a GAN is trained: each optimizer clears its gradients, and those that the other's pass has left, first."""
    first, second = optimizers
    one, two = model["first"], model["second"]
    with trainer, trainer.epoch():
        for inputs, _ in loader:
            with trainer.step():
                for part, optimizer, other in ((two, second, one), (one, first, two)):
                    if zeroes != "neither":
                        (optimizer if zeroes == "optimizer" else part).zero_grad()
                    other.requires_grad_(False)
                    two(one(inputs)).square().mean().backward()
                    other.requires_grad_(True)
                    optimizer.step()


def two_parts() -> Any:
    torch.manual_seed(0)
    return nn.Linear(6, 6).double(), nn.Linear(6, 1).double()


@pytest.mark.parametrize(("zeroes", "num_said"), [("optimizer", 0), ("module", 0), ("neither", 1)])
def test_gradients_that_each_optimizer_clears_before_its_own_pass_are_not_left_over(
    tmp_path: Path, zeroes: str, num_said: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_parts()
    model, loader = nn.ModuleDict({"first": first, "second": second}), loader_of("ours", 16)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16)
    optimizers = trainer.prepare([SGD(first.parameters(), lr=0.01), SGD(second.parameters(), lr=0.01)])
    train_two(trainer, loader, model, optimizers, zeroes)
    assert ["zero_grad() was not called" in each for each in said(caplog)] == [True] * num_said


@pytest.mark.parametrize("is_polluted", [False, True])
def test_an_optimizer_that_steps_in_every_third_step_clears_its_gradients_there(
    tmp_path: Path, is_polluted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As a generator whose critic takes more steps, whose passes may come to it too."""
    first, second = two_parts()
    model, loader = nn.ModuleDict({"first": first, "second": second}), loader_of("ours")
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=4)
    seldom, often = trainer.prepare([SGD(first.parameters(), lr=0.01), SGD(second.parameters(), lr=0.01)])
    with trainer, trainer.epoch():
        for number, (inputs, _) in enumerate(loader):
            with trainer.step():
                often.zero_grad()
                made = first(inputs)
                second(made if is_polluted else made.detach()).square().mean().backward()
                often.step()
                if number % 3 == 0:
                    seldom.zero_grad()
                    second(first(inputs)).mean().backward()
                    seldom.step()
    (text,) = said(caplog)
    assert text.startswith("the optimizers step in different steps ")


# ---- ranks ----


def of_rank(rank: int, folder: Path, what: str) -> Any:
    """What this rank said, or was told, and the bits that it ended with."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("elastic_ext").addHandler(handler)
    model = shared(make_model(), 2)
    loader = ElasticDataLoader(TensorDataset(INPUTS, TARGETS), 4)
    trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=16, timeout_seconds=20.0)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches: Any = loader
    if what == "another loader":
        batches = DataLoader(TensorDataset(INPUTS, TARGETS), 4)
    error = ""
    try:
        with trainer:
            for inputs, targets in batches:
                with trainer.step():
                    loss = mean_loss(model, inputs, targets)
                    (loss / 2 if what == "divided" else loss).backward()
                    optimizer.step()
                    if what != "left over":
                        optimizer.zero_grad()
    except StepError as raised:
        error = str(raised)
    finally:
        logging.getLogger("elastic_ext").removeHandler(handler)
    said_once = [line for line in lines if "this warning is logged once" in line]
    return error, said_once, str(bits_of(model)), trainer.global_step


def run_ranks(ranks: RankPool, folder: Path, what: str) -> Iterator[Any]:
    return zip(*ranks.run(2, of_rank, folder, what, process_group=True), strict=True)


def test_all_ranks_refuse_a_loop_over_another_loader(ranks: RankPool, tmp_path: Path) -> None:
    errors, _, bits, steps = run_ranks(ranks, tmp_path, "another loader")
    assert all("no batch from the dataloader" in error for error in errors)
    assert len(set(bits)) == 1 and steps == (0, 0)


@pytest.mark.parametrize(
    ("what", "words"), [("divided", "multiplied by 0.5"), ("left over", "zero_grad() was not called")]
)
def test_the_first_rank_says_what_all_have_seen(ranks: RankPool, tmp_path: Path, what: str, words: str) -> None:
    errors, said, bits, steps = run_ranks(ranks, tmp_path, what)
    assert errors == ("", "") and steps == (4, 4) and len(set(bits)) == 1
    assert len(said[0]) == 1 and words in said[0][0] and not said[1]


def test_left_over_gradients_of_ranks_add_up_as_those_of_one(ranks: RankPool, tmp_path: Path) -> None:
    (found, *_) = ranks.run(2, weights_left_over, tmp_path, process_group=True)
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 64, 16):
        mean_loss(model, INPUTS[start : start + 16], TARGETS[start : start + 16]).backward()
        optimizer.step()
    for mine, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def weights_left_over(rank: int, folder: Path) -> list[torch.Tensor]:
    model = shared(make_model(), 2)
    loader = ElasticDataLoader(TensorDataset(INPUTS, TARGETS), 4)
    trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    with trainer:
        for inputs, targets in loader:
            with trainer.step():
                mean_loss(model, inputs, targets).backward()
                optimizer.step()
    return [part.detach() for part in model.parameters()]


def test_graphs_that_ddp_holds_until_they_are_collected_are_not_kept(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, remarks_on_two, tmp_path, process_group=True) == [[], []]


def remarks_on_two(rank: int, folder: Path) -> list[str]:
    first, second = two_parts()
    model = nn.ModuleDict({"first": shared(first, 2), "second": shared(second, 2)})
    loader = loader_of("ours", 8)
    trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=16)
    optimizers = trainer.prepare([SGD(first.parameters(), lr=0.01), SGD(second.parameters(), lr=0.01)])
    with noted_remarks() as found:
        train_gan(trainer, loader, model, optimizers)
    return found


@contextmanager
def noted_remarks() -> Iterator[list[str]]:
    """What is said once, in a process that has no caplog."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("elastic_ext.training.remarks")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def train_gan(trainer: Any, loader: Any, model: Any, optimizers: Any) -> None:
    (first, second), generator, critic = optimizers, model["first"], model["second"]
    with trainer, trainer.epoch():
        for inputs, _ in loader:
            with trainer.step():
                second.zero_grad()
                made = generator(inputs)
                (critic(made.detach()).mean() - critic(inputs).mean()).backward()
                second.step()
                first.zero_grad()
                critic.requires_grad_(False)
                (-critic(made).mean()).backward()
                first.step()
                critic.requires_grad_(True)
