"""The process that works out what memory a model's steps take: asked on standard input, it answers on standard output.

It gives way to whoever else wants a processor, and ends with the process that has started it. What it imports is the
user's code: that prints where nobody reads, and finds no ranks to join and no accelerator.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from .questions import IS_ANALYSIS, AnalysisRequest, MemoryAnswer

__all__ = ["main"]

_LEAST_PRIORITY = 19
_PROCESSOR_SECONDS = 300
_MEMORY_BYTES = 4 << 30  # beside what torch itself takes
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    """Read one question from standard input and answer it."""
    with _answers() as answers:
        text = sys.stdin.readline()
        threading.Thread(target=_end_with_asker, name="elastic_ext asker", daemon=True).start()
        _be_modest()

        def tell(answer: MemoryAnswer) -> None:
            answers.write(answer.to_json() + "\n")
            answers.flush()

        try:
            request = AnalysisRequest.from_json(text)
            _go_to(request)
            from .analysis import analyse  # imports torch, which reads its environment then

            _limit(resource.RLIMIT_DATA, _data_bytes() + _MEMORY_BYTES)
            if request.question.main is not None:
                request.question.main.take_up()
            analyse(request.question, tell)
        except MemoryError:
            tell(MemoryAnswer(problem=f"predicting the memory of steps needs more than {_MEMORY_BYTES >> 30} GiB"))
        except BaseException as error:  # a script may do anything as it is imported: told to who has asked
            text = " ".join(str(error).split())
            why = f"{type(error).__name__}: {text[:300]}"
            tell(MemoryAnswer(problem=f"importing the code of model_factory in another process failed: {why}"))
    os._exit(0)  # whatever the user's code has begun


@contextlib.contextmanager
def _answers() -> Iterator[TextIO]:
    """The file that answers are written to; what else is printed goes nowhere."""
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    with os.fdopen(own, "w", encoding="utf-8") as answers:
        yield answers


def _end_with_asker() -> None:
    """End this process when the asker is gone: it holds standard input open while it wants an answer."""
    sys.stdin.read()
    os._exit(1)


def _be_modest() -> None:
    """Take little: the lowest priority, limits, one thread, no accelerator, and no ranks to join."""
    os.nice(_LEAST_PRIORITY)
    _limit(resource.RLIMIT_CPU, _PROCESSOR_SECONDS)
    _limit(resource.RLIMIT_CORE, 0)
    for name in [*os.environ]:
        if name in _OF_RANKS or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", IS_ANALYSIS: "1"})


def _limit(what: int, value: int) -> None:
    """Set a resource limit of this process to ``value``, or leave a smaller one as it is."""
    soft, hard = resource.getrlimit(what)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    if soft == resource.RLIM_INFINITY or soft > most:
        resource.setrlimit(what, (most, hard))


def _data_bytes() -> int:
    """The bytes of this process's own memory, touched or not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")), 0)


def _go_to(request: AnalysisRequest) -> None:
    """Go to the folder and module path of the asker, so that modules are found as they are there."""
    sys.argv[:] = request.argv
    sys.path[:] = request.path
    with contextlib.suppress(OSError):
        os.chdir(request.folder)
