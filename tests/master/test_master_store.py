"""What a master keeps: there again after any end, of one process at a time, and never half written."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import HistoryEntry
from elastic_ext.master.configs import AuthoredVersion
from elastic_ext.master.events import EventRecord, NodeRecord
from elastic_ext.master.store import JobStore, StoreError, Superseded, why_no_store_in


def version_of(version: int, **given: int) -> AuthoredVersion:
    config = ElasticConfig.from_values({"optimizer.learning_rate": 0.1}, version=version, reason="a try")
    return AuthoredVersion(entry=HistoryEntry(time=1.0 * version, config=config, **given), author="person")


def event_of(number: int, text: str = "something", **given: Any) -> EventRecord:
    usual: dict[str, Any] = {
        "time": 1.0,
        "node_id": "a",
        "rank": -1,
        "step": -1,
        "kind": "k",
        "details": "{}",
        "restart": 0,
    }
    return EventRecord(number=number, text=text, **usual | given)


NODE = NodeRecord(
    node_id="a", incarnation=3, host="h", pid=4, library="1", started_at=1.0, state="live", hardware='{"x": 1}'
)


def test_all_of_it_is_there_again(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        first = store.read()
        assert first.epoch == 1 and first.job == "" and len(first.job_id) == 32
        store.enter_version(version_of(1))
        store.enter_version(version_of(2, restores=1))
        store.keep(
            events=[event_of(1), event_of(2)], nodes=[NODE], membership='{"a": 1}', points=[(60.0, "{}")], job="j"
        )
    with contextlib.closing(JobStore(tmp_path)) as store:
        found = store.read()
    assert found.epoch == 2 and found.job == "j" and found.job_id == first.job_id
    assert found.versions == (version_of(1), version_of(2, restores=1))
    assert found.events == (event_of(1), event_of(2)) and found.nodes == (NODE,)
    assert found.membership == '{"a": 1}' and found.points == ("{}",)


def test_what_is_forgotten_and_what_is_too_old_goes(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        for version in range(1, 203):
            store.enter_version(version_of(version))
        store.keep(events=[event_of(number) for number in range(1, 5_101)], nodes=[NODE])
        store.keep(forgotten=["a"])
        store.keep(events=[event_of(5_101)])
        found = store.read()
    assert [each.config.version for each in found.versions] == list(range(3, 203))
    assert (found.events[0].number, len(found.events)) == (102, 5_000)
    assert found.nodes == ()


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)), pytest.raises(StoreError, match="another master has"):
        JobStore(tmp_path)
    with contextlib.closing(JobStore(tmp_path)) as store:
        assert store.epoch == 2


def test_a_master_that_another_has_replaced_writes_nothing_more(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        store.enter_version(version_of(1))
        with contextlib.closing(sqlite3.connect(store.path)) as other, other:  # on storage whose locks were lost
            other.execute("UPDATE meta SET value = '2' WHERE key = 'epoch'")
        with pytest.raises(Superseded, match="another process has become the master"):
            store.enter_version(version_of(2))
        with pytest.raises(Superseded):
            store.keep(events=[event_of(1)])
    with contextlib.closing(JobStore(tmp_path)) as store:
        found = store.read()
        assert found.epoch == 3 and found.versions == (version_of(1),) and found.events == ()


def test_what_was_removed_under_it_is_written_to_no_more_and_goes_on_where_it_is_put_back(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "state")
    store.enter_version(version_of(1))
    (tmp_path / "state").rename(tmp_path / "away")
    with pytest.raises(StoreError, match="was removed while this master ran"):
        store.enter_version(version_of(2))
    (tmp_path / "away").rename(tmp_path / "state")
    store.enter_version(version_of(2))
    (tmp_path / "state").rename(tmp_path / "away")
    other = JobStore(tmp_path / "state")  # another master, which finds no lock
    with pytest.raises(Superseded, match="another file has taken the place"):
        store.keep(job="j")
    other.enter_version(version_of(1))
    other.close()
    store.close()


def test_a_full_disk_changes_nothing_and_is_got_over(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        store.enter_version(version_of(1))
        (used,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {used + 2}")
        with pytest.raises(StoreError, match="full"):
            store.keep(events=[event_of(number, "x" * 4_000) for number in range(1, 50)])
        assert store.read().events == ()
        store._db.execute("PRAGMA max_page_count = 1000000")
        store.keep(events=[event_of(1)])
        assert store.read().events == (event_of(1),)


def test_a_process_that_is_killed_while_it_writes_leaves_whole_versions(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.master.test_master_store import JobStore, version_of\n"
        "store = JobStore(Path(sys.argv[1]))\n"
        "for version in range(1, 100_000):\n"
        "    store.enter_version(version_of(version))\n"
        "    print(version, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(30)]
        writer.kill()
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
    with contextlib.closing(JobStore(tmp_path)) as store:
        found = store.read()
    versions = [each.config.version for each in found.versions]
    assert versions == list(range(versions[0], versions[-1] + 1)) and versions[-1] >= told[-1], "what was told stays"
    assert found.epoch == 2


@pytest.mark.parametrize("content", [b"nothing of the kind", b"", b"SQLite format 3\x00" + bytes(80)])
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "master.db").write_bytes(content)
    if not content:  # a file that was just being made
        JobStore(tmp_path).close()
        return
    with pytest.raises(StoreError, match="master\\.db cannot be opened"):
        JobStore(tmp_path)
    assert (tmp_path / "master.db").read_bytes() == content


def test_rows_that_no_master_has_written_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        store._db.execute("INSERT INTO pages VALUES (1, 1.0, 'somebody', '', NULL, '{}')")
        with pytest.raises(StoreError, match="holds what no master has written"):
            store.read()


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(JobStore(tmp_path)) as store:
        store._db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="of a newer version of this library"):
        JobStore(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        JobStore(tmp_path / "file" / "inside")


def test_storage_over_a_network_is_refused_with_the_reason() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:50 / /mnt/shared rw - nfs4 server:/ rw\n"
        "3 2 8:2 / /mnt/shared/local rw - xfs /dev/sdb1 rw\n"
    )
    assert "is on nfs4, storage over a network" in str(why_no_store_in("/mnt/shared/job", mounts))
    assert why_no_store_in("/mnt/shared/local/job", mounts) is None
    assert why_no_store_in("/home/job", mounts) is None
    assert why_no_store_in("/home/job", "") is None


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE events; CREATE VIEW events AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS number, 'x' AS record FROM n",
        "ALTER TABLE nodes ADD COLUMN large TEXT GENERATED ALWAYS AS (printf('%.*c', 900000000, 'x'))",
        "CREATE TRIGGER more AFTER UPDATE ON meta BEGIN INSERT INTO points VALUES (random(), zeroblob(900000000)); END",
    ],
)
def test_a_file_that_computes_what_is_read_is_refused(tmp_path: Path, change: str) -> None:
    JobStore(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "master.db")) as db:
        db.executescript(change)
    with pytest.raises(StoreError, match="is a view, a trigger or a table with a generated column; give"):
        JobStore(tmp_path)
