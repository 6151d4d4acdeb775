"""Gradients of a step's micro-batches against those of its whole batch at once, in fp64: what `loss.backward()` and
`trainer.backward(loss)` give for models and loops of every kind, and what is refused because it would be wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from elastic_ext import RanksError, StepError
from tests.support.ranks import RankPool
from tests.support.thinning import each_once
from tests.support.training import Slices, make_data, trainer_of

NUM_STEPS = 5  # more than the first ones, which are looked at closely
GLOBAL_BATCH = 7  # in micro-batches of 2, 2 and 3: their weights differ
MICRO_BATCH = 3
MOST_APART = 1e-13
Backward = Callable[..., None]
Ways = pytest.mark.parametrize("by_trainer", [False, True], ids=["plain", "by_trainer"])


pytestmark = pytest.mark.usefixtures("one_thread")


# --- a training, with and without a trainer -------------------------------------------------------------------------


class Training:
    """A model, what is trained besides, and the work on one batch: a mean over its samples goes backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make_model().double()
        self.outside = self.make_outside().double()

    def make_model(self) -> nn.Module:
        return Net()

    def make_outside(self) -> nn.Module:
        return nn.ModuleList()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(inputs), targets))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *self.outside.parameters()]

    @property
    def gradients(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]


class Net(nn.Module):
    """Classes, and what they were made from."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Any:
        return self.out(torch.tanh(self.hidden(inputs)))


def plain(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def whole(training: Training) -> list[list[Tensor]]:
    """The gradients of each step, from its whole batch at once."""
    optimizer = SGD(training.parameters, lr=0.1)
    data, found = make_data(NUM_STEPS * GLOBAL_BATCH), []
    for start in range(0, len(data[0]), GLOBAL_BATCH):
        part = slice(start, start + GLOBAL_BATCH)
        training.work(data[0][part], data[1][part], plain)
        found.append(training.gradients)
        optimizer.step()
        optimizer.zero_grad()
    return found


def in_parts(training: Training, folder: Path, *, by_trainer: bool, **arguments: Any) -> list[list[Tensor]]:
    """The gradients of each step, from its micro-batches."""
    source = Slices(make_data(NUM_STEPS * GLOBAL_BATCH), MICRO_BATCH)
    trainer = trainer_of(folder, training.model, source, global_batch_size=GLOBAL_BATCH, **arguments)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    found: list[list[Tensor]] = []
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                training.work(inputs, targets, trainer.backward if by_trainer else plain)
                if trainer.sync_gradients:
                    found.append(training.gradients)
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.global_step == NUM_STEPS
    assert trainer.num_micro_steps == 3
    return found


def farthest(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    """The largest deviation of a gradient, in parts of the largest of its tensor."""
    assert any(part.any() for step in theirs for part in step), "nothing was trained"
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()
        for step, other in zip(ours, theirs, strict=True)
        for a, b in zip(step, other, strict=True)
    )


def assert_exact(kind: type[Training], folder: Path, *, by_trainer: bool, **arguments: Any) -> None:
    """Its gradients are those of the whole batch."""
    apart = farthest(in_parts(kind(), folder, by_trainer=by_trainer, **arguments), whole(kind()))
    assert apart <= MOST_APART


def assert_refused(kind: type[Training], folder: Path) -> None:
    """`loss.backward()` is refused and says what to write; which gives the gradients of the whole batch."""
    with pytest.raises(StepError, match=r"call trainer\.backward\(loss\) instead of loss\.backward\(\)"):
        in_parts(kind(), folder, by_trainer=False)
    assert_exact(kind, folder, by_trainer=True)


def assert_not_wrong(kind: type[Training], folder: Path) -> None:
    """`loss.backward()` gives the gradients of the whole batch, or is refused; `trainer.backward(loss)` gives them."""
    assert_exact(kind, folder, by_trainer=True)
    try:
        apart = farthest(in_parts(kind(), folder, by_trainer=False), whole(kind()))
    except StepError:
        return
    assert apart <= MOST_APART


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


# --- what a model returns -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Plain:
    logits: Tensor
    hidden: Tensor
    size: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    hidden: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: a dataclass and a mapping of what is not None, whose items are attributes too."""

    def __post_init__(self) -> None:
        for each in fields(cast("Any", self)):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        whole: Any = super().__reduce__()
        kind, _, *remaining = whole
        return kind, tuple(getattr(self, each.name) for each in fields(cast("Any", self))), *remaining


@dataclass
class ClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


class Attributes(dict[str, Any]):
    """The dictionary whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Plainest:
    """An object of the user's."""

    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits = logits
        self.hidden = hidden


PACKED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Iterable[Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list in dict": (lambda a, b: {"all": [a, None, "name", (b,)]}, lambda out: (out["all"][0], out["all"][3][0])),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda out: out.values()),
    "named tuple": (Pair, lambda out: (out.logits, out.hidden)),
    "dataclass": (Plain, lambda out: (out.logits, out.hidden)),
    "frozen dataclass": (Frozen, lambda out: (out.logits, out.hidden)),
    "hugging face, attributes": (lambda a, b: ClassifierOutput(None, a, b), lambda out: (out.logits, out.hidden)),
    "hugging face, items": (lambda a, b: ClassifierOutput(None, a, b), lambda out: (out["logits"], out[1])),
    "dict with attributes": (lambda a, b: Attributes(a=a, b=b), lambda out: (out.a, out["b"])),
    "user dict": (lambda a, b: UserDict(a=a, b=b), lambda out: (out["a"], out["b"])),
    "packed sequence": (
        lambda a, b: (nn.utils.rnn.PackedSequence(a, torch.tensor([len(a)])), b),
        lambda out: (out[0].data, out[1]),
    ),
    "torch's own": (lambda a, b: (a, b.max(dim=1)), lambda out: (out[0], out[1].values)),
    "twice the same": (lambda a, b: (a, b, b), lambda out: (out[0], (out[1] + out[2]) / 2)),
    "one a view of another": (lambda a, b: (a, b, b[:, :3]), lambda out: (out[0], out[2])),
}


def halves(out: Any) -> Iterable[Tensor]:
    return out[0], out[1].to_dense()


PACKED["sparse"] = (lambda a, b: (a, b.to_sparse()), halves)


def packed(name: str) -> type[Training]:
    pack, unpack = PACKED[name]

    class Packed(Training):
        def make_model(self) -> nn.Module:
            class Model(Net):
                def forward(self, inputs: Tensor) -> Any:
                    hidden = torch.tanh(self.hidden(inputs))
                    return pack(self.out(hidden), hidden)

            return Model()

        def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
            logits, hidden = unpack(self.model(inputs))
            backward(cross_entropy(logits, targets) + hidden.square().mean())

    return Packed


@Ways
@pytest.mark.parametrize("name", PACKED)
def test_outputs_of_every_kind_are_weighed(tmp_path: Path, name: str, by_trainer: bool) -> None:
    assert_exact(packed(name), tmp_path, by_trainer=by_trainer)


OPAQUE: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Iterable[Tensor]]]] = {
    "namespace": (lambda a, b: (a, SimpleNamespace(b=b)), lambda out: (out[0], out[1].b)),
    "object": (lambda a, b: (a, Plainest(a, b)), lambda out: (out[0], out[1].hidden)),
    "distribution": (
        lambda a, b: (torch.distributions.Normal(b, 1.0), a),
        lambda out: (out[1], out[0].log_prob(torch.zeros(()))),
    ),
}


# --- how a model is called ------------------------------------------------------------------------------------------


