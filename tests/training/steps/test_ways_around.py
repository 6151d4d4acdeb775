"""What stands around a loop's steps: validation, several dataloaders, loops that stop early, copies of the model, and
notebooks, whose cells are run again and interrupted.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticError
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.scripts import begun
from tests.support.thinning import the_first
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of

NUM_PARTS = 4
Batches = Iterator[tuple[Tensor, Tensor]]


def loader_of(num_samples: int, batch_size: int = 2, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(num_samples, seed=seed)), batch_size=batch_size)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.125, momentum=0.9)


def validation_loss(model: nn.Module) -> float:
    """A validation loop as most are written."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in loader_of(12, 4, seed=2):
            total += cross_entropy(model(inputs), targets).item()
    model.train()
    return total


def moody_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()


# ---- validation, several dataloaders, loops that stop early ----


def test_validation_between_micro_steps_steps_and_epochs_changes_nothing(tmp_path: Path) -> None:
    found: list[Any] = []
    for is_by_hand in (True, False):
        torch.manual_seed(0)
        model, loader, losses = moody_model(), loader_of(32), []
        optimizer: Any = sgd(model)
        if is_by_hand:
            for _ in range(2):
                for index, (inputs, targets) in enumerate(loader):
                    (cross_entropy(model(inputs), targets) / NUM_PARTS).backward()  # type: ignore[no-untyped-call]
                    if index % 3:
                        losses.append(validation_loss(model))
                    if index % NUM_PARTS == NUM_PARTS - 1:
                        optimizer.step()
                        optimizer.zero_grad()
                    if not index % 3:
                        losses.append(validation_loss(model))
                losses.append(validation_loss(model))
        else:
            trainer = trainer_of(tmp_path, model, loader, global_batch_size=2 * NUM_PARTS)
            optimizer = trainer.prepare(optimizer)
            with trainer:
                for epoch in range(2):
                    with trainer.epoch(epoch):
                        for index, (inputs, targets) in enumerate(loader):
                            with trainer.step():
                                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                                if index % 3:  # inside of the micro-step, and outside
                                    losses.append(validation_loss(model))
                                optimizer.step()
                                optimizer.zero_grad()
                            if not index % 3:
                                losses.append(validation_loss(model))
                    losses.append(validation_loss(model))
        found.append((losses, bits_of(model, optimizer.state_dict())))
    assert found[0] == found[1]


def from_both(first: DataLoader[Any], second: DataLoader[Any]) -> Batches:
    """Micro-batches of two loaders by turns."""
    for one, other in zip(first, second, strict=True):
        yield one
        yield other


def test_a_loop_over_several_dataloaders_is_told_the_size_of_its_micro_batches(tmp_path: Path) -> None:
    found: list[Any] = []
    for is_by_hand in (True, False):
        model, loaders = make_model(), (loader_of(16), loader_of(16, seed=3))
        optimizer: Any = sgd(model)
        if is_by_hand:
            for index, (inputs, targets) in enumerate(from_both(*loaders)):
                (cross_entropy(model(inputs), targets) / NUM_PARTS).backward()  # type: ignore[no-untyped-call]
                if index % NUM_PARTS == NUM_PARTS - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            trainer = trainer_of(tmp_path, model, micro_batch_size=2, global_batch_size=2 * NUM_PARTS)
            optimizer = trainer.prepare(optimizer)
            with trainer, trainer.epoch():
                for inputs, targets in from_both(*loaders):
                    with trainer.step():
                        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
            assert trainer.global_step == 4
        found.append(bits_of(model, optimizer.state_dict()))
    assert found[0] == found[1]


