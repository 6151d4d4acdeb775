"""What a master holds when thousands have come and gone is what it held before."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from elastic_ext.master.process import MemoryTrimmer
from tests.support.masters import TOKEN, MasterProcess, join_request, master_in_process, until

NUM_PEERS = 400
MOST_LEFT = 0.6  # of what they took; without giving back it is nearly all


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    yield from master_in_process(tmp_path)


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_that_was_freed_goes_back_to_the_system_at_most_so_often() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library gives memory back in other ways")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    trimmer = MemoryTrimmer(every_seconds=10.0)
    trimmer.trim(100.0)

    def hold_and_free() -> None:
        """So that what was freed lies below what is still held, as nearly always."""
        held = [libc.malloc(60_000) for _ in range(1_000)]
        for each in held:
            ctypes.memset(each, 1, 60_000)
        kept.append(held.pop())
        for each in held:
            libc.free(each)

    kept: list[int] = []
    hold_and_free()
    full = memory_of(os.getpid())
    trimmer.trim(105.0)
    assert full - memory_of(os.getpid()) < 10 << 20, "not yet"
    trimmer.trim(110.0)
    assert full - memory_of(os.getpid()) > 40 << 20
    for each in kept:
        libc.free(each)


@pytest.mark.slow
def test_a_master_gives_back_what_peers_have_taken_who_are_gone(master: MasterProcess) -> None:
    assert master.process is not None
    pid = master.process.pid
    master.caller().status()
    before = memory_of(pid)
    channels = [master.channel() for _ in range(NUM_PEERS)]
    for each in channels:
        grpc.channel_ready_future(each).result(20)
    credentials = (("authorization", f"Bearer {TOKEN}"),)
    text = "x" * 100_000
    for number, each in enumerate(channels):
        join = each.unary_unary("/elastic_ext.v1.Master/Join")
        join(join_request(f"n{number}", hardware=text).SerializeToString(), metadata=credentials, timeout=20)
    most = memory_of(pid) - before
    for each in channels:
        each.close()
    until(lambda: memory_of(pid) - before < MOST_LEFT * most, 40.0)
