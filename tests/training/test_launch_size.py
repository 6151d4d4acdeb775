"""A launcher's processes that have no process group: refused, but where each means to be alone."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_ext.training.options import LaunchSize
from tests.support.nodes import ELASTIC_RUN, TORCHRUN
from tests.support.ranks import RankPool
from tests.support.scripts import begun, forked_from
from tests.support.thinning import the_first
from tests.support.training import make_model, trainer_of

LAUNCH_SECONDS = 120.0
REFUSED = re.compile(
    r"ValueError: WORLD_SIZE is 2: a launcher has started 2 processes, and this one has no process group, so each "
    r"would train a model of its own, and save over the others' checkpoints; call "
    r"torch\.distributed\.init_process_group\(\) first, and then wrap the model with "
    r"torch\.nn\.parallel\.DistributedDataParallel or fully_shard\. "
)
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from elastic_ext import ElasticDataLoader, ElasticTrainer, FollowOptions

rank, storage = os.environ["RANK"], os.environ["STORAGE"]
if "alone" in sys.argv:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
torch.manual_seed(int(rank))
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = ElasticDataLoader(data, batch_size=4)
trainer = ElasticTrainer(model, loader, global_batch_size=8, shared_storage_path=storage,
                         follow_options=FollowOptions(job=f"alone-{rank}"))
optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
begun = trainer.global_step
with trainer:
    with trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    trainer.save_checkpoint()
print(f"rank {rank} from {begun} to {trainer.global_step}", flush=True)
"""


WITNESS = """
import json, os, sys

with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(dict(os.environ), file)
"""
LAUNCHERS = {"torchrun": TORCHRUN, "elastic-run": ELASTIC_RUN}
Environs = dict[str, list[dict[str, str]]]


def launch(launcher: str, folder: Path, source: str, *arguments: str) -> tuple[list[int], str]:
    """The status of a launch of two processes, and all that was written."""
    script = folder / "script.py"
    script.write_text(source)
    left_out = ("PET_", "ELASTIC_EXT", "TORCHELASTIC")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environ |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    environ |= {"ELASTIC_EXT_RUN_DIR": str(folder / "node"), "STORAGE": str(folder / "storage")}
    command = [*LAUNCHERS[launcher], "--standalone", "--nproc-per-node=2", str(script), *arguments]
    with begun(command, env=environ) as process:
        output, _ = process.communicate(timeout=LAUNCH_SECONDS)
        return [process.wait()], output


@pytest.fixture(scope="module")
def environs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Environs:
    """By launcher, what two processes have found in their environment that it had started."""
    found = {}
    for name in LAUNCHERS:
        folder = tmp_path_factory.mktemp(name)
        with forked_from(lambda: ranks):
            statuses, output = launch(name, folder, WITNESS, str(folder))
        assert statuses == [0], output
        found[name] = [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]
    return found


def train(launcher: str, environs: Environs, folder: Path, *arguments: str) -> tuple[list[int], str]:
    """As ``launch`` of the script, but that its processes are forked, with the launcher's environment: they need not
    import torch."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:
        processes = []
        for environ in environs[launcher]:
            process = begun([str(script), *arguments], env={**environ, "STORAGE": str(folder / "storage")})
            processes.append(process)
            stack.enter_context(process)
        outputs = [process.communicate(timeout=LAUNCH_SECONDS)[0] for process in processes]
        return [process.wait() for process in processes], "".join(outputs)


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("is_launched", the_first([False, True]), ids=["in its environment", "launched"])
def test_two_processes_without_a_process_group_are_refused_before_anything_is_saved(
    is_launched: bool, launcher: str, environs: Environs, tmp_path: Path
) -> None:
    statuses, output = launch(launcher, tmp_path, SCRIPT) if is_launched else train(launcher, environs, tmp_path)
    assert 0 not in statuses
    assert REFUSED.search(output), output
    assert not (tmp_path / "storage").exists()


@pytest.mark.usefixtures("forked_jobs")
@pytest.mark.parametrize("is_launched", the_first([False, True]), ids=["in its environment", "launched"])
def test_two_processes_each_with_a_group_of_one_train_and_resume_each_for_itself_in_the_environment_of_either_launcher(
    is_launched: bool, environs: Environs, tmp_path: Path
) -> None:
    for launcher, first in zip(LAUNCHERS, (0, 4), strict=True):
        statuses, output = (
            launch(launcher, tmp_path, SCRIPT, "alone") if is_launched else train(launcher, environs, tmp_path, "alone")
        )
        assert set(statuses) == {0}, output
        for rank in (0, 1):
            assert f"rank {rank} from {first} to {first + 4}" in output, output
    jobs = [folder.name for folder in (tmp_path / "storage" / "fsdp_checkpoint").iterdir()]
    assert {name.partition("_")[0] for name in jobs if not name.startswith(".")} == {"alone-0", "alone-1"}


@pytest.mark.parametrize(
    ("environ", "num_processes", "variable"),
    [
        ({}, 1, None),
        ({"WORLD_SIZE": "4"}, 4, "WORLD_SIZE"),
        ({"WORLD_SIZE": ""}, 1, None),
        ({"WORLD_SIZE": "many"}, 1, None),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 3, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_NTASKS": "3", "SLURM_NPROCS": "3"}, 1, None),  # the shell that salloc gives
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, 2, "PMI_SIZE"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2, "MV2_COMM_WORLD_SIZE"),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, 1, "WORLD_SIZE"),  # a launcher in each task
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2"}, 2, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_the_launcher_says_how_many_it_has_started(
    environ: dict[str, str], num_processes: int, variable: str | None
) -> None:
    size = LaunchSize.in_environment(environ)
    assert size == LaunchSize(num_processes=num_processes, variable=variable)
    refused = size.why_not_alone(has_group=False)
    assert (refused is None) is (num_processes == 1)
    assert size.why_not_alone(has_group=True) is None


def test_the_refusal_names_the_launchers_variable_and_both_ways_out() -> None:
    told = LaunchSize(num_processes=4, variable="OMPI_COMM_WORLD_SIZE").why_not_alone(has_group=False)
    assert told == (
        "OMPI_COMM_WORLD_SIZE is 4: a launcher has started 4 processes, and this one has no process group, so each "
        "would train a model of its own, and save over the others' checkpoints; call "
        "torch.distributed.init_process_group() first, and then wrap the model with "
        "torch.nn.parallel.DistributedDataParallel or fully_shard. If each is to "
        'train a model of its own, say so: torch.distributed.init_process_group("gloo", rank=0, world_size=1, '
        "store=torch.distributed.HashStore()) gives it a group of one, with a job of its own (job=...); or unset "
        "OMPI_COMM_WORLD_SIZE"
    )


def test_prepare_reads_the_environment_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS is 2: "):
        trainer.prepare(torch.optim.SGD(nn.ModuleList([model]).parameters(), lr=0.1))
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))  # nothing of the first call is left
    trainer.close()
