"""What touches the storage has a limit of time, and what comes late finds nothing under way beside it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from elastic_ext.fsdp.checkpoint.storage import THREAD_NAME, Storage
from elastic_ext.ranks.group import Ranks
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.saving import begin_job, checkpointer_of, digest_of, extra_of, garbage_in, job_folder, make_state
from tests.support.thinning import the_first
from tests.support.trials import Trial, run_one


def join_late() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(60)


def storage_of(seconds: float) -> Storage:
    return Storage(Ranks.alone(), timeout_seconds=seconds)


def test_what_is_done_in_time_gives_its_result_or_raises_its_error() -> None:
    storage = storage_of(60.0)
    assert storage.together(lambda: 3, "counting") == [3]
    with pytest.raises(CheckpointError, match="counting failed: no"):
        storage.together(_raiser(ValueError("no")), "counting")


def _raiser(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_nothing_is_begun_beside_what_has_not_ended() -> None:
    storage = storage_of(0.05)
    may_end = threading.Event()
    with pytest.raises(CheckpointError, match=r"took longer than 0\.05 seconds while waiting"):
        storage.together(lambda: may_end.wait(60), "waiting")
    with pytest.raises(CheckpointError, match=r"has not answered yet .*, and until it does counting is not possible"):
        storage.together(lambda: 3, "counting")
    may_end.set()
    join_late()
    storage = storage_of(60.0)
    assert storage.together(lambda: 3, "counting") == [3]


def test_what_an_interrupt_has_left_behind_is_waited_for_as_well() -> None:
    storage = storage_of(60.0)
    may_end, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def act() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        may_end.wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            storage.within(act, "waiting")
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(CheckpointError, match=r"has not answered yet .*, and until it does counting is not possible"):
        storage.within(lambda: 3, "counting")
    may_end.set()
    join_late()
    assert storage.within(lambda: 3, "counting") == 3


def test_what_is_asked_with_no_time_left_is_waited_for_as_well() -> None:
    storage = storage_of(0.0)
    may_end = threading.Event()
    with pytest.raises(CheckpointError, match="took longer than 0 seconds while waiting"):
        storage.within(lambda: may_end.wait(60), "waiting")
    with pytest.raises(CheckpointError, match="has not answered yet"):
        storage.within(lambda: 3, "counting")
    may_end.set()
    join_late()


def test_the_parts_of_one_thing_share_its_time() -> None:
    storage = storage_of(0.2)
    waiting = threading.Event()

    def act() -> None:
        for _ in range(100):
            storage.within(lambda: waiting.wait(0.02), "a part")

    with pytest.raises(CheckpointError, match="while a part"):
        storage.together(act, "many parts", is_patient=False)


# --- storage that answers when nobody waits for it any more ---------------------------------------------------------


def save_twice(rank: int, storage: Path, like: str) -> tuple[str, list[str], list[str]]:
    """A save that hangs on the first rank and comes back late, one that comes too early, and one that is well."""
    model, optimizer = make_state()
    may_end = threading.Event()
    with checkpointer_of(storage, storage_timeout_seconds=3.0) as checkpointer:
        checkpointer.load(model, optimizer)
        checkpointer.claim()
        FileOperations(storage, may_end.wait, 0 if rank == 0 else None, like=like)
        for words in ("the storage took longer than 3 seconds", "has not answered yet"):
            with pytest.raises(CheckpointError, match=words):
                checkpointer.save(2, model, optimizer, extra_of(2))
        may_end.set()
        join_late()
        path = checkpointer.save(3, model, optimizer, extra_of(3))
        assert checkpointer.latest() == path
    with checkpointer_of(storage) as checkpointer:
        checkpointer.claim()  # which clears away what is left of saves that failed
    folder = job_folder(storage)
    return path.name, sorted(found.parent.name for found in folder.glob(f"*/{COMMIT}")), garbage_in(storage)


@pytest.mark.parametrize("like", the_first(["os.writev", "os.mkdir", "trainer_state", ".COMMIT."]))
def test_a_save_that_comes_back_late_does_no_harm_to_the_next(ranks: RankPool, tmp_path: Path, like: str) -> None:
    storage = tmp_path / "storage"
    ranks.run(2, begin_job, storage, 1)
    ends = run_one(ranks, tmp_path / "ends", Trial(fn=save_twice, args=(storage, like)))
    assert [end.error for end in ends] == [None, None]
    name, committed, garbage = ends[0].value
    assert name == "step_3"
    assert committed in (["step_1", "step_3"], ["step_1", "step_2", "step_3"])  # what was late may have been whole
    assert committed == sorted(path.name for path in job_folder(storage).glob("step_*"))
    assert garbage == []


def load_late(rank: int, storage: Path) -> None:
    model, optimizer = make_state()
    may_end = threading.Event()
    with checkpointer_of(storage, storage_timeout_seconds=3.0) as checkpointer:
        FileOperations(storage, may_end.wait, 0 if rank == 1 else None, like="model_param")
        with pytest.raises(CheckpointError, match="the storage took longer than 3 seconds while reading"):
            checkpointer.load(model, optimizer)
        before = digest_of(model, optimizer)
        may_end.set()
        join_late()
        if rank == 1:
            assert digest_of(model, optimizer) == before


def test_a_load_that_comes_back_late_touches_nothing_any_more(ranks: RankPool, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    ranks.run(2, begin_job, storage, 1)
    ends = run_one(ranks, tmp_path / "ends", Trial(fn=load_late, args=(storage,)))
    assert [end.error for end in ends] == [None, None]
