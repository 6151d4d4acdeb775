"""A training whose members come and go while its processes live, with the tests in the part of its agents.

Each worker is a function that a RankPool runs, with a run directory of its own, as on a node of its own. ``Agents``
write the membership plans that their agents would write; ``live`` is what a worker runs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from elastic_ext import ElasticDataLoader, ParallelPlan
from elastic_ext.errors import CheckpointError
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.members.regroup import Generation
from elastic_ext.members.store import here, prefix_of
from elastic_ext.ranks.board import Board
from elastic_ext.records.agent import MEMBERSHIP_FILE
from elastic_ext.records.files import write_whole
from elastic_ext.records.member import MemberRecord, member_file
from elastic_ext.records.metrics import JobEvent
from elastic_ext.records.run_dir import GivenSeat
from elastic_ext.training.steps.state import StepPhase
from tests.support.file_operations import FileOperations
from tests.support.pools import is_alive
from tests.support.resharding import Net, all_of_it, by_blocks
from tests.support.training import bits_of, trainer_of

__all__ = [
    "Agents",
    "Job",
    "Lived",
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
    """A net whose buffers are the same on all ranks, whatever each of them sees."""

    def __init__(self, num_blocks: int, *, draws: bool, normalizes: bool) -> None:
        super().__init__(num_blocks=num_blocks)
        if not normalizes:
            self.batch_norm = nn.Identity()  # type: ignore[assignment]
        for block in self.blocks if not draws else ():
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
    num_blocks: Mapping[int, int] = field(default_factory=dict)
    """By seat, of a worker whose script has another model."""
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By step, configs that ranks wait for there; each worker's agent has them written."""
    waits_for: Mapping[int, str] = field(default_factory=dict)
    """By step, the name of a file in the folder that ranks wait for there."""
    answer_seconds: float = 20.0
    """How long joiners are waited for, once they are called."""
    form_seconds: float = 20.0
    """How long ranks wait for each other where they form groups."""
    looks: bool = False
    """Whether a worker looks at its plan by itself where it has waited for a file."""
    way: Literal["with", "run", "batches", "ahead"] = "with"
    """How the loop takes steps."""
    wraps: Literal["", "ddp", "fully_shard", "blocks"] = ""
    """How the script wraps the model, or its blocks alone, by itself; empty where the trainer's plan does."""
    is_bare: bool = False
    """Whether a worker that is alone in its world has no process group."""
    num_workers: int = 0
    raises: Mapping[int, Literal["on_change", "on_members"]] = field(default_factory=dict)
    """By seat, in which of its functions a worker's script raises."""
    keeps_mean: bool = False
    """Whether the loop keeps a mean of the parameters, which it registers, and changes after each step."""
    compiles: bool = False
    """Whether the model's blocks are compiled."""
    keeps_own: bool = False
    """Whether each rank registers a large tensor of its own."""
    rewinds: bool = False
    """Whether the loop goes back to step 4 once a plan is agreed on, before it is applied."""
    proposes: Mapping[str, int | str] = field(default_factory=dict)
    """What the worker in seat 0 proposes before it goes back."""
    cannot_form: tuple[int, ...] = ()
    """Seats of workers that fail at once where groups are formed."""
    signals: Mapping[int, signal.Signals] = field(default_factory=dict)
    """By seat, the signal by which a worker that joins ends, or stops, once it has formed groups with the others."""
    evaluates: Literal["", "kept", "told", "anew"] = ""
    """How long a sampler of an evaluation lives: all through, until ``on_members`` makes another, or one evaluation."""
    num_evaluated: int = 24
    """Samples of an evaluation."""
    writes_rates: Literal["", "always", "as others join"] = ""
    """From when on the loop writes its rates, without a schedule, from one that grows with a worker's first world."""
    leaves_traces: bool = False
    """Whether a pass changes what is no parameter: a batch norm's statistics, random states, a registered tensor."""
    keeps_function: bool = False
    """Whether the schedule keeps a function among what it would save, as no checkpoint can."""
    gathers: int = 0
    """Over how many micro-batches the loop gathers gradients by itself; 0 where the trainer does."""
    fails_to_save: int | None = None
    """The step after which the first checkpoint that is saved fails on the worker in seat 1."""
    goes_on: Literal["", "with the step", "with the epoch"] = ""
    """With what the loop goes on where a checkpoint was not saved."""
    dies: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """By seat, the step and the moment in it at which a worker kills itself."""
    breaks: Mapping[int, int] = field(default_factory=dict)
    """By seat, the step in which a worker loses its connections once its backward pass has ended."""
    outlives: bool = False
    """Whether those who are left go on where others are lost."""
    last_version: int = 0
    """The plan three steps after which the job ends; 0 where it ends at ``last_step``."""

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
    held: list[dict[str, int]] = field(default_factory=list)
    """Descriptors, sockets and threads of the process after each change."""
    num_undone: int = 0
    """Batches of steps that were taken back as they were entered."""
    num_ended: int = 0
    """How many steps had ended by the count that ranks, and agents, compare."""
    newest: list[int | None] = field(default_factory=list)
    """The step of the newest checkpoint, as this rank knows it after each change."""
    num_graphs: list[int] = field(default_factory=list)
    """How many graphs had been compiled as each change came, and in the end."""
    analyzes: bool = False
    """Whether this rank measures memory in the end."""
    evaluated: list[tuple[int, int, int]] = field(default_factory=list)
    """By step, how many samples this rank has evaluated, and all ranks together."""
    best: float = 0.0


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
    plan: MembershipPlan,
    port: int,
    *,
    joined: Sequence[int] = (),
    left: Sequence[int] = (),
    lost: Sequence[int] = (),
) -> MembershipPlan:
    """The live plan that comes next; seats are given in order, so that ``joined`` are the next ones."""
    named = [f"the worker in seat {seat} was lost" for seat in lost]
    named += [f"node-{seat} joined" for seat in joined] + [f"node-{seat} left" for seat in left]
    made = plan.changed(
        joined=[NodeShare(node_id=f"node-{seat}", host="here", first_rank=0, num_workers=1) for seat in joined],
        left=[f"node-{seat}" for seat in left],
        lost=lost,
        reason=", ".join(named),
        time=time.time(),
        store=f"127.0.0.1:{port}",
    )
    assert [made.member_at(seat) is not None for seat in joined] == [True] * len(joined)
    return made


