"""A NodeStatus in words, for people: one job in full, or each of several on a line. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

from elastic_ext.members.plan import MembershipPlan
from elastic_ext.profile.summary import mfu_in_words, number_in_words
from elastic_ext.records.agent import AgentRecord
from elastic_ext.records.logged import logged_in_words
from elastic_ext.records.measures import Measures, shown_in_words, words_of
from elastic_ext.records.metrics import ModelProfile
from elastic_ext.records.text import age_in_words, counted, cut, size_in_words, wrapped

from .status import ConfigStatus, NodeStatus, ProgressStatus, RankStatus

__all__ = ["line_of", "once_each", "progress_in_words", "words"]

_MOST_EVENTS = 5
_LEAST_BEFORE_FOLDER = 24
"""Characters of a line that are left for what is said of a job, if its run directory is not cut."""
_MOST_ROWS = 64
_MOST_NAMED = 3
_NUM_PHASES = 2


def words(status: NodeStatus, width: int | None = None) -> str:
    """The status of one job in full, on several lines: of ``width`` characters, or as long as they are.

    Rows of ranks and events are cut, sentences are wrapped.
    """
    lines = wrapped(_heading(status), width)
    for name, text in _facts(status):
        lines += wrapped(text, width, first=f"  {name:<14} ", rest=" " * 17)
    if status.ranks:
        lines += ["  ranks", *(cut(f"    {row}", width) for row in _table(status))]
        if len(status.ranks) > _MOST_ROWS:
            lines.append(f"    and {len(status.ranks) - _MOST_ROWS} more")
    for name, sentences in (("trouble", status.troubles), ("to know", status.notes)):
        if sentences:
            lines.append(f"  {name}")
            lines += [line for each in sentences for line in wrapped(each, width, first="    ", rest="      ")]
    if status.events:
        lines += ["  last events", *(cut(f"    {each}", width) for each in _events(status))]
    return "\n".join(lines)


def line_of(status: NodeStatus, width: int | None = None) -> str:
    """The most important of one job's status, on one line of ``width`` characters: the run directory is whole."""
    running = [each for each in status.ranks if each.state == "running"]
    parts = [f"running, {_ranks_in_words(len(running))}" if status.state == "running" else status.state]
    parts = ["ending"] if status.is_ending else ["has left the job"] if status.left_at is not None else parts
    if status.state != "running" and status.heard_seconds < math.inf:
        parts.append(f"last heard of {age_in_words(status.heard_seconds)} ago")
    if status.progress is not None:
        parts.append(f"step {status.progress.step}")
    if status.goes_on_from is not None:
        parts.append(f"can go on from step {status.goes_on_from}")
    if status.troubles:
        more = f" (and {len(status.troubles) - 1} more)" if len(status.troubles) > 1 else ""
        parts.append(f"trouble: {status.troubles[0]}{more}")
    text, folder = f"{status.job or 'a job without a name'}: {', '.join(parts)}", f"  [{status.run_dir}]"
    if width is not None and width - len(folder) >= _LEAST_BEFORE_FOLDER:
        text = cut(text, width - len(folder))
    return cut(text + folder, width)


def _heading(status: NodeStatus) -> str:
    if status.state == "empty":
        return f"{status.run_dir}: no process has written anything here"
    running = sum(each.state == "running" for each in status.ranks)
    of_all = f" of {status.world_size}" if status.world_size and status.world_size > len(status.ranks) else ""
    what = f"running, {_ranks_in_words(running)}{of_all} here" if status.state == "running" else "has ended"
    what = "ending" if status.is_ending else what
    what = what if status.left_at is None else f"has left the job at step {status.left_at}"
    what += "" if status.goes_on_from is None else f", and can go on from step {status.goes_on_from}"
    return f"{status.job or 'a job without a name'}: {what}" + (", in trouble" if status.troubles else "")


