"""The format of a shard file, and the checksums of its blocks."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeGuard, cast

import xxhash

from .json_text import ITEM_BYTES, JsonText

__all__ = [
    "BLOCK_BYTES",
    "CHECKSUMS",
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "VERSION",
    "BlockSums",
    "Header",
    "NewerHeader",
    "ShardSummary",
    "SumTable",
    "TensorEntry",
    "check_name",
    "checksum_of",
    "encoded_header",
    "laid_out",
    "read_header",
    "sums_of_table",
]


# --- the format ------------------------------------------------------------------------------------------------------
# The format of a shard file: one rank's part of a state as a safetensors file, with checksums of its blocks.
#
#     8 bytes      how long the header is
#     header       JSON, padded with spaces so that the data begins at a multiple of 4096
#     data         the tensors, those of the largest items first, so that each is aligned; nothing between them
#     checksums    one more tensor, `elastic_ext.checksums`: the xxh3_64 of each block of the data
#
# A block is `block_bytes` long wherever tensors begin and end in it; the last one may be shorter. What a reader touches
# it can check block by block; the checksums and the header are checked by the file's summary, which stands elsewhere.
# Everything is little-endian. Here the format is decided; writer.py writes it and reader.py reads it.

BLOCK_BYTES = 16384  # larger ones make a partial read touch more than it needs; smaller ones are slower to check
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 64, 4 << 20
CHECKSUMS = "elastic_ext.checksums"
MAX_HEADER_BYTES = 100_000_000  # what safetensors itself reads

_METADATA = "__metadata__"
_FORMAT, _GENERATION, _BLOCK_BYTES = "elastic_ext.format", "elastic_ext.generation", "elastic_ext.block_bytes"
VERSION = 1
_ALIGNMENT = 4096
LENGTH_BYTES = 8
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in a shard file: its bytes begin ``offset`` bytes into the data."""

    dtype: str
    sizes: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """The size and checksum by which a shard file is trusted; they stand in the checkpoint's COMMIT."""

    num_bytes: int
    checksum: str  # xxh3_128, in hex, of everything but the data


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of a shard file: its save's generation, the size of blocks, and where each tensor lies."""

    generation: str
    block_bytes: int
    entries: Mapping[str, TensorEntry]  # in the order in which they lie in the file
    data_bytes: int  # of the tensors, without the checksums
    version: int = VERSION

    @property
    def num_blocks(self) -> int:
        return -(-self.data_bytes // self.block_bytes)

    def encoded(self) -> bytes:
        """The header as the first bytes of a shard file, up to where the data begins."""
        metadata = {_FORMAT: str(self.version), _GENERATION: self.generation, _BLOCK_BYTES: str(self.block_bytes)}
        table = TensorEntry("U64", (self.num_blocks,), self.data_bytes, self.num_blocks * 8)
        return encoded_header(metadata, [*self.entries.items(), (CHECKSUMS, table)], alignment=_ALIGNMENT)


class NewerHeader(ValueError):
    """A shard file's header is of a newer ``version`` of the format, and cannot be understood."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"its format is {version}")


def encoded_header(metadata: Mapping[str, str], entries: Iterable[tuple[str, TensorEntry]], *, alignment: int) -> bytes:
    """The first bytes of any safetensors file, up to where its data begins, at a multiple of ``alignment``."""
    header = bytearray(LENGTH_BYTES)
    header += b'{"%s":%s' % (_METADATA.encode(), _compact(dict(metadata)))
    num_entries = 0
    for name, entry in entries:  # one by one: many take much memory all at once
        num_entries += 1
        ends = [entry.offset, entry.offset + entry.num_bytes]
        said = _compact({"dtype": entry.dtype, "shape": entry.sizes, "data_offsets": ends})
        header += b",%s:%s" % (_compact(name), said)
    header += b"}"
    num_bytes = len(header) - LENGTH_BYTES
    if num_bytes > MAX_HEADER_BYTES - alignment:
        raise ValueError(
            f"the names of {num_entries} tensors take {num_bytes} bytes; safetensors allows {MAX_HEADER_BYTES}: save "
            "fewer tensors, or put small ones together"
        )
    header += b" " * (-len(header) % alignment)
    header[:LENGTH_BYTES] = (len(header) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return bytes(header)


def laid_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, generation: str, block_bytes: int = BLOCK_BYTES
) -> Header:
    """The header of a shard file with some tensors, given as (name, dtype, sizes); ValueError says what cannot be in
    one.

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
        entries[name] = TensorEntry(dtype, sizes, offset, num_bytes)
        offset += num_bytes
    return Header(generation=generation, block_bytes=block_bytes, entries=entries, data_bytes=offset)


def check_name(name: str) -> None:
    """ValueError unless a tensor in a shard file may have this ``name``; two names are the format's own."""
    if name in (_METADATA, CHECKSUMS):
        raise ValueError(f"a tensor cannot be named {name!r}, which the file needs for itself; give it another name")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"a tensor's name, {name!r}, has half a character (a lone surrogate); use whole Unicode characters"
        ) from None


def read_header(text: bytes | memoryview, num_bytes: int) -> Header:
    """The header of a shard file, from its ``text``; tensors and checksums take ``num_bytes`` in the file.

    ValueError says why this cannot be a header that was written here, NewerHeader that it is one of a newer format,
    which cannot be read. One that can be is yet to be checked against the file's summary, and then for its version.
    """
    try:
        said = _entries_in(text)
    except RecursionError:
        raise ValueError("its header nests too deeply") from None
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"its header is no JSON object: {error}") from None
    if not isinstance(metadata := said.pop(_METADATA, None), dict):
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
    offset = 0
    for name, entry in said.items():
        if not isinstance(entry, TensorEntry) or entry.offset != offset:
            _refuse(name)
        offset += entry.num_bytes
    entries = cast("dict[str, TensorEntry]", said)
    table = entries.pop(CHECKSUMS, None)
    if table is None or offset != num_bytes:
        raise ValueError(f"its tensors take {num_bytes} bytes; the header tells of {offset}, with their checksums")
    header = Header(
        generation=generation, block_bytes=block_bytes, entries=entries, data_bytes=table.offset, version=version
    )
    if (table.dtype, table.sizes) != ("U64", (header.num_blocks,)) or table.offset + table.num_bytes != num_bytes:
        _refuse(CHECKSUMS)
    return header


