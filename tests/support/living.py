"""A training whose members come and go while its processes live, with the tests in the part of its agents.

Each worker is a function that a RankPool runs, with a run directory of its own, as on a node of its own. ``Plans``
writes the membership plans that its agent would write; ``live`` is what a worker runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from elastic_ext import ElasticDataLoader, ParallelPlan
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.records.agent import MEMBERSHIP_FILE
from elastic_ext.records.files import write_whole
from elastic_ext.records.member import MemberRecord, member_file
from elastic_ext.records.metrics import JobEvent
from tests.support.resharding import Net, all_of_it
from tests.support.training import bits_of, trainer_of

__all__ = [
    "Job",
    "Lived",
    "Plans",
    "Row",
    "events_of",
    "in_segments",
    "live",
    "plan_after",
    "plan_of",
    "record_of",
    "samples_by_step",
    "write_plan",
]

SECONDS = 60.0
_WIDTH = 7


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples that tell their numbers."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(index)), index


class Plain(Net):
    """A net whose buffers are the same on all ranks, whatever each of them sees, and that draws nothing."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.batch_norm = nn.Identity()  # type: ignore[assignment]
        for block in self.blocks:
            block.dropout = nn.Identity()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all workers of a job are given alike."""

    folder: Path
    port: int
    """That of the store which the agents hold."""
    first: tuple[int, ...]
    """The seats of the workers that begin, in the order of ranks."""
    last_step: int
    joins: Mapping[int, int] = field(default_factory=dict)
    """By seat, the version of the plan that a worker is to join."""
    holds: Mapping[int, int] = field(default_factory=dict)
    """By step, the version of the plan that ranks wait for there."""
    strategy: Any = "no_shard"
    shard_degree: int | None = None
    num_samples: int = 96
    batch: int = 12
    num_epochs: int = 4
    saves: bool = False
    saves_at_end: bool = False
    accumulates: bool = False
    draws: bool = False
    """Whether the model has dropout."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def run_dir(self, seat: int) -> Path:
        return self.folder / str(seat)


Row = tuple[int, int, tuple[int, ...]]
"""The step that a batch is of, the number of ranks by then, and the numbers of the samples."""


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What a worker has lived through."""

    pid: int
    rows: list[Row]
    changes: list[tuple[int, int, int, int]]
    """Version, step, rank and number of ranks, as ``on_members`` has told them."""
    state: list[Any]
    ids_stay: bool
    """Whether the parameters, and the iterator over the loader, are the objects that they were."""
    exit_status: int | None = None


def plan_of(seats: Sequence[int]) -> MembershipPlan:
    """The first plan, with a node for each seat."""
    return MembershipPlan(
        version=1,
        nodes=tuple(
            NodeShare(node_id=f"node-{seat}", host="here", first_rank=rank, num_workers=1, seats=(seat,))
            for rank, seat in enumerate(seats)
        ),
        reason="the start",
        time=time.time(),
        num_seats=max(seats) + 1,
    )


def plan_after(
    plan: MembershipPlan, port: int, *, joined: Sequence[int] = (), left: Sequence[int] = ()
) -> MembershipPlan:
    """The live plan that comes next; seats are given in order, so that ``joined`` are the next ones."""
    named = [f"node-{seat} joined" for seat in joined] + [f"node-{seat} left" for seat in left]
    made = plan.changed(
        joined=[NodeShare(node_id=f"node-{seat}", host="here", first_rank=0, num_workers=1) for seat in joined],
        left=[f"node-{seat}" for seat in left],
        reason=", ".join(named),
        time=time.time(),
        store=f"127.0.0.1:{port}",
    )
    assert [made.member_at(seat) is not None for seat in joined] == [True] * len(joined)
    return made


def write_plan(job: Job, seat: int, plan: MembershipPlan) -> None:
    """Write a plan into the run directory of a worker, as its agent does."""
    job.run_dir(seat).mkdir(exist_ok=True)
    write_whole(job.run_dir(seat) / MEMBERSHIP_FILE, plan.to_json().encode(), durable=False)


def record_of(job: Job, seat: int) -> MemberRecord | None:
    """What a worker says of itself as a member; None so far."""
    with contextlib.suppress(OSError):
        return MemberRecord.from_json(member_file(job.run_dir(seat), seat).read_text())
    return None


def events_of(job: Job, seat: int, kind: str) -> list[JobEvent]:
    """The events of a kind that a worker has written."""
    lines = (job.run_dir(seat) / f"events-{seat}.jsonl").read_text().splitlines()
    return [event for event in map(JobEvent.from_json, lines) if event.kind == kind]


class Plans:
    """The agents' part: a thread that writes each plan once its joiners are ready and the one before is in force."""

    def __init__(self, job: Job, plans: Sequence[MembershipPlan]) -> None:
        """``plans`` are in order, the first one that by which the job begins."""
        self._job, self._plans = job, plans
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agents of a test")

    def __enter__(self) -> Plans:
        for seat in self._job.first:
            write_plan(self._job, seat, self._plans[0])
        for plan in self._plans[1:]:
            for member in plan.members:
                if self._job.joins.get(member.seat) == plan.version:
                    write_plan(self._job, member.seat, plan)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for before, plan in zip(self._plans, self._plans[1:], strict=False):
            old = [member.seat for member in before.members]
            new = [member.seat for member in plan.members if member.seat not in old]
            if not self._wait(lambda: all(self._is_at(seat, before.version) for seat in old)):  # noqa: B023
                return
            if not self._wait(lambda: all(self._is_ready(seat, plan.version) for seat in new)):  # noqa: B023
                return
            for seat in old:
                write_plan(self._job, seat, plan)

    def _is_at(self, seat: int, version: int) -> bool:
        record = record_of(self._job, seat)
        return record is not None and record.version >= version

    def _is_ready(self, seat: int, version: int) -> bool:
        record = record_of(self._job, seat)
        return record is not None and record.ready == version

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        while not is_so():
            if self._is_over.wait(0.005):
                return False
        return True


