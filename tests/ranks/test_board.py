"""Boards: what one peer posts the others read, over torch's stores as over those of plain Python."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic_ext.errors import ElasticError
from elastic_ext.ranks.board import Board, BoardGone, Store
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.ranks.notices import Notices, Trouble, ended_file
from elastic_ext.ranks.world import PeerName
from tests.support.ranks import RankPool
from tests.support.scripts import Script
from tests.support.stores import PlainStore

KINDS = ["plain", "hash", "tcp", "file", "prefix"]
SECONDS = 30.0


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store of each kind that boards are used over."""
    makers: dict[str, Callable[[], Any]] = {
        "plain": PlainStore,
        "hash": HashStore,
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "prefix": lambda: PrefixStore("theirs", HashStore()),
    }
    return makers[request.param]()


def boards_of(store: Store, num_peers: int = 2, **arguments: Any) -> list[Board]:
    return [Board(store, "job", place=place, num_peers=num_peers, **arguments) for place in range(num_peers)]


# --- posting and reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1.5, True, "", "ü\n", [1, [None]], {"a": {"b": []}}])
def test_what_one_posts_another_reads(store: Any, value: object) -> None:
    first, second = boards_of(store)
    assert not second.has("a") and second.read("a") is None
    first.post("a", value)
    assert second.has("a") and not second.has("a", "b")
    assert second.read("a") == first.read("a") == value
    second.post("a", "later")
    assert first.read("a") == "later"


def test_a_value_lies_under_one_key_as_json(store: Any) -> None:
    first, second = boards_of(store)
    second.tell("word", ["a"])
    first.below("part").post("word", {"b": 1})
    assert bytes(store.get("job/word/1")) == b'["a"]'
    assert bytes(store.get("job/part/word")) == b'{"b": 1}'


def test_each_peer_has_a_value_of_its_own_under_a_name(store: Any) -> None:
    first, second, third = boards_of(store, 3)
    assert first.values_of("word") == {}
    third.tell("word", "c")
    first.tell("word", "a")
    assert second.values_of("word") == {0: "a", 2: "c"}
    assert second.of_peers("word") == ["word/0", "word/1", "word/2"] and second.of_peers("word", [2]) == ["word/2"]
    assert not second.has(*second.of_peers("word")) and second.has(*second.of_peers("word", [2, 0]))


def test_boards_below_others_and_with_other_prefixes_share_no_names(store: Any) -> None:
    board = Board(store, "job")
    below, other = board.below("part"), Board(store, "other")
    below.post("a", 1)
    assert not board.has("a") and not other.has("a") and not other.below("part").has("a")
    assert board.read("part/a") == board.below("part").read("a") == 1


def test_the_first_to_decide_decides_for_all(store: Any) -> None:
    first, second = boards_of(store)
    assert second.decide("how", "in steps") == "in steps"
    assert first.decide("how", "from memory") == first.read("how") == "in steps"


def test_of_many_who_decide_at_once_all_hear_the_same() -> None:
    for each in (PlainStore(), HashStore()):
        boards = boards_of(each, 8)
        with ThreadPoolExecutor(8) as threads:
            heard = list(threads.map(lambda board: board.decide("who", board.place), boards))
        assert len(set(heard)) == 1


def test_calls_are_counted_over_all_peers(store: Any) -> None:
    first, second = boards_of(store)
    assert [first.count("groups"), second.count("groups"), first.count("groups"), first.count("more")] == [1, 2, 3, 1]


def test_a_peer_that_clears_up_deletes_its_own_values_alone(store: Any) -> None:
    first, second = boards_of(store)
    first.tell("word", "a")
    first.post("all", 1)
    first.post("all", 2)
    first.below("part").post("word", "kept")
    second.tell("word", "b")
    first.clear()
    assert second.values_of("word") == {1: "b"} and not second.has("all") and second.has("part/word")
    first.clear()
    first.tell("word", "again")
    assert second.values_of("word") == {0: "again", 1: "b"}


# --- waiting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits_inside", [False, True])
def test_a_wait_ends_when_the_last_value_is_there(store: Any, waits_inside: bool) -> None:
    first, second = boards_of(store, waits_inside=waits_inside, pause_seconds=0.05)
    is_asked = threading.Event()

    def note() -> bool:
        is_asked.set()
        return False

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.wait, ["a", "b"], seconds=SECONDS, stop=note)
        second.post("a", 1)
        assert is_asked.wait(SECONDS) and not waiting.done()
        second.post("b", 2)
        assert waiting.result(SECONDS)
    assert first.take("a", seconds=0.0) == 1


