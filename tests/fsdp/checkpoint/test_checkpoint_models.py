"""Checkpoints of all kinds of models: what they hold, what they are wrapped in, and what does not go together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

from elastic_ext.errors import CheckpointMismatch
from elastic_ext.fsdp import Loaded, ShardCheckpointer
from elastic_ext.fsdp.value_encoding import DTYPES
from tests.support.ranks import RankPool
from tests.support.spread import any_bits


def save(folder: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    with ShardCheckpointer(folder, job="it") as checkpointer:
        checkpointer.save(1, model, optimizer)


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None = None, *, strict: bool = True) -> Loaded:
    with ShardCheckpointer(folder, job="it") as checkpointer:
        return checkpointer.load(model, optimizer, strict=strict)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, num_steps: int = 2, *sizes: int) -> None:
    draw = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    for _ in range(num_steps):
        model(torch.randn(4, *(sizes or (6,)), generator=draw).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """Equal where everything is equal bit for bit; however it lies in memory."""
    return {
        name: (one.shape, one.dtype, one.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, one in tensors.items()
    }


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The model's and the optimizer's tensors."""
    found = dict(model.state_dict())
    for number, parameter in enumerate(model.parameters()):
        state = optimizer.state.get(parameter, {})
        found.update({f"{number}/{key}": state[key] for key in sorted(state)})
    return found


# --- what they hold -------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Buffers, by any names that modules take."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


SHAPES = ((), (0,), (3, 0, 2), (1,), (5,), (2, 3, 7))


def all_dtypes(seed: int) -> Holder:
    kinds = [(dtype, shape) for dtype in DTYPES.values() for shape in SHAPES]
    return Holder({f"{dtype} {shape}".replace(".", " "): any_bits(shape, dtype, seed) for dtype, shape in kinds})


def test_tensors_of_every_dtype_and_odd_shape_come_back_bit_for_bit(tmp_path: Path) -> None:
    model, other = all_dtypes(0), all_dtypes(1)
    save(tmp_path, model)
    load(tmp_path, other)
    assert bits(dict(other.named_buffers())) == bits(dict(model.named_buffers()))


class Named(nn.Module):
    """Parameters of names that files and metadata could take for their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        plain = ("a/b", "é 漢 🙂", "!", "\"'\\", "new\nline", "@0", "weight/exp_avg", "weight", " ", "%s{}")
        for name in (*plain, "x" * 300, "weight/exp_avg/exp_avg", "COMMIT", "..hidden".replace(".", "/"), "\0"):
            self.register_parameter(name, nn.Parameter(torch.randn(4)))
        self.elastic_ext = nn.Module()
        self.elastic_ext.checksum = nn.Parameter(torch.randn(2, 4))
        self.elastic_ext.register_buffer("__metadata__", torch.randn(3))
        self.module = nn.Linear(6, 4)  # as DDP calls what it wraps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(inputs)
        for parameter in self.parameters():
            if parameter.shape[-1] == 4:
                result = result * parameter.sum()
        return result


def test_odd_names_are_names(tmp_path: Path) -> None:
    model, other = Named(0), Named(1)
    optimizer, fresh = adamw(model), adamw(other)
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    load(tmp_path, other, fresh)
    assert bits(state_of(other, fresh)) == bits(state_of(model, optimizer))
    train(model, optimizer)
    train(other, fresh)
    assert bits(state_of(other, fresh)) == bits(state_of(model, optimizer))


def save_what_files_need(rank: int, folder: Path, name: str) -> str:
    with pytest.raises(ValueError, match=name) as caught:
        save(folder, Holder({name: torch.zeros(3), "other": torch.zeros(4)}))
    return str(caught.value)


def test_a_name_that_files_need_for_themselves_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_what_files_need, tmp_path, "__metadata__")
    assert first == second
    assert "a tensor cannot be named '__metadata__', which the file needs for itself; give it another name" in first


def low_precision(rank: int, seed: int) -> Any:
    """bf16 parameters, fp8 and other buffers, on all ranks."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)).bfloat16()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.int8):
        model[0].register_buffer(str(dtype).replace(".", " "), any_bits((2, 3), dtype, seed))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model, SGD(model.parameters(), lr=1e-2, momentum=0.9)


