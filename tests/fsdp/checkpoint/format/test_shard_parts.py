"""Parts of shard files: any elements arrive exactly, only the blocks that hold them are touched, and each once."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic_ext.fsdp.checkpoint.format.copy import copy_strided, dimensions_of
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.reader import ReadRequest, ShardReader, arranged, by_window, parts_of
from elastic_ext.fsdp.checkpoint.format.shardfile import TensorEntry, laid_out
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite
from elastic_ext.fsdp.moves import moves_into
from tests.support.layouts import apart_or_equal, covering, memory_of, shapes, tensor_of
from tests.support.shards import assert_read_back, piece, random_bytes, write_alone

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def strided(memory: Array, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    steps = tuple(stride * memory.itemsize for stride in strides)
    view: Array = np.ndarray(sizes, memory.dtype, memory, offset * memory.itemsize, steps)
    return view


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A part of a row-major tensor, its place in it and in a target; offsets and strides count elements."""

    item_bytes: int
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    num_elements: int  # of the whole tensor


@st.composite
def wanted_elements(draw: st.DrawFn) -> Wanted:
    item_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    if draw(st.booleans()):
        shape = [*shape, draw(st.integers(1, 60))]
    if draw(st.booleans()):
        shape = [draw(st.integers(1, 60)), *shape][:4]
    start = [draw(st.integers(0, size)) for size in shape]
    end = [draw(st.integers(first, size)) for first, size in zip(start, shape, strict=True)]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    sizes = [last - first for first, last in zip(start, end, strict=True)]
    source_offset = sum(first * stride for first, stride in zip(start, strides, strict=True)) if all(sizes) else 0
    # In the target it lies in the middle of a larger box, its dimensions perhaps in another order.
    order = draw(st.permutations(range(len(shape))))
    margin = draw(st.integers(0, 2))
    target_strides = [0] * len(shape)
    step = 1
    for dimension in order:
        target_strides[dimension] = step
        step *= sizes[dimension] + margin
    shuffled = draw(st.permutations(range(len(shape))))
    return Wanted(
        item_bytes=item_bytes,
        sizes=tuple(sizes[i] for i in shuffled),
        source_offset=source_offset,
        source_strides=tuple(strides[i] for i in shuffled),
        target_offset=draw(st.integers(0, 5)),
        target_strides=tuple(target_strides[i] for i in shuffled),
        num_elements=math.prod(shape),
    )


def array_of(wanted: Wanted, seed: int) -> Array:
    return np.frombuffer(random_bytes(wanted.num_elements * wanted.item_bytes, seed), f"u{wanted.item_bytes}")


def request_and_answer(name: str, data: Array, wanted: Wanted) -> tuple[ReadRequest, Array]:
    """A request for part of ``data``, and what its target is then to hold."""
    reach = sum((size - 1) * stride for size, stride in zip(wanted.sizes, wanted.target_strides, strict=True)) + 1
    expected = np.full(wanted.target_offset + max(reach, 0), 0xEE, data.dtype)
    target = expected.copy()
    if all(wanted.sizes):
        part = strided(data, wanted.source_offset, wanted.sizes, wanted.source_strides)
        strided(expected, wanted.target_offset, wanted.sizes, wanted.target_strides)[...] = part
    request = ReadRequest(
        name,
        wanted.item_bytes,
        wanted.sizes,
        wanted.source_offset,
        wanted.source_strides,
        target.view(np.uint8).data,
        wanted.target_offset,
        wanted.target_strides,
    )
    return request, expected


