"""Place: where the loops over an order of samples stand, one value from which the next one is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Place", "Ranges", "left_out"]

Ranges = tuple[tuple[int, int], ...]
"""Positions, each time from the first one to before the second; sorted, and none in two of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An epoch, and how much of it is consumed. It never changes: what happens makes another one of it."""

    epoch: int = 0
    position: int = 0
    """All samples before it are consumed."""
    completed: Ranges = ()
    """What is consumed of those after it, where batches come as they are made."""
    is_left: bool = False
    """A loop has taken of the epoch, or there was nothing to take: the next loop is over another one."""
    is_over: bool = False
    """A state that was loaded says that nothing more of it comes."""
    named: int | None = None
    """The epoch of the next loop, which was named while one was under way."""

    def at(self, epoch: int) -> Place:
        """The place when an epoch is named: what no loop has taken of goes on, all else begins anew."""
        goes_on = epoch == self.epoch and not self.is_left
        return Place(epoch=epoch, position=self.position, completed=self.completed) if goes_on else Place(epoch=epoch)

    def to_come(self) -> Place:
        """Where the next loop begins."""
        if self.named is not None:
            return self.at(self.named)
        return Place(epoch=self.epoch + 1) if self.is_left else self


def left_out(left: Ranges, num_samples: int) -> tuple[int, Ranges]:
    """Where an order of so many samples stands, of which those at ``left`` still come.

    That is the first position that comes, and what does not come of the positions after it.
    """
    if not left:
        return num_samples, ()
    stops = [stop for _, stop in left]
    starts = [*[start for start, _ in left[1:]], num_samples]
    return left[0][0], tuple(each for each in zip(stops, starts, strict=True) if each[0] < each[1])
