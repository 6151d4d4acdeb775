"""A master whose tuner has steps grow: what nodes tell it, what becomes a version, and what a restart finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic_ext.master.configs import StaleVersion
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.store import Stored
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.master.wire import window_message
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import LearningFacts
from elastic_ext.tuner.decisions import Decision
from tests.support.job_facts import made_facts
from tests.support.masters import join_request
from tests.support.profiles import made_window

FIRST, NUM_RANKS = 128, 2
NOISE = 4000.0
KNOBS = {"global_batch_size": [64, 512], "optimizer.learning_rate": [1e-4, 1e-2]}
STORED = Stored(job="j", job_id="x", epoch=1, versions=(), events=(), nodes=(), membership="", pairs="", points=())


class Growing:
    """A job without a process around it, whose node trains by whatever version is there."""

    def __init__(self, **stored: Any) -> None:
        settings = JobSettings(library="1", beat_seconds=10.0, lease_seconds=1e6, tuning="auto")
        self.now, self.number, self.trained = 1000.0, 0, 1000.0
        self.refusing: tuple[int, ...] = ()
        self.size, self._in_force = FIRST, 0
        self._told_of: set[int] = set()
        self.job = Job(replace(STORED, **stored), settings, self._moment)
        self.job.join(self._moment, join_request("a"))

    @property
    def _moment(self) -> Now:
        return Now(clock=self.now, time=self.now)

    @property
    def newest_size(self) -> int:
        newest = self.job.book.newest
        return FIRST if newest is None else newest.config.global_batch_size or FIRST

    @property
    def is_refused(self) -> bool:
        """Whether ranks do not take the newest version."""
        return self.newest_size in self.refusing

    def set(self, **changes: Any) -> None:
        values = {path.replace("__", "."): json.dumps(value) for path, value in changes.items()}
        self.job.enter(self._moment, self.job.propose_change(self._moment, wire.SetConfigRequest(changes=values)))

    def round(self) -> None:
        """Facts, then a window of each rank's, then what is due is written."""
        self.now += 1
        self.number += 1
        newest = self.job.book.newest
        events: list[wire.JobEvent] = []
        if not self.is_refused:
            self.size, self._in_force = self.newest_size, self.job.book.version
        elif self.job.book.version not in self._told_of:
            self._told_of.add(self.job.book.version)
            details = {"version": self.job.book.version, "why": "ranks 0 to 1: the loader has too few samples"}
            events = [wire.JobEvent(kind="config-refused", rank=0, details=json.dumps(details))]
        version = self._in_force
        share = self.size // NUM_RANKS
        facts = made_facts(
            choices={"global_batch_size": ()},
            values={"dataloader.batch_size": 16, "optimizer.learning_rate": 1e-3, "global_batch_size": self.size},
            share=share,
            world_size=NUM_RANKS,
            config_version=version,
            num_parameters=10**7,
            learning=LearningFacts(rule="adascale", first_batch=FIRST, noise_scale=NOISE),
        )
        step = {
            Phase.FORWARD: share * 0.0003,
            Phase.BACKWARD: share * 0.0006,
            Phase.COMMUNICATION: 0.1,
            Phase.OPTIMIZER: 0.01,
        }
        told = [self._worker(rank, step, version) for rank in range(NUM_RANKS)]
        self.trained += 10 * sum(step.values())
        held = wire.ConfigHeld(version=self.job.book.version, digest="" if newest is None else newest.config.digest)
        given: dict[str, Any] = {"workers": told, "facts": facts.to_json(), "held": held, "events": events}
        self.job.beat(self._moment, wire.BeatRequest(node_id="a", incarnation=1, **given))
        self.job.tick(self._moment)
        while (decision := self.job.tuning.due) is not None:
            try:
                authored = self.job.propose_decided(self._moment, decision)
            except StaleVersion as error:
                self.job.tuning.refuse_due(self.now, decision.number, f"it could not be written: {error}")
            else:
                self.job.enter(self._moment, authored, decision=decision.number)

    def _worker(self, rank: int, step: Mapping[Phase, float], version: int) -> wire.Worker:
        """With a window of ten steps."""
        window = made_window(step, rank=rank, world_size=NUM_RANKS, config_version=version, num_steps=10)
        end = self.trained + window.end - window.begin
        window = replace(window, begin=self.trained, end=end, step=10 * self.number)
        return wire.Worker(rank=rank, state="running", windows=[window_message(window)])

    def decisions(self, kind: str) -> list[Decision]:
        return [each for each in self.job.tuning.decisions if each.kind == kind]


def test_steps_grow_by_versions_that_a_master_writes_and_by_what_nodes_tell() -> None:
    job = Growing()
    job.set(tuning__knobs=KNOBS)
    for _ in range(150):
        job.round()
    assert job.job.tuning.standing()[0] == "settled" and job.size == 512
    tries = [each for each in job.decisions("probe") if "global_batch_size" in each.changes]
    assert [each.outcome for each in tries] == ["kept"] * len(tries) and len(tries) >= 2
    assert all(each.version is not None and each.measured for each in tries)
    assert job.job.book.newest is not None and "learning rates become" in job.job.book.newest.config.reason


def test_a_master_that_is_started_again_in_a_try_puts_the_size_before_in_force() -> None:
    job = Growing()
    job.set(tuning__knobs=KNOBS)
    while job.newest_size == FIRST:
        job.round()
    job.round()
    assert job.decisions("probe")[-1].outcome == ""
    again = Growing(versions=job.job.book.versions, decisions=tuple(job.job.tuning.decisions))
    again.now = job.now
    assert again.newest_size == job.newest_size
    again.round()
    assert again.newest_size == FIRST and "was not measured to its end" in again.decisions("undo")[-1].reason
    for _ in range(150):
        again.round()
    assert again.size == 512


def test_after_a_size_that_ranks_refuse_another_one_is_tried_and_nothing_is_made_from_an_older_version() -> None:
    job = Growing()
    job.set(tuning__knobs=KNOBS)
    job.refusing = (256,)
    for _ in range(200):
        job.round()
    refused = [each for each in job.decisions("probe") if each.outcome == "refused"]
    assert ["the loader has too few samples" in each.reason for each in refused] == [True]
    assert job.size > FIRST and job.job.tuning.standing()[0] == "settled"


def test_a_tuner_that_is_turned_off_leaves_no_size_in_force_that_was_not_measured() -> None:
    job = Growing()
    job.set(tuning__knobs=KNOBS)
    while not any("global_batch_size" in each.changes for each in job.decisions("probe")):
        job.round()
    assert job.newest_size > FIRST
    job.set(tuning__mode="off")
    job.round()
    assert job.newest_size == FIRST and job.job.tuning.mode == "off"
    newest = job.job.book.newest
    assert newest is not None and newest.config.tuning.mode == "off"
    version = job.job.book.version
    for _ in range(20):
        job.round()
    assert job.job.book.version == version and job.size == FIRST
