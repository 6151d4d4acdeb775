"""Blocks: the parts that a model repeats, found in models as people write them, named, and computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext.fsdp.blocks import RecomputeTrial, blocks_of, recompute, why_not_recompute


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.num_computed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_computed += 1
        result: torch.Tensor = x + self.linear(self.norm(x)).relu()
        return result


class Other(Block):
    pass


def _model(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def _blocks(number: int, kind: type[nn.Module] = Block) -> list[nn.Module]:
    return [kind() for _ in range(number)]


def _names(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    by_identity = {id(module): name for name, module in model.named_modules()}
    return [by_identity[id(block)] for block in blocks]


def _transformers() -> nn.Module:
    """As ``LlamaForCausalLM`` is laid out."""
    inner = _model(embed_tokens=nn.Embedding(9, 4), layers=nn.ModuleList(_blocks(3)), norm=nn.LayerNorm(4))
    return _model(model=inner, lm_head=nn.Linear(4, 9, bias=False))


def _nano_gpt() -> nn.Module:
    """As nanoGPT is: a dict of modules, one of which is the list."""
    parts = {"wte": nn.Embedding(9, 4), "drop": nn.Dropout(), "h": nn.ModuleList(_blocks(2)), "ln_f": nn.LayerNorm(4)}
    return _model(transformer=nn.ModuleDict(parts), lm_head=nn.Linear(4, 9))


def _resnet() -> nn.Module:
    """As torchvision's: a stage is a Sequential; one of them has a single block."""
    return _model(
        conv1=nn.Conv2d(3, 4, 3),
        layer1=nn.Sequential(*_blocks(2)),
        layer2=nn.Sequential(*_blocks(3)),
        layer3=nn.Sequential(*_blocks(1)),
        fc=nn.Linear(4, 2),
    )


# --- found ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (_transformers, ["model.layers.0", "model.layers.1", "model.layers.2"]),
        (_nano_gpt, ["transformer.h.0", "transformer.h.1"]),
        (_resnet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2", "layer3.0"]),
        (
            lambda: _model(encoder=_model(layers=nn.ModuleList(_blocks(2))), decoder=nn.ModuleList(_blocks(2, Other))),
            ["encoder.layers.0", "encoder.layers.1", "decoder.0", "decoder.1"],
        ),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*_blocks(2)), nn.Linear(4, 9)), ["1.0", "1.1"]),
        (lambda: _model(h=nn.ModuleDict({"0": Block(), "1": Block()})), ["h.0", "h.1"]),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 3, enable_nested_tensor=False),
            ["layers.0", "layers.1", "layers.2"],
        ),
        (
            lambda: nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
        ),
    ],
)
def test_repeated_blocks_are_found_in_the_order_of_the_model(model: Callable[[], nn.Module], names: list[str]) -> None:
    made = model()
    assert _names(made, blocks_of(made)) == names


def test_the_outermost_of_nested_lists_are_the_blocks() -> None:
    stages = nn.ModuleList(_model(blocks=nn.ModuleList(_blocks(2))) for _ in range(2))
    model = _model(stages=stages)
    assert _names(model, blocks_of(model)) == ["stages.0", "stages.1"]


