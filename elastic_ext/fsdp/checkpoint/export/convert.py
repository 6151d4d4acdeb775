"""Convert: checkpoints to folders of torch.distributed.checkpoint (DCP), and such folders to checkpoints.

    convert_to_dcp(".../fsdp_checkpoint/my-model_.../step_100", "/elsewhere/step_100")
    convert_from_dcp("/elsewhere/step-7", "/shared/storage", job="my-model", step=7, optimizers=["AdamW"])

One process does it, without a process group, and holds some megabytes at a time, whatever the size of the model or of
one tensor. What cannot be converted is refused with a list, before anything is written.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.contents import KINDS, STATE_FILE, FileKind, meta_file, shard_file
from elastic_ext.fsdp.checkpoint.folder.claim import Reading
from elastic_ext.fsdp.checkpoint.folder.commit import Chain, Commit, chain_after
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.shardfile import Header, ShardSummary, laid_out
from elastic_ext.fsdp.checkpoint.format.writer import write_stream
from elastic_ext.fsdp.checkpoint.job import versions
from elastic_ext.records.files import NewFiles, sync_folder
from elastic_ext.records.text import check_flag, names_given, path_given

from .dcp_folder import DcpFolder
from .dcp_in import Incoming, of_foreign, of_record, record_in
from .dcp_out import write_dcp
from .dcp_plan import Keys

__all__ = ["Converted", "convert_from_dcp", "convert_to_dcp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The result of a conversion: the folder that was written, and how much it holds."""

    path: Path
    step: int
    num_tensors: int
    num_bytes: int


