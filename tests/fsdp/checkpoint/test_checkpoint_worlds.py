"""Checkpoints and a number of ranks that changes: what belongs to ranks, and saves that the change interrupts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext.errors import PeerLostError
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.saving import (
    Saved,
    checkpointer_of,
    extra_of,
    fill,
    go_on,
    job_folder,
    load_newest,
    make_state,
    newest_of,
)
from tests.support.thinning import the_first
from tests.support.training import make_data, make_model, trainer_of
from tests.support.trials import End, Trial, run_one, run_trials

_WAITS_SECONDS = 50.0  # for the other world, on a busy machine
WORLDS = pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])


# --- what belongs to ranks ------------------------------------------------------------------------------------------


def drawing_rank(rank: int, storage: Path, name: str, seeds: Sequence[int], saves: bool) -> list[float]:
    """What a trainer's rank draws next, from each generator, after it has saved or has resumed."""
    folder = storage.parent / name
    folder.mkdir(exist_ok=True)
    model = DistributedDataParallel(make_model())
    shuffled = torch.Generator()
    loader = DataLoader(TensorDataset(*make_data(24)), batch_size=4, shuffle=True, generator=shuffled)
    trainer = trainer_of(folder, model, loader, rank=rank, shared_storage_path=storage)
    for draw in (random.seed, numpy.random.seed, torch.manual_seed):
        draw(seeds[rank])
    shuffled.manual_seed(100 + seeds[rank])
    with trainer:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
        if saves:
            trainer.save_checkpoint()
        drawn = [random.random(), numpy.random.random(), torch.rand(()).item()]
        return [*drawn, torch.rand((), generator=shuffled).item()]


@WORLDS
def test_random_state_goes_on_with_as_many_ranks_and_begins_anew_from_the_first_ranks_with_others(
    before: int, after: int, ranks: RankPool, tmp_path: Path
) -> None:
    storages = [tmp_path / name for name in ("storage", "others-differ", "first-differs")]
    seeds = [(1, 2, 3), (1, 8, 9), (7, 2, 3)]
    saved = [
        ranks.run(before, drawing_rank, storage, f"saved-{place}", seeds[place], True)
        for place, storage in enumerate(storages)
    ]
    as_many = ranks.run(before, drawing_rank, storages[0], "as-many", (4, 5, 6), False)
    assert as_many == saved[0], "each draws on where it was, whatever it had drawn before"
    anew = [
        ranks.run(after, drawing_rank, storage, f"anew-{place}", (4, 5, 6), False)
        for place, storage in enumerate(storages)
    ]
    again = ranks.run(after, drawing_rank, storages[0], "again", (10, 11, 12), False)
    first, others_differ, first_differs, again = ([of_rank[:3] for of_rank in of_run] for of_run in [*anew, again])
    assert again == first, "the same at each start, whatever was drawn before"
    assert others_differ == first, "of what other ranks had drawn it does not depend"
    assert_unlike(first, first_differs, *saved[:1])
    own = [torch.Generator().manual_seed(100 + seed) for seed in (4, 5, 6)[:after]]
    assert [of_rank[3] for of_rank in anew[0]] == [torch.rand((), generator=draw).item() for draw in own], (
        "a loader's own generator stays as the script has made it"
    )


def assert_unlike(*runs: list[list[float]]) -> None:
    """No number twice, on whatever rank of whatever run."""
    numbers = [number for of_run in runs for of_rank in of_run for number in of_rank]
    assert len(set(numbers)) == len(numbers)


