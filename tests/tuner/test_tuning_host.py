"""A master and what tunes its job: what that is told, what becomes of its decisions, and what stays when it fails."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_ext.master.arguments import parse
from elastic_ext.master.configs import StaleVersion
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.metrics import exposition
from elastic_ext.master.nodes import RequestRefused
from elastic_ext.master.status import job_status
from elastic_ext.master.store import JobStore, Stored
from elastic_ext.master.tuning import Mode, Tuning
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.records.metrics import JobFacts, LearningFacts
from elastic_ext.tuner.decisions import Decision, Kind
from tests.support.job_facts import made_facts
from tests.support.masters import ROOT, Caller, MasterThread, join_request, master_on_thread, until
from tests.support.tuned import Scripted, decision_of, reported

FACTS = made_facts(world_size=2, share=64)
STORED = Stored(job="j", job_id="x", epoch=1, versions=(), events=(), nodes=(), membership="", pairs="", points=())
BEAT = 10.0


class Told:
    """A job without a process around it, whose node is there, and its clock."""

    def __init__(self, strategy: Scripted, mode: Mode = "auto", **stored: Any) -> None:
        settings = JobSettings(library="1", beat_seconds=BEAT, lease_seconds=1e6, tuning=mode)
        self.now = 1000.0
        self.job = Job(replace(STORED, **stored), settings, self._moment, tuner=strategy.made)
        self.job.join(self._moment, join_request("a"))

    @property
    def _moment(self) -> Now:
        return Now(clock=self.now, time=self.now)

    def beat(self, *workers: wire.Worker, facts: JobFacts | None = None, raw: str = "", **given: Any) -> wire.BeatReply:
        self.now += 1
        text = raw if facts is None else facts.to_json()
        held = wire.ConfigHeld(version=self.job.book.version, digest=self._digest)
        told = [wire.Worker(rank=0)] if text and not workers else workers
        arguments = {"workers": told, "facts": text, "held": held, **given}
        reply, _ = self.job.beat(self._moment, wire.BeatRequest(node_id="a", incarnation=1, **arguments))
        return reply

    def round(self, number: int, **given: Any) -> None:
        self.beat(reported(0, number=number, **given), reported(1, number=number, **given))

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.job.tick(self._moment)

    def write(self) -> None:
        """What a service does with what is due, with nothing in its way."""
        decision = self.job.tuning.due
        assert decision is not None
        self.job.enter(self._moment, self.job.propose_decided(self._moment, decision), decision=decision.number)

    def set(self, **changes: Any) -> None:
        """A person's version."""
        values = {path.replace("__", "."): json.dumps(value) for path, value in changes.items()}
        self.job.enter(self._moment, self.job.propose_change(self._moment, wire.SetConfigRequest(changes=values)))

    def texts(self, kind: str) -> list[str]:
        return [each.text for each in self.job.event_log.after(0) if each.kind == kind]

    @property
    def _digest(self) -> str:
        newest = self.job.book.newest
        return "" if newest is None else newest.config.digest


def deciding(*decisions: Decision, on: str = "see") -> Scripted:
    return Scripted(answers={on: lambda strategy: decisions if len(strategy.all(on)) == 1 else ()})


# ---- what it is told ----


def test_what_tunes_is_told_of_facts_of_rounds_and_of_every_version_in_their_order() -> None:
    strategy = Scripted()
    told = Told(strategy)
    told.round(1)
    assert strategy.told == [], "steps tell nothing as long as nobody knows of what job"
    told.beat(facts=FACTS)
    told.round(2)
    told.set(optimizer__learning_rate=0.1)
    told.round(3)
    assert strategy.names() == ["made", "take_config", "take_facts", "see", "take_config", "see"]
    assert strategy.all("take_facts") == [(FACTS,)]
    assert strategy.all("take_config") == [(0, "node"), (1, "person")], "the first is what there is before any"
    told.tick()
    assert strategy.told[-1] == ("tick",)


