"""Ways to train: models and loops of every kind, each written once, for a plain loop and for one under a trainer.

Every model takes inputs of 6 numbers and one of 5 classes; arithmetic is in fp64. How a way is trained, by hand or
with a trainer, is at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

from tests.support.training import Slices, bits_of, make_data, trainer_of

__all__ = [
    "WAYS",
    "Block",
    "Compiled",
    "CompiledBlocks",
    "CompiledByAot",
    "CompiledCheckpointed",
    "CompiledInPlace",
    "Frozen",
    "Gan",
    "GanInTurns",
    "GanOfTutorials",
    "InBfloat16",
    "InsAndOuts",
    "Loop",
    "Moody",
    "Net",
    "OwnLoss",
    "Plain",
    "Setting",
    "Tied",
    "TrainersLoop",
    "Way",
    "by_hand",
    "name_of",
    "result_of",
    "train",
]

NUM_SAMPLES = 48  # then they come again
Make = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a step is trained with."""

    global_batch: int = 8
    micro_batch: int = 2
    rates: tuple[float, ...] = ()
    """Of each optimizer; those that it was made with, if there are none."""


class Loop:
    """What a loop gives to the work on one micro-batch: a plain one acts by hand where a step ends."""

    def __init__(self, way: Way) -> None:
        self.num_parts, self.is_last = 1, True
        self.optimizers: list[Any] = [_ByHand(each, self) for each in way.optimizers]
        self.scheduler: Any = None if way.scheduler is None else _ByHand(way.scheduler, self)

    def backward(self, loss: Tensor) -> None:
        (loss / self.num_parts).backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Any, most: float) -> None:
        if self.is_last:
            nn.utils.clip_grad_norm_(parameters, most)

    def finish(self) -> None:
        """What stands at the end of every micro-step."""
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class _ByHand:
    """Acts where a step ends."""

    def __init__(self, inner: Any, loop: Loop) -> None:
        self._inner, self._loop = inner, loop

    def step(self) -> None:
        if self._loop.is_last:
            self._inner.step()

    def zero_grad(self) -> None:
        if self._loop.is_last:
            self._inner.zero_grad()


class TrainersLoop(Loop):
    """A loop under a trainer, as users write it."""

    def __init__(self, way: Way, trainer: Any) -> None:
        prepared = trainer.prepare(way.optimizers, way.scheduler)
        self.optimizers, self.scheduler = (prepared, None) if way.scheduler is None else prepared
        self._trainer = trainer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Any, most: float) -> None:
        self._trainer.clip_grad_norm_(parameters, most)


# ---- the table ----


class Way:
    """A model, its optimizers, and the work on one micro-batch."""

    def __init__(self, wrapped: Make | None = None) -> None:
        torch.manual_seed(0)
        model = self.make_model().double()
        self.model: Any = self.compiled(model if wrapped is None else wrapped(model))
        """What the trainer is given."""
        self.optimizers = self.make_optimizers()
        self.scheduler = self.make_scheduler()
        self.state: dict[str, Tensor] = {}
        """What the loop carries from one micro-batch to the next, changed in place."""
        self.losses: list[float] = []

    def make_model(self) -> nn.Module:
        return Net()

    def compiled(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizers(self) -> list[Optimizer]:
        return [SGD(self.trained, lr=0.125, momentum=0.9)]

    def make_scheduler(self) -> Any:
        return None

    def work(self, inputs: Tensor, targets: Tensor, loop: Loop) -> None:
        self.learn(self.loss(inputs, targets), loop)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), targets)

    def learn(self, loss: Tensor, loop: Loop) -> None:
        self.losses.append(loss.item())
        loop.backward(loss)
        loop.finish()

    @property
    def trained(self) -> list[nn.Parameter]:
        return [part for part in self.model.parameters() if part.requires_grad]

    @property
    def called(self) -> nn.Module:
        """The part of the model that the loop calls."""
        return cast("nn.Module", self.model)

    @property
    def bits(self) -> list[Any]:
        """All that training leaves behind."""
        optimizers = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return bits_of(list(self.model.parameters()), list(self.model.buffers()), optimizers, self.state)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Any:
        return self.out(torch.tanh(self.hidden(inputs)))