def test_lists_in_a_list_are_looked_into_where_they_differ() -> None:
    model = _model(stages=nn.ModuleList([nn.ModuleList(_blocks(2)), nn.Sequential(*_blocks(2))]))
    assert _names(model, blocks_of(model)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_lists_of_several_experts_within_blocks_are_part_of_these() -> None:
    layers = nn.ModuleList(_model(gate=nn.Linear(4, 2), experts=nn.ModuleList(_blocks(2))) for _ in range(3))
    model = _model(layers=layers)
    assert _names(model, blocks_of(model)) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        lambda: _model(heads=nn.ModuleList(nn.Linear(3, 3) for _ in range(4))),
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 9)),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        lambda: nn.Sequential(nn.Embedding(9, 4), Block(), Other(), nn.Linear(4, 9)),
        lambda: _model(layers=nn.ModuleList([Block(), Other()])),
        lambda: _model(drops=nn.ModuleList(nn.Sequential(nn.Dropout(), nn.ReLU()) for _ in range(3))),
        lambda: _model(first=Block(), second=Block()),
    ],
)
def test_what_repeats_nothing_has_no_blocks(model: Callable[[], nn.Module]) -> None:
    assert blocks_of(model()) == []


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: nn.Sequential(nn.Embedding(9, 4), Block(), nn.Linear(4, 9)), ["1"]),
        (lambda: nn.Sequential(nn.Embedding(9, 4), Block(), Block(), nn.Linear(4, 9)), ["1", "2"]),
        (lambda: _model(layers=nn.ModuleList(_blocks(1)), head=nn.Linear(4, 9)), ["layers.0"]),
        (
            lambda: _model(transformer=nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList(_blocks(1))})),
            ["transformer.h.0"],
        ),
        (
            lambda: _model(encoder=nn.ModuleList(_blocks(1)), decoder=nn.ModuleList([Other()])),
            [
                "encoder.0",
                "decoder.0",
            ],
        ),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False),
            ["layers.0"],
        ),
        # A list of one that holds a list of several, or of one, is no block; what it holds is.
        (lambda: nn.Sequential(_model(layers=nn.ModuleList(_blocks(2)))), ["0.layers.0", "0.layers.1"]),
        (lambda: nn.ModuleDict({"net": _model(layers=nn.ModuleList(_blocks(1)))}), ["net.layers.0"]),
        # Beside repeated ones, one of another class is a head, say.
        (lambda: _model(layers=nn.ModuleList(_blocks(2)), head=nn.Sequential(Other())), ["layers.0", "layers.1"]),
    ],
)
def test_one_block_of_its_class_in_a_list_is_found_too(model: Callable[[], nn.Module], names: list[str]) -> None:
    made = model()
    assert _names(made, blocks_of(made)) == names


def test_a_block_that_several_others_are_like_counts_with_what_it_holds() -> None:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8)

    lone = block()
    lone.add_module("experts", nn.ModuleList(_blocks(1)))
    model = _model(stage1=nn.ModuleList([block(), block()]), stage2=nn.ModuleList([lone]))
    assert _names(model, blocks_of(model)) == ["stage1.0", "stage1.1", "stage2.0"]


def test_what_has_no_parameters_does_not_keep_a_list_from_being_one_of_blocks() -> None:
    model = _model(layers=nn.Sequential(Block(), nn.Dropout(), Block(), nn.Identity()))
    assert _names(model, blocks_of(model)) == ["layers.0", "layers.2"]


def test_a_block_that_comes_twice_is_one() -> None:
    block = Block()
    model = _model(layers=nn.ModuleList([block, Block(), block]))
    assert _names(model, blocks_of(model)) == ["layers.0", "layers.1"]


def test_the_model_itself_may_be_the_list() -> None:
    model = nn.Sequential(*_blocks(3))
    assert _names(model, blocks_of(model)) == ["0", "1", "2"]


# --- given ----------------------------------------------------------------------------------------------------------


