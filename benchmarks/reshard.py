"""What it takes to change how a model in training is spread, live and by a restart; and its steps after that.

Changes: a GPT of 42 million parameters with the state of AdamW, 505 MB in all, on four gloo ranks with one thread each,
which takes a step before each change. Live is all of it: what the change takes is found out, it is prepared, agreed
on, and made. The peer saves with torch.distributed.checkpoint, with those of its settings that were fastest, begins
new processes that import torch, make the model under the other plan and its optimizer, and load; that time ends when
all ranks have the state. What a launcher takes, and the processes that end, is not in it, the model gets no values but
those that are loaded, and files are in the page cache. The full state, told by digests, is the same before and after
each change and after each restart. Both take turns: a change is made in each round, and restarted in three of five;
both count by their medians.

What is sent is what all_to_all_single is handed for other ranks; the least is what of its new rows each rank lacks.
More than that may be 16 bytes for each rank in each exchange, by which ranks say that they are well.
Memory is that of a process at its most, over that before or after, whichever is more; in a gang of its own, whose
allocator gives back at once what it is given back.

Steps: of a smaller model, by hand under a plan from the start, and after a change to it that came from another one.
Both begin with the same state, and are held to the same losses, state and collectives.

Not measured: an accelerator, several machines, gradients that are moved too.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gang import Gang
from benchmarks.harness import (
    Claim,
    Comparison,
    Finding,
    Readings,
    Result,
    Side,
    UnlikeWorkError,
    Verdict,
    compare_measures,
    rounded,
    shortened,
    shown_value,
)
from benchmarks.quantiles import QuantileTable, QuantileTarget, Samples, decide_quantile
from benchmarks.reshard_by_hand import Restart, Task, Way, full_digest, restarted_rank
from benchmarks.reshard_ranks import (
    Arrive,
    Change,
    Done,
    Keep,
    Order,
    Rank,
    Show,
    Train,
    changing_rank,
    digest_of,
)
from benchmarks.trainer_steps import against_aa_interval
from elastic_ext.fsdp.reshard.transition import BUCKET_BYTES

__all__ = ["ChangeRow", "ChangeTable", "Plan", "compare_steps", "main", "measure_changes", "measure_memory"]

NUM_RANKS = 4
WHOLE, GRAD_OP, FULL, HYBRID = Way("no_shard"), Way("shard_grad_op"), Way("full_shard"), Way("hybrid_shard")
TOUR = (  # each strategy to each other, then units, then recomputing
    *(FULL, HYBRID, FULL, WHOLE, FULL, GRAD_OP, WHOLE, HYBRID, WHOLE, GRAD_OP, HYBRID, GRAD_OP, FULL),
    *(Way("full_shard", 2), Way("full_shard", "whole"), FULL),
    *(Way("full_shard", is_recomputed=True), FULL),
)
_NUM_STRATEGIES = 9  # places of the tour, each strategy from full_shard or no_shard and to it among them
FASTER = QuantileTarget(quantile=0.5, at_most=0.1)
"""Of a live change's seconds, over those of the restart."""
PEAK = QuantileTarget(quantile=1.0, at_most=2 * BUCKET_BYTES + (2 << 20))  # what is not a tensor's takes some, too
STEP = Claim(at_most=1.05)
SECONDS_TO_WAIT = 300.0
_TAIL_BYTES = 16