class Plain(Way):
    """AdamW in two groups, a schedule, and clipping."""

    def make_optimizers(self) -> list[Optimizer]:
        decayed = [part for part in self.trained if part.ndim > 1]
        others = [part for part in self.trained if part.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return [AdamW(groups, lr=0.0625)]

    def make_scheduler(self) -> Any:
        return CosineAnnealingLR(self.optimizers[0], 20)

    def learn(self, loss: Tensor, loop: Loop) -> None:
        self.losses.append(loss.item())
        loop.backward(loss)
        loop.clip(self.trained, 0.5)
        loop.finish()


class Compiled(Way):
    backend = "eager"

    def compiled(self, model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(model, backend=self.backend, fullgraph=True))


class CompiledByAot(Compiled):
    backend = "aot_eager"


class CompiledInPlace(Way):
    def compiled(self, model: nn.Module) -> nn.Module:
        model.compile(backend="eager", fullgraph=True)
        return model


class CompiledBlocks(Way):
    def make_model(self) -> nn.Module:
        blocks = [cast("nn.Module", torch.compile(Block(), backend="eager", fullgraph=True)) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(6, 5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Any:
        return inputs + torch.relu(self.inner(inputs))


class Checkpointed(Way):
    """Dropout in a block that is computed twice."""

    reentrant = False

    def make_model(self) -> nn.Module:
        reentrant = self.reentrant

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.block = Block(), nn.Sequential(Block(), nn.Dropout(0.25), Block())
                self.out = nn.Linear(6, 5)

            def forward(self, inputs: Tensor) -> Any:
                return self.out(checkpoint(self.block, self.first(inputs), use_reentrant=reentrant))

        return Model()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CompiledCheckpointed(Checkpointed):
    def compiled(self, model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(model, backend="aot_eager"))


class Hooked(Way):
    """Hooks on parameters, on modules and on their outputs, which change gradients or only look."""

    def make_model(self) -> nn.Module:
        net = Net()
        model: Any = net
        model.out.weight.register_hook(lambda gradient: gradient * 2)
        model.register_full_backward_hook(lambda module, gave, got: None)
        model.hidden.register_full_backward_hook(lambda module, gave, got: None)
        model.out.register_full_backward_pre_hook(lambda module, got: (got[0] * 0.5,))
        model.hidden.bias.register_post_accumulate_grad_hook(lambda part: None)
        return net

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs.clone().requires_grad_())
        logits.register_hook(lambda gradient: gradient * 4)
        return cross_entropy(logits, targets)


class Tied(Way):
    def make_model(self) -> nn.Module:
        first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first)


class Frozen(Way):
    """A body that is not trained and is in eval mode; its head is."""

    def make_model(self) -> nn.Module:
        body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        body.requires_grad_(False).eval()
        return nn.Sequential(body, nn.Linear(8, 5))


class Thawed(Frozen):
    """A body whose layer is trained from the eleventh micro-batch on."""

    def make_optimizers(self) -> list[Optimizer]:
        return [SGD(self.model.parameters(), lr=0.125, momentum=0.9)]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if len(self.losses) == 10:
            self.model[0][0].requires_grad_(True)
        return super().loss(inputs, targets)


class InsAndOuts(Way):
    """Several inputs, some by name and in containers; several outputs, not all of them in the loss."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(  # type: ignore[override]
                self, pair: tuple[Tensor, Tensor], *, options: dict[str, Tensor], scale: float = 1.0
            ) -> Any:
                hidden = torch.tanh(self.hidden(torch.cat(pair, 1)) * scale)
                logits = self.out(hidden)
                shift = options["shift"]
                return {"logits": logits, "more": (logits[:, 0] + shift, [hidden]), "unused": hidden.sum()}

        return Model()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        shift = targets.double()
        out = self.model((inputs[:, :2], inputs[:, 2:]), options={"shift": shift}, scale=0.5)
        first, (hidden,) = out["more"]
        more: Tensor = 0.25 * first.square().mean() + 0.125 * hidden.square().mean()
        return cross_entropy(out["logits"], targets) + more


@dataclass
class LossAndLogits:
    """As Hugging Face's models return."""

    loss: Tensor | None
    logits: Tensor


class OwnLoss(Way):
    def make_model(self) -> nn.Module:
        class Model(Net):
            def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
                logits = super().forward(inputs)
                return LossAndLogits(None if labels is None else cross_entropy(logits, labels), logits)

        return Model()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cast("Tensor", self.model(inputs, labels=targets).loss)


class Recurrent(Way):
    """An LSTM whose state goes on from one micro-batch to the next."""

    def __init__(self, wrapped: Make | None = None) -> None:
        super().__init__(wrapped)
        self.state = {name: torch.zeros(1, 1, 8, dtype=torch.float64) for name in ("hidden", "cell")}

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.over, self.out = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 5)

            def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> Any:
                steps, state = self.over(inputs.view(-1, 3, 2), state)
                return self.out(steps[:, -1]), state

        return Model()

    def work(self, inputs: Tensor, targets: Tensor, loop: Loop) -> None:
        before = tuple(part.expand(-1, len(inputs), -1).contiguous() for part in self.state.values())
        logits, after = self.model(inputs, before)
        self.learn(cross_entropy(logits, targets), loop)
        for part, new in zip(self.state.values(), after, strict=True):
            part.copy_(new.detach().mean(1, keepdim=True))


