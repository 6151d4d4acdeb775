"""A recorder for a trainer's rank, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
from torch import nn
from torch.optim import Optimizer

from elastic_ext.follow import ConfigFollower
from elastic_ext.sources import TimedSource

from .held import memory_held
from .pace import Pace
from .phases import Phase
from .probe import Probe
from .recorder import Recorder
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
) -> Recorder:
    """Have ``follower`` hear where this rank's time goes; ``progress`` gives the global step and the samples so far."""
    timeline = Timeline(Phase.STARTUP)
    now, reports = time.time(), follower.reports
    begin = min(max(psutil.Process().create_time(), reports.profiled_until()), now)
    timeline.add_past(Phase.STARTUP, round((now - begin) * 1e9))
    if isinstance(loader, TimedSource):
        loader.timeline = timeline

    def stand() -> Standing:
        step, num_samples = progress()
        config = follower.config
        return Standing(step, num_samples, config.version, config.revision)

    recorder = Recorder(
        follower.pulse,
        timeline,
        Probe(timeline.enter, is_on_accelerator=any(part.device.type != "cpu" for part in model.parameters())),
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
        sees_loader=loader is None or isinstance(loader, TimedSource),
    )
    follower.take_pulse(recorder)
    return recorder
