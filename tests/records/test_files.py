"""Files written whole, with writers that are killed, disks that are full, and things in the place of files."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from elastic_ext.records.files import (
    NewFiles,
    NotRegularError,
    append_line,
    exclusive,
    is_locked,
    is_taken,
    is_temporary,
    lock_holders,
    move_folder,
    put_in_place,
    read_at_most,
    remove_folder,
    stamp_of,
    sync_folder,
    temporary_beside,
    try_lock,
    write_new,
    write_whole,
)

PYTHON = [sys.executable, "-I", "-c"]
REPOSITORY = str(Path(__file__).resolve().parents[2])
END_SECONDS = 60.0

# Replaces the file again and again; its contents are one number, many times.
WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.records.files import write_whole
number = int(sys.argv[3])
while True:
    number += 1
    write_whole(Path(sys.argv[2]), b"%d\\n" % number * 30_000, durable=number % 8 == 0)
    print(number, flush=True)
"""

FULL_DISK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.records.files import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[2]), b"new" * 1000, durable=sys.argv[3] == "True")
except OSError as error:
    print(type(error).__name__, error.errno)
"""

# Every hard link is refused with the error number given, as some file systems do.
NO_LINKS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.records.files import put_in_place

def refuse(event, arguments):
    if event == "os.link":
        raise OSError(int(sys.argv[4]), "no")

sys.addaudithook(refuse)
try:
    put_in_place(Path(sys.argv[2]), Path(sys.argv[3]))
except OSError as error:
    print(type(error).__name__)
"""

COUNTER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.records.files import exclusive
folder = Path(sys.argv[2])
for _ in range(200):
    with exclusive(folder / "lock"):
        (folder / "count").write_text(str(int((folder / "count").read_text()) + 1))
"""


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def only_child(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# ---- whole or not at all ----


@pytest.mark.parametrize("num_kills", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_old_or_new_contents_and_never_a_part(
    tmp_path: Path, num_kills: int
) -> None:
    path = tmp_path / "config.json"
    rng = random.Random(7)
    last = 0
    for _ in range(num_kills):
        with subprocess.Popen([*PYTHON, WRITER, REPOSITORY, str(path), str(last)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 20)):
                written = int(writer.stdout.readline())
            threading.Event().wait(rng.random() * 0.002)  # somewhere within the next write
            writer.send_signal(signal.SIGKILL)
            writer.wait(END_SECONDS)
        lines = path.read_bytes().split(b"\n")
        assert len(lines) == 30_001 and set(lines[:-1]) == {lines[0]}
        assert int(lines[0]) >= written
        last = int(lines[0])
    left = [name for name in os.listdir(tmp_path) if name != "config.json"]
    assert len(left) <= num_kills
    assert all(name.startswith(".config.json.") and name.endswith(".tmp") for name in left)


@pytest.mark.parametrize("num_reads", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_a_reader_meanwhile_sees_whole_contents_only(tmp_path: Path, num_reads: int) -> None:
    path = tmp_path / "config.json"
    write_whole(path, b"0" * 100_000)
    with subprocess.Popen([*PYTHON, WRITER, REPOSITORY, str(path), "0"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(num_reads):
            assert len(set(read_at_most(path, 1 << 20).split())) == 1
        writer.kill()


@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_leaves_the_old_contents_and_no_temporary_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    command = [*PYTHON, FULL_DISK, REPOSITORY, str(path), str(durable)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=END_SECONDS, check=True)
    assert done.stdout.split() == ["OSError", "27"]  # EFBIG
    assert path.read_bytes() == b"old"
    assert only_child(tmp_path) == ["config.json"]


def make_directory(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    """A device of the test's own: where this test fails, one of the machine's would be replaced."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


def link_to_device(path: Path) -> None:
    make_device(path.with_name("device"))
    path.symlink_to("device")


def link_to_directory(path: Path) -> None:
    path.symlink_to(".")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "a directory": make_directory,
    "a pipe": make_pipe,
    "a device": make_device,
    "a link to a device": link_to_device,
    "a link to a directory": link_to_directory,
    "a link to itself": link_to_itself,
}


