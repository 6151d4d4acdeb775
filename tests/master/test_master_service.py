"""A master, spoken to over gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.master.wire import master_pb2 as wire
from tests.support.masters import Caller, MasterThread, join_request, master_on_thread, until

Code = grpc.StatusCode


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterThread]:
    yield from master_on_thread(tmp_path, "--lease-seconds", "2", "--beat-seconds", "1", "--acknowledge-seconds", "0.5")


@pytest.fixture
def caller(master: MasterThread) -> Caller:
    return master.caller()


# --- who may call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "a-token-of-tests-alon", "a-token-of-tests-alone2", "x" * 5_000])
def test_without_the_token_nothing_is_answered(master: MasterThread, token: str | None) -> None:
    stranger = master.caller(token)
    for method in ("GetStatus", "Join", "Beat", "Watch", "Leave", "ReadEvents", "SetConfig", "UndoConfig"):
        code, words = stranger.refusal(method)
        assert code == Code.UNAUTHENTICATED and "--token-file" in words and "a-token-of" not in words
    assert not master.caller().status().nodes


def test_who_calls_too_often_is_told_to_wait_and_others_are_not(master: MasterThread, caller: Caller) -> None:
    codes = set()
    for _ in range(2_000):
        try:
            caller("GetStatus")
        except grpc.RpcError as error:
            codes.add(error.code())
            break
    assert codes == {Code.RESOURCE_EXHAUSTED}
    assert master.caller().status().epoch == 1


def test_the_standard_health_service_answers_anybody(master: MasterThread) -> None:
    check = master.channel().unary_unary("/grpc.health.v1.Health/Check")
    serving = b"\x08\x01"
    assert check(b"", timeout=10) == serving
    name = b"elastic_ext.v1.Master"
    assert check(b"\x0a" + bytes([len(name)]) + name, timeout=10) == serving
    for bad in (b"\x0a\x03foo", b"\x0a\x7f", b"\xff\xff", b"\x0a"):
        with pytest.raises(grpc.RpcError) as refused:
            check(bad, timeout=10)
        assert refused.value.code() == Code.NOT_FOUND
    watch = master.channel().unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=30)
    assert next(watch) == serving
    master.end()
    assert list(watch) == [b"\x08\x02"]


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_agent_that_joins_is_told_whom_it_speaks_with(caller: Caller) -> None:
    first = caller.join()
    assert (first.protocol, first.job, first.epoch, first.lease_seconds) == (1, "j", 1, 2.0)
    assert caller.join("b").job_id == first.job_id
    assert caller.states() == {"a": "live", "b": "live"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"protocol": 9, "oldest_protocol": 2}, "speaks protocol 2 to 9, this master"),
        ({"job": "another"}, "this master is of job 'j', not of 'another'"),
        ({"job_id": "0" * 32}, "kept its state elsewhere"),
        ({"epoch": 5}, "has met a later master \\(epoch 5\\)"),
    ],
)
def test_who_does_not_belong_here_is_told_so(caller: Caller, given: dict[str, Any], words: str) -> None:
    caller.join("b")
    code, found = caller.refusal("Join", join_request(**given))
    assert code == Code.FAILED_PRECONDITION
    assert re.search(words, found), found


def test_names_that_are_none_are_refused(caller: Caller) -> None:
    for request in (join_request(""), join_request("x" * 300), join_request("a\nb"), join_request(job="")):
        code, words = caller.refusal("Join", request)
        assert code == Code.INVALID_ARGUMENT and "printable characters" in words


def test_who_has_not_joined_is_told_to(caller: Caller) -> None:
    for method in ("Beat", "Watch", "Leave"):
        code, words = caller.refusal(method)
        assert code == Code.NOT_FOUND and "join first" in words


def test_of_two_agents_with_one_id_the_later_one_is_heard(caller: Caller) -> None:
    caller.join(incarnation=5)
    caller.join(incarnation=6)
    code, words = caller.refusal("Beat", wire.BeatRequest(node_id="a", incarnation=5))
    assert code == Code.ABORTED and "is the later one" in words
    assert caller.refusal("Join", join_request(incarnation=5))[0] == Code.ABORTED
    assert caller.beat(incarnation=6).epoch == 1


def test_a_silent_node_is_lost_and_one_that_leaves_is_not(caller: Caller) -> None:
    for node_id in ("a", "b", "c"):
        caller.join(node_id)
    caller("Leave", wire.LeaveRequest(node_id="c", incarnation=1, reason="all is done"))

    def has_lost() -> bool:
        caller.beat("b")
        return caller.states() == {"a": "lost", "b": "live", "c": "left"}

    until(has_lost)
    texts = [each.text for each in caller("ReadEvents")]
    assert any("node c has left: all is done" in text for text in texts)
    assert any("counts as lost" in text for text in texts)
    assert "node a on h is lost" in caller.status().troubles
    caller.beat("a")
    assert caller.states()["a"] == "live"


def test_membership_has_one_version_after_another_here(caller: Caller) -> None:
    def told(version: int, *nodes: str) -> wire.Membership:
        shares = [
            wire.NodeShare(node_id=node_id, host="h", first_rank=2 * place, num_workers=2)
            for place, node_id in enumerate(nodes)
        ]
        return wire.Membership(version=version, nodes=shares, reason="they met")

    def version() -> int:
        return caller.status().membership.version

    caller.join()
    caller.beat(membership=told(1, "a-1", "b-1"))
    assert version() == 1
    caller.beat(membership=told(1, "a-1", "b-1"))
    assert version() == 1, "others tell of it too"
    caller.beat(membership=told(2, "a-1"))
    caller.beat(membership=told(1, "a-1", "b-1"))
    assert version() == 2, "what is older is no news"
    caller.beat(membership=told(1, "a-2", "b-2"))
    assert version() == 3, "the job was started again"
    assert any("2 nodes, 4 ranks: they met" in each.text for each in caller("ReadEvents"))


# --- configs ----------------------------------------------------------------------------------------------------------


def test_a_config_is_pushed_to_all_who_watch_and_counted_where_it_is_held(caller: Caller) -> None:
    streams = {}
    for node_id in ("a", "b", "c"):
        caller.join(node_id)
        streams[node_id] = caller.watch(node_id)
    written = caller.set(0.1, reason="a try")
    assert written.version == 1 and written.before == ""
    for stream in streams.values():
        (push,) = until(lambda stream=stream: stream.heard)  # type: ignore[misc]
        assert (push.version, push.epoch) == (1, 1)
        assert ElasticConfig.parse(push.text.encode()).optimizer.learning_rate == 0.1
    digest = ElasticConfig.parse(written.text.encode()).digest
    for node_id in ("a", "b"):
        caller.beat(node_id, held=wire.ConfigHeld(version=1, digest=digest))
    config = caller.status().config
    assert (config.version, config.num_holding, config.num_nodes, config.author) == (1, 2, 3, "person")
    end = until(lambda: streams["c"].end)
    assert end[0] == Code.DEADLINE_EXCEEDED and "has not said since that it holds it" in end[1]
    assert streams["a"].end is None
    for stream in streams.values():
        stream.cancel()


def test_of_many_nodes_each_is_told_to_spread_its_word(caller: Caller) -> None:
    for number in range(150):
        caller.join(f"node {number}")
    stream = caller.watch("node 0")
    caller.set(0.1)
    (push,) = until(lambda: stream.heard)
    assert push.acknowledge_within_seconds == 0.15
    stream.cancel()


def test_who_begins_to_watch_is_sent_what_it_lacks_at_once(caller: Caller) -> None:
    caller.join()
    caller.set(0.1)
    caller.set(0.2)
    stream = caller.watch(config_version=1)
    assert until(lambda: stream.heard)[0].version == 2
    later = caller.watch(config_version=2)
    assert until(lambda: stream.end)[0] == Code.OK, "a node has one stream"
    caller.set(0.3)
    assert until(lambda: later.heard)[0].version == 3 and len(stream.heard) == 1
    later.cancel()


def test_what_a_push_has_missed_comes_with_the_next_beat(caller: Caller) -> None:
    caller.join()
    caller.set(0.1)
    reply = caller.beat()
    assert ElasticConfig.parse(reply.config.encode()).version == reply.config_version == 1
    assert caller.beat(held=wire.ConfigHeld(version=1, digest="x")).config == ""


def test_a_newer_version_in_a_nodes_file_is_asked_for_and_goes_to_the_others(caller: Caller) -> None:
    caller.join("a")
    caller.join("b")
    stream = caller.watch("b")
    config = ElasticConfig.from_values({"optimizer.learning_rate": 0.5}, version=4, reason="by hand")
    assert caller.beat("a", held=wire.ConfigHeld(version=4, digest=config.digest)).wants_config
    caller.beat("a", held=wire.ConfigHeld(version=4, digest=config.digest, text=config.to_json()))
    assert until(lambda: stream.heard)[0].version == 4
    entry = caller("GetConfigs").entries[-1]
    assert (entry.version, entry.author, entry.node_id) == (4, "node", "a")
    assert caller.set(0.6).version == 5
    stream.cancel()


def test_a_nodes_file_that_is_refused_here_is_told_of_and_not_asked_for_again(caller: Caller) -> None:
    caller.join()
    bad = wire.ConfigHeld(version=4, digest="x")
    assert caller.beat(held=bad).wants_config
    caller.beat(held=wire.ConfigHeld(version=4, digest="x", text='{"version": 4, "nonsense": 1}'))
    assert not caller.beat(held=bad).wants_config
    assert any("the master refuses the config in its file" in each for each in caller.status().troubles)
    assert caller.status().config.version == 0
    assert caller.beat(held=wire.ConfigHeld(version=5, digest="y")).wants_config
    assert not caller.status().troubles


def test_a_nodes_file_leaves_room_for_later_versions(caller: Caller) -> None:
    caller.join()
    for version in (2**53 - 1, 2**52 + 1):
        text = json.dumps({"version": version})
        caller.beat(held=wire.ConfigHeld(version=version, digest=str(version), text=text))
        assert "so that others can come after it" in caller.status().nodes[0].troubles[0]
    assert caller.status().config.version == 0 and caller.set(0.1).version == 1


def test_what_a_person_may_not_write_is_refused_key_by_key(caller: Caller) -> None:
    for changes, words in [
        ({"optimizer.learning_rate": "-1"}, "optimizer.learning_rate is -1; allowed: a number > 0"),
        ({"optimizer.learning_rat": "1"}, "learning_rate"),
        ({"optimizer.learning_rate": "{"}, "is no JSON"),
        ({f"user.k{number}": "1" for number in range(1_001)}, "more than 1000 keys"),
    ]:
        code, found = caller.refusal("SetConfig", wire.SetConfigRequest(changes=changes))
        assert code == Code.INVALID_ARGUMENT and words in found
    assert caller.refusal("SetConfig", wire.SetConfigRequest(remove=["optimizer.learning_rate"]))[0] == (
        Code.INVALID_ARGUMENT
    )
    assert caller.refusal("UndoConfig")[0] == Code.INVALID_ARGUMENT
    caller.join()
    assert caller.refusal("SetConfig", wire.SetConfigRequest(job="k"))[0] == Code.FAILED_PRECONDITION
    assert caller.status().config.version == 0


def test_history_and_undo(caller: Caller) -> None:
    caller.set(0.1, reason="first")
    second = caller.set(0.2, at_step=100)
    assert json.loads(second.text)["apply_at_step"] == 100 and json.loads(second.before)["version"] == 1
    undone = caller("UndoConfig")
    assert json.loads(undone.text)["optimizer"]["learning_rate"] == 0.1
    entries = caller("GetConfigs").entries
    assert [each.version for each in entries] == [1, 2, 3]
    assert entries[2].HasField("restores") and entries[2].restores == 1


def test_many_who_write_at_once_get_versions_of_their_own(master: MasterThread) -> None:
    callers = [master.caller() for _ in range(8)]
    pending = [
        caller.future("SetConfig", wire.SetConfigRequest(changes={"user.from": str(number)}))
        for number, caller in enumerate(callers)
        for _ in range(5)
    ]
    assert sorted(each.result().version for each in pending) == list(range(1, 41))


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_are_numbered_and_followed(caller: Caller) -> None:
    caller.join()
    heard = [wire.JobEvent(time=5.0, rank=1, step=7, kind="note", text=f"event {number}") for number in range(3)]
    caller.beat(events=heard)
    found = list(caller("ReadEvents"))
    assert [each.number for each in found] == list(range(1, len(found) + 1))
    assert [each.text for each in found][-3:] == ["event 0", "event 1", "event 2"]
    assert found[-1].node_id == "a" and found[-1].rank == 1 and found[-1].step == 7
    assert [each.text for each in caller("ReadEvents", wire.ReadEventsRequest(most=1))] == ["event 2"]
    follower = caller("ReadEvents", wire.ReadEventsRequest(after=found[-1].number, follow=True), timeout=60)
    caller.beat(events=[wire.JobEvent(kind="note", text="later")])
    assert next(follower).text == "later"
    follower.cancel()


def test_events_that_come_again_as_an_answer_was_lost_are_taken_once(caller: Caller) -> None:
    def told() -> list[str]:
        return [each.text for each in caller("ReadEvents") if each.kind == "note"]

    caller.join()
    events = [wire.JobEvent(kind="note", text=str(number)) for number in range(1, 6)]
    caller.beat(events=events[:2], first_event=1)
    caller.beat(events=events[:4], first_event=1)
    caller.join()
    caller.beat(events=events[2:], first_event=3)
    assert told() == ["1", "2", "3", "4", "5"]
    caller.beat(events=events[4:], first_event=9)
    assert told()[5:] == ["5"], "those between were dropped by the agent"


def test_dropped_events_that_a_beat_tells_of_again_are_told_of_once(caller: Caller) -> None:
    def told() -> list[str]:
        return [each.text.split()[3] for each in caller("ReadEvents") if each.kind == "events-dropped"]

    caller.join()
    events = [wire.JobEvent(kind="note", text=str(number)) for number in range(1, 6)]
    caller.beat(events=events[:2], first_event=1, num_events_dropped=7)
    caller.beat(events=events[:2], first_event=1, num_events_dropped=7)
    caller.join()
    caller.beat(events=events[:4], first_event=1, num_events_dropped=9)
    caller.beat(events=events[4:], first_event=5, num_events_dropped=3)
    assert told() == ["7", "2", "3"], "the last one follows a beat that was answered"


def test_a_node_that_tells_of_too_much_is_cut_short_and_counted(caller: Caller) -> None:
    caller.join("a")
    caller.join("b")
    for _ in range(10):
        caller.beat("a", events=[wire.JobEvent(kind="noise", text="x" * 5_000)] * 200)
    caller.beat("b", events=[wire.JobEvent(kind="note", text="heard all the same")])
    dropped = until(lambda: [each for each in caller("ReadEvents") if each.kind == "events-dropped"])
    noise = [each for each in caller("ReadEvents") if each.kind == "noise"]
    assert 200 <= len(noise) < 300 and "sends too many" in dropped[0].text
    assert all(len(each.text) == 4_000 for each in noise)
    assert any(each.text == "heard all the same" for each in caller("ReadEvents"))
