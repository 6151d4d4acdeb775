"""A recorder for a trainer's rank, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from elastic_ext.config.follower import ConfigFollower

from .analyzing import Analyzer
from .census import why_no_census
from .device_timeline import DeviceTimeline
from .held import memory_held
from .pace import Pace
from .phases import Phase
from .probe import Probe
from .recorder import Recorder
from .surveying import Found, Surveyor
from .timeline import Timeline
from .windows import Standing, Windows

__all__ = ["record"]


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

    def stand() -> Standing:
        step, num_samples = progress()
        config = follower.config
        is_settled = bool(getattr(loader, "is_settled", True))
        return Standing(step, num_samples, config.version, config.revision, is_settled)

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
        Pace(),
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
        found=Found(
            census=reports.write_census,
            trace=reports.write_trace,
            calibration=reports.write_calibration if is_first_here else None,
        ),
        why_no_census=lambda: why_no_census(model),
        is_traced=lambda: ranks.world_size > 1 and any(isinstance(part, FSDPModule) for part in model.modules()),
        analyzer=analyzer,
    )
