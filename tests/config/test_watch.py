"""ConfigWatcher against a real file system: whatever happens to the file, the newest valid config is held.

Where events are tested the poll is so long that it cannot be what helped.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ext.config.watcher import ConfigWatcher, FolderEvents, names_on_the_way
from elastic_ext.errors import ElasticError
from elastic_ext.records.files import write_whole
from elastic_ext.records.json import MAX_BYTES
from tests.support.watching import DEADLINE_SECONDS, Warnings, collected_warnings, text_of

REPOSITORY = Path(__file__).resolve().parents[2]
NEVER_SECONDS = 1000.0
BY = {
    "events": {"poll_seconds": NEVER_SECONDS, "use_events": True},
    "stamps": {"poll_seconds": 0.01, "use_events": False},
    "both": {"poll_seconds": 0.02, "use_events": True},
}


@pytest.fixture(params=["events", "stamps"])
def by(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def watching(path: Path, by: str, *, settle_seconds: float = 0.2) -> Iterator[ConfigWatcher]:
    options = BY[by]
    watcher = ConfigWatcher(
        path,
        poll_seconds=options["poll_seconds"],
        use_events=bool(options["use_events"]),
        settle_seconds=settle_seconds,
    )
    with watcher:
        yield watcher
        assert watcher.is_alive
    assert not watcher.is_alive


@pytest.fixture
def warnings() -> Iterator[Warnings]:
    with collected_warnings() as collected:
        yield collected


def put(path: Path, data: bytes) -> None:
    write_whole(path, data, durable=False)


def holds(watcher: ConfigWatcher, version: int) -> bool:
    """Whether the watcher comes to hold exactly this version."""
    arrived = watcher.wait_for_version(version, DEADLINE_SECONDS)
    return arrived and watcher.newest is not None and watcher.newest.version == version


# ---- what is seen ----


def test_a_file_that_is_there_at_the_start_is_held_at_once(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(5))
    with watching(path, by) as watcher:
        assert watcher.newest is not None and watcher.newest.version == 5
        assert watcher.refusal is None


def test_atomic_replacements_are_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    with watching(path, by) as watcher:
        assert watcher.newest is None
        for version in range(1, 40):
            put(path, text_of(version))
            assert holds(watcher, version)


def test_writes_in_place_are_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by) as watcher:
        for version in range(2, 40):
            path.write_bytes(text_of(version))
            assert holds(watcher, version)


def test_the_latest_of_many_quick_replacements_is_held_in_the_end(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    with watching(path, by) as watcher:
        for version in range(1, 500):
            put(path, text_of(version))
        assert holds(watcher, 499)


def test_a_lower_version_is_held_too_since_nothing_here_knows_what_is_in_force(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(9))
    with watching(path, by) as watcher:
        put(path, text_of(3))
        assert watcher.wait_until_seen(text_of(3), DEADLINE_SECONDS)
        assert watcher.newest is not None and watcher.newest.version == 3


def test_the_same_config_written_again_stays_the_same_object(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by) as watcher:
        held = watcher.newest
        for data in (text_of(1), text_of(1) + b"\n \n", text_of(1)):
            put(path, data)
            assert watcher.wait_until_seen(data, DEADLINE_SECONDS)
        assert watcher.newest is held


def test_a_file_that_goes_and_comes_back_is_seen_and_what_was_held_stays_meanwhile(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by) as watcher:
        for version in range(2, 20):
            path.unlink()
            assert watcher.newest is not None
            put(path, text_of(version))
            assert holds(watcher, version)


def test_a_file_moved_in_from_another_folder_is_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    with watching(path, by) as watcher:
        for version in range(1, 10):
            put(tmp_path / "elsewhere", text_of(version))
            os.replace(tmp_path / "elsewhere", path)
            assert holds(watcher, version)


def test_an_older_file_swapped_in_with_its_own_time_and_size_is_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(2))
    put(tmp_path / "older", text_of(1))
    os.utime(tmp_path / "older", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    with watching(path, by) as watcher:
        os.replace(tmp_path / "older", path)
        assert watcher.wait_until_seen(text_of(1), DEADLINE_SECONDS)


@pytest.mark.parametrize("by", ["stamps", "both"])
def test_a_folder_that_appears_late_with_its_parents_is_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "not" / "yet" / "there" / "config.json"
    with watching(path, by) as watcher:
        path.parent.mkdir(parents=True)
        put(path, text_of(1))
        assert holds(watcher, 1)
        put(path, text_of(2))
        assert holds(watcher, 2)


def test_a_folder_that_is_deleted_and_made_again_is_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    put(path, text_of(1))
    with watching(path, "both" if by == "events" else by) as watcher:
        for version in range(2, 12):
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            put(path, text_of(version))
            assert holds(watcher, version)


def test_a_folder_made_again_sends_events_again_even_where_it_gets_the_old_inode(tmp_path: Path) -> None:
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    told = threading.Event()
    events = FolderEvents(lambda must_follow: told.set())
    try:
        assert events.follow(path)
        for version in range(10):
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            while not events.follow(path):
                assert told.wait(DEADLINE_SECONDS)
                told.clear()
            for _ in range(5):
                put(path, text_of(version))
                assert told.wait(DEADLINE_SECONDS)
                told.clear()
    finally:
        events.close()


@pytest.mark.parametrize("by", ["stamps", "both"])
def test_a_folder_that_is_moved_away_and_replaced_is_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "run" / "config.json"
    path.parent.mkdir()
    put(path, text_of(1))
    with watching(path, by) as watcher:
        for version in range(2, 8):
            path.parent.rename(tmp_path / f"old-{version}")
            path.parent.mkdir()
            put(path, text_of(version))
            assert holds(watcher, version)
            put(tmp_path / f"old-{version}" / "config.json", text_of(99))


def test_a_path_with_dots_and_links_among_its_folders_is_followed(tmp_path: Path, by: str) -> None:
    real = tmp_path / "real"
    (real / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    path = tmp_path / "link" / "below" / ".." / "config.json"
    with watching(path, by) as watcher:
        put(real / "config.json", text_of(1))
        assert holds(watcher, 1)
        put(real / "config.json", text_of(2))
        assert holds(watcher, 2)


# ---- links ----


def publish(mount: Path, version: int) -> None:
    """What the kubelet does with a new ConfigMap: a new folder, and a link swapped over the old one."""
    folder = mount / f"..2024_{version}"
    folder.mkdir()
    (folder / "config.json").write_bytes(text_of(version))
    before = os.readlink(mount / "..data") if (mount / "..data").is_symlink() else None
    (mount / "..data_tmp").symlink_to(folder.name)
    os.rename(mount / "..data_tmp", mount / "..data")
    if before is not None:
        shutil.rmtree(mount / before)


def test_the_links_of_a_kubernetes_config_map_are_followed(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    publish(tmp_path, 1)
    path.symlink_to("..data/config.json")
    with watching(path, by) as watcher:
        for version in range(2, 40):
            publish(tmp_path, version)
            assert holds(watcher, version)


def test_config_maps_published_faster_than_they_can_be_followed_do_not_end_the_following(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    publish(tmp_path, 1)
    path.symlink_to("..data/config.json")
    with watching(path, "events") as watcher, collected_warnings() as warnings:
        for version in range(2, 600):
            publish(tmp_path, version)
        assert holds(watcher, 599)
        for version in range(600, 610):
            publish(tmp_path, version)
            assert holds(watcher, version)
        assert warnings.about("no file system events") == []


def test_a_link_to_a_file_elsewhere_is_followed_when_that_file_is_replaced(tmp_path: Path, by: str) -> None:
    path, target = tmp_path / "run" / "config.json", tmp_path / "elsewhere" / "real.json"
    path.parent.mkdir()
    target.parent.mkdir()
    put(target, text_of(1))
    path.symlink_to(target)
    with watching(path, by) as watcher:
        for version in range(2, 10):
            put(target, text_of(version))
            assert holds(watcher, version)
        other = tmp_path / "third.json"
        put(other, text_of(10))
        (path.parent / "tmp").symlink_to(other)
        os.replace(path.parent / "tmp", path)
        assert holds(watcher, 10)
        put(other, text_of(11))
        assert holds(watcher, 11)


def test_a_link_that_leads_nowhere_is_followed_once_it_leads_somewhere(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("real.json")
    with watching(path, by) as watcher:
        assert watcher.newest is None
        put(tmp_path / "real.json", text_of(1))
        assert holds(watcher, 1)


@pytest.mark.parametrize(
    ("links", "path", "names"),
    [
        ({}, "c", {".": {"c"}}),
        ({}, "no/c", {"no": {"c"}}),
        ({"c": "d"}, "c", {".": {"c", "d"}}),
        ({"c": "..data/c", "..data": "..1"}, "c", {".": {"c", "..data"}, "..1": {"c"}}),
        ({"a": "b"}, "a/x/../c", {".": {"a"}, "b": {"c"}}),
        ({"c": "c"}, "c", {".": {"c"}}),
        ({"c": "d", "d": "c"}, "c", {".": {"c", "d"}}),
    ],
)
def test_the_names_on_the_way_to_a_file_are(
    tmp_path: Path, links: dict[str, str], path: str, names: dict[str, set[str]]
) -> None:
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    found = names_on_the_way(tmp_path / path)
    assert {os.path.relpath(folder, tmp_path): set(inside) for folder, inside in found.items()} == names


# ---- what is refused ----


def test_refused_contents_leave_the_old_config_and_give_one_warning_per_content(
    tmp_path: Path, by: str, warnings: Warnings
) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    bad = [b'{"version": 2, "typo%d": 1}' % number for number in range(3)]
    with watching(path, by, settle_seconds=0.02) as watcher:
        for number in (0, 1, 0, 2, 0, 1):
            put(path, bad[number])
            assert watcher.wait_until_seen(bad[number], DEADLINE_SECONDS)
            assert warnings.wait_for(f"typo{number}")
            assert watcher.newest is not None and watcher.newest.version == 1
            assert watcher.refusal is not None and f"typo{number}" in watcher.refusal
        put(path, text_of(2))
        assert holds(watcher, 2)
        assert watcher.refusal is None
        put(path, bad[0])
        assert watcher.wait_until_seen(bad[0], DEADLINE_SECONDS)
        put(path, b'{"version": 3, "last": 1}')
        assert warnings.wait_for("last")
    assert len(warnings.messages) == 4
    assert warnings.messages[0].startswith(f"{path} was refused, and version 1, valid before, is kept: typo0 is not")


def test_contents_half_written_and_soon_completed_are_not_warned_of(
    tmp_path: Path, by: str, warnings: Warnings
) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by, settle_seconds=0.5) as watcher:
        for version in range(2, 12):
            whole = text_of(version)
            with open(path, "wb") as file:
                file.write(whole[:20])
                file.flush()
                watcher.refresh()  # as when it happens to look right now
                assert watcher.wait_until_seen(whole[:20], DEADLINE_SECONDS)
                file.write(whole[20:])
            assert holds(watcher, version)
        put(path, b'{"version": 12, "typo": 1}')
        assert warnings.wait_for("typo")  # what was to be warned of before has had its time
    assert len(warnings.messages) == 1


def test_contents_that_stay_half_written_are_warned_of(tmp_path: Path, by: str, warnings: Warnings) -> None:
    path = tmp_path / "config.json"
    with watching(path, by, settle_seconds=0.02):
        path.write_bytes(text_of(2)[:20])
        assert warnings.wait_for("not JSON")
    (message,) = warnings.messages
    assert "the config in force stays" in message


def test_what_is_refused_at_the_very_end_is_warned_of_before_it_is_over(
    tmp_path: Path, by: str, warnings: Warnings
) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by, settle_seconds=NEVER_SECONDS) as watcher:
        put(path, b'{"version": 2, "typo": 1}')
    (message,) = warnings.messages
    assert message.startswith(f"{path} was refused, and version 1, valid before, is kept: typo is not a known key")
    watcher.close()
    assert len(warnings.messages) == 1


def test_of_several_watchers_of_one_file_one_can_be_the_one_that_warns(tmp_path: Path, warnings: Warnings) -> None:
    path = tmp_path / "config.json"
    quiet = ConfigWatcher(path, poll_seconds=0.01, settle_seconds=0.02, warns=False)
    with quiet, ConfigWatcher(path, poll_seconds=0.01, settle_seconds=0.02) as loud:
        for number in range(5):
            put(path, b'{"version": 1, "typo%d": 1}' % number)
            for watcher in (quiet, loud):
                assert watcher.wait_until_seen(path.read_bytes(), DEADLINE_SECONDS)
            assert warnings.wait_for(f"typo{number}")
    assert len(warnings.messages) == 5


def test_a_refused_file_that_is_taken_away_is_no_longer_refused(tmp_path: Path, by: str, warnings: Warnings) -> None:
    path = tmp_path / "config.json"
    put(path, b"nonsense")
    with watching(path, by, settle_seconds=0.02) as watcher:
        assert watcher.refusal is not None and watcher.newest is None
        assert warnings.wait_for("not JSON")
        path.unlink()
        watcher.refresh()
        assert watcher.refusal is None
        put(path, b"nonsense")
        assert watcher.wait_until_seen(b"nonsense", DEADLINE_SECONDS)
        put(path, text_of(1))
        assert holds(watcher, 1)
    assert len(warnings.messages) == 1


def test_a_file_over_one_mebibyte_is_refused_and_seen(tmp_path: Path, by: str) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, by) as watcher:
        data = text_of(2) + b" " * (2 * MAX_BYTES)
        put(path, data)
        assert watcher.wait_until_seen(data, DEADLINE_SECONDS)
        assert watcher.refusal is not None and "1048576" in watcher.refusal
        assert watcher.newest is not None and watcher.newest.version == 1


# ---- what is no file ----


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def in_the_way(path: Path, kind: str) -> None:
    clear(path)
    if kind == "directory":
        path.mkdir()
        (path / "config.json").write_bytes(text_of(99))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "nowhere":
        path.symlink_to("no/such/file")
    elif kind == "below a file":
        path.symlink_to("/proc/self/cmdline/config.json")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "terabyte":
        path.write_bytes(b"")
        os.truncate(path, 1 << 40)
    elif kind == "process memory":  # opens, and cannot be read
        path.symlink_to("/proc/self/mem")


KINDS = ["directory", "pipe", "loop", "nowhere", "below a file", "device", "terabyte", "process memory", "nothing"]
READ_ERRORS = ["directory", "pipe", "loop", "device", "process memory"]


@pytest.mark.parametrize("kind", READ_ERRORS)
def test_what_cannot_be_read_is_refused_with_one_warning_and_a_file_in_its_place_is_picked_up(
    tmp_path: Path, kind: str, warnings: Warnings
) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    with watching(path, "both", settle_seconds=0.02) as watcher:
        in_the_way(path, kind)
        assert warnings.wait_for("it cannot be read")
        assert watcher.newest is not None and watcher.newest.version == 1
        assert watcher.refusal is not None
        for _ in range(20):
            watcher.refresh()
        clear(path)
        put(path, text_of(2))
        assert holds(watcher, 2)
        assert watcher.refusal is None
    assert len(warnings.messages) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_looking_again_and_again_at_what_is_no_file_leaks_no_descriptor(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    in_the_way(path, kind)
    watcher = ConfigWatcher(path, use_events=False)
    watcher.refresh()
    before = num_descriptors()
    for _ in range(50):
        watcher.refresh()
    assert num_descriptors() == before


@pytest.mark.parametrize("by", ["both", "stamps"])
def test_the_thread_survives_whatever_happens_to_the_file_and_its_folder(tmp_path: Path, by: str) -> None:
    rng = random.Random(11)
    path = tmp_path / "a" / "run" / "config.json"
    path.parent.mkdir(parents=True)
    put(path, text_of(1))
    version = 1
    with watching(path, by) as watcher:
        for _ in range(60):
            for _ in range(5):
                path.parent.mkdir(parents=True, exist_ok=True)
                in_the_way(path, rng.choice(KINDS))
                if rng.random() < 0.3:
                    shutil.rmtree(rng.choice([path.parent, path.parent.parent]))
                    if rng.random() < 0.3:
                        path.parent.parent.mkdir(exist_ok=True)
                        path.parent.write_bytes(b"a file in the place of the folder")
                        path.parent.unlink()
            path.parent.mkdir(parents=True, exist_ok=True)
            clear(path)
            version += 1
            put(path, text_of(version))
            assert holds(watcher, version)
            assert watcher.is_alive


# ---- the life of a watcher ----


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_gives_back_every_thread_and_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    (tmp_path / "link").symlink_to("config.json")

    def open_and_close(watched: Path) -> None:
        with ConfigWatcher(watched, poll_seconds=NEVER_SECONDS) as watcher:
            put(path, text_of(2))
            assert watcher.wait_until_seen(text_of(2), DEADLINE_SECONDS)
            put(path, text_of(3))
            assert watcher.wait_until_seen(text_of(3), DEADLINE_SECONDS)

    open_and_close(path)
    threads, descriptors = threading.active_count(), num_descriptors()
    for number in range(50):
        open_and_close(path if number % 2 else tmp_path / "link")
    assert threading.active_count() == threads
    assert num_descriptors() == descriptors


def test_two_watchers_of_two_files_are_independent(tmp_path: Path, by: str) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    with watching(other, by) as second:
        with watching(one, by) as first:
            put(one, text_of(1))
            assert holds(first, 1)
            assert second.newest is None
            put(other, b"nonsense")
            assert second.wait_until_seen(b"nonsense", DEADLINE_SECONDS)
            assert first.refusal is None
        put(other, text_of(2))
        assert holds(second, 2)
        with watching(one, by) as third:
            put(one, text_of(3))
            assert holds(third, 3)
        assert first.newest is not None and first.newest.version == 1
        assert second.newest is not None and second.newest.version == 2


def test_many_watchers_of_one_file_all_see_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    watchers = [ConfigWatcher(path, poll_seconds=NEVER_SECONDS) for _ in range(8)]
    try:
        for watcher in watchers:
            watcher.start()
        for version in range(1, 10):
            put(path, text_of(version))
            assert all(holds(watcher, version) for watcher in watchers)
    finally:
        for watcher in watchers:
            watcher.close()


def test_a_watcher_is_started_once_and_closed_as_often_as_one_likes(tmp_path: Path) -> None:
    watcher = ConfigWatcher(tmp_path / "config.json")
    assert not watcher.is_alive
    watcher.close()
    watcher = ConfigWatcher(tmp_path / "config.json")
    watcher.start()
    with pytest.raises(ElasticError, match="was started before; make a new one"):
        watcher.start()
    watcher.close()
    watcher.close()
    assert not watcher.is_alive
    with pytest.raises(ElasticError, match="was started before"):
        watcher.start()


@pytest.mark.parametrize("num_closed", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_closing_says_nothing_while_the_folder_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_closed: int
) -> None:
    """Again and again, since watchdog's threads have to be hit between two of their lines."""
    path = tmp_path / "config.json"
    is_done = threading.Event()

    def write_on() -> None:
        while not is_done.is_set():
            path.write_bytes(b"")

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(num_closed):
            told = threading.Event()
            events = FolderEvents(lambda must_follow, told=told: told.set())  # type: ignore[misc]
            assert events.follow(path)
            assert told.wait(DEADLINE_SECONDS)
            events.close()
    finally:
        is_done.set()
        writer.join()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_watcher_that_was_never_started_looks_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    watcher = ConfigWatcher(path)
    assert watcher.refresh() is None
    put(path, text_of(1))
    held = watcher.refresh()
    assert held is not None and held.version == 1
    assert watcher.newest is held


