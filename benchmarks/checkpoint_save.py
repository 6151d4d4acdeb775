"""What saving costs while training goes on: ours in the background, and torch.distributed.checkpoint (DCP) in each way.

Language models of 41 and of 88 million parameters, sharded with fully_shard block by block, with the state of AdamW:
496 MB and 1055 MB in all. Gloo ranks, one thread each: two of them hold 0.25 GB each, and 0.53 GB, four of them 0.26
GB. A save blocks until the call returns, when all of the state may change; it is durable when its end has been waited
for. Both are the time of the rank that takes longest. Beside them stands the machine by itself: one copy of the same
bytes to memory that was touched before, and one file of them for each rank, written with O_DIRECT, all at once, and
synced.

The first save of each way is loaded and compared with the state that was saved, all of which had changed as soon as
the call returned. Before each save the processes give the system what memory they keep for nothing, so that none
finds its temporaries warm. A small model trains on the same ranks, in its own table while the large state is saved.

Peers: ``dcp.save``, and ``async_save`` with a stager that is kept, with the settings of DCP that were fastest;
``async_save`` with nothing but a folder; ``async_save`` from processes of its own, with a stager in shared memory that
is kept. BlockingAsyncStager can keep its copy only where there is an accelerator, whose pinned memory it asks for.

Not measured: an accelerator, network file systems, a state that changes its shape; more than 0.53 GB a rank, which
takes longer than a benchmark is given, and six times as much memory with what all ways keep.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.checkpoint_ranks import Rank, Task, full_digest
from benchmarks.checkpoint_save_ranks import (
    Answer,
    Held,
    Load,
    Order,
    Prepare,
    Prepared,
    Save,
    Saved,
    Show,
    Train,
    Trained,
    saving_rank,
)
from benchmarks.checkpoint_ways import BackgroundName
from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Readings,
    Result,
    Side,
    UnlikeWorkError,
    comparison_of,
    paired_ratios,
    run_rounds,
    shown_value,
)
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples

__all__ = [
    "BLOCKED",
    "CPU",
    "DURABLE",
    "EXTRA",
    "LOST",
    "LOST_OVER",
    "NAMES",
    "STEP",
    "TRAINED",
    "SavingRanks",
    "first_saves",
    "main",
    "saving_ranks",
    "sides_of_saves",
    "sides_of_training",
    "tables_of_saves",
    "tables_of_training",
]

Values = Sequence[Sequence[Mapping[str, float]]]
"""What run_rounds read: of the baseline once more, then of each side, round by round."""

_Kind = TypeVar("_Kind")

LARGE = Task(num_blocks=11, width=512, num_words=13_003)  # words that no number of ranks divides
LARGER = Task(num_blocks=11, width=768, num_words=13_003)
NAMES: Mapping[BackgroundName, str] = {
    "dcp": "dcp.save",
    "ours": "ShardCheckpointer, in the background",
    "default": "async_save, defaults",
    "reused": "async_save, stager kept",
    "process": "async_save, own processes",
    "machine": "the machine by itself",
}
BLOCKED, DURABLE = "Blocked by a save", "Until a save is durable"
CPU, EXTRA = "CPU time of a rank for a save", "Extra memory of a save"
STEP, LOST = "Step", "Lost"
CLAIMS = {BLOCKED: Claim(at_most=0.10), DURABLE: Claim(at_most=0.5), CPU: Claim(at_most=0.4)}
BLOCKED_OVER: Mapping[BackgroundName, float] = {"default": 0.15, "reused": 1.0}
LOST_OVER: Mapping[BackgroundName, float] = {"dcp": 0.12, "default": 0.20, "reused": 0.25}
TRAINED: Sequence[BackgroundName] = ("ours", "default", "reused", "process")
NO_SAVE = "no save"
FRESH: Sequence[BackgroundName] = ("ours", "dcp", "ours", "reused", "ours")
FIRST_OVER_LATER = QuantileTarget(quantile=0.5, at_most=2.0)
NO_EXTRA = QuantileTarget(quantile=1.0, at_most=8e6)  # 0, but for what threads and collectives take
TRAIN_SECONDS = 35.0  # how long to go on, about
MIN_ROUNDS = 5
NUM_QUIET_STEPS = 10
NUM_STEPS_TO_PREPARE = 20
NUM_LATER_SAVES = 4
SECONDS_TO_WAIT = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A state that some ranks hold together, and save in every way."""

    num_ranks: int
    task: Task
    save_seconds: float
    """How long to go on with saves, about."""
    trains: bool = False
    """The small model's steps are measured, too."""