@given(st.lists(wanted_elements(), min_size=1, max_size=5), st.sampled_from([64, 128]), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_any_parts_of_any_tensors_arrive_exactly_whatever_the_windows(
    wanted: list[Wanted],
    block_bytes: int,
    num_blocks: int,
) -> None:
    window_bytes = block_bytes * num_blocks
    arrays = [array_of(one, seed) for seed, one in enumerate(wanted)]
    tensors = [(str(i), f"U{one.item_bytes * 8}", (one.num_elements,)) for i, one in enumerate(wanted)]
    header = laid_out(tensors, generation="g", block_bytes=64)
    data = bytearray(header.data_bytes)
    for i, array in enumerate(arrays):
        offset = header.entries[str(i)].offset
        data[offset : offset + array.nbytes] = array.tobytes()
    made = [request_and_answer(str(i), arrays[i], one) for i, one in enumerate(wanted)]
    scratch = memoryview(bytearray(window_bytes))
    seen = -1
    touched: set[int] = set()
    parts = [
        parts_of(request, header.entries[request.entry_name].offset, block_bytes=block_bytes, window_bytes=window_bytes)
        for request, _ in made
    ]
    for base, some in by_window(parts, window_bytes):
        spans, copies = arranged(some, scratch, base, block_bytes=block_bytes, data_bytes=len(data))
        for span in spans:
            at = span.start
            assert base <= at and at > seen, "in the order of the file, none twice"
            assert at % block_bytes == 0
            for view in span.views:
                assert len(view) % block_bytes == 0 or at + len(view) == len(data)
                view[:] = data[at : at + len(view)]
                touched.update(range(at // block_bytes, -(-(at + len(view)) // block_bytes)))
                at += len(view)
            seen = at - 1
            assert at <= base + window_bytes
        for copy in copies:
            copy.do()
    for request, expected in made:
        assert bytes(request.target) == expected.tobytes()
    assert touched == blocks_of([request for request, _ in made], header.entries, block_bytes), "no block for nothing"


def blocks_of(requests: Sequence[ReadRequest], entries: Mapping[str, TensorEntry], block_bytes: int) -> set[int]:
    """The blocks that hold anything wanted, element by element."""
    blocks: set[int] = set()
    for request in requests:
        if math.prod(request.sizes):
            places = np.zeros((), np.int64)
            for size, stride in zip(request.sizes, request.source_strides, strict=True):
                places = np.add.outer(places, np.arange(size) * stride)
            first = (places.ravel() + request.source_offset) * request.item_bytes + entries[request.entry_name].offset
            blocks.update((first // block_bytes).tolist())
            blocks.update(((first + request.item_bytes - 1) // block_bytes).tolist())
    return blocks


TRANSPOSED = Wanted(
    item_bytes=2,
    sizes=(3, 4),
    source_offset=1,
    source_strides=(8, 1),
    target_offset=2,
    target_strides=(1, 3),
    num_elements=24,
)


@given(wanted_elements())
@example(TRANSPOSED)
@settings(max_examples=150, deadline=None)
def test_strided_copies_are_those_that_numpy_makes(wanted: Wanted) -> None:
    if math.prod(wanted.sizes):
        data = array_of(wanted, 0)
        request, expected = request_and_answer("a", data, wanted)
        source = data.view(np.uint8).data[wanted.source_offset * wanted.item_bytes :]
        target = request.target[wanted.target_offset * wanted.item_bytes :]
        copy_strided(
            source,
            target,
            *dimensions_of(wanted.sizes, wanted.source_strides, wanted.target_strides, wanted.item_bytes),
        )
        assert bytes(request.target) == expected.tobytes()


def test_columns_and_blocks_of_large_tensors_are_read_from_a_file(tmp_path: Path) -> None:
    array = np.frombuffer(random_bytes(4 * 700 * 1100), np.uint32).reshape(700, 1100)
    summary = write_alone(tmp_path / "shard", [TensorToWrite("a", "U32", array.shape, array.data)], generation="g")
    with ShardReader(tmp_path / "shard", summary=summary, generation="g") as reader:
        for rows, columns in [
            ((0, 700), (3, 4)),
            ((5, 690), (10, 900)),
            ((0, 700), (0, 550)),
            ((699, 700), (0, 1100)),
            ((100, 600), (0, 1100)),
        ]:
            expected = array[rows[0] : rows[1], columns[0] : columns[1]]
            target = np.zeros_like(expected, order="C")
            reader.read_into(
                [
                    ReadRequest(
                        "a",
                        4,
                        expected.shape,
                        rows[0] * 1100 + columns[0],
                        (1100, 1),
                        target.view(np.uint8).data.cast("B"),
                        0,
                        (expected.shape[1], 1),
                    )
                ]
            )
            assert np.array_equal(target, expected)


def test_part_of_a_tensor_touches_only_the_blocks_that_hold_it(tmp_path: Path) -> None:
    block_bytes = 4096
    one = piece("a", "U8", (100 * block_bytes,))
    summary = write_alone(tmp_path / "shard", [one], generation="g", block_bytes=block_bytes)
    with ShardReader(tmp_path / "shard", summary=summary, generation="g") as reader:
        opened = reader.bytes_read
        assert opened <= 16384 + 100 * 8

        def blocks_read(*ranges: tuple[int, int]) -> int:
            before = reader.bytes_read
            targets = [bytearray(end - start) for start, end in ranges]
            reader.read_into(
                ReadRequest("a", 1, (end - start,), start, (1,), memoryview(target), 0, (1,))
                for (start, end), target in zip(ranges, targets, strict=True)
            )
            assert all(target == one.data[start:end] for (start, end), target in zip(ranges, targets, strict=True))
            assert (reader.bytes_read - before) % block_bytes == 0
            return (reader.bytes_read - before) // block_bytes

        assert blocks_read((0, 1)) == 1
        assert blocks_read((block_bytes - 1, block_bytes + 1)) == 2
        assert blocks_read((block_bytes, 2 * block_bytes)) == 1
        assert blocks_read((10, 20), (5000, 5001), (30, 40), (100, 200)) == 2
        assert blocks_read((10, 3 * block_bytes), (3 * block_bytes - 1, 4 * block_bytes), (0, 7)) == 4
        assert blocks_read((0, block_bytes), (0, block_bytes), (50 * block_bytes, 51 * block_bytes)) == 2
        assert blocks_read((17, 17)) == 0
        assert blocks_read() == 0
        num_needed = reader.bytes_needed
        blocks_read((0, 77), (9, 10))
        assert reader.bytes_needed - num_needed == 78


def test_half_of_each_of_many_tensors_reads_hardly_more_than_that_half(tmp_path: Path) -> None:
    pieces = [piece(f"w{i}", "F32", (600_000,), i) for i in range(3)] + [
        piece(f"b{i}", "F32", (400,), i) for i in range(9)
    ]
    summary = write_alone(tmp_path / "shard", pieces, generation="g")
    with ShardReader(tmp_path / "shard", summary=summary, generation="g") as reader:
        requests = []
        for one in pieces:
            half = one.sizes[0] // 2
            requests.append(ReadRequest(one.name, 4, (half,), half, (1,), memoryview(bytearray(half * 4)), 0, (1,)))
        reader.read_into(requests)
        assert reader.bytes_read / reader.bytes_needed < 1.06


def test_more_pieces_of_memory_than_the_system_takes_at_once_are_written_and_read(tmp_path: Path) -> None:
    pieces = [piece(f"{i:04d}", "U8", (64,), i) for i in range(4000)]
    summary = write_alone(tmp_path / "shard", pieces, generation="g", block_bytes=64)
    assert_read_back(tmp_path / "shard", summary, pieces)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": (2, 2)}, "must be equally many"),
        ({"source_offset": -1}, "must not be negative"),
        ({"target_strides": (-1,)}, "must not be negative"),
        ({"source_strides": (0,)}, "lead to the same element"),
        ({"target_offset": 1}, "has 16 bytes, too few"),
        ({"target": memoryview(bytes(16))}, "must be writable memory"),
        ({"target": memoryview(bytearray(16)).cast("I")}, "must be writable memory"),
    ],
)
def test_request_that_cannot_be_is_refused_with_the_reason(change: dict[str, object], words: str) -> None:
    good: dict[str, object] = {
        "entry_name": "a",
        "item_bytes": 4,
        "sizes": (4,),
        "source_offset": 0,
        "source_strides": (1,),
        "target": memoryview(bytearray(16)),
        "target_offset": 0,
        "target_strides": (1,),
    }
    ReadRequest(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        ReadRequest(**{**good, **change})  # type: ignore[arg-type]


# --- layouts on a disk ----------------------------------------------------------------------------------------------


@given(st.data(), shapes)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tensor_saved_in_any_layout_is_read_in_any_other(
    tmp_path: Path, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    old, new = data.draw(apart_or_equal(shape)).shares(least=3, salt="w"), data.draw(covering(shape))
    meta = StateMeta(len(old.boxes), {"w": TensorMeta("w", "I64", old, "parameter")}, {})
    old = StateMeta.from_json(meta.to_json()).tensors["w"].layout
    tensor = tensor_of(shape)
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    with contextlib.ExitStack() as opened:
        readers = []
        for rank, box in enumerate(old.boxes):
            pieces = [] if box.is_empty else [TensorToWrite("w", "I64", box.sizes, memory_of(tensor, box).data)]
            summary = write_alone(folder / str(rank), pieces, generation="g", block_bytes=64)
            readers.append(opened.enter_context(ShardReader(folder / str(rank), summary=summary, generation="g")))
        for box in new.boxes:
            memory = np.zeros(box.num_elements, np.int64)
            for move in moves_into(box, old, target=-1):
                target = memory.view(np.uint8).data
                where = move.source_offset, move.source_strides, target, move.target_offset, move.target_strides
                readers[move.source].read_into([ReadRequest("w", 8, move.sizes, *where)])
            assert np.array_equal(memory, memory_of(tensor, box))
        assert sum(reader.bytes_needed for reader in readers) == 8 * sum(box.num_elements for box in new.boxes)
