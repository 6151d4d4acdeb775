"""What a trainer's checkpoint holds, collected on one rank and put back; tensors that scripts register; and whether
copying may overlap with passes.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointMismatch
from elastic_ext.fsdp.checkpoint.contents import EXTRA_STATES, GROUPS, REGISTERED, Contents, own_registered_prefix
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import bytes_of, put_part
from elastic_ext.fsdp.checkpoint.loading.loader import Loader
from elastic_ext.fsdp.checkpoint.loading.source import Opened, Wanted
from elastic_ext.fsdp.checkpoint.saving.collect import contents_of
from elastic_ext.fsdp.layout import Box
from elastic_ext.fsdp.optimizers import put_groups
from elastic_ext.fsdp.random_state import random_tensors, restore_random
from elastic_ext.fsdp.state import box_of, held_of_model, local_of, put_extra_states
from elastic_ext.fsdp.value_encoding import dtype_of, name_of, pack, unpack
from elastic_ext.torch_private.gradients import acts_on_gradients
from elastic_ext.torch_private.sharded import version_of
from elastic_ext.training.batches import own_position, packed_position
from elastic_ext.training.options import Overlap
from elastic_ext.training.remarks import lengths_of

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = [
    "PASSES_BY_ITSELF",
    "BoundaryState",
    "Registered",
    "Resumed",
    "TrainingState",
    "claim_registered",
    "fill_registered",
    "has_idle_core",
    "named_registered",
    "num_cores",
    "wanted_of_registered",
    "why_not_overlap",
]

_logger = logging.getLogger(__name__)


# --- tensors that a script has a trainer's checkpoints hold: named among the others, and filled again ----------------

Registered = dict[str, Mapping[str, torch.Tensor]]


def named_registered(registered: Registered) -> dict[str, torch.Tensor]:
    """All registered tensors, by their names in a checkpoint."""
    return {
        f"{REGISTERED}{quote(name, safe='')}/{key}": tensor  # keys may have slashes in them
        for name, held in registered.items()
        for key, tensor in held.items()
    }


def wanted_of_registered(
    opened: Opened, registered: Registered, unclaimed: Registered, *, rank: int, num_ranks: int
) -> list[Wanted]:
    """Registered tensors to be filled from a checkpoint; those not registered here are kept in ``unclaimed``.

    State that each rank had for itself goes to the same rank where there are as many; else all get the first one's.
    """
    saved = _saved_under(opened, REGISTERED)
    unsaved = sorted(registered.keys() - saved.keys())
    if unsaved and rank == 0:
        _logger.warning("%s has no registered state %s: it stays as it is", opened.found.path, ", ".join(unsaved))
    is_own = opened.num_ranks == num_ranks
    own = _saved_under(opened, own_registered_prefix(rank if is_own else 0))
    if own and not is_own and rank == 0:
        _logger.warning(
            "%s has registered state %s of each of %d ranks, and here are %d: all get that of rank 0",
            opened.found.path,
            ", ".join(sorted(own)),
            opened.num_ranks,
            num_ranks,
        )
    for name, keys in own.items() if is_own else ():
        saved[name] |= {key: full for key, full in keys.items() if _is_whole(registered.get(name, {}).get(key))}
    unclaimed.clear()
    wanted = []
    for name, keys in saved.items():
        held = registered.get(name)
        if held is None:
            unclaimed[name] = {key: opened.read_whole("extra", full) for key, full in keys.items()}
            continue
        metas = {key: opened.tensor("extra", full) for key, full in keys.items()}
        kept = {key: _Kept(meta.layout.shape, dtype_of(meta.dtype)) for key, meta in metas.items() if meta}
        _check_registered(name, held, kept, str(opened.found.path))
        what = f"registered state {name}"
        wanted += [Wanted(full, local_of(held[key]), box_of(full, held[key]), what) for key, full in keys.items()]
    return wanted


def _saved_under(opened: Opened, prefix: str) -> dict[str, dict[str, str]]:
    """Full names of registered tensors in a checkpoint, by the name they were registered under and by key."""
    saved: dict[str, dict[str, str]] = {}
    for full in opened.names("extra"):
        if full.startswith(prefix):
            quoted, _, key = full.removeprefix(prefix).partition("/")
            saved.setdefault(unquote(quoted), {})[key] = full
    return saved


def _is_whole(held: torch.Tensor | None) -> bool:
    """Whether a registered tensor lies whole on this rank, or is not registered so far."""
    return held is None or box_of("registered", held) == Box.whole(tuple(held.shape))


def claim_registered(name: str, held: Mapping[str, torch.Tensor], unclaimed: Registered) -> None:
    """Fill newly registered tensors with those loaded under their name, if any; these stay there if they do not fit."""
    if name in unclaimed:
        fill_registered(name, held, unclaimed[name])
        del unclaimed[name]


def fill_registered(name: str, held: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy loaded tensors, which are whole, into registered ones; CheckpointMismatch if they do not fit."""
    kept = {key: _Kept(tuple(tensor.shape), tensor.dtype) for key, tensor in loaded.items()}
    _check_registered(name, held, kept, "what was loaded")
    with torch.no_grad():
        for key, tensor in held.items():
            if isinstance(tensor, DTensor) and not isinstance(loaded[key], DTensor):
                put_part(local_of(tensor), box_of(key, tensor), loaded[key])
            else:
                tensor.copy_(loaded[key])


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor of registered state, as it was saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _check_registered(name: str, held: Mapping[str, torch.Tensor], kept: Mapping[str, _Kept], where: str) -> None:
    """CheckpointMismatch unless the tensors that are registered can be filled with those that were saved."""
    if held.keys() != kept.keys():
        raise CheckpointMismatch(f"registered state {name!r} has {sorted(held)}, and {where} has {sorted(kept)}")
    misshaped = {
        key or name: f"{tensor.dtype} {tuple(tensor.shape)} here, {kept[key].dtype} {kept[key].shape} there"
        for key, tensor in held.items()
        if tuple(tensor.shape) != kept[key].shape or not torch.can_cast(kept[key].dtype, tensor.dtype)
    }
    if misshaped:
        raise CheckpointMismatch(f"registered state {name!r} is not that of {where}", misshaped=misshaped)


