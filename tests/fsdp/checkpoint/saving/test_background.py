"""Saves that go on while training does: what is saved is what was there, whatever changes meanwhile."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from elastic_ext.fsdp.checkpoint.saving.background import THREAD_NAME
from elastic_ext.fsdp.checkpoint.saving.letters import Letters
from elastic_ext.ranks.board import Board
from tests.support.file_operations import Gate
from tests.support.ranks import RankPool
from tests.support.saving import (
    checkpointer_of,
    digest_at,
    digest_of,
    end_saves,
    extra_of,
    fill,
    garbage_in,
    job_folder,
    load_newest,
    make_state,
    newest_of,
    train,
)
from tests.support.stores import PlainStore
from tests.support.thinning import the_first
from tests.support.trials import Trial, run_one

# --- what is saved --------------------------------------------------------------------------------------------------


def save_and_train_on(rank: int, storage: Path, num_saves: int) -> list[str]:
    """Digests of this rank's part at each save; everything changes as soon as that has been begun."""
    model, optimizer = make_state(width=600)
    digests = []
    with checkpointer_of(storage, in_background=True) as checkpointer:
        for step in range(1, num_saves + 1):
            fill(model, optimizer, step)
            extra = extra_of(step)
            checkpointer.save(step, model, optimizer, extra)
            digests.append(digest_of(model, optimizer))
            fill(model, optimizer, 1000 + step)
            extra["order"].zero_()
            extra["step"] = -1
            optimizer.param_groups[0]["lr"] = 7.0 + step
        checkpointer.wait()
        for step in range(1, num_saves + 1):
            loaded = checkpointer.load(model, optimizer, job_folder(storage) / f"step_{step}")
            assert digest_of(model, optimizer) == digests[step - 1]
            assert loaded.extra["step"] == step and torch.equal(loaded.extra["order"], torch.arange(step + 5))
            assert optimizer.param_groups[0]["lr"] == (1e-2 if step == 1 else 6.0 + step)
    return digests


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_is_saved_is_what_was_there_when_the_save_began(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    trial = Trial(fn=save_and_train_on, args=(tmp_path / "storage", 4), num_ranks=num_ranks)
    ends = run_one(ranks, tmp_path / "ends", trial)
    assert [end.error for end in ends] == [None] * num_ranks, ends
    load_newest(tmp_path / "storage", 4, width=600)


class Strided(nn.Module):
    """Tensors whose elements do not lie one after another, and others of every size of item."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.short = nn.Parameter(torch.arange(5.0).half())
        self.register_buffer("every_other", torch.arange(20)[::2])
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("one", torch.tensor(3.5, dtype=torch.float64))
        self.register_buffer("eighth", torch.arange(7.0).to(torch.float8_e4m3fn))


def test_tensors_of_every_kind_are_kept(tmp_path: Path) -> None:
    model, other = Strided(), Strided()
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    with checkpointer_of(tmp_path, in_background=True) as checkpointer:
        checkpointer.save(1, model)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        checkpointer.wait()
        checkpointer.load(other)
    for name, tensor in Strided().state_dict().items():
        assert torch.equal(other.state_dict()[name].to(torch.float64), tensor.to(torch.float64)), name


# --- one after another ----------------------------------------------------------------------------------------------


def test_a_save_begins_when_the_one_before_is_done(tmp_path: Path) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path, in_background=True) as checkpointer:
        checkpointer.claim()
        assert not checkpointer.is_saving()
        gate = Gate(tmp_path, like="os.mkdir")
        checkpointer.save(1, model, optimizer)
        gate.wait_until_reached()
        assert checkpointer.is_saving()
        assert checkpointer.latest() is None
        threading.Timer(0.2, gate.open).start()
        checkpointer.save(2, model, optimizer)
        assert gate.is_open
        assert (job_folder(tmp_path) / "step_1" / COMMIT).exists()
        checkpointer.wait()
        assert not checkpointer.is_saving()
        assert checkpointer.latest() == job_folder(tmp_path) / "step_2"


def test_threads_have_a_name_that_a_user_finds(tmp_path: Path) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path, in_background=True) as checkpointer:
        checkpointer.claim()
        gate = Gate(tmp_path, like="os.mkdir")
        checkpointer.save(1, model, optimizer)
        assert THREAD_NAME in [thread.name for thread in threading.enumerate()]
        gate.open()


def test_closing_ends_what_was_begun(tmp_path: Path) -> None:
    model, optimizer = make_state()
    with checkpointer_of(tmp_path, in_background=True) as checkpointer:
        checkpointer.save(1, model, optimizer)
    assert newest_of(tmp_path) == 1


def count_meetings(rank: int, storage: Path) -> list[int]:
    """How often each of some saves has the ranks meet, when the one before is over."""
    model, optimizer = make_state()
    counts = []
    with checkpointer_of(storage, in_background=True) as checkpointer:
        ranks: Any = checkpointer._ranks
        gather, met = ranks.gather, []

        def gather_and_count(data: bytes, doing: str) -> Any:
            met.append(doing)
            return gather(data, doing)

        ranks.gather = gather_and_count
        for step in range(1, 5):
            fill(model, optimizer, step)
            end_saves()
            dist.barrier()
            met.clear()
            checkpointer.save(step, model, optimizer, extra_of(3))
            counts.append(len(met))
        ranks.gather = gather
    return counts[1:]


def test_ranks_meet_once_for_a_save_that_is_like_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    ends = run_one(ranks, tmp_path / "ends", Trial(fn=count_meetings, args=(tmp_path / "storage",)))
    assert [end.value for end in ends] == [[1, 1, 1]] * 2, ends


def save_own_buffers(rank: int, storage: Path) -> list[int]:
    """Each rank has its own, and they change while ranks save."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    counted = model[1].get_buffer("num_batches_tracked")
    found = []
    with checkpointer_of(storage, in_background=True) as checkpointer:
        for step in (1, 2, 3):
            counted.fill_(10 * step + (rank if step > 1 else 0))  # the same at first
            checkpointer.save(step, model)
            counted.fill_(-1)
        checkpointer.wait()
        for step in (1, 2, 3):
            checkpointer.load(model, path=job_folder(storage) / f"step_{step}")
            found.append(int(counted))
    return found


def test_buffers_that_come_to_differ_are_each_ranks_own(ranks: RankPool, tmp_path: Path) -> None:
    ends = run_one(ranks, tmp_path / "ends", Trial(fn=save_own_buffers, args=(tmp_path / "storage",)))
    assert [end.value for end in ends] == [[10, 20, 30], [10, 21, 31]], ends


def save_often(rank: int, storage: Path, num_saves: int) -> dict[str, tuple[int, int]]:
    """Counts of what could leak, after some saves and at the end."""
    model, optimizer = make_state(width=64)
    process = psutil.Process()
    seen: dict[str, list[int]] = {"threads": [], "files": [], "memory": [], "keys": []}
    with checkpointer_of(storage, in_background=True) as checkpointer:
        ranks: Any = checkpointer._ranks
        store = ranks.board.store
        for step in range(1, num_saves + 1):
            checkpointer.save(step, model, optimizer, extra_of(3))
            if step in (20, num_saves):
                checkpointer.wait()
                gc.collect()
                dist.barrier()
                seen["threads"].append(threading.active_count())
                seen["files"].append(process.num_fds())
                seen["memory"].append(process.memory_info().rss)
                seen["keys"].append(store.num_keys())
                dist.barrier()
    return {what: (counts[0], counts[1]) for what, counts in seen.items()}


@pytest.mark.parametrize("num_saves", the_first([60, 200]))
def test_saves_leak_nothing(ranks: RankPool, tmp_path: Path, num_saves: int) -> None:
    ends = run_one(ranks, tmp_path / "ends", Trial(fn=save_often, args=(tmp_path / "storage", num_saves)))
    for end in ends:
        assert end.error is None, end
        counts = end.value
        assert counts["threads"][1] <= counts["threads"][0], counts
        assert counts["files"][1] <= counts["files"][0], counts
        assert counts["memory"][1] - counts["memory"][0] < 8 << 20, counts
        assert counts["keys"][1] <= counts["keys"][0], counts


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_made_once_and_is_as_large_as_what_the_rank_writes(tmp_path: Path) -> None:
    model, optimizer = make_state(width=300)
    size = sum(each.numel() * each.element_size() for each in model.parameters()) * 3
    with checkpointer_of(tmp_path, in_background=True) as checkpointer:
        checkpointer.prepare(model, optimizer)
        staging: Any = checkpointer._job.saver._staging
        kept = staging.num_bytes
        assert size <= kept <= size + 5 * 4096
        where = staging._memory.data_ptr()
        for step in (1, 2, 3):
            checkpointer.save(step, model, optimizer)
        checkpointer.wait()
        assert (staging.num_bytes, staging._memory.data_ptr()) == (kept, where)
        with torch.no_grad():
            model.register_buffer("more", torch.ones(100_000))
        checkpointer.save(4, model, optimizer)
        assert staging.num_bytes >= kept + 400_000
    with checkpointer_of(tmp_path) as checkpointer:
        other, _ = make_state(width=300)
        other.register_buffer("more", torch.zeros(100_000))
        checkpointer.load(other)
        assert torch.equal(other.get_buffer("more"), torch.ones(100_000))


# --- letters --------------------------------------------------------------------------------------------------------


def test_letters_are_read_by_all_and_burnt() -> None:
    store = PlainStore()
    boards = [Board(store, "job", place=rank, num_peers=2) for rank in (0, 1)]
    mine, other = (Letters(board, name="a", seconds=0.3) for board in boards)
    Letters(boards[1], name="b", seconds=0.3).fail("another save")
    mine.post("written", {"a": 1})
    other.post("written", [2])
    assert mine.wait("written", [0, 1]) == other.wait("written", [0, 1]) == [{"a": 1}, [2]]
    with pytest.raises(CheckpointError, match=r"rank 1 has not said within 0\.3 seconds"):
        mine.wait("made", [0, 1][1:])
    other.fail("the disk is full")
    with pytest.raises(CheckpointError, match=r"^rank 1: the disk is full$"):
        mine.wait("made", [1])
    other.burn()
    mine.raise_if_failed()
    mine.burn()
    assert not store.check(["job/save/a/written/0"])


def test_letters_of_a_store_that_is_gone_need_no_burning() -> None:
    class GoneStore(PlainStore):
        def delete_key(self, key: str, /) -> bool:
            raise RuntimeError("Connection reset by peer")

    letters = Letters(Board(GoneStore(), "job", num_peers=1), name="a", seconds=60.0)
    letters.post("written", 1)
    letters.burn()


def test_who_gives_up_waits_no_longer() -> None:
    letters = Letters(Board(PlainStore(), "job", num_peers=2), name="a", seconds=60.0)
    threading.Timer(0.05, letters.cancel, ["no longer"]).start()
    with pytest.raises(CheckpointError, match="no longer"):
        letters.wait("made", [1])


def test_without_a_store_ranks_save_while_training_waits(tmp_path: Path) -> None:
    checkpointer = ShardCheckpointer(tmp_path, job="a-job", in_background=True)
    assert checkpointer.saves_in_background  # one rank needs none
    checkpointer.close()


# --- what is kept ---------------------------------------------------------------------------------------------------


def names_in(storage: Path) -> list[str]:
    return sorted(
        (path.parent.name for path in job_folder(storage).glob(f"*/{COMMIT}")), key=lambda name: int(name[5:])
    )


@pytest.mark.parametrize("in_background", [False, True])
def test_after_each_save_old_ones_go(tmp_path: Path, in_background: bool) -> None:
    model, optimizer = make_state()
    kept = {"keep_last": 2, "keep_every": 4}
    with checkpointer_of(tmp_path, in_background=in_background, **kept) as checkpointer:
        for step in range(1, 8):
            fill(model, optimizer, step)
            checkpointer.save(step, model, optimizer, extra_of(step))
        checkpointer.wait()
        assert names_in(tmp_path) == ["step_4", "step_6", "step_7"]
        assert garbage_in(tmp_path) == []
        checkpointer.load(model, optimizer, job_folder(tmp_path) / "step_4")
    assert digest_of(model, optimizer) == digest_at(4)


def test_a_trainer_keeps_what_it_is_told(tmp_path: Path) -> None:
    train(tmp_path, tmp_path / "storage", 5, keep_last=2)
    assert names_in(tmp_path / "storage") == ["step_4", "step_5"]
    with pytest.raises(ValueError, match="keep_every is 3 and keep_last None"):
        train(tmp_path, tmp_path / "storage", 5, keep_every=3)