CASES = (
    Case(num_ranks=2, task=LARGE, save_seconds=50.0, trains=True),
    Case(num_ranks=2, task=LARGER, save_seconds=80.0),
    Case(num_ranks=4, task=LARGER, save_seconds=80.0),
)


class SavingRanks:
    """Some ranks that hold the state together, save it and train."""

    def __init__(self, gang: Gang[Rank, Order, Answer], num_ranks: int) -> None:
        self._gang = gang
        self._steps = itertools.count(1)
        self._shown: dict[BackgroundName, str] = {}
        held = _all_of(Held, gang.ask(Show()))
        self._digest = full_digest([each.parts for each in held])
        state_bytes = max(each.num_bytes for each in held)
        self.what = f"{num_ranks} ranks, {shown_value(state_bytes, 'bytes')} of state each"
        """Who saves, and how much."""
        self.kept_bytes: dict[BackgroundName, int] = {}
        """What each way keeps from save to save, on the rank where that is most."""

    def prepare(self, way: BackgroundName) -> None:
        """Make the way, show that it saves what there is, and see what it keeps."""
        before = _all_of(Prepared, self._ask(Prepare(way, NUM_STEPS_TO_PREPARE)))
        after = self.save(way)
        kept = [late.resident_bytes - early.resident_bytes for early, late in zip(before, after, strict=True)]
        self.kept_bytes[way] = max(*kept, 0)

    def first_over_later(self, way: BackgroundName) -> float:
        """How long the very first save blocks, over the median of later ones."""
        self._ask(Prepare(way, NUM_STEPS_TO_PREPARE))
        first, *later = [_longest(each.blocked_seconds for each in self.save(way)) for _ in range(1 + NUM_LATER_SAVES)]
        return first / median(later)

    def save(self, way: BackgroundName) -> list[Saved]:
        """What a save took on each rank; nothing is left of it."""
        saved = _all_of(Saved, self._ask(Save(way, next(self._steps), changes=way not in self._shown)))
        self._end(way, saved[0].path)
        return saved

    def train(self, way: BackgroundName | None) -> list[Trained]:
        """How long steps took on each rank, while the way saved; nothing is left of that."""
        trained = _all_of(Trained, self._ask(Train(way, next(self._steps), NUM_QUIET_STEPS)))
        path = trained[0].path
        if way is not None and path is not None:
            self._end(way, path)
        return trained

    def shown(self, way: BackgroundName) -> str:
        """The digest of what the way has been seen to save."""
        return self._shown[way]

    def _end(self, way: BackgroundName, path: Path) -> None:
        if way not in self._shown:
            held = _all_of(Held, self._ask(Load(way, path)))
            digest = full_digest([each.parts for each in held])
            if digest != self._digest:
                raise UnlikeWorkError(f"{NAMES[way]} did not load from {path} what was to be saved there")
            self._shown[way] = digest
        shutil.rmtree(path)

    def _ask(self, order: Order) -> list[Answer]:
        return self._gang.ask(order, deadline_seconds=SECONDS_TO_WAIT)


@contextmanager
def saving_ranks(num_ranks: int, task: Task, storage: Path) -> Iterator[SavingRanks]:
    """So many ranks in processes that have just begun, which save in a folder of their own in ``storage``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = Path(tempfile.mkdtemp(dir=storage))
    setups = [
        Rank(rank=rank, world_size=num_ranks, port=store.port, storage=folder, task=task) for rank in range(num_ranks)
    ]
    with Gang(saving_rank, setups, make_processes=True) as gang:
        yield SavingRanks(gang, num_ranks)


def main(share: float = 1.0) -> list[Result]:
    """Tables of what a save takes, case by case, of the steps beside it, and of first saves; with less time, without
    the larger state on two ranks."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        storage = Path(name)
        for case in CASES if share >= 1 else (CASES[0], CASES[-1]):
            with saving_ranks(case.num_ranks, case.task, storage) as ranks:
                sides = sides_of_saves(ranks)
                saves = _rounds(sides, share * case.save_seconds)
                results += tables_of_saves(ranks, sides, saves)
                if case.trains:
                    training = sides_of_training(ranks)
                    values = _rounds(training, share * TRAIN_SECONDS)
                    dcp_seconds = median(_columns(sides, saves, BLOCKED)["dcp"])
                    results += tables_of_training(ranks, training, values, dcp_seconds=dcp_seconds)
        results.append(first_saves(FRESH, LARGE, storage))
    return results


# --- saves ----------------------------------------------------------------------------------------------------------


