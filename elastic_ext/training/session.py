"""A prepared training on this rank: what it does at boundaries and epochs with the other ranks, and the checks that all
ranks load alike.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.follower import ConfigFollower
from elastic_ext.config.lr_scaling import rate_factor
from elastic_ext.errors import ElasticError, RanksDisagreeError, RanksError, StepError
from elastic_ext.profile.windows import memory_held
from elastic_ext.ranks.group import Ranks
from elastic_ext.ranks.heartbeat import Activity
from elastic_ext.ranks.world import World
from elastic_ext.records.logged import logged_in_words
from elastic_ext.records.measures import Measures
from elastic_ext.records.metrics import StepWindow
from elastic_ext.records.text import Progress, on_one_line

from .batches import Batches
from .checkpoints.loop import Saving
from .counters import Counts
from .description import start_line
from .endless import EndlessBatches
from .facts import tell_of_model
from .model_state import StateDictGuard, whole_state_dict
from .optimizers.accelerate import is_prepared
from .optimizers.optimizer import can_materialise, materialise
from .parallelism import FixedSharding, Parallelism, ReshardReport
from .remarks import LengthRemark, Remarks
from .steps.steps import Steps

if TYPE_CHECKING:
    from .training import Training

__all__ = ["EpochsOfSampler", "SameLoading", "Session", "Speed", "num_unshared", "raise_on_all", "remark_on_shares"]

_logger = logging.getLogger(__name__)


# --- samplers of torch's DataLoader ----------------------------------------------------------------------------------
# Whether one shares samples out among ranks, and whether it is told of epochs.


def num_unshared(loader: Any) -> int | None:
    """The length of a dataset whose samples nothing shares out among ranks; None where something may.

    What accelerate has prepared shares out by itself, and so may a batch sampler of the user's own.
    """
    if not isinstance(loader, DataLoader) or is_prepared(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler or hasattr(loader.sampler, "num_replicas"):
        return None
    try:
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        return num_samples if len(loader.sampler) == num_samples else None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def remark_on_shares(num_samples: int, num_replicas: int, sampler: object) -> str:
    """A warning that each of several replicas takes all ``num_samples`` samples of its dataset."""
    return (
        f"each of {num_replicas} replicas of the model takes all {num_samples} samples of its dataset, since the "
        f"dataloader's {type(sampler).__name__} shares nothing out: an epoch has each sample {num_replicas} times, "
        "unless each rank's dataset holds others; use an ElasticDataLoader, which gives each rank its part of every "
        "step, or sampler=DistributedSampler(dataset)"
    )


class EpochsOfSampler:
    """Notices that a DistributedSampler was not told of a new epoch, so that two epochs have the same order."""

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        self._sampler: Any = sampler if isinstance(sampler, DistributedSampler) and sampler.shuffle else None
        self._last: tuple[int, int] | None = None  # an epoch, and the sampler's at its end

    def end(self, epoch: int) -> str | None:
        """A warning if the epoch that has ended had the same order as the one before; None where it had not."""
        if self._sampler is None:
            return None
        last, self._last = self._last, (epoch, self._sampler.epoch)
        if last is None or self._last != (last[0] + 1, last[1]):
            return None
        return (
            f"epochs {last[0]} and {epoch} had the same order of samples: the DistributedSampler shuffles by its "
            f"epoch, which was {last[1]} in both; call dataloader.sampler.set_epoch(epoch) before each loop, or use an "
            "ElasticDataLoader, which needs no such call"
        )


# --- whether the loaders of all ranks give batches of the same sizes, out of the same order of samples ---------------


class SameLoading:
    """Compares the dataloaders of all ranks, at the same places on each; all ranks raise where they differ."""

    def __init__(self, batches: Batches, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._compares_orders = False  # at each epoch: a sampler draws them
        self._num_unshared: int | None = None  # samples that each rank takes of a dataset, where that is their number
        self._compares_batches = False  # at the first one: each rank draws them for itself

    def compare(self) -> None:
        """Raise where loaders differ: the ranks would take different numbers of steps, or samples twice.

        Where seeds of the order differ, all take rank 0's: seeds of each rank's workers may be that rank's own.
        """
        ordered = self._batches.ordered
        mine = {
            "sizes": self._batches.description,
            "seed": None if ordered is None else ordered.seed,
            "draws": ordered is not None and ordered.draws_order,
            "batches": self._batches.drawing is not None,
            "unshared": num_unshared(self._batches.loader) if self._batches.source is None else None,
        }
        answers = [json.loads(data) for data in self._gather(mine)]
        if any(other["sizes"] != answers[0]["sizes"] for other in answers):
            told = "; ".join(f"rank {rank}: {_in_words(each['sizes'])}" for rank, each in enumerate(answers))
            raise RanksDisagreeError(
                f"the ranks' dataloaders differ ({told}); give all ranks batches of the same sizes"
            )
        seed = answers[0]["seed"]
        if ordered is not None and None not in (ordered.seed, seed) and ordered.seed != seed:
            ordered.take_seed(seed)
        self._compares_orders = len(answers) > 1 and any(each["draws"] for each in answers)
        self._compares_batches = all(each["batches"] for each in answers)
        unshared = {each["unshared"] for each in answers}
        self._num_unshared = unshared.pop() if len(unshared) == 1 else None  # else each rank has a dataset of its own
        self.compare_orders()

    def take_world(self, world: World) -> None:
        """Compare with the ranks of ``world`` from here on, of whose loaders it is known that they are alike."""
        ordered = self._batches.ordered
        self._compares_orders = world.size > 1 and ordered is not None and ordered.draws_order
        self._compares_batches = False

    def compare_shares(self, num_replicas: int, remarks: Remarks) -> None:
        """Warn where each of several replicas of the model takes all samples; called after ``compare``."""
        if self._num_unshared is not None and num_replicas > 1:
            sampler = self._batches.loader.sampler
            remarks.say("samples not shared out", remark_on_shares(self._num_unshared, num_replicas, sampler))

    def compare_orders(self) -> None:
        """Raise where ranks' samplers have drawn different orders for the next epoch."""
        if not self._compares_orders:
            return
        ordered = self._batches.ordered
        orders = [json.loads(data) for data in self._gather(None if ordered is None else ordered.order_to_come())]
        if any(order != orders[0] for order in orders):
            told = "; ".join(f"rank {rank}: {order}" for rank, order in enumerate(orders))
            raise RanksDisagreeError(
                f"the ranks' samplers draw different orders, and samples would come twice or never ({told}); have the "
                "sampler draw from its `generator`, from random numbers of random, numpy.random or torch, which are "
                "seeded alike on all ranks, or from a seed of its own and its set_epoch(epoch)"
            )

    def compare_batches(self, num_replicas: int) -> None:
        """Warn, once, where the batch samplers of all ranks have drawn the same batches for several replicas."""
        if not self._compares_batches or num_replicas == 1:
            return
        self._compares_batches = False
        drawing = self._batches.drawing
        drawn = [json.loads(data) for data in self._gather(None if drawing is None else drawing.order_to_come())]
        if all(order == drawn[0] for order in drawn) and self._ranks.rank == 0:
            _logger.warning(
                "the batch samplers of all ranks draw the same batches: each sample is trained on %d times in an "
                "epoch; have the batch_sampler give each rank its share of them, or the loader seed=rank on each rank, "
                "so that each draws its own",
                num_replicas,
            )

    def _gather(self, mine: object) -> list[bytes]:
        return self._ranks.gather(json.dumps(mine).encode(), "comparing dataloaders")