class OwnLoss(Training):
    """As Hugging Face's models: labels go in, the loss comes out beside the logits."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
                logits = super().forward(inputs)
                return ClassifierOutput(None if labels is None else cross_entropy(logits, labels), logits)

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        out = self.model(inputs, labels=targets)
        backward(out.loss + 0.1 * out.logits.square().mean())


class TwoCalls(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        first, second = self.model(inputs), self.model(-inputs)
        backward(cross_entropy(first, targets) + (first - second).square().mean())


class TwoBackwards(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(inputs), targets))
        backward(self.model(-inputs).square().mean())


class OneGraphTwice(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs)
        backward(cross_entropy(logits, targets), retain_graph=True)
        backward(logits.square().mean())


class SomeParametersOnly(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(inputs), targets), inputs=list(self.model.parameters())[:2])


class SeveralLosses(Training):
    """A gradient given for each sample's own loss."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        losses = cross_entropy(self.model(inputs), targets, reduction="none")
        backward(losses, gradient=torch.full_like(losses, 1 / len(losses)))


class Evaluated(Training):
    """Looked at without gradients before and between, and with gradients that nothing becomes of."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        with torch.no_grad():
            before = self.model(inputs)
        logits = self.model(inputs)
        with torch.inference_mode():
            self.model(inputs).square_()
        unused = self.model(2 * inputs).detach()
        backward(cross_entropy(logits, targets) + (logits * (before + unused)).mean())


class Frozen1(Training):
    def make_model(self) -> nn.Module:
        model = Net()
        model.hidden.requires_grad_(False)
        return model


class Tied(Training):
    def make_model(self) -> nn.Module:
        first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)


class Checkpointed(Training):
    reentrant = False

    def make_model(self) -> nn.Module:
        reentrant = self.reentrant

        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                hidden = self.hidden(inputs)
                return self.out(checkpoint(torch.tanh, hidden, use_reentrant=reentrant))

        return Model()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class WholeCheckpointed(Training):
    reentrant = False

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        inputs = inputs.clone().requires_grad_()
        backward(cross_entropy(checkpoint(self.model, inputs, use_reentrant=self.reentrant), targets))


class WholeCheckpointedReentrant(WholeCheckpointed):
    reentrant = True


class WithHooks(Training):
    """Hooks of the user's own on the model, on its output and on a parameter."""

    def make_model(self) -> nn.Module:
        model = Net()
        model.register_full_backward_hook(lambda module, gave, got: None)
        model.hidden.register_full_backward_hook(lambda module, gave, got: None)
        model.register_forward_hook(lambda module, inputs, output: output * 2)
        model.out.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        return model

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs.clone().requires_grad_())
        logits.register_hook(lambda gradient: gradient * 0.5)
        logits.retain_grad()
        backward(cross_entropy(logits, targets))


class Retried(Training):
    """A call that fails on its way, and is made again."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            num_calls = 0

            def forward(self, inputs: Tensor) -> Any:
                logits = super().forward(inputs)
                self.num_calls += 1
                if self.num_calls % 2:
                    raise MemoryError
                return logits

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        with suppress(MemoryError):
            self.model(inputs)
        backward(cross_entropy(self.model(inputs), targets))


class Compiled(Training):
    """In one piece, which nothing of what is done around the model is a part of."""

    def make_model(self) -> nn.Module:
        compiled = torch.compile(Net(), backend="eager", fullgraph=True, dynamic=True)
        return cast("nn.Module", compiled)


class CompiledInPlace(Compiled):
    def make_model(self) -> nn.Module:
        model = Net()
        model.compile(backend="eager", fullgraph=True, dynamic=True)
        return model


class Functional(Training):
    """Called with parameters that a network outside made."""

    def make_outside(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(8))])

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        made = {"hidden.bias": next(self.outside.parameters()).tanh()}
        backward(cross_entropy(torch.func.functional_call(self.model, made, (inputs,)), targets))


ALIKE = [
    Training,
    OwnLoss,
    TwoCalls,
    TwoBackwards,
    OneGraphTwice,
    SomeParametersOnly,
    SeveralLosses,
    Evaluated,
    Frozen1,
    Tied,
    Checkpointed,
    CheckpointedReentrant,
    WholeCheckpointed,
    WholeCheckpointedReentrant,
    WithHooks,
    Retried,
    Compiled,
    CompiledInPlace,
]


@Ways
@pytest.mark.parametrize("kind", ALIKE, ids=name_of)
def test_micro_batches_count_as_their_part_of_the_whole_batch(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


# --- models that are called on what they returned -------------------------------------------------------------------


class Cell(nn.Module):
    """One step of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2, 5)
        self.over = nn.Linear(5, 5)

    def forward(self, inputs: Tensor, state: Any = None) -> Any:
        return torch.tanh(self.into(inputs) + (0 if state is None else self.over(state)))


class Recurrent(Training):
    """Three steps of a cell over each sample; what it is called with is made of what it returned."""

    def make_model(self) -> nn.Module:
        return Cell()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        state, total = self.first(inputs), torch.zeros((), dtype=inputs.dtype)
        for part in torch.split(inputs, 2, dim=1):
            state = self.call(part, state)
            total = total + state.square().mean()
            state = self.carry(state)
        backward(cross_entropy(state, targets) + total)

    def first(self, inputs: Tensor) -> Any:
        return None

    def call(self, part: Tensor, state: Any) -> Any:
        return self.model(part, state)

    def carry(self, state: Any) -> Any:
        return state


class ByKeyword(Recurrent):
    def call(self, part: Tensor, state: Any) -> Any:
        return self.model(part, state=state)


class FromParameter(Recurrent):
    """The first state is trained too, outside of the model."""

    def make_outside(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(1, 5))])

    def first(self, inputs: Tensor) -> Any:
        return next(self.outside.parameters())


class Halved(Recurrent):
    def carry(self, state: Any) -> Any:
        return torch.stack([state, -state]).sum(0) * 0.5 + state * 0.5


class Noted(Recurrent):
    """Its state's gradient is looked at, and kept."""

    def carry(self, state: Any) -> Any:
        state.retain_grad()
        state.register_hook(lambda gradient: None)
        return state


class Clipped(Recurrent):
    """Its state's gradient is clipped on its way back: at 0, which is the same for a part as for the whole."""

    def carry(self, state: Any) -> Any:
        state.register_hook(lambda gradient: gradient.clamp(min=0))
        return state


class Nested(Recurrent):
    """A state that is a list of a tuple in a dictionary."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return {"of": [(super().forward(inputs, None if state is None else state["of"][0][0]),)]}

        return Model()

    def call(self, part: Tensor, state: Any) -> Any:
        return self.model(part, None if state is None else {"of": [(state,)]})["of"][0][0]


class Remembering(Recurrent):
    """It is called with everything that it returned so far."""

    def first(self, inputs: Tensor) -> Any:
        self.memory: list[Tensor] = []
        return None

    def call(self, part: Tensor, state: Any) -> Any:
        state = None if state is None else torch.stack(self.memory).mean(0)
        self.memory.append(self.model(part, state))
        return self.memory[-1]


class Inside(Recurrent):
    """The state stays in the model."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            state: Tensor | None = None

            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                self.state = super().forward(inputs, self.state)
                return self.state

        return Model()

    def first(self, inputs: Tensor) -> Any:
        cast("Any", getattr(self.model, "module", self.model)).state = None  # DDP has it within
        return None


class CutOff(Recurrent):
    """As in truncated backpropagation: nothing goes back to the steps before."""

    def carry(self, state: Any) -> Any:
        return state.detach()


class CutOffInPlace(Training):
    """Cut off in place, where nothing else has kept the state for its own way back."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return super().forward(inputs, state) * 2

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        state = self.model(inputs[:, :2]).detach_()
        backward(cross_entropy(self.model(inputs[:, 2:4], state), targets))


class CheckpointedSteps(Recurrent):
    def call(self, part: Tensor, state: Any) -> Any:
        return checkpoint(self.model, part, state, use_reentrant=False)


class Recursive(Training):
    """A tree: the model calls itself on its branches."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                if inputs.shape[1] == 2:
                    return super().forward(inputs)
                return super().forward(inputs[:, :2], self(inputs[:, 2:]) * 0.5)

        return Model()


