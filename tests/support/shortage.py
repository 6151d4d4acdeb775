"""Trainings whose memory is made to run out, at any place of a step on any rank: for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.records.files import write_whole
from tests.support.loops import seen_by
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of

__all__ = ["NUM_STEPS", "PHASES", "Short", "Shortage", "Tight", "Trial", "again", "schedule", "trials_of"]

NUM_STEPS = 5
PHASES = ("entered", "in forward", "forward done", "in backward")
"""Where in a micro-step memory runs out, and the step comes again."""


Trial = tuple[int, int, int, str, int]
"""On which rank, in which step and micro-step, in which phase; and how many micro-steps a step has."""


@dataclass(slots=True)
class Shortage:
    """Once, or where more than so many samples are taken at once."""

    phase: str = ""
    at: tuple[int, int] | None = None
    """Step and micro-step."""
    limit: int | None = None
    """How many samples there is memory for."""
    num_times: int = field(default=0, init=False)
    """How often memory has run out."""


class Tight(nn.Module):
    """A model with parts that draw lots and keep statistics, and memory that may run out."""

    def __init__(self, ask: Callable[[str, int], None], *, has_moods: bool = True) -> None:
        super().__init__()
        self.first, self.second = make_model()[0], make_model()[2]
        self.norm = nn.BatchNorm1d(16).double() if has_moods else nn.Identity()
        self.dropout = 0.3 if has_moods else 0.0
        self._ask = ask

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.first(inputs))), self.dropout)
        self._ask("in forward", len(inputs))
        hidden.register_hook(lambda gradient: self._ask("in backward", len(inputs)))  # type: ignore[no-untyped-call]
        return self.second(hidden)  # type: ignore[no-any-return]


class Short:
    """One rank's training, of steps that are functions."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        *,
        batch_size: int,
        num_micro_steps: int = 1,
        shortage: Shortage | None = None,
        has_moods: bool = True,
        wrap: Callable[[nn.Module], Any] | None = None,
        plan: ParallelPlan | None = None,
        loader: Any = None,
        **given: Any,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.shortage = shortage or Shortage()
        self.model: Any = Tight(self._ask, has_moods=has_moods)
        if wrap is not None:
            self.model = wrap(self.model)
        elif self.num_ranks > 1:
            self.model = DistributedDataParallel(self.model)
        self.loader = loader or Slices(make_data(256), batch_size, is_endless=True)
        given.setdefault("global_batch_size", batch_size * num_micro_steps * self.num_ranks)
        folder.mkdir(parents=True, exist_ok=True)
        self.trainer = trainer_of(folder, self.model, self.loader, rank=rank, **given)
        if plan is not None:
            self.trainer.parallelize(self.model, plan)
        torch.manual_seed(17 + rank)  # before a checkpoint is resumed, which has states of its own
        inner = AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer, self.scheduler = self.trainer.prepare(inner, CosineAnnealingLR(inner, 100))
        self.losses: list[float] = []
        """Of micro-steps that were not taken back, as far as it was known when they ended."""
        self._micro_step = 0

    def _ask(self, phase: str, num_samples: int) -> None:
        shortage = self.shortage
        is_due = shortage.at == (self.trainer.global_step, self._micro_step) and shortage.num_times == 0
        is_due |= shortage.limit is not None and num_samples > shortage.limit
        if is_due and phase == (shortage.phase or "in forward"):
            shortage.num_times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """What a loop does with one micro-batch."""
        self._ask("entered", len(inputs))
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self._ask("forward done", len(inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        self._ask("backward done", len(inputs))
        self.trainer.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, until: int) -> Short:
        """One loop over the data, until a step."""
        trainer = self.trainer
        for inputs, targets in self.loader:
            self._micro_step = trainer._training.state.index
            loss = trainer.run(self.micro_step, inputs, targets)
            if loss is not None:
                self.losses.append(loss)
            if trainer.global_step >= until:
                break
        return self

    def state(self) -> list[Any]:
        """Bit for bit all that training changes on this rank."""
        return bits_of(self.model, self.optimizer.state_dict(), self.scheduler.state_dict(), torch.get_rng_state())


def schedule(folder: Path, rank: int, step: int, batch_size: int) -> None:
    """Have micro-batches be of another size from a step on, by the config."""
    (folder / str(rank)).mkdir(parents=True, exist_ok=True)
    config = {"version": 1, "apply_at_step": step, "dataloader": {"batch_size": batch_size}}
    write_whole(folder / str(rank) / "config.json", json.dumps(config).encode(), durable=False)


def again(rank: int, folder: Path, trials: list[Trial]) -> list[str]:
    """Memory runs out once, on one rank; beside a training that has smaller micro-batches from that step on."""
    told: list[str] = []
    for number, (on_rank, step, micro_step, phase, num_micro_steps) in enumerate(trials):
        here = folder / str(number)
        shortage = Shortage(phase=phase, at=(step, micro_step)) if rank == on_rank else Shortage()
        sizes: dict[str, Any] = {"batch_size": 8, "num_micro_steps": num_micro_steps}
        with seen_by() as seen:
            run = Short(rank, here / "short", shortage=shortage, guard="always", **sizes)
            with run.trainer:
                run.train(NUM_STEPS)
                states = [run.state()]
                assert run.trainer.config.dataloader.batch_size == 4
        assert shortage.num_times == (rank == on_rank)
        schedule(here / "from there on", rank, step, 4)
        other = Short(rank, here / "from there on", guard="never", **sizes)
        with other.trainer:
            other.train(NUM_STEPS)
            states.append(other.state())
            assert other.trainer.config.dataloader.batch_size == 4
        is_same = states[0] == states[1] if run.num_ranks < 3 else _are_close(run.model, other.model)
        assert is_same, trials[number]
        assert run.loader.committed == other.loader.committed
        assert run.loader.sizes == other.loader.sizes
        told += [line for line in seen.log if line.startswith("WARNING")]
    return told


def _are_close(one: nn.Module, other: nn.Module) -> bool:
    """As near as sums in another order are."""
    values = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(left, right, rtol=1e-6, atol=1e-8) for left, right in values)


def trials_of(num: int, num_ranks: int, seed: int) -> list[Trial]:
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        num_micro_steps = draw.choice((1, 4))
        found.append(
            (
                draw.randrange(num_ranks),
                draw.randrange(NUM_STEPS),
                draw.randrange(num_micro_steps),
                draw.choice(PHASES),
                num_micro_steps,
            )
        )
    return found
