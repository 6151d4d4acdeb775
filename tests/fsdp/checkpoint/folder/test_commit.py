"""COMMIT, lineages and job names: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
import random
import string
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.folder.claim import check_job, folder_name, job_name, newest_folder
from elastic_ext.fsdp.checkpoint.folder.commit import (
    COMMIT,
    FORMAT,
    Commit,
    FileSummary,
    Lineage,
    chain_after,
    check_chain,
    checksum_of,
    place_in,
    read_checked,
    read_commit,
)
from elastic_ext.fsdp.checkpoint.format.shardfile import ShardSummary

NOW = datetime(2026, 11, 20, 19, 30, 5)
RANDOM_ID = "6f1c2b34-9d1e-4c77-8a52-0a1b2c3d4e5f"
CHECKSUM = "0123456789abcdef" * 2


def a_commit(**changes: Any) -> Commit:
    values: dict[str, Any] = {
        "generation": "g1",
        "lineage": (Lineage(id="a"), Lineage(id="b", from_step=100, from_generation="g0")),
        "global_step": 300,
        "epoch": 2,
        "num_ranks": 2,
        "metas": {"model_meta.json": CHECKSUM},
        "states": {"trainer_state.json": FileSummary(num_bytes=17, checksum=CHECKSUM)},
        "shards": {
            f"model_param.{rank:05}-00002.safetensors": ShardSummary(num_bytes=4096, checksum=CHECKSUM)
            for rank in range(2)
        },
        "saved_at": "2026-11-20T19:30:05+00:00",
        "versions": {"torch": "2.13.0"},
        "about": {"strategy": "FSDP2", "config": {"version": 3}, "list": [1, 2.5, None, "ü"]},
    }
    return Commit(**{**values, **changes})


def sealed(record: object) -> bytes:
    """A file with a checksum that is right, whatever it holds."""
    body = json.dumps(record, indent=1).encode().removesuffix(b"\n}")
    return body + b',\n "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def record_of(commit: Commit) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(commit.to_json())
    del record["checksum"]
    return record


# ---- the file ----

ids = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)
sizes = st.integers(0, 1 << 63)
checksums = st.integers(0, (1 << 128) - 1).map(lambda number: f"{number:032x}")
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    steps = sorted(draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5)))
    runs = draw(st.lists(ids, min_size=len(steps), max_size=len(steps), unique=True))
    files = draw(st.lists(st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._-]{0,30}", fullmatch=True), unique=True, max_size=6))
    return a_commit(
        generation=draw(ids),
        lineage=tuple(
            Lineage(id=run, from_step=step, from_generation=draw(st.none() | ids))
            for run, step in zip(runs, steps, strict=True)
        ),
        global_step=steps[-1] + draw(st.integers(0, 1000)),
        metas={file: draw(checksums) for file in files[:2]},
        states={file: FileSummary(num_bytes=draw(sizes), checksum=draw(checksums)) for file in files[2:4]},
        shards={file: ShardSummary(num_bytes=draw(sizes), checksum=draw(checksums)) for file in files[4:]},
        versions=draw(st.dictionaries(st.text(), st.text(), max_size=3)),
        about=draw(st.dictionaries(st.text(), plain, max_size=4)),
    )


@settings(max_examples=150, deadline=None)
@given(commit=commits())
def test_what_is_written_is_read_again_and_the_same_is_written_the_same_way(commit: Commit) -> None:
    data = commit.to_json()
    read = Commit.from_json(data, where="COMMIT")
    assert read == commit
    assert read.to_json() == data
    assert json.loads(data)["format"] == FORMAT


def test_every_bit_that_is_another_is_found_and_the_file_is_named() -> None:
    data = a_commit().to_json()
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(CheckpointDamaged, match="the/COMMIT"):
                Commit.from_json(bytes(damaged), where="the/COMMIT")


def test_a_file_cut_off_anywhere_or_with_more_at_its_end_is_found() -> None:
    data = a_commit().to_json()
    for size in range(len(data)):
        with pytest.raises(CheckpointDamaged, match="the/COMMIT"):
            Commit.from_json(data[:size], where="the/COMMIT")
    for more in (b"\n", b"\0", data, b" " * 4096):
        with pytest.raises(CheckpointDamaged, match="the/COMMIT"):
            Commit.from_json(data + more, where="the/COMMIT")
        with pytest.raises(CheckpointDamaged, match="the/COMMIT"):
            Commit.from_json(more + data, where="the/COMMIT")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400) | plain.map(lambda value: sealed({"value": value})))
def test_other_files_are_damaged_commits_and_never_another_error(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Commit.from_json(data, where="COMMIT")


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(sorted(record_of(a_commit()))), value=plain)
def test_a_value_of_any_kind_in_any_place_is_read_or_refused(key: str, value: object) -> None:
    data = sealed({**record_of(a_commit()), key: value})
    try:
        read = Commit.from_json(data, where="COMMIT")
    except CheckpointError:
        return
    assert read.to_json() and getattr(read, key, FORMAT) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"unknown": 1},
        {"generation": "a/b"},
        {"generation": ""},
        {"generation": "x" * 65},
        {"lineage": []},
        {"lineage": "a"},
        {"lineage": [{"id": "a"}, {"id": "a"}]},
        {"lineage": [{"id": "a", "from_step": 9}, {"id": "b", "from_step": 8}]},
        {"lineage": [{"id": "a", "from_step": -1}]},
        {"lineage": [{"id": "a", "from_step": True}]},
        {"lineage": [{"id": "a", "from_step": 301}]},
        {"lineage": [{"id": "a", "more": 1}]},
        {"lineage": [{}]},
        {"global_step": 1.0},
        {"global_step": -1},
        {"epoch": True},
        {"num_ranks": 0},
        {"metas": {"../model_meta.json": CHECKSUM}},
        {"metas": {"model_meta.json": CHECKSUM.upper()}},
        {"metas": {"model_meta.json": None}},
        {"states": {COMMIT: {"num_bytes": 1, "checksum": CHECKSUM}}},
        {"states": {"model_meta.json": {"num_bytes": 1, "checksum": CHECKSUM}}},
        {"states": {"a": {"num_bytes": -1, "checksum": CHECKSUM}}},
        {"states": {"a": {"num_bytes": 1}}},
        {"shards": {".hidden": {"num_bytes": 1, "checksum": CHECKSUM}}},
        {"shards": {"a/b": {"num_bytes": 1, "checksum": CHECKSUM}}},
        {"shards": []},
        {"saved_at": "yesterday"},
        {"saved_at": 0},
        {"versions": {"torch": 2}},
        {"about": [1]},
        {"format": 0},
        {"format": "1"},
        {"format": None},
    ],
)
def test_a_commit_that_matches_its_checksum_is_still_read_strictly(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointDamaged, match="the/COMMIT is no COMMIT"):
        Commit.from_json(sealed({**record_of(a_commit()), **changes}), where="the/COMMIT")


def test_a_missing_key_is_refused_and_one_that_appears_twice_too() -> None:
    for key in record_of(a_commit()):
        record = record_of(a_commit())
        del record[key]
        with pytest.raises(CheckpointDamaged, match=key):
            Commit.from_json(sealed(record), where="COMMIT")
    body = a_commit().to_json().partition(b',\n "checksum"')[0].replace(b'"epoch": 2', b'"epoch": 2,\n "epoch": 2')
    data = body + b',\n "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    with pytest.raises(CheckpointDamaged, match="twice"):
        Commit.from_json(data, where="COMMIT")


def test_a_commit_of_a_newer_format_is_not_damaged_but_says_what_reads_it() -> None:
    data = sealed({"format": FORMAT + 1, "versions": {"elastic_ext": "9.9"}, "new": []})
    with pytest.raises(CheckpointError, match=r"newer elastic_ext.*9\.9") as caught:
        Commit.from_json(data, where="COMMIT")
    assert not isinstance(caught.value, CheckpointDamaged)


def test_what_is_not_json_cannot_be_said_about_a_save() -> None:
    with pytest.raises(TypeError):
        a_commit(about={"model": object()}).to_json()
    with pytest.raises(ValueError, match="float"):
        a_commit(about={"loss": float("nan")}).to_json()


def test_a_thousand_ranks_fit_into_a_commit_that_is_read_whole() -> None:
    shards = {
        f"{part}_param.{rank:05}-01024.safetensors": ShardSummary(num_bytes=rank, checksum=checksum_of(b"%d" % rank))
        for part in ("model", "optim", "extra")
        for rank in range(1024)
    }
    data = a_commit(num_ranks=1024, shards=shards).to_json()
    assert len(data) < 1 << 19
    assert Commit.from_json(data, where="COMMIT").shards == shards


# ---- reading it, and what it vouches for ----


def test_a_folder_without_a_commit_is_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "no", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointNotFound, match=folder.name):
            read_commit(folder)


def test_what_is_no_file_in_the_place_of_a_commit_is_damage(tmp_path: Path) -> None:
    (tmp_path / COMMIT).mkdir()
    with pytest.raises(CheckpointDamaged, match="COMMIT is not a regular file"):
        read_commit(tmp_path)


def test_a_file_is_read_if_it_is_what_the_commit_says_and_is_named_if_not(tmp_path: Path) -> None:
    path, data = tmp_path / "trainer_state.json", random.Random(3).randbytes(5000)
    path.write_bytes(data)
    assert read_checked(path, checksum_of(data)) == data
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointDamaged, match=r"trainer_state\.json"):
        read_checked(path, checksum_of(data))
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=r"trainer_state\.json is missing"):
        read_checked(path, checksum_of(data))


# ---- lineages ----


def test_a_run_goes_on_from_a_commit_or_begins_from_nothing() -> None:
    commit = a_commit()
    assert chain_after(None, run_id="c") == (Lineage(id="c"),)
    chain = chain_after(commit, run_id="c")
    assert chain == (*commit.lineage, Lineage(id="c", from_step=300, from_generation="g1"))
    check_chain(chain)
    assert place_in(chain, run_id=commit.run_id, global_step=commit.global_step) == 1


@pytest.mark.parametrize(
    ("run", "step", "place"),
    [
        ("a", 0, 0),
        ("a", 100, 0),
        ("a", 101, None),  # after b had left it
        ("b", 100, 1),
        ("b", 300, 1),
        ("b", 301, None),
        ("c", 300, 2),
        ("c", 1 << 40, 2),
        ("d", 200, None),
    ],
)
def test_what_a_run_saved_counts_up_to_where_the_next_one_left_it(run: str, step: int, place: int | None) -> None:
    chain = (Lineage(id="a"), Lineage(id="b", from_step=100), Lineage(id="c", from_step=300))
    assert place_in(chain, run_id=run, global_step=step) == place


# ---- names ----


@pytest.mark.parametrize(
    ("argument", "run_id", "expected"),
    [
        ("mine", "theirs", "mine"),
        (None, "theirs", "theirs"),
        (None, "exp/7", "exp/7"),
        (None, RANDOM_ID, "train-"),
        (None, RANDOM_ID.replace("-", "").upper(), "train-"),
        (None, "none", "train-"),
        (None, "", "train-"),
        (None, None, "train-"),
    ],
)
def test_a_job_is_named_by_its_user_or_its_launcher_or_its_script(
    argument: str | None, run_id: str | None, expected: str
) -> None:
    name = job_name(argument, run_id, "/work/a/train.py")
    assert name == expected or (expected == "train-" and name.startswith("train-") and len(name) == 14)


def test_two_scripts_of_one_name_are_two_jobs_and_one_script_is_always_the_same() -> None:
    assert job_name(None, None, "/work/a/train.py") == job_name(None, "none", "/work/a/train.py")
    assert job_name(None, None, "/work/a/train.py") != job_name(None, None, "/work/b/train.py")
    for nothing in (None, ""):  # a notebook, python -c
        with pytest.raises(ValueError, match="give job="):
            job_name(None, None, nothing)
    assert check_job(job_name(None, None, "/x/" + "ü" * 300 + ".py"))
    assert check_job(job_name(None, None, "/x/\udcff.py"))


@pytest.mark.parametrize("job", ["", "x" * 101, "ü" * 40])
def test_a_job_name_of_no_use_is_refused_with_what_is_allowed(job: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: 1 to 100 characters.*shorter"):
        check_job(job)


odd_jobs = st.text(min_size=1, max_size=12) | st.sampled_from(
    [".", "..", "a/b", "../x", "a b", "%2E", "a_20260101-000000", "a", "A", "\0", "\n", "größe", "x" * 100, "~", "-rf"]
)


@settings(max_examples=300, deadline=None)
@given(jobs=st.lists(odd_jobs, min_size=2, max_size=5, unique=True))
def test_unlike_jobs_never_share_a_folder_whatever_their_names_hold(jobs: list[str]) -> None:
    names = {job: folder_name(job, NOW) for job in jobs}
    for job, name in names.items():
        assert newest_folder(names.values(), job) == name
        assert "/" not in name and "\0" not in name and not name.startswith(".") and len(name) <= 255 and name.isascii()


def test_a_jobs_newest_folder_is_found_and_others_that_look_alike_are_not() -> None:
    names = [
        "a_20260101-000000",
        "a_20260103-000000",
        "a_20260102-235959",
        "a_20260104-00000",
        "a_20260104-0000000",
        "a_20270101-000000.old",
        "aa_20270101-000000",
        "a_b_20270101-000000",
        "a_20270101-000000_20270101-000000",
        "a",
    ]
    assert newest_folder(names, "a") == "a_20260103-000000"
    assert newest_folder(names, "a_b") == "a_b_20270101-000000"
    assert newest_folder(names, "b") is None
