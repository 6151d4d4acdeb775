"""Ranks that come to and leave a model in training, in processes that go on: for tests."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.change import Change, ChangeCost
from elastic_ext.fsdp.reshard.companions import Tensors
from elastic_ext.fsdp.reshard.sharded_model import Spread
from elastic_ext.fsdp.worlds import Worlds
from tests.support.resharding import agreeing, make

__all__ = ["Members", "fresh_like", "num_sockets"]


class Members:
    """The process groups of one process that lives through several worlds, by the numbers of processes in them.

    Made inside a run of a RankPool without a process group. The store of all groups is the one at ``port``, in the
    tests' process, which outlives any world.
    """

    def __init__(self, own: int, port: int, worlds: Sequence[Sequence[int]]) -> None:
        self.own, self.worlds = own, worlds
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        self.num_sockets = num_sockets()
        """Sockets that this process has where it is in no process group."""
        self.left_sockets = 0
        """The most sockets that were there besides, of groups that were destroyed."""
        if own in worlds[0]:
            self.form(worlds[0], "0")
        else:
            together = self._those_who_come()
            self.form(together, f"of {together}")

    def _those_who_come(self) -> list[int]:
        """The processes that come to the first world that this one is in: they have a world of their own until then."""
        at = next(number for number, world in enumerate(self.worlds) if self.own in world)
        return [each for each in self.worlds[at] if each not in self.worlds[at - 1]]

    def form(self, members: Sequence[int], prefix: str) -> None:
        """Destroy the process groups that are there, and form the default one of these processes."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.left_sockets = max(self.left_sockets, self.num_left())
        rank = list(members).index(self.own)
        store = dist.PrefixStore(f"world {prefix}", self._store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members))

    def num_left(self) -> int:
        """How many sockets are left of groups that were destroyed; gloo closes them on a thread of its own."""
        deadline = time.monotonic() + 5.0
        while (left := num_sockets() - self.num_sockets) > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        return left

    def form_to(self, at: int) -> FormTo:
        """What swaps the process groups of the world before for those of the world numbered ``at``."""
        return FormTo(self, at)

    def prepare(
        self,
        at: int,
        spread: Spread,
        optimizer: Optimizer,
        registered: Sequence[Tensors] = (),
        plan: ParallelPlan | None = None,
    ) -> Change:
        """The change to the world numbered ``at``, for a process that is in it or in the one before."""
        old, new = self.worlds[at - 1], self.worlds[at]
        holders = [*old, *(each for each in new if each not in old)]
        worlds = Worlds.between(old, new, num_local=(len(old), len(new)))
        return spread.prepare_regroup(worlds, holders.index(self.own), [optimizer], registered, plan=plan)

    def change(
        self,
        at: int,
        spread: Spread,
        optimizer: Optimizer,
        registered: Sequence[Tensors] = (),
        plan: ParallelPlan | None = None,
    ) -> ChangeCost:
        """Take a model to the world numbered ``at``; who leaves is in no process group afterwards."""
        prepared = self.prepare(at, spread, optimizer, registered, plan)
        groups = self.form_to(at)
        cost = spread.regroup(prepared, agreeing, groups)
        if self.own in self.worlds[at]:
            assert groups.have_all_met, "else what is moved has to be there in the short time for forming groups"
        else:
            dist.destroy_process_group()
            self.left_sockets = max(self.left_sockets, self.num_left())
        return cost

    def tell(self, key: str, state: dict[str, torch.Tensor]) -> None:
        """Tell all processes a state, as the first rank has it; others need not call this."""
        if dist.get_rank():
            return
        told = io.BytesIO()
        torch.save(state, told)
        self._store.set(key, told.getvalue())  # type: ignore[arg-type]

    def told(self, key: str) -> dict[str, torch.Tensor]:
        """The state that the first rank has told."""
        self._store.wait([key])
        state: dict[str, torch.Tensor] = torch.load(io.BytesIO(self._store.get(key)))
        return state


class FormTo:
    """Swaps groups from a world to the next one."""

    def __init__(self, members: Members, at: int) -> None:
        self._members, self._at = members, at
        self.fails = False
        """Whether forming the new groups fails, on all ranks."""
        self.can_go_back = True
        self.have_all_met = False
        """Whether ranks know of all that are in the new groups that they are there."""

    def form(self) -> None:
        if self.fails:
            raise ConnectionError("planted")
        self._members.form(self._members.worlds[self._at], str(self._at))
        self.have_all_met = False

    def have_met(self) -> None:
        self.have_all_met = True

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
            for key in ("step", "exp_avg", "exp_avg_sq") if f"{name} step" in state else ():
                value = state[f"{name} {key}"]
                optimizer.state[part][key] = value.clone() if key == "step" else _like(part, value)
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
