"""What tunes is asked one thing after another, on a thread of its own, and its master answers everybody meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.master.configs import StaleVersion
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.nodes import RequestRefused
from elastic_ext.master.process import TunerThread
from elastic_ext.master.store import JobStore, Stored
from elastic_ext.master.tuning import MOST_WAITING, TunerQueue, Tuning, at_once
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.tuner.decisions import Decision
from tests.support.job_facts import made_facts
from tests.support.masters import Caller, Listening, MasterThread, join_request, master_on_thread, until
from tests.support.tuned import Scripted, decision_of, reported

FACTS = made_facts(world_size=2, share=64)
STORED = Stored(job="j", job_id="x", epoch=1, versions=(), events=(), nodes=(), membership="", pairs="", points=())
DEADLINE = 20.0


class Later:
    """Does what it is given when a test says so."""

    def __init__(self) -> None:
        self.works: deque[Callable[[], Callable[[], None]]] = deque()

    def run(self, work: Callable[[], Callable[[], None]]) -> None:
        assert not self.works, "two at once"
        self.works.append(work)

    def step(self) -> None:
        then = self.works[0]()
        self.works.popleft()
        then()

    def finish(self) -> None:
        while self.works:
            self.step()


class Asked:
    """Something to be asked, and what comes of it."""

    def __init__(self) -> None:
        self.later = Later()
        self.taken: list[tuple[float, list[int]]] = []
        self.failures: list[str] = []
        self.decisions: list[Decision] = []
        self.asking = TunerQueue(self.later.run, self)

    def take_decisions(self, now: float, decisions: Sequence[Decision]) -> None:
        self.taken.append((now, [each.number for each in decisions]))

    def take_failure(self, now: float, error: Exception) -> None:
        self.failures.append(f"{now:g}: {error}")

    def begin(self, strategy: Scripted, now: float = 0.0) -> None:
        def make(known: Sequence[Decision]) -> Scripted:
            return strategy.made("auto", known)

        self.asking.begin(now, make, lambda made: made.tick(now))

    def see(self, now: float) -> None:
        self.asking.ask(now, lambda strategy: strategy.pause(now, f"at {now:g}"), "seen")


def failing(strategy: Scripted) -> list[Decision]:
    raise ZeroDivisionError("a step of no length")


# ---- in which order ----


def test_the_next_question_waits_for_the_answer_to_the_one_before() -> None:
    asked, strategy = Asked(), Scripted(answers={"pause": lambda each: [decision_of(len(each.all("pause")))]})
    asked.begin(strategy)
    asked.see(1.0)
    asked.see(2.0)
    assert strategy.told == [] and asked.asking.has_begun and asked.asking.standing is None
    asked.later.step()
    assert strategy.names() == ["made"] and asked.taken == [(0.0, [])]
    assert asked.asking.standing == strategy.standing
    asked.later.finish()
    assert strategy.all("pause") == [("at 1",), ("at 2",)]
    assert asked.taken == [(0.0, []), (1.0, [1]), (2.0, [2])]


def test_it_is_made_of_all_that_was_decided_by_then() -> None:
    asked, first, second = Asked(), Scripted(), Scripted()
    asked.begin(first)
    asked.asking.end()
    asked.begin(second)
    asked.decisions = [decision_of(7)]
    asked.later.finish()
    assert [each.number for each in first.earlier] == [] and [each.number for each in second.earlier] == [7]


def test_one_that_ends_answers_what_it_was_asked_before() -> None:
    asked, strategy = Asked(), Scripted(answers={"pause": lambda _: [decision_of(3)]})
    asked.begin(strategy)
    asked.see(1.0)
    asked.asking.end()
    asked.later.finish()
    assert asked.taken[-1] == (1.0, [3]) and asked.asking.standing is None and not asked.asking.has_begun


def test_one_that_fails_is_asked_nothing_that_waits_and_the_next_one_is() -> None:
    asked, first, second = Asked(), Scripted(answers={"pause": failing}), Scripted()
    asked.begin(first)
    asked.see(1.0)
    asked.see(2.0)
    heard: list[str] = []
    asked.asking.after(lambda: heard.append("after"))
    asked.later.finish()
    assert len(first.all("pause")) == 1 and heard == ["after"], "who waits for an answer hears that there is none"
    assert asked.failures == ["1: a step of no length"] and not asked.asking.has_begun
    asked.begin(second, 5.0)
    asked.see(6.0)
    asked.later.finish()
    assert second.all("pause") == [("at 6",)]


def test_what_fails_once_it_has_ended_is_no_failure_of_the_one_after_it() -> None:
    asked, first, second = Asked(), Scripted(answers={"pause": failing}), Scripted()
    asked.begin(first)
    asked.see(1.0)
    asked.asking.end()
    asked.begin(second, 2.0)
    asked.see(3.0)
    asked.later.finish()
    assert asked.failures == [] and second.all("pause") == [("at 3",)]


def test_of_much_that_waits_the_newest_is_asked() -> None:
    asked, strategy = Asked(), Scripted()
    asked.begin(strategy)
    for number in range(100):
        asked.see(float(number))
    asked.later.finish()
    assert strategy.all("pause") == [(f"at {each}",) for each in range(100 - MOST_WAITING["seen"], 100)]


def test_what_is_to_come_after_it_comes_at_once_where_nothing_is_asked() -> None:
    asked, heard = Asked(), list[str]()
    asked.asking.after(lambda: heard.append("now"))
    assert heard == ["now"]


# ---- what is decided ----


class Host:
    """A job around a strategy, whose clock goes on by itself."""

    def __init__(self, strategy: Scripted, later: Later | None) -> None:
        self.now = 1000.0
        self.later = later
        settings = JobSettings(library="1", lease_seconds=1e6, tuning="auto")
        run = at_once if later is None else later.run
        self.job = Job(STORED, settings, self.moment, tuner=strategy.made, run=run)
        self.job.join(self.moment, join_request("a"))

    @property
    def moment(self) -> Now:
        return Now(clock=self.now, time=self.now)

    @property
    def tuning(self) -> Tuning:
        return self.job.tuning

    def beat(self, *workers: wire.Worker, facts: str = "") -> None:
        self.now += 1
        self.job.beat(self.moment, wire.BeatRequest(node_id="a", incarnation=1, workers=workers, facts=facts))

    def do(self, what: str) -> None:
        self.now += 1
        if what == "facts":
            self.beat(wire.Worker(rank=0), facts=FACTS.to_json())
        elif what == "round":
            self.beat(reported(0), reported(1))
        elif what == "tick":
            self.tuning.tick(self.now, is_held=True)
        elif what in ("pause", "resume", "undo"):
            with contextlib.suppress(RequestRefused):
                self.tuning.control(self.now, what, "")
        else:
            changes = {"tuning.mode": json.dumps(what)} if what != "set" else {"user.x": str(self.now)}
            self.job.enter(self.moment, self.job.propose_change(self.moment, wire.SetConfigRequest(changes=changes)))

    def settle(self) -> None:
        """All that was asked is answered."""
        if self.later is not None:
            self.later.finish()


WHAT = st.sampled_from(["facts", "round", "round", "pause", "resume", "undo", "set", "off", "auto", "advise"])


def numbered(strategy: Scripted) -> list[Decision]:
    return [decision_of(len(strategy.told), base=0, kind="hold", changes={})]


@given(st.lists(WHAT, max_size=12), st.data())
def test_it_is_told_the_same_whenever_its_answers_come(whats: list[str], data: st.DataObject) -> None:
    names = ("take_facts", "see", "take_config", "pause", "undo", "resume")
    here, there = (Scripted(answers=dict.fromkeys(names, numbered)) for _ in range(2))
    later = Later()
    hosts = Host(here, None), Host(there, later)
    for what in ["facts", *whats]:
        for host in hosts:
            host.do(what)
        for _ in range(data.draw(st.integers(0, 3))):
            if later.works:
                later.step()
    hosts[1].settle()
    assert here.told == there.told
    assert hosts[0].tuning.decisions == hosts[1].tuning.decisions
    assert hosts[0].tuning.standing() == hosts[1].tuning.standing()


def test_a_decision_is_written_once_whatever_is_said_of_it_before_that_is_known() -> None:
    later = Later()
    strategy = Scripted(answers={"see": lambda _: [decision_of()], "tick": lambda _: [decision_of(measured=3.0)]})
    host = Host(strategy, later)
    host.do("facts")
    host.do("round")
    host.settle()
    due = host.tuning.due
    assert due is not None
    host.do("tick")  # is under way as the version is written
    host.job.enter(host.moment, host.job.propose_decided(host.moment, due), decision=due.number)
    host.settle()
    (kept,) = host.tuning.decisions
    assert (kept.version, kept.measured) == (1, 3.0) and host.tuning.due is None


def test_what_was_planned_from_a_version_that_a_person_has_replaced_is_never_written() -> None:
    later = Later()
    strategy = Scripted(answers={"see": lambda _: [decision_of()]})
    host = Host(strategy, later)
    host.do("facts")
    host.settle()
    host.do("round")
    host.do("set")
    host.settle()
    due = host.tuning.due
    assert due is not None and due.base == 0
    with pytest.raises(StaleVersion, match="version 1"):
        host.job.propose_decided(host.moment, due)


# ---- the thread ----


def test_answers_are_heard_on_the_loop_in_their_order_and_works_run_elsewhere() -> None:
    async def run() -> tuple[list[int], set[int], set[int]]:
        planning = TunerThread(asyncio.get_running_loop())
        heard, there, here = [], set(), set()

        def work(number: int) -> Callable[[], None]:
            there.add(threading.get_ident())

            def then() -> None:
                here.add(threading.get_ident())
                heard.append(number)

            return then

        for number in range(20):
            planning.run(lambda number=number: work(number))  # type: ignore[misc]
        while len(heard) < 20:
            planning.answered.clear()
            await asyncio.wait_for(planning.answered.wait(), DEADLINE)
        planning.close()
        return heard, there, here

    heard, there, here = asyncio.run(run())
    assert heard == list(range(20)) and here == {threading.get_ident()} and len(there) == 1 and not there & here


def test_a_plan_that_does_not_end_is_left_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    entered, release, heard = threading.Event(), threading.Event(), list[str]()

    def work() -> Callable[[], None]:
        entered.set()
        assert release.wait(DEADLINE)
        return lambda: heard.append("an answer")

    async def run() -> None:
        planning = TunerThread(asyncio.get_running_loop())
        planning.run(work)
        assert entered.wait(DEADLINE)
        planning.close(0.01)
        planning.run(work)
        release.set()

    asyncio.run(run())
    assert heard == [] and "the master ends without it" in caplog.text


def test_one_that_was_given_nothing_to_do_has_no_thread() -> None:
    async def run() -> set[threading.Thread]:
        before = set(threading.enumerate())
        planning = TunerThread(asyncio.get_running_loop())
        begun = set(threading.enumerate()) - before
        planning.close()
        return begun

    assert asyncio.run(run()) == set()


# ---- over gRPC ----


class Held:
    """Plans for as long as a test wants, each time that ranks have told of a round."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.strategy = Scripted(answers={"see": self._plan})

    def _plan(self, strategy: Scripted) -> list[Decision]:
        self.entered.set()
        assert self.release.wait(DEADLINE)
        return [decision_of()]


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.release.set()


