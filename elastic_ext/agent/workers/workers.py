"""The worker processes of one node: how they are started in each round, watched and ended, and the signals that end the
agent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from string import Template
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    start_processes,
)
from torch.distributed.elastic.utils.api import macros

from elastic_ext.agent.arguments import WorkerPlace, devices_of, environment_of, with_start
from elastic_ext.errors import ElasticError, in_words
from elastic_ext.members.decision import MembersChoice
from elastic_ext.members.plan import JOINS
from elastic_ext.ranks.processes import ProcessIdentity, end_groups, process_of
from elastic_ext.records.agent import WorkerState
from elastic_ext.torch_private.agent import bound_command, bound_function, handling_signals_by
from elastic_ext.training.checkpoints.signals import EXIT_STATUS

from .monitor import Watched

__all__ = [
    "Launch",
    "StopSignals",
    "WorkerNotStarted",
    "Workers",
    "environments",
    "free_seats",
    "place_workers",
    "workers_of",
]


# --- the workers of one node, each behind a process context of its own, as torch's agent sees one for all ------------
# A worker that fails leaves the others as they are: the agent decides when those end. What they print goes where torch
# sends it.

_LEFT_SECONDS = 3.0  # for what a worker has started and left behind
_MOST_THREADS = 32
_SEAT = "ELASTIC_EXT_SEAT"


class WorkerNotStarted(ElasticError):
    """A worker process could not be started; the message says why."""


class Workers(PContext):
    """The worker processes of a node in one round; for torch's agent they are one process context."""

    def __init__(
        self,
        *,
        name: str,
        entrypoint: str | Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs: LogsSpecs,
        start_method: str,
        as_given: Callable[[], AbstractContextManager[None]],
        numa: Any,
        log_line_prefixes: dict[int, str] | None,
        stdout_filters: list[str] | None,
        stderr_filters: list[str] | None,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs, log_line_prefixes, stdout_filters, stderr_filters)
        self.patience_seconds = 30.0
        """How long workers have to end by themselves, once signalled, before they are killed."""
        self._start_method = start_method
        self._as_given = as_given
        self._numa = numa
        self._contexts: dict[int, PContext] = {}
        self._ended: dict[int, RunProcsResult] = {}
        self.are_lost = False
        """Whether those of other nodes go on without them."""
        self._processes: dict[int, ProcessIdentity] = {}

    @property
    def processes(self) -> Mapping[int, ProcessIdentity]:
        """The worker processes by local rank, also those that have ended."""
        return self._processes

    def watched(self, ranks: Mapping[int, int]) -> tuple[Watched, ...]:
        """The workers, each with its rank, process, state and exit code; ``ranks`` gives the rank by local rank."""
        found = []
        for local_rank, process in self._processes.items():
            result = self._ended.get(local_rank)
            code = None if result is None else result.failures[0].exitcode if result.failures else 0
            state: WorkerState = "left" if code == EXIT_STATUS else "failed" if code else "succeeded"
            state = "running" if code is None else state
            found.append(
                Watched(
                    local_rank=local_rank,
                    rank=ranks[local_rank],
                    seat=int(self.envs[local_rank][_SEAT]),
                    process=process,
                    state=state,
                    exit_code=code,
                )
            )
        return tuple(found)

    def lose(self) -> None:
        """End all workers at once, as some have failed, and those of other nodes go on without them."""
        self.are_lost = True
        for local_rank, process in self._processes.items():
            if local_rank not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def pids(self) -> dict[int, int]:
        return {local_rank: context.pids()[0] for local_rank, context in self._contexts.items()}

    def _start(self) -> None:
        try:
            for local_rank in range(self.nprocs):
                with self._as_given():
                    self._contexts[local_rank] = self._start_one(local_rank)
                pid = self._contexts[local_rank].pids()[0]
                self._processes[local_rank] = process_of(pid) or ProcessIdentity(pid=pid, start_ticks=0)  # it has ended
        except BaseException as error:
            self._close(signal.SIGTERM)
            if isinstance(error, (OSError, ValueError, AssertionError)):  # no such program, no more processes, no GPU
                raise WorkerNotStarted(in_words(error)) from error
            raise

    def _start_one(self, local_rank: int) -> PContext:
        entrypoint: str | Callable[..., Any]
        if isinstance(self.entrypoint, str):
            command = (self.entrypoint, *map(str, self.args[local_rank]))
            entrypoint, *args = bound_command(command, local_rank, self._numa)
        else:
            entrypoint, args = bound_function(self.entrypoint, local_rank, self._numa), list(self.args[local_rank])
        return start_processes(
            name=self.name,
            entrypoint=entrypoint,
            args={0: tuple(args)},
            envs={0: self.envs[local_rank]},
            logs_specs=_LogsOfOneWorker(
                self.stdouts[local_rank], self.stderrs[local_rank], self.error_files[local_rank]
            ),
            start_method=self._start_method,
        )

    def _poll(self) -> RunProcsResult | None:
        """The result once any worker has failed or all have ended well; None before that."""
        for local_rank, context in self._contexts.items():
            if local_rank not in self._ended and (result := context.wait(0)) is not None:
                self._ended[local_rank] = result
        failures = {rank: one.failures[0] for rank, one in self._ended.items() if one.failures}
        for local_rank, failure in failures.items():
            failure.local_rank = local_rank
        if self.are_lost or (not failures and len(self._ended) < self.nprocs):
            return None
        return RunProcsResult(
            return_values={} if failures else {rank: one.return_values.get(0) for rank, one in self._ended.items()},
            failures=failures,
            stdouts=self.stdouts,
            stderrs=self.stderrs,
        )

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End all workers at the same time, within ``patience_seconds``, then processes that they have left behind.

        Torch's ``timeout`` is not used.
        """
        if not self._contexts:
            return
        with ThreadPoolExecutor(min(len(self._contexts), _MOST_THREADS), "elastic_ext ending workers") as threads:
            ends = [
                threads.submit(context.close, death_sig, round(self.patience_seconds))
                for context in self._contexts.values()
            ]
        for end in ends:
            end.result()
        end_groups(self._processes.values(), patience_seconds=_LEFT_SECONDS)
        self._poll()


class _LogsOfOneWorker(LogsSpecs):
    """The log files of one worker, as they were chosen for all workers together."""

    def __init__(self, stdout: str, stderr: str, error_file: str) -> None:
        super().__init__()
        self._destination = LogsDest({0: stdout}, {0: stderr}, {}, {}, {0: error_file})

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._destination


# --- how the workers of a node are started, round after round --------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The settings by which an agent starts its workers, the same in every round."""

    node_id: str
    host: str
    environment: Mapping[str, str]
    """The variables that every worker gets besides its ranks: the job's name, its paths, and its limits."""
    inherited: Mapping[str, str]
    """The agent's own environment, which workers inherit where no other variables are set for them."""
    as_given: Callable[[], AbstractContextManager[None]]
    """A context that is entered while workers are started; within it this process has the environment ``inherited``."""
    is_python: bool
    """Whether workers are run by Python, which then runs the ``at_start`` folder's sitecustomize first."""
    start_method: str
    log_line_prefix_template: str | None
    shutdown_seconds: float
    silence_seconds: float
    """How long it takes until the other nodes know that a node is gone."""
    min_nodes: int
    max_nodes: int = 1
    members: MembersChoice = "auto"
    """How members may change while workers go on."""