def write_plan(job: Job, seat: int, plan: MembershipPlan) -> None:
    """Write a plan into the run directory of a worker, as its agent does."""
    job.run_dir(seat).mkdir(parents=True, exist_ok=True)
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


class Agents:
    """The agents' part: plans that lie there from the start, and a script that a thread of the tests goes through."""

    def __init__(
        self, job: Job, plans: Sequence[MembershipPlan], script: Callable[[Agents], None] | None = None
    ) -> None:
        """``plans`` are in order, the first one that by which the job begins; by default each follows the one before.

        The script ends where the workers have, at the next thing that it waits for.
        """
        self.job, self.plans = job, plans
        self._script = script or Agents.follow
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="agents of a test")

    def __enter__(self) -> Agents:
        for seat in self.job.first:
            write_plan(self.job, seat, self.plans[0])
        for plan in self.plans[1:]:
            for member in plan.members:
                if self.job.joins.get(member.seat) == plan.version:
                    write_plan(self.job, member.seat, plan)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._script(self)
        except _Over:
            pass
        except BaseException as error:  # for the test, whose thread this is not
            self._error = error

    # ---- what scripts are made of ----

    def follow(self) -> None:
        """Write each plan once its joiners are ready, and the one before is in force."""
        for before, plan in itertools.pairwise(self.plans):
            for member in before.members:
                self.wait_for(member.seat, lambda record: record.version >= before.version)  # noqa: B023
            self.tell(before, plan)

    def tell(self, before: MembershipPlan, plan: MembershipPlan) -> None:
        """Write a plan for the workers of the one before, once they wait for it, and those that join are ready."""
        old = [member.seat for member in before.members]
        for seat in old if plan.version in self.job.holds.values() else ():
            self.wait_until((self.job.folder / _held(plan.version, seat)).exists)
        for seat in [member.seat for member in plan.members if member.seat not in old]:
            self.wait_for(seat, lambda record: record.ready == plan.version)
        self.write(old, plan)

    def write(self, seats: Sequence[int], plan: MembershipPlan) -> None:
        """Write a plan for these workers."""
        for seat in seats:
            write_plan(self.job, seat, plan)

    def wait_for(self, seat: int, is_so: Callable[[MemberRecord], bool]) -> MemberRecord:
        """Wait until a worker's record is as is asked; gives it."""
        while True:
            record = record_of(self.job, seat)
            if record is not None and is_so(record):
                return record
            self._pause()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        while not is_so():
            self._pause()

    def wait_for_end(self, seat: int) -> None:
        """Wait until a worker's process has ended, as its agent sees it."""
        record = self.wait_for(seat, lambda record: True)
        self.wait_until(lambda: not is_alive(record.pid))

    def kill(self, seat: int) -> None:
        """End a worker at once."""
        record = record_of(self.job, seat)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)

    def touch(self, name: str) -> None:
        """Make a file in the job's folder, for which workers wait."""
        (self.job.folder / name).touch()

    def board_of(self, plan: MembershipPlan) -> Board:
        """The board on which a plan's workers tell each other things."""
        store = dist.TCPStore("127.0.0.1", self.job.port, is_master=False)  # type: ignore[attr-defined]
        return Board(store, prefix_of(plan.generation, plan.version))

    def wait_for_answer(self, plan: MembershipPlan, seat: int) -> None:
        """Wait until a worker that joins has said, once it was called, that it comes."""
        board = self.board_of(plan)
        self.wait_until(lambda: board.has(here(seat)))

    def _pause(self) -> None:
        if self._is_over.wait(0.005):
            raise _Over


