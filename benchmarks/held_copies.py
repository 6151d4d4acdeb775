"""What the copies cost that ElasticTrainer keeps of the state, should a signal end training: with them, over without.

A model of 12.6 million parameters with the state of AdamW, 151 MB in all; one rank, and two gloo ranks with DDP, each
of which copies its half; one thread each, batches in memory. Epochs are short, so that both kinds of copies are made:
at the end of an epoch and within it, by the trainer's own rules for how often. No checkpoint is due meanwhile, and both
sides have storage and an interval; the one differs from the other in ``save_on_signals`` alone.

Each side has processes of its own, and they take turns in blocks of some seconds. While a side waits time passes for
it, too: copies come more often in its training than they would without others, which the notes below the tables tell.

Not measured: training that is copied beside a checkpoint that is being written, an agent's shelf, an accelerator.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Readings,
    Result,
    Side,
    UnlikeWorkError,
    compare_measures,
    shortened,
    shown_value,
)
from benchmarks.held_copies_ranks import Block, Done, Rank, Task, copying_rank

__all__ = ["NAMES", "Seen", "check_copies", "copies_in_words", "main", "on_ranks", "sides_of_training", "started"]

LARGE = Task(widths=(1024, 3072, 3072), num_samples=16, num_steps=8)
NAMES: Mapping[bool, str] = {False: "save_on_signals=False", True: "save_on_signals=True"}
LOST = Claim(at_most=1.02)
BLOCK_SECONDS = 6.0  # about: some copies come in each, by the rules for how often
NUM_ROUNDS = 5
NUM_TRIED = 1  # epochs, to see how long one takes


@dataclass(frozen=True, slots=True)
class Seen:
    """What a side's blocks made besides steps."""

    num_copies: list[int] = field(default_factory=list)
    """Of each block, on each rank."""
    wall_seconds: list[float] = field(default_factory=list)

    def add(self, answers: Sequence[Done]) -> None:
        self.num_copies.append(min(answer.num_copies for answer in answers))
        self.wall_seconds.append(mean(answer.wall_seconds for answer in answers))


Sights = Mapping[bool, Seen]
"""By whether copies are kept for signals."""
Gangs = Mapping[bool, Gang[Rank, Block, Done]]


def main(share: float = 1.0) -> list[Result]:
    """Two tables for one rank, and two for two ranks: of wall and of CPU time."""
    num_rounds, block_seconds = shortened(NUM_ROUNDS, share, least=3), BLOCK_SECONDS * max(share, 0.5)
    return [
        table
        for num_ranks in (1, 2)
        for table in on_ranks(num_ranks, block_seconds=block_seconds, num_rounds=num_rounds)
    ]


def on_ranks(
    num_ranks: int, *, task: Task = LARGE, block_seconds: float = BLOCK_SECONDS, num_rounds: int = NUM_ROUNDS
) -> list[Comparison]:
    """A step with copies over one without: wall time, CPU time."""
    seen = {copies: Seen() for copies in NAMES}
    with tempfile.TemporaryDirectory() as name, started(num_ranks, task, Path(name)) as gangs:
        tried = [gang.ask(Block(NUM_TRIED))[0] for gang in (*gangs.values(), *gangs.values())]  # the first warms up
        num_epochs = max(1, round(block_seconds * NUM_TRIED / min(each.wall_seconds for each in tried)))
        what = _what(num_ranks, tried[0].state_bytes)
        wall, cpu = f"A step, wall time: {what}", f"A step, CPU time: {what}"
        sides = sides_of_training(gangs, Block(num_epochs), task, seen, wall, cpu)
        compared = compare_measures([wall, cpu], sides, num_rounds=num_rounds, num_warmup_rounds=0)
    check_copies(seen)
    note = copies_in_words(seen[True])
    return [dataclasses.replace(comparison, notes=(note,)) for comparison in compared]


@contextmanager
def started(num_ranks: int, task: Task, folder: Path) -> Iterator[Gangs]:
    """Both sides' ranks, each in a process of its own."""
    stores = {copies: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for copies in NAMES}
    with ExitStack() as stack:
        gangs: dict[bool, Gang[Rank, Block, Done]] = {}
        for copies, store in stores.items():
            setups = [
                Rank(
                    rank=rank,
                    world_size=num_ranks,
                    port=store.port,
                    folder=folder / str(copies),
                    task=task,
                    saves_on_signals=copies,
                )
                for rank in range(num_ranks)
            ]
            gangs[copies] = stack.enter_context(Gang(copying_rank, setups))
        yield gangs


def sides_of_training(gangs: Gangs, block: Block, task: Task, seen: Sights, wall: str, cpu: str) -> list[Side]:
    """Sides that read a step's wall and CPU time in seconds, as a mean over the ranks; without copies comes first."""
    num_steps = block.num_epochs * task.num_steps

    def side(copies: bool) -> Side:
        def run() -> Readings:
            answers = gangs[copies].ask(block)
            seen[copies].add(answers)
            values = {
                wall: mean(answer.wall_seconds for answer in answers) / num_steps,
                cpu: mean(answer.cpu_seconds for answer in answers) / num_steps,
            }
            return Readings(values=values, work=tuple(answer.work for answer in answers))

        return Side(name=NAMES[copies], run=run, claim=LOST if copies else None)

    return [side(copies) for copies in NAMES]


def check_copies(seen: Sights) -> None:
    """Raise UnlikeWorkError unless most blocks of the one side made copies, as medians would not tell of them
    otherwise, and no block of the other."""
    made, others = seen[True].num_copies, seen[False].num_copies
    if any(others) or 2 * made.count(0) >= len(made):
        raise UnlikeWorkError(
            f"{NAMES[True]} made {made} copies in its blocks and {NAMES[False]} {others}; the first is to make some in "
            "most of them, and the other none: give blocks more steps"
        )


def copies_in_words(seen: Seen) -> str:
    """How many copies the blocks of the side that makes them made, and how often."""
    num_blocks, num_copies, seconds = len(seen.num_copies), sum(seen.num_copies), sum(seen.wall_seconds)
    return (
        f"{NAMES[True]} made {num_copies} copies in {num_blocks} blocks of "
        f"{shown_value(seconds / num_blocks, 'seconds')} ({', '.join(map(str, seen.num_copies))}), one in "
        f"{shown_value(seconds / num_copies, 'seconds')} of its training; time passes while the other side trains, so "
        "that they come more often than in training alone"
    )


def _what(num_ranks: int, state_bytes: int) -> str:
    state = f"{shown_value(state_bytes, 'bytes')} of state"
    return f"one rank, {state}" if num_ranks == 1 else f"DDP on {num_ranks} ranks, {state} of which each copies a part"
