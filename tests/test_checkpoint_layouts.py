"""Checkpoints saved in one layout and loaded in another: what is loaded is what was saved, bit for bit, on every rank,
for every way to spread a model and every optimizer; and a training goes on as the one that was saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from elastic_ext.fsdp import ShardCheckpointer
from tests.ranks import RankPool
from tests.spread import SPREADS, Everything, differences, overwrite, train, whole_state

NUM_STEPS = 3

MakeOptimizers = Callable[[nn.Module], list[Optimizer]]


def amsgrad(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, amsgrad=True)]


def make(name: str, make_optimizers: MakeOptimizers, seed: int) -> tuple[nn.Module, list[Optimizer]]:
    model = SPREADS[name].wrap(Everything(seed))
    return model, make_optimizers(model)


def write(path: Path, state: Mapping[str, Any], rank: int) -> None:
    if rank == 0:
        torch.save(state, path)


def save_all(rank: int, names: Sequence[str], folder: Path) -> None:
    """A checkpoint of each way to spread the model, what is in it, and what it would have been three steps later."""
    for name in names:
        model, optimizers = make(name, amsgrad, zlib.crc32(name.encode()))
        train(model, optimizers, NUM_STEPS)
        with ShardCheckpointer(folder, job=name) as checkpointer:
            checkpointer.save(NUM_STEPS, model, optimizers, {"name": name})
        write(folder / f"{name}.now", whole_state(model, optimizers), rank)
        train(model, optimizers, 3, first=NUM_STEPS)
        write(folder / f"{name}.later", whole_state(model, optimizers), rank)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for num_ranks in sorted({spread.num_ranks for spread in SPREADS.values()}):
        names = [name for name, spread in SPREADS.items() if spread.num_ranks == num_ranks]
        ranks.run(num_ranks, save_all, names, folder)
    return folder


def load_all(rank: int, name: str, folder: Path) -> dict[str, list[str]]:
    """What is not as it was saved, once a model spread one way has loaded what each of the others has saved."""
    model, optimizers = make(name, amsgrad, 1)
    told = {}
    for other in SPREADS:
        overwrite(model, optimizers)
        with ShardCheckpointer(folder, job=other) as checkpointer:
            loaded = checkpointer.load(model, optimizers)
        assert (loaded.step, loaded.extra) == (NUM_STEPS, {"name": other})
        told[other] = differences(whole_state(model, optimizers), torch.load(folder / f"{other}.now"))
        if other == name:
            train(model, optimizers, 3, first=NUM_STEPS)
            told[f"{other}, later"] = differences(whole_state(model, optimizers), torch.load(folder / f"{other}.later"))
    return told


@pytest.mark.parametrize("name", SPREADS)
def test_a_model_spread_one_way_takes_up_what_was_saved_in_any_other(ranks: RankPool, saved: Path, name: str) -> None:
    for told in ranks.run(SPREADS[name].num_ranks, load_all, name, saved):
        assert told == dict.fromkeys(told, [])
