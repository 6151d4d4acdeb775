"""The rules of the house, checked in the syntax trees of the library: which way imports go, what stays free of torch,
which names are public, and what is written nowhere.

Every check is a function from source texts to faults in words, and is tried on small texts that break its rule.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import elastic_ext

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "elastic_ext"
FRONT = "__init__"  # the package's own file: it may name anything, and imports nothing until asked

FLOORS: Mapping[str, int] = {
    # what lies at the root of the package, from the lowest floor up: a folder or a file imports from lower floors alone
    "errors": 1,
    "strategies": 1,
    "version": 1,
    "records": 2,
    "torch_private": 2,
    "ranks": 3,
    "config": 4,
    "doctor": 4,
    "fsdp": 4,
    "members": 5,
    "profile": 5,
    "data": 6,
    "report": 6,
    "tuner": 6,
    "master": 7,
    "training": 7,
    "agent": 8,
    "cli": 9,
    "run": 9,
}
STANDARD_LIBRARY_ALONE = 1  # the floor whose files import nothing else

TORCH_FOLDERS = frozenset({"data", "fsdp", "profile", "torch_private", "training"})
"""Folders whose files may use torch, but for those of WITHOUT_TORCH. A folder's own ``__init__`` never does."""
WITHOUT_TORCH = frozenset(
    {
        "data.batch_plan",
        "data.sources",
        "fsdp.checkpoint.contents",
        "fsdp.checkpoint.export.dcp_plan",
        "fsdp.checkpoint.export.safetensors",
        "fsdp.checkpoint.folder.claim",
        "fsdp.checkpoint.folder.cleanup",
        "fsdp.checkpoint.folder.commit",
        "fsdp.checkpoint.folder.job_folder",
        "fsdp.checkpoint.folder.listing",
        "fsdp.checkpoint.format.copy",
        "fsdp.checkpoint.format.json_text",
        "fsdp.checkpoint.format.metadata",
        "fsdp.checkpoint.format.reader",
        "fsdp.checkpoint.format.shardfile",
        "fsdp.checkpoint.format.writer",
        "fsdp.checkpoint.loading.description",
        "fsdp.checkpoint.loading.verify",
        "fsdp.checkpoint.saving.background",
        "fsdp.checkpoint.saving.letters",
        "fsdp.checkpoint.saving.rank_files",
        "fsdp.checkpoint.saving.rescue",
        "fsdp.checkpoint.saving.shared_memory",
        "fsdp.layout",
        "fsdp.moves",
        "fsdp.pickled_values",
        "fsdp.plan",
        "fsdp.reshard.buckets",
        "fsdp.reshard.transition",
        "fsdp.worlds",
        "profile.breakdown",
        "profile.device_timeline",
        "profile.ledger",
        "profile.memory.analysis_client",
        "profile.memory.analysis_process",
        "profile.memory.extrapolation",
        "profile.memory.peaks",
        "profile.memory.questions",
        "profile.output",
        "profile.phases",
        "profile.reader",
        "profile.stragglers",
        "profile.summary",
        "profile.verdict",
        "torch_private.module_hooks",
        "torch_private.pipelines",
        "training.checkpoints.signals",
        "training.counters",
        "training.optimizers.accelerate",
        "training.remarks",
        "training.steps.state",
    }
)
WITH_TORCH = frozenset(
    {
        "agent.arguments",
        "agent.elastic_agent",
        "agent.launcher",
        "agent.master.embedded",
        "agent.node_tasks",
        "agent.rendezvous",
        "agent.workers.workers",
        "cli.ckpt_convert",
        "cli.doctor_pairs",
        "config.follower",
        "doctor.meeting",
        "doctor.pairs",
        "members.regroup",
        "ranks.group",
        "run",
        "tuner.performance_model",
        "tuner.search",
    }
)
"""Files of other folders that may use it too."""
HEAVY = frozenset({"torch", "numpy", "accelerate"})  # accelerate imports torch
USES_GRPC = frozenset(
    {
        "agent.launcher",
        "agent.master.embedded",
        "agent.master.link",
        "agent.master.session",
        "cli",
        "cli.__main__",
        "cli.doctor_pairs",
        "cli.master",
        "master.__main__",
        "master.client",
        "master.process",
        "master.service",
        "master.wire.master_pb2_grpc",
        "run",
    }
)
"""What speaks with a master, or is one: a training process never does."""
IMPORTED_WHEN_USED = frozenset(
    {
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "accelerate",
        "safetensors",
        "grpc",
        "google.protobuf",
        "elastic_ext.doctor.gpus",
        "tensorboard",
    }
)
"""What importing a public name does not load, beside torch: what torch itself loads, such as pynvml, is not here."""
NEEDS_SHARDED_TENSORS = frozenset({"ElasticLRScheduler", "ElasticOptimizer", "ReshardReport"})
"""The public names that do load some of it; most scripts get these from a trainer."""
STARTS_WITHOUT_PYNVML = ("elastic_ext.training.prepare", "elastic_ext.run", "elastic_ext.doctor.hardware")
"""The modules by which a trainer, a launcher and a doctor start."""
WHEN_CALLED: Mapping[str, str] = {
    "fsdp.checkpoint.format.copy": "numpy",
    "tuner.controller": "tuner.search",
    "profile.memory.analysis_process": "profile.memory.analysis",
    "profile.output": "torch",
}
"""What a light module imports in the functions that need it, which is not all that it is imported for: what is heavy,
or a module of ours that is."""

PUBLIC_NAMES = [
    "Applied",
    "Applier",
    "ApplyError",
    "BatchPlan",
    "Boundary",
    "CheckpointInterval",
    "CheckpointOptions",
    "ConfigError",
    "ConfigFollower",
    "ConfigWatcher",
    "ElasticConfig",
    "ElasticDataLoader",
    "ElasticDistributedSampler",
    "ElasticError",
    "ElasticLRScheduler",
    "ElasticOptimizer",
    "ElasticScaler",
    "ElasticTrainer",
    "FollowOptions",
    "MemoryModel",
    "MicroBatchSource",
    "ParallelPlan",
    "PeerLostError",
    "Proposal",
    "RanksDisagreeError",
    "RanksError",
    "RanksFailedError",
    "ReshardReport",
    "Sink",
    "StepError",
    "StepOptions",
    "StepPlan",
    "StepProfile",
    "TensorBoardSink",
    "TornStepError",
    "WorkerDiedError",
    "follow_config",
]