def test_waiting_ends_when_the_time_is_up(tmp_path: Path) -> None:
    with ConfigWatcher(tmp_path / "config.json") as watcher:
        assert not watcher.wait_for_version(1, 0.01)
        assert not watcher.wait_until_seen(b"never", 0.01)


def test_looking_from_many_threads_while_the_file_changes_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    put(path, text_of(1))
    done = threading.Event()
    faults: list[BaseException] = []

    def look() -> None:
        try:
            while not done.is_set():
                held = watcher.refresh()
                assert held is not None
        except BaseException as error:
            faults.append(error)

    with watching(path, "both") as watcher:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for version in range(2, 200):
            put(path, text_of(version))
        done.set()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert holds(watcher, 199)
    assert faults == []


class SettledBetween(ConfigWatcher):
    """A watcher whose file is written anew, on another thread, between two readings of when contents are warned of."""

    _when: float | None

    @property
    def _warn_at(self) -> float | None:
        when, self._when = self._when, None
        return when

    @_warn_at.setter
    def _warn_at(self, when: float | None) -> None:
        self._when = when


def test_contents_that_are_put_right_as_the_thread_works_out_how_long_to_wait_do_not_end_it(tmp_path: Path) -> None:
    watcher = SettledBetween(tmp_path / "config.json", poll_seconds=5.0)
    watcher._warn_at = 0.0
    assert 0.0 <= watcher._seconds_to_wait() <= 5.0
    assert watcher._seconds_to_wait() == 5.0