def sides_of_saves(ranks: SavingRanks) -> list[Side]:
    """Sides that read what a save takes; each way has been made and shown to save what there is."""

    def side(way: BackgroundName) -> Side:
        ranks.prepare(way)

        def run() -> Readings:
            return Readings(values=_values(ranks.save(way), is_split=way == "machine"), work=ranks.shown(way))

        return Side(name=NAMES[way], run=run)

    return [side(way) for way in NAMES]


def tables_of_saves(ranks: SavingRanks, sides: Sequence[Side], values: Values) -> list[Result]:
    """A table for each thing that a save takes."""
    notes = {
        BLOCKED: "the machine by itself: one copy of these bytes to memory that was touched before",
        DURABLE: "every side syncs its files (DCP by its own sync_files, which is on by default; DCP does not sync "
        "folders, ours does); the machine by itself: O_DIRECT and fsync, without the copy",
        CPU: "of all threads and of a rank's own processes, from the call until the save is durable, mean of the ranks",
    }
    return [
        _compared(BLOCKED, ranks.what, sides, values, notes[BLOCKED]),
        _blocked_over(ranks.what, sides, values),
        _compared(DURABLE, ranks.what, sides, values, notes[DURABLE]),
        _compared(CPU, ranks.what, sides, values, notes[CPU]),
        _extra_table(ranks, sides, values),
    ]


def _values(saved: Sequence[Saved], *, is_split: bool) -> dict[str, float]:
    """``is_split`` where what is durable is written by itself, after what blocks."""
    return {
        BLOCKED: _longest(each.blocked_seconds for each in saved),
        DURABLE: _longest(each.durable_seconds - (each.blocked_seconds if is_split else 0.0) for each in saved),
        CPU: mean(each.cpu_seconds for each in saved),
        EXTRA: float(max(each.extra_bytes for each in saved)),
    }


def _compared(measure: str, what: str, sides: Sequence[Side], values: Values, note: str) -> Comparison:
    claiming = [
        dataclasses.replace(side, claim=CLAIMS[measure]) if side.name == NAMES["ours"] else side for side in sides
    ]
    compared = comparison_of(measure, claiming, values)
    return dataclasses.replace(compared, title=f"{measure}, {what}", notes=(note,))


def _blocked_over(what: str, sides: Sequence[Side], values: Values) -> QuantileTable:
    """Ours over the peers that do not block until all is done."""
    blocked = _columns(sides, values, BLOCKED)
    rows = [
        Samples(
            name=f"ours over {NAMES[way]}",
            occasions=[[ratio] for ratio in paired_ratios(blocked["ours"], blocked[way])],
            unit="count",
            target=QuantileTarget(quantile=0.5, at_most=at_most),
        )
        for way, at_most in BLOCKED_OVER.items()
    ]
    return QuantileTable(title=f"{BLOCKED}, ours over others round by round, {what}", rows=tuple(rows))


def _extra_table(ranks: SavingRanks, sides: Sequence[Side], values: Values) -> QuantileTable:
    rows = [
        Samples(
            name=NAMES[way],
            occasions=[[value] for value in mine],
            unit="bytes",
            target=NO_EXTRA if way == "ours" else None,
        )
        for way, mine in _columns(sides, values, EXTRA).items()
    ]
    kept = ", ".join(f"{NAMES[way]} {shown_value(size, 'bytes')}" for way, size in ranks.kept_bytes.items())
    notes = (
        "the highest resident memory of a rank and its own processes from the call until the save is durable (VmHWM, "
        "reset before), over their resident memory before the call, when what the way keeps was there already",
        f"kept from save to save (resident after the first save, over that before the way was made): {kept}; shared "
        "memory counts in each process that has it",
    )
    return QuantileTable(title=f"{EXTRA}, beyond what is kept, {ranks.what}", rows=tuple(rows), notes=notes)


def _columns(sides: Sequence[Side], values: Values, measure: str) -> dict[BackgroundName, list[float]]:
    """What each way read, round by round."""
    ways = {name: way for way, name in NAMES.items()}
    _, *of_sides = values
    return {ways[side.name]: [one[measure] for one in mine] for side, mine in zip(sides, of_sides, strict=True)}


# --- training -------------------------------------------------------------------------------------------------------


def sides_of_training(ranks: SavingRanks) -> list[Side]:
    """Sides that read the mean time of a step without a save, and while each way saves, and what the save lost."""

    def side(way: BackgroundName | None) -> Side:
        def run() -> Readings:
            trained = ranks.train(way)
            step = _longest(mean(each.busy_seconds) for each in trained)
            lost = _longest(each.lost_seconds for each in trained)
            return Readings(values={STEP: step, LOST: lost}, work=way is None or bool(ranks.shown(way)))

        return Side(name=NAMES[way] if way else NO_SAVE, run=run)

    return [side(None), *(side(way) for way in TRAINED)]


