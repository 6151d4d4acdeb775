"""Sinks: where else rank 0 writes what its profile says. Nothing is imported that is not used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from elastic_ext.errors import ElasticError

from .summary import StepProfile

__all__ = ["Sink", "Sinks", "TensorBoardSink"]

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """What a trainer writes its profile to, on rank 0, between two steps: write little, and wait for nobody.

    A sink that raises is dropped, with one warning.
    """

    def write(self, profile: StepProfile) -> None:
        """Some steps have ended: those of a second or more."""

    def close(self) -> None:
        """Nothing more comes."""


class Sinks:
    """Those of one rank."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._is_closed = False

    @property
    def are_there(self) -> bool:
        """Whether anything is to be written."""
        return bool(self._sinks)

    def add(self, sink: Sink) -> None:
        """Have it written to from here on. ElasticError once training has ended."""
        if self._is_closed:
            raise ElasticError("training has ended, and a sink was added; add it before")
        self._sinks.append(sink)

    def write(self, profile: StepProfile) -> None:
        """To all of them."""
        for sink in tuple(self._sinks):
            try:
                sink.write(profile)
            except Exception:
                self._sinks.remove(sink)
                _logger.warning(
                    "%s could not be written, and is dropped; training goes on", type(sink).__name__, exc_info=True
                )

    def close(self) -> None:
        """All of them, those that were dropped apart. Twice is allowed."""
        self._is_closed = True
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception:
                _logger.warning("%s could not be closed", type(sink).__name__, exc_info=True)


class TensorBoardSink:
    """Curves by step for TensorBoard in ``folder``: speed, where the time goes, memory, the config in force.

    It needs the package ``tensorboard``; torch's writer is imported when there is something to write.
    """

    def __init__(self, folder: str | Path) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ElasticError("TensorBoardSink needs the package tensorboard; pip install tensorboard")
        self._folder = Path(folder)
        self._writer: Any = None

    def write(self, profile: StepProfile) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in _scalars(profile):
            self._writer.add_scalar(name, value, global_step=profile.step, walltime=profile.time)

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _scalars(profile: StepProfile) -> Iterator[tuple[str, float]]:
    values = {
        "speed/samples_per_second": profile.samples_per_second,
        "speed/tokens_per_second": profile.tokens_per_second,
        "speed/step_seconds": profile.step_seconds,
        "speed/slow_step_seconds": profile.slow_step_seconds,
        "memory/process_bytes": profile.memory_bytes,
        "memory/accelerator_bytes": profile.accelerator_bytes,
        "memory/accelerator_peak_bytes": profile.accelerator_peak_bytes,
        "config/version": profile.config_version,
        "config/revision": profile.config_revision,
    }
    yield from ((name, value) for name, value in values.items() if value is not None)
    yield from ((f"time/{label}", share) for label, share in profile.shares.items())
