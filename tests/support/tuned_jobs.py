"""A job made up for tests of a controller: what steps take is a formula, and whatever is decided comes into force."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.controller import Controller, Mode
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import Point, point_of
from tests.support.job_facts import made_facts

__all__ = ["LOADER", "TunedJob", "loader_seconds"]

LOADER: Mapping[str, tuple[Any, ...]] = {"dataloader.batch_size": (), "dataloader.num_workers": ()}


def loader_seconds(point: Point) -> dict[str, float]:
    """Phases of a step of a job that waits for samples, of 64 on each rank, and starts many small operations."""
    micro_batch, workers = int(point.batch_size or 1), int(point.num_workers or 0)
    passes = -(-64 // micro_batch) * 0.004 + 64 * 0.001
    loading = 64 * 0.005
    waiting = loading if workers == 0 else max(loading / min(workers, 4) - passes, 0.0)
    return {"data": waiting, "forward": passes / 3, "backward": passes * 2 / 3, "optimizer": 0.002}


class TunedJob:
    """One rank's steps stand for all."""

    def __init__(
        self,
        *,
        mode: Mode = "auto",
        decisions: Sequence[Decision] = (),
        seconds: Callable[[Point], dict[str, float]] = loader_seconds,
        sized: Callable[[Point, int], dict[str, float]] | None = None,
        facts: JobFacts | None = None,
        noise: float = 0.01,
        config: Mapping[str, Any] | None = None,
        configs: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """``sized`` says what steps take where that depends on a rank's share of them as well."""
        self.controller = Controller(mode=mode, decisions=decisions)
        self._given = seconds
        self._sized = sized
        self.facts = facts or made_facts(choices=LOADER)
        self.start = dict(self.facts.values)
        self._first_size = self._last_size = self.facts.global_batch
        self.configs: dict[int, dict[str, Any]] = {0: {}, **{key: dict(each) for key, each in (configs or {}).items()}}
        self.version, self.revision = max(self.configs), 0
        self.inside: dict[str, Any] = {}  # what the job itself has changed of its config, as that revision
        self.now, self.step = 1000.0, 0
        self.told: list[Decision] = []
        self.refusing: Callable[[Point], str] = lambda point: ""
        self._random = random.Random(1)
        self._noise = noise
        self._has_config = config is not None
        if config is not None:
            self.edit(config)
        elif configs:
            self.take(self.controller.take_config(self.now, self._config(self.version), "generated"))
        self.tell_facts()

    @property
    def seconds(self) -> Callable[[Point], dict[str, float]]:
        """What steps take, phase by phase."""
        sized, share = self._sized, self.share
        return self._given if sized is None else lambda point: sized(point, share)

    @seconds.setter
    def seconds(self, seconds: Callable[[Point], dict[str, float]]) -> None:
        self._given, self._sized = seconds, None

    @property
    def size(self) -> int:
        """Samples of a step under the config in force."""
        return int(self._values.get("global_batch_size") or self._first_size)

    @property
    def share(self) -> int:
        return -(-self.size // self.facts.num_replicas)

    @property
    def point(self) -> Point:
        return point_of(self._values)

    @property
    def _values(self) -> dict[str, Any]:
        return {**self.start, **self.configs[self.version], **self.inside}

    def tell_facts(self, **changes: Any) -> list[Decision]:
        now = {"values": self._values, "config_version": self.version, "config_revision": self.revision}
        if self.size != self._last_size:
            now |= {"global_batch": self.size, "share": self.share}
            self._last_size = self.size
        if self._sized is not None:
            now["values"] = {**self._values, "global_batch_size": self.size}
        self.facts = dataclasses.replace(self.facts, **{**now, **changes})
        return self.take(self.controller.take_facts(self.now, self.facts))

    def edit(self, changes: Mapping[str, Any], author: Any = "person") -> list[Decision]:
        """A person's config takes the place of the newest."""
        version = max(self.configs) + 1
        self.configs[version] = {**self.configs[self.version], **changes}
        self._put(version)
        return self.take(self.controller.take_config(self.now, self._config(version), author))

    def change_inside(self, values: Mapping[str, Any]) -> None:
        """The job puts something else in force, of which facts are to tell."""
        self.revision += 1
        self.inside.update(values)

    def run(self, num_steps: int, **changes: Any) -> list[Decision]:
        """Steps one after another; gives what was decided meanwhile."""
        before = len(self.told)
        for _ in range(num_steps):
            self.take(self.controller.see(self.now, self.seen(**changes)))
        return self.told[before:]

    def seen(self, **changes: Any) -> StepReport:
        """The next step."""
        factor = 1 + self._random.uniform(-self._noise, self._noise)
        phases = {name: each * factor for name, each in self.seconds(self.point).items()}
        seconds = sum(phases.values())
        self.now += seconds
        self.step += 1
        seen = StepReport(
            time=self.now,
            version=self.version,
            revision=self.revision,
            step=self.step,
            num_steps=1,
            num_ranks=self.facts.world_size,
            world_size=self.facts.world_size,
            step_seconds=seconds,
            phases=phases,
        )
        return dataclasses.replace(seen, **changes)

    def take(self, decisions: Sequence[Decision]) -> list[Decision]:
        """What was decided comes into force."""
        given = list(decisions)
        self.told += given
        for each in given:
            if each.changes and not each.outcome and each.version is None and each.kind != "advise":
                self._write(each)
        return given

    def rate(self, point: Point | None = None) -> float:
        size = self.facts.global_batch if self._sized is None else self.size
        return size / sum(self.seconds(point or self.point).values())

    def kinds(self) -> list[str]:
        """Of decisions as they were made."""
        numbers = {each.number: each.kind for each in self.told}
        return [numbers[number] for number in sorted(numbers)]

    def last(self, kind: str) -> Decision:
        return [each for each in self.told if each.kind == kind][-1]

    def _write(self, decision: Decision) -> None:
        newest = max(self.configs)
        assert decision.base == newest, "a master writes nothing that was made from an older version"
        version = newest + 1
        values = {**self.configs[decision.base], **decision.changes}
        self.configs[version] = {key: value for key, value in values.items() if value is not None}
        self.controller.written(self.now, decision.number, version)
        self.take(self.controller.take_config(self.now, self._config(version), "generated"))
        why = self.refusing(point_of({**self.start, **self.configs[version]}))
        if why:
            self.take(self.controller.refused(self.now, decision.number, why))
        else:
            self._put(version)
            self.tell_facts()

    def _put(self, version: int) -> None:
        self.version, self.revision, self.inside = version, 0, {}

    def _config(self, version: int) -> ElasticConfig:
        return ElasticConfig.from_values(self.configs[version], version=version)
