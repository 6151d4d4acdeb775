"""Export: the model of a checkpoint as plain safetensors files with an index, as other tools load them.

    export_checkpoint("/shared/storage/fsdp_checkpoint/my-model_.../step_100", "my-model", dtype="BF16")

Neither torch nor much memory is needed, whatever the size of the model or of one tensor: all is read in stretches, and
checked as it is read. What is in which file is decided below.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT
from elastic_ext.fsdp.checkpoint.folder.job_folder import refuse_in_a_jobs_folder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.copy import FLOATS, TARGETS, Target, caster
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.metadata import StateMeta, TensorMeta
from elastic_ext.fsdp.checkpoint.format.shardfile import TensorEntry, check_name, encoded_header
from elastic_ext.fsdp.checkpoint.format.writer import write_beside
from elastic_ext.fsdp.checkpoint.loading.description import StreamedCheckpoint, batches_of
from elastic_ext.records.files import is_temporary, put_in_place, sync_folder
from elastic_ext.records.text import check_choice, check_flag, path_given

__all__ = [
    "INDEX",
    "MAX_SHARD_BYTES",
    "ExportFolder",
    "Exported",
    "Renaming",
    "Tied",
    "ToFile",
    "ToTensor",
    "export_checkpoint",
    "files_of",
    "index_of",
    "is_weights_file",
]

_logger = logging.getLogger(__name__)


# --- what an export holds: under which name each tensor stands, as which type of numbers, and in which file ----------
# The names of files, and the index beside them, are those that Hugging Face's `from_pretrained` looks for.

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
Tied: TypeAlias = Literal["all", "once"]
"""How a tensor with several names is exported: under each of them, or once, under the first in the alphabet."""

_ONE = "model.safetensors"
_WEIGHTS = re.compile(r"model(?:-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # as safetensors itself has it
_LINES_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Renaming:
    """How an export renames tensors: prefixes are taken off where a name has them, then patterns are replaced."""

    strip_prefixes: Sequence[str] = ()
    """Prefixes that are taken off, in this order, each where a name has it."""
    replacements: Sequence[tuple[str, str]] = ()
    """Pairs of a regular expression and what replaces its matches in names, as in ``re.sub``; applied in this order."""

    def names(self, given: Iterable[str]) -> dict[str, str]:
        """The new name of each name; ValueError where two become the same, or a prefix or pattern changes none."""
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
    """A tensor of an export: its name and dtype there, and the saved tensor that it is made of."""

    name: str
    source: TensorMeta
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.source.layout.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ToFile:
    """A file of an export, with its tensors in the order in which they lie there."""

    name: str
    tensors: tuple[ToTensor, ...]
    aliases: Mapping[str, str]
    """Further names of tensors in the file, each with the name that its tensor has there."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """The safetensors header, which comes before the tensors in the file."""
        return encoded_header({**self.aliases, **_METADATA}, self._entries(), alignment=_ALIGNMENT)

    def _entries(self) -> Iterator[tuple[str, TensorEntry]]:
        offset = 0
        for tensor in self.tensors:
            yield tensor.name, TensorEntry(tensor.dtype, tensor.source.layout.shape, offset, tensor.num_bytes)
            offset += tensor.num_bytes


def files_of(
    meta: StateMeta, *, renaming: Renaming, dtype: Target | None, tied: Tied, max_shard_bytes: int
) -> list[ToFile]:
    """The files of a model's export: tensors by name, up to ``max_shard_bytes`` each; a larger tensor has its own.

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
    """The index file of an export, in parts: which file has each tensor. As ``json.dumps`` with an indent of 2."""
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
    """Whether a file of this name is part of an export: its index, or a file of tensors."""
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
            f"{pattern!r} cannot be replaced by {replacement!r}: {error}; allowed: what re.sub takes"
        ) from None
    return lambda name: compiled.sub(replacement, name)


