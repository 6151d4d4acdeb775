"""Following a config on one rank: what is in force at the start and later, knobs, files, and the ways out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ext import ConfigError, ConfigFollower, ElasticConfig, ElasticError, follow_config
from elastic_ext.cli import main
from elastic_ext.config.apply import AskAgainLater, Declined
from elastic_ext.ranks.world import PeerName, World
from elastic_ext.records.metrics import RankMetrics
from tests.support.loops import RecordingApplier, put, rate, seen_by, step_until, take_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the run directory of rank 0 in it."""
    (tmp_path / "0").mkdir()
    return tmp_path


def follower_in(folder: Path, **arguments: Any) -> ConfigFollower:
    return follow_config(run_dir=folder / "0", job="test", **{"poll_seconds": 0.2, **arguments})


# --- what is in force -----------------------------------------------------------------------------------------------


def resumed(folder: Path, startup: dict[str, object], state: dict[str, Any]) -> ConfigFollower:
    follower = follower_in(folder, startup=startup)
    follower.load_state_dict(state)
    return follower


def test_the_file_wins_over_the_checkpoint_and_the_checkpoint_over_the_arguments(folder: Path) -> None:
    put(folder, 0, {"version": 2, "user": {"c": "file"}})
    startup: dict[str, object] = {"user.a": "argument", "user.b": "argument", "user.c": "argument"}
    state = {
        "config": {"version": 7, "user": {"b": "checkpoint", "c": "checkpoint"}},
        "revision": 3,
        "step": 40,
    }
    with resumed(folder, startup, state) as follower:
        assert follower.config.label == "version 2", "the file found at start wins whatever its version"
        assert follower.config.user == {"a": "argument", "b": "checkpoint", "c": "file"}
        assert follower.step == 40
        with seen_by() as seen:
            put(folder, 0, {"version": 3})
            step_until(follower, seen, lambda: follower.config.version == 3)
        assert follower.config.user == {"a": "argument", "b": "checkpoint", "c": "checkpoint"}


REVISED = {"version": 2, "optimizer": {"learning_rate": 50.0}, "checkpoint": {"now": True}, "user": {"a": 1}}


def state_of_revision(folder: Path) -> dict[str, Any]:
    """What a checkpoint has of a run under REVISED, whose script has lowered the rate, as JSON."""
    put(folder, 0, REVISED)
    with seen_by() as seen, follower_in(folder, startup={"optimizer.learning_rate": 0.002}) as follower:
        follower.propose({"optimizer.learning_rate": 0.001}, "the loss has jumped")
        step_until(follower, seen, lambda: follower.config.revision == 1)
        state: dict[str, Any] = json.loads(json.dumps(follower.state_dict()))
    return state


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("is_of_before", [False, True], ids=["", "saved before files were"])
def test_a_revision_holds_over_a_restart_against_the_file_that_it_has_revised(
    folder: Path, is_started: bool, is_of_before: bool
) -> None:
    state = state_of_revision(folder)
    startup: dict[str, object] = {"optimizer.learning_rate": 0.002}
    if is_of_before:
        del state["files"]
    with (
        seen_by() as seen,
        follower_in(folder, startup=startup) if is_started else resumed(folder, startup, state) as f,
    ):
        if is_started:
            f.load_state_dict(state)
        assert f.config.label == "version 2, revision 1"
        assert f.config.values() == {"optimizer.learning_rate": 0.001, "user.a": 1}
        assert not f.boundary().save, "the run before has saved for the version's checkpoint.now"
        again = f.state_dict()
        assert again["config"] == state["config"] and len(again["files"]) == 1
        put(folder, 0, REVISED | {"version": 3})
        step_until(f, seen, lambda: f.config.label == "version 3")
        assert f.config.optimizer.learning_rate == 50.0, "a newer version replaces a revision"
    assert not told_of_file(seen.log)


@pytest.mark.parametrize(
    "file", [{"version": 2, "user": {"b": 2}}, {"version": 1, "user": {"b": 2}}, {"version": 3, "user": {"b": 2}}]
)
def test_a_file_that_is_not_the_one_that_was_revised_wins_over_the_revision(folder: Path, file: dict[str, Any]) -> None:
    state = state_of_revision(folder)
    put(folder, 0, file | {"optimizer": {"learning_rate": 5.0}})
    with resumed(folder, {"optimizer.learning_rate": 0.002}, state) as follower:
        assert follower.config.label == f"version {file['version']}"
        assert follower.config.values() == {"optimizer.learning_rate": 5.0, "user.a": 1, "user.b": 2}


def test_a_file_brings_what_the_script_has_put_in_place_of_a_revisions_values(folder: Path) -> None:
    """As a plan: a run begins with its script's, and the file of the version in force has its own."""
    put(folder, 0, {"version": 2, "user": {"plan": "file", "x": 1}})
    saved = {"version": 2, "user": {"plan": "file", "x": 2}}
    state = {"config": {"version": 2, "user": {"plan": "script", "x": 2}}, "saved": saved, "revision": 1, "step": 4}
    with resumed(folder, {"user.plan": "script"}, state) as follower:
        assert follower.config.user == {"plan": "file", "x": 2}
        assert follower.config.label == "version 2, revision 1"


def test_without_a_file_the_checkpoints_version_is_the_one_that_a_later_file_must_exceed(folder: Path) -> None:
    state = {"config": {"version": 7, "user": {"b": 1}}, "revision": 2, "step": 40}
    with seen_by() as seen, resumed(folder, {}, state) as follower:
        assert follower.config.label == "version 7, revision 2"
        put(folder, 0, {"version": 6})
        step_until(follower, seen, lambda: any("holds version 6 and was refused" in line for line in seen.log))
        assert any("give it a version of 8 or more" in line for line in seen.log)
        put(folder, 0, {"version": 8})
        step_until(follower, seen, lambda: follower.config.version == 8)