def _held(version: int, seat: int) -> str:
    """The name of the file by which a worker says that it waits for a plan."""
    return f"{seat} waits for plan {version}"


class _Over(Exception):
    """The workers have ended."""


@contextlib.contextmanager
def place_in(job: Job, seat: int) -> Iterator[None]:
    """The environment and the process group in which an agent has started a worker."""
    begins = seat in job.first
    rank, size = (job.first.index(seat), len(job.first)) if begins else (0, 1)
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "ELASTIC_EXT_SEAT": str(seat)}
    if seat in job.joins:
        given["ELASTIC_EXT_JOINS"] = str(job.joins[seat])
    if job.outlives:
        given["ELASTIC_EXT_LOSSES"] = "live"
    before = {name: os.environ.get(name) for name in (*given, "ELASTIC_EXT_JOINS", "ELASTIC_EXT_LOSSES")}
    os.environ.update(given)
    store: Any = dist.TCPStore("127.0.0.1", job.port, is_master=False)  # type: ignore[attr-defined]
    name = f"{job.folder} to {job.last_step}" if begins else f"{job.folder} {seat} alone"
    if not (job.is_bare and size == 1):
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for each, value in before.items():
            os.environ.pop(each, None)
            if value is not None:
                os.environ[each] = value
        if dist.is_initialized() or not job.is_bare:  # as scripts do, who leaves too
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
        self.num_undone = self.num_passes = 0
        self.changes: list[tuple[int, int, int, int]] = []
        self.held: list[dict[str, int]] = []
        self.newest: list[int | None] = []
        self.num_graphs: list[int] = []
        self.evaluated: list[tuple[int, int, int]] = []
        self.best = torch.zeros(())
        self.evaluation: Any = self._evaluation() if job.evaluates in ("kept", "told") else None
        self.last_step = job.last_step
        torch.manual_seed(0)
        draws = job.draws or job.leaves_traces
        self.model: nn.Module = Plain(job.num_blocks.get(seat, 2), draws=draws, normalizes=job.leaves_traces)
        for block in self.model.blocks if job.compiles else ():
            block.compile(backend="aot_eager")
        self.loader = ElasticDataLoader(
            Numbered(job.num_samples),
            batch_size=2 if job.accumulates else 4,
            shuffle=True,
            seed=5,
            num_workers=job.num_workers,
        )
        options = dict(job.options)
        if job.saves:
            options["shared_storage_path"] = job.folder / "saved"
        job.folder.mkdir(parents=True, exist_ok=True)
        inner = self.model
        if job.wraps == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif job.wraps == "fully_shard":
            by_blocks()(self.model)
        if job.wraps == "blocks":
            for block in self.model.get_submodule("blocks").children():
                fully_shard(block)
        self.trainer = trainer_of(
            job.folder,
            self.model,
            self.loader,
            rank=seat,
            global_batch_size=None if job.gathers else job.batch,
            **options,
        )
        self.trainer.on_members(self._note)
        self.trainer.on_change("user", self._apply)
        if not job.wraps:
            self.trainer.parallelize(self.model, ParallelPlan(strategy=job.strategy, shard_degree=job.shard_degree))
        self.mean: dict[str, torch.Tensor] = {}
        if job.keeps_mean:
            self.mean = {name: part.detach().clone() for name, part in self.model.named_parameters()}
            self.trainer.register_state("mean", self.mean)
        self.own = torch.full((40_000,), float(seat) if job.keeps_own else 0.0)
        if job.keeps_own:
            self.trainer.register_state("own", {"own": self.own})
        self.counted = torch.zeros(())
        if job.leaves_traces:
            self.trainer.register_state("counted", {"counted": self.counted})
        if seat in job.signals:
            _end_once_formed(job.signals[seat])
        self.trainer.register_state("best", self.best)
        self.inner = inner
        trained = [part for part in self.model.parameters() if part.requires_grad]
        self.schedule: Any = None
        if job.writes_rates:
            optimizer = torch.optim.AdamW(trained, lr=1e-2 * int(os.environ["WORLD_SIZE"]))
            self.optimizer = self.trainer.prepare(optimizer)
        else:
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
            schedule = StepLR(optimizer, step_size=5, gamma=0.5)
            if job.keeps_function:
                schedule.function = abs  # type: ignore[attr-defined]
            self.optimizer, self.schedule = self.trainer.prepare(optimizer, schedule)
        self.ids = [id(part) for part in self.model.parameters()]
        self.trainer._training.members.answer_seconds = job.answer_seconds
        self.trainer._training.members.form_seconds = job.form_seconds
        if seat in job.cannot_form:
            _fail_to_form(self.trainer._training.members)

    def _apply(self, old: Any, new: Any) -> None:
        if self.job.raises.get(self.seat) == "on_change":
            raise LookupError("planted in on_change")

    def _note(self, change: Any) -> None:
        if self.job.raises.get(self.seat) == "on_members":
            raise LookupError("planted in on_members")
        self.changes.append((change.version, change.step, change.rank, change.world_size))
        self.trainer._training.ranks.wait_for_ends()
        self.held.append(held())
        self.num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert self.trainer._training.ranks.world.members == change.version
        checkpoints = self.trainer._training.checkpoints
        newest = None if checkpoints is None else checkpoints.job.run.newest
        self.newest.append(None if newest is None else newest.global_step)
        seat = GivenSeat.in_environment(os.environ)
        assert seat is not None and (seat.rank, seat.world_size) == (change.rank, change.world_size)
        assert seat.of(change.rank, change.world_size) == self.seat, "another trainer of this process has the same one"
        if self.job.evaluates == "told":
            self.evaluation = self._evaluation()
        if change.version == self.job.last_version:
            self.last_step = change.step + 3

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
        if self.job.way == "batches":
            for data, numbers in self.trainer.batches(max_steps=self.last_step):
                self.take(data, numbers)
            return
        if self.job.way == "ahead":
            self._take_ahead()
            return
        for epoch in range(self.trainer.start_epoch, self.job.num_epochs):
            with self._epoch(epoch):
                for data, numbers in self.loader:
                    try:
                        self.take(data, numbers)
                    except CheckpointError:
                        if self.job.goes_on != "with the step":
                            raise
                    if self.trainer.global_step >= self.last_step and self.trainer.sync_gradients:
                        return

    @contextlib.contextmanager
    def _epoch(self, number: int) -> Iterator[None]:
        epoch = self.trainer.epoch(number)
        try:
            epoch.__enter__()
        except CheckpointError:
            if self.job.goes_on != "with the epoch":
                raise
            epoch = self.trainer.epoch(number)
            epoch.__enter__()
        with contextlib.ExitStack() as stack:
            stack.push(epoch)
            yield

    def take(self, data: torch.Tensor, numbers: torch.Tensor) -> None:
        step = self.trainer.global_step
        if self.job.way == "run":
            self.trainer.run(self._pass, step, data, numbers)
        else:
            with self.trainer.step():
                self._pass(step, data, numbers)
        if self.trainer.sync_gradients and self.trainer.global_step > step:
            if self.schedule is not None:
                self.schedule.step()
            for name, part in self.model.named_parameters() if self.job.keeps_mean else ():
                self.mean[name].lerp_(part.detach(), 0.1)
            if self.job.saves_at_end and self.trainer.global_step == self.job.last_step:
                self.trainer.save_checkpoint()
            self._hold(self.trainer.global_step)
            if self.job.evaluates:
                self._evaluate()

    def _evaluation(self) -> Any:
        """A loader with a sampler for the ranks that there are."""
        dataset = Numbered(self.job.num_evaluated)
        return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))

    def _evaluate(self) -> None:
        loader = self._evaluation() if self.job.evaluates == "anew" else self.evaluation
        mine = sum(len(numbers) for _, numbers in loader)
        count = torch.tensor(mine)
        dist.all_reduce(count)
        self.evaluated.append((self.trainer.global_step, mine, int(count)))
        self.best.fill_(max(float(self.best), 100.0 - self.trainer.global_step))  # the first one was the best

    def _take_ahead(self) -> None:
        """Take each batch within the step of the one before."""
        batches = iter(self.loader)
        batch = next(batches)
        while self.trainer.global_step < self.last_step:
            step = self.trainer.global_step
            with self.trainer.step():
                coming = next(batches)
                self._pass(step, *batch)
                batch = coming
            if self.trainer.global_step > step:
                self._hold(self.trainer.global_step)

    def _pass(self, step: int, data: torch.Tensor, numbers: torch.Tensor) -> None:
        if self.trainer._training.state.phase is StepPhase.UNDONE:
            self.num_undone += 1
        else:
            self.rows.append((step, self.trainer.data_parallel_size, tuple(numbers.tolist())))
        at, moment = self.job.dies.get(self.seat, (-1, ""))
        moment = moment if step == at else ""
        _die(moment, "before forward")
        loss = functional.mse_loss(self.model(data), data)
        _die(moment, "after forward")
        if moment == "in backward":
            first = next(self.inner.parameters())
            hook = partial(_kill_by, os.getpid())
            first.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        _die(moment, "after backward")
        if self.job.breaks.get(self.seat) == step:
            raise RuntimeError("[planted/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
        writes = self.job.writes_rates
        if writes == "always" or (writes and self.trainer.data_parallel_size > len(self.job.first)):
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
        self.num_passes += 1
        self.counted += self.job.leaves_traces
        if self.job.gathers == 0 or self.num_passes % self.job.gathers == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _hold(self, step: int) -> None:
        at, moment = self.job.dies.get(self.seat, (-1, ""))
        _die(moment if step == at else "", "after step")
        if self.job.fails_to_save == step and self.seat == 1:
            FileOperations(self.job.folder / "saved", "full", 0, like="os.writev")
        config = self.job.configs.get(step)
        if config is not None:
            write_whole(self.job.run_dir(self.seat) / "config.json", json.dumps(config).encode(), durable=False)
            assert self.trainer._training.follower._watcher.wait_for_version(config["version"], SECONDS)
        name = self.job.waits_for.get(step)
        deadline = time.monotonic() + SECONDS
        while name is not None and not (self.job.folder / name).exists():
            assert time.monotonic() < deadline, f"seat {self.seat} waits for {name}"
            time.sleep(0.005)
        if name is not None and self.job.looks:
            self.trainer._training.members.watcher.refresh()
        if self.job.rewinds and self.trainer._training.members._pending is not None:
            if self.job.proposes and self.seat == 0:
                self.trainer.propose(self.job.proposes, "training goes back")
            self.trainer.rewind(4)
        version = self.job.holds.get(step)
        if version is not None and version > self.trainer._training.members.version:
            (self.job.folder / _held(version, self.seat)).touch()
            watcher = self.trainer._training.members.watcher
            assert watcher.wait_for_version(version, SECONDS), f"seat {self.seat} waits for plan {version}"

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        state = trainer.state_dict()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {
            "tensors": all_of_it(self.inner, self.optimizer.inner),
            "counts": {name: state[name] for name in ("global_step", "epoch", "reference_batch")},
            "config": state["config"],
            "rates": rates,
            "effective": self.optimizer.effective_rates,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "position": self.loader.state_dict(),
            "own": self.own,
            "counted": self.counted if self.job.leaves_traces else None,
            "mean": {
                name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in self.mean.items()
            },
        }

    def _lived(self, state: list[Any], status: int | None) -> Lived:
        stay = self.ids == [id(part) for part in self.model.parameters()]
        return Lived(
            pid=os.getpid(),
            rows=self.rows,
            changes=self.changes,
            state=state,
            ids_stay=stay,
            exit_status=status,
            held=self.held,
            num_undone=self.num_undone,
            num_ended=self.trainer._training.counts.num_boundaries,
            newest=self.newest,
            num_graphs=[*self.num_graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]],
            analyzes=self.trainer._training.analyzer is not None,
            evaluated=self.evaluated,
            best=float(self.best),
        )