def test_a_class_gives_all_of_it_but_what_lies_within_another() -> None:
    model = _model(first=Block(), rest=nn.ModuleList([nn.Sequential(Other(), Block())]))
    assert _names(model, blocks_of(model, Block)) == ["first", "rest.0.0", "rest.0.1"]
    assert _names(model, blocks_of(model, Other)) == ["rest.0.0"]
    nested = _model(outer=nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    assert _names(nested, blocks_of(nested, nn.Sequential)) == ["outer"]
    single = nn.Sequential(nn.Embedding(9, 4), Block(), nn.Linear(4, 9))
    assert _names(single, blocks_of(single, Block)) == _names(single, blocks_of(single, ["1"])) == ["1"]


def test_names_give_those_modules_in_the_order_of_the_model() -> None:
    model = _transformers()
    names = ["lm_head", "model.layers.1", "model.embed_tokens"]
    assert _names(model, blocks_of(model, names)) == ["model.embed_tokens", "model.layers.1", "lm_head"]
    assert blocks_of(model, []) == []


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (nn.Conv2d, "units is the class Conv2d, and the model has no module of it with parameters"),
        (nn.ModuleDict, "units is the class ModuleDict, and the model has no module of it"),
        (["model.layers.9"], r"units has 'model.layers.9', which is no module within the model; see model.named_mod"),
        ([""], "units has '', which is no module within the model"),
        (["model.norm.weight"], "units has 'model.norm.weight', which is no module within the model"),
        ("model.layers.0", "units is 'model.layers.0'; allowed: a class of modules, a list of names of modules, or"),
        ([Block()], "allowed: a class of modules, a list of names of modules, or None"),
        (int, "units is <class 'int'>; allowed: a class of modules, a list of names"),
        (3, "units is 3; allowed: a class of modules, a list of names"),
        (
            ["model.layers.0.norm", "model.layers.0"],
            "has 'model.layers.0' and 'model.layers.0.norm', which lies within",
        ),
    ],
)
def test_what_names_no_blocks_is_refused(units: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        blocks_of(_transformers(), units)


# --- computed again -------------------------------------------------------------------------------------------------


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _pass(model: nn.Module) -> tuple[list[int], list[torch.Tensor]]:
    """How often each block is computed in a pass, and the gradients."""
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.num_computed = 0
    model.zero_grad()
    x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    model(x).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [block.num_computed for block in blocks], gradients


def test_a_share_of_blocks_is_computed_again_and_hooks_are_put_on_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*_blocks(4))
    blocks, names = blocks_of(model), [name for name, _ in model.named_parameters()]
    _, expected = _pass(model)
    num_hooks = []
    for ratio, counts in [
        (0.0, [1, 1, 1, 1]),
        (0.5, [1, 2, 1, 2]),
        (1.0, [2, 2, 2, 2]),
        (0.25, [1, 1, 1, 2]),
        (0.0, [1, 1, 1, 1]),
        (1.0, [2, 2, 2, 2]),
    ]:
        recompute(blocks, ratio)
        computed, gradients = _pass(model)
        assert computed == counts
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
        num_hooks.append(_num_hooks(model))
    assert num_hooks[0] == 0
    assert num_hooks[2:] == [num_hooks[2]] * 4
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


class Cache:
    """What a block appends its keys to, and attends to all of."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def grow(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


class Attending(nn.Module):
    """A block with most of what a pass may change: a cache, a counter, a batch norm, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.num_passes = 0

    def forward(self, x: torch.Tensor, cache: Any = None, has_bias: bool = False) -> torch.Tensor:
        self.num_passes += 1
        keys = self.linear(self.norm(x))
        if cache is not None:
            keys = cache.grow(keys)
        scores = x @ keys.t()
        if has_bias:
            scores = scores + torch.ones(len(x), len(x))
        result: torch.Tensor = x + self.dropout(scores.softmax(-1) @ keys)
        return result


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: torch.Tensor, *, make: Callable[[], Any] = lambda: None, has_bias: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, cache=make(), has_bias=has_bias)
        return x


def test_a_trial_leaves_nothing_behind() -> None:
    found = []
    for is_tried in (False, True):
        torch.manual_seed(0)
        model, called = Language(), []
        for part in model.modules():
            part.register_forward_hook(lambda module, inputs, output: called.append(type(module).__name__))  # noqa: B023
        caches: list[Cache] = []
        num_hooks = _num_hooks(model)
        trial = RecomputeTrial(model, blocks_of(model)) if is_tried else None
        with torch.no_grad():
            model(torch.randn(3, 4))  # which says nothing of backward passes
        assert trial is None or not trial.is_over

        def make(caches: list[Cache] = caches) -> Cache:
            caches.append(Cache())
            return caches[-1]

        output = model(torch.randn(3, 4), make=make)
        output.square().sum().backward()
        assert trial is None or trial.is_over
        assert _num_hooks(model) == num_hooks
        gradients = [part.grad for part in model.parameters()]
        passes = [block.num_passes for block in model.blocks]
        found.append((gradients, [*model.buffers()], [each.keys for each in caches], torch.rand(1)))
        assert passes == [2, 2]
        assert len(called) == 2 * (1 + 2 * 4)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, None),
        (
            {"make": Cache},
            "it keeps a torch.float32 of shape (4, 3) the first time and a torch.float32 of shape (4, 6)",
        ),
        ({"make": Cache, "has_bias": True}, "the second time it raises RuntimeError: The size of tensor a (6)"),
        ({"make": lambda: (each for each in range(3))}, None),  # not to be copied
    ],
)
def test_what_is_not_the_same_when_it_is_computed_again_is_found_in_a_pass(given: Any, says: str | None) -> None:
    model = Language()
    if "make" in given and given["make"] is not Cache:
        model.blocks[0].forward = model.blocks[1].forward = lambda x, cache, has_bias: x * x
    trial = RecomputeTrial(model, blocks_of(model))
    model(torch.randn(3, 4, requires_grad=True), **given)
    assert trial.is_over
    if says is None:
        assert trial.why_not is None
    else:
        assert trial.why_not is not None
        assert says in trial.why_not
        assert "a block, Attending, computes something else when it is computed again" in trial.why_not
        assert "use_cache=False (model.config.use_cache = False)" in trial.why_not


