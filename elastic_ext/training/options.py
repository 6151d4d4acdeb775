"""What a trainer can be given, checked before anything begins: its groups of options, when checkpoints are due, the
model and its loader, and how many processes a launcher started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from elastic_ext.config.agreement import AgreementInterval
from elastic_ext.config.lr_scaling import LEARNING_RATE_RULES, LearningRateRule
from elastic_ext.fsdp.checkpoint.folder.claim import check_job
from elastic_ext.fsdp.checkpoint.folder.listing import Retention
from elastic_ext.fsdp.checkpoint.saving.staging import num_copies
from elastic_ext.profile.memory.model_description import FactoryOrigins, factory_of
from elastic_ext.records.text import check_choice, check_flag, path_given
from elastic_ext.torch_private import pipelines

from .gradients.finite import WHEN_NOT_FINITE, WhenNotFinite
from .optimizers.accelerate import Accelerated, is_prepared
from .steps.oom_guard import GuardMode

__all__ = [
    "CheckpointInterval",
    "CheckpointOptions",
    "FollowOptions",
    "LaunchSize",
    "MemoryModel",
    "Overlap",
    "Resume",
    "StepOptions",
    "WhenSaveFails",
    "WhenSaving",
    "check_checkpoints",
    "check_model",
    "check_not_prepared",
    "check_process_group",
    "check_ranks_are_joined",
    "check_samples",
    "check_scaler",
    "check_sharded",
    "check_shared",
    "check_updates",
]


# --- when a checkpoint is due, by steps or by epochs -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """Save every ``steps`` steps or every ``epochs`` epochs; with neither, never by itself."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Only one of 'steps' or 'epochs' should be set.")
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1, or None")

    def should_save(self, current_step: int | None = None, current_epoch: int | None = None) -> bool:
        """Whether the given step or epoch is a multiple of the interval, other than zero."""
        return _is_due(current_step, self.steps) or _is_due(current_epoch, self.epochs)


def _is_due(current: int | None, every: int | None) -> bool:
    return current is not None and every is not None and current > 0 and current % every == 0


# --- a trainer's groups of options, each of which checks itself ------------------------------------------------------