class SharedPart(Training):
    """A model that only holds others, one of which is in another."""

    def make_model(self) -> nn.Module:
        body = nn.Linear(6, 6)
        return nn.ModuleDict({"body": body, "all": nn.Sequential(body, nn.Tanh(), nn.Linear(6, 5))})

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        parts = cast("Any", self.model)
        backward(cross_entropy(parts["all"](inputs), targets) + parts["body"](inputs).square().mean())


class HeldTwice(Training):
    """A part that is in two containers."""

    def make_model(self) -> nn.Module:
        part = Net()
        return nn.ModuleDict({"a": nn.ModuleList([part]), "b": nn.ModuleList([part])})

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(cast("Any", self.model)["a"][0](inputs), targets))


CALLED_AGAIN = [
    Recurrent,
    ByKeyword,
    FromParameter,
    Halved,
    Noted,
    Clipped,
    Nested,
    Remembering,
    Inside,
    CutOff,
    CutOffInPlace,
    CheckpointedSteps,
    Recursive,
    SharedPart,
    HeldTwice,
]


@Ways
@pytest.mark.parametrize("kind", CALLED_AGAIN, ids=name_of)
def test_every_path_through_a_model_that_is_called_often_counts_once(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


class CheckpointedStepsReentrant(Recurrent):
    def first(self, inputs: Tensor) -> Any:
        return torch.zeros(len(inputs), 5, dtype=inputs.dtype, requires_grad=True)

    def call(self, part: Tensor, state: Any) -> Any:
        return checkpoint(self.model, part, state, use_reentrant=True)


def test_a_path_that_cannot_be_followed_is_refused_if_it_does_not_count_once(tmp_path: Path) -> None:
    assert_not_wrong(CheckpointedStepsReentrant, tmp_path)


class CarriedOver(Training):
    """The state goes on from one micro-batch of a step to the next, with its graph."""

    num_calls = 0
    last: Tensor | None = None

    def make_model(self) -> nn.Module:
        return Cell()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        state = self.model(inputs[:, :2], None if self.num_calls % 3 == 0 else self.last)
        self.num_calls += 1
        self.last = self.model(inputs[:, 2:4], state).mean(dim=0, keepdim=True)
        backward(cross_entropy(self.last + state, targets), retain_graph=True)


class Normalised(Training):
    """Batch norm: a micro-batch is normalised by itself."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=1.0), nn.Tanh(), nn.Linear(8, 5))


class Contrasted(Training):
    """Samples of a micro-batch against one another."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        first, second = self.model(inputs), self.model(inputs.roll(1, dims=1))
        backward(cross_entropy(first @ second.T, torch.arange(len(inputs))))


def by_hand(training: Training) -> list[list[Tensor]]:
    """The gradients of each step, from its micro-batches, each loss times its micro-batch's share of the samples."""
    optimizer = SGD(training.parameters, lr=0.1)
    data, found = make_data(NUM_STEPS * GLOBAL_BATCH), []
    for start in range(0, len(data[0]), GLOBAL_BATCH):
        for first, last in ((0, 2), (2, 4), (4, 7)):
            share = (last - first) / GLOBAL_BATCH
            part = slice(start + first, start + last)
            training.work(
                data[0][part], data[1][part], lambda loss, share=share, **options: plain(loss * share, **options)
            )
        found.append(training.gradients)
        optimizer.step()
        optimizer.zero_grad()
    return found


@Ways
@pytest.mark.parametrize("kind", [Training, CarriedOver, Normalised, Contrasted], ids=name_of)
def test_losses_that_are_no_means_over_samples_are_weighed_as_by_hand(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    ours = in_parts(kind(), tmp_path, by_trainer=by_trainer)
    assert farthest(ours, by_hand(kind())) <= MOST_APART


# --- outputs that are changed in place, leaves, or inputs -----------------------------------------------------------


class InPlace(Training):
    """The output is scaled and masked where it is."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs)
        logits.div_(2.0)
        logits[:, 4:] = -1.0
        backward(cross_entropy(logits, targets % 4))


class InPlaceOfTwo(Training):
    """One of two outputs is changed in place, and both go into the loss."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                hidden = self.hidden(inputs)
                return self.out(torch.tanh(hidden)), hidden

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits, hidden = self.model(inputs)
        backward(cross_entropy(logits, targets) + hidden.mul_(0.5).square().mean())


class InPlaceLater(Training):
    """Only some micro-batches' outputs are."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs)
        if len(inputs) != 2:
            logits.mul_(1.0)
        backward(cross_entropy(logits, targets))


class InPlaceUntracked(Training):
    """Values are changed without gradients knowing."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs)
        with torch.no_grad():
            logits.clamp_(-1.0, 1.0)
        backward(cross_entropy(logits, targets))


class InPlaceState(Recurrent):
    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return super().forward(inputs, state) + 0

        return Model()

    def call(self, part: Tensor, state: Any) -> Any:
        return self.model(part, state).mul_(0.5)


class ReturnsInput(Training):
    """Beside its logits it returns what it was given, a parameter, and a leaf that is nobody's."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                return super().forward(inputs), inputs, self.out.bias, torch.ones(5).double().requires_grad_()

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        inputs = inputs.clone().requires_grad_()
        logits, same, bias, leaf = self.model(inputs)
        assert same.requires_grad and torch.equal(same, inputs)
        backward(cross_entropy(logits, targets) + (same[:, :5] * bias * leaf).mean())


class ReturnsParameter(Recurrent):
    """The first state is a parameter of the model's own, which goes out as it is and comes in again."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def __init__(self) -> None:
                super().__init__()
                self.begin = nn.Parameter(torch.randn(1, 5))

            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return self.begin if state is None else super().forward(inputs, state)

        return Model()

    def first(self, inputs: Tensor) -> Any:
        return self.model(inputs)


class OwnParameterGiven(Recurrent):
    """The first state is a parameter of the model's own, which the loop gives it, or what its parts made."""

    def first(self, inputs: Tensor) -> Any:
        model = cast("Any", self.model)
        return model.over.bias + model.over(model.into(inputs[:, :2]))


class ReturnsState(Recurrent):
    """What comes in goes out as it is."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return super().forward(inputs, state) if state is None else state

        return Model()


@Ways
@pytest.mark.parametrize(
    "kind",
    [
        InPlace,
        InPlaceOfTwo,
        InPlaceLater,
        InPlaceUntracked,
        InPlaceState,
        ReturnsInput,
        ReturnsState,
        ReturnsParameter,
        OwnParameterGiven,
    ],
    ids=name_of,
)
def test_outputs_that_change_or_are_no_results_count_as_their_part(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


def test_an_output_that_backward_needs_may_not_change_in_place(tmp_path: Path) -> None:
    class Saved(Training):
        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh())

        def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
            backward(cross_entropy(self.model(inputs).mul_(2.0), targets))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        whole(Saved())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_parts(Saved(), tmp_path, by_trainer=False)


# --- what is outside of the model -----------------------------------------------------------------------------------


class Encoded(Training):
    """What the model is called with is trained too."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def make_outside(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(self.outside(inputs)), targets))


class EncodedTwice(Encoded):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        encoded = self.outside(inputs)
        backward(cross_entropy(self.model(encoded) + self.model(-encoded), targets))


class EncodedSteps(Recurrent):
    """A recurrent model whose inputs are made outside."""

    def make_outside(self) -> nn.Module:
        return nn.Linear(2, 2)

    def call(self, part: Tensor, state: Any) -> Any:
        return self.model(self.outside(part), state)


@Ways
@pytest.mark.parametrize("kind", [Encoded, EncodedTwice, EncodedSteps], ids=name_of)
def test_what_makes_the_inputs_is_trained_as_a_part_of_the_model(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


class Gated(Recurrent):
    """Its state passes through something that is trained, outside of the model."""

    def make_outside(self) -> nn.Module:
        return nn.Linear(5, 5)

    def carry(self, state: Any) -> Any:
        return self.outside(state)


class Mixed(Recurrent):
    """Its state is joined with something that is trained, outside of the model."""

    def make_outside(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.randn(5))])

    def carry(self, state: Any) -> Any:
        return state * next(self.outside.parameters())


class MixedInside(Recurrent):
    """Its state is joined with a parameter of the model's own, outside of its forward."""

    def carry(self, state: Any) -> Any:
        return state * cast("Any", self.model).over.bias


@pytest.mark.parametrize("kind", [Gated, Mixed], ids=name_of)
def test_a_state_that_is_changed_by_what_is_trained_is_followed_or_asks_for_trainer_backward(
    tmp_path: Path, kind: type[Training]
) -> None:
    assert_not_wrong(kind, tmp_path)


def test_a_state_that_is_joined_with_the_models_own_parameters_asks_for_trainer_backward(tmp_path: Path) -> None:
    assert_refused(MixedInside, tmp_path)


class Headed(Training):
    """What makes a loss of the outputs is trained too."""

    def make_outside(self) -> nn.Module:
        return nn.Linear(5, 5)

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.outside(self.model(inputs)), targets))


