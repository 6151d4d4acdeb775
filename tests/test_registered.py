"""State that is registered with a trainer and comes back from a checkpoint, before prepare() or after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from elastic_ext.errors import CheckpointMismatch
from tests.training import make_model, trainer_of

State = torch.Tensor | Mapping[str, torch.Tensor]


def prepared(folder: Path, state: State | None = None) -> Any:
    """A trainer that resumes what is there, with state registered before that."""
    folder.mkdir(exist_ok=True)
    model = make_model()
    trainer = trainer_of(folder, model, shared_storage_path=folder / "storage")
    if state is not None:
        trainer.register_state("ema", state)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    return trainer


def save(folder: Path, state: State) -> None:
    with prepared(folder, state) as trainer:
        trainer.save_checkpoint()


UNFIT = [
    (torch.tensor([3.0]), torch.zeros(4), r"ema .torch.float32 .4,. here, torch.float32 .1,. there"),
    (torch.tensor([3.5]), torch.zeros(1, dtype=torch.int32), r"ema .torch.int32 .1,. here, torch.float32"),
    ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2)}, r"has \['a'\], and .* has \['a', 'b'\]"),
    ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}, r"a .torch.float32 .2, 1. here"),
]


@pytest.mark.parametrize(("saved", "held", "words"), UNFIT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_registered_state_of_another_shape_or_kind_is_refused(
    tmp_path: Path, saved: State, held: State, words: str, when: str
) -> None:
    save(tmp_path, saved)
    refused = pytest.raises(CheckpointMismatch, match=f"registered state 'ema' .*{words}")
    if when == "before":
        with refused:
            prepared(tmp_path, held)
    else:
        with prepared(tmp_path) as trainer, refused:
            trainer.register_state("ema", held)
    for tensor in held.values() if isinstance(held, Mapping) else [held]:
        assert not tensor.any()


def test_state_that_was_refused_comes_back_when_it_is_registered_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    with prepared(tmp_path) as trainer:
        with pytest.raises(CheckpointMismatch):
            trainer.register_state("ema", {"a": torch.zeros(1)})
        held = {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)}
        trainer.register_state("ema", held)
        assert [tensor.item() for tensor in held.values()] == [3.0, 4.0]
        with pytest.raises(ValueError, match="registered already"):
            trainer.register_state("ema", held)