READS_ENVIRON = frozenset(
    {
        "agent.workers.at_start.sitecustomize",
        "cli",
        "master.__main__",
        "run",
        "config.follower",
        "fsdp.checkpoint.checkpointer",
        "profile.memory.analysis_process",
        "profile.step_costs",
        "training.trainer",
    }
)
WRITES_TO_THE_TERMINAL = frozenset(
    {"agent.orphan_guard", "cli", "master.__main__", "run"}
)  # what it prints is what it is for
BROAD_EXCEPT: Mapping[str, str] = {
    # "module:Class.function": the reason
    "agent.workers.at_start.sitecustomize:_write_exceptions.write": (
        "whatever cannot be written, the exception is printed"
    ),
    "agent.launcher:_Launch._run": "torch's event log hears of it, and raises again",
    "agent.workers.workers:Workers._start": "ends what it has started, and raises again",
    "agent.control:Control.start": "closes what it has opened, and raises again",
    "agent.control:Control._run": "the top of a thread: logged, and its owner sees that it has ended",
    "agent.control:Control._answer_to": "whatever answers: who asked is told, and the agent goes on",
    "agent.master.session:ConfigWatch._run": "the top of a thread: logged; configs come with answers as well",
    "agent.master.link:MasterLink._try_once": "the top of a thread: logged, and tried again later",
    "config.apply:Appliers._check": "an applier is the user's code: what it raises is told to all ranks",
    "config.apply:Appliers._apply": "an applier is the user's code: what it raises is told to all ranks",
    "fsdp.blocks:_why_not_alike": "a block is the user's code: what it raises the second time is told as a refusal",
    "ranks.deadlines:Call._keep": "the top of a thread: kept for the one who waits, who raises it",
    "data.prefetch:IndexedLoop.__next__": "what cannot be made is passed before it is raised again",
    "data.prefetch:IndexedLoop._taken": "whatever was raised instead of the batch, it is taken; raised again",
    "data.prefetch:IndexedLoop._batch_of": (
        "another batch's failure is none of this one's, which is made again by itself"
    ),
    "data.workers.producer:BatchProducer.take": (
        "whatever the user's code raised, the batch is asked for no more; raised again"
    ),
    "data.workers.producer:BatchProducer._made": (
        "says of which samples it is what the user's code raised, and raises again"
    ),
    "data.seeding:Copied.of": "pickling runs the user's code: what cannot be pickled is copied otherwise",
    "data.streams:Stream._go_to": "why a dataset cannot begin is raised in the place of each of its samples",
    "data.streams:Stream._draw": "kept in the place of the sample, and raised where that is wanted",
    "data.iterable:StreamedLoop.__next__": "what cannot be made is passed before it is raised again",
    "data.workers.pool:_loaded": "unpickling runs the user's code: kept for who takes the batch, who raises it",
    "data.workers.worker_process:ParentQueues._pickled": (
        "pickling runs the user's code: what it raises is sent instead of the batch"
    ),
    "data.workers.worker:Spawner._run": "the top of a thread: kept for the pool, who raises it",
    "data.workers.worker:Spawner._start": "pickling runs the user's code: kept for the pool, who raises it",
    "data.workers.worker:reraise": "adds to what torch raises which sample it was, and raises again",
    "records.files:write_whole": "takes its temporary file away and raises again, whatever came",
    "config.follower:ConfigFollower.__enter__": "tells the peers that this rank leaves, closes, and raises again",
    "fsdp.checkpoint.saving.background:BackgroundSave.start": "forgets a thread that did not start, and raises again",
    "fsdp.checkpoint.saving.background:BackgroundSave._run": (
        "the top of a thread: kept for who asks, and told to the others"
    ),
    "training.steps.steps:Steps.__exit__": "raised again unless it is of ranks that are lost",
    "training.steps.steps:Steps._enter_with_others": "raised again unless it is of ranks that are lost",
    "training.steps.steps:Steps._do_first": "what was handed out for the step is given back, and raises again",
    "fsdp.checkpoint.saving.saver:Saver.save_async": "the others are to hear of it too, and raises again",
    "fsdp.checkpoint.saving.saver:Saver._wait_for": "has the save's thread wait no longer, and raises again",
    "fsdp.checkpoint.export.dcp_folder:DcpFolder._loaded": (
        "torch.load raises errors of pickle, which is not imported here"
    ),
    "fsdp.checkpoint.saving.saver:Saver.save": "takes away what is left of a save that failed, and raises again",
    "fsdp.checkpoint.coordination:_add_what_it_gives": "whatever a rank raises, the others are to hear of it",
    "master.tuning:TunerQueue._answer": "a master serves its agents whatever becomes of its tuner: logged, and told",
    "fsdp.reshard.change:Change._caught": "whatever it is, what was there has to come back; raised on all ranks",
    "fsdp.reshard.change:Change._move": "there is not enough memory, as a rule; raised on all ranks",
    "fsdp.reshard.change:Change._agree_or_go_back": "puts back what was there, and raises again",
    "training.members:TrainingMembers._apply": "whatever a rank raises, all hear of it, and go on as before or raise",
    "training.losses:Losses.recover": "whatever keeps ranks from a plan, they wait for the next one, or all start anew",
    "training.losses:Losses.with_others": "raised again unless it is of ranks that are lost",
    "training.losses:Losses._take": "what is taken over runs the user's code: raised on all ranks",
    "training.members:TrainingMembers.tell_changed": "a function is the script's: raised on all ranks",
    "training.members:TrainingMembers._settle": "what is taken over runs the user's code: raised on all ranks",
    "training.parallelism:Parallelism.apply": "says that training cannot go on with it, and raises again",
    "training.steps.steps:Steps._leave": "takes the step back, or owes its boundary, and raises again",
    "profile.memory.analysis:analyse": "a factory is the user's code: what it raises is told to who has asked",
    "profile.memory.analysis:_tell_passes": "a model and a loss are the user's code: told in the same way",
    "profile.memory.analysis_process:main": "a script is imported, which is the user's code: told in the same way",
    "profile.output:Sinks.write": "a sink is the user's code: told once, and dropped",
    "profile.output:Sinks.close": "a sink is the user's code: the others are to be closed too",
    "training.session:Session.start": "tells the peers that this rank leaves, closes, and raises again",
    "config.watcher:FileWatcher._look_at_change": "the top of what a thread of watchdog's calls; as in _run",
    "config.watcher:FileWatcher._run": "the top of a thread: kept for the owner, who raises it",
}
OWN_THREADS: Mapping[str, str] = {
    # "module:Class.function": why its thread is no OwnedThread
    "agent.launcher:_Launch._check_machine": "nobody waits for it: storage that hangs would hold up the agent's end",
    "data.workers.worker_process:ParentQueues._write": "feeds a pipe until the worker process ends",
    "data.workers.worker_process:ParentQueues.put": "sends what a worker process makes, until that ends",
    "data.workers.worker_process:end_with_parent": "waits for the end of the parent, and ends its process",
    "profile.memory.analysis_process:main": "waits for the end of the parent, and ends its process",
    "torch_private.sockets:_pair_of_groups": "lies below the floor of OwnedThread; waited for where it is begun",
    "training.checkpoints.signals:spare_loader_workers.in_worker": "waits for a signal, and ends its process",
}
CALLS_A_STORE = "ranks.board"
"""The file that alone calls the methods of a store; others have a Board."""
NAMES_A_STORE: Mapping[str, str] = {
    # "module": why it names one of torch's stores
    "agent.rendezvous": "starts the store of a round's workers, and that of a rendezvous on a loopback address",
    "doctor.meeting": "gives torch's process group of two nodes a part of the store where they have met",
    "members.regroup": "gives torch's process groups of a live plan a part of the store that the plan names",
    "torch_private.groups": "resets torch's count of process groups by making one, which needs a store",
    "torch_private.sockets": "tries a group of two ranks in one process, which meet in a store",
    "ranks.group": "the board of a job of one rank is in the memory of its process",
}
STORE_METHODS = frozenset({"add", "check", "clone", "compare_set", "delete_key", "get", "set", "wait"})
STORES = frozenset({"FileStore", "HashStore", "PrefixStore", "TCPStore"})
PICKLES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})


