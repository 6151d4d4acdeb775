"""Progress: a bar on a terminal, of the steps of an epoch or of bytes."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["Progress"]


class Progress:
    """A bar that is there from ``begin`` to ``end``; where it is not shown, nothing happens."""

    def __init__(self, *, is_shown: bool, unit: Literal["step", "B"] = "step") -> None:
        self.is_shown = is_shown
        self._unit = unit
        self._bar: Any = None

    def begin(self, description: str, total: int | None) -> None:
        if self.is_shown:
            from tqdm.auto import tqdm  # for those who look: it costs every start some milliseconds

            is_scaled = self._unit == "B"
            self._bar = tqdm(
                desc=description, total=total, unit=self._unit, unit_scale=is_scaled, unit_divisor=1024, leave=False
            )

    def advance(self, number: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(number)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
