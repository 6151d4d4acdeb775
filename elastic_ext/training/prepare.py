"""How a trainer's parts are put together with the other ranks, once its optimizers are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from elastic_ext.fsdp.reshard.sharded_model import Spread
from elastic_ext.profile.device_timeline import DeviceTimeline
from elastic_ext.profile.memory.analyzer import AnalyzedTraining, Analyzer
from elastic_ext.profile.memory.prediction_request import Factory
from elastic_ext.profile.output import Showing, Sinks, TrainingFacts
from elastic_ext.profile.phases import Phase, Timeline
from elastic_ext.profile.probe import Probe, ProbePace
from elastic_ext.profile.recorder import Recorder
from elastic_ext.profile.sampled_steps import SampleListeners, Surveyor
from elastic_ext.profile.step_costs import why_no_census
from elastic_ext.profile.windows import TrainingProgress, Windows, memory_held
from elastic_ext.records.metrics import StepWindow

from .batches import Batches
from .checkpoints.checkpoints import CheckpointRequest, checkpoints_for
from .checkpoints.state import TrainingState
from .counters import Counts
from .facts import FactsOfJob, profile_of
from .gradients.finite import FiniteGradients
from .gradients.gradients import Gradients
from .gradients.noise import GradientPairs, Learning
from .optimizers.accelerate import Accelerated
from .optimizers.prepared import TakingPart, check_optimizers, remarks_on_optimizers
from .optimizers.rates import OptimizerSettings
from .options import (
    FollowOptions,
    StepOptions,
    check_ranks_are_joined,
    check_samples,
    check_scaler,
    check_sharded,
    check_shared,
    check_updates,
)
from .parallelism import Parallelism, values_of
from .remarks import EpochLength, Remarks, remark_on_length
from .session import Session, raise_on_all
from .steps.device_memory import DeviceMemory
from .steps.loop_checks import LoopChecks
from .steps.oom_guard import Guarding
from .steps.retry import Attempts, Growing
from .steps.rollback import Snapshot, StepParts
from .steps.state import StepState
from .steps.steps import PulsingSteps, Steps

__all__ = ["NOT_SPREAD", "Prepared", "Setup", "prepare", "record"]


# --- a recorder for a trainer's rank, put together -------------------------------------------------------------------


def record(
    follower: ConfigFollower,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: object,
    *,
    progress: Callable[[], tuple[int, int]],
    analyze: Callable[[Probe], Analyzer] | None = None,
) -> Recorder:
    """Have ``follower`` hear where this rank's time goes; ``progress`` gives the global step and the samples so far.

    ``analyze`` makes whoever wants to know what steps take of memory.
    """
    device = next((part.device for part in model.parameters()), torch.device("cpu"))
    timeline = _timeline_of(device)
    now, reports = time.time(), follower.reports
    begin = min(max(_started_at(now), reports.profiled_until()), now)
    timeline.add_past(Phase.STARTUP, round((now - begin) * 1e9))

    def stand() -> TrainingProgress:
        step, num_samples = progress()
        config = follower.config
        is_settled = bool(getattr(loader, "is_settled", True))
        return TrainingProgress(step, num_samples, config.version, config.revision, is_settled)

    probe = Probe(timeline.enter, is_on_accelerator=device.type != "cpu")
    analyzer = None if analyze is None else analyze(probe)
    recorder = Recorder(
        follower.pulse,
        timeline,
        probe,
        Windows(
            timeline,
            rank=follower.ranks.rank,
            world_size=follower.ranks.world_size,
            restart=follower.settings.restart,
            begin=begin,
            memory=memory_held,
            keep=reports.add_window,
        ),
        ProbePace(),
        model=model,
        optimizers=optimizers,
        stand=stand,
        loader=loader,
        surveyor=_surveyor(follower, model, timeline, probe, device, analyzer),
    )
    recorder.analyzer = analyzer
    follower.take_pulse(recorder)
    return recorder


def _started_at(now: float) -> float:
    """When this process was; ``now`` where the system does not say."""
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
    analyzer: Analyzer | None,
) -> Surveyor:
    ranks, reports = follower.ranks, follower.reports
    is_first_here = all(name.host != ranks.host for name in ranks.names[: ranks.rank])
    return Surveyor(
        timeline,
        probe,
        rank=ranks.rank,
        host=ranks.host,
        device=device,
        found=SampleListeners(
            census=reports.write_census,
            trace=reports.write_trace,
            calibration=reports.write_calibration if is_first_here else None,
        ),
        why_no_census=lambda: why_no_census(model),
        is_traced=lambda: ranks.world_size > 1 and any(isinstance(part, FSDPModule) for part in model.modules()),
        analyzer=analyzer,
    )


# --- a trainer's parts are put together, with the other ranks, once its optimizers are there -------------------------

NOT_SPREAD = "the model is not spread; call trainer.parallelize(model, plan) before prepare()"


@dataclass(kw_only=True, slots=True)
class Setup:
    """What a trainer was given, and what it has made of that before ``prepare``."""

    model: nn.Module
    accelerated: Accelerated | None
    is_sharded: bool
    """By ``prepare``, as the user has said."""
    options: StepOptions
    following: FollowOptions
    checkpoints: CheckpointRequest
    state: StepState
    gradients: Gradients
    spread: Spread
    batches: Batches
    counts: Counts = field(default_factory=Counts)
    registered: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    unclaimed: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Loaded, and not registered so far."""
    appliers: list[tuple[Any, ...]] = field(default_factory=list)
    """The user's own, with their checks and sections."""
    loaded_config: Mapping[str, Any] | None = None
    sinks: Sinks = field(default_factory=Sinks)
    """Where rank 0 writes its profile."""
    factory: Factory | None = None
    """Of models like this one, for a process beside training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What came of it."""

    session: Session
    attempts: Attempts
    growing: Growing
    parallelism: Parallelism | None
    values: Any
    """What prepare() returns."""


