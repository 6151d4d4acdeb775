"""What it takes to load and to save a sharded checkpoint: ours, torch.distributed.checkpoint (DCP), one full state.

A language model of 32 million parameters, sharded with fully_shard block by block, with the state of AdamW: 383 MB in
all. Gloo ranks, one thread each. A load puts it into a model and an optimizer that exist and hold other values, on as
many ranks as saved it, on fewer and on more; its time is that of the rank that takes longest, and the files are in the
page cache. Ours checks all that it reads. Peers do what their documentation says: get_state_dict, dcp.load,
set_state_dict; the full state is read by the first rank, from a mapped file, and broadcast. A save has returned when
it is durable: DCP with sync_files. What each save wrote is loaded again, untimed, and compared.

Of DCP's settings those are taken that were fastest here. Making models, optimizers, process groups and checkpointers
is not timed. Before each run the processes give the system what memory they keep, so that none finds its temporaries
warm.

Not measured: files that are not in the page cache, network file systems, an accelerator, saves in the background.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.checkpoint_ranks import (
    Done,
    Load,
    Measures,
    Order,
    Rank,
    Save,
    Show,
    Task,
    checkpointing_rank,
    full_digest,
)
from benchmarks.checkpoint_ways import WAYS, WayName
from benchmarks.gang import Gang
from benchmarks.harness import Claim, Comparison, Readings, Result, Side, UnlikeWorkError, compare_measures, shown_value
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples

__all__ = ["Ranks", "Seen", "main", "sides_of_loads", "sides_of_saves", "started"]

LARGE = Task(num_blocks=8, width=512, num_words=13_003)  # words that no number of ranks divides
NAMES: Mapping[WayName, str] = {
    "dcp": "torch.distributed.checkpoint",
    "ours": "ShardCheckpointer",
    "full": "full state, by rank 0",
}
DIRECTIONS = ((2, 2), (4, 2), (2, 4))  # how many ranks saved, how many load
LOAD = Claim(at_most=0.4)
SAVE = Claim(at_most=0.7)
READ = QuantileTarget(quantile=1.0, at_most=1.06)
PEAK = QuantileTarget(quantile=1.0, at_most=64e6)
LOAD_SECONDS, SAVE_SECONDS = 38.0, 75.0  # how long to go on, about
MIN_ROUNDS = 5
SECONDS_TO_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the runs of one way took besides wall time."""

    cpu_seconds: list[float] = field(default_factory=list)
    """A rank's, in the mean."""
    read_shares: list[float] = field(default_factory=list)
    """What all ranks read, over what they held afterwards."""
    peak_bytes: list[list[float]] = field(default_factory=list)
    """Of each rank."""

    def add(self, answers: Sequence[Done]) -> None:
        took = _took(answers)
        self.cpu_seconds.append(mean(each.cpu_seconds for each in took))
        self.read_shares.append(sum(each.read_bytes for each in took) / sum(done.state_bytes for done in answers))
        self.peak_bytes.append([float(each.peak_bytes) for each in took])

    def clear(self) -> None:
        """Forget the rounds that were not read."""
        for values in (self.cpu_seconds, self.read_shares, self.peak_bytes):
            values.clear()


Sights = Mapping[WayName, Seen]


class Ranks:
    """Some ranks that hold the state together, and save and load it."""

    def __init__(self, gang: Gang[Rank, Order, Done]) -> None:
        self._gang = gang
        self._steps = itertools.count(1)
        self._digest = full_digest([done.parts for done in gang.ask(Show())])

    def save(self, way: WayName) -> tuple[Path, list[Done]]:
        """Where the state was saved, and what each rank says of it."""
        answers = self._ask(Save(way, next(self._steps)))
        path = answers[0].path
        assert path is not None
        return path, answers

    def load(self, way: WayName, path: Path) -> tuple[str, list[Done]]:
        """The digest of what was loaded, and what each rank says of it."""
        answers = self._ask(Load(way, path))
        digest = full_digest([done.parts for done in answers])
        if digest != self._digest:
            raise UnlikeWorkError(f"{NAMES[way]} did not load from {path} what was saved there")
        return digest, answers

    def _ask(self, order: Order) -> list[Done]:
        return self._gang.ask(order, deadline_seconds=SECONDS_TO_WAIT)