def full(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state_of(model, optimizer).items()
    }


def save_low_precision(rank: int, folder: Path) -> Mapping[str, Any]:
    model, optimizer = low_precision(rank, 0)
    train(model, optimizer)
    save(folder, model, optimizer)
    return bits(full(model, optimizer))


def load_low_precision(rank: int, folder: Path) -> Mapping[str, Any]:
    model, optimizer = low_precision(rank, 1)
    load(folder, model, optimizer)
    return bits(full(model, optimizer))


def test_bf16_parameters_and_fp8_buffers_go_from_2_ranks_to_3(ranks: RankPool, tmp_path: Path) -> None:
    expected, *others = ranks.run(2, save_low_precision, tmp_path)
    others += ranks.run(3, load_low_precision, tmp_path)
    assert others == [expected] * 4


# --- dtypes that change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_become_the_dtype_of_the_model_and_state_that_of_its_parameter(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model, other = nn.Linear(6, 5), nn.Linear(6, 5).to(dtype)
    optimizer, fresh = adamw(model), adamw(other)
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    load(tmp_path, other, fresh)
    expected = {
        name: one if name.endswith("/step") else one.to(dtype) for name, one in state_of(model, optimizer).items()
    }
    assert bits(state_of(other, fresh)) == bits(expected)
    train(other, fresh)
    kept = fresh.state[other.weight]["exp_avg"]
    load(tmp_path, other, fresh)
    assert bits(state_of(other, fresh)) == bits(expected)
    assert fresh.state[other.weight]["exp_avg"] is kept


def test_state_that_had_a_dtype_of_its_own_keeps_it(tmp_path: Path) -> None:
    model, other = nn.Linear(6, 5).bfloat16(), nn.Linear(6, 5).bfloat16()
    optimizer, fresh = adamw(model), adamw(other)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(parameter.shape)}
    save(tmp_path, model, optimizer)
    load(tmp_path, other, fresh)
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.float32
    assert bits(state_of(other, fresh)) == bits(state_of(model, optimizer))


# --- memory that is not contiguous ----------------------------------------------------------------------------------


def convolution(seed: int, memory_format: torch.memory_format) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 2))
    model = model.to(memory_format=memory_format)
    return model, adamw(model)


@pytest.mark.parametrize("saved", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("loaded", [torch.channels_last, torch.contiguous_format])
def test_memory_may_lie_in_another_order(
    tmp_path: Path, saved: torch.memory_format, loaded: torch.memory_format
) -> None:
    model, optimizer = convolution(0, saved)
    train(model, optimizer, 2, 4, 6, 6)
    save(tmp_path, model, optimizer)
    other, fresh = convolution(1, loaded)
    load(tmp_path, other, fresh)
    assert bits(state_of(other, fresh)) == bits(state_of(model, optimizer))
    assert other[0].weight.is_contiguous(memory_format=loaded)  # type: ignore[index]
    if saved == loaded:
        train(model, optimizer, 3, 4, 6, 6)
        train(other, fresh, 3, 4, 6, 6)
        assert bits(state_of(other, fresh)) == bits(state_of(model, optimizer))


def test_what_is_a_part_of_another_tensor_is_written_alone(tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    model = Holder({"part": whole[1:5:2, 2:7].clone()})
    save(tmp_path, model)
    around = torch.zeros(8, 6)
    load(tmp_path, Holder({"part": around.t()[1:5:2, 2:7]}))
    expected = torch.zeros(6, 8)
    expected[1:5:2, 2:7] = whole[1:5:2, 2:7]
    assert torch.equal(around.t(), expected)


# --- wrappers -------------------------------------------------------------------------------------------------------


def layers(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)), nn.Linear(7, 3))


def with_checkpoints(seed: int) -> nn.Module:
    model = layers(seed)
    model[1] = checkpoint_wrapper(model[1])
    return nn.Sequential(*model)


