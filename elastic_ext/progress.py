"""Progress: a bar of the steps of an epoch, on a terminal."""

from __future__ import annotations

from typing import Any

__all__ = ["Progress"]


class Progress:
    """A bar that is there from ``begin`` to ``end``; where it is not shown, nothing happens."""

    def __init__(self, *, is_shown: bool) -> None:
        self.is_shown = is_shown
        self._bar: Any = None

    def begin(self, description: str, num_steps: int | None) -> None:
        if self.is_shown:
            from tqdm.auto import tqdm  # for those who look: it costs every start some milliseconds

            self._bar = tqdm(desc=description, total=num_steps, unit="step", leave=False)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
