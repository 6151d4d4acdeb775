"""A prepared training on this rank: what its parts do at its moments, with the other ranks.

What happens within a step is in steps/steps.py, how epochs begin and end in epochs.py; the words are in trainer.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ext.config.control_word import Purpose
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.follower import ConfigFollower
from elastic_ext.config.lr_scaling import rate_factor
from elastic_ext.errors import ElasticError, RanksError, StepError
from elastic_ext.ranks.heartbeat import Activity
from elastic_ext.ranks.world import World

from .checkpoints.loop import Saving
from .epochs import TrainingEpochs
from .model_state import StateDictGuard, whole_state_dict
from .optimizers.optimizer import can_materialise, materialise
from .parallelism import FixedSharding, Parallelism, ReshardReport
from .steps.steps import Steps

if TYPE_CHECKING:
    from .training import Training

__all__ = ["Session", "raise_on_all"]

_logger = logging.getLogger(__name__)


class Session:
    """What all parts of a training do at its moments, on this rank and with the other ranks, in order.

    Each moment calls the same parts, in an order that the other moments count on. The moments: training begins
    (``start``); a step has ended, and passes its boundary (``pass_boundary``); the model was resharded
    (``tell_resharded``); the ranks are others (``take_world``); training goes back (``rewind``); it ends with all ranks
    or by a failure (``end``), on a rank that leaves the others (``leave``), or with a trainer that nobody has closed
    (``abandon``). How an epoch begins and ends is in epochs.py.
    """

    def __init__(self, training: Training) -> None:
        self.follower = training.follower
        self.should_stop = False
        self.has_ended = False
        """Whether training has ended, so that nothing more is taken or saved."""
        self._training = training
        self._counts, self._batches = training.counts, training.batches
        self._gradients, self._learning = training.gradients, training.learning
        self._bar = training.reports.bar
        self._startup = ElasticConfig.from_values(training.startup)
        self._is_exception_told = False
        self._state_dicts = StateDictGuard(training.spread, training.state)
        self.epochs = TrainingEpochs(training)
        """What begins and ends epochs with all ranks."""

    @property
    def steps(self) -> Steps:
        """The steps of this rank."""
        return self._training.steps

    def start(self) -> None:
        """Make sure that the ranks are alike, take up the config, and make the optimizers' state."""
        training, follower, steps = self._training, self.follower, self.steps
        try:
            self.epochs.compare_loaders()
            self.cut_as_config_says(follower.config)
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
            self.take_up_config(follower.config, saved=training.loaded_config)
            self._materialise()
            members = training.members
            members.start()
            if training.checkpoints is not None:
                training.saving = Saving(training.checkpoints, training)
                if not members.joins:
                    training.checkpoints.resume(self.resume)
                training.checkpoints.try_out()
                training.saving.start()
            if members.joins:
                members.arrive()
            else:
                training.losses.note_connections()
            training.reports.begin()
            members.tell_how()
            if training.accelerated is not None:
                training.accelerated.begin(lambda: steps.is_committing)
        except BaseException as error:
            self.end(error)
            raise

    def take_world(self, world: World) -> None:
        """Tell what this rank's training keeps of its ranks that they are those of ``world`` now, between two steps.

        After ``Ranks.regroup``, and once the model is spread over these ranks and ``Gradients.take_up`` was called: all
        that is exchanged here is who of them holds the job's folder. What asks the ranks each time is not told.
        """
        training, follower = self._training, self.follower
        follower.take_world(world)
        parts = training.settings, training.state.remarks, training.reports, training.profile_output, training.facts
        for each in (*parts, training.guarding, self._learning, self.epochs):
            each.take_world(world)
        self.cut_as_config_says(follower.config)
        if training.saving is not None:
            training.saving.take_world(world)

    def leave(self, by: str) -> None:
        """End training on this rank alone, which is a member of the job no more."""
        self.has_ended = self._is_exception_told = True
        self._let_go(by)

    def resume(self, config: Mapping[str, Any]) -> None:
        """Take up the config of a state that is loaded after ``start``."""
        self._batches.is_resuming = True
        self.follower.load_state_dict(self._with_own_values(config))
        self._batches.is_resuming = False
        self.take_up_config(self.follower.config, saved=config)

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
        """Go back to an earlier checkpoint, with all ranks; gives its folder.

        The config in force stays, but for what ranks have proposed by now: that is in force from the next step.
        """
        saving, steps = self._kept(), self.steps
        checkpoints, endless = saving.checkpoints, self.epochs.endless
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
        self.follower.meet(
            Purpose.REWIND, doubt=steps.doubt if torn is None else "had an optimizer fail in the middle of its step"
        )
        if torn is None:
            saving.begin_due()
        loaded = checkpoints.load_earlier(step, steps, leaves_epoch=endless.is_open, skips=skips)
        if endless.is_open and not skips and self._batches.positions.can_go_back(loaded.position):
            self.epochs.leave_for_checkpoint()
        steps.start_over(passes_over=skips)
        num_steps, config, before = self._counts.num_steps, self.follower.config, self._counts.global_step
        self._training.settings.apply(ElasticConfig.from_dict(loaded.state["config"]["config"]), config)
        text = checkpoints.go_back(loaded, config, skips=skips)
        self._follow_batch(config)
        self._learning.forget()
        self._learning.take_up(config)
        self.follower.agreement.step = self._counts.global_step
        self._bar.advance(self._counts.num_steps - num_steps)
        self._is_exception_told = False
        steps.go_on(passes_over=skips)
        saving.plan_after_rewind()
        with self.follower.heartbeat.during(Activity.BOUNDARY):
            self.follower.agreement.decide_proposals(Purpose.REWIND)
        self._training.members.follow_rewind()
        self._forget_change()
        self.follower.write_metrics()
        self._training.reports.tell_gone_back(text, before=before, path=loaded.path, skips=skips)
        return loaded.path

    def pass_boundary(self) -> None:
        """Pass the boundary after a step with the other ranks."""
        training = self._training
        step, backwards = self._counts.global_step, training.steps.num_backwards
        if self._learning.is_on:  # before another config comes into force
            self._learning.end_step()
        boundary = None
        if not self.follower.pass_quietly(step, backwards):
            boundary = self.follower.boundary(step=step, backwards=backwards)
            self._forget_change()
            self.should_stop = boundary.stop
        if self._learning.is_on:
            self._learning.begin_step()
        if self._bar.is_shown:
            self._bar.advance()
        saving, members = training.saving, training.members
        if saving is not None:
            saving.pass_boundary(step, boundary)
        if members.wanted or members.world_before is not None or (boundary is not None and boundary.members > 0):
            members.pass_boundary(0 if boundary is None else boundary.members)

    def _forget_change(self) -> None:
        if self._training.parallelism is not None:
            self._training.parallelism.forget()

    def note_gathered_by_hand(self) -> None:
        """Tell that the loop gathers gradients by itself, as it was seen to do first."""
        self._training.members.tell_how()

    def log(self, values: Mapping[str, object]) -> None:
        """Count numbers of the script's: with the step under way, or between two steps at once."""
        if self.has_ended:
            raise ElasticError("training has ended, and trainer.log() was called; call it before")
        self.steps.log(values)

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

    def wait_for_staging(self) -> None:
        """Wait until no tensor is being staged for a checkpoint: parameters and optimizer state may change."""
        if self._training.checkpoints is not None:
            self._training.checkpoints.fence()

    def tell_resharded(self, report: ReshardReport) -> None:
        """Have all parts follow a change of plan that was made, and report it."""
        self._training.members.tell_how()
        self.steps.weigh_anew()
        self._learning.forget()
        self.follower.heartbeat.note_change()
        self._training.growing.forget()
        self._training.guarding.expect_more()
        self._training.reports.tell_resharded(report)
        self._training.members.tell_resharded()

    def end(self, error: BaseException | None, *, by: str = "the trainer could not start") -> None:
        """End training with all ranks, or tell them of ``error``, an exception. Twice is allowed.

        ``by`` is what the user did, for whoever calls something that comes too late.
        """
        if self.has_ended:
            return
        self.has_ended = True
        saving = self._training.saving
        try:
            if error is not None:
                self.epochs.endless.end(error)
                self.tell_failure(error)
                if saving is not None:
                    saving.give_up_due(is_well=False)
            elif not self._is_exception_told and self.steps.torn is None:
                self.epochs.endless.end(None)
                self.steps.pass_owed_boundary()
                self.steps.drop_partial("training ended before the step did")
                self.steps.end_epoch()
                self.follower.finish(doubt=self.steps.doubt)
                if saving is not None:
                    saving.begin_due()
                    saving.end()
                    self.follower.write_metrics()  # of the checkpoint that is saved last
                self._training.reports.end_well()
        finally:
            self._let_go(by)

    def abandon(self) -> None:
        """End a training whose trainer was dropped and not closed; several ranks are not ended, as one alone cannot."""
        if self.has_ended:
            return
        saving = self._training.saving
        if saving is not None:
            saving.stop()
            is_well = not hasattr(sys, "last_value")
            if is_well and self.follower.ranks.world_size == 1 and self.steps.torn is None:
                self.epochs.endless.end(None)
            saving.give_up_due(is_well=is_well)
        if self.follower.ranks.world_size > 1:
            if saving is not None:
                saving.checkpoints.job.saver.wait_for_held()
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
            ending.callback(self._bar.end)
            ending.callback(self.epochs.endless.let_go)
            if self._training.saving is not None:
                ending.callback(self._training.saving.stop)

    def _refuse_within_step(self) -> None:
        if self.steps.torn is not None:
            raise self.steps.torn
        if self.steps.is_inside or self.steps.is_partial:
            raise StepError("a checkpoint was asked for in the middle of a step; save and load between two steps")

    def _kept(self) -> Saving:
        if self._training.saving is None:
            raise ElasticError("this trainer keeps no checkpoints; give it shared_storage_path")
        if self.has_ended:
            raise ElasticError(
                "training has ended, and its checkpoints with it; save and load within `with trainer:`, or before "
                "trainer.close()"
            )
        return self._training.saving

    def note_leaving(self) -> None:
        """Note that training ends by an exit, on all ranks: what is raised then is no failure."""
        self._is_exception_told = True

    def tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks of an exception, once; training on one rank may go on if the exception is caught."""
        if not self._is_exception_told:
            self._is_exception_told = self.follower.ranks.world_size > 1
            if self._training.saving is not None:
                self._training.saving.leave_failed(error)
            self.follower.tell_peers(error)

    def cut_as_config_says(self, config: ElasticConfig) -> None:
        """Cut steps by ``config`` for the ranks that are there, whatever others they were cut for."""
        self._batches.begin(config, num_ranks=self._gradients.sharing.num_ranks, rank=self._gradients.sharing.rank)

    def _apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        largest = self._batches.largest
        self.follower.heartbeat.note_change()
        self.cut_as_config_says(new)
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

    def take_up_config(self, config: ElasticConfig, *, saved: Mapping[str, Any] | None = None) -> None:
        """Bring batches, rates and learning in line with ``config``: at the start, after loading, after joining.

        ``saved`` is the config of a state that was loaded: loaded optimizers have the rates and decays that it names,
        also where ``config`` has the script's own again.
        """
        self.cut_as_config_says(config)
        if self._counts.reference_batch is None:
            self._counts.reference_batch = self._startup.global_batch_size
        self._follow_batch(config)
        self._learning.forget()
        self._learning.take_up(config)
        if saved is not None:
            self._training.settings.apply(ElasticConfig.from_dict(saved["config"]), config)
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
        return {**state, "config": values.to_dict(), "saved": state["config"]}

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
