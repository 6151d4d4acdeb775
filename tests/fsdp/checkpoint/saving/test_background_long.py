"""Many saves beside training, storage that hangs for a minute, and a gigabyte: what a long run of a trainer meets."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from tests.support.file_operations import Gate
from tests.support.ranks import RankPool
from tests.support.saving import checkpointer_of, digest_of, end_saves, garbage_in, job_folder, make_state, newest_of
from tests.support.training import make_data, trainer_of
from tests.support.trials import Trial, run_one, run_trials


def prepared(
    rank: int, storage: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any
) -> tuple[Any, Any]:
    """A trainer that saves beside its steps, and what it steps."""
    options: dict[str, Any] = {"overlap_saving": True, "checkpoint_interval": CheckpointInterval(steps=1), **arguments}
    trainer = trainer_of(
        storage.parent, model, rank=rank, job="a-job", micro_batch_size=4, shared_storage_path=storage, **options
    )
    return trainer, trainer.prepare(optimizer)


def take(trainer: Any, model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    with trainer.step():
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def take_two(*arguments: Any) -> None:
    for _ in range(2):
        take(*arguments)


# --- many saves -----------------------------------------------------------------------------------------------------

WARM_SAVES = 20
_LEAK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What could leak."""

    threads: int
    files: int
    keys: int
    hooks: int
    memory_bytes: int


def save_often(rank: int, storage: Path, num_saves: int, overlaps: bool) -> list[Counted]:
    """What there is of it after some saves, and after all."""
    model, inner = make_state(width=64)
    trainer, optimizer = prepared(rank, storage, model, inner, overlap_saving=overlaps, keep_last=2)
    store: Any = trainer._training.checkpoints.job.ranks.board.store
    hooks: Any = inner._optimizer_step_pre_hooks
    process, counted = psutil.Process(), []
    data = make_data(4, torch.float32)
    with trainer:
        for step in range(num_saves + 1):
            take(trainer, model, optimizer, *data)  # the save of the step before begins in it
            if step in (WARM_SAVES, num_saves):
                trainer.save_checkpoint()
                end_saves()
                gc.collect()
                dist.barrier()
                counted.append(
                    Counted(
                        threads=threading.active_count(),
                        files=process.num_fds(),
                        keys=store.num_keys(),
                        hooks=len(hooks),
                        memory_bytes=process.memory_info().rss,
                    )
                )
                dist.barrier()
    assert newest_of(storage) == num_saves + 1 and garbage_in(storage) == []
    return counted


def leak_nothing(ranks: RankPool, folder: Path, num_saves: int, overlaps: bool) -> None:
    trial = Trial(fn=save_often, args=(folder / "storage", num_saves, overlaps))
    for end in run_one(ranks, folder / "ends", trial):
        assert end.error is None, end
        warm, last = end.value
        assert last.threads <= warm.threads and last.files <= warm.files, end.value
        assert last.keys <= warm.keys and last.hooks <= warm.hooks, end.value
        assert last.memory_bytes - warm.memory_bytes < _LEAK_BYTES, end.value


@pytest.mark.parametrize("overlaps", [False, True])
def test_saves_of_a_trainer_leak_nothing(ranks: RankPool, ram: Path, overlaps: bool) -> None:
    leak_nothing(ranks, ram, 36, overlaps)


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_200_saves_of_a_trainer_leak_nothing(ranks: RankPool, ram: Path, overlaps: bool) -> None:
    leak_nothing(ranks, ram, 220, overlaps)


# --- storage that hangs ---------------------------------------------------------------------------------------------

HANG_SECONDS = 60.0
NUM_STEPS = 100  # meanwhile


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def hang(rank: int, storage: Path, like: str, timeout_seconds: float) -> str:
    """What is told of step 4, whose save hangs on the first rank; step 2 is there, and training goes on."""
    model, inner = make_state()
    trainer, optimizer = prepared(
        rank,
        storage,
        model,
        inner,
        checkpoint_interval=CheckpointInterval(steps=2),
        when_saving="skip",
        timeout_seconds=timeout_seconds,
    )
    data, told = make_data(4, torch.float32), ""
    for _ in range(3):
        take(trainer, model, optimizer, *data)
    end_saves()
    dist.barrier()
    assert newest_of(storage) == 2
    gate, is_over = Gate(storage, like=like) if rank == 0 else None, threading.Event()
    take_two(trainer, model, optimizer, *data)
    if gate is not None:
        gate.wait_until_reached()
        threading.Timer(HANG_SECONDS, gate.open).start()
    dist.barrier()
    threading.Timer(HANG_SECONDS, is_over.set).start()
    for _ in range(NUM_STEPS):
        take(trainer, model, optimizer, *data)
    assert trainer.global_step == 5 + NUM_STEPS
    assert gate is None or not gate.is_open
    assert newest_of(storage) == 2
    other, other_optimizer = make_state(seed=4)
    with checkpointer_of(storage.with_name("other")) as checkpointer:
        assert checkpointer.load(other, other_optimizer, job_folder(storage) / "step_2").step == 2
    if timeout_seconds / 2 < HANG_SECONDS:
        is_over.wait(timeout_seconds / 2)
        assert gate is None or not gate.is_open
        told = error_of(lambda: take_two(trainer, model, optimizer, *data))
    assert is_over.wait(2 * HANG_SECONDS)
    end_saves()
    dist.barrier()
    is_made = (job_folder(storage) / "step_4" / COMMIT).exists()
    with trainer:
        take(trainer, model, optimizer, *data)
        newest = trainer.save_checkpoint()
        due = digest_of(model, inner)
    other, other_optimizer = make_state(seed=5)
    with checkpointer_of(storage.with_name("other")) as checkpointer:
        checkpointer.load(other, other_optimizer, newest)
    assert digest_of(other, other_optimizer) == due
    return told or f"step_4 is {'' if is_made else 'not '}made"


