"""Whether the verdict on a training names what was planted in it: eight causes, ten seeds each, two real ranks.

Each training is one of two ranks over gloo, on one thread each, a second or two long, with models, sizes and delays
that its seed draws. Its verdict is made from what its ranks have written: windows, a census each, the calibration of
the machine. A case counts as contended where the verdict itself says so, as a user has to take it; half of the seeds
run beside a process that wants half a processor. *Right* is the planted kind, and of a straggler its rank too.

Planted: samples that take long to load; an exchange of gradients over a slow link; large matrix products; operations on
large tensors with little arithmetic; very many small operations; a rank that sleeps in its forward pass; processors
that others hold; checkpoints that training waits for.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gang import Gang
from benchmarks.harness import Finding, Result, Verdict, shortened
from benchmarks.joined import joined
from elastic_ext import CheckpointInterval, CheckpointOptions, ElasticTrainer, FollowOptions
from elastic_ext.profile.breakdown import RankView, merged
from elastic_ext.profile.verdict import verdict
from elastic_ext.records.metrics import NodeCalibration, StepCensus, StepWindow

__all__ = ["CAUSES", "Case", "Judged", "Rank", "VerdictTable", "interval_of_share", "judge", "main", "member"]

CAUSES = ("data", "communication", "compute", "memory", "host", "straggler", "contention", "checkpoint")
NUM_SEEDS = 10
NUM_RANKS = 2
_SECONDS = 2.0  # of steps, after those that warm up
_NUM_WARM = 20
_LABELS = {False: "uncontended", True: "contended"}
_RIGHT = {False: 0.95, True: 0.85}  # what is claimed, by whether the verdict says that ranks were contended


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Which rank a process is, and where it finds the others."""

    rank: int
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training."""

    cause: str
    seed: int
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What was said of it."""

    case: Case
    kind: str
    text: str
    is_right: bool
    is_contended: bool
    is_beside: bool
    """Whether others wanted the same processors."""


def main(share: float = 1.0) -> list[Result]:
    """All of them, one after another."""
    found: list[Judged] = []
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with Gang(member, [Rank(rank=rank, port=store.port) for rank in range(NUM_RANKS)]) as gang:
            for seed in range(shortened(NUM_SEEDS, share, least=2)):
                for cause in CAUSES:
                    case = Case(cause=cause, seed=seed, folder=Path(folder) / f"{cause}-{seed}")
                    is_beside = seed % 2 == 1 or cause == "contention"
                    wanted = _others(num=4) if cause == "contention" else _others(num=1, busy=0.5)
                    with wanted if is_beside else contextlib.nullcontext():
                        gang.ask(case, deadline_seconds=120.0)
                    found.append(judge(case, is_beside=is_beside))
    return [VerdictTable(judged=tuple(found))]


def judge(case: Case, *, is_beside: bool) -> Judged:
    """The verdict on what the ranks of a case have written."""
    views = [_view(case.folder / str(rank), rank) for rank in range(NUM_RANKS)]
    best = next(each.calibration for each in views if each.calibration is not None)
    views = [RankView(host=each.host, window=each.window, census=each.census, calibration=best) for each in views]
    found = verdict(views)
    slow = (json.loads((case.folder / "planted.json").read_text()),) if case.cause == "straggler" else found.ranks
    return Judged(
        case=case,
        kind=found.kind,
        text=found.text,
        is_right=found.kind == case.cause and found.ranks == slow,
        is_contended=found.is_contended,
        is_beside=is_beside,
    )


# ---- a rank ----


