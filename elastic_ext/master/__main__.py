"""python -m elastic_ext.master: the master of one job.

    python -m elastic_ext.master --port 0 --port-file master.port --state-dir master --token-file master.token

The exit status is 0 after SIGTERM, SIGINT or the end of whoever started it, 1 if another process has become this job's
master, 2 if it could not be started as asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from .arguments import parse

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Be the master; gives the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of it is told here
    from .process import NotStarted, serve
    from .store import Superseded

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("elastic-ext master %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("elastic_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        asyncio.run(serve(options))
    except NotStarted as error:
        print(f"elastic-ext master: refused: {error}", file=sys.stderr)
        return 2
    except Superseded as error:
        print(f"elastic-ext master: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
