"""Memory that runs out is a step that did not happen: it comes again in smaller micro-batches, on all ranks."""

from __future__ import annotations

import gc
import json
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from elastic_ext import ElasticDataLoader, ElasticTrainer, StepError
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.retraining import needs_passes_taken_back
from tests.support.shortage import NUM_STEPS, Short, Shortage, again, schedule, trials_of
from tests.support.training import Slices, make_data, trainer_of


def test_on_one_rank_it_comes_again_from_wherever_the_optimizer_has_not_begun(tmp_path: Path) -> None:
    again(0, tmp_path, [(0, 2, 1, "backward done", 4), (0, 1, 3, "backward done", 4), (0, 0, 0, "backward done", 1)])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_comes_again_as_if_micro_batches_had_been_smaller(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    trials = trials_of(6, num_ranks, seed=num_ranks)
    told = ranks.run(num_ranks, again, tmp_path, trials)
    for line, (on_rank, step, micro_step, _, _) in zip(told[0], trials, strict=True):
        assert line.startswith(f"WARNING memory ran out on rank {on_rank} in micro-step {micro_step + 1}")
        assert f" after step {step}: " in line
        assert line.endswith("the step is taken again in micro-batches of 4 instead of 8 samples")
    assert all(lines == [] for lines in told[1:])


def of_three(rank: int, folder: Path) -> None:
    """Sums over three ranks are made in another order in guarded steps: as near as rounding is."""
    sizes: dict[str, Any] = {"batch_size": 8, "num_micro_steps": 2, "has_moods": False}
    shortage = Shortage(phase="in backward", at=(1, 1)) if rank == 2 else Shortage()
    run = Short(rank, folder / "short", shortage=shortage, **sizes)
    with run.trainer:
        run.train(NUM_STEPS)
    schedule(folder / "from there on", rank, 1, 4)
    other = Short(rank, folder / "from there on", guard="never", **sizes)
    with other.trainer:
        other.train(NUM_STEPS)
    assert run.loader.committed == other.loader.committed
    assert run.loader.sizes == other.loader.sizes
    for one, two in zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_three_ranks_come_to_the_same_within_the_order_of_sums(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, of_three, tmp_path)


def within_limits(rank: int, folder: Path, limit: int) -> tuple[list[tuple[int, ...]], list[str]]:
    """From the first step on there is memory for so many samples at once, on the last rank."""
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    limits = Shortage(limit=limit) if rank == num_ranks - 1 else Shortage()
    with seen_by() as seen:
        run = Short(rank, folder, batch_size=16, has_moods=False, shortage=limits)
        with run.trainer:
            run.train(4)
    return run.loader.sizes, [line for line in seen.log if line.startswith("WARNING")]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("limit", [1, 3, 15])
def test_micro_batches_are_halved_until_they_fit(ranks: RankPool, tmp_path: Path, num_ranks: int, limit: int) -> None:
    fits = {1: 1, 3: 2, 15: 8}[limit]
    for rank, (sizes, told) in enumerate(ranks.run(num_ranks, within_limits, tmp_path, limit)):
        assert sizes == [(fits,) * (16 // fits)] * 4
        assert len(told) == (0 if rank else {1: 4, 3: 3, 15: 1}[limit])


def below_one(rank: int, folder: Path) -> str:
    limits = Shortage(limit=0) if rank == 0 else Shortage()
    run = Short(rank, folder, batch_size=2, has_moods=False, shortage=limits)
    with pytest.raises(StepError) as raised:
        run.train(4)
    run.trainer.close()
    assert run.trainer.global_step == 0
    return str(raised.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_less_than_one_sample_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    for told in ranks.run(num_ranks, below_one, tmp_path):
        assert told.startswith("memory ran out on rank 0 in micro-step 1 (forward pass) after step 0, with 1 sample(s)")
        assert "micro-batches cannot be smaller: have activations recomputed" in told


def down_to_two(rank: int, folder: Path, limit: int) -> tuple[list[tuple[int, ...]], str, list[str]]:
    """From micro-batches of three on, of a model with a BatchNorm, which takes no single sample."""
    limits = Shortage(limit=limit) if rank == 0 else Shortage()
    error = ""
    with seen_by() as seen:
        run = Short(rank, folder, batch_size=3, num_micro_steps=2, shortage=limits)
        try:
            run.train(4)
        except StepError as raised:
            error = str(raised)
        run.trainer.close()
    return run.loader.sizes, error, [line for line in seen.log if line.startswith("WARNING")]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_a_layer_refuses_one_sample_two_are_taken(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    for rank, (sizes, error, told) in enumerate(ranks.run(num_ranks, down_to_two, tmp_path, 2)):
        assert (sizes, error) == ([(2, 2, 2)] * 4, "")
        assert len(told) == (0 if rank else 2)
        if rank == 0:
            assert told[0].endswith("the step is taken again in micro-batches of 1 instead of 3 samples")
            assert (
                "memory ran out with 3 sample(s) at once after step 0, and on rank 0 a layer refuses a single"
                in told[1]
            )
            assert told[1].endswith("the step is taken again in micro-batches of 2 instead of 1 samples")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_a_layer_refuses_one_sample_and_two_are_too_many_all_ranks_say_so(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    for sizes, error, _ in ranks.run(num_ranks, down_to_two, tmp_path, 1):
        assert sizes == []
        assert error.startswith(
            "memory ran out on rank 0 in micro-step 1 (forward pass) after step 0, with 2 sample(s)"
        )
        assert "have its layers take a single sample, as GroupNorm does and BatchNorm does not; the step was" in error


def to_a_tail_of_one(rank: int, folder: Path) -> str:
    """What is raised where memory has run out before, and an epoch's last step has a sample for each rank."""
    num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    loader = Slices(make_data(5 * num_ranks), 4)
    run = Short(rank, folder, batch_size=4, shortage=Shortage(limit=2), loader=loader)
    with pytest.raises(StepError) as raised, run.trainer:
        run.train(3)
    assert run.trainer.global_step == 1
    return str(raised.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_single_samples_that_are_an_epochs_last_are_not_said_to_come_of_memory(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    for told in ranks.run(num_ranks, to_a_tail_of_one, tmp_path):
        assert told.startswith("on rank 0 a layer refuses a single sample in micro-step 1")
        assert "a rank has a single one, in micro-batches of 4 too, as they were before memory ran out; leave" in told


def sharded_with_guard(rank: int, folder: Path) -> str:
    """What memory that runs out is said to be where steps are to be guarded, and cannot be."""
    run = Short(rank, folder, batch_size=4, shortage=Shortage(limit=2), wrap=fully_shard, guard="always")
    with pytest.raises(torch.OutOfMemoryError) as raised, run.trainer:
        run.train(1)
    return str(raised.value)


def test_who_has_asked_for_guarded_steps_is_told_why_there_are_none(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, sharded_with_guard, tmp_path):
        assert "the step cannot be taken again, since " in told
        assert "guard=" not in told


def test_nothing_of_the_failed_pass_is_held_when_the_step_comes_again(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, shortage=Shortage(phase="forward done", at=(0, 0)))
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def micro_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        alive.extend(each() is not None for each in held)
        outputs = run.model(inputs)
        held.append(weakref.ref(outputs))
        loss = nn.functional.cross_entropy(outputs, targets)
        run._ask("forward done", len(inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.item()

    gc.disable()
    try:
        with run.trainer:
            for batch in run.loader:
                run.trainer.run(micro_step, *batch)
                if run.trainer.global_step == 1:
                    break
    finally:
        gc.enable()
    assert alive
    assert not any(alive[:1])


def test_it_is_told_once_as_a_revision_with_its_reason_and_an_event(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, shortage=Shortage(phase="in backward", at=(2, 0)))
    with run.trainer:
        run.train(4)
        config = run.trainer.config
    assert (config.version, config.revision) == (0, 1)
    assert config.reason == "memory ran out on rank 0 in micro-step 1 after step 2"
    events = [json.loads(line) for line in (tmp_path / "0" / "events-0.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] in ("out-of-memory", "config-applied")]
    assert [event["kind"] for event in told] == ["out-of-memory", "config-applied"]
    assert told[0]["details"] == {"micro_batch": 4, "was": 8, "ranks": [0]}
    assert told[0]["step"] == 2
    assert told[1]["details"]["changes"] == {"dataloader.batch_size": [8, 4]}


def test_where_passes_are_not_seen_nothing_is_said_of_them(tmp_path: Path) -> None:
    shortage = Shortage(phase="in backward", at=(9, 0))
    with seen_by() as seen:
        run = Short(0, tmp_path, batch_size=8, num_micro_steps=4, has_moods=False, shortage=shortage)
        with run.trainer:
            run.train(10)
    (told,) = [line for line in seen.log if line.startswith("WARNING")]
    assert told.startswith("WARNING memory ran out on rank 0 in micro-step 1 after step 9: the step is taken again")


def test_a_decorated_function_is_taken_as_a_micro_step(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, shortage=Shortage(phase="in backward", at=(1, 0)))

    trainer: ElasticTrainer = run.trainer

    @trainer.micro_step
    def micro_step(inputs: torch.Tensor, *, targets: torch.Tensor) -> float:
        """What it does."""
        return run.micro_step(inputs, targets)

    assert micro_step.__doc__ == "What it does."
    given: list[float | None] = []
    with run.trainer:
        for inputs, targets in run.loader:
            given.append(micro_step(inputs, targets=targets))
            if run.trainer.global_step == 3:
                break
    assert [each is None for each in given] == [False, True, False, False, False, False]


def test_the_with_form_takes_the_step_back_and_names_the_function(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, shortage=Shortage(phase="forward done", at=(0, 0)))
    taken: list[torch.Tensor] = []

    def take_one() -> None:
        for inputs, targets in run.loader:
            taken.append(inputs)
            with run.trainer.step():
                run.micro_step(inputs, targets)
            return

    with run.trainer:
        with pytest.raises(torch.OutOfMemoryError, match=r"planted.*taken back.*trainer\.run\(function, batch\)"):
            take_one()
        take_one()
    assert torch.equal(taken[0], taken[1])
    assert run.trainer.global_step == 1


def test_a_loader_with_a_size_of_its_own_says_what_to_use(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_data(64)), batch_size=8)
    run = Short(0, tmp_path, batch_size=8, loader=data, shortage=Shortage(phase="in forward", at=(0, 0)))
    with run.trainer, pytest.raises(torch.OutOfMemoryError, match="use an ElasticDataLoader"):
        run.train(1)


def test_other_exceptions_leave_a_function_as_they_leave_the_block(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8)

    def fail(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        run.model(inputs)
        raise ArithmeticError("of the user's")

    batch = next(iter(run.loader))
    with run.trainer:
        with pytest.raises(ArithmeticError, match="of the user's"):
            run.trainer.run(fail, *batch)
        run.train(2)
    assert run.loader.committed == list(range(16))


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that can be asked for one by one."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_data(96)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def through_workers(rank: int, folder: Path, num_workers: int) -> list[list[float]]:
    """Samples that are made ahead come again in smaller micro-batches; each of an epoch once."""
    loader = ElasticDataLoader(Points(), batch_size=8, shuffle=True, num_workers=num_workers, seed=3)
    shortage = Shortage(phase="in backward", at=(1, 0)) if rank == 1 else Shortage()
    run = Short(rank, folder, batch_size=8, loader=loader, num_micro_steps=2, shortage=shortage)
    committed: list[list[float]] = []
    under_way: list[float] = []
    trainer = run.trainer
    with trainer, trainer.epoch(0):
        for inputs, targets in loader:
            run._micro_step = trainer._training.state.index
            under_way += inputs[:, 0].tolist()
            if trainer.run(run.micro_step, inputs, targets) is None:
                under_way.clear()
            elif trainer.sync_gradients:
                committed.append(list(under_way))
                under_way.clear()
    assert trainer.config.dataloader.batch_size == 4
    return committed


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_an_epoch_come_once(ranks: RankPool, tmp_path: Path, num_workers: int) -> None:
    by_rank = ranks.run(2, through_workers, tmp_path, num_workers)
    taken = sorted(value for steps in by_rank for step in steps for value in step)
    assert taken == sorted(Points().inputs[:, 0].tolist())
    assert [len(step) for step in by_rank[0]] == [16, 16, 16]


def sharded_alone(rank: int, folder: Path, guard: str) -> None:
    """On one rank nobody waits, and a sharded model's step comes again too."""
    states = []
    for shortage, batch_size in ((Shortage(phase="in backward", at=(0, 2)), 8), (Shortage(), 4)):
        run = Short(
            rank,
            folder / str(batch_size),
            batch_size=batch_size,
            global_batch_size=32,
            shortage=shortage,
            wrap=fully_shard,
            guard=guard,
        )
        with run.trainer:
            run.train(4)
            assert run.trainer.config.dataloader.batch_size == 4
            states.append(run.state())
    assert states[0] == states[1]


@needs_passes_taken_back
@pytest.mark.parametrize("guard", ["auto", "always"])
def test_a_sharded_model_on_one_rank_is_taken_back_too(ranks: RankPool, tmp_path: Path, guard: str) -> None:
    ranks.run(1, sharded_alone, tmp_path, guard)


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """This process may have so much more address space than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def for_real(rank: int, folder: Path) -> tuple[int, list[str]]:
    """The allocator itself says no: on one rank, which has less memory than the other."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.LeakyReLU(), nn.LayerNorm(1024))]
    model: Any = nn.Sequential(nn.Linear(6, 1024), *layers, nn.Linear(1024, 5)).double()
    if torch.distributed.get_world_size() > 1:
        model = DistributedDataParallel(model)
    loader = Slices(make_data(8192), 4096, is_endless=True)
    trainer = trainer_of(folder, model, loader, rank=rank)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

    def micro_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with seen_by() as seen, trainer, little_memory((128 if rank == 0 else 8192) * (1 << 20)):
        for batch in loader:
            trainer.run(micro_step, *batch)
            if trainer.global_step == 2:
                break
    return trainer.config.dataloader.batch_size, [line for line in seen.log if line.startswith("WARNING")]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_allocator_that_says_no_is_one_that_ran_out(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    (size, told), *others = ranks.run(num_ranks, for_real, tmp_path)
    assert 1 <= size < 4096  # about 100 KiB are kept of each sample
    during = " (forward pass)" if num_ranks > 1 else ""  # which nothing looks at on one
    assert told[0].startswith(f"WARNING memory ran out on rank 0 in micro-step 1{during} after step 0: ")
    assert all(other == (size, []) for other in others)


def test_steps_of_either_form_may_follow_one_another(tmp_path: Path) -> None:
    run = Short(0, tmp_path, batch_size=8, guard="always", shortage=Shortage(phase="in backward", at=(6, 0)))
    with run.trainer:
        for inputs, targets in run.loader:
            with run.trainer.step():
                run.micro_step(inputs, targets)
            if run.trainer.global_step == 6:
                break
        run.train(8)
    assert run.loader.sizes == [(8,)] * 6 + [(4, 4)] * 2


def test_switched_off_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT", "off")
    run = Short(0, tmp_path, batch_size=8, shortage=Shortage(phase="in backward", at=(0, 0)))
    with run.trainer, pytest.raises(torch.OutOfMemoryError, match="with ELASTIC_EXT=off micro-batches stay"):
        run.train(1)