def _facts(status: NodeStatus) -> Iterator[tuple[str, str]]:
    if status.state != "empty":
        yield "run directory", status.run_dir
    if status.agent is not None:
        yield "agent", _agent_in_words(status.agent, status.time, is_running=status.is_agent_running)
        if status.agent.log_folder:
            yield "logs", status.agent.log_folder
    if status.master is not None:
        yield "master", f"{status.master.address}    (elastic-ext status --master {status.run_dir})"
    if status.membership is not None:
        yield "nodes", _nodes_in_words(status.membership)
    if status.restart:
        yield "restarts", str(status.restart)
    if status.model is not None:
        yield "model", _model_in_words(status.model)
    measured = next((each.measures for each in status.ranks if each.measures.global_batch_size is not None), None)
    if measured is not None:
        yield "batch", _batch_in_words(measured, status.world_size)
    if loader := _loader_in_words([each.measures.num_workers for each in status.ranks]):
        held = sum(each.children_bytes or 0 for each in status.ranks)
        yield "loader", loader + (f"; child processes of the ranks here hold {size_in_words(held)}" if held > 0 else "")
    rated = next((each for each in status.ranks if each.measures.learning_rate is not None), None)
    if rated is not None:
        rate = words_of("learning_rate", {"learning_rate": rated.measures.learning_rate})
        yield "learning rate", rate + _age_in_words(rated, status.progress)
    if status.progress is not None:
        yield "progress", progress_in_words(status.progress)
    speed = next((each.samples_per_second for each in status.ranks if each.samples_per_second is not None), None)
    if speed is not None and status.state == "running":
        yield "speed", _speed_in_words(status, speed)
    if logged := status.logged:
        first = next(each for each in status.ranks if each.measures.logged)
        yield "logged", _logged_in_words(logged, len(status.ranks)) + _age_in_words(first, status.progress)
    if status.profile is not None:
        yield "profile", status.profile.verdict.text_over_steps
        for straggler in status.profile.stragglers[:_MOST_NAMED]:
            yield "slow", straggler.text
    yield "config", _config_in_words(status.config)


def _speed_in_words(status: NodeStatus, samples_per_second: float) -> str:
    known = (each.measures.tokens_per_second for each in status.ranks)
    tokens = next((each for each in known if each is not None), None)
    words = f"{samples_per_second:.4g} samples/s"
    words += "" if tokens is None else f", {number_in_words(tokens)} tokens/s"
    mfu = mfu_in_words(None if status.profile is None else status.profile.mfu)
    return f"{words} over all ranks" + (f"; {mfu}" if mfu else "")


def progress_in_words(progress: ProgressStatus) -> str:
    """How far training is, in words on one line."""
    words = f"step {progress.step}" + ("" if progress.epoch is None else f" in epoch {progress.epoch}")
    if progress.num_steps_left is not None:
        words += f"; {counted(progress.num_steps_left, 'step')} left of the epoch"
        words += "" if progress.seconds_left is None else f", about {age_in_words(progress.seconds_left)}"
    if progress.checkpoint_age_seconds is not None:
        age = age_in_words(progress.checkpoint_age_seconds)
        words += f"; last checkpoint of step {progress.checkpoint_step}, {age} ago"
    return words


def _logged_in_words(logged: Mapping[str, float], num_ranks: int) -> str:
    of = "" if num_ranks == 1 else f"; means of the {num_ranks} ranks here"
    return logged_in_words(logged) + of


def _age_in_words(rank: RankStatus, progress: ProgressStatus | None) -> str:
    """When a rank has measured what is shown of it, where training has come further since; else empty."""
    if rank.measured_seconds is None or progress is None or rank.measured_step == progress.step:
        return ""
    return f" (as of step {rank.measured_step}, {age_in_words(rank.measured_seconds)} ago)"


def _loader_in_words(num_workers: Sequence[int | None]) -> str:
    """How many workers ranks' dataloaders have, by the number of each rank; empty where none is known."""
    known = [each for each in num_workers if each is not None]
    if not known:
        return ""
    least, most = min(known), max(known)
    if most == 0:
        return "no workers: each rank loads samples itself"
    return f"{counted(most, 'worker')} on each rank" if least == most else f"{least} to {most} workers on a rank"


def _model_in_words(model: ModelProfile) -> str:
    held = model.parameter_bytes + model.buffer_bytes + model.optimizer_bytes
    words = f"{model.name}, {model.num_parameters} parameters ({model.by_dtype}), {model.optimizers}, {model.sharing}"
    return f"{words}; {size_in_words(held)} with its optimizers' state on rank {model.rank}"