def compiled(seed: int, *, inside: bool = False) -> nn.Module:
    model = layers(seed)
    if inside:
        model[0] = checkpoint_wrapper(model[0])
        model[1] = torch.compile(model[1], backend="eager")
        return nn.Sequential(*model)
    whole: Any = torch.compile(model, backend="eager")
    module: nn.Module = whole
    return module


def compiled_in_place(seed: int) -> nn.Module:
    model: nn.Module = layers(seed)
    model.compile(backend="eager")
    return model


WRAPPED: Mapping[str, Callable[[int], nn.Module]] = {
    "bare": layers,
    "activation checkpoints": with_checkpoints,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "a part compiled, another of activation checkpoints": functools.partial(compiled, inside=True),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile, for a part
def test_wrapped_models_load_what_any_other_has_saved(tmp_path: Path) -> None:
    for number, (name, make) in enumerate(WRAPPED.items()):
        model = make(number)
        optimizer = adamw(model)
        train(model, optimizer, 1)
        save(tmp_path / name, model, optimizer)
        expected = list(bits(state_of(model, optimizer)).values())
        for another in WRAPPED.values():
            other = another(99)
            fresh = adamw(other)
            load(tmp_path / name, other, fresh)
            assert list(bits(state_of(other, fresh)).values()) == expected


def sharded_and_wrapped(rank: int, folder: Path) -> list[list[tuple[object, ...]]]:
    """What a model that is checkpointed, sharded and compiled saves, and what one that is only sharded loads of it."""
    found = []
    for seed, is_wrapped in ((0, True), (1, False)):
        model: Any = with_checkpoints(seed) if is_wrapped else layers(seed)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[1], mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        model = torch.compile(model, backend="eager") if is_wrapped else model
        optimizer = adamw(model)
        if is_wrapped:
            train(model, optimizer, 1)
            save(folder, model, optimizer)
        else:
            load(folder, model, optimizer)
        found.append(list(bits(full(model, optimizer)).values()))
    return found


def test_a_sharded_model_may_be_wrapped_within_and_without(ranks: RankPool, tmp_path: Path) -> None:
    for saved, loaded in ranks.run(2, sharded_and_wrapped, tmp_path):
        assert saved == loaded


# --- tied weights ---------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two layers, of one weight or of two."""

    def __init__(self, seed: int, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        if is_tied:
            self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return result


def test_what_was_tied_is_loaded_into_both_and_both_are_then_their_own(tmp_path: Path) -> None:
    model, other = Pair(0, is_tied=True), Pair(1, is_tied=False)
    save(tmp_path, model)
    load(tmp_path, other)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert other.first.weight.data_ptr() != other.second.weight.data_ptr()


def test_what_was_not_tied_is_loaded_from_the_name_that_the_tied_weight_goes_by(tmp_path: Path) -> None:
    model, other = Pair(0, is_tied=False), Pair(1, is_tied=True)
    save(tmp_path, model)
    load(tmp_path, other)
    assert bits({"": other.second.weight}) == bits({"": model.first.weight})
    assert other.second.weight is other.first.weight


@pytest.mark.parametrize("was_tied", [True, False])
def test_an_optimizer_of_other_ties_is_refused_or_loaded_as_far_as_it_fits(tmp_path: Path, was_tied: bool) -> None:
    model, other = Pair(0, is_tied=was_tied), Pair(1, is_tied=not was_tied)
    optimizer, fresh = adamw(model), adamw(other)
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    before = bits(other.state_dict())
    with pytest.raises(CheckpointMismatch) as caught:
        load(tmp_path, other, fresh)
    assert caught.value.missing == (() if not was_tied else ("second.weight",))
    assert caught.value.extra == (("second.weight",) if not was_tied else ())
    assert bits(other.state_dict()) == before
    load(tmp_path, other, fresh, strict=False)
    kept, expected = fresh.state[other.first.weight], optimizer.state[model.first.weight]
    assert bits(dict(kept)) == bits(dict(expected))
    train(other, fresh)


# --- what does not go together --------------------------------------------------------------------------------------


def of_sizes(sizes: Sequence[int], seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(before, after) for before, after in itertools.pairwise(sizes)))


def test_what_does_not_fit_is_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path, of_sizes((6, 5, 4), 0))
    model = of_sizes((6, 5, 3, 2), 1)
    before = bits(model.state_dict())
    with pytest.raises(CheckpointMismatch) as caught:
        load(tmp_path, model)
    assert caught.value.missing == ("2.bias", "2.weight")
    assert caught.value.extra == ()
    assert caught.value.misshaped == {
        "1.bias": "(3,) here, (4,) in the checkpoint",
        "1.weight": "(3, 5) here, (4, 5) in the checkpoint",
    }
    assert bits(model.state_dict()) == before
    smaller = of_sizes((6, 5), 1)
    with pytest.raises(CheckpointMismatch, match=r"in the checkpoint alone: 1\.bias, 1\.weight") as caught:
        load(tmp_path, smaller)
    assert caught.value.extra == ("1.bias", "1.weight")