def _stripping(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


# --- the folder that an export goes into: a whole one comes to be there, or none -------------------------------------
# Files are written under temporary names and synced. Once all are, those of an earlier export are removed, its index
# first; then the new ones get their names, their index last. So at no moment is there an index of files that are not
# all there, and what a killed export leaves under temporary names is removed by the next one.

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SUFFIX_CHARACTERS = len(".0123456789abcdef.tmp")


class ExportFolder:
    """Writes an export into the folder ``path``, within a ``with``; without ``finish`` what was written is removed."""

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path = path
        self._force = force
        self._was_made = False
        self._waiting: dict[str, Path] = {}  # name -> where its contents are so far
        self._placed: list[Path] = []  # the index last

    def __enter__(self) -> ExportFolder:
        refuse_in_a_jobs_folder(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)
            self._was_made = True
        names = os.listdir(self.path)
        if COMMIT in names:
            raise CheckpointError(f"{self.path} is a checkpoint; export into another folder")
        self._refuse(names)
        for name in names:
            if is_temporary(name) and is_weights_file(name[1:-_SUFFIX_CHARACTERS]):
                os.unlink(self.path / name)
        return self

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write the file that is to be called ``name``, durably, under a temporary name."""
        with _told(self.path / name):
            self._waiting[name] = write_beside(self.path / name, parts)

    def finish(self) -> None:
        """Give all written files their names, in the place of an earlier export, which is removed."""
        names = os.listdir(self.path)
        self._refuse(names)
        with _told(self.path):
            for name in sorted(filter(is_weights_file, names), key=_index_first):
                os.unlink(self.path / name)
                if name == INDEX:
                    sync_folder(self.path)
            for name in sorted(self._waiting, key=_index_first, reverse=True):
                if name == INDEX:
                    sync_folder(self.path)
                put_in_place(self._waiting[name], self.path / name)
                self._placed.append(self.path / name)
                del self._waiting[name]
            sync_folder(self.path)
            if self._was_made:
                sync_folder(self.path.absolute().parent)
        self._placed.clear()
        self._was_made = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in [*reversed(self._placed), *self._waiting.values()]:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self._was_made:
            with contextlib.suppress(OSError):  # where somebody has put something there
                os.rmdir(self.path)

    def _refuse(self, names: Iterable[str]) -> None:
        there = sorted(filter(is_weights_file, names))
        if there and not self._force:
            raise CheckpointError(
                f"{self.path} holds an export already, {there[0]}; replace it with force=True (--force), or move it"
            )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError that names no file; one of a full disk says that what was written is removed."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"{os.strerror(error.errno)}; what was written of this export is removed"
            raise OSError(error.errno, what, str(path)) from None
        error.filename = error.filename or str(path)
        raise


def _index_first(name: str) -> tuple[bool, str]:
    return name != INDEX, name


# --- the model of a checkpoint as plain safetensors files with an index, as other tools load them --------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export: its folder and files, and what was left out."""

    path: Path
    files: tuple[str, ...]
    """The names of the files that hold tensors."""
    num_tensors: int
    num_bytes: int
    """The bytes of all tensors, as they are exported."""
    left_out: tuple[str, ...]
    """The names of modules' extra states, which are no tensors, and not exported."""


def export_checkpoint(
    path: str | Path,
    dest: str | Path,
    *,
    dtype: Target | None = None,
    strip_prefixes: Sequence[str] = (),
    renames: Sequence[tuple[str, str]] = (),
    tied: Tied = "all",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the model of the checkpoint in the folder ``path`` into the folder ``dest``, which may hold other things.

    Nothing there looks like an export before all of this one is durable. What an earlier export has left is replaced
    with ``force`` alone: CheckpointError otherwise. CheckpointDamaged where what was read is not what was saved;
    ValueError for arguments that cannot be; OSError where a file cannot be written, and then nothing is left of it.
    ``on_progress`` is told how many bytes have been read of how many. One export at a time writes into a folder.
    """
    if dtype is not None and dtype not in TARGETS:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(TARGETS)}, or None to keep each as it is")
    check_choice("tied", tied, ("all", "once"))
    check_flag("force", force)
    path, dest = path_given("path", path), path_given("dest", dest)
    with Reading(path), StreamedCheckpoint(ListedCheckpoint.read(path)) as streamed:
        files = files_of(
            streamed.meta("model"),
            renaming=Renaming(strip_prefixes=strip_prefixes, replacements=renames),
            dtype=dtype,
            tied=tied,
            max_shard_bytes=max_shard_bytes,
        )
        left_out = tuple(sorted(streamed.extra_states()))
        reading = _BatchReading(streamed, files, on_progress)
        with ExportFolder(dest, force=force) as folder:
            for file in files:
                folder.write(file.name, reading.contents_of(file))
            folder.write(INDEX, index_of(files))
            folder.finish()
    if left_out:
        _logger.warning("%s holds state of modules that is no tensor, and not exported: %s", path, ", ".join(left_out))
    return Exported(
        path=dest,
        files=tuple(file.name for file in files),
        num_tensors=sum(len(file.tensors) for file in files),
        num_bytes=sum(file.num_bytes for file in files),
        left_out=left_out,
    )


class _BatchReading:
    """Reads and casts the tensors of one export, one batch after another."""

    def __init__(
        self, streamed: StreamedCheckpoint, files: Sequence[ToFile], on_progress: Callable[[int, int], None]
    ) -> None:
        self._streamed = streamed
        self._on_progress = on_progress
        self._num_done = 0
        self._num_bytes = sum(_num_bytes_in(tensor.source) for file in files for tensor in file.tensors)

    def contents_of(self, file: ToFile) -> Iterator[bytes | memoryview]:
        """All bytes of a file of the export, in parts, each good until the next is asked for."""
        yield file.header()
        casts = {tensor.source.dtype: caster(tensor.source.dtype, tensor.dtype) for tensor in file.tensors}
        for batch in batches_of(tensor.source for tensor in file.tensors):
            for stretch, view in zip(batch, self._streamed.read("model", batch), strict=True):
                yield casts[stretch.tensor.dtype](view)
                self._num_done += stretch.num_bytes
            self._on_progress(self._num_done, self._num_bytes)


def _num_bytes_in(tensor: TensorMeta) -> int:
    return math.prod(tensor.layout.shape) * ITEM_BYTES[tensor.dtype]
