"""elastic-run: torchrun that watches, explains and leaves no mess. The same as `elastic-ext run`.

    elastic-run --standalone --nproc-per-node=8 train.py --its-own-arguments

It takes torchrun's whole command line. The exit status is 0 if all workers ended well, 1 if the job failed, 2 if it
could not be started as asked, and 128 + N after signal N.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from .agent.arguments import LaunchRefused, parse
from .agent.launcher import launch

__all__ = ["main"]

_OF_TORCH = "torch.distributed.elastic.multiprocessing.api"
_FOR_ITSELF = {
    "GRPC_VERBOSITY": "ERROR",  # of a master that comes and goes the journal tells
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # workers have a new store in each round
}
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
    for_itself = {name: value for name, value in _FOR_ITSELF.items() if name not in os.environ}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.signals_to_handle  # torch takes it from there
    given = dict(os.environ)
    os.environ.update(for_itself)
    try:
        return launch(options, given, as_given=partial(_without, for_itself))
    except LaunchRefused as error:
        return _refuse(error)


@contextmanager
def _without(for_itself: Mapping[str, str]) -> Iterator[None]:
    """The environment without what this command has set in it for itself: torch starts workers with what there is."""
    for name in for_itself:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.update(for_itself)


def _refuse(error: Exception) -> int:
    print(f"elastic-run: refused: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
