"""What its own checkpoints cost ElasticTrainer's training: copied before a step, beside its passes, and on a shelf.

One rank with one thread, and a core that is idle beside it: a model of 12.6 million parameters with the state of AdamW,
151 MB in all, trained by hand and with the trainer. After one step of a run all of the state is saved, and the other
steps go on beside that. A save blocks while nothing is trained for its sake: until the call returns, or, with the
trainer, where a step begins, before its ``optimizer.step()``, and at its boundary. It loses what these steps take more
than as many that were taken just before, without a save; where it is not over by then, until it is.

Beside them stands one copy of the same bytes, by hand, to memory that is kept, of which nothing is written. The peer is
``dcp.async_save`` in a loop by hand, with a stager that is kept and the settings that were fastest. Each loop has a
process of its own, and they take turns. All come to the same bits, and what each saves is loaded once and compared.

With a GPU the same again, of 134 million parameters, 1.6 GB: what is kept is pinned there, and the copy by hand is the
time that the bytes take from the device to the host. That is ``main_on_gpu``, which ``make gpu`` runs.

Not measured: several ranks, whose saves are in checkpoint_save.py; network file systems; saves that are due before the
one before them is over; the copies that are kept for signals, which are in held_copies.py.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Readings,
    Result,
    Side,
    comparison_of,
    paired_ratios,
    run_rounds,
    shown_value,
)
from benchmarks.quantiles import QuantileTable, Samples
from benchmarks.trainer_save_ranks import Done, LoopName, Rank, Run, Task, training_process

__all__ = [
    "BLOCKED",
    "BUSY",
    "LOST",
    "NAMES",
    "Gangs",
    "main",
    "on_one_rank",
    "sides_of_saves",
    "started",
    "tables_of_saves",
]

Values = Sequence[Sequence[Mapping[str, float]]]
"""What run_rounds read: of the baseline once more, then of each side, round by round."""

ON_HOST = Task(widths=(1024, 3072, 3072), num_samples=64, num_steps=10)
ON_GPU = Task(widths=(4096, 8192, 8192, 4096), num_samples=4096, num_steps=12, device="cuda")
NAMES: Mapping[LoopName, str] = {
    "copy": "by hand, one copy that is not written",
    "reused": "by hand, async_save, stager kept",
    "before": "ElasticTrainer, copied before the step",
    "beside": "ElasticTrainer, copied beside its passes",
    "shelf": "ElasticTrainer, beside its passes, on a shelf",
}
BLOCKED, BUSY, LOST = "Blocked by a save", "Steps with a save", "Lost"
BESIDE_ON_GPU = Claim(at_most=0.3)
"""Of what one copy blocks: what is copied beside the passes of a step on a GPU."""
HOST_SECONDS, GPU_SECONDS = 180.0, 120.0  # how long to go on, about
MIN_ROUNDS = 5
SECONDS_TO_WAIT = 180.0
IN_MEMORY = Path("/dev/shm")
NO_GPU = "copies from a GPU are not among these: `make gpu` measures them"

Gangs = Mapping[LoopName, Gang[Rank, Run, Done]]


@dataclass(slots=True)
class Seen:
    """What the runs tell besides times."""

    state_bytes: int = 0
    num_late: dict[LoopName, int] = field(default_factory=dict)
    """Runs whose save was waited for."""

    def add(self, loop: LoopName, done: Done) -> None:
        self.state_bytes = done.state_bytes
        self.num_late[loop] = self.num_late.get(loop, 0) + done.is_late


def main(share: float = 1.0) -> list[Result]:
    """Tables of what blocks, of what is lost, and of ours over the peer, on the host."""
    results = on_one_rank(ON_HOST, budget_seconds=share * HOST_SECONDS)
    return [dataclasses.replace(results[0], notes=(*results[0].notes, NO_GPU)), *results[1:]]


def main_on_gpu() -> list[Result]:
    """The same tables on a GPU."""
    return [*on_one_rank(ON_GPU, budget_seconds=GPU_SECONDS)]


def on_one_rank(task: Task, *, budget_seconds: float) -> list[Comparison | QuantileTable]:
    """The tables for one device."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as name, started(task, Path(name)) as gangs:
        sides = sides_of_saves(gangs, seen)
        return tables_of_saves(sides, _rounds(sides, budget_seconds), task, seen)


