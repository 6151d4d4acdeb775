"""Who keeps something of a world: a rank, a number of ranks, a process group or a mesh. Members may change while a
process lives; so whoever can asks ``Ranks`` each time, and what has kept something has a method ``take_world``, or
stands in a list here, with what becomes of it.

Two looks: at all assignments in the syntax trees of what runs in a worker, and at all objects that a prepared trainer
holds.
"""

from __future__ import annotations

import ast
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import TensorDataset

import elastic_ext
from elastic_ext.data.loader import ElasticDataLoader
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.ranks.world import World
from elastic_ext.strategies import StrategyName
from tests.support.ranks import RankPool
from tests.support.training import make_data, trainer_of

FOLDERS = ("config", "data", "fsdp", "profile", "ranks", "training")
"""What runs in a worker. Values, which dataclasses are, are of what was when they were made."""
TELLS = "take_world"

# --- in the syntax trees ----------------------------------------------------------------------------------------------

OF_A_WORLD = frozenset(
    ("rank", "world_size", "world", "num_ranks", "num_replicas", "num_here", "is_first_here", "board", "notices")
)
"""Names of attributes; with a line before them too."""
ASKS = frozenset(("get_rank", "get_world_size", "get_process_group_ranks", "new_group", "init_device_mesh"))
GIVEN = OF_A_WORLD | {"group", "mesh", "hosts"}
"""Names of parameters."""

_CUT = "`plan(plan, rank)` tells it, with each plan by which steps are cut"
_SAVE = "of one save, which ends in the world in which it began"
_LOAD = "of one loading"
_CHANGE = "of one change of plan, between two steps"
_MOVED = "whoever moves the model to other ranks has it let go of its groups, and make others"

KEPT: Mapping[str, str] = {
    "data.indexed:IndexedEpochs._rank": _CUT,
    "data.indexed:IndexedEpochs.has_own_positions": "whether a script's own batch sampler shares nothing out",
    "data.indexed:IndexedEpochs.last_loop": _CUT,
    "data.iterable:StreamedEpochs._rank": _CUT,
    "data.iterable:StreamedEpochs.last_loop": _CUT,
    "data.iterable:StreamedLoop._rank": _CUT,
    "data.loader:ElasticDataLoader._config_follower": "of a loader without a trainer, whose world stays",
    "data.loader:LoaderConfigFollower._num_ranks": "of a loader without a trainer, whose world stays",
    "data.prefetch:IndexedLoop._rank": _CUT,
    "data.sampler:ElasticDistributedSampler.num_replicas": "the script's own; an ElasticDataLoader cuts by its plan",
    "data.sampler:ElasticDistributedSampler.rank": "the script's own; an ElasticDataLoader cuts by its plan",
    "fsdp.checkpoint.checkpointer:_Into._loader": _LOAD,
    "fsdp.reshard.change:Change._names": "of parameters",
    "fsdp.checkpoint.loading.loader:Loader._num_ranks": _LOAD,
    "fsdp.checkpoint.loading.loader:Loader._rank": _LOAD,
    "fsdp.checkpoint.loading.source:Opened.num_ranks": "of the ranks that have saved a checkpoint",
    "fsdp.checkpoint.saving.collect:Comparable._held": _SAVE,
    "fsdp.checkpoint.saving.letters:Letters._board": _SAVE,
    "fsdp.checkpoint.saving.rank_files:Writing._num_ranks": _SAVE,
    "fsdp.checkpoint.saving.rank_files:Writing._rank": _SAVE,
    "fsdp.checkpoint.saving.saver:InventoryExchange._comparable": _SAVE,
    "fsdp.reshard.ddp:WrapperlessDDP._group": _MOVED,
    "fsdp.reshard.exchange:BucketExchange._group": _CHANGE,
    "fsdp.reshard.exchange:BucketExchange._num_ranks": _CHANGE,
    "fsdp.reshard.exchange:BucketExchange._rank": _CHANGE,
    "profile.step_costs:Trace._rank": "of one step",
    "ranks.group:Ranks._group": "it is who is asked: regroup",
    "ranks.group:Ranks.board": "it is who is asked: regroup",
    "ranks.group:Ranks.notices": "it is who is asked: regroup",
    "ranks.group:Ranks.seat": "that of its process, in whatever world",
    "ranks.group:Ranks.world": "it is who is asked: regroup",
    "ranks.notices:Notices._board": "Ranks makes it anew with each world",
    "ranks.notices:Notices._others": "Ranks makes it anew with each world",
    "training.batches:Batches._num_ranks": "`begin` tells it: the session's take_world calls that",
    "training.batches:Batches._plan": "`begin` tells it: the session's take_world calls that",
    "training.batches:Batches._rank": "`begin` tells it: the session's take_world calls that",
    "training.checkpoints.state:TrainingState._loader": _LOAD,
    "training.checkpoints.state:TrainingState._wanted": _LOAD,
    "training.gradients.gradients:Gradients._is_alone": "`take_up` tells it, as after each change of plan",
    "training.gradients.sharing:Averaging._group": "Guarding, which keeps it, lets go of it by its take_world",
    "training.members:TrainingMembers._pending": "of one change of members, until it is made",
    "training.members:TrainingMembers.world_before": "the one before the last change, until samplers of it are told",
}
"""What keeps something of a world and has no take_world: why, or by what it is told."""