def test_the_state_of_a_follower_is_plain_json_and_brings_another_to_the_same_config(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder, startup={"dataloader.batch_size": 8}) as follower:
        put(folder, 0, {"version": 4, "user": {"list": [1, [2, "x"]]}})
        step_until(follower, seen, lambda: follower.config.version == 4)
        follower.propose({"dataloader.batch_size": 4}, "less")
        step_until(follower, seen, lambda: follower.config.revision == 1)
        state = json.loads(json.dumps(follower.state_dict()))
        config, step = follower.config, follower.step
    (folder / "0" / "config.json").unlink()
    with resumed(folder, {"dataloader.batch_size": 8}, state) as again:
        assert again.config.digest == config.digest
        assert again.step == step


def test_an_absent_key_means_the_start_up_value_again(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder, startup={"optimizer.learning_rate": 0.1}) as follower:
        for version, rate in ((1, 0.5), (2, None), (3, 0.7)):
            put(folder, 0, {"version": version} | ({"optimizer": {"learning_rate": rate}} if rate else {}))
            step_until(follower, seen, lambda version=version: follower.config.version == version)  # type: ignore[misc]
            assert follower.config.optimizer.learning_rate == (rate or 0.1)


def test_a_bad_file_at_the_start_leaves_the_start_up_values_in_force(folder: Path) -> None:
    put(folder, 0, '{"version": 1, "optimizer": {"learning_rate": -1}}')
    with seen_by() as seen, follower_in(folder, startup={"optimizer.learning_rate": 0.1}) as follower:
        assert follower.config.optimizer.learning_rate == 0.1
        step_until(follower, seen, lambda: any("learning_rate is -1" in line for line in seen.log))
        put(folder, 0, {"version": 1})
        step_until(follower, seen, lambda: follower.config.version == 1)


def test_a_file_found_at_the_start_whose_step_is_to_come_waits_for_it(folder: Path) -> None:
    put(folder, 0, {"version": 3, "apply_at_step": 5, "user": {"x": 1}})
    with seen_by() as seen, follower_in(folder) as follower:
        values = []
        for _ in range(8):
            values.append(follower.knob("x", 0))
            take_step(follower, seen)
    assert values == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_file_found_at_the_start_whose_step_has_passed_is_in_force(folder: Path) -> None:
    put(folder, 0, {"version": 3, "apply_at_step": 5})
    with follower_in(folder, start_step=9) as follower:
        assert follower.config.version == 3


def test_a_value_that_the_start_up_values_forbid_is_refused_with_the_reason(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder, startup={"parallelism.strategy": "no_shard"}) as follower:
        put(folder, 0, {"version": 1, "parallelism": {"shard_degree": 4}})
        step_until(follower, seen, lambda: any("version 1 was refused" in line for line in seen.log))
        assert any("with the script's start-up values" in line and "shard_degree" in line for line in seen.log)
        assert follower.config.version == 0


def test_a_file_that_waits_for_its_step_since_the_start_is_replaced_by_a_newer_one_below_the_checkpoints(
    folder: Path,
) -> None:
    put(folder, 0, {"version": 3, "apply_at_step": 60, "user": {"x": 3}})
    state = {"config": {"version": 7}, "revision": 0, "step": 40}
    with seen_by() as seen, resumed(folder, {}, state) as follower:
        assert follower.config.version == 7
        put(folder, 0, {"version": 5, "user": {"x": 5}}, seen_by=follower)
        for _ in range(4):
            take_step(follower, seen)
        assert follower.config.version == 5
    assert not [line for line in seen.log if "refused" in line]


def test_a_file_that_waits_for_its_step_while_a_checkpoint_is_loaded_is_not_said_to_be_refused(folder: Path) -> None:
    put(folder, 0, {"version": 3, "apply_at_step": 45, "user": {"x": 3}})
    with seen_by() as seen, follower_in(folder) as follower:
        follower.load_state_dict({"config": {"version": 7, "user": {"y": 1}}, "revision": 0, "step": 40})
        assert follower.config.label == "version 7"
        follower.propose({"user.y": 2}, "a test")
        for _ in range(8):
            take_step(follower, seen)
        assert follower.config.user == {"x": 3, "y": 1}
    assert seen.in_force[4:6] == ["version 7, revision 1", "version 3"]
    assert not [line for line in seen.log if "refused" in line]


# --- what has to be tried in a step first -----------------------------------------------------------------------------


class Trying(RecordingApplier):
    """An applier that has to try configs of these labels in a step first: it asks once to be asked again later."""

    def __init__(self, *labels: str) -> None:
        super().__init__(before=self._try_first)
        self._untried = set(labels)

    def _try_first(self, doing: str, new: ElasticConfig) -> None:
        if new.label in self._untried:
            self._untried.remove(new.label)
            raise AskAgainLater


@pytest.mark.parametrize("at_step", [{}, {"apply_at_step": 20}, {"apply_at_step": 42}], ids=["none", "past", "to come"])
def test_a_file_that_has_to_be_tried_at_the_start_comes_into_force_after_a_step_whatever_its_version(
    folder: Path, at_step: dict[str, int]
) -> None:
    put(folder, 0, rate(3, 0.25, **at_step))
    applier = Trying("version 3")
    state = {"config": {"version": 7}, "revision": 0, "step": 40}
    with seen_by() as seen:
        follower = resumed(folder, {}, state)
        follower.add(applier)
        with follower:
            for _ in range(4):
                take_step(follower, seen)
    num_before = 2 if at_step.get("apply_at_step") == 42 else 1
    assert seen.in_force == ["version 7"] * num_before + ["version 3"] * (4 - num_before)
    assert applier.applied == [("version 7", "version 3")]
    assert not [line for line in seen.log if "refused" in line]


