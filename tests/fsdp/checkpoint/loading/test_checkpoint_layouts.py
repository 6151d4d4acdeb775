"""Checkpoints saved in one layout and loaded in another: what is loaded is what was saved, bit for bit, on every rank,
for every way to spread a model and every optimizer; and a training goes on as the one that was saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from elastic_ext.fsdp import ShardCheckpointer
from tests.support.ranks import RankPool
from tests.support.spread import (
    SPREADS,
    Everything,
    State,
    differences,
    overwrite,
    places_in,
    put_together,
    state_here,
    train,
)

NUM_STEPS = 2


# --- every way to spread a model ------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, amsgrad=True)]


def save_all(rank: int, names: Sequence[str], folder: Path) -> list[State]:
    """A checkpoint of each way to spread the model; what is in it of this rank, and what it is three steps later."""
    found = []
    for name in names:
        places = places_in(SPREADS[name])
        model = SPREADS[name].wrap(Everything(zlib.crc32(name.encode())))
        optimizers = adamw(model)
        train(model, optimizers, NUM_STEPS)
        with ShardCheckpointer(folder, job=name) as checkpointer:
            checkpointer.save(NUM_STEPS, model, optimizers, {"name": name})
        found.append(state_here(model, optimizers, places))
        train(model, optimizers, 3, first=NUM_STEPS)
        found.append(state_here(model, optimizers, places))
    return found


@dataclass(frozen=True, slots=True)
class Saved:
    """Checkpoints of a model spread in several ways, each of them saved as soon as a test needs it."""

    folder: Path
    now: dict[str, State] = field(default_factory=dict)
    """What was saved, by the way that the model was spread."""
    later: dict[str, State] = field(default_factory=dict)
    """What the model was three steps later."""

    def save(self, ranks: RankPool, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self.now]
        for num_ranks in sorted({SPREADS[name].num_ranks for name in missing}):
            new = [name for name in missing if SPREADS[name].num_ranks == num_ranks]
            per_rank = ranks.run(num_ranks, save_all, new, self.folder)
            whole = [put_together(states) for states in zip(*per_rank, strict=True)]
            self.now.update(zip(new, whole[::2], strict=True))
            self.later.update(zip(new, whole[1::2], strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def load_all(rank: int, name: str, folder: Path, now: Mapping[str, State], later: State) -> dict[str, list[str]]:
    """What is not as it was saved, once a model spread one way has loaded what each of the others has saved."""
    places = places_in(SPREADS[name])
    model = SPREADS[name].wrap(Everything(1))
    optimizers = adamw(model)
    told = {}
    for other in now:
        overwrite(model, optimizers)
        with ShardCheckpointer(folder, job=other) as checkpointer:
            loaded = checkpointer.load(model, optimizers)
        assert (loaded.step, loaded.extra) == (NUM_STEPS, {"name": other})
        told[other] = differences(state_here(model, optimizers, places), now[other])
        if other == name:
            train(model, optimizers, 3, first=NUM_STEPS)
            told["later"] = differences(state_here(model, optimizers, places), later)
    return told


QUICK = ("plain", "FSDP2 3", "TP x FSDP 2x2", "FSDP1 2")
"""Which stand for others when they load."""
ALIKE = ("FSDP2 2", "FSDP2 4", "TP 2", "FSDP1 3")
"""Whose checkpoints differ from one of the others in the number of ranks alone, or in that there is less to it."""
UNLIKE = [name for name in SPREADS if name not in ALIKE]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *(pytest.param(name, UNLIKE, id=name) for name in QUICK),
        *(pytest.param(name, list(SPREADS), id=f"{name} of all", marks=pytest.mark.slow) for name in SPREADS),
    ],
)
def test_a_model_spread_one_way_takes_up_what_was_saved_in_any_other(
    ranks: RankPool, saved: Saved, name: str, others: Sequence[str]
) -> None:
    saved.save(ranks, others)
    now = {other: saved.now[other] for other in others}
    for told in ranks.run(SPREADS[name].num_ranks, load_all, name, saved.folder, now, saved.later[name]):
        assert told == {key: [] for key in (*others, "later")}


# --- every optimizer ------------------------------------------------------------------------------------------------


class RowMeans(Optimizer):
    """Keeps a mean of squares per row, of the shape (rows, 1), and a count that is an int."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for part in group["params"]:
                if part.grad is None:
                    continue
                state = self.state[part]
                state["count"] = state.get("count", 0) + 1
                rows = part.new_zeros((part.shape[0], 1)) if part.dim() == 2 else torch.zeros_like(part)
                squares = part.grad.square().mean(dim=1, keepdim=True) if part.dim() == 2 else part.grad.square()
                state.setdefault("rows", rows).add_(squares)
                part.sub_(part.grad * group["lr"])


