"""Training that Hugging Face accelerate has prepared: the numbers of plain torch, in the trainer's steps."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

import elastic_ext
from elastic_ext import ElasticScaler, ElasticTrainer, StepError
from elastic_ext.data.sources import FixedBatchSizes
from elastic_ext.training.optimizers.optimizer import ElasticLRScheduler, ElasticOptimizer
from examples import accelerate_glue, accelerate_glue_plain
from tests.support.ranks import RankPool, RanksFailed
from tests.support.thinning import the_first
from tests.support.training import Slices, bits_of, make_data, make_model, shared, trainer_of

NUM_SAMPLES = 96
MICRO_BATCH = 4
NUM_MICRO_STEPS = 4
Loop = Callable[[Any, Any, Any], contextlib.AbstractContextManager[None]]
Precision = Literal["no", "bf16"]  # in accelerate's words


@contextlib.contextmanager
def accelerate_forgotten(rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """accelerate keeps the process's state for good; here it begins and ends without any, on a rank that it finds."""
    before = dict(os.environ)
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    with accelerate_forgotten():
        yield


def dtype_of(precision: Precision) -> torch.dtype:
    """What parameters and inputs are in: autocast leaves fp64 as it is."""
    return torch.float32 if precision == "bf16" else torch.float64


def samples(precision: Precision = "no") -> Dataset[Any]:
    return TensorDataset(*make_data(NUM_SAMPLES, dtype_of(precision)))


def make_parts(precision: Precision = "no") -> tuple[nn.Module, AdamW, LinearLR, DataLoader[Any]]:
    """What a script hands to ``prepare``, the same every time."""
    model = make_model(dtype_of(precision))
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return model, optimizer, LinearLR(optimizer, 1.0, 0.1, 8), DataLoader(samples(precision), batch_size=MICRO_BATCH)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loss_in(precision: Precision, model: nn.Module, batch: Any) -> torch.Tensor:
    """What accelerate makes of it in that precision, by hand."""
    if precision == "no":
        return loss_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return nn.functional.cross_entropy(logits.float(), batch[1])


def train(
    trainer: Any, accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any, loader: Any, loop: Loop
) -> list[Any]:
    """Two epochs as accelerate's users write them: the losses, the clipped norms and the rates."""
    seen: list[Any] = []
    with trainer:
        for epoch in range(2):
            with trainer.epoch(epoch):
                for batch in loader:
                    with loop(trainer, accelerator, model):
                        loss = loss_of(model, batch)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            seen.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    seen += [loss.detach(), *scheduler.get_last_lr()]
    return seen


def step_alone(trainer: Any, accelerator: Any, model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return trainer.step()  # type: ignore[no-any-return]


@contextlib.contextmanager
def step_outside(trainer: Any, accelerator: Any, model: nn.Module) -> Iterator[None]:
    with trainer.step(), accelerator.accumulate(model):
        yield


@contextlib.contextmanager
def step_inside(trainer: Any, accelerator: Any, model: nn.Module) -> Iterator[None]:
    with accelerator.accumulate(model), trainer.step():
        yield


def trained_by_hand(
    rank: int = 0, world_size: int = 1, num_micro_steps: int = NUM_MICRO_STEPS, precision: Precision = "no"
) -> list[Any]:
    """What ``train`` gives, by plain torch: each loss divided, gradients shared and all stepped in the last."""
    bare, optimizer, scheduler, loader = make_parts(precision)
    batches = list(loader)[rank::world_size]  # accelerate hands whole batches to the ranks in turn
    model = shared(bare, world_size)
    seen: list[Any] = []
    for _ in range(2):
        for index, batch in enumerate(batches, start=1):
            is_last = index % num_micro_steps == 0
            with contextlib.nullcontext() if is_last or world_size == 1 else model.no_sync():  # type: ignore[operator]
                loss = loss_in(precision, model, batch)
                (loss / num_micro_steps).backward()  # type: ignore[no-untyped-call]
            if is_last:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += [loss.detach(), *scheduler.get_last_lr()]
    return bits_of(seen, bare, optimizer.state_dict(), scheduler.state_dict())


def trained_by_accelerate(
    rank: int,
    world_size: int,
    folder: Path,
    loop: Loop,
    own_steps: int = 1,
    num_micro_steps: int = NUM_MICRO_STEPS,
    precision: Precision = "no",
) -> list[Any]:
    with accelerate_forgotten(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=own_steps, mixed_precision=precision)
        bare, *rest = make_parts(precision)
        model, optimizer, scheduler, loader = accelerator.prepare(bare, *rest)
        global_batch = MICRO_BATCH * num_micro_steps * world_size
        trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=global_batch, accelerator=accelerator)
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        assert type(optimizer) is ElasticOptimizer and type(optimizer.inner) is AdamW
        assert type(scheduler) is ElasticLRScheduler and type(scheduler.inner) is LinearLR
        seen = train(trainer, accelerator, model, optimizer, scheduler, loader, loop)
        assert trainer.global_step == 2 * NUM_SAMPLES // global_batch
        return bits_of(seen, bare, optimizer.state_dict(), scheduler.state_dict())


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_steps", [1, 4, 3])
@pytest.mark.parametrize("loop", [step_alone, step_outside, step_inside])
def test_one_process_trains_as_plain_torch_does_bit_for_bit(tmp_path: Path, loop: Loop, own_steps: int) -> None:
    assert trained_by_accelerate(0, 1, tmp_path, loop, own_steps) == trained_by_hand()