@pytest.mark.parametrize("waits_inside", [False, True])
def test_nobody_waits_beyond_a_deadline_or_once_told_to_stop(store: Any, waits_inside: bool) -> None:
    board = Board(store, "job", waits_inside=waits_inside, pause_seconds=0.05)
    began = time.monotonic()
    assert not board.wait(["a"], seconds=0.2)
    assert 0.2 <= time.monotonic() - began < SECONDS
    asked = iter([False, False, True])
    assert not board.wait(["a"], seconds=math.inf, stop=lambda: next(asked))
    with pytest.raises(BoardGone, match=r"^no peer has posted a in the store within 0 seconds$"):
        board.take("a", seconds=0.1)
    board.post("a", None)
    assert board.wait(["a"], seconds=0.0, stop=lambda: True)  # what is there is not waited for


def test_a_wait_inside_hears_at_once_of_a_value() -> None:
    for each in (PlainStore(), HashStore()):
        first, second = boards_of(each, waits_inside=True, pause_seconds=SECONDS)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(first.take, "a", seconds=SECONDS)
            began = time.monotonic()
            second.post("a", 1)
            assert waiting.result(SECONDS) == 1 and time.monotonic() - began < SECONDS / 2


# --- a store that is lost -------------------------------------------------------------------------------------------

HOLDER = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.fixture
def held(ranks: RankPool, tmp_path: Path) -> Iterator[tuple[Any, Script]]:
    """A TCPStore, and the other process that holds it."""
    file = tmp_path / "holder.py"
    file.write_text(HOLDER)
    with Script(ranks, [str(file)], folder=tmp_path, env=os.environ) as holder:
        yield TCPStore("127.0.0.1", int(holder.stdout.readline()), is_master=False), holder


CALLS: dict[str, Callable[[Board], object]] = {
    "has": lambda board: board.has("a"),
    "post": lambda board: board.post("a", 1),  # not the first: torch does not wait until a value has come to the store
    "read": lambda board: board.read("a"),
    "wait": lambda board: board.wait(["a"], seconds=SECONDS),
    "decide": lambda board: board.decide("a", 1),
    "count": lambda board: board.count("b"),
    "values_of": lambda board: board.values_of("a"),
}


def test_where_the_process_that_holds_the_store_has_died_errors_are_our_own(
    held: tuple[Any, Script],
) -> None:
    store, holder = held
    boards = {name: Board(store, "job", what="the store of this test") for name in CALLS}
    boards["inside"] = Board(store, "job", what="the store of this test", waits_inside=True)
    cloned = boards["post"].below("part", connects=True)
    for board in (*boards.values(), cloned):
        board.post("before", 1)
    holder.kill()
    holder.wait()
    for name, board in boards.items():
        with pytest.raises(BoardGone, match=r"^the store of this test does not answer any more \(.+\)$") as caught:
            CALLS.get(name, CALLS["wait"])(board)
        assert isinstance(caught.value, ElasticError) and isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(BoardGone) as again:  # torch is not asked again
            board.has("a")
        assert str(again.value) == str(caught.value) and again.value.__cause__ is None
    with pytest.raises(BoardGone):
        cloned.clear()


