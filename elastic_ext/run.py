"""elastic-run: torchrun that watches, explains and leaves no mess. The same as `elastic-ext run`.

    elastic-run --standalone --nproc-per-node=8 train.py --its-own-arguments

It takes torchrun's whole command line. The exit status is 0 if all workers ended well, 1 if the job failed, 2 if it
could not be started as asked, and 128 + N after signal N.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from .agent.arguments import parse
from .agent.launcher import launch
from .agent.refusals import Refused

__all__ = ["main"]

_OF_TORCH = "torch.distributed.elastic.multiprocessing.api"
_SAID_HERE = ("failed (exitcode", "Sending process %s closing")  # ... with the rank that it was


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of a job."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    except ValueError as error:
        return _refuse(error)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("elastic-run %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger(__package__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.getLogger(_OF_TORCH).addFilter(lambda record: not str(record.msg).startswith(_SAID_HERE))
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # of a master that comes and goes the journal tells
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # workers have a new store in each round
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.signals_to_handle  # torch takes it from there
    try:
        return launch(options, dict(os.environ))
    except Refused as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    print(f"elastic-run: refused: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