def test_one_process_without_gathering_trains_as_plain_torch_does_bit_for_bit(tmp_path: Path) -> None:
    ours = trained_by_accelerate(0, 1, tmp_path, step_alone, own_steps=4, num_micro_steps=1)
    assert ours == trained_by_hand(num_micro_steps=1)


@pytest.mark.parametrize(("loop", "own_steps"), [(step_alone, 1), (step_outside, 4), (step_inside, 3)])
def test_two_ranks_train_as_ddp_by_hand_does_bit_for_bit(
    ranks: RankPool, tmp_path: Path, loop: Loop, own_steps: int
) -> None:
    ours = ranks.run(2, trained_by_accelerate, 2, tmp_path, loop, own_steps)
    assert ours == ranks.run(2, trained_by_hand, 2)


@pytest.mark.parametrize(("loop", "own_steps"), [(step_alone, 1), (step_outside, 4)])
def test_two_ranks_in_bfloat16_train_as_ddp_under_autocast_by_hand_does_bit_for_bit(
    ranks: RankPool, tmp_path: Path, loop: Loop, own_steps: int
) -> None:
    ours = ranks.run(2, trained_by_accelerate, 2, tmp_path, loop, own_steps, NUM_MICRO_STEPS, "bf16")
    assert ours == ranks.run(2, trained_by_hand, 2, NUM_MICRO_STEPS, "bf16")
    assert ours != ranks.run(2, trained_by_hand, 2)


