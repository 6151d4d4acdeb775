"""Memory for copies is made where there is some, and training waits for its checkpoints where there is not."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from elastic_ext.fsdp.checkpoint.saving import saver
from elastic_ext.fsdp.checkpoint.saving.staging import free_bytes, why_no_room
from tests.support.ranks import RankPool
from tests.support.saving import checkpointer_of, extra_of, make_state, newest_of

GB = 10**9


def test_ranks_of_one_machine_share_what_is_free() -> None:
    assert why_no_room([("a", GB, 3 * GB), ("a", GB, 2 * GB + 2 * 10**8), ("b", GB, 2 * GB)]) is None
    told = why_no_room([("a", GB, 3 * GB), ("b", GB, 2 * GB), ("b", GB, 2 * GB)])
    assert told == "2.00 GB are wanted on b, which has 2.00 GB free"
    assert why_no_room([]) is None


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 250000\n")
    assert free_bytes(tmp_path) == 1_250_000
    (tmp_path / "memory.current").write_text("6000000\n")
    assert free_bytes(tmp_path) == 0
    (tmp_path / "first" / "memory").mkdir(parents=True)
    (tmp_path / "first" / "memory" / "memory.limit_in_bytes").write_text("5000000\n")
    (tmp_path / "first" / "memory" / "memory.usage_in_bytes").write_text("4000000\n")
    (tmp_path / "first" / "memory" / "memory.stat").write_text("inactive_file 9\ntotal_inactive_file 500000\n")
    assert free_bytes(tmp_path / "first") == 1_500_000
    assert abs(free_bytes(tmp_path / "none") - psutil.virtual_memory().available) < GB


def save_without_room(rank: int, storage: Path) -> bool:
    """One rank's machine has none."""
    model, optimizer = make_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setattr(saver, "free_bytes", lambda: 0)
        with checkpointer_of(storage, in_background=True) as checkpointer:
            checkpointer.prepare(model, optimizer)
            in_background = checkpointer.saves_in_background
            checkpointer.save(1, model, optimizer, extra_of(1))
    return in_background


def test_without_room_on_one_rank_all_save_while_training_waits(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, save_without_room, tmp_path) == [False, False]
    assert newest_of(tmp_path) == 1
