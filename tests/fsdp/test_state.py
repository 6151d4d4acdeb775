"""State in one process: names whatever a model is wrapped in, the memory that is trained in, every optimizer of torch
taken up where it was put down, values without pickle, random states; and what is refused, with the reason.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer

from elastic_ext.errors import CheckpointMismatch, ElasticError
from elastic_ext.fsdp.layout import Box, Cut, box_after
from elastic_ext.fsdp.names import named_tensors
from elastic_ext.fsdp.optimizers import HeldOptimizers, held_of_optimizers, make_missing, put_groups, put_values
from elastic_ext.fsdp.pickled_values import tensors_in
from elastic_ext.fsdp.random_state import random_tensors, restore_random
from elastic_ext.fsdp.state import (
    Kind,
    extra_states,
    held_of_model,
    memory_of,
    put_extra_states,
)
from elastic_ext.fsdp.value_encoding import DTYPES, Plain, dtype_of, name_of, pack, unpack
from elastic_ext.torch_private import sharded
from tests.support.training import make_data, make_model

# --- names ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A model whose state has something of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.module = nn.Linear(6, 6)  # which DDP calls what it wraps
        self.head = nn.Linear(6, 6)
        self.head.weight = self.body.get_parameter("0.weight")
        self.shared = self.body
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("w/ö ", nn.Parameter(torch.ones(2)))
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.normed = parametrizations.weight_norm(nn.Linear(2, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.module(self.body(inputs))) * self.gain
        return result


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


def checkpointed(model: Any) -> nn.Module:
    model.body = checkpoint_wrapper(model.body)
    model.shared = model.body
    return model  # type: ignore[no-any-return]


def compiled_inside(model: Any) -> nn.Module:
    model.head = torch.compile(model.head, backend="eager")
    return model  # type: ignore[no-any-return]


def compiled(model: Any) -> nn.Module:
    whole: Any = torch.compile(model, backend="eager")
    return whole  # type: ignore[no-any-return]


WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "compiled": compiled,
    "compiled inside": compiled_inside,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "checkpointed inside DDP": lambda model: DistributedDataParallel(checkpointed(model)),
    "DataParallel": nn.DataParallel,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_are_those_of_the_bare_models_state_whatever_it_is_wrapped_in(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    bare = Tied()
    expected = bare.state_dict()
    found = held_of_model(wrap(bare)).tensors
    assert {one.name: one.tensor.data_ptr() for one in found} == {
        name: value.data_ptr() for name, value in expected.items()
    }
    assert {one.name: one.is_alias_of for one in found if one.is_alias_of} == {
        "head.weight": "body.0.weight",
        **{name: name.replace("shared", "body") for name in expected if name.startswith("shared.")},
    }
    assert {one.name for one in found if one.kind == "buffer" and not one.name.startswith("shared")} == {
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
        "kept",
    }
    assert all(one.box == Box.whole(expected[one.name].shape) and not one.tensor.requires_grad for one in found)


def test_written_state_is_what_the_model_computes_with() -> None:
    source, target = make_model(seed=1), make_model(seed=2)
    for mine, its in zip(held_of_model(target).tensors, held_of_model(source).tensors, strict=True):
        mine.tensor.copy_(its.tensor)
    inputs, _ = make_data(4)
    assert torch.equal(source(inputs), target(inputs))


def test_an_alias_does_not_depend_on_which_module_comes_first() -> None:
    one: Any = nn.Module()
    other: Any = nn.Module()
    one.a, one.b = nn.Linear(2, 2), nn.Linear(2, 2)
    other.b, other.a = nn.Linear(2, 2), nn.Linear(2, 2)
    for model in (one, other):
        model.b.weight = model.a.weight
        assert {held.name: held.is_alias_of for held in held_of_model(model).tensors}["b.weight"] == "a.weight"
        assert [held.name for held in held_of_model(model).parameters].count("a.weight") == 1


def test_two_tensors_of_one_name_are_refused() -> None:
    model: Any = checkpoint_wrapper(nn.Linear(2, 2))
    model._parameters["weight"] = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="two tensors of the model are called 'weight'"):
        named_tensors(model)


# --- what memory can be saved ---------------------------------------------------------------------------------------


def holding(tensor: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("it", tensor)
    return model


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_a_file_is_held_and_its_bytes_are_written_in_place(name: str) -> None:
    dtype = dtype_of(name)
    tensor = torch.zeros(2, 3, dtype=torch.uint8).repeat(1, dtype.itemsize).view(dtype)
    (held,) = held_of_model(holding(tensor)).tensors
    assert (held.dtype, held.box, name_of(dtype)) == (name, Box.whole((2, 3)), name)
    memory = memory_of(held.tensor)
    assert memory is not None and len(memory) == 6 * dtype.itemsize
    memory[-1] = 1
    assert tensor.view(torch.uint8)[-1, -1] == 1


def test_memory_of_one_element_and_of_none_is_given_and_of_strided_memory_is_not() -> None:
    one = torch.tensor(1.5)
    memory = memory_of(one)
    assert memory is not None and memory.nbytes == 4
    memory[:] = bytes(4)
    assert one == 0
    empty = memory_of(torch.empty(0, 4))
    assert empty is not None and empty.nbytes == 0
    assert memory_of(torch.zeros(3, 4).T) is None


class Wrapped(torch.Tensor):
    """Stands for tensors that are made of others, such as quantised ones."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(2, device="meta"), "it is on the meta device.*call to_empty"),
        (lambda: torch.eye(2).to_sparse(), "it has layout torch.sparse_coo; allowed: torch.strided"),
        (lambda: torch.zeros(2, dtype=torch.complex128), "it has dtype torch.complex128; allowed: torch.float64"),
        (lambda: torch.zeros(1).expand(3), "it was expanded.*clone"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "it is a view that conjugates.*resolve_conj"),
        (lambda: torch.zeros(2).as_subclass(Wrapped), "it is a Wrapped, made of other tensors"),
        (nn.parameter.UninitializedBuffer, "it has no shape yet; run a batch"),
    ],
)
def test_memory_that_is_not_simply_its_elements_is_refused(make: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        held_of_model(holding(make()))


def test_dimensions_of_one_that_were_expanded_are_no_fault() -> None:
    (held,) = held_of_model(holding(torch.arange(3).expand(1, -1))).tensors
    assert held.box == Box.whole((1, 3))


def test_one_element_that_was_expanded_has_its_bytes_given_in_place() -> None:
    one = torch.tensor(2.0)
    (held,) = held_of_model(holding(one.expand(1, 1))).tensors
    memory = memory_of(held.tensor)
    assert memory is not None
    memory[:] = torch.tensor(3.0).numpy().tobytes()
    assert one == 3.0


def test_unknown_dtype_of_a_checkpoint_is_named() -> None:
    with pytest.raises(ValueError, match="F4 is not a dtype that torch"):
        dtype_of("F4")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history = [1.0]

    def get_extra_state(self) -> Any:
        return {"history": self.history, "last": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


def test_extra_state_is_found_and_given_back_by_the_names_of_state_dict() -> None:
    bare = nn.Sequential(Scaled(), nn.Linear(2, 2), Scaled())
    model = compiled(bare)
    found = extra_states(model)
    assert set(found) == {name for name in bare.state_dict() if name.endswith("_extra_state")}
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps({name: pack(value, name, tensors) for name, value in found.items()}))
    packed["0._extra_state"]["history"] = [3.0]
    put_extra_states(model, {name: unpack(value, tensors) for name, value in packed.items()} | {"other": 1})
    assert [part.history for part in bare if isinstance(part, Scaled)] == [[3.0], [1.0]]
    assert set(tensors) == {"0._extra_state/last", "2._extra_state/last"}


# --- placements -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3), st.data())
def test_cuts_leave_what_chunking_leaves(size: int, sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    cuts = [Cut(0, num_parts, data.draw(st.integers(0, num_parts - 1)), outer) for num_parts, outer in sizes]
    came_last = [math.prod(later.num_parts for later in cuts[at + 1 :]) == cut.num_outer for at, cut in enumerate(cuts)]
    assume(not any(last and cut.num_outer > 1 for last, cut in zip(came_last, cuts, strict=True)))
    kept = torch.arange(size)
    for cut in cuts:
        parts = [chunk_of(outer, cut.num_parts, cut.part) for outer in all_chunks(kept, cut.num_outer)]
        kept = torch.cat(parts)
    assert box_after((size, 3), cuts) == box_of_rows(size, kept)


@given(st.integers(0, 60), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_cuts_made_from_the_last_mesh_dimension_to_the_first_leave_what_chunking_in_that_order_leaves(
    size: int, num_parts: list[int], data: st.DataObject
) -> None:
    kept = torch.arange(size)
    cuts: list[Cut] = []
    for num in reversed(num_parts):
        part = data.draw(st.integers(0, num - 1))
        cuts.insert(0, Cut(0, num, part, math.prod(cut.num_parts for cut in cuts)))
        kept = chunk_of(kept, num, part)
    assert box_after((size, 3), cuts) == box_of_rows(size, kept)


def box_of_rows(size: int, rows: torch.Tensor) -> Box | None:
    """The box of these rows, None if there are others between them."""
    if rows.numel() == 0:
        return Box.empty((size, 3))
    first, end = int(rows[0]), int(rows[-1]) + 1
    return Box.block((size, 3), (first, 0), (end, 3)) if rows.tolist() == list(range(first, end)) else None


def all_chunks(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    found = list(torch.chunk(tensor, num_chunks)) if tensor.numel() else []
    return found + [tensor[:0]] * (num_chunks - len(found))


def chunk_of(tensor: torch.Tensor, num_chunks: int, chunk: int) -> torch.Tensor:
    return all_chunks(tensor, num_chunks)[chunk]


def weight_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("0.weight")


# --- optimizers -----------------------------------------------------------------------------------------------------


class Counting(Optimizer):
    """Keeps what is no tensor beside what is, and a tensor in another dtype than its parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "window": (3, math.inf), "note": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for part in group["params"]:
                state = self.state[part]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = (*state.get("seen", ()), float("nan"))[-2:]
                state["old"] = [*state.get("old", []), part.grad.clone(), state["count"]][-4:]
                state["sums"] = {"of": (state["old"][0].sum(), numpy.ones(2)), "none": None}
                state.setdefault("mean", torch.zeros_like(part, dtype=torch.float32)).add_(part.grad)
                part.sub_((state["mean"] + state["old"][0]) * group["lr"] / state["count"])


OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parts: SGD(parts, lr=0.1),
    "momentum": lambda parts: SGD(parts, lr=0.1, momentum=0.9, nesterov=True),
    "fused sgd": lambda parts: SGD(parts, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda parts: Adam(parts, lr=1e-2),
    "amsgrad": lambda parts: AdamW(parts, lr=1e-2, amsgrad=True),
    "foreach": lambda parts: AdamW(parts, lr=1e-2, foreach=True),
    "fused": lambda parts: AdamW(parts, lr=1e-2, fused=True),
    "tensor lr": lambda parts: Adam(parts, lr=torch.tensor(1e-2)),
    "adafactor": lambda parts: optim.Adafactor(parts, lr=1e-2),
    "adagrad": lambda parts: optim.Adagrad(parts, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda parts: optim.Adadelta(parts),
    "adamax": lambda parts: optim.Adamax(parts),
    "asgd": lambda parts: optim.ASGD(parts, t0=1),
    "nadam": lambda parts: optim.NAdam(parts),
    "radam": lambda parts: optim.RAdam(parts),
    "rmsprop": lambda parts: optim.RMSprop(parts, centered=True, momentum=0.9),
    "rprop": lambda parts: optim.Rprop(parts),
    "muon": lambda parts: optim.Muon([part for part in parts if part.dim() == 2]),
    "counting": Counting,
}


@dataclass(frozen=True, slots=True)
class _Layout:
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meta:
    """What a checkpoint says of a tensor."""

    dtype: str
    kind: Kind
    layout: _Layout


Pair = tuple[nn.Module, list[Optimizer]]


def put_down(pair: Pair) -> tuple[dict[str, torch.Tensor], dict[str, Meta], dict[str, Plain], list[Plain]]:
    """Everything as it would come back from files."""
    model, optimizers = pair
    found = held_of_optimizers(optimizers, held_of_model(model).parameters)
    tensors = {one.name: one.tensor.clone() for one in [*held_of_model(model).tensors, *found.tensors]}
    metas = {one.name: Meta(one.dtype, one.kind, _Layout(one.box.shape)) for one in found.tensors}
    values, groups = json.loads(json.dumps([found.values, found.groups], allow_nan=False))
    return tensors, metas, values, groups


def take_up(pair: Pair, saved: tuple[dict[str, torch.Tensor], dict[str, Meta], dict[str, Plain], list[Plain]]) -> None:
    model, optimizers = pair
    tensors, metas, values, groups = saved
    parameters = held_of_model(model).parameters
    in_lists = {name for value in values.values() for name in tensors_in(value)}
    assert make_missing(optimizers, parameters, {name: metas[name] for name in metas.keys() - in_lists}) == []
    assert put_values(optimizers, parameters, values, metas) == []
    put_groups(optimizers, parameters, groups)
    held = [*held_of_model(model).tensors, *held_of_optimizers(optimizers, parameters).tensors]
    assert {one.name for one in held} == set(tensors)
    for one in held:
        one.tensor.copy_(tensors[one.name])


def train(pair: Pair, steps: Sequence[int]) -> None:
    model, optimizers = pair
    for index in steps:
        inputs, targets = make_data(8, next(iter(model.parameters())).dtype, seed=index)
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def resumes_as_if_never_stopped(make: Callable[[], Pair]) -> bool:
    going, fresh = make(), make()
    train(going, range(3))
    saved = put_down(going)
    train(going, range(3, 6))
    take_up(fresh, saved)
    train(fresh, range(3, 6))
    return bool(exact(going) == exact(fresh))


def exact(thing: Any) -> Any:
    """Every number of a state to the bit, and what it is made of."""
    if isinstance(thing, (nn.Module, Optimizer)):
        return exact(thing.state_dict())
    if isinstance(thing, dict):
        return {key: exact(value) for key, value in thing.items()}
    if isinstance(thing, torch.Tensor):
        numbers = thing.detach().reshape(-1).view(torch.uint8).tolist()
        return (thing.dtype, thing.device, thing.shape, thing.stride(), numbers)
    return [type(thing), *map(exact, thing)] if isinstance(thing, (list, tuple)) else (type(thing), repr(thing))


# Two equal trainings by fused SGD in bfloat16 differ from each other in their momentum, on the CPU.
IN_BFLOAT16 = [name for name in OPTIMIZERS if name != "fused sgd"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIMIZERS), *((name, torch.bfloat16) for name in IN_BFLOAT16)],
)
def test_an_optimizer_taken_up_goes_on_as_if_it_had_never_stopped(name: str, dtype: torch.dtype) -> None:
    def make() -> Pair:
        model = make_model(dtype)
        return model, [OPTIMIZERS[name](list(model.parameters()))]

    assert resumes_as_if_never_stopped(make)


def test_several_groups_and_optimizers_go_on_in_whatever_order_they_come() -> None:
    def make() -> Pair:
        model = make_model()
        first = AdamW([{"params": [weight_of(model)], "lr": 0.1}, {"params": [model[0].bias], "weight_decay": 0.3}])
        return model, [first, SGD(model[2].parameters(), lr=0.1, momentum=0.5)]

    assert resumes_as_if_never_stopped(make)
    one, other = make(), make()
    train(one, range(2))
    other[1].reverse()
    other[1][1].param_groups.reverse()
    take_up(other, put_down(one))
    assert [group["lr"] for each in other[1] for group in each.param_groups] == [0.1, 1e-3, 0.1]


def test_zero_dimensional_empty_and_frozen_parameters_keep_their_state() -> None:
    model = Tied()
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    found = held_of_optimizers([optimizer], held_of_model(model).parameters)
    kinds = {one.name: one.kind for one in found.tensors}
    assert (kinds["gain/exp_avg"], kinds["gain/step"]) == ("like", "scalar")
    assert not any(name.startswith(("frozen", "head.weight", "none")) for name in kinds)
    fresh = Adam(model.parameters(), lr=0.1)
    metas = {one.name: Meta(one.dtype, one.kind, _Layout(one.box.shape)) for one in found.tensors}
    assert make_missing([fresh], held_of_model(model).parameters, metas) == []
    for part, state in optimizer.state.items():
        assert {key: (value.dtype, value.shape, value.stride()) for key, value in state.items()} == {
            key: (value.dtype, value.shape, value.stride()) for key, value in fresh.state[part].items()
        }


def test_state_in_float32_of_parameters_in_bfloat16_stays_in_float32() -> None:
    model = make_model(torch.bfloat16)
    metas = {"0.weight/exp_avg": Meta("F32", "like", _Layout((16, 6)))}
    optimizer = AdamW(model.parameters())
    make_missing([optimizer], held_of_model(model).parameters, metas)
    assert optimizer.state[weight_of(model)]["exp_avg"].dtype == torch.float32


def test_state_that_is_there_already_stays_the_memory_that_it_is() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train((model, [optimizer]), [0])
    before = optimizer.state[weight_of(model)]["momentum_buffer"]
    make_missing(
        [optimizer],
        held_of_model(model).parameters,
        {"0.weight/momentum_buffer": Meta("F64", "like", _Layout((16, 6)))},
    )
    assert optimizer.state[weight_of(model)]["momentum_buffer"] is before


def test_a_tensor_lr_stays_the_tensor_that_a_captured_graph_reads() -> None:
    model = make_model()
    lr, first = torch.tensor(0.5), torch.tensor(0.5)
    optimizer = Adam(model.parameters(), lr=lr, betas=(first, torch.tensor(0.5)), foreach=False)
    saved = held_of_optimizers(
        [Adam(model.parameters(), lr=0.25, betas=(0.75, 0.5))], held_of_model(model).parameters
    ).groups
    put_groups([optimizer], held_of_model(model).parameters, saved)
    assert optimizer.param_groups[0]["lr"] is lr and lr == 0.25
    assert optimizer.param_groups[0]["betas"][0] is first and first == 0.75
    assert optimizer.param_groups[0]["betas"][1] == 0.5
    assert optimizer.param_groups[0]["foreach"] is False


def test_state_without_a_parameter_here_is_told() -> None:
    model = make_model()
    parameters = held_of_model(model).parameters
    optimizer = SGD(model[0].parameters(), lr=0.1)
    metas = {name: Meta("F32", "like", _Layout((5,))) for name in ("2.bias/momentum_buffer", "gone/exp_avg", "odd")}
    assert make_missing([optimizer], parameters, metas) == ["2.bias/momentum_buffer", "gone/exp_avg", "odd"]
    assert put_values([optimizer], parameters, {"2.bias/count": 3}, {}) == ["2.bias/count"]
    assert not optimizer.state


def test_parameters_grouped_otherwise_are_refused_and_nothing_changes() -> None:
    model = make_model()
    parameters = held_of_model(model).parameters
    saved = held_of_optimizers([SGD(model.parameters(), lr=0.5)], parameters).groups
    optimizer = SGD([{"params": list(model[0].parameters())}, {"params": [model.get_parameter("2.weight")]}], lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"\[0.bias, 0.weight\] \[2.weight\].*group the parameters") as caught:
        put_groups([optimizer], parameters, saved)
    assert caught.value.extra == ("2.bias",)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    with pytest.raises(ValueError, match="groups of the optimizers cannot be read"):
        put_groups([optimizer], parameters, [{"groups": [{"params": 3}]}])


def held(model: nn.Module, *optimizers: Optimizer) -> HeldOptimizers:
    return held_of_optimizers(optimizers, held_of_model(model).parameters)


def test_optimizers_that_no_name_can_be_given_to_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"parameter of shape \(16, 6\) that is not one of the model's"):
        held(model, SGD(make_model().parameters()))
    with pytest.raises(ValueError, match=r"0.weight is in two optimizers"):
        held(model, SGD(model.parameters()), Adam(model.parameters()))


def test_what_would_have_to_be_pickled_is_refused_by_name() -> None:
    model = make_model()
    optimizer = SGD(model.parameters())
    optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(TypeError, match="group 0 of SGD: schedule is a function, which cannot be saved without pickle"):
        held(model, optimizer)
    del optimizer.param_groups[0]["schedule"]
    optimizer.state[weight_of(model)]["old"] = [torch.ones(2), object()]
    with pytest.raises(TypeError, match=r"the optimizer's state 0\.weight/old/1 is a object, which cannot be saved"):
        held(model, optimizer)
    del optimizer.state[weight_of(model)]
    optimizer.state[weight_of(model)][3] = 1
    with pytest.raises(TypeError, match=r"state of 0\.weight has the key 3; allowed: text"):
        held(model, optimizer)
    del optimizer.state[weight_of(model)]
    optimizer.state["shared"] = {}  # type: ignore[index]
    with pytest.raises(TypeError, match="SGD keeps state that belongs to no parameter, under 'shared'"):
        held(model, optimizer)


def test_names_with_slashes_are_told_apart_or_refused() -> None:
    model = nn.Module()
    for name in ("a", "a/b"):
        model.register_parameter(name, nn.Parameter(torch.ones(2)))
    optimizer = SGD(model.parameters())
    one, other = model.parameters()
    optimizer.state[other]["c"] = torch.ones(2)
    assert [each.name for each in held(model, optimizer).tensors] == ["a/b/c"]
    optimizer.state[one]["b/c"] = torch.ones(2)
    with pytest.raises(ValueError, match="the state 'b/c' of a has a name like another's"):
        held(model, optimizer)
    optimizer.state[one].clear()
    optimizer.state[other] |= {"d": [torch.ones(2)], "d/0": torch.ones(2)}
    with pytest.raises(ValueError, match="two tensors of the optimizers' state come to be called a/b/d/0"):
        held(model, optimizer)


def test_a_list_of_tensors_of_a_sharded_parameter_is_refused_as_one() -> None:
    model = make_model()
    optimizer = SGD(model.parameters())
    optimizer.state[weight_of(model)]["old"] = [torch.ones(2)]
    whole = held_of_model(model).parameters
    cut = [replace(each, box=Box.flat(each.box.shape, 0, 1)) for each in whole]
    assert [each.kind for each in held_of_optimizers([optimizer], whole).tensors] == ["own"]
    with pytest.raises(TypeError, match=r"0\.weight/old/0 is a tensor in a list .* to the part of 0\.weight"):
        held_of_optimizers([optimizer], cut)


# --- plain values ---------------------------------------------------------------------------------------------------

keys = st.one_of(st.text(max_size=3), st.integers(), st.just("!"), st.tuples(st.integers(), st.text(max_size=2)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.frozensets(keys, max_size=3),
        st.sets(keys, max_size=3),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


@given(values)
def test_plain_values_come_back_from_json_as_what_they_were(value: Any) -> None:
    packed = json.loads(json.dumps(pack(value, "it"), allow_nan=False))
    assert shown(unpack(packed)) == shown(value)


def shown(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(repr, value))}"
    if isinstance(value, dict):
        pairs = ", ".join(f"{shown(key)}: {shown(each)}" for key, each in value.items())
        return f"{type(value).__name__}({pairs})"
    if isinstance(value, (list, tuple, deque)):
        return f"{type(value).__name__}({getattr(value, 'maxlen', None)}, {', '.join(map(shown, value))})"
    return repr(value)


def test_tensors_arrays_and_torchs_own_values_come_back() -> None:
    value = {
        "w": [torch.ones(2), numpy.arange(3)],
        "t": (torch.float16, torch.device("cpu"), torch.Size([1, 2])),
        "n": numpy.float32(0.5),
    }
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(value, "extra", tensors)))
    assert set(tensors) == {"extra/w/0", "extra/w/1"}
    back = unpack(packed, tensors)
    assert torch.equal(back["w"][0], torch.ones(2)) and isinstance(back["w"][1], numpy.ndarray)
    assert (back["t"], back["n"]) == (value["t"], 0.5)


def test_arrays_whatever_their_memory_is_like_come_back() -> None:
    whole = numpy.arange(12.0).reshape(3, 4)
    fixed = whole.copy()
    fixed.flags.writeable = False
    arrays = [whole[::-1], whole[:, ::-2], whole.T, whole[:0, ::-1], fixed, numpy.broadcast_to(whole, (2, 3, 4))]
    for array in arrays:
        tensors: dict[str, torch.Tensor] = {}
        back = unpack(pack(array, "it", tensors), tensors)
        assert back.dtype == array.dtype and numpy.array_equal(back, array)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [object()]}, "it/a/0 is a object, which cannot be saved without pickle; allowed: numbers"),
        (optim, "it is a module"),
        ("\ud800", "it holds half a character"),
        (numpy.array(["a"]), "it is an array of <U1"),
        ({"a": numpy.arange(3, dtype=">i4")}, "it/a is an array of >i4: .* byte order"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors come to be called 'it/a/b'"),
    ],
)
def test_values_that_are_not_plain_are_refused_where_they_stand(value: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        pack(value, "it", {})


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="or holds itself"):
        pack(value, "it")


@pytest.mark.parametrize(
    "packed",
    [
        {"!": "tensor", "of": "gone"},
        {"!": "tuple", "of": 3},
        {"!": "dtype", "of": "nn"},
        {"!": "os.system", "of": []},
        {"!": ["tuple"], "of": []},
        {"!": "counter", "of": [[1]]},
        {"!": "device", "of": "nowhere"},
    ],
)
def test_marks_that_were_not_made_here_are_refused(packed: Plain) -> None:
    with pytest.raises(ValueError, match="value"):
        unpack(packed)


# --- random states --------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.randn(3).tolist()]


def test_every_generator_goes_on_where_it_was() -> None:
    draws()  # of pairs of normal numbers, the second is kept
    saved = {name: tensor.clone() for name, tensor in random_tensors().items()}
    first = draws()
    assert draws() != first
    assert restore_random(saved) == []
    assert draws() == first
    assert {"python", "numpy", "torch"} <= set(saved)


def test_generators_that_are_not_here_are_named_and_strange_states_refused() -> None:
    assert restore_random({"cuda:99": torch.zeros(16, dtype=torch.uint8), "jax": torch.zeros(1)}) == ["cuda:99", "jax"]
    before = random.getstate()
    for name in ("python", "numpy", "torch"):
        with pytest.raises(ValueError, match=f"the random state '{name}' is not one that was saved"):
            restore_random({name: torch.zeros(3, dtype=torch.uint8)})
    assert random.getstate() == before


def test_a_torch_that_keeps_things_elsewhere_is_declined_by_name() -> None:
    strange: Any = object()
    with pytest.raises(ElasticError, match="keeps _non_persistent_buffers_set of a object in another place"):
        sharded.transient_buffers(strange)
