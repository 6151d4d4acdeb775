"""The library's tuner on a simulated job: what it decides is written, put in force, and told of, as a master does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulated_job import NUM_STEPS_UNKNOWN, SimulatedJob
from benchmarks.tuning_peers import Training
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.controller import Controller
from elastic_ext.tuner.decisions import Decision
from elastic_ext.tuner.measurements import StepReport
from elastic_ext.tuner.space import KEYS, point_of

__all__ = ["Ours"]


class Ours:
    """A way to tune a job, that keeps what was decided."""

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        self.steps: dict[int, int] = {}
        """By number of a decision, the steps that had committed by then."""

    def __call__(self, job: SimulatedJob) -> Training:
        host = _Host(job, self)
        while True:
            host.take(seen=(yield))

    def num_reopened(self, after_step: int) -> int:
        """How often the search began again, once so many steps had committed."""
        found = (each.number for each in self.decisions.values() if each.kind == "reopen")
        return sum(self.steps[number] > after_step for number in found)

    def note(self, decision: Decision, step: int) -> None:
        self.decisions[decision.number] = decision
        self.steps.setdefault(decision.number, step)


class _Host:
    """What stands between the tuner and the job."""

    def __init__(self, job: SimulatedJob, kept: Ours) -> None:
        self._job = job
        self._kept = kept
        self._controller = Controller(mode="auto")
        begun = {KEYS[name]: value for name, value in job.start._asdict().items() if value is not None}
        self._start = ElasticConfig.from_values(begun, version=0)
        self._config = ElasticConfig(version=0)
        self._facts: JobFacts | None = None
        self._to_tell = True
        self._write(self._controller.take_config(job.now, self._config, "person"))
        self._tell_facts()

    def take(self, seen: StepReport | None) -> None:
        """A step was trained, or lost for want of memory."""
        job = self._job
        if seen is None or self._to_tell or job.num_steps <= NUM_STEPS_UNKNOWN:
            self._tell_facts()
        self._to_tell = seen is None
        if seen is not None:
            self._write(self._controller.see(job.now, seen))
        self._write(self._controller.tick(job.now))

    def _tell_facts(self) -> None:
        """As rank 0 writes them: again where anything but the time is another."""
        facts = self._job.facts
        if self._facts is not None and replace(facts, time=0.0) == self._facts:
            return
        self._facts = replace(facts, time=0.0)
        self._write(self._controller.take_facts(self._job.now, facts))

    def _write(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self._kept.note(decision, self._job.num_steps)
        for decision in decisions:
            if decision.changes and decision.outcome == "" and decision.version is None:
                self._put_in_force(decision)

    def _put_in_force(self, decision: Decision) -> None:
        job, now = self._job, self._job.now
        if decision.base != self._config.version:
            why = f"it is for version {decision.base}, and {self._config.version} is in force"
            self._write(self._controller.refused(now, decision.number, why))
            return
        values = {**self._config.values(), **decision.changes}
        kept = {key: value for key, value in values.items() if value is not None and key != "version"}
        config = ElasticConfig.from_values(kept, version=self._config.version + 1, reason=decision.reason)
        self._config = config
        self._controller.written(now, decision.number, config.version)
        told = self._controller.take_config(now, config, "generated")
        job.change(point_of(config.over(self._start).values()), version=config.version)
        self._to_tell = True
        self._write(told)
