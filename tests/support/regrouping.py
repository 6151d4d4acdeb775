"""Ranks that come to and leave a model in training, in processes that go on: for tests."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.change import ChangeCost
from elastic_ext.fsdp.reshard.sharded_model import Spread
from elastic_ext.fsdp.worlds import Worlds
from tests.support.resharding import agreeing, all_of_it, make

__all__ = ["Members", "fresh_like", "num_sockets"]


class Members:
    """The process groups of one process that lives through several worlds, by the numbers of processes in them.

    Made inside a run of a RankPool, on all of its ranks, whose process group it takes the place of.
    """

    def __init__(self, own: int, worlds: Sequence[Sequence[int]]) -> None:
        self.own, self.worlds = own, worlds
        self._store = dist.distributed_c10d._get_default_store()
        self.num_formed = 0
        dist.barrier()
        dist.destroy_process_group()
        self.num_sockets = num_sockets()
        """Sockets that this process has where it is in no process group."""
        self.left_sockets = 0
        """The most sockets that were there besides, of groups that were destroyed."""
        self.at = 0
        come = self.come_in(1) if own not in worlds[0] else None
        self.form(worlds[0] if come is None else come, "0" if come is None else f"before {come}")

    def come_in(self, at: int) -> list[int]:
        """The processes of the first world that this one is in, from ``at`` on, that come with it."""
        for number in range(at, len(self.worlds)):
            if self.own in self.worlds[number]:
                return [each for each in self.worlds[number] if each not in self.worlds[number - 1]]
        return [self.own]

    def form(self, members: Sequence[int], prefix: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.left_sockets = max(self.left_sockets, self.num_left())
        rank = list(members).index(self.own)
        store = dist.PrefixStore(f"world {prefix}", self._store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members))
        self.num_formed += 1

    def num_left(self) -> int:
        """How many sockets are left of groups that were destroyed; gloo closes them on a thread of its own."""
        deadline = time.monotonic() + 5.0
        while (left := num_sockets() - self.num_sockets) > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        return left

    def form_to(self, at: int) -> _To:
        return _To(self, at)

    def between(self, at: int) -> tuple[Worlds, int | None]:
        """The worlds of a change to the one numbered ``at``, and this process's number in it; None if in neither."""
        old, new = self.worlds[at - 1], self.worlds[at]
        holders = [*old, *(each for each in new if each not in old)]
        worlds = Worlds.between(old, new, num_local=(len(old), len(new)))
        return worlds, holders.index(self.own) if self.own in holders else None

    def change(self, at: int, spread: Spread, optimizer: Optimizer, *, registered: Any = (), agree: Any = agreeing) -> ChangeCost:
        worlds, holder = self.between(at)
        assert holder is not None
        prepared = spread.prepare_regroup(worlds, holder, [optimizer], registered)
        return spread.regroup(prepared, agree, self.form_to(at))

    def tell(self, key: str, state: dict[str, torch.Tensor]) -> None:
        """Tell all processes a state, as the first rank has it; others need not call this."""
        if dist.get_rank():
            return
        told = io.BytesIO()
        torch.save(state, told)
        self._store.set(key, told.getvalue())

    def told(self, key: str) -> dict[str, torch.Tensor]:
        self._store.wait([key])
        state: dict[str, torch.Tensor] = torch.load(io.BytesIO(self._store.get(key)))
        return state

    def wait_for(self, key: str, number: int) -> None:
        if self._store.add(key, 1) == number:
            self._store.set(f"{key} all", "")
        self._store.wait([f"{key} all"])


class _To:
    """Swaps groups from a world to the next one."""

    def __init__(self, members: Members, at: int) -> None:
        self._members, self._at = members, at
        self.fails = False
        """Whether forming the new groups fails, on all ranks."""

    def form(self) -> None:
        if self.fails:
            raise ConnectionError("planted")
        self._members.form(self._members.worlds[self._at], str(self._at))

    def form_again(self) -> None:
        self._members.form(self._members.worlds[self._at - 1], f"{self._at - 1} again")


def fresh_like(plan: ParallelPlan, model: nn.Module, state: dict[str, torch.Tensor]) -> tuple[Spread, Optimizer]:
    """A model that is spread over the present world from the start, with a state that ``all_of_it`` gave."""
    spread, optimizer = make(plan, model=model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[f"buffer {name}"])
        for name, part in model.named_parameters():
            _fill(part, state[name])
            if f"{name} gradient" in state:
                part.grad = _like(part, state[f"{name} gradient"])
            own = {key: value for key, value in state.items() if key in (f"{name} step", f"{name} exp_avg", f"{name} exp_avg_sq")}
            for key, value in own.items():
                kept = value.clone() if key.endswith(" step") else _like(part, value)
                optimizer.state[part][key.rpartition(" ")[2]] = kept
    return spread, optimizer


def _like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(part, DTensor):
        return whole.clone()
    return distribute_tensor(whole.clone(), part.device_mesh, part.placements, src_data_rank=None)


def _fill(part: torch.Tensor, whole: torch.Tensor) -> None:
    made = _like(part, whole)
    if isinstance(part, DTensor):
        assert isinstance(made, DTensor)
        part._local_tensor.copy_(made._local_tensor)
    else:
        part.copy_(made)


def num_sockets() -> int:
    """How many TCP connections this process has."""
    known = set()
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        known |= {line.split()[9] for line in lines}
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        count += target.startswith("socket:[") and target[8:-1] in known
    return count