def test_several_dataloaders_in_one_micro_step_count_as_the_one_that_the_trainer_was_given(tmp_path: Path) -> None:
    found: list[Any] = []
    for is_by_hand in (True, False):
        model, loader, more = make_model(), loader_of(32), loader_of(48, 3, seed=3)
        optimizer: Any = sgd(model)
        both = zip(loader, more, strict=True)
        if is_by_hand:
            for index, ((inputs, targets), (others, _)) in enumerate(both):
                loss = cross_entropy(model(inputs), targets) + 0.25 * model(others).square().mean()
                (loss / NUM_PARTS).backward()
                if index % NUM_PARTS == NUM_PARTS - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            trainer = trainer_of(tmp_path, model, loader, global_batch_size=2 * NUM_PARTS)
            optimizer = trainer.prepare(optimizer)
            with trainer, trainer.epoch():
                for (inputs, targets), (others, _) in both:
                    with trainer.step():
                        loss = cross_entropy(model(inputs), targets) + 0.25 * model(others).square().mean()
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
        found.append(bits_of(model, optimizer.state_dict()))
    assert found[0] == found[1]


@pytest.mark.parametrize("num_batches", [8, 9, 11])
def test_a_generator_that_stops_early_leaves_whole_steps_and_a_word_about_the_rest(
    tmp_path: Path, num_batches: int
) -> None:
    def batches() -> Batches:
        for index, batch in enumerate(loader_of(32)):
            if index == num_batches:
                return
            yield batch

    model, plain = make_model(), make_model()
    ours, theirs = sgd(model), sgd(plain)
    for index, (inputs, targets) in enumerate(batches()):
        if index < 8:
            (cross_entropy(plain(inputs), targets) / NUM_PARTS).backward()  # type: ignore[no-untyped-call]
            if index % NUM_PARTS == NUM_PARTS - 1:
                theirs.step()
                theirs.zero_grad()
    trainer = trainer_of(tmp_path, model, micro_batch_size=2, global_batch_size=2 * NUM_PARTS)
    optimizer = trainer.prepare(ours)
    with seen_by() as seen, trainer, trainer.epoch():
        for inputs, targets in batches():
            with trainer.step():
                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.global_step == 2
    dropped = [line for line in seen.log if "micro-steps of a step were dropped" in line]
    assert len(dropped) == (num_batches > 8)
    assert bits_of(model) == bits_of(plain)
    assert all(part.grad is None for part in model.parameters())


# ---- copies of the model ----


def test_copies_of_a_model_in_training_are_made_as_of_any_other_and_are_not_weighed(tmp_path: Path) -> None:
    model = make_model()
    source = Slices(make_data(16), 2)
    trainer = trainer_of(tmp_path, model, source, global_batch_size=8)
    optimizer = trainer.prepare(sgd(model))
    inputs, targets = make_data(4, seed=5)
    num_copies = 0
    with trainer, trainer.epoch():
        for one, classes in source:
            with trainer.step():
                cross_entropy(model(one), classes).backward()  # type: ignore[no-untyped-call]
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                for other in (copy.deepcopy(model), torch.load(file, weights_only=False), AveragedModel(model).module):
                    assert bits_of(other) == bits_of(model)
                    other.zero_grad()
                    cross_entropy(other(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    plain = make_model()
                    plain.load_state_dict(other.state_dict())
                    cross_entropy(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
                    theirs, mine = ([part.grad for part in each.parameters()] for each in (other, plain))
                    assert bits_of(theirs) == bits_of(mine)
                    num_copies += 1
                optimizer.step()
                optimizer.zero_grad()
    assert num_copies == 24
    assert trainer.global_step == 2


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("is_new", the_first([False, True]), ids=["forked", "new interpreter"])
def test_a_model_saved_while_it_trains_loads_without_this_library(tmp_path: Path, is_new: bool) -> None:
    """A script that is forked forgets what was imported of it before."""
    model = make_model()
    trainer = trainer_of(tmp_path, model, loader_of(8), global_batch_size=8)
    optimizer = trainer.prepare(sgd(model))
    with trainer:
        for inputs, targets in loader_of(8):
            with trainer.step():
                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                assert model._forward_hooks
                torch.save(model, tmp_path / "model.pt")
                optimizer.step()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "for name in [name for name in sys.modules if name.startswith('elastic_ext')]:\n"
        "    del sys.modules[name]\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "model(torch.zeros(1, 6).double()).sum().backward()\n"
        "assert not [name for name in sys.modules if name.startswith('elastic_ext')]\n"
    )
    with begun([str(script)], env=os.environ, is_new=is_new) as ended:
        told, _ = ended.communicate(timeout=120)
    assert ended.returncode == 0, told


def test_an_average_of_the_model_is_kept_as_by_hand(tmp_path: Path) -> None:
    averaging = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    model, plain = make_model(), make_model()
    theirs, average = sgd(plain), AveragedModel(plain, multi_avg_fn=averaging)
    for index, (inputs, targets) in enumerate(loader_of(32)):
        (cross_entropy(plain(inputs), targets) / NUM_PARTS).backward()  # type: ignore[no-untyped-call]
        if index % NUM_PARTS == NUM_PARTS - 1:
            theirs.step()
            theirs.zero_grad()
            average.update_parameters(plain)
    loader = loader_of(32)
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=2 * NUM_PARTS)
    optimizer, ours = trainer.prepare(sgd(model)), AveragedModel(model, multi_avg_fn=averaging)
    with trainer, trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if trainer.sync_gradients:
                ours.update_parameters(model)
    assert bits_of(ours, model) == bits_of(average, plain)


def copied_on_a_rank(rank: int, folder: Path, rollback: str) -> None:
    model = DistributedDataParallel(make_model())
    source = Slices(make_data(16), 2)
    trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=8, rollback=rollback)
    optimizer = trainer.prepare(sgd(model))
    with trainer, trainer.epoch():
        for inputs, targets in source:
            with trainer.step():
                cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            copy.deepcopy(model.module)
            copy.deepcopy(model)