# --- reading the trees ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One import as it is written: of which module or name, on which line, and whether for a type checker alone."""

    target: str  # absolute and dotted; of `from a import b` it is a.b, which may be a module or a name in one
    line: int
    types_only: bool
    in_function: bool


def sources_of(folder: Path) -> dict[str, str]:
    """The text of every module under a package's folder, by dotted name below it (``__init__`` for its own)."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1]) if parts[-1] == "__init__" else ".".join(parts)
        found[name or FRONT] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source text, which every check walks."""
    return ast.parse(source)


@functools.cache
def nodes_of(source: str) -> Sequence[ast.AST]:
    """All nodes of that tree."""
    return tuple(ast.walk(parsed(source)))


@functools.cache
def imports_of(module: str, source: str, *, is_package: bool = False) -> Sequence[Import]:
    """Every import of a module of the package: at its top, inside functions, and under TYPE_CHECKING."""
    folder = PACKAGE if module == FRONT else f"{PACKAGE}.{module}"
    if module != FRONT and not is_package:
        folder = folder.rpartition(".")[0]
    return tuple(_imports_in(parsed(source), folder, types_only=False, in_function=False))


def _imports_in(node: ast.AST, folder: str, *, types_only: bool, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, folder):
            line = getattr(child, "lineno", 0)
            yield Import(target=target, line=line, types_only=types_only, in_function=in_function)
        if isinstance(child, ast.If) and _asks_type_checking(child.test):
            yield from _imports_in(
                ast.Module(body=child.body, type_ignores=[]), folder, types_only=True, in_function=in_function
            )
            rest = ast.Module(body=child.orelse, type_ignores=[])
            yield from _imports_in(rest, folder, types_only=types_only, in_function=in_function)
            continue
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_in(child, folder, types_only=types_only, in_function=inside)


def _asks_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.AST, folder: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parts = folder.split(".")
        above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        base = ".".join(part for part in (above, node.module or "") if part)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0].value
        if called in ("import_module", "__import__") and isinstance(name, str):
            return [folder + name if name.startswith(".") else name]
    return []


def inner(target: str, modules: Mapping[str, object]) -> str | None:
    """The module of the package that an import reaches (``__init__``: the package itself), None for one outside it."""
    if target != PACKAGE and not target.startswith(f"{PACKAGE}."):
        return None
    name = target.removeprefix(PACKAGE).removeprefix(".")
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or FRONT


# --- the rules ------------------------------------------------------------------------------------------------------


def _graph(sources: Mapping[str, str]) -> dict[str, Sequence[Import]]:
    packages = {name.rpartition(".")[0] for name in sources}
    return {name: imports_of(name, source, is_package=name in packages) for name, source in sources.items()}


def floor_faults(sources: Mapping[str, str], floors: Mapping[str, int]) -> list[str]:
    """Where imports do not go to a lower floor, or files import one another in a circle; and what has no floor."""
    tops = {_top(name) for name in sources if name != FRONT}
    faults = [
        f"{PACKAGE}/{top} has no floor: add {top!r} to FLOORS in tests/test_house.py, on the lowest floor that is "
        "above all it imports, and to the picture in docs/architecture.md"
        for top in sorted(tops - set(floors))
    ]
    faults += [
        f"FLOORS has {top!r}, and {PACKAGE} has no such folder or file: take the line out, here and in "
        "docs/architecture.md"
        for top in floors
        if top not in tops
    ]
    edges: dict[str, set[str]] = {}
    for name, imports in _graph(sources).items():
        if name == FRONT or _top(name) not in floors:
            continue
        for seen in imports:
            fault = _direction_fault(name, seen, sources, floors)
            if fault:
                faults.append(fault)
            reached = inner(seen.target, sources)
            if reached and reached not in (name, FRONT) and not seen.types_only:
                edges.setdefault(name, set()).add(reached)
    return faults + circles(edges)


def _direction_fault(name: str, seen: Import, sources: Mapping[str, str], floors: Mapping[str, int]) -> str | None:
    """Why one import may not be, None where it may."""
    where = f"{PACKAGE}.{name}, line {seen.line}: {seen.target}"
    reached = inner(seen.target, sources)
    mine = floors[_top(name)]
    if reached is None:
        if mine == STANDARD_LIBRARY_ALONE and seen.target.partition(".")[0] not in sys.stdlib_module_names:
            return f"{where} is not in the standard library, and floor {mine} imports nothing else"
        return None
    if reached == FRONT:
        return f"{where} goes through the package itself; import the module that holds the name"
    if _top(reached) == _top(name) or _top(reached) not in floors:
        return None
    its = floors[_top(reached)]
    if its > mine:
        return f"{where} is on floor {its}, above floor {mine}; imports go downward"
    if its == mine:
        return f"{where} is on the same floor {mine}, whose folders do not import one another"
    return None