def kept_in(folder: Path) -> Iterator[tuple[str, bool]]:
    """Attributes in which methods keep something of a world, as in KEPT, and whether their class has a take_world."""
    for path in sorted(each for name in FOLDERS for each in (folder / name).rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.ClassDef) and not _is_value(found):
                methods = [each for each in found.body if isinstance(each, ast.FunctionDef)]
                tells = any(each.name == TELLS for each in methods)
                for name in sorted({name for each in methods for name in _kept_by(each)}):
                    yield f"{module}:{found.name}.{name}", tells


def _is_value(found: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in found.decorator_list)


def _kept_by(method: ast.FunctionDef) -> Iterator[str]:
    """The attributes of ``self`` that a method assigns something of a world to."""
    arguments = method.args
    given = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)} & GIVEN
    for each in ast.walk(method):
        if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in targets:
                for one, value in _pairs(target, each.value):
                    is_own = isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
                    if isinstance(one, ast.Attribute) and is_own and _is_of_a_world(value, given):
                        yield one.attr


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment with what each of them is assigned."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
    return list(zip(target.elts, values, strict=True))


def _is_of_a_world(value: ast.expr, given: set[str]) -> bool:
    left: list[ast.AST] = [value]
    while left:
        each = left.pop()
        if isinstance(each, ast.Lambda):
            continue  # it asks when it is called
        if isinstance(each, ast.Attribute) and (each.attr.lstrip("_") in OF_A_WORLD or each.attr == "names"):
            return True
        if isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] in ASKS:
            return True
        if isinstance(each, ast.Name) and each.id in given:
            return True
        left += ast.iter_child_nodes(each)
    return False


def test_what_keeps_a_rank_a_number_of_ranks_or_a_group_is_told_of_another_world() -> None:
    found = dict(kept_in(Path(elastic_ext.__file__).parent))
    silent = {name for name, tells in found.items() if not tells}
    assert silent - KEPT.keys() == set(), "ask Ranks each time, or have a take_world that the session calls"
    assert KEPT.keys() - silent == set(), "keeps nothing any more, or has a take_world by now"
    assert set(found) - silent, "and some have one"