class Moody(Way):
    """BatchNorm, spectral norm and dropout: buffers and random numbers."""

    def make_model(self) -> nn.Module:
        first = parametrizations.spectral_norm(nn.Linear(6, 8))
        return nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.25), parametrizations.weight_norm(nn.Linear(8, 5)))


class InBfloat16(Way):
    """Parameters in fp32, and autocast around the model, which leaves fp64 as it is."""

    def compiled(self, model: nn.Module) -> nn.Module:
        return model.float()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(inputs.float())
        assert (logits == logits.bfloat16()).all()
        return cross_entropy(logits.float(), targets)


class Sparse(Way):
    """A table whose gradients are sparse, and dense layers after it."""

    def make_model(self) -> nn.Module:
        class Model(Net):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(7, 6, sparse=True)

            def forward(self, inputs: Tensor) -> Any:
                return super().forward(self.table((inputs * 2).long().abs() % 7).mean(1))

        return Model()

    def make_optimizers(self) -> list[Optimizer]:
        return [SGD(self.trained, lr=0.125)]


class SparseInTwo(Sparse):
    """The same, with an optimizer of its own for the table."""

    def make_optimizers(self) -> list[Optimizer]:
        table = self.model.table.weight
        return [SparseAdam([table], lr=0.0625), SGD([part for part in self.trained if part is not table], lr=0.125)]


class Siamese(Way):
    """Called twice for one loss."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        one: Tensor = self.model(inputs)
        other: Tensor = self.model(-inputs)
        return cross_entropy(one, targets) + 0.25 * (one * other).mean()


class Teacher(Way):
    """Called without gradients between its calls with them, and in eval mode."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.model(inputs * 0.5).softmax(1)
        self.model.eval()
        with torch.inference_mode():
            self.model(inputs)
        self.model.train()
        logits = self.model(inputs)
        return cross_entropy(logits, targets) + 0.25 * cross_entropy(logits, aim)


class Gan(Way):
    """Two models and two optimizers, whose steps alternate within one micro-batch."""

    clears_at_once = False
    keeps_apart = True

    def make_model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "maker": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)),
                "judge": nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.25), nn.Linear(8, 1)),
            }
        )

    def make_optimizers(self) -> list[Optimizer]:
        maker, judge = self.parts
        return [AdamW(judge.parameters(), lr=0.0625), AdamW(maker.parameters(), lr=0.03125)]

    @property
    def parts(self) -> tuple[nn.Module, nn.Module]:
        return self.model["maker"], self.model["judge"]

    @property
    def called(self) -> nn.Module:
        return self.parts[1]

    def work(self, inputs: Tensor, targets: Tensor, loop: Loop) -> None:
        maker, judge = self.parts
        made = maker(inputs[:, :2] + targets[:, None])
        right, wrong = torch.ones(len(inputs), 1).double(), torch.zeros(len(inputs), 1).double()
        loss = binary_cross_entropy_with_logits(judge(inputs), right)
        loss = loss + binary_cross_entropy_with_logits(judge(made.detach()), wrong)
        self.losses.append(loss.item())
        loop.backward(loss)
        loop.optimizers[0].step()
        if self.clears_at_once:
            loop.optimizers[0].zero_grad()
        judge.requires_grad_(not self.keeps_apart)
        try:
            loss = binary_cross_entropy_with_logits(judge(made), right)
            self.losses.append(loss.item())
            loop.backward(loss)
        finally:
            judge.requires_grad_(True)
        loop.optimizers[1].step()
        for optimizer in loop.optimizers:
            optimizer.zero_grad()