class Tempered(Training):
    """As the logits' scale in CLIP."""

    def make_outside(self) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.zeros(()))])

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(inputs) * next(self.outside.parameters()).exp(), targets))


class EncodedAndSeen(Encoded):
    """What makes the inputs has a part in the loss of its own."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        encoded = self.outside(inputs)
        backward(cross_entropy(self.model(encoded), targets) + encoded.square().mean())


@pytest.mark.parametrize("kind", [Headed, Tempered, EncodedAndSeen, Functional], ids=name_of)
def test_what_is_trained_around_the_model_is_weighed_or_asks_for_trainer_backward(
    tmp_path: Path, kind: type[Training]
) -> None:
    assert_not_wrong(kind, tmp_path)


# --- losses that go around the outputs ------------------------------------------------------------------------------


class PartCalled(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        model = cast("Any", self.model)
        backward(cross_entropy(model.out(torch.tanh(model.hidden(inputs))), targets))


class ForwardCalled(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model.forward(inputs), targets))


class Scripted(Training):
    """A scripted module takes no hooks."""

    def make_model(self) -> nn.Module:
        return cast("nn.Module", torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))))


class OfParameters(Training):
    """The model is called, and the loss knows nothing of it."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        self.model(inputs)
        backward(torch.stack([part.square().sum() for part in self.parameters]).sum())


class OfObject(Training):
    """The output is something that cannot be looked into."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                return SimpleNamespace(logits=super().forward(inputs))

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(cross_entropy(self.model(inputs).logits, targets))


class OfDistribution(Training):
    """Policies return distributions."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                return torch.distributions.Categorical(logits=super().forward(inputs))

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        backward(-self.model(inputs).log_prob(targets).mean())


@pytest.mark.parametrize("kind", [PartCalled, ForwardCalled, OfParameters, OfObject], ids=name_of)
def test_a_loss_around_the_outputs_asks_for_trainer_backward(tmp_path: Path, kind: type[Training]) -> None:
    assert_refused(kind, tmp_path)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_model_asks_for_trainer_backward(tmp_path: Path) -> None:
    assert_refused(Scripted, tmp_path)


class OfDistributionAndValue(Training):
    """An actor and a critic in one."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                logits = super().forward(inputs)
                return torch.distributions.Categorical(logits=logits), logits.sum(dim=1)

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        policy, value = self.model(inputs)
        backward(value.square().mean() - policy.log_prob(targets).mean())


class OfObjectAndTensor(Training):
    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                logits = super().forward(inputs)
                return logits, SimpleNamespace(size=logits.square().mean())

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits, other = self.model(inputs)
        backward(cross_entropy(logits, targets) + other.size)


class OfForwardSometimes(Training):
    """The first micro-batch goes through the model's outputs, the last around them."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        call = self.model.forward if len(inputs) == 3 else self.model
        backward(cross_entropy(call(inputs), targets))


@pytest.mark.parametrize(
    "kind", [OfDistribution, OfDistributionAndValue, OfObjectAndTensor, OfForwardSometimes], ids=name_of
)
def test_a_loss_partly_around_the_outputs_is_weighed_or_asks_for_trainer_backward(
    tmp_path: Path, kind: type[Training]
) -> None:
    assert_not_wrong(kind, tmp_path)


class Regularised(Training):
    """Its parameters are in the loss by themselves."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        weights = torch.stack([part.square().sum() for part in self.parameters]).sum()
        backward(cross_entropy(self.model(inputs), targets) + 0.01 * weights)


class LossInside(Training):
    """A part of the loss is left in the model, as by mixtures of experts."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor) -> Any:
                self.balance = self.hidden(inputs).square().mean()
                return super().forward(inputs)

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits = self.model(inputs)
        backward(cross_entropy(logits, targets) + cast("Any", self.model).balance)


@pytest.mark.parametrize("kind", [Regularised, LossInside], ids=name_of)
def test_trainer_backward_is_exact_where_a_part_of_the_loss_goes_around_the_outputs(
    tmp_path: Path, kind: type[Training]
) -> None:
    assert_exact(kind, tmp_path, by_trainer=True)


# --- gradients of gradients -----------------------------------------------------------------------------------------


class Penalised(Training):
    """A gradient penalty."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        inputs = inputs.clone().requires_grad_()
        logits = self.model(inputs)
        (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        backward(cross_entropy(logits, targets) + slope.square().sum(dim=1).mean())


class PenalisedAlone(Penalised):
    """Nothing but the penalty, of outputs that the loss does not see."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        inputs = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.model(inputs).square().sum(), inputs, create_graph=True)
        backward((slope.square().sum(dim=1) - 1).square().mean())


class PenalisedFirst(Penalised):
    """In a backward pass of its own, before that of the loss."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        PenalisedAlone.work(cast("Any", self), inputs, targets, backward)
        backward(cross_entropy(self.model(inputs), targets))


class PenalisedByBackward(Penalised):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        loss = cross_entropy(self.model(inputs), targets)
        slopes = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        backward(loss + 0 * torch.stack([slope.square().sum() for slope in slopes]).sum())


class Adapted(Training):
    """A step of descent within the loss, as in meta-learning, on samples that are the same in every micro-batch."""

    second_order = True

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        support = make_data(5, seed=3)
        names = dict(self.model.named_parameters())
        loss = cross_entropy(self.model(support[0]), support[1])
        slopes = torch.autograd.grad(loss, list(names.values()), create_graph=self.second_order)
        adapted = {name: part - 0.1 * slope for (name, part), slope in zip(names.items(), slopes, strict=True)}
        backward(cross_entropy(torch.func.functional_call(self.model, adapted, (inputs,)), targets))


class FunctionalGradient(Training):
    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        slope = cast("Tensor", torch.func.grad(lambda given: self.model(given).square().sum())(inputs))
        backward(cross_entropy(self.model(inputs), targets) + slope.square().sum(dim=1).mean())


@pytest.mark.parametrize(
    "kind", [Penalised, PenalisedAlone, PenalisedFirst, PenalisedByBackward, Adapted, FunctionalGradient], ids=name_of
)
def test_a_gradient_of_a_gradient_asks_for_trainer_backward(tmp_path: Path, kind: type[Training]) -> None:
    assert_refused(kind, tmp_path)


class AdaptedFirstOrder(Adapted):
    second_order = False


class Adversarial(Training):
    """Inputs are moved along their gradient, which has no graph."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        inputs = inputs.clone().requires_grad_()
        loss = cross_entropy(self.model(inputs), targets, reduction="sum")
        (slope,) = torch.autograd.grad(loss, inputs)
        backward(cross_entropy(self.model((inputs + 0.3 * slope).detach()), targets))


@pytest.mark.parametrize("kind", [AdaptedFirstOrder, Adversarial], ids=name_of)
def test_a_gradient_that_the_loop_computes_for_itself_is_not_weighed(tmp_path: Path, kind: type[Training]) -> None:
    assert_not_wrong(kind, tmp_path)


