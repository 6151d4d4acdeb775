"""DcpFolder: a torch.distributed.checkpoint folder, read a piece at a time by one process.

Its .metadata is a pickle, whose loading by torch runs what it names. Here it is read by an unpickler that runs nothing,
once, and refused if it names anything but the classes of which such metadata is made. All else is read with torch's
``weights_only``. ``dcp.load`` holds each piece whole, as large as a rank's part of a tensor; here it goes by in parts,
and the checksums that torch.save has made, which ``dcp.load`` does not look at, are checked. What is made of a folder
is bounded by the sizes of its files, whatever they say of themselves.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import bytes_of
from elastic_ext.records.files import NotRegularError, open_regular
from elastic_ext.torch_private.sharded import pickle_in

from .dcp_plan import Leaf
from .pickles import Made, PickledName, StrangeName, Unpickler, check_saved_values

__all__ = ["DcpFolder", "DcpPiece", "DcpTensor"]

_METADATA = ".metadata"
_MOST_METADATA_BYTES = 1 << 30
_WHOLE_BYTES = 32 << 20  # a piece of so many is read at once
_PART_BYTES = 4 << 20
_OF_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_BROKEN = (zipfile.BadZipFile, EOFError, RuntimeError, ValueError, struct.error, zlib.error)
"""The errors that zipfile raises for records that it cannot read."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_OF, _OF_FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_SIZE = "torch.Size"
_SIMPLE = frozenset({type(None), bool, int, float, str, bytes})
_KNOWN = frozenset(
    {
        *(f"{_OF}.{name}" for name in _OF_METADATA),
        *_DTYPES,
        f"{_OF_FILES}._StorageInfo",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # of earlier versions
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        _SIZE,
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
    }
)
_LARGEST = (1 << 63) - 1
_MOST_DIMENSIONS = 256
_MOST_SAID = 4  # numbers and entries per byte of metadata, where the same ones stand in several places
_ANY_VALUE = 1 << 22
"""How many characters and elements any value may have, however few bytes its file has."""
_MOST_PER_BYTE = 16  # bytes of a tensor for each saved one: torch.save keeps one element of an expanded tensor


@dataclass(frozen=True, slots=True, eq=False)
class DcpPlace:
    """Where a saved piece or value lies in a DCP folder: in which file, and in which bytes of it."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class DcpPiece:
    """A block of a tensor, as one rank wrote it into a DCP folder."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: DcpPlace


