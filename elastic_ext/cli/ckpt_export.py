"""`ckpt export`: the model of a checkpoint as plain safetensors files."""

from __future__ import annotations

import argparse
from typing import Any

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.export.safetensors import export_checkpoint
from elastic_ext.records.text import size_in_words

from .ckpt import DONE, DTYPES, Terminal, one_checkpoint, place_of

__all__ = ["run_export"]


def run_export(options: argparse.Namespace, terminal: Terminal) -> int:
    """Write the model of a checkpoint as safetensors files; gives the exit status."""
    path = one_checkpoint(place_of(options.path))
    dtype: Any = DTYPES.get(options.dtype)
    try:
        with terminal.total_bar(f"exporting {path.name}") as on_progress:
            exported = export_checkpoint(
                path,
                options.dest,
                dtype=dtype,
                strip_prefixes=options.strip_prefix,
                renames=options.rename,
                tied=options.tied,
                max_shard_bytes=options.max_shard_size,
                force=options.force,
                on_progress=on_progress,
            )
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    record = {
        "checkpoint": str(path),
        "dest": str(exported.path),
        "files": exported.files,
        "tensors": exported.num_tensors,
        "bytes": exported.num_bytes,
        "left_out": exported.left_out,
    }
    words = f"{exported.path}: {exported.num_tensors} tensors, {size_in_words(exported.num_bytes)}, of {path}"
    terminal.tell(record, words)
    return DONE