def checksum_of(header: bytes | bytearray, table: bytes | Iterable[bytes]) -> str:
    """The checksum in a shard file's summary: of all bytes before the data, and of the table of checksums behind it,
    given at once or in pieces."""
    whole = xxhash.xxh3_128(header)
    for piece in (table,) if isinstance(table, bytes) else table:
        whole.update(piece)
    return whole.hexdigest()


def _entries_in(text: bytes | memoryview) -> dict[str, object]:
    """What a header holds by name: a TensorEntry each, or else the JSON. Equal dtypes and sizes are kept once."""
    pieces = (memoryview(text)[at : at + _PIECE_BYTES] for at in range(0, len(text), _PIECE_BYTES))
    alike: dict[tuple[str, tuple[int, ...]], TensorEntry] = {}
    return {
        name: value if name == _METADATA else _entry(value, alike) or value
        for name, value in JsonText(pieces).members()
    }


def _entry(value: object, alike: dict[tuple[str, tuple[int, ...]], TensorEntry]) -> TensorEntry | None:
    """A tensor's entry from a header's JSON, None where that cannot be; ``alike`` has one of each dtype and sizes."""
    if not isinstance(value, dict):
        return None
    dtype, sizes, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or dtype not in ITEM_BYTES
        or not _are_sizes(sizes)
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        return None
    key = dtype, tuple(sizes)
    one = alike.get(key)
    if one is None:
        one = alike[key] = TensorEntry(*key, 0, math.prod(sizes) * ITEM_BYTES[dtype])
    return (
        TensorEntry(one.dtype, one.sizes, offsets[0], one.num_bytes)
        if offsets[1] - offsets[0] == one.num_bytes
        else None
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _number(value: object) -> int:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10 else 0


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"what its header says of {name!r} is not possible")


# --- the checksums of blocks -----------------------------------------------------------------------------------------
# Checksums of a shard file's data: the xxh3_64 of each block, made as data goes by, and the table of all of them.

_PIECE_SUMS = 1 << 16  # the checksums of a gigabyte, at the default size of blocks
_MOST_PIECES = 16


class BlockSums:
    """Computes the checksums of a shard file's blocks, as the data is written."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._sums = array("Q")
        self._begun = xxhash.xxh3_64()
        self._num_begun = 0  # bytes of the block that has not ended

    def add(self, data: memoryview) -> None:
        """Add ``data``, which follows what was added before."""
        start, end, block = 0, len(data), self._block_bytes
        if self._num_begun:
            start = min(block - self._num_begun, end)
            self._begun.update(data[:start])
            self._num_begun += start
            if self._num_begun == block:
                self._end_block()
        whole = start + (end - start) // block * block
        digest = xxhash.xxh3_64_intdigest
        self._sums.extend([digest(data[at : at + block]) for at in range(start, whole, block)])
        if whole < end:
            self._begun.update(data[whole:])
            self._num_begun = end - whole

    def table(self) -> bytes:
        """The table of all checksums, as it stands in the file; the last block ends here."""
        if self._num_begun:
            self._end_block()
        return _in_little_endian(self._sums).tobytes()

    def _end_block(self) -> None:
        self._sums.append(self._begun.intdigest())
        self._begun.reset()
        self._num_begun = 0


class SumTable:
    """A file's table of checksums, of which a part is in memory, and all of it where the file is not very large.

    ``read`` gives so many bytes of the table from some byte on. What it gives later is not checked again: a checksum
    that has become another one is that of no data.
    """

    def __init__(self, num_blocks: int, read: Callable[[int, int], bytes]) -> None:
        self._num_blocks = num_blocks
        self._read = read
        self._pieces: dict[int, Sequence[int]] = {}

    def __getitem__(self, block: int) -> int:
        number, place = divmod(block, _PIECE_SUMS)
        piece = self._pieces.get(number)
        return (self._keep(number, self._read_piece(number)) if piece is None else piece)[place]

    @property
    def memory_bytes(self) -> int:
        """How many bytes of memory the table takes at most."""
        return 8 * min(self._num_blocks, _MOST_PIECES * _PIECE_SUMS)

    def pieces(self) -> Iterator[bytes]:
        """The whole table as bytes, piece by piece, read from the file."""
        for number in range(-(-self._num_blocks // _PIECE_SUMS)):
            data = self._read_piece(number)
            self._keep(number, data)
            yield data

    def _read_piece(self, number: int) -> bytes:
        first = number * _PIECE_SUMS
        return self._read(first * 8, min(_PIECE_SUMS, self._num_blocks - first) * 8)

    def _keep(self, number: int, data: bytes) -> Sequence[int]:
        if len(self._pieces) == _MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        sums = self._pieces[number] = sums_of_table(data)
        return sums


def sums_of_table(data: bytes) -> Sequence[int]:
    """The checksums in a table as it stands in a file."""
    sums = array("Q")
    sums.frombytes(data)
    return _in_little_endian(sums)


def _in_little_endian(sums: array[int]) -> array[int]:
    if sys.byteorder == "big":
        sums = sums[:]
        sums.byteswap()
    return sums