@dataclass(frozen=True, slots=True, eq=False)
class DcpTensor:
    """A tensor of a DCP folder, and its pieces, without replicas and without those that have no elements."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]


class DcpFolder:
    """Reads a folder that ``dcp.save`` has made; CheckpointError where it is none, or cannot be read here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _read_metadata(path)
        self._places = metadata.places
        self.leaves: Mapping[str, Leaf] = metadata.leaves
        """By key, the path to each tensor or value in the state dict that was saved; the key alone if not known."""
        self.tensors: dict[str, DcpTensor] = {}
        for key, described in metadata.tensors.items():
            self.tensors[key] = self._tensor(key, described)
        self.values = frozenset(self.leaves.keys() - self.tensors.keys())
        """The keys of values that are no tensors."""

    def value(self, key: str) -> Any:
        """The value, no tensor, under ``key``; CheckpointError where torch does not load it without running code."""
        place = self._place(key, None)
        with self._opened(key, place) as file:
            _check_records(file, place.length)
            value = self._loaded(key, file, "cpu")
        if not _is_within(value, place.length):
            raise CheckpointDamaged(f"{self.path}: {key} is larger than {place.length} bytes can hold")
        return value

    def contents_of(self, tensor: DcpTensor, piece: DcpPiece) -> Iterator[memoryview]:
        """The bytes of a tensor's piece in row-major order, in parts; CheckpointDamaged where they are others."""
        num_bytes = math.prod(piece.sizes) * tensor.dtype.itemsize
        length = piece.place.length
        if num_bytes > _MOST_PER_BYTE * length:
            raise CheckpointDamaged(
                f"{self.path}: a piece of {tensor.key} has {num_bytes} bytes, and only {length} bytes were saved of it"
            )
        with self._opened(tensor.key, piece.place) as file:
            if num_bytes > _WHOLE_BYTES:
                record = _record_of(file, length, num_bytes)
                likeness = self._checked(self._loaded(tensor.key, file, "meta"), tensor, piece)
                is_as_stored = likeness.is_contiguous() and likeness.untyped_storage().nbytes() == num_bytes
                if record is not None and is_as_stored:
                    yield from _parts_of(file, record)
                    return
            _check_records(file, length)
            whole = self._checked(self._loaded(tensor.key, file, "cpu"), tensor, piece)
            yield bytes_of(whole.contiguous())

    def _tensor(self, key: str, described: _Described) -> DcpTensor:
        pieces: dict[tuple[int, ...], DcpPiece] = {}
        for offsets, sizes in described.chunks:
            if 0 not in sizes and offsets not in pieces:
                pieces[offsets] = DcpPiece(offsets, sizes, self._place(key, offsets))
        in_order = tuple(pieces[offsets] for offsets in sorted(pieces))
        return DcpTensor(key, described.dtype, described.shape, in_order)

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> DcpPlace:
        place = self._places.get((key, offsets))
        if place is None:
            where = "" if offsets is None else f" from {offsets} on"
            raise CheckpointDamaged(f"{self.path / _METADATA} does not say where {key}{where} lies")
        return place

    @contextlib.contextmanager
    def _opened(self, key: str, place: DcpPlace) -> Iterator[IO[bytes]]:
        """The part of a file that torch.save has written, opened; errors while it is read name the file and ``key``."""
        path = self.path / place.relative_path
        try:
            with open_regular(path) as whole:
                if place.offset + place.length > os.fstat(whole.fileno()).st_size:
                    raise EOFError
                yield io.BufferedReader(_Slice(whole.fileno(), place.offset, place.length))
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing; {key} lies in it") from None
        except NotRegularError as error:
            raise CheckpointDamaged(f"{error}; {key} lies in it") from None
        except _BROKEN as error:
            raise CheckpointDamaged(
                f"{path} is damaged, or not as torch.save writes it: {error or 'it ends too early'}; it holds {key} "
                f"from byte {place.offset} to {place.offset + place.length - 1}"
            ) from None

    def _loaded(self, key: str, file: IO[bytes], device: str) -> Any:
        file.seek(0)
        try:
            check_saved_values(pickle_in(file))
        except StrangeName as error:
            raise CheckpointError(
                f"{self.path}: {key} would use {error.name[:200]}, which no saved value needs; it was not loaded"
            ) from None
        file.seek(0)
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # of pickle, which is not imported here, and whatever bytes of others lead to
            told = str(error).partition("\n")[0]
            raise CheckpointError(f"{self.path}: torch does not load {key} with weights_only: {told}") from error

    def _checked(self, found: Any, tensor: DcpTensor, piece: DcpPiece) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or type(found) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(f"{self.path}: {tensor.key} holds a {type(found).__name__}; allowed: plain tensors")
        if (found.dtype, tuple(found.shape)) != (tensor.dtype, piece.sizes):
            raise CheckpointDamaged(
                f"{self.path}: a piece of {tensor.key} is {found.dtype} {tuple(found.shape)}, and {_METADATA} says "
                f"{tensor.dtype} {piece.sizes}"
            )
        return found.detach()


