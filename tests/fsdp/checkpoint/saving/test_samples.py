"""Samples tell tensors that were changed from those that were not, without anybody's counting."""

from __future__ import annotations

import pytest
import torch

from elastic_ext.fsdp.checkpoint.saving.staging import Samples

TENSORS = {
    "scalar": torch.tensor(1.0),
    "small": torch.ones(128, dtype=torch.bfloat16),
    "vector": torch.ones(129, dtype=torch.float64),
    "square": torch.ones(100, 100),
    "transposed": torch.ones(60, 70).t(),
    "channels last": torch.ones(4, 5, 6, 7).to(memory_format=torch.channels_last),
    "with gaps": torch.ones(1000, 3)[:, ::2],
    "with small gaps": torch.ones(20)[::2],
    "complex": torch.ones(40, 5, dtype=torch.complex64),
    "bool": torch.ones(300, dtype=torch.bool),
    "float8": torch.ones(300).to(torch.float8_e4m3fn),
    "NaN": torch.full((300,), torch.nan),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_changed_as_a_whole_is_named_and_no_other(name: str) -> None:
    tensors = [torch.empty(0), *(tensor.clone() for tensor in TENSORS.values())]
    samples = Samples(tensors)
    assert samples.changed() is None
    place = 1 + list(TENSORS).index(name)
    tensors[place].zero_()
    assert samples.changed() == place


def test_changes_to_a_part_of_a_tensor_are_found_wherever_they_lie() -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 256)
    for part in (weight > 1.5, slice(0, 100), slice(-40, None), (slice(None), slice(200, 230))):
        samples = Samples([weight])
        weight[part] = 0
        assert samples.changed() == 0


def test_of_a_small_tensor_each_element_is_looked_at() -> None:
    bias = torch.zeros(128)
    for place in range(128):
        samples = Samples([bias])
        bias[place] += 1
        assert samples.changed() == 0


@pytest.mark.parametrize("size", [129, 130, 136, 137, 1000, 1001, 4096])
def test_samples_lie_within_the_tensor(size: int) -> None:
    memory = torch.zeros(size + 64)
    samples = Samples([memory[:size]])
    memory[size:] = 1
    assert samples.changed() is None
    memory[: size // 8] = 1
    assert samples.changed() == 0
    samples = Samples([memory[:size]])
    memory[size - size // 4 : size] = 2
    assert samples.changed() == 0
