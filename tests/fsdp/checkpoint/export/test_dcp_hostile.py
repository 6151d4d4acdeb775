"""Folders of torch.distributed.checkpoint that somebody has made who means harm: none of what their metadata names is
run or changed, and what is made of them is bounded by their sizes. What torch itself writes is read as torch reads it.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import struct
import tracemalloc
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp import convert_from_dcp
from elastic_ext.fsdp.checkpoint.export.dcp_folder import DcpFolder
from elastic_ext.fsdp.checkpoint.export.pickles import Unpickler, check_saved_values
from elastic_ext.torch_private.sharded import pickle_in
from tests.support.ranks import RankPool
from tests.support.spread import SPREADS, Everything

NAME = b"torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    """Text as a pickle has it, and a note of it."""
    return b"\x8c" + bytes([len(value)]) + value.encode() + b"\x94"


def made(name: bytes, argument: bytes, *, ending: bytes = b".") -> bytes:
    """A pickle that calls what is named with one argument."""
    return b"\x80\x04" + name + argument + b"\x85R" + ending


def crossing_a_frame(path: str, num_padded: int = 200_000) -> bytes:
    """A number, 10 for who reads lines, of which what is behind the frame alone counts for Python's own unpickler.

    Of a file, the frame has to be larger than what is read ahead: so much padding makes it so.
    """
    notes = text("os.mkdir") + b"".join(text(f"note {number}") for number in range(1, 10)) + text("PosixPath")
    padding = b"X" + struct.pack("<I", num_padded) + b" " * num_padded + b"0"
    frame = padding + text("pathlib") + b"g1"
    return b"\x80\x04" + notes + b"\x95" + struct.pack("<Q", len(frame)) + frame + b"0\n\x93" + text(path) + b"\x85R."


def ways_to_run(path: str) -> dict[str, bytes]:
    """Pickles that make the folder ``path`` where they are loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (path,)

    own = {f"protocol {protocol}": pickle.dumps([1, {"a": Evil()}], protocol) for protocol in range(6)}
    named, argument = text(os.mkdir.__module__) + text("mkdir") + b"\x93", text(path)
    line = f"c{os.mkdir.__module__}\nmkdir\n".encode()
    classes = pickle.dumps(Metadata({"a": BytesStorageMetadata()}, planner_data=Evil()))
    return own | {
        "a frame": crossing_a_frame(path),
        "a name in a name": made(text("pathlib") + text("os.mkdir") + b"\x93", argument),
        "a line": made(line, argument),
        "an instance": f"(S{path!r}\ni{os.mkdir.__module__}\nmkdir\n.".encode(),
        "an object": b"(" + line + argument + b"o.",
        "by text": made(named, argument),
        "metadata": classes,
        "a state": b"\x80\x04"
        + NAME.join((b"c", b"\nMetadata\n"))
        + b")\x81}"
        + text("a")
        + made(named, argument)[2:-1]
        + b"sb.",
    }


def metadata_of(state: Mapping[str, Any], folder: Path) -> bytes:
    saved(folder, state)
    return (folder / ".metadata").read_bytes()


