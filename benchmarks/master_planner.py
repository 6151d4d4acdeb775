"""A master whose tuner plans once a second, as a process: ``python -m benchmarks.master_planner --port ...``.

It is started by master_load.py, with what a master may be told, and begins to plan when it is asked to ``resume``. What
plans is the library's tuner, on simulated jobs one after another (tuning_ours.py), so that plans are what they are in a
job with much to choose from; nothing of what it decides goes to this master's own job.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.simulated_job import SimulatedJob
from benchmarks.tuning_ours import Ours
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.master.arguments import parse
from elastic_ext.master.configs import Author
from elastic_ext.master.tuning import Mode
from elastic_ext.records.metrics import JobFacts
from elastic_ext.tuner.decisions import Decision, TuningStanding
from elastic_ext.tuner.measurements import StepReport

__all__ = ["Planner", "main"]

_LEAST_SECONDS = 0.02
"""What a tuner takes longer for is a plan; all else of a step takes a hundredth of that."""
_MOST_STEPS = 400
"""Of one job: what is worth a plan has been planned by then."""


class Planner:
    """A tuner that changes nothing, and says of each plan how many seconds it took."""

    def __init__(self) -> None:
        self._plans = enumerate(self._made(), 1)

    def tick(self, now: float) -> list[Decision]:
        number, seconds = next(self._plans)
        return [Decision(number=number, time=now, kind="hold", reason=f"{seconds:.4f}", base=0)]

    def take_facts(self, now: float, facts: JobFacts) -> list[Decision]:
        return []

    def take_config(self, now: float, config: ElasticConfig, author: Author) -> list[Decision]:
        return []

    def see(self, now: float, seen: StepReport) -> list[Decision]:
        return []

    def pause(self, now: float, why: str) -> list[Decision]:
        return []

    def resume(self, now: float) -> list[Decision]:
        return []

    def undo(self, now: float) -> list[Decision]:
        return []

    def written(self, now: float, number: int, version: int) -> None:
        pass

    def refused(self, now: float, number: int, why: str) -> list[Decision]:
        return []

    @property
    def standing(self) -> TuningStanding:
        return TuningStanding(stand="settled", sentence="it plans")

    def _made(self) -> Iterator[float]:
        """What each plan takes, one after another."""
        for seed in itertools.count():
            job = SimulatedJob(seed)
            tuning = Ours()(job)
            next(tuning)
            for _ in range(_MOST_STEPS):
                seen = job.step()
                begin = time.perf_counter()
                tuning.send(seen)
                seconds = time.perf_counter() - begin
                if seconds > _LEAST_SECONDS:
                    yield seconds


def main(arguments: Sequence[str]) -> int:
    """Be such a master until SIGTERM."""
    options = parse(arguments)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from elastic_ext.master.process import serve  # which loads gRPC, once it is told to say nothing

    def made(mode: Mode, decisions: Sequence[Decision]) -> Planner:
        return Planner()

    async def serve_until_told() -> None:
        has_to_end = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, has_to_end.set)
        await serve(options, has_to_end, tuner=made)

    asyncio.run(serve_until_told())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