# --- several optimizers ---------------------------------------------------------------------------------------------


def make_gan() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "maker": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)),
            "critic": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        }
    ).double()


Losses = Callable[[Any, Tensor, Any, Backward], None]


def at_once(gan: Any, real: Tensor, optimizers: Any, backward: Backward) -> None:
    """Both losses in one, the maker's through the critic as it is."""
    made = gan["maker"](real)
    loss = gan["critic"](made.detach()).mean() - gan["critic"](real).mean() + (made - real).square().mean()
    backward(loss, retain_graph=True)
    gan["critic"].requires_grad_(False)
    backward(-gan["critic"](made * 0.5 + 0.1).mean())
    gan["critic"].requires_grad_(True)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def one_after_the_other(gan: Any, real: Tensor, optimizers: Any, backward: Backward) -> None:
    """As in many tutorials: what the maker's loss leaves in the critic is cleared before the critic's own."""
    maker, critic = optimizers
    made = gan["maker"](real)
    critic.zero_grad()
    backward(gan["critic"](made.detach()).square().mean() - gan["critic"](real).mean())
    critic.step()
    maker.zero_grad()
    backward(-gan["critic"](made).mean())
    maker.step()


def gan_in_parts(folder: Path, losses: Losses, *, by_trainer: bool, num_parts: int = 3) -> list[Tensor]:
    """The gradients that each optimizer steps with, of one step."""
    gan, found = make_gan(), list[Tensor]()
    source = Slices(make_data(6), 6 // num_parts)
    trainer = trainer_of(folder, gan, source, global_batch_size=6)
    parts = [list(gan["maker"].parameters()), list(gan["critic"].parameters())]
    optimizers = trainer.prepare([SGD(part, lr=0.0) for part in parts])
    for optimizer, part in zip(optimizers, parts, strict=True):
        note = [(lambda *_, each=each: found.append(each.grad.clone())) for each in part]
        for one in note:
            optimizer.register_step_pre_hook(one)
    with trainer, trainer.epoch():
        for real, _ in source:
            with trainer.step():
                losses(gan, real, optimizers, trainer.backward if by_trainer else plain)
    assert trainer.global_step == 1
    return found


@Ways
def test_two_optimizers_on_one_pass_through_both_models(tmp_path: Path, by_trainer: bool) -> None:
    ours = gan_in_parts(tmp_path, at_once, by_trainer=by_trainer)
    assert farthest([ours], [gan_in_parts(tmp_path, at_once, by_trainer=False, num_parts=1)]) <= MOST_APART


@Ways
def test_gradients_that_a_loop_clears_in_every_micro_batch_are_cleared_or_the_loop_is_refused(
    tmp_path: Path, by_trainer: bool
) -> None:
    right = gan_in_parts(tmp_path, one_after_the_other, by_trainer=False, num_parts=1)
    try:
        ours = gan_in_parts(tmp_path, one_after_the_other, by_trainer=by_trainer)
    except StepError:
        return
    assert farthest([ours], [right]) <= MOST_APART


class ClearedByModel(Training):
    """`model.zero_grad()`, which no trainer sees."""

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        loss = cross_entropy(self.model(inputs), targets)
        self.model.zero_grad()
        backward(loss)


@Ways
def test_gradients_that_the_model_forgets_within_a_step_are_missed(tmp_path: Path, by_trainer: bool) -> None:
    with pytest.raises(StepError, match="zero_grad"):
        in_parts(ClearedByModel(), tmp_path, by_trainer=by_trainer)


# --- norms, items, and what stays behind ----------------------------------------------------------------------------


@Ways
def test_clipping_by_torch_and_by_the_trainer_sees_the_norm_of_the_whole_batch(
    tmp_path: Path, by_trainer: bool
) -> None:
    inputs, targets = make_data(GLOBAL_BATCH)
    training = Training()
    plain(cross_entropy(training.model(inputs), targets))
    whole_norm = nn.utils.clip_grad_norm_(training.parameters, 1e-3)
    clipped = training.gradients

    training, norms = Training(), list[Tensor | None]()
    source = Slices((inputs, targets), MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    with trainer, trainer.epoch():
        for part in source:
            with trainer.step():
                loss = cross_entropy(training.model(part[0]), part[1])
                trainer.backward(loss) if by_trainer else plain(loss)
                norms.append(trainer.clip_grad_norm_(training.parameters, 1e3))
                if trainer.sync_gradients:
                    norms.append(nn.utils.clip_grad_norm_(training.parameters, 1e-3))
                    assert farthest([training.gradients], [clipped]) <= MOST_APART
                optimizer.step()
    assert norms[:2] == [None, None]
    assert [norm.item() for norm in norms[2:] if norm is not None] == pytest.approx([whole_norm.item()] * 2, rel=1e-13)


class Tokens(Training):
    """Sums over tokens, of which samples have unequally many: with the targets below 2 left out."""

    def sums(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        kept = targets >= 2
        losses = cross_entropy(self.model(inputs), targets, reduction="none") * targets
        return losses[kept].sum(), int(targets[kept].sum())


def of_all_tokens(training: Tokens, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    """The gradient of the mean over the tokens of one step's samples."""
    total, num_tokens = training.sums(inputs, targets)
    plain(total / num_tokens)
    return [training.gradients]


Count = Callable[[int], Any]


@pytest.mark.parametrize(
    "count",
    [int, float, torch.tensor, lambda n: torch.tensor(float(n), dtype=torch.float16), lambda n: torch.tensor([n])],
    ids=["int", "float", "tensor", "half tensor", "tensor of one"],
)
def test_a_sum_over_tokens_is_divided_once_by_all_of_the_steps_tokens(tmp_path: Path, count: Count) -> None:
    training, found = Tokens(), list[list[Tensor]]()
    data = make_data(NUM_STEPS * GLOBAL_BATCH)
    source = Slices(data, MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.0))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                total, num_tokens = training.sums(inputs, targets)
                trainer.backward(total, num_items=count(num_tokens))
                if trainer.sync_gradients:
                    found.append(training.gradients)
                optimizer.step()
                optimizer.zero_grad()
    for start, gradients in zip(range(0, len(data[0]), GLOBAL_BATCH), found, strict=True):
        right = of_all_tokens(Tokens(), *(part[start : start + GLOBAL_BATCH] for part in data))
        assert farthest([gradients], right) <= MOST_APART


def by_items(folder: Path, *works: Callable[[Any, Tensor], object], data_size: int = 6) -> tuple[Any, nn.Module]:
    """One step whose micro-steps each do one of the works with the trainer and their samples' loss."""
    model = Net().double()
    source = Slices(make_data(data_size), data_size // len(works))
    trainer = trainer_of(folder, model, source, global_batch_size=data_size)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for (inputs, targets), work in zip(source, works, strict=True):
            with trainer.step():
                work(trainer, cross_entropy(model(inputs), targets, reduction="sum"))
                optimizer.step()
    return trainer, model


def counted(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss, num_items=2)


def uncounted(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss)


def by_itself(trainer: Any, loss: Tensor) -> None:
    plain(loss)


def left_out(trainer: Any, loss: Tensor) -> None:
    pass


def counted_twice(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss, num_items=2, retain_graph=True)
    trainer.backward(loss, num_items=2)


def counted_after(trainer: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    trainer.backward(loss, num_items=2)


def counted_before(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss, num_items=2, retain_graph=True)
    plain(loss)


def counted_none(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss * 0, num_items=0)


def counted_no_number(trainer: Any, loss: Tensor) -> None:
    trainer.backward(loss, num_items=float("nan"))


@pytest.mark.parametrize(
    "works",
    [
        (counted, uncounted),
        (uncounted, counted),
        (counted, counted, by_itself),
        (by_itself, counted),
        (counted, left_out),
        (counted, counted_twice),
        (counted, counted_after),
        (counted, counted_before),
        (counted_before, counted),
        (counted_none, counted_none),
        (counted, counted_no_number),
    ],
    ids=lambda works: ", ".join(map(name_of, works)),
)
def test_items_that_are_not_counted_in_every_backward_pass_are_refused(
    tmp_path: Path, works: tuple[Callable[[Any, Tensor], object], ...]
) -> None:
    with pytest.raises(StepError, match="num_items"):
        by_items(tmp_path, *works)


@pytest.mark.parametrize(
    "works",
    [
        (counted, counted),
        (counted_none, counted),
        (counted, counted_none),
        (counted_twice, counted),
        (left_out, counted),
    ],
    ids=lambda works: ", ".join(map(name_of, works)),
)
def test_micro_batches_may_hold_no_items_and_be_counted_in_several_passes(
    tmp_path: Path, works: tuple[Callable[[Any, Tensor], object], ...]
) -> None:
    assert by_items(tmp_path, *works)[0].global_step == 1


def test_items_of_a_step_that_was_rolled_back_are_not_counted(tmp_path: Path) -> None:
    training = Tokens()
    source = Slices(make_data(GLOBAL_BATCH), MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    num_micro_steps = 0
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                total, num_tokens = training.sums(inputs, targets)
                trainer.backward(total, num_items=num_tokens)
                num_micro_steps += 1
                if num_micro_steps == 2:
                    trainer.rollback()
                else:
                    optimizer.step()
    assert num_micro_steps == 5
    assert trainer.global_step == 1
    assert farthest([training.gradients], of_all_tokens(Tokens(), *make_data(GLOBAL_BATCH))) <= MOST_APART


def test_backward_belongs_into_a_step(tmp_path: Path) -> None:
    training = Training()
    with trainer_of(tmp_path, training.model, micro_batch_size=2) as trainer:
        trainer.prepare(SGD(training.parameters, lr=0.1))
        with pytest.raises(StepError, match=r"outside of `with trainer\.step"):
            trainer.backward(training.model(make_data(2)[0]).sum())


def test_a_micro_batch_too_many_or_a_refusal_leaves_nothing_behind_and_the_step_comes_again(tmp_path: Path) -> None:
    training, found = Training(), list[list[Tensor]]()
    data = make_data(GLOBAL_BATCH)
    source = Slices(data, MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    num_refused = 0
    with trainer, trainer.epoch():
        for inputs, targets in source:
            call = training.model if num_refused else training.model.forward
            try:
                with trainer.step():
                    plain(cross_entropy(call(inputs), targets))
                    if trainer.sync_gradients:
                        found.append(training.gradients)
                    optimizer.step()
            except StepError:
                num_refused += 1
                assert all(part.grad is None for part in training.parameters)
    assert num_refused == 1
    other = Training()
    plain(cross_entropy(other.model(data[0]), data[1]))
    assert farthest(found, [other.gradients]) <= MOST_APART


# --- what belongs to the user ---------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Writes into the containers that it is called with, and returns one that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.kept: dict[str, Any] = {}

    def forward(self, inputs: Tensor, states: list[Tensor], *, notes: dict[str, Any]) -> Any:
        states.append(self.cell(inputs, states[-1] if states else None))
        notes["number"] = len(states)
        self.kept = {"states": states, "last": states[-1]}
        return self.kept


class WritesInto(Training):
    """A cache that the model fills."""

    def make_model(self) -> nn.Module:
        return Keeping()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        states: list[Tensor] = []
        notes: dict[str, Any] = {}
        for part in torch.split(inputs, 2, dim=1):
            out = self.model(part, states, notes=notes)
        assert notes["number"] == len(states) == 3
        backward(cross_entropy(out["last"], targets))


class KeepsOutputs(Training):
    """A list that the loop fills with outputs, and that the model reads."""

    def make_model(self) -> nn.Module:
        class Model(Cell):
            def forward(self, inputs: Tensor, state: Any = None) -> Any:
                return super().forward(inputs, torch.stack(state).mean(0) if state else None)

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        states: list[Tensor] = []
        for part in torch.split(inputs, 2, dim=1):
            given = list(states)
            new = self.model(part, states)
            assert len(states) == len(given) and all(a is b for a, b in zip(states, given, strict=True))
            states.append(new)
        backward(cross_entropy(states[-1], targets))


@Ways
@pytest.mark.parametrize("kind", [WritesInto, KeepsOutputs], ids=name_of)
def test_containers_of_the_loop_are_changed_by_the_model_alone(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


def test_what_a_model_keeps_and_what_it_returns_without_gradients_are_as_they_were(tmp_path: Path) -> None:
    class Model(Net):
        def forward(self, inputs: Tensor) -> Any:
            logits = super().forward(inputs)
            self.kept = {"logits": logits, "nested": [logits]}
            return self.kept, inputs.shape, inputs.max(dim=1), [inputs], None, "name"

    model = Model().double()
    trainer = trainer_of(tmp_path, model, micro_batch_size=2, global_batch_size=4)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    data = make_data(4)
    with trainer:
        for start in (0, 2):
            with trainer.step():
                out, shape, largest, [same], nothing, name = model(data[0][start : start + 2])
                assert model.kept["logits"] is model.kept["nested"][0]
                assert isinstance(shape, torch.Size) and shape.numel() == 12
                assert largest.values.shape == (2,) and same.shape == shape and nothing is None and name == "name"
                plain(cross_entropy(out["nested"][0], data[1][start : start + 2]))
                optimizer.step()
    assert trainer.global_step == 1


@Ways
def test_nothing_of_a_step_is_kept_when_its_names_are_gone(tmp_path: Path, by_trainer: bool) -> None:
    training = Recurrent()
    source = Slices(make_data(2 * GLOBAL_BATCH), MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    alive: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()  # a cycle would keep a graph and its memory until the next collection
    try:
        with trainer, trainer.epoch():
            for inputs, targets in source:
                with trainer.step():
                    state = training.model(inputs[:, :2])
                    last = training.model(inputs[:, 2:4], state * 2)
                    loss = cross_entropy(last, targets)
                    alive += [weakref.ref(each) for each in (state, last, loss)]
                    if trainer.sync_gradients:
                        del inputs, targets  # and no backward pass here: a graph that is left alone goes as well
                    else:
                        trainer.backward(loss) if by_trainer else plain(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    del state, last, loss
                assert not any(each() is not None for each in alive)
    finally:
        gc.enable()
    assert len(alive) == 18


def test_the_model_is_left_as_it_was_found(tmp_path: Path) -> None:
    training = Encoded()
    training.outside.register_forward_hook(lambda *_: None)
    source = Slices(make_data(GLOBAL_BATCH), MICRO_BATCH)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=GLOBAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                training.work(inputs, targets, plain)
                optimizer.step()
    for module in [*training.model.modules(), *training.outside.modules()]:
        assert not module._forward_pre_hooks
        assert len(module._forward_hooks) == (module is training.outside)
    assert not any(part._backward_hooks for part in training.parameters)


def test_outside_of_steps_and_where_a_step_is_one_micro_batch_the_model_is_left_alone(tmp_path: Path) -> None:
    training = Training()
    source = Slices(make_data(4), 2)
    trainer = trainer_of(tmp_path, training.model, source, global_batch_size=4)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    inputs, targets = make_data(4)
    plain(cross_entropy(training.model(inputs), targets))
    right = training.gradients
    optimizer.zero_grad()
    with trainer, trainer.epoch():
        for part in source:
            with trainer.step():
                pass
            for _ in range(2):
                slopes = torch.autograd.grad(cross_entropy(training.model(inputs), targets), training.parameters)
                assert farthest([list(slopes)], [right]) == 0.0
            with trainer.step():
                plain(cross_entropy(training.model(part[0]), part[1]))
            trainer.rollback()
            break


# --- loops that call one and the other -----------------------------------------------------------------------------

EQUAL_BATCH = 3 * MICRO_BATCH  # micro-batches of one size, and so of one weight
NUM_TURNS = 8


def by_turns(
    training: Training, folder: Path, work: Callable[[Any, int, Tensor, Tensor], None]
) -> tuple[list[list[Tensor]], list[str]]:
    """The gradients of some steps of three micro-steps, and what was refused of them; that is taken again.

    ``work`` is given the trainer, which micro-step of the step it is, and the samples.
    """
    found, refused = list[list[Tensor]](), list[str]()
    source = Slices(make_data(NUM_TURNS * EQUAL_BATCH), MICRO_BATCH)
    trainer = trainer_of(folder, training.model, source, global_batch_size=EQUAL_BATCH)
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    index = 0
    with trainer, trainer.epoch():
        for inputs, targets in source:
            try:
                with trainer.step():
                    work(trainer, index, inputs, targets)
                    if trainer.sync_gradients:
                        found.append(training.gradients)
                    optimizer.step()
                    optimizer.zero_grad()
                index = (index + 1) % 3
            except StepError as error:
                refused.append(str(error))
                index = 0
                if len(refused) > 2:
                    break
    return found, refused


def of_equal_batches(training: Training, work: Callable[[Tensor, Tensor], None]) -> list[list[Tensor]]:
    """The gradients of the same steps, each from its whole batch."""
    data, found = make_data(NUM_TURNS * EQUAL_BATCH), list[list[Tensor]]()
    optimizer = SGD(training.parameters, lr=0.1)
    for start in range(0, len(data[0]), EQUAL_BATCH):
        work(data[0][start : start + EQUAL_BATCH], data[1][start : start + EQUAL_BATCH])
        found.append(training.gradients)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "is_by_trainer",
    [
        lambda step, index: step < 4,
        lambda step, index: step != 5,
        lambda step, index: step < 4 or index > 0,
        lambda step, index: step < 4 or index == 1,
        lambda step, index: index == 2,
        lambda step, index: index < 2,
        lambda step, index: step < 4 or index < 2,
    ],
    ids=["at first", "but once", "not at first", "in between", "at last", "but at last", "later but at last"],
)
def test_a_loop_may_call_one_here_and_the_other_there(
    tmp_path: Path, is_by_trainer: Callable[[int, int], bool]
) -> None:
    training, other = Training(), Training()

    def work(trainer: Any, index: int, inputs: Tensor, targets: Tensor) -> None:
        training.work(inputs, targets, trainer.backward if is_by_trainer(trainer.global_step, index) else plain)

    found, refused = by_turns(training, tmp_path, work)
    assert refused == []
    assert (
        farthest(found, of_equal_batches(other, lambda inputs, targets: other.work(inputs, targets, plain)))
        <= MOST_APART
    )


def penalty(training: Training) -> Tensor:
    return 1e-2 * torch.stack([part.square().sum() for part in training.parameters]).sum()


@pytest.mark.parametrize("which", ["penalty first", "penalty last", "penalty in between", "penalty sometimes"])
def test_a_loop_may_call_both_in_one_micro_step(tmp_path: Path, which: str) -> None:
    training, other = Training(), Training()

    def loss_of(of: Training, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(of.model(inputs), targets)

    def has_penalty(step: int) -> bool:
        return which != "penalty sometimes" or step % 5 == 4

    def work(trainer: Any, index: int, inputs: Tensor, targets: Tensor) -> None:
        is_penalised = has_penalty(trainer.global_step)
        if is_penalised and which == "penalty first":
            trainer.backward(penalty(training))
        plain(loss_of(training, inputs, targets))
        if is_penalised and which != "penalty first":
            trainer.backward(penalty(training))
        if which == "penalty in between":
            plain(training.model(-inputs).square().mean())

    steps = iter(range(NUM_TURNS))

    def whole_work(inputs: Tensor, targets: Tensor) -> None:
        loss = loss_of(other, inputs, targets)
        if which == "penalty in between":
            loss = loss + other.model(-inputs).square().mean()
        plain(loss + penalty(other) if has_penalty(next(steps)) else loss)

    found, refused = by_turns(training, tmp_path, work)
    assert refused == []
    assert farthest(found, of_equal_batches(other, whole_work)) <= MOST_APART


class Adding(Training):
    """What the loop calls has a hook of the user's that adds something trained to the output."""

    def make_model(self) -> nn.Module:
        model = Net()
        model.offset = nn.Parameter(torch.ones(5))
        model.register_forward_hook(lambda module, arguments, output: output + module.offset)
        return model


class Featuring(Training):
    """A hook of the user's returns what lies within the model too."""

    def make_model(self) -> nn.Module:
        model = Net()
        kept: list[Tensor] = []
        model.hidden.register_forward_hook(lambda module, arguments, output: kept.append(output))
        model.register_forward_hook(lambda module, arguments, output: (output, kept.pop()))
        return model

    def work(self, inputs: Tensor, targets: Tensor, backward: Backward) -> None:
        logits, hidden = self.model(inputs)
        backward(cross_entropy(logits, targets) + hidden.square().mean())


@Ways
@pytest.mark.parametrize("kind", [Adding, Featuring], ids=name_of)
def test_a_hook_that_changes_what_the_model_returns_is_a_part_of_it(
    tmp_path: Path, kind: type[Training], by_trainer: bool
) -> None:
    assert_exact(kind, tmp_path, by_trainer=by_trainer)


# --- ranks ----------------------------------------------------------------------------------------------------------


class Branched(Training):
    """A part of the model is used for some micro-batches only, and on some ranks."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def __init__(self) -> None:
                super().__init__()
                self.rare = nn.Linear(6, 5)

            def forward(self, inputs: Tensor) -> Any:
                is_rare = inputs[:, 0] > 0.6
                logits = super().forward(inputs)
                return logits + torch.where(is_rare[:, None], self.rare(inputs), 0) if is_rare.any() else logits

        return Model()


class AllReduces:
    """Counts them, by the micro-step that they were made in."""

    def __init__(self) -> None:
        self.num_micro_steps = 0
        self.seen: list[int] = []


@wraps(allreduce_hook)
def counting_hook(counting: AllReduces, bucket: Any) -> torch.futures.Future[Tensor]:
    counting.seen.append(counting.num_micro_steps)
    return allreduce_hook(cast("dist.ProcessGroup", dist.group.WORLD), bucket)


Reports = tuple[list[list[Tensor]], list[int]]


def on_rank(
    rank: int,
    folder: Path,
    kind: type[Training] | str,
    by_trainer: bool,
    options: dict[str, Any],
    sync_every_micro_step: bool = False,
    num_epochs: int = 1,
) -> Reports:
    """The gradients of each step, and the micro-steps, counted from 0, that made an all-reduce."""
    torch.set_num_threads(1)
    training, counting = (packed(kind) if isinstance(kind, str) else kind)(), AllReduces()
    training.model = shared = DistributedDataParallel(training.model, **options)
    shared.register_comm_hook(counting, counting_hook)
    source = Slices(make_data(NUM_STEPS * GLOBAL_BATCH), MICRO_BATCH - 1)
    trainer = trainer_of(
        folder,
        training.model,
        source,
        rank=rank,
        global_batch_size=GLOBAL_BATCH,
        sync_every_micro_step=sync_every_micro_step,
    )
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    found: list[list[Tensor]] = []
    with trainer:
        for _ in range(num_epochs):
            with trainer.epoch():
                for inputs, targets in source:
                    with trainer.step():
                        training.work(inputs, targets, trainer.backward if by_trainer else plain)
                        if trainer.sync_gradients:
                            found.append(training.gradients)
                        optimizer.step()
                        optimizer.zero_grad()
                    counting.num_micro_steps += 1
    assert trainer.num_micro_steps == 2
    return found, counting.seen


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, bucket view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, bucket view": {"static_graph": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}


@pytest.mark.parametrize(("sync_every_micro_step", "by_trainer"), each_once([False, True], [False, True]))
@pytest.mark.parametrize("options", DDP_OPTIONS)
def test_ranks_share_gradients_in_the_last_micro_step_or_in_every_one(
    ranks: RankPool, tmp_path: Path, options: str, sync_every_micro_step: bool, by_trainer: bool
) -> None:
    reports = ranks.run(2, on_rank, tmp_path, Training, by_trainer, DDP_OPTIONS[options], sync_every_micro_step)
    right = whole(Training())
    for found, seen in reports:
        assert farthest(found, right) <= MOST_APART
        first = {0} if "static" in options else set()  # torch records a static graph in the first pass, which shares
        ends = set(range(1, 2 * NUM_STEPS, 2))
        assert set(seen) == (set(range(2 * NUM_STEPS)) if sync_every_micro_step else ends | first)


ON_RANKS: list[tuple[type[Training] | str, str]] = [
    (Recurrent, "plain"),
    (Halved, "bucket view"),
    (Inside, "plain"),
    ("hugging face, attributes", "unused"),
    ("dict with attributes", "plain"),
    (OwnLoss, "bucket view"),
    ("list in dict", "static"),
    (TwoCalls, "plain"),
    (Evaluated, "plain"),
    (Frozen1, "plain"),
    (Checkpointed, "plain"),
    (CheckpointedReentrant, "static"),
    (Branched, "unused"),
    (Branched, "unused, bucket view"),
    (InPlace, "plain"),
    (InPlaceOfTwo, "bucket view"),
    (CutOffInPlace, "plain"),
    (ReturnsInput, "plain"),
]


# By `trainer.backward(loss)` each other kind is weighed above; ranks change nothing in it that depends on the kind.
@pytest.mark.parametrize(
    ("kind", "options", "by_trainer"),
    [
        *((*row, False) for row in ON_RANKS),
        *(pytest.param(*row, True, marks=[] if row[0] is Branched else pytest.mark.slow) for row in ON_RANKS),
    ],
    ids=lambda value: name_of(value),
)
def test_models_of_every_kind_are_weighed_on_ranks(
    ranks: RankPool, tmp_path: Path, kind: type[Training] | str, options: str, by_trainer: bool
) -> None:
    reports = ranks.run(2, on_rank, tmp_path, kind, by_trainer, DDP_OPTIONS[options])
    right = whole((packed(kind) if isinstance(kind, str) else kind)())
    assert max(farthest(found, right) for found, _ in reports) <= MOST_APART


def tokens_on_rank(rank: int, folder: Path, sync_every_micro_step: bool, works: str) -> tuple[list[list[Tensor]], str]:
    """The gradients of one step of sums over tokens; a letter says what a micro-step does: count or leave out."""
    torch.set_num_threads(1)
    training = Tokens()
    training.model = DistributedDataParallel(training.model)
    source = Slices(make_data(GLOBAL_BATCH), 2)
    trainer = trainer_of(
        folder,
        training.model,
        source,
        rank=rank,
        global_batch_size=GLOBAL_BATCH,
        sync_every_micro_step=sync_every_micro_step,
    )
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    try:
        with trainer:
            for (inputs, targets), work in zip(source, works, strict=True):
                with trainer.step():
                    total, num_tokens = training.sums(inputs, targets)
                    trainer.backward(total, num_items=num_tokens if work == "c" else 0)
                    found = training.gradients
                    optimizer.step()
    except StepError as error:
        return [], str(error)
    return [found], ""


@pytest.mark.parametrize("sync_every_micro_step", [False, True], ids=["last", "every"])
def test_a_sum_over_tokens_is_divided_by_those_of_all_ranks(
    ranks: RankPool, tmp_path: Path, sync_every_micro_step: bool
) -> None:
    right = of_all_tokens(Tokens(), *make_data(GLOBAL_BATCH))
    for found, _ in ranks.run(2, tokens_on_rank, tmp_path, sync_every_micro_step, "cc"):
        assert farthest(found, right) <= MOST_APART


def test_no_tokens_on_any_rank_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for found, message in ranks.run(2, tokens_on_rank, tmp_path, False, "00"):
        assert not found
        assert "num_items of the step add up to 0 over all ranks" in message


def past_ddp(rank: int, folder: Path) -> str:
    """What comes of calling the model inside of DDP."""
    model = DistributedDataParallel(Net().double())
    trainer = trainer_of(folder, model, micro_batch_size=2, global_batch_size=12, rank=rank)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    inputs, targets = make_data(2)
    with trainer:
        try:
            with trainer.step():
                plain(cross_entropy(model.module(inputs), targets))
        except StepError as error:
            return str(error)
    return "nothing"


def test_a_pass_around_ddp_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    assert all("call trainer.backward(loss)" in message for message in ranks.run(2, past_ddp, tmp_path))


def gan_on_rank(rank: int, folder: Path) -> list[Tensor]:
    """The gradients of a maker and a critic, each in a DDP of its own."""
    torch.set_num_threads(1)
    gan = make_gan()
    both: Any = nn.ModuleDict({name: DistributedDataParallel(part) for name, part in gan.items()})
    source = Slices(make_data(7), 2)
    trainer = trainer_of(folder, both, source, rank=rank, global_batch_size=7)
    optimizers = trainer.prepare([SGD(part.parameters(), lr=0.1) for part in both.values()])
    found: list[Tensor] = []
    with trainer, trainer.epoch():
        for real, _ in source:
            with trainer.step():
                made = both["maker"](real)
                loss = both["critic"](made * 0.9).mean() + (made - real).square().mean()
                plain(loss - both["critic"](real).mean())
                found = [cast("Tensor", part.grad).clone() for part in gan.parameters()]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert trainer.global_step == 1
    return found


def test_two_models_in_ddp_of_their_own_are_weighed(ranks: RankPool, tmp_path: Path) -> None:
    gan: Any = make_gan()
    real, _ = make_data(7)
    made = gan["maker"](real)
    plain(gan["critic"](made * 0.9).mean() + (made - real).square().mean() - gan["critic"](real).mean())
    right = [cast("Tensor", part.grad) for part in gan.parameters()]
    for found in ranks.run(2, gan_on_rank, tmp_path):
        assert farthest([found], [right]) <= MOST_APART


def leaving_out(rank: int, folder: Path, with_items: bool, sync_every_micro_step: bool, odd_one: int) -> str:
    """Two ranks train; in the third step rank 1 leaves the backward pass of one micro-step out. What ends this rank?"""
    torch.set_num_threads(1)
    training = Tokens()
    training.model = DistributedDataParallel(training.model)
    trainer = trainer_of(
        folder,
        training.model,
        micro_batch_size=2,
        global_batch_size=8,
        rank=rank,
        timeout_seconds=5.0,
        sync_every_micro_step=sync_every_micro_step,
    )
    optimizer = trainer.prepare(SGD(training.parameters, lr=0.1))
    inputs, targets = make_data(4)
    try:
        with trainer, trainer.epoch():
            for index in range(8):
                with trainer.step():
                    total, num_tokens = training.sums(inputs[index % 2 * 2 :][:2], targets[index % 2 * 2 :][:2])
                    if rank == 1 and index == odd_one:
                        continue
                    trainer.backward(total, num_items=num_tokens) if with_items else plain(total)
                    optimizer.step()
                    optimizer.zero_grad()
    except RanksError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("with_items", "sync_every_micro_step", "odd_one"),
    [(True, False, 5), (True, False, 4), (True, True, 5), (False, True, 4), (False, True, 5)],
)
def test_a_rank_that_leaves_out_what_the_others_wait_for_is_named_on_all(
    ranks: RankPool, tmp_path: Path, with_items: bool, sync_every_micro_step: bool, odd_one: int
) -> None:
    told = ranks.run(2, leaving_out, tmp_path, with_items, sync_every_micro_step, odd_one, deadline_seconds=15)
    assert all(text.startswith("ranks differ in ") and "5 backward passes" in text for text in told), told
