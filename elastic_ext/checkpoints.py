"""Checkpoints: a trainer's own: when one is saved, what goes into it, and what a run that resumes takes up from it.

How tensors come to lie in files, and back, is the affair of fsdp/checkpoint.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch
import xxhash
from torch import nn

from .batches import Batches
from .config import ElasticConfig
from .counts import Counts
from .errors import CheckpointError, CheckpointFenced, CheckpointMismatch
from .fsdp.checkpoint.checkpointer import ShardCheckpointer
from .fsdp.checkpoint.collecting import contents_of
from .fsdp.checkpoint.commit import Commit
from .fsdp.checkpoint.contents import Contents
from .fsdp.checkpoint.loader import Loader
from .fsdp.checkpoint.opened import Opened, Wanted
from .fsdp.plain import pack, unpack
from .fsdp.random_state import random_tensors, restore_random
from .fsdp.state import box_of, local_of
from .interval import CheckpointInterval
from .sharing import Sharing
from .taking_part import TakingPart

__all__ = ["Checkpoints", "Resume", "WhenSaveFails"]

_logger = logging.getLogger(__name__)

Resume = Literal["auto", "strict", "never"]
WhenSaveFails = Literal["raise", "warn"]
_OF_PARTS = ("the dataloader's state", "schedulers", "scaler")
"""What tensors in the state of these are named after."""
_Registered = dict[str, Mapping[str, torch.Tensor]]


class Checkpoints:
    """One rank's part in the checkpoints of one training."""

    def __init__(
        self,
        checkpointer: ShardCheckpointer,
        model: nn.Module,
        parts: TakingPart,
        *,
        sharing: Sharing,
        counts: Counts,
        batches: Batches,
        registered: _Registered,
        unclaimed: _Registered,
        interval: CheckpointInterval | None,
        when_save_fails: WhenSaveFails,
        how_to_resume: Resume,
        rank: int,
        num_ranks: int,
        config: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._checkpointer = checkpointer
        self._model = model
        self._parts = parts
        self._sharing = sharing
        self._counts = counts
        self._batches = batches
        self._registered = registered
        self._unclaimed = unclaimed  # what was loaded, and not registered so far
        self._given = interval or CheckpointInterval()
        self._interval = self._given
        self._warns = when_save_fails == "warn"
        self._how = how_to_resume
        self._rank, self._num_ranks = rank, num_ranks
        self._config = config
        self._saved_at: int | None = None  # the global step of the last save that there is

    # ---- saving ----

    def next_due(self, config: ElasticConfig) -> float:
        """The next ``global_step`` after which to save, now that ``config`` is in force."""
        wanted = config.checkpoint
        self._interval = self._given
        if wanted.steps is not None or wanted.epochs is not None:
            self._interval = CheckpointInterval(steps=wanted.steps, epochs=wanted.epochs)
        steps = self._interval.steps
        return math.inf if steps is None else (self._counts.global_step // steps + 1) * steps

    def save_due(self) -> None:
        """Save after the step that ended, unless that was done."""
        if self._saved_at != self._counts.global_step:
            self._save_or_warn(f"step_{self._counts.global_step}")

    def end_epoch(self) -> None:
        """Save at the end of an epoch, where one is due: the number of epochs that have ended is in its name."""
        if self._interval.should_save(current_epoch=self._counts.epoch):
            self._save_or_warn(f"epoch_{self._counts.epoch}")

    def save(self, name: str) -> Path:
        """Save now, on all ranks; raises where it cannot."""
        own = self._checkpointer.own_buffers(self._model)
        counts = self._counts
        path = self._checkpointer.save_contents(
            name, lambda: self._collect(own), step=counts.global_step, epoch=counts.epoch, about=self._about()
        )
        self._saved_at = counts.global_step
        return path

    def _collect(self, own_buffers: Mapping[str, torch.Tensor]) -> Contents:
        """All that this rank has."""
        tensors: dict[str, torch.Tensor] = {
            f"registered/{quote(name, safe='')}/{key}": tensor  # keys may have slashes in them
            for name, held in self._registered.items()
            for key, tensor in held.items()
        }
        scaler = self._parts.scaler
        state = {
            "counts": self._counts.state_dict(),
            "config": self._config(),
            "position": pack(self._batches.position(), "the dataloader's state", tensors),
            "schedulers": [
                pack(scheduler.state_dict(), f"schedulers/{place}", tensors)
                for place, scheduler in enumerate(self._parts.schedulers)
            ],
            "scaler": None if scaler is None else pack(scaler.state_dict(), "scaler", tensors),
        }
        drawn = {f"random/{self._rank}/{name}": tensor for name, tensor in random_tensors().items()}
        return contents_of(
            self._model,
            [optimizer.inner for optimizer in self._parts.optimizers],
            rank=self._rank,
            tensors=tensors,
            own={**own_buffers, **drawn},
            state=state,
        )

    def _save_or_warn(self, name: str) -> None:
        try:
            self.save(name)
        except CheckpointFenced:
            raise
        except CheckpointError as error:
            if not self._warns:
                raise
            if self._rank == 0:
                _logger.warning("a checkpoint was not saved, and training goes on: %s", error)

    def _about(self) -> dict[str, Any]:
        """What somebody who resumes is told of this run."""
        return {
            "ranks": self._num_ranks,
            "sharding": self._sharing.name,
            "global batch": self._batches.global_batch,
            "config version": self._config()["config"].get("version"),
        }

    # ---- resuming ----

    def resume(self, take_up: Callable[[Mapping[str, Any]], None]) -> bool:
        """Go on from the newest checkpoint, if there is one; ``take_up`` is given its config.

        One that is damaged is passed over for the one before it, unless resuming is "strict".
        """
        self._checkpointer.claim()
        if self._how == "never":
            return False
        found: _Found | None = self._checkpointer.restore(self._load, falls_back=self._how != "strict")
        if found is None:
            return False
        self._counts.load_state_dict(found.state["counts"])
        take_up(found.state["config"])
        why_anew = self._batches.resume(found.position)
        self._restore_random(found)
        self._saved_at = self._counts.global_step
        if self._rank == 0:
            self._tell(found)
            if why_anew is not None:
                _logger.warning("%s", why_anew)
        return True

    def close(self) -> None:
        """Let another run of the job have the folder."""
        self._checkpointer.close()

    def _load(self, opened: Opened) -> _Found:
        """Fill all tensors, and give what is taken up once every rank has come so far."""
        parts, state = self._parts, opened.state
        optimizers = [optimizer.inner for optimizer in parts.optimizers]
        loader = Loader(self._model, optimizers, rank=self._rank, num_ranks=self._num_ranks)
        loader.check(opened)
        loader.load_model(opened)
        load: Callable[[], object] = partial(loader.load_optimizers, opened)
        for optimizer in parts.optimizers:
            load = partial(optimizer.rates.load, load)
        load()
        own = {name for name in opened.names("extra") if name.startswith(_OF_PARTS)}
        tensors = {name: opened.read_whole("extra", name) for name in own}
        if len(state["schedulers"]) != len(parts.schedulers) or (state["scaler"] is None) != (parts.scaler is None):
            raise CheckpointMismatch(
                f"{opened.found.path} holds {_parts_in_words(len(state['schedulers']), state['scaler'] is not None)}, "
                f"and prepare() was given {_parts_in_words(len(parts.schedulers), parts.scaler is not None)}"
            )
        for scheduler, packed in zip(parts.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(unpack(packed, tensors))
        if parts.scaler is not None:
            parts.scaler.load_state_dict(unpack(state["scaler"], tensors))
        self._load_registered(opened)
        drawer = self._rank if opened.num_ranks == self._num_ranks else 0
        prefix = f"random/{drawer}/"
        return _Found(
            path=opened.found.path,
            commit=opened.found.commit,
            state=state,
            position=unpack(state["position"], tensors),
            random={
                name.removeprefix(prefix): opened.read_whole("extra", name)
                for name in sorted(opened.names("extra"))
                if name.startswith(prefix)
            },
        )

    def _load_registered(self, opened: Opened) -> None:
        """What is registered is filled; the rest waits for whoever registers it."""
        saved: dict[str, dict[str, str]] = {}
        for full in opened.names("extra"):
            kind, _, rest = full.partition("/")
            if kind == "registered":
                quoted, _, key = rest.partition("/")
                saved.setdefault(unquote(quoted), {})[key] = full
        self._unclaimed.clear()
        wanted = []
        for name, keys in saved.items():
            held = self._registered.get(name)
            if held is None:
                self._unclaimed[name] = {key: opened.read_whole("extra", full) for key, full in keys.items()}
                continue
            shapes = {key: (opened.tensor("extra", full), held.get(key)) for key, full in keys.items()}
            if held.keys() != keys.keys() or any(
                meta is None or tensor is None or meta.layout.shape != tuple(tensor.shape)
                for meta, tensor in shapes.values()
            ):
                raise CheckpointMismatch(
                    f"registered state {name!r} has {sorted(held)}, and {opened.found.path} has {sorted(keys)}, or "
                    "their shapes differ"
                )
            wanted += [Wanted(full, local_of(held[key]), box_of(full, held[key])) for key, full in keys.items()]
        opened.read("extra", wanted)

    def _restore_random(self, found: _Found) -> None:
        """Each rank draws on where it was; of another number of ranks each begins anew, from the first one's state."""
        if found.commit.num_ranks == self._num_ranks:
            restore_random(found.random)
            return
        digest = xxhash.xxh3_64(found.random["torch"].numpy().tobytes())
        digest.update(b"%d of %d" % (self._sharing.rank, self._sharing.num_ranks))  # a replica's ranks draw alike
        seed = digest.intdigest()
        torch.manual_seed(seed - (1 << 63))
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))

    def _tell(self, found: _Found) -> None:
        """One line of what is not as it was when the checkpoint was saved."""
        commit = found.commit
        was, now = (
            {**commit.about, "torch": commit.versions.get("torch")},
            {**self._about(), "torch": torch.__version__},
        )
        differs = ", ".join(
            f"{name} {was.get(name)} -> {value}" for name, value in now.items() if was.get(name) != value
        )
        _logger.log(
            logging.WARNING if differs else logging.INFO,
            "resuming from %s, saved %s at step %d: %s",
            found.path,
            commit.saved_at,
            commit.global_step,
            differs or "nothing has changed since",
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """A checkpoint whose tensors are loaded."""

    path: Path
    commit: Commit
    state: Mapping[str, Any]
    position: Mapping[str, Any]
    random: Mapping[str, torch.Tensor]
    """This rank's, or the first one's."""


def _parts_in_words(num_schedulers: int, has_scaler: bool) -> str:
    return f"{num_schedulers} schedulers and {'a' if has_scaler else 'no'} scaler"
