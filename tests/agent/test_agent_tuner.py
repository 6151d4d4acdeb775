"""The one writer of a config file: what it writes, what it notices that others write, what nodes hand each other."""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.agent.config_writer import ConfigWriter, ForeignWrite, config_requests
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit
from elastic_ext.errors import ConfigError
from elastic_ext.records.files import exclusive, stamp_of
from tests.support.configs import configs, unhurried

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 240.0


class Node:
    """A tuner with what it has told of."""

    def __init__(self, folder: Path, *, settle_seconds: float = 0.0, patience_seconds: float = 10.0) -> None:
        self.path = folder / "config.json"
        self.told: list[ForeignWrite] = []
        self.tuner = ConfigWriter(
            self.path,
            on_foreign=self.told.append,
            settle_seconds=settle_seconds,
            patience_seconds=patience_seconds,
        )

    def by_hand(self, version: int, x: object, reason: str = "") -> None:
        self.path.write_text(text_of(version, x, reason))

    def set(self, x: object) -> ElasticConfig:
        return self.tuner.set(ConfigEdit({"user.x": x}))

    def in_file(self) -> tuple[int, object]:
        config = ElasticConfig.parse(self.path.read_bytes())
        return config.version, config.get("user.x")

    def versions(self) -> list[int]:
        """As the history has entered them, which ``ConfigHistory.entries`` would add the file to."""
        lines = self.path.with_name(".config.json.history").read_text().splitlines()
        return [json.loads(line)["config"]["version"] for line in lines]


def text_of(version: int, x: object, reason: str = "") -> str:
    return json.dumps({"version": version, "reason": reason, "user": {"x": x}})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# ---- writing ----


def test_what_it_writes_itself_is_the_next_version_and_no_foreign_write(node: Node) -> None:
    node.tuner.look()
    for x in (1, 2, 3):
        assert node.set(x) == ElasticConfig.parse(node.path.read_bytes())
        node.tuner.look()
    assert node.tuner.undo().get("user.x") == 2
    node.tuner.look()
    assert node.in_file() == (4, 2) and node.versions() == [1, 2, 3, 4]
    assert node.told == []


def test_what_is_set_aside_is_kept_under_another_name_and_the_next_version_is_the_first(node: Node) -> None:
    node.by_hand(7, "old")
    node.tuner.look()
    kept = node.tuner.set_aside()
    assert kept is not None and ElasticConfig.parse(kept.read_bytes()).version == 7
    assert not node.path.exists() and node.tuner.newest() is None
    node.tuner.look()
    assert node.told == []
    assert node.tuner.take(text_of(2, "theirs")) and node.in_file() == (2, "theirs")
    assert node.set("next").version == 3


def test_where_there_is_no_file_nothing_is_set_aside(node: Node) -> None:
    assert node.tuner.set_aside() is None and list(node.path.parent.iterdir()) == []


def test_a_refused_change_writes_nothing(node: Node) -> None:
    node.set(1)
    node.tuner.undo()
    before = node.path.read_bytes()
    with pytest.raises(ConfigError, match="allowed"):
        node.tuner.set(ConfigEdit({"optimizer.learning_rate": -1}))
    with pytest.raises(ConfigError, match="no earlier version"):
        node.tuner.undo()
    node.tuner.look()
    assert node.path.read_bytes() == before and node.told == []


