"""State that is registered with a trainer and comes back from a checkpoint, before prepare() or after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from elastic_ext.errors import CheckpointExists, CheckpointMismatch
from elastic_ext.fsdp.checkpoint.saving.collect import mixed_words
from tests.support.ranks import RankPool
from tests.support.training import make_model, trainer_of
from tests.support.watching import collected_warnings

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


def own_rank(rank: int, folder: Path, name: str) -> tuple[list[float], list[str]]:
    """What comes back of states of which a part is each rank's own, and what is warned of; the first run saves them."""
    held = {"mean": torch.zeros(2), "same": torch.zeros(200_000), "a/b": torch.zeros(())}
    late = torch.zeros(3)
    model = DistributedDataParallel(make_model())
    (folder / name).mkdir(exist_ok=True)
    trainer = trainer_of(folder / name, model, rank=rank, shared_storage_path=folder / "storage", micro_batch_size=2)
    with trainer, collected_warnings() as warned:
        trainer.register_state("my ema", held)
        trainer.prepare(SGD(model.parameters(), lr=0.1))
        trainer.register_state("late", late)
        found = [tensor.sum().item() for tensor in (*held.values(), late)]
        if name == "first":
            held["same"].fill_(1.0)
            for tensor in (held["mean"], held["a/b"], late):
                tensor.fill_(rank + 1.0)
            path = trainer.save_checkpoint()
            assert trainer.save_checkpoint() == path
            held["mean"].fill_(1.0)  # on all ranks, which is not what the second one has saved
            with pytest.raises(CheckpointExists, match=r"own_registered/./my%20ema/mean"):
                trainer.save_checkpoint()
    return found, warned.about("registered state")


def test_registered_state_that_differs_between_ranks_comes_back_to_each(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, own_rank, tmp_path, "first")
    (folder,) = (tmp_path / "storage" / "fsdp_checkpoint").glob("test_*/step_0")
    names = json.loads((folder / "extra_meta.json").read_text())["tensors"]
    own = {f"own_registered/{rank}/{key}" for rank in range(2) for key in ("my%20ema/mean", "my%20ema/a/b", "late/")}
    once = {f"registered/{key}" for key in ("my%20ema/mean", "my%20ema/a/b", "my%20ema/same", "late/")}
    assert {name for name in names if "registered" in name} == own | once
    assert ranks.run(2, own_rank, tmp_path, "again") == [([2.0, 2e5, 1.0, 3.0], []), ([4.0, 2e5, 2.0, 6.0], [])]
    told = f"{folder} has registered state late, my ema of each of 2 ranks, and here are 1: all get that of rank 0"
    assert ranks.run(1, own_rank, tmp_path, "alone") == [([2.0, 2e5, 1.0, 3.0], [told])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_digest_that_is_made_on_a_device_tells_of_every_bit_and_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(4099).to(dtype)
    seen = {mixed_words(tensor), mixed_words(tensor[:-1]), mixed_words(tensor[1:]), mixed_words(tensor.flip(0))}
    for place in (0, 1, 2048, 4098):
        other = tensor.clone()
        other.view(torch.uint8)[place * tensor.element_size()] ^= 1
        seen.add(mixed_words(other))
    assert len(seen) == 8 and mixed_words(tensor.clone()) in seen
