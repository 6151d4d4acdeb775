"""Training loops for tests of following a config: what ranks do in them, and what they saw.

Every loop all-reduces on the default group at each step, as training would: ranks keep in step through it, and a
control word that strayed onto that group would show in the sum.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from elastic_ext import Boundary, ConfigFollower, ElasticConfig, follow_config
from elastic_ext.records.files import write_whole

if TYPE_CHECKING:
    from tests.support.ranks import Outcome

__all__ = [
    "Every",
    "LoopTimeout",
    "RecordingApplier",
    "Seen",
    "errors_of",
    "follower_of",
    "put",
    "rate",
    "same",
    "seen_by",
    "step_until",
    "take_step",
]

Every = int | Literal["auto"]
DEADLINE_SECONDS = 30.0


class LoopTimeout(Exception):
    """What a test waited for did not happen in time."""


def put(folder: Path, rank: int, contents: Mapping[str, Any] | str, *, seen_by: ConfigFollower | None = None) -> None:
    """Replace the config file that ``rank`` follows, and wait until the watcher of ``seen_by`` has seen it."""
    data = (contents if isinstance(contents, str) else json.dumps(contents)).encode()
    write_whole(folder / str(rank) / "config.json", data, durable=False)
    if seen_by is not None:
        watcher = seen_by._watcher
        assert watcher is not None
        if not watcher.wait_until_seen(data, DEADLINE_SECONDS):
            raise LoopTimeout(f"{data!r} was not seen")


def follower_of(folder: Path, rank: int, **arguments: Any) -> ConfigFollower:
    """A follower whose files are this rank's own, as on a node of its own."""
    (folder / str(rank)).mkdir(exist_ok=True)
    options: dict[str, Any] = {"agree_every_steps": 1, "timeout_seconds": 60.0, "poll_seconds": 0.2, **arguments}
    return follow_config(run_dir=folder / str(rank), job="test", **options)


@dataclass(slots=True)
class Seen:
    """What one rank saw."""

    in_force: list[str] = field(default_factory=list)
    """The label of the config that each step ran under."""
    applied: list[tuple[int, str]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def seen_by() -> Iterator[Seen]:
    """What this rank sees from here on, its log included."""
    seen = Seen()
    logger = logging.getLogger("elastic_ext")
    handler, level = _Lines(seen.log), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def take_step(follower: ConfigFollower, seen: Seen, *, backwards: int = 0) -> Boundary:
    """One step: the ranks' work together, then the boundary."""
    seen.in_force.append(follower.config.label)
    if dist.is_initialized():
        total = torch.ones((), dtype=torch.float64)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    passed = follower.boundary(backwards=backwards)
    if passed.applied is not None:
        seen.applied.append((passed.step, passed.config.label))
    if passed.save:
        seen.saves.append(passed.step)
    return passed


def step_until(
    follower: ConfigFollower, seen: Seen, done: Callable[[], bool], deadline_seconds: float = DEADLINE_SECONDS
) -> None:
    """Take steps until ``done()``, which must become true on all ranks at the same step."""
    deadline = time.monotonic() + deadline_seconds
    while not done():
        if time.monotonic() > deadline:
            raise LoopTimeout(f"after {follower.step} steps under {follower.config.label}: {seen.log}")
        take_step(follower, seen)


class RecordingApplier:
    """Keeps what it was asked and called with; refuses or raises where it is told to."""

    def __init__(
        self,
        section: str = "optimizer",
        *,
        refuse: Mapping[int, str] | None = None,
        fail: Mapping[int, Literal["check", "apply"]] | None = None,
        before: Callable[[str, ElasticConfig], None] | None = None,
    ) -> None:
        self.section = section
        self.checked: list[str] = []
        self.applied: list[tuple[str, str]] = []
        self._refuse = refuse or {}
        self._fail = fail or {}
        self._before = before

    def check(self, new: ElasticConfig) -> str | None:
        self.checked.append(new.label)
        if self._before is not None:
            self._before("check", new)
        if self._fail.get(new.version) == "check":
            raise ArithmeticError(f"check of {new.label} broke")
        return self._refuse.get(new.version)

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        if self._before is not None:
            self._before("apply", new)
        if self._fail.get(new.version) == "apply":
            raise ArithmeticError(f"apply of {new.label} broke")
        self.applied.append((old.label, new.label))


def rate(version: int, value: float, **more: Any) -> dict[str, Any]:
    """A config that sets the learning rate."""
    return {"version": version, "optimizer": {"learning_rate": value}, **more}


def same(everyone: list[Any]) -> Any:
    """What every rank gave, once it is sure that it is the same."""
    assert all(one == everyone[0] for one in everyone), everyone
    return everyone[0]


def errors_of(outcomes: list[Outcome], *, but: int) -> list[str]:
    """The errors of all ranks but one, each with its type; an assertion fails where one of them has none."""
    survivors = [outcome for outcome in outcomes if outcome.rank != but]
    assert all(outcome.error is not None for outcome in survivors), outcomes
    return [f"{outcome.error.type_name}: {outcome.error.message}" for outcome in survivors if outcome.error]
