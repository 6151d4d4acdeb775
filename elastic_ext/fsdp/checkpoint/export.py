"""Export: the model of a checkpoint as plain safetensors files with an index, as other tools load them.

    export_checkpoint("/shared/storage/fsdp_checkpoint/my-model_.../step_100", "my-model", dtype="BF16")

Neither torch nor much memory is needed, whatever the size of the model or of one tensor: all is read in stretches, and
checked as it is read. What is in which file is decided in `exportplan`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.records.text import check_choice, check_flag, path_given

from .casting import TARGETS, Target, caster
from .dtypes import ITEM_BYTES
from .exportfolder import ExportFolder
from .exportplan import INDEX, MAX_SHARD_BYTES, Renaming, Tied, ToFile, files_of, index_of
from .listing import Found
from .meta import TensorMeta
from .reading import Reading
from .streamed import Streamed, batches_of

__all__ = ["Exported", "export_checkpoint"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    files: tuple[str, ...]
    """Those that hold tensors."""
    num_tensors: int
    num_bytes: int
    """Of the tensors, as they are exported."""
    left_out: tuple[str, ...]
    """Of the model, and no tensors: what modules gave as their extra state."""


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
    with Reading(path), Streamed(Found.read(path)) as streamed:
        files = files_of(
            streamed.meta("model"),
            renaming=Renaming(strip_prefixes=strip_prefixes, replacements=renames),
            dtype=dtype,
            tied=tied,
            max_shard_bytes=max_shard_bytes,
        )
        left_out = tuple(sorted(streamed.extra_states()))
        reading = _Reading(streamed, files, on_progress)
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


class _Reading:
    """Tensors of one export, read and cast one batch after another."""

    def __init__(self, streamed: Streamed, files: Sequence[ToFile], on_progress: Callable[[int, int], None]) -> None:
        self._streamed = streamed
        self._on_progress = on_progress
        self._num_done = 0
        self._num_bytes = sum(_num_bytes_in(tensor.source) for file in files for tensor in file.tensors)

    def contents_of(self, file: ToFile) -> Iterator[bytes | memoryview]:
        """All bytes of a file, in parts, each good until the next is asked for."""
        yield file.header()
        casts = {tensor.source.dtype: caster(tensor.source.dtype, tensor.dtype) for tensor in file.tensors}
        for batch in batches_of(tensor.source for tensor in file.tensors):
            for stretch, view in zip(batch, self._streamed.read("model", batch), strict=True):
                yield casts[stretch.tensor.dtype](view)
                self._num_done += stretch.num_bytes
            self._on_progress(self._num_done, self._num_bytes)


def _num_bytes_in(tensor: TensorMeta) -> int:
    return math.prod(tensor.layout.shape) * ITEM_BYTES[tensor.dtype]
