"""Starting: how the workers of a node are started, round after round."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from string import Template
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.utils.api import macros

from .environment import Place, devices_of, environment_of, with_start
from .workers import Workers

__all__ = ["Launch", "environments", "workers_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How workers of this node are started, whatever the round."""

    node_id: str
    host: str
    environment: Mapping[str, str]
    """What every worker is told of where its things lie."""
    inherited: Mapping[str, str]
    """The agent's own environment, which workers have but for what they are told otherwise."""
    as_given: Callable[[], AbstractContextManager[None]]
    """Entered while workers are started: until it is left, this process has that environment."""
    is_python: bool
    """Whether workers are run by Python, which is given something to run first."""
    start_method: str
    log_line_prefix_template: str | None
    shutdown_seconds: float
    silence_seconds: float
    """How long it takes until a node that is gone is known to be."""
    min_nodes: int


def environments(launch: Launch, group: WorkerGroup, *, restart_count: int) -> dict[int, dict[str, str]]:
    """What the workers of a round are told, by local rank."""
    return {worker.local_rank: _environment(launch, group, worker, restart_count) for worker in group.workers}


def workers_of(
    launch: Launch, group: WorkerGroup, envs: dict[int, dict[str, str]], logs: LogsSpecs, *, round_number: int
) -> Workers:
    """The workers of a round, not started yet; ``envs`` gets where each writes what ends it."""
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
    place = Place(
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
    """Logs of each round beside those of the earlier ones: torch counts failures, and would write over them."""

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
