"""python -m elastic_ext.master: the master of one job.

    python -m elastic_ext.master --port 0 --port-file master.port --state-dir master --token-file master.token

The exit status is 0 after SIGTERM or SIGINT, or once the other end of the pipe --lifeline is closed, as where the agent
that started it has ended; 1 if another process has become this job's master; 2 if it could not be started as asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

from .arguments import parse

__all__ = ["main"]

_MOST_FILES = 65_536


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a master; gives the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines: what matters is logged by this library
    from .process import MasterNotStarted, serve
    from .store import Superseded

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("elastic-ext master %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("elastic_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _raise_limit_of_files()
    _look_for_garbage_seldom()

    async def serve_until_told() -> None:
        has_to_end = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, has_to_end.set)
        if options.lifeline is not None:
            loop.add_reader(options.lifeline, _look_at, options.lifeline, has_to_end)
        await serve(options, has_to_end)

    try:
        asyncio.run(serve_until_told())
    except MasterNotStarted as error:
        print(f"elastic-ext master: refused: {error}", file=sys.stderr)
        return 2
    except Superseded as error:
        print(f"elastic-ext master: {error}", file=sys.stderr)
        return 1
    return 0


def _look_at(lifeline: int, has_to_end: asyncio.Event) -> None:
    """End the master where the other end of the pipe ``lifeline`` is closed; nobody writes into the pipe."""
    try:
        is_over = not os.read(lifeline, 4096)
    except OSError:
        is_over = True
    if is_over:
        has_to_end.set()


def _look_for_garbage_seldom() -> None:
    """Collect garbage seldom: no call is answered meanwhile, and a full collection takes up to a tenth of a second."""
    gc.collect()
    gc.freeze()  # what was imported is there for good
    gc.set_threshold(700, 10, 100)


def _raise_limit_of_files() -> None:
    """Raise the limit of open files, since each agent has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