def prepare(setup: Setup, optimizer: Any, lr_scheduler: Any, scaler: Any, *, launched: Launched) -> Prepared:
    """Join the other ranks, and begin; all ranks call this, once."""
    gradients, batches, spread = setup.gradients, setup.batches, setup.spread
    problem: Exception | None = None
    parts: TakingPart | None = None
    settings: OptimizerSettings | None = None
    startup: dict[str, object] = {}
    epoch: EpochLength | None = None
    try:
        if setup.is_sharded:
            check_sharded(setup.model)
        check_updates(setup.model)
        parts = TakingPart.of(optimizer, lr_scheduler, scaler, state=setup.state, accelerated=setup.accelerated)
        _check(setup, parts, scaler)
        settings = OptimizerSettings(parts.optimizers)
        epoch = batches.epoch_length(gradients.sharing.num_ranks)
        startup = batches.startup_values(gradients.sharing.num_ranks) | settings.startup_values()
        spread.look()
        if spread.plan is not None:
            startup |= values_of(spread.plan)
    except (ValueError, TypeError) as error:  # on this rank at least: all are to hear of it
        problem = error
    options, following = setup.options, setup.following
    follower = follow_config(
        following.config_file,
        startup=startup,
        start_step=setup.counts.global_step,
        agree_every_steps=following.agree_every_steps,
        job=following.job,
        run_dir=following.run_dir,
        timeout_seconds=following.timeout_seconds,
    )
    raise_on_all(follower, problem, "preparing a trainer")
    assert parts is not None
    assert settings is not None
    settings.tells = follower.ranks.rank == 0
    gradients.optimizers = list(parts.optimizers)
    ranks, registered, state = follower.ranks, setup.registered, setup.state
    state.remarks.are_logged = ranks.rank == 0
    state.remarks.on_said = lambda text: follower.reports.tell(
        "remark", step=setup.counts.global_step, text=text, details={}
    )
    for kind, text in remarks_on_optimizers(setup.model, [each.inner for each in parts.optimizers]):
        state.remarks.say(kind, text)
    for schedule in parts.schedulers:
        schedule.look_at_length = partial(_remark_on_length, schedule.inner, epoch, batches, state.remarks)
    recorder, analyzer = None, None
    device = next((part.device for part in setup.model.parameters()), torch.device("cpu"))
    memory = DeviceMemory(device)
    guarding = Guarding(
        options.guard if follower.settings.enabled else "never",
        sharing=lambda: gradients.sharing,
        shares_always=options.sync_every_micro_step,
        hear_all=follower.hear_all,
        memory=memory,
    )

    def analyze(probe: Probe) -> Analyzer:
        return Analyzer(
            spread.root,
            [each.inner for each in parts.optimizers],
            probe,
            AnalyzedTraining(
                micro_batch=lambda: batches.largest,
                share=lambda: batches.share,
                num_micro_steps=lambda: session.steps.num_micro_steps,
                ratio=lambda: 0.0 if spread.plan is None else spread.plan.ratio,
                is_whole=lambda: gradients.sharing.num_parts == 1,
                may_sample=lambda: not guarding.is_watching,
                is_bounded=lambda: follower.config.tuning.memory_bytes is not None,
            ),
            blocks=spread.blocks,
            factory=setup.factory,
        )

    if follower.settings.enabled and follower.settings.profiles:
        recorder = record(
            follower,
            setup.model,
            [each.inner for each in parts.optimizers],
            batches.loader,
            progress=lambda: (setup.counts.global_step, setup.counts.num_samples),
            analyze=analyze if ranks.rank == 0 else None,
        )
        analyzer = recorder.analyzer
    showing = _showing(setup, follower, how_it_trains=lambda: _training(gradients, batches, session.steps))

    def known() -> list[object]:
        guarding.let_go()
        return gradients.holders()

    parallelism = None
    if spread.plan is not None:
        parallelism = Parallelism(
            spread,
            [each.inner for each in parts.optimizers],
            lambda: [registered[name] for name in sorted(registered)],
            known=known,
            agree=lambda error: ranks.all_or_raise(error, "changing how the model is spread"),
            fence=lambda: session.fence(),  # which is made below
            on_spread=lambda: gradients.take_up(spread.engine),
            give_up=lambda why: session.steps.give_up(why),
            tell=lambda report: session.tell_resharded(report),
            has_begun=lambda: not session.steps.has_not_begun,
        )
        gradients.on_unused = spread.expect_unused

        def keep_up() -> None:
            if spread.keep_up():
                gradients.take_up(spread.engine)
                session.steps.weigh_anew()
                guarding.expect_more()

        gradients.before_step = keep_up
    follower.compare_schedules(lambda: state.num_scheduled)
    counted = batches.counted
    if counted is not None:
        follower.compare_ahead(lambda: counted.num_handed)
    follower.compare_at_start(
        {
            "guard": options.guard,
            "sync_every_micro_step": options.sync_every_micro_step,
            "learning_rate_rule": options.learning_rate_rule,
            "when_not_finite": options.when_not_finite,
        }
    )
    why_not_reshard = spread.why_not or (None if spread.plan else NOT_SPREAD)
    growing = Growing(follower, batches, setup.counts, memory, plan=lambda: spread.plan)
    inner = [each.inner for each in parts.optimizers]
    pairs = GradientPairs(state, inner, lambda: gradients.sharing, num_ranks=ranks.world_size)
    learning = Learning(follower, setup.counts, batches, state, pairs, rule=options.learning_rate_rule)
    facts = FactsOfJob(
        setup.model,
        follower,
        batches,
        growing,
        learning,
        spread,
        inner,
        why_not_reshard=why_not_reshard,
        num_replicas=lambda: gradients.sharing.num_ranks,
        memory=lambda: None if analyzer is None else analyzer.facts(),
    )
    _after_each_window(follower, facts.tell)
    session = Session(
        follower,
        setup.counts,
        batches,
        gradients,
        settings,
        guarding,
        growing,
        learning,
        parallelism=parallelism,
        why_not_reshard=why_not_reshard,
        accelerated=setup.accelerated,
        startup=startup,
        rule=options.learning_rate_rule,
        shows_progress=following.progress,
        recorder=recorder,
        showing=showing,
        facts=facts,
        remarks=state.remarks,
    )
    finite = gradients.finite = FiniteGradients(
        options.when_not_finite,
        state,
        setup.counts,
        inner,
        lambda: gradients.sharing,
        has_scaler=parts.scaler is not None and parts.scaler.is_enabled(),
        tells=ranks.rank == 0,
        report=lambda text, step, details: follower.reports.tell("not-finite", step=step, text=text, details=details),
    )
    pass_boundary = session.pass_boundary if recorder is None else recorder.around_boundary(session.pass_boundary)
    kind_of_steps = PulsingSteps if follower.pulse.is_seen else Steps
    steps = kind_of_steps(
        StepParts(
            state=setup.state,
            gradients=gradients,
            finite=finite,
            batches=batches,
            optimizers=parts.optimizers,
            snapshot=Snapshot(setup.model, setup.registered),
            keeps_all=options.rollback == "full",
            scaler=parts.scaler,
        ),
        guarding,
        checks=LoopChecks(
            setup.model,
            lambda: gradients.sharing.parts,
            state,
            parts.optimizers,
            (lambda: 1.0) if parts.scaler is None else parts.scaler.get_scale,
        ),
        shares_always=options.sync_every_micro_step,
        counts=setup.counts,
        pass_boundary=pass_boundary,
        meet=follower.retry,
        tells=ranks.rank == 0,
    )
    if isinstance(steps, PulsingSteps):
        steps.pulse = follower.pulse
    for applier in setup.appliers:
        follower.on_change(*applier)
    training_state = TrainingState(
        setup.model,
        parts,
        sharing=lambda: gradients.sharing,
        counts=setup.counts,
        batches=batches,
        registered=setup.registered,
        unclaimed=setup.unclaimed,
        ranks=ranks,
        config=follower.state_dict,
        on_moment=learning.forget,
    )
    with ExitStack() as undo:
        undo.callback(follower.close)
        told = {
            path: value for path, value in startup.items() if path not in Parallelism.paths
        }  # the script's plan wins
        session.checkpoints = checkpoints_for(training_state, follower, told, setup.checkpoints, launched=launched)
        undo.pop_all()
    session.start(steps, setup.loaded_config)
    follower.reports.write_model(
        profile_of(
            setup.model,
            [each.inner for each in parts.optimizers],
            rank=ranks.rank,
            sharing=gradients.sharing.name,
            plan=None if spread.plan is None else str(spread.plan),
        )
    )
    attempts = Attempts(
        steps,
        guarding,
        has_others=lambda: gradients.sharing.has_others,
        leaves_nothing=lambda: not setup.registered and next(setup.model.buffers(), None) is None,
        growing=growing if follower.settings.enabled else None,
    )
    if analyzer is not None:
        shown = batches.loader if isinstance(batches.loader, ShowingSource) else attempts
        shown.on_batch = analyzer.see_batch
    if isinstance(batches.loader, ReenteredSource):
        batches.loader.is_in_step = lambda: state.is_inside
    return Prepared(session=session, attempts=attempts, growing=growing, parallelism=parallelism, values=parts.values)