def test_bfloat16_under_accelerate_trains_as_autocast_does(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    bare = make_model(torch.float32)
    optimizer = SGD(bare.parameters(), lr=0.1)
    data = TensorDataset(*make_data(NUM_SAMPLES, torch.float32))
    model, prepared, loader = accelerator.prepare(bare, optimizer, DataLoader(data, batch_size=MICRO_BATCH))
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16, accelerator=accelerator)
    prepared = trainer.prepare(prepared)
    with trainer:
        for batch in loader:
            with trainer.step():
                logits = model(batch[0])
                assert logits.dtype is torch.float32 and (logits == logits.bfloat16()).all()
                accelerator.backward(nn.functional.cross_entropy(logits, batch[1]))
                prepared.step()
                prepared.zero_grad()
    plain = make_model(torch.float32)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for index, batch in enumerate(DataLoader(data, batch_size=MICRO_BATCH), start=1):
        with torch.autocast("cpu", torch.bfloat16):
            logits = plain(batch[0])
        (nn.functional.cross_entropy(logits.float(), batch[1]) / 4).backward()  # type: ignore[no-untyped-call]
        if index % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(bare.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def sharded_of_rank(rank: int, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """FSDP2 by accelerate's plugin, and its clipped norms. On CPUs accelerate leaves the plugin out and takes DDP;
    told after it was made, it shards all the same.
    """
    with accelerate_forgotten(rank, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=4)
        for state in (PartialState(), accelerator.state):  # the second takes up what the first has, now and then
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        model, optimizer, scheduler, loader = accelerator.prepare(*make_parts())
        assert accelerator.is_fsdp2 and all(isinstance(part, DTensor) for part in model.parameters())
        trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=32, accelerator=accelerator)
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        seen = train(trainer, accelerator, model, optimizer, scheduler, loader, step_outside)
        norms = [each.full_tensor() for each in seen if isinstance(each, DTensor)]
        return norms, [part.full_tensor().detach() for part in model.parameters() if isinstance(part, DTensor)]


def ddp_of_rank(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    bare, optimizer, scheduler, _ = make_parts()
    model = shared(bare, 2)
    norms = []
    for index, batch in enumerate(2 * list(DataLoader(samples(), batch_size=MICRO_BATCH))[rank::2], start=1):
        (loss_of(model, batch) / 4).backward()  # type: ignore[no-untyped-call]
        if index % 4 == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms, [part.detach() for part in bare.parameters()]


def test_accelerates_fsdp2_plugin_trains_as_ddp_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    ours, by_hand = ranks.run(2, sharded_of_rank, tmp_path), ranks.run(2, ddp_of_rank)
    for (norms, parameters), (hand_norms, hand_parameters) in zip(ours, by_hand, strict=True):
        assert len(norms) == len(hand_norms) == 6 and len(parameters) == len(hand_parameters) == 4
        for mine, theirs in zip(norms + parameters, hand_norms + hand_parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10)


# --- a scaler --------------------------------------------------------------------------------------------------------

INFINITE = (6, 9, 17)  # micro-batches


def scaled_accelerator() -> Any:
    """As in fp16, which accelerate itself has on GPUs alone."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return accelerator


def scaled_by_hand(rank: int = 0, world_size: int = 1) -> list[Any]:
    bare, optimizer, scheduler, loader = make_parts()
    model = shared(bare, world_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for index, batch in enumerate(list(loader)[rank::world_size]):
        is_last = index % NUM_MICRO_STEPS == NUM_MICRO_STEPS - 1
        with contextlib.nullcontext() if is_last or world_size == 1 else model.no_sync():  # type: ignore[operator]
            loss = loss_of(model, batch) * (torch.inf if index in INFINITE else 1.0)
            scaler.scale(loss / NUM_MICRO_STEPS).backward()  # type: ignore[no-untyped-call]
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad()
    return bits_of(bare, optimizer.state_dict(), scheduler.state_dict(), scaler.state_dict())


def scaled_by_accelerate(
    rank: int, world_size: int, folder: Path, by_trainer: bool, fails: bool
) -> tuple[list[Any], int, list[bool]]:
    with accelerate_forgotten(rank, world_size):
        accelerator = scaled_accelerator()
        found = accelerator.scaler
        bare, *rest = make_parts()
        model, optimizer, scheduler, loader = accelerator.prepare(bare, *rest)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # for it to unscale before it clips
        source: Any = Slices(make_data(NUM_SAMPLES), MICRO_BATCH) if fails else loader
        trainer = trainer_of(
            folder, model, source, rank=rank, global_batch_size=16 * world_size, accelerator=accelerator
        )
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        skipped = []
        index = 0
        with trainer:
            for batch in source:
                with contextlib.suppress(torch.OutOfMemoryError), trainer.step():
                    loss = loss_of(model, batch) * (torch.inf if index in INFINITE else 1.0)
                    if by_trainer:
                        trainer.backward(loss)
                        trainer.clip_grad_norm_(model.parameters(), 1.0)
                    else:
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if fails and accelerator.sync_gradients:
                        fails, index = False, index - 4
                        raise torch.OutOfMemoryError("as if")
                    optimizer.step()
                    if trainer.sync_gradients:
                        skipped.append(accelerator.optimizer_step_was_skipped)
                    scheduler.step()
                    optimizer.zero_grad()
                index += 1
        assert accelerator.scaler is found
        bits = bits_of(bare, optimizer.state_dict(), scheduler.state_dict(), found.state_dict())
        return bits, trainer.global_step, skipped


@pytest.mark.parametrize("by_trainer", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_steps_go_through_accelerates_scaler_as_by_hand_bit_for_bit(
    tmp_path: Path, by_trainer: bool, fails: bool
) -> None:
    bits, global_step, skipped = scaled_by_accelerate(0, 1, tmp_path, by_trainer, fails)
    assert bits == scaled_by_hand()
    assert skipped == [False, True, True, False, True, False]
    assert global_step == 3


def test_infinities_on_one_rank_are_skipped_by_both(ranks: RankPool, tmp_path: Path) -> None:
    ours = ranks.run(2, scaled_by_accelerate, 2, tmp_path, False, False)
    by_hand = ranks.run(2, scaled_by_hand, 2)
    assert [bits for bits, *_ in ours] == by_hand
    assert [skipped for *_, skipped in ours] == [[False, True, True]] * 2


def test_several_optimizers_are_scaled_down_once_and_the_scale_is_updated_after_all(tmp_path: Path) -> None:
    accelerator = scaled_accelerator()
    model = make_model()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    plain = make_model()
    optimizers = [SGD(plain[0].parameters(), lr=0.1), SGD(plain[2].parameters(), lr=0.1)]
    wrapped, *both, loader = accelerator.prepare(model, first, second, DataLoader(samples(), batch_size=MICRO_BATCH))
    trainer = trainer_of(tmp_path, wrapped, loader, global_batch_size=16, accelerator=accelerator)
    both = trainer.prepare(both)
    with trainer:
        for batch in loader:
            with trainer.step():
                accelerator.backward(loss_of(wrapped, batch))
                trainer.clip_grad_norm_(wrapped.parameters(), 1.0)
                for each in both:
                    each.step()
                    each.zero_grad()
    assert trainer.global_step == 6 and accelerator.scaler.get_scale() == 256.0 * 2**3
    for index, batch in enumerate(DataLoader(samples(), batch_size=MICRO_BATCH), start=1):
        (loss_of(plain, batch) / 4).backward()  # type: ignore[no-untyped-call]
        if index % 4 == 0:
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            for each in optimizers:
                each.step()
                each.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_a_scaler_beside_the_accelerators_own_is_refused(tmp_path: Path) -> None:
    accelerator = scaled_accelerator()
    trainer, _, parts, _ = prepared_of(accelerator, tmp_path)
    with pytest.raises(ValueError, match="the accelerator has one of its own"):
        trainer.prepare(*parts, torch.amp.GradScaler("cpu"))


def test_a_scaler_that_the_accelerator_does_not_have_is_prepared_as_any(tmp_path: Path) -> None:
    trainer, _, parts, _ = prepared_of(Accelerator(cpu=True), tmp_path)
    with trainer:
        assert type(trainer.prepare(*parts, torch.amp.GradScaler("cpu"))[2]) is ElasticScaler


# --- changes and failures --------------------------------------------------------------------------------------------


def run_with(
    folder: Path, source: Any, work: Callable[..., None], *, is_accelerated: bool, **options: Any
) -> list[Any]:
    """One epoch of ``source``, with and without accelerate; ``work`` comes in the middle of every micro-step."""
    with accelerate_forgotten():
        bare = make_model()
        optimizer: Any = SGD(bare.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = LinearLR(optimizer, 1.0, 0.1, 8)
        model: Any = bare
        if is_accelerated:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
            model, optimizer, scheduler, source = accelerator.prepare(bare, optimizer, scheduler, source)
            options["accelerator"] = accelerator
        trainer = trainer_of(folder, model, source, **options)
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        losses: list[torch.Tensor] = []
        with trainer:
            for batch in source:
                with contextlib.suppress(torch.OutOfMemoryError), trainer.step():
                    loss = loss_of(model, batch)
                    accelerator.backward(loss) if is_accelerated else loss.backward()  # type: ignore[no-untyped-call]
                    work(trainer, len(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        return bits_of(losses, bare, optimizer.state_dict(), scheduler.state_dict(), trainer.config.global_batch_size)


def change_twice(trainer: Any, index: int) -> None:
    if index == 2:
        trainer.propose({"optimizer.learning_rate": 0.05}, "a test")
    if index == 5:
        trainer.propose({"global_batch_size": 8}, "a test")


def fail_twice(trainer: Any, index: int) -> None:
    if index in (2, 7):
        raise torch.OutOfMemoryError("as if")


@pytest.mark.parametrize("work", [change_twice, fail_twice])
@pytest.mark.parametrize("rollback", ["gradients", "full"])
def test_changes_and_rollbacks_are_those_of_a_trainer_without_accelerate(
    tmp_path: Path, work: Callable[..., None], rollback: str
) -> None:
    def run(name: str, source: Any, is_accelerated: bool) -> list[Any]:
        (tmp_path / name).mkdir()
        options = {"global_batch_size": 16, "rollback": rollback}
        return run_with(tmp_path / name, source, work, is_accelerated=is_accelerated, **options)

    def loader() -> DataLoader[Any]:
        return DataLoader(samples(), batch_size=MICRO_BATCH)

    assert run("ours", loader(), True) == run("plain", loader(), False)
    told = [run(f"told{each}", Slices(make_data(NUM_SAMPLES), MICRO_BATCH), each) for each in (True, False)]
    assert told[0] == told[1]


def ranks_with(
    rank: int, folder: Path, work: Callable[..., None], is_sharded: bool, precision: Precision, is_accelerated: bool
) -> list[Any]:
    """The same on two ranks, in DDP or sharded, by accelerate or by hand.

    Sharded, the policy of fully_shard is what makes numbers of lower precision, outputs included.
    """
    has_autocast = not is_accelerated and not is_sharded
    with accelerate_forgotten(rank, 2):
        model: Any = make_model(dtype_of(precision))
        optimizer: Any = None
        options: dict[str, Any] = {}
        if is_accelerated:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if is_sharded else None
            accelerator = Accelerator(
                cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=4, mixed_precision=precision
            )
            if is_sharded:
                for state in (PartialState(), accelerator.state):
                    state.distributed_type = DistributedType.FSDP
                accelerator.state.fsdp_plugin = plugin
                if plugin is not None and precision == "bf16":
                    plugin.set_mixed_precision(precision)
            model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
            options["accelerator"] = accelerator
        else:
            kept = torch.bfloat16 if precision == "bf16" else None
            policy = MixedPrecisionPolicy(param_dtype=kept, reduce_dtype=kept, output_dtype=kept)
            model = fully_shard(model, mp_policy=policy) if is_sharded else shared(model, 2)
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        source = Slices(make_data(NUM_SAMPLES, dtype_of(precision)), MICRO_BATCH)
        trainer = trainer_of(folder, model, source, rank=rank, global_batch_size=4 * MICRO_BATCH, **options)
        optimizer = trainer.prepare(optimizer)
        losses: list[float] = []
        with trainer:
            for index, batch in enumerate(source):
                with contextlib.suppress(torch.OutOfMemoryError), trainer.step():
                    loss = loss_in(precision, model, batch) if has_autocast else loss_of(model, batch)
                    accelerator.backward(loss) if is_accelerated else loss.backward()  # type: ignore[no-untyped-call]
                    losses.append(loss.item())
                    work(trainer, index)
                    optimizer.step()
                    optimizer.zero_grad()
        if work is change_twice:
            assert (trainer.global_batch_size, optimizer.effective_rates) == (8, [0.05])
        return bits_of(losses, list(model.parameters()), trainer.global_step, source.committed, source.sizes)


@pytest.mark.parametrize(
    ("is_sharded", "precision", "work"),
    the_first(
        [
            (False, "no", fail_twice),
            (True, "no", change_twice),
            (False, "bf16", change_twice),
            (True, "bf16", fail_twice),
            (False, "no", change_twice),
            (True, "no", fail_twice),
            (False, "bf16", fail_twice),
            (True, "bf16", change_twice),
        ],
        4,
    ),
)
def test_changes_and_rollbacks_on_two_ranks_are_those_without_accelerate(
    ranks: RankPool, tmp_path: Path, is_sharded: bool, precision: Precision, work: Callable[..., None]
) -> None:
    found = []
    for is_accelerated in (True, False):
        folder = tmp_path / str(is_accelerated)
        folder.mkdir()
        found.append(ranks.run(2, ranks_with, folder, work, is_sharded, precision, is_accelerated))
    assert found[0] == found[1]


def resumed_rates(
    tmp_path: Path, has_schedule: bool, saved: dict[str, Any] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """The rates and parameters of six steps, of which the last three begin with what was saved, if it is given."""
    with accelerate_forgotten():
        accelerator = Accelerator(cpu=True)
        folder = tmp_path / ("resumed" if saved else "first")
        folder.mkdir()
        trainer, model, (optimizer, scheduler), loader = prepared_of(accelerator, folder)
        if has_schedule:
            optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        else:
            optimizer = trainer.prepare(optimizer)
        seen: list[Any] = []
        state: dict[str, Any] = {}
        with trainer:
            for index, batch in enumerate(loader):
                if index == 12 and saved is not None:
                    trainer.load_state_dict(saved)
                    accelerator.load_state(str(tmp_path / "state"))
                if index < 12 and saved is not None:
                    continue
                with trainer.step():
                    accelerator.backward(loss_of(model, batch))
                    if index == 3:
                        trainer.propose({"optimizer.learning_rate": 0.002, "optimizer.weight_decay": 0.2}, "a test")
                    optimizer.step()
                    if has_schedule:
                        scheduler.step()
                    optimizer.zero_grad()
                if trainer.sync_gradients and index >= 12:
                    seen += [*optimizer.effective_rates, optimizer.param_groups[0]["weight_decay"]]
                if index == 11:
                    state = trainer.state_dict()
                    accelerator.save_state(str(tmp_path / "state"))
        return bits_of(seen, dict(model.state_dict())), state


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_run_resumes_from_the_accelerators_state_under_the_config_it_had(tmp_path: Path, has_schedule: bool) -> None:
    first, state = resumed_rates(tmp_path, has_schedule)
    assert resumed_rates(tmp_path, has_schedule, state)[0] == first


# --- what the accelerator says ---------------------------------------------------------------------------------------


def prepared_of(accelerator: Any, tmp_path: Path, **options: Any) -> tuple[Any, Any, Any, Any]:
    model, optimizer, scheduler, loader = accelerator.prepare(*make_parts())
    arguments: dict[str, Any] = {"global_batch_size": 16, "accelerator": accelerator, **options}
    trainer = trainer_of(tmp_path, model, loader, **arguments)
    return trainer, model, (optimizer, scheduler), loader


def test_sync_gradients_is_the_trainers_within_its_steps_and_after_them(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    trainer, model, parts, loader = prepared_of(accelerator, tmp_path)
    accelerator.sync_gradients = False
    optimizer, _ = trainer.prepare(*parts)
    inside, after, ends = [], [], []
    with trainer:
        assert accelerator.gradient_accumulation_steps == 1
        accelerator.gradient_accumulation_steps = 5  # it counts nothing here
        for batch in loader:
            with trainer.step(), accelerator.accumulate(model), accelerator.autocast():
                accelerator.backward(loss_of(model, batch))
                inside.append(accelerator.sync_gradients)
                ends.append(accelerator.gradient_state.end_of_dataloader)
                optimizer.step()
                optimizer.zero_grad()
            after.append(accelerator.sync_gradients)
    assert inside == after == [False, False, False, True] * 6
    assert ends == [False] * 23 + [True]
    assert accelerator.gradient_accumulation_steps == 3
    assert isinstance(accelerator.gradient_state, GradientState)
    assert not accelerator.sync_gradients


def shares_of_rank(rank: int, folder: Path, shares_always: bool) -> list[bool]:
    """Whether each micro-step's backward pass averages gradients over the ranks."""
    with accelerate_forgotten(rank, 2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        options: dict[str, Any] = {"rank": rank, "global_batch_size": 32, "sync_every_micro_step": shares_always}
        trainer, model, parts, loader = prepared_of(accelerator, folder, **options)
        optimizer, _ = trainer.prepare(*parts)
        found = []
        with trainer:
            for batch in loader:
                with accelerator.accumulate(model), trainer.step(), accelerator.accumulate(model):
                    found.append(model.require_backward_grad_sync)
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
        return found


@pytest.mark.parametrize(("shares_always", "shares"), [(False, [False, False, False, True]), (True, [True] * 4)])
def test_accumulate_keeps_no_gradients_that_the_trainer_shares(
    ranks: RankPool, tmp_path: Path, shares_always: bool, shares: list[bool]
) -> None:
    assert ranks.run(2, shares_of_rank, tmp_path, shares_always) == [shares * 3] * 2


def test_sync_gradients_cannot_be_set_while_the_trainer_decides_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    trainer, _, parts, _ = prepared_of(accelerator, tmp_path)
    trainer.prepare(*parts)
    with trainer, pytest.raises(StepError, match="the trainer decides it"):
        accelerator.sync_gradients = True
    accelerator.sync_gradients = False
    assert not accelerator.sync_gradients


def test_a_trainer_takes_an_accelerator_over_from_one_before(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    first, _, parts, _ = prepared_of(accelerator, tmp_path)
    first.prepare(*parts)
    (tmp_path / "second").mkdir()
    second, _, parts, _ = prepared_of(accelerator, tmp_path / "second")
    second.prepare(*parts)
    first.close()
    assert accelerator.gradient_accumulation_steps == 1
    second.close()
    second.close()
    assert accelerator.gradient_accumulation_steps == 3


def test_an_accelerator_is_as_it_was_found_where_prepare_fails(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    trainer, _, _, _ = prepared_of(accelerator, tmp_path)
    with pytest.raises(ValueError, match="no optimizer"):
        trainer.prepare([])
    assert accelerator.gradient_accumulation_steps == 3


def test_a_schedule_of_the_prepared_optimizer_steps_once_per_commit(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, loader = accelerator.prepare(*make_parts())
    scheduler = accelerator.prepare(LinearLR(optimizer, 1.0, 0.1, 8))
    trainer = trainer_of(tmp_path, model, loader, global_batch_size=16, accelerator=accelerator)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    with trainer:
        for batch in loader:
            with trainer.step():
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert scheduler.last_epoch == trainer.global_step == 6


# --- refused ---------------------------------------------------------------------------------------------------------


def test_what_accelerate_prepared_is_not_taken_without_its_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*make_parts())
    with pytest.raises(ValueError, match=r"prepared the Sequential, .* give ElasticTrainer\(..., accelerator="):
        ElasticTrainer(model, loader)
    other = make_model()
    trainer = trainer_of(tmp_path, other)
    with pytest.raises(ValueError, match="prepared the AcceleratedOptimizer"):
        trainer.prepare(optimizer)
    trainer = trainer_of(tmp_path, other)
    with pytest.raises(ValueError, match="prepared the AcceleratedScheduler"):
        trainer.prepare(optimizer.optimizer, scheduler)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_an_accelerator_that_steps_by_itself_is_refused(kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    own = SimpleNamespace(gradient_state=accelerator.gradient_state, distributed_type=kind, num_processes=1)
    with pytest.raises(ValueError, match=f"one of {kind}, where .* by itself|{kind}, where on XLA"):
        ElasticTrainer(make_model(), accelerator=own)


def refused_on_rank(rank: int, folder: Path) -> list[str]:
    with accelerate_forgotten(rank, 2):
        accelerator = Accelerator(cpu=True)
        model, optimizer, *_ = make_parts()
        told = []
        alone = SimpleNamespace(gradient_state=accelerator.gradient_state, distributed_type="NO", num_processes=1)
        for given, by in ((model, accelerator), (shared(model, 2), alone)):
            trainer = trainer_of(folder, given, rank=rank, accelerator=by)
            with pytest.raises(ValueError, match=re.compile("model")) as caught:
                trainer.prepare(optimizer)
            told.append(str(caught.value))
        return told


def test_ranks_with_a_model_that_the_accelerator_did_not_wrap_are_told_what_to_do(
    ranks: RankPool, tmp_path: Path
) -> None:
    for unwrapped, alone in ranks.run(2, refused_on_rank, tmp_path):
        assert unwrapped.endswith("give ElasticTrainer what accelerator.prepare(model) returns")
        assert "cuts its loaders for 1 ranks, and the model averages its gradients over 2" in alone


def test_the_library_never_imports_accelerate() -> None:
    folder = Path(elastic_ext.__file__).parent
    found = [path.name for path in folder.glob("*.py") if re.search(r"(import|from) accelerate\b", path.read_text())]
    assert found == []


# --- loaders ---------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 40), st.integers(1, 6), st.integers(1, 4)


def batches_of(loader: Any) -> list[int]:
    return [len(batch) for (batch,) in loader]


def foretold(loader: Any) -> list[int] | None:
    """The sizes that the trainer counts on; None where it knows none or no number."""
    known = FixedBatchSizes.of(loader)
    if known is None or known.num_batches is None:
        return None
    return [known.micro_batch] * (known.num_batches - 1) + [known.last_batch or known.micro_batch]


@given(*sizes, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_batches_of_every_rank_are_known_from_a_prepared_loader(
    num_samples: int, size: int, num_ranks: int, is_split: bool, is_even: bool, drops_last: bool, num_skipped: int
) -> None:
    dataset = TensorDataset(torch.arange(num_samples))
    loader = DataLoader(dataset, batch_size=size * (num_ranks if is_split else 1), drop_last=drops_last)
    for rank in range(num_ranks):
        prepared = prepare_data_loader(
            loader, num_processes=num_ranks, process_index=rank, split_batches=is_split, even_batches=is_even
        )
        known = FixedBatchSizes.of(prepared)
        assert known is not None and known.micro_batch == size
        taken = batches_of(prepared)
        assert foretold(prepared) == (taken or None)
        rest = taken[num_skipped:]
        assert foretold(skip_first_batches(prepared, num_skipped)) == (rest or None)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor(value),) for value in range(22))


@pytest.mark.parametrize(("is_split", "size"), [(False, 4), (True, 2)])
def test_of_a_prepared_stream_the_size_is_known_and_the_number_is_not(is_split: bool, size: int) -> None:
    loader = DataLoader(Stream(), batch_size=4)
    prepared = prepare_data_loader(loader, num_processes=2, process_index=1, split_batches=is_split)
    known = FixedBatchSizes.of(prepared)
    assert known == FixedBatchSizes(micro_batch=size)
    assert set(batches_of(prepared)) == {size}


def test_of_batches_without_a_size_nothing_is_known() -> None:
    batches = BatchSamplerShard([[0, 1], [2, 3]], 2, 0)
    dataset = TensorDataset(torch.arange(4))
    assert FixedBatchSizes.of(DataLoaderShard(dataset, batch_sampler=batches)) is None
    odd = BatchSamplerShard(BatchSampler(range(4), 1, False), 1, 0, split_batches=True)
    odd.num_processes = 2
    assert FixedBatchSizes.of(DataLoaderShard(dataset, batch_sampler=odd)) is None


def dispatched_on_rank(rank: int) -> list[tuple[Any, ...]]:
    """Of loaders that the first rank reads for all: what is foretold, and what comes."""
    found: list[tuple[Any, ...]] = []
    for is_split in (False, True):
        with accelerate_forgotten(rank, 2):
            options = DataLoaderConfiguration(dispatch_batches=True, split_batches=is_split)
            accelerator = Accelerator(cpu=True, dataloader_config=options)
            for num_samples in (16, 17, 19, 21, 23, 24, 3):
                for drops_last in (False, True):
                    dataset = TensorDataset(torch.arange(num_samples))
                    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, drop_last=drops_last))
                    if num_samples < 4 and drops_last:
                        continue  # accelerate fails where no batch comes
                    if num_samples == 3 and not is_split:
                        continue
                    found.append((num_samples, is_split, drops_last, foretold(loader), batches_of(loader)))
            stream = accelerator.prepare(DataLoader(Stream(), batch_size=4))
            known = FixedBatchSizes.of(stream)
            assert known == FixedBatchSizes(micro_batch=2 if is_split else 4)
            assert batches_of(stream)[:-1] == [known.micro_batch] * (5 if is_split else 2)
    return found


def test_batches_that_the_first_rank_reads_for_all_are_known(ranks: RankPool) -> None:
    for found in ranks.run(2, dispatched_on_rank):
        assert len(found) > 20
        for *case, told, taken in found:
            assert told == taken, case


def uneven_on_rank(rank: int, folder: Path) -> None:
    with accelerate_forgotten(rank, 2):
        options = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        model, optimizer, *_ = make_parts()
        loader = DataLoader(TensorDataset(*make_data(20)), batch_size=MICRO_BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        trainer = trainer_of(folder, model, loader, rank=rank, global_batch_size=8, accelerator=accelerator)
        trainer.prepare(optimizer)


def test_ranks_with_unequal_numbers_of_batches_are_refused_at_the_start(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 0: 3 batches of 4 samples; rank 1: 2 batches of 4 samples"):
        ranks.run(2, uneven_on_rank, tmp_path)


# --- the example -----------------------------------------------------------------------------------------------------


def code_of(example: ModuleType) -> list[str]:
    """An example's lines that are neither blank nor its docstring."""
    assert example.__doc__ is not None
    text = Path(str(example.__file__)).read_text(encoding="utf-8")
    return [line for line in text.partition(f'{example.__doc__}"""')[2].splitlines() if line.strip()]


def test_the_example_differs_from_accelerate_alone_in_ten_lines_at_most() -> None:
    plain, ours = code_of(accelerate_glue_plain), code_of(accelerate_glue)
    changes = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    num_changed = sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")
    assert 5 < num_changed <= 10


def example_losses(rank: int, world_size: int, example: ModuleType | str, folder: Path, *words: str) -> list[float]:
    module = importlib.import_module(example) if isinstance(example, str) else example
    with accelerate_forgotten(rank, world_size):
        os.environ.update(ELASTIC_EXT_RUN_DIR=str(folder), ELASTIC_EXT_JOB="test")
        losses: list[float] = module.train(module.parse(["--cpu", "--num-pairs", "512", "--num-epochs", "2", *words]))
        return losses


def test_the_example_loses_what_accelerate_alone_does_where_nothing_is_gathered(tmp_path: Path) -> None:
    ours = example_losses(0, 1, accelerate_glue, tmp_path, "--global-batch-size=16")
    assert bits_of(ours) == bits_of(example_losses(0, 1, accelerate_glue_plain, tmp_path))


def test_the_example_loses_what_accelerate_alone_does_on_two_ranks_too(ranks: RankPool, tmp_path: Path) -> None:
    ours = ranks.run(2, example_losses, 2, accelerate_glue.__name__, tmp_path, "--global-batch-size=32")
    assert ours == ranks.run(2, example_losses, 2, accelerate_glue_plain.__name__, tmp_path)


def test_the_example_loses_much_the_same_however_its_global_batch_is_cut(ranks: RankPool, tmp_path: Path) -> None:
    plain = example_losses(0, 1, accelerate_glue_plain, tmp_path, "--gradient-accumulation-steps=4")
    alone = example_losses(0, 1, accelerate_glue, tmp_path, "--global-batch-size=64")
    cut = example_losses(0, 1, accelerate_glue, tmp_path, "--global-batch-size=64", "--batch-size=8")
    together = ranks.run(2, example_losses, 2, accelerate_glue.__name__, tmp_path, "--global-batch-size=64")
    for losses in (alone, cut, *together):
        assert losses == pytest.approx(plain, rel=1e-5)


# With --cpu it would start one process alone; the scripts are told of the CPU instead.
ACCELERATE_LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
LAUNCHERS = [(*ACCELERATE_LAUNCH, "--mixed_precision", "no"), ("torch.distributed.run", "--nproc-per-node", "2")]


def launched(folder: Path, launcher: Sequence[str], script: ModuleType, *words: str) -> list[tuple[str, str]]:
    """The loss and the accuracy that a script tells of every epoch, run by a launcher on two ranks."""
    module, *options = launcher
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"accelerate.commands.launch": ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]}
    address = where.get(module, ["--master-addr", "127.0.0.1", "--master-port", str(port)])
    finished = subprocess.run(
        [sys.executable, "-m", module, *options, *address, str(script.__file__), "--cpu", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ELASTIC_EXT_RUN_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout
    told = re.findall(r"^epoch \d: loss ([\d.]+), accuracy ([\d.]+)$", finished.stdout, re.MULTILINE)
    assert told, finished.stdout
    return told


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_learns_under_the_launcher(tmp_path: Path, launcher: Sequence[str]) -> None:
    told = launched(tmp_path, launcher, accelerate_glue, "--num-epochs=4")
    assert len(told) == 4 and float(told[-1][1]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_loses_what_accelerate_alone_does_under_the_launcher(
    tmp_path: Path, launcher: Sequence[str], precision: Precision
) -> None:
    words = ("--num-pairs=512", "--num-epochs=2", f"--mixed-precision={precision}")
    ours = launched(tmp_path, launcher, accelerate_glue, "--global-batch-size=32", *words)
    assert len(ours) == 2
    assert ours == launched(tmp_path, launcher, accelerate_glue_plain, *words)
