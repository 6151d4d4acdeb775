"""What a trainer can be given besides its model and loader: groups of options, each of which checks itself, and when
checkpoints are due; and how many processes a launcher started.

A script imports this beside torch, so what a check needs is imported where the check is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from elastic_ext.config.lr_scaling import LEARNING_RATE_RULES, LearningRateRule
from elastic_ext.records.text import check_choice, check_flag

if TYPE_CHECKING:
    from elastic_ext.profile.memory.model_description import FactoryOrigins

__all__ = [
    "CheckpointInterval",
    "CheckpointOptions",
    "FollowOptions",
    "GuardMode",
    "LaunchSize",
    "MemoryModel",
    "Overlap",
    "Resume",
    "StepOptions",
    "WhenNotFinite",
    "WhenSaveFails",
    "WhenSaving",
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

GuardMode = Literal["auto", "always", "never"]
Overlap = Literal["auto", True, False]
Resume = Literal["auto", "strict", "never"]
WhenNotFinite = Literal["warn", "skip", "stop"]
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
        check_choice("guard", self.guard, get_args(GuardMode))
        check_choice("when_not_finite", self.when_not_finite, get_args(WhenNotFinite))
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
        from elastic_ext.fsdp.checkpoint.folder.listing import Retention
        from elastic_ext.fsdp.checkpoint.saving.staging import num_copies

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
    agree_every_steps: int | Literal["auto"] = "auto"
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
        from elastic_ext.profile.memory.model_description import factory_of

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