# --- whether a checkpoint may be copied while the next step's passes run, or is to be copied before them -------------

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def has_idle_core(*, num_cores: float, num_ranks: int, num_threads: int) -> bool:
    """Whether each of a machine's ranks finds a core for copying beside those that its own threads use."""
    return num_cores >= num_ranks * (num_threads + 1)


def num_cores() -> float:
    """How many processor cores this process may use at once."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, _, period = _CGROUP_QUOTA.read_text().partition(" ")
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such limit
        return cores


def why_not_overlap(
    model: nn.Module, optimizers: Sequence[Optimizer], *, sharding: str, ranks_here: int, asked: Overlap
) -> str | None:
    """Why parameters and optimizer state are to be staged before the next step begins, None where that can wait."""
    if asked is False:
        return "overlap_saving is False"
    unknown = [type(optimizer).__name__ for optimizer in optimizers if not _is_torchs(optimizer)]
    if unknown:
        return f"{', '.join(unknown)} may change parameters elsewhere than in step()"
    if any(acts_on_gradients(parameter) for parameter in model.parameters()):
        return "hooks act on parameters as soon as these have their gradients"
    renorming = {type(part).__name__ for part in model.modules() if _changes_in_passes(part)}
    if renorming:
        return f"{', '.join(sorted(renorming))} with max_norm changes its weight in each pass"
    if sharding == "FSDP1":
        return "FSDP1 moves its parameters within a pass"
    if asked is True or _are_on_gpus(model.parameters()):
        return None
    if has_idle_core(num_cores=num_cores(), num_ranks=ranks_here, num_threads=torch.get_num_threads()):
        return None
    return "no core is idle"


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _changes_in_passes(part: nn.Module) -> bool:
    """Whether torch's own forward of this module changes a parameter."""
    return isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None


def _are_on_gpus(parameters: Iterable[nn.Parameter]) -> bool:
    devices = {parameter.device.type for parameter in parameters}
    return devices == {"cuda"}


# --- what a trainer's checkpoint holds, collected on one rank, and put back ------------------------------------------
# When a checkpoint is saved, and which one a run resumes from, is in checkpoints.py.