@pytest.fixture
def master(tmp_path: Path, held: Held) -> Iterator[MasterThread]:
    for made in master_on_thread(tmp_path, "--tuning", "auto", tuner=held.strategy.made):
        try:
            yield made
        finally:
            held.release.set()


def planning(caller: Caller, held: Held) -> None:
    """It has begun to plan."""
    caller.join()
    caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
    assert held.entered.wait(DEADLINE)


def test_everybody_is_answered_while_it_plans(master: MasterThread, held: Held) -> None:
    caller = master.caller()
    planning(caller, held)
    assert caller.beat().epoch == 1
    assert caller.status().tuning.standing == "probing"
    assert len(caller("GetTuning").decisions) == 0
    stream = caller.watch()
    assert caller("SetConfig", wire.SetConfigRequest(changes={"user.x": "1"})).version == 1
    until(lambda: stream.heard)
    assert held.strategy.names() == ["made", "take_config", "take_facts", "see"], "and what comes waits for it"
    held.release.set()
    until(lambda: held.strategy.all("refused"))
    stream.cancel()
    assert held.strategy.names()[4:] == ["take_config", "refused"]
    (refused,) = held.strategy.all("refused")
    assert refused[0] == 1 and "it could not be written: " in refused[1], "a person's version came first"
    assert [each.author for each in caller("GetConfigs").entries] == ["person"]