def test_it_is_seen_who_keeps_something(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "made.py").write_text(
        "class Keeps:\n"
        "    def __init__(self, ranks, group, other):\n"
        "        self._is_first = ranks.rank == 0\n"
        "        self._a, self._b = ranks, ranks.world.size\n"
        "        self._asks = lambda: ranks.rank\n"
        "        self._group: object = group\n"
        "        self._mine = other\n"
        "    def begin(self):\n"
        "        self._size = max(1, dist.get_world_size())\n"
        "class Told:\n"
        "    def __init__(self, ranks):\n"
        "        self._rank = ranks.rank\n"
        "    def take_world(self, world):\n"
        "        self._rank = world.rank\n"
        "@dataclass(frozen=True)\n"
        "class Row:\n"
        "    rank: int\n"
        "    def made(self):\n"
        "        self._rank = self.rank\n"
    )
    assert dict(kept_in(tmp_path)) == {
        "ranks.made:Keeps._b": False,
        "ranks.made:Keeps._group": False,
        "ranks.made:Keeps._is_first": False,
        "ranks.made:Keeps._size": False,
        "ranks.made:Told._rank": True,
    }


# --- in the objects of a prepared trainer -----------------------------------------------------------------------------

HELD: Mapping[str, str] = {
    "fsdp.reshard.ddp:WrapperlessDDP": _MOVED,
    "fsdp.reshard.sharded_model:Spread": _MOVED,
    "ranks.board:Board": "Ranks, Notices and Leaving have one, and get another",
    "ranks.group:Ranks": "it is who is asked: regroup",
    "training.gradients.sharing:Averaging": "Guarding, which keeps it, lets go of it by its take_world",
}
"""Classes whose objects hold a group, a mesh, a store or a World and have no take_world: why."""


def held_from(start: object) -> dict[str, bool]:
    """Classes of this library with objects reachable from ``start`` that hold a group, a mesh, a store or a World.

    Gives whether a class has a take_world. Of other libraries' objects only containers and functions are looked into.
    """
    found: dict[str, bool] = {}
    known: dict[int, object] = {}
    left: list[tuple[object, type]] = [(start, type(start))]
    while left:
        each, owner = left.pop()
        if isinstance(each, (dist.ProcessGroup, DeviceMesh, dist.Store, World)):  # type: ignore[attr-defined]
            found[f"{owner.__module__.removeprefix('elastic_ext.')}:{owner.__name__}"] = hasattr(owner, TELLS)
        elif id(each) not in known and not isinstance(each, (type, types.ModuleType, torch.Tensor)):
            known[id(each)] = each
            inner_owner = type(each) if _is_ours(each) else owner
            left += [(inner, inner_owner) for inner in _inner(each)]
    return found


def _is_ours(thing: object) -> bool:
    return type(thing).__module__.startswith("elastic_ext.")


def _inner(thing: Any) -> Iterator[object]:
    if isinstance(thing, Mapping):
        yield from (*thing.keys(), *thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset, deque, weakref.WeakSet)):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
    elif isinstance(thing, types.FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell))
    elif _is_ours(thing):
        names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        yield from (getattr(thing, name) for name in names if hasattr(thing, name))
        yield from getattr(thing, "__dict__", {}).values()


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def prepared(rank: int, folder: Path, strategy: StrategyName) -> dict[str, bool]:
    """Who holds something of a world in a trainer that trains by a plan, saves, and was given a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)).double()
    loader = ElasticDataLoader(TensorDataset(*make_data(16)), batch_size=4, shuffle=True, seed=3)
    trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=8, shared_storage_path=folder / "saved")
    trainer.parallelize(model, ParallelPlan(strategy=strategy))
    optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch(0):
        for data, classes in loader:
            with trainer.step():
                nn.functional.cross_entropy(model(data), classes).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        return held_from(trainer)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_who_holds_a_group_a_mesh_or_a_world_is_told_of_another_one(
    ranks: RankPool, tmp_path: Path, strategy: StrategyName
) -> None:
    for found in ranks.run(2, prepared, tmp_path, strategy):
        assert {"ranks.group:Ranks", "profile.output:ProfileOutput"} <= found.keys(), "the walk has come to them"
        silent = {name for name, tells in found.items() if not tells}
        assert silent - HELD.keys() == set(), "ask Ranks each time, or have a take_world that the session calls"