def environments(
    launch: Launch, group: WorkerGroup, *, restart_count: int, joins: int = 0, seats: Sequence[int] = ()
) -> dict[int, dict[str, str]]:
    """The environment variables for each worker of a round, by local rank.

    Workers that join those of other nodes by the membership plan of version ``joins`` have ``seats`` by that.
    """
    if not joins:
        seats = free_seats([worker.global_rank for worker in group.workers], taken=())  # the round before has ended
    others = {JOINS: str(joins)} if joins else {}
    return {
        worker.local_rank: {**_environment(launch, group, worker, restart_count), _SEAT: str(seat), **others}
        for worker, seat in zip(group.workers, seats, strict=True)
    }


def place_workers(
    group: WorkerGroup,
    ranks: Sequence[int],
    *,
    world_size: int,
    place: int,
    num_nodes: int,
    pids: Mapping[int, int],
) -> None:
    """Give the workers of a node their ranks in another way than torch's rendezvous has, and those that run their pids.

    ``ranks`` are by local rank, and ``place`` is that of the node among ``num_nodes``.
    """
    group.workers = []
    for local_rank, rank in enumerate(ranks):
        worker: Any = Worker(
            local_rank=local_rank, global_rank=rank, role_rank=rank, world_size=world_size, role_world_size=world_size
        )
        worker.id = pids.get(local_rank)
        group.workers.append(worker)
    placed: Any = group  # torch's types have None there for good
    placed.group_rank, placed.group_world_size = place, num_nodes


def free_seats(ranks: Sequence[int], *, taken: Collection[int]) -> list[int]:
    """A seat for the worker of each of ``ranks`` where living workers have the seats ``taken``.

    It is the rank where that is free, else the lowest number that is neither taken nor another of these ranks.
    """
    free = (number for number in itertools.count() if number not in taken and number not in ranks)
    return [next(free) if rank in taken else rank for rank in ranks]


