"""What a restart has cost: steps that are taken again, and time; pure, but for reading what workers have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic_ext.records.metrics import CAN_GO_ON, TOLD_TO_END
from elastic_ext.records.text import counted

__all__ = ["Begun", "Ended", "begun_in", "cost_in_words", "left_in"]

_MOST_BYTES = 1 << 16
_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Where training was as its workers were ended."""

    step: int
    """The last that was committed."""
    clock: float
    """When, on the clock of ``time.monotonic``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Where it has gone on."""

    step: int
    """The last of the checkpoint that it went on from."""
    global_batch_size: int | None
    checkpoints: str | None
    """The folder in which they are saved; None where none are."""


def cost_in_words(ended: Ended, begun: Begun, *, now: float) -> str:
    """What was lost, as the first new step has been taken; ``now`` on the same clock as the end."""
    num_steps = max(ended.step - begun.step, 0)
    if num_steps == 0:
        lost = "no step is taken again"
    else:
        lost = f"{counted(num_steps, 'step')} taken again"
        if begun.global_batch_size is not None:
            lost += f" ({num_steps * begun.global_batch_size} samples)"
    return f"training goes on after step {begun.step}: {lost}, and {now - ended.clock:.1f} seconds without a step"


def begun_in(file: Path, *, since: float) -> Begun | None:
    """Where a rank's training has begun after ``since``, by the events that it has written."""

    def begun(event: Any) -> Begun:
        size, folder = event["details"].get("global_batch_size"), event["details"].get("checkpoints")
        return Begun(
            step=int(event["step"]),
            global_batch_size=size if type(size) is int else None,
            checkpoints=folder if type(folder) is str else None,
        )

    return _newest(file, ("training-began",), begun, since=since)


def left_in(file: Path, *, since: float) -> str | None:
    """What a rank that was told to end after ``since`` says of where training can go on."""
    return _newest(file, (CAN_GO_ON, TOLD_TO_END), lambda event: str(event["text"]), since=since)


def _newest(file: Path, kinds: Sequence[str], read: Callable[[Any], _Read], *, since: float) -> _Read | None:
    """What ``read`` makes of the newest event of these kinds; None where it is older, or there is none."""
    try:
        with open(file, "rb") as events:
            events.seek(max(file.stat().st_size - _MOST_BYTES, 0))
            lines = events.read(_MOST_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            event: Any = json.loads(line)
            if event["kind"] in kinds:
                found = read(event)
                return found if event["time"] >= since else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the first one is cut off
            continue
    return None
