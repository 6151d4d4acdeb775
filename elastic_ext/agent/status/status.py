"""The status of a job on this node, derived from the records of its run directory. Pure; files.py reads the records and
text.py prints the status.
"""

from __future__ import annotations

import math
import signal
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from elastic_ext.agent.members import why_restart_told
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.profile.breakdown import RankView, breakdown_of
from elastic_ext.profile.reader import NodeProfiles, WindowsByRank, present_windows, rounds_of, view_of
from elastic_ext.profile.stragglers import Straggler, Stragglers, rank_busy_times
from elastic_ext.profile.summary import flops_share
from elastic_ext.profile.verdict import Verdict, verdict
from elastic_ext.records.agent import AgentRecord, MasterRecord, WorkerSeen
from elastic_ext.records.logged import as_json, mean_logged
from elastic_ext.records.measures import METRICS, Measures, parts_of, words_of
from elastic_ext.records.metrics import CAN_GO_ON, TOLD_TO_END, ModelProfile, RankMetrics
from elastic_ext.records.text import age_in_words

from .files import EventSeen, RunFiles

__all__ = [
    "ConfigStatus",
    "NodeStatus",
    "ProfileStatus",
    "ProgressStatus",
    "RankStatus",
    "profile_of",
    "progress_of",
    "seconds_for_steps",
    "status_of",
]


# --- where the time of a job's ranks on this node goes, by what they have written ------------------------------------

_SECONDS = 60.0
_NUM_ROUNDS = 3
"""In how many rounds a worker must be slow to be named a straggler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileStatus:
    """Where the time of this node's ranks goes: over the last minute of steps, or the last window if that is longer."""

    verdict: Verdict
    shares: Mapping[int, Mapping[str, float]]
    """By rank, the share of training's time that each phase takes, as the verdict counts it; empty where it is not
    known."""
    stragglers: tuple[Straggler, ...]
    """The stragglers among this node's ranks, the slowest first."""
    mfu: float | None
    """Model FLOPs utilisation of the median rank, from 0 to 1; None where it is not known."""


def profile_of(profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]) -> ProfileStatus | None:
    """The profile of the ranks that ``metrics`` are of; None where these have no profile windows."""
    windows = {rank: row for rank, row in profiles.windows.items() if rank in metrics}
    present = present_windows(windows, seconds=_SECONDS)
    if not present:
        return None
    world_size = max(row[-1].world_size for row in present.values())
    views = _views(present, profiles, metrics)
    judged = verdict(views, is_partial=world_size > len(metrics))
    known = [] if judged.kind == "unknown" else [breakdown_of(view) for view in views]
    return ProfileStatus(
        verdict=judged,
        shares={
            each.rank: {phase.label: round(share, 4) for phase, share in each.shares_of_training.items() if share}
            for each in known
        },
        stragglers=_stragglers(windows, profiles, metrics),
        mfu=_mfu(views, metrics),
    )


def _views(rows: WindowsByRank, profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]) -> list[RankView]:
    return [
        view_of(
            row,
            host=metrics[rank].host,
            measures=metrics[rank].measures,
            census=profiles.censuses.get(rank),
            calibration=profiles.calibration,
            trace=profiles.traces.get(rank),
        )
        for rank, row in rows.items()
    ]


def _stragglers(
    windows: WindowsByRank, profiles: NodeProfiles, metrics: Mapping[int, RankMetrics]
) -> tuple[Straggler, ...]:
    """The ranks of this node that were slow in each of the last rounds."""
    rounds, found = Stragglers(), list[Straggler]()
    for each in rounds_of(present_windows(windows, seconds=math.inf), _NUM_ROUNDS):
        views = _views({rank: (window,) for rank, window in each.items()}, profiles, metrics)
        found = rounds.see(rank_busy_times(views))
    return tuple(found)


