"""What a master says of its job, in words, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from elastic_ext.records.text import age_in_words, counted, not_finite_in_words, on_one_line, size_in_words

from .wire import master_pb2 as wire

__all__ = ["event_words", "is_healthy", "moment_words", "status_words"]

_MOST_NODES = 64
_MOST_RANKS = 16
_MOST_EVENTS = 5
_MOST_MISSING = 8
_NUM_PHASES = 2


def is_healthy(status: wire.JobStatus) -> bool:
    """Whether there is nothing to complain of."""
    nodes = status.nodes
    is_bad = any(each.state == "lost" or each.troubles or any(one.trouble for one in each.workers) for each in nodes)
    return not status.troubles and not is_bad


def status_words(status: wire.JobStatus, address: str) -> str:
    """All that there is to say, on several lines."""
    lines = [_heading(status), *(f"  {name:<14} {text}" for name, text in _facts(status, address))]
    if status.nodes:
        lines.append("  nodes")
        shares = {each.node_id: each for each in status.membership.nodes}
        for node in status.nodes[:_MOST_NODES]:
            lines.append(f"    {_node(node, shares.get(node.node.agent_id))}")
            lines += [f"      {_worker(each)}" for each in node.workers[:_MOST_RANKS]]
            if len(node.workers) > _MOST_RANKS:
                lines.append(f"      and {len(node.workers) - _MOST_RANKS} more")
        if len(status.nodes) > _MOST_NODES:
            lines.append(f"    and {len(status.nodes) - _MOST_NODES} more")
    for name, sentences in (("trouble", [*_troubles(status)]), ("to do", status.recommendations)):
        if sentences:
            lines += [f"  {name}", *(f"    {each}" for each in sentences)]
    if status.events:
        lines += ["  last events", *(f"    {event_words(each)}" for each in status.events[-_MOST_EVENTS:])]
    return "\n".join(on_one_line(line) for line in lines)


def event_words(event: wire.JobEvent) -> str:
    """An event on a line."""
    who = [event.node_id or "master"]
    who += [f"rank {event.rank}"] if event.rank >= 0 else []
    who += [f"step {event.step}"] if event.step >= 0 else []
    return on_one_line(f"{moment_words(event.time)}  {', '.join(who)}: {event.text}")


def _heading(status: wire.JobStatus) -> str:
    here = [each for each in status.nodes if each.state in ("live", "late")]
    words = f"{status.job or 'no job yet'}: {counted(len(here), 'node')}"
    if status.progress.HasField("step"):
        words += f", step {status.progress.step}"
    return words + ("" if is_healthy(status) else ", in trouble")


def _facts(status: wire.JobStatus, address: str) -> Iterator[tuple[str, str]]:
    up = age_in_words(status.up_seconds)
    yield "master", f"{address}, epoch {status.epoch}, for {up}, elastic_ext {status.library}"
    if status.HasField("membership"):
        plan = status.membership
        ranks = sum(each.num_workers for each in plan.nodes)
        size = f"{counted(len(plan.nodes), 'node')}, {counted(ranks, 'rank')}"
        yield "membership", f"version {plan.version}: {size}, since {moment_words(plan.time)}: {plan.reason}"
        if unknown := _unknown_shares(status):
            yield "", f"never heard of here: {', '.join(unknown)}"
    if speed := _speed(status.progress):
        yield "speed", speed
    if status.verdict.text:
        yield "profile", status.verdict.text
    elif status.progress.shares:
        yield "profile", _largest(status.progress.shares, num=len(status.progress.shares))
    yield "config", _config(status.config)
    if status.tuning.mode:
        yield "tuner", f"{status.tuning.mode}, {status.tuning.standing}: {status.tuning.text}"
    for group in status.groups:
        yield "near", ", ".join(group.node_ids)


def _speed(progress: wire.Progress) -> str:
    parts = []
    if progress.HasField("steps_per_second"):
        parts.append(f"{progress.steps_per_second:.3g} steps/s")
    if progress.HasField("samples_per_second"):
        parts.append(f"{progress.samples_per_second:.4g} samples/s")
    if progress.HasField("tokens_per_second"):
        parts.append(f"{progress.tokens_per_second:.4g} tokens/s")
    return ", ".join(parts)


def _config(config: wire.ConfigStatus) -> str:
    if not config.version:
        return "none yet"
    reason = f": {config.reason}" if config.reason else ""
    held = f"held by {config.num_holding} of {counted(config.num_nodes, 'node')}"
    in_force = f", version {', '.join(map(str, config.in_force))} in force" if config.in_force else ""
    return f"version {config.version} ({config.author}, {moment_words(config.time)}{reason}), {held}{in_force}"


def _unknown_shares(status: wire.JobStatus) -> list[str]:
    """Who belongs to the job by what its agents say, and has not joined; none where none of them says who it is."""
    known = {each.node.agent_id for each in status.nodes if each.node.agent_id}
    missing = [each for each in status.membership.nodes if each.node_id not in known] if known else []
    return [f"{each.node_id} ({_ranks(each)})" for each in missing[:_MOST_MISSING]]


def _ranks(share: wire.NodeShare) -> str:
    last = share.first_rank + share.num_workers - 1
    return f"rank {last}" if share.num_workers == 1 else f"ranks {share.first_rank} to {last}"


def _node(node: wire.NodeStatus, share: wire.NodeShare | None) -> str:
    who = f"{node.node.node_id}  {node.state}  pid {node.node.pid} on {node.node.host}"
    who += f"  {_ranks(share)}" if share is not None and share.num_workers else ""
    version = f"config {node.config_version}" if node.config_version else "no config"
    machine = f"  {node.machine}" if node.machine else ""
    return f"{who}  {version}  seen {age_in_words(node.seen_seconds)} ago{machine}"


def _worker(worker: wire.Worker) -> str:
    parts = [f"rank {worker.rank}", f"pid {worker.pid}", worker.state]
    if worker.HasField("exit_code"):
        parts.append(f"exit code {worker.exit_code}")
    if worker.HasField("step"):
        parts.append(f"step {worker.step}")
    if worker.HasField("steps_per_second"):
        parts.append(f"{worker.steps_per_second:.3g} steps/s")
    if worker.HasField("memory_bytes"):
        parts.append(size_in_words(worker.memory_bytes))
    if worker.HasField("accelerator_bytes"):
        parts.append(f"{size_in_words(worker.accelerator_bytes)} on its accelerator")
    if worker.num_not_finite:
        parts.append(not_finite_in_words(worker.num_not_finite, worker.num_skipped))
    if worker.HasField("config_version"):
        parts.append(f"config {worker.config_version}")
    if worker.activity:
        parts.append(f"{worker.activity} for {age_in_words(worker.activity_seconds)}")
    if worker.shares:
        parts.append(_largest(worker.shares, num=_NUM_PHASES))
    return "  ".join(parts)


def _troubles(status: wire.JobStatus) -> Iterator[str]:
    yield from status.troubles
    for node in status.nodes:
        for worker in node.workers:
            if worker.trouble:
                yield f"rank {worker.rank} on {node.node.host}: {worker.trouble}"


def _largest(shares: Mapping[str, float], *, num: int) -> str:
    largest = sorted(shares.items(), key=lambda each: -each[1])[:num]
    return ", ".join(f"{label} {share:.0%}" for label, share in largest)


def moment_words(seconds: float) -> str:
    """A time of day, and its date."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"