def test_a_trial_that_raises_does_so_once_and_before_the_pass() -> None:
    model = Language()
    RecomputeTrial(model, blocks_of(model), raises=True)
    with pytest.raises(ValueError, match="computes something else when it is computed again"):
        model(torch.randn(3, 4), make=Cache)
    assert model.blocks[0].num_passes == 0
    model(torch.randn(3, 4), make=Cache)


def test_compiled_models_are_not_tried() -> None:
    model = Language()
    model.blocks[0].compile(backend="eager")
    assert RecomputeTrial(model, blocks_of(model)).is_over


def test_a_copy_of_a_model_that_is_computed_again_is_trained_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*_blocks(2))
    recompute(blocks_of(model), 1.0)
    computed, expected = _pass(model)
    assert computed == [2, 2]
    other = copy.deepcopy(model)
    _, gradients = _pass(other)
    assert all(torch.equal(one, another) for one, another in zip(gradients, expected, strict=True))
    recompute(blocks_of(other), 0.0)
    assert _pass(other)[0] == [1, 1]
    assert _pass(model)[0] == [2, 2]
    recompute(blocks_of(other), 1.0)
    recompute(blocks_of(model), 0.0)
    assert (_pass(model)[0], _pass(other)[0]) == ([1, 1], [2, 2])


class Normed(nn.Module):
    """A block that keeps statistics of its batches, and a count of its passes in a buffer that is another each time."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("passes", torch.zeros(1))
        self.register_buffer("none", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        result: torch.Tensor = self.norm(self.inner(inputs)).relu()
        return result


@pytest.mark.parametrize("is_copied", [False, True])
def test_buffers_that_a_pass_changes_are_changed_once_where_it_is_computed_again(is_copied: bool) -> None:
    torch.manual_seed(0)
    usual = nn.Sequential(*(Normed() for _ in range(3)))
    again = copy.deepcopy(usual)
    recompute(blocks_of(again), 1.0)
    again = copy.deepcopy(again) if is_copied else again
    held = [id(buffer) for name, buffer in again.named_buffers() if "norm" in name]
    for _ in range(3):
        inputs = torch.randn(4, 8)
        for model in (usual, again):
            for part in (inputs[:2], inputs[2:]):
                model(part).square().sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(usual.buffers(), again.buffers(), strict=True))
    assert usual.state_dict().keys() == again.state_dict().keys()
    for one, other in zip(usual.parameters(), again.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert held == [id(buffer) for name, buffer in again.named_buffers() if "norm" in name]
    counts = dict(again.named_buffers())
    assert int(counts["0.norm.num_batches_tracked"]) == int(counts["0.passes"]) == 6


def test_what_stands_against_computing_again_is_told() -> None:
    words = "activation_checkpoint is given, and no repeated blocks were found; name them with units="
    model = nn.Sequential(*_blocks(2))
    assert why_not_recompute(model, [], 0.5) == words
    assert why_not_recompute(model, [], 0.0) is None
    assert why_not_recompute(model, blocks_of(model), 0.5) is None


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _outer(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("compiled", [_in_place, _outer])
def test_blocks_are_computed_again_where_each_is_compiled_and_not_all_in_one(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    words = "compiled as parts of a larger module, where torch cannot compute them again; compile each by itself"
    whole = compiled(_transformers())
    assert words in str(why_not_recompute(whole, blocks_of(whole), 0.5))
    assert why_not_recompute(whole, blocks_of(whole), 0.0) is None
    for each in (
        nn.Sequential(nn.Linear(4, 4), *(compiled(block) for block in _blocks(2))),
        nn.Sequential(compiled(nn.Sequential(nn.Linear(4, 4))), nn.Sequential(*_blocks(2))),
    ):
        assert len(blocks_of(each)) == 2
        assert why_not_recompute(each, blocks_of(each), 0.5) is None