Ranks = Gang[Rank, Order, Done]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run, and how often."""

    task: Task
    """Of the changes."""
    tour: tuple[Way, ...]
    num_rounds: int
    num_restarts: int
    """Of each change: in so many of the rounds."""
    num_memory_rounds: int
    stepping: Task
    arrivals: tuple[tuple[Way, Way], ...]
    """From where the plans whose steps are compared are arrived at."""
    num_in_block: int
    """Steps."""
    num_step_rounds: int

    def shortened(self, share: float) -> Plan:
        """The first strategies of the tour in fewer rounds, each change with fewer restarts beside it."""
        return dataclasses.replace(
            self,
            tour=self.tour if share == 1.0 else self.tour[:_NUM_STRATEGIES],
            num_rounds=shortened(self.num_rounds, share, least=3),
            num_restarts=shortened(self.num_restarts, share, least=1),
            num_memory_rounds=shortened(self.num_memory_rounds, share, least=1),
            num_step_rounds=shortened(self.num_step_rounds, share, least=6),
        )


LARGE = Plan(
    task=Task(num_blocks=12, width=512, num_words=4099),
    tour=TOUR,
    num_rounds=5,
    num_restarts=3,
    num_memory_rounds=2,
    stepping=Task(num_blocks=6, width=256, num_words=1021),
    arrivals=((FULL, WHOLE), (WHOLE, GRAD_OP), (HYBRID, FULL), (GRAD_OP, HYBRID)),
    num_in_block=4,
    num_step_rounds=18,
)


def main(plan: Plan = LARGE, share: float = 1.0) -> list[Result]:
    """A table of changes, one of the memory that they take, and one of steps for each plan."""
    plan = plan.shortened(share)
    with tempfile.TemporaryDirectory() as folder:
        with started(plan.task, plan.tour[0], Path(folder)) as ranks:
            changes = measure_changes(ranks, plan)
        with started(plan.task, plan.tour[0], Path(folder), gives_back=True) as ranks:
            memory = measure_memory(ranks, plan, changes)
        with started(plan.stepping, FULL, Path(folder)) as ranks:
            steps = [compare_steps(ranks, origin, way, plan) for origin, way in plan.arrivals]
    return [changes, memory, *steps]


@contextmanager
def started(task: Task, way: Way, storage: Path, *, gives_back: bool = False) -> Iterator[Ranks]:
    """Ranks that train a model, spread so at first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setups = [
        Rank(
            rank=rank,
            world_size=NUM_RANKS,
            port=store.port,
            storage=storage,
            task=task,
            way=way,
            gives_back=gives_back,
        )
        for rank in range(NUM_RANKS)
    ]
    with Gang(changing_rank, setups) as ranks:
        yield ranks


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class ChangeRow:
    """One change, made live in each round and by a restart in some of them."""

    name: str
    live: list[float] = field(default_factory=list)
    """Seconds, of the rank that takes longest."""
    wiring: list[float] = field(default_factory=list)
    moving: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    """Bytes of memory that a rank takes for a while, at most, with what its allocator keeps."""
    sent_bytes: int = 0
    least_bytes: int = 0
    tail_bytes: int = 0
    """By all ranks; tails, at most."""
    saves: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    """Seconds, with loading."""

    @property
    def peer_seconds(self) -> float:
        return median(map(sum, zip(self.saves, self.restarts, strict=True)))

    @property
    def decided(self) -> tuple[Verdict, str]:
        """Whether what is claimed holds, with the reason in words."""
        if not self.least_bytes <= self.sent_bytes <= self.least_bytes + self.tail_bytes:
            return "fail", f"{self.sent_bytes} bytes were sent, and {self.least_bytes} are enough"
        shares = [[seconds / self.peer_seconds] for seconds in self.live]
        return decide_quantile(Samples(name=self.name, occasions=shares, unit="count", target=FASTER))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeTable:
    """What came of all changes."""

    title: str
    rows: tuple[ChangeRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"**{self.title}** ({len(self.rows[0].live)} rounds)"

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(row.decided[0] for row in self.rows)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                claim=f"{row.name}: live takes at most {FASTER.at_most:g} times what save, restart and load take",
                side="live",
                value=shown_value(median(row.live), "seconds"),
                peer="save, restart and load",
                peer_value=" + ".join(shown_value(median(each), "seconds") for each in (row.saves, row.restarts)),
                ratio=rounded(median(row.live) / row.peer_seconds),
                target=f"≤ {FASTER.at_most:g}, and no byte too many",
                verdict=row.decided[0],
                reason=row.decided[1],
            )
            for row in self.rows
        )

    def table_lines(self) -> list[str]:
        lines = [
            "| change | live, median | of it wiring, moving | save, restart and load | times faster "
            "| sent | over the least | target | verdict |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---|",
        ]
        for row in self.rows:
            live, wiring, moving = (shown_value(median(each), "seconds") for each in (row.live, row.wiring, row.moving))
            peer = " + ".join(shown_value(median(each), "seconds") for each in (row.saves, row.restarts))
            over = f"{row.sent_bytes / row.least_bytes:.3f}" if row.least_bytes else "none is needed"
            lines.append(
                f"| {row.name} | {live} | {wiring}, {moving} | {peer} | {row.peer_seconds / median(row.live):.1f} "
                f"| {shown_value(row.sent_bytes, 'bytes')} | {over} | ≤ {FASTER.at_most:g}, 1 "
                f"| {': '.join(row.decided)} |"
            )
        return lines


def measure_changes(ranks: Ranks, plan: Plan) -> ChangeTable:
    """Go the whole tour in each round, with some restarts in each, so that every place of it has as many."""
    rows = _rows(plan)
    for number in range(plan.num_rounds):
        for at, (row, (_, way)) in enumerate(zip(rows, pairwise(plan.tour), strict=True)):
            _ask(ranks, Train(1, goes_on=True))
            is_restarted = (at + number) % plan.num_rounds < plan.num_restarts
            saved = _ask(ranks, Keep()) if is_restarted else []
            digest = _change(ranks, row, way)
            if saved:
                row.saves.append(max(done.seconds for done in saved))
                row.restarts.append(_restart(plan.task, way, saved[0].path, digest))
    state = f"{shown_value(_state_bytes(plan.task), 'bytes')} of state"
    parts = [seconds for row in rows for seconds in row.restarts]
    note = f"a restart took {shown_value(median(parts), 'seconds')} in the median of all, and its save "
    note += shown_value(median(seconds for row in rows for seconds in row.saves), "seconds")
    largest = max(rows, key=lambda row: max(row.live) / median(row.live))
    return ChangeTable(
        title=f"A change of plan, {NUM_RANKS} ranks, {state}",
        rows=tuple(rows),
        notes=(
            note,
            f"the longest, over the median of its change: {max(largest.live) / median(largest.live):.2f}, of "
            f"{largest.name}",
        ),
    )