def test_sets_from_several_threads_and_looks_between_them_lose_nothing(node: Node) -> None:
    def set_some(name: str) -> None:
        for number in range(5):
            node.tuner.set(ConfigEdit({f"user.{name}": number}, reason=name))

    threads = [threading.Thread(target=set_some, args=(f"t{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        node.tuner.look()
    for thread in threads:
        thread.join(END_SECONDS)
    node.tuner.look()
    assert node.versions() == list(range(1, 16)) and node.told == []
    assert ElasticConfig.parse(node.path.read_bytes()).values() == {f"user.t{number}": 4 for number in range(3)}


# ---- foreign writes ----


def test_the_file_at_the_beginning_is_taken_in_and_not_told_of(node: Node) -> None:
    node.by_hand(7, 1)
    node.tuner.look()
    assert node.told == [] and node.versions() == [7]
    assert node.tuner.newest() == (7, ElasticConfig.parse(node.path.read_bytes()).to_json())


def test_a_version_of_a_persons_is_told_of_once_entered_and_gone_on_from(node: Node) -> None:
    node.set(1)
    node.by_hand(5, 2, "by hand")
    for _ in range(3):
        node.tuner.look()
    digest = ElasticConfig.parse(node.path.read_bytes()).digest
    words = f"somebody else has put version 5 into {node.path}: by hand"
    assert node.told == [ForeignWrite(version=5, digest=digest, valid=True, words=words)]
    assert node.versions() == [1, 5]
    node.path.touch()
    os.utime(node.path, ns=(0, 0))
    node.path.write_bytes(node.path.read_bytes())
    node.tuner.look()
    assert len(node.told) == 1
    assert node.set(3).version == 6 and node.tuner.undo().get("user.x") == 2
    assert len(node.told) == 1


def test_contents_that_change_and_leave_the_files_stamp_as_it_was_are_noticed(node: Node) -> None:
    """As those may that are written at once: clocks of file systems are coarse."""
    node.by_hand(1, 0)
    with open(node.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = text_of(2, 0).encode()
        node.tuner.look()
        before = stamp_of(node.path)
        memory[:] = text_of(3, 0).encode()
        assert stamp_of(node.path) == before  # the page was written to before
        node.tuner.look()
    assert [each.version for each in node.told] == [3]


def test_a_file_that_stays_is_not_read_again_once_its_stamp_is_old(node: Node) -> None:
    node.path.symlink_to(sys.executable)  # a file that was changed long ago, if a strange one
    opened = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal opened
        if event == "open" and str(arguments[0]) == str(node.path):
            opened += 1

    with _Hook(count):
        for _ in range(5):
            node.tuner.look()
    assert opened == 1 and len(node.told) == 1


@pytest.mark.parametrize(
    ("version", "x", "words"),
    [
        (3, 9, "not above version 4: ranks refuse it while they train; give it version 5"),
        (4, 9, "which had other contents before; give the new ones version 5, since ranks may run under the old ones"),
        (4, 4, "anew, with the contents that it had"),
    ],
)
def test_a_version_that_is_not_above_the_newest_is_told_of_with_what_to_do_and_left_as_it_is(
    node: Node, version: int, x: int, words: str
) -> None:
    for value in (1, 2, 3, 4):
        node.set(value)
    node.by_hand(version, x)
    node.tuner.look()
    (told,) = node.told
    assert told.valid and told.version == version and words in told.words
    assert node.in_file() == (version, x)
    newest = node.tuner.newest()
    assert newest is not None and newest[0] == 4
    assert node.set(5).version == 5


@pytest.mark.parametrize("data", [b"", b"half a fi", b'{"version": 1, "typo": 1}', b"\xff", b"x" * (2 << 20)])
def test_a_file_that_is_refused_is_told_of_once_and_left_as_it_is(node: Node, data: bytes) -> None:
    node.set(1)
    newest = node.tuner.newest()
    node.path.write_bytes(data)
    for _ in range(3):
        node.tuner.look()
    (told,) = node.told
    assert (told.version, told.digest, told.valid) == (None, "", False) and "its content is refused: " in told.words
    assert node.path.read_bytes() == data and node.tuner.newest() == newest
    with pytest.raises(ConfigError):
        node.set(2)
    assert node.tuner.undo().get("user.x") == 1
    node.tuner.look()
    assert len(node.told) == 1


def test_a_file_that_is_refused_at_the_beginning_is_told_of(node: Node) -> None:
    node.path.write_bytes(b"half a fi")
    node.tuner.look()
    node.tuner.look()
    assert [each.valid for each in node.told] == [False] and node.tuner.newest() is None


def test_a_file_that_is_half_written_for_a_moment_is_told_of_when_it_is_whole(tmp_path: Path) -> None:
    node = Node(tmp_path, settle_seconds=1000.0)
    node.set(1)
    whole = node.path.read_bytes()
    for half in (whole[:10], b"", None):
        if half is None:
            node.path.unlink()
        else:
            node.path.write_bytes(half)
        node.tuner.look()
        node.path.write_bytes(whole)
        node.tuner.look()
    assert node.told == []
    node.path.write_bytes(whole[:10])
    node.tuner.look()
    node.by_hand(2, 2)
    node.tuner.look()
    assert [each.version for each in node.told] == [2]


def test_a_file_that_is_removed_is_told_of_and_written_again_at_the_next_change(node: Node) -> None:
    node.set(1)
    node.path.unlink()
    for _ in range(3):
        node.tuner.look()
    assert [(each.valid, each.words) for each in node.told] == [
        (False, f"somebody else has changed {node.path}: the file is gone; the config in force stays in force")
    ]
    assert node.set(2).version == 2
    node.tuner.look()
    assert len(node.told) == 1 and node.in_file() == (2, 2)


def test_no_file_at_the_beginning_is_nothing_to_tell_of(node: Node) -> None:
    node.tuner.look()
    assert node.told == [] and node.tuner.newest() is None
    node.by_hand(1, 1)
    node.tuner.look()
    assert [each.version for each in node.told] == [1]


def test_a_link_in_the_place_of_the_file_stays_one_and_what_it_leads_to_counts(node: Node) -> None:
    node.set(1)
    target = node.path.with_name("elsewhere.json")
    target.write_bytes(node.path.read_bytes())
    node.path.unlink()
    node.path.symlink_to(target)
    node.tuner.look()
    assert node.told == []
    target.write_text(text_of(2, 2))
    node.tuner.look()
    assert [each.version for each in node.told] == [2]
    assert node.set(3).version == 3
    assert node.path.is_symlink() and json.loads(target.read_bytes())["user"]["x"] == 3
    target.unlink()
    node.tuner.look()
    assert [each.valid for each in node.told] == [True, False]


@pytest.mark.parametrize("what", ["folder", "pipe", "circle"])
def test_what_is_no_file_is_told_of_once_and_does_not_stop_the_looking(node: Node, what: str) -> None:
    node.set(1)
    node.path.unlink()
    if what == "folder":
        node.path.mkdir()
    elif what == "pipe":
        os.mkfifo(node.path)
    else:
        node.path.symlink_to(node.path)
    for _ in range(3):
        node.tuner.look()
    assert [each.valid for each in node.told] == [False]
    assert "cannot be read" in node.told[0].words
    with pytest.raises(OSError, match=r"."):
        node.set(2)
    node.path.rmdir() if what == "folder" else node.path.unlink()
    assert node.set(2).version == 2


def test_a_version_that_comes_between_the_last_look_and_a_write_is_kept_and_told_of(node: Node) -> None:
    node.set(1)
    came: list[bool] = []

    def come(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".config.json.lock") and not came:
            came.append(True)
            node.by_hand(7, 7)

    with _Hook(come):
        assert node.set(8).version == 8
    assert came and [each.version for each in node.told] == [7]
    assert node.versions() == [1, 7, 8]
    node.tuner.look()
    assert len(node.told) == 1


def test_the_one_who_is_told_may_ask_the_tuner(tmp_path: Path) -> None:
    asked: list[object] = []
    tuner = ConfigWriter(
        tmp_path / "config.json", on_foreign=lambda write: asked.append((tuner.newest(), tuner.undo().version))
    )
    tuner.set(ConfigEdit({"user.x": 1}))
    (tmp_path / "config.json").write_text(text_of(2, 2))
    tuner.look()
    assert len(asked) == 1
    tuner.look()
    assert len(asked) == 1


# ---- others who write ----


def test_a_look_waits_for_nobody_and_enters_what_it_found_later(tmp_path: Path) -> None:
    node = Node(tmp_path, patience_seconds=3600.0)
    node.set(1)
    node.by_hand(2, 2)
    with exclusive(node.path.with_name(".config.json.lock")):
        node.tuner.look()
        assert [each.version for each in node.told] == [2]
        assert node.versions() == [1]
        assert not node.tuner.take(text_of(3, 3))
    node.tuner.look()
    assert node.versions() == [1, 2] and len(node.told) == 1
    assert node.tuner.take(text_of(3, 3))


def test_a_writer_that_does_not_end_makes_a_change_fail_after_a_while_and_not_a_look(tmp_path: Path) -> None:
    node = Node(tmp_path, patience_seconds=0.05)
    node.set(1)
    with (
        exclusive(node.path.with_name(".config.json.lock")),
        pytest.raises(TimeoutError, match="another process writes"),
    ):
        node.set(2)
    assert node.set(2).version == 2


def test_while_a_change_waits_a_look_and_a_take_come_back_at_once_and_newest_answers(node: Node) -> None:
    node.set(1)
    waits = threading.Event()
    thread = threading.Thread(target=node.set, args=(2,))

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and threading.current_thread() is thread and str(arguments[0]).endswith(".config.json.lock"):
            waits.set()

    with exclusive(node.path.with_name(".config.json.lock")), _Hook(see):
        thread.start()
        assert waits.wait(END_SECONDS)
        node.tuner.look()
        assert not node.tuner.take(text_of(9, 9))
        newest = node.tuner.newest()
        assert newest is not None and newest[0] == 1
        assert thread.is_alive()
    thread.join(END_SECONDS)
    assert node.in_file() == (2, 2) and node.told == []


FULL = """
import logging, sys
from pathlib import Path
import resource
from elastic_ext.agent.config_writer import ConfigWriter
from elastic_ext.config.history import ConfigEdit
logging.basicConfig(level=logging.WARNING, format="%(message)s")
path, other = Path(sys.argv[1]), sys.argv[2]
told = []
tuner = ConfigWriter(path, on_foreign=told.append)
tuner.set(ConfigEdit({"user.x": 1}, reason="r" * 300))
before = path.read_bytes()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
for _ in range(2):
    try:
        tuner.set(ConfigEdit({"user.x": 2}))
    except OSError as error:
        print("failed:", error.strerror)
    assert not tuner.take(other)
    assert "could not be written" in tuner.trouble, tuner.trouble
    tuner.look()
assert path.read_bytes() == before and tuner.newest()[0] == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert tuner.take(other) and tuner.trouble is None
assert tuner.set(ConfigEdit({"user.x": 3})).version == 10
tuner.look()
assert told == []
"""


def test_a_full_disk_leaves_the_old_version_is_reported_once_and_the_next_write_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "config.json"), text_of(9, 9)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=END_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "failed: File too large\n" * 2
    assert done.stderr.count("and is as it was") == 1 and done.stderr.count("of another node could not") == 1


def test_a_disk_without_room_for_the_history_is_reported_once_and_the_version_entered_later(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.set(1)
    node.by_hand(2, 2, "r" * 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with caplog.at_level(logging.WARNING):
            node.tuner.look()
            node.tuner.look()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.getMessage().partition(" could")[0] for record in caplog.records] == [f"the history of {node.path}"]
    node.tuner.look()
    assert node.versions() == [1, 2] and len(node.told) == 1


# ---- nodes that hand each other versions ----


def hand_round(nodes: list[Node]) -> None:
    """What agents do by their store: each gives what it has, and takes what the others gave."""
    for node in nodes:
        node.tuner.look()
    given = [newest[1] for newest in (node.tuner.newest() for node in nodes) if newest is not None]
    for node in nodes:
        for text in given:
            node.tuner.take(text)


@contextmanager
def several(folder: Path, count: int = 3) -> Iterator[list[Node]]:
    folders = [folder / str(number) for number in range(count)]
    for each in folders:
        each.mkdir()
    yield [Node(each) for each in folders]


def test_a_version_set_on_one_node_is_on_all_of_them_and_foreign_on_none(tmp_path: Path) -> None:
    with several(tmp_path) as nodes:
        hand_round(nodes)
        nodes[1].tuner.set(ConfigEdit({"user.x": 1}, reason="why", at_step=7))
        hand_round(nodes)
        nodes[2].set(2)
        hand_round(nodes)
        assert [node.path.read_bytes() for node in nodes] == [nodes[2].path.read_bytes()] * 3
        assert [node.versions() for node in nodes] == [[1, 2]] * 3
        assert [node.told for node in nodes] == [[]] * 3
        assert nodes[0].tuner.undo().get("user.x") == 1  # which it was never asked to set itself


def test_a_persons_version_goes_to_the_other_nodes_and_one_that_is_refused_does_not(tmp_path: Path) -> None:
    with several(tmp_path) as nodes:
        nodes[0].set(1)
        hand_round(nodes)
        nodes[1].by_hand(4, 4)
        nodes[2].path.write_bytes(b"half a fi")
        hand_round(nodes)
        assert [node.in_file() for node in nodes] == [(4, 4)] * 3
        assert [[each.valid for each in node.told] for node in nodes] == [[], [True], [False]]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_version_that_is_not_higher_is_ignored(node: Node, version: int) -> None:
    node.by_hand(3, 0)
    assert not node.tuner.take(text_of(version, 0))
    assert node.in_file() == (3, 0) and node.tuner.trouble is None


def test_one_version_with_two_contents_is_kept_by_neither_for_the_other_until_a_higher_one_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with several(tmp_path, 2) as nodes, caplog.at_level(logging.WARNING):
        for number, node in enumerate(nodes):
            node.set(number)
        for _ in range(3):
            hand_round(nodes)
        assert [node.in_file() for node in nodes] == [(1, 0), (1, 1)]
        for node in nodes:
            assert node.tuner.trouble is not None
            assert node.tuner.trouble.endswith("put one content under version 2")
        assert len(caplog.records) == 2
        nodes[0].set(5)
        hand_round(nodes)
        assert [node.in_file() for node in nodes] == [(2, 5)] * 2
        assert [node.tuner.trouble for node in nodes] == [None, None]


@pytest.mark.parametrize("text", ["", "{", '{"version": 0}', '{"version": 9, "typo": 1}', "\ud800", "[" * 100_000])
def test_what_another_node_gives_and_is_no_config_is_trouble_and_not_taken(node: Node, text: str) -> None:
    node.set(1)
    assert not node.tuner.take(text)
    assert node.tuner.trouble is not None and "of another node is refused here" in node.tuner.trouble
    assert node.in_file() == (1, 1)
    assert node.tuner.take(text_of(2, 2)) and node.tuner.trouble is None


@pytest.mark.slow
@given(given_configs=st.lists(configs(), min_size=1, max_size=4))
@unhurried
def test_nodes_that_take_in_many_orders_end_with_the_highest_version(
    tmp_path_factory: pytest.TempPathFactory, given_configs: list[ElasticConfig]
) -> None:
    check_any_order(tmp_path_factory.mktemp("nodes"), given_configs)


@given(given_configs=st.lists(configs(), min_size=1, max_size=4))
@settings(unhurried, max_examples=30)
def test_nodes_that_take_in_any_order_end_with_the_highest_version(
    tmp_path_factory: pytest.TempPathFactory, given_configs: list[ElasticConfig]
) -> None:
    check_any_order(tmp_path_factory.mktemp("nodes"), given_configs)


def check_any_order(folder: Path, given_configs: list[ElasticConfig]) -> None:
    by_version = {config.version: config for config in given_configs}  # one content for each version
    texts = [config.to_json() for config in by_version.values()]
    with several(folder, 2) as nodes:
        for node, order in zip(nodes, (texts, texts[::-1]), strict=True):
            for text in order:
                node.tuner.take(text)
        highest = by_version[max(by_version)].to_json()
        assert [node.path.read_text(encoding="utf-8") for node in nodes] == [highest] * 2
        assert [node.tuner.trouble for node in nodes] == [None, None]


# ---- what others may ask ----


def test_requests_set_and_undo_and_give_what_was_written(node: Node) -> None:
    requests = config_requests(node.tuner)
    answer = requests["config-set"]({"do": "config-set", "changes": {"user.x": 1}, "reason": "why", "at_step": 3})
    assert ElasticConfig.from_dict(answer["config"]) == ElasticConfig.parse(node.path.read_bytes())
    requests["config-set"]({"changes": {"user.y": [1, 2]}, "remove": ["user.x"]})
    assert ElasticConfig.parse(node.path.read_bytes()).values() == {"user.y": (1, 2)}
    assert requests["config-undo"]({})["config"]["user"] == {"x": 1}


@pytest.mark.parametrize(
    "request_", [{"changes": []}, {"remove": "user.x"}, {"remove": [[]]}, {"reason": 1}, {"at_step": "1"}]
)
def test_a_request_of_the_wrong_shape_is_refused(node: Node, request_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="config-set"):
        config_requests(node.tuner)["config-set"](request_)
    assert not node.path.exists()


class _Hook:
    """An audit hook, which cannot be removed, for as long as a ``with`` lasts."""

    def __init__(self, call: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._call = call
        self._is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_on:
            self._call(event, arguments)

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *error: object) -> None:
        self._is_on = False