def buffers_rank(rank: int, storage: Path, saves: bool) -> list[float]:
    """A rank of a model whose running means each rank has to itself; those that it has saved or has loaded."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.fill_(rank + 0.5 if saves else -1.0)
    norm.num_batches_tracked.fill_(rank + 10 if saves else -1)
    with checkpointer_of(storage) as checkpointer:
        if saves:
            checkpointer.save(1, model)
        else:
            checkpointer.load(model)
    assert torch.equal(norm.running_mean, norm.running_mean[:1].expand(6))
    return [norm.running_mean[0].item(), norm.num_batches_tracked.item()]


@WORLDS
def test_buffers_that_differ_come_back_to_as_many_ranks_and_are_the_first_ranks_on_others(
    before: int, after: int, ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks.run(before, buffers_rank, tmp_path / "storage", True)
    assert saved == [[rank + 0.5, rank + 10] for rank in range(before)]
    assert ranks.run(before, buffers_rank, tmp_path / "storage", False) == saved
    assert ranks.run(after, buffers_rank, tmp_path / "storage", False) == [saved[0]] * after


# --- a change in the middle of a save -------------------------------------------------------------------------------


def assert_went_on_from_step_1(ends: Sequence[End], storage: Path) -> None:
    """Each rank of the new world loaded step 1 and saved step 2, which is the newest and holds what it should."""
    assert all(isinstance(end.value, Saved) for end in ends), ends
    assert [(end.value.loaded_step, end.value.step) for end in ends] == [(1, 2)] * len(ends)
    assert load_newest(storage, 2).num_ranks == len(ends)


def save_and_die(_: int, storage: Path, like: str) -> None:
    """A rank that is killed when it comes to such an operation of its save, as a launcher ends a world."""
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        FileOperations(storage, "kill", 0, like=like)
        checkpointer.save(2, model, optimizer, extra_of(2))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("like", the_first(["os.writev", "os.mkdir", ".COMMIT."]))
def test_world_that_a_launcher_replaces_in_the_middle_of_a_save(
    like: str, num_ranks: int, ranks: RankPool, storage: Path
) -> None:
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=save_and_die, args=(storage, like)))
    assert ends[0].exit_signal == 9 and (ends[1].exit_signal == 9 or "PeerLostError" in str(ends[1].error)), ends
    assert newest_of(storage) == 1
    ends = run_one(ranks, storage.parent / "ends", Trial(fn=go_on, args=(storage,), num_ranks=num_ranks))
    assert_went_on_from_step_1(ends, storage)


def save_without_one(rank: int, storage: Path, victim: int) -> Saved:
    """A rank of three, one of which dies while all save; those that are left go on, as the same processes."""
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        FileOperations(storage, "kill", 0 if rank == victim else None, like="os.writev")
        with pytest.raises(PeerLostError):
            checkpointer.save(2, model, optimizer, extra_of(2))
    dist.destroy_process_group()
    store = dist.FileStore(str(storage.parent / f"without-{victim}"), 2)  # type: ignore[attr-defined]
    own = rank - (rank > victim)
    dist.init_process_group("gloo", store=store, rank=own, world_size=2, timeout=timedelta(seconds=60))
    return go_on(own, storage)


@pytest.mark.parametrize("victim", the_first([0, 2]))
def test_ranks_that_are_left_in_the_middle_of_a_save_go_on_as_a_smaller_world(
    victim: int, ranks: RankPool, storage: Path
) -> None:
    trial = Trial(fn=save_without_one, args=(storage, victim), num_ranks=3)
    ends = run_one(ranks, storage.parent / "ends", trial)
    assert ends[victim].exit_signal == 9
    assert_went_on_from_step_1([end for rank, end in enumerate(ends) if rank != victim], storage)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + _WAITS_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, path
        threading.Event().wait(0.02)


def save_late(rank: int, storage: Path, like: str) -> None:
    """A rank of a world whose first one is held up in its save until another world has saved.

    The other one sees no lock of it, as on storage that has none.
    """

    def be_held_up() -> None:
        (job_folder(storage) / "RUN.lock").unlink()
        (storage.parent / "held-up").touch()
        wait_for(storage.parent / "overtaken")

    model, optimizer = make_state()
    with checkpointer_of(storage, storage_timeout_seconds=_WAITS_SECONDS + 5) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        fill(model, optimizer, 7)
        FileOperations(storage, be_held_up, 0 if rank == 0 else None, like=like)
        checkpointer.save(2, model, optimizer, extra_of(2))


def overtake(rank: int, storage: Path) -> Saved:
    wait_for(storage.parent / "held-up")
    saved = go_on(rank, storage)
    dist.barrier()
    (storage.parent / "overtaken").touch()
    return saved


@pytest.mark.parametrize("like", the_first([".COMMIT.", "os.mkdir", "os.link", "os.writev"], 2))
def test_world_that_lives_on_after_another_has_taken_its_place_saves_nothing(
    like: str, ranks: RankPool, storage: Path
) -> None:
    old, new = run_trials(
        ranks,
        storage.parent / "ends",
        [Trial(fn=save_late, args=(storage, like)), Trial(fn=overtake, args=(storage,), num_ranks=3)],
    )
    assert_went_on_from_step_1(new, storage)
    errors = {end.error for end in old}
    assert len(errors) == 1 and str(errors).count("CheckpointFenced: ") == 1, old
    assert "was taken over by another run of this job" in str(errors)