def test_a_file_that_has_to_be_tried_as_a_checkpoint_is_loaded_comes_into_force_after_a_step(folder: Path) -> None:
    put(folder, 0, rate(3, 0.25))
    state = {"config": {"version": 7, "user": {"y": 1}}, "revision": 0, "step": 40}
    with seen_by() as seen, follower_in(folder) as follower:
        follower.add(Trying("version 3"))
        follower.load_state_dict(state)
        assert follower.config.label == "version 7"
        for _ in range(3):
            take_step(follower, seen)
        assert follower.config.user == {"y": 1}
    assert seen.in_force == ["version 7", "version 3", "version 3"]
    assert not [line for line in seen.log if "refused" in line]


def test_a_resumed_config_that_would_have_to_be_tried_in_a_step_is_refused(folder: Path) -> None:
    state = {"config": {"version": 7}, "revision": 0, "step": 40}
    with seen_by() as seen, follower_in(folder) as follower:
        follower.add(Trying("version 7"))
        follower.load_state_dict(state)
        assert follower.config.label == "version 0"
        take_step(follower, seen)
    assert [line for line in seen.log if "refused" in line] == [
        "WARNING the resumed config version 7 was refused, version 0 stays in force: rank 0: optimizer: it cannot be "
        "checked before another step has run"
    ]