@contextmanager
def started(task: Task, folder: Path) -> Iterator[Gangs]:
    """A process for each loop, which saves in a folder of its own."""
    with ExitStack() as stack:
        shelves = IN_MEMORY if IN_MEMORY.is_dir() else folder
        shelf = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shelves)))
        gangs: dict[LoopName, Gang[Rank, Run, Done]] = {}
        for loop in NAMES:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(lambda kept: None, store)  # as long as there are processes that know it
            (folder / loop).mkdir()
            setup = Rank(loop=loop, port=store.port, folder=folder / loop, shelf=shelf, task=task)
            gangs[loop] = stack.enter_context(Gang(training_process, [setup]))
        yield gangs


def sides_of_saves(gangs: Gangs, seen: Seen) -> list[Side]:
    """Sides that read what a save takes; each has shown that it saves what there is."""

    def side(loop: LoopName) -> Side:
        (shown,) = gangs[loop].ask(Run(shows=True), deadline_seconds=SECONDS_TO_WAIT)

        def run() -> Readings:
            (done,) = gangs[loop].ask(Run(shows=False), deadline_seconds=SECONDS_TO_WAIT)
            seen.add(loop, done)
            values = {BLOCKED: done.blocked_seconds, BUSY: done.busy_seconds, LOST: done.lost_seconds}
            return Readings(values=values, work=(done.digest, shown.saved_digest))

        return Side(name=NAMES[loop], run=run)

    return [side(loop) for loop in NAMES]


def tables_of_saves(sides: Sequence[Side], values: Values, task: Task, seen: Seen) -> list[Comparison | QuantileTable]:
    """What blocks and how long steps with a save take, over one copy; what is lost; and ours over the peer."""
    is_on_gpu = task.device == "cuda"
    what = f"{'a GPU' if is_on_gpu else 'one rank'}, {shown_value(seen.state_bytes, 'bytes')} of state"
    late = ", ".join(f"{NAMES[loop]} {number}" for loop, number in seen.num_late.items() if number)
    claiming = [
        dataclasses.replace(side, claim=BESIDE_ON_GPU) if is_on_gpu and side.name == NAMES["beside"] else side
        for side in sides
    ]
    blocked, busy = comparison_of(BLOCKED, claiming, values), comparison_of(BUSY, sides, values)
    of_trainer = (
        "ElasticTrainer: where a step begins, before its optimizer.step(), and at its boundary, less the same of as "
        "many steps without a save"
    )
    waited = (
        f"runs whose save was not over with the last of {task.num_steps} steps, and is waited for: {late or 'none'}"
    )
    return [
        dataclasses.replace(blocked, title=f"{BLOCKED}, {what}", notes=(of_trainer,)),
        dataclasses.replace(
            busy, title=f"{task.num_steps} steps, the first of which is saved, {what}", notes=(waited,)
        ),
        _lost(sides, values, what, task),
        _over_peer(sides, values, what),
    ]


def _lost(sides: Sequence[Side], values: Values, what: str, task: Task) -> QuantileTable:
    rows = [
        Samples(name=side.name, occasions=[[one[LOST]] for one in mine])
        for side, mine in zip(sides, values[1:], strict=True)
    ]
    note = f"what {task.num_steps} steps with a save take more than {task.num_steps} just before, without one"
    return QuantileTable(title=f"Training time that a save loses, {what}", rows=tuple(rows), notes=(note,))


def _over_peer(sides: Sequence[Side], values: Values, what: str) -> QuantileTable:
    """What blocks in ours over what blocks in the peer."""
    blocked = {side.name: [one[BLOCKED] for one in mine] for side, mine in zip(sides, values[1:], strict=True)}
    peer = NAMES["reused"]
    rows = [
        Samples(
            name=f"{NAMES[loop]}, over {peer}",
            occasions=[[ratio] for ratio in paired_ratios(blocked[NAMES[loop]], blocked[peer])],
            unit="count",
        )
        for loop in ("before", "beside", "shelf")
    ]
    return QuantileTable(title=f"{BLOCKED}, ours over the peer round by round, {what}", rows=tuple(rows))


def _rounds(sides: Sequence[Side], budget_seconds: float) -> Values:
    """After a round that warms up and tells how long a round takes, as many as the budget allows."""
    began = time.perf_counter()
    for side in (sides[0], *sides):
        side.run()
    seconds = time.perf_counter() - began

    def read(side: Side) -> Readings:
        done = side.run()
        assert isinstance(done, Readings)
        return done

    num_rounds = max(MIN_ROUNDS, round((budget_seconds - seconds) / seconds))
    return run_rounds(sides, read, num_rounds=num_rounds, num_warmup_rounds=0)
