"""LaunchSize: how many processes a launcher has started, as it says in their environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LaunchSize"]

_VARIABLES = (
    "WORLD_SIZE",  # torchrun, elastic-run, accelerate launch, deepspeed
    "SLURM_STEP_NUM_TASKS",  # srun; SLURM_NTASKS is there in the shell of a plain salloc too
    "OMPI_COMM_WORLD_SIZE",  # mpirun of Open MPI
    "PMI_SIZE",  # mpirun of MPICH and Intel MPI
    "MV2_COMM_WORLD_SIZE",  # mpirun of MVAPICH
)
"""The first of them that is there counts: a launcher that runs within another's job says its own number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSize:
    """How many processes were started together with this one."""

    num_processes: int = 1
    variable: str | None = None
    """Which variable of the environment says so; None where none does."""

    @classmethod
    def in_environment(cls, environ: Mapping[str, str]) -> LaunchSize:
        """As the launcher of this process says."""
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