def measure_memory(ranks: Ranks, plan: Plan, timed: ChangeTable) -> QuantileTable:
    """What memory ranks take for a while, beside what ``timed`` saw where their allocator keeps some."""
    rows = _rows(plan)
    for _ in range(plan.num_memory_rounds):
        for row, (_, way) in zip(rows, pairwise(plan.tour), strict=True):
            _ask(ranks, Train(1, goes_on=True))
            _change(ranks, row, way)
    samples = [Samples(name=row.name, occasions=[row.peaks], unit="bytes", target=PEAK) for row in rows]
    kept = max(timed.rows, key=lambda row: max(row.peaks))
    return QuantileTable(
        title="Memory of a rank during a change, over the larger of before and after",
        rows=tuple(samples),
        notes=(
            f"two buckets are {shown_value(2 * BUCKET_BYTES, 'bytes')}",
            f"where the allocator keeps memory for later, as it does by itself: at most "
            f"{shown_value(max(kept.peaks), 'bytes')}, in {kept.name}",
        ),
    )


def _change(ranks: Ranks, row: ChangeRow, way: Way) -> str:
    """Make a change live; gives the digest of the state, which stays."""
    before = digest_of(_ask(ranks, Show()))
    answers = _ask(ranks, Change(way))
    digest = digest_of(_ask(ranks, Show()))
    if digest != before:
        raise UnlikeWorkError(f"{row.name}: the state is another one after the change")
    row.live.append(max(done.seconds for done in answers))
    row.wiring.append(max(done.wiring_seconds for done in answers))
    row.moving.append(max(done.moving_seconds for done in answers))
    row.peaks += (float(max(done.peak_bytes, 0)) for done in answers)
    row.sent_bytes = sum(done.sent_bytes for done in answers)
    row.least_bytes = sum(done.least_bytes for done in answers)
    row.tail_bytes = sum(done.num_letters * _TAIL_BYTES for done in answers)
    return digest


def _restart(task: Task, way: Way, path: Path | None, digest: str) -> float:
    """Begin new ranks, which load what was saved; gives how long it takes until all have done so."""
    assert path is not None
    began = time.perf_counter()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setups = [
        Restart(rank=rank, world_size=NUM_RANKS, port=store.port, task=task, way=way, path=path)
        for rank in range(NUM_RANKS)
    ]
    with Gang(restarted_rank, setups) as restarted:
        seconds = time.perf_counter() - began
        if full_digest(restarted.ask(None)) != digest:
            raise UnlikeWorkError(f"{way}: a restart has loaded another state than the change has kept")
    shutil.rmtree(path)
    return seconds


def _rows(plan: Plan) -> list[ChangeRow]:
    return [ChangeRow(name=f"{old} to {new}") for old, new in pairwise(plan.tour)]


def _state_bytes(task: Task) -> int:
    width = task.width
    of_block = 12 * width**2 + 13 * width
    return 3 * 4 * (task.num_blocks * of_block + (2 * task.num_words + task.length + 2) * width)


# --- steps -----------------------------------------------------------------------------------------------------------


def compare_steps(ranks: Ranks, origin: Way, way: Way, plan: Plan) -> Comparison:
    """A step under a plan that was there from the start, and under the same after a change from another one."""
    _ask(ranks, Arrive(origin, way))
    title = f"A step, wall time: {way} on {NUM_RANKS} ranks"
    exchanged = [
        [done.exchanged for done in _ask(ranks, Train(1, is_by_hand=is_by_hand, is_recorded=True))]
        for is_by_hand in (True, False)
    ]
    if exchanged[0] != exchanged[1] or not all(exchanged[0]):
        raise UnlikeWorkError(f"{way}: by hand ranks exchange {exchanged[0]}, and after a change {exchanged[1]}")

    def side(name: str, *, is_by_hand: bool) -> Side:
        def run() -> Readings:
            answers = _ask(ranks, Train(plan.num_in_block, is_by_hand=is_by_hand))
            work = tuple(done.losses for done in answers), digest_of(answers)
            return Readings(values={title: mean(done.seconds for done in answers)}, work=work)

        return Side(name=name, run=run, claim=None if is_by_hand else STEP)

    sides = [side("by hand from the start", is_by_hand=True), side(f"live, from {origin}", is_by_hand=False)]
    (compared,) = compare_measures([title], sides, num_rounds=plan.num_step_rounds)
    note = f"both exchange the same, in the same order: {len(exchanged[0][0])} collectives in a step"
    return dataclasses.replace(compared, notes=(*against_aa_interval(compared), note))


def _ask(ranks: Ranks, order: Order) -> list[Done]:
    return ranks.ask(order, deadline_seconds=SECONDS_TO_WAIT)