def test_the_model_inside_of_ddp_can_be_copied(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, copied_on_a_rank, tmp_path, "gradients", process_group=True)


def test_the_model_inside_of_ddp_can_be_copied_where_everything_is_rolled_back(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, copied_on_a_rank, tmp_path, "full", process_group=True)


# ---- notebooks ----

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from elastic_ext import ElasticTrainer, FollowOptions
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(5, (32,))), batch_size=2)
model = nn.Linear(6, 5)
interrupted_at = None
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.125)"
TRAINER = """trainer = ElasticTrainer(
    model, loader, global_batch_size=8, follow_options=FollowOptions(run_dir=run_dir, job='notebook')
)"""
PREPARE = "optimizer = trainer.prepare(optimizer)"
TRAIN = """
with trainer.epoch():
    for index, (inputs, targets) in enumerate(loader):
        with trainer.step():
            nn.functional.cross_entropy(model(inputs), targets).backward()
            if index == interrupted_at:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()
"""


class Notebook:
    """Cells that are run in one namespace."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, Any] = {"run_dir": folder}
        self.run(SETUP)

    def run(self, *cells: str) -> None:
        for cell in cells:
            exec(compile(cell, "cell", "exec"), self.names)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.run("trainer.close()", "trainer.close()")


def test_cells_train_on_and_on_without_a_with_around_the_trainer(notebook: Notebook) -> None:
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN, TRAIN)
    assert notebook.trainer.global_step == 8
    notebook.run("trainer.close()")
    with pytest.raises(ElasticError, match=r"trainer.close\(\) was called.* make a new follower or trainer"):
        notebook.run(TRAIN)
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN)
    assert notebook.trainer.global_step == 4


def test_a_cell_that_prepares_twice_or_makes_a_second_trainer_says_what_to_do(notebook: Notebook) -> None:
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN)
    with pytest.raises(ElasticError, match=r"prepare\(\) was called before"):
        notebook.run(PREPARE)
    notebook.run(TRAINER)
    with pytest.raises(ElasticError, match=r"prepare\(\) was not called; call it with the optimizer"):
        notebook.run(TRAIN)
    with pytest.raises(ValueError, match=r"optimizer is an ElasticOptimizer; give .* its `inner`"):
        notebook.run(PREPARE)
    notebook.run("optimizer = trainer.prepare(optimizer.inner)", TRAIN)
    assert notebook.trainer.global_step == 4


def test_a_second_trainer_of_the_same_model_trains_as_the_first_would(tmp_path: Path, notebook: Notebook) -> None:
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN, "first = trainer", OPTIMIZER, TRAINER, PREPARE, TRAIN)
    other = Notebook(tmp_path)
    other.run(OPTIMIZER, TRAINER, PREPARE, TRAIN, TRAIN)
    assert bits_of(notebook.model) == bits_of(other.model)
    notebook.first.close()
    other.trainer.close()


@pytest.mark.parametrize("at", [0, 5, 7, 15])
def test_an_interrupted_cell_leaves_whole_steps_and_the_next_one_goes_on(
    tmp_path: Path, notebook: Notebook, at: int
) -> None:
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN, f"interrupted_at = {at}")
    with pytest.raises(KeyboardInterrupt):
        notebook.run(TRAIN)
    assert notebook.trainer.global_step == 4 + at // NUM_PARTS
    notebook.run("interrupted_at = None", TRAIN)
    assert notebook.trainer.global_step == 8 + at // NUM_PARTS
    plain = Notebook(tmp_path)
    plain.run(OPTIMIZER)
    order = [*range(16), *range(at // NUM_PARTS * NUM_PARTS), *range(16)]
    batches = list(plain.loader)
    for index, number in enumerate(order):
        (cross_entropy(plain.model(batches[number][0]), batches[number][1]) / NUM_PARTS).backward()  # type: ignore[no-untyped-call]
        if index % NUM_PARTS == NUM_PARTS - 1:
            plain.run("optimizer.step()", "optimizer.zero_grad()")
    assert bits_of(notebook.model) == bits_of(plain.model)


def test_a_trainer_that_is_dropped_ends_its_threads_and_leaves_its_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    notebook = Notebook(tmp_path)
    notebook.run(OPTIMIZER, TRAINER, PREPARE, TRAIN)
    model = weakref.ref(notebook.model)
    assert set(threading.enumerate()) > before
    assert notebook.model._forward_hooks
    notebook.run("del trainer, optimizer")
    assert set(threading.enumerate()) == before
    assert not notebook.model._forward_hooks
    notebook.run("del model, inputs, targets")
    gc.collect()
    assert model() is None


@pytest.mark.usefixtures("forked_jobs")
def test_a_script_that_forgets_to_close_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join([f"run_dir = {str(tmp_path)!r}", SETUP, OPTIMIZER, TRAINER, PREPARE, TRAIN]))
    with begun([str(script)], env=os.environ) as ended:
        told, _ = ended.communicate(timeout=120)
    assert ended.returncode == 0
    assert "Traceback" not in told


FOLLOWING = TRAINER.replace("run_dir=run_dir", "run_dir=run_dir, config_file=folder / 'config.json'")
LEAVING = """
import logging, shutil, sys
from pathlib import Path

