"""What the library asks of torch in private is there when a trainer is made, or the trainer says what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic_ext import ElasticTrainer
from elastic_ext.errors import ElasticError
from elastic_ext.torch_private.loading import remove_shared_memory_of


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _OldReducer:
    """A reducer that cannot give a pass up."""

    def _check_reducer_finalized(self) -> None: ...


def test_what_only_a_failing_step_would_need_is_looked_for_at_once(group: None) -> None:
    replica = DistributedDataParallel(nn.Linear(2, 2))
    ElasticTrainer(replica)
    replica.reducer = _OldReducer()  # type: ignore[assignment]
    with pytest.raises(ElasticError, match="keeps _reset_state of DDP"):
        ElasticTrainer(replica)


def test_a_sharded_module_that_keeps_its_parameters_elsewhere_is_declined(group: None) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    ElasticTrainer(model)
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    for parameter in state._fsdp_param_groups[0].fsdp_params:
        del parameter.unsharded_accumulated_grad
    with pytest.raises(ElasticError, match="keeps unsharded_accumulated_grad"):
        ElasticTrainer(model)


def test_shared_memory_that_a_process_has_open_is_not_removed() -> None:
    """As where the pid of a worker that has ended is also that of a process in another container."""
    keeps_a_tensor = [sys.executable, "-c", _KEEPS_A_TENSOR]
    with subprocess.Popen(keeps_a_tensor, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file = Path("/dev/shm") / process.stdout.readline().strip()
        assert file.name.startswith(f"torch_{process.pid}_")
        remove_shared_memory_of(process.pid)
        assert file.exists()
        process.kill()
    left = Path(f"/dev/shm/torch_{process.pid}_0_test")
    with left.open("w"):
        remove_shared_memory_of(process.pid)
        assert left.exists()
    remove_shared_memory_of(process.pid)
    assert not left.exists()


def test_who_opens_shared_memory_that_is_being_removed_ends_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", _OPENED_MEANWHILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "opened meanwhile\n"), done.stderr


_OPENED_MEANWHILE = """
import os, subprocess, sys
from pathlib import Path
from elastic_ext.torch_private.loading import remove_shared_memory_of

def unlink(file):
    opening = f"import os; os.open({str(file)!r}, os.O_RDONLY | os.O_NONBLOCK)"
    said = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True).stderr
    assert "BlockingIOError" in said, said  # there was a lease, and this process was told
    os.unlink(file)
    print("opened meanwhile", flush=True)

Path.unlink = unlink
Path(f"/dev/shm/torch_{os.getpid()}_0_test").touch()
remove_shared_memory_of(os.getpid())
"""


_KEEPS_A_TENSOR = """
import os
import torch
import torch.multiprocessing as multiprocessing

multiprocessing.set_sharing_strategy("file_system")
tensor = torch.zeros(4)
tensor.share_memory_()
print(*[name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")], flush=True)
input()
"""
