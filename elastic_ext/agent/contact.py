"""Who writes a config file: the agent that has it, if one lives, or whoever wants to.

What an agent writes is on its node at once and goes to the others from there; a file that somebody else writes is taken
as well, but only once it is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.ranks.processes import Process, is_alive
from elastic_ext.records.agent import AGENT_FILE, MOST_BYTES, AgentRecord
from elastic_ext.records.files import read_at_most

from .asking import AgentAbsent, AgentFailed, AgentRefused, AgentSilent, ask
from .folder import is_held

__all__ = ["AgentsConfig", "agent_in", "is_running", "living_agent_of"]

_FORCE = "with --force the file is written all the same, which the agent takes as your version once it notices"


class AgentsConfig:
    """The config file of an agent that runs, changed by asking it; the same calls as on ``ConfigHistory``.

    What it raises besides: AgentRefused, AgentFailed, and AgentSilent where it cannot be asked, which says what to do.
    """

    def __init__(self, agent: AgentRecord, *, timeout_seconds: float = 30.0) -> None:
        self._agent = agent
        self._timeout_seconds = timeout_seconds

    def set(
        self, changes: Mapping[str, object], *, remove: Sequence[str] = (), reason: str, at_step: int | None = None
    ) -> ElasticConfig:
        """Have the next version written."""
        request = {"changes": dict(changes), "remove": list(remove), "reason": reason, "at_step": at_step}
        return self._written({"do": "config-set", **request})

    def undo(self) -> ElasticConfig:
        """Have the content before the present one written as a new version."""
        return self._written({"do": "config-undo"})

    def _written(self, request: Mapping[str, Any]) -> ElasticConfig:
        try:
            answer = ask(Path(self._agent.socket), request, timeout_seconds=self._timeout_seconds)
        except (AgentAbsent, AgentSilent) as error:
            agent = f"the agent of this file runs (pid {self._agent.pid} on {self._agent.host})"
            raise AgentSilent(f"{agent}, and cannot be asked: {error}; {_FORCE}") from None
        except ValueError as error:  # it is too long to be asked
            raise AgentRefused(f"{error}; {_FORCE}") from None
        if not isinstance(answer.get("config"), dict):
            raise AgentFailed("the agent, which is of another version, does not say what it has written")
        return ElasticConfig.from_dict(answer["config"])


def living_agent_of(config_file: Path, folders: Sequence[Path], *, host: str) -> AgentRecord | None:
    """The agent that runs, has ``config_file`` and listens, by its record in one of ``folders``; None if there is none.

    ``host`` is what this machine is called. AgentSilent where it runs on another one, and cannot be asked from here.
    """
    for folder in dict.fromkeys(folders):
        agent = agent_in(folder)
        if agent is None or not agent.socket or not _is_same(Path(agent.config_file), config_file):
            continue
        if not is_running(agent, folder, host):
            continue
        if agent.host != host:
            where = f"the agent of this file runs on {agent.host}, and this is {host}"
            raise AgentSilent(f"{where}; run this command there, or {_FORCE}")
        return agent
    return None


def agent_in(folder: Path) -> AgentRecord | None:
    """What the agent of a run directory says of itself; None where there is no such record."""
    try:
        data = read_at_most(folder / AGENT_FILE, MOST_BYTES)
        return AgentRecord.from_json(data.decode(errors="replace"))
    except (OSError, ValueError):
        return None


def is_running(agent: AgentRecord, folder: Path, host: str) -> bool:
    """Whether the agent of the run directory ``folder`` has not ended, as far as ``host`` can tell."""
    if agent.host == host:
        return is_alive(Process(pid=agent.pid, start_ticks=agent.start_ticks))
    try:
        return is_held(folder)
    except OSError:  # storage without locks, of which nothing can be told
        return False


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