logging.basicConfig(level=logging.WARNING)

def make_folder(name):
    folder = Path(run_dir) / name
    folder.mkdir()
    (folder / "config.json").write_text('{"version": 1, "optimizer": {"learning_rate": 0.25}}')
    return folder
"""


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize(("is_closed", "is_new"), the_first([(False, False), (False, True), (True, True)]))
def test_a_script_whose_config_file_is_gone_at_the_end_says_nothing(
    tmp_path: Path, is_closed: bool, is_new: bool
) -> None:
    """One whose folder stays, and one whose folder is removed before; each warning is an error that is written."""
    cells = [f"run_dir = {str(tmp_path)!r}", "import warnings", "warnings.simplefilter('error')", SETUP, LEAVING]
    for name, gone in (("there", ""), ("gone", "shutil.rmtree(folder)")):
        cells += [f"folder = make_folder({name!r})", OPTIMIZER, FOLLOWING, PREPARE, TRAIN, gone, TRAIN]
        cells += ["assert optimizer.effective_rates == [0.25]", "trainer.close()" if is_closed else f"{name} = trainer"]
    script = tmp_path / "script.py"
    script.write_text("\n".join(cells))
    options = ["-X", "dev", "-W", "error"] if is_new else []  # of an interpreter
    with begun([*options, str(script)], env=os.environ, is_new=is_new) as ended:
        told, _ = ended.communicate(timeout=120)
    assert told.count("was there at the start") == 2  # of both folders' files, as each training begins
    at_the_end = [line for line in told.splitlines() if "was there at the start" not in line]
    assert (ended.returncode, at_the_end) == (0, [])
