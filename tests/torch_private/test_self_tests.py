"""What this torch keeps in private is where the library looks for it, each subsystem by its self-test, and every module
can be imported beside it. `make test-torch` runs this with another torch; the one that is installed here has all of it.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elastic_ext
from elastic_ext.fsdp.reshard import ddp
from elastic_ext.fsdp.reshard import fully_shard as units
from elastic_ext.profile.memory import analysis
from elastic_ext.torch_private import engine, gradients, loading, loss_graph, meshes, module_hooks, sharded, sockets

ALONE = ("__main__", "sitecustomize")
"""Last names of modules that are programs: to import one is to run it."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_module_can_be_imported() -> None:
    names = [each.name for each in pkgutil.walk_packages(elastic_ext.__path__, "elastic_ext.")]
    assert len(names) > 200
    for name in names:
        if name.rpartition(".")[2] not in ALONE:
            importlib.import_module(name)


def test_the_engine_tells_of_passes_and_what_they_add_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine.Engine()
    assert not caplog.text
    assert engine.tells_of_passes() and engine.current_pass() == -1
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(engine.current_pass()))  # type: ignore[no-untyped-call]
    leaf.sum().backward()  # type: ignore[no-untyped-call]
    assert seen and seen[0] >= 0


def test_a_hook_alone_can_be_left_to_no_compiler() -> None:
    import torch._dynamo  # as a model that is compiled has it imported

    called: list[Any] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(module_hooks.skipped_by_compiler(lambda *given: called.append(given)))
    before = module_hooks.num_graphs_compiled()
    torch.compile(lambda value: model(value) + 1, backend="eager")(torch.ones(1, 2))
    assert callable(torch._dynamo.eval_frame.skip_code) and called and module_hooks.num_graphs_compiled() > before


def test_graphs_say_how_a_loss_was_made() -> None:
    assert loss_graph.reads_graphs()


def test_the_loader_has_the_loop_that_workers_run() -> None:
    assert callable(loading.private_parts().worker_loop)


def test_memory_is_told_without_taking_it() -> None:
    assert analysis.why_not_fake() is None


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # as it does on one rank
def test_models_that_are_wrapped_keep_what_steps_and_checkpoints_look_for(group: None) -> None:
    replica, mesh = DistributedDataParallel(nn.Linear(2, 2)), init_device_mesh("cpu", (1,))
    flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    unit = nn.Linear(2, 2)
    fully_shard(unit, mesh=mesh)
    wrapped: list[nn.Module] = [replica, flat, unit]
    for part in wrapped:
        gradients.make_sure_of(part)
        part(torch.ones(1, 2)).sum().backward()
        gradients.make_sure_of(part)
    assert isinstance(unit, FSDPModule)
    gradients.forget_step(unit)
    assert gradients.can_take_back_passes() == (torch.__version__ >= "2.13")
    assert [part.shape for part in sharded.flat_parts(flat)] == [(2, 2), (2,)]


def test_collectives_can_be_ended_by_the_sockets_of_their_groups() -> None:
    sockets.make_sure_of_sockets()


def test_sharding_can_be_changed_in_place(group: None) -> None:
    units.make_sure_of_torch()
    ddp.make_sure_of_ddp()


def test_results_on_a_mesh_of_groups_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    meshes.make_sure_of_meshes()
    found = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / str(number)}", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        result: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)]) + 1
        found.append((mesh, result.device_mesh))
        meshes.let_go_of_groups(mesh)
        meshes.forget_propagation()
        dist.destroy_process_group()
    (first, _), (second, of_second) = found
    assert first == second, "torch tells such meshes apart, and nothing has to be forgotten"
    assert of_second is second
