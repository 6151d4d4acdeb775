"""ElasticTrainer: the user's own loop, in steps that commit or never happened, and that every rank takes alike.

    trainer = ElasticTrainer(model, dataloader, global_batch_size=256)
    with trainer:
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        for epoch in range(trainer.start_epoch, num_epochs):
            with trainer.epoch(epoch):
                for inputs, targets in dataloader:
                    with trainer.step():
                        loss = loss_of(model(inputs), targets)
                        loss.backward()
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()

Words: a *micro-step* is one ``with trainer.step():``, one micro-batch. A *step* is A micro-steps and ends at a
*boundary*. At most boundaries the optimizer steps and the step *commits*; a boundary without a commit consumes the
step's samples, and neither ``global_step`` nor a schedule moves on. **B** is the *global batch*: the samples of a step
over all ranks; **b** the *micro-batch*; **W** the data-parallel degree, which is not always the number of ranks.
``global_step`` counts commits since training began, ``num_steps`` since ``reset()``.

A script imports this beside torch, and may not train at all: what a trainer is made of is imported as one is made.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_ext.errors import ElasticError, StepError
from elastic_ext.records.text import check_flag

from .options import CheckpointInterval, CheckpointOptions, FollowOptions, MemoryModel, StepOptions

if TYPE_CHECKING:
    from elastic_ext.config.apply import Proposal
    from elastic_ext.config.elastic_config import ElasticConfig
    from elastic_ext.fsdp.blocks import Units
    from elastic_ext.fsdp.plan import ParallelPlan
    from elastic_ext.profile.output import Sink
    from elastic_ext.ranks.world import World

    from .epochs import TrainingEpochs
    from .members import MembersChange
    from .optimizers.amp import ElasticScaler
    from .optimizers.optimizer import ElasticLRScheduler, ElasticOptimizer
    from .parallelism import ReshardReport
    from .session import Session
    from .steps.steps import Steps

__all__ = ["NOT_PREPARED", "ElasticTrainer", "Epoch", "Mutating", "NotPrepared", "OwnStep"]


# --- what ``with trainer.step()`` and ``with trainer.epoch()`` enter, where it is not the steps themselves -----------

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

NOT_PREPARED = "prepare() was not called; call it with the optimizer, on every rank, before the loop"


class OwnStep:
    """The context of ``with trainer.step(fix_total_batch_size=False):``, where every micro-step commits."""

    def __init__(self, steps: Steps | NotPrepared) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps.keep_batch = False
        try:
            self._steps.__enter__()
        finally:
            self._steps.keep_batch = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._steps.__exit__(kind, error, trace)


class NotPrepared:
    """The context of ``with trainer.step():`` before ``prepare()``, which raises."""

    keep_batch = True

    def __enter__(self) -> None:
        raise ElasticError(NOT_PREPARED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _in_a_sentence(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``method``; of an error that says all, what shows is the script's own line and the sentence."""

    @functools.wraps(method)
    def called(*given: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return method(*given, **named)
        except ElasticError as error:
            if not error.says_all:
                raise
            raise error.with_traceback(None) from error.__cause__

    return called


class Epoch:
    """The context of ``with trainer.epoch():``; entering it gives the epoch's number."""

    def __init__(self, epochs: TrainingEpochs, epoch: int | None) -> None:
        self._epochs = epochs
        self._epoch = epoch

    @_in_a_sentence
    def __enter__(self) -> int:
        return self._epochs.enter(self._epoch)

    @_in_a_sentence
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._epochs.end(error)


class Mutating:
    """The context of ``with trainer.mutate():``; entering it waits until staging is done."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.wait_for_staging()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# --- the user's own loop, in steps that commit or never happened, and that every rank takes alike --------------------

_Default = TypeVar("_Default")


class ElasticTrainer:
    """Steps with a global batch that keeps its size, and a config that changes between them.

    ``dataloader`` is the loop's own; with ``global_batch_size`` its batches (or ``micro_batch_size``, where there is no
    dataloader) are gathered until they make a step. Every rank makes the same calls.

    ``use_fsdp`` makes sure that the model is sharded by ``prepare()``, by ``fully_shard`` or by ``parallelize()``. With
    ``shared_storage_path`` a run resumes from the newest checkpoint there, saves by ``checkpoint_interval``, and ends
    with a checkpoint at SIGTERM or SIGUSR1. The interval is an epoch by default; with ``CheckpointInterval()`` nothing
    is saved by itself. ``accelerator`` is the one that has prepared the model, if one has.

    Everything else is in values that check themselves: how steps are taken (``StepOptions``), how checkpoints are saved
    and kept (``CheckpointOptions``), the config file, the job's name and its run directory (``FollowOptions``), and
    functions by which memory is predicted (``MemoryModel``).
    """

    def __init__(
        self,
        model: nn.Module,
        dataloader: Any = None,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        use_fsdp: bool = False,
        shared_storage_path: str | Path | None = None,
        checkpoint_interval: CheckpointInterval | None = None,
        accelerator: Any = None,
        step_options: StepOptions | None = None,
        checkpoint_options: CheckpointOptions | None = None,
        follow_options: FollowOptions | None = None,
        memory_model: MemoryModel | None = None,
    ) -> None:
        from elastic_ext.fsdp.reshard.sharded_model import Spread
        from elastic_ext.profile.memory.questions import refuse_in_analysis

        from .batches import Batches
        from .checkpoints.checkpoints import CheckpointRequest
        from .checks import check_checkpoints, check_model
        from .gradients.gradients import Gradients
        from .optimizers.accelerate import Accelerated
        from .steps.state import StepState
        from .training import Training

        steps = _options_of("step_options", step_options, StepOptions)
        following = _options_of("follow_options", follow_options, FollowOptions)
        saving = _options_of("checkpoint_options", checkpoint_options, CheckpointOptions)
        factory = _options_of("memory_model", memory_model, MemoryModel).factory()
        check_flag("use_fsdp", use_fsdp)
        check_checkpoints(checkpoint_interval, shared_storage_path, job=following.job)
        refuse_in_analysis(os.environ)
        check_model(model, accelerator=accelerator)
        state = StepState()
        self._training = Training(
            model=model,
            accelerated=None if accelerator is None else Accelerated(accelerator),
            is_sharded=use_fsdp,
            options=steps,
            following=following,
            request=CheckpointRequest(
                storage=None if shared_storage_path is None else Path(shared_storage_path).absolute(),
                job=following.job,
                interval=CheckpointInterval(epochs=1) if checkpoint_interval is None else checkpoint_interval,
                options=saving,
            ),
            factory=factory,
            state=state,
            gradients=Gradients(model, state),
            spread=Spread(model, num_local=_num_local()),
            batches=Batches(
                dataloader,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                share_weights=None if steps.share_weights is None else tuple(steps.share_weights),
            ),
        )
        self._model, self._batches = model, self._training.batches
        self._counts, self._gradients = self._training.counts, self._training.gradients
        self._session: Session | None = None  # until prepare()
        self._micro_step: Steps | NotPrepared = NotPrepared()

    # ---- setting up ----

    def parallelize(self, model: nn.Module, plan: ParallelPlan, units: Units = None) -> nn.Module:
        """Spread the trainer's model over all ranks by ``plan``; gives the same object, with rank 0's values on all.

        All ranks call this, before optimizers are made of its parameters. ``units`` are its repeated blocks: a class of
        modules, names, or those that are found.
        """
        from elastic_ext.fsdp.reshard.sharded_model import Spread

        from .members import plan_until_joined, version_to_join

        if model is not self._model:
            raise ValueError(f"model is another {type(model).__name__} than ElasticTrainer was given; give it the same")
        if self._session is not None:
            raise ElasticError("parallelize() comes before prepare(); after it trainer.reshard(plan) changes the plan")
        if self._training.is_sharded and plan.is_replicated:
            raise ValueError(
                "use_fsdp is True, and no_shard shards nothing; choose another strategy, hybrid_shard with "
                "shard_degree=1 for whole copies, or leave use_fsdp out"
            )
        spread = Spread(model, units, num_local=_num_local())
        spread.put_on(plan_until_joined(plan, spread.num_ranks) if version_to_join(os.environ) else plan)
        self._training.spread = spread
        self._gradients.take_up(spread.engine)
        return model

    def reshard(self, plan: ParallelPlan, reason: str = "trainer.reshard()") -> Proposal:
        """Ask for another plan; all ranks agree on it at one of the next boundaries. On one rank or on all.

        What is given back says what becomes of it, ``reshard_report`` what it has cost.
        """
        from .parallelism import values_of

        if self._prepared and self._training.spread.plan is None:
            raise ElasticError(self._training.why_not_reshard)
        return self.propose(values_of(plan), reason)

    @property
    def reshard_report(self) -> ReshardReport | None:
        """What the last change of plan has done and cost; None before the first."""
        parallelism = self._training.parallelism
        return None if parallelism is None else parallelism.report

    @overload
    def prepare(self, optimizer: Optimizer) -> ElasticOptimizer: ...
    @overload
    def prepare(self, optimizer: Sequence[Optimizer]) -> list[ElasticOptimizer]: ...
    @overload
    def prepare(
        self, optimizer: Optimizer, lr_scheduler: LRScheduler
    ) -> tuple[ElasticOptimizer, ElasticLRScheduler]: ...
    @overload
    def prepare(
        self, optimizer: Optimizer, lr_scheduler: LRScheduler, scaler: torch.amp.GradScaler
    ) -> tuple[ElasticOptimizer, ElasticLRScheduler, ElasticScaler]: ...
    @overload
    def prepare(
        self, optimizer: Optimizer, *, scaler: torch.amp.GradScaler
    ) -> tuple[ElasticOptimizer, ElasticScaler]: ...
    @overload
    def prepare(
        self, optimizer: Sequence[Optimizer], lr_scheduler: Sequence[LRScheduler]
    ) -> tuple[list[ElasticOptimizer], list[ElasticLRScheduler]]: ...
    @overload
    def prepare(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any: ...
    @_in_a_sentence
    def prepare(self, optimizer: Any, lr_scheduler: Any = None, scaler: Any = None) -> Any:
        """Join the other ranks, and return what takes part in the steps: as many values as were given, in this order.

        Several optimizers, or schedulers, come and go as a list; one ``torch.amp.GradScaler`` is for all of them. All
        ranks call this, once.
        """
        from elastic_ext.members.plan import JOINS

        from .prepare import prepare

        if self._session is not None:
            raise ElasticError("prepare() was called before; give it all optimizers and schedulers at once")
        prepare(self._training, optimizer, lr_scheduler, scaler, environ=os.environ, on_world=_note_world)
        os.environ.pop(JOINS, None)  # done, and no other trainer of this process is to join
        self._session = session = self._training.session
        weakref.finalize(self, session.abandon)  # a notebook's cell, run again, or a script that closes nothing
        self._micro_step = self._training.steps  # one object for all: making one costs more than entering it
        return self._training.prepared.values

    def register_state(self, name: str, tensors: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """Have ``state_dict()`` hold these tensors too, and a full rollback put them back; changed in place.

        When the model's plan changes, those that are sharded move along, and so do plain ones that have a parameter's
        name and shape when the model comes to be sharded. Between ``no_shard`` and a sharded plan they become other
        tensors: a dict is kept as it was given, and has them. A tensor by itself does not go between these.
        """
        from .checkpoints.state import claim_registered

        if name in self._training.registered:
            raise ValueError(f"{name!r} is registered already; give each state a name of its own")
        held: Mapping[str, torch.Tensor] = MappingProxyType({"": tensors} if isinstance(tensors, torch.Tensor) else {})
        if not isinstance(tensors, torch.Tensor):
            held = tensors if isinstance(tensors, MutableMapping) else MappingProxyType(dict(tensors))
        claim_registered(name, held, self._training.unclaimed)
        self._training.registered[name] = held

    @_in_a_sentence
    def save_checkpoint(self) -> Path:
        """Save a checkpoint now, unless one holds just this; gives its folder. All ranks call this between steps."""
        return self._prepared.save_checkpoint()

    def model_state_dict(self) -> dict[str, Any]:
        """The model's whole ``state_dict()`` on rank 0, by the bare model's names; an empty dict on other ranks.

        All ranks call this between two steps, or after the last one, however the model is sharded or wrapped. The
        tensors are copies, on the CPU.
        """
        return self._prepared.model_state_dict()

    def evaluation(self) -> AbstractContextManager[None]:
        """``with trainer.evaluation():`` around what may take long between two steps, and is no hang for that.

        On one rank or on all; between two epochs, and before the first step, there is no need of it.
        """
        return self._prepared.evaluation()

    def mutate(self) -> AbstractContextManager[None]:
        """``with trainer.mutate():`` around changes in place of parameters or optimizer state within a step.

        A checkpoint may be copied while a step's passes run, and the optimizer's step waits for that; so does this.
        """
        return Mutating(self._prepared)

    @_in_a_sentence
    def rewind(self, step: int | None = None, *, skip_samples: bool = False) -> Path:
        """Go back to the checkpoint of ``step``, or to the newest before the present step; gives its folder.

        All ranks call this between two steps. The samples since then come again, in the same loop over a dataloader
        that can do that; with ``skip_samples`` they do not, and the loop goes on where it is. The config in force
        stays; what was proposed before this call is decided on, and in force from the next step. A step that was torn
        because an optimizer failed on all ranks is mended.
        """
        check_flag("skip_samples", skip_samples)
        return self._prepared.rewind(step, skips=skip_samples)

    def _save_fsdp_state(self) -> Path:
        return self._prepared.save_checkpoint()

    def _load_fsdp_state(self) -> bool:
        """Go on from the newest checkpoint, as ``prepare`` does, even with ``resume="never"``; whether there is one."""
        return self._prepared.load_checkpoint()

    # ---- the loop ----

    def epoch(self, epoch: int | None = None) -> AbstractContextManager[int]:
        """``with trainer.epoch(e):`` around the loop over the dataloader; by default the epoch after the last one."""
        return Epoch(self._prepared.epochs, epoch)

    def batches(self, *, max_steps: int | None = None) -> Generator[Any, None, None]:
        """The dataloader's batches, epoch after epoch, for loops that count steps; epochs begin and end by themselves.

        The batches end once ``max_steps`` steps have committed, those of earlier runs included, and where some rank has
        asked to stop. A second call goes on where the loop before was left. All ranks take batches alike.
        """
        return self._prepared.epochs.endless.batches(max_steps)

    def step(self, fix_total_batch_size: bool = True) -> AbstractContextManager[None]:
        """``with trainer.step():`` around the work on one micro-batch; False makes every micro-step commit."""
        return self._micro_step if fix_total_batch_size else OwnStep(self._micro_step)

    def run(
        self, function: Callable[_Arguments, _Result], /, *given: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result | None:
        """``with trainer.step(): return function(...)``, which comes again where memory does not suffice for it.

        Then all ranks take the step back, the dataloader hands out the same samples in micro-batches half as large, and
        this gives None. What is made in ``function`` may not be kept outside of it.
        """
        if self._session is None:
            raise ElasticError(NOT_PREPARED)
        return self._training.attempts.run(function, given, named)

    def micro_step(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result | None]:
        """A decorator: the function's every call is ``trainer.run(function, ...)``."""

        @functools.wraps(function)
        def taken(*given: _Arguments.args, **named: _Arguments.kwargs) -> _Result | None:
            return self.run(function, *given, **named)

        return taken

    def try_grow(self) -> Proposal:
        """Ask for micro-batches twice as large; in force at one of the next boundaries. On one rank or on all.

        Where memory does not suffice for them, a step taken with ``run()`` comes again in smaller ones; what did not
        fit is not asked for again while the model's plan stays, and refused here.
        """
        if self._session is None:
            raise ElasticError(NOT_PREPARED)
        return self._training.growing.try_grow()

    def backward(self, loss: torch.Tensor, *, num_items: float | torch.Tensor | None = None, **options: Any) -> None:
        """Call ``loss.backward(**options)``, weighed exactly whatever the loss was computed from.

        With ``num_items``, ``loss`` is a sum over so many items of this micro-batch, such as tokens; the step's
        gradient is the mean over the items of all its micro-batches on all ranks.
        """
        if not self._training.state.phase.is_inside:
            raise StepError("trainer.backward() was called outside of `with trainer.step():`; call it inside")
        if self._training.accelerated is not None:
            loss = self._training.accelerated.scaled(loss)
        self._gradients.backward(loss, num_items, **options)

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor | None:
        """``torch.nn.utils.clip_grad_norm_`` in the micro-step that ends a step; nothing, and None, in the others.

        The norm is that of the whole model, however it is spread over ranks.
        """
        if not self._training.state.phase.is_last:
            return None
        if self._training.accelerated is not None:
            self._training.accelerated.unscale()
        return self._gradients.clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def log(self, /, **values: float | torch.Tensor) -> None:
        """Have numbers of your own, such as ``loss=loss``, shown wherever the library shows metrics, as means of steps.

        Each is a number or a tensor of one element, which stays on its device. Within a step a number counts once the
        step commits; between two steps it counts at once. On all ranks or on some: the mean is over those that log it.
        """
        self._prepared.log(values)

    def rollback(self) -> None:
        """Undo the micro-steps since the last boundary, as an exception would; on every rank or on none."""
        self._prepared.steps.rollback()

    @_in_a_sentence
    def reset(self) -> None:
        """Begin counting ``num_steps`` from zero, and the dataloader's batches too: a new epoch."""
        self._prepared.epochs.reset()

    @overload
    def knob(self, name: str) -> Any: ...
    @overload
    def knob(self, name: str, default: _Default) -> _Default: ...
    def knob(self, name: str, default: Any = None) -> Any:
        """The value in force of a name of your own (``user`` in the config), or of a key of the table."""
        return self._prepared.follower.knob(name, default)

    def on_change(
        self,
        section: str,
        apply: Callable[[ElasticConfig, ElasticConfig], None],
        check: Callable[[ElasticConfig], str | None] | None = None,
    ) -> None:
        """Call ``apply(old, new)`` whenever ``section`` changes; ``check(new)`` may give a reason to refuse it.

        Before ``prepare()``, which takes up the config file that is there, or later.
        """
        if self._session is None:
            self._training.appliers.append((section, apply, check))
        else:
            self._session.follower.on_change(section, apply, check)

    def on_members(self, function: Callable[[MembersChange], object]) -> None:
        """Call ``function(change)`` after each change of members, which processes live through; on the ranks of then.

        For scripts that keep ranks, a number of ranks or process groups of their own, which have ended by then: the
        function makes such groups anew, on all ranks alike. Called before ``prepare()``: within it a worker that
        joins calls its functions with the others.
        """
        self._training.on_members.append(function)

    def propose(self, changes: Mapping[str, object], reason: str) -> Proposal:
        """Ask for a change of the config from inside the job: dotted keys and values. On one rank or on all."""
        return self._prepared.follower.propose(changes, reason)

    def add_sink(self, sink: Sink) -> None:
        """Have ``sink`` told where the time of the steps to come goes; it is written to on rank 0 alone.

        All ranks may call this, before ``prepare()`` or later. The sink is closed when training ends.
        """
        self._training.sinks.add(sink)

    def request_stop(self) -> None:
        """Have ``should_stop`` be true on all ranks after one of the next boundaries. Any rank may call it."""
        self._prepared.follower.request_stop()

    # ---- what is known ----

    @property
    def global_step(self) -> int:
        """Steps that committed since training began."""
        return self._counts.global_step

    @property
    def num_steps(self) -> int:
        """Steps that committed since ``reset()`` or the beginning of the epoch."""
        return self._counts.num_steps

    @property
    def step_was_undone(self) -> bool:
        """Whether the step that the loop left last was undone, as members have changed, and its samples come again.

        So it is where ranks are lost and the others go on, and in the step as which members come or leave. What stands
        behind ``with trainer.step():`` may ask for it, before it uses what was made in the step.
        """
        return self._prepared.steps.was_undone

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of the step under way, or of the one that ended last."""
        return self._prepared.steps.num_micro_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-step under way ends a step; between steps, whether the last one has ended."""
        return self._prepared.steps.is_committing

    @property
    def global_batch_size(self) -> int | None:
        """Samples per step over all ranks; None where every micro-step commits."""
        return self._batches.global_batch

    @property
    def data_parallel_size(self) -> int:
        """W: how many replicas of the model share gradients."""
        return self._gradients.sharing.num_ranks

    @property
    def data_parallel_rank(self) -> int:
        """The index of the replica that this rank belongs to; ranks of one replica take the same samples."""
        return self._gradients.sharing.rank

    @property
    def start_epoch(self) -> int:
        """The epoch to begin with: 0, where a loaded state was, or where training is that went back past samples."""
        return self._counts.start_epoch

    @property
    def should_stop(self) -> bool:
        """Whether some rank asked to stop; the same on every rank."""
        return self._session is not None and self._session.should_stop

    @property
    def config(self) -> ElasticConfig:
        """The config in force."""
        return self._prepared.follower.config

    def describe(self) -> str:
        """What this trainer holds, a line each: job, model, batch, steps so far, config, checkpoints. On any rank."""
        from .description import description

        return description(self._training, is_prepared=self._session is not None)

    def __repr__(self) -> str:
        job = "not prepared" if self._session is None else f"job {self._session.follower.settings.job!r}"
        return f"ElasticTrainer({type(self._model).__name__}, {job}, {self._counts.global_step} steps)"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows of a cell that ends with the trainer."""
        printer.text(repr(self) if cycle else self.describe())

    # ---- keeping, ending ----

    def state_dict(self) -> dict[str, Any]:
        """Counters and the config in force as plain values, and the registered tensors; the same on every rank."""
        return {
            **self._counts.state_dict(),
            "config": self._prepared.follower.state_dict(),
            "registered": {name: dict(tensors) for name, tensors in self._training.registered.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state_dict`` gave; on all ranks, before ``prepare`` or before the first step.

        The optimizer and the scheduler load their own states, in any order.
        """
        from .checkpoints.state import fill_registered

        self._counts.load_state_dict(state)  # first: rates follow the batch that it names
        if self._session is not None:
            self._session.resume(state["config"])
        self._training.loaded_config = state["config"]
        for name, tensors in state["registered"].items():
            if name in self._training.registered:
                fill_registered(name, self._training.registered[name], tensors)
            else:
                self._training.unclaimed[name] = tensors

    @_in_a_sentence
    def close(self) -> None:
        """End training: make sure that all ranks took as many steps, and stop following. Twice is allowed.

        Called while an exception is handled, it waits for nobody and tells the other ranks of it.
        """
        if self._session is not None:
            self._session.end(sys.exc_info()[1], by="trainer.close() was called")

    def __enter__(self) -> ElasticTrainer:
        return self

    @_in_a_sentence
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            by = "`with trainer:` has ended" if error is None else "an exception has left `with trainer:`"
            self._session.end(error, by=by)

    @property
    def _prepared(self) -> Session:
        if self._session is None:
            raise ElasticError(NOT_PREPARED)
        return self._session


def _options_of(name: str, value: _Default | None, kind: type[_Default]) -> _Default:
    """``value``, or the options of that kind that hold by default; ValueError for anything else."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; allowed: {kind.__name__}(...), or None")
    return value


def _num_local() -> int:
    """How many ranks share this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _note_world(world: World) -> None:
    """Have the environment say what this rank is now, where a launcher has said it: other code goes by that."""
    for name, number in (("RANK", world.rank), ("WORLD_SIZE", world.size)):
        if name in os.environ:
            os.environ[name] = str(number)
