"""Shard files: round trips beside safetensors' own reader, reads of parts, a thousand damages, disks that are full."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from elastic_ext.errors import CheckpointDamaged
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.reader import WINDOW_BYTES, ReadRequest, ShardReader
from elastic_ext.fsdp.checkpoint.format.shardfile import CHECKSUMS, ShardSummary, read_header
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite, _write
from tests.support.shards import assert_read_back, piece, random_bytes, read_whole, write_alone

REPOSITORY = str(Path(__file__).resolve().parents[4])
NUM_DAMAGES = 1000
SEED = 5

WRITES_TOO_MUCH = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from tests.support.shards import write_alone
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
pieces = [TensorToWrite(f"p{i}", "U8", (50_001,), memoryview(bytes(50_001))) for i in range(200)]
try:
    write_alone(Path(sys.argv[2]), pieces, generation="g")
except OSError as error:
    print(error.errno, error.filename)
"""


# --- round trips ----------------------------------------------------------------------------------------------------

ODD_NAMES = ["", " ", ".", "a.b/c", "\n", '"', "\\u0041", "\x00", "ß𝄞", "__metadata", "x" * 3000, "elastic_ext", "'"]
ODD_SIZES: list[tuple[int, ...]] = [(), (1,), (0,), (0, 4), (4, 0), (7,), (3, 5, 2), (1, 1, 1)]


@pytest.mark.parametrize("block_bytes", [64, 4096, 16384, 4 << 20])
def test_every_type_and_odd_shapes_and_names_are_read_back_here_and_by_safetensors(
    tmp_path: Path, block_bytes: int
) -> None:
    pieces = [
        piece(f"{dtype}.{sizes}", dtype, sizes, seed)
        for seed, (dtype, sizes) in enumerate((dtype, sizes) for dtype in ITEM_BYTES for sizes in ODD_SIZES)
    ]
    pieces += [piece(name, "F16", (number,), number) for number, name in enumerate(ODD_NAMES)]
    path = tmp_path / "shard.safetensors"
    summary = write_alone(path, pieces, generation="g", block_bytes=block_bytes)
    assert_read_back(path, summary, pieces)
    assert summary.num_bytes == path.stat().st_size
    theirs = load_file(write_known(tmp_path, [one for one in pieces if one.dtype != "F8_E8M0"], block_bytes))
    assert set(theirs) - {one.name for one in pieces} == {CHECKSUMS}
    for one in pieces:
        if one.dtype != "F8_E8M0":  # which safetensors' files may hold and torch's loader does not know yet
            tensor = theirs[one.name]
            assert tuple(tensor.shape) == one.sizes
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == one.data if tensor.numel() else True


def write_known(folder: Path, pieces: Sequence[TensorToWrite], block_bytes: int) -> Path:
    write_alone(folder / "theirs.safetensors", pieces, generation="g", block_bytes=block_bytes)
    return folder / "theirs.safetensors"


def test_header_says_whose_the_file_is_and_its_data_begins_on_a_page(tmp_path: Path) -> None:
    pieces = [piece(f"{dtype}{i}", dtype, (i,), i) for dtype in ITEM_BYTES for i in range(5)]
    path = tmp_path / "shard"
    write_alone(path, pieces, generation="a-generation", block_bytes=128)
    with safe_open(path, "np") as file:
        assert file.metadata() == {
            "elastic_ext.format": "1",
            "elastic_ext.generation": "a-generation",
            "elastic_ext.block_bytes": "128",
        }
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 4096 == 0
    header = read_header(path.read_bytes()[8:start], path.stat().st_size - start)
    assert all(entry.offset % ITEM_BYTES[entry.dtype] == 0 for entry in header.entries.values())


def test_one_tensor_is_read_by_its_name(tmp_path: Path) -> None:
    pieces = [piece("a", "F32", (3, 2)), piece("b", "U8", ()), piece("c", "F64", (0, 2))]
    summary = write_alone(tmp_path / "shard", pieces, generation="g")
    with ShardReader(tmp_path / "shard", summary=summary, generation="g") as reader:
        assert [reader.read(one.name) for one in pieces] == [one.data for one in pieces]
        with pytest.raises(CheckpointDamaged, match="shard is damaged: it has no tensor 'd'"):
            reader.read("d")