def tables_of_training(
    ranks: SavingRanks, sides: Sequence[Side], values: Values, *, dcp_seconds: float
) -> list[Result]:
    """A table of steps, one of what saves lost, and one of that over the others; ``dcp_seconds``: dcp.save blocks."""
    steps = dataclasses.replace(
        comparison_of(STEP, sides, values),
        title=f"A step of a small model while a save is in progress, {ranks.what}",
        notes=(f"mean of the steps until the save is durable on all ranks; without one, of {NUM_QUIET_STEPS}",),
    )
    _, _, *of_ways = values
    rows = [
        Samples(name=NAMES[way], occasions=[[seconds] for seconds in _each_lost(mine)])
        for way, mine in zip(TRAINED, of_ways, strict=True)
    ]
    note = (
        f"time from the call until the save is durable, less what the steps made meanwhile take without a save, as "
        f"{NUM_QUIET_STEPS} did just before; dcp.save loses what it blocks"
    )
    lost = QuantileTable(title=f"Training time that a save loses, {ranks.what}", rows=tuple(rows), notes=(note,))
    each = {way: _each_lost(mine) for way, mine in zip(TRAINED, of_ways, strict=True)}
    return [steps, lost, _lost_over(ranks.what, each, dcp_seconds)]


def _lost_over(what: str, lost: Mapping[BackgroundName, Sequence[float]], dcp_seconds: float) -> QuantileTable:
    """What ours loses over what others do, which is what a user pays for a save."""
    others = {**lost, "dcp": [dcp_seconds] * len(lost["ours"])}
    rows = [
        Samples(
            name=f"ours over {NAMES[way]}",
            occasions=[[ratio] for ratio in paired_ratios(lost["ours"], others[way])],
            unit="count",
            target=QuantileTarget(quantile=0.5, at_most=at_most),
        )
        for way, at_most in LOST_OVER.items()
    ]
    title = f"Training time that a save loses, ours over others, {what}"
    note = "round by round; dcp.save by the median of what it blocked, as it loses that"
    return QuantileTable(title=title, rows=tuple(rows), notes=(note,))


def _each_lost(values: Sequence[Mapping[str, float]]) -> list[float]:
    return [one[LOST] for one in values]


# --- first saves ----------------------------------------------------------------------------------------------------


def first_saves(ways: Sequence[BackgroundName], task: Task, storage: Path) -> QuantileTable:
    """How long the first save of two new processes blocks over later ones; a row for each way, in the order given."""
    ratios: dict[BackgroundName, list[float]] = {}
    what = ""
    for way in ways:
        with saving_ranks(2, task, storage) as ranks:
            what = ranks.what
            ratios.setdefault(way, []).append(ranks.first_over_later(way))
    rows = [
        Samples(
            name=NAMES[way],
            occasions=[[ratio] for ratio in mine],
            unit="count",
            target=FIRST_OVER_LATER if way == "ours" else None,
        )
        for way, mine in ratios.items()
    ]
    note = (
        f"ours has prepare() called {NUM_STEPS_TO_PREPARE} steps of the small model before its first save; "
        f"over the median of {NUM_LATER_SAVES} later saves, each pair of processes a sample"
    )
    return QuantileTable(
        title=f"Blocked by the first save over later ones, in new processes, {what}", rows=tuple(rows), notes=(note,)
    )


# --- running --------------------------------------------------------------------------------------------------------


def _rounds(sides: Sequence[Side], budget_seconds: float) -> Values:
    """After a round that warms up and tells how long a round takes, as many as the budget allows."""
    began = time.perf_counter()
    for side in (sides[0], *sides):
        side.run()
    seconds = time.perf_counter() - began
    num_rounds = max(MIN_ROUNDS, round((budget_seconds - seconds) / seconds))

    def read(side: Side) -> Readings:
        done = side.run()
        assert isinstance(done, Readings)
        return done

    return run_rounds(sides, read, num_rounds=num_rounds, num_warmup_rounds=0)


def _all_of(kind: type[_Kind], answers: Sequence[Answer]) -> list[_Kind]:
    """The answers, which are all of this kind."""
    found: list[_Kind] = []
    for each in answers:
        assert isinstance(each, kind)
        found.append(each)
    return found


def _longest(seconds: Iterator[float]) -> float:
    return max(seconds)