@contextmanager
def started(num_ranks: int, task: Task, storage: Path) -> Iterator[Ranks]:
    """So many ranks, which save in ``storage``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setups = [
        Rank(rank=rank, world_size=num_ranks, port=store.port, storage=storage, task=task) for rank in range(num_ranks)
    ]
    with Gang(checkpointing_rank, setups) as gang:
        yield Ranks(gang)


def main(share: float = 1.0) -> list[Result]:
    """A table of times for each direction of loading, one of bytes read, one of memory, and one of saving."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = {num: stack.enter_context(started(num, LARGE, Path(folder))) for num in (2, 4)}
        times, reads, peaks = [], [], []
        for saving, loading in DIRECTIONS:
            compared, seen = compare_loads(
                ranks[saving], ranks[loading], f"{saving} to {loading} ranks", share * LOAD_SECONDS
            )
            times.append(compared)
            reads += [_read_row(f"{saving} to {loading}", way, seen[way]) for way in WAYS if way != "full"]
            peaks += [_peak_row(f"{saving} to {loading}", way, seen[way]) for way in WAYS]
        saves = compare_saves(ranks[2], "2 ranks", share * SAVE_SECONDS)
    full_note = "the full state is not among them: rank 0 maps its file, and what it sends is not read from one"
    return [
        *times,
        QuantileTable(title="Bytes read by a load, over those needed", rows=tuple(reads), notes=(full_note,)),
        QuantileTable(title="Memory of a rank during a load, over that after it", rows=tuple(peaks)),
        saves,
    ]


def compare_loads(saving: Ranks, loading: Ranks, what: str, budget_seconds: float) -> tuple[Comparison, Sights]:
    """How long loading takes in each way, and what else was seen of it."""
    title = f"Load, {what}, wall time"
    seen = _nothing_seen()
    paths = {way: saving.save(way)[0] for way in WAYS}
    compared = _compared(title, sides_of_loads(loading, paths, seen, title), seen, budget_seconds)
    for path in paths.values():
        _remove(path)
    return compared, seen


def compare_saves(ranks: Ranks, what: str, budget_seconds: float) -> Comparison:
    """How long saving takes in each way."""
    title = f"Save to durable, {what}, wall time"
    seen = _nothing_seen()
    return _compared(title, sides_of_saves(ranks, seen, title), seen, budget_seconds)


def sides_of_loads(ranks: Ranks, paths: Mapping[WayName, Path], seen: Sights, title: str) -> list[Side]:
    """Sides that read how long a load takes in seconds, on the rank that takes longest."""

    def side(way: WayName) -> Side:
        def run() -> Readings:
            digest, answers = ranks.load(way, paths[way])
            seen[way].add(answers)
            return Readings(values={title: _longest(answers)}, work=digest)

        return Side(name=NAMES[way], run=run, claim=LOAD if way == "ours" else None)

    return [side(way) for way in WAYS]


def sides_of_saves(ranks: Ranks, seen: Sights, title: str) -> list[Side]:
    """Sides that read how long a save takes in seconds, on the rank that takes longest; what was saved is loaded, and
    removed."""

    def side(way: WayName) -> Side:
        def run() -> Readings:
            path, answers = ranks.save(way)
            seen[way].add(answers)
            digest, _ = ranks.load(way, path)
            _remove(path)
            return Readings(values={title: _longest(answers)}, work=digest)

        return Side(name=NAMES[way], run=run, claim=SAVE if way == "ours" else None)

    return [side(way) for way in WAYS]


def _nothing_seen() -> Sights:
    return {way: Seen() for way in WAYS}


def _compared(title: str, sides: Sequence[Side], seen: Sights, budget_seconds: float) -> Comparison:
    """After a round that warms up and one that tells how long a round takes, as many as the budget allows."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        for side in (sides[0], *sides):
            side.run()
        seconds.append(time.perf_counter() - began)
    for each in seen.values():
        each.clear()
    num_rounds = max(MIN_ROUNDS, round((budget_seconds - sum(seconds)) / seconds[-1]))
    (compared,) = compare_measures([title], sides, num_rounds=num_rounds, num_warmup_rounds=0)
    cpu = [f"{NAMES[way]} {shown_value(median(each.cpu_seconds), 'seconds')}" for way, each in seen.items()]
    return dataclasses.replace(compared, notes=(f"CPU time of a rank, mean: {', '.join(cpu)}",))


def _read_row(what: str, way: WayName, seen: Seen) -> Samples:
    return Samples(
        name=f"{what}: {NAMES[way]}",
        occasions=[[share] for share in seen.read_shares],
        unit="count",
        target=READ if way == "ours" else None,
    )


def _peak_row(what: str, way: WayName, seen: Seen) -> Samples:
    return Samples(
        name=f"{what}: {NAMES[way]}",
        occasions=seen.peak_bytes,
        unit="bytes",
        target=PEAK if way == "ours" else None,
    )


def _longest(answers: Sequence[Done]) -> float:
    return max(each.wall_seconds for each in _took(answers))


def _took(answers: Sequence[Done]) -> list[Measures]:
    return [done.took for done in answers if done.took is not None]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
