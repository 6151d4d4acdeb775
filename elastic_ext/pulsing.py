"""PulsingSteps: the steps of a rank that an agent looks at."""

from __future__ import annotations

from types import TracebackType

from .ranks.heartbeat import Pulse
from .steps import Steps

__all__ = ["PulsingSteps"]


class PulsingSteps(Steps):
    """This rank's steps, which note when they begin and end."""

    pulse = Pulse()
    """Where; set before the first."""

    def _share_guarded(self) -> None:
        with self.pulse.communicating():
            super()._share_guarded()

    def __enter__(self) -> None:
        super().__enter__()
        self.pulse.enter(self._state.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            counts = self._counts
            self.pulse.leave(counts.global_step, counts.num_boundaries, self._state.index)