Overlap = Literal["auto", True, False]
Resume = Literal["auto", "strict", "never"]
WhenSaveFails = Literal["raise", "warn"]
WhenSaving = Literal["wait", "skip", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOptions:
    """How a trainer takes its steps, besides the sizes of their batches."""

    share_weights: Sequence[float] | None = None
    """Unequal parts of a step: one weight for each data-parallel rank."""
    learning_rate_rule: LearningRateRule = "none"
    """How learning rates follow a global batch that changes: "none", "linear", "sqrt", or "adascale", which measures
    how noisy gradients are."""
    rollback: Literal["gradients", "full"] = "gradients"
    """What a rollback restores besides gradients and samples: with "full", random states and buffers too."""
    sync_every_micro_step: bool = False
    """Share gradients in every micro-step instead of in a step's last one."""
    guard: GuardMode = "auto"
    """In which steps taken with ``run()`` memory may run out: "auto" (after a start, a larger micro-batch or another
    plan), "always" or "never"."""
    when_not_finite: WhenNotFinite = "warn"
    """What becomes of a step whose gradients are not finite: "warn" logs it, of the steps that are looked at; "skip"
    leaves each such step out; "stop" takes it back and raises StepError."""

    def __post_init__(self) -> None:
        check_choice("rollback", self.rollback, ("gradients", "full"))
        check_choice("learning_rate_rule", self.learning_rate_rule, LEARNING_RATE_RULES)
        check_choice("guard", self.guard, ("auto", "always", "never"))
        check_choice("when_not_finite", self.when_not_finite, WHEN_NOT_FINITE)
        check_flag("sync_every_micro_step", self.sync_every_micro_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """How a trainer saves its checkpoints, which of them it keeps, and from which one it resumes."""

    resume: Resume = "auto"
    """Which checkpoint a run begins with: "auto", the newest that is whole; "strict", the newest, or an error; "never",
    none."""
    when_save_fails: WhenSaveFails = "raise"
    """Whether a save that fails ends training ("raise") or is a warning ("warn")."""
    save_in_background: bool = True
    """Write files while training goes on."""
    keep_previous: bool = False
    """Keep the copy in memory of the previous checkpoint too."""
    when_saving: WhenSaving = "wait"
    """What becomes of a checkpoint that is due while another is being saved: "wait", "skip" or "error"."""
    overlap_saving: Overlap = "auto"
    """Whether state is copied while the next step's passes run; "auto" does so where something is free to copy."""
    save_on_signals: bool = True
    """Whether SIGTERM and SIGUSR1 end training with a checkpoint, unless the script handles them."""
    keep_last: int | None = None
    """How many of the newest checkpoints are kept; None keeps all."""
    keep_every: int | None = None
    """With ``keep_last``: the first checkpoint of every so many steps is kept too."""

    def __post_init__(self) -> None:
        check_choice("resume", self.resume, ("auto", "strict", "never"))
        check_choice("when_save_fails", self.when_save_fails, ("raise", "warn"))
        check_choice("when_saving", self.when_saving, ("wait", "skip", "error"))
        check_choice("overlap_saving", self.overlap_saving, ("auto", True, False))
        check_flag("save_on_signals", self.save_on_signals)
        check_flag("save_in_background", self.save_in_background)
        check_flag("keep_previous", self.keep_previous)
        Retention(keep_last=self.keep_last, keep_every=self.keep_every)  # ValueError for what cannot be
        num_copies(in_background=self.save_in_background, keep_previous=self.keep_previous)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowOptions:
    """How a run is followed: by its ranks, who agree on its config file, and by people, who see its progress.

    What is None comes from the environment (``ELASTIC_EXT_*``).
    """

    config_file: str | Path | None = None
    """The config file; by default ``config.json`` in the run directory."""
    agree_every_steps: AgreementInterval = "auto"
    """Steps between two agreements of the ranks; "auto" measures what an agreement costs."""
    job: str | None = None
    """The job's name, which names its folder of checkpoints and its run directory; by default the script's."""
    run_dir: str | Path | None = None
    """The run directory, for files of this node."""
    timeout_seconds: float | None = None
    """How long a rank waits for the others."""
    progress: bool | None = None
    """Whether rank 0 shows a progress bar; by default where it writes to a terminal. There it also shows a line at the
    start, unless this is False or the script has set up logging."""

    def __post_init__(self) -> None:
        check_choice("progress", self.progress, (True, False, None))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Functions by which another process computes how much memory other micro-batches would take.

    Both are at the top of a module, where that process can import them. A batch is what the dataloader gives, or what
    ``trainer.run()`` gives its function.
    """

    model_factory: Callable[[], nn.Module] | None = None
    """Makes a model like the one that is trained."""
    loss_fn: Callable[..., torch.Tensor] | None = None
    """``loss_fn(outputs, batch)`` gives the loss, where the model itself does not."""

    def __post_init__(self) -> None:
        self.factory()

    def factory(self) -> FactoryOrigins | None:
        """Names by which another process imports the functions; None where none were given, ValueError if it cannot."""
        return factory_of(self.model_factory, self.loss_fn)


# --- how many processes a launcher has started, as it says in their environment --------------------------------------

_VARIABLES = (
    "WORLD_SIZE",  # torchrun, elastic-run, accelerate launch, deepspeed
    "SLURM_STEP_NUM_TASKS",  # srun; SLURM_NTASKS is there in the shell of a plain salloc too
    "OMPI_COMM_WORLD_SIZE",  # mpirun of Open MPI
    "PMI_SIZE",  # mpirun of MPICH and Intel MPI
    "MV2_COMM_WORLD_SIZE",  # mpirun of MVAPICH
)
"""The variables in which launchers say how many processes they start.

The first that is set counts: a launcher that runs within another's job says its own number.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSize:
    """How many processes were started together with this one."""

    num_processes: int = 1
    variable: str | None = None
    """The variable of the environment that gives the number; None where none does."""

    @classmethod
    def in_environment(cls, environ: Mapping[str, str]) -> LaunchSize:
        """The number of processes that the launcher has put into the environment; 1 where it has not."""
        for name in _VARIABLES:
            value = environ.get(name, "").strip()
            if value.isdecimal():
                return cls(num_processes=int(value), variable=name)
        return cls()

    def why_not_alone(self, *, has_group: bool) -> str | None:
        """Why a process must not train as if it were the only one, None where it may; ``has_group`` says that it has a
        process group, be it one of its own."""
        if self.num_processes <= 1 or has_group:
            return None
        return (
            f"{self.variable} is {self.num_processes}: a launcher has started {self.num_processes} processes, and this "
            "one has no process group, so each would train a model of its own, and save over the others' checkpoints; "
            "call torch.distributed.init_process_group() first, and then wrap the model with "
            "torch.nn.parallel.DistributedDataParallel or fully_shard. If each is to train a model of its own, say so: "
            'torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore()) '
            f"gives it a group of one, with a job of its own (job=...); or unset {self.variable}"
        )


# --- what a trainer can be given, checked before anything begins -----------------------------------------------------

_MOST_NAMES = 4
_UPDATED_IN_BACKWARD = (
    "parameters of the model are updated within backward (_apply_optimizer_in_backward), in every micro-step, before "
    "the step has all its gradients; make an optimizer of its own for each parameter instead, give all of them to "
    "prepare(), and call those that it returns from register_post_accumulate_grad_hook; or step one optimizer after "
    "backward"
)


def check_checkpoints(interval: CheckpointInterval | None, path: str | Path | None, *, job: str | None) -> None:
    """ValueError where checkpoints cannot go to ``path``, or are due and have none."""
    if interval is not None and not isinstance(interval, CheckpointInterval):
        raise ValueError(f"checkpoint_interval is {interval!r}; allowed: a CheckpointInterval, or None")
    if path is not None:
        path_given("shared_storage_path", path)
        if job is not None:
            check_job(job)
    if interval is not None and path is None:
        raise ValueError("checkpoint_interval was given without shared_storage_path; say where checkpoints go")


def check_model(model: object, *, accelerator: object) -> None:
    parts = list(model.modules()) if isinstance(model, nn.Module) else [model]
    if any(map(pipelines.are_in_use, parts)):
        raise NotImplementedError(pipelines.REFUSED.format(f"model is a {type(model).__name__}"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    if accelerator is None:
        check_not_prepared(model)


def check_sharded(model: nn.Module) -> None:
    """Raise where the model is not sharded, though the trainer was told that it is."""
    if not any(isinstance(part, (FSDPModule, FullyShardedDataParallel)) for part in model.modules()):
        raise ValueError(
            "use_fsdp is True and the model is not sharded; call fully_shard(model) before ElasticTrainer is made, or "
            'trainer.parallelize(model, ParallelPlan(strategy="full_shard")) before prepare(); or leave use_fsdp out'
        )


def check_samples(loader: object, *, num_replicas: int, rank: int, num_parts: int) -> None:
    """Raise where a sampler would give the ranks of one replica different samples."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)
    given = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if num_parts > 1 and None not in given and given != (num_replicas, rank):
        raise ValueError(
            f"the dataloader's sampler has num_replicas={given[0]} and rank={given[1]}, and the model is spread over "
            f"{num_parts} ranks, which take the same samples; give the sampler num_replicas={num_replicas} and "
            f"rank={rank} (trainer.data_parallel_size and trainer.data_parallel_rank)"
        )


def check_scaler(scaler: object, model: nn.Module) -> None:
    """Raise where a scaler would see the infinities of one rank alone."""
    is_flat = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    if is_flat and scaler is not None and not isinstance(scaler, ShardedGradScaler):
        raise ValueError(
            f"scaler is a {type(scaler).__name__}; allowed with FSDP1: a ShardedGradScaler "
            "(torch.distributed.fsdp.sharded_grad_scaler), which hears of infinities on other ranks"
        )


def check_not_prepared(*things: object) -> None:
    """Raise where accelerate has prepared one of ``things``, as the trainer was not told by which accelerator."""
    for thing in things:
        if is_prepared(thing):
            raise ValueError(
                f"accelerate has prepared the {type(thing).__name__}, and would divide losses and count steps beside "
                "the trainer; give ElasticTrainer(..., accelerator=accelerator)"
            )


def check_process_group(launched: LaunchSize) -> None:
    """Raise where a launcher has started several processes, and this one trains by itself."""
    why_not = launched.why_not_alone(has_group=dist.is_available() and dist.is_initialized())
    if why_not is not None:
        raise ValueError(why_not)


def check_ranks_are_joined(*, num_replicas: int, num_parts: int, accelerated: Accelerated | None = None) -> None:
    """Raise where some ranks would train a model of their own: the replicas, of ``num_parts`` ranks, are not all."""
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_ranks != num_replicas * num_parts:
        if num_replicas == num_parts == 1:
            advice = (
                "wrap it with torch.nn.parallel.DistributedDataParallel or fully_shard before it is given to "
                "ElasticTrainer"
                if accelerated is None
                else "give ElasticTrainer what accelerator.prepare(model) returns"
            )
            raise ValueError(
                f"the model is not wrapped, and there are {num_ranks} ranks: each would train a model of its own; "
                f"{advice}"
            )
        raise ValueError(
            f"the model has {num_replicas} replicas that share gradients, of {num_parts} ranks each, and there are "
            f"{num_ranks} ranks: the others would train a model of their own; wrap it over all ranks"
        )
    if accelerated is not None and accelerated.num_ranks != num_replicas:
        raise ValueError(
            f"the accelerator cuts its loaders for {accelerated.num_ranks} ranks, and the model averages its gradients "
            f"over {num_replicas}; make the accelerator where ranks are joined, and have it prepare the model"
        )


def check_shared(
    model: nn.Module,
    groups: Iterable[Mapping[str, Any]],
    *,
    left_out: Callable[[Iterable[torch.Tensor]], Sequence[torch.Tensor]],
    how: str,
) -> None:
    """Raise where optimizers train parameters whose gradients nothing averages over the ranks.

    ``groups`` are the optimizers' parameter groups, ``left_out`` gives the parameters that are not averaged, and
    ``how`` names the way in which the others are.
    """
    trained = dict.fromkeys(part for group in groups for part in group["params"] if part.requires_grad)
    alone = left_out(trained)
    if not alone:
        return
    names = {id(part): name for name, part in model.named_parameters()}
    told = [names.get(id(part), f"one of shape {tuple(part.shape)} that is not the model's") for part in alone]
    more = f" and {len(told) - _MOST_NAMES} more" if len(told) > _MOST_NAMES else ""
    raise ValueError(
        f"parameters that an optimizer trains lie outside of {how}: {', '.join(told[:_MOST_NAMES])}{more}; nothing "
        "averages their gradients, and each rank would train its own; wrap the whole model, in an nn.ModuleDict with "
        "what else is trained, and then make the optimizer; or average them by register_post_accumulate_grad_hook"
    )


def check_updates(model: nn.Module) -> None:
    """Raise where parameters are updated within backward, or the model is a stage of a pipeline."""
    if any(getattr(part, "_in_backward_optimizers", None) for part in model.parameters()):
        raise ValueError(_UPDATED_IN_BACKWARD)
    if pipelines.has_stage_of({id(part) for part in model.modules()}):
        raise ValueError(pipelines.REFUSED.format("the model is a stage of a pipeline"))