@contextmanager
def member(rank: Rank) -> Iterator[Callable[[Case], None]]:
    """Trains what it is asked to, with the other."""
    torch.set_num_threads(1)
    with joined(rank=rank.rank, world_size=NUM_RANKS, port=rank.port):
        yield lambda case: _train(case, rank.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planted:
    model: nn.Module
    inputs: torch.Tensor
    load_seconds: float = 0.0
    exchange_seconds: float = 0.0
    forward_seconds: float = 0.0
    slow_rank: int = -1
    saves_every: int = 0


def _planted(case: Case) -> _Planted:
    """What the case's seed draws; the same on both ranks."""
    draw = random.Random(f"{case.cause} {case.seed}")
    torch.manual_seed(case.seed)
    side = draw.choice((128, 192, 256))
    model: nn.Module = nn.Sequential(nn.Linear(side, 2 * side), nn.ReLU(), nn.Linear(2 * side, side))
    inputs = torch.randn(draw.choice((16, 32, 64)), side)
    match case.cause:
        case "data":
            return _Planted(model=model, inputs=inputs, load_seconds=draw.uniform(0.01, 0.03))
        case "communication":
            return _Planted(model=model, inputs=inputs, exchange_seconds=draw.uniform(0.01, 0.04))
        case "straggler":
            slow = draw.randrange(NUM_RANKS)
            return _Planted(model=model, inputs=inputs, forward_seconds=draw.uniform(0.01, 0.04), slow_rank=slow)
        case "checkpoint":
            return _Planted(model=model, inputs=inputs, saves_every=draw.choice((2, 3, 4)))
        case "memory":
            return _Planted(
                model=_Elementwise(draw.choice((500_000, 1_000_000)), num_passes=draw.choice((12, 16, 24))),
                inputs=torch.ones(4, 8),
            )
        case "host":
            width = draw.choice((4, 8, 16))
            small: list[nn.Module] = [
                nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(draw.choice((40, 80)))
            ]
            return _Planted(model=nn.Sequential(*small), inputs=torch.randn(draw.choice((2, 8)), width))
        case _:  # compute; contention is the same beside others
            side = draw.choice((384, 512, 640))
            layers: list[nn.Module] = [
                nn.Linear(side, side),
                nn.ReLU(),
                nn.Linear(side, side),
                nn.ReLU(),
                nn.Linear(side, side),
            ]
            return _Planted(model=nn.Sequential(*layers), inputs=torch.randn(draw.choice((256, 384, 512)), side))


class _Elementwise(nn.Module):
    """Reads and writes much, and computes little."""

    def __init__(self, num_floats: int, num_passes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_floats))
        self.layer = nn.Linear(8, 8)
        self._num_passes = num_passes

    def forward(self, inputs: torch.Tensor) -> Any:
        values: torch.Tensor = self.weights
        for _ in range(self._num_passes):
            values = values * 1.01 + 0.5
        return values.sum() * 1e-9 + self.layer(inputs).sum()


def _train(case: Case, rank: int) -> None:
    planted = _planted(case)
    model = DistributedDataParallel(planted.model, bucket_cap_mb=1)
    if planted.exchange_seconds:
        model.register_comm_hook(planted.exchange_seconds, _slow_exchange)
    folder = case.folder / str(rank)
    folder.mkdir(parents=True)
    saves: dict[str, Any] = {"checkpoint_options": CheckpointOptions(save_on_signals=False)}
    if planted.saves_every:
        saves = {
            "shared_storage_path": case.folder / "kept",
            "checkpoint_interval": CheckpointInterval(steps=planted.saves_every),
            "checkpoint_options": CheckpointOptions(save_in_background=False, save_on_signals=False, keep_last=2),
        }
    loader = _Loader(planted)
    trainer = ElasticTrainer(
        model,
        loader,
        follow_options=FollowOptions(job=f"{case.cause}-{case.seed}", run_dir=folder, progress=False),
        **saves,
    )
    if planted.slow_rank == rank:
        planted.model.register_forward_pre_hook(lambda module, inputs: time.sleep(planted.forward_seconds))
    if rank == 0 and planted.slow_rank >= 0:
        (case.folder / "planted.json").write_text(json.dumps(planted.slow_rank))
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=1e-4))
        for inputs in loader:
            with trainer.step():
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


class _Loader:
    """Batches until the time is up on rank 0."""

    def __init__(self, planted: _Planted) -> None:
        self._planted = planted

    def __iter__(self) -> Iterator[torch.Tensor]:
        began, number, is_over = time.monotonic(), 0, torch.zeros(())
        while True:
            number += 1
            if number % 10 == 0:
                is_over.fill_(float(time.monotonic() - began > _SECONDS and number > 4 * _NUM_WARM))
                dist.broadcast(is_over, 0)
                if is_over.item():
                    return
            if self._planted.load_seconds:
                time.sleep(self._planted.load_seconds)
            yield self._planted.inputs


