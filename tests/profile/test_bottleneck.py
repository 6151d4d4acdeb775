"""What holds training up: each rule by hand at its limit, what holds for all profiles, and planted causes in noise."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.profile.breakdown import RankView, breakdown_of, merged
from elastic_ext.profile.phases import Phase
from elastic_ext.profile.verdict import KINDS, Verdict, verdict
from elastic_ext.records.metrics import StepTrace
from tests.support.profiles import PLANTED, calibration, census, made_view, made_window, planted

DATA, FORWARD, BACKWARD, OPTIMIZER = Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
COMMUNICATION, OTHER, TRANSFER = Phase.COMMUNICATION, Phase.OTHER, Phase.TRANSFER


def _step(**parts: float) -> dict[Phase, float]:
    """Of milliseconds."""
    return {Phase[name.upper()]: value * 1e-3 for name, value in parts.items()}


def _ranks(steps: Sequence[Mapping[Phase, float]], **window: Any) -> list[RankView]:
    return [
        made_view(step, rank=rank, world_size=len(steps), host=f"node{rank}", **window)
        for rank, step in enumerate(steps)
    ]


def _with(view: RankView, **changes: Any) -> RankView:
    """The same rank with another window."""
    return dataclasses.replace(view, window=dataclasses.replace(view.window, **changes))


# ---- one rank, rule by rule ----


@pytest.mark.parametrize(
    ("step", "kind", "share"),
    [
        (_step(data=26, forward=74), "data", 0.26),
        (_step(data=25, forward=75), "busy", 0.75),
        (_step(communication=26, forward=74), "communication", 0.26),
        (_step(communication=25, forward=75), "busy", 0.75),
        (_step(communication=13, agreement=13, forward=74), "communication", 0.26),
        (_step(transfer=26, forward=74), "transfer", 0.26),
        (_step(other=26, forward=74), "loop", 0.26),
        (_step(data=30, communication=35, forward=35), "communication", 0.35),
        (_step(data=35, communication=30, forward=35), "data", 0.35),
        (_step(data=20, communication=20, transfer=20, other=20, forward=20), "busy", 0.20),
    ],
)
def test_a_step_is_bound_by_what_takes_more_than_a_quarter_of_it(
    step: dict[Phase, float], kind: str, share: float
) -> None:
    found = verdict([made_view(step)])
    assert found.kind == kind
    assert found.share == pytest.approx(share)
    assert (found.ranks, found.hosts) == ((), ())


@pytest.mark.parametrize(
    ("besides", "kind", "share"),
    [
        ({Phase.CHECKPOINT: 2.0}, "checkpoint", 1 / 6),
        ({Phase.CHECKPOINT: 1.5}, "busy", 10 / 11.5),
        ({Phase.CHANGE: 10.0}, "change", 0.5),
        ({Phase.ROLLED_BACK: 10.0}, "rolled-back", 0.5),
        ({Phase.STARTUP: 11.0}, "startup", 11 / 21),
        ({Phase.STARTUP: 9.0}, "busy", 1.0),
        ({Phase.OUTSIDE: 11.0}, "outside", 11 / 21),
        ({Phase.STARTUP: 8.0, Phase.CHECKPOINT: 10.0}, "checkpoint", 0.5),
    ],
)
def test_what_stands_between_steps_counts_against_the_time_of_training(
    besides: dict[Phase, float], kind: str, share: float
) -> None:
    found = verdict([made_view(_step(forward=100), besides=besides)])  # 100 steps: 10 s
    assert found.kind == kind
    assert found.share == pytest.approx(share)


def test_what_takes_part_of_a_step_takes_less_of_training_where_much_stands_between_steps() -> None:
    found = verdict([made_view(_step(data=40, forward=60), besides={Phase.CHECKPOINT: 10.0})])
    assert found.kind == "checkpoint"
    assert [(each.kind, round(each.share, 6)) for each in found.runners_up] == [("busy", 0.3), ("data", 0.2)]


@pytest.mark.parametrize(
    ("flops", "num_bytes", "ops", "kind"),
    [
        (5e8, 1e7, 100, "compute"),  # 5 ms, 1 ms, 0.2 ms
        (1e8, 5e7, 100, "memory"),
        (1e8, 1e7, 2500, "host"),
        (0, 0, 0, "busy"),
    ],
)
def test_what_computing_is_bound_by_takes_the_longest_at_best(
    flops: float, num_bytes: float, ops: int, kind: str
) -> None:
    counted = census(num_flops=int(flops), num_bytes=int(num_bytes), num_ops=ops)
    found = verdict([made_view(_step(forward=6), view={"census": counted, "calibration": calibration()})])
    assert found.kind == kind
    assert found.evidence["roofline"] == pytest.approx(
        {"compute": flops / 1e11, "memory": num_bytes / 1e10, "host": ops * 2e-6}
    )


def test_the_census_of_a_micro_step_is_taken_as_often_as_there_are_micro_steps_and_its_optimizer_once() -> None:
    counted = dataclasses.replace(
        census(num_flops=100, num_bytes=1000, num_ops=30), optimizer_ops=10, optimizer_bytes=400
    )
    view = made_view(_step(forward=6), view={"census": counted, "calibration": calibration()})
    best = breakdown_of(dataclasses.replace(view, num_micro_steps=4, micro_batch=32)).roofline  # of 16 samples
    assert best is not None
    assert best.compute == pytest.approx(100 * 8 / 1e11)
    assert best.memory == pytest.approx((600 * 8 + 400) / 1e10)
    assert best.host == pytest.approx((20 * 4 + 10) * 2e-6)


@pytest.mark.parametrize(
    "broken", [{"flops_per_second": 0.0}, {"bytes_per_second": math.nan}, {"seconds_per_op": -1.0}]
)
def test_a_broken_calibration_is_none(broken: dict[str, float]) -> None:
    best = dataclasses.replace(calibration(), **broken)  # type: ignore[arg-type]
    found = verdict([made_view(_step(forward=6), view={"census": census(num_ops=5), "calibration": best})])
    assert (found.kind, found.evidence["roofline"]) == ("busy", None)


# ---- processors ----


@pytest.mark.parametrize(
    ("share", "kind", "is_contended"),
    [
        (1.0, "busy", False),
        (0.86, "busy", False),
        (0.84, "busy", True),
        (0.67, "busy", True),
        (0.66, "contention", True),
    ],
)
def test_a_training_thread_without_a_processor_is_told(share: float, kind: str, is_contended: bool) -> None:
    found = verdict([made_view(_step(forward=50, backward=40, optimizer=10), processor_share=share)])
    assert (found.kind, found.is_contended) == (kind, is_contended)
    assert (f"has {share:.0%} of" in found.text or f"had {share:.0%} of" in found.text) == is_contended


def test_to_wait_takes_no_processor_and_is_no_contention() -> None:
    found = verdict([made_view(_step(data=50, communication=20, forward=30))])  # none in these two
    assert (found.kind, found.is_contended) == ("data", False)


def test_nothing_is_said_of_processors_where_they_do_not_compute() -> None:
    on_gpu = verdict([made_view(_step(forward=100), processor_share=0.2, accelerator_bytes=1)])
    assert (on_gpu.kind, on_gpu.is_contended, on_gpu.evidence["processor_share"]) == ("busy", False, None)
    by_census = made_view(_step(forward=100), processor_share=0.2, view={"census": census(device="cuda:0")})
    assert verdict([by_census]).is_contended is False
    unknown = verdict([made_view(_step(forward=100), processor_share=None)])
    assert unknown.evidence["processor_share"] is None


def test_passes_that_wait_for_parameters_tell_nothing_of_processors_but_the_optimizer_does() -> None:
    view = made_view(_step(forward=80, optimizer=20), processor_share=0.3, view={"waits_in_passes": True})
    own = {**view.window.processor_seconds, OPTIMIZER.label: view.window.seconds[OPTIMIZER.label]}
    assert verdict([view]).is_contended
    assert not verdict([_with(view, processor_seconds=own)]).is_contended


# ---- several ranks ----


def test_of_two_ranks_the_one_that_is_busier_keeps_the_other_waiting() -> None:
    found = verdict(_ranks([_step(forward=30, communication=1), _step(forward=20, communication=11)]))
    assert (found.kind, found.ranks, found.hosts) == ("straggler", (0,), ("node0",))
    assert found.share == pytest.approx(10 / 31)
    assert [each.kind for each in found.runners_up] == ["busy"]  # and not communication, of which 1 ms is


@pytest.mark.parametrize(("longer", "kind"), [(21, "straggler"), (19, "busy")])
def test_a_straggler_takes_a_fifth_of_the_step_more_than_is_usual(longer: float, kind: str) -> None:
    slow = _step(forward=60 + longer, communication=40 - longer)
    assert verdict(_ranks([_step(forward=60, communication=40)] * 3 + [slow])).kind == kind


@pytest.mark.parametrize("phase", [DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, TRANSFER])
def test_a_straggler_is_one_whatever_it_is_busy_with(phase: Phase) -> None:
    quick = {FORWARD: 0.02, COMMUNICATION: 0.02}
    slow = {FORWARD: 0.02, COMMUNICATION: 0.0}
    slow[phase] = slow.get(phase, 0.0) + 0.02
    found = verdict(_ranks([quick, slow, quick]))
    assert (found.kind, found.ranks) == ("straggler", (1,))
    assert f"100% of the excess is in {phase.label}" in found.text


def test_half_of_the_ranks_may_be_slow() -> None:
    quick, slow = _step(forward=20, communication=20), _step(forward=40)
    found = verdict(_ranks([quick, slow, slow, quick]))
    assert (found.kind, found.ranks, found.hosts) == ("straggler", (1, 2), ("node1", "node2"))


def test_ranks_that_all_differ_are_said_to_have_uneven_work() -> None:
    steps = [_step(forward=each, communication=50 - each) for each in (10, 18, 26, 34, 42, 50)]
    found = verdict(_ranks(steps))
    assert found.kind == "straggler"
    assert "shared out unevenly" in found.text


def test_communication_is_what_all_ranks_wait_for() -> None:
    steps = [_step(forward=10, communication=waiting) for waiting in (30, 33, 40)]
    found = verdict(_ranks(steps))
    assert (found.kind, found.ranks) == ("communication", ())
    assert found.share == pytest.approx(30 / 43)


def test_what_ranks_wait_for_by_turns_is_no_slow_link() -> None:
    """In most steps one of two has no processor, and the other waits; in some neither waits for long."""
    steps = [_step(forward=60, communication=40)] * 2
    assert verdict(_ranks(steps)).kind == "communication"
    assert verdict(_ranks(steps, waiting_seconds=0.040)).kind == "communication"
    found = verdict(_ranks(steps, waiting_seconds=0.010))
    assert found.kind == "busy" and found.evidence["least_waiting_seconds"] == pytest.approx(0.010)
    (second,) = found.runners_up
    assert second.kind == "communication" and second.share == pytest.approx(0.10)


def test_a_rank_that_is_slow_in_some_steps_alone_is_no_straggler() -> None:
    steps = [_step(forward=70, communication=30), _step(forward=100)]
    views = _ranks(steps)
    assert verdict(views).kind == "straggler"
    low = [_with(view, computing_seconds=seconds) for view, seconds in zip(views, (0.068, 0.098), strict=True)]
    assert (verdict(low).kind, verdict(low).ranks) == ("straggler", (1,))
    low = [_with(view, computing_seconds=seconds) for view, seconds in zip(views, (0.068, 0.072), strict=True)]
    assert verdict(low).kind == "busy"


def test_a_rank_whose_samples_come_in_bursts_is_a_straggler_all_the_same() -> None:
    views = _ranks([_step(forward=70, communication=30), _step(data=30, forward=70)], computing_seconds=0.070)
    assert (verdict(views).kind, verdict(views).ranks) == ("straggler", (1,))


def test_what_is_waited_for_in_all_steps_is_no_more_than_in_the_one_in_the_middle() -> None:
    found = verdict(_ranks([_step(forward=80, communication=20)] * 2, waiting_seconds=0.09))
    assert found.evidence["least_waiting_seconds"] == pytest.approx(0.020)


def test_ranks_that_lack_processors_are_stragglers_by_more() -> None:
    steps = [_step(forward=60, communication=27), _step(forward=83, communication=4)]
    assert verdict(_ranks(steps)).kind == "straggler"
    assert verdict(_ranks(steps, processor_share=0.75)).kind == "busy"


def test_what_only_some_ranks_wait_for_names_them() -> None:
    steps = [_step(data=30, forward=70), _step(data=24, forward=76), _step(data=29, forward=71)]
    found = verdict(_ranks(steps))
    assert (found.kind, found.ranks, found.hosts) == ("data", (0, 2), ("node0", "node2"))
    assert "on ranks 0 on node0, 2 on node2" in found.text


# ---- what is not seen whole ----


def test_steps_that_were_not_looked_at_are_taken_to_be_like_those_that_were() -> None:
    step = _step(data=10, forward=30, communication=50, optimizer=10)
    whole, part = made_view(step), made_view(step, num_undetailed=90)
    assert Phase.STEP.label in part.window.seconds
    assert verdict([part]).kind == verdict([whole]).kind == "communication"
    assert verdict([part]).evidence["shares"] == pytest.approx(verdict([whole]).evidence["shares"])


@pytest.mark.parametrize(
    ("step", "kind"), [(_step(data=20, forward=80), "unknown"), (_step(data=40, forward=60), "data")]
)
def test_where_no_step_was_looked_at_only_waiting_for_data_is_known(step: dict[Phase, float], kind: str) -> None:
    found = verdict([made_view(step, num_undetailed=100)])
    assert found.kind == kind
    assert found.kind == "data" or (found.share is None and "steps that were not measured" in found.text)


def test_a_model_whose_passes_are_not_seen_is_no_loop_that_does_other_things() -> None:
    assert verdict([made_view(_step(other=90, optimizer=10))]).kind == "unknown"


def test_waiting_that_comes_in_bursts_counts_as_long_as_it_is() -> None:
    """Of four workers at once three steps of four have their batch at once: a step in the middle waits for none."""
    view = made_view(_step(data=40, forward=60))
    typical = {name: seconds for name, seconds in view.window.typical.items() if name != "data"}
    found = verdict([_with(view, typical=typical)])
    assert found.kind == "data"
    assert found.share == pytest.approx(0.4)


def test_a_few_very_long_passes_do_not_count() -> None:
    view = made_view(_step(forward=60, communication=40), processor_share=None)
    seconds = {**view.window.seconds, "communication": 1.0, "forward": 900.0}
    assert verdict([_with(view, seconds=seconds)]).kind == "communication"


def test_a_phase_of_a_newer_version_is_something_that_the_loop_does() -> None:
    view = made_view(_step(forward=60))
    found = verdict([_with(view, seconds={**view.window.seconds, "new-phase": 5.0})])
    assert found.kind == "loop"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_steps": 2}, "too few steps have ended: 2 on rank 1"),
        ({"num_steps": 0}, "too few steps"),
        ({"config_version": 2}, "different versions of the config"),
        ({"config_revision": 2}, "different versions of the config"),
        ({"restart": 1}, "different restarts or members"),
        ({"world_size": 3}, "different restarts or members"),
        ({"members": 3}, "different restarts or members"),
        ({"rank": 0}, "a rank is given twice"),
        ({"seconds": {"forward": math.nan}}, "the profile of rank 1 holds a value that is no length of time"),
        ({"seconds": {"forward": -1.0}}, "no length of time"),
        ({"seconds": {"forward": math.inf}}, "no length of time"),
        ({"typical": {"forward": "long"}}, "no length of time"),
        ({"processor_seconds": {"forward": 1e300}}, "no length of time"),
        ({"seconds": {}, "typical": {}}, "took no time"),
    ],
)
def test_nothing_is_judged_of_ranks_that_do_not_fit_together(change: dict[str, Any], reason: str) -> None:
    first, second = _ranks([_step(forward=10)] * 2)
    found = verdict([first, _with(second, **change)])
    assert (found.kind, found.share) == ("unknown", None)
    assert reason in found.text


def test_a_job_is_not_judged_by_some_of_its_ranks_unless_that_is_wanted() -> None:
    some = _ranks([_step(data=50, forward=50)] * 4)[1:]
    assert verdict(some).text == "unknown: 1 of 4 ranks have written no profile yet"
    found = verdict(some, is_partial=True)
    assert found.kind == "data"
    assert "(1 rank more not looked at)" in found.text
    assert verdict([]).text == "unknown: no rank has written a profile of its time yet"


# ---- words ----


def test_the_sentence_says_how_much_what_and_how_fast_it_could_be() -> None:
    view = made_view(_step(data=41, forward=59), num_samples=3100, view={"num_workers": 2})  # 100 steps: 10 s
    assert verdict([view]).text == (
        "data-bound: 41% of training's time goes to waiting for samples; 2 workers deliver 310 samples/s, training "
        "could take 525: add workers, or make samples cheaper to load"
    )
    few = _ranks([_step(data=41, forward=59)] * 2, num_samples=3100, view={"num_workers": 6, "num_processors": 2})
    assert verdict([dataclasses.replace(each, host="one") for each in few]).text.endswith(
        "12 workers deliver 310 samples/s, training could take 525: make samples cheaper to load; there are no more "
        "than 2 processors, so that more workers help only where loading waits for storage"
    )
    many = {"num_workers": 6, "num_processors": 16}
    assert "add workers" in verdict(_ranks([_step(data=41, forward=59)] * 2, num_samples=3100, view=many)).text
    two = _ranks([_step(data=41, forward=59)] * 2, num_samples=3100, view={"num_workers": 0})
    assert verdict(two).text == (
        "data-bound: 41% of training's time goes to waiting for samples on all ranks; loading within the training "
        "process delivers 310 samples/s, training could take 525: give the loader workers, or make samples cheaper to "
        "load"
    )


def test_a_verdict_says_of_which_steps_and_of_how_much_time_it_is() -> None:
    views = _ranks([_step(data=41, forward=59)] * 2)  # 100 steps: 10 s
    later = _with(views[1], step=views[1].window.step + 3, begin=views[1].window.begin + 5, end=views[1].window.end + 5)
    found, last = verdict([views[0], later]), views[0].window.step
    assert found.text_over_steps == f"{found.text} (over steps {last - 99} to {last + 3}, 15 s)"
    assert verdict([]).text_over_steps == verdict([]).text


def test_a_share_is_of_trainings_time_and_a_step_is_shortened_by_its_own_part() -> None:
    step, saving = _step(communication=40, forward=60), {Phase.CHECKPOINT: 1.0}  # beside 100 steps of 0.1 s
    found = verdict(_ranks([step] * 2, besides=saving, num_samples=0))
    assert found.share == pytest.approx(0.4 * 10 / 11)
    assert "each rank waits for at least 40 ms a step (36% of training's time)" in found.text
    assert "a step would take 60 ms instead of 100 ms" in found.text
    saves = verdict([made_view(step, besides={Phase.CHECKPOINT: 10.0}, num_samples=0)])
    assert saves.text == (
        "checkpoint-bound: 50% of training's time goes to waiting for checkpoints: save less often, or in the "
        "background"
    )


def test_the_sentence_about_a_straggler_names_it_and_what_it_is_slow_in() -> None:
    quick, slow = _step(forward=20, communication=21), _step(forward=20, backward=20, communication=1)
    assert verdict(_ranks([quick, slow, quick])).text == (
        "straggler: rank 1 on node1 takes 40 ms for its own part of a step, 20 ms longer than usual; 100% of the "
        "excess is in backward; the others wait for 49% of training's time; training could take 1,524 samples/s: look "
        "at node1, or give the rank fewer samples by share_weights"
    )


def test_the_sentence_about_a_straggler_has_its_own_time_and_not_that_of_a_rank_slow_in_some_steps() -> None:
    steps = [_step(forward=60, communication=45)] * 2 + [_step(forward=100, communication=5), _step(forward=105)]
    low = (0.060, 0.060, 0.100, 0.061)  # seconds of computing: the last rank is slow in half of its steps alone
    views = [_with(view, computing_seconds=seconds) for view, seconds in zip(_ranks(steps), low, strict=True)]
    found = verdict(views)
    assert (found.kind, found.ranks, found.hosts) == ("straggler", (2,), ("node2",))
    assert "rank 2 on node2 takes 100 ms for its own part of a step, 40 ms longer than usual" in found.text
    assert "look at node2," in found.text


def test_where_samples_are_not_counted_it_is_told_in_seconds() -> None:
    found = verdict([made_view(_step(communication=50, forward=50), num_samples=0)])
    assert "a step would take 50 ms instead of 100 ms" in found.text


def test_a_host_cannot_steer_a_terminal() -> None:
    views = _ranks([_step(forward=40), _step(forward=10, communication=30)])
    named = [dataclasses.replace(each, host="evil\n\x1b[2J\u2028host") for each in views]
    assert verdict(named).text.isprintable()


# ---- JSON ----


@pytest.mark.parametrize("cause", PLANTED)
def test_a_verdict_reads_back_as_it_was_written(cause: str) -> None:
    found = verdict(planted(cause, 0, is_contended=True)[0])
    text = found.to_json()
    assert len(text.splitlines()) == 1
    assert Verdict.from_json(text) == found


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "bored"},
        {"ranks": ["a"]},
        {"hosts": None},
        {"share": "much"},
        {"runners_up": [{"kind": 1}]},
        {"text": 1},
    ],
)
def test_what_is_no_verdict_is_refused(change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(verdict([made_view(_step(forward=10))]).to_json()), **change})
    with pytest.raises(ValueError, match=next(iter(change)) if change != {"runners_up": [{"kind": 1}]} else "kind"):
        Verdict.from_json(text)


# ---- merged windows ----


def test_merged_windows_add_up() -> None:
    first = made_window(_step(forward=10), num_steps=30, num_undetailed=10, num_samples=5, accelerator_peak_bytes=7)
    second = made_window(_step(forward=20, data=4), num_steps=10, num_samples=6, begin=1001.0, end=1002.0, step=50)
    both = merged([second, first])
    assert (both.begin, both.end, both.step, both.num_steps) == (1000.0, 1002.0, 50, 40)
    assert both.seconds == pytest.approx({"forward": 0.4, "step": 0.1, "data": 0.04})
    assert both.typical == pytest.approx({"forward": (20 * 0.01 + 10 * 0.02) / 30, "data": 0.004 / 3})
    assert both.processor_seconds == pytest.approx({"forward": 0.4})
    assert both.step_seconds == pytest.approx((0.024,) * 4)
    assert (both.num_samples, both.num_detailed, both.accelerator_peak_bytes) == (11, 30, 7)


def test_a_window_whose_measured_steps_become_known_in_the_next_one_makes_merged_steps_no_shorter() -> None:
    known = made_window(_step(forward=10), num_steps=30, waiting_seconds=0.004)
    late = made_window(_step(forward=10), num_steps=20, begin=1001.0, end=1002.0, typical={}, step_seconds=())
    assert merged([known, late]).typical == pytest.approx({"forward": 0.01})
    none_measured = dataclasses.replace(known, num_detailed=0, begin=1002.0, end=1003.0)
    assert merged([late, none_measured]).typical == pytest.approx({"forward": 0.01})
    assert merged([late, none_measured]).waiting_seconds == pytest.approx(0.004)


def test_one_window_merged_is_itself() -> None:
    window = made_window(_step(forward=10, data=1), num_undetailed=3)
    assert merged([window]) == dataclasses.replace(window, typical=merged([window]).typical)
    assert merged([window]).typical == pytest.approx(dict(window.typical))


@pytest.mark.parametrize("name", ["rank", "world_size", "restart", "config_version", "config_revision"])
def test_windows_that_do_not_belong_together_are_not_merged(name: str) -> None:
    window = made_window(_step(forward=10))
    with pytest.raises(ValueError, match="cannot be merged"):
        merged([window, dataclasses.replace(window, **{name: 9})])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        merged([])


# ---- what holds for all profiles ----


def _told(value: float) -> float:
    """Nothing is shorter than clocks tell."""
    return value if value >= 1e-9 else 0.0


parts = st.dictionaries(st.sampled_from(list(Phase)), st.floats(0, 10).map(_told), max_size=14)
part_of_all = st.floats(0, 1).map(_told)
jobs = st.lists(parts, min_size=1, max_size=6)


def _job(
    steps: list[dict[Phase, float]], processor_share: float, num_undetailed: int, scale: float = 1.0
) -> list[RankView]:
    return _ranks(
        [{phase: spent * scale for phase, spent in step.items()} for step in steps],
        processor_share=processor_share,
        num_undetailed=num_undetailed,
        view={"census": census(num_flops=10**9, num_bytes=10**7, num_ops=100), "calibration": calibration()},
    )


@settings(deadline=None)
@given(jobs, part_of_all, st.integers(0, 100), st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(
    steps: list[dict[Phase, float]], share: float, undetailed: int, shuffled: random.Random
) -> None:
    views = _job(steps, share, undetailed)
    expected = verdict(views)
    shuffled.shuffle(views)
    assert verdict(views) == expected


@settings(deadline=None)
@given(jobs, part_of_all, st.integers(0, 100), st.integers(-8, 8))
def test_how_fast_all_of_it_is_does_not_matter(
    steps: list[dict[Phase, float]], share: float, undetailed: int, power: int
) -> None:
    plain, scaled = verdict(_job(steps, share, undetailed)), verdict(_job(steps, share, undetailed, 2.0**power))
    if "unknown" not in (plain.kind, scaled.kind):
        assert (plain.kind, plain.ranks, plain.runners_up) == (scaled.kind, scaled.ranks, scaled.runners_up)
        assert plain.share == scaled.share


@settings(deadline=None)
@given(jobs, part_of_all, st.integers(0, 100))
def test_shares_are_parts_and_text_is_a_line(steps: list[dict[Phase, float]], share: float, undetailed: int) -> None:
    found = verdict(_job(steps, share, undetailed))
    assert found.kind in KINDS
    assert found.share is None or 0 <= found.share <= 1
    assert all(0 <= each.share <= 1 for each in found.runners_up)
    assert found.text.isprintable() and found.text
    assert Verdict.from_json(found.to_json()) == found
    assert set(found.ranks) < set(range(len(steps))) or not found.ranks


anything = st.one_of(st.floats(), st.integers(), st.sampled_from([0.0, 1e308, 5e-324, -0.0]))
tables = st.dictionaries(st.sampled_from([*(phase.label for phase in Phase), "new"]), anything, max_size=6)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "seconds": tables,
                "processor_seconds": tables,
                "typical": tables,
                "step_seconds": st.lists(anything, max_size=4).map(tuple),
                "num_steps": st.integers(-1, 10**18),
                "num_samples": st.integers(),
                "world_size": st.integers(-1, 4),
                "num_detailed": st.integers(-1, 5),
            },
        ),
        max_size=3,
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "micro_batch": st.integers(),
            "num_micro_steps": st.integers(),
            "num_workers": st.integers(),
            "calibration": st.builds(
                lambda flops, speed, per_op: dataclasses.replace(
                    calibration(), flops_per_second=flops, bytes_per_second=speed, seconds_per_op=per_op
                ),
                anything,
                anything,
                anything,
            ),
            "census": st.builds(census, num_flops=st.integers(), num_bytes=st.integers(), num_ops=st.integers()),
        },
    ),
    st.booleans(),
)
def test_whatever_is_given_nothing_is_raised(
    changes: list[dict[str, Any]], view: dict[str, Any], is_partial: bool
) -> None:
    views = [
        dataclasses.replace(_with(each, **change), **view)
        for each, change in zip(_ranks([_step(forward=10, data=1)] * len(changes)), changes, strict=True)
    ]
    found = verdict(views, is_partial=is_partial)
    assert found.text.isprintable()
    json.loads(json.dumps(found.evidence, allow_nan=False))


@settings(deadline=None)
@given(st.integers(2, 40), st.data(), st.floats(0.3, 10), st.sampled_from([DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER]))
def test_whoever_is_slow_is_named(num_ranks: int, data: st.DataObject, more: float, phase: Phase) -> None:
    slow = data.draw(st.integers(0, num_ranks - 1))
    steps = [{FORWARD: 1.0, COMMUNICATION: more} for _ in range(num_ranks)]
    steps[slow] = {FORWARD: 1.0, COMMUNICATION: 0.0}
    steps[slow][phase] = steps[slow].get(phase, 0.0) + more
    found = verdict(_ranks(steps))
    assert (found.kind, found.ranks, found.hosts) == ("straggler", (slow,), (f"node{slow}",))


def test_what_passes_wait_for_others_is_told_by_a_trace() -> None:
    trace = StepTrace(
        time=0.0, rank=0, step_seconds=1.0, communication_seconds=0.7, exposed_seconds=0.6, computing_seconds=0.4
    )
    step = _step(forward=40, backward=50, communication=5, optimizer=5)
    seen = breakdown_of(made_view(step, view={"trace": trace}))
    assert seen.step[COMMUNICATION] == pytest.approx(0.6 * seen.step_seconds)
    assert seen.step[FORWARD] / seen.step[BACKWARD] == pytest.approx(0.8)
    assert seen.step_seconds == pytest.approx(breakdown_of(made_view(step)).step_seconds)
    hidden = dataclasses.replace(trace, exposed_seconds=0.01)
    assert breakdown_of(made_view(step, view={"trace": hidden})).step == breakdown_of(made_view(step)).step
    views = [made_view(step, rank=rank, world_size=2, view={"trace": trace}) for rank in range(2)]
    assert verdict(views).kind == "communication"


def test_communication_that_is_overlapped_is_told_apart_where_a_trace_knows_it() -> None:
    trace = StepTrace(
        time=0.0, rank=0, step_seconds=2.0, communication_seconds=1.4, exposed_seconds=1.2, computing_seconds=0.8
    )
    step = _step(forward=40, backward=50, communication=5, optimizer=5)
    views = [made_view(step, rank=rank, world_size=2, view={"trace": trace}) for rank in range(2)]
    found, plain = verdict(views), verdict(_ranks([_step(forward=20, communication=20)] * 2))
    assert found.evidence["overlapped_seconds"] == pytest.approx(0.1 * breakdown_of(views[0]).step_seconds)
    assert "nothing left to compute, and 10 ms more are overlapped by computing; " in found.text
    assert plain.evidence["overlapped_seconds"] is None and "overlapped" not in plain.text
    broken = dataclasses.replace(trace, exposed_seconds=1.5)  # more than there was
    assert breakdown_of(made_view(step, view={"trace": broken})) == breakdown_of(made_view(step))


# ---- planted causes ----


@pytest.mark.parametrize(("is_contended", "least"), [(False, 0.95), (True, 0.85)])
def test_planted_causes_are_found(is_contended: bool, least: float) -> None:
    wrong = []
    for cause in PLANTED:
        for seed in range(10):
            views, slow = planted(cause, seed, is_contended=is_contended)
            found = verdict(views)
            if found.kind != cause or (slow and found.ranks != slow):
                wrong.append((cause, seed, found.kind))
            assert not found.is_contended or is_contended or cause == "contention"
    assert len(wrong) <= (1 - least) * 10 * len(PLANTED), wrong


def test_no_rank_is_named_where_none_was_planted() -> None:
    for cause in set(PLANTED) - {"straggler", "contention"}:
        for seed in range(10):
            assert verdict(planted(cause, seed, is_contended=False)[0]).kind != "straggler"