def grouped(model: nn.Module, make: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    """Groups of their own for what has no dimension, which no list of DTensors can have, and for some rows."""
    parameters = list(model.parameters())
    matrices = [part for part in parameters if part.dim() == 2]
    numbers = [part for part in parameters if part.dim() == 0]
    rest = [part for part in parameters if part.dim() not in (0, 2)]
    groups = [{"params": matrices, "lr": 3e-2}, {"params": rest, "weight_decay": 0.125}, {"params": numbers}]
    return [make(groups, lr=1e-2, **options)]


def muon(model: nn.Module) -> list[Optimizer]:
    """For matrices of several rows, as torch's cannot step a sharded single one."""
    parameters = list(model.parameters())
    is_matrix = [part.dim() == 2 and part.shape[0] > 1 for part in parameters]
    matrices = [part for part, of_rows in zip(parameters, is_matrix, strict=True) if of_rows]
    rest = [part for part, of_rows in zip(parameters, is_matrix, strict=True) if not of_rows]
    return [Muon(matrices, lr=1e-2), Adam(rest, lr=1e-2)]


OPTIMIZERS: Mapping[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda model: [SGD(model.parameters(), lr=1e-2)],
    "momentum": lambda model: [SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)],
    "Adam": lambda model: [Adam(model.parameters(), lr=1e-2)],
    "AdamW in groups": lambda model: grouped(model, AdamW, amsgrad=True),
    "foreach": lambda model: grouped(model, AdamW, foreach=True),
    "fused": lambda model: grouped(model, AdamW, fused=True),
    "Adafactor": lambda model: [Adafactor(model.parameters(), lr=1e-2)],
    "Muon and Adam": muon,
    "rows": lambda model: [RowMeans(model.parameters(), lr=1e-2)],
}


def begin(rank: int, spread: str, names: Sequence[str], folder: Path) -> list[State]:
    """A training with each optimizer saved; what it is then, and three steps later."""
    found = []
    places = places_in(SPREADS[spread])
    for name in names:
        model = SPREADS[spread].wrap(Everything(0))
        optimizers = OPTIMIZERS[name](model)
        train(model, optimizers, NUM_STEPS)
        with ShardCheckpointer(folder, job=name) as checkpointer:
            checkpointer.save(0, model, optimizers)
        found.append(state_here(model, optimizers, places))
        train(model, optimizers, 3, first=NUM_STEPS)
        found.append(state_here(model, optimizers, places))
    return found


def hand_on(
    rank: int, spread: str, step: int, folder: Path, now: Mapping[str, State], later: Mapping[str, State]
) -> dict[str, list[str]]:
    """What is not as it was saved of each training once it is loaded, and saved again; and later if that is given."""
    told = {}
    places = places_in(SPREADS[spread])
    for name, whole in now.items():
        model = SPREADS[spread].wrap(Everything(1))
        optimizers = OPTIMIZERS[name](model)
        if spread in ("DDP 2", "plain"):  # it may have state, or none so far
            train(model, optimizers, 1)
        overwrite(model, optimizers)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = 5.0
        with ShardCheckpointer(folder, job=name) as checkpointer:
            checkpointer.load(model, optimizers)
            checkpointer.save(step, model, optimizers)
        told[name] = differences(state_here(model, optimizers, places), whole)
        if name in later:
            train(model, optimizers, 3, first=NUM_STEPS)
            told[f"{name}, later"] = differences(state_here(model, optimizers, places), later[name])
    return told


ALL_BUT_ADAFACTOR = [name for name in OPTIMIZERS if name != "Adafactor"]
UNLIKE_OPTIMIZERS = ["SGD", "AdamW in groups", "fused", "Muon and Adam", "rows"]
"""Which stand for others: without state, in groups, with steps that tensors count, of two kinds, of other shapes."""

ROUTES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "2, 3, 2": (UNLIKE_OPTIMIZERS, ["FSDP2 2", "FSDP2 3", "FSDP2 2"]),
    "everywhere": (ALL_BUT_ADAFACTOR, ["FSDP2 4", "FSDP2 2", "FSDP2 3", "HSDP 2x2", "DDP 2", "plain", "FSDP2 4"]),
    # torch cannot step it where matrices are sharded; its state is loaded there all the same
    "Adafactor": (["Adafactor"], ["DDP 2", "FSDP2 3", "DDP 2"]),
    "Adafactor everywhere": (["Adafactor"], ["DDP 2", "FSDP2 3", "plain", "HSDP 2x2", "DDP 2"]),
}


@pytest.mark.parametrize(
    "route", [pytest.param(route, marks=[pytest.mark.slow] if "everywhere" in route else []) for route in ROUTES]
)
def test_an_optimizer_that_has_been_elsewhere_goes_on_as_if_it_had_stayed(
    ranks: RankPool, tmp_path: Path, route: str
) -> None:
    names, (first, *others) = ROUTES[route]
    per_rank = ranks.run(SPREADS[first].num_ranks, begin, first, names, tmp_path)
    whole = [put_together(states) for states in zip(*per_rank, strict=True)]
    now, later = dict(zip(names, whole[::2], strict=True)), dict(zip(names, whole[1::2], strict=True))
    for step, spread in enumerate(others, start=1):
        at_last = later if spread == first else {}
        for told in ranks.run(SPREADS[spread].num_ranks, hand_on, spread, step, tmp_path, now, at_last):
            assert told == {key: [] for key in (*now, *(f"{name}, later" for name in at_last))}