def saved(folder: Path, state: Mapping[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(state), checkpoint_id=folder, **options)
    return folder


STATE = {
    "model": {"w": torch.ones(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
    "train": {"step": torch.tensor(3), "seen": [1, {"order": torch.arange(3)}], "name": "théirs"},
}


def refused(folder: Path, data: bytes, kind: type[CheckpointError] = CheckpointError, words: str = "metadata") -> None:
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(kind, match=words):
        DcpFolder(folder)


# --- what would run ------------------------------------------------------------------------------------------------


def test_nothing_that_metadata_names_is_run(tmp_path: Path) -> None:
    folder, witness = saved(tmp_path / "dcp", STATE), tmp_path / "witness"
    for way, data in ways_to_run(str(witness)).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (folder / ".metadata").write_bytes(data)
            with open(folder / ".metadata", "rb") as file:
                pickle.load(file)
        assert witness.exists(), f"{way} harms nobody"
        witness.rmdir()
        with pytest.raises(CheckpointError):
            convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)
        assert not witness.exists(), way
    assert not (tmp_path / "storage").exists()


def test_what_strange_metadata_names_is_said(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", STATE)
    refused(folder, made(b"cos\nmkdir\n", text("x")), words=r"would use os\.mkdir, which .*; it was not loaded")
    refused(folder, crossing_a_frame("x"), words=r"cut off|no need of|no metadata")


@pytest.mark.parametrize("state", [b"N}" + text("is_changed") + b"\x88s\x86", b"}" + text("is_changed") + b"\x88s"])
def test_metadata_that_is_refused_has_changed_no_class(tmp_path: Path, state: bytes) -> None:
    folder = saved(tmp_path / "dcp", STATE)
    for name in (b"Metadata", b"TensorProperties", b"MetadataIndex"):
        refused(folder, b"\x80\x04c" + NAME + b"\n" + name + b"\n" + state + b"b.", CheckpointDamaged)
        assert not hasattr(getattr(of_torch, name.decode()), "is_changed")


def test_extensions_that_a_program_has_registered_are_no_way_around(tmp_path: Path) -> None:
    folder, witness = saved(tmp_path / "dcp", STATE), tmp_path / "witness"
    copyreg.add_extension(os.mkdir.__module__, "mkdir", 200)
    try:
        data = made(b"\x82\xc8", text(str(witness)))
        pickle.loads(data)  # which keeps what was looked up
        witness.rmdir()
        refused(folder, data)
    finally:
        copyreg.remove_extension(os.mkdir.__module__, "mkdir", 200)
    assert not witness.exists()


# --- a fuzzer ------------------------------------------------------------------------------------------------------

PIECES = (
    b"c",
    b"\x93",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
    b"i",
    b"o",
    b"(",
    b"t",
    b"\x85",
    b"\x86",
    b"h\x00",
    b"g1\n",
    b"0",
    b"2",
)


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A pickle with some bytes changed, left out, put in or taken from another."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, way = rng.randrange(len(changed) + 1), rng.randrange(7)
        end = min(len(changed), at + rng.choice((1, 1, 2, 5, 40)))
        other = rng.choice(others)
        begin = rng.randrange(len(other))
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del changed[at:end]
        elif way == 2:
            changed[at:at] = rng.choice(PIECES)
        elif way == 3:
            changed[at:end] = rng.choice(PIECES)
        elif way == 4:
            changed[at:at] = other[2 : rng.choice((-1, len(other)))]
        elif way == 5:
            changed[at:end] = other[begin : begin + rng.choice((3, 20, 200))]
        else:
            frame = b"\x95" + struct.pack("<Q", rng.choice((0, 1, 2, 5, 100, 1 << 40)))
            changed[at:at] = frame
    return bytes(changed)


def classes_as_they_are() -> list[tuple[str, object]]:
    kinds = [Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata, ChunkStorageMetadata, _StorageInfo]
    return [(f"{kind.__name__}.{name}", value) for kind in kinds for name, value in vars(kind).items()]


@pytest.mark.parametrize("num_pickles", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_pickles_run_nothing_and_change_nothing(tmp_path: Path, num_pickles: int) -> None:
    folder, witness = saved(tmp_path / "dcp", STATE), tmp_path / "witness"
    valid = (folder / ".metadata").read_bytes()
    ways = ways_to_run(str(witness)) | {"a frame": crossing_a_frame(str(witness), 10)}
    harmful = list(ways.values())
    begun = [valid, *harmful]
    classes = classes_as_they_are()
    rng = random.Random(20261124)
    num_read = 0
    for number in range(num_pickles):
        data = mutated(rng, begun[number % len(begun)] if number % 2 else valid, harmful)
        (folder / ".metadata").write_bytes(data)
        try:
            DcpFolder(folder)
            num_read += 1
        except CheckpointError:
            pass
        assert not witness.exists(), data
    assert classes_as_they_are() == classes
    assert 0 < num_read < num_pickles // 2


# --- bombs ---------------------------------------------------------------------------------------------------------


def peak_bytes(act: Callable[[], object]) -> int:
    """What it takes of memory that Python gives out."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


DEEP = 100_000  # levels, of which Python's own unpickler has ended the process


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # notes that are never made
        b"\x80\x04Np2000000000\n.",
        b"\x80\x04\x8b\xff\xff\xff\x7f1.",  # a number, a text and bytes that are not there
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x001.",
        b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x001.",
        b"\x80\x04})" + b"\x85" * DEEP + b"Ns.",  # tuples in tuples, as a key
        b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b"\x80\x04" + (b"c" + NAME + b"\nStorageMeta\n\x94)\x81" + b"h\x00N\x85\x81" * 10) + b"0.",
        b"\x80\x04)" + b"\x85\x94" * DEEP + b".",
        b"\x80\x04}" + (b"\x94" + text("a") + b"h\x00s") * 100 + b".",  # what holds itself
    ],
)
def test_a_small_pickle_takes_little_memory_and_no_process(tmp_path: Path, data: bytes) -> None:
    folder = saved(tmp_path / "dcp", STATE)
    assert peak_bytes(lambda: refused(folder, data, CheckpointDamaged)) < 256 * len(data) + (1 << 20)


def bomb(num_keys: int, num_chunks: int, num_dims: int) -> Metadata:
    """Metadata in which one list of chunks, of one shape, is that of all tensors."""
    sizes = torch.Size([1] * num_dims)
    chunks = [ChunkStorageMetadata(sizes, sizes)] * num_chunks
    entry = TensorStorageMetadata(TensorProperties(), sizes, chunks)
    return Metadata({str(number): entry for number in range(num_keys)}, {}, {})


@pytest.mark.parametrize(("num_keys", "num_chunks", "num_dims"), [(3000, 3000, 1), (3000, 1, 200), (1, 3000, 200)])
def test_what_stands_in_many_places_of_metadata_is_not_made_many_times(
    tmp_path: Path, num_keys: int, num_chunks: int, num_dims: int
) -> None:
    folder = saved(tmp_path / "dcp", STATE)
    data = pickle.dumps(bomb(num_keys, num_chunks, num_dims))
    assert len(data) < 100_000
    words = "more entries than a file of its size can hold"
    assert peak_bytes(lambda: refused(folder, data, CheckpointDamaged, words)) < 256 * len(data) + (1 << 20)


def rewritten(folder: Path, key: str, change: Callable[[Any], None]) -> None:
    """Change what the metadata has of a key: what describes it, and where it lies."""
    read = FileSystemReader(folder).read_metadata()
    for index, place in read.storage_data.items():
        if index.fqn == key:
            change((read.state_dict_metadata[key], place, index))
    (folder / ".metadata").write_bytes(pickle.dumps(read))


def test_a_tensor_is_not_larger_than_its_file_by_what_is_said_of_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}})
    size = torch.Size([1 << 36])
    content = io.BytesIO()
    torch.save(torch.ones(1).expand(size), content)
    (folder / "large").write_bytes(content.getvalue())

    def change(said: Any) -> None:
        entry, place, _ = said
        entry.size, entry.chunks = size, [ChunkStorageMetadata(torch.Size([0]), size)]
        place.relative_path, place.offset, place.length = "large", 0, len(content.getvalue())

    rewritten(folder, "model.w", change)
    with pytest.raises(CheckpointDamaged, match=r"model\.w has 274877906944 bytes, and only \d+ bytes were saved"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))],
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
        [
            ChunkStorageMetadata(torch.Size([0]), torch.Size([1])),
            ChunkStorageMetadata(torch.Size([1]), torch.Size([1])),
        ],
    ],
    ids=["none", "beside it", "more", "two"],
)
def test_a_value_of_a_group_whose_pieces_are_not_all_of_it_is_refused_by_its_key(
    tmp_path: Path, chunks: list[ChunkStorageMetadata]
) -> None:
    group = {"params": ["w"], "lr": torch.ones(1)}
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "optim": {"state": {}, "param_groups": [group]}})
    read = FileSystemReader(folder).read_metadata()
    key = "optim.param_groups.0.lr"
    entry: Any = read.state_dict_metadata[key]
    entry.chunks = chunks
    place = read.storage_data[MetadataIndex(key, torch.Size([0]))]
    read.storage_data |= {MetadataIndex(key, chunk.offsets): place for chunk in chunks}
    (folder / ".metadata").write_bytes(pickle.dumps(read))
    with pytest.raises(CheckpointError, match=r"does not hold one whole piece: optim\.param_groups\.0\.lr$"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1, optimizers=["SGD"])


def test_metadata_that_is_a_hole_of_terabytes_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}})
    (folder / ".metadata").unlink()
    (folder / ".metadata").touch()
    os.truncate(folder / ".metadata", 1 << 40)
    with pytest.raises(CheckpointDamaged, match=r"\.metadata has 1099511627776 bytes; allowed: 1073741824"):
        DcpFolder(folder)


def saved_as(folder: Path, pickled: bytes) -> Path:
    """A folder whose value "v" is of this pickle, in what torch.save would have written."""
    saved(folder, {"model": {"w": torch.ones(1)}, "v": [0]})
    content, written = io.BytesIO(), io.BytesIO()
    torch.save([0], content)
    with zipfile.ZipFile(content) as one, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as other:
        for name in one.namelist():
            other.writestr(name, pickled if name.endswith("data.pkl") else one.read(name))
    (folder / "own").write_bytes(written.getvalue())

    def change(said: Any) -> None:
        said[1].relative_path, said[1].offset, said[1].length = "own", 0, len(written.getvalue())

    rewritten(folder, "v", change)
    return folder


def old_text(value: str) -> bytes:
    """Text as a pickle of protocol 2 has it."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


HALF_A_GIGABYTE = b"J" + struct.pack("<i", 1 << 29)
TUPLES = b")" + b"\x85" * DEEP
LARGE_VALUES = {
    "bytes of a size": b"\x80\x02c__builtin__\nbytearray\n" + HALF_A_GIGABYTE + b"\x85R.",
    "a tensor of a size": b"\x80\x02ctorch\nFloatTensor\n" + HALF_A_GIGABYTE + b"\x85R.",
    "a storage of a size": b"\x80\x02ctorch.storage\nUntypedStorage\n" + HALF_A_GIGABYTE + b"\x85R.",
    "by another function": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nctorch\nTensor\n"
    + HALF_A_GIGABYTE
    + b"\x85}tR.",
    "one list in many sets": b"\x80\x02]("
    + b"K\x01" * 20_000
    + b"eq\x00]("
    + b"cbuiltins\nset\nh\x00\x85R" * 500
    + b"e.",
    "another encoding": b"\x80\x02c_codecs\nencode\n" + old_text("a" * 9) + old_text("punycode") + b"\x86R.",
    "tuples as a key": b"\x80\x02}" + TUPLES + b"Ns.",
    "tuples in a set": b"\x80\x02cbuiltins\nset\n]" + TUPLES + b"a\x85R.",
    "tuples in a counter": b"\x80\x02ccollections\nCounter\n}" + TUPLES + b"Ns\x85R.",
}


@pytest.mark.parametrize("how", LARGE_VALUES)
def test_a_small_value_takes_little_memory_and_no_process(tmp_path: Path, how: str) -> None:
    pickled = LARGE_VALUES[how]
    opened = DcpFolder(saved_as(tmp_path / "dcp", pickled))

    def read() -> None:
        with pytest.raises(CheckpointError, match=r"v would use|levels deep|again and again"):
            opened.value("v")

    assert peak_bytes(read) < 256 * len(pickled) + (1 << 20)


def test_values_that_torch_saves_are_read() -> None:
    values = [
        *({1, 2}, bytearray(b"xy"), b"z" * 300, 1 + 2j, torch.Size([1]), torch.device("cpu"), torch.float16),
        *(OrderedDict(a=1), Counter("ab"), (1, "a"), torch.strided, nn.Linear(1, 1).state_dict(), 1 << 2000),
        *([1.5, None, True] * 3000, {(1, (2, 3)): 4}, torch.zeros(2, dtype=torch.uint16), nn.Parameter(torch.ones(2))),
    ]
    with_attribute = torch.ones(2)
    with_attribute.told = 3  # type: ignore[attr-defined]
    for value in [*values, with_attribute, values]:
        content = io.BytesIO()
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
        content.seek(0)
        check_saved_values(pickle_in(content))


def test_what_a_program_has_torch_trust_may_be_called(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}, "v": [Fraction(1, 3)]})
    with pytest.raises(CheckpointError, match=r"v would use fractions\.Fraction"):
        DcpFolder(folder).value("v")
    with torch.serialization.safe_globals([Fraction]):
        assert DcpFolder(folder).value("v") == [Fraction(1, 3)]


def test_transforms_that_hold_one_thing_many_times_are_refused_in_few_words(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}})
    doubled: list[object] = []
    for _ in range(40):
        doubled = [doubled, doubled]
    rewritten(folder, "model.w", lambda said: setattr(said[1], "transform_descriptors", [*doubled, "zstd"]))

    def read() -> None:
        with pytest.raises(CheckpointError, match=r"saved by way of transforms \(zstd\), which cannot be read here"):
            DcpFolder(folder)

    assert peak_bytes(read) < 2 << 20


