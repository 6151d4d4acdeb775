"""What an export holds: under which name each tensor stands, as which type of numbers, and in which file. Pure.

The names of files, and the index beside them, are those that Hugging Face's `from_pretrained` looks for.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .casting import FLOATS, Target
from .dtypes import ITEM_BYTES
from .meta import StateMeta, TensorMeta
from .shardfile import Entry, check_name, encoded_header

__all__ = [
    "INDEX",
    "MAX_SHARD_BYTES",
    "Renaming",
    "Tied",
    "ToFile",
    "ToTensor",
    "files_of",
    "index_of",
    "is_weights_file",
]

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
Tied: TypeAlias = Literal["all", "once"]
"""Of a tensor with several names: under each of them, or under its own, the first in the alphabet."""

_ONE = "model.safetensors"
_WEIGHTS = re.compile(r"model(?:-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # as safetensors itself has it
_LINES_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """How names change: prefixes are taken off, each where a name has it; then patterns are replaced, one by one."""

    strip_prefixes: Sequence[str] = ()
    replacements: Sequence[tuple[str, str]] = ()
    """Regular expressions, and what takes the place of each thing that they match, as in ``re.sub``."""

    def names(self, given: Iterable[str]) -> dict[str, str]:
        """The new name of each; ValueError says which two become the same, and what changes none of them."""
        now = {name: name for name in given}
        for prefix in self.strip_prefixes:
            now = _changed(now, f"the prefix {prefix!r}", _stripping(prefix))
        for pattern, replacement in self.replacements:
            now = _changed(now, f"the pattern {pattern!r}", _replacing(pattern, replacement))
        before: dict[str, str] = {}
        for name, new in now.items():
            if new in before:
                raise ValueError(f"{before[new]!r} and {name!r} are both renamed {new!r}; give each a name of its own")
            check_name(new)
            before[new] = name
        return now


@dataclass(frozen=True, slots=True)
class ToTensor:
    """A tensor as it is exported."""

    name: str
    source: TensorMeta
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.source.layout.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ToFile:
    """A file as it is exported; its tensors in the order in which they lie there, one after another."""

    name: str
    tensors: tuple[ToTensor, ...]
    aliases: Mapping[str, str]
    """Further names of tensors that are in it."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """What comes before the tensors."""
        return encoded_header({**self.aliases, **_METADATA}, self._entries(), alignment=_ALIGNMENT)

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        offset = 0
        for tensor in self.tensors:
            yield tensor.name, Entry(tensor.dtype, tensor.source.layout.shape, offset, tensor.num_bytes)
            offset += tensor.num_bytes


def files_of(
    meta: StateMeta, *, renaming: Renaming, dtype: Target | None, tied: Tied, max_shard_bytes: int
) -> list[ToFile]:
    """What is exported of a model: by name, each file filled up to ``max_shard_bytes``; a larger tensor has its own.

    ValueError says what in the arguments cannot be.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; allowed: 1 or more, such as {MAX_SHARD_BYTES}")
    new = renaming.names(sorted([*meta.tensors, *meta.aliases]))
    sources = itertools.chain(zip(meta.tensors, meta.tensors, strict=True), meta.aliases.items())
    tensors = [
        ToTensor(new[name], meta.tensors[source], _dtype_after(meta.tensors[source].dtype, dtype))
        for name, source in sources
        if tied == "all" or name == source
    ]
    aliases = {} if tied == "all" else {new[alias]: new[name] for alias, name in meta.aliases.items()}
    tensors.sort(key=_name_of)
    parts = _filled(tensors, max_shard_bytes)
    files = []
    for number, part in enumerate(parts, start=1):
        name = _ONE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        # Those of the largest items first, so that each is aligned.
        in_order = tuple(sorted(part, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name)))
        there = {tensor.name for tensor in part} if aliases else set()
        files.append(ToFile(name, in_order, {alias: kept for alias, kept in aliases.items() if kept in there}))
    return files


def index_of(files: Sequence[ToFile]) -> Iterator[bytes]:
    """The index, in parts: in which file each tensor is. It is what ``json.dumps`` writes with an indent of 2."""
    total = sum(file.num_bytes for file in files)
    yield b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {' % total
    lines = (
        f"\n    {json.dumps(tensor.name)}: {json.dumps(file.name)}"
        for file in files  # which follow one another by the names that are in them
        for tensor in sorted(file.tensors, key=_name_of)
    )
    separator = ""
    while some := ",".join(itertools.islice(lines, _LINES_AT_ONCE)):
        yield (separator + some).encode()
        separator = ","
    yield b"\n  }\n}\n" if separator else b"}\n}\n"


def is_weights_file(name: str) -> bool:
    """Whether an export has files of this name."""
    return name == INDEX or _WEIGHTS.fullmatch(name) is not None


def _name_of(tensor: ToTensor) -> str:
    return tensor.name


def _dtype_after(source: str, dtype: Target | None) -> str:
    return dtype if dtype is not None and source in FLOATS else source


def _filled(tensors: Iterable[ToTensor], most_bytes: int) -> list[list[ToTensor]]:
    parts: list[list[ToTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if parts[-1] and num_bytes + tensor.num_bytes > most_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return parts


def _changed(names: Mapping[str, str], what: str, change: Callable[[str], str]) -> dict[str, str]:
    changed = {name: change(now) for name, now in names.items()}
    if changed == names:
        raise ValueError(f"{what} changes none of {len(names)} names, such as {', '.join(sorted(names.values())[:3])}")
    return changed


def _replacing(pattern: str, replacement: str) -> Callable[[str], str]:
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ValueError(
            f"{pattern!r} cannot be replaced by {replacement!r}: {error}; allowed: as re.sub has it"
        ) from None
    return lambda name: compiled.sub(replacement, name)


def _stripping(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)
