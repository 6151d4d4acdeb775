"""Every way to train gives the bits of the same training by hand: with one micro-batch per step and with several, while
the config changes, and where steps fail and are taken again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext import StepError
from tests.support.faults import PlantedFault
from tests.support.thinning import the_first
from tests.support.ways import (
    WAYS,
    Compiled,
    CompiledBlocks,
    CompiledByAot,
    CompiledCheckpointed,
    CompiledInPlace,
    GanInTurns,
    GanOfTutorials,
    Loop,
    Net,
    Setting,
    Way,
    by_hand,
    name_of,
    result_of,
    train,
)

# Of torch's own, where compiled blocks follow one another.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
WHOLE, IN_PARTS = Setting(micro_batch=8), Setting(micro_batch=2)
Kinds = pytest.mark.parametrize("kind", WAYS, ids=name_of)
COMPILED = (Compiled, CompiledByAot, CompiledInPlace, CompiledBlocks, CompiledCheckpointed)


def kinds_with(*compiled: type[Way]) -> pytest.MarkDecorator:
    """All kinds; of those that are compiled, which take most of the time, the others are left to the slow tests."""
    slow = [kind for kind in COMPILED if kind not in compiled]
    kinds = [pytest.param(kind, marks=pytest.mark.slow) if kind in slow else kind for kind in WAYS]
    return pytest.mark.parametrize("kind", kinds, ids=name_of)


@pytest.fixture(autouse=True)
def one_thread_and_no_graphs() -> Iterator[None]:
    """Threads that fight for the machine's few cores would take most of the time; every compiled model is new."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.set_num_threads(before)


# With several micro-batches per step each kind is trained below too, while the config changes or where steps fail.
@pytest.mark.parametrize(("setting", "num_steps"), the_first([(WHOLE, 12), (IN_PARTS, 5)]), ids=["whole", "in parts"])
@Kinds
def test_a_way_to_train_gives_the_bits_of_the_same_training_by_hand(
    tmp_path: Path, kind: type[Way], setting: Setting, num_steps: int
) -> None:
    plain, ours = kind(), kind()
    by_hand(plain, [setting] * num_steps)
    train(ours, tmp_path, setting, num_steps)
    assert result_of(ours) == result_of(plain)


class Limited(Way):
    """A hook that acts on a parameter's gradients, and not in proportion to them."""

    def make_model(self) -> nn.Module:
        model = Net()
        model.out.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
        return model


@pytest.mark.parametrize("shares_always", [True, False])
def test_hooks_on_parameters_see_gradients_as_by_hand(tmp_path: Path, shares_always: bool) -> None:
    plain, ours = Limited(), Limited()
    by_hand(plain, [IN_PARTS] * 3)
    train(ours, tmp_path, IN_PARTS, 3, sync_every_micro_step=shares_always)
    assert result_of(ours) == result_of(plain)


def test_an_optimizer_that_has_stepped_may_clear_its_gradients_before_the_others_step(tmp_path: Path) -> None:
    plain, ours = GanInTurns(), GanInTurns()
    by_hand(plain, [IN_PARTS] * 2)
    train(ours, tmp_path, IN_PARTS, 2)
    assert result_of(ours) == result_of(plain)


def test_gradients_that_one_model_leaves_in_the_other_are_cleared_or_the_loop_is_refused(tmp_path: Path) -> None:
    plain, ours = GanOfTutorials(), GanOfTutorials()
    by_hand(plain, [WHOLE] * 6)
    train(ours, tmp_path, WHOLE, 6)
    assert result_of(ours) == result_of(plain)
    with pytest.raises(StepError, match=r"keep gradients from them with requires_grad_\(False\)"):
        train(GanOfTutorials(), tmp_path, IN_PARTS, 2)


def changes(trainer: Any, loop: Loop) -> Iterator[None]:
    """Another rate, another global batch and another micro-batch, one after the other."""
    for step, changed in (
        (1, {"optimizer.learning_rate": 0.25}),
        (3, {"global_batch_size": 16}),
        (5, {"dataloader.batch_size": 4}),
        (7, {"global_batch_size": 4, "optimizer.learning_rate": 0.125}),
    ):
        while trainer.global_step < step:
            yield
        trainer.propose(changed, "to see what changes")
    while True:
        yield


@kinds_with(Compiled, CompiledCheckpointed)
def test_a_way_to_train_gives_the_bits_of_the_same_training_by_hand_while_the_config_changes(
    tmp_path: Path, kind: type[Way]
) -> None:
    plain, ours = kind(), kind()
    taken = train(ours, tmp_path, IN_PARTS, 10, around=changes)
    sizes = list(dict.fromkeys((step.global_batch, step.micro_batch) for step in taken))
    assert sizes == [(8, 2), (16, 2), (16, 4), (4, 4)]
    assert len({step.rates for step in taken}) >= 3 - (ours.scheduler is None)
    by_hand(plain, taken)
    assert result_of(ours) == result_of(plain)


class Faults:
    """Fails in step 1, at one place after the other, in a middle and in a last micro-step; the rest goes well."""

    def __init__(self, called: nn.Module) -> None:
        self.due = ""
        self.planted: list[tuple[str, int]] = []
        strike = torch.compiler.disable(self.strike)  # type: ignore[no-untyped-call]
        called.register_forward_hook(partial(strike, "in forward"))

    def around(self, trainer: Any, loop: Loop) -> Iterator[None]:
        backward, optimizer = loop.backward, loop.optimizers[0]

        def weak(loss: torch.Tensor) -> None:
            self.strike("in loss")
            backward(loss)

        loop.backward = weak  # type: ignore[method-assign]
        loop.optimizers[0] = WeakOptimizer(optimizer, self)
        while trainer.global_step == 0:
            yield
        for place in ("in forward", "in loss", "before optimizer"):
            for index in (1, 3):
                for _ in range(index):
                    yield
                self.due = place
                self.planted.append((place, index))
                yield
                assert not self.due
        while True:
            yield

    def strike(self, place: str, *given: Any) -> None:
        if place == self.due:
            self.due = ""
            raise PlantedFault(place)


class WeakOptimizer:
    """An optimizer of the loop, before whose step an exception may come."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def step(self) -> None:
        self._faults.strike("before optimizer")
        self._inner.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@kinds_with(CompiledByAot, CompiledInPlace, CompiledBlocks)
def test_a_way_to_train_gives_the_same_bits_where_steps_failed_and_were_taken_again(
    tmp_path: Path, kind: type[Way]
) -> None:
    plain, ours = kind(), kind()
    by_hand(plain, [IN_PARTS] * 4)
    faults = Faults(ours.called)
    train(ours, tmp_path, IN_PARTS, 4, catches=PlantedFault, around=faults.around, rollback="full")
    assert len(faults.planted) == 6
    assert result_of(ours) == result_of(plain)