def test_a_proposal_that_has_to_be_tried_as_a_checkpoint_is_loaded_is_not_lost(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        follower.add(Trying("version 7, revision 1"))
        proposal = follower.propose({"optimizer.learning_rate": 0.5}, "a test")
        follower.load_state_dict({"config": {"version": 7}, "revision": 0, "step": 40})
        assert (follower.config.label, proposal.outcome) == ("version 7", "pending")
        step_until(follower, seen, lambda: proposal.outcome == "in force")
        assert follower.config.label == "version 7, revision 1"


def test_a_revision_of_all_ranks_that_would_have_to_be_tried_in_a_step_is_refused(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        follower.add(Trying("version 0, revision 1"))
        take_step(follower, seen)
        refusal = follower.revise({"optimizer.learning_rate": 0.5}, "a test")
        assert refusal == "rank 0: optimizer: it cannot be checked before another step has run"
        assert follower.config.label == "version 0"
        assert follower.revise({"optimizer.learning_rate": 0.5}, "a test") == ""


# --- save once ------------------------------------------------------------------------------------------------------


def test_a_version_that_asks_for_a_checkpoint_gets_one_and_its_revisions_none(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        put(folder, 0, {"version": 1, "checkpoint": {"now": True}})
        step_until(follower, seen, lambda: follower.config.version == 1)
        follower.propose({"user.x": 1}, "a revision")
        step_until(follower, seen, lambda: follower.config.revision == 1)
        put(folder, 0, {"version": 2})
        step_until(follower, seen, lambda: follower.config.version == 2)
        assert len(seen.saves) == 1
        follower.propose({"checkpoint.now": True}, "from inside")
        step_until(follower, seen, lambda: follower.config.revision == 1)
        assert len(seen.saves) == 2


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize(("resumed_version", "num_saves"), [(4, 1), (5, 0)])
def test_a_restart_saves_for_a_file_only_if_the_checkpoint_did_not_know_its_version(
    folder: Path, resumed_version: int, num_saves: int, is_started: bool
) -> None:
    put(folder, 0, {"version": 5, "checkpoint": {"now": True}})
    state = {"config": {"version": resumed_version}, "revision": 0, "step": 3}
    with seen_by() as seen, follower_in(folder) if is_started else resumed(folder, {}, state) as follower:
        if is_started:
            follower.load_state_dict(state)
        for _ in range(6):
            take_step(follower, seen)
    assert len(seen.saves) == num_saves


def test_a_file_that_comes_between_the_start_and_the_loading_of_a_checkpoint_is_saved_for(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        put(folder, 0, {"version": 5, "checkpoint": {"now": True}}, seen_by=follower)
        follower.load_state_dict({"config": {"version": 4}, "revision": 0, "step": 3})
        for _ in range(6):
            take_step(follower, seen)
    assert len(seen.saves) == 1


def test_a_save_that_the_script_asks_for_before_it_loads_a_checkpoint_is_not_lost(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        follower.request_save()
        follower.load_state_dict({"config": {"version": 4, "checkpoint": {"now": True}}, "revision": 0, "step": 3})
        for _ in range(6):
            take_step(follower, seen)
    assert len(seen.saves) == 1


# --- knobs and appliers ---------------------------------------------------------------------------------------------


def test_a_knob_of_another_type_than_the_scripts_is_refused_by_name(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        assert follower.knob("mixup", 0.5) == 0.5
        put(folder, 0, {"version": 1, "user": {"mixup": "a lot"}})
        step_until(follower, seen, lambda: any("version 1 was refused" in line for line in seen.log))
        assert any('user.mixup is "a lot"; allowed: a number' in line for line in seen.log)
        put(folder, 0, {"version": 2, "user": {"mixup": 1}})
        step_until(follower, seen, lambda: follower.config.version == 2)
        value = follower.knob("mixup", 0.5)
        assert value == 1.0
        assert type(value) is float


def test_a_knob_read_late_that_holds_another_type_says_so(folder: Path) -> None:
    put(folder, 0, {"version": 1, "user": {"mixup": "a lot"}})
    with follower_in(folder) as follower, pytest.raises(ConfigError, match=r"user\.mixup is \"a lot\""):
        follower.knob("mixup", 0.5)
    assert follower.knob("mixup") == "a lot"


def test_a_dotted_key_of_the_table_can_be_read_as_a_knob(folder: Path) -> None:
    with follower_in(folder, startup={"dataloader.batch_size": 8}) as follower:
        assert follower.knob("dataloader.batch_size", 1) == 8
        assert follower.knob("dataloader.num_workers", 2) == 2


def test_what_nothing_has_asked_for_is_named_once_it_is_set(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        follower.knob("read", 0)
        follower.add(RecordingApplier("optimizer"))
        values = {"user": {"read": 1, "raed": 1}, "optimizer": {"learning_rate": 0.1}, "dataloader": {"num_workers": 1}}
        put(folder, 0, {"version": 1, **values})
        step_until(follower, seen, lambda: follower.config.version == 1)
    unread = [line for line in seen.log if "nothing in this job has asked for" in line]
    assert len(unread) == 1
    assert "dataloader.num_workers, user.raed" in unread[0]


def test_sections_are_applied_in_the_houses_order_and_only_where_they_differ(folder: Path) -> None:
    order: list[str] = []
    with seen_by() as seen, follower_in(folder) as follower:
        for section in ("user", "optimizer", "dataloader", "parallelism", "communication", "checkpoint"):
            follower.on_change(section, lambda old, new, section=section: order.append(section))  # type: ignore[misc]
        put(
            folder,
            0,
            {
                "version": 1,
                "user": {"a": 1},
                "checkpoint": {"steps": 5},
                "optimizer": {"learning_rate": 1},
                "communication": {"bucket_cap_mb": 1},
                "parallelism": {"unit": "whole"},
            },
        )
        step_until(follower, seen, lambda: follower.config.version == 1)
    assert order == ["communication", "parallelism", "optimizer", "checkpoint", "user"]


def test_an_applier_that_only_checks_does_not_make_a_declined_config_an_error(folder: Path) -> None:
    def before(doing: str, new: ElasticConfig) -> None:
        if (doing, new.version) == ("apply", 1):
            raise Declined("no memory")

    checking, declining = RecordingApplier("dataloader"), RecordingApplier("optimizer", before=before)
    checking.only_checks = True  # type: ignore[attr-defined]
    with seen_by() as seen, follower_in(folder) as follower:
        follower.add(checking)
        follower.add(declining)
        for version in (1, 2):
            put(folder, 0, rate(version, 0.5, dataloader={"batch_size": 4}))
            step_until(follower, seen, lambda: f"version {version}" in declining.checked)  # noqa: B023
        step_until(follower, seen, lambda: follower.config.version == 2)
    assert declining.applied == [("version 0", "version 2")]
    assert checking.applied == []
    refusals = [line for line in seen.log if "refused" in line]
    assert refusals == ["WARNING config version 1 was refused, version 0 stays in force: rank 0: optimizer: no memory"]


def test_an_applier_of_an_unknown_section_is_refused(folder: Path) -> None:
    with follower_in(folder) as follower, pytest.raises(ValueError, match=r"section is 'optimiser'; allowed: one of"):
        follower.add(RecordingApplier("optimiser"))


def test_a_check_given_to_on_change_can_refuse(folder: Path) -> None:
    taken: list[ElasticConfig] = []
    with seen_by() as seen, follower_in(folder) as follower:
        follower.on_change("user", lambda old, new: taken.append(new), check=lambda new: "never" if new.user else None)
        put(folder, 0, {"version": 1, "user": {"a": 1}})
        step_until(follower, seen, lambda: any("user: never" in line for line in seen.log))
    assert taken == []


def test_a_proposal_that_can_never_be_allowed_raises_at_once(folder: Path) -> None:
    with follower_in(folder) as follower:
        with pytest.raises(ConfigError, match=r"dataloader\.batch_size is 0"):
            follower.propose({"dataloader.batch_size": 0}, "too small")
        with pytest.raises(ConfigError, match=r"nearest is \"dataloader\.batch_size\""):
            follower.propose({"batch_size": 4}, "no such key")


# --- files, and the ways out ----------------------------------------------------------------------------------------


def test_the_run_directory_tells_what_is_in_force_and_since_when(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with seen_by() as seen, follower_in(folder) as follower:
        put(folder, 0, {"version": 2, "reason": "because", "user": {"x": 1}})
        step_until(follower, seen, lambda: follower.config.version == 2)
    metrics = json.loads((folder / "0" / "metrics-0.json").read_text())
    assert (metrics["config_version"], metrics["config_revision"], metrics["generation"]) == (2, 0, 3)
    assert (metrics["rank"], metrics["world_size"], metrics["pid"]) == (0, 1, os.getpid())
    (event,) = [json.loads(line) for line in (folder / "0" / "events-0.jsonl").read_text().splitlines()]
    assert (event["kind"], event["generation"], event["step"]) == ("config-applied", 3, seen.applied[0][0])
    assert event["details"]["changes"] == {"user.x": [None, 1]}
    assert event["text"].endswith("user.x not set -> 1 (because)")


def applied_in(folder: Path) -> list[tuple[int, int, int, list[str]]]:
    """The step, version, revision and changed keys of each config that the events say came into force."""
    events = [json.loads(line) for line in (folder / "0" / "events-0.jsonl").read_text().splitlines()]
    return [
        (event["step"], event["details"]["version"], event["details"]["revision"], sorted(event["details"]["changes"]))
        for event in events
        if event["kind"] == "config-applied"
    ]


@pytest.mark.parametrize("ends_epoch", [True, False])
def test_each_config_that_a_step_ran_under_has_an_event(folder: Path, ends_epoch: bool) -> None:
    put(folder, 0, {"version": 1, "user": {"b": 2}, "apply_at_step": 2})
    with seen_by() as seen, follower_in(folder, startup={"user.b": 1}) as follower:
        follower.propose({"user.a": 1}, "a test")
        take_step(follower, seen)
        if ends_epoch:  # the revision comes into force here, and else at the next boundary
            follower.end_epoch()
        passed = take_step(follower, seen)
        assert passed.applied is not None
        assert passed.applied.changes == {"user.b": (1, 2)}, "to the loop it is one change"
    assert seen.in_force == ["version 0", "version 0, revision 1" if ends_epoch else "version 0"]
    apart = [(1, 0, 1, ["user.a"]), (2, 1, 0, ["user.a", "user.b"])]
    assert applied_in(folder) == (apart if ends_epoch else [(2, 1, 0, ["user.b"])])


def test_the_merged_config_is_logged_at_the_start_and_revisions_reach_the_metrics(folder: Path) -> None:
    put(folder, 0, {"version": 2, "user": {"b": 2}})
    with seen_by() as seen, follower_in(folder, startup={"user.a": 1}) as follower:
        start = [line for line in seen.log if "config file" in line]
        assert len(start) == 1
        assert start[0].endswith('config version 2 is in force: {"version": 2, "user": {"a": 1, "b": 2}}')
        follower.propose({"user.a": 5}, "from inside")
        step_until(follower, seen, lambda: follower.config.revision == 1)
        metrics = json.loads((folder / "0" / "metrics-0.json").read_text())
        assert (metrics["config_version"], metrics["config_revision"]) == (2, 1)


LEFT = {
    "version": 5,
    "optimizer": {"learning_rate": 0.25},
    "dataloader": {"num_workers": 4, "batch_size": 8},
    "tuning": {"mode": "auto"},
    "checkpoint": {"now": True},
    "user": {"a b": 1, "c": 2, "d": 3, "e": 4},
}
"""What a run has left behind."""
LEFT_TOLD = (
    'optimizer.learning_rate 1.0 -> 0.25, dataloader.num_workers the script\'s -> 4, tuning.mode -> "auto", '
    "user.a b the script's -> 1, user.c the script's -> 2 and 2 more"
)


def told_of_file(log: list[str]) -> list[str]:
    return [line for line in log if "was there at the start" in line]


def test_a_file_that_the_last_run_has_left_is_warned_of_with_what_it_changes_and_the_way_back(folder: Path) -> None:
    put(folder, 0, LEFT)
    startup = {"optimizer.learning_rate": 1.0, "dataloader.batch_size": 8}
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        for _ in range(3):
            take_step(follower, seen)
    (line,) = told_of_file(seen.log)
    file = folder / "0" / "config.json"
    begin = f"WARNING the config file {file} was there at the start, and wins over the script: {LEFT_TOLD}; to have"
    assert line.startswith(begin)
    words = shlex.split(line.partition("next start: ")[2])
    assert words[0] == "elastic-ext" and main(words[1:]) == 0
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        take_step(follower, seen)
        assert follower.config.version == 6 and follower.config.values() == startup
    assert told_of_file(seen.log) == []


@pytest.mark.parametrize(
    ("restart", "resumed_version", "words"),
    [("1", None, ""), ("0", 5, ""), ("0", 4, 'the script and the checkpoint: tuning.mode -> "auto", user.c the ')],
)
def test_a_file_that_was_in_force_before_a_restart_is_not_told_of(
    folder: Path, restart: str, resumed_version: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    put(folder, 0, LEFT)
    with seen_by() as seen, follower_in(folder) as follower:
        if resumed_version is not None:
            of_checkpoint = {key: LEFT[key] for key in ("optimizer", "dataloader")} | {"user": {"a b": 1}}
            state = {"config": {**of_checkpoint, "version": resumed_version}, "revision": 2, "step": 9}
            follower.load_state_dict(state)
        take_step(follower, seen)
    assert [words in line for line in told_of_file(seen.log)] == [True] * bool(words)


def test_the_command_of_that_warning_restores_the_scripts_values_over_a_checkpoint_too(folder: Path) -> None:
    """By naming them: a key that is taken out has the checkpoint's value."""
    put(folder, 0, {"version": 5, "optimizer": {"learning_rate": 0.25}, "user": {"depth": 4, "width": 3, "x": 2}})
    startup = {"optimizer.learning_rate": 1.0}
    brought = {"version": 4, "optimizer": {"learning_rate": 0.5}, "user": {"width": 2, "x": 1}}
    state = {"config": brought, "revision": 0, "step": 9}
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        follower.knob("depth", 1)
        follower.knob("width", 1)
        follower.load_state_dict(state)
        take_step(follower, seen)
    (line,) = told_of_file(seen.log)
    file = folder / "0" / "config.json"
    assert line.endswith(
        "and wins over the script and the checkpoint: optimizer.learning_rate 1.0 (the checkpoint's: 0.5) -> 0.25, "
        "user.width 1 (the checkpoint's: 2) -> 3, user.x the script's (the checkpoint's: 1) -> 2, user.depth 1 -> 4; "
        "without it the checkpoint's values are in force, so give user.x the wanted value; to have the script's own "
        "values, now or at the next start: elastic-ext config set "
        f"--file {file} optimizer.learning_rate=1.0 user.width=1 user.depth=1"
    )
    words = shlex.split(line.partition("next start: ")[2])
    assert main(words[1:]) == 0
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        follower.load_state_dict(state)
        take_step(follower, seen)
        wanted = {"optimizer.learning_rate": 1.0, "user.width": 1, "user.depth": 1, "user.x": 2}
        assert follower.config.values() == wanted


def test_the_metrics_have_what_the_resumed_checkpoint_has_brought_into_force(folder: Path) -> None:
    put(folder, 0, {"version": 5, "user": {"x": 2}})
    startup = {"optimizer.learning_rate": 1.0, "optimizer.weight_decay": 0.5}
    brought = {"version": 4, "optimizer": {"learning_rate": 0.5, "weight_decay": 0.5}, "user": {"x": 1, "y": "a"}}
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        follower.load_state_dict({"config": brought, "revision": 0, "step": 9})
        take_step(follower, seen)
        metrics = json.loads((folder / "0" / "metrics-0.json").read_text())
    assert metrics["from_checkpoint"] == {"optimizer.learning_rate": "0.5 (the script has 1.0)", "user.y": '"a"'}


def test_the_metrics_have_what_the_script_has_put_in_the_place_of_the_checkpoints_values(folder: Path) -> None:
    """As its plan, with which a run begins whatever the checkpoint has."""
    config = {"version": 4, "parallelism": {"strategy": "no_shard", "unit": 1}, "user": {"x": 1}}
    saved = {"version": 4, "parallelism": {"strategy": "full_shard", "unit": 1}, "user": {"x": 1}}
    startup = {"parallelism.strategy": "no_shard", "parallelism.unit": 1, "user.x": 2}
    with seen_by() as seen, follower_in(folder, startup=startup) as follower:
        follower.load_state_dict({"config": config, "saved": saved, "revision": 0, "step": 9})
        take_step(follower, seen)
        metrics = json.loads((folder / "0" / "metrics-0.json").read_text())
        assert metrics["not_from_checkpoint"] == {
            "parallelism.strategy": '"no_shard" (the checkpoint has "full_shard")'
        }
        put(folder, 0, {"version": 5, "parallelism": {"strategy": "full_shard"}})
        step_until(follower, seen, lambda: follower.config.version == 5)
        metrics = json.loads((folder / "0" / "metrics-0.json").read_text())
        assert metrics["not_from_checkpoint"] == {}


def test_a_torch_that_was_never_tested_is_said_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for torch_version, num_told in ((torch.__version__, 0), ("2.12.1", 1)):
        monkeypatch.setattr(torch, "__version__", torch_version)
        with seen_by() as seen, follower_in(folder):
            assert sum("torch 2.12.1 was never tested" in line for line in seen.log) == num_told


def test_another_run_that_writes_into_the_run_directory_is_warned_of(folder: Path) -> None:
    with follower_in(folder) as follower:
        follower.boundary()
    written = RankMetrics.from_json((folder / "0" / "metrics-0.json").read_text())
    now = time.time() + 1.0
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid, written_at, num_warned in ((sleeper.pid, now, 1), (sleeper.pid, 0.0, 0), (os.getpid(), now, 0)):
            (folder / "0" / "metrics-0.json").write_text(replace(written, pid=pid, time=written_at).to_json())
            with seen_by() as seen, follower_in(folder):
                assert sum(f"process {pid} runs, and writes into" in line for line in seen.log) == num_warned
    finally:
        sleeper.communicate()


def test_training_goes_on_where_the_run_directory_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = tmp_path / "config.json"
    with (
        seen_by() as seen,
        follow_config(config, run_dir=tmp_path / "file" / "run", job="test", poll_seconds=0.2) as follower,
    ):
        config.write_text('{"version": 1}')
        step_until(follower, seen, lambda: follower.config.version == 1)
    assert len([line for line in seen.log if "cannot be written" in line]) == 1


def test_switched_off_there_are_no_threads_no_files_and_no_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_EXT", "off")
    put(folder, 0, {"version": 1, "user": {"x": 1}})
    threads = set(threading.enumerate())
    with follower_in(folder, startup={"user.x": 5}) as follower:
        assert set(threading.enumerate()) == threads
        assert follower.knob("x", 0) == 5
        proposal = follower.propose({"user.x": 6}, "no")
        assert (proposal.outcome, "ELASTIC_EXT=off" in proposal.refusal) == ("refused", True)
        assert follower.boundary().step == 1
        follower.request_stop()
        assert [follower.boundary().stop for _ in range(2)][-1]
    assert [file.name for file in (folder / "0").iterdir()] == ["config.json"]


def test_closing_ends_every_thread_and_twice_is_allowed(folder: Path) -> None:
    threads = set(threading.enumerate())
    follower = follower_in(folder)
    follower.start()
    assert set(threading.enumerate()) > threads
    follower.close()
    follower.close()
    assert set(threading.enumerate()) == threads
    assert follower.config.version == 0


def refusals_in(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "0" / "events-0.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "config-refused"]


def test_a_version_that_comes_after_the_last_step_is_said_to_be_too_late(folder: Path) -> None:
    put(folder, 0, rate(3, 0.25))
    with seen_by() as seen, follower_in(folder) as follower:
        follower.boundary()
        follower.finish()
        put(folder, 0, rate(4, 0.5), seen_by=follower)
    why = "training ended, at step 1, before all ranks had agreed on it; the next run begins with it"
    assert [line for line in seen.log if "refused" in line] == [
        f"WARNING config version 4 was refused, version 3 stays in force: {why}"
    ]
    assert refusals_in(folder) == [f"version 4 was refused: {why}"]


def test_an_old_version_or_one_that_cannot_be_is_said_even_after_the_last_step(folder: Path) -> None:
    put(folder, 0, rate(3, 0.25))
    for contents, words in (
        (rate(2, 0.5), "holds version 2 and was refused, since version 3 is in force; give it a version of 4 or more"),
        ({"version": 4, "typo": 1}, "was refused, and version 3, valid before, is kept: typo is not a known key"),
    ):
        put(folder, 0, rate(3, 0.25))
        with seen_by() as seen, follower_in(folder) as follower:
            follower.boundary()
            put(folder, 0, contents, seen_by=follower)
            follower.finish()
        assert [words in line for line in seen.log if "refused" in line] == [True]


def test_of_a_run_that_an_exception_ended_no_version_is_said_to_be_late(folder: Path) -> None:
    with seen_by() as seen, suppress(LookupError), follower_in(folder) as follower:
        follower.boundary()
        put(folder, 0, rate(4, 0.5), seen_by=follower)
        raise LookupError
    assert not [line for line in seen.log if "refused" in line]


def end_of_with(folder: Path) -> ConfigFollower:
    with follower_in(folder) as follower:
        pass
    return follower


def exception_in_with(folder: Path) -> ConfigFollower:
    with suppress(LookupError), follower_in(folder) as follower:
        raise LookupError
    return follower


def call_of_close(folder: Path) -> ConfigFollower:
    follower = follower_in(folder)
    follower.start()
    follower.close()
    return follower


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        (end_of_with, "`with follower:` has ended, and"),
        (exception_in_with, "an exception has left `with follower:`, and"),
        (call_of_close, r"follower\.close\(\) was called, and"),
    ],
)
def test_what_comes_after_the_end_says_what_the_user_did(
    folder: Path, closed: Callable[[Path], ConfigFollower], words: str
) -> None:
    follower = closed(folder)
    for _ in range(2):
        with pytest.raises(
            ElasticError, match=f"^{words}.* make this call earlier, or make a new follower or trainer on every rank$"
        ):
            follower.boundary()
        follower.close()  # changes nothing of what it was


def test_a_follower_that_was_not_started_says_what_to_do(folder: Path) -> None:
    follower = follower_in(folder)
    with pytest.raises(ElasticError, match=r"start\(\) was not called"):
        follower.boundary()
    follower.close()


def test_a_checkpoint_loaded_after_the_first_step_is_refused(folder: Path) -> None:
    with follower_in(folder) as follower:
        follower.boundary()
        with pytest.raises(ElasticError, match="only before the first step"):
            follower.load_state_dict(follower.state_dict())


def test_a_checkpoint_loaded_after_the_start_comes_into_force_under_the_file(folder: Path) -> None:
    state = {"config": {"version": 7, "optimizer": {"weight_decay": 0.5}, "user": {"a": 1}}, "revision": 2, "step": 40}
    put(folder, 0, rate(3, 0.25))
    with follower_in(folder, startup={"optimizer.learning_rate": 0.5}) as follower:
        applier = RecordingApplier()
        follower.add(applier)
        follower.load_state_dict(state)
        assert follower.config.values() == {
            "optimizer.learning_rate": 0.25,
            "optimizer.weight_decay": 0.5,
            "user.a": 1,
        }
        assert follower.config.version == 3
        assert applier.applied[-1][1] == "version 3"
        follower.boundary()
        assert follower.step == 41


@pytest.mark.parametrize("has_file", [False, True])
def test_a_checkpoint_loaded_before_the_start_reaches_what_acts_on_its_values(folder: Path, has_file: bool) -> None:
    if has_file:
        put(folder, 0, {"version": 3, "user": {"b": 2}})
    follower = follower_in(folder, startup={"optimizer.learning_rate": 0.5})
    changes = []
    follower.on_change(
        "optimizer", lambda old, new: changes.append((old.optimizer.learning_rate, new.optimizer.learning_rate))
    )
    follower.load_state_dict({"config": rate(7, 0.25), "revision": 0, "step": 40})
    assert follower.config.optimizer.learning_rate == 0.25
    with follower:
        assert follower.config.version == (3 if has_file else 7)
        assert changes == [(0.5, 0.25)]
        follower.boundary()
    assert changes == [(0.5, 0.25)]


def test_a_checkpoint_loaded_before_the_start_is_refused_as_one_loaded_after_it(folder: Path) -> None:
    state = {"config": rate(7, 0.25), "revision": 0, "step": 40}
    with seen_by() as seen:
        follower = follower_in(folder, startup={"optimizer.learning_rate": 0.5})
        follower.on_change("optimizer", lambda old, new: None, lambda new: "no" if new.version == 7 else None)
        follower.load_state_dict(state)
        with follower:
            assert follower.config.optimizer.learning_rate == 0.5
    assert [line for line in seen.log if "refused" in line] == [
        "WARNING the resumed config version 7 was refused, version 0 stays in force: rank 0: optimizer: no"
    ]


def test_what_a_checkpoint_leaves_as_it_was_since_the_start_is_told_once(folder: Path) -> None:
    put(folder, 0, rate(3, 0.25))
    with seen_by() as seen, follower_in(folder, startup={"optimizer.learning_rate": 0.5}) as follower:
        follower.load_state_dict({"config": follower.config.to_dict(), "revision": 0, "step": 40})
        assert follower.boundary().applied is None
    told = [line for line in seen.log if "in force from" in line]
    assert told == [
        "INFO config version 3 in force from the start: optimizer.learning_rate 0.5 -> 0.25, on all 1 ranks"
    ]
    events = [json.loads(line) for line in (folder / "0" / "events-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "config-applied"] == [0]


def test_a_checkpoint_loaded_after_the_start_without_a_file_stays_in_force(folder: Path) -> None:
    state = {"config": {"version": 7, "user": {"a": 1}}, "revision": 2, "step": 40}
    with follower_in(folder) as follower:
        follower.load_state_dict(state)
        assert follower.config.label == "version 7, revision 2"
        put(folder, 0, rate(7, 0.25), seen_by=follower)
        follower.boundary()
        follower.boundary()
        assert follower.config.label == "version 7, revision 2", "a later file needs a higher version"


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "always"])
def test_an_impossible_thinning_is_refused(folder: Path, every: Any) -> None:
    with pytest.raises(ValueError, match=r'agree_every_steps is .*; allowed: "auto" or an integer >= 1'):
        follower_in(folder, agree_every_steps=every)


def test_an_exception_in_the_loop_leaves_the_follower_closed_and_unchanged(folder: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(LookupError), follower_in(folder):
        raise LookupError
    assert set(threading.enumerate()) == threads


def test_an_applier_that_fails_ends_the_run_and_stays_failed(folder: Path) -> None:
    with seen_by() as seen:
        follower = follower_in(folder)
        follower.add(RecordingApplier(fail={1: "apply"}))
        follower.start()
        put(folder, 0, {"version": 1, "optimizer": {"learning_rate": 1}})
        with pytest.raises(ElasticError, match="ArithmeticError: apply of version 1 broke"):
            step_until(follower, seen, lambda: follower.config.version == 1)
        with pytest.raises(ElasticError, match="ArithmeticError: apply of version 1 broke"):
            follower.boundary()
        follower.close()


def test_an_applier_that_fails_as_a_checkpoint_is_loaded_ends_the_run_and_stays_failed(folder: Path) -> None:
    state = {"config": {"version": 7}, "revision": 0, "step": 3}
    follower = follower_in(folder)
    follower.start()
    follower.add(RecordingApplier(fail={7: "check"}))
    for _ in range(2):
        with pytest.raises(ElasticError, match="ArithmeticError: check of version 7 broke"):
            follower.load_state_dict(state)
    with pytest.raises(ElasticError, match="ArithmeticError: check of version 7 broke"):
        follower.boundary()
    follower.close()


def test_a_revision_that_fails_lets_no_boundary_pass_quietly(folder: Path) -> None:
    follower = follower_in(folder, agree_every_steps=100)
    follower.start()
    follower.add(RecordingApplier(fail={0: "apply"}))
    with seen_by() as seen:
        take_step(follower, seen)
    assert follower.pass_quietly(2, 0)
    for _ in range(2):
        with pytest.raises(ElasticError, match="ArithmeticError: apply of version 0, revision 1 broke"):
            follower.revise({"optimizer.learning_rate": 0.5}, "a test")
    assert not follower.pass_quietly(3, 0)
    with pytest.raises(ElasticError, match="ArithmeticError: apply of version 0, revision 1 broke"):
        follower.boundary()
    follower.close()


def test_a_file_found_at_the_start_is_judged_after_the_first_step_has_read_its_knobs(folder: Path) -> None:
    put(folder, 0, {"version": 1, "user": {"read": 1, "raed": 1}})
    with seen_by() as seen, follower_in(folder) as follower:
        for _ in range(3):
            follower.knob("read", 0)
            take_step(follower, seen)
    unread = [line for line in seen.log if "nothing in this job has asked for" in line]
    assert unread == [
        "WARNING config version 1 sets user.raed, which nothing in this job has asked for so far; correct the name if "
        "it is misspelt"
    ]


def test_a_stale_file_is_warned_of_once_per_content(folder: Path) -> None:
    put(folder, 0, {"version": 5})
    with seen_by() as seen, follower_in(folder) as follower:
        for number in range(4):
            put(folder, 0, {"version": 5})
            put(folder, 0, {"version": 3, "user": {"x": number % 2}})
            wanted = min(number + 1, 2)
            step_until(follower, seen, lambda wanted=wanted: len(stale(seen.log)) >= wanted)  # type: ignore[misc]
        for _ in range(500):
            take_step(follower, seen)
    assert len(stale(seen.log)) == 2


def stale(log: list[str]) -> list[str]:
    return [line for line in log if "holds version 3 and was refused, since version 5 is in force" in line]


@pytest.mark.parametrize(("places", "num_warnings"), [([1], 0), ([1, 0], 2)])
def test_where_members_change_the_first_rank_here_comes_to_warn(
    folder: Path, places: list[int], num_warnings: int
) -> None:
    put(folder, 0, rate(5, 0.25))
    with seen_by() as seen, follower_in(folder) as follower:
        assert follower._watcher is not None
        follower._watcher.warns = follower.agreement._rounds.warns = False  # as of a rank that was not the first here
        names = [PeerName(rank=rank, host=follower.ranks.host, pid=100 + rank, seat=rank) for rank in range(2)]
        for rank in places:
            follower.take_world(World(rank=rank, names=tuple(names)))
        put(folder, 0, rate(4, 0.5), seen_by=follower)
        take_step(follower, seen)
        put(folder, 0, {"version": 6, "typo": 1}, seen_by=follower)
    told = [line for line in seen.log if "was refused" in line]
    assert len(told) == num_warnings, told


def test_a_save_asked_for_after_the_last_boundary_is_warned_of(folder: Path) -> None:
    with seen_by() as seen, follower_in(folder) as follower:
        take_step(follower, seen)
        follower.request_save()
    assert any("a checkpoint that was asked for is not saved: training has ended" in line for line in seen.log)


def test_the_metrics_say_at_the_end_how_far_the_run_came(folder: Path) -> None:
    with follower_in(folder) as follower:
        for _ in range(25):
            follower.boundary()
    assert json.loads((folder / "0" / "metrics-0.json").read_text())["step"] == 25


def test_a_large_file_written_compactly_is_taken(folder: Path) -> None:
    put(folder, 0, json.dumps({"version": 1, "user": {"x": [1] * 150_000}}, separators=(",", ":")))
    with follower_in(folder) as follower:
        assert follower.config.version == 1