def test_records_that_are_compressed_are_not_unpacked(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}, "v": [0]})
    content, packed = io.BytesIO(), io.BytesIO()
    torch.save(bytes(100_000_000), content)
    with zipfile.ZipFile(content) as one, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    (folder / "packed").write_bytes(packed.getvalue())
    assert len(packed.getvalue()) < 200_000

    def change(said: Any) -> None:
        said[1].relative_path, said[1].offset, said[1].length = "packed", 0, len(packed.getvalue())

    rewritten(folder, "v", change)
    opened = DcpFolder(folder)
    with pytest.raises(CheckpointDamaged, match="is compressed"):
        opened.value("v")


def test_a_value_that_holds_one_thing_many_times_is_not_spelled_out(tmp_path: Path) -> None:
    doubled: list[object] = [0]
    for _ in range(40):
        doubled = [doubled, doubled]
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}, "v": (doubled, 1)})
    with pytest.raises(CheckpointDamaged, match=r"v is larger than \d+ bytes can hold"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", 1 << 62),
        ("length", 1 << 62),
        ("length", -1),
        ("offset", 1.5),
        ("relative_path", "../x"),
        ("length", None),
    ],
)
def test_places_that_no_file_has_are_refused(tmp_path: Path, name: str, value: object) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}})
    rewritten(folder, "model.w", lambda said: setattr(said[1], name, value))
    with pytest.raises(CheckpointError, match=r"damaged|outside"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)


