"""What a model's steps take of memory: the account of a step, lines through what was measured, and what can be told to
another process."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from torch import nn

from elastic_ext.profile.memory.analysis import why_not_fake, without_memory
from elastic_ext.profile.memory.extrapolation import correction, lines_through, sizes_up_to
from elastic_ext.profile.memory.live_bytes import LiveBytes
from elastic_ext.profile.memory.model_description import (
    batch_dim,
    describe,
    factory_of,
    from_description,
    names_of,
    num_bytes_of,
    optimizer_kinds,
    parameter_kinds,
)
from elastic_ext.profile.memory.peaks import PeakTally, Stage
from elastic_ext.profile.memory.questions import MainModule, Origin, origin_of
from elastic_ext.profile.memory.samples import MemorySample, Readiness, sample_on
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import MemoryFacts, PassesMemory
from tests.support import memory_models
from tests.support.memory_models import CLASSES, LENGTH

CPU = torch.device("cpu")
Batch = tuple[torch.Tensor, torch.Tensor]


def passes(size: int, forward: int = 0, loss: int = 0, backward: int = 0, ratio: float = 0.0) -> PassesMemory:
    return PassesMemory(
        micro_batch=size,
        activation_checkpoint=ratio,
        forward_bytes=forward,
        loss_bytes=loss,
        backward_bytes=backward,
        with_gradients_bytes=backward,
    )


def words(size: int) -> Batch:
    return torch.zeros(size, LENGTH, dtype=torch.int64), torch.zeros(size, LENGTH, dtype=torch.int64)


def pictures(size: int) -> Batch:
    return torch.zeros(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64)


def rows(size: int) -> Batch:
    return torch.zeros(size, 6), torch.zeros(size, dtype=torch.int64)


# --- an account of a step ---------------------------------------------------------------------------------------------


def test_each_stage_has_its_own_peak_and_gradients_are_counted_apart() -> None:
    tally = PeakTally()
    tally.count_given(8)
    tally.change(100)
    tally.peak(30)
    tally.enter("loss")
    tally.change(50)
    tally.change(-20)
    tally.enter("backward")
    tally.change(40)
    tally.keep_gradient(40)
    tally.change(-100)
    tally.change(60)
    tally.keep_gradient(60)
    tally.enter("update")
    tally.peak(70)
    tally.enter("after")
    tally.change(1000)
    peaks = tally.peaks
    assert (peaks.forward_bytes, peaks.loss_bytes, peaks.backward_bytes) == (138, 158, 178)
    assert peaks.with_gradients_bytes == 178  # of which 40 are a gradient
    assert peaks.update_bytes == 70


def test_what_was_there_before_is_counted_once() -> None:
    before, within = PeakTally(), PeakTally()
    before.count_given(100)
    within.change(120)  # what it is given, and something else
    within.count_given(100)
    assert (before.peaks.forward_bytes, within.peaks.forward_bytes) == (100, 120)


@given(
    strategies.lists(
        strategies.tuples(strategies.sampled_from(["forward", "loss", "backward"]), strategies.integers(-50, 50))
    )
)
def test_peaks_are_those_of_the_whole_account(changes: list[tuple[Stage, int]]) -> None:
    tally, held, most = PeakTally(), 0, {"forward": 0, "loss": 0, "backward": 0}
    for stage, num_bytes in changes:
        tally.enter(stage)
        most[stage] = max(most[stage], held)
        tally.change(num_bytes)
        held += num_bytes
        most[stage] = max(most[stage], held)
    peaks = tally.peaks
    assert (peaks.forward_bytes, peaks.loss_bytes, peaks.backward_bytes) == tuple(most.values())


def test_the_peak_of_a_job_is_the_larger_of_passes_and_the_optimizers_step() -> None:
    facts = MemoryFacts(
        source="fake",
        parameter_bytes=100,
        gradient_bytes=100,
        optimizer_bytes=200,
        buffer_bytes=5,
        update_bytes=30,
        scale=1.5,
        besides_bytes=7,
    )
    small, large = passes(1, 10, 20, 40), passes(8, 100, 300, 200)
    assert facts.peak_bytes(small, has_gradients=False) == 100 + 200 + 5 + 7 + 100 + 30
    assert facts.peak_bytes(large, has_gradients=False) == 312 + 450
    assert facts.peak_bytes(large, has_gradients=True) == 312 + 600


# --- lines through what was measured ----------------------------------------------------------------------------------


@given(strategies.lists(strategies.integers(1, 64), min_size=2, max_size=5, unique=True), strategies.integers(1, 256))
def test_lines_find_what_lies_on_lines(sizes: list[int], wanted: int) -> None:
    def at(size: int) -> PassesMemory:
        return passes(size, 1000 + 10 * size, 50 * size, 3000 + 5 * size)

    found = {each.micro_batch: each for each in lines_through([at(size) for size in sizes], [wanted])}
    if wanted <= 4 * max(sizes):
        assert found[wanted] == at(wanted)
    assert set(found) == {*sizes, *([wanted] if wanted <= 4 * max(sizes) else [])}


def test_a_size_is_not_told_less_than_a_smaller_one_takes() -> None:
    found = lines_through([passes(2, 100, 5, 70), passes(4, 90, 5, 80)], [8])
    assert found[-1] == passes(8, 90, 5, 100)


def test_of_one_size_a_larger_one_takes_in_proportion() -> None:
    found = lines_through([passes(2, 100, 6, 70, ratio=0.5), passes(2, 200, 6, 70)], [4, 16])
    assert found == (
        passes(2, 200, 6, 70),
        passes(4, 400, 12, 140),
        passes(2, 100, 6, 70, 0.5),
        passes(4, 200, 12, 140, 0.5),
    )


def test_what_was_worked_out_is_corrected_by_the_larger_of_two_sizes() -> None:
    worked_out = [passes(size, 100 * size, 0, 0) for size in (1, 2, 4, 8)]
    measured = [passes(1, 190), passes(2, 190), passes(4, 360)]
    assert correction(measured, worked_out, 0) == (0.95, "")
    assert correction([*measured, passes(8, 880)], worked_out, 0) == (1.1, "")


def test_one_size_alone_corrects_upwards_only() -> None:
    worked_out = [passes(4, 400), passes(4, 400, ratio=0.5)]
    assert correction([passes(4, 360)], worked_out, 0) == (1.0, "")
    assert correction([passes(4, 360), passes(4, 380, ratio=0.5)], worked_out, 0) == (1.0, "")
    assert correction([passes(4, 500)], worked_out, 0) == (1.25, "")
    assert correction([passes(16, 9000)], worked_out, 0) == (1.0, "")  # which was not worked out
    assert correction([], worked_out, 0) == (1.0, "")


@pytest.mark.parametrize("num_bytes", [199, 801])
def test_what_is_nothing_like_what_was_worked_out_is_of_another_model(num_bytes: int) -> None:
    scale, why_not = correction([passes(4, num_bytes)], [passes(4, 400)], 0)
    assert scale == 1.0 and f"steps of 4 samples take {num_bytes} bytes and 400 were predicted" in why_not


def test_sizes_begin_with_the_present_ones_and_end_with_the_share() -> None:
    assert sizes_up_to(20, 3, 4) == [3, 4, 1, 2, 8, 16, 20]
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(8, 100) == [1, 2, 4, 8]


# --- what tensors hold ------------------------------------------------------------------------------------------------


MODELS: list[Any] = [
    pytest.param(memory_models.attention, words, 1, id="attention, 1"),
    pytest.param(memory_models.attention, words, 8, id="attention, 8"),
    pytest.param(memory_models.layers, rows, 1, id="layers, 1"),
    pytest.param(memory_models.layers, rows, 8, id="layers, 8"),
    pytest.param(memory_models.convolutions, pictures, 8, id="convolutions, 8"),
    pytest.param(memory_models.convolutions, pictures, 32, id="convolutions, 32"),
    pytest.param(memory_models.recurrent, words, 8, id="recurrent, 8"),
    pytest.param(memory_models.recurrent, words, 32, id="recurrent, 32"),
]


def step(model: nn.Module, batch: Batch, enter: Callable[[Stage], None]) -> None:
    """A micro-step whose gradients are new."""
    outputs = model(batch[0])
    enter("loss")
    outputs.register_hook(lambda gradient: enter("backward"))
    loss = memory_models.cross_entropy(outputs, batch)
    del outputs
    loss.backward()  # type: ignore[no-untyped-call]
    enter("after")


def test_what_lay_there_before_the_first_pass_is_no_more_after_a_second_one() -> None:
    tally = PeakTally()
    assert tally.held_before_passes is None
    tally.enter("forward")  # its inputs were there before the micro-step
    tally.change(100)
    tally.enter("loss")
    tally.enter("forward")
    assert tally.held_before_passes == 0
    copied = PeakTally()
    copied.change(30)
    copied.enter("forward")
    assert copied.held_before_passes == 30


def accounted(model: nn.Module, batch: Batch) -> PeakTally:
    tally = PeakTally()
    with LiveBytes(tally) as live:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda part: live.keep_gradient(part.grad))  # type: ignore[no-untyped-call]
        step(model, batch, tally.enter)
    return tally


@pytest.mark.parametrize(("factory", "batch_of", "size"), MODELS)
def test_tensors_without_memory_tell_what_the_allocator_gives(
    factory: Callable[[], nn.Module], batch_of: Callable[[int], Batch], size: int
) -> None:
    with without_memory():
        worked_out = accounted(factory(), batch_of(size)).peaks
    model, batch = factory(), batch_of(size)
    step(model, batch, lambda stage: None)  # what is made once
    model.zero_grad()
    sample = sample_on(CPU, model.parameters())
    sample.begin()

    def enter(stage: Stage) -> None:
        if stage == "loss":
            sample.end_forward()
        else:
            sample.see(Phase.BACKWARD if stage == "backward" else Phase.OTHER)

    sample.see(Phase.FORWARD)
    step(model, batch, enter)
    measured = sample.end(0)
    assert measured is not None
    tolerance = 1e-3 if factory in (memory_models.attention, memory_models.layers) else 0.1
    for name in ("forward_bytes", "loss_bytes", "backward_bytes", "with_gradients_bytes"):
        assert getattr(worked_out, name) == pytest.approx(getattr(measured, name), rel=tolerance), name


def test_what_lies_there_before_is_none_of_the_steps() -> None:
    kept = torch.ones(1 << 12)
    tally = PeakTally()
    with LiveBytes(tally):
        kept.add_(1)
        view = kept[:10]
        copied = view.clone()
    assert (view.numel(), copied.numel()) == (10, 10)
    assert tally.peaks.forward_bytes == copied.untyped_storage().nbytes()


def test_this_torch_tells_of_tensors_without_memory_and_of_its_allocator() -> None:
    assert why_not_fake() is None
    assert Readiness(CPU).can_sample()
    elsewhere = Readiness(torch.device("meta"))
    assert not elsewhere.can_sample() and elsewhere.is_hopeless


def test_another_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._subclasses.fake_tensor as place

    monkeypatch.delattr(place, "FakeTensorMode")
    assert "has no FakeTensorMode that elastic_ext can use" in str(why_not_fake())


def test_another_torch_whose_tensors_tell_other_sizes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._subclasses.fake_tensor as place

    class Other(place.FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func = torch.ops.aten.expm1.default if func is torch.ops.aten.exp.default else func
            found: Any = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return found.double() if func is torch.ops.aten.expm1.default else found

    monkeypatch.setattr(place, "FakeTensorMode", Other)
    assert "as the peaks of the forward and the backward pass of a step whose peaks are" in str(why_not_fake())


def test_somebody_elses_profile_is_left_alone() -> None:
    readiness = Readiness(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not readiness.can_sample()
        assert readiness.is_refused and not readiness.is_hopeless
    assert not readiness.can_sample()  # it is asked again after a while


def test_garbage_of_an_earlier_step_is_not_given_back_in_a_sample() -> None:
    num_floats = 1 << 18

    def taken(act: Callable[[], object]) -> int:
        sample = sample_on(CPU, ())
        sample.begin()
        sample.see(Phase.FORWARD)
        kept = act(), torch.ones(num_floats)
        sample.end_forward()
        peaks = sample.end(0)
        assert peaks is not None and kept
        return peaks.forward_bytes

    def leave_a_circle() -> None:
        circle: list[object] = [torch.ones(num_floats)]
        circle.append(circle)

    gc.disable()
    try:
        taken(leave_a_circle)
        assert taken(gc.collect) >= 4 * num_floats
    finally:
        gc.enable()


def test_a_sample_that_cannot_be_begun_leaves_nothing_behind() -> None:
    class Refused:
        base_bytes: int | None = None

        def begin(self) -> None:
            raise RuntimeError("somebody else profiles")

        def enter(self, stage: Stage) -> None:
            raise AssertionError("it was not begun")

        def keep_gradient(self, num_bytes: int) -> None:
            raise AssertionError("it was not begun")

        def end(self, given_bytes: int) -> None:
            raise AssertionError("it was not begun")

    model = memory_models.layers()
    with pytest.raises(RuntimeError, match="somebody else profiles"):
        MemorySample(Refused(), model.parameters()).begin()
    model(rows(2)[0]).sum().backward()


# --- what another process is told -------------------------------------------------------------------------------------


def test_what_a_model_is_given_is_made_again_with_other_sizes() -> None:
    given = {
        "words": torch.zeros(4, 7, dtype=torch.int64),
        "mask": torch.ones(7, 7, dtype=torch.bool),
        "deep": [(1, None)],
    }
    tree = describe(given, 4, 0)
    with without_memory():
        made = from_description(tree, 32)
    assert made["words"].shape == (32, 7) and made["words"].dtype == torch.int64
    assert made["mask"].shape == (7, 7) and made["mask"].dtype == torch.bool
    assert made["deep"] == [(1, None)]
    assert num_bytes_of(tree, 32) == 32 * 7 * 8 + 49


def test_samples_may_be_counted_by_a_later_dimension() -> None:
    sequence = torch.zeros(9, 4, 3)
    assert batch_dim(((sequence,), {}), 4) == (1, 4)
    assert batch_dim(((torch.zeros(3, 9),), {}), 4) == (0, 3)  # a smaller one than the largest
    assert batch_dim(((5, "text"), {}), 4) is None
    assert from_description(describe(sequence, 4, 1), 16).shape == (9, 16, 3)


@pytest.mark.parametrize(
    ("value", "why"),
    [(object(), "a object"), ({1: 2}, "a dict"), (torch.eye(2).to_sparse(), "not dense"), ([[[[[[[1]]]]]]], "six")],
)
def test_what_cannot_be_told_is_said(value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        describe(value, 4, 0)


def nothing() -> None:
    """At the top of a module."""


shadowed = nothing


@functools.wraps(nothing)
def wrapped() -> None:
    """Which says that it is another."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "model_factory is 5; allowed: a function or class"),
        (lambda: None, "is a lambda .*; define it at the top of a module"),
        (functools.partial(nothing), "is a partial, and another process has to find it"),
        (wrapped, "but importing that name gives another object"),
        (memory_models.Attention().train, "but importing that name gives another object"),
    ],
)
def test_what_another_process_could_not_find_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        factory_of(given, None)