def _mfu(views: Sequence[RankView], metrics: Mapping[int, RankMetrics]) -> float | None:
    shares = [
        flops_share(view.window, view.census, view.calibration, num_replicas=metrics[view.rank].measures.num_replicas)
        for view in views
    ]
    known = [each for each in shares if each is not None]
    return statistics.median_low(known) if known else None


# --- what the files of a run directory say of a job on this node: who runs, how far it is, what is wrong -------------
# All of it is pure: the files are read in files.py, and put into words in text.py.
#
# A rank's record is *left* where it is of an earlier start of the job, or of a process that another has replaced; what
# it says counts for nothing now.

_SILENT_SECONDS = 60.0
"""How long a rank may write nothing at least: workers' records come every few seconds, metrics every ten."""
_SILENT_STEPS = 10.0
_LAG_SECONDS = 60.0
"""How long a version may be in the config file before it is a trouble that it is not in force."""
_MOST_NAMED = 8
_MOST_STEPS = 1 << 53
_LEAST_SPEED = 1e-6
_BEGAN = "training-began"
_LEFT = "left"
"""The kind of an agent's event: its workers have left those of other nodes, which go on."""
_LEAVING = "leaving"
"""The kind of an agent's event: it was told to end, or to leave the job."""
_MEMBERS = "members-changed"
"""The kind of a rank's event that it has come to other members, or has left them, at its step."""
_INTERRUPTED = -signal.SIGINT
"""The exit code of a rank that a person has ended, which is no failure."""

