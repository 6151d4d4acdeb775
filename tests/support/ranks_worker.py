"""The far side of tests/support/ranks.py: the nursery's program, the workers it forks, and what is said over a
connection.

A process of the nursery's may also run a script, as a new interpreter would that has imported torch already.

A worker hears the port of the store and tells that it is Ready. Then, over and over, it hears a Task, answers Returned
or Raised (or dies), hears Clean, and tells why it is unclean, "" if it is not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import json
import multiprocessing
import os
import pickle
import pkgutil
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tests.support.pages import use_large_pages

__all__ = [
    "NURSERY_REPLY",
    "NURSERY_REQUEST",
    "STACKS_SIGNAL",
    "Clean",
    "Raised",
    "RankError",
    "Ready",
    "Returned",
    "Task",
    "forget_meshes",
    "nursery_main",
]

# b"f" and 0: fork a worker on the descriptor sent along; b"r" and a pid: reap; b"s" and 0: run the script that follows
NURSERY_REQUEST = struct.Struct("!cq")
NURSERY_REPLY = struct.Struct("!q")  # the pid of the new process; the exit code of the reaped one
# A signal that no code under test is likely to want: the worker writes the stacks of all its threads, then dies of it.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 7

_PR_SET_PDEATHSIG = 1
_MOST_REQUEST_BYTES = 1 << 17
_THREAD_GRACE_SECONDS = 1.0  # of all that are left, together
_NURSERY_IMPORTS = (  # what most workers would import otherwise, each anew, and wait for a second
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "pytest",
    "hypothesis",
    "elastic_ext.agent.launcher",  # by agents, which are scripts here
    "elastic_ext.training.trainer",
)
_NURSERY_PACKAGES = (  # most of whose modules a trainer imports where it needs them, for a fifth of a second
    "elastic_ext.config",
    "elastic_ext.data",
    "elastic_ext.fsdp",
    "elastic_ext.members",
    "elastic_ext.profile",
    "elastic_ext.ranks",
    "elastic_ext.records",
    "elastic_ext.torch_private",
    "elastic_ext.training",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """The exception that left a rank's function, as text: exceptions themselves do not always survive pickling."""

    type_name: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    rank: int
    num_ranks: int
    store_prefix: str | None  # a part of the store that no other run uses; None: no process group
    env: dict[str, str]
    sys_path: list[str]
    call: bytes  # (fn, args) pickled


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The worker has reached the store: what it does from here on is its task's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    pickled_value: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    error: RankError


@dataclass(frozen=True, kw_only=True, slots=True)
class Clean:
    """Every rank is done: now, and not earlier, the process group may be left."""


# ---- in the nursery ----


def nursery_main(descriptor: int, folder: str) -> None:
    """Forks and reaps workers until the tests close the socket; the nursery's program calls it."""
    for name in _NURSERY_IMPORTS:
        importlib.import_module(name)
    for name in _NURSERY_PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(found.name)
    torch.set_num_threads(1)
    inspect.stack()  # finds out, once for all, which file is which module's
    gc.collect()
    gc.freeze()  # collections in the workers become cheap, and the memory of torch stays shared
    if "PYTEST_XDIST_WORKER" in os.environ:  # where there are many tests
        use_large_pages()
    children: set[int] = set()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _MOST_REQUEST_BYTES, 3)
            if not message:
                break
            request, number = NURSERY_REQUEST.unpack_from(message)
            if request in (b"f", b"s"):
                reply = os.fork()
                if reply == 0:
                    requests.close()
                    if request == b"s":
                        return _script_main(descriptors, *json.loads(message[NURSERY_REQUEST.size :]))
                    _worker_main(Connection(descriptors[0]), Path(folder))
                for descriptor in descriptors:
                    os.close(descriptor)
                children.add(reply)
            else:
                children.remove(number)
                reply = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            requests.send(NURSERY_REPLY.pack(reply))
    for child in children:
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)  # the tests' process may have been killed, or do it as well


# ---- in a script's process ----


def _script_main(descriptors: Sequence[int], argv: list[str], folder: str, environ: dict[str, str]) -> None:
    """Runs a script, or a module after ``-m``, as the one of this process, whose end is that of an interpreter."""
    os.setsid()
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # the environment says where it is
    try:
        _run_script(argv)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    else:
        _end(0)


