"""Ranks whose members come and go while their processes live: another world in the same object, and nothing left of
the one before."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ext.errors import RanksFailedError
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.notices import Trouble, ended_file
from elastic_ext.records.run_dir import GivenSeat
from tests.support.ranks import RankPool
from tests.support.worlds import Former, Workers, agents_store

WORLDS: list[Workers] = [(0, 1), (1, 0, 2), (2, 1), (0, 2, 1), (2, 1), (1, 2, 0), (2, 1), (1, 0)]
"""Worker numbers in the order of their ranks: world after world."""
SECONDS = 60.0


def held() -> dict[str, int]:
    """How much of what a group takes this process has: descriptors, sockets among them, and threads."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    sockets = sum(link.startswith("socket:") for link in links)
    return {"descriptors": len(links), "sockets": sockets, "threads": len(os.listdir("/proc/self/task"))}


def exchanged(ranks: Ranks, own: int) -> dict[str, Any]:
    """What the ranks of the present world tell each other in every way there is; notices last, as a rank that waits
    for one who has told of trouble gives up."""
    error = ValueError(f"of worker {own}") if ranks.rank == 0 else None
    with pytest.raises(RanksFailedError) as failed:
        ranks.all_or_raise(error, "trying", is_refusal=True)
    found = {
        "rank": ranks.rank,
        "names": [(name.rank, name.seat) for name in ranks.names],
        "sum": ranks.sum([1, 10**own], "adding"),
        "gathered": ranks.gather(b"%d" % own * (own + 1), "gathering"),
        "broadcast": ranks.broadcast(b"of worker %d" % own, ranks.world_size - 1, "sending"),
        "failed": sorted(failed.value.tracebacks),
    }
    assert ranks.board is not None and ranks.notices is not None
    found["troubles before"] = ranks.notices.troubles()
    dist.barrier()
    if ranks.rank == 0:
        ranks.notices.post(Trouble(kind="failed", progress="a while", text=f"worker {own}"))
    dist.barrier()
    found["troubles"] = {rank: each.text for rank, each in ranks.notices.troubles().items()}
    default = torch.ones(())
    dist.all_reduce(default)
    return {**found, "default group": int(default.item())}


LENGTHS = (0, 1, 247, 248, 249, 5_000, 8_183, 8_184, 8_185, 100_000)
"""Of bytes: about what goes in one collective, and what takes a second one."""


def numbered(rank: int, length: int) -> bytes:
    """That many bytes, which differ between ranks."""
    return bytes((rank + at) % 256 for at in range(length))


def exchanged_lengths(own: int, port: int) -> tuple[list[list[bytes]], list[bytes]]:
    """What three ranks gather and send, of lengths that differ between ranks and that are the same."""
    Former(own, port).of(0, (0, 1, 2))()
    ranks = Ranks.join(timeout_seconds=SECONDS)
    gathered: list[list[bytes]] = []
    sent: list[bytes] = []
    for context in (ranks.in_step(), contextlib.nullcontext()):
        with context:
            of_turns = [numbered(own, LENGTHS[(own + turn) % len(LENGTHS)]) for turn in range(len(LENGTHS))]
            gathered += [ranks.gather(data, "x") for data in of_turns]
            gathered += [ranks.gather(numbered(own, length), "x") for length in LENGTHS]
            sent += [ranks.broadcast(numbered(own, length), 1, "x") for length in LENGTHS]
    ranks.close()
    dist.destroy_process_group()
    return gathered, sent


def test_bytes_of_every_length_come_as_they_were_numbered(ranks: RankPool) -> None:
    with agents_store() as port:
        found = ranks.run(3, exchanged_lengths, port, process_group=False)
    turns = range(len(LENGTHS))
    gathered = [[numbered(rank, LENGTHS[(rank + turn) % len(LENGTHS)]) for rank in range(3)] for turn in turns]
    gathered += [[numbered(rank, length) for rank in range(3)] for length in LENGTHS]
    assert found == [(gathered * 2, [numbered(1, length) for length in LENGTHS] * 2)] * 3


