"""Memory that runs out is a step that did not happen: it comes again in smaller micro-batches, on all ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loops import seen_by
from tests.ranks import RankPool
from tests.shortage import PHASES, Short, Shortage, schedule

NUM_STEPS = 5


def again(rank: int, folder: Path, trials: list[tuple[int, int, int, str, int]]) -> list[str]:
    """Memory runs out once, on one rank; beside a training that has smaller micro-batches from that step on."""
    told = []
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
        assert states[0] == states[1], trials[number]
        assert run.loader.committed == other.loader.committed
        assert run.loader.sizes == other.loader.sizes
        told += [line for line in seen.log if line.startswith("WARNING")]
    return told


def trials_of(num: int, num_ranks: int, seed: int) -> list[tuple[int, int, int, str, int]]:
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_comes_again_as_if_micro_batches_had_been_smaller(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    trials = trials_of(6, num_ranks, seed=num_ranks)
    told = ranks.run(num_ranks, again, tmp_path, trials)
    for line, (on_rank, step, micro_step, _, _) in zip(told[0], trials, strict=True):
        assert line.startswith(f"WARNING memory ran out on rank {on_rank} in the ")
        assert f"of micro-step {micro_step + 1} after step {step}: " in line
        assert line.endswith("the step is taken again in micro-batches of 4 instead of 8 samples")
    assert all(lines == [] for lines in told[1:])