def _slow_exchange(seconds: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What DDP does, over a link that takes so much longer."""
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer().div_(NUM_RANKS)
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None

    def later() -> None:
        work.wait()
        time.sleep(seconds)
        found.set_result(buffer)

    threading.Thread(target=later).start()
    return found


_slow_exchange.__annotations__ = {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[torch.Tensor]}


# ---- what they have written ----


def _view(folder: Path, rank: int) -> RankView:
    windows = [StepWindow.from_json(line) for line in (folder / f"profile-{rank}.jsonl").read_text().splitlines()]
    file = folder / "calibration.json"
    return RankView(
        host=f"node-{rank}",
        window=merged([each for each in windows if each.num_steps][1:] or windows[-1:]),
        census=StepCensus.from_json((folder / f"census-{rank}.json").read_text()),
        calibration=NodeCalibration.from_json(file.read_text()) if file.exists() else None,
    )


@contextmanager
def _others(num: int, busy: float = 1.0) -> Iterator[None]:
    """Processes that want the same processors, for a part of the time."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, args=(busy,), daemon=True) for _ in range(num)]
    for each in processes:
        each.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


def _spin(busy: float) -> None:
    while True:
        until = time.monotonic() + 0.1 * busy
        while time.monotonic() < until:
            sum(range(1000))
        time.sleep(0.1 * (1 - busy))


# ---- the table ----


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictTable:
    """How many were right, by the verdict's own label, with where that share lies at 90 percent."""

    judged: tuple[Judged, ...]

    @property
    def heading(self) -> str:
        return f"**What holds training up: {len(self.judged)} trainings of two ranks with a planted cause**"

    @property
    def notes(self) -> tuple[str, ...]:
        num = sum(each.is_beside for each in self.judged)
        return (f"{num} of them ran beside processes that wanted the same processors",)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(self._decided(is_contended)[0] for is_contended in (False, True))

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = []
        for is_contended, name in _LABELS.items():
            some = self._labelled(is_contended)
            verdict, reason = self._decided(is_contended)
            found.append(
                Finding(
                    claim=f"of verdicts that say {name}, a share of {_RIGHT[is_contended]} or more is right",
                    side=name,
                    value=f"{sum(each.is_right for each in some)} of {len(some)}",
                    target=f"≥ {_RIGHT[is_contended]}",
                    verdict=verdict,
                    reason=reason,
                )
            )
        return tuple(found)

    def table_lines(self) -> list[str]:
        lines = [
            "| label of the verdict | trainings | right | share (90% interval) | target | verdict |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for is_contended, name in _LABELS.items():
            some = self._labelled(is_contended)
            right = sum(each.is_right for each in some)
            low, high = interval_of_share(right, len(some))
            share = right / len(some) if some else 0.0
            lines.append(
                f"| {name} | {len(some)} | {right} | {share:.3f} ({low:.3f} to {high:.3f}) "
                f"| ≥ {_RIGHT[is_contended]} | {': '.join(self._decided(is_contended))} |"
            )
        for cause in CAUSES:
            some = [each for each in self.judged if each.case.cause == cause]
            wrong = Counter(each.kind for each in some if not each.is_right)
            taken = ", ".join(f"{kind} {num}" for kind, num in wrong.most_common())
            right = len(some) - sum(wrong.values())
            lines.append(f"| of these: {cause} | {len(some)} | {right} | {f'taken for {taken}' if taken else ''} | | |")
        return lines

    def _labelled(self, is_contended: bool) -> list[Judged]:
        return [each for each in self.judged if each.is_contended is is_contended]

    def _decided(self, is_contended: bool) -> tuple[Verdict, str]:
        some = self._labelled(is_contended)
        if not some:
            return "inconclusive", "there were none"
        share = sum(each.is_right for each in some) / len(some)
        return ("pass" if share >= _RIGHT[is_contended] else "fail"), f"{share:.3f}"


def interval_of_share(num_right: int, num_all: int) -> tuple[float, float]:
    """Where a share lies, by Wilson's score, at 90 percent."""
    if num_all == 0:
        return 0.0, 1.0
    z, share = 1.645, num_right / num_all
    middle = share + z * z / (2 * num_all)
    spread = z * ((share * (1 - share) + z * z / (4 * num_all)) / num_all) ** 0.5
    whole = 1 + z * z / num_all
    return max((middle - spread) / whole, 0.0), min((middle + spread) / whole, 1.0)
