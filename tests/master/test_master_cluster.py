"""What a master guesses of a job's machines: planted places, links and nodes are found, and nothing else is."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.doctor.report import PairReport
from elastic_ext.master.address import MOST_MESSAGE_BYTES
from elastic_ext.master.cluster import MachineComparison, PairFindings, compare_machines, pair_findings
from elastic_ext.master.machines import NodeFacts, facts_of, measured_in, why_refused
from elastic_ext.profile.stragglers import Straggler
from tests.support.clusters import FAST, NEAR, machine_of, pair_report
from tests.support.machines import GOOD_MACHINE, gpu, gpus
from tests.support.thinning import each_once


@functools.cache
def _fact(number: int) -> NodeFacts:
    return facts_of(f"id-{number:03}", f"host-{number:03}", machine_of(number).to_json())


def _facts(num: int, changed: Mapping[int, Any] | None = None) -> list[NodeFacts]:
    changed = changed or {}
    return [
        facts_of(f"id-{number:03}", f"host-{number:03}", changed[number].to_json())
        if number in changed
        else _fact(number)
        for number in range(num)
    ]


def _fields(value: Any) -> dict[str, Any]:
    """As ``dataclasses.asdict``, but without copies of all that lies in the fields, which take most of the time."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _measured(report: PairReport) -> PairFindings:
    return pair_findings(measured_in(json.dumps({"record": "pairs", **_fields(report)}, default=_fields)))


def _cluster(racks: Sequence[int], slow_ranks: Sequence[Straggler] = (), **planted: Any) -> MachineComparison:
    return compare_machines(_facts(len(racks)), _measured(pair_report(racks, **planted)), slow_ranks)


def _groups(cluster: MachineComparison) -> list[list[int]]:
    return sorted(sorted(int(node_id[3:]) for node_id in group.node_ids) for group in cluster.groups)


def _planted(racks: Sequence[int]) -> list[list[int]]:
    return sorted([number for number, rack in enumerate(racks) if rack == each] for each in set(racks))


TWO_RACKS = [0] * 4 + [1] * 4
FOUR_RACKS = [number % 4 for number in range(16)]


# --- where they are -------------------------------------------------------------------------------------------------


def test_a_report_to_a_master_is_short_and_tells_it_the_same() -> None:
    report = pair_report([number % 7 for number in range(40)], noise=0.1, slow_nodes={3: 1.8})
    silent = dataclasses.replace(report.nodes[5], is_silent=True, hardware=None)
    report = dataclasses.replace(report, nodes=(*report.nodes[:5], silent, *report.nodes[6:]), trouble="one is silent")
    assert measured_in(report.to_short_json()) == measured_in(report.to_json())