def test_what_begins_under_a_config_hears_of_it_before_the_facts() -> None:
    strategy = Scripted()
    told = Told(strategy)
    told.set(user__x=1)
    told.beat(facts=FACTS)
    assert strategy.names() == ["made", "take_config", "take_facts"]


def test_while_it_is_off_nothing_of_it_runs_and_what_is_known_waits() -> None:
    strategy = Scripted()
    told = Told(strategy, mode="off")
    told.beat(facts=FACTS)
    told.round(1)
    told.tick()
    assert strategy.told == [] and told.job.tuning.standing()[0] == "off"
    told.set(tuning__mode="advise")
    assert strategy.names() == ["made", "take_config", "take_facts"] and strategy.mode == "advise"
    told.set(tuning__mode="off")
    assert strategy.names()[3:] == ["take_config"], "so that it can take back what it was trying"
    told.round(2)
    told.tick()
    assert len(strategy.names()) == 4
    assert told.texts("tuning") == [
        "the tuner's mode is advise now, and was off",
        "the tuner's mode is off now, and was advise",
    ]


def test_facts_that_cannot_be_are_told_of_once_and_change_nothing() -> None:
    strategy = Scripted()
    told = Told(strategy)
    for _ in range(3):
        told.beat(raw='{"world_size": -1}')
    assert strategy.told == []
    (words,) = told.texts("tuning-facts-refused")
    assert words.startswith("the facts that rank 0 reports of the job are invalid")
    assert told.job.tuning.standing()[:2] == ("waiting", words)
    told.beat(facts=FACTS)
    assert told.job.tuning.standing()[0] == "probing"