# A user namespace of its own has a limit of its own: others who watch files meanwhile keep what they have.
WITHOUT_INOTIFY = """
import ctypes, logging, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.records.files import write_whole
from elastic_ext.config.watcher import ConfigWatcher
logging.basicConfig(stream=sys.stdout, format="%(message)s")
libc, CLONE_NEWUSER = ctypes.CDLL(None), 0x10000000
try:
    assert libc.unshare(CLONE_NEWUSER) == 0
    Path("/proc/sys/user/max_inotify_instances").write_text("0")
except (AssertionError, OSError):
    sys.exit(77)
assert libc.inotify_init() == -1
path = Path(sys.argv[2])
with ConfigWatcher(path, poll_seconds=0.01) as watcher:
    for version in range(1, 20):
        write_whole(path, b'{"version": %d}' % version)
        assert watcher.wait_for_version(version, 30.0)
    assert watcher.is_alive
print("followed")
"""


def test_where_the_kernel_gives_no_more_events_the_file_is_looked_at_instead(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", WITHOUT_INOTIFY, str(REPOSITORY), str(tmp_path / "config.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120.0, check=False)
    if done.returncode == 77:
        pytest.skip("this machine lets nobody make a user namespace")
    lines = done.stdout.splitlines()
    assert lines[-1] == "followed"
    assert len(lines) == 2 and "no file system events" in lines[0]
