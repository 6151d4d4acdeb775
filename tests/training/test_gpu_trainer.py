"""The trainer on a GPU: capturable optimizers whose rate changes, and mixed precision, beside loops written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.support.training import bits_of, make_data, make_model, trainer_of
from tests.training.optimizers.test_accelerate import accelerate_forgotten

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_STEPS = 8
BATCH = 16
INFINITE_STEP = 2
Parameters = list[nn.Parameter]
Trained = tuple[nn.Module, Optimizer, torch.amp.GradScaler]


def batch_of(step: int, micro_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = make_data(BATCH, torch.float32, seed=step)
    return zip(inputs.to(DEVICE).chunk(micro_steps), targets.to(DEVICE).chunk(micro_steps), strict=True)


def model_on_gpu() -> nn.Module:
    return make_model(torch.float32).to(DEVICE)


def autocast_to(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(DEVICE, dtype=dtype)


def make_scaler(dtype: torch.dtype | None) -> torch.amp.GradScaler:
    """In use for float16 alone; its scale is small enough for no other infinities than those that a test makes."""
    return torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3, enabled=dtype is torch.float16)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, is_infinite: bool) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return loss * float("inf") if is_infinite else loss


def by_hand(make: Callable[[Parameters], Optimizer], micro_steps: int, dtype: torch.dtype | None) -> Trained:
    model, scaler = model_on_gpu(), make_scaler(dtype)
    optimizer = make(list(model.parameters()))
    for step in range(NUM_STEPS):
        for inputs, targets in batch_of(step, micro_steps):
            with autocast_to(dtype):
                is_infinite = scaler.is_enabled() and step == INFINITE_STEP
                loss = loss_of(model, inputs, targets, is_infinite=is_infinite)
            scaler.scale(loss / micro_steps).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, optimizer, scaler


def by_trainer(
    folder: Path, make: Callable[[Parameters], Optimizer], micro_steps: int, dtype: torch.dtype | None
) -> Trained:
    model, raw_scaler = model_on_gpu(), make_scaler(dtype)
    arguments = {"micro_batch_size": BATCH // micro_steps, "global_batch_size": BATCH}
    with trainer_of(folder, model, **arguments) as trainer:
        optimizer, scaler = trainer.prepare(make(list(model.parameters())), scaler=raw_scaler)
        for step in range(NUM_STEPS):
            for inputs, targets in batch_of(step, micro_steps):
                with trainer.step():
                    with autocast_to(dtype):
                        is_infinite = scaler.is_enabled() and step == INFINITE_STEP
                        loss = loss_of(model, inputs, targets, is_infinite=is_infinite)
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    trainer.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS - scaler.is_enabled()
    return model, optimizer.inner, raw_scaler


def states_of(trained: Trained) -> list[Any]:
    model, optimizer, scaler = trained
    return bits_of(model, optimizer.state_dict()["state"], scaler.state_dict())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_bf16_autocast_is_the_training_by_hand(tmp_path: Path, micro_steps: int, fused: bool) -> None:
    def make(parts: Parameters) -> Optimizer:
        return AdamW(parts, lr=0.02, fused=fused)

    ours = by_trainer(tmp_path, make, micro_steps, torch.bfloat16)
    assert states_of(ours) == states_of(by_hand(make, micro_steps, torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_autocast_with_a_scaler_is_the_training_by_hand(tmp_path: Path, fused: bool) -> None:
    def make(parts: Parameters) -> Optimizer:
        return AdamW(parts, lr=0.02, fused=fused)

    ours = by_trainer(tmp_path, make, 1, torch.float16)
    assert states_of(ours) == states_of(by_hand(make, 1, torch.float16))


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_autocast_in_micro_steps_trains_as_by_hand_but_for_rounding(tmp_path: Path, fused: bool) -> None:
    def make(parts: Parameters) -> Optimizer:
        return AdamW(parts, lr=0.02, eps=1e-3, fused=fused)

    # By hand each loss is divided first: gradients too small for float16's full precision are rounded otherwise.
    model, _, scaler = by_trainer(tmp_path, make, 4, torch.float16)
    plain_model, _, plain_scaler = by_hand(make, 4, torch.float16)
    assert scaler.state_dict() == plain_scaler.state_dict()
    for part, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(part, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("has_tensor_rate", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_a_capturable_optimizer_takes_up_a_rate_while_it_trains(
    tmp_path: Path, micro_steps: int, has_tensor_rate: bool
) -> None:
    def make(model: nn.Module) -> Optimizer:
        rate = torch.tensor(0.015625, device=DEVICE) if has_tensor_rate else 0.015625
        return AdamW(model.parameters(), lr=rate, capturable=True)

    model = model_on_gpu()
    rates: list[float] = []  # that each step used
    arguments = {"micro_batch_size": BATCH // micro_steps, "global_batch_size": BATCH}
    with trainer_of(tmp_path, model, **arguments) as trainer:
        optimizer = trainer.prepare(make(model))
        for step in range(NUM_STEPS):
            rates.append(optimizer.effective_rates[0])
            for inputs, targets in batch_of(step, micro_steps):
                with trainer.step():
                    loss_of(model, inputs, targets, is_infinite=False).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
            if step == 2:
                trainer.propose({"optimizer.learning_rate": 0.03125}, "another rate")
        states = [optimizer.inner.state[part] for part in model.parameters()]
    assert sorted(set(rates)) == [0.015625, 0.03125]
    assert all(state["step"].is_cuda for state in states)

    plain_model = model_on_gpu()
    plain = make(plain_model)
    for step, rate in enumerate(rates):
        group = plain.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        for inputs, targets in batch_of(step, micro_steps):
            (loss_of(plain_model, inputs, targets, is_infinite=False) / micro_steps).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
    expected = [plain.state[part] for part in plain_model.parameters()]
    assert bits_of(model, states) == bits_of(plain_model, expected)


# --- what accelerate has prepared ------------------------------------------------------------------------------------


def by_accelerate(
    folder: Path, make: Callable[[Parameters], Optimizer], micro_steps: int, dtype: torch.dtype
) -> Trained:
    """As ``by_trainer``, with autocast and scaler of accelerate's."""
    precision = "fp16" if dtype is torch.float16 else "bf16"
    scaling = GradScalerKwargs(init_scale=1024.0, growth_interval=3)
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[scaling])
    bare, scaler = model_on_gpu(), accelerator.scaler
    model, prepared = accelerator.prepare(bare, make(list(bare.parameters())))
    arguments = {"micro_batch_size": BATCH // micro_steps, "global_batch_size": BATCH, "accelerator": accelerator}
    with trainer_of(folder, model, **arguments) as trainer:
        optimizer = trainer.prepare(prepared)
        for step in range(NUM_STEPS):
            for inputs, targets in batch_of(step, micro_steps):
                with trainer.step():
                    is_infinite = scaler is not None and step == INFINITE_STEP
                    accelerator.backward(loss_of(model, inputs, targets, is_infinite=is_infinite))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS - (scaler is not None)
    return bare, optimizer.inner, make_scaler(dtype) if scaler is None else scaler


@pytest.mark.parametrize(("dtype", "micro_steps"), [(torch.bfloat16, 1), (torch.bfloat16, 4), (torch.float16, 1)])
def test_mixed_precision_under_accelerate_is_the_training_by_hand(
    tmp_path: Path, dtype: torch.dtype, micro_steps: int
) -> None:
    def make(parts: Parameters) -> Optimizer:
        return AdamW(parts, lr=0.02)

    with accelerate_forgotten():
        ours = by_accelerate(tmp_path, make, micro_steps, dtype)
    assert states_of(ours) == states_of(by_hand(make, micro_steps, dtype))


# --- sharded, with NCCL ---------------------------------------------------------------------------------------------


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A default process group of NCCL's, of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device(DEVICE, 0))
    yield
    dist.destroy_process_group()


def sharded_model(wrap: str) -> nn.Module:
    model: Any = model_on_gpu()
    if wrap == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(DEVICE, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if wrap == "fully_shard, offloaded" else OffloadPolicy()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    wrapped: nn.Module = model
    return wrapped


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard", "fully_shard, offloaded"])
def test_wrapped_models_are_trained_as_by_hand(nccl: None, tmp_path: Path, wrap: str, fails: bool) -> None:
    """Where a pass cannot be taken back, as with fully_shard before torch 2.13, nothing fails in it."""
    by_hand_model, by_trainer_model = sharded_model(wrap), sharded_model(wrap)
    plain = AdamW(by_hand_model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        for index, (inputs, targets) in enumerate(batch_of(step, 4)):
            if isinstance(by_hand_model, FSDPModule):
                by_hand_model.set_requires_gradient_sync(index == 3)
            loss = nn.functional.cross_entropy(by_hand_model(inputs).float(), targets)
            (loss / 4).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
    arguments = {"micro_batch_size": BATCH // 4, "global_batch_size": BATCH}
    with trainer_of(tmp_path, by_trainer_model, **arguments) as trainer:
        optimizer = trainer.prepare(AdamW(by_trainer_model.parameters(), lr=1e-2))
        for step in range(NUM_STEPS):
            if fails and step == 2:
                inputs, targets = next(batch_of(step, 4))
                with trainer.step():
                    nn.functional.cross_entropy(by_trainer_model(inputs).float(), targets).backward()  # type: ignore[no-untyped-call]
                with trainer.step():
                    trainer.rollback()
            for inputs, targets in batch_of(step, 4):
                with trainer.step():
                    loss = nn.functional.cross_entropy(by_trainer_model(inputs).float(), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
        assert trainer.global_step == NUM_STEPS
    is_offloaded = wrap == "fully_shard, offloaded"
    assert all(part.is_cuda is not is_offloaded for part in by_trainer_model.parameters())
    for ours, theirs in zip(by_trainer_model.parameters(), by_hand_model.parameters(), strict=True):
        torch.testing.assert_close(held(ours), held(theirs), rtol=1e-5, atol=1e-6)


def held(part: torch.Tensor) -> torch.Tensor:
    """What of it lies here, which is all: without asking NCCL, that knows no tensors on the CPU."""
    return part.to_local() if isinstance(part, DTensor) else part


@pytest.mark.parametrize("fails", [False, True])
def test_accelerates_fsdp2_plugin_in_bfloat16_trains_as_by_hand(
    nccl: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Trained by SGD, whose steps are as long as gradients are."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):  # as a launcher sets them
        monkeypatch.setenv(name, value)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    by_hand_model: Any = fully_shard(model_on_gpu(), mp_policy=policy)
    plain = SGD(by_hand_model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for index, (inputs, targets) in enumerate(batch_of(step, 4)):
            by_hand_model.set_requires_gradient_sync(index == 3)
            loss = loss_of(by_hand_model, inputs, targets, is_infinite=False)
            (loss / 4).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
    with accelerate_forgotten():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
        bare = model_on_gpu()
        model, prepared = accelerator.prepare(bare, SGD(bare.parameters(), lr=0.1))
        assert accelerator.is_fsdp2 and all(isinstance(part, DTensor) for part in model.parameters())
        arguments = {"micro_batch_size": BATCH // 4, "global_batch_size": BATCH, "accelerator": accelerator}
        with trainer_of(tmp_path, model, **arguments) as trainer:
            optimizer = trainer.prepare(prepared)
            for step in range(NUM_STEPS):
                if fails and step == 2:
                    inputs, targets = next(batch_of(step, 4))
                    with trainer.step():
                        accelerator.backward(loss_of(model, inputs, targets, is_infinite=False))
                    with trainer.step():
                        trainer.rollback()
                for inputs, targets in batch_of(step, 4):
                    with trainer.step():
                        accelerator.backward(loss_of(model, inputs, targets, is_infinite=False))
                        optimizer.step()
                        optimizer.zero_grad()
            assert trainer.global_step == NUM_STEPS
    for ours, theirs in zip(model.parameters(), by_hand_model.parameters(), strict=True):
        torch.testing.assert_close(held(ours), held(theirs), rtol=1e-5, atol=1e-6)