def test_what_fits_is_loaded_without_strict_and_the_rest_stays(tmp_path: Path) -> None:
    model = of_sizes((6, 5, 4), 0)
    optimizer = adamw(model)
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    other = of_sizes((6, 5, 3, 2), 1)
    fresh = adamw(other)
    rest = bits(other[1:].state_dict())
    load(tmp_path, other, fresh, strict=False)
    assert bits(other[0].state_dict()) == bits(model[0].state_dict())
    assert bits(other[1:].state_dict()) == rest
    assert bits(dict(fresh.state[other[0].weight])) == bits(dict(optimizer.state[model[0].weight]))
    assert not fresh.state.get(other[2].weight)
    assert not fresh.state.get(other[1].weight)  # half of it, such as the count of steps, would be worse than none
    train(other, fresh)


def test_a_model_is_not_touched_where_its_optimizer_does_not_fit(tmp_path: Path) -> None:
    model = of_sizes((6, 5), 0)
    optimizer = adamw(model)
    train(model, optimizer)
    save(tmp_path, model, optimizer)
    other = of_sizes((6, 5), 1)
    apart = AdamW([{"params": [other[0].weight]}, {"params": [other[0].bias]}], lr=0.1)
    train(other, apart)
    before = bits(state_of(other, apart))
    with pytest.raises(CheckpointMismatch, match="group the parameters as they were"):
        load(tmp_path, other, apart)
    assert bits(state_of(other, apart)) == before


def load_another_shape(rank: int, folder: Path) -> tuple[object, ...]:
    model: Any = of_sizes((6, 4), rank)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        load(folder, model)
    except CheckpointMismatch as error:
        return error.missing, error.extra, error.misshaped, str(error).count("0.weight")
    return ()


def test_every_rank_is_given_the_lists(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, of_sizes((6, 5), 0))
    misshaped = {
        "0.bias": "(4,) here, (5,) in the checkpoint",
        "0.weight": "(4, 6) here, (5, 6) in the checkpoint",
    }
    assert ranks.run(2, load_another_shape, tmp_path) == [((), (), misshaped, 1)] * 2


class Scaled(nn.Linear):
    """Keeps a history, as modules that train in fp8 do, in its extra state."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.history: Any = torch.full((3,), value)

    def get_extra_state(self) -> object:
        return self.history

    def set_extra_state(self, state: object) -> None:
        self.history = state


def scaled_rank(_: int, folder: Path, wraps: bool) -> None:
    model: Any = nn.Sequential(Scaled(1.0), Scaled(2.0))
    later: Any = nn.Sequential(Scaled(0.0), Scaled(0.0))
    model[1].history = {"amax": torch.arange(2, dtype=torch.bfloat16), "length": 3}
    if wraps:
        for each in (model, later):
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
    save(folder, model)
    with ShardCheckpointer(folder, job="it") as checkpointer:
        checkpointer.load(later)
    assert torch.equal(later[0].history, torch.ones(3))
    assert torch.equal(later[1].history["amax"], torch.arange(2, dtype=torch.bfloat16))
    assert later[1].history["length"] == 3


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_extra_state_may_be_a_tensor_or_have_some_in_it(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(num_ranks, scaled_rank, tmp_path, num_ranks > 1)
