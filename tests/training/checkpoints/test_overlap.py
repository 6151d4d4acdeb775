"""A checkpoint that is copied while the next step's passes run holds what was there before that step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.saving import staging
from elastic_ext.fsdp.checkpoint.saving.rescue import complete, rows_in
from elastic_ext.training.checkpoints.state import has_idle_core, num_cores, why_not_overlap
from tests.support.file_operations import FileOperations
from tests.support.overlapping import WRAPS, Gate, Net, forget_newer, learn, saving_trainer
from tests.support.ranks import RankPool
from tests.support.saving import end_saves
from tests.support.sharded import values_of
from tests.support.training import bits_of, make_data


def state_of(model: nn.Module, inner: Optimizer, average: nn.Module) -> list[Any]:
    moments = [state for part, state in inner.state.items() if part.numel()]
    rates = [group["lr"] for group in inner.param_groups]
    return bits_of(values_of(model), list(model.buffers()), moments, list(average.state_dict().values())) + rates


def train(rank: int, folder: Path, way: str, seed: int, num_steps: int, gate: Gate | None) -> tuple[Any, Any]:
    """What the run began with, and what the checkpoint of step 2 has to have."""
    plain = Net(seed, is_sharded=way.startswith("fully_shard"))
    model = WRAPS[way](plain)
    average = AveragedModel(plain) if way == "plain" else nn.Linear(1, 1)
    inner = AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = saving_trainer(folder, model, rank=rank)
    trainer.register_state("average", {name.replace(".", "/"): one for name, one in average.state_dict().items()})
    inputs, targets = make_data(4, torch.float32)
    due: Any = None
    with trainer:
        optimizer = trainer.prepare(inner)
        found = state_of(model, inner, average)
        for step in range(num_steps):
            if trainer.global_step == 2:
                due = state_of(model, inner, average)
                assert gate is not None
                gate.close()
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if trainer.global_step == 2 and step == 2:
                    assert trainer._training.checkpoints.job.saver.is_copying
                    gate.open_soon()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            if way == "plain":
                average.update_parameters(plain)  # type: ignore[operator]
            with trainer.mutate(), torch.no_grad():
                for part in model.parameters():
                    part.mul_(1.01)
            inner.param_groups[0]["lr"] *= 0.9
    return found, due


def on_ranks(rank: int, folder: Path, way: str) -> None:
    (folder / str(rank)).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        _, due = train(rank, folder, way, 0, 4, gate)
    if rank == 0:
        forget_newer(folder, 4)
    if way != "plain":
        torch.distributed.barrier()
    found, _ = train(rank, folder, way, 7, 0, None)
    assert found == due


def test_what_was_there_before_the_step_is_saved_while_all_changes(tmp_path: Path) -> None:
    on_ranks(0, tmp_path, "plain")


@pytest.mark.parametrize("way", ["ddp", "fully_shard", "fully_shard, offloaded"])
def test_the_same_on_ranks(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, on_ranks, tmp_path, way)


class Loop:
    """A trainer that saves after its first step, and is in the next one's forward pass when it has been made."""

    def __init__(
        self,
        tmp_path: Path,
        model: nn.Linear | None = None,
        before_prepare: Callable[[Optimizer], object] = lambda _: None,
    ) -> None:
        self.model = nn.Linear(6, 5).double() if model is None else model
        self.trainer = saving_trainer(tmp_path, self.model, checkpoint_interval=CheckpointInterval(steps=1))
        trained = [part for part in self.model.parameters() if part.requires_grad]
        inner = SGD(trained, lr=0.1)
        before_prepare(inner)
        self.optimizer = self.trainer.prepare(inner)

    def pass_through(self) -> None:
        inputs, targets = make_data(4)
        nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    def take(self) -> None:
        with self.trainer.step():
            learn(self.model, self.optimizer, make_data(4))


def test_a_change_in_place_that_nobody_was_told_of_is_an_error_that_names_the_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path)
    gate.open()
    loop.take()
    gate.close()
    with loop.trainer.step():
        loop.pass_through()
        with torch.no_grad():
            loop.model.bias.add_(1.0)
        gate.open()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    with pytest.raises(CheckpointError, match=r"bias was changed in place while it was being copied.*trainer\.mutate"):
        loop.trainer.close()
    assert not list((tmp_path / "storage").glob("fsdp_checkpoint/*/step_1/COMMIT"))