class _Slice(io.RawIOBase):
    """A range of bytes of a file, read as a file of its own."""

    def __init__(self, file: int, offset: int, length: int) -> None:
        self._file = file
        self._offset, self._length = offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise ValueError(f"there is no byte {at}")
        self._at = at
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target)[: max(self._length - self._at, 0)]
        num_bytes = os.preadv(self._file, [view], self._offset + self._at) if view else 0
        self._at += num_bytes
        return num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    """What .metadata says of a tensor: its chunks are (offsets, sizes), replicas among them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class _Metadata:
    """The contents of .metadata, taken from an unpickler's stand-ins; ValueError where they are not such metadata.

    In pickles one object may stand in many places; here it counts in each of them, and all is to be no more than the
    pickle could have spelled out.
    """

    def __init__(self, read: object, num_bytes: int) -> None:
        self._left = _MOST_SAID * num_bytes
        state = self._state(read, "Metadata")
        described = self._dict(state.get("state_dict_metadata"))
        of_planner = state.get("planner_data")
        paths = of_planner if type(of_planner) is dict else {}
        self.leaves = {key: self._leaf(key, paths.get(key)) for key in described}
        self.tensors = {
            key: self._described(entry)
            for key, entry in described.items()
            if not (type(entry) is Made and entry.name == f"{_OF}.BytesStorageMetadata")
        }
        self.places: dict[tuple[str, tuple[int, ...] | None], DcpPlace] = {}
        for index, place in self._dict(state.get("storage_data") or {}, Made).items():
            where = self._state(index, "MetadataIndex")
            offset = where.get("offset")
            key = self._text(where.get("fqn")), None if offset is None else self._size(offset)
            self.places[key] = self._place(key[0], place)

    def _leaf(self, key: str, path: object) -> Leaf:
        if path is None:
            return (key,)
        if type(path) not in (tuple, list) or not path:
            raise ValueError(f"the path to {key!r} is a {type(path).__name__}")
        assert isinstance(path, (tuple, list))
        self._count(len(path))
        if not _SIMPLE.issuperset(map(type, path)):
            raise ValueError(f"the path to {key!r} has a part that is neither text nor a number")
        return tuple(path)

    def _described(self, entry: object) -> _Described:
        state = self._state(entry, "TensorStorageMetadata")
        properties, chunks = state.get("properties"), state.get("chunks")
        is_known = type(properties) is Made and properties.name.endswith(".TensorProperties")
        values = properties.state if is_known and isinstance(properties, Made) else None
        first = values[0] if isinstance(values, tuple) and values else None
        dtype = _DTYPES.get(first.name) if isinstance(first, PickledName) else None
        if dtype is None or not isinstance(chunks, list):
            raise ValueError("a tensor has no dtype or no list of chunks")
        self._count(len(chunks))
        states = (self._state(chunk, "ChunkStorageMetadata") for chunk in chunks)
        parts = tuple((self._size(chunk.get("offsets")), self._size(chunk.get("sizes"))) for chunk in states)
        return _Described(dtype, self._size(state.get("size")), parts)

    def _place(self, key: str, place: object) -> DcpPlace:
        state = self._state(place, "_StorageInfo")
        path, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
        if type(path) is not str or not _are_sizes((offset, length)):
            raise ValueError(f"the place of {key!r} is no file and range of bytes in it")
        assert isinstance(offset, int) and isinstance(length, int)
        file = PurePosixPath(path)
        if file.is_absolute() or ".." in file.parts or "\0" in path:
            raise CheckpointError(f"has {key} lie outside of the folder, in {path!r}")
        if state.get("transform_descriptors"):
            names = _told(state["transform_descriptors"])
            raise CheckpointError(
                f"has {key} saved by way of transforms{names}, which cannot be read here; load the folder with "
                "dcp.load, and save it again without transforms"
            )
        return DcpPlace(path, offset, length)

    def _size(self, value: object) -> tuple[int, ...]:
        """The sizes in a torch.Size, a tuple or a list of .metadata; ValueError where no tensor can have them."""
        numbers = value.arguments[0] if type(value) is Made and value.name == _SIZE and value.arguments else value
        if type(numbers) not in (tuple, list):
            raise ValueError(f"sizes are a {type(numbers).__name__}")
        assert isinstance(numbers, (tuple, list))
        self._count(len(numbers))
        sizes = tuple(numbers)
        if not _are_sizes(sizes) or len(sizes) > _MOST_DIMENSIONS:
            raise ValueError(f"sizes are not up to {_MOST_DIMENSIONS} integers >= 0 with a product below 2**63")
        return sizes

    def _state(self, value: object, name: str) -> dict[str, object]:
        """The fields of an object of .metadata, whose stand-in has to be of the class ``name``."""
        self._count(1)
        if type(value) is not Made or value.name not in (f"{_OF}.{name}", f"{_OF_FILES}.{name}"):
            raise ValueError(f"it has a {getattr(value, 'name', type(value).__name__)} where a {name} belongs")
        return self._dict(value.state or {})

    def _dict(self, value: object, of: type = str) -> dict[Any, object]:
        if type(value) is not dict or any(type(key) is not of for key in value):
            raise ValueError(f"it has a {type(value).__name__} where a dict belongs, or one with other keys")
        self._count(len(value))
        return value

    def _text(self, value: object) -> str:
        if type(value) is not str:
            raise ValueError(f"it has a {type(value).__name__} where text belongs")
        return value

    def _count(self, num_things: int) -> None:
        self._left -= num_things
        if self._left < 0:
            raise ValueError("it has more entries than a file of its size can hold")


def _are_sizes(numbers: Sequence[object]) -> bool:
    """Whether numbers can be the sizes of a tensor."""
    product = 1
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _LARGEST:
            return False
        product = min(product * (number or 1), _LARGEST + 1)
    return product <= _LARGEST


def _told(values: object) -> str:
    """The names of transforms in words, as far as ``values`` are names."""
    texts = [each for each in values[:5] if type(each) is str] if isinstance(values, (list, tuple)) else []
    return f" ({', '.join(each[:80] for each in texts)})" if texts else ""


def _read_metadata(path: Path) -> _Metadata:
    file = path / _METADATA
    try:
        with open_regular(file) as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes > _MOST_METADATA_BYTES:  # much of which may be holes, that take no room on a disk
                raise CheckpointDamaged(f"{file} has {num_bytes} bytes; allowed: {_MOST_METADATA_BYTES}")
            data = opened.read(num_bytes)  # so much room is taken at once
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{path} holds no {_METADATA}: dcp.save has completed nothing there") from None
    except NotRegularError as error:
        raise CheckpointError(f"{error}, as a {_METADATA} is") from None
    try:
        return _Metadata(Unpickler(data, _KNOWN).load(), len(data))
    except StrangeName as error:
        raise CheckpointError(
            f"{file} is a pickle that would use {error.name[:200]}, which the metadata of such a folder has no need "
            "of; it was not loaded"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file} {error}") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{file} is damaged, or no metadata of torch.distributed.checkpoint: {error}") from None


@contextlib.contextmanager
def _records_in(file: IO[bytes], length: int) -> Iterator[zipfile.ZipFile]:
    """The zip records of a file that torch.save wrote, of ``length`` bytes: neither compressed nor overlapping."""
    with zipfile.ZipFile(file) as records:
        for record in records.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"the record {record.filename[:80]} is compressed")
        if sum(record.file_size for record in records.infolist()) > length:
            raise zipfile.BadZipFile("its records are larger than it is")
        yield records


def _check_records(file: IO[bytes], length: int) -> None:
    """Read all records that torch.save wrote, and check them against its checksums."""
    with _records_in(file, length) as records:
        name = records.testzip()
    if name is not None:
        raise zipfile.BadZipFile(f"the record {name} does not match its checksum")


def _record_of(file: IO[bytes], length: int, num_bytes: int) -> str | None:
    """The name of the one record that holds a tensor's bytes as they lie in memory, None where there is no such one.

    All other records are read, and so checked.
    """
    with _records_in(file, length) as records:
        found = [one for one in records.namelist() if "/data/" in one]
        others = {one.rpartition("/")[2]: records.read(one) for one in records.namelist() if one not in found}
        is_it = len(found) == 1 and records.getinfo(found[0]).file_size == num_bytes
    return found[0] if is_it and others.get("byteorder", b"little") == b"little" else None


def _is_within(value: object, num_bytes: int) -> bool:
    """Whether a value, with what stands in it in several places, is no larger than ``num_bytes`` can have meant."""
    left = _ANY_VALUE + _MOST_PER_BYTE * num_bytes
    waiting = [value]
    while waiting and left > 0:
        each = waiting.pop()
        left -= 1 + (len(each) if isinstance(each, (str, bytes, bytearray, list, tuple, dict, set, frozenset)) else 0)
        if isinstance(each, dict):
            waiting += [*each, *each.values()] if left > 0 else []
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each if left > 0 else ()
    return left > 0


def _parts_of(file: IO[bytes], record: str) -> Iterator[memoryview]:
    with zipfile.ZipFile(file) as records, records.open(record) as opened:
        while part := opened.read(_PART_BYTES):
            yield memoryview(part)