def convert_to_dcp(
    path: str | Path,
    dest: str | Path,
    *,
    model_key: str = "model",
    optim_key: str = "optim",
    first_names: Collection[str] = (),
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write the checkpoint in the folder ``path`` as the folder ``dest``, for ``dcp.load`` on any number of ranks.

    A state dict ``{model_key: ..., optim_key: ...}`` of what ``get_state_dict(model, optimizers)`` gives is filled from
    it. ``first_names`` says of each trained parameter with several names which one ``model.named_parameters()`` has.
    ``force`` replaces a folder of DCP's. ``on_progress`` is told how many bytes have been read of how many.
    """
    check_flag("force", force)
    path, dest = path_given("path", path), path_given("dest", dest)
    keys, first_names = Keys(model=model_key, optim=optim_key), names_given("first_names", first_names)
    with Reading(path):
        found = ListedCheckpoint.read(path)
        num_tensors, num_bytes = write_dcp(
            found, dest, keys=keys, first_names=first_names, force=force, on_progress=on_progress
        )
    return Converted(path=dest, step=found.commit.global_step, num_tensors=num_tensors, num_bytes=num_bytes)


def convert_from_dcp(
    folder: str | Path,
    shared_storage_path: str | Path,
    *,
    job: str,
    step: int | None = None,
    model_key: str = "model",
    optim_key: str = "optim",
    optimizers: Sequence[str] = (),
    tied: Sequence[tuple[str, str]] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Save what ``dcp.save`` has put into ``folder`` as the first checkpoint of the new job ``job``.

    A folder that ``convert_to_dcp`` has made becomes what it was, and a trainer resumes from it; its keys and step are
    known. Of any other, ``step`` has to be given, with the classes of ``optimizers`` where it holds state of some, and
    the names of parameters that are ``tied``, two by two. What it holds besides the model and the optimizers is the
    ``extra`` of ``ShardCheckpointer.load``.
    """
    storage, folder = path_given("shared_storage_path", shared_storage_path).absolute(), path_given("folder", folder)
    optimizers = names_given("optimizers", optimizers)
    _refuse_used(storage, job)
    opened = DcpFolder(folder)
    record = record_in(opened)
    if record is not None:
        incoming = of_record(opened, record)
    elif step is None:
        raise CheckpointError(f"{folder} does not say at which step it was saved; give step (--step)")
    else:
        keys = Keys(model=model_key, optim=optim_key)
        incoming = of_foreign(opened, keys=keys, step=step, optimizers=optimizers, tied=tied)
    writing = _Writing(opened, incoming, on_progress)
    path = writing.into(storage, job)
    return Converted(path=path, step=incoming.step, num_tensors=writing.num_tensors, num_bytes=writing.num_bytes)


class _Writing:
    """Writes one checkpoint from a folder of DCP's, in one process."""

    def __init__(self, opened: DcpFolder, incoming: Incoming, on_progress: Callable[[int, int], None]) -> None:
        self._opened = opened
        self._incoming = incoming
        self._on_progress = on_progress
        metas = [meta for kind in KINDS for meta in incoming.metas[kind].tensors.values()]
        self.num_tensors = len(metas)
        self.num_bytes = sum(math.prod(meta.layout.shape) * ITEM_BYTES[meta.dtype] for meta in metas)
        self._num_done = 0

    def into(self, storage: Path, job: str) -> Path:
        """Write and commit the checkpoint as the first one of ``job``; gives its folder."""
        folder = JobFolder.find_or_make(storage, job, now=datetime.now())
        run_id = secrets.token_hex(6)
        with contextlib.ExitStack() as held:
            held.callback(folder.claim(run_id).release)
            folder.prune_garbage()  # of a conversion that was killed
            _refuse_used(storage, job)
            return self._save(folder, f"step_{self._incoming.step}", chain_after(None, run_id=run_id))

    def _save(self, folder: JobFolder, name: str, chain: Chain) -> Path:
        """Write all ranks' files of the checkpoint and commit it; where that fails no checkpoint is left."""
        incoming, generation = self._incoming, secrets.token_hex(8)
        path = folder.begin(name, generation, chain)
        with contextlib.ExitStack() as undo:
            undo.callback(folder.discard, name)
            metas = {
                meta_file(kind): folder.put_meta(name, meta_file(kind), incoming.metas[kind].to_json())
                for kind in KINDS
            }
            with NewFiles() as new:
                state = folder.put_state(new, name, STATE_FILE, incoming.state)
                new.sync()
                new.put_in_place()
            shards = dict(self._shards(path, generation))
            sync_folder(path)
            commit = Commit(
                generation=generation,
                lineage=chain,
                global_step=incoming.step,
                epoch=incoming.epoch,
                num_ranks=incoming.num_ranks,
                metas=metas,
                states={STATE_FILE: state},
                shards=shards,
                saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                versions=versions(),
                about=incoming.about,
            )
            folder.commit(name, commit)
            undo.pop_all()
        return path

    def _shards(self, path: Path, generation: str) -> Iterator[tuple[str, ShardSummary]]:
        """Write the shard files of every rank that has tensors; gives each file's name and summary for COMMIT."""
        for kind in KINDS:
            metas = self._incoming.metas[kind].tensors
            held: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {}
            for name, meta in metas.items():
                for rank, box in meta.layout.held():
                    held.setdefault(rank, []).append((name, meta.dtype, box.sizes))
            for rank in sorted(held):
                header = laid_out(held.pop(rank), generation=generation)
                file = shard_file(kind, rank, self._incoming.num_ranks)
                yield file, write_stream(path / file, header, self._contents_of(header, kind, rank))

    def _contents_of(self, header: Header, kind: FileKind, rank: int) -> Iterator[memoryview]:
        for name in header.entries:
            _, where = self._incoming.tensors[kind][name]
            for piece in where.pieces[rank]:
                for part in self._opened.contents_of(where.tensor, piece):
                    yield part
                    self._num_done += len(part)
                    self._on_progress(self._num_done, self.num_bytes)


def _refuse_used(storage: Path, job: str) -> None:
    """CheckpointError where ``job`` has checkpoints already, which a converted one would not follow."""
    folder = JobFolder.find(storage, job)
    listing = None if folder is None else folder.listing()
    if folder is not None and listing is not None and (listing.found or listing.unreadable):
        raise CheckpointError(f"{folder.path} holds checkpoints of job {job!r} already; give the job another name")
