"""The format of a shard file: one rank's part of a state as a safetensors file, with checksums of its blocks.

    8 bytes      how long the header is
    header       JSON, padded with spaces so that the data begins at a multiple of 4096
    data         the tensors, those of the largest items first, so that each is aligned; nothing between them
    checksums    one more tensor, `elastic_ext.checksums`: the xxh3_64 of each block of the data

A block is `block_bytes` long wherever tensors begin and end in it; the last one may be shorter. What a reader touches
it can check block by block; the checksums and the header are checked by the file's summary, which stands elsewhere.
Everything is little-endian. Here the format is decided; `shardwriter` writes it and `shardreader` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

import xxhash

from .dtypes import ITEM_BYTES

__all__ = [
    "BLOCK_BYTES",
    "CHECKSUMS",
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "VERSION",
    "Entry",
    "Header",
    "NewerHeader",
    "ShardSummary",
    "check_name",
    "checksum_of",
    "encoded_header",
    "laid_out",
    "read_header",
]

BLOCK_BYTES = 16384  # larger ones make a partial read touch more than it needs; smaller ones are slower to check
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 64, 4 << 20
CHECKSUMS = "elastic_ext.checksums"
MAX_HEADER_BYTES = 100_000_000  # what safetensors itself reads

_METADATA = "__metadata__"
_FORMAT, _GENERATION, _BLOCK_BYTES = "elastic_ext.format", "elastic_ext.generation", "elastic_ext.block_bytes"
VERSION = 1
_ALIGNMENT = 4096
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a shard file: its bytes begin ``offset`` bytes into the data."""

    dtype: str
    sizes: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """What has to be known of a shard file to trust it: it stands in the checkpoint's COMMIT."""

    num_bytes: int
    checksum: str  # xxh3_128, in hex, of everything but the data


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a shard file's header says."""

    generation: str
    block_bytes: int
    entries: Mapping[str, Entry]  # in the order in which they lie in the file
    data_bytes: int  # of the tensors, without the checksums
    version: int = VERSION

    @property
    def num_blocks(self) -> int:
        return -(-self.data_bytes // self.block_bytes)

    def encoded(self) -> bytes:
        """The first bytes of the file, up to where the data begins."""
        metadata = {_FORMAT: str(self.version), _GENERATION: self.generation, _BLOCK_BYTES: str(self.block_bytes)}
        table = Entry("U64", (self.num_blocks,), self.data_bytes, self.num_blocks * 8)
        return encoded_header(metadata, {**self.entries, CHECKSUMS: table}, alignment=_ALIGNMENT)


class NewerHeader(ValueError):
    """A header of a newer ``version`` of the format, which says what cannot be understood."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"its format is {version}")


def encoded_header(metadata: Mapping[str, str], entries: Mapping[str, Entry], *, alignment: int) -> bytes:
    """The first bytes of any safetensors file, up to where its data begins, at a multiple of ``alignment``."""
    said: dict[str, object] = {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        said[name] = {
            "dtype": entry.dtype,
            "shape": entry.sizes,
            "data_offsets": (entry.offset, entry.offset + entry.num_bytes),
        }
    text = json.dumps(said, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES - alignment:
        raise ValueError(
            f"the names of {len(entries)} tensors take {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}: save "
            "fewer tensors, or put small ones together"
        )
    padding = -(LENGTH_BYTES + len(text)) % alignment
    return (len(text) + padding).to_bytes(LENGTH_BYTES, "little") + text + b" " * padding


def laid_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, generation: str, block_bytes: int = BLOCK_BYTES
) -> Header:
    """Where each of some tensors, given as (name, dtype, sizes), comes to lie in a file; ValueError says what cannot
    be in one.

    Among those of equal items the short ones come first, together: who reads a part of each long one touches no more
    blocks than it must.
    """
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 8:
        raise ValueError(
            f"block_bytes is {block_bytes}; use a multiple of 8 from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}"
        )
    lengths: dict[str, tuple[int, int, str, tuple[int, ...]]] = {}
    for name, dtype, sizes in tensors:
        check_name(name)
        if name in lengths:
            raise ValueError(f"two tensors are named {name!r}; give each a name of its own")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"the tensor {name!r} has dtype {dtype!r}; use one of {', '.join(ITEM_BYTES)}")
        item_bytes = ITEM_BYTES[dtype]
        lengths[name] = (item_bytes, math.prod(sizes) * item_bytes, dtype, sizes)
    entries = {}
    offset = 0
    for name in sorted(lengths, key=lambda one: (-lengths[one][0], lengths[one][1], one)):
        _, num_bytes, dtype, sizes = lengths[name]
        entries[name] = Entry(dtype, sizes, offset, num_bytes)
        offset += num_bytes
    return Header(generation=generation, block_bytes=block_bytes, entries=entries, data_bytes=offset)


def check_name(name: str) -> None:
    """ValueError for what a safetensors file cannot name a tensor, and for what this format uses itself."""
    if name in (_METADATA, CHECKSUMS):
        raise ValueError(f"a tensor cannot be named {name!r}, which the file needs for itself; give it another name")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a tensor's name, {name!r}, has half a character; use whole Unicode characters") from None


def read_header(text: bytes, num_bytes: int) -> Header:
    """What a file's header says, whose text is ``text`` and whose tensors take ``num_bytes`` with their checksums.

    ValueError says why this cannot be a header that was written here, NewerHeader that it is one of a newer format,
    which cannot be read. One that can be is yet to be checked against the file's summary, and then for its version.
    """
    try:
        said = json.loads(text)
    except RecursionError:
        raise ValueError("its header nests too deeply") from None
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(said, dict) or not isinstance(metadata := said.pop(_METADATA, None), dict):
        raise ValueError(f"its header has no {_METADATA}")
    version = _number(metadata.get(_FORMAT))
    if version < VERSION:
        raise ValueError(f"its format is {metadata.get(_FORMAT)!r}; this version reads format '{VERSION}'")
    try:
        return _header_of(said, metadata, version, num_bytes)
    except ValueError as error:
        if version > VERSION:
            raise NewerHeader(version) from error
        raise


def _header_of(said: dict[str, object], metadata: dict[str, object], version: int, num_bytes: int) -> Header:
    generation, block_bytes = metadata.get(_GENERATION), _number(metadata.get(_BLOCK_BYTES))
    if not isinstance(generation, str) or not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 8:
        _refuse(_METADATA)
    entries = {}
    offset = 0
    for name, value in said.items():
        entries[name] = entry = _entry(name, value)
        if entry.offset != offset:
            _refuse(name)
        offset += entry.num_bytes
    table = entries.pop(CHECKSUMS, None)
    if table is None or offset != num_bytes:
        raise ValueError(f"its tensors take {num_bytes} bytes; the header tells of {offset}, with their checksums")
    header = Header(
        generation=generation, block_bytes=block_bytes, entries=entries, data_bytes=table.offset, version=version
    )
    if (table.dtype, table.sizes) != ("U64", (header.num_blocks,)) or table.offset + table.num_bytes != num_bytes:
        _refuse(CHECKSUMS)
    return header


def checksum_of(header: bytes, table: bytes | Iterable[bytes]) -> str:
    """The checksum of a file's summary: of all that comes before the data, and of the checksums that follow it, given
    at once or in pieces."""
    whole = xxhash.xxh3_128(header)
    for piece in (table,) if isinstance(table, bytes) else table:
        whole.update(piece)
    return whole.hexdigest()


def _entry(name: str, value: object) -> Entry:
    if not isinstance(value, dict):
        _refuse(name)
    dtype, sizes, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or dtype not in ITEM_BYTES
        or not _are_sizes(sizes)
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        _refuse(name)
    num_bytes = math.prod(sizes) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        _refuse(name)
    return Entry(dtype, tuple(sizes), offsets[0], num_bytes)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _number(value: object) -> int:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10 else 0


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"what its header says of {name!r} cannot be")
