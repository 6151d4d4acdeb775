"""Advice: what people were told last, so that they are told anew only where it is something else. Pure."""

from __future__ import annotations

from .space import Point

__all__ = ["Advice"]

_ANEW = 0.05
"""By this share what is predicted has to differ."""


class Advice:
    """Of one search."""

    def __init__(self) -> None:
        self._told: tuple[Point, float] | None = None

    def is_news(self, point: Point, rate: float) -> bool:
        """Whether people have not been told of this; then they are."""
        if self._told is not None and self._told[0] == point and abs(rate / self._told[1] - 1) < _ANEW:
            return False
        self._told = point, rate
        return True
