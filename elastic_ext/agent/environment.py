"""What a worker's environment says: torchrun's words, which scripts know, and those of this library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OF_AGENT", "Place", "devices_of", "environment_of", "with_start", "without_outer"]

OF_AGENT = ("RUN_DIR", "CONFIG_FILE", "JOB", "STAGING_DIR", "PULSE_DIR", "SHUTDOWN_SECONDS")
"""What an agent tells its workers of where its things lie, each with ELASTIC_EXT_ before it."""
AT_START = Path(__file__).with_name("at_start")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one worker stands among all of its job."""

    rank: int
    local_rank: int
    role_rank: int
    group_rank: int
    """Of its node."""
    world_size: int
    local_world_size: int
    role_world_size: int
    group_world_size: int
    role: str
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int
    run_id: str
    use_agent_store: bool


def environment_of(place: Place) -> dict[str, str]:
    """What torchrun tells a worker of its place."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "ROLE_RANK": str(place.role_rank),
        "ROLE_NAME": place.role,
        "GROUP_RANK": str(place.group_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.use_agent_store),
    }


def devices_of(local_rank: int, *, visible: str | None, is_virtual: bool) -> dict[str, str]:
    """Which devices a worker sees: all, or where local ranks are virtual its own one alone, as the first.

    ``visible`` is CUDA_VISIBLE_DEVICES as the agent has it. ValueError where there is none left for this worker.
    """
    if not is_virtual:
        return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if visible is None:
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, and --virtual-local-rank needs one device for each worker: local "
            f"rank {local_rank} has none. Start fewer with --nproc-per-node, or make more devices visible"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent that a worker of another agent has started, without what is that one's."""
    outer = {"TORCHELASTIC_RUN_ID", *(f"ELASTIC_EXT_{name}" for name in OF_AGENT)}
    return {name: value for name, value in environ.items() if name not in outer}


def with_start(environment: Mapping[str, str], path: str | None, agent_pid: int) -> dict[str, str]:
    """``environment`` with what has Python run ``at_start`` first; ``path`` is PYTHONPATH as the agent has it."""
    return {
        **environment,
        "ELASTIC_EXT_AGENT_PID": str(agent_pid),
        "PYTHONPATH": str(AT_START) if not path else f"{AT_START}{os.pathsep}{path}",
    }
