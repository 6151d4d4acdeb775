"""DcpFolder: a torch.distributed.checkpoint folder, read a piece at a time by one process.

Its .metadata is a pickle, whose loading runs what it names; torch offers no other way. So it is looked through before
that, and refused if it names anything but the classes of which such metadata is made. All else is read with torch's
``weights_only``. ``dcp.load`` holds each piece whole, as large as a rank's part of a tensor; here it goes by in parts,
and the checksums that torch.save has made, which ``dcp.load`` does not look at, are checked.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound

from .dcpplan import Leaf
from .memory import bytes_of
from .pickled import globals_of

__all__ = ["DcpFolder", "DcpPiece", "DcpTensor"]

_METADATA = ".metadata"
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
"""What zipfile raises of records that it cannot read."""
_KNOWN = frozenset(
    {
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in _OF_METADATA),
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # of earlier versions
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class DcpPiece:
    """A block of a tensor, as one rank wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Any
    """Where it lies: it has relative_path, offset and length."""


@dataclass(frozen=True, slots=True, eq=False)
class DcpTensor:
    """A tensor, and its pieces, without replicas and without those that have no elements."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]


class DcpFolder:
    """A folder that ``dcp.save`` has made; CheckpointError where it is none, or one that this cannot read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _read_metadata(path)
        self._storage: Mapping[MetadataIndex, Any] = metadata.storage_data or {}
        paths: Mapping[str, Leaf] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self.leaves: dict[str, Leaf] = {key: tuple(paths.get(key, (key,))) for key in metadata.state_dict_metadata}
        """Of every key: the way to it in the state dict that was saved, where that is known."""
        self.tensors: dict[str, DcpTensor] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = self._tensor(key, entry)
        self.values = frozenset(metadata.state_dict_metadata.keys() - self.tensors.keys())
        """The keys of what is no tensor."""

    def value(self, key: str) -> Any:
        """What is no tensor; CheckpointError where torch does not load it without running code."""
        with self._opened(key, self._place(MetadataIndex(key))) as file:
            _check_records(file)
            return self._loaded(key, file, "cpu")

    def contents_of(self, tensor: DcpTensor, piece: DcpPiece) -> Iterator[memoryview]:
        """The bytes of a piece in row-major order, in parts; CheckpointDamaged where they are not what was written."""
        num_bytes = math.prod(piece.sizes) * tensor.dtype.itemsize
        with self._opened(tensor.key, piece.place) as file:
            if num_bytes > _WHOLE_BYTES:
                record = _record_of(file, num_bytes)
                likeness = self._checked(self._loaded(tensor.key, file, "meta"), tensor, piece)
                is_as_stored = likeness.is_contiguous() and likeness.untyped_storage().nbytes() == num_bytes
                if record is not None and is_as_stored:
                    yield from _parts_of(file, record)
                    return
            _check_records(file)
            whole = self._checked(self._loaded(tensor.key, file, "cpu"), tensor, piece)
            yield bytes_of(whole.contiguous())

    def _tensor(self, key: str, entry: TensorStorageMetadata) -> DcpTensor:
        pieces: dict[tuple[int, ...], DcpPiece] = {}
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if 0 not in sizes and offsets not in pieces:
                pieces[offsets] = DcpPiece(offsets, sizes, self._place(MetadataIndex(key, chunk.offsets)))
        in_order = tuple(pieces[offsets] for offsets in sorted(pieces))
        return DcpTensor(key, entry.properties.dtype, tuple(entry.size), in_order)

    def _place(self, index: MetadataIndex) -> Any:
        place = self._storage.get(index)
        if place is None:
            raise CheckpointDamaged(f"{self.path / _METADATA} does not say where {index} lies")
        file = PurePosixPath(place.relative_path)
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(f"{self.path / _METADATA} has {index} lie outside of the folder, in {file}")
        if place.transform_descriptors:
            raise CheckpointError(
                f"{self.path}: {index.fqn} was saved by way of {', '.join(place.transform_descriptors)}, which cannot "
                "be read here; load it with dcp.load and save it without"
            )
        return place

    @contextlib.contextmanager
    def _opened(self, key: str, place: Any) -> Iterator[IO[bytes]]:
        """The part of a file that torch.save has made; what is raised while it is read names it."""
        path = self.path / place.relative_path
        try:
            with open(path, "rb") as whole:
                yield io.BufferedReader(_Slice(whole.fileno(), place.offset, place.length))
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing; {key} lies in it") from None
        except _BROKEN as error:
            raise CheckpointDamaged(
                f"{path} is damaged, or not as torch.save writes it: {error or 'it ends too early'}; it holds {key} "
                f"from byte {place.offset} to {place.offset + place.length - 1}"
            ) from None

    def _loaded(self, key: str, file: IO[bytes], device: str) -> Any:
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
    """A part of a file, as a file of its own."""

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


def _read_metadata(path: Path) -> Metadata:
    file = path / _METADATA
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{path} holds no {_METADATA}: dcp.save has completed nothing there") from None
    try:
        strange = globals_of(data) - _KNOWN
    except ValueError as error:
        raise CheckpointDamaged(f"{file} is damaged, or no pickle that can be looked through: {error}") from None
    if strange:
        raise CheckpointError(
            f"{file} is a pickle that would use {', '.join(sorted(strange))}, which the metadata of such a folder has "
            "no need of; it was not loaded"
        )
    del data  # of many tensors it is large
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # of pickle, which is not imported here
        raise CheckpointDamaged(f"{file} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} holds no metadata of torch.distributed.checkpoint")
    return metadata


def _check_records(file: IO[bytes]) -> None:
    """Read all that torch.save has put there, against its checksums."""
    with zipfile.ZipFile(file) as records:
        name = records.testzip()
    if name is not None:
        raise zipfile.BadZipFile(f"the record {name} does not match its checksum")


def _record_of(file: IO[bytes], num_bytes: int) -> str | None:
    """The one record that holds a tensor's bytes as they lie in memory here, None where there is no such one.

    All others are read, and so checked.
    """
    with zipfile.ZipFile(file) as records:
        found = [one for one in records.namelist() if "/data/" in one]
        others = {one.rpartition("/")[2]: records.read(one) for one in records.namelist() if one not in found}
        is_it = len(found) == 1 and records.getinfo(found[0]).file_size == num_bytes
    return found[0] if is_it and others.get("byteorder", b"little") == b"little" else None


def _parts_of(file: IO[bytes], record: str) -> Iterator[memoryview]:
    with zipfile.ZipFile(file) as records, records.open(record) as opened:
        while part := opened.read(_PART_BYTES):
            yield memoryview(part)