PAST_AUTOGRAD: dict[str, Callable[[Any], object]] = {
    "numpy": lambda tensor: tensor.numpy().fill(0),
    "dlpack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor).zero_(),
    "frombuffer": lambda tensor: torch.frombuffer(tensor.numpy().data, dtype=tensor.dtype).zero_(),
    "storage": lambda tensor: tensor.untyped_storage().fill_(0),
    "data": lambda tensor: tensor.data.mul_(0.5),
}


@pytest.mark.parametrize("way", PAST_AUTOGRAD)
def test_a_change_that_autograd_does_not_hear_of_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path, nn.Linear(64, 5).double())
    inputs = torch.ones(4, 64, dtype=torch.float64)
    gate.open()
    for is_late in (False, True):
        with loop.trainer.step():
            if is_late:
                PAST_AUTOGRAD[way](loop.model.weight.detach())
            loop.model(inputs).sum().backward()
            gate.open()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        gate.close()
    gate.open()
    with pytest.raises(CheckpointError, match=r"weight was changed in place while it was being copied"):
        loop.trainer.close()
    assert not list((tmp_path / "storage").glob("fsdp_checkpoint/*/step_1/COMMIT"))


@pytest.fixture
def shelf(ram: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An agent's folder, in memory as they are, for a trainer that is made afterwards."""
    folder = ram / "shelf"
    folder.mkdir()
    monkeypatch.setenv("ELASTIC_EXT_STAGING_DIR", str(folder))
    return folder


def test_what_is_refused_as_changed_in_place_is_not_completed_by_the_agent(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path)
    gate.open()
    loop.take()
    gate.close()
    with loop.trainer.step():
        loop.pass_through()
        with torch.no_grad():
            loop.model.bias.add_(1.0)
        gate.open()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    with pytest.raises(CheckpointError, match="bias was changed in place"):
        loop.trainer.close()
    assert complete(shelf) == []
    assert not list((tmp_path / "storage").glob("fsdp_checkpoint/*/step_*/COMMIT"))


def test_what_was_copied_beside_a_step_is_for_the_agent_from_the_optimizers_step_on(
    tmp_path: Path, shelf: Path
) -> None:
    loop = Loop(tmp_path)
    loop.take()
    due = loop.model.bias.detach().clone()
    full = FileOperations(tmp_path / "storage", "full", range(1000), like="os.mkdir")
    with loop.trainer.step():
        loop.pass_through()
        end_saves()  # it is copied, and there is no room to write it
        assert rows_in(shelf) == []
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert [row.name for row in rows_in(shelf)] == ["step_1"]
    with pytest.raises(CheckpointError, match="No space left"):
        loop.trainer.close()
    full.end()
    (outcome,) = complete(shelf)
    assert outcome.path is not None
    (path,) = outcome.path.glob("model_param.*")
    assert torch.equal(load_file(path)["bias"], due)


def test_a_copy_that_fails_beside_a_step_is_for_no_agent_to_complete(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("it cannot be read")

    monkeypatch.setattr(staging, "put_bytes", fail)
    loop = Loop(tmp_path)
    loop.take()
    loop.take()
    assert rows_in(shelf) == []
    with pytest.raises(CheckpointError, match="it cannot be read"):
        loop.trainer.close()
    assert complete(shelf) == []


class Averaging(nn.Linear):
    """A parameter that no optimizer has follows the others in each pass."""

    def __init__(self) -> None:
        super().__init__(6, 5)
        self.double()
        self.key = nn.Parameter(torch.zeros(5, 6, dtype=torch.float64), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.key.data.add_(1.0)
        return super().forward(inputs)


def test_a_parameter_that_no_optimizer_has_is_copied_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    model = Averaging()
    loop = Loop(tmp_path, model)
    gate.open()
    loop.take()
    gate.close()
    with loop.trainer.step():
        loop.pass_through()
        gate.open()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.trainer.close()
    (path,) = (tmp_path / "storage").glob("fsdp_checkpoint/*/step_1/model_param.*")
    assert torch.equal(load_file(path)["key"], torch.ones(30, dtype=torch.float64))


def test_mutate_waits_and_costs_nothing_where_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path)
    gate.open()
    with loop.trainer.mutate():
        pass
    loop.take()
    gate.close()
    with loop.trainer.step():
        loop.pass_through()
        opened = gate.open_soon()
        with loop.trainer.mutate(), torch.no_grad():
            assert not opened.is_alive()
            loop.model.bias.add_(1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.trainer.close()
    assert len(list((tmp_path / "storage").glob("fsdp_checkpoint/*/step_*/COMMIT"))) == 2


def shrink(optimizer: Optimizer, *_: Any) -> None:
    """A hook of a script's own, such as a decay of weights, before each step."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for part in group["params"]:
                part.mul_(0.5)


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("has_closure", [False, True])
def test_what_hangs_on_the_optimizers_step_waits_for_the_copy_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_global: bool, has_closure: bool
) -> None:
    gate = Gate(monkeypatch)
    hooks: list[RemovableHandle] = []

    def hang(inner: Optimizer) -> None:
        register = register_optimizer_step_pre_hook if is_global else inner.register_step_pre_hook
        hooks.append(register(shrink))

    loop = Loop(tmp_path, before_prepare=hang)
    gate.open()
    loop.take()
    due = loop.model.weight.detach().clone()
    gate.close()
    with loop.trainer.step():
        assert loop.trainer._training.checkpoints.job.saver.is_copying
        gate.open_soon()
        if has_closure:
            loop.optimizer.step(loop.pass_through)
        else:
            loop.pass_through()
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.trainer.close()
    hooks.pop().remove()
    (path,) = (tmp_path / "storage").glob("fsdp_checkpoint/*/step_1/model_param.*")
    assert torch.equal(load_file(path)["weight"], due.flatten())


def test_a_step_that_fails_while_it_is_copied_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    loop = Loop(tmp_path)
    gate.open()
    loop.take()
    gate.close()

    def fail() -> None:
        with loop.trainer.step():
            loop.pass_through()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    gate.open_soon()
    loop.take()
    loop.trainer.close()
    assert len(list((tmp_path / "storage").glob("fsdp_checkpoint/*/step_*/COMMIT"))) == 2


def test_no_hooks_are_left_on_the_optimizer_by_a_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.take()  # from here on they are there by which the profile sees steps
    hooks: Any = loop.optimizer.inner._optimizer_step_pre_hooks
    before = len(hooks)
    for _ in range(3):
        loop.take()
        assert len(hooks) == before
    loop.trainer.close()


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "has_one"),
    [(2, 1, 1, True), (2, 1, 2, False), (2, 2, 1, False), (4, 2, 1, True), (16, 2, 8, False), (1.5, 1, 1, False)],
)
def test_a_core_is_idle_where_every_rank_finds_one(cores: float, ranks: int, threads: int, has_one: bool) -> None:
    assert has_idle_core(num_cores=cores, num_ranks=ranks, num_threads=threads) is has_one
    assert num_cores() >= 0.1


class OwnSGD(SGD):
    """An optimizer of somebody's own."""


def test_where_parameters_may_change_elsewhere_they_are_copied_before_the_step() -> None:
    model = nn.Linear(2, 2)

    def why(optimizer: Optimizer, sharding: str = "none", asked: Any = True) -> str | None:
        return why_not_overlap(model, [optimizer], sharding=sharding, ranks_here=1, asked=asked)

    assert why(SGD(model.parameters())) is None
    assert why(SGD(model.parameters()), asked=False) == "overlap_saving is False"
    assert "OwnSGD" in (why(OwnSGD(model.parameters())) or "")
    assert "FSDP1" in (why(SGD(model.parameters()), "FSDP1") or "")
    hook: RemovableHandle = model.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: None
    )
    assert "hooks act" in (why(SGD(model.parameters())) or "")
    hook.remove()
    assert why(SGD(model.parameters())) is None
    assert why_not_overlap(model, [], sharding="none", ranks_here=10_000, asked="auto") == "no core is idle"


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("asked", ["auto", True])
def test_what_torch_changes_in_a_pass_is_copied_before_the_step(kind: Any, asked: Any) -> None:
    def why(max_norm: float | None) -> str | None:
        model = nn.Sequential(kind(4, 2, max_norm=max_norm), nn.Linear(2, 2))
        return why_not_overlap(model, [SGD(model.parameters())], sharding="none", ranks_here=0, asked=asked)

    assert why(None) is None
    assert why(1.0) == f"{kind.__name__} with max_norm changes its weight in each pass"


def test_with_max_norm_what_is_saved_is_what_was_there_before_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(4, 6, max_norm=0.1), nn.Linear(6, 5)).double()
    loop = Loop(tmp_path, model)
    saved: list[torch.Tensor] = []
    for _ in range(3):
        saved.append(model[0].weight.detach().clone())
        with loop.trainer.step():
            nn.functional.cross_entropy(model(torch.arange(4)), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
            assert not loop.trainer._training.checkpoints.job.saver.is_copying
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.trainer.close()
    for step in (1, 2):
        (path,) = (tmp_path / "storage").glob(f"fsdp_checkpoint/*/step_{step}/model_param.*")
        assert torch.equal(load_file(path)["0.weight"], saved[step].flatten())