RunState = Literal["running", "ended", "empty"]
RankState = Literal["running", "succeeded", "failed", "left", "ended", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The status of one rank on this node; fields that are not known are None."""

    rank: int
    local_rank: int | None
    pid: int
    state: RankState
    """The state of the rank's process: ``left`` where it was told to end, ``ended`` where nothing says how it ended,
    ``unknown`` where it runs on another machine and has been silent."""
    exit_code: int | None
    seen_seconds: float
    """How many seconds ago the rank was last heard of."""
    measured_step: int | None
    """The step at which the rank wrote its metrics, of which ``measures`` are; an agent knows of later steps."""
    measured_seconds: float | None
    """How many seconds ago the rank wrote its metrics."""
    step: int | None
    steps_per_second: float | None
    samples_per_second: float | None
    """The samples per second of all ranks together."""
    memory_bytes: int | None
    children_bytes: int | None
    """The machine's memory that processes started by the rank hold, such as those that load samples."""
    accelerator_bytes: int | None
    cpu_percent: float | None
    config_version: int | None
    config_revision: int | None
    activity: str | None
    activity_seconds: float | None
    trouble: str | None
    measures: Measures
    """The metrics that the rank has written, its rates at the steps per second that its agent has counted, if it has;
    a field above has the agent's value of its metric, if there is one."""

    def to_dict(self) -> dict[str, Any]:
        """The status of a rank as values for JSON, its metrics beside the other values."""
        found = asdict(self)
        del found["measures"]
        told = {**self.measures.told(), "logged": as_json(self.measures.logged)}
        return {**found, **{name: value for name, value in told.items() if name not in found}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressStatus:
    """How far training is, by the ranks on this node; None for what is not known."""

    step: int
    """Steps that had committed since training began, on the rank that has told of most."""
    epoch: int | None
    """The epoch that the loop is in; None also where it has ended since the metrics that name it."""
    num_steps_left: int | None
    """Steps that are left of the epoch."""
    seconds_left: float | None
    """How long these take at the present speed; None where training does not run."""
    checkpoint_step: int | None
    """The step of the newest checkpoint that the run has saved or gone on from."""
    checkpoint_age_seconds: float | None


def progress_of(
    ranks: Sequence[RankStatus],
    metrics: Mapping[int, RankMetrics],
    *,
    now: float,
    is_running: bool,
    goes_on_from: int | None,
) -> ProgressStatus | None:
    """How far training is at ``now``, in seconds since 1970; None where no rank has told of a step.

    ``goes_on_from`` is the step that ranks which were told to end have saved last, or at which they have left: records
    may be older.
    """
    steps = [each.step for each in ranks if each.step is not None]
    if not steps:
        return None
    if goes_on_from is not None:
        steps.append(goes_on_from)
    newest = max(metrics.values(), key=lambda each: each.time, default=None)
    measures = Measures() if newest is None else newest.measures
    told = (each.measures for each in metrics.values() if each.measures.checkpoint_time is not None)
    saved = max(told, key=lambda each: each.checkpoint_time or 0.0, default=Measures())
    step_told = steps[0] if newest is None else newest.step  # heartbeats tell of later steps than metrics
    step, epoch, left = max(*steps, step_told), measures.epoch, measures.num_epoch_steps_left
    if left is not None:
        left -= step - step_told
        if left < 0:
            epoch = left = None
    return ProgressStatus(
        step=step,
        epoch=epoch,
        num_steps_left=left,
        seconds_left=seconds_for_steps(left, measures.steps_per_second) if is_running else None,
        checkpoint_step=saved.checkpoint_step,
        checkpoint_age_seconds=None if saved.checkpoint_time is None else max(now - saved.checkpoint_time, 0.0),
    )


def seconds_for_steps(num_steps: int | None, steps_per_second: float | None) -> float | None:
    """How long so many steps take at a speed; None where either is not known, or the speed is next to none."""
    if num_steps is None or not 0 <= num_steps < _MOST_STEPS:
        return None
    return None if steps_per_second is None or steps_per_second < _LEAST_SPEED else num_steps / steps_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigStatus:
    """The config version in the config file, and the versions in force on this node's ranks."""

    file_version: int | None
    """The version in the config file; None where there is no file, or it is refused."""
    refusal: str
    in_force: tuple[int, ...]
    """The versions in force on the ranks of this node; one, as a rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """A job on one node, as of ``time`` (seconds since 1970)."""

    time: float
    run_dir: str
    job: str | None
    state: RunState
    agent: AgentRecord | None
    is_agent_running: bool
    master: MasterRecord | None
    """The master that the agent speaks with; None where the agent has ended, or has none."""
    membership: MembershipPlan | None
    restart: int | None
    """How often the job's processes were restarted after a failure."""
    world_size: int | None
    goes_on_from: int | None
    """The step from which training can go on, where it was told to end and has saved; else None."""
    left_at: int | None
    """The step at which this node's workers left those of other nodes, which go on; None where they did not."""
    is_ending: bool
    """Whether the agent was told to end, and all of its workers have ended already."""
    model: ModelProfile | None
    progress: ProgressStatus | None
    profile: ProfileStatus | None
    config: ConfigStatus
    ranks: tuple[RankStatus, ...]
    troubles: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences that are worth knowing and are no trouble."""
    events: tuple[EventSeen, ...]

    @property
    def logged(self) -> dict[str, float]:
        """The mean over this node's ranks of each number that the script has logged."""
        return mean_logged((each.measures.logged, 1.0) for each in self.ranks)

    @property
    def heard_seconds(self) -> float:
        """How many seconds ago the job was last heard of on this node; infinite where it never was."""
        heard = [self.time - each.seen_seconds for each in self.ranks] + [each.time for each in self.events]
        heard += [] if self.agent is None else [self.agent.time]
        return self.time - max(heard, default=-math.inf)

    def to_dict(self) -> dict[str, Any]:
        """The status as values for JSON, with ``healthy``, which is True where there is no trouble."""
        return {
            **asdict(self),
            "ranks": [each.to_dict() for each in self.ranks],
            "logged": as_json(self.logged),
            "healthy": not self.troubles,
        }


def status_of(files: RunFiles) -> NodeStatus:
    """The status of a job on this node, by the records of its run directory."""
    files = _without_former_agent(files)
    metrics, left = _told_apart(files)
    ranks = _ranks(files, metrics)
    is_running = files.is_agent_running or any(each.state == "running" for each in ranks)
    is_empty = not ranks and files.agent is None and not files.metrics
    config = ConfigStatus(
        file_version=None if files.config is None else files.config.version,
        refusal=files.config_refusal,
        in_force=tuple(sorted({each.config_version for each in ranks if each.config_version is not None})),
    )
    newest = max(metrics.values(), key=lambda each: each.time, default=None)
    last = None if any(each.state == "running" for each in ranks) else _last_of_leaving(files)
    saved_at = last.step if last is not None and last.kind == CAN_GO_ON else None
    is_ending = files.is_agent_running and last is not None and _is_told_to_leave(files)
    left_at = _step_of_leaving(files, newest) if last is not None and last.kind == _LEFT else None
    goes_on_from = saved_at if is_ending or not is_running else None
    membership = files.membership
    notes = [_left_in_words(left)] if left else []
    troubles = [f"{words}; left out here" for words in files.damaged]
    troubles += _agent_troubles(files)
    for each in ranks:
        is_well = saved_at is not None or left_at is not None
        troubles += _rank_troubles(each, files, is_running=is_running, has_left_well=is_well)
    for is_trouble, words in _metric_words(ranks):
        (troubles if is_trouble else notes).append(words)
    if is_running:
        for is_trouble, words in _config_words(files, config, step=newest.step if newest else 0):
            (troubles if is_trouble else notes).append(words)
        notes += _from_checkpoint_in_words(files, newest)
    elif config.refusal:
        troubles.append(_refused_in_words(config))
    if is_running and files.workers is not None and files.workers.waiting:
        notes.append(files.workers.waiting)
    if is_running and membership is not None and len(membership.nodes) > 1:
        notes += _members_in_words(files)
    if any(each.exit_code == _INTERRUPTED for each in ranks):
        notes.append("its ranks were ended by SIGINT (Ctrl-C)")
    if goes_on_from is not None:
        notes.append(f"training was told to end, and can go on from step {goes_on_from}")
    elif left_at is not None:
        notes.append("its workers have left those of other nodes, which go on with the training")
    elif not is_running and not is_empty and files.workers is None:
        notes.append("its processes have ended; nothing says how")
    return NodeStatus(
        time=files.time,
        run_dir=files.path,
        job=files.agent.job if files.agent else newest.job if newest else None,
        state="running" if is_running else "empty" if is_empty else "ended",
        agent=files.agent,
        is_agent_running=files.is_agent_running,
        master=files.master if files.is_agent_running else None,
        membership=membership,
        restart=files.workers.restart if files.workers else newest.generation if newest else None,
        world_size=membership.world_size if membership and left_at is None else newest.world_size if newest else None,
        goes_on_from=goes_on_from,
        left_at=left_at,
        is_ending=is_ending,
        model=files.model,
        progress=progress_of(
            ranks, metrics, now=files.time, is_running=is_running, goes_on_from=_first(goes_on_from, left_at)
        ),
        profile=profile_of(files.profiles, metrics),
        config=config,
        ranks=ranks,
        troubles=tuple(troubles),
        notes=tuple(notes),
        events=files.events,
    )


def _members_in_words(files: RunFiles) -> list[str]:
    """Why all workers are started anew as nodes join and leave, where one of them says so, or the agent."""
    told = why_restart_told([each for each in files.events if files.agent is None or each.time >= files.agent.time])
    whys = [told] if told else [each.why_restart for each in files.members if each.why_restart]
    return [f"as nodes join or leave, all workers are started anew: {whys[0]}"] if whys else []


def _without_former_agent(files: RunFiles) -> RunFiles:
    """The files without records of an earlier agent, or of an agent before a later start without one."""
    agent, workers = files.agent, files.workers
    if agent is not None and workers is not None and workers.time < agent.time:
        workers = None
    if agent is not None and not files.is_agent_running:
        since = agent.time if workers is None else workers.time
        pids = {each.pid for each in workers.workers} if workers else set()
        has_orphans = not pids.isdisjoint(files.living)
        if not has_orphans and any(each.pid in files.living and each.time > since for each in files.metrics):
            agent = None
    if agent is None:
        return replace(files, agent=None, membership=None, workers=None)
    return replace(files, workers=workers)


def _told_apart(files: RunFiles) -> tuple[dict[int, RankMetrics], list[RankMetrics]]:
    """The metrics of the present processes, by rank, and the metrics that are left of an earlier start."""
    candidates = [each for each in files.metrics if files.agent is None or each.time >= files.agent.time]
    by_rank: dict[int, RankMetrics] = {}
    if files.workers is not None:
        workers = {each.rank: each for each in files.workers.workers}
        by_pid = {each.pid: each for each in files.workers.workers}  # it may have another rank by now
        for metrics in sorted(candidates, key=lambda each: (each.pid in by_pid, each.time)):
            worker = by_pid.get(metrics.pid, workers.get(metrics.rank))
            if worker is not None and _is_of(metrics, worker, files):
                by_rank[worker.rank] = metrics
    else:
        running = [each for each in candidates if each.pid in files.living and each.host == files.host]
        newest = max(running or candidates, key=lambda each: each.time, default=None)
        by_rank = {each.rank: each for each in candidates if newest and _start_of(each) == _start_of(newest)}
    current = {id(each) for each in by_rank.values()}
    return by_rank, [each for each in files.metrics if id(each) not in current]


def _is_of(metrics: RankMetrics, worker: WorkerSeen, files: RunFiles) -> bool:
    """Whether ``metrics`` are of this worker or a process that it has started, not of one that it has replaced."""
    return metrics.pid == worker.pid or metrics.pid in files.living or worker.pid not in files.living


def _start_of(metrics: RankMetrics) -> tuple[str, int, int]:
    """The job, generation and world size of a rank's metrics, which the ranks of one start have in common."""
    return metrics.job, metrics.generation, metrics.world_size


def _ranks(files: RunFiles, metrics: dict[int, RankMetrics]) -> tuple[RankStatus, ...]:
    if files.workers is not None:
        found = [_of_worker(each, metrics.get(each.rank), files) for each in files.workers.workers]
    else:
        found = [_of_metrics(each, files) for each in metrics.values()]
    return tuple(sorted(found, key=lambda each: each.rank))


def _of_worker(worker: WorkerSeen, metrics: RankMetrics | None, files: RunFiles) -> RankStatus:
    assert files.workers is not None and files.agent is not None
    state: RankState = worker.state
    if state == "running" and files.agent.host == files.host and worker.pid not in files.living:
        state = "ended"  # since the agent looked, or the agent has ended as well
    elif state == "running" and files.agent.host != files.host and not files.is_agent_running:
        state = "unknown"
    measures = (metrics.measures if metrics else Measures()).at_rate(worker.steps_per_second)
    step = _first(worker.step, metrics.step if metrics else None)
    is_watched = state == "running" and files.is_agent_running and files.time - files.workers.time <= _SILENT_SECONDS
    if metrics is not None and metrics.time > files.workers.time and not is_watched:
        step = metrics.step  # of a watched worker it would be of a later moment than the steps of the others
    return RankStatus(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        state=state,
        exit_code=worker.exit_code,
        seen_seconds=files.time - files.workers.time,
        measured_step=metrics.step if metrics else None,
        measured_seconds=files.time - metrics.time if metrics else None,
        step=step,
        steps_per_second=measures.steps_per_second,
        samples_per_second=measures.samples_per_second,
        memory_bytes=_first(worker.memory_bytes, measures.memory_bytes),
        children_bytes=worker.children_bytes,
        accelerator_bytes=_first(worker.gpu_memory_bytes, measures.accelerator_bytes),
        cpu_percent=worker.cpu_percent,
        config_version=metrics.config_version if metrics else None,
        config_revision=metrics.config_revision if metrics else None,
        activity=worker.activity,
        activity_seconds=worker.activity_seconds,
        trouble=worker.trouble,
        measures=measures,
    )


def _of_metrics(metrics: RankMetrics, files: RunFiles) -> RankStatus:
    seen_seconds, measures = files.time - metrics.time, metrics.measures
    state: RankState = "running" if metrics.pid in files.living else "ended"
    if metrics.host != files.host:
        state = "running" if seen_seconds <= _patience_with(measures.steps_per_second) else "unknown"
    return RankStatus(
        rank=metrics.rank,
        local_rank=None,
        pid=metrics.pid,
        state=state,
        exit_code=None,
        seen_seconds=seen_seconds,
        measured_step=metrics.step,
        measured_seconds=seen_seconds,
        step=metrics.step,
        steps_per_second=measures.steps_per_second,
        samples_per_second=measures.samples_per_second,
        memory_bytes=measures.memory_bytes,
        children_bytes=None,
        accelerator_bytes=measures.accelerator_bytes,
        cpu_percent=None,
        config_version=metrics.config_version,
        config_revision=metrics.config_revision,
        activity=None,
        activity_seconds=None,
        trouble=None,
        measures=measures,
    )


def _agent_troubles(files: RunFiles) -> Iterator[str]:
    agent, workers = files.agent, files.workers
    if agent is None or workers is None:
        return
    running = [each for each in workers.workers if each.state == "running"]
    if files.is_agent_running:
        if files.time - workers.time > _SILENT_SECONDS:
            age = age_in_words(files.time - workers.time)
            yield f"the agent (pid {agent.pid}) has said nothing of its workers for {age}: look at its log"
    elif running:
        yield f"the agent (pid {agent.pid} on {agent.host}) has ended without a word, while its workers were running"
        here = [each for each in running if each.pid in files.living]
        if here:
            pids = ", ".join(str(each.pid) for each in here)
            yield f"workers of an agent that has ended still run: pid {pids}; end them before the job is started again"


def _last_of_leaving(files: RunFiles) -> EventSeen | None:
    """The last event that says how ranks which were told to end, or to leave, have done so; None where none says it.

    What was said before training began anew does not count.
    """
    told = _told_by_this_agent(files, (_BEGAN, CAN_GO_ON, TOLD_TO_END, _LEFT))
    return told[-1] if told and told[-1].kind != _BEGAN else None


def _is_told_to_leave(files: RunFiles) -> bool:
    """Whether the agent was told to end or to leave, and training has not begun anew since."""
    told = _told_by_this_agent(files, (_BEGAN, _LEAVING))
    return bool(told) and told[-1].kind == _LEAVING


def _step_of_leaving(files: RunFiles, newest: RankMetrics | None) -> int:
    """The step at which this node's workers have left those of other nodes, as far as they have told of it."""
    told = _told_by_this_agent(files, (_MEMBERS,))
    step = told[-1].step if told else None
    if step is not None:
        return step
    return 0 if newest is None else newest.step


def _told_by_this_agent(files: RunFiles, kinds: Collection[str]) -> list[EventSeen]:
    """The events of these kinds since the agent was started, oldest first."""
    since = 0.0 if files.agent is None else files.agent.time
    return [each for each in files.events if each.kind in kinds and each.time >= since]


def _rank_troubles(rank: RankStatus, files: RunFiles, *, is_running: bool, has_left_well: bool) -> Iterator[str]:
    name = f"rank {rank.rank} (pid {rank.pid})"
    if rank.state == "failed" and rank.exit_code != _INTERRUPTED:
        yield f"{name} has failed: {_exit_in_words(rank.exit_code)}"
    if rank.state == "left" and not has_left_well:
        yield f"{name} was told to end (exit code {rank.exit_code}), and says nothing of having saved: look at its log"
    if rank.trouble and rank.state == "running":
        yield f"{name}: {rank.trouble}"
    if files.workers is not None or not is_running:
        return
    if rank.state == "ended":
        yield f"{name} has ended, and others of the job have not"
    elif rank.state == "unknown" or rank.seen_seconds > _patience_with(rank.steps_per_second):
        yield f"{name} has said nothing for {age_in_words(rank.seen_seconds)}; it was at step {rank.step}"


def _metric_words(ranks: Sequence[RankStatus]) -> Iterator[tuple[bool, str]]:
    """For each metric that may be a trouble, whether the rank with the most of it has that trouble, and the words."""
    for name, trouble in ((name, metric.trouble) for name, metric in METRICS.items() if metric.trouble):
        told = [(each.rank, each.measures.told()) for each in ranks]
        rank, worst = max(told, key=lambda each: each[1][name] or 0, default=(0, {}))
        if worst.get(name):
            is_trouble = worst[name] > sum(worst[part] or 0 for part in parts_of(name))
            yield is_trouble, f"rank {rank}: {words_of(name, worst)}" + (f"; {trouble}" if is_trouble else "")


def _patience_with(steps_per_second: float | None) -> float:
    """How many seconds a rank may write nothing, as it writes only between two steps."""
    return max(_SILENT_SECONDS, _SILENT_STEPS / steps_per_second if steps_per_second and steps_per_second > 0 else 0.0)


def _config_words(files: RunFiles, config: ConfigStatus, *, step: int) -> Iterator[tuple[bool, str]]:
    """The sentences about the config of a running job, each with whether it is a trouble."""
    if config.refusal:
        yield True, _refused_in_words(config)
    if not config.in_force:
        return
    lowest, highest = config.in_force[0], config.in_force[-1]
    if lowest < highest:
        yield False, f"ranks run under different versions of the config: {', '.join(map(str, config.in_force))}"
    if files.config is None:
        return
    version, at_step = files.config.version, files.config.apply_at_step
    age = files.time - (files.time if files.config_time is None else files.config_time)
    if version < highest:
        yield (
            True,
            f"the config file holds version {version}, which is not above version {highest} in force: ranks refuse it; "
            f"give it version {highest + 1}",
        )
    elif version > lowest and at_step is not None and at_step > step:
        yield False, f"version {version} of the config file waits for step {at_step}"
    elif version > lowest:
        words = f"version {version} has been in the config file for {age_in_words(age)}; version {lowest} is in force"
        yield age > _LAG_SECONDS, words + ("; the log of rank 0 says why" if age > _LAG_SECONDS else "")


def _from_checkpoint_in_words(files: RunFiles, newest: RankMetrics | None) -> Iterator[str]:
    """Sentences about values that the resumed checkpoint has brought, and about the script's in place of some."""
    in_file = set() if files.config is None else set(files.config.values())
    values = {} if newest is None else newest.from_checkpoint
    told = [f"{path} {words}" for path, words in values.items() if path not in in_file]
    if told:
        yield f"from the checkpoint that was resumed, as the config file leaves it out: {', '.join(told)}"
    if newest is not None and newest.not_from_checkpoint:
        own = ", ".join(f"{path} {words}" for path, words in newest.not_from_checkpoint.items())
        yield f"from the script, and not from the checkpoint that was resumed: {own}"


def _refused_in_words(config: ConfigStatus) -> str:
    return f"the config file is refused: {config.refusal}"


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "nothing says how"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _left_in_words(left: Sequence[RankMetrics]) -> str:
    names = ", ".join(str(each.rank) for each in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    return f"metrics of rank {names}{more} are of an earlier start, and left out"


def _first(one: Any, other: Any) -> Any:
    return other if one is None else one
