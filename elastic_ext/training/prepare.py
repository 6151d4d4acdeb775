"""How a trainer's parts are put together with the other ranks, once its optimizers are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from elastic_ext.config.follower import ConfigFollower, follow_config
from elastic_ext.data.sources import ReenteredSource, ShowingSource
from elastic_ext.fsdp.checkpoint.job import Launched
from elastic_ext.members.plan import LIVE, LOSSES
from elastic_ext.profile.device_timeline import DeviceTimeline
from elastic_ext.profile.memory.analyzer import Analyzer
from elastic_ext.profile.output import ProfileOutput, TrainingFacts
from elastic_ext.profile.phases import Phase, Timeline
from elastic_ext.profile.probe import Probe
from elastic_ext.profile.recorder import Recorder
from elastic_ext.profile.sampled_steps import AnalyzerSource, Surveyor
from elastic_ext.profile.step_costs import why_no_census
from elastic_ext.profile.windows import TrainingProgress, WindowAccumulator, memory_held
from elastic_ext.ranks.world import World

from .checkpoints.checkpoints import Checkpoints, checkpoints_for
from .checkpoints.state import TrainingState
from .checks import (
    check_process_group,
    check_ranks_are_joined,
    check_samples,
    check_scaler,
    check_sharded,
    check_shared,
    check_updates,
)
from .facts import FactsOfJob, processors, tell_of_model
from .gradients.noise import Learning
from .losses import Losses
from .members import TrainingMembers, version_to_join
from .optimizers.prepared import PreparedOptimizers, check_optimizers, remarks_on_optimizers
from .optimizers.rates import OptimizerSettings
from .options import LaunchSize
from .parallelism import Parallelism, values_of
from .remarks import EpochLength
from .reports import TrainingReports
from .session import Session, raise_on_all
from .steps.device_memory import DeviceMemory
from .steps.oom_guard import Guarding
from .steps.retry import Attempts, Growing
from .steps.steps import Steps
from .training import Training

__all__ = ["prepare", "record"]


# --- a recorder for a trainer's rank, put together -------------------------------------------------------------------


def record(
    follower: ConfigFollower,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: object,
    *,
    progress: Callable[[], tuple[int, int, Mapping[str, tuple[float, float]]]],
    analyzers: AnalyzerSource | None = None,
) -> Recorder:
    """A recorder of where this rank's time goes, which ``follower`` hears.

    ``progress`` gives the global step, samples, and the means and weights of the numbers logged since the last window.
    ``analyzers`` makes the analyzer of the memory that steps take.
    """
    device = _device_of(model)
    timeline = _timeline_of(device)
    now, reports = time.time(), follower.reports
    begin = min(max(_started_at(now), reports.profiled_until()), now)
    timeline.add_past(Phase.STARTUP, round((now - begin) * 1e9))

    def progress_now() -> TrainingProgress:
        step, num_samples, logged = progress()
        config = follower.config
        is_settled = bool(getattr(loader, "is_settled", True))
        return TrainingProgress(step, num_samples, config.version, config.revision, is_settled, logged)

    probe = Probe(timeline.enter, model, optimizers, is_on_accelerator=device.type != "cpu")
    recorder = Recorder(
        follower.heartbeat,
        probe,
        WindowAccumulator(
            timeline,
            rank=follower.ranks.rank,
            world_size=follower.ranks.world_size,
            restart=follower.settings.restart,
            begin=begin,
            memory=memory_held,
        ),
        progress=progress_now,
        on_window=reports.add_window,
        loader=loader,
        surveyor=_surveyor(follower, model, timeline, probe, device, analyzers),
    )
    follower.take_heartbeat(recorder)
    return recorder


def _started_at(now: float) -> float:
    """When this process was started; ``now`` where the system does not say."""
    try:
        return psutil.Process().create_time()
    except (OSError, psutil.Error):
        return now


def _timeline_of(device: torch.device) -> Timeline:
    if device.type != "cuda":
        return Timeline(Phase.STARTUP)
    return DeviceTimeline(
        Phase.STARTUP,
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        torch.cuda.is_current_stream_capturing,
    )


def _surveyor(
    follower: ConfigFollower,
    model: nn.Module,
    timeline: Timeline,
    probe: Probe,
    device: torch.device,
    analyzers: AnalyzerSource | None,
) -> Surveyor:
    ranks = follower.ranks
    return Surveyor(
        timeline,
        probe,
        world=ranks.world,
        device=device,
        reports=follower.reports,
        why_no_census=lambda: why_no_census(model),
        needs_trace=lambda: ranks.world_size > 1 and any(isinstance(part, FSDPModule) for part in model.modules()),
        analyzers=analyzers,
    )


# --- a trainer's parts are put together, with the other ranks, once its optimizers are there -------------------------


def prepare(
    training: Training,
    optimizer: Any,
    lr_scheduler: Any,
    scaler: Any,
    *,
    environ: Mapping[str, str],
    on_world: Callable[[World], None],
) -> None:
    """Join the other ranks, add the parts of ``training`` that were missing, and begin; all ranks call this, once.

    ``environ`` is the environment in which this process was launched; ``on_world`` is called with each world that it
    comes to after a change of members.
    """
    check_process_group(LaunchSize.in_environment(environ))
    launched = Launched.in_environment(environ)
    epoch = _join(training, optimizer, lr_scheduler, scaler)
    state, prepared, follower = training.state, training.prepared, training.follower
    training.settings.take_world(training.ranks.world)
    state.remarks.take_world(training.ranks.world)
    training.gradients.optimizers = list(prepared.optimizers)
    training.reports = TrainingReports(training)
    state.remarks.on_said = training.reports.tell_remark
    for kind, text in remarks_on_optimizers(training.model, training.optimizers):
        state.remarks.say(kind, text)
    for schedule in prepared.schedulers:
        schedule.look_at_length = partial(training.reports.look_at_length, schedule, epoch)
    training.memory = DeviceMemory(_device_of(training.model))
    training.guarding = Guarding(training)
    training.growing = Growing(training)
    training.learning = Learning(training)
    training.recorder = _recorder(training)
    training.profile_output = _profile_output(training)
    training.facts = FactsOfJob(training)
    training.members = TrainingMembers(training, joins=version_to_join(environ), on_world=on_world)
    training.losses = Losses(training, is_asked_for=environ.get(LOSSES) == LIVE)
    training.session = session = Session(training)
    follower.reports.on_window = training.reports.see_window
    if training.spread.plan is not None:
        training.parallelism = Parallelism(training)
        training.gradients.on_unused = training.spread.expect_unused
        training.gradients.before_step = session.keep_up_with_model
    training.steps = Steps(training)
    training.attempts = Attempts(training)
    training.saved_state = TrainingState(training)
    _compare_at_agreements(training)
    for applier in training.appliers:
        follower.on_change(*applier)
    training.checkpoints = _checkpoints(training, launched)
    session.start()
    for each in prepared.optimizers:
        each.watch_inner()
    tell_of_model(training)
    _have_batches_seen(training)


def _join(training: Training, optimizer: Any, lr_scheduler: Any, scaler: Any) -> EpochLength | None:
    """Check what ``prepare`` was given, on all ranks, and follow the config with them; gives the length of an epoch."""
    batches, gradients, spread = training.batches, training.gradients, training.spread
    problem: Exception | None = None
    startup: dict[str, object] = {}
    epoch: EpochLength | None = None
    try:
        if training.is_sharded:
            check_sharded(training.model)
        check_updates(training.model)
        training.prepared = PreparedOptimizers.of(
            optimizer, lr_scheduler, scaler, state=training.state, accelerated=training.accelerated
        )
        _check(training, scaler)
        training.settings = OptimizerSettings(training.prepared.optimizers)
        epoch = batches.epoch_length(gradients.sharing.num_ranks)
        startup = batches.startup_values(gradients.sharing.num_ranks) | training.settings.startup_values()
        spread.look()
        if spread.plan is not None:
            startup |= values_of(spread.plan)
    except (ValueError, TypeError) as error:  # on this rank at least: all are to hear of it
        problem = error
    training.startup, following = startup, training.following
    training.follower = follow_config(
        following.config_file,
        startup=startup,
        start_step=training.counts.global_step,
        agree_every_steps=following.agree_every_steps,
        job=following.job,
        run_dir=following.run_dir,
        timeout_seconds=following.timeout_seconds,
    )
    raise_on_all(training.follower, problem, "preparing a trainer")
    return epoch


def _compare_at_agreements(training: Training) -> None:
    """Have ranks compare, at agreements, what must be alike on all of them."""
    agreement, state, counted = training.follower.agreement, training.state, training.batches.counted
    agreement.count_schedules = lambda: state.num_scheduled
    if counted is not None:
        agreement.count_ahead = lambda: counted.num_handed
    options = training.options
    agreement.compared_at_start = {
        "guard": options.guard,
        "sync_every_micro_step": options.sync_every_micro_step,
        "learning_rate_rule": options.learning_rate_rule,
        "when_not_finite": options.when_not_finite,
    }


def _checkpoints(training: Training, launched: Launched) -> Checkpoints | None:
    """The checkpoints of the training, None where it keeps none; a failure here closes the follower."""
    with ExitStack() as undo:
        undo.callback(training.follower.close)
        told = {path: value for path, value in training.startup.items() if path not in Parallelism.paths}
        told |= training.batches.loader_values
        checkpoints = checkpoints_for(  # the script's plan wins over a saved one
            training.saved_state, training.follower, told, training.request, launched=launched
        )
        undo.pop_all()
    return checkpoints


def _have_batches_seen(training: Training) -> None:
    """Have the analyzer see the batches of the loop, and the loader know whether the loop is in a micro-step."""
    loader, state = training.batches.loader, training.state

    def see(batch: Any) -> None:
        analyzer = training.analyzer  # of the first rank, which may become another one
        if analyzer is not None:
            analyzer.see_batch(batch)

    if training.recorder is not None:
        shown = loader if isinstance(loader, ShowingSource) else training.attempts
        shown.on_batch = see
    if isinstance(loader, ReenteredSource):
        loader.is_in_step = lambda: state.phase.is_inside


# --- where this rank's time goes, and the memory of its steps --------------------------------------------------------


class _ForAnalyzer:
    """A training as its memory analyzer sees it, and what makes that."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def make(self, probe: Probe) -> Analyzer:
        training = self._training
        return Analyzer(
            training.spread.root,
            training.optimizers,
            probe,
            self,
            blocks=training.spread.blocks,
            factory=training.factory,
        )

    @property
    def micro_batch(self) -> int:
        return self._training.batches.largest

    @property
    def samples_per_step(self) -> int:
        return self._training.batches.share

    @property
    def num_micro_steps(self) -> int:
        return self._training.steps.num_micro_steps

    @property
    def recomputed_share(self) -> float:
        plan = self._training.spread.plan
        return 0.0 if plan is None else plan.ratio

    @property
    def is_whole(self) -> bool:
        return self._training.gradients.sharing.num_parts == 1

    @property
    def may_sample(self) -> bool:
        return not self._training.guarding.is_watching

    @property
    def is_bounded(self) -> bool:
        return self._training.follower.config.tuning.memory_bytes is not None