def test_what_a_person_asks_is_answered_once_the_plan_is_there(master: MasterThread, held: Held) -> None:
    caller = master.caller()
    planning(caller, held)
    answer = caller.future("ControlTuning", wire.ControlTuningRequest(action="pause", reason="a benchmark"))
    until(lambda: [each for each in caller("ReadEvents") if each.kind == "tuning-asked"])
    assert not answer.done() and held.strategy.all("pause") == []
    held.release.set()
    report = answer.result()
    assert [(each.number, each.version) for each in report.decisions] == [(1, 1)]
    assert held.strategy.all("pause") == [("a benchmark",)]


def test_a_failure_while_it_plans_is_told_to_whoever_waits(master: MasterThread, held: Held) -> None:
    def fail(strategy: Scripted) -> list[Decision]:
        held.entered.set()
        assert held.release.wait(DEADLINE)
        return failing(strategy)

    held.strategy.answers["see"] = fail
    caller = master.caller()
    planning(caller, held)
    answer = caller.future("ControlTuning", wire.ControlTuningRequest(action="pause"))
    until(lambda: [each for each in caller("ReadEvents") if each.kind == "tuning-asked"])
    held.release.set()
    status = answer.result().status
    words = "the tuner has failed, and decides nothing any more: ZeroDivisionError: a step of no length"
    assert (status.standing, status.text) == ("failed", words)
    code, told = caller.refusal("ControlTuning", wire.ControlTuningRequest(action="pause"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and told == words
    assert [each.text for each in caller("ReadEvents") if each.kind == "tuning-failed"] == [words]


def test_who_follows_hears_of_what_is_decided_though_nothing_is_written(master: MasterThread, held: Held) -> None:
    held.strategy.answers["see"] = lambda _: [decision_of(kind="hold", changes={})]
    caller = master.caller()
    caller.join()
    follower = Listening(caller("ReadEvents", wire.ReadEventsRequest(follow=True), timeout=600.0))
    caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
    (told,) = until(lambda: [each for each in follower.heard if each.kind == "tuning"])
    follower.cancel()
    assert told.text.startswith("decision 1 (hold): samples are waited for")


def test_a_master_that_ends_while_it_plans_writes_nothing_of_it(
    tmp_path: Path, master: MasterThread, held: Held
) -> None:
    caller = master.caller()
    planning(caller, held)
    ended = threading.Thread(target=master.end)
    ended.start()
    until(lambda: not is_answered(caller))
    held.release.set()
    ended.join(DEADLINE)
    assert not ended.is_alive()
    with contextlib.closing(JobStore(tmp_path / "state")) as store:
        stored = store.read()
    assert (list(stored.versions), list(stored.decisions)) == ([], [])
    assert stored.events[-1].text == "the master ends"


def is_answered(caller: Caller) -> bool:
    try:
        caller.status()
    except grpc.RpcError:
        return False
    return True
