"""Batches that an ElasticDataLoader has pinned for a GPU."""

from __future__ import annotations

import pytest
import torch

from elastic_ext import ElasticDataLoader
from elastic_ext.config.elastic_config import ElasticConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned_while_the_config_says_so(num_workers: int) -> None:
    loader = ElasticDataLoader(torch.arange(400), 4, num_workers=num_workers, pin_memory=True)
    old, new = ElasticConfig.from_values({}), ElasticConfig.from_values({"dataloader.pin_memory": False})
    seen = []
    for number, batch in enumerate(loader):
        if number == 50:
            loader.apply(old, new)
        seen.append(batch.is_pinned())
        assert batch.tolist() == list(range(4 * number, 4 * number + 4))
        assert torch.equal(batch.cuda(non_blocking=True).cpu(), batch)
    assert seen[:50] == [True] * 50 and not any(seen[70:])