def workers_of(
    launch: Launch, group: WorkerGroup, envs: dict[int, dict[str, str]], logs: LogsSpecs, *, round_number: int
) -> Workers:
    """The workers of a round, not started yet; each worker's error file is added to its row of ``envs``."""
    spec = group.spec
    assert spec.entrypoint is not None, "the launcher gives one"
    return Workers(
        name=spec.role,
        entrypoint=spec.entrypoint,
        args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in envs},
        envs=envs,
        logs=_ByRound(logs, round_number),
        start_method=launch.start_method,
        as_given=launch.as_given,
        numa=spec.numa_options,
        log_line_prefixes=_prefixes(launch, group),
        stdout_filters=spec.duplicate_stdout_filters,
        stderr_filters=spec.duplicate_stderr_filters,
    )


def _environment(launch: Launch, group: WorkerGroup, worker: Any, restart_count: int) -> dict[str, str]:
    spec, inherited = group.spec, launch.inherited
    place = WorkerPlace(
        rank=worker.global_rank,
        local_rank=worker.local_rank,
        role_rank=worker.role_rank,
        group_rank=group.group_rank or 0,
        world_size=worker.world_size,
        local_world_size=spec.local_world_size,
        role_world_size=worker.role_world_size,
        group_world_size=group.group_world_size or 1,
        role=spec.role,
        master_addr=group.master_addr or "",
        master_port=group.master_port or 0,
        restart_count=restart_count,
        max_restarts=spec.max_restarts,
        run_id=spec.rdzv_handler.get_run_id(),
        use_agent_store=spec.rdzv_handler.use_agent_store,
    )
    found = {
        **environment_of(place),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **devices_of(
            worker.local_rank,
            visible=inherited.get("CUDA_VISIBLE_DEVICES"),
            is_virtual=getattr(spec, "virtual_local_rank", False),
        ),
        **launch.environment,
    }
    return with_start(found, inherited.get("PYTHONPATH"), os.getpid()) if launch.is_python else found


def _prefixes(launch: Launch, group: WorkerGroup) -> dict[int, str] | None:
    if not launch.log_line_prefix_template:
        return None
    template = Template(launch.log_line_prefix_template)
    return {
        worker.local_rank: template.safe_substitute(
            role_name=group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in group.workers
    }


class _ByRound(LogsSpecs):
    """Log files in a folder for each round: torch names folders by failures, and would write over a round's logs."""

    def __init__(self, inner: LogsSpecs, number: int) -> None:
        super().__init__()
        self._inner = inner
        self._number = number

    @property
    def root_log_dir(self) -> str:
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        counts = {rank: env["TORCHELASTIC_RESTART_COUNT"] for rank, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._number)
        found = self._inner.reify(envs)
        for rank, env in envs.items():
            env["TORCHELASTIC_RESTART_COUNT"] = counts[rank]
        return found


# --- the signals that tell an agent to end: the first one counts, and later ones change nothing ----------------------
# Torch has handlers of its own, set as workers are started, which raise at every signal: one that comes meanwhile would
# break off the starting of workers, a second one their ending, and either would leave workers behind.

_AGAIN_SECONDS = 1.0


class StopSignals:
    """Handles the signals that end an agent: the first is kept in ``told``, and raised where the agent is ready for it.

    It is raised only after ``let_through`` and before ``hold``. ``names`` are separated by commas. Outside of the main
    thread no signal is handled.
    """

    def __init__(self, names: str) -> None:
        self.told: signal.Signals | None = None
        """The first stop signal that came; None until then."""
        found = [getattr(signal, name.strip(), None) for name in names.split(",")]
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.getsignal(each) for each in found if isinstance(each, signal.Signals)}
        self._alarm_before: Any = None
        self._is_raised = False

    def __enter__(self) -> StopSignals:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold()
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._alarm_before is not None:
            signal.signal(signal.SIGALRM, self._alarm_before)

    def take(self) -> None:
        """Set the handlers of these signals, in place of any other ones; a SIGHUP that nohup ignores stays ignored."""
        for number, before in self._before.items():
            is_nohup = number == signal.SIGHUP and before == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_nohup else self._note)

    def hold(self) -> None:
        """Keep a signal that comes from now on in ``told``, and raise nothing."""
        self._is_raised = False
        if self._alarm_before is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    @contextmanager
    def in_torchs_place(self) -> Iterator[None]:
        """A context in which torch starts workers: it sets these handlers and not its own."""
        try:
            with handling_signals_by(self._note):
                yield
        finally:
            self.take()

    def let_through(self) -> None:
        """Raise a signal that comes from now on, or has come, as SignalException.

        It is raised once a second until ``hold()`` is called: the first may be raised in code that swallows exceptions,
        as logging does while it writes.
        """
        self._is_raised = True
        if self._before and self._alarm_before is None:
            self._alarm_before = signal.signal(signal.SIGALRM, self._raise)
        if self.told is not None:
            raise self._raised(self.told)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told is None:
            self.told = signal.Signals(number)
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.told is not None and self._is_raised:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            raise self._raised(self.told)

    def _raised(self, number: signal.Signals) -> SignalException:
        return SignalException(f"process {os.getpid()} got {number.name}", sigval=number)