def _showing(setup: Setup, follower: ConfigFollower, *, how_it_trains: Callable[[], TrainingFacts]) -> Showing:
    """What becomes of this rank's profile; with the profiler off, no more than that sinks are closed."""
    ranks, settings = follower.ranks, follower.settings
    showing = Showing(
        settings.run_dir,
        rank=ranks.rank,
        hosts=[name.host for name in ranks.names],
        every_seconds=settings.profile_seconds,
        know=how_it_trains,
        sinks=setup.sinks,
    )
    follower.reports.on_window = showing.see
    return showing


def _after_each_window(follower: ConfigFollower, tell: Callable[[], None]) -> None:
    """Have rank 0 do this once it has written where its time went, beside what is done then."""
    on_window = follower.reports.on_window
    if follower.ranks.rank != 0 or on_window is None:
        return

    def see(window: StepWindow) -> None:
        on_window(window)
        tell()

    follower.reports.on_window = see


def _training(gradients: Gradients, batches: Batches, steps: Steps) -> TrainingFacts:
    workers = getattr(batches.loader, "num_workers", None)
    return TrainingFacts(
        num_replicas=gradients.sharing.num_ranks,
        num_micro_steps=max(steps.num_micro_steps, 1),
        num_workers=workers if isinstance(workers, int) else None,
        waits_in_passes=gradients.sharing.name in ("fully_shard", "FSDP1"),
    )


def _remark_on_length(scheduler: Any, epoch: EpochLength | None, batches: Batches, remarks: Remarks) -> None:
    batch = batches.global_batch
    text = None if batch is None or epoch is None else remark_on_length(scheduler, epoch, batch)
    if text is not None:
        remarks.say("length of a schedule", text)


def _check(setup: Setup, parts: TakingPart, scaler: Any) -> None:
    """ValueError where they cannot be trained with so."""
    sharing = setup.gradients.sharing
    check_optimizers(setup.model, [each.inner for each in parts.optimizers])
    check_ranks_are_joined(num_replicas=sharing.num_ranks, num_parts=sharing.num_parts, accelerated=setup.accelerated)
    check_samples(setup.batches.loader, num_replicas=sharing.num_ranks, rank=sharing.rank, num_parts=sharing.num_parts)
    groups = [group for each in parts.optimizers for group in each.param_groups]
    check_shared(setup.model, groups, left_out=sharing.left_out, how=sharing.name)
    check_scaler(scaler, setup.model)