def _kill_by(pid: int, _: torch.Tensor) -> None:
    os.kill(pid, signal.SIGKILL)


def _die(moment: str, now: str) -> None:
    if moment == now:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_once_formed(number: signal.Signals) -> None:
    """Have this process get a signal once it has formed groups with the ranks that it joins; it trains no more."""
    form = Generation.form

    def form_and_end(self: Generation) -> None:
        form(self)
        os.kill(os.getpid(), number)

    Generation.form = form_and_end  # type: ignore[method-assign]


def _fail_to_form(members: Any) -> None:
    """Have forming the groups of a plan fail at once on this rank."""
    groups_of = members._groups_of

    def form() -> None:
        raise ConnectionError("planted")

    def planted(plan: MembershipPlan) -> Generation:
        groups: Generation = groups_of(plan)
        groups.form = form  # type: ignore[method-assign]
        return groups

    members._groups_of = planted


def held() -> dict[str, int]:
    """How much of what process groups take this process has: descriptors, sockets among them, and threads."""
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    sockets = sum(link.startswith("socket:") for link in links)
    return {"descriptors": len(links), "sockets": sockets, "threads": len(os.listdir("/proc/self/task"))}


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
            waits_for={},
            last_step=last_step,
            saves=True,
            saves_at_end=True,
            folder=job.folder / "restarts",
        )