def _in_words(description: Sequence[int | None]) -> str:
    if len(description) == 1:
        return "batches of the sizes that the trainer sets"
    micro_batch, num_batches, last_batch = description
    length = "an unknown number of" if num_batches is None else str(num_batches)
    return f"{length} batches of {micro_batch} samples" + (f", the last of {last_batch}" if last_batch else "")


# --- how fast training goes, and what it takes, for the metrics ------------------------------------------------------


_LEAST_SECONDS = 1.0  # that rates are measured over


class Speed:
    """Measures steps and samples per second between two calls of ``measure``, a second or more apart."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._since = time.perf_counter()
        self._num_boundaries, self._num_samples = counts.num_boundaries, counts.num_samples  # so many there were then
        self._rates: tuple[float | None, float | None] = None, None  # steps and samples per second

    def measure(self) -> Measures:
        """Steps and samples per second of late, the memory held now, and counted metrics."""
        now, counts = time.perf_counter(), self._counts
        seconds = now - self._since
        if seconds >= _LEAST_SECONDS or self._rates == (None, None):
            num_steps = counts.num_boundaries - self._num_boundaries
            num_samples = counts.num_samples - self._num_samples
            self._since, self._num_boundaries, self._num_samples = now, counts.num_boundaries, counts.num_samples
            self._rates = num_steps / seconds if num_steps else None, num_samples / seconds if num_samples else None
        steps, samples = self._rates
        measured: dict[str, Any] = {**asdict(memory_held()), **counts.measured}
        return Measures(steps_per_second=steps, samples_per_second=samples, **measured)


# --- a prepared training on this rank: what it does at boundaries and epochs, together with the other ranks ----------
# What happens within a step is in training/steps/steps.py; the words are explained in trainer.py.


class Session:
    """What all parts of a training do at its moments, on this rank and with the other ranks, in order.

    One class, though a long one: each moment calls the same parts in an order that the other moments count on.

    The moments: it begins (``start``), an epoch begins or ends, a step has passed its boundary (``pass_boundary``), the
    model was resharded (``tell_resharded``), training goes back (``rewind``), it ends (``end``).
    """

    def __init__(self, training: Training) -> None:
        self.follower = training.follower
        self.should_stop = False
        self.is_in_epoch = False
        """Whether an epoch was begun that was not ended, by ``with trainer.epoch()`` or by ``trainer.batches()``."""
        self.has_ended = False
        """Whether training has ended, so that nothing more is taken or saved."""
        self._training = training
        self._saving: Saving | None = None
        self._counts, self._batches = training.counts, training.batches
        self._gradients, self._learning = training.gradients, training.learning
        self._loading = SameLoading(training.batches, training.ranks)
        self._startup = ElasticConfig.from_values(training.startup)
        wanted = training.following.progress
        # A script may have put something else in its place, and a process without a console has none.
        is_terminal = wanted is not False and bool(getattr(sys.stderr, "isatty", bool)())
        self._wants_progress = is_terminal if wanted is None else wanted
        self._progress = Progress(is_shown=False)
        self._show_progress()
        self._shows_start = is_terminal and not _logger.hasHandlers()
        self._speed = Speed(training.counts)
        self._is_exception_told = self._has_begun_epoch = False
        self._joined_epoch: int | None = None  # which the ranks that this one has joined are in
        self._epoch_to_join: int | None = None  # the same, or the one that comes for them, until it has begun here
        self._sampler_epochs = EpochsOfSampler(training.batches.loader)
        self.doubted_lengths: dict[object, LengthRemark | None] = {}
        """By schedule, the remark on a length that may have been counted in micro-batches; None where it was not."""
        self._state_dicts = StateDictGuard(training.spread, training.state)
        self.endless = EndlessBatches(self, training)
        """What ``trainer.batches()`` gives."""

    def _show_progress(self) -> None:
        """Have the bar shown on the first rank, from the next epoch on, and ended on another."""
        self._progress.is_shown = self._training.ranks.rank == 0 and self._wants_progress
        if not self._progress.is_shown:
            self._progress.end()

    @property
    def steps(self) -> Steps:
        """The steps of this rank."""
        return self._training.steps

    def start(self) -> None:
        """Make sure that the ranks are alike, take up the config, and make the optimizers' state."""
        training, follower, steps = self._training, self.follower, self.steps
        try:
            self._loading.compare()
            self._loading.compare_shares(self._gradients.sharing.num_ranks, training.state.remarks)
            self._begin_batches(follower.config)
            follower.agreement.appliers.effects = self._effects
            follower.agreement.appliers.own_values = self._batches.loader_values
            follower.agreement.saves_config = training.checkpoints is not None
            follower.on_change("global_batch_size", self._apply, self._batches.check)
            follower.on_change("dataloader", self._apply, training.growing.check)
            follower.on_change("tuning", lambda old, new: self._learning.take_up(new))
            if self._batches.loader_applier is not None:
                follower.add(self._batches.loader_applier)
            follower.add(training.settings)
            for applier in () if training.parallelism is None else training.parallelism.appliers():
                follower.add(applier)
            if training.loaded_config is not None:
                self._batches.is_resuming = True
                follower.load_state_dict(self._with_own_values(training.loaded_config))
            follower.start()
            self._batches.is_resuming = False
            self._forget_change()
            if training.why_not_reshard is not None:  # from here on: what is found at the start may say it
                follower.add(FixedSharding(training.why_not_reshard, follower))
            self._take_up(follower.config)
            self._materialise()
            members = training.members
            members.start()
            if training.checkpoints is not None:
                self._saving = Saving(training.checkpoints, training)
                if not members.joins:
                    training.checkpoints.resume(self.resume)
                training.checkpoints.try_out()
                self._saving.start()
            if members.joins:
                members.arrive()
            self._tell_begun()
            members.tell_begun()
            if training.accelerated is not None:
                training.accelerated.begin(lambda: steps.is_committing)
        except BaseException as error:
            self.end(error)
            raise

    def take_world(self, world: World) -> None:
        """Tell what this rank's training keeps of its ranks that they are those of ``world`` now, between two steps.

        After ``Ranks.regroup``, and once the model is spread over these ranks and ``Gradients.take_up`` was called:
        nothing is exchanged here. What asks the ranks each time is not told.
        """
        training, follower = self._training, self.follower
        follower.take_world(world)
        parts = training.settings, training.state.remarks, training.profile_output, training.facts, training.guarding
        for each in (*parts, self._learning):
            each.take_world(world)
        if self._saving is not None:
            self._saving.take_world(world)
        self._loading.take_world(world)
        self._show_progress()
        self._begin_batches(follower.config)

    def cut_batches(self, *, num_ranks: int, rank: int) -> None:
        """Cut steps for a world that is agreed on, before it is there: the next batch that the loop takes is of it."""
        self._batches.begin(self.follower.config, num_ranks=num_ranks, rank=rank)

    def cut_as_config_says(self) -> None:
        """Cut steps for the world that is there, where another one had been agreed on."""
        self._begin_batches(self.follower.config)

    def settle_saves(self) -> None:
        """End all saves on these ranks, and forget what is held in memory; with all of them, before they change."""
        if self._saving is not None:
            self._saving.settle()

    def tell_saving(self) -> dict[str, Any] | None:
        """Where saving checkpoints is, as JSON for a rank that joins; None where training keeps none."""
        saving = self._saving
        return None if saving is None else {"checkpoints": saving.checkpoints.tell(), "loop": saving.tell()}

    def join_saving(self, told: Mapping[str, Any] | None) -> None:
        """Save from here on as the ranks do that this one has joined."""
        if self._saving is not None and told is not None:
            self._saving.checkpoints.join(told["checkpoints"])
            self._saving.join(told["loop"])

    def take_up_config(self, config: ElasticConfig) -> None:
        """Be as the config in force says, on a rank that has joined others."""
        self._take_up(config)

    def go_on_in_epoch_of(self, counts: Counts, *, is_within: bool) -> None:
        """Note that this rank has joined others; ``is_within`` says that their epoch is under way."""
        self._joined_epoch = counts.epoch if is_within else None
        self._epoch_to_join = counts.epoch if is_within else counts.start_epoch
        self._speed = Speed(counts)

    def leave(self, by: str) -> None:
        """End training on this rank alone, which is a member of the job no more."""
        self.has_ended = self._is_exception_told = True
        self.endless.let_go()
        self._let_go(by)

    def resume(self, config: Mapping[str, Any]) -> None:
        """Take up the config of a state that is loaded after ``start``."""
        self._batches.is_resuming = True
        self.follower.load_state_dict(self._with_own_values(config))
        self._batches.is_resuming = False
        self._take_up(self.follower.config)

    def evaluation(self) -> AbstractContextManager[None]:
        """A context in which this rank is outside of steps, and may take as long as it likes without being a hang."""
        if self.steps.is_inside:
            raise StepError(
                "trainer.evaluation() was entered inside `with trainer.step():`; evaluate between two steps"
            )
        return self.follower.heartbeat.during(Activity.OUTSIDE)

    def model_state_dict(self) -> dict[str, Any]:
        """The model's whole state_dict on rank 0, an empty dict on the others; with all ranks, also after the end."""
        if self.steps.torn is not None:
            raise self.steps.torn
        if self.steps.is_inside:
            raise StepError(
                "trainer.model_state_dict() was called inside `with trainer.step():`; call it between two steps"
            )
        with self.follower.heartbeat.during(Activity.OUTSIDE):
            self.follower.ranks.all_or_raise(None, "making the model's whole state_dict")
            return whole_state_dict(self._training.model)

    def save_checkpoint(self) -> Path:
        """Save a checkpoint now, with all ranks; gives its folder."""
        saving = self._kept()
        self._refuse_within_step()
        return saving.checkpoints.save_now()

    def load_checkpoint(self) -> bool:
        """Go on from the newest checkpoint, with all ranks, before the first step; gives whether there is one."""
        saving = self._kept()
        self._refuse_within_step()
        if self._counts.num_boundaries > 0:
            raise StepError("a checkpoint is loaded only before the first step; trainer.rewind() goes back later")
        is_there = saving.checkpoints.load(self.resume)
        saving.plan()
        self.follower.write_metrics()
        return is_there

    def rewind(self, step: int | None, *, skips: bool) -> Path:
        """Go back to an earlier checkpoint, with all ranks; gives its folder. The config in force stays."""
        saving, steps = self._kept(), self.steps
        checkpoints = saving.checkpoints
        torn = steps.torn
        if torn is not None and not steps.can_mend:
            raise torn
        if torn is None:
            self._refuse_within_step()
        if self._is_exception_told and self.follower.ranks.world_size > 1:
            raise ElasticError(
                "an exception has left `with trainer.epoch():`, and the other ranks were told that this rank failed: "
                "catch it within `with trainer.epoch():` to go back to a checkpoint, or start the job again"
            )
        steps.catch_up()
        self.follower.meet_to_go_back(
            doubt=steps.doubt if torn is None else "had an optimizer fail in the middle of its step"
        )
        if torn is None:
            saving.begin_due()
        loaded = checkpoints.load_earlier(step, steps, leaves_epoch=self.endless.is_open, skips=skips)
        if self.endless.is_open and not skips and self._batches.positions.can_go_back(loaded.position):
            self.endless.let_go()
            self._step_out_of_epoch()
        steps.start_over(passes_over=skips)
        num_steps, config = self._counts.num_steps, self.follower.config
        self._training.settings.apply(ElasticConfig.from_dict(loaded.state["config"]["config"]), config)
        checkpoints.go_back(loaded, config, skips=skips)
        self._follow_batch(config)
        self._learning.forget()
        self._learning.take_up(config)
        self.follower.agreement.step = self._counts.global_step
        self._progress.advance(self._counts.num_steps - num_steps)
        self._is_exception_told = False
        steps.go_on(passes_over=skips)
        saving.plan_after_rewind()
        self._training.members.follow_rewind()
        self.follower.write_metrics()
        return loaded.path

    def pass_boundary(self) -> None:
        """Pass the boundary after a step with the other ranks."""
        step, backwards = self._counts.global_step, self.steps.num_backwards
        if self._learning.is_on:  # before another config comes into force
            self._learning.end_step()
        boundary = None
        if not self.follower.pass_quietly(step, backwards):
            boundary = self.follower.boundary(step=step, backwards=backwards)
            self._forget_change()
            self.should_stop = boundary.stop
        if self._learning.is_on:
            self._learning.begin_step()
        if self._progress.is_shown:
            self._progress.advance()
        if self._saving is not None:
            self._saving.pass_boundary(step, boundary)
        members = self._training.members
        if members.is_waiting or (boundary is not None and boundary.members > 0):
            members.pass_boundary(0 if boundary is None else boundary.members)

    def _forget_change(self) -> None:
        if self._training.parallelism is not None:
            self._training.parallelism.forget()

    def _measure(self) -> Measures:
        self._training.growing.warn()
        self._training.facts.tell()
        logged = self._training.logged.newest()
        measured = self._training.profile_output.with_profile(self._speed.measure())
        return replace(measured, logged=logged, **self._step_to_come(), **self._progress_made())

    def _step_to_come(self) -> dict[str, Any]:
        """The metrics of what a step takes and does, by what is in force."""
        return {
            "global_batch_size": self._batches.step_samples,
            "micro_batch_size": self._batches.largest or None,
            "learning_rate": self._training.settings.rate,
        }

    def _progress_made(self) -> dict[str, Any]:
        """The metrics of how far training is, and of its newest checkpoint."""
        is_in_epoch = self._counts.is_in_epoch
        newest = None if self._training.checkpoints is None else self._training.checkpoints.job.run.newest
        return {
            "epoch": self._counts.epoch if is_in_epoch else None,
            "num_epoch_steps_left": self._batches.num_steps_left if is_in_epoch else None,
            "checkpoint_step": None if newest is None else newest.global_step,
            "checkpoint_time": None if newest is None else newest.saved_seconds,
        }

    def see_window(self, window: StepWindow) -> None:
        """Tell of what a profile window of rank 0 has brought: the job's facts, and logged numbers beside the bar."""
        self._training.facts.tell()
        if window.logged:
            self._progress.note(logged_in_words(window.logged))

    def log(self, values: Mapping[str, object]) -> None:
        """Count numbers of the script's: with the step under way, or between two steps at once."""
        if self.has_ended:
            raise ElasticError("training has ended, and trainer.log() was called; call it before")
        self.steps.log(values)

    def _tell_begun(self) -> None:
        """Report that training has begun, and after which step it goes on; metrics tell what is in force from here."""
        self.follower.reports.measure = self._measure
        self.follower.write_metrics()
        step = self._counts.global_step
        text = f"training goes on after step {step}" if step else "training begins"
        checkpoints = self._training.checkpoints
        job = None if checkpoints is None else checkpoints.job
        resumed = None if checkpoints is None or checkpoints.path is None else checkpoints.job.run.newest
        details = {
            "global_batch_size": self._batches.global_batch,
            "checkpoints": None if job is None else str(job.root),
            "checkpoint_interval": None if checkpoints is None else checkpoints.interval_in_words,
            "checkpoint_job": None if job is None else job.name,
            "saves_on_signals": checkpoints is not None and checkpoints.options.save_on_signals,
            "resumed_from": None if resumed is None or checkpoints is None else str(checkpoints.path),
            "saved_by_ranks": None if resumed is None else resumed.num_ranks,
            "config_file": str(self.follower.settings.config_file),
        }
        self.follower.reports.write_event("training-began", step=step, text=text, details=details)
        self._training.facts.tell()
        if self.follower.ranks.rank == 0 and self.follower.settings.enabled:
            line = start_line(self._training, self.follower.tell_of_file())
            _logger.info("%s", line)
            if self._shows_start:  # a terminal that no log reaches
                sys.stderr.write(f"elastic_ext: {on_one_line(line)}\n")

    def registered(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """The tensors that the user has registered, in the same order on all ranks."""
        return [tensors for _, tensors in sorted(self._training.registered.items())]

    def let_go_of_parameters(self) -> Sequence[object]:
        """Drop references to parameters where possible; gives our objects that still refer to some."""
        self._training.guarding.let_go()
        return self._gradients.holders()

    def agree_on_reshard(self, error: BaseException | None) -> None:
        """Return if no rank brought an error while the model is resharded; else all ranks raise."""
        self.follower.ranks.all_or_raise(error, "changing how the model is spread")

    def take_up_model(self) -> None:
        """Share the gradients of the model as it is sharded now, and guard its state_dict."""
        self._gradients.take_up(self._training.spread.engine)
        self._state_dicts.follow()

    def keep_up_with_model(self) -> None:
        """Take up a model that was wrapped anew since the step before; called on all ranks as a step begins."""
        if self._training.spread.keep_up():
            self.take_up_model()
            self.steps.weigh_anew()
            self._training.guarding.expect_more()

    def give_up(self, why: str) -> None:
        """Let no further step be taken, for the reason ``why``."""
        self.steps.give_up(why)

    @property
    def has_begun(self) -> bool:
        """Whether a step was ever begun, or a checkpoint gone back to."""
        return not self.steps.has_not_begun

    def wait_for_staging(self) -> None:
        """Wait until no tensor is being staged for a checkpoint: parameters and optimizer state may change."""
        if self._saving is not None:
            self._saving.checkpoints.fence()

    def tell_resharded(self, report: ReshardReport) -> None:
        """Have all parts follow a change of plan that was made, and report it."""
        self.steps.weigh_anew()
        self._learning.forget()
        self.follower.heartbeat.note_change()
        self._training.growing.forget()
        self._training.guarding.expect_more()
        tell_of_model(self._training)
        if self.follower.ranks.rank == 0:
            _logger.info("the model was resharded: %s", report)
        step = self._counts.global_step
        self.follower.reports.write_event("resharded", step=step, text=str(report), details=report.details())

    def reset(self) -> None:
        """Begin an epoch: count its steps and its batches from zero."""
        self.endless.make_way("trainer.reset() was called")
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.leave_unfinished()
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        self.steps.drop_partial("an epoch begins")
        self._begin_due()
        self._counts.num_steps = 0
        self._batches.begin_epoch()

    def leave_unfinished(self) -> None:
        """Give up the rest of an epoch that the loop has left, as another epoch begins."""
        unfinished, self._counts.unfinished_epoch = self._counts.unfinished_epoch, None
        if unfinished is not None:
            self._counts.epoch = unfinished + 1
            self._batches.leave_epoch()

    def _go_on_with_rest(self) -> None:
        """Go on with the rest of an epoch that the loop has left, and now comes back to."""
        self._counts.unfinished_epoch = None
        why_anew = self._batches.positions.go_on()
        if why_anew is not None and self.follower.ranks.rank == 0:
            _logger.warning("%s", why_anew)

    def enter_epoch(self, epoch: int | None) -> int:
        """Begin ``epoch``, by default the one after the last, for ``with trainer.epoch():``; gives its number."""
        self.endless.make_way("trainer.epoch() was entered")
        if self.is_in_epoch:
            raise StepError("trainer.epoch() was entered inside another `with trainer.epoch():`; leave that one first")
        number = self._counts.epoch if epoch is None else epoch
        self.begin_epoch(number)
        return number

    def begin_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with all ranks, or go on with the rest of it."""
        to_join, self._epoch_to_join = self._epoch_to_join, None
        if to_join not in (None, epoch):
            raise StepError(
                f"the loop begins with epoch {epoch}, and the ranks that this one has joined are in epoch {to_join}; "
                "loop over range(trainer.start_epoch, num_epochs)"
            )
        if not self._has_begun_epoch:
            self._has_begun_epoch = True
            self._remark("another first epoch", self._counts.remark_on_beginning(epoch))
        self.go_on_in_epoch()
        joined, self._joined_epoch = self._joined_epoch, None
        if epoch == self._counts.unfinished_epoch:
            self._begin_to_count()
            self._go_on_with_rest()
        elif epoch != joined:  # else the others are in the middle of it
            self._begin_anew()
        if epoch != joined:
            self._counts.epoch = epoch
            self._training.members.apply_between()
            self._loading.compare_orders()
            self._loading.compare_batches(self._gradients.sharing.num_ranks)
        self._counts.epoch, self._counts.is_in_epoch, self.is_in_epoch = epoch, True, True
        self._progress.begin(f"epoch {epoch}", self._batches.num_steps)

    def go_on_in_epoch(self) -> None:
        """Have the time between two steps count as time in which the loop takes a batch: if long, it is a hang."""
        self.follower.heartbeat.note(Activity.BETWEEN)
        if self._training.recorder is not None:
            self._training.recorder.begin_epoch()

    def pause_epoch(self) -> None:
        """Have the time from here on count as outside of epochs: the loop takes no batches."""
        self.follower.heartbeat.note(Activity.OUTSIDE)
        if self._training.recorder is not None:
            self._training.recorder.end_epoch()

    def _step_out_of_epoch(self) -> None:
        """Leave an epoch, of which nothing is to stay: training goes back to a checkpoint, which says what comes."""
        self.is_in_epoch = self._counts.is_in_epoch = False
        self.pause_epoch()
        self._progress.end()

    def end_epoch(self, error: BaseException | None) -> None:
        """End an epoch with all ranks; or tell them of ``error``, an exception that has left the epoch."""
        self.is_in_epoch = False
        self.pause_epoch()
        self._progress.end()
        if error is not None:
            self._counts.is_in_epoch = False
            self._tell(error)
            return
        try:
            if self.steps.torn is not None:  # and no checkpoint is to have it
                raise self.steps.torn
            self.steps.pass_owed_boundary()
            self.steps.drop_partial("the epoch ended before the step did")
            self.steps.end_epoch()
            self.follower.end_epoch(doubt=self.steps.doubt)
        finally:
            self._counts.is_in_epoch = False
        if self._counts.num_steps > 0:
            self._remark("an order again", self._sampler_epochs.end(self._counts.epoch))
        is_over = not self._is_left_early()
        if is_over:
            self._batches.leave_epoch()
        else:
            self._counts.unfinished_epoch = self._counts.epoch
        if is_over or not self.should_stop:  # by itself trainer.epoch() is the next one, in this run
            self._counts.epoch += 1
        self.steps.do_first(self._begin_outside)
        if self._saving is not None:
            self._saving.end_epoch(is_over=is_over)

    def _remark(self, kind: str, text: str | None) -> None:
        if text is not None:
            self._training.state.remarks.say(kind, text)

    def _is_left_early(self) -> bool:
        """Whether the loop was left before the epoch's end, as far as any rank knows."""
        is_left = self._batches.is_left_early or (self.should_stop and self._batches.is_mid_epoch)
        if not self._batches.may_end_apart:
            return is_left
        return self.follower.ranks.sum([int(is_left)], "ending an epoch")[0] > 0

    def _begin_outside(self) -> None:
        """Give up the rest of an epoch that was left, as a step begins outside of any epoch."""
        if not self._counts.is_in_epoch:
            self.leave_unfinished()
            if self._saving is not None:
                self._saving.begin_due_in_step()

    def end(self, error: BaseException | None, *, by: str = "the trainer could not start") -> None:
        """End training with all ranks, or tell them of ``error``, an exception. Twice is allowed.

        ``by`` is what the user did, for whoever calls something that comes too late.
        """
        if self.has_ended:
            return
        self.has_ended = True
        try:
            if error is not None:
                self.endless.end(error)
                self._tell(error)
                if self._saving is not None:
                    self._saving.give_up_due(is_well=False)
            elif not self._is_exception_told and self.steps.torn is None:
                self.endless.end(None)
                self.steps.pass_owed_boundary()
                self.steps.drop_partial("training ended before the step did")
                self.steps.end_epoch()
                self.follower.finish(doubt=self.steps.doubt)
                self._begin_due()
                if self._saving is not None:
                    self._saving.end()
                    self.follower.write_metrics()  # of the checkpoint that is saved last
                self._tell_of_nothing_left()
                self._tell_of_length()
        finally:
            self._let_go(by)

    def _tell_of_nothing_left(self) -> None:
        """Warn where a run that went on from an earlier one has ended without taking a step."""
        counts = self._counts
        if counts.num_boundaries > 0 or counts.global_step == 0 or self.follower.ranks.rank > 0:
            return
        anew = "load no state" if self._training.checkpoints is None else "give another job="
        text = (
            f"nothing was left to do: training had come to step {counts.global_step}, epoch {counts.start_epoch}, "
            f"before this run, which has taken no step; to train on ask for more epochs or steps, to begin anew {anew}"
        )
        _logger.warning("%s", text)
        self.follower.reports.write_event("nothing-left", step=counts.global_step, text=text, details={})

    def _tell_of_length(self) -> None:
        """Warn where training has ended with the steps that a schedule's length has if it counts micro-batches."""
        for remark in self.doubted_lengths.values():
            if remark is not None and not self.should_stop and self._counts.global_step == remark.num_steps:
                self._remark("length of a schedule", remark.text_at_end)

    def abandon(self) -> None:
        """End a training whose trainer was dropped and not closed; several ranks are not ended, as one alone cannot."""
        if self.has_ended:
            return
        if self._saving is not None:
            self._saving.stop()
            is_well = not hasattr(sys, "last_value")
            if is_well and self.follower.ranks.world_size == 1 and self.steps.torn is None:
                self.endless.end(None)
            self._saving.give_up_due(is_well=is_well)
        if self.follower.ranks.world_size > 1:
            if self._saving is not None:
                self._saving.checkpoints.job.saver.wait_for_held()
            return
        self.has_ended = True
        _logger.info("a trainer was dropped without trainer.close(); the trainer no longer follows the config file")
        self._let_go("the trainer was dropped")

    def _let_go(self, by: str) -> None:
        """Close and release all parts of the training, whichever of them fails."""
        self._training.logged.drop()  # of a step that will not end; what steps before have counted is told
        with ExitStack() as ending:
            ending.callback(self._training.profile_output.close)
            ending.callback(self.follower.close, by)  # which ends the last window
            ending.callback(self._training.members.close)
            if self._training.checkpoints is not None:
                ending.callback(self._training.checkpoints.close)
            if self._training.accelerated is not None:
                ending.callback(self._training.accelerated.end)
            ending.callback(self._gradients.release)
            if self._training.parallelism is not None:
                ending.callback(self._training.parallelism.close)
            ending.callback(self._progress.end)
            ending.callback(self.endless.let_go)
            if self._saving is not None:
                ending.callback(self._saving.stop)

    def _refuse_within_step(self) -> None:
        if self.steps.torn is not None:
            raise self.steps.torn
        if self.steps.is_inside or self.steps.is_partial:
            raise StepError("a checkpoint was asked for in the middle of a step; save and load between two steps")

    def _kept(self) -> Saving:
        if self._saving is None:
            raise ElasticError("this trainer keeps no checkpoints; give it shared_storage_path")
        if self.has_ended:
            raise ElasticError(
                "training has ended, and its checkpoints with it; save and load within `with trainer:`, or before "
                "trainer.close()"
            )
        return self._saving

    def _begin_due(self) -> None:
        if self._saving is not None:
            self._saving.begin_due()

    def note_leaving(self) -> None:
        """Note that training ends by an exit, on all ranks: what is raised then is no failure."""
        self._is_exception_told = True

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an exception, once."""
        if not self._is_exception_told:
            self._is_exception_told = True
            if self._saving is not None:
                self._saving.leave_failed(error)
            self.follower.tell_peers(error)

    def _begin_batches(self, config: ElasticConfig) -> None:
        self._batches.begin(config, num_ranks=self._gradients.sharing.num_ranks, rank=self._gradients.sharing.rank)

    def _apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        largest = self._batches.largest
        self.follower.heartbeat.note_change()
        self._begin_batches(new)
        if self._batches.largest > largest:
            self._training.guarding.expect_more()
        self._follow_batch(new)
        if new.global_batch_size != old.global_batch_size:
            for schedule in (each for optimizer in self._gradients.optimizers for each in optimizer.schedules):
                if schedule.steps_within_steps:
                    schedule.look_at_length()
        self._learning.take_up(new)

    def _effects(self) -> dict[str, str]:
        """What holds of the keys whose values in force do not say it all, by dotted key, for the log and the events."""
        effects = {
            "dataloader.batch_size": self._batches.effect,
            "optimizer.learning_rate": self._training.settings.optimizers[0].rates.effect,
        }
        return {path: words for path, words in effects.items() if words}

    def _take_up(self, config: ElasticConfig) -> None:
        """Bring batches, rates and learning in line with ``config``, at the start or after a state was loaded."""
        self._begin_batches(config)
        if self._counts.reference_batch is None:
            self._counts.reference_batch = self._startup.global_batch_size
        self._follow_batch(config)
        self._learning.forget()
        self._learning.take_up(config)
        self._training.settings.apply(self._startup, config)

    def follow_noise(self) -> None:
        """Adapt learning rates to the noise scale of gradients, which has just changed."""
        self._follow_batch(self.follower.config)

    def _follow_batch(self, config: ElasticConfig) -> None:
        """Set learning rates' factor for the global batch in ``config``, by the user's rule."""
        batch, reference = config.global_batch_size, self._counts.reference_batch
        if batch is None or reference is None:
            return
        rule = self._training.options.learning_rate_rule
        factor = rate_factor(rule, reference, batch, self._counts.noise_scale.value)
        for optimizer in self._training.settings.optimizers:
            optimizer.rates.set_batch_factor(factor)

    def _with_own_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A resumed config, with the batch size of a loader that has its own, and with this script's plan."""
        config = ElasticConfig.from_dict(state["config"], revision=state["revision"])
        own, mine = self._batches.own_values(), self._training.parallelism
        saved = {path: value for path, value in config.values().items() if path not in Parallelism.paths}
        if mine is not None:
            own = {**own, **mine.startup_values}
        if config.values() == saved | own:
            return dict(state)
        values = ElasticConfig.from_values(saved | own, version=config.version, reason=config.reason)
        return {**state, "config": values.to_dict()}

    def _materialise(self) -> None:
        """Make optimizer state before the first step, on all ranks or on none."""
        problem: Exception | None = None
        try:
            for optimizer in self._training.settings.optimizers:
                if can_materialise(optimizer.inner):
                    materialise(optimizer.inner)
        except (RuntimeError, AssertionError) as error:  # out of memory; or what torch asserts of a device
            problem = error
        self.follower.ranks.all_or_raise(problem, "making the optimizer's state")


def raise_on_all(follower: ConfigFollower, problem: Exception | None, doing: str) -> None:
    """Return if no rank has a problem; else close the follower, and raise this rank's problem, or that of others."""
    try:
        follower.ranks.all_or_raise(problem, doing, is_refusal=True)
    except RanksError:
        follower.close()
        if problem is not None:
            raise problem from None  # the others raise what this one did wrong
        raise
