"""Who may join a job, by what an agent says of itself. Pure."""

from __future__ import annotations

import math
from typing import Literal

from .wire import master_pb2 as wire

__all__ = ["MOST_HARDWARE", "MOST_NAME", "PROTOCOL", "RefusalKind", "Refused", "check_job", "check_join"]

PROTOCOL = 1
"""What this version speaks; the only one so far."""
MOST_NAME = 256
MOST_HARDWARE = 256 << 10
_MOST_AHEAD_SECONDS = 86400.0

RefusalKind = Literal["fenced", "unknown", "other", "limits", "late", "invalid"]


class Refused(Exception):
    """What an agent or a person asked for cannot be, in a sentence."""

    def __init__(self, kind: RefusalKind, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def check_join(
    request: wire.JoinRequest, *, job: str, job_id: str, epoch: int, library: str, now_seconds: float
) -> None:
    """Refused where the agent cannot be one of this master's."""
    node = request.node
    if not request.oldest_protocol <= PROTOCOL <= request.protocol:
        spoken = f"{request.oldest_protocol} to {request.protocol}"
        raise Refused(
            "other",
            f"the agent (elastic_ext {node.library[:40]}) speaks protocol {spoken}, this master (elastic_ext "
            f"{library}) speaks {PROTOCOL}: use the same version of the library",
        )
    for field, value in {"node_id": node.node_id, "host": node.host, "job": request.job}.items():
        if not 0 < len(value) <= MOST_NAME or not value.isprintable():
            raise Refused("invalid", f"{field} is {value[:60]!r}; allowed: 1 to {MOST_NAME} printable characters")
    if len(request.hardware) > MOST_HARDWARE:
        raise Refused("invalid", f"hardware has {len(request.hardware)} characters; allowed: {MOST_HARDWARE}")
    if not math.isfinite(node.started_at):
        raise Refused("invalid", f"started_at is {node.started_at}; allowed: seconds since 1970")
    ahead_seconds = node.incarnation / 1e9 - now_seconds
    if ahead_seconds > _MOST_AHEAD_SECONDS:  # no later start of this node could take its place
        raise Refused(
            "invalid",
            f"incarnation is {node.incarnation} nanoseconds since 1970, {ahead_seconds / 86400:.0f} days ahead of the "
            "master's clock; one day is allowed: set the clocks right, and remove the file `incarnation` in the "
            "agent's run directory",
        )
    check_job(request.job, job)
    if request.job_id and request.job_id != job_id:
        raise Refused(
            "other",
            f"the agent has spoken to the master of job {job!r} with another memory (id {request.job_id[:40]!r}): this "
            f"one (id {job_id!r}) listens in its place",
        )
    if request.epoch > epoch:
        raise Refused("other", f"a later master (epoch {request.epoch}) is there; this one is of {epoch}")


def check_job(named: str, job: str) -> None:
    """Refused where another job is meant than this one."""
    if named and job and named != job:
        raise Refused("other", f"this master is of job {job!r}, not of {named[:MOST_NAME]!r}: look at --master")
