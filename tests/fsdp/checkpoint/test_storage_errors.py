"""Storage that answers a call with an error once, as NFS does, and processes that may open no more files.

Whichever call of a save or a load it is, a checkpoint is whole or absent, and the error says what was being done, and
to which file.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.claim import is_mark
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.loading.verify import damage_in
from tests.support.saving import (
    begin_job,
    checkpointer_of,
    digest_at,
    digest_of,
    extra_of,
    fill,
    garbage_in,
    is_loaded,
    job_folder,
    make_state,
    newest_of,
)
from tests.support.syscalls import Calls, at_call, can_fail
from tests.support.thinning import the_first

_NAMED = "the file that the call was given"
_BY_DESCRIPTOR = frozenset(
    {"read", "readinto", "preadv", "write", "writev", "flush", "seek", "fsync", "fstat", "fchmod", "ftruncate", "flock"}
)
"""Calls whose errors the system puts no name of a file to."""
_NOT_OF_FILES = frozenset({"geteuid", "_path_normpath", "posix_fadvise"})
_CLOSES = frozenset({"close", "__exit__"})
_LOOKS = frozenset({"lstat", "open", "fstat", "read", "readlink"}) | _CLOSES
"""Calls that may fail without a word, where all that is lost is a look at what lies there of before: what cannot be
read now is neither renamed nor removed. Whatever writes, makes durable or locks is told of."""
_DOING = ("claiming the job's folder", "beginning checkpoint", "writing checkpoint", "committing checkpoint")
_READING = ("looking for checkpoints", "loading ")

Answer = tuple[int, bool]
"""The number of an error, and whether what was asked for is done all the same."""
_STALE, _BROKEN, _DONE = (errno.ESTALE, False), (errno.EIO, False), (errno.EIO, True)


def is_asked(name: str) -> bool:
    """Whether a call is one that storage may answer with an error."""
    return can_fail(name) and name not in _NOT_OF_FILES


def is_asked_or_closes(name: str) -> bool:
    """The same of calls that are done all the same: NFS may tell of what was written only as a file is closed."""
    return is_asked(name) or name in _CLOSES


def opens(name: str) -> bool:
    """Whether a call needs a descriptor that it does not have."""
    return name in ("open", "scandir", "listdir")


@pytest.fixture
def first(ram: Path) -> Path:
    """Storage where a job has saved its steps 1 and 2, on which every call has been made once by this process."""
    storage = ram / "first"
    begin_job(0, storage, 2)
    warm = ram / "warm"
    shutil.copytree(storage, warm)
    save(warm, lambda: None, 0)
    return storage


def copies_of(storage: Path) -> Iterator[Path]:
    """The same storage again and again."""
    copy = storage.with_name("copy")
    while True:
        shutil.copytree(storage, copy)
        yield copy
        shutil.rmtree(copy)


def fail_with(answer: Answer, calls: Callable[[], Calls]) -> None:
    number, _ = answer
    name = calls().names[-1]
    has_no_name = name in _BY_DESCRIPTOR | _CLOSES
    raise OSError(number, os.strerror(number), None if has_no_name else _NAMED)


@contextmanager
def struck(call: int, answer: Answer) -> Iterator[Calls]:
    """Within this, the storage answers that one of its calls with an error."""
    found: list[Calls] = []
    counts = is_asked_or_closes if answer[1] else is_asked
    with at_call(
        call, lambda: fail_with(answer, lambda: found[0]), counts=counts, is_after=answer[1], in_new_threads=True
    ) as calls:
        found.append(calls)
        yield calls


def save(storage: Path, happens: Callable[[], None], call: int) -> tuple[str | None, Calls]:
    """A run that goes on from step 2, and saves step 3, in the course of which something happens at a call that opens a
    file; what it is told, and the calls."""
    model, optimizer = make_state()
    with checkpointer_of(storage) as checkpointer:
        assert checkpointer.load(model, optimizer).step == 2
        fill(model, optimizer, 3)
        with at_call(call, happens, counts=opens, in_new_threads=True) as calls:
            told = save_step_3(checkpointer, model, optimizer)
        return told, calls


def save_step_3(checkpointer: ShardCheckpointer, *state: object) -> str | None:
    """What is told where it cannot be."""
    model, optimizer = state
    try:
        checkpointer.save(3, model, optimizer, extra_of(3))  # type: ignore[arg-type]
    except CheckpointError as error:
        return str(error)
    return None


def check_all_whole(storage: Path, newest: int) -> None:
    """Every checkpoint that there is can be loaded to the last bit, and is what it was saved as."""
    assert newest_of(storage) == newest
    for step in range(1, newest + 1):
        assert list(damage_in(ListedCheckpoint.read(job_folder(storage) / f"step_{step}"))) == []
    assert is_loaded(storage, newest)


# ---- storage that answers with an error once ----


@pytest.mark.parametrize(("answer", "stride"), the_first([(_STALE, 13), (_STALE, 1), (_BROKEN, 1), (_DONE, 1)]))
def test_a_save_whose_storage_fails_once_is_whole_or_absent_and_says_what_failed(
    first: Path, answer: Answer, stride: int
) -> None:
    num_failed = 0
    for place, storage in enumerate(copies_of(first)):
        model, optimizer = make_state()
        with checkpointer_of(storage) as checkpointer:
            assert checkpointer.load(model, optimizer).step == 2
            fill(model, optimizer, 3)
            with struck(place * stride, answer) as calls:
                told = save_step_3(checkpointer, model, optimizer)
            if len(calls.names) <= place * stride:
                break
            words = f"call {place * stride}, {calls.names[place * stride]}: {told}"
            if told is not None:
                num_failed += 1
                check_all_whole(storage, 2)
                assert told.startswith(_DOING), words
                assert os.strerror(answer[0]) in told, words
                assert _NAMED in told or str(storage) in told, words
                assert save_step_3(checkpointer, model, optimizer) is None, words
            else:
                assert calls.names[place * stride] in _LOOKS, words
            check_all_whole(storage, 3)
        with checkpointer_of(storage) as checkpointer:
            checkpointer.claim()  # which clears away what is left
        assert garbage_in(storage) == [], words
    assert num_failed > 100 / stride


@pytest.mark.parametrize(("answer", "stride"), the_first([(_STALE, 6), (_STALE, 1), (_BROKEN, 1), (_DONE, 1)]))
def test_a_load_whose_storage_fails_once_is_of_the_newest_or_says_what_failed(
    first: Path, answer: Answer, stride: int
) -> None:
    num_failed = 0
    for place in range(1000):
        model, optimizer = make_state()
        with checkpointer_of(first) as checkpointer:
            told, loaded = None, None
            with struck(place * stride, answer) as calls:
                try:
                    loaded = checkpointer.load(model, optimizer).step
                except CheckpointError as error:
                    told = str(error)
            if len(calls.names) <= place * stride:
                break
            words = f"call {place * stride}, {calls.names[place * stride]}: {told}"
            assert loaded in (None, 2), words
            if told is not None:
                num_failed += 1
                assert told.startswith(_READING), words
                assert os.strerror(answer[0]) in told, words
                assert _NAMED in told or str(first) in told.partition("failed")[2], words
                assert checkpointer.load(model, optimizer).step == 2, words
            assert digest_of(model, optimizer) == digest_at(2), words
    assert num_failed > 40 / stride
    with checkpointer_of(first) as checkpointer:
        checkpointer.claim()
    assert all(is_mark(Path(left).name) for left in garbage_in(first)), "of readers, which lapse"


# ---- processes that may open no more files ----


@contextmanager
def limit_kept() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_no_more() -> None:
    """No file can be opened by this process from now on, but in the place of one that is closed."""
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize("stride", the_first([9, 1]))
def test_a_process_that_may_open_no_more_files_at_any_open_of_a_save_loses_nothing_and_is_told(
    first: Path, stride: int
) -> None:
    num_failed = 0
    for place, storage in enumerate(copies_of(first)):
        with limit_kept():
            told, calls = save(storage, open_no_more, place * stride)
        if len(calls.names) <= place * stride:
            break
        words = f"open {place * stride}: {told}"
        is_there = newest_of(storage) == 3
        check_all_whole(storage, 3 if is_there else 2)
        if told is None:
            assert is_there, words
        else:
            num_failed += 1
            assert told.startswith(_DOING), words
            assert "Too many open files" in told and str(storage) in told and "`ulimit -n`" in told, words
            assert not is_there or told.startswith("committing"), words  # and nothing could be taken away again
        if not is_there:
            assert save(storage, lambda: None, -1)[0] is None, words
        with checkpointer_of(storage) as checkpointer:
            checkpointer.claim()
        check_all_whole(storage, 3)
        assert garbage_in(storage) == [], words
    assert num_failed > 40 / stride