def test_files_that_are_none_do_not_keep_a_conversion_waiting(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": {"w": torch.ones(1)}})
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged, match="is not a regular file"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)


# --- what torch writes ---------------------------------------------------------------------------------------------


def agrees_with_torch(folder: Path) -> None:
    """What torch's own reader finds in the metadata is what is found here."""
    theirs, ours = FileSystemReader(folder).read_metadata(), DcpFolder(folder)
    described = theirs.state_dict_metadata
    assert ours.leaves == {key: tuple((theirs.planner_data or {}).get(key, (key,))) for key in described}
    assert ours.values == {key for key, entry in described.items() if isinstance(entry, BytesStorageMetadata)}
    assert ours.tensors.keys() == described.keys() - ours.values
    for key, tensor in ours.tensors.items():
        entry = described[key]
        assert isinstance(entry, TensorStorageMetadata)
        assert (tensor.dtype, tensor.shape) == (entry.properties.dtype, tuple(entry.size))
        wanted = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks if 0 not in chunk.sizes}
        assert {piece.offsets: piece.sizes for piece in tensor.pieces} == wanted
        for piece in tensor.pieces:
            place = theirs.storage_data[MetadataIndex(key, piece.offsets)]
            found = piece.place.relative_path, piece.place.offset, piece.place.length
            assert found == (place.relative_path, place.offset, place.length)
            assert sum(map(len, ours.contents_of(tensor, piece)))


