"""A tuner that decides what a test has it decide, and what nodes tell it: for tests of what surrounds a tuner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.master.configs import Author
from elastic_ext.master.tuning import Mode
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire import window_message
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.measurements import StepReport
from tests.support.profiles import made_window

__all__ = ["STEP", "Scripted", "Standing", "decision_of", "reported"]

STEP = {Phase.DATA: 0.03, Phase.FORWARD: 0.02, Phase.BACKWARD: 0.04, Phase.OPTIMIZER: 0.01}


@dataclass(frozen=True)
class Standing:
    stand: str = "probing"
    sentence: str = "the tuner tries what may be faster"
    best_rate: float | None = 640.0


def decision_of(number: int = 1, **given: Any) -> Decision:
    """One that is to be written as the first version."""
    arguments: dict[str, Any] = {
        "time": 1000.0 + number,
        "kind": "probe",
        "reason": "samples are waited for",
        "base": 0,
        "changes": {"dataloader.num_workers": 2},
        "before": 100.0,
        "predicted": 180.0,
        **given,
    }
    return Decision(number=number, **arguments)


Answer = Callable[["Scripted"], Sequence[Decision]]


@dataclass
class Scripted:
    """Gives ``answers`` by the name of what it is told, and remembers all of that."""

    answers: dict[str, Answer] = field(default_factory=dict)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    standing: Standing = Standing()
    mode: Mode = "off"
    earlier: Sequence[Decision] = ()

    def made(self, mode: Mode, decisions: Sequence[Decision]) -> Scripted:
        self.mode, self.earlier = mode, list(decisions)
        self.told.append(("made", mode))
        return self

    def names(self) -> list[str]:
        """What it was told of, but for the time that passes."""
        return [each[0] for each in self.told if each[0] != "tick"]

    def all(self, name: str) -> list[tuple[Any, ...]]:
        return [each[1:] for each in self.told if each[0] == name]

    def _hear(self, name: str, *what: Any) -> list[Decision]:
        self.told.append((name, *what))
        return list(self.answers[name](self)) if name in self.answers else []

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]:
        return self._hear("take_facts", facts)

    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]:
        return self._hear("take_config", config.version, author)

    def see(self, now: float, seen: StepReport) -> list[Decision]:
        return self._hear("see", seen)

    def tick(self, now: float) -> list[Decision]:
        return self._hear("tick")

    def pause(self, now: float, why: str) -> list[Decision]:
        return self._hear("pause", why)

    def resume(self, now: float) -> list[Decision]:
        return self._hear("resume")

    def undo(self, now: float) -> list[Decision]:
        return self._hear("undo")

    def written(self, now: float, number: int, version: int) -> None:
        self._hear("written", number, version)

    def refused(self, now: float, number: int, why: str) -> list[Decision]:
        return self._hear("refused", number, why)


def reported(rank: int, *, number: int = 1, step: Any = None, **changes: Any) -> wire.Worker:
    """What an agent says of a rank, with one window of ten steps: the one of that number."""
    arguments: dict[str, Any] = {"world_size": 2, "config_version": 0, "num_steps": 10, **changes}
    window = made_window(STEP if step is None else step, rank=rank, **arguments)
    length = window.end - window.begin
    window = replace(window, begin=1000.0 + number * length, end=1000.0 + (number + 1) * length, step=10 * number)
    return wire.Worker(rank=rank, state="running", windows=[window_message(window)])