PASSES_BY_ITSELF = ("counts", "config", "position", "random/", "plain/dataloader")
"""Keys and names in ``TrainingState.collect`` that may change between two steps without a need to save again."""
_PLAIN = "plain"  # what the names of tensors in plain values begin with
_GATHERED = (
    "{path} was saved while the loop was accumulating gradients by itself, before optimizer.step() was called: these "
    "gradients are in no checkpoint, and their samples do not come again. Save right after optimizer.step(), "
    "or start the job with global_batch_size= and call optimizer.step() in every micro-step: then a save waits for the "
    "end of the step"
)
_STEPPED = (
    "{path} was saved after the loop over epoch {epoch} was left before its end and {names} had stepped. A run that "
    "resumes goes on with the rest of that epoch: if {names} steps after each epoch, it will have done so twice for "
    "this one. Leave the loop over epochs before scheduler.step() where an epoch is left before its end"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundaryState:
    """Training state as it is at the boundary between two steps, before the loop does anything else."""

    counts: Mapping[str, Any]
    """The counters, as ``Counts.state_dict`` gives them, and whether the epoch is over."""
    config: Mapping[str, Any]
    """The config in force, as ``ConfigFollower.state_dict`` gives it."""
    position: Any
    """Where the dataloader stands, as ``pack`` gives it; its tensors are in ``tensors``."""
    tensors: Mapping[str, torch.Tensor]
    random: Mapping[str, torch.Tensor]
    """States of this rank's random generators, by name."""
    own_position: Mapping[str, torch.Tensor]
    """Where this rank's dataloader stands, if each has a place of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resumed:
    """A checkpoint whose tensors are loaded, with the rest of its state, which is taken up afterwards."""

    path: Path
    commit: Commit
    state: Mapping[str, Any]
    """The checkpoint's plain values, as they were saved: counters, config, schedulers and the like."""
    position: Mapping[str, Any]
    """Where the epoch and its dataloader stood, as ``Batches.position`` had it."""
    own_position: Any
    """Where this rank's dataloader stood, if there were as many ranks and each had a place of its own; else None."""
    random: Mapping[str, torch.Tensor]
    """States of random generators by name: this rank's, or the first rank's where there were more or fewer ranks."""
    stays: Sequence[str]
    """Numbers of steps that schedules are made for and that stay as saved, though the script gives others; in words."""


class TrainingState:
    """All of a training's state on one rank: collected for a checkpoint, and put back from one."""

    def __init__(self, training: Training) -> None:
        self._ranks = training.ranks
        self.model = training.model
        self.counts = training.counts
        self._training = training
        self._parts = training.prepared
        self._batches = training.batches
        self._registered, self._unclaimed = training.registered, training.unclaimed
        self._told: set[str] = set()  # of what is said once
        self._loader: Loader
        self._wanted: list[Wanted] = []  # of what is registered

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that train now."""
        return self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks that train now."""
        return self._ranks.world_size

    # ---- saving ----

    def moment(self, *, is_between: bool = False) -> BoundaryState:
        """The state that moves on when the loop does: counters, config, loader position and random states, as of now.

        ``is_between`` says that an epoch has ended, and that the loop has not done yet what it does before the next.
        """
        self._training.learning.forget()  # a run that resumes here could not know what it has seen
        tensors: dict[str, torch.Tensor] = {}
        position = pack(self._batches.position(), f"{_PLAIN}/dataloader", tensors)
        return BoundaryState(
            counts=self._counts_to_save(is_between=is_between),
            config=self._training.follower.state_dict(),
            position=position,
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            own_position=packed_position(self._batches.positions.own(), self.rank),
            random=random_tensors()
            | {name: draw.get_state() for name, draw in _generators_of(self._batches.loader).items()},
        )

    def collect(self, moment: BoundaryState | None = None) -> Contents:
        """All that this rank brings to a checkpoint: tensors as they are now, the rest as it was at ``moment``."""
        moment = moment or self.moment()
        for optimizer in self._parts.optimizers:
            optimizer.rates.note_written()
        tensors = named_registered(self._unclaimed | self._registered) | dict(moment.tensors)
        scaler = self._parts.scaler
        state = {
            "counts": {
                **moment.counts,
                "is_unfinished": self.counts.unfinished_epoch is not None,
                "is_gathering": self._batches.is_gathered_by_hand
                and any(optimizer.is_gathering for optimizer in self._parts.optimizers),
            },
            "config": moment.config,
            "position": moment.position,
            "schedulers": [
                {
                    "class": type(scheduler.inner).__name__,
                    "state": pack(scheduler.state_dict(), f"{_PLAIN}/scheduler {place}", tensors),
                    "steps_within_steps": scheduler.steps_within_steps,
                    "may_have_ended_epoch": scheduler.may_have_ended_epoch,
                }
                for place, scheduler in enumerate(self._parts.schedulers)
            ],
            "scaler": None if scaler is None else pack(scaler.state_dict(), f"{_PLAIN}/scaler", tensors),
        }
        return contents_of(
            self.model,
            [optimizer.inner for optimizer in self._parts.optimizers],
            rank=self.rank,
            tensors=tensors,
            own={
                **moment.own_position,
                **{f"random/{self.rank}/{name}": tensor for name, tensor in moment.random.items()},
            },
            state=state,
        )

    def marks(self) -> list[object]:
        """Values that differ as soon as anything has changed on this rank of what would be saved.

        Large tensors are compared by autograd's count of changes in place.
        """
        contents = self.collect()
        counted = [*contents.model, *contents.optim]
        whole: list[object] = []
        for each in contents.extra:
            if each.name.startswith(REGISTERED):
                counted.append(each)
            else:
                whole.append([each.name, bytes_of(each.tensor.cpu().contiguous()).tobytes()])
        versions = [(each.name, each.tensor.data_ptr(), version_of(each.tensor)) for each in counted]
        state = {**contents.state, "counts": self.counts.state_dict(), "values": contents.values}
        return [versions, whole, json.dumps(state, sort_keys=True)]

    def _counts_to_save(self, *, is_between: bool) -> dict[str, Any]:
        """The counters that a checkpoint holds; after an epoch's last step they name the next epoch."""
        counts = self.counts
        is_unfinished = counts.unfinished_epoch is not None
        is_over = self._batches.is_over if counts.is_in_epoch else self._batches.has_none_left
        is_over &= not is_unfinished
        state = {
            **counts.state_dict(),
            "epoch": counts.epoch_to_resume + (counts.is_in_epoch and is_over),
            "is_in_epoch": counts.is_in_epoch or is_unfinished,
            "is_over": is_over,
        }
        if not is_unfinished and (is_between or (counts.is_in_epoch and is_over)):
            state["is_between"] = True
        return state

    def stepped(self) -> list[torch.Tensor]:
        """The parameters that the optimizers step."""
        optimizers = [optimizer.inner for optimizer in self._parts.optimizers]
        return [part for each in optimizers for group in each.param_groups for part in group["params"]]

    def why_not_overlap(self, asked: Overlap) -> str | None:
        """Why the state is to be staged before the next step begins, None where staging can overlap with passes."""
        optimizers = [optimizer.inner for optimizer in self._parts.optimizers]
        how = self._training.gradients.sharing.name
        return why_not_overlap(self.model, optimizers, sharding=how, ranks_here=self._ranks.world.num_here, asked=asked)

    def about(self) -> dict[str, Any]:
        """Facts about this run that its checkpoints hold, and that a run that resumes compares with its own."""
        return {
            "ranks": self.num_ranks,
            "sharding": self._training.gradients.sharing.name,
            "config version": self._training.follower.state_dict()["config"].get("version"),
        }

    # ---- loading ----

    def check(self, opened: Opened) -> None:
        """Raise where a checkpoint does not fit this training, before anything is changed; called before ``load``."""
        optimizers = [optimizer.inner for optimizer in self._parts.optimizers]
        self._loader = Loader(self.model, optimizers, rank=self.rank, num_ranks=self.num_ranks)
        self._check_parts(opened)
        self._loader.check(opened)
        self._wanted = wanted_of_registered(
            opened, self._registered, self._unclaimed, rank=self.rank, num_ranks=self.num_ranks
        )

    def load(self, opened: Opened) -> Resumed:
        """Fill all tensors from a checkpoint; gives the rest of its state, taken up once every rank has loaded.

        Tensors that go into new memory are read first: damage found there has changed nothing.
        """
        parts, state = self._parts, opened.state
        own = {name for name in opened.names("extra") if name.startswith(f"{_PLAIN}/")}
        tensors = {name: opened.read_whole("extra", name) for name in own}
        drawn = self._drawn(opened)
        self._loader.load_model(opened)
        load: Callable[[], object] = partial(self._loader.load_optimizers, opened)
        for optimizer in parts.optimizers:
            load = partial(optimizer.rates.load, load)
        load()
        opened.read("extra", self._wanted)
        stays: list[str] = []
        for scheduler, packed in zip(parts.schedulers, state["schedulers"], strict=True):
            given = list(lengths_of(scheduler.inner))
            scheduler.load_state_dict(unpack(packed["state"], tensors))
            scheduler.remember_steps(packed.get("steps_within_steps", True))
            stays += _lengths_that_stay(scheduler.inner, given)
        if parts.scaler is not None:
            parts.scaler.load_state_dict(unpack(state["scaler"], tensors))
        return Resumed(
            path=opened.found.path,
            commit=opened.found.commit,
            state=state,
            position=unpack(state["position"], tensors),
            own_position=own_position(opened, rank=self.rank, num_ranks=self.num_ranks),
            random=drawn,
            stays=stays,
        )

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """Which parts of the state in memory, of those ``touched``, loading this checkpoint would overwrite wholly.

        A damaged newer checkpoint has left parts of itself in the ``touched`` ones: the others would keep these parts.
        """
        registered = {each.what for each in self._wanted if each.what is not None}
        return self._loader.refilled(opened, touched) | registered

    def _drawn(self, opened: Opened) -> dict[str, torch.Tensor]:
        """A checkpoint's states of random generators: this rank's, or the first one's."""
        drawer = self.rank if opened.num_ranks == self.num_ranks else 0
        prefix = f"random/{drawer}/"
        return {
            name.removeprefix(prefix): opened.read_whole("extra", name)
            for name in sorted(opened.names("extra"))
            if name.startswith(prefix)
        }

    def take_up(self, resumed: Resumed) -> None:
        """Put the loader and random generators where the checkpoint was; the last act of resuming.

        So nothing is drawn from the generators after it.
        """
        why_anew = self._batches.positions.resume(resumed.position, resumed.own_position)
        if why_anew is not None and self.rank == 0:
            _logger.warning("%s", why_anew)
        if self._batches.positions.can_go_back(resumed.position):
            self._pass_rest(resumed)
            if why_anew is None:
                self._batches.count_rest()
        self._restore_random(resumed)

    def why_incomplete(self, resumed: Resumed) -> str | None:
        """What a run that resumes from a checkpoint lacks, or does twice, in words; None where all is well.

        It lacks what the loop does between two epochs, or gradients that the loop gathers by itself; schedules may step
        twice where an epoch was left before its end. Called after ``load``.
        """
        counts = resumed.state["counts"]
        saved = resumed.state["schedulers"]
        if counts.get("is_gathering", False):
            return _GATHERED.format(path=resumed.path)
        ended = [each["class"] if each.get("may_have_ended_epoch", False) else "" for each in saved]
        if counts.get("is_unfinished", False) and any(ended):
            names = ", ".join(filter(None, ended))
            return _STEPPED.format(path=resumed.path, epoch=counts["epoch"], names=names)
        if not counts.get("is_between", False):
            return None
        text = (
            f"{resumed.path} was saved as epoch {counts['epoch'] - 1} ended, before what the loop does between two "
            "epochs: a validation, or a scheduler's step, that comes there is not in it, and does not come again"
        )
        schedulers = zip(self._parts.schedulers, ended, strict=True)
        idle = [type(each.inner).__name__ for each, has in schedulers if not (has or each.steps_within_steps)]
        if idle:
            text += (
                f". {', '.join(idle)} has never stepped within a step: if it is to step after each epoch, call its "
                f"step() once before epoch {counts['epoch']} begins, where its last_epoch is below trainer.start_epoch"
            )
        return text

    # ---- ranks that join ----

    def tell(self) -> dict[str, Any]:
        """The plain values of this training, as they are now, for ranks that join: JSON, and what ``join`` takes.

        Tensors of the model and optimizers, and registered ones, are no part of it.
        """
        contents = self.collect()
        plain = (f"{_PLAIN}/", f"{EXTRA_STATES}/")
        tensors = {each.name: _told(local_of(each.tensor)) for each in contents.extra if each.name.startswith(plain)}
        rates = [optimizer.rates.start() for optimizer in self._parts.optimizers]
        return {**contents.state, "tensors": tensors, "rates": rates}

    def join(self, told: Mapping[str, Any]) -> None:
        """Have the optimizers' groups, schedules, scaler, extra states of modules and counts of the ranks joined."""
        parts, tensors = self._parts, _tensors_told(told)
        optimizers = [optimizer.inner for optimizer in parts.optimizers]
        parameters = held_of_model(self.model).parameters
        load: Callable[[], object] = partial(put_groups, optimizers, parameters, told[GROUPS])
        for optimizer, rates in zip(parts.optimizers, told["rates"], strict=True):
            load = partial(optimizer.rates.load, load, start=rates)
        load()
        for scheduler, packed in zip(parts.schedulers, told["schedulers"], strict=True):
            scheduler.load_state_dict(unpack(packed["state"], tensors))
            scheduler.remember_steps(packed.get("steps_within_steps", True))
        if parts.scaler is not None:
            parts.scaler.load_state_dict(unpack(told["scaler"], tensors))
        put_extra_states(self.model, {name: unpack(each, tensors) for name, each in told[EXTRA_STATES].items()})
        self.counts.load_state_dict(told["counts"])

    def join_within(self, told: Mapping[str, Any]) -> None:
        """As ``join``, on a rank that is behind the others in the same epoch, whose loop goes on where they are."""
        counts = self.counts
        epochs = counts.epoch, counts.start_epoch, counts.is_resumed
        self.join(told)
        counts.epoch, counts.start_epoch, counts.is_resumed = epochs
        self._batches.positions.go_back(unpack(told["position"], _tensors_told(told)), None)

    def go_on(self, told: Mapping[str, Any]) -> None:
        """Have the dataloader go on where the ranks are that this one has joined."""
        self._batches.positions.resume(unpack(told["position"], _tensors_told(told)), None)
        if told["counts"].get("is_over", False):
            self._batches.pass_rest()

    def drawn(self) -> dict[str, Any]:
        """The states of this rank's random generators, as JSON."""
        return {name: _told(tensor) for name, tensor in random_tensors().items()}

    def draw_as(self, drawn: Sequence[Mapping[str, Any]], *, has_own: bool) -> None:
        """Draw random numbers as a run does that resumes from where ``drawn`` was taken, by rank.

        With ``has_own`` each rank goes on as the one of its number; else all are seeded from the first, as where there
        are more ranks now, or fewer.
        """
        if has_own:
            restore_random({name: _tensor_told(each) for name, each in drawn[self.rank].items()})
        else:
            self._seed_from(_tensor_told(drawn[0]["torch"]))

    # ---- going back ----

    def why_not_replay(self, opened: Opened) -> str | None:
        """Why the data cannot go back to where a checkpoint was saved, within the epoch under way; None if it can."""
        counts, saved = self.counts, opened.state.get("counts")
        if not counts.is_in_epoch or saved is None or not self._batches.positions.can_go_back(opened.state["position"]):
            return None
        is_within = saved.get("is_in_epoch", False) or saved["global_step"] == 0
        epoch = _epoch_of(saved)
        if is_within and epoch == counts.epoch:
            return None
        when = f"in epoch {epoch}" if is_within else f"before epoch {epoch} began"
        return (
            f"the checkpoint was saved {when}, and this is the middle of epoch {counts.epoch}, whose loop cannot go "
            "back to there; leave `with trainer.epoch():` before trainer.rewind(), or give it skip_samples=True"
        )

    def take_up_earlier(self, resumed: Resumed, *, skips: bool) -> str:
        """Put counters, samples and random generators back to a checkpoint; gives what becomes of the data, in words.

        With ``skips`` samples stay where they are.

        Where samples cannot go back within an epoch they go on, too, and the epoch with them. The last act of going
        back.
        """
        is_in_epoch, can_go_back = self.counts.is_in_epoch, self._batches.positions.can_go_back(resumed.position)
        stays = skips or (is_in_epoch and not can_go_back)
        if stays:
            self.counts.undo(resumed.state["counts"]["global_step"])
        else:
            self.counts.load_state_dict(resumed.state["counts"])
        told = None if skips else self._batches.positions.go_back(resumed.position, resumed.own_position)
        if can_go_back and not skips:
            self._batches.count_rest()
        if told is not None and told not in self._told and self.rank == 0:
            self._told.add(told)
            _logger.warning("%s", told)
        if is_in_epoch and not stays:
            self.counts.go_on_in(_epoch_of(resumed.state["counts"]))
        elif not stays:
            self.counts.epoch_gone_back_to = self.counts.epoch
            if can_go_back:
                self._pass_rest(resumed)
        self._restore_random(resumed, with_loader=not skips)
        if skips:
            return "passing over the samples since"
        if not can_go_back:
            return "and the dataloader goes on with its next batches" if is_in_epoch else "and its epoch begins anew"
        return f"and the samples since come again{'' if is_in_epoch else f', from epoch {self.counts.epoch} on'}"

    def let_go(self) -> None:
        """Hold no parameter any more, since it may become another object; called once a checkpoint is loaded."""
        del self._loader
        self._wanted = []

    def _pass_rest(self, resumed: Resumed) -> None:
        """Have the next loop be over the next epoch, where the checkpoint was saved after an epoch's last step."""
        if resumed.state["counts"].get("is_over", False):
            self._batches.pass_rest()

    def _check_parts(self, opened: Opened) -> None:
        state = opened.state
        if "schedulers" not in state:
            raise CheckpointMismatch(
                f"{opened.found.path} was saved without a trainer; load it with ShardCheckpointer before the trainer "
                "is made, and give the trainer another job="
            )
        here = [type(scheduler.inner).__name__ for scheduler in self._parts.schedulers]
        there = [packed["class"] for packed in state["schedulers"]]
        has_scaler = self._parts.scaler is not None
        if here != there or (state["scaler"] is not None) != has_scaler:
            raise CheckpointMismatch(
                f"{opened.found.path} holds {_parts_in_words(there, state['scaler'] is not None)}, and prepare() was "
                f'given {_parts_in_words(here, has_scaler)}; give it the same, or begin anew with resume="never" or '
                "another job="
            )

    def _restore_random(self, resumed: Resumed, *, with_loader: bool = True) -> None:
        """Put random generators back to this rank's saved state; where ranks are more or fewer, seed from the first's.

        Without ``with_loader`` the generators that a loader shuffles with go on where they are.
        """
        if resumed.commit.num_ranks == self.num_ranks:
            own = _generators_of(self._batches.loader)
            restore_random({name: state for name, state in resumed.random.items() if name not in own})
            for name, draw in own.items():
                if name in resumed.random and with_loader:
                    draw.set_state(resumed.random[name])
            return
        self._seed_from(resumed.random["torch"])

    def _seed_from(self, drawn: torch.Tensor) -> None:
        """Seed random generators from the state of the first rank's, unlike on each replica."""
        digest = xxhash.xxh3_64(drawn.numpy().tobytes())
        sharing = self._training.gradients.sharing
        digest.update(b"%d of %d" % (sharing.rank, sharing.num_ranks))  # a replica's ranks draw alike
        seed = digest.intdigest()
        torch.manual_seed(seed - (1 << 63))
        random.seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))