@contextlib.contextmanager
def place_in(job: Job, seat: int) -> Iterator[None]:
    """The environment and the process group in which an agent has started a worker."""
    begins = seat in job.first
    rank, size = (job.first.index(seat), len(job.first)) if begins else (0, 1)
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "ELASTIC_EXT_SEAT": str(seat)}
    if seat in job.joins:
        given["ELASTIC_EXT_JOINS"] = str(job.joins[seat])
    before = {name: os.environ.get(name) for name in (*given, "ELASTIC_EXT_JOINS")}
    os.environ.update(given)
    store: Any = dist.TCPStore("127.0.0.1", job.port, is_master=False)  # type: ignore[attr-defined]
    name = f"{job.folder} to {job.last_step}" if begins else f"{job.folder} {seat} alone"
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for each, value in before.items():
            os.environ.pop(each, None)
            if value is not None:
                os.environ[each] = value
        if dist.is_initialized():
            dist.destroy_process_group()


def live(seat: int, job: Job) -> Lived | None:
    """Train as the worker in a seat; None for one that is in no plan of the job."""
    if seat not in job.first and seat not in job.joins:
        return None
    with place_in(job, seat):
        return Training(seat, job).run()


class Training:
    """One worker's script."""

    def __init__(self, seat: int, job: Job) -> None:
        self.seat, self.job = seat, job
        self.rows: list[Row] = []
        self.changes: list[tuple[int, int, int, int]] = []
        torch.manual_seed(0)
        self.model = Net(num_blocks=2) if job.draws else Plain()
        self.loader = ElasticDataLoader(
            Numbered(job.num_samples), batch_size=2 if job.accumulates else 4, shuffle=True, seed=5
        )
        options = dict(job.options)
        if job.saves:
            options["shared_storage_path"] = job.folder / "saved"
        job.folder.mkdir(parents=True, exist_ok=True)
        self.trainer = trainer_of(
            job.folder, self.model, self.loader, rank=seat, global_batch_size=job.batch, **options
        )
        self.trainer.on_members(self._note)
        self.trainer.parallelize(self.model, ParallelPlan(strategy=job.strategy, shard_degree=job.shard_degree))
        trained = [part for part in self.model.parameters() if part.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.optimizer, self.schedule = self.trainer.prepare(optimizer, StepLR(optimizer, step_size=5, gamma=0.5))
        self.ids = [id(part) for part in self.model.parameters()]
        self.iterators: set[tuple[int, int]] = set()

    def _note(self, change: Any) -> None:
        self.changes.append((change.version, change.step, change.rank, change.world_size))

    def run(self) -> Lived:
        status = None
        try:
            with self.trainer:
                self._train()
                return self._lived(bits_of(self._state()), None)
        except SystemExit as left:
            status = int(left.code or 0)
        return self._lived([], status)

    def _train(self) -> None:
        for epoch in range(self.trainer.start_epoch, self.job.num_epochs):
            with self.trainer.epoch(epoch):
                for data, numbers in self.loader:
                    self.take(data, numbers)
                    if self.trainer.global_step >= self.job.last_step and self.trainer.sync_gradients:
                        return

    def take(self, data: torch.Tensor, numbers: torch.Tensor) -> None:
        step = self.trainer.global_step
        with self.trainer.step():
            self.rows.append((step, dist.get_world_size(), tuple(numbers.tolist())))
            loss = functional.mse_loss(self.model(data), data)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.trainer.sync_gradients and self.trainer.global_step > step:
            self.schedule.step()
            if self.job.saves_at_end and self.trainer.global_step == self.job.last_step:
                self.trainer.save_checkpoint()
            self._hold(self.trainer.global_step)

    def _hold(self, step: int) -> None:
        version = self.job.holds.get(step)
        if version is not None:
            watcher = self.trainer._training.members._watcher
            assert watcher.wait_for_version(version, SECONDS), f"seat {self.seat} waits for plan {version}"

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        state = trainer.state_dict()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {
            "tensors": all_of_it(self.model, self.optimizer.inner),
            "counts": {name: state[name] for name in ("global_step", "epoch", "reference_batch")},
            "config": state["config"],
            "rates": rates,
            "schedule": self.schedule.state_dict(),
            "position": self.loader.state_dict(),
        }

    def _lived(self, state: list[Any], status: int | None) -> Lived:
        stay = self.ids == [id(part) for part in self.model.parameters()]
        return Lived(
            pid=os.getpid(), rows=self.rows, changes=self.changes, state=state, ids_stay=stay, exit_status=status
        )


def samples_by_step(lived: Sequence[Lived | None]) -> dict[int, list[int]]:
    """The numbers of the samples of each step, over all ranks, in order."""
    found: dict[int, list[int]] = {}
    for each in lived:
        for step, _, numbers in () if each is None else each.rows:
            found.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in found.items()}


def in_segments(job: Job, worlds: Sequence[tuple[int, int]]) -> Iterator[Job]:
    """Jobs that train the same by checkpoints and restarts: for each world its number of ranks, to its last step."""
    for last_step, num_ranks in worlds:
        yield replace(
            job,
            first=tuple(range(num_ranks)),
            joins={},
            holds={},
            last_step=last_step,
            saves=True,
            saves_at_end=True,
            folder=job.folder / "restarts",
        )
