"""`ckpt convert`: checkpoints to folders of torch.distributed.checkpoint, and back; the one that needs torch."""

from __future__ import annotations

import argparse

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.export.convert import Converted, convert_from_dcp, convert_to_dcp
from elastic_ext.records.text import size_in_words

from .ckpt import DONE, ONLY_TO, Terminal, one_checkpoint, place_of

__all__ = ["run_convert"]


def run_convert(options: argparse.Namespace, terminal: Terminal) -> int:
    """Convert a checkpoint to a folder of torch.distributed.checkpoint, or back; gives the exit status."""
    _refuse_of_the_other(options)
    try:
        converted = _to_dcp(options, terminal) if options.to == "dcp" else _to_elastic(options, terminal)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    record = {
        "path": str(options.path),
        "dest": str(converted.path),
        "step": converted.step,
        "tensors": converted.num_tensors,
        "bytes": converted.num_bytes,
    }
    of = f"{converted.num_tensors} tensors, {size_in_words(converted.num_bytes)}, of step {converted.step}"
    terminal.tell(record, f"{converted.path}: {of}")
    return DONE


def _to_dcp(options: argparse.Namespace, terminal: Terminal) -> Converted:
    path = one_checkpoint(place_of(options.path))
    with terminal.total_bar(f"converting {path.name}") as on_progress:
        return convert_to_dcp(
            path,
            options.dest,
            model_key=options.model_key,
            optim_key=options.optim_key,
            first_names=options.first,
            force=options.force,
            on_progress=on_progress,
        )


def _to_elastic(options: argparse.Namespace, terminal: Terminal) -> Converted:
    if options.job is None:
        raise CheckpointError("a checkpoint belongs to a job; give --job NAME, the job that is to go on from it")
    with terminal.total_bar(f"converting {options.path.name}") as on_progress:
        return convert_from_dcp(
            options.path,
            options.dest,
            job=options.job,
            step=options.step,
            model_key=options.model_key,
            optim_key=options.optim_key,
            optimizers=options.optimizer,
            tied=options.tied,
            on_progress=on_progress,
        )


def _refuse_of_the_other(options: argparse.Namespace) -> None:
    for direction, names in ONLY_TO.items():
        given = [f"--{name}" for name in names if getattr(options, name) not in (None, False, [])]
        if direction != options.to and given:
            raise CheckpointError(f"{', '.join(given)} is only for --to {direction}")