class GanInTurns(Gan):
    """The judge's gradients are cleared before the maker learns."""

    clears_at_once = True


class GanOfTutorials(Gan):
    """What the maker learns from goes into the judge's gradients too, and is cleared."""

    keeps_apart = False


WAYS: list[type[Way]] = [
    Plain,
    Compiled,
    CompiledByAot,
    CompiledInPlace,
    CompiledBlocks,
    Checkpointed,
    CheckpointedReentrant,
    CompiledCheckpointed,
    Hooked,
    Tied,
    Frozen,
    Thawed,
    InsAndOuts,
    OwnLoss,
    Recurrent,
    Moody,
    InBfloat16,
    Sparse,
    SparseInTwo,
    Siamese,
    Teacher,
    Gan,
]


# ---- training ----


def by_hand(way: Way, steps: list[Setting]) -> None:
    """Train in plain torch."""
    data, start = make_data(NUM_SAMPLES), 0
    loop = Loop(way)
    torch.manual_seed(1)
    for setting in steps:
        for optimizer, rate in zip(way.optimizers, setting.rates, strict=bool(setting.rates)):
            for group in optimizer.param_groups:
                group["lr"] = rate
        loop.num_parts = setting.global_batch // setting.micro_batch
        for index in range(loop.num_parts):
            loop.is_last = index + 1 == loop.num_parts
            part = torch.arange(start, start + setting.micro_batch) % NUM_SAMPLES
            way.work(data[0][part], data[1][part], loop)
            start += setting.micro_batch


def train(
    way: Way,
    folder: Path,
    setting: Setting,
    num_steps: int,
    *,
    catches: type[Exception] | tuple[()] = (),
    around: Callable[[Any, Loop], Iterator[None]] | None = None,
    **arguments: Any,
) -> list[Setting]:
    """Train with a trainer. ``around(trainer, loop)`` is gone on with before every micro-step.

    Returns what each step was trained with.
    """
    source = Slices(make_data(NUM_SAMPLES), setting.micro_batch, is_endless=True)
    trainer = trainer_of(folder, way.model, source, global_batch_size=setting.global_batch, **arguments)
    for name, tensor in way.state.items():
        trainer.register_state(name, tensor)
    loop = TrainersLoop(way, trainer)
    turns = None if around is None else around(trainer, loop)
    taken: list[Setting] = []
    num_losses = 0
    torch.manual_seed(1)
    with trainer, trainer.epoch():
        for inputs, targets in source:
            if turns is not None:
                next(turns)
            before = Setting(
                global_batch=trainer.global_batch_size,
                micro_batch=trainer.config.dataloader.batch_size,
                rates=tuple(optimizer.effective_rates[0] for optimizer in loop.optimizers),
            )
            try:
                with trainer.step():
                    way.work(inputs, targets, loop)
            except catches:
                del way.losses[num_losses:]  # of the step that never happened
                continue
            if trainer.sync_gradients:
                taken.append(before)
                num_losses = len(way.losses)
            if trainer.global_step == num_steps:
                break
    return taken


def result_of(way: Way) -> tuple[list[float], list[Any]]:
    """What two trainings are compared by."""
    return way.losses, way.bits


def name_of(value: object) -> str:
    """The name of a way, for a test's own."""
    return value.__name__ if isinstance(value, type) else str(value)