def _told(tensor: torch.Tensor) -> list[Any]:
    """A small tensor as JSON."""
    held = tensor.detach().cpu().contiguous()
    return [name_of(held.dtype), list(held.shape), base64.b64encode(bytes_of(held).tobytes()).decode()]


def _tensor_told(told: Sequence[Any]) -> torch.Tensor:
    """The tensor that ``_told`` gave."""
    dtype, shape, text = told
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype_of(dtype)).reshape(shape)


def _tensors_told(told: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: _tensor_told(each) for name, each in told["tensors"].items()}


def _epoch_of(saved: Mapping[str, Any]) -> int:
    """The epoch that was under way when counts were saved; between two the one to come."""
    epoch: int = saved["epoch"]
    return epoch - 1 if saved.get("is_in_epoch", False) and saved.get("is_over", False) else epoch


def _lengths_that_stay(scheduler: Any, given: Sequence[tuple[str, int]]) -> Iterator[str]:
    """The numbers of steps that a schedule has from a checkpoint where the script has ``given`` others, in words."""
    for (name, length), (of, saved) in zip(given, lengths_of(scheduler), strict=False):
        if name == of and length != saved:
            yield f"{type(scheduler).__name__} keeps {name} {saved}, the script's has {length}"


def _generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that the script has given to a DataLoader and its sampler, by name."""
    sampler = getattr(loader, "sampler", None)
    found = {"loader": getattr(loader, "generator", None), "sampler": getattr(sampler, "generator", None)}
    return {name: draw for name, draw in found.items() if isinstance(draw, torch.Generator)}


def _parts_in_words(schedulers: list[str], has_scaler: bool) -> str:
    return f"{', '.join(schedulers) or 'no scheduler'} and {'a' if has_scaler else 'no'} scaler"