def states() -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "nested", STATE | {"deep": {"a": [[{"b": ({"c": torch.ones(1)}, 2)}], None, {}], 3: {0.5: 1, None: 2}}}, {}
    yield (
        "flat",
        {"w": torch.ones(2), "v": 1, "n": {"a": torch.ones(2)}},
        {"planner": DefaultSavePlanner(flatten_state_dict=False)},
    )
    shapes = {"none": torch.ones(()), "empty": torch.ones(0, 4), "of 70 dimensions": torch.ones([1] * 70)}
    yield (
        "shapes",
        shapes | {"t": torch.ones(3, 4).t(), "channels": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)},
        {},
    )
    names = (
        "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    )
    kinds = [getattr(torch, name) for name in [*names.split(), "bool", "complex64", "complex128"]]
    tensors = {str(kind): torch.zeros(3, dtype=torch.uint8).to(kind) for kind in kinds}
    yield "kinds", tensors, {}
    yield (
        "many files",
        STATE,
        {"storage_writer": FileSystemWriter("unused", single_file_per_rank=False, thread_count=2)},
    )
    yield "many", {f"layers.{number}.weight": torch.ones(2) for number in range(400)}, {}
    yield "none", {"é" * 300: torch.ones(1), "x" * 70_000: torch.ones(1), "": torch.ones(1)}, {}


@pytest.mark.parametrize(("state", "options"), [each[1:] for each in states()], ids=[each[0] for each in states()])
def test_what_torch_saves_is_read_as_torch_reads_it(
    tmp_path: Path, state: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    agrees_with_torch(saved(tmp_path / "dcp", state, **options))


def save_spread(rank: int, spread: str, folder: Path) -> None:
    """A model that is spread, as DTensors or ShardedTensors, and a nested state beside it."""
    model = SPREADS[spread].wrap(Everything(3))
    saved(folder, {"model": model.state_dict(), **{key: STATE[key] for key in ("train",)}})


@pytest.mark.parametrize("spread", ["FSDP2 3", "FSDP2 2 by columns", "TP x FSDP 2x2", "HSDP 2x2", "DDP 2", "FSDP1 2"])
def test_what_ranks_save_with_torch_is_read_as_torch_reads_it(ranks: RankPool, tmp_path: Path, spread: str) -> None:
    ranks.run(SPREADS[spread].num_ranks, save_spread, spread, tmp_path / "dcp")
    agrees_with_torch(tmp_path / "dcp")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_is_read_from_each_protocol_that_torch_has_written(tmp_path: Path, protocol: int) -> None:
    folder = saved(tmp_path / "dcp", STATE)
    read = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(read, protocol))
    agrees_with_torch(folder)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_data_is_unpickled_as_python_does(protocol: int) -> None:
    numbers = [
        0,
        1,
        255,
        256,
        65_536,
        -1,
        -(1 << 31),
        1 << 31,
        1 << 63,
        1 << 100,
        -(1 << 2100),
        1.5,
        -0.0,
        float("inf"),
    ]
    data: dict[str, Any] = {
        "n": numbers,
        "t": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "v": [None, True, False, "", "é\ud800", "x" * 300],
    }
    data |= {str(number): number for number in range(1000)}
    if protocol > 2:
        data["b"] = [b"", b"x", b"y" * 300]
    content = pickle.dumps([data, data["n"]], protocol)
    assert Unpickler(content, ()).load() == [data, numbers]
    for end in range(0, len(content), len(content) // 50):
        with pytest.raises(ValueError, match=r"cut off|pops more"):
            Unpickler(content[:end], ()).load()