def test_file_without_tensors_is_a_file_like_any_other(tmp_path: Path) -> None:
    summary = write_alone(tmp_path / "shard", [], generation="g")
    assert_read_back(tmp_path / "shard", summary, [])
    assert list(load_file(tmp_path / "shard")) == [CHECKSUMS]


def test_thousands_of_tiny_tensors_and_one_over_many_windows_are_read_back(tmp_path: Path) -> None:
    pieces = [piece(f"tiny.{i}", "I16", (i % 4,), i) for i in range(3000)]
    pieces += [piece("big", "F32", (3 * WINDOW_BYTES // 4 + 5,)), piece("large", "BF16", (1021, 1031))]
    summary = write_alone(tmp_path / "shard", pieces, generation="g")
    assert_read_back(tmp_path / "shard", summary, pieces)


def test_same_pieces_in_any_order_make_the_same_file(tmp_path: Path) -> None:
    pieces = [piece(f"p{i}", dtype, (i * 100,), i) for dtype in ("F32",) for i in range(10)]
    first = write_alone(tmp_path / "first", pieces, generation="g")
    assert write_alone(tmp_path / "second", pieces[::-1], generation="g") == first
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_memory_of_any_type_and_number_of_dimensions_is_written_as_bytes(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    pieces = [
        TensorToWrite("array", "F32", (2, 3, 4), array.data),
        TensorToWrite("empty", "F32", (0, 4), np.zeros((0, 4), np.float32).data),
    ]
    write_alone(tmp_path / "shard", pieces, generation="g")
    with safe_open(tmp_path / "shard", "np") as file:
        assert np.array_equal(file.get_tensor("array"), array)


# --- what cannot be written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([piece("a", "F32", (2,)), piece("a", "F16", (2,))], "two tensors are named 'a'"),
        ([piece("__metadata__", "F32", (2,))], "cannot be named '__metadata__'"),
        ([piece(CHECKSUMS, "F32", (2,))], "cannot be named 'elastic_ext.checksums'"),
        ([piece("\ud800", "F32", (2,))], "half a character"),
        ([TensorToWrite("a", "C128", (1,), memoryview(bytes(16)))], "'C128'; use one of F64"),
        ([TensorToWrite("a", "F32", (3,), memoryview(bytes(8)))], "has 8 bytes of memory; sizes (3,) of F32"),
        ([TensorToWrite("a", "U8", (3,), memoryview(bytes(6))[::2])], "has gaps"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, pieces: list[TensorToWrite], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        write_alone(tmp_path / "shard", pieces, generation="g")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_too_long_for_a_header_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pieces = [piece(letter * 51_000_000, "U8", (1,)) for letter in "ab"]
    with pytest.raises(ValueError, match="allows 100000000"):
        write_alone(tmp_path / "shard", pieces, generation="g")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [0, -64, 56, 100, (4 << 20) + 8])
def test_blocks_that_are_too_small_too_large_or_odd_are_refused(tmp_path: Path, block_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"block_bytes is {block_bytes}; use a multiple of 8 from 64"):
        write_alone(tmp_path / "shard", [], generation="g", block_bytes=block_bytes)


def test_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "shard").write_text("mine")
    with pytest.raises(FileExistsError):
        write_alone(tmp_path / "shard", [piece("a", "F32", (2,))], generation="g")
    assert (tmp_path / "shard").read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["shard"]


def test_folder_that_is_missing_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shard"):
        write_alone(tmp_path / "none" / "shard", [], generation="g")


@pytest.mark.parametrize("limit", [0, 100, 4096, 5000, 4_200_000, 9_999_999])
def test_full_disk_is_an_error_that_names_the_file_and_leaves_nothing_behind(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "shard"
    command = [sys.executable, "-I", "-c", WRITES_TOO_MUCH, REPOSITORY, str(path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    number, _, name = done.stdout.strip().partition(" ")
    assert os.strerror(int(number)) == "File too large"  # what a limit on a file's size gives in a full disk's place
    assert name == str(path)
    assert list(tmp_path.iterdir()) == []


def test_writes_that_the_system_cuts_short_go_on_where_they_ended() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    arrived = bytearray()

    def drain(*_: object) -> None:  # the signal ends a write that waits for room, with what it has written so far
        with contextlib.suppress(BlockingIOError):
            while part := os.read(reading, 1 << 16):
                arrived.extend(part)

    data = random_bytes(700_001)
    views = [memoryview(data)[:3], memoryview(data)[3:3], memoryview(data)[3:400_000], memoryview(data)[400_000:]]
    before = signal.signal(signal.SIGALRM, drain)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        assert _write(writing, views) == len(data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    drain_ended = len(arrived)
    os.close(writing)
    drain()
    os.close(reading)
    assert arrived == data
    assert drain_ended, "no write was cut short"


# --- damage ---------------------------------------------------------------------------------------------------------


def some_pieces(seed: int = 0) -> list[TensorToWrite]:
    return [
        piece("layers.0.weight", "F32", (40, 30), seed),
        piece("layers.0.bias", "BF16", (30,), seed + 1),
        piece("step", "F32", (), seed + 2),
        piece("empty", "F64", (0, 3), seed + 3),
        piece("mask", "BOOL", (333,), seed + 4),
    ]


def open_and_read_all(path: Path, summary: ShardSummary, generation: str = "g") -> None:
    with ShardReader(path, summary=summary, generation=generation) as reader:
        read_whole(reader, some_pieces())


def what_is_wrong(path: Path, summary: ShardSummary) -> str:
    try:
        open_and_read_all(path, summary)
    except CheckpointDamaged as error:
        return str(error)
    return "nothing"


def damaged_copy(random_: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """One way to damage a file, in words, and what it then holds; ``other`` is a file of another save."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    table_start = len(data) - 8 * -(-(4800 + 60 + 4 + 333) // 128)
    text_end = len(data[:header_end].rstrip(b" "))
    places = {
        "the length": (0, 8),
        "the header": (8, text_end),
        "the padding": (text_end, header_end),
        "the data": (header_end, table_start),
        "the table": (table_start, len(data)),
    }
    kind = random_.choice([*places, *places, "any byte", "cut", "longer", "swapped", "zeros", "spliced", "moved"])
    if kind in places or kind == "any byte":
        at = random_.randrange(*places.get(kind, (0, len(data))))
        return f"{kind}, a bit of byte {at}", data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return kind, data[: random_.randrange(len(data))]
    if kind == "longer":
        return kind, data + random_.randbytes(random_.choice([1, 8, 4096]))
    if kind == "swapped":
        return kind, other
    start = random_.randrange(len(data) - 200)
    end = random_.randrange(start + 1, min(start + 3000, len(data)))
    if kind == "zeros":
        return kind, data[:start] + bytes(end - start) + data[end:]
    if kind == "spliced":
        return kind, data[:start] + other[start:end] + data[end:]
    return kind, data[:start] + data[start + 1 : end] + data[start : start + 1] + data[end:]


def test_a_thousand_damages_are_all_found_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model_param.00000-00001.safetensors"
    summary = write_alone(path, some_pieces(), generation="g", block_bytes=128)
    data = path.read_bytes()
    other_summary = write_alone(tmp_path / "other", some_pieces(100), generation="h", block_bytes=128)
    other = (tmp_path / "other").read_bytes()
    assert other_summary.num_bytes == summary.num_bytes
    open_and_read_all(path, summary)
    random_ = random.Random(SEED)
    num_found = 0
    while num_found < NUM_DAMAGES:
        how, damaged = damaged_copy(random_, data, other)
        if damaged == data:  # zeros in the place of zeros
            continue
        path.write_bytes(damaged)
        assert str(path) in what_is_wrong(path, summary), how
        num_found += 1
    path.write_bytes(data)
    open_and_read_all(path, summary)


def test_damaged_block_is_named_with_its_bytes_and_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    pieces = [piece("first", "F32", (1000,)), piece("second", "F32", (1001,))]
    summary = write_alone(path, pieces, generation="g", block_bytes=1024)
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + 3 * 1024 + 1000] ^= 16  # in the block in which the first ends and the second begins
    path.write_bytes(data)
    with ShardReader(path, summary=summary, generation="g") as reader:
        target = bytearray(400)
        reader.read_into([ReadRequest("first", 4, (100,), 0, (1,), memoryview(target), 0, (1,))])
        assert target == pieces[0].data[:400], "what lies in other blocks can still be read"
        with pytest.raises(CheckpointDamaged) as caught:
            reader.read_into([ReadRequest("second", 4, (1,), 0, (1,), memoryview(target), 0, (1,))])
        assert str(caught.value) == (
            f"{path} is damaged: block 3, bytes {start + 3072} to {start + 4095}, is not what was saved; "
            "it holds 'first', 'second'"
        )
        with pytest.raises(CheckpointDamaged, match="block 3, "):
            reader.verify()


def test_file_of_another_save_is_named_as_that_even_where_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    summary = write_alone(path, some_pieces(), generation="newer")
    with pytest.raises(CheckpointDamaged, match="written by another save, 'newer'; this checkpoint is of 'older'"):
        ShardReader(path, summary=summary, generation="older")


def test_missing_file_and_what_is_no_file_are_named(tmp_path: Path) -> None:
    summary = write_alone(tmp_path / "shard", some_pieces(), generation="g")
    with pytest.raises(CheckpointDamaged, match="none is missing"):
        ShardReader(tmp_path / "none", summary=summary, generation="g")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(CheckpointDamaged, match=f"{name} is damaged: it is not a regular file"):
            ShardReader(tmp_path / name, summary=summary, generation="g")


def test_file_cut_short_while_it_is_open_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    pieces = [piece("a", "U8", (1_000_000,))]
    summary = write_alone(path, pieces, generation="g")
    with ShardReader(path, summary=summary, generation="g") as reader:
        os.truncate(path, 500_000)
        with pytest.raises(CheckpointDamaged, match="shard is damaged: it ends at byte 500000"):
            read_whole(reader, pieces)


def test_metadata_that_names_what_the_file_has_not_is_told_apart_from_our_own_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    summary = write_alone(path, [piece("a", "F32", (4,))], generation="g")
    with ShardReader(path, summary=summary, generation="g") as reader:
        memory = memoryview(bytearray(1000))
        with pytest.raises(CheckpointDamaged, match="has no tensor 'b'"):
            reader.read_into([ReadRequest("b", 4, (1,), 0, (1,), memory, 0, (1,))])
        with pytest.raises(CheckpointDamaged, match="its tensor 'a' is of 16 bytes, 4 each"):
            reader.read_into([ReadRequest("a", 4, (4,), 1, (1,), memory, 0, (1,))])
        with pytest.raises(CheckpointDamaged, match="reaches to byte 16, 8 each"):
            reader.read_into([ReadRequest("a", 8, (2,), 0, (1,), memory, 0, (1,))])


@given(st.binary(max_size=300), st.integers(0, 1000))
def test_no_header_whatever_it_holds_is_more_than_a_refusal(text: bytes, num_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"header|format"):
        read_header(text, num_bytes)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "U64"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", CHECKSUMS]), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    st.integers(0, 40),
)
def test_no_header_of_valid_json_is_more_than_a_refusal(said: object, num_bytes: int) -> None:
    metadata = {"elastic_ext.format": "1", "elastic_ext.generation": "g", "elastic_ext.block_bytes": "64"}
    for text in (said, {"__metadata__": metadata, "a": said}, {"__metadata__": metadata, CHECKSUMS: said}):
        with pytest.raises(ValueError, match=r"header|format"):
            read_header(json.dumps(text).encode(), num_bytes)


def test_header_that_nests_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nests too deeply"):
        read_header(b'{"a":' + b"[" * 100_000, 0)


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    summary = write_alone(tmp_path / "shard", [], generation="g")
    reader = ShardReader(tmp_path / "shard", summary=summary, generation="g")
    reader.close()
    reader.close()
