"""Workers: the workers of one node, each behind a process context of its own, as torch's agent sees one for all.

One that fails leaves the others as they are: whoever watches decides when those end. What they print goes where torch
sends it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    start_processes,
)

from elastic_ext.errors import ElasticError, in_words
from elastic_ext.ranks.processes import Process, end_groups, process_of
from elastic_ext.records.agent import WorkerState
from elastic_ext.torch_private.agent import bound_command, bound_function
from elastic_ext.training.checkpoints.signals import EXIT_STATUS

from .monitor import Watched

__all__ = ["NotStarted", "Workers"]

_LEFT_SECONDS = 3.0  # for what a worker has started and left behind
_MOST_THREADS = 32


class NotStarted(ElasticError):
    """A worker could not be started; it says why."""


class Workers(PContext):
    """What torch's agent calls a process context."""

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
        """How long workers have to end by themselves when they are told to."""
        self._start_method = start_method
        self._as_given = as_given
        self._numa = numa
        self._contexts: dict[int, PContext] = {}
        self._ended: dict[int, RunProcsResult] = {}
        self._processes: dict[int, Process] = {}

    @property
    def processes(self) -> Mapping[int, Process]:
        """The workers by local rank, those that have ended too."""
        return self._processes

    def watched(self, ranks: Mapping[int, int]) -> tuple[Watched, ...]:
        """The workers with their ranks, by local rank, and how those have ended that have."""
        found = []
        for local_rank, process in self._processes.items():
            result = self._ended.get(local_rank)
            code = None if result is None else result.failures[0].exitcode if result.failures else 0
            state: WorkerState = "left" if code == EXIT_STATUS else "failed" if code else "succeeded"
            state = "running" if code is None else state
            found.append(
                Watched(local_rank=local_rank, rank=ranks[local_rank], process=process, state=state, exit_code=code)
            )
        return tuple(found)

    def pids(self) -> dict[int, int]:
        return {local_rank: context.pids()[0] for local_rank, context in self._contexts.items()}

    def _start(self) -> None:
        try:
            for local_rank in range(self.nprocs):
                with self._as_given():
                    self._contexts[local_rank] = self._start_one(local_rank)
                pid = self._contexts[local_rank].pids()[0]
                self._processes[local_rank] = process_of(pid) or Process(pid=pid, start_ticks=0)  # it has ended
        except BaseException as error:
            self._close(signal.SIGTERM)
            if isinstance(error, (OSError, ValueError, AssertionError)):  # no such program, no more processes, no GPU
                raise NotStarted(in_words(error)) from error
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
            logs_specs=_Settled(self.stdouts[local_rank], self.stderrs[local_rank], self.error_files[local_rank]),
            start_method=self._start_method,
        )

    def _poll(self) -> RunProcsResult | None:
        """How the workers have ended: some if any has failed, all if none has; None before that."""
        for local_rank, context in self._contexts.items():
            if local_rank not in self._ended and (result := context.wait(0)) is not None:
                self._ended[local_rank] = result
        failures = {rank: one.failures[0] for rank, one in self._ended.items() if one.failures}
        for local_rank, failure in failures.items():
            failure.local_rank = local_rank
        if not failures and len(self._ended) < self.nprocs:
            return None
        return RunProcsResult(
            return_values={} if failures else {rank: one.return_values.get(0) for rank, one in self._ended.items()},
            failures=failures,
            stdouts=self.stdouts,
            stderrs=self.stderrs,
        )

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """End all at once, in the time that is theirs whatever torch says, and then what they have left behind."""
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


class _Settled(LogsSpecs):
    """Where one worker's output goes, as it was settled for all of them together."""

    def __init__(self, stdout: str, stderr: str, error_file: str) -> None:
        super().__init__()
        self._destination = LogsDest({0: stdout}, {0: stderr}, {}, {}, {0: error_file})

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._destination