class Failing(PlainStore):
    """A store that fails for as long as it is told to, or does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def check(self, keys: list[str], /) -> bool:
        self.answers.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return super().check(keys)


def test_a_store_that_fails_once_is_asked_again() -> None:
    store = Failing()
    board = Board(store, "job")
    store.error = RuntimeError("try again\nat line 7")
    with pytest.raises(BoardGone, match=r"^the store does not answer any more \(try again\)$"):
        board.read("a")
    store.error = RuntimeError()
    with pytest.raises(BoardGone, match=r"\(RuntimeError\)$"):
        board.read("a")
    store.error = None
    assert board.read("a") is None


def test_a_call_that_takes_longer_than_it_may_is_an_error() -> None:
    store = Failing()
    store.answers.clear()
    board = Board(store, "job", answer_seconds=0.1)
    with pytest.raises(BoardGone, match=r"^the store does not answer any more \(no answer within 0\.1 s\)$"):
        board.wait(["a"], seconds=SECONDS)
    store.answers.set()
    assert not Board(store, "job", answer_seconds=SECONDS).has("a")


def test_each_connection_waits_for_itself_alone(held: tuple[Any, Script]) -> None:
    store, _ = held
    board = Board(store, "job", waits_inside=True, pause_seconds=SECONDS)
    other = board.below("part", connects=True)
    assert other.store is not store
    is_asked = threading.Event()

    def note() -> bool:
        is_asked.set()
        return False

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(board.wait, ["part/a"], seconds=SECONDS, stop=note)
        assert is_asked.wait(SECONDS)
        other.post("a", 1)
        assert waiting.result(SECONDS)


# --- the boards of rounds and of notices ----------------------------------------------------------------------------


def test_an_exchange_ends_when_a_node_is_lost() -> None:
    for each in (PlainStore(), HashStore()):
        board = RoundBoard(each, place=0, num_nodes=2, is_lost=lambda: True)
        with pytest.raises(BoardGone, match=r"^not every node has posted its things: a node was lost$"):
            board.exchange("things", 1, timeout_seconds=SECONDS)


def test_rounds_with_one_store_have_messages_of_their_own(store: Any) -> None:
    store.set("anything", "1")
    earlier, later = (RoundBoard(store, place=0, num_nodes=1, number=number) for number in (1, 2))
    earlier.post("over", "why")
    assert earlier.exchange("rows", None, timeout_seconds=SECONDS) == [None]
    assert later.read_quietly("over") is None and bytes(store.get("elastic_ext/1/over")) == b'"why"'


def test_where_the_store_is_gone_nothing_is_told_quietly(held: tuple[Any, Script]) -> None:
    store, holder = held
    board = RoundBoard(store, place=0, num_nodes=2)
    board.tell("leaving", "me")
    assert board.who_told("leaving", "meeting") == {0}
    holder.kill()
    holder.wait()
    board.tell_quietly("meeting", True)
    board.post_quietly("over", "why")
    board.part(timeout_seconds=SECONDS)
    assert board.read_quietly("over") is None and board.who_told("leaving") == frozenset()
    with pytest.raises(BoardGone, match="the store of this round does not answer any more"):
        board.tell("meeting", True)


NAMES = [PeerName(rank=rank, host="here", pid=100 + rank, seat=rank) for rank in range(4)]


def test_ranks_say_why_they_stop_and_agents_which_have_ended(store: Any, tmp_path: Path) -> None:
    first, second, third, _ = (Notices(board, NAMES, agents_folder=tmp_path) for board in boards_of(store, 4))
    assert first.troubles() == {} and first.gather(0.1) == {}
    second.post(Trouble(kind="failed", progress="3 steps", text="x" * 9000))
    second.post(Trouble(kind="lost", progress="4 steps"))
    third.post(Trouble(kind="lost", progress="2 steps"))
    assert first.troubles().keys() == {1, 2} and third.troubles().keys() == {1}
    assert first.troubles()[1] == Trouble(kind="failed", progress="3 steps", text="x" * 4000)
    ended_file(tmp_path, 3).write_text("ended by SIGKILL")
    found = first.gather(SECONDS)
    assert first.account(found, silent="silent") == (
        f"rank 1 (here, pid 101) failed after 3 steps: {'x' * 4000}; "
        "rank 3 (here, pid 103) ended by SIGKILL; "
        "rank 2 (here, pid 102) lost a peer too, after 2 steps"
    )


@pytest.mark.parametrize(
    ("error", "ended", "words"),
    [
        (RuntimeError("Read error: Connection reset by peer"), (1,), "rank 1 (here, pid 101) has ended"),
        (RuntimeError("Connection closed"), (1, 3), "rank 1 (here, pid 101), rank 3 (here, pid 103) have ended"),
        (RuntimeError("Connection reset by peer"), (), None),
        (RuntimeError("shapes do not match"), (1,), None),
    ],
)
def test_an_error_follows_from_the_end_of_ranks_only_if_it_is_of_a_lost_peer_and_an_agent_saw_them_end(
    store: Any, tmp_path: Path, error: RuntimeError, ended: tuple[int, ...], words: str | None
) -> None:
    first, _, third, _ = (Notices(board, NAMES, agents_folder=tmp_path) for board in boards_of(store, 4))
    third.post(Trouble(kind="lost", progress="3 steps"))
    for rank in ended:
        ended_file(tmp_path, rank).write_text("ended by SIGKILL")
    first.explain(error, first.troubles())
    assert getattr(error, "follows_from", None) == words


def test_who_cannot_reach_the_store_says_so_and_goes_on(held: tuple[Any, Script]) -> None:
    store, holder = held
    notices = Notices(Board(store, "job", num_peers=4), NAMES)
    holder.kill()
    holder.wait()
    notices.post(Trouble(kind="failed", progress="the start"))
    assert notices.gather(SECONDS) is None
    assert "the store cannot be reached either" in notices.account(None, silent="silent")


def test_the_plain_store_of_these_tests_does_as_torchs_do() -> None:
    for store in (PlainStore(), HashStore()):
        with pytest.raises(RuntimeError):
            store.wait(["a"], timedelta(seconds=0.05))
        store.set("a", "1")
        store.wait(["a"], timedelta(seconds=SECONDS))
        assert store.delete_key("a") and not store.delete_key("a")
        assert store.add("n", 2) == 2 and store.add("n", 3) == 5 and bytes(store.get("n")) == b"5"
