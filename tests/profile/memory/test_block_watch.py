"""What each block of a model keeps for the backward pass, beside what autograd is known to save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_ext.profile.memory.analysis import analyse, without_memory
from elastic_ext.profile.memory.live_bytes import BlockWatch, LiveBytes
from elastic_ext.profile.memory.peaks import PeakTally
from elastic_ext.profile.memory.questions import MemoryAnswer
from tests.profile.memory.test_model_memory import words
from tests.profile.memory.test_model_memory_process import question_of
from tests.support import memory_models
from tests.support.memory_models import LENGTH, WIDTH

SIZE = 32
NUMBER = 4  # bytes of a float
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Repeated(nn.Module):
    """Blocks in a row and a head, whose input autograd saves."""

    def __init__(self, make: Callable[[], nn.Module], *, call: Call = lambda block, given: block(given)) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(make() for _ in range(3)), nn.Linear(6, 5)
        self._call = call

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = self._call(block, given)
        scores: torch.Tensor = self.head(given)
        return scores


class Shifted(nn.Module):
    """Of what it gives nothing is saved here, nor by another one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(6))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + self.by


class Failing(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = given * given.exp()
        raise ArithmeticError(f"{found.shape}")


def with_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU())


def with_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))


def once_or_not_at_all(block: nn.Module, given: torch.Tensor) -> torch.Tensor:
    try:
        found: torch.Tensor = block(given)
    except ArithmeticError:
        return given
    return found


def twice(block: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = block(block(given))
    return found


def again(block: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(block, given, use_reentrant=False)
    return found


def kept(model: Repeated, size: int = SIZE) -> tuple[int, ...]:
    """Bytes of a micro-step by block; its passes are the whole of it."""
    tally = PeakTally()
    watch = BlockWatch(list(model.blocks), tally)
    with LiveBytes(tally):
        with watch:
            outputs = model(torch.zeros(size, 6))
        at_end = sum(tally.held_of_blocks.values())
        outputs.sum().backward()
        del outputs
    assert tally.block is None
    assert sum(watch.kept_bytes) in (at_end, 0) and sum(watch.kept_bytes) <= tally.peaks.forward_bytes
    assert set(tally.held_of_blocks.values()) <= {0}, "all of it is gone after the backward pass"
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    return watch.kept_bytes


@pytest.mark.parametrize(
    ("make", "call", "numbers"),
    [
        pytest.param(with_relu, once_or_not_at_all, [16 + 6] * 3, id="of ReLU what it gives, of Linear nothing"),
        pytest.param(with_gelu, once_or_not_at_all, [16 + 16 + 6] * 3, id="of GELU what it is given too"),
        pytest.param(Shifted, once_or_not_at_all, [0, 0, 6], id="an output that nobody needs is gone"),
        pytest.param(with_gelu, twice, [2 * (16 + 16 + 6)] * 3, id="two calls of a block add up"),
        pytest.param(with_gelu, again, [6] * 3, id="what is computed again is not kept"),
    ],
)
def test_blocks_keep_what_autograd_saves(make: Callable[[], nn.Module], call: Call, numbers: list[int]) -> None:
    expected = tuple(NUMBER * SIZE * number for number in numbers)
    assert kept(Repeated(make, call=call)) == expected
    with without_memory():
        assert kept(Repeated(make, call=call)) == expected


def test_a_block_that_raises_does_not_have_others_work_counted_as_its_own() -> None:
    model = Repeated(with_gelu, call=once_or_not_at_all)
    model.blocks[1] = Failing()
    each = NUMBER * SIZE * (16 + 16 + 6)
    assert kept(model) == (each, 0, each)


def test_where_a_block_is_left_out_nothing_is_told() -> None:
    model = Repeated(with_gelu)
    model._call = lambda block, given: given if block is model.blocks[1] else block(given)
    assert kept(model) == ()


def test_a_block_within_another_has_what_it_makes_itself() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.layer, self._inner = nn.Linear(6, 6), (inner,)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._inner[0](self.layer(given)).relu()
            return found

    model = Repeated(with_gelu, call=once_or_not_at_all)
    inner = model.blocks[0]
    model.blocks[1] = Outer(inner)
    each = NUMBER * SIZE * (16 + 16 + 6)
    last = each - NUMBER * SIZE * 6  # the output that relu alone was given is gone
    assert kept(model) == (each + last, NUMBER * SIZE * (6 + 6), each)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler asks for it
@pytest.mark.parametrize("of", ["each block", "the model"])
def test_compiled_blocks_compute_as_they_do_and_nothing_is_told_of_them(of: str) -> None:
    model = Repeated(with_gelu)
    if of == "the model":
        model.compile(backend="eager", fullgraph=True)
    else:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    assert kept(model) == ()


def test_the_analysis_tells_of_each_block_once_and_of_no_more_than_passes_take() -> None:
    answers: list[MemoryAnswer] = []
    blocks = tuple(f"layers.{number}" for number in range(4))
    question = question_of(
        "attention", memory_models.attention(), words(4), blocks=blocks, ratios=(0.5, 0.0), micro_batches=(4, 8)
    )
    analyse(question, answers.append)
    assert [each.problem for each in answers] == [None] * len(answers)
    (told,) = [each for each in answers if each.block_activation_bytes]
    assert told.passes is not None and (told.passes.micro_batch, told.passes.activation_checkpoint) == (4, 0.0)
    found = told.block_activation_bytes
    assert len(set(found)) == 1 and len(found) == 4, "blocks are alike"
    least = NUMBER * LENGTH * WIDTH * (3 + 4 + 4 + 2)  # heads, the network's two activations, both sums
    assert least < found[0] < 2 * least
    assert 0.5 * told.passes.forward_bytes < 4 * sum(found) <= told.passes.forward_bytes
    assert MemoryAnswer.from_json(told.to_json()) == told