def _run_script(argv: list[str]) -> None:
    """Run it in a new main module, by nothing whose source is in no file: torch's rendezvous looks up the source of all
    that it is called by for each record, and would search all modules for it, for a tenth of a second."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] != "-m":
        sys.argv[:] = argv
        main.__file__ = argv[0]
        exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), vars(main))
        return
    spec = importlib.util.find_spec(argv[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{argv[1]}.__main__")
    assert spec is not None and spec.origin is not None and isinstance(spec.loader, SourceFileLoader)
    sys.argv[:] = [spec.origin, *argv[2:]]
    main.__file__, main.__spec__, main.__loader__, main.__package__ = spec.origin, spec, spec.loader, spec.parent
    code = spec.loader.get_code(spec.name)
    assert code is not None
    exec(code, vars(main))


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but for taking its modules down: that would touch, and so copy, all that is shared
    with the nursery, for a third of a second. What the script itself holds is let go."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(status)  # the interpreter says that it was not read, or is closed
    os._exit(status & 0xFF)


# ---- in a worker ----


def _worker_main(connection: Connection[Any, Any], folder: Path) -> NoReturn:
    """Serves tasks until one raises, the connection ends or the nursery dies; never returns into the nursery's loop."""
    try:
        os.setsid()  # its children get its group, so that they can be ended with it
        nursery_pid = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery_pid:
            os._exit(1)
        output = os.open(folder / f"{os.getpid()}.output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with open(folder / f"{os.getpid()}.stacks", "wb", buffering=0) as stacks:
            faulthandler.enable(stacks)
            # The signal's default action ends the process: chained, it says that the stacks are complete.
            faulthandler.register(STACKS_SIGNAL, stacks, chain=True)
            store = TCPStore("127.0.0.1", pickle.loads(connection.recv_bytes()), is_master=False)
            connection.send_bytes(pickle.dumps(Ready()))
            while _serve(connection, store):
                pass
    except EOFError:  # the tests' process has closed the connection
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _serve(connection: Connection[Any, Any], store: Store) -> bool:
    """Answers one task; False when the function raised, for then the process ends and its connections with it."""
    task: Task = pickle.loads(connection.recv_bytes())
    surroundings = _Surroundings.now()
    try:
        value = pickle.dumps(_perform(task, store))
    except BaseException as error:
        told = RankError(type_name=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        connection.send_bytes(pickle.dumps(Raised(error=told)))
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(pickle.dumps(Returned(pickled_value=value)))
    connection.recv_bytes()  # Clean
    connection.send_bytes(pickle.dumps(surroundings.restore()))
    return True


def _perform(task: Task, store: Store) -> object:
    """The function's value, found in a process group that is new."""
    sys.path[:] = task.sys_path
    os.environ.update(task.env)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    fn, args = pickle.loads(task.call)
    if task.store_prefix is not None:
        group_store = PrefixStore(task.store_prefix, store)
        dist.init_process_group("gloo", store=group_store, rank=task.rank, world_size=task.num_ranks)
        # Nobody begins, and perhaps dies at once, while another is still connecting to it.
        if group_store.add("arrived", 1) == task.num_ranks:
            group_store.set("all arrived", "")
        group_store.wait(["all arrived"])
    value: object = fn(task.rank, *args)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Surroundings:
    """What a worker was like before a run, to make it so again."""

    environ: dict[str, str]
    folder: str
    signal_handlers: dict[int, Any]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> _Surroundings:
        return cls(
            environ=dict(os.environ),
            folder=os.getcwd(),
            signal_handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
            threads=frozenset(threading.enumerate()),
        )

    def restore(self) -> str:
        """Why the worker cannot be used again; the empty string when it can."""
        try:
            gc.collect()  # data loaders end their workers when they are collected; DDP may hang without its group
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()
            forget_compiled_graphs()
            os.environ.clear()
            os.environ.update(self.environ)
            os.chdir(self.folder)
            for number, handler in self.signal_handlers.items():
                if signal.getsignal(number) != handler:
                    signal.signal(number, handler)
            torch.set_num_threads(1)
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        except Exception:  # told to the tests; the worker is thrown away
            return traceback.format_exc()
        deadline = time.monotonic() + _THREAD_GRACE_SECONDS
        left = [thread.name for thread in threading.enumerate() if self._is_leaked(thread, deadline)]
        left += [process.name for process in multiprocessing.active_children()]
        return f"left running: {', '.join(left)}" if left else ""

    def _is_leaked(self, thread: threading.Thread, deadline: float) -> bool:
        """True for a thread of the run that does not end by itself in the moment that all of them have."""
        if thread in self.threads or isinstance(thread, threading._DummyThread):  # a dummy is a thread of C++
            return False
        thread.join(max(deadline - time.monotonic(), 0.0))
        return thread.is_alive()


def forget_compiled_graphs() -> None:
    """Have torch count from nothing what is compiled: where something is, the library leaves some looks out."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


def forget_meshes() -> None:
    """Have torch's arithmetic on DTensors give none that lies on a mesh of an earlier run, whose groups are gone."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None:
        cached = tensors.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(cached, "cache_clear", cached.cache.cache_clear)()