def test_numpy_and_the_search_are_not_loaded_while_it_is_off() -> None:
    code = """
import sys
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.store import Stored
from elastic_ext.master.wire import master_pb2 as wire
from tests.tuner.test_tuning_host import FACTS, STORED
from tests.support.masters import join_request
now = Now(clock=1.0, time=1.0)
before = {"numpy", "elastic_ext.tuner.controller"} & {*sys.modules}
for mode in ("off", "advise"):
    job = Job(STORED, JobSettings(library="1", tuning=mode), now)
    job.join(now, join_request("a"))
    job.beat(now, wire.BeatRequest(node_id="a", incarnation=1, facts=FACTS.to_json(), workers=[wire.Worker(rank=0)]))
    job.tick(now)
    print(sorted({"numpy", "elastic_ext.tuner.controller"} & {*sys.modules} - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    off, advise = done.stdout.splitlines()
    assert off == "[]" and "controller" in advise


# ---- what it decides ----


def test_a_decision_becomes_the_next_version_and_is_told_of() -> None:
    strategy = deciding(decision_of(changes={"dataloader.num_workers": 2, "dataloader.prefetch_factor": None}))
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.write()
    newest = told.job.book.newest
    assert newest is not None and newest.author == "generated"
    assert newest.config.values() == {"dataloader.num_workers": 2}
    assert newest.config.reason == "samples are waited for"
    assert strategy.names()[-2:] == ["written", "take_config"]
    assert strategy.all("written") == [(1, 1)] and strategy.all("take_config")[-1] == (1, "generated")
    assert told.job.tuning.due is None and told.job.tuning.decisions[0].version == 1
    (words,) = told.texts("tuning")
    assert words == (
        "decision 1 (probe): dataloader.num_workers=2, dataloader.prefetch_factor as at start-up: samples are waited "
        "for: 100 samples/s before, 180 samples/s predicted"
    )


def test_what_is_left_out_is_taken_out_of_the_config() -> None:
    strategy = deciding(decision_of(base=1, kind="undo", changes={"dataloader.num_workers": None}))
    told = Told(strategy)
    told.set(dataloader__num_workers=4, user__x=1)
    told.beat(facts=FACTS)
    told.round(1, config_version=1)
    told.write()
    assert told.job.book.newest is not None and told.job.book.newest.config.values() == {"user.x": 1}


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("advise", {}),
        ("auto", {"kind": "advise"}),
        ("auto", {"changes": {}}),
        ("auto", {"outcome": "refused"}),
        ("auto", {"version": 3}),
    ],
)
def test_nothing_is_written_unless_it_may_be_and_is_asked_for(mode: Mode, given: dict[str, Any]) -> None:
    told = Told(deciding(decision_of(**given)), mode=mode)
    told.beat(facts=FACTS)
    told.round(1)
    assert told.job.tuning.due is None and len(told.job.tuning.decisions) == 1


def test_a_persons_version_comes_before_one_that_was_decided_on() -> None:
    strategy = deciding(decision_of())
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.set(user__x=1)
    assert told.job.tuning.due is None
    assert strategy.names()[-2:] == ["refused", "take_config"]
    assert strategy.all("refused") == [(1, "version 1 of the config was written meanwhile")]


def test_what_is_learned_is_never_changed_whatever_was_decided() -> None:
    told = Told(deciding(decision_of(changes={"dataloader.num_workers": 1, "global_batch_size": 1})))
    told.beat(facts=FACTS)
    told.round(1)
    with pytest.raises(RequestRefused, match="global_batch_size is not for the tuner to change"):
        told.write()


@pytest.mark.parametrize("kind", ["probe", "undo", "settle"])
@pytest.mark.parametrize("knobs", [{"global_batch_size": [64, 1024]}, {"dataloader.num_workers": [0, 4]}])
def test_the_size_of_steps_is_changed_where_a_person_lets_it_and_always_taken_back(
    kind: Kind, knobs: dict[str, list[int]]
) -> None:
    told = Told(deciding(decision_of(base=1, kind=kind, changes={"global_batch_size": 256})))
    told.set(tuning__knobs=knobs)
    told.beat(facts=FACTS)
    told.round(1, config_version=1)
    if kind == "undo" or (kind == "probe" and "global_batch_size" in knobs):
        told.write()
        assert told.job.book.newest is not None
        assert told.job.book.newest.config.values()["global_batch_size"] == 256
    else:
        with pytest.raises(RequestRefused, match="global_batch_size is not for the tuner to change"):
            told.write()


@pytest.mark.parametrize(
    ("learning", "words"),
    [
        ({"noise_scale": -1.0}, "learning.noise_scale is below 0"),
        ({"noise_scale": math.inf}, "noise_scale is Infinity"),
        ({"first_batch": 0}, "learning.first_batch is below 1"),
        ({"first_batch": 10**400}, "first_batch is no amount"),
    ],
)
def test_noise_that_cannot_be_is_refused_with_all_facts(learning: dict[str, Any], words: str) -> None:
    strategy = Scripted()
    told = Told(strategy)
    given = {"rule": "sqrt", "first_batch": 64, "noise_scale": 10.0, **learning}
    told.beat(raw=replace(FACTS, learning=LearningFacts(**given)).to_json())
    assert strategy.all("take_facts") == [] and words in told.job.tuning.standing()[1]


def test_a_persons_version_that_is_still_to_come_is_not_brought_forward() -> None:
    told = Told(deciding(decision_of(base=1)))
    changes = {"optimizer.learning_rate": "0.5"}
    request = wire.SetConfigRequest(changes=changes, at_step=100)
    now = Now(clock=1.0, time=1.0)
    told.job.enter(now, told.job.propose_change(now, request))
    told.beat(facts=FACTS)
    told.round(1)
    with pytest.raises(StaleVersion, match="version 1 comes into force at step 100"):
        told.write()
    told.beat(wire.Worker(rank=0, state="running", step=100))
    told.write()
    assert told.job.book.version == 2


def test_what_was_decided_waits_for_a_persons_version_that_is_still_to_come() -> None:
    told = Told(deciding(decision_of(base=1, kind="undo")))
    request = wire.SetConfigRequest(changes={"optimizer.learning_rate": "0.5"}, at_step=100)
    told.job.enter(Now(clock=1.0, time=1.0), told.job.propose_change(Now(clock=1.0, time=1.0), request))
    told.beat(facts=FACTS)
    told.round(1)
    due, moment = told.job.tuning.due, Now(clock=told.now, time=told.now)
    assert due is not None and told.job.decision_to_write(moment) is None
    told.beat(wire.Worker(rank=0, state="running", step=100))
    assert told.job.decision_to_write(moment) == due


def test_facts_are_those_of_the_node_that_has_rank_0() -> None:
    strategy = Scripted()
    told = Told(strategy)
    told.beat(wire.Worker(rank=1), facts=FACTS)
    assert strategy.told == []


def test_a_version_that_ranks_refuse_is_told_with_their_reason() -> None:
    strategy = deciding(decision_of())
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.write()
    details = json.dumps({"version": 1, "why": "ranks 0 to 1: dataloader: no"})
    for version, kind, rank in ((1, "config-refused", -1), (1, "other", 0), (9, "config-refused", 0)):
        event = wire.JobEvent(kind=kind, rank=rank, details=details.replace("1", str(version), 1))
        told.beat(events=[event])
    assert strategy.all("refused") == []
    for text in ("{", '{"version": "1"}', details, details):
        told.beat(events=[wire.JobEvent(kind="config-refused", rank=0, details=text)])
    assert strategy.all("refused") == [(1, "ranks 0 to 1: dataloader: no")]


def test_a_version_that_all_hold_and_nobody_trains_under_is_refused_after_a_while() -> None:
    strategy = deciding(decision_of())
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.write()
    for number in range(2, 30):
        told.round(number)
        told.tick()
        if number < 8:
            assert strategy.all("refused") == []
    ((number, why),) = strategy.all("refused")
    assert number == 1 and why.startswith("all nodes have held version 1 for ") and why.endswith("train under another")


def test_a_version_that_comes_into_force_is_not_refused() -> None:
    strategy = deciding(decision_of())
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.write()
    for number in range(2, 60):
        told.round(number, config_version=int(number > 4))
        told.tick()
    assert strategy.all("refused") == []


def test_nodes_tell_more_often_while_something_is_tried_and_there_are_few() -> None:
    strategy = Scripted()
    told = Told(strategy)
    assert told.beat().beat_seconds == BEAT
    assert told.beat(facts=FACTS).beat_seconds == 0.5
    strategy.standing = replace(strategy.standing, stand="settled")
    told.tick()
    assert told.beat().beat_seconds == BEAT
    strategy.standing = replace(strategy.standing, stand="probing")
    told.tick()
    for number in range(40):
        told.job.join(Now(clock=told.now, time=told.now), join_request(f"node-{number}"))
    assert told.beat().beat_seconds == BEAT
    for number in range(40):
        leave = wire.LeaveRequest(node_id=f"node-{number}", incarnation=1)
        told.job.leave(Now(clock=told.now, time=told.now), leave)
    assert told.beat().beat_seconds == 0.5, "nodes that have left are none of the job's"


def test_a_strategy_that_fails_is_named_and_its_master_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(strategy: Scripted) -> list[Decision]:
        raise ZeroDivisionError("a step of no length")

    strategy = Scripted(answers={"see": fail})
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    told.round(2)
    told.tick()
    (words,) = told.texts("tuning-failed")
    assert words == "the tuner has failed, and decides nothing any more: ZeroDivisionError: a step of no length"
    assert told.job.tuning.standing() == ("failed", words, None)
    assert len(strategy.all("see")) == 1 and "Traceback" in caplog.text
    told.set(tuning__mode="off")
    told.set(tuning__mode="auto")
    assert told.job.tuning.standing()[0] == "probing", "and it may be begun again"


# ---- what it says ----


def test_the_status_and_prometheus_tell_how_it_stands() -> None:
    strategy = deciding(decision_of(measured=190.0, outcome="kept", version=1))
    told = Told(strategy)
    told.beat(facts=FACTS)
    told.round(1)
    status = job_status(told.job, Now(clock=told.now, time=told.now), wire.GetStatusRequest())
    tuning = status.tuning
    assert (tuning.mode, tuning.standing, tuning.best, tuning.num_decisions) == ("auto", "probing", 640.0, 1)
    assert (tuning.predicted, tuning.measured) == (180.0, 190.0)
    page = exposition(status)
    for line in (
        'elastic_ext_tuner_mode{mode="auto"} 1',
        'elastic_ext_tuner_mode{mode="off"} 0',
        "elastic_ext_tuner_decisions_total 1",
        "elastic_ext_tuner_predicted_samples_per_second 180",
        "elastic_ext_tuner_measured_samples_per_second 190",
    ):
        assert f"{line}\n" in page


# ---- over gRPC, and what is kept ----


@pytest.fixture
def strategy() -> Scripted:
    return deciding(decision_of())


@pytest.fixture
def master(tmp_path: Path, strategy: Scripted) -> Iterator[MasterThread]:
    yield from master_on_thread(tmp_path, "--tuning", "auto", tuner=strategy.made)


def begun(caller: Caller) -> None:
    """A node whose ranks have told of a round, after which one decision was made, and is written or refused."""
    caller.join()
    caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
    until(lambda: [each for each in caller("GetTuning").decisions if each.HasField("version") or each.outcome])


def test_a_decision_goes_to_the_nodes_at_once_and_is_stored_with_its_version(
    tmp_path: Path, master: MasterThread, strategy: Scripted
) -> None:
    caller = master.caller()
    caller.join()
    stream = caller.watch()
    caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
    (push,) = until(lambda: list(stream.heard))
    assert push.version == 1 and json.loads(push.text)["dataloader"] == {"num_workers": 2}
    stream.cancel()
    (decision,) = caller("GetTuning").decisions
    assert (decision.number, decision.version, decision.kind, decision.base) == (1, 1, "probe", 0)
    assert dict(decision.changes) == {"dataloader.num_workers": "2"} and decision.HasField("version")
    assert not decision.HasField("measured") and decision.predicted == 180.0
    (entry,) = caller("GetConfigs").entries
    assert entry.author == "generated"
    master.end()
    with contextlib.closing(JobStore(tmp_path / "state")) as store:
        (kept,) = store.read().decisions
    assert kept.version == 1 and kept.reason == "samples are waited for"


def test_a_master_that_is_started_again_goes_on_from_what_was_decided(tmp_path: Path) -> None:
    first = deciding(decision_of())
    for master in master_on_thread(tmp_path, "--tuning", "auto", tuner=first.made):
        begun(master.caller())
    (tmp_path / "port").unlink()
    again = Scripted()
    for master in master_on_thread(tmp_path, "--tuning", "auto", tuner=again.made):
        caller = master.caller()
        assert len(caller("GetTuning").decisions) == 1
        caller.join(incarnation=2)
        caller.beat(incarnation=2, facts=FACTS.to_json(), workers=[wire.Worker(rank=0)])
        until(lambda: again.all("take_facts"))
    assert [each.version for each in again.earlier] == [1]
    assert again.names()[:3] == ["made", "take_config", "take_facts"]
    assert again.all("take_config") == [(1, "generated")]


def test_a_person_has_it_pause_go_on_and_take_back(master: MasterThread, strategy: Scripted) -> None:
    caller = master.caller()
    begun(caller)
    paused = decision_of(2, kind="pause", reason="I said so", changes={})
    strategy.answers["pause"] = lambda _: [paused]
    strategy.answers["undo"] = lambda _: [
        decision_of(3, kind="undo", base=1, changes={"dataloader.num_workers": None}),
    ]
    report = caller("ControlTuning", wire.ControlTuningRequest(action="pause", reason="I\nsaid so"))
    assert [each.number for each in report.decisions] == [2] and strategy.all("pause") == [("I said so",)]
    report = caller("ControlTuning", wire.ControlTuningRequest(action="undo"))
    (undone,) = report.decisions
    assert (undone.number, undone.version, dict(undone.changes)) == (3, 2, {"dataloader.num_workers": "null"})
    caller("ControlTuning", wire.ControlTuningRequest(action="resume"))
    assert strategy.names()[-1] == "resume"
    kinds = [each.kind for each in caller("ReadEvents")]
    assert kinds.count("tuning-asked") == 3


def test_that_it_is_paused_is_said_whether_or_not_it_knows_of_the_job() -> None:
    tuning = Tuning("auto", (), tell=lambda *_: None)
    assert tuning.standing()[0] == "waiting"
    tuning.control(1.0, "pause", "I measure by myself")
    assert tuning.standing()[:2] == ("paused", "the tuner is paused, until `elastic-ext tuning resume`")
    again = Tuning("auto", tuning.decisions, tell=lambda *_: None)  # of a master that is started again
    assert again.standing() == tuning.standing()
    again.take_facts(2.0, "no facts")
    assert again.standing() == tuning.standing()
    again.control(3.0, "resume", "")
    assert again.standing()[0] == "waiting"


def test_what_cannot_be_asked_of_it_is_refused_with_a_reason(master: MasterThread, strategy: Scripted) -> None:
    caller = master.caller()
    begun(caller)
    code, words = caller.refusal("ControlTuning", wire.ControlTuningRequest(action="explode"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "allowed: pause, resume, undo" in words
    code, words = caller.refusal("ControlTuning", wire.ControlTuningRequest(action="pause", job="another"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "another" in words
    caller("SetConfig", wire.SetConfigRequest(changes={"tuning.mode": '"off"'}))
    code, words = caller.refusal("ControlTuning", wire.ControlTuningRequest(action="pause"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "tuning.mode=advise" in words
    stranger = master.caller(None)
    for method in ("GetTuning", "ControlTuning"):
        assert stranger.refusal(method)[0] == grpc.StatusCode.UNAUTHENTICATED


def test_a_version_that_cannot_be_written_is_refused_and_the_beat_is_answered(tmp_path: Path) -> None:
    """One that was made from a version which is not the newest; and one that no config can hold."""
    unlike: tuple[dict[str, Any], ...] = (
        {"base": 7},
        {"changes": {"dataloader.num_workers": -1}},
        {"changes": {"optimizer.learning_rate": 1.0}},
    )
    for number, given in enumerate(unlike):
        strategy = deciding(decision_of(**given))
        folder = tmp_path / str(number)
        folder.mkdir()
        for master in master_on_thread(folder, "--tuning", "auto", tuner=strategy.made):
            caller = master.caller()
            caller.join()
            caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
            ((refused, why),) = until(partial(strategy.all, "refused"))
            assert refused == 1 and why.startswith("it could not be written: ")
            assert not caller("GetConfigs").entries


def test_a_store_of_an_earlier_version_of_the_library_is_taken_up(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "master.db")) as db:
        db.execute("DROP TABLE decisions")
    with contextlib.closing(JobStore(tmp_path)) as store:
        assert store.read().decisions == ()
        store.keep(decisions=[decision_of(number) for number in range(1, 1_102)])
        kept = store.read().decisions
        assert (len(kept), kept[0].number, kept[-1].number) == (1_000, 102, 1_101)


def test_the_command_line_says_what_it_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--port", "0", "--state-dir", "x"]
    assert parse(given).tuning == "advise" and parse([*given, "--tuning", "off"]).tuning == "off"
    with pytest.raises(SystemExit):
        parse([*given, "--tuning", "on"])
    assert "off" in capsys.readouterr().err