def _top(name: str) -> str:
    """What a module lies in at the root of the package: a folder, or itself."""
    return name.partition(".")[0]


def torch_users(sources: Mapping[str, str]) -> frozenset[str]:
    """The modules that may use torch, by the tables of folders and files."""
    packages = {name.rpartition(".")[0] for name in sources}
    return frozenset(
        name
        for name in sources
        if name in WITH_TORCH or (_top(name) in TORCH_FOLDERS and name not in WITHOUT_TORCH and name not in packages)
    )


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """One fault for each circle found in a graph, none where it has none."""
    faults: list[str] = []
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            faults.append("imports in a circle: " + " -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for reached in sorted(edges.get(name, ())):
                walk(reached, (*path, name))
            done.add(name)

    for start in sorted(edges):
        walk(start, ())
    return faults


def heavy_faults(
    sources: Mapping[str, str], uses: frozenset[str], heavy: frozenset[str] = HEAVY | {"grpc"}
) -> list[str]:
    """Where a module that must start without what is heavy reaches it, itself or through others, by which way."""
    graph = _graph(sources)

    def way_to_heavy(name: str, seen: set[str]) -> str | None:
        for found in graph.get(name, []):
            if found.types_only or (name == FRONT and found.in_function):
                continue
            step = f"{name}, line {found.line}"
            reached = inner(found.target, sources)
            root = found.target.partition(".")[0] if reached is None else ""
            if found.in_function and WHEN_CALLED.get(name, "nothing") in (reached, root):
                continue
            if reached is None:
                if root in heavy:
                    return f"{step}: {found.target}"
            elif reached not in seen:
                seen.add(reached)  # there is no way from it, or it is found now
                further = way_to_heavy(reached, seen)
                if further:
                    return f"{step} -> {further}"
        return None

    faults = []
    for name in sources:
        if name not in uses:
            way = way_to_heavy(name, {name})
            if way:
                faults.append(f"{PACKAGE}.{name} must do without {', '.join(sorted(heavy))}, and reaches one: {way}")
    return faults


def writing_faults(module: str, source: str) -> list[str]:
    """Where a module prints, sets up logging, reads the environment, catches everything, or pickles."""
    faults = list(_writing_faults_in(parsed(source), module, ""))
    for seen in imports_of(module, source):
        if seen.target.partition(".")[0] in PICKLES:
            faults.append(f"{module}, line {seen.line}: imports {seen.target}; nothing is pickled, on wire or disk")
        if seen.target in ("os.environ", "os.getenv", "os.environb") and module not in READS_ENVIRON:
            faults.append(f"{module}, line {seen.line}: imports {seen.target}; only entry points read the environment")
    return faults


def _place_in(place: str, node: ast.AST) -> str:
    """The dotted place of what stands inside a node, such as ``Class.function``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{place}.{node.name}".lstrip(".")
    return place


def _writing_faults_in(node: ast.AST, module: str, place: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = _place_in(place, child)
        fault = _writing_fault(child, module, inside)
        if fault:
            yield f"{module}, line {getattr(child, 'lineno', 0)}: {fault}"
        yield from _writing_faults_in(child, module, inside)


def _writing_fault(node: ast.AST, module: str, place: str) -> str | None:
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "print" and isinstance(node.func, ast.Name) and module not in WRITES_TO_THE_TERMINAL:
            return "prints; use the module's logger"
        if called == "basicConfig":
            return "sets up logging, which belongs to the program that uses the library"
        if called == "suppress" and any(_is_broad(one) for one in node.args):
            return "suppresses everything; name what is suppressed"
        if ast.unparse(node.func) == "threading.Thread" and f"{module}:{place}" not in OWN_THREADS:
            return f"makes a Thread; use OwnedThread, or add '{module}:{place}' with a reason to OWN_THREADS"
    if (
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and module not in READS_ENVIRON
    ):
        return f"reads os.{node.attr}; take it as an argument, only entry points read the environment"
    if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and f"{module}:{place}" not in BROAD_EXCEPT:
        return f"catches everything; name what is caught, or add '{module}:{place}' with a reason to BROAD_EXCEPT"
    return None


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(one) for one in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


MOST_ARGUMENTS, MOST_CALLABLES = 8, 2
LARGE_CONSTRUCTORS: Mapping[str, str] = {
    # "module:Class": the reason why it takes more than 8 arguments, which a dataclass may, or more than 2 functions
    "agent.elastic_agent:ElasticAgent": "what torch's agent takes, and what belongs to it here",
    "agent.workers.workers:Workers": "what torch's agent starts workers with",
    "data.loader:ElasticDataLoader": "the arguments of torch's DataLoader",
    "data.sampler:ElasticDistributedSampler": "the arguments of torch's DistributedSampler",
    "master.tuning:Tuning": "where it runs a tuner, who makes that, and who is told, with a clock for tests",
    "training.steps.state:StepState": "who hears of a step's moments, None where nobody does: steps look there often",
    "training.trainer:ElasticTrainer": "what a script gives: twelve arguments, four of which hold the others",
}


def constructor_faults(sources: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """Constructors that take more than a reader keeps in mind, and reasons for such that are none any more."""
    faults, large = [], set()
    aliases = [
        target.id
        for source in sources.values()
        for node in parsed(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    calls = re.compile(rf"\b({'|'.join(['Callable', *aliases])})\b")
    for module, source in sorted(sources.items()):
        for node in (node for node in nodes_of(source) if isinstance(node, ast.ClassDef)):
            given, fields = _arguments(node), _fields(node)
            taken: list[ast.arg | ast.AnnAssign] = [*given, *fields]
            functions = [each for each in taken if each.annotation and calls.search(ast.unparse(each.annotation))]
            if len(given) <= MOST_ARGUMENTS and len(functions) <= MOST_CALLABLES:
                continue
            large.add(place := f"{module}:{node.name}")
            if place not in allowed:
                faults.append(
                    f"{place} takes {len(taken)} arguments, {len(functions)} of them functions; allowed: "
                    f"{MOST_ARGUMENTS} and {MOST_CALLABLES}: hand on the object that has them"
                )
    return [*faults, *(f"{place} is no large constructor any more" for place in sorted(set(allowed) - large))]


def class_name_faults(sources: Mapping[str, str]) -> list[str]:
    """Class names that several classes of the package have, with the modules that define them."""
    modules_of: dict[str, list[str]] = {}
    for module, source in sorted(sources.items()):
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                modules_of.setdefault(node.name, []).append(module)
    return [
        f"{name} is a class of {' and of '.join(modules)}: give each its own name"
        for name, modules in sorted(modules_of.items())
        if len(modules) > 1
    ]


NOT_EXPORTED: Mapping[str, str] = {
    # "module.name": the reason why others import a name that __all__ leaves out
    "errors.StepUndone": "what goes from one step to its retry, and reaches no script",
}


def export_faults(sources: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """Names that other modules import and that ``__all__`` leaves out, and reasons for such that are none any more."""
    found: dict[str, str] = {}
    for module, imports in _graph(sources).items():
        for target in (each.target.removeprefix(f"{PACKAGE}.") for each in imports):
            owner, _, name = target.rpartition(".")
            exported = None if owner not in sources or target in sources else _exported(sources[owner])
            if exported is not None and name not in exported:
                found.setdefault(target, f"{module} imports {target}, which is not in __all__ there")
    return sorted([words for target, words in found.items() if target not in allowed] + [*(allowed.keys() - found)])


def _exported(source: str) -> list[str] | None:
    """The names in ``__all__`` of a module; None where it has none."""
    for node in parsed(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
    return None


def _arguments(node: ast.ClassDef) -> list[ast.arg]:
    """What the constructor that a class writes itself takes; nothing where it writes none."""
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    return [] if made is None else [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs][1:]


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """What the constructor of a dataclass takes; nothing for other classes."""
    is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return [each for each in node.body if is_dataclass and isinstance(each, ast.AnnAssign)]


PRIVATE_ELSEWHERE: Mapping[str, str] = {
    # private names that a class of ours has too: whose they are where another class reaches for them
    "_asdict": "a named tuple, which says that callers may use it",
    "_drop_last": "a loader of accelerate's",
    "_exit": "the module os",
    "_fields": "a named tuple",
    "_make": "a named tuple",
    "_parameters": "a module of torch's",
    "_replace": "a named tuple",
    "_spec": "a DTensor",
    "_values": "a sparse tensor",
    "_version": "a tensor",
}


def private_name_faults(sources: Mapping[str, str], elsewhere: Mapping[str, str]) -> list[str]:
    """Where a class reaches for a private name of another class's objects, or a function for one of another module's.

    ``elsewhere`` has private names that objects of others have too; one that is not reached for is a fault.
    """
    owners: dict[str, set[str]] = {}  # by private name, the modules of the classes that define it
    names_of: dict[str, set[str]] = {}  # by class, the private names that it defines or inherits
    classes = [
        (module, node)
        for module, source in sources.items()
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
    ]
    for module, node in classes:
        names_of[node.name] = set(_private_names_of(node))
        for name in names_of[node.name]:
            owners.setdefault(name, set()).add(module)
    for _ in classes:  # until nothing is inherited any more, which is soon
        before = sum(map(len, names_of.values()))
        for _, node in classes:
            for base in map(ast.unparse, node.bases):
                names_of[node.name] |= names_of.get(base.partition("[")[0], set())
        if sum(map(len, names_of.values())) == before:
            break
    faults, reached = [], set()

    def walk(node: ast.AST, module: str, own: set[str] | None) -> None:
        if isinstance(node, ast.ClassDef):
            own = (own or set()) | names_of[node.name]
        if isinstance(node, ast.Attribute) and node.attr in owners:
            is_own = module in owners[node.attr] if own is None else node.attr in own
            if not is_own and ast.unparse(node.value) not in ("self", "cls", "super()"):
                reached.add(node.attr)
                if node.attr not in elsewhere:
                    faults.append(
                        f"{module}, line {node.lineno}: reaches for {ast.unparse(node)}, which is private to another "
                        "class: give it a public name there, or do it there"
                    )
        for child in ast.iter_child_nodes(node):
            walk(child, module, own)

    for module, source in sorted(sources.items()):
        walk(parsed(source), module, None)
    return [*faults, *(f"{name} is reached for nowhere any more" for name in sorted(set(elsewhere) - reached))]


def _private_names_of(node: ast.ClassDef) -> Iterator[str]:
    """The private names that a class defines: methods and fields in its body, and what it sets at ``self``."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each in node.body:
            name = each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            name = each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            name = each.attr
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name != "_":
            yield name


def store_faults(sources: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """Where a module but that of boards calls a store, which its name tells; and which modules name torch's stores.

    ``allowed`` are the modules that may name them, with their reasons; a stale one is a fault too.
    """
    faults, naming = [], set()
    for module, source in sources.items():
        for node in nodes_of(source):
            named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", "")
            if named in STORES and isinstance(node, ast.Attribute | ast.alias):
                naming.add(module)
            if module == CALLS_A_STORE or not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            receiver = node.func.value
            name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
            if node.func.attr in STORE_METHODS and name.lower().endswith("store"):
                faults.append(f"{module}, line {node.lineno}: calls {ast.unparse(node.func)}; use a Board")
    faults += [f"{module} names a store of torch's; use a Board" for module in sorted(naming - set(allowed))]
    return [*faults, *(f"{module} names no store any more" for module in sorted(set(allowed) - naming))]


def stale_broad_excepts(sources: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """The places on the list of broad excepts that no longer have one."""
    seen: set[str] = set()

    def walk(node: ast.AST, module: str, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ExceptHandler) and _is_broad(child.type):
                seen.add(f"{module}:{place}")
            walk(child, module, _place_in(place, child))

    for module in _modules_of(allowed):
        if module in sources:
            walk(parsed(sources[module]), module, "")
    return sorted(set(allowed) - seen)


def _modules_of(places: Mapping[str, str]) -> set[str]:
    return {place.partition(":")[0] for place in places}


# --- the library keeps them -----------------------------------------------------------------------------------------

SOURCES = sources_of(ROOT / PACKAGE)
USES_TORCH = torch_users(SOURCES)
LIGHT_MODULES = [PACKAGE, *(f"{PACKAGE}.{name}" for name in SOURCES if name != FRONT and name not in USES_TORCH)]

_RUN_EACH = """
import json, sys
statements, heavy = json.loads(sys.argv[1])
loaded, faults = set(), []
for statement in statements:
    try:
        exec(statement)
    except Exception as error:
        faults.append(f"{statement}: {type(error).__name__}: {error}")
    new = {one for one in heavy if one in sys.modules} - loaded
    if new:
        faults.append(f"{statement} loads {', '.join(sorted(new))}")
    loaded |= new
print(json.dumps(faults))
"""


def import_faults(names: list[str], heavy: frozenset[str], root: Path) -> list[str]:
    """Which of some modules cannot be imported, or load what is heavy, in one fresh process that imports each."""
    return loading_faults([f"import {name}" for name in names], heavy, root)


def loading_faults(statements: list[str], heavy: frozenset[str], root: Path = ROOT) -> list[str]:
    """Which of some statements fail, or load what is heavy, in one fresh process that runs each."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN_EACH, json.dumps([statements, sorted(heavy)])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    faults: list[str] = json.loads(done.stdout)
    return faults


def _no_faults(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_imports_go_downward_and_every_folder_has_a_floor() -> None:
    _no_faults(floor_faults(SOURCES, FLOORS))


def test_light_modules_reach_no_torch_in_the_syntax_trees() -> None:
    _no_faults(heavy_faults(SOURCES, USES_TORCH, HEAVY))


def test_what_speaks_no_grpc_reaches_none_in_the_syntax_trees() -> None:
    _no_faults(heavy_faults(SOURCES, USES_GRPC, frozenset({"grpc"})))


def test_light_modules_load_no_torch_in_a_fresh_process() -> None:
    _no_faults(import_faults(LIGHT_MODULES, HEAVY, ROOT))


def test_a_script_that_imports_public_names_loads_what_torch_does_and_little_more() -> None:
    names = ["ElasticTrainer", *(name for name in PUBLIC_NAMES if name not in NEEDS_SHARDED_TENSORS)]
    _no_faults(loading_faults([f"from elastic_ext import {name}" for name in names], IMPORTED_WHEN_USED))


def test_trainer_launcher_and_doctor_start_without_pynvml() -> None:
    missing = "import sys; sys.modules['pynvml'] = None"  # so that an import of it fails
    _no_faults(loading_faults([missing, *(f"import {name}" for name in STARTS_WITHOUT_PYNVML)], frozenset()))


def test_arguments_of_a_trainer_have_types_that_can_be_looked_up() -> None:
    hints = typing.get_type_hints(elastic_ext.ElasticTrainer.__init__)  # as makers of command lines do
    assert hints["step_options"] == elastic_ext.StepOptions | None
    for options in (elastic_ext.CheckpointOptions, elastic_ext.FollowOptions, elastic_ext.StepOptions):
        assert set(typing.get_type_hints(options)) == {each.name for each in dataclasses.fields(options)}


def test_public_names_are_pinned() -> None:
    assert sorted(elastic_ext.__all__) == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(elastic_ext))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_resolves(name: str) -> None:
    assert getattr(elastic_ext, name) is getattr(elastic_ext, name)


def test_unknown_name_of_the_package_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = elastic_ext.no_such_name


@pytest.mark.parametrize("module", SOURCES)
def test_module_writes_nothing_the_house_forbids(module: str) -> None:
    _no_faults(writing_faults(module, SOURCES[module]))


def test_list_of_broad_excepts_is_not_stale() -> None:
    assert stale_broad_excepts(SOURCES, BROAD_EXCEPT) == []


def test_a_class_name_stands_for_one_thing() -> None:
    _no_faults(class_name_faults(SOURCES))


def test_what_others_import_of_a_module_is_in_its_list_of_names() -> None:
    _no_faults(export_faults(SOURCES, NOT_EXPORTED))


def test_only_boards_call_a_store() -> None:
    _no_faults(store_faults(SOURCES, NAMES_A_STORE))


def test_no_class_reaches_for_private_names_of_another() -> None:
    _no_faults(private_name_faults(SOURCES, PRIVATE_ELSEWHERE))


def test_a_constructor_takes_few_arguments_and_fewer_functions() -> None:
    _no_faults(constructor_faults(SOURCES, LARGE_CONSTRUCTORS))


def test_list_of_threads_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(OWN_THREADS)
    monkeypatch.setattr(f"{__name__}.OWN_THREADS", {})
    faults = [fault for module in _modules_of(places) for fault in writing_faults(module, SOURCES.get(module, ""))]
    assert [place for place in places if not any(f"'{place}'" in fault for fault in faults)] == []


@pytest.mark.parametrize("table", ["READS_ENVIRON", "WRITES_TO_THE_TERMINAL"])
def test_every_file_that_may_read_the_environment_or_print_does(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may: frozenset[str] = globals()[table]
    assert may <= set(SOURCES)
    monkeypatch.setitem(globals(), table, frozenset())
    words = {"READS_ENVIRON": "os.", "WRITES_TO_THE_TERMINAL": "prints"}[table]
    assert {name for name in may if not any(words in fault for fault in writing_faults(name, SOURCES[name]))} == set()


def test_every_light_module_imports_when_called_what_the_table_says() -> None:
    for name, target in WHEN_CALLED.items():
        seen = [each for each in _graph(SOURCES)[name] if each.in_function]
        assert any(
            f"{each.target}.".startswith(f"{target}.") or inner(each.target, SOURCES) == target for each in seen
        ), name


TESTS_ELSEWHERE = {"benchmarks", "saved", "support", "training/mistakes"}
"""Folders of tests/ that are no folder of the package."""
TESTED_FROM_ABOVE = {"agent/workers/at_start": "what runs in a worker's Python before anything else, in workers' tests"}


def test_tests_lie_in_folders_of_the_same_names() -> None:
    ours = {path.parent.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")} - {"."}
    theirs = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")} - {
        "."
    }
    assert theirs - TESTS_ELSEWHERE == ours - set(TESTED_FROM_ABOVE)


# --- the checks can fail --------------------------------------------------------------------------------------------


def test_upward_import_is_a_fault_wherever_it_stands() -> None:
    floors = {"low": 2, "high": 4}
    for source in (
        "from elastic_ext.high import x",
        "from .high import x",
        "from . import high",
        "from elastic_ext import high",
        "import elastic_ext.high",
        "def f() -> None:\n    from .high import x",
        "if TYPE_CHECKING:\n    from .high import X",
        "import importlib\nimportlib.import_module('.high', 'elastic_ext')",
    ):
        (fault,) = floor_faults({"low": source, "high": ""}, floors)
        assert "elastic_ext.low" in fault, source
        assert "above floor 2" in fault, source


def test_downward_import_is_no_fault() -> None:
    sources = {"high": "from .low import x\nfrom elastic_ext.low import y", "low": ""}
    assert floor_faults(sources, {"high": 4, "low": 2}) == []


def test_sideways_import_is_a_fault_between_folders_and_not_within_one() -> None:
    apart = {"a": "from .b import x", "b": ""}
    assert "same floor 2" in floor_faults(apart, {"a": 2, "b": 2})[0]
    for_types = {"a": "import typing\nif typing.TYPE_CHECKING:\n    from .b import x", "b": ""}
    assert "same floor 2" in floor_faults(for_types, {"a": 2, "b": 2})[0]
    together = {"a.one": "from .two import x", "a.two": "from .inner.three import x", "a.inner.three": ""}
    assert floor_faults(together, {"a": 2}) == []


def test_circle_is_a_fault_even_through_functions_but_not_through_types() -> None:
    lazy = {"f.a": "from .b import x", "f.b": "from .c import x", "f.c": "def f() -> None:\n    from .a import x"}
    assert floor_faults(lazy, {"f": 2}) == ["imports in a circle: f.a -> f.b -> f.c -> f.a"]
    types = {**lazy, "f.c": "if TYPE_CHECKING:\n    from .a import X"}
    assert floor_faults(types, {"f": 2}) == []


def test_imports_after_type_checking_else_are_real() -> None:
    source = "if TYPE_CHECKING:\n    from .a import X\nelse:\n    from .b import X"
    assert [(one.target, one.types_only) for one in imports_of("m", source)] == [
        ("elastic_ext.a.X", True),
        ("elastic_ext.b.X", False),
    ]


def test_folder_without_a_floor_is_told_what_to_do() -> None:
    (fault,) = floor_faults({"fresh.one": "", "fresh.two": ""}, {})
    assert "elastic_ext/fresh has no floor" in fault
    assert "FLOORS in tests/test_house.py" in fault


def test_floor_of_a_folder_that_is_gone_is_a_fault() -> None:
    assert "no such folder" in floor_faults({}, {"gone": 2})[0]


def test_tables_of_files_with_and_without_torch_name_files_that_exist() -> None:
    assert set(WITHOUT_TORCH | WITH_TORCH | USES_GRPC) <= set(SOURCES)
    assert {_top(name) for name in WITHOUT_TORCH} <= TORCH_FOLDERS
    assert not {_top(name) for name in WITH_TORCH} & TORCH_FOLDERS


def test_the_picture_of_the_house_has_its_folders_its_floors_and_no_file_that_is_gone() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, tree, _, floors, _ = text.split("```\n")
    tree = tree[: tree.index("\ntests/")]
    drawn, at = set(), [""]
    for line in tree.splitlines()[2:]:
        name = line.split()[0]
        at[(len(line) - len(line.lstrip())) // 2 :] = [name.rstrip("/")]
        drawn.add("/".join(at[1:]))
    folders = {path.parent.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    assert drawn == folders - {"."}
    on_floors = {name: int(line.split()[0]) for line in floors.splitlines() for name in line.split()[1:]}
    assert on_floors == dict(FLOORS)
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    named = set(re.findall(r"`([a-z_/]+\.py)`", text))
    whole = {name for name in named if name.partition("/")[0] in FLOORS}  # others are below the folder they go on from
    assert whole - {each.removeprefix(f"{PACKAGE}/") for each in files} == set()
    assert {name for name in named if not any(f"/{each}".endswith(f"/{name}") for each in files)} == set()


def test_lowest_floor_imports_the_standard_library_alone() -> None:
    assert floor_faults({"low": "import json, os.path"}, {"low": 1}) == []
    assert "not in the standard library" in floor_faults({"low": "import watchdog.events"}, {"low": 1})[0]
    assert floor_faults({"two": "import watchdog.events"}, {"two": 2}) == []


def test_import_through_the_package_itself_is_a_fault() -> None:
    assert "through the package itself" in floor_faults({"a": "from elastic_ext import ElasticConfig"}, {"a": 2})[0]
    assert "through the package itself" in floor_faults({"a": "import elastic_ext"}, {"a": 2})[0]


def test_relative_imports_of_subpackages_are_read_rightly() -> None:
    source = "from . import moves\nfrom .layout import Box\nfrom ..ranks import Ranks"
    assert [one.target for one in imports_of("fsdp.live", source)] == [
        "elastic_ext.fsdp.moves",
        "elastic_ext.fsdp.layout.Box",
        "elastic_ext.ranks.Ranks",
    ]
    assert [one.target for one in imports_of("fsdp", "from .layout import Box", is_package=True)] == [
        "elastic_ext.fsdp.layout.Box"
    ]


def test_torch_behind_other_modules_is_found_with_the_way_to_it() -> None:
    sources = {"a": "def f() -> None:\n    from .b import x", "b": "import os\nimport torch.nn"}
    (fault,) = heavy_faults(sources, frozenset({"b"}))
    assert "elastic_ext.a must do without" in fault
    assert "a, line 2 -> b, line 2: torch.nn" in fault
    assert len(heavy_faults(sources, frozenset())) == 2
    assert heavy_faults({"a": "if TYPE_CHECKING:\n    import torch"}, frozenset()) == []


def test_what_a_light_module_may_import_when_called_is_found_anywhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WHEN_CALLED", {"a": "numpy"})
    assert heavy_faults({"a": "def f() -> None:\n    import numpy"}, frozenset()) == []
    assert heavy_faults({"a": "import numpy"}, frozenset())
    assert heavy_faults({"a": "def f() -> None:\n    import torch"}, frozenset())
    assert heavy_faults({"b": "def f() -> None:\n    import numpy"}, frozenset())
    monkeypatch.setattr(f"{__name__}.WHEN_CALLED", {"a": "b"})
    heavy = {"b": "import numpy", "c": "import numpy"}
    assert heavy_faults({"a": "def f() -> None:\n    from .b import x", **heavy}, frozenset({"b", "c"})) == []
    assert heavy_faults({"a": "from .b import x", **heavy}, frozenset({"b", "c"}))
    assert heavy_faults({"a": "def f() -> None:\n    from .c import x", **heavy}, frozenset({"b", "c"}))


def test_torch_behind_the_package_file_is_found_unless_it_is_lazy() -> None:
    assert heavy_faults({FRONT: "from .b import x", "b": "import torch"}, frozenset({"b"}))
    assert heavy_faults({FRONT: "def f() -> None:\n    from .b import x", "b": "import torch"}, frozenset({"b"})) == []


def test_statement_that_loads_something_or_fails_is_reported() -> None:
    faults = loading_faults(["import json", "import sqlite3", "1 / 0"], frozenset({"sqlite3"}))
    assert faults == ["import sqlite3 loads sqlite3", "1 / 0: ZeroDivisionError: division by zero"]


def test_loading_a_heavy_module_or_failing_to_load_is_reported(tmp_path: Path) -> None:
    (tmp_path / "heavy_one.py").write_text("")
    (tmp_path / "light.py").write_text("")
    (tmp_path / "sly.py").write_text("import importlib\nimportlib.import_module('heavy' + '_one')")
    (tmp_path / "broken.py").write_text("1 / 0")
    faults = import_faults(["light", "sly", "broken"], frozenset({"heavy_one"}), tmp_path)
    assert faults == ["import sly loads heavy_one", "import broken: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('x')", "prints"),
        ("import logging\nlogging.basicConfig()", "sets up logging"),
        ("import os\nx = os.environ['A']", "reads os.environ"),
        ("import os\nx = os.getenv('A')", "reads os.getenv"),
        ("from os import environ", "imports os.environ"),
        ("try:\n    pass\nexcept:\n    pass", "catches everything"),
        ("try:\n    pass\nexcept Exception:\n    pass", "catches everything"),
        ("try:\n    pass\nexcept (OSError, BaseException) as error:\n    pass", "catches everything"),
        ("import contextlib\nwith contextlib.suppress(Exception):\n    pass", "suppresses everything"),
        ("def f() -> None:\n    import pickle", "nothing is pickled"),
        ("from marshal import loads", "nothing is pickled"),
        ("import threading\nthreading.Thread(target=print).start()", "makes a Thread"),
    ],
)
def test_forbidden_writing_is_found(source: str, words: str) -> None:
    (fault,) = writing_faults("somewhere", source)
    assert words in fault


def test_what_resembles_forbidden_writing_is_no_fault() -> None:
    source = 'class A:\n    def print(self) -> None: ...\n\ndef f(a: A) -> None:\n    """print(x)"""\n    a.print()\n'
    assert writing_faults("somewhere", source) == []
    assert writing_faults("somewhere", "try:\n    pass\nexcept (OSError, ValueError):\n    pass") == []
    assert writing_faults("training.trainer", "import os\nx = os.environ['A']") == []


def test_named_place_may_catch_everything_and_its_neighbour_may_not() -> None:
    body = "        try:\n            pass\n        except Exception:\n            pass\n"
    source = f"class FileWatcher:\n    def _run(self) -> None:\n{body}    def close(self) -> None:\n{body}"
    (fault,) = writing_faults("config.watcher", source)
    assert "'config.watcher:FileWatcher.close'" in fault


def test_stale_place_on_the_list_of_broad_excepts_is_found() -> None:
    assert stale_broad_excepts({"a": "def f() -> None: ..."}, {"a:f": "why"}) == ["a:f"]


def test_class_name_that_stands_for_two_things_is_found() -> None:
    sources = {"data.order": "class Place: ...", "config.rounds": "if True:\n    class Place: ...\nclass Other: ..."}
    assert class_name_faults(sources) == ["Place is a class of config.rounds and of data.order: give each its own name"]


def test_import_of_a_name_that_is_not_exported_is_found_and_a_stale_reason_too() -> None:
    sources = {"a": "__all__ = ['f']\ndef f() -> None: ...\ndef g() -> None: ...", "b": "from .a import f, g"}
    assert export_faults(sources, {}) == ["b imports a.g, which is not in __all__ there"]
    assert export_faults(sources, {"a.g": "why", "a.f": "why"}) == ["a.f"]


def test_call_of_a_store_is_found_and_a_stale_reason_too() -> None:
    calls = "store.set('a', '1')\nself._store.wait(['a'])\nboard.store.clone()"
    assert len(store_faults({"m": calls}, {})) == 3
    assert store_faults({CALLS_A_STORE: calls, "m": "event.set()\nstore.port\nresult.get()"}, {}) == []
    for source in ("from torch.distributed import TCPStore", "import torch.distributed as dist\ndist.HashStore()"):
        assert store_faults({"m": source}, {}) == ["m names a store of torch's; use a Board"]
        assert store_faults({"m": source}, {"m": "why"}) == []
    assert store_faults({}, {"m": "why"}) == ["m names no store any more"]


def test_private_name_of_another_class_is_found_and_a_stale_exception_too() -> None:
    owner = "class A:\n    def __init__(self): self._x = 1\n    def _f(self, other): return other._x\n"
    own = f"{owner}class B(A):\n    def g(self, other): return other._f(self._x) + super()._f(1)\ndef h(a): return a._x"
    assert private_name_faults({"m": own}, {}) == []
    assert private_name_faults({"m": owner, "n": "class C:\n    def g(self, a): return a._y + self.b._z"}, {}) == []
    for reaching in ("class C:\n    def g(self, a): return a._x", "class C:\n    def g(self): self.a._f(1)"):
        (fault,) = private_name_faults({"m": owner + reaching}, {})
        assert fault.startswith("m, line 5: reaches for ")
    (fault,) = private_name_faults({"m": owner, "n": "def h(a): return a._x"}, {})
    assert fault.startswith("n, line 1: reaches for a._x")
    assert private_name_faults({"m": owner, "n": "def h(a): return a._x"}, {"_x": "why"}) == []
    assert private_name_faults({"m": owner}, {"_x": "why"}) == ["_x is reached for nowhere any more"]


def test_constructor_with_many_arguments_or_functions_is_found_and_a_stale_reason_too() -> None:
    many = "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ..."
    functions = (
        "class B:\n    def __init__(self, a: Callable[[], int], b: Callable[[], int], c: Callable[[], int]): ..."
    )
    few = "class C:\n    def __init__(self, a, *, b: Callable[[], int]): ..."
    faults = constructor_faults({"m": f"{many}\n{functions}\n{few}"}, {"m:C": "why"})
    assert [fault.partition(" ")[0] for fault in faults] == ["m:A", "m:B", "m:C"]
    fields = "".join(f"    field_{number}: int\n" for number in range(9))
    functions = "".join(f"    {name}: Callable[[], int]\n" for name in "abc")
    classes = f"@dataclass(frozen=True)\nclass D:\n{fields}@dataclass\nclass E:\n{functions}class F:\n{functions}"
    (fault,) = constructor_faults({"m": classes}, {})
    assert fault.startswith("m:E takes 3 arguments, 3 of them functions")