def test_a_function_within_another_is_refused() -> None:
    def local() -> nn.Module:
        return nn.Linear(1, 1)

    with pytest.raises(
        ValueError, match=r"model_factory is defined inside a function .*define it at the top of a module"
    ):
        factory_of(local, None)


def test_a_loss_alone_is_refused_and_nothing_is_nothing() -> None:
    with pytest.raises(ValueError, match="loss_fn was given without model_factory"):
        factory_of(None, memory_models.cross_entropy)
    assert factory_of(None, None) is None


def test_functions_and_classes_are_found_again() -> None:
    found = factory_of(memory_models.Recurrent, memory_models.cross_entropy)
    assert found is not None and found.main is None and found.loss is not None
    assert found.model.find() is memory_models.Recurrent
    assert Origin.from_json(found.loss.to_json()).find() is memory_models.cross_entropy


def main_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if a script had been started."""
    import types

    main: Any = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), None
    exec(compile(path.read_text(), str(path), "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def test_a_script_is_imported_without_its_main_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("def made(): return 7\nran = []\nif __name__ == '__main__':\n    ran.append(1)\n")
    origin, main = origin_of("model_factory", main_of(script, monkeypatch).made)
    assert main == MainModule(path=str(script))
    main.take_up()
    assert origin.find()() == 7
    assert sys.modules["__main__"].ran == []


def test_a_script_that_trains_as_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("def made(): return 7\nif len(__name__) == 3:\n    pass\n")
    with pytest.raises(ValueError, match="which has no `if __name__"):
        origin_of("model_factory", main_of(script, monkeypatch).made)


def test_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("def made(): return 7\n")
    main = main_of(script, monkeypatch)
    del main.__file__
    with pytest.raises(ValueError, match="defined in a notebook"):
        origin_of("model_factory", main.made)


def test_parameters_blocks_and_optimizers_are_told_by_their_names() -> None:
    model = memory_models.Attention(2)
    model.head.requires_grad_(False)
    kinds = {each.name: each for each in parameter_kinds(model)}
    assert kinds["table.weight"].shape == (CLASSES, 64) and kinds["table.weight"].is_trained
    assert not kinds["head.weight"].is_trained
    assert names_of(model, list(model.layers)) == ("layers.0", "layers.1")
    with pytest.raises(ValueError, match="a block that the model had is no longer a part of it"):
        names_of(model, [*model.layers, nn.Linear(2, 2)])
    groups: list[dict[str, Any]] = [
        {"params": [model.table.weight], "lr": torch.tensor(0.5)},
        {"params": [*model.layers.parameters()]},
    ]
    (kind,) = optimizer_kinds(model, [torch.optim.AdamW(groups, lr=0.1)], is_on_accelerator=True)
    assert (kind.name, kind.groups[0]["params"], kind.groups[0]["lr"]) == ("AdamW", ["table.weight"], 0.5)
    assert kind.groups[1]["foreach"] is True  # as torch chooses there by itself
    (kind,) = optimizer_kinds(model, [torch.optim.AdamW(groups, lr=0.1)], is_on_accelerator=False)
    assert kind.groups[1]["foreach"] is None


def test_of_an_optimizer_that_is_not_torchs_nothing_is_told() -> None:
    class Own(torch.optim.SGD):
        pass

    model = memory_models.layers()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), Own(model.parameters(), lr=0.1)]
    assert optimizer_kinds(model, optimizers, is_on_accelerator=False) == ()
    outside = [nn.Parameter(torch.ones(2))]
    assert optimizer_kinds(model, [torch.optim.SGD(outside, lr=0.1)], is_on_accelerator=False) == ()