def kinds_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every name in a folder with what it is."""
    return {name: (status.st_ino, status.st_mode) for name in os.listdir(folder) if (status := os.lstat(folder / name))}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    NOT_FILES[kind](path)
    before, descriptors = kinds_in(tmp_path), num_descriptors()
    for _ in range(20):
        with pytest.raises(NotRegularError, match=r"not a regular file|round in a circle"):
            read_at_most(path, 100)
        with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
            write_whole(path, b"new")
    assert num_descriptors() == descriptors
    assert kinds_in(tmp_path) == before


def test_a_missing_folder_is_the_file_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "config.json", b"new")
    with pytest.raises(FileNotFoundError):
        read_at_most(tmp_path / "no" / "config.json", 100)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        write_whole(tmp_path / "file" / "config.json", b"new")


# ---- put in place ----


def test_a_finished_file_gets_its_name_and_loses_the_other(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    temporary = temporary_beside(path)
    temporary.write_bytes(b"new")
    put_in_place(temporary, path)
    sync_folder(tmp_path)
    assert path.read_bytes() == b"new" and path.stat().st_nlink == 1
    assert only_child(tmp_path) == ["shard"]


@pytest.mark.parametrize("kind", ["a file", "an empty file", "a link that leads nowhere", *NOT_FILES])
def test_what_is_there_already_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path, temporary = tmp_path / "shard", tmp_path / "new"
    if kind == "a link that leads nowhere":
        path.symlink_to("nowhere")
    elif kind in NOT_FILES:
        NOT_FILES[kind](path)
    else:
        path.write_bytes(b"old" if kind == "a file" else b"")
    temporary.write_bytes(b"new")
    before = kinds_in(tmp_path)
    with pytest.raises(FileExistsError, match="shard"):
        put_in_place(temporary, path)
    assert kinds_in(tmp_path) == before


def test_a_link_that_was_made_before_it_was_answered_counts_as_made(tmp_path: Path) -> None:
    path, temporary = tmp_path / "shard", tmp_path / "new"
    temporary.write_bytes(b"new")
    os.link(temporary, path)
    put_in_place(temporary, path)
    assert only_child(tmp_path) == ["shard"] and path.read_bytes() == b"new"


def test_of_many_that_put_a_file_in_one_place_exactly_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    done: list[int] = []

    def put(number: int) -> None:
        temporary = temporary_beside(path)
        temporary.write_bytes(b"%d" % number)
        try:
            put_in_place(temporary, path)
            done.append(number)
        except FileExistsError:
            temporary.unlink()

    run_all(lambda number=number: put(number) for number in range(8))  # type: ignore[misc]
    assert len(done) == 1 and path.read_bytes() == b"%d" % done[0]
    assert only_child(tmp_path) == ["shard"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK])
@pytest.mark.parametrize("taken", [False, True])
def test_without_hard_links_a_file_is_renamed_and_still_replaces_nothing(
    tmp_path: Path, number: int, taken: bool
) -> None:
    path, temporary = tmp_path / "shard", tmp_path / "new"
    temporary.write_bytes(b"new")
    if taken:
        path.write_bytes(b"old")
    command = [*PYTHON, NO_LINKS, REPOSITORY, str(temporary), str(path), str(number)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=END_SECONDS, check=True)
    assert done.stdout.split() == (["FileExistsError"] if taken else [])
    assert path.read_bytes() == (b"old" if taken else b"new")
    assert temporary.exists() is taken


def test_a_disk_that_refuses_a_link_for_another_reason_says_so(tmp_path: Path) -> None:
    path, temporary = tmp_path / "shard", tmp_path / "new"
    temporary.write_bytes(b"new")
    command = [*PYTHON, NO_LINKS, REPOSITORY, str(temporary), str(path), str(errno.ENOSPC)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=END_SECONDS, check=True)
    assert done.stdout.split() == ["OSError"]
    assert only_child(tmp_path) == ["new"]


def test_a_file_that_is_not_there_cannot_be_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "new", tmp_path / "shard")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "no")
    assert only_child(tmp_path) == []


# ---- new files and folders ----


def test_a_new_file_replaces_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_new(tmp_path / "state", b"new")
    with pytest.raises(FileExistsError, match="state"):
        write_new(tmp_path / "state", b"newer")
    assert (tmp_path / "state").read_bytes() == b"new" and only_child(tmp_path) == ["state"]


def test_new_files_get_their_names_together_and_those_that_get_none_are_removed(tmp_path: Path) -> None:
    before = num_descriptors()
    with NewFiles() as new:
        new.write(tmp_path / "a", b"first")
        os.write(new.begin(tmp_path / "b"), b"second")
        assert all(is_temporary(path.name) for path in tmp_path.iterdir())
        new.sync()
        assert num_descriptors() == before
        new.put_in_place()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"first", "b": b"second"}
    (tmp_path / "a").unlink()
    with NewFiles() as new:
        for name in ("a", "b", "c"):
            new.write(tmp_path / name, b"third")
        new.sync()
        with pytest.raises(FileExistsError, match="/b"):
            new.put_in_place()
    with NewFiles() as new:  # and neither synced nor put anywhere
        new.write(tmp_path / "d", b"fourth")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"third", "b": b"second"}
    assert num_descriptors() == before


def test_a_file_cannot_be_put_into_a_folder_that_took_the_place_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    with NewFiles() as new:
        new.write(folder / "COMMIT", b"x")
        new.sync()
        move_folder(folder, tmp_path / "aside")
        folder.mkdir()
        with pytest.raises(FileNotFoundError):
            new.put_in_place()
    assert only_child(folder) == []


def test_a_folder_is_moved_only_where_there_is_nothing_not_even_an_empty_one(tmp_path: Path) -> None:
    for name in ("folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "nowhere").symlink_to("no")
    for name in ("empty", "nowhere"):
        assert is_taken(tmp_path / name)
        with pytest.raises(FileExistsError, match=name):
            move_folder(tmp_path / "folder", tmp_path / name)
    assert not is_taken(tmp_path / "no") and not is_taken(tmp_path / "folder" / "no" / "no")
    with pytest.raises(OSError, match="too long"):
        is_taken(tmp_path / ("x" * 300))  # what cannot be told is not taken for absent


def test_a_removed_folder_takes_no_file_with_it_that_it_only_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../kept")
    remove_folder(tmp_path / "folder")
    assert only_child(tmp_path) == ["kept"] and only_child(tmp_path / "kept") == ["file"]


def test_a_lock_that_is_tried_is_given_to_one_until_it_is_closed(tmp_path: Path) -> None:
    descriptors = num_descriptors()
    first = try_lock(tmp_path / "lock")
    assert first is not None and try_lock(tmp_path / "lock") is None
    os.close(first)
    second = try_lock(tmp_path / "lock")
    assert second is not None
    os.close(second)
    assert num_descriptors() == descriptors


@contextmanager
def held_if_free(path: Path) -> Iterator[None]:
    descriptor = try_lock(path)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def open_to_all(folder: Path) -> Iterator[None]:
    """A folder that every user can look into, with those above it; as they were afterwards."""
    above = [each for each in (folder, *folder.parents) if each.stat().st_uid == os.geteuid() and len(each.parts) > 2]
    modes = [each.stat().st_mode for each in above]
    try:
        for each in above:
            each.chmod(0o755)
        yield
    finally:
        for each, mode in zip(above, modes, strict=True):
            each.chmod(stat.S_IMODE(mode))


LOOKER = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def looked_at(path: Path) -> Iterator[None]:
    """Another process has taken ``path`` as a lock for reading, and keeps it."""
    command = [sys.executable, "-I", "-c", LOOKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.stdin.close()


@contextmanager
def as_nobody() -> Iterator[None]:
    """What this process does is done as another user."""
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.parametrize("lock", [exclusive, held_if_free])
def test_a_lock_file_is_its_owners_alone_whatever_the_umask_and_its_mode_were(
    tmp_path: Path, lock: Callable[[Path], AbstractContextManager[None]]
) -> None:
    (tmp_path / "before").touch(mode=0o644)
    umask = os.umask(0)
    try:
        for name in ("new", "before"):
            with lock(tmp_path / name):
                assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    finally:
        os.umask(umask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_a_user_who_can_read_the_folder_can_neither_hold_its_locks_nor_look_at_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_if_free(path):
        pass
    with open_to_all(tmp_path), as_nobody():
        assert os.listdir(tmp_path) == ["lock"]
        with pytest.raises(PermissionError):
            os.open(path, os.O_RDONLY)
        for hold in (exclusive, held_if_free):
            with (
                pytest.raises(PermissionError, match="the lock belongs to user root, who alone can hold it"),
                hold(path),
            ):
                pass
        with pytest.raises(PermissionError):
            is_locked(path)


def test_a_lock_that_is_looked_at_is_waited_for_and_not_taken_for_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with looked_at(path):
        assert not is_locked(path)
        first = try_lock(path)
    assert first is None, "who looks for so long is told apart by whoever asks"
    with held_if_free(path):
        assert is_locked(path)


def test_who_holds_a_lock_is_told_by_process_and_user(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert "cannot be named" in lock_holders(path)
    path.touch()
    assert "just ended" in lock_holders(path)
    with held_if_free(path):
        assert f"process {os.getpid()} (" in lock_holders(path) and " of user " in lock_holders(path)
    with looked_at(path):
        assert "(for reading)" in lock_holders(path)


# ---- links and modes ----


def test_a_link_stays_a_link_and_the_file_it_leads_to_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "real.json"
    target.parent.mkdir()
    target.write_bytes(b"old")
    between, link = tmp_path / "between", tmp_path / "config.json"
    between.symlink_to("elsewhere")
    link.symlink_to("between/real.json")
    write_whole(link, b"new")
    assert link.is_symlink() and os.readlink(link) == "between/real.json"
    assert target.read_bytes() == b"new" and not target.is_symlink()
    assert only_child(target.parent) == ["real.json"]


def test_a_link_that_leads_nowhere_gets_its_file(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to("real.json")
    write_whole(link, b"new")
    assert link.is_symlink() and (tmp_path / "real.json").read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    path.chmod(mode)
    with umask(0o077):
        write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_a_new_file_gets_the_mode_that_the_umask_allows(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "config.json"
    with umask(mask):
        write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o664 & ~mask, "others may never write"


@pytest.mark.parametrize("name", ["größe.json", "a b", "-", "..x", "\udcff.json", "x" * 200])
def test_a_file_of_any_name_can_be_written(tmp_path: Path, name: str) -> None:
    write_whole(tmp_path / name, b"new")
    assert only_child(tmp_path) == [name]


# ---- reading ----


@pytest.mark.parametrize("size", [0, 9, 10, 11, 5000])
def test_a_longer_file_is_told_by_one_byte_more_than_the_limit(tmp_path: Path, size: int) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"x" * size)
    assert len(read_at_most(path, 10)) == min(size, 11)


def test_a_file_of_a_terabyte_is_read_to_the_limit_only(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    assert len(read_at_most(path, 1 << 20)) == (1 << 20) + 1


# ---- stamps ----


def test_a_stamp_changes_with_every_replacement_and_is_none_without_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert stamp_of(path) is None
    assert stamp_of(path / "below") is None
    stamps = []
    for content in (b"a", b"b", b"b"):
        write_whole(path, content)
        stamps.append(stamp_of(path))
    assert len(set(stamps)) == 3
    assert stamp_of(path) == stamps[-1]
    assert stamp_of(path / "below") is None


# ---- lines ----


def test_lines_added_by_many_threads_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "events"

    def add(name: int) -> None:
        for number in range(100):
            append_line(path, f"{name} {number} " + "x" * 500)

    run_all(lambda name=name: add(name) for name in range(8))  # type: ignore[misc]
    lines = path.read_text().splitlines()
    assert len(lines) == 800 and {len(line.split(" ")[2]) for line in lines} == {500}


def test_a_line_that_a_full_disk_takes_a_part_of_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events"
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from elastic_ext.records.files import append_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "append_line(Path(sys.argv[1]), 'x' * 60)\n"
        "try:\n"
        "    append_line(Path(sys.argv[1]), 'y' * 60)\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{errno.EFBIG}\n", done.stderr
    assert path.read_text() == "x" * 60 + "\n"  # without a part of the second, to which the next would be glued
    append_line(path, "z")
    assert path.read_text() == "x" * 60 + "\nz\n"


def run_all(functions: Iterator[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_SECONDS)
        assert not thread.is_alive()


# ---- locks ----


def test_a_lock_is_held_by_one_process_and_one_thread_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    processes = [subprocess.Popen([*PYTHON, COUNTER, REPOSITORY, str(tmp_path)]) for _ in range(3)]

    def count() -> None:
        for _ in range(200):
            with exclusive(tmp_path / "lock"):
                (tmp_path / "count").write_text(str(int((tmp_path / "count").read_text()) + 1))

    run_all(count for _ in range(2))
    assert [process.wait(END_SECONDS) for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "1000"


def test_a_lock_is_free_again_after_an_exception_and_leaks_nothing(tmp_path: Path) -> None:
    descriptors = num_descriptors()
    for _ in range(20):
        with pytest.raises(KeyError), exclusive(tmp_path / "lock"):
            raise KeyError
    assert num_descriptors() == descriptors


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom elastic_ext.records.files import exclusive\n"
        "with exclusive(Path(sys.argv[2])):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [*PYTHON, script, REPOSITORY, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        entered = threading.Event()

        def enter() -> None:
            with exclusive(tmp_path / "lock"):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.1)
        holder.kill()
        assert entered.wait(END_SECONDS)
        thread.join(END_SECONDS)


def test_a_lock_that_somebody_only_looks_at_is_had_once_the_look_is_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    looking = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)
    over = threading.Timer(0.2, os.close, (looking,))
    over.start()
    held = try_lock(path)
    over.join()
    assert held is not None
    os.close(held)
