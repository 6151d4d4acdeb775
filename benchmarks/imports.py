"""How long a script takes to import the library, beside importing torch alone, each in a fresh interpreter.

What is read is the import itself, in a process that has imported nothing else; every module has its bytecode by then,
as after an install. torch stands in the import of both sides.

Claimed of `from elastic_ext import ElasticTrainer`: at most 1.15 times what `import torch` takes. What training needs
beyond that is imported when a trainer is made, where torch's optimizers import most of it anyway.

Not measured: that later import, the start of the interpreter, a disk that has not read the files before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import Claim, Comparison, Reading, Result, Side, compare, shortened

__all__ = ["STATEMENTS", "compared", "imported", "main"]

NUM_ROUNDS = 15
STATEMENTS: Mapping[str, float | None] = {
    # what a script imports: at most so many times what torch takes; None where nothing is claimed
    "import torch": None,
    "from elastic_ext import ElasticTrainer": 1.15,
    "from elastic_ext import ElasticDataLoader, ElasticTrainer": None,
}
_ROOT = Path(__file__).resolve().parent.parent
_READ = """
import time
began = time.perf_counter()
{statement}
seconds = time.perf_counter() - began
import torch
print(seconds, torch.__version__)
"""


def main(share: float = 1.0) -> list[Result]:
    """One table: torch alone, the trainer, and the trainer with its loader."""
    return [compared(num_rounds=shortened(NUM_ROUNDS, share, least=7))]


def compared(*, num_rounds: int) -> Comparison:
    """The imports in turns; the first round, which is not read, leaves the bytecode of modules that have none."""
    sides = [
        Side(
            name=f"`{statement}`",
            run=partial(imported, statement),
            claim=None if at_most is None else Claim(at_most=at_most),
        )
        for statement, at_most in STATEMENTS.items()
    ]
    return compare("Importing the library beside torch", sides, num_rounds=num_rounds)


def imported(statement: str) -> Reading:
    """Import in a fresh interpreter; gives the seconds that took, and which torch is there then."""
    environ = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    script = _READ.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    seconds, version = done.stdout.split()
    return Reading(value=float(seconds), work=version)