def _recorder(training: Training) -> Recorder | None:
    """The recorder of this rank, which the follower hears; None where nothing is profiled."""
    follower, counts, logged = training.follower, training.counts, training.logged
    if not (follower.settings.enabled and follower.settings.profiles):
        return None

    return record(
        follower,
        training.model,
        training.optimizers,
        training.batches.loader,
        progress=lambda: (counts.global_step, counts.num_samples, logged.take_window()),
        analyzers=_ForAnalyzer(training),
    )


def _profile_output(training: Training) -> ProfileOutput:
    """The object that shows this rank's profile; with the profiler off it only closes the sinks."""
    follower = training.follower
    return ProfileOutput(
        follower.settings.run_dir,
        world=follower.ranks.world,
        every_seconds=follower.settings.profile_seconds,
        facts=partial(_facts_of, training, processors()),
        sinks=training.sinks,
    )


def _facts_of(training: Training, num_processors: int) -> TrainingFacts:
    """Facts about the training by which its profile is judged."""
    workers, sharing = getattr(training.batches.loader, "num_workers", None), training.gradients.sharing
    return TrainingFacts(
        num_replicas=sharing.num_ranks,
        num_micro_steps=max(training.steps.num_micro_steps, 1),
        num_workers=workers if isinstance(workers, int) else None,
        num_processors=num_processors,
        waits_in_passes=sharing.name in ("fully_shard", "FSDP1"),
    )


# --- what was given, checked and remarked on -------------------------------------------------------------------------


def _device_of(model: nn.Module) -> torch.device:
    return next((part.device for part in model.parameters()), torch.device("cpu"))


def _check(training: Training, scaler: Any) -> None:
    """ValueError where the model, loader, optimizers and scaler do not go together."""
    sharing, optimizers = training.gradients.sharing, training.optimizers
    check_optimizers(training.model, optimizers)
    check_ranks_are_joined(
        num_replicas=sharing.num_ranks, num_parts=sharing.num_parts, accelerated=training.accelerated
    )
    check_samples(
        training.batches.loader, num_replicas=sharing.num_ranks, rank=sharing.rank, num_parts=sharing.num_parts
    )
    groups = [group for each in training.prepared.optimizers for group in each.param_groups]
    check_shared(training.model, groups, left_out=sharing.left_out, how=sharing.name)
    check_scaler(scaler, training.model)