def _batch_in_words(measures: Measures, world_size: int | None) -> str:
    """What a step takes and how ranks take it, such as ``64 samples a step: 2 ranks x 2 micro-batches of 16``."""
    batch, size, num_replicas = measures.global_batch_size or 0, measures.micro_batch_size, measures.num_replicas
    words = f"{counted(batch, 'sample')} a step"
    if not size or not num_replicas:
        return words
    num = -(-batch // (num_replicas * size))
    takers = counted(num_replicas, "rank" if num_replicas == world_size else "replica")
    micro_batches = "1 micro-batch" if num == 1 else f"{num} micro-batches"
    return f"{words}: {takers} x {micro_batches} of {'' if num_replicas * num * size == batch else 'at most '}{size}"


def _agent_in_words(agent: AgentRecord, now: float, *, is_running: bool) -> str:
    text = f"{agent.node_id}, pid {agent.pid} on {agent.host}, elastic_ext {agent.version}"
    if is_running:
        return f"{text}, for {age_in_words(now - agent.time)} (since {_moment(agent.time)})"
    return f"{text}, has ended (was started {_moment(agent.time)})"


def _nodes_in_words(plan: MembershipPlan) -> str:
    parts = []
    for node in plan.nodes:
        last = node.first_rank + node.num_workers - 1
        parts.append(f"{node.node_id} on {node.host} (ranks {node.first_rank} to {last})")
    return f"{', '.join(parts)}; version {plan.version}, since {_moment(plan.time)}: {plan.reason}"


def _config_in_words(config: ConfigStatus) -> str:
    file = "no file" if config.file_version is None else f"version {config.file_version} in the file"
    if config.refusal:
        file = "a file that is refused"
    if not config.in_force:
        return file
    if config.file_version is None and not config.refusal and config.in_force[-1] > 0:
        file = f"no file (one that is written needs version {config.in_force[-1] + 1})"
    return f"version {', '.join(map(str, config.in_force))} in force, {file}"


def _table(status: NodeStatus) -> list[str]:
    """A row per rank, in columns of equal width; columns that are empty in all rows are left out."""
    shares = {} if status.profile is None else status.profile.shares
    rows = [_row(each, shares.get(each.rank, each.measures.shares)) for each in status.ranks[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width) for row in rows]


def _row(rank: RankStatus, shares: Mapping[str, float]) -> tuple[str, ...]:
    doing = rank.activity or ""
    if rank.activity and rank.activity_seconds is not None:
        doing = f"{rank.activity} for {age_in_words(rank.activity_seconds)}"
    version = "" if rank.config_version is None else f"config {rank.config_version}"
    values = rank.to_dict()
    return (
        str(rank.rank),
        f"pid {rank.pid}",
        rank.state,
        "" if rank.step is None else f"step {rank.step}",
        *shown_in_words(values, "last"),
        "" if rank.cpu_percent is None else f"{rank.cpu_percent:.0f}% of a core",
        *shown_in_words(values, "total"),
        version + (f", revision {rank.config_revision}" if version and rank.config_revision else ""),
        doing,
        _largest_in_words(shares),
        f"seen {age_in_words(rank.seen_seconds)} ago",
    )


def _largest_in_words(shares: Mapping[str, float]) -> str:
    """The phases that take most of a rank's time, with their shares."""
    largest = sorted(shares.items(), key=lambda each: -each[1])[:_NUM_PHASES]
    return ", ".join(f"{label} {share:.0%}" for label, share in largest)


def _events(status: NodeStatus) -> Iterator[str]:
    for sources, event in once_each([(each.source, each) for each in status.events])[-_MOST_EVENTS:]:
        step = "" if event.step is None else f", step {event.step}"
        who = sources[0] if len(sources) == 1 else _ranks_in_words(len(sources))
        yield f"{_moment(event.time)}  {who}{step}: {event.text}"


class _Event(Protocol):
    @property
    def step(self) -> int | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


_AnyEvent = TypeVar("_AnyEvent", bound=_Event)


def once_each(events: Sequence[tuple[str, _AnyEvent]]) -> list[tuple[list[str], _AnyEvent]]:
    """Events with their sources, those of one step that several sources tell in the same words once, with all these.

    An event that one source has told twice stays two events.
    """
    found: list[tuple[list[str], _AnyEvent]] = []
    for source, event in events:
        alike = (one for one in reversed(found) if _words_of(one[1]) == _words_of(event))
        sources = next((each for each, _ in alike if source not in each), None)
        if sources is None:
            found.append(([source], event))
        else:
            sources.append(source)
    return found


def _words_of(event: _Event) -> tuple[int | None, str, str]:
    return event.step, event.kind, event.text


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


def _ranks_in_words(count: int) -> str:
    return f"{count} rank" + ("" if count == 1 else "s")
