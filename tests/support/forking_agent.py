"""elastic-run whose workers are forked, and need not import torch; only what starts a worker is another one.

    python -m tests.support.forking_agent ARGUMENTS OF ELASTIC-RUN

A *template* is forked before the agent has threads. Where torch would start a Python of a new interpreter for a worker,
the template forks a process that runs the same command line with the same environment, the start in PYTHONPATH
included, and has imported what this process had. It is a child of the template and not of the agent; the template ends
with the agent, and as little as the death of an agent does its own end a worker.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastic_ext import run

__all__ = ["ForkedWorker", "main"]

_REPLY = struct.Struct("!q")  # the pid of a new worker, or the exit code of one that has ended
_MOST_REQUEST_BYTES = 1 << 17


class Template:
    """The process that forks workers, seen from the agent."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._lock = threading.Lock()

    def start(self, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> int:
        """The pid of a worker that leads a session of its own already."""
        return self._ask(json.dumps([list(argv), dict(env)]), streams)

    def reap(self, pid: int) -> int:
        """The exit code of a worker that has ended, as those of ``subprocess`` are."""
        return self._ask(json.dumps(pid), ())

    def _ask(self, told: str, descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [told.encode()], list(descriptors))
            number: int = _REPLY.unpack(self._socket.recv(_REPLY.size))[0]
            return number


class ForkedWorker:
    """A worker, with as much of ``subprocess.Popen`` as torch's agent asks for."""

    def __init__(
        self,
        template: Template,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
    ) -> None:
        streams = (1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno())
        self._template = template
        self.args = args
        self.returncode: int | None = None
        self.pid = template.start(args, env, streams)
        self._end = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and wait([self._end], 0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            if not wait([self._end], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._template.reap(self.pid)
            os.close(self._end)
        return self.returncode


# --- in the template, and in a worker --------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> list[Any] | None:
    """The command and environment of the worker that this process has become; None in the template, as it ends."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_REQUEST_BYTES, 2)
        if not message:
            return None
        told = json.loads(message)
        if isinstance(told, int):
            reply = os.waitstatus_to_exitcode(os.waitpid(told, 0)[1])
        else:
            begun, beginning = os.pipe()
            reply = os.fork()
            if reply == 0:
                requests.close()
                os.setsid()
                for place, descriptor in enumerate(descriptors, 1):
                    os.dup2(descriptor, place)
                for descriptor in (*descriptors, begun, beginning):
                    os.close(descriptor)
                return list(told)
            os.close(beginning)
            os.read(begun, 1)  # ends when the worker has its session
            os.close(begun)
            for descriptor in descriptors:
                os.close(descriptor)
        requests.send(_REPLY.pack(reply))


def _be_worker(agent: int, argv: list[str], environ: dict[str, str]) -> None:
    """Run a Python's command line as an interpreter would that has just begun, and is a child of ``agent``."""
    if environ.get("ELASTIC_EXT_AGENT_PID") == str(agent):
        environ["ELASTIC_EXT_AGENT_PID"] = str(os.getppid())  # by which the start knows that it is that of a worker
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # the environment says where it is
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):  # the agent gives one to workers that it knows to be a Python's
        importlib.import_module("sitecustomize")
    arguments = argv[1:]
    if arguments[0] == "-u":
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """The agent; or a worker of it, which comes back from here as its own script's end has it."""
    agent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        told = _serve(theirs)
        if told is None:
            os._exit(0)
        return _be_worker(agent, *told)
    theirs.close()
    template = Template(ours)

    def start(args: Sequence[str], **options: Any) -> Any:
        if args[0] != sys.executable:
            return subprocess.Popen(args, **options)
        assert options.pop("start_new_session")
        return ForkedWorker(template, args, **options)

    handlers: Any = importlib.import_module(SubprocessHandler.__module__)
    handlers.Popen = start
    sys.exit(run.main())


if __name__ == "__main__":
    main()
