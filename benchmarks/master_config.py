"""From a master being asked to change the config until training runs under the change, on all ranks.

A master, an agent and two ranks in DDP, whose steps take 20 ms and 100 ms; ranks agree at every step. A person sets a
value over gRPC, at moments that have nothing to do with where steps are. Counted is from just before the call until the
last rank begins its first step under the new version. In it: the version is stored, pushed, written to the node's file,
noticed, agreed on at one boundary and applied at the next.

No peer is measured beside it. DLRover's agents ask for a config every 30 s; the others here have none that is
changed in training.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.harness import Result, shortened
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples
from elastic_ext.master.address import Address, MasterPlace
from elastic_ext.master.client import MasterClient
from elastic_ext.master.wire import master_pb2
from elastic_ext.records.agent import MASTER_FILE, MasterRecord

__all__ = ["main"]

STEPS_SECONDS = (0.02, 0.1)
NUM_RANKS = 2
NUM_CHANGES = 40
BEYOND_STEPS_SECONDS = 0.05
DEADLINE_SECONDS = 120.0


def main(share: float = 1.0) -> list[Result]:
    """A row for each length of steps."""
    rows = tuple(_row(seconds, num_changes=shortened(NUM_CHANGES, share, least=10)) for seconds in STEPS_SECONDS)
    return [
        QuantileTable(
            title=f"Set at the master to in force on {NUM_RANKS} ranks, which agree at every step",
            rows=rows,
            notes=("the target is two steps, as they took in the run, and 50 ms",),
        )
    ]


def _row(step_seconds: float, *, num_changes: int) -> Samples:
    draw = random.Random(0)
    asked_ns: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name, _job(Path(name), step_seconds) as place:
        folder = Path(name)
        with MasterClient(place) as client:
            for number in range(num_changes):
                time.sleep(draw.uniform(2, 4) * step_seconds + 0.1)
                now = time.monotonic_ns()
                changes = {"user.tried": str(number)}
                version = client.set_config(master_pb2.SetConfigRequest(changes=changes)).version
                asked_ns[version] = now
                _until(partial(_is_in_force, version, folder))
        begun = [_begun_under(file) for file in _files(folder)]
        length = _usual_step_seconds(_files(folder)[0])
    occasions = [[max(each[version] for each in begun) / 1e9 - asked / 1e9] for version, asked in asked_ns.items()]
    target = QuantileTarget(quantile=0.5, at_most=2 * length + BEYOND_STEPS_SECONDS)
    return Samples(name=f"steps of {1000 * length:.1f} ms", occasions=occasions, target=target)


@contextmanager
def _job(folder: Path, step_seconds: float) -> Iterator[MasterPlace]:
    """The job while it trains, as where its master is."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "elastic_ext.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += ["-m", "benchmarks.master_config_job", str(folder), str(step_seconds)]
    with open(folder / "log", "w") as log:
        node = subprocess.Popen(
            command, env={**os.environ, "ELASTIC_EXT_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}, stderr=log
        )
    try:
        _until(lambda: len(_files(folder)) == NUM_RANKS and all(len(_begun_under(each)) for each in _files(folder)))
        _until((run_dir / MASTER_FILE).exists)
        record = MasterRecord.from_json((run_dir / MASTER_FILE).read_text())
        yield MasterPlace(address=Address.parse(record.address), token_file=Path(record.token_file))
    finally:
        node.terminate()
        node.wait(60)


def _is_in_force(version: int, folder: Path) -> bool:
    return all(version in _begun_under(file) for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("versions-*.txt"))


def _begun_under(file: Path) -> dict[int, int]:
    """When a rank began its first step under each version."""
    begun: dict[int, int] = {}
    for version, began in _lines(file):
        begun.setdefault(version, began)
    return begun


def _usual_step_seconds(file: Path) -> float:
    began = [each for _, each in _lines(file)]
    lengths = sorted(later - earlier for earlier, later in itertools.pairwise(began))
    return lengths[len(lengths) // 2] / 1e9


def _lines(file: Path) -> list[tuple[int, int]]:
    rows = [line.split() for line in file.read_text().splitlines()]
    return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the job does not get on")
        time.sleep(0.05)
