"""What of a job is stored: each change once, again where it could not be written, and nothing of what is gone."""

from __future__ import annotations

from pathlib import Path

from elastic_ext.master.events import HeardRecord
from elastic_ext.master.job import Job, JobSettings, Now
from elastic_ext.master.store import JobStore, Stored, Unsaved
from elastic_ext.master.wire import master_pb2 as wire
from tests.support.masters import join_request

NOTHING = Stored(job="", job_id="id", epoch=1, versions=(), events=(), nodes=(), membership="", pairs="", points=())
DAY = 24 * 3600.0


def at(seconds: float) -> Now:
    return Now(seconds, 1e9 + seconds)


def job(stored: Stored = NOTHING) -> Job:
    return Job(stored, JobSettings(library="1"), at(0.0))


def named(unsaved: Unsaved) -> list[str]:
    return sorted(each.node_id for each in unsaved.nodes)


def test_each_change_is_given_once_and_again_where_it_was_not_written() -> None:
    found = job()
    found.join(at(1.0), join_request("a"))
    membership = wire.Membership(version=1, nodes=[wire.NodeShare(node_id="a", num_workers=1)])
    found.beat(at(2.0), wire.BeatRequest(node_id="a", incarnation=1, membership=membership))
    first = found.take_unsaved()
    assert named(first) == ["a"] and first.job == "j" and first.membership is not None and first.pairs is None
    second = found.take_unsaved()
    assert not second.nodes and not second.events and second.job is None and second.membership is None
    found.give_back(first)
    again = found.take_unsaved()
    assert named(again) == ["a"] and (again.job, again.membership) == (first.job, first.membership)
    assert list(again.events) == list(first.events)


def test_a_node_that_was_forgotten_and_has_come_back_is_stored(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    found = job(store.read())
    found.join(at(1.0), join_request("a"))
    kept(store, found.take_unsaved())
    found.leave(at(2.0), wire.LeaveRequest(node_id="a", incarnation=1))
    found.tick(at(3.0))
    found.tick(at(DAY + 10.0))
    gone = found.take_unsaved()
    assert list(gone.forgotten) == ["a"]
    found.give_back(gone)  # the disk is full
    found.join(at(DAY + 11.0), join_request("a", 2))
    kept(store, found.take_unsaved())
    assert [each.incarnation for each in store.read().nodes] == [2]
    store.close()


def test_an_older_membership_of_the_same_start_is_no_news_to_a_master_that_was_started_again(tmp_path: Path) -> None:
    def told(found: Job, version: int, *nodes: str) -> int:
        shares = [wire.NodeShare(node_id=each, first_rank=place, num_workers=1) for place, each in enumerate(nodes)]
        membership = wire.Membership(version=version, nodes=shares)
        found.beat(at(2.0), wire.BeatRequest(node_id="a", incarnation=1, membership=membership))
        assert found.membership_plans.newest is not None
        return found.membership_plans.newest.version

    store = JobStore(tmp_path)
    found = job(store.read())
    found.join(at(1.0), join_request("a"))
    assert (told(found, 1, "a-1", "b-1"), told(found, 2, "a-1")) == (1, 2)
    kept(store, found.take_unsaved())
    again = job(store.read())
    assert told(again, 1, "a-1", "b-1") == 2, "another agent has not heard of the newer plan yet"
    assert told(again, 3, "a-1", "b-1") == 3
    assert told(again, 1, "a-2") == 4, "the job was started again"
    store.close()


def test_a_beat_that_comes_again_after_the_master_was_started_again_is_heard_once(tmp_path: Path) -> None:
    def heard(found: Job, *texts: str, first: int = 1, incarnation: int = 1, num_dropped: int = 0) -> list[str]:
        request = wire.BeatRequest(
            node_id="a", incarnation=incarnation, first_event=first, num_events_dropped=num_dropped
        )
        request.events.extend(wire.JobEvent(kind="note", text=each) for each in texts)
        found.beat(at(2.0), request)
        return [
            each.text.removeprefix("node a dropped ")[:7]
            for each in found.event_log.after(0)
            if each.kind in ("note", "events-dropped")
        ]

    store = JobStore(tmp_path)
    found = job(store.read())
    found.join(at(1.0), join_request("a"))
    kept(store, found.take_unsaved())
    assert heard(found, "one", "two", num_dropped=7) == ["one", "two", "7 event"]
    found.give_back(found.take_unsaved())  # the disk is full
    kept(store, found.take_unsaved())
    again = job(store.read())
    assert heard(again, "one", "two", "three", num_dropped=7) == ["one", "two", "7 event", "three"]
    again.join(at(3.0), join_request("a"))
    kept(store, again.take_unsaved())
    third = job(store.read())
    assert heard(third, "three", "four", first=3)[3:] == ["three", "four"]
    third.join(at(4.0), join_request("a", 2))
    kept(store, third.take_unsaved())
    fourth = job(store.read())
    assert heard(fourth, "anew", incarnation=2)[5:] == ["anew"], "another agent counts its events from 1 again"
    store.close()


def test_what_was_heard_of_a_node_is_forgotten_with_it(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    record = HeardRecord(node_id="a", incarnation=1, num_heard=5, num_dropped=0)
    store.keep(heard=[record])
    assert store.read().heard == (record,)
    store.keep(forgotten=["a"])
    assert store.read().heard == ()
    store.close()


def test_points_are_stored_also_once_the_clock_was_set_back() -> None:
    found = job()
    found.join(at(0.0), join_request("a"))
    for back in (0, 6000):
        times = []
        for second in range(0, 300, 5):
            now = Now(clock=back + second, time=1e9 + second - back)
            worker = wire.Worker(rank=0, state="running", step=second)
            found.beat(now, wire.BeatRequest(node_id="a", incarnation=1, workers=[worker]))
            found.tick(now)
            times += [time + back - 1e9 for time, _ in found.take_unsaved().points]
        assert times == [20 + 60 * number for number in range(5)], "each minute once"


def kept(store: JobStore, unsaved: Unsaved) -> None:
    store.keep(
        events=unsaved.events,
        nodes=unsaved.nodes,
        forgotten=unsaved.forgotten,
        membership=unsaved.membership,
        points=unsaved.points,
        job=unsaved.job,
        pairs=unsaved.pairs,
        heard=unsaved.heard,
    )