def pass_through_worlds(own: int, port: int, folder: Path) -> list[tuple[dict[str, Any] | None, dict[str, int]]]:
    """Take part in all worlds that have this worker, and in one of its own meanwhile."""
    gc.collect()  # what tests before have left in this process
    former, first = Former(own, port), WORLDS[0]
    former.of(0, first)()
    place = (first.index(own), len(first)) if own in first else (0, 1)
    seat = GivenSeat(number=own, rank=place[0], world_size=place[1])
    ranks = Ranks.join(timeout_seconds=SECONDS, agents_folder=folder, seat=seat)
    ranks.progress, ranks.slice_seconds = (lambda: "its own words"), 0.25
    found: list[tuple[dict[str, Any] | None, dict[str, int]]] = []
    for generation, workers in enumerate(WORLDS):
        if generation > 0:
            world = ranks.regroup(former.of(generation, workers))
            assert world is ranks.world
        assert ranks.progress() == "its own words" and ranks.slice_seconds == 0.25 and ranks.seat == own
        if own in workers:
            told = exchanged(ranks, own)
            ranks.wait_for_ends()
            found.append((told, held()))
        else:
            assert (ranks.rank, ranks.world_size, ranks.notices) == (0, 1, None)
            assert ranks.sum([7], "alone") == [7] and ranks.gather(b"x", "alone") == [b"x"]
            ranks.wait_for_ends()
            found.append((None, held()))
    ranks.close()
    former.of(len(WORLDS), ())()
    found.append((None, held()))
    return found


def test_ranks_take_up_one_world_after_another_and_keep_nothing_of_the_ones_before(
    ranks: RankPool, tmp_path: Path
) -> None:
    ended_file(tmp_path, 3).write_text("ended by SIGKILL")  # of a worker that is in no world
    with agents_store() as port:
        outcomes = ranks.run(3, pass_through_worlds, port, tmp_path, process_group=False, deadline_seconds=120.0)
    for generation, workers in enumerate(WORLDS):
        size = len(workers)
        for rank, worker in enumerate(workers):
            found = outcomes[worker][generation][0]
            assert found == {
                "rank": rank,
                "names": list(enumerate(workers)),
                "sum": [size, sum(10**each for each in workers)],
                "gathered": [b"%d" % each * (each + 1) for each in workers],
                "broadcast": b"of worker %d" % workers[-1],
                "failed": [0],
                "troubles before": {},
                "troubles": {} if rank == 0 else {0: f"worker {workers[0]}"},
                "default group": size,
            }
    for worker, row in enumerate(outcomes):
        sizes = [len(workers) if worker in workers else 1 for workers in WORLDS] + [1]
        kept = {size: [each for of, (_, each) in zip(sizes, row, strict=True) if of == size] for size in (1, 2, 3)}
        for size, counts in kept.items():
            most = {what: max(each[what] for each in counts[:2]) for what in counts[0]}  # what is opened once, among it
            more = [each for each in counts[2:] if any(each[what] > most[what] for what in each)]
            assert not more, f"worker {worker} in worlds of {size}: {counts}"


def ended_by_seat(own: int, port: int, folder: Path) -> list[dict[int, str]]:
    """The troubles that ranks see whose numbers changed, before and after the agent tells of an end."""
    former = Former(own, port)
    former.of(0, (0, 1))()
    ranks = Ranks.join(timeout_seconds=SECONDS, agents_folder=folder)
    ranks.regroup(former.of(1, (1, 0)))
    found = []
    for seat in (None, 0):
        dist.barrier()
        if seat is not None and own == 0:
            ended_file(folder, seat).write_text("ended by SIGKILL")
        dist.barrier()
        assert ranks.notices is not None
        found.append({rank: f"{ranks.names[rank]} {each.text}" for rank, each in ranks.notices.troubles().items()})
    ranks.close()
    former.of(2, ())()
    return found


def test_who_has_ended_is_told_by_its_seat_whatever_its_rank_is_now(ranks: RankPool, tmp_path: Path) -> None:
    with agents_store() as port:
        first, second = ranks.run(2, ended_by_seat, port, tmp_path, process_group=False)
    assert first == [{}, {}]
    assert second[0] == {} and list(second[1]) == [1], "the worker that was started as rank 0 is rank 1 now"
    assert second[1][1].startswith("rank 1 (") and second[1][1].endswith("ended by SIGKILL")


def regroup_again(own: int, port: int) -> list[int]:
    """Form a world that cannot be, and then the one before anew."""
    former = Former(own, port)
    former.of(0, (0, 1))()
    ranks = Ranks.join(timeout_seconds=SECONDS)

    def fail() -> None:
        dist.destroy_process_group()
        raise LookupError("no such world")

    with pytest.raises(LookupError):
        ranks.regroup(fail)
    ranks.regroup(former.of(1, (0, 1)))
    found = [*ranks.sum([own + 1], "anew"), ranks.rank, ranks.world_size]
    ranks.close()
    former.of(2, ())()
    return found


def test_a_world_that_could_not_be_formed_is_followed_by_the_one_before(ranks: RankPool) -> None:
    with agents_store() as port:
        found = ranks.run(2, regroup_again, port, process_group=False)
    assert found == [[3, 0, 2], [3, 1, 2]]
