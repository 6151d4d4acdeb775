"""An agent's link with a master that does what each test wants: joins, beats, configs, losses, and what is told."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.agent.event_files import EventFiles
from elastic_ext.agent.master.identity import INCARNATION_FILE, PLACE_FILE, KnownMaster, next_incarnation, node_id_of
from elastic_ext.agent.master.link import FoundMaster, GivenMaster, LinkState, LinkStory
from elastic_ext.agent.master.outbox import EventOutbox
from elastic_ext.agent.master.report import NodeReporter
from elastic_ext.agent.master.session import Due, beat_due
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit
from elastic_ext.errors import MasterAbsent
from elastic_ext.master.address import MOST_BEAT_BYTES, Address, MasterPlace
from elastic_ext.master.wire import master_pb2 as pb
from elastic_ext.members.plan import MembershipPlan, NodeShare
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.records.agent import (
    MASTER_FILE,
    MEMBERSHIP_FILE,
    WORKERS_FILE,
    MasterRecord,
    Since,
    WorkerSeen,
    WorkersRecord,
)
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import JobEvent, RankMetrics, StepWindow
from tests.support.linked import LinkedNode, config, in_file, linked
from tests.support.nodes import until
from tests.support.ports import free_port
from tests.support.scripted_master import Refusal, ScriptedMaster

CODES = grpc.StatusCode


# ---- pure parts ----


@given(st.integers(0, 1000), st.integers(0, 60))
def test_a_wait_lies_between_nothing_and_a_bound_that_doubles_up_to_the_most(seed: int, num_tries: int) -> None:
    backoff = Backoff(random.Random(seed), first_seconds=0.5, most_seconds=15.0)
    waits = [backoff.next_seconds() for _ in range(num_tries + 1)]
    assert all(0.0 <= wait <= min(0.5 * 2**number, 15.0) for number, wait in enumerate(waits))
    backoff.forget()
    assert backoff.next_seconds() <= 0.5


def test_a_herd_that_has_lost_its_master_at_one_moment_comes_back_spread_over_the_time_there_is() -> None:
    firsts, thirds = [], []
    for number in range(1000):
        backoff = Backoff(random.Random(f"node-{number}/1"), first_seconds=0.5, most_seconds=15.0)
        waits = [backoff.next_seconds() for _ in range(3)]
        firsts.append(waits[0])
        thirds.append(waits[2])
    in_tenths = [sum(1 for wait in firsts if number <= wait * 20 < number + 1) for number in range(10)]
    assert max(in_tenths) < 200, in_tenths
    assert max(thirds) > 1.5


@pytest.mark.parametrize(
    ("due", "at"),
    [
        (Due(), 15.0),
        (Due(has_events=True), 10.25),
        (Due(is_asked=True), 10.02),
        (Due(is_asked=True, has_events=True, acknowledge_at=12.0), 10.02),
        (Due(acknowledge_at=0.0), 10.02),
        (Due(acknowledge_at=11.5), 11.5),
        (Due(acknowledge_at=99.0), 15.0),
    ],
)
def test_what_is_asked_for_is_said_at_once_events_soon_and_the_rest_in_its_time(due: Due, at: float) -> None:
    assert beat_due(said_at=10.0, beat_seconds=5.0, due=due) == pytest.approx(at)


def test_the_outbox_keeps_the_newest_and_counts_what_it_drops_until_that_was_told() -> None:
    box = EventOutbox(most=3)
    box.put([event(number) for number in range(5)], num_dropped=2)
    lent, num_dropped = box.lend(2)
    assert ([each.step for each in lent], num_dropped) == ([2, 3], 4)
    box.put([event(5), event(6)])  # in the place of both
    box.confirm()
    lent, num_dropped = box.lend(9)
    assert ([each.step for each in lent], num_dropped) == ([4, 5, 6], 0)
    box.confirm()
    assert len(box) == 0 and box.lend(9) == ((), 0)


@given(st.lists(st.sampled_from(["put", "lend", "less", "confirm"]), max_size=60))
def test_every_event_is_lent_until_it_is_confirmed_or_counted_as_dropped(doings: list[str]) -> None:
    box, num_put, arrived, num_dropped = EventOutbox(most=4), 0, set(), 0
    lent: tuple[tuple[JobEvent, ...], int] = ((), 0)
    for doing in [*doings, "lend", "confirm"]:
        if doing == "put":
            box.put([event(num_put)])
            num_put += 1
        elif doing == "lend":
            lent = box.lend(2)
        elif doing == "less":
            box.lend_less(1)
            lent = lent[0][:1], lent[1]
        else:
            box.confirm()
            arrived |= {each.step for each in lent[0]}
            num_dropped += lent[1]
            lent = ((), 0)
    waiting = {each.step for each in box.lend(99)[0]}
    assert len(arrived | waiting) + num_dropped + box.lend(99)[1] == num_put
    assert len(waiting) <= 4


def told_of(*states: LinkState) -> list[str | None]:
    story = LinkStory()
    news = [story.see(state, f"why {state}", now=float(number)) for number, state in enumerate(states)]
    return [None if each is None else each.kind.removeprefix("master-") for each in news]


def test_each_change_is_told_of_once() -> None:
    assert told_of("absent", "absent", "joined", "joined") == ["absent", None, "joined", None]
    assert told_of("joined", "absent", "absent", "joined", "absent") == ["joined", "lost", None, "back", "lost"]
    assert told_of("refused", "absent", "refused", "joined", "refused") == ["refused", None, None, "joined", "refused"]
    assert told_of("joined", "fenced") == ["joined", "fenced"]


def test_how_long_a_master_was_away_counts_from_when_it_was_lost() -> None:
    story = LinkStory()
    for state, now in (("joined", 0.0), ("absent", 10.0), ("refused", 15.0), ("absent", 60.0)):
        story.see(state, "why", now=now)  # type: ignore[arg-type]
    news = story.see("joined", "it is there", now=130.0)
    assert news is not None and news.text == "it is there, after 2 min without it"


def test_another_master_in_the_place_of_the_one_that_was_met_is_not_taken_for_it() -> None:
    known = KnownMaster()
    known.check(3, "job-1")
    known.check(4)
    known.check(4, "job-1")
    with pytest.raises(MasterAbsent, match="replaced"):
        known.check(3, "job-1")
    with pytest.raises(MasterAbsent, match="another job"):
        known.check(9, "job-2")
    assert (known.epoch, known.job_id) == (4, "job-1")


def test_a_node_has_one_name_in_its_place_and_each_start_of_it_a_higher_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert node_id_of(tmp_path / "a", "host") == node_id_of(tmp_path / "link", "host")
    assert node_id_of(tmp_path / "a", "host") != node_id_of(tmp_path / "a", "other")
    assert node_id_of(tmp_path / "a", "host") != node_id_of(tmp_path / "b", "host")
    assert node_id_of(tmp_path / "a", "host").startswith("host-")
    assert next_incarnation(tmp_path, now_ns=100) == 100
    assert next_incarnation(tmp_path, now_ns=50) == 101  # the clock was put back
    (tmp_path / INCARNATION_FILE).write_text("no number")
    assert next_incarnation(tmp_path, now_ns=70) == 70
    assert next_incarnation(tmp_path / "none", now_ns=70) == 70


def test_places_of_one_host_name_and_one_path_are_two_and_each_keeps_its_name(tmp_path: Path) -> None:
    """As containers see them: whichever is mounted there now."""
    here, one, other = tmp_path / "run", tmp_path / "one", tmp_path / "other"

    def name_of(mounted: Path) -> str:
        mounted.mkdir(exist_ok=True)
        mounted.rename(here)
        found = node_id_of(here, "host")
        here.rename(mounted)
        return found

    first, second = name_of(one), name_of(other)
    assert first != second and (name_of(one), name_of(other)) == (first, second)
    shutil.copytree(one, tmp_path / "copy")
    third = name_of(tmp_path / "copy")
    assert third not in (first, second) and name_of(tmp_path / "copy") == third and name_of(one) == first


@pytest.mark.parametrize("kept", ["", "ab", "ab cd ef", "\x00" * 5000, "é 1"])
def test_a_place_whose_file_is_damaged_is_a_new_one_and_kept(tmp_path: Path, kept: str) -> None:
    (tmp_path / PLACE_FILE).write_text(kept)
    assert node_id_of(tmp_path, "host") == node_id_of(tmp_path, "host")


def test_where_nothing_can_be_kept_no_two_starts_are_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / PLACE_FILE).mkdir()  # whoever may write anywhere cannot write there
    assert node_id_of(tmp_path, "host") != node_id_of(tmp_path, "host")


# ---- files of events ----


def event(step: int, text: str = "text", rank: int = 0) -> JobEvent:
    return JobEvent(time=float(step), generation=0, rank=rank, step=step, kind="kind", text=text, details={"a": step})


def append(path: Path, *lines: str) -> None:
    with open(path, "a") as file:
        file.writelines(lines)


def test_new_events_are_read_once_and_a_line_without_an_end_when_it_has_one(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, most_bytes=1 << 16)
    append(tmp_path / "events-0.jsonl", event(1).to_json() + "\n", event(3).to_json()[:9])
    append(tmp_path / "events-agent.jsonl", event(2).to_json() + "\n", "no event\n")
    assert [each.step for each in files.look().events] == [1, 2]
    append(tmp_path / "events-0.jsonl", event(3).to_json()[9:] + "\n")
    assert [each.step for each in files.look().events] == [3]
    assert files.look().events == ()
    (tmp_path / "events-0.jsonl").write_text(event(9).to_json() + "\n")  # it was begun anew, and is shorter
    assert [each.step for each in files.look().events] == [9]


def test_of_too_many_new_events_the_last_are_read_and_the_others_counted(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, most_bytes=2000)
    files.skip()
    append(tmp_path / "events-0.jsonl", *(event(number).to_json() + "\n" for number in range(1, 30_001)))
    found = files.look()
    assert found.events[-1].step == 30_000
    assert found.num_dropped + len(found.events) == 30_000
    assert files.look().events == ()


def test_of_a_hole_of_a_terabyte_nothing_is_read(tmp_path: Path) -> None:
    """Which a file is that somebody has made large without writing: reading through it would take an hour."""
    files = EventFiles(tmp_path, most_bytes=2000)
    (tmp_path / "events-0.jsonl").write_text("1\n2\n")
    os.truncate(tmp_path / "events-0.jsonl", 1 << 40)
    assert files.look().num_dropped == 2
    append(tmp_path / "events-0.jsonl", "\n", event(7).to_json() + "\n")
    assert [each.step for each in files.look().events] == [7]


# ---- with a master ----


def test_a_node_joins_says_what_it_is_and_leaves_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "hardware.json").write_text('{"cpu": "of the test"}')
    with ScriptedMaster() as master:
        with linked(tmp_path, master.place) as node:
            join = master.wait_for("Join")
            master.wait_for("Beat")
            until(lambda: node.told() or None)
            record = MasterRecord.from_json((tmp_path / MASTER_FILE).read_text())
        leave = master.wait_for("Leave")
    assert (join.job, join.protocol, join.oldest_protocol, join.job_id, join.epoch) == ("job", 1, 1, "", 0)
    assert (join.node.node_id, join.node.incarnation, join.node.host, join.node.pid) == ("node", 1, "here", 7)
    assert json.loads(join.hardware) == {"cpu": "of the test"}
    assert (leave.node_id, leave.incarnation, leave.reason) == ("node", 1, "the test is over")
    assert record.address == str(master.place.address) and (record.job_id, record.epoch) == ("job-1", 1)
    assert node.told() == ["master-joined"]


def test_a_config_that_is_pushed_is_in_the_file_and_acknowledged_at_once(tmp_path: Path) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.beat_seconds = 60.0
        master.wait_for("Watch")
        began = time.monotonic()
        master.push(4, config(4, x=1))
        beat = master.wait_for("Beat", lambda request: request.held.version == 4)
        assert time.monotonic() - began < 5.0
        assert in_file(node) == 4
        assert beat.held.digest == ElasticConfig.parse(config(4, x=1).encode()).digest and beat.held.text == ""
        master.push(3, config(3, x=2))
        master.push(5, config(5, x=3))
        master.wait_for("Beat", lambda request: request.held.version == 5)
        assert in_file(node) == 5


def test_a_beat_that_is_asked_for_while_one_is_made_comes_after_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = EventFiles.look
    asks: list[None] = []

    def look_and_ask(events: EventFiles) -> Any:
        if asks:
            asks.pop()
            node.link.hurry()
        return look(events)

    monkeypatch.setattr(EventFiles, "look", look_and_ask)
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.beat_seconds = 60.0
        master.wait_for("Watch")
        until(lambda: len(master.called["Beat"]) > 0)
        num_before = len(master.called["Beat"])
        asks.append(None)
        node.link.hurry()
        master.wait_for("Beat", after=num_before + 1)


def test_a_push_that_was_lost_is_made_good_by_the_answer_to_a_beat(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        master.answers["Watch"] = Refusal(CODES.UNAVAILABLE)
        master.configs = [(2, config(2, x=1))]
        with linked(tmp_path, master.place) as node:
            master.wait_for("Beat", lambda request: request.held.version == 2)
            assert in_file(node) == 2


def test_a_stream_that_the_master_ends_is_asked_for_anew_with_the_version_that_is_held(tmp_path: Path) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place):
        master.wait_for("Watch")
        master.push(1, config(1))
        master.wait_for("Beat", lambda request: request.held.version == 1)
        master.end_streams()
        assert master.wait_for("Watch", after=1).config_version == 1
        master.push(2, config(2))
        master.wait_for("Beat", lambda request: request.held.version == 2)
        assert len(master.called["Join"]) == 1


def test_a_node_tells_of_its_own_newer_config_and_gives_the_text_when_asked(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        wanted = threading.Event()
        wanted.set()

        def answer(request: pb.BeatRequest) -> pb.BeatReply:
            reply = pb.BeatReply(epoch=1, lease_seconds=5.0, beat_seconds=60.0)
            reply.wants_config = request.held.version > 0 and not request.held.text
            return reply

        master.answers["Beat"] = answer
        with linked(tmp_path, master.place) as node:
            master.wait_for("Beat")
            node.tuner.set(ConfigEdit({"user.x": 1}, reason="here"))
            told = master.wait_for("Beat", lambda request: request.held.version == 1)
            assert told.held.text == ""
            given = master.wait_for("Beat", lambda request: request.held.text != "")
            assert ElasticConfig.parse(given.held.text.encode()).digest == told.held.digest


def test_a_master_that_goes_on_asking_for_what_it_was_given_is_not_answered_without_end(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        master.answers["Beat"] = lambda request: pb.BeatReply(
            epoch=1, lease_seconds=5.0, beat_seconds=0.5, wants_config=True, wants_hardware=True
        )
        with linked(tmp_path, master.place) as node:
            node.tuner.set(ConfigEdit({"user.x": 1}, reason="here"))
            master.wait_for("Beat", lambda request: request.held.text != "")
            seen = len(master.called["Beat"])
            began = time.monotonic()
            master.wait_for("Beat", after=seen + 2)
            assert time.monotonic() - began > 0.4


def test_before_nodes_have_met_no_config_is_told_of_and_none_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config(7))
    with ScriptedMaster() as master:
        master.configs = [(3, config(3))]
        with linked(tmp_path, master.place, begun=False) as node:
            master.wait_for("Beat", after=3)
            assert {each.held.version for each in master.called["Beat"]} == {0} and not master.called["Watch"]
            node.link.begin_configs()
            master.wait_for("Beat", lambda request: request.held.version == 7)
            assert in_file(node) == 7


def test_a_config_that_is_refused_here_is_a_trouble_that_the_master_hears_of(tmp_path: Path) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Watch")
        master.push(2, '{"version": 2, "typo": 1}')
        master.wait_for("Beat", lambda request: "the config of the master is refused here" in request.trouble)
        assert in_file(node) == 0


def test_no_master_at_the_start_is_said_once_and_it_is_found_when_it_comes(tmp_path: Path) -> None:
    port = free_port()
    with linked(tmp_path, MasterPlace(address=Address(host="127.0.0.1", port=port))) as node:
        until(lambda: node.told() or None)
        assert "training goes on without it" in node.text_of("master-absent")
        node.journal.tell("worked", "something happened meanwhile")
        with ScriptedMaster(port=port) as master:
            beat = master.wait_for("Beat")
            assert [each.kind for each in beat.events] == ["master-absent", "worked"]
            until(lambda: len(node.told()) > 1 or None)
            told = node.told()  # while this master is there: its end may be told of, too
    assert told == ["master-absent", "master-joined"]


def test_a_master_that_is_lost_is_said_once_and_so_is_that_it_is_back_with_nothing_lost(tmp_path: Path) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Watch")
        until(lambda: node.told() or None)
        master.stop()
        until(lambda: "master-lost" in node.told() or None)
        node.journal.tell("worked", "something happened meanwhile")
        with ScriptedMaster(port=master.port, epoch=2) as again:
            join = again.wait_for("Join")
            again.wait_for("Beat", lambda request: "worked" in [each.kind for each in request.events])
            again.wait_for("Watch")
            until(lambda: "master-back" in node.told() or None)
            told = node.told()  # while this master is there: its end may be told of, too
    assert (join.job_id, join.epoch) == ("job-1", 1)
    assert told == ["master-joined", "master-lost", "master-back"]


@pytest.mark.parametrize("what", ["epoch", "job"])
def test_another_master_at_the_address_counts_as_none(tmp_path: Path, what: str) -> None:
    with ScriptedMaster(epoch=5) as master, linked(tmp_path, master.place) as node:
        master.wait_for("Beat")
        until(lambda: node.told() or None)
        master.stop()
        with ScriptedMaster(port=master.port, epoch=4 if what == "epoch" else 6) as other:
            other.job_id = "job-1" if what == "epoch" else "job-2"
            other.wait_for("Join")
            other.wait_for("Join", after=1)
            assert not other.called["Beat"]
    assert node.told() == ["master-joined", "master-lost"]


def test_a_node_that_the_master_has_forgotten_joins_again_and_nobody_is_told(tmp_path: Path) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Beat")
        until(lambda: node.told() or None)
        master.answers["Beat"] = Refusal(CODES.NOT_FOUND)
        master.wait_for("Join", after=1)
        del master.answers["Beat"]
        master.wait_for("Beat", after=len(master.called["Beat"]))
    assert node.told() == ["master-joined"]


@pytest.mark.parametrize("call", ["Join", "Beat"])
def test_a_call_that_is_one_too_many_for_the_master_is_made_again(tmp_path: Path, call: str) -> None:
    """gRPC cancels it, as where thousands of agents come back at once."""
    with ScriptedMaster() as master:
        master.answers[call] = Refusal(CODES.CANCELLED)
        with linked(tmp_path, master.place) as node:
            master.wait_for(call)
            del master.answers[call]
            node.journal.tell("worked", "something happened meanwhile")
            master.wait_for("Beat", lambda request: "worked" in [each.kind for each in request.events])


@pytest.mark.parametrize("call", ["Join", "Beat", "Watch"])
def test_a_fenced_node_says_so_once_and_speaks_no_more(tmp_path: Path, call: str) -> None:
    with ScriptedMaster() as master:
        master.answers[call] = Refusal(CODES.ABORTED, "incarnation 9 has joined")
        with linked(tmp_path, master.place) as node:
            until(lambda: "master-fenced" in node.told() or None)
            number = len(master.called["Join"])
            node.link._thread.join(20)
            assert not node.link._thread.is_alive()
        assert len(master.called["Join"]) == number and not master.called["Leave"]
    assert "incarnation 9 has joined; this agent speaks with the master no more, and training goes on" in node.text_of(
        "master-fenced"
    )


def test_a_master_that_refuses_the_first_word_can_keep_a_node_from_starting(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        master.answers["Join"] = Refusal(CODES.FAILED_PRECONDITION, "this machine has no memory left")
        with linked(tmp_path, master.place) as node:
            assert "has no memory left" in (node.link.refusal_within(20.0) or "")


@pytest.mark.parametrize("code", [CODES.UNAUTHENTICATED, CODES.RESOURCE_EXHAUSTED, CODES.UNAVAILABLE, CODES.CANCELLED])
def test_other_refusals_keep_no_node_from_starting(tmp_path: Path, code: grpc.StatusCode) -> None:
    with ScriptedMaster() as master:
        master.answers["Join"] = Refusal(code)
        with linked(tmp_path, master.place) as node:
            assert node.link.refusal_within(20.0) is None
            assert node.told() == ["master-refused" if code is CODES.UNAUTHENTICATED else "master-absent"]


@pytest.mark.parametrize("code", [CODES.INVALID_ARGUMENT, CODES.UNKNOWN])
def test_what_a_master_cannot_take_is_not_sent_a_second_time(tmp_path: Path, code: grpc.StatusCode) -> None:
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Beat")
        seen = len(master.called["Beat"])
        master.answers["Beat"] = lambda request: _refuse_odd(master, request, code)
        node.journal.tell("odd", "which the master does not like")
        master.wait_for("Beat", lambda request: any(each.kind == "odd" for each in request.events), after=seen)
        until(lambda: "master-joined" not in node.told()[-1:] or None)
    assert sum(each.kind == "odd" for beat in master.called["Beat"] for each in beat.events) == 1


def _refuse_odd(master: ScriptedMaster, request: pb.BeatRequest, code: grpc.StatusCode) -> pb.BeatReply | Refusal:
    if any(each.kind == "odd" for each in request.events):
        return Refusal(code, "it is odd")
    return master._beaten(request)


class FailsOnce(GivenMaster):
    """A master that something is amiss with that nobody has thought of."""

    num_asked = 0

    def find(self) -> FoundMaster | None:
        self.num_asked += 1
        if self.num_asked == 1:
            raise RuntimeError("can't start new thread")
        return super().find()


def test_what_nobody_has_thought_of_ends_no_link(tmp_path: Path) -> None:
    with ScriptedMaster() as master:
        node = LinkedNode(tmp_path, master.place, finder=FailsOnce(master.place))
        node.link.start()
        try:
            master.wait_for("Beat")
        finally:
            node.link.close("the test is over")


def test_closing_takes_no_longer_than_a_moment_while_the_master_hangs(tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedMaster() as master:
        with linked(tmp_path, master.place):
            master.wait_for("Beat")

            def hang(request: pb.BeatRequest) -> pb.BeatReply:
                release.wait(20)
                return pb.BeatReply(epoch=1)

            master.answers["Beat"] = hang
            master.wait_for("Beat", after=len(master.called["Beat"]))
            began = time.monotonic()
        seconds = time.monotonic() - began
        release.set()
    assert seconds < 6.0


def test_a_master_that_hangs_is_lost_long_before_its_lease_and_training_would_not_notice(tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Beat")
        until(lambda: node.told() or None)

        def hang(request: Any) -> pb.BeatReply:
            release.wait(20)
            return pb.BeatReply(epoch=1)

        master.answers["Beat"] = hang
        until(lambda: "master-lost" in node.told() or None)
        began = time.monotonic()
        node.journal.tell("worked", "the journal waits for nobody")
        assert time.monotonic() - began < 1.0
        del master.answers["Beat"]
        release.set()
        until(lambda: "master-back" in node.told() or None)


# ---- what a node tells of itself ----


def window(rank: int, end: float, step: int) -> StepWindow:
    return StepWindow(
        begin=end - 1.0, end=end, rank=rank, world_size=2, restart=0, step=step, num_steps=10, config_version=3,
        config_revision=0, seconds={"forward": 0.5, "backward": 0.5}, step_seconds=(0.1, 0.1, 0.1, 0.1),
    )  # fmt: skip


def write_workers(run_dir: Path, **given: Any) -> None:
    worker = WorkerSeen(
        local_rank=0, rank=0, pid=os.getpid(), start_ticks=1, state="running", step=12, steps_per_second=2.5,
        memory_bytes=100, gpu_memory_bytes=55, activity="forward", **given,
    )  # fmt: skip
    record = WorkersRecord(time=time.time(), restart=0, membership_version=1, workers=(worker,))
    (run_dir / WORKERS_FILE).write_text(record.to_json())


def write_metrics(run_dir: Path, *, pid: int, **measures: Any) -> None:
    metrics = RankMetrics(
        time=time.time(), job="job", generation=0, rank=0, world_size=1, host="here", pid=pid, step=10,
        config_version=3, config_revision=1, agree_every_steps=1, measures=Measures(**measures),
    )  # fmt: skip
    (run_dir / "metrics-0.json").write_text(metrics.to_json())


def test_a_beat_tells_of_workers_their_metrics_and_windows_once_and_of_the_membership_when_it_changes(
    tmp_path: Path,
) -> None:
    write_workers(tmp_path)
    write_metrics(tmp_path, pid=os.getpid(), samples_per_second=80.0, shares={"forward": 0.5}, accelerator_bytes=44)
    append(tmp_path / "profile-0.jsonl", window(0, 10.0, 10).to_json() + "\n", window(0, 11.0, 20).to_json() + "\n")
    plan = MembershipPlan(
        version=2, nodes=(NodeShare(node_id="n", host="h", first_rank=0, num_workers=1),), reason="why", time=5.0
    )
    (tmp_path / MEMBERSHIP_FILE).write_text(plan.to_json())
    with ScriptedMaster() as master, linked(tmp_path, master.place):
        first = master.wait_for("Beat")
        (worker,) = first.workers
        assert (worker.step, worker.steps_per_second, worker.samples_per_second) == (12, 2.5, 80.0)
        assert (worker.memory_bytes, worker.accelerator_bytes, worker.config_version) == (100, 55, 3)
        assert dict(worker.shares) == {"forward": 0.5} and not worker.HasField("cpu_percent")
        assert [each.step for each in worker.windows] == [10, 20]
        assert first.membership.version == 2 and first.membership.nodes[0].num_workers == 1
        second = master.wait_for("Beat", after=1)
        assert not second.workers[0].windows and not second.HasField("membership")
        append(tmp_path / "profile-0.jsonl", window(0, 12.0, 30).to_json() + "\n")
        later = master.wait_for("Beat", lambda request: any(each.windows for each in request.workers), after=1)
        assert [each.step for each in later.workers[0].windows] == [30]


def test_samples_and_tokens_per_second_of_a_beat_are_at_the_steps_per_second_beside_them(tmp_path: Path) -> None:
    write_workers(tmp_path)
    write_metrics(tmp_path, pid=os.getpid(), steps_per_second=5.0, samples_per_second=320.0, tokens_per_second=640.0)
    with ScriptedMaster() as master, linked(tmp_path, master.place):
        (worker,) = master.wait_for("Beat").workers
        assert (worker.steps_per_second, worker.samples_per_second, worker.tokens_per_second) == (2.5, 160.0, 320.0)


def test_windows_of_a_beat_that_was_not_answered_are_told_again(tmp_path: Path) -> None:
    write_workers(tmp_path)
    append(tmp_path / "profile-0.jsonl", window(0, 10.0, 10).to_json() + "\n")
    with ScriptedMaster() as master:
        master.answers["Beat"] = Refusal(CODES.UNAVAILABLE)
        with linked(tmp_path, master.place):
            master.wait_for("Beat")
            del master.answers["Beat"]
            again = master.wait_for("Beat", after=1)
            assert [each.step for each in again.workers[0].windows] == [10]


def test_metrics_of_a_process_that_is_gone_are_not_taken_for_the_workers(tmp_path: Path) -> None:
    write_workers(tmp_path)
    write_metrics(tmp_path, pid=(1 << 22) + 1, samples_per_second=80.0)
    with ScriptedMaster() as master, linked(tmp_path, master.place):
        (worker,) = master.wait_for("Beat").workers
        assert not worker.HasField("samples_per_second") and not worker.HasField("config_version")


@pytest.mark.parametrize(
    "files",
    [
        {WORKERS_FILE: "{", MEMBERSHIP_FILE: "[]", "metrics-0.json": "\x00", "profile-0.jsonl": "x\ny\n"},
        {WORKERS_FILE: "", "events-0.jsonl": '{"a": 1}\n\n\n'},
    ],
)
def test_damaged_files_are_left_out_of_what_is_told(tmp_path: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with ScriptedMaster() as master, linked(tmp_path, master.place):
        beat = master.wait_for("Beat", after=1)
        assert not beat.workers and not beat.HasField("membership")


def test_events_of_ranks_are_told_with_those_of_the_agent_and_those_of_before_are_not(tmp_path: Path) -> None:
    append(tmp_path / "events-0.jsonl", event(1, "of before").to_json() + "\n")
    with ScriptedMaster() as master, linked(tmp_path, master.place) as node:
        master.wait_for("Beat")
        append(tmp_path / "events-0.jsonl", event(2, "of a rank").to_json() + "\n")
        node.journal.tell("kind", "of the agent, with \ud800 in it", is_bad=True, number=3)
        has = {"of a rank": (0, 2), "of the agent, with ? in it": (-1, -1)}
        for text, (rank, step) in has.items():
            beat = master.wait_for("Beat", _has(text))
            (found,) = [each for each in beat.events if each.text == text]
            assert (found.rank, found.step, found.node_id) == (rank, step, "node")
    told = [each.text for beat in master.called["Beat"] for each in beat.events]
    assert "of before" not in told and len(told) == len(set(told))


def _has(text: str) -> Callable[[pb.BeatRequest], bool]:
    return lambda request: text in [each.text for each in request.events]


def test_many_events_while_the_master_is_away_take_no_more_memory_than_there_is_room(tmp_path: Path) -> None:
    port = free_port()
    with linked(tmp_path, MasterPlace(address=Address(host="127.0.0.1", port=port))) as node:
        for number in range(3000):
            node.link._note(event(number))
        assert len(node.link._outbox) == 1000
        with ScriptedMaster(port=port) as master:
            beat = master.wait_for("Beat")
            assert beat.num_events_dropped >= 2000 and len(beat.events) == 200
            master.wait_for("Beat", lambda request: any(each.step == 2999 for each in request.events))
            assert sum(each.num_events_dropped for each in master.called["Beat"]) == beat.num_events_dropped


def test_events_that_are_too_many_for_one_beat_come_in_several_and_none_is_lost(tmp_path: Path) -> None:
    port = free_port()
    with linked(tmp_path, MasterPlace(address=Address(host="127.0.0.1", port=port))) as node:
        for number in range(300):
            node.link._note(replace(event(number, "\u20ac" * 2_000), details={"long": "x" * 3_900}))
        with ScriptedMaster(port=port) as master:
            master.wait_for("Beat", lambda request: any(each.step == 299 for each in request.events))
            beats = list(master.called["Beat"])
    told = [each.step for beat in beats for each in beat.events if each.kind == event(0).kind]
    assert told == list(range(300)) and sum(beat.num_events_dropped for beat in beats) == 0
    assert max(beat.ByteSize() for beat in beats) <= MOST_BEAT_BYTES
    assert len(beats[0].events) > 60, "and no more beats than that takes"


def test_what_has_no_room_in_a_beat_comes_in_the_next(tmp_path: Path) -> None:
    write_workers(tmp_path)
    append(tmp_path / "profile-0.jsonl", window(0, 10.0, 10).to_json() + "\n", window(0, 11.0, 20).to_json() + "\n")
    (tmp_path / "hardware.json").write_text("x" * 200_000)
    report = NodeReporter(tmp_path, since=Since(0.0))
    small, full, later = (pb.BeatRequest(held=pb.ConfigHeld(text="x" * num)) for num in (1_000, 0, 0))
    report.fill(small, 1_200)
    assert (len(small.workers), len(small.workers[0].windows), small.hardware) == (1, 0, "")
    assert small.ByteSize() <= 1_200
    report.confirm()
    report.fill(full, MOST_BEAT_BYTES)
    assert (len(full.workers[0].windows), len(full.hardware)) == (2, 200_000)
    report.confirm()
    report.fill(later, MOST_BEAT_BYTES)
    assert (len(later.workers[0].windows), later.hardware) == (0, "")
