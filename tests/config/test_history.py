"""The versions that a config file has had: what is recorded, how to go back, and what damage does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit, ConfigHistory, HistoryEntry, refused_in, undo_target
from elastic_ext.errors import ConfigError
from elastic_ext.records.files import exclusive
from tests.support.configs import configs, unhurried


@pytest.fixture
def history(tmp_path: Path) -> ConfigHistory:
    return ConfigHistory(tmp_path / "config.json")


def value(history: ConfigHistory) -> object:
    current = history.current()
    assert current is not None
    return current.get("user.x")


def versions(history: ConfigHistory) -> list[int]:
    return [entry.config.version for entry in history.entries()]


def by_hand(history: ConfigHistory, version: int, x: object) -> None:
    history.path.write_text(json.dumps({"version": version, "user": {"x": x}}))


def history_file(history: ConfigHistory) -> Path:
    return history.path.with_name(".config.json.history")


# ---- set ----


def test_the_first_set_makes_the_file_and_its_folder_as_version_1(tmp_path: Path) -> None:
    history = ConfigHistory(tmp_path / "a" / "b" / "config.json")
    assert history.current() is None and history.entries() == []
    assert not (tmp_path / "a").exists()
    new = history.set(ConfigEdit({"user.x": 1}, reason="first"))
    assert new == ElasticConfig.parse(history.path.read_bytes())
    assert (new.version, new.reason, new.values()) == (1, "first", {"user.x": 1})


def test_a_set_changes_what_it_names_and_counts_up(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1, "optimizer.learning_rate": 0.1}, reason="one", at_step=5))
    new = history.set(ConfigEdit({"user.x": 2, "dataloader.batch_size": 4}, remove=("optimizer.learning_rate",)))
    assert (new.version, new.reason, new.apply_at_step) == (2, "", None)
    assert new.values() == {"user.x": 2, "dataloader.batch_size": 4}
    assert [entry.config.apply_at_step for entry in history.entries()] == [5, None]


def test_a_save_asked_for_once_is_not_carried_on(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"checkpoint.now": True, "user.x": 1}))
    assert history.set(ConfigEdit({"user.x": 2})).checkpoint.now is None
    assert history.undo().checkpoint.now is None
    assert value(history) == 1


@pytest.mark.parametrize(
    ("changes", "remove", "at_step"),
    [
        ({"typo": 1}, [], None),
        ({"optimizer.learning_rate": -1}, [], None),
        ({"version": 9}, [], None),
        ({}, ["user.y"], None),
        ({}, ["version"], None),
        ({"user.x": 2}, [], -1),
        ({"user.x": "\ud800"}, [], None),
        ({"user.x": [[[[[[[1]]]]]]]}, [], None),
        ({"user.x": "y" * (1 << 20)}, [], None),
        ({"checkpoint.steps": 1, "checkpoint.epochs": 1}, [], None),
    ],
)
def test_a_set_that_is_refused_changes_nothing_on_disk(
    history: ConfigHistory, changes: dict[str, object], remove: list[str], at_step: int | None
) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    before = {name: (history.path.parent / name).read_bytes() for name in os.listdir(history.path.parent)}
    with pytest.raises(ConfigError):
        history.set(ConfigEdit(changes, remove=tuple(remove), at_step=at_step))
    assert {name: (history.path.parent / name).read_bytes() for name in os.listdir(history.path.parent)} == before


@settings(max_examples=50, deadline=None)
@given(configs())
def test_whatever_set_writes_can_be_read(tmp_path_factory: pytest.TempPathFactory, config: ElasticConfig) -> None:
    history = ConfigHistory(tmp_path_factory.mktemp("set") / "config.json")
    new = history.set(ConfigEdit(config.values(), reason=config.reason, at_step=config.apply_at_step))
    assert history.current() == new
    assert [entry.config for entry in history.entries()] == [new]


def test_a_set_over_a_refused_file_is_refused_and_leaves_it_alone(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    history.path.write_bytes(b"half a fi")
    with pytest.raises(ConfigError, match="not JSON"):
        history.set(ConfigEdit({"user.x": 2}))
    assert history.path.read_bytes() == b"half a fi"


def test_a_set_goes_through_a_link_and_leaves_it_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "config.json"
    link.symlink_to("real/config.json")
    ConfigHistory(link).set(ConfigEdit({"user.x": 1}))
    assert link.is_symlink()
    assert ElasticConfig.parse((tmp_path / "real" / "config.json").read_bytes()).version == 1


# ---- edits by hand ----


def test_an_edit_by_hand_enters_the_history_with_the_next_set(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    by_hand(history, 5, 2)
    assert versions(history) == [1, 5]
    assert history.set(ConfigEdit({"user.y": 1})).version == 6
    assert versions(history) == [1, 5, 6]
    assert value(history) == 2
    history.undo()
    assert history.current() == ElasticConfig(version=7, reason="back to version 5", user={"x": 2})


def test_a_file_made_by_hand_can_be_changed_and_gone_back_to(history: ConfigHistory) -> None:
    by_hand(history, 3, "mine")
    assert history.set(ConfigEdit({"user.x": "other"})).version == 4
    assert history.undo().version == 5
    assert value(history) == "mine"
    assert history.undo(above=9).version == 10, "a job runs under a higher version than the file has"


def test_an_edit_by_hand_without_a_new_version_is_kept_apart(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    by_hand(history, 1, 2)
    assert versions(history) == [1, 1]
    history.undo()
    assert value(history) == 1


def test_versions_go_up_even_after_an_edit_by_hand_to_a_lower_one(history: ConfigHistory) -> None:
    for x in range(5):
        history.set(ConfigEdit({"user.x": x}))
    by_hand(history, 2, "older")
    assert history.set(ConfigEdit({"user.y": 1})).version == 6
    assert value(history) == "older"


# ---- undo ----


def test_undo_goes_further_back_each_time_and_says_where_it_went(history: ConfigHistory) -> None:
    for x in range(1, 5):
        history.set(ConfigEdit({"user.x": x}, reason=f"x is {x}"))
    for x, version in ((3, 5), (2, 6), (1, 7)):
        new = history.undo()
        assert (new.version, new.reason, value(history)) == (version, f"back to version {x}", x)
    new = history.undo()
    assert (new.version, new.values()) == (8, {}) and new.reason == "back to before the first version: no key is set"
    before = history.path.read_bytes()
    with pytest.raises(ConfigError, match="no earlier version"):
        history.undo()
    assert history.path.read_bytes() == before


def test_undo_of_a_change_made_after_an_undo_undoes_that_change_only(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    history.set(ConfigEdit({"user.x": 2}, reason="a mistake"))
    history.undo()
    history.set(ConfigEdit({"user.y": 1}))
    history.undo()
    current = history.current()
    assert current is not None and current.values() == {"user.x": 1}


@pytest.mark.parametrize(
    ("refused", "undone", "set_on"),
    [((), 2, 3), ((3,), 2, 2), ((2, 3), 1, 1), ((2,), 1, 3), ((1, 2, 3), None, None), ((1,), 2, 3)],
)
def test_versions_that_ranks_have_refused_are_passed_over(
    tmp_path: Path, refused: tuple[int, ...], undone: int | None, set_on: int | None
) -> None:
    histories = [ConfigHistory(tmp_path / name / "config.json") for name in ("undo", "set")]
    for history in histories:
        written = {x: history.set(ConfigEdit({"user.x": x})).digest for x in (1, 2, 3)}
    digests = [written[x] for x in refused]
    assert histories[0].undo(digests).get("user.x") == undone
    new = histories[1].set(ConfigEdit({"user.y": 1}, refused=tuple(digests)))
    assert (new.version, new.get("user.x"), new.get("user.y")) == (4, set_on, 1)


def test_ranks_have_refused_what_their_last_event_of_a_version_says() -> None:
    refused = ("config-refused", {"version": 2, "digest": "two", "why": "too few"})
    late = ("config-refused", {"version": 3, "digest": "", "why": "it came too late"})
    applied = ("config-applied", {"version": 2, "revision": 0})
    earlier = ("config-refused", {"version": 2, "why": "of a version that told no digest"})
    assert refused_in([refused, late, earlier, ("other", {"version": 2})]) == {"two": "too few"}
    assert refused_in([refused, applied]) == {}
    assert refused_in([applied, refused]) == {"two": "too few"}


def test_undo_passes_over_a_version_that_only_asked_for_a_checkpoint(history: ConfigHistory) -> None:
    for changes in ({"user.x": 1}, {"user.x": 2}, {"checkpoint.now": True}):
        history.set(ConfigEdit(changes))
    assert (history.undo().version, value(history)) == (4, 1)
    assert history.undo().values() == {}
    history.set(ConfigEdit({"user.x": 3}))
    history.set(ConfigEdit({"checkpoint.now": True}))
    history.set(ConfigEdit({"checkpoint.now": True}))
    history.set(ConfigEdit({"user.x": 4}))
    history.undo()
    assert value(history) == 3
    assert history.undo().values() == {}, "both that asked for a checkpoint are passed over"
    history.set(ConfigEdit({"user.x": 5, "checkpoint.now": True}))
    assert history.undo().values() == {}


def test_undo_keeps_no_step_to_come(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}, at_step=10))
    history.set(ConfigEdit({"user.x": 2}))
    assert history.undo().apply_at_step is None


@pytest.mark.parametrize("broken", [b"", b"half a fi", b"\xff", b'{"version": 3, "typo": 1}', b"{}"])
def test_undo_over_a_refused_file_brings_back_the_last_good_one(history: ConfigHistory, broken: bytes) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    history.set(ConfigEdit({"user.x": 2}))
    history.path.write_bytes(broken)
    assert history.undo().version == 3
    assert value(history) == 2
    history.undo()
    assert value(history) == 1


def test_undo_after_the_file_was_deleted_brings_it_back(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    history.set(ConfigEdit({"user.x": 2}))
    history.path.unlink()
    assert history.undo().version == 3
    assert value(history) == 2


def test_undo_without_anything_earlier_is_refused(history: ConfigHistory) -> None:
    with pytest.raises(ConfigError, match="no earlier version"):
        history.undo()
    history.path.write_bytes(b"broken")
    with pytest.raises(ConfigError, match="not JSON"):
        history.undo()


def test_undo_of_the_first_version_sets_no_key_and_so_does_undo_of_what_comes_after(history: ConfigHistory) -> None:
    by_hand(history, 7, 1)
    assert (history.undo().version, value(history)) == (8, None)
    history.set(ConfigEdit({"user.y": 1}))
    assert history.undo().values() == {}
    with pytest.raises(ConfigError, match="no earlier version to go back to; allowed: a file that sets a key"):
        history.undo()


def test_the_oldest_version_of_a_history_that_has_lost_some_is_not_taken_for_the_first() -> None:
    config = ElasticConfig(version=7, user={"x": 1})
    entries = [HistoryEntry(time=0.0, config=config), *[HistoryEntry(time=0.0, config=config, restores=7)] * 199]
    assert undo_target(entries[:-1]).config.version == 0
    with pytest.raises(ConfigError, match="no earlier version"):
        undo_target(entries)


operations = st.lists(st.integers(0, 9) | st.just("undo") | st.just("hand"), max_size=15)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_any_order_of_sets_undos_and_edits_by_hand_is_what_an_editor_would_do(
    tmp_path_factory: pytest.TempPathFactory, operations: list[int | str]
) -> None:
    history = ConfigHistory(tmp_path_factory.mktemp("undo") / "config.json")
    stack: list[object] = []
    version = 0
    recorded = True  # an edit by hand that nobody saw before the next one is lost
    for number, operation in enumerate(operations):
        if operation == "undo":
            if not stack:
                with pytest.raises(ConfigError):
                    history.undo()
                continue
            stack.pop()
            history.undo()
            recorded = True
        elif operation == "hand":
            if not recorded:
                stack.pop()
            recorded = False
            stack.append(f"hand {number}")
            by_hand(history, version + 3, stack[-1])
            version += 2
        else:
            stack.append(operation)
            history.set(ConfigEdit({"user.x": operation}))
            recorded = True
        version += 1
        current = history.current()
        assert current is not None and current.version == version
        assert current.get("user.x") == (stack[-1] if stack else None)
    assert versions(history) == sorted(set(versions(history)))


def entry(version: int, restores: int | None = None) -> HistoryEntry:
    return HistoryEntry(time=0.0, config=ElasticConfig(version=version), restores=restores)


@pytest.mark.parametrize(
    ("entries", "version"),
    [
        ([entry(1), entry(2)], 1),
        ([entry(1), entry(2), entry(3)], 2),
        ([entry(1), entry(2), entry(3, 1), entry(4)], 3),
        ([entry(1), entry(2), entry(3), entry(4, 2)], 1),
        ([entry(4), entry(9)], 4),
        ([entry(3), entry(1)], 3),
    ],
)
def test_the_entry_to_go_back_to_is(entries: list[HistoryEntry], version: int) -> None:
    assert undo_target(entries).config.version == version


@pytest.mark.parametrize("entries", [[], [entry(1)], [entry(1), entry(2), entry(3, 1)], [entry(5, 3)]])
def test_there_is_nothing_to_go_back_to_in(entries: list[HistoryEntry]) -> None:
    with pytest.raises(ConfigError, match="no earlier version"):
        undo_target(entries)


# ---- the history file ----


def test_the_history_keeps_the_last_two_hundred_versions(history: ConfigHistory) -> None:
    line = HistoryEntry(time=1.0, config=ElasticConfig(version=1)).to_json()
    lines = [line.replace('"version": 1', f'"version": {version}') for version in range(1, 301)]
    history_file(history).write_text("\n".join(lines) + "\n")
    by_hand(history, 300, 1)
    history.set(ConfigEdit({"user.x": 2}))
    assert versions(history) == [*range(103, 301), 300, 301]


DAMAGED = [
    b"",
    b"\n",
    b"nonsense",
    b"5",
    b"[]",
    b"{}",
    b'"x"',
    b"null",
    b'{"time": 1, "restores": null}',
    b'{"time": 1, "restores": null, "config": []}',
    b'{"time": 1, "restores": null, "config": null}',
    b'{"time": 1, "restores": null, "config": {"version": "x"}}',
    b'{"time": "x", "restores": null, "config": {"version": 1}}',
    b'{"time": null, "restores": null, "config": {"version": 1}}',
    b'{"time": NaN, "restores": null, "config": {"version": 1}}',
    b'{"time": 1e300, "restores": null, "config": {"version": 1}}',
    b'{"time": -1e300, "restores": null, "config": {"version": 1}}',
    b'{"time": 1, "restores": "x", "config": {"version": 1}}',
    b'{"time": 1, "restores": true, "config": {"version": 1}}',
    b'{"time": 1, "restores": null, "config": {"version": 1, "dataloader": []}}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe\x00",
    b"9" * 10_000,
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_the_history_loses_its_own_version_only(history: ConfigHistory, line: bytes) -> None:
    for x in range(1, 4):
        history.set(ConfigEdit({"user.x": x}))
    first, _, third = history_file(history).read_bytes().splitlines()
    history_file(history).write_bytes(b"\n".join([line, first, line, third, line]))
    assert versions(history) == [1, 3]
    history.undo()
    assert value(history) == 1


def test_a_history_file_torn_at_any_byte_can_be_read(history: ConfigHistory) -> None:
    for x in range(1, 4):
        history.set(ConfigEdit({"user.x": x}, reason="größe"))
    whole = history_file(history).read_bytes()
    for end in range(0, len(whole), 7):
        history_file(history).write_bytes(whole[:end])
        assert versions(history)[-1] == 3


def test_a_history_that_was_lost_leaves_the_file_in_charge(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    history.set(ConfigEdit({"user.x": 2}))
    history_file(history).unlink()
    assert versions(history) == [2]
    assert history.set(ConfigEdit({"user.x": 3})).version == 3
    history.undo()
    assert value(history) == 2


@unhurried
@given(configs(), st.none() | st.integers(1, 99), st.floats(0, 9e9))
def test_an_entry_comes_back_from_its_line(config: ElasticConfig, restores: int | None, time: float) -> None:
    written = HistoryEntry(time=time, config=config, restores=restores)
    assert len(written.to_json().splitlines()) == 1
    assert HistoryEntry.from_json(written.to_json()) == written


# ---- versions from elsewhere ----


def test_a_version_from_elsewhere_is_written_as_it_is_and_entered(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    by_hand(history, 4, 2)
    new = ElasticConfig.from_values({"user.x": 3}, version=9, reason="of another node")
    assert history.put(new)
    assert history.current() == new
    assert versions(history) == [1, 4, 9]


@pytest.mark.parametrize("version", [3, 4])
def test_a_version_from_elsewhere_that_is_not_above_the_files_is_not_written(
    history: ConfigHistory, version: int
) -> None:
    by_hand(history, 4, 2)
    before = history.path.read_bytes()
    assert not history.put(ElasticConfig.from_values({"user.x": 3}, version=version))
    assert history.path.read_bytes() == before


def test_a_version_from_elsewhere_replaces_what_was_refused(history: ConfigHistory) -> None:
    history.path.write_bytes(b"half a fi")
    assert history.put(ElasticConfig.from_values({"user.x": 3}, version=9))
    assert versions(history) == [9]


def test_an_edit_by_hand_is_entered_when_it_is_taken_in_and_once_only(history: ConfigHistory) -> None:
    history.set(ConfigEdit({"user.x": 1}))
    by_hand(history, 4, 2)
    history.take_in()
    first = history_file(history).read_bytes()
    history.take_in()
    assert history_file(history).read_bytes() == first
    history.path.unlink()
    assert versions(history) == [1, 4]


def test_a_file_that_is_refused_or_gone_is_not_entered(history: ConfigHistory) -> None:
    history.take_in()
    history.path.write_bytes(b"half a fi")
    with pytest.raises(ConfigError):
        history.take_in()
    assert not history_file(history).exists()


def test_a_writer_with_limited_patience_gives_up_before_one_that_does_not_end_and_writes_nothing(
    history: ConfigHistory,
) -> None:
    hasty = ConfigHistory(history.path, patience_seconds=0.0)
    hasty.set(ConfigEdit({"user.x": 1}))
    before = history.path.read_bytes()
    new = ElasticConfig.from_values({"user.x": 3}, version=9)
    with exclusive(history.path.with_name(".config.json.lock")):
        for write in (lambda: hasty.set(ConfigEdit({"user.x": 2})), hasty.undo, lambda: hasty.put(new), hasty.take_in):
            with pytest.raises(TimeoutError, match="another process writes the config file"):
                write()
    assert history.path.read_bytes() == before
    hasty.set(ConfigEdit({"user.x": 2}))
    assert versions(history) == [1, 2]