@pytest.mark.parametrize("num_nodes", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_report_of_all_nodes_that_a_master_compares_fits_into_one_message(num_nodes: int) -> None:
    report = pair_report([number // 32 for number in range(num_nodes)], noise=0.1)
    num_times = 2048 // num_nodes  # a master compares as many nodes: a report grows by each node's row
    assert num_times * len(report.to_json()) > MOST_MESSAGE_BYTES > num_times * len(report.to_short_json()) * 1.1


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("racks", [TWO_RACKS, FOUR_RACKS, [0, 0, 0, 1, 1], [0] * 12 + [1] * 4, [0, 0, 1, 1, 2, 2]])
def test_racks_are_found_by_latency(racks: list[int], noise: float) -> None:
    for seed in range(4):
        found = _cluster(racks, noise=noise, seed=seed)
        assert _groups(found) == _planted(racks)
        assert f"{len(set(racks))} groups by latency" in found.topology_text
    group = found.groups[0]
    assert group.latency_seconds == pytest.approx(NEAR, rel=0.3)
    assert group.bandwidth == pytest.approx(FAST, rel=0.3)


@pytest.mark.parametrize("racks", [TWO_RACKS, FOUR_RACKS])
def test_racks_are_found_by_bandwidth_where_all_answer_as_fast(racks: list[int]) -> None:
    for seed in range(4):
        found = _cluster(racks, noise=0.05, seed=seed, by_latency=False)
        assert _groups(found) == _planted(racks)
        assert "groups by bandwidth" in found.topology_text


@pytest.mark.parametrize(("num_nodes", "num_racks"), each_once([40, 64, 96, 200], [2, 4]))
def test_of_nodes_that_have_met_some_others_most_are_placed_and_none_wrongly(num_nodes: int, num_racks: int) -> None:
    racks = [number * num_racks // num_nodes for number in range(num_nodes)]
    found = _cluster(racks, noise=0.05)
    groups = _groups(found)
    assert len(groups) == num_racks
    assert all(len({racks[node] for node in group}) == 1 for group in groups)
    num_left = num_nodes - sum(map(len, groups))
    assert num_left <= 0.1 * num_nodes
    assert (f"of {num_left} node" in found.topology_text) == (num_left > 0)


@pytest.mark.parametrize("num_nodes", [3, 4, 8, 24])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_nodes_in_one_place_are_never_parted(num_nodes: int, noise: float) -> None:
    for seed in range(8):
        found = _cluster([0] * num_nodes, noise=noise, seed=seed)
        assert len(found.groups) <= 1
        assert found.slow == () or noise > 0
        if found.groups:
            assert _groups(found) == [list(range(num_nodes))]
            assert "all nodes are about as near" in found.topology_text
        else:
            assert "not known" in found.topology_text


def test_what_was_not_measured_is_not_known() -> None:
    found = compare_machines(_facts(4))
    assert found.groups == () and found.links == () and found.recommendations == ()
    assert found.topology_text == "which nodes are near each other is not known: fewer than two links to compare"
    assert "not known" in _cluster([0, 0]).topology_text
    assert _cluster([0, 0]).links[0].latency_seconds == NEAR


def test_nodes_of_one_machine_are_near_each_other_whatever_was_measured() -> None:
    facts = [dataclasses.replace(each, boot_id="the same") for each in _facts(3)]
    (group,) = compare_machines(facts).groups
    assert list(group.node_ids) == ["id-000", "id-001", "id-002"]
    assert not group.HasField("latency_seconds")


def test_processes_of_one_machine_that_measured_each_other_are_one_machine() -> None:
    report = pair_report([0, 0, 0])
    nodes = tuple(dataclasses.replace(each, hardware=machine_of(7)) for each in report.nodes)
    measured = _measured(dataclasses.replace(report, nodes=nodes)).measured
    assert len(measured.machines) == 1 and measured.links == ()


def test_nodes_that_took_no_part_are_in_no_group() -> None:
    found = compare_machines(_facts(9), _measured(pair_report(TWO_RACKS)))
    assert _groups(found) == _planted(TWO_RACKS)


def test_groups_are_told_what_to_do_with() -> None:
    (found,) = _cluster(TWO_RACKS).recommendations
    assert found.startswith("keep ranks that exchange most")
    assert "2 groups by latency: 20 us and 2.79 GiB/s within them, 60 us and 954 MiB/s between them" in found
    assert "each group has 4 nodes, the first one host-000, host-001, host-002, host-003" in found


# --- what is slow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("racks", [[0] * 6, TWO_RACKS, FOUR_RACKS])
def test_a_slow_link_is_named_and_parts_nothing(racks: list[int]) -> None:
    for seed in range(4):
        found = _cluster(racks, noise=0.05, seed=seed, slow_links=[(0, 1)])
        assert [(each.first, each.second) for each in found.links if each.is_slow] == [("host-000", "host-001")]
        assert _groups(found) == _planted(racks)
        (advice,) = [each for each in found.recommendations if "the way between" in each]
        assert advice.startswith("look at the way between host-000 and host-001 (cable, switch port, route)")


@pytest.mark.parametrize("racks", [[0] * 6, TWO_RACKS, FOUR_RACKS])
def test_a_node_with_a_slow_network_is_named_and_hides_no_racks(racks: list[int]) -> None:
    for seed in range(4):
        found = _cluster(racks, noise=0.05, seed=seed, slow_nodes={2: 6.0})
        assert [each.host for each in found.slow] == ["host-002"]
        assert ["answers slowly" in each or "exchanges data slowly" in each for each in found.slow[0].evidence]
        assert _groups(found) == sorted([each for each in rack if each != 2] for rack in _planted(racks))
        (advice,) = [each for each in found.recommendations if each.startswith("host-002")]
        assert "at every step all nodes wait for the slowest one" in advice


def test_a_node_that_computes_slowly_is_named_with_what_its_ranks_do() -> None:
    slow = [
        Straggler(rank=24 + number, host="host-003", score=0.6, own_score=None, slowed=0.3, num_rounds=3)
        for number in range(5)
    ]
    found = _cluster([0] * 8, slow, noise=0.03, hot_nodes=[3])
    (machine,) = found.slow
    assert machine.host == "host-003" and len(machine.evidence) == 6
    assert machine.evidence[-1].startswith("cpu computes slowly: ")
    (advice,) = found.recommendations
    assert advice.startswith(
        "look at the clock and temperature of host-003 and at what else runs there, and take it out"
    )
    assert "rank 24 on host-003 takes 1.67 times as long" in advice and "(and 3 more)" in advice


def test_a_slow_rank_alone_is_told_of_without_any_measurement() -> None:
    slow = [Straggler(rank=3, host="host-000", score=0.5, own_score=1.0, slowed=0.5, num_rounds=3)]
    found = compare_machines(_facts(2), None, slow)
    assert [each.host for each in found.slow] == ["host-000"]
    assert "and if that shows nothing take it out of the job" in found.recommendations[0]


def test_pairs_that_could_not_exchange_data_come_first() -> None:
    report = pair_report([0] * 4)
    pairs = (
        dataclasses.replace(report.pairs[0], trouble="timed out", latency_seconds=(), bandwidth=()),
        *report.pairs[1:],
    )
    found = compare_machines(_facts(4), _measured(dataclasses.replace(report, pairs=pairs)))
    assert found.recommendations[0].startswith("look whether a firewall is between host-000 and host-003")
    assert "timed out" in found.recommendations[0]


def test_a_node_that_fell_silent_is_named_once() -> None:
    report = pair_report([0] * 4)
    nodes = (*report.nodes[:3], dataclasses.replace(report.nodes[3], is_silent=True))
    pairs = tuple(
        dataclasses.replace(each, trouble="closed") if 3 in (each.first, each.second) else each for each in report.pairs
    )
    found = compare_machines(_facts(4), _measured(dataclasses.replace(report, nodes=nodes, pairs=pairs)))
    assert [each for each in found.recommendations if "host-003" in each] == [
        "look whether host-003 and the process there are alive: they stopped answering during the check"
    ]


# --- what is unlike, and what is refused ----------------------------------------------------------------------------


def test_nodes_that_differ_are_named_and_the_others_counted() -> None:
    versions = dataclasses.replace(GOOD_MACHINE.versions, torch="2.11.0")
    cpu = dataclasses.replace(GOOD_MACHINE.cpu, num_allowed=8)
    found = compare_machines(_facts(20, {7: machine_of(7, versions=versions), 9: machine_of(9, cpu=cpu)}))
    assert found.unlike == (
        "nodes have unlike versions of torch: 2.13.0 on 19 nodes; 2.11.0 on host-007",
        "nodes have unlike processors: 64 cores of Some CPU on 19 nodes; 8 cores of Some CPU on host-009",
    )
    assert found.recommendations[0].startswith("install the same versions of torch on all nodes")
    assert found.recommendations[1].startswith("expect all nodes to wait for the slowest one at every step")


def test_of_very_many_that_differ_a_few_are_named() -> None:
    versions = dataclasses.replace(GOOD_MACHINE.versions, torch="2.11.0")
    found = compare_machines(_facts(30, {number: machine_of(number, versions=versions) for number in range(12)}))
    (text,) = found.unlike
    assert text.endswith("2.11.0 on host-000, host-001, host-002, host-003, host-004 and 7 more")


def test_a_bad_machine_is_refused_with_the_reason_and_a_good_one_is_not() -> None:
    lost = machine_of(1, gpus=gpus(gpu(0), gpu(1, trouble="GPU is lost", name=None)))
    reason = why_refused(lost.to_json(), 8)
    assert reason is not None and "GPU" in reason and "\n" not in reason
    assert why_refused(GOOD_MACHINE.to_json(), 8) is None
    assert why_refused("", 8) is None and why_refused("{", 8) is None
    facts = facts_of("a", "b", lost.to_json())
    assert facts.troubles[0] == reason


def test_facts_take_a_line_and_what_cannot_be_read_is_said() -> None:
    facts = facts_of("a", "b", GOOD_MACHINE.to_json())
    assert facts.in_words == "64 cores, 512 GiB, 2 x NVIDIA H100, torch 2.13.0"
    assert facts.boot_id == "a" and facts.troubles == ()
    assert facts_of("a", "b", "") == NodeFacts(node_id="a", host="b")
    for text in ("{", "[]", '{"time": 1}', "[" * 100_000, "x" * (1 << 19)):
        (trouble,) = facts_of("a", "b", text).troubles
        assert trouble.startswith("its hardware record cannot be read: ") and len(trouble) <= 240


# --- what holds for all of them -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_order_in_which_things_are_told_changes_nothing(data: st.DataObject) -> None:
    racks = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=7))
    seed = data.draw(st.integers(0, 10))
    report = pair_report(racks, noise=0.1, seed=seed, hot_nodes=[1], slow_links=[(0, 1)] if seed % 2 else [])
    slow = [
        Straggler(rank=each, host="host-001", score=0.5, own_score=None, slowed=0.5, num_rounds=3) for each in (4, 2)
    ]
    facts = _facts(len(racks))
    expected = compare_machines(facts, _measured(report), slow)
    order = data.draw(st.permutations(range(len(racks))))
    place_of = {old: new for new, old in enumerate(order)}
    nodes = tuple(dataclasses.replace(report.nodes[old], index=new) for new, old in enumerate(order))
    pairs = tuple(
        dataclasses.replace(each, first=min(ends), second=max(ends))
        for each in data.draw(st.permutations(report.pairs))
        for ends in [(place_of[each.first], place_of[each.second])]
    )
    told = dataclasses.replace(report, nodes=nodes, pairs=pairs)
    assert compare_machines([facts[each] for each in order], _measured(told), slow[::-1]) == expected


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["index", "first", "second", "latency_seconds", "bandwidth", "matmul", "hardware", "network"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_JSON, max_size=4), st.lists(_JSON, max_size=4), _JSON)
def test_whatever_stands_in_a_report_it_is_refused_in_words_or_something_is_made_of_it(
    nodes: list[Any], pairs: list[Any], wanted: Any
) -> None:
    text = json.dumps({"nodes": nodes, "pairs": pairs, "num_wanted": wanted, "trouble": wanted})
    try:
        measured = measured_in(text)
    except ValueError as refused:
        reason = str(refused)
    else:
        reason = compare_machines(_facts(2), pair_findings(measured)).topology_text
    assert reason and "\n" not in reason


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"nodes": []}', "[" * 100_000, "\x00", "x" * 100])
def test_what_is_no_report_is_refused_with_what_to_give(text: str) -> None:
    with pytest.raises(ValueError, match="elastic-ext doctor --rdzv-endpoint HOST:PORT --json"):
        measured_in(text)


def test_the_line_of_pairs_is_found_among_what_doctor_prints() -> None:
    report = dataclasses.asdict(pair_report([0, 0, 0]))
    lines = [{"record": "hardware"}, {"record": "pairs", **report}, {"record": "finding", "about": "pairs"}]
    assert measured_in("\n".join(map(json.dumps, lines))) == measured_in(json.dumps(report))


def test_a_report_of_more_nodes_than_a_master_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes has 3000 rows; allowed: 2048"):
        measured_in(json.dumps({"nodes": [{}] * 3000, "pairs": [], "num_wanted": 1}))


def test_what_is_said_of_a_large_job_is_bounded() -> None:
    changed = {
        number: machine_of(number, versions=dataclasses.replace(GOOD_MACHINE.versions, torch=f"2.{number}"))
        for number in range(200)
    }
    slow = [
        Straggler(rank=each, host=f"host-{each:03}", score=0.5, own_score=None, slowed=0.5, num_rounds=3)
        for each in range(64)
    ]
    report = pair_report([number % 8 for number in range(200)], noise=0.3)
    found = compare_machines(_facts(200, changed), _measured(report), slow)
    assert len(found.recommendations) <= 32
    assert max(map(len, (*found.recommendations, *found.unlike))) < 1200