@pytest.mark.slow
def test_storage_that_hangs_for_a_minute_stops_no_training_and_its_save_is_made_or_told_of(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The storage may take 100 seconds, or 20."""
    cases = [(like, seconds) for like in ("os.mkdir", "os.writev", ".COMMIT.") for seconds in (200.0, 40.0)]
    folders = [tmp_path / str(place) for place in range(len(cases))]
    for folder in folders:
        folder.mkdir()
    trials = [
        Trial(fn=hang, args=(folder / "storage", like, seconds))
        for folder, (like, seconds) in zip(folders, cases, strict=True)
    ]
    for case, ends in zip(cases, run_trials(ranks, tmp_path / "ends", trials), strict=True):
        assert [end.error for end in ends] == [None, None], (case, ends)
        assert ends[0].value == ends[1].value
        if case[1] > 2 * HANG_SECONDS:
            assert ends[0].value == "step_4 is made", case
        else:
            assert "took longer than 20 seconds" in ends[0].value and "step_4" in ends[0].value, (case, ends)


# --- a gigabyte -----------------------------------------------------------------------------------------------------

WIDTH, NUM_LAYERS = 2048, 22  # with AdamW 1.1 GB
_TRANSIENT_BYTES = 8 << 20  # half of a tensor
M_MMAP_THRESHOLD = -3


def make_large(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded where there are ranks, and its optimizer."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def hashes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[str]]:
    """The bytes of this rank's parts, and a hash of each of its tensors."""
    num_bytes, hashes = 0, []
    for part in model.parameters():
        for tensor in (part, *(optimizer.state[part][name] for name in ("exp_avg", "exp_avg_sq", "step"))):
            held = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
            num_bytes += held.nbytes
            hashes.append(xxhash.xxh3_64_hexdigest(held.reshape(-1).view(torch.uint8).numpy().data))
    return num_bytes, hashes


def give_back_what_is_freed() -> None:
    """glibc comes to keep large blocks, and fully_shard's then fill twice the memory that is in use."""
    assert ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has had since."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def save_much(rank: int, storage: Path) -> dict[str, int]:
    """How much a rank has and keeps, and how much more memory than training alone takes it is to save meanwhile."""
    give_back_what_is_freed()
    model, inner = make_large(seed=0)
    trainer, optimizer = prepared(
        rank, storage, model, inner, checkpoint_interval=CheckpointInterval(steps=4), timeout_seconds=200.0
    )
    inputs, targets = torch.randn(4, WIDTH), torch.randint(WIDTH, (4,))
    with trainer:
        take(trainer, model, optimizer, inputs, targets)
        kept = trainer._training.checkpoints.job.saver._staging.num_bytes
        take(trainer, model, optimizer, inputs, targets)
        forget_peak()
        take_two(trainer, model, optimizer, inputs, targets)
        training = peak_bytes()
        num_bytes, due = hashes_of(model, inner)
        forget_peak()
        take_two(trainer, model, optimizer, inputs, targets)
        end_saves()
        saving = peak_bytes()
    assert newest_of(storage) == 4 and hashes_of(model, inner)[1] != due
    del trainer, optimizer, model, inner
    gc.collect()
    model, inner = make_large(seed=1)
    with prepared(rank, storage, model, inner)[0] as trainer:
        assert trainer.global_step == 4
        assert hashes_of(model, inner)[1] == due
    return {"bytes": num_bytes, "kept": kept, "more": saving - training}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gigabyte_is_saved_as_it_was_in_the_memory_that_is_kept(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    trial = Trial(fn=save_much, args=(tmp_path / "storage",), num_ranks=num_ranks)
    for end in run_one(ranks, tmp_path / "ends", trial):
        assert end.error is None, end
        size = end.value["bytes"]
        assert size > (1 << 30) / num_ranks
        assert size <= end.value["kept"] < size + (4 << 20), end.value
        assert end.value["more"] < _TRANSIENT_BYTES, end.value
        print(f"\n{end.value}")
